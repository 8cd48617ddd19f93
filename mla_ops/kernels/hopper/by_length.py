"""When the rows of a dense decode call of few tokens go to CTAs by their lengths (`row_ctas.cuh`).

A launch by shape gives each row as many CTAs, so that one long row holds up the others'. Where rows are few, each may
have as many CTAs or clusters as its length asks for, which only the device knows: every warp finds it from the lengths.
A second kernel merges their parts. It ends at once where rows went by the launch's shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ...formats import LATENT_DIM
from .costs import Costs, predicted_us
from .launch import MOST_CTAS, MOST_ROWS, SPLITS, ByLength, Clusters, KeyFormat, Shape, leaves_units

LEAST_US = 30.0  # a call's full rows; less does not pay for the second kernel
LEAST_IN_PARTS_US = 20.0  # the same where there is one anyway
SPARE_US = 1.0  # that and the question
ELEMENTS = 1e-6 * LATENT_DIM  # 10^6 of a part and head
# The longest time that idle CTAs may take of rows of mixed lengths, whose keys are a quarter of full ones: even shares
# take as much for the sum of their parts.
IDLE_US, OF_FULL_ROWS = 15.0, 0.25


def always_by_length(tile: int, num_heads: int, at_once: tuple[int, ...]) -> tuple[Clusters, ByLength]:
    """All CTAs that run at one time, in clusters of two that have nothing in common; no row goes by their shape."""
    clusters = min(MOST_CTAS // 2, at_once[SPLITS.index(2)] // -(-num_heads // tile))
    return Clusters(tile, 2), ByLength(2 * clusters, 1.0, -math.inf, 1)


def clusters_by_length(shape: Clusters, num_tokens: int) -> tuple[Clusters, ByLength]:
    """The clusters of a launch of several parts, of which each row has as many as its length asks for."""
    return Clusters(shape.tile, shape.splits), ByLength(num_tokens * shape.parts, 0.0, -math.inf, shape.splits)


def ways_by_length(tile: int, num_heads: int, at_once: tuple[int, ...]) -> Iterator[tuple[Clusters, ByLength]]:
    """CTAs by length, and clusters of each size, as many as run at one time."""
    yield always_by_length(tile, num_heads, at_once)
    for splits, running in zip(SPLITS[1:], at_once[1:], strict=True):
        count = min(MOST_CTAS, running // -(-num_heads // tile))
        yield Clusters(tile, splits), ByLength(count, 0.0, -math.inf, splits)


def time_by_length(
    keys: KeyFormat,
    way: tuple[Clusters, ByLength],
    num_tokens: int,
    num_heads: int,
    turns: int,
    costs: Costs,
) -> float:
    """Microseconds of full rows; infinite where some would have no CTA."""
    shape, found = way
    of_a_row = found.count // num_tokens
    if of_a_row == 0:
        return math.inf
    turn_us, row_us, merge_us = costs.tiles[keys.name][shape.tile]
    parts_us = costs.parts_us + parts_mb(shape, found, num_heads) * costs.parts_us_per_mb
    end_us = merge_us / found.splits if found.splits > 1 else 0.0
    return -(-turns // (of_a_row * found.splits)) * turn_us + row_us + end_us + parts_us


def parts_mb(shape: Clusters, found: ByLength, num_heads: int) -> float:
    """10^6 bytes of parts."""
    return (2 if leaves_units(shape, found) else 4) * ELEMENTS * found.count * num_heads


def by_length_for(
    keys: KeyFormat,
    launches: Sequence[tuple[int, Shape]],
    num_heads: int,
    turns: int,
    at_once: tuple[int, ...],
    costs: Costs,
) -> tuple[Clusters, ByLength] | None:
    """The shape of a call's only launch whose rows may go by their lengths, and when; None where that cannot gain.

    Args:
        keys: the kernels' format.
        launches: tokens of each launch by shape, and its shape.
        num_heads: heads.
        turns: turns of keys of a row at most.
        at_once: clusters that the device runs at one time, for each size in `SPLITS`.
        costs: times of the device.
    """
    num_tokens, shape = sum(count for count, _ in launches), launches[0][1]
    if not isinstance(shape, Clusters) or shape.shares or num_tokens > MOST_ROWS:
        return None
    tile, splits = shape.tile, shape.splits
    full_us = sum(predicted_us(keys, own, count, num_heads, turns, at_once, costs) for count, own in launches)

    def time(way: tuple[Clusters, ByLength]) -> float:
        return time_by_length(keys, way, num_tokens, num_heads, turns, costs)

    merged = shape.parts > 1  # anyway
    if full_us < (LEAST_IN_PARTS_US if merged else LEAST_US):
        return None
    way = min(ways_by_length(tile, num_heads, at_once), key=time)
    if time(way) > full_us + SPARE_US:
        running = at_once[SPLITS.index(splits)]
        if len(launches) > 1 or merged or splits == 1 or num_tokens * -(-num_heads // tile) > running:
            return None
        if keys.quantized and tile == 64:
            return None
        # Rows of about one length go by the launch's shape.
        count = min(always_by_length(tile, num_heads, at_once)[1].count, num_tokens * splits)
        found = ByLength(count, 1 / splits, 0.0, 1)
        parts_us = costs.parts_us + parts_mb(shape, found, num_heads) * costs.parts_us_per_mb
        turn_us, _, merge_us = costs.tiles[keys.name][tile]
        way = shape, found._replace(margin=(parts_us + SPARE_US - merge_us / splits) / turn_us)
    count = way[1].count
    idle = 0.5 * num_tokens / max(count - 0.5 * num_tokens, 0.5)  # half a part of each row
    return None if full_us * OF_FULL_ROWS * idle > IDLE_US else way
