"""The index builders of DeepSeek V4, by exact equality: every lowering against loops over Python integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mla_ops
from mla_ops import dispatch

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
GARBAGE = (INT_MIN, -123456, -1, INT_MAX)
BACKENDS = ("reference", "triton")

Rows = tuple[list[list[int]], list[int]]


def padded(rows: list[list[int]], width: int) -> Rows:
    return [row + [-1] * (width - len(row)) for row in rows], [len(row) for row in rows]


def slot_of(table: list[list[int]], request: int, index: int, block_size: int, num_blocks: int | None) -> int | None:
    """The slot of one token, compressed or not; None where there is none."""
    if not 0 <= request < len(table) or not 0 <= index // block_size < len(table[request]):
        return None
    block = table[request][index // block_size]
    slot = block * block_size + index % block_size
    there = block >= 0 and (num_blocks is None or block < num_blocks) and slot <= INT_MAX
    return slot if there else None


def window_oracle(
    positions: list[int], requests: list[int], table: list[list[int]], window: int, block_size: int, **bound: Any
) -> Rows:
    rows = []
    for position, request in zip(positions, requests, strict=True):
        slots = [
            slot_of(table, request, p, block_size, bound["num_blocks"])
            for p in range(max(position - window + 1, 0), position + 1)
        ]
        rows.append([slot for slot in slots if slot is not None])
    return padded(rows, window)


def compressed_oracle(
    positions: list[int],
    requests: list[int],
    table: list[list[int]],
    ratio: int,
    block_size: int,
    width: int,
    **bound: Any,
) -> Rows:
    rows = []
    for position, request in zip(positions, requests, strict=True):
        there = min((position + 1) // ratio, width)
        slots = [slot_of(table, request, index, block_size, bound["num_blocks"]) for index in range(there)]
        rows.append([slot for slot in slots if slot is not None])
    return padded(rows, width)


def global_topk_oracle(
    chosen: list[list[int]], requests: list[int], table: list[list[int]], block_size: int, **bound: Any
) -> Rows:
    rows = []
    for indices, request in zip(chosen, requests, strict=True):
        slots = [slot_of(table, request, i, block_size, bound["num_blocks"]) for i in indices if i >= 0]
        rows.append([slot for slot in slots if slot is not None])
    return padded(rows, len(chosen[0]) if chosen else 0)


def combine_oracle(
    chosen: list[list[int]],
    positions: list[int],
    requests: list[int],
    seq_lens: list[int],
    gather_lens: list[int],
    window: int,
    ratio: int,
    request_stride: int,
    window_offset: int,
) -> Rows:
    """Builds rows of what the workspace holds: a row for each compressed token that has room, and each gathered one."""
    rows = []
    for indices, position, request in zip(chosen, positions, requests, strict=True):
        row: list[int] = []
        if 0 <= request < len(seq_lens) and position >= 0:
            row += [i for i in indices if 0 <= i < window_offset and (i + 1) * ratio <= position + 1]
            seq_len = seq_lens[request]
            gathered = max(min(gather_lens[request], seq_len), 0)
            for p in range(max(position - window + 1, 0), position + 1):
                place = p - (seq_len - gathered)
                if 0 <= place < gathered and window_offset + place < request_stride:
                    row.append(window_offset + place)
        rows.append([r + request * request_stride for r in row if r + request * request_stride <= INT_MAX])
    return padded(rows, window + (len(chosen[0]) if chosen else 0))


ORACLES: dict[str, Callable[..., Rows]] = {
    "sliding_window_indices": window_oracle,
    "compressed_indices": compressed_oracle,
    "compute_global_topk_indices_and_lens": global_topk_oracle,
    "combine_topk_swa_indices": combine_oracle,
}


def check(name: str, *args: Any, **kwargs: Any) -> None:
    """One call of an op, by its name, against its oracle. Tensors among the arguments are given to both."""
    if name != "combine_topk_swa_indices":
        kwargs.setdefault("num_blocks", None)
    indices, lens = getattr(torch.ops.mla, name)(*args, **kwargs)
    expected, counts = ORACLES[name](*(a.tolist() if torch.is_tensor(a) else a for a in args), **kwargs)
    assert indices.dtype == lens.dtype == torch.int32
    assert indices.cpu().tolist() == expected
    assert lens.cpu().tolist() == counts


def int32(values: Any, device: Any = "cpu", shape: tuple[int, ...] | None = None) -> torch.Tensor:
    tensor = torch.tensor(values, dtype=torch.int32, device=device)
    return tensor if shape is None else tensor.reshape(shape)


class Batch:
    """Random tokens of some requests, their tables, and every kind of garbage in both."""

    def __init__(
        self,
        num_tokens: int,
        num_requests: int,
        max_blocks: int,
        max_position: int,
        device: torch.device,
        *,
        sound: bool,
    ) -> None:
        self.positions = torch.randint(0, max_position, (num_tokens,), dtype=torch.int32)
        self.requests = torch.randint(-1, num_requests + 1, (num_tokens,), dtype=torch.int32)
        self.table = torch.randint(0, 4 * max_blocks + 1, (num_requests, max_blocks), dtype=torch.int32)
        if not sound:
            for target in (self.positions, self.requests, self.table):
                for value in GARBAGE:
                    target[torch.rand(target.shape) < 0.04] = value
            # the oracle walks every position of a window
            self.positions[self.positions == INT_MAX] = max_position
        self.positions, self.requests = self.positions.to(device), self.requests.to(device)
        self.table = self.table.to(device)


soundness = pytest.mark.parametrize("sound", [True, False], ids=["sound", "garbage"])


@soundness
@pytest.mark.parametrize("window", [0, 1, 100, 128, 300])
def test_window_equals_python(lowering: str, device: torch.device, window: int, sound: bool) -> None:
    batch = Batch(9, 3, 10, 700, device, sound=sound)
    batch.positions[:4] = int32([0, 1, 127, 128], device)
    for num_blocks in (None, 30):
        check("sliding_window_indices", batch.positions, batch.requests, batch.table, window, 64, num_blocks=num_blocks)


@soundness
@pytest.mark.parametrize(("width", "block_size"), [(0, 2), (1, 2), (5, 64), (1100, 2), (1100, 64)])
def test_compressed_equals_python(
    lowering: str, device: torch.device, width: int, block_size: int, sound: bool
) -> None:
    batch = Batch(9, 3, 600, 160_000, device, sound=sound)
    batch.positions[:4] = int32([126, 127, 128, 255], device)
    for num_blocks in (None, 1500):
        check(
            "compressed_indices",
            batch.positions,
            batch.requests,
            batch.table,
            128,
            block_size,
            width,
            num_blocks=num_blocks,
        )


@soundness
@pytest.mark.parametrize("topk", [0, 1, 512, 1024, 1152])
def test_global_topk_equals_python(lowering: str, device: torch.device, topk: int, sound: bool) -> None:
    batch = Batch(7, 3, 20, 100, device, sound=sound)
    chosen = torch.randint(-1, 20 * 64 + 1, (7, topk), dtype=torch.int32)
    if not sound:
        for value in GARBAGE:
            chosen[torch.rand(chosen.shape) < 0.04] = value
    for num_blocks in (None, 50):
        check(
            "compute_global_topk_indices_and_lens",
            chosen.to(device),
            batch.requests,
            batch.table,
            64,
            num_blocks=num_blocks,
        )


@soundness
@pytest.mark.parametrize(("topk", "window"), [(0, 128), (512, 128), (640, 1), (3, 0), (700, 600)])
def test_combine_equals_python(lowering: str, device: torch.device, topk: int, window: int, sound: bool) -> None:
    """A chunk of prefills, gathered as an engine does: the new tokens and the window before the first of them."""
    seq_lens, new = int32([700, 5, 2100, 300]), int32([40, 5, 7, 1])
    gather_lens = torch.minimum(seq_lens, new + max(window - 1, 0))
    requests = torch.arange(4, dtype=torch.int32).repeat_interleave(new.long())
    positions = torch.cat([torch.arange(n - q, n) for n, q in zip(seq_lens.tolist(), new.tolist(), strict=True)]).int()
    chosen = torch.randint(-1, 2100 // 4, (len(positions), topk), dtype=torch.int32)
    window_offset = 2100 // 4
    request_stride = window_offset + window + 40
    if not sound:
        for target in (requests, positions, chosen, seq_lens, gather_lens):
            for value in GARBAGE:
                target[torch.rand(target.shape) < 0.1] = value
        positions[positions == INT_MAX] = 2000
    tensors = [t.to(device) for t in (chosen, positions, requests, seq_lens, gather_lens)]
    check("combine_topk_swa_indices", *tensors, window, 4, request_stride, window_offset)
    check("combine_topk_swa_indices", *tensors, window, 4, 2**30, 2**30 - 50)


def test_combine_whatever_the_lengths_say(lowering: str, device: torch.device) -> None:
    """Every small length of a request and of what was gathered of it, negative and contradictory ones too."""
    lengths = [(seq_len, gather_len) for seq_len in range(-1, 6) for gather_len in range(-1, 8)]
    seq_lens, gather_lens = (int32(column, device) for column in zip(*lengths, strict=True))
    requests = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(10).to(device)
    positions = torch.arange(-1, 9, dtype=torch.int32).repeat(len(lengths)).to(device)
    chosen = int32([[5, 0, 3, -1, 1]], device).repeat(len(requests), 1)
    for window_offset, request_stride in ((3, 7), (0, 4), (8, 30)):
        check(
            "combine_topk_swa_indices",
            chosen,
            positions,
            requests,
            seq_lens,
            gather_lens,
            4,
            2,
            request_stride,
            window_offset,
        )


def test_combine_finds_the_rows_that_were_gathered(lowering: str, device: torch.device) -> None:
    """Through the workspace itself: each row holds the token that it stands for."""
    seq_lens, gather_lens, window, ratio = [9, 30], [9, 12], 8, 4
    request_stride, window_offset = 24, 8
    workspace = [("nothing", -1, -1)] * (2 * request_stride)
    for request, (seq_len, gather_len) in enumerate(zip(seq_lens, gather_lens, strict=True)):
        for index in range(seq_len // ratio):
            workspace[request * request_stride + index] = ("compressed", request, index)
        for place in range(gather_len):
            token = seq_len - gather_len + place
            workspace[request * request_stride + window_offset + place] = ("token", request, token)
    positions, requests = [0, 2, 3, 8, 26, 29], [0, 0, 0, 0, 1, 1]
    chosen = [[0, 1, -1], [0, 0, 0], [1, 0, 2], [2, 1, 0], [6, 0, 5], [6, 7, 3]]
    indices, lens = torch.ops.mla.combine_topk_swa_indices(
        *(int32(v, device) for v in (chosen, positions, requests, seq_lens, gather_lens)),
        window,
        ratio,
        request_stride,
        window_offset,
    )
    complete = [[], [], [0], [1, 0], [0, 5], [6, 3]]
    for row, length, position, request, seen in zip(
        indices.tolist(), lens.tolist(), positions, requests, complete, strict=True
    ):
        expected = [("compressed", request, index) for index in seen]
        expected += [("token", request, p) for p in range(max(position - window + 1, 0), position + 1)]
        assert [workspace[index] for index in row[:length]] == expected
        assert set(row[length:]) <= {-1}


def test_holes_do_not_shorten_a_row(lowering: str, device: torch.device) -> None:
    """An invalid entry before valid ones: they move up, and the length counts all of them."""
    table = int32([[3, -1, 5], [9, 99, 0]], device)
    requests = int32([0, 1, 2, -1], device)
    chosen = int32([[-1, 2, 9], [5, -1, 0], [0, 1, 2], [0, 1, 2]], device)
    indices, lens = torch.ops.mla.compute_global_topk_indices_and_lens(chosen, requests, table, 4, num_blocks=10)
    assert indices.tolist() == [[14, 21, -1], [36, -1, -1], [-1] * 3, [-1] * 3]
    assert lens.tolist() == [2, 1, 0, 0]
    positions = int32([9, 9, 9, 9], device)
    indices, lens = torch.ops.mla.sliding_window_indices(positions, requests, table, 7, 4, num_blocks=10)
    assert indices.tolist() == [[15, 20, 21, -1, -1, -1, -1], [39, 0, 1, -1, -1, -1, -1], [-1] * 7, [-1] * 7]
    assert lens.tolist() == [3, 3, 0, 0]
    indices, lens = torch.ops.mla.compressed_indices(positions, requests, table, 2, 2, 6, num_blocks=10)
    assert indices.tolist() == [[6, 7, 10, -1, -1, -1], [18, 19, 0, -1, -1, -1], [-1] * 6, [-1] * 6]
    assert lens.tolist() == [3, 3, 0, 0]


def test_columns_are_bounded_by_the_shape_and_not_the_stride(lowering: str, device: torch.device) -> None:
    """A table that is a slice of a buffer at capacity: what lies beside it is another step's."""
    table = int32([[1, 2, 77, 77], [3, 4, 77, 77]], device)[:, :2]
    requests, positions = int32([0, 1], device), int32([11, 11], device)
    indices, lens = torch.ops.mla.sliding_window_indices(positions, requests, table, 6, 4)
    assert indices.tolist() == [[10, 11, -1, -1, -1, -1], [18, 19, -1, -1, -1, -1]]
    assert lens.tolist() == [2, 2]
    indices, lens = torch.ops.mla.compressed_indices(positions, requests, table, 2, 2, 6)
    assert indices.tolist() == [[2, 3, 4, 5, -1, -1], [6, 7, 8, 9, -1, -1]]
    assert lens.tolist() == [4, 4]


def test_positions_at_the_end_of_int32(lowering: str, device: torch.device) -> None:
    positions, requests = int32([INT_MAX, INT_MIN, -1], device), int32([0, 0, 0], device)
    table = int32([[5, 1]], device)
    indices, lens = torch.ops.mla.sliding_window_indices(positions, requests, table, 3, 2**30)
    assert indices.tolist() == [[2**31 - 3, 2**31 - 2, 2**31 - 1], [-1] * 3, [-1] * 3]
    assert lens.tolist() == [3, 0, 0]
    indices, lens = torch.ops.mla.compressed_indices(positions, requests, table, 2**30, 2, 4)
    assert indices.tolist() == [[10, 11, -1, -1], [-1] * 4, [-1] * 4]
    assert lens.tolist() == [2, 0, 0]
    chosen, lengths = int32([[0, 1, 2]] * 3, device), int32([INT_MAX], device)
    sizes = (2, 2**30, 8, 5)
    indices, lens = torch.ops.mla.combine_topk_swa_indices(chosen, positions, requests, lengths, lengths, *sizes)
    # a request of 8 rows has room for the first three tokens of it, and the window is at its end
    assert indices.tolist() == [[0, 1, -1, -1, -1], [-1] * 5, [-1] * 5]
    assert lens.tolist() == [2, 0, 0]


@pytest.mark.parametrize("name", ORACLES)
def test_into_slices_of_wider_buffers(lowering: str, device: torch.device, name: str) -> None:
    """Memory beside a buffer's rows is left alone."""
    from mla_ops.testing import sample_inputs

    sample = sample_inputs(name, device)[0]
    expected, expected_lens = sample.op(*sample.args, **sample.kwargs)
    num_tokens, width = expected.shape
    buffer = torch.full((num_tokens, width + 9), 77, dtype=torch.int32, device=device)
    lens = torch.full((num_tokens + 2,), 77, dtype=torch.int32, device=device)
    out = getattr(torch.ops.mla, name).out
    out(*sample.args, **sample.kwargs, indices=buffer[:, 5 : 5 + width], lens=lens[1:-1])
    assert torch.equal(buffer[:, 5 : 5 + width], expected)
    assert torch.equal(lens[1:-1], expected_lens)
    assert (buffer[:, :5] == 77).all()
    assert (buffer[:, 5 + width :] == 77).all()
    assert lens[[0, -1]].tolist() == [77, 77]


def test_global_topk_is_convert_under_another_name(device: torch.device, lowering: str) -> None:
    batch = Batch(6, 3, 8, 100, device, sound=False)
    chosen = torch.randint(-1, 600, (6, 70), dtype=torch.int32, device=device)
    args = chosen, batch.requests, batch.table, 64
    ours = torch.ops.mla.compute_global_topk_indices_and_lens(*args, num_blocks=20)
    theirs = torch.ops.mla.convert_req_index_to_global_index(
        batch.requests, batch.table, chosen, 64, compact=True, num_blocks=20
    )
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


entries = st.one_of(st.integers(-2, 40), st.sampled_from(GARBAGE))
# the oracle walks every token up to a position
places = st.one_of(st.integers(-2, 40), st.sampled_from((INT_MIN, -123456, 10_000)))


class Draw:
    """Tensors of anything, drawn by hypothesis."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def size(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def bound(self) -> int | None:
        return self.data.draw(st.one_of(st.none(), st.integers(0, 30)))

    def tensor(self, elements: st.SearchStrategy[int], *shape: int) -> torch.Tensor:
        number = torch.Size(shape).numel()
        return int32(self.data.draw(st.lists(elements, min_size=number, max_size=number)), self.device, shape)


anything = settings(max_examples=25, deadline=None)
backends = pytest.mark.parametrize("backend", BACKENDS)


@backends
@anything
@given(data=st.data())
def test_ranges_equal_python_on_anything(backend: str, data: st.DataObject) -> None:
    draw = Draw(data)
    num_tokens, num_requests, max_blocks = draw.size(0, 3), draw.size(0, 3), draw.size(0, 4)
    tokens = draw.tensor(places, num_tokens), draw.tensor(entries, num_tokens)
    table = draw.tensor(entries, num_requests, max_blocks)
    block_size, width = draw.size(1, 9), draw.size(0, 9)
    with dispatch.override(backend):
        check("sliding_window_indices", *tokens, table, width, block_size, num_blocks=draw.bound())
        check("compressed_indices", *tokens, table, draw.size(1, 5), block_size, width, num_blocks=draw.bound())


@backends
@anything
@given(data=st.data())
def test_global_topk_equals_python_on_anything(backend: str, data: st.DataObject) -> None:
    draw = Draw(data)
    # a row of no tokens has no width in Python
    num_tokens, topk = draw.size(1, 3), draw.size(0, 6)
    chosen, requests = draw.tensor(entries, num_tokens, topk), draw.tensor(entries, num_tokens)
    table = draw.tensor(entries, draw.size(0, 3), draw.size(0, 4))
    with dispatch.override(backend):
        check(
            "compute_global_topk_indices_and_lens",
            chosen,
            requests,
            table,
            draw.size(1, 9),
            num_blocks=draw.bound(),
        )


@backends
@anything
@given(data=st.data())
def test_combine_equals_python_on_anything(backend: str, data: st.DataObject) -> None:
    draw = Draw(data)
    num_tokens, num_requests, topk = draw.size(1, 3), draw.size(0, 3), draw.size(0, 6)
    chosen, requests = draw.tensor(entries, num_tokens, topk), draw.tensor(entries, num_tokens)
    lens = draw.tensor(entries, num_requests), draw.tensor(entries, num_requests)
    window_offset = draw.size(0, 12)
    request_stride = data.draw(st.one_of(st.integers(window_offset, 30), st.just(2**30)))
    positions = draw.tensor(places, num_tokens)
    sizes = draw.size(0, 9), draw.size(1, 5), request_stride, window_offset
    with dispatch.override(backend):
        check("combine_topk_swa_indices", chosen, positions, requests, *lens, *sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 128, 4096])
def test_builders_at_real_sizes(num_tokens: int) -> None:
    device = torch.device("cuda")
    batch = Batch(num_tokens, 64, 8192, 1_000_000, device, sound=False)
    chosen = torch.randint(-1, 250_000, (num_tokens, 1024), dtype=torch.int32, device=device)
    lens = torch.randint(0, 1_000_000, (64,), dtype=torch.int32, device=device)
    gathered = torch.randint(0, 4224, (64,), dtype=torch.int32, device=device)
    results: dict[str, list[torch.Tensor]] = {}
    for backend in BACKENDS:
        with dispatch.override(backend):
            results[backend] = [
                *mla_ops.sliding_window_indices(batch.positions, batch.requests, batch.table, 128, 256),
                *mla_ops.compressed_indices(batch.positions, batch.requests, batch.table, 128, 2, 8192),
                *mla_ops.compute_global_topk_indices_and_lens(chosen, batch.requests, batch.table, 64, num_blocks=9000),
                *mla_ops.combine_topk_swa_indices(
                    chosen, batch.positions, batch.requests, lens, gathered, 128, 4, 254_224, 250_000
                ),
            ]
    for reference, triton in zip(*results.values(), strict=True):
        assert torch.equal(reference, triton)
