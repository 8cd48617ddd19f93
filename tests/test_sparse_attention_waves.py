"""Waves of the portable attention kernel: which rows are cut in how many parts, and that results are right however."""

from __future__ import annotations

import pytest
import torch
from attention_inputs import SCALE, check, check_two_caches, filled_cache, force_waves, queries, some_indices

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_attention")
SMS = 132
V4 = "fp8_ds_mla_v4"
# two launches: a short last part, whose rows come first or last, and rows that are not cut
ROUNDS = {
    "short last parts, then whole rows": ((3, (3, 2, 5)), (2, (1, 1, 1))),
    "whole rows, then many parts": ((4, (1, 1, 1)), (1, (7, 1, 7))),
    "last parts of nothing": ((5, (4, 1, 2)),),
}


@pytest.fixture(params=ROUNDS.values(), ids=ROUNDS)
def waves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    force_waves(monkeypatch, *request.param)


def test_split_table() -> None:
    from mla_ops.kernels.triton.waves import num_splits

    assert num_splits(0, 2, 2048, SMS) == 1
    assert num_splits(1, 1, 2048, SMS) == 32
    assert num_splits(1, 2, 2048, SMS) == 32
    assert num_splits(8, 2, 2048, SMS) == 8
    assert num_splits(66, 2, 2048, SMS) == 1
    assert num_splits(4096, 2, 2048, SMS) == 1
    assert num_splits(1, 1, 0, SMS) == 1
    assert num_splits(1, 1, 1, SMS) == 1
    assert num_splits(1, 1, 10**6, 10**6) == 64


def test_wave_table() -> None:
    """What follows from the measured costs: H200, tokens, programs of a token, tiles of 64 keys."""
    from mla_ops.kernels.triton.waves import num_splits, waves_of_rows

    def chosen(num_tokens: int, head_blocks: int, tiles: int) -> list[tuple[int, ...]]:
        parts = num_splits(num_tokens, head_blocks, 64 * tiles, SMS)
        return [(count, *shares) for count, shares in waves_of_rows(num_tokens, head_blocks, tiles, 64, SMS, parts)]

    assert chosen(64, 1, 32) == [(64, 2, 1, 2)], "two parts fill the GPU"
    assert chosen(128, 1, 32) == [(128, 1, 1, 1)]
    assert chosen(48, 2, 32) == [(48, 2, 26, 32)], "36 SMs take the last parts"
    assert chosen(140, 1, 32) == [(132, 1, 1, 1), (8, 16, 1, 16)], "8 rows would take as long as 132"
    assert chosen(200, 2, 32) == [(198, 1, 1, 1), (2, 32, 1, 32)]
    assert chosen(67, 1, 8) == [(67, 1, 1, 1)], "short rows are not worth a merge"
    assert chosen(4096, 1, 32) == [(4092, 1, 1, 1), (4, 32, 1, 32)], "4 rows would have a turn of their own"
    assert chosen(4096, 2, 32) == [(4096, 1, 1, 1)], "8 programs behind 62 turns"
    assert chosen(2048, 1, 32) == [(2048, 1, 1, 1)], "half of a turn behind 15"
    assert chosen(110, 1, 32) == [(110, 1, 1, 1)]
    assert chosen(1, 1, 0) == [(1, 1, 1, 1)]


def test_waves_have_all_rows_and_all_keys() -> None:
    from mla_ops.kernels.triton.waves import num_splits, waves_of_rows

    for tiles in (1, 2, 7, 8, 32):
        for head_blocks in (1, 2):
            for num_tokens in (*range(1, 150), 200, 263, 264, 265, 400, 800):
                parts = num_splits(num_tokens, head_blocks, 64 * tiles, SMS)
                waves = waves_of_rows(num_tokens, head_blocks, tiles, 64, SMS, parts)
                assert sum(count for count, _ in waves) == num_tokens
                for count, shares in waves:
                    assert count > 0
                    assert 1 <= shares.parts <= 64
                    for length in range(tiles + 1):
                        # `share_of_keys`
                        share = -(-length * shares.first // shares.of)
                        assert share * shares.parts >= length


def test_sms_with_several_programs_and_rows_that_must_not_notice_their_batch_have_one_round() -> None:
    from mla_ops.kernels.triton.attention_options import make_tile
    from mla_ops.kernels.triton.sparse_attention import has_its_sm
    from mla_ops.kernels.triton.waves import waves_of

    small, beside, large = make_tile(16, 32, 4, 2), make_tile(32, 32, 4, 1), make_tile(64, 64, 8, 1)
    assert has_its_sm((9, 0), large)
    assert has_its_sm((12, 0), small)
    assert not has_its_sm((9, 0), small)
    assert not has_its_sm((10, 0), beside)
    assert len(waves_of(140, 1, 2048, large, SMS, False, True)) == 2
    for alone, deterministic in ((False, False), (True, True)):
        for num_tokens in (1, 8, 67, 140, 200):
            (only,) = waves_of(num_tokens, 1, 2048, large, SMS, deterministic, alone)
            assert only.num_tokens == num_tokens


def test_round_table_of_programs_in_pairs() -> None:
    """16 heads on an SM90 GPU of 132 SMs, each with room for two programs."""
    from mla_ops.kernels.triton.attention_options import make_tile
    from mla_ops.kernels.triton.waves import waves_of

    def chosen(num_tokens: int, topk: int) -> list[tuple[int, int]]:
        waves = waves_of(num_tokens, 1, topk, make_tile(16, 32, 4, 2), 2 * SMS, False, False)
        return [(count, shares.parts) for count, shares in waves]

    assert chosen(8, 2048) == [(8, 32)]
    assert chosen(8, 128) == [(8, 2)], "few rows are cut as they were timed"
    assert chosen(96, 2048) == [(88, 3), (8, 33)], "four parts of 96 would be one turn and a half"
    assert chosen(128, 2048) == [(128, 2)]
    assert chosen(144, 2048) == [(132, 2), (12, 22)], "12 SMs would have two whole rows"
    assert chosen(264, 2048) == [(264, 1)]
    assert chosen(300, 2048) == [(264, 1), (36, 7)]
    assert chosen(128, 128) == [(128, 1)], "short rows are not worth a merge"


@pytest.mark.parametrize("given", ["slots", "a block table", "lengths"])
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
def test_waves_equal_float64(device: torch.device, waves: None, cache_format: str, given: str) -> None:
    """Every tensor that has a row a token is cut with them."""
    cache = filled_cache(cache_format, 12, 16, device)
    indices = some_indices(5, 210, 60 if given == "a block table" else 192, device)
    q = queries(5, 3, torch.bfloat16, device)
    options = {"attn_sink": torch.tensor([0.5, -1.0, 2.0], device=device)}
    if given == "a block table":
        options["block_table"] = torch.randint(-1, 12, (3, 4), dtype=torch.int32, device=device)
        options["req_id_per_token"] = torch.tensor([0, 2, 1, 2, 0], dtype=torch.int32, device=device)
    elif given == "lengths":
        options["topk_length"] = torch.tensor([210, 1, 0, 96, 210], dtype=torch.int32, device=device)
    out, lse = check("triton", q, cache, indices, cache_format, **options)
    halves = q[..., :512].contiguous(), q[..., 512:].contiguous()
    parts = torch.ops.mla.paged_sparse_attention(
        halves[0], cache, indices, SCALE, cache_format, q_rope=halves[1], **options
    )
    assert torch.equal(parts[0], out)
    assert torch.equal(parts[1], lse)


def test_waves_over_flat_keys_equal_those_over_pages(device: torch.device, waves: None) -> None:
    cache, indices = filled_cache("bf16", 12, 16, device), some_indices(5, 210, 192, device)
    q = queries(5, 3, torch.bfloat16, device)
    paged = torch.ops.mla.paged_sparse_attention(q, cache, indices, 0.1, "bf16")
    flat = torch.ops.mla.sparse_attention(q, cache.view(192, 576), indices, 0.1)
    assert torch.equal(paged[0], flat[0])
    assert torch.equal(paged[1], flat[1])


def test_waves_over_two_caches_equal_float64(device: torch.device, waves: None) -> None:
    cache, extra = filled_cache(V4, 3, 64, device), filled_cache(V4, 60, 2, device)
    indices, extra_indices = some_indices(5, 70, 192, device), some_indices(5, 130, 120, device)
    options = {
        "topk_length": torch.tensor([70, 0, 33, 1, 64], dtype=torch.int32, device=device),
        "extra_topk_length": torch.tensor([0, 130, 65, 0, 130], dtype=torch.int32, device=device),
        "attn_sink": torch.tensor([0.5, -1.0, 2.0], device=device),
    }
    q = queries(5, 3, torch.bfloat16, device, 512)
    check_two_caches("triton", q, cache, indices, V4, extra, extra_indices, V4, **options)
