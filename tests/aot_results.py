"""Runs `aot_jobs.py` in a process of its own, since a test's may be interpreting."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fresh

TESTS = Path(__file__).parent


def run_jobs(*arguments: str) -> list[dict[str, Any]]:
    """Figures, or errors, of each variant for each architecture."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS.parent), environment.get("PYTHONPATH"))))
    done = fresh.run(str(TESTS / "aot_jobs.py"), *arguments, env=environment, check=True)
    # the compiler prints its own reports to the same stream
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]


def kernels_of_the_sources() -> set[str]:
    """Names of all jitted kernels: one that no variant compiles would be shipped unseen."""
    return {
        line.split("(")[0].removeprefix("def ")
        for path in (TESTS.parent / "mla_ops" / "kernels" / "triton").glob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    }
