"""Prefill's short tiles, and the table of the long ones, by the Hopper kernel's own code, compiled for this CPU."""

from __future__ import annotations

import ctypes
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import attention_oracle
import dense_oracle
import hopper_on_cpu
import pytest
import torch

from mla_ops.kernels.hopper import prefill_attention, sources

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(hopper_on_cpu.NO_COMPILER, reason="no C++ compiler"),
]

TILE = ("token", "rows", "last", "end", "begin_k", "len_k")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = hopper_on_cpu.build("hopper_prefill.cpp", tmp_path_factory.mktemp("prefill"))
    assert found.bytes_of_params() == ctypes.sizeof(prefill_attention.Params)
    return found


class Device:
    """Stands for the driver: runs the kernel for short tiles, and reads the table that it leaves for the other one."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.tiles: list[dict[str, int]] | None = None
        self.seed = 0

    def load(self, source: str, kernel: str, device_index: int) -> Any:
        device, dims = self, [int(part) for part in kernel.split("<")[1].split(",")[:2]]

        class Function:
            @staticmethod
            def launch(grid: Any, block: Any, shared_bytes: Any, cluster: Any, params: bytes, **_: Any) -> None:
                if source == "prefill_short.cu":
                    device.library.prefill_short(params, *dims, grid[0], device.seed)
                else:
                    device.read_table(params)

            @staticmethod
            def leave_l1(blocks: int) -> None:
                pass

        return Function

    def read_table(self, params: bytes) -> None:
        plan = prefill_attention.Params.from_buffer_copy(params).plan
        entry = prefill_attention.PLAN_ENTRY
        taken, count = (ctypes.c_int * 2).from_address(plan)
        assert taken == 0
        self.tiles = [
            dict(zip(TILE, (ctypes.c_int * entry).from_address(plan + 4 * (entry // 2 + n * entry)), strict=False))
            for n in range(count)
        ]


@pytest.fixture
def device(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    stand_in = Device(library)
    monkeypatch.setattr(sources, "load", stand_in.load)
    monkeypatch.setattr(prefill_attention, "num_sms", lambda _: 3)
    monkeypatch.setattr(prefill_attention, "_tensor_map", lambda *_: bytes(128))
    prefill_attention._load_short.cache_clear()
    yield stand_in
    prefill_attention._load_short.cache_clear()


def starts(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def inputs(
    lens_q: list[int], lens_k: list[int], heads: tuple[int, int], dims: tuple[int, int], padding: int
) -> tuple[Any, ...]:
    """Arguments up to the scale; NaN in `padding` rows of each tensor behind the last request."""

    def normal(rows: int, num_heads: int, dim: int) -> torch.Tensor:
        tensor = torch.randn(rows + padding, num_heads, dim).bfloat16()
        tensor[rows:] = math.nan
        return tensor

    q, k = normal(sum(lens_q), heads[0], dims[0]), normal(sum(lens_k), heads[1], dims[0])
    v = normal(sum(lens_k), heads[1], dims[1])
    return q, k, v, starts(lens_q), starts(lens_k), max([0, *lens_q]), max([0, *lens_k]), dims[0] ** -0.5


def call(arguments: tuple[Any, ...], causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    q, v = arguments[0], arguments[2]
    out, lse = torch.full((*q.shape[:2], v.shape[2]), 7.0, dtype=q.dtype), torch.full(q.shape[:2], 7.0)
    prefill_attention.prefill_attention(*arguments, causal=causal, out=out, lse=lse)
    return out, lse


def long_tiles(lens_q: list[int], lens_k: list[int], causal: bool) -> list[dict[str, int]]:
    """Entries that the table must have, in the order of requests."""
    found, begin_q, begin_k = [], 0, 0
    for len_q, len_k in zip(lens_q, lens_k, strict=True):
        for first in range(0, len_q, prefill_attention.QUERIES):
            rows = min(len_q - first, prefill_attention.QUERIES)
            last = first + len_k - len_q if causal else len_k - 1
            end = min(max(last + rows, 0), len_k) if causal else len_k
            few = prefill_attention.cells(rows, end) <= prefill_attention.SHORT_CELLS
            if end and not (few and len_q <= prefill_attention.QUERIES):
                found.append(dict(zip(TILE, (begin_q + first, rows, last, end, begin_k, len_k), strict=True)))
        begin_q, begin_k = begin_q + len_q, begin_k + len_k
    return found


def check(
    device: Device,
    lens_q: list[int],
    lens_k: list[int],
    causal: bool,
    heads: tuple[int, int] = (3, 3),
    dims: tuple[int, int] = (64, 64),
    padding: int = 5,
) -> None:
    """Every row is the short kernel's or in the table; the short ones equal float64."""
    arguments = inputs(lens_q, lens_k, heads, dims, padding)
    device.tiles = None
    out, lse = call(arguments, causal)
    expected_tiles = long_tiles(lens_q, lens_k, causal)
    if device.tiles is None:
        assert not expected_tiles
    else:
        lengths = [(tile["len_k"] - 1) // 128 for tile in device.tiles]
        assert lengths == sorted(lengths, reverse=True)
        for tile, after in itertools.pairwise(device.tiles):
            if tile["begin_k"] == after["begin_k"]:
                assert after["token"] + 128 == tile["token"]
        assert sorted(device.tiles, key=lambda tile: tile["token"]) == expected_tiles
    short = torch.ones(len(out), dtype=torch.bool)
    for tile in expected_tiles:
        short[tile["token"] : tile["token"] + tile["rows"]] = False
    q, k, v, starts_q, starts_k, _, _, scale = arguments
    tokens = torch.nonzero(short).flatten().tolist()
    expected = dense_oracle.prefill(
        q, k, v, starts_q, starts_k, scale, causal=causal, operand=torch.bfloat16, tokens=tokens
    )
    attention_oracle.assert_close(out, lse, expected)
    assert bool((out[~short] == 7).all())
    assert bool((lse[~short] == 7).all())


CASES = {
    "one token each": ([1] * 40, [1] * 40),
    "every small length": ([*range(1, 20)], [*range(1, 20)]),
    "a tile and its neighbours": ([127, 128, 129], [127, 128, 129]),
    "more than a region": ([64] * 5, [64] * 5),
    "more keys than queries": ([1, 3, 17, 2, 40, 1], [9, 100, 33, 2, 200, 1000]),
    "fewer keys than queries": ([40, 9, 130, 300], [3, 0, 120, 1]),
    "many more queries than keys": ([700, 20, 513], [130, 1, 7]),
    "nothing": ([0, 0], [0, 4]),
    "empty ones between": ([0, 5, 0, 0, 16, 0], [3, 5, 0, 9, 16, 2]),
    "a long one among short ones": ([3, 700, 8, 0, 129], [3, 700, 8, 5, 129]),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("lens_q", "lens_k"), CASES.values(), ids=CASES)
def test_short_tiles_equal_float64_and_the_others_are_in_the_table(
    device: Device, lens_q: list[int], lens_k: list[int], causal: bool
) -> None:
    check(device, lens_q, lens_k, causal)


@pytest.mark.parametrize("dims", [(192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (17, 17)], ids=str)
def test_heads_and_dims(device: Device, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    check(device, [1, 2, 3, 5, 9, 20], [1, 2, 3, 7, 9, 33], True, heads, dims)


@pytest.mark.parametrize("seed", range(6))
def test_random_mixtures(device: Device, seed: int) -> None:
    drawn = random.Random(seed)
    device.seed = seed

    def length() -> int:
        return int(drawn.lognormvariate(2.5, 1.5)) if drawn.random() < 0.9 else 0

    lens_q = [min(length(), 400) for _ in range(drawn.randrange(1, 25))]
    lens_k = [len_q if drawn.random() < 0.5 else min(length(), 900) for len_q in lens_q]
    check(device, lens_q, lens_k, drawn.random() < 0.7, padding=drawn.choice([0, 1, 140]))


def test_the_bits_of_a_request_do_not_depend_on_the_batch(device: Device) -> None:
    """Alone, behind others, across the edge of a region, and with other requests' NaN."""
    for length in (1, 2, 3, 5, 9, 30, 100):
        q, k, v, *_ = inputs([length], [length], (6, 3), (64, 64), 0)
        alone = call((q, k, v, starts([length]), starts([length]), length, length, 0.125), True)
        for before, behind in ((1, 0), (100, 3), (127, 50)):
            lens = [before, length, behind]
            others = [torch.full((sum(lens), *tensor.shape[1:]), math.nan).bfloat16() for tensor in (q, k, v)]
            for other, tensor in zip(others, (q, k, v), strict=True):
                other[before : before + length] = tensor
            found = call((*others, starts(lens), starts(lens), 128, 128, 0.125), True)
            for one, other in zip(alone, found, strict=True):
                assert torch.equal(one, other[before : before + length])


WILD = ([0, 200, 0, 200, 0, 200], [0, 5, -(2**31), 300], [7, 3, 2**31 - 1], [150, 0, 150])


@pytest.mark.parametrize("wild", WILD, ids=str)
def test_starts_that_do_not_ascend_leave_the_table_within_its_room(
    device: Device, wild: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_attention, "SHORT_CELLS", 0)
    room: list[torch.Tensor] = []
    empty = torch.empty

    def with_guard(size: int, **options: Any) -> torch.Tensor:
        memory = empty(size + 1024, **options).fill_(-77)
        room.append(memory[size:])
        return memory[:size]

    q, k, v = (torch.ones(200, 2, 64).bfloat16() for _ in range(3))
    cu_seqlens = torch.tensor(wild, dtype=torch.int32)
    monkeypatch.setattr(torch, "empty", with_guard)
    call((q, k, v, cu_seqlens, cu_seqlens, 200, 200, 0.125), True)
    (guard,) = room
    assert bool((guard == -77).all())
    assert device.tiles is not None
    for tile in device.tiles:
        assert 0 <= tile["token"] <= tile["token"] + tile["rows"] <= 200
        assert 0 <= tile["begin_k"] <= tile["begin_k"] + tile["end"] <= 200


def test_shares_of_a_region() -> None:
    """Enough CTAs for a GPU, where there is work for them, and not many more."""
    for num_sms in (132, 78):
        for num_heads in (1, 2, 16, 128):
            for num_regions in (1, 2, 16, 64, 500, 8192):
                shares = prefill_attention.shares_of_a_region(num_regions, num_heads, num_sms)
                assert 1 <= shares <= max(2 * num_heads, 1)
                assert shares * num_regions <= max(4096, 2 * num_sms, num_regions)
