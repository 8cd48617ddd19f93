"""Function transforms through the ops: a sentence instead of zeros, and nothing in the way of other calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import mla_ops  # noqa: F401  registers the ops
from mla_ops.testing import Sample, functional, op_names, sample_inputs
from mla_ops.testing.checks import assert_same_memory, clone_sample, named_arguments

Function = Callable[[torch.Tensor], torch.Tensor]


@cache
def legal_call(op_name: str) -> Sample:
    return sample_inputs(op_name, "cpu")[0]


def tensors_of(op_name: str) -> dict[str, torch.Tensor]:
    return {n: v for n, v in named_arguments(legal_call(op_name)).items() if isinstance(v, torch.Tensor)}


PURE = [name for name in op_names() if not legal_call(name).op._schema.is_mutable]


EVERY_TENSOR = [(op_name, name) for op_name in op_names() for name in tensors_of(op_name)]
EVERY_FLOAT = [(op_name, name) for op_name, name in EVERY_TENSOR if tensors_of(op_name)[name].is_floating_point()]
FIRST_FLOAT = list({op_name: (op_name, name) for op_name, name in reversed(EVERY_FLOAT)}.values())


def differentiated_by_grad(function: Function, value: torch.Tensor) -> None:
    torch.func.grad(function)(value)


def differentiated_by_jacrev(function: Function, value: torch.Tensor) -> None:
    torch.func.jacrev(function)(value)


def differentiated_by_jvp(function: Function, value: torch.Tensor) -> None:
    torch.func.jvp(function, (value,), (torch.ones_like(value),))


def differentiated_by_jacfwd(function: Function, value: torch.Tensor) -> None:
    torch.func.jacfwd(function)(value)


def differentiated_by_forward_ad(function: Function, value: torch.Tensor) -> None:
    with forward_ad.dual_level():
        function(forward_ad.make_dual(value, torch.ones_like(value)))


def batched_by_vmap(function: Function, value: torch.Tensor) -> None:
    torch.vmap(function)(torch.stack([value, value]))


# every argument by one transform, an argument of each op by those that are made of it
REVERSE = [(*each, differentiated_by_grad) for each in EVERY_FLOAT]
REVERSE += [(*each, differentiated_by_jacrev) for each in FIRST_FLOAT]
FORWARD = [
    (*each, transform) for each in EVERY_FLOAT for transform in (differentiated_by_jvp, differentiated_by_forward_ad)
]
FORWARD += [(*each, differentiated_by_jacfwd) for each in FIRST_FLOAT]


def assert_refused(op_name: str, name: str, transform: Callable[[Function, torch.Tensor], None], *words: str) -> None:
    sample = clone_sample(legal_call(op_name))
    before, arguments = clone_sample(sample), named_arguments(sample)

    def function(value: torch.Tensor) -> torch.Tensor:
        sample.op(**{**arguments, name: value})
        return torch.zeros(())

    with pytest.raises(NotImplementedError) as caught:
        transform(function, arguments[name])
    for word in (f"{functional(op_name)}", f" {name}", *words):
        assert word in str(caught.value)
    assert_same_memory(sample, before, "after a refused call")


@pytest.mark.parametrize(("op_name", "name", "transform"), REVERSE)
def test_a_derivative_backwards_is_refused(op_name: str, name: str, transform: Callable[..., None]) -> None:
    assert_refused(op_name, name, transform, f"differentiates {name}, but ", "has no backward", f"detach {name}")


@pytest.mark.parametrize(("op_name", "name", "transform"), FORWARD)
def test_a_derivative_forwards_is_refused(op_name: str, name: str, transform: Callable[..., None]) -> None:
    assert_refused(op_name, name, transform, f"{name} has a forward-mode tangent", "has no derivative", "primal")


@pytest.mark.parametrize(("op_name", "name"), EVERY_TENSOR)
def test_a_batch_of_calls_is_refused(op_name: str, name: str) -> None:
    assert_refused(op_name, name, batched_by_vmap, f"torch.vmap batches {name}", "no batching rule", "in one call")


def test_a_refusal_is_the_same_in_a_compiled_transform() -> None:
    sample = sample_inputs("merge_attention_states", "cpu")[0]

    def loss(value: torch.Tensor) -> torch.Tensor:
        return sample.op(value, *sample.args[1:])[0].sum()

    for transform, value in ((torch.func.grad(loss), sample.args[0]), (torch.vmap(loss), sample.args[0][None])):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"merge_attention_states: torch.*out_a"):
            torch.compile(transform, backend="aot_eager", fullgraph=True)(value)


@pytest.mark.parametrize("op_name", op_names())
def test_calls_on_what_a_transform_leaves_alone_are_as_outside_of_it(op_name: str) -> None:
    """Constants inside a differentiated or a batched function, in all nestings."""
    expected = sample_inputs(op_name, "cpu")[0]
    returned = expected.op(*expected.args, **expected.kwargs)
    samples = [sample_inputs(op_name, "cpu")[0] for _ in range(4)]
    seen: list[tuple[Any, Any]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        sample = samples[len(seen)]
        seen.append((sample.op(*sample.args, **sample.kwargs), sample))
        return (x * x).sum()

    x = torch.tensor([3.0, 4.0])
    assert torch.func.grad(function)(x).tolist() == [6.0, 8.0]
    assert torch.func.jvp(function, (x,), (torch.ones(2),))[1].item() == 14.0
    assert torch.vmap(torch.func.grad(function))(x[:, None]).tolist() == [[6.0], [8.0]]
    assert torch.func.hessian(function)(x).tolist() == [[2.0, 0.0], [0.0, 2.0]]
    assert len(seen) == 4
    for got, sample in seen:
        torch.testing.assert_close(got, returned, rtol=0, atol=0, equal_nan=True)
        for name, value in named_arguments(sample).items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, named_arguments(expected)[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("how", ["detached", "no_grad"])
def test_what_is_detached_inside_a_differentiated_function_is_a_constant(how: str) -> None:
    sample = sample_inputs("merge_attention_states", "cpu")[0]
    first, *rest = (tensor.float() for tensor in sample.args)

    def loss(x: torch.Tensor) -> torch.Tensor:
        if how == "detached":
            merged = sample.op(x.detach(), *rest)[0]
        else:
            with torch.no_grad():
                merged = sample.op(x, *rest)[0]
        return (x * merged).sum()

    torch.testing.assert_close(torch.func.grad(loss)(first), sample.op(first, *rest)[0], rtol=0, atol=0)


@pytest.mark.parametrize("op_name", PURE)
def test_functionalize_replaces_nothing_in_an_op_that_writes_nothing(op_name: str) -> None:
    sample = sample_inputs(op_name, "cpu")[0]

    def function(*args: Any) -> Any:
        returned = sample.op(*args, **sample.kwargs)
        results = returned if isinstance(returned, tuple) else (returned,)
        # float8 has no sums
        return tuple(result if result.element_size() == 1 else result.add_(1) for result in results)

    torch.testing.assert_close(
        torch.func.functionalize(function)(*sample.args), function(*sample.args), rtol=0, atol=0, equal_nan=True
    )


def test_functionalize_refuses_an_op_that_writes() -> None:
    sample = sample_inputs("concat_and_cache", "cpu")[0]
    before = clone_sample(sample)
    with pytest.raises(NotImplementedError, match=r"concat_and_cache: torch\.func\.functionalize cannot"):
        torch.func.functionalize(lambda x: sample.op(x, *sample.args[1:]))(sample.args[0])
    assert_same_memory(sample, before, "after a refused call")
