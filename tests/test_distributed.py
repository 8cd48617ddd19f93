"""Ops under ranks: DTensor, contexts over ranks, selection over ranks, on gloo and CPU with 1, 2 and 4 processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

pytest.importorskip("transformers")

import rank_cases
from ranks import run_ranks

from mla_ops.distributed import ContextParallel


def name_of(case: Callable[[], None]) -> str:
    return case.__name__.removeprefix("case_")


@cache
def report(world_size: int) -> dict[str, list[str]]:
    return run_ranks(world_size, cases(world_size))


def cases(world_size: int) -> list[Callable[[], None]]:
    skipped = rank_cases.AT_TWO if world_size > 2 else ()
    return [case for case in rank_cases.CASES if not any(word in case.__name__ for word in skipped)]


@pytest.mark.parametrize(
    ("world_size", "case"),
    [pytest.param(n, case, id=f"{n}-{name_of(case)}") for n in (2, 4) for case in cases(n)],
)
def test_on_ranks(world_size: int, case: Callable[[], None]) -> None:
    failures = report(world_size)[case.__name__]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("case", rank_cases.ALONE, ids=name_of)
def test_on_one_process_without_a_group(case: Callable[[], None]) -> None:
    torch.manual_seed(0)
    case()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2, 16, 1), "rank must be at most 1, got 2"),
        ((-1, 2, 16, 1), "rank must be at least 0, got -1"),
        ((0, 0, 16, 1), "world_size must be at least 1, got 0"),
        ((0, 2, 16, 0), "interleave must be at least 1, got 0"),
        ((0, 2, 16, 3), "block_size must be a multiple of world_size \\* interleave, 6, got 16"),
        ((0, 2, 0, 1), "block_size must be at least 1, got 0"),
    ],
)
def test_refuses_blocks_that_do_not_divide(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContextParallel(None, *arguments)


def test_refuses_heads_that_do_not_divide() -> None:
    ranks = ContextParallel(None, 0, 2, 16)
    for merge in (ranks.merge_heads, ranks.merge_heads_by_sum):
        with pytest.raises(ValueError, match="3 heads do not divide over 2 ranks"):
            merge(torch.zeros(1, 3, 512), torch.zeros(1, 3))
