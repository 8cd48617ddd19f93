"""A wheel has every source, and machine code that is of these sources and needs no compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import fresh
import pytest

from mla_ops.kernels.cuda import compiler
from mla_ops.kernels.hopper import sources
from mla_ops.kernels.hopper.catalog import every_kernel

ROOT = Path(__file__).resolve().parent.parent

pytest.importorskip("hatchling", reason="make test installs it")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler.reason(sources.SM90A) is not None, reason=str(compiler.reason(sources.SM90A))),
]

# The first one of each source, which compiles fastest: `make wheel` compiles and checks all, which takes minutes.
FEW = list({kernel.source: kernel.name for kernel in reversed(every_kernel())}.values())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the command of `make wheel`, with the code of few kernels, from a copy of the tree."""
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("mla_ops", "scripts"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.zip"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "scripts/build_wheel.py", "--folder", str(folder)]
    finished = subprocess.run(
        [*command, *(f"--kernel={name}" for name in FEW)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    named = sum(kernel.name in FEW for kernel in every_kernel())
    assert f" {named} kernels of " in finished.stdout
    (made,) = folder.iterdir()
    return made


def test_the_wheel_has_every_source_and_header(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    expected = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.cu", "*.cuh", "*.json")
        for path in (ROOT / "mla_ops").rglob(pattern)
    }
    assert expected <= packed
    assert "mla_ops/kernels/hopper/sm_90a.zip" in packed


RESOLVE = """
import sys
sys.modules["cuda.bindings.nvrtc"] = None
from mla_ops.dispatch import LoweringUnavailable
from mla_ops.kernels.hopper import sources
from mla_ops.kernels.hopper.catalog import every_kernel
for kernel in every_kernel():
    if kernel.name in sys.argv[1:]:
        try:
            sources.compile(kernel.source, kernel.name)
            print("found", kernel.source)
        except LoweringUnavailable:
            print("missing", kernel.source)
"""


def resolve(folder: Path) -> dict[str, str]:
    """A process with the unpacked wheel, no compiler and no home directory."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "MLA_OPS_CACHE_DIR")}
    environment |= {"PYTHONPATH": str(folder), "HOME": "/proc/nobody"}
    finished = fresh.run("-c", RESOLVE, *FEW, cwd=folder, env=environment, check=True)
    assert "cannot be kept" not in finished.stderr
    return {line.split()[1]: line.split()[0] for line in finished.stdout.splitlines()}


def test_code_is_found_without_a_compiler_and_only_for_its_own_sources(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    every = {kernel.source for kernel in every_kernel()}
    assert resolve(tmp_path) == dict.fromkeys(every, "found")
    changed = tmp_path / "mla_ops/kernels/hopper/merge_parts.cu"
    changed.write_text(changed.read_text() + "\n// changed\n")
    assert resolve(tmp_path) == {**dict.fromkeys(every, "found"), "merge_parts.cu": "missing"}
