"""Writes of the caches on SM90: a warp for each token."""

from __future__ import annotations

import ctypes

import torch

from ...dispatch import Call, Lowering
from ...formats import FORMATS, geometry, get_format
from ..alignment import check_cache_address
from ..cuda.driver import NO_CLUSTER
from ..cuda.params import POINTER, packer
from . import sources
from .launch import Kernel, compile_reason

WARPS = 4  # warps of a CTA, as in cache.cuh
TYPES = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}


class Params(ctypes.Structure):
    """`Params` of cache.cuh."""

    _fields_ = [
        ("latent", POINTER),
        ("rope", POINTER),
        ("cache", POINTER),
        ("slot_mapping", POINTER),
        ("num_slots", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("latent_stride", ctypes.c_int64),
        ("rope_stride", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("latent_dim", ctypes.c_int),
        ("row_dim", ctypes.c_int),
    ]


_pack = packer(Params)


def _kernel(cache_format: str, dtype: torch.dtype) -> Kernel:
    """The one that writes numbers of `dtype` into a format."""
    entry = get_format(cache_format)
    kind, types = f"store_{cache_format}", TYPES[dtype]
    if not entry.quantized:
        kind, types = "store_plain", f"{types}, {TYPES[entry.dtype]}"
    return Kernel("cache.cu", f"{kind}<{types}>", 32 * WARPS)


def _accepts(cache_format: str, dtype: torch.dtype) -> bool:
    """Whether the ops' checks let values of this type into the format."""
    entry = FORMATS[cache_format]
    return entry.quantized or entry.dtype == torch.float32 or dtype in (entry.dtype, torch.float32)


KERNELS = {(name, dtype): _kernel(name, dtype) for name in FORMATS for dtype in TYPES if _accepts(name, dtype)}


def pack(
    latent: torch.Tensor, rope: torch.Tensor | None, cache: torch.Tensor, slot_mapping: torch.Tensor, cache_format: str
) -> bytes:
    """`struct Params`."""
    num_blocks, block_size, block_stride, head_dim = geometry(cache, cache_format)
    return _pack(
        latent.data_ptr(),
        0 if rope is None else rope.data_ptr(),
        cache.data_ptr(),
        slot_mapping.data_ptr(),
        num_blocks * block_size,
        block_size,
        latent.stride(0),
        0 if rope is None else rope.stride(0),
        block_stride,
        min(slot_mapping.shape[0], latent.shape[0]),
        latent.shape[1],
        head_dim,
    )


def _write(
    latent: torch.Tensor, rope: torch.Tensor | None, cache: torch.Tensor, slot_mapping: torch.Tensor, cache_format: str
) -> None:
    num_rows = min(slot_mapping.shape[0], latent.shape[0])
    if num_rows == 0:
        return
    kernel = KERNELS[cache_format, latent.dtype]
    sources.load(kernel.source, kernel.name, cache.device.index).launch(
        (-(-num_rows // WARPS), 1, 1),
        (kernel.threads, 1, 1),
        0,
        NO_CLUSTER,
        pack(latent, rope, cache, slot_mapping, cache_format),
    )


def concat_and_cache(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, cache_format: str
) -> None:
    check_cache_address("concat_and_cache", "kv_cache", kv_cache)
    _write(kv_c, k_pe, kv_cache, slot_mapping, cache_format)


def write_index_cache(
    k: torch.Tensor, index_cache: torch.Tensor, slot_mapping: torch.Tensor, cache_format: str
) -> None:
    check_cache_address("write_index_cache", "index_cache", index_cache)
    _write(k, None, index_cache, slot_mapping, cache_format)


def write_reason(call: Call) -> str | None:
    return compile_reason()


LOWERINGS = {"concat_and_cache": Lowering(concat_and_cache, write_reason)}
