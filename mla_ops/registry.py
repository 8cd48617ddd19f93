"""Registration of `torch.ops.mla.*`. The only file that touches `torch.library`.

`Library.define` and `impl`, not `custom_op`: 2 microseconds a call with 12 arguments against 8 to 33. Mutating ops
return `()`; computing ops return fresh tensors and have an `.out` overload that writes into the caller's and returns
`()` too. (An `.out` that returns its argument under `torch.Tag.out` writes a temporary and copies it back when the
buffer is a graph input, which is what a captured loop passes; `-> ()` is written in place on every torch.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import dispatch

_LIBRARY = torch.library.Library("mla", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)

# shape and dtype of each output; the fake and the real kernel allocate from the same description
OutputSpec = tuple[tuple[int, ...], torch.dtype]


def require(condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """Raises ValueError unless `condition` holds; a symbolic one becomes a guard or a runtime assertion.

    `torch._check_value` does both, at 4 microseconds a call. With plain integers, which is every eager call, this costs
    a comparison.
    """
    if condition is not True:
        torch._check_value(condition, message)


def _register(schema: str, fake: Callable[..., Any], real: Callable[..., Any]) -> torch._ops.OpOverload:
    qualified = schema.split("(", 1)[0]
    name, _, overload = qualified.partition(".")
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(qualified, real, "CPU")
    _LIBRARY.impl(qualified, real, "CUDA")
    torch.library.register_fake(f"mla::{qualified}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops.mla, name), overload or "default")


def define_mutating(
    schema: str, *, check: Callable[..., None], describe: Callable[..., dispatch.Call]
) -> torch._ops.OpOverload:
    """An op that writes into its arguments and returns nothing.

    Args:
        schema: by hand; it is the contract.
        check: raises on what the contract does not allow; runs for fake and real tensors.
        describe: the facts that dispatch chooses a lowering by.
    """

    def fake(*args: Any, **kwargs: Any) -> None:
        check(*args, **kwargs)

    def real(*args: Any, **kwargs: Any) -> None:
        check(*args, **kwargs)
        call = describe(*args, **kwargs)
        while True:
            lowering = dispatch.select(call)
            try:
                return lowering.run(*args, **kwargs)
            except dispatch.LoweringUnavailable as error:
                dispatch.strike_off(call, lowering, error)

    return _register(schema, fake, real)


def define_computing(
    schema: str,
    out_schema: str,
    *,
    check: Callable[..., None],
    outputs: Callable[..., dict[str, OutputSpec]],
    describe: Callable[..., dispatch.Call],
    zeroed: bool = False,
) -> tuple[torch._ops.OpOverload, torch._ops.OpOverload]:
    """An op that returns fresh tensors, and its `.out` overload.

    Args:
        schema, out_schema: by hand. `out_schema` appends the outputs of `outputs`, by name, and returns `()`. An
            overload `op.form` has `op.form_out`.
        check: as in `define_mutating`; sees neither outputs nor their names.
        outputs: name to (shape, dtype) of each output, in order.
        describe: as in `define_mutating`.
        zeroed: fresh outputs start as zeros, for ops that need not write every row.

    Lowerings implement the `.out` form; one may have a `compute` beside it.
    """
    out_op = out_schema.split("(", 1)[0]

    def allocate(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        new = torch.zeros if zeroed else torch.empty
        return {
            name: new(shape, dtype=dtype, device=args[0].device)
            for name, (shape, dtype) in outputs(*args, **kwargs).items()
        }

    def pack(tensors: dict[str, torch.Tensor]) -> Any:
        values = tuple(tensors.values())
        return values if len(values) > 1 else values[0]

    def fake(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return pack(allocate(*args, **kwargs))

    def real(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        call = describe(*args, **kwargs)
        while True:
            lowering = dispatch.select(call)
            try:
                if lowering.compute is not None:
                    return lowering.compute(*args, **kwargs)
                tensors = allocate(*args, **kwargs)
                lowering.run(*args, **kwargs, **tensors)
                return pack(tensors)
            except dispatch.LoweringUnavailable as error:
                dispatch.strike_off(call, lowering, error)

    names = tuple(_output_names(out_schema))

    def check_out(*args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        tensors = {name: kwargs.pop(name) for name in names}
        check(*args, **kwargs)
        for name, (shape, dtype) in outputs(*args, **kwargs).items():
            _check_output(out_op, name, tensors[name], shape, dtype, args[0].device)
        return kwargs, tensors

    def fake_out(*args: Any, **kwargs: Any) -> None:
        check_out(*args, **kwargs)

    def real_out(*args: Any, **kwargs: Any) -> None:
        kwargs, tensors = check_out(*args, **kwargs)
        call = describe(*args, **kwargs)
        while True:
            lowering = dispatch.select(call)
            try:
                return lowering.run(*args, **kwargs, **tensors)
            except dispatch.LoweringUnavailable as error:
                dispatch.strike_off(call, lowering, error)

    return _register(schema, fake, real), _register(out_schema, fake_out, real_out)


def _output_names(out_schema: str) -> list[str]:
    """Names of the written arguments that follow the last `*`: the outputs of an `.out` overload."""
    arguments = torch._C.parse_schema(out_schema.replace(out_schema.split("(", 1)[0], "mla::x", 1)).arguments
    return [a.name for a in arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write]


def _check_output(
    op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device}, got {tensor.device}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{op}: {name} requires grad, but {op} has no backward: call it under torch.no_grad(), or detach {name}"
        )
    actual = tensor.shape
    if len(actual) != len(shape):
        raise ValueError(f"{op}: {name} must have shape {tuple(shape)}, got {tuple(actual)}")
    for size, expected in zip(actual, shape, strict=True):
        if (same := size == expected) is not True:
            require(same, lambda: f"{op}: {name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if (dense := tensor.stride()[-1] == 1) is not True:
        require(dense, lambda: f"{op}: {name} must be contiguous in its last dimension, got strides {tensor.stride()}")
