"""Waves: which rows of a call are cut in how many parts, so that the last programs of a launch leave no SM empty.

A wave is a launch over some rows, each cut alike. Everything follows from shapes, so that a captured launch fits every
replay.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from .attention_options import Tile
from .common import cdiv
from .splits import MAX_SPLITS

# fewer keys than this do not pay for a split: its fixed cost (Q, partial result, merge) is that of about as many
MIN_SPLIT_KEYS = 64
DETERMINISTIC_SPLIT_KEYS = 512


class Costs(NamedTuple):
    """Costs of a program beside its keys, of a launch behind another, and of the merge of a wave's parts.

    The unit is the time of a key. `lone` is what a turn takes if it leaves every SM at least half of its room.
    """

    start: int
    launch: int
    merge: int
    lone: float


# fp8_ds_mla, H200: 64 keys take 3.7 us for 64 heads, and 6.1 for 16 heads of each of two programs that share an SM
ALONE, IN_PAIRS = Costs(140, 40, 100, 1.0), Costs(100, 20, 50, 0.65)
# Waves have to take at most this share of a launch that cuts all rows alike. H200, tokens x 64 heads: up to FEW_TURNS
# of whole rows 0.95, as bf16 110, 235, 360 take 113, 216, 297 us in waves, which should save less, and 102, 196, 288
# without; of more, flat 850, 1,500, 4,096 take 592, 1,015, 2,812 us for 610, 1,033, 2,834, and 1,024, 2,048, which
# should save less than 2.5 %, 715, 1,433 for 699, 1,427.
FEW_TURNS, PAYS, PAYS_IN_MANY = 6, 0.95, 0.975

Rows = TypeVar("Rows", bound=Any)  # a named tuple of tensors `[num_tokens, ...]` or None


class Shares(NamedTuple):
    """How a row is cut: all parts but the last have `first / of` of its tiles of keys, the last one has the rest."""

    parts: int
    first: int
    of: int


class Wave(NamedTuple):
    num_tokens: int
    shares: Shares


def num_splits(num_tokens: int, num_head_blocks: int, topk: int, wanted: int, deterministic: bool = False) -> int:
    """Programs that share one row's keys: as many as are wanted in all, none with fewer than MIN_SPLIT_KEYS keys.

    From shapes alone, so that a captured launch fits every replay; from topk alone where a row must not notice its
    batch.
    """
    if deterministic:
        return max(1, min(cdiv(topk, DETERMINISTIC_SPLIT_KEYS), MAX_SPLITS))
    programs = num_tokens * num_head_blocks
    if programs == 0 or programs >= wanted:
        return 1
    return max(1, min(wanted // programs, cdiv(topk, MIN_SPLIT_KEYS), MAX_SPLITS))


class _Work(NamedTuple):
    """Programs of a row that is not cut, its tiles of keys, keys of a tile, programs that run at a time, whether last
    parts may be short, and costs.
    """

    head_blocks: int
    tiles: int
    block_n: int
    sms: int
    uneven: bool
    costs: Costs

    def part(self, tiles: int) -> int:
        return self.costs.start + self.block_n * tiles

    def turns(self, programs: int) -> float:
        full, rest = divmod(programs, self.sms)
        return full + (rest > 0) * (self.costs.lone if 2 * rest <= self.sms else 1)


def _even(num_tokens: int, work: _Work, parts: int) -> tuple[float, Shares]:
    """What equal parts take, in keys."""
    turns = work.turns(num_tokens * work.head_blocks * parts)
    return turns * work.part(cdiv(work.tiles, parts)) + work.costs.merge * (parts > 1), Shares(parts, 1, parts)


def _uneven(num_tokens: int, work: _Work, parts: int) -> tuple[float, Shares] | None:
    """The last part is so short that the SMs beside the other parts take several of them one after the other."""
    programs = num_tokens * work.head_blocks
    free = work.sms - programs * (parts - 1)
    for share in range(cdiv(work.tiles, parts) + 1, cdiv(work.tiles, parts - 1)):
        last = work.tiles - share * (parts - 1)
        if free * (work.part(share) // work.part(last)) >= programs:
            return work.part(share) + work.costs.merge, Shares(parts, share, work.tiles)
    return None


def _one_round(num_tokens: int, work: _Work) -> tuple[float, Shares]:
    """The cheapest way to cut all rows alike."""
    programs, most = num_tokens * work.head_blocks, min(work.tiles, MAX_SPLITS)
    counts = {1, 2, 3, 4, 5, 6, 8, max(1, min(work.sms // programs, most))}
    if work.costs != ALONE:
        # parts of a second turn meet on the SMs that are free first: 96 rows in four parts take longer than in two
        counts = {parts for parts in counts if parts == 1 or programs * parts <= work.sms}
    ways = [_even(num_tokens, work, parts) for parts in counts if parts <= most]
    for parts in range(2, 6 if work.uneven else 2):
        if programs * (parts - 1) < work.sms and parts <= most:
            way = _uneven(num_tokens, work, parts)
            ways += [] if way is None else [way]
    return min(ways)


def _waves(num_tokens: int, work: _Work, more: int) -> tuple[float, tuple[Wave, ...]]:
    """The cheapest waves, at most `more` behind the first: some rows fill all SMs, the rest is cut in another way."""
    cost, shares = _one_round(num_tokens, work)
    best: tuple[float, tuple[Wave, ...]] = (cost, (Wave(num_tokens, shares),))
    if more == 0:
        return best
    for parts in (1, 2, 3, 4):
        turns = num_tokens * work.head_blocks * parts // work.sms
        filling = turns * work.sms // (parts * work.head_blocks)
        if parts > work.tiles or not 0 < filling < num_tokens or (parts > 1 and turns > 1):
            continue
        first, cut = _even(filling, work, parts)
        rest, waves = _waves(num_tokens - filling, work, more - 1)
        if first + work.costs.launch + rest < best[0]:
            best = first + work.costs.launch + rest, (Wave(filling, cut), *waves)
    return best


@functools.lru_cache(4096)
def waves_of_rows(
    num_tokens: int,
    head_blocks: int,
    tiles: int,
    block_n: int,
    sms: int,
    parts: int,
    uneven: bool = True,
    costs: Costs = ALONE,
) -> tuple[Wave, ...]:
    """Waves in their order.

    Args:
        num_tokens: rows.
        head_blocks: programs of a row that is not cut.
        tiles: tiles of keys of a row.
        block_n: keys of a tile.
        sms: programs that run at the same time.
        parts: parts of each row if all are cut alike.
        uneven: whether last parts may be short.
        costs: of programs that are alone on an SM, or of two together.
    """
    programs, work = num_tokens * head_blocks, _Work(head_blocks, tiles, block_n, sms, uneven, costs)
    many = 4 * programs > sms
    # few rows in pairs have been timed in parts alone
    counts = {1, parts} if many or costs == ALONE else {parts}
    plain, shares = min(_even(num_tokens, work, count) for count in counts)
    if many and tiles > 1:
        cost, waves = _waves(num_tokens, work, 2)
        if cost < plain * (PAYS if programs <= FEW_TURNS * sms else PAYS_IN_MANY):
            return waves
    return (Wave(num_tokens, shares),)


def waves_of(
    num_tokens: int,
    head_blocks: int,
    topk: int,
    chosen: Tile,
    wanted: int,
    deterministic: bool,
    alone: bool,
    short: bool = False,
) -> tuple[Wave, ...]:
    """The waves of a call: one, of parts by `num_splits`, where a row must not notice its batch, and where SMs run
    two programs of more than 16 heads, which have not been timed in waves.

    Args:
        num_tokens, head_blocks: rows, and programs of each.
        topk: keys of a row.
        chosen: the tile.
        wanted: programs that run at the same time.
        deterministic: whether a row must not notice its batch.
        alone: whether each has an SM to itself.
        short: whether rows are too short for parts.
    """
    parts = 1 if short else num_splits(num_tokens, head_blocks, topk, wanted, deterministic)
    if short or deterministic or not (alone or chosen.block_h == 16):
        return (Wave(num_tokens, Shares(parts, 1, parts)),)
    # where small programs meet on an SM, short parts gain nothing
    uneven, tiles = chosen.num_warps == 8, cdiv(topk, chosen.block_n)
    costs = ALONE if alone else IN_PAIRS
    return waves_of_rows(num_tokens, head_blocks, tiles, chosen.block_n, wanted, parts, uneven, costs)


def parts_of(waves: tuple[Wave, ...], rows: Rows) -> Iterator[tuple[Rows, Shares]]:
    """The tensors of each wave, and how it cuts rows."""
    start = 0
    for num_tokens, shares in waves:
        part = rows
        if len(waves) > 1:
            part = type(rows)(*(None if x is None else x[start : start + num_tokens] for x in rows))
        yield part, shares
        start += num_tokens


def suits_large_tiles(softmax_scale: float) -> bool:
    """Whether tiles may take the largest score before they scale it, and scale its difference in one instruction.

    The scale is above 0, and small enough that `exp2` takes what a product's rounding leaves.
    """
    return 0 < softmax_scale < 2**16
