"""When a call of the sparse attention kernels gets a balanced launch (`balance.cuh`) in front of those by shapes.

Shapes do not tell how long rows are. Where one is long and the others are short, launches by shapes wait for that one,
and a balanced launch takes a tenth of their time; where all are about as long, it takes up to 1.3 times theirs, for it
writes parts of rows to memory. So both are launched. The CTAs of both add up the lengths on the device and take the
same decision, and those of one return at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .costs import Costs, predicted_us
from .launch import Balance, Clusters, Group, Keys, Shape, clusters_at_once, tiles_for

LEAST_US = 150.0  # of full rows: the launch that returns costs 7 us of them, and with less there is little to gain
SLOWER = 1.15  # a balanced launch's turns, relative to those of launches by shapes
MARGIN_US = 12.0  # what its parts, their merge and the search for shares take at most, with a reserve
ROW_TURNS = 2  # as in balance.cuh
MAX_TURNS = 2**29  # sums of them are 32 bits
MAX_TOKENS = 512  # every CTA reads all lengths
LONG = 2**15  # turns of a row by which the slope of the predicted time is taken


def workers_of(num_heads: int, tile: int, at_once: int) -> int:
    """Shares of a balanced launch, each of a CTA for every tile of heads, of CTAs that the device runs at one time."""
    return max(1, at_once // -(-num_heads // tile))


def always(keys: Keys, tile: int, num_heads: int, device_index: int) -> Balance:
    """A balanced launch that has the tokens whatever their lengths are, as `waves.override` asks for it."""
    at_once = clusters_at_once(keys, tile, device_index)[0]
    return Balance(tile, workers_of(num_heads, tile, at_once), math.inf, 0.0)


def balance_for(
    keys: Keys,
    shapes: Sequence[tuple[int, Shape]],
    num_tokens: int,
    num_heads: int,
    turns: int,
    at_once: tuple[int, ...],
    costs: Costs,
) -> Balance | None:
    """The balanced launch of a call whose launches by shapes are `shapes`; None where it cannot gain.

    Args:
        keys: the kernels' format.
        shapes: tokens of each launch, and its shape.
        num_tokens: query tokens.
        num_heads: heads.
        turns: turns of keys of a row at most.
        at_once: clusters that the device runs at one time, for each size in `SPLITS`.
        costs: times of the device.
    """
    if not keys.has_balanced or not 1 < num_tokens <= MAX_TOKENS or num_tokens * (turns + ROW_TURNS) > MAX_TURNS:
        return None

    def time(turns: int) -> float:
        return sum(
            predicted_us(keys, shape, count, num_heads, turns, at_once, costs)
            for count, shape in shapes
            if isinstance(shape, Clusters | Group)
        )

    if time(turns) < LEAST_US:
        return None
    tile = tiles_for(keys, num_heads)[0]
    workers = workers_of(num_heads, tile, at_once[0])
    turn_us = SLOWER * costs.tiles[keys.name][tile].turn_us
    return Balance(tile, workers, (time(2 * LONG) - time(LONG)) / LONG / turn_us, MARGIN_US / turn_us)
