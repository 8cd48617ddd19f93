"""Every regime of top-k over scores that are not usual, beside normal ones: a table of ratios to the usual time.

python -m mla_ops bench indexer_topk --patterns

A line is a regime, with its time for normal scores; then the ratio to it of each of `PATTERNS`, and the worst one. All
patterns of a regime take turns in captured graphs, L2 is overwritten in between, and each result is held to a stable
sort. Lines at the end name what takes more than `BAR`, or is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from benchmarks import common, timing
from mla_ops import dispatch
from mla_ops.registry import describe

BAR = 1.5
ALIKE, SHARED = 128, 0.7  # columns over which neighbours share a part of their variance, and that part


class Regime(NamedTuple):
    """Rows of a size that one way of top-k takes.

    Attributes:
        planes: scores lie as selection of many flat keys has them (`planes.cuh`).
        heads: of a selection of flat keys, scores and top-k; 0: top-k alone.
    """

    rows: int
    columns: int
    topk: int = 2048
    planes: bool = False
    heads: int = 0

    def __str__(self) -> str:
        columns = f"{self.columns // 1024}k" if self.columns % 1024 == 0 else str(self.columns)
        way = ", planes" if self.planes else f", {self.heads} heads" if self.heads else ""
        return f"{self.rows} x {columns}, k = {self.topk}{way}"


REGIMES = (
    *(Regime(rows, columns) for rows, columns in ((1, 4096), (64, 8192), (16, 16384))),  # registers of a CTA
    *(Regime(rows, 32768) for rows in (1, 16, 64)),  # those of a cluster
    *(Regime(rows, 131072) for rows in (1, 4, 16)),
    *(Regime(4, 131072, topk) for topk in (512, 4096)),
    *(Regime(rows, columns) for rows, columns in ((64, 131072), (1, 2**20))),  # a cluster reads longer ones
    *(Regime(rows, columns) for rows, columns in ((128, 131072), (512, 32768), (1024, 8192))),  # a CTA a row
    *(Regime(512, 32768, topk) for topk in (512, 4096)),
    *(Regime(512, 32768, topk, planes=True) for topk in (512, 2048)),
    Regime(256, 131072, planes=True),
    *(Regime(1024, 32768, heads=heads) for heads in (32, 64)),  # by planes
)
QUICK_REGIMES = (Regime(2, 300, 100), Regime(2, 1000, 100))


def alike(normal: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Scores alike in near columns, as near tokens score."""
    num_rows, num_columns = normal.shape
    noise = torch.randn((num_rows, num_columns + ALIKE - 1), device=normal.device, generator=generator)
    smooth = torch.nn.functional.avg_pool1d(noise, ALIKE, stride=1).mul_((ALIKE * SHARED) ** 0.5)
    return normal.mul((1 - SHARED) ** 0.5).add_(smooth)


def _columns(normal: torch.Tensor) -> torch.Tensor:
    return torch.arange(normal.shape[1], device=normal.device).expand_as(normal)


def _few_of(normal: torch.Tensor, others: float) -> torch.Tensor:
    """All but each 128th run of 512 columns are others, so that some of these are chosen."""
    return torch.where(_columns(normal) // 512 % 128 == 0, normal, others)


def _constant_block(normal: torch.Tensor) -> torch.Tensor:
    """An eighth of the columns has a score that about one in a hundred reaches."""
    eighth = normal.shape[1] // 8
    return torch.where((_columns(normal) - 2 * eighth).div(eighth, rounding_mode="floor") == 0, 2.3, normal)


def _two_scales(normal: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    chosen = torch.rand(normal.shape, device=normal.device, generator=generator) < 0.01
    return torch.where(chosen, normal, normal * 2.0**-20)


def _few_values(normal: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 16, normal.shape, device=normal.device, generator=generator).float()


Pattern = Callable[[torch.Tensor, torch.Generator], torch.Tensor]  # of normal scores
PATTERNS: dict[str, Pattern] = {
    "90 % 0": lambda normal, _: (normal - 1.28).relu_(),
    "99 % 0": lambda normal, _: (normal - 2.33).relu_(),
    "equal": lambda normal, _: torch.full_like(normal, 0.5),
    "two": lambda normal, _: (normal > 0.5).float(),
    "16": _few_values,
    "bf16": lambda normal, _: normal.bfloat16().float(),
    "relu": lambda normal, _: normal.relu(),
    "up": lambda normal, _: _columns(normal).float() - normal.shape[1] / 3,
    "down": lambda normal, _: normal.shape[1] / 3 - _columns(normal).float(),
    "block": lambda normal, _: _constant_block(normal),
    "NaN": lambda normal, _: _few_of(normal, torch.nan),
    "-inf": lambda normal, _: _few_of(normal, -torch.inf),
    "tail": lambda normal, _: torch.where(_columns(normal) < normal.shape[1] // 2, normal, -torch.inf),
    "2^20": _two_scales,
    "alike": alike,
}


def in_order(scores: torch.Tensor) -> torch.Tensor:
    """An int32 for each score that is larger where the score is: NaN the least, -0.0 as 0.0."""
    bits = (scores + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill_(scores.isnan(), -(2**31))


def best_columns(scores: torch.Tensor, topk: int, at_once: int = 2**24) -> torch.Tensor:
    """Columns of the best, ascending, by a stable sort."""
    chosen = [
        in_order(rows).sort(dim=1, descending=True, stable=True).indices[:, :topk].sort(dim=1).values.to(torch.int32)
        for rows in scores.split(max(at_once // scores.shape[1], 1))
    ]
    return torch.cat(chosen)


def by_planes(scores: torch.Tensor) -> torch.Tensor:
    """Scores as `planes.cuh` has them: upper halves of 64 columns, then their lower ones."""
    bits = scores.masked_fill(scores.isnan(), torch.nan).view(torch.int32)
    bits = bits.masked_fill_(scores.isnan(), 0x7FFFFFFF).view(scores.shape[0], -1, 4, 2, 8)
    first, second = bits[:, :, :, 0], bits[:, :, :, 1]
    upper, lower = second & -65536 | first >> 16 & 65535, second << 16 | first & 65535
    return torch.cat((upper.flatten(2), lower.flatten(2)), dim=2).flatten(1).contiguous().view(torch.float32)


class Ready(NamedTuple):
    """A call of a pattern, and whether what it wrote is right."""

    run: Callable[[], object]
    is_right: Callable[[], bool]


def ready(regime: Regime, scores: torch.Tensor, lowering: str) -> Ready:
    """The op's call, or the kernel's; a selection's scores are the first row's, which its keys have as scales."""
    indices = torch.full((regime.rows, regime.topk), -7, dtype=torch.int32, device=scores.device)
    counts = indices.new_full((regime.rows,), -7)
    out = {"indices": indices, "valid_counts": counts}
    call: Callable[[], object]
    if regime.heads:
        q = torch.zeros(regime.rows, regime.heads, 128, device=scores.device)
        q[:, 5, 77] = 1
        keys = torch.ones(regime.columns, 128, device=scores.device).to(torch.float8_e4m3fn)
        bounds = torch.zeros_like(counts), torch.full_like(counts, regime.columns)
        given = q.to(keys.dtype), keys, q[:, :, 77].contiguous(), *bounds, regime.topk
        call = partial(torch.ops.mla.select_keys.flat_out, *given, k_scale=scores[0].contiguous(), **out)
    elif regime.planes:
        from mla_ops.kernels.hopper import topk

        call = partial(topk.topk_indices, by_planes(scores), regime.topk, planes=True, **out)
    else:
        call = partial(torch.ops.mla.topk_indices.out, scores, regime.topk, **out)

    def run() -> None:
        with contextlib.nullcontext() if lowering == "auto" else dispatch.override(lowering):
            call()

    def is_right() -> bool:
        wanted = best_columns(scores[:1] if regime.heads else scores, regime.topk)
        return bool((indices == wanted).all()) and bool((counts == regime.topk).all())

    return Ready(run, is_right)


HEADER = f"{'lowering':<8} {'regime':<26} {'usual us':>8} " + " ".join(f"{name:>6}" for name in PATTERNS) + "  worst"


def lines(arguments: argparse.Namespace) -> Iterator[str]:
    generator = common.generator(arguments)
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    regimes = [regime for regime in REGIMES if arguments.regimes in str(regime)] if on_gpu else QUICK_REGIMES
    iterations = arguments.iterations if on_gpu else timing.MINIMUM_TIMINGS
    said: list[str] = []
    for regime in regimes:
        shape = regime.rows, regime.columns
        normal = torch.randn(shape, device=arguments.device, generator=generator)
        patterns = {"usual": normal, **{name: make(normal, generator) for name, make in PATTERNS.items()}}
        for wanted in arguments.lowerings:
            call = describe("topk_indices", normal, regime.topk)
            lowering = dispatch.select_name(call) if wanted == "auto" else wanted
            if regime.planes and lowering != "hopper":
                continue
            calls = {name: ready(regime, scores, wanted) for name, scores in patterns.items()}
            for name, one in calls.items():
                one.run()
                if not one.is_right():
                    said.append(f"WRONG: {lowering} {regime} {name}")
            replays = {name: [one.run] for name, one in calls.items()}
            measured = timing.timings_in_graph if on_gpu else timing.timings_cpu
            taken = {name: statistics.median(values) for name, values in measured(replays, iterations).items()}
            ratios = {name: taken[name] / taken["usual"] for name in PATTERNS}
            worst = max(ratios, key=ratios.__getitem__)
            columns = " ".join(f"{ratio:>6.2f}" for ratio in ratios.values())
            yield f"{lowering:<8} {regime!s:<26} {taken['usual']:>8.2f} {columns} {ratios[worst]:>6.2f}"
            said += [f"{lowering} {regime} {name}: {ratio:.2f}" for name, ratio in ratios.items() if ratio > BAR]
    yield f"\nOver {BAR}:"
    yield from said


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; returns the exit status, 1 if a result was wrong."""
    machine = common.describe_machine(torch.device(arguments.device))
    print(f"{machine['device']}, torch {machine['torch']}; ratios to normal scores")
    print(HEADER, flush=True)
    wrong = False
    with torch.no_grad():
        for line in map(str, lines(arguments)):
            print(line, flush=True)
            wrong |= line.startswith("WRONG")
    return int(wrong)
