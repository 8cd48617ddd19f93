"""Index ops: schemas, preconditions, fakes."""

from __future__ import annotations

import torch

from ..dispatch import Call
from ..registry import OutputSpec, define_computing, require
from ._checks import check_int32, check_not_negative, check_positive, check_tensor

INT32 = (torch.int32,)


def check_convert(
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    block_size: int,
    compact: bool = False,
    num_blocks: int | None = None,
) -> None:
    op = "convert_req_index_to_global_index"
    device = req_id_per_token.device
    check_tensor(op, "req_id_per_token", req_id_per_token, INT32, (("num_tokens", None),), device)
    check_tensor(op, "block_table", block_table, INT32, (("num_requests", None), ("max_blocks", None)), device)
    dims = (("num_tokens", req_id_per_token.shape[0]), ("topk", None))
    check_tensor(op, "token_indices", token_indices, INT32, dims, device)
    check_positive(op, "block_size", block_size)
    if num_blocks is not None:
        check_not_negative(op, "num_blocks", num_blocks)


def outputs_convert(
    req_id_per_token: torch.Tensor, block_table: torch.Tensor, token_indices: torch.Tensor, *_: object, **__: object
) -> dict[str, OutputSpec]:
    num_tokens, topk = token_indices.shape
    return {"out": ((num_tokens, topk), torch.int32), "valid_counts": ((num_tokens,), torch.int32)}


def describe_convert(
    req_id_per_token: torch.Tensor, block_table: torch.Tensor, token_indices: torch.Tensor, *_: object, **__: object
) -> Call:
    num_tokens, topk = token_indices.shape
    op = "convert_req_index_to_global_index"
    return Call(op, token_indices.device, torch.int32, num_tokens=num_tokens, topk=topk)


convert_req_index_to_global_index, convert_req_index_to_global_index_out = define_computing(
    "convert_req_index_to_global_index(Tensor req_id_per_token, Tensor block_table, Tensor token_indices, "
    "SymInt block_size, *, bool compact=False, SymInt? num_blocks=None) -> (Tensor out, Tensor valid_counts)",
    check=check_convert,
    outputs=outputs_convert,
    describe=describe_convert,
)


def check_filter(indices: torch.Tensor, context_lens: torch.Tensor) -> None:
    op = "filter_prefill_indices"
    check_tensor(op, "indices", indices, INT32, (("num_tokens", None), ("topk", None)), indices.device)
    check_tensor(op, "context_lens", context_lens, INT32, (("num_tokens", indices.shape[0]),), indices.device)


def outputs_filter(indices: torch.Tensor, context_lens: torch.Tensor) -> dict[str, OutputSpec]:
    num_tokens, topk = indices.shape
    spec = ((num_tokens, topk), torch.int32)
    return {"context_indices": spec, "new_indices": spec}


def describe_filter(indices: torch.Tensor, context_lens: torch.Tensor) -> Call:
    num_tokens, topk = indices.shape
    return Call("filter_prefill_indices", indices.device, torch.int32, num_tokens=num_tokens, topk=topk)


filter_prefill_indices, filter_prefill_indices_out = define_computing(
    "filter_prefill_indices(Tensor indices, Tensor context_lens) -> (Tensor context_indices, Tensor new_indices)",
    check=check_filter,
    outputs=outputs_filter,
    describe=describe_filter,
)


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


def _rows(num_tokens: int, width: int) -> dict[str, OutputSpec]:
    return {"indices": ((num_tokens, width), torch.int32), "lens": ((num_tokens,), torch.int32)}


def check_sliding_window(
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    window: int,
    block_size: int,
    num_blocks: int | None = None,
) -> None:
    op = "sliding_window_indices"
    _check_paged(op, positions, req_id_per_token, block_table, block_size, num_blocks)
    check_not_negative(op, "window", window)


def outputs_sliding_window(
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    window: int,
    *_: object,
    **__: object,
) -> dict[str, OutputSpec]:
    return _rows(positions.shape[0], window)


def describe_sliding_window(
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    window: int,
    *_: object,
    **__: object,
) -> Call:
    op = "sliding_window_indices"
    return Call(op, positions.device, torch.int32, num_tokens=positions.shape[0], topk=window)


sliding_window_indices, sliding_window_indices_out = define_computing(
    "sliding_window_indices(Tensor positions, Tensor req_id_per_token, Tensor block_table, SymInt window, "
    "SymInt block_size, *, SymInt? num_blocks=None) -> (Tensor indices, Tensor lens)",
    check=check_sliding_window,
    outputs=outputs_sliding_window,
    describe=describe_sliding_window,
)


def check_compressed(
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    compress_ratio: int,
    block_size: int,
    width: int,
    num_blocks: int | None = None,
) -> None:
    op = "compressed_indices"
    _check_paged(op, positions, req_id_per_token, block_table, block_size, num_blocks)
    check_positive(op, "compress_ratio", compress_ratio)
    check_not_negative(op, "width", width)


def outputs_compressed(
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    compress_ratio: int,
    block_size: int,
    width: int,
    num_blocks: int | None = None,
) -> dict[str, OutputSpec]:
    return _rows(positions.shape[0], width)


def describe_compressed(
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    compress_ratio: int,
    block_size: int,
    width: int,
    num_blocks: int | None = None,
) -> Call:
    op = "compressed_indices"
    return Call(op, positions.device, torch.int32, num_tokens=positions.shape[0], topk=width)


compressed_indices, compressed_indices_out = define_computing(
    "compressed_indices(Tensor positions, Tensor req_id_per_token, Tensor block_table, SymInt compress_ratio, "
    "SymInt block_size, SymInt width, *, SymInt? num_blocks=None) -> (Tensor indices, Tensor lens)",
    check=check_compressed,
    outputs=outputs_compressed,
    describe=describe_compressed,
)


def check_global_topk(
    topk_indices: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_blocks: int | None = None,
) -> None:
    op = "compute_global_topk_indices_and_lens"
    device = topk_indices.device
    check_tensor(op, "topk_indices", topk_indices, INT32, (("num_tokens", None), ("topk", None)), device)
    check_tensor(op, "req_id_per_token", req_id_per_token, INT32, (("num_tokens", topk_indices.shape[0]),), device)
    check_tensor(op, "block_table", block_table, INT32, (("num_requests", None), ("max_blocks", None)), device)
    check_positive(op, "block_size", block_size)
    if num_blocks is not None:
        check_not_negative(op, "num_blocks", num_blocks)


def outputs_global_topk(topk_indices: torch.Tensor, *_: object, **__: object) -> dict[str, OutputSpec]:
    num_tokens, topk = topk_indices.shape
    return _rows(num_tokens, topk)


def describe_global_topk(topk_indices: torch.Tensor, *_: object, **__: object) -> Call:
    num_tokens, topk = topk_indices.shape
    op = "compute_global_topk_indices_and_lens"
    return Call(op, topk_indices.device, torch.int32, num_tokens=num_tokens, topk=topk)


compute_global_topk_indices_and_lens, compute_global_topk_indices_and_lens_out = define_computing(
    "compute_global_topk_indices_and_lens(Tensor topk_indices, Tensor req_id_per_token, Tensor block_table, "
    "SymInt block_size, *, SymInt? num_blocks=None) -> (Tensor indices, Tensor lens)",
    check=check_global_topk,
    outputs=outputs_global_topk,
    describe=describe_global_topk,
)


def check_combine(
    topk_indices: torch.Tensor,
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window: int,
    compress_ratio: int,
    request_stride: int,
    window_offset: int,
) -> None:
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


def outputs_combine(
    topk_indices: torch.Tensor,
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window: int,
    *_: object,
    **__: object,
) -> dict[str, OutputSpec]:
    num_tokens, topk = topk_indices.shape
    return _rows(num_tokens, topk + window)


def describe_combine(
    topk_indices: torch.Tensor,
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window: int,
    *_: object,
    **__: object,
) -> Call:
    num_tokens, topk = topk_indices.shape
    op = "combine_topk_swa_indices"
    return Call(op, topk_indices.device, torch.int32, num_tokens=num_tokens, topk=topk + window)


combine_topk_swa_indices, combine_topk_swa_indices_out = define_computing(
    "combine_topk_swa_indices(Tensor topk_indices, Tensor positions, Tensor req_id_per_token, Tensor seq_lens, "
    "Tensor gather_lens, SymInt window, SymInt compress_ratio, SymInt request_stride, SymInt window_offset) "
    "-> (Tensor indices, Tensor lens)",
    check=check_combine,
    outputs=outputs_combine,
    describe=describe_combine,
)
