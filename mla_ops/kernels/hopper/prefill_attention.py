"""Varlen prefill on SM90: one kernel, whose CTAs take tiles of queries from a counter.

Queries, keys and values reach shared memory as boxes of a tensor that the driver describes, so neither strides nor what
lies past a tensor's end cost the kernel anything. Results are the same in every run.
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch

from ...dispatch import Call
from ..alignment import is_aligned
from ..cuda.driver import NO_CLUSTER
from ..cuda.params import POINTER, packer
from . import sources
from .launch import Kernel, compile_reason

QUERIES = 128  # a tile's
TYPES = {torch.bfloat16: "Bfloat16", torch.float16: "Float16"}
L2_BYTES = 32 * 2**20  # keys and values that are used together; the L2 of an H200 has 50 MB

# Keys of a tile, by the widths of queries and values.
TILE_KEYS = {(192, 128): 128, (128, 128): 128, (64, 64): 128, (256, 256): 80}


class Params(ctypes.Structure):
    """The struct of prefill_attention.cu. Its tensor maps are aligned to 64 bytes, and so its size is."""

    _fields_ = [
        ("q", ctypes.c_char * 128),
        ("k", ctypes.c_char * 128),
        ("v", ctypes.c_char * 128),
        ("cu_seqlens_q", POINTER),
        ("cu_seqlens_k", POINTER),
        ("out", POINTER),
        ("lse", POINTER),
        ("taken", POINTER),
        ("out_token_stride", ctypes.c_int64),
        ("out_head_stride", ctypes.c_int64),
        ("lse_token_stride", ctypes.c_int64),
        ("lse_head_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int),
        ("num_kv", ctypes.c_int),
        ("num_requests", ctypes.c_int),
        ("num_heads", ctypes.c_int),
        ("heads_per_kv_head", ctypes.c_int),
        ("heads_together", ctypes.c_int),
        ("num_tiles", ctypes.c_int),
        ("causal", ctypes.c_int),
        ("scale_log2", ctypes.c_float),
        ("_", ctypes.c_char * 20),
    ]


pack = packer(Params)


@functools.cache
def kernel_for(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> Kernel:
    name = f"prefill_attention<{head_dim}, {head_dim_v}, {TYPES[dtype]}>"
    return Kernel("prefill_attention.cu", name, 384)


def kernels() -> list[Kernel]:
    """All there are."""
    return [kernel_for(*dims, dtype) for dims in TILE_KEYS for dtype in TYPES]


@functools.lru_cache(maxsize=4096)
def _tensor_map(address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int) -> bytes:
    """A `CUtensorMap` of `[tokens, heads, dims]`: boxes of 64 dims of one head of `rows` tokens, swizzled."""
    from cuda.bindings import driver

    num_tokens, num_heads, head_dim = shape
    types, u64, u32 = driver.CUtensorMapDataType, driver.cuuint64_t, driver.cuuint32_t
    status, tensor_map = driver.cuTensorMapEncodeTiled(
        types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if dtype == torch.bfloat16 else types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        3,
        address,
        [u64(head_dim), u64(num_heads), u64(num_tokens)],
        # the stride of a dim of size 1 may be anything, which the driver would refuse
        [u64(2 * (strides[dim] if shape[dim] > 1 else head_dim)) for dim in (1, 0)],
        [u32(64), u32(1), u32(rows)],
        [u32(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise RuntimeError(
            f"prefill_attention: the driver refused a tensor map: {status.name}; shape {shape}, strides {strides}"
        )
    return ctypes.string_at(tensor_map.getPtr(), 128)


def _in_boxes(tensor: torch.Tensor, rows: int) -> tuple[torch.Tensor, bytes]:
    """The tensor, or a copy where its rows do not lie on multiples of 16 bytes, and its map."""
    strides_fit = all(
        size == 1 or (stride > 0 and stride % 8 == 0)
        for size, stride in zip(tensor.shape[:2], tensor.stride()[:2], strict=True)
    )
    if not strides_fit or tensor.data_ptr() % 16:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor, _tensor_map(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), rows)


def heads_together(num_kv: int, num_heads: int, num_kv_heads: int, row_bytes: int) -> int:
    """Heads that are worked on at one time: as many as L2 holds the keys and values of, in even shares."""
    fit = max(1, min(num_kv_heads, L2_BYTES // (num_kv * row_bytes)))
    sections = -(-num_kv_heads // fit)
    return -(-num_kv_heads // sections) * (num_heads // num_kv_heads)


@functools.cache
def _num_sms(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    *,
    causal: bool = True,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_kv, num_kv_heads, head_dim_v = v.shape
    if num_tokens == 0:
        return
    if num_kv == 0:
        out.zero_()
        lse.fill_(-math.inf)
        return
    device_index = q.device.index
    kernel, keys = kernel_for(head_dim, head_dim_v, q.dtype), TILE_KEYS[head_dim, head_dim_v]
    (q, q_map), (k, k_map), (v, v_map) = _in_boxes(q, QUERIES), _in_boxes(k, keys), _in_boxes(v, keys)
    target = out if is_aligned(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    num_requests = cu_seqlens_q.shape[0] - 1
    # a tile of each request may be part-filled, and so may that of the tokens behind them
    num_tiles = num_tokens // QUERIES + num_requests + 1
    num_items, num_sms = num_tiles * num_heads, _num_sms(device_index)
    taken = torch.zeros(1, dtype=torch.int32, device=q.device) if num_items > num_sms else None
    params = pack(
        q_map,
        k_map,
        v_map,
        cu_seqlens_q.data_ptr(),
        cu_seqlens_k.data_ptr(),
        target.data_ptr(),
        lse.data_ptr(),
        0 if taken is None else taken.data_ptr(),
        target.stride(0),
        target.stride(1),
        lse.stride(0),
        lse.stride(1),
        num_tokens,
        num_kv,
        num_requests,
        num_heads,
        num_heads // num_kv_heads,
        heads_together(num_kv, num_heads, num_kv_heads, 2 * (head_dim + head_dim_v)),
        num_tiles,
        causal,
        softmax_scale * math.log2(math.e),
    )
    sources.load(kernel.source, kernel.name, device_index).launch(
        (min(num_items, num_sms), 1, 1), (kernel.threads, 1, 1), None, NO_CLUSTER, params
    )
    if target is not out:
        out.copy_(target)


def prefill_reason(call: Call) -> str | None:
    if call.dtype not in TYPES:
        return f"it takes bfloat16 or float16, these are {call.dtype}"
    dims = call.head_dim, call.head_dim_v
    if dims not in TILE_KEYS:
        return f"it takes head dims {', '.join(f'{q}/{v}' for q, v in TILE_KEYS)}, these are {dims[0]}/{dims[1]}"
    return compile_reason()
