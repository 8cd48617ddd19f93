"""Sample inputs of dense attention, and of the merge of many parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..formats import FORMATS, LATENT_DIM, LATENT_FORMATS, PLAIN
from .maker import NUM_HEADS, SCALE, Case, Maker, halves, padded_blocks, wide_rows


def merge_stacked(make: Maker) -> Iterator[Case]:
    def parts(count: int, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
        out = make.normal(count, num_tokens, NUM_HEADS, 128, dtype=dtype)
        return out, make.normal(count, num_tokens, NUM_HEADS, dtype=torch.float32)

    for dtype in PLAIN.values():
        yield f"{str(dtype).removeprefix('torch.')} five tokens", parts(4, 5, dtype), {}
    yield "no tokens", parts(3, 0), {}
    yield "one token", parts(3, 1), {}
    yield "no parts", parts(0, 2), {}
    outs, lses = parts(3, 3)
    lses[:2, 0], lses[:, 1], lses[2, 2] = -torch.inf, torch.inf, -torch.inf
    outs[:, 1] = torch.nan
    yield "empty parts", (outs, lses), {}
    outs, lses = parts(3, 2)
    yield "wide rows and transposed lse", (wide_rows(outs), lses.transpose(1, 2).contiguous().transpose(1, 2)), {}


def prefill_attention(make: Maker) -> Iterator[Case]:
    def tensors(
        num_tokens: int, num_kv: int, dims: tuple[int, int], dtype: torch.dtype = torch.bfloat16
    ) -> tuple[torch.Tensor, ...]:
        q, k = make.normal(num_tokens, 4, dims[0], dtype=dtype), make.normal(num_kv, 2, dims[0], dtype=dtype)
        return q, k, make.normal(num_kv, 2, dims[1], dtype=dtype)

    starts, lens = make.int32([0, 3, 3, 5]), make.int32([0, 3, 7, 8])
    for dtype in PLAIN.values():
        name = f"{str(dtype).removeprefix('torch.')} five tokens"
        yield name, (*tensors(5, 5, (192, 128), dtype), starts, starts, 3, 3, SCALE), {}
    for dims in ((256, 256), (128, 128), (24, 7)):
        yield f"{dims[0]}/{dims[1]} over a context", (*tensors(5, 8, dims), starts, lens, 3, 4, SCALE), {}
    full = {"causal": False}
    yield "not causal", (*tensors(5, 8, (192, 128)), starts, lens, 3, 4, SCALE), full
    yield "no tokens", (*tensors(0, 0, (192, 128)), make.int32([0, 0]), make.int32([0, 0]), 0, 0, SCALE), {}
    yield "one token", (*tensors(1, 1, (192, 128)), make.int32([0, 1]), make.int32([0, 1]), 1, 1, SCALE), {}
    yield "no requests", (*tensors(2, 3, (192, 128)), make.int32([0]), make.int32([0]), 0, 0, SCALE), {}
    yield "no keys", (*tensors(5, 0, (192, 128)), starts, make.int32([0, 0, 0, 0]), 3, 0, SCALE), full
    yield "tokens of no request", (*tensors(8, 9, (192, 128)), starts, lens, 3, 4, SCALE), {}
    q, k, v = (wide_rows(tensor) for tensor in tensors(5, 8, (192, 128)))
    yield "wide rows", (q, k, v, starts, lens, 3, 4, SCALE), {}


def paged_attention(make: Maker) -> Iterator[Case]:
    table, requests, lens = make.block_table(), make.int32([0, 1, 1, -1, 7]), make.int32([6, 11, 12, 5, 3])

    def case(cache_format: str, num_tokens: int, cache: torch.Tensor | None = None) -> tuple[Any, ...]:
        dtype, head_dim = PLAIN.get(cache_format, torch.bfloat16), FORMATS[cache_format].head_dims[0]
        q = make.normal(num_tokens, NUM_HEADS, head_dim, dtype=dtype)
        cache = make.cache(cache_format) if cache is None else cache
        return q, cache, table, requests[:num_tokens], lens[:num_tokens], SCALE, cache_format

    for cache_format in LATENT_FORMATS:
        yield f"{cache_format} five tokens", case(cache_format, 5), {}
    for cache_format in ("bf16", "fp8_ds_mla"):
        yield f"{cache_format} no tokens", case(cache_format, 0), {}
        yield f"{cache_format} one token", case(cache_format, 1), {}
        q, cache, *rest = case(cache_format, 5)
        wide = (wide_rows(q), padded_blocks(cache), wide_rows(table), *rest[1:])
        yield f"{cache_format} padded blocks and wide rows", wide, {}
        q, *rest = case(cache_format, 5)
        latent, rope = halves(q)
        yield f"{cache_format} halves", (latent, *rest), {"q_rope": rope}
        yield f"{cache_format} deterministic", case(cache_format, 5), {"deterministic": True}
    q, cache, _, requests, _, *rest = case("bf16", 5)
    garbage = make.int32([[2, 99, -5], [-(2**31), 2**31 - 1, 0]])
    extremes = make.int32([12, 2**31 - 1, -(2**31), 0, 5])
    yield "bf16 anything out of range", (q, cache, garbage, requests, extremes, *rest), {}
    yield "bf16 no requests", (q, cache, table[:0], requests, lens, *rest), {}
    narrow = make.normal(2, 1, LATENT_DIM)
    latents = (narrow, make.cache("bf16", LATENT_DIM), table, requests[:2], lens[:2], SCALE, "bf16")
    yield "bf16 one head of 512", latents, {}
