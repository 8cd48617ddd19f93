"""When the rows of a dense decode call of few tokens go to CTAs by their lengths (`row_ctas.cuh`).

A launch by shape gives each row as many CTAs, so that one long row holds up the others'. Where rows are few, each may
have as many as its length asks for, which only the device knows: every warp finds it from the lengths. What they leave
is merged by a second kernel, which ends at once where rows went by the launch's shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...formats import LATENT_DIM
from .costs import Costs, predicted_us
from .launch import MOST_CTAS, MOST_ROWS, SPLITS, ByLength, Clusters, KeyFormat, Shape

LEAST_US = 30.0  # a call's full rows; less does not pay for the second kernel
SPARE_US = 1.0  # that and the question
SLOWER = 1.02  # rows of one length, by lengths, relative to the launch by shape: as good as equal
# The longest time that idle CTAs may take of rows of mixed lengths, whose keys are a quarter of full ones: even shares
# take as much for the sum of their parts.
IDLE_US, OF_FULL_ROWS = 15.0, 0.25


def always_by_length(tile: int, num_heads: int, at_once: tuple[int, ...]) -> tuple[Clusters, ByLength]:
    """All CTAs that run at one time, in clusters of two that have nothing in common; no row goes by their shape."""
    clusters = min(MOST_CTAS // 2, at_once[SPLITS.index(2)] // -(-num_heads // tile))
    return Clusters(tile, 2), ByLength(2 * clusters, 0.0, -math.inf)


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
    pairs, found = always_by_length(tile, num_heads, at_once)
    if shape.parts == 1:
        found = found._replace(count=min(found.count, num_tokens * splits))
    if found.count < num_tokens:
        return None
    turn_us, row_us, merge_us = costs.tiles[keys.name][tile]
    parts_us = costs.parts_us + 4e-6 * LATENT_DIM * found.count * num_heads * costs.parts_us_per_mb
    if shape.parts > 1:
        if -(-turns // (found.count // num_tokens)) * turn_us + row_us + parts_us > SLOWER * full_us:
            return None
        shape = pairs
    else:
        running, clusters = at_once[SPLITS.index(splits)], num_tokens * head_tiles
        if splits == 1 or full_us < LEAST_US or keys.kernel(shape, clusters > running).ctas > 1:
            return None
        count = min(found.count, running * splits // head_tiles)
        margin = (parts_us + SPARE_US - merge_us / splits) / turn_us
        found = ByLength(count, -(-clusters // running) / splits, margin)
    idle = 0.5 * num_tokens / max(found.count - 0.5 * num_tokens, 0.5)  # half a CTA of each row
    return None if full_us * OF_FULL_ROWS * idle > IDLE_US else (shape, found)
