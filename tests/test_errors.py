"""The refusals of each op and their messages: the op, the argument, what was expected and what came.

The same text comes from an eager call, from fake tensors and out of torch.compile, and nothing was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from refusals import REFUSALS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import mla_ops
from mla_ops.distributed import ContextParallel
from mla_ops.formats import FORMATS, allocate_cache, get_format
from mla_ops.testing import Sample, functional, op_names, out_overload, output_names, sample_inputs
from mla_ops.testing.checks import assert_same_memory, clone_sample, named_arguments

INT32 = torch.int32
FAKE = FakeTensorMode()


@cache
def fake_of(dtype: torch.dtype, requires_grad: bool, *layout: Any) -> torch.Tensor:
    with FAKE:
        return torch.empty(2**20, dtype=dtype).as_strided(*layout).requires_grad_(requires_grad)


def fake(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type == "meta":
        return value
    return fake_of(value.dtype, value.requires_grad, value.shape, value.stride(), value.storage_offset())


def complete_sample(op_name: str) -> Sample:
    """A legal call that passes every optional tensor as well, all arguments by name."""
    return clone_sample(legal_call(op_name))


@cache
def legal_call(op_name: str) -> Sample:
    sample = sample_inputs(op_name, "cpu")[0]
    optional = {
        "attn_sink": torch.zeros(3),
        "block_table": torch.zeros(2, 3, dtype=INT32),
        "extra_block_table": torch.zeros(2, 3, dtype=INT32),
        "extra_topk_length": torch.ones(5, dtype=INT32),
        "gather_lens": torch.ones(2, dtype=INT32),
        "req_id_per_token": torch.zeros(5, dtype=INT32),
        "row_ends": torch.ones(5, dtype=INT32),
        "row_starts": torch.zeros(5, dtype=INT32),
        "topk_length": torch.ones(5, dtype=INT32),
    }
    arguments = named_arguments(sample)
    for argument in sample.op._schema.arguments:
        if argument.name in optional:
            arguments.setdefault(argument.name, optional[argument.name])
        if argument.name == "q_rope":
            arguments["q"], arguments["q_rope"] = (half.contiguous() for half in arguments["q"].split((512, 64), dim=2))
    return replace(sample, args=(), kwargs=arguments)


def with_changes(op_name: str, **changes: Any) -> Sample:
    sample = complete_sample(op_name)
    return replace(sample, kwargs={**sample.kwargs, **changes})


def tensor_arguments(op_name: str) -> list[str]:
    return [name for name, value in legal_call(op_name).kwargs.items() if isinstance(value, torch.Tensor)]


def message_of(call: Callable[[], Any], *kinds: type[Exception]) -> str:
    with pytest.raises(kinds or Exception) as caught:
        call()
    return str(caught.value)


def assert_refused(sample: Sample, kind: type[Exception], *words: str, compiled: bool = True) -> None:
    """Eager, fake and, unless told otherwise, compiled calls say the same, and no argument's memory changed."""
    before = clone_sample(sample)
    message = message_of(lambda: sample.op(**sample.kwargs), kind)
    for word in words:
        assert word in message, f"no {word!r} in {message!r}"
    assert_same_memory(sample, before, "after a refused call")

    fakes = {name: fake(value) for name, value in sample.kwargs.items()}
    if not any(isinstance(value, torch.Tensor) and value.device.type == "meta" for value in fakes.values()):
        with FAKE:
            assert message_of(lambda: sample.op(**fakes), kind) == message

    if not compiled:
        return

    def call(kwargs: dict[str, Any]) -> Any:
        return sample.op(**kwargs)

    torch._dynamo.reset()
    function = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False)
    assert message in message_of(lambda: function(sample.kwargs))
    assert_same_memory(sample, before, "after a refused compiled call")


BASE_OPS = [name for name in op_names() if name == functional(name)]
OUT_OPS = [name for name in op_names() if name != functional(name)]
EVERY_TENSOR = [(op_name, name) for op_name in op_names() for name in tensor_arguments(op_name)]
every_tensor = pytest.mark.parametrize(
    ("op_name", "name"), EVERY_TENSOR, ids=[f"{name} of {op_name}" for op_name, name in EVERY_TENSOR]
)


@pytest.mark.parametrize("op_name", op_names())
def test_the_call_that_the_other_tests_break_is_legal(op_name: str) -> None:
    sample = complete_sample(op_name)
    sample.op(**sample.kwargs)


def assert_tensor_refused(
    op_name: str, name: str, value: torch.Tensor, kind: type[Exception], *words: str, compiled: bool = False
) -> None:
    assert_refused(with_changes(op_name, **{name: value}), kind, functional(op_name), *words, compiled=compiled)


@every_tensor
def test_wrong_dtype_is_refused(op_name: str, name: str) -> None:
    """Compiled for one argument of each op: compiled code runs the same checks for all that is wrong."""
    value, compiled = complete_sample(op_name).kwargs[name].double(), name == tensor_arguments(op_name)[-1]
    assert_tensor_refused(op_name, name, value, TypeError, name, "torch.float64", compiled=compiled)


@every_tensor
def test_wrong_device_is_refused(op_name: str, name: str) -> None:
    value = complete_sample(op_name).kwargs[name]
    assert_tensor_refused(op_name, name, value.to("meta"), ValueError, "meta", "cpu")


@every_tensor
def test_wrong_rank_is_refused(op_name: str, name: str) -> None:
    value = complete_sample(op_name).kwargs[name].unsqueeze(0)
    shape = ", ".join(str(size) for size in value.shape)
    assert_tensor_refused(op_name, name, value, ValueError, f"{name} ", "must have shape ", f"{shape}")


@every_tensor
def test_last_dimension_that_is_not_contiguous_is_refused(op_name: str, name: str) -> None:
    value = complete_sample(op_name).kwargs[name]
    spread = value.repeat_interleave(2, dim=-1)[..., ::2]
    if name in ("lse_a", "lse_b", "lses"):
        # one float a row and head: kernels take both strides
        sample = with_changes(op_name, **{name: spread})
        sample.op(**sample.kwargs)
        return
    assert_tensor_refused(op_name, name, spread, ValueError, name, str(spread.stride()))


@pytest.mark.parametrize(
    ("op_name", "change", "kind", "words"),
    [(op_name, change, kind, words) for op_name, _, change, kind, words in REFUSALS],
    ids=[f"{op_name}: {what}" for op_name, what, _, _, _ in REFUSALS],
)
def test_a_call_that_breaks_the_contract_is_refused(
    op_name: str, change: Callable[[dict[str, Any]], dict[str, Any]], kind: type[Exception], words: tuple[str, ...]
) -> None:
    """Not compiled: compiled code runs the fake call's checks, as `test_wrong_dtype_is_refused` shows of each op."""
    changes = change(complete_sample(op_name).kwargs)
    assert_refused(with_changes(op_name, **changes), kind, f"{op_name}: ", *words, compiled=False)
    if out_overload(op_name) in op_names():
        # the same checks stand before the overload
        assert_refused(with_changes(out_overload(op_name), **changes), kind, f"{op_name}: ", *words, compiled=False)


@pytest.mark.parametrize("op_name", OUT_OPS)
def test_a_buffer_of_another_shape_is_refused(op_name: str) -> None:
    for name in output_names(legal_call(op_name).op):
        buffer = complete_sample(op_name).kwargs[name]
        for dim in range(buffer.dim()):
            small = buffer.narrow(dim, 0, buffer.shape[dim] - 1).contiguous()
            sample = with_changes(op_name, **{name: small})
            shapes = str(tuple(buffer.shape)), str(tuple(small.shape))
            assert_refused(sample, ValueError, op_name, name, *shapes, compiled=dim == 0)


@pytest.mark.parametrize("op_name", OUT_OPS)
def test_a_buffer_of_another_dtype_is_refused(op_name: str) -> None:
    for name in output_names(legal_call(op_name).op):
        buffer = complete_sample(op_name).kwargs[name]
        sample = with_changes(op_name, **{name: buffer.double()})
        assert_refused(sample, TypeError, op_name, name, str(buffer.dtype), "torch.float64")


def required_tensors(op_name: str) -> list[str]:
    schema = legal_call(op_name).op._schema
    return [argument.name for argument in schema.arguments if str(argument.type) == "Tensor"]


@pytest.mark.parametrize(
    ("op_name", "name"), [(op_name, name) for op_name in op_names() for name in required_tensors(op_name)]
)
def test_none_for_a_tensor_is_refused(op_name: str, name: str) -> None:
    """torch's parser lets it through."""
    sample = with_changes(op_name, **{name: None})
    assert_refused(sample, TypeError, f"{op_name}: {name} must be a tensor, got None", compiled=False)


def is_integer(argument: torch.Argument) -> bool:
    return str(argument.real_type) in ("SymInt", "int", "Optional[SymInt]", "Optional[int]")


EVERY_INTEGER = [
    (op_name, argument.name)
    for op_name in op_names()
    for argument in legal_call(op_name).op._schema.arguments
    if is_integer(argument)
]
EVERY_NUMBER = [
    (op_name, argument.name)
    for op_name in op_names()
    for argument in legal_call(op_name).op._schema.arguments
    if str(argument.type) == "float"
]


def test_the_lists_of_numbers_are_not_empty() -> None:
    assert ("build_step_metadata", "index_topk") in EVERY_INTEGER
    assert ("convert_req_index_to_global_index", "num_blocks") in EVERY_INTEGER
    assert ("paged_attention", "softmax_scale") in EVERY_NUMBER


@pytest.mark.parametrize(("op_name", "name"), EVERY_INTEGER)
def test_a_size_of_more_than_32_bits_is_refused(op_name: str, name: str) -> None:
    """Before anything is written, on every device: a kernel's argument has 32 bits. Compiled for one of each op."""
    first = name == next(other for op, other in EVERY_INTEGER if op == op_name)
    for value in (2**31, 2**40):
        sample = with_changes(op_name, **{name: value})
        words = f"{functional(op_name)}: {name} ", str(value)
        assert_refused(sample, ValueError, *words, compiled=first and value == 2**31)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39], ids=str)
@pytest.mark.parametrize(("op_name", "name"), EVERY_NUMBER)
def test_a_scale_that_is_not_finite_is_refused(op_name: str, name: str, value: float) -> None:
    """Kernels compute in float32, which must hold the scale."""
    sample = with_changes(op_name, **{name: value})
    assert_refused(sample, ValueError, f"{functional(op_name)}: {name} must be ", str(value), compiled=False)


def float_arguments(op_name: str) -> list[str]:
    sample = complete_sample(op_name)
    return [n for n in tensor_arguments(op_name) if sample.kwargs[n].is_floating_point()]


EVERY_FLOAT = [(op_name, name) for op_name in op_names() for name in float_arguments(op_name)]
every_float = pytest.mark.parametrize(
    ("op_name", "name"), EVERY_FLOAT, ids=[f"{name} of {op_name}" for op_name, name in EVERY_FLOAT]
)


@every_float
def test_an_argument_that_requires_grad_is_refused(op_name: str, name: str) -> None:
    leaf = complete_sample(op_name).kwargs[name].detach().requires_grad_()
    sample = with_changes(op_name, **{name: leaf})
    words = (functional(op_name), f": {name} requires grad", "torch.no_grad()", f"detach {name}")
    message = message_of(lambda: sample.op(**sample.kwargs), NotImplementedError)
    for word in words:
        assert word in message
    if name != float_arguments(op_name)[0]:  # compiled once for each op
        return
    torch._dynamo.reset()
    compiled = torch.compile(lambda kwargs: sample.op(**kwargs), backend="aot_eager", fullgraph=True)
    assert message in message_of(lambda: compiled(sample.kwargs))


@every_float
def test_an_argument_that_requires_grad_is_taken_where_gradients_are_off(op_name: str, name: str) -> None:
    leaf = complete_sample(op_name).kwargs[name].detach().requires_grad_()
    sample = with_changes(op_name, **{name: leaf})
    compiled = torch.compile(lambda kwargs: sample.op(**kwargs), backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        sample.op(**sample.kwargs)
    with torch.no_grad():
        returned = sample.op(**sample.kwargs)
        if name == float_arguments(op_name)[0]:  # once for each op
            torch._dynamo.reset()
            compiled(sample.kwargs)
    assert not any(tensor.requires_grad for tensor in tree_leaves(returned) if tensor is not None)


def test_an_unknown_format_lists_the_formats_there_are() -> None:
    message = message_of(lambda: get_format("fp8"), ValueError)
    for name in FORMATS:
        assert f"'{name}'" in message


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "kind", "message"),
    [
        (-1, 4, ValueError, "num_blocks must be at least 0, got -1"),
        (4, 0, ValueError, "block_size must be at least 1, got 0"),
        (4, 2.5, TypeError, "block_size must be an integer, got float 2.5"),
        (None, 4, TypeError, "num_blocks must be an integer, got NoneType None"),
        (True, 4, TypeError, "num_blocks must be an integer, got bool True"),
    ],
)
def test_a_cache_of_such_a_size_is_refused(
    num_blocks: Any, block_size: Any, kind: type[Exception], message: str
) -> None:
    assert message_of(lambda: allocate_cache("bf16", num_blocks, block_size), kind) == f"allocate_cache: {message}"


BUILDERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "StepMetadata.allocate": (
        mla_ops.StepMetadata.allocate,
        {
            "max_num_tokens": 4,
            "max_num_requests": 2,
            "max_blocks_per_request": 2,
            "block_size": 4,
            "index_topk": 2,
        },
    ),
    "V4StepMetadata.allocate": (
        mla_ops.V4StepMetadata.allocate,
        {"max_seq_len": 9, "window": 4, "c4a_block_size": 4, "c128a_ratio": 2, "num_blocks": 2},
    ),
    "CompressedMetadata.allocate": (
        mla_ops.CompressedMetadata.allocate,
        {
            "max_num_tokens": 4,
            "max_num_requests": 2,
            "max_blocks_per_request": 2,
            "compress_ratio": 4,
            "block_size": 4,
            "num_blocks": 3,
        },
    ),
    "plan_context_chunks": (mla_ops.plan_context_chunks, {"num_rows": 2, "max_context_tokens": 4}),
    "choose_prefill": (mla_ops.choose_prefill, {"max_seq_len": 9, "index_topk": 4}),
    "warmup": (mla_ops.warmup, {"num_heads": 2, "topk": 2, "head_dim": 512, "block_size": 4, "index_heads": 1}),
}
REST: dict[str, dict[str, Any]] = {
    "V4StepMetadata.allocate": {"max_num_tokens": 4, "max_num_requests": 2},
    "plan_context_chunks": {"context_lens": torch.zeros(2, dtype=INT32)},
    "warmup": {"cache_format": "bf16", "num_tokens": [1], "device": "cpu"},
}


@pytest.mark.parametrize(("function", "name"), [(f, name) for f, (_, sizes) in BUILDERS.items() for name in sizes])
def test_a_size_that_is_no_integer_or_out_of_bounds_is_refused(function: str, name: str) -> None:
    build, sizes = BUILDERS[function]
    arguments = {**REST.get(function, {}), **sizes}
    for wrong, kind in ((-1, ValueError), (2**31, ValueError), (2.5, TypeError), ("8", TypeError), (False, TypeError)):
        message = message_of(lambda wrong=wrong: build(**{**arguments, name: wrong}), kind)
        assert message.startswith(f"{function}: {name} must be "), message
        assert message.endswith(f"got {type(wrong).__name__} {wrong!r}" if kind is TypeError else f"got {wrong}")


@pytest.mark.parametrize("function", sorted(set(BUILDERS) - {"choose_prefill", "warmup"}))
def test_integers_of_numpy_are_sizes_and_become_integers_of_python(function: str) -> None:
    build, sizes = BUILDERS[function]
    built = build(
        **{name: np.int64(v) if type(v) is int else v for name, v in {**REST.get(function, {}), **sizes}.items()}
    )
    expected = build(**REST.get(function, {}), **sizes)
    assert all(
        type(found) is type(wanted) for found, wanted in zip(tree_leaves(built), tree_leaves(expected), strict=True)
    )


def test_other_functions_take_the_integers_of_numpy() -> None:
    assert allocate_cache("bf16", np.int64(2), np.int32(4), head_dim=np.int64(512)).shape == (2, 4, 512)
    assert mla_ops.choose_prefill(np.int64(9), np.int32(9)) == "dense"
    ranks = ContextParallel(None, rank=np.int64(1), world_size=np.int64(2), block_size=np.int32(64))
    assert [type(size) for size in (ranks.rank, ranks.world_size, ranks.block_size)] == [int] * 3
    sizes = {name: np.int64(size) for name, size in BUILDERS["warmup"][1].items()}
    mla_ops.warmup(cache_format="bf16", num_tokens=np.array([1]), device="cpu", **sizes)


def test_a_warm_up_names_what_it_does_not_take() -> None:
    usual = {"cache_format": "bf16", "num_tokens": [1], "num_heads": 2, "topk": 2, "device": "cpu"}
    two = "prefill_head_dims must be two integers, got"
    for change, kind, message in (
        ({"num_tokens": 3}, TypeError, "num_tokens must be a list of integers, got int 3"),
        ({"num_tokens": [-1]}, ValueError, "num_tokens must be at least 0, got -1"),
        ({"cache_format": ["bf16"]}, ValueError, "cache_format must be one of"),
        (
            {"cache_format": "fp8_index"},
            ValueError,
            "cache_format must be one of ['bf16', 'fp16', 'fp32', 'fp8_ds_mla'",
        ),
        ({"num_heads": 129}, ValueError, "num_heads must be at most 128, got 129"),
        ({"head_dim": 128}, ValueError, "head_dim must be one of [576, 512] for cache_format 'bf16', got 128"),
        ({"head_dim": 512, "q_halves": True}, ValueError, "q_halves goes with queries of a latent and RoPE dims"),
        (
            {"dtype": "bfloat16"},
            TypeError,
            "dtype must be one of torch.bfloat16, torch.float16, torch.float32, got 'bf",
        ),
        ({"prefill_head_dims": 192}, TypeError, f"{two} 192"),
        ({"prefill_head_dims": (1, 2, 3)}, TypeError, f"{two} (1, 2, 3)"),
        ({"prefill_head_dims": (0, 128)}, ValueError, "prefill_head_dims must be at least 1, got 0"),
    ):
        found = message_of(lambda c=change: mla_ops.warmup(**{**usual, **c}), kind)
        assert found.startswith(f"warmup: {message}")


def test_a_cache_of_a_width_that_its_format_has_not_is_refused() -> None:
    message = message_of(lambda: allocate_cache("fp8_ds_mla", 4, 4, head_dim=512), ValueError)
    assert "'fp8_ds_mla'" in message
    assert "576" in message
    assert message.startswith("allocate_cache: head_dim must be one of ")
    assert "got 512" in message
    assert "allocate_cache: head_dim" in message_of(lambda: allocate_cache("bf16", 4, 4, head_dim="576"), TypeError)


# Invalid entries inside index tensors are data, not errors: the contract says what they do.

GARBAGE = (-1, -7, -(2**31), 20, 21, 2**31 - 1)


def test_slots_out_of_range_write_nothing() -> None:
    for cache_format in ("bf16", "fp8_ds_mla"):
        pool = torch.full_like(allocate_cache(cache_format, 7, 4), 3)
        before, cache = pool.clone(), pool[1:6]
        slots = torch.tensor([*GARBAGE, 2**62, -(2**62)])
        keys = torch.ones(len(slots), 512, dtype=torch.bfloat16), torch.ones(len(slots), 64, dtype=torch.bfloat16)
        torch.ops.mla.concat_and_cache(*keys, cache, slots, cache_format)
        assert torch.equal(pool, before), "a byte changed in the cache, or in its neighbours in the pool"


def test_a_written_slot_changes_its_own_row_and_no_other_byte() -> None:
    for cache_format in ("bf16", "fp8_ds_mla"):
        pool = torch.full_like(allocate_cache(cache_format, 7, 6), 3)
        before, cache = pool.clone(), pool[1:6, :4]
        slots = torch.tensor([*GARBAGE[:3], 9, *GARBAGE[3:]])
        keys = torch.ones(len(slots), 512, dtype=torch.bfloat16), torch.ones(len(slots), 64, dtype=torch.bfloat16)
        torch.ops.mla.concat_and_cache(*keys, cache, slots, cache_format)
        changed = (pool != before).flatten(2).any(2).nonzero()
        assert changed.tolist() == [[1 + 9 // 4, 9 % 4]]


def test_indices_out_of_range_are_not_attended() -> None:
    for cache_format, fill in (("bf16", torch.nan), ("fp8_ds_mla", 0x7F)):
        # every row that must not be read is NaN
        cache = torch.full_like(allocate_cache(cache_format, 5, 4), fill)
        key = torch.ones(1, 512, dtype=torch.bfloat16), torch.ones(1, 64, dtype=torch.bfloat16)
        torch.ops.mla.concat_and_cache(*key, cache, torch.tensor([13]), cache_format)
        indices = torch.tensor([[*GARBAGE, 13], [*GARBAGE, -1]], dtype=INT32)
        q = torch.ones(2, 2, 576, dtype=torch.bfloat16)
        out, lse = torch.ops.mla.paged_sparse_attention(q, cache, indices, 0.125, cache_format)
        assert torch.equal(out[0], torch.ones_like(out[0]))
        assert torch.equal(lse[0], torch.full_like(lse[0], 72.0))
        assert torch.equal(out[1], torch.zeros_like(out[1]))
        assert torch.equal(lse[1], torch.full_like(lse[1], -torch.inf))

        table, requests = torch.tensor([[3, 99, -1]], dtype=INT32), torch.tensor([0, 1], dtype=INT32)
        local = torch.tensor([[1, 4, 8, 12, -1], [1, 1, 1, 1, 1]], dtype=INT32)
        translated = torch.ops.mla.paged_sparse_attention(
            q, cache, local, 0.125, cache_format, block_table=table, req_id_per_token=requests
        )
        assert torch.equal(translated[0], out), "only index 1 of request 0 is slot 13"


def test_garbage_in_a_block_table_gathers_zeros() -> None:
    cache = torch.full_like(allocate_cache("bf16", 5, 4), torch.nan)
    cache[2] = 1
    table = torch.tensor([[2, 5, -1, -(2**31), 2**31 - 1]], dtype=INT32)
    lens, starts = torch.tensor([24], dtype=INT32), torch.tensor([0, 24], dtype=INT32)
    rows = torch.ops.mla.gather_cache(cache, table, lens, starts, 24, "bf16")
    assert torch.equal(rows[:4], torch.ones_like(rows[:4]))
    assert torch.equal(rows[4:], torch.zeros_like(rows[4:])), "past the table, and blocks that there are not"


def test_rows_of_a_workspace_that_no_request_covers_stay() -> None:
    cache = torch.ones_like(allocate_cache("bf16", 5, 4))
    workspace = torch.full((10, 576), 7.0, dtype=torch.bfloat16)
    table, lens = torch.tensor([[0], [1]], dtype=INT32), torch.tensor([2, 1], dtype=INT32)
    starts = torch.tensor([0, 3, 4], dtype=INT32)
    torch.ops.mla.gather_cache.out(cache, table, lens, starts, 10, "bf16", offset=4, out=workspace)
    assert workspace[:, 0].tolist() == [7, 7, 7, 7, 1, 1, 7, 1, 7, 7]


def test_garbage_indices_translate_to_minus_one() -> None:
    table = torch.tensor([[4, 0, 9], [1, -1, 2**31 - 1]], dtype=INT32)
    requests = torch.tensor([0, 1, 2, -1], dtype=INT32)
    indices = torch.tensor([[*GARBAGE, 5, 8], [0, 4, 8, 9, 11, 12, -1, 3], [0] * 8, [0] * 8], dtype=INT32)
    slots, counts = torch.ops.mla.convert_req_index_to_global_index(requests, table, indices, 4, num_blocks=5)
    assert slots.tolist() == [[-1] * 6 + [1, -1], [4, -1, -1, -1, -1, -1, -1, 7], [-1] * 8, [-1] * 8]
    assert counts.tolist() == [1, 2, 0, 0]
