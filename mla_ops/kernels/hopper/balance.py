"""When the rows of a sparse attention call may be shared evenly among CTAs (`balance.cuh`), and among how many.

Shapes do not tell how long rows are. Where one is long and the others are short, launches by shapes wait for that one,
and an even share of all keys takes a tenth of their time; where all are about as long, it takes up to 1.3 times theirs,
for it writes parts of rows to memory. So kernels have both ways. All CTAs of a call add up the lengths on the device
and take the same decision, for which this module gives them the numbers.

Both ways are in the call's first launch where there is such a kernel. Else a launch that only shares evenly comes
behind the others, and returns where those have the rows, or the others do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .costs import Costs, predicted_us
from .launch import SPLITS, Balance, Clusters, Group, KeyFormat, Shape, tiles_for

SLOWER = 1.15  # a balanced launch's turns, relative to those of launches by shapes
MARGIN_US = 12.0  # parts, their sum and the search for shares take less
ROW_TURNS = 2  # balance.cuh has the same
MAX_TURNS = 2**29  # sums of them are 32 bits
MAX_TOKENS = 512  # every CTA reads all lengths, and a token's number has 15 bits
MAX_CTAS = 144  # SMs of the largest such GPU; cuts.cuh has the same
FILLED = 0.9  # clusters of parts with fewer of the CTAs that run at one time leave even shares to a launch behind
LONG = 2**15  # turns of a row by which the slope of the predicted time is taken

Launches = Sequence[tuple[int, Shape]]


class Workers(NamedTuple):
    """Heads of a tile and workers of each, as `Balance` has them."""

    tile: int
    workers: int


def workers_of(keys: KeyFormat, launches: Launches, num_heads: int, at_once: tuple[int, ...]) -> Workers:
    """Who may share the rows of a call: the CTAs of its first launch that run at one time, or those of one behind.

    Args:
        keys: the kernels' format.
        launches: tokens of each launch by shape, and its shape.
        num_heads: heads.
        at_once: clusters that the device runs at one time, for each size in `SPLITS`.
    """
    num_tokens, shape = launches[0]
    rows = num_tokens * -(-num_heads // shape.tile)
    parts = shape.parts if isinstance(shape, Clusters) else 1
    clusters, size = (rows * parts, shape.splits) if isinstance(shape, Clusters) else (rows * shape.members, 1)
    running = at_once[SPLITS.index(size)]
    ctas, tile, behind = min(clusters, running) * size, shape.tile, 0
    fills = parts == 1 or ctas >= FILLED * at_once[0]
    if not fills or not keys.balanced_kernel(shape, clusters > running):
        tile = behind = next(t for t in tiles_for(keys, num_heads) if keys.balanced_kernel(Clusters(t, 1)))
        ctas = at_once[0]
    return Workers(behind, max(1, min(ctas, MAX_CTAS) // -(-num_heads // tile)))


def always(keys: KeyFormat, launches: Launches, num_heads: int, at_once: tuple[int, ...]) -> Balance:
    """Rows are shared whatever their lengths are, as `waves.override` may ask for it."""
    return Balance(*workers_of(keys, launches, num_heads, at_once), math.inf, 0.0)


def least_us(shape: Shape, behind: int, quantized: bool) -> float:
    """The time of full rows from which on lengths are asked for; parts and their sum take what is saved of less.

    `python -m benchmarks.mixtures` has what rows of one length pay for the question: with a launch behind of 64 heads
    3 to 5 us, in groups 3, else up to 1, in clusters of 16 heads over quantised keys nothing.

    Args:
        shape: of the call's first launch.
        behind: heads of the tile of the launch that shares evenly, 0 where the first one does.
        quantized: whether keys are.
    """
    if behind:
        return 45.0 if behind == 16 else 75.0
    if isinstance(shape, Group):
        return 50.0
    return 27.5 if quantized and shape.tile == 16 and shape.splits > 1 else 30.0


def balance_for(
    keys: KeyFormat,
    launches: Launches,
    num_tokens: int,
    num_heads: int,
    turns: int,
    at_once: tuple[int, ...],
    costs: Costs,
) -> Balance | None:
    """When a call's rows are shared evenly; None where it cannot gain.

    Args:
        keys: the kernels' format.
        launches: tokens of each launch by shape, and its shape.
        num_tokens: query tokens.
        num_heads: heads.
        turns: turns of keys of a row at most.
        at_once: clusters that the device runs at one time, for each size in `SPLITS`.
        costs: times of the device.
    """
    if not 1 < num_tokens <= MAX_TOKENS or num_tokens * (turns + ROW_TURNS) > MAX_TURNS:
        return None

    def time(turns: int) -> float:
        return sum(predicted_us(keys, shape, count, num_heads, turns, at_once, costs) for count, shape in launches)

    behind, workers = workers_of(keys, launches, num_heads, at_once)
    if time(turns) < least_us(launches[0][1], behind, keys.quantized):
        return None
    turn_us = SLOWER * costs.tiles[keys.name][behind or launches[0][1].tile].turn_us
    return Balance(behind, workers, (time(2 * LONG) - time(LONG)) / LONG / turn_us, MARGIN_US / turn_us)
