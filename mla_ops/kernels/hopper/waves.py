"""Calls of the sparse attention kernels in waves: as many tokens as fill the device some whole times, and the rest.

A row takes as long whether one CTA of the device works or all do. So tokens that are left over are a launch of their
own, by the shape that suits so few. It begins beside the end of the first one, whose inputs are its inputs too; nothing
that a launch of the same call makes may be among them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch

from ...formats import LATENT_DIM
from ..alignment import aligned, is_aligned
from . import groups, merge_parts, parts
from .balance import always
from .by_length import always_by_length, clusters_by_length
from .costs import Costs, predicted_us
from .launch import (
    SPLITS,
    Balance,
    ByLength,
    Clusters,
    Group,
    KeyFormat,
    Packing,
    Shape,
    clusters_at_once,
    exchange_of_shares,
    in_registers,
    launch,
    leaves_units,
    tiles_for,
)
from .packed import packed_clusters
from .params import CacheParams


class Wave(NamedTuple):
    """A launch: tokens, behind those of the wave before, and what works on them."""

    num_tokens: int
    shape: Shape


class Forced(NamedTuple):
    """Launches that `override` asks for."""

    waves: tuple[Wave, ...] = ()
    evenly: bool = False
    by_length: bool = False
    packed: bool = False


_forced: ContextVar[Forced] = ContextVar("mla_ops forced waves", default=Forced())  # noqa: B039 - it is a tuple


@contextlib.contextmanager
def override(*waves: Wave, evenly: bool = False, by_length: bool = False, packed: bool = False) -> Iterator[None]:
    """Calls inside the block are these launches, whatever `choose` would take: for measurements and tests.

    Args:
        waves: the launches; none for those that `choose` takes.
        evenly: their rows are shared evenly, whatever their lengths are; else they never are.
        by_length: each row of the only wave has as many CTAs as its length asks for; else none has.
        packed: rows of 16 heads, of one wave, share clusters wherever that shortens the call; else they never do.

    The block is this thread's, or this asyncio task's, as that of `dispatch.override`.

    Raises:
        ValueError: a group's wave is not the last one: the next would begin while the group still uses its counters and
            its memory. A call of another number of tokens raises ValueError, too.
    """
    for wave in waves[:-1]:
        if isinstance(wave.shape, Group):
            raise ValueError(f"waves.override: only the last wave may be of groups, got {wave} before {waves[-1]}")
    token = _forced.set(Forced(waves, evenly, by_length, packed))
    try:
        yield
    finally:
        _forced.reset(token)


def forced(num_tokens: int) -> Sequence[Wave]:
    """The waves of a call inside `override`; none outside of it."""
    waves = _forced.get().waves
    if waves and (tokens := sum(wave.num_tokens for wave in waves)) != num_tokens:
        raise ValueError(f"waves.override: the waves of this call must have {num_tokens} tokens, got {tokens}")
    return waves


def fastest_waves(
    keys: KeyFormat,
    shapes: Sequence[Clusters | Group],
    num_tokens: int,
    num_heads: int,
    turns: int,
    at_once: tuple[int, ...],
    costs: Costs,
) -> tuple[Wave, ...]:
    """One wave, or one that fills the device some whole times, not of groups, and one of the tokens that are left.

    Args:
        keys: the kernels' format.
        shapes: to choose from; those of which the device runs none are left out.
        num_tokens: query tokens.
        num_heads: heads.
        turns: turns of keys of a row.
        at_once: clusters that the device runs at one time, for each size in `SPLITS`.
        costs: times of the device.
    """

    def time(wave: Wave) -> float:
        return predicted_us(keys, wave.shape, wave.num_tokens, num_heads, turns, at_once, costs)

    fills = {shape: at_once[SPLITS.index(shape.splits)] for shape in shapes if isinstance(shape, Clusters)}
    runnable = [shape for shape in shapes if fills.get(shape, 1)]

    def fastest(num_tokens: int) -> tuple[float, Wave]:
        waves = (Wave(num_tokens, shape) for shape in runnable)
        return min(((time(wave), wave) for wave in waves), key=lambda timed: timed[0])

    least, wave = fastest(num_tokens)
    waves: tuple[Wave, ...] = (wave,)
    for shape, fill in fills.items():
        if not fill:
            continue
        of_a_token = -(-num_heads // shape.tile) * shape.parts
        whole = Wave(num_tokens * of_a_token // fill * fill // of_a_token, shape)
        if 0 < whole.num_tokens < num_tokens and (before := time(whole) + costs.wave_us) < least:
            rest, wave = fastest(num_tokens - whole.num_tokens)
            if before + rest < least:
                least, waves = before + rest, (whole, wave)
    return waves


def _forced_by_length(
    keys: KeyFormat, shape: Shape, num_tokens: int, num_heads: int, device_index: int
) -> tuple[Wave, ByLength]:
    """The only wave of a call whose rows go by their lengths whatever these are, and how they do."""
    chosen, by_length = always_by_length(shape.tile, num_heads, clusters_at_once(keys, shape.tile, device_index))
    if isinstance(shape, Clusters) and shape.parts > 1:
        chosen, by_length = clusters_by_length(shape, num_tokens)
    elif isinstance(shape, Clusters) and shape.splits > 1:
        chosen, by_length = shape, by_length._replace(count=min(by_length.count, num_tokens * shape.splits))
    return Wave(num_tokens, chosen), by_length


def _forced_packing(keys: KeyFormat, num_tokens: int, device_index: int) -> tuple[list[Wave], Packing]:
    """The only wave of a call whose rows share clusters whenever that shortens it, and how they do."""
    found = packed_clusters(num_tokens, clusters_at_once(keys, 16, device_index))
    if found is None:
        raise ValueError(f"waves.override: {num_tokens} tokens do not share clusters")
    return [Wave(num_tokens, found[0])], found[1]._replace(margin=-math.inf)


def _exchange_of_even_shares(balance: Balance, first: Wave, num_heads: int, device: torch.device) -> torch.Tensor:
    """Memory of a call whose rows may be shared evenly; enough for what its first wave exchanges as a group."""
    tile = balance.tile or first.shape.tile
    exchange = parts.exchange(balance.workers, tile, num_heads, device)
    if isinstance(first.shape, Group):
        rows = first.num_tokens * -(-num_heads // tile)
        of_group = groups.exchange_bytes(rows, first.shape.members) // exchange.element_size()
        if of_group > exchange.numel():
            return exchange.new_empty(of_group)
    return exchange


def _parts_of_rows(
    shape: Shape, num_tokens: int, num_heads: int, by_length: ByLength | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Memory for the float32 output and lse of each part of a wave's rows; None where a launch leaves whole rows."""
    size: tuple[int, ...]
    if by_length is not None:
        if by_length.count == 1 or leaves_units(shape, by_length):
            return None
        size = by_length.count, num_heads
    elif isinstance(shape, Clusters) and shape.parts > 1:
        size = shape.parts, num_tokens, num_heads
    else:
        return None
    out = torch.empty((*size, LATENT_DIM), dtype=torch.float32, device=device)
    return out, torch.empty(size, dtype=torch.float32, device=device)


def launch_waves(
    keys: KeyFormat,
    waves: Sequence[Wave],
    q: torch.Tensor,
    caches: tuple[CacheParams, CacheParams],
    softmax_scale: float,
    *,
    q_rope: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None,
    req_id_per_token: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    balance: Balance | None = None,
    by_length: ByLength | None = None,
    packing: Packing | None = None,
    deterministic: bool = False,
) -> None:
    """All waves of a call, and the merge of those in parts. Copies stand in front of the first and behind the last.

    With `balance`, and where lengths on the device say so, the first launch shares all tokens evenly, or one behind the
    waves does, and the others return at once. With `by_length` there is one wave, whose rows may go by their lengths.
    """
    q, q_rope = aligned(q), None if q_rope is None else aligned(q_rope)
    target = out if is_aligned(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    rest_out, rest_lse = target, lse
    buffers: list[torch.Tensor] = []  # they live until the last wave ran, so that no wave gets another's
    all_tokens, num_heads = out.shape[:2]
    wanted = _forced.get()
    if wanted.evenly:
        at_once = clusters_at_once(keys, tiles_for(keys, num_heads)[0], q.device.index)
        balance = always(keys, waves, num_heads, at_once)
    elif wanted.by_length:
        wave, by_length = _forced_by_length(keys, waves[0].shape, all_tokens, num_heads, q.device.index)
        waves = [wave]
    elif wanted.packed:
        waves, packing = _forced_packing(keys, all_tokens, q.device.index)
        balance = by_length = None
    exchange = balanced = None
    if balance is not None:
        exchange = _exchange_of_even_shares(balance, waves[0], num_heads, q.device)
        balanced = parts.is_balanced(exchange)
    everything = q, q_rope, caches, req_id_per_token
    before = tokens_before = 0
    for num_tokens, shape in waves:
        if before:
            q, rest_out, rest_lse = q[before:], rest_out[before:], rest_lse[before:]
            q_rope = None if q_rope is None else q_rope[before:]
            req_id_per_token = None if req_id_per_token is None else req_id_per_token[before:]
            caches = caches[0].behind(before), caches[1].behind(before)
        own_parts = _parts_of_rows(shape, num_tokens, num_heads, by_length, q.device)
        own_exchange = exchange
        if by_length is not None and leaves_units(shape, by_length):
            own_exchange = parts.exchange(-(-by_length.count // 2), shape.tile, num_heads, q.device)
        elif isinstance(shape, Clusters) and shape.shares and not in_registers(shape):
            own_exchange = exchange_of_shares(keys, shape, num_tokens * -(-num_heads // shape.tile), q.device)
            buffers.append(own_exchange)
        if own_parts is not None:
            buffers += own_parts
        launch(
            keys,
            shape,
            num_tokens,
            q,
            caches,
            softmax_scale,
            q_rope=q_rope,
            attn_sink=attn_sink,
            req_id_per_token=req_id_per_token,
            out=rest_out,
            lse=rest_lse,
            parts_of_rows=own_parts or (None, None),
            programmatic=before > 0,
            all_tokens=all_tokens,
            tokens_before=tokens_before,
            balance=balance,
            exchange=own_exchange,
            takes_either_way=balance is not None and before == 0 and not balance.tile,
            by_length=by_length,
            packing=packing,
            deterministic=deterministic,
        )
        if own_parts is not None:
            merge_parts.merge_parts(
                *own_parts,
                out=rest_out[:num_tokens],
                lse=rest_lse[:num_tokens],
                balanced=balanced,
                by_length=by_length and (by_length, caches),
            )
        before = num_tokens
        tokens_before += num_tokens
    if balance is not None and balance.tile:
        q, q_rope, caches, req_id_per_token = everything
        launch(
            keys,
            Clusters(balance.tile, 1),
            0,
            q,
            caches,
            softmax_scale,
            q_rope=q_rope,
            attn_sink=attn_sink,
            req_id_per_token=req_id_per_token,
            out=target,
            lse=lse,
            programmatic=True,
            all_tokens=all_tokens,
            balance=balance,
            exchange=exchange,
            takes_either_way=True,
        )
    if target is not out:
        out.copy_(target)
