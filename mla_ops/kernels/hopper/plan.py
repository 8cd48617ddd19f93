"""Schedules of sparse attention on SM90: one launch of short code, a warp for each row."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch

from ...dispatch import Call, Lowering
from ..cuda.driver import NO_CLUSTER, Function
from ..cuda.params import POINTER, packer
from . import sources
from .launch import Kernel, compile_reason, reciprocal

KEY_BLOCK = 64  # keys that a schedule counts as one
WARPS = 16  # of a CTA that places many rows
FEW_ROWS = 8  # of a CTA that places few
FEW_TOKENS = 32
MAX_TOKENS = 16384  # their lengths lie in shared memory
FIXED_BYTES = 272  # in front of them
# More than slots can be, so that more of them change nothing, and few enough for sums of 32 bits.
MAX_WORKERS = 2**20

ONE = Kernel("plan.cu", "schedule_one", 32)
FEW = Kernel("plan.cu", "schedule_few", FEW_ROWS * 32)
MANY = Kernel("plan.cu", f"schedule_many<{WARPS}>", WARPS * 32)
KERNELS = (ONE, FEW, MANY)


class Params(ctypes.Structure):
    """As in plan.cu."""

    _fields_ = [
        ("topk_length", POINTER),
        ("extra_topk_length", POINTER),
        ("slots", POINTER),
        ("num_tokens", ctypes.c_uint),
        ("num_slots", ctypes.c_uint),
        ("cluster_log2", ctypes.c_int),
        ("topk", ctypes.c_int),
        ("extra_topk", ctypes.c_int),
        ("capacity", ctypes.c_uint),
        ("num_workers", ctypes.c_uint),
        ("overhead", ctypes.c_uint),
        ("multiplier", ctypes.c_uint),
        ("shift", ctypes.c_int),
    ]


pack = packer(Params)


class Launch(NamedTuple):
    """A kernel, its CTAs, threads of one, and bytes of its shared memory."""

    kernel: Kernel
    ctas: int
    threads: int
    shared_bytes: int


def launch_for(num_tokens: int, cluster_size: int, num_workers: int, has_extra_lengths: bool) -> Launch:
    """What places so many rows, by sizes alone."""
    if num_tokens == 1 and num_workers >= cluster_size:
        return Launch(ONE, 1, ONE.threads, 0)
    if num_tokens <= FEW_TOKENS:
        rows = max(min(num_tokens, FEW_ROWS), 1)
        return Launch(FEW, max(-(-num_tokens // rows), 1), rows * 32, 0)
    lengths = -(-num_tokens // 4) * 4 * (2 if has_extra_lengths else 1)
    return Launch(MANY, -(-num_tokens // WARPS), MANY.threads, FIXED_BYTES + 4 * lengths)


@functools.cache
def _load(device_index: int) -> dict[Kernel, Function]:
    """All at once, so that a capture of other sizes than those seen before loads nothing."""
    return {kernel: sources.load(kernel.source, kernel.name, device_index) for kernel in KERNELS}


def plan_sparse_attention(
    topk_length: torch.Tensor,
    tile_scheduler_metadata: torch.Tensor,
    topk: int,
    num_workers: int,
    *,
    overhead: int = 4,
    extra_topk_length: torch.Tensor | None = None,
    extra_topk: int = 0,
    deterministic: bool = False,
) -> None:
    num_clusters, cluster_size, _ = tile_scheduler_metadata.shape
    if num_clusters == 0:
        return
    num_tokens = topk_length.shape[0]
    num_workers = min(num_workers, MAX_WORKERS)
    params = pack(
        topk_length.data_ptr(),
        0 if extra_topk_length is None else extra_topk_length.data_ptr(),
        tile_scheduler_metadata.data_ptr(),
        num_tokens,
        num_clusters * cluster_size,
        cluster_size.bit_length() - 1,
        topk,
        extra_topk,
        0 if deterministic else -(-topk // KEY_BLOCK) - (-extra_topk // KEY_BLOCK),
        num_workers,
        overhead,
        *reciprocal(num_workers),
    )
    kernel, ctas, threads, shared_bytes = launch_for(
        num_tokens, cluster_size, num_workers, extra_topk_length is not None
    )
    _load(topk_length.device.index)[kernel].launch((ctas, 1, 1), (threads, 1, 1), shared_bytes, NO_CLUSTER, params)


def plan_reason(call: Call) -> str | None:
    if call.num_tokens > MAX_TOKENS:
        return f"it takes up to {MAX_TOKENS} tokens, these are {call.num_tokens}"
    return compile_reason()


LOWERINGS = {"plan_sparse_attention": Lowering(plan_sparse_attention, plan_reason)}
