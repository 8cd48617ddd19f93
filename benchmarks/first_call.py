"""Times of the first call of a process: python -m benchmarks.first_call.

Each row is a process of its own on the GPU, with empty caches and no home that can be written to. It imports torch and
makes the CUDA context, which every program does, then imports mla_ops, makes the tensors, and times the first call up
to its end on the device, and a later one. Code comes

- from the archive of a wheel (`make wheel`), if it is beside the sources,
- from NVRTC, as without an archive, or
- from Triton, its cache empty or left by a process before.

The exit status is 1 if a first call from the archive takes longer than `--limit`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OPS = ("attention", "write")
NO_HOME = "/proc/no-home"  # a folder that nobody can write to


class Way(NamedTuple):
    """The place that a process has its code from."""

    name: str
    lowering: str
    archive: bool = False
    warm: bool = False


WAYS = (
    Way("archive", "hopper", archive=True),
    Way("NVRTC", "hopper"),
    Way("Triton, empty cache", "triton"),
    Way("Triton, warm cache", "triton", warm=True),
)


class Times(NamedTuple):
    """Seconds of one process."""

    import_torch: float
    context: float
    import_mla_ops: float
    first: float
    later: float


def measure(op: str, cache_format: str, lowering: str, archive: bool) -> Times:
    """Measures in this process, which has imported nothing yet."""
    start = time.perf_counter()
    import torch

    imported = time.perf_counter()
    torch.zeros(1, device="cuda").add_(1).item()
    ready = time.perf_counter()
    import mla_ops
    from mla_ops import dispatch, formats

    ours = time.perf_counter()
    if not archive:
        from mla_ops.kernels.cuda.prebuilt import Archive
        from mla_ops.kernels.hopper import sources

        sources.SOURCES.prebuilt = Archive(Path(NO_HOME))
    entry = formats.FORMATS[cache_format]
    kv_cache = formats.allocate_cache(cache_format, 64, 64, device="cuda")
    head_dim = entry.head_dims[0]
    if op == "write":
        key = torch.randn(8, head_dim, device="cuda").bfloat16()
        slots = torch.arange(8, device="cuda")

        def call() -> None:
            torch.ops.mla.concat_and_cache(
                key[:, : head_dim - formats.ROPE_DIM],
                key[:, head_dim - formats.ROPE_DIM :],
                kv_cache,
                slots,
                cache_format,
            )
    else:
        q = torch.randn(8, 128, head_dim, device="cuda").bfloat16()
        indices = torch.randint(0, 64 * 64, (8, 2048), dtype=torch.int32, device="cuda")

        def call() -> None:
            mla_ops.paged_sparse_attention(q, kv_cache, indices, 192**-0.5, cache_format)

    def timed() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    with dispatch.override(lowering):
        first, later = timed(), timed()
    if archive:
        from mla_ops.kernels.hopper import sources

        if not sources.SOURCES.prebuilt.manifest:
            raise RuntimeError(f"{sources.SOURCES.prebuilt.path} is not there: make wheel, or install one")
    return Times(imported - start, ready - imported, ours - ready, first, later)


def in_a_process(op: str, cache_format: str, way: Way, triton_cache: Path) -> Times:
    """Raises RuntimeError with the process's own words if it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "MLA_OPS_"))}
    environment |= {"HOME": NO_HOME, "XDG_CACHE_HOME": NO_HOME, "CUDA_CACHE_DISABLE": "1"}
    if way.lowering == "triton":
        environment["TRITON_CACHE_DIR"] = str(triton_cache)
    command = [sys.executable, "-m", __spec__.name, "--child", op, cache_format, way.lowering, str(int(way.archive))]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"{op}, {cache_format}, {way.name}: {finished.stderr[-2000:]}")
    return Times(**json.loads(finished.stdout.splitlines()[-1]))


def measured_ways(
    ops: list[str], cache_formats: list[str], repeats: int
) -> Iterator[tuple[str, str, Way, list[Times]]]:
    """NVRTC compiles attention once a format, for it takes long."""
    for op in ops:
        for cache_format in cache_formats:
            with tempfile.TemporaryDirectory() as folder:
                caches = [Path(folder, str(i)) for i in range(repeats)]
                for way in WAYS:
                    if op == "attention" and way.lowering == "triton":
                        continue  # Hopper's was the first choice before there was an archive
                    few = caches[:1] if op == "attention" and not way.archive else caches
                    yield op, cache_format, way, [in_a_process(op, cache_format, way, cache) for cache in few]


def main(argv: list[str] | None = None) -> int:
    """Prints a table; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_call",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--cache-formats", nargs="+", default=["fp8_ds_mla"])
    parser.add_argument("--repeats", type=int, default=3, help="processes of each row")
    parser.add_argument("--limit", type=float, default=0.3, help="seconds of a first call from the archive")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        op, cache_format, lowering, archive = arguments.child
        print(json.dumps(measure(op, cache_format, lowering, archive == "1")._asdict()))
        return 0
    import torch

    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    print("Seconds, medians: the first call of a process up to its end on the GPU, and a later one. No writable home.")
    header = ("op", "format", "code from", "processes", "import mla_ops", "first call", "worst", "later call")
    print("{:10} {:14} {:20} {:>9} {:>15} {:>11} {:>8} {:>11}".format(*header))
    slow = False
    for op, cache_format, way, times in measured_ways(arguments.ops, arguments.cache_formats, arguments.repeats):
        middle = Times(*map(statistics.median, zip(*times, strict=True)))
        worst = max(each.first for each in times)
        slow |= way.archive and worst > arguments.limit
        print(
            f"{op:10} {cache_format:14} {way.name:20} {len(times):9} {middle.import_mla_ops:15.3f} "
            f"{middle.first:11.3f} {worst:8.3f} {middle.later:11.5f}",
            flush=True,
        )
    if slow:
        print(f"a first call from the archive took longer than {arguments.limit} s")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
