"""Tiles whose weights are about the score of a row's first key, and tiles that fade only where a score grew much."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_inputs import check, check_two_caches, filled_cache, force_splits, queries, some_indices

from mla_ops import dispatch

pytest.importorskip("triton")
# heads, keys, warps, tiles ahead
STEADY = {"32 heads": (32, 32, 4, 1), "32 heads, eight warps": (32, 32, 8, 2), "64 heads": (64, 64, 8, 1)}
LAZY = {"16 heads": (16, 32, 4, 2), "32 heads": (32, 32, 4, 1)}
V4 = "fp8_ds_mla_v4"


@pytest.fixture(autouse=True)
def triton_lowering() -> Iterator[None]:
    with dispatch.override(paged_sparse_attention="triton", sparse_attention="triton"):
        yield


def force_tile(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], **options: int) -> None:
    from mla_ops.kernels.triton import sparse_attention

    chosen = sparse_attention.Tile(*sizes, **options)
    monkeypatch.setattr(sparse_attention, "tile", lambda *_: chosen)


@pytest.fixture(params=STEADY.values(), ids=STEADY)
def steady(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    force_tile(monkeypatch, request.param, apart=True, early=request.param[0] == 64, steady=1)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("size", [1.0, 40.0, 1e9], ids=["usual", "scores of 2^8", "scores of 2^31"])
def test_attention_equals_float64(
    device: torch.device, steady: None, monkeypatch: pytest.MonkeyPatch, size: float, parts: int
) -> None:
    """Large scores leave the range of weights in some heads: those rows are walked again."""
    force_splits(monkeypatch, parts)
    cache, indices = filled_cache("bf16", 12, 16, device), some_indices(4, 150, 192, device)
    indices[0, 0] = -1
    indices[1] = -1
    q = queries(4, 3, torch.bfloat16, device) * size
    check("triton", q, cache, indices, "bf16", attn_sink=torch.tensor([0.5, -1.0, 2.0], device=device))


def test_a_first_key_far_below_or_above_the_others(device: torch.device, steady: None) -> None:
    cache, indices = filled_cache("bf16", 12, 16, device), some_indices(4, 150, 192, device)
    q = queries(4, 3, torch.bfloat16, device)
    indices[:, 0] = torch.tensor([0, 1, 2, 3], device=device)
    for key, factor in enumerate((50.0, -50.0, 2000.0, -2000.0)):
        cache.view(-1, 576)[key] = (q[key, 0] * factor / 24).to(torch.bfloat16)
    check("triton", q, cache, indices, "bf16")


def test_large_values_are_summed_up_right(device: torch.device, steady: None) -> None:
    cache, indices = filled_cache("bf16", 12, 16, device), some_indices(2, 150, 192, device)
    q = torch.zeros(2, 3, 576, dtype=torch.bfloat16, device=device)
    q[..., 512:] = torch.randn(2, 3, 64, device=device).bfloat16() * 4
    cache[..., :512] *= 2.0**100
    check("triton", q, cache, indices, "bf16")


@pytest.mark.parametrize("sizes", LAZY.values(), ids=LAZY)
@pytest.mark.parametrize("size", [1.0, 40.0], ids=["usual", "scores of 2^8"])
def test_fading_that_waits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], size: float
) -> None:
    force_tile(monkeypatch, sizes, lazy=True)
    cache, extra = filled_cache(V4, 3, 64, device), filled_cache(V4, 60, 2, device)
    indices, extra_indices = some_indices(3, 70, 192, device), some_indices(3, 130, 120, device)
    q = queries(3, 3, torch.bfloat16, device, 512) * size
    check_two_caches("triton", q, cache, indices, V4, extra, extra_indices, V4)
    cache, indices = filled_cache("fp8_ds_mla", 12, 16, device), some_indices(3, 150, 192, device)
    check("triton", queries(3, 3, torch.bfloat16, device) * size, cache, indices, "fp8_ds_mla")
