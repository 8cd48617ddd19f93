"""Every Triton kernel compiles for AMD's gfx942, and sparse attention for gfx950, whose matrix products are others.

A variant of each, none of which has run on such a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# bytes of local data share of one compute unit
SHARED_LIMITS = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
# Dispatch gives a GPU of AMD the capability (0, 0), and so these tiles. A process of its own does not interpret.
SCRIPT = """
import aot_kernels
import triton
from triton.backends.compiler import GPUTarget

first = {}
for variants in aot_kernels.VARIANTS:
    for variant in variants(0):
        first.setdefault(variant.kernel.__name__, variant)
for name, variant in first.items():
    for architecture in ("gfx942", "gfx950"):
        target = GPUTarget("hip", architecture, 64)
        compiled = triton.compile(aot_kernels.source(variant), target=target, options=variant.options)
        print("KERNEL", architecture, name, compiled.metadata.shared)
        if name != "_attend_kernel":
            break
"""


@pytest.mark.slow
def test_every_kernel_compiles_within_its_shared_memory() -> None:
    tests = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), str(tests.parent)])
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    rows = [line.split()[1:] for line in finished.stdout.splitlines() if line.startswith("KERNEL")]
    written = {
        line.split("(")[0].removeprefix("def ")
        for path in (tests.parent / "mla_ops" / "kernels" / "triton").glob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    }
    assert {name for architecture, name, _ in rows if architecture == "gfx942"} == written
    assert {architecture for architecture, *_ in rows} == set(SHARED_LIMITS)
    assert not [row for row in rows if int(row[2]) > SHARED_LIMITS[row[0]]]
