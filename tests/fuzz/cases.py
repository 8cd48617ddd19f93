"""Random calls of the cache and index ops, and which family a seed takes."""

from __future__ import annotations

from collections.abc import Callable

import attention_oracle
import torch

from mla_ops.formats import FORMATS, LATENT_FORMATS, PLAIN, allocate_cache, geometry

from . import attention, indexer
from .attention import attention_cache
from .case import BLOCK_SIZES, Arguments, Case
from .draw import INT_MAX, Draw


def concat_and_cache(draw: Draw) -> Case:
    draw.few_forms = draw.lowering == "triton"
    cache_format = draw.form("written format", 2, *LATENT_FORMATS)
    entry = FORMATS[cache_format]
    head_dim = draw.pick(*entry.head_dims)
    latent_dim = entry.latent_dim if entry.quantized else draw.pick(head_dim - 64, head_dim)
    num_tokens, dtype = draw.tokens(), draw.form("written dtype", 2, *PLAIN.values())
    cache = allocate_cache(cache_format, draw.maybe_none(1, 4), draw.pick(*BLOCK_SIZES), head_dim=head_dim)
    blocks, block_size, _, _ = geometry(cache, cache_format)
    slots = torch.randperm(blocks * block_size)[:num_tokens].long()
    slots = torch.cat((slots, torch.full((draw.pick(0, 3),), -1)))
    wild = torch.tensor([-1, -(2**63), 2**63 - 1, blocks * block_size, 2**40])
    slots = torch.where(torch.rand(len(slots)) < 0.1, wild[torch.randint(0, 5, (len(slots),))], slots)
    arguments = {
        "kv_c": draw.special(draw.normal(num_tokens, latent_dim, dtype=dtype, spread=12)),
        "k_pe": draw.special(draw.normal(num_tokens, head_dim - latent_dim, dtype=dtype, spread=3)),
        "kv_cache": cache,
        "slot_mapping": slots,
        "cache_format": cache_format,
    }
    return Case("concat_and_cache", arguments, caches={"kv_cache": cache_format})


def gather_cache(draw: Draw) -> Case:
    cache_format = draw.pick(*LATENT_FORMATS)
    cache = attention_cache(draw, cache_format)
    blocks, block_size, _, _ = geometry(cache, cache_format)
    requests, columns, rows = draw.pick(0, 1, 4), draw.maybe_none(1, 3), draw.pick(0, 1, 50)
    last = draw.chance(0.3)
    arguments = {
        "kv_cache": cache,
        "block_table": draw.int32(0, blocks, requests, columns),
        "seq_lens": draw.int32(0, columns * block_size + 2, requests),
        "cu_seq_lens": draw.starts(requests, rows + 2),
        "num_rows": rows,
        "cache_format": cache_format,
        "gather_lens": draw.int32(0, 20, requests) if last else None,
        "offset": draw.size(0, 3) if last else 0,
    }
    return Case("gather_cache", arguments, caches={"kv_cache": cache_format})


def compress_and_cache(draw: Draw) -> Case:
    head_dim = draw.pick(512, 128)
    ratio, series = draw.form("ratio", 2, (4, 2), (3, 1), (1, 1), (8, 2))
    width, num_tokens, requests = head_dim * series, draw.tokens(), draw.pick(1, 3)
    columns = draw.pick(1, 2)
    state_size = -(-ratio * series // columns) + draw.pick(0, 3)
    cache_format = draw.form("entries", 2, "fp32", "bf16", "fp8_index" if head_dim == 128 else "fp8_ds_mla_v4")
    cache = allocate_cache(cache_format, 4, draw.pick(1, 4, 64), head_dim=head_dim)
    owners = torch.arange(num_tokens) * requests // max(num_tokens, 1)
    first = torch.randint(0, 30, (requests,))
    positions = (first[owners] + torch.arange(num_tokens) - torch.searchsorted(owners, owners)).to(torch.int32)
    states = draw.normal(columns * requests + 1, state_size, 2 * width, dtype=torch.float32, spread=0)
    arguments = {
        "kv": draw.normal(num_tokens, width, spread=0),
        "score": draw.normal(num_tokens, width, spread=0),
        "position_bias": draw.normal(ratio, width, dtype=torch.float32, spread=0),
        "norm_weight": draw.normal(head_dim, spread=0),
        "cos_sin": draw.normal(80, 64, dtype=torch.float32, spread=0),
        "state_cache": states,
        "kv_cache": cache,
        "state_block_table": draw.garbage(torch.randperm(columns * requests).to(torch.int32).view(requests, columns)),
        "req_id_per_token": draw.garbage(owners.to(torch.int32)),
        "positions": positions,
        "slot_mapping": torch.randperm(4 * cache.shape[1] if cache.dim() == 3 else 4)[:num_tokens].long(),
        "eps": 1e-6,
        "cache_format": cache_format,
    }
    missing = num_tokens - len(arguments["slot_mapping"])
    slots = torch.cat((arguments["slot_mapping"], torch.full((max(missing, 0),), -1)))
    arguments["slot_mapping"] = draw.garbage(slots)
    return Case("compress_and_cache", arguments, _judge_entries, {"kv_cache": cache_format}, exact=("state_cache",))


def _judge_entries(before: Arguments, after: Arguments, outputs: tuple[torch.Tensor, ...], lowering: str) -> None:
    """Entries of the plain formats against the reference's, whose sums have another order."""
    cache, cache_format = before["kv_cache"].clone(), before["cache_format"]
    if FORMATS[cache_format].quantized:
        return
    torch.ops.mla.compress_and_cache(**{**before, "kv_cache": cache, "state_cache": before["state_cache"].clone()})
    apart = (after["kv_cache"].double() - cache.double()).abs()
    unit = attention_oracle.UNIT[cache.dtype]
    # the mean of up to 16 states, normalised: each relative error of the sums counts against the row's largest entry
    bound = 2 * unit * cache.double().abs() + 2.0**-16 * cache.double().abs().amax(-1, keepdim=True)
    assert (apart <= bound).all(), f"entries: {(apart > bound).sum()} elements beyond their bound"


def index_builders(draw: Draw) -> Case:
    num_tokens, requests, columns = draw.tokens(), draw.pick(0, 1, 3), draw.maybe_none(1, 5)
    block_size, blocks = draw.pick(1, 4, 64), draw.maybe_none(1, 9)
    table = draw.int32(0, blocks, requests, columns)
    owner, positions = draw.int32(0, requests, num_tokens), draw.int32(0, columns * block_size + 3, num_tokens)
    topk = draw.pick(0, 1, 63, 64, 300)
    chosen = draw.int32(0, columns * block_size + 1, num_tokens, topk)
    bound = {"num_blocks": draw.pick(None, blocks)}
    block_size = draw.size(block_size)
    kind = draw.pick("convert", "filter", "window", "compressed", "combine", "global")
    if kind == "convert":
        arguments = {"req_id_per_token": owner, "block_table": table, "token_indices": chosen, "block_size": block_size}
        return Case("convert_req_index_to_global_index", {**arguments, "compact": draw.chance(0.5), **bound})
    if kind == "filter":
        return Case("filter_prefill_indices", {"indices": chosen, "context_lens": draw.int32(0, 200, num_tokens)})
    if kind == "global":
        arguments = {"topk_indices": chosen, "req_id_per_token": owner, "block_table": table, "block_size": block_size}
        return Case("compute_global_topk_indices_and_lens", {**arguments, **bound})
    arguments = {"positions": positions, "req_id_per_token": owner}
    if kind == "combine":
        lens, gathered = draw.int32(0, 90, requests), draw.int32(0, 90, requests)
        sizes = {"window": draw.pick(0, 1, 128), "compress_ratio": draw.size(1, 4)}
        sizes |= {"request_stride": draw.size(0, 64, 300), "window_offset": draw.size(0, 32)}
        given = {"topk_indices": chosen, **arguments, "seq_lens": lens, "gather_lens": gathered, **sizes}
        return Case("combine_topk_swa_indices", given)
    arguments["block_table"] = table
    if kind == "window":
        return Case(
            "sliding_window_indices", {**arguments, "window": draw.pick(0, 1, 128), "block_size": block_size, **bound}
        )
    sizes = {"compress_ratio": draw.size(1, 4, 128), "block_size": block_size, "width": draw.pick(0, 1, 200)}
    return Case("compressed_indices", {**arguments, **sizes, **bound})


def build_step_metadata(draw: Draw) -> Case:
    requests, capacity, columns = draw.pick(0, 1, 4), draw.pick(0, 1, 20), draw.pick(1, 4)
    block_size = draw.size(1, 16, 64)
    rows = requests + draw.pick(0, 2)
    new = lambda *shape, dtype=torch.int32: torch.full(shape, 7, dtype=dtype)  # noqa: E731
    arguments = {
        "query_start_loc": draw.starts(requests, capacity),
        "seq_lens": draw.int32(0, min(columns * block_size + 1, INT_MAX), requests),
        "block_table": draw.int32(0, 9, requests, columns),
        "query_start_loc_buffer": new(rows + 1),
        "seq_lens_buffer": new(rows),
        "block_table_buffer": new(rows, columns + draw.pick(0, 1)),
        "req_id_per_token": new(capacity),
        "positions": new(capacity),
        "slot_mapping": new(capacity, dtype=torch.int64),
        "key_lens": new(capacity),
        "topk_length": new(capacity),
        "block_size": block_size,
        "index_topk": draw.size(0, 1, 64),
    }
    return Case("build_step_metadata", arguments)


def build_compressed_metadata(draw: Draw) -> Case:
    num_tokens, requests, columns = draw.tokens(), draw.pick(0, 1, 3), draw.pick(1, 4)
    rows = requests + draw.pick(0, 1)
    arguments = {
        "positions": draw.int32(0, 90, num_tokens),
        "req_id_per_token": draw.int32(0, requests, num_tokens),
        "block_table": draw.int32(0, 9, requests, columns),
        "block_table_buffer": torch.full((rows, columns + draw.pick(0, 1)), 7, dtype=torch.int32),
        "slot_mapping": torch.full((num_tokens,), 7),
        "compressed_lens": torch.full((num_tokens,), 7, dtype=torch.int32),
        "compress_ratio": draw.size(1, 4, 128),
        "block_size": draw.size(1, 2, 64),
    }
    return Case("build_compressed_metadata", arguments)


FAMILIES: tuple[Callable[[Draw], Case], ...] = (
    attention.paged_sparse_attention,
    attention.paged_sparse_attention,
    attention.paged_sparse_attention,
    attention.sparse_attention,
    attention.sparse_attention,
    attention.paged_attention,
    attention.paged_attention,
    attention.prefill_attention,
    attention.merge_attention_states,
    concat_and_cache,
    gather_cache,
    compress_and_cache,
    index_builders,
    index_builders,
    build_step_metadata,
    build_compressed_metadata,
    indexer.index_cache,
    indexer.index_cache,
    indexer.indexer_logits,
    indexer.paged_indexer_logits,
    indexer.topk_indices,
    indexer.merge_topk,
)


def make_case(draw: Draw) -> Case:
    return draw.pick(*FAMILIES)(draw)
