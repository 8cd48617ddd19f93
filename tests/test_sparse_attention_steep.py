"""Scores of 2^31 and more over plain keys in tiles of 64 heads: their weights are by a scale that is a power of two.

SM90 has these tiles. The interpreter, and other GPUs with room for them, are told to take them.
"""

from __future__ import annotations

import pytest
import torch
from attention_inputs import check, filled_cache, force_splits, force_tile, queries, some_indices

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_attention")
BF16 = torch.bfloat16
HEADS = 40


@pytest.fixture(autouse=True)
def tiles_of_64_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    force_tile(monkeypatch, 64, 64, 8, 1, apart=True, early=True)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("size", [1e7, 1e9, 1e12, 1e30])
def test_attention_equals_float64(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, size: float, parts: int
) -> None:
    force_splits(monkeypatch, parts)
    cache, indices = filled_cache("bf16", 24, 16, device), some_indices(4, 250, 384, device)
    indices[0, :70] = -1
    indices[1] = -1
    indices[2, 37:] = -1
    sink = torch.linspace(-2, 2, HEADS, device=device)
    check("triton", queries(4, HEADS, BF16, device) * size, cache, indices, "bf16", attn_sink=sink)


@pytest.mark.parametrize("order", ["far below first", "far below last", "far below alone", "far above last"])
def test_scores_on_both_sides_of_the_limit(device: torch.device, order: str) -> None:
    """Weights by either scale, and the lse of scores that are all far below 0."""
    cache, q = filled_cache("bf16", 16, 16, device), queries(2, HEADS, BF16, device).abs() + 1
    far = torch.full((576,), -1e9 if "below" in order else 1e9, device=device).to(BF16)
    keys = cache.view(-1, 576)
    keys[:128] = far * torch.linspace(1, 4, 128, device=device)[:, None].to(BF16)
    near = torch.arange(128, 256, dtype=torch.int32, device=device)
    rows = {
        "far below first": torch.cat((torch.arange(128, dtype=torch.int32, device=device), near)),
        "far below alone": torch.arange(128, dtype=torch.int32, device=device),
    }
    indices = rows.get(order, torch.cat((near, torch.arange(128, dtype=torch.int32, device=device))))
    check("triton", q, cache, indices.expand(2, -1).contiguous(), "bf16")
