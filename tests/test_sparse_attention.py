"""Token-level sparse MLA: every lowering against float64, with bounds derived in `attention_oracle`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import attention_oracle
import pytest
import torch
from attention_inputs import (
    INT_MAX,
    INT_MIN,
    QUERIES,
    SCALE,
    check,
    filled_cache,
    force_splits,
    key_width,
    operand,
    poison_unused,
    queries,
    some_indices,
)

import mla_ops  # noqa: F401  (registers the ops)
from mla_ops import dispatch
from mla_ops.formats import FORMATS, planar_views


@pytest.fixture(params=["reference", "triton", *(["hopper"] if torch.cuda.is_available() else [])])
def lowering(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each lowering that may run here; what one refuses is skipped with its reason."""
    with dispatch.override(paged_sparse_attention=request.param, sparse_attention=request.param):
        yield request.param


@pytest.mark.parametrize("num_heads", [1, 17, 65])
@pytest.mark.parametrize(("cache_format", "dtype"), QUERIES)
def test_attention_equals_float64(
    lowering: str, device: torch.device, cache_format: str, dtype: torch.dtype, num_heads: int
) -> None:
    cache = filled_cache(cache_format, 6, 16, device)
    exact = operand("triton", cache_format, dtype) is None
    if exact and lowering == "triton" and device.type == "cpu" and num_heads > 17:
        pytest.skip("exact tiles have 16 heads and 16 keys, and many of them take long to interpret; on a GPU they run")
    topk = 20 if exact else 70
    q = queries(2, num_heads, dtype, device, key_width(cache_format))
    check(lowering, q, cache, some_indices(2, topk, 96, device), cache_format)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [576, 512])
def test_flat_attention_equals_float64(lowering: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Keys, queries and indices that are slices; the row stride of the keys is odd."""
    q = queries(3, 20, dtype, device, head_dim + 3)[:, 1:18, 2 : 2 + head_dim]
    kv = torch.randn(50, head_dim + 7, device=device).to(dtype)[:, 3 : 3 + head_dim]
    indices = some_indices(3, 60, 50, device)[:, 5:40]
    length = torch.tensor([35, 11, 0], dtype=torch.int32, device=device)
    out, lse = torch.ops.mla.sparse_attention(q, kv, indices, SCALE, topk_length=length)
    rounded = None if lowering == "reference" or dtype == torch.float32 else dtype
    expected = attention_oracle.attention(q, kv.unsqueeze(1), indices, SCALE, topk_length=length, operand=rounded)
    attention_oracle.assert_close(out, lse, expected)


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_ds_mla_v4", "bf16"])
def test_request_local_indices(lowering: str, device: torch.device, cache_format: str) -> None:
    """Translated inside, with garbage in the block table and among the requests, equal to translating before."""
    cache = filled_cache(cache_format, 7, 16, device)
    table = torch.tensor([[3, 6, 0], [INT_MIN, 2, 7], [INT_MAX, -1, 1]], dtype=torch.int32, device=device)
    owners = torch.tensor([0, 1, 2, 3, -1], dtype=torch.int32, device=device)
    indices = some_indices(5, 40, 52, device)
    local = {"block_table": table, "req_id_per_token": owners}
    q = queries(5, 3, torch.bfloat16, device, key_width(cache_format))
    out, lse = check(lowering, q, cache, indices, cache_format, **local)
    assert not out[3:].any()
    assert (lse[3:] == -math.inf).all()


def test_translation_inside_equals_translation_before(lowering: str, device: torch.device) -> None:
    cache = filled_cache("fp8_ds_mla", 7, 16, device)
    table = torch.randint(-1, 8, (3, 4), dtype=torch.int32, device=device)
    owners = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    indices, q = some_indices(3, 40, 64, device), queries(3, 3, torch.bfloat16, device)
    inside = torch.ops.mla.paged_sparse_attention(
        q, cache, indices, SCALE, "fp8_ds_mla", block_table=table, req_id_per_token=owners
    )
    slots, _ = torch.ops.mla.convert_req_index_to_global_index(owners, table, indices, 16)
    before = torch.ops.mla.paged_sparse_attention(q, cache, slots, SCALE, "fp8_ds_mla")
    assert torch.equal(inside[0], before[0])
    assert torch.equal(inside[1], before[1])


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_ds_mla_v4", "bf16", "fp32"])
def test_nothing_unused_is_seen(lowering: str, device: torch.device, cache_format: str) -> None:
    """NaN in every slot that no valid index names, and garbage where there was -1: the same bits come out."""
    q = queries(3, 5, FORMATS[cache_format].value_dtype, device, key_width(cache_format))
    cache = filled_cache(cache_format, 5, 8, device)
    indices = torch.randint(0, 20, (3, 24), dtype=torch.int32, device=device) * 2 % 40
    indices[torch.rand(3, 24, device=device) < 0.4] = -1
    clean = torch.ops.mla.paged_sparse_attention(q, cache, indices, SCALE, cache_format)
    dirty = poison_unused(cache, indices[indices >= 0].long().unique(), cache_format)
    assert not torch.equal(dirty.view(torch.uint8), cache.view(torch.uint8))
    garbage = torch.tensor([INT_MIN, -123456, -1, 40, INT_MAX], dtype=torch.int32, device=device)
    noisy = torch.where(indices < 0, garbage[torch.randint(0, 5, indices.shape, device=device)], indices)
    found = torch.ops.mla.paged_sparse_attention(q, dirty, noisy, SCALE, cache_format)
    assert torch.equal(clean[0], found[0])
    assert torch.equal(clean[1], found[1])


def test_a_nan_key_that_is_attended_shows_in_its_own_rows_only(lowering: str, device: torch.device) -> None:
    cache = filled_cache("fp8_ds_mla", 2, 8, device)
    cache[0, 3, 5] = 0x7F
    indices = torch.tensor([[0, 1, 2, 4], [0, 3, 2, 4]], dtype=torch.int32, device=device)
    out, lse = torch.ops.mla.paged_sparse_attention(
        queries(2, 2, torch.bfloat16, device), cache, indices, SCALE, "fp8_ds_mla"
    )
    assert out[0].isfinite().all()
    assert lse[0].isfinite().all()
    assert out[1].isnan().all()
    assert lse[1].isnan().all()


@pytest.mark.parametrize("num_heads", [3, 64])
def test_scales_that_no_writer_gives(lowering: str, device: torch.device, num_heads: int) -> None:
    """Zeros and denormals count as what they are. NaN spoils the rows that attend to it, infinities no other's."""
    cache = filled_cache("fp8_ds_mla", 2, 8, device)
    scales = cache.view(16, 656)[:, 512:528].view(torch.float32)
    scales[1, 2], scales[2], scales[3, 0], scales[4, 3] = 0.0, 0.0, 1e-40, 2.0**-149
    scales[5, 1], scales[6, 3], scales[7, 0] = math.nan, math.inf, -math.inf
    indices = torch.tensor([[0, 8, 9, 10], [1, 2, 3, 4], [0, 8, 5, 9], [6, 0, 9, 8], [7, 0, 9, 8]], device=device).int()
    q = queries(5, num_heads, torch.bfloat16, device)
    out, lse = check(lowering, q, cache, indices, "fp8_ds_mla", tokens=[0, 1])
    assert out[:2].isfinite().all()
    assert lse[:2].isfinite().all()
    assert out[2].isnan().all()
    alone, _ = torch.ops.mla.paged_sparse_attention(q[:2], cache, indices[:2], SCALE, "fp8_ds_mla", deterministic=True)
    beside, _ = torch.ops.mla.paged_sparse_attention(q, cache, indices, SCALE, "fp8_ds_mla", deterministic=True)
    assert torch.equal(beside[:2], alone)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
def test_sinks(
    lowering: str, device: torch.device, cache_format: str, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_splits(monkeypatch, num_splits)
    sink = torch.tensor([-math.inf, math.inf, 0.0, 3.5, -40.0, 200.0], device=device)
    indices = some_indices(3, 40, 32, device)
    indices[2] = -1
    q, cache = queries(3, 6, torch.bfloat16, device), filled_cache(cache_format, 2, 16, device)
    out, lse = check(lowering, q, cache, indices, cache_format, attn_sink=sink)
    assert not out[:, 1].any()
    plain = torch.ops.mla.paged_sparse_attention(q, cache, indices, SCALE, cache_format)
    assert torch.equal(lse, plain[1])
    assert torch.equal(out[:, 0], plain[0][:, 0])


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize(("num_tokens", "topk"), [(0, 8), (3, 0), (0, 0), (2, 1)])
def test_nothing_to_do(
    lowering: str,
    device: torch.device,
    num_tokens: int,
    topk: int,
    num_splits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force_splits(monkeypatch, num_splits)
    indices = torch.zeros(num_tokens, topk, dtype=torch.int32, device=device)
    q = queries(num_tokens, 2, torch.bfloat16, device)
    for num_blocks in (0, 2):
        cache = filled_cache("fp8_ds_mla", num_blocks, 4, device)
        out, lse = check(lowering, q, cache, indices, "fp8_ds_mla")
        if num_blocks == 0 or topk == 0:
            assert not out.any()
            assert (lse == -math.inf).all()


@pytest.mark.parametrize("num_splits", [1, 2, 5, 64])
@pytest.mark.parametrize("with_length", [False, True], ids=["-1 tails", "topk_length"])
def test_splits_merge_exactly(
    device: torch.device, triton_lowering: None, num_splits: int, with_length: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths from 0 to topk, in blocks that the splits do not divide: each result is within the one bound."""
    force_splits(monkeypatch, num_splits)
    lengths = torch.tensor([0, 1, 31, 33, 150, 200, -5], dtype=torch.int32, device=device)
    indices = some_indices(7, 150, 64, device)
    cache, q = filled_cache("bf16", 4, 16, device), queries(7, 3, torch.bfloat16, device)
    options = {"topk_length": lengths} if with_length else {}
    if not with_length:
        indices[torch.arange(150, device=device) >= lengths[:, None]] = -1
    # with many splits the interpreter is slow, and most of them are empty anyhow
    rows = slice(0, 7) if num_splits < 10 else slice(3, 5)
    options = {name: value[rows] for name, value in options.items()}
    check("triton", q[rows], cache, indices[rows], "bf16", **options)


@pytest.mark.parametrize("scale", [0.0, -SCALE, 2.0**16])
@pytest.mark.parametrize("cache_format", ["bf16", "fp8_ds_mla"])
def test_a_scale_that_is_not_above_0_or_large(cache_format: str, scale: float, device: torch.device) -> None:
    """Triton's tiles of 64 heads would take the largest score before it is scaled: such calls have others.

    They scale and subtract it in one instruction on a GPU, which is off by what a product rounds to.
    """
    pytest.importorskip("triton")
    from mla_ops.kernels.triton.sparse_attention import tile_heads

    assert tile_heads(128, 128, deterministic=True, softmax_scale=scale) == 16
    cache = filled_cache(cache_format, 6, 16, device)
    q = queries(3, 65, torch.bfloat16, device, key_width(cache_format))
    with dispatch.override(paged_sparse_attention="triton"):
        check("triton", q, cache, some_indices(3, 70, 96, device), cache_format, softmax_scale=scale)


def test_order_and_duplicates(lowering: str, device: torch.device) -> None:
    """A key named twice weighs twice."""
    cache, q = filled_cache("fp32", 1, 8, device), queries(1, 2, torch.float32, device)
    indices = torch.tensor([[3, 3, 5, 3]], dtype=torch.int32, device=device)
    check(lowering, q, cache, indices, "fp32")


@pytest.mark.parametrize("num_heads", [5, 65])
@pytest.mark.parametrize("scale", [2.0**10, 2.0**31, -(2.0**40), 2.0**62])
def test_large_scores_act_as_argmax(lowering: str, device: torch.device, scale: float, num_heads: int) -> None:
    """Every key is named three times, so that the largest score is met as often: an lse does not hold the 3."""
    kv = torch.randn(24, 576, device=device).bfloat16()
    nearest = (torch.arange(2).unsqueeze(1) + torch.arange(num_heads)) % 24
    q = kv[nearest] * math.copysign(1, scale)
    indices = torch.stack([torch.randperm(72, device=device) % 24 for _ in range(2)]).int()
    out, lse = torch.ops.mla.sparse_attention(q, kv, indices, scale)
    torch.testing.assert_close(out, kv[nearest, :512], rtol=2**-7, atol=2**-10)
    assert lse.isfinite().all()


def test_large_and_small_scores(lowering: str, device: torch.device) -> None:
    """Scales of 2**-60 and 2**60 in one row, and queries that undo them: no overflow on the way."""
    cache = filled_cache("fp8_ds_mla", 2, 16, device)
    scales = torch.tensor([2.0**-60, 2.0**60, 1.7e-20, 3.0], device=device).repeat(32, 1)
    cache.view(32, 656)[:, 512:528] = scales.view(torch.uint8)
    q = queries(2, 3, torch.bfloat16, device)
    q[..., :512] /= scales[0].repeat_interleave(128).mul(64).bfloat16()
    check(lowering, q, cache, some_indices(2, 40, 32, device), "fp8_ds_mla")


def test_pool_slices_and_strided_outputs(lowering: str, device: torch.device) -> None:
    """Blocks that are slices of a pool, queries of a wider buffer, outputs into slices of buffers."""
    pool = filled_cache("fp8_ds_mla", 5, 48, device)
    cache = pool[:, 16:32]
    q = queries(4, 9, torch.bfloat16, device, 640)[1:, 2:7, 32:608]
    indices = some_indices(3, 40, 80, device)
    out = torch.full((3, 7, 512), 77.0, dtype=torch.bfloat16, device=device)
    lse = torch.full((3, 9), 77.0, device=device)
    torch.ops.mla.paged_sparse_attention.out(q, cache, indices, SCALE, "fp8_ds_mla", out=out[:, 1:6], lse=lse[:, 2:7])
    rounded = operand(lowering, "fp8_ds_mla", q.dtype)
    expected = attention_oracle.attention(q, cache, indices, SCALE, operand=rounded)
    attention_oracle.assert_close(out[:, 1:6], lse[:, 2:7], expected)
    assert (out[:, [0, 6]] == 77).all()
    assert (lse[:, [0, 1, 7, 8]] == 77).all()


@pytest.mark.parametrize("block_size", [64, 256, 2, 3])
def test_v4_pages_and_views(lowering: str, device: torch.device, block_size: int) -> None:
    """Any page size; a cache of whole blocks, the same seen token by token, and a slice of a pool: the same bits."""
    num_blocks = 1 + 24 // block_size
    cache = filled_cache("fp8_ds_mla_v4", num_blocks, block_size, device)
    q, indices = queries(2, 3, torch.bfloat16, device, 512), some_indices(2, 20, num_blocks * block_size, device)
    out, lse = check(lowering, q, cache, indices, "fp8_ds_mla_v4")
    by_token = cache.as_strided((num_blocks, block_size, 584), (cache.stride(0), 584, 1))
    pool = torch.full((num_blocks + 1, cache.shape[1] + 48), 0xFF, dtype=torch.uint8, device=device)
    pool[1:, 16:-32] = cache
    for same in (by_token, pool[1:, 16:-32]):
        found = torch.ops.mla.paged_sparse_attention(q, same, indices, SCALE, "fp8_ds_mla_v4")
        assert torch.equal(found[0], out)
        assert torch.equal(found[1], lse)


def test_a_nan_of_v4_stays_in_the_rows_that_attend_to_it(lowering: str, device: torch.device) -> None:
    """A value, a scale and a RoPE element that are not numbers, in three slots of one block."""
    cache = filled_cache("fp8_ds_mla_v4", 1, 8, device)
    data, scales = planar_views(cache, "fp8_ds_mla_v4")
    data[0, 1, 5], scales[0, 3, 6], data[0, 5, 575] = 0x7F, 255, 0x7F
    data[0, 5, 574] = 0xC0
    indices = torch.tensor([[0, 2, 4], [0, 1, 2], [3, 0, 2], [4, 6, 5]], dtype=torch.int32, device=device)
    q = queries(4, 2, torch.bfloat16, device, 512)
    out, lse = torch.ops.mla.paged_sparse_attention(q, cache, indices, SCALE, "fp8_ds_mla_v4")
    assert out[0].isfinite().all()
    assert lse[0].isfinite().all()
    assert out[1:].isnan().all()
    assert lse[1:].isnan().all()


@pytest.mark.parametrize("num_heads", [3, 20, 40])
def test_numbers_of_v4_that_float16_does_not_hold(lowering: str, device: torch.device, num_heads: int) -> None:
    """Scales from 2**-127 to 2**8 and RoPE elements from 2**-30 to 1000, in some of the keys of a row."""
    cache = filled_cache("fp8_ds_mla_v4", 3, 64, device)
    data, scales = planar_views(cache, "fp8_ds_mla_v4")
    for position, byte in enumerate((105, 126, 0, 1, 100, 104, 127, 128, 135)):
        scales[position % 2, 5 * position, position % 7] = byte
    rope = data[..., 448:].view(torch.bfloat16)
    for position, value in enumerate((2.0**-30, -255.0, 0.0, 256.0, -1000.0)):
        rope[2, 3 * position, 7 * position] = value
    q = queries(4, num_heads, torch.bfloat16, device, 512) / 64
    indices = torch.randint(0, 192, (4, 150), dtype=torch.int32, device=device)
    indices[1] = torch.arange(20, 170, device=device)
    indices[2, :64], indices[3, 64:] = torch.arange(64, device=device), -1
    check(lowering, q, cache, indices, "fp8_ds_mla_v4")


def test_tile_table() -> None:
    """Every device and number of heads gets a tile whose Q and keys fit its shared memory."""
    from mla_ops.kernels.triton.sparse_attention import tile

    limits = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99, (12, 1): 99}
    for capability, limit in limits.items():
        for num_heads in range(1, 129):
            for mode in ("fp8", "fp8_v4", "plain", "exact", "fp8_exact", "fp8_v4_exact"):
                chosen = tile(capability, num_heads, mode)
                # wgmma reads all keys from shared memory, the older instructions a converted group at a time
                width = 576 if mode in ("plain", "fp8_v4") or capability == (9, 0) else 128
                if not mode.endswith("exact"):
                    assert (chosen.block_h * 576 + chosen.block_n * width) * 2 <= limit * 1024
                assert chosen.block_h * 512 * 4 <= 2**17


def test_warps_of_tiles_of_32_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight where a program has an SM to itself, and where four spill 752 bytes a thread, on SM100 by Triton 3.9."""
    from mla_ops.kernels.triton import sparse_attention

    for keeps, warps in ((False, 4), (True, 8)):
        monkeypatch.setattr(sparse_attention, "KEEPS_OPERANDS", keeps)
        for capability in ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0), (12, 1)):
            for mode in ("fp8", "plain"):
                assert sparse_attention.tile(capability, 32, mode).num_warps == 8
        assert sparse_attention.tile((10, 0), 32, "fp8", alone=False).num_warps == warps
        assert sparse_attention.tile((10, 0), 32, "plain", alone=False).num_warps == 4
    apart = {c: sparse_attention.tile(c, 32, "plain", alone=False).apart for c in ((8, 0), (10, 0), (12, 0))}
    assert apart == {(8, 0): False, (10, 0): True, (12, 0): True}, "an SM of SM80 has no room for two such programs"


@pytest.mark.parametrize(
    ("shared", "num_tokens", "deterministic", "alone"),
    [(100, 4096, True, True), (100, 4096, False, True), (228, 8, False, True), (228, 9, False, False)]
    + [(228, 1, True, False), (164, 66, False, True), (164, 67, False, False)],
)
def test_programs_that_have_an_sm_to_themselves(
    shared: int, num_tokens: int, deterministic: bool, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a row must not notice its batch, the number of tokens decides nothing."""
    from mla_ops.kernels.triton import sparse_attention

    monkeypatch.setattr(sparse_attention, "shared_of_sm", lambda device: shared * 1024)
    monkeypatch.setattr(sparse_attention, "num_sms", lambda device: 132)
    monkeypatch.setattr(sparse_attention, "capability", lambda device: (8, 0) if shared == 164 else (10, 0))
    device = torch.device("cuda")
    assert sparse_attention.programs_are_alone(device, num_tokens, 64, deterministic) is alone


def test_programs_that_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two an SM where it has room for both, of 32 heads where rows are not few."""
    from mla_ops.kernels.triton import sparse_attention
    from mla_ops.kernels.triton.sparse_attention import Tile

    tiles = {"16 heads": Tile(16, 32, 4, 2), "pairs": Tile(32, 32, 4, 1), "alone": Tile(32, 32, 8, 1)}
    tiles["64 heads"] = Tile(64, 64, 8, 1)
    monkeypatch.setattr(sparse_attention, "num_sms", lambda device: 132)
    for capability, shared, pairs in (
        ((9, 0), 228, {"16 heads", "pairs"}),
        ((12, 0), 100, set()),
        ((8, 0), 164, set()),
    ):
        monkeypatch.setattr(sparse_attention, "capability", lambda device, given=capability: given)
        monkeypatch.setattr(sparse_attention, "shared_of_sm", lambda device, given=shared: given * 1024)
        for name, tile in tiles.items():
            many = sparse_attention.wanted_programs(torch.device("cuda"), tile, 17)
            assert many == (264 if name in pairs else 132)
    monkeypatch.setattr(sparse_attention, "shared_of_sm", lambda device: 228 * 1024)
    assert sparse_attention.wanted_programs(torch.device("cuda"), tiles["pairs"], 16) == 132, "parts of few keys"


def test_constants_of_kernels_are_json() -> None:
    """Hooks of Triton's cache, which count and record what is compiled, write a kernel's constants with json."""
    from mla_ops.kernels.triton.sparse_attention import Keys, tile

    keys = Keys("fp8", 656, 16, True, False, "hardware")
    text = "Keys(operands=fp8, row_width=656, unit=16, in_line=True, translated=False, decode=hardware)"
    assert json.loads(json.dumps([keys])) == [text]
    assert tile((9, 0), 16, "fp8") == tile((9, 0), 16, "fp8") != tile((9, 0), 128, "fp8")
    assert keys.with_operands("fp8_half") != keys
