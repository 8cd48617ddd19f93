"""How CTAs that share rows evenly add up what they left of rows that are cut: each row's parts, whoever comes last.

The kernels' own code (`balance.cuh`, `cuts.cuh`), compiled for this CPU, its threads in random order.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterable

import pytest
import torch
from hopper_on_cpu import NO_COMPILER, Recorder, build

from mla_ops import formats
from mla_ops.kernels.hopper import groups, launch, merge_parts, parts, sources
from mla_ops.kernels.hopper.launch import KERNELS, Balance, ByLength, Clusters
from mla_ops.kernels.hopper.params import NO_CACHE, Rows, cache_params

pytestmark = pytest.mark.skipif(NO_COMPILER, reason="there is no C++ compiler")

CAPACITY = 16384
TURN = 64


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build("hopper_cuts.cpp", tmp_path_factory.mktemp("hopper_cuts"))


@pytest.fixture(scope="module")
def by_length(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build("hopper_cuts.cpp", tmp_path_factory.mktemp("hopper_units"), "-DBY_LENGTH=1")


@pytest.fixture(params=[0, 1000])
def patience(request: pytest.FixtureRequest, library: ctypes.CDLL) -> None:
    """CTAs look so often for the others before they leave."""
    ctypes.c_int.in_dll(library, "patience").value = request.param


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(
    ("lengths", "workers", "num_heads", "tile", "quantized"),
    [
        ([4096, 64, 64], 5, 70, 64, True),  # a long row of five parts
        ([640, 640, 640], 5, 70, 64, False),  # rows of two parts
        ([640, 640, 640], 5, 20, 16, True),
        ([1000, 0, 2000, 64], 4, 20, 16, False),
        ([4096], 10, 30, 24, True),
        ([64] * 90 + [16384] + [64] * 199, 20, 20, 16, True),
        ([9000] + [64] * 230 + [16000] + [64] * 200, 24, 20, 16, False),
        ([0] * 100 + [8192] + [100] * 120, 30, 20, 16, True),
        ([4096], 40, 70, 64, True),  # teams of warps
        ([4096, 4096], 40, 3, 64, False),  # more parts than a warp has lanes
        ([4096, 4096], 80, 3, 16, True),
        ([16384], 100, 3, 16, True),  # more parts than shares
    ],
)
def test_parts_are_added_up(
    lengths: list[int],
    workers: int,
    num_heads: int,
    tile: int,
    quantized: bool,
    library: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Recorder()
    counters = torch.zeros(groups.SLOT_BYTES, dtype=torch.uint8)
    monkeypatch.setattr(sources, "load", lambda *_: seen)
    monkeypatch.setattr(launch, "clusters_at_once", lambda *_: (workers,) * len(launch.SPLITS))
    monkeypatch.setattr(groups, "counters", lambda *_: counters.data_ptr())
    num_tokens, tiles = len(lengths), -(-num_heads // tile)
    cache = formats.allocate_cache("bf16", 1, 64)
    rows = Rows(cache, *formats.geometry(cache, "bf16")[:3])
    key_lens, table = torch.tensor(lengths, dtype=torch.int32), torch.zeros(1, CAPACITY // 64, dtype=torch.int32)
    out = torch.full((num_tokens, num_heads, 512), math.nan, dtype=torch.bfloat16)
    lse, sink = torch.full((num_tokens, num_heads), math.nan), torch.randn(num_heads)
    exchange = parts.exchange(workers, tile, num_heads, torch.device("cpu"))
    launch.launch(
        KERNELS["fp8_ds_mla", 576],
        Clusters(tile, 1),
        0,
        torch.zeros(num_tokens, num_heads, 576, dtype=torch.bfloat16),
        (cache_params(rows, None, key_lens, table, CAPACITY), NO_CACHE),
        1.0,
        attn_sink=sink,
        req_id_per_token=None,
        out=out,
        lse=lse,
        programmatic=True,
        all_tokens=num_tokens,
        balance=Balance(tile, workers, math.inf, 0.0),
        exchange=exchange,
        takes_either_way=True,
    )
    ((*_, params),) = seen
    for seed in range(2):
        out.fill_(math.nan)
        library.share_rows(params, workers * tiles, tile, quantized, seed)
        assert not counters.any()
        cuts = 0
        for token, firsts in enumerate(cut_tokens(lengths, workers)):
            if len(firsts) < 2:
                assert out[token].isnan().all(), "whole rows are written elsewhere"
                continue
            cuts += 1
            check_parts(out[token], lse[token], firsts, sink)
        assert cuts


def check_parts(out: torch.Tensor, lse: torch.Tensor, firsts: Iterable[int], sink: torch.Tensor) -> None:
    """A row whose parts begin with these turns, as hopper_cuts.cpp leaves them."""
    head, dim = torch.arange(len(out))[:, None], torch.arange(512)
    of = [(head + first * 5) % 7 for first in firsts]
    lses = torch.stack([torch.where(x == 0, -math.inf, x.double()) for x in of])
    values = torch.stack([((head * 7 + dim * 3 + first * 11) % 32 - 16).double() for first in firsts])
    total = torch.logsumexp(lses, 0)
    weights = (lses - total.nan_to_num(neginf=0.0)).exp()
    expected = (weights * values).sum(0) / (1 + (sink[:, None].double() - total).exp())
    expected = torch.where(total == -math.inf, 0.0, expected)
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(lse.double(), total[:, 0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize(
    ("lengths", "count", "num_heads"),
    [
        ([4096, 64, 64], 5, 70),
        ([640, 640, 640], 6, 3),
        ([1000, 0, 12000, 64], 66, 64),  # rows of one part and of many
        ([16384], 128, 70),  # as many parts as a team takes at a time
        ([1024] * 32, 40, 17),
    ],
)
def test_parts_of_ctas_by_length_are_merged(
    lengths: list[int],
    count: int,
    num_heads: int,
    quantized: bool,
    by_length: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Recorder()
    monkeypatch.setattr(sources, "load", lambda *_: seen)
    monkeypatch.setattr(launch, "clusters_at_once", lambda *_: (count,) * len(launch.SPLITS))
    num_tokens = len(lengths)
    cache = formats.allocate_cache("bf16", 1, 64)
    rows = Rows(cache, *formats.geometry(cache, "bf16")[:3])
    key_lens, table = torch.tensor(lengths, dtype=torch.int32), torch.zeros(1, CAPACITY // 64, dtype=torch.int32)
    out = torch.full((num_tokens, num_heads, 512), math.nan, dtype=torch.bfloat16)
    lse, sink = torch.full((num_tokens, num_heads), math.nan), torch.randn(num_heads)
    exchange = parts.exchange(-(-count // 2), 64, num_heads, torch.device("cpu"))
    launch.launch(
        KERNELS["fp8_ds_mla" if quantized else "bf16", 576],
        Clusters(64, 2),
        num_tokens,
        torch.zeros(num_tokens, num_heads, 576, dtype=torch.bfloat16),
        (cache_params(rows, None, key_lens, table, CAPACITY), NO_CACHE),
        1.0,
        attn_sink=sink,
        req_id_per_token=None,
        out=out,
        lse=lse,
        programmatic=False,
        all_tokens=num_tokens,
        by_length=ByLength(count, 1.0, -math.inf, 1),
        exchange=exchange,
    )
    (*_, params), (_, block, _, of_merge) = seen
    assert (block, of_merge) == ((256, 1, 1), params)
    for seed in range(2):
        out.fill_(math.nan), lse.fill_(math.nan)
        by_length.merge_rows(params, 7, quantized, seed)
        for token in range(num_tokens):
            check_parts(out[token], lse[token], range(parts_of_row(lengths, count, token)), sink)


@pytest.mark.parametrize(
    ("lengths", "count", "num_heads"),
    [
        ([4096, 64, 64], 5, 70),
        ([640, 640, 640], 6, 3),
        ([1000, 0, 12000, 64], 66, 5),  # rows of one part and of many
        ([16384, 800], 12, 17),  # two groups of threads a head
        ([16384, 64], 130, 3),  # slices of a head, more parts than come at once
        ([1024] * 32, 40, 17),
    ],
)
def test_float32_parts_by_length_are_merged(
    lengths: list[int], count: int, num_heads: int, by_length: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Recorder()
    monkeypatch.setattr(merge_parts, "_loaded", lambda _: [seen] * len(merge_parts.kernels()))
    num_tokens = len(lengths)
    cache = formats.allocate_cache("bf16", 1, 64)
    rows = Rows(cache, *formats.geometry(cache, "bf16")[:3])
    key_lens, table = torch.tensor(lengths, dtype=torch.int32), torch.zeros(1, CAPACITY // 64, dtype=torch.int32)
    values, lses = torch.randn(count, num_heads, 512), torch.randn(count, num_heads)
    lses[torch.rand(count, num_heads) < 0.2] = -math.inf
    values[lses == -math.inf] = math.nan
    out = torch.empty(num_tokens, num_heads, 512, dtype=torch.bfloat16)
    lse = torch.empty(num_tokens, num_heads)
    caches = cache_params(rows, None, key_lens, table, CAPACITY), NO_CACHE
    merge_parts.merge_parts(values, lses, out=out, lse=lse, by_length=(ByLength(count, 1.0, -math.inf, 1), caches))
    ((grid, block, _, params),) = seen
    assert (grid[1:], block) == ((1, 1), (512, 1, 1))
    for seed in range(2):
        out.fill_(math.nan), lse.fill_(math.nan)
        by_length.merge_parts_by_length(params, 3, seed)
        first = 0
        for token in range(num_tokens):
            own = slice(first, first := first + parts_of_row(lengths, count, token))
            total = torch.logsumexp(lses[own].double(), 0)
            weights = (lses[own].double() - total.nan_to_num(neginf=0.0)).exp()
            expected = (weights[..., None] * values[own].nan_to_num().double()).sum(0)
            torch.testing.assert_close(out[token].double(), expected, rtol=2**-8, atol=1e-5)
            torch.testing.assert_close(lse[token].double(), total, rtol=1e-5, atol=1e-5)


def parts_of_row(lengths: list[int], count: int, token: int) -> int:
    """CTAs of a row, as `row_ctas.cuh` finds them."""
    turns = [-(-length // TURN) for length in lengths]
    quota = max(1.0, sum(turns) / count)
    while True:
        found = [max(1, math.ceil(own / quota - 0.01)) for own in turns]
        if sum(found) <= count:
            return found[token]
        quota *= 1 + 0.5 * (sum(found) - count) / count


def single(value: float) -> float:
    return ctypes.c_float(value).value


def cut_tokens(lengths: list[int], workers: int) -> list[list[int]]:
    """The first turn of each part of each token, as `balance.cuh` cuts them, written a second time."""
    turns = [-(-length // TURN) for length in lengths]
    total = sum(turns) + 2 * len(turns)
    quota, most = max(4, -(-total // workers)), max(turns) + 2
    longest_short, stretched = max(quota, 10), 1.0
    longs = sum(own for own in turns if own > longest_short)
    if total - most <= 4 * len(turns) and most > 2 * quota and 0 < 3 * longs < total:
        first, others = max(quota, 6), total - longs
        fits = (quota for quota in range(first, first + 4) if others / quota + longs / (quota - 4) <= workers)
        quota = next(fits, first + 4)
        stretched = single(quota / (quota - 4))
    else:
        longest_short = max(turns)
    snap, others, longs, after, firsts = max(1, quota // 32), 0, 0, 0, []
    for own in turns:
        begin, is_long = after, own > longest_short
        others, longs = others + (0 if is_long else own) + 2, longs + (own if is_long else 0)
        after = others + int(single(longs * stretched))
        inside = [worker for worker in range(1, workers) if begin < worker * quota < after]
        if is_long:
            ends = [begin, *(worker * quota for worker in inside), after]
            done = list(itertools.accumulate(to - at - 4 if to - at >= 6 else 0 for at, to in itertools.pairwise(ends)))
            cuts = [int(single(single(up_to * own / done[-1]) + 0.5)) for up_to in done[:-1]]
        else:
            cuts = [worker * quota - begin - 2 for worker in inside]
        firsts.append([0, *(turn for turn in cuts if snap <= turn <= own - snap)])
    return firsts
