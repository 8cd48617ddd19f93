"""Tensors that no lowering takes: sparse, nested and quantised ones, and those of other devices. Refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

# Calls reach these keys that have no kernel of their own, and no others.
DISPATCH_KEYS = ("CompositeExplicitAutograd", "AutogradNestedTensor")
# Calls with a view such as `torch.conj(x).imag`, whose values are the negatives of its memory.
NEGATIVE_KEY = "Negative"


def _tensors(schema: torch._C.FunctionSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    named = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    return ((a, named[a.name]) for a in schema.arguments if isinstance(named.get(a.name), torch.Tensor))


def _kind(tensor: torch.Tensor) -> str:
    """The reason why a tensor is not a dense one on a CPU or a GPU, "" if it is."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"one of layout {tensor.layout}"
    if tensor.is_quantized:
        return f"a quantized tensor, {tensor.dtype}"
    return "" if tensor.device.type in ("cpu", "cuda", "meta") else f"one on {tensor.device}"


def refusal(op: str, schema: torch._C.FunctionSchema) -> Callable[..., Any]:
    """The kernel of `op` for `DISPATCH_KEYS`: raises TypeError."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        for argument, tensor in _tensors(schema, args, kwargs):
            if kind := _kind(tensor):
                raise TypeError(f"{op}: {argument.name} must be a dense tensor on a CPU or a CUDA GPU, got {kind}")
        # a call without any tensor: every op takes one
        required = next(argument.name for argument in schema.arguments if str(argument.type) == "Tensor")
        raise TypeError(f"{op}: {required} must be a tensor, got None")

    return refuse


def resolved(op: str, overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """The kernel of `op` for `NEGATIVE_KEY`: reads copies of such views, refuses to write into one."""

    def call(*args: Any, **kwargs: Any) -> Any:
        for argument, tensor in _tensors(overload._schema, args, kwargs):
            if tensor.is_neg() and argument.alias_info is not None and argument.alias_info.is_write:
                raise ValueError(f"{op}: {argument.name} must not be a negated view, got one: pass its resolve_neg()")
        resolve = torch.utils._pytree.tree_map_only
        args, kwargs = resolve(torch.Tensor, torch.Tensor.resolve_neg, (args, kwargs))
        return overload(*args, **kwargs)

    return call
