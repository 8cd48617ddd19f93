"""The portable attention kernels as Triton compiles them for another architecture, run on the GPU that is here.

python -m benchmarks.portable --capability 80 --peers

Triton makes the code of the capability, with its tiles, `mma.sync` and `cp.async`; ptxas assembles it for this GPU. So
tiles of 99 and 163 KB and the path without `wgmma` are checked and timed on Hopper. From a time that fills the GPU
follows a prediction for others: `predicted_us`. One capability a process: Triton keeps what it compiled.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks import common, sparse_attention
from benchmarks.mixtures import shape

CLOCK_GHZ = 1.98  # an H100 or H200 whose power limit does not hold it back
SHAPES = ((1, 16), (32, 16), (128, 16), (512, 16), (1, 64), (32, 64), (128, 64), (1, 128), (32, 128), (128, 128))
FULL = 128  # tokens that fill every GPU below


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


def cases(arguments: argparse.Namespace) -> Iterator[common.Case]:
    plain = {"request_local": False, "topk_length": False, "deterministic": False, "waves": (), "q_halves": False}
    options = argparse.Namespace(**{**vars(arguments), **plain})
    for cache_format in arguments.cache_formats:
        for num_tokens, num_heads in arguments.shapes:
            kind = sparse_attention.Kind()
            yield sparse_attention.build_paged(num_tokens, num_heads, 2048, cache_format, 8192, kind, options)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status, 1 if a result was wrong."""
    parser = common.argument_parser("portable")
    parser.add_argument("--capability", type=int, required=True, help="80, 86, 89, 90 or 120")
    parser.add_argument("--cache-formats", type=common.names, default=["fp8_ds_mla", "bf16"])
    parser.add_argument("--shapes", type=shape, default=SHAPES, help="tokens x heads, e.g. 128x16")
    parser.add_argument("--peers", action="store_true", help="time FlashMLA beside them")
    arguments = parser.parse_args(argv)
    compile_for(arguments.capability)
    torch.manual_seed(arguments.seed)
    device = torch.device(arguments.device)
    machine = common.describe_machine(device)
    floors = common.measure_floors(device, arguments.quick)
    gpus = [gpu for gpu in GPUS if gpu.capability == arguments.capability]
    print(f"{machine['device']}, torch {machine['torch']}; Triton compiles for capability {arguments.capability}")
    print(common.HEADER + "".join(f"  predicted us, {gpu.name}" for gpu in gpus))
    passed = True
    for case in cases(arguments):
        rows = common.measure(case, ["triton"], arguments.iterations, floors)
        tokens = case.shape["T"]
        for number, row in enumerate(rows):
            text, passed = common.format_row(row), passed and row.passed
            if number == 0 and isinstance(tokens, int) and tokens >= FULL and device.type == "cuda":
                sms = torch.cuda.get_device_properties(device).multi_processor_count
                given = row.median_us, sms
                text += "".join(f"  {predicted_us(*given, gpu, case.bytes_moved, case.flops):.0f}" for gpu in gpus)
            print(text, flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
