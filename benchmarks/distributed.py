"""More than one GPU: torchrun --nproc-per-node 2 -m benchmarks.distributed [tokens | merge | steps] [options].

- `tokens`: greedy tokens of a DeepSeek-V3.2 of 128 heads and few layers, decoded in a captured graph under every
  layout, against one rank: float32, whose tokens must be equal, and bfloat16 over an fp8 cache.
- `merge`: what joining the ranks' attention costs, as graph replays: one exchange and one launch (`merge_heads`), an
  all-gather of lse and a reduce-scatter of float32 (`merge_heads_by_sum`), every head everywhere (`merge`), beside an
  all-reduce of float32 outputs, and of what a layer sums up under tensor parallelism.
- `steps`: a captured decode step of that model at a context, on one rank and under every layout, and the sums of its
  kernels' times on the first rank, by kind. A collective's kernel waits for the other rank.

Without a GPU it runs on gloo, and nothing is captured.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mla_ops
from benchmarks.cache import fill_cache, fill_index_cache
from mla_ops.demo.model import build_small_model
from mla_ops.distributed import ContextParallel
from mla_ops.models import GenerationSession, decoder_for

BLOCK_SIZE = 128
LAYOUTS = ("one rank", "tp", "dcp", "tp + dcp")
# the first part that is in a kernel's name counts; Triton's merge of candidates bears the name of attention's
KINDS = {
    "collectives": ("nccl",),
    "selection": ("indexer", "index_query", "topk", "select_keys"),
    "attention": ("attention", "attend", "merge_", "heads_kernel"),
    "products": ("gemm", "gemv", "nvjet", "cutlass", "splitk"),
    "other": ("",),
}


class Bench:
    """This rank's device and mesh."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.gpu = torch.cuda.is_available()
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cuda", rank) if self.gpu else torch.device("cpu")
        if self.gpu:
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if self.gpu else "gloo")
        self.world_size = dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (self.world_size,))
        self.began = time.perf_counter()

    def say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(f"[{time.perf_counter() - self.began:5.1f} s] {text}", flush=True)

    def late(self) -> bool:
        """Whether the time is spent; the same on every rank."""
        spent = torch.tensor(time.perf_counter() - self.began > self.arguments.seconds, device=self.device)
        spent = spent.int()
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return bool(spent.item())

    def microseconds(self, run: Callable[[], Any], repeats: int = 20) -> float:
        """Time of a call: as a graph replay on a GPU."""
        for _ in range(3):
            run()
        if not self.gpu:
            began = time.perf_counter()
            run()
            return (time.perf_counter() - began) * 1e6
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(8):
                run()
        return self.replays(graph.replay, repeats) / 8

    def replays(self, replay: Callable[[], Any], repeats: int) -> float:
        """Microseconds of a replay, the slowest rank's."""
        for _ in range(3):
            replay()
        torch.cuda.synchronize()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            replay()
        end.record()
        torch.cuda.synchronize()
        taken = torch.tensor(start.elapsed_time(end) * 1e3 / repeats, device=self.device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    def decoder(self, layout: str, dtype: torch.dtype, length: int) -> Any:
        sizes: dict[str, Any] = {"num_heads": 16, "hidden_size": 128} if self.arguments.quick else {"num_heads": 128}
        sizes |= {} if self.arguments.quick else {"hidden_size": 2048, "index_heads": 64, "index_topk": 2048}
        with self.device:
            model = build_small_model(num_layers=self.arguments.layers, max_position_embeddings=length, **sizes)
        meshes: dict[str, Any] = {}
        if "tp" in layout:
            meshes["tp_mesh"] = self.mesh
        if "dcp" in layout:
            meshes["dcp_mesh"] = self.mesh
        return decoder_for(model.to(self.device, dtype), length, **meshes)


def tokens(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 70, 33) if bench.arguments.quick else (5, 700, 2600, 64)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]
    for dtype, cache_format, compiled in (
        (torch.float32, "fp32", False),
        (torch.bfloat16, "fp8_ds_mla", False),
        (torch.bfloat16, "fp8_ds_mla", True),
    ):
        expected = None
        layouts = LAYOUTS if not compiled else ("one rank", "tp + dcp")
        for layout in layouts:
            if bench.late() or (compiled and not bench.arguments.compile):
                return
            decoder = bench.decoder(layout, dtype, 4096 if not bench.arguments.quick else 256)
            session = GenerationSession(
                decoder,
                max_num_requests=2,
                cache_format=cache_format,
                block_size=BLOCK_SIZE,
                eos_token_ids=(),
                compiled=compiled,
            )
            found = session.generate(prompts, 24, steps_per_check=8).tokens
            expected = found if expected is None else expected
            same = sum(a == b for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))
            captured = "captured" if session._graph is not None else "not captured"
            kind = "compiled" if compiled else "eager"
            bench.say(f"tokens {cache_format:10} {kind} {captured} {layout:9} equal {same} of {24 * len(prompts)}")
            del session, decoder
            gc.collect()


def all_reduce(x: torch.Tensor, ranks: ContextParallel) -> torch.Tensor:
    return collectives.wait_tensor(collectives.all_reduce(x, "sum", ranks.group))


def merge(bench: Bench) -> None:
    ranks = ContextParallel.of(bench.mesh, BLOCK_SIZE)
    heads = 128 if bench.gpu else 8
    bench.say(f"merge, {heads} heads of 512 bfloat16, microseconds a call")
    for batch in bench.arguments.batch:
        if bench.late():
            return
        out = torch.randn(batch, heads, 512, device=bench.device, dtype=torch.bfloat16)
        lse = torch.randn(batch, heads, device=bench.device)
        wide, hidden = out.float(), torch.randn(batch, 7168, device=bench.device, dtype=torch.bfloat16)

        own = torch.randn(ranks.world_size, batch, heads // ranks.world_size, 512, device=bench.device).to(out.dtype)
        parts = torch.randn(own.shape[:3], device=bench.device)
        runs: dict[str, Callable[[], Any]] = {
            "merge_heads": partial(ranks.merge_heads, out, lse),
            "its merge alone": partial(mla_ops.merge_stacked_attention_states, own, parts),
            "merge_heads_by_sum": partial(ranks.merge_heads_by_sum, out, lse),
            "merge": partial(ranks.merge, out, lse),
            "all-reduce of float32 outputs": partial(all_reduce, wide, ranks),
            "all-reduce of 7168 bfloat16": partial(all_reduce, hidden, ranks),
        }
        found = {name: bench.microseconds(run) for name, run in runs.items()}
        bench.say(f"  B = {batch:3}: " + ", ".join(f"{name} {us:.1f}" for name, us in found.items()))


def steps(bench: Bench) -> None:
    bench.say(f"steps, {bench.arguments.layers} layers, bfloat16, fp8 caches, microseconds a captured step")
    for context in bench.arguments.context:
        for batch in bench.arguments.batch:
            for layout in LAYOUTS:
                if bench.late():
                    return
                taken, parts = step_time(bench, layout, batch, context)
                sums = ", ".join(f"{kind} {us:.0f}" for kind, us in parts.items())
                bench.say(f"  {context:7} tokens, B = {batch:3}, {layout:9} {taken:7.0f}  ({sums})")


def sums_of_kernels(step: Callable[[], Any], repeats: int = 4) -> dict[str, float]:
    """Microseconds that the kernels of a step take, by kind; one that runs beside another counts as well."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    sums = dict.fromkeys((*KINDS, "all"), 0.0)
    for event in profile.key_averages():
        kind = next(kind for kind, names in KINDS.items() if any(name in event.key.lower() for name in names))
        for name in (kind, "all"):
            sums[name] += event.self_device_time_total / repeats
    return sums


@torch.no_grad()
def step_time(bench: Bench, layout: str, batch: int, context: int) -> tuple[float, dict[str, float]]:
    """Microseconds of a step, and of its kernels by kind; without a GPU of the step alone."""
    length = context + BLOCK_SIZE
    decoder = bench.decoder(layout, torch.bfloat16, length)
    session = GenerationSession(
        decoder, max_num_requests=batch, cache_format="fp8_ds_mla", block_size=BLOCK_SIZE, eos_token_ids=()
    )
    generator = torch.Generator(bench.device).manual_seed(0)
    for layer in session.cache.layers:
        fill_cache(layer.latent, "fp8_ds_mla", generator, distinct=64)
        fill_index_cache(layer.index_keys, generator)
    if bench.gpu:
        session.capture()
    for row in range(batch):
        session.reserve(row, length)
    session.seq_lens.fill_(context)
    session.max_new_tokens.fill_(BLOCK_SIZE)
    session.num_generated.fill_(1)
    session.active.fill_(True)
    parts = {}
    if bench.gpu:
        taken = bench.replays(session.step, 20)
        parts = sums_of_kernels(session.step)
    else:
        began = time.perf_counter()
        session.step()
        taken = (time.perf_counter() - began) * 1e6
    assert int(session.active.sum()) == batch
    del session, decoder
    gc.collect()
    if bench.gpu:
        torch.cuda.empty_cache()
    return taken, parts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distributed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", default=["tokens", "merge", "steps"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600, help="begin nothing after these")
    parser.add_argument("--compile", action="store_true", help="tokens of the compiled model too")
    parser.add_argument("--quick", action="store_true", help="a small model")
    bench = Bench(parser.parse_args(argv))
    for part in bench.arguments.parts:
        {"tokens": tokens, "merge": merge, "steps": steps}[part](bench)
    dist.barrier()
    return 0


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
