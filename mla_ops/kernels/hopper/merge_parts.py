"""The merge of a row's parts on SM90: one kernel, on its way while the one that writes the parts is at work."""

from __future__ import annotations

import bisect
import ctypes
import functools

import torch

from ..cuda.driver import NO_CLUSTER, Function
from ..cuda.params import POINTER, packer
from . import sources
from .launch import BY_SHAPE, ByLength, Kernel
from .params import NO_CACHE, CacheParams

THREADS = 128
MAX_PARTS = (4, 8, 16)  # parts that a thread has registers for, by kernel
GROUPS = 4  # of threads, of a CTA that merges rows by their lengths
CTAS = 2 * 132  # so many of these run at one time


class Params(ctypes.Structure):
    """The struct of merge_parts.cu."""

    _fields_ = [
        ("outs", POINTER),
        ("lses", POINTER),
        ("out", POINTER),
        ("lse", POINTER),
        ("out_token_stride", ctypes.c_int64),
        ("out_head_stride", ctypes.c_int64),
        ("lse_token_stride", ctypes.c_int64),
        ("lse_head_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int),
        ("parts", ctypes.c_int),
        ("balanced", POINTER),
        ("longest", ctypes.c_float),
        ("margin", ctypes.c_float),
        ("splits", ctypes.c_int),
        ("topk_length", POINTER * 2),
        ("topk", ctypes.c_int * 2),
        ("num_tokens", ctypes.c_int),
        ("heads", ctypes.c_int),
    ]


pack = packer(Params)


def kernels() -> list[Kernel]:
    """All there are."""
    of_parts = [Kernel("merge_parts.cu", f"merge_parts<{most}>", THREADS, ctas=4) for most in MAX_PARTS]
    return [*of_parts, Kernel("merge_parts.cu", "merge_by_length", GROUPS * THREADS, ctas=2)]


@functools.cache
def _loaded(device_index: int) -> list[Function]:
    """All of them, so that whichever was run before a capture, none is compiled during it."""
    return [sources.load(kernel.source, kernel.name, device_index) for kernel in kernels()]


def merge_parts(
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    balanced: torch.Tensor | None = None,
    by_length: tuple[ByLength, tuple[CacheParams, CacheParams]] | None = None,
) -> None:
    """Merges parts that the launch just before wrote.

    Args:
        part_out: float32 `[parts, num_tokens, num_heads, 512]`, contiguous.
        part_lse: float32 `[parts, num_tokens, num_heads]`, contiguous; -inf where a part has no keys.
        out: bfloat16 `[num_tokens, num_heads, 512]`, dims contiguous, rows at multiples of 8 bytes.
        lse: float32 `[num_tokens, num_heads]`.
        balanced: int32 `[1]`; not 0: there are no parts, and nothing is written.
        by_length: the launch's, and its caches, where rows go by their lengths: parts are `[parts, num_heads, 512]` and
            `[parts, num_heads]` then, a row's neighbours.
    """
    parts, (num_tokens, num_heads) = part_out.shape[0], out.shape[:2]
    number, grid, threads = bisect.bisect_left(MAX_PARTS, parts), (num_tokens, num_heads, 1), THREADS
    if by_length is not None:
        number, grid, threads = len(MAX_PARTS), (CTAS, 1, 1), GROUPS * THREADS
    own, (main, extra) = by_length or (BY_SHAPE, (NO_CACHE, NO_CACHE))
    params = pack(
        part_out.data_ptr(),
        part_lse.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        lse.stride(1),
        num_tokens * num_heads,
        parts,
        0 if balanced is None else balanced.data_ptr(),
        own.longest,
        own.margin,
        own.splits,
        main.lengths,
        extra.lengths,
        main.columns,
        extra.columns,
        num_tokens,
        num_heads,
    )
    _loaded(out.device.index)[number].launch(grid, (threads, 1, 1), 0, NO_CLUSTER, params, programmatic=True)
