"""Whether written tensors overlap: themselves, or others. By strides and addresses alone, without a look at memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may lie at one place; False for symbolic sizes, which nobody knows yet.

    Exact where each dimension steps over all that the smaller ones span, as in every slice and permutation of a dense
    tensor. Else True.
    """
    if not all(type(value) is int for value in (*shape, *strides)) or 0 in shape:
        return False
    span = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride < span:
            return True
        span += stride * (size - 1)
    return False


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an element of `a` may lie in one of `b`.

    Exact for dense tensors, and for slices side by side in the rows of one buffer. Else True.
    """
    if a.numel() == 0 or b.numel() == 0:
        return False
    run_a, steps_a, end_a = _extent(a)
    run_b, steps_b, end_b = _extent(b)
    distance = b.data_ptr() - a.data_ptr()
    if distance >= end_a or -distance >= end_b:
        return False
    # All runs begin at multiples of this many bytes from the first of their tensor.
    period = math.gcd(*steps_a, *steps_b)
    if period == 0:
        return True
    distance %= period
    return distance < run_a or distance + run_b > period


def _extent(tensor: torch.Tensor) -> tuple[int, list[int], int]:
    """Bytes of a contiguous run, bytes between runs for each dimension of them, and bytes from first to last."""
    size_of_element = tensor.element_size()
    run = size_of_element
    steps: list[int] = []
    end = size_of_element
    dims = sorted((s * size_of_element, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    for stride, size in dims:
        if stride <= run and not steps:
            run += stride * (size - 1)
        else:
            steps.append(stride)
        end += stride * (size - 1)
    return run, steps, end


class Writes:
    """The tensors that an op writes, and those that it reads beside them.

    Args:
        op: its name, for messages.
        arguments: those of its schema.
        written: names of the arguments that it writes.
        disjoint: whether these must lie apart from one another as well.
    """

    def __init__(self, op: str, arguments: Sequence[torch.Argument], written: Sequence[str], *, disjoint: bool) -> None:
        self.op, self.written, self.disjoint = op, tuple(written), disjoint
        read = [
            (position, argument)
            for position, argument in enumerate(arguments)
            if "Tensor" in str(argument.type) and argument.name not in written
        ]
        self.positional = [(position, argument.name) for position, argument in read if not argument.kwarg_only]
        self.named = [argument.name for _, argument in read if argument.kwarg_only]

    def check_each(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises if one of the written tensors overlaps itself."""
        for name, tensor in zip(self.written, tensors, strict=True):
            if overlaps_itself(tensor.shape, tensor.stride()):
                raise ValueError(
                    f"{self.op}: {name} is written, so its elements must lie at different places, got shape "
                    f"{list(tensor.shape)} and strides {tensor.stride()}"
                )

    def check(self, tensors: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raises if one of the written tensors overlaps itself or another. 0.1 us a tensor where none does."""
        for tensor in tensors:
            if not tensor.is_contiguous():
                self.check_each(tensors)
        places = {tensor.untyped_storage()._cdata for tensor in tensors}
        alone = len(places) == len(tensors)
        for position, _ in self.positional:
            if args[position].untyped_storage()._cdata in places:
                alone = False
        for name in self.named:
            if (value := kwargs.get(name)) is not None and value.untyped_storage()._cdata in places:
                alone = False
        if not alone:
            self._check_shared(tensors, args, kwargs)

    def _check_shared(self, tensors: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        read = {name: args[position] for position, name in self.positional} | {n: kwargs.get(n) for n in self.named}
        for position, (name, tensor) in enumerate(zip(self.written, tensors, strict=True)):
            behind = zip(self.written[position + 1 :], tensors[position + 1 :], strict=True) if self.disjoint else ()
            for other, value in (*read.items(), *behind):
                if isinstance(value, torch.Tensor) and share_memory(tensor, value):
                    raise ValueError(
                        f"{self.op}: {name} is written, so it must not overlap {other}, but they lie in the same memory"
                    )
