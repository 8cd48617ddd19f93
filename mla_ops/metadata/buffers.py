"""The base of the metadata classes: moving and comparing."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound="Buffers")


class Buffers:
    """A dataclass of tensors and sizes, maybe of others of its kind."""

    def to(self: T, device: torch.device | str) -> T:
        """A copy with every buffer on `device`; `self` where they all are. A captured step goes on reading the old."""
        moved = {}
        for name, value in _fields(self).items():
            moved[name] = value.to(device) if isinstance(value, (torch.Tensor, Buffers)) else value
        same = all(moved[name] is value for name, value in _fields(self).items())
        return self if same else type(self)(**moved)

    def __eq__(self, other: object) -> bool:
        """Whether sizes and values of all buffers are the same, wherever they lie. It reads the device."""
        if self is other:
            return True
        if type(self) is not type(other):
            return NotImplemented
        theirs = _fields(other)
        return all(_equal(value, theirs[name]) for name, value in _fields(self).items())

    # buffers change: two objects of equal content are different keys
    __hash__ = object.__hash__


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.to(b.device), b)
    return bool(a == b)
