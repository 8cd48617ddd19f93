"""The merge of a row's parts on SM90: one kernel, on its way while the one that writes the parts is at work."""

from __future__ import annotations

import bisect
import ctypes
import functools

import torch

from ..cuda.driver import NO_CLUSTER, Function
from ..cuda.params import POINTER, packer
from . import sources
from .launch import Kernel

THREADS = 128
MAX_PARTS = (4, 8, 16)  # parts that a thread has registers for, by kernel


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
    ]


pack = packer(Params)


def kernels() -> list[Kernel]:
    """All there are."""
    return [Kernel("merge_parts.cu", f"merge_parts<{most}>", THREADS) for most in MAX_PARTS]


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
) -> None:
    """Merges parts that the launch just before wrote.

    Args:
        part_out: float32 `[parts, num_tokens, num_heads, 512]`, contiguous.
        part_lse: float32 `[parts, num_tokens, num_heads]`, contiguous; -inf where a part has no keys.
        out: bfloat16 `[num_tokens, num_heads, 512]`, dims contiguous, rows at multiples of 8 bytes.
        lse: float32 `[num_tokens, num_heads]`.
        balanced: int32 `[1]`; not 0: there are no parts, and nothing is written.
    """
    parts, num_tokens, num_heads, _ = part_out.shape
    kernel = _loaded(out.device.index)[bisect.bisect_left(MAX_PARTS, parts)]
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
    )
    kernel.launch((num_tokens, num_heads, 1), (THREADS, 1, 1), 0, NO_CLUSTER, params, programmatic=True)
