"""Rows of unequal lengths that the Hopper kernels share evenly among CTAs, and scores too large for all but argmax."""

from __future__ import annotations

import math

import attention_oracle
import pytest
import torch
from attention_inputs import SCALE, filled_cache, hopper_expected, queries, some_indices

import mla_ops
from mla_ops import dispatch
from mla_ops.kernels.hopper import sparse_attention, waves
from mla_ops.kernels.hopper.launch import KERNELS, Clusters, Group, Shape

pytestmark = pytest.mark.gpu

SHAPES = [Clusters(tile, 1) for tile in (16, 24, 32, 64)]
SHAPES += [Clusters(16, 7), Clusters(24, 2), Clusters(32, 3), Clusters(64, 2), Clusters(64, 6), Group(2), Group(8)]
LENGTHS = [2048, 2047, 64, 0, 1, 2048, 65, 700, 1000, -3, 3000]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs SM90")


def lengths(values: list[int], count: int) -> torch.Tensor:
    return torch.tensor((values * count)[:count], dtype=torch.int32, device="cuda")


def shapes_of(cache_format: str, width: int) -> list[Shape]:
    keys = KERNELS[cache_format, width]
    return [shape for shape in SHAPES if shape.tile in keys.tiles and (keys.quantized or isinstance(shape, Clusters))]


@pytest.mark.parametrize(
    ("cache_format", "width", "shape"), [(*key, shape) for key in KERNELS for shape in shapes_of(*key)]
)
@pytest.mark.parametrize("num_tokens", [11, 150])
def test_any_launch_shares_its_rows(cache_format: str, width: int, shape: Shape, num_tokens: int) -> None:
    """Rows that up to nine CTAs share, and few that none do; part-filled tiles, dead indices, a sink, strides.

    Counters are 0 behind each call, or the next one's results would be wrong.
    """
    if isinstance(shape, Group):
        num_tokens = min(num_tokens, 60)  # there are counters for 128 rows of groups
    device, num_heads = torch.device("cuda"), shape.tile + 5
    cache = filled_cache(cache_format, 64, 64, device, head_dim=width)
    q = queries(num_tokens, num_heads + 2, torch.bfloat16, device, width)[:, 1:-1]
    indices = some_indices(num_tokens, 2048, 16 * 64, device)
    options = {
        "topk_length": lengths(LENGTHS, num_tokens),
        "attn_sink": torch.randn(num_heads, device=device),
        "block_table": torch.randint(-1, 65, (9, 16), dtype=torch.int32, device=device),
        "req_id_per_token": torch.randint(-1, 9, (num_tokens,), dtype=torch.int32, device=device),
    }
    out = torch.empty(num_tokens, num_heads + 2, 520, dtype=torch.bfloat16, device=device)[:, 1:-1, :512]
    lse = torch.empty(num_heads, num_tokens + 1, device=device)[:, 1:].T
    found = []
    for _ in range(3):
        out.fill_(math.nan)
        lse.fill_(math.nan)
        with waves.override(waves.Wave(num_tokens, shape), evenly=True):
            sparse_attention.paged_sparse_attention(q, cache, indices, SCALE, cache_format, **options, out=out, lse=lse)
        found.append((out.clone(), lse.clone()))
    for again in found[1:]:
        assert all(map(torch.equal, again, found[0]))
    tokens = list(range(min(11, num_tokens)))
    expected = hopper_expected(q, cache, indices, SCALE, cache_format, tokens=tokens, **options)
    attention_oracle.assert_close(*found[0], expected)
    assert out.isfinite().all()
    assert not lse.isnan().any()


@pytest.mark.parametrize("shape", [Clusters(16, 1), Clusters(64, 1), Group(4)])
@pytest.mark.parametrize(("cache_format", "width"), KERNELS)
def test_two_caches_are_shared_as_one(cache_format: str, width: int, shape: Shape) -> None:
    if isinstance(shape, Group) and cache_format == "bf16":
        pytest.skip("bfloat16 keys have no kernel for groups")
    device, num_tokens, num_heads = torch.device("cuda"), 40, 64
    caches = [filled_cache(cache_format, 64, size, device, head_dim=width) for size in (64, 24)]
    q = queries(num_tokens, num_heads, torch.bfloat16, device, width)
    indices, extra = some_indices(num_tokens, 700, 64 * 64, device), some_indices(num_tokens, 900, 64 * 24, device)
    options = {"topk_length": lengths([700, 3, 0, 64], num_tokens)}
    extra_lengths = lengths([900, 0, 65], num_tokens)
    out = torch.full((num_tokens, num_heads, 512), math.nan, dtype=torch.bfloat16, device=device)
    lse = torch.full((num_tokens, num_heads), math.nan, device=device)
    with waves.override(waves.Wave(num_tokens, shape), evenly=True):
        sparse_attention.paged_sparse_attention_extra(
            q, caches[0], indices, SCALE, cache_format, caches[1], extra, cache_format,
            **options, extra_topk_length=extra_lengths, out=out, lse=lse,
        )  # fmt: skip
    expected = hopper_expected(
        q,
        caches[0],
        indices,
        SCALE,
        cache_format,
        tokens=list(range(13)),
        extra=attention_oracle.Source(caches[1], cache_format, extra, extra_lengths, None),
        **options,
    )
    attention_oracle.assert_close(out, lse, expected)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("num_tokens", "num_heads"), [(32, 128), (128, 128), (140, 64), (128, 16), (512, 16), (300, 24)]
)
@pytest.mark.parametrize(("cache_format", "width"), KERNELS)
def test_a_replay_follows_the_lengths(cache_format: str, width: int, num_tokens: int, num_heads: int) -> None:
    """A capture, as dispatched, has the bits of eager: rows of one length, one long among short ones, rows of none."""
    device, topk = torch.device("cuda"), 2048
    cache = filled_cache(cache_format, 200, 64, device, head_dim=width)
    q = queries(num_tokens, num_heads, torch.bfloat16, device, width)
    indices = some_indices(num_tokens, topk, 200 * 64, device)
    lens = lengths([topk], num_tokens)
    out = torch.empty(num_tokens, num_heads, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(num_tokens, num_heads, device=device)

    def step() -> None:
        out.fill_(math.nan)
        lse.fill_(math.nan)
        sparse_attention.paged_sparse_attention(
            q, cache, indices, SCALE, cache_format, topk_length=lens, out=out, lse=lse
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    tokens = [0, 1, num_tokens // 2, num_tokens - 1]
    others = num_tokens - 1
    for values in (
        [topk], [topk] + [64] * others, [topk, 64, 64, 64], [0] * others + [topk], [0], [300, 1, 2000]
    ):  # fmt: skip
        lens.copy_(lengths(values, num_tokens))
        step()
        eager = out.clone(), lse.clone()
        graph.replay()
        assert all(map(torch.equal, (out, lse), eager))
        expected = hopper_expected(q, cache, indices, SCALE, cache_format, tokens=tokens, topk_length=lens)
        attention_oracle.assert_close(out, lse, expected)
        assert out.isfinite().all()


@pytest.mark.parametrize("scale", [2.0**31, -(2.0**31), 2.0**40, -(2.0**40), 2.0**62])
@pytest.mark.parametrize("evenly", [False, True])
@pytest.mark.parametrize("shape", [Clusters(16, 1), Clusters(64, 1), Clusters(16, 3), Clusters(64, 3), Clusters(64, 2)])
@pytest.mark.parametrize(("cache_format", "width"), KERNELS)
def test_large_scores_act_as_argmax(cache_format: str, width: int, shape: Shape, evenly: bool, scale: float) -> None:
    """Rounding of a score of 2^40 is more than exp2 takes; the same keys come twice, so that ties are met."""
    device, num_tokens, num_heads = torch.device("cuda"), 9, shape.tile + 5
    cache = filled_cache(cache_format, 16, 64, device, head_dim=width)
    q = queries(num_tokens, num_heads, torch.bfloat16, device, width)
    indices = some_indices(num_tokens, 1100, 16 * 64, device)
    lens = lengths([1100, 1, 64, 700, 65], num_tokens)
    out = torch.full((num_tokens, num_heads, 512), math.nan, dtype=torch.bfloat16, device=device)
    lse = torch.full((num_tokens, num_heads), math.nan, device=device)
    with waves.override(waves.Wave(num_tokens, shape), evenly=evenly):
        sparse_attention.paged_sparse_attention(
            q, cache, indices, scale, cache_format, topk_length=lens, out=out, lse=lse
        )
    expected = hopper_expected(q, cache, indices, scale, cache_format, topk_length=lens)
    attention_oracle.assert_close(out, lse, expected)
    assert out.isfinite().all()
    assert not lse.isnan().any()


@pytest.mark.parametrize("scale", [2.0**31, -(2.0**40), 2.0**62])
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
def test_large_scores_of_dense_decode_act_as_argmax(cache_format: str, num_heads: int, scale: float) -> None:
    device, num_tokens = torch.device("cuda"), 6
    cache = filled_cache(cache_format, 200, 64, device)
    q = queries(num_tokens, num_heads, torch.bfloat16, device)
    table = torch.randint(0, 200, (num_tokens, 60), dtype=torch.int32, device=device)
    requests = torch.arange(num_tokens, dtype=torch.int32, device=device)
    lens = lengths([3800, 100, 1, 700], num_tokens)
    with dispatch.override(paged_attention="hopper"):
        out, lse = mla_ops.paged_attention(q, cache, table, requests, lens, scale, cache_format)
    everything = torch.arange(3840, dtype=torch.int32, device=device).expand(num_tokens, -1)
    expected = hopper_expected(
        q, cache, everything, scale, cache_format, topk_length=lens, block_table=table, req_id_per_token=requests
    )
    attention_oracle.assert_close(out, lse, expected)
    assert out.isfinite().all()
    assert not lse.isnan().any()
