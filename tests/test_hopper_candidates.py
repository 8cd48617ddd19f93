"""Selection of keys for few rows in one launch on Hopper: the kernel's own code on the CPU."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
import torch
from hopper_on_cpu import NO_COMPILER, build
from topk_oracle import KINDS, hard_rows, topk_oracle

from mla_ops.formats import allocate_cache
from mla_ops.kernels.hopper import groups, indexer_candidates, indexer_logits, sources
from mla_ops.kernels.reference import indexer as reference

pytestmark = pytest.mark.skipif(NO_COMPILER, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build("hopper_candidates.cpp", tmp_path_factory.mktemp("candidates"))


@pytest.fixture
def launches(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    state: dict[str, Any] = {"sms": 3, "seed": 0, "counters": (ctypes.c_uint64 * 4)(), "status": 0}

    class Launched:
        def __init__(self, name: str) -> None:
            self.name = name

        def launch(
            self, grid: tuple[int, int, int], block: object, shared: object, cluster: object, params: bytes
        ) -> None:
            assert len(params) == library.bytes_of_params() == ctypes.sizeof(indexer_candidates.SelectionParams)
            heads = 64 if "64" in self.name else 32
            assert library.select_in_one(params, heads, grid[0], state["seed"]) == state["status"], self.name

    def tensor_map(address: int, shape: tuple[int, ...], strides: tuple[int, int], box: tuple[int, int]) -> bytes:
        return struct.pack("7Q72x", address, *shape[:2], *strides, *box)

    monkeypatch.setattr(indexer_logits, "tensor_map", tensor_map)
    monkeypatch.setattr(indexer_logits, "num_sms", lambda _: state["sms"])
    monkeypatch.setattr(groups, "counters", lambda *_: ctypes.addressof(state["counters"]))
    monkeypatch.setattr(sources, "load", lambda source, name, device: Launched(name))
    return state


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def choose(given: tuple[Any, ...], topk: int, block_size: int, **options: Any) -> tuple[torch.Tensor, ...]:
    num_rows, num_columns = given[0].shape[0], given[4].shape[1] * block_size
    indices, counts = (
        torch.full((num_rows, topk), -7, dtype=torch.int32),
        torch.full((num_rows,), -7, dtype=torch.int32),
    )
    scores = torch.full((num_rows, num_columns), torch.nan)
    out = {"scores": scores, "indices": indices, "valid_counts": counts}
    options = {"translate": False, **options}
    indexer_candidates.select_keys(*given, topk, "fp8_index", block_size, **options, **out)
    return indices, counts, scores


@pytest.mark.parametrize(
    ("num_heads", "block_size", "lengths", "sms", "topk", "of_memory"),
    [
        (64, 64, (5000,), 7, 60, (0,)),
        (32, 128, (900, 0, 3000, 63), 9, 60, (1,)),  # rows that have less, or not many more, than is wanted
        (64, 192, (1280, 1279), 5, 20, (0, 1)),
        (32, 64, (0, -5), 3, 60, (0,)),
        (64, 64, (5056, 19), 6, 20, (1,)),
    ],
)
def test_the_selection_is_that_of_the_scores(
    library: ctypes.CDLL,
    launches: dict[str, Any],
    num_heads: int,
    block_size: int,
    lengths: tuple[int, ...],
    sms: int,
    topk: int,
    of_memory: tuple[int, ...],
) -> None:
    num_rows, max_length = len(lengths), 5056
    blocks_each = -(-max_length // block_size)
    cache = allocate_cache("fp8_index", num_rows * blocks_each, block_size)
    slots = torch.arange(num_rows * blocks_each * block_size)
    reference.write_index_cache(torch.randn(len(slots), 128), cache, slots, "fp8_index")
    table = torch.randperm(num_rows * blocks_each).view(num_rows, -1).to(torch.int32)
    table[0, 1] = -1
    q = torch.randn(num_rows, num_heads, 128).to(torch.float8_e4m3fn)
    weights, requests = torch.randn(num_rows, num_heads), torch.arange(num_rows).to(torch.int32)
    given = q, cache, weights, int32(*lengths), table, requests
    launches["sms"] = sms
    indices, counts, scores = choose(given, topk, block_size)
    wanted, valid = topk_oracle(scores, topk, None, given[3])
    assert torch.equal(counts, valid)
    assert torch.equal(indices, wanted)
    assert library.chosen_of_memory() in of_memory


def rows_of_scales(scale: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Arguments of a selection in which a key of ones has its scale for a score."""
    num_rows, num_blocks = len(lengths), len(scale) // 64
    q, weights = torch.zeros(num_rows, 64, 128), torch.zeros(num_rows, 64)
    q[:, 5, 77], weights[:, 5] = 1, 1
    e4m3 = torch.float8_e4m3fn
    cache = torch.empty(num_blocks, 64 * 132, dtype=torch.uint8)
    cache[:, : 64 * 128] = torch.ones(1).to(e4m3).view(torch.uint8)
    cache[:, 64 * 128 :] = scale.view(num_blocks, 64).view(torch.uint8)
    table = torch.arange(num_blocks, dtype=torch.int32).repeat(num_rows, 1)
    return q.to(e4m3), cache.view(num_blocks, 64, 132), weights, lengths, table, torch.arange(num_rows).to(torch.int32)


@pytest.mark.parametrize("kind", [*KINDS, "one piece"])
def test_hard_rows(launches: dict[str, Any], kind: str) -> None:
    """Among them rows whose best all lie in tiles that one CTA has."""
    scale = hard_rows("normal" if kind == "one piece" else kind, 1, 2560)[0]
    if kind == "one piece":
        scale.view(-1, 64)[::3] += 9
    given = rows_of_scales(scale, int32(2560, 2001, 90))
    wanted, valid = topk_oracle(scale.expand(3, -1), 100, None, given[3])
    for seed, sms in enumerate((7, 12)):
        launches["sms"], launches["seed"] = sms, seed
        indices, counts, _ = choose(given, 100, 64)
        assert not any(launches["counters"])
        assert torch.equal(counts, valid)
        assert torch.equal(indices, wanted)


def test_keys_of_blocks_that_there_are_not_come_last(launches: dict[str, Any]) -> None:
    """They score -inf, and columns behind a row's end are no better."""
    given = rows_of_scales(hard_rows("normal", 1, 2560)[0], int32(2530, 2560))
    given[4][0, 2:], given[4][1, ::2] = -1, -1
    launches["sms"] = 5
    indices, counts, scores = choose(given, 200, 64)
    wanted, valid = topk_oracle(scores, 200, None, given[3])
    assert torch.equal(counts, valid)
    assert torch.equal(indices, wanted)


def test_slots_of_a_block_table(launches: dict[str, Any]) -> None:
    scale = hard_rows("normal", 1, 2560)[0]
    given = rows_of_scales(scale, int32(2560, 150))
    given[4].copy_(given[4].flip(1))
    launches["sms"] = 6
    columns, _, _ = choose(given, 200, 64)
    slots, counts, _ = choose(given, 200, 64, translate=True)
    assert counts.tolist() == [200, 150]
    assert torch.equal(slots, torch.where(columns < 0, -1, (39 - columns // 64) * 64 + columns % 64).int())


def test_a_launch_that_finds_others_counted_fails(launches: dict[str, Any]) -> None:
    launches["sms"], launches["status"], launches["counters"][0] = 4, 3, 7 << 32 | 1
    choose(rows_of_scales(hard_rows("normal", 1, 2560)[0], int32(2560)), 100, 64)


def test_few_rows_of_long_contexts_are_one_launch() -> None:
    takes = indexer_candidates.takes
    assert all(takes(rows, rows, 131072, 64, 2048, 132) for rows in (1, 2, 3, 4))
    assert not takes(5, 5, 131072, 64, 2048, 132)
    assert not takes(2, 1, 131072, 64, 2048, 132)  # tokens of one request share its keys
    assert not takes(1, 1, 32768, 64, 2048, 132)
    assert not takes(1, 1, 131072, 17, 2048, 132)
    assert not takes(1, 1, 2**21, 64, 2048, 132)
    assert not takes(1, 1, 131072, 64, 4096, 132)
    assert not takes(4, 4, 196608, 64, 2048, 132)
