"""Benchmarks of dense attention: varlen prefill, and decode over a paged cache.

python -m mla_ops bench dense_attention --lowerings triton,torch_sdpa --peers

Prefill rows are causal, of one request or as `--prefill-mixtures` says, head dims as DeepSeek-V3 expands them; FLOPs
count the keys that each query sees. Decode rows have a request for each token, whose blocks lie anywhere in the cache;
bytes count each key once. Requests are of one length, or as `--mixtures` says: `1x131072+31x512` is one of 131,072
tokens beside 31 of 512, `random7` a batch of up to 256 requests whose lengths are lognormal, drawn with seed 7, and
`lognormal7`, for prefill, 64 requests around 128 tokens. `--peers` adds torch's cuDNN attention where requests are of
one length, its plan built before, and its FlashAttention-2 with the values padded to the keys' width; and FlashMLA's
dense decode, planned before the timing (as an engine plans once for all layers) and inside. `--q-halves` adds decode of
queries in two tensors (`q_rope`), and of these joined first.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks import attention, common
from benchmarks.attention import PATTERNS, SCORES, Kind
from benchmarks.cache import magnitude_factors, magnitudes, query_dtype, raise_keys, read_keys
from mla_ops import formats
from mla_ops.kernels import flash_mla
from mla_ops.registry import describe

Set = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Results = tuple[torch.Tensor, torch.Tensor]  # `[num_tokens, num_heads, *]`


def check_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    softmax_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> list[common.Check]:
    """Compares some rows of causal requests with attention in float64; the bound is `check_attention`'s."""
    unit, ends = 2.0**-8, list(itertools.accumulate(lengths))
    worst: dict[str, common.Check] = {}
    for token in sorted({i * (len(q) - 1) // 7 for i in range(8)}):
        first = max([0, *(end for end in ends if end <= token)])
        query, keys, values = q[token].double(), k[first : token + 1].double(), v[first : token + 1].double()
        scores = torch.einsum("hd,khd->hk", query, keys) * softmax_scale
        expected_lse = torch.logsumexp(scores, dim=-1)
        weights = (scores - expected_lse.unsqueeze(-1)).exp()
        expected = torch.einsum("hk,khd->hd", weights, values)
        spread = torch.einsum("hd,khd->hk", query.square(), keys.square()).sqrt().max()
        moved_score = float(spread) * unit * softmax_scale
        moved_output = float(torch.einsum("hk,khd->hd", weights.square(), values.square()).sqrt().max())
        out_bound = unit * float(expected.abs().max()) + 4 * moved_output * (unit**2 + moved_score**2) ** 0.5
        output = common.Check("out", common.max_error(out[token], expected), out_bound)
        if moved_score > 1:
            of_heads = values.transpose(0, 1)
            output = attention.among_the_largest(out[token], expected, scores, of_heads, 4 * moved_score)
        for check in (output, common.Check("lse", common.max_error(lse[token], expected_lse), 4 * moved_score)):
            if check.name not in worst or check.severity > worst[check.name].severity:
                worst[check.name] = check
    return list(worst.values())


def torch_peers(
    sets: list[Set], lengths: list[int], starts: torch.Tensor, softmax_scale: float
) -> dict[str, common.Peer]:
    """The kernels in torch, where they take the shape."""
    requests, longest, num_heads = len(lengths), max(lengths), sets[0][0].shape[1]

    def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batched = (tensor.unflatten(0, (requests, longest)).transpose(1, 2) for tensor in (q, k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *batched, None, True, 0.0, True, False, scale=softmax_scale
        )
        return out, lse

    def cudnn_rows(out: torch.Tensor, lse: torch.Tensor) -> Results:
        rows = lse.view(requests, num_heads, longest)
        return out.transpose(1, 2).flatten(0, 1), rows.transpose(1, 2).flatten(0, 1)

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=softmax_scale
        )
        return out, lse

    def flash_rows(out: torch.Tensor, lse: torch.Tensor) -> Results:
        return out[..., : sets[0][2].shape[2]], lse.t()

    def peer(
        call: Callable[..., tuple[torch.Tensor, ...]], rows: Callable[..., Results], tensors: list[Set]
    ) -> common.Peer:
        results: list[tuple[torch.Tensor, ...]] = [()] * len(tensors)

        def run(number: int) -> None:
            results[number] = call(*tensors[number])

        def check() -> list[common.Check]:
            return check_prefill(*sets[0], lengths, softmax_scale, *rows(*results[0]))

        return common.Peer([partial(run, number) for number in range(len(tensors))], check)

    padded = [(q, k, F.pad(v, (0, k.shape[2] - v.shape[2]))) for q, k, v in sets]
    peers = {"torch FlashAttention-2": peer(flash, flash_rows, padded)}
    if len(set(lengths)) > 1:
        return peers
    try:
        cudnn(*sets[0])
    except RuntimeError as error:
        print(f"cuDNN is not measured: {str(error).splitlines()[0]}")
        return peers
    return {"cuDNN": peer(cudnn, cudnn_rows, sets), **peers}


def build_prefill(
    lengths: list[int],
    label: dict[str, int | str],
    num_heads: int,
    head_dims: tuple[int, int],
    arguments: argparse.Namespace,
    kind: Kind = Kind(),
) -> common.Case:
    """`label`: what a row's shape says of the lengths; `kind`: scores and magnitude of keys and values alone."""
    num_tokens, longest = sum(lengths), max(lengths)
    generator = common.generator(arguments)
    device = torch.device(arguments.device)
    head_dim, head_dim_v = head_dims
    softmax_scale = head_dim**-0.5

    def normal(width: int) -> torch.Tensor:
        return torch.randn(num_tokens, num_heads, width, device=device, generator=generator).to(torch.bfloat16)

    def step() -> Set:
        q, k, v = normal(head_dim), normal(head_dim), normal(head_dim_v)
        if kind.magnitude != "1":
            factors = magnitude_factors(kind.magnitude, (num_tokens, num_heads, 1), generator)
            k[..., : -formats.ROPE_DIM] *= factors
            v *= factors
        if kind.scores == "growing":
            risen = [attention.rise(length, k.dtype, device) for length in lengths]
            k[..., -formats.ROPE_DIM] = torch.cat(risen)[:, None]
        return attention.shape_queries(q, kind.scores, softmax_scale), k, v

    # the L2 cache is overwritten before each timing: two sets do
    sets = [step() for _ in range(2)]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    bounds = starts, starts, longest, longest, softmax_scale
    outputs = [
        (torch.empty_like(v), torch.empty(num_tokens, num_heads, dtype=torch.float32, device=device)) for *_, v in sets
    ]
    runs = [
        partial(torch.ops.mla.prefill_attention.out, *tensors, *bounds, out=out, lse=lse)
        for tensors, (out, lse) in zip(sets, outputs, strict=True)
    ]
    rows = num_tokens * num_heads
    return common.Case(
        describe("prefill_attention", *sets[0], *bounds),
        {**label, "H": num_heads, "dims": f"{head_dim}/{head_dim_v}", **kind.label()},
        runs,
        partial(attention.poison, outputs[0]),
        lambda: check_prefill(*sets[0], lengths, softmax_scale, *outputs[0]),
        bytes_moved=rows * (2 * 2 * head_dim + 2 * 2 * head_dim_v + 4),
        flops=num_heads * sum(length * (length + 1) for length in lengths) * (head_dim + head_dim_v),
        peers=torch_peers(sets, lengths, starts, softmax_scale) if arguments.peers else {},
    )


def dense_peers(
    queries: list[torch.Tensor],
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    lens: torch.Tensor,
    softmax_scale: float,
    compare: Callable[[torch.Tensor, torch.Tensor], list[common.Check]],
) -> dict[str, common.Peer]:
    """FlashMLA's dense decode of one token a request."""
    provider, reason = flash_mla.find_provider()
    if provider is None:
        print(f"FlashMLA is not measured: {reason}")
        return {}
    op = getattr(torch.ops, provider.namespace).dense_decode_fwd.default

    def call(q: torch.Tensor, schedule: tuple[object, object]) -> tuple[torch.Tensor, ...]:
        fixed = (formats.LATENT_DIM, lens, block_table, softmax_scale, False, *schedule)
        given = (q.unsqueeze(1), kv_cache.unsqueeze(2), *fixed)
        return tuple(op(*given, *flash_mla.defaults(op, len(given))))

    *_, metadata, num_splits = call(queries[0], (None, None))

    def peer(schedule: tuple[object, object]) -> common.Peer:
        results: list[tuple[torch.Tensor, ...]] = [()] * len(queries)

        def run(number: int) -> None:
            results[number] = call(queries[number], schedule)

        def check() -> list[common.Check]:
            out, lse = results[0][:2]
            return compare(out[:, 0], lse[:, :, 0])

        return common.Peer([partial(run, number) for number in range(len(queries))], check)

    return {"FlashMLA": peer((metadata, num_splits)), "FlashMLA, with plan": peer((None, None))}


def lengths_of(mixture: str) -> list[int]:
    """Tokens of each request, as `--mixtures` names them.

    Raises:
        ValueError: it is neither counts and lengths nor `random` or `lognormal` and a seed.
    """
    if mixture.startswith("lognormal"):
        drawn = random.Random(int(mixture.removeprefix("lognormal")))
        return [min(8192, max(1, int(drawn.lognormvariate(math.log(128), 1.5)))) for _ in range(64)]
    if mixture.startswith("random"):
        drawn = random.Random(int(mixture.removeprefix("random")))
        count, middle = round(2 ** drawn.uniform(0, 8)), drawn.uniform(5, 10)
        return [min(131072, max(16, int(drawn.lognormvariate(middle, 1.5)))) for _ in range(count)]
    parts = [part.split("x") for part in mixture.split("+")]
    return [int(length) for count, length in parts for _ in range(int(count))]


# Type of an option.
mixtures = common.names_of(lengths_of, "2x100+5x7", "random7", "lognormal7")


def block_table(lengths: list[int], num_blocks: int, generator: torch.Generator) -> torch.Tensor:
    """Different blocks for what each request has, anywhere in a cache of `num_blocks`; 0 behind."""
    counts = [-(-length // attention.BLOCK_SIZE) for length in lengths]
    blocks = torch.randperm(num_blocks, device=generator.device, generator=generator).to(torch.int32)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=generator.device)
    for row, own in zip(table, blocks[: sum(counts)].split(counts), strict=True):
        row[: len(own)] = own
    return table


def build_paged(
    lengths: list[int],
    label: dict[str, int | str],
    num_heads: int,
    cache_format: str,
    arguments: argparse.Namespace,
    kind: Kind = Kind(),
) -> common.Case:
    """`label`: what a row's shape says of the lengths; `kind`: its pattern is that of the block table."""
    num_tokens, num_keys = len(lengths), sum(lengths)
    generator = common.generator(arguments)
    device = torch.device(arguments.device)
    entry = formats.FORMATS[cache_format]
    head_dim = entry.head_dims[0]
    softmax_scale, dtype = common.SOFTMAX_SCALES[head_dim], query_dtype(cache_format)
    needed = sum(-(-length // attention.BLOCK_SIZE) for length in lengths)
    block_bytes = attention.BLOCK_SIZE * entry.bytes_per_token()
    num_blocks = attention.cache_blocks(needed, block_bytes, device.type == "cuda")
    kv_cache = attention.filled_cache(cache_format, num_blocks, kind, generator)
    # a small batch would find its context in the L2 cache again: each set reads another part of the cache
    count = common.number_of_sets(arguments)
    tables = [block_table(lengths, num_blocks, generator) for _ in range(count)]
    if kind.scores == "growing":  # keys have one place in one request
        tables = tables[:1] * count
        for row, length in zip(tables[0], lengths, strict=True):
            position = torch.arange(length, device=device)
            slots = row[position // attention.BLOCK_SIZE] * attention.BLOCK_SIZE + position % attention.BLOCK_SIZE
            raise_keys(kv_cache, cache_format, slots, attention.rise(length, dtype, device))
    tables = [PATTERNS[kind.pattern](table, generator) for table in tables]
    requests = torch.arange(num_tokens, dtype=torch.int32, device=device)
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    queries = [
        attention.random_queries(num_tokens, num_heads, head_dim, dtype, kind.scores, softmax_scale, generator)
        for _ in range(count)
    ]
    outputs = [attention.make_outputs(q) for q in queries]

    def attend(
        number: int,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        deterministic: bool = False,
    ) -> None:
        torch.ops.mla.paged_attention.out(
            q,
            kv_cache,
            tables[number],
            requests,
            lens,
            softmax_scale,
            cache_format,
            q_rope=q_rope,
            deterministic=deterministic,
            out=out,
            lse=lse,
        )

    runs = [partial(attend, number, queries[number], None, *own) for number, own in enumerate(outputs)]

    def keys_of(token: int) -> torch.Tensor:
        position = torch.arange(lengths[token], device=device)
        blocks = tables[0][token, position // attention.BLOCK_SIZE].long()
        slots = blocks * attention.BLOCK_SIZE + position % attention.BLOCK_SIZE
        return read_keys(kv_cache, slots[blocks >= 0], cache_format)

    def compare(out: torch.Tensor, lse: torch.Tensor) -> list[common.Check]:
        return attention.check_attention(queries[0], keys_of, softmax_scale, out, lse)

    peers = {}
    if arguments.peers and cache_format == "bf16":
        peers = dense_peers(queries, kv_cache, tables[0], lens, softmax_scale, compare)
    if arguments.q_halves:
        peers |= attention.halves_peers(queries, attend, compare)

    def attend_whole(number: int, out: torch.Tensor, lse: torch.Tensor, *, deterministic: bool = False) -> None:
        attend(number, queries[number], None, out, lse, deterministic)

    peers |= attention.variants(arguments, attend_whole, queries, compare)
    rows = num_tokens * num_heads
    return common.Case(
        describe("paged_attention", queries[0], kv_cache, tables[0], requests, lens, softmax_scale, cache_format),
        {**label, "H": num_heads, "format": cache_format, **kind.label()},
        runs,
        partial(attention.poison, outputs[0]),
        lambda: compare(*outputs[0]),
        bytes_moved=num_keys * entry.bytes_per_token() + rows * (2 * head_dim + 2 * formats.LATENT_DIM + 4),
        flops=attention.attention_flops(1, num_heads, num_keys, head_dim),
        peers=peers,
    )


def head_dims(value: str) -> list[tuple[int, int]]:
    """Type of an option like `192/128,128/128`."""
    pairs = [part.split("/") for part in value.split(",") if part]
    return [(int(head_dim), int(head_dim_v)) for head_dim, head_dim_v in pairs]


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmarks; returns the exit status."""
    parser = common.argument_parser("dense_attention")
    parser.add_argument("--prefill", type=common.names, default=None, help="heads x tokens, e.g. 16x8192,128x4096")
    parser.add_argument(
        "--prefill-mixtures",
        type=mixtures,
        default=None,
        help="prefill rows of several requests, for each of --heads, e.g. 2048x1,1x8192+63x128,lognormal7",
    )
    parser.add_argument("--head-dims", type=head_dims, default=[(192, 128)])
    parser.add_argument("--tokens", type=common.integers, default=None, help="decode rows: query tokens")
    parser.add_argument(
        "--heads", type=common.integers, default=None, help="query heads of decode and of prefill of several requests"
    )
    parser.add_argument("--context", type=int, default=None, help="decode rows: cached tokens of each request")
    parser.add_argument(
        "--mixtures",
        type=mixtures,
        default=None,
        help="decode rows with requests of several lengths, e.g. 1x131072+31x512,random7",
    )
    parser.add_argument("--cache-formats", type=common.cache_formats, default=["bf16", "fp8_ds_mla"])
    parser.add_argument(
        "--patterns",
        type=common.names_of(PATTERNS.__getitem__, *PATTERNS),
        default=["live"],
        help=f"decode rows: of the blocks of a request, {', '.join(PATTERNS)}",
    )
    parser.add_argument("--magnitudes", type=magnitudes, default=["1"], help="of latents, or of keys and values")
    parser.add_argument(
        "--scores", type=common.names_of(SCORES[:3].index, *SCORES[:3]), default=["usual"], help="usual, growing, large"
    )
    parser.add_argument("--peers", action="store_true", help="time torch's and FlashMLA's own kernels as well")
    attention.add_variant_options(parser)
    attention.add_halves_option(parser)
    parser.add_argument("--skip", choices=("prefill", "decode"), default=None)
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    prefill = arguments.prefill or (["16x8192", "128x4096"] if on_gpu else ["4x40"])
    tokens = arguments.tokens or ([1, 4, 32, 128] if on_gpu else [1, 3])
    heads = arguments.heads or ([16, 128] if on_gpu else [4])
    context = arguments.context or (8192 if on_gpu else 100)
    mixed = arguments.mixtures or (["1x131072+31x512", "2x65536+126x128"] if on_gpu else ["1x100+2x7"])
    short = arguments.prefill_mixtures
    if short is None:
        short = ["64x128", "512x16", "2048x1", "1x8192+63x128", "lognormal1"] if on_gpu else ["3x4+1x20"]
    batches: list[tuple[list[int], dict[str, int | str]]] = [
        ([context] * num_tokens, {"T": num_tokens, "context": context}) for num_tokens in tokens
    ]
    batches += [(lengths_of(mixture), {"lengths": mixture}) for mixture in mixed]

    kinds = [
        Kind(pattern, magnitude=magnitude, scores=scores)
        for pattern, magnitude, scores in itertools.product(arguments.patterns, arguments.magnitudes, arguments.scores)
    ]

    def cases() -> Iterator[partial[common.Case]]:
        for dims in arguments.head_dims if arguments.skip != "prefill" else ():
            for shape in prefill:
                num_heads, num_tokens = (int(size) for size in shape.split("x"))
                for kind in kinds[: len(kinds) // len(arguments.patterns)]:
                    yield partial(build_prefill, [num_tokens], {"T": num_tokens}, num_heads, dims, arguments, kind)
            for num_heads in heads:
                for mixture in short:
                    yield partial(build_prefill, lengths_of(mixture), {"lengths": mixture}, num_heads, dims, arguments)
        for cache_format in arguments.cache_formats if arguments.skip != "decode" else ():
            for num_heads in heads:
                for (lengths, label), kind in itertools.product(batches, kinds):
                    yield partial(build_paged, lengths, label, num_heads, cache_format, arguments, kind)

    return common.run_benchmark("dense_attention", cases(), arguments)


if __name__ == "__main__":
    sys.exit(main())
