"""A case of the fuzzer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Arguments = dict[str, Any]
# (arguments before the call, on the CPU; arguments after; outputs; the lowering) -> raises AssertionError
Judge = Callable[[Arguments, Arguments, tuple[torch.Tensor, ...], str], None]

BLOCK_SIZES = (1, 2, 3, 16, 64, 80, 100, 256)


@dataclass
class Case:
    """One call.

    Attributes:
        op: its name, of the form that returns its outputs.
        arguments: by name, on the CPU.
        judge: compares what came out; None: every byte is the reference's.
        caches: arguments that are caches, with their formats.
        exact: arguments and outputs that `judge` leaves to the reference, to the byte.
    """

    op: str
    arguments: Arguments
    judge: Judge | None = None
    caches: dict[str, str] = field(default_factory=dict)
    exact: tuple[str, ...] = ()
