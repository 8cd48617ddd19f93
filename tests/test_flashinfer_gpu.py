"""An installed FlashInfer, through the ops, against float64. bfloat16, head dims 192/128 and 128/128."""

from __future__ import annotations

import math
from typing import Any

import attention_oracle
import dense_oracle
import pytest
import torch
from attention_inputs import SCALE, filled_cache, poison_unused, queries

import mla_ops
from mla_ops import dispatch
from mla_ops.kernels.flashinfer import dense as flashinfer

pytestmark = pytest.mark.gpu


def run_on_gpu(op: str, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """An op by FlashInfer, or a skip with what speaks against it."""
    reason = dispatch.unsupported_reason("flashinfer", mla_ops.registry.describe(op, *arguments))
    if reason is not None:
        pytest.skip(reason)
    with dispatch.override("flashinfer"):
        return getattr(torch.ops.mla, op)(*arguments, **options)


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def check_paged(q, cache, table, owners, lens, tokens=None):
    out, lse = run_on_gpu("paged_attention", q, cache, table, owners, lens, SCALE, "bf16")
    width = min(table.shape[1] * cache.shape[1], max([0, *lens.tolist()]))
    everything = torch.arange(width, dtype=torch.int32, device=q.device).expand(len(q), -1)
    expected = attention_oracle.attention(
        q,
        cache,
        everything,
        SCALE,
        topk_length=lens,
        block_table=table,
        req_id_per_token=owners,
        operand=torch.bfloat16,
        tokens=tokens,
    )
    # a row's parts are rounded to bfloat16 before they are added, as its probabilities are
    expected.out_tolerance *= 2
    attention_oracle.assert_close(out, lse, expected)
    return out, lse


@pytest.mark.parametrize("num_heads", [1, 16, 65, 128])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_paged_attention(num_heads: int, block_size: int) -> None:
    """Holes in the table, unknown requests, empty rows, lengths beside tiles, queries in a wider tensor."""
    cache = filled_cache("bf16", 40960 // block_size, block_size, torch.device("cuda"))
    table = torch.randperm(len(cache), device="cuda").int()[: 3 * (12800 // block_size)].view(3, -1)
    table[1, 5], table[1, 7], table[2, 0] = -1, len(cache), -(2**31)
    owners = int32([0, 0, 1, 1, 2, 3, -1, 0, 0, 0, 2, 1])
    lens = int32([1, 64, 9000, 2**31 - 1, 777, 9, 9, 0, -5, 65, 63, 4096])
    q = torch.randn(12, num_heads, 600, device="cuda").bfloat16()[..., 5:581]
    out, lse = check_paged(q, cache, table, owners, lens)
    assert not out[5:9].any()
    assert (lse[5:9] == -math.inf).all()


@pytest.mark.parametrize(
    "lens", [[8192], [40], [0], [0, 0, 3], [1] * 200], ids=lambda lens: f"{len(lens)} x {lens[-1]}"
)
def test_paged_attention_of_few_or_short_rows(lens: list[int]) -> None:
    """One row for the whole GPU, rows of less than a tile, nothing at all, more rows than SMs."""
    cache = filled_cache("bf16", 128, 64, torch.device("cuda"))
    table = torch.randperm(128, device="cuda").int().view(1, 128)
    q = queries(len(lens), 16, torch.bfloat16, torch.device("cuda"))
    check_paged(q, cache, table, torch.zeros_like(int32(lens)), int32(lens))


def test_more_rows_than_a_call_takes_and_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled_cache("bf16", 64, 64, torch.device("cuda"))
    table, owners = torch.randperm(64, device="cuda").int().view(4, 16), torch.arange(5000, device="cuda").int() % 4
    q, lens = queries(5000, 8, torch.bfloat16, torch.device("cuda")), torch.arange(5000, device="cuda").int() % 1025
    check_paged(q, cache, table, owners, lens, [0, 1, 1024, 1025, 4094, 4095, 4096, 4097, 4999])
    monkeypatch.setattr(flashinfer, "MAX_ROWS_PER_CALL", 4)
    check_paged(q[:10], cache, table, owners[:10], lens[:10])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        check_paged(q[1000:1009], cache, table, owners[1000:1009], lens[1000:1009])
    torch.cuda.current_stream().wait_stream(stream)


def test_nothing_unused_is_seen() -> None:
    cache = filled_cache("bf16", 30, 16, torch.device("cuda"))
    table = torch.randperm(30, device="cuda").int()[:24].view(3, 8)
    owners, lens = int32([0, 1, 2]), int32([11, 100, 128])
    q = queries(3, 40, torch.bfloat16, torch.device("cuda"))
    clean = check_paged(q, cache, table, owners, lens)
    used = [int(table[r, p // 16]) * 16 + p % 16 for r in range(3) for p in range(int(lens[r]))]
    dirty = poison_unused(cache, torch.tensor(used, device="cuda"), "bf16")
    found = run_on_gpu("paged_attention", q, dirty, table, owners, lens, SCALE, "bf16")
    assert torch.equal(clean[0], found[0])
    assert torch.equal(clean[1], found[1])


def prefill_inputs(lens_q, lens_k, heads, dims, padding=0):
    def normal(lens: list[int], num_heads: int, width: int) -> torch.Tensor:
        return torch.randn(sum(lens) + padding, num_heads, width, device="cuda").bfloat16()

    starts = (int32([0, *lens]).cumsum(0).int() for lens in (lens_q, lens_k))
    q, k = normal(lens_q, heads[0], dims[0]), normal(lens_k, heads[1], dims[0] + 3)
    v = normal(lens_k, heads[1], dims[1])
    return q, k[..., 3:], v, *starts, max([0, *lens_q]), max([0, *lens_k]), dims[0] ** -0.5


def check_prefill(arguments, causal, tokens=None, rounded_sums=False):
    """`rounded_sums`: by FlashInfer's FA2 kernel, which adds up weights as bfloat16 has them."""
    out, lse = run_on_gpu("prefill_attention", *arguments, causal=causal)
    q, k, v, starts_q, starts_k, _, _, scale = arguments
    expected = dense_oracle.prefill(
        q, k, v, starts_q, starts_k, scale, causal=causal, operand=torch.bfloat16, tokens=tokens
    )
    if rounded_sums:
        expected.lse_tolerance.add_(-math.log1p(-attention_oracle.UNIT[torch.bfloat16]))
    attention_oracle.assert_close(out, lse, expected)
    return out, lse


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("heads", [(16, 16), (6, 2)], ids=str)
@pytest.mark.parametrize("dims", [(192, 128), (128, 128)], ids=str)
def test_prefill(dims: tuple[int, int], heads: tuple[int, int], causal: bool) -> None:
    """Requests beside tiles, empty ones, more queries than keys, padding, keys with odd strides."""
    lens_q, lens_k = [130, 0, 63, 64, 5, 1, 129, 300], [130, 9, 200, 64, 0, 700, 257, 3]
    arguments = prefill_inputs(lens_q, lens_k, heads, dims, padding=7)
    tokens = [*range(0, 130, 43), *range(130, 263, 11), 391, *range(392, 692, 37), 689, 690, 691, *range(692, 699)]
    out, lse = check_prefill(arguments, causal, tokens)
    assert not out[692:].any()
    assert (lse[692:] == -math.inf).all()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("lens_q", "lens_k"), [([], []), ([0], [0]), ([0, 5], [4, 5]), ([5, 0], [0, 0]), ([300], [3])], ids=str
)
def test_empty_requests(lens_q: list[int], lens_k: list[int], causal: bool) -> None:
    check_prefill(prefill_inputs(lens_q, lens_k, (4, 4), (192, 128), padding=2), causal)


@pytest.mark.parametrize(("num_requests", "num_heads"), [(2400, 128), (4500, 2)], ids=str)
def test_many_requests(num_requests: int, num_heads: int) -> None:
    """More tiles than its own workspace has room for, and so many that it plans one head for all."""
    arguments = prefill_inputs([1] * num_requests, [2] * num_requests, (num_heads, num_heads), (192, 128))
    check_prefill(arguments, True, [0, 1, 2000, num_requests - 1])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_a_request_does_not_see_the_next(garbage: float, causal: bool) -> None:
    arguments = prefill_inputs([5, 18, 100], [5, 30, 100], (2, 2), (192, 128), padding=9)
    for tensor, last in zip(arguments, (23, 35, 35), strict=False):
        tensor[:5], tensor[last:] = garbage, garbage
    check_prefill(arguments, causal, list(range(5, 23)), rounded_sums=True)


def test_one_causal_request_with_itself_is_captured() -> None:
    q, k, v, starts, _, *rest = prefill_inputs([700], [700], (16, 16), (192, 128), padding=30)
    arguments = (q, k, v, starts, starts, *rest)
    check_prefill(arguments, True, [0, 1, 127, 128, 500, 699, 700, 729])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), dispatch.override("flashinfer"):
        out, lse = torch.ops.mla.prefill_attention(*arguments, causal=True)
    for length in (700, 300):
        starts[1] = length
        q.normal_()
        graph.replay()
        eager = run_on_gpu("prefill_attention", *arguments, causal=True)
        assert torch.equal(out, eager[0])
        assert torch.equal(lse, eager[1])


def test_a_capture_is_refused() -> None:
    arguments = prefill_inputs([70, 3], [70, 3], (2, 2), (192, 128))
    check_prefill(arguments, True)
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(NotImplementedError, match="a CUDA graph that is being captured cannot wait")
    with torch.cuda.graph(graph), refused, dispatch.override("flashinfer"):
        torch.ops.mla.prefill_attention(*arguments, causal=True)
