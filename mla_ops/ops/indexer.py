"""The lightning indexer: its cache, scores, and the choice of keys."""

from __future__ import annotations

import torch

from ..dispatch import Call
from ..formats import INDEX_DIM, CacheFormat, geometry
from ..registry import Contract, Outputs, computing, mutating, require
from ._checks import (
    FLOAT32,
    FLOAT_DTYPES,
    INT32,
    INT64,
    check_block_table,
    check_cache,
    check_no_grad,
    check_not_negative,
    check_positive,
    check_scale,
    check_tensor,
)

SCORED_DTYPES = (torch.float8_e4m3fn, *FLOAT_DTYPES)
MAX_TOPK = 4096
MAX_BLOCK_SIZE = 2**24 - 1  # kernels that score keys multiply one by 128 bytes in 32 bits
INDEX_QUERY_DIMS = (("num_tokens", None), ("num_heads", None), ("head_dim", INDEX_DIM))


def _check_index_cache(
    op: str, index_cache: torch.Tensor, cache_format: str, device: torch.device | None = None
) -> CacheFormat:
    entry = check_cache(op, index_cache, cache_format, "index_cache", index_keys=True)
    head_dim = geometry(index_cache, cache_format).head_dim
    if head_dim != INDEX_DIM:
        raise ValueError(f"{op}: index_cache must hold keys of width {INDEX_DIM}, got {head_dim}")
    if device is not None and index_cache.device != device:
        raise ValueError(f"{op}: index_cache must be on {device} like the first argument, got {index_cache.device}")
    return entry


def _check_queries(op: str, q: torch.Tensor, weights: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    check_tensor(op, "q", q, dtypes, INDEX_QUERY_DIMS, q.device)
    dims = (("num_tokens", q.shape[0]), ("num_heads", q.shape[1]))
    check_tensor(op, "weights", weights, FLOAT32, dims, q.device)


def _check_topk(op: str, topk: int) -> None:
    check_positive(op, "topk", topk)
    require(topk <= MAX_TOPK, lambda: f"{op}: topk must be at most {MAX_TOPK}, got {topk}")


def _selected(num_tokens: int, topk: int) -> Outputs:
    return {"indices": ((num_tokens, topk), torch.int32), "valid_counts": ((num_tokens,), torch.int32)}


@mutating("index_cache")
def write_index_cache(
    k: torch.Tensor, index_cache: torch.Tensor, slot_mapping: torch.Tensor, cache_format: str
) -> Call:
    """Writes the index key of each token to its slot, quantising as the format says.

    Args:
        k: index keys after norm and rotation, `[num_tokens, 128]`, of a dtype that `concat_and_cache` takes.
        index_cache: written in place. `fp8_index`: uint8, `[num_blocks, block_size, 132]` or `[num_blocks,
            block_bytes]`, blocks planar, `stride(0)` a multiple of 16 bytes. Plain formats: `[num_blocks, block_size,
            128]` of the format's dtype.
        slot_mapping: `[num_slots]` int64, as `concat_and_cache` takes it.
        cache_format: `fp8_index`, `bf16`, `fp16` or `fp32`; docs/formats.md has their bytes.

    Raises:
        TypeError, ValueError: a dtype, device, shape or stride that the contract does not allow; nothing is written.

    Source: DeepSeek-V3.2 (DeepGEMM's and vLLM's layout of index keys).
    """
    op = "write_index_cache"
    entry = _check_index_cache(op, index_cache, cache_format, k.device)
    dtypes = FLOAT_DTYPES if entry.quantized or entry.dtype == torch.float32 else (entry.dtype, torch.float32)
    check_tensor(op, "k", k, dtypes, (("num_tokens", None), ("head_dim", INDEX_DIM)), k.device)
    check_tensor(op, "slot_mapping", slot_mapping, INT64, (("num_slots", None),), k.device)
    check_no_grad(op, k=k, index_cache=index_cache)
    return Call(op, k.device, k.dtype, cache_format, num_tokens=slot_mapping.shape[0])


@computing("k", "k_scale", writes=("index_cache",))
def gather_index_cache(
    index_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    num_rows: int,
    cache_format: str,
) -> Contract:
    """Reads index keys of requests, one request after the other, as `indexer_logits` takes them.

    Args:
        index_cache: as `write_index_cache` writes it; only read.
        block_table: `[num_requests, max_blocks]` int32. Positions in blocks outside the cache read as zeros.
        seq_lens: `[num_requests]` int32, keys of each request.
        cu_seq_lens: `[num_requests + 1]` int32, ascending: request r owns output rows `cu_seq_lens[r]` up to
            `cu_seq_lens[r + 1]`; keys that do not fit there are left out.
        num_rows: rows of the output; an upper bound known to the host.
        cache_format: format of `index_cache`.

    Returns:
        keys `[num_rows, 128]`, float8_e4m3fn for `fp8_index`, else the cache's dtype, and their scales
        `[num_rows]` float32, 1 for plain formats. Rows without a key are zero, their scales too.

    Raises:
        TypeError, ValueError: a dtype, device, shape, stride or negative size that the contract does not allow.
    """
    op = "gather_index_cache"
    entry = _check_index_cache(op, index_cache, cache_format)
    device = index_cache.device
    check_tensor(op, "seq_lens", seq_lens, INT32, (("num_requests", None),), device)
    num_requests = seq_lens.shape[0]
    dims = (("num_requests", num_requests), ("max_blocks", None))
    check_tensor(op, "block_table", block_table, INT32, dims, device)
    check_tensor(op, "cu_seq_lens", cu_seq_lens, INT32, (("num_requests+1", num_requests + 1),), device)
    check_not_negative(op, "num_rows", num_rows)
    check_no_grad(op, index_cache=index_cache)
    call = Call(op, device, index_cache.dtype, cache_format, num_tokens=num_rows)
    return call, {"k": ((num_rows, INDEX_DIM), entry.value_dtype), "k_scale": ((num_rows,), torch.float32)}


@computing("q_fp8", "q_weights")
def quantize_index_query(q: torch.Tensor, weights: torch.Tensor, scale: float) -> Contract:
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
    op = "quantize_index_query"
    check_tensor(op, "q", q, FLOAT_DTYPES, INDEX_QUERY_DIMS, q.device)
    dims = (("num_tokens", q.shape[0]), ("num_heads", q.shape[1]))
    check_tensor(op, "weights", weights, FLOAT_DTYPES, dims, q.device)
    check_scale(op, "scale", scale)
    check_no_grad(op, q=q, weights=weights)
    num_tokens, num_heads, head_dim = q.shape
    return Call(op, q.device, q.dtype, num_heads=num_heads, num_tokens=num_tokens), {
        "q_fp8": ((num_tokens, num_heads, head_dim), torch.float8_e4m3fn),
        "q_weights": ((num_tokens, num_heads), torch.float32),
    }


def _check_flat(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    k_scale: torch.Tensor | None,
) -> None:
    _check_queries(op, q, weights, SCORED_DTYPES)
    check_tensor(op, "k", k, (q.dtype,), (("num_kv", None), ("head_dim", INDEX_DIM)), q.device)
    for name, rows in (("row_starts", row_starts), ("row_ends", row_ends)):
        check_tensor(op, name, rows, INT32, (("num_tokens", q.shape[0]),), q.device)
    if k_scale is not None:
        check_tensor(op, "k_scale", k_scale, FLOAT32, (("num_kv", k.shape[0]),), q.device)
    check_no_grad(op, q=q, k=k, weights=weights, k_scale=k_scale)


@computing("out")
def indexer_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    clean: bool = False,
) -> Contract:
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
    op = "indexer_logits"
    _check_flat(op, q, k, weights, row_starts, row_ends, k_scale)
    num_tokens, num_heads, _ = q.shape
    call = Call(op, q.device, q.dtype, num_heads=num_heads, num_tokens=num_tokens, num_keys=k.shape[0])
    return call, {"out": ((num_tokens, k.shape[0]), torch.float32)}


def _check_paged(
    op: str,
    q: torch.Tensor,
    index_cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    cache_format: str,
) -> None:
    entry = _check_index_cache(op, index_cache, cache_format, q.device)
    block_size = geometry(index_cache, cache_format).block_size
    # a symbolic one is checked when the op runs, so that no graph has this bound
    if type(block_size) is int and block_size > MAX_BLOCK_SIZE:
        raise ValueError(f"{op}: index_cache must have at most {MAX_BLOCK_SIZE} keys a block, got {block_size}")
    _check_queries(op, q, weights, (entry.value_dtype,))
    tokens = (("num_tokens", q.shape[0]),)
    check_tensor(op, "lengths", lengths, INT32, tokens, q.device)
    check_tensor(op, "req_id_per_token", req_id_per_token, INT32, tokens, q.device)
    check_block_table(op, block_table, q.device)
    check_no_grad(op, q=q, index_cache=index_cache, weights=weights)


def _paged_call(op: str, q: torch.Tensor, index_cache: torch.Tensor, cache_format: str) -> Call:
    num_tokens, num_heads, _ = q.shape
    block_size = geometry(index_cache, cache_format).block_size
    names = op, q.device, q.dtype, cache_format
    return Call(*names, num_heads=num_heads, num_tokens=num_tokens, block_size=block_size)


@computing("out", writes=("index_cache",))
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
) -> Contract:
    """Scores of the keys of each token's request, read from the paged cache: `indexer_logits` by position.

    Args:
        q: `[num_tokens, num_heads, 128]`: float8_e4m3fn for `fp8_index`, else the cache's dtype.
        index_cache: as `write_index_cache` writes it, in blocks of at most 2**24 - 1 keys; only read.
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
    op = "paged_indexer_logits"
    _check_paged(op, q, index_cache, weights, lengths, block_table, req_id_per_token, cache_format)
    check_not_negative(op, "max_length", max_length)
    call = _paged_call(op, q, index_cache, cache_format)._replace(num_keys=max_length)
    return call, {"out": ((q.shape[0], max_length), torch.float32)}


@computing("indices", "valid_counts")
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
) -> Contract:
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
    op = "topk_indices"
    device = scores.device
    check_tensor(op, "scores", scores, FLOAT32, (("num_tokens", None), ("num_columns", None)), device)
    _check_topk(op, topk)
    tokens = (("num_tokens", scores.shape[0]),)
    for name, rows in (("row_starts", row_starts), ("row_ends", row_ends)):
        if rows is not None:
            check_tensor(op, name, rows, INT32, tokens, device)
    if (block_table is None) != (req_id_per_token is None):
        given, missing = ("block_table", "req_id_per_token")[:: -1 if block_table is None else 1]
        raise ValueError(f"{op}: {given} needs {missing} beside it, got None")
    if block_table is not None and req_id_per_token is not None:
        check_block_table(op, block_table, device)
        check_tensor(op, "req_id_per_token", req_id_per_token, INT32, tokens, device)
        check_positive(op, "block_size", block_size)
    check_no_grad(op, scores=scores)
    num_tokens, num_columns = scores.shape
    call = Call(op, device, scores.dtype, num_tokens=num_tokens, topk=topk, num_keys=num_columns)
    return call, _selected(num_tokens, topk)


@computing("indices", "valid_counts", writes=("index_cache",))
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
) -> Contract:
    """Scores the keys of each token's request and keeps the best, in memory that has a bound.

    The result is `topk_indices(paged_indexer_logits(...), topk, row_ends=lengths)` of the same lowering, to the bit,
    with at most 64 KB of extra memory a token, or 32 MiB a call where that is more. A token that takes more, by 4 to 13
    bytes a key, is chosen for alone.

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
    op = "select_keys"
    _check_paged(op, q, index_cache, weights, lengths, block_table, req_id_per_token, cache_format)
    _check_topk(op, topk)
    call = _paged_call(op, q, index_cache, cache_format)
    call = call._replace(topk=topk, num_keys=block_table.shape[1] * call.block_size)
    return call, _selected(q.shape[0], topk)


@computing("indices", "valid_counts", op="select_keys.flat")
def select_flat_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    topk: int,
    *,
    k_scale: torch.Tensor | None = None,
) -> Contract:
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
    op = "select_keys.flat"
    _check_flat(op, q, k, weights, row_starts, row_ends, k_scale)
    _check_topk(op, topk)
    num_tokens, num_heads, _ = q.shape
    call = Call(op, q.device, q.dtype, num_heads=num_heads, num_tokens=num_tokens, topk=topk, num_keys=k.shape[0])
    return call, _selected(num_tokens, topk)


@computing("best_scores", "best_indices")
def merge_topk(scores: torch.Tensor, indices: torch.Tensor, topk: int) -> Contract:
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
    op = "merge_topk"
    check_tensor(op, "scores", scores, FLOAT32, (("num_tokens", None), ("num_candidates", None)), scores.device)
    dims = (("num_tokens", scores.shape[0]), ("num_candidates", scores.shape[1]))
    check_tensor(op, "indices", indices, INT32, dims, scores.device)
    _check_topk(op, topk)
    check_no_grad(op, scores=scores)
    num_tokens, num_candidates = scores.shape
    call = Call(op, scores.device, scores.dtype, num_tokens=num_tokens, topk=topk, num_keys=num_candidates)
    shape = (num_tokens, topk)
    return call, {"best_scores": (shape, torch.float32), "best_indices": (shape, torch.int32)}
