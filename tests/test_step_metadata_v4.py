"""Metadata of DeepSeek V4 steps, by exact equality with loops over Python integers, and after a capture."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mla_ops
from mla_ops import CompressedMetadata, StepMetadata, V4StepMetadata, dispatch
from mla_ops.testing.checks import record_calls

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
BACKENDS = ("reference", "triton")
FILL = 77


def int32(values: Any, device: Any = "cpu", shape: tuple[int, ...] | None = None) -> torch.Tensor:
    tensor = torch.tensor(values, dtype=torch.int32, device=device)
    return tensor if shape is None else tensor.reshape(shape)


def compressed_oracle(
    positions: list[int],
    requests: list[int],
    table: list[list[int]],
    capacity: tuple[int, int],
    ratio: int,
    block_size: int,
) -> tuple[list[list[int]], list[int], list[int]]:
    """The padded table, slot mapping and lengths of one compressed cache."""
    rows = [row + [-1] * (capacity[1] - len(row)) for row in table]
    rows += [[-1] * capacity[1]] * (capacity[0] - len(table))
    slots, lens = [], []
    for position, request in zip(positions, requests, strict=True):
        live = 0 <= request < len(table) and position >= 0
        lens.append(min((position + 1) // ratio, INT_MAX) if live else 0)
        slot = -1
        if live and (position + 1) % ratio == 0:
            index = position // ratio
            if index // block_size < len(table[request]):
                block = table[request][index // block_size]
                slot = block * block_size + index % block_size if block >= 0 else -1
        slots.append(slot)
    return rows, slots, lens


def check_compressed(
    positions: torch.Tensor,
    requests: torch.Tensor,
    table: torch.Tensor,
    capacity: tuple[int, int],
    ratio: int,
    block_size: int,
) -> None:
    buffer = torch.full(capacity, FILL, dtype=torch.int32, device=table.device)
    slots = torch.full(positions.shape, FILL, dtype=torch.int64, device=table.device)
    lens = torch.full_like(positions, FILL)
    torch.ops.mla.build_compressed_metadata(positions, requests, table, buffer, slots, lens, ratio, block_size)
    found = tuple(t.cpu().tolist() for t in (buffer, slots, lens))
    expected = compressed_oracle(positions.tolist(), requests.tolist(), table.tolist(), capacity, ratio, block_size)
    assert found == expected


@pytest.mark.parametrize(
    ("num_tokens", "num_requests", "max_blocks", "ratio", "block_size"),
    [
        (300, 7, 40, 4, 64),
        (300, 7, 40, 128, 2),
        (130, 3, 5, 1, 64),
        (5, 0, 4, 4, 2),
        (5, 3, 0, 4, 2),
        (0, 3, 4, 4, 2),
        (3, 2, 1500, 4, 1),
    ],
)
def test_compressed_metadata_equals_python(
    lowering: str,
    device: torch.device,
    num_tokens: int,
    num_requests: int,
    max_blocks: int,
    ratio: int,
    block_size: int,
) -> None:
    positions = torch.randint(0, max(max_blocks, 1) * ratio * block_size + 9, (num_tokens,), dtype=torch.int32)
    positions[::3] |= ratio - 1  # every third completes a group
    requests = torch.randint(-1, num_requests + 1, (num_tokens,), dtype=torch.int32)
    table = torch.randint(0, 100, (num_requests, max_blocks), dtype=torch.int32)
    for target in (positions, requests, table):
        for value in (INT_MIN, -1, INT_MAX):
            target[torch.rand(target.shape) < 0.05] = value
    tensors = positions.to(device), requests.to(device), table.to(device)
    check_compressed(*tensors, (num_requests, max_blocks), ratio, block_size)
    check_compressed(*tensors, (num_requests + 2, max_blocks + 3), ratio, block_size)


def test_nothing_to_write_at_all(lowering: str, device: torch.device) -> None:
    empty = int32([], device)
    check_compressed(empty, empty, empty.view(0, 0), (0, 0), 4, 64)


def test_compressed_metadata_of_slices(lowering: str, device: torch.device) -> None:
    """A block table that is a slice, into a buffer that is a slice: what lies beside is left alone."""
    table = torch.randint(0, 9, (3, 20), dtype=torch.int32, device=device)
    wide = torch.full((4, 30), FILL, dtype=torch.int32, device=device)
    positions, requests = int32([3, 7, 15], device), int32([0, 1, 2], device)
    slots, lens = torch.empty(3, dtype=torch.int64, device=device), torch.empty_like(positions)
    torch.ops.mla.build_compressed_metadata(positions, requests, table[:, 3:6], wide[:, 7:12], slots, lens, 4, 2)
    assert slots.tolist() == [int(table[0, 3]) * 2, int(table[1, 3]) * 2 + 1, int(table[2, 4]) * 2 + 1]
    assert lens.tolist() == [1, 2, 4]
    assert torch.equal(wide[:3, 7:10], table[:, 3:6])
    assert (wide[:, 10:12] == -1).all()
    assert (wide[3, 7:12] == -1).all()
    assert (wide[:, :7] == FILL).all()
    assert (wide[:, 12:] == FILL).all()


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_compressed_metadata_equals_python_on_anything(backend: str, data: st.DataObject) -> None:
    entries = st.one_of(st.integers(-2, 40), st.sampled_from((INT_MIN, INT_MAX)))

    def draw(*shape: int) -> torch.Tensor:
        number = torch.Size(shape).numel()
        values = data.draw(st.lists(entries, min_size=number, max_size=number))
        return int32(values, "cuda" if torch.cuda.is_available() else "cpu", shape)

    def size(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    num_tokens, num_requests, max_blocks = size(0, 5), size(0, 3), size(0, 4)
    capacity = num_requests + size(0, 2), max_blocks + size(0, 2)
    with dispatch.override(backend):
        check_compressed(
            draw(num_tokens), draw(num_tokens), draw(num_requests, max_blocks), capacity, size(1, 6), size(1, 5)
        )


@dataclass
class Step:
    """One step of an engine: its requests, and a table of each cache, as wide as the longest request takes."""

    query_lens: list[int]
    seq_lens: list[int]

    def inputs(self, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        longest = max(self.seq_lens, default=0)

        def table(tokens_a_block: int) -> torch.Tensor:
            shape = len(self.seq_lens), -(-longest // tokens_a_block)
            return torch.randint(0, 10_000, shape, generator=generator, dtype=torch.int32).to(device)

        starts = torch.tensor([0, *self.query_lens]).cumsum(0).to(torch.int32).to(device)
        return starts, int32(self.seq_lens, device), table(64), table(4 * 64), table(128 * 2)


MAX_NUM_TOKENS, MAX_NUM_REQUESTS, MAX_SEQ_LEN = 40, 6, 3000
STEPS = {
    "decode": Step([1, 1, 1], [1, 128, 2999]),
    "speculative decode": Step([3, 3, 3, 3], [130, 512, 4, 2000]),
    "prefill": Step([40], [40]),
    "mixed": Step([1, 30, 0, 1], [256, 158, 77, 3000]),
    "a full batch": Step([1] * 6, [127, 128, 129, 255, 256, 257]),
    "no requests": Step([], []),
}


def allocate(device: torch.device | str) -> V4StepMetadata:
    return V4StepMetadata.allocate(
        max_num_tokens=MAX_NUM_TOKENS, max_num_requests=MAX_NUM_REQUESTS, max_seq_len=MAX_SEQ_LEN, device=device
    )


def buffers(metadata: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a metadata object by its path."""
    found: dict[str, torch.Tensor] = {}
    for field in fields(metadata):
        value = getattr(metadata, field.name)
        if is_dataclass(value):
            found |= {f"{field.name}.{name}": tensor for name, tensor in buffers(value).items()}
        elif torch.is_tensor(value):
            found[field.name] = value
    return found


def oracle(inputs: tuple[torch.Tensor, ...]) -> dict[str, list]:
    """V4's part of `StepMetadata`, token by token."""
    starts, seq_lens, window_table, c4a_table, c128a_table = (tensor.tolist() for tensor in inputs)
    positions, requests = [-1] * MAX_NUM_TOKENS, [-1] * MAX_NUM_TOKENS
    for request, seq_len in enumerate(seq_lens):
        for token in range(starts[request], starts[request + 1]):
            positions[token] = seq_len - (starts[request + 1] - token)
            requests[token] = request
    expected: dict[str, list] = {"window_indices": [], "window_lens": [], "c128a_indices": [], "c128a_lens": []}
    for position, request in zip(positions, requests, strict=True):
        tokens = range(max(position - 127, 0), position + 1)
        window = [window_table[request][p // 64] * 64 + p % 64 for p in tokens]
        expected["window_indices"].append(window + [-1] * (128 - len(window)))
        expected["window_lens"].append(len(window))
        dense = [c128a_table[request][i // 2] * 2 + i % 2 for i in range((position + 1) // 128)]
        expected["c128a_indices"].append(dense + [-1] * (MAX_SEQ_LEN // 128 - len(dense)))
        expected["c128a_lens"].append(len(dense))
    for name, table, ratio, size in (("c4a", c4a_table, 4, 64), ("c128a", c128a_table, 128, 2)):
        capacity = MAX_NUM_REQUESTS, -(-MAX_SEQ_LEN // (ratio * size))
        rows, slots, lens = compressed_oracle(positions, requests, table, capacity, ratio, size)
        expected |= {f"{name}.block_table": rows, f"{name}.slot_mapping": slots, f"{name}.compressed_lens": lens}
    return expected


@pytest.mark.parametrize("name", STEPS)
def test_step_equals_python(lowering: str, device: torch.device, name: str) -> None:
    inputs = STEPS[name].inputs(device)
    metadata = allocate(device)
    metadata.build(*inputs)
    found = buffers(metadata)
    for path, expected in oracle(inputs).items():
        assert found[path].cpu().tolist() == expected, path

    alone = StepMetadata.allocate(
        max_num_tokens=MAX_NUM_TOKENS,
        max_num_requests=MAX_NUM_REQUESTS,
        max_blocks_per_request=-(-MAX_SEQ_LEN // 64),
        block_size=64,
        index_topk=128,
        device=device,
    )
    alone.build(*inputs[:3])
    for path, expected in buffers(alone).items():
        assert torch.equal(found[f"step.{path}"], expected), path


def test_entries_past_a_cache_count_nowhere(lowering: str, device: torch.device) -> None:
    """Block tables that name blocks that their caches do not have: no slot, and no length that counts it."""
    starts, seq_lens = int32([0, 1, 2], device), int32([300, 513], device)
    window_table = int32([[3, 9, 9, 9, 5], [0, 0, 0, 0, 0]], device)
    window_table = torch.cat((window_table, int32([[-1] * 4, [1, 2, 9, 4]], device)), dim=1)
    c4a_table, c128a_table = int32([[0, 1], [2, 0]], device), int32([[6, 0, 0], [5, 6, 5]], device)
    metadata = V4StepMetadata.allocate(
        max_num_tokens=3,
        max_num_requests=2,
        max_seq_len=600,
        num_blocks=9,
        c4a_num_blocks=3,
        c128a_num_blocks=6,
        device=device,
    )
    metadata.build(starts, seq_lens, window_table, c4a_table, c128a_table)
    window = [5 * 64 + p % 64 for p in range(256, 300)]
    assert metadata.window_indices[0].tolist() == window + [-1] * (128 - len(window))
    window = [2 * 64 + p % 64 for p in range(385, 448)] + [4 * 64]
    assert metadata.window_indices[1].tolist() == window + [-1] * (128 - len(window))
    assert metadata.window_lens.tolist() == [44, 64, 0]
    assert metadata.c128a_indices.tolist() == [[-1] * 4, [10, 11, -1, -1], [-1] * 4]
    assert metadata.c128a_lens.tolist() == [0, 2, 0]
    assert (metadata.num_blocks, metadata.c4a.num_blocks, metadata.c128a.num_blocks) == (9, 3, 6)


def test_nothing_of_an_earlier_step_is_left(lowering: str, device: torch.device) -> None:
    """The same buffers through every step, longer and shorter, against fresh ones: equal, in place, whole."""
    metadata = allocate(device)
    addresses = {path: tensor.data_ptr() for path, tensor in buffers(metadata).items()}
    for seed, step in enumerate(STEPS.values()):
        inputs, fresh = step.inputs(device, seed), allocate(device)
        metadata.build(*inputs)
        fresh.build(*inputs)
        for path, expected in buffers(fresh).items():
            assert torch.equal(buffers(metadata)[path], expected), path
    assert {path: tensor.data_ptr() for path, tensor in buffers(metadata).items()} == addresses


def test_fresh_buffers_are_padding(lowering: str, device: torch.device) -> None:
    """A capture before the first step sees a step without requests."""
    fresh, built = allocate(device), allocate(device)
    built.build(*STEPS["no requests"].inputs(device))
    for path, expected in buffers(built).items():
        assert torch.equal(buffers(fresh)[path], expected), path


def test_row_strides_are_those_of_the_capacity(device: torch.device) -> None:
    """A stride of the batch's longest request, frozen in a graph, would read other rows at the next step."""
    metadata = allocate(device)
    for step in STEPS.values():
        metadata.build(*step.inputs(device))
        assert metadata.c128a_indices.stride() == (MAX_SEQ_LEN // 128, 1)
        assert metadata.window_indices.stride() == (128, 1)
        assert metadata.c4a.block_table.stride() == (-(-MAX_SEQ_LEN // 256), 1)


def test_pages_of_256_tokens_need_no_wider_tables() -> None:
    """Engines page all caches by 256 tokens: 64 compressed ones of ratio 4, and 2 of ratio 128."""
    for max_seq_len in (0, 1, 255, 256, 257, 1_048_576):
        metadata = V4StepMetadata.allocate(
            max_num_tokens=1, max_num_requests=1, max_seq_len=max_seq_len, block_size=256, device="meta"
        )
        width = -(-max_seq_len // 256)
        for table in (metadata.step.block_table, metadata.c4a.block_table, metadata.c128a.block_table):
            assert table.shape == (1, width)


def test_a_step_is_five_ops(device: torch.device) -> None:
    with record_calls() as calls:
        allocate(device).build(*STEPS["mixed"].inputs(device))
    assert [op for op, _ in calls] == [
        "build_step_metadata",
        "build_compressed_metadata",
        "build_compressed_metadata",
        "sliding_window_indices",
        "compressed_indices",
    ]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched, on a GPU or in the interpreter."""
    pytest.importorskip("triton")
    names: list[str] = []
    if torch.cuda.is_available():
        from triton.runtime.jit import JITFunction as Kernel

        def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
            names.append(self.fn.__name__)
            return run(self, *args, **kwargs)

        run = Kernel.run
        monkeypatch.setattr(Kernel, "run", launched)
    else:
        from triton.runtime.interpreter import GridExecutor

        def executed(self: Any, *args: Any, **kwargs: Any) -> Any:
            names.append(self.fn.__name__)
            return call(self, *args, **kwargs)

        call = GridExecutor.__call__
        monkeypatch.setattr(GridExecutor, "__call__", executed)
    return names


def test_each_op_is_one_launch(triton_lowering: None, device: torch.device, launches: list[str]) -> None:
    metadata = allocate(device)
    metadata.build(*STEPS["mixed"].inputs(device))
    assert launches == ["_step_kernel", *["_compressed_kernel"] * 2, *["_range_kernel"] * 2]
    launches.clear()
    chosen = torch.full((MAX_NUM_TOKENS, 512), -1, dtype=torch.int32, device=device)
    step, c4a = metadata.step, metadata.c4a
    mla_ops.compute_global_topk_indices_and_lens(chosen, step.req_id_per_token, c4a.block_table, c4a.block_size)
    lens = step.seq_lens
    mla_ops.combine_topk_swa_indices(chosen, step.positions, step.req_id_per_token, lens, lens, 128, 4, 4000, 750)
    assert launches == ["_convert_kernel", "_combine_kernel"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_num_tokens": -1}, "max_num_tokens must be at least 0, got -1"),
        ({"max_num_requests": -1}, "max_num_requests must be at least 0, got -1"),
        ({"max_seq_len": -1}, "max_seq_len must be at least 0, got -1"),
        ({"window": -1}, "window must be at least 0, got -1"),
        ({"num_blocks": -1}, "num_blocks must be at least 0, got -1"),
        ({"c128a_num_blocks": -1}, "c128a_num_blocks must be at least 0, got -1"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"c4a_block_size": 0}, "c4a_block_size must be at least 1, got 0"),
        ({"c128a_ratio": 0}, "c128a_ratio must be at least 1, got 0"),
    ],
)
def test_capacities_that_make_no_sense_are_refused(change: dict[str, int], words: str) -> None:
    sizes = {"max_num_tokens": 4, "max_num_requests": 2, "max_seq_len": 100, **change}
    with pytest.raises(ValueError, match=words):
        V4StepMetadata.allocate(**sizes)
    if "max_num_tokens" in change:
        blocks = {"max_blocks_per_request": 3, "compress_ratio": 4, "block_size": 64}
        with pytest.raises(ValueError, match=words):
            CompressedMetadata.allocate(max_num_tokens=-1, max_num_requests=2, **blocks)


def test_a_compiled_build_settles_on_one_graph() -> None:
    """Requests and table widths vary; the buffers, and so the index rows, do not."""
    from mla_ops.testing.checks import run_without_recompiling

    def build(*arguments: Any) -> None:
        *inputs, metadata = arguments
        metadata.build(*inputs)

    device = torch.device("cpu")
    steps = [
        Step([2] * n, [length + 100 * r for r in range(n)]) for n, length in ((3, 1000), (1, 300), (6, 2000), (0, 0))
    ]
    # a slice of a table at capacity keeps its stride whatever its width, 0 and 1 included
    calls = []
    for seed, step in enumerate(steps):
        starts, lens, *tables = step.inputs(device, seed)
        wide = [
            torch.zeros(MAX_NUM_REQUESTS, 60, dtype=torch.int32)[: t.shape[0], : t.shape[1]].copy_(t) for t in tables
        ]
        calls.append((starts, lens, *wide, allocate(device)))

    def unbacked(*arguments: Any) -> list[tuple[torch.Tensor, int]]:
        starts, lens, *tables, _ = arguments
        return [(starts, 0), (lens, 0)] + [(table, dim) for table in tables for dim in (0, 1)]

    run_without_recompiling(build, calls, unbacked=unbacked)
    for *inputs, metadata in calls:
        expected = allocate(device)
        expected.build(*inputs)
        for path, tensor in buffers(expected).items():
            assert torch.equal(buffers(metadata)[path], tensor), path


@pytest.mark.gpu
def test_a_captured_build_and_a_layer_replay_with_other_lengths() -> None:
    """Other lengths, other tables, fewer live tokens, fewer requests: a replay equals an eager step to the bit."""
    device = torch.device("cuda")
    metadata = allocate(device)
    # an engine keeps these at fixed addresses: inputs at capacity, requests past the step's without tokens
    starts = torch.zeros(MAX_NUM_REQUESTS + 1, dtype=torch.int32, device=device)
    lens = torch.zeros(MAX_NUM_REQUESTS, dtype=torch.int32, device=device)
    tables = [torch.full_like(table, -1) for path, table in buffers(metadata).items() if path.endswith("block_table")]
    chosen = torch.full((MAX_NUM_TOKENS, 640), -1, dtype=torch.int32, device=device)

    def fill(step: Step, seed: int) -> None:
        given = step.inputs(device, seed)
        starts.fill_(int(given[0][-1]))
        starts[: len(given[0])] = given[0]
        lens.zero_()
        lens[: len(given[1])] = given[1]
        for table, rows in zip(tables, given[2:], strict=True):
            table.fill_(INT_MAX)
            table[: rows.shape[0], : rows.shape[1]] = rows
        generator = torch.Generator(device).manual_seed(seed)
        chosen.random_(-1, 750, generator=generator)

    def layer(metadata: V4StepMetadata) -> tuple[torch.Tensor, ...]:
        metadata.build(starts, lens, *tables)
        step, c4a = metadata.step, metadata.c4a
        chosen_slots = mla_ops.compute_global_topk_indices_and_lens(
            chosen, step.req_id_per_token, c4a.block_table, c4a.block_size, num_blocks=10_000
        )
        rows = mla_ops.combine_topk_swa_indices(
            chosen, step.positions, step.req_id_per_token, step.seq_lens, step.seq_lens, 128, 4, 4000, 750
        )
        return *chosen_slots, *rows

    fill(STEPS["decode"], 0)
    layer(metadata)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = layer(metadata)
    for seed, step in enumerate(STEPS.values()):
        fill(step, seed)
        graph.replay()
        fresh = allocate(device)
        expected = layer(fresh)
        for found, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(found, wanted)
        for path, wanted in buffers(fresh).items():
            assert torch.equal(buffers(metadata)[path], wanted), path
        live = sum(step.query_lens)
        for indices, length in ((outputs[0], outputs[1]), (outputs[2], outputs[3])):
            assert (indices[live:] == -1).all()
            assert (length[live:] == 0).all()
        for path, wanted in oracle(step.inputs(device, seed)).items():
            if not path.endswith("block_table"):
                assert buffers(metadata)[path].tolist() == wanted, path


@pytest.mark.gpu
def test_an_eager_build_reaches_a_graph_that_reads_its_buffers() -> None:
    """The other use: build outside, replay layers that read whole buffers."""
    device = torch.device("cuda")
    metadata = allocate(device)
    step, c4a = metadata.step, metadata.c4a
    chosen = torch.arange(640, dtype=torch.int32, device=device).repeat(MAX_NUM_TOKENS, 1)

    def layer() -> tuple[torch.Tensor, torch.Tensor]:
        return mla_ops.compute_global_topk_indices_and_lens(
            chosen, step.req_id_per_token, c4a.block_table, c4a.block_size
        )

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = layer()
    for seed, other in enumerate(STEPS.values()):
        metadata.build(*other.inputs(device, seed))
        graph.replay()
        for found, wanted in zip(outputs, layer(), strict=True):
            assert torch.equal(found, wanted)
