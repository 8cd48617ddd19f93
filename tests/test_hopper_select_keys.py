"""Selection of keys on Hopper by parts of its tokens, without a GPU: top-k by the kernel's own code, and memory."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from attention_inputs import INT_MAX, INT_MIN
from hopper_on_cpu import NO_COMPILER, build
from topk_oracle import KINDS, by_planes, hard_rows, topk_oracle

from mla_ops.dispatch import Call
from mla_ops.kernels import selection
from mla_ops.kernels.hopper import indexer_logits, select_keys, topk
from mla_ops.kernels.selection import CALL_BYTES, MOST_BYTES, ROW_BYTES, UNIT, call_bytes, tokens_together

INT32 = {"dtype": torch.int32}
PLANS = {
    "one CTA": topk.Plan(64, 2, 2, 1, 1, 64, 512, 256),
    "clusters of 3": topk.Plan(64, 1, 2, 1, 3, 64, 512, 256),
    "clusters of 4 that hold rows": topk.Plan(64, 1, 2, 1, 4, held=4),
    "by planes": topk.Plan(128, 2, 2, 4, 1, 64, 512, 512, planes=True),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if NO_COMPILER:
        pytest.skip("there is no C++ compiler")
    return build("hopper_topk.cpp", tmp_path_factory.mktemp("topk"))


def put(scores: torch.Tensor, planes: bool, out: torch.Tensor) -> None:
    assert out.stride(0) % indexer_logits.TILE == 0
    whole = out.as_strided((len(out), out.stride(0)), out.stride())
    whole.copy_(by_planes(scores)) if planes else out.copy_(scores)


@pytest.fixture(params=PLANS)
def launches(request: pytest.FixtureRequest, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Top-k runs the kernel's code, for three tokens at one time; scores are those that `k_scale` or the cache says."""
    order: list[str] = []
    without = "one CTA" if request.param == "by planes" else request.param  # parts of few rows, and caches

    def best(scores: torch.Tensor, k: int, *, programmatic: bool, planes: bool = False, **rest: Any) -> None:
        assert programmatic
        plan = PLANS["by planes" if planes else without]
        assert order[-1] == "scores"
        order.append("topk")
        params = topk.pack(plan, scores, k, **rest)
        sizes = plan.threads, plan.vectors, plan.shared_bytes(k)
        assert library.topk(params, *sizes, plan.short, len(scores), planes, plan.held) == 0

    def flat(
        q: torch.Tensor,
        k: torch.Tensor,
        weights: torch.Tensor,
        row_starts: torch.Tensor,
        row_ends: torch.Tensor,
        *,
        k_scale: torch.Tensor,
        programmatic: bool,
        planes: bool,
        out: torch.Tensor,
    ) -> None:
        assert programmatic == bool(order)
        order.append("scores")
        columns = torch.arange(len(k))
        inside = (columns >= row_starts[:, None]) & (columns < row_ends[:, None])
        put(torch.where(inside, weights[:, :1] * k_scale, torch.nan), planes, out)

    def paged(
        q: torch.Tensor,
        index_cache: torch.Tensor,
        weights: torch.Tensor,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        req_id_per_token: torch.Tensor,
        max_length: int,
        cache_format: str,
        *,
        group: int,
        programmatic: bool,
        out: torch.Tensor,
    ) -> None:
        assert group == 4  # the group of all tokens, 8 of 3 requests
        assert programmatic == bool(order)
        order.append("scores")
        known = (req_id_per_token >= 0) & (req_id_per_token < len(block_table))
        blocks = block_table[req_id_per_token.where(known, 0)].long()
        found = index_cache[blocks].flatten(1)[:, :max_length]
        live = known[:, None] & (torch.arange(max_length) < lengths[:, None])
        out.copy_(torch.where(live, found, torch.nan))

    monkeypatch.setattr(selection, "tokens_together", lambda num_tokens, _: min(num_tokens, 3))
    monkeypatch.setattr(topk, "topk_indices", best)
    monkeypatch.setattr(topk, "takes_planes", lambda rows, *_: request.param == "by planes" and rows > 2)
    monkeypatch.setattr(select_keys, "num_sms", lambda _: 132)
    monkeypatch.setattr(indexer_logits, "indexer_logits", flat)
    monkeypatch.setattr(indexer_logits, "paged_indexer_logits", paged)
    monkeypatch.setattr(select_keys, "geometry", lambda cache, _: cache)
    return order


def empty_results(num_tokens: int, k: int) -> dict[str, torch.Tensor]:
    return {"indices": torch.full((num_tokens, k), -7, **INT32), "valid_counts": torch.full((num_tokens,), -7, **INT32)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_columns", [400, 900, 3217])
def test_the_best_of_flat_keys_by_parts(launches: list[str], kind: str, num_columns: int) -> None:
    scores = hard_rows(kind, 1, num_columns)[0]
    bounds = [(0, num_columns), (700, 730), (10, 150), (400, 620), (3, 2000), (INT_MIN, INT_MAX), (9, INT_MIN)]
    bounds += [(2900, 3217)]
    starts, ends = torch.tensor(bounds, **INT32).T.contiguous()
    got = empty_results(len(bounds), 130)
    q, keys = torch.zeros(len(bounds), 64, 128), torch.zeros(num_columns, 128)
    weights = torch.arange(1.0, 1 + len(bounds))[:, None].repeat(1, 64)
    select_keys.select_keys_flat(q, keys, weights, starts, ends, 130, k_scale=scores, **got)
    indices, counts = topk_oracle(weights[:, :1] * scores, 130, starts, ends)
    assert torch.equal(got["valid_counts"], counts)
    assert torch.equal(got["indices"], indices)
    assert launches == ["scores", "topk"] * 3


class Cache(torch.Tensor):
    """Scores in place of keys, `[num_blocks, block_size]`."""

    block_size = 0


@pytest.mark.parametrize("translate", [False, True], ids=["positions", "slots"])
@pytest.mark.parametrize(("block_size", "blocks"), [(17, 150), (64, 7), (64, 40)])
def test_the_best_of_a_cache_by_parts(launches: list[str], block_size: int, blocks: int, translate: bool) -> None:
    k, table = 100, torch.randperm(3 * blocks + 2)[: 3 * blocks].view(3, blocks).int()
    cache = hard_rows("ten low bits", 3 * blocks + 2, block_size).as_subclass(Cache)
    cache.block_size = block_size
    lengths = torch.tensor([blocks * block_size, 99, 101, INT_MIN, INT_MAX, 600, 700, 1], **INT32)
    requests = torch.tensor([0, 0, 1, 1, 2, -1, 3, 2], **INT32)
    got = empty_results(8, k)
    q = torch.zeros(8, 64, 128)
    select_keys.select_keys(q, cache, q[:, :, 0], lengths, table, requests, k, "fp8_index", translate=translate, **got)
    known = (requests >= 0) & (requests < 3)
    scores = cache.as_subclass(torch.Tensor)[table[requests.where(known, 0)].long()].flatten(1)
    indices, counts = topk_oracle(scores, k, None, lengths.where(known, 0))
    if translate:
        found = table[requests.where(known, 0)].gather(1, (indices // block_size).clamp(min=0).long())
        indices = torch.where(indices < 0, -1, found * block_size + indices % block_size).int()
    assert torch.equal(got["valid_counts"], counts)
    assert torch.equal(got["indices"], indices)
    assert launches == ["scores", "topk"] * 3


def test_parts_keep_within_the_memory_of_a_call() -> None:
    for num_tokens in (1, 3, 16, 64, 511, 512, 513, 1024, 4096, 100_000):
        assert call_bytes(num_tokens) <= max(CALL_BYTES, ROW_BYTES * num_tokens)
        assert call_bytes(num_tokens) <= MOST_BYTES
        for num_columns in (1, 4096, 16384, 32768, 131072, 10**6 + 3, topk.MAX_COLUMNS):
            together = tokens_together(num_tokens, 4 * num_columns)
            assert 1 <= together <= num_tokens
            assert 4 * together * num_columns <= call_bytes(num_tokens)
            assert together in (num_tokens, together // UNIT * UNIT) or together < UNIT


@pytest.mark.parametrize(
    ("num_tokens", "num_columns", "together"),
    [(64, 131072, 64), (128, 131072, 64), (1024, 32768, 512), (1024, 16384, 1024), (4096, 131072, 512), (3, 2**21, 3)],
)
def test_few_parts_of_about_one_size(num_tokens: int, num_columns: int, together: int) -> None:
    assert tokens_together(num_tokens, 4 * num_columns) == together


def test_a_row_that_top_k_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select_keys, "logits_reason", lambda _: None)
    call = Call("select_keys", torch.device("cuda"), torch.float8_e4m3fn, num_heads=64, topk=4096)
    assert select_keys.select_reason(call._replace(num_keys=topk.MAX_COLUMNS)) is None
    assert "up to 2097152 keys, these have 2097153" in str(
        select_keys.select_reason(call._replace(num_keys=topk.MAX_COLUMNS + 1))
    )
