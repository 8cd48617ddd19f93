"""FlashMLA's own Hopper test programs over `mla_ops`: how many of their cases pass.

    python -m scripts.flash_mla_programs FOLDER [--seconds 60] [--programs dense_decoding sparse_decoding ...]

FOLDER is `tests/` of a checkout of deepseek-ai/FlashMLA at its last commit with Hopper kernels (9241ae3). The programs
are not changed: their cases, inputs, references and tolerances are theirs. A case counts as refused where it has
several key heads. Cases run in a shuffled order until they or the seconds are spent; one that finds no room on the GPU
is tried again at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import random
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# the programs read times of FlashMLA's kernels by name, unless a profiler holds the counters
os.environ["NSYS_PROFILING_SESSION_ID"] = "1"

import torch

from mla_ops.integrations import flash_mla

PROGRAMS = ("sparse_prefill", "dense_decoding", "sparse_decoding")


def does_not_raise(test: Callable[..., None], case: object) -> bool:
    test(case)
    return True


def is_correct(test: Callable[..., Any], case: object) -> bool:
    return bool(test(case).is_correct)


def dense_cases(module: Any) -> Iterator[tuple[Any, Callable[[], bool]]]:
    cases: list[Any] = []
    test, module.test_flash_mla = module.test_flash_mla, cases.append
    module.main(torch.bfloat16)
    return ((case, partial(does_not_raise, test, case)) for case in cases)


def sparse_cases(module: Any) -> Iterator[tuple[Any, Callable[[], bool]]]:
    cases = [case.to_test_param() for case in module.gen_testcase()]
    for seed, case in enumerate(cases):
        case.seed = seed
    return ((case, partial(is_correct, module.test_flash_mla, case)) for case in cases)


def run_cases(name: str, folder: Path, seconds: float) -> None:
    sys.path.insert(0, str(folder))
    flash_mla.install()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda:0")
    torch.set_float32_matmul_precision("high")
    module = importlib.import_module(f"test_flash_mla_{name}")
    cases = list((dense_cases if name == "dense_decoding" else sparse_cases)(module))
    random.Random(0).shuffle(cases)
    counts: Counter[str] = Counter()
    end, queue, again = time.monotonic() + seconds, deque(cases), set[int]()
    while queue and time.monotonic() < end:
        case, run = queue.popleft()
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                outcome = "passed" if run() else "failed"
        except NotImplementedError:
            outcome = "refused"
        except AssertionError:
            outcome = "failed"
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            if id(case) not in again:
                again.add(id(case))
                queue.append((case, run))
                continue
            outcome = "no room"
        counts[outcome] += 1
        if outcome == "failed" and counts[outcome] <= 4:
            print(f"failed: {case}\n{said.getvalue()[-900:]}")
    print(f"{name}: {dict(counts)} of {len(cases)} cases", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each program")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    arguments = parser.parse_args()
    for name in arguments.programs:
        if name != "sparse_prefill":
            run_cases(name, arguments.folder, arguments.seconds)
            continue
        program = arguments.folder / f"test_flash_mla_{name}.py"
        command = [sys.executable, "-m", "mla_ops.integrations.flash_mla", str(program)]
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=2 * arguments.seconds, check=False)
        except subprocess.TimeoutExpired as error:
            done = (error.stdout or b"").count(b"Running on")
            print(f"{name}: still running after {error.timeout:.0f} s, at case {done}", flush=True)
            continue
        print(f"{name}: {said.stdout.strip().splitlines()[-1:]} {said.stderr[-900:]}", flush=True)


if __name__ == "__main__":
    main()
