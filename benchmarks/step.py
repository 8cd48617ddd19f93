"""Times of a decode step beside its attention kernel: python -m mla_ops bench step.

- `decode_layer`: all of one layer's own ops as one graph replay: the write of the step's keys, and attention, which
  translates the indexer's indices and merges its splits itself. The peer does the same
  around FlashMLA: the same write, `convert_req_index_to_global_index`, its kernels, planned before as well. Layers of
  DeepSeek-V4 are their ops one after another, each over buffers of its own: the write of the window's keys, the
  compressors, of which every token completes a group (one in 4, or in 128, does so in a model), and attention.
- `StepMetadata.build`, `V4StepMetadata.build`: once a step, as a graph replay.
- `eager ...`: what one eager call costs the thread that makes it, nothing waited for. On a CPU, the whole call.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

import mla_ops
from benchmarks import cache, common, compressor, flash_mla_peer, sparse_attention_extra
from benchmarks.attention import (
    BLOCK_SIZE,
    attention_bytes,
    attention_flops,
    cache_blocks,
    check_attention,
    make_outputs,
    poison,
    random_block_table,
    random_selection,
    to_slots,
)
from benchmarks.cache import fill_cache, quantized_values, read_keys
from benchmarks.index import C4A_RATIO, C128A_BLOCK_SIZE, C128A_RATIO, WINDOW, compressed_slots, window_slots
from mla_ops import dispatch, formats
from mla_ops.kernels import flash_mla
from mla_ops.registry import describe

HEAD_DIM = formats.LATENT_DIM + formats.ROPE_DIM
FORMAT = "fp8_ds_mla"
V4_FORMAT = "fp8_ds_mla_v4"
SCALE = common.SOFTMAX_SCALES[HEAD_DIM]

C4A_BLOCK_SIZE = 64


class Layer:
    """One layer's cache and the inputs of a decode step, several sets of them.

    Each set writes a token of its own for each request, to the places behind the context, and attends to it and to
    others of the context.
    """

    def __init__(self, num_tokens: int, num_heads: int, topk: int, context: int, arguments: argparse.Namespace) -> None:
        generator = common.generator(arguments)
        device = torch.device(arguments.device)
        count = common.number_of_sets(arguments)
        blocks = -(-(context + count) // BLOCK_SIZE)
        on_gpu = device.type == "cuda" and not arguments.quick
        block_bytes = BLOCK_SIZE * formats.FORMATS[FORMAT].bytes_per_token()
        num_blocks = cache_blocks(num_tokens * blocks, block_bytes, on_gpu)
        self.kv_cache = formats.allocate_cache(FORMAT, num_blocks, BLOCK_SIZE, device=device)
        fill_cache(self.kv_cache, FORMAT, generator)
        self.block_table = random_block_table(num_tokens, blocks, num_blocks, generator)
        self.request = torch.arange(num_tokens, dtype=torch.int32, device=device)
        self.topk_length = torch.full((num_tokens,), topk, dtype=torch.int32, device=device)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, generator=generator).to(torch.bfloat16)

        self.q = [randn(num_tokens, num_heads, HEAD_DIM) for _ in range(count)]
        self.keys = [(randn(num_tokens, formats.LATENT_DIM), randn(num_tokens, formats.ROPE_DIM)) for _ in self.q]
        self.indices, self.new_slots = [], []
        for number in range(count):
            new = torch.full((num_tokens, 1), context + number, dtype=torch.int32, device=device)
            others = random_selection(num_tokens, topk - 1, context, generator)
            self.indices.append(torch.cat((others, new), dim=1))
            self.new_slots.append(to_slots(new, self.block_table).flatten().long())
        self.outputs = [make_outputs(q) for q in self.q]
        self.slots = torch.empty_like(self.indices[0])
        self.counts = torch.empty_like(self.request)

    def write(self, number: int) -> None:
        torch.ops.mla.concat_and_cache(*self.keys[number], self.kv_cache, self.new_slots[number], FORMAT)

    def attend(self, number: int) -> None:
        out, lse = self.outputs[number]
        torch.ops.mla.paged_sparse_attention.out(
            self.q[number],
            self.kv_cache,
            self.indices[number],
            SCALE,
            FORMAT,
            topk_length=self.topk_length,
            block_table=self.block_table,
            req_id_per_token=self.request,
            out=out,
            lse=lse,
        )

    def run(self, number: int) -> None:
        self.write(number)
        self.attend(number)

    def poison(self) -> None:
        poison(self.outputs[0])
        self.kv_cache.view(-1, self.kv_cache.shape[2])[self.new_slots[0]] = 0

    def compare(self, out: torch.Tensor, lse: torch.Tensor) -> list[common.Check]:
        slots = to_slots(self.indices[0], self.block_table)
        stored = read_keys(self.kv_cache, self.new_slots[0], FORMAT)
        return [
            *check_attention(self.q[0], lambda token: read_keys(self.kv_cache, slots[token], FORMAT), SCALE, out, lse),
            common.exact("kv_cache", stored, quantized_values(*self.keys[0], FORMAT)),
        ]

    def peer(self) -> dict[str, common.Peer]:
        """FlashMLA's attention between the library's own write and translation."""
        provider, reason = flash_mla.find_provider()
        if provider is None:
            print(f"FlashMLA is not measured: {reason}")
            return {}
        num_heads = self.q[0].shape[1]
        queries = [flash_mla.pad_query(q).unsqueeze(1) for q in self.q]
        results: list[tuple[torch.Tensor, ...]] = [()] * len(queries)

        def attend(
            number: int, schedule: torch.Tensor | None = None, num_splits: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, ...]:
            torch.ops.mla.convert_req_index_to_global_index.out(
                self.request,
                self.block_table,
                self.indices[number],
                BLOCK_SIZE,
                out=self.slots,
                valid_counts=self.counts,
            )
            return flash_mla_peer.decode(
                queries[number],
                self.kv_cache.unsqueeze(2),
                self.slots.unsqueeze(1),
                SCALE,
                schedule=schedule,
                num_splits=num_splits,
            )

        *_, schedule, num_splits = attend(0)

        def run(number: int) -> None:
            self.write(number)
            results[number] = attend(number, schedule, num_splits)

        def check() -> list[common.Check]:
            out, lse = results[0][:2]
            return self.compare(out[:, 0, :num_heads], lse[:, :num_heads, 0])

        return {"FlashMLA": common.Peer([partial(run, number) for number in range(len(queries))], check)}


def build_layer(num_tokens: int, num_heads: int, topk: int, context: int, arguments: argparse.Namespace) -> common.Case:
    layer = Layer(num_tokens, num_heads, topk, context, arguments)
    row_bytes = formats.FORMATS[FORMAT].bytes_per_token()
    written = num_tokens * (2 * HEAD_DIM + 8 + row_bytes)
    return common.Case(
        describe("paged_sparse_attention", layer.q[0], layer.kv_cache, layer.indices[0], SCALE, FORMAT),
        {"layer": "V3.2", "T": num_tokens, "H": num_heads, "topk": topk},
        [partial(layer.run, number) for number in range(len(layer.q))],
        layer.poison,
        lambda: layer.compare(*layer.outputs[0]),
        written + attention_bytes(num_tokens, num_heads, topk, HEAD_DIM, row_bytes),
        attention_flops(num_tokens, num_heads, topk, HEAD_DIM),
        layer.peer() if arguments.peers else {},
        name="decode_layer",
    )


def build_v4_layer(kind: str, num_tokens: int, num_heads: int, topk: int, arguments: argparse.Namespace) -> common.Case:
    """A C4A or C128A layer of the cases of its ops."""
    own = argparse.Namespace(**{**vars(arguments), "peers": False, "deterministic": False, "waves": []})
    compressors = [("C4A", V4_FORMAT), ("indexer", "bf16")] if kind == "C4A" else [("C128A", V4_FORMAT)]
    parts = [
        cache.build_concat(num_tokens, V4_FORMAT, own),
        *(compressor.build_case(name, num_tokens, 1, cache_format, own) for name, cache_format in compressors),
        sparse_attention_extra.build_case(num_tokens, num_heads, topk, 4 * topk, V4_FORMAT, own),
    ]

    def run(number: int) -> None:
        for part in parts:
            part.runs[number]()

    def poison_all() -> None:
        for part in parts:
            part.poison()

    return common.Case(
        parts[-1].call,
        {"layer": kind, "T": num_tokens, "H": num_heads, "topk": parts[-1].shape["topk"]},
        [partial(run, number) for number in range(len(parts[0].runs))],
        poison_all,
        lambda: [check for part in parts for check in part.check()],
        sum(part.bytes_moved for part in parts),
        sum(part.flops for part in parts),
        name="decode_layer",
    )


def build_eager(what: str, num_heads: int, topk: int, context: int, arguments: argparse.Namespace) -> common.Case:
    """One token, so that the device is faster than the host and no call waits for it."""
    layer = Layer(1, num_heads, topk, context, arguments)
    fresh: list[tuple[torch.Tensor, torch.Tensor]] = [*layer.outputs]

    def functional(number: int) -> None:
        fresh[number] = mla_ops.paged_sparse_attention(
            layer.q[number],
            layer.kv_cache,
            layer.indices[number],
            SCALE,
            FORMAT,
            topk_length=layer.topk_length,
            block_table=layer.block_table,
            req_id_per_token=layer.request,
        )

    call: Callable[[int], None] = {"attention": functional, "attention.out": layer.attend, "layer": layer.run}[what]

    def poison_all() -> None:
        layer.poison()
        fresh[0] = layer.outputs[0]
        if what != "layer":
            layer.write(0)

    return common.Case(
        describe("paged_sparse_attention", layer.q[0], layer.kv_cache, layer.indices[0], SCALE, FORMAT),
        {"T": 1, "H": num_heads, "topk": topk},
        [partial(call, number) for number in range(len(layer.q))],
        poison_all,
        lambda: layer.compare(*(fresh[0] if what == "attention" else layer.outputs[0])),
        bytes_moved=0,
        peers=layer.peer() if arguments.peers and what == "layer" else {},
        name=f"eager {what}",
        host=True,
    )


def random_step(
    num_requests: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, Callable[[int], torch.Tensor]]:
    """query_start_loc and seq_lens of a decode step, and what draws a block table of so many columns."""
    device = generator.device
    query_start_loc = torch.arange(num_requests + 1, dtype=torch.int32, device=device)
    seq_lens = torch.randint(1, context + 1, (num_requests,), device=device, generator=generator).to(torch.int32)

    def table(columns: int) -> torch.Tensor:
        return random_block_table(num_requests, columns, num_requests * columns, generator)

    return query_start_loc, seq_lens, table


def padded(rows: Iterable[list[int]], width: int) -> list[list[int]]:
    return [row + [-1] * (width - len(row)) for row in rows]


def build_metadata(
    arch: str, num_requests: int, context: int, arguments: argparse.Namespace, host: bool = False
) -> common.Case:
    """A decode step of `num_requests` requests whose lengths are random up to `context`."""
    generator = common.generator(arguments)
    device = torch.device(arguments.device)
    columns = -(-context // BLOCK_SIZE)
    sets = [random_step(num_requests, context, generator) for _ in range(common.number_of_sets(arguments))]
    tables = [[table(columns)] for *_, table in sets]
    v4 = arch == "V4"
    buffers: mla_ops.V4StepMetadata | mla_ops.StepMetadata
    if v4:
        widths = (-(-context // (C4A_RATIO * C4A_BLOCK_SIZE)), -(-context // (C128A_RATIO * C128A_BLOCK_SIZE)))
        for own, (*_, table) in zip(tables, sets, strict=True):
            own += [table(width) for width in widths]
        buffers = mla_ops.V4StepMetadata.allocate(
            max_num_tokens=num_requests,
            max_num_requests=num_requests,
            max_seq_len=context,
            device=device,
        )
    else:
        buffers = mla_ops.StepMetadata.allocate(
            max_num_tokens=num_requests,
            max_num_requests=num_requests,
            max_blocks_per_request=columns,
            block_size=BLOCK_SIZE,
            index_topk=2048,
            device=device,
        )
    runs = [
        partial(buffers.build, query_start_loc, seq_lens, *own)
        for (query_start_loc, seq_lens, _), own in zip(sets, tables, strict=True)
    ]
    step = buffers.step if isinstance(buffers, mla_ops.V4StepMetadata) else buffers
    written = {"positions": step.positions, "slot_mapping": step.slot_mapping}
    if isinstance(buffers, mla_ops.V4StepMetadata):
        written |= {"window_indices": buffers.window_indices, "c128a_indices": buffers.c128a_indices}

    def poison_all() -> None:
        for tensor in written.values():
            tensor.fill_(-7)

    def check() -> list[common.Check]:
        seq_lens, listed = sets[0][1].tolist(), [table.tolist() for table in tables[0]]
        last = [length - 1 for length in seq_lens]
        expected: dict[str, list[int] | list[list[int]]] = {
            "positions": last,
            "slot_mapping": [
                listed[0][request][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for request, p in enumerate(last)
            ],
        }
        if v4:
            expected["window_indices"] = padded(map(window_slots, last, listed[0]), WINDOW)
            expected["c128a_indices"] = padded(map(compressed_slots, last, listed[2]), context // C128A_RATIO)
        return [
            common.exact(name, tensor, torch.tensor(expected[name], device=device).view(tensor.shape))
            for name, tensor in written.items()
        ]

    bytes_moved = 2 * sum(table.nbytes for table in tables[0]) + sum(tensor.nbytes for tensor in written.values())
    call = dispatch.Call("build_step_metadata", device, torch.int32, num_tokens=num_requests)
    name = f"{'V4' if v4 else ''}StepMetadata.build"
    shape: dict[str, int | str] = {"requests": num_requests, "context": context}
    return common.Case(
        call,
        shape,
        runs,
        poison_all,
        check,
        bytes_moved,
        name=f"eager {name}" if host else name,
        host=host,
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmarks; returns the exit status."""
    parser = common.argument_parser("step")
    parser.add_argument("--tokens", type=common.integers, default=None, help="of the layer, one a request")
    parser.add_argument("--heads", type=common.integers, default=None)
    parser.add_argument("--requests", type=common.integers, default=None, help="of the metadata")
    parser.add_argument(
        "--peers", action="store_true", help="time FlashMLA's own ops beside ours, where it is installed"
    )
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    tokens = arguments.tokens or ([1, 8, 128] if on_gpu else [2])
    heads = arguments.heads or ([16, 128] if on_gpu else [8])
    requests = arguments.requests or ([1, 128, 512] if on_gpu else [3])
    topk, context = (2048, 8192) if on_gpu else (64, 512)

    def cases() -> Iterator[partial[common.Case]]:
        for num_heads in heads:
            for num_tokens in tokens:
                yield partial(build_layer, num_tokens, num_heads, topk, context, arguments)
        for kind, num_tokens in itertools.product(("C4A", "C128A"), tokens):
            yield partial(build_v4_layer, kind, num_tokens, heads[-1], topk // 4, arguments)
        for arch, num_requests in itertools.product(("V3.2", "V4"), requests):
            yield partial(build_metadata, arch, num_requests, context, arguments)
        for what in ("attention", "attention.out", "layer"):
            yield partial(build_eager, what, heads[-1], topk, context, arguments)
        for arch in ("V3.2", "V4"):
            yield partial(build_metadata, arch, 1, context, arguments, host=True)

    return common.run_benchmark("step", cases(), arguments)


if __name__ == "__main__":
    sys.exit(main())
