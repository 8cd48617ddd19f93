"""The registry around every lowering: the current device, and version counters."""

from __future__ import annotations

import contextlib
import inspect
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import mla_ops
from mla_ops import dispatch, registry
from mla_ops.testing import Sample, functional, op_names, output_names, sample_inputs
from mla_ops.testing.checks import assert_all_same, assert_same_memory, clone_sample, named_arguments

OUT_OPS = [name for name in op_names() if name != functional(name)]


SCHEMA = "op(Tensor tensor, Tensor extra, *, Tensor named) -> ()"


class Device:
    """A machine with two GPUs, which remembers the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.entered = 0, 0
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.current, raising=False)
        monkeypatch.setattr(torch.cuda, "device", self.enter)

    @contextlib.contextmanager
    def enter(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        self.entered += 1
        try:
            yield
        finally:
            self.current = before


class OnDevice:
    """A tensor, as far as the guard looks at one."""

    def __init__(self, index: int) -> None:
        self.index = index

    def get_device(self) -> int:
        return self.index


def test_a_lowering_runs_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    guarded = registry._on_its_device(SCHEMA, lambda tensor, extra, *, named: (device.current, extra, named))
    assert guarded(OnDevice(0), "extra", named=1) == (0, "extra", 1)
    assert device.entered == 0, "the current device is not entered again"
    assert guarded(OnDevice(1), "extra", named=1) == (1, "extra", 1)
    assert device.current == 0
    device.current = 1
    assert guarded(OnDevice(0), "extra", named=1) == (0, "extra", 1)
    assert (device.current, device.entered) == (1, 2)


def test_the_current_device_is_as_before_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)

    def fail(tensor: object) -> None:
        raise ValueError(f"on {device.current}")

    with pytest.raises(ValueError, match="on 1"):
        registry._on_its_device(SCHEMA, fail)(OnDevice(1))
    assert device.current == 0


def test_none_for_a_tensor_is_a_type_error_on_cuda_too(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)

    def real(tensor: object, extra: torch.Tensor, *, named: torch.Tensor) -> None:
        extra.shape, named.shape  # noqa: B018 (None has none)
        raise AttributeError("of its own")

    guarded = registry._on_its_device(SCHEMA, real)
    there = torch.zeros(1)
    for args, named, missing in (
        ((None, there), there, "tensor"),
        ((OnDevice(0), None), there, "extra"),
        ((OnDevice(1), there), None, "named"),
    ):
        with pytest.raises(TypeError, match=f"op: {missing} must be a tensor, got None"):
            guarded(*args, named=named)
    with pytest.raises(AttributeError, match="of its own"):
        guarded(OnDevice(0), there, named=there)


@pytest.mark.parametrize("op_name", op_names())
def test_every_op_enters_the_device_of_its_tensors_on_cuda(op_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that CUDA tensors reach, given tensors of the CPU, whose index is -1."""
    device = Device(monkeypatch)
    sample = sample_inputs(op_name, "cpu")[0]
    sample.op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *sample.args, **sample.kwargs)
    assert device.entered == 1
    device.current = -1
    sample.op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *sample.args, **sample.kwargs)
    assert device.entered == 1


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="a fake tensor on cuda:1 needs that GPU, or none at all")
@pytest.mark.parametrize("op_name", op_names())
def test_tensors_on_two_gpus_are_refused(op_name: str) -> None:
    """Fake tensors stand in for a GPU's: the check is the same for real ones."""
    sample = sample_inputs(op_name, "cpu")[0]
    with FakeTensorMode():
        arguments = {
            name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:1")
            if isinstance(value, torch.Tensor)
            else value
            for name, value in named_arguments(sample).items()
        }
        returned = sample.op(**arguments)
        assert all(tensor.device == torch.device("cuda", 1) for tensor in tree_leaves(returned) if tensor is not None)
        first, *others = (name for name, value in arguments.items() if isinstance(value, torch.Tensor))
        for name in others:
            there = {**arguments, name: arguments[name].to("cuda:0")}
            with pytest.raises(ValueError, match=rf": {name} must be on cuda:1.*, got cuda:0"):
                sample.op(**there)
        if not others:
            return
        with pytest.raises(ValueError, match=r"must be on cuda:0.*, got cuda:1"):
            sample.op(**{**arguments, first: arguments[first].to("cuda:0")})


def written(sample: Sample) -> set[str]:
    """Outputs of an `.out` overload, else all that the schema declares written."""
    if sample.op._schema.name.endswith("_out") or sample.op._overloadname not in ("default", "extra", "stacked"):
        return set(output_names(sample.op))
    if sample.op._schema.returns:
        return set()  # a cache is declared written so that no compiler copies it
    return {a.name for a in sample.op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}


def versions(sample: Sample) -> dict[str, int]:
    return {n: v._version for n, v in named_arguments(sample).items() if isinstance(v, torch.Tensor)}


@pytest.mark.parametrize("op_name", op_names())
def test_versions_count_the_writes_of_an_op_and_no_reads(op_name: str, device: torch.device) -> None:
    sample = sample_inputs(op_name, device)[0]
    before = versions(sample)
    with torch.no_grad():
        sample.op(*sample.args, **sample.kwargs)
    expected = {name: version + (name in written(sample)) for name, version in before.items()}
    assert versions(sample) == expected
    with torch.inference_mode():
        sample.op(*sample.args, **sample.kwargs)
    assert versions(sample) == {name: 2 * expected[name] - version for name, version in before.items()}


@pytest.mark.parametrize("op_name", ["concat_and_cache", "merge_attention_states.out"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autograd_sees_that_a_saved_tensor_was_written(op_name: str, compiled: bool, device: torch.device) -> None:
    sample = next(s for s in sample_inputs(op_name, device) if named_arguments(s).get("cache_format", "bf16") == "bf16")
    for name in written(sample):
        saved = named_arguments(sample)[name]
        weight = torch.ones_like(saved, requires_grad=True)
        product = (weight * saved).sum()

        def write() -> None:
            sample.op(*sample.args, **sample.kwargs)

        with torch.no_grad():
            (torch.compile(write, backend="aot_eager", fullgraph=True) if compiled else write)()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@pytest.mark.parametrize("op_name", op_names())
def test_inference_tensors_are_written_outside_of_inference_mode(op_name: str, device: torch.device) -> None:
    """A server may allocate a cache in inference mode, and use it in a step under no_grad, on every device."""
    usual = sample_inputs(op_name, device)[0]
    with torch.inference_mode():
        sample = clone_sample(usual)
    with torch.no_grad():
        returned, expected = (each.op(*each.args, **each.kwargs) for each in (sample, usual))
    if expected is not None:
        assert_all_same(returned, expected, "result")
    assert_same_memory(sample, usual, "after the call")


def test_versions_are_counted_for_any_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that writes behind torch's back changes no counter itself."""
    monkeypatch.setattr(dispatch, "select", lambda call: dispatch.Lowering(lambda *_, **__: None))
    for op_name in (*OUT_OPS, "concat_and_cache", "build_step_metadata"):
        sample = sample_inputs(op_name, "cpu")[0]
        before = versions(sample)
        sample.op(*sample.args, **sample.kwargs)
        assert {name for name, version in versions(sample).items() if version > before[name]} == written(sample)


def test_the_schemas_follow_from_the_signature_of_the_contract() -> None:
    def op(cache: torch.Tensor, x: torch.Tensor | None, n: int, *, m: int | None = None, f: float = 1.5) -> None: ...

    arguments = "Tensor(a!) cache, Tensor? x, SymInt n, *, SymInt? m=None, float f=1.5"
    assert registry.schemas_of("op", op, ("cache",), ()) == (f"op({arguments}) -> ()", None)
    assert registry.schemas_of("op", op, ("cache",), ("y",)) == (
        f"op({arguments}) -> Tensor",
        f"op.out({arguments}, Tensor(b!) y) -> ()",
    )
    assert registry.schemas_of("op.form", op, ("cache",), ("y", "lse")) == (
        f"op.form({arguments}) -> (Tensor, Tensor)",
        f"op.form_out({arguments}, Tensor(b!) y, Tensor(c!) lse) -> ()",
    )


def test_results_are_named_behind_positional_arguments() -> None:
    def op(x: torch.Tensor, name: str, flag: bool) -> None: ...

    assert (
        registry.schemas_of("op", op, (), ("y",))[1] == "op.out(Tensor x, str name, bool flag, *, Tensor(a!) y) -> ()"
    )


def test_a_contract_becomes_the_function_that_users_call() -> None:
    function = mla_ops.filter_prefill_indices
    tensor = "'torch.Tensor'"
    assert str(inspect.signature(function)) == (
        f"(indices: {tensor}, context_lens: {tensor}) -> 'tuple[torch.Tensor, torch.Tensor]'"
    )
    assert str(inspect.signature(mla_ops.concat_and_cache)).endswith("-> 'None'")
    assert str(inspect.signature(mla_ops.gather_cache)).endswith(f"-> {tensor}")
    assert "Splits request-local indices" in (function.__doc__ or "")
    assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_lens": [0] * 1000}, r"context_lens must be of type Tensor, got list$"),
        ({"indices": 3}, r"indices must be of type Tensor, got int$"),
        ({"context_lens": ...}, "missing a required argument: 'context_lens'"),
        ({"context_len": None}, "got an unexpected keyword argument 'context_len'"),
    ],
)
def test_a_call_by_other_names_or_types_is_a_type_error(changes: dict[str, object], message: str) -> None:
    given = {"indices": torch.zeros(1, 2).int(), "context_lens": torch.zeros(1).int(), **changes}
    with pytest.raises(TypeError, match=f"^filter_prefill_indices: {message}"):
        mla_ops.filter_prefill_indices(**{name: value for name, value in given.items() if value is not ...})


def test_numbers_and_strings_of_another_type_are_type_errors() -> None:
    x, table = torch.zeros(1, 2).int(), torch.zeros(1, 1).int()
    for arguments, message in (
        ((x[:, 0], table, x, 2.5), "block_size must be of type int, got float"),
        ((x[:, 0], table, x, None), "block_size must be of type int, got NoneType"),
        ((x[:, 0], [], x, 4), "block_table must be of type Tensor, got list"),
    ):
        with pytest.raises(TypeError, match=f"^convert_req_index_to_global_index: {message}$"):
            mla_ops.convert_req_index_to_global_index(*arguments)
    with pytest.raises(TypeError, match=r"^quantize_index_query: scale must be of type float, got str$"):
        mla_ops.quantize_index_query(torch.zeros(1, 1, 128), torch.zeros(1, 1), "1")


@pytest.mark.parametrize("extra", [{}, {"extra_kv_cache": torch.zeros(1, 1, 512), "extra_indices": torch.zeros(1, 1)}])
def test_parts_of_a_function_say_its_name(extra: dict[str, torch.Tensor]) -> None:
    x = torch.zeros(1, 1, 512)
    with pytest.raises(TypeError, match=r"^paged_sparse_attention: indices must be of type Tensor, got list$"):
        mla_ops.paged_sparse_attention(x, x, [[0]], 1.0, "fp32", **extra)
