"""Function transforms (`torch.func.grad`, `jvp`, `vmap` and their kin) through the ops: refused with a sentence.

The ops have no derivatives and no batching rules. torch would take what they return for a constant, and derivatives for
zeros. A call that a transform has nothing to do with, for instance on integers inside a differentiated function, goes
on to the next transform, as it would for any operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import FuncTorchInterpreter, retrieve_current_functorch_interpreter
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

# The key that every call inside a transform reaches first, and no other call.
DISPATCH_KEY = "FuncTorchDynamicLayerFrontMode"
Transform = _functorch.TransformType


def has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def tangent_message(op: str, name: str) -> str:
    return (
        f"{op}: {name} has a forward-mode tangent, but {op} has no derivative: "
        f"pass torch.autograd.forward_ad.unpack_dual({name}).primal"
    )


def kernel(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The kernel of `op` for `DISPATCH_KEY`."""
    schema = op._schema
    name = schema.name.removeprefix("mla::") + (f".{schema.overload_name}" if schema.overload_name else "")

    def inside_transform(*args: Any, **kwargs: Any) -> Any:
        interpreter = retrieve_current_functorch_interpreter()
        named = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
        for argument, value in named.items():
            if isinstance(value, torch.Tensor):
                _refuse(name, argument, value, interpreter)
        level = interpreter.level()
        if interpreter.key() != Transform.Functionalize:
            args, kwargs = tree_map_only(torch.Tensor, lambda t: _functorch._unwrap_for_grad(t, level), (args, kwargs))
            with interpreter.lower():
                return op(*args, **kwargs)
        if schema.is_mutable:
            raise NotImplementedError(
                f"{name}: torch.func.functionalize cannot replace an op that writes into its arguments: "
                "use torch.compile"
            )
        args, kwargs = tree_map_only(torch.Tensor, _value_of_functional, (args, kwargs))
        with interpreter.lower():
            returned = op(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda t: _functorch._wrap_functional_tensor(t, level), returned)

    return inside_transform


def _value_of_functional(tensor: torch.Tensor) -> torch.Tensor:
    if not torch._is_functional_tensor(tensor):
        return tensor
    torch._sync(tensor)  # type: ignore[attr-defined]
    return torch._from_functional_tensor(tensor)


def _refuse(op: str, name: str, tensor: torch.Tensor, interpreter: FuncTorchInterpreter) -> None:
    """Raises if the transform does something about `tensor`."""
    key = interpreter.key()
    if key == Transform.Grad and torch.is_grad_enabled():
        if _functorch.is_gradtrackingtensor(tensor) and tensor.requires_grad:
            raise NotImplementedError(
                f"{op}: torch.func differentiates {name}, but {op} has no backward: detach {name}"
            )
    elif key == Transform.Jvp:
        if has_tangent(tensor):
            raise NotImplementedError(tangent_message(op, name))
    elif key == Transform.Vmap and _functorch.is_batchedtensor(tensor):
        raise NotImplementedError(
            f"{op}: torch.vmap batches {name}, but {op} has no batching rule: it takes any number of tokens or rows, "
            "so pass those of the whole batch in one call"
        )
