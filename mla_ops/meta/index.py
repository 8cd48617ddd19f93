"""Index ops: schemas, preconditions, fakes."""

from __future__ import annotations

import torch

from ..dispatch import Call
from ..registry import OutputSpec, define_computing
from .checks import check_not_negative, check_positive, check_tensor

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
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    block_size: int,
    compact: bool = False,
    num_blocks: int | None = None,
) -> dict[str, OutputSpec]:
    num_tokens, topk = token_indices.shape
    return {"out": ((num_tokens, topk), torch.int32), "valid_counts": ((num_tokens,), torch.int32)}


def describe_convert(
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    block_size: int,
    compact: bool = False,
    num_blocks: int | None = None,
) -> Call:
    num_tokens, topk = token_indices.shape
    op = "convert_req_index_to_global_index"
    return Call(op, token_indices.device, torch.int32, num_tokens=num_tokens, topk=topk)


convert_req_index_to_global_index, convert_req_index_to_global_index_out = define_computing(
    "convert_req_index_to_global_index(Tensor req_id_per_token, Tensor block_table, Tensor token_indices, "
    "SymInt block_size, *, bool compact=False, SymInt? num_blocks=None) -> (Tensor, Tensor)",
    "convert_req_index_to_global_index.out(Tensor req_id_per_token, Tensor block_table, Tensor token_indices, "
    "SymInt block_size, *, bool compact=False, SymInt? num_blocks=None, Tensor(a!) out, Tensor(b!) valid_counts) -> ()",
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
    "filter_prefill_indices(Tensor indices, Tensor context_lens) -> (Tensor, Tensor)",
    "filter_prefill_indices.out(Tensor indices, Tensor context_lens, *, Tensor(a!) context_indices, "
    "Tensor(b!) new_indices) -> ()",
    check=check_filter,
    outputs=outputs_filter,
    describe=describe_filter,
)
