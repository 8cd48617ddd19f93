"""Measures forced launches of the sparse attention kernels for Hopper, and fits their cost model again.

python -m mla_ops bench launches --write mla_ops/kernels/hopper/costs.json

At each shape every launch that `choose` could take is timed, alone and as the first of two waves. The table that is
printed compares the chosen launch with the fastest one, by the constants that this GPU has now and by the fitted ones.
The fit minimises the sum of squares of relative errors, over launches within twice the fastest of their shape, and of
the constants' own relative changes, times HOLD, so that those which few launches tell stay as they were. No constant
becomes negative. The fit does not see the shapes of `HELD_OUT`, which show how it does elsewhere.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import common, timing
from benchmarks.attention import make_outputs, random_selection, waves_of
from benchmarks.cache import fill_cache
from mla_ops import formats
from mla_ops.kernels.hopper import launch, sparse_attention
from mla_ops.kernels.hopper.costs import DEFAULT, TABLE, Costs, TileCosts, predicted_us, read_costs
from mla_ops.kernels.hopper.launch import KERNELS, SPLITS, Clusters, KeyFormat
from mla_ops.kernels.hopper.sparse_attention import shapes_for
from mla_ops.kernels.hopper.waves import Wave, override

# Tokens, heads and keys of a row: few and many tokens, part-filled tiles, several rounds, short and long rows.
SIZES = (
    *((1, 16, 2048), (2, 128, 2048), (8, 16, 2048), (8, 128, 2048), (16, 128, 2048), (40, 128, 2048), (64, 64, 2048)),
    *((140, 64, 2048), (32, 32, 2048), (4, 128, 512), (512, 32, 512), (200, 128, 512)),
)
HELD_OUT = (4, 64, 2048), (24, 128, 2048), (48, 16, 2048), (100, 128, 2048), (16, 64, 512), (256, 32, 512)
PART_SIZES = (1, 16, 8192), (4, 128, 8192)  # shapes of launches in parts, for the fit alone
LIKELY = 2.5  # a launch is not timed if it is predicted to take more than this many times the least
WORTH = 2.0  # a launch that takes more than this many times the fastest one is not fitted
HOLD = 25.0  # found with an H100's 2,014 launches; 4 and 9 do as well on those, and less well on others
LEAST_US = 0.5  # constants below change by parts of this
SECOND_WAVES = 3  # launches measured of the tokens that are left: those with the least predicted time


class Sample(NamedTuple):
    """A call whose launches were forced.

    Attributes:
        keys: format.
        num_heads: heads.
        turns: turns of keys of a row.
        waves: its launches.
        at_once: clusters that the device runs at one time, for each size in `SPLITS`.
        us: measured microseconds.
    """

    keys: KeyFormat
    num_heads: int
    turns: int
    waves: tuple[Wave, ...]
    at_once: tuple[int, ...]
    us: float

    def predicted_us(self, costs: Costs) -> float:
        """Predicted time of the call; linear in `costs`."""
        keys, num_heads, turns, waves, at_once, _ = self
        each = (predicted_us(keys, wave.shape, wave.num_tokens, num_heads, turns, at_once, costs) for wave in waves)
        return sum(each) + (len(waves) - 1) * costs.wave_us


def to_vector(costs: Costs) -> list[float]:
    """All constants, those of tiles last."""
    return [*costs[:-1], *(us for tiles in costs.tiles.values() for times in tiles.values() for us in times)]


def from_vector(vector: Sequence[float], like: Costs) -> Costs:
    """The constants of a vector, with the tiles of `like`."""
    values = iter(vector)
    first = [next(values) for _ in like[:-1]]
    tiles = {
        keys: {tile: TileCosts(*(next(values) for _ in times)) for tile, times in tiles.items()}
        for keys, tiles in like.tiles.items()
    }
    return Costs(*first, tiles)


def fit(samples: Sequence[Sample], like: Costs, hold: float = HOLD) -> Costs:
    """The constants that predict the samples best; those that no sample depends on stay as in `like`.

    Args:
        samples: measured calls.
        like: the constants up to now.
        hold: weight of the squares of their relative changes.

    The model is linear, so a prediction with one constant at 1 and the others at 0 is that constant's coefficient.
    """
    size = len(to_vector(like))
    units = [from_vector([float(i == j) for j in range(size)], like) for i in range(size)]
    rows = [[sample.predicted_us(unit) / sample.us for unit in units] for sample in samples]
    matrix = torch.tensor(rows, dtype=torch.float64)
    found = torch.tensor(to_vector(like), dtype=torch.float64)
    free = matrix.abs().sum(0) > 0
    held = torch.diag(hold**0.5 / found.clamp(min=LEAST_US))
    wanted = torch.cat((torch.ones(len(rows), dtype=torch.float64), held @ found)).unsqueeze(1)
    matrix = torch.cat((matrix, held))
    found[free] = 0.0
    while free.any():
        # The driver takes matrices without full rank: constants that no sample tells apart share their sum.
        solution = torch.linalg.lstsq(matrix[:, free], wanted, driver="gelsd")
        found[free] = solution.solution[:, 0]
        negative = free & (found < 0.0)
        if not negative.any():
            break
        found[negative] = 0.0
        free &= ~negative
    return from_vector([round(us, 4) for us in found.tolist()], like)


def candidates(
    keys: KeyFormat, num_tokens: int, num_heads: int, turns: int, at_once: tuple[int, ...], costs: Costs
) -> list[tuple[Wave, ...]]:
    """Launches that may be chosen: each shape alone, and each that fills the device first, with what is left.

    Without those that are predicted to take more than `LIKELY` times the least.
    """

    def us(wave: Wave) -> float:
        return predicted_us(keys, wave.shape, wave.num_tokens, num_heads, turns, at_once, costs)

    runnable = [
        shape
        for shape in shapes_for(keys, num_heads, turns)
        if not isinstance(shape, Clusters) or at_once[SPLITS.index(shape.splits)]
    ]
    found: list[tuple[Wave, ...]] = [
        (wave,) for shape in runnable if us(wave := Wave(num_tokens, shape)) < float("inf")
    ]
    for shape in runnable:
        if not isinstance(shape, Clusters):
            continue
        fill, tiles = at_once[SPLITS.index(shape.splits)], -(-num_heads // shape.tile)
        whole = num_tokens * tiles // fill * fill // tiles
        if 0 < whole < num_tokens:
            rest = sorted((Wave(num_tokens - whole, other) for other in runnable), key=us)[:SECOND_WAVES]
            found += [(Wave(whole, shape), wave) for wave in rest]
    limit = LIKELY * min(sum(us(wave) for wave in waves) for waves in found)
    return [waves for waves in found if sum(us(wave) for wave in waves) <= limit]


class Inputs:
    """A cache of keys, and calls over it."""

    def __init__(self, cache_format: str, head_dim: int, num_blocks: int, generator: torch.Generator) -> None:
        self.cache_format, self.head_dim, self.generator = cache_format, head_dim, generator
        self.num_slots = num_blocks * 64
        self.cache = formats.allocate_cache(cache_format, num_blocks, 64, device="cuda", head_dim=head_dim)
        fill_cache(self.cache, cache_format, generator)

    def times(
        self, num_tokens: int, num_heads: int, topk: int, calls: Sequence[tuple[Wave, ...]], iterations: int
    ) -> list[float]:
        """Median microseconds of each call, with an L2 cache that holds nothing of it."""
        size = num_tokens, num_heads, self.head_dim
        q = torch.randn(size, device="cuda", generator=self.generator).to(torch.bfloat16)
        indices = random_selection(num_tokens, topk, self.num_slots, self.generator)
        out, lse = make_outputs(q)
        scale = common.SOFTMAX_SCALES[self.head_dim]
        replays: timing.Replays = {}

        def run(waves: tuple[Wave, ...]) -> None:
            with override(*waves):
                sparse_attention.paged_sparse_attention(
                    q, self.cache, indices, scale, self.cache_format, out=out, lse=lse
                )

        first: torch.Tensor | None = None
        for number, waves in enumerate(calls):
            out.fill_(float("nan"))
            replay, _ = timing.capture(lambda waves=waves: run(waves), "hopper")  # type: ignore[misc]
            replay()
            first = out.clone() if first is None else first
            torch.testing.assert_close(out, first, atol=2**-6, rtol=2**-5)  # two roundings to bfloat16, and weights'
            replays[str(number)] = [replay]
        timings = timing.timings_cuda(replays, iterations)
        return [statistics.median(timings[str(number)]) for number in range(len(calls))]


def measure(iterations: int, seed: int, quick: bool) -> Iterator[tuple[KeyFormat, tuple[int, int, int], list[Sample]]]:
    """Keys, size and samples, shape by shape."""
    for (cache_format, head_dim), keys in KERNELS.items():
        generator = torch.Generator(device="cuda").manual_seed(seed)
        inputs = Inputs(cache_format, head_dim, 1024 if quick else 16384, generator)
        in_parts = PART_SIZES if cache_format == "fp8_ds_mla" else ()
        for num_tokens, num_heads, topk in SIZES + HELD_OUT + in_parts:
            turns = -(-topk // launch.TILE_KEYS)
            at_once = launch.clusters_at_once(keys, launch.tiles_for(keys, num_heads)[0], 0)
            if (num_tokens, num_heads, topk) not in PART_SIZES:
                calls = candidates(keys, num_tokens, num_heads, turns, at_once, read_costs(TABLE.read_text(), _gpu()))
            else:
                tile = launch.tiles_for(keys, num_heads)[0]
                calls = [
                    (Wave(num_tokens, Clusters(tile, splits, parts)),)
                    for splits in (2, 4, 8, 16)
                    for parts in (1, 2, 3, 6)
                    if at_once[SPLITS.index(splits)]
                ]
            times = inputs.times(num_tokens, num_heads, topk, calls, iterations)
            samples = [
                Sample(keys, num_heads, turns, waves, at_once, us) for waves, us in zip(calls, times, strict=True)
            ]
            yield keys, (num_tokens, num_heads, topk), samples


def chosen(samples: Sequence[Sample], costs: Costs) -> Sample:
    """The call of a shape that is predicted to be fastest."""
    return min(samples, key=lambda sample: sample.predicted_us(costs))


def label(waves: Sequence[Wave]) -> str:
    """Launches as `--waves` of the attention benchmarks takes them."""
    shapes = (
        f"{shape.tile},{shape.splits}" + (f",{shape.parts}" if shape.parts > 1 else "")
        if isinstance(shape, Clusters)
        else f"group{shape.members}"
        for _, shape in waves
    )
    return "+".join(f"{wave.num_tokens}x{shape}" for wave, shape in zip(waves, shapes, strict=True))


def write(path: Path, gpu: str, costs: Costs) -> None:
    """Puts a GPU's constants into a table, beside those of others."""
    table = json.loads((path if path.exists() else TABLE).read_text())
    table[gpu] = costs._asdict()
    lines = json.dumps(table, indent=2)
    of_a_format = r"\{[^{}]*\[[^{}]*\}"  # times of its tiles, in one line
    path.write_text(re.sub(of_a_format, lambda times: json.dumps(json.loads(times[0])), lines) + "\n")


Shapes = list[tuple[KeyFormat, tuple[int, int, int], list[Sample]]]


def write_samples(path: Path, gpu: str, shapes: Shapes) -> None:
    rows = [
        [keys.name, *size, label(sample.waves), round(sample.us, 2)]
        for keys, size, samples in shapes
        for sample in samples
    ]
    path.write_text(json.dumps({"gpu": gpu, "at_once": shapes[0][2][0].at_once, "rows": rows}))


def read_samples(path: Path) -> tuple[str, Shapes]:
    """The GPU, and what was measured on it."""
    content = json.loads(path.read_text())
    by_name = {keys.name: keys for keys in KERNELS.values()}
    shapes: dict[tuple[str, tuple[int, int, int]], list[Sample]] = {}
    for name, num_tokens, num_heads, topk, launches, us in content["rows"]:
        waves, turns = waves_of(launches, num_tokens), -(-topk // launch.TILE_KEYS)
        sample = Sample(by_name[name], num_heads, turns, waves, tuple(content["at_once"]), us)
        shapes.setdefault((name, (num_tokens, num_heads, topk)), []).append(sample)
    return content["gpu"], [(by_name[name], size, samples) for (name, size), samples in shapes.items()]


def _gpu() -> str:
    return torch.cuda.get_device_name(0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench launches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=15, help="timings of each launch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a small cache, whose rows the caches of the GPU may hold")
    parser.add_argument("--write", type=Path, help="write the fitted constants of this GPU into this file")
    parser.add_argument("--samples", type=Path, help="write every measured launch into this file, as JSON")
    parser.add_argument("--read", type=Path, help="measure nothing: the launches of a file that --samples wrote")
    arguments = parser.parse_args(argv)
    if arguments.read:
        gpu, shapes = read_samples(arguments.read)
    elif not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("bench launches needs a GPU of compute capability 9.0", file=sys.stderr)
        return 2 if arguments.write else 0
    else:
        gpu, shapes = _gpu(), list(measure(arguments.iterations, arguments.seed, arguments.quick))
    now = read_costs(TABLE.read_text(), gpu)
    name = next((word for word in gpu.split() if word.startswith(("H", "GH"))), DEFAULT)
    worth = [
        sample
        for _, size, samples in shapes
        if size not in HELD_OUT
        for sample in samples
        if sample.us <= WORTH * min(each.us for each in samples)
    ]
    fitted = fit(worth, now)
    print(f"{gpu}, us; {len(worth)} launches fitted; clusters at one time: {worth[0].at_once}")
    words = "keys", "T", "H", "top-k", "fastest", "us", "chosen", "ratio", "by the fit", "ratio"
    print("{:14}{:>4}{:>5}{:>6}  {:22}{:>7}  {:22}{:>6}  {:22}{:>6}".format(*words))
    ratios: dict[str, list[float]] = {}
    for keys, size, samples in shapes:
        if size in PART_SIZES:
            continue
        best, first, refit = min(samples, key=lambda sample: sample.us), chosen(samples, now), chosen(samples, fitted)
        seen = "held out" if size in HELD_OUT else "fitted"
        ratios.setdefault(f"chosen now, {seen}", []).append(first.us / best.us)
        ratios.setdefault(f"chosen by the fit, {seen}", []).append(refit.us / best.us)
        print(
            f"{keys.name:14}{size[0]:4}{size[1]:5}{size[2]:6}  {label(best.waves):22}{best.us:7.1f}  "
            f"{label(first.waves):22}{first.us / best.us:6.3f}  {label(refit.waves):22}{refit.us / best.us:6.3f}"
        )
    for title, ratio in sorted(ratios.items()):
        within = sum(each <= 1.05 for each in ratio)
        print(f"{title}: worst {max(ratio):.3f}, median {statistics.median(ratio):.3f}, {within}/{len(ratio)} in 5 %")
    errors = [abs(sample.predicted_us(fitted) / sample.us - 1) for sample in worth]
    print(f"error of the fit: median {statistics.median(errors):.3f}, largest {max(errors):.3f}")
    if arguments.samples:
        write_samples(arguments.samples, gpu, shapes)
    if arguments.write:
        write(arguments.write, name, fitted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
