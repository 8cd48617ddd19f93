"""Attention over two caches in one softmax: every lowering against float64, within bounds from `attention_oracle`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_inputs import (
    INT_MAX,
    INT_MIN,
    SCALE,
    check,
    check_two_caches,
    filled_cache,
    force_splits,
    force_tile,
    poison_unused,
    queries,
    some_indices,
)

import mla_ops
from mla_ops import dispatch

V4 = "fp8_ds_mla_v4"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

PAIRS = [(V4, V4, BF16, 512), (V4, V4, FP16, 512), (V4, V4, FP32, 512), ("bf16", V4, BF16, 512)]
PAIRS += [(V4, "bf16", BF16, 512), ("fp16", V4, FP16, 512), ("fp32", "fp32", FP32, 576)]
PAIRS += [("fp8_ds_mla", "fp8_ds_mla", BF16, 576), ("fp8_ds_mla", "bf16", BF16, 576), ("bf16", "bf16", BF16, 576)]


@pytest.fixture(params=["reference", "triton", *(["hopper"] if torch.cuda.is_available() else [])])
def lowering(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each lowering that may run here; what one refuses is skipped with its reason."""
    with dispatch.override(paged_sparse_attention=request.param):
        yield request.param


@pytest.mark.parametrize("num_heads", [1, 17, 65])
@pytest.mark.parametrize(("cache_format", "extra_format", "dtype", "head_dim"), PAIRS)
def test_two_caches_equal_float64(
    lowering: str,
    device: torch.device,
    cache_format: str,
    extra_format: str,
    dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
) -> None:
    """Pages of 8 and of 3, formats that differ."""
    exact = dtype != BF16 or "fp32" in (cache_format, extra_format)
    if exact and lowering == "triton" and device.type == "cpu" and num_heads > 17:
        pytest.skip("exact tiles are small, and many of them take long to interpret; on a GPU they run")
    cache = filled_cache(cache_format, 4, 8, device, head_dim=head_dim)
    extra = filled_cache(extra_format, 7, 3, device, head_dim=head_dim)
    indices, extra_indices = some_indices(2, 12 if exact else 40, 32, device), some_indices(2, 20, 21, device)
    q = queries(2, num_heads, dtype, device, head_dim)
    check_two_caches(lowering, q, cache, indices, cache_format, extra, extra_indices, extra_format)


@pytest.mark.parametrize(
    ("num_splits", "lengths"),
    [
        *((1, lengths) for lengths in ("-1 tails", "lengths")),
        *((2, lengths) for lengths in ("lengths", "one length")),
        *((5, lengths) for lengths in ("-1 tails", "one length")),
        (12, "lengths"),
    ],
)
def test_splits_share_the_keys_of_both(
    device: torch.device, triton_lowering: None, num_splits: int, lengths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either cache gives none to all of its keys, in tiles that the splits do not divide; the sink counts once."""
    force_splits(monkeypatch, num_splits)
    counts = torch.tensor([0, 70, 0, 1, 33, 64, 70], dtype=torch.int32, device=device)
    extra_counts = torch.tensor([0, 0, 90, 32, 90, 65, 1], dtype=torch.int32, device=device)
    cache, extra = filled_cache(V4, 3, 64, device), filled_cache(V4, 60, 2, device)
    indices, extra_indices = some_indices(7, 70, 192, device), some_indices(7, 90, 120, device)
    options = {"attn_sink": torch.tensor([0.5, -math.inf, math.inf], device=device)}
    if lengths == "-1 tails":
        indices[torch.arange(70, device=device) >= counts[:, None]] = -1
        extra_indices[torch.arange(90, device=device) >= extra_counts[:, None]] = -1
    else:
        options["extra_topk_length"] = extra_counts
    if lengths == "lengths":
        options["topk_length"] = counts
    q = queries(7, 3, BF16, device, 512)
    check_two_caches("triton", q, cache, indices, V4, extra, extra_indices, V4, **options)


@pytest.mark.parametrize("given", ["both", "block_table", "extra_block_table"])
def test_each_cache_has_its_own_block_table(lowering: str, device: torch.device, given: str) -> None:
    """Translated inside, with garbage in both tables and among the requests."""
    cache, extra = filled_cache(V4, 7, 16, device), filled_cache(V4, 9, 2, device)
    tables = {
        "block_table": torch.tensor([[3, 6, 0], [INT_MIN, 2, 7], [INT_MAX, -1, 1]], dtype=torch.int32, device=device),
        "extra_block_table": torch.tensor([[8, 9, -1, 0, 3], [1, INT_MAX, 4, 4, 4]], dtype=torch.int32, device=device),
    }
    if given != "both":
        tables = {given: tables[given]}
    owners = torch.tensor([0, 1, 2, 3, -1], dtype=torch.int32, device=device)
    indices, extra_indices = some_indices(5, 40, 52, device), some_indices(5, 20, 12, device)
    q = queries(5, 3, BF16, device, 512)
    out, lse = check_two_caches(
        lowering, q, cache, indices, V4, extra, extra_indices, V4, req_id_per_token=owners, **tables
    )
    if given == "both":
        assert not out[3:].any()
        assert (lse[3:] == -math.inf).all()


def test_a_row_with_nothing_in_either_cache_is_zero(lowering: str, device: torch.device) -> None:
    cache, extra = filled_cache(V4, 2, 8, device), filled_cache(V4, 4, 2, device)
    indices = torch.tensor([[-1, 16], [-1, 16], [3, -1], [INT_MAX, INT_MIN]], dtype=torch.int32, device=device)
    extra_indices = torch.tensor([[8, -1, -1], [-1, -1, 2], [-1, 9, 8], [0, 0, 0]], dtype=torch.int32, device=device)
    lengths = torch.tensor([3, 3, 3, 0], dtype=torch.int32, device=device)
    for sink in (None, torch.zeros(2, device=device)):
        q, options = queries(4, 2, BF16, device, 512), {"extra_topk_length": lengths, "attn_sink": sink}
        out, lse = check_two_caches(lowering, q, cache, indices, V4, extra, extra_indices, V4, **options)
        assert not out[[0, 3]].any()
        assert (lse[[0, 3]] == -math.inf).all()
        assert lse[1:3].isfinite().all()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_an_empty_cache_leaves_the_bits_of_the_other_alone(
    lowering: str, device: torch.device, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two-cache form with one empty side is the plain op, whichever side and however it is empty."""
    force_splits(monkeypatch, num_splits)
    cache, other = filled_cache(V4, 3, 16, device), filled_cache(V4, 2, 2, device)
    q, indices = queries(3, 5, BF16, device, 512), some_indices(3, 70, 48, device)
    sink = torch.randn(5, device=device)
    expected = torch.ops.mla.paged_sparse_attention(q, cache, indices, SCALE, V4, attn_sink=sink)
    nothing = torch.full((3, 4), -1, dtype=torch.int32, device=device)
    for none, empty in ((nothing[:, :0], other), (nothing, other), (nothing + 1, other[:0])):
        for sides in ((cache, indices, V4, empty, none, V4), (empty, none, V4, cache, indices, V4)):
            found = check_two_caches(lowering, q, *sides, attn_sink=sink)
            # masked columns move where a split ends, and the order of the reference's sums; of two kernels, only the
            # interpreter's arithmetic is sure to be the same
            if device.type == "cuda":
                continue
            if none.shape[1] == 0 or (lowering == "triton" and num_splits == 1):
                assert torch.equal(found[0], expected[0])
                assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(("num_tokens", "topk", "extra_topk"), [(0, 8, 8), (3, 0, 0), (0, 0, 0)])
def test_nothing_to_do(lowering: str, device: torch.device, num_tokens: int, topk: int, extra_topk: int) -> None:
    cache, extra = filled_cache(V4, 2, 8, device), filled_cache(V4, 0, 2, device)
    indices = torch.zeros(num_tokens, topk, dtype=torch.int32, device=device)
    extra_indices = torch.zeros(num_tokens, extra_topk, dtype=torch.int32, device=device)
    q = queries(num_tokens, 2, BF16, device, 512)
    out, lse = check_two_caches(lowering, q, cache, indices, V4, extra, extra_indices, V4)
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize(("cache_format", "extra_format"), [(V4, V4), ("bf16", V4)])
def test_nothing_unused_is_seen(lowering: str, device: torch.device, cache_format: str, extra_format: str) -> None:
    """NaN in every slot of both caches that no valid index names and in all that pads; garbage where there was -1."""
    q = queries(3, 5, BF16, device, 512)
    cache, extra = filled_cache(cache_format, 5, 8, device, head_dim=512), filled_cache(extra_format, 9, 2, device)
    indices = torch.randint(0, 20, (3, 24), dtype=torch.int32, device=device) * 2
    extra_indices = torch.randint(0, 9, (3, 10), dtype=torch.int32, device=device) * 2
    for chosen in (indices, extra_indices):
        chosen[torch.rand(chosen.shape, device=device) < 0.4] = -1
    attend = torch.ops.mla.paged_sparse_attention.extra
    clean = attend(q, cache, indices, SCALE, cache_format, extra, extra_indices, extra_format)
    dirty = poison_unused(cache, indices[indices >= 0].long().unique(), cache_format)
    extra_dirty = poison_unused(extra, extra_indices[extra_indices >= 0].long().unique(), extra_format)

    def noisy(chosen: torch.Tensor, num_slots: int) -> torch.Tensor:
        garbage = torch.tensor([INT_MIN, -123456, -1, num_slots, INT_MAX], dtype=torch.int32, device=device)
        return torch.where(chosen < 0, garbage[torch.randint(0, 5, chosen.shape, device=device)], chosen)

    found = attend(
        q, dirty, noisy(indices, 40), SCALE, cache_format, extra_dirty, noisy(extra_indices, 18), extra_format
    )
    assert torch.equal(clean[0], found[0])
    assert torch.equal(clean[1], found[1])


def test_strided_inputs_and_outputs(lowering: str, device: torch.device) -> None:
    """Blocks of two pools, queries, indices and results that are slices of wider buffers."""
    caches = filled_cache(V4, 3, 8, device), filled_cache(V4, 9, 2, device)
    pools = [cache.new_full((len(cache) + 1, cache.shape[1] + 96), 0xFF) for cache in caches]
    views = [pool[1:, 32 : 32 + cache.shape[1]] for pool, cache in zip(pools, caches, strict=True)]
    for view, cache in zip(views, caches, strict=True):
        view.copy_(cache)
    wide = queries(3, 9, BF16, device, 640)[:, 2:7, 32:544]
    indices, extra_indices = some_indices(3, 40, 24, device)[:, 3:30], some_indices(3, 20, 18, device)[:, 1:]
    selections = indices, SCALE, V4, views[1], extra_indices, V4
    expected = check_two_caches(lowering, wide, views[0], indices, V4, views[1], extra_indices, V4)
    out = torch.full((3, 7, 512), 77.0, dtype=BF16, device=device)
    lse = torch.full((3, 9), 77.0, device=device)
    into = {"out": out[:, 1:6], "lse": lse[:, 2:7]}
    torch.ops.mla.paged_sparse_attention.extra_out(wide, views[0], *selections, **into)
    assert torch.equal(out[:, 1:6], expected[0])
    assert torch.equal(lse[:, 2:7], expected[1])
    assert (out[:, [0, 6]] == 77).all()
    assert (lse[:, [0, 1, 7, 8]] == 77).all()


def test_one_cache_twice_counts_keys_twice(lowering: str, device: torch.device) -> None:
    cache, q = filled_cache("fp32", 1, 8, device), queries(1, 2, FP32, device)
    indices = torch.tensor([[3, 5]], dtype=torch.int32, device=device)
    check_two_caches(lowering, q, cache, indices, "fp32", cache, indices, "fp32")


def test_the_public_function_takes_either_form(device: torch.device) -> None:
    cache, extra = filled_cache(V4, 2, 8, device), filled_cache(V4, 4, 2, device)
    q, indices = queries(2, 3, BF16, device, 512), some_indices(2, 6, 16, device)
    extra_indices = some_indices(2, 4, 8, device)
    expected = torch.ops.mla.paged_sparse_attention.extra(q, cache, indices, SCALE, V4, extra, extra_indices, V4)
    for options in ({}, {"extra_cache_format": V4}):
        found = mla_ops.paged_sparse_attention(
            q, cache, indices, SCALE, V4, extra_kv_cache=extra, extra_indices=extra_indices, **options
        )
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    for incomplete in ({"extra_kv_cache": extra}, {"extra_indices": extra_indices}, {"extra_cache_format": V4}):
        with pytest.raises(ValueError, match=f"extra_kv_cache and extra_indices, got only {next(iter(incomplete))}"):
            mla_ops.paged_sparse_attention(q, cache, indices, SCALE, V4, **incomplete)


def test_caches_are_read_through_float32_together() -> None:
    from mla_ops.kernels.triton.sparse_attention import operand_modes

    assert operand_modes(BF16, V4, V4) == ("fp8_v4", "fp8_v4")
    assert operand_modes(BF16, "bf16", V4) == ("plain", "fp8_v4")
    assert operand_modes(FP16, "fp16", V4) == ("exact", "fp8_v4_exact")
    assert operand_modes(FP32, "fp8_ds_mla", "fp32") == ("fp8_exact", "exact")


def test_caches_of_one_kind_take_the_tile_of_one_cache() -> None:
    from mla_ops.kernels.triton.sparse_attention import Tile, tile, two_cache_tile
    from mla_ops.kernels.triton.sparse_attention_keys import Keys

    v4, plain = Keys("fp8_v4", 576, 16, False, False, "hardware"), Keys("plain", 576, 8, False, False, "hardware")
    translated = Keys("fp8_v4", 576, 16, False, True, "hardware")
    for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
        for num_heads in (1, 32, 128):
            chosen = tile(capability, num_heads, "fp8_v4")
            assert two_cache_tile(capability, num_heads, (v4, v4)) == (
                replace(chosen, early=True) if chosen.block_h == 32 else chosen
            )
            assert two_cache_tile(capability, num_heads, (plain, v4)) == tile(capability, 16, "plain")
            assert two_cache_tile(capability, num_heads, (v4, translated)) == tile(capability, 16, "fp8_v4")
            if chosen.block_h < 64:
                assert two_cache_tile(capability, num_heads, (translated, translated)) == chosen
    assert two_cache_tile((9, 0), 128, (v4, v4)) == Tile(64, 64, 8, 1, apart=True, early=True)
    assert two_cache_tile((9, 0), 128, (translated, translated)) == Tile(64, 32, 8, 1, apart=True)
    assert two_cache_tile((12, 0), 128, (v4, v4)) == Tile(32, 32, 4, 1, early=True)


@pytest.mark.parametrize(
    ("cache_format", "head_dim", "apart"),
    [(V4, 512, True), ("bf16", 512, True), ("fp8_ds_mla", 576, False), ("fp8_ds_mla", 576, True)],
)
def test_tiles_of_sm90(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, cache_format: str, head_dim: int, apart: bool
) -> None:
    """64 heads, over one cache and over two, in the interpreter, too, whose own tiles are others."""
    from mla_ops.kernels.triton import sparse_attention

    monkeypatch.setattr(
        sparse_attention, "tile", lambda *_: sparse_attention.Tile(64, 32, 8, 1, apart=apart, early=True)
    )
    cache = filled_cache(cache_format, 4, 16, device, head_dim=head_dim)
    extra = filled_cache(cache_format, 3, 16, device, head_dim=head_dim)
    q = queries(2, 40, BF16, device, head_dim)
    indices, extra_indices = some_indices(2, 70, 64, device), some_indices(2, 40, 48, device)
    with dispatch.override(paged_sparse_attention="triton"):
        check("triton", q, cache, indices, cache_format)
        check_two_caches("triton", q, cache, indices, cache_format, extra, extra_indices, cache_format)


@pytest.mark.parametrize("translated", [False, True], ids=["slots", "block tables"])
def test_tiles_of_32_heads(device: torch.device, monkeypatch: pytest.MonkeyPatch, translated: bool) -> None:
    """What GPUs but SM90 take over V4's caches, whose keys share a loop."""
    force_tile(monkeypatch, 32, 32, 4, 1)
    cache, extra = filled_cache(V4, 4, 16, device), filled_cache(V4, 3, 16, device)
    q = queries(2, 40, BF16, device, 512)
    indices, extra_indices = some_indices(2, 70, 48, device), some_indices(2, 40, 32, device)
    options = {}
    if translated:
        options["req_id_per_token"] = torch.tensor([1, 0], dtype=torch.int32, device=device)
        options["block_table"] = torch.tensor([[3, 0, 1], [2, -1, 0]], dtype=torch.int32, device=device)
    both = dict(options)
    if translated:
        both["extra_block_table"] = torch.tensor([[2, 1], [0, 77]], dtype=torch.int32, device=device)
    with dispatch.override(paged_sparse_attention="triton"):
        check("triton", q, cache, indices, V4, **options)
        check_two_caches("triton", q, cache, indices, V4, extra, extra_indices, V4, **both)
