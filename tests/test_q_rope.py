"""Queries in two tensors, the latent dims and those of RoPE, give the bits that they give in one, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_inputs import (
    QUERIES,
    SCALE,
    filled_cache,
    queries,
    rows_with_wide_scales,
    some_indices,
)
from torch._inductor.utils import run_and_get_code

import mla_ops
from mla_ops import dispatch
from mla_ops.testing.checks import assert_same_bits, large_allocations, record_calls

Results = tuple[torch.Tensor, torch.Tensor]
LATENT = 512


def as_models_have_them(q: torch.Tensor) -> Results:
    """The latent dims as a batched product leaves them, heads first; RoPE behind 128 other dims of a projection."""
    latent = q[..., :LATENT].transpose(0, 1).contiguous().transpose(0, 1)
    projected = torch.cat((torch.full_like(q[..., :128], torch.nan), q[..., LATENT:]), dim=-1)
    return latent, projected[..., 128:]


def as_slices(q: torch.Tensor) -> Results:
    return q[..., :LATENT], q[..., LATENT:]


def both_heads_first(q: torch.Tensor) -> Results:
    latent, rope = (half.transpose(0, 1).contiguous().transpose(0, 1) for half in as_slices(q))
    return latent, rope


def anywhere(q: torch.Tensor) -> Results:
    """Rows that begin at no multiple of 16 bytes."""
    num_tokens, num_heads, _ = q.shape
    latent = q.new_full((num_tokens, num_heads, LATENT + 3), torch.nan)[..., 1 : LATENT + 1]
    rope = q.new_full((num_tokens, num_heads + 1, 64 + 5), torch.nan)[:, 1:, 3:67]
    return latent.copy_(q[..., :LATENT]), rope.copy_(q[..., LATENT:])


Place = Callable[[torch.Tensor], Results]
PLACES: list[Place] = [as_models_have_them, as_slices, both_heads_first, anywhere]
# exact operands take long in the interpreter, and read the query in a way of their own: one place for each
CASES = [(*query, place) for query in QUERIES if query[1] == torch.bfloat16 for place in PLACES]
CASES += [(*query, as_models_have_them) for query in QUERIES if query[1] != torch.bfloat16]
CASES = [case for case in CASES if case[0] != "fp8_ds_mla_v4"]
every_case = pytest.mark.parametrize(("cache_format", "dtype", "place"), CASES)


def sparse(q: torch.Tensor, *rest: Any, **options: Any) -> Results:
    results: Results = torch.ops.mla.paged_sparse_attention(q, *rest, **options)
    return results


def dense(q: torch.Tensor, *rest: Any, **options: Any) -> Results:
    results: Results = torch.ops.mla.paged_attention(q, *rest, **options)
    return results


def check(attend: Callable[..., Results], place: Place, q: torch.Tensor, *rest: Any, **options: Any) -> Results:
    """The bits of both forms, and for queries as models have them those that come into the caller's buffers."""
    whole = attend(q, *rest, **options)
    latent, rope = place(q)
    found = [attend(latent, *rest, q_rope=rope, **options)]
    if place is as_models_have_them:
        buffers = {"out": torch.full_like(whole[0], 7), "lse": torch.full_like(whole[1], 7)}
        op = torch.ops.mla.paged_sparse_attention if attend is sparse else torch.ops.mla.paged_attention
        op.out(latent, *rest, q_rope=rope, **options, **buffers)
        found.append((buffers["out"], buffers["lse"]))
    for results in found:
        for got, wanted, name in zip(results, whole, ("out", "lse"), strict=True):
            assert_same_bits(got, wanted, name)
    assert whole[1].isfinite().any()
    return whole


def table_of(num_requests: int, num_blocks: int, device: torch.device) -> torch.Tensor:
    return torch.randint(-1, num_blocks, (num_requests, 3), dtype=torch.int32, device=device)


@every_case
def test_sparse_attention(
    lowering: str, device: torch.device, cache_format: str, dtype: torch.dtype, place: Place
) -> None:
    cache, q = filled_cache(cache_format, 6, 16, device), queries(3, 5, dtype, device)
    options = {
        "block_table": table_of(2, 6, device),
        "req_id_per_token": torch.tensor([0, 1, 1], dtype=torch.int32, device=device),
        "topk_length": torch.tensor([20, 7, 20], dtype=torch.int32, device=device),
        "attn_sink": torch.randn(5, device=device),
    }
    check(sparse, place, q, cache, some_indices(3, 20, 48, device), SCALE, cache_format, **options)
    check(sparse, place, q, cache, some_indices(3, 20, 96, device), SCALE, cache_format, deterministic=True)


@every_case
def test_dense_attention(
    lowering: str, device: torch.device, cache_format: str, dtype: torch.dtype, place: Place
) -> None:
    """Two tokens of each of two requests, which share a program, and a request for each token."""
    cache, q = filled_cache(cache_format, 6, 16, device), queries(4, 5, dtype, device)
    lens = torch.tensor([3, 4, 30, 31], dtype=torch.int32, device=device)
    for owners in ([0, 0, 1, 1], [3, 1, 0, 2]):
        table = table_of(max(owners) + 1, 6, device).abs()
        own = torch.tensor(owners, dtype=torch.int32, device=device)
        check(dense, place, q, cache, table, own, lens, SCALE, cache_format)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_few_tokens(lowering: str, device: torch.device, num_tokens: int) -> None:
    cache, q = filled_cache("fp8_ds_mla", 2, 16, device), queries(num_tokens, 3, torch.bfloat16, device)
    latent, rope = as_models_have_them(q)
    indices = some_indices(num_tokens, 9, 32, device)
    found = mla_ops.paged_sparse_attention(latent, cache, indices, SCALE, "fp8_ds_mla", q_rope=rope)
    for got, wanted in zip(found, sparse(q, cache, indices, SCALE, "fp8_ds_mla"), strict=True):
        assert_same_bits(got, wanted, "result")


def test_an_extra_cache_takes_whole_queries(device: torch.device) -> None:
    """DeepSeek-V4, whose layers have two caches, absorbs nothing."""
    cache, q = filled_cache("bf16", 2, 16, device), queries(2, 3, torch.bfloat16, device)
    indices = some_indices(2, 9, 32, device)
    latent, rope = as_slices(q)
    with pytest.raises(ValueError, match="paged_sparse_attention: q_rope does not go with an extra cache"):
        mla_ops.paged_sparse_attention(
            latent, cache, indices, SCALE, "bf16", q_rope=rope, extra_kv_cache=cache, extra_indices=indices
        )


# ---- compiled -------------------------------------------------------------------------------------------------------


def absorb_and_attend(q: torch.Tensor, w_uk: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor) -> Any:
    """A layer's queries: a batched product, heads first, and RoPE dims behind others."""
    latent = torch.bmm(q[..., :128].transpose(0, 1), w_uk).transpose(0, 1)
    rest = {"q_rope": q[..., 128:] * 2}
    table, owners = indices[:, :2].abs() % 4, torch.zeros_like(indices[:, 0])
    sparse_results = sparse(latent, cache, indices, SCALE, "bf16", **rest)
    return sparse_results, dense(latent, cache, table, owners, indices[:, 0].abs(), SCALE, "bf16", **rest)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_compiled_code_joins_nothing(fresh_dynamo: None, dynamic: bool | None) -> None:
    device = torch.device("cpu")
    cache, w_uk = filled_cache("bf16", 4, 16, device), queries(3, 128, torch.bfloat16, device, LATENT)
    compiled = torch.compile(absorb_and_attend, fullgraph=True, dynamic=dynamic)
    for num_tokens in (5, 2, 33) if dynamic else (5,):
        given = (
            queries(num_tokens, 3, torch.bfloat16, device, 192),
            w_uk,
            cache,
            some_indices(num_tokens, 9, 64, device),
        )
        expected = absorb_and_attend(*given)
        with record_calls() as calls:
            actual, codes = run_and_get_code(compiled, *given)
        for got, wanted in zip(sum(actual, ()), sum(expected, ()), strict=True):
            assert_same_bits(got, wanted, "compiled against eager")
        assert large_allocations(codes, num_tokens * 3 * 576) == []
        assert [op for op, _ in calls] == ["paged_sparse_attention", "paged_attention"]
        for _, arguments in calls:
            assert arguments["q"].shape == (num_tokens, 3, LATENT)
            assert arguments["q"].stride() == (LATENT, num_tokens * LATENT, 1)


def test_an_exported_layer_takes_any_number_of_tokens(fresh_dynamo: None) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, w_uk: Any, cache: Any, indices: Any) -> Any:
            return absorb_and_attend(q, w_uk, cache, indices)

    def inputs(num_tokens: int) -> tuple[torch.Tensor, ...]:
        device = torch.device("cpu")
        cache, w_uk = filled_cache("bf16", 4, 16, device), queries(3, 128, torch.bfloat16, device, LATENT)
        q = queries(num_tokens, 3, torch.bfloat16, device, 192)
        return q, w_uk, cache, some_indices(num_tokens, 9, 64, device)

    tokens = {0: torch.export.Dim("num_tokens", min=0, max=4096)}
    shapes = {"q": tokens, "w_uk": None, "cache": None, "indices": tokens}
    module = torch.export.export(Layer(), inputs(5), dynamic_shapes=shapes).module()
    for num_tokens in (0, 1, 5, 33):
        given = inputs(num_tokens)
        for got, wanted in zip(sum(module(*given), ()), sum(absorb_and_attend(*given), ()), strict=True):
            assert_same_bits(got, wanted, f"exported, {num_tokens} tokens")


# ---- on a GPU -------------------------------------------------------------------------------------------------------

GPU_SHAPES = [(1, 128), (1, 16), (5, 1), (8, 128), (33, 64), (40, 128), (70, 24), (130, 8), (140, 17), (150, 32)]
GPU_SHAPES += [(400, 128), (600, 16)]


def under(own: str, op: str, *facts: Any, **more: Any) -> Any:
    """The lowering of the test, for a call of these facts; skips what it does not run."""
    reason = dispatch.unsupported_reason(own, dispatch.Call(op, *facts, **more))
    if reason is not None:
        pytest.skip(reason)
    return dispatch.override(own)


@pytest.mark.gpu
@pytest.mark.parametrize("own", ["hopper", "triton", "flash_mla"])
@pytest.mark.parametrize("lengths", [False, True], ids=["full rows", "lengths"])
@pytest.mark.parametrize(("num_tokens", "num_heads"), GPU_SHAPES)
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
def test_sparse_attention_on_a_gpu(cache_format: str, num_tokens: int, num_heads: int, lengths: bool, own: str) -> None:
    device, topk = torch.device("cuda"), 1100
    q, cache = queries(num_tokens, num_heads, torch.bfloat16, device), filled_cache(cache_format, 200, 64, device)
    facts = (device, q.dtype, cache_format, 576, num_heads, num_tokens, topk)
    table = torch.randint(-1, 201, (7, 30), dtype=torch.int32, device=device)
    options = {"block_table": table, "req_id_per_token": torch.arange(num_tokens, device=device).int() % 7}
    if lengths:
        options["topk_length"] = torch.randint(0, topk + 1, (num_tokens,), dtype=torch.int32, device=device)
        options["topk_length"][0] = topk
    indices = some_indices(num_tokens, topk, 30 * 64, device)
    with under(own, "paged_sparse_attention", *facts):
        for place in (as_models_have_them, anywhere):
            check(sparse, place, q, cache, indices, SCALE, cache_format, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("own", ["hopper", "triton", "flash_mla", "flashinfer"])
@pytest.mark.parametrize(("num_tokens", "num_heads"), GPU_SHAPES)
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
def test_dense_attention_on_a_gpu(cache_format: str, num_tokens: int, num_heads: int, own: str) -> None:
    device = torch.device("cuda")
    q, cache = queries(num_tokens, num_heads, torch.bfloat16, device), filled_cache(cache_format, 200, 64, device)
    facts = (device, q.dtype, cache_format, 576, num_heads, num_tokens, 64 * 64)
    lens = torch.randint(0, 64 * 64 + 1, (num_tokens,), dtype=torch.int32, device=device)
    lens[0] = 64 * 64
    with under(own, "paged_attention", *facts, block_size=64):
        for together in (1, 4):
            num_requests = -(-num_tokens // together)
            table = torch.randint(0, 200, (num_requests, 64), dtype=torch.int32, device=device)
            owners = torch.arange(num_tokens, device=device).int() // together
            for place in (as_models_have_them, anywhere):
                check(dense, place, q, cache, table, owners, lens, SCALE, cache_format)


@pytest.mark.gpu
@pytest.mark.parametrize("own", ["hopper", "triton"])
@pytest.mark.parametrize("num_heads", [16, 24, 32, 64, 128])
@pytest.mark.parametrize("num_tokens", [1, 4, 150])
def test_scales_for_the_second_walk(num_tokens: int, num_heads: int, own: str) -> None:
    """Keys whose scales float16 does not hold meet the queries as they came. FlashMLA has no such walk."""
    device = torch.device("cuda")
    for power in (-90, 60):
        cache, indices = rows_with_wide_scales("fp8_ds_mla", power, max(num_tokens, 4), 640, device)
        q = queries(num_tokens, num_heads, torch.bfloat16, device)
        with dispatch.override(paged_sparse_attention=own):
            check(sparse, as_models_have_them, q, cache, indices[:num_tokens], SCALE, "fp8_ds_mla")


@pytest.mark.gpu
@pytest.mark.parametrize("lowering", ["hopper", "triton"])
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(1, 16), (9, 128), (64, 16), (33, 64)])
def test_replays_give_the_bits_of_eager(num_tokens: int, num_heads: int, cache_format: str, lowering: str) -> None:
    """A captured batched product and attention, with other queries at each replay."""
    device = torch.device("cuda")
    projected = queries(num_tokens, num_heads, torch.bfloat16, device, 192)
    w_uk = queries(num_heads, 128, torch.bfloat16, device, LATENT) / 12
    cache, indices = filled_cache(cache_format, 200, 64, device), some_indices(num_tokens, 700, 200 * 64, device)
    table = torch.randint(0, 200, (num_tokens, 64), dtype=torch.int32, device=device)
    own = torch.arange(num_tokens, dtype=torch.int32, device=device)
    lens = torch.randint(1, 4097, (num_tokens,), dtype=torch.int32, device=device)

    def step(joined: bool) -> tuple[torch.Tensor, ...]:
        latent = torch.bmm(projected[..., :128].transpose(0, 1), w_uk).transpose(0, 1)
        options = {"q_rope": projected[..., 128:]}
        if joined:
            latent, options = torch.cat((latent, projected[..., 128:]), dim=-1), {}
        return (
            *sparse(latent, cache, indices, SCALE, cache_format, **options),
            *dense(latent, cache, table, own, lens, SCALE, cache_format, **options),
        )

    with dispatch.override(lowering):
        step(False), step(True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(False)
        for _ in range(20):
            projected.normal_()
            for tensor in captured:
                tensor.fill_(torch.nan)
            graph.replay()
            for found, expected in zip(captured, step(True), strict=True):
                assert_same_bits(found, expected, "replayed against eager")
