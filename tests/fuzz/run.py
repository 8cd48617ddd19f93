"""Runs one case: the op on a device against the reference on the CPU, and what must not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from mla_ops import dispatch
from mla_ops.testing import out_overload, output_names
from mla_ops.testing.checks import _storage_bytes, assert_same_bits, written_arguments
from mla_ops.testing.samples import overload

from .case import Arguments, Case
from .cases import make_case
from .draw import OUTPUTS, Draw, expanded, relaid, relaid_cache, spoiled

SPOILED = 0.12  # share of malformed calls
INTO_BUFFERS = 0.4  # share of calls of the `.out` form
RAN, REFUSED, ABSENT = "ran", "refused", "no such lowering"


@dataclass
class Call:
    """A case as it is called: its arguments where they lie in memory, and what is wrong with it, if anything is."""

    case: Case
    op_name: str
    arguments: Arguments
    outputs: list[str]
    wrong: str
    draw: Draw
    odd: list[str]

    @property
    def op(self) -> Any:
        return overload(self.op_name)


def moved(arguments: Arguments, device: str) -> Arguments:
    """The same views of copies of their storages, on another device."""
    storages: dict[int, torch.Tensor] = {}

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = _storage_bytes(value).to(device, copy=True)
        target = storages[storage._cdata].untyped_storage()
        empty = torch.empty(0, dtype=value.dtype, device=device)
        return empty.set_(target, value.storage_offset(), value.shape, value.stride())

    return {name: move(value) for name, value in arguments.items()}


def draw_call(seed: int) -> Call:
    """The call of a seed."""
    draw = Draw(seed)
    case = make_case(draw)
    tensors = [name for name, value in case.arguments.items() if isinstance(value, torch.Tensor)]
    odd = draw.any_alignment(case.op, [*(name for name in tensors if name not in case.caches), OUTPUTS])
    kept = {*written_arguments(overload(case.op)), "state_block_table"}  # requests with blocks of their own
    arguments: Arguments = {}
    for name, value in case.arguments.items():
        if name in case.caches:
            arguments[name] = relaid_cache(draw, value, case.caches[name])
        elif isinstance(value, torch.Tensor):
            if draw.expands and value.dim() > 1 and name not in kept and draw.chance(0.3):
                arguments[name] = expanded(draw, value)
                continue
            moves = name in odd or draw.chance(0.6)
            aligned = name == "state_cache"
            arguments[name] = relaid(draw, value, odd=name in odd, aligned=aligned) if moves else value
        else:
            arguments[name] = value
    wrong = ""
    if draw.chance(SPOILED):
        arguments, wrong = spoiled(draw, arguments, list(arguments))
    return Call(case, case.op, arguments, [], wrong, draw, odd)


def into_buffers(call: Call, returned: tuple[torch.Tensor, ...]) -> Call:
    """The same call of the `.out` form, into buffers like what the reference returned, wherever they lie."""
    op_name = out_overload(call.op_name)
    names = output_names(overload(op_name))
    sevens = (torch.full(tensor.shape, 7).to(tensor.dtype) for tensor in returned)
    made = [relaid(call.draw, tensor, odd=OUTPUTS in call.odd) for tensor in sevens]
    buffers = dict(zip(names, made, strict=True))
    return replace(call, op_name=op_name, arguments=call.arguments | buffers, outputs=names)


@contextmanager
def _under(lowering: str, op_name: str) -> Iterator[None]:
    with dispatch.override(**{op_name.partition(".")[0]: lowering}) if lowering != "auto" else nullcontext():
        yield


def _attempt(call: Call, arguments: Arguments, lowering: str) -> tuple[tuple[torch.Tensor, ...], Exception | None]:
    try:
        with _under(lowering, call.op_name):
            returned = call.op(**arguments)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        return (), error
    if call.outputs:
        return tuple(arguments[name] for name in call.outputs), None
    returned = returned if isinstance(returned, tuple) else (returned,)
    return tuple(value for value in returned if isinstance(value, torch.Tensor)), None


def run_case(seed: int, device: str) -> tuple[str, str, str]:
    """Runs the case of a seed.

    Returns:
        the op, the lowering that ran it, and what became of it: `RAN`, `REFUSED` or `ABSENT`.

    Raises:
        AssertionError: the device and the CPU differ; the message says in what.
    """
    call = draw_call(seed)
    lowering = call.draw.lowering if device != "cpu" else "triton"
    reference = moved(call.arguments, "cpu")
    expected, refusal = _attempt(call, reference, "reference")
    if refusal is None and expected and call.draw.chance(INTO_BUFFERS):
        call = into_buffers(call, expected)
        reference = moved(call.arguments, "cpu")
        expected, refusal = _attempt(call, reference, "reference")
    before, tested = moved(call.arguments, "cpu"), moved(call.arguments, device)
    found, error = _attempt(call, tested, lowering)
    if device != "cpu":
        torch.cuda.synchronize()
    after = moved(tested, "cpu")
    where = f"{call.op_name} under {lowering}"
    if error is not None and refusal is None:
        if isinstance(error, NotImplementedError) and lowering != "auto":
            return call.op_name, lowering, ABSENT
        raise AssertionError(f"{where}: refused, which the CPU does not: {type(error).__name__}: {error}")
    if refusal is not None:
        assert error is not None, f"{where}: ran, which the CPU refuses: {type(refusal).__name__}: {refusal}"
        _assert_same_refusal(where, error, refusal)
        _assert_unchanged(f"{where}, refused", after, before, list(before))
        return call.op_name, lowering, REFUSED

    written = written_arguments(call.op)
    caches = [name for name in written if call.case.judge is not None and name in call.case.caches]
    held = set(call.outputs) | (set(caches) if call.case.op == "compress_and_cache" else set())
    _assert_unchanged(where, after, {**before, **reference}, [n for n in before if n not in held])
    results = tuple(value.cpu() for value in found)
    for index, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), f"{where}: output {index} has another shape"
        if call.case.judge is None:
            assert_same_bits(ours, theirs, f"{where}: output {index}")
    for name in call.outputs:
        _assert_surroundings(where, name, after[name], before[name])
    # a malformed call may be legal, too; a judge knows only its own case
    if call.case.judge is not None and not call.wrong:
        try:
            call.case.judge(before, after, results, lowering)
        except AssertionError as failure:
            raise AssertionError(f"{where}: {failure}") from None
    return call.op_name, lowering, RAN


def _assert_same_refusal(where: str, error: Exception, refusal: Exception) -> None:
    """The same exception with the same words, the device's name aside."""
    assert type(error) is type(refusal), f"{where}: {type(error).__name__} is not {type(refusal).__name__}: {error}"
    texts = [str(e).split("\n")[0].replace("cuda:0", "cpu").replace("cuda", "cpu") for e in (error, refusal)]
    ours, theirs = (text.replace("CUDA", "CPU") for text in texts)
    assert ours == theirs or isinstance(error, NotImplementedError), f"{where}: says {ours!r}, the CPU {theirs!r}"


def _assert_unchanged(where: str, actual: Arguments, expected: Arguments, names: list[str]) -> None:
    for name in names:
        if isinstance(actual[name], torch.Tensor):
            ours, theirs = _storage_bytes(actual[name]), _storage_bytes(expected[name])
            assert_same_bits(ours, theirs, f"{where}: {name}")


def _assert_surroundings(where: str, name: str, actual: torch.Tensor, before: torch.Tensor) -> None:
    """The bytes around a buffer in its storage are as they were."""
    ours, theirs = (tensor.clone() for tensor in map(_whole, (actual, before)))
    for storage, view in ((ours, actual), (theirs, before)):
        storage.as_strided(view.shape, view.stride(), view.storage_offset()).zero_()
    assert_same_bits(ours, theirs, f"{where}: around {name}")


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The storage as a flat tensor of the view's dtype, the bytes behind the last whole element left out."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)


def describe(seed: int) -> str:
    """One line for each argument of a seed's call."""
    call = draw_call(seed)
    lines = [f"{call.op_name}" + (f" ({call.wrong})" if call.wrong else "")]
    for name, value in call.arguments.items():
        if isinstance(value, torch.Tensor):
            layout = f"strides {tuple(value.stride())}, offset {value.storage_offset()}"
            lines.append(f"  {name}: {str(value.dtype).removeprefix('torch.')}{list(value.shape)}, {layout}")
        else:
            lines.append(f"  {name}: {value}")
    return "\n".join(lines)
