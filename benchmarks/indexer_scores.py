"""Benchmark of the lightning indexer's scores: python -m mla_ops bench indexer_scores --peers FOLDER.

FOLDER has DeepGEMM as `dg/deep_gemm`, which compiles its kernels with the machine's nvcc.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import common
from benchmarks.cache import fill_index_cache
from mla_ops import formats
from mla_ops.kernels.reference.indexer import read_index_keys
from mla_ops.registry import describe
from mla_ops.testing.index_scores import exact_scores

BLOCK_SIZE, DIM, MAX_SLOTS = 64, 128, 2**23
CHECKED_KEYS = 4096

# query tokens and keys of a prefill; requests, query tokens of each, and keys of a decode
FLAT = ((1024, 32768), (4096, 32768), (4096, 131072))
PAGED = tuple((b, n, keys) for keys in (4096, 32768, 131072) for b in (1, 4, 16, 64, 128) for n in (1, 2))

Scores = Callable[[], torch.Tensor]


def _quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and power-of-two scales of rows."""
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1).clamp(min=1e-4) / 448)))
    return (x / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


def _queries(
    num_tokens: int, num_heads: int, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = _quantized(torch.randn(num_tokens, num_heads, DIM, device=device, generator=generator))
    weights = torch.randn(num_tokens, num_heads, device=device, generator=generator)
    return q, weights * scale * (num_heads * DIM) ** -0.5


def _error(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest error as a part of its bound, which differs from score to score."""
    return float(((found.double() - expected).abs() / bound).max())


def load_deep_gemm(folder: Path | None) -> Any:
    if folder is None:
        return None
    sys.path.insert(0, str(folder / "dg"))
    for home in ("/usr/local/cuda", "/usr/local/cuda-13.0"):
        if Path(home, "bin/nvcc").exists():
            os.environ.setdefault("CUDA_HOME", home)
    try:
        import deep_gemm  # type: ignore[import-not-found]
    except Exception as error:  # noqa: BLE001 (whatever a build that is not ours raises)
        print(f"DeepGEMM is not measured: {error}")
        return None
    return deep_gemm


def _peers(
    calls: dict[str, list[Scores]], check: Callable[[torch.Tensor], list[common.Check]]
) -> dict[str, common.Peer]:
    """Peers whose calls return what they allocate."""
    peers: dict[str, common.Peer] = {}
    for name, every in calls.items():
        kept: list[torch.Tensor] = [torch.empty(0)] * len(every)

        def run(number: int, every: list[Scores] = every, kept: list[torch.Tensor] = kept) -> None:
            kept[number] = every[number]()

        def check_kept(kept: list[torch.Tensor] = kept) -> list[common.Check]:
            return check(kept[0])

        try:
            run(0)
        except Exception as error:  # noqa: BLE001
            print(f"{name} is not measured: {[type(error).__name__, *str(error).splitlines()][-1]}")
            continue
        peers[name] = common.Peer([partial(run, number) for number in range(len(every))], check_kept)
    return peers


Flat = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def flat_inputs(
    num_tokens: int, num_keys: int, num_heads: int, arguments: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor, list[Flat]]:
    """Starts and ends of the last `num_tokens` of a sequence, and sets of queries, keys, weights and scales."""
    generator, device = common.generator(arguments), torch.device(arguments.device)
    ends = torch.arange(num_keys - num_tokens + 1, num_keys + 1, dtype=torch.int32, device=device)
    sets: list[Flat] = []
    for _ in range(common.number_of_sets(arguments)):
        k, k_scale = _quantized(torch.randn(num_keys, DIM, device=device, generator=generator))
        q, weights = _queries(num_tokens, num_heads, device, generator)
        sets.append((q, k, weights, k_scale))
    return torch.zeros_like(ends), ends, sets


def build_flat(num_tokens: int, num_keys: int, num_heads: int, arguments: argparse.Namespace) -> common.Case:
    """The last `num_tokens` of a sequence of `num_keys`, causal."""
    device = torch.device(arguments.device)
    starts, ends, sets = flat_inputs(num_tokens, num_keys, num_heads, arguments)
    out = torch.empty(num_tokens, num_keys, device=device)
    op = torch.ops.mla.indexer_logits.out
    runs = [partial(op, *given[:3], starts, ends, k_scale=given[3], out=out) for given in sets]

    def check_scores(found: torch.Tensor) -> list[common.Check]:
        q, k, weights, k_scale = sets[0]
        rows = torch.tensor([0, num_tokens // 2, num_tokens - 1], device=device)
        errors = []
        for row in rows.tolist():
            keys = slice(max(int(ends[row]) - CHECKED_KEYS, 0), int(ends[row]))
            one = slice(row, row + 1)
            exact = exact_scores(q[one], k[keys], weights[one], k_scale[keys], e4m3_cores=device.type == "cuda")
            errors.append(_error(found[one, keys], *exact))
        return [common.Check("error / bound", float(torch.tensor(errors).max()), 1.0)]

    calls: dict[str, list[Scores]] = {}
    if (deep_gemm := load_deep_gemm(arguments.peers)) is not None:
        peer = deep_gemm.fp8_mqa_logits
        calls["DeepGEMM"] = [partial(peer, q, (k, s), w, starts, ends, False) for q, k, w, s in sets]
    scores = int(ends.long().sum())
    call = describe("indexer_logits", *sets[0][:3], starts, ends)
    return common.Case(
        call,
        {"keys": num_keys, "T": num_tokens, "H": num_heads},
        runs,
        lambda: out.fill_(torch.nan),
        lambda: check_scores(out),
        num_tokens * num_heads * (DIM + 4) + num_keys * (DIM + 4) + 4 * scores,
        flops=2 * scores * num_heads * DIM,
        peers=_peers(calls, check_scores),
    )


class Paged(NamedTuple):
    """Requests of one length: what scores are made of, and sets of queries and weights."""

    cache: torch.Tensor
    table: torch.Tensor
    requests: torch.Tensor
    lengths: torch.Tensor
    sets: list[tuple[torch.Tensor, torch.Tensor]]


def paged_inputs(
    num_requests: int, tokens_each: int, num_keys: int, num_heads: int, arguments: argparse.Namespace
) -> Paged:
    generator, device = common.generator(arguments), torch.device(arguments.device)
    blocks_each, num_tokens = -(-num_keys // BLOCK_SIZE), num_requests * tokens_each
    num_blocks = min(num_requests * blocks_each, MAX_SLOTS // BLOCK_SIZE)
    cache = formats.allocate_cache("fp8_index", num_blocks, BLOCK_SIZE, device=device)
    fill_index_cache(cache, generator)
    order = torch.arange(num_requests * blocks_each, device=device) % num_blocks
    order = order[torch.randperm(len(order), device=device, generator=generator)]
    table = order.view(num_requests, blocks_each).to(torch.int32)
    requests = torch.arange(num_requests, device=device).repeat_interleave(tokens_each).to(torch.int32)
    last = torch.arange(num_keys - tokens_each + 1, num_keys + 1, dtype=torch.int32, device=device)
    lengths = last.repeat(num_requests)
    sets = [_queries(num_tokens, num_heads, device, generator) for _ in range(common.number_of_sets(arguments))]
    return Paged(cache, table, requests, lengths, sets)


def build_paged(
    num_requests: int, tokens_each: int, num_keys: int, num_heads: int, arguments: argparse.Namespace
) -> common.Case:
    """Requests of `num_keys`, of whose last `tokens_each` the scores are."""
    device, num_tokens = torch.device(arguments.device), num_requests * tokens_each
    cache, table, requests, lengths, sets = paged_inputs(num_requests, tokens_each, num_keys, num_heads, arguments)
    num_blocks = cache.shape[0]
    out = torch.empty(num_tokens, num_keys, device=device)
    op = torch.ops.mla.paged_indexer_logits.out
    rest = lengths, table, requests
    runs = [partial(op, q, cache, weights, *rest, num_keys, "fp8_index", out=out) for q, weights in sets]

    def check_scores(found: torch.Tensor) -> list[common.Check]:
        q, weights = sets[0]
        errors = []
        for row in {0, num_tokens // 2, num_tokens - 1}:
            keys = slice(max(int(lengths[row]) - CHECKED_KEYS, 0), int(lengths[row]))
            position = torch.arange(keys.start, keys.stop, device=device)
            slots = table[int(requests[row])].long()[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            k, k_scale = read_index_keys(cache, slots, "fp8_index")
            one = slice(row, row + 1)
            exact = exact_scores(q[one], k, weights[one], k_scale, e4m3_cores=device.type == "cuda")
            errors.append(_error(found[one, keys], *exact))
        return [common.Check("error / bound", float(torch.tensor(errors).max()), 1.0)]

    calls: dict[str, list[Scores]] = {}
    if (deep_gemm := load_deep_gemm(arguments.peers)) is not None:
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        each, pages = lengths.view(num_requests, tokens_each), cache.view(num_blocks, BLOCK_SIZE, 1, 132)
        plan = partial(deep_gemm.get_paged_mqa_logits_metadata, each, BLOCK_SIZE, num_sms)

        def score(q: torch.Tensor, weights: torch.Tensor, schedule: torch.Tensor | None) -> torch.Tensor:
            q = q.view(num_requests, tokens_each, num_heads, DIM)
            schedule = plan() if schedule is None else schedule
            return deep_gemm.fp8_paged_mqa_logits(q, pages, weights, each, table, schedule, num_keys)

        calls["DeepGEMM"] = [partial(score, *given, plan()) for given in sets]
        calls["DeepGEMM and its schedule"] = [partial(score, *given, None) for given in sets]
    call = describe("paged_indexer_logits", *sets[0][:1], cache, sets[0][1], *rest, num_keys, "fp8_index")
    return common.Case(
        call,
        {"keys": num_keys, "B": num_requests, "next_n": tokens_each, "H": num_heads},
        runs,
        lambda: out.fill_(torch.nan),
        lambda: check_scores(out),
        num_requests * num_keys * (DIM + 4) + num_tokens * (num_heads * (DIM + 4) + 4 * num_keys),
        flops=2 * int(lengths.long().sum()) * num_heads * DIM,
        peers=_peers(calls, check_scores),
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = common.argument_parser("indexer_scores")
    parser.add_argument("--heads", type=common.integers, default=None)
    parser.add_argument("--peers", type=Path, help="folder of DeepGEMM's build, to be measured beside")
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    heads = arguments.heads or ([64, 32] if on_gpu else [32])

    def cases() -> Iterator[partial[common.Case]]:
        for num_heads in heads:
            for shape in FLAT if on_gpu else ((3, 200),):
                yield partial(build_flat, *shape, num_heads, arguments)
            for paged in PAGED if on_gpu else ((2, 2, 130),):
                yield partial(build_paged, *paged, num_heads, arguments)

    return common.run_benchmark("indexer_scores", cases(), arguments)


if __name__ == "__main__":
    sys.exit(main())
