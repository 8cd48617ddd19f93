"""Adapters of dense attention to other libraries' kernels: what they refuse, and what they pass on.

FlashMLA's and FlashAttention's parts are played by functions of the same signatures that insist on what the real ones
need. On a GPU they run in `test_dense_attention_paged_gpu.py` and `test_dense_attention_gpu.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import attention_oracle
import dense_oracle
import pytest
import torch
from attention_inputs import SCALE, filled_cache, queries

import mla_ops  # noqa: F401  (registers the ops)
from mla_ops import dispatch
from mla_ops.dispatch import Call
from mla_ops.kernels import flash_attn, flash_mla, torch_sdpa

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PREFILL = Call("prefill_attention", CUDA, torch.bfloat16, head_dim=192, num_heads=16, num_tokens=100, head_dim_v=128)
PAGED = Call("paged_attention", CUDA, torch.bfloat16, "bf16", 576, 128, 4, 8192, block_size=64)


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    """`dense_decode_fwd` as vLLM's build has it: one token a request, planned inside, +inf for an empty row."""
    library = torch.library.Library("test_flash_mla", "FRAGMENT")
    library.define(
        "dense_decode_fwd(Tensor q, Tensor kv, int d_v, Tensor lens, Tensor table, float scale, bool causal, "
        "Tensor? schedule, Tensor? num_splits, Tensor? out=None) -> (Tensor, Tensor, Tensor?, Tensor?)"
    )

    def decode(q, kv, d_v, lens, table, scale, causal, schedule, num_splits, out=None):
        assert kv.shape[1:] == (64, 1, 576)
        assert q.shape[1] == 1
        assert not causal
        # it faults on a block that there is not, wherever it stands
        assert ((table >= 0) & (table < kv.shape[0])).all()
        assert (lens <= 64 * table.shape[1]).all()
        assert scale >= 0  # it takes the largest product before it scales
        result = q.new_zeros(q.shape[0], 1, q.shape[2], d_v)
        lse = torch.full((q.shape[0], q.shape[2], 1), math.inf, device=q.device)
        for row, length in enumerate(lens.tolist()):
            if length:
                keys = kv[table[row].long(), :, 0].flatten(0, 1)[:length].float()
                scores = q[row, 0].float() @ keys.T * scale
                lse[row, :, 0] = torch.logsumexp(scores, -1)
                result[row, 0] = (scores.softmax(-1) @ keys[:, :d_v]).to(q.dtype)
        return result, lse, None, None

    library.impl("dense_decode_fwd", decode, "CompositeExplicitAutograd")
    yield library
    library._destroy()


@pytest.mark.parametrize("scale", [SCALE, -SCALE])
def test_flash_mla_gets_blocks_that_exist_and_gives_the_contract(
    scale: float,
    library: torch.library.Library,
    triton_lowering: None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Holes in the table, unknown requests, empty rows, more rows than fit one call."""
    provider = flash_mla.Provider("test", "", "test_flash_mla")
    monkeypatch.setattr(flash_mla, "find_provider", lambda: (provider, ""))
    monkeypatch.setattr(flash_mla, "MAX_ROWS_PER_CALL", 4)
    cache, q = filled_cache("bf16", 6, 64, device), queries(7, 3, torch.bfloat16, device)
    table = torch.tensor([[3, -1, 5], [99, 1, -(2**31)]], dtype=torch.int32, device=device)
    owners = torch.tensor([0, 0, 1, 1, 2, -1, 0], dtype=torch.int32, device=device)
    lens = torch.tensor([192, 130, 2**31 - 1, 64, 9, 9, -3], dtype=torch.int32, device=device)
    out, lse = q.new_full((7, 3, 512), math.nan), torch.full((7, 3), math.nan, device=device)
    flash_mla.paged_attention(q, cache, table, owners, lens, scale, "bf16", out=out, lse=lse)
    everything = torch.arange(192, dtype=torch.int32, device=device).expand(7, -1)
    expected = attention_oracle.attention(
        q, cache, everything, scale, topk_length=lens, block_table=table, req_id_per_token=owners
    )
    attention_oracle.assert_close(out, lse, expected)
    assert (lse[3:] == -math.inf).all()
    latent, rope = q.split((512, 64), dim=2)
    halves = torch.empty_like(out), torch.empty_like(lse)
    results = {"out": halves[0], "lse": halves[1]}
    flash_mla.paged_attention(latent, cache, table, owners, lens, scale, "bf16", q_rope=rope, **results)
    assert torch.equal(halves[0], out)
    assert torch.equal(halves[1], lse)


@pytest.mark.parametrize(("num_tokens", "num_blocks", "max_blocks"), [(0, 2, 2), (2, 0, 2), (2, 2, 0)])
def test_flash_mla_is_not_called_for_nothing(num_tokens: int, num_blocks: int, max_blocks: int) -> None:
    cache, q = filled_cache("bf16", num_blocks, 64, CPU), queries(num_tokens, 3, torch.bfloat16, CPU)
    tokens = torch.zeros(num_tokens, dtype=torch.int32)
    out, lse = torch.ones(num_tokens, 3, 512).bfloat16(), torch.ones(num_tokens, 3)
    table = torch.zeros(1, max_blocks, dtype=torch.int32)
    flash_mla.paged_attention(q, cache, table, tokens, tokens, SCALE, "bf16", out=out, lse=lse)
    assert not out.any()
    assert (lse == -math.inf).all()


def flash_attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, return_attn_probs
):
    """FlashAttention: causal from the bottom right, +inf for an empty row, nothing behind the last request."""
    assert return_attn_probs
    assert q.shape[2] == k.shape[2]
    assert all(part.data_ptr() % 16 == 0 and part.stride(0) % 8 == part.stride(1) % 8 == 0 for part in (q, k, v))
    out = q.new_full((q.shape[0], q.shape[1], v.shape[2]), math.nan)
    lse = torch.full((q.shape[1], q.shape[0]), math.nan, device=q.device)
    for request in range(len(cu_seqlens_q) - 1):
        rows = slice(int(cu_seqlens_q[request]), int(cu_seqlens_q[request + 1]))
        keys = slice(int(cu_seqlens_k[request]), int(cu_seqlens_k[request + 1]))
        assert rows.stop <= len(q)
        assert keys.stop <= len(k)
        group = q.shape[1] // k.shape[1]
        len_q, len_k = rows.stop - rows.start, keys.stop - keys.start
        assert len_q <= max_seqlen_q
        assert len_k <= max_seqlen_k
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k[keys].float().repeat_interleave(group, 1))
        scores = scores * softmax_scale
        if causal:
            hidden = torch.ones(len_q, len_k, dtype=torch.bool, device=q.device).triu(1 + len_k - len_q)
            scores = scores.masked_fill(hidden, -math.inf)
        row_lse = torch.logsumexp(scores, -1)
        weights = (scores - row_lse.unsqueeze(-1)).exp().nan_to_num(0.0)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v[keys].float().repeat_interleave(group, 1)).to(q.dtype)
        lse[:, rows] = torch.where(row_lse == -math.inf, math.inf, row_lse)
    return out, lse, None


@pytest.mark.parametrize("provider", flash_attn.PROVIDERS, ids=lambda provider: provider.module)
@pytest.mark.parametrize("dims", [(192, 128), (128, 128), (64, 96), (256, 256)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_flash_attention_gets_what_it_takes_and_gives_the_contract(
    provider: flash_attn.Provider,
    dims: tuple[int, int],
    causal: bool,
    triton_lowering: None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padding, odd strides, empty requests, lengths past the tensors; values padded where the kernel has one width."""

    def function(*args, **kwargs):
        q, _, v = args[:3]
        assert (q.shape[2], v.shape[2]) == flash_attn.width_of_values(provider, *dims)
        return flash_attention(*args, **kwargs)

    monkeypatch.setattr(flash_attn, "find_provider", lambda device: provider)
    monkeypatch.setattr(flash_attn, "_function", lambda module: function)
    shapes = (14, 4, dims[0]), (20, 2, dims[0] + 3), (20, 2, dims[1])
    q, k, v = (torch.randn(shape, device=device).bfloat16() for shape in shapes)
    k = k[..., 3:]
    starts_q = torch.tensor([0, 5, 5, 8, 12], dtype=torch.int32, device=device)
    starts_k = torch.tensor([0, 5, 9, 9, 99], dtype=torch.int32, device=device)
    arguments = (q, k, v, starts_q, starts_k, 5, 11, dims[0] ** -0.5)
    out, lse = flash_attn.compute_prefill(*arguments, causal=causal)
    expected = dense_oracle.prefill(
        q, k, v, starts_q, starts_k.clamp(max=20), dims[0] ** -0.5, causal=causal, operand=None
    )
    attention_oracle.assert_close(out, lse, expected)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert not out[12:].any()
    assert (lse[5:8] == -math.inf).all()
    buffers = torch.full_like(out, math.nan), torch.full_like(lse, math.nan)
    flash_attn.LOWERINGS["prefill_attention"].run(*arguments, causal=causal, out=buffers[0], lse=buffers[1])
    assert torch.equal(buffers[0], out)
    assert torch.equal(buffers[1], lse)


def test_flash_attention_is_chosen_by_gpu_and_by_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"flash_attn_interface", "flash_attn"}
    monkeypatch.setattr(torch_sdpa, "device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch_sdpa, "is_installed", lambda module: True)
    monkeypatch.setattr(flash_attn, "is_installed", lambda module: module in installed)
    for capability, module in (((9, 0), "flash_attn_interface"), ((8, 0), "flash_attn"), ((12, 0), "flash_attn")):
        monkeypatch.setattr(flash_attn, "device_capability", lambda device, capability=capability: capability)
        provider = flash_attn.find_provider(CUDA)
        assert provider is not None
        assert provider.module == module
        assert flash_attn.flash_reason(PREFILL) is None
    installed.clear()
    assert "pip install flash-attn" in str(flash_attn.flash_reason(PREFILL))


def test_blocks_are_compacted_as_python_would(device: torch.device, triton_lowering: None) -> None:
    from mla_ops.kernels.triton import dense_attention

    generator = torch.Generator().manual_seed(0)
    table = torch.randint(-3, 14, (5, 37), dtype=torch.int32, generator=generator)
    owners = torch.randint(-1, 6, (40,), dtype=torch.int32, generator=generator)
    lens = torch.randint(-5, 200, (40,), dtype=torch.int32, generator=generator)
    blocks, kept = dense_attention.compact_blocks(table.to(device), owners.to(device), lens.to(device), 11, 4)
    for token in range(40):
        owner, length = int(owners[token]), min(int(lens[token]), 37 * 4)
        row = table[owner].tolist() if 0 <= owner < 5 else []
        sizes = [(block, min(4, length - 4 * i)) for i, block in enumerate(row) if 4 * i < length and 0 <= block < 11]
        expected = [block for block, _ in sizes]
        assert blocks[token].tolist() == expected + [0] * (37 - len(expected))
        assert int(kept[token]) == sum(size for _, size in sizes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": CPU}, "compute capability 8.0"),
        ({"dtype": torch.float32}, "bfloat16 or float16, these are torch.float32"),
        ({"head_dim_v": 80}, None),
        ({"head_dim": 100}, "multiples of 8, these are 100 and 128"),
    ],
    ids=["CPU", "float32", "80", "100"],
)
def test_what_torch_kernels_refuse(
    change: dict[str, object], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_sdpa, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch_sdpa, "is_installed", lambda module: True)
    reason = torch_sdpa.prefill_reason(PREFILL._replace(**change))
    assert reason is None if words is None else words in str(reason)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"block_size": 32}, "blocks of 64, this cache is bf16 with rows of 576 in blocks of 32"),
        ({"cache_format": "fp8_ds_mla"}, "this cache is fp8_ds_mla"),
        ({"head_dim": 512}, "rows of 512"),
        ({"dtype": torch.float16}, "bfloat16 queries"),
    ],
    ids=["as it wants it", "block size", "format", "head dim", "float16"],
)
def test_what_flash_mla_refuses(
    library: torch.library.Library, change: dict[str, object], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = flash_mla.Provider("test", "", "test_flash_mla")
    monkeypatch.setattr(flash_mla, "find_provider", lambda: (provider, ""))
    monkeypatch.setattr(flash_mla, "is_installed", lambda module: True)
    reason = flash_mla.dense_reason(PAGED._replace(**change))
    assert reason is None if words is None else words in str(reason)


def test_flash_mla_makes_way_up_to_sixteen_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"hopper": "it reads fp8_ds_mla", "flash_attn": "there is none", "torch_sdpa": "there is none"}
    monkeypatch.setattr(dispatch, "unsupported_reason", lambda backend, call: refused.get(backend))
    for num_heads, expected in ((1, "triton"), (16, "triton"), (17, "flash_mla"), (128, "flash_mla")):
        dispatch._choose.cache_clear()
        call = PAGED._replace(num_heads=num_heads)
        assert dispatch.select_name(call) == expected
        assert dispatch.explain(call).chosen == expected
        with dispatch.override(paged_attention="flash_mla"):
            assert dispatch.select_name(call) == "flash_mla"
            assert dispatch.explain(call).chosen == "flash_mla"
    dispatch._choose.cache_clear()


@pytest.mark.parametrize(
    ("runs", "num_heads", "expected"),
    [
        (("hopper", "flash_mla", "triton"), 16, "hopper"),
        (("hopper", "flash_mla", "triton"), 128, "hopper"),
        (("flash_mla", "triton"), 16, "triton"),
        (("flash_mla", "triton"), 17, "flash_mla"),
    ],
)
def test_paged_attention_on_hopper(
    runs: tuple[str, ...], num_heads: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is that of the times in docs/results/dense_attention-h200.txt."""
    monkeypatch.setattr(
        dispatch, "unsupported_reason", lambda backend, call: None if backend in runs else "it does not run"
    )
    dispatch._choose.cache_clear()
    call = PAGED._replace(num_heads=num_heads, cache_format="bf16")
    assert dispatch.select_name(call) == expected
    assert dispatch.explain(call).chosen == expected
    dispatch._choose.cache_clear()


def test_what_a_lowering_allocates_itself_is_returned_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy where a library cannot write into the caller's buffers; `.out` copies."""
    made = torch.ones(3, 2, 128).bfloat16(), torch.ones(3, 2)

    def run(*args, out, lse, **kwargs):
        out.copy_(made[0])
        lse.copy_(made[1])

    lowering = dispatch.Lowering(run, compute=lambda *args, **kwargs: made)
    monkeypatch.setattr(dispatch, "select", lambda call: lowering)
    q, starts = torch.zeros(3, 2, 128).bfloat16(), torch.tensor([0, 3], dtype=torch.int32)
    arguments = (q, q, q, starts, starts, 3, 3, 1.0)
    found = torch.ops.mla.prefill_attention(*arguments)
    assert [tensor.data_ptr() for tensor in found] == [tensor.data_ptr() for tensor in made]
    buffers = torch.zeros(3, 2, 128).bfloat16(), torch.zeros(3, 2)
    torch.ops.mla.prefill_attention.out(*arguments, out=buffers[0], lse=buffers[1])
    assert torch.equal(buffers[0], made[0])
    assert torch.equal(buffers[1], made[1])
