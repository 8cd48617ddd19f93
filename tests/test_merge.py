"""Merging partial attention results, against float64."""

from __future__ import annotations

import math

import pytest
import torch

import mla_ops  # noqa: F401  (registers the ops)
from mla_ops import dispatch

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def check_merge(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Holds out and lse to bounds from float32.

    Weights are off by the exponentials' 2 ulp, of |lse - top| and of themselves, the sum by 2 roundings; last comes
    the output's type.
    """
    sides = [torch.where(side == math.inf, -math.inf, side.double()) for side in (lse_a, lse_b)]
    total = torch.logaddexp(*sides)
    empty = total == -math.inf
    weights = [torch.where(empty, 0.0, (side - total).exp()) for side in sides]
    parts = [
        torch.where((w == 0)[..., None], 0.0, o.double() * w[..., None])
        for w, o in zip(weights, (out_a, out_b), strict=True)
    ]
    spread = torch.where(empty, 0.0, (sides[0] - sides[1]).abs().clamp(max=110.0))
    relative = (8 + spread) * 2.0**-22
    bound = (parts[0].abs() + parts[1].abs()) * relative[..., None]
    expected = parts[0] + parts[1]
    bound = bound + UNIT[out.dtype] * (expected.abs() + bound) + 2.0**-126
    assert ((out.double() - expected).abs() <= bound).all()
    assert torch.equal(lse == -math.inf, empty)
    distance = torch.where(empty, 0.0, (lse.double() - total).abs())
    assert (distance <= torch.where(empty, 0.0, (total.abs() + 8) * 2.0**-22)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "head_dim_v"),
    [(0, 4, 512), (1, 1, 512), (5, 17, 512), (7, 3, 128), (2, 2, 600), (3, 2, 1)],
)
def test_merge_equals_float64(
    lowering: str, device: torch.device, dtype: torch.dtype, num_tokens: int, num_heads: int, head_dim_v: int
) -> None:
    outs = [torch.randn(num_tokens, num_heads, head_dim_v, device=device).to(dtype) for _ in range(2)]
    lses = [torch.randn(num_tokens, num_heads, device=device) * 30 for _ in range(2)]
    out, lse = torch.ops.mla.merge_attention_states(outs[0], lses[0], outs[1], lses[1])
    check_merge(outs[0], lses[0], outs[1], lses[1], out, lse)


def test_empty_sides_may_hold_nan(lowering: str, device: torch.device) -> None:
    """-inf and, from some kernels, +inf mark an empty side; both sides may be empty."""
    marks = torch.tensor([-math.inf, math.inf, 0.5, -2.0], device=device)
    lse_a, lse_b = marks.repeat_interleave(4).view(4, 4), marks.repeat(4).view(4, 4)
    outs = [torch.randn(4, 4, 512, device=device).bfloat16() for _ in range(2)]
    clean = torch.ops.mla.merge_attention_states(outs[0], lse_a, outs[1], lse_b)
    check_merge(outs[0], lse_a, outs[1], lse_b, *clean)
    for out, lse in zip(outs, (lse_a, lse_b), strict=True):
        out[lse.isinf()] = math.nan
    dirty = torch.ops.mla.merge_attention_states(outs[0], lse_a, outs[1], lse_b)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])


def test_weights_far_apart_do_not_overflow(lowering: str, device: torch.device) -> None:
    lse_a = torch.tensor([[1e4, -1e4, 88.0, 3e38]], device=device)
    lse_b = torch.tensor([[-1e4, 1e4, -88.0, 0.0]], device=device)
    outs = [torch.randn(1, 4, 512, device=device) for _ in range(2)]
    out, lse = torch.ops.mla.merge_attention_states(outs[0], lse_a, outs[1], lse_b)
    check_merge(outs[0], lse_a, outs[1], lse_b, out, lse)


def test_merge_strided(lowering: str, device: torch.device) -> None:
    """lse as `[heads, tokens]` transposed, outs as slices; outputs into slices, nothing beside them touched."""
    outs = [torch.randn(5, 6, 520, device=device).bfloat16() for _ in range(2)]
    lses = [torch.randn(3, 5, device=device) for _ in range(2)]
    a, b = outs[0][:, ::2, 4:516], outs[1][:, 3:6, 8:]
    buffer = torch.full((5, 4, 512), 77.0, dtype=torch.bfloat16, device=device)
    lse_buffer = torch.full((5, 7), 77.0, device=device)
    torch.ops.mla.merge_attention_states.out(a, lses[0].T, b, lses[1].T, out=buffer[:, 1:], lse=lse_buffer[:, 2:5])
    check_merge(a, lses[0].T, b, lses[1].T, buffer[:, 1:], lse_buffer[:, 2:5])
    assert (buffer[:, 0] == 77).all()
    assert (lse_buffer[:, [0, 1, 5, 6]] == 77).all()


@pytest.mark.parametrize("num_parts", [2, 3, 9])
def test_the_bits_of_a_row_depend_on_it_alone(lowering: str, device: torch.device, num_parts: int) -> None:
    """Among others, alone, and at another place, of two parts and of any number."""
    outs, lses = torch.randn(num_parts, 40, 3, 512, device=device).bfloat16(), torch.randn(num_parts, 40, 3) * 9
    lses = lses.to(device)

    def merge(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts, logarithms = outs[:, rows], lses[:, rows]
        if num_parts == 2:
            return torch.ops.mla.merge_attention_states(parts[0], logarithms[0], parts[1], logarithms[1])
        return torch.ops.mla.merge_attention_states.stacked(parts, logarithms)

    whole = merge(torch.arange(40, device=device))
    for rows in ([7], [39, 7, 0], list(range(20, 3, -1))):
        chosen = torch.tensor(rows, device=device)
        for found, expected in zip(merge(chosen), whole, strict=True):
            assert torch.equal(found, expected[chosen])


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [1, 17, 128])
def test_merge_at_real_sizes(num_heads: int) -> None:
    outs = [torch.randn(4096, num_heads, 512, device="cuda").bfloat16() for _ in range(2)]
    lses = [torch.randn(4096, num_heads, device="cuda") * 5 for _ in range(2)]
    lses[0][::3] = -math.inf
    with dispatch.override("triton"):
        out, lse = torch.ops.mla.merge_attention_states(outs[0], lses[0], outs[1], lses[1])
    check_merge(outs[0], lses[0], outs[1], lses[1], out, lse)
