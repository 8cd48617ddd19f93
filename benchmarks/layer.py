"""Benchmark of a whole sparse layer of DeepSeek-V3.2 in a decode step: python -m mla_ops bench layer.

One graph, compiled and captured: the projections of transformers' own module, the writes of latents and index keys, the
selection, attention, and the output projection, as `mla_ops.models` runs them. `selection` is the part between the
index query and the chosen keys alone. `layer, gather and sort` is the layer with that part in plain PyTorch: it gathers
the whole capacity of every request, multiplies in float32 and sorts. `--parts` adds a table of the layer's kernels, by
what they are for, from a profile of replays whose last output is checked as the layer's row is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import common, timing
from benchmarks.attention import BLOCK_SIZE, random_block_table
from benchmarks.cache import fill_cache, fill_index_cache
from mla_ops import dispatch, formats
from mla_ops.demo.model import build_small_model
from mla_ops.models import decoder_for, latent
from mla_ops.models.latent import LatentAttention
from mla_ops.models.parts import choose_keys
from mla_ops.registry import describe

FORMAT = "fp8_ds_mla"
INDEX_FORMAT = "fp8_index"
REAL = {
    "hidden_size": 7168,
    "num_heads": 128,
    "index_heads": 64,
    "index_topk": 2048,
    "q_lora_rank": 1536,
    "intermediate_size": 64,
    "vocab_size": 64,
    "initializer_range": 0.01,
    "max_position_embeddings": 2**18,
}
KERNEL_WORDS = {  # words in the names of kernels; others are projections before attention, and output behind it
    "projections": (),
    "cache writes": ("store_",),
    "selection": ("_quantize_kernel", "indexer_logits", "topk_"),
    "attention": ("sparse_attention", "merge_parts"),
    "output": (),
}
SMALL = {"hidden_size": 128, "num_heads": 4, "index_heads": 4, "index_topk": 64, "vocab_size": 64}


def index_values(index_cache: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """The keys of each request's blocks, `[num_requests, capacity, 128]` float32, from the format's description."""
    block_size = formats.geometry(index_cache, INDEX_FORMAT).block_size
    rows = index_cache[block_table.long()]
    keys = rows[..., : 128 * block_size].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (block_size, 128))
    scales = rows[..., 128 * block_size : 132 * block_size].contiguous().view(torch.float32)
    return (keys * scales.unsqueeze(-1)).flatten(1, 2)


def num_blocks(index_cache: torch.Tensor) -> int:
    return formats.geometry(index_cache, INDEX_FORMAT).num_blocks


def gather_and_sort(
    plain: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    index_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    visible: torch.Tensor,
    topk: int,
    index_format: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose_keys` in plain PyTorch, over index keys `[num_blocks, block_size, 128]` of the model's dtype."""
    keys = plain[block_table[req_id_per_token.long()].long()].flatten(1, 2)
    scores = torch.matmul(q.float(), keys.float().transpose(-1, -2)) * scale
    scores = torch.matmul(weights.float().unsqueeze(1), scores.relu()).squeeze(1)
    position = torch.arange(scores.shape[1], device=q.device)
    scores = scores.masked_fill(position >= visible.unsqueeze(1), -torch.inf)
    chosen = scores.topk(topk, dim=-1).indices
    chosen = torch.where(chosen < visible.unsqueeze(1), chosen, -1).to(torch.int32)
    return chosen, visible.clamp(max=topk)


class Layer:
    """One layer with its caches, and a decode step of one token a request behind `context` tokens."""

    def __init__(self, num_requests: int, context: int, arguments: argparse.Namespace) -> None:
        generator, device = common.generator(arguments), torch.device(arguments.device)
        real = device.type == "cuda" and not arguments.quick
        with torch.device(device):
            model = build_small_model(num_layers=1, **(REAL if real else SMALL)).bfloat16().requires_grad_(False)
        decoder = decoder_for(model.to(device), context + 1)
        self.attention: LatentAttention = decoder.attention
        self.module: Any = model.model.layers[0].self_attn
        columns = -(-(context + 1) // BLOCK_SIZE)
        self.cache = decoder.allocate_cache(FORMAT, num_requests * columns, BLOCK_SIZE)
        self.layer_cache = self.cache.layers[0]
        fill_cache(self.layer_cache.latent, FORMAT, generator)
        fill_index_cache(self.layer_cache.index_keys, generator)
        self.block_table = random_block_table(num_requests, columns, num_requests * columns, generator)
        metadata = decoder.allocate_metadata(
            max_num_tokens=num_requests, max_num_requests=num_requests, block_size=BLOCK_SIZE
        )
        starts = torch.arange(num_requests + 1, dtype=torch.int32, device=device)
        lengths = torch.full((num_requests,), context + 1, dtype=torch.int32, device=device)
        decoder.build_step(metadata, starts, lengths, self.block_table)
        inputs = decoder.step_inputs(torch.zeros(num_requests, dtype=torch.int64, device=device), metadata, starts[:1])
        self.inputs = inputs
        self.hidden = torch.randn(num_requests, decoder.config.hidden_size, device=device, generator=generator)
        self.hidden = self.hidden.bfloat16()
        self.out = torch.empty_like(self.hidden)
        self.chosen = torch.empty(num_requests, decoder.index_topk, dtype=torch.int32, device=device)
        self.query: tuple[Any, ...] = ()
        torch._dynamo.reset()  # each layer is a graph of its own
        self.compiled = torch.compile(self.step, fullgraph=True, dynamic=False) if real else self.step

    def step(self) -> None:
        step = self.attention.begin(self.inputs, self.cache.layers, FORMAT, INDEX_FORMAT)
        self.out.copy_(self.attention.attend(0, self.module, self.hidden, step))
        assert step.chosen is not None
        self.chosen.copy_(step.chosen[0])

    def run(self, choose: Callable[..., Any] = choose_keys, *, compiled: bool = False) -> None:
        """One step; compiled, what lies between operators and matmuls is fused."""
        with patch.object(latent, "choose_keys", choose):
            (self.compiled if compiled else self.step)()

    def select(self) -> None:
        """The selection alone, from the query that the last `record` saw."""
        self.chosen.copy_(choose_keys(*self.query)[0])

    def record(self) -> None:
        """Keeps what the layer asks its selection."""

        def keep(*query: Any) -> tuple[torch.Tensor, torch.Tensor]:
            self.query = query
            return choose_keys(*query)

        self.run(keep)

    def poison(self) -> None:
        self.out.fill_(torch.nan)
        self.chosen.fill_(-7)

    def check_finite(self) -> list[common.Check]:
        return [common.Check("not finite", float((~self.out.isfinite()).sum()), 0.0)]

    def check_selection(self) -> list[common.Check]:
        """No key that was left out may score higher than the lowest chosen one, beyond rounding, in float32."""
        q, weights, scale = self.query[:3]
        q8, q_weights = torch.ops.mla.quantize_index_query(q, weights, scale)
        worst, largest = 0.0, 0.0
        for row in range(q.shape[0]):
            keys = index_values(self.layer_cache.index_keys, self.block_table[row : row + 1])[0]
            scores = q_weights[row] @ (q8[row].float() @ keys.T).relu()
            scores = scores[: int(self.inputs.key_lens[row])]
            chosen = self.chosen[row][self.chosen[row] >= 0].long()
            if len(chosen.unique()) != min(self.chosen.shape[1], len(scores)):
                return [common.Check("chosen", float("inf"), 0.0)]
            rest = scores.clone()
            rest[chosen] = -torch.inf
            worst = max(worst, float((rest.max() - scores[chosen].min()).clamp(min=0)))
            largest = max(largest, float((q_weights[row].abs() @ (q8[row].float().abs() @ keys.T.abs())).max()))
        # both sums have at most 128 + 64 + 2 roundings
        return [common.Check("chosen", worst, 2 * 194 * 2**-24 * largest)]

    def check(self) -> list[common.Check]:
        """The layer's output against the reference's attention over the keys that were chosen.

        Which were is checked beside the selection: a compiled query has roundings of its own.
        """
        chosen, out = self.chosen.clone(), self.out.float()
        counts = (chosen >= 0).sum(1, dtype=torch.int32)
        with dispatch.override(paged_sparse_attention="reference"):
            self.run(lambda *query: (chosen, counts))
        expected = self.out.float()
        error = float((out - expected).norm() / expected.norm())
        # attention's output, its two projections and the layer's output are rounded to bfloat16 on both sides
        return [common.Check("out, relative", error, 8 * 2**-9)]

    def bytes_read(self) -> int:
        """Weights, index keys and chosen latents."""
        num_requests, topk = self.chosen.shape
        keys = num_requests * int(self.inputs.key_lens[0])
        index_bytes = keys * formats.FORMATS[INDEX_FORMAT].bytes_per_token()
        latent_bytes = num_requests * topk * formats.FORMATS[FORMAT].bytes_per_token()
        return sum(p.nbytes for p in self.module.parameters()) + index_bytes + latent_bytes


def build_case(layer: Layer, context: int, what: str) -> common.Case:
    num_requests = layer.chosen.shape[0]
    q, weights, scale, index_cache, table, request, visible, topk, index_format = layer.query
    queries, query_weights = torch.ops.mla.quantize_index_query(q, weights, scale)
    call = describe("select_keys", queries, index_cache, query_weights, visible, table, request, topk, index_format)
    shape: dict[str, int | str] = {"B": num_requests, "context": context, "H": q.shape[1], "topk": topk}
    if what == "selection":
        bytes_moved = num_requests * context * formats.FORMATS[INDEX_FORMAT].bytes_per_token()
        flops = 2 * num_requests * context * q.shape[1] * formats.INDEX_DIM
        return common.Case(
            call, shape, [layer.select], layer.poison, layer.check_selection, bytes_moved, flops, name="selection"
        )
    if what == "layer":
        return common.Case(
            call,
            shape,
            [partial(layer.run, compiled=True)],
            layer.poison,
            layer.check,
            layer.bytes_read(),
            name="sparse layer",
        )
    plain = torch.zeros(num_blocks(index_cache), BLOCK_SIZE, formats.INDEX_DIM, dtype=q.dtype, device=q.device)
    rows = index_values(index_cache, table).to(q.dtype).unflatten(1, (-1, BLOCK_SIZE)).flatten(0, 1)
    plain[table.flatten().long()] = rows
    run = partial(layer.run, partial(gather_and_sort, plain), compiled=True)
    return common.Case(
        call, shape, [run], layer.poison, layer.check_finite, layer.bytes_read(), name="layer, gather and sort"
    )


def parts_of(events: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Time of each part of `KERNEL_WORDS`, from kernels in order; time beside the one before counts once."""
    times, behind, until = dict.fromkeys(KERNEL_WORDS, 0.0), "projections", 0.0
    for name, begin, end in events:
        part = next((part for part, words in KERNEL_WORDS.items() if any(word in name for word in words)), behind)
        if part == "attention":
            behind = "output"
        times[part] += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return times


def profiled(layer: Layer, replays: int = 10) -> tuple[dict[str, float], list[common.Check]]:
    """Microseconds of the parts of a captured layer, and the check of what its last replay left.

    The median of some replays whose L2 holds nothing of the layer.
    """
    replay, _ = timing.capture(partial(layer.run, compiled=True), "")
    flush = torch.empty(timing.L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    seen = []
    for _ in range(replays):
        layer.poison()
        flush.zero_()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            replay()
            torch.cuda.synchronize()
        events = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type.name == "CUDA"  # others are calls of the runtime
        ]
        seen.append(parts_of(sorted(events, key=lambda event: event[1])))
    return {part: statistics.median(times[part] for times in seen) for part in KERNEL_WORDS}, layer.check()


def print_parts(rows: dict[tuple[int, int], tuple[dict[str, float], list[common.Check]]]) -> bool:
    """A line for each number of requests and context. Returns whether all checks passed."""
    print("\nparts of a layer, µs of kernels")
    print(f"{'B':>4} {'context':>8} " + " ".join(f"{part:>12}" for part in KERNEL_WORDS) + "  max error (bound)")
    for (num_requests, context), (times, checks) in rows.items():
        verdict = ["  WRONG", ""]
        errors = ", ".join(f"{c.name} {c.error:.2g} ({c.bound:.2g}){verdict[c.passed]}" for c in checks)
        values = " ".join(f"{times[part]:12.1f}" for part in KERNEL_WORDS)
        print(f"{num_requests:4} {context:8} {values}  {errors}")
    return all(check.passed for _, checks in rows.values() for check in checks)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = common.argument_parser("layer")
    parser.add_argument("--requests", type=common.integers, default=None)
    parser.add_argument("--contexts", type=common.integers, default=None)
    parser.add_argument("--parts", action="store_true", help="also time its kernels, by what they are for (CUDA)")
    arguments = parser.parse_args(argv)
    if arguments.parts and not arguments.device.startswith("cuda"):
        parser.error("--parts needs a CUDA device")
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    requests = arguments.requests or ([1, 16, 64] if on_gpu else [2])
    contexts = arguments.contexts or ([4096, 32768, 131072] if on_gpu else [150])
    parts: dict[tuple[int, int], tuple[dict[str, float], list[common.Check]]] = {}

    def cases() -> Iterator[partial[common.Case]]:
        for context in contexts:
            for num_requests in requests:
                layer = Layer(num_requests, context, arguments)
                layer.record()
                for what in ("layer", "selection", "gather and sort"):
                    # float32 products of all heads with all keys, and the gathered keys: 32 GiB
                    if what != "gather and sort" or num_requests * context * 64 * 4 <= 2**35:
                        yield partial(build_case, layer, context, what)
                if arguments.parts:
                    parts[num_requests, context] = profiled(layer)

    status = common.run_benchmark("layer", cases(), arguments)
    return status if not parts or print_parts(parts) else 1


if __name__ == "__main__":
    sys.exit(main())
