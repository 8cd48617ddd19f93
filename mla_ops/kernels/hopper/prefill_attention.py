"""Varlen prefill on SM90: a kernel for tiles of queries with few keys, and one for the others.

The second one's CTAs take tiles from a counter and a table that the first one writes. Queries, keys and values reach
its shared memory as boxes of a tensor that the driver describes, so neither strides nor what lies past a tensor's end
cost it anything. Which kernel a tile is for depends on its request's lengths alone, and results are the same in every
batch.
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch

from ...dispatch import Call
from ..alignment import is_aligned
from ..cuda.driver import NO_CLUSTER, Function, num_sms
from ..cuda.params import POINTER, packer
from . import sources
from .launch import Kernel, compile_reason
from .params import pointer

QUERIES = 128  # a tile's
REGION = 128  # tokens that CTAs of the kernel for short tiles share
SHORT_THREADS = 128
SHORT_CTAS = 2  # an SM runs so many
SHORT_CELLS = 12  # a short tile has no more, each 16 queries by 16 keys
PLAN_ENTRY = 8  # ints of a tile in the table, and half as many in front of all
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
        ("q_rows", POINTER),
        ("k_rows", POINTER),
        ("v_rows", POINTER),
        ("cu_seqlens_q", POINTER),
        ("cu_seqlens_k", POINTER),
        ("out", POINTER),
        ("lse", POINTER),
        ("plan", POINTER),
        ("q_token_stride", ctypes.c_int64),
        ("q_head_stride", ctypes.c_int64),
        ("k_token_stride", ctypes.c_int64),
        ("k_head_stride", ctypes.c_int64),
        ("v_token_stride", ctypes.c_int64),
        ("v_head_stride", ctypes.c_int64),
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
        ("shares", ctypes.c_int),
        ("short_cells", ctypes.c_int),
        ("most_tiles", ctypes.c_int),
        ("causal", ctypes.c_int),
        ("scale_log2", ctypes.c_float),
        ("_", ctypes.c_char * 4),
    ]


pack = packer(Params)


@functools.cache
def kernel_for(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> Kernel:
    name = f"prefill_attention<{head_dim}, {head_dim_v}, {TYPES[dtype]}>"
    return Kernel("prefill_attention.cu", name, 384)


@functools.cache
def short_kernel_for(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> Kernel:
    """The kernel for short tiles, and of the table of the others."""
    name = f"prefill_short<{head_dim}, {head_dim_v}, {TYPES[dtype]}>"
    return Kernel("prefill_short.cu", name, SHORT_THREADS, ctas=SHORT_CTAS)


def kernels() -> list[Kernel]:
    """All there are."""
    return [find(*dims, dtype) for find in (kernel_for, short_kernel_for) for dims in TILE_KEYS for dtype in TYPES]


@functools.cache
def _load_short(kernel: Kernel, device_index: int) -> Function:
    """Its loads go to registers, past shared memory: L1 is where warps share keys."""
    function: Function = sources.load(kernel.source, kernel.name, device_index)
    function.leave_l1(kernel.ctas)
    return function


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


def cells(num_queries: int, num_keys: int) -> int:
    """Cells of a tile: 16 queries by 16 keys, or parts of them."""
    return -(-num_queries // 16) * -(-num_keys // 16)


def shares_of_a_region(num_regions: int, num_heads: int, num_sms: int) -> int:
    """CTAs that share a region's tokens: few where there are many regions, and at least two for each SM where a warp
    still has something to do. 128 tokens of one head are at least 8 pieces of work, and 4 warps a CTA."""
    many = min(4096 // num_regions, num_heads // 2)
    few = min(2 * num_sms // num_regions, 2 * num_heads)
    return max(many, few, 1)


def may_be_long(num_queries: int, num_keys: int) -> bool:
    """Whether a request of so many queries and keys may have a tile that is not for the kernel of short ones."""
    return num_queries > QUERIES or cells(num_queries, num_keys) > SHORT_CELLS


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
    num_tokens, num_kv = q.shape[0], k.shape[0]
    if num_tokens == 0:
        return
    if num_kv == 0:
        out.zero_()
        lse.fill_(-math.inf)
        return
    target = out if is_aligned(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    has_long_tiles = cu_seqlens_q.shape[0] > 1 and may_be_long(min(num_tokens, max_seqlen_q), min(num_kv, max_seqlen_k))
    _launch(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, has_long_tiles, target, lse)
    if target is not out:
        out.copy_(target)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    has_long_tiles: bool,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """The kernel of short tiles and, if there may be others, theirs, which reads the table that the first one wrote."""
    (num_tokens, num_heads, head_dim), (num_kv, num_kv_heads, head_dim_v) = q.shape, v.shape
    device_index, num_requests = q.device.index, cu_seqlens_q.shape[0] - 1
    sms, keys = num_sms(device_index), TILE_KEYS[head_dim, head_dim_v]
    (q, q_map), (k, k_map), (v, v_map) = _in_boxes(q, QUERIES), _in_boxes(k, keys), _in_boxes(v, keys)
    most_tiles = num_tokens // QUERIES + num_requests  # one of each request may be part-filled
    plan = None
    if has_long_tiles:
        plan = torch.empty(PLAN_ENTRY // 2 + PLAN_ENTRY * most_tiles, dtype=torch.int32, device=q.device)
    num_regions = -(-num_tokens // REGION)
    shares = shares_of_a_region(num_regions, num_heads, sms)
    params = pack(
        q_map,
        k_map,
        v_map,
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        cu_seqlens_q.data_ptr(),
        cu_seqlens_k.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        pointer(plan),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *out.stride()[:2],
        *lse.stride(),
        num_tokens,
        num_kv,
        num_requests,
        num_heads,
        num_heads // num_kv_heads,
        heads_together(num_kv, num_heads, num_kv_heads, 2 * (head_dim + head_dim_v)),
        shares,
        SHORT_CELLS,
        most_tiles,
        causal,
        softmax_scale * math.log2(math.e),
    )
    short = short_kernel_for(head_dim, head_dim_v, q.dtype)
    grid = (num_regions * shares + has_long_tiles, 1, 1)
    _load_short(short, device_index).launch(grid, (short.threads, 1, 1), None, NO_CLUSTER, params)
    if has_long_tiles:
        kernel = kernel_for(head_dim, head_dim_v, q.dtype)
        sources.load(kernel.source, kernel.name, device_index).launch(
            (min(most_tiles * num_heads, sms), 1, 1),
            (kernel.threads, 1, 1),
            None,
            NO_CLUSTER,
            params,
            programmatic=True,
        )


def prefill_reason(call: Call) -> str | None:
    if call.dtype not in TYPES:
        return f"it takes bfloat16 or float16, these are {call.dtype}"
    dims = call.head_dim, call.head_dim_v
    if dims not in TILE_KEYS:
        return f"it takes head dims {', '.join(f'{q}/{v}' for q, v in TILE_KEYS)}, these are {dims[0]}/{dims[1]}"
    return compile_reason()
