"""Which tile and cluster a call of the Hopper kernels gets: pure functions of shapes."""

from __future__ import annotations

import math
import re
import threading
import weakref
from typing import Any

import pytest
import torch

from mla_ops.dispatch import Call
from mla_ops.kernels.hopper import dense_attention, merge_parts, prefill_attention, sources, sparse_attention
from mla_ops.kernels.hopper.by_length import by_length_for
from mla_ops.kernels.hopper.costs import TABLE, predicted_us, read_costs
from mla_ops.kernels.hopper.launch import (
    KERNELS,
    SPLITS,
    ByLength,
    Clusters,
    Group,
    KeyFormat,
    Packing,
    Shape,
    groups_for,
    splits_for,
    tiles_for,
)
from mla_ops.kernels.hopper.packed import MARGIN, UNEVEN, packing_for
from mla_ops.kernels.hopper.params import NO_CACHE, Rows, cache_params
from mla_ops.kernels.hopper.sparse_attention import choose, choose_deterministic, deterministic_shapes
from mla_ops.kernels.hopper.waves import Wave, forced, launch_waves, override

FP8 = KERNELS["fp8_ds_mla", 576]
# clusters that an H200 runs at one time, by the sizes in SPLITS
AT_ONCE = (132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7)

H100, H200 = (read_costs(TABLE.read_text(), gpu) for gpu in ("NVIDIA H100", "NVIDIA H200"))


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "expected"),
    [
        (1, 16, Clusters(16, 16)),
        (1, 128, Clusters(24, 16)),
        (2, 128, Clusters(24, 8)),
        (8, 16, Clusters(16, 8)),
        (6, 128, Clusters(64, 8)),
        (8, 128, Group(8)),
        (10, 128, Group(6)),
        (12, 128, Clusters(64, 4)),
        (16, 128, Group(4)),
        (17, 128, Clusters(64, 3)),
        (22, 128, Group(3)),
        (44, 64, Group(3)),
        (32, 16, Clusters(16, 3)),
        (32, 128, Clusters(64, 2)),
        (128, 16, Clusters(16, 1)),
        (128, 32, Clusters(32, 1)),
        (256, 128, Clusters(64, 1)),
    ],
)
def test_the_measured_best(num_tokens: int, num_heads: int, expected: Shape) -> None:
    assert choose(FP8, num_tokens, num_heads, 2048, AT_ONCE, H200) == (Wave(num_tokens, expected),)


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "whole", "rest"),
    [
        (40, 128, Wave(33, Clusters(64, 2)), Wave(7, Clusters(64, 8))),
        (41, 128, Wave(33, Clusters(64, 2)), Wave(8, Group(8))),
        (72, 128, Wave(66, Clusters(64, 1)), Wave(6, Clusters(64, 8))),
        (140, 64, Wave(132, Clusters(64, 1)), Wave(8, Clusters(64, 8))),
        (144, 16, Wave(132, Clusters(16, 1)), Wave(12, Clusters(16, 8))),
        (4096, 64, Wave(4092, Clusters(64, 1)), Wave(4, Clusters(24, 8))),
    ],
)
def test_few_tokens_more_than_fill_the_device_are_a_wave_of_their_own(
    num_tokens: int, num_heads: int, whole: Wave, rest: Wave
) -> None:
    """Measured times: 61 us for 74, 96 for 122, 98 for 124, 76 for 92."""
    assert choose(FP8, num_tokens, num_heads, 2048, AT_ONCE, H200) == (whole, rest)


@pytest.mark.parametrize("keys", KERNELS.values(), ids=lambda keys: keys.name)
@pytest.mark.parametrize("num_heads", [1, 17, 64, 128, 130])
@pytest.mark.parametrize("topk", [0, 640, 2048])
def test_waves_have_each_token_once_and_save_time(keys: KeyFormat, num_heads: int, topk: int) -> None:
    turns = max(1, -(-topk // 64))
    for num_tokens in (1, 31, 67, 133, 140, 265, 1000, 4096):
        waves = choose(keys, num_tokens, num_heads, topk, AT_ONCE, H200)
        assert sum(wave.num_tokens for wave in waves) == num_tokens
        assert all(wave.num_tokens > 0 for wave in waves)
        times = [predicted_us(keys, wave.shape, wave.num_tokens, num_heads, turns, AT_ONCE, H200) for wave in waves]
        for wave in waves:
            whole = predicted_us(keys, wave.shape, num_tokens, num_heads, turns, AT_ONCE, H200)
            assert len(waves) == 1 or sum(times) < whole


def test_sizes_of_which_a_device_runs_none_are_not_chosen() -> None:
    at_once = tuple(count if size <= 8 else 0 for size, count in zip(SPLITS, AT_ONCE, strict=True))
    ((_, shape),) = choose(FP8, 1, 16, 2048, at_once, H200)
    assert shape == Clusters(16, 8)
    waves = dense_attention.choose(FP8, 1, 16, 2**17, at_once, H200)
    assert all(isinstance(wave.shape, Clusters) and wave.shape.splits <= 8 for wave in waves)


EVERY_CTA = ByLength(66, 1.0, -math.inf, 1)  # for two tiles of heads


@pytest.mark.parametrize(
    ("cache_format", "num_tokens", "num_heads", "turns", "shape", "expected"),
    [
        ("fp8_ds_mla", 4, 128, 512, Clusters(64, 2, 8), (Clusters(64, 2), EVERY_CTA)),  # parts are merged anyway
        ("fp8_ds_mla", 4, 16, 512, Clusters(16, 8, 3), (Clusters(16, 4), ByLength(30, 0.0, -math.inf, 4))),
        # The longer of two rows would have 29 parts of four CTAs.
        ("fp8_ds_mla", 2, 16, 400, Clusters(16, 8, 6), (Clusters(16, 8), ByLength(15, 0.0, -math.inf, 8))),
        ("fp8_ds_mla", 2, 16, 454, Clusters(16, 8, 6), (Clusters(16, 8), ByLength(15, 0.0, -math.inf, 8))),
        ("fp8_ds_mla", 12, 16, 512, Clusters(16, 2, 8), (Clusters(16, 2), ByLength(132, 1.0, -math.inf, 1))),
        ("fp8_ds_mla", 1, 128, 2048, Clusters(64, 16, 3), (Clusters(64, 2), ByLength(33, 0.0, -math.inf, 2))),
        ("bf16", 2, 128, 400, Clusters(64, 8, 3), (Clusters(64, 2), EVERY_CTA)),
        ("bf16", 4, 16, 512, Clusters(16, 8, 3), (Clusters(16, 8), ByLength(12, 0.0, -math.inf, 8))),  # nothing gained
        ("bf16", 3, 16, 2048, Clusters(16, 8, 4), (Clusters(16, 2), ByLength(66, 0.0, -math.inf, 2))),  # full rows gain
        ("bf16", 21, 16, 2048, Clusters(16, 2, 3), (Clusters(16, 2), ByLength(66, 0.0, -math.inf, 2))),
        ("fp8_ds_mla", 13, 128, 77, Clusters(64, 4), (Clusters(64, 2), EVERY_CTA)),  # as fast for rows of one length
        ("fp8_ds_mla", 14, 128, 213, Clusters(64, 4), (Clusters(64, 4), ByLength(60, 14 / 60, 2.5, 1))),  # not as fast
        ("bf16", 13, 128, 77, Clusters(64, 4), (Clusters(64, 4), ByLength(60, 13 / 60, 1.6, 1))),
        ("fp8_ds_mla", 32, 128, 64, Clusters(64, 2), (Clusters(64, 2), ByLength(64, 1 / 2, 2.5, 1))),
        ("fp8_ds_mla", 24, 16, 45, Clusters(16, 4), None),  # less than the merge is worth
        ("fp8_ds_mla", 13, 16, 20, Clusters(16, 4), None),
        ("fp8_ds_mla", 3, 16, 60, Clusters(16, 16, 2), None),  # less than the question is worth
        ("fp8_ds_mla", 32, 16, 2048, Clusters(16, 2), None),  # idle CTAs would take more than even shares do
        ("bf16", 8, 128, 2048, Clusters(64, 2, 4), None),
        ("fp8_ds_mla", 1, 16, 2048, Clusters(16, 16, 6), None),
        ("fp8_ds_mla", 33, 16, 200, Clusters(16, 2), None),
        ("fp8_ds_mla", 8, 128, 100, Group(8), None),
    ],
)
def test_when_rows_may_go_by_their_lengths(
    cache_format: str,
    num_tokens: int,
    num_heads: int,
    turns: int,
    shape: Shape,
    expected: tuple[Clusters, ByLength] | None,
) -> None:
    found = by_length_for(KERNELS[cache_format, 576], [(num_tokens, shape)], num_heads, turns, AT_ONCE, H200)
    if found is None or expected is None:
        assert found is expected
        return
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=0.15)


def test_rows_of_two_waves_go_by_their_lengths_where_full_ones_are_no_slower() -> None:
    keys = KERNELS["bf16", 576]
    launches = [(11, Clusters(64, 2, 3)), (1, Clusters(64, 14, 3))]
    assert by_length_for(keys, launches, 128, 294, AT_ONCE, H200) == (Clusters(64, 2), EVERY_CTA)
    launches = [(16, Clusters(64, 2, 2)), (8, Clusters(64, 2, 4))]
    assert by_length_for(keys, launches, 128, 205, AT_ONCE, H200) is None


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "turns", "splits"),
    [
        (13, 16, 77, 8),
        (21, 8, 65, 5),
        (28, 16, 128, 4),
        (14, 16, 104, 8),
        (16, 16, 77, None),  # three rows a cluster have five CTAs each, by their shape six
        (7, 16, 77, None),  # each has 16 anyway
        (21, 16, 129, None),
        (13, 16, 16, None),
        (13, 17, 77, None),
        (33, 16, 77, None),
    ],
)
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
def test_when_rows_may_share_clusters(
    cache_format: str, num_tokens: int, num_heads: int, turns: int, splits: int | None
) -> None:
    keys = KERNELS[cache_format, 576]
    waves = dense_attention.choose(keys, num_tokens, num_heads, turns * 64, AT_ONCE, H200)
    found = packing_for(keys, waves, num_heads, turns, AT_ONCE)
    numbers = num_tokens / UNEVEN, MARGIN * num_tokens * (splits or 0)
    assert found == (splits and (Clusters(16, splits), Packing(7, *numbers)))


def test_long_rows_of_quantised_keys_go_by_their_lengths() -> None:
    launches = [(14, Clusters(16, 8))]
    assert packing_for(FP8, launches, 16, 105, AT_ONCE) is None
    assert packing_for(KERNELS["bf16", 576], launches, 16, 105, AT_ONCE) is not None


def test_no_cluster_of_16_runs() -> None:
    launches, at_once = [(13, Clusters(16, 8))], (*AT_ONCE[:-1], 0)
    assert packing_for(FP8, launches, 16, 77, at_once) is None


def test_a_wave_begins_behind_the_tokens_of_another() -> None:
    lengths, indices = torch.zeros(9, dtype=torch.int32), torch.zeros(9, 128, dtype=torch.int32)[:, :100]
    cache = Rows(torch.zeros(2, 64, 656), 2, 64, 64 * 656)
    every = cache_params(cache, indices, lengths, None)
    assert every.behind(5) == cache_params(cache, indices[5:], lengths[5:], None)
    positions = cache_params(cache, None, None, torch.zeros(1, 4, dtype=torch.int32), 256)
    assert positions.behind(5) == positions


@pytest.mark.parametrize("parts", [(1, 1), (1, 3), (2, 1), (2, 3)])
@pytest.mark.parametrize("padding", [0, 1])
def test_waves_of_a_call_share_its_copies(
    parts: tuple[int, int], padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wave that begins beside the end of another reads nothing made in between: copies are before both and behind."""
    seen: list[Any] = []

    def one(keys: KeyFormat, shape: Clusters, num_tokens: int, q: torch.Tensor, *_: Any, **own: Any) -> None:
        seen.append((shape.parts, num_tokens, q, own["req_id_per_token"].tolist(), own["programmatic"]))
        in_parts = shape.parts > 1
        target, sums = [part[0] for part in own["parts_of_rows"]] if in_parts else (own["out"], own["lse"])
        target[:num_tokens], sums[:num_tokens] = q[:num_tokens, :, :512], q[:num_tokens, :, 0]

    def merge(
        part_out: torch.Tensor,
        part_lse: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
        balanced: None,
        by_length: None,
    ) -> None:
        seen.append((part_out.shape, part_lse.shape))
        out.copy_(part_out[0])
        lse.copy_(part_lse[0])

    monkeypatch.setattr("mla_ops.kernels.hopper.waves.launch", one)
    monkeypatch.setattr(merge_parts, "merge_parts", merge)
    q = torch.arange(5 * 3 * 576).view(5, 3, 576).bfloat16()
    padded = torch.zeros(5, 3, 576 + padding, dtype=torch.bfloat16)[..., :576].copy_(q)
    out, lse = torch.zeros(5, 3, 512 + padding, dtype=torch.bfloat16)[..., :512], torch.zeros(5, 3)
    waves = [Wave(tokens, Clusters(16, 2, number)) for tokens, number in zip((3, 2), parts, strict=True)]
    requests = torch.arange(5, dtype=torch.int32)
    arguments = {"attn_sink": None, "req_id_per_token": requests, "out": out, "lse": lse}
    launch_waves(FP8, waves, padded, (NO_CACHE, NO_CACHE), 1.0, **arguments)
    assert torch.equal(out, q[..., :512])
    assert torch.equal(lse, q[..., 0].float())
    launches, merges = [call for call in seen if len(call) == 5], [call for call in seen if len(call) == 2]
    assert [(*call[:2], *call[3:]) for call in launches] == [
        (parts[0], 3, [0, 1, 2, 3, 4], False),
        (parts[1], 2, [3, 4], True),
    ]
    storages = {call[2].untyped_storage().data_ptr() for call in launches}
    assert len(storages) == 1
    assert (storages == {padded.untyped_storage().data_ptr()}) == (not padding)
    assert merges == [((n, t, 3, 512), (n, t, 3)) for n, t in zip(parts, (3, 2), strict=True) if n > 1]


def test_forced_waves_replace_the_chosen_and_have_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sparse_attention, "launch_waves", lambda _, waves, *__, **___: seen.append(waves))
    monkeypatch.setattr(dense_attention, "launch_waves", lambda _, waves, *__, **___: seen.append(waves))
    chosen = (Wave(5, Clusters(16, 8)),)
    for module in (sparse_attention, dense_attention):
        monkeypatch.setattr(module, "_waves", lambda *_: chosen)
    monkeypatch.setattr(dense_attention, "_balance", lambda *_: None)
    monkeypatch.setattr(dense_attention, "_by_length", lambda *_: None)
    monkeypatch.setattr(dense_attention, "_packing", lambda *_: None)
    q, cache = torch.zeros(5, 16, 576, dtype=torch.bfloat16), torch.zeros(2, 64, 656, dtype=torch.uint8)
    numbers, out, lse = torch.zeros(5, 128, dtype=torch.int32), torch.zeros(5, 16, 512), torch.zeros(5, 16)

    def call() -> None:
        sparse_attention.paged_sparse_attention(q, cache, numbers, 1.0, "fp8_ds_mla", out=out, lse=lse)
        dense_attention.paged_attention(
            q, cache, numbers, numbers[:, 0], numbers[:, 0], 1.0, "fp8_ds_mla", out=out, lse=lse
        )

    waves = Wave(4, Clusters(64, 6)), Wave(1, Clusters(32, 2))
    call()
    with override(*waves):
        call()
    call()
    assert seen == [chosen, chosen, waves, waves, chosen, chosen]
    with override(Wave(4, Clusters(64, 6))), pytest.raises(ValueError, match="must have 5 tokens, got 4"):
        call()


@pytest.mark.parametrize("num_heads", [1, 16, 17, 32, 33, 64, 128])
@pytest.mark.parametrize("topk", [0, 1, 64, 65, 640, 2048, 2176])
def test_no_cluster_has_more_ctas_than_there_are_turns(num_heads: int, topk: int) -> None:
    for num_tokens in (1, 7, 64, 4096):
        for _, shape in choose(FP8, num_tokens, num_heads, topk, AT_ONCE, H200):
            assert shape.tile in tiles_for(FP8, num_heads)
            ctas = shape.members if isinstance(shape, Group) else shape.splits
            assert ctas in SPLITS
            assert ctas <= max(1, -(-topk // 64))


def test_sizes_of_clusters_are_those_of_the_kernels() -> None:
    """Shared memory has room for the packets of each size that layout.cuh names."""
    text = (sources.SOURCES.folder / "layout.cuh").read_text()
    (sizes,) = re.findall(r"int SPLITS\[\] = \{([0-9, ]+)\};", text)
    assert tuple(int(size) for size in sizes.split(",")) == SPLITS


@pytest.mark.parametrize(
    ("turns", "expected"),
    [(1, [1]), (2, [1, 2]), (10, [1, 2, 3, 4, 5, 10]), (32, [1, 2, 3, 4, 5, 6, 7, 8, 11, 16])],
)
def test_no_cta_is_added_that_shortens_no_share(turns: int, expected: list[int]) -> None:
    assert splits_for(turns) == expected


def test_a_group_has_a_turn_for_each_of_its_ctas_and_sms_for_all() -> None:
    assert [group.members for group in groups_for(FP8, 128, 32)] == [2, 3, 4, 6, 7, 8, 11, 16]
    assert [group.members for group in groups_for(FP8, 64, 2)] == [2]
    assert groups_for(FP8, 32, 32) == groups_for(KERNELS["bf16", 576], 128, 32) == []
    with pytest.raises(ValueError, match="only quantised keys have a kernel for groups, got BF16_576"):
        KERNELS["bf16", 576].kernel(Group(8))
    with pytest.raises(ValueError, match="only quantised keys have a kernel for shares, got BF16_576"):
        KERNELS["bf16", 576].kernel(Clusters(16, 1, shares=2))
    for shape, most in (
        (Clusters(64, 1, shares=9), 8),
        (Clusters(16, 1, shares=17), 16),
        (Clusters(32, 2, shares=7), 6),
    ):
        with pytest.raises(ValueError, match=f"at most {most} shares in such a launch"):
            FP8.kernel(shape)
    assert predicted_us(FP8, Group(8), 8, 128, 32, AT_ONCE, H200) < 24
    assert predicted_us(FP8, Group(8), 9, 128, 32, AT_ONCE, H200) == float("inf")


def test_clusters_of_two_ctas_that_have_all_keys_have_a_kernel_of_their_own() -> None:
    def name(shape: Shape, keys: KeyFormat = FP8) -> str:
        return keys.kernel(shape).name

    for tile in (16, 24, 32):
        assert name(Clusters(tile, 2)) == f"sparse_attention_pairs<{tile}, FP8_DS_MLA>"
        for shape in (Clusters(tile, 2, parts=2), Clusters(tile, 3)):
            assert name(shape) == f"sparse_attention_clusters<{tile}, FP8_DS_MLA>"
    assert name(Clusters(64, 2)) == "sparse_attention_clusters<64, FP8_DS_MLA>"
    assert name(Clusters(16, 2), KERNELS["bf16", 576]) == name(Clusters(16, 3), KERNELS["bf16", 576])
    others = FP8.yielding_kernel(Clusters(16, 2)), FP8.balanced_kernel(Clusters(16, 2))
    assert [kernel and kernel.name for kernel in others] == [
        "sparse_attention_pairs<16, FP8_DS_MLA, true>",
        "sparse_attention_balanced_clusters<16, FP8_DS_MLA>",
    ]


def test_many_rows_of_64_heads_have_a_kernel_of_their_own() -> None:
    assert FP8.kernel(Clusters(64, 1), many_rows=True).name == "sparse_attention_many_rows<64, FP8_DS_MLA>"
    for keys, shape in (
        (FP8, Clusters(64, 2)),
        (FP8, Clusters(64, 1, shares=4)),
        (FP8, Clusters(32, 1)),
        (KERNELS["fp8_ds_mla_v4", 512], Clusters(64, 1)),
        (KERNELS["bf16", 576], Clusters(64, 1)),
    ):
        assert keys.kernel(shape, many_rows=True) == keys.kernel(shape)


def shares_of(shape: Shape) -> int:
    return shape.members if isinstance(shape, Group) else shape.shares or shape.splits


@pytest.mark.parametrize(
    ("keys", "num_heads", "topk", "tile", "shares"),
    [
        (FP8, 16, 2048, 16, 8),
        (FP8, 128, 2048, 64, 4),
        (FP8, 64, 640, 64, 2),
        (FP8, 16, 640, 16, 3),
        (FP8, 16, 500, 16, 3),
        (FP8, 32, 640, 32, 3),
        (FP8, 32, 2048, 32, 6),
        (FP8, 64, 0, 64, 1),
        (FP8, 16, 2**20, 16, 8),
        (FP8, 128, 2**20, 64, max(SPLITS)),
        (KERNELS["bf16", 576], 16, 2048, 16, 4),
    ],
)
def test_deterministic_launches_share_a_row_by_its_capacity_alone(
    keys: KeyFormat, num_heads: int, topk: int, tile: int, shares: int
) -> None:
    of_this_row = deterministic_shapes(keys, num_heads, topk)
    of_larger = {(getattr(shape, "bits_of", 0) or shape.tile, shares_of(shape)) for shape in of_this_row}
    assert of_larger == {(tile, shares)}
    # A cluster of two with few heads adds up otherwise (`exchange_halves`), so it is no choice among others.
    assert len(of_this_row) == 1 or not {Clusters(16, 2), Clusters(32, 2)} & set(of_this_row)
    for num_tokens in (1, 7, 60, 140, 4096):
        (wave,) = choose_deterministic(keys, num_tokens, num_heads, topk, AT_ONCE, H200)
        assert wave.num_tokens == num_tokens
        assert wave.shape in of_this_row


def test_deterministic_rows_are_groups_where_clusters_do_not_fit() -> None:
    """An H200 runs 30 clusters of 4 at one time."""
    assert choose_deterministic(FP8, 15, 128, 2048, AT_ONCE, H200) == (Wave(15, Clusters(64, 4)),)
    assert choose_deterministic(FP8, 16, 128, 2048, AT_ONCE, H200) == (Wave(16, Group(4)),)


# us of launches whose bits are alike (`docs/results/deterministic-*.txt`), to 32 heads on an H100, of others on an H200
MEASURED = [
    (8, 16, {Clusters(16, 8): 15.9}),
    (16, 16, {Clusters(16, 8): 28.5, Clusters(16, 4, 1, 8): 25.4}),
    (32, 16, {Clusters(16, 4, 1, 8): 47.4, Clusters(16, 3, 1, 8): 37.1, Clusters(16, 2, 1, 8): 41.1}),
    (64, 16, {Clusters(16, 3, 1, 8): 64.6, Clusters(16, 2, 1, 8): 55.1, Clusters(16, 1, 1, 8): 71.0}),
    (128, 16, {Clusters(16, 2, 1, 8): 96.0, Clusters(16, 1, 1, 8): 89.8}),
    (1, 32, {Clusters(32, 6, 1, 6): 24.3, Clusters(16, 6, 1, 6, 32): 19.4, Clusters(16, 3, 1, 6, 32): 28.9}),
    (8, 32, {Clusters(32, 6, 1, 6): 24.4, Clusters(32, 3, 1, 6): 34.5, Clusters(16, 6, 1, 6, 32): 20.7}),
    (16, 32, {Clusters(32, 6, 1, 6): 26.4, Clusters(32, 3, 1, 6): 35.4, Clusters(16, 3, 1, 6, 32): 30.5}),
    (32, 32, {Clusters(32, 3, 1, 6): 40.3, Clusters(32, 2, 1, 6): 49.7}),
    (64, 32, {Clusters(32, 3, 1, 6): 72.6, Clusters(32, 2, 1, 6): 59.7, Clusters(32, 1, 1, 6): 83.1}),
    (128, 32, {Clusters(32, 2, 1, 6): 105.2, Clusters(32, 1, 1, 6): 93.2}),
    (1, 64, {Clusters(64, 4): 29.9, Clusters(16, 4, 1, 4, 64): 22.5}),
    (4, 64, {Clusters(64, 4): 29.4, Clusters(32, 4, 1, 4, 64): 27.2, Clusters(16, 4, 1, 4, 64): 22.7}),
    (8, 64, {Clusters(64, 4): 29.6, Clusters(32, 4, 1, 4, 64): 27.6, Clusters(16, 4, 1, 4, 64): 40.5}),
    (12, 64, {Clusters(64, 4): 29.6, Clusters(32, 4, 1, 4, 64): 28.8, Clusters(32, 2, 1, 4, 64): 44.7}),
    (16, 64, {Clusters(64, 4): 29.8, Clusters(32, 4, 1, 4, 64): 49.5, Clusters(16, 2, 1, 4, 64): 38.1}),
    (32, 64, {Clusters(64, 4): 56.2, Group(4): 34.0}),
    (64, 64, {Clusters(64, 4): 79.7, Clusters(64, 2, 1, 4): 61.9}),
    (128, 64, {Clusters(64, 4): 128.4, Clusters(64, 1, 1, 4): 108.1}),
    (512, 64, {Clusters(64, 4): 433.2, Clusters(64, 1, 1, 4): 373.4}),
    (1, 128, {Clusters(64, 4): 30.0, Clusters(16, 4, 1, 4, 64): 23.1}),
    (3, 128, {Clusters(64, 4): 30.2, Clusters(16, 4, 1, 4, 64): 23.5}),
    (4, 128, {Clusters(64, 4): 29.7, Clusters(32, 4, 1, 4, 64): 27.5, Clusters(16, 2, 1, 4, 64): 37.3}),
    (6, 128, {Clusters(64, 4): 29.7, Clusters(32, 4, 1, 4, 64): 28.0, Clusters(32, 2, 1, 4, 64): 44.8}),
    (8, 128, {Clusters(64, 4): 29.9, Clusters(32, 4, 1, 4, 64): 49.1, Clusters(16, 2, 1, 4, 64): 38.0}),
    (16, 128, {Clusters(64, 4): 55.1, Group(4): 31.9}),
    (32, 128, {Clusters(64, 4): 79.2, Clusters(64, 2, 1, 4): 60.2}),
    (64, 128, {Clusters(64, 4): 127.1, Clusters(64, 1, 1, 4): 104.8}),
    (512, 128, {Clusters(64, 4): 829.0, Clusters(64, 1, 1, 4): 698.4}),
]


@pytest.mark.parametrize(("num_tokens", "num_heads", "measured"), MEASURED)
def test_the_chosen_deterministic_launch_is_within_two_percent_of_the_fastest(
    num_tokens: int, num_heads: int, measured: dict[Shape, float]
) -> None:
    for costs in (H100, H200):
        ((_, shape),) = choose_deterministic(FP8, num_tokens, num_heads, 2048, AT_ONCE, costs)
        assert measured[shape] <= 1.02 * min(measured.values())


def test_memory_of_a_wave_in_shares_is_not_given_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both waves run at the same time."""
    seen: list[tuple[int, weakref.ref[torch.Tensor]]] = []

    def one(*_: Any, exchange: torch.Tensor, **__: Any) -> None:
        assert all(before() is not None for _, before in seen)
        seen.append((exchange.numel(), weakref.ref(exchange)))

    monkeypatch.setattr("mla_ops.kernels.hopper.waves.launch", one)
    monkeypatch.setattr("mla_ops.kernels.hopper.launch.clusters_at_once", lambda *_: AT_ONCE)
    q, indices = torch.zeros(70, 128, 576, dtype=torch.bfloat16), torch.zeros(70, 128, dtype=torch.int32)
    cache = cache_params(Rows(torch.zeros(2, 64, 656), 2, 64, 64 * 656), indices, None, None)
    waves = Wave(66, Clusters(64, 1, shares=4)), Wave(4, Clusters(64, 2, shares=4))
    out, lse = torch.zeros(70, 128, 512), torch.zeros(70, 128)
    launch_waves(FP8, waves, q, (cache, NO_CACHE), 1.0, attn_sink=None, req_id_per_token=None, out=out, lse=lse)
    part = 64 * 512 * 2 + 8 * 32 * 8
    assert [size for size, _ in seen] == [132 * 4 * part, 8 * 4 * 2 * part]


@pytest.mark.parametrize("keys", [FP8, KERNELS["bf16", 576]], ids=["fp8_ds_mla", "bf16"])
@pytest.mark.parametrize("capacity", [0, 64, 65, 8192, 2**17, 2**31 - 64])
def test_parts_of_dense_attention_fill_the_device(keys: KeyFormat, capacity: int) -> None:
    """Parts are clusters of several CTAs, as many as there are keys for, and never predicted slower than none.

    Groups are of short rows.
    """
    turns = max(1, -(-capacity // 64))
    for num_tokens in (1, 4, 16, 128):
        for num_heads in (1, 16, 32, 128):
            waves = dense_attention.choose(keys, num_tokens, num_heads, capacity, AT_ONCE, H200)
            whole = dense_attention.choose(keys, num_tokens, num_heads, capacity, AT_ONCE, H200, most_parts=1)
            assert all(isinstance(wave.shape, Group) or wave.shape.parts == 1 for wave in whole)
            for _, shape in waves:
                if isinstance(shape, Group):
                    assert shape.members <= turns <= dense_attention.GROUP_TURNS
                    continue
                assert shape.splits * shape.parts <= turns
                assert shape.parts == 1 or (shape.splits > 1 and turns * shape.splits * shape.parts < 2**31)
            in_parts, in_one = (
                sum(predicted_us(keys, wave.shape, wave.num_tokens, num_heads, turns, AT_ONCE, H200) for wave in chosen)
                for chosen in (waves, whole)
            )
            assert in_parts <= in_one + H200.wave_us


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "context", "expected"),
    [
        (1, 16, 2048, Clusters(16, 16)),
        (1, 16, 2**17, Clusters(16, 16, 6)),
        (4, 128, 8192, Clusters(64, 2, 8)),
        (16, 128, 4096, Group(4)),
        (16, 128, 32768, Clusters(64, 2, 2)),
        (128, 16, 8192, Clusters(16, 1)),
        (128, 128, 8192, Clusters(64, 1)),
    ],
)
def test_parts_of_dense_attention(num_tokens: int, num_heads: int, context: int, expected: Shape) -> None:
    """The least predicted; docs/results/sparse_attention-h200.txt has what some of them took."""
    assert dense_attention.choose(FP8, num_tokens, num_heads, context, AT_ONCE, H200) == (Wave(num_tokens, expected),)


def test_as_many_parts_as_are_allowed() -> None:
    ((_, shape),) = dense_attention.choose(FP8, 1, 16, 2**17, AT_ONCE, H200)
    assert isinstance(shape, Clusters)
    assert shape.parts > 1
    assert dense_attention.choose(FP8, 1, 16, 2**17, AT_ONCE, H200, most_parts=1) == (Wave(1, Clusters(16, 16)),)


def test_a_table_without_requests_has_no_keys() -> None:
    """The address of an empty tensor is null, which the kernels take for slots instead of positions."""
    cache, lens = Rows(torch.zeros(2, 64, 656), 2, 64, 64 * 656), torch.tensor([9], dtype=torch.int32)
    indices, table = torch.zeros(1, 128, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)
    for chosen, columns in ((None, 256), (indices, 128)):
        assert cache_params(cache, chosen, lens, table, 256).columns == columns
        assert cache_params(cache, chosen, lens, table[:0], 256).columns == 0
        assert cache_params(cache, chosen, lens, None, 256).columns == columns


@pytest.mark.parametrize(
    ("num_kv", "num_heads", "num_kv_heads", "expected"),
    [(8192, 16, 16, 6), (4096, 128, 128, 12), (2**20, 128, 128, 1), (2**20, 128, 8, 16), (1, 128, 128, 128)],
)
def test_heads_of_a_prefill_that_share_l2(num_kv: int, num_heads: int, num_kv_heads: int, expected: int) -> None:
    """Keys and values of 192/128; heads that read the same ones are not parted."""
    assert prefill_attention.heads_together(num_kv, num_heads, num_kv_heads, 640) == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float32}, "bfloat16 or float16"),
        ({"head_dim": 96}, "these are 96/128"),
        ({"head_dim_v": 64}, "192/128, 128/128, 64/64, 256/256"),
    ],
)
def test_what_prefill_refuses(change: dict[str, Any], words: str) -> None:
    call = Call("prefill_attention", torch.device("cuda", 0), torch.bfloat16, head_dim=192, head_dim_v=128)
    assert words in str(prefill_attention.prefill_reason(call._replace(**change)))


def test_a_wave_of_groups_is_the_last_one() -> None:
    """The next would share its counters, and take memory that it gave back and still uses."""
    group, cluster = Wave(8, Group(8)), Wave(8, Clusters(64, 8))
    for waves in ((group, group), (group, cluster), (cluster, group, cluster)):
        with pytest.raises(ValueError, match=r"only the last wave may be of groups"), override(*waves):
            pass
    with override(cluster, group):
        pass


def test_strides_that_bulk_copies_do_not_take_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd strides, rows that are all the same, bases beside 16 bytes; not a stride that no element is reached by."""
    seen: list[Any] = []
    monkeypatch.setattr(prefill_attention, "_tensor_map", lambda *key: seen.append(key) or b"")
    whole = torch.zeros(9, 4, 136, dtype=torch.bfloat16)
    for tensor, copied in (
        (whole[:, 1:3, 8:72], False),
        (whole[:, 1:3, 3:67], True),
        (whole[:, :1, :64].as_strided((9, 1, 64), (544, 7, 1)), False),
        (whole[:, :1, :64].expand(9, 2, 64), True),
        (torch.zeros(9, 4, 67, dtype=torch.bfloat16)[..., :64], True),
        (torch.zeros(9 * 64 + 1, dtype=torch.bfloat16)[1:].view(9, 1, 64), True),
    ):
        found, _ = prefill_attention._in_boxes(tensor, 128)
        assert (found.data_ptr() != tensor.data_ptr()) == copied
        assert torch.equal(found, tensor)
        address, _, shape, strides, rows = seen[-1]
        assert (address, shape, strides, rows) == (found.data_ptr(), tuple(tensor.shape), found.stride(), 128)
        assert address % 16 == 0


def test_forced_waves_are_of_their_own_thread() -> None:
    found: list[object] = []
    with override(Wave(5, Clusters(64, 6))):
        thread = threading.Thread(target=lambda: found.append(forced(7)))
        thread.start()
        thread.join()
        assert forced(5) == (Wave(5, Clusters(64, 6)),)
    assert found == [()]
    assert forced(7) == ()
