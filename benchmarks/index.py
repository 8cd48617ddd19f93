"""Benchmarks of the index ops: python -m mla_ops bench index."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks import common
from mla_ops.meta.index import describe_convert, describe_filter

BLOCK_SIZE = 64


def random_indices(num_tokens: int, topk: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """Indices in [0, context), a sixteenth of them -1."""
    shape = (num_tokens, topk)
    indices = torch.randint(0, context, shape, dtype=torch.int32, device=generator.device, generator=generator)
    invalid = torch.rand(shape, device=generator.device, generator=generator) < 1 / 16
    return indices.masked_fill(invalid, -1)


def build_convert(num_tokens: int, topk: int, compact: bool, arguments: argparse.Namespace) -> common.Case:
    generator = common.generator(arguments)
    device = torch.device(arguments.device)
    max_blocks = 2 * -(-topk // BLOCK_SIZE)
    request = torch.arange(num_tokens, dtype=torch.int32, device=device)
    block_table = torch.randperm(num_tokens * max_blocks, device=device, generator=generator).to(torch.int32)
    block_table = block_table.view(num_tokens, max_blocks)
    context = max_blocks * BLOCK_SIZE
    sets = [random_indices(num_tokens, topk, context, generator) for _ in range(common.number_of_sets(arguments))]
    outputs = [(torch.empty_like(indices), torch.empty_like(request)) for indices in sets]
    op = torch.ops.mla.convert_req_index_to_global_index.out
    runs = [
        partial(op, request, block_table, indices, BLOCK_SIZE, compact=compact, out=out, valid_counts=counts)
        for indices, (out, counts) in zip(sets, outputs, strict=True)
    ]

    def poison() -> None:
        for tensor in outputs[0]:
            tensor.fill_(-7)

    def check() -> list[common.Check]:
        table = block_table.tolist()
        expected, counts = [], []
        for row, indices in enumerate(sets[0].tolist()):
            slots = [table[row][i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE if i >= 0 else -1 for i in indices]
            valid = [slot for slot in slots if slot >= 0]
            expected.append(valid + [-1] * (topk - len(valid)) if compact else slots)
            counts.append(len(valid))
        return [
            common.exact("out", outputs[0][0], torch.tensor(expected, device=device)),
            common.exact("valid_counts", outputs[0][1], torch.tensor(counts, device=device)),
        ]

    shape: dict[str, int | str] = {"T": num_tokens, "topk": topk, "compact": str(compact)}
    bytes_moved = 4 * (2 * num_tokens * topk + block_table.numel() + 2 * num_tokens)
    return common.Case(
        describe_convert(request, block_table, sets[0], BLOCK_SIZE), shape, runs, poison, check, bytes_moved
    )


def build_filter(num_tokens: int, topk: int, arguments: argparse.Namespace) -> common.Case:
    generator = common.generator(arguments)
    device = torch.device(arguments.device)
    context_lens = torch.randint(0, 2 * topk, (num_tokens,), dtype=torch.int32, device=device, generator=generator)
    sets = [random_indices(num_tokens, topk, 2 * topk, generator) for _ in range(common.number_of_sets(arguments))]
    outputs = [(torch.empty_like(indices), torch.empty_like(indices)) for indices in sets]
    runs = [
        partial(
            torch.ops.mla.filter_prefill_indices.out, indices, context_lens, context_indices=context, new_indices=new
        )
        for indices, (context, new) in zip(sets, outputs, strict=True)
    ]

    def poison() -> None:
        for tensor in outputs[0]:
            tensor.fill_(-7)

    def check() -> list[common.Check]:
        pairs = list(zip(sets[0].tolist(), context_lens.tolist(), strict=True))
        context = [[i if 0 <= i < length else -1 for i in row] for row, length in pairs]
        new = [[i - length if i >= max(length, 0) else -1 for i in row] for row, length in pairs]
        return [
            common.exact("context_indices", outputs[0][0], torch.tensor(context, device=device)),
            common.exact("new_indices", outputs[0][1], torch.tensor(new, device=device)),
        ]

    shape: dict[str, int | str] = {"T": num_tokens, "topk": topk}
    bytes_moved = 4 * (3 * num_tokens * topk + num_tokens)
    return common.Case(describe_filter(sets[0], context_lens), shape, runs, poison, check, bytes_moved)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmarks; returns the exit status."""
    parser = common.argument_parser("index")
    parser.add_argument("--tokens", type=common.integers, default=None)
    parser.add_argument("--topk", type=common.integers, default=None)
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    tokens = arguments.tokens or ([1, 64, 512] if on_gpu else [1, 16])
    topks = arguments.topk or ([2048] if on_gpu else [256])

    def cases() -> Iterator[partial[common.Case]]:
        for num_tokens in tokens:
            for topk in topks:
                yield partial(build_convert, num_tokens, topk, False, arguments)
                yield partial(build_convert, num_tokens, topk, True, arguments)
                yield partial(build_filter, num_tokens, topk, arguments)

    return common.run_benchmark("index", cases(), arguments)


if __name__ == "__main__":
    sys.exit(main())
