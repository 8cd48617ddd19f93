"""`select_keys` beside this library's own two steps, over many shapes: `bench indexer_select --sweep`.

Two steps are what a user would write: scores, then top-k of them, whole, in tensors that each call allocates. Both ways
take turns in captured graphs, each call behind an overwrite of L2. Memory is the peak that a call allocates beside its
results. A row counts if both give the same bits, and some rows of them are what a stable sort chooses.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from benchmarks import common, timing
from benchmarks.indexer_scores import Paged, flat_inputs, paged_inputs
from benchmarks.indexer_topk_patterns import best_columns

FORMAT = "fp8_index"
TOPK = 2048
BAR = 1.005
CHECKED_ROWS = 8
LONG_US, LONG_TURNS = 1000, 3  # of calls that long

# keys: query tokens. About where a launch is chosen by another rule, or tokens come by slices.
FLAT = {
    2000: (1, 64, 300, 1024),
    4096: (1, 16, 100, 132, 140, 300, 1024, 4096),
    5000: (133, 265, 600),
    8192: (1, 16, 64, 132, 140, 264, 512, 2048),
    16384: (1, 8, 32, 100, 132, 140, 265, 512, 1024, 4096),
    30000: (140, 264, 300, 400),
    32768: (1, 4, 16, 64, 100, 132, 140, 200, 256, 264, 300, 400, 512, 700, 1024, 2048, 4096),
    65536: (1, 4, 32, 64, 100, 128, 132, 140, 200, 264, 300, 400, 512, 700, 1024, 2048),
    131072: (1, 2, 16, 32, 64, 100, 128, 140, 265, 512, 1024, 2048),
}
# keys: requests of one query token, and of two
PAGED = {
    4096: ((1, 8, 32, 64, 128, 256), (1, 16, 64)),
    8192: ((1, 4, 16, 64, 132, 256), (2, 32, 128)),
    16384: ((2, 16, 64, 128, 256), (1, 16, 64)),
    32768: ((1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 4, 16, 64, 128)),
    65536: ((1, 4, 16, 64, 128, 140, 256), (8, 64, 128)),
    131072: ((1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 16, 32, 64, 128)),
}

Result = tuple[torch.Tensor, torch.Tensor]


class Shape(NamedTuple):
    """Flat keys if there are no requests."""

    keys: int
    tokens: int
    requests: int
    heads: int

    def __str__(self) -> str:
        rows = f"B={self.requests} next_n={self.tokens // self.requests}" if self.requests else f"T={self.tokens}"
        return f"{'paged' if self.requests else 'flat'} {rows} keys={self.keys} H={self.heads}"


class Ways(NamedTuple):
    """Calls that return their results; `scores` are those of the two steps, and `ends` the ends of their rows."""

    fused: Callable[[], Result]
    two_steps: Callable[[], Result]
    scores: Callable[[], torch.Tensor]
    ends: torch.Tensor


class Taken(NamedTuple):
    """What a shape took: microseconds, bytes beside results, launches of the fused call, and whether it was right."""

    shape: Shape
    fused: float
    two_steps: float
    fused_bytes: int
    two_steps_bytes: int
    launches: int
    right: bool

    @property
    def ratio(self) -> float:
        return self.fused / self.two_steps

    def __str__(self) -> str:
        each = " ".join(f"{peak / self.shape.tokens / 1024:9.1f}" for peak in (self.fused_bytes, self.two_steps_bytes))
        return (
            f"{self.shape!s:<38} {self.launches:>8} {self.fused:>9.2f} {self.two_steps:>9.2f} {self.ratio:>6.3f} "
            f"{self.fused_bytes / 2**20:>8.1f} {each}{'' if self.right else '  WRONG'}"
        )


HEADER = (
    f"{'shape':<38} {'launches':>8} {'fused us':>9} {'steps us':>9} {'ratio':>6} {'MiB':>8} {'KB/token':>9} "
    f"{'steps KB':>9}"
)


def shapes(heads: list[int], kinds: str) -> Iterator[Shape]:
    for num_heads in heads:
        for keys, tokens in FLAT.items() if "flat" in kinds else ():
            yield from (Shape(keys, count, 0, num_heads) for count in tokens)
        for keys, requests in PAGED.items() if "paged" in kinds else ():
            for each, counts in enumerate(requests, 1):
                yield from (Shape(keys, each * count, count, num_heads) for count in counts)


def flat(shape: Shape, topk: int, arguments: argparse.Namespace) -> Ways:
    starts, ends, ((q, k, weights, k_scale), *_) = flat_inputs(shape.tokens, shape.keys, shape.heads, arguments)
    given = q, k, weights, starts, ends
    scores = partial(torch.ops.mla.indexer_logits, *given, k_scale=k_scale)
    return Ways(
        partial(torch.ops.mla.select_keys.flat, *given, topk, k_scale=k_scale),
        lambda: torch.ops.mla.topk_indices(scores(), topk, row_starts=starts, row_ends=ends),
        scores,
        ends,
    )


def paged(shape: Shape, topk: int, arguments: argparse.Namespace) -> Ways:
    each = shape.tokens // shape.requests
    made: Paged = paged_inputs(shape.requests, each, shape.keys, shape.heads, arguments)
    ((q, weights), *_), lengths = made.sets, made.lengths
    rest = lengths, made.table, made.requests
    scores = partial(torch.ops.mla.paged_indexer_logits, q, made.cache, weights, *rest, shape.keys, FORMAT)
    return Ways(
        partial(torch.ops.mla.select_keys, q, made.cache, weights, *rest, topk, FORMAT),
        lambda: torch.ops.mla.topk_indices(scores(), topk, row_ends=lengths),
        scores,
        lengths,
    )


def is_right(ways: Ways, topk: int) -> bool:
    """The same bits, and what a stable sort chooses of some rows."""
    (indices, counts), wanted = ways.fused(), ways.two_steps()
    if not (torch.equal(indices, wanted[0]) and torch.equal(counts, wanted[1])):
        return False
    chosen = torch.linspace(0, len(counts) - 1, min(len(counts), CHECKED_ROWS), device=counts.device).long().unique()
    rows, ends = ways.scores()[chosen], ways.ends[chosen, None]
    outside = torch.arange(rows.shape[1], device=ends.device) >= ends
    best = best_columns(rows.masked_fill(outside, torch.nan), topk)  # NaN goes last
    best = best.where(best < ends, best.new_full((), 2**30)).sort(1).values
    found = indices[chosen]
    found = found.where(found >= 0, 2**30)[:, : best.shape[1]]
    return torch.equal(found, best) and torch.equal(counts[chosen], ends[:, 0].clamp(max=topk))


def peak_bytes(call: Callable[[], Result], device: torch.device) -> int:
    """What a call allocates at one time, beside its results."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    return torch.cuda.max_memory_allocated() - before - sum(4 * tensor.numel() for tensor in results)


def measure(shape: Shape, ways: Ways, topk: int, iterations: int) -> Taken:
    device, right = ways.ends.device, is_right(ways, topk)
    fused_bytes, two_steps_bytes = (peak_bytes(call, device) for call in (ways.fused, ways.two_steps))
    calls: timing.Replays = {"fused": [ways.fused], "two steps": [ways.two_steps]}
    launches = 0
    if device.type == "cuda":
        replay, count = timing.capture(ways.fused, "")
        launches, once = count or 0, timing.timings_cuda({"": [replay]}, 2)[""][-1]
        taken = timing.timings_in_graph(calls, LONG_TURNS if once > LONG_US else iterations)
    else:
        taken = timing.timings_cpu(calls, timing.MINIMUM_TIMINGS)
    fused, two_steps = (statistics.median(taken[name]) for name in calls)
    return Taken(shape, fused, two_steps, fused_bytes, two_steps_bytes, launches, right)


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each shape, then those that take longer; returns the exit status, 1 if a result was wrong."""
    machine = common.describe_machine(torch.device(arguments.device))
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    topk = TOPK if on_gpu else 100
    every = list(shapes(arguments.heads or [64, 32], arguments.kinds)) if on_gpu else QUICK
    print(f"{machine['device']}, torch {machine['torch']}; k = {topk}; steps: scores, then top-k, of this library")
    print(HEADER, flush=True)
    rows: list[Taken] = []
    arguments.sets = 1
    with torch.no_grad():
        for shape in every:
            ways = (paged if shape.requests else flat)(shape, topk, arguments)
            rows.append(measure(shape, ways, topk, arguments.iterations))
            print(rows[-1], flush=True)
    slower = sorted((row for row in rows if row.ratio > BAR), key=lambda row: row.ratio)
    print(f"\n{len(slower)} of {len(rows)} take more than {BAR} of the two steps' time, the worst last:")
    print("\n".join(map(str, slower)))
    return int(not all(row.right for row in rows))


QUICK = [Shape(200, 3, 0, 32), Shape(90, 3, 0, 32), Shape(130, 4, 2, 32)]
