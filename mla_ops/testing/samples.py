"""Sample inputs for every op: what an opcheck suite runs over.

    from mla_ops.testing import op_names, sample_inputs

    @pytest.mark.parametrize("name", op_names())
    def test_ops(name):
        for sample in sample_inputs(name, "cuda"):
            torch.library.opcheck(sample.op, sample.args, sample.kwargs)

Small (opcheck clones them several times), reproducible, and without NaN or uninitialised memory in any output, which
opcheck would compare and find different. Every sample is legal: what an op refuses is in `tests/test_errors.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from ..formats import FORMATS, LATENT_DIM, LATENT_FORMATS, PLAIN, ROPE_DIM, allocate_cache
from ..registry import outputs_of
from . import samples_indexer as indexer
from .maker import (
    BLOCK_SIZE,
    FILL,
    NUM_BLOCKS,
    NUM_HEADS,
    SCALE,
    TOPK,
    Case,
    Maker,
    by_token,
    halves,
    padded_blocks,
    wide_rows,
)
from .samples_dense import merge_stacked, paged_attention, prefill_attention


@dataclass(frozen=True)
class Sample:
    """Arguments of one call.

    Attributes:
        name: what is special about it, in words.
        args, kwargs: as the op takes them.
        op: the overload that takes them.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    op: Any = None

    def __repr__(self) -> str:
        return self.name


def _concat_and_cache(make: Maker) -> Iterator[Case]:
    def keys(
        num_tokens: int, dtype: torch.dtype = torch.bfloat16, cache_format: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latent_dim = FORMATS[cache_format].latent_dim if cache_format else LATENT_DIM
        return make.normal(num_tokens, latent_dim, dtype=dtype), make.normal(num_tokens, ROPE_DIM, dtype=dtype)

    for cache_format in LATENT_FORMATS:
        dtype = PLAIN.get(cache_format, torch.bfloat16)
        slots, five = make.int64([3, 19, 0, 8, 7]), keys(5, dtype, cache_format)
        yield f"{cache_format} five tokens", (*five, make.cache(cache_format), slots, cache_format), {}
    for cache_format in ("bf16", "fp8_ds_mla", "fp8_ds_mla_v4"):
        cache = make.cache(cache_format)
        no_token, one, two, five = (keys(n, cache_format=cache_format) for n in (0, 1, 2, 5))
        yield f"{cache_format} no tokens", (*no_token, cache, make.int64([]), cache_format), {}
        yield f"{cache_format} one token", (*one, cache.clone(), make.int64([6]), cache_format), {}
        padded = padded_blocks(cache)
        yield f"{cache_format} padded blocks", (*two, padded, make.int64([4, 15]), cache_format), {}
        slots = make.int64([-1, 2, 20, 2**40, -7])
        yield f"{cache_format} slots out of range", (*five, cache.clone(), slots, cache_format), {}
    v4 = by_token(make.cache("fp8_ds_mla_v4"), "fp8_ds_mla_v4")
    slots = make.int64([5, 18])
    yield "fp8_ds_mla_v4 seen token by token", (*keys(2, cache_format="fp8_ds_mla_v4"), v4, slots, "fp8_ds_mla_v4"), {}
    fp8 = make.cache("fp8_ds_mla")
    yield "fp8_ds_mla fp32 keys", (*keys(3, torch.float32), fp8, make.int64([1, 2, 3]), "fp8_ds_mla"), {}
    yield "fp8_ds_mla more keys than slots", (*keys(4), fp8.clone(), make.int64([5, 9]), "fp8_ds_mla"), {}
    yield "fp8_ds_mla more slots than keys", (*keys(2), fp8.clone(), make.int64([5, 9, 11, 12]), "fp8_ds_mla"), {}
    fused = make.normal(3, LATENT_DIM + ROPE_DIM)
    kv_c, k_pe = fused.split((LATENT_DIM, ROPE_DIM), dim=1)
    yield "fp8_ds_mla halves of one projection", (kv_c, k_pe, fp8.clone(), make.int64([0, 1, 2]), "fp8_ds_mla"), {}
    kv_c, k_pe = keys(2)
    kv_c[0, 3], kv_c[1, 200], k_pe[0, 5] = torch.nan, torch.inf, -torch.inf
    yield "fp8_ds_mla keys not finite", (kv_c, k_pe, fp8.clone(), make.int64([5, 9]), "fp8_ds_mla"), {}
    no_rope = make.normal(2, 0)
    index_keys = (make.normal(2, 128), no_rope, make.cache("bf16", 128), make.int64([5, 9]), "bf16")
    yield "bf16 index keys without a RoPE part", index_keys, {}
    latent = (make.normal(2, 448), make.normal(2, 64), make.cache("bf16", 512), make.int64([5, 9]), "bf16")
    yield "bf16 rows of 512", latent, {}


def _compress_and_cache(make: Maker) -> Iterator[Case]:
    def step(
        positions: list[int], requests: list[int], slots: list[int], width: int = 512, fmt: str = "bf16"
    ) -> list[Any]:
        head_dim = 128 if width <= 256 else 512
        keys = [make.normal(len(positions), width) for _ in range(2)]
        ratio = 2 if width > head_dim else 3
        weights = make.normal(ratio, width, dtype=torch.float32), make.normal(head_dim)
        states = make.normal(NUM_BLOCKS, 2, 2 * width, dtype=torch.float32)
        cache = allocate_cache(fmt, NUM_BLOCKS, BLOCK_SIZE, head_dim=head_dim, device=make.device)
        given = make.int32(requests), make.int32(positions), make.int64(slots)
        table = make.block_table()
        return [*keys, *weights, make.normal(9, 64, dtype=torch.float32), states, cache, table, *given, 1e-6, fmt]

    for width in (512, 1024):
        prefill_and_decode = step([0, 1, 2, 5, 3], [0, 0, 0, 1, 0], [3, 1, 0, 7, 9], width)
        yield f"width {width} prefill and decode", tuple(prefill_and_decode), {}
    for fmt in ("fp16", "fp32", "fp8_ds_mla_v4"):
        yield f"{fmt} one token", tuple(step([5], [1], [19], 1024, fmt)), {}
    yield "fp8_index keys", tuple(step([3, 4, 5], [1, 1, 1], [2, 6, 4], 256, "fp8_index")), {}
    yield "no tokens", tuple(step([], [], [])), {}
    yield "no requests", tuple(part[:0] if i == 7 else part for i, part in enumerate(step([2, 5], [0, -1], [1, 2]))), {}
    yield "index keys", tuple(step([3, 4, 5], [1, 1, 1], [2, 6, 4], 256)), {}
    everywhere = step([2, 2, -1, 2**31 - 1, 2, 8], [-1, 7, 0, 1, 0, 1], [1, 2, 3, 4, -1, 99])
    yield "anything out of range", tuple(everywhere), {}
    ring = step(list(range(9)), [0] * 9, list(range(9)))
    ring[5], ring[7] = padded_blocks(ring[5]), make.int32([[1, 3], [4, 2]])
    ring[6] = padded_blocks(ring[6])
    ring[:2] = make.normal(9, 1024).split(512, dim=1)
    yield "a ring that one step goes round twice, in padded blocks", tuple(ring), {}
    holes = step([5, 5, 8], [0, 1, 1], [1, 2, 3])
    holes[7] = wide_rows(make.int32([[2, -1, 99], [-(2**31), 2**31 - 1, 4]]))
    yield "states in blocks outside the cache", tuple(holes), {}


def _gather_cache(make: Maker) -> Iterator[Case]:
    table, lens, starts = make.block_table(), make.int32([6, 9]), make.int32([0, 6, 15])
    for cache_format in LATENT_FORMATS:
        yield f"{cache_format} whole requests", (make.cache(cache_format), table, lens, starts, 15, cache_format), {}
    for cache_format in ("bf16", "fp8_ds_mla", "fp8_ds_mla_v4"):
        cache = make.cache(cache_format)
        yield f"{cache_format} no rows", (cache, table, lens, starts, 0, cache_format), {}
        no_requests = (cache, make.int32([]).view(0, 3), make.int32([]), make.int32([0]), 2, cache_format)
        yield f"{cache_format} no requests", no_requests, {}
        yield f"{cache_format} padded blocks", (padded_blocks(cache), table, lens, starts, 15, cache_format), {}
        tail = (cache, table, lens, make.int32([0, 2, 5]), 8, cache_format)
        offset = {"gather_lens": make.int32([2, 3]), "offset": 2}
        yield f"{cache_format} last tokens at an offset", tail, offset
    v4 = by_token(make.cache("fp8_ds_mla_v4"), "fp8_ds_mla_v4")
    yield "fp8_ds_mla_v4 seen token by token", (v4, table, lens, starts, 15, "fp8_ds_mla_v4"), {}
    bf16 = make.cache("bf16")
    one = (bf16, make.int32([[3]]), make.int32([1]), make.int32([0, 1]), 1, "bf16")
    yield "bf16 one row", one, {}
    garbage = make.int32([[2, 99, -5], [-(2**31), 2**31 - 1, 0]])
    yield "bf16 block table out of range", (bf16, garbage, lens, starts, 15, "bf16"), {}
    yield "bf16 requests longer than the block table", (bf16, table[:, :1], lens, starts, 15, "bf16"), {}


def _convert(make: Maker) -> Iterator[Case]:
    requests = make.int32([0, 1, 1, 0, 1])
    indices = make.indices(0, 12, 5, TOPK)
    table = make.block_table()
    yield "five tokens", (requests, table, indices, BLOCK_SIZE), {}
    yield "five tokens compacted", (requests, table, indices, BLOCK_SIZE), {"compact": True}
    yield "five tokens of a cache of two blocks", (requests, table, indices, BLOCK_SIZE), {"num_blocks": 2}
    yield "one token", (requests[:1], table, indices[:1], BLOCK_SIZE), {}
    yield "no tokens", (requests[:0], table, indices[:0], BLOCK_SIZE), {"compact": True}
    yield "no requests", (make.int32([-1, 0]), table[:0], indices[:2], BLOCK_SIZE), {}
    yield "an empty selection", (requests, table, indices[:, :0], BLOCK_SIZE), {}
    garbage = make.int32([[-1, 5, 99, 2**31 - 1, -(2**31), 0]]).repeat(3, 1)
    wild = (make.int32([0, -1, 7]), table, garbage, BLOCK_SIZE)
    yield "indices and requests out of range", wild, {"compact": True, "num_blocks": NUM_BLOCKS}
    yield "wide rows", (requests, wide_rows(table), wide_rows(indices), BLOCK_SIZE), {}


def _filter(make: Maker) -> Iterator[Case]:
    indices, context = make.indices(-1, 12, 5, TOPK), make.int32([0, 4, 12, 100, -3])
    yield "five tokens", (indices, context), {}
    yield "one token", (indices[:1], context[1:2]), {}
    yield "no tokens", (indices[:0], context[:0]), {}
    yield "an empty selection", (indices[:, :0], context), {}
    yield "wide rows", (wide_rows(indices), context), {}


def _extremes(make: Maker) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, request ids and a block table with the ends of int32 among them."""
    positions = make.int32([7, 2**31 - 1, -(2**31), 9, 5])
    requests = make.int32([0, 1, 1, 2**31 - 1, -(2**31)])
    return positions, requests, make.int32([[2, -(2**31), 2**31 - 1], [99, 1, -1]])


def _sliding_window(make: Maker) -> Iterator[Case]:
    positions, requests, table = make.int32([0, 4, 11, 2, 9]), make.int32([0, 1, 1, 0, -1]), make.block_table()
    yield "five tokens", (positions, requests, table, TOPK, BLOCK_SIZE), {}
    yield "five tokens of a cache of two blocks", (positions, requests, table, TOPK, BLOCK_SIZE), {"num_blocks": 2}
    yield "one token", (positions[1:2], requests[1:2], table, TOPK, BLOCK_SIZE), {}
    yield "no tokens", (positions[:0], requests[:0], table, TOPK, BLOCK_SIZE), {}
    yield "no requests", (positions, requests, table[:0], TOPK, BLOCK_SIZE), {}
    yield "an empty window", (positions, requests, table, 0, BLOCK_SIZE), {}
    yield "anything out of range", (*_extremes(make), TOPK, BLOCK_SIZE), {"num_blocks": NUM_BLOCKS}
    yield "wide rows", (positions, requests, wide_rows(table), TOPK, BLOCK_SIZE), {}


def _compressed(make: Maker) -> Iterator[Case]:
    positions, requests, table = make.int32([2, 7, 23, 3, 9]), make.int32([0, 1, 1, 0, -1]), make.block_table()
    yield "five tokens", (positions, requests, table, 4, 2, TOPK), {}
    yield "five tokens of a cache of two blocks", (positions, requests, table, 4, 2, TOPK), {"num_blocks": 2}
    yield "rows too narrow", (positions, requests, table, 2, 2, 3), {}
    yield "one token", (positions[1:2], requests[1:2], table, 4, 2, TOPK), {}
    yield "no tokens", (positions[:0], requests[:0], table, 4, 2, TOPK), {}
    yield "no requests", (positions, requests, table[:0], 4, 2, TOPK), {}
    yield "no width", (positions, requests, table, 4, 2, 0), {}
    yield "anything out of range", (*_extremes(make), 1, 2, 12), {"num_blocks": NUM_BLOCKS}
    yield "wide rows", (positions, requests, wide_rows(table), 4, 2, TOPK), {}


def _global_topk(make: Maker) -> Iterator[Case]:
    for name, (requests, table, indices, block_size), kwargs in _convert(make):
        bounds = {key: value for key, value in kwargs.items() if key != "compact"}
        if not name.endswith("compacted"):
            yield name, (indices, requests, table, block_size), bounds


def _combine(make: Maker) -> Iterator[Case]:
    chosen, requests = make.indices(-1, 6, 5, TOPK), make.int32([0, 0, 1, 1, -1])
    positions, lens, gathered = make.int32([6, 7, 19, 20, 3]), make.int32([8, 21]), make.int32([8, 5])
    sizes = (4, 4, 16, 8)
    yield "five tokens", (chosen, positions, requests, lens, gathered, *sizes), {}
    yield "one token", (chosen[2:3], positions[2:3], requests[2:3], lens, gathered, *sizes), {}
    yield "no tokens", (chosen[:0], positions[:0], requests[:0], lens, gathered, *sizes), {}
    yield "no requests", (chosen, positions, requests, lens[:0], gathered[:0], *sizes), {}
    yield "an empty selection", (chosen[:, :0], positions, requests, lens, gathered, *sizes), {}
    yield "an empty window", (chosen, positions, requests, lens, gathered, 0, 4, 8, 8), {}
    extreme, strangers, _ = _extremes(make)
    wild = make.int32([2**31 - 1, -(2**31)])
    yield "anything out of range", (chosen, extreme, strangers, wild, wild, 4, 1, 2**30, 2**29), {}
    yield "wide rows", (wide_rows(chosen), positions, requests, lens, gathered, *sizes), {}


def _selection(make: Maker, num_tokens: int) -> torch.Tensor:
    return make.indices(-1, NUM_BLOCKS * BLOCK_SIZE, num_tokens, TOPK)


def _paged_sparse_attention(make: Maker) -> Iterator[Case]:
    for cache_format in LATENT_FORMATS:
        dtype, head_dim = PLAIN.get(cache_format, torch.bfloat16), FORMATS[cache_format].head_dims[0]
        cache, q = make.cache(cache_format), make.normal(5, NUM_HEADS, head_dim, dtype=dtype)
        yield f"{cache_format} five tokens", (q, cache, _selection(make, 5), SCALE, cache_format), {}
    for cache_format in ("bf16", "fp8_ds_mla", "fp8_ds_mla_v4"):
        head_dim = FORMATS[cache_format].head_dims[0]
        cache, q, indices = make.cache(cache_format), make.normal(5, NUM_HEADS, head_dim), _selection(make, 5)
        yield f"{cache_format} no tokens", (q[:0], cache, indices[:0], SCALE, cache_format), {}
        yield f"{cache_format} one token", (q[:1], cache, indices[:1], SCALE, cache_format), {}
        padded = padded_blocks(cache)
        yield (
            f"{cache_format} padded blocks and wide rows",
            (
                wide_rows(q),
                padded,
                wide_rows(indices),
                SCALE,
                cache_format,
            ),
            {},
        )
        yield (
            f"{cache_format} lengths and sinks",
            (q, cache, indices, SCALE, cache_format),
            {
                "topk_length": make.int32([6, 0, 3, 99, -2]),
                "attn_sink": torch.tensor([0.5, -torch.inf, torch.inf], dtype=torch.float32, device=make.device),
            },
        )
        yield (
            f"{cache_format} request-local indices",
            (q, cache, make.indices(-1, 12, 5, TOPK), SCALE, cache_format),
            {
                "block_table": make.block_table(),
                "req_id_per_token": make.int32([0, 1, 1, -1, 7]),
            },
        )
    fp8, q, indices = make.cache("fp8_ds_mla"), make.normal(5, NUM_HEADS, LATENT_DIM + ROPE_DIM), _selection(make, 5)
    for cache_format, cache in (("fp8_ds_mla", fp8), ("bf16", make.cache("bf16"))):
        latent, rope = halves(q)
        yield f"{cache_format} halves", (latent, cache, indices, SCALE, cache_format), {"q_rope": rope}
    latent, rope = halves(q[:1])
    yield "fp8_ds_mla halves of one token", (latent, fp8, indices[:1], SCALE, "fp8_ds_mla"), {"q_rope": rope}
    yield "fp8_ds_mla deterministic", (q, fp8, indices, SCALE, "fp8_ds_mla"), {"deterministic": True}
    v4, q = by_token(make.cache("fp8_ds_mla_v4"), "fp8_ds_mla_v4"), make.normal(2, NUM_HEADS, LATENT_DIM)
    yield "fp8_ds_mla_v4 seen token by token", (q, v4, _selection(make, 2), SCALE, "fp8_ds_mla_v4"), {}
    head_dim = LATENT_DIM + ROPE_DIM
    bf16, q = make.cache("bf16"), make.normal(2, NUM_HEADS, head_dim)
    garbage = make.int32([[-1, -(2**31), 20, 2**31 - 1], [0, 19, 19, 5]])
    yield "bf16 indices out of range", (q, bf16, garbage, SCALE, "bf16"), {}
    yield "bf16 an empty selection", (q, bf16, garbage[:, :0], SCALE, "bf16"), {}
    narrow = make.normal(2, 1, LATENT_DIM)
    yield "bf16 one head of 512", (narrow, make.cache("bf16", LATENT_DIM), garbage, SCALE, "bf16"), {}
    q32 = make.normal(2, NUM_HEADS, head_dim, dtype=torch.float32)
    yield "fp8_ds_mla fp32 queries", (q32, make.cache("fp8_ds_mla"), garbage, SCALE, "fp8_ds_mla"), {}
    poisoned = make.cache("bf16")
    poisoned[0, 1] = torch.nan
    yield "bf16 a NaN in a row that nobody attends", (q, poisoned, garbage, SCALE, "bf16"), {}


def _two_caches(make: Maker) -> Iterator[Case]:
    """A window in pages of 4 and compressed tokens in pages of 2, of which there are 14."""

    def caches(cache_format: str, extra_format: str, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        return make.cache(cache_format, head_dim), make.cache(extra_format, head_dim, block_size=2, num_blocks=7)

    def case(num_tokens: int, cache_format: str, extra_format: str, head_dim: int = LATENT_DIM) -> tuple[Any, ...]:
        cache, extra = caches(cache_format, extra_format, head_dim)
        q, extra_indices = make.normal(num_tokens, NUM_HEADS, head_dim), make.indices(-1, 14, num_tokens, 3)
        return q, cache, _selection(make, num_tokens), SCALE, cache_format, extra, extra_indices, extra_format

    v4 = "fp8_ds_mla_v4"
    for cache_format, extra_format, head_dim in (
        (v4, v4, 512),
        ("bf16", "bf16", 576),
        ("fp8_ds_mla", "bf16", 576),
        ("bf16", v4, 512),
    ):
        yield f"{cache_format} and {extra_format}, five tokens", case(5, cache_format, extra_format, head_dim), {}
    yield "no tokens", case(0, v4, v4), {}
    yield "one token", case(1, v4, v4), {}
    q, cache, indices, scale, fmt, extra, extra_indices, extra_fmt = case(5, v4, v4)
    wide = (wide_rows(q), padded_blocks(cache), wide_rows(indices), scale, fmt)
    yield "padded blocks and wide rows", (*wide, padded_blocks(extra), wide_rows(extra_indices), extra_fmt), {}
    yield "seen token by token", (*case(2, v4, v4)[:5], by_token(extra, v4), extra_indices[:2], v4), {}
    options = {
        "topk_length": make.int32([6, 0, 3, 99, 0]),
        "extra_topk_length": make.int32([0, 3, 99, 1, -2]),
        "attn_sink": torch.tensor([0.5, -torch.inf, torch.inf], dtype=torch.float32, device=make.device),
    }
    yield "lengths and sinks", case(5, v4, v4), options
    requests, extra_table = make.int32([0, 1, 1, -1, 7]), make.int32([[6, -1], [0, 3]])
    tables = {"block_table": make.block_table(), "extra_block_table": extra_table}
    yield "request-local indices of both", case(5, v4, v4), {**tables, "req_id_per_token": requests}
    one_table = {"extra_block_table": extra_table, "req_id_per_token": requests}
    yield "request-local indices of the extra cache", case(5, v4, "bf16"), one_table
    yield "deterministic", case(5, v4, v4), {"deterministic": True}
    q, cache, indices, scale, fmt, extra, extra_indices, extra_fmt = case(3, v4, v4)
    yield (
        "an empty selection of each",
        (q, cache, indices[:, :0], scale, fmt, extra, extra_indices[:, :0], extra_fmt),
        {},
    )


def _sparse_attention(make: Maker) -> Iterator[Case]:
    head_dim, num_kv = LATENT_DIM + ROPE_DIM, NUM_BLOCKS * BLOCK_SIZE
    for dtype in PLAIN.values():
        q, kv = make.normal(5, NUM_HEADS, head_dim, dtype=dtype), make.normal(num_kv, head_dim, dtype=dtype)
        yield f"{str(dtype).removeprefix('torch.')} five tokens", (q, kv, _selection(make, 5), SCALE), {}
    q, kv, indices = make.normal(5, NUM_HEADS, head_dim), make.normal(num_kv, head_dim), _selection(make, 5)
    yield "no tokens", (q[:0], kv, indices[:0], SCALE), {}
    yield "one token", (q[:1], kv, indices[:1], SCALE), {}
    yield "no keys", (q, kv[:0], indices, SCALE), {}
    yield "wide rows", (wide_rows(q), wide_rows(kv), wide_rows(indices), SCALE), {}
    yield (
        "lengths and sinks",
        (q, kv, indices, SCALE),
        {
            "topk_length": make.int32([6, 0, 3, 99, -2]),
            "attn_sink": torch.tensor([0.5, -torch.inf, torch.inf], dtype=torch.float32, device=make.device),
        },
    )
    yield "deterministic", (q, kv, indices, SCALE), {"deterministic": True}
    yield "one head of 512", (make.normal(2, 1, LATENT_DIM), make.normal(num_kv, LATENT_DIM), indices[:2], SCALE), {}


def _merge_attention_states(make: Maker) -> Iterator[Case]:
    def side(num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
        out = make.normal(num_tokens, NUM_HEADS, LATENT_DIM, dtype=dtype)
        return out, make.normal(num_tokens, NUM_HEADS, dtype=torch.float32)

    for dtype in PLAIN.values():
        yield f"{str(dtype).removeprefix('torch.')} five tokens", (*side(5, dtype), *side(5, dtype)), {}
    yield "no tokens", (*side(0), *side(0)), {}
    yield "one token", (*side(1), *side(1)), {}
    (out_a, lse_a), (out_b, lse_b) = side(3), side(3)
    lse_a[0], lse_b[0], lse_a[1], lse_b[2] = -torch.inf, -torch.inf, -torch.inf, torch.inf
    out_a[1], out_b[2] = torch.nan, torch.nan
    yield "empty rows", (out_a, lse_a, out_b, lse_b), {}
    (out_a, lse_a), (out_b, lse_b) = side(2), side(2)
    yield "wide rows and transposed lse", (wide_rows(out_a), lse_a.t().contiguous().t(), out_b, wide_rows(lse_b)), {}


def _build_step_metadata(make: Maker) -> Iterator[Case]:
    max_num_requests, max_num_tokens, max_blocks = 4, 12, 4

    def buffers() -> tuple[torch.Tensor, ...]:
        tokens = [torch.full((max_num_tokens,), FILL, dtype=torch.int32, device=make.device) for _ in range(4)]
        req_id_per_token, positions, key_lens, topk_length = tokens
        return (
            torch.full((max_num_requests + 1,), FILL, dtype=torch.int32, device=make.device),
            torch.full((max_num_requests,), FILL, dtype=torch.int32, device=make.device),
            torch.full((max_num_requests, max_blocks), FILL, dtype=torch.int32, device=make.device),
            req_id_per_token,
            positions,
            torch.full((max_num_tokens,), FILL, dtype=torch.int64, device=make.device),
            key_lens,
            topk_length,
        )

    def step(starts: list[int], lens: list[int], table: torch.Tensor) -> tuple[Any, ...]:
        return (make.int32(starts), make.int32(lens), table, *buffers(), BLOCK_SIZE, TOPK)

    table = make.block_table()
    yield "two decodes", step([0, 1, 2], [6, 9], table), {}
    yield "a decode and a prefill", step([0, 1, 10], [6, 9], table), {}
    yield "one request", step([0, 1], [1], table[:1]), {}
    yield "no requests", step([0], [], table[:0]), {}
    yield "a request without tokens", step([0, 0, 3], [6, 9], table), {}
    yield "a full batch", step([0, 3, 6, 9, 12], [3, 4, 5, 6], make.indices(0, NUM_BLOCKS, 4, max_blocks)), {}
    yield "requests longer than the block table", step([0, 4, 8], [6, 9], table[:, :1]), {}
    yield "wide rows", step([0, 1, 2], [6, 9], wide_rows(table)), {}


def _build_compressed_metadata(make: Maker) -> Iterator[Case]:
    def step(positions: torch.Tensor, requests: torch.Tensor, table: torch.Tensor) -> tuple[Any, ...]:
        buffer = torch.full((4, 4), FILL, dtype=torch.int32, device=make.device)
        slots = torch.full(positions.shape, FILL, dtype=torch.int64, device=make.device)
        return (positions, requests, table, buffer, slots, torch.full_like(positions, FILL), 4, 2)

    positions, requests, table = make.int32([2, 3, 23, 7, 3]), make.int32([0, 0, 1, 1, -1]), make.block_table()
    yield "five tokens", step(positions, requests, table), {}
    yield "one token", step(positions[1:2], requests[1:2], table), {}
    yield "no tokens", step(positions[:0], requests[:0], table), {}
    yield "no requests", step(positions, requests, table[:0]), {}
    yield "anything out of range", step(*_extremes(make)), {}
    yield "wide rows", step(positions, requests, wide_rows(table)), {}


_SAMPLES: dict[str, Callable[[Maker], Iterator[Case]]] = {
    "build_compressed_metadata": _build_compressed_metadata,
    "build_step_metadata": _build_step_metadata,
    "combine_topk_swa_indices": _combine,
    "compressed_indices": _compressed,
    "compute_global_topk_indices_and_lens": _global_topk,
    "compress_and_cache": _compress_and_cache,
    "concat_and_cache": _concat_and_cache,
    "convert_req_index_to_global_index": _convert,
    "filter_prefill_indices": _filter,
    "gather_cache": _gather_cache,
    "merge_attention_states": _merge_attention_states,
    "merge_attention_states.stacked": merge_stacked,
    "paged_attention": paged_attention,
    "paged_sparse_attention": _paged_sparse_attention,
    "paged_sparse_attention.extra": _two_caches,
    "prefill_attention": prefill_attention,
    "sliding_window_indices": _sliding_window,
    "sparse_attention": _sparse_attention,
    "write_index_cache": indexer.write_index_cache,
    "gather_index_cache": indexer.gather_index_cache,
    "quantize_index_query": indexer.quantize_index_query,
    "indexer_logits": indexer.indexer_logits,
    "paged_indexer_logits": indexer.paged_indexer_logits,
    "topk_indices": indexer.topk_indices,
    "select_keys": indexer.select_keys,
    "select_keys.flat": indexer.select_keys_flat,
    "merge_topk": indexer.merge_topk,
}


def overload(op_name: str) -> Any:
    """The overload that `op_name` means: `"gather_cache"` or `"gather_cache.out"`."""
    name, _, suffix = op_name.partition(".")
    return getattr(getattr(torch.ops.mla, name), suffix or "default")


def functional(op_name: str) -> str:
    """The name without the `.out` of it: `"gather_cache"` for `"gather_cache.out"`, `"x.extra"` for `"x.extra_out"`."""
    return re.sub(r"[._]out$", "", op_name)


def out_overload(op_name: str) -> str:
    """The name of an op's form that writes into buffers: the inverse of `functional`."""
    return f"{op_name}_out" if "." in op_name else f"{op_name}.out"


def op_names() -> list[str]:
    """Every registered op, overloads included, e.g. `"gather_cache"` and `"gather_cache.out"`."""
    return list(_registered())


@cache
def _registered() -> tuple[str, ...]:
    names = (name.removeprefix("mla::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("mla::"))
    return tuple(sorted(names))


def output_names(op: Any) -> list[str]:
    """The arguments of an `.out` overload that take its outputs."""
    return [a.name for a in op._schema.arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write]


def _with_buffers(sample: Sample, op_name: str, *, wide: bool) -> Sample:
    """The same call into buffers of the caller's."""
    buffers = {}
    for name, (shape, dtype) in outputs_of(functional(op_name), *sample.args, **sample.kwargs).items():
        buffer = torch.full(shape, FILL, dtype=dtype, device=sample.args[0].device)
        buffers[name] = wide_rows(buffer) if wide else buffer
    name = f"{sample.name} into wide rows" if wide else sample.name
    return Sample(name, sample.args, {**sample.kwargs, **buffers}, overload(op_name))


def sample_inputs(op_name: str, device: torch.device | str = "cpu") -> list[Sample]:
    """Legal calls of one op, small and reproducible.

    Args:
        op_name: one of `op_names()`.
        device: where the tensors live.

    Returns:
        Samples, whose `name` says what is special. No two share memory that is written: a sample may be run as it is.

    Raises:
        ValueError: there is no such op, or it has no samples; with the names of those that have.
    """
    name = functional(op_name)
    if op_name not in op_names() or name not in _SAMPLES:
        known = ", ".join(known for known in op_names() if functional(known) in _SAMPLES)
        raise ValueError(f"sample_inputs: op_name must be one of {known}; got '{op_name}'")
    samples = [Sample(*case, overload(name)) for case in _SAMPLES[name](Maker(device))]
    if name == op_name:
        return samples
    buffered = [_with_buffers(sample, op_name, wide=False) for sample in samples]
    return [*buffered, _with_buffers(samples[0], op_name, wide=True)]
