"""Sample inputs of the lightning indexer's ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..formats import INDEX_DIM, PLAIN, allocate_cache
from ..kernels.reference.indexer import write_index_cache as write_reference
from .maker import BLOCK_SIZE, NUM_BLOCKS, NUM_HEADS, Case, Maker, by_token, padded_blocks, wide_rows

INDEX_FORMATS = ("fp8_index", *PLAIN)


def _index_cache(make: Maker, cache_format: str, block_size: int = BLOCK_SIZE) -> torch.Tensor:
    """Every slot written."""
    cache = allocate_cache(cache_format, NUM_BLOCKS, block_size, head_dim=INDEX_DIM)
    keys = torch.randn(NUM_BLOCKS * block_size, INDEX_DIM, dtype=torch.float32, generator=make.generator)
    write_reference(keys, cache, torch.arange(len(keys)), cache_format)
    return cache.to(make.device)


def write_index_cache(make: Maker) -> Iterator[Case]:
    for cache_format in INDEX_FORMATS:
        dtype = PLAIN.get(cache_format, torch.bfloat16)
        cache, slots = _index_cache(make, cache_format), make.int64([3, 19, 0, 8, 7])
        yield f"{cache_format} five tokens", (make.normal(5, INDEX_DIM, dtype=dtype), cache, slots, cache_format), {}
    cache = _index_cache(make, "fp8_index")
    yield "no tokens", (make.normal(0, INDEX_DIM), cache.clone(), make.int64([]), "fp8_index"), {}
    odd = _index_cache(make, "fp8_index", 3)
    yield "one token, blocks of three", (make.normal(1, INDEX_DIM), odd, make.int64([14]), "fp8_index"), {}
    tokens = by_token(cache.clone(), "fp8_index")
    yield "seen token by token", (make.normal(2, INDEX_DIM), tokens, make.int64([4, 15]), "fp8_index"), {}
    padded = padded_blocks(cache.clone())
    yield "padded blocks", (make.normal(2, INDEX_DIM), padded, make.int64([4, 15]), "fp8_index"), {}
    slots = make.int64([-1, 2, 20, 2**40, -7])
    yield "slots out of range", (make.normal(5, INDEX_DIM), cache.clone(), slots, "fp8_index"), {}
    keys = make.normal(3, INDEX_DIM, dtype=torch.float32)
    keys[0, 3], keys[1, 20], keys[2] = torch.nan, -torch.inf, 0
    yield "keys not finite, keys of zeros", (wide_rows(keys), cache.clone(), make.int64([5, 9, 1]), "fp8_index"), {}


def gather_index_cache(make: Maker) -> Iterator[Case]:
    table, lens, starts = make.block_table(), make.int32([6, 9]), make.int32([0, 6, 15])
    for cache_format in INDEX_FORMATS:
        cache = _index_cache(make, cache_format)
        yield f"{cache_format} whole requests", (cache, table, lens, starts, 15, cache_format), {}
    cache = _index_cache(make, "fp8_index")
    yield "no tokens", (cache, table, lens, starts, 0, "fp8_index"), {}
    yield "one token", (cache, table, lens, starts, 1, "fp8_index"), {}
    yield "no requests", (cache, table[:0], lens[:0], starts[:1], 3, "fp8_index"), {}
    garbage = make.int32([[2, -5, 99], [4, 2**31 - 1, 3]])
    yield "garbage table, lengths past it", (cache, garbage, make.int32([99, 11]), starts, 20, "fp8_index"), {}


def quantize_index_query(make: Maker) -> Iterator[Case]:
    for name, dtype in PLAIN.items():
        q, weights = make.normal(5, NUM_HEADS, INDEX_DIM, dtype=dtype), make.normal(5, NUM_HEADS, dtype=dtype)
        yield f"{name} five tokens", (q, weights, 0.0625), {}
    yield "no tokens", (make.normal(0, NUM_HEADS, INDEX_DIM), make.normal(0, NUM_HEADS), 0.5), {}
    weights = make.normal(1, NUM_HEADS, dtype=torch.float32)
    yield "one token of wide rows", (wide_rows(make.normal(1, NUM_HEADS, INDEX_DIM)), weights, 0.5), {}


def _queries(make: Maker, num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    q = make.normal(num_tokens, NUM_HEADS, INDEX_DIM, dtype=torch.float32).to(dtype)
    return q, make.normal(num_tokens, NUM_HEADS, dtype=torch.float32)


def _flat(make: Maker, clean: dict[str, Any], *topk: int) -> Iterator[Case]:
    for name, dtype in (("fp8", torch.float8_e4m3fn), *PLAIN.items()):
        q, weights = _queries(make, 5, dtype)
        keys = make.normal(11, INDEX_DIM, dtype=torch.float32).to(dtype)
        scale = {"k_scale": make.normal(11, dtype=torch.float32).abs() + 0.5} if name == "fp8" else {}
        rows = make.int32([0, 3, 10, -4, 7]), make.int32([11, 3, 11, 2, 99])
        yield f"{name} five tokens", (q, keys, weights, *rows, *topk), {**scale, **clean}
    one = make.int32([0]), make.int32([5])
    q, weights = _queries(make, 1, torch.bfloat16)
    yield "one token", (q, make.normal(5, INDEX_DIM), weights, *one, *topk), clean
    yield "no keys", (q, make.normal(0, INDEX_DIM), weights, *one, *topk), clean
    q, weights = _queries(make, 0, torch.bfloat16)
    yield "no tokens", (q, make.normal(5, INDEX_DIM), weights, one[0][:0], one[1][:0], *topk), clean


def indexer_logits(make: Maker) -> Iterator[Case]:
    # nothing is promised outside a row's keys without `clean`, and these are compared whole
    yield from _flat(make, {"clean": True})


def _paged(make: Maker, options: dict[str, Any], *size: int) -> Iterator[Case]:
    table = make.block_table()
    for cache_format in INDEX_FORMATS:
        q, weights = _queries(make, 5, PLAIN.get(cache_format, torch.float8_e4m3fn))
        rows = make.int32([1, 7, 0, 12, 5]), table, make.int32([0, 0, 1, 1, -1])
        yield (
            f"{cache_format} five tokens",
            (q, _index_cache(make, cache_format), weights, *rows, *size, cache_format),
            options,
        )
    cache = _index_cache(make, "fp8_index")
    q, weights = _queries(make, 1, torch.float8_e4m3fn)
    one, requests = make.int32([9]), make.int32([1])
    yield "one token", (q, cache, weights, one, table, requests, *size, "fp8_index"), options
    yield "no requests", (q, cache, weights, one, table[:0], requests, *size, "fp8_index"), options
    garbage = make.int32([[-1, 99, 0], [2**31 - 1, -(2**31), 3]])
    yield "garbage table, length past it", (q, cache, weights, one + 90, garbage, requests, *size, "fp8_index"), options
    q, weights = _queries(make, 0, torch.float8_e4m3fn)
    yield "no tokens", (q, cache, weights, one[:0], table, one[:0], *size, "fp8_index"), options


def paged_indexer_logits(make: Maker) -> Iterator[Case]:
    yield from _paged(make, {"clean": True}, 12)


def topk_indices(make: Maker) -> Iterator[Case]:
    scores = make.normal(5, 12, dtype=torch.float32)
    rows = {"row_starts": make.int32([0, 2, 5, -3, 11]), "row_ends": make.int32([12, 6, 5, 1, 99])}
    slots = {"block_table": make.block_table(), "req_id_per_token": make.int32([0, 1, 1, -1, 9]), "block_size": 4}
    yield "five tokens", (scores, 4), {"block_size": BLOCK_SIZE}
    yield "rows of their own range", (scores, 4), rows
    yield "sorted slots", (scores, 7), {**rows, **slots, "sorted": True}
    yield "one token, more wanted than there are", (wide_rows(scores[:1]), 40), {"sorted": True}
    yield "no tokens", (scores[:0], 3), {}
    yield "no columns", (scores[:, :0], 3), {}
    special = make.normal(2, 9, dtype=torch.float32)
    special[0, 2:6] = torch.nan
    special[0, :2] = -torch.inf
    special[1, ::2], special[1, 1::2] = 0.0, -0.0
    yield "not finite, and zeros of both signs", (special, 6), {}


def select_keys(make: Maker) -> Iterator[Case]:
    yield from _paged(make, {}, 4)
    q, weights = _queries(make, 2, torch.float8_e4m3fn)
    rows = make.int32([12, 6]), make.block_table(), make.int32([0, 1])
    yield "slots", (q, _index_cache(make, "fp8_index"), weights, *rows, 6, "fp8_index"), {"translate": True}


def select_keys_flat(make: Maker) -> Iterator[Case]:
    yield from _flat(make, {}, 4)


def merge_topk(make: Maker) -> Iterator[Case]:
    scores = make.normal(3, 8, dtype=torch.float32)
    indices = torch.stack([torch.randperm(20, generator=make.generator)[:8] for _ in range(3)]).to(scores.device)
    indices = indices.to(torch.int32)
    indices[0, 2:] = -1
    yield "three tokens", (scores, indices, 4), {}
    yield "one token, more wanted than there are", (scores[:1], indices[:1], 11), {}
    yield "no tokens", (scores[:0], indices[:0], 4), {}
    yield "no candidates", (scores[:, :0], indices[:, :0], 2), {}
