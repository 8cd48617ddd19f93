"""Selection of keys on Hopper without a GPU: the kernel's own code, a coroutine a thread, and what chooses it."""

from __future__ import annotations

import ctypes
import re
import struct
from typing import Any

import pytest
import torch
from hopper_on_cpu import NO_COMPILER, build
from topk_oracle import KINDS, hard_rows, topk_oracle

from mla_ops.formats import allocate_cache
from mla_ops.kernels.hopper import indexer_logits, select_keys, sources
from mla_ops.kernels.hopper.select_keys import (
    CLUSTERS,
    Plan,
    capacity_for,
    fixed_bytes,
    group_sizes,
    plan_for,
    segment_for,
    share_for,
)

INT32_MAX = 2**31 - 1


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if NO_COMPILER:
        pytest.skip("there is no C++ compiler")
    return build("hopper_select.cpp", tmp_path_factory.mktemp("select"))


@pytest.fixture
def launches(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Launches go to the CPU, by the plan that `plan` says; `kernels` are those that were launched."""
    state: dict[str, Any] = {"plan": None, "seed": 0, "kernels": []}

    class Launched:
        def __init__(self, name: str) -> None:
            self.name = name

        def launch(
            self, grid: tuple[int, int, int], block: object, shared: int, cluster: tuple[int, int, int], params: bytes
        ) -> None:
            heads, tokens, source = re.findall(r"\w+", self.name)[1:]
            assert len(params) == library.bytes_of_params()
            assert cluster[0] == state["plan"].cluster
            state["kernels"].append(self.name)
            kernel = int(heads), int(tokens), source.encode()
            assert library.select_keys(params, *kernel, grid[0], shared, state["seed"]) == 0, self.name

    def tensor_map(address: int, shape: tuple[int, ...], strides: tuple[int, int], box: tuple[int, int]) -> bytes:
        return struct.pack("7Q72x", address, *shape[:2], *strides, *box)

    monkeypatch.setattr(indexer_logits, "tensor_map", tensor_map)
    monkeypatch.setattr(indexer_logits, "num_sms", lambda _: 100)
    monkeypatch.setattr(select_keys, "_at_once", lambda _: ())
    monkeypatch.setattr(select_keys, "WHOLE_COLUMNS", 0)
    monkeypatch.setattr(select_keys, "plan_for", lambda *_: state["plan"])
    monkeypatch.setattr(sources, "load", lambda source, name, device: Launched(name))
    return state


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_the_host_lays_out_what_the_kernel_reads(library: ctypes.CDLL) -> None:
    assert library.bytes_of_params() == ctypes.sizeof(select_keys.SelectParams)
    for tokens, size in select_keys.CHOICE_BYTES.items():
        assert library.bytes_of_choice(tokens) == size


def queries(num_tokens: int, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and weights whose score of a key of ones is the key's scale, to the bit."""
    q = torch.zeros(num_tokens, num_heads, 128)
    q[:, 5, 77] = 1
    weights = torch.zeros(num_tokens, num_heads)
    weights[:, 5] = 1
    return q.to(torch.float8_e4m3fn), weights


PLANS = {
    "all scores have room": Plan(1, 1, 1600, 4, 50),
    "fewer entries again and again": Plan(1, 1, 320, 2, 50),
    "one reading of a part, and a guess": Plan(1, 1, 900, 4, 50),
    "a cluster": Plan(1, 3, 400, 2, 50),
    "a cluster whose CTAs all hand on everything": Plan(1, 3, 320, 2, 17),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_are_those_of_a_stable_sort(launches: dict[str, Any], kind: str, plan: Plan) -> None:
    """Scores ascend, descend, are equal, are NaN: each row's scores are the scales of its keys."""
    for row in hard_rows(kind, 1, 1501):
        scale = row.clone()
        q, weights = queries(1, 64)
        k = torch.ones(len(row), 128).to(torch.float8_e4m3fn)
        want, counts = topk_oracle(scale[None] + 0.0, 50, int32(3), int32(1499))
        indices, valid = torch.full((1, 50), -7, dtype=torch.int32), int32(-7)
        launches["plan"] = plan
        select_keys.select_keys_flat(
            q, k, weights, int32(3), int32(1499), 50, k_scale=scale, indices=indices, valid_counts=valid
        )
        assert torch.equal(valid, counts)
        assert torch.equal(indices, want)


def test_a_row_whose_guess_was_wrong_is_read_again(launches: dict[str, Any]) -> None:
    """The best are all in what is seen first: tiles of the first segment, every sixth."""
    k, columns = 60, 64 * 24
    tile = torch.arange(columns) // 64
    scale = torch.rand(columns) + torch.where(tile % 6 == 0, 10.0, 1.0)
    q, weights = queries(1, 64)
    keys = torch.ones(columns, 128).to(torch.float8_e4m3fn)
    want, counts = topk_oracle(scale[None], k)
    indices, valid = torch.full((1, k), -7, dtype=torch.int32), int32(-7)
    launches["plan"] = Plan(1, 1, 320, 4, k)
    rest = int32(0), int32(columns), k
    select_keys.select_keys_flat(q, keys, weights, *rest, k_scale=scale, indices=indices, valid_counts=valid)
    assert torch.equal(valid, counts)
    assert torch.equal(indices, want)


@pytest.mark.parametrize(
    ("num_heads", "plan"),
    [
        (64, Plan(2, 1, 400, 2, 9)),
        (32, Plan(4, 1, 300, 1, 9)),
        (64, Plan(4, 1, 300, 2, 9)),
        (64, Plan(2, 2, 400, 1, 40)),
    ],
)
def test_flat_rows_of_a_group_have_bounds_of_their_own(launches: dict[str, Any], num_heads: int, plan: Plan) -> None:
    starts = int32(0, 3, 100, 64, -5, 900, 0, 5, 0)
    ends = int32(1000, 800, 140, 64, INT32_MAX, 2, 41, 46, 0)
    q, weights = queries(9, num_heads)
    weights[:, 5] = torch.tensor([1.0, 2, -1, 1, 1, 1, 0, 0.5, 1])
    scale = torch.rand(1000) + 0.01
    k = torch.ones(1000, 128).to(torch.float8_e4m3fn)
    want, counts = topk_oracle(weights[:, 5:6] * scale, 41, starts, ends)
    indices, valid = torch.full((9, 45), -7, dtype=torch.int32)[:, 2:43], torch.full((9,), -7, dtype=torch.int32)
    launches["plan"], launches["seed"] = plan, 3
    select_keys.select_keys_flat(q, k, weights, starts, ends, 41, k_scale=scale, indices=indices, valid_counts=valid)
    assert torch.equal(valid, counts)
    assert torch.equal(indices, want)


@pytest.mark.parametrize("translate", [False, True], ids=["positions", "slots"])
@pytest.mark.parametrize(
    ("block_size", "tokens_each", "plan"),
    [
        (64, 1, Plan(1, 1, 300, 2, 30)),
        (16, 1, Plan(1, 4, 300, 2, 15)),
        (128, 2, Plan(2, 1, 300, 2, 30)),
        (8, 3, Plan(2, 2, 300, 2, 25)),
        (64, 5, Plan(4, 1, 300, 2, 30)),
    ],
)
def test_paged_rows(launches: dict[str, Any], block_size: int, tokens_each: int, plan: Plan, translate: bool) -> None:
    """Rows of length 0 and past the table, blocks that there are not, tokens of no request, neighbours of another."""
    num_requests, columns = 3, 900
    blocks_each, num_tokens = -(-columns // block_size), num_requests * tokens_each
    num_blocks = num_requests * blocks_each + 1
    cache = allocate_cache("fp8_index", num_blocks, block_size)
    scale = torch.rand(num_blocks, block_size) + 0.01
    rows = cache.view(num_blocks, -1)
    rows[:, : 128 * block_size] = torch.ones(1).to(torch.float8_e4m3fn).view(torch.uint8)
    rows[:, 128 * block_size : 132 * block_size] = scale.view(torch.uint8)
    table = torch.randperm(num_blocks)[: num_requests * blocks_each].view(num_requests, -1).to(torch.int32)
    table[0, 0], table[1, -1], table[2, 1] = -1, num_blocks, INT32_MAX
    lengths = int32(*(columns - 37 * i % 290 for i in range(num_tokens)))
    lengths[-1], lengths[1] = INT32_MAX, 0
    if num_tokens > 3:
        lengths[3] = 30
    requests = torch.arange(num_requests).repeat_interleave(tokens_each).to(torch.int32)
    if tokens_each > 2:
        requests[2], requests[4] = -1, num_requests
    q, weights = queries(num_tokens, 32)
    width = blocks_each * block_size
    position = torch.arange(width)
    block = table.long()[requests.long().clamp(0, num_requests - 1)][:, position // block_size]
    there = (block >= 0) & (block < num_blocks)
    known = (requests >= 0) & (requests < num_requests)
    scores = torch.where(there, scale[block.clamp(0, num_blocks - 1), position % block_size], -torch.inf)
    ends = torch.where(known, lengths, 0)
    want, counts = topk_oracle(scores, 30, torch.zeros_like(ends), ends)
    if translate:
        slots = block * block_size + position % block_size
        slots = torch.where((block < 0) | (slots > INT32_MAX), -1, slots)
        want = torch.where(want >= 0, slots.gather(1, want.clamp(min=0).long()), -1).to(torch.int32)
    indices, valid = torch.full((num_tokens, 30), -7, dtype=torch.int32), torch.full_like(lengths, -7)
    launches["plan"], launches["seed"] = plan, block_size
    rest = lengths, table, requests, 30, "fp8_index"
    select_keys.select_keys(q, cache, weights, *rest, translate=translate, indices=indices, valid_counts=valid)
    assert torch.equal(valid, counts)
    assert torch.equal(indices, want)


H200 = (66, 28, 14, 7)  # clusters of each size in `CLUSTERS` at one time


def test_a_plan_fits_its_rows_and_an_sm() -> None:
    """Every k: the best and a segment, in a cluster the best and what is handed on; all clusters at one time."""
    at_once = dict(zip(CLUSTERS, H200, strict=True))
    for heads in (32, 64):
        for num_tokens in (1, 4, 7, 8, 14, 16, 28, 64, 66, 67, 1000):
            for together in (1, 2, 4, 8):
                for columns in (64, 4096, 32768, 131072):
                    for best in (1, 2, 512, 2047, 2048, 4096):
                        plan = plan_for(heads, num_tokens, together, columns, best, H200)
                        assert plan.tokens in group_sizes(heads)
                        assert plan.capacity >= best + plan.segment * 64
                        assert plan.segment > 0
                        used = fixed_bytes(heads, plan.tokens) + 8 * plan.tokens * plan.capacity
                        assert used <= sources.MAX_SHARED_BYTES
                        if plan.cluster > 1:
                            assert -(-num_tokens // plan.tokens) <= at_once[plan.cluster]
                            assert plan.capacity >= best + plan.cluster * plan.share


@pytest.mark.parametrize(
    ("num_tokens", "together", "num_columns", "expected"),
    [
        (1, 1, 4096, (1, 4)),
        (1, 1, 32768, (1, 16)),
        (4, 1, 131072, (1, 16)),
        (16, 1, 32768, (1, 4)),
        (64, 1, 32768, (1, 2)),
        (128, 1, 32768, (1, 1)),
        (128, 2, 32768, (2, 2)),
        (1024, 8, 32768, (2, 1)),
    ],
)
def test_few_rows_are_shared_by_ctas(
    num_tokens: int, together: int, num_columns: int, expected: tuple[int, int]
) -> None:
    plan = plan_for(64, num_tokens, together, num_columns, 2048, H200)
    assert (plan.tokens, plan.cluster) == expected


def test_a_cluster_hands_on_more_than_its_share() -> None:
    assert share_for(2048, 16) == 200
    assert share_for(3, 16) == 3
    assert share_for(2048, 1) == 2048
    assert segment_for(2048, capacity_for(64, 1)) == 64
    assert segment_for(4096, capacity_for(64, 2)) == 16
    assert segment_for(4096, capacity_for(32, 4)) == 0, "four rows of 4,096 entries each do not fit"
