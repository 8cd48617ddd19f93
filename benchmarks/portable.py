"""The portable sparse attention kernels beside FlashMLA and what they are meant to reach, for this GPU or another.

python -m benchmarks.portable
python -m benchmarks.portable --capability 120

FlashMLA is planned outside. `bar`: the ratio to it that a row should not exceed.

With `--capability` Triton makes the code of another architecture, with its tiles, `mma.sync` and `cp.async`; ptxas
assembles it for this GPU. So tiles of 99 and 163 KB and the path without `wgmma` are checked and timed on Hopper. From
a time that fills the GPU follows a prediction for others: `predicted_us`. One capability a process: Triton keeps what
it compiled.

An SM here has room for two programs where one with 100 KB of shared memory has room for one. So for those a row that
fills the GPU has a second time, `alone`: of the code that they run, one program an SM. Predictions follow from it.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NamedTuple

import torch

from benchmarks import common, sparse_attention, sparse_attention_extra
from benchmarks.attention import Kind, shapes

CLOCK_GHZ = 1.98  # an H100 or H200 whose power limit does not hold it back
FULL = 128  # tokens that fill every GPU below
FLAT = "flat"  # prefill over flat bfloat16 keys
TWO_CACHES = "fp8_ds_mla_v4"
DECODE = tuple((tokens, heads) for tokens in (1, 8, 32, 128) for heads in (16, 32, 64, 128))
SHAPES = {
    "fp8_ds_mla": (*DECODE, (256, 128), (512, 16), (512, 64), (512, 128)),
    "bf16": DECODE,
    TWO_CACHES: ((8, 64), (256, 64), (256, 128)),
    FLAT: ((4096, 16), (4096, 64), (4096, 128)),
}
# With tiles of 99 KB a row may take so many times what it may take with Hopper's.
SMALL_TILES = dict.fromkeys((86, 89, 120, 121), 1.3)
SMALL_SM = 100 * 1024  # bytes of shared memory of an SM there
LINE = "{:<44} {:>8} {:>15} {:>7} {:>8} {:>9} {:>6} {:>5}  {}"
HEADER = LINE.format("row", "µs", "p10–p90", "GB/s", "TFLOP/s", "FlashMLA", "ratio", "bar", "max error (bound)")


class Gpu(NamedTuple):
    """Rates of a GPU by its maker: boost clock, and products of 16-bit numbers added up in float32, not sparse."""

    name: str
    capability: int
    sms: int
    clock_ghz: float
    gigabytes_per_second: float
    teraflops: float


GPUS = (
    Gpu("A100 SXM 80 GB", 80, 108, 1.41, 2039, 312),
    Gpu("RTX 4090", 89, 128, 2.52, 1008, 165),
    Gpu("L40S", 89, 142, 2.52, 864, 362),
    Gpu("RTX 5090", 120, 170, 2.41, 1792, 210),
    Gpu("RTX PRO 6000", 120, 188, 2.62, 1792, 504),
)


def predicted_us(us: float, sms: int, gpu: Gpu, bytes_moved: int, flops: int) -> float:
    """Time of a call on another GPU, from its time here by the same code.

    Each SM takes as many cycles as here, unless the memory or the tensor cores of the other GPU need longer.

    Args:
        us: microseconds here, of a call that fills both GPUs.
        sms: streaming multiprocessors here.
        gpu: the other one.
        bytes_moved: bytes that the call reads and writes.
        flops: its floating-point operations.
    """
    cycles = us * sms * CLOCK_GHZ / (gpu.sms * gpu.clock_ghz)
    return max(cycles, bytes_moved / (1e3 * gpu.gigabytes_per_second), flops / (1e6 * gpu.teraflops))


def compile_for(capability: int) -> None:
    """Makes Triton, and this library's choice of tiles, take a capability for that of the device."""
    os.environ["TRITON_OVERRIDE_ARCH"] = f"sm{capability}"
    from mla_ops.kernels.triton import dense_attention
    from mla_ops.kernels.triton import sparse_attention as sparse

    for module in (sparse, dense_attention):
        module.capability = lambda device: divmod(capability, 10)


def time_alone(case: common.Case, iterations: int, floors: common.Floors) -> float:
    """Microseconds of a case by the code for an SM that has room for one program, FlashMLA aside."""
    from mla_ops.kernels.triton import sparse_attention as sparse

    own, sparse.shared_of_sm = sparse.shared_of_sm, lambda device: SMALL_SM
    case.peers = {}
    try:
        return common.measure(case, ["triton"], iterations, floors)[0].median_us
    finally:
        sparse.shared_of_sm = own


def bar(kind: str, num_tokens: int, num_heads: int) -> float:
    """The largest ratio to FlashMLA that a row of a kind should have on Hopper."""
    if kind == FLAT:
        return 1.5
    if num_tokens <= 32:
        return 1.0 if num_tokens == 1 else 1.1
    return 1.2 if num_heads <= 32 else 1.4 if num_heads <= 64 else 1.6


def build(kind: str, num_tokens: int, num_heads: int, arguments: argparse.Namespace) -> common.Case:
    """The case of a row, with FlashMLA planned outside as its only peer."""
    plain = {"request_local": False, "topk_length": False, "deterministic": False, "waves": (), "q_halves": False}
    options = argparse.Namespace(**{**vars(arguments), **plain})
    topk, context = (128, 512) if arguments.quick else (2048, 8192)
    if kind == FLAT:
        prefill = sparse_attention.Prefill(num_tokens, num_heads, topk, 576)
        case = sparse_attention.build_flat(prefill, 4 * context, options)
    elif kind == TWO_CACHES:
        case = sparse_attention_extra.build_case(num_tokens, num_heads, topk // 4, context, kind, options)
    else:
        usual = Kind()
        case = sparse_attention.build_paged(num_tokens, num_heads, topk, kind, context, usual, options)
    case.peers = {name: peer for name, peer in case.peers.items() if name == "FlashMLA"}
    return case


def line(kind: str, rows: list[common.Row], limit: float) -> str:
    """A row of ours and, behind it, FlashMLA's time and the ratio, with `limit`: inf if there is none."""
    ours, theirs = rows[0], rows[1] if len(rows) > 1 else None
    worst = max((check for row in rows for check in row.checks), key=lambda check: check.severity)
    error = f"{worst.name} {worst.error:.2g} ({worst.bound:.2g})" + ("" if worst.passed else "  WRONG")
    ratio = ours.ratio_to_peer
    wanted = "-" if ratio is None or limit == float("inf") else f"{limit:.2f}"
    missed = "  over the bar" if ratio is not None and round(ratio, 2) > limit else ""
    return LINE.format(
        " ".join([kind, *(f"{name}={value}" for name, value in ours.shape.items() if name != "format")]),
        f"{ours.median_us:.1f}",
        f"{ours.p10_us:.1f}–{ours.p90_us:.1f}",
        f"{ours.bytes_per_second / 1e9:.0f}",
        f"{ours.flops_per_second / 1e12:.1f}",
        "-" if theirs is None else f"{theirs.median_us:.1f}",
        "-" if ratio is None else f"{ratio:.2f}",
        wanted,
        error + missed,
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status, 1 if a result was wrong."""
    parser = common.argument_parser("portable")
    parser.add_argument("--capability", type=int, default=None, help="80, 86, 89 or 120; default: the GPU's own")
    parser.add_argument("--kinds", type=common.names, default=list(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--shapes", type=shapes, default=None, help="tokens x heads of all kinds, e.g. 128x16")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="do not time FlashMLA")
    arguments = parser.parse_args(argv)
    if arguments.capability is not None:
        compile_for(arguments.capability)
    torch.manual_seed(arguments.seed)
    device = torch.device(arguments.device)
    machine = common.describe_machine(device)
    floors = common.measure_floors(device, arguments.quick)
    gpus = [gpu for gpu in GPUS if gpu.capability == arguments.capability]
    made_for = "" if arguments.capability is None else f"; Triton compiles for capability {arguments.capability}"
    print(f"{machine['device']}, torch {machine['torch']}, CUDA {machine['cuda']}{made_for}")
    small = arguments.capability in SMALL_TILES
    print(HEADER + "  alone" * small + "".join(f"  predicted us, {gpu.name}" for gpu in gpus))
    allowed = 1.0 if arguments.capability in (None, 90) else SMALL_TILES.get(arguments.capability, float("inf"))
    passed = True
    sizes = [(kind, *size) for kind in arguments.kinds for size in arguments.shapes or SHAPES[kind]]
    for kind, tokens, heads in sizes:
        case = build(kind, tokens, heads, arguments)
        rows = common.measure(case, ["triton"], arguments.iterations, floors)
        if rows[0].reason is not None:
            parser.error(f"nothing is measured: {rows[0].reason}")
        passed = passed and all(row.passed for row in rows)
        text = line(kind, rows, allowed * bar(kind, tokens, heads))
        if tokens >= FULL and device.type == "cuda":
            sms = torch.cuda.get_device_properties(device).multi_processor_count
            us = time_alone(case, arguments.iterations, floors) if small else rows[0].median_us
            text += f"  {us:.1f}" * small
            given = us, sms
            text += "".join(f"  {predicted_us(*given, gpu, case.bytes_moved, case.flops):.0f}" for gpu in gpus)
        print(text, flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
