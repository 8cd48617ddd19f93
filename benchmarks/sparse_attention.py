"""Benchmarks of the sparse attention ops, and comparison of their lowerings.

python -m mla_ops bench sparse_attention --lowerings triton,hopper,flash_mla

All lowerings of a row alternate in one process on the same tensors; `ratio` is to the first one named. Indices are
slots, drawn without repetition from a context of each token's own, so decode rows read what a batch of that many
requests reads, at random blocks of a cache of 1 GiB or more. FLOPs count the two products over all heads and `topk`
keys; bytes count each selected row once, the query, the indices and the outputs. Rows that several tokens select are
counted for each: where the L2 cache serves them (prefill), a figure may fall below the memory part of the floor.
`--peers` adds FlashMLA, called as its users call it (flash_mla_peer.py), and the gather of the selected rows alone, the
floor where memory bounds (gather_floor.py). FlashMLA's schedule is planned before.
`--deterministic` adds decode that is asked to be, `--q-halves` decode of queries in two tensors (`q_rope`) and of these
joined first.

Rows of different live keys are what kernels like best. `--patterns live,1/2,none,same` (attention.PATTERNS),
`--mixtures full,fourth,one` (lengths), `--magnitudes 1,0.01,spread12,wild30` (`cache.magnitude_factors`, of keys) and
`--scores growing,large,sinks` measure the others; `benchmarks.unusual` has a table of them for every kernel.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from benchmarks import common, flash_mla_peer, gather_floor
from benchmarks.attention import (
    BLOCK_SIZE,
    PATTERNS,
    SCORES,
    Kind,
    add_halves_option,
    add_variant_options,
    attention_bytes,
    attention_flops,
    check_attention,
    halves_peers,
    make_outputs,
    mixed_lengths,
    mixtures,
    paged_keys,
    poison,
    random_queries,
    random_selection,
    rise,
    sinks,
    to_slots,
    variants,
)
from benchmarks.cache import magnitude_factors, magnitudes, query_dtype, read_keys
from mla_ops import formats
from mla_ops.registry import describe


class Prefill(NamedTuple):
    """Query tokens, heads, keys a token, key width."""

    num_tokens: int
    num_heads: int
    topk: int
    head_dim: int


# DeepSeek-V3.2 in one, two and eight shards, a whole prompt and a short one; DeepSeek-V4's two models
PREFILLS = [Prefill(4096, num_heads, 2048, 576) for num_heads in (128, 64, 16)]
PREFILLS += [Prefill(64, num_heads, 2048, 576) for num_heads in (128, 64)]
PREFILLS += [Prefill(4096, 64, 512, 512), Prefill(4096, 128, 1024, 512)]


def paged_peers(
    chosen: list[tuple[torch.Tensor, torch.Tensor]],
    kv_cache: torch.Tensor,
    cache_format: str,
    kind: Kind,
    softmax_scale: float,
    compare: Callable[[torch.Tensor, torch.Tensor], list[common.Check]],
) -> dict[str, common.Peer]:
    """FlashMLA and the gather alone, of queries and slots. V4's caches have theirs beside `sparse_attention_extra`."""
    if cache_format not in ("fp8_ds_mla", "bf16") or kind.scores == "sinks":
        return {}
    if cache_format == "fp8_ds_mla":
        theirs = flash_mla_peer.decode_peers(chosen, kv_cache, softmax_scale, compare)
    else:
        theirs = flash_mla_peer.prefill_peers(chosen, kv_cache.flatten(0, 1), softmax_scale, compare)
    if kind.label():  # the gather alone knows no dead index
        return theirs
    return {**theirs, **gather_floor.gather_peer(kv_cache.flatten(0, 1), [slots for _, slots in chosen])}


def build_paged(
    num_tokens: int,
    num_heads: int,
    topk: int,
    cache_format: str,
    context: int,
    kind: Kind,
    arguments: argparse.Namespace,
) -> common.Case:
    generator = common.generator(arguments)
    device = generator.device
    entry = formats.FORMATS[cache_format]
    head_dim, row_bytes = entry.head_dims[0], entry.bytes_per_token()
    softmax_scale, dtype = common.SOFTMAX_SCALES[head_dim], query_dtype(cache_format)
    kv_cache, block_table = paged_keys(num_tokens, max(context, topk), cache_format, kind, arguments, generator)
    request = torch.arange(num_tokens, dtype=torch.int32, device=device)
    lens = mixed_lengths(kind.mixture, num_tokens, topk, device)
    attn_sink = sinks(kind, num_heads, device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        q = random_queries(num_tokens, num_heads, head_dim, dtype, kind.scores, softmax_scale, generator)
        local = random_selection(num_tokens, topk, block_table.shape[1] * BLOCK_SIZE, generator)
        if kind.scores == "growing":
            local = local.sort(dim=1)[0]
        chosen = local if arguments.request_local else to_slots(local, block_table)
        return q, PATTERNS[kind.pattern](chosen, generator)

    sets = [step() for _ in range(common.number_of_sets(arguments))]
    queries = [q for q, _ in sets]
    outputs = [make_outputs(q) for q in queries]
    options = {
        "topk_length": lens if arguments.topk_length or kind.mixture != "full" else None,
        "attn_sink": attn_sink,
        **({"block_table": block_table, "req_id_per_token": request} if arguments.request_local else {}),
    }

    def attend(
        number: int,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        deterministic: bool = False,
    ) -> None:
        torch.ops.mla.paged_sparse_attention.out(
            q,
            kv_cache,
            sets[number][1],
            softmax_scale,
            cache_format,
            q_rope=q_rope,
            **options,
            deterministic=deterministic,
            out=out,
            lse=lse,
        )

    def attend_whole(number: int, out: torch.Tensor, lse: torch.Tensor, *, deterministic: bool = False) -> None:
        attend(number, queries[number], None, out, lse, deterministic)

    def live_slots(chosen: torch.Tensor) -> torch.Tensor:
        """Slots, -1 for what is dead or past a length."""
        slots = to_slots(chosen.clamp(min=0), block_table) if arguments.request_local else chosen
        return torch.where((torch.arange(topk, device=device) < lens[:, None]) & (chosen >= 0), slots, -1)

    q, indices = sets[0]
    slots = live_slots(indices)

    def compare(out: torch.Tensor, lse: torch.Tensor) -> list[common.Check]:
        def keys_of(token: int) -> torch.Tensor:
            return read_keys(kv_cache, slots[token][slots[token] >= 0], cache_format)

        return check_attention(q, keys_of, softmax_scale, out, lse, attn_sink)

    peers = {}
    if arguments.peers:
        chosen = [(query, live_slots(own)) for query, own in sets]
        peers = paged_peers(chosen, kv_cache, cache_format, kind, softmax_scale, compare)
    peers |= variants(arguments, attend_whole, queries, compare)
    if arguments.q_halves:
        peers |= halves_peers(queries, attend, compare)
    keys_a_row = int((slots >= 0).sum()) // max(1, num_tokens)
    return common.Case(
        describe("paged_sparse_attention", q, kv_cache, indices, softmax_scale, cache_format),
        {"T": num_tokens, "H": num_heads, "topk": topk, "format": cache_format, **kind.label()},
        [partial(attend_whole, number, *own) for number, own in enumerate(outputs)],
        partial(poison, outputs[0]),
        lambda: compare(*outputs[0]),
        attention_bytes(num_tokens, num_heads, keys_a_row, head_dim, row_bytes),
        attention_flops(num_tokens, num_heads, keys_a_row, head_dim),
        peers,
    )


def build_flat(prefill: Prefill, num_kv: int, arguments: argparse.Namespace, kind: Kind = Kind()) -> common.Case:
    num_tokens, num_heads, topk, head_dim = prefill
    generator = common.generator(arguments)
    device = torch.device(arguments.device)
    kv = torch.randn(num_kv, head_dim, device=device, generator=generator).to(torch.bfloat16)
    softmax_scale = common.SOFTMAX_SCALES[head_dim]
    attn_sink = sinks(kind, num_heads, device)
    if kind.magnitude != "1":
        kv[:, : -formats.ROPE_DIM] *= magnitude_factors(kind.magnitude, (num_kv, 1), generator)
    if kind.scores == "growing":
        kv[:, -formats.ROPE_DIM] = rise(num_kv, kv.dtype, device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        q = random_queries(num_tokens, num_heads, head_dim, torch.bfloat16, kind.scores, softmax_scale, generator)
        indices = random_selection(num_tokens, topk, num_kv, generator)
        if kind.scores == "growing":
            indices = indices.sort(dim=1)[0]
        return q, PATTERNS[kind.pattern](indices, generator)

    # a prefill's query is hundreds of megabytes, many times the L2 cache: two sets do
    sets = [step() for _ in range(min(2, common.number_of_sets(arguments)))]
    outputs = [make_outputs(q) for q, _ in sets]
    runs = [
        partial(
            torch.ops.mla.sparse_attention.out, q, kv, indices, softmax_scale, attn_sink=attn_sink, out=out, lse=lse
        )
        for (q, indices), (out, lse) in zip(sets, outputs, strict=True)
    ]
    q, indices = sets[0]

    def compare(out: torch.Tensor, lse: torch.Tensor) -> list[common.Check]:
        def keys_of(token: int) -> torch.Tensor:
            return kv[indices[token][indices[token] >= 0].long()].double()

        return check_attention(q, keys_of, softmax_scale, out, lse, attn_sink)

    def peers() -> dict[str, common.Peer]:
        theirs = flash_mla_peer.prefill_peers(sets, kv, softmax_scale, compare)
        return {**theirs, **gather_floor.gather_peer(kv, [indices for _, indices in sets])}

    shape: dict[str, int | str] = {"T": num_tokens, "H": num_heads, "topk": topk, "d": head_dim, "num_kv": num_kv}
    shape |= kind.label()
    return common.Case(
        describe("sparse_attention", q, kv, indices, softmax_scale),
        shape,
        runs,
        partial(poison, outputs[0]),
        lambda: compare(*outputs[0]),
        attention_bytes(num_tokens, num_heads, topk, head_dim, 2 * head_dim),
        attention_flops(num_tokens, num_heads, topk, head_dim),
        peers() if arguments.peers else {},
    )


def prefills(arguments: argparse.Namespace) -> list[Prefill]:
    """The shapes that the options name, or the list above."""
    options = (arguments.prefill_tokens, arguments.prefill_heads, arguments.topk, arguments.prefill_head_dims)
    if not any(options):
        on_gpu = arguments.device.startswith("cuda") and not arguments.quick
        return PREFILLS if on_gpu else [Prefill(8, 8, 128, 576), Prefill(8, 8, 128, 512)]
    axes = [chosen or default for chosen, default in zip(options, ([4096], [64], [2048], [576]), strict=True)]
    return [Prefill(*values) for values in itertools.product(*axes)]


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmarks; returns the exit status."""
    parser = common.argument_parser("sparse_attention")
    parser.add_argument("--tokens", type=common.integers, default=None, help="decode rows: query tokens")
    parser.add_argument("--heads", type=common.integers, default=None, help="decode rows: query heads")
    parser.add_argument("--topk", type=common.integers, default=None)
    parser.add_argument("--context", type=int, default=None, help="decode rows: cached tokens of each request")
    parser.add_argument("--cache-formats", type=common.cache_formats, default=None)
    parser.add_argument("--request-local", action="store_true", help="translate indices inside the op")
    parser.add_argument(
        "--patterns",
        type=common.names_of(PATTERNS.__getitem__, *PATTERNS),
        default=["live"],
        help=f"decode rows: of {', '.join(PATTERNS)}",
    )
    parser.add_argument("--mixtures", type=mixtures, default=["full"], help="decode rows: of full, fourth, one")
    parser.add_argument(
        "--magnitudes", type=magnitudes, default=["1"], help="decode rows: of latents, e.g. 1,0.01,spread12,wild30"
    )
    parser.add_argument(
        "--scores", type=common.names_of(SCORES.index, *SCORES), default=["usual"], help=f"of {', '.join(SCORES)}"
    )
    parser.add_argument("--topk-length", action="store_true", help="pass topk_length, all rows full")
    parser.add_argument("--prefill-tokens", type=common.integers, default=None, help="prefill rows: query tokens")
    parser.add_argument("--prefill-heads", type=common.integers, default=None)
    parser.add_argument("--prefill-head-dims", type=common.integers, default=None)
    parser.add_argument("--num-kv", type=int, default=None, help="prefill rows: rows of the flat KV")
    parser.add_argument(
        "--peers", action="store_true", help="time FlashMLA's own ops beside ours, where it is installed"
    )
    add_variant_options(parser)
    add_halves_option(parser)
    parser.add_argument("--skip", choices=("decode", "prefill"), default=None)
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    tokens = arguments.tokens or ([1, 8, 32, 128, 256, 512] if on_gpu else [1, 4])
    heads = arguments.heads or ([8, 16, 32, 64, 128] if on_gpu else [8, 16])
    topks = arguments.topk or ([2048] if on_gpu else [128])
    context = arguments.context or (8192 if on_gpu else 512)
    cache_formats = arguments.cache_formats or (["fp8_ds_mla"] if on_gpu else ["fp8_ds_mla", "bf16"])
    num_kv = arguments.num_kv or (32768 if on_gpu else 512)

    def cases() -> Iterator[partial[common.Case]]:
        if arguments.skip != "decode":
            axes = arguments.patterns, arguments.mixtures, arguments.magnitudes, arguments.scores
            kinds = itertools.starmap(Kind, itertools.product(*axes))
            for cache_format, topk, num_heads, num_tokens, kind in itertools.product(
                cache_formats, topks, heads, tokens, kinds
            ):
                yield partial(build_paged, num_tokens, num_heads, topk, cache_format, context, kind, arguments)
        if arguments.skip != "prefill":
            for prefill in prefills(arguments):
                yield partial(build_flat, prefill, num_kv, arguments)

    return common.run_benchmark("sparse_attention", cases(), arguments)


if __name__ == "__main__":
    sys.exit(main())
