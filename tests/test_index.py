"""Index ops, by exact equality: every lowering against loops over Python integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_ops import dispatch

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
GARBAGE = (INT_MIN, -123456, -1, INT_MAX)
BACKENDS = ("reference", "triton")


def convert_oracle(
    req_ids: list[int],
    table: list[list[int]],
    indices: list[list[int]],
    block_size: int,
    compact: bool,
    num_blocks: int | None,
) -> tuple[list[list[int]], list[int]]:
    rows, counts = [], []
    for req_id, row in zip(req_ids, indices, strict=True):
        slots = []
        for index in row:
            slot = -1
            if index >= 0 and 0 <= req_id < len(table) and index // block_size < len(table[req_id]):
                block = table[req_id][index // block_size]
                if block >= 0 and (num_blocks is None or block < num_blocks):
                    slot = block * block_size + index % block_size
            slots.append(slot if slot <= INT_MAX else -1)
        valid = [slot for slot in slots if slot >= 0]
        rows.append(valid + [-1] * (len(slots) - len(valid)) if compact else slots)
        counts.append(len(valid))
    return rows, counts


def tensor(values: list[int] | list[list[int]], shape: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device).reshape(shape)


def random_convert(
    num_tokens: int, topk: int, num_requests: int, max_blocks: int, block_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mostly valid entries, with every kind of garbage among them."""
    table = torch.randint(0, 4 * max_blocks + 1, (num_requests, max_blocks), dtype=torch.int32)
    req_ids = torch.randint(-1, num_requests + 1, (num_tokens,), dtype=torch.int32)
    indices = torch.randint(0, max_blocks * block_size + 1, (num_tokens, topk), dtype=torch.int32)
    for target in (table, indices):
        for value in (*GARBAGE, max_blocks * block_size):
            target[torch.rand(target.shape) < 0.04] = value
    return req_ids.to(device), table.to(device), indices.to(device)


def check_convert(
    req_ids: torch.Tensor,
    table: torch.Tensor,
    indices: torch.Tensor,
    block_size: int,
    compact: bool,
    num_blocks: int | None,
) -> None:
    out, counts = torch.ops.mla.convert_req_index_to_global_index(
        req_ids, table, indices, block_size, compact=compact, num_blocks=num_blocks
    )
    expected, expected_counts = convert_oracle(
        req_ids.tolist(), table.tolist(), indices.tolist(), block_size, compact, num_blocks
    )
    assert out.dtype == counts.dtype == torch.int32
    assert out.cpu().tolist() == expected
    assert counts.cpu().tolist() == expected_counts


@pytest.mark.parametrize("compact", [False, True], ids=["in place", "compact"])
@pytest.mark.parametrize("topk", [0, 1, 640, 2048, 2176])
def test_convert_equals_python(lowering: str, device: torch.device, topk: int, compact: bool) -> None:
    req_ids, table, indices = random_convert(7, topk, 3, 50, 64, device)
    check_convert(req_ids, table, indices, 64, compact, None)
    check_convert(req_ids, table, indices, 64, compact, 100)


@pytest.mark.parametrize(("num_tokens", "num_requests", "max_blocks"), [(0, 3, 4), (5, 0, 4), (5, 3, 0), (0, 0, 0)])
def test_convert_with_nothing_there(
    lowering: str, device: torch.device, num_tokens: int, num_requests: int, max_blocks: int
) -> None:
    req_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    table = torch.zeros(num_requests, max_blocks, dtype=torch.int32, device=device)
    indices = torch.zeros(num_tokens, 9, dtype=torch.int32, device=device)
    out, counts = torch.ops.mla.convert_req_index_to_global_index(req_ids, table, indices, 16)
    assert torch.equal(out, torch.full_like(indices, -1))
    assert torch.equal(counts, torch.zeros_like(req_ids))


def test_convert_beyond_int32_is_invalid(lowering: str, device: torch.device) -> None:
    table = torch.tensor([[INT_MAX, 2**26, 2**25 - 1]], dtype=torch.int32, device=device)
    indices = torch.tensor([[0, 63, 64, 127, 128, 191]], dtype=torch.int32, device=device)
    check_convert(torch.zeros(1, dtype=torch.int32, device=device), table, indices, 64, False, None)
    last = torch.tensor([[INT_MAX]], dtype=torch.int32, device=device)
    zero = torch.zeros(1, 1, dtype=torch.int32, device=device)
    out, _ = torch.ops.mla.convert_req_index_to_global_index(zero[0], last, zero, 1)
    assert out.item() == INT_MAX


def test_convert_strided(lowering: str, device: torch.device) -> None:
    """Slices of wider buffers, inputs and outputs: what lies beside them is neither read nor written."""
    req_ids, table, indices = random_convert(6, 40, 3, 8, 16, device)
    wide_table = torch.full((3, 20), 7, dtype=torch.int32, device=device)
    wide_table[:, 3:11] = table
    wide_indices = torch.full((6, 64), 5, dtype=torch.int32, device=device)
    wide_indices[:, 1:41] = indices
    expected, expected_counts = torch.ops.mla.convert_req_index_to_global_index(
        req_ids, table, indices, 16, compact=True
    )
    buffer = torch.full((6, 50), 99, dtype=torch.int32, device=device)
    counts = torch.full((8,), 99, dtype=torch.int32, device=device)
    torch.ops.mla.convert_req_index_to_global_index.out(
        req_ids,
        wide_table[:, 3:11],
        wide_indices[:, 1:41],
        16,
        compact=True,
        out=buffer[:, 5:45],
        valid_counts=counts[1:7],
    )
    assert torch.equal(buffer[:, 5:45], expected)
    assert torch.equal(counts[1:7], expected_counts)
    assert (buffer[:, :5] == 99).all()
    assert (buffer[:, 45:] == 99).all()
    assert counts[[0, 7]].tolist() == [99, 99]


entries = st.one_of(st.integers(-2, 40), st.sampled_from(GARBAGE))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_convert_equals_python_on_anything(backend: str, data: st.DataObject) -> None:
    num_tokens, topk = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 6))
    num_requests, max_blocks = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4))
    req_ids = data.draw(st.lists(entries, min_size=num_tokens, max_size=num_tokens))
    table = data.draw(st.lists(entries, min_size=num_requests * max_blocks, max_size=num_requests * max_blocks))
    indices = data.draw(st.lists(entries, min_size=num_tokens * topk, max_size=num_tokens * topk))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with dispatch.override(backend):
        check_convert(
            tensor(req_ids, (num_tokens,), device),
            tensor(table, (num_requests, max_blocks), device),
            tensor(indices, (num_tokens, topk), device),
            data.draw(st.sampled_from((1, 2, 7, 64))),
            data.draw(st.booleans()),
            data.draw(st.one_of(st.none(), st.integers(0, 30))),
        )


def filter_oracle(indices: list[list[int]], context_lens: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    cached = [[i if 0 <= i < n else -1 for i in row] for row, n in zip(indices, context_lens, strict=True)]
    new = [[i - n if i >= 0 and i >= n else -1 for i in row] for row, n in zip(indices, context_lens, strict=True)]
    return cached, new


@pytest.mark.parametrize(("num_tokens", "topk"), [(0, 5), (4, 0), (1, 1), (7, 640), (3, 2176)])
def test_filter_equals_python(lowering: str, device: torch.device, num_tokens: int, topk: int) -> None:
    indices = torch.randint(-3, 100, (num_tokens, topk), dtype=torch.int32, device=device)
    context_lens = torch.randint(0, 100, (num_tokens,), dtype=torch.int32, device=device)
    cached, new = torch.ops.mla.filter_prefill_indices(indices, context_lens)
    expected = filter_oracle(indices.tolist(), context_lens.tolist())
    assert (cached.cpu().tolist(), new.cpu().tolist()) == expected


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.lists(entries, min_size=5, max_size=5)), max_size=4))
def test_filter_equals_python_on_anything(backend: str, rows: list[tuple[int, list[int]]]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    indices = tensor([row for _, row in rows], (len(rows), 5), device)
    context_lens = tensor([n for n, _ in rows], (len(rows),), device)
    with dispatch.override(backend):
        cached, new = torch.ops.mla.filter_prefill_indices(indices, context_lens)
    assert (cached.cpu().tolist(), new.cpu().tolist()) == filter_oracle(indices.tolist(), context_lens.tolist())


@pytest.mark.gpu
@pytest.mark.parametrize("compact", [False, True], ids=["in place", "compact"])
@pytest.mark.parametrize(("num_tokens", "topk"), [(1, 2048), (128, 2176), (4096, 2048), (4096, 640)])
def test_convert_at_real_sizes(num_tokens: int, topk: int, compact: bool) -> None:
    device = torch.device("cuda")
    req_ids, table, indices = random_convert(num_tokens, topk, 64, 2048, 64, device)
    results = []
    for backend in BACKENDS:
        with dispatch.override(backend):
            results.append(
                torch.ops.mla.convert_req_index_to_global_index(
                    req_ids, table, indices, 64, compact=compact, num_blocks=4096
                )
            )
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
