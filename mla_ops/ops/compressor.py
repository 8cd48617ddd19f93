"""DeepSeek-V4's compressor: several tokens into one entry of the compressed cache."""

from __future__ import annotations

import torch

from ..dispatch import Call
from ..formats import CACHE_ALIGNMENT, ROPE_DIM, geometry
from ..registry import is_single, mutating, require, require_one_of
from ._checks import (
    FLOAT32,
    FLOAT_DTYPES,
    INT32,
    INT64,
    check_block_table,
    check_cache,
    check_no_grad,
    check_scale,
    check_tensor,
)

# widths of a compressed entry: keys of V4's attention, keys of its indexer
HEAD_DIMS = (512, 128)


def _check_entry_width(op: str, kv_cache: torch.Tensor, cache_format: str, head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{op}: norm_weight must have shape [512] or [128], got [{head_dim}]")
    width = geometry(kv_cache, cache_format).head_dim
    if width != head_dim:
        raise ValueError(
            f"{op}: kv_cache of cache_format '{cache_format}' holds keys of width {width}, norm_weight has {head_dim}"
        )


def _check_state_cache(op: str, state_cache: torch.Tensor, width: int, device: torch.device) -> None:
    """Float32, whole rows next to each other, blocks on 16 bytes: what kernels load four floats at once from."""
    dims = (("num_blocks", None), ("block_size", None), ("2*width", 2 * width))
    check_tensor(op, "state_cache", state_cache, FLOAT32, dims, device)
    require(
        state_cache.shape[1] >= 1,
        lambda: f"{op}: state_cache must have a block_size of at least 1, got {state_cache.shape[1]}",
    )
    if (one_row := state_cache.stride(1) == state_cache.shape[2]) is not True:
        require_one_of(
            (one_row, *is_single(state_cache.shape[:2])),
            lambda: f"{op}: state_cache.stride(1) must be {state_cache.shape[2]}, one row, got {state_cache.stride(1)}",
        )

    def off_alignment(what: str, elements: int | torch.SymInt) -> str:
        return (
            f"{op}: blocks of state_cache must start on {CACHE_ALIGNMENT} bytes, "
            f"got a {what} of {elements} elements of 4 bytes"
        )

    stride, offset = state_cache.stride(0), state_cache.storage_offset()
    if (aligned := stride * 4 % CACHE_ALIGNMENT == 0) is not True:
        require_one_of((aligned, *is_single(state_cache.shape[:1])), lambda: off_alignment("stride(0)", stride))
    require(offset * 4 % CACHE_ALIGNMENT == 0, lambda: off_alignment("storage offset", offset))


@mutating("state_cache", "kv_cache", disjoint=False)
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
) -> Call:
    """Pools each group of `ratio` tokens that this step completes into one cache entry, and keeps what later ones need.

    A token whose position p satisfies `(p + 1) % ratio == 0` completes a group. For each channel, the keys of the group
    are averaged under the softmax of their scores plus `position_bias[position % ratio]`; the result is normalised
    (`x / sqrt(mean(x**2) + eps) * norm_weight`), the neighbouring pairs of its last 64 dims are rotated by the angles
    of the group's first position, `p + 1 - ratio`, and it is written to `kv_cache`. All in float32, rounded once.

    With overlap (`width == 2 * head_dim`, V4's ratio 4), a token has two series of keys and scores: the group takes
    the second half of its own tokens' channels, and the first half of those of the `ratio` tokens before it.

    A group's tokens may belong to this step, to earlier steps, or both: prefill of any length, decode, and several
    query tokens a request are the same call. Tokens of a request lie in consecutive rows, in order.

    Args:
        kv: `[num_tokens, width]` bfloat16, float16 or float32, keys before pooling; `width` is `head_dim`, or twice
            that with overlap.
        score: `[num_tokens, width]` of such a dtype, what the softmax is taken of.
        position_bias: `[ratio, width]` float32. Its length is what sets `ratio`: 4 and 128 in V4.
        norm_weight: `[head_dim]` of any of the float dtypes; `head_dim` is 512, or 128 for the indexer's keys.
        cos_sin: `[max_positions, 64]` float32, row p: cosines of position p's 32 angles, then their sines. An entry
            whose position has no row is not written.
        state_cache: `[num_blocks, block_size, 2 * width]` float32, written in place: key, then score plus bias, of the
            latest tokens of each request. Rows are contiguous, `stride(0)` is free in multiples of 16 bytes.
        kv_cache: the compressed cache as its format says, written in place.
        state_block_table: `[num_requests, max_blocks]` int32. The state of position p is in block
            `state_block_table[request, p // block_size % max_blocks]`: a table as wide as the longest request is a
            paged cache, a narrower one (down to one block) is a ring. It has room for at least
            `ratio * width / head_dim` tokens; a request that may go back n tokens (rejected drafts) needs n more. A
            block outside the cache is neither read nor written: its tokens get no weight. No two requests of a step
            share a block: whether one reads what the other writes in this step is unspecified.
        req_id_per_token: `[num_tokens]` int32. A token whose id is outside `[0, num_requests)` is padding: nothing is
            written for it.
        positions: `[num_tokens]` int32, position of each token in its request, one more from row to row; negative is
            padding. Entries and states of a request whose positions do not ascend so are unspecified, and nothing else
            is written.
        slot_mapping: `[num_tokens]` int64, slot in `kv_cache` of the entry that a token completes. Read only for
            tokens that complete a group; negative or past the cache, the entry is not written.
        eps: added to the mean square.
        cache_format: `fp8_ds_mla_v4` and, for the indexer's keys, `fp8_index`, quantised from the float32 entry; or
            `bf16`, `fp16`, `fp32` (docs/formats.md).

    A new request may take over blocks as they are: no position before its own first is read.

    Raises:
        TypeError, ValueError: a dtype, device, shape or stride that the contract does not allow; nothing is written.

    Source: DeepSeek-V4 (compressed sparse and heavily compressed attention).
    """
    op = "compress_and_cache"
    device = kv.device
    check_tensor(op, "kv", kv, FLOAT_DTYPES, (("num_tokens", None), ("width", None)), device)
    num_tokens, width = kv.shape
    check_tensor(op, "score", score, FLOAT_DTYPES, (("num_tokens", num_tokens), ("width", width)), device)
    check_tensor(op, "position_bias", position_bias, FLOAT32, (("ratio", None), ("width", width)), device)
    require(position_bias.shape[0] >= 1, lambda: f"{op}: position_bias must have a ratio of at least 1 row, got 0")
    check_tensor(op, "norm_weight", norm_weight, FLOAT_DTYPES, (("head_dim", None),), device)
    check_tensor(op, "cos_sin", cos_sin, FLOAT32, (("max_positions", None), ("rope_dim", ROPE_DIM)), device)
    check_cache(op, kv_cache, cache_format, index_keys=True)
    if kv_cache.device != device:
        raise ValueError(f"{op}: kv_cache must be on {device} like the first argument, got {kv_cache.device}")
    head_dim = norm_weight.shape[0]
    _check_entry_width(op, kv_cache, cache_format, head_dim)
    if width not in (head_dim, 2 * head_dim):
        raise ValueError(f"{op}: kv must be {head_dim} wide, or {2 * head_dim} with overlap, got {width}")
    _check_state_cache(op, state_cache, width, device)
    check_block_table(op, state_block_table, device, "state_block_table")
    tokens = (("num_tokens", num_tokens),)
    check_tensor(op, "req_id_per_token", req_id_per_token, INT32, tokens, device)
    check_tensor(op, "positions", positions, INT32, tokens, device)
    check_tensor(op, "slot_mapping", slot_mapping, INT64, tokens, device)
    check_scale(op, "eps", eps)
    window = position_bias.shape[0] * (width // head_dim)
    capacity = state_block_table.shape[1] * state_cache.shape[1]
    require(
        capacity >= window,
        lambda: (
            f"{op}: state_block_table must give a request room for the {window} tokens of a group, got "
            f"{state_block_table.shape[1]} blocks of {state_cache.shape[1]}"
        ),
    )
    check_no_grad(
        op,
        kv=kv,
        score=score,
        position_bias=position_bias,
        norm_weight=norm_weight,
        cos_sin=cos_sin,
        state_cache=state_cache,
        kv_cache=kv_cache,
    )
    return Call(op, device, kv.dtype, cache_format, head_dim=head_dim, num_tokens=num_tokens)
