"""Predicts the times of sparse attention launches, by a model that is linear in the times of `costs.json`.

The file has the times of each GPU that they were fitted on. `python -m mla_ops bench launches --write FILE` measures
forced launches and fits the times of this GPU again.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch

from ...formats import LATENT_DIM
from .launch import SPLITS, Clusters, Group, KeyFormat, in_registers

TABLE = Path(__file__).with_name("costs.json")
DEFAULT = "H200"  # its times serve a GPU that has none


class TileCosts(NamedTuple):
    """Times of a kernel, in microseconds.

    Attributes:
        turn_us: one turn of 64 keys.
        row_us: a row besides its turns.
        merge_us: the merge of a row's splits by one CTA; the CTAs of a cluster divide it among themselves.
    """

    turn_us: float
    row_us: float
    merge_us: float


class Costs(NamedTuple):
    """Times of one GPU, in microseconds.

    Attributes:
        group_us: the end of a row that a group shares.
        member_us: each CTA of the group.
        even_us: a group whose CTAs have equally many turns, so that all meet at one time.
        launch_us: the part of `row_us` that the rows of a later round do not take, where no CTA takes several rows.
        next_row_us: from one row of a CTA to its next.
        fold_us: from one share of a CTA to its next of the same row, where registers hold them.
        share_us: the same where memory holds the parts, with 64 heads.
        shares_us: to leave and add up the shares of a row, with 64 heads, by one CTA; more have a part of it each.
        sharers_us: several CTAs that take shares of one row, once a launch: their code comes from memory.
        wave_us: another wave.
        parts_us: the kernel that merges parts.
        parts_us_per_mb: what that takes for 10^6 bytes of parts.
        wide_us: the merge of a cluster of 16 CTAs besides, of 16 heads each, over bfloat16 keys or in parts.
        tiles: times of the kernels, by the name of the format and the heads of a tile.
    """

    group_us: float
    member_us: float
    even_us: float
    launch_us: float
    next_row_us: float
    fold_us: float
    share_us: float
    shares_us: float
    sharers_us: float
    wave_us: float
    parts_us: float
    parts_us_per_mb: float
    wide_us: float
    tiles: dict[str, dict[int, TileCosts]]


def read_costs(text: str, gpu: str) -> Costs:
    """The times of a GPU, by its name; those of `DEFAULT` where the table has none.

    Args:
        text: contents of `costs.json`.
        gpu: its name as the driver has it, for instance `NVIDIA H100 80GB HBM3`.
    """
    table = json.loads(text)
    found = table[next((name for name in gpu.split() if name in table), DEFAULT)]
    tiles = {
        keys: {int(tile): TileCosts(*times) for tile, times in tiles.items()} for keys, tiles in found["tiles"].items()
    }
    return Costs(**{**found, "tiles": tiles})


@functools.cache
def costs_of(device_index: int) -> Costs:
    """The times of a device."""
    return read_costs(TABLE.read_text(), torch.cuda.get_device_name(device_index))


def predicted_us(
    keys: KeyFormat,
    shape: Clusters | Group,
    num_tokens: int,
    num_heads: int,
    turns: int,
    at_once: tuple[int, ...],
    costs: Costs,
) -> float:
    """Microseconds of a launch whose rows have `turns` of keys, and of the merge of its parts; linear in `costs`.

    Infinite for groups that are more than the device runs at one time.
    """
    rows = num_tokens * -(-num_heads // shape.tile)
    turn_us, row_us, merge_us = costs.tiles[keys.name][shape.tile]
    if isinstance(shape, Group):
        members = shape.members
        if rows * members > at_once[0]:
            return math.inf
        end_us = costs.group_us + costs.member_us * members + (costs.even_us if turns % members == 0 else 0.0)
        return -(-turns // members) * turn_us + row_us + end_us
    splits, parts, shares = shape.splits, shape.parts, shape.shares
    rounds = -(-rows * parts // at_once[SPLITS.index(splits)])
    own_shares, registers = max(1, -(-shares // splits)), in_registers(shape)
    if registers and shape.tile == 32:  # one warpgroup makes the scores
        turn_us = costs.tiles[keys.name][64].turn_us
    elif shape.bits_of:  # the same
        turn_us = costs.tiles[keys.name][32].turn_us
    of_64 = shape.tile / 64
    each = shares or splits * parts
    keys_us = sum(-(-max(turns - share, 0) // each) for share in range(0, max(shares, 1), splits)) * turn_us
    keys_us += (own_shares - 1) * (costs.fold_us if registers else costs.share_us * of_64)
    end_us = merge_us / splits if splits > 1 else 0.0
    if splits == 16 and shape.tile == 16 and (parts > 1 or not keys.quantized):
        end_us += costs.wide_us
    if shares and not registers:
        end_us = costs.shares_us * of_64 / splits
    first_us = row_us + end_us
    later_us = first_us - costs.launch_us
    if keys.kernel(shape).persistent:
        later_us = costs.next_row_us + (end_us if shares else 0.0)
    parts_mb = 4e-6 * LATENT_DIM * parts * num_tokens * num_heads
    parts_us = costs.parts_us + parts_mb * costs.parts_us_per_mb if parts > 1 else 0.0
    sharers_us = costs.sharers_us if shares and splits > 1 and not registers else 0.0
    return rounds * keys_us + first_us + (rounds - 1) * later_us + parts_us + sharers_us
