"""The compressor of DeepSeek-V4: schema, preconditions, fake."""

from __future__ import annotations

import torch

from ..dispatch import Call
from ..formats import CACHE_ALIGNMENT, ROPE_DIM, geometry
from ..registry import is_single, mutating, require, require_one_of
from ._checks import FLOAT_DTYPES, check_cache, check_no_grad, check_scale, check_tensor

INT32 = (torch.int32,)
FLOAT32 = (torch.float32,)

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
    dims = (("num_requests", None), ("max_blocks", None))
    check_tensor(op, "state_block_table", state_block_table, INT32, dims, device)
    tokens = (("num_tokens", num_tokens),)
    check_tensor(op, "req_id_per_token", req_id_per_token, INT32, tokens, device)
    check_tensor(op, "positions", positions, INT32, tokens, device)
    check_tensor(op, "slot_mapping", slot_mapping, (torch.int64,), tokens, device)
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
