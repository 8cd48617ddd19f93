"""The differential fuzzer: every op on a GPU against the reference on the CPU, over random calls: `make fuzz`.

    python -m fuzz --first 5000000 --seconds 300 --report ../docs/results/fuzz.txt  from tests/, on a GPU
    python -m fuzz --add result.txt --report ../docs/results/fuzz.txt               the runs of another page, too
    python -m fuzz --seed 123                                                       one case again

A case is a function of its seed: op, shapes, strides, storage offsets, values, garbage among indices and block tables,
one call in eight malformed. Cases run in child processes, each over seeds of its own; one that dies is begun again
behind the case that killed it, which counts as a finding. Children are dealt to all GPUs and share each through CUDA's
Multi-Process Service, without which a GPU runs one of them at a time. Without a GPU, Triton's interpreter stands in.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .compilations import BusyError, Compilations
from .page import ABSENT, REFUSED, Page

TESTS = Path(__file__).resolve().parent.parent
SECONDS_A_CASE = 120  # one that takes longer hangs
SECONDS_A_REPORT = 20
LOCKS = "MLA_OPS_FUZZ_LOCKS"  # the variable that names the folder of the children's locks


def work(first: int, last: int, step: int, device: str) -> int:
    """A child: runs its seeds, and writes a line before and after each."""
    import torch

    from .run import run_case

    torch.set_num_threads(1)
    compilations = Compilations(Path(os.environ[LOCKS])) if device != "cpu" else None
    if compilations is not None:
        compilations.install()
    for seed, again in without_waiting(range(first, last, step)):
        print(json.dumps({"begins": seed}), flush=True)
        try:
            op_name, lowering, outcome = run_case(seed, device)
            line = {"seed": seed, "op": op_name, "lowering": lowering, "outcome": outcome}
        except BusyError:
            line = {"seed": seed, "later": True}
            again()
        except AssertionError as error:
            line = {"seed": seed, "finding": str(error)[:600]}
        except Exception as error:  # noqa: BLE001 (a finding as well, unless the device is lost)
            line = {"seed": seed, "finding": f"{type(error).__name__}: {error}"[:600]}
            if "CUDA error" in str(error):
                print(json.dumps(line), flush=True)
                os._exit(3)
        if compilations is not None:
            compilations.release()
        print(json.dumps(line), flush=True)
    return 0


def without_waiting(seeds: Iterable[int]) -> Iterator[tuple[int, Callable[[], None]]]:
    """Seeds, each with a function that puts it off for a second: others come first while there are any."""
    later: deque[tuple[float, int]] = deque()
    fresh = iter(seeds)
    while True:
        seed = later[0][1] if later and later[0][0] <= time.monotonic() else next(fresh, None)
        if seed is None and not later:
            return
        if seed is None:
            time.sleep(0.02)
            continue
        if later and seed == later[0][1]:
            later.popleft()
        yield seed, lambda seed=seed: later.append((time.monotonic() + 1.0, seed))


def _watch(child: subprocess.Popen[str], lines: queue.Queue[dict[str, Any]]) -> None:
    """Hands on what a child writes; kills it when a case takes too long."""
    assert child.stdout is not None
    timer = threading.Timer(2 * SECONDS_A_CASE, child.kill)
    timer.start()
    for text in child.stdout:
        timer.cancel()
        timer = threading.Timer(SECONDS_A_CASE, child.kill)
        timer.start()
        if text.startswith("{"):
            lines.put(json.loads(text))
    timer.cancel()


@contextmanager
def shared_gpus(count: int) -> Iterator[list[dict[str, str]]]:
    """The environments of children: one a GPU, in which processes share it if CUDA's service for that is installed."""
    control = shutil.which("nvidia-cuda-mps-control")
    with tempfile.TemporaryDirectory() as folder:
        service = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        surroundings = {**os.environ, **service}
        if control is None or count == 0 or subprocess.run([control, "-d"], env=surroundings, check=False).returncode:
            devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
            yield [{"CUDA_VISIBLE_DEVICES": device} for device in devices]
            return
        try:
            # the service sees this process's GPUs, and its clients count among those
            yield [{"CUDA_VISIBLE_DEVICES": str(number), **service} for number in range(count)]
        finally:
            subprocess.run([control], env=surroundings, input="quit -t 5\n", text=True, check=False)


CHILD = [sys.executable, "-m", "fuzz", "--child"]


def drive(
    first: int,
    cases: int,
    workers: int,
    device: str,
    seconds: float,
    environments: list[dict[str, str]],
    locks: str,
    command: list[str] = CHILD,
) -> tuple[Counter[tuple[str, ...]], list[str], int]:
    """Runs seeds `first` to `first + cases`, as many as fit in the time, in children of `command`.

    Args:
        environments: variables of the children, which take them in turn.
        locks: a folder, in which children lock the kernels that they compile.

    Returns:
        counts by op, lowering and outcome; findings; cases that ran or were refused.
    """
    counts: Counter[tuple[str, ...]] = Counter()
    findings: list[str] = []
    lock, last, done = threading.Lock(), first + cases, [0]
    deadline = time.monotonic() + seconds
    path = os.pathsep.join(filter(None, (str(TESTS.parent), os.environ.get("PYTHONPATH"))))

    own = {LOCKS: locks, "PYTHONPATH": path}

    def run_share(start: int) -> None:
        while start < last and time.monotonic() < deadline:
            seeds = [*command, f"{start},{last},{workers},{device}"]
            child = subprocess.Popen(
                seeds,
                cwd=TESTS,
                env={**os.environ, **own, **environments[(start - first) % workers % len(environments)]},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            lines: queue.Queue[dict[str, Any]] = queue.Queue()
            reader = threading.Thread(target=_watch, args=(child, lines))
            reader.start()
            begun = ended = furthest = start - workers
            while reader.is_alive() or not lines.empty():
                if time.monotonic() > deadline:
                    child.kill()
                try:
                    line = lines.get(timeout=0.5)
                except queue.Empty:
                    continue
                if "begins" in line:
                    begun = line["begins"]
                    furthest = max(furthest, begun)
                    continue
                ended, furthest = line["seed"], max(furthest, line["seed"])
                with lock:
                    if "later" in line:
                        continue
                    done[0] += 1
                    if "finding" in line:
                        findings.append(f"seed {ended}: {line['finding']}")
                    else:
                        counts[line["op"], line["lowering"], line["outcome"]] += 1
            child.wait()
            if time.monotonic() > deadline or child.returncode == 0:
                return
            if begun < start:
                with lock:
                    findings.append(f"a child ended with status {child.returncode} before its first case")
                return
            if begun != ended:
                with lock:
                    done[0] += 1
                    findings.append(f"seed {begun}: its process died with status {child.returncode}")
            start = furthest + workers

    threads = [threading.Thread(target=run_share, args=(first + number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    begun_at = time.monotonic()
    for thread in threads:
        while thread.is_alive():
            thread.join(SECONDS_A_REPORT)
            if thread.is_alive():
                print(f"{time.monotonic() - begun_at:.0f} s: {done[0]:,} cases, {len(findings)} findings", flush=True)
    return counts, sorted(findings), done[0]


def page_of(
    counts: Counter[tuple[str, ...]], findings: list[str], seconds: float, seeds: str, machine: str, commit: str
) -> Page:
    """The page of one run."""
    cases = sum(counts.values()) + len(findings)
    run = f"{cases:,} cases in {seconds:.0f} s, {len(findings)} findings; seeds {seeds}; {machine}; commit {commit}"
    page = Page([run], findings=findings)
    for (op, lowering, outcome), count in counts.items():
        page.counts[op, lowering if outcome == "ran" else REFUSED if outcome == REFUSED else ABSENT] += count
    return page


def add_to(path: Path, page: Page) -> None:
    """Writes the page of all runs: those that are there already, then these."""
    all_runs = Page.read(path)
    all_runs.add(page)
    path.write_text(all_runs.text())


def commit_here() -> str:
    """The commit that this checkout has, "unknown" where there is no repository."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Runs the fuzzer; returns the exit status: 1 if it found something."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=0, help="default 100,000 on a GPU, 200 without")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this case alone")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop then")
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 1, 1))
    parser.add_argument("--report", type=Path, help="a page, to which this run is added")
    parser.add_argument("--add", type=Path, help="adds the runs of this page to that of --report, and runs nothing")
    parser.add_argument("--commit", help="that was run, here or by the runs of --add; default: the repository's")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.add:
        page = Page.read(arguments.add)
        if arguments.commit:
            page.runs = [f"{run.rpartition('; commit ')[0]}; commit {arguments.commit}" for run in page.runs]
        add_to(arguments.report, page)
        return 0
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    if arguments.child:
        first, last, step, device = arguments.child.split(",")
        return work(int(first), int(last), int(step), device)
    device = "cuda" if on_gpu else "cpu"
    if arguments.seed is not None:
        from .run import describe, run_case

        print(describe(arguments.seed))
        print(*run_case(arguments.seed, device))
        return 0
    cases = arguments.cases or (100_000 if on_gpu else 200)
    start = time.monotonic()
    gpus = torch.cuda.device_count() if on_gpu else 0
    with shared_gpus(gpus) as environments, tempfile.TemporaryDirectory() as locks:
        counts, findings, done = drive(
            arguments.first, cases, arguments.workers, device, arguments.seconds, environments, locks
        )
    names = f"{gpus} x {torch.cuda.get_device_name()}" if on_gpu else "the interpreter"
    machine, commit = f"{names}, torch {torch.__version__}", arguments.commit or commit_here()
    seeds = f"from {arguments.first:,}"
    page = page_of(counts, findings, time.monotonic() - start, seeds, machine, commit)
    print(page.text())
    if arguments.report is not None:
        add_to(arguments.report, page)
    if not done:
        print("no case was run", file=sys.stderr)
    return 1 if findings or not done else 0


if __name__ == "__main__":
    sys.exit(main())
