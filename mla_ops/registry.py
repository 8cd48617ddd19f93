"""Registration of `torch.ops.mla.*`. The only file that touches `torch.library`.

`Library.define` and `impl`, not `custom_op`: 2 microseconds a call with 12 arguments against 8 to 33. Mutating ops
return `()`; computing ops return fresh tensors and have an `.out` overload that writes into the caller's and returns
`()` too. (An `.out` that returns its argument under `torch.Tag.out` writes a temporary and copies it back when the
buffer is a graph input, which is what a captured loop passes; `-> ()` is written in place on every torch.)
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
import string
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, overload

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from . import dispatch, layouts, transforms
from .overlap import Writes

_LIBRARY = torch.library.Library("mla", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)

# name of each result, its shape and its dtype; the fake and the real kernel allocate from the same description
Outputs = dict[str, tuple[tuple[int, ...], torch.dtype]]
Contract = tuple[dispatch.Call, Outputs]
P = ParamSpec("P")
_CONTRACTS: dict[str, Callable[..., Contract]] = {}
# as torch's parser of arguments says it
_WRONG_TYPE = re.compile(
    r"^mla::\w+\(\) Expected a value of type '(\S+)' for argument '(\w+)' but instead found type '(\S+)'"
)


def require(condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """Raises ValueError unless `condition` holds; a symbolic one becomes a guard or a runtime assertion.

    `torch._check_value` does both, at 4 microseconds a call. With plain integers, which is every eager call, this costs
    a comparison.
    """
    if condition is not True:
        torch._check_value(condition, message)


def is_single(shape: Sequence[int | torch.SymInt]) -> list[bool | torch.SymBool]:
    """Whether no stride of the last dimension is used: it has one entry, or the tensor none."""
    return [shape[-1] == 1, *(size == 0 for size in shape)]


def require_one_of(conditions: Sequence[bool | torch.SymBool], message: Callable[[], str]) -> None:
    """Raises ValueError unless one of `conditions` holds; symbolic ones become one guard."""
    if not any(condition is True for condition in conditions):
        symbolic = [condition for condition in conditions if condition is not False]
        require(functools.reduce(operator.or_, symbolic) if symbolic else False, message)


def _register(schema: str, fake: Callable[..., Any], real: Callable[..., Any]) -> torch._ops.OpOverload:
    qualified = schema.split("(", 1)[0]
    name, _, overload = qualified.partition(".")
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(qualified, _refusing_none(schema, real), "CPU")
    _LIBRARY.impl(qualified, _on_its_device(schema, real), "CUDA")
    torch.library.register_fake(f"mla::{qualified}", _refusing_none(schema, fake), lib=_LIBRARY)
    op: torch._ops.OpOverload = getattr(getattr(torch.ops.mla, name), overload or "default")
    _LIBRARY.impl(qualified, transforms.kernel(op), transforms.DISPATCH_KEY)
    for key in layouts.DISPATCH_KEYS:
        _LIBRARY.impl(qualified, layouts.refusal(qualified, op._schema), key)
    _LIBRARY.impl(qualified, layouts.resolved(qualified, op), layouts.NEGATIVE_KEY)
    return op


def _none_refusal(schema: str) -> Callable[[tuple[Any, ...], dict[str, Any]], None]:
    """A function that raises a TypeError where None stands for a tensor of the schema, which torch lets through.

    They stumble over it, by an AttributeError, before they write anything. To look for it in every call would cost
    0.3 microseconds.
    """
    required = [(place, a) for place, a in enumerate(_arguments(schema)) if str(a.type) == "Tensor"]

    def refuse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for place, argument in required:
            if (kwargs.get(argument.name) if argument.kwarg_only else args[place]) is None:
                name = schema.split("(", 1)[0]
                raise TypeError(f"{name}: {argument.name} must be a tensor, got None") from None

    return refuse


def _refusing_none(schema: str, function: Callable[..., Any]) -> Callable[..., Any]:
    refuse_none = _none_refusal(schema)

    def refusing(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except AttributeError:
            refuse_none(args, kwargs)
            raise

    return refusing


def _on_its_device(schema: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Does what `_refusing_none` does, with the device of the first argument as the current one.

    Libraries launch and capture on the current device, and a user's tensors may be on another.
    """
    refuse_none = _none_refusal(schema)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            index = args[0].get_device()
            if index == torch._C._cuda_getDevice():
                return real(*args, **kwargs)
            with torch.cuda.device(index):
                return real(*args, **kwargs)
        except AttributeError:
            refuse_none(args, kwargs)
            raise

    return guarded


def _run(call: dispatch.Call, use: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns `use(lowering, args, kwargs)` for the lowering of the call or, if need be, one behind it.

    Lowerings that are written in torch's own operations, as that of CPU tensors is, run outside of autocast, which
    would round their float32. On a CPU they run below autograd, too: each operation would count a version, and refuse
    inference tensors, where a CUDA kernel does neither.
    """
    if call.device.type == "cpu":
        with torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableAutocast():
            return _use_available(call, use, args, kwargs)
    if torch.is_autocast_enabled("cuda"):
        with torch._C._DisableAutocast():
            return _use_available(call, use, args, kwargs)
    return _use_available(call, use, args, kwargs)


def _use_available(call: dispatch.Call, use: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    while True:
        lowering = dispatch.select(call)
        try:
            return use(lowering, args, kwargs)
        except dispatch.LoweringUnavailable as error:
            dispatch.strike_off(call, lowering, error)


def _write(lowering: dispatch.Lowering, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    lowering.run(*args, **kwargs)


def _types_of(annotation: str) -> str:
    """The schema's type for an annotation of a contract."""
    kind, _, optional = annotation.partition(" | ")
    return {"torch.Tensor": "Tensor", "int": "SymInt"}.get(kind, kind) + ("?" if optional else "")


def schemas_of(
    op: str, contract: Callable[..., Any], writes: Sequence[str], returns: Sequence[str]
) -> tuple[str, str | None]:
    """The schema of an op and, if it returns tensors, that of its `.out` overload."""
    aliases = iter(string.ascii_lowercase)
    arguments = []
    for name, parameter in inspect.signature(contract).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        kind = _types_of(parameter.annotation) + (f"({next(aliases)}!)" if name in writes else "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        arguments.append(f"{kind} {name}{default}")
    schema = f"{op}({', '.join(arguments)}) -> "
    if not returns:
        return f"{schema}()", None
    base, _, overload = op.partition(".")
    given = [*arguments, *([] if "*" in arguments else ["*"])]
    written = [f"Tensor({next(aliases)}!) {name}" for name in returns]
    out_schema = f"{base}.{overload + '_' if overload else ''}out({', '.join((*given, *written))}) -> ()"
    return schema + ("Tensor" if len(returns) == 1 else f"({', '.join(['Tensor'] * len(returns))})"), out_schema


def _public(op: torch._ops.OpOverload, contract: Callable[..., Any], result: str) -> Callable[..., Any]:
    """The function that users call: the name, arguments and docstring of the contract, the results of the op.

    Arguments that are missing, unknown or of another type are a TypeError as of any function, where torch raises a
    RuntimeError, which prints the whole value.
    """
    signature = inspect.signature(contract).replace(return_annotation=result)
    name = contract.__name__
    if name.startswith("_"):  # a part of the function that has the op's name
        name = op._schema.name.removeprefix("mla::")

    @functools.wraps(contract)
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            return op(*args, **kwargs)
        except RuntimeError as error:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as wrong:
                raise TypeError(f"{name}: {wrong}") from None
            if wrong_type := _WRONG_TYPE.search(str(error)):
                expected, argument, found = wrong_type.groups()
                raise TypeError(f"{name}: {argument} must be of type {expected}, got {found}") from None
            raise

    function.__annotations__ = {**contract.__annotations__, "return": result}
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def mutating(*writes: str, disjoint: bool = True) -> Callable[[Callable[P, dispatch.Call]], Callable[P, None]]:
    """Makes a contract an op, which writes into its arguments and returns nothing, and the function that calls it.

    A contract is the one declaration of an op. Its signature is the schema, its docstring the reference. Its body
    raises on what the op does not allow, for fake and real tensors, and returns the facts that dispatch chooses a
    lowering by.

    Args:
        writes: names of the arguments that it writes; positional ones.
        disjoint: whether what is written must lie apart. Caches need not: engines give them blocks of one memory.
    """

    def define(contract: Callable[P, dispatch.Call]) -> Callable[P, None]:
        op = contract.__name__
        schema, _ = schemas_of(op, contract, writes, ())
        arguments = _arguments(schema)
        written = [position for position, argument in enumerate(arguments) if _is_written(argument)]
        overlap = Writes(op, arguments, writes, disjoint=disjoint)

        def fake(*args: Any, **kwargs: Any) -> None:
            contract(*args, **kwargs)
            overlap.check_each([args[position] for position in written])

        def real(*args: Any, **kwargs: Any) -> None:
            call = contract(*args, **kwargs)
            tensors = [args[position] for position in written]
            overlap.check(tensors, args, kwargs)
            _run(call, _write, args, kwargs)
            increment_version(tensors)

        _CONTRACTS[op] = lambda *args, **kwargs: (contract(*args, **kwargs), {})
        return _public(_register(schema, fake, real), contract, "None")

    return define


@overload
def computing(
    result: str, /, *, op: str = "", writes: Sequence[str] = (), zeroed: bool = False
) -> Callable[[Callable[P, Contract]], Callable[P, torch.Tensor]]: ...
@overload
def computing(
    first: str, second: str, /, *, op: str = "", writes: Sequence[str] = (), zeroed: bool = False
) -> Callable[[Callable[P, Contract]], Callable[P, tuple[torch.Tensor, torch.Tensor]]]: ...
def computing(
    *returns: str, op: str = "", writes: Sequence[str] = (), zeroed: bool = False
) -> Callable[[Callable[..., Contract]], Callable[..., Any]]:
    """Makes a contract, as in `mutating`, an op that returns fresh tensors, its `.out` overload, and the function.

    The contract returns the shape and dtype of each result as well, in order.

    Args:
        returns: names of the results. `op.out` takes these as arguments to write; an overload `op.form` has
            `op.form_out`.
        op: its name, if it is not that of the contract.
        writes: names of arguments that it declares written.
        zeroed: fresh results start as zeros, for ops that need not write every row.

    Lowerings implement the `.out` form; one may have a `compute` beside it.
    """

    def define(contract: Callable[..., Contract]) -> Callable[..., Any]:
        name = op or contract.__name__
        schema, out_schema = schemas_of(name, contract, writes, returns)
        assert out_schema is not None
        out_op = out_schema.split("(", 1)[0]
        new = torch.zeros if zeroed else torch.empty

        def allocate(device: torch.device, outputs: Outputs) -> dict[str, torch.Tensor]:
            return {name: new(shape, dtype=dtype, device=device) for name, (shape, dtype) in outputs.items()}

        def pack(tensors: dict[str, torch.Tensor]) -> Any:
            values = tuple(tensors.values())
            return values if len(values) > 1 else values[0]

        def fake(*args: Any, **kwargs: Any) -> Any:
            _, outputs = contract(*args, **kwargs)
            return pack(allocate(args[0].device, outputs))

        def real(*args: Any, **kwargs: Any) -> Any:
            call, outputs = contract(*args, **kwargs)

            def compute(lowering: dispatch.Lowering, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                if lowering.compute is not None:
                    return lowering.compute(*args, **kwargs)
                tensors = allocate(args[0].device, outputs)
                lowering.run(*args, **kwargs, **tensors)
                return pack(tensors)

            return _run(call, compute, args, kwargs)

        overlap = Writes(out_op, _arguments(out_schema), returns, disjoint=True)

        def check_out(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dispatch.Call, dict[str, torch.Tensor]]:
            tensors = {name: kwargs.pop(name) for name in returns}
            call, outputs = contract(*args, **kwargs)
            for name, (shape, dtype) in outputs.items():
                _check_output(out_op, name, tensors[name], shape, dtype, args[0].device)
            return call, tensors

        def fake_out(*args: Any, **kwargs: Any) -> None:
            _, tensors = check_out(args, kwargs)
            overlap.check_each(list(tensors.values()))

        def real_out(*args: Any, **kwargs: Any) -> None:
            call, tensors = check_out(args, kwargs)
            overlap.check(list(tensors.values()), args, kwargs)
            _run(call, _write, args, {**kwargs, **tensors})
            increment_version(tensors.values())

        _CONTRACTS[name] = contract
        # first, since a call that names no overload tries them in this order
        default = _register(schema, fake, real)
        _register(out_schema, fake_out, real_out)
        result = "torch.Tensor" if len(returns) == 1 else "tuple[torch.Tensor, torch.Tensor]"
        return _public(default, contract, result)

    return define


def describe(op: str, *args: Any, **kwargs: Any) -> dispatch.Call:
    """The facts that dispatch chooses a lowering of `op` by for these arguments: what `dispatch.explain` takes.

    Raises:
        ValueError: no such op; an overload is `op.form`.
        TypeError, ValueError: arguments that the op does not allow.
    """
    return _contract(op, "describe")(*args, **kwargs)[0]


def outputs_of(op: str, *args: Any, **kwargs: Any) -> Outputs:
    """Shape and dtype of each result of `op` for these arguments; raises as `describe` does."""
    return _contract(op, "outputs_of")(*args, **kwargs)[1]


def _contract(op: str, caller: str) -> Callable[..., Contract]:
    if op not in _CONTRACTS:
        raise ValueError(f"registry.{caller}: unknown op '{op}', expected one of {sorted(_CONTRACTS)}")
    return _CONTRACTS[op]


def _arguments(schema: str) -> Sequence[torch.Argument]:
    return torch._C.parse_schema(schema.replace(schema.split("(", 1)[0], "mla::x", 1)).arguments


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _check_output(
    op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device}, got {tensor.device}")
    if forward_ad._current_level >= 0 and transforms.has_tangent(tensor):
        raise NotImplementedError(transforms.tangent_message(op, name))
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
        require_one_of(
            (dense, *is_single(shape)),
            lambda: f"{op}: {name} must be contiguous in its last dimension, got strides {tensor.stride()}",
        )
