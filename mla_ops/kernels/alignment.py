"""Inputs of kernels that load 16 bytes at a time."""

from __future__ import annotations

import torch

LOAD_BYTES = 16


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether every row, along the last dimension, begins at a multiple of 16 bytes."""
    if tensor.data_ptr() % LOAD_BYTES:
        return False
    unit, every = LOAD_BYTES // tensor.element_size(), 0
    *strides, _ = tensor.stride()
    for stride in strides:
        every |= stride
    # The stride of a dim of size 1 may be anything.
    return every % unit == 0 or all(
        size == 1 or stride % unit == 0 for size, stride in zip(tensor.shape, strides, strict=False)
    )


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if a row does not begin at a multiple of 16 bytes.

    `Tensor.contiguous` does not do: a contiguous tensor may begin anywhere in its storage.
    """
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def check_cache_address(op: str, name: str, cache: torch.Tensor) -> None:
    """Raises ValueError for a cache whose memory does not begin at a multiple of 16 bytes.

    torch's own does; what other libraries share need not. A cache is not copied: it may take all of a GPU's memory.
    """
    if cache.data_ptr() % LOAD_BYTES:
        raise ValueError(f"{op}: {name} must begin at a multiple of {LOAD_BYTES} bytes, got address {cache.data_ptr()}")
