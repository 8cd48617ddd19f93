"""Dense prefill on a GPU: every lowering at real sizes, in captured graphs, and whatever the batch."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from prefill_inputs import check, inputs, poison_behind, starts

import mla_ops
from mla_ops import dispatch

pytestmark = pytest.mark.gpu

BACKENDS = ["", "triton", "hopper", "torch_sdpa"]


def skip_unless_it_runs(backend: str, arguments: tuple[Any, ...]) -> None:
    reason = (
        dispatch.unsupported_reason(backend, mla_ops.registry.describe("prefill_attention", *arguments))
        if backend
        else None
    )
    if reason is not None:
        pytest.skip(reason)


def capture(arguments: tuple[Any, ...], out: torch.Tensor, lse: torch.Tensor) -> torch.cuda.CUDAGraph:
    torch.ops.mla.prefill_attention.out(*arguments, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.mla.prefill_attention.out(*arguments, out=out, lse=lse)
    return graph


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (128, 128), (64, 64)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS, ids=["as dispatched", *BACKENDS[1:]])
def test_attention_at_real_sizes(backend: str, dims: tuple[int, int], causal: bool) -> None:
    device = torch.device("cuda")
    lens_q, lens_k = [1000, 1, 0, 2049, 130], [1000, 3000, 7, 2049, 4000]
    arguments = inputs(lens_q, lens_k, (16, 16), dims, torch.bfloat16, device, padding=5)
    skip_unless_it_runs(backend, arguments)
    chosen = {"prefill_attention": backend} if backend else {}
    with dispatch.override(**chosen):
        check(backend, arguments, causal, [0, 1, 127, 128, 999, 1000, 1001, 2047, 3049, 3050, 3179, 3180, 3184])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (128, 128), (64, 64)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS[1:3])
def test_lengths_beside_a_tile(backend: str, dims: tuple[int, int], dtype: torch.dtype, causal: bool) -> None:
    """Requests that end before, at and behind the end of a tile of 64, 80 or 128, and NaN behind the last of them."""
    lens_q = [1, 0, 63, 64, 65, 127, 128, 129, 300, 2]
    lens_k = [1, 9, 79, 64, 81, 127, 160, 129, 5, 513]
    arguments = inputs(lens_q, lens_k, (6, 2), dims, dtype, torch.device("cuda"), padding=140)
    skip_unless_it_runs(backend, arguments)
    poison_behind(arguments, lens_q, lens_k)
    with dispatch.override(prefill_attention=backend):
        check(backend, arguments, causal)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("dims", [(192, 128), (128, 128), (96, 80)], ids=str)
@pytest.mark.parametrize(
    ("lens_q", "lens_k", "causal"),
    [
        ([300], None, True),
        ([200, 100], None, True),
        ([0, 5], [4, 5], False),
        ([5, 0, 9], [0, 0, 70], True),
        ([], [], True),
    ],
    ids=["one request with itself", "two with themselves", "no queries", "no keys", "no requests"],
)
def test_torch_kernels_hold_the_contract(
    lens_q: list[int], lens_k: list[int] | None, causal: bool, dims: tuple[int, int], num_kv_heads: int
) -> None:
    """Padding behind the requests, views with odd strides, empty requests, into fresh tensors and into buffers."""
    heads, device = (4, num_kv_heads), torch.device("cuda")
    arguments = inputs(lens_q, lens_q if lens_k is None else lens_k, heads, dims, torch.bfloat16, device, padding=9)
    q, k, v, starts_q, starts_k, *rest = arguments
    if lens_k is None:
        starts_k = starts_q
    v = torch.nn.functional.pad(v, (3, 0))[..., 3:]
    arguments = (q, k, v, starts_q, starts_k, *rest)
    with dispatch.override("torch_sdpa"):
        out, lse = check("torch_sdpa", arguments, causal)
        assert out.is_contiguous()
        assert lse.is_contiguous()
        buffers = torch.full_like(out, math.nan), torch.full_like(lse, math.nan)
        torch.ops.mla.prefill_attention.out(*arguments, causal=causal, out=buffers[0], lse=buffers[1])
    assert torch.equal(buffers[0], out)
    assert torch.equal(buffers[1], lse)


@pytest.mark.parametrize("num_heads", [8, 32], ids=["fewer tiles than SMs", "more"])
@pytest.mark.parametrize("backend", BACKENDS[1:3])
def test_a_replay_follows_the_lengths_of_the_step(backend: str, num_heads: int) -> None:
    """Captured with one batch, replayed with other lengths, fewer live tokens and an empty request."""
    device = torch.device("cuda")
    q, k, v, *_, scale = inputs([512], [1024], (num_heads, num_heads), (192, 128), torch.bfloat16, device)
    starts_q, starts_k = starts([256, 256, 0], device), starts([512, 512, 0], device)
    out, lse = (
        torch.empty(512, num_heads, 128, dtype=q.dtype, device=device),
        torch.empty(512, num_heads, device=device),
    )
    arguments = (q, k, v, starts_q, starts_k, 512, 1024, scale)
    skip_unless_it_runs(backend, arguments)
    with dispatch.override(prefill_attention=backend):
        graph = capture(arguments, out, lse)
        for lens_q, lens_k in (([512, 0, 0], [1024, 0, 0]), ([1, 0, 300], [700, 9, 300]), ([0, 0, 0], [0, 0, 0])):
            starts_q.copy_(starts(lens_q, device))
            starts_k.copy_(starts(lens_k, device))
            out.fill_(math.nan)
            graph.replay()
            eager = torch.ops.mla.prefill_attention(*arguments)
            assert torch.equal(out, eager[0])
            assert torch.equal(lse, eager[1])


def mixture(seed: int) -> tuple[list[int], list[int]]:
    """Queries and keys of requests: most are short, some empty, some have more keys than queries, or fewer."""
    drawn = random.Random(seed)
    lens_q = [min(1500, int(drawn.lognormvariate(3, 1.6))) for _ in range(drawn.randrange(30, 120))]
    lens_k = [min(4000, int(drawn.lognormvariate(4, 2))) if drawn.random() < 0.3 else length for length in lens_q]
    return lens_q, lens_k


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("backend", "cells"),
    [("triton", None), ("hopper", None), ("hopper", 0), ("hopper", 2**20)],
    ids=["triton", "hopper", "hopper, all tiles long", "hopper, all tiles short"],
)
@pytest.mark.parametrize("dims", [(192, 128), (64, 64), (256, 256)], ids=str)
def test_mixtures_of_lengths(
    backend: str, cells: int | None, dims: tuple[int, int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN behind the last request, rows of every request held against float64."""
    from mla_ops.kernels.hopper import prefill_attention

    if cells is not None:
        monkeypatch.setattr(prefill_attention, "SHORT_CELLS", cells)
    lens_q, lens_k = mixture(len(str(dims)) + causal)
    arguments = inputs(lens_q, lens_k, (8, 4), dims, torch.bfloat16, torch.device("cuda"), padding=140)
    skip_unless_it_runs(backend, arguments)
    poison_behind(arguments, lens_q, lens_k)
    ends = [0, *itertools.accumulate(lens_q)]
    edges = {token for begin, end in itertools.pairwise(ends) for token in (begin, end - 1, begin + (end - begin) // 2)}
    tokens = sorted({*(token for token in edges if token >= 0), ends[-1], ends[-1] + 139})
    with dispatch.override(prefill_attention=backend):
        check(backend, arguments, causal, tokens)


def test_the_bits_of_a_request_do_not_depend_on_the_batch() -> None:
    """Hopper: a request by itself, and anywhere among others that hold NaN, with other bounds of the lengths."""
    device, heads = torch.device("cuda"), (16, 16)
    for length, keys in ((1, 1), (2, 2), (7, 7), (16, 16), (50, 50), (128, 128), (129, 129), (400, 400), (3, 700)):
        arguments = inputs([length], [keys], heads, (192, 128), torch.bfloat16, device)
        skip_unless_it_runs("hopper", arguments)
        q, k, v, *_, scale = arguments
        with dispatch.override(prefill_attention="hopper"):
            alone = torch.ops.mla.prefill_attention(*arguments)
            for before, behind in (([], [1]), ([1] * 63, [500]), ([127], []), ([300, 0, 5], [1] * 511)):
                lens_q, lens_k = [*before, length, *behind], [*before, keys, *behind]
                first = sum(before)
                around = []
                for tensor, own, lens in ((q, length, lens_q), (k, keys, lens_k), (v, keys, lens_k)):
                    around.append(torch.full((sum(lens), *tensor.shape[1:]), math.nan, device=device).bfloat16())
                    around[-1][first : first + own] = tensor
                bounds = starts(lens_q, device), starts(lens_k, device), max(lens_q), max(lens_k)
                found = torch.ops.mla.prefill_attention(*around, *bounds, scale)
                for one, other in zip(alone, found, strict=True):
                    assert torch.equal(one, other[first : first + length])


@pytest.mark.parametrize("backend", BACKENDS[1:3])
def test_a_replay_follows_lengths_from_one_token_to_all(backend: str) -> None:
    """A graph of 64 requests and 600 tokens, captured with long ones."""
    device, count, num_tokens = torch.device("cuda"), 64, 600
    q, k, v, *_, scale = inputs([num_tokens], [num_tokens], (16, 16), (192, 128), torch.bfloat16, device)
    cu_seqlens = starts([num_tokens // 2] * 2 + [0] * (count - 2), device)
    out = torch.empty(num_tokens, 16, 128, dtype=q.dtype, device=device)
    lse = torch.empty(num_tokens, 16, device=device)
    arguments = (q, k, v, cu_seqlens, cu_seqlens, num_tokens, num_tokens, scale)
    skip_unless_it_runs(backend, arguments)
    with dispatch.override(prefill_attention=backend):
        graph = capture(arguments, out, lse)
        for lens in ([1] * count, [num_tokens], [9] * 60, [400, 1, 0, 130, 2], [0], [3] * 20 + [200]):
            cu_seqlens.copy_(starts(lens + [0] * (count - len(lens)), device))
            out.fill_(math.nan)
            lse.fill_(math.nan)
            graph.replay()
            tokens = sorted({0, 1, 8, sum(lens) // 2, max(sum(lens) - 1, 0), num_tokens - 1})
            eager = check(backend, arguments, True, tokens)
            assert torch.equal(out, eager[0])
            assert torch.equal(lse, eager[1])
