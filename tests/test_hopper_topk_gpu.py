"""Top-k on Hopper, at real sizes: every launch there is against a stable sort, replays, other work beside it."""

from __future__ import annotations

import pytest
import torch
from topk_oracle import KINDS, hard_rows, sampled_columns, topk_oracle

from benchmarks.indexer_topk_patterns import PATTERNS, REGIMES, Regime, ready

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_lowering")]
INT32 = {"dtype": torch.int32, "device": "cuda"}


def assert_chosen(scores: torch.Tensor, k: int, starts: torch.Tensor | None, ends: torch.Tensor | None) -> None:
    for in_order in (False, True):
        indices, counts = torch.ops.mla.topk_indices(scores, k, row_starts=starts, row_ends=ends, sorted=in_order)
        wanted, lengths = topk_oracle(scores, k, starts, ends, sorted=in_order)
        assert torch.equal(counts.cpu(), lengths)
        assert torch.equal(indices.cpu(), wanted), f"sorted={in_order}"


# each launch of `plan_for`: registers, a CTA, clusters of several sizes, many rows
SHAPES = [
    (2, 4000),
    (5, 8190),
    (7, 16000),
    (60, 30000),
    (3, 40001),
    (16, 131072),
    (130, 33000),
    (1, 1000003),
    (2, 2**21),
    (300, 20000),
]


@pytest.mark.parametrize("k", [1, 512, 2048, 4096])
@pytest.mark.parametrize(("num_rows", "num_columns"), SHAPES)
def test_the_best_of_hard_rows(num_rows: int, num_columns: int, k: int) -> None:
    few = ("normal", "special", "ascending") if num_rows * num_columns > 2**20 or k != 2048 else KINDS
    for kind in few:
        scores = hard_rows(kind, num_rows, num_columns + 3, device="cuda")[:, 3:]
        starts = torch.randint(-3, 40, (num_rows,), **INT32)
        ends = torch.randint(0, num_columns + 9, (num_rows,), **INT32)
        ends[0] = num_columns
        assert_chosen(scores, k, starts, ends)
    assert_chosen(scores, k, None, None)


@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_scores_that_are_not_usual(regime: Regime) -> None:
    """Many equal ones, runs of one value, blocks without a number: in each way of top-k, and the same in every run."""
    generator = torch.Generator("cuda").manual_seed(1)
    normal = torch.randn(regime.rows, regime.columns, device="cuda", generator=generator)
    for name, make in PATTERNS.items():
        call = ready(regime, make(normal, generator), "auto")
        for _ in range(2):
            call.run()
            assert call.is_right(), name


@pytest.mark.parametrize("seen", [True, False], ids=["it alone sees", "it does not see"])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(64, 131072), (130, 131072), (300, 32768), (1, 2**20)])
def test_a_sample_that_says_nothing_of_its_row(num_rows: int, num_columns: int, seen: bool) -> None:
    """Peaks that the sample alone sees, of 2,048 or 4,096 columns, make a gate too high, others one too low."""
    for sampled in (2048, 4096):
        scores = hard_rows("normal", num_rows, num_columns, device="cuda")
        scores[:, (sampled_columns(num_columns, sampled) == seen).cuda()] += 10
        assert_chosen(scores, 2048, None, None)


@pytest.mark.parametrize("num_columns", [4096, 50000, 300000])
def test_lengths_about_k_at_every_start(num_columns: int) -> None:
    k = 2048
    lengths = [0, 1, k - 1, k, k + 1, k + 5, 2**31 - 1 - 4, 4 * k - 1, 4 * k]
    spans = [(start, start + length) for start in range(5) for length in lengths]
    starts, ends = torch.tensor(spans, **INT32).T.contiguous()
    assert_chosen(hard_rows("normal", len(spans), num_columns, device="cuda"), k, starts, ends)


def test_rows_beyond_two_billion_scores() -> None:
    pitch, num_columns = 2**30 + 5, 70000
    if torch.cuda.mem_get_info()[0] < 5 * pitch + 2**30:
        pytest.skip("needs 11 GB")
    memory = torch.empty(2 * pitch + num_columns, device="cuda")
    scores = memory.as_strided((3, num_columns), (pitch, 1))
    scores.copy_(hard_rows("normal", 3, num_columns, device="cuda"))
    assert_chosen(scores, 2048, None, None)


def test_slots_of_a_table_that_is_garbage_in_part() -> None:
    num_tokens, num_columns, k, block_size = 6, 30000, 2048, 64
    scores = hard_rows("normal", num_tokens, num_columns, device="cuda")
    table = torch.randperm(4 * 400, device="cuda").view(4, 400).int()  # rows are longer than 400 blocks
    table[1, ::3], table[2, ::5], table[3, ::7] = -1, 2**31 - 1, -(2**31)
    requests = torch.tensor([0, 1, 2, 3, 4, -1], **INT32)
    chosen, counts = torch.ops.mla.topk_indices(scores, k)
    assert counts.tolist() == [k] * num_tokens
    blocks = torch.div(chosen, block_size, rounding_mode="floor").long()
    known = ((requests >= 0) & (requests < 4))[:, None] & (blocks < 400)
    found = table.long()[requests.clamp(0, 3).long()].gather(1, blocks.clamp(max=399))
    slots = found * block_size + chosen % block_size
    slots = torch.where(known & (found >= 0) & (slots < 2**31), slots, -1).int()
    given = {"block_table": table, "req_id_per_token": requests, "block_size": block_size}
    assert torch.equal(torch.ops.mla.topk_indices(scores, k, **given)[0], slots)
    none = {**given, "block_table": table[:, :0]}
    assert bool((torch.ops.mla.topk_indices(scores, k, **none)[0] == -1).all())


@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 4096), (1, 131072), (64, 32768), (300, 16384)])
def test_replays_with_other_lengths_and_work_beside_them_are_eager_to_the_bit(num_rows: int, num_columns: int) -> None:
    k, rounds = 2048, 1000
    scores = hard_rows("ten low bits", num_rows, num_columns, device="cuda")
    lengths = torch.randint(0, num_columns + 1, (rounds, num_rows), **INT32)
    lengths[0] = 0
    eager = [torch.ops.mla.topk_indices(scores, k, row_ends=ends) for ends in lengths]
    ends = lengths[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indices, counts = torch.ops.mla.topk_indices(scores, k, row_ends=ends)
    beside, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number in range(rounds):
        with torch.cuda.stream(beside):
            matrix @ matrix
        ends.copy_(lengths[number])
        graph.replay()
        wrong += (indices != eager[number][0]).sum() + (counts != eager[number][1]).sum()
    assert int(wrong) == 0


def test_a_hundred_thousand_rows() -> None:
    num_rows, num_columns, k = 100_000, 4500, 512
    few = hard_rows("normal", 5, num_columns, device="cuda")
    indices, counts = torch.ops.mla.topk_indices(few.repeat(num_rows // 5, 1), k)
    wanted = topk_oracle(few, k)[0].cuda()
    assert bool((counts == k).all())
    assert bool((indices.view(-1, 5, k) == wanted).all())
