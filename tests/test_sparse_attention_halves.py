"""float16 operands of the portable kernel: keys with their scales, and the second walk where these do not fit.

GPUs take them for more than 16 heads, in tiles of 64 on SM90 and of 32 elsewhere; the interpreter, whose tiles are
others, is told to here. Tiles of 64 heads share a row's keys among three programs, whose parts have 16 bits.
"""

from __future__ import annotations

import math

import pytest
import torch
from attention_inputs import (
    check,
    filled_cache,
    force_splits,
    force_tile,
    key_width,
    queries,
    rows_with_wide_scales,
    some_indices,
)

from mla_ops import dispatch

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_attention")
BF16 = torch.bfloat16
NUM_HEADS = 40


PLAIN_TILES = {
    "64 heads": (64, 32, 8, 1),
    "32 heads, eight warps": (32, 32, 8, 2),
    "32 heads, four warps": (32, 32, 4, 1),
}
TILES = {"tiles of 64 heads in parts": (64, 8), "of 32": (32, 4), "of 32, eight warps": (32, 8)}


@pytest.fixture(autouse=True, params=TILES.values(), ids=TILES)
def halves(device: torch.device, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    from mla_ops.kernels.triton import sparse_attention

    heads, warps = request.param
    force_splits(monkeypatch, 3 if heads == 64 else 1)
    if heads == 64 and device.type == "cuda":
        if sparse_attention.tile(torch.cuda.get_device_capability(), NUM_HEADS, "fp8").block_h != 64:
            pytest.skip("this GPU has no tiles of 64 heads")
    elif heads == 64 or not request.node.originalname.startswith(("test_64_heads", "test_plain_keys")):
        force_tile(monkeypatch, heads, 32, warps, 1, half=True, apart=True, early=True)


def scales_of(cache: torch.Tensor) -> torch.Tensor:
    return cache[..., 512:528].view(torch.float32)


@pytest.mark.parametrize("magnitude", [1.0, 2.0**-30, 2.0**20])
def test_queries_of_any_size(device: torch.device, magnitude: float) -> None:
    """A power of two is taken out of each head's queries; one head is 2**20 times the next."""
    cache = filled_cache("fp8_ds_mla", 4, 16, device)
    q = queries(2, NUM_HEADS, BF16, device) * magnitude
    q[:, 3] *= 2.0**-20
    q[:, 5] = 0
    check("triton", q, cache, some_indices(2, 70, 64, device), "fp8_ds_mla")


@pytest.mark.parametrize("factor", [2.0**-60, 2.0**-16, 2.0**-9, 1.0, 2.0**7, 2.0**50])
def test_scales_of_any_size(device: torch.device, factor: float) -> None:
    """Far beyond float16 on either side: there the second walk gives the result."""
    cache = filled_cache("fp8_ds_mla", 4, 16, device)
    scales_of(cache).mul_(factor)
    q = queries(2, NUM_HEADS, BF16, device) / max(1.0, factor)
    check("triton", q, cache, some_indices(2, 70, 64, device), "fp8_ds_mla")


@pytest.mark.parametrize("power", [-30, 30])
def test_a_few_keys_whose_scales_do_not_fit(device: torch.device, power: int) -> None:
    cache, indices = rows_with_wide_scales("fp8_ds_mla", power, 4, 140, device)
    q = queries(4, NUM_HEADS, BF16, device) / max(1.0, 2.0**power)
    check("triton", q, cache, indices, "fp8_ds_mla")


def test_scales_that_differ_within_a_key(device: torch.device) -> None:
    cache = filled_cache("fp8_ds_mla", 4, 16, device)
    scales_of(cache)[:, 3::4, 2] *= 2.0**-25
    check("triton", queries(3, NUM_HEADS, BF16, device), cache, some_indices(3, 70, 64, device), "fp8_ds_mla")


def test_scales_over_24_octaves(device: torch.device) -> None:
    """In a unit of the first tile's scales float16 holds all of them."""
    cache = filled_cache("fp8_ds_mla", 4, 16, device)
    scales = scales_of(cache)
    scales.mul_((torch.rand(scales.shape, device=device) * 24 - 12).exp2())
    q = queries(3, NUM_HEADS, BF16, device) * 2.0**-8
    check("triton", q, cache, some_indices(3, 140, 64, device), "fp8_ds_mla")


POWERS = (0.0, -30.0, 10.0, -20.0)


def test_queries_that_make_up_for_groups_of_any_size(device: torch.device) -> None:
    """Each group counts in a row's scores. A part of 16 bits has a unit for each group, else one would be zeros."""
    cache = filled_cache("fp8_ds_mla", 4, 16, device)
    powers = torch.tensor(POWERS, device=device)
    scales_of(cache).mul_(powers.exp2())
    q = queries(3, NUM_HEADS, BF16, device)
    q[..., :512] *= (-powers).exp2().repeat_interleave(128).bfloat16()
    check("triton", q, cache, some_indices(3, 140, 64, device), "fp8_ds_mla")


def test_parts_with_units_of_groups_beside_parts_with_one(device: torch.device) -> None:
    cache = filled_cache("fp8_ds_mla", 4, 16, device)
    scales_of(cache)[2:].mul_(torch.tensor(POWERS, device=device).exp2())
    indices = some_indices(3, 140, 64, device).sort(1).values
    check("triton", queries(3, NUM_HEADS, BF16, device), cache, indices, "fp8_ds_mla")


def test_groups_of_zeros(device: torch.device) -> None:
    """A scale of 0 fits: such keys need no second walk, whose weights would be rounded to bfloat16."""
    cache = filled_cache("fp8_ds_mla", 4, 16, device)
    scales_of(cache)[:, ::2, 1] = 0
    check("triton", queries(2, NUM_HEADS, BF16, device), cache, some_indices(2, 70, 64, device), "fp8_ds_mla")


def test_a_nan_and_an_overflow_stay_in_their_rows(device: torch.device) -> None:
    cache = filled_cache("fp8_ds_mla", 2, 16, device)
    cache[0, 1, 7] = 0x7F
    q = queries(3, NUM_HEADS, BF16, device)
    q[2] = 3e38
    indices = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, -1]], dtype=torch.int32, device=device)
    out, lse = torch.ops.mla.paged_sparse_attention(q, cache, indices, 0.1, "fp8_ds_mla")
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1].isfinite().all()
    assert lse[1].isfinite().all()
    with dispatch.override(paged_sparse_attention="reference"):
        _, expected = torch.ops.mla.paged_sparse_attention(q, cache, indices, 0.1, "fp8_ds_mla")
    assert torch.equal(lse[2].isinf(), expected[2].isinf())


def test_an_empty_row(device: torch.device) -> None:
    cache = filled_cache("fp8_ds_mla", 2, 16, device)
    indices = torch.full((2, 5), -1, dtype=torch.int32, device=device)
    out, lse = torch.ops.mla.paged_sparse_attention(
        queries(2, NUM_HEADS, BF16, device), cache, indices, 0.1, "fp8_ds_mla"
    )
    assert not out.any()
    assert (lse == -math.inf).all()


def test_indices_that_the_kernel_translates(device: torch.device) -> None:
    cache = filled_cache("fp8_ds_mla", 8, 16, device)
    table = torch.tensor([[5, 2, 7], [0, 6, -1]], dtype=torch.int32, device=device)
    owners = torch.tensor([1, 0, 7], dtype=torch.int32, device=device)
    local = {"block_table": table, "req_id_per_token": owners}
    check("triton", queries(3, NUM_HEADS, BF16, device), cache, some_indices(3, 70, 60, device), "fp8_ds_mla", **local)


@pytest.mark.parametrize("cache_format", ["bf16", "fp8_ds_mla_v4"])
def test_64_heads_over_other_formats(cache_format: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_ops.kernels.triton import sparse_attention

    if device.type == "cpu":
        monkeypatch.setattr(
            sparse_attention, "tile", lambda *_: sparse_attention.Tile(64, 32, 8, 1, apart=True, early=True)
        )
    cache = filled_cache(cache_format, 4, 16, device)
    q = queries(3, NUM_HEADS, BF16, device, key_width(cache_format))
    check("triton", q, cache, some_indices(3, 70, 64, device), cache_format)


@pytest.mark.parametrize("head_dim", [576, 512])
@pytest.mark.parametrize("lengths", [False, True], ids=["ends by index", "ends by length"])
@pytest.mark.parametrize("plain", PLAIN_TILES, ids=PLAIN_TILES)
def test_plain_keys_over_tiles_in_which_keys_are_missing(
    device: torch.device, lengths: bool, plain: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles up to the first key that is missing have no masks."""
    sizes = PLAIN_TILES[plain]
    if device.type == "cpu" or sizes[0] == 32:
        force_tile(monkeypatch, *sizes, apart=True, early=sizes[0] == 64)
    cache = filled_cache("bf16", 4, 64, device, head_dim=head_dim)
    indices = some_indices(8, 192, 256, device).abs() % 256  # nothing is missing in the first row
    for row, column, index in ((1, 0, -1), (2, 40, -1), (3, 63, 256), (4, 191, -1), (5, 100, 2**31 - 1)):
        indices[row, column] = index
    indices[6, 70:] = -1
    indices[7] = -1
    limit = torch.tensor([192, 192, 70, 64, 191, 0, 32, 300], dtype=torch.int32, device=device) if lengths else None
    check("triton", queries(8, NUM_HEADS, BF16, device, head_dim), cache, indices, "bf16", topk_length=limit)


def test_parts_of_both_kinds_and_a_sink(device: torch.device) -> None:
    """One program's keys do not fit float16, so its part has other units than those of others; one is empty."""
    cache = filled_cache("fp8_ds_mla", 8, 16, device)
    indices = torch.arange(96, dtype=torch.int32, device=device).repeat(3, 1)
    indices[1, 64:] = -1
    scales_of(cache)[0, 3] *= 2.0**30
    sink = torch.linspace(-2, 2, NUM_HEADS, device=device)
    q = queries(3, NUM_HEADS, BF16, device) * 2.0**-30
    check("triton", q, cache, indices, "fp8_ds_mla", attn_sink=sink)


def test_parts_of_keys_that_do_not_fit_have_the_bits_of_float16(device: torch.device) -> None:
    """One key in 64 is 2**15 times the others and leads each part. Parts of bfloat16 would be beyond the bound."""
    torch.manual_seed(1)
    cache = filled_cache("fp8_ds_mla", 64, 64, device)
    factors = ((torch.rand(64, 64, 4, device=device) * 2 - 1) * 6).exp2()
    factors *= torch.where(torch.rand(64, 64, 1, device=device) < 1 / 64, 2.0**15, 1.0)
    scales_of(cache).mul_(factors * (torch.rand(64, 64, 4, device=device) >= 0.25))
    q = queries(3, NUM_HEADS, BF16, device)
    q[..., :512] /= factors.max() * 8
    check("triton", q, cache, some_indices(3, 500, 64 * 64, device), "fp8_ds_mla")


def test_few_rows_have_tiles_of_16_heads() -> None:
    """Not where a row must not notice its batch: the bits of a token would be those of another tile."""
    from mla_ops.kernels.triton.sparse_attention import tile_heads

    few, more = ((1, 128), (2, 64), (8, 32)), ((2, 128), (3, 64), (9, 32), (128, 128))
    assert {tile_heads(*shape, deterministic=False) for shape in few} == {16}
    for num_tokens, num_heads in more:
        assert tile_heads(num_tokens, num_heads, deterministic=False) == num_heads
        assert tile_heads(num_tokens, num_heads, deterministic=False, short=True) == 16
    for num_tokens, num_heads in few + more:
        assert tile_heads(num_tokens, num_heads, deterministic=True) == num_heads


def test_short_rows_have_an_sm_for_each_16_heads() -> None:
    from mla_ops.kernels.triton.attention_options import make_tile
    from mla_ops.kernels.triton.sparse_attention import is_short
    from mla_ops.kernels.triton.waves import Shares, Wave, waves_of

    for num_tokens, num_heads in ((1, 16), (8, 128), (33, 64), (132, 16)):
        assert is_short(num_tokens, num_heads, 128, "plain", False, 132)
        assert not is_short(num_tokens, num_heads, 128, "plain", True, 132), "a row must not notice its batch"
        assert not is_short(num_tokens, num_heads, 129, "plain", False, 132)
        assert not is_short(num_tokens, num_heads, 128, "fp8", False, 132)
    assert not is_short(34, 64, 128, "plain", False, 132)
    assert waves_of(8, 4, 128, make_tile(16, 32, 4, 2), 264, False, False, True) == (Wave(8, Shares(1, 1, 1)),)
