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
SPARE = 0.0125  # the same of full rows of less than 64 heads over bfloat16 keys that take long
PAIRS_US = 4.0  # what a launch of pairs in parts takes more than predicted
ONE_ROW_US = 2.0  # one row gains more, or goes by its launch's shape
ELEMENTS = 1e-6 * LATENT_DIM  # 10^6 of a part and head
# Rows by their lengths take this besides, where a part is one CTA's, two CTAs' or more's: by whether keys are
# quantised, and whether a tile has 64 heads. One CTA's parts of few long rows are many.
END_US = {
    (True, True): (2.0, 6.0, 3.0),
    (False, True): (7.5, 2.5, 4.5),
    (True, False): (10.0, 5.0, 2.5),
    (False, False): (10.0, 5.0, 3.0),
}
MANY_PARTS_US = 4.5  # of one row of quantised keys besides
# Where so few rows have less than 64 heads, the merge of many parts is slow: a part has so many CTAs. Over bfloat16
# keys, whose bytes take longer, nothing is gained.
FEW_SMALL_ROWS, LARGE_PARTS = 4, 4
FEW_LONG_US = 70.0  # full rows that take as long gain by even parts
MOST_PARTS = 28  # of such a row; the merge of more takes 1 us longer (`log_slices_of` of merge_parts.cu)
# The longest time that idle CTAs may take of rows of mixed lengths, whose keys are a quarter of full ones: even shares
# take as much for the sum of their parts. By whether keys are quantised, and whether a tile has 64 heads.
IDLE_US = {(True, True): 15.0, (False, True): 15.0, (True, False): 15.0, (False, False): 30.0}
OF_FULL_ROWS = 0.25
# Few long rows have more of their keys: over bfloat16 keys with 64 heads even shares gain earlier.
FEW_ROWS, IDLE_OF_FEW_US = 12, 7.0
WORTH_MORE = 1.05  # so many more CTAs gain more than full rows lose by those that they leave idle


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
    end_us = END_US[keys.quantized, shape.tile == 64][min(found.splits, 3) - 1]
    if found.splits > 1:
        end_us += merge_us / found.splits
    elif num_tokens == 1 and keys.quantized:
        end_us += MANY_PARTS_US
    return -(-turns // (of_a_row * found.splits)) * turn_us + row_us + end_us + parts_us


def parts_mb(shape: Clusters, found: ByLength, num_heads: int) -> float:
    """10^6 bytes of parts."""
    return (2 if leaves_units(shape, found) else 4) * ELEMENTS * found.count * num_heads


def either_way(
    keys: KeyFormat, shape: Clusters, num_tokens: int, num_heads: int, at_once: tuple[int, ...], costs: Costs
) -> tuple[Clusters, ByLength]:
    """CTAs by length, unless rows are about as long: these go by the launch's shape."""
    clusters = at_once[SPLITS.index(shape.splits)] // -(-num_heads // shape.tile)
    if shape.tile < 64 or clusters < WORTH_MORE * num_tokens:
        clusters = num_tokens
    count = min(always_by_length(shape.tile, num_heads, at_once)[1].count, clusters * shape.splits)
    found = ByLength(count, min(1 / shape.splits, num_tokens / count), 0.0, 1)
    parts_us = costs.parts_us + parts_mb(shape, found, num_heads) * costs.parts_us_per_mb
    turn_us, _, merge_us = costs.tiles[keys.name][shape.tile]
    return shape, found._replace(margin=(parts_us + SPARE_US - merge_us / shape.splits) / turn_us)


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
    if num_tokens == 1 and tile < 64:
        return None
    full_us = sum(predicted_us(keys, own, count, num_heads, turns, at_once, costs) for count, own in launches)

    def time(way: tuple[Clusters, ByLength]) -> float:
        return time_by_length(keys, way, num_tokens, num_heads, turns, costs)

    merged = shape.parts > 1  # anyway
    if full_us < (LEAST_IN_PARTS_US if merged else LEAST_US):
        return None
    ways = list(ways_by_length(tile, num_heads, at_once))
    if num_tokens <= FEW_SMALL_ROWS and tile < 64 and full_us < FEW_LONG_US:
        large = [way for way in ways[LARGE_PARTS - 1 :] if way[1].count - num_tokens < MOST_PARTS]
        ways = large if keys.quantized else []
    running = at_once[SPLITS.index(splits)]
    allowed_us = PAIRS_US if merged and splits == 2 else SPARE_US
    if tile < 64 and not keys.quantized:
        allowed_us = max(allowed_us, SPARE * full_us)
    if num_tokens == 1:
        allowed_us = -ONE_ROW_US
    idle_us = IDLE_US[keys.quantized, tile == 64]
    if tile == 64 and not keys.quantized and num_tokens <= FEW_ROWS:
        idle_us = IDLE_OF_FEW_US

    def idles(way: tuple[Clusters, ByLength]) -> bool:
        count = way[1].count
        idle = 0.5 * num_tokens / max(count - 0.5 * num_tokens, 0.5)  # half a part of each row
        return full_us * OF_FULL_ROWS * idle > idle_us

    fitting = [way for way in ways if time(way) <= full_us + allowed_us]
    way = min((way for way in fitting if not idles(way)), key=time, default=None)
    if way is not None or fitting:
        return way
    clusters = num_tokens * shape.parts * -(-num_heads // tile)
    if num_tokens == 1 or len(launches) > 1 or splits == 1 or clusters > running:
        return None
    way = (
        clusters_by_length(shape, num_tokens)
        if merged
        else either_way(keys, shape, num_tokens, num_heads, at_once, costs)
    )
    return None if idles(way) else way
