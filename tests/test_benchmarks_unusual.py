"""Unusual keys, indices and scores (`benchmarks/unusual.py`): what they are, and what results are held against."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from topk_oracle import by_planes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the installed package

from benchmarks import attention, indexer_topk, indexer_topk_patterns
from benchmarks.cache import fill_cache, raise_keys, read_keys
from mla_ops import formats


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_ds_mla_v4", "bf16"])
def test_keys_are_raised_by_their_first_rope_value_alone(cache_format: str) -> None:
    kv_cache = formats.allocate_cache(cache_format, 3, 64, device=torch.device("cpu"))
    fill_cache(kv_cache, cache_format, torch.Generator().manual_seed(7))
    slots = torch.tensor([0, 70, 191])
    expected = read_keys(kv_cache, torch.arange(192), cache_format)
    raise_keys(kv_cache, cache_format, slots, torch.tensor([0.5, 32.0, 64.0]))
    expected[slots, -64] = torch.tensor([0.5, 32.0, 64.0], dtype=torch.float64)
    assert torch.equal(read_keys(kv_cache, torch.arange(192), cache_format), expected)


def test_large_scores_are_held_to_the_largest() -> None:
    """A value of another key is wrong, however little a bound of moved scores would say there."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(50, 576, generator=generator)
    q = attention.shape_queries(torch.randn(2, 4, 576, generator=generator), "large", 1.0)
    scores = q.double() @ keys.double().T
    best, second = scores.topk(2).indices.unbind(-1)

    def checked(chosen: torch.Tensor) -> list[bool]:
        out = keys[chosen][..., :512]
        checks = attention.check_attention(q, lambda _: keys.double(), 1.0, out, torch.logsumexp(scores, dim=-1))
        return [check.passed for check in checks]

    assert checked(best) == [True, True]
    assert checked(second) == [False, True]


def test_every_kernel_has_unusual_cases(capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module("benchmarks.unusual")
    arguments = ["--device", "cpu", "--lowerings", "reference", "--topk", "64", "--shapes", "3x8", "--iterations", "1"]
    assert module.main(arguments) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("reference") and ":" not in line]
    assert [line.split("  3 x 8")[0].split(maxsplit=1)[1].strip() for line in lines] == list(module.KERNELS)
    assert all(len(line.split("  3 x 8")[1].split()) == len(module.KINDS) + 2 for line in lines)


def test_top_k_has_unusual_scores(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--quick", "--device", "cpu", "--patterns", "--lowerings", "reference"]
    assert indexer_topk.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    regimes = [line for line in lines if line.startswith("reference") and ":" not in line]
    assert len(regimes) == len(indexer_topk_patterns.QUICK_REGIMES)
    monkeypatch.setattr(indexer_topk_patterns, "best_columns", lambda scores, topk: scores[:, :topk].int())
    assert indexer_topk.main(arguments) == 1
    assert "WRONG: reference 2 x 300, k = 100 usual" in capsys.readouterr().out


def test_scores_by_planes_are_those_of_the_kernel() -> None:
    scores = torch.randn(2, 256).where(torch.rand(2, 256) > 0.1, torch.nan)
    assert torch.equal(indexer_topk_patterns.by_planes(scores).view(torch.int32), by_planes(scores).view(torch.int32))
