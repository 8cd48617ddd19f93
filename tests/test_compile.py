"""The ops under Inductor: one graph for every size, no copy of a cache, the bits of eager.

The cache is always a graph input and a whole tensor, which is what the docs tell users to pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import ReinplaceCounters
from torch._inductor.utils import run_and_get_code

import mla_ops  # noqa: F401  registers the ops
from mla_ops.formats import FORMATS, allocate_cache
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
TOPK = 8
SCALE = 0.1
SIZES = (5, 1, 64, 2, 0, 33)


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Step:
    """Tensors of one step of one layer. Slots start at `first_slot`, so that two steps write different rows."""

    def __init__(self, num_tokens: int, cache_format: str, first_slot: int = 0) -> None:
        generator = torch.Generator().manual_seed(num_tokens * 1000 + first_slot)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(torch.bfloat16)

        entry = FORMATS[cache_format]
        self.kv_c, self.k_pe = normal(num_tokens, entry.latent_dim), normal(num_tokens, 64)
        self.q = normal(num_tokens, HEADS, entry.head_dims[0])
        self.slots = torch.arange(num_tokens) + first_slot
        high = NUM_BLOCKS * BLOCK_SIZE
        self.indices = torch.randint(-1, high, (num_tokens, TOPK), dtype=torch.int32, generator=generator)
        self.cache_format = cache_format

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.kv_c, self.k_pe, self.slots, self.q, self.indices


def new_cache(cache_format: str) -> torch.Tensor:
    """A cache whose every row was written, so that a read of the wrong row shows."""
    cache = allocate_cache(cache_format, NUM_BLOCKS, BLOCK_SIZE)
    step = Step(NUM_BLOCKS * BLOCK_SIZE, cache_format)
    mla.concat_and_cache(step.kv_c, step.k_pe, cache, step.slots, cache_format)
    return cache


def write(cache: torch.Tensor, step: tuple[torch.Tensor, ...], cache_format: str) -> None:
    mla.concat_and_cache(step[0], step[1], cache, step[2], cache_format)


def attend(cache: torch.Tensor, step: tuple[torch.Tensor, ...], cache_format: str) -> tuple[torch.Tensor, ...]:
    return mla.paged_sparse_attention(step[3], cache, step[4], SCALE, cache_format)


def gather(cache: torch.Tensor, cache_format: str) -> torch.Tensor:
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    lens, starts = torch.tensor([5, 8], dtype=torch.int32), torch.tensor([0, 5, 13], dtype=torch.int32)
    return mla.gather_cache(cache, table, lens, starts, 13, cache_format)


def used_late(early: Any, late: Any) -> Any:
    """Uses the results of an early read after a late one.

    Inductor moves a read down to where its result is used, below the writes between: that is when it would clone.
    """
    # twice anything is exact, however Inductor computes it
    return [result * 2 for result in early], late


def write_then_attend(cache: torch.Tensor, first: Any, second: Any, fmt: str) -> Any:
    write(cache, first, fmt)
    return attend(cache, first, fmt)


def write_attend_write_attend(cache: torch.Tensor, first: Any, second: Any, fmt: str) -> Any:
    # prefill and decode handled apart: the second pair depends on nothing of the first but the cache
    write(cache, first, fmt)
    one = attend(cache, first, fmt)
    write(cache, second, fmt)
    return used_late(one, attend(cache, second, fmt))


def attend_then_write(cache: torch.Tensor, first: Any, second: Any, fmt: str) -> Any:
    out = attend(cache, first, fmt)
    write(cache, first, fmt)
    return used_late(out, first[3:4])


def attend_write_attend(cache: torch.Tensor, first: Any, second: Any, fmt: str) -> Any:
    before = attend(cache, first, fmt)
    write(cache, first, fmt)
    return used_late(before, attend(cache, first, fmt))


def write_then_gather(cache: torch.Tensor, first: Any, second: Any, fmt: str) -> Any:
    write(cache, first, fmt)
    return gather(cache, fmt)


def gather_write_gather(cache: torch.Tensor, first: Any, second: Any, fmt: str) -> Any:
    before = gather(cache, fmt)
    write(cache, first, fmt)
    return used_late([before], [gather(cache, fmt)])


def write_of_what_was_attended(cache: torch.Tensor, first: Any, second: Any, fmt: str) -> Any:
    # two layers of a model that share a cache: the second write depends on the first attention
    write(cache, first, fmt)
    out, _ = attend(cache, first, fmt)
    mla.concat_and_cache(out.mean(1)[:, : first[0].shape[1]], first[1], cache, second[2][: first[2].shape[0]], fmt)
    return attend(cache, first, fmt)


PROGRAMS = [
    write_then_attend,
    write_attend_write_attend,
    attend_then_write,
    attend_write_attend,
    write_then_gather,
    gather_write_gather,
    write_of_what_was_attended,
]
# each of the others is the beginning or the end of one of these
LONGEST = [write_attend_write_attend, attend_write_attend, gather_write_gather, write_of_what_was_attended]
longest_programs = pytest.mark.parametrize("program", LONGEST, ids=lambda program: program.__name__.replace("_", " "))


def run_eager_and_compiled(
    program: Callable[..., Any], cache_format: str, **compile_options: Any
) -> tuple[torch.Tensor, list[str], list[tuple[str, dict[str, Any]]]]:
    """Runs both, compares all bits, and returns the compiled run's cache, generated code and calls of lowerings."""
    first, second = Step(4, cache_format).tensors(), Step(4, cache_format, first_slot=40).tensors()
    eager_cache = new_cache(cache_format)
    cache = eager_cache.clone()
    expected = program(eager_cache, first, second, cache_format)
    compiled = torch.compile(program, fullgraph=True, **compile_options)
    with record_calls() as calls:
        actual, codes = run_and_get_code(compiled, cache, first, second, cache_format)
    assert_all_same(actual, expected, "compiled against eager, output")
    assert_same_bits(cache, eager_cache, "compiled against eager, kv_cache")
    assert codes
    return cache, codes, calls


def assert_no_copy(cache: torch.Tensor, codes: list[str], calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert ReinplaceCounters.get_total_missed() == 0
    one_block = cache[0].numel()
    assert large_allocations(codes, one_block) == [], "a copy of the cache in the generated code"
    for op, arguments in calls:
        assert arguments["kv_cache"].data_ptr() == cache.data_ptr(), f"{op} got a copy of the cache"


# Inductor decides by schemas what to copy, and all formats share these
@pytest.mark.parametrize(
    ("program", "cache_format"),
    [
        *((program, "bf16") for program in PROGRAMS),
        *((write_attend_write_attend, cache_format) for cache_format in ("fp8_ds_mla", "fp8_ds_mla_v4")),
    ],
)
def test_no_copy_of_a_cache_and_the_bits_of_eager(program: Callable[..., Any], cache_format: str) -> None:
    assert_no_copy(*run_eager_and_compiled(program, cache_format))


@longest_programs
def test_no_copy_of_a_cache_with_dynamic_shapes(program: Callable[..., Any]) -> None:
    cache, codes, calls = run_eager_and_compiled(program, "fp8_ds_mla", dynamic=True)
    # sizes are symbols here, so the row width is all that can be seen of a cache's size, and the pointers tell the rest
    assert_no_copy(cache[:1, :1], codes, [])
    for op, arguments in calls:
        assert arguments["kv_cache"].data_ptr() == cache.data_ptr(), f"{op} got a copy of the cache"


@longest_programs
def test_no_copy_of_a_cache_that_is_a_module_buffer(program: Callable[..., Any]) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kv_cache", new_cache("fp8_ds_mla"))

        def forward(self, first: Any, second: Any) -> Any:
            return program(self.kv_cache, first, second, "fp8_ds_mla")

    layer, eager_cache = Layer(), new_cache("fp8_ds_mla")
    first, second = Step(4, "fp8_ds_mla").tensors(), Step(4, "fp8_ds_mla", first_slot=40).tensors()
    expected = program(eager_cache, first, second, "fp8_ds_mla")
    with record_calls() as calls:
        actual, codes = run_and_get_code(torch.compile(layer, fullgraph=True), first, second)
    assert_all_same(actual, expected, "compiled against eager, output")
    assert_same_bits(layer.kv_cache, eager_cache, "compiled against eager, kv_cache")
    assert_no_copy(layer.kv_cache, codes, calls)


@pytest.mark.parametrize("extra_format", ["fp8_ds_mla_v4", "bf16"])
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_no_copy_of_either_of_two_caches(extra_format: str, dynamic: bool | None) -> None:
    """Both written and attended to, twice: a window in V4's layout and compressed tokens in pages of their own."""

    def two_caches(window: torch.Tensor, extra: torch.Tensor, steps: Any) -> Any:
        outputs = []
        for step, extra_keys in steps:
            write(window, step, "fp8_ds_mla_v4")
            mla.concat_and_cache(*extra_keys, extra, step[2], extra_format)
            outputs.append(
                mla.paged_sparse_attention.extra(
                    step[3], window, step[4], SCALE, "fp8_ds_mla_v4", extra, step[4], extra_format
                )
            )
        return used_late(*outputs)

    extra = allocate_cache(extra_format, 100, 2, head_dim=512)
    fill = Step(200, "fp8_ds_mla_v4")
    mla.concat_and_cache(fill.kv_c, fill.k_pe, extra, fill.slots, extra_format)
    steps = []
    for first_slot in (0, 40):
        step = Step(4, "fp8_ds_mla_v4", first_slot=first_slot).tensors()
        steps.append((step, (step[0] * 2, step[1] * 2)))
    eager = new_cache("fp8_ds_mla_v4"), extra.clone()
    caches = tuple(cache.clone() for cache in eager)
    expected = two_caches(*eager, steps)
    with record_calls() as calls:
        actual, codes = run_and_get_code(torch.compile(two_caches, fullgraph=True, dynamic=dynamic), *caches, steps)
    assert_all_same(actual, expected, "compiled against eager, output")
    assert_all_same(caches, eager, "compiled against eager, cache")
    assert ReinplaceCounters.get_total_missed() == 0
    assert large_allocations(codes, extra[:8].numel()) == []
    pointers = {cache.data_ptr() for cache in caches}
    for op, arguments in calls:
        for name in ("kv_cache", "extra_kv_cache"):
            assert name not in arguments or arguments[name].data_ptr() in pointers, f"{op} got a copy of {name}"
    assert {op for op, _ in calls} == {"concat_and_cache", "paged_sparse_attention.extra"}


@pytest.mark.parametrize("program", [write_then_attend, attend_then_write, write_attend_write_attend])
def test_order_of_reads_and_writes_holds_in_a_graph_compiled_for_training(program: Callable[..., Any]) -> None:
    # Inductor does not sort for locality there, and loses reads before an opaque write that are native torch ops
    cache, first, second = new_cache("bf16"), Step(4, "bf16").tensors(), Step(4, "bf16", first_slot=40).tensors()
    eager_cache = cache.clone()
    weight = torch.nn.Parameter(torch.ones(512))

    def scaled(cache: torch.Tensor) -> Any:
        outputs = torch.utils._pytree.tree_leaves(program(cache, first, second, "bf16"))
        return [output * weight for output in outputs if output.shape[-1] == 512]

    assert_all_same(torch.compile(scaled, fullgraph=True)(cache), scaled(eager_cache), "compiled against eager, output")
    assert_same_bits(cache, eager_cache, "compiled against eager, kv_cache")


def test_out_overloads_write_the_persistent_buffers_themselves() -> None:
    cache, step = new_cache("fp8_ds_mla"), Step(4, "fp8_ds_mla").tensors()
    out, lse = torch.full((4, HEADS, 512), 7.0, dtype=torch.bfloat16), torch.full((4, HEADS), 7.0)

    def layer(cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        write(cache, step, "fp8_ds_mla")
        mla.paged_sparse_attention.out(step[3], cache, step[4], SCALE, "fp8_ds_mla", out=out, lse=lse)
        return out.float().sum()

    eager_cache, eager_out, eager_lse = cache.clone(), out.clone(), lse.clone()
    expected = layer(eager_cache, eager_out, eager_lse)
    with record_calls() as calls:
        actual, codes = run_and_get_code(torch.compile(layer, fullgraph=True), cache, out, lse)
    torch.testing.assert_close(actual, expected)
    assert_all_same((cache, out, lse), (eager_cache, eager_out, eager_lse), "compiled against eager, buffer")
    assert ReinplaceCounters.get_total_missed() == 0
    assert large_allocations(codes, out.numel()) == []
    _, arguments = calls[-1]
    assert arguments["out"].data_ptr() == out.data_ptr()
    assert arguments["lse"].data_ptr() == lse.data_ptr()
    assert arguments["kv_cache"].data_ptr() == cache.data_ptr()


def test_out_overload_into_a_buffer_that_the_graph_allocates_is_not_copied() -> None:
    cache, step = new_cache("fp8_ds_mla"), Step(4, "fp8_ds_mla").tensors()

    def layer(cache: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty(4, HEADS, 512, dtype=torch.bfloat16), torch.empty(4, HEADS)
        mla.paged_sparse_attention.out(q, cache, step[4], SCALE, "fp8_ds_mla", out=out, lse=lse)
        return out, lse

    actual, codes = run_and_get_code(torch.compile(layer, fullgraph=True), cache, step[3])
    assert_all_same(actual, layer(cache, step[3]), "compiled against eager, output")
    assert ReinplaceCounters.get_total_missed() == 0
    assert len(large_allocations(codes, actual[0].numel())) == 1, "the buffer itself, and nothing else of its size"


def test_every_other_out_overload_writes_its_buffers_in_place() -> None:
    cache, table = new_cache("bf16"), torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    lens, starts = torch.tensor([5, 20], dtype=torch.int32), torch.tensor([0, 5, 25], dtype=torch.int32)
    requests, indices = torch.zeros(4, dtype=torch.int32), torch.arange(4 * TOPK, dtype=torch.int32).view(4, TOPK)
    side = torch.randn(4, HEADS, 512), torch.randn(4, HEADS)
    kv = torch.randn(64, 576)

    def step(buffers: dict[str, torch.Tensor]) -> None:
        b = buffers
        mla.gather_cache.out(cache, table, lens, starts, 25, "bf16", out=b["workspace"])
        mla.convert_req_index_to_global_index.out(
            requests, table, indices, BLOCK_SIZE, out=b["slots"], valid_counts=b["counts"]
        )
        mla.filter_prefill_indices.out(b["slots"], requests, context_indices=b["context"], new_indices=b["new"])
        window = {"indices": b["window"], "lens": b["window_lens"]}
        mla.sliding_window_indices.out(b["counts"], requests, table, TOPK, BLOCK_SIZE, **window)
        dense = {"indices": b["dense"], "lens": b["dense_lens"]}
        mla.compressed_indices.out(b["counts"], requests, table, 4, BLOCK_SIZE, TOPK, **dense)
        chosen = {"indices": b["chosen"], "lens": b["chosen_lens"]}
        mla.compute_global_topk_indices_and_lens.out(indices, requests, table, BLOCK_SIZE, **chosen)
        rows = {"indices": b["rows"], "lens": b["rows_lens"]}
        mla.combine_topk_swa_indices.out(indices[:, 3:], b["counts"], requests, lens, lens, 3, 4, 64, 16, **rows)
        q = torch.ones(4, HEADS, 576)
        mla.sparse_attention.out(q, kv, b["new"], SCALE, out=b["out"], lse=b["lse"])
        mla.merge_attention_states.out(b["out"], b["lse"], *side, out=b["merged"], lse=b["merged_lse"])

    def new_buffers() -> dict[str, torch.Tensor]:
        names = ("slots", "context", "new", "window", "dense", "chosen", "rows")
        lengths = ("counts", "window_lens", "dense_lens", "chosen_lens", "rows_lens")
        return {
            **{name: torch.full((4, TOPK), 7, dtype=torch.int32) for name in names},
            **{name: torch.full((4,), 7, dtype=torch.int32) for name in lengths},
            "workspace": torch.full((25, 576), 7.0, dtype=torch.bfloat16),
            **{name: torch.full((4, HEADS, 512), 7.0) for name in ("out", "merged")},
            **{name: torch.full((4, HEADS), 7.0) for name in ("lse", "merged_lse")},
        }

    eager, compiled = new_buffers(), new_buffers()
    step(eager)
    with record_calls() as calls:
        _, codes = run_and_get_code(torch.compile(step, fullgraph=True), compiled)
    assert_all_same(compiled, eager, "compiled against eager, buffer")
    assert ReinplaceCounters.get_total_missed() == 0
    assert large_allocations(codes, 4 * HEADS * 576 + 1) == []
    passed = {tensor.data_ptr() for _, arguments in calls for tensor in arguments.values() if torch.is_tensor(tensor)}
    for name, buffer in compiled.items():
        assert buffer.data_ptr() in passed, f"the kernel got a copy of {name}"


# One graph for every size. Each case: the sizes' tensors for one call, and which of their dims vary.


def layer(q: Any, kv_c: Any, k_pe: Any, slots: Any, indices: Any, cache: Any) -> Any:
    mla.concat_and_cache(kv_c, k_pe, cache, slots, "fp8_ds_mla")
    out, lse = mla.paged_sparse_attention(q, cache, indices, SCALE, "fp8_ds_mla")
    other, other_lse = mla.sparse_attention(q, torch.cat((kv_c, k_pe), 1), indices, SCALE)
    return mla.merge_attention_states(out, lse, other, other_lse)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("sizes", [SIZES, (1, 0, 7), (0, 3)], ids=lambda sizes: f"starting with {sizes[0]} tokens")
def test_one_graph_for_every_number_of_tokens(sizes: tuple[int, ...], backend: str) -> None:
    cache = new_cache("fp8_ds_mla")
    calls, expected = [], []
    eager_cache = cache.clone()
    for num_tokens in sizes:
        step = Step(num_tokens, "fp8_ds_mla")
        tensors = (step.q, step.kv_c, step.k_pe, step.slots, step.indices)
        calls.append((*tensors, cache))
        expected.append(layer(*tensors, eager_cache))
    actual = run_without_recompiling(
        layer, calls, unbacked=lambda *args: [(tensor, 0) for tensor in args[:-1]], backend=backend
    )
    assert_all_same(actual, expected, "compiled against eager, output")
    assert_same_bits(cache, eager_cache, "compiled against eager, kv_cache")


def test_one_graph_for_every_number_of_tokens_over_two_caches() -> None:
    def two_caches(q: Any, indices: Any, extra_indices: Any, cache: Any, extra: Any) -> Any:
        return mla.paged_sparse_attention.extra(
            q, cache, indices, SCALE, "fp8_ds_mla_v4", extra, extra_indices, "fp8_ds_mla_v4"
        )

    caches, calls = (new_cache("fp8_ds_mla_v4"), new_cache("fp8_ds_mla_v4")), []
    for num_tokens in SIZES:
        step = Step(num_tokens, "fp8_ds_mla_v4")
        calls.append((step.q, step.indices, step.indices.flip(1), *caches))
    actual = run_without_recompiling(two_caches, calls, unbacked=lambda *args: [(tensor, 0) for tensor in args[:3]])
    assert_all_same(actual, [two_caches(*call) for call in calls], "compiled against eager, output")


def test_one_graph_for_every_number_of_tokens_written_into_buffers() -> None:
    def into_buffers(q: Any, indices: Any, out: Any, lse: Any, cache: Any) -> None:
        mla.paged_sparse_attention.out(q, cache, indices, SCALE, "bf16", out=out, lse=lse)

    cache, calls = new_cache("bf16"), []
    for num_tokens in SIZES:
        step = Step(num_tokens, "bf16")
        out, lse = torch.empty(num_tokens, HEADS, 512, dtype=torch.bfloat16), torch.empty(num_tokens, HEADS)
        calls.append((step.q, step.indices, out, lse, cache))
    run_without_recompiling(into_buffers, calls, unbacked=lambda *args: [(tensor, 0) for tensor in args[:-1]])
    for q, indices, out, lse, _ in calls:
        assert_all_same((out, lse), mla.paged_sparse_attention(q, cache, indices, SCALE, "bf16"), "compiled, buffer")


@pytest.mark.parametrize("contiguous", [True, False], ids=["a table of its own", "a slice of a table at capacity"])
def test_one_graph_for_every_number_of_requests_and_width_of_the_block_table(contiguous: bool) -> None:
    # torch gives rows of 0 elements a stride of 1, so a contiguous table of width 0 is a layout, and a graph, of its
    # own; a slice keeps the stride of its parent, and 0 is a width like any other
    cache = new_cache("bf16")

    def translated(q: Any, indices: Any, requests: Any, table: Any, lens: Any, starts: Any) -> Any:
        paged = mla.paged_sparse_attention(
            q, cache, indices, SCALE, "bf16", block_table=table, req_id_per_token=requests
        )
        slots = mla.convert_req_index_to_global_index(requests, table, indices, BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        return (
            paged,
            slots,
            mla.gather_cache(cache, table, lens, starts, 9, "bf16"),
            mla.filter_prefill_indices(indices, requests),
        )

    calls = []
    for num_tokens, num_requests, width in ((5, 2, 3), (1, 1, 1), (64, 33, 2), (2, 0, 4), (0, 5, 1), (33, 64, 17)):
        generator = torch.Generator().manual_seed(num_tokens)

        def random(high: int, *shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randint(-1, high, shape, dtype=torch.int32, generator=generator)

        q = torch.randn(num_tokens, HEADS, 576, generator=generator).bfloat16()
        lens = random(BLOCK_SIZE * 3, num_requests)
        starts = torch.cat((torch.zeros(1), lens.clamp(min=0).cumsum(0))).int()
        indices = random(BLOCK_SIZE * 3, num_tokens, TOPK)
        table = random(NUM_BLOCKS, num_requests, width) if contiguous else random(NUM_BLOCKS, 70, 20)
        calls.append((q, indices, random(max(num_requests, 1), num_tokens), table, lens, starts))
        if not contiguous:
            calls[-1] = (*calls[-1][:3], table[:num_requests, : width - 1], lens, starts)

    def unbacked(q: Any, indices: Any, requests: Any, table: Any, lens: Any, starts: Any) -> Any:
        return [(tensor, 0) for tensor in (q, indices, requests, table, lens, starts)] + [(table, 1)]

    actual = run_without_recompiling(translated, calls, unbacked=unbacked)
    assert_all_same(actual, [translated(*call) for call in calls], "compiled against eager, output")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_the_index_builders_whatever_the_batch_and_the_block_table(backend: str) -> None:
    def build(positions: Any, requests: Any, chosen: Any, table: Any, lens: Any) -> Any:
        return (
            mla.sliding_window_indices(positions, requests, table, 8, BLOCK_SIZE),
            mla.compressed_indices(positions, requests, table, 4, BLOCK_SIZE, 9, num_blocks=NUM_BLOCKS),
            mla.compute_global_topk_indices_and_lens(chosen, requests, table, BLOCK_SIZE, num_blocks=NUM_BLOCKS),
            mla.combine_topk_swa_indices(chosen, positions, requests, lens, lens, 8, 4, 64, 16),
        )

    calls = []
    for num_tokens, num_requests, width, topk in (
        (5, 2, 3, 8),
        (1, 1, 1, 1),
        (64, 33, 2, 0),
        (2, 0, 4, 7),
        (0, 5, 0, 3),
    ):
        generator = torch.Generator().manual_seed(num_tokens)

        def random(high: int, *shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randint(-1, high, shape, dtype=torch.int32, generator=generator)

        tokens = random(BLOCK_SIZE * 3, num_tokens), random(max(num_requests, 1), num_tokens)
        # slices of buffers at capacity, whose strides do not change
        chosen, table = random(12, 64, 9)[:num_tokens, :topk], random(NUM_BLOCKS, 70, 20)[:num_requests, :width]
        calls.append((*tokens, chosen, table, random(BLOCK_SIZE * 3, num_requests)))

    def unbacked(positions: Any, requests: Any, chosen: Any, table: Any, lens: Any) -> Any:
        return [(tensor, 0) for tensor in (positions, requests, chosen, table, lens)] + [(chosen, 1), (table, 1)]

    actual = run_without_recompiling(build, calls, unbacked=unbacked, backend=backend)
    assert_all_same(actual, [build(*call) for call in calls], "compiled against eager, output")


def test_one_graph_for_every_top_k_and_every_number_of_keys() -> None:
    def flat(q: Any, kv: Any, indices: Any) -> Any:
        return mla.sparse_attention(q, kv, indices, SCALE)

    generator = torch.Generator().manual_seed(0)
    calls = []
    for topk, num_kv in ((8, 20), (1, 1), (7, 0), (100, 64)):
        q, kv = torch.randn(3, HEADS, 512, generator=generator), torch.randn(num_kv, 512, generator=generator)
        calls.append((q, kv, torch.randint(-1, num_kv + 1, (3, topk), dtype=torch.int32, generator=generator)))
    actual = run_without_recompiling(flat, calls, unbacked=lambda q, kv, indices: [(kv, 0), (indices, 1)])
    assert_all_same(actual, [flat(*call) for call in calls], "compiled against eager, output")


def test_one_graph_for_every_batch_that_fits_the_step_buffers() -> None:
    max_num_requests, max_num_tokens, max_blocks = 8, 40, 5

    def new_buffers() -> tuple[torch.Tensor, ...]:
        requests = (
            torch.zeros(max_num_requests + 1, dtype=torch.int32),
            torch.zeros(max_num_requests, dtype=torch.int32),
        )
        table = torch.zeros(max_num_requests, max_blocks, dtype=torch.int32)
        tokens = [torch.zeros(max_num_tokens, dtype=torch.int32) for _ in range(4)]
        return (*requests, table, tokens[0], tokens[1], torch.zeros(max_num_tokens, dtype=torch.int64), *tokens[2:])

    def build(starts: Any, lens: Any, table: Any, *buffers: torch.Tensor) -> None:
        mla.build_step_metadata(starts, lens, table, *buffers, BLOCK_SIZE, TOPK)

    calls = []
    for num_requests, width in ((3, 2), (1, 1), (8, 5), (0, 3), (2, 1)):
        starts = torch.arange(num_requests + 1, dtype=torch.int32) * 2
        lens = torch.arange(num_requests, dtype=torch.int32) * 9 + 2
        table = torch.arange(num_requests * width, dtype=torch.int32).view(num_requests, width)
        calls.append((starts, lens, table, *new_buffers()))

    def unbacked(starts: Any, lens: Any, table: Any, *_: Any) -> Any:
        return [(starts, 0), (lens, 0), (table, 0), (table, 1)]

    run_without_recompiling(build, calls, unbacked=unbacked)
    for starts, lens, table, *buffers in calls:
        expected = new_buffers()
        build(starts, lens, table, *expected)
        assert_all_same(buffers, expected, f"{len(lens)} requests, compiled against eager, buffer")


def test_default_compile_settles_after_a_few_sizes() -> None:
    # without marks, Dynamo makes a size dynamic when it changes and keeps 0 and 1 apart: never one graph a size
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    cache = new_cache("fp8_ds_mla")
    for num_tokens in (5, 7, 64, 2, 33, 1, 0, 9, 12):
        step = Step(num_tokens, "fp8_ds_mla")
        compiled(step.q, step.kv_c, step.k_pe, step.slots, step.indices, cache)
    assert counter.frame_count <= 4
