"""A row's first references: those of a cluster's CTA, by one barrier, are those that any later turn would set."""

from __future__ import annotations

import ctypes

import hopper_on_cpu
import pytest
import torch

pytestmark = pytest.mark.skipif(hopper_on_cpu.NO_COMPILER, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return hopper_on_cpu.build("hopper_references.cpp", tmp_path_factory.mktemp("references"))


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.parametrize("warps", [(1, 1, 1, 1), (1, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("heads", [16, 24, 32])
def test_first_references_are_those_of_any_turn(library: ctypes.CDLL, heads: int, warps: tuple[int, ...]) -> None:
    """`warps`: which have keys. One head's scores are infinite, one's NaN."""
    generator = torch.Generator().manual_seed(heads)
    alive = torch.tensor(warps, dtype=torch.int32)
    scores = torch.randn(4, 32, heads // 2, generator=generator) * 100
    scores[:, 0, 0], scores[:, :, 1] = -torch.inf, torch.nan
    scores[alive == 0] = -torch.inf
    found = []
    for by_one in (0, 1):
        own, references = scores.clone(), torch.empty(heads)
        found.append((library.first(heads, pointer(alive), by_one, pointer(own), pointer(references)), own, references))
    assert found[0][0] == found[1][0] == any(warps)
    for old, new in zip(found[0][1:], found[1][1:], strict=True):
        assert torch.equal(old.view(torch.int32), new.view(torch.int32)) or (
            torch.equal(old.isnan(), new.isnan()) and torch.equal(old.nan_to_num(1.5), new.nan_to_num(1.5))
        )
    if any(warps):
        assert found[1][2][2:].isfinite().any()
