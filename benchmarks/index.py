"""Benchmarks of the index ops: python -m mla_ops bench index."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks import common
from mla_ops.dispatch import Call
from mla_ops.registry import describe

BLOCK_SIZE = 64

# DeepSeek V4
WINDOW = 128
C4A_RATIO = 4
C128A_RATIO = 128
C128A_BLOCK_SIZE = 2


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
    sets = [
        (request, block_table, random_indices(num_tokens, topk, context, generator))
        for _ in range(common.number_of_sets(arguments))
    ]

    def row(token: int, _: list[int], table: list[list[int]], indices: list[list[int]]) -> list[int]:
        slots = [table[token][i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE if i >= 0 else -1 for i in indices[token]]
        return [slot for slot in slots if slot >= 0 or not compact]

    op = partial(torch.ops.mla.convert_req_index_to_global_index.out, compact=compact)
    call = describe("convert_req_index_to_global_index", *sets[0], BLOCK_SIZE)
    shape: dict[str, int | str] = {"topk": topk, "compact": str(compact)}
    return builder_case(op, call, list(sets), (BLOCK_SIZE,), topk, row, shape, names=("out", "valid_counts"))


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
    return common.Case(
        describe("filter_prefill_indices", sets[0], context_lens), shape, runs, poison, check, bytes_moved
    )


def builder_case(
    op: Callable[..., None],
    call: Call,
    sets: list[tuple[torch.Tensor, ...]],
    sizes: tuple[int, ...],
    width: int,
    row: Callable[..., list[int]],
    shape: dict[str, int | str],
    block_table: torch.Tensor | None = None,
    entries: int = 0,
    names: tuple[str, str] = ("indices", "lens"),
) -> common.Case:
    """A case of an op that writes rows, and how many entries of each are valid.

    Args:
        op: the `.out` overload.
        call: its description.
        sets: tensors of each input set; the first of a set has a row a token.
        sizes: the integers after them.
        width: entries of a row.
        row: the entries of the token with a given number up to the last valid one, from the first set as lists.
        shape: what the table of results says.
        block_table: that of the first set, which counts with the entries that a token needs.
        entries: how many those are, at most.
        names: of the outputs.
    """
    num_tokens, device = sets[0][0].shape[0], sets[0][0].device
    outputs = [
        (
            torch.empty(num_tokens, width, dtype=torch.int32, device=device),
            torch.empty(num_tokens, dtype=torch.int32, device=device),
        )
        for _ in sets
    ]
    runs = [
        partial(op, *tensors, *sizes, **dict(zip(names, output, strict=True)))
        for tensors, output in zip(sets, outputs, strict=True)
    ]

    def poison() -> None:
        for tensor in outputs[0]:
            tensor.fill_(-7)

    def check() -> list[common.Check]:
        given = [tensor.tolist() for tensor in sets[0]]
        rows = [row(token, *given) for token in range(num_tokens)]
        expected = torch.tensor([each + [-1] * (width - len(each)) for each in rows], device=device)
        counted = (expected >= 0).sum(1)
        return [common.exact(*given) for given in zip(names, outputs[0], (expected, counted), strict=True)]

    bytes_moved = sum(tensor.nbytes for tensor in (*sets[0], *outputs[0]))
    if block_table is not None:
        bytes_moved += 4 * num_tokens * min(entries, block_table.shape[1]) - block_table.nbytes
    return common.Case(call, {"T": num_tokens, **shape}, runs, poison, check, bytes_moved)


def window_slots(position: int, blocks: list[int]) -> list[int]:
    """Slots of the window of a token, from the blocks of its request."""
    window = range(max(position - WINDOW + 1, 0), position + 1)
    return [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in window]


def compressed_slots(position: int, blocks: list[int]) -> list[int]:
    """Slots of all compressed tokens that a token sees."""
    there = range((position + 1) // C128A_RATIO)
    return [blocks[i // C128A_BLOCK_SIZE] * C128A_BLOCK_SIZE + i % C128A_BLOCK_SIZE for i in there]


def random_tokens(
    num_tokens: int, context: int, tokens_a_block: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decode tokens of as many requests: positions, request ids and the cache's block table."""
    device, max_blocks = generator.device, -(-context // tokens_a_block)
    positions = torch.randint(0, context, (num_tokens,), dtype=torch.int32, device=device, generator=generator)
    request = torch.arange(num_tokens, dtype=torch.int32, device=device)
    block_table = torch.randperm(num_tokens * max_blocks, device=device, generator=generator).to(torch.int32)
    return positions, request, block_table.view(num_tokens, max_blocks)


def build_window(num_tokens: int, context: int, arguments: argparse.Namespace) -> common.Case:
    generator = common.generator(arguments)
    count = common.number_of_sets(arguments)
    sets = [random_tokens(num_tokens, context, BLOCK_SIZE, generator) for _ in range(count)]

    def row(token: int, positions: list[int], request: list[int], table: list[list[int]]) -> list[int]:
        return window_slots(positions[token], table[request[token]])

    sizes = (WINDOW, BLOCK_SIZE)
    op, call = torch.ops.mla.sliding_window_indices.out, describe("sliding_window_indices", *sets[0], *sizes)
    shape: dict[str, int | str] = {"window": WINDOW, "context": context}
    entries = WINDOW // BLOCK_SIZE + 1
    return builder_case(op, call, list(sets), sizes, WINDOW, row, shape, sets[0][2], entries)


def build_compressed(num_tokens: int, context: int, arguments: argparse.Namespace) -> common.Case:
    generator = common.generator(arguments)
    count, width = common.number_of_sets(arguments), context // C128A_RATIO
    sets = [random_tokens(num_tokens, context, C128A_RATIO * C128A_BLOCK_SIZE, generator) for _ in range(count)]

    def row(token: int, positions: list[int], request: list[int], table: list[list[int]]) -> list[int]:
        return compressed_slots(positions[token], table[request[token]])

    sizes = (C128A_RATIO, C128A_BLOCK_SIZE, width)
    op, call = torch.ops.mla.compressed_indices.out, describe("compressed_indices", *sets[0], *sizes)
    shape: dict[str, int | str] = {"width": width, "context": context}
    return builder_case(op, call, list(sets), sizes, width, row, shape, sets[0][2], width // C128A_BLOCK_SIZE)


def build_combine(num_tokens: int, topk: int, arguments: argparse.Namespace) -> common.Case:
    """One request's prefill of `num_tokens` new tokens, behind a context of four times the selection."""
    generator = common.generator(arguments)
    device = torch.device(arguments.device)
    context = C4A_RATIO * topk
    window_offset = (context + num_tokens) // C4A_RATIO
    lens = torch.tensor([context + num_tokens], dtype=torch.int32, device=device)
    gathered = torch.tensor([min(WINDOW - 1, context) + num_tokens], dtype=torch.int32, device=device)
    positions = torch.arange(context, context + num_tokens, dtype=torch.int32, device=device)
    request = torch.zeros_like(positions)
    sizes = (WINDOW, C4A_RATIO, window_offset + WINDOW + num_tokens, window_offset)
    sets = [
        (random_indices(num_tokens, topk, window_offset, generator), positions, request, lens, gathered)
        for _ in range(common.number_of_sets(arguments))
    ]

    def row(token: int, chosen: list[list[int]], *_: list[int]) -> list[int]:
        position = context + token
        start = context - min(WINDOW - 1, context)
        window = range(max(position - WINDOW + 1, start), position + 1)
        valid = [i for i in chosen[token] if 0 <= i < (position + 1) // C4A_RATIO]
        return valid + [window_offset + p - start for p in window]

    op, call = torch.ops.mla.combine_topk_swa_indices.out, describe("combine_topk_swa_indices", *sets[0], *sizes)
    return builder_case(op, call, list(sets), sizes, topk + WINDOW, row, {"topk": topk, "window": WINDOW})


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmarks; returns the exit status."""
    parser = common.argument_parser("index")
    parser.add_argument("--tokens", type=common.integers, default=None)
    parser.add_argument("--topk", type=common.integers, default=None)
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    tokens = arguments.tokens or ([1, 64, 512] if on_gpu else [1, 16])
    topks = arguments.topk or ([2048] if on_gpu else [256])
    context = 65536 if on_gpu else 1024

    def cases() -> Iterator[partial[common.Case]]:
        for num_tokens in tokens:
            for topk in topks:
                yield partial(build_convert, num_tokens, topk, False, arguments)
                yield partial(build_convert, num_tokens, topk, True, arguments)
                yield partial(build_filter, num_tokens, topk, arguments)
                yield partial(build_combine, num_tokens, topk, arguments)
            yield partial(build_window, num_tokens, context, arguments)
            yield partial(build_compressed, num_tokens, context, arguments)

    return common.run_benchmark("index", cases(), arguments)


if __name__ == "__main__":
    sys.exit(main())
