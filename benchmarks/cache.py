"""Benchmarks of the cache ops: python -m mla_ops bench cache."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks import common
from mla_ops import formats
from mla_ops.registry import describe

BLOCK_SIZE = 64


def dequantize(rows: torch.Tensor, cache_format: str) -> torch.Tensor:
    """Cache rows to float64 keys, from the format's description alone."""
    if cache_format == "fp8_ds_mla_v4":
        latent = rows[:, :448].contiguous().view(torch.float8_e4m3fn).double()
        scale = torch.exp2(rows[:, 576:583].double() - 127)
        rope = rows[:, 448:576].contiguous().view(torch.bfloat16).double()
        return torch.cat((latent * scale.repeat_interleave(64, dim=1), rope), dim=1)
    if cache_format != "fp8_ds_mla":
        return rows.double()
    latent = rows[:, :512].contiguous().view(torch.float8_e4m3fn).double()
    scale = rows[:, 512:528].contiguous().view(torch.float32).double()
    rope = rows[:, 528:].contiguous().view(torch.bfloat16).double()
    return torch.cat((latent * scale.repeat_interleave(128, dim=1), rope), dim=1)


def quantized_values(latent: torch.Tensor, rope: torch.Tensor, cache_format: str) -> torch.Tensor:
    """The values that the cache must hold after a write, as float64, with the scale computed by a float64 logarithm."""
    keys = torch.cat((latent, rope), dim=1)
    if cache_format not in ("fp8_ds_mla", "fp8_ds_mla_v4"):
        return keys.to(formats.FORMATS[cache_format].dtype).double()
    groups = latent.double().unflatten(1, (-1, formats.FORMATS[cache_format].group_size))
    largest = groups.abs().amax(-1, keepdim=True)
    # the floor is of the scale in one format, of the largest value in the other
    least = 1e-4 if cache_format == "fp8_ds_mla" else 1e-4 / 448
    scale = torch.exp2((largest / 448).clamp(min=least).log2().ceil())
    stored = (groups / scale).float().to(torch.float8_e4m3fn).double() * scale
    return torch.cat((stored.flatten(1), rope.to(torch.bfloat16).double()), dim=1)


def read_keys(kv_cache: torch.Tensor, slots: torch.Tensor, cache_format: str) -> torch.Tensor:
    """Float64 keys of some slots of a contiguous cache."""
    block_size = formats.geometry(kv_cache, cache_format).block_size
    block, offset = slots.long() // block_size, slots.long() % block_size
    if cache_format != "fp8_ds_mla_v4":
        return dequantize(kv_cache[block, offset], cache_format)
    # 576 bytes of each token of a block, then 8 of each
    data = 576 * offset[:, None] + torch.arange(576, device=kv_cache.device)
    exponents = 576 * block_size + 8 * offset[:, None] + torch.arange(8, device=kv_cache.device)
    return dequantize(kv_cache[block[:, None], torch.cat((data, exponents), dim=1)], cache_format)


def query_dtype(cache_format: str) -> torch.dtype:
    """Of the queries and keys that go with a format."""
    return formats.PLAIN.get(cache_format, torch.bfloat16)


def fill_cache(kv_cache: torch.Tensor, cache_format: str, generator: torch.Generator, distinct: int = 1024) -> None:
    """Writes random keys to every slot: up to `distinct` different blocks, repeated."""
    num_blocks, block_size, _, head_dim = formats.geometry(kv_cache, cache_format)
    count, device = min(distinct, num_blocks), kv_cache.device
    keys = torch.randn(count * block_size, head_dim, device=device, generator=generator).to(query_dtype(cache_format))
    latent, rope = keys.split([head_dim - formats.ROPE_DIM, formats.ROPE_DIM], dim=1)
    slots = torch.arange(count * block_size, device=device)
    torch.ops.mla.concat_and_cache(latent, rope, kv_cache, slots, cache_format)
    for start in range(count, num_blocks, count):
        part = kv_cache[start : start + count]
        part.copy_(kv_cache[: part.shape[0]])


def fill_index_cache(index_cache: torch.Tensor, generator: torch.Generator) -> None:
    """Writes random index keys to every slot."""
    num_blocks, block_size, *_ = formats.geometry(index_cache, "fp8_index")
    for slots in torch.arange(num_blocks * block_size, device=index_cache.device).split(2**18):
        keys = torch.randn(len(slots), formats.INDEX_DIM, device=slots.device, generator=generator)
        torch.ops.mla.write_index_cache(keys, index_cache, slots, "fp8_index")


def magnitude_factors(magnitude: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Factors of the latents, for each key and group of `shape` [..., keys, groups].

    "0.01" is one number for all. "spread12" is drawn over 2**-12 to 2**12 for each key and group. "wild30" is such a
    spread over 2**-30 to 2**30, one key in 64 another 2**20 times as large, one group in four zero.
    """
    device = generator.device
    kind = magnitude.rstrip("0123456789.")
    if kind not in ("spread", "wild"):
        return torch.full(shape, float(magnitude), device=device)
    powers = torch.rand(shape, device=device, generator=generator) * 2 - 1
    factors = torch.exp2(powers * float(magnitude[len(kind) :]))
    if kind == "wild":
        large = torch.rand((*shape[:-1], 1), device=device, generator=generator) < 1 / 64
        factors = torch.where(large, factors * 2.0**20, factors)
        factors *= torch.rand(shape, device=device, generator=generator) >= 1 / 4
    return factors


# Type of an option.
magnitudes = common.names_of(
    lambda name: magnitude_factors(name, (1, 1), torch.Generator()), "a number", "spread12", "wild30"
)


def scale_keys(kv_cache: torch.Tensor, cache_format: str, magnitude: str, generator: torch.Generator) -> None:
    """Multiplies latents through their scales, as writers without a least scale store small ones.

    V4's RoPE, a part of the same vector, goes with its key's largest group; its scales take whole powers of two, and
    zeros are its bytes.
    """
    num_blocks, block_size, _, head_dim = formats.geometry(kv_cache, cache_format)
    groups = {"fp8_ds_mla": 4, "fp8_ds_mla_v4": 7}.get(cache_format, 1)
    factors = magnitude_factors(magnitude, (num_blocks, block_size, groups), generator)
    if cache_format == "fp8_ds_mla":
        kv_cache[..., 512:528].view(torch.float32).mul_(factors)
    elif cache_format == "fp8_ds_mla_v4":
        data, scales = formats.planar_views(kv_cache, cache_format)
        exponents = torch.where(factors > 0, torch.frexp(factors).exponent - 1, 0)
        data[..., :448].unflatten(-1, (7, 64)).mul_(factors[..., None] > 0)
        scales[..., :7].copy_((scales[..., :7].int() + exponents).clamp(0, 254))
        data[..., 448:].view(torch.bfloat16).mul_(torch.exp2(exponents.amax(-1, keepdim=True).float()))
    else:
        latent = kv_cache[..., : head_dim - formats.ROPE_DIM] if head_dim > formats.LATENT_DIM else kv_cache
        latent.mul_(factors)


def raise_keys(kv_cache: torch.Tensor, cache_format: str, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Writes the first RoPE value of the keys of some slots, which no format scales."""
    block_size = formats.geometry(kv_cache, cache_format).block_size
    rows = formats.planar_views(kv_cache, cache_format)[0] if cache_format == "fp8_ds_mla_v4" else kv_cache
    if rows.dtype == torch.uint8:
        rows = rows[..., -2 * formats.ROPE_DIM :].view(torch.bfloat16)
    rows[slots.long() // block_size, slots.long() % block_size, -formats.ROPE_DIM] = values.to(rows.dtype)


def build_concat(num_tokens: int, cache_format: str, arguments: argparse.Namespace) -> common.Case:
    generator = common.generator(arguments)
    device = torch.device(arguments.device)
    num_blocks = -(-4 * num_tokens // BLOCK_SIZE)
    head_dim, dtype = formats.FORMATS[cache_format].head_dims[0], query_dtype(cache_format)
    kv_cache = formats.allocate_cache(cache_format, num_blocks, BLOCK_SIZE, device=device)

    def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys = torch.randn(num_tokens, head_dim, device=device, generator=generator).to(dtype)
        latent, rope = (part.contiguous() for part in keys.split([head_dim - formats.ROPE_DIM, formats.ROPE_DIM], 1))
        slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device, generator=generator)[:num_tokens]
        return latent, rope, slots

    sets = [step() for _ in range(common.number_of_sets(arguments))]
    runs = [
        partial(torch.ops.mla.concat_and_cache.default, latent, rope, kv_cache, slots, cache_format)
        for latent, rope, slots in sets
    ]

    def check() -> list[common.Check]:
        latent, rope, slots = sets[0]
        stored = read_keys(kv_cache, slots, cache_format)
        return [common.exact("kv_cache", stored, quantized_values(latent, rope, cache_format))]

    shape: dict[str, int | str] = {"T": num_tokens, "format": cache_format}
    bytes_moved = num_tokens * (dtype.itemsize * head_dim + 8 + formats.FORMATS[cache_format].bytes_per_token())
    call = describe("concat_and_cache", sets[0][0], sets[0][1], kv_cache, sets[0][2], cache_format)
    return common.Case(call, shape, runs, kv_cache.zero_, check, bytes_moved)


def build_gather(num_requests: int, context: int, cache_format: str, arguments: argparse.Namespace) -> common.Case:
    generator = common.generator(arguments)
    device = torch.device(arguments.device)
    max_blocks = -(-context // BLOCK_SIZE)
    kv_cache = formats.allocate_cache(cache_format, num_requests * max_blocks, BLOCK_SIZE, device=device)
    fill_cache(kv_cache, cache_format, generator)
    seq_lens = torch.full((num_requests,), context, dtype=torch.int32, device=device)
    cu_seq_lens = context * torch.arange(num_requests + 1, dtype=torch.int32, device=device)
    num_rows = num_requests * context
    head_dim = formats.FORMATS[cache_format].head_dims[0]

    def table() -> torch.Tensor:
        blocks = torch.randperm(num_requests * max_blocks, device=device, generator=generator)
        return blocks.to(torch.int32).view(num_requests, max_blocks)

    tables = [table() for _ in range(common.number_of_sets(arguments))]
    outputs = [
        torch.empty(num_rows, head_dim, dtype=formats.FORMATS[cache_format].value_dtype, device=device) for _ in tables
    ]
    op = torch.ops.mla.gather_cache.out
    runs = [
        partial(op, kv_cache, block_table, seq_lens, cu_seq_lens, num_rows, cache_format, out=out)
        for block_table, out in zip(tables, outputs, strict=True)
    ]

    def check() -> list[common.Check]:
        worst = 0.0
        for request in range(num_requests):
            slots = (
                tables[0][request].long()[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)
            ).flatten()
            expected = read_keys(kv_cache, slots[:context], cache_format).to(outputs[0].dtype)
            worst = max(worst, common.max_error(outputs[0][request * context : (request + 1) * context], expected))
        return [common.Check("out", worst, 0.0)]

    shape: dict[str, int | str] = {"requests": num_requests, "context": context, "format": cache_format}
    bytes_moved = num_rows * (formats.FORMATS[cache_format].bytes_per_token() + head_dim * outputs[0].element_size())
    call = describe("gather_cache", kv_cache, tables[0], seq_lens, cu_seq_lens, num_rows, cache_format)
    return common.Case(call, shape, runs, partial(outputs[0].fill_, torch.nan), check, bytes_moved)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmarks; returns the exit status."""
    parser = common.argument_parser("cache")
    parser.add_argument("--tokens", type=common.integers, default=None, help="tokens of concat_and_cache")
    parser.add_argument("--requests", type=common.integers, default=None, help="requests of gather_cache")
    parser.add_argument("--context", type=int, default=None, help="tokens a request of gather_cache")
    parser.add_argument("--cache-formats", type=common.cache_formats, default=["fp8_ds_mla", "fp8_ds_mla_v4", "bf16"])
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    tokens = arguments.tokens or ([1, 64, 512, 8192] if on_gpu else [1, 64])
    requests = arguments.requests or ([1, 8] if on_gpu else [2])
    context = arguments.context or (8192 if on_gpu else 256)

    def cases() -> Iterator[partial[common.Case]]:
        for cache_format in arguments.cache_formats:
            for num_tokens in tokens:
                yield partial(build_concat, num_tokens, cache_format, arguments)
            for num_requests in requests:
                yield partial(build_gather, num_requests, context, cache_format, arguments)

    return common.run_benchmark("cache", cases(), arguments)


if __name__ == "__main__":
    sys.exit(main())
