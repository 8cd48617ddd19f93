"""Rows of 64 heads whose turns go by group: the kernels' code on a CPU, against float64."""

from __future__ import annotations

import ctypes

import hopper_on_cpu
import pytest
import torch
from hopper_on_cpu import pointer

pytestmark = pytest.mark.skipif(hopper_on_cpu.NO_COMPILER, reason="needs a C++ compiler")

FACTOR = 256.0
TURNS = 5


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return hopper_on_cpu.build("hopper_by_group.cpp", tmp_path_factory.mktemp("by_group"))


@pytest.mark.parametrize(
    ("case", "steepness"),
    [
        ("spread", 300),
        *((case, 40) for case in ("spread", "powers of two", "wild", "growing", "small queries", "dead", "no query")),
    ],
    ids=lambda value: str(value).replace(" ", "_"),
)
def test_a_row_by_group(library: ctypes.CDLL, case: str, steepness: int) -> None:
    """`steepness`: the largest score, as a power of two. `growing`: scales that grow along the row."""
    generator = torch.Generator().manual_seed(steepness + len(case))
    count = TURNS * 64
    magnitudes, signs = (torch.randint(0, end, (count, 512), generator=generator) for end in (126, 2))
    codes = magnitudes | signs << 7
    latents = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    span = 30 if case == "wild" else 12
    scales = ((torch.rand(count, 4, generator=generator) * 2 - 1) * span).exp2() / 100
    if case == "powers of two":
        scales = scales.log2().floor().exp2()
    if case == "wild":
        scales[torch.rand(scales.shape, generator=generator) < 0.25] = 0.0
    if case == "growing":
        scales = scales * (torch.arange(count)[:, None] // 16 * 2.0 - 20).exp2()
    q = torch.randn(64, 576, generator=generator)
    if case == "small queries":
        scales = (torch.arange(4) * 13.0).exp2().expand(count, 4).contiguous() / 100
        q[:, :512] *= (torch.arange(4) * -13.0).exp2().repeat_interleave(128)
    q = q.bfloat16() * (case != "no query")
    live = torch.ones(count, dtype=torch.bool)
    if case == "dead":
        live = torch.rand(count, generator=generator) < 0.7
    rope = torch.randn(count, 64, generator=generator).bfloat16()
    rows = torch.cat((latents.view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)), 1).contiguous()
    keys = torch.cat((latents.double() * scales.double().repeat_interleave(128, 1), rope.double()), 1)

    scores = q.double() @ keys.T
    scale_log2 = steepness / max(scores.abs().max().item(), 1e-30)
    sums, running_max, out = torch.empty(64, dtype=torch.double), torch.empty(64), torch.empty(64, 512)
    arguments = pointer(rows), pointer(live), pointer(q), ctypes.c_float(scale_log2), 1
    library.by_group(TURNS, *arguments, pointer(sums), pointer(running_max), pointer(out))

    weights = (scores * scale_log2 - running_max.double()[:, None]).exp2() * live
    assert ((sums / weights.sum(1) - 1).abs() <= 2**-14 * (1 + steepness / 64)).all()
    values = keys[:, :512] * FACTOR
    # A weight and a value are rounded to bfloat16 once each.
    bound = (2**-8 + 2**-14 * (1 + steepness / 64)) * (weights @ values.abs()) + 2.0**-133 * values.abs().sum(0)
    error = (out.double() - weights @ values).abs()
    assert (error <= bound).all()
