"""The set-up script decides on versions as it says, and what CI ran is pinned."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def setup_env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "scripts" / "setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "expected"), [("2.13.0+cpu", (2, 13)), ("2.9.1", (2, 9)), ("2.11.0a0+git1", (2, 11)), ("-", (0, 0))]
)
def test_versions_compare_as_numbers(setup_env: ModuleType, version: str, expected: tuple[int, int]) -> None:
    assert setup_env.version_tuple(version) == expected


def test_pins_of_packages_that_are_there_replace_those_of_ci(setup_env: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "constraints.txt"
    setup_env.write_constraints(path, {"torch": "2.11.0", "triton": None})
    lines = path.read_text().splitlines()
    assert [line for line in lines if re.match(r"torch\b", line)] == ["torch==2.11.0"]
    assert not [line for line in lines if line.startswith("triton")]
    assert [line for line in lines if line.startswith("pytest==")]


@pytest.mark.parametrize(
    ("requires", "packages"),
    [
        (["filelock", "sympy>=1.13.3"], []),
        (
            ["filelock", 'nvidia-cublas==13.1; platform_system == "Linux"', "cuda-bindings>=13"],
            ["cuda-bindings", "nvidia-cublas"],
        ),
    ],
    ids=["CPU build", "CUDA build"],
)
def test_cuda_builds_are_told_by_what_they_require(
    setup_env: ModuleType, tmp_path: Path, requires: list[str], packages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = json.dumps({"install": [{"metadata": {"version": "9.9", "requires_dist": requires}}]})
    answer = subprocess.CompletedProcess([], 0, stdout=report, stderr="")
    monkeypatch.setattr(setup_env.subprocess, "run", lambda *args, **kwargs: answer)
    name, found = setup_env.cuda_requirements(Path(sys.executable), tmp_path / "constraints.txt")
    assert name == "torch 9.9"
    assert found == packages


def test_every_direct_dependency_is_pinned() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or later")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # CI installs no CUDA build of torch, and nothing that needs one
    for_gpus = {"bench", "flash-mla", "flashinfer"}
    extras = {name: deps for name, deps in project["optional-dependencies"].items() if name not in for_gpus}
    pinned = {re.split("==", line)[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for dependency in [*project["dependencies"], *(dep for deps in extras.values() for dep in deps)]:
        name = re.split(r"[\s;<>=!~\[]", dependency)[0]
        assert name in pinned or name == "mla-ops", f"{name} has no pin in constraints.txt"
