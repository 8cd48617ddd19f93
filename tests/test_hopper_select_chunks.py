"""Selection of keys on Hopper by chunks, without a GPU: top-k by the kernel's own code, and how wide rows are cut."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from attention_inputs import INT_MAX, INT_MIN
from hopper_on_cpu import NO_COMPILER, build
from topk_oracle import KINDS, hard_rows, topk_oracle

from mla_ops.dispatch import Call
from mla_ops.kernels.hopper import indexer_logits, select_chunks, select_keys, topk
from mla_ops.kernels.hopper.select_chunks import CALL_BYTES, ROW_BYTES, Chunks, chunks_for, row_bytes

INT32 = {"dtype": torch.int32}
PLANS = {"one CTA": topk.Plan(64, 2, 2, 1, 1, 64, 512, 256), "clusters of 3": topk.Plan(64, 1, 2, 1, 3, 64, 512, 256)}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if NO_COMPILER:
        pytest.skip("there is no C++ compiler")
    return build("hopper_topk.cpp", tmp_path_factory.mktemp("topk"))


@pytest.fixture(params=PLANS.values(), ids=PLANS)
def on_cpu(request: pytest.FixtureRequest, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-k runs the kernel's code, in chunks of about 500 columns; scores are those that `k_scale` says."""
    plan = request.param

    def best(scores: torch.Tensor, k: int, **rest: Any) -> None:
        params = topk.pack(plan, scores, k, **rest)
        assert library.topk(params, plan.threads, plan.vectors, plan.shared_bytes(k), plan.short, len(scores)) == 0

    def cut(num_columns: int, k: int, block_size: int, room: int) -> Chunks:
        width = -(-500 // block_size) * block_size
        return Chunks(-(-num_columns // width), width)

    def flat(
        q: torch.Tensor,
        k: torch.Tensor,
        weights: torch.Tensor,
        row_starts: torch.Tensor,
        row_ends: torch.Tensor,
        *,
        k_scale: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        columns = torch.arange(len(k))
        inside = (columns >= row_starts[:, None]) & (columns < row_ends[:, None])
        out.copy_(torch.where(inside, k_scale, torch.nan))

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
        out: torch.Tensor,
    ) -> None:
        known = (req_id_per_token >= 0) & (req_id_per_token < len(block_table))
        blocks = block_table[req_id_per_token.where(known, 0)].long()
        found = index_cache[blocks].flatten(1)[:, :max_length]
        live = known[:, None] & (torch.arange(max_length) < lengths[:, None])
        out.fill_(torch.nan)
        out[:, : found.shape[1]] = torch.where(live[:, : found.shape[1]], found, torch.nan)

    monkeypatch.setattr(select_chunks, "topk_indices", best)
    monkeypatch.setattr(select_chunks, "chunks_for", cut)
    monkeypatch.setattr(indexer_logits, "indexer_logits", flat)
    monkeypatch.setattr(indexer_logits, "paged_indexer_logits", paged)
    monkeypatch.setattr(select_chunks, "geometry", lambda cache, _: cache)


def empty_results(num_tokens: int, k: int) -> dict[str, torch.Tensor]:
    return {"indices": torch.full((num_tokens, k), -7, **INT32), "valid_counts": torch.full((num_tokens,), -7, **INT32)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_columns", [400, 900, 3217])
def test_the_best_of_chunks_are_those_of_whole_rows(on_cpu: None, kind: str, num_columns: int) -> None:
    scores = hard_rows(kind, 1, num_columns)[0]
    bounds = [(0, num_columns), (700, 730), (10, 150), (400, 620), (3, 2000), (INT_MIN, INT_MAX), (9, INT_MIN)]
    bounds += [(2900, 3217)]
    starts, ends = torch.tensor(bounds, **INT32).T.contiguous()
    got = empty_results(len(bounds), 130)
    q, keys = torch.zeros(len(bounds), 64, 128), torch.zeros(num_columns, 128)
    select_chunks.select_flat_by_chunks(q, keys, q[:, :, 0], starts, ends, 130, k_scale=scores, **got)
    indices, counts = topk_oracle(scores.expand(len(bounds), -1), 130, starts, ends)
    assert torch.equal(got["valid_counts"], counts)
    assert torch.equal(got["indices"], indices)


class Cache(torch.Tensor):
    """Scores in place of keys, `[num_blocks, block_size]`."""

    block_size = 0


@pytest.mark.parametrize("translate", [False, True], ids=["positions", "slots"])
@pytest.mark.parametrize(("block_size", "blocks"), [(17, 150), (64, 7), (64, 40)])
def test_the_best_of_paged_chunks(on_cpu: None, block_size: int, blocks: int, translate: bool) -> None:
    k, table = 100, torch.randperm(3 * blocks + 2)[: 3 * blocks].view(3, blocks).int()
    cache = hard_rows("ten low bits", 3 * blocks + 2, block_size).as_subclass(Cache)
    cache.block_size = block_size
    lengths = torch.tensor([blocks * block_size, 99, 101, INT_MIN, INT_MAX, 600, 700, 1], **INT32)
    requests = torch.tensor([0, 0, 1, 1, 2, -1, 3, 2], **INT32)
    got = empty_results(8, k)
    q = torch.zeros(8, 64, 128)
    select_chunks.select_by_chunks(
        q, cache, q[:, :, 0], lengths, table, requests, k, "fp8_index", translate=translate, **got
    )
    known = (requests >= 0) & (requests < 3)
    scores = cache.as_subclass(torch.Tensor)[table[requests.where(known, 0)].long()].flatten(1)
    indices, counts = topk_oracle(scores, k, None, lengths.where(known, 0))
    if translate:
        found = table[requests.where(known, 0)].gather(1, (indices // block_size).clamp(min=0).long())
        indices = torch.where(indices < 0, -1, found * block_size + indices % block_size).int()
    assert torch.equal(got["valid_counts"], counts)
    assert torch.equal(got["indices"], indices)


def test_chunks_keep_within_the_memory_of_a_row() -> None:
    for room in (ROW_BYTES, 3 * ROW_BYTES):
        for k in (1, 512, 2048, 4096):
            for block_size in (1, 16, 17, 48, 64, 128, 1000, 4096):
                whole = room // 4
                for num_columns in (whole + block_size, 131072 // block_size * block_size, topk.MAX_COLUMNS):
                    chunks = chunks_for(num_columns, k, block_size, room)
                    assert chunks is not None
                    assert chunks.row_bytes(k) <= room
                    assert chunks.width % block_size == 0
                    assert (chunks.count - 1) * chunks.width < num_columns <= chunks.count * chunks.width
    assert chunks_for(131072, 2048, 64, ROW_BYTES) == Chunks(11, 11968)
    assert chunks_for(32768, 2048, 64, ROW_BYTES) == Chunks(3, 10944)


def test_few_rows_share_the_memory_of_a_call() -> None:
    for num_tokens in (0, 1, 3, 64, 511, 512, 513, 100_000):
        assert num_tokens * row_bytes(num_tokens) <= max(CALL_BYTES, num_tokens * ROW_BYTES)
    assert row_bytes(64) == 4 * 131072  # a decode step of 64 requests of 128k keys scores whole rows
    assert row_bytes(512) == row_bytes(4096) == ROW_BYTES


def test_blocks_that_are_no_part_of_a_chunk_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select_keys, "logits_reason", lambda _: None)
    call = Call("select_keys", torch.device("cuda"), torch.float8_e4m3fn, num_heads=64, topk=4096, num_keys=10**5)
    call = call._replace(num_tokens=1000)
    for block_size in (17, 64, 100, 6400):
        assert select_keys.select_reason(call._replace(block_size=block_size)) is None
    assert "a block of 9001 is too large" in str(select_keys.select_reason(call._replace(block_size=9001)))
    assert select_keys.select_reason(call._replace(block_size=9001, num_keys=9001)) is None
