"""FlashMLA's own Hopper test programs over `mla_ops`: how many of their cases pass.

    python -m scripts.flash_mla_programs FOLDER [--processes 14] [--seconds 60] [--programs sparse_decoding ...]

FOLDER is `tests/` of a checkout of deepseek-ai/FlashMLA at its last commit with Hopper kernels (9241ae3). The programs
are not changed: their cases, inputs, references and tolerances are theirs. A case counts as refused where it has
several key heads. Processes take cases of decoding in a shuffled order, as many at a time as the GPU has room for,
until they or the seconds are spent. `--out FILE` keeps what came of each; one that is there is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from mla_ops.integrations import flash_mla
from tests.fuzz.__main__ import shared_gpus

PROGRAMS = ("sparse_prefill", "dense_decoding", "sparse_decoding")
OUTCOMES = ("passed", "refused", "failed", "no room")
GIB = 2**30
SECONDS_A_CASE = 15  # one that takes longer hangs


def does_not_raise(test: Callable[..., None], case: object) -> bool:
    test(case)
    return True


def is_correct(test: Callable[..., Any], case: object) -> bool:
    return bool(test(case).is_correct)


def dense_cases(module: Any) -> list[tuple[Any, Callable[[], bool]]]:
    cases: list[Any] = []
    test, module.test_flash_mla = module.test_flash_mla, cases.append
    module.main(torch.bfloat16)
    return [(case, partial(does_not_raise, test, case)) for case in cases]


def sparse_cases(module: Any) -> list[tuple[Any, Callable[[], bool]]]:
    cases = [case.to_test_param() for case in module.gen_testcase()]
    for seed, case in enumerate(cases):
        case.seed = seed
    return [(case, partial(is_correct, module.test_flash_mla, case)) for case in cases]


def gib_of(case: Any) -> float:
    """Memory that a case takes, about: its caches as they are made, and its reference's keys in float32."""
    if not hasattr(case, "decode"):
        return 0.5 + 5 * case.b * case.s_k * case.d * case.h_kv * 4 / GIB
    decode = case.decode
    keys = decode.b * case.s_q * (case.topk + (decode.extra_topk or 0))
    caches = [(case.s_kv, decode.block_size), (decode.extra_s_k or 0, decode.extra_block_size or 64)]
    slots = [decode.b * (3.5 * size + 4 * block) for size, block in caches]  # the longest of random lengths, padded
    # made with one block, slot and head more than needed; then quantized, and converted back
    made = [6 * (case.d_qk + 128) * count * (1 + 1 / block) for count, (_, block) in zip(slots, caches, strict=True)]
    return 0.5 + (max(made) + sum(slots) * 2000 + keys * case.d_qk * 11) / GIB


class Queue:
    """The cases of a program, for several processes; each takes the next one that there is room for."""

    def __init__(self, done: set[int], gib: float) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.changed, self.gib = spawn.Condition(), gib
        self.taken, self.free = spawn.Array("b", 1 << 14, lock=False), spawn.Value("d", gib, lock=False)
        for number in done:
            self.taken[number] = 1

    def take(self, needs: Sequence[float], order: Sequence[int], end: float) -> int | None:
        with self.changed:
            while time.time() < end:
                taken = bytes(self.taken)
                waiting = [number for number in order if not taken[number]]
                if not waiting:
                    return None
                for number in waiting:
                    if min(needs[number], self.gib) <= self.free.value:
                        self.taken[number] = 1
                        self.free.value -= min(needs[number], self.gib)
                        return number
                self.changed.wait(max(0.0, end - time.time()))
        return None

    def give_back(self, need: float) -> None:
        with self.changed:
            self.free.value += min(need, self.gib)
            self.changed.notify_all()


def load(name: str, folder: Path) -> list[tuple[Any, Callable[[], bool]]]:
    sys.path.insert(0, str(folder))
    flash_mla.install()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda:0")
    torch.set_float32_matmul_precision("high")
    module = importlib.import_module(f"test_flash_mla_{name}")
    return (dense_cases if name == "dense_decoding" else sparse_cases)(module)


def run_cases(name: str, folder: Path, end: float, queue: Queue, said: Any) -> None:
    """A process: tells how many cases there are, and of each that it took what came of it, and what a failure said."""
    torch.set_num_threads(1)
    cases = load(name, folder)
    order, needs = random.Random(0).sample(range(len(cases)), len(cases)), [gib_of(case) for case, _ in cases]
    said.put(("cases", len(cases)))
    while (number := queue.take(needs, order, end)) is not None:
        case, run = cases[number]
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                outcome = "passed" if run() else "failed"
        except NotImplementedError:
            outcome = "refused"
        except torch.OutOfMemoryError:
            outcome = "no room"
        except Exception as error:  # noqa: BLE001 (a failure, whatever it is)
            outcome = "failed"
            output.write(f"{type(error).__name__}: {error}")
            if "CUDA error" in str(error):  # the device is lost
                end = 0.0
        if end:
            torch.cuda.empty_cache()
        queue.give_back(needs[number])
        said.put((number, outcome, f"{case}\n{output.getvalue()[-900:]}" if outcome == "failed" else ""))


def run_program(name: str, arguments: argparse.Namespace, kept: dict[str, Any]) -> None:
    """Runs the cases of a program that have no outcome in `kept`, and adds theirs."""
    spawn, end, outcomes = multiprocessing.get_context("spawn"), time.time() + arguments.seconds, kept["outcomes"]
    done = {int(number) for number, outcome in outcomes.items() if outcome != "no room"}
    queue, said = Queue(done, arguments.gib), spawn.Queue()
    work = (name, arguments.folder, end, queue, said)
    processes = [spawn.Process(target=run_cases, args=work) for _ in range(arguments.processes)]
    for process in processes:
        process.start()
    failures = 0
    while time.time() < end + SECONDS_A_CASE:
        try:
            what, *values = said.get(timeout=1)
        except Empty:
            if not any(process.is_alive() for process in processes):
                break
            continue
        if what == "cases":
            (kept["cases"],) = values
            continue
        outcomes[str(what)], output = values
        failures += values[0] == "failed"
        if values[0] == "failed" and failures <= 4:
            print(f"failed: {output}", flush=True)
    for process in processes:
        process.kill()
        process.join()
    if lost := sum(process.exitcode != 0 for process in processes):
        print(f"{name}: {lost} processes were lost", flush=True)


def run_prefill(arguments: argparse.Namespace) -> Counter[str]:
    """FlashMLA's program as it is, which has its cases in its body; it says how many there are and which failed."""
    program = arguments.folder / "test_flash_mla_sparse_prefill.py"
    command = [sys.executable, "-m", "mla_ops.integrations.flash_mla", str(program)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=2 * arguments.seconds, check=False)
    except subprocess.TimeoutExpired as error:
        print(f"sparse_prefill: still running after {error.timeout:.0f} s", flush=True)
        return Counter()
    last = run.stdout.strip().splitlines()[-1:]
    print(f"sparse_prefill: {last} {run.stderr[-900:]}", flush=True)
    found = re.search(r"All (\d+) cases passed", run.stdout) or re.search(r"(\d+) / (\d+) cases failed", run.stdout)
    if found is None:
        return Counter()
    failed, cases = (0, int(found[1])) if len(found.groups()) == 1 else map(int, found.groups())
    return Counter({"passed": cases - failed} | ({"failed": failed} if failed else {}))


def table(kept: dict[str, Any]) -> list[str]:
    width = f"{{:<16}}{'{:>9}' * (1 + len(OUTCOMES) + 1)}"
    lines = [f"FlashMLA's programs over mla_ops on an {kept['device']}", ""]
    lines.append(width.format("program", "cases", *OUTCOMES, "not run"))
    for name, program in kept["programs"].items():
        counts = Counter(program["outcomes"].values()) if "outcomes" in program else Counter(program["counts"])
        ran = [counts[outcome] for outcome in OUTCOMES]
        lines.append(width.format(name, program["cases"], *ran, program["cases"] - sum(ran)))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each program")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--gib", type=float, default=48.0, help="memory that cases take together, about")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    # the programs read times of FlashMLA's kernels by name, unless a profiler holds the counters
    os.environ["NSYS_PROFILING_SESSION_ID"] = "1"
    kept: dict[str, Any] = {"programs": {}}
    if arguments.out is not None and arguments.out.exists():
        kept = json.loads(arguments.out.read_text())
    with shared_gpus(1) as (variables, *_):
        os.environ |= variables
        kept["device"] = torch.cuda.get_device_name()
        for name in arguments.programs:
            if name == "sparse_prefill":
                counts = run_prefill(arguments)
                kept["programs"][name] = {"cases": counts.total(), "counts": counts}
            else:
                run_program(name, arguments, kept["programs"].setdefault(name, {"cases": 0, "outcomes": {}}))
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(kept))
    print(*table(kept), sep="\n")


if __name__ == "__main__":
    main()
