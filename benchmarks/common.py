"""Shared by all benchmarks: inputs, timing, floors, checks, tables.

A figure is the median time of one call. On a GPU it is a CUDA-graph replay between two events, after the L2 cache was
overwritten, so it holds no host time; lowerings alternate call by call over the same input sets. `--in-graph`
measures a call behind other kernels of a graph instead: a graph of overwrites of L2, each followed by the call, less
a graph of the overwrites. On a CPU it is `time.perf_counter` around one call. A case may ask for host time instead:
what an eager call costs the thread that makes it, over many calls that nobody waits for. The floor is the larger of
bytes over the measured copy bandwidth and FLOPs over the measured matmul rate, both measured in the same run. Each
row is checked against an independent formulation in float64 on its own random data; a row that fails its bound makes
the program exit with 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import mla_ops  # registers torch.ops.mla
from benchmarks import timing
from mla_ops import dispatch, formats

# Keys are the widths of a key. DeepSeek-V3's heads are 192 wide before absorption, V4's are 512 wide.
SOFTMAX_SCALES = {576: 192**-0.5, 512: 512**-0.5}


@dataclass(frozen=True)
class Check:
    """The largest error of one output against its reference, and what rounding can explain."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # False for NaN

    @property
    def severity(self) -> float:
        if self.error != self.error:
            return float("inf")
        return self.error / self.bound if self.bound else (float("inf") if self.error else 0.0)


@dataclass
class Peer:
    """A kernel of another project, called as its users call it, or another way to call ours, beside our lowerings.

    Attributes:
        runs, check: as in `Case`.
        bytes_moved: of one call, where it does other work than the case; None: as the case says, and as many FLOPs.
        poison: as in `Case`, where another project's op does not allocate what it writes.
        ours: whether it is another way to call ours; ratios to a peer are to the first that is not,
            or, if the case says so, to the fastest.
    """

    runs: Sequence[Callable[[], object]]
    check: Callable[[], list[Check]]
    bytes_moved: int | None = None
    poison: Callable[[], object] = lambda: None
    ours: bool = False


@dataclass
class Case:
    """One op at one shape.

    Attributes:
        call: what dispatch chooses a lowering by.
        shape: what the row is labelled with.
        runs: one callable for each input set; writes into buffers that outlive it, returns nothing.
        poison: overwrites what the first of `runs` writes, so that a lowering that writes nothing cannot pass.
        check: compares what the first of `runs` wrote with the reference.
        bytes_moved: bytes that one call has to read and write.
        flops: floating-point operations of one call's matrix products.
        peers: other projects' kernels on the same tensors, by the name that their rows bear.
        name: what the row is called where it is more than one op; `call` is then the op that lowerings differ in, and
            only that op is forced.
        host: measures the host time of eager calls.
        against_fastest: ratios to a peer are to the fastest one, not to the first.
    """

    call: dispatch.Call
    shape: dict[str, int | str]
    runs: Sequence[Callable[[], object]]
    poison: Callable[[], object]
    check: Callable[[], list[Check]]
    bytes_moved: int
    flops: int = 0
    peers: dict[str, Peer] = field(default_factory=dict)
    name: str = ""
    host: bool = False
    against_fastest: bool = False


@dataclass
class Row:
    """One line of the table."""

    op: str
    shape: dict[str, int | str]
    lowering: str
    reason: str | None = None
    median_us: float = 0.0
    p10_us: float = 0.0
    p90_us: float = 0.0
    timings: int = 0
    launches: int | None = None
    bytes_per_second: float = 0.0
    flops_per_second: float = 0.0
    floor_us: float = 0.0
    ratio_to_first: float | None = None
    ratio_to_peer: float | None = None
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class Floors:
    """Rates that this machine reaches, measured in this run. `launch_us` is a replay that does next to nothing."""

    copy_bytes_per_second: float
    matmul_flops_per_second: float
    matmul_dtype: str
    launch_us: float = 0.0

    def microseconds(self, bytes_moved: int, flops: int) -> float:
        return 1e6 * max(bytes_moved / self.copy_bytes_per_second, flops / self.matmul_flops_per_second)


def argument_parser(family: str) -> argparse.ArgumentParser:
    """The options that all families share."""
    parser = argparse.ArgumentParser(
        prog=f"bench {family}",
        description=f"Benchmarks of the family '{family}'. Several values are separated by commas: 1,32,128.",
    )
    parser.add_argument("--device", type=_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--lowerings",
        type=names_of(("auto", *dispatch.BACKENDS).index, "auto", *dispatch.BACKENDS),
        default=["auto"],
        help="comma-separated, e.g. triton,hopper,flash_mla; 'auto' is what dispatch chooses. Ratios are to the first",
    )
    parser.add_argument("--iterations", type=int, default=100, help="timings a row and lowering; fewer on a slow CPU")
    parser.add_argument(
        "--sets", type=int, default=0, help="input sets that the timings cycle through (default 4; 2 on CPU)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes: checks that everything runs, measures nothing"
    )
    parser.add_argument(
        "--in-graph", action="store_true", help="time calls behind other kernels of a graph, not the graph's launch"
    )
    parser.add_argument("--json", type=_file, help="also write the rows to this file, beside those of other families")
    return parser


def integers(value: str) -> list[int]:
    """Type of an option like `1,8,32`."""
    return [int(part) for part in value.split(",") if part]


def names(value: str) -> list[str]:
    """Type of an option like `fp8_ds_mla,bf16`."""
    return [part for part in value.split(",") if part]


def names_of(find: Callable[[str], object], *expected: str, separator: str = ",") -> Callable[[str], list[str]]:
    """Type of an option of several names; `find` raises KeyError, TypeError or ValueError for others."""

    def known(name: str) -> bool:
        try:
            find(name)
        except (KeyError, TypeError, ValueError):
            return False
        return True

    def parse(value: str) -> list[str]:
        found = [part for part in value.split(separator) if part]
        unknown = [name for name in found if not known(name)]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}, only {', '.join(expected)}")
        return found

    return parse


cache_formats = names_of(formats.LATENT_FORMATS.index, *formats.LATENT_FORMATS)


def _device(value: str) -> str:
    if value.startswith("cuda") and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("there is no CUDA device")
    return value


def _file(value: str) -> Path:
    """Looked at before hours of measurement, not behind them."""
    if not Path(value).parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {Path(value).parent}")
    return Path(value)


def number_of_sets(arguments: argparse.Namespace) -> int:
    return int(arguments.sets) or (4 if arguments.device.startswith("cuda") else 2)


def generator(arguments: argparse.Namespace) -> torch.Generator:
    return torch.Generator(arguments.device).manual_seed(arguments.seed)


def max_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference; NaN if either has one where the other has not. Equal infinities differ by 0."""
    difference = (actual.double() - expected.double()).abs()
    same = (actual.double() == expected.double()) | (actual.isnan() & expected.isnan())
    return float(torch.where(same, 0.0, difference).max()) if actual.numel() else 0.0


def exact(name: str, actual: torch.Tensor, expected: torch.Tensor) -> Check:
    """The check of an output that must be right to the bit."""
    return Check(name, max_error(actual, expected), 0.0)


def _copy_bandwidth(device: torch.device, quick: bool) -> float:
    size = 2**30 if device.type == "cuda" else 2**26
    size = size // 64 if quick else size
    source, target = (torch.empty(size, dtype=torch.uint8, device=device).zero_() for _ in range(2))
    return 2 * size / _median_seconds(lambda: target.copy_(source), device)


def _matmul_rate(device: torch.device, quick: bool) -> float:
    on_gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    size = size // 8 if quick else size
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    c = torch.empty_like(a)
    return 2 * size**3 / _median_seconds(lambda: torch.mm(a, b, out=c), device)


def _median_seconds(run: Callable[[], object], device: torch.device, repetitions: int = 15) -> float:
    run()
    if device.type != "cuda":
        return 1e-6 * statistics.median(timing.time_cpu(run) for _ in range(repetitions))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return 1e-3 * statistics.median(start.elapsed_time(end) for start, end in events)


def measure_floors(device: torch.device, quick: bool = False) -> Floors:
    """Copy bandwidth (read + write) and matmul rate (bfloat16 on GPU, float32 on CPU) of this machine."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    return Floors(_copy_bandwidth(device, quick), _matmul_rate(device, quick), dtype, _launch_us(device))


def _launch_us(device: torch.device) -> float:
    """Median of what a call takes that writes one number, taken as every figure is."""
    run = torch.zeros(1, device=device).zero_
    if device.type != "cuda":
        return statistics.median(timing.time_cpu(run) for _ in range(15))
    replay, _ = timing.capture(run, "")
    return statistics.median(timing.timings_cuda({"": [replay]}, 15)[""])


def _under(name: str, call: dispatch.Call, run: Callable[[], object]) -> Callable[[], object]:
    """`run` with that lowering forced for the op of `call`; as it is for a peer, or where dispatch chooses it."""
    if name not in dispatch.BACKENDS or name == _resolve("auto", call)[0]:
        return run

    def forced() -> None:
        with dispatch.override(**{call.op.partition(".")[0]: name}):
            run()

    return forced


def _resolve(lowering: str, call: dispatch.Call) -> tuple[str, str | None]:
    """Name of the lowering and the reason why it cannot run `call`."""
    if lowering != "auto":
        return lowering, dispatch.unsupported_reason(lowering, call)
    try:
        return dispatch.select_name(call), None
    except NotImplementedError as error:
        return "auto", str(error)


def measure(
    case: Case, lowerings: Sequence[str], iterations: int, floors: Floors, *, in_graph: bool = False
) -> list[Row]:
    """Runs one case under each lowering: checks it, times it, compares it with the floor and the first lowering."""
    name_of_rows = case.name or case.call.op
    rows: list[Row] = []
    ready: timing.Replays = {}
    calls: timing.Replays = {}
    captures = case.call.device.type == "cuda" and not case.host

    def prepare(row: Row, runs: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
        runs = calls[row.lowering] = [_under(row.lowering, case.call, run) for run in runs]
        if not captures:
            return runs
        replays, counts = zip(*(timing.capture(run, row.lowering) for run in runs), strict=True)
        row.launches = counts[0]
        return list(replays)

    for wanted in lowerings:
        name, reason = _resolve(wanted, case.call)
        row = Row(name_of_rows, case.shape, name, reason)
        rows.append(row)
        if reason is not None:
            continue
        if name in ready:
            twin = next(other for other in rows if other.lowering == name)
            row.checks, row.launches = twin.checks, twin.launches
            continue
        ready[name] = runs = prepare(row, case.runs)
        case.poison()
        runs[0]()
        row.checks = case.check()
        for run in runs[1:]:
            run()
    for name, peer in case.peers.items():
        row = Row(name_of_rows, case.shape, name)
        rows.append(row)
        ready[name] = runs = prepare(row, peer.runs)
        peer.poison()
        for run in runs:
            run()
        row.checks = peer.check()
    if case.host:
        timings = timing.timings_host(ready, iterations, case.call.device)
    elif captures and in_graph:
        timings = timing.timings_in_graph(calls, iterations)
    else:
        timings = (timing.timings_cuda if captures else timing.timings_cpu)(ready, iterations)
    _fill(rows, case, timings, floors)
    return rows


def _fill(rows: list[Row], case: Case, timings: dict[str, list[float]], floors: Floors) -> None:
    """Writes what the timings say into the rows. Host time has no floor."""
    first = next((row.lowering for row in rows if row.reason is None), None)
    peers = [name for name, other in case.peers.items() if not other.ours]
    peer = next(iter(peers), None)
    if case.against_fastest:
        peer = min(peers, key=lambda name: statistics.median(timings[name]), default=None)
    for row in rows:
        if row.reason is not None:
            continue
        values = sorted(timings[row.lowering])
        row.timings = len(values)
        row.median_us = statistics.median(values)
        row.p10_us, row.p90_us = values[len(values) // 10], values[(len(values) * 9) // 10]
        row.ratio_to_first = row.median_us / statistics.median(timings[first or row.lowering])
        row.ratio_to_peer = row.median_us / statistics.median(timings[peer]) if peer is not None else None
        if case.host:
            continue
        own = case.peers[row.lowering].bytes_moved if row.lowering in case.peers else None
        bytes_moved, flops = (case.bytes_moved, case.flops) if own is None else (own, 0)
        row.bytes_per_second = 1e6 * bytes_moved / row.median_us
        row.flops_per_second = 1e6 * flops / row.median_us
        row.floor_us = floors.microseconds(bytes_moved, flops)


HEADER = (
    f"{'op and shape':<66} {'lowering':<19} {'µs':>9} {'p10–p90':>19} {'n':>2} {'GB/s':>7} {'TFLOP/s':>8} "
    f"{'floor µs':>9} {'×floor':>7} {'ratio':>6} {'peer':>6}  max error (bound)"
)


def format_row(row: Row) -> str:
    """One line of the table."""
    label = f"{row.op} " + " ".join(f"{key}={value}" for key, value in row.shape.items())
    head = f"{label:<66} {row.lowering:<19}"
    if row.reason is not None:
        return f"{head} not run: {row.reason}"
    worst = max(row.checks, key=lambda check: check.severity)
    verdict = "" if row.passed else "  WRONG"
    spread = f"{row.p10_us:.1f}–{row.p90_us:.1f}"
    launches = "-" if row.launches is None else str(row.launches)
    rate = f"{row.bytes_per_second / 1e9:.1f}" if row.bytes_per_second else "-"
    flops = f"{row.flops_per_second / 1e12:.2f}" if row.flops_per_second else "-"
    floor, over = (f"{row.floor_us:.2f}", f"{row.median_us / row.floor_us:.1f}") if row.floor_us else ("-", "-")
    to_peer = "-" if row.ratio_to_peer is None else f"{row.ratio_to_peer:.2f}"
    return (
        f"{head} {row.median_us:>9.1f} {spread:>19} {launches:>2} {rate:>7} {flops:>8} {floor:>9} {over:>7} "
        f"{row.ratio_to_first:>6.2f} {to_peer:>6}  {worst.name} {worst.error:.2g} ({worst.bound:.2g}){verdict}"
    )


def describe_machine(device: torch.device) -> dict[str, str]:
    """Facts of the machine that a reader needs to judge the figures."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name}, SM{properties.major}{properties.minor}, {properties.multi_processor_count} SMs"
    else:
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "-",
        "python": platform.python_version(),
    }


def json_text(content: dict[str, Any]) -> str:
    """Families of rows as JSON, a line for each row: so a run can be compared with an earlier one."""
    families = []
    for family, table in content.items():
        head = json.dumps({name: value for name, value in table.items() if name != "rows"})[:-1]
        rows = ",\n".join(json.dumps(row) for row in table["rows"])
        families.append(f'"{family}": {head}, "rows": [\n{rows}\n]}}')
    return "{\n" + ",\n".join(families) + "\n}\n"


def run_benchmark(family: str, cases: Iterable[Callable[[], Case]], arguments: argparse.Namespace) -> int:
    """Measures and prints every case. Returns the exit status: 0, or 1 if a row failed its check.

    Args:
        family: name of the table.
        cases: builders, so that only one case's tensors are alive at a time.
        arguments: what `argument_parser` parsed.
    """
    device = torch.device(arguments.device)
    torch.manual_seed(arguments.seed)
    machine = describe_machine(device)
    floors = measure_floors(device, arguments.quick)
    print(f"\n{family}: " + ", ".join(f"{key} {value}" for key, value in machine.items()))
    print(
        f"measured in this run: copy {floors.copy_bytes_per_second / 1e9:.1f} GB/s read + write, "
        f"{floors.matmul_dtype} matmul {floors.matmul_flops_per_second / 1e12:.3f} TFLOP/s, "
        f"a call that writes one number {floors.launch_us:.1f} µs"
    )
    if arguments.in_graph:
        print("each call behind an overwrite of L2 in one graph; the graph's launch is not in its time")
    print(HEADER, flush=True)
    rows: list[Row] = []
    iterations = timing.MINIMUM_TIMINGS if arguments.quick else arguments.iterations
    with torch.no_grad():
        for build in cases:
            new_rows = measure(build(), arguments.lowerings, iterations, floors, in_graph=arguments.in_graph)
            for row in new_rows:
                print(format_row(row), flush=True)
            rows += new_rows
    if arguments.json is not None:
        content = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        content[family] = {
            "mla_ops": mla_ops.__version__,
            "machine": machine,
            "floors": asdict(floors),
            "rows": [{**asdict(row), "passed": row.passed} for row in rows],
        }
        arguments.json.write_text(json_text(content))
    failed = [row for row in rows if not row.passed]
    for row in failed:
        print(f"WRONG: {format_row(row)}", file=sys.stderr)
    return 1 if failed else 0
