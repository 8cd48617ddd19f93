"""What an op refuses, and how it says so: the op, the argument, what was expected and what came.

The same text comes from an eager call, from fake tensors and out of torch.compile, and nothing was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import mla_ops  # noqa: F401  registers the ops
from mla_ops.formats import FORMATS, allocate_cache, get_format
from mla_ops.testing import Sample, op_names, output_names, sample_inputs
from mla_ops.testing.checks import assert_same_memory, clone_sample, named_arguments

INT32 = torch.int32


def complete_sample(op_name: str) -> Sample:
    """A legal call that passes every optional tensor as well, all arguments by name."""
    sample = sample_inputs(op_name, "cpu")[0]
    optional = {
        "attn_sink": torch.zeros(3),
        "block_table": torch.zeros(2, 3, dtype=INT32),
        "gather_lens": torch.ones(2, dtype=INT32),
        "req_id_per_token": torch.zeros(5, dtype=INT32),
        "topk_length": torch.ones(5, dtype=INT32),
    }
    arguments = named_arguments(sample)
    for argument in sample.op._schema.arguments:
        if argument.name in optional:
            arguments.setdefault(argument.name, optional[argument.name])
    return replace(sample, args=(), kwargs=arguments)


def with_changes(op_name: str, **changes: Any) -> Sample:
    sample = complete_sample(op_name)
    return replace(sample, kwargs={**sample.kwargs, **changes})


def tensor_arguments(op_name: str) -> list[str]:
    return [name for name, value in complete_sample(op_name).kwargs.items() if isinstance(value, torch.Tensor)]


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

    mode = FakeTensorMode()
    fake = {
        name: mode.from_tensor(value) if isinstance(value, torch.Tensor) and value.device.type != "meta" else value
        for name, value in sample.kwargs.items()
    }
    if not any(isinstance(value, torch.Tensor) and value.device.type == "meta" for value in fake.values()):
        with mode:
            assert message_of(lambda: sample.op(**fake), kind) == message

    if not compiled:
        return

    def call(kwargs: dict[str, Any]) -> Any:
        return sample.op(**kwargs)

    torch._dynamo.reset()
    function = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False)
    assert message in message_of(lambda: function(sample.kwargs))
    assert_same_memory(sample, before, "after a refused compiled call")


BASE_OPS = [name for name in op_names() if not name.endswith(".out")]
OUT_OPS = [name for name in op_names() if name.endswith(".out")]
EVERY_TENSOR = [(op_name, name) for op_name in op_names() for name in tensor_arguments(op_name)]
every_tensor = pytest.mark.parametrize(
    ("op_name", "name"), EVERY_TENSOR, ids=[f"{name} of {op_name}" for op_name, name in EVERY_TENSOR]
)


@pytest.mark.parametrize("op_name", op_names())
def test_the_call_that_the_other_tests_break_is_legal(op_name: str) -> None:
    sample = complete_sample(op_name)
    sample.op(**sample.kwargs)


def assert_tensor_refused(op_name: str, name: str, value: torch.Tensor, kind: type[Exception], *words: str) -> None:
    """As `assert_refused`, compiled for one argument of each op: the checks are the same for all of them."""
    compiled = name == tensor_arguments(op_name)[-1]
    sample = with_changes(op_name, **{name: value})
    assert_refused(sample, kind, op_name.removesuffix(".out"), *words, compiled=compiled)


@every_tensor
def test_wrong_dtype_is_refused(op_name: str, name: str) -> None:
    value = complete_sample(op_name).kwargs[name]
    assert_tensor_refused(op_name, name, value.double(), TypeError, name, "torch.float64")


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
    if name in ("lse_a", "lse_b"):
        # one float a row and head: kernels take both strides
        sample = with_changes(op_name, **{name: spread})
        sample.op(**sample.kwargs)
        return
    assert_tensor_refused(op_name, name, spread, ValueError, name, str(spread.stride()))


def narrower(name: str, dim: int = 0) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """One element less of `name` along `dim`."""
    return lambda given: {name: given[name].narrow(dim, 0, given[name].shape[dim] - 1).contiguous()}


# op, what is wrong, the changed arguments, exception, words of the message
REFUSALS: list[tuple[str, str, Callable[[dict[str, Any]], dict[str, Any]], type[Exception], tuple[str, ...]]] = [
    ("concat_and_cache", "unknown format", lambda g: {"cache_format": "fp9"}, ValueError, ("'bf16'", "got 'fp9'")),
    (
        "concat_and_cache",
        "format of another dtype",
        lambda g: {"cache_format": "fp8_ds_mla"},
        TypeError,
        ("kv_cache", "'fp8_ds_mla'", "torch.uint8", "got torch.bfloat16"),
    ),
    (
        "concat_and_cache",
        "row width",
        lambda g: {"kv_cache": torch.zeros(5, 4, 577, dtype=torch.bfloat16)},
        ValueError,
        ("kv_cache", "576 or 512", "got [5, 4, 577]"),
    ),
    ("concat_and_cache", "fewer k_pe than kv_c", narrower("k_pe"), ValueError, ("k_pe", "num_tokens=5", "got [4, 64]")),
    ("concat_and_cache", "keys narrower than rows", narrower("k_pe", 1), ValueError, ("576", "512 + 63")),
    (
        "concat_and_cache",
        "latent of a quantised row",
        lambda g: {
            "kv_cache": allocate_cache("fp8_ds_mla", 5, 4),
            "cache_format": "fp8_ds_mla",
            "kv_c": g["kv_c"][:, :448].contiguous(),
        },
        ValueError,
        ("kv_c", "512", "got 448"),
    ),
    (
        "concat_and_cache",
        "rows apart",
        lambda g: {"kv_cache": torch.zeros(5, 4, 592, dtype=torch.bfloat16)[:, :, :576]},
        ValueError,
        ("kv_cache.stride(1)", "576", "got 592"),
    ),
    (
        "concat_and_cache",
        "blocks off their alignment",
        lambda g: {"kv_cache": torch.zeros(5, 4 * 576 + 1, dtype=torch.bfloat16)[:, :-1].unflatten(1, (4, 576))},
        ValueError,
        ("kv_cache.stride(0)", "16 bytes", "2305"),
    ),
    (
        "concat_and_cache",
        "a block without slots",
        lambda g: {"kv_cache": g["kv_cache"][:, :0]},
        ValueError,
        ("kv_cache", "block_size", "got 0"),
    ),
    ("gather_cache", "unknown format", lambda g: {"cache_format": ""}, ValueError, ("cache_format", "got ''")),
    ("gather_cache", "negative number of rows", lambda g: {"num_rows": -1}, ValueError, ("num_rows", "got -1")),
    ("gather_cache", "negative offset", lambda g: {"offset": -3}, ValueError, ("offset", "got -3")),
    (
        "gather_cache",
        "starts without the end",
        narrower("cu_seq_lens"),
        ValueError,
        ("cu_seq_lens", "num_requests+1=3", "got [2]"),
    ),
    (
        "gather_cache",
        "other requests",
        narrower("block_table"),
        ValueError,
        ("block_table", "num_requests=2", "[1, 3]"),
    ),
    (
        "gather_cache",
        "other lengths",
        narrower("gather_lens"),
        ValueError,
        ("gather_lens", "num_requests=2", "got [1]"),
    ),
    (
        "convert_req_index_to_global_index",
        "zero block size",
        lambda g: {"block_size": 0},
        ValueError,
        ("block_size", "at least 1", "got 0"),
    ),
    (
        "convert_req_index_to_global_index",
        "negative block size",
        lambda g: {"block_size": -64},
        ValueError,
        ("block_size", "got -64"),
    ),
    (
        "convert_req_index_to_global_index",
        "negative number of blocks",
        lambda g: {"num_blocks": -1},
        ValueError,
        ("num_blocks", "got -1"),
    ),
    (
        "convert_req_index_to_global_index",
        "other tokens",
        narrower("token_indices"),
        ValueError,
        ("token_indices", "num_tokens=5", "got [4, 6]"),
    ),
    ("filter_prefill_indices", "other tokens", narrower("context_lens"), ValueError, ("context_lens", "=5", "got [4]")),
    ("paged_sparse_attention", "unknown format", lambda g: {"cache_format": "bf17"}, ValueError, ("got 'bf17'",)),
    (
        "paged_sparse_attention",
        "head dim of neither kind",
        lambda g: {"q": g["q"][:, :, :128].contiguous()},
        ValueError,
        ("q must", "576 or 512", "[5, 3, 128]"),
    ),
    (
        "paged_sparse_attention",
        "queries narrower than keys",
        lambda g: {"q": g["q"][:, :, :512].contiguous()},
        ValueError,
        ("q is 512 wide", "576"),
    ),
    (
        "paged_sparse_attention",
        "a cache of index keys",
        lambda g: {"kv_cache": allocate_cache("bf16", 5, 4, head_dim=128)},
        ValueError,
        ("kv_cache are 128 wide",),
    ),
    (
        "paged_sparse_attention",
        "no head",
        lambda g: {"q": g["q"][:, :0]},
        ValueError,
        ("1 to 128 heads", "got 0"),
    ),
    (
        "paged_sparse_attention",
        "too many heads",
        lambda g: {"q": torch.zeros(5, 129, 576, dtype=torch.bfloat16)},
        ValueError,
        ("1 to 128 heads", "got 129"),
    ),
    ("paged_sparse_attention", "other tokens", narrower("indices"), ValueError, ("indices", "=5", "got [4, 6]")),
    ("paged_sparse_attention", "other lengths", narrower("topk_length"), ValueError, ("topk_length", "=5", "got [4]")),
    ("paged_sparse_attention", "other heads", narrower("attn_sink"), ValueError, ("attn_sink", "=3", "got [2]")),
    (
        "paged_sparse_attention",
        "other requests",
        narrower("req_id_per_token"),
        ValueError,
        ("req_id_per_token", "=5", "got [4]"),
    ),
    (
        "paged_sparse_attention",
        "a block table alone",
        lambda g: {"req_id_per_token": None},
        ValueError,
        ("block_table and req_id_per_token go together", "got block_table without req_id_per_token"),
    ),
    (
        "paged_sparse_attention",
        "request ids alone",
        lambda g: {"block_table": None},
        ValueError,
        ("got req_id_per_token without block_table",),
    ),
    (
        "paged_sparse_attention",
        "queries of another dtype than plain keys",
        lambda g: {"q": g["q"].half()},
        TypeError,
        ("q must be torch.bfloat16", "got torch.float16"),
    ),
    (
        "sparse_attention",
        "keys of another dtype",
        lambda g: {"kv": g["kv"].half()},
        TypeError,
        ("kv must be torch.bfloat16", "got torch.float16"),
    ),
    ("sparse_attention", "narrower keys", narrower("kv", 1), ValueError, ("kv must", "head_dim=576", "575]")),
    ("sparse_attention", "other tokens", narrower("indices"), ValueError, ("indices", "=5", "got [4, 6]")),
    ("merge_attention_states", "other tokens", narrower("out_b"), ValueError, ("out_b", "=5", "got [4, 3, 512]")),
    ("merge_attention_states", "other heads", narrower("lse_b", 1), ValueError, ("lse_b", "num_heads=3", "got [5, 2]")),
    (
        "merge_attention_states",
        "halves of two dtypes",
        lambda g: {"out_b": g["out_b"].half()},
        TypeError,
        ("out_b must be torch.bfloat16", "got torch.float16"),
    ),
    ("build_step_metadata", "zero block size", lambda g: {"block_size": 0}, ValueError, ("block_size", "got 0")),
    ("build_step_metadata", "negative top k", lambda g: {"index_topk": -1}, ValueError, ("index_topk", "got -1")),
    (
        "build_step_metadata",
        "starts without the end",
        narrower("query_start_loc"),
        ValueError,
        ("query_start_loc", "num_requests+1=3", "got [2]"),
    ),
    (
        "build_step_metadata",
        "more requests than the buffers hold",
        lambda g: {
            "seq_lens": torch.ones(5, dtype=INT32),
            "query_start_loc": torch.arange(6, dtype=INT32),
            "block_table": torch.zeros(5, 3, dtype=INT32),
        },
        ValueError,
        ("5 requests", "room for 4"),
    ),
    (
        "build_step_metadata",
        "a wider block table than the buffer",
        lambda g: {"block_table": torch.zeros(2, 9, dtype=INT32)},
        ValueError,
        ("block_table is 9 blocks wide", "4"),
    ),
    (
        "build_step_metadata",
        "buffers of two lengths",
        narrower("key_lens"),
        ValueError,
        ("key_lens", "=12", "got [11]"),
    ),
]


@pytest.mark.parametrize(
    ("op_name", "change", "kind", "words"),
    [(op_name, change, kind, words) for op_name, _, change, kind, words in REFUSALS],
    ids=[f"{op_name}: {what}" for op_name, what, _, _, _ in REFUSALS],
)
def test_a_call_that_breaks_the_contract_is_refused(
    op_name: str, change: Callable[[dict[str, Any]], dict[str, Any]], kind: type[Exception], words: tuple[str, ...]
) -> None:
    changes = change(complete_sample(op_name).kwargs)
    assert_refused(with_changes(op_name, **changes), kind, f"{op_name}: ", *words)
    if f"{op_name}.out" in op_names():
        # the same checks stand before the overload
        assert_refused(with_changes(f"{op_name}.out", **changes), kind, f"{op_name}: ", *words, compiled=False)


@pytest.mark.parametrize("op_name", OUT_OPS)
def test_a_buffer_of_another_shape_is_refused(op_name: str) -> None:
    for name in output_names(complete_sample(op_name).op):
        buffer = complete_sample(op_name).kwargs[name]
        for dim in range(buffer.dim()):
            small = buffer.narrow(dim, 0, buffer.shape[dim] - 1).contiguous()
            sample = with_changes(op_name, **{name: small})
            shapes = str(tuple(buffer.shape)), str(tuple(small.shape))
            assert_refused(sample, ValueError, op_name, name, *shapes, compiled=dim == 0)


@pytest.mark.parametrize("op_name", OUT_OPS)
def test_a_buffer_of_another_dtype_is_refused(op_name: str) -> None:
    for name in output_names(complete_sample(op_name).op):
        buffer = complete_sample(op_name).kwargs[name]
        sample = with_changes(op_name, **{name: buffer.double()})
        assert_refused(sample, TypeError, op_name, name, str(buffer.dtype), "torch.float64")


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
    words = (op_name.removesuffix(".out"), f": {name} requires grad", "torch.no_grad()", f"detach {name}")
    message = message_of(lambda: sample.op(**sample.kwargs), NotImplementedError)
    for word in words:
        assert word in message
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
        torch._dynamo.reset()
        compiled(sample.kwargs)
    assert not any(tensor.requires_grad for tensor in tree_leaves(returned) if tensor is not None)


def test_an_unknown_format_lists_the_formats_there_are() -> None:
    message = message_of(lambda: get_format("fp8"), ValueError)
    for name in FORMATS:
        assert f"'{name}'" in message


@pytest.mark.parametrize(("num_blocks", "block_size"), [(-1, 4), (4, 0), (4, -1)])
def test_a_cache_of_negative_size_is_refused(num_blocks: int, block_size: int) -> None:
    message = message_of(lambda: allocate_cache("bf16", num_blocks, block_size), ValueError)
    assert f"got {num_blocks} and {block_size}" in message


def test_a_cache_of_a_width_that_its_format_has_not_is_refused() -> None:
    message = message_of(lambda: allocate_cache("fp8_ds_mla", 4, 4, head_dim=512), ValueError)
    assert "'fp8_ds_mla'" in message
    assert "576" in message
    assert "got 512" in message


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
