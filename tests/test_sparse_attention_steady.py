"""Weights about the largest score of a program's first tile, and the second walk where others are far above.

GPUs take them where operands are bfloat16 (`is_steady`). Here all tiles do.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention_inputs import check, check_two_caches, filled_cache, force_splits, force_tile, queries, some_indices

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_attention")
BF16 = torch.bfloat16
V4 = "fp8_ds_mla_v4"
# heads, keys, warps, tiles ahead; format
TILES = {
    "bf16, four warps": ((32, 32, 4, 1), "bf16"),
    "bf16, eight warps": ((32, 32, 8, 2), "bf16"),
    "bf16, 64 heads": ((64, 64, 8, 1), "bf16"),
    "bf16, 16 heads": ((16, 32, 4, 2), "bf16"),
    "fp8_ds_mla, 16 heads": ((16, 32, 4, 2), "fp8_ds_mla"),
    "fp8_ds_mla_v4": ((32, 32, 4, 1), V4),
}
SIZES = {"usual scores": 1.0, "scores of 2^8": 40.0, "scores of 2^31": 1e9}


@pytest.fixture(params=TILES.values(), ids=TILES)
def cache_format(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    sizes, kind = request.param
    force_steady_tile(monkeypatch, sizes, kind)
    return kind


def force_steady_tile(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int, int], kind: str) -> None:
    from mla_ops.kernels.triton import sparse_attention

    force_tile(monkeypatch, *sizes, apart=kind == "bf16" and sizes[0] >= 32)
    monkeypatch.setattr(sparse_attention, "is_steady", lambda *_: True)


def width(kind: str) -> int:
    return 512 if kind == V4 else 576


@pytest.fixture
def walks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the interpreter walked again."""
    if device.type == "cuda":
        pytest.skip("the interpreter counts")
    from mla_ops.kernels.triton import sparse_attention_again, sparse_attention_extra

    count = 0
    own = sparse_attention_again.left_its_range

    def counted(*arguments: object, **options: object) -> object:
        nonlocal count
        broken = own(*arguments, **options)
        count += int(broken.handle.data[0])
        return broken

    for module in (sparse_attention_again, sparse_attention_extra):
        monkeypatch.setattr(module, "left_its_range", counted)
    return lambda: count


def test_tiles_whose_weights_are_about_their_first_keys() -> None:
    from mla_ops.kernels.triton.attention_options import is_steady
    from mla_ops.kernels.triton.sparse_attention import tile
    from mla_ops.kernels.triton.sparse_attention_keys import make_keys

    def found(
        capability: tuple[int, int],
        heads: int,
        mode: str,
        dtype: torch.dtype = BF16,
        num_keys: int = 2048,
        parts: int = 1,
        paired: bool = True,
    ) -> bool:
        keys = make_keys(mode, 576, 8, True, False, "table")
        return is_steady(tile(capability, heads, mode), keys, dtype, num_keys, parts, paired)

    for capability in ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0)):
        assert found(capability, 128, "plain", parts=8)
        assert not found(capability, 128, "plain", torch.float16), "float16 has not the range"
        assert not found(capability, 128, "plain", num_keys=128)
        assert not found(capability, 128, "fp8")
        assert found(capability, 128, "fp8_v4", num_keys=640)
        assert not found(capability, 128, "fp8_v4", num_keys=640, parts=2)
        assert not found(capability, 128, "fp8_v4", num_keys=640, paired=False)
    for mode in ("plain", "fp8"):
        assert found((9, 0), 16, mode, parts=8), "parts of eight tiles"
        assert not found((9, 0), 16, mode, parts=9)
    assert not found((9, 0), 16, "fp8_v4")
    assert found((9, 0), 128, "plain")
    assert not found((9, 0), 128, "plain", parts=2), "64 heads: whole rows"
    assert not found((9, 0), 128, "plain", torch.float16)
    assert not found((9, 0), 128, "fp8")


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_attention_equals_float64(
    device: torch.device, cache_format: str, monkeypatch: pytest.MonkeyPatch, size: float, parts: int
) -> None:
    """Large scores leave the range of weights in some heads: those rows are walked again."""
    force_splits(monkeypatch, parts)
    cache, indices = filled_cache(cache_format, 12, 16, device), some_indices(5, 150, 192, device)
    indices[0, :40] = -1
    indices[1] = -1
    indices[2, 37:] = -1
    q = queries(5, 3, BF16, device, width(cache_format)) * size
    lengths = torch.tensor([150, 150, 150, 0, 33], dtype=torch.int32, device=device)
    sink = torch.tensor([0.5, -1.0, 2.0], device=device)
    check("triton", q, cache, indices, cache_format, attn_sink=sink)
    check("triton", q, cache, indices, cache_format, attn_sink=sink, topk_length=lengths)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_two_caches_equal_float64(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, size: float, parts: int
) -> None:
    force_steady_tile(monkeypatch, (32, 32, 4, 1), V4)
    force_splits(monkeypatch, parts)
    cache, extra = filled_cache(V4, 3, 64, device), filled_cache(V4, 60, 2, device)
    indices, extra_indices = some_indices(4, 70, 192, device), some_indices(4, 130, 120, device)
    indices[1] = -1
    extra_indices[2] = -1
    indices[3], extra_indices[3] = -1, -1
    q = queries(4, 3, BF16, device, 512) * size
    check_two_caches("triton", q, cache, indices, V4, extra, extra_indices, V4)


@pytest.mark.parametrize(("factor", "again"), [(100.0, 0), (2000.0, 1)], ids=["in range", "out of it"])
def test_a_key_far_above_the_first_ones(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, walks: Callable[[], int], factor: float, again: int
) -> None:
    """60 above all others, in natural logarithms, is in range, as an attention sink is; 1,000 is not."""
    force_steady_tile(monkeypatch, (32, 32, 4, 1), "bf16")
    cache, q = filled_cache("bf16", 12, 16, device) / 8, queries(1, 1, BF16, device)
    q /= q.float().norm()
    cache.view(-1, 576)[100] = (q[0, 0].float() * factor * 24 * 0.6).to(BF16)
    indices = torch.arange(150, dtype=torch.int32, device=device)[None]
    check("triton", q, cache, indices, "bf16")
    assert walks() == again


@pytest.mark.parametrize(
    ("tile", "growing", "again"),
    [
        ("bf16, 64 heads", True, 1),  # instead of the first walk, which has no key then
        ("bf16, 64 heads", False, 1),
        ("bf16, 16 heads", True, 1),
        ("bf16, 16 heads", False, 0),  # fades from the first tile on
    ],
)
def test_rows_whose_scores_lie_far_apart(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    walks: Callable[[], int],
    tile: str,
    growing: bool,
    again: int,
) -> None:
    """From 0 to 160, in natural logarithms, in their order or in any."""
    force_steady_tile(monkeypatch, *TILES[tile])
    cache, q = filled_cache("bf16", 12, 16, device) / 8, queries(1, 1, BF16, device)
    q /= q.float().norm()
    order = torch.arange(192, device=device) if growing else torch.randperm(192, device=device)
    cache.view(-1, 576)[order] = (q[0, 0].float() * torch.arange(192, device=device)[:, None] * 20).to(BF16)
    indices = torch.arange(192, dtype=torch.int32, device=device)[None]
    check("triton", q, cache, indices, "bf16")
    assert walks() == again


def test_first_keys_far_above_or_below_the_others(device: torch.device, cache_format: str) -> None:
    cache, indices = filled_cache(cache_format, 12, 16, device), some_indices(4, 150, 192, device)
    q = queries(4, 3, BF16, device, width(cache_format))
    if cache_format == "bf16":
        indices[:, :32] = torch.tensor([[0], [1], [2], [3]], device=device)
        for key, factor in enumerate((50.0, -50.0, 2000.0, -2000.0)):
            cache.view(-1, 576)[key] = (q[key, 0] * factor / 24).to(BF16)
    q[3] *= 1e4
    check("triton", q, cache, indices, cache_format)


@pytest.mark.parametrize("lengths", [False, True])
def test_a_row_without_keys_is_not_walked_again(
    device: torch.device, cache_format: str, walks: Callable[[], int], lengths: bool
) -> None:
    cache, q = filled_cache(cache_format, 4, 16, device), queries(2, 3, BF16, device, width(cache_format))
    indices = torch.full((2, 700), -1, dtype=torch.int32, device=device)
    indices[1, 650] = 5
    options = {"topk_length": torch.tensor([700, 700], dtype=torch.int32, device=device)} if lengths else {}
    out, _lse = check("triton", q, cache, indices, cache_format, **options)
    assert not out[0].any()
    assert walks() == 0


@pytest.mark.parametrize("power", [-100, 100])
def test_values_of_any_size(device: torch.device, monkeypatch: pytest.MonkeyPatch, power: int) -> None:
    """Sums of large ones overflow before weights do."""
    force_steady_tile(monkeypatch, (32, 32, 4, 1), "bf16")
    cache, indices = filled_cache("bf16", 12, 16, device), some_indices(2, 150, 192, device)
    q = torch.zeros(2, 3, 576, dtype=BF16, device=device)
    q[..., 512:] = torch.randn(2, 3, 64, device=device).bfloat16() * 4
    cache[..., :512] *= 2.0**power
    check("triton", q, cache, indices, "bf16")
