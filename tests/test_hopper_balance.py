"""How a balanced Hopper launch shares rows of any lengths among its workers: all turns once, evenly, parts where the
merge looks for them.

The kernels' own code (`balance.cuh`), compiled for this CPU, against what the pieces of all CTAs add up to.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Callable

import pytest
import torch
from hopper_on_cpu import NO_COMPILER, Recorder, build

from mla_ops import formats
from mla_ops.kernels.hopper import groups, launch, parts, sources
from mla_ops.kernels.hopper.balance import ROW_TURNS, Workers, balance_for, least_us, workers_of
from mla_ops.kernels.hopper.costs import TABLE, read_costs
from mla_ops.kernels.hopper.launch import KERNELS, TILE_KEYS, Balance, Clusters, Group
from mla_ops.kernels.hopper.params import NO_CACHE, Rows, cache_params
from mla_ops.kernels.hopper.waves import Wave

pytestmark = pytest.mark.skipif(NO_COMPILER, reason="there is no C++ compiler")

BALANCED = 3  # value in enum Launch
CAPACITY = 4000  # keys of a row


class Taken(ctypes.Structure):
    """Turns of a token that a worker's CTA takes, and the place of its part, -1 for a whole token."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("token", "tile", "part", "first", "last"))


def workers_of_64(ctas: int, num_heads: int) -> int:
    return max(1, ctas // -(-num_heads // 64))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = build("hopper_rows.cpp", tmp_path_factory.mktemp("hopper_rows"), "-O2")
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
) -> tuple[list[list[Taken]], list[list[int]], bool]:
    """The pieces of each CTA; first worker and number of those with whom it shares the rows at its two ends; whether
    rows are shared at all."""
    seen = Recorder()
    monkeypatch.setattr(sources, "load", lambda *_: seen)
    monkeypatch.setattr(launch, "clusters_at_once", lambda *_: (ctas,) * len(launch.SPLITS))
    cache = formats.allocate_cache("bf16", 1, 64)
    rows = Rows(cache, *formats.geometry(cache, "bf16")[:3])
    table = torch.zeros(1, CAPACITY // 64 + 1, dtype=torch.int32)
    key_lens, num_tokens = torch.tensor(lengths, dtype=torch.int32), len(lengths)
    monkeypatch.setattr(groups, "counters", lambda *_: 0)
    workers = workers_of_64(ctas, num_heads)
    exchange = parts.exchange(workers, 64, num_heads, torch.device("cpu"))
    launch.launch(
        KERNELS["bf16", 576],
        Clusters(64, 1),
        0,
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
        takes_either_way=True,
    )
    ((grid, _, _, params),) = seen
    pieces, decisions = [], set()
    for x in range(grid[0]):
        library.choose_cta(params, (ctypes.c_int * 3)(x, 0, 0), (ctypes.c_int * 3)(*grid), 0, BALANCED)
        decisions.add(library.decision_of_cta())
        count = library.pieces_of_cta()
        assert count >= 0
        pieces.append([Taken(*(getattr(p, n) for n, _ in Taken._fields_)) for p in library.pieces_taken()[:count]])
    told = exchange.view(torch.int32)
    (decision,) = decisions
    assert told[0] == decision >= 0
    return pieces, told[4 : 4 + 4 * len(pieces)].view(-1, 4).tolist(), decision == 1


def lognormal(generator: random.Random, count: int) -> list[int]:
    return [int(min(CAPACITY, generator.lognormvariate(4, 2))) for _ in range(count)]


BATCHES: dict[str, Callable[[random.Random], list[int]]] = {
    "one long": lambda generator: [CAPACITY if i == 17 else 100 for i in range(32)],
    "one long behind empty ones": lambda generator: [0] * 200 + [CAPACITY],
    "one long among many": lambda generator: [64] * 300 + [CAPACITY] + [64] * 211,
    "some long among many": lambda generator: [
        generator.choice((*[0] * 9, *[64] * 50, 2048, 4096)) for _ in range(200)
    ],
    "every fourth": lambda generator: [2048 if i % 4 == 0 else 64 for i in range(133)],
    "equal, whole": lambda generator: [1000] * 60,
    "equal, cut": lambda generator: [3000] * 40,
    "one": lambda generator: [CAPACITY],
    "nothing": lambda generator: [0, -5, 0],
    "more than a thread each": lambda generator: [generator.choice((0, 1, 64, 65, 900)) for _ in range(300)],
    "lengths beyond what fits": lambda generator: [2**31 - 1, 1, 0, 2**31 - 1],
    **{f"lognormal {n}": lambda generator, n=n: lognormal(generator, n) for n in (2, 9, 70, 256)},
}


def cuts_of(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, lengths: list[int], ctas: int) -> int:
    """How many cuts there are, once all turns are seen to be taken once and evenly."""
    num_heads = 100
    pieces, sharers, decision = share(library, monkeypatch, lengths, ctas, num_heads)
    assert decision
    turns = [-(-min(max(length, 0), CAPACITY) // TILE_KEYS) for length in lengths]
    workers = workers_of_64(ctas, num_heads)
    assert len(pieces) == 2 * workers
    cuts = 0
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
            cuts += len(begun)
            for worker, piece in found:
                # who begins inside of a token has its sharers in front, who only ends there behind
                ends = sharers[2 * worker + tile]
                told = ends[:2] if piece.part == worker else ends[2:] if piece.part >= 0 else [None, 1]
                assert told[1] == len(found)
                assert told[0] == (found[0][0] if begun else None)
                if piece.part == worker and piece.token == pieces[2 * worker + tile][-1].token:
                    assert ends[3] == 0, "one part, however long the token goes on"
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
    return cuts


@pytest.mark.parametrize("ctas", [1, 7, 60])
@pytest.mark.parametrize("batch", BATCHES)
def test_all_turns_are_taken_once_and_evenly(
    batch: str, ctas: int, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = cuts_of(library, monkeypatch, BATCHES[batch](random.Random(3)), ctas)
    if batch == "equal, whole" and ctas == 60:
        assert not cuts
    if batch in ("equal, cut", "one long", "one long among many", "every fourth") and ctas == 60:
        assert cuts


@pytest.mark.parametrize("seed", range(20))
def test_few_long_rows_anywhere(seed: int, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(seed)
    few = generator.choice(([0], [0, 64], [1, 64, 128], [0, 64, 200]))
    lengths = [generator.choice(few) for _ in range(generator.randint(20, 512))]
    for _ in range(generator.randint(1, 4)):
        lengths[generator.choice((0, -1, generator.randrange(len(lengths))))] = generator.randint(500, CAPACITY)
    cuts_of(library, monkeypatch, lengths, generator.choice((7, 60, 132)))


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
    *_, decision = share(library, monkeypatch, lengths, 60, 100, 0.5 / 1.15, 7.0)
    assert decision == balanced


AT_ONCE = (132, 66, 43, 32, 26, 21, 18, 15, 14, 13, 11, 10, 9, 8, 7)
FP8, V4, BF16 = KERNELS["fp8_ds_mla", 576], KERNELS["fp8_ds_mla_v4", 512], KERNELS["bf16", 576]


@pytest.mark.parametrize(
    ("shape", "behind", "quantized", "expected"),
    [
        (Clusters(16, 1), 0, True, 30.0),
        (Clusters(16, 5), 0, True, 27.5),
        (Clusters(16, 5), 0, False, 30.0),
        (Clusters(64, 2, 3), 0, True, 30.0),
        (Group(4), 0, True, 50.0),
        (Clusters(16, 3, 3), 16, False, 45.0),
        (Clusters(64, 2), 64, False, 75.0),
    ],
)
def test_calls_of_less_go_by_their_shapes(shape: launch.Shape, behind: int, quantized: bool, expected: float) -> None:
    """The cost of the question for rows of one length decides: docs/notes.md has figures."""
    assert least_us(shape, behind, quantized) == expected


def test_rows_are_shared_where_it_may_gain() -> None:
    """Few short rows take the time of a launch; a row alone is shared by all CTAs anyway."""
    costs = read_costs(TABLE.read_text(), "NVIDIA H200")

    def made(keys: launch.KeyFormat, num_tokens: int, turns: int, splits: int) -> Balance | None:
        waves = [Wave(num_tokens, Clusters(64, splits))]
        return balance_for(keys, waves, num_tokens, 128, turns, AT_ONCE, costs)

    assert made(FP8, 1, 2048, 16) is None
    assert made(FP8, 4, 16, 16) is None
    assert made(FP8, 5000, 64, 1) is None
    assert made(BF16, 32, 32, 2) is None  # two launches for 40 us
    for keys, tile in ((FP8, 0), (BF16, 64)):
        found = made(keys, 32, 2048, 2)
        assert found is not None
        assert (found.tile, found.workers) == (tile, 66 if tile else 64)
        # a row's 2048 turns are one CTA's 1024; a share of 36 and the margin are less, and of 1000 more
        assert 0.4 < found.longest < 0.5
        assert 2048 * found.longest > 36 + found.margin
        assert 72 * found.longest < 36 + found.margin


@pytest.mark.parametrize(
    ("keys", "num_tokens", "num_heads", "shape", "expected"),
    [
        (FP8, 8, 128, Group(8), Workers(0, 64)),
        (FP8, 32, 128, Clusters(64, 2), Workers(0, 64)),
        (FP8, 128, 128, Clusters(64, 1), Workers(0, 66)),
        (FP8, 20, 16, Clusters(16, 6), Workers(0, 120)),
        (FP8, 30, 16, Clusters(16, 6), Workers(0, 126)),  # 21 of the 30 clusters run at one time
        (V4, 100, 32, Clusters(32, 1), Workers(64, 132)),
        (FP8, 100, 32, Clusters(32, 1), Workers(64, 132)),
        (FP8, 8, 128, Clusters(64, 2, 4), Workers(0, 64)),
        (FP8, 2, 128, Clusters(64, 8, 3), Workers(64, 66)),  # 96 CTAs
        (BF16, 128, 128, Clusters(64, 1), Workers(0, 66)),
        (BF16, 32, 128, Clusters(64, 2), Workers(64, 66)),
        (BF16, 100, 16, Clusters(16, 1), Workers(0, 100)),
        (BF16, 300, 16, Clusters(16, 1), Workers(16, 132)),
    ],
)
def test_who_shares_rows(
    keys: launch.KeyFormat, num_tokens: int, num_heads: int, shape: launch.Shape, expected: Workers
) -> None:
    """The CTAs of the first launch, or of one behind where no kernel takes both ways."""
    assert workers_of(keys, [(num_tokens, shape)], num_heads, AT_ONCE) == expected
