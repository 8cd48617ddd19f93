"""Strides that torch gives to dimensions nobody steps through: of one entry, or of an empty tensor.

Such a tensor is contiguous to torch, whatever these strides are, and `.contiguous()` returns it as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mla_ops import dispatch
from mla_ops.formats import FORMATS, allocate_cache
from mla_ops.testing import functional, op_names, sample_inputs
from mla_ops.testing.checks import clone_sample, named_arguments


@pytest.fixture(params=["reference", "triton", pytest.param("chosen", marks=pytest.mark.gpu)])
def lowering(request: pytest.FixtureRequest) -> Iterator[str]:
    """The lowerings of all tests, and the one that dispatch chooses on a GPU."""
    if request.param == "triton" and not dispatch.is_installed("triton"):
        pytest.skip("Triton is not installed")
    with contextlib.nullcontext() if request.param == "chosen" else dispatch.override(request.param):
        yield request.param


def odd_strides(value: Any) -> Any:
    """The same tensor, with a stride of 7 wherever it is not used."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    pairs = zip(value.shape, value.stride(), strict=True)
    strides = [7 if size == 1 or value.numel() == 0 else stride for size, stride in pairs]
    return value.as_strided(value.shape, strides, value.storage_offset())


def strides_of(arguments: dict[str, Any]) -> list[tuple[int, ...]]:
    return [value.stride() for value in arguments.values() if isinstance(value, torch.Tensor)]


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op_name", op_names())
def test_strides_that_are_not_used_change_nothing(op_name: str, lowering: str, device: torch.device) -> None:
    if lowering != "chosen" and not dispatch.has_lowering(lowering, functional(op_name)):
        pytest.skip(f"there is no {lowering} lowering of {functional(op_name)}")
    changed = 0
    for sample in sample_inputs(op_name, device):
        plain, odd = clone_sample(sample), clone_sample(sample)
        arguments = {name: odd_strides(value) for name, value in named_arguments(odd).items()}
        if strides_of(arguments) == strides_of(named_arguments(odd)):
            continue
        changed += 1
        expected = plain.op(*plain.args, **plain.kwargs)
        same(odd.op(**arguments), expected)
        for name, value in named_arguments(plain).items():
            if isinstance(value, torch.Tensor):
                same(arguments[name], value)
    assert changed, f"no sample of {op_name} has a dimension of one entry"


def column(*values: int) -> torch.Tensor:
    """`[n, 1]` as the transpose of a row, whose last stride is n."""
    tensor = torch.tensor([values], dtype=torch.int32).t()
    assert tensor.is_contiguous()
    assert tensor.stride(-1) == len(values)
    return tensor


def test_one_index_a_token_and_one_block_a_request(lowering: str, device: torch.device) -> None:
    table, indices = column(4, 2).to(device), column(3, 0, -1).to(device)
    requests = torch.tensor([1, 0, 1], dtype=torch.int32, device=device)
    out, counts = torch.empty_like(indices), torch.empty_like(requests)
    torch.ops.mla.convert_req_index_to_global_index.out(requests, table, indices, 4, out=out, valid_counts=counts)
    assert out.tolist() == [[11], [16], [-1]]
    assert counts.tolist() == [1, 1, 0]
    q = torch.randn(3, 2, 576, device=device).bfloat16()
    cache = torch.randn(5, 4, 576, device=device).bfloat16()
    options = {"block_table": table, "req_id_per_token": requests}
    got = torch.ops.mla.paged_sparse_attention(q, cache, indices, 0.1, "bf16", **options)
    same(got, torch.ops.mla.paged_sparse_attention(q, cache, indices.clone().view(3, 1), 0.1, "bf16", **options))


@pytest.mark.parametrize("cache_format", ["bf16", "fp16", "fp32", "fp8_ds_mla", "fp8_ds_mla_v4"])
def test_a_cache_of_one_block_or_of_blocks_of_one_token(cache_format: str, device: torch.device) -> None:
    """Written and gathered again, by both lowerings."""
    latent_dim = FORMATS[cache_format].latent_dim or 512
    width = FORMATS[cache_format].head_dims[0]
    keys = torch.randn(3, width, device=device).bfloat16().to(FORMATS[cache_format].value_dtype)
    rows = keys[:, :latent_dim], keys[:, latent_dim:]
    int32 = {"dtype": torch.int32, "device": device}
    for num_blocks, block_size, slots, table in ((1, 3, [0, 1, 2], [[0]]), (3, 1, [2, 0, 1], [[2, 0, 1]])):
        gathered = []
        for backend in ("reference", "triton") if dispatch.is_installed("triton") else ("reference",):
            cache = odd_strides(allocate_cache(cache_format, num_blocks, block_size, device=device))
            with dispatch.override(backend):
                torch.ops.mla.concat_and_cache(*rows, cache, torch.tensor(slots, device=device), cache_format)
                lens, starts = torch.tensor([3], **int32), torch.tensor([0, 3], **int32)
                table_ = torch.tensor(table, **int32)
                gathered.append(torch.ops.mla.gather_cache(cache, table_, lens, starts, 3, cache_format))
        same(gathered[0], gathered[-1])
        assert gathered[0].abs().sum() > 0
