"""Compiling and loading, before a capture, every kernel that a configuration will launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from . import ops
from .formats import (
    INDEX_DIM,
    LATENT_DIM,
    LATENT_FORMATS,
    PLAIN,
    ROPE_DIM,
    CacheFormat,
    allocate_cache,
    get_format,
    index_format_of,
)
from .metadata import StepMetadata, V4StepMetadata
from .ops._checks import FLOAT_DTYPES, MAX_NUM_HEADS, QUERY_DIMS
from .ops.dense_attention import MAX_HEAD_DIM
from .sizes import check_sizes

# Keys of the contexts that paged_attention is warmed up with. One program or CTA reads the first, several share each of
# the next two, and the last is so long that kernels compare its length with others'. They take nearly every kernel.
CONTEXTS = (1, 1024, 4096, 131072)
WINDOW = 128  # keys of DeepSeek-V4's sliding window
# tokens of a prompt that is not short to any lowering
LONG_PROMPT = 129


def warmup(
    *,
    cache_format: str,
    num_heads: int,
    topk: int,
    num_tokens: Sequence[int],
    head_dim: int | None = None,
    block_size: int = 64,
    dtype: torch.dtype | None = None,
    with_sink: bool = False,
    prefill_head_dims: tuple[int, int] = (192, 128),
    deterministic: bool = False,
    index_heads: int = 0,
    q_halves: bool = False,
    device: torch.device | str = "cuda",
) -> None:
    """Runs the ops of a step over paged caches once on small ones, so that nothing compiles during a capture.

    Kernels are specialised on dtypes, format, head count and the tile that the token count asks for, never on token
    counts, lengths or table widths themselves: one call covers them all, but for `sparse_attention`, over flat keys.

    Args:
        cache_format: format of the latent cache.
        num_heads: query heads on this device.
        topk: keys chosen for a token.
        num_tokens: token counts of the steps to come (decode batch sizes, prefill chunk); each tile that they select is
            compiled.
        head_dim: 576 or 512; None is the format's first.
        block_size: tokens a cache block.
        dtype: of the tokens written, and of q over a quantised cache; None is the format's, or bfloat16.
        with_sink: whether attention gets `attn_sink`.
        prefill_head_dims: of keys and of values once they are expanded, for `prefill_attention`.
        deterministic: whether decode is asked to be.
        index_heads: heads of the lightning indexer; 0 for a model without one. Its keys are `fp8_index` beside a
            quantised `cache_format`, else plain.
        q_halves: whether attention gets queries in two tensors, `q` and `q_rope`.
        device: where to run.

    Raises:
        TypeError, ValueError: an unknown format, or a size that is no integer or too small.
    """
    device = torch.device(device)
    entry = get_format(cache_format, "warmup")
    head_dim = entry.head_dims[0] if head_dim is None else head_dim
    dtype = PLAIN.get(cache_format, torch.bfloat16) if dtype is None else dtype
    topk, head_dim, block_size = check_sizes("warmup", 1, topk=topk, head_dim=head_dim, block_size=block_size)
    (num_heads,) = check_sizes("warmup", 1, most=MAX_NUM_HEADS, num_heads=num_heads)
    (index_heads,) = check_sizes("warmup", 0, index_heads=index_heads)
    _check_widths(entry, head_dim, q_halves, prefill_head_dims)
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"warmup: dtype must be one of {', '.join(map(str, FLOAT_DTYPES))}, got {dtype!r}")
    counts = _token_counts(num_tokens)
    kv_cache = allocate_cache(cache_format, 2, block_size, head_dim=head_dim, device=device)
    query_dtype = dtype if entry.quantized else kv_cache.dtype
    latent_dim = entry.latent_dim if entry.quantized else min(head_dim, LATENT_DIM)
    _warm_up_metadata(block_size, topk, device)
    _warm_up_cache(torch.zeros(1, head_dim, dtype=dtype, device=device), latent_dim, kv_cache, cache_format)
    if head_dim == LATENT_DIM:
        _warm_up_compressor(cache_format, counts, dtype, device)
    attn_sink = torch.zeros(num_heads, dtype=torch.float32, device=device) if with_sink else None
    for count in counts:
        q = torch.zeros(count, num_heads, head_dim, dtype=query_dtype, device=device)
        indices = torch.full((count, topk), -1, dtype=torch.int32, device=device)
        _warm_up_indices(indices, block_size)
        if head_dim == LATENT_DIM:
            _warm_up_two_caches(q, kv_cache, cache_format, indices, attn_sink, deterministic)
        q_rope = None
        if q_halves:
            q, q_rope = q[..., :LATENT_DIM], q[..., LATENT_DIM:]
        _warm_up_sparse_attention(q, q_rope, kv_cache, cache_format, indices, attn_sink, deterministic)
        _warm_up_dense_attention(q, q_rope, kv_cache, cache_format, block_size, deterministic)
    if index_heads:
        _warm_up_indexer(cache_format, index_heads, topk, counts, block_size, dtype, device)
    _warm_up_prefill(num_heads, prefill_head_dims, query_dtype, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check_widths(entry: CacheFormat, head_dim: int, q_halves: bool, prefill_head_dims: Any) -> None:
    if entry.index_only:
        raise ValueError(f"warmup: cache_format must be one of {sorted(LATENT_FORMATS)}, got '{entry.name}'")
    allowed = [width for width in entry.head_dims if width in QUERY_DIMS]
    if head_dim not in allowed:
        raise ValueError(f"warmup: head_dim must be one of {allowed} for cache_format '{entry.name}', got {head_dim}")
    if q_halves and head_dim == LATENT_DIM:
        raise ValueError(f"warmup: q_halves goes with queries of a latent and RoPE dims, got head_dim {head_dim}")
    if not isinstance(prefill_head_dims, Sequence) or len(prefill_head_dims) != 2:
        raise TypeError(f"warmup: prefill_head_dims must be two integers, got {prefill_head_dims!r}")
    for width in prefill_head_dims:
        check_sizes("warmup", 1, most=MAX_HEAD_DIM, prefill_head_dims=width)


def _token_counts(num_tokens: Any) -> list[int]:
    """Those of `warmup`'s argument, each once."""
    if not isinstance(num_tokens, Iterable):
        raise TypeError(
            f"warmup: num_tokens must be a list of integers, got {type(num_tokens).__name__} {num_tokens!r}"
        )
    return sorted({check_sizes("warmup", 0, num_tokens=count)[0] for count in num_tokens})


def _int32(device: torch.device, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _two_blocks(device: torch.device) -> torch.Tensor:
    """The block table of one request."""
    return _int32(device, 0, 1).view(1, 2)


def _warm_up_metadata(block_size: int, topk: int, device: torch.device) -> None:
    metadata = StepMetadata.allocate(
        max_num_tokens=1,
        max_num_requests=1,
        max_blocks_per_request=2,
        block_size=block_size,
        index_topk=topk,
        device=device,
    )
    query_start_loc, seq_lens, block_table = _int32(device, 0, 1), _int32(device, 1), _two_blocks(device)
    metadata.build(query_start_loc, seq_lens, block_table)
    v4_metadata = V4StepMetadata.allocate(
        max_num_tokens=1,
        max_num_requests=1,
        max_seq_len=512,
        device=device,
    )
    v4_metadata.build(query_start_loc, seq_lens, block_table, block_table, block_table)


def _warm_up_cache(token: torch.Tensor, latent_dim: int, kv_cache: torch.Tensor, cache_format: str) -> None:
    """The write of one token, and gathers of a whole request and of its last tokens."""
    device = token.device
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    ops.concat_and_cache(token[:, :latent_dim], token[:, latent_dim:], kv_cache, slot, cache_format)
    request = _two_blocks(device), _int32(device, 1), _int32(device, 0, 1)
    for gather_lens in (None, _int32(device, 1)):
        ops.gather_cache(kv_cache, *request, 1, cache_format, gather_lens=gather_lens)


def _warm_up_indices(indices: torch.Tensor, block_size: int) -> None:
    lengths, block_table, one = indices.new_zeros(len(indices)), _two_blocks(indices.device), indices.new_ones(1)
    ops.convert_req_index_to_global_index(lengths, block_table, indices, block_size)
    ops.convert_req_index_to_global_index(lengths, block_table, indices, block_size, compact=True)
    ops.filter_prefill_indices(indices, lengths)
    ops.compute_global_topk_indices_and_lens(indices, lengths, block_table, block_size)
    ops.combine_topk_swa_indices(indices, lengths, lengths, one, one, 1, 4, 2, 1)


def _warm_up_sparse_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor | None,
    kv_cache: torch.Tensor,
    cache_format: str,
    indices: torch.Tensor,
    attn_sink: torch.Tensor | None,
    deterministic: bool,
) -> None:
    """Over slots and positions, with lengths and without, and the merges of results."""
    lengths = indices.new_zeros(len(indices))
    for table, requests in ((None, None), (_two_blocks(q.device), lengths)):
        for topk_length in (None, lengths):
            out, lse = ops.paged_sparse_attention(
                q,
                kv_cache,
                indices,
                192**-0.5,
                cache_format,
                q_rope=q_rope,
                topk_length=topk_length,
                attn_sink=attn_sink,
                block_table=table,
                req_id_per_token=requests,
                deterministic=deterministic,
            )
    ops.merge_attention_states(out, lse, out, lse)
    ops.merge_stacked_attention_states(out.unsqueeze(0), lse.unsqueeze(0))


def _warm_up_dense_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor | None,
    kv_cache: torch.Tensor,
    cache_format: str,
    block_size: int,
    deterministic: bool,
) -> None:
    count = len(q)
    lengths = torch.zeros(count, dtype=torch.int32, device=q.device)
    for keys in CONTEXTS:
        table = lengths.new_zeros(1, keys // block_size + 1)
        # one token a request, and more, which share programs
        for num_requests in {max(1, count // together) for together in (1, 2, 4, 8)}:
            ops.paged_attention(
                q,
                kv_cache,
                table.expand(num_requests, -1),
                lengths,
                lengths,
                192**-0.5,
                cache_format,
                q_rope=q_rope,
                deterministic=deterministic,
            )


def _warm_up_two_caches(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cache_format: str,
    indices: torch.Tensor,
    attn_sink: torch.Tensor | None,
    deterministic: bool,
) -> None:
    """DeepSeek-V4's layers: entries that an indexer chose in their request, and slots of all entries."""
    lengths = indices.new_zeros(len(indices))
    chosen: dict[str, Any] = {"extra_block_table": _two_blocks(q.device), "req_id_per_token": lengths}
    window = indices.new_full((len(indices), WINDOW), -1)
    for extra in (chosen, {"extra_topk_length": lengths}, {**chosen, "extra_topk_length": lengths}):
        ops.paged_sparse_attention(
            q,
            kv_cache,
            window,
            LATENT_DIM**-0.5,
            cache_format,
            topk_length=lengths,
            attn_sink=attn_sink,
            extra_kv_cache=kv_cache,
            extra_indices=indices,
            deterministic=deterministic,
            **extra,
        )


def _warm_up_prefill(num_heads: int, head_dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """A prompt's own tokens, a chunk of its context, and their merge; values are a part of wider rows.

    Requests of few tokens have kernels of their own, and where a call can have no others, they alone are launched.
    """
    head_dim, head_dim_v = head_dims
    for count in (1, LONG_PROMPT):
        q = torch.zeros(count, num_heads, head_dim, dtype=dtype, device=device)
        k = torch.zeros_like(q)
        v = torch.zeros(count, num_heads, head_dim + head_dim_v, dtype=dtype, device=device)[..., head_dim:]
        starts = torch.tensor([0, count], dtype=torch.int32, device=device)
        new = ops.prefill_attention(q, k, v, starts, starts, count, count, head_dim**-0.5)
        old = ops.prefill_attention(q, k, v, starts, starts, count, count, head_dim**-0.5, causal=False)
    ops.merge_attention_states(*new, *old)


def _warm_up_compressor(cache_format: str, num_tokens: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """DeepSeek-V4's compressed layers and the keys of their indexer.

    Kernels are chosen by whether the states have room for a step's tokens beside those of a group.
    """
    for ratio, series, head_dim in ((4, 2, 512), (128, 1, 512), (4, 2, 128)):
        window, width = ratio * series, head_dim * series
        entry_format = cache_format if head_dim == LATENT_DIM else index_format_of(cache_format)
        entries = allocate_cache(entry_format, 1, 1, head_dim=head_dim, device=device)
        norm = torch.zeros(head_dim, dtype=dtype, device=device)
        sizes = (1, window, 2 * width), (ratio, width), (1, ROPE_DIM)
        states, bias, angles = (torch.zeros(size, dtype=torch.float32, device=device) for size in sizes)
        for count in sorted({1, 2, *num_tokens}):
            tokens = torch.zeros(count, width, dtype=dtype, device=device)
            padding = torch.full((count,), -1, dtype=torch.int32, device=device)
            for blocks in (1, 1 + -(-count // window)):
                table = torch.zeros(1, blocks, dtype=torch.int32, device=device)
                caches = states, entries, table
                ops.compress_and_cache(
                    tokens, tokens, bias, norm, angles, *caches, padding, padding, padding.long(), 1e-6, entry_format
                )


def _warm_up_indexer(
    cache_format: str,
    num_heads: int,
    topk: int,
    num_tokens: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """The indexer's cache, scores and choice: short and longer contexts, and those that portable kernels cut."""
    index_format = index_format_of(cache_format)
    query_dtype = PLAIN.get(index_format, dtype)
    cache = allocate_cache(index_format, 2, block_size, head_dim=INDEX_DIM, device=device)
    token = torch.zeros(1, INDEX_DIM, dtype=dtype, device=device)
    ops.write_index_cache(token, cache, torch.zeros(1, dtype=torch.int64, device=device), index_format)
    short = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    middle, long = (short.repeat(1, columns // (2 * block_size) + 1) for columns in (6 * 1024, 16 * 1024))
    one = torch.ones(1, dtype=torch.int32, device=device)
    k, k_scale = ops.gather_index_cache(cache, short, one, short[0], 1, index_format)
    row = torch.zeros(1, 2**18, dtype=torch.float32, device=device)
    for num_columns in (2**13, 2**18):
        ops.topk_indices(row[:, :num_columns], topk, row_ends=one)
    for count in num_tokens:
        q = torch.zeros(count, num_heads, INDEX_DIM, dtype=query_dtype, device=device)
        weights = torch.zeros(count, num_heads, dtype=torch.float32, device=device)
        if index_format == "fp8_index":
            ops.quantize_index_query(q, weights.to(dtype), 1.0)
            q, weights = ops.quantize_index_query(q, weights, 1.0)
        zeros = torch.zeros(count, dtype=torch.int32, device=device)
        ones = torch.ones_like(zeros)
        for table in (short, middle, long):
            for translate in (False, True):
                ops.select_keys(q, cache, weights, ones, table, zeros, topk, index_format, translate=translate)
        # kernels are chosen by the tokens of a request
        for num_requests in {1, *(max(count // each, 1) for each in (1, 2, 4))}:
            requests = short.repeat(num_requests, 1)
            scores = ops.paged_indexer_logits(q, cache, weights, ones, requests, zeros, 2 * block_size, index_format)
            ops.select_keys(q, cache, weights, ones, requests, zeros, topk, index_format)
        ops.topk_indices(scores, topk, row_ends=ones)
        ops.merge_topk(scores, torch.full_like(scores, -1, dtype=torch.int32), topk)
        ops.indexer_logits(q, k, weights, zeros, ones, k_scale=k_scale)
        ops.select_flat_keys(q, k, weights, zeros, ones, topk, k_scale=k_scale)
