"""Step metadata, by exact equality: every lowering against loops over Python integers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mla_ops  # noqa: F401  (registers the ops)
from mla_ops import dispatch

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
BACKENDS = ("reference", "triton")
BUFFERS = (
    "query_start_loc_buffer",
    "seq_lens_buffer",
    "block_table_buffer",
    "req_id_per_token",
    "positions",
    "slot_mapping",
    "key_lens",
    "topk_length",
)


@dataclass
class Step:
    """One step's inputs, as Python integers, and the capacities of its buffers."""

    query_lens: list[int]
    seq_lens: list[int]
    block_table: list[list[int]]
    max_blocks: int
    max_num_requests: int
    max_num_tokens: int
    max_blocks_buffer: int
    block_size: int
    index_topk: int
    first: int = 0

    @property
    def query_start_loc(self) -> list[int]:
        starts = [self.first]
        for length in self.query_lens:
            starts.append(starts[-1] + length)
        return starts


def run(step: Step, device: torch.device | str) -> dict[str, list]:
    def int32(values: list, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device).reshape(shape)

    num_requests = len(step.query_lens)
    shapes = {
        "query_start_loc_buffer": (step.max_num_requests + 1,),
        "seq_lens_buffer": (step.max_num_requests,),
        "block_table_buffer": (step.max_num_requests, step.max_blocks_buffer),
    }
    # 77: what is left of it was not written
    buffers = [
        torch.full(
            shapes.get(name, (step.max_num_tokens,)),
            77,
            dtype=torch.int64 if name == "slot_mapping" else torch.int32,
            device=device,
        )
        for name in BUFFERS
    ]
    torch.ops.mla.build_step_metadata(
        int32(step.query_start_loc, (num_requests + 1,)),
        int32(step.seq_lens, (num_requests,)),
        int32(step.block_table, (num_requests, step.max_blocks)),
        *buffers,
        step.block_size,
        step.index_topk,
    )
    return {name: buffer.cpu().tolist() for name, buffer in zip(BUFFERS, buffers, strict=True)}


def oracle(step: Step) -> dict[str, list]:
    starts = step.query_start_loc
    num_requests = len(step.query_lens)
    pad = step.max_num_requests - num_requests
    rows = [row + [-1] * (step.max_blocks_buffer - step.max_blocks) for row in step.block_table]
    expected: dict[str, list] = {
        "query_start_loc_buffer": starts + [starts[-1]] * pad,
        "seq_lens_buffer": step.seq_lens + [0] * pad,
        "block_table_buffer": rows + [[-1] * step.max_blocks_buffer] * pad,
    }
    expected |= {name: [] for name in BUFFERS[3:]}
    for token in range(step.max_num_tokens):
        owner, position, slot = -1, 0, -1
        for request in range(num_requests):
            if starts[request] <= token < starts[request + 1]:
                place = step.seq_lens[request] - (starts[request + 1] - token)
                if place >= 0:
                    owner, position = request, place
        if owner >= 0 and position // step.block_size < step.max_blocks:
            block = step.block_table[owner][position // step.block_size]
            if block >= 0:
                slot = block * step.block_size + position % step.block_size
        expected["req_id_per_token"].append(owner)
        expected["positions"].append(position)
        expected["slot_mapping"].append(slot)
        expected["key_lens"].append(position + 1 if owner >= 0 else 0)
        expected["topk_length"].append(min(position + 1, step.index_topk) if owner >= 0 else 0)
    return expected


def test_lengths_of_any_sign_and_size_do_not_wrap(lowering: str, device: torch.device) -> None:
    """INT_MIN less a token is no position near INT_MAX: its tokens are padding."""
    extremes = [INT_MIN, INT_MIN + 1, -1, INT_MAX, INT_MIN + 3]
    step = Step([2, 3, 1, 2, 3], extremes, [[4, 0, 9]] * 5, 3, 6, 13, 3, 4, 2048)
    found = run(step, device)
    assert found == oracle(step)
    assert found["req_id_per_token"] == [-1] * 6 + [3, 3] + [-1] * 5
    assert found["key_lens"][6:8] == [INT_MAX - 1, INT_MAX]


CASES = {
    "decode": Step([1] * 5, [9, 70, 1, 64, 65], [[3, 4], [5, 6], [7, 8], [9, 1], [0, 2]], 2, 8, 8, 3, 64, 32),
    "mixed prefill and decode": Step([1, 30, 0, 4], [17, 30, 5, 40], [[1, 2, 3]] * 4, 3, 4, 40, 3, 16, 2048),
    "no requests": Step([], [], [], 2, 4, 6, 3, 16, 2048),
    "no tokens": Step([0, 0], [4, 5], [[1], [2]], 1, 2, 5, 1, 16, 2048),
    "no room at all": Step([], [], [], 0, 0, 0, 0, 16, 2048),
    "no blocks": Step([2], [7], [[]], 0, 2, 3, 2, 16, 2048),
    "sequence shorter than its queries": Step([5, 3], [2, 3], [[1], [2]], 1, 2, 8, 1, 4, 2),
    "garbage in the block table": Step([4, 3], [9, 9], [[0, INT_MIN, -7], [INT_MAX, -1, 3]], 3, 2, 8, 5, 4, 4),
    "garbage in the lengths": Step([2, 1, 3], [INT_MAX, 3, -5], [[1, 2]] * 3, 2, 4, 9, 2, 4, 4),
    "more tokens than the buffers hold": Step([6, 9], [6, 9], [[1, 2, 3]] * 2, 3, 2, 8, 3, 4, 4),
    "queries that start late": Step([2, 3], [5, 6], [[1, 2], [3, 4]], 2, 3, 10, 2, 4, 4, first=3),
    "top-k of zero": Step([3], [5], [[1, 2]], 2, 1, 3, 2, 4, 0),
    "several programs": Step([1] * 150 + [200], list(range(1, 151)) + [300], [[5, 6]] * 151, 2, 160, 400, 2, 256, 99),
    "a block table wider than a piece": Step([2], [2], [list(range(1500))], 1500, 2, 2, 2100, 1, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_step_equals_python(lowering: str, device: torch.device, name: str) -> None:
    assert run(CASES[name], device) == oracle(CASES[name])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_step_equals_python_on_anything(backend: str, data: st.DataObject) -> None:
    num_requests, max_blocks = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 3))
    blocks = st.one_of(st.integers(-1, 50), st.sampled_from((INT_MIN, INT_MAX)))
    step = Step(
        data.draw(st.lists(st.integers(0, 5), min_size=num_requests, max_size=num_requests)),
        data.draw(st.lists(st.integers(-2, 30), min_size=num_requests, max_size=num_requests)),
        [data.draw(st.lists(blocks, min_size=max_blocks, max_size=max_blocks)) for _ in range(num_requests)],
        max_blocks,
        num_requests + data.draw(st.integers(0, 3)),
        data.draw(st.integers(0, 24)),
        max_blocks + data.draw(st.integers(0, 3)),
        data.draw(st.sampled_from((1, 4, 64))),
        data.draw(st.integers(0, 20)),
    )
    with dispatch.override(backend):
        found = run(step, "cuda" if torch.cuda.is_available() else "cpu")
    assert found == oracle(step)


def test_step_strided(lowering: str, device: torch.device) -> None:
    """A block table that is a slice, into a buffer that is a slice: what lies beside is left alone."""
    table = torch.randint(0, 9, (3, 20), dtype=torch.int32, device=device)
    wide = torch.full((4, 30), 77, dtype=torch.int32, device=device)
    lens = torch.tensor([3, 9, 12], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1, 2, 5], dtype=torch.int32, device=device)
    buffers = [torch.empty(n, dtype=torch.int32, device=device) for n in (5, 4)]
    tokens = [torch.empty(6, dtype=torch.int64 if i == 2 else torch.int32, device=device) for i in range(5)]
    torch.ops.mla.build_step_metadata(starts, lens, table[:, 3:6], *buffers, wide[:, 7:12], *tokens, 4, 2048)
    assert torch.equal(wide[:3, 7:10], table[:, 3:6])
    assert (wide[:, 10:12] == -1).all()
    assert (wide[3, 7:12] == -1).all()
    assert (wide[:, :7] == 77).all()
    assert (wide[:, 12:] == 77).all()


@pytest.mark.gpu
def test_step_at_real_sizes() -> None:
    query_lens = torch.randint(0, 9, (1000,)).tolist()
    seq_lens = torch.randint(1, 100_000, (1000,)).tolist()
    table = torch.randint(-1, 50_000, (1000, 1600)).tolist()
    step = Step(query_lens, seq_lens, table, 1600, 1024, 8192, 2048, 64, 2048)
    found = {}
    for backend in BACKENDS:
        with dispatch.override(backend):
            found[backend] = run(step, "cuda")
    assert found["triton"] == found["reference"]
