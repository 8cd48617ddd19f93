"""DeepSeek-V4's compressor: several tokens into one entry of the compressed cache."""

from __future__ import annotations

import torch

from ..contracts import compressor as contracts


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
    contracts.compress_and_cache(
        kv,
        score,
        position_bias,
        norm_weight,
        cos_sin,
        state_cache,
        kv_cache,
        state_block_table,
        req_id_per_token,
        positions,
        slot_mapping,
        eps,
        cache_format,
    )
