"""Tensors that are not dense, or not on a CPU or a GPU: refused by every op, with the argument's name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from mla_ops.testing import Sample, op_names, sample_inputs
from mla_ops.testing.checks import assert_same_bits, clone_sample, named_arguments, written_arguments

LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "sparse": (torch.Tensor.to_sparse, "got one of layout torch.sparse_coo"),
    "in rows": (lambda t: t.reshape(-1, 1).to_sparse_csr(), "got one of layout torch.sparse_csr"),
    "of MKL-DNN": (lambda t: t.float().to_mkldnn(), "got one of layout torch._mkldnn"),
    "nested": (lambda t: torch.nested.nested_tensor([t, t]), "got a nested tensor"),
    "jagged": (
        lambda t: torch.nested.nested_tensor([t.reshape(-1, 1)] * 2, layout=torch.jagged),
        "got a nested tensor",
    ),
    "quantized": (
        lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8),
        "got a quantized tensor, torch.quint8",
    ),
}


@cache
def legal_call(op_name: str) -> Sample:
    return sample_inputs(op_name, "cpu")[0]


def tensors_of(sample: Sample) -> list[str]:
    return [name for name, value in named_arguments(sample).items() if isinstance(value, torch.Tensor)]


def call(sample: Sample, **changed: Any) -> Any:
    arguments = {**named_arguments(sample), **changed}
    given = [a for a in sample.op._schema.arguments if a.name in arguments]
    positional = [arguments[a.name] for a in given if not a.kwarg_only]
    return sample.op(*positional, **{a.name: arguments[a.name] for a in given if a.kwarg_only})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op_name", op_names())
def test_a_tensor_that_is_not_dense_is_refused(op_name: str) -> None:
    """Each argument in one layout, and the first in all."""
    sample, layouts = legal_call(op_name), list(LAYOUTS.values())
    names = tensors_of(sample)
    for name, (make, got) in [*zip(names, layouts * len(names), strict=False), *((names[0], one) for one in layouts)]:
        with pytest.raises(TypeError) as refusal:
            call(sample, **{name: make(named_arguments(sample)[name].float())})
        assert str(refusal.value) == f"{op_name}: {name} must be a dense tensor on a CPU or a CUDA GPU, {got}"


@pytest.mark.parametrize("op_name", op_names())
def test_a_call_without_a_tensor_is_refused(op_name: str) -> None:
    sample = legal_call(op_name)
    first = sample.op._schema.arguments[0].name
    with pytest.raises(TypeError, match=rf"^{op_name}: {first} must be a tensor, got None$"):
        call(sample, **dict.fromkeys(tensors_of(sample)))


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor's values whose memory holds their negatives."""
    return torch._neg_view(-tensor)


@pytest.mark.parametrize("op_name", [name for name in op_names() if name.endswith("out")])
def test_a_negated_view_is_not_written(op_name: str) -> None:
    sample = clone_sample(legal_call(op_name))
    arguments = named_arguments(sample)
    for name in written_arguments(sample.op):
        if arguments[name].dtype in (torch.float32, torch.bfloat16, torch.int32):
            with pytest.raises(ValueError, match=f"{op_name}: {name} must not be a negated view, got one"):
                call(sample, **{name: negated(arguments[name])})


def test_a_negated_view_is_read_as_what_it_shows() -> None:
    sample = legal_call("sparse_attention")
    arguments = named_arguments(sample)
    expected = call(sample)
    views = {name: negated(arguments[name]) for name in ("q", "kv", "indices")}
    for actual, wanted in zip(call(sample, **views), expected, strict=True):
        assert_same_bits(actual, wanted, "a negated view")
