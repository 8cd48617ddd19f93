"""Benchmarks run on a CPU, check what they measure, and fail when a lowering is wrong."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the installed package

from benchmarks import common

FAMILIES = ("cache", "compressor", "index", "merge", "plan", "sparse_attention")


@pytest.mark.parametrize("family", FAMILIES)
def test_quick_run_passes_its_own_checks_and_writes_json(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--quick", "--device", "cpu", "--lowerings", "reference,hopper,auto", "--json", str(path)]
    assert importlib.import_module(f"benchmarks.{family}").main(arguments) == 0
    content = json.loads(path.read_text())[family]
    measured = [row for row in content["rows"] if row["reason"] is None]
    refused = [row for row in content["rows"] if row["reason"] is not None]
    assert measured
    assert all(row["checks"] and row["median_us"] > 0 and row["floor_us"] > 0 for row in measured)
    assert {row["lowering"] for row in measured} == {"reference"}
    assert {row["lowering"] for row in refused} == {"hopper"}
    assert 2 * len(refused) == len(measured)  # on a CPU, auto is the reference too
    assert "measured in this run: copy" in capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lowering_that_writes_nothing_fails(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are poisoned before the checked run, so stale or missing values cannot pass."""
    module = importlib.import_module(f"benchmarks.{family}")

    def broken(case: common.Case, *rest: object) -> list[common.Row]:
        runs = [lambda: None for _ in case.runs]
        return real(
            common.Case(case.call, case.shape, runs, case.poison, case.check, case.bytes_moved, case.flops), *rest
        )

    real = common.measure
    monkeypatch.setattr(common, "measure", broken)
    assert module.main(["--quick", "--device", "cpu"]) == 1


def test_several_families_run_under_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    command = importlib.import_module("benchmarks.__main__").main
    assert command(["merge", "plan", "--quick", "--device", "cpu", "--json", str(path)]) == 0
    assert set(json.loads(path.read_text())) == {"merge", "plan"}
    assert command(["attention", "--quick"]) == 2
    assert "there is no family attention" in capsys.readouterr().err


def test_max_error_sees_nan_and_ignores_equal_infinities() -> None:
    inf, nan = math.inf, math.nan
    assert common.max_error(torch.tensor([-inf, 1.0]), torch.tensor([-inf, 1.5])) == 0.5
    assert common.max_error(torch.tensor([nan]), torch.tensor([nan])) == 0.0
    assert math.isnan(common.max_error(torch.tensor([nan]), torch.tensor([0.0])))
    assert not common.Check("out", nan, 1.0).passed
    assert common.max_error(torch.tensor([inf]), torch.tensor([0.0])) == inf


def test_floor_is_the_larger_of_memory_and_math() -> None:
    floors = common.Floors(copy_bytes_per_second=1e12, matmul_flops_per_second=1e15, matmul_dtype="bfloat16")
    assert floors.microseconds(10**6, 0) == pytest.approx(1.0)
    assert floors.microseconds(10**6, 5 * 10**9) == pytest.approx(5.0)
