"""Every op and `.out` overload, over every sample: opcheck, and what opcheck does not look at."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mla_ops  # noqa: F401  registers the ops
from mla_ops.testing import Sample, functional, op_names, sample_inputs
from mla_ops.testing.checks import (
    assert_same_memory,
    check_compiled,
    check_fake,
    check_repeatable,
    named_arguments,
)

ONCE_AN_OP = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


def sample_id(sample: Sample) -> str:
    return f"{str(sample.op).removeprefix('mla.').removesuffix('.default')}: {sample.name}"


SAMPLES = [sample for name in op_names() for sample in sample_inputs(name, "cpu")]
FIRST = {sample_id(sample_inputs(name, "cpu")[0]) for name in op_names()}


every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=sample_id)


def kind(sample: Sample) -> list[tuple[str, Any]]:
    """The arguments given, the dtypes of tensors and the values of all others."""
    arguments = sorted(named_arguments(sample).items())
    return [(name, value.dtype if isinstance(value, torch.Tensor) else value) for name, value in arguments]


def has_size(sample: Sample, size: int) -> bool:
    return any(isinstance(value, torch.Tensor) and size in value.shape for value in named_arguments(sample).values())


def dynamo_takes(sample: Sample) -> bool:
    """Dynamo refuses an argument called `out` that is not contiguous, whoever's op it is (tests/test_hazards.py)."""
    return not sample.name.endswith("into wide rows")


def test_every_op_has_samples_of_no_token_one_token_and_several() -> None:
    for name in op_names():
        names = {sample.name for sample in sample_inputs(name, "cpu")}
        assert len(names) == len(sample_inputs(name, "cpu")), f"{name}: sample names repeat"
        for few in ("no ", "one "):
            assert any(few in sample for sample in names), f"{name}: no sample with '{few.strip()}' tokens or requests"


def takes_fp8(sample: Sample) -> bool:
    values = (*sample.args, *sample.kwargs.values())
    return any(isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn for value in values)


@pytest.mark.parametrize(
    "sample",
    [sample for sample in SAMPLES if sample_id(sample) in FIRST or not (takes_fp8(sample) and dynamo_takes(sample))],
    ids=sample_id,
)
def test_opcheck_passes(sample: Sample) -> None:
    """All of opcheck for each op's first sample, and for those that Dynamo refuses; else what a sample writes and
    aliases. The tests below compare more: fakes of all samples, and what compiled ones write."""
    # `test_schema` compares arguments by allclose, which torch lacks for float8; `check_repeatable` compares their bits
    utils = [] if takes_fp8(sample) else ["test_schema"]
    if sample_id(sample) in FIRST or not dynamo_takes(sample):
        utils += ONCE_AN_OP
        if sample.op.__name__.endswith("out"):
            utils.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(sample.op, sample.args, sample.kwargs, test_utils=tuple(utils))


@every_sample
def test_fake_returns_what_the_real_op_returns(sample: Sample) -> None:
    # opcheck compares strides from torch 2.13 on only
    check_fake(sample)


@pytest.mark.parametrize("name", op_names())
def test_compiled_writes_and_returns_the_same_bits_as_eager(name: str) -> None:
    """Each set of arguments, with dynamic shapes where nothing goes into buffers: sizes but 0 and 1 share a graph then.
    opcheck looks at no written memory."""
    samples = list(filter(dynamo_takes, sample_inputs(name, "cpu")))
    samples = [
        sample
        for i, sample in enumerate(samples)
        if has_size(sample, 0)
        or (has_size(sample, 1) and name == functional(name))
        or kind(sample) not in map(kind, samples[:i])
    ]
    check_compiled(samples, dynamic=name == functional(name))


@every_sample
def test_two_calls_agree_and_read_only_arguments_stay(sample: Sample) -> None:
    check_repeatable(sample)


@pytest.mark.parametrize("name", op_names())
def test_samples_are_the_same_numbers_every_time(name: str) -> None:
    # so that a failure can be reproduced from the test id
    for first, second in zip(sample_inputs(name, "cpu"), sample_inputs(name, "cpu"), strict=True):
        assert_same_memory(first, second, first.name)
