"""Preconditions, written once for fake and real tensors.

Dtypes, ranks and devices are static, so they are plain comparisons; sizes and strides may be symbolic, so they go
through `require`, which also works while tracing. Every message names the op, the argument, what was
expected and what came.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from ..formats import (
    CACHE_ALIGNMENT,
    LATENT_DIM,
    LATENT_FORMATS,
    ROPE_DIM,
    CacheFormat,
    geometry,
    get_format,
)
from ..registry import is_single, require, require_one_of
from ..transforms import has_tangent, tangent_message

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOAT32, INT32, INT64 = (torch.float32,), (torch.int32,), (torch.int64,)
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
SCALE_LIMIT = 2.0**127
QUERY_DIMS = (LATENT_DIM + ROPE_DIM, LATENT_DIM)
MAX_NUM_HEADS = 128


def check_tensor(
    op: str,
    name: str,
    tensor: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    dims: Sequence[tuple[str, int | torch.SymInt | None]],
    device: torch.device,
) -> None:
    """Raises unless `tensor` has one of `dtypes`, lies on `device`, and has the shape `dims`, last dim contiguous.

    `dims` gives a name and a size for each dimension; a size of None is free.
    """
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{op}: {name} must be {expected}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device} like the first argument, got {tensor.device}")
    shape = tensor.shape
    if len(shape) != len(dims):
        raise ValueError(_wrong_shape(op, name, tensor, dims))
    for actual, (_, size) in zip(shape, dims, strict=True):
        # While sizes are integers and right not even a closure is made: this runs in every eager call.
        if size is not None and (same := actual == size) is not True:
            require(same, functools.partial(_wrong_shape, op, name, tensor, dims))
    if dims and (dense := tensor.stride()[-1] == 1) is not True:
        require_one_of(
            (dense, *is_single(shape)),
            lambda: f"{op}: {name} must be contiguous in its last dimension, got strides {tensor.stride()}",
        )


def check_block_table(op: str, table: torch.Tensor, device: torch.device, name: str = "block_table") -> None:
    check_tensor(op, name, table, INT32, (("num_requests", None), ("max_blocks", None)), device)


def _wrong_shape(op: str, name: str, tensor: torch.Tensor, dims: Sequence[tuple[str, object]]) -> str:
    expected = ", ".join(label if size is None else f"{label}={size}" for label, size in dims)
    return f"{op}: {name} must have shape [{expected}], got {list(tensor.shape)}"


def check_cache(
    op: str, kv_cache: torch.Tensor, cache_format: str, name: str = "kv_cache", *, index_keys: bool = False
) -> CacheFormat:
    """Raises unless `kv_cache`, which the caller calls `name`, can hold `cache_format`. Returns the format.

    `index_keys` tells the ops that take formats of index keys: those of the indexer, and the compressor.
    """
    argument = "extra_cache_format" if name == "extra_kv_cache" else "cache_format"
    entry = get_format(cache_format, op, argument)
    if entry.index_only and not index_keys:
        raise ValueError(
            f"{op}: {argument} '{cache_format}' holds index keys, which this op does not take; "
            f"expected one of {sorted(LATENT_FORMATS)}"
        )
    if kv_cache.dtype != entry.dtype:
        raise TypeError(f"{op}: {name} of {argument} '{cache_format}' must be {entry.dtype}, got {kv_cache.dtype}")
    itemsize = entry.dtype.itemsize
    shape, strides, offset = kv_cache.shape, kv_cache.stride(), kv_cache.storage_offset()
    if entry.planar and len(shape) == 2:
        needed = block_bytes = shape[1]
        if (dense := strides[1] == 1) is not True:
            require_one_of(
                (dense, *is_single(shape)),
                lambda: f"{op}: {name} must have contiguous blocks, got strides {strides}",
            )
        require(
            block_bytes > 0 and entry.block_bytes(entry.block_size(block_bytes)) == block_bytes,
            lambda: (
                f"{op}: {name} of {argument} '{cache_format}' must have blocks of "
                f"ceil({entry.row_widths[0]} * block_size / {entry.block_multiple}) * {entry.block_multiple} bytes, "
                f"got shape {list(shape)}"
            ),
        )
    else:
        if len(shape) != 3 or shape[2] not in entry.row_widths:
            widths = " or ".join(str(width) for width in entry.row_widths)
            flat = "[num_blocks, block_bytes] or " if entry.planar else ""
            raise ValueError(
                f"{op}: {name} of {argument} '{cache_format}' must have shape {flat}[num_blocks, block_size, "
                f"{widths}], got {list(shape)}"
            )
        needed = shape[1] * shape[2]
        require(shape[1] >= 1, lambda: f"{op}: {name} must have a block_size of at least 1, got {shape[1]}")
        if (dense := strides[2] == 1) is not True:
            require_one_of(
                (dense, *is_single(shape)), lambda: f"{op}: rows of {name} must be contiguous, got strides {strides}"
            )
        if (one_row := strides[1] == shape[2]) is not True:
            require_one_of(
                (one_row, *is_single(shape[:2])),
                lambda: f"{op}: {name}.stride(1) must be {shape[2]}, one row, got {strides[1]}",
            )
    if entry.planar and (apart := strides[0] >= needed) is not True:
        require_one_of(
            (apart, *is_single(shape[:1])),
            lambda: f"{op}: blocks of {name} take {needed} bytes, got {name}.stride(0) of {strides[0]}",
        )
    if (aligned := strides[0] * itemsize % CACHE_ALIGNMENT == 0) is not True:
        require_one_of(
            (aligned, *is_single(shape[:1])),
            lambda: (
                f"{op}: blocks of {name} must start on {CACHE_ALIGNMENT} bytes, got {name}.stride(0) of "
                f"{strides[0]} elements of {itemsize} bytes"
            ),
        )
    require(
        offset * itemsize % CACHE_ALIGNMENT == 0,
        lambda: (
            f"{op}: {name} must start on {CACHE_ALIGNMENT} bytes of its storage, got a storage offset of "
            f"{offset} elements of {itemsize} bytes"
        ),
    )
    return entry


def check_heads(op: str, num_heads: int) -> None:
    if not 1 <= num_heads <= MAX_NUM_HEADS:
        raise ValueError(f"{op}: q must have 1 to {MAX_NUM_HEADS} heads, got {num_heads}")


def check_query(op: str, q: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raises unless `q` can be absorbed queries, `[num_tokens, num_heads, 576 or 512]`."""
    dims = (("num_tokens", None), ("num_heads", None), ("head_dim", None))
    check_tensor(op, "q", q, dtypes, dims, q.device)
    if q.shape[2] not in QUERY_DIMS:
        raise ValueError(f"{op}: q must have shape [num_tokens, num_heads, 576 or 512], got {list(q.shape)}")
    check_heads(op, q.shape[1])


def check_query_and_cache(
    op: str,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cache_format: str,
    name: str = "kv_cache",
    q_rope: torch.Tensor | None = None,
) -> int:
    """Raises unless queries go with the keys of a paged cache: dtype, width and device. Returns the width.

    With `q_rope`, `q` has the latent dims only.
    """
    entry = check_cache(op, kv_cache, cache_format, name)
    check_query(op, q, FLOAT_DTYPES if entry.quantized else (entry.value_dtype,))
    width = q.shape[2]
    if q_rope is not None:
        if width != LATENT_DIM:
            raise ValueError(f"{op}: q must be {LATENT_DIM} wide beside q_rope, got shape {list(q.shape)}")
        dims = (("num_tokens", q.shape[0]), ("num_heads", q.shape[1]), ("rope_dim", ROPE_DIM))
        check_tensor(op, "q_rope", q_rope, (q.dtype,), dims, q.device)
        width = LATENT_DIM + ROPE_DIM
    head_dim = geometry(kv_cache, cache_format).head_dim
    if head_dim not in QUERY_DIMS or width != head_dim:
        query = "q is" if q_rope is None else "q and q_rope are"
        raise ValueError(f"{op}: {query} {width} wide, but the keys in {name} are {head_dim} wide")
    if kv_cache.device != q.device:
        raise ValueError(f"{op}: {name} must be on {q.device} like the first argument, got {kv_cache.device}")
    return head_dim


def check_positive(op: str, name: str, value: int | torch.SymInt) -> None:
    require(value >= 1, lambda: f"{op}: {name} must be at least 1, got {value}")
    check_int32(op, name, value)


def check_not_negative(op: str, name: str, value: int | torch.SymInt) -> None:
    require(value >= 0, lambda: f"{op}: {name} must not be negative, got {value}")
    check_int32(op, name, value)


def check_int32(op: str, name: str, value: int | torch.SymInt) -> None:
    """Kernels take sizes as 32 bits. A symbolic one is checked when the op runs, so that no graph has this bound."""
    if type(value) is int and not INT32_MIN <= value <= INT32_MAX:
        raise ValueError(f"{op}: {name} must be an integer of 32 bits, at most {INT32_MAX}, got {value}")


def check_scale(op: str, name: str, value: float | torch.SymFloat) -> None:
    """Kernels take it as float32, and multiply it by log2(e). A symbolic one is checked when the op runs."""
    if type(value) is float and not abs(value) < SCALE_LIMIT:
        raise ValueError(f"{op}: {name} must be a finite number below 2**127, got {value}")


def check_no_grad(op: str, **tensors: torch.Tensor | None) -> None:
    """These ops have no derivatives: a gradient or a tangent would be lost without a word."""
    if forward_ad._current_level >= 0:
        for name, tensor in tensors.items():
            if tensor is not None and has_tangent(tensor):
                raise NotImplementedError(tangent_message(op, name))
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                raise NotImplementedError(
                    f"{op}: {name} requires grad, but {op} has no backward: "
                    f"call it under torch.no_grad(), or detach {name}"
                )
