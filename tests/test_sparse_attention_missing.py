"""Rows of indices with keys that are missing in between, which tiles of more than 16 heads leave out of their walk."""

from __future__ import annotations

from collections.abc import Callable

import attention_oracle
import pytest
import torch
from attention_inputs import SCALE, check, filled_cache, force_splits, force_tile, operand, queries

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_attention")
BF16 = torch.bfloat16
# heads, keys, warps, tiles ahead; format
TILES = {
    "bf16, 64 heads": ((64, 64, 8, 1), "bf16"),
    "bf16, 32 heads": ((32, 32, 8, 2), "bf16"),
    "bf16, 32 heads of four warps": ((32, 32, 4, 1), "bf16"),
    "fp8_ds_mla, 32 heads": ((32, 32, 8, 1), "fp8_ds_mla"),
    "fp8_ds_mla, 32 heads of four warps": ((32, 32, 4, 1), "fp8_ds_mla"),
}
MISSING: dict[str, Callable[[int, int], bool]] = {
    "none": lambda column, end: False,
    "the first": lambda column, end: column == 0,
    "every other": lambda column, end: column % 2 == 0,
    "a tile and a half": lambda column, end: 32 <= column < 128,
    "all but the last": lambda column, end: column < end - 1,
    "the end": lambda column, end: column > 70,
    "all": lambda column, end: True,
}


@pytest.fixture(params=TILES.values(), ids=TILES)
def cache_format(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    sizes, kind = request.param
    force_tile(monkeypatch, *sizes, half=kind == "fp8_ds_mla", apart=True, early=True)
    return kind


def rows_with(missing: list[Callable[[int, int], bool]], topk: int, slots: int, device: torch.device) -> torch.Tensor:
    indices = torch.randint(0, slots, (len(missing), topk), dtype=torch.int32, device=device)
    for row, is_missing in zip(indices, missing, strict=True):
        row[[is_missing(column, topk) for column in range(topk)]] = -1
    return indices


@pytest.mark.parametrize("parts", [1, 2])
def test_attention_equals_float64(
    device: torch.device, cache_format: str, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    force_splits(monkeypatch, parts)
    cache = filled_cache(cache_format, 12, 16, device)
    indices = rows_with(list(MISSING.values()), 200, 192, device)
    check("triton", queries(len(MISSING), 3, BF16, device), cache, indices, cache_format)


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_of_more_keys_than_are_looked_at_together(
    device: torch.device, cache_format: str, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    force_splits(monkeypatch, parts)
    cache = filled_cache(cache_format, 12, 16, device)
    indices = rows_with([MISSING["every other"], MISSING["all but the last"], MISSING["the end"]], 2200, 192, device)
    check("triton", queries(3, 9, BF16, device), cache, indices, cache_format)


def test_outputs_without_room_for_indices(device: torch.device, cache_format: str) -> None:
    """Heads that lie apart, and rows that are longer than an output."""
    cache, q = filled_cache(cache_format, 12, 16, device), queries(2, 3, BF16, device)
    indices = rows_with([MISSING["every other"], MISSING["a tile and a half"]], 200, 192, device)
    wide = torch.full((2, 3, 520), 7.0, dtype=BF16, device=device)
    lse = torch.empty(2, 3, device=device)
    torch.ops.mla.paged_sparse_attention.out(q, cache, indices, SCALE, cache_format, out=wide[..., :512], lse=lse)
    rounded = operand("triton", cache_format, BF16)
    expected = attention_oracle.attention(q, cache, indices, SCALE, operand=rounded, cache_format=cache_format)
    attention_oracle.assert_close(wide[..., :512], lse, expected)
    assert bool((wide[..., 512:] == 7).all())
    indices = rows_with([MISSING["every other"], MISSING["the first"]], 900, 192, device)
    check("triton", q, cache, indices, cache_format)


def test_outputs_with_room_for_indices() -> None:
    from mla_ops.kernels.triton.attention_options import keeps_indices, make_tile

    chosen = make_tile(64, 64, 8, 1)
    out = torch.empty(2, 72, 512, dtype=BF16)
    assert keeps_indices(chosen, out, 8 * 256 - 64 - 16, 1)  # the last program has eight heads
    assert not keeps_indices(chosen, out, 8 * 256 - 64 - 15, 1)
    assert keeps_indices(chosen, out[:, :64], 2048, 4)
    assert not keeps_indices(chosen, out[:, :64], 2048, 5)
    assert not keeps_indices(make_tile(32, 32, 8, 1), out, 200, 1)
    apart = torch.empty(2, 72, 520, dtype=BF16)[..., :512]
    assert not keeps_indices(chosen, apart, 200, 1)
    beside = torch.empty(2 * 72 * 512 + 1, dtype=BF16)[1:].view(2, 72, 512)
    assert not keeps_indices(chosen, beside, 200, 1)
    odd = torch.empty(2, 72 * 512 + 1, dtype=BF16)[:, : 72 * 512].unflatten(1, (72, 512))
    assert not keeps_indices(chosen, odd, 200, 1)
