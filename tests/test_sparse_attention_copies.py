"""Rows whose indices are all one, which programs of 16 heads walk over as one tile: their lse has all keys."""

from __future__ import annotations

import pytest
import torch
from attention_inputs import check, filled_cache, force_splits, key_width, queries

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_attention")
TOPK = 700


@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("cache_format", "heads"), [("bf16", 3), ("fp8_ds_mla", 3), ("fp8_ds_mla_v4", 5)])
def test_attention_equals_float64(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, cache_format: str, heads: int, parts: int, has_length: bool
) -> None:
    force_splits(monkeypatch, parts)
    indices = torch.randint(0, 192, (6, TOPK), dtype=torch.int32, device=device)
    indices[0] = 5
    indices[1] = 7
    indices[1, 650] = 9  # but for one
    indices[2] = -1
    indices[3] = 500  # no slot
    indices[4] = 3
    indices[4, 600:] = -1
    options = {"attn_sink": torch.linspace(-2, 2, heads, device=device)}
    if has_length:
        lengths = [TOPK, TOPK, 650, 600, 40, TOPK + 1]
        options["topk_length"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    cache, q = (
        filled_cache(cache_format, 12, 16, device),
        queries(6, heads, torch.bfloat16, device, key_width(cache_format)),
    )
    check("triton", q, cache, indices, cache_format, **options)
