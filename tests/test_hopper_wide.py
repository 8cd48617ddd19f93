"""Turns of keys whose scales float16 does not hold together: the kernels' code on a CPU, against float64."""

from __future__ import annotations

import ctypes

import hopper_on_cpu
import pytest
import torch

pytestmark = pytest.mark.skipif(hopper_on_cpu.NO_COMPILER, reason="needs a C++ compiler")

FACTOR = 256.0
E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return hopper_on_cpu.build("hopper_wide.cpp", tmp_path_factory.mktemp("wide"))


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def rows_of(v4: bool, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes of 64 rows, their scales apart, and the keys."""
    width, group = (448, 64) if v4 else (512, 128)
    latents = (torch.randn(64, width, generator=generator) * 100).clamp(-448, 448).to(E4M3)
    rope = torch.randn(64, 64, generator=generator).bfloat16()
    powers = torch.randint(-40, 40, (64, width // group), generator=generator)
    scales = powers.double().exp2() * (1 if v4 else 1.375)
    scales[torch.rand(scales.shape, generator=generator) < 0.1] = 2.0**-127 if v4 else 0.0
    keys = torch.cat((latents.double() * scales.repeat_interleave(group, 1), rope.double()), 1)
    rows = torch.zeros(64, 576 if v4 else 656, dtype=torch.uint8)
    rows[:, :width] = latents.view(torch.uint8)
    rows[:, -128:] = rope.view(torch.uint8)
    apart = torch.full((64, 8), 0x77, dtype=torch.uint8)
    if v4:
        apart[:, :7] = (scales.log2() + 127).round().to(torch.uint8)
    else:
        rows[:, 512:528] = scales.float().view(torch.uint8)
    return rows, apart, keys


@pytest.mark.parametrize("missing", [0, 5])
@pytest.mark.parametrize("heads", [16, 24, 32, 64])
@pytest.mark.parametrize(("v4", "anew"), [(False, False), (False, True), (True, False), (True, True)])
def test_scores_and_sums_of_scales_of_any_size(
    library: ctypes.CDLL, v4: bool, anew: bool, heads: int, missing: int
) -> None:
    """`missing`: heads of the tile that the call does not have. They repeat another. `anew`: queries come once more."""
    generator = torch.Generator().manual_seed(heads)
    rows, scales, keys = rows_of(v4, generator)
    here = heads - missing
    q = torch.randn(here, 512, generator=generator).bfloat16()
    q[q.abs() < 2**-16] = 2**-16  # smaller ones come anew
    q_rope = torch.randn(here, 64, generator=generator).bfloat16()
    spread = torch.randint(-20, 20, (64, heads), generator=generator)
    weights = torch.rand(64, heads, generator=generator) * spread.exp2()
    scores, sums = torch.empty(64, heads), torch.empty(heads, 512)
    tensors = pointer(rows), pointer(scales), pointer(q), pointer(q_rope)
    results = pointer(scores), pointer(weights), pointer(sums)
    assert library.wide(heads, int(v4), int(anew), *tensors, here, ctypes.c_float(0.125), *results) == 0

    whole = q.double() if v4 else torch.cat((q, q_rope), 1).double()
    expected, magnitudes = keys @ whole.T / 8, keys.abs() @ whole.abs().T / 8
    references = 3.0 * torch.arange(here)  # what scores are relative to while they are added up
    assert ((scores[:, :here] - expected).abs() <= 2**-20 * (magnitudes + references)).all()
    assert scores.isfinite().all()
    values, exact = keys[:, :512] * FACTOR, weights.double().T
    assert ((sums - exact @ values).abs() <= 2**-13 * (exact @ values.abs())).all()
