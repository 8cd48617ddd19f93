"""Benchmark of `compress_and_cache`: python -m mla_ops bench compressor."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from benchmarks import common
from mla_ops import formats
from mla_ops.kernels.reference.cache import read_slots
from mla_ops.registry import describe
from mla_ops.testing import tolerances

BLOCK_SIZE = 64
EPS = 1e-6


class Layer(NamedTuple):
    """ratio, series a token has, channels of an entry."""

    ratio: int
    series: int
    head_dim: int


LAYERS = {"C4A": Layer(4, 2, 512), "C128A": Layer(128, 1, 512), "indexer": Layer(4, 2, 128)}


def pooled_entries(
    layer: Layer, keys: torch.Tensor, scores: torch.Tensor, norm: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """Float64 entries of `[groups, window, head_dim]` states with bias, and the magnitudes that bound their error."""
    weight = scores.softmax(1)
    pooled = (keys * weight).sum(1)
    rms = pooled.square().mean(-1, keepdim=True)
    entry = pooled / (rms + EPS).sqrt() * norm
    magnitudes = {
        "score_magnitude": float(scores[scores.isfinite()].abs().max()),
        "value_magnitude": float((keys.abs() * weight).sum(1).max()),
        "smallest_rms": float(rms.min().sqrt()),
        "weight_magnitude": float(norm.abs().max()),
        "entry_magnitude": float(entry.abs().max()),
    }
    pairs = torch.view_as_complex(entry[:, -formats.ROPE_DIM :].reshape(-1, formats.ROPE_DIM // 2, 2).contiguous())
    turned = torch.view_as_real(pairs * torch.complex(*cos_sin.chunk(2, dim=-1))).flatten(1)
    return torch.cat((entry[:, : -formats.ROPE_DIM], turned), dim=1), magnitudes


def build_case(
    name: str, num_requests: int, query_len: int, cache_format: str, arguments: argparse.Namespace
) -> common.Case:
    """Decode: each request completes a group of cached states. Prefill: requests of `query_len` tokens from 0 on."""
    layer = LAYERS[name]
    generator = common.generator(arguments)
    device = torch.device(arguments.device)
    window, width = layer.ratio * layer.series, layer.series * layer.head_dim
    first = 0 if query_len > 1 else 2 * window - 1  # position of a request's first token
    num_tokens, groups = num_requests * query_len, max(query_len // layer.ratio, 1)

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    bias, norm = randn(layer.ratio, width), 1 + 0.1 * randn(layer.head_dim)
    angles = torch.arange(first + query_len, device=device).unsqueeze(1) * 0.9 ** torch.arange(32, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    states = randn(num_requests, window, 2 * width)
    history = states.clone()
    table = torch.randperm(num_requests, device=device, generator=generator).to(torch.int32).view(-1, 1)
    num_blocks = -(-num_requests * groups // BLOCK_SIZE)
    kv_cache = formats.allocate_cache(cache_format, num_blocks, BLOCK_SIZE, head_dim=layer.head_dim, device=device)
    requests = torch.arange(num_requests, device=device).repeat_interleave(query_len)
    positions = first + torch.arange(query_len, device=device).repeat(num_requests)
    completes = (positions + 1) % layer.ratio == 0
    slots = torch.where(completes, completes.cumsum(0) - 1, -1)
    tokens = requests.to(torch.int32), positions.to(torch.int32), slots
    sets = [
        tuple(randn(num_tokens, width, dtype=torch.bfloat16) for _ in range(2))
        for _ in range(common.number_of_sets(arguments))
    ]
    weights, caches = (bias, norm, cos_sin), (states, kv_cache, table)
    op = torch.ops.mla.compress_and_cache.default
    runs = [partial(op, kv, score, *weights, *caches, *tokens, EPS, cache_format) for kv, score in sets]

    def check() -> list[common.Check]:
        kv, score = (tensor.double().view(num_requests, query_len, layer.series, layer.head_dim) for tensor in sets[0])
        added = bias.double().view(layer.ratio, layer.series, layer.head_dim)
        score = score + added[positions[:query_len] % layer.ratio]
        shape = (num_requests, window, layer.series, layer.head_dim)
        if query_len == 1:
            old = history[table[:, 0].long()].double()
            before = [half.reshape(shape)[:, :-1] for half in old.split(width, dim=-1)]
        else:
            before = [torch.zeros(shape, device=device).double(), torch.full(shape, -math.inf, device=device).double()]
        # states in order of position, those before a request's first token without weight
        keys, scores = (torch.cat(parts, dim=1) for parts in zip(before, (kv, score), strict=True))
        stop = keys.shape[1] - torch.arange(groups, device=device).flip(0) * layer.ratio
        member = stop.unsqueeze(1) - window + torch.arange(window, device=device)
        series = torch.arange(window, device=device) // layer.ratio
        keys, scores = (half[:, member, series].flatten(0, 1) for half in (keys, scores))
        angle = positions[completes] - (layer.ratio - 1)
        expected, magnitudes = pooled_entries(layer, keys, scores, norm.double(), cos_sin[angle].double())
        dtype = formats.FORMATS[cache_format].value_dtype
        bound = tolerances.compressed_entry(dtype, window, layer.head_dim, **magnitudes)
        limit = bound.atol + bound.rtol * float(expected.abs().max())
        if cache_format == "fp8_ds_mla_v4":
            coarse = tolerances.e4m3(float(expected.abs().max()))
            limit += coarse.atol + coarse.rtol * float(expected.abs().max())
        found = read_slots(kv_cache, slots[completes], cache_format)
        return [common.Check("kv_cache", common.max_error(found, expected), limit)]

    entry_bytes = formats.FORMATS[cache_format].bytes_per_token(layer.head_dim)
    read = (window - 1) * 8 * width // layer.series if query_len == 1 else 0
    kept = min(query_len, window)
    bytes_moved = num_requests * (query_len * 4 * width + read + kept * 8 * width + groups * entry_bytes)
    labels: dict[str, int | str] = {"layer": name, "requests": num_requests, "query_len": query_len}
    labels["format"] = cache_format
    call = describe("compress_and_cache", *sets[0], *weights, *caches, *tokens, EPS, cache_format)
    return common.Case(call, labels, runs, kv_cache.zero_, check, bytes_moved)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = common.argument_parser("compressor")
    parser.add_argument("--requests", type=common.integers, default=None)
    parser.add_argument("--prefill", type=common.integers, default=None)
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    requests = arguments.requests or ([1, 32, 256] if on_gpu else [3])
    prefill = arguments.prefill or ([4096] if on_gpu else [256])

    def cases() -> Iterator[partial[common.Case]]:
        for name, layer in LAYERS.items():
            for cache_format in ("bf16", "fp8_ds_mla_v4") if layer.head_dim == formats.LATENT_DIM else ("bf16",):
                for num_requests in requests:
                    yield partial(build_case, name, num_requests, 1, cache_format, arguments)
                for query_len in prefill:
                    yield partial(build_case, name, 1, query_len, cache_format, arguments)

    return common.run_benchmark("compressor", cases(), arguments)


if __name__ == "__main__":
    sys.exit(main())
