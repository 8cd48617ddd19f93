"""Benchmark of attention over two caches (DeepSeek-V4's decode): python -m mla_ops bench sparse_attention_extra.

Each token attends to the last 128 tokens of its request, in random blocks of one cache, and to compressed tokens that
an indexer chose, random ones of 8192 in another, under one softmax with a sink a head. Both caches are `fp8_ds_mla_v4`
and of 1 GiB or more. `--peers` adds FlashMLA's kernels for two caches, and the gather of the compressed rows alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
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
    check_attention,
    make_outputs,
    mixed_lengths,
    paged_keys,
    poison,
    random_queries,
    random_selection,
    sinks,
    to_slots,
    variants,
)
from benchmarks.cache import query_dtype, read_keys
from benchmarks.flash_mla_peer import Selection
from mla_ops import formats
from mla_ops.registry import describe

WINDOW = 128
HEAD_DIM = 512
FORMATS = tuple(name for name in formats.LATENT_FORMATS if HEAD_DIM in formats.FORMATS[name].head_dims)
# heads and keys of the extra cache: DeepSeek-V4's two models, and the first in four shards
MODELS = ((64, 512), (128, 1024), (16, 512))


def two_cache_peers(
    sets: list[tuple[torch.Tensor, Selection, Selection]],
    attn_sink: torch.Tensor,
    softmax_scale: float,
    compare: Callable[[torch.Tensor, torch.Tensor], list[common.Check]],
) -> dict[str, common.Peer]:
    """FlashMLA over both caches, and the gather of the extra one's keys alone."""
    cache, data = sets[0][2].kv_cache, formats.FORMATS["fp8_ds_mla_v4"].data_bytes
    pieces = cache.shape[1] // data  # a block is as many pieces of this size as it takes
    rows = [extra.slots // BLOCK_SIZE * pieces + extra.slots % BLOCK_SIZE for _, _, extra in sets]
    return {
        **flash_mla_peer.two_cache_peers(sets, attn_sink, softmax_scale, compare),
        **gather_floor.gather_peer(cache.view(-1, data), rows),
    }


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
    device = generator.device
    row_bytes = formats.FORMATS[cache_format].bytes_per_token(HEAD_DIM)
    softmax_scale, dtype = common.SOFTMAX_SCALES[HEAD_DIM], query_dtype(cache_format)
    attn_sink = sinks(kind, num_heads, device)
    if attn_sink is None:
        attn_sink = torch.randn(num_heads, device=device, generator=generator)

    made = partial(
        paged_keys, num_tokens, cache_format=cache_format, kind=kind, arguments=arguments, generator=generator
    )
    window_cache, window_table = made(4 * WINDOW, head_dim=HEAD_DIM)
    extra_cache, extra_table = made(max(context, extra_topk), head_dim=HEAD_DIM)

    def selection(kv_cache: torch.Tensor, local: torch.Tensor, block_table: torch.Tensor) -> Selection:
        slots = PATTERNS[kind.pattern](to_slots(local, block_table).to(torch.int32), generator)
        lens = mixed_lengths(kind.mixture, num_tokens, local.shape[1], device)
        return Selection(kv_cache, cache_format, slots, lens)

    def step() -> tuple[torch.Tensor, Selection, Selection]:
        q = random_queries(num_tokens, num_heads, HEAD_DIM, dtype, kind.scores, softmax_scale, generator)
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

    q, window, extra = sets[0]

    def keys_of(token: int) -> torch.Tensor:
        keys = []
        for part in (window, extra):
            slots = part.slots[token, : int(part.lens[token])]
            keys.append(read_keys(part.kv_cache, slots[slots >= 0], part.cache_format))
        return torch.cat(keys)

    def compare(out: torch.Tensor, lse: torch.Tensor) -> list[common.Check]:
        return check_attention(q, keys_of, softmax_scale, out, lse, attn_sink)

    peers = {}
    if arguments.peers and cache_format == "fp8_ds_mla_v4":
        peers = two_cache_peers(sets, attn_sink, softmax_scale, compare)
    peers |= variants(arguments, attend, [q for q, _, _ in sets], compare)
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
        {
            "T": num_tokens,
            "H": num_heads,
            "topk": f"{WINDOW}+{extra_topk}",
            "format": cache_format,
            **kind.label(),
        },
        [partial(attend, number, *own) for number, own in enumerate(outputs)],
        partial(poison, outputs[0]),
        lambda: compare(*outputs[0]),
        attention_bytes(num_tokens, num_heads, WINDOW + extra_topk, HEAD_DIM, row_bytes),
        attention_flops(num_tokens, num_heads, WINDOW + extra_topk, HEAD_DIM),
        peers,
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
