"""How a balanced Hopper launch shares rows of any lengths among its workers: all turns once, evenly, parts where the
merge looks for them.

The kernels' own code (`balance.cuh`), compiled for this CPU, against what the pieces of all CTAs add up to.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hopper_on_cpu import NO_COMPILER, build

from mla_ops import formats
from mla_ops.kernels.hopper import launch, merge_cuts, sources
from mla_ops.kernels.hopper.balance import ROW_TURNS, balance_for, workers_of
from mla_ops.kernels.hopper.costs import TABLE, read_costs
from mla_ops.kernels.hopper.launch import KERNELS, KEYS, NO_CACHE, Balance, Balanced, Rows, cache_params
from mla_ops.kernels.hopper.waves import Wave

pytestmark = pytest.mark.skipif(NO_COMPILER, reason="there is no C++ compiler")

BALANCED = 3  # value in enum Launch
CAPACITY = 4000  # keys of a row


class Taken(ctypes.Structure):
    """What a worker's CTA takes of a token, in turns; where it leaves a part, -1 for a whole token."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("token", "tile", "part", "first", "last"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = build("hopper_rows.cpp", tmp_path_factory.mktemp("hopper_rows"))
    loaded.pieces_taken.restype = ctypes.POINTER(Taken)
    return loaded


def share(
    library: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    ctas: int,
    num_heads: int,
    longest: float = math.inf,
    margin: float = 0.0,
) -> tuple[list[list[Taken]], list[tuple[int, int]]]:
    """The pieces of each CTA, and the records of the workers."""
    seen: list[Any] = []

    class Recorded:
        def launch(self, grid: Any, block: Any, shared_bytes: int, cluster: Any, params: bytes, **_: Any) -> None:
            seen.append((grid, params))

    monkeypatch.setattr(sources, "load", lambda *_: Recorded())
    monkeypatch.setattr(launch, "clusters_at_once", lambda *_: (ctas,) * len(launch.SPLITS))
    cache = formats.allocate_cache("bf16", 1, 64)
    rows = Rows(cache, *formats.geometry(cache, "bf16")[:3])
    table = torch.zeros(1, CAPACITY // 64 + 1, dtype=torch.int32)
    key_lens, num_tokens = torch.tensor(lengths, dtype=torch.int32), len(lengths)
    workers = workers_of(num_heads, 64, ctas)
    exchange = merge_cuts.exchange(workers, num_heads, torch.device("cpu"))
    launch.launch(
        KERNELS["bf16", 576],
        Balanced(64),
        num_tokens,
        torch.zeros(num_tokens, num_heads, 576, dtype=torch.bfloat16),
        (cache_params(rows, None, key_lens, table, CAPACITY), NO_CACHE),
        1.0,
        attn_sink=None,
        req_id_per_token=torch.zeros(num_tokens, dtype=torch.int32),
        out=torch.zeros(num_tokens, num_heads, formats.LATENT_DIM),
        lse=torch.zeros(num_tokens, num_heads),
        programmatic=False,
        balance=Balance(64, workers, longest, margin),
        exchange=exchange,
        all_tokens=num_tokens,
    )
    ((grid, params),) = seen
    pieces = []
    for x in range(grid[0]):
        library.choose_cta(params, (ctypes.c_int * 3)(x, 0, 0), (ctypes.c_int * 3)(*grid), 0, BALANCED)
        count = library.pieces_of_cta()
        assert count >= 0
        pieces.append([Taken(*(getattr(p, n) for n, _ in Taken._fields_)) for p in library.pieces_taken()[:count]])
    records = exchange.view(torch.int32)[2 * workers * num_heads :][: 2 * workers].view(workers, 2).tolist()
    return pieces, [(token, cut) for token, cut in records]


def lognormal(generator: random.Random, count: int) -> list[int]:
    return [int(min(CAPACITY, generator.lognormvariate(4, 2))) for _ in range(count)]


BATCHES: dict[str, Callable[[random.Random], list[int]]] = {
    "one long": lambda generator: [CAPACITY if i == 17 else 100 for i in range(32)],
    "every fourth": lambda generator: [2048 if i % 4 == 0 else 64 for i in range(133)],
    "equal, whole": lambda generator: [1000] * 60,
    "equal, cut": lambda generator: [3000] * 40,
    "one": lambda generator: [CAPACITY],
    "nothing": lambda generator: [0, -5, 0],
    "more than a thread each": lambda generator: [generator.choice((0, 1, 64, 65, 900)) for _ in range(300)],
    "lengths beyond what fits": lambda generator: [2**31 - 1, 1, 0, 2**31 - 1],
    **{f"lognormal {n}": lambda generator, n=n: lognormal(generator, n) for n in (2, 9, 70, 256)},
}


@pytest.mark.parametrize("ctas", [1, 7, 60])
@pytest.mark.parametrize("batch", BATCHES)
def test_all_turns_are_taken_once_and_evenly(
    batch: str, ctas: int, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, num_heads = BATCHES[batch](random.Random(3)), 100
    pieces, records = share(library, monkeypatch, lengths, ctas, num_heads)
    turns = [-(-min(max(length, 0), CAPACITY) // KEYS) for length in lengths]
    workers = workers_of(num_heads, 64, ctas)
    assert len(pieces) == 2 * workers
    assert len(records) == workers
    cuts: dict[int, list[int]] = {}  # workers that begin inside of a token
    assert records[0] == (1, 0)  # this launch has the tokens
    for worker, (token, cut) in enumerate(records):
        if cut:
            cuts.setdefault(token, []).append(worker)
    for tile in range(2):
        by_token: dict[int, list[tuple[int, Taken]]] = {token: [] for token in range(len(lengths))}
        for cta, own in enumerate(pieces):
            for piece in own:
                if piece.tile == tile:
                    assert cta % 2 == tile
                    by_token[piece.token].append((cta // 2, piece))
        for token, found in by_token.items():
            found.sort(key=lambda each: each[1].first)
            assert [piece.first for _, piece in found] == [0, *(piece.last for _, piece in found[:-1])]
            assert found[-1][1].last == turns[token]
            begun = [worker for worker, _ in found[1:]]
            assert cuts.get(token, []) == begun
            if begun:
                assert begun == list(range(begun[0], begun[0] + len(begun)))
                assert found[0][0] == begun[0] - 1
                assert [piece.part for _, piece in found] == [workers + begun[0] - 1, *begun]
            else:
                assert found[0][1].part == -1
    cost = [sum(piece.last - piece.first + ROW_TURNS for piece in own) for own in pieces]
    ideal = -(-(sum(turns) + ROW_TURNS * len(turns)) // workers)
    quota = max(6, ideal)
    assert max(cost) <= max(1.08 * quota, quota + 2 * max(1, quota // 32) + 2 * ROW_TURNS)
    if batch == "equal, whole" and ctas == 60:
        assert not cuts
    if batch in ("equal, cut", "one long", "every fourth") and ctas == 60:
        assert cuts


@pytest.mark.parametrize(
    ("lengths", "balanced"),
    [
        ([3000] * 40, False),
        ([2700, 3000] * 20, False),
        ([CAPACITY] + [100] * 31, True),
        ([0] * 31 + [CAPACITY], True),
        ([CAPACITY] * 4 + [64] * 36, True),
        ([0] * 9, False),
    ],
)
def test_launches_by_shapes_have_rows_of_about_one_length(
    lengths: list[int], balanced: bool, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters of two on 60 CTAs, each once, and a margin of 7 turns."""
    pieces, records = share(library, monkeypatch, lengths, 60, 100, 0.5 / 1.15, 7.0)
    assert records[0] == (int(balanced), 0)
    assert any(pieces) == balanced
    if not balanced:
        assert not any(cut for _, cut in records)


def test_a_balanced_launch_is_made_where_it_may_gain() -> None:
    """Few short rows take the time of a launch; a row alone is shared by all CTAs anyway."""
    keys, costs = KERNELS["bf16", 576], read_costs(TABLE.read_text(), "NVIDIA H200")
    at_once = (132, 66, 43, 32, 26, 21, 18, 15, 14, 13, 11, 10, 9, 8, 7)

    def made(num_tokens: int, turns: int, splits: int) -> Balance | None:
        waves = [Wave(num_tokens, launch.Clusters(64, splits))]
        return balance_for(keys, waves, num_tokens, 128, turns, at_once, costs)

    assert made(1, 2048, 16) is None
    assert made(4, 16, 16) is None
    assert made(5000, 64, 1) is None
    found = made(32, 2048, 2)
    assert found is not None
    assert (found.tile, found.workers) == (64, 66)
    # a row's 2048 turns are one CTA's 1024; a share of 36 and the margin are less, and of 1000 more
    assert 0.4 < found.longest < 0.5
    assert 2048 * found.longest > 36 + found.margin
    assert 72 * found.longest < 36 + found.margin
