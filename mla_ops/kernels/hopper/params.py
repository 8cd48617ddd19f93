"""Parameters of the attention kernels: the structs of layout.cuh, and the values that describe a cache."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch

from ..cuda.params import POINTER, packer


class Divisor(ctypes.Structure):
    """`Divisor` of divide.cuh; `reciprocal` has the values."""

    _fields_ = [("multiplier", ctypes.c_uint), ("shift", ctypes.c_int)]


class Cache(ctypes.Structure):
    """`Cache` of layout.cuh."""

    _fields_ = [
        ("rows", POINTER),
        ("block_table", POINTER),
        ("block_bytes", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        ("num_blocks", ctypes.c_int),
        ("block_size", ctypes.c_int),
        ("num_indices", ctypes.c_int),
        ("num_requests", ctypes.c_int),
        ("of_block_size", Divisor),
    ]


class Params(ctypes.Structure):
    """`Params` of layout.cuh."""

    _fields_ = [
        ("num_tokens", ctypes.c_int),
        ("head_tiles", ctypes.c_int),
        ("parts", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("all_tokens", ctypes.c_int),
        ("tokens_before", ctypes.c_int),
        ("workers", ctypes.c_int),
        ("of_splits", Divisor),
        ("of_parts", Divisor),
        ("of_head_tiles", Divisor),
        ("topk_length", POINTER * 2),
        ("indices", POINTER * 2),
        ("indices_stride", ctypes.c_int64 * 2),
        ("topk", ctypes.c_int * 2),
        ("longest", ctypes.c_float),
        ("margin", ctypes.c_float),
        ("req_id_per_token", POINTER),
        ("caches", Cache * 2),
        ("q", POINTER),
        ("q_rope", POINTER),
        ("q_token_stride", ctypes.c_int64),
        ("q_head_stride", ctypes.c_int64),
        ("q_rope_token_stride", ctypes.c_int64),
        ("q_rope_head_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int),
        ("scale_log2", ctypes.c_float),
        ("attn_sink", POINTER),
        ("lse", POINTER),
        ("out", POINTER),
        ("lse_token_stride", ctypes.c_int64),
        ("lse_head_stride", ctypes.c_int64),
        ("out_token_stride", ctypes.c_int64),
        ("out_head_stride", ctypes.c_int64),
        ("parts_out", POINTER),
        ("parts_lse", POINTER),
        ("exchange", POINTER),
        ("counters", POINTER),
        ("shares", ctypes.c_int),
    ]


pack = packer(Params)


def pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def reciprocal(divisor: int) -> tuple[int, int]:
    """Multiplier and shift that divide every number from 0 to 2**31 - 1: `number * multiplier >> shift`."""
    shift = 31 + (divisor - 1).bit_length()
    return (1 << shift) // divisor + 1, shift


class Rows(NamedTuple):
    """Keys in memory: `index = block * block_size + offset`."""

    tensor: torch.Tensor
    num_blocks: int
    block_size: int
    block_stride: int


class CacheParams(NamedTuple):
    """The part of a kernel's parameters that describes one cache.

    Attributes:
        lengths, indices: addresses, 0 for none.
        indices_stride: elements between rows.
        columns: keys of a row at most.
        cache: the fields of `struct Cache`.
    """

    lengths: int
    indices: int
    indices_stride: int
    columns: int
    cache: tuple[int, ...]

    def behind(self, tokens: int) -> CacheParams:
        """Those of the tokens behind the first ones."""
        return self._replace(
            lengths=self.lengths and self.lengths + 4 * tokens,
            indices=self.indices and self.indices + 4 * tokens * self.indices_stride,
        )


def cache_params(
    rows: Rows,
    indices: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    block_table: torch.Tensor | None,
    num_keys: int = 0,
) -> CacheParams:
    """Describes a cache; without indices the keys are the positions below `num_keys`."""
    num_requests, table_width = (0, 0) if block_table is None else block_table.shape
    columns = num_keys if indices is None else indices.shape[1]
    if block_table is not None and block_table.numel() == 0:
        columns = 0  # its address is null, which would make slots of the indices
    num_slots = (rows.num_blocks if block_table is None else table_width) * rows.block_size
    cache = (
        rows.tensor.data_ptr(),
        pointer(block_table),
        rows.block_stride,
        0 if block_table is None else block_table.stride(0),
        rows.num_blocks,
        rows.block_size,
        min(num_slots, 2**31 - 1),
        num_requests,
        *reciprocal(rows.block_size),
    )
    return CacheParams(
        pointer(topk_length), pointer(indices), 0 if indices is None else indices.stride(0), columns, cache
    )


NO_CACHE = CacheParams(0, 0, 0, 0, (0, 0, 0, 0, 0, 1, 0, 0, *reciprocal(1)))
