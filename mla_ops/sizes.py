"""Sizes that a caller gives: integers between two bounds."""

from __future__ import annotations

from typing import Any

import torch


def is_int(value: Any) -> bool:
    """Whether a value is an integer, or stands for one in a graph with dynamic sizes."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def check_sizes(function: str, least: int, *, most: int = 2**31 - 1, **sizes: Any) -> None:
    """Raises unless each size is an integer of at least `least` and at most `most`: kernels take 32 bits.

    Args:
        function: what was called; an error begins with it, if it is not empty.
        least, most: the bounds.
        sizes: the arguments by name.

    Raises:
        TypeError: one is no integer.
        ValueError: one is out of the bounds.
    """
    for name, size in sizes.items():
        argument = f"{function}: {name}" if function else name
        if not is_int(size):
            raise TypeError(f"{argument} must be an integer, got {type(size).__name__} {size!r}")
        if size < least:
            raise ValueError(f"{argument} must be at least {least}, got {size}")
        if type(size) is int and size > most:
            raise ValueError(f"{argument} must be at most {most}, got {size}")
