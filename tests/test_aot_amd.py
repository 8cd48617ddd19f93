"""Every Triton kernel compiles for AMD's gfx942: a variant of each, none of which has run on such a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED_LIMIT = 64 * 1024  # bytes of local data share of one compute unit
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
    target = GPUTarget("hip", "gfx942", 64)
    compiled = triton.compile(aot_kernels.source(variant), target=target, options=variant.options)
    print("KERNEL", name, compiled.metadata.shared)
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
    assert {name for name, _ in rows} == written
    assert not [row for row in rows if int(row[1]) > SHARED_LIMIT]
