"""Rows of few dense requests that share clusters (`packed.py`), on a GPU."""

from __future__ import annotations

import random

import pytest
import torch
from attention_inputs import SCALE, filled_cache, key_width, queries
from paged_inputs import check, check_replays, int32

import mla_ops
from mla_ops import dispatch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("num_tokens", "num_heads"), [(3, 16), (13, 8), (21, 16), (32, 20)])
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_ds_mla_v4", "bf16"])
def test_rows_that_share_clusters(cache_format: str, num_tokens: int, num_heads: int) -> None:
    """Holes in the table, requests that there are not, rows of one CTA and of many; a replay follows the lengths."""
    from mla_ops.kernels.hopper.waves import override

    width, device, drawn = key_width(cache_format), torch.device("cuda"), random.Random(num_tokens)
    cache, q = (
        filled_cache(cache_format, 400, 24, device),
        queries(num_tokens, num_heads, torch.bfloat16, device, width),
    )
    table = torch.randint(0, 400, (3, 200), dtype=torch.int32, device=device)
    table[0, 3], table[1, 0] = -1, 999
    requests = int32([drawn.choice([0, 1, 2, 2, 0, -1]) for _ in range(num_tokens)], device)

    def mixture() -> list[int]:
        return [drawn.choice([0, 1, 63, 64, 65, 300, 700, 1500, 4800, 9999]) for _ in range(num_tokens)]

    lens = int32(mixture(), device)
    arguments = (q, cache, table, requests, lens, SCALE, cache_format)
    reason = dispatch.unsupported_reason("hopper", mla_ops.registry.describe("paged_attention", *arguments))
    if reason is not None:
        pytest.skip(reason)
    with dispatch.override(paged_attention="hopper"), override(packed=True):
        check("hopper", q, cache, table, requests, lens, cache_format)
        lengths = [[4800] * num_tokens, [0] * num_tokens, [4800] + [1] * (num_tokens - 1), mixture()]
        check_replays("hopper", arguments, lengths, [0, 1, num_tokens // 2, num_tokens - 1])


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
@pytest.mark.parametrize("num_tokens", [13, 21])
def test_a_replay_chooses(num_tokens: int, cache_format: str) -> None:
    """One capture: rows of about one length go by the launch's shape, others share clusters by their lengths."""
    from mla_ops.kernels.hopper import dense_attention, launch

    device = torch.device("cuda")
    cache, q = filled_cache(cache_format, 1600, 64, device), queries(num_tokens, 16, torch.bfloat16, device)
    table = torch.randint(0, 1600, (num_tokens, 80), dtype=torch.int32, device=device)
    requests, lens = int32(range(num_tokens), device), int32([5120] * num_tokens, device)
    arguments = (q, cache, table, requests, lens, SCALE, cache_format)
    reason = dispatch.unsupported_reason("hopper", mla_ops.registry.describe("paged_attention", *arguments))
    if reason is not None:
        pytest.skip(reason)
    keys = launch.KERNELS[cache_format, 576]
    if dense_attention._packing(keys, num_tokens, 16, 80 * 64, torch.cuda.current_device()) is None:
        pytest.skip("this GPU has fewer clusters")
    lengths = [
        [5120] * num_tokens,
        [5120] + [100] * (num_tokens - 1),
        [0] * (num_tokens - 1) + [5120],
        [65 * i for i in range(num_tokens)],
        ([4000, 1, 0, 5000] * 8)[:num_tokens],
        [0] * num_tokens,
    ]
    with dispatch.override(paged_attention="hopper"):
        check_replays("hopper", arguments, lengths, [0, 2, 3, num_tokens - 1])
