"""Selection of keys on Hopper, at real sizes: equal to the two steps, in hard orders and in replays; its memory."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from topk_oracle import KINDS, hard_rows, sampled_columns, topk_oracle

from mla_ops.formats import allocate_cache, geometry
from mla_ops.kernels.selection import CALL_BYTES, MOST_BYTES, ROW_BYTES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_lowering")]

E4M3, FORMAT = torch.float8_e4m3fn, "fp8_index"
INT32 = {"dtype": torch.int32, "device": "cuda"}


class Paged(NamedTuple):
    q: torch.Tensor
    cache: torch.Tensor
    weights: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    requests: torch.Tensor

    def select(self, k: int, translate: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.mla.select_keys(*self, k, FORMAT, translate=translate)

    def two_steps(self, k: int, translate: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        block_size = geometry(self.cache, FORMAT).block_size
        width = self.table.shape[1] * block_size
        scores = torch.ops.mla.paged_indexer_logits(*self, width, FORMAT)
        known = (self.requests >= 0) & (self.requests < self.table.shape[0])
        slots = {"block_table": self.table, "req_id_per_token": self.requests, "block_size": block_size}
        ends = torch.where(known, self.lengths, 0)
        return torch.ops.mla.topk_indices(scores, k, row_ends=ends, **(slots if translate else {}))

    def tokens(self, chosen: slice) -> Paged:
        tokens = {name: getattr(self, name)[chosen] for name in ("q", "weights", "lengths", "requests")}
        return self._replace(**tokens)


def paged(num_requests: int, each: int, num_heads: int, block_size: int, length: int) -> Paged:
    blocks = -(-length // block_size)
    cache = allocate_cache(FORMAT, num_requests * blocks + 1, block_size, device="cuda")
    count = cache.shape[0]
    rows = cache.view(count, -1)
    for block in torch.arange(count, device="cuda").split(4096):
        keys = torch.randn(len(block), 128 * block_size, device="cuda").to(E4M3)
        rows[block, : 128 * block_size] = keys.view(torch.uint8)
        scales = torch.rand(len(block), block_size, device="cuda") + 0.1
        rows[block, 128 * block_size : 132 * block_size] = scales.view(torch.uint8)
    table = torch.randperm(count, device="cuda")[: num_requests * blocks].view(num_requests, -1).to(torch.int32)
    num_tokens = num_requests * each
    q = torch.randn(num_tokens, num_heads, 128, device="cuda").to(E4M3)
    requests = torch.arange(num_requests, **INT32).repeat_interleave(each)
    return Paged(
        q,
        cache,
        torch.randn(num_tokens, num_heads, device="cuda"),
        torch.full((num_tokens,), length, **INT32),
        table,
        requests,
    )


def assert_equal(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("k", [1, 512, 2048, 4096])
@pytest.mark.parametrize(
    ("num_requests", "each", "num_heads", "block_size", "length"),
    [
        (1, 1, 64, 64, 131072),
        (4, 1, 64, 64, 32768),
        (16, 1, 32, 64, 32768),
        (64, 1, 64, 16, 17000),
        (140, 1, 64, 128, 17000),
        (20, 2, 64, 64, 20000),
        (40, 4, 32, 32, 20000),
        (7, 3, 64, 17, 25000),
        (300, 2, 64, 17, 18000),
        (600, 1, 32, 64, 20000),
        (80, 2, 64, 48, 17000),
        (3, 1, 64, 4096, 40000),
    ],
)
def test_paged_selection_is_scores_then_topk(
    num_requests: int, each: int, num_heads: int, block_size: int, length: int, k: int
) -> None:
    case = paged(num_requests, each, num_heads, block_size, length)
    assert_equal(case.select(k), case.two_steps(k))
    case.lengths.random_(-3, length + 300)
    case.lengths[0] = k
    case.table[0, 1], case.table[-1, 0], case.requests[-1] = -1, 10**9, -1
    for translate in (False, True):
        assert_equal(case.select(k, translate), case.two_steps(k, translate))
    alone = case.tokens(slice(2, 3))
    assert_equal(alone.select(k), tuple(x[2:3] for x in case.select(k)))


@pytest.mark.parametrize("length", [9000, ROW_BYTES // 4])
def test_rows_that_memory_has_room_for(length: int) -> None:
    case = paged(5, 2, 64, 64, length)
    case.lengths.random_(-3, length + 300)
    case.requests[-1] = -1
    for translate in (False, True):
        assert_equal(case.select(2048, translate), case.two_steps(2048, translate))


@pytest.mark.parametrize("length", [4096, 20000, 40000])
def test_lengths_about_k_none_and_past_the_table(length: int) -> None:
    """A length that drafts made larger than the table, or one of 0 smaller by them; all 0; tables of nothing."""
    k = 2048
    lengths = [0, 1, k - 1, k, k + 1, length - 1, length, length + 3, 2**31 - 1, -1, -(2**31)]
    case = paged(len(lengths), 1, 64, 64, length)
    case.lengths.copy_(torch.tensor(lengths))
    for translate in (False, True):
        assert_equal(case.select(k, translate), case.two_steps(k, translate))
    assert case.select(k)[1].tolist() == [min(max(n, 0), length, k) for n in lengths]
    case.lengths.zero_()
    indices, counts = case.select(k)
    assert (indices == -1).all()
    assert (counts == 0).all()
    case.lengths.fill_(1)  # one more than 0, whose block is -1
    case.table.fill_(-1)
    for translate, first in ((False, 0), (True, -1)):
        indices, counts = case.select(k, translate)
        assert (indices[:, 0] == first).all()
        assert (indices[:, 1:] == -1).all()
        assert (counts == 1).all()


@pytest.mark.parametrize("num_requests", [1, 16, 60, 150])
@pytest.mark.parametrize("kind", KINDS)
def test_hard_orders(kind: str, num_requests: int) -> None:
    """A key of ones has its scale for a score: ascending, equal, of ten low bits, NaN."""
    block_size, blocks, k = 64, 500, 2048
    case = paged(num_requests, 1, 64, block_size, block_size * blocks)
    scores = hard_rows(kind, 1, block_size * blocks, device="cuda")
    rows = case.cache.view(case.cache.shape[0], -1)
    rows[:, : 128 * block_size] = torch.ones(1, device="cuda").to(E4M3).view(torch.uint8)
    for table in case.table.long():
        rows[table, 128 * block_size : 132 * block_size] = scores.view(blocks, block_size).view(torch.uint8)
    case.q.view(torch.uint8).zero_()
    case.q[:, 5, 77] = torch.ones(1, device="cuda").to(E4M3)
    case.weights.zero_()
    case.weights[:, 5] = 1
    want = topk_oracle(scores.cpu(), k)
    indices, counts = (x.cpu() for x in case.select(k))
    assert torch.equal(counts, want[1].expand_as(counts))
    assert torch.equal(indices, want[0].expand_as(indices))


@pytest.mark.parametrize("seen", [True, False], ids=["it alone sees", "it does not see"])
@pytest.mark.parametrize(("num_tokens", "num_kv"), [(600, 32768), (140, 131072)])
def test_flat_selection_whose_sample_says_nothing_of_its_row(num_tokens: int, num_kv: int, seen: bool) -> None:
    """A key of ones has its scale for a score; of 2,048 or 4,096 columns, the sample has all peaks or none."""
    q, weights = torch.zeros(num_tokens, 64, 128, device="cuda"), torch.zeros(num_tokens, 64, device="cuda")
    q[:, 5, 77], weights[:, 5] = 1, 1
    q, keys = q.to(E4M3), torch.ones(num_kv, 128, device="cuda").to(E4M3)
    starts, ends = torch.zeros(num_tokens, **INT32), torch.full((num_tokens,), num_kv, **INT32)
    for sampled in (2048, 4096):
        scores = hard_rows("normal", 1, num_kv)
        scores[:, sampled_columns(num_kv, sampled) == seen] += 10
        want = topk_oracle(scores, 2048)
        got = torch.ops.mla.select_keys.flat(q, keys, weights, starts, ends, 2048, k_scale=scores[0].cuda())
        assert_equal(tuple(x.cpu() for x in got), tuple(x.expand(num_tokens, *x.shape[1:]) for x in want))


@pytest.mark.parametrize("num_heads", [32, 64])
@pytest.mark.parametrize(
    ("num_tokens", "num_kv", "k"),
    [
        (1, 50000, 2048),
        (100, 9000, 100),
        (600, 19000, 2048),
        (200, 60000, 2048),
        (1111, 33000, 2048),
        (170, 150000, 512),
        (1200, 131072, 2048),
        (1200, 80003, 2048),
        (2500, 80003, 2048),
        (900, 8100, 2048),
    ],
)
def test_flat_selection_is_scores_then_topk(num_heads: int, num_tokens: int, num_kv: int, k: int) -> None:
    q = torch.randn(num_tokens, num_heads, 128, device="cuda").to(E4M3)
    weights = torch.randn(num_tokens, num_heads, device="cuda")
    keys, scale = torch.randn(num_kv, 128, device="cuda").to(E4M3), torch.rand(num_kv, device="cuda") + 0.01
    starts, ends = (
        torch.randint(-5, num_kv // 2, (num_tokens,), **INT32),
        torch.randint(0, num_kv + 9, (num_tokens,), **INT32),
    )
    scores = torch.ops.mla.indexer_logits(q, keys, weights, starts, ends, k_scale=scale)
    want = torch.ops.mla.topk_indices(scores, k, row_starts=starts, row_ends=ends)
    assert_equal(torch.ops.mla.select_keys.flat(q, keys, weights, starts, ends, k, k_scale=scale), want)


@pytest.mark.parametrize("block_size", [64, 17])
@pytest.mark.parametrize(
    ("num_requests", "each", "length"), [(1, 1, 4096), (3, 1, 131072), (64, 1, 32768), (20, 2, 32768), (150, 1, 60000)]
)
def test_a_thousand_replays_beside_other_work_are_eager_to_the_bit_within_their_memory(
    num_requests: int, each: int, length: int, block_size: int
) -> None:
    case, k = paged(num_requests, each, 64, block_size, length), 2048
    case.select(k)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = case.select(k)
    extra = torch.cuda.max_memory_allocated() - before - sum(x.numel() * 4 for x in results)
    small = 16 * 512  # the allocator rounds up by less
    assert extra <= min(max(CALL_BYTES, ROW_BYTES * num_requests * each), MOST_BYTES) + small
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.select(k)
    beside, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        with torch.cuda.stream(beside):
            matrix @ matrix
        case.lengths.random_(0, length + 1)
        graph.replay()
        eager = case.two_steps(k)
        wrong += (captured[0] != eager[0]).sum() + (captured[1] != eager[1]).sum()
    assert int(wrong) == 0
