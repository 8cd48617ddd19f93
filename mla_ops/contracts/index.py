"""Index ops: schemas, preconditions, fakes."""

from __future__ import annotations

import torch

from ..dispatch import Call
from ..registry import Contract, computing, require
from ._checks import check_int32, check_not_negative, check_positive, check_tensor

INT32 = (torch.int32,)


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
    op = "convert_req_index_to_global_index"
    device = req_id_per_token.device
    check_tensor(op, "req_id_per_token", req_id_per_token, INT32, (("num_tokens", None),), device)
    check_tensor(op, "block_table", block_table, INT32, (("num_requests", None), ("max_blocks", None)), device)
    dims = (("num_tokens", req_id_per_token.shape[0]), ("topk", None))
    check_tensor(op, "token_indices", token_indices, INT32, dims, device)
    check_positive(op, "block_size", block_size)
    if num_blocks is not None:
        check_not_negative(op, "num_blocks", num_blocks)
    num_tokens, topk = token_indices.shape
    call = Call(op, device, torch.int32, num_tokens=num_tokens, topk=topk)
    return call, {"out": ((num_tokens, topk), torch.int32), "valid_counts": ((num_tokens,), torch.int32)}


@computing("context_indices", "new_indices")
def filter_prefill_indices(indices: torch.Tensor, context_lens: torch.Tensor) -> Contract:
    op = "filter_prefill_indices"
    check_tensor(op, "indices", indices, INT32, (("num_tokens", None), ("topk", None)), indices.device)
    check_tensor(op, "context_lens", context_lens, INT32, (("num_tokens", indices.shape[0]),), indices.device)
    num_tokens, topk = indices.shape
    spec = ((num_tokens, topk), torch.int32)
    call = Call(op, indices.device, torch.int32, num_tokens=num_tokens, topk=topk)
    return call, {"context_indices": spec, "new_indices": spec}


def _check_paged(
    op: str,
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_blocks: int | None,
) -> None:
    device = positions.device
    check_tensor(op, "positions", positions, INT32, (("num_tokens", None),), device)
    check_tensor(op, "req_id_per_token", req_id_per_token, INT32, (("num_tokens", positions.shape[0]),), device)
    check_tensor(op, "block_table", block_table, INT32, (("num_requests", None), ("max_blocks", None)), device)
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
    op = "sliding_window_indices"
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
    op = "compressed_indices"
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
    op = "compute_global_topk_indices_and_lens"
    device = topk_indices.device
    check_tensor(op, "topk_indices", topk_indices, INT32, (("num_tokens", None), ("topk", None)), device)
    check_tensor(op, "req_id_per_token", req_id_per_token, INT32, (("num_tokens", topk_indices.shape[0]),), device)
    check_tensor(op, "block_table", block_table, INT32, (("num_requests", None), ("max_blocks", None)), device)
    check_positive(op, "block_size", block_size)
    if num_blocks is not None:
        check_not_negative(op, "num_blocks", num_blocks)
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
