"""Which lowering runs: a pure function of the call and of what is installed, tested without a GPU."""

from __future__ import annotations

import os
import subprocess
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType

import fresh
import pytest
import torch

import mla_ops
from mla_ops import dispatch
from mla_ops.dispatch import Call, Lowering
from mla_ops.kernels import flash_mla
from mla_ops.kernels.hopper.launch import sources as hopper_sources
from mla_ops.testing import functional, op_names, sample_inputs

REPOSITORY = str(Path(mla_ops.__file__).parents[1])
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

CALLS = {op: Call(op, CPU, torch.bfloat16, "fp8_ds_mla", 576, 128, 1, 2048) for op in dispatch.FAMILIES}


def clear_caches() -> None:
    for function in (dispatch._choose, dispatch._lowering, dispatch.device_capability, dispatch.is_installed):
        getattr(function, "cache_clear", lambda: None)()


@pytest.fixture(autouse=True)
def _no_remembered_choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "_overrides", ContextVar("no overrides", default=MappingProxyType({})))
    clear_caches()
    yield
    monkeypatch.undo()
    clear_caches()


class World:
    """A machine that is not this one: its GPU, its packages, and what each backend can run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def has(
        self, capability: tuple[int, int] = (0, 0), installed: tuple[str, ...] = (), **backends: str | None
    ) -> None:
        """`backends`: why each refuses every call, None if it takes it; one that is not named has no lowering."""
        self.monkeypatch.setattr(dispatch, "device_capability", lambda device: capability)
        self.monkeypatch.setattr(dispatch, "is_installed", lambda module: module in installed)

        def lowering(backend: str, op: str) -> Lowering | None:
            if backend not in backends:
                return None
            return Lowering(run=lambda *_, **__: None, unsupported_reason=lambda call: backends[backend])

        self.monkeypatch.setattr(dispatch, "_lowering", lowering)
        clear_caches()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def on(device: torch.device, op: str = "paged_sparse_attention") -> Call:
    return CALLS[op]._replace(device=device)


EVERYTHING = {"hopper": None, "flash_mla": None, "triton": None, "reference": None}


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 0), "triton"), ((9, 0), "hopper"), ((10, 0), "triton"), ((12, 0), "triton")],
    ids=["sm_80", "sm_90", "sm_100", "sm_120"],
)
def test_architecture_chooses_the_backend(world: World, capability: tuple[int, int], expected: str) -> None:
    world.has(capability, installed=("triton",), **EVERYTHING)
    assert dispatch.select_name(on(CUDA)) == expected


def test_a_backend_that_refuses_a_call_makes_way_for_the_next(world: World) -> None:
    world.has((9, 0), installed=("triton",), **{**EVERYTHING, "hopper": "heads", "flash_mla": "topk"})
    assert dispatch.select_name(on(CUDA)) == "triton"
    world.has((9, 0), installed=("triton",), **{**EVERYTHING, "hopper": "heads"})
    assert dispatch.select_name(on(CUDA, "sparse_attention")) == "flash_mla"


def test_a_lowering_that_is_not_deterministic_makes_way_where_that_is_asked_for(world: World) -> None:
    call = on(CUDA)._replace(deterministic=True)
    world.has((9, 0), installed=("triton",), hopper=None, triton=None)
    refused = dispatch.explain(call).refused
    assert "depend on the other rows" in refused["hopper"]
    assert "depend on the other rows" in refused["triton"]
    with pytest.raises(NotImplementedError, match="depend on the other rows"):
        dispatch.select_name(call)
    assert dispatch.select_name(on(CUDA)) == "hopper"


def test_what_is_for_asking_only_is_passed_over(world: World) -> None:
    """FlashMLA does not decode every scale that the format allows, so nobody gets it for a paged cache unasked."""
    world.has((9, 0), installed=("triton",), **{**EVERYTHING, "hopper": "heads"})
    assert dispatch.select_name(on(CUDA)) == "triton"
    assert "powers of two" in dispatch.explain(on(CUDA)).refused["flash_mla"]
    with dispatch.override("flash_mla"):
        assert dispatch.select_name(on(CUDA)) == "flash_mla"


def test_flat_keys_go_to_flash_mla_above_sixteen_heads_where_hopper_does_not_run(world: World) -> None:
    world.has((9, 0), installed=("triton",), **{**EVERYTHING, "hopper": "a reason"})
    call = on(CUDA, "sparse_attention")
    assert dispatch.select_name(call._replace(num_heads=16)) == "triton"
    assert dispatch.select_name(call._replace(num_heads=17)) == "flash_mla"
    with dispatch.override("flash_mla"):
        assert dispatch.select_name(call._replace(num_heads=16)) == "flash_mla"


def test_a_backend_without_the_op_makes_way_for_the_next(world: World) -> None:
    world.has((9, 0), installed=("triton",), triton=None)
    assert dispatch.select_name(on(CUDA)) == "triton"


@pytest.mark.parametrize("op", dispatch.FAMILIES)
def test_cpu_tensors_go_to_the_reference_on_any_machine(world: World, op: str) -> None:
    for capability in ((0, 0), (8, 0), (9, 0), (10, 0), (12, 0)):
        world.has(capability, installed=("triton",), **EVERYTHING)
        assert dispatch.select_name(on(CPU, op)) == "reference"


def test_cuda_tensors_never_reach_the_reference_unasked(world: World) -> None:
    world.has((8, 0), installed=(), reference=None)
    with pytest.raises(NotImplementedError) as caught:
        dispatch.select_name(on(CUDA))
    message = str(caught.value)
    for part in ("paged_sparse_attention", "cuda:0", "hopper: ", "triton: Triton is not installed", "pip install"):
        assert part in message
    with dispatch.override("reference"):
        assert dispatch.select_name(on(CUDA)) == "reference"


def test_a_device_of_no_backend_is_an_error_that_names_it(world: World) -> None:
    world.has(**EVERYTHING)
    with pytest.raises(NotImplementedError, match="mps"):
        dispatch.select_name(on(torch.device("mps")))


def test_selection_depends_on_the_call_alone(world: World) -> None:
    world.has((9, 0), installed=("triton",), **EVERYTHING)
    names = [dispatch.select_name(on(CUDA)) for _ in range(3)]
    assert len(set(names)) == 1
    assert dispatch.select_name(on(CUDA)._replace(num_tokens=4096)) in dispatch.BACKENDS


def test_override_takes_effect_in_its_block_only(world: World) -> None:
    world.has((9, 0), installed=("triton",), **EVERYTHING)
    with dispatch.override("triton"):
        assert dispatch.select_name(on(CUDA)) == "triton"
    assert dispatch.select_name(on(CUDA)) == "hopper"


def test_a_lowering_for_every_op_may_be_named(world: World) -> None:
    """As the documented signature has it."""
    world.has((8, 0), installed=("triton",), **EVERYTHING)
    with dispatch.override(lowering="reference"):
        assert dispatch.select_name(on(CUDA)) == "reference"


def test_overrides_nest_and_an_op_wins_over_all(world: World) -> None:
    world.has((9, 0), installed=("triton",), **EVERYTHING)
    attend, write = on(CUDA), on(CUDA, "concat_and_cache")
    with dispatch.override("triton"):
        with dispatch.override(paged_sparse_attention="flash_mla"):
            assert (dispatch.select_name(attend), dispatch.select_name(write)) == ("flash_mla", "triton")
            with dispatch.override("reference"):
                assert (dispatch.select_name(attend), dispatch.select_name(write)) == ("reference", "reference")
            assert (dispatch.select_name(attend), dispatch.select_name(write)) == ("flash_mla", "triton")
        assert (dispatch.select_name(attend), dispatch.select_name(write)) == ("triton", "triton")
    assert dispatch.select_name(write) == "hopper"


def test_override_of_an_op_covers_its_overloads(world: World) -> None:
    world.has((9, 0), installed=("triton",), **EVERYTHING)
    with dispatch.override(paged_sparse_attention="triton"):
        assert dispatch.select_name(on(CUDA, "paged_sparse_attention.extra")) == "triton"
        assert dispatch.select_name(on(CUDA, "sparse_attention")) == "hopper"
    with dispatch.override("reference", **{"paged_sparse_attention.extra": "triton"}):
        assert dispatch.select_name(on(CUDA, "paged_sparse_attention.extra")) == "triton"
        assert dispatch.select_name(on(CUDA)) == "reference"


def test_override_is_undone_after_an_error(world: World) -> None:
    world.has((9, 0), installed=("triton",), **EVERYTHING)
    with pytest.raises(RuntimeError, match="from the block"), dispatch.override("triton"):
        raise RuntimeError("from the block")
    assert dispatch.select_name(on(CUDA)) == "hopper"


class Thread:
    """A thread that makes steps when it is told to, each before `step` returns."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []
        self.results: list[object] = []
        self.told, self.done = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        while self.told.acquire():
            try:
                self.results.append(self.steps[-1]())
            except Exception as error:  # noqa: BLE001 (given to the test)
                self.results.append(error)
            self.done.release()

    def step(self, step: Callable[[], object]) -> object:
        self.steps.append(step)
        self.told.release()
        assert self.done.acquire(timeout=60)
        return self.results[-1]


@pytest.mark.parametrize("order", ["A leaves first", "B leaves first"])
def test_an_override_is_of_its_own_thread(world: World, order: str) -> None:
    world.has((9, 0), installed=("triton",), **EVERYTHING)
    a, b, outside = Thread(), Thread(), Thread()
    in_a, in_b = dispatch.override("triton"), dispatch.override("reference")

    def names() -> tuple[object, ...]:
        return tuple(thread.step(lambda: dispatch.select_name(on(CUDA))) for thread in (a, b, outside))

    a.step(in_a.__enter__)
    assert names() == ("triton", "hopper", "hopper")
    b.step(in_b.__enter__)
    assert names() == ("triton", "reference", "hopper")
    if order == "A leaves first":
        a.step(lambda: in_a.__exit__(None, None, None))
        assert names() == ("hopper", "reference", "hopper")
        b.step(lambda: in_b.__exit__(None, None, None))
    else:
        b.step(lambda: in_b.__exit__(None, None, None))
        assert names() == ("triton", "hopper", "hopper")
        a.step(lambda: in_a.__exit__(None, None, None))
    assert names() == ("hopper", "hopper", "hopper")
    assert dispatch.select_name(on(CUDA)) == "hopper"


def test_an_amd_gpu_is_no_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """gfx90a is a "cuda" device of capability 9.0 to torch."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert dispatch.device_capability(CUDA) == (9, 0)
    dispatch.device_capability.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert dispatch.device_capability(CUDA) == (0, 0)
    for backend in ("hopper", "flash_mla"):
        assert "needs a Hopper GPU" in dispatch.explain(on(CUDA)).refused[backend]


def test_override_of_an_unknown_lowering_or_op_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown lowering 'cutlass'.*'reference'"), dispatch.override("cutlass"):
        pass
    with pytest.raises(ValueError, match="unknown op 'flash'"), dispatch.override(flash="triton"):
        pass


def test_a_forced_lowering_that_cannot_run_names_op_lowering_and_reason(world: World) -> None:
    world.has((9, 0), installed=("triton",), **{**EVERYTHING, "triton": "it takes 8 heads at most, got 128"})
    with dispatch.override(paged_sparse_attention="triton"), pytest.raises(NotImplementedError) as caught:
        dispatch.select_name(on(CUDA))
    for part in ("paged_sparse_attention", "'triton'", "it takes 8 heads at most, got 128"):
        assert part in str(caught.value)


@pytest.mark.parametrize("op_name", [name for name in op_names() if name == functional(name)])
def test_forcing_hopper_on_cpu_tensors_fails_before_anything_is_written(op_name: str) -> None:
    sample = sample_inputs(op_name, "cpu")[0]
    before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in sample.args]
    with dispatch.override("hopper"), pytest.raises(NotImplementedError, match=f"{op_name}.*'hopper'"):
        sample.op(*sample.args, **sample.kwargs)
    for left, right in zip(sample.args, before, strict=True):
        assert not isinstance(left, torch.Tensor) or torch.equal(left, right)


def test_override_reaches_code_that_was_compiled_before() -> None:
    sample = sample_inputs("filter_prefill_indices", "cpu")[0]
    compiled = torch.compile(sample.op, backend="aot_eager", fullgraph=True)
    compiled(*sample.args)
    with dispatch.override("hopper"), pytest.raises(NotImplementedError, match="'hopper' was asked for"):
        compiled(*sample.args)
    compiled(*sample.args)


def test_explain_says_what_was_chosen_and_why_not_the_others(world: World) -> None:
    world.has((9, 0), installed=("triton",), **{**EVERYTHING, "hopper": "it needs 64 heads"})
    explanation = dispatch.explain(on(CUDA, "sparse_attention"))
    assert explanation.chosen == "flash_mla"
    assert not explanation.forced
    lines = str(explanation).splitlines()
    assert lines[0] == "sparse_attention: flash_mla (first without a reason against it)"
    assert sorted(lines[1:]) == [
        "  not flash_attn: there is no flash_attn lowering of sparse_attention",
        "  not flashinfer: there is no flashinfer lowering of sparse_attention",
        "  not hopper: it needs 64 heads",
        "  not reference: runs on cuda only when asked for with dispatch.override",
        "  not torch_sdpa: there is no torch_sdpa lowering of sparse_attention",
        "  not triton: comes after flash_mla",
    ]


def test_explain_takes_a_call_and_no_name() -> None:
    with pytest.raises(TypeError, match=r"dispatch.explain: call must be what registry.describe gives, got str"):
        dispatch.explain("sparse_attention")
    with pytest.raises(
        ValueError, match=r"dispatch.explain: unknown op 'attention', expected one of .*'paged_attention'"
    ):
        dispatch.explain(Call("attention", CPU, torch.bfloat16))
    with pytest.raises(ValueError, match=r"unknown op 'attention', expected one of .*'paged_attention'"):
        mla_ops.registry.describe("attention")


def test_explain_takes_a_device_by_name_and_says_that_a_gpu_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatch.explain(CALLS["paged_attention"]._replace(device="cpu")).chosen == "reference"

    def no_gpu(device: torch.device) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "get_device_capability", no_gpu)
    with pytest.raises(ValueError, match=r"cuda:0 is not on this machine: dispatch.stand_in\(\(9, 0\)\)"):
        dispatch.explain(on(CUDA))
    there = dispatch.explain(on(dispatch.stand_in((9, 0))))
    assert there.chosen != "reference"


def test_explain_agrees_with_what_runs(world: World) -> None:
    for capability in ((8, 0), (9, 0), (10, 0)):
        for refusing in ({}, {"hopper": "a"}, {"hopper": "a", "flash_mla": "b"}):
            world.has(capability, installed=("triton",), **{**EVERYTHING, **refusing})
            for device in (CPU, CUDA):
                assert dispatch.explain(on(device)).chosen == dispatch.select_name(on(device))


def test_explain_of_a_forced_lowering_says_so_and_why_it_cannot_run(world: World) -> None:
    world.has((8, 0), installed=("triton",), **EVERYTHING)
    with dispatch.override("triton"):
        assert str(dispatch.explain(on(CUDA))).startswith("paged_sparse_attention: triton (forced)")
    with dispatch.override("hopper"):
        explanation = dispatch.explain(on(CUDA))
    assert explanation.chosen is None
    assert "compute capability 9.0" in explanation.refused["hopper"]
    assert str(explanation).startswith("paged_sparse_attention: no lowering\n")


def test_report_covers_every_op_and_backend(world: World) -> None:
    world.has((0, 0), **EVERYTHING)
    rows = {(row.op, row.backend): row for row in dispatch.report("cpu")}
    assert set(rows) == {(op, backend) for op in dispatch.FAMILIES for backend in dispatch.BACKENDS}
    assert rows["paged_sparse_attention", "reference"][2:] == (True, None, True)
    refused = rows["paged_sparse_attention", "flash_mla"]
    assert (refused.exists, refused.runs) == (True, False)
    assert "Hopper" in str(refused.reason)
    assert not rows["sparse_attention", "flashinfer"].exists


def test_a_typical_call_of_each_op_is_one_that_hopper_runs_where_it_has_a_lowering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One call for all ops, 576 wide, had prefill as unsupported."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper_sources, "reason", lambda: None)
    monkeypatch.setattr(flash_mla, "find_provider", lambda: (None, "not here"))
    rows = dispatch.report(CUDA)
    there = {row.op for row in rows if row.backend == "hopper" and row.exists}
    assert {"paged_sparse_attention.extra", "paged_attention", "prefill_attention"} <= there
    assert {row.op for row in rows if row.backend == "hopper" and row.runs} == there
    for row in rows:
        if (
            row.backend in ("flash_mla", "flashinfer", "flash_attn")
            and row.exists
            and "10.3, 12.0" not in str(row.reason)
        ):
            assert isinstance(row.reason, dispatch.Missing), row


def test_every_backend_of_the_order_exists() -> None:
    for backends in dispatch.ORDER.values():
        assert set(backends) <= set(dispatch.BACKENDS)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process, with the environment that a user has."""
    inherited = {name: value for name, value in os.environ.items() if name != dispatch.ENVIRONMENT_VARIABLE}
    return fresh.run("-c", textwrap.dedent(code), env={**inherited, "PYTHONPATH": REPOSITORY, **environment})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", {}),
        ("triton", {"*": "triton"}),
        ("paged_sparse_attention=flash_mla", {"paged_sparse_attention": "flash_mla"}),
        (
            " reference , concat_and_cache=triton,",
            {"*": "reference", "concat_and_cache": "triton"},
        ),
    ],
    ids=["nothing", "one lowering for all", "one op", "all but one, with spaces"],
)
def test_environment_variable_is_parsed(value: str, expected: dict[str, str]) -> None:
    assert dispatch._parse_environment(value) == expected


@pytest.mark.parametrize("value", ["cutlass", "flash=triton", "concat_and_cache=cutlass", "concat_and_cache="])
def test_environment_variable_with_an_unknown_name_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=f"{dispatch.ENVIRONMENT_VARIABLE}: unknown"):
        dispatch._parse_environment(value)


def test_environment_variable_forces_a_lowering_in_a_fresh_process() -> None:
    code = """
        import torch, mla_ops
        indices, lens = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        torch.ops.mla.filter_prefill_indices(indices, lens)
    """
    forced = run_python(code, **{dispatch.ENVIRONMENT_VARIABLE: "filter_prefill_indices=hopper"})
    assert forced.returncode == 1
    assert "filter_prefill_indices: the lowering 'hopper' was asked for, but" in forced.stderr
    mistyped = run_python("import mla_ops", **{dispatch.ENVIRONMENT_VARIABLE: "tritn"})
    assert mistyped.returncode == 1
    assert "unknown lowering 'tritn'" in mistyped.stderr


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    result = run_python(
        """
        import sys, torch, mla_ops
        from mla_ops.dispatch import Call, explain, select_name

        def backends():
            return sorted({name.split(".")[2] for name in sys.modules if name.startswith("mla_ops.kernels.")})

        assert backends() == [], backends()
        call = Call("filter_prefill_indices", torch.device("cpu"), torch.int32, num_tokens=2, topk=3)
        assert select_name(call) == "reference"
        assert backends() == ["reference"], backends()
        assert not {"triton", "flash_mla", "flashinfer", "transformers"} & set(sys.modules)
        torch.ops.mla.filter_prefill_indices(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
        assert backends() == ["reference"], backends()

        # a refusal of a whole backend needs nothing of it either
        explain(call)
        assert "mla_ops.kernels.hopper" not in sys.modules
        """
    )
    assert result.returncode == 0, result.stderr
