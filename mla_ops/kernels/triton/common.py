"""Shared by all Triton kernels: the jit decorator, and facts about the device."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

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
INTEGERS = {tl.int32: "i32", tl.int64: "i64"}


class Constant(str):  # noqa: SLOT000 (a dataclass adds the fields)
    """Fields that a kernel takes as one constant, and their text: hooks of Triton's cache write constants as JSON.

    Constants are equal if their text is. A named tuple would do, if Triton's interpreter did not make a plain one.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "Constant":
        values = {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        values.update(zip(values, args, strict=False))
        values.update(kwargs)
        return super().__new__(cls, f"{cls.__name__}({', '.join(f'{name}={value}' for name, value in values.items())})")


class Pages(NamedTuple):
    """How a kernel finds the rows of a paged cache; `num_requests` and `max_blocks` are those of the block table."""

    num_blocks: tl.int64
    block_size: tl.int32
    num_requests: tl.int32
    max_blocks: tl.int32


class SizedFunction(triton.JITFunction):
    """A kernel that takes integers in tuples, too, which are not specialised either.

    Triton specialises integers in tuples whatever it is told. So such a parameter is a single integer for Triton's
    binder, whose answer is then replaced by the types of the tuple.

    Args:
        tuples: the types of each such parameter.
    """

    def __init__(self, fn: Callable[..., Any], tuples: dict[str, tuple[str, ...]], **options: Any) -> None:
        super().__init__(fn, **options)
        self.tuples = tuples

    def create_binder(self) -> tuple[Any, ...]:
        *others, bind = super().create_binder()
        fixed = [(self.arg_names.index(name), (types, (None,) * len(types))) for name, types in self.tuples.items()]

        def bind_tuples(*args: Any, **kwargs: Any) -> tuple[dict[str, Any], list[Any], dict[str, Any]]:
            bound, specialization, options = bind(*args, **kwargs)
            for place, types in fixed:
                specialization[place] = types
            return bound, specialization, options

        return (*others, bind_tuples)


def _types_of(annotation: Any) -> tuple[str, ...] | None:
    """Triton's names of the types of a tuple's integers; None if a parameter is no such tuple."""
    if annotation is Pages:
        return Pages(*(INTEGERS[kind] for kind in Pages.__annotations__.values()))
    return tuple(INTEGERS[kind] for kind in annotation) if isinstance(annotation, tuple) else None


def sized_jit(*, any_alignment: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit` for kernels whose integer arguments change from step to step.

    Every parameter annotated `tl.int32`, `tl.int64`, `Pages` or with a tuple of the former keeps these types and is
    never specialised, so that a new number of tokens, requests, blocks or a new stride compiles nothing. (The
    annotation alone still specialises on divisibility by 16 and on the value 1.)

    Args:
        any_alignment: pointers that are not specialised on 16-byte alignment either: those to small integer tensors,
            which callers slice at any element.
    """

    def decorate(fn: Callable[..., Any]) -> Any:
        signature = inspect.signature(fn)
        every = signature.parameters.values()
        tuples = {p.name: types for p in every if (types := _types_of(p.annotation)) is not None}
        sizes = [*tuples, *(p.name for p in every if p.annotation in (tl.int32, tl.int64))]
        options = {"do_not_specialize": sizes, "do_not_specialize_on_alignment": list(any_alignment)}
        if INTERPRETED or not tuples:
            return triton.jit(fn, **options)
        seen = [p.replace(annotation=tl.int64) if p.name in tuples else p for p in every]
        fn.__signature__ = signature.replace(parameters=seen)  # type: ignore[attr-defined]
        return SizedFunction(fn, tuples, **options)

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
