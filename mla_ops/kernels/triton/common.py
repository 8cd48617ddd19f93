"""Shared by all Triton kernels: the jit decorator, and facts about the device."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ...dispatch import device_capability

# decided by Triton when a kernel is decorated, so it is read once, with the kernels' import
INTERPRETED: bool = triton.knobs.runtime.interpret


def _accept_one_element_bounds() -> None:
    """Lets a kernel's loop bounds be tensors in the interpreter.

    Triton converts them by `int()` of an array of one element, which NumPy 2.4 refuses; `.item()` does the same.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_item(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_item


if INTERPRETED:
    _accept_one_element_bounds()

# From 3.9 on Triton keeps operands in registers until a product uses them: more warps or smaller tiles, or they spill.
KEEPS_OPERANDS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
# Up to 3.6 there is room for queries in registers beside the accumulators of eight warps.
HOLDS_QUERIES = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)

# tokens, requests and lengths run through these types; see `sized_jit`
SIZE_TYPES = (tl.int32, tl.int64)


class Constant(str):  # noqa: SLOT000 (a dataclass adds the fields)
    """Fields that a kernel takes as one constant, and their text: hooks of Triton's cache write constants as JSON.

    Constants are equal if their text is. A named tuple would do, if Triton's interpreter did not make a plain one.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "Constant":
        values = {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        values.update(zip(values, args, strict=False))
        values.update(kwargs)
        return super().__new__(cls, f"{cls.__name__}({', '.join(f'{name}={value}' for name, value in values.items())})")


def sized_jit(*, any_alignment: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit` for kernels whose integer arguments change from step to step.

    Every parameter annotated `tl.int32` or `tl.int64` keeps that type and is never specialised, so that a new number
    of tokens, requests, blocks or a new stride compiles nothing. (The annotation alone still specialises on
    divisibility by 16 and on the value 1.)

    Args:
        any_alignment: pointers that are not specialised on 16-byte alignment either: those to small integer tensors,
            which callers slice at any element.
    """

    def decorate(fn: Callable[..., Any]) -> Any:
        sizes = [name for name, p in inspect.signature(fn).parameters.items() if p.annotation in SIZE_TYPES]
        return triton.jit(fn, do_not_specialize=sizes, do_not_specialize_on_alignment=list(any_alignment))

    return decorate


@functools.cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def shared_of_sm(device: torch.device) -> int:
    """Bytes of shared memory of a multiprocessor; 0 for the interpreter."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor if device.type == "cuda" else 0


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability to pick tiles by; the interpreter takes those of the smallest machine."""
    return (0, 0) if INTERPRETED else device_capability(device)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
