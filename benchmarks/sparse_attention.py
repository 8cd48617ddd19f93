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
from collections.abc import Iterator
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
    cache_blocks,
    check_attention,
    halves_peers,
    make_outputs,
    mixed_lengths,
    mixtures,
    poison,
    random_block_table,
    random_selection,
    rise,
    shape_queries,
    sinks,
    to_slots,
    variants,
)
from benchmarks.cache import fill_cache, magnitude_factors, magnitudes, query_dtype, raise_keys, read_keys, scale_keys
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
    device = torch.device(arguments.device)
    entry = formats.FORMATS[cache_format]
    head_dim, row_bytes = entry.head_dims[0], entry.bytes_per_token()
    dtype = query_dtype(cache_format)
    blocks_per_request = -(-max(context, topk) // BLOCK_SIZE)
    on_gpu = device.type == "cuda" and not arguments.quick
    num_blocks = cache_blocks(num_tokens * blocks_per_request, BLOCK_SIZE * row_bytes, on_gpu)
    kv_cache = formats.allocate_cache(cache_format, num_blocks, BLOCK_SIZE, device=device)
    fill_cache(kv_cache, cache_format, generator)
    if kind.magnitude != "1":
        scale_keys(kv_cache, cache_format, kind.magnitude, generator)
    block_table = random_block_table(num_tokens, blocks_per_request, num_blocks, generator)
    request = torch.arange(num_tokens, dtype=torch.int32, device=device)
    lens = mixed_lengths(kind.mixture, num_tokens, topk, device)
    softmax_scale = common.SOFTMAX_SCALES[head_dim]
    attn_sink = sinks(kind, num_heads, device)
    if kind.scores == "growing":
        positions = torch.arange(blocks_per_request * BLOCK_SIZE, device=device).expand(num_tokens, -1)
        values = rise(positions.shape[1], dtype, device).expand_as(positions)
        raise_keys(kv_cache, cache_format, to_slots(positions, block_table), values)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.randn(num_tokens, num_heads, head_dim, device=device, generator=generator).to(dtype)
        shape_queries(q, kind.scores, softmax_scale)
        local = random_selection(num_tokens, topk, blocks_per_request * BLOCK_SIZE, generator)
        if kind.scores == "growing":
            local = local.sort(dim=1)[0]
        chosen = local if arguments.request_local else to_slots(local, block_table)
        return q, PATTERNS[kind.pattern](chosen, generator)

    sets = [step() for _ in range(common.number_of_sets(arguments))]
    outputs = [make_outputs(q) for q, _ in sets]
    translated = {"block_table": block_table, "req_id_per_token": request} if arguments.request_local else {}

    def attend(
        number: int,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        deterministic: bool = False,
        query: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    ) -> None:
        whole, indices = sets[number]
        q, q_rope = (whole, None) if query is None else query
        torch.ops.mla.paged_sparse_attention.out(
            q,
            kv_cache,
            indices,
            softmax_scale,
            cache_format,
            q_rope=q_rope,
            topk_length=lens if arguments.topk_length or kind.mixture != "full" else None,
            **translated,
            attn_sink=attn_sink,
            deterministic=deterministic,
            out=out,
            lse=lse,
        )

    runs = [partial(attend, number, *own) for number, own in enumerate(outputs)]
    q, indices = sets[0]
    columns = torch.arange(topk, device=device)

    def live_slots(chosen: torch.Tensor) -> torch.Tensor:
        """Slots, -1 for what is dead or past a length."""
        slots = to_slots(chosen.clamp(min=0), block_table) if arguments.request_local else chosen
        return torch.where((columns < lens[:, None]) & (chosen >= 0), slots, -1)

    slots = live_slots(indices)

    def compare(out: torch.Tensor, lse: torch.Tensor) -> list[common.Check]:
        return check_attention(
            q,
            lambda token: read_keys(kv_cache, slots[token][slots[token] >= 0], cache_format),
            softmax_scale,
            out,
            lse,
            attn_sink,
        )

    def attend_halves(number: int, q: torch.Tensor, q_rope: torch.Tensor | None, *outputs: torch.Tensor) -> None:
        attend(number, *outputs, query=(q, q_rope))

    def peers() -> dict[str, common.Peer]:
        if cache_format not in ("fp8_ds_mla", "bf16") or attn_sink is not None:  # V4's stand beside its two caches
            return {}
        chosen = [(q, live_slots(indices)) for q, indices in sets]
        if cache_format == "fp8_ds_mla":
            theirs = flash_mla_peer.decode_peers(chosen, kv_cache, softmax_scale, compare)
        else:
            theirs = flash_mla_peer.prefill_peers(chosen, kv_cache.view(-1, head_dim), softmax_scale, compare)
        if kind.label():  # the gather alone knows no dead index
            return theirs
        return {**theirs, **gather_floor.gather_peer(kv_cache.view(-1, kv_cache.shape[2]), [s for _, s in chosen])}

    shape: dict[str, int | str] = {"T": num_tokens, "H": num_heads, "topk": topk, "format": cache_format}
    shape |= kind.label()
    keys_a_row = int((slots >= 0).sum()) // max(1, num_tokens)
    return common.Case(
        describe("paged_sparse_attention", q, kv_cache, indices, softmax_scale, cache_format),
        shape,
        runs,
        partial(poison, outputs[0]),
        lambda: compare(*outputs[0]),
        attention_bytes(num_tokens, num_heads, keys_a_row, head_dim, row_bytes),
        attention_flops(num_tokens, num_heads, keys_a_row, head_dim),
        {
            **(peers() if arguments.peers else {}),
            **variants(arguments, attend, [q for q, _ in sets], compare),
            **(halves_peers([q for q, _ in sets], attend_halves, compare) if arguments.q_halves else {}),
        },
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
        q = torch.randn(num_tokens, num_heads, head_dim, device=device, generator=generator).to(torch.bfloat16)
        shape_queries(q, kind.scores, softmax_scale)
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
