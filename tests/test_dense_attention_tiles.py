"""Dense decode in tiles of the sparse kernels, which GPUs take for more than 16 heads over fp8_ds_mla and plain keys.

The interpreter is told to. Operands of fp8_ds_mla are float16 with their scale, and a second walk gives the result
where one does not fit. A tile of keys lies in one block of the cache.
"""

from __future__ import annotations

import math

import attention_oracle
import pytest
import torch
from attention_inputs import INT_MAX, INT_MIN, SCALE, filled_cache, operand, poison_unused, queries

from mla_ops import dispatch

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_attention")
BF16 = torch.bfloat16
FP8 = "fp8_ds_mla"
NUM_HEADS = 40
HALF, PLAIN = {"half": True, "apart": True, "early": True}, {"apart": True}
TILES = {
    "fp8_ds_mla, 64 heads": (FP8, 64, 8, HALF),
    "fp8_ds_mla, 32 heads": (FP8, 32, 8, HALF),
    "bf16, 64 heads": ("bf16", 64, 8, {**PLAIN, "early": True}),
    "bf16, 32 heads": ("bf16", 32, 4, PLAIN),
    "bf16, 32 heads, eight warps": ("bf16", 32, 8, PLAIN),
}
ON_GPU = ("test_attention_equals_float64", "test_scales_of_any_size")  # of the same two kernels


@pytest.fixture(autouse=True, params=TILES.values(), ids=TILES)
def cache_format(device: torch.device, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    from mla_ops.kernels.triton import dense_attention

    kind, heads, warps, options = request.param
    if kind != FP8 and "scales" in request.node.originalname:
        pytest.skip("plain keys have no scales")
    if device.type == "cuda":
        if heads != 64 or request.node.originalname not in ON_GPU:
            pytest.skip("a GPU has the tiles that it takes")
        return kind
    chosen = dense_attention.Tile(heads, 32, warps, 1, **options)
    monkeypatch.setattr(dense_attention, "paged_tile", lambda *_: chosen)
    return kind


def force_splits(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    from mla_ops.kernels.triton import dense_attention

    monkeypatch.setattr(dense_attention, "paged_splits", lambda *_: count)


def int32(values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def check(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, requests: torch.Tensor, lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    kind = FP8 if cache.dtype == torch.uint8 else "bf16"
    out, lse = torch.ops.mla.paged_attention(q, cache, table, requests, lens, SCALE, kind)
    every = torch.arange(table.shape[1] * cache.shape[1], dtype=torch.int32, device=q.device).expand(len(q), -1)
    tables = {"topk_length": lens, "block_table": table, "req_id_per_token": requests}
    rounded = operand("triton", kind, q.dtype)
    attention_oracle.assert_close(
        out, lse, attention_oracle.attention(q, cache, every, SCALE, operand=rounded, cache_format=kind, **tables)
    )
    return out, lse


@pytest.mark.parametrize("num_splits", [1, 3])
def test_attention_equals_float64(
    device: torch.device, cache_format: str, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths that tiles and blocks do not divide, from none to all; blocks and requests that there are not."""
    force_splits(monkeypatch, num_splits)
    cache = filled_cache(cache_format, 7, 64, device)
    table = int32([[3, 6, 0], [INT_MIN, 2, 7], [INT_MAX, -1, 1]], device)
    requests, lens = int32([0, 1, 2, 3, 0], device), int32([INT_MAX, 130, 190, 5, 1], device)
    out, _ = check(queries(5, NUM_HEADS, BF16, device), cache, table, requests, lens)
    assert not out[3].any()


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("factor", [2.0**-60, 2.0**-9, 2.0**7, 2.0**50])
def test_scales_of_any_size(
    device: torch.device, factor: float, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one request of two, or in all of its keys: there the second walk gives the result."""
    force_splits(monkeypatch, num_splits)
    cache = filled_cache(FP8, 4, 64, device)
    cache[1:, :, 512:528] = (cache[1:, :, 512:528].contiguous().view(torch.float32) * factor).view(torch.uint8)
    table, requests, lens = int32([[1, 2], [0, 3]], device), int32([0, 1], device), int32([100, 128], device)
    q = queries(2, NUM_HEADS, BF16, device) / max(1.0, factor)
    check(q, cache, table, requests, lens)


def test_nothing_unused_is_seen(device: torch.device, cache_format: str) -> None:
    cache = filled_cache(cache_format, 6, 32, device)
    table, requests, lens = int32([[5, 0], [2, 3]], device), int32([0, 1], device), int32([11, 37], device)
    arguments = (table, requests, lens, SCALE, cache_format)
    q = queries(2, NUM_HEADS, BF16, device)
    clean = torch.ops.mla.paged_attention(q, cache, *arguments)
    used = [int(table[r, p // 32]) * 32 + p % 32 for r in (0, 1) for p in range(int(lens[r]))]
    dirty = poison_unused(cache, torch.tensor(used, device=device), cache_format)
    found = torch.ops.mla.paged_attention(q, dirty, *arguments)
    assert torch.equal(clean[0], found[0])
    assert torch.equal(clean[1], found[1])


def test_queries_in_two_tensors(device: torch.device, cache_format: str) -> None:
    cache, q = filled_cache(cache_format, 3, 32, device), queries(2, NUM_HEADS, BF16, device)
    arguments = (cache, int32([[2, 0], [1, 2]], device), int32([0, 1], device), int32([40, 64], device), SCALE)
    whole = torch.ops.mla.paged_attention(q, *arguments, cache_format)
    latent, rope = q[..., :512].contiguous(), q[..., 512:].contiguous()
    halves = torch.ops.mla.paged_attention(latent, *arguments, cache_format, q_rope=rope)
    assert torch.equal(whole[0], halves[0])
    assert torch.equal(whole[1], halves[1])


@pytest.mark.parametrize("scale", [-SCALE, 0.0, 2.0**31])
def test_a_scale_that_is_not_above_0_or_large(device: torch.device, cache_format: str, scale: float) -> None:
    """Such scores have another largest one, or a rounding that exp2 does not take: groups take them, in other tiles."""
    from mla_ops.kernels.triton.waves import suits_large_tiles

    assert not suits_large_tiles(scale)
    cache, q = filled_cache(cache_format, 3, 32, device), queries(1, NUM_HEADS, BF16, device)
    arguments = (cache, int32([[2, 0]], device), int32([0], device), int32([40], device), scale, cache_format)
    found = torch.ops.mla.paged_attention(q, *arguments)
    with dispatch.override(paged_attention="reference"):
        expected = torch.ops.mla.paged_attention(q, *arguments)
    torch.testing.assert_close(found[0], expected[0], atol=0.02, rtol=0.02)
    torch.testing.assert_close(found[1], expected[1], atol=0.02, rtol=0.02)


def test_rows_of_unequal_lengths_are_left_to_the_launch_before(
    device: torch.device, cache_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch by shapes then writes nothing, in tiles that use the output on their way neither."""
    from mla_ops.kernels.triton import dense_attention

    monkeypatch.setattr(dense_attention, "even_workers", lambda *_: 4)
    monkeypatch.setattr(dense_attention, "MIN_SPLIT_KEYS", 32)
    monkeypatch.setattr(dense_attention, "SLACK_KEYS", -64 * 160)
    cache, table = filled_cache(cache_format, 6, 32, device), int32([[0, 1, 2], [3, 4, 5]], device)
    out, _ = check(queries(2, NUM_HEADS, BF16, device), cache, table, int32([0, 1], device), int32([96, 3], device))
    assert not math.isnan(float(out.sum()))
