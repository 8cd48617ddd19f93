"""FlashMLA's own Hopper test programs over `mla_ops`: how many of their cases pass.

    python -m scripts.flash_mla_programs FOLDER [--seconds 60] [--processes 1] [--programs sparse_decoding ...]

FOLDER is `tests/` of a checkout of deepseek-ai/FlashMLA at its last commit with Hopper kernels (9241ae3). The programs
are not changed: their cases, inputs, references and tolerances are theirs. A case counts as refused where it has
several key heads. Cases run in a shuffled order, one of each kind in turn, until they or the seconds are spent; one
that finds no room on the GPU is tried again at the end. Processes share the kinds of a program among them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

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


def kind(case: Any) -> tuple[object, ...]:
    """Cases of one kind run the same kernels."""
    if not hasattr(case, "decode"):
        return case.h_q, case.h_kv, case.is_causal
    decode = case.decode
    return case.d_qk, case.h_q, case.have_topk_length, decode.extra_topk is not None, decode.have_extra_topk_length


def in_turn(cases: Sequence[Any], share: int, shares: int) -> list[Any]:
    """The cases of every `shares`-th kind, shuffled, one of each kind in turn."""
    kinds = defaultdict(list)
    for case in random.Random(0).sample(cases, len(cases)):
        kinds[kind(case[0])].append(case)
    mine = [kinds[name] for name in sorted(kinds, key=str)[share::shares]]
    return [case for case in chain(*zip_longest(*mine)) if case is not None]


def run_cases(name: str, folder: Path, seconds: float, share: int, shares: int) -> None:
    """Runs a share of a program's cases; prints what came of them, how many there are and how many of each kind ran."""
    sys.path.insert(0, str(folder))
    flash_mla.install()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda:0")
    torch.set_float32_matmul_precision("high")
    module = importlib.import_module(f"test_flash_mla_{name}")
    cases = list((dense_cases if name == "dense_decoding" else sparse_cases)(module))
    counts, ran = Counter[str](), Counter[str]()
    end, queue, again = time.monotonic() + seconds, deque(in_turn(cases, share, shares)), set[int]()
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
        ran[str(kind(case))] += 1
        if outcome == "failed" and counts[outcome] <= 4:
            print(f"failed: {case}\n{said.getvalue()[-900:]}")
    print(json.dumps({"counts": counts, "cases": len(cases), "ran": ran}), flush=True)


def run_shares(name: str, folder: Path, seconds: float, processes: int) -> None:
    command = [sys.executable, "-m", "scripts.flash_mla_programs", str(folder), "--seconds", str(seconds), "--programs"]
    command += [name, "--processes", str(processes), "--share"]
    started = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True) for n in range(processes)]
    counts, ran, cases = Counter[str](), Counter[str](), 0
    for process in started:
        said = process.communicate()[0].splitlines()
        if process.returncode:
            counts["ended processes"] += 1
        else:
            answer = json.loads(said.pop())
            counts, ran, cases = counts + Counter(answer["counts"]), ran + Counter(answer["ran"]), answer["cases"]
        print(*said, sep="\n", end="\n" if said else "")
    fewest = f", of {len(ran)} kinds at least {min(ran.values())} each" if ran else ""
    print(f"{name}: {dict(counts)} of {cases} cases{fewest}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each program")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # the programs read times of FlashMLA's kernels by name, unless a profiler holds the counters
    os.environ["NSYS_PROFILING_SESSION_ID"] = "1"
    if arguments.share is None:
        print(f"FlashMLA's programs over mla_ops on an {torch.cuda.get_device_name()}", flush=True)
    for name in arguments.programs:
        if arguments.share is not None:
            run_cases(name, arguments.folder, arguments.seconds, arguments.share, arguments.processes)
            continue
        if name != "sparse_prefill":
            run_shares(name, arguments.folder, arguments.seconds, arguments.processes)
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
