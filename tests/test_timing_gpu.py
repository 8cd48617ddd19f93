"""Timings on a GPU."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks/ is no part of the installed package

from benchmarks import timing


@pytest.mark.gpu
def test_a_replay_keeps_what_it_writes() -> None:
    written = torch.ones(4, device="cuda")
    kept = weakref.ref(written)
    replay, launches = timing.capture(written.zero_, "")
    del written
    found = kept()
    assert found is not None
    found.fill_(1)
    replay()
    assert launches == 1
    assert found.eq(0).all()
