"""Token-level sparse MLA on a GPU: real sizes, captured steps, caches beyond 4 GiB, under every lowering there."""

from __future__ import annotations

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
    check_two_caches,
    filled_cache,
    key_width,
    operand,
    queries,
    rows_with_wide_scales,
    some_indices,
)

from mla_ops import dispatch
from mla_ops.formats import allocate_cache, planar_views

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["triton", "hopper"])
def lowering(request: pytest.FixtureRequest) -> Iterator[str]:
    """The library's own kernels; a call that one refuses is skipped with its reason."""
    with dispatch.override(paged_sparse_attention=request.param):
        yield request.param


REAL = [(0, 128, 2048), (1, 1, 2048), (1, 8, 640), (1, 128, 2176), (7, 16, 2048), (7, 17, 2176), (7, 64, 1)]
REAL += [(128, 8, 2048), (128, 16, 2048), (128, 64, 2176), (128, 128, 2048), (128, 128, 0), (4096, 64, 640)]
REAL += [(4096, 128, 2048), (4096, 1, 2048), (4096, 17, 640)]


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_ds_mla_v4", "bf16"])
@pytest.mark.parametrize(("num_tokens", "num_heads", "topk"), REAL)
def test_attention_at_real_sizes(cache_format: str, num_tokens: int, num_heads: int, topk: int, lowering: str) -> None:
    """All tokens by a local table, all lengths; about thirty tokens against float64, all of them for finiteness."""
    device = torch.device("cuda")
    cache = filled_cache(cache_format, 1200, 64, device)
    table = torch.randint(0, 1200, (16, 512), dtype=torch.int32, device=device)
    table[:, ::37] = torch.tensor([INT_MIN, -1, 1200, INT_MAX], dtype=torch.int32, device=device).repeat(4)[:, None]
    options = {
        "block_table": table,
        "req_id_per_token": torch.randint(0, 16, (num_tokens,), dtype=torch.int32, device=device),
        "topk_length": torch.randint(0, topk + 1, (num_tokens,), dtype=torch.int32, device=device),
        "attn_sink": torch.randn(num_heads, device=device),
    }
    if num_tokens:
        options["topk_length"][0] = topk
    q = queries(num_tokens, num_heads, torch.bfloat16, device, key_width(cache_format))
    indices = some_indices(num_tokens, topk, 512 * 64, device)
    tokens = sorted({0, num_tokens - 1, *torch.randint(0, num_tokens, (30,)).tolist()}) if num_tokens else []
    out, lse = check(lowering, q, cache, indices, cache_format, tokens, **options)
    assert out.isfinite().all()
    assert not lse.isnan().any()


@pytest.mark.parametrize("num_heads", [1, 16, 17, 64, 128])
@pytest.mark.parametrize(("cache_format", "dtype"), QUERIES)
def test_every_format_and_tile_on_the_gpu(cache_format: str, dtype: torch.dtype, num_heads: int, lowering: str) -> None:
    device = torch.device("cuda")
    cache = filled_cache(cache_format, 64, 64, device)
    indices = some_indices(5, 640, 4096, device)
    check(lowering, queries(5, num_heads, dtype, device, key_width(cache_format)), cache, indices, cache_format)


DEAD = ("scattered", "runs", "tail", "every other", "all but the last", "two rows of three", "all", "one slot")


@pytest.mark.parametrize("kind", DEAD)
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_ds_mla_v4", "bf16"])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads"), [(1, 128), (8, 16), (9, 128), (40, 32), (32, 16), (32, 64), (30, 128), (150, 64)]
)
def test_dead_indices_in_every_pattern(
    cache_format: str, num_tokens: int, num_heads: int, kind: str, lowering: str
) -> None:
    """Also what no launch of rows of live keys reaches: turns that several steps of the gather fill."""
    device, topk = torch.device("cuda"), 1100
    cache = filled_cache(cache_format, 64, 64, device)
    indices = torch.randint(0, 4096, (num_tokens, topk), dtype=torch.int32, device=device)
    positions = torch.arange(topk, device=device).expand(num_tokens, -1)
    dead = {
        "scattered": torch.rand(num_tokens, topk, device=device) < 0.9,
        "runs": positions // 37 % 3 > 0,
        "tail": positions >= torch.randint(0, topk, (num_tokens, 1), device=device),
        "every other": positions % 2 == 1,
        "all but the last": positions < topk - 1,
        "two rows of three": (torch.arange(num_tokens, device=device) % 3 > 0)[:, None].expand(-1, topk),
        "all": positions >= 0,
        "one slot": positions < 0,
    }[kind]
    indices[dead] = torch.tensor([-1, INT_MIN, 4096, INT_MAX], dtype=torch.int32, device=device)[
        torch.randint(0, 4, (int(dead.sum()),), device=device)
    ]
    if kind == "one slot":
        indices.fill_(1234)
    q = queries(num_tokens, num_heads, torch.bfloat16, device, key_width(cache_format))
    check(lowering, q, cache, indices, cache_format, sorted({0, num_tokens // 2, num_tokens - 1}))


V4_REAL = [(0, 64, 128, 512), (1, 64, 128, 512), (2, 128, 128, 1024), (7, 17, 128, 640), (16, 8, 128, 0)]
V4_REAL += [(64, 64, 128, 512), (256, 128, 128, 1024), (4096, 64, 128, 512)]


@pytest.mark.parametrize("extra_format", ["fp8_ds_mla_v4", "bf16"])
@pytest.mark.parametrize(("num_tokens", "num_heads", "topk", "extra_topk"), V4_REAL)
def test_two_caches_at_real_sizes(
    num_tokens: int, num_heads: int, topk: int, extra_topk: int, extra_format: str, lowering: str
) -> None:
    """A window by slots in pages of 64, compressed tokens by a local table in pages of 2, all lengths, sinks."""
    device = torch.device("cuda")
    cache = filled_cache("fp8_ds_mla_v4", 300, 64, device)
    extra = filled_cache(extra_format, 9000, 2, device, head_dim=512)
    table = torch.randint(0, 9000, (16, 512), dtype=torch.int32, device=device)
    table[:, ::37] = torch.tensor([INT_MIN, -1, 9000, INT_MAX], dtype=torch.int32, device=device).repeat(4)[:, None]
    options = {
        "extra_block_table": table,
        "req_id_per_token": torch.randint(-1, 16, (num_tokens,), dtype=torch.int32, device=device),
        "topk_length": torch.randint(0, topk + 1, (num_tokens,), dtype=torch.int32, device=device),
        "extra_topk_length": torch.randint(0, extra_topk + 1, (num_tokens,), dtype=torch.int32, device=device),
        "attn_sink": torch.randn(num_heads, device=device),
    }
    q = queries(num_tokens, num_heads, torch.bfloat16, device, 512)
    indices = some_indices(num_tokens, topk, 300 * 64, device)
    extra_indices = some_indices(num_tokens, extra_topk, 1024, device)
    # rows without a key in the first cache, in the second, in either
    indices[1::4], extra_indices[2::4] = -1, -1
    indices[3::4], extra_indices[3::4] = -1, INT_MAX
    tokens = sorted({0, num_tokens - 1, *torch.randint(0, num_tokens, (30,)).tolist()}) if num_tokens else []
    out, lse = check_two_caches(
        lowering, q, cache, indices, "fp8_ds_mla_v4", extra, extra_indices, extra_format, tokens, **options
    )
    assert out.isfinite().all()
    assert not lse.isnan().any()


@pytest.mark.parametrize("num_heads", [16, 24, 32, 64])
@pytest.mark.parametrize(
    ("cache_format", "width"), [("fp8_ds_mla", 576), ("fp8_ds_mla_v4", 512), ("bf16", 576), ("bf16", 512)]
)
def test_more_rows_than_the_device_takes_at_once(cache_format: str, width: int, num_heads: int, lowering: str) -> None:
    """Empty, short and long rows follow one another, among them keys whose scales float16 does not hold."""
    device, num_tokens, topk = torch.device("cuda"), 700, 320
    cache = filled_cache(cache_format, 64, 64, device, head_dim=width)
    if cache_format == "fp8_ds_mla_v4":
        planar_views(cache, cache_format)[1][::7, ::9, :7] -= 24
    elif cache_format == "fp8_ds_mla":
        scales = cache[::7, ::9, 512:528].contiguous().view(torch.float32)
        cache[::7, ::9, 512:528] = (scales * 2**-20).view(torch.uint8)
    lengths = torch.randint(0, topk + 1, (num_tokens,), dtype=torch.int32, device=device)
    lengths[::5] = 0
    indices = some_indices(num_tokens, topk, 64 * 64, device)
    indices[::3] = indices[::3] // 64 // 2 * 128 + 64 + indices[::3] % 64  # a row that meets no such key
    options = {"topk_length": lengths, "attn_sink": torch.randn(num_heads, device=device)}
    q = queries(num_tokens, num_heads, torch.bfloat16, device, width)
    tokens = [*range(130, 134), *range(262, 270), *range(394, 402), *range(526, 540), *range(690, 700)]
    check(lowering, q, cache, indices, cache_format, tokens, **options)


@pytest.mark.parametrize("power", [-26, -20, 14])
@pytest.mark.parametrize("num_heads", [16, 24, 32, 64, 128])
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_ds_mla_v4"])
def test_few_rows_with_scales_that_float16_does_not_hold(
    cache_format: str, num_heads: int, power: int, lowering: str
) -> None:
    device = torch.device("cuda")
    cache, indices = rows_with_wide_scales(cache_format, power, 9, 1000, device)
    q = queries(9, num_heads, torch.bfloat16, device, key_width(cache_format))
    out, lse = check(lowering, q, cache, indices, cache_format)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def with_scales_times(cache: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Factors of each key and group of `fp8_ds_mla`."""
    scales = cache[..., 512:528].contiguous().view(torch.float32)
    cache[..., 512:528] = (scales * factors).view(torch.uint8)
    return cache


# On an H200 a CTA takes four of 420 rows of 64 heads: a kernel of its own.
@pytest.mark.parametrize(("num_tokens", "largest_score"), [(5, 1e4), (45, 1.0), (140, 1e4), (420, 1.0), (420, 1e4)])
@pytest.mark.parametrize("num_heads", [16, 24, 32, 64])
@pytest.mark.parametrize("kind", ["small", "large", "mixed", "zeros", "spread", "powers of two", "wild"])
def test_keys_of_any_magnitude(kind: str, num_heads: int, num_tokens: int, largest_score: float, lowering: str) -> None:
    """All keys alike, keys that differ, and groups of one key: over more than float16 holds in the last three kinds."""
    device = torch.device("cuda")
    shape = (64, 64, 1 if kind in ("small", "large", "mixed") else 4)
    span = {"small": 0, "large": 0, "mixed": 20, "zeros": 6, "spread": 12, "powers of two": 12, "wild": 30}[kind]
    powers = (torch.rand(shape, device=device) * 2 - 1) * span + {"small": -40, "large": 20}.get(kind, 0)
    factors = (powers.round() if kind == "powers of two" else powers).exp2()
    if kind in ("zeros", "wild"):
        factors = factors * (torch.rand(64, 64, 1, device=device) < 1 / 64).float().mul(2.0**15).add(1.0)
        factors = factors * (torch.rand(shape, device=device) >= 0.25)
    cache = with_scales_times(filled_cache("fp8_ds_mla", 64, 64, device), factors)
    q = queries(num_tokens, num_heads, torch.bfloat16, device) * (largest_score / factors.max().item() / 8)
    q[..., 512:] = queries(num_tokens, num_heads, torch.bfloat16, device)[..., 512:]
    indices = some_indices(num_tokens, 500, 64 * 64, device)
    out, lse = check(lowering, q, cache, indices, "fp8_ds_mla", [0, num_tokens // 2, num_tokens - 1])
    assert out.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("num_heads", [16, 24, 32, 128])
def test_weights_keep_their_bits_far_below_the_largest(num_heads: int, lowering: str) -> None:
    """Two keys, of which each has zeros where the other has ones: half of a result is the smaller weight alone.

    It is 2^-22 to 2^-32 of the other; where both lie between powers of two differs from row to row.
    """
    device, num_tokens = torch.device("cuda"), 16
    latent = torch.zeros(2, 512, device=device, dtype=torch.bfloat16)
    latent[0, :256], latent[1, 256:] = 1.0, 1.0
    rope = torch.zeros(2, 64, device=device, dtype=torch.bfloat16)
    rope[:, 0], rope[1, 1] = 1.0, 1.0
    cache = allocate_cache("fp8_ds_mla", 1, 64, device=device)
    torch.ops.mla.concat_and_cache(latent, rope, cache, torch.arange(2, device=device), "fp8_ds_mla")
    q = torch.zeros(num_tokens, num_heads, 576, device=device, dtype=torch.bfloat16)
    q[..., 512] = torch.linspace(0.0, 40.0, num_tokens * num_heads, device=device).view(num_tokens, num_heads)
    q[..., 513] = torch.linspace(-360.0, -530.0, num_tokens * num_heads, device=device).view(num_tokens, num_heads)
    indices = torch.arange(2, dtype=torch.int32, device=device).expand(num_tokens, 2).contiguous()
    check(lowering, q, cache, indices, "fp8_ds_mla")


@pytest.mark.parametrize(("num_heads", "num_tokens"), [(16, 9), (64, 9), (64, 420)])
def test_queries_that_make_up_for_small_scales(num_heads: int, num_tokens: int, lowering: str) -> None:
    """Groups count as much in a score as others whose scales are 2^30 as large: no product of float16 knows."""
    device = torch.device("cuda")
    powers = torch.tensor([0.0, -30.0, 10.0, -20.0], device=device)
    cache = with_scales_times(filled_cache("fp8_ds_mla", 64, 64, device), powers.exp2())
    q = queries(num_tokens, num_heads, torch.bfloat16, device)
    q[..., :512] *= (-powers).exp2().repeat_interleave(128).bfloat16()
    check(lowering, q, cache, some_indices(num_tokens, 500, 64 * 64, device), "fp8_ds_mla")


@pytest.mark.parametrize("infinity", [math.inf, math.nan])
def test_a_scale_without_a_number_spoils_its_rows_alone(infinity: float, lowering: str) -> None:
    """Beside scales over more than float16 holds, in rows of 64 heads of which a CTA takes several."""
    device, num_tokens = torch.device("cuda"), 420
    factors = ((torch.rand(64, 64, 4, device=device) * 2 - 1) * 12).exp2()
    cache = with_scales_times(filled_cache("fp8_ds_mla", 64, 64, device), factors)
    indices = some_indices(num_tokens, 500, 63 * 64, device)
    q = queries(num_tokens, 64, torch.bfloat16, device)
    expected = torch.ops.mla.paged_sparse_attention(q, cache, indices, SCALE, "fp8_ds_mla")
    spoilt = indices.clone()
    spoilt[::7, 300] = 64 * 64 - 1
    cache[63, 63, 516:520] = torch.tensor([infinity], device=device).view(torch.uint8)
    out, lse = torch.ops.mla.paged_sparse_attention(q, cache, spoilt, SCALE, "fp8_ds_mla")
    same = torch.arange(num_tokens, device=device) % 7 > 0
    assert torch.equal(out[same], expected[0][same])
    assert torch.equal(lse[same], expected[1][same])
    assert out[::7].isnan().any(-1).all()


@pytest.mark.parametrize(("num_heads", "num_tokens"), [(16, 9), (16, 45), (32, 9), (32, 45), (64, 420)])
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_ds_mla_v4"])
def test_a_nan_query_beside_such_scales_spoils_its_head_alone(
    cache_format: str, num_heads: int, num_tokens: int, lowering: str
) -> None:
    """Two CTAs share a row of 45 tokens on Hopper; each may have sent the other bfloat16 or float16."""
    device = torch.device("cuda")
    cache, indices = rows_with_wide_scales(cache_format, -26, num_tokens, 1000, device)
    q = queries(num_tokens, num_heads, torch.bfloat16, device, key_width(cache_format))
    expected, _ = check(lowering, q, cache, indices, cache_format)
    q[:, 0, 7] = math.nan
    out, lse = torch.ops.mla.paged_sparse_attention(q, cache, indices, SCALE, cache_format)
    assert out[:, 0].isnan().all()
    assert lse[:, 0].isnan().all()
    difference = (out[:, 1:].float() - expected[:, 1:].float()).abs().amax(-1)
    assert (difference <= 2**-6 * expected[:, 1:].float().abs().amax(-1)).all()


def test_two_caches_of_a_captured_step_replay(lowering: str) -> None:
    """One capture over two caches, replayed with other lengths, tables, keys and live tokens: the bits of eager."""
    device, num_tokens, num_heads = torch.device("cuda"), 24, 64
    caches = [filled_cache("fp8_ds_mla_v4", *shape, device) for shape in ((40, 64), (800, 2))]
    q = queries(num_tokens, num_heads, torch.bfloat16, device, 512)
    selections = [torch.zeros(num_tokens, width, dtype=torch.int32, device=device) for width in (128, 512)]
    lengths = [torch.zeros(num_tokens, dtype=torch.int32, device=device) for _ in range(2)]
    tables = [torch.zeros(8, width, dtype=torch.int32, device=device) for width in (5, 100)]
    owners = torch.zeros(num_tokens, dtype=torch.int32, device=device)

    def attend(out: torch.Tensor, lse: torch.Tensor) -> None:
        torch.ops.mla.paged_sparse_attention.extra_out(
            q,
            caches[0],
            selections[0],
            SCALE,
            "fp8_ds_mla_v4",
            caches[1],
            selections[1],
            "fp8_ds_mla_v4",
            topk_length=lengths[0],
            extra_topk_length=lengths[1],
            block_table=tables[0],
            extra_block_table=tables[1],
            req_id_per_token=owners,
            out=out,
            lse=lse,
        )

    def buffers() -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full((num_tokens, num_heads, 512), math.nan, dtype=torch.bfloat16, device=device)
        return out, torch.full((num_tokens, num_heads), math.nan, device=device)

    captured = buffers()
    attend(*captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(*captured)
    for num_live in (24, 5, 0, 17):
        for selection, length, table, cache, num_blocks in zip(
            selections, lengths, tables, caches, (40, 800), strict=True
        ):
            page = 64 if num_blocks == 40 else 2
            selection.copy_(some_indices(num_tokens, selection.shape[1], table.shape[1] * page, device))
            length.copy_(torch.randint(0, selection.shape[1] + 1, (num_tokens,), device=device))
            table.random_(-1, num_blocks + 1)
            cache.copy_(filled_cache("fp8_ds_mla_v4", num_blocks, page, device))
        owners.random_(0, 8)
        owners[num_live:] = -1
        q.normal_()
        graph.replay()
        eager = buffers()
        attend(*eager)
        assert torch.equal(captured[0], eager[0])
        assert torch.equal(captured[1], eager[1])
        assert captured[0].isfinite().all()
        assert not captured[0][num_live:].any()


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
def test_keys_beyond_four_gib(cache_format: str, lowering: str) -> None:
    device = torch.device("cuda")
    row_bytes = 656 if cache_format == "fp8_ds_mla" else 1152
    num_blocks = 2**32 // (64 * row_bytes) + 3000
    cache = allocate_cache(cache_format, num_blocks, 64, device=device)
    some = filled_cache(cache_format, 2000, 64, device)
    cache[-2000:] = some
    indices = some_indices(7, 2048, 2000 * 64, device)
    far = torch.where((indices >= 0) & (indices < 2000 * 64), indices + (num_blocks - 2000) * 64, indices)
    far[indices == 2000 * 64] = num_blocks * 64
    q = queries(7, 17, torch.bfloat16, device)
    near_out, near_lse = check(lowering, q, some, indices, cache_format)
    out, lse = torch.ops.mla.paged_sparse_attention(q, cache, far, SCALE, cache_format)
    assert torch.equal(out, near_out)
    assert torch.equal(lse, near_lse)


def test_keys_of_v4_beyond_four_gib(lowering: str) -> None:
    device = torch.device("cuda")
    num_blocks = 2**32 // 37440 + 3000
    cache = allocate_cache("fp8_ds_mla_v4", num_blocks, 64, device=device)
    some = filled_cache("fp8_ds_mla_v4", 2000, 64, device)
    cache[-2000:] = some
    indices = some_indices(7, 2048, 2000 * 64, device)
    far = torch.where((indices >= 0) & (indices < 2000 * 64), indices + (num_blocks - 2000) * 64, indices)
    far[indices == 2000 * 64] = num_blocks * 64
    q = queries(7, 17, torch.bfloat16, device, 512)
    rounded = operand(lowering, "fp8_ds_mla_v4", q.dtype)
    expected = attention_oracle.attention(q, some, indices, SCALE, operand=rounded, cache_format="fp8_ds_mla_v4")
    attention_oracle.assert_close(
        *torch.ops.mla.paged_sparse_attention(q, cache, far, SCALE, "fp8_ds_mla_v4"), expected
    )
    for arguments in (
        (cache, far, SCALE, "fp8_ds_mla_v4", some, indices[:, :0], "fp8_ds_mla_v4"),
        (some, indices[:, :0], SCALE, "fp8_ds_mla_v4", cache, far, "fp8_ds_mla_v4"),
    ):
        attention_oracle.assert_close(*torch.ops.mla.paged_sparse_attention.extra(q, *arguments), expected)


def test_new_sizes_compile_nothing(lowering: str) -> None:
    """Tokens, blocks, table widths, top-k and strides: 1, odd, and multiples of 16 alike."""
    device = torch.device("cuda")
    compiled: list[str] = []
    triton = pytest.importorskip("triton")
    triton.knobs.runtime.jit_post_compile_hook = lambda **what: compiled.append(what["repr"])
    # Triton takes whole rows of many keys, parts of rows and whole rows of few keys, a kernel each
    every_kernel = (333, 50, 3, 640), (300, 40, 16, 64)
    counts = []
    for num_tokens, num_blocks, max_blocks, topk in (
        *every_kernel,
        (301, 41, 1, 33),
        (320, 1, 7, 1),
        (350, 32, 16, 656),
    ):
        cache = filled_cache("fp8_ds_mla", num_blocks, 64, device)
        table = torch.randint(0, num_blocks, (5, max_blocks), dtype=torch.int32, device=device)
        owners = torch.randint(0, 5, (num_tokens,), dtype=torch.int32, device=device)
        indices = some_indices(num_tokens, topk + 1, max_blocks * 64, device)[:, 1:]
        q = queries(num_tokens, 8, torch.bfloat16, device)
        slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        torch.ops.mla.concat_and_cache(q[:, 0, :512], q[:, 0, 512:], cache, slots, "fp8_ds_mla")
        torch.ops.mla.paged_sparse_attention(
            q, cache, indices, SCALE, "fp8_ds_mla", block_table=table, req_id_per_token=owners
        )
        counts.append(len(compiled))
    triton.knobs.runtime.jit_post_compile_hook = None
    assert len(set(counts[1:])) == 1, compiled


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
def test_a_captured_step_replays(cache_format: str, num_heads: int, lowering: str) -> None:
    """Metadata, cache write and attention captured once; replayed with other lengths, tables and padding."""
    device = torch.device("cuda")
    max_tokens, max_requests, max_blocks, block_size, topk = 24, 8, 12, 64, 640
    caches = [filled_cache(cache_format, 96, block_size, device) for _ in range(2)]

    def buffers() -> list[torch.Tensor]:
        sizes = [(max_requests + 1,), (max_requests,), (max_requests, max_blocks), *[(max_tokens,)] * 5]
        return [
            torch.zeros(size, dtype=torch.int64 if i == 5 else torch.int32, device=device)
            for i, size in enumerate(sizes)
        ]

    starts = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
    lens = torch.zeros(max_requests, dtype=torch.int32, device=device)
    table = torch.zeros(max_requests, max_blocks, dtype=torch.int32, device=device)
    q = queries(max_tokens, num_heads, torch.bfloat16, device)
    latent, rope = (
        torch.randn(max_tokens, 512, device=device).bfloat16(),
        torch.randn(max_tokens, 64, device=device).bfloat16(),
    )
    indices = torch.zeros(max_tokens, topk, dtype=torch.int32, device=device)

    def step(cache: torch.Tensor, metadata: list[torch.Tensor], out: torch.Tensor, lse: torch.Tensor) -> None:
        torch.ops.mla.build_step_metadata(starts, lens, table, *metadata, block_size, topk)
        torch.ops.mla.concat_and_cache(latent, rope, cache, metadata[5], cache_format)
        torch.ops.mla.paged_sparse_attention.out(
            q,
            cache,
            indices,
            SCALE,
            cache_format,
            topk_length=metadata[7],
            block_table=metadata[2],
            req_id_per_token=metadata[3],
            out=out,
            lse=lse,
        )

    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.full((max_tokens, num_heads, 512), math.nan, dtype=torch.bfloat16, device=device),
            torch.full((max_tokens, num_heads), math.nan, device=device),
        )

    captured, captured_outputs = buffers(), outputs()
    step(caches[0], captured, *captured_outputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(caches[0], captured, *captured_outputs)

    for num_requests in (8, 3, 5, 0, 8):
        query_lens = torch.zeros(max_requests, dtype=torch.int32)
        query_lens[:num_requests] = torch.randint(0, 4, (num_requests,), dtype=torch.int32)
        starts.copy_(torch.cat((torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0).int())))
        lens.copy_(torch.where(query_lens > 0, torch.randint(4, max_blocks * block_size, (max_requests,)), 0))
        table.copy_(torch.randperm(96, device=device).view(max_requests, max_blocks))
        table[num_requests:] = INT_MIN
        indices.copy_(some_indices(max_tokens, topk, max_blocks * block_size, device))
        q.normal_()
        latent.normal_()
        rope.normal_()
        fresh = filled_cache(cache_format, 96, block_size, device)
        named = torch.zeros(96, dtype=torch.bool, device=device)
        named[table[:num_requests].long().flatten()] = True
        fresh.view(96, -1).view(torch.uint8)[~named] = 0xFF
        for cache in caches:
            cache.copy_(fresh)
        graph.replay()
        eager, eager_outputs = buffers(), outputs()
        step(caches[1], eager, *eager_outputs)
        for a, b in zip((caches[0], *captured, *captured_outputs), (caches[1], *eager, *eager_outputs), strict=True):
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        assert captured_outputs[0].isfinite().all()
        attention_oracle.assert_close(
            *captured_outputs,
            attention_oracle.attention(
                q,
                caches[0],
                indices,
                SCALE,
                topk_length=captured[7],
                block_table=captured[2],
                req_id_per_token=captured[3],
                operand=torch.bfloat16,
            ),
        )


@pytest.mark.parametrize("num_heads", [1, 16, 64, 100, 128])
def test_flash_mla_holds_the_contract(num_heads: int) -> None:
    """Padded heads, any top-k, lengths, garbage, sinks, translation, scales of both signs.

    Scales of keys are powers of two, all that it decodes. It takes the largest product of a row and scales that, which
    is the smallest score if the scale is below 0.
    """
    if dispatch.unsupported_reason("flash_mla", call := paged_call(num_heads)) is not None:
        pytest.skip(str(dispatch.unsupported_reason("flash_mla", call)))
    device = torch.device("cuda")
    cache = allocate_cache("fp8_ds_mla", 50, 64, device=device)
    latent, rope = torch.randn(3200, 512, device=device).bfloat16(), torch.randn(3200, 64, device=device).bfloat16()
    torch.ops.mla.concat_and_cache(latent, rope, cache, torch.arange(3200, device=device), "fp8_ds_mla")
    for topk, scale in ((1, SCALE), (100, -16.0), (640, SCALE)):
        options = {
            "block_table": torch.randint(-5, 60, (4, 50), dtype=torch.int32, device=device),
            "req_id_per_token": torch.randint(-1, 5, (9,), dtype=torch.int32, device=device),
            "topk_length": torch.randint(0, topk + 1, (9,), dtype=torch.int32, device=device),
            "attn_sink": torch.randn(num_heads, device=device),
        }
        q, indices = queries(9, num_heads, torch.bfloat16, device), some_indices(9, topk, 3200, device)
        with dispatch.override(paged_sparse_attention="flash_mla"):
            check("flash_mla", q, cache, indices, "fp8_ds_mla", softmax_scale=scale, **options)
        keys = torch.cat((latent, rope), dim=1)
        lengths = options["topk_length"]
        with dispatch.override(sparse_attention="flash_mla"):
            out, lse = torch.ops.mla.sparse_attention(q, keys, indices, scale, topk_length=lengths)
        expected = attention_oracle.attention(
            q, keys.unsqueeze(1), indices, scale, topk_length=lengths, operand=torch.bfloat16
        )
        attention_oracle.assert_close(out, lse, expected)
        positions = torch.arange(128, dtype=torch.int32, device=device).expand(9, -1)
        paged = options["block_table"][:, :2].contiguous(), options["req_id_per_token"], lengths.clamp(max=128)
        with dispatch.override(paged_attention="flash_mla"):
            out, lse = torch.ops.mla.paged_attention(q, keys.view(50, 64, 576), *paged, scale, "bf16")
        names = dict(zip(("block_table", "req_id_per_token", "topk_length"), paged, strict=True))
        expected = attention_oracle.attention(
            q, keys.view(50, 64, 576), positions, scale, operand=torch.bfloat16, **names
        )
        attention_oracle.assert_close(out, lse, expected)


def paged_call(num_heads: int) -> dispatch.Call:
    device = torch.device("cuda", torch.cuda.current_device())
    return dispatch.Call("paged_sparse_attention", device, torch.bfloat16, "fp8_ds_mla", 576, num_heads, 9, 640)
