"""Top-k on Hopper: the kernel's own code on the CPU, a coroutine for each of its threads."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from attention_inputs import INT_MAX, INT_MIN
from hopper_on_cpu import NO_COMPILER, build
from hopper_resources import MAX_SHARED_BYTES
from topk_oracle import KINDS, by_planes, hard_rows, sampled_columns, topk_oracle

from benchmarks.indexer_topk import scores_of
from benchmarks.indexer_topk_patterns import PATTERNS
from mla_ops.kernels.cuda.compiler import RESERVED_SHARED_BYTES
from mla_ops.kernels.hopper import topk

pytestmark = pytest.mark.skipif(NO_COMPILER, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build("hopper_topk.cpp", tmp_path_factory.mktemp("topk"))


def run(
    library: ctypes.CDLL, plan: topk.Plan, scores: torch.Tensor, k: int, seed: int = 0, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    indices = torch.full((scores.shape[0], k), -7, dtype=torch.int32)
    lengths = torch.full((scores.shape[0],), -7, dtype=torch.int32)
    if plan.planes:
        scores = by_planes(scores)[:, : scores.shape[1]]
    params = topk.pack(plan, scores, k, **options, indices=indices, valid_counts=lengths)
    shared = plan.shared_bytes(k)
    planes = plan.planes + plan.long
    assert library.topk(params, plan.threads, plan.vectors, shared, plan.short, seed, planes, plan.held) == 0
    return indices, lengths


def test_the_host_lays_out_what_the_kernel_reads(library: ctypes.CDLL) -> None:
    assert library.bytes_of_params() == ctypes.sizeof(topk.Params)
    assert library.bytes_of_control() == topk.CONTROL_BYTES


PLANS = {
    "one CTA": topk.Plan(64, 2, 2, 1, 1, 64, 1024, 512),
    "one CTA without gates": topk.Plan(64, 1, 2, 1, 1, 64, 1 << 30, 512),
    "one CTA of a wide chunk": topk.Plan(128, 4, 1, 1, 1, 64, 1024, 512),
    "many rows": topk.Plan(128, 2, 2, 4, 1, 64, 1024, 512),
    "many rows without gates": topk.Plan(128, 2, 2, 4, 1, 64, 1 << 30, 512),
    "by planes": topk.Plan(128, 2, 2, 4, 1, 64, 900, 512, planes=True),
    "by planes without gates": topk.Plan(128, 2, 2, 4, 1, 64, 1 << 30, 512, planes=True),
    "clusters of 6": topk.Plan(64, 2, 2, 1, 6, 64, 1024, 512),
    "clusters of 6 without gates": topk.Plan(64, 2, 2, 1, 6, 64, 1 << 30, 512),
    "clusters of 16 without gates": topk.Plan(64, 2, 2, 1, 16, 64, 1 << 30, 512),
    "clusters of 6 that hold rows": topk.Plan(64, 2, 2, 1, 6, held=4),
}


@pytest.mark.parametrize("sorted", [False, True], ids=["by position", "sorted"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_are_those_of_a_stable_sort(library: ctypes.CDLL, kind: str, plan: topk.Plan, sorted: bool) -> None:
    if sorted and (plan.planes or plan.held):
        pytest.skip("no such rows are sorted")
    for num_columns in (1000, 5003):  # the first are held by registers
        scores = hard_rows(kind, 2, num_columns)[:, 1:]
        got = run(library, plan, scores, 200, sorted=sorted)
        want = topk_oracle(scores, 200, sorted=sorted)
        assert torch.equal(got[1], want[1])
        assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("seen", [True, False], ids=["it alone sees", "it does not see"])
@pytest.mark.parametrize(
    "plan", [plan for plan in PLANS.values() if plan.gated < 2**20 and not plan.held], ids=lambda plan: repr(plan[:5])
)
def test_a_sample_that_says_nothing_of_its_row(library: ctypes.CDLL, plan: topk.Plan, seen: bool) -> None:
    """Peaks that the sample alone sees make a gate too high, others one too low."""
    for num_columns in (1500, 6000):
        scores = hard_rows("normal", 2, num_columns)
        scores[:, sampled_columns(num_columns, plan.sampled) == seen] += 10
        got, want = run(library, plan, scores, 200), topk_oracle(scores, 200)
        assert torch.equal(got[1], want[1])
        assert torch.equal(got[0], want[0])


HALVES = {
    "tiny on both sides of 0": lambda normal: normal * 1e-41,
    "mostly 0 of either sign": lambda normal: torch.where(normal > 1.9, normal, normal.sign() * 0.0),
    "a few lower halves": lambda normal: 1 + (normal * 1e4).int() % 7 * 2.0**-20,
    "two upper halves": lambda normal: 1 + (normal > 0.5) * 2.0**-7 + (normal * 1e4).int() % 999 * 2.0**-23,
    "negative": lambda normal: normal - 9,
    "a few just below many 0": lambda normal: torch.where(
        normal > 0.7, 0.0, torch.where(normal > 0.6, normal * -1e-39, normal - 9)
    ),
    "no finite score": lambda normal: torch.where(normal > 1.5, torch.inf, -torch.inf),
    "few finite scores": lambda normal: torch.where(normal > 2, normal, -torch.inf),
    "better and better": lambda normal: normal + torch.arange(normal.shape[1]) / 300,
    "steps": lambda normal: (torch.arange(normal.shape[1]) // 2048 * 0.25 + 1).expand_as(normal) + normal * 2.0**-12,
}


@pytest.mark.parametrize("gated", [900, 1 << 30], ids=["gates", "no gates"])
@pytest.mark.parametrize("kind", HALVES)
def test_upper_halves_that_do_not_tell_scores_apart(library: ctypes.CDLL, kind: str, gated: int) -> None:
    """Lower halves decide; where too much passes, or too little, scores are read whole."""
    plan = PLANS["by planes"]._replace(gated=gated)
    for num_columns in (700, 3000, 9001):
        scores = HALVES[kind](hard_rows("normal", 2, num_columns, num_columns))
        got, want = run(library, plan, scores, 200), topk_oracle(scores, 200)
        assert torch.equal(got[1], want[1])
        assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("kind", ["normal", *HALVES])
@pytest.mark.parametrize(("start", "end"), [(0, 65536), (0, 65537), (77, 131072), (65600, 131000), (300, 66000)])
def test_columns_of_more_than_16_bits(library: ctypes.CDLL, kind: str, start: int, end: int) -> None:
    """Words of columns behind the first 65,536 begin again at 0."""
    plan = PLANS["by planes"]._replace(long=True)
    normal = hard_rows("normal", 1, 131072, end)
    scores = HALVES[kind](normal) if kind in HALVES else normal
    starts, ends = torch.tensor([[start], [end]], dtype=torch.int32)
    got = run(library, plan, scores, 900, row_starts=starts, row_ends=ends)
    want = topk_oracle(scores, 900, starts, ends)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0], want[0])


MEETINGS = (
    topk.Plan(64, 2, 2, 1, 16, held=2),
    topk.Plan(128, 2, 2, 1, 4, held=6),
    topk.Plan(64, 2, 2, 1, 3, held=4),
    topk.Plan(64, 2, 2, 1, 6, held=1),
)
# how often CTAs count, where it does not depend on the plan
COUNTS = {"normal": 1, "alike": 1, "bf16": 1, "up": 1, "equal": 3, "99 % 0": 3}


@pytest.mark.parametrize("plan", MEETINGS, ids=lambda plan: f"{plan.cluster} CTAs of {plan.held} groups a thread")
@pytest.mark.parametrize("kind", [*KINDS, *PATTERNS])
def test_clusters_count_until_they_know_enough(library: ctypes.CDLL, kind: str, plan: topk.Plan) -> None:
    """Many equal scores, or other ones in one bin, take more counts; a count of columns is the last of equal ones."""
    num_columns = plan.cluster * plan.held_columns
    for seed, k in enumerate((300, num_columns // 3, 1)):
        generator = torch.Generator().manual_seed(seed)
        if kind in PATTERNS:
            wide = PATTERNS[kind](torch.randn(2, num_columns, generator=generator), generator)
        else:
            wide = hard_rows(kind, 2, num_columns, seed)
        scores = wide[:, 3:]
        ends = torch.tensor([num_columns - 3, num_columns - 90], dtype=torch.int32)
        got, want = run(library, plan, scores, k, seed, row_ends=ends), topk_oracle(scores, k, None, ends)
        assert torch.equal(got[1], want[1])
        assert torch.equal(got[0], want[0])
        if k == 300 and plan.held > 1:
            assert library.counts() == COUNTS.get(kind, library.counts())


HARD_TO_TELL = {
    "tiny about many 0": lambda normal: torch.where(normal > 1.5, 0.0, torch.sign(normal) * 2.0 ** (normal * 40 - 60)),
    "one bin after the other": lambda normal: 1 + (normal * 1e4).int() % 5000 * 2.0**-23,
    "many of one low bit": lambda normal: 1 + (normal > 0.3) * 2.0**-23 + (normal > 2) * 2.0**-10,
    "just below 0": lambda normal: torch.where(normal > 0, -1e-45, torch.where(normal > -0.2, -0.0, normal)),
    "NaN of any bits": lambda normal: torch.where(
        normal > 2, normal, (normal * 9).int().bitwise_or(-8388608).view(torch.float32)
    ),
    "infinite": lambda normal: torch.where(normal > 0.5, torch.inf, torch.where(normal > 0, torch.nan, -torch.inf)),
    "largest": lambda normal: torch.where(
        normal > 0.5, 3.4028234e38, torch.where(normal > 0, -3.4028234e38, torch.inf)
    ),
}


@pytest.mark.parametrize("plan", MEETINGS[:2], ids=lambda plan: f"{plan.cluster} CTAs")
@pytest.mark.parametrize("kind", HARD_TO_TELL)
def test_clusters_tell_all_keys_apart(library: ctypes.CDLL, kind: str, plan: topk.Plan) -> None:
    num_columns = plan.cluster * plan.held_columns
    for seed in range(4):
        scores = HARD_TO_TELL[kind](hard_rows("normal", 1, num_columns, seed))
        for k in (200, 900, num_columns // 2, num_columns - 1):
            if kind == "infinite" and k == 200:
                scores = -scores
            got, want = run(library, plan, scores, k, seed), topk_oracle(scores, k)
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])
    crowded = torch.randn(1, num_columns)
    crowded.view(1, -1, 32)[:, : 160 : plan.cluster] += 20
    assert torch.equal(run(library, plan, crowded, 300)[0], topk_oracle(crowded, 300)[0])
    assert library.counts() > 1


SHORT_PLANS = {
    "a group a thread": topk.Plan(512, 1, 0, 1, short=True),
    "two groups a thread": topk.Plan(512, 2, 0, 2, short=True),
    "four groups a thread": topk.Plan(128, 4, 0, 1, short=True),
}


@pytest.mark.parametrize("sorted", [False, True], ids=["by position", "sorted"])
@pytest.mark.parametrize("k", [1, 100, 1500, 2044])
@pytest.mark.parametrize("plan", SHORT_PLANS.values(), ids=SHORT_PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_of_short_rows_are_those_of_a_stable_sort(
    library: ctypes.CDLL, kind: str, plan: topk.Plan, k: int, sorted: bool
) -> None:
    scores = hard_rows(kind, 2, 2048)[:, 3:]
    got = run(library, plan, scores, k, sorted=sorted)
    want = topk_oracle(scores, k, sorted=sorted)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("sorted", [False, True], ids=["by position", "sorted"])
@pytest.mark.parametrize("plan", [*PLANS.values(), *SHORT_PLANS.values()], ids=[*PLANS, *SHORT_PLANS])
def test_rows_have_starts_ends_and_block_tables(library: ctypes.CDLL, plan: topk.Plan, sorted: bool) -> None:
    if sorted and (plan.planes or plan.held):
        pytest.skip("no such rows are sorted")
    spans = [
        (0, 0),
        (0, 1),
        (5, 104),
        (5, 105),
        (5, 106),
        (-3, 2000),
        (1000, 5000),
        (30, 20),
        (7, 1207),
        (2, 33),
        (1001, 1203),
        (1397, 9999),
        (9, 9),
        (5, INT_MIN),
        (INT_MAX, 3),
        (INT_MAX, INT_MIN),
        (INT_MIN, INT_MAX),
    ]
    spans += [(offset, offset + length) for offset in (1, 2, 3, 4) for length in (101, 700)]
    starts, ends = torch.tensor(spans, dtype=torch.int32).T.contiguous()
    wide = hard_rows("special", len(spans), 2000)
    scores = wide[:, 3:1601]
    requests = torch.arange(len(spans), dtype=torch.int32) % 5 - 1
    table = torch.randperm(400, dtype=torch.int32).view(4, 100)[:, :50]
    table[1, 3], table[2, 0] = -1, -5
    want, lengths = topk_oracle(scores, 100, starts, ends, sorted=sorted)
    got = run(library, plan, scores, 100, row_starts=starts, row_ends=ends, sorted=sorted)
    assert torch.equal(got[1], lengths)
    assert torch.equal(got[0], want)
    blocks = want // 24
    found = table[requests.clamp(min=0)[:, None], blocks.clamp(0, 49)]
    dead = (want < 0) | (requests < 0)[:, None] | (blocks >= 50) | (found < 0)
    slots = torch.where(dead, -1, found * 24 + want % 24)
    got = run(
        library,
        plan,
        scores,
        100,
        row_starts=starts,
        row_ends=ends,
        sorted=sorted,
        block_table=table,
        req_id_per_token=requests,
        block_size=24,
    )
    assert torch.equal(got[1], lengths)
    assert torch.equal(got[0], slots)


H200 = (132, (66, 28, 17, 14, 7))  # SMs, and clusters of each size at one time: a GPC has 16 or 18 SMs


def test_a_plan_fits_its_rows_and_an_sm() -> None:
    """Every k, so many CTAs as the plan says at the usual one; clusters that all run at one time, a CTA an SM."""
    at_once = dict(zip(topk.CLUSTERS, H200[1], strict=True))
    for num_rows in (1, 2, 7, 8, 14, 15, 16, 28, 29, 64, 66, 67, 128, 263, 264, 100_000):
        for num_columns in (1, 4096, 4097, 8192, 32768, 131072, topk.MAX_COLUMNS):
            for k in (1, 2, 3, 2047, 2048, 4095, 4096):
                plan = topk.plan_for(num_rows, num_columns, *H200, k)
                assert plan.kernel in topk.KERNELS
                assert plan.cluster == 1 or num_rows <= at_once[plan.cluster]
                assert not plan.short or num_columns <= plan.chunk
                assert plan.held * plan.threads // 32 <= plan.cluster << plan.turn_bits or not plan.held
                assert plan.cluster << plan.turn_bits + 2 <= plan.threads or not plan.held  # a word of bits a thread
                assert plan.shared_bytes(k) <= MAX_SHARED_BYTES
                alone = 2 * (plan.shared_bytes(k) + RESERVED_SHARED_BYTES) > topk.SM_SHARED_BYTES
                assert alone or plan.cluster == 1
                assert plan.short or plan.capacity(k) >= k + plan.chunk
                assert plan.capacity(k) % 2 == 0
            plan = topk.plan_for(num_rows, num_columns, *H200, 2048)
            assert (plan.shared_bytes(2048) + RESERVED_SHARED_BYTES) * plan.ctas <= 228 * 1024


def test_many_rows_have_room_for_another_chunk_where_fewer_ctas_fit() -> None:
    """Else all but the best go behind each chunk."""
    for k in (1, 2048, 4096):
        plan = topk.MANY
        most = topk.SM_SHARED_BYTES // (plan.shared_bytes(k) + RESERVED_SHARED_BYTES)
        assert most == (4 if k <= 2048 else 3)
        assert plan.capacity(k) > k + 3 * plan.chunk // 2


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "cluster"),
    [(1, 32768, 8), (1, 131072, 16), (7, 131072, 16), (8, 131072, 8), (14, 131072, 8), (16, 32768, 4), (16, 131072, 6)]
    + [(18, 131072, 4), (64, 131072, 2), (66, 16388, 2), (67, 131072, 1), (128, 131072, 1), (4096, 131072, 1)],
)
def test_clusters_do_not_wait_for_one_another(num_rows: int, num_columns: int, cluster: int) -> None:
    """16 clusters of 8 are 128 CTAs, and yet an H200 runs only 14 of them at one time."""
    assert topk.plan_for(num_rows, num_columns, *H200, 2048).cluster == cluster


def test_clusters_meet_once_where_their_registers_hold_a_row() -> None:
    """By the fewest columns of a thread first, then by the fewest CTAs."""
    sizes = ((1, 32768), (16, 32768), (64, 32768), (16, 131072), (1, 262144))
    plans = [topk.plan_for(*size, *H200, 2048) for size in sizes]
    assert [(plan.cluster, plan.held_columns // 4096) for plan in plans] == [(8, 1), (4, 2), (2, 4), (6, 6), (16, 4)]
    assert [plan.threads for plan in plans] == [512, 512, 1024, 1024, 1024]
    assert not topk.plan_for(1, 32768, *H200, 2048, sorted=True).held
    assert not topk.plan_for(18, 131072, *H200, 2048).held
    assert not topk.plan_for(1, 400000, *H200, 2048).held


def counts_of_cluster(scores: torch.Tensor, plan: topk.Plan, k: int) -> torch.Tensor:
    """A row's counts in the bins of `topk_cluster.cuh`, for each CTA, the best first."""
    num_columns, warp = scores.numel(), torch.arange(plan.threads) // 32
    group = torch.arange(num_columns) // 4
    run, lanes = group // 8, 1
    cta, thread = run % plan.cluster, (run // plan.cluster * 8 + group % 8) % plan.threads
    while lanes < 32 and 8 * plan.held * lanes * k <= 3 * num_columns:
        lanes *= 2
    of_thread = warp * (32 // lanes) + torch.arange(plan.threads) % (32 // lanes)
    groups = cta * (plan.threads // lanes) + of_thread[thread]
    best = scores.new_full((plan.cluster * plan.threads // lanes,), -torch.inf)
    best = best.scatter_reduce(0, groups, scores, "amax")
    low, high = best.min(), best.view(plan.cluster, -1).amax(1).min()
    bins = ((scores - low) * ((topk.CLUSTER_BINS - 1) / (high - low))).round().clamp(max=topk.CLUSTER_BINS - 1)
    there = bins >= 0
    numbers = cta[there] * topk.CLUSTER_BINS + topk.CLUSTER_BINS - 1 - bins[there].long()
    return torch.bincount(numbers, minlength=plan.cluster * topk.CLUSTER_BINS).view(plan.cluster, -1)


@pytest.mark.parametrize("kind", ["normal", "neighbours alike"])
@pytest.mark.parametrize("shape", [(1, 32768), (4, 131072), (16, 32768), (16, 131072), (64, 32768)])
def test_few_scores_lie_in_the_bin_of_the_last_that_is_chosen(kind: str, shape: tuple[int, int]) -> None:
    """More than 128 are chosen from by another selection; a count of 255 makes CTAs count again."""
    k = 2048
    plan = topk.plan_for(*shape, *H200, k)
    assert plan.held
    for scores in scores_of(kind, 4, shape[1], torch.Generator().manual_seed(0)):
        counts = counts_of_cluster(scores, plan, k)
        assert int(counts.max()) < 255
        total = counts.sum(0).cumsum(0)
        border = int((total >= k).nonzero()[0])
        assert int(total[-1]) < 20000
        assert int(counts[:, border].sum()) <= 128


def test_gates_of_many_rows_whose_neighbours_score_alike_let_enough_pass() -> None:
    """A margin of three deviations does not; where it fails, a row is read again while the launch waits for it."""
    num_rows, num_columns, k = 512, 32768, 2048
    plan = topk.plan_for(num_rows, num_columns, *H200, k)
    scores = scores_of("neighbours alike", num_rows, num_columns, torch.Generator().manual_seed(0))
    sample = scores[:, sampled_columns(num_columns, plan.sampled)].sort(dim=1, descending=True).values
    mean = plan.sampled * k / num_columns

    def failing(deviations: float) -> int:
        gates = sample[:, int(mean + deviations * mean**0.5 + 4) - 1]
        return int(((scores >= gates[:, None]).sum(1) < k).sum())

    assert failing(3) > 5
    assert failing(plan.deviations) == 0
    deviations = [topk.plan_for(rows, num_columns, *H200, k).deviations for rows in (1, 64, 128, 512, 100_000)]
    assert deviations[:4] == sorted(deviations[:4])
    assert (deviations[0], deviations[3], deviations[4]) == (5, 7, 6)


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "k", "planes"),
    [
        (512, 65536, 2048, True),
        (264, 131072, 2048, True),
        (264, 131073, 2048, False),
        (265, 65537, 2048, False),
        (132, 32768, 2048, False),
        (512, 4096, 2048, False),
    ]
    + [(512, 32768, 2049, False), (264, 32768, 2048, True), (265, 32768, 1, True)],
)
def test_scores_of_many_rows_lie_by_planes(num_rows: int, num_columns: int, k: int, planes: bool) -> None:
    """Words count 131,072 columns; such rows have a CTA each; there is room for three words to two entries."""
    assert topk.takes_planes(num_rows, num_columns, H200[0], k) == planes
    if planes:
        plan = topk.plan_by_planes(num_rows, num_columns, H200[0])
        assert (plan.threads == 512) == (num_rows <= 264)
        assert plan.long == (num_columns > 65536)
        assert not topk.plan_for(num_rows, num_columns, *H200, k).short
        assert plan.gated <= plan.capacity(k) * 3 // 2
        assert (plan.shared_bytes(k) + RESERVED_SHARED_BYTES) * plan.ctas <= topk.SM_SHARED_BYTES


@pytest.mark.parametrize(("num_ctas", "share"), [(1, 1), (132, 1), (133, 2), (264, 2), (265, 3), (512, 4), (2000, 16)])
def test_no_multiprocessor_takes_more_ctas_behind_scores_than_its_share(num_ctas: int, share: int) -> None:
    block = topk.spread_bytes(num_ctas, H200[0]) + RESERVED_SHARED_BYTES
    assert topk.SM_SHARED_BYTES // block == share
    assert block <= MAX_SHARED_BYTES


def test_rows_that_do_not_begin_at_16_bytes_count_from_there() -> None:
    scores = torch.empty(4, 4096)
    assert scores.data_ptr() % 16 == 0
    assert topk.aligned_columns(scores) == 4096
    assert topk.aligned_columns(scores[:, 1:]) == 4095 + 3
    assert topk.aligned_columns(torch.empty(4, 4097)[:, :4096]) == 4096 + 3
