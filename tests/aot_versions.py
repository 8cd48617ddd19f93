"""Stacks of the Triton kernels by other versions of Triton than the one that the tiles were chosen with.

Needs no GPU. A version is what `pip install --target DIR triton==VERSION` puts first on PYTHONPATH.

    PYTHONPATH=DIR python tests/aot_versions.py KEPT.jsonl    # compiles what KEPT.jsonl lacks; it may be stopped
    python tests/aot_versions.py --page KEPT.jsonl ...        # Markdown; docs/results/triton.md holds its output
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import triton
from aot_jobs import CAPABILITIES, compile_variant, jobs, kept, key_of, set_up_llvm, variant_of

LEGEND = """`ptxas` puts the registers that a kernel lacks on its stack. Compiled, not run; tiles were chosen with the
first version. The table has the kernels with a stack by one of these versions, in bytes a thread: the largest of a
row's architectures, and which have it. All other kernels have none; `-`: other tiles leave that version without it.
`python tests/aot_versions.py` makes this page."""


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def compile_what_is_missing(file: Path) -> None:
    done = {row["key"] for row in rows_of(file)} if file.exists() else set()
    missing = [job for job in jobs(CAPABILITIES) if key_of(variant_of(job), job.capabilities) not in done]
    if missing:
        set_up_llvm()
    for job in missing:
        variant = variant_of(job)
        row = {"version": triton.__version__, "name": job.name, "key": key_of(variant, job.capabilities)}
        row |= {"capabilities": job.capabilities, "figures": compile_variant(variant, *job.capabilities)}
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def cell(stacks: dict[int, int]) -> str:
    """The largest of the architectures' stacks, and those that have it; a version may have no such kernel."""
    if not stacks:
        return "-"
    most = max(stacks.values())
    names = [f"SM{capability}" for capability, stack in stacks.items() if stack == most]
    return f"{most} ({', '.join(names)})" if most else "0"


def page(files: list[Path]) -> str:
    """Markdown: the kept figures of the Triton that runs this, then those of `files`, a version each."""
    every = [
        (triton.__version__, job.name, job.capabilities, key_of(variant_of(job), job.capabilities))
        for job in jobs(CAPABILITIES)
    ]
    rows = [(version, name, capabilities, kept()[key]) for version, name, capabilities, key in every]
    rows += [
        (row["version"], row["name"], row["capabilities"], row["figures"]) for file in files for row in rows_of(file)
    ]
    # by kernel and version the stack on each architecture; a version may have other tiles, so other jobs
    found: dict[str, dict[str, dict[int, int]]] = {}
    for version, name, capabilities, figures in rows:
        stacks = found.setdefault(name, {}).setdefault(version, {})
        stacks.update((c, result["stack"]) for c, result in zip(capabilities, figures, strict=True))
    versions = list(dict.fromkeys(row[0] for row in rows))
    lines = ["# Stacks by several versions of Triton", "", LEGEND, ""]
    lines += [f"| kernel | {' | '.join(versions)} |", "|---|" + "---|" * len(versions)]
    for name, by_version in found.items():
        if any(stack for stacks in by_version.values() for stack in stacks.values()):
            lines.append(f"| {name} | {' | '.join(cell(by_version.get(version, {})) for version in versions)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1] == "--page":
        sys.stdout.write(page([Path(name) for name in sys.argv[2:]]) + "\n")
    else:
        compile_what_is_missing(Path(sys.argv[1]))
