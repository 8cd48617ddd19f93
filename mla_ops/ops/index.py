"""Turning token indices into what attention reads."""

from __future__ import annotations

import torch

from ..dispatch import Call
from ..registry import Contract, computing, require
from ._checks import INT32, check_block_table, check_int32, check_not_negative, check_positive, check_tensor


@computing("out", "valid_counts")
def convert_req_index_to_global_index(
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    block_size: int,
    *,
    compact: bool = False,
    num_blocks: int | None = None,
) -> Contract:
    """Translates request-local token indices into slots of the paged cache.

    For readers other than `paged_sparse_attention`, which does this itself if it is given `block_table`.

    Args:
        req_id_per_token: `[num_tokens]` int32. A token whose id is outside `[0, num_requests)` is padding: its whole
            row becomes -1.
        block_table: `[num_requests, max_blocks]` int32. Bounded by its shape; a negative entry makes an index invalid.
        token_indices: `[num_tokens, topk]` int32, position of a key in its request. Negative, or past the block
            table, is invalid.
        block_size: tokens a block.
        compact: move the valid entries of each row to its front, in order.
        num_blocks: blocks of the cache; a block table entry that is not below it makes an index invalid. None checks
            no upper bound (attention ignores slots past its cache anyway).

    Returns:
        slots `[num_tokens, topk]` int32, -1 where invalid, and the number of valid entries of each row,
        `[num_tokens]` int32.

    Raises:
        TypeError, ValueError: a dtype, device, shape or non-positive `block_size` that the contract does not allow.
    """
    op = "convert_req_index_to_global_index"
    device = req_id_per_token.device
    check_tensor(op, "token_indices", token_indices, INT32, (("num_tokens", None), ("topk", None)), device)
    _check_paged(op, token_indices, req_id_per_token, block_table, block_size, num_blocks)
    num_tokens, topk = token_indices.shape
    call = Call(op, device, torch.int32, num_tokens=num_tokens, topk=topk)
    return call, {"out": ((num_tokens, topk), torch.int32), "valid_counts": ((num_tokens,), torch.int32)}


@computing("context_indices", "new_indices")
def filter_prefill_indices(indices: torch.Tensor, context_lens: torch.Tensor) -> Contract:
    """Splits request-local indices of prefill tokens into the cached context and the new tokens.

    Args:
        indices: `[num_tokens, topk]` int32, negative is invalid.
        context_lens: `[num_tokens]` int32, tokens of the token's request that were cached before this step.

    Returns:
        Two `[num_tokens, topk]` int32: indices into the context (`0 <= index < context_len`), and indices into the new
        tokens (`index - context_len`); -1 wherever an index belongs to the other, or is invalid.

    Raises:
        TypeError, ValueError: a dtype, device or shape that the contract does not allow.
    """
    op = "filter_prefill_indices"
    check_tensor(op, "indices", indices, INT32, (("num_tokens", None), ("topk", None)), indices.device)
    check_tensor(op, "context_lens", context_lens, INT32, (("num_tokens", indices.shape[0]),), indices.device)
    num_tokens, topk = indices.shape
    spec = ((num_tokens, topk), torch.int32)
    call = Call(op, indices.device, torch.int32, num_tokens=num_tokens, topk=topk)
    return call, {"context_indices": spec, "new_indices": spec}


def _check_paged(
    op: str,
    tokens: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_blocks: int | None,
) -> None:
    """Raises unless each of `tokens` has a request, whose blocks the table may have."""
    device = tokens.device
    check_tensor(op, "req_id_per_token", req_id_per_token, INT32, (("num_tokens", tokens.shape[0]),), device)
    check_block_table(op, block_table, device)
    check_positive(op, "block_size", block_size)
    if num_blocks is not None:
        check_not_negative(op, "num_blocks", num_blocks)


def _rows(op: str, tokens: torch.Tensor, width: int) -> Contract:
    """The results of an op that fills a row of `width` for each of `tokens`."""
    num_tokens = tokens.shape[0]
    call = Call(op, tokens.device, torch.int32, num_tokens=num_tokens, topk=width)
    return call, {"indices": ((num_tokens, width), torch.int32), "lens": ((num_tokens,), torch.int32)}


@computing("indices", "lens")
def sliding_window_indices(
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    window: int,
    block_size: int,
    *,
    num_blocks: int | None = None,
) -> Contract:
    """Slots of each token's sliding window: itself and the tokens before it, oldest first.

    Args:
        positions: `[num_tokens]` int32, position of each token in its request. Negative is padding.
        req_id_per_token: `[num_tokens]` int32. An id outside `[0, num_requests)` is padding: row -1, length 0.
        block_table: `[num_requests, max_blocks]` int32, of the sliding-window cache. A token in a block past the table,
            or whose entry is not a block, is left out.
        window: tokens of a window, the query itself included; the width of a row, any number.
        block_size: tokens a block.
        num_blocks: blocks of the cache; a block table entry that is not below it is no block. None checks no upper
            bound.

    Returns:
        slots `[num_tokens, window]` int32, positions `max(position - window + 1, 0)` to `position`, valid ones to the
        front and -1 behind, and the number of valid ones of each row, `[num_tokens]` int32.

    Raises:
        TypeError, ValueError: a dtype, device, shape or size that the contract does not allow.
    """
    op = "sliding_window_indices"
    check_tensor(op, "positions", positions, INT32, (("num_tokens", None),), positions.device)
    _check_paged(op, positions, req_id_per_token, block_table, block_size, num_blocks)
    check_not_negative(op, "window", window)
    return _rows(op, positions, window)


@computing("indices", "lens")
def compressed_indices(
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    compress_ratio: int,
    block_size: int,
    width: int,
    *,
    num_blocks: int | None = None,
) -> Contract:
    """Slots of every compressed token that each token may see, as layers read them that choose none (C128A).

    A compressed token stands for `compress_ratio` tokens and is seen from the last of them on.

    Args:
        positions, req_id_per_token: as `sliding_window_indices` takes them.
        block_table, block_size, num_blocks: the same, of the compressed cache; `block_size` counts compressed tokens.
        compress_ratio: tokens a compressed token stands for.
        width: width of a row, any number; compressed tokens from the `width`-th on are left out.

    Returns:
        slots `[num_tokens, width]` int32 of compressed tokens 0 to `min((position + 1) // compress_ratio, width) - 1`,
        valid ones to the front and -1 behind, and the number of valid ones of each row, `[num_tokens]` int32.

    Raises:
        TypeError, ValueError: a dtype, device, shape or size that the contract does not allow.
    """
    op = "compressed_indices"
    check_tensor(op, "positions", positions, INT32, (("num_tokens", None),), positions.device)
    _check_paged(op, positions, req_id_per_token, block_table, block_size, num_blocks)
    check_positive(op, "compress_ratio", compress_ratio)
    check_not_negative(op, "width", width)
    return _rows(op, positions, width)


@computing("indices", "lens")
def compute_global_topk_indices_and_lens(
    topk_indices: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    *,
    num_blocks: int | None = None,
) -> Contract:
    """Slots of the compressed tokens that an indexer chose (C4A), and how many there are.

    This is `convert_req_index_to_global_index(..., compact=True)` under the name and argument order that engines know;
    it runs the same kernel.

    Args:
        topk_indices: `[num_tokens, topk]` int32, compressed tokens of the token's request, in any order. Negative, or
            past the block table, is invalid, wherever it stands.
        req_id_per_token, block_table, block_size, num_blocks: as `convert_req_index_to_global_index` takes them, of the
            compressed cache; `block_size` counts compressed tokens.

    Returns:
        slots `[num_tokens, topk]` int32, valid ones to the front in order and -1 behind, and the number of valid ones
        of each row, `[num_tokens]` int32.

    Raises:
        TypeError, ValueError: a dtype, device, shape or non-positive `block_size` that the contract does not allow.
    """
    op = "compute_global_topk_indices_and_lens"
    dims = (("num_tokens", None), ("topk", None))
    check_tensor(op, "topk_indices", topk_indices, INT32, dims, topk_indices.device)
    _check_paged(op, topk_indices, req_id_per_token, block_table, block_size, num_blocks)
    return _rows(op, topk_indices, topk_indices.shape[1])


@computing("indices", "lens")
def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window: int,
    compress_ratio: int,
    request_stride: int,
    window_offset: int,
) -> Contract:
    """Rows of a gathered workspace that each prefill token attends: chosen compressed tokens and its sliding window.

    The workspace is flat. Request r owns rows `r * request_stride` up to `(r + 1) * request_stride`: its compressed
    tokens from the first row on, and from row `window_offset` on the last `gather_lens[r]` of its `seq_lens[r]` tokens
    (as `gather_cache` writes them). The result goes to `sparse_attention` as it is.

    Args:
        topk_indices: `[num_tokens, topk]` int32, compressed tokens of the token's request, in any order. Negative is
            invalid, and so is one that is not complete at the token's position (not below
            `(position + 1) // compress_ratio`) or has no row (not below `window_offset`).
        positions: `[num_tokens]` int32, position of each token in its request, in tokens. Negative is padding.
        req_id_per_token: `[num_tokens]` int32, place of the token's request in the workspace. An id outside
            `[0, num_requests)` is padding: row -1, length 0.
        seq_lens: `[num_requests]` int32, tokens of each request with the new ones.
        gather_lens: `[num_requests]` int32, how many of them, the last, are in the workspace; at least the new ones
            and `window - 1` before them for a whole window. A token that was not gathered is left out.
        window: tokens of a window, the query itself included.
        compress_ratio: tokens a compressed token stands for.
        request_stride: rows of one request.
        window_offset: first of them that holds a token of the window.

    Returns:
        rows `[num_tokens, topk + window]` int32, the valid chosen ones in order, then the window's, oldest first, -1
        behind, and the number of valid ones of each row, `[num_tokens]` int32. A row past int32 is left out.

    Raises:
        TypeError, ValueError: a dtype, device, shape or size that the contract does not allow.
    """
    op = "combine_topk_swa_indices"
    device = topk_indices.device
    check_tensor(op, "topk_indices", topk_indices, INT32, (("num_tokens", None), ("topk", None)), device)
    tokens = (("num_tokens", topk_indices.shape[0]),)
    check_tensor(op, "positions", positions, INT32, tokens, device)
    check_tensor(op, "req_id_per_token", req_id_per_token, INT32, tokens, device)
    check_tensor(op, "seq_lens", seq_lens, INT32, (("num_requests", None),), device)
    check_tensor(op, "gather_lens", gather_lens, INT32, (("num_requests", seq_lens.shape[0]),), device)
    check_not_negative(op, "window", window)
    check_positive(op, "compress_ratio", compress_ratio)
    check_not_negative(op, "window_offset", window_offset)
    check_int32(op, "request_stride", request_stride)
    require(
        window_offset <= request_stride,
        lambda: f"{op}: window_offset must not be larger than request_stride, {request_stride}, got {window_offset}",
    )
    return _rows(op, topk_indices, topk_indices.shape[1] + window)
