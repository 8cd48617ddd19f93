"""Sizes that a caller gives: integers between two bounds."""

from __future__ import annotations

import operator
from typing import Any

import torch


def as_int(value: Any) -> Any:
    """A Python integer for any integer, as numpy has them too; a symbolic one of a graph as it is.

    None for all else: also for a bool, and for a tensor, which would have to be read from its device.
    """
    if isinstance(value, (bool, torch.Tensor)):
        return None
    if isinstance(value, (int, torch.SymInt)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_sizes(function: str, least: int, *, most: int = 2**31 - 1, **sizes: Any) -> list[int]:
    """The sizes as Python integers, in order, each at least `least` and at most `most`: kernels take 32 bits.

    Args:
        function: what was called; an error begins with it.
        least, most: the bounds.
        sizes: the arguments by name.

    Raises:
        TypeError: one is no integer.
        ValueError: one is out of the bounds.
    """
    checked = []
    for name, value in sizes.items():
        argument, size = f"{function}: {name}", as_int(value)
        if size is None:
            raise TypeError(f"{argument} must be an integer, got {type(value).__name__} {value!r}")
        if size < least:
            raise ValueError(f"{argument} must be at least {least}, got {size}")
        if type(size) is int and size > most:
            raise ValueError(f"{argument} must be at most {most}, got {size}")
        checked.append(size)
    return checked
