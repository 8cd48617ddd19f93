"""Turns of keys whose scales float16 does not hold together: the kernels' code on a CPU, against float64."""

from __future__ import annotations

import ctypes

import hopper_on_cpu
import pytest
import torch
from hopper_on_cpu import pointer

pytestmark = pytest.mark.skipif(hopper_on_cpu.NO_COMPILER, reason="needs a C++ compiler")

FACTOR = 256.0
E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return hopper_on_cpu.build("hopper_wide.cpp", tmp_path_factory.mktemp("wide"))


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
@pytest.mark.parametrize("v4", [False, True])
def test_scores_and_sums_of_scales_of_any_size(library: ctypes.CDLL, v4: bool, heads: int, missing: int) -> None:
    """`missing`: heads of the tile that the call does not have. They repeat another."""
    generator = torch.Generator().manual_seed(heads)
    rows, scales, keys = rows_of(v4, generator)
    here = heads - missing
    q = torch.randn(here, 512, generator=generator).bfloat16()
    q_rope = torch.randn(here, 64, generator=generator).bfloat16()
    spread = torch.randint(-20, 20, (64, heads), generator=generator)
    weights = torch.rand(64, heads, generator=generator) * spread.exp2()
    scores, sums = torch.empty(64, heads), torch.empty(heads, 512)
    tensors = pointer(rows), pointer(scales), pointer(q), pointer(q_rope)
    results = pointer(scores), pointer(weights), pointer(sums)
    assert library.wide(heads, int(v4), *tensors, here, ctypes.c_float(0.125), *results) == 0

    whole = q.double() if v4 else torch.cat((q, q_rope), 1).double()
    expected, magnitudes = keys @ whole.T / 8, keys.abs() @ whole.abs().T / 8
    references = 3.0 * torch.arange(here)  # what scores are relative to while they are added up
    assert ((scores[:, :here] - expected).abs() <= 2**-20 * (magnitudes + references)).all()
    assert scores.isfinite().all()
    values, exact = keys[:, :512] * FACTOR, weights.double().T
    assert ((sums - exact @ values).abs() <= 2**-13 * (exact @ values.abs())).all()


@pytest.mark.parametrize("v4", [False, True])
def test_groups_far_below_their_keys_largest_are_divided_where_they_lie(library: ctypes.CDLL, v4: bool) -> None:
    """By as much as their scales rise: keys stay what they were, but for half of e4m3's least number."""
    generator = torch.Generator().manual_seed(7)
    rows, apart, _ = rows_of(v4, generator)
    width, group = (448, 64) if v4 else (512, 128)
    powers = torch.randint(-12, 13, (64, width // group), generator=generator)
    powers[:24] = powers[:24, :1]
    powers[14, 1] -= 23
    powers[15, 0] += 40  # float16 does not hold that key, and its warp's others stay as they are
    scales = powers.double().exp2() * (1 if v4 else 1.375)
    if v4:
        apart[:, :7] = (powers + 127).to(torch.uint8)
    else:
        rows[:, 512:528] = scales.float().view(torch.uint8)

    def values() -> tuple[torch.Tensor, torch.Tensor]:
        own = (apart[:, :7].double() - 127).exp2() if v4 else rows[:, 512:528].contiguous().view(torch.float32).double()
        return rows[:, :width].view(E4M3).double() * own.repeat_interleave(group, 1), own

    before, scales = values()
    undo, kinds = torch.empty(64, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    library.lower(int(v4), pointer(rows), pointer(apart), pointer(undo), pointer(kinds))
    after, raised = values()
    assert kinds[:24].tolist() == [0] * 14 + [2, 1] + [0] * 8
    assert (kinds[24:] == 2).any()
    lowered = kinds == 2
    lowered[:16] = False
    assert (raised[~lowered] == scales[~lowered]).all()
    assert (after[~lowered] == before[~lowered]).all()
    least = 2.0**-22 * (undo << 16).view(torch.float32).double().reciprocal()[:, None]
    assert (raised[16:] >= least[16:]).all()
    assert (torch.frexp(raised / scales).mantissa == 0.5).all()
    assert ((raised > scales).any(1) == lowered).all()
    bound = 2.0**-10 * torch.where(raised > scales, raised, 0.0).repeat_interleave(group, 1)
    assert ((after - before).abs() <= bound).all()
