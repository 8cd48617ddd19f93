"""When the rows of a dense decode call of few tokens go to CTAs by their lengths (`row_ctas.cuh`).

A launch by shape gives each row as many CTAs, so that one long row holds up the others'. Where rows are few, each may
have as many CTAs or clusters as its length asks for, which only the device knows: every warp finds it from the lengths.
A second kernel merges their parts. It ends at once where rows went by the launch's shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...formats import LATENT_DIM
from .costs import Costs, predicted_us
from .launch import MOST_CTAS, MOST_ROWS, SPLITS, ByLength, Clusters, KeyFormat, Shape

LEAST_US = 30.0  # a call's full rows; less does not pay for the second kernel
LEAST_IN_PARTS_US = 20.0  # the same where there is one anyway
SPARE_US = 1.0  # that and the question
PARTS_MB = 4e-6 * LATENT_DIM  # of a part and head
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
    num_tokens, shape = launches[0]
    if len(launches) > 1 or not isinstance(shape, Clusters) or shape.shares or not 1 < num_tokens <= MOST_ROWS:
        return None
    tile, splits = shape.tile, shape.splits
    head_tiles = -(-num_heads // tile)
    full_us = predicted_us(keys, shape, num_tokens, num_heads, turns, at_once, costs)
    running, clusters = at_once[SPLITS.index(splits)], num_tokens * shape.parts * head_tiles
    turn_us, row_us, merge_us = costs.tiles[keys.name][tile]
    pairs, found = always_by_length(tile, num_heads, at_once)
    if full_us < (LEAST_US if shape.parts == 1 else LEAST_IN_PARTS_US):
        return None
    if shape.parts > 1 and clusters <= running:
        shape, found = clusters_by_length(shape, num_tokens)
    elif (keys.quantized and tile == 64) or found.count < num_tokens:
        return None
    elif shape.parts > 1:
        parts_us = costs.parts_us + PARTS_MB * found.count * num_heads * costs.parts_us_per_mb
        if -(-turns // (found.count // num_tokens)) * turn_us + row_us + parts_us > full_us:
            return None
        shape = pairs
    else:
        if splits == 1 or clusters > running:
            return None
        count = min(found.count, num_tokens * splits)
        parts_us = costs.parts_us + PARTS_MB * count * num_heads * costs.parts_us_per_mb
        found = ByLength(count, 1 / splits, (parts_us + SPARE_US - merge_us / splits) / turn_us, 1)
    idle = 0.5 * num_tokens / max(found.count - 0.5 * num_tokens, 0.5)  # half a part of each row
    return None if full_us * OF_FULL_ROWS * idle > IDLE_US else (shape, found)
