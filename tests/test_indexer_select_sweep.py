"""The sweep of selections beside their own two steps, on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks/ is no part of the installed package

from benchmarks import indexer_select
from benchmarks import indexer_select_sweep as sweep

QUICK = ["--sweep", "--quick", "--device", "cpu"]


def test_a_sweep_says_how_many_take_longer(capsys: pytest.CaptureFixture[str]) -> None:
    assert indexer_select.main(QUICK) == 0
    assert f"of {len(sweep.QUICK)} take more than" in capsys.readouterr().out


def test_a_selection_that_differs_from_two_steps_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = sweep.flat

    def wrong(*given: object) -> sweep.Ways:
        ways = real(*given)
        return ways._replace(fused=lambda: tuple(each + 1 for each in ways.two_steps()))

    monkeypatch.setattr(sweep, "flat", wrong)
    assert indexer_select.main(QUICK) == 1
    assert "WRONG" in capsys.readouterr().out
