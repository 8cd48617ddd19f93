"""FlashMLA's sparse kernels as lowerings: what the adapter passes on, and what it makes of the results.

FlashMLA's part is played by functions of its builds' signatures that insist on what the real ones need: they fault on
an index that they do not take, mark empty rows with +inf, and give lse in the build's base. On a GPU the real ones run
in `test_alignment.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import attention_oracle
import pytest
import torch
from attention_inputs import SCALE, filled_cache, queries, some_indices

from mla_ops.kernels import flash_mla
from mla_ops.kernels.alignment import is_aligned
from mla_ops.kernels.reference.cache import read_slots
from mla_ops.kernels.reference.sparse_attention import attend

CPU = torch.device("cpu")
# arguments of some builds only
ADDED = {"": "", "_sgl": ", str? kv_format=None", "_stats": ", bool return_log2_stats=False, bool return_stats=False"}


def result_of(q, read, slots, valid, scale, sink, base):
    """Results as FlashMLA returns them: `[rows, heads, 512]`, and lse `[rows, heads]`."""
    assert q.shape[1] in (64, 128)
    assert is_aligned(q)
    assert scale >= 0  # it takes the largest product before it scales
    assert sink is None or (sink.dtype == torch.float32 and sink.shape == (q.shape[1],) and sink.is_contiguous())
    out, lse = torch.empty(*q.shape[:2], 512, dtype=q.dtype), torch.empty(q.shape[:2])
    attend(q, read, slots.long(), valid, scale, sink, out, lse)
    return out, torch.where(lse == -math.inf, math.inf, lse / math.log(base))


@pytest.fixture(params=["", "_sgl"], ids=["vLLM's", "SGLang's"])
def decode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """`sparse_decode_fwd`; the rows of each call."""
    rows: list[int] = []

    def run(q, kv, indices, topk_length, sink, schedule, splits, extra_kv, extra_indices, extra_length, d_v, scale, *_):
        assert topk_length is schedule is splits is extra_kv is extra_indices is extra_length is None
        assert d_v == 512
        assert q.shape[1] == kv.shape[2] == indices.shape[1] == 1
        assert kv.shape[3] == 656
        num_slots = kv.shape[0] * kv.shape[1]
        assert indices.dtype == torch.int32
        assert indices.shape[2] % 64 == 0
        assert ((indices >= -1) & (indices < num_slots)).all()
        rows.append(len(q))
        slots = indices[:, 0]
        read = lambda chosen: read_slots(kv[:, :, 0], chosen, "fp8_ds_mla")  # noqa: E731
        out, lse = result_of(q[:, 0], read, slots, slots >= 0, scale, sink, math.e)
        return out.unsqueeze(1), lse.unsqueeze(2), None, None

    space = f"test_sparse_decode{request.param}"
    library = torch.library.Library(space, "FRAGMENT")
    library.define(
        "sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
        "Tensor? schedule, Tensor? num_splits, Tensor? extra_kv, Tensor? extra_indices, Tensor? extra_topk_length, "
        f"int d_v, float scale{ADDED[request.param]}) -> (Tensor, Tensor, Tensor?, Tensor?)"
    )
    library.impl("sparse_decode_fwd", run, "CPU")
    monkeypatch.setattr(flash_mla, "find_provider", lambda: (flash_mla.Provider("test", "", space), ""))
    yield rows
    library._destroy()


@pytest.mark.parametrize("num_heads", [3, 64, 65])
@pytest.mark.parametrize("translated", [False, True], ids=["slots", "request-local"])
def test_paged_sparse_attention_holds_the_contract(
    decode: list[int], num_heads: int, translated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any index, lengths, sinks of every kind, empty rows, more rows than fit one call, scales of both signs."""
    monkeypatch.setattr(flash_mla, "MAX_ROWS_PER_CALL", 4)
    scale = -SCALE if translated else SCALE
    cache, q = filled_cache("fp8_ds_mla", 6, 64, CPU), queries(7, num_heads, torch.bfloat16, CPU, 600)[..., 5:581]
    indices = some_indices(7, 70, 6 * 64, CPU)
    indices[2] = -1
    sink = torch.randn(num_heads)
    sink[:3] = torch.tensor([-math.inf, math.inf, 30.0])
    options = {"topk_length": torch.tensor([70, 3, 70, 0, -5, 64, 2**31 - 1], dtype=torch.int32), "attn_sink": sink}
    if translated:
        table = torch.tensor([[3, -1, 5], [99, 1, -(2**31)]], dtype=torch.int32)
        options |= {"block_table": table, "req_id_per_token": torch.tensor([0, 0, 1, 1, 1, -1, 0], dtype=torch.int32)}
    out, lse = torch.full((7, num_heads, 512), math.nan).bfloat16(), torch.full((7, num_heads), math.nan)
    arguments = cache, indices, scale, "fp8_ds_mla"
    flash_mla.paged_sparse_attention(q, *arguments, **options, out=out, lse=lse)
    expected = attention_oracle.attention(q, cache, indices, scale, cache_format="fp8_ds_mla", **options)
    attention_oracle.assert_close(out, lse, expected)
    assert decode == [4, 3]
    assert (lse[2:5] == -math.inf).all()
    halves = torch.empty_like(out), torch.empty_like(lse)
    latent, rope = q.split((512, 64), dim=2)
    flash_mla.paged_sparse_attention(latent, *arguments, q_rope=rope, **options, out=halves[0], lse=halves[1])
    assert torch.equal(halves[0], out)
    assert torch.equal(halves[1], lse)


@pytest.mark.parametrize(("num_tokens", "num_blocks", "topk"), [(0, 2, 2), (2, 0, 2), (2, 2, 0)])
def test_flash_mla_is_not_called_for_nothing(decode: list[int], num_tokens: int, num_blocks: int, topk: int) -> None:
    cache, q = filled_cache("fp8_ds_mla", num_blocks, 64, CPU), queries(num_tokens, 3, torch.bfloat16, CPU)
    indices = torch.zeros(num_tokens, topk, dtype=torch.int32)
    out, lse = torch.ones(num_tokens, 3, 512).bfloat16(), torch.ones(num_tokens, 3)
    flash_mla.paged_sparse_attention(q, cache, indices, SCALE, "fp8_ds_mla", out=out, lse=lse)
    flat = cache.new_zeros(num_blocks, 576, dtype=torch.bfloat16)
    flash_mla.sparse_attention(q, flat, indices, SCALE, out=out, lse=lse)
    assert not decode
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize(("base", "added"), [(math.e, ""), (2.0, ""), (math.e, "_stats")], ids=["e", "2", "stats"])
@pytest.mark.parametrize("head_dim", [576, 512])
def test_flat_sparse_attention_holds_the_contract(
    head_dim: int, base: float, added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prefill takes any index and lengths; its lse has a base of the build's. Scales have both signs."""
    softmax_scale = SCALE if head_dim == 576 else -SCALE

    def run(q, kv, indices, scale, d_v, sink, topk_length, *_):
        assert d_v == 512
        assert kv.shape[1] == indices.shape[1] == 1
        assert indices.dtype == torch.int32
        assert indices.shape[2] % 128 == 0
        assert ((topk_length >= 0) & (topk_length <= indices.shape[2])).all()
        slots = indices[:, 0]
        valid = (slots >= 0) & (slots < len(kv)) & (torch.arange(slots.shape[1]) < topk_length[:, None])
        out, lse = result_of(q, lambda chosen: kv[chosen, 0].float(), slots, valid, scale, sink, base)
        return out, torch.zeros_like(lse), lse

    space = f"test_sparse_prefill_{head_dim}_{int(base)}{added}"
    library = torch.library.Library(space, "FRAGMENT")
    library.define(
        "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float scale, int d_v, Tensor? attn_sink, "
        f"Tensor? topk_length{ADDED[added]}) -> (Tensor, Tensor, Tensor)"
    )
    library.impl("sparse_prefill_fwd", run, "CPU")
    provider = flash_mla.Provider("test", "", space, prefill_lse_base=base)
    monkeypatch.setattr(flash_mla, "find_provider", lambda: (provider, ""))
    q, kv = queries(5, 17, torch.bfloat16, CPU, head_dim), torch.randn(90, head_dim).bfloat16()
    indices = some_indices(5, 70, 90, CPU)
    indices[1] = -1
    options = {"topk_length": torch.tensor([70, 70, 0, 9, 500], dtype=torch.int32), "attn_sink": torch.randn(17)}
    out, lse = torch.full((5, 17, 512), math.nan).bfloat16(), torch.full((5, 17), math.nan)
    flash_mla.sparse_attention(q, kv, indices, softmax_scale, **options, out=out, lse=lse)
    expected = attention_oracle.attention(q, kv.unsqueeze(1), indices, softmax_scale, **options)
    attention_oracle.assert_close(out, lse, expected)
    assert (lse[1:3] == -math.inf).all()
    library._destroy()
