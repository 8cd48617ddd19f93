"""The lightning indexer: its cache, scores, and the choice of keys."""

from __future__ import annotations

import torch

from ..contracts import indexer as contracts


def write_index_cache(
    k: torch.Tensor, index_cache: torch.Tensor, slot_mapping: torch.Tensor, cache_format: str
) -> None:
    """Writes the index key of each token to its slot, quantising as the format says.

    Args:
        k: index keys after norm and rotation, `[num_tokens, 128]` bfloat16, float16 or float32.
        index_cache: written in place. `fp8_index`: uint8, `[num_blocks, block_size, 132]` or `[num_blocks,
            block_bytes]`, blocks planar, `stride(0)` a multiple of 16 bytes. Plain formats: `[num_blocks, block_size,
            128]` of the format's dtype.
        slot_mapping: `[num_slots]` int64, `block * block_size + offset` of each token. A negative slot is padding and
            one past the cache is ignored: nothing is written. Rows `i < min(num_slots, num_tokens)` are written; if
            two of them name one slot, which one stays is undefined.
        cache_format: `fp8_index`, `bf16`, `fp16` or `fp32`.

    `fp8_index` gives a key the scale `2**ceil(log2(max(amax, 1e-4) / 448))` over its finite values; NaN and infinities
    become NaN where they stand. The bytes are the same under every lowering.

    Raises:
        TypeError, ValueError: a dtype, device, shape or stride that the contract does not allow; nothing is written.

    Source: DeepSeek-V3.2 (DeepGEMM's and vLLM's layout of index keys).
    """
    contracts.write_index_cache(k, index_cache, slot_mapping, cache_format)


def gather_index_cache(
    index_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    cache_format: str,
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads index keys of requests, one request after the other, as `indexer_logits` takes them.

    Args:
        index_cache: as `write_index_cache` writes it; only read.
        block_table: `[num_requests, max_blocks]` int32. Positions in blocks outside the cache read as zeros.
        seq_lens: `[num_requests]` int32, keys of each request.
        cu_seq_lens: `[num_requests + 1]` int32, ascending: request r owns output rows `cu_seq_lens[r]` up to
            `cu_seq_lens[r + 1]`; keys that do not fit there are left out.
        cache_format: format of `index_cache`.
        num_tokens: rows of the output; an upper bound known to the host.

    Returns:
        keys `[num_tokens, 128]`, float8_e4m3fn for `fp8_index`, else the cache's dtype, and their scales
        `[num_tokens]` float32, 1 for plain formats. Rows without a key are zero, their scales too.

    Raises:
        TypeError, ValueError: a dtype, device, shape, stride or negative size that the contract does not allow.
    """
    return contracts.gather_index_cache(index_cache, block_table, seq_lens, cu_seq_lens, cache_format, num_tokens)


def quantize_index_query(q: torch.Tensor, weights: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises index queries to e4m3 and folds their scales into the weights of the heads.

    `relu` commutes with positive scales, so that `weights * scale * s_q` in place of `weights` leaves scores as they
    were. `s_q = 2**ceil(log2(max(amax, 1e-4) / 448))` over the finite values of a head; NaN and infinities become NaN.

    Args:
        q: `[num_tokens, num_heads, 128]` bfloat16, float16 or float32.
        weights: `[num_tokens, num_heads]` bfloat16, float16 or float32.
        scale: factor of all weights, `head_dim**-0.5 * num_heads**-0.5` in DeepSeek-V3.2.

    Returns:
        `[num_tokens, num_heads, 128]` float8_e4m3fn, and `[num_tokens, num_heads]` float32.

    Raises:
        TypeError, ValueError: a dtype, device, shape or stride that the contract does not allow.

    Source: DeepSeek-V3.2.
    """
    return contracts.quantize_index_query(q, weights, scale)


def indexer_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    clean: bool = False,
) -> torch.Tensor:
    """Scores of flat keys: `sum_h weights_h * relu(q_h . k) * k_scale` in float32.

    Args:
        q: `[num_tokens, num_heads, 128]` float8_e4m3fn, bfloat16, float16 or float32.
        k: `[num_kv, 128]`, dtype of `q`.
        weights: `[num_tokens, num_heads]` float32.
        row_starts, row_ends: `[num_tokens]` int32: the keys `[start, end)` of each token, clamped to `[0, num_kv]`.
        k_scale: `[num_kv]` float32, any positive numbers; None is 1.
        clean: whether what lies outside `[start, end)` is -inf. Without, nothing is promised there.

    Returns:
        `[num_tokens, num_kv]` float32. `.out` takes rows of any pitch. Each lowering has its own bits.

    Raises:
        TypeError, ValueError: a dtype, device, shape or stride that the contract does not allow.

    Source: DeepSeek-V3.2; DeepGEMM's `fp8_mqa_logits`.
    """
    return contracts.indexer_logits(q, k, weights, row_starts, row_ends, k_scale=k_scale, clean=clean)


def paged_indexer_logits(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    max_length: int,
    cache_format: str,
    *,
    clean: bool = False,
) -> torch.Tensor:
    """Scores of the keys of each token's request, read from the paged cache: `indexer_logits` by position.

    Args:
        q: `[num_tokens, num_heads, 128]`: float8_e4m3fn for `fp8_index`, else the cache's dtype.
        index_cache: as `write_index_cache` writes it; only read.
        weights: `[num_tokens, num_heads]` float32.
        lengths: `[num_tokens]` int32, keys that each token sees; cut to `max_length` and to what the table holds.
        block_table: `[num_requests, max_blocks]` int32. A position in a block outside the cache scores -inf.
        req_id_per_token: `[num_tokens]` int32; a token whose id is outside `[0, num_requests)` is padding: no key.
            Tokens of a request should stand next to one another: kernels may share what they read.
        max_length: columns of the result; a bound known to the host. Work follows `lengths`.
        cache_format: format of `index_cache`.
        clean: whether columns from a token's length on are -inf. Without, nothing is promised there.

    Returns:
        `[num_tokens, max_length]` float32; column j is position j. `.out` takes rows of any pitch.

    Raises:
        TypeError, ValueError: a dtype, device, shape, stride or negative size that the contract does not allow.

    Source: DeepSeek-V3.2; DeepGEMM's `fp8_paged_mqa_logits`.
    """
    return contracts.paged_indexer_logits(
        q, index_cache, weights, lengths, block_table, req_id_per_token, max_length, cache_format, clean=clean
    )


def topk_indices(
    scores: torch.Tensor,
    topk: int,
    *,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    req_id_per_token: torch.Tensor | None = None,
    block_size: int = 0,
    sorted: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of the `topk` largest scores of each row, exact and the same bits in every batch, run and lowering.

    Equal scores go to the lowest column; -0.0 equals +0.0. NaN is below -inf: it is chosen where nothing else is left.

    Args:
        scores: `[num_tokens, num_columns]` float32, rows of any pitch.
        topk: 1 to 4096.
        row_starts, row_ends: `[num_tokens]` int32: the columns `[start, end)` of each row, clamped to the row. None is
            0 and `num_columns`.
        block_table: `[num_requests, max_blocks]` int32. With it, columns are positions and come back as slots,
            `block_table[request, column // block_size] * block_size + column % block_size`. A slot that does not exist
            (unknown request, column past the table, negative block) is -1 in its place.
        req_id_per_token: `[num_tokens]` int32; needed with `block_table`.
        block_size: tokens a block; needed with `block_table`.
        sorted: by score, descending, equal scores by column; else by column, ascending.

    Returns:
        `[num_tokens, topk]` int32, -1 behind the last, and `[num_tokens]` int32, how many were chosen: `min(topk,
        end - start)`.

    Raises:
        TypeError, ValueError: a dtype, device, shape, stride or size that the contract does not allow.
    """
    return contracts.topk_indices(
        scores,
        topk,
        row_starts=row_starts,
        row_ends=row_ends,
        block_table=block_table,
        req_id_per_token=req_id_per_token,
        block_size=block_size,
        sorted=sorted,
    )


def select_keys(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    topk: int,
    cache_format: str,
    *,
    translate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores the keys of each token's request and keeps the best, in memory that has a bound.

    The result is `topk_indices(paged_indexer_logits(...), topk, row_ends=lengths)` of the same lowering, to the bit,
    with at most 64 KB of extra memory a token, or 32 MiB a call where that is more, whatever the context.

    Args:
        q, index_cache, weights, lengths, block_table, req_id_per_token, cache_format: as in `paged_indexer_logits`.
        topk: 1 to 4096.
        translate: return slots in place of positions, as `topk_indices` does with a block table.

    Returns:
        `[num_tokens, topk]` int32 positions, ascending, -1 behind the last, and `[num_tokens]` int32, how many there
        are.

    Raises:
        TypeError, ValueError: a dtype, device, shape, stride or size that the contract does not allow.

    Source: DeepSeek-V3.2 (lightning indexer).
    """
    return contracts.select_keys(
        q, index_cache, weights, lengths, block_table, req_id_per_token, topk, cache_format, translate=translate
    )


def select_flat_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    topk: int,
    *,
    k_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`select_keys` over flat keys (`torch.ops.mla.select_keys.flat`).

    Args:
        q, k, weights, row_starts, row_ends, k_scale: as in `indexer_logits`.
        topk: 1 to 4096.

    Returns:
        `[num_tokens, topk]` int32 rows of `k`, ascending, -1 behind the last, and `[num_tokens]` int32, how many there
        are.

    Raises:
        TypeError, ValueError: a dtype, device, shape, stride or size that the contract does not allow.
    """
    return contracts.select_keys_flat(q, k, weights, row_starts, row_ends, topk, k_scale=k_scale)


def merge_topk(scores: torch.Tensor, indices: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges candidates of shards of a context: equals the selection over the whole.

    Args:
        scores: `[num_tokens, num_candidates]` float32, the candidates of all shards side by side.
        indices: `[num_tokens, num_candidates]` int32, their positions in the whole context, each at most once in a
            row; a negative one is no candidate.
        topk: 1 to 4096. The merge is exact where each shard gave its own best `topk`.

    Returns:
        Scores `[num_tokens, topk]` float32, -inf where there is none, and positions `[num_tokens, topk]` int32,
        ascending, -1 behind the last. Order and ties are those of `topk_indices`.

    Raises:
        TypeError, ValueError: a dtype, device, shape, stride or size that the contract does not allow.
    """
    return contracts.merge_topk(scores, indices, topk)
