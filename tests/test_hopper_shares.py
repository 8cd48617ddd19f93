"""Parts of a row's shares are added up to the same bits by one CTA, by several, and by a cluster of as many as shares.

The kernels' own code (`shares.cuh`, `merge.cuh`), compiled for this CPU, its threads in random order.
"""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from hopper_on_cpu import NO_COMPILER, Recorder, build

from mla_ops import formats
from mla_ops.kernels.hopper import launch, sources
from mla_ops.kernels.hopper.launch import KERNELS, Clusters, exchange_of_shares, in_registers
from mla_ops.kernels.hopper.params import NO_CACHE, Rows, cache_params
from mla_ops.kernels.hopper.sparse_attention import shapes_of_shares

pytestmark = pytest.mark.skipif(NO_COMPILER, reason="there is no C++ compiler")

FP8 = KERNELS["fp8_ds_mla", 576]
NUM_TOKENS = 3
AT_ONCE = 2  # clusters: one takes several rows


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build("hopper_shares.cpp", tmp_path_factory.mktemp("hopper_shares"), "-ffp-contract=off")


@pytest.mark.parametrize(
    ("tile", "shares"),
    [*((tile, shares) for tile in FP8.tiles for shares in (3, 4, 8)), (16, 7), (16, 16), (32, 6), (32, 16)],
)
def test_bits_do_not_depend_on_the_number_of_ctas(
    tile: int, shares: int, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Recorder()
    monkeypatch.setattr(sources, "load", lambda *_: seen)
    monkeypatch.setattr(launch, "clusters_at_once", lambda *_: (AT_ONCE,) * len(launch.SPLITS))
    num_heads = tile + tile // 2 + 1  # a tile that is not full
    cache = formats.allocate_cache("fp8_ds_mla", 1, 64)
    rows = Rows(cache, *formats.geometry(cache, "fp8_ds_mla")[:3])
    indices, sink = torch.zeros(NUM_TOKENS, 2048, dtype=torch.int32), torch.randn(num_heads)

    def results(shape: Clusters, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full((NUM_TOKENS, num_heads, 512), math.nan, dtype=torch.bfloat16)
        lse = torch.full((NUM_TOKENS, num_heads), math.nan)
        exchange = None
        if shape.shares and not in_registers(shape):
            exchange = exchange_of_shares(FP8, shape, 2 * NUM_TOKENS, torch.device("cpu"))
            exchange.fill_(0xA5)
        launch.launch(
            FP8,
            shape,
            NUM_TOKENS,
            torch.zeros(NUM_TOKENS, num_heads, 576, dtype=torch.bfloat16),
            (cache_params(rows, indices, None, None), NO_CACHE),
            1.0,
            attn_sink=sink,
            req_id_per_token=None,
            out=out,
            lse=lse,
            programmatic=False,
            all_tokens=NUM_TOKENS,
            exchange=exchange,
        )
        grid, _, cluster, params = seen.pop()
        clusters = min(AT_ONCE, grid[0] // cluster[0])
        library.attend(params, tile, clusters, seed)
        return out, lse

    wanted = results(Clusters(tile, shares))  # whatever makes the scores
    assert wanted[0].isfinite().all()
    assert len(wanted[0].unique()) > 1000
    assert not wanted[1].isnan().any()
    for shape in shapes_of_shares(FP8, tile, shares, []):
        if shape.tile != tile:  # values are made up by their place in a tile
            continue
        for seed in range(2 if shape.shares else 0):
            found = results(shape, seed)
            assert all(map(torch.equal, found, wanted)), f"{shape.splits} CTAs"
