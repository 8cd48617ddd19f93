"""Sizes that a caller gives: integers, none below a bound."""

from __future__ import annotations

from typing import Any

import torch


def is_int(value: Any) -> bool:
    """Whether a value is an integer, or stands for one in a graph with dynamic sizes."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def check_sizes(function: str, least: int, **sizes: Any) -> None:
    """Raises unless each size is an integer of at least `least`.

    Args:
        function: what was called; an error begins with it, if it is not empty.
        least: the bound.
        sizes: the arguments by name.

    Raises:
        TypeError: one is no integer.
        ValueError: one is below the bound.
    """
    for name, size in sizes.items():
        argument = f"{function}: {name}" if function else name
        if not is_int(size):
            raise TypeError(f"{argument} must be an integer, got {type(size).__name__} {size!r}")
        if size < least:
            raise ValueError(f"{argument} must be at least {least}, got {size}")
