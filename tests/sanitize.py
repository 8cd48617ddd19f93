"""compute-sanitizer over every Hopper kernel at small shapes, results held against float64.

    python tests/sanitize.py [memcheck racecheck] [--only "64 heads"] [--logs FOLDER]

Needs a Hopper GPU and compute-sanitizer. Prints what was reported by kind, and a table last; exits with 1 if anything
was. racecheck is slow, and has kernels of its own: `EVERY_LANE_ARRIVES` in ptx.cuh says why, docs/kernels/index.md what
it found. `sanitize_cases.py` has the cases.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from sanitize_cases import CASES, DEFINE, run_case

HERE = Path(__file__).resolve()
TOOLS = {
    "memcheck": ("--report-api-errors", "no"),  # cuda.bindings looks for functions that a driver may not have
    "racecheck": ("--racecheck-report", "all", "--print-limit", "100"),
}
CLEAN = "nothing"


def place_of(frames: list[str]) -> str:
    """Function and line: the innermost of an access's frames outside of headers whose functions are instructions."""
    instructions = "ptx.cuh", "memory.cuh", "arithmetic.cuh", "wgmma.cuh"
    frame = next((frame for frame in frames if not any(name in frame for name in instructions)), frames[0])
    line = re.search(r"[\w.]+\.cuh?:\d+", frame)
    function = re.search(r"([\w:~]+)(?:[<(+]| in |$)", frame)
    return " at ".join(found for found in (function and function[1], line and line[0]) if found) or frame


def kinds_of(report: str) -> Counter[str]:
    """racecheck's hazards by what wrote and what read: those that it prints one by one, and those that it sums up."""
    single: Counter[str] = Counter()
    summed: Counter[str] = Counter()
    sides: list[tuple[str, list[str], int]] = []  # access, frames, number of hazards with the first side

    def finish() -> None:
        if len(sides) > 1:
            (first, frames, _), *others = sides
            for access, other_frames, number in others:
                pair = sorted([f"{first} by {place_of(frames)}", f"{access} by {place_of(other_frames)}"])
                (summed if number else single)["; ".join(reversed(pair))] += number or 1
        sides.clear()

    for line in report.splitlines():
        text = line.lstrip("= ")
        if "hazard detected" in text or "SUMMARY" in text:
            finish()
        elif found := re.match(r"(\w+) Thread \([\d, ]+\) at (.+)", text):
            sides.append((found[1], [found[2]], 0))
        elif found := re.search(r"Race reported between (\w+) access at (.+)", text):
            finish()
            sides.append((found[1], [found[2]], 0))
        elif found := re.match(r"and (\w+) access at (.+?) \[(\d+) hazards?\]", text):
            sides.append((found[1], [found[2]], int(found[3])))
        elif sides and (found := re.match(r"Device Frame: ?(.+)", text)):
            sides[-1][1].append(found[1])
    finish()
    return single | summed


class Result(NamedTuple):
    """A tool's verdict on a case."""

    said: str
    seconds: float
    kinds: Counter[str]


def sanitize(sanitizer: str, tool: str, name: str, arguments: argparse.Namespace) -> Result:
    child = [sys.executable, str(HERE), tool, "--only", name, "--timeout", str(arguments.timeout), "--child"]
    child += ["--shipped"] * arguments.shipped
    environment = dict(os.environ)
    if tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # else tensors share allocations
    began = time.monotonic()
    process = subprocess.Popen(
        [sanitizer, "--tool", tool, *TOOLS[tool], "--error-exitcode", "9", *child],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        report, _ = process.communicate(timeout=arguments.timeout + 30)  # the case ends itself, the tool then tells
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool and the process that it watches
        report, _ = process.communicate()
    seconds = time.monotonic() - began
    if arguments.logs:
        (arguments.logs / f"{tool} {name}.txt".replace(" ", "_").replace(",", "")).write_text(report)
    kinds = kinds_of(report)
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.+)", report)
    if seconds > arguments.timeout:
        said = f"timeout after {arguments.timeout} s"
    elif not summary:
        said = f"failed: {next(iter(report.splitlines()[-1:]), '')}"
    elif process.returncode == 0 and not kinds and all(text.startswith("0 ") for text in summary):
        said = CLEAN
    else:
        said = "; ".join(summary)
        # a call that failed, or a result that is wrong
        said += "".join(f"; {line}" for line in re.findall(r"^[\w.]*(?:Error|Exception): .*", report, re.MULTILINE))
    return Result(said, seconds, kinds)


def results_of(sanitizer: str, arguments: argparse.Namespace, names: list[str]) -> Iterator[tuple[str, str, Result]]:
    """Yields reports as they come in."""
    pairs = [(tool, name) for tool in arguments.tools for name in names]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = [(*pair, pool.submit(sanitize, sanitizer, *pair, arguments)) for pair in pairs]
        for tool, name, future in running:
            yield tool, name, future.result()


def main() -> int:
    """Runs each tool over each case."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("tools", nargs="*", metavar="tool", help=f"of {', '.join(TOOLS)}; all without")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their names")
    parser.add_argument("--jobs", type=int, default=4, help="cases at one time")
    parser.add_argument("--timeout", type=int, default=120, help="seconds of a case")
    parser.add_argument("--logs", type=Path, help="folder for the tools' own words")
    parser.add_argument("--shipped", action="store_true", help=f"racecheck without {DEFINE}: what it reports then")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.tools) - set(TOOLS):
        parser.error(f"no such tool: {', '.join(sorted(unknown))}")
    if arguments.child:
        run_case(CASES[arguments.only], *arguments.tools, arguments.shipped, arguments.timeout)
        return 0
    arguments.tools = arguments.tools or list(TOOLS)
    names = [name for name in CASES if arguments.only in name]
    if not names:
        parser.error(f"no case has {arguments.only!r} in its name; there are: {'; '.join(CASES)}")
    folders = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
    sanitizer = shutil.which("compute-sanitizer", path=folders)
    if sanitizer is None:
        parser.exit(2, "compute-sanitizer is needed, which the CUDA toolkit brings\n")
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False).stdout
    print(*(line for line in version.splitlines() if "ersion" in line), flush=True)
    if arguments.logs:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    table: dict[str, list[str]] = {name: [] for name in names}
    clean = True
    for tool, name, (said, seconds, kinds) in results_of(sanitizer, arguments, names):
        print(f"{tool} {name}: {said} ({seconds:.0f} s)", flush=True)
        for kind, count in kinds.most_common():
            print(f"    {count} x {kind}", flush=True)
        table[name].append(said)
        clean &= said == CLEAN
    print(f"\n| case | {' | '.join(arguments.tools)} |\n{'|---' * (1 + len(arguments.tools))}|")
    for name, cells in table.items():
        print(f"| {name} | {' | '.join(cells)} |")
    return int(not clean)


if __name__ == "__main__":
    sys.exit(main())
