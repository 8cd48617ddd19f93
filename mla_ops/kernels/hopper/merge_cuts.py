"""The merge of tokens that a balanced launch has cut, on SM90: one kernel, on its way while that launch is at work."""

from __future__ import annotations

import ctypes
import functools

import torch

from ...formats import LATENT_DIM
from ..cuda.driver import NO_CLUSTER, Function
from ..cuda.params import POINTER, packer
from . import sources
from .launch import Kernel

THREADS = 256
HEADS = 4  # that a worker's CTA has at least


class Params(ctypes.Structure):
    """As in merge_cuts.cu."""

    _fields_ = [
        ("exchange", POINTER),
        ("attn_sink", POINTER),
        ("out", POINTER),
        ("lse", POINTER),
        ("out_token_stride", ctypes.c_int64),
        ("out_head_stride", ctypes.c_int64),
        ("lse_token_stride", ctypes.c_int64),
        ("lse_head_stride", ctypes.c_int64),
        ("workers", ctypes.c_int),
        ("num_heads", ctypes.c_int),
    ]


pack = packer(Params)
KERNEL = Kernel("merge_cuts.cu", f"merge_cuts<{THREADS}>", THREADS)


@functools.cache
def _loaded(device_index: int) -> Function:
    return sources.load(KERNEL.source, KERNEL.name, device_index)


def exchange(workers: int, num_heads: int, device: torch.device) -> torch.Tensor:
    """Room for two parts of each worker and its record, `struct Parts` of parts.cuh."""
    numbers = 2 * workers * num_heads * (1 + LATENT_DIM) + 2 * workers + 4
    return torch.empty(numbers, dtype=torch.float32, device=device)


def is_balanced(parts: torch.Tensor, workers: int, num_heads: int) -> torch.Tensor:
    """Of `exchange`'s memory, the int32 by which the launch tells whether it has the call's tokens."""
    return parts[2 * workers * num_heads :].view(torch.int32)[:1]


def merge_cuts(
    parts: torch.Tensor,
    workers: int,
    num_heads: int,
    attn_sink: torch.Tensor | None,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merges the parts that the launch just before left in `exchange`'s memory.

    Args:
        parts: of `exchange`.
        workers: of that launch.
        num_heads: heads.
        attn_sink: float32 `[num_heads]`, or None.
        out: bfloat16 `[num_tokens, num_heads, 512]`, dims contiguous, rows at multiples of 8 bytes.
        lse: float32 `[num_tokens, num_heads]`.
    """
    if workers < 2:
        return
    params = pack(
        parts.data_ptr(),
        0 if attn_sink is None else attn_sink.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        lse.stride(1),
        workers,
        num_heads,
    )
    grid = -(-num_heads // HEADS), workers - 1, 1
    _loaded(out.device.index).launch(grid, (THREADS, 1, 1), 0, NO_CLUSTER, params, programmatic=True)
