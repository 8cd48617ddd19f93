"""Scores of the indexer on Hopper against float64, and their bits in other batches, grids, replays and memories."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from mla_ops import dispatch
from mla_ops.formats import allocate_cache, geometry
from mla_ops.kernels.hopper import indexer_logits as hopper
from mla_ops.testing.index_scores import exact_scores

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_lowering")]

E4M3 = torch.float8_e4m3fn
INF, INT32_MAX = math.inf, 2**31 - 1


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def queries(num_tokens: int, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(num_tokens, num_heads, 128, device="cuda").to(E4M3)
    return q, torch.randn(num_tokens, num_heads, device="cuda")


@pytest.mark.parametrize("num_heads", hopper.HEADS)
@pytest.mark.parametrize(("num_tokens", "num_kv"), [(1, 1), (5, 300), (9, 64), (600, 777)])
def test_flat_scores_are_those_of_float64(num_heads: int, num_tokens: int, num_kv: int) -> None:
    q, weights = queries(num_tokens, num_heads)
    k, k_scale = torch.randn(num_kv, 128, device="cuda").to(E4M3), torch.rand(num_kv, device="cuda") + 0.01
    starts = int32(*([0, 7, 131, 300, -9, 0, 5] * 100)[:num_tokens])
    ends = int32(*([num_kv, 7, 299, INT32_MAX, 1, num_kv // 2, num_kv - 1] * 100)[:num_tokens])
    column = torch.arange(num_kv, device="cuda")
    within = (column >= starts[:, None]) & (column < ends[:, None])
    scores = torch.ops.mla.indexer_logits(q, k, weights, starts, ends, k_scale=k_scale, clean=True)
    expected, bound = exact_scores(q, k, weights, k_scale, e4m3_cores=True)
    assert ((scores.double() - expected).abs() <= bound)[within].all()
    assert (scores[~within] == -INF).all()
    # without `clean`, with any pitch, what a row has not is left alone
    wide = torch.full((num_tokens, num_kv + 13), 7.0, device="cuda")
    torch.ops.mla.indexer_logits.out(q, k, weights, starts, ends, k_scale=k_scale, out=wide[:, :num_kv])
    assert torch.equal(wide[:, :num_kv], torch.where(within, scores, 7.0))
    assert (wide[:, num_kv:] == 7).all()


class Paged(NamedTuple):
    q: torch.Tensor
    cache: torch.Tensor
    weights: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    requests: torch.Tensor

    def scores(self, max_length: int, **options: object) -> torch.Tensor:
        return torch.ops.mla.paged_indexer_logits(*self, max_length, "fp8_index", **options)

    def tokens(self, order: torch.Tensor) -> Paged:
        return Paged(
            self.q[order], self.cache, self.weights[order], self.lengths[order], self.table, self.requests[order]
        )


def paged(num_heads: int, block_size: int, tokens_each: int, num_requests: int = 5, capacity: int = 400) -> Paged:
    """Requests of as many tokens, whose lengths differ, some 0, the last past the table."""
    blocks_each = -(-capacity // block_size)
    num_blocks, num_tokens = num_requests * blocks_each + 3, num_requests * tokens_each
    cache = allocate_cache("fp8_index", num_blocks, block_size, device="cuda")
    slots = torch.arange(num_blocks * block_size, device="cuda")
    keys = torch.randn(len(slots), 128, device="cuda")
    with dispatch.override("triton"):
        torch.ops.mla.write_index_cache(keys, cache, slots, "fp8_index")
    order = torch.randperm(num_blocks, device="cuda")[: num_requests * blocks_each]
    lengths = int32(*(399 - 61 * (i % 7) if i % 6 else 0 for i in range(num_tokens)))
    lengths[-1] = INT32_MAX
    requests = torch.arange(num_requests, device="cuda").repeat_interleave(tokens_each).to(torch.int32)
    q, weights = queries(num_tokens, num_heads)
    return Paged(q, cache, weights, lengths, order.view(num_requests, -1).to(torch.int32), requests)


@pytest.mark.parametrize("num_heads", hopper.HEADS)
@pytest.mark.parametrize("block_size", [64, 8, 16, 128, 192, 1, 17, 100])
@pytest.mark.parametrize("tokens_each", [1, 2, 3, 4, 8])
def test_paged_scores_are_those_of_float64(num_heads: int, block_size: int, tokens_each: int) -> None:
    call, max_length = paged(num_heads, block_size, tokens_each), 380
    num_blocks = geometry(call.cache, "fp8_index").num_blocks
    call.table[1, 0], call.table[2, -1], call.table[3, 0] = -1, num_blocks, INT32_MAX
    if tokens_each == 3:
        call.requests[4:6] = int32(-1, 5)
    scores = call.scores(max_length, clean=True)
    requests = call.requests.long().clamp(0, 4)
    position = torch.arange(max_length, device="cuda")
    block = call.table.long()[requests[:, None], position // block_size]
    there = (block >= 0) & (block < num_blocks)
    slots = torch.where(there, block * block_size + position % block_size, 0)
    known = (call.requests >= 0) & (call.requests < 5)
    within = (position < torch.where(known, call.lengths, 0)[:, None]) & there
    from mla_ops.kernels.reference.indexer import read_index_keys

    k, k_scale = read_index_keys(call.cache, torch.arange(num_blocks * block_size, device="cuda"), "fp8_index")
    expected, bound = (x.gather(1, slots) for x in exact_scores(call.q, k, call.weights, k_scale, e4m3_cores=True))
    assert ((scores.double() - expected).abs() <= bound)[within].all()
    assert (scores[~within] == -INF).all()

    # the bits are of the token alone: not of its neighbours, nor of the grid
    order = torch.randperm(len(requests), device="cuda")
    assert torch.equal(call.tokens(order).scores(max_length, clean=True), scores[order])
    with pytest.MonkeyPatch.context() as patch:
        for ctas in (1, 3):
            patch.setattr(hopper, "num_sms", lambda _, ctas=ctas: ctas)
            assert torch.equal(call.scores(max_length, clean=True), scores)


@pytest.mark.parametrize("num_heads", hopper.HEADS)
@pytest.mark.parametrize("tokens_each", [1, 2])
def test_more_requests_than_one_warp_counts(num_heads: int, tokens_each: int) -> None:
    call = paged(num_heads, 64, tokens_each, num_requests=70)
    scores = call.scores(380, clean=True)
    for first in range(0, 70, 10):
        tokens = torch.arange(first * tokens_each, (first + 10) * tokens_each, device="cuda")
        assert torch.equal(call.tokens(tokens).scores(380, clean=True), scores[tokens])


def test_bits_of_flat_and_paged_scores_are_the_same() -> None:
    call = paged(64, 64, 1)
    scores = call.scores(380, clean=True)
    starts, lens = int32(0, 448, 896, 1344, 1792, 2240), int32(*[448] * 5)
    with dispatch.override("triton"):
        k, k_scale = torch.ops.mla.gather_index_cache(call.cache, call.table, lens, starts, 2240, "fp8_index")
    ends = starts[:5] + call.lengths.clamp(max=380)
    flat = torch.ops.mla.indexer_logits(call.q, k, call.weights, starts[:5], ends, k_scale=k_scale, clean=True)
    for token in range(5):
        assert torch.equal(flat[token, token * 448 : token * 448 + 380], scores[token])


@pytest.mark.parametrize("block_size", [64, 17])
def test_replays_with_other_lengths_are_eager_calls_to_the_bit(block_size: int) -> None:
    """Also from all lengths 0 with tables of -1, and beside other work on a second stream."""
    call = paged(64, block_size, 2, num_requests=8)
    table = call.table.clone()
    out = torch.empty(16, 400, device="cuda")
    side, noise = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    call.lengths.zero_()
    call.table.fill_(-1)
    call.scores(400)
    with torch.cuda.graph(graph):
        torch.ops.mla.paged_indexer_logits.out(*call, 400, "fp8_index", clean=True, out=out)
    graph.replay()
    assert (out == -INF).all()
    call.lengths[3] = 1  # one more than 0, whose block is -1
    graph.replay()
    assert (out == -INF).all()
    call.table.copy_(table)
    for number in range(1000):
        call.lengths.copy_(torch.randint(-2, 500, (16,)))
        with torch.cuda.stream(side):
            noise = (noise @ noise).sin()
        out.fill_(7.0)
        graph.replay()
        if number % 10 == 0:
            assert torch.equal(out, call.scores(400, clean=True))


def test_offsets_beyond_32_bits() -> None:
    """A cache of more than 4 GiB, and rows whose pitch times their number is more than 2**31."""
    num_blocks = 2**32 // (64 * 132) + 100
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB")
    small = paged(64, 64, 1)
    cache = torch.zeros(num_blocks, 64 * 132, dtype=torch.uint8, device="cuda")
    first = num_blocks - len(small.cache)
    cache[first:] = small.cache
    far = small._replace(cache=cache, table=small.table + first)
    expected = small.scores(400, clean=True)
    assert torch.equal(far.scores(400, clean=True), expected)
    del cache, far
    pitch = 2**29 + 1
    storage = torch.full((4 * pitch + 400,), 7.0, device="cuda")
    out = storage.as_strided((5, 400), (pitch, 1))
    torch.ops.mla.paged_indexer_logits.out(*small, 400, "fp8_index", clean=True, out=out)
    assert torch.equal(out, expected)
    assert (storage[400:pitch] == 7).all()


def test_nan_stays_nan() -> None:
    q, weights = queries(2, 32)
    k = torch.randn(70, 128, device="cuda").to(E4M3)
    k.view(torch.uint8)[3, 5] = 0x7F
    scores = torch.ops.mla.indexer_logits(q, k, weights, int32(0, 0), int32(70, 70))
    assert scores[:, 3].isnan().all()
    assert scores[:, [*range(3), *range(4, 70)]].isfinite().all()


def test_operands_anywhere_in_memory() -> None:
    """Queries, keys and weights that begin at any element, and rows that lie apart."""
    q, weights = queries(5, 64)
    k, k_scale = torch.randn(100, 128, device="cuda").to(E4M3), torch.rand(100, device="cuda")
    rows = int32(0, 3, 0, 50, 99), int32(100, 90, 64, 65, 100)
    expected = torch.ops.mla.indexer_logits(q, k, weights, *rows, k_scale=k_scale, clean=True)
    moved_q = torch.empty(5 * 64 * 128 + 1, dtype=torch.uint8, device="cuda")[1:].view(E4M3).view(5, 64, 128)
    moved_q.copy_(q)
    wide_k = torch.zeros(100, 144, dtype=torch.uint8, device="cuda").view(E4M3)[:, :128]
    wide_k.copy_(k)
    wide_weights = torch.zeros(5, 67, device="cuda")[:, 1:65]
    wide_weights.copy_(weights)
    moved_scale = torch.cat((k_scale[:1], k_scale))[1:]
    moved_rows = [torch.cat((row[:1], row))[1:] for row in rows]
    scores = torch.ops.mla.indexer_logits(moved_q, wide_k, wide_weights, *moved_rows, k_scale=moved_scale, clean=True)
    assert torch.equal(scores, expected)
