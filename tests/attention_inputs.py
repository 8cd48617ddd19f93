"""Shared by the sparse attention tests: inputs, and one call held against float64."""

from __future__ import annotations

import math
from typing import Any

import attention_oracle
import pytest
import torch

from mla_ops.formats import FORMATS, allocate_cache, planar_views

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
SCALE = 576**-0.5
QUERIES = [("fp8_ds_mla", torch.bfloat16), ("fp8_ds_mla", torch.float16), ("fp8_ds_mla", torch.float32)]
QUERIES += [("fp8_ds_mla_v4", torch.bfloat16), ("fp8_ds_mla_v4", torch.float16), ("fp8_ds_mla_v4", torch.float32)]
QUERIES += [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]


def operand(lowering: str, cache_format: str, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype that a lowering rounds probabilities to: nothing in the reference and in the exact paths."""
    quantized = cache_format.startswith("fp8")
    if lowering == "reference" or dtype == torch.float32 or (quantized and dtype != torch.bfloat16):
        return None
    return dtype


def filled_cache(
    cache_format: str, num_blocks: int, block_size: int, device: torch.device, *, head_dim: int = 576
) -> torch.Tensor:
    """Normal keys; in fp8_ds_mla with arbitrary positive scales, as other writers store them.

    In fp8_ds_mla_v4, whose keys are 512 wide, scales of 2**-7 to 2**-4, and NaN in every byte that pads.
    """
    if cache_format == "fp8_ds_mla_v4":
        cache = torch.full_like(allocate_cache(cache_format, num_blocks, block_size, device=device), 0xFF)
        data, scales = planar_views(cache, cache_format)
        values = torch.randn(num_blocks, block_size, 512, device=device)
        data[..., :448] = values[..., :448].mul(64).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        data[..., 448:] = values[..., 448:].bfloat16().view(torch.uint8)
        scales[..., :7] = torch.randint(120, 124, (num_blocks, block_size, 7), device=device).to(torch.uint8)
        return cache
    if cache_format != "fp8_ds_mla":
        return torch.randn(num_blocks, block_size, head_dim, device=device).to(FORMATS[cache_format].dtype)
    rows = torch.empty(num_blocks * block_size, 656, dtype=torch.uint8, device=device)
    rows[:, :512] = (
        torch.randn(len(rows), 512, device=device).mul(64).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    )
    scales = (0.25 + 1.5 * torch.rand(len(rows), 4, device=device)) / 64
    rows[:, 512:528] = scales.view(torch.uint8)
    rows[:, 528:] = torch.randn(len(rows), 64, device=device).bfloat16().view(torch.uint8)
    return rows.view(num_blocks, block_size, 656)


def queries(
    num_tokens: int, num_heads: int, dtype: torch.dtype, device: torch.device, head_dim: int = 576
) -> torch.Tensor:
    return torch.randn(num_tokens, num_heads, head_dim, device=device).to(dtype)


def key_width(cache_format: str) -> int:
    return FORMATS[cache_format].head_dims[0]


def poison_unused(cache: torch.Tensor, used: torch.Tensor, cache_format: str) -> torch.Tensor:
    """A copy with NaN in each slot that is not among `used`, and in all that pads."""
    dirty = torch.full_like(cache, 0xFF if cache.dtype == torch.uint8 else math.nan)
    views = (cache,), (dirty,)
    if cache_format == "fp8_ds_mla_v4":
        views = tuple(planar_views(tensor, cache_format) for tensor in (cache, dirty))
    for clean, poisoned in zip(*views, strict=True):
        block, offset = used // clean.shape[1], used % clean.shape[1]
        poisoned[block, offset] = clean[block, offset]
    return dirty


def some_indices(num_tokens: int, topk: int, num_slots: int, device: torch.device) -> torch.Tensor:
    """Mostly valid, with duplicates, holes and every kind of garbage."""
    indices = torch.randint(0, num_slots, (num_tokens, topk), dtype=torch.int32, device=device)
    for value in (INT_MIN, -123456, -1, num_slots, INT_MAX):
        indices[torch.rand(indices.shape, device=device) < 0.03] = value
    return indices


def force_waves(monkeypatch: pytest.MonkeyPatch, *waves: tuple[int, tuple[int, int, int]]) -> None:
    """The portable kernel takes these waves: tokens, and how it cuts their rows."""
    from mla_ops.kernels.triton import sparse_attention
    from mla_ops.kernels.triton.waves import Shares, Wave

    chosen = tuple(Wave(num_tokens, Shares(*shares)) for num_tokens, shares in waves)
    monkeypatch.setattr(sparse_attention, "waves_of", lambda *_: chosen)


def force_tile(monkeypatch: pytest.MonkeyPatch, *sizes: int, **options: bool) -> None:
    """The portable kernel of sparse attention has this tile: heads, keys, warps, tiles ahead, and how it is read."""
    from mla_ops.kernels.triton import sparse_attention

    chosen = sparse_attention.Tile(*sizes, **options)
    monkeypatch.setattr(sparse_attention, "tile", lambda *_: chosen)


def force_splits(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The portable kernel cuts all rows in as many parts."""
    from mla_ops.kernels.triton import sparse_attention
    from mla_ops.kernels.triton.waves import Shares, Wave

    shares = Shares(count, 1, count)
    monkeypatch.setattr(sparse_attention, "waves_of", lambda num_tokens, *_: (Wave(num_tokens, shares),))


def check(
    lowering: str,
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    cache_format: str,
    tokens: list[int] | None = None,
    softmax_scale: float = SCALE,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.ops.mla.paged_sparse_attention(q, cache, indices, softmax_scale, cache_format, **options)
    rounded = operand(lowering, cache_format, q.dtype)
    expected = attention_oracle.attention(
        q, cache, indices, softmax_scale, operand=rounded, tokens=tokens, cache_format=cache_format, **options
    )
    attention_oracle.assert_close(out, lse, expected)
    return out, lse


def check_two_caches(
    lowering: str,
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    cache_format: str,
    extra_cache: torch.Tensor,
    extra_indices: torch.Tensor,
    extra_format: str,
    tokens: list[int] | None = None,
    *,
    extra_topk_length: torch.Tensor | None = None,
    extra_block_table: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.ops.mla.paged_sparse_attention.extra(
        q,
        cache,
        indices,
        SCALE,
        cache_format,
        extra_cache,
        extra_indices,
        extra_format,
        extra_topk_length=extra_topk_length,
        extra_block_table=extra_block_table,
        **options,
    )
    operands = [operand(lowering, name, q.dtype) for name in (cache_format, extra_format)]
    extra = attention_oracle.Source(extra_cache, extra_format, extra_indices, extra_topk_length, extra_block_table)
    expected = attention_oracle.attention(
        q,
        cache,
        indices,
        SCALE,
        operand=None if None in operands else operands[0],
        tokens=tokens,
        cache_format=cache_format,
        extra=extra,
        **options,
    )
    attention_oracle.assert_close(out, lse, expected)
    return out, lse


def rows_with_wide_scales(
    cache_format: str, power: int, num_tokens: int, topk: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache and indices. Some keys have scales that float16 does not hold together: a whole row, one end, one, none.

    Every other group is 2**power times as large, and one of the others 2**-12 times.
    """
    cache = filled_cache(cache_format, 64, 64, device)
    if cache_format == "fp8_ds_mla_v4":
        scales = planar_views(cache, cache_format)[1][32:, :, :7]
        scales[..., ::2] += power if power > 0 else power - 4
        scales[..., 1] -= 12
    else:
        large = 2.0 ** (power if power > 0 else power - 4)
        factors = torch.tensor([large, 2.0**-12, large, 1.0], device=device)
        scales = cache[32:, :, 512:528].contiguous().view(torch.float32)
        cache[32:, :, 512:528] = (scales * factors).view(torch.uint8)
    indices = some_indices(num_tokens, topk, 32 * 64, device)
    indices[indices >= 32 * 64] = INT_MAX
    wide = torch.zeros(num_tokens, topk, dtype=torch.bool, device=device)
    part = topk * 2 // 5
    wide[0], wide[1, :part], wide[2, -part:], wide[3, topk - 20] = True, True, True, True
    return cache, torch.where(wide & (indices >= 0) & (indices < INT_MAX), indices + 32 * 64, indices)
