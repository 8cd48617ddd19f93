"""Which tile and cluster a call of the Hopper kernels gets: pure functions of shapes."""

from __future__ import annotations

import pytest

from mla_ops.kernels.hopper.launch import KERNELS, SPLITS, Shape, choose, choose_deterministic, tiles_for

FP8 = KERNELS["fp8_ds_mla", 576]
# of an H200, by the sizes in SPLITS
AT_ONCE = (132, 66, 39, 30, 17, 15, 7)


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "expected"),
    [
        (1, 16, Shape(16, 16)),
        (8, 16, Shape(16, 8)),
        (8, 128, Shape(64, 6)),
        (32, 16, Shape(16, 3)),
        (32, 128, Shape(64, 2)),
        (128, 16, Shape(16, 1)),
        (128, 32, Shape(32, 1)),
        (256, 128, Shape(64, 1)),
    ],
)
def test_the_measured_best(num_tokens: int, num_heads: int, expected: Shape) -> None:
    assert choose(FP8, num_tokens, num_heads, 2048, AT_ONCE) == expected


@pytest.mark.parametrize("num_heads", [1, 16, 17, 32, 33, 64, 128])
@pytest.mark.parametrize("topk", [0, 1, 64, 65, 640, 2048, 2176])
def test_no_cluster_has_more_ctas_than_there_are_turns(num_heads: int, topk: int) -> None:
    for num_tokens in (1, 7, 64, 4096):
        shape = choose(FP8, num_tokens, num_heads, topk, AT_ONCE)
        assert shape.tile in tiles_for(num_heads)
        assert shape.splits in SPLITS
        assert shape.splits <= max(1, -(-topk // 64))


def test_a_deterministic_launch_depends_on_one_row_alone() -> None:
    assert choose_deterministic(16, 2048) == Shape(16, 4)
    assert choose_deterministic(128, 2048) == Shape(64, 4)
    assert choose_deterministic(64, 640) == Shape(64, 2)
    assert choose_deterministic(64, 0) == Shape(64, 1)
    assert choose_deterministic(64, 2**20).splits == max(SPLITS)
