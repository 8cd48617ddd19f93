"""Scores of the indexer on Hopper without a GPU: the kernel's own code, a coroutine a thread, and what chooses it."""

from __future__ import annotations

import ctypes
import itertools
import math
import random
import re
import struct
from collections import Counter
from typing import Any

import pytest
import torch
from hopper_on_cpu import NO_COMPILER, build
from topk_oracle import of_planes

from mla_ops.dispatch import Call
from mla_ops.formats import allocate_cache
from mla_ops.kernels.hopper import indexer_logits, sources
from mla_ops.kernels.hopper.indexer_logits import (
    TILE,
    box_keys,
    group_size,
    group_sizes,
    in_boxes,
    logits_reason,
)
from mla_ops.kernels.reference import indexer as reference
from mla_ops.testing.index_scores import exact_scores

INF, INT32_MAX = math.inf, 2**31 - 1


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if NO_COMPILER:
        pytest.skip("there is no C++ compiler")
    return build("hopper_indexer.cpp", tmp_path_factory.mktemp("indexer"))


Line = tuple[int, int, int, int, int, int]


def parts(
    library: ctypes.CDLL,
    tokens: int,
    columns: int,
    starts: list[int] | None,
    ends: list[int],
    requests: list[int],
    num_requests: int,
    ctas: int,
) -> list[Line]:
    """Each CTA's work in order: (CTA, first token, tokens, first tile, tiles, end of the keys)."""
    room, count = len(ends) * 4 + ctas, len(ends)
    out = (ctypes.c_int * (6 * room))()
    arrays = [(ctypes.c_int * count)(*values) for values in (starts or ends, ends, requests)]
    lines = library.parts_of(starts is not None, tokens, count, columns, num_requests, *arrays, ctas, out, room)
    assert lines >= 0
    return [tuple(out[6 * i : 6 * i + 6]) for i in range(lines)]


def clamped(value: int, most: int) -> int:
    return min(max(value, 0), most)


def check(lines: list[Line], tokens: int, wanted: dict[int, tuple[int, int]], ctas: int) -> None:
    """Every row's tiles are done once, CTAs have equal parts, and no tile is done that no row of a group needs."""
    done: Counter[tuple[int, int]] = Counter()
    shares: Counter[int] = Counter()
    for cta, first, count, first_tile, tiles, _ in lines:
        assert 1 <= count <= tokens
        assert first // tokens == (first + count - 1) // tokens
        shares[cta] += tiles
        for token, tile in itertools.product(range(first, first + count), range(first_tile, first_tile + tiles)):
            done[token, tile] += 1
    assert set(done.values()) <= {1}
    for token, (start, end) in wanted.items():
        for tile in range(start // TILE, -(-end // TILE)) if end > start else ():
            assert done[token, tile] == 1
    total = sum(shares.values())
    assert all(share in (total // ctas, -(-total // ctas)) for share in shares.values())
    groups = {(line[1], line[2]) for line in lines}
    needed = 0
    for first, count in groups:
        rows = [wanted[token] for token in range(first, first + count) if wanted[token][1] > wanted[token][0]]
        needed += -(-max(end for _, end in rows) // TILE) - min(start for start, _ in rows) // TILE
    assert total == needed


LENGTHS = (0, 0, 1, 63, 64, 65, 127, 640, 999, 5000, -1, INT32_MAX, -(2**31))


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(12))
def test_all_ctas_together_do_each_paged_row_once(library: ctypes.CDLL, tokens: int, seed: int) -> None:
    draw = random.Random(seed)
    num_requests, columns, ctas = draw.randint(1, 6), draw.choice((64, 100, 1000)), draw.choice((1, 3, 132))
    requests: list[int] = []
    while len(requests) < 25:  # next to one another, or not; some that there are not
        requests += [draw.choice((-1, num_requests, *range(num_requests)))] * draw.randint(1, 9)
    ends = [draw.choice(LENGTHS) for _ in requests]
    wanted = {
        token: (0, clamped(end, columns) if 0 <= request < num_requests else 0)
        for token, (end, request) in enumerate(zip(ends, requests, strict=True))
    }
    lines = parts(library, tokens, columns, None, ends, requests, num_requests, ctas)
    check(lines, tokens, wanted, ctas)
    for _, first, count, *_, end in lines:
        assert len(set(requests[first : first + count])) == 1, "tokens of one request share keys"
        assert end == max(wanted[token][1] for token in range(first, first + count))


@pytest.mark.parametrize("tokens", [4, 8])
@pytest.mark.parametrize("seed", range(12))
def test_all_ctas_together_do_each_flat_row_once(library: ctypes.CDLL, tokens: int, seed: int) -> None:
    draw = random.Random(seed)
    columns, ctas = draw.choice((1, 64, 1000)), draw.choice((1, 3, 132))
    starts, ends = ([draw.choice((*LENGTHS, 300, 500)) for _ in range(30)] for _ in range(2))
    wanted = {
        token: (clamped(start, columns), clamped(end, columns))
        for token, (start, end) in enumerate(zip(starts, ends, strict=True))
    }
    check(parts(library, tokens, columns, starts, ends, [0] * 30, 1, ctas), tokens, wanted, ctas)


@pytest.mark.parametrize("length", [0, -1, -(2**31)])
def test_rows_without_keys_give_no_cta_any_work(library: ctypes.CDLL, length: int) -> None:
    """Neither a length of 0, nor one that is 0 less draft tokens: peers read these as unsigned, or index by them."""
    for tokens in (1, 2, 4, 8):
        assert parts(library, tokens, 1000, None, [length] * 9, list(range(9)), 9, 132) == []


@pytest.mark.parametrize("ctas", [1, 7, 66])
@pytest.mark.parametrize("tiles", [64, 200])
def test_a_cta_that_changes_to_another_group_has_fewer_tiles(library: ctypes.CDLL, tiles: int, ctas: int) -> None:
    tokens, groups, change = 8, 9, 4
    rows = tokens * groups
    lines = parts(library, tokens, tiles * TILE, [0] * rows, [tiles * TILE] * rows, [0] * rows, 1, ctas)
    assert sum(line[4] for line in lines) == groups * tiles
    each = groups * (tiles + change) / ctas
    shares, changes = Counter[int](), Counter[int]()
    for cta, _, _, first_tile, count, _ in lines:
        shares[cta] += count
        changes[cta] += first_tile == 0
    for cta in range(ctas):
        assert each - 1 - change < shares[cta] + change * changes[cta] < each + 1 + change
        assert shares[cta] < each + 1


def test_parts_of_more_tiles_than_an_int_holds_times_ctas(library: ctypes.CDLL) -> None:
    rows, columns = 40, INT32_MAX
    lines = parts(library, 1, columns, None, [INT32_MAX] * rows, list(range(rows)), rows, 132)
    tiles = -(-INT32_MAX // TILE)
    assert sum(line[4] for line in lines) == rows * tiles


@pytest.mark.parametrize(
    ("num_heads", "num_tokens", "num_requests", "expected"),
    [
        (64, 1, 1, 1),
        (64, 128, 128, 1),
        (64, 128, 64, 2),
        (64, 96, 32, 4),
        (64, 4096, 1, 4),
        (32, 64, 16, 4),
        (32, 65, 16, 8),
        (32, 4096, 2, 8),
        (64, 7, 1000, 1),
        (64, 7, 0, 4),
    ],
)
def test_groups_have_the_tokens_of_a_request(num_heads: int, num_tokens: int, num_requests: int, expected: int) -> None:
    assert group_size(num_heads, num_tokens, num_requests) == expected


def test_every_group_has_a_kernel_of_at_most_256_columns() -> None:
    assert group_sizes(64) == (1, 2, 4)
    assert group_sizes(32) == (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("block_size", "expected"), [(64, 64), (192, 64), (1, 0), (4, 0), (8, 8), (16, 16), (32, 32), (48, 0), (100, 0)]
)
def test_copies_of_boxes_are_of_blocks_that_fit_a_tile(block_size: int, expected: int) -> None:
    """Scales of a box, 4 bytes a key, are copied in 16 bytes, and eight rows are what a swizzle repeats after."""
    assert box_keys(block_size) == expected
    assert expected == 0 or (block_size % expected == 0 and TILE % expected == 0 and expected * 4 % 16 == 0)


def test_operands_that_do_not_lie_on_16_bytes_are_copied() -> None:
    storage = torch.zeros(40 * 136 + 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    whole = storage[: 40 * 128].view(40, 128)
    assert in_boxes(whole) is whole
    for view in (
        storage[1 : 1 + 40 * 128].view(40, 128),
        storage[: 40 * 136].view(40, 136)[:, :128],
        whole[:1].expand(40, 128),
    ):
        copied = in_boxes(view)
        assert copied.data_ptr() % 16 == 0
        assert copied.stride() == (128, 1)


def test_a_call_that_is_left_to_triton_says_why() -> None:
    call = Call("indexer_logits", torch.device("cuda"), torch.float8_e4m3fn, num_heads=64)
    assert "bfloat16" in str(logits_reason(call._replace(dtype=torch.bfloat16)))
    assert "32 or 64 heads" in str(logits_reason(call._replace(num_heads=16)))


@pytest.mark.parametrize(("max_length", "kept"), [(2**22, 1), (2**22 + 1, 0)])
def test_l2_keeps_scores_that_leave_it_room(monkeypatch: pytest.MonkeyPatch, max_length: int, kept: int) -> None:
    monkeypatch.setattr(indexer_logits, "tensor_map", lambda *_, **__: bytes(128))
    cache, table = allocate_cache("fp8_index", 4, 64), torch.zeros(1, 2**17, dtype=torch.int32)
    lengths = torch.zeros(2, dtype=torch.int32)
    _, params = indexer_logits.paged_params(
        cache, torch.zeros(2, 32), lengths, table, lengths, max_length, "fp8_index", 2, None
    )
    assert params[-1] == kept


@pytest.mark.parametrize(("num_requests", "few"), [(16, True), (17, False)])
def test_copies_of_few_keys_ask_for_half_lines(monkeypatch: pytest.MonkeyPatch, num_requests: int, few: bool) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(indexer_logits, "tensor_map", lambda *_, half_lines: asked.append(half_lines) or bytes(128))
    cache, table = allocate_cache("fp8_index", 4, 64), torch.zeros(num_requests, 64, dtype=torch.int32)
    tokens = torch.zeros(num_requests, dtype=torch.int32)
    weights = torch.zeros(num_requests, 32)
    indexer_logits.paged_params(cache, weights, tokens, table, tokens, 4096, "fp8_index", num_requests, None)
    assert asked == [few]


def test_warmup_runs_groups_of_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is chosen by the tokens of a request, which a warm-up of one request would not tell apart."""
    from mla_ops import warm_up

    sizes: set[int] = set()
    score = warm_up.ops.paged_indexer_logits

    def record(q: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        sizes.add(group_size(64, q.shape[0], arguments[3].shape[0]))
        return score(q, *arguments)

    monkeypatch.setattr(warm_up.ops, "paged_indexer_logits", record)
    warm_up.warmup(cache_format="fp8_ds_mla", num_heads=2, topk=5, num_tokens=(4,), device="cpu", index_heads=2)
    assert sizes == {1, 2, 4}


# ---- whole launches -------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Launches go to the CPU, on as many CTAs as `sms` says; `kernels` are those that were launched."""
    state: dict[str, Any] = {"sms": 3, "seed": 0, "kernels": []}

    class Launched:
        def __init__(self, name: str) -> None:
            self.name = name

        def launch(
            self,
            grid: tuple[int, int, int],
            block: object,
            shared: object,
            cluster: object,
            params: bytes,
            programmatic: bool,
        ) -> None:
            assert not programmatic
            heads, tokens, source, *planes = re.findall(r"\w+", self.name)[1:]
            assert len(params) == library.bytes_of_params()
            state["kernels"].append(self.name)
            kernel = int(heads), int(tokens), source.encode()
            assert library.scores(params, *kernel, grid[0], state["seed"], len(planes)) == 0, self.name

    def tensor_map(
        address: int, shape: tuple[int, ...], strides: tuple[int, int], box: tuple[int, int], **_: bool
    ) -> bytes:
        return struct.pack("7Q72x", address, *shape[:2], *strides, *box)

    monkeypatch.setattr(indexer_logits, "tensor_map", tensor_map)
    monkeypatch.setattr(indexer_logits, "num_sms", lambda _: state["sms"])
    monkeypatch.setattr(sources, "load", lambda source, name, device: Launched(name))
    return state


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(("num_heads", "num_tokens", "num_kv"), [(64, 6, 200), (32, 9, 130), (64, 1, 64)])
def test_a_flat_launch(launches: dict[str, Any], num_heads: int, num_tokens: int, num_kv: int) -> None:
    q = torch.randn(num_tokens, num_heads, 128).to(torch.float8_e4m3fn)
    k, k_scale = torch.randn(num_kv, 128).to(torch.float8_e4m3fn), torch.rand(num_kv) + 0.01
    weights = torch.randn(num_tokens, num_heads)
    starts = int32(*(0, 7, 131, 200, -9, 0, 60, 0, 129)[:num_tokens])
    ends = int32(*(num_kv, 7, 199, INT32_MAX, 1, 90, 190, 0, 130)[:num_tokens])
    column = torch.arange(num_kv)
    within = (column >= starts[:, None]) & (column < ends[:, None])
    expected, bound = exact_scores(q, k, weights, k_scale)
    for sms in (1, 5):
        launches["sms"], launches["seed"] = sms, sms
        out = torch.full((num_tokens, num_kv + 5), 7.0)
        indexer_logits.indexer_logits(q, k, weights, starts, ends, k_scale=k_scale, out=out[:, :num_kv])
        assert ((out[:, :num_kv].double() - expected).abs() <= bound)[within].all()
        assert (out[:, :num_kv][~within] == 7).all()
        assert (out[:, num_kv:] == 7).all()
    assert {name.split(", ")[-1] for name in launches["kernels"]} == {"FLAT>"}


@pytest.mark.parametrize(("num_heads", "num_tokens", "num_kv"), [(64, 6, 200), (32, 9, 130), (64, 1, 64)])
def test_scores_by_planes_are_the_same_bits(
    launches: dict[str, Any], num_heads: int, num_tokens: int, num_kv: int
) -> None:
    """Words of columns in front of a row, and behind it, are left as they are."""
    q = torch.randn(num_tokens, num_heads, 128).to(torch.float8_e4m3fn)
    k, k_scale = torch.randn(num_kv, 128).to(torch.float8_e4m3fn), torch.rand(num_kv) + 0.01
    starts = int32(*(0, 7, 131, 200, -9, 0, 60, 0, 129)[:num_tokens])
    ends = int32(*(num_kv, 7, 199, INT32_MAX, 1, 90, 190, 0, 130)[:num_tokens])
    rest = k, torch.randn(num_tokens, num_heads), starts, ends
    scores, planes = torch.full((num_tokens, num_kv), 7.0), torch.full((num_tokens, -(-num_kv // 64) * 64), 7.0)
    indexer_logits.indexer_logits(q, *rest, k_scale=k_scale, out=scores)
    launches["sms"], launches["seed"] = 5, 5
    indexer_logits.indexer_logits(q, *rest, k_scale=k_scale, planes=True, out=planes[:, :num_kv])
    column = torch.arange(planes.shape[1])
    within = (column >= starts[:, None]) & (column < ends.clamp(max=num_kv)[:, None])
    read = of_planes(planes)
    assert torch.equal(read[within], scores[within[:, :num_kv]])
    first = column // 16 * 16 + column % 8
    untouched = (first + 8 < starts.clamp(max=num_kv)[:, None]) | (first >= ends[:, None])
    assert torch.equal(read[untouched], of_planes(torch.full_like(planes, 7.0))[untouched])


@pytest.mark.parametrize(
    ("num_heads", "tokens_each", "block_size", "max_length", "num_requests"),
    [
        (64, 1, 64, 1300, 3),
        (32, 1, 17, 1300, 3),
        (64, 2, 16, 300, 3),
        (32, 4, 128, 300, 3),
        (32, 7, 8, 300, 3),
        (64, 3, 100, 300, 3),
        (64, 2, 64, 130, 20),  # more groups than one warp counts
    ],
)
def test_a_paged_launch(
    launches: dict[str, Any], num_heads: int, tokens_each: int, block_size: int, max_length: int, num_requests: int
) -> None:
    """Rows of length 0 and past the table, blocks that there are not, tokens of no request, more tiles than there is
    room for: bits of the token alone."""
    blocks_each, num_tokens = -(-(max_length + 20) // block_size), num_requests * tokens_each
    num_blocks = num_requests * blocks_each + 1
    cache = allocate_cache("fp8_index", num_blocks, block_size)
    slots = torch.arange(num_blocks * block_size)
    reference.write_index_cache(torch.randn(len(slots), 128), cache, slots, "fp8_index")
    k, k_scale = reference.read_index_keys(cache, slots, "fp8_index")
    table = torch.randperm(num_blocks)[: num_requests * blocks_each].view(num_requests, -1).to(torch.int32)
    table[0, 0], table[1, -1], table[2, 1] = -1, num_blocks, INT32_MAX
    q = torch.randn(num_tokens, num_heads, 128).to(torch.float8_e4m3fn)
    weights = torch.randn(num_tokens, num_heads)
    lengths = int32(*(max_length - 10 - 37 * i % (max_length - 10) for i in range(num_tokens)))
    lengths[-1], lengths[1] = INT32_MAX, 0
    requests = torch.arange(num_requests).repeat_interleave(tokens_each).to(torch.int32)
    if tokens_each > 2:
        requests[2], requests[4] = -1, num_requests
    position = torch.arange(max_length)
    block = table.long()[requests.long().clamp(0, num_requests - 1)][:, position // block_size]
    there = (block >= 0) & (block < num_blocks)
    known = (requests >= 0) & (requests < num_requests)
    within = position < torch.where(known, lengths, 0)[:, None]
    exact = exact_scores(q, k, weights, k_scale)
    expected, bound = (x.gather(1, torch.where(there, block * block_size + position % block_size, 0)) for x in exact)

    def scores(order: torch.Tensor) -> torch.Tensor:
        out = torch.full((num_tokens, max_length), 7.0)
        rest = lengths[order], table, requests[order], max_length, "fp8_index"
        indexer_logits.paged_indexer_logits(q[order], cache, weights[order], *rest, out=out)
        return out

    found = scores(torch.arange(num_tokens))
    assert ((found.double() - expected).abs() <= bound)[within & there].all()
    assert (found[within & ~there] == -INF).all()
    assert (found[~within] == 7).all()
    launches["sms"], launches["seed"] = 1 if num_requests == 3 else 64, 1  # some of 64 CTAs have no tile
    order = torch.randperm(num_tokens)
    assert torch.equal(scores(order), found[order])
    assert (box_keys(block_size) > 0) == all("BOXES" in name for name in launches["kernels"])
