"""Benchmark of attention over two caches (DeepSeek-V4's decode): python -m mla_ops bench sparse_attention_extra.

Each token attends to the last 128 tokens of its request, in random blocks of one cache, and to compressed tokens that
an indexer chose, random ones of 8192 in another, under one softmax with a sink a head. Both caches are `fp8_ds_mla_v4`
and of 1 GiB or more. `--peers` adds FlashMLA's kernels for two caches, and the gather of the compressed rows alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks import common, flash_mla_peer, gather_floor
from benchmarks.attention import (
    BLOCK_SIZE,
    PATTERNS,
    Kind,
    add_variant_options,
    attention_bytes,
    attention_flops,
    cache_blocks,
    check_attention,
    make_outputs,
    mixed_lengths,
    poison,
    random_block_table,
    random_selection,
    rise,
    shape_queries,
    sinks,
    to_slots,
    variants,
)
from benchmarks.cache import fill_cache, query_dtype, raise_keys, read_keys, scale_keys
from benchmarks.flash_mla_peer import Selection
from mla_ops import formats
from mla_ops.registry import describe

WINDOW = 128
HEAD_DIM = 512
FORMATS = tuple(name for name in formats.LATENT_FORMATS if HEAD_DIM in formats.FORMATS[name].head_dims)
# heads and keys of the extra cache: DeepSeek-V4's two models, and the first in four shards
MODELS = ((64, 512), (128, 1024), (16, 512))


def build_case(
    num_tokens: int,
    num_heads: int,
    extra_topk: int,
    context: int,
    cache_format: str,
    arguments: argparse.Namespace,
    kind: Kind = Kind(),
) -> common.Case:
    generator = common.generator(arguments)
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda" and not arguments.quick
    row_bytes = formats.FORMATS[cache_format].bytes_per_token(HEAD_DIM)
    softmax_scale, dtype = common.SOFTMAX_SCALES[HEAD_DIM], query_dtype(cache_format)
    attn_sink = sinks(kind, num_heads, device)
    if attn_sink is None:
        attn_sink = torch.randn(num_heads, device=device, generator=generator)

    def make_cache(tokens_of_each: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A full cache, and the block table of as many requests as there are tokens."""
        blocks = -(-tokens_of_each // BLOCK_SIZE)
        num_blocks = cache_blocks(num_tokens * blocks, BLOCK_SIZE * row_bytes, on_gpu)
        kv_cache = formats.allocate_cache(cache_format, num_blocks, BLOCK_SIZE, head_dim=HEAD_DIM, device=device)
        fill_cache(kv_cache, cache_format, generator)
        if kind.magnitude != "1":
            scale_keys(kv_cache, cache_format, kind.magnitude, generator)
        block_table = random_block_table(num_tokens, blocks, num_blocks, generator)
        if kind.scores == "growing":
            positions = torch.arange(blocks * BLOCK_SIZE, device=device).expand(num_tokens, -1)
            values = rise(positions.shape[1], dtype, device).expand_as(positions)
            raise_keys(kv_cache, cache_format, to_slots(positions, block_table), values)
        return kv_cache, block_table

    window_cache, window_table = make_cache(4 * WINDOW)
    extra_cache, extra_table = make_cache(max(context, extra_topk))

    def selection(kv_cache: torch.Tensor, local: torch.Tensor, block_table: torch.Tensor) -> Selection:
        slots = PATTERNS[kind.pattern](to_slots(local, block_table).to(torch.int32), generator)
        lens = mixed_lengths(kind.mixture, num_tokens, local.shape[1], device)
        return Selection(kv_cache, cache_format, slots, lens)

    def step() -> tuple[torch.Tensor, Selection, Selection]:
        q = torch.randn(num_tokens, num_heads, HEAD_DIM, device=device, generator=generator).to(dtype)
        shape_queries(q, kind.scores, softmax_scale)
        last = torch.randint(WINDOW - 1, 4 * WINDOW, (num_tokens, 1), device=device, generator=generator)
        window = last - torch.arange(WINDOW - 1, -1, -1, device=device)
        chosen = random_selection(num_tokens, extra_topk, extra_table.shape[1] * BLOCK_SIZE, generator)
        if kind.scores == "growing":
            chosen = chosen.sort(dim=1)[0]
        return q, selection(window_cache, window, window_table), selection(extra_cache, chosen, extra_table)

    sets = [step() for _ in range(common.number_of_sets(arguments))]
    outputs = [make_outputs(q) for q, _, _ in sets]

    def attend(
        number: int,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        deterministic: bool = False,
    ) -> None:
        q, window, extra = sets[number]
        torch.ops.mla.paged_sparse_attention.extra_out(
            q,
            window_cache,
            window.slots,
            softmax_scale,
            cache_format,
            extra_cache,
            extra.slots,
            cache_format,
            topk_length=window.lens,
            extra_topk_length=extra.lens,
            attn_sink=attn_sink,
            deterministic=deterministic,
            out=out,
            lse=lse,
        )

    runs = [partial(attend, number, *own) for number, own in enumerate(outputs)]
    q, window, extra = sets[0]

    def keys_of(token: int) -> torch.Tensor:
        keys = []
        for part in (window, extra):
            slots = part.slots[token, : int(part.lens[token])]
            keys.append(read_keys(part.kv_cache, slots[slots >= 0], part.cache_format))
        return torch.cat(keys)

    def compare(out: torch.Tensor, lse: torch.Tensor) -> list[common.Check]:
        return check_attention(q, keys_of, softmax_scale, out, lse, attn_sink)

    shape: dict[str, int | str] = {"T": num_tokens, "H": num_heads, "topk": f"{WINDOW}+{extra_topk}"}
    shape["format"] = cache_format
    shape |= kind.label()
    num_keys = WINDOW + extra_topk

    def peers() -> dict[str, common.Peer]:
        data = formats.FORMATS[cache_format].data_bytes  # a block is as many pieces of this size as it takes
        pieces = extra_cache.shape[1] // data
        rows = [part.slots // BLOCK_SIZE * pieces + part.slots % BLOCK_SIZE for _, _, part in sets]
        return {
            **flash_mla_peer.two_cache_peers(sets, attn_sink, softmax_scale, compare),
            **gather_floor.gather_peer(extra_cache.view(-1, data), rows),
        }

    return common.Case(
        describe(
            "paged_sparse_attention.extra",
            q,
            window_cache,
            window.slots,
            softmax_scale,
            cache_format,
            extra_cache,
            extra.slots,
            cache_format,
        ),
        shape,
        runs,
        partial(poison, outputs[0]),
        lambda: compare(*outputs[0]),
        attention_bytes(num_tokens, num_heads, num_keys, HEAD_DIM, row_bytes),
        attention_flops(num_tokens, num_heads, num_keys, HEAD_DIM),
        {
            **(peers() if arguments.peers and cache_format == "fp8_ds_mla_v4" else {}),
            **variants(arguments, attend, [q for q, _, _ in sets], compare),
        },
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = common.argument_parser("sparse_attention_extra")
    parser.add_argument("--tokens", type=common.integers, default=None)
    parser.add_argument("--heads", type=common.integers, default=None, help="of the models: 64, 128 and 16")
    parser.add_argument("--context", type=int, default=None, help="compressed tokens of each request")
    parser.add_argument("--cache-formats", type=common.names_of(FORMATS.index, *FORMATS), default=None)
    parser.add_argument(
        "--peers", action="store_true", help="time FlashMLA's own ops beside ours, where it is installed"
    )
    add_variant_options(parser)
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    tokens = arguments.tokens or ([2, 16, 64, 256] if on_gpu else [1, 3])
    models = [(num_heads, topk if on_gpu else topk // 16) for num_heads, topk in MODELS]
    if arguments.heads is not None or not on_gpu:
        models = [model for model in models if model[0] in (arguments.heads or (16,))]
    context = arguments.context or (8192 if on_gpu else 256)
    cache_formats = arguments.cache_formats or (["fp8_ds_mla_v4"] if on_gpu else ["fp8_ds_mla_v4", "bf16"])

    def cases() -> Iterator[partial[common.Case]]:
        for cache_format in cache_formats:
            for num_heads, extra_topk in models:
                for num_tokens in tokens:
                    yield partial(build_case, num_tokens, num_heads, extra_topk, context, cache_format, arguments)

    return common.run_benchmark("sparse_attention_extra", cases(), arguments)


if __name__ == "__main__":
    sys.exit(main())
