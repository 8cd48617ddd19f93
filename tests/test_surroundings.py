"""Ops give the same results under other default dtypes and devices and under autocast, which hold for all of torch."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

import mla_ops
from mla_ops import dispatch
from mla_ops.testing import Sample, op_names, sample_inputs
from mla_ops.testing.checks import assert_same_bits, assert_same_memory, clone_sample


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cuda", torch.bfloat16, torch.cuda.is_available()):
        yield


SURROUNDINGS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "a default dtype of 16 bits": lambda: default_dtype(torch.bfloat16),
    "a default dtype of 64 bits": lambda: default_dtype(torch.float64),
    "another default device": lambda: torch.device("meta"),
    "autocast": autocast,
}


@cache
def legal_call(op_name: str, device: torch.device) -> Sample:
    return sample_inputs(op_name, device)[0]


@cache
def usual(op_name: str, lowering: str, device: torch.device) -> tuple[Sample, list[object]]:
    """The arguments behind a call, and what it returned."""
    sample = clone_sample(legal_call(op_name, device))
    with dispatch.override(lowering):
        return sample, tree_leaves(sample.op(*sample.args, **sample.kwargs))


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("lowering", ["reference", "triton"])
@pytest.mark.parametrize("op_name", [name for name in op_names() if not name.endswith("out")])
def test_an_op_gives_the_same_bits(op_name: str, lowering: str, surroundings: str, device: torch.device) -> None:
    wanted, expected = usual(op_name, lowering, device)
    sample = clone_sample(legal_call(op_name, device))
    with dispatch.override(lowering), SURROUNDINGS[surroundings]():
        returned = tree_leaves(sample.op(*sample.args, **sample.kwargs))
    for index, (ours, theirs) in enumerate(zip(returned, expected, strict=True)):
        if isinstance(theirs, torch.Tensor):
            assert_same_bits(ours, theirs, f"output {index}")
    assert_same_memory(sample, wanted, surroundings)


def test_what_makes_a_tensor_names_its_dtype() -> None:
    """Lowerings that run on a GPU only too: a kernel would write float32 into memory for bfloat16."""
    makers = {f"torch.{name}" for name in ("empty", "zeros", "ones", "full", "rand", "randn")}
    silent = [
        f"{path.name}:{call.lineno}: {ast.unparse(call)}"
        for path in Path(mla_ops.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in makers
        and not {"dtype", None} & {word.arg for word in call.keywords}
    ]
    assert not silent
