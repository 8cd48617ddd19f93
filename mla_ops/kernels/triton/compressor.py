"""The compressor of DeepSeek-V4 in Triton. States are the reference's to the bit; entries are sums in another order."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...dispatch import Lowering
from ...formats import geometry, get_format
from .bfloat16 import convert, narrow, widen
from .common import Constant, cdiv, sized_jit
from .e4m3 import encode, power_of_two_exponent
from .indexer_cache import store_index_key
from .rows import V4_LATENT, V4_ROW_BYTES, V4_SCALE_BYTES

MANY_TOKENS = 512  # a program of a longer prefill looks through several tokens for those that complete a group


class Tile(NamedTuple):
    """Channels and states that a program pools at once, and its warps."""

    channels: int
    states: int
    num_warps: int


def tile(window: int, head_dim: int) -> Tile:
    """A program pools every channel of a short window, and writes the entry: 8 states are all of a group of ratio 4.

    The 128 states of a longer one are 512 KB. Programs of 32 channels, 128 bytes of a state, load them at once on as
    many SMs; the norm needs all channels, so that a second kernel writes the entry.
    """
    if window <= 8:
        return Tile(head_dim, 8, 4)
    return Tile(32, min(triton.next_power_of_2(window), 128), 4)


@dataclass(frozen=True, eq=False)
class Options(Constant):
    """The constants of a kernel.

    Attributes:
        ratio: tokens of a group.
        width: channels of a state's keys, and of its scores.
        head_dim, rope: channels of an entry, and how many of them are rotated.
        planar: whether the format of the cache is.
        channels, states: of a program at once.
        rows: tokens that a program looks through.
        store: whether a program writes its tokens' states, too.
    """

    ratio: int
    width: int
    head_dim: int
    rope: int
    planar: bool
    channels: int
    states: int
    rows: int
    store: bool


make_options = functools.cache(Options)


def rows_of_a_program(num_tokens: int, channels: int, head_dim: int) -> int:
    """Tokens that a program of the pooling kernel looks through: most of a prefill's complete no group of 128."""
    return 1 if channels == head_dim or num_tokens < MANY_TOKENS else 16


@triton.jit
def _store_state(token, ring, inputs, first, CHANNELS: tl.constexpr, OPTIONS: tl.constexpr):
    """Writes CHANNELS channels from `first` on of one token's key and biased score to its place in the state cache.

    Args:
        token: row of `inputs`, request, position.
        ring: state cache, block table, its columns, blocks and tokens of a block, strides of a block (over 4) and row.
        inputs: keys, scores and bias of the group's positions, with their strides.
    """
    row, request, position = token
    state_cache, state_block_table, max_blocks, num_state_blocks, state_block_size, stride_state_4, stride_table = ring
    kv, score, position_bias, stride_kv, stride_score, stride_bias = inputs
    column = position // state_block_size % max_blocks
    block = tl.load(state_block_table + request * stride_table + column).to(tl.int64)
    if (block >= 0) & (block < num_state_blocks):
        channel = first + tl.arange(0, CHANNELS)
        target = state_cache + block * (stride_state_4 * 4) + position % state_block_size * (2 * OPTIONS.width)
        tl.store(target + channel, widen(tl.load(kv + row * stride_kv + channel)))
        bias = tl.load(position_bias + position % OPTIONS.ratio * stride_bias + channel)
        tl.store(target + OPTIONS.width + channel, widen(tl.load(score + row * stride_score + channel)) + bias)


@triton.jit
def _store_planar(entry, start, offset, block_size, HEAD_DIM: tl.constexpr):
    """Quantises one entry into its row of a `fp8_ds_mla_v4` block: 7 groups of 64, then 64 bfloat16, then the scales.

    As `cache._store_fp8_v4_kernel` does, from values in registers.
    """
    group = tl.arange(0, HEAD_DIM // 64)
    column = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    value = tl.reshape(entry, (HEAD_DIM // 64, 64))
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    exponent = power_of_two_exponent(tl.max(tl.where(magnitude < 0x7F800000, magnitude, 0), axis=1), -22)
    latent = (group < 7)[:, None]
    row = start + offset * V4_ROW_BYTES
    tl.store(row + column, encode(bits, exponent[:, None]).to(tl.uint8), mask=latent)
    rope = (row + V4_LATENT).to(tl.pointer_type(tl.bfloat16)) + (column - V4_LATENT)
    tl.store(rope, narrow(value, tl.bfloat16), mask=(group == 7)[:, None])
    scales = start + block_size.to(tl.int64) * V4_ROW_BYTES + offset * V4_SCALE_BYTES
    tl.store(scales + group, tl.where(group < 7, exponent + 127, 0).to(tl.uint8))


@triton.jit
def _pool(token, ring, inputs, req_id_per_token, positions, first, OPTIONS: tl.constexpr):
    """`channels` channels from `first` on of the group that a token completes, under a softmax for each channel.

    A state is read from this step's rows where the token that many rows up is the one wanted, else from the state
    cache; before the request's beginning, and where there is no block, it has no weight. Arguments as `_store_state`'s.
    """
    row, request, position = token
    state_cache, state_block_table, max_blocks, num_state_blocks, state_block_size, stride_state_4, stride_table = ring
    kv, score, position_bias, stride_kv, stride_score, stride_bias = inputs
    RATIO: tl.constexpr = OPTIONS.ratio
    WIDTH: tl.constexpr = OPTIONS.width
    HEAD_DIM: tl.constexpr = OPTIONS.head_dim
    CHANNELS: tl.constexpr = OPTIONS.channels
    STATES: tl.constexpr = OPTIONS.states
    WINDOW: tl.constexpr = RATIO * (WIDTH // HEAD_DIM)
    newest = position.to(tl.int32)
    dim = first + tl.arange(0, CHANNELS)
    running_max = tl.full((CHANNELS,), float("-inf"), tl.float32)
    total = tl.zeros((CHANNELS,), tl.float32)
    pooled = tl.zeros((CHANNELS,), tl.float32)
    for start in range(0, WINDOW, STATES):
        state = start + tl.arange(0, STATES)
        back = WINDOW - 1 - state
        source = newest - back
        near = row - back
        wanted = (back >= 0) & (source >= 0)
        here = wanted & (near >= 0)
        here &= tl.load(req_id_per_token + near, mask=here, other=-1) == request
        here &= tl.load(positions + near, mask=here, other=-1) == source
        # 32 bits, since a division in 64 for each state would take longer than its loads
        page = source // state_block_size
        # asked for whether the state is stored or not: one wait less
        entry = state_block_table + request * stride_table + page % max_blocks
        block = tl.load(entry, mask=wanted, other=-1).to(tl.int64)
        stored = wanted & (here == 0) & (block >= 0) & (block < num_state_blocks)
        offset = (source - page * state_block_size).to(tl.int64)

        # the older half of a group with overlap takes the first series of its tokens, the newer the second
        channel = (state // RATIO * HEAD_DIM)[:, None] + dim[None, :]
        new = here[:, None]
        old = stored[:, None]
        new_key = widen(tl.load(kv + (near * stride_kv)[:, None] + channel, mask=new, other=0.0))
        new_score = widen(tl.load(score + (near * stride_score)[:, None] + channel, mask=new, other=0.0))
        new_score += tl.load(position_bias + (state % RATIO * stride_bias)[:, None] + channel, mask=new, other=0.0)
        place = block * (stride_state_4 * 4) + offset * (2 * WIDTH)
        old_state = state_cache + place[:, None] + channel
        key = tl.where(new, new_key, tl.load(old_state, mask=old, other=0.0))
        weight = tl.where(new, new_score, tl.load(old_state + WIDTH, mask=old, other=float("-inf")))

        new_max = tl.maximum(running_max, tl.max(weight, axis=0))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp(weight - safe_max[None, :])
        alpha = tl.exp(running_max - safe_max)
        total = total * alpha + tl.sum(weight, axis=0)
        pooled = pooled * alpha + tl.sum(weight * key, axis=0)
        running_max = new_max
    return pooled / total


@triton.jit
def _store_entry(pooled, position, slot, norm_weight, cos_sin, stride_cos_sin, cache, eps, OPTIONS: tl.constexpr):
    """Normalises, rotates and writes one pooled group. `cache`: tensor, tokens of a block, block stride over 16."""
    HEAD_DIM: tl.constexpr = OPTIONS.head_dim
    ROPE: tl.constexpr = OPTIONS.rope
    kv_cache, block_size, stride_block_16 = cache
    dim = tl.arange(0, HEAD_DIM)
    angle = position - (OPTIONS.ratio - 1)
    inverse = tl.rsqrt(tl.sum(pooled * pooled, axis=0) / HEAD_DIM + eps)
    normed = pooled * inverse * widen(tl.load(norm_weight + dim))
    first, second = tl.split(tl.reshape(normed, (HEAD_DIM // 2, 2)))
    pair = tl.arange(0, HEAD_DIM // 2) - (HEAD_DIM - ROPE) // 2
    turned = pair >= 0
    cos = tl.load(cos_sin + angle * stride_cos_sin + pair, mask=turned, other=1.0)
    sin = tl.load(cos_sin + angle * stride_cos_sin + ROPE // 2 + pair, mask=turned, other=0.0)
    rotated = tl.join(
        tl.where(turned, first * cos - second * sin, first),
        tl.where(turned, second * cos + first * sin, second),
    )
    entry = tl.reshape(rotated, (HEAD_DIM,))
    UNIT: tl.constexpr = 16 // (kv_cache.dtype.element_ty.primitive_bitwidth // 8)
    target = kv_cache + slot // block_size * (stride_block_16 * UNIT)
    if OPTIONS.planar and HEAD_DIM == 128:
        store_index_key(entry, target, slot % block_size, block_size)
    elif OPTIONS.planar:
        _store_planar(entry, target, slot % block_size, block_size, HEAD_DIM)
    else:
        tl.store(target + slot % block_size * HEAD_DIM + dim, convert(entry, kv_cache.dtype.element_ty))


@triton.jit
def _completes(row, req_id_per_token, positions, slot_mapping, num_requests, num_slots, max_positions, RATIO, there):
    """Request, position and slot of tokens, whether they are no padding, and whether each writes a group's entry."""
    request = tl.load(req_id_per_token + row, mask=there, other=-1).to(tl.int64)
    position = tl.load(positions + row, mask=there, other=-1).to(tl.int64)
    slot = tl.load(slot_mapping + row, mask=there, other=-1).to(tl.int64)
    live = (request >= 0) & (request < num_requests) & (position >= 0)
    written = (slot >= 0) & (slot < num_slots) & (position - (RATIO - 1) < max_positions)
    return request, position, slot, live, live & ((position + 1) % RATIO == 0) & written


@sized_jit(any_alignment=("req_id_per_token", "positions", "slot_mapping", "state_block_table"))
def _compress_kernel(
    kv,
    score,
    position_bias,
    norm_weight,
    cos_sin,
    state_cache,
    kv_cache,
    pooled_groups,
    state_block_table,
    req_id_per_token,
    positions,
    slot_mapping,
    eps: tl.float32,
    num_tokens: tl.int32,
    num_requests: tl.int32,
    max_blocks: tl.int32,
    num_state_blocks: tl.int64,
    state_block_size: tl.int32,
    num_slots: tl.int64,
    block_size: tl.int32,
    max_positions: tl.int64,
    strides: (tl.int64,) * 7,
    OPTIONS: tl.constexpr,
):
    """Pools the groups that tokens complete; with every channel, normalises, rotates and writes their entries too.

    Grid: (tokens / rows, head_dim / channels). With fewer channels the pooled group goes to `pooled_groups`, a row of
    `head_dim` float32 for each token, for `_finish_kernel`. With `store` the tokens' own states are written too: the
    launcher asks for it when no slot written in this step can be one that is read. Shared memory holds reductions
    across warps.
    """
    RATIO: tl.constexpr = OPTIONS.ratio
    HEAD_DIM: tl.constexpr = OPTIONS.head_dim
    CHANNELS: tl.constexpr = OPTIONS.channels
    ROWS: tl.constexpr = OPTIONS.rows
    STORE: tl.constexpr = OPTIONS.store
    stride_kv, stride_score, stride_bias, stride_cos_sin, stride_state_4, stride_table, stride_block_16 = strides
    first = tl.program_id(1) * CHANNELS
    ring = state_cache, state_block_table, max_blocks, num_state_blocks, state_block_size, stride_state_4, stride_table
    inputs = kv, score, position_bias, stride_kv, stride_score, stride_bias
    begin = tl.program_id(0).to(tl.int64) * ROWS
    lane = tl.arange(0, ROWS)
    requests, tokens, slots, live, completes = _completes(
        begin + lane,
        req_id_per_token,
        positions,
        slot_mapping,
        num_requests,
        num_slots,
        max_positions,
        RATIO,
        begin + lane < num_tokens,
    )
    # the tokens that have something to do, one after the other
    pending = (live if STORE else completes).to(tl.int32)
    for _ in range(tl.sum(pending)):
        offset = tl.min(tl.where(pending != 0, lane, ROWS))
        chosen = lane == offset
        pending = tl.where(chosen, 0, pending)
        position = tl.sum(tl.where(chosen, tokens, 0))
        slot = tl.sum(tl.where(chosen, slots, 0))
        writes = tl.max(tl.where(chosen, completes.to(tl.int32), 0)) != 0
        row = begin + offset
        token = row, tl.sum(tl.where(chosen, requests, 0)), position
        if STORE:
            for series in tl.static_range(OPTIONS.width // HEAD_DIM):
                _store_state(token, ring, inputs, series * HEAD_DIM + first, CHANNELS, OPTIONS)
        if writes:
            pooled = _pool(token, ring, inputs, req_id_per_token, positions, first, OPTIONS)
            if CHANNELS == HEAD_DIM:
                cache = kv_cache, block_size, stride_block_16
                _store_entry(pooled, position, slot, norm_weight, cos_sin, stride_cos_sin, cache, eps, OPTIONS)
            else:
                tl.store(pooled_groups + row * HEAD_DIM + first + tl.arange(0, CHANNELS), pooled)


@sized_jit(any_alignment=("req_id_per_token", "positions", "slot_mapping"))
def _finish_kernel(
    pooled_groups,
    norm_weight,
    cos_sin,
    kv_cache,
    req_id_per_token,
    positions,
    slot_mapping,
    eps: tl.float32,
    num_requests: tl.int32,
    num_slots: tl.int64,
    block_size: tl.int32,
    max_positions: tl.int64,
    stride_cos_sin: tl.int64,
    stride_block_16: tl.int64,
    OPTIONS: tl.constexpr,
):
    """Writes the entry of the group that a token completes, from its pooled channels. Grid: (tokens,)."""
    row = tl.program_id(0).to(tl.int64)
    _, position, slot, _, writes = _completes(
        row, req_id_per_token, positions, slot_mapping, num_requests, num_slots, max_positions, OPTIONS.ratio, True
    )
    if writes:
        pooled = tl.load(pooled_groups + row * OPTIONS.head_dim + tl.arange(0, OPTIONS.head_dim))
        cache = kv_cache, block_size, stride_block_16
        _store_entry(pooled, position, slot, norm_weight, cos_sin, stride_cos_sin, cache, eps, OPTIONS)


@sized_jit(any_alignment=("req_id_per_token", "positions", "state_block_table"))
def _store_state_kernel(
    kv,
    score,
    position_bias,
    state_cache,
    state_block_table,
    req_id_per_token,
    positions,
    num_tokens: tl.int64,
    num_requests: tl.int32,
    max_blocks: tl.int32,
    num_state_blocks: tl.int64,
    state_block_size: tl.int32,
    stride_kv: tl.int64,
    stride_score: tl.int64,
    stride_bias: tl.int64,
    stride_state_4: tl.int64,
    stride_table: tl.int64,
    OPTIONS: tl.constexpr,
):
    """Writes one token's state, unless a later token of this step has the same place. Grid: (tokens,).

    The later token is a whole number of rings further on, behind padding perhaps.
    """
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(req_id_per_token + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    capacity = max_blocks.to(tl.int64) * state_block_size
    live = (request >= 0) & (request < num_requests) & (position >= 0) & (capacity > 0)
    later = row + capacity
    replaced = row < 0
    searching = live & (later < num_tokens)
    while searching:
        owner = tl.load(req_id_per_token + later).to(tl.int64)
        replaced = (owner == request) & (tl.load(positions + later) == position + (later - row))
        padding = (owner < 0) | (owner >= num_requests)
        later += capacity
        searching = padding & (later < num_tokens)
    if live & (replaced == 0):
        token = row, request, position
        ring = (
            state_cache,
            state_block_table,
            max_blocks,
            num_state_blocks,
            state_block_size,
            stride_state_4,
            stride_table,
        )
        inputs = kv, score, position_bias, stride_kv, stride_score, stride_bias
        _store_state(token, ring, inputs, 0, OPTIONS.width, OPTIONS)


def fits_in_one_launch(num_tokens: int, window: int, capacity: int) -> bool:
    """Whether no token of a step can be written where another still reads.

    Positions that share a slot are `capacity` apart. The oldest read lies `window - 1` before some token of the step,
    the newest write is at most `num_tokens - 1` after it, all of one request at worst.
    """
    return num_tokens + window - 1 <= capacity


def compress_and_cache(
    kv: torch.Tensor,
    score: torch.Tensor,
    position_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    state_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    state_block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    eps: float,
    cache_format: str,
) -> None:
    num_tokens, width = kv.shape
    num_requests, max_blocks = state_block_table.shape
    if num_tokens == 0 or num_requests == 0:
        return
    ratio, head_dim = position_bias.shape[0], norm_weight.shape[0]
    num_state_blocks, state_block_size, _ = state_cache.shape
    num_blocks, block_size, block_stride, _ = geometry(kv_cache, cache_format)
    window = ratio * (width // head_dim)
    together = fits_in_one_launch(num_tokens, window, max_blocks * state_block_size)
    channels, states, num_warps = tile(window, head_dim)
    rows = rows_of_a_program(num_tokens, channels, head_dim)
    whole = channels == head_dim
    pooled = norm_weight if whole else torch.empty(num_tokens, head_dim, dtype=torch.float32, device=kv.device)
    entry = head_dim, cos_sin.shape[1], get_format(cache_format).planar
    options = make_options(ratio, width, *entry, channels, states, rows, together)
    _compress_kernel[(cdiv(num_tokens, rows), head_dim // channels)](
        kv,
        score,
        position_bias,
        norm_weight,
        cos_sin,
        state_cache,
        kv_cache,
        pooled,
        state_block_table,
        req_id_per_token,
        positions,
        slot_mapping,
        eps,
        num_tokens,
        num_requests,
        max_blocks,
        num_state_blocks,
        state_block_size,
        num_blocks * block_size,
        block_size,
        cos_sin.shape[0],
        (
            kv.stride(0),
            score.stride(0),
            position_bias.stride(0),
            cos_sin.stride(0),
            state_cache.stride(0) // 4,
            state_block_table.stride(0),
            block_stride // 16,
        ),
        OPTIONS=options,
        num_warps=num_warps,
    )
    if not whole:
        _finish_kernel[(num_tokens,)](
            pooled,
            norm_weight,
            cos_sin,
            kv_cache,
            req_id_per_token,
            positions,
            slot_mapping,
            eps,
            num_requests,
            num_blocks * block_size,
            block_size,
            cos_sin.shape[0],
            cos_sin.stride(0),
            block_stride // 16,
            OPTIONS=options,
            num_warps=4,
        )
    if not together:
        _store_state_kernel[(num_tokens,)](
            kv,
            score,
            position_bias,
            state_cache,
            state_block_table,
            req_id_per_token,
            positions,
            num_tokens,
            num_requests,
            max_blocks,
            num_state_blocks,
            state_block_size,
            kv.stride(0),
            score.stride(0),
            position_bias.stride(0),
            state_cache.stride(0) // 4,
            state_block_table.stride(0),
            OPTIONS=options,
            num_warps=4,
        )


LOWERINGS = {"compress_and_cache": Lowering(compress_and_cache)}
