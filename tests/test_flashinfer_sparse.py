"""FlashInfer's sparse MLA as a lowering: what the adapter passes on, and what it makes of the results.

`flashinfer_stand_ins.py` plays FlashInfer; `test_flashinfer_installed.py` asks an installed one what it does without a
GPU. No GPU of these kernels has run the adapter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import attention_oracle
import pytest
import torch
from attention_inputs import SCALE, filled_cache, poison_unused, queries, some_indices
from flashinfer_stand_ins import CPU, Sm120, played, sm120_inputs, trtllm_calls, widened  # noqa: F401 (a fixture)

from mla_ops import dispatch, formats
from mla_ops.dispatch import Call
from mla_ops.kernels.flashinfer import LOWERINGS, installation, sparse

PACKED = ["fp8_ds_mla", "fp8_ds_mla_v4"]
# the last two are a decode and a prefill
SHAPES = [(1, 3, 40), (7, 8, 130), (4, 20, 64), (66, 5, 70)]


def sink_later(expected: attention_oracle.Expected) -> attention_oracle.Expected:
    """The sink is applied to an output that was rounded already."""
    expected.out_tolerance += attention_oracle.UNIT[torch.bfloat16] * expected.out.abs()
    return expected


@pytest.mark.parametrize("cache_format", PACKED)
@pytest.mark.parametrize(("num_tokens", "num_heads", "topk"), SHAPES)
def test_sm120_holds_the_contract_but_for_what_it_rounds(
    cache_format: str, num_tokens: int, num_heads: int, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holes, garbage, lengths, a sink, rows without keys; decode and prefill."""
    monkeypatch.setattr(Sm120, "rounds", False)
    q, cache, indices = sm120_inputs(cache_format, num_tokens, num_heads, topk)
    indices[0] = -1
    length = torch.randint(-1, topk + 5, (num_tokens,), dtype=torch.int32)
    sink = torch.randn(num_heads)
    sink[-1], sink[0] = math.inf, -math.inf
    options = {"topk_length": length, "attn_sink": sink}
    out, lse = sparse.compute_sparse(q, cache, indices, SCALE, cache_format, **options)
    expected = attention_oracle.attention(q, cache, indices, SCALE, cache_format=cache_format, **options)
    attention_oracle.assert_close(out, lse, sink_later(expected))
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert not out[0].any()
    assert (lse[0] == -math.inf).all()
    assert not out[:, -1].any()
    call = Sm120.calls[-1]
    assert call["attn_sink"] is None
    assert call["lse_scale"] == 1.0


@pytest.mark.parametrize("cache_format", PACKED)
@pytest.mark.parametrize(("num_tokens", "num_heads", "topk"), SHAPES)
def test_what_sm120_rounds_stays_within_the_bound_that_its_docstring_states(
    cache_format: str, num_tokens: int, num_heads: int, topk: int
) -> None:
    """Scores are so small that the bound says something: it grows as the exponential of their error."""
    q, cache, indices = sm120_inputs(cache_format, num_tokens, num_heads, topk)
    q /= 16
    out, lse = sparse.compute_sparse(q, cache, indices, SCALE, cache_format)
    expected = attention_oracle.attention(q, cache, indices, SCALE, cache_format=cache_format)
    source = attention_oracle.Source(cache, cache_format, indices)
    attention_oracle.assert_close(out, lse, widened(expected, q, source))


@pytest.mark.parametrize("cache_format", PACKED)
def test_it_is_more_than_the_contract_allows(cache_format: str) -> None:
    """So that dispatch must not choose it by itself."""
    q, cache, indices = sm120_inputs(cache_format, 4, 16, 64)
    out, lse = sparse.compute_sparse(q, cache, indices, SCALE, cache_format)
    expected = attention_oracle.attention(q, cache, indices, SCALE, cache_format=cache_format, operand=q.dtype)
    with pytest.raises(AssertionError, match="beyond their bound"):
        attention_oracle.assert_close(out, lse, expected)


@pytest.mark.parametrize("num_tokens", [3, 70])
def test_two_caches_share_a_softmax(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sm120, "rounds", False)
    q, cache, indices = sm120_inputs("fp8_ds_mla_v4", num_tokens, 6, 40)
    extra, chosen = filled_cache("fp8_ds_mla_v4", 30, 2, CPU), some_indices(num_tokens, 70, 60, CPU)
    length = torch.randint(0, 71, (num_tokens,), dtype=torch.int32)
    arguments = (q, cache, indices, SCALE, "fp8_ds_mla_v4", extra, chosen, "fp8_ds_mla_v4")
    out, lse = sparse.compute_extra(*arguments, extra_topk_length=length)
    source = attention_oracle.Source(extra, "fp8_ds_mla_v4", chosen, length)
    expected = attention_oracle.attention(q, cache, indices, SCALE, cache_format="fp8_ds_mla_v4", extra=source)
    attention_oracle.assert_close(out, lse, expected)
    call = Sm120.calls[-1]
    assert call["extra_kv_cache"].shape == (30, 2, 584)
    assert call["extra_topk_length"] is not None


@pytest.mark.parametrize("empty", ["main", "extra"])
def test_a_cache_that_holds_nothing_is_not_passed_on(empty: str) -> None:
    q, cache, indices = sm120_inputs("fp8_ds_mla_v4", 3, 6, 40)
    nothing, none = filled_cache("fp8_ds_mla_v4", 0, 16, CPU), indices[:, :7]
    pairs = [(cache, indices), (nothing, none)] if empty == "extra" else [(nothing, none), (cache, indices)]
    (first, first_indices), (second, second_indices) = pairs
    both = sparse.compute_extra(
        q, first, first_indices, SCALE, "fp8_ds_mla_v4", second, second_indices, "fp8_ds_mla_v4"
    )
    alone = sparse.compute_sparse(q, cache, indices, SCALE, "fp8_ds_mla_v4")
    assert all(torch.equal(left, right) for left, right in zip(both, alone, strict=True))


def test_request_local_indices_queries_in_halves_and_buffers() -> None:
    q, cache, _ = sm120_inputs("fp8_ds_mla", 4, 3, 1)
    table = torch.tensor([[3, -1, 1], [99, 4, 0]], dtype=torch.int32)
    owners = torch.tensor([0, 1, 2, 1], dtype=torch.int32)
    indices = some_indices(4, 50, 48, CPU)
    named = {"block_table": table, "req_id_per_token": owners}
    out, lse = sparse.compute_sparse(q, cache, indices, SCALE, "fp8_ds_mla", **named)
    slots = sparse.slots_or_minus_one(cache, indices, "fp8_ds_mla", None, table, owners)
    direct = sparse.compute_sparse(q, cache, slots, SCALE, "fp8_ds_mla")
    latent, rope = q.split((512, 64), dim=2)
    halves = sparse.compute_sparse(latent, cache, indices, SCALE, "fp8_ds_mla", q_rope=rope, **named)
    buffers = torch.full_like(out, math.nan), torch.full_like(lse, math.nan)
    LOWERINGS["paged_sparse_attention"].run(
        q, cache, indices, SCALE, "fp8_ds_mla", **named, out=buffers[0], lse=buffers[1]
    )
    for other in (direct, halves, buffers):
        assert torch.equal(other[0], out)
        assert torch.equal(other[1], lse)


def test_prefill_over_a_pool_with_gaps_goes_as_decodes() -> None:
    pool = torch.zeros(5, 16 * 656 + 32, dtype=torch.uint8)
    q, cache, indices = sm120_inputs("fp8_ds_mla", 130, 8, 64)
    gapped = pool[:, : 16 * 656].unflatten(1, (16, 656))
    gapped.copy_(cache)
    found = sparse.compute_sparse(q, gapped, indices, SCALE, "fp8_ds_mla")
    assert [len(call["q"]) for call in Sm120.calls] == [64, 64, 2]
    wanted = sparse.compute_sparse(q, cache, indices, SCALE, "fp8_ds_mla")
    assert len(Sm120.calls) == 4
    assert all(torch.equal(left, right) for left, right in zip(found, wanted, strict=True))


@pytest.mark.parametrize("mark", [-math.inf, -1e30])
def test_rows_without_keys_however_they_are_marked(mark: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sm120, "no_keys", mark)
    q, cache, indices = sm120_inputs("fp8_ds_mla", 2, 8, 64)
    out, lse = sparse.compute_sparse(q, cache, indices.fill_(-1), SCALE, "fp8_ds_mla", attn_sink=torch.zeros(8))
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize(("num_tokens", "num_blocks", "topk"), [(0, 2, 8), (2, 0, 8), (2, 2, 0)])
@pytest.mark.parametrize("cache_format", [*PACKED, "bf16"])
def test_nothing_to_attend_to_calls_nothing(cache_format: str, num_tokens: int, num_blocks: int, topk: int) -> None:
    cache = filled_cache(cache_format, num_blocks, 64, CPU)
    q = queries(num_tokens, 3, torch.bfloat16, CPU, formats.FORMATS[cache_format].head_dims[0])
    indices = torch.zeros(num_tokens, topk, dtype=torch.int32)
    out, lse = sparse.compute_sparse(q, cache, indices, SCALE, cache_format)
    assert out.shape == (num_tokens, 3, 512)
    assert not out.any()
    assert (lse == -math.inf).all()
    assert not Sm120.calls
    assert not trtllm_calls


@pytest.mark.parametrize(("num_tokens", "num_heads", "topk", "scale"), [(3, 5, 40, SCALE), (2, 70, 200, -SCALE)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_sm100_holds_the_contract(num_tokens: int, num_heads: int, topk: int, scale: float, block_size: int) -> None:
    """Keys that no index names are NaN: no tile may hold it. Rows without keys, a sink, a negative scale."""
    cache, q = filled_cache("bf16", 8, block_size, CPU), queries(num_tokens, num_heads, torch.bfloat16, CPU)
    indices = some_indices(num_tokens, topk, 8 * block_size, CPU)
    indices[0] = -1
    length = torch.randint(topk // 2, topk + 5, (num_tokens,), dtype=torch.int32)
    sink = torch.randn(num_heads)
    named = indices[:, :].clone()
    named[torch.arange(topk) >= length[:, None]] = -1
    used = named[(named >= 0) & (named < 8 * block_size)].long()
    dirty = poison_unused(cache, used, "bf16")
    out, lse = sparse.compute_sparse(q, dirty, indices, scale, "bf16", topk_length=length, attn_sink=sink)
    expected = attention_oracle.attention(
        q, cache, indices, scale, topk_length=length, attn_sink=sink, operand=torch.bfloat16
    )
    attention_oracle.assert_close(out, lse, sink_later(expected))
    assert not out[0].any()
    assert (lse[0] == -math.inf).all()


def test_sm100_counts_gaps_between_blocks_as_rows() -> None:
    pool = torch.full((4, 70, 576), math.nan, dtype=torch.bfloat16)
    gapped, cache = pool[:, :64], filled_cache("bf16", 4, 64, CPU)
    gapped.copy_(cache)
    q, indices = queries(3, 4, torch.bfloat16, CPU), some_indices(3, 50, 256, CPU)
    found = sparse.compute_sparse(q, gapped, indices, SCALE, "bf16")
    wanted = sparse.compute_sparse(q, cache, indices, SCALE, "bf16")
    assert all(torch.equal(left, right) for left, right in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "width"), [(4, 64, 64 * 576 + 8), (3, 5, 5 * 576), (4, 16, 20 * 576)]
)
def test_sm100_names_a_cache_that_it_cannot_read(num_blocks: int, block_size: int, width: int) -> None:
    pool = torch.zeros(num_blocks, width, dtype=torch.bfloat16)
    cache = pool[:, : block_size * 576].unflatten(1, (block_size, 576))
    q, indices = queries(1, 4, torch.bfloat16, CPU), torch.zeros(1, 8, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=rf"paged_sparse_attention: .* blocks of {block_size}, "):
        sparse.compute_sparse(q, cache, indices, SCALE, "bf16")


def test_sm100_cuts_calls_by_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, q = filled_cache("bf16", 2, 64, CPU), queries(5, 4, torch.bfloat16, CPU)
    indices = some_indices(5, 60, 128, CPU)
    whole = sparse.compute_sparse(q, cache, indices, SCALE, "bf16")
    monkeypatch.setattr(sparse, "TRTLLM_WORKSPACE_BYTES", sparse.TRTLLM_PARTIAL_BYTES + 2 * 128 * 2048)
    cut = sparse.compute_sparse(q, cache, indices, SCALE, "bf16")
    assert [len(call["query"]) for call in trtllm_calls] == [5, 2, 2, 1]
    assert all(torch.equal(left, right) for left, right in zip(whole, cut, strict=True))


def test_a_shape_that_is_new_in_a_capture_is_planned_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def beside(device: torch.device) -> Iterator[None]:
        Sm120.capturing = False
        yield
        Sm120.capturing = True

    monkeypatch.setattr(sparse, "is_capturing", lambda device: Sm120.capturing)
    monkeypatch.setattr(sparse, "_beside_the_capture", beside)
    q, cache, indices = sm120_inputs("fp8_ds_mla", 3, 8, 64)
    eager = sparse.compute_sparse(q, cache, indices, SCALE, "fp8_ds_mla")
    monkeypatch.setattr(Sm120, "capturing", True)
    sparse.compute_sparse(q, cache, indices, SCALE, "fp8_ds_mla")
    assert len(Sm120.calls) == 2
    captured = sparse.compute_sparse(q[:2], cache, indices[:2], SCALE, "fp8_ds_mla")
    sparse.compute_sparse(q[1:], cache, indices[1:], SCALE, "fp8_ds_mla")
    assert len(Sm120.calls) == 5
    warm_up, real = Sm120.calls[2:4]
    assert not warm_up["q"].any()
    assert not warm_up["indices"].any()
    assert warm_up["kv_cache"].data_ptr() == real["kv_cache"].data_ptr()
    assert warm_up["output"].data_ptr() != real["output"].data_ptr()
    assert torch.equal(captured[0], eager[0][:2])


def on_gpu(query, kv_cache, block_tables, seq_lens, out, lse, bmm1_scale, **_):
    """`trtllm` of pages that are not apart, without a word to the host; it refuses a capture of what is new to it."""
    if torch.cuda.is_current_stream_capturing() and query.shape not in known:
        raise ValueError("it has not been planned")
    known.add(query.shape)
    torch.empty(2**28, dtype=torch.uint8, device=query.device)  # memory that the allocator has to ask CUDA for
    keys = kv_cache.flatten(0, 1)[block_tables[:, 0].long()].float()
    scores = torch.einsum("thd,tkd->thk", query[:, 0].float(), keys) * bmm1_scale
    behind = torch.arange(keys.shape[1], device=query.device) >= seq_lens[:, None, None]
    scores = scores.masked_fill(behind, -math.inf)
    out[:, 0] = (scores.softmax(-1) @ keys[..., :512]).bfloat16()
    lse.copy_(torch.logsumexp(scores, -1) / math.log(2))


known: set[torch.Size] = set()


@pytest.mark.gpu
def test_a_graph_follows_its_inputs_and_needs_no_call_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter's own work can be captured, on any GPU; FlashInfer is played."""
    device = torch.device("cuda", torch.cuda.current_device())
    monkeypatch.setattr(sparse, "api", lambda name: on_gpu)
    known.clear()
    cache, q = filled_cache("bf16", 5, 64, device), queries(7, 5, torch.bfloat16, device)
    indices, sink = some_indices(7, 200, 320, device), torch.randn(5, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sparse.compute_sparse(q, cache, indices, SCALE, "bf16", attn_sink=sink)
    for _ in range(2):
        q.normal_()
        indices.copy_(some_indices(7, 200, 320, device))
        indices[3] = -1
        graph.replay()
        eager = sparse.compute_sparse(q, cache, indices, SCALE, "bf16", attn_sink=sink)
        expected = attention_oracle.attention(q, cache, indices, SCALE, attn_sink=sink, operand=torch.bfloat16)
        for out, lse in (captured, eager):
            attention_oracle.assert_close(out, lse, sink_later(expected))


SM120 = Call("paged_sparse_attention", dispatch.stand_in((12, 0)), torch.bfloat16, "fp8_ds_mla", 576, 128, 4, 2048)
BOTH = SM120._replace(
    op="paged_sparse_attention.extra",
    cache_format="fp8_ds_mla_v4",
    head_dim=512,
    extra_cache_format="fp8_ds_mla_v4",
    extra_topk=512,
)
SM100 = SM120._replace(device=dispatch.stand_in((10, 3)), cache_format="bf16")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    packages = {"flashinfer", "flashinfer_jit_cache"}
    monkeypatch.setattr(installation, "is_installed", lambda module: module in packages)
    monkeypatch.setattr(installation, "_has_nvcc", lambda: False)
    dispatch._choose.cache_clear()
    yield packages
    dispatch._choose.cache_clear()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (SM120, None),
        (SM120._replace(device=dispatch.stand_in((12, 1)), cache_format="fp8_ds_mla_v4", head_dim=512), None),
        (BOTH, None),
        (SM100, None),
        (SM120._replace(device=CPU), "10.0, 10.3, 12.0 or 12.1"),
        (SM120._replace(device=dispatch.stand_in((9, 0))), "10.0, 10.3, 12.0 or 12.1"),
        (SM120._replace(dtype=torch.float16), "bfloat16 queries, these are torch.float16"),
        (SM120._replace(cache_format="bf16"), "reads fp8_ds_mla and fp8_ds_mla_v4, this cache is bf16"),
        (BOTH._replace(extra_cache_format="fp8_ds_mla"), "these are fp8_ds_mla_v4 and fp8_ds_mla"),
        (SM100._replace(cache_format="fp8_ds_mla"), "bf16 rows of 576, this cache is fp8_ds_mla"),
        (SM100._replace(head_dim=512), "with rows of 512"),
        (BOTH._replace(device=SM100.device), "only with a window of 128 keys"),
    ],
)
def test_what_it_refuses(call: Call, words: str | None, installed: set[str]) -> None:
    reason = LOWERINGS[call.op].unsupported_reason(call)
    assert reason is None if words is None else words in str(reason)


@pytest.mark.parametrize("call", [SM120, BOTH, SM100], ids=["SM120", "two caches", "SM100"])
def test_dispatch_takes_it_only_when_it_is_named(call: Call, installed: set[str]) -> None:
    assert dispatch.select_name(call) == "triton"
    explanation = dispatch.explain(call)
    assert "only when asked for with dispatch.override" in explanation.refused["flashinfer"]
    assert explanation.refused["flashinfer"].endswith(dispatch.ON_REQUEST["flashinfer", call.op])
    with dispatch.override(paged_sparse_attention="flashinfer"):
        assert dispatch.select_name(call) == "flashinfer"
        with pytest.raises(NotImplementedError, match="it is not deterministic"):
            dispatch.select_name(call._replace(deterministic=True))
    with dispatch.override(**dispatch._parse_environment("paged_sparse_attention=flashinfer")):
        assert dispatch.select_name(call) == "flashinfer"
        installed.clear()
        dispatch._choose.cache_clear()
        with pytest.raises(NotImplementedError, match="pip install flashinfer-python"):
            dispatch.select_name(call)


def test_doctor_says_what_it_rounds(installed: set[str]) -> None:
    from mla_ops import cli

    table = cli._lowerings(dispatch.stand_in((12, 0)))
    row = next(line for line in table if line.split()[0] == "paged_sparse_attention")
    number = row[row.index("available (") :].split("(")[1].split(")")[0]
    why = dispatch.ON_REQUEST["flashinfer", "paged_sparse_attention"]
    assert f"  ({number}) on request only: {why}" in table
    assert "e4m3" in why
