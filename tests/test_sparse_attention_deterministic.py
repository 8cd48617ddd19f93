"""`deterministic`: the bits of a token's results do not depend on other tokens, their number, or its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_inputs import SCALE, filled_cache, key_width, queries, some_indices

import mla_ops
from mla_ops import dispatch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NUM_TOKENS = 150 if ON_GPU else 3
OPS = ("paged_sparse_attention", "sparse_attention", "paged_attention")

# a call on some rows of a batch
Attention = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(params=["triton", "hopper"] if ON_GPU else ["reference", "triton"])
def lowering(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "triton" and not dispatch.is_installed("triton"):
        pytest.skip("Triton is not installed")
    with dispatch.override(**dict.fromkeys(OPS, request.param)):
        yield request.param


def paged(cache_format: str, num_heads: int, topk: int) -> Attention:
    cache = filled_cache(cache_format, 40, 64, DEVICE)
    q = queries(NUM_TOKENS, num_heads, torch.bfloat16, DEVICE, key_width(cache_format))
    indices = some_indices(NUM_TOKENS, topk, 40 * 64, DEVICE)
    lengths = torch.randint(0, topk + 1, (NUM_TOKENS,), dtype=torch.int32, device=DEVICE)
    sink = torch.randn(num_heads, device=DEVICE)

    def attend(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given: dict[str, Any] = {"topk_length": lengths[rows], "attn_sink": sink, "deterministic": True}
        return mla_ops.paged_sparse_attention(q[rows], cache, indices[rows], SCALE, cache_format, **given)

    return attend


def two_caches(num_heads: int, topk: int, extra_topk: int) -> Attention:
    fmt = "fp8_ds_mla_v4"
    cache, extra_cache = filled_cache(fmt, 40, 64, DEVICE), filled_cache(fmt, 300, 2, DEVICE)
    q = queries(NUM_TOKENS, num_heads, torch.bfloat16, DEVICE, 512)
    indices, extra = (some_indices(NUM_TOKENS, k, n, DEVICE) for k, n in ((topk, 40 * 64), (extra_topk, 600)))
    lengths, extra_lengths = (
        torch.randint(0, k + 1, (NUM_TOKENS,), dtype=torch.int32, device=DEVICE) for k in (topk, extra_topk)
    )

    def attend(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given: dict[str, Any] = {"topk_length": lengths[rows], "extra_topk_length": extra_lengths[rows]}
        given |= {"extra_kv_cache": extra_cache, "extra_indices": extra[rows], "deterministic": True}
        return mla_ops.paged_sparse_attention(q[rows], cache, indices[rows], SCALE, fmt, **given)

    return attend


def flat(num_heads: int, topk: int) -> Attention:
    kv = torch.randn(900, 576, device=DEVICE).bfloat16()
    q = queries(NUM_TOKENS, num_heads, torch.bfloat16, DEVICE)
    indices = some_indices(NUM_TOKENS, topk, 900, DEVICE)

    def attend(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return mla_ops.sparse_attention(q[rows], kv, indices[rows], SCALE, deterministic=True)

    return attend


def dense(cache_format: str, num_heads: int, num_blocks: int) -> Attention:
    """Requests of two tokens, of any length; a row alone has a wider table."""
    cache = filled_cache(cache_format, 40, 64, DEVICE)
    q = queries(NUM_TOKENS, num_heads, torch.bfloat16, DEVICE, key_width(cache_format))
    table = torch.randint(0, 40, (NUM_TOKENS // 2 + 1, num_blocks), dtype=torch.int32, device=DEVICE)
    requests = torch.arange(NUM_TOKENS, dtype=torch.int32, device=DEVICE) // 2
    lengths = torch.randint(0, num_blocks * 64 + 1, (NUM_TOKENS,), dtype=torch.int32, device=DEVICE)

    def attend(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.cat((table, table), 1) if len(rows) == 1 else table
        chosen = wide, requests[rows], lengths[rows]
        return mla_ops.paged_attention(q[rows], cache, *chosen, SCALE, cache_format, deterministic=True)

    return attend


def assert_blind_to_the_batch(attend: Attention) -> None:
    everything = torch.arange(NUM_TOKENS, device=DEVICE)
    out, lse = attend(everything)
    batches = [everything[i : i + 1] for i in range(1, NUM_TOKENS, 1 + NUM_TOKENS // 8)]
    batches += [everything.flip(0), torch.randint(0, NUM_TOKENS, (2,), device=DEVICE)]
    if ON_GPU:  # the interpreter takes a second a row
        batches += [everything[1:], everything[: NUM_TOKENS // 2], everything.repeat(2)]
    for rows in batches:
        some_out, some_lse = attend(rows)
        assert torch.equal(some_out, out[rows]), f"{len(rows)} rows"
        assert torch.equal(some_lse, lse[rows]), f"{len(rows)} rows"
    if ON_GPU:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = attend(everything)
        graph.replay()
        assert all(map(torch.equal, replayed, (out, lse)))


HEADS = (1, 16, 17, 64, 128) if ON_GPU else (3,)
TOPK = 2048 if ON_GPU else 520  # two splits in Triton


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
def test_rows_are_blind_to_their_batch(cache_format: str, num_heads: int, lowering: str) -> None:
    assert_blind_to_the_batch(paged(cache_format, num_heads, TOPK))


@pytest.mark.parametrize("num_heads", HEADS)
def test_rows_over_two_caches_are_blind_to_their_batch(num_heads: int, lowering: str) -> None:
    assert_blind_to_the_batch(two_caches(num_heads, 128, TOPK // 2 + 100))


@pytest.mark.parametrize("num_heads", HEADS)
def test_rows_over_flat_keys_are_blind_to_their_batch(num_heads: int, lowering: str) -> None:
    assert_blind_to_the_batch(flat(num_heads, TOPK))


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
def test_dense_rows_are_blind_to_their_batch(cache_format: str, num_heads: int, lowering: str) -> None:
    assert_blind_to_the_batch(dense(cache_format, num_heads, 40 if ON_GPU else 10))
