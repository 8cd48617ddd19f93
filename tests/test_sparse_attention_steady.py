"""Weights about the largest score of a program's first tile, and the second walk where others are far above.

GPUs without `wgmma` take them for 32 heads over bfloat16 keys. The interpreter, and SM90, are told to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from attention_inputs import check, filled_cache, force_splits, queries, some_indices

from mla_ops import dispatch

pytest.importorskip("triton")
BF16 = torch.bfloat16
# heads, keys, warps, tiles ahead
TILES = {"four warps": (32, 32, 4, 1), "eight warps": (32, 32, 8, 2)}
SIZES = {"usual scores": 1.0, "scores of 2^8": 40.0, "scores of 2^31": 1e9}


@pytest.fixture(autouse=True)
def triton_lowering() -> Iterator[None]:
    with dispatch.override(paged_sparse_attention="triton"):
        yield


@pytest.fixture(autouse=True, params=TILES.values(), ids=TILES)
def tiles(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    from mla_ops.kernels.triton import sparse_attention

    if "tiles_whose" not in request.node.originalname:
        chosen = sparse_attention.Tile(*request.param, apart=True)
        monkeypatch.setattr(sparse_attention, "tile", lambda *_: chosen)


@pytest.fixture
def walks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the interpreter walked again."""
    if device.type == "cuda":
        pytest.skip("the interpreter counts")
    from mla_ops.kernels.triton import sparse_attention_again

    count = 0
    own = sparse_attention_again.left_its_range

    def counted(*arguments: object, **options: object) -> object:
        nonlocal count
        broken = own(*arguments, **options)
        count += int(broken.handle.data[0])
        return broken

    monkeypatch.setattr(sparse_attention_again, "left_its_range", counted)
    return lambda: count


def test_tiles_whose_weights_are_about_their_first_keys() -> None:
    from mla_ops.kernels.triton.sparse_attention import is_steady, tile
    from mla_ops.kernels.triton.sparse_attention_keys import make_keys

    def found(capability: tuple[int, int], heads: int, mode: str, dtype: torch.dtype = BF16) -> bool:
        return is_steady(tile(capability, heads, mode), make_keys(mode, 576, 8, True, False, "table"), dtype)

    for capability in ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0)):
        assert found(capability, 128, "plain")
        assert not found(capability, 128, "plain", torch.float16), "float16 has not the range"
        assert not found(capability, 128, "fp8")
        assert not found(capability, 128, "fp8_v4")
        assert not found(capability, 16, "plain")
    assert not found((9, 0), 128, "plain")


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_attention_equals_float64(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, size: float, parts: int
) -> None:
    """Large scores leave the range of weights in some heads: those rows are walked again."""
    force_splits(monkeypatch, parts)
    cache, indices = filled_cache("bf16", 12, 16, device), some_indices(5, 150, 192, device)
    indices[0, :40] = -1
    indices[1] = -1
    indices[2, 37:] = -1
    q = queries(5, 3, BF16, device) * size
    lengths = torch.tensor([150, 150, 150, 0, 33], dtype=torch.int32, device=device)
    sink = torch.tensor([0.5, -1.0, 2.0], device=device)
    check("triton", q, cache, indices, "bf16", attn_sink=sink)
    check("triton", q, cache, indices, "bf16", attn_sink=sink, topk_length=lengths)


@pytest.mark.parametrize(("factor", "again"), [(100.0, 0), (2000.0, 1)], ids=["in range", "out of it"])
def test_a_key_far_above_the_first_ones(
    device: torch.device, walks: Callable[[], int], factor: float, again: int
) -> None:
    """60 above all others, in natural logarithms, is in range, as an attention sink is; 1,000 is not."""
    cache, q = filled_cache("bf16", 12, 16, device) / 8, queries(1, 1, BF16, device)
    q /= q.float().norm()
    cache.view(-1, 576)[100] = (q[0, 0].float() * factor * 24 * 0.6).to(BF16)
    indices = torch.arange(150, dtype=torch.int32, device=device)[None]
    check("triton", q, cache, indices, "bf16")
    assert walks() == again


def test_first_keys_far_above_or_below_the_others(device: torch.device) -> None:
    cache, indices = filled_cache("bf16", 12, 16, device), some_indices(4, 150, 192, device)
    q = queries(4, 3, BF16, device)
    indices[:, :32] = torch.tensor([[0], [1], [2], [3]], device=device)
    for key, factor in enumerate((50.0, -50.0, 2000.0, -2000.0)):
        cache.view(-1, 576)[key] = (q[key, 0] * factor / 24).to(BF16)
    q[3] *= 1e4
    check("triton", q, cache, indices, "bf16")


@pytest.mark.parametrize("lengths", [False, True])
def test_a_row_without_keys_is_not_walked_again(device: torch.device, walks: Callable[[], int], lengths: bool) -> None:
    cache, q = filled_cache("bf16", 4, 16, device), queries(2, 3, BF16, device)
    indices = torch.full((2, 700), -1, dtype=torch.int32, device=device)
    indices[1, 650] = 5
    options = {"topk_length": torch.tensor([700, 700], dtype=torch.int32, device=device)} if lengths else {}
    out, _lse = check("triton", q, cache, indices, "bf16", **options)
    assert not out[0].any()
    assert walks() == 0


@pytest.mark.parametrize("power", [-100, 100])
def test_values_of_any_size(device: torch.device, power: int) -> None:
    """Sums of large ones overflow before weights do."""
    cache, indices = filled_cache("bf16", 12, 16, device), some_indices(2, 150, 192, device)
    q = torch.zeros(2, 3, 576, dtype=BF16, device=device)
    q[..., 512:] = torch.randn(2, 3, 64, device=device).bfloat16() * 4
    cache[..., :512] *= 2.0**power
    check("triton", q, cache, indices, "bf16")
