"""Checks that `torch.library.opcheck` does not make.

opcheck compares what an op returns, never what it wrote; it looks at the strides of a fake from torch 2.13 on; and it
knows nothing of clones or recompiles. Each of these says so with an AssertionError that names the argument.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .. import dispatch
from .samples import Sample, overload


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the whole storage that `tensor` is a view of."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def clone_sample(sample: Sample) -> Sample:
    """The same call on its own memory, with the same strides, offsets and padding around every view."""
    copies: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        cloned = copies.setdefault(storage._cdata, storage.clone())
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        return empty.set_(cloned, value.storage_offset(), value.shape, value.stride())

    return replace(sample, args=tree_map(copy, sample.args), kwargs=tree_map(copy, sample.kwargs))


def named_arguments(sample: Sample) -> dict[str, Any]:
    """Argument name to value, by the op's schema; arguments left at their default are absent."""
    names = [argument.name for argument in sample.op._schema.arguments]
    return {**dict(zip(names, sample.args, strict=False)), **sample.kwargs}


def written_arguments(op: Any) -> list[str]:
    """Names of the arguments that a schema declares as written. Readers of a cache declare it too."""
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal shape, dtype and bit pattern: NaN equals itself, and 0.0 is not -0.0."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} is not {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} is not {expected.dtype}"
    left, right = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (actual, expected))
    different = int((left != right).sum())
    assert not different, f"{what}: {different} of {left.numel()} bytes differ"


def assert_all_same(actual: Any, expected: Any, what: str) -> None:
    """Tensors of two structures, bit by bit."""
    for index, (left, right) in enumerate(zip(tree_leaves(actual), tree_leaves(expected), strict=True)):
        assert_same_bits(left, right, f"{what} {index}")


def assert_same_memory(actual: Sample, expected: Sample, what: str, *, names: Sequence[str] | None = None) -> None:
    """The storages behind two samples' tensors hold the same bytes, padding between blocks included."""
    theirs = named_arguments(expected)
    for name, value in named_arguments(actual).items():
        if isinstance(value, torch.Tensor) and value.device.type != "meta" and (names is None or name in names):
            assert_same_bits(_storage_bytes(value), _storage_bytes(theirs[name]), f"{what}: {name}")


def check_compiled(samples: Sequence[Sample], backend: str = "aot_eager", *, dynamic: bool = False) -> None:
    """An op does compiled what it does eagerly, to the bit: what it returns, and every byte of its arguments.

    Args:
        samples: of one op. One graph calls it with all of them.
        backend: of torch.compile.
        dynamic: whether sizes are symbols.
    """

    def call_all(op: Any, calls: list[tuple[Any, Any]]) -> list[Any]:
        return [op(*args, **kwargs) for args, kwargs in calls]

    torch._dynamo.reset()
    function = torch.compile(call_all, backend=backend, fullgraph=True, dynamic=dynamic)
    compiled = [clone_sample(sample) for sample in samples]
    # an op takes floats as numbers: of symbols, Dynamo would find that out at the end and begin again
    with torch._dynamo.config.patch(specialize_float=True):
        results = function(samples[0].op, [(sample.args, sample.kwargs) for sample in compiled])
    for sample, result, used in zip(samples, results, compiled, strict=True):
        eager = clone_sample(sample)
        expected = sample.op(*eager.args, **eager.kwargs)
        for index, (left, right) in enumerate(zip(tree_leaves(result), tree_leaves(expected), strict=True)):
            if isinstance(right, torch.Tensor):
                assert_same_bits(left, right, f"{sample.op} ({sample.name}), output {index}, compiled and eager")
        assert_same_memory(used, eager, f"{sample.op} ({sample.name}), compiled and eager")


def check_repeatable(sample: Sample) -> None:
    """Two calls on equal inputs write and return the same bits, and leave what the schema does not declare alone."""
    first, second = clone_sample(sample), clone_sample(sample)
    for left, right in zip(
        tree_leaves(sample.op(*first.args, **first.kwargs)),
        tree_leaves(sample.op(*second.args, **second.kwargs)),
        strict=True,
    ):
        if isinstance(left, torch.Tensor):
            assert_same_bits(left, right, f"{sample.op} ({sample.name}), the second call against the first")
    assert_same_memory(first, second, f"{sample.op} ({sample.name}), the second call against the first")
    written = written_arguments(sample.op)
    read_only = [name for name in named_arguments(sample) if name not in written]
    assert_same_memory(first, sample, f"{sample.op} ({sample.name}), an argument that is only read", names=read_only)


def check_fake(sample: Sample) -> None:
    """The fake returns the shapes, dtypes, devices, strides and offsets that the real op returns."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    real_sample = clone_sample(sample)
    real = sample.op(*real_sample.args, **real_sample.kwargs)
    mode = FakeTensorMode()

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    with mode:
        faked = sample.op(*tree_map(fake, sample.args), **tree_map(fake, sample.kwargs))
    for index, (left, right) in enumerate(zip(tree_leaves(faked), tree_leaves(real), strict=True)):
        if not isinstance(right, torch.Tensor):
            assert left == right, f"{sample.op} ({sample.name}), output {index}: fake {left}, real {right}"
            continue
        for fact in ("shape", "dtype", "device", "stride", "storage_offset"):
            ours, theirs = (
                getattr(tensor, fact)() if callable(getattr(tensor, fact)) else getattr(tensor, fact)
                for tensor in (left, right)
            )
            assert ours == theirs, f"{sample.op} ({sample.name}), output {index}: fake {fact} {ours}, real {theirs}"


_ALLOCATION = re.compile(r"= empty_strided\w*\(\(([^()]*)\),")
_COPY = re.compile(r"aten\.clone|aten\.copy_|clone_preserve_strides")


def large_allocations(codes: Sequence[str], num_elements: int) -> list[str]:
    """Lines of Inductor's generated code that allocate `num_elements` or more, or copy through a fallback.

    A size that is a symbol counts as 1, so compile with the cache's own sizes static, or look for the row width in a
    dynamic size (`num_elements` = one block) instead.
    """
    found = []
    for line in "\n".join(codes).splitlines():
        allocation = _ALLOCATION.search(line)
        if allocation is not None:
            sizes = [int(size) for size in re.findall(r"(?<![\w.])\d+", allocation[1])]
            if math.prod(sizes) >= num_elements:
                found.append(line.strip())
        elif _COPY.search(line):
            found.append(line.strip())
    return found


@contextlib.contextmanager
def record_calls() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """(op, arguments as the lowering got them) of every call of a lowering inside the block.

    Tells whether a kernel got the caller's own memory: compare `data_ptr()`.
    """
    calls: list[tuple[str, dict[str, Any]]] = []
    select = dispatch.select

    def recording(call: dispatch.Call) -> dispatch.Lowering:
        lowering = select(call)
        schema = overload(call.op)._schema

        def run(*args: Any, **kwargs: Any) -> None:
            names = [argument.name for argument in schema.arguments]
            calls.append((call.op, {**dict(zip(names, args, strict=False)), **kwargs}))
            lowering.run(*args, **kwargs)

        return replace(lowering, run=run, compute=None)

    dispatch.select = recording
    try:
        yield calls
    finally:
        dispatch.select = select


def run_without_recompiling(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    *,
    unbacked: Callable[..., Sequence[tuple[torch.Tensor, int]]],
    backend: str = "aot_eager",
) -> list[Any]:
    """Runs `function` compiled over `calls`, and asserts that one graph served them all.

    Args:
        function: takes the elements of one of `calls`.
        calls: arguments of each call; sizes differ from one to the next.
        unbacked: for one call's arguments, the (tensor, dim) pairs whose size varies. They are traced as unbacked
            sizes, so that 0 and 1 are like any other.
        backend: of torch.compile.

    Returns:
        What each call returned.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    results = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for arguments in calls:
            for tensor, dim in unbacked(*arguments):
                torch._dynamo.decorators.mark_unbacked(tensor, dim)
            results.append(compiled(*arguments))
    assert counter.frame_count == 1, f"{counter.frame_count} graphs for {len(calls)} calls, expected one"
    return results
