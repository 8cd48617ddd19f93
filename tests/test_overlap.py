"""Written tensors that overlap: refused for every lowering, and no tensor refused that overlaps nothing."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_errors import assert_refused, complete_sample, with_changes

from mla_ops.overlap import overlaps_itself, share_memory
from mla_ops.testing import functional, op_names, output_names

OUT_OPS = [name for name in op_names() if name != functional(name)]


def written(op_name: str) -> list[str]:
    op = complete_sample(op_name).op
    if op_name in OUT_OPS:
        return list(output_names(op))
    if op._schema.returns:
        return []
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


EVERY_WRITTEN = [(op_name, name) for op_name in op_names() for name in written(op_name)]


def overlapping(value: torch.Tensor, how: str) -> torch.Tensor:
    if how == "expanded":
        return value[:1].clone().expand(value.shape)
    # rows half a row apart, on 16 bytes where they are wide enough
    strides = [max(stride // 32 * 16, 1) for stride in value.stride()]
    return torch.zeros(value.numel() * 2, dtype=value.dtype).as_strided(
        value.shape, (*strides[:1], *value.stride()[1:])
    )


@pytest.mark.parametrize("how", ["expanded", "rows that overlap"])
@pytest.mark.parametrize(("op_name", "name"), EVERY_WRITTEN)
def test_a_written_tensor_that_overlaps_itself_is_refused(op_name: str, name: str, how: str) -> None:
    value = complete_sample(op_name).kwargs[name]
    if how != "expanded" and value.dim() == 1:
        pytest.skip("one dimension overlaps only if it is expanded")
    bad = overlapping(value, how)
    # planar caches are refused for blocks that are not apart, which names one stride
    words = (functional(op_name), name, f"{bad.stride(0)}")
    assert_refused(with_changes(op_name, **{name: bad}), ValueError, *words, compiled=how == "expanded")


@pytest.mark.parametrize("op_name", op_names())
def test_a_written_tensor_in_the_memory_of_another_argument_is_refused(op_name: str) -> None:
    sample = complete_sample(op_name)
    for name in written(op_name):
        value = sample.kwargs[name]
        for other, tensor in sample.kwargs.items():
            both_caches = other.endswith("_cache") and name.endswith("_cache")
            if not isinstance(tensor, torch.Tensor) or other == name or both_caches:
                continue
            memory = torch.zeros(value.nbytes + tensor.nbytes + 64, dtype=torch.uint8)
            # the last element of one beside the first of the other
            start = (value.nbytes - 1) // 16 * 16
            first = memory[: value.nbytes].view(value.dtype).view(value.shape)
            second = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            bad = with_changes(op_name, **{name: first, other: second})
            before = memory.clone()
            with pytest.raises(ValueError, match=rf"{op_name}: \w+ is written, so it must not overlap \w+") as caught:
                bad.op(**bad.kwargs)
            assert {name, other} <= set(re.findall(r"\w+", str(caught.value)))
            assert torch.equal(memory, before)


def test_outputs_side_by_side_in_one_buffer_are_taken() -> None:
    """Also beside what is read: queries and outputs in the rows of one tensor."""
    q = complete_sample("sparse_attention.out").kwargs["q"]
    num_tokens, num_heads, width = q.shape
    rows = torch.zeros(num_tokens, num_heads, width + 512 + 64, dtype=q.dtype)
    rows[..., :width] = q
    lse = torch.empty(num_tokens, num_heads)
    sample = with_changes("sparse_attention.out", q=rows[..., :width], out=rows[..., width : width + 512], lse=lse)
    expected = complete_sample("sparse_attention")
    out, own_lse = expected.op(**expected.kwargs)
    sample.op(**sample.kwargs)
    assert torch.equal(rows[..., width : width + 512], out)
    assert torch.equal(rows[..., :width], q)
    assert torch.equal(lse, own_lse)


def test_caches_in_blocks_of_one_memory_are_taken() -> None:
    """Engines allocate them so: each tensor spans all of it, and tables say whose blocks are whose."""
    sample = complete_sample("compress_and_cache")
    state, cache = sample.kwargs["state_cache"], sample.kwargs["kv_cache"]
    memory = torch.zeros(max(state.nbytes, cache.nbytes), dtype=torch.uint8)
    shared = {
        name: memory[: value.nbytes].view(value.dtype).view(value.shape)
        for name, value in (("state_cache", state), ("kv_cache", cache))
    }
    again = with_changes("compress_and_cache", **shared)
    again.op(**again.kwargs)


def places(tensor: torch.Tensor) -> list[int]:
    """Byte of the storage that each element begins at."""
    ranges = itertools.product(*(range(size) for size in tensor.shape))
    start, size = tensor.storage_offset(), tensor.element_size()
    return [(start + sum(i * s for i, s in zip(at, tensor.stride(), strict=True))) * size for at in ranges]


LAYOUTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 13)), min_size=1, max_size=3)


@given(LAYOUTS)
def test_no_tensor_that_overlaps_itself_is_missed(layout: list[tuple[int, int]]) -> None:
    shape, strides = zip(*layout, strict=True)
    found = places(torch.zeros(200).as_strided(shape, strides))
    if len(set(found)) < len(found):
        assert overlaps_itself(shape, strides)


@given(st.permutations(range(3)), st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=3, max_size=3))
def test_a_slice_of_a_dense_tensor_does_not_overlap_itself(order: list[int], dims: list[tuple[int, int]]) -> None:
    """Each dimension a part, or every second entry, of a larger one."""
    dense = torch.zeros([2 * size + more for size, more in dims])
    part = dense[tuple(slice(more, more + 2 * size, 2) for size, more in dims)].permute(order)
    assert not overlaps_itself(part.shape, part.stride())


@given(LAYOUTS, LAYOUTS, st.integers(0, 40), st.integers(0, 40), st.booleans())
def test_no_pair_that_overlaps_is_missed(
    first: list[tuple[int, int]], second: list[tuple[int, int]], start: int, other_start: int, wide: bool
) -> None:
    memory = torch.zeros(400, dtype=torch.int32)
    tensors: list[Any] = []
    for layout, offset, storage in (
        (first, start, memory),
        (second, other_start, memory if wide else memory.view(torch.int16)),
    ):
        shape, strides = zip(*layout, strict=True)
        tensors.append(storage.as_strided(shape, strides, offset))
    bytes_of = [{p + i for p in places(t) for i in range(t.element_size())} for t in tensors]
    if bytes_of[0] & bytes_of[1]:
        assert share_memory(*tensors)
        assert share_memory(*reversed(tensors))


def test_layers_in_the_pages_of_one_pool_do_not_overlap() -> None:
    """Block by block in turns, as engines lay layers out."""
    pool = torch.zeros(5, 2, 656, dtype=torch.uint8)
    assert not share_memory(pool[:, 0], pool[:, 1])
    assert share_memory(pool[:, 0], pool[2:4, 0])
    assert not share_memory(pool[:2, 0], pool[2:4, 0])
