"""Schedules of sparse attention: every lowering against Python integers, and what a schedule is for."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mla_ops
from mla_ops import dispatch
from mla_ops.metadata.schedule import ScheduleSize, schedule_size

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
BLOCK = 64


@pytest.fixture(params=["reference", "triton", *(["hopper"] if ON_HOPPER else [])])
def lowering(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each lowering that may run here, forced for the ops that the test calls; only schedules have one for Hopper."""
    if request.param == "triton" and not dispatch.is_installed("triton"):
        pytest.skip("Triton is not installed")
    others = "triton" if request.param == "hopper" else request.param
    with dispatch.override(others, plan_sparse_attention=request.param):
        yield request.param


@dataclass
class Plan:
    """One call, as Python integers."""

    topk_length: list[int]
    num_clusters: int
    cluster_size: int
    topk: int = 2048
    num_workers: int = 132
    overhead: int = 4
    extra_topk_length: list[int] | None = None
    extra_topk: int = 0
    deterministic: bool = False
    blocks: list[int] = field(init=False)

    def __post_init__(self) -> None:
        def count(length: int, columns: int) -> int:
            return -(-min(max(length, 0), columns) // BLOCK)

        extra = self.extra_topk_length or [self.extra_topk] * len(self.topk_length)
        self.blocks = [
            count(length, self.topk) + count(more, self.extra_topk)
            for length, more in zip(self.topk_length, extra, strict=True)
        ]


def run(plan: Plan, device: torch.device | str = "cpu") -> list[tuple[int, int]]:
    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    # 77: what is left of it was not written
    table = torch.full((plan.num_clusters, plan.cluster_size, 2), 77, dtype=torch.int32, device=device)
    mla_ops.plan_sparse_attention(
        int32(plan.topk_length),
        table,
        plan.topk,
        plan.num_workers,
        overhead=plan.overhead,
        extra_topk_length=None if plan.extra_topk_length is None else int32(plan.extra_topk_length),
        extra_topk=plan.extra_topk,
        deterministic=plan.deterministic,
    )
    return [(row, parts) for row, parts in table.view(-1, 2).tolist()]


def split(blocks: int, share: int, cluster_size: int) -> int:
    parts = 1
    while blocks > parts * share and parts < cluster_size:
        parts *= 2
    return parts


def chosen_parts(plan: Plan) -> list[int]:
    if plan.deterministic:
        return [plan.cluster_size if blocks else 1 for blocks in plan.blocks]
    longest = max(plan.blocks)
    capacity = sum(-(-min(columns, INT_MAX) // BLOCK) for columns in (plan.topk, plan.extra_topk))
    # the longest row that may be, three quarters of it, its half, three quarters of that, and so on
    shares = [-(-capacity * quarters // (4 * 2**octave)) for octave in range(8) for quarters in (4, 3)]
    best, best_time = [1] * len(plan.blocks), None
    for share in shares:
        parts = [split(blocks, share, plan.cluster_size) for blocks in plan.blocks]
        if sum(parts) > plan.num_clusters * plan.cluster_size:
            continue
        live = sum(p for p, blocks in zip(parts, plan.blocks, strict=True) if blocks)
        slot = plan.overhead + max(min(share, longest), -(-longest // plan.cluster_size))
        waves = -(-live // plan.num_workers)
        work = live * plan.overhead + sum(plan.blocks)
        time = min(waves * plan.num_workers * slot, work + plan.num_workers * slot)
        if best_time is None or time < best_time:
            best, best_time = parts, time
    return best


def oracle(plan: Plan) -> list[tuple[int, int]]:
    slots: list[tuple[int, int]] = []
    if plan.topk_length:
        parts = chosen_parts(plan)
        for row in sorted(range(len(parts)), key=lambda row: (-plan.blocks[row], row)):
            slots += [(row, parts[row])] * parts[row]
    return slots + [(-1, 1)] * (plan.num_clusters * plan.cluster_size - len(slots))


CASES = {
    "one token": Plan([2048], 1, 16),
    "few tokens share the chip": Plan([2048] * 8, 16, 8),
    "a full batch is not split": Plan([2048] * 132, 132, 2),
    "a little more than a full batch is": Plan([2048] * 140, 140, 2),
    "few live rows of a large batch": Plan([2048] * 3 + [0] * 253, 128, 4),
    "one long row among short ones": Plan([100] * 60 + [2048] + [64] * 60, 64, 8),
    "padding between": Plan([0, 5, 0, 2048, 0, 70], 4, 4),
    "padding only": Plan([0] * 7, 7, 2),
    "no tokens": Plan([], 3, 4),
    "no slots": Plan([], 0, 4),
    "anything for a length": Plan([INT_MIN, INT_MAX, -1, 1, 2049], 4, 8),
    "as many keys as there are integers": Plan([INT_MAX, 5, INT_MAX - 63], 3, 16, topk=INT_MAX, extra_topk=INT_MAX),
    "top-k of zero": Plan([3, 4], 2, 2, topk=0),
    "two caches": Plan(
        [128] * 9, 8, 8, 128, extra_topk_length=[8000, 64, 0, 1, 5, 4000, 9000, 77, 128], extra_topk=8192
    ),
    "a whole extra cache": Plan([128, 0, 3], 4, 8, 128, extra_topk=512),
    "one worker": Plan([2048, 1024, 512], 4, 16, num_workers=1),
    "no overhead": Plan([2048, 1024, 512], 4, 16, num_workers=20, overhead=0),
    "no room to split": Plan([2048, 1024, 512, 3], 1, 4),
    "deterministic": Plan([2048, 0, 3, 700], 6, 4, deterministic=True),
    "deterministic, two caches": Plan(
        [0, 0, 9], 3, 16, 128, extra_topk_length=[5, 0, 9], extra_topk=64, deterministic=True
    ),
    "several programs": Plan([(37 * i) % 2100 for i in range(700)], 400, 2),
    "rows of a warp": Plan([(37 * i) % 2100 for i in range(32)], 40, 4),
    "one row more than a warp's": Plan([(37 * i) % 2100 for i in range(33)], 40, 4),
    "one token, fewer workers than parts": Plan([2048], 1, 16, num_workers=3),
    "as many workers as there are integers": Plan([2048, 700, 1, 64], 4, 16, num_workers=INT_MAX),
    "a slot costs as much as there are integers": Plan([2048, 700, 1, 64], 4, 16, overhead=INT_MAX),
}


@pytest.mark.parametrize("name", CASES)
def test_schedule_equals_python(lowering: str, device: torch.device, name: str) -> None:
    assert run(CASES[name], device) == oracle(CASES[name])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    num_tokens = draw(st.integers(0, 40))
    lengths = st.one_of(st.integers(-2, 2100), st.sampled_from((0, 64, 2048, INT_MIN, INT_MAX)))
    cluster_size = draw(st.sampled_from((1, 2, 4, 8, 16)))
    deterministic = draw(st.booleans())
    least = num_tokens if deterministic else -(-num_tokens // cluster_size)
    extra = draw(st.one_of(st.none(), st.lists(lengths, min_size=num_tokens, max_size=num_tokens)))
    return Plan(
        draw(st.lists(lengths, min_size=num_tokens, max_size=num_tokens)),
        least + draw(st.integers(0, 30)),
        cluster_size,
        draw(st.sampled_from((0, 1, 512, 2048))),
        draw(st.sampled_from((1, 7, 66, 132))),
        draw(st.integers(0, 9)),
        extra,
        draw(st.sampled_from((0, 100, 1024))),
        deterministic,
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans())
def test_schedule_equals_python_on_anything(lowering: str, device: torch.device, plan: Plan) -> None:
    assert run(plan, device) == oracle(plan)


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_a_thread_block_finds_its_part_by_its_number(plan: Plan) -> None:
    """A kernel relies on it: a row's parts are neighbours, start at a multiple of their number, and are all there."""
    parts_of: dict[int, list[int]] = {}
    lengths = []
    for slot, (row, parts) in enumerate(run(plan)):
        if row < 0:
            assert parts == 1
            continue
        assert slot // plan.cluster_size == (slot - slot % parts + parts - 1) // plan.cluster_size
        parts_of.setdefault(row, []).append(slot % parts)
        lengths.append(plan.blocks[row])
        assert parts == 1 or plan.blocks[row] > 0
    assert sorted(parts_of) == list(range(len(plan.topk_length)))
    assert all(parts == list(range(len(parts))) for parts in parts_of.values())
    assert lengths == sorted(lengths, reverse=True)


def makespan(slots: list[tuple[int, int]], plan: Plan) -> float:
    """Time of the slots in order, each on the worker that is free first."""
    workers = [0.0] * plan.num_workers
    for row, parts in slots:
        if row >= 0 and plan.blocks[row]:
            heapq.heappush(workers, heapq.heappop(workers) + plan.overhead + -(-plan.blocks[row] // parts))
    return max(workers)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 2048), min_size=1, max_size=300), seed=st.randoms())
def test_a_schedule_takes_no_longer_than_rows_in_order(lengths: list[int], seed: object) -> None:
    """Against unsplit rows in the order of the batch, in the model that the schedule is made by."""
    size = schedule_size(len(lengths), 64, 2048, 132)
    plan = Plan(lengths, size.num_clusters, size.cluster_size, num_workers=size.num_workers)
    in_order = [(row, 1) for row in range(len(lengths))]
    # what an estimate by two upper bounds may miss, at most: one slot
    assert makespan(run(plan), plan) <= makespan(in_order, plan) + plan.overhead


@pytest.mark.parametrize(
    ("live", "captured", "at_most"),
    [
        (1, 1, 6),
        (1, 100, 6),
        (1, 256, 20),
        (8, 8, 8),
        (8, 100, 8),
        (15, 60, 8),
        (64, 64, 20),
        (128, 128, 36),
        (140, 140, 60),
        (256, 256, 72),
    ],
)
def test_a_captured_batch_is_split_for_its_live_rows(live: int, captured: int, at_most: int) -> None:
    """In blocks of 64 keys, of which a row has 32; 4 of them is what a slot costs beside."""
    size = schedule_size(captured, 16, 2048, 132)
    plan = Plan(
        [2048] * live + [0] * (captured - live), size.num_clusters, size.cluster_size, num_workers=size.num_workers
    )
    assert makespan(run(plan), plan) <= at_most


def test_a_deterministic_split_is_blind_to_the_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 2049, (60,), generator=generator).tolist()
    size = schedule_size(60, 128, 2048, 132, deterministic=True)
    alone = {}
    for length in lengths:
        ((_, alone[length]), *_) = run(Plan([length], size.num_clusters, size.cluster_size, deterministic=True))
    together = run(Plan(lengths, size.num_clusters, size.cluster_size, deterministic=True))
    assert {(lengths[row], parts) for row, parts in together if row >= 0} == set(alone.items())


@pytest.mark.parametrize(
    ("arguments", "deterministic", "expected"),
    [
        ((1, 16, 2048, 132), False, ScheduleSize(1, 16, 112)),
        ((8, 16, 2048, 132), False, ScheduleSize(8, 16, 112)),
        ((8, 64, 128 + 512, 132), False, ScheduleSize(8, 8, 120)),
        ((30, 128, 2048, 132), False, ScheduleSize(24, 4, 60)),
        ((64, 64, 2048, 132), False, ScheduleSize(64, 2, 132)),
        ((100, 16, 2048, 132), False, ScheduleSize(15, 16, 112)),
        ((140, 16, 2048, 132), False, ScheduleSize(140, 2, 132)),
        ((128, 128, 2048, 132), False, ScheduleSize(128, 2, 66)),
        ((9, 16, 64, 132), False, ScheduleSize(9, 1, 132)),
        ((0, 16, 2048, 132), False, ScheduleSize(0, 16, 112)),
        ((512, 16, 2048, 132), True, ScheduleSize(512, 4, 120)),
        ((1, 128, 2048, 132), True, ScheduleSize(1, 4, 60)),
        ((3, 16, 128 + 8192, 132), True, ScheduleSize(3, 16, 112)),
        ((3, 64, 128 + 512, 132), True, ScheduleSize(3, 2, 132)),
        ((3, 16, 0, 132), True, ScheduleSize(3, 1, 132)),
    ],
)
def test_schedules_are_sized_by_capacity(
    arguments: tuple[int, int, int, int], deterministic: bool, expected: ScheduleSize
) -> None:
    assert schedule_size(*arguments, deterministic=deterministic) == expected


@pytest.mark.parametrize("deterministic", [False, True])
def test_step_metadata_keeps_a_schedule_of_its_lengths(
    lowering: str, device: torch.device, deterministic: bool
) -> None:
    metadata = mla_ops.StepMetadata.allocate(
        max_num_tokens=12,
        max_num_requests=4,
        max_blocks_per_request=40,
        block_size=64,
        index_topk=2048,
        schedule_num_heads=16,
        deterministic=deterministic,
        device=device,
    )
    schedule = metadata.schedule
    assert schedule is not None
    table = schedule.tile_scheduler_metadata
    assert sorted(row for row in set(table[:, :, 0].flatten().tolist()) if row >= 0) == list(range(12))
    for query_lens, seq_lens in (([1, 1, 1], [2500, 30, 700]), ([2, 0, 5, 1], [65, 9, 2000, 1]), ([], [])):
        starts = torch.tensor([0, *query_lens], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        metadata.build(starts, lens, torch.zeros(len(seq_lens), 40, dtype=torch.int32, device=device))
        expected = oracle(
            Plan(
                metadata.topk_length.tolist(),
                *table.shape[:2],
                num_workers=schedule.num_workers,
                deterministic=deterministic,
            )
        )
        assert [(row, parts) for row, parts in table.view(-1, 2).tolist()] == expected
        assert metadata.schedule.tile_scheduler_metadata.data_ptr() == table.data_ptr()


def test_v4_metadata_keeps_a_schedule_for_each_type_of_layer(lowering: str, device: torch.device) -> None:
    metadata = mla_ops.V4StepMetadata.allocate(
        max_num_tokens=6, max_num_requests=3, max_seq_len=4096, c4a_topk=512, schedule_num_heads=64, device=device
    )
    starts = torch.tensor([0, 1, 4], dtype=torch.int32, device=device)
    lens = torch.tensor([4000, 90], dtype=torch.int32, device=device)
    tables = [torch.arange(2 * width, dtype=torch.int32, device=device).view(2, width) for width in (64, 16, 16)]
    metadata.build(starts, lens, *tables)
    window = metadata.window_lens.tolist()
    assert window == [128, 88, 89, 90, 0, 0]
    for schedule, extra, extra_topk in (
        (metadata.step.schedule, None, 0),
        (metadata.c4a_schedule, [1000, 22, 22, 22, 0, 0], 512),
        (metadata.c128a_schedule, [31, 0, 0, 0, 0, 0], 32),
    ):
        assert schedule is not None
        table = schedule.tile_scheduler_metadata
        plan = Plan(window, *table.shape[:2], 128, schedule.num_workers, 4, extra, extra_topk)
        assert [(row, parts) for row, parts in table.view(-1, 2).tolist()] == oracle(plan)


def test_metadata_has_no_schedule_unasked() -> None:
    sizes = {"max_num_tokens": 4, "max_num_requests": 2}
    step = mla_ops.StepMetadata.allocate(**sizes, max_blocks_per_request=2, block_size=64, index_topk=8)
    v4 = mla_ops.V4StepMetadata.allocate(**sizes, max_seq_len=256)
    assert step.schedule is v4.step.schedule is v4.c4a_schedule is v4.c128a_schedule is None


@pytest.mark.parametrize("name", ["max_num_tokens", "num_heads", "topk", "extra_topk"])
def test_a_schedule_of_impossible_size_is_refused(name: str) -> None:
    sizes = {"max_num_tokens": 4, "num_heads": 16, "topk": 64, "extra_topk": 0} | {name: -1}
    with pytest.raises(ValueError, match=rf"SparseSchedule\.allocate: {name} must be at least \d, got -1"):
        mla_ops.SparseSchedule.allocate(**sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8, 32, 128, 512, 8192])
def test_schedule_at_real_sizes(lowering: str, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    lengths = torch.randint(0, 2049, (num_tokens,), generator=generator).tolist()
    size = schedule_size(num_tokens, 64, 2048, 132)
    plan = Plan(lengths, size.num_clusters, size.cluster_size, num_workers=size.num_workers)
    assert run(plan, "cuda") == oracle(plan)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 31, 40, 1000, 16384])
def test_schedule_of_tensors_at_any_element(num_tokens: int) -> None:
    """On the GPU against the reference on the CPU: offsets, both caches, lengths that overflow sums of 32 bits."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        topk = (2048, INT_MAX)[seed % 2]
        draws = [torch.randint(-5, topk, (num_tokens + 1,), generator=generator, dtype=torch.int32) for _ in range(2)]
        size = schedule_size(num_tokens, (16, 128)[seed // 2 % 2], 2048, 132, deterministic=seed % 5 == 4)
        tables = []
        for device in ("cpu", "cuda"):
            table = torch.full((size.num_clusters * size.cluster_size * 2 + 1,), 77, dtype=torch.int32, device=device)
            table = table[1:].view(size.num_clusters, size.cluster_size, 2)
            lengths, extra = (draw.to(device)[1:] for draw in draws)
            options = {"extra_topk_length": extra if seed % 3 else None, "extra_topk": (0, 512, INT_MAX)[seed % 3]}
            mla_ops.plan_sparse_attention(
                lengths, table, topk, size.num_workers, deterministic=seed % 5 == 4, **options
            )
            tables.append(table.cpu())
        assert torch.equal(*tables)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_schedule_follows_the_lengths(deterministic: bool) -> None:
    schedule = mla_ops.SparseSchedule.allocate(
        max_num_tokens=100, num_heads=16, topk=2048, extra_topk=640, deterministic=deterministic, device="cuda"
    )
    lengths, extra = (torch.zeros(100, dtype=torch.int32, device="cuda") for _ in range(2))
    schedule.build(lengths, extra)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        schedule.build(lengths, extra)
    table = schedule.tile_scheduler_metadata
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        live = (torch.arange(100) < 5 * seed + 1).int()
        lengths.copy_(torch.randint(0, 2049, (100,), generator=generator) * live)
        extra.copy_(torch.randint(0, 700, (100,), generator=generator) * live)
        graph.replay()
        plan = Plan(
            lengths.tolist(),
            *table.shape[:2],
            num_workers=schedule.num_workers,
            extra_topk_length=extra.tolist(),
            extra_topk=640,
            deterministic=deterministic,
        )
        assert [(row, parts) for row, parts in table.view(-1, 2).tolist()] == oracle(plan)
