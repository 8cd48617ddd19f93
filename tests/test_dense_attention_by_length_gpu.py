"""Rows of few dense requests that go to CTAs by their lengths (`by_length.py`), on a GPU."""

from __future__ import annotations

import pytest
import torch
from attention_inputs import SCALE, filled_cache, key_width, queries
from paged_inputs import check, check_replays, int32

import mla_ops
from mla_ops import dispatch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "shape",
    [
        (16, 1),
        (16, 5),
        (24, 3),
        (32, 1),
        (32, 4),
        (64, 1),
        (64, 2),
        (64, 9),
        (16, 4, 8),
        (24, 2, 3),
        (64, 2, 5),
        (64, 9, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_ds_mla_v4", "bf16"])
def test_rows_of_hopper_launches_by_their_lengths(cache_format: str, shape: tuple[int, ...]) -> None:
    """Holes in the table, requests that there are not, rows of one CTA and of many; a replay follows the lengths."""
    from mla_ops.kernels.hopper.launch import KERNELS, Clusters
    from mla_ops.kernels.hopper.waves import Wave, override

    width = key_width(cache_format)
    if shape[0] not in KERNELS[cache_format, width].tiles:
        pytest.skip("no such tile")
    device = torch.device("cuda")
    cache, q = filled_cache(cache_format, 400, 24, device), queries(7, 70, torch.bfloat16, device, width)
    table = torch.randint(0, 400, (2, 300), dtype=torch.int32, device=device)
    table[0, 3], table[1, 0] = -1, 999
    requests, lens = int32([0, 0, 1, 1, 0, -1, 1], device), int32([7200, 431, 7201, 17, 1, 9, 0], device)
    arguments = (q, cache, table, requests, lens, SCALE, cache_format)
    reason = dispatch.unsupported_reason("hopper", mla_ops.registry.describe("paged_attention", *arguments))
    if reason is not None:
        pytest.skip(reason)
    with dispatch.override(paged_attention="hopper"), override(Wave(7, Clusters(*shape)), by_length=True):
        check("hopper", q, cache, table, requests, lens, cache_format)
        check_replays("hopper", arguments, [[7200] * 7, [0] * 7, [1, 64, 65, 7200, 0, 100, 3000]])


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(4, 16), (4, 128), (7, 128), (12, 16)])
def test_a_replay_chooses_between_lengths_and_shape(num_tokens: int, num_heads: int, cache_format: str) -> None:
    """One capture: rows of about one length go by the launch's shape, others by their lengths."""
    from mla_ops.kernels.hopper import dense_attention, launch

    device = torch.device("cuda")
    cache, q = filled_cache(cache_format, 1600, 64, device), queries(num_tokens, num_heads, torch.bfloat16, device)
    table = torch.randint(0, 1600, (num_tokens, 200), dtype=torch.int32, device=device)
    requests, lens = int32(range(num_tokens), device), int32([12800] * num_tokens, device)
    arguments = (q, cache, table, requests, lens, SCALE, cache_format)
    reason = dispatch.unsupported_reason("hopper", mla_ops.registry.describe("paged_attention", *arguments))
    if reason is not None:
        pytest.skip(reason)
    keys = launch.KERNELS[cache_format, 576]
    found = dense_attention._by_length(keys, num_tokens, num_heads, 200 * 64, torch.cuda.current_device())
    assert found is not None
    lengths = [
        [12800] * num_tokens,
        [12800] + [100] * (num_tokens - 1),
        [0] * (num_tokens - 1) + [12800],
        [65 * i for i in range(num_tokens)],
        ([9000, 1, 0, 12000] * 4)[:num_tokens],
        [0] * num_tokens,
    ]
    with dispatch.override(paged_attention="hopper"):
        check_replays("hopper", arguments, lengths, [0, 2, 3, num_tokens - 1])
