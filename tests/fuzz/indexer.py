"""Random calls of the lightning indexer's ops: scores against float64, choices against the reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch

from mla_ops.formats import PLAIN, allocate_cache, geometry
from mla_ops.kernels.reference.indexer import read_index_keys, write_index_cache

from .case import Arguments, Case, Judge
from .draw import Draw


def _index_cache(draw: Draw, cache_format: str) -> torch.Tensor:
    cache = allocate_cache(cache_format, draw.maybe_none(1, 6), draw.pick(1, 3, 16, 64), head_dim=128)
    blocks, block_size, _, _ = geometry(cache, cache_format)
    keys = draw.normal(blocks * block_size, 128, dtype=torch.float32)
    write_index_cache(keys, cache, torch.arange(len(keys)), cache_format)
    return cache


def index_cache(draw: Draw) -> Case:
    kind = draw.pick("write", "gather", "quantize")
    draw.few_forms &= draw.lowering == "triton" or kind != "write"
    cache_format = draw.pick("fp8_index", draw.form("index format", 2, *PLAIN))
    cache = _index_cache(draw, cache_format)
    blocks, block_size, _, _ = geometry(cache, cache_format)
    num_tokens, dtype = draw.tokens(), draw.form("index dtype", 2, *PLAIN.values())
    caches = {"index_cache": cache_format}
    if kind == "write":
        slots = torch.randperm(blocks * block_size)[:num_tokens].long()
        slots[torch.rand(len(slots)) < 0.1] = draw.pick(-1, 2**40, blocks * block_size)
        k = draw.special(draw.normal(num_tokens, 128, dtype=dtype, spread=15))
        given = {"k": k, "index_cache": cache, "slot_mapping": slots, "cache_format": cache_format}
        return Case("write_index_cache", given, caches=caches)
    if kind == "gather":
        requests, columns, rows = draw.pick(0, 1, 3), draw.maybe_none(1, 4), draw.pick(0, 1, 70)
        given = {
            "index_cache": cache,
            "block_table": draw.int32(0, blocks, requests, columns),
            "seq_lens": draw.int32(0, columns * block_size + 2, requests),
            "cu_seq_lens": draw.starts(requests, rows),
            "num_rows": rows,
            "cache_format": cache_format,
        }
        return Case("gather_index_cache", given, caches=caches)
    heads = draw.pick(1, 3, 32, 64)
    weights = draw.normal(num_tokens, heads, dtype=draw.form(f"weights of {dtype}", 1, *PLAIN.values()))
    q = draw.special(draw.normal(num_tokens, heads, 128, dtype=dtype, spread=15))
    return Case("quantize_index_query", {"q": q, "weights": weights, "scale": draw.pick(0.0625, 1.0, 1e-3)})


def _scored(draw: Draw) -> tuple[str, torch.dtype, int, int]:
    """Hopper's kernels take fp8 and 32 or 64 heads."""
    draw.few_forms &= draw.lowering == "triton" or draw.chance(0.5)
    if draw.few_forms:
        cache_format, heads = draw.form("scores", 3, *itertools.product(("fp8_index", *PLAIN), (1, 3, 32, 64)))
    else:
        cache_format, heads = "fp8_index", draw.pick(32, 64)
    return cache_format, PLAIN.get(cache_format, torch.float8_e4m3fn), draw.tokens(), heads


def _judge_scores(expected: Callable[[Arguments], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> Judge:
    """`expected` gives float64 scores, their bound, and which of them a row sees."""

    def judge(before: Arguments, after: Arguments, outputs: tuple[torch.Tensor, ...], lowering: str) -> None:
        exact, bound, seen = expected(before)
        found = outputs[0].double()
        close = (found == exact) | ((found - exact).abs() <= bound)
        assert close[seen].all(), f"scores: {(~close & seen).sum()} of {seen.sum()} beyond their bound"
        assert not before["clean"] or (found[~seen] == -math.inf).all(), "columns outside a row are not -inf"

    return judge


def _scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 scores of `[T, H, 128]` against `[T, N, 128]`, and how far a kernel may be from them.

    Hopper's fp8 tensor cores add the products of 32 elements, and what they were added to, with 13 bits behind the
    leading one; other products are exact in float32, and each addition of 128 + H is rounded or cut once.
    """
    q, keys, weights = q.double(), keys.double(), weights.double()
    products = torch.einsum("thd,tnd->thn", q, keys)
    sizes = torch.einsum("thd,tnd->thn", q.abs(), keys.abs())
    unit = 2.0**-12 if q.shape[1] else 0.0
    scores = torch.einsum("th,thn->tn", weights, products.relu())
    bound = torch.einsum("th,thn->tn", weights.abs(), sizes) * (unit + (132 + q.shape[1]) * 2.0**-23)
    return scores, bound + 1e-30


def indexer_logits(draw: Draw) -> Case:
    _, dtype, num_tokens, heads = _scored(draw)
    num_kv = draw.pick(0, 1, 64, 200)
    q, k = (draw.normal(*shape, dtype=torch.float32).to(dtype) for shape in ((num_tokens, heads, 128), (num_kv, 128)))
    weights = draw.normal(num_tokens, heads, dtype=torch.float32)
    with_scale, clean = draw.options(2, "scores", dtype)
    scale = torch.rand(num_kv) + 0.1 if dtype == torch.float8_e4m3fn and with_scale else None
    starts, ends = draw.int32(0, num_kv + 1, num_tokens), draw.int32(0, num_kv + 3, num_tokens)
    arguments = {"q": q, "k": k, "weights": weights, "row_starts": starts, "row_ends": ends, "k_scale": scale}
    if draw.chance(0.3):
        return Case("select_keys.flat", {**arguments, "topk": draw.pick(1, 7, 64, 300)}, _judge_selection)

    def expected(before: Arguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys = before["k"].double() * (scale.double().unsqueeze(1) if scale is not None else 1.0)
        column = torch.arange(num_kv)
        seen = (column >= starts.unsqueeze(1)) & (column < ends.unsqueeze(1))
        return *_scores(before["q"], keys.expand(num_tokens, -1, -1), before["weights"]), seen

    return Case("indexer_logits", {**arguments, "clean": clean}, _judge_scores(expected))


def paged_indexer_logits(draw: Draw) -> Case:
    cache_format, dtype, num_tokens, heads = _scored(draw)
    cache = _index_cache(draw, cache_format)
    blocks, block_size, _, _ = geometry(cache, cache_format)
    requests, columns = draw.pick(0, 1, 3), draw.maybe_none(1, 4)
    q = draw.normal(num_tokens, heads, 128, dtype=torch.float32).to(dtype)
    arguments = {
        "q": q,
        "index_cache": cache,
        "weights": draw.normal(num_tokens, heads, dtype=torch.float32),
        "lengths": draw.int32(0, columns * block_size + 2, num_tokens),
        "block_table": draw.int32(0, blocks, requests, columns),
        "req_id_per_token": draw.int32(0, requests, num_tokens),
        "cache_format": cache_format,
    }
    caches = {"index_cache": cache_format}
    if draw.chance(0.4):
        given = {**arguments, "topk": draw.pick(1, 7, 64, 300), "translate": draw.chance(0.5)}
        return Case("select_keys", given, _judge_selection, caches)
    width, (clean,) = draw.pick(0, 1, 50, columns * block_size), draw.options(1, "paged scores", dtype)

    def expected(before: Arguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        position = torch.arange(width)
        owner, table = before["req_id_per_token"].long(), before["block_table"].long()
        known = (owner >= 0) & (owner < requests)
        seen = (position < before["lengths"].unsqueeze(1)) & (position // block_size < columns) & known.unsqueeze(1)
        block = torch.full((num_tokens, width), -1)
        if requests and columns and num_tokens and width:
            block = table[owner.clamp(0, requests - 1)][:, (position // block_size).clamp(max=columns - 1)]
        there = (block >= 0) & (block < blocks)
        slots = torch.where(there, block, 0) * block_size + position % block_size
        keys = torch.zeros(num_tokens, width, 128, dtype=torch.float64)
        if blocks:
            keys = _read(cache, slots.clamp(max=blocks * block_size - 1), cache_format)
        scores, bound = _scores(before["q"], keys, before["weights"])
        return torch.where(there, scores, -math.inf), bound, seen

    judge = _judge_scores(expected)
    return Case("paged_indexer_logits", {**arguments, "max_length": width, "clean": clean}, judge, caches)


def _read(cache: torch.Tensor, slots: torch.Tensor, cache_format: str) -> torch.Tensor:
    keys, scale = read_index_keys(cache, slots, cache_format)
    return keys.double() * scale.double().unsqueeze(-1)


def _judge_selection(before: Arguments, after: Arguments, outputs: tuple[torch.Tensor, ...], lowering: str) -> None:
    """The chosen keys are there, ascending, as many as there can be, and none twice; the two steps decide which."""
    indices, counts = outputs
    for row, count in zip(indices.tolist(), counts.tolist(), strict=True):
        assert 0 <= count <= len(row), f"{count} keys of {len(row)}"
        assert all(value == -1 for value in row[count:]), "something behind the last key"
        if not before.get("translate"):
            assert row[:count] == sorted(set(row[:count])), "keys that do not ascend"


def topk_indices(draw: Draw) -> Case:
    num_tokens, columns = draw.tokens(), draw.pick(0, 1, 63, 500, 5000)
    scores = draw.normal(num_tokens, columns, dtype=torch.float32, spread=20)
    scores = draw.pick(scores, draw.special(scores), scores.round(), torch.zeros_like(scores), scores.sort(1).values)
    arguments: Arguments = {"scores": scores, "topk": draw.pick(1, 5, 64, 300, 2048, 4096), "sorted": draw.chance(0.5)}
    if draw.chance(0.5):
        arguments["row_starts"] = draw.int32(0, columns + 1, num_tokens)
    if draw.chance(0.7):
        arguments["row_ends"] = draw.int32(0, columns + 2, num_tokens)
    if draw.chance(0.3):
        requests = draw.pick(0, 1, 3)
        arguments["block_table"] = draw.int32(0, 40, requests, draw.maybe_none(1, 90))
        arguments["req_id_per_token"] = draw.int32(0, requests, num_tokens)
        arguments["block_size"] = draw.size(1, 64)
    return Case("topk_indices", arguments)


def merge_topk(draw: Draw) -> Case:
    num_tokens, count = draw.tokens(), draw.pick(0, 1, 40, 300)
    scores = draw.special(draw.normal(num_tokens, count, dtype=torch.float32)).round()
    indices = torch.argsort(torch.rand(num_tokens, 2 * count + 1), dim=1)[:, :count].to(torch.int32)
    indices[torch.rand(indices.shape) < 0.2] = -1
    return Case("merge_topk", {"scores": scores, "indices": indices, "topk": draw.pick(1, 8, 300)})
