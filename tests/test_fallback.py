"""A lowering that cannot be loaded makes way for the next, and what is lost is said once."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mla_ops.kernels.triton
from mla_ops import dispatch
from mla_ops.dispatch import Call, Lowering, LoweringUnavailable, Missing
from mla_ops.kernels.cuda import compiler, driver
from mla_ops.kernels.hopper import launch, sources
from mla_ops.testing import functional, op_names, out_overload, sample_inputs
from mla_ops.testing.checks import assert_same_memory, clone_sample

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BASE_OPS = [name for name in op_names() if name == functional(name)]


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "_struck_off", {})
    monkeypatch.setattr(dispatch, "_told", set())
    dispatch._choose.cache_clear()
    yield
    monkeypatch.undo()
    dispatch._choose.cache_clear()


class Broken:
    """A backend in front of the reference, whose lowerings take every call and cannot be loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        found = dispatch._lowering

        def lowering(backend: str, op: str) -> Lowering | None:
            return (
                found(backend, op)
                if backend == "reference"
                else Lowering(self.fail, deterministic=True, backend=backend)
            )

        monkeypatch.setattr(dispatch, "_lowering", lowering)
        monkeypatch.setitem(dispatch.ORDER, "cpu", ("flash_attn", "reference"))
        monkeypatch.setattr(dispatch, "ON_REQUEST", {})

    def fail(self, *_: object, **__: object) -> None:
        self.calls += 1
        raise LoweringUnavailable("the driver is too old: update it")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    return Broken(monkeypatch)


def outcome(sample: Any) -> Any:
    return sample.op(*sample.args, **sample.kwargs)


@pytest.mark.parametrize("op_name", op_names())
def test_the_next_lowering_takes_the_call_of_one_that_is_unavailable(
    op_name: str, broken: Broken, caplog: pytest.LogCaptureFixture
) -> None:
    sample = sample_inputs(op_name, "cpu")[0]
    expected = clone_sample(sample)
    with dispatch.override("reference"):
        returned = outcome(expected)
    with caplog.at_level(logging.WARNING, "mla_ops"):
        for _ in range(3):
            again = clone_sample(sample)
            torch.testing.assert_close(outcome(again), returned, rtol=0, atol=0, equal_nan=True)
            assert_same_memory(again, expected, "of the next lowering")
    assert broken.calls == 1, "it was struck off"
    (record,) = [record for record in caplog.records if record.name == "mla_ops"]
    for words in (functional(op_name), "runs the lowering 'reference'", "'flash_attn'", "too old: update it"):
        assert words in record.getMessage()


def test_an_unavailable_lowering_that_was_asked_for_is_an_error(
    broken: Broken, caplog: pytest.LogCaptureFixture
) -> None:
    sample = sample_inputs("merge_attention_states", "cpu")[0]
    for _ in range(2):
        with dispatch.override("flash_attn"), pytest.raises(NotImplementedError, match=r"'flash_attn' was.*too old"):
            outcome(sample)
    assert broken.calls == 1
    outcome(sample)
    assert len(caplog.records) == 1


def test_explain_says_why_a_lowering_was_struck_off(broken: Broken) -> None:
    outcome(sample_inputs("merge_attention_states", "cpu")[0])
    explanation = dispatch.explain(Call("merge_attention_states", CPU, torch.bfloat16))
    assert explanation.chosen == "reference"
    assert isinstance(explanation.refused["flash_attn"], Missing)
    assert "too old" in explanation.refused["flash_attn"]
    assert dispatch.explain(Call("gather_cache", CPU, torch.bfloat16)).chosen == "flash_attn"


def test_threads_that_fail_together_strike_off_what_failed_and_nothing_else(
    broken: Broken, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each has chosen the lowering before the first of them fails."""
    together = threading.Barrier(4)
    fail = broken.fail

    def wait_and_fail(*_: object, **__: object) -> None:
        together.wait(timeout=60)
        fail()

    monkeypatch.setattr(broken, "fail", wait_and_fail)
    sample = sample_inputs("merge_attention_states", "cpu")[0]
    expected = outcome_of_reference(sample)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(outcome(sample))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert broken.calls == 4
    assert list(dispatch._struck_off) == [("flash_attn", "merge_attention_states")]
    assert len(caplog.records) == 1


def outcome_of_reference(sample: Any) -> Any:
    with dispatch.override("reference"):
        return outcome(sample)


def test_a_lowering_that_dispatch_did_not_choose_is_not_struck_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in would be asked for ever."""

    def fail(*_: object, **__: object) -> None:
        raise LoweringUnavailable("from a stand-in")

    monkeypatch.setattr(dispatch, "select", lambda call: Lowering(fail))
    with pytest.raises(LoweringUnavailable, match="from a stand-in"):
        outcome(sample_inputs(out_overload("merge_attention_states"), "cpu")[0])


ATTENTION = Call("paged_sparse_attention", CUDA, torch.bfloat16, "fp8_ds_mla", 576, 128, 1, 2048)


@pytest.fixture
def hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "is_installed", lambda module: module == "triton")


@pytest.mark.usefixtures("hopper_gpu")
def test_a_gpu_that_misses_a_package_is_told_once_what_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "reason", lambda: Missing("NVRTC is missing: pip install nvidia-cuda-nvrtc"))
    lowerings = {"hopper": Lowering(print, lambda call: launch.compile_reason()), "triton": Lowering(print)}
    monkeypatch.setattr(dispatch, "_lowering", lambda backend, op: lowerings.get(backend))
    for num_tokens in (1, 2, 3):
        assert dispatch.select_name(ATTENTION._replace(num_tokens=num_tokens)) == "triton"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "paged_sparse_attention runs the lowering 'triton' on cuda:0. 'hopper' is faster, but NVRTC is missing: "
        "pip install nvidia-cuda-nvrtc"
    )


@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("reason", ["it takes bfloat16 queries", None], ids=["the call's own", "none"])
def test_a_reason_that_no_user_can_change_is_not_logged(
    reason: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lowerings = {"hopper": Lowering(print, lambda call: reason), "triton": Lowering(print)}
    monkeypatch.setattr(dispatch, "_lowering", lambda backend, op: lowerings.get(backend))
    dispatch.select_name(ATTENTION)
    assert not caplog.records


@pytest.mark.usefixtures("hopper_gpu")
def test_choosing_compiles_and_loads_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a choice of a lowering compiles a kernel")

    monkeypatch.setattr(sources, "reason", lambda: None)
    monkeypatch.setattr(sources, "compile", refuse)
    monkeypatch.setattr(sources, "load", refuse)
    monkeypatch.setattr(compiler, "compile", refuse)
    chosen = {
        entry.op for entry in dispatch.report(dispatch.stand_in((9, 0))) if entry.backend == "hopper" and entry.runs
    }
    assert chosen == {op for op in dispatch.FAMILIES if dispatch.has_lowering("hopper", op)}


def test_code_that_the_driver_refuses_makes_the_lowering_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise driver.DriverError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    monkeypatch.setattr(sources.SOURCES, "compile", lambda *_: None)
    monkeypatch.setattr(driver, "Function", refuse)
    with pytest.raises(LoweringUnavailable, match=r"merge_parts<4>.*UNSUPPORTED_PTX_VERSION.*update the driver"):
        sources.load("merge_parts.cu", "merge_parts<4>", 7)


@pytest.mark.parametrize("home", ["/proc/nobody", None], ids=["not there", "none"])
def test_triton_compiles_where_there_is_no_home(
    home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if home is None:
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    else:
        monkeypatch.setenv("HOME", home)
    mla_ops.kernels.triton.give_triton_a_cache()
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    (record,) = caplog.records
    for words in ("cannot be kept", str(folder), "Set TRITON_CACHE_DIR"):
        assert words in record.getMessage()
    mla_ops.kernels.triton.give_triton_a_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(folder)
    assert len(caplog.records) == 1


def test_triton_keeps_a_home_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HOME", str(tmp_path))
    mla_ops.kernels.triton.give_triton_a_cache()
    assert not os.environ["TRITON_CACHE_DIR"]
    assert list((tmp_path / ".triton/cache").iterdir()) == []
    assert not caplog.records
