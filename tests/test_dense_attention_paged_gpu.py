"""Dense MLA over a paged cache on a GPU: real sizes, replays, and every way in which Hopper launches parts of rows."""

from __future__ import annotations

import math

import pytest
import torch
from attention_inputs import SCALE, filled_cache, queries
from paged_inputs import check, check_replays, int32

import mla_ops
from mla_ops import dispatch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_heads", [1, 16, 64, 128])
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
@pytest.mark.parametrize("backend", ["triton", "flash_mla", "hopper"])
def test_attention_at_real_sizes(backend: str, cache_format: str, num_heads: int) -> None:
    device = torch.device("cuda")
    cache = filled_cache(cache_format, 300, 64, device)
    table = torch.randperm(300, device=device).int()[:256].view(4, 64)
    requests, lens = int32([0, 1, 1, 2, 3, -1], device), int32([4096, 999, 1000, 0, 1, 7], device)
    q = queries(6, num_heads, torch.bfloat16, device)
    call = mla_ops.registry.describe("paged_attention", q, cache, table, requests, lens, SCALE, cache_format)
    reason = dispatch.unsupported_reason(backend, call)
    if reason is not None:
        pytest.skip(reason)
    with dispatch.override(paged_attention=backend):
        check(backend, q, cache, table, requests, lens, cache_format)


@pytest.mark.parametrize("backend", ["triton", "flash_mla", "hopper"])
def test_a_replay_follows_the_lengths_of_the_step(backend: str) -> None:
    device = torch.device("cuda")
    cache = filled_cache("bf16", 64, 64, device)
    q, table = queries(4, 16, torch.bfloat16, device), torch.randperm(64, device=device).int().view(4, 16)
    requests, lens = int32([0, 1, 2, 3], device), int32([1000, 3, 64, 65], device)
    out, lse = torch.empty(4, 16, 512, dtype=q.dtype, device=device), torch.empty(4, 16, device=device)
    arguments = (q, cache, table, requests, lens, SCALE, "bf16")
    call = mla_ops.registry.describe("paged_attention", *arguments)
    reason = dispatch.unsupported_reason(backend, call)
    if reason is not None:
        pytest.skip(reason)
    with dispatch.override(paged_attention=backend):
        torch.ops.mla.paged_attention.out(*arguments, out=out, lse=lse)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.ops.mla.paged_attention.out(*arguments, out=out, lse=lse)
        for new_lens, owners in (([1, 1024, 0, 500], [0, 1, 2, 3]), ([7, 8, 9, 0], [2, 2, 2, -1])):
            lens.copy_(int32(new_lens, device))
            requests.copy_(int32(owners, device))
            table.copy_(table.flip(0))
            out.fill_(math.nan)
            graph.replay()
            eager = torch.ops.mla.paged_attention(*arguments)
            assert torch.equal(out, eager[0])
            assert torch.equal(lse, eager[1])


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize(
    "shape", [(16, 1, 1), (16, 2, 8), (16, 16, 3), (32, 3, 4), (64, 1, 1), (64, 2, 8), (64, 16, 2)], ids=str
)
def test_parts_of_the_hopper_kernels(shape: tuple[int, int, int], first: int, cache_format: str) -> None:
    """Parts without keys, holes in the table, blocks that end within 16 keys; heads that leave a tile part-filled.

    `first` tokens are a wave before, whose parts may be others. A launch in parts shares rows evenly as well.
    """
    from mla_ops.kernels.hopper.launch import Clusters
    from mla_ops.kernels.hopper.waves import Wave, override

    device = torch.device("cuda")
    cache, q = filled_cache(cache_format, 40, 24, device), queries(7, 70, torch.bfloat16, device)
    table = torch.randperm(40, device=device).int()[:36].view(2, 18)
    table[0, 3], table[1, 0] = -1, 99
    requests, lens = int32([0, 0, 1, 1, 0, -1, 1], device), int32([432, 431, 433, 17, 1, 9, 0], device)
    arguments = (q, cache, table, requests, lens, SCALE, cache_format)
    reason = dispatch.unsupported_reason("hopper", mla_ops.registry.describe("paged_attention", *arguments))
    if reason is not None:
        pytest.skip(reason)
    for before in ((64, 1, 1), (16, 2, 3)) if first else ((64, 1, 1),):
        waves = Wave(first, Clusters(*before)), Wave(7 - first, Clusters(*shape))
        for evenly in (False, True):
            with dispatch.override(paged_attention="hopper"), override(*waves[not first :], evenly=evenly):
                check("hopper", q, cache, table, requests, lens, cache_format)


@pytest.mark.parametrize("num_heads", [16, 24, 128])
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_replay_shares_rows_of_any_lengths(backend: str, cache_format: str, num_heads: int) -> None:
    """One capture at a capacity of 32,768 keys: rows of one length are launched by shapes, others shared evenly."""
    from mla_ops.kernels.hopper import dense_attention, launch

    device, num_tokens = torch.device("cuda"), 24
    cache, q = filled_cache(cache_format, 1600, 64, device), queries(num_tokens, num_heads, torch.bfloat16, device)
    table = torch.randint(0, 1600, (num_tokens, 512), dtype=torch.int32, device=device)
    requests, lens = int32(range(num_tokens), device), int32([4096] * num_tokens, device)
    arguments = (q, cache, table, requests, lens, SCALE, cache_format)
    reason = dispatch.unsupported_reason(backend, mla_ops.registry.describe("paged_attention", *arguments))
    if reason is not None:
        pytest.skip(reason)
    if backend == "hopper":  # the portable kernels look at lengths of this capacity on any GPU
        keys = launch.KERNELS[cache_format, 576]
        assert dense_attention._balance(keys, num_tokens, num_heads, 512 * 64, torch.cuda.current_device()) is not None
    lengths = [
        [4096] * num_tokens,
        [20000] + [100] * (num_tokens - 1),
        [0] * (num_tokens - 1) + [32768],
        [65 * i for i in range(num_tokens)],
        [30000, 1, 0, 29000] * (num_tokens // 4),
        [0] * num_tokens,
    ]
    with dispatch.override(paged_attention=backend):
        check_replays(backend, arguments, lengths, [0, 2, 3, num_tokens - 1])


@pytest.mark.parametrize("shape", [(16, 1), (32, 1), (64, 1), (16, 3), (64, 2), (32, 2, 3), (64, 2, 3)])
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
def test_hopper_launches_that_share_rows_evenly(cache_format: str, shape: tuple[int, ...]) -> None:
    """Holes in the table, requests that there are not, rows that several workers share; part-filled tiles."""
    from mla_ops.kernels.hopper.launch import Clusters
    from mla_ops.kernels.hopper.waves import Wave, override

    device = torch.device("cuda")
    cache, q = filled_cache(cache_format, 400, 24, device), queries(7, 70, torch.bfloat16, device)
    table = torch.randint(0, 400, (2, 300), dtype=torch.int32, device=device)
    table[0, 3], table[1, 0] = -1, 999
    requests, lens = int32([0, 0, 1, 1, 0, -1, 1], device), int32([7200, 431, 7201, 17, 1, 9, 0], device)
    arguments = (q, cache, table, requests, lens, SCALE, cache_format)
    reason = dispatch.unsupported_reason("hopper", mla_ops.registry.describe("paged_attention", *arguments))
    if reason is not None:
        pytest.skip(reason)
    with dispatch.override(paged_attention="hopper"), override(Wave(7, Clusters(*shape)), evenly=True):
        check("hopper", q, cache, table, requests, lens, cache_format)
