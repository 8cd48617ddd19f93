"""When few rows of a dense decode call share clusters of CTAs (`packed_rows.cuh`).

A launch by shape gives each row as many CTAs. Where lengths differ, each may have as many CTAs of one cluster as its
length asks for instead, which only the device knows. These add up their parts as those of a cluster do, so that no part
goes through memory, as those of rows by length (`by_length.py`) do, and no second kernel merges them.
"""

from __future__ import annotations

from collections.abc import Sequence

from .launch import MOST_ROWS, PACKED_CTAS, SPLITS, Clusters, KeyFormat, Packing, Shape

MOST_TURNS = 8 * PACKED_CTAS  # of a row; longer ones have more CTAs than a cluster by their lengths
# The same of quantised keys where each row has eight CTAs by shape: from there on rows by their lengths gain.
EIGHT, MOST_TURNS_OF_EIGHT = 8, 104
FEWEST_SAVED = 3  # turns of the longest row; less does not pay for the question
UNEVEN = 1.25  # rows are about as long if the longest is so many times the mean, and
MARGIN = 1  # turns of a CTA: to find who has what takes as long


def packed_clusters(num_tokens: int, at_once: tuple[int, ...]) -> tuple[Clusters, Packing] | None:
    """All clusters that run at one time, and the most CTAs of one that each row can have."""
    clusters = at_once[SPLITS.index(PACKED_CTAS)]
    if not clusters or num_tokens > min(MOST_ROWS, clusters * PACKED_CTAS):
        return None
    splits = PACKED_CTAS // -(-num_tokens // clusters)
    return Clusters(16, splits), Packing(clusters, num_tokens / UNEVEN, MARGIN * num_tokens * splits)


def packing_for(
    keys: KeyFormat, launches: Sequence[tuple[int, Shape]], num_heads: int, turns: int, at_once: tuple[int, ...]
) -> tuple[Clusters, Packing] | None:
    """The shape of a call's only launch whose rows may share clusters, and when; None where that cannot gain.

    Args:
        keys: the kernels' format.
        launches: tokens of each launch by shape, and its shape: rows about as long keep it.
        num_heads: heads.
        turns: turns of keys of a row at most.
        at_once: clusters that the device runs at one time, for each size in `SPLITS`.
    """
    if len(launches) > 1 or num_heads > 16 or turns > MOST_TURNS or keys.packed_kernel(16) is None:
        return None
    num_tokens, shape = launches[0]
    found = packed_clusters(num_tokens, at_once)
    if found is None or found[0] != shape or -(-turns // shape.splits) - -(-turns // PACKED_CTAS) < FEWEST_SAVED:
        return None
    if keys.quantized and shape.splits == EIGHT and turns > MOST_TURNS_OF_EIGHT:
        return None
    return found
