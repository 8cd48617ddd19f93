"""Rows whose indices are all one, which programs walk over as one tile: their lse has all keys."""

from __future__ import annotations

import pytest
import torch
from attention_inputs import check, check_two_caches, filled_cache, force_splits, force_tile, key_width, queries

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_attention")
TOPK = 700
# heads, keys, warps, tiles ahead; whether scores are apart; format
TILES = {
    "bf16, 64 heads": ((64, 64, 8, 1), True, "bf16"),
    "bf16, 32 heads": ((32, 32, 8, 2), True, "bf16"),
    "bf16, 32 heads of four warps": ((32, 32, 4, 1), True, "bf16"),
    "bf16, 32 heads by groups": ((32, 32, 4, 1), False, "bf16"),
    "fp8_ds_mla, 64 heads": ((64, 64, 8, 1), True, "fp8_ds_mla"),
    "fp8_ds_mla, 32 heads": ((32, 32, 8, 1), True, "fp8_ds_mla"),
    "fp8_ds_mla, 32 heads of four warps": ((32, 32, 4, 1), True, "fp8_ds_mla"),
    "fp8_ds_mla_v4, 64 heads": ((64, 64, 8, 1), True, "fp8_ds_mla_v4"),
    "fp8_ds_mla_v4, 32 heads": ((32, 32, 4, 1), False, "fp8_ds_mla_v4"),
}


def rows(device: torch.device) -> torch.Tensor:
    indices = torch.randint(0, 192, (7, TOPK), dtype=torch.int32, device=device)
    indices[0] = 5
    indices[1] = 7
    indices[1, 650] = 9  # but for one
    indices[2] = -1
    indices[3] = 500  # no slot
    indices[4] = 3
    indices[4, 600:] = -1
    indices[5] = 11
    indices[5, 40::3] = -1
    return indices


@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("cache_format", "heads"), [("bf16", 3), ("fp8_ds_mla", 3), ("fp8_ds_mla_v4", 5)])
def test_attention_equals_float64(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, cache_format: str, heads: int, parts: int, has_length: bool
) -> None:
    force_splits(monkeypatch, parts)
    options = {"attn_sink": torch.linspace(-2, 2, heads, device=device)}
    if has_length:
        lengths = [TOPK, TOPK, 650, 600, 40, TOPK, TOPK + 1]
        options["topk_length"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    cache, q = (
        filled_cache(cache_format, 12, 16, device),
        queries(7, heads, torch.bfloat16, device, key_width(cache_format)),
    )
    check("triton", q, cache, rows(device), cache_format, **options)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("sizes", "apart", "cache_format"), TILES.values(), ids=TILES)
def test_large_tiles(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int, int],
    apart: bool,
    cache_format: str,
    parts: int,
) -> None:
    force_splits(monkeypatch, parts)
    force_tile(monkeypatch, *sizes, half=cache_format == "fp8_ds_mla", apart=apart, early=apart)
    cache = filled_cache(cache_format, 12, 16, device)
    q = queries(7, 9, torch.bfloat16, device, key_width(cache_format))
    sink = torch.linspace(-2, 2, 9, device=device)
    check("triton", q, cache, rows(device), cache_format, attn_sink=sink)


def test_rows_of_more_keys_than_are_looked_at_together(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    force_tile(monkeypatch, 64, 64, 8, 1, apart=True, early=True)
    indices = torch.full((3, 2200), 5, dtype=torch.int32, device=device)
    indices[1, 2100] = 7
    indices[2, 2100:] = -1
    cache, q = filled_cache("bf16", 12, 16, device), queries(3, 9, torch.bfloat16, device)
    check("triton", q, cache, indices, "bf16")


@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.parametrize("sizes", [(64, 64, 8, 1), (32, 32, 4, 1)], ids=["64 heads", "32 heads"])
def test_two_caches(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int, int], has_length: bool
) -> None:
    """Rows of two slots, one in each cache, or of more."""
    v4 = "fp8_ds_mla_v4"
    force_tile(monkeypatch, *sizes, apart=sizes[0] == 64, early=sizes[0] == 64)
    cache, extra = filled_cache(v4, 12, 16, device), filled_cache(v4, 12, 16, device)
    indices = torch.randint(0, 192, (7, 128), dtype=torch.int32, device=device)
    extra_indices = torch.randint(0, 192, (7, 512), dtype=torch.int32, device=device)
    indices[:6], extra_indices[1:] = 5, 7
    extra_indices[2, 500] = 9
    extra_indices[3, 96:] = -1
    indices[4], extra_indices[5] = -1, 500
    options, extra_options = {"attn_sink": torch.linspace(-2, 2, 9, device=device)}, {}
    if has_length:
        lengths = torch.tensor([128, 96, 128, 50, 128, 0, 8], dtype=torch.int32, device=device)
        options["topk_length"] = lengths
        extra_options["extra_topk_length"] = 4 * lengths
    q = queries(7, 9, torch.bfloat16, device, key_width(v4))
    check_two_caches("triton", q, cache, indices, v4, extra, extra_indices, v4, **options, **extra_options)
