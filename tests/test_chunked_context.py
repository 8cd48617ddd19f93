"""Chunked context against attention over all keys at once, in float64, for chunks that split requests anywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attention_oracle
import dense_oracle
import pytest
import torch
import torch._dynamo.testing
from attention_inputs import filled_cache
from attention_oracle import UNIT

import mla_ops
from mla_ops.formats import FORMATS, allocate_cache
from mla_ops.testing.checks import assert_same_bits, record_calls

NUM_HEADS, NOPE, DIM_V = 3, 128, 128
SCALE = (NOPE + 64) ** -0.5
CONTEXT = [0, 13, 5, 0, 30]
NEW = [4, 1, 0, 3, 2]
BLOCK_SIZE = 8


class Batch:
    """New tokens of some requests and a cache that holds their context in unrelated blocks."""

    def __init__(self, cache_format: str, device: torch.device, context: list[int], new: list[int]) -> None:
        self.cache_format, self.context, self.new = cache_format, context, new
        self.dtype = FORMATS[cache_format].value_dtype
        blocks = [-(-length // BLOCK_SIZE) for length in context]
        self.cache = filled_cache(cache_format, sum(blocks) + 2, BLOCK_SIZE, device)
        order = torch.randperm(sum(blocks) + 2).tolist()
        table = torch.full((len(context), max([1, *blocks])), -1, dtype=torch.int32)
        for row, count in enumerate(blocks):
            table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        self.block_table = table.to(device)
        # the scale keeps scores of a size with those of the new tokens
        self.weight = torch.randn(NUM_HEADS, NOPE + DIM_V, 512, device=device, dtype=torch.float64) / 512**0.5

        def normal(width: int) -> torch.Tensor:
            return torch.randn(sum(new), NUM_HEADS, width, device=device).to(self.dtype)

        self.q, self.k, self.v = normal(NOPE + 64), normal(NOPE + 64), normal(DIM_V)
        self.starts = torch.tensor([0, *new], device=device).cumsum(0).int()
        self.context_lens = torch.tensor(context, dtype=torch.int32, device=device)

    def up_project(self, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes in float64 and rounds once, so that a row is the same whatever chunk it is in."""
        both = torch.einsum("td,hwd->thw", latent.double(), self.weight)
        keys = torch.cat((both[..., :NOPE], rope.double().unsqueeze(1).expand(-1, NUM_HEADS, -1)), dim=-1)
        return keys.to(self.dtype), both[..., NOPE:].to(self.dtype)

    def run(self, num_rows: int, max_context_tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        bound = sum(self.context) if max_context_tokens is None else max_context_tokens
        chunks = mla_ops.plan_context_chunks(self.context_lens, num_rows, bound)
        workspace = torch.zeros(num_rows, 576, dtype=self.dtype, device=self.q.device)
        return mla_ops.chunked_prefill_attention(
            self.q,
            self.k,
            self.v,
            self.starts,
            max([0, *self.new]),
            SCALE,
            kv_cache=self.cache,
            cache_format=self.cache_format,
            block_table=self.block_table,
            chunks=chunks,
            workspace=workspace,
            up_project=self.up_project,
        )

    def whole(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values of context and new tokens, request after request, and where each request's start."""
        everything = attention_oracle.decode_cache(self.cache, self.cache_format)
        keys, values, lens, first = [self.k[:0]], [self.v[:0]], [0], 0
        for request, (old, new) in enumerate(zip(self.context, self.new, strict=True)):
            places = [(int(self.block_table[request, p // BLOCK_SIZE]), p % BLOCK_SIZE) for p in range(old)]
            place = torch.tensor(places, dtype=torch.int64, device=self.q.device).view(-1, 2)
            rows = everything[place[:, 0], place[:, 1]].to(self.dtype)
            old_keys, old_values = self.up_project(rows[:, :512], rows[:, 512:])
            keys += [old_keys, self.k[first : first + new]]
            values += [old_values, self.v[first : first + new]]
            first += new
            lens.append(old + new)
        return torch.cat(keys), torch.cat(values), torch.tensor(lens, device=self.q.device).cumsum(0).int()

    def check(self, lowering: str, num_chunks: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Errors stay within the bound of attention at once and what the merges add.

        Each part of the output, and each merge of two, is rounded to its dtype once: with the first part that is
        2 * num_chunks + 1 roundings of numbers no larger than the largest value. A merge's weights are exponentials of
        differences of lse in float32.
        """
        keys, values, starts_k = self.whole()
        rounded = None if lowering == "reference" or self.dtype == torch.float32 else self.dtype
        expected = dense_oracle.prefill(
            self.q, keys, values, self.starts, starts_k, SCALE, causal=True, operand=rounded
        )
        largest = float(values.double().abs().max()) if values.numel() else 0.0
        largest_lse = float(expected.lse.abs().nan_to_num(posinf=0.0).max()) if expected.lse.numel() else 0.0
        # the error of each part's lse moves its weight, and so the mean; parts see subsets of the keys
        part_lse = float(expected.lse_tolerance.max()) if expected.lse.numel() else 0.0
        merge = (num_chunks + 1) * (2.0**-21 * (8 + 2 * largest_lse) + 2 * part_lse)
        expected.out_tolerance += ((2 * num_chunks + 1) * UNIT[self.dtype] + merge) * largest
        expected.lse_tolerance += merge
        attention_oracle.assert_close(out, lse, expected)


@pytest.mark.parametrize(
    ("cache_format", "num_rows"),
    [
        *(("fp32", rows) for rows in (1, 3, 7, 8, 20, 47, 48, 100)),
        *(("bf16", rows) for rows in (3, 8, 20, 48)),
        *(("fp8_ds_mla", rows) for rows in (7, 20, 47, 100)),
    ],
)
def test_chunks_of_any_size_equal_attention_at_once(
    lowering: str, device: torch.device, cache_format: str, num_rows: int
) -> None:
    if lowering == "triton" and device.type == "cpu" and (num_rows < 7 or (cache_format != "fp32" and num_rows != 20)):
        pytest.skip("many chunks, and the same cuts for each format, take long to interpret; on a GPU they run")
    batch = Batch(cache_format, device, CONTEXT, NEW)
    batch.check(lowering, -(-sum(CONTEXT) // num_rows), *batch.run(num_rows))


@pytest.mark.parametrize(
    ("context", "new"),
    [([0, 0], [3, 2]), ([9], [0]), ([], []), ([0], [1]), ([40, 0], [1, 1])],
    ids=["no context", "no new tokens", "no requests", "one token", "one with context"],
)
def test_batches_at_the_edge(lowering: str, device: torch.device, context: list[int], new: list[int]) -> None:
    batch = Batch("bf16", device, context, new)
    batch.check(lowering, -(-sum(context) // 16), *batch.run(16))


def test_chunks_behind_the_context_change_nothing(lowering: str, device: torch.device) -> None:
    """A plan for more context than there is: its last chunks are empty, and merging nothing is exact."""
    batch = Batch("bf16", device, CONTEXT, NEW)
    exact, loose = batch.run(16), batch.run(16, max_context_tokens=100)
    assert torch.equal(exact[0], loose[0])
    torch.testing.assert_close(exact[1], loose[1], rtol=2.0**-22, atol=0.0)


def test_plan_covers_every_token_once(device: torch.device) -> None:
    for num_rows in (1, 5, 17, 48, 1000):
        lens = torch.tensor([7, 0, -3, 30, 11], dtype=torch.int32, device=device)
        chunks = mla_ops.plan_context_chunks(lens, num_rows, 60)
        assert chunks.num_chunks == -(-60 // num_rows)
        covered = [[], [], [], [], []]
        for ends, own, starts in zip(chunks.ends.tolist(), chunks.lens.tolist(), chunks.starts.tolist(), strict=True):
            assert starts == [sum(own[:r]) for r in range(6)]
            assert starts[-1] <= num_rows
            for request in range(5):
                covered[request] += range(ends[request] - own[request], ends[request])
        assert covered == [list(range(length)) for length in (7, 0, 0, 30, 11)]


def test_more_context_than_the_plan_holds_is_an_error() -> None:
    lens = torch.tensor([7, 4], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="longer than max_context_tokens, 10"):
        mla_ops.plan_context_chunks(lens, 4, 10)


def test_what_the_functions_refuse() -> None:
    lens = torch.tensor([7, 4], dtype=torch.int32)
    for wrong, got in ((lens.long(), "torch.int64"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"context_lens must be a tensor of torch.int32, got {got}"):
            mla_ops.plan_context_chunks(wrong, 4, 11)
    with pytest.raises(ValueError, match=r"context_lens must have shape \[num_requests\], got \[1, 2\]"):
        mla_ops.plan_context_chunks(lens.unsqueeze(0), 4, 11)
    batch = Batch("bf16", torch.device("cpu"), [3], [1])
    chunks = mla_ops.plan_context_chunks(batch.context_lens, 4, 4)
    rows = torch.zeros(5, 576, dtype=torch.bfloat16)
    for given, workspace, error, message in (
        (chunks, rows, ValueError, r"workspace must have the plan's 4 rows, got \[5, 576\]"),
        (chunks, rows[0, 0], ValueError, r"workspace must have the plan's 4 rows, got \[\]"),
        (chunks, None, TypeError, "workspace a tensor, got ContextChunks and NoneType"),
        (
            batch.context_lens,
            rows,
            TypeError,
            "chunks must be what plan_context_chunks returns .* got Tensor and Tensor",
        ),
    ):
        with pytest.raises(error, match=f"chunked_prefill_attention: .*{message}"):
            mla_ops.chunked_prefill_attention(
                batch.q,
                batch.k,
                batch.v,
                batch.starts,
                1,
                SCALE,
                kv_cache=batch.cache,
                cache_format="bf16",
                block_table=batch.block_table,
                chunks=given,
                workspace=workspace,
                up_project=batch.up_project,
            )
    with pytest.raises(TypeError, match="choose_prefill: max_seq_len must be an integer, got Tensor"):
        mla_ops.choose_prefill(torch.tensor(3), 2048)


def test_choice_between_sparse_and_dense() -> None:
    assert mla_ops.choose_prefill(2048, 2048) == "dense"
    assert mla_ops.choose_prefill(2049, 2048) == "sparse"


def layer(batch: Batch, num_rows: int, bound: int) -> Callable[..., Any]:
    """A step over tensors alone: the plan, and attention over context and new tokens."""

    def step(q: Any, k: Any, v: Any, starts: Any, lens: Any, table: Any, cache: Any, workspace: Any) -> Any:
        chunks = mla_ops.plan_context_chunks(lens, num_rows, bound)
        return mla_ops.chunked_prefill_attention(
            q,
            k,
            v,
            starts,
            64,
            SCALE,
            kv_cache=cache,
            cache_format=batch.cache_format,
            block_table=table,
            chunks=chunks,
            workspace=workspace,
            up_project=batch.up_project,
        )

    return step


def arguments(batch: Batch) -> tuple[torch.Tensor, ...]:
    return batch.q, batch.k, batch.v, batch.starts, batch.context_lens, batch.block_table


def test_one_graph_for_every_batch_and_no_copy_of_the_cache() -> None:
    """Compiled whole, with other numbers of tokens and other lengths: one graph, the bits of eager."""
    batches = [
        Batch("fp8_ds_mla", torch.device("cpu"), CONTEXT, new) for new in (NEW, [1, 0, 9, 2, 5], [0, 0, 2, 0, 0])
    ]
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    step = layer(batches[0], 32, 64)
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    workspaces = [torch.zeros(32, 576, dtype=torch.bfloat16) for _ in range(2)]
    for batch in batches:
        batch.weight = batches[0].weight
        # tables are of one shape, so that only the number of tokens varies
        for tensor in (batch.q, batch.k, batch.v):
            torch._dynamo.mark_dynamic(tensor, 0)
        cache = batch.cache.clone()
        with record_calls() as calls:
            actual = compiled(*arguments(batch), cache, workspaces[0])
        expected = step(*arguments(batch), batch.cache, workspaces[1])
        for left, right in zip(actual, expected, strict=True):
            assert_same_bits(left, right, "compiled against eager, output")
        assert_same_bits(*workspaces, "compiled against eager, workspace")
        gathers = [given for op, given in calls if op == "gather_cache"]
        assert len(gathers) == 2
        for given in gathers:
            assert given["kv_cache"].data_ptr() == cache.data_ptr(), "a copy of the cache"
            assert given["out"].data_ptr() == workspaces[0].data_ptr(), "a copy of the workspace"
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("cache_format", ["bf16", "fp8_ds_mla"])
def test_a_replay_follows_the_lengths_of_the_step(cache_format: str) -> None:
    """Captured once, replayed with other contexts and other new tokens; the plan is in the graph."""
    device = torch.device("cuda")
    batch = Batch(cache_format, device, [100, 300, 0, 20], [30, 1, 20, 13])
    cache, workspace = batch.cache, torch.zeros(128, 576, dtype=torch.bfloat16, device=device)
    step = layer(batch, 128, 512)
    step(*arguments(batch), cache, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step(*arguments(batch), cache, workspace)
    for context, new in (([1, 280, 8, 20], [1, 1, 2, 60]), ([0, 0, 0, 0], [64, 0, 0, 0])):
        batch.context_lens.copy_(torch.tensor(context, dtype=torch.int32))
        batch.starts.copy_(torch.tensor([0, *new]).cumsum(0).int())
        batch.context, batch.new = context, new
        graph.replay()
        found = out.clone(), lse.clone()
        eager = step(*arguments(batch), cache, workspace)
        assert torch.equal(found[0], eager[0])
        assert torch.equal(found[1], eager[1])
        assert torch.equal(lse == -math.inf, eager[1] == -math.inf)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_format", ["bf16", "fp8_ds_mla"])
def test_real_sizes(cache_format: str) -> None:
    batch = Batch(cache_format, torch.device("cuda"), [3000, 0, 700], [40, 300, 1])
    batch.check("triton", 4, *batch.run(1000))


def test_the_cache_may_be_empty() -> None:
    batch = Batch("bf16", torch.device("cpu"), [0], [2])
    batch.cache = allocate_cache("bf16", 0, BLOCK_SIZE)
    out, _ = batch.run(4, max_context_tokens=8)
    assert out.isfinite().all()
