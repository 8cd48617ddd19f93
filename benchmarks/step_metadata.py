"""Benchmarks of what a step computes once for all layers: python -m mla_ops bench step_metadata."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks import common
from mla_ops.registry import describe

BLOCK_SIZE = 64
COMPRESSED = ((4, 64), (128, 2))  # DeepSeek-V4's caches: tokens an entry stands for, entries a block
INDEX_TOPK = 2048
OUTPUTS = ("req_id_per_token", "positions", "slot_mapping", "key_lens", "topk_length")


def build_case(num_requests: int, query_len: int, context: int, arguments: argparse.Namespace) -> common.Case:
    generator = common.generator(arguments)
    device = torch.device(arguments.device)
    num_tokens = num_requests * query_len
    max_num_tokens = num_tokens + num_tokens // 4  # a padded batch
    max_blocks = -(-context // BLOCK_SIZE)

    def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query_start_loc = query_len * torch.arange(num_requests + 1, dtype=torch.int32, device=device)
        seq_lens = torch.randint(query_len, context + 1, (num_requests,), device=device, generator=generator)
        block_table = torch.randperm(num_requests * max_blocks, device=device, generator=generator)
        return query_start_loc, seq_lens.to(torch.int32), block_table.to(torch.int32).view(num_requests, max_blocks)

    def buffers() -> list[torch.Tensor]:
        shapes: list[tuple[int, ...]] = [(num_requests + 1,), (num_requests,), (num_requests, max_blocks)]
        shapes += [(max_num_tokens,)] * len(OUTPUTS)
        dtypes = [torch.int64 if name == "slot_mapping" else torch.int32 for name in ("", "", "", *OUTPUTS)]
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)]

    sets = [step() for _ in range(common.number_of_sets(arguments))]
    written = [buffers() for _ in sets]
    runs = [
        partial(torch.ops.mla.build_step_metadata.default, *inputs, *outputs, BLOCK_SIZE, INDEX_TOPK)
        for inputs, outputs in zip(sets, written, strict=True)
    ]

    def poison() -> None:
        for tensor in written[0]:
            tensor.fill_(-7)

    def check() -> list[common.Check]:
        _, seq_lens, block_table = (tensor.tolist() for tensor in sets[0])
        expected: dict[str, list[int]] = {name: [] for name in OUTPUTS}
        for token in range(max_num_tokens):
            request = token // query_len
            live = request < num_requests
            position = seq_lens[request] - query_len + token % query_len if live else 0
            block = block_table[request][position // BLOCK_SIZE] if live else -1
            expected["req_id_per_token"].append(request if live else -1)
            expected["positions"].append(position)
            expected["slot_mapping"].append(block * BLOCK_SIZE + position % BLOCK_SIZE if live else -1)
            expected["key_lens"].append(position + 1 if live else 0)
            expected["topk_length"].append(min(position + 1, INDEX_TOPK) if live else 0)
        checks = [
            common.exact(name, tensor, torch.tensor(expected[name], device=device))
            for name, tensor in zip(OUTPUTS, written[0][3:], strict=True)
        ]
        return checks + [
            common.exact(name, tensor, source)
            for name, tensor, source in zip(
                ("query_start_loc", "seq_lens", "block_table"), written[0][:3], sets[0], strict=True
            )
        ]

    bytes_moved = sum(tensor.nbytes for tensor in (*sets[0], *written[0]))
    shape: dict[str, int | str] = {"requests": num_requests, "query_len": query_len, "context": context}
    call = describe("build_step_metadata", *sets[0], *written[0], BLOCK_SIZE, INDEX_TOPK)
    return common.Case(call, shape, runs, poison, check, bytes_moved)


def build_compressed(
    num_requests: int, ratio: int, block_size: int, context: int, arguments: argparse.Namespace
) -> common.Case:
    """A decode step; each request has a random length."""
    generator = common.generator(arguments)
    device = torch.device(arguments.device)
    max_blocks = -(-context // (ratio * block_size))
    request = torch.arange(num_requests, dtype=torch.int32, device=device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.randint(0, context, (num_requests,), device=device, generator=generator)
        positions[::2] |= ratio - 1  # every second token completes an entry, as none would by chance
        block_table = torch.randperm(num_requests * max_blocks, device=device, generator=generator)
        return positions.to(torch.int32), block_table.to(torch.int32).view(num_requests, max_blocks)

    sets = [step() for _ in range(common.number_of_sets(arguments))]
    written = [
        (
            torch.empty_like(table),
            torch.empty(num_requests, dtype=torch.int64, device=device),
            torch.empty_like(request),
        )
        for _, table in sets
    ]
    runs = [
        partial(torch.ops.mla.build_compressed_metadata.default, positions, request, table, *outputs, ratio, block_size)
        for (positions, table), outputs in zip(sets, written, strict=True)
    ]

    def poison() -> None:
        for tensor in written[0]:
            tensor.fill_(-7)

    def check() -> list[common.Check]:
        positions, table = (tensor.tolist() for tensor in sets[0])
        slots = []
        for blocks, position in zip(table, positions, strict=True):
            entry, rest = divmod(position + 1, ratio)
            block = blocks[(entry - 1) // block_size] if rest == 0 else -1
            slots.append(block * block_size + (entry - 1) % block_size if rest == 0 else -1)
        lens = [(position + 1) // ratio for position in positions]
        expected = (sets[0][1], torch.tensor(slots, device=device), torch.tensor(lens, device=device))
        names = ("block_table", "slot_mapping", "compressed_lens")
        return [
            common.exact(name, tensor, wanted) for name, tensor, wanted in zip(names, written[0], expected, strict=True)
        ]

    positions, table = sets[0]
    bytes_moved = sum(tensor.nbytes for tensor in (positions, request, table, *written[0]))
    shape: dict[str, int | str] = {"requests": num_requests, "ratio": ratio, "context": context}
    call = describe("build_compressed_metadata", positions, request, table, *written[0], ratio, block_size)
    return common.Case(call, shape, runs, poison, check, bytes_moved)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = common.argument_parser("step_metadata")
    parser.add_argument("--requests", type=common.integers, default=None)
    parser.add_argument("--query-lens", type=common.integers, default=[1, 4])
    parser.add_argument("--context", type=int, default=8192)
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    requests = arguments.requests or ([1, 32, 256] if on_gpu else [1, 16])

    def cases() -> Iterator[partial[common.Case]]:
        for num_requests in requests:
            for query_len in arguments.query_lens:
                yield partial(build_case, num_requests, query_len, arguments.context, arguments)
            for ratio, block_size in COMPRESSED:
                yield partial(build_compressed, num_requests, ratio, block_size, arguments.context, arguments)

    return common.run_benchmark("step_metadata", cases(), arguments)


if __name__ == "__main__":
    sys.exit(main())
