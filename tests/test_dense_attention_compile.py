"""The dense attention ops under Inductor: one graph for every size, no copy of a cache, buffers in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from seeded import int32, normal
from torch._dynamo.utils import ReinplaceCounters
from torch._inductor.utils import run_and_get_code

import mla_ops  # noqa: F401  registers the ops
from mla_ops.formats import allocate_cache
from mla_ops.testing.checks import (
    assert_all_same,
    assert_same_bits,
    large_allocations,
    record_calls,
    run_without_recompiling,
)

mla = torch.ops.mla

BLOCK_SIZE = 16
NUM_BLOCKS = 32
HEADS = 2
SCALE = 0.1


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def new_cache(cache_format: str) -> torch.Tensor:
    cache = allocate_cache(cache_format, NUM_BLOCKS, BLOCK_SIZE)
    slots = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
    mla.concat_and_cache(normal(1, len(slots), 512), normal(2, len(slots), 64), cache, slots, cache_format)
    return cache


def write(cache: torch.Tensor, step: tuple[torch.Tensor, ...], fmt: str) -> None:
    kv_c, k_pe, slots, *_ = step
    mla.concat_and_cache(kv_c, k_pe, cache, slots, fmt)


def attend(cache: torch.Tensor, step: tuple[torch.Tensor, ...], fmt: str) -> Any:
    *_, q, table, own, lens = step
    return mla.paged_attention(q, cache, table, own, lens, SCALE, fmt)


def write_then_attend(cache: torch.Tensor, step: tuple[torch.Tensor, ...], fmt: str) -> Any:
    write(cache, step, fmt)
    return attend(cache, step, fmt)


def attend_write_attend(cache: torch.Tensor, step: tuple[torch.Tensor, ...], fmt: str) -> Any:
    # the first read is used after the second: Inductor moves it down, below the write, and must not clone for it
    before = attend(cache, step, fmt)
    write(cache, step, fmt)
    after = attend(cache, step, fmt)
    return [result * 2 for result in before], after


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("cache_format", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("program", [write_then_attend, attend_write_attend], ids=lambda program: program.__name__)
def test_no_copy_of_a_cache_and_the_bits_of_eager(
    program: Callable[..., Any], cache_format: str, dynamic: bool | None
) -> None:
    own, lens = torch.tensor([0, 0, 1, 1], dtype=torch.int32), torch.tensor([5, 6, 40, 41], dtype=torch.int32)
    written = normal(5, 4, 512), normal(6, 4, 64), torch.tensor([30, 31, 32, 33])
    step = (*written, normal(7, 4, HEADS, 576), int32(8, NUM_BLOCKS, 2, 3), own, lens)
    eager_cache = new_cache(cache_format)
    cache = eager_cache.clone()
    expected = program(eager_cache, step, cache_format)
    compiled = torch.compile(program, fullgraph=True, dynamic=dynamic)
    with record_calls() as calls:
        actual, codes = run_and_get_code(compiled, cache, step, cache_format)
    assert_all_same(actual, expected, "compiled against eager, output")
    assert_same_bits(cache, eager_cache, "compiled against eager, kv_cache")
    assert ReinplaceCounters.get_total_missed() == 0
    # with dynamic shapes the row width is all that can be seen of a cache's size
    assert large_allocations(codes, cache[:1, :1].numel() * (1 if dynamic else BLOCK_SIZE)) == []
    for op, arguments in calls:
        assert arguments["kv_cache"].data_ptr() == cache.data_ptr(), f"{op} got a copy of the cache"


def test_out_overloads_write_their_buffers_in_place() -> None:
    cache, table = new_cache("bf16"), int32(8, NUM_BLOCKS, 2, 3)
    own, lens = torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([9, 20, 21], dtype=torch.int32)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    latent, q, k, v = (
        normal(1, 3, HEADS, 576),
        normal(2, 3, HEADS, 192),
        normal(3, 3, HEADS, 192),
        normal(4, 3, HEADS, 128),
    )
    parts = normal(5, 4, 3, HEADS, 128), torch.randn(4, 3, HEADS)

    def step(b: dict[str, torch.Tensor]) -> None:
        mla.paged_attention.out(latent, cache, table, own, lens, SCALE, "bf16", out=b["paged"], lse=b["paged_lse"])
        mla.prefill_attention.out(q, k, v, starts, starts, 2, 2, SCALE, out=b["prefill"], lse=b["prefill_lse"])
        mla.merge_attention_states.stacked_out(*parts, out=b["merged"], lse=b["merged_lse"])

    def new_buffers() -> dict[str, torch.Tensor]:
        widths = {"paged": 512, "prefill": 128, "merged": 128}
        buffers = {name: torch.full((3, HEADS, width), 7.0).bfloat16() for name, width in widths.items()}
        return buffers | {f"{name}_lse": torch.full((3, HEADS), 7.0) for name in widths}

    eager, compiled = new_buffers(), new_buffers()
    step(eager)
    with record_calls() as calls:
        _, codes = run_and_get_code(torch.compile(step, fullgraph=True), compiled)
    assert_all_same(compiled, eager, "compiled against eager, buffer")
    assert ReinplaceCounters.get_total_missed() == 0
    assert large_allocations(codes, 3 * HEADS * 128) == []
    passed = {tensor.data_ptr() for _, arguments in calls for tensor in arguments.values() if torch.is_tensor(tensor)}
    for name, buffer in compiled.items():
        assert buffer.data_ptr() in passed, f"the kernel got a copy of {name}"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_every_batch_of_a_prefill(backend: str) -> None:
    """Tokens, keys and requests, from none to many."""

    def prefill(q: Any, k: Any, v: Any, starts: Any, k_starts: Any) -> Any:
        new = mla.prefill_attention(q, k, v, starts, k_starts, q.shape[0], k.shape[0], SCALE)
        old = mla.prefill_attention(q, k, v, starts, k_starts, 64, 64, SCALE, causal=False)
        return mla.merge_attention_states(*new, *old)

    calls = []
    for num_tokens, num_kv, num_requests in ((5, 9, 2), (1, 1, 1), (64, 33, 33), (2, 0, 0), (0, 7, 3), (33, 64, 5)):
        tensors = normal(1, num_tokens, HEADS, 192), normal(2, num_kv, HEADS, 192), normal(3, num_kv, HEADS, 128)
        starts = torch.linspace(0, num_tokens, num_requests + 1).int()
        calls.append((*tensors, starts, torch.linspace(0, num_kv, num_requests + 1).int()))
    actual = run_without_recompiling(
        prefill, calls, unbacked=lambda *args: [(tensor, 0) for tensor in args], backend=backend
    )
    assert_all_same(actual, [prefill(*call) for call in calls], "compiled against eager, output")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_every_batch_of_a_decode(backend: str) -> None:
    """Tokens, requests and the width of a block table at capacity."""
    cache = new_cache("fp8_ds_mla")

    def decode(q: Any, table: Any, own: Any, lens: Any) -> Any:
        return mla.paged_attention(q, cache, table, own, lens, SCALE, "fp8_ds_mla")

    calls = []
    for num_tokens, num_requests, width in ((5, 2, 3), (1, 1, 1), (64, 33, 2), (2, 0, 4), (0, 5, 0), (33, 64, 17)):
        tokens = int32(2, max(num_requests, 1), num_tokens), int32(3, 50, num_tokens)
        table = int32(4, NUM_BLOCKS, 70, 20)[:num_requests, :width]
        calls.append((normal(1, num_tokens, HEADS, 576), table, *tokens))
    actual = run_without_recompiling(
        decode,
        calls,
        unbacked=lambda q, table, own, lens: [(q, 0), (table, 0), (table, 1), (own, 0), (lens, 0)],
        backend=backend,
    )
    assert_all_same(actual, [decode(*call) for call in calls], "compiled against eager, output")


def test_one_graph_for_any_number_of_parts() -> None:
    def merge(outs: Any, lses: Any) -> Any:
        return mla.merge_attention_states.stacked(outs, lses)

    calls = [(normal(1, n, 3, HEADS, 128), torch.randn(n, 3, HEADS)) for n in (2, 1, 0, 7)]
    actual = run_without_recompiling(merge, calls, unbacked=lambda outs, lses: [(outs, 0), (lses, 0)])
    assert_all_same(actual, [merge(*call) for call in calls], "compiled against eager, output")
