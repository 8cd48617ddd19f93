"""Programs with mutating ops that torch itself gets wrong, and what users do instead.

Each hazard is asserted as it is known to be, or as right: a torch that fixes one passes too, and says so in a warning.
The way that the docs recommend is always asserted right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import mla_ops  # noqa: F401  registers the ops
from mla_ops.formats import allocate_cache
from mla_ops.testing import op_names, sample_inputs
from mla_ops.testing.checks import assert_same_bits, large_allocations
from mla_ops.testing.samples import overload

mla = torch.ops.mla


class FixedInTorchWarning(UserWarning):
    """A hazard of the documentation is gone in this torch: docs/hazards.md can drop it."""


def note_fixed(hazard: str) -> None:
    warnings.warn(f"torch {torch.__version__} has fixed: {hazard}", FixedInTorchWarning, stacklevel=2)


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def keys(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ones = torch.ones(num_tokens, 576, dtype=torch.bfloat16)
    return ones[:, :512].contiguous(), ones[:, 512:].contiguous(), torch.arange(num_tokens)


def written_layers(pool: torch.Tensor) -> list[int]:
    return [layer for layer in range(pool.shape[0]) if bool(pool[layer].any())]


def test_hazard_pool_of_layers_is_written_at_layer_zero_under_dynamic_shapes() -> None:
    # a symbolic storage offset is lost on the way through Inductor, without an error
    def write_layer_two(pool: torch.Tensor, kv_c: Any, k_pe: Any, slots: Any) -> None:
        mla.concat_and_cache(kv_c, k_pe, pool[2], slots, "fp8_ds_mla")

    pool = torch.zeros(3, 4, 8, 656, dtype=torch.uint8)
    torch.compile(write_layer_two, dynamic=True, fullgraph=True)(pool, *keys(5))
    assert written_layers(pool) in ([0], [2])
    if written_layers(pool) == [2]:
        note_fixed("pool[layer] as a mutated argument under dynamic shapes")


def test_hazard_pool_of_layers_goes_wrong_after_a_change_of_size_with_default_settings() -> None:
    # a profile run with a small pool, then the real one, is all it takes
    def write_layer_two(pool: torch.Tensor, kv_c: Any, k_pe: Any, slots: Any) -> None:
        mla.concat_and_cache(kv_c, k_pe, pool[2], slots, "fp8_ds_mla")

    compiled = torch.compile(write_layer_two, fullgraph=True)
    small, large = (torch.zeros(3, num_blocks, 8, 656, dtype=torch.uint8) for num_blocks in (4, 6))
    compiled(small, *keys(5))
    assert written_layers(small) == [2], "static shapes are right"
    compiled(large, *keys(5))
    assert written_layers(large) in ([0], [2])


@pytest.mark.parametrize("dynamic", [None, True, False], ids=["default", "dynamic", "static"])
def test_instead_one_whole_tensor_a_layer_is_right(dynamic: bool | None) -> None:
    def write_layer_two(caches: list[torch.Tensor], kv_c: Any, k_pe: Any, slots: Any) -> None:
        mla.concat_and_cache(kv_c, k_pe, caches[2], slots, "fp8_ds_mla")

    compiled = torch.compile(write_layer_two, dynamic=dynamic, fullgraph=True)
    for num_blocks in (4, 6, 9):
        caches = [allocate_cache("fp8_ds_mla", num_blocks, 8) for _ in range(3)]
        compiled(caches, *keys(5))
        assert [bool(cache.any()) for cache in caches] == [False, False, True]


@pytest.mark.parametrize("dynamic", [None, True, False], ids=["default", "dynamic", "static"])
def test_instead_layers_split_off_a_pool_outside_the_graph_are_right(dynamic: bool | None) -> None:
    # an engine with one allocation passes each layer as an input of its own, so offsets are not the graph's
    def write_layer_two(caches: list[torch.Tensor], kv_c: Any, k_pe: Any, slots: Any) -> None:
        mla.concat_and_cache(kv_c, k_pe, caches[2], slots, "fp8_ds_mla")

    compiled = torch.compile(write_layer_two, dynamic=dynamic, fullgraph=True)
    for num_blocks in (4, 6, 9):
        pool = torch.zeros(3, num_blocks, 8, 656, dtype=torch.uint8)
        compiled(list(pool.unbind()), *keys(5))
        assert written_layers(pool) == [2]


def test_hazard_an_optional_written_argument_crashes_inductor_so_no_schema_has_one() -> None:
    for name in op_names():
        for argument in overload(name)._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            assert not (written and "Optional" in str(argument.type)), f"{name}: {argument.name}"


def test_hazard_dtype_view_of_a_cache_may_clone_it() -> None:
    def write_viewed(cache: torch.Tensor, kv_c: Any, k_pe: Any, slots: Any) -> None:
        mla.concat_and_cache(kv_c, k_pe, cache.view(torch.uint8), slots, "fp8_ds_mla")

    cache = torch.zeros(16, 8, 656, dtype=torch.int8)
    _, codes = run_and_get_code(torch.compile(write_viewed, fullgraph=True), cache, *keys(5))
    expected = allocate_cache("fp8_ds_mla", 16, 8)
    mla.concat_and_cache(*keys(5)[:2], expected, keys(5)[2], "fp8_ds_mla")
    assert_same_bits(cache.view(torch.uint8), expected, "the result is right either way")
    if not large_allocations(codes, cache.numel()):
        note_fixed("a dtype view of a mutated argument clones it")


def test_instead_the_cache_as_it_was_allocated_is_not_cloned() -> None:
    def write(cache: torch.Tensor, kv_c: Any, k_pe: Any, slots: Any) -> None:
        mla.concat_and_cache(kv_c, k_pe, cache, slots, "fp8_ds_mla")

    cache = allocate_cache("fp8_ds_mla", 16, 8)
    _, codes = run_and_get_code(torch.compile(write, fullgraph=True), cache, *keys(5))
    assert large_allocations(codes, cache[0].numel()) == []


CAPACITY = 9


def step_written_to(take: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[..., None]:
    def step(indices: torch.Tensor, context_lens: torch.Tensor, context: torch.Tensor, new: torch.Tensor) -> None:
        num_tokens = indices.shape[0]
        mla.filter_prefill_indices.out(
            indices, context_lens, context_indices=take(context, num_tokens), new_indices=take(new, num_tokens)
        )

    return step


def run_sizes(step: Callable[..., None], buffers_for: Callable[[int], tuple[torch.Tensor, ...]]) -> int:
    """Runs several sizes below the buffers' capacity and returns how many graphs that took."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for num_tokens in (3, 5, 2, 8, 1):
        indices = torch.arange(num_tokens * 4, dtype=torch.int32).view(-1, 4)
        lens, buffers = torch.ones(num_tokens, dtype=torch.int32), buffers_for(num_tokens)
        for tensor in (indices, lens, *(buffer for buffer in buffers if buffer.shape[0] != CAPACITY)):
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
        compiled(indices, lens, *buffers)
    return counter.frame_count


def test_hazard_slice_of_a_buffer_inside_the_graph_specialises() -> None:
    step = step_written_to(lambda buffer, num_tokens: buffer[:num_tokens])
    whole = torch.zeros(CAPACITY, 4, dtype=torch.int32), torch.zeros(CAPACITY, 4, dtype=torch.int32)
    try:
        graphs = run_sizes(step, lambda num_tokens: whole)
    except Exception as error:  # noqa: BLE001  the class differs by version
        assert "unbacked" in str(error).lower() or "data-dependent" in str(error).lower()  # noqa: PT017  see above
        return
    if graphs == 1:
        note_fixed("buffer[:n] as a mutated argument specialises")


def test_instead_a_slice_taken_outside_the_graph_or_a_whole_buffer_does_not_specialise() -> None:
    step = step_written_to(lambda buffer, num_tokens: buffer)
    whole = torch.zeros(CAPACITY, 4, dtype=torch.int32), torch.zeros(CAPACITY, 4, dtype=torch.int32)
    assert run_sizes(step, lambda num_tokens: tuple(buffer[:num_tokens] for buffer in whole)) == 1

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    build = torch.compile(mla.build_step_metadata, backend=counter, fullgraph=True)
    first = sample_inputs("build_step_metadata", "cpu")[0]
    for num_requests in (2, 4, 0, 1):
        starts, lens = torch.arange(num_requests + 1, dtype=torch.int32), torch.ones(num_requests, dtype=torch.int32)
        table = torch.zeros(num_requests, 3, dtype=torch.int32)
        for tensor in (starts, lens, table):
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
        build(starts, lens, table, *first.args[3:])
    assert counter.frame_count == 1


def test_hazard_a_buffer_called_out_with_strided_rows_is_refused_by_dynamo() -> None:
    # Dynamo's rule for `out=` of torch's own ops applies to any op: loud, and only inside torch.compile
    def into(q: Any, kv: Any, indices: Any, out: Any, lse: Any) -> None:
        mla.sparse_attention.out(q, kv, indices, 0.1, out=out, lse=lse)

    q, kv, indices = torch.ones(4, 2, 576), torch.ones(8, 576), torch.zeros(4, 3, dtype=torch.int32)
    wide, lse = torch.zeros(4, 2, 600), torch.zeros(4, 2)
    expected, _ = mla.sparse_attention(q, kv, indices, 0.1)

    into(q, kv, indices, wide[..., :512], lse)
    assert torch.equal(wide[..., :512], expected), "eager takes strided rows"
    wide.zero_()
    try:
        torch.compile(into, backend="aot_eager", fullgraph=True)(q, kv, indices, wide[..., :512], lse)
    except torch._dynamo.exc.Unsupported as error:
        assert "non-contiguous" in str(error)  # noqa: PT017  a torch without the rule passes as well
        return
    assert torch.equal(wide[..., :512], expected)
    note_fixed("an argument called `out` must be contiguous")


def test_hazard_native_read_before_a_write_is_lost_in_a_graph_compiled_for_training() -> None:
    def read_then_write(cache: torch.Tensor, weight: torch.Tensor, kv_c: Any, k_pe: Any, slots: Any) -> Any:
        doubled = cache * 2
        mla.concat_and_cache(kv_c, k_pe, cache, slots, "bf16")
        return (doubled + 1) * weight

    cache, weight = allocate_cache("bf16", 2, 8), torch.ones(576, dtype=torch.bfloat16, requires_grad=True)
    result = torch.compile(read_then_write, fullgraph=True)(cache, weight, *keys(5))
    values = set(result.detach().flatten().tolist())
    assert values in ({1.0}, {1.0, 3.0})
    if values == {1.0}:
        note_fixed("a native read before an opaque write sees the written values")


def test_instead_a_read_through_an_op_of_the_library_keeps_its_place() -> None:
    table, lens, starts = (torch.tensor(v, dtype=torch.int32) for v in ([[0, 1]], [16], [0, 16]))

    def read_then_write(cache: torch.Tensor, weight: torch.Tensor, kv_c: Any, k_pe: Any, slots: Any) -> Any:
        rows = mla.gather_cache(cache, table, lens, starts, 16, "bf16")
        mla.concat_and_cache(kv_c, k_pe, cache, slots, "bf16")
        return (rows * 2 + 1) * weight

    cache, weight = allocate_cache("bf16", 2, 8), torch.ones(576, dtype=torch.bfloat16, requires_grad=True)
    result = torch.compile(read_then_write, fullgraph=True)(cache, weight, *keys(5))
    assert set(result.detach().flatten().tolist()) == {1.0}
