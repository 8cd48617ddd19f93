"""Benchmarks of the sparse attention ops, and comparison of their lowerings.

python -m mla_ops bench sparse_attention --lowerings triton,hopper,flash_mla

All lowerings of a row alternate in one process on the same tensors; `ratio` is to the first one named. Indices are
slots, drawn without repetition from a context of each token's own, so decode rows read what a batch of that many
requests reads. FLOPs count the two products over all heads and `topk` keys; bytes count each selected row once, the
query, the indices and the outputs. Rows that several tokens select are counted for each: where the L2 cache serves
them (prefill), a figure may fall below the memory part of the floor. `--peers` adds FlashMLA, called as its users call
it (flash_mla_peer.py), and the gather of the selected rows alone, the floor where memory bounds (gather_floor.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks import common, flash_mla_peer, gather_floor
from benchmarks.cache import dequantize, fill_cache
from mla_ops import formats
from mla_ops.meta.sparse_attention import describe_flat, describe_paged

BLOCK_SIZE = 64
CHECKED_TOKENS = 8  # rows that are compared with the reference, spread over the batch


def random_selection(num_tokens: int, topk: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """`[num_tokens, topk]` different indices in [0, context) in random order."""
    rows = [
        torch.rand(min(512, num_tokens - start), context, device=generator.device, generator=generator)
        .topk(topk)
        .indices
        for start in range(0, num_tokens, 512)
    ]
    return torch.cat(rows).to(torch.int32)


def check_attention(
    q: torch.Tensor,
    read: Callable[[torch.Tensor], torch.Tensor],
    indices: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> list[common.Check]:
    """Compares some rows with attention in float64 over the keys that `read` gives for slots."""
    num_tokens = q.shape[0]
    chosen = sorted({i * (num_tokens - 1) // max(1, CHECKED_TOKENS - 1) for i in range(CHECKED_TOKENS)})
    worst: dict[str, common.Check] = {}
    for token in chosen:
        keys = read(indices[token].long())
        scores = q[token].double() @ keys.T * softmax_scale
        expected_lse = torch.logsumexp(scores, dim=-1)
        weights = (scores - expected_lse.unsqueeze(-1)).exp()
        values = keys[:, : formats.LATENT_DIM]
        expected = weights @ values
        # Unit roundoff of 8 significant bits. Rounding the query and the keys moves a score, rounding a probability
        # its share of the output; random signs make such sums grow as their root mean square, and four of those is
        # the bound. The output itself is rounded once. float32 sums add next to nothing.
        unit = 2.0**-8
        moved_score = float((q[token].double().square() @ keys.square().T).sqrt().max()) * unit * softmax_scale
        moved_output = float((weights.square() @ values.square()).sqrt().max()) * (unit**2 + moved_score**2) ** 0.5
        out_bound = unit * float(expected.abs().max()) + 4 * moved_output
        checks = (
            common.Check("out", common.max_error(out[token], expected), out_bound),
            common.Check("lse", common.max_error(lse[token], expected_lse), 4 * moved_score),
        )
        for check in checks:
            if check.name not in worst or check.severity > worst[check.name].severity:
                worst[check.name] = check
    return list(worst.values())


def attention_flops(num_tokens: int, num_heads: int, topk: int, head_dim: int) -> int:
    return 2 * num_tokens * num_heads * topk * (head_dim + formats.LATENT_DIM)


def attention_bytes(num_tokens: int, num_heads: int, topk: int, head_dim: int, row_bytes: int) -> int:
    queries_and_outputs = num_tokens * num_heads * (2 * head_dim + 2 * formats.LATENT_DIM + 4)
    return num_tokens * topk * (row_bytes + 4) + queries_and_outputs


def make_outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, _ = q.shape
    out = torch.empty(num_tokens, num_heads, formats.LATENT_DIM, dtype=q.dtype, device=q.device)
    return out, torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)


def poison(outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    for tensor in outputs:
        tensor.fill_(torch.nan)


def build_paged(
    num_tokens: int, num_heads: int, topk: int, cache_format: str, context: int, arguments: argparse.Namespace
) -> common.Case:
    generator = common.generator(arguments)
    device = torch.device(arguments.device)
    head_dim = formats.LATENT_DIM + formats.ROPE_DIM
    blocks_per_request = -(-max(context, topk) // BLOCK_SIZE)
    num_blocks = num_tokens * blocks_per_request
    kv_cache = formats.allocate_cache(cache_format, num_blocks, BLOCK_SIZE, device=device)
    fill_cache(kv_cache, cache_format, generator)
    block_table = torch.randperm(num_blocks, device=device, generator=generator).to(torch.int32)
    block_table = block_table.view(num_tokens, blocks_per_request)
    request = torch.arange(num_tokens, dtype=torch.int32, device=device)
    topk_length = torch.full((num_tokens,), topk, dtype=torch.int32, device=device) if arguments.topk_length else None
    softmax_scale = head_dim**-0.5

    def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = torch.randn(num_tokens, num_heads, head_dim, device=device, generator=generator).to(torch.bfloat16)
        local = random_selection(num_tokens, topk, blocks_per_request * BLOCK_SIZE, generator)
        blocks = block_table.gather(1, (local // BLOCK_SIZE).long())
        return q, local, blocks * BLOCK_SIZE + local % BLOCK_SIZE

    sets = [step() for _ in range(common.number_of_sets(arguments))]
    outputs = [make_outputs(q) for q, _, _ in sets]
    translated = {"block_table": block_table, "req_id_per_token": request} if arguments.request_local else {}
    runs = [
        partial(
            torch.ops.mla.paged_sparse_attention.out,
            q,
            kv_cache,
            local if arguments.request_local else slots,
            softmax_scale,
            cache_format,
            topk_length=topk_length,
            **translated,
            out=out,
            lse=lse,
        )
        for (q, local, slots), (out, lse) in zip(sets, outputs, strict=True)
    ]

    def read(slots: torch.Tensor) -> torch.Tensor:
        return dequantize(kv_cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE], cache_format)

    q, _, slots = sets[0]
    shape: dict[str, int | str] = {"T": num_tokens, "H": num_heads, "topk": topk, "format": cache_format}
    row_bytes = formats.FORMATS[cache_format].bytes_per_token()
    return common.Case(
        describe_paged(q, kv_cache, slots, softmax_scale, cache_format),
        shape,
        runs,
        partial(poison, outputs[0]),
        lambda: check_attention(q, read, slots, softmax_scale, *outputs[0]),
        attention_bytes(num_tokens, num_heads, topk, head_dim, row_bytes),
        attention_flops(num_tokens, num_heads, topk, head_dim),
        {
            **flash_mla_peer.decode_peers(
                [(q, slots) for q, _, slots in sets],
                kv_cache,
                softmax_scale,
                lambda out, lse: check_attention(q, read, slots, softmax_scale, out, lse),
            ),
            **gather_floor.gather_peer(kv_cache, [slots for _, _, slots in sets]),
        }
        if arguments.peers and cache_format == "fp8_ds_mla"
        else {},
    )


def build_flat(
    num_tokens: int, num_heads: int, topk: int, num_kv: int, head_dim: int, arguments: argparse.Namespace
) -> common.Case:
    generator = common.generator(arguments)
    device = torch.device(arguments.device)
    kv = torch.randn(num_kv, head_dim, device=device, generator=generator).to(torch.bfloat16)
    softmax_scale = head_dim**-0.5

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.randn(num_tokens, num_heads, head_dim, device=device, generator=generator).to(torch.bfloat16)
        return q, random_selection(num_tokens, topk, num_kv, generator)

    # a prefill's query is hundreds of megabytes, many times the L2 cache: two sets do
    sets = [step() for _ in range(min(2, common.number_of_sets(arguments)))]
    outputs = [make_outputs(q) for q, _ in sets]
    runs = [
        partial(torch.ops.mla.sparse_attention.out, q, kv, indices, softmax_scale, out=out, lse=lse)
        for (q, indices), (out, lse) in zip(sets, outputs, strict=True)
    ]
    q, indices = sets[0]
    shape: dict[str, int | str] = {"T": num_tokens, "H": num_heads, "topk": topk, "d": head_dim, "num_kv": num_kv}
    return common.Case(
        describe_flat(q, kv, indices, softmax_scale),
        shape,
        runs,
        partial(poison, outputs[0]),
        lambda: check_attention(q, lambda slots: kv[slots].double(), indices, softmax_scale, *outputs[0]),
        attention_bytes(num_tokens, num_heads, topk, head_dim, 2 * head_dim),
        attention_flops(num_tokens, num_heads, topk, head_dim),
        flash_mla_peer.prefill_peers(
            sets,
            kv,
            softmax_scale,
            lambda out, lse: check_attention(q, lambda slots: kv[slots].double(), indices, softmax_scale, out, lse),
        )
        if arguments.peers
        else {},
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmarks; returns the exit status."""
    parser = common.argument_parser("sparse_attention")
    parser.add_argument("--tokens", type=common.integers, default=None, help="decode rows: query tokens")
    parser.add_argument("--heads", type=common.integers, default=None, help="decode rows: query heads")
    parser.add_argument("--topk", type=common.integers, default=None)
    parser.add_argument("--context", type=int, default=None, help="decode rows: cached tokens of each request")
    parser.add_argument("--cache-formats", type=common.names, default=None)
    parser.add_argument("--request-local", action="store_true", help="translate indices inside the op")
    parser.add_argument("--topk-length", action="store_true", help="pass topk_length, all rows full")
    parser.add_argument("--prefill-tokens", type=common.integers, default=None, help="prefill rows: query tokens")
    parser.add_argument("--prefill-heads", type=common.integers, default=None)
    parser.add_argument("--prefill-head-dims", type=common.integers, default=[576])
    parser.add_argument("--num-kv", type=int, default=None, help="prefill rows: rows of the flat KV")
    parser.add_argument(
        "--peers", action="store_true", help="time FlashMLA's own ops beside ours, where it is installed"
    )
    parser.add_argument("--skip", choices=("decode", "prefill"), default=None)
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    tokens = arguments.tokens or ([1, 8, 32, 128, 256, 512] if on_gpu else [1, 4])
    heads = arguments.heads or ([8, 16, 32, 64, 128] if on_gpu else [8, 16])
    topks = arguments.topk or ([2048] if on_gpu else [128])
    context = arguments.context or (8192 if on_gpu else 512)
    cache_formats = arguments.cache_formats or (["fp8_ds_mla"] if on_gpu else ["fp8_ds_mla", "bf16"])
    prefill_tokens = arguments.prefill_tokens or ([64, 4096] if on_gpu else [8])
    prefill_heads = arguments.prefill_heads or ([64, 128] if on_gpu else [8])
    num_kv = arguments.num_kv or (32768 if on_gpu else 512)

    def cases() -> Iterator[partial[common.Case]]:
        for cache_format in cache_formats if arguments.skip != "decode" else ():
            for topk in topks:
                for num_heads in heads:
                    for num_tokens in tokens:
                        yield partial(build_paged, num_tokens, num_heads, topk, cache_format, context, arguments)
        for head_dim in arguments.prefill_head_dims if arguments.skip != "prefill" else ():
            for topk in topks:
                for num_heads in prefill_heads:
                    for num_tokens in prefill_tokens:
                        yield partial(build_flat, num_tokens, num_heads, topk, num_kv, head_dim, arguments)

    return common.run_benchmark("sparse_attention", cases(), arguments)


if __name__ == "__main__":
    sys.exit(main())
