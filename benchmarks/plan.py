"""Benchmark of `build_step_metadata`: python -m mla_ops bench plan."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks import common
from mla_ops.meta.plan import describe_build_step_metadata

BLOCK_SIZE = 64
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
    call = describe_build_step_metadata(*sets[0], *written[0][:4])
    return common.Case(call, shape, runs, poison, check, bytes_moved)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = common.argument_parser("plan")
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

    return common.run_benchmark("plan", cases(), arguments)


if __name__ == "__main__":
    sys.exit(main())
