"""Shared by all tests: where a test runs, which lowering it asks, and its seed.

Without a GPU, Triton kernels run in Triton's interpreter. It is chosen by an environment variable that Triton reads
when it is imported, so it is set here, before any kernel is.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _pytest.logging import catching_logs

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

import faster_compilation

from mla_ops import dispatch  # after the variable

faster_compilation.install()


def listen_at_the_root(self: Any) -> logging.Handler:
    """`catching_logs.__enter__`, which goes through all loggers six times a test, for those that do not propagate.

    Those are torch's, some 80, and its trace of compilations writes down all graphs once anybody listens. The root's
    level is set where it is another one only, as that empties what all loggers have found out.
    """
    root = logging.getLogger()
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = root.level
        if self.level < root.level:
            root.setLevel(self.level)
    root.addHandler(self.handler)
    return self.handler


def stop_listening(self: Any, *_: Any) -> None:
    root = logging.getLogger()
    if self.level is not None and root.level != self.orig_level:
        root.setLevel(self.orig_level)
    root.removeHandler(self.handler)


catching_logs.__enter__, catching_logs.__exit__ = listen_at_the_root, stop_listening

if not HAS_GPU and dispatch.is_installed("triton"):
    import faster_interpreter

    faster_interpreter.install()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that is skipped for want of a GPU is collected once, not once a case: those were every fifth of all."""
    if HAS_GPU or not metafunc.definition.get_closest_marker("gpu"):
        return
    marks = metafunc.definition.own_markers
    for i, mark in enumerate(marks):
        if mark.name == "parametrize":
            names, values, *rest = mark.args
            marks[i] = pytest.mark.parametrize(names, list(values)[:1], *rest, **{**mark.kwargs, "ids": None}).mark


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # files with slow tests come first, so that no worker waits for one of them at the end
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, torch.cuda.is_available() is False")
    no_triton = pytest.mark.skip(reason="Triton is not installed")
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(no_gpu)
        # Hypothesis takes no fixture of a function, so its tests name the lowering in a parameter.
        parameters = getattr(item, "callspec", None)
        if (
            parameters is not None
            and parameters.params.get("backend") == "triton"
            and not dispatch.is_installed("triton")
        ):
            item.add_marker(no_triton)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Objects of modules and of collected tests stay to the end: the garbage collector need not look at them again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def seed() -> None:
    # without a GPU, torch.manual_seed notes for each that may come that it is to be seeded, and who asked for it
    (torch if HAS_GPU else torch.default_generator).manual_seed(20260)


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one, else the CPU, where the Triton lowering is interpreted."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(params=["reference", "triton"])
def lowering(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each lowering that runs everywhere, forced for the ops that the test calls."""
    if request.param == "triton" and not dispatch.is_installed("triton"):
        pytest.skip("Triton is not installed")
    with dispatch.override(request.param):
        yield request.param


@pytest.fixture
def triton_lowering() -> Iterator[None]:
    if not dispatch.is_installed("triton"):
        pytest.skip("Triton is not installed")
    with dispatch.override("triton"):
        yield


@pytest.fixture
def hopper_lowering() -> Iterator[None]:
    if not HAS_GPU or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs SM90")
    with dispatch.override("hopper"):
        yield


@pytest.fixture
def triton_attention() -> Iterator[None]:
    """Attention over paged and flat keys by Triton, whichever tiles it has; all else as dispatch chooses."""
    with dispatch.override(paged_sparse_attention="triton", sparse_attention="triton", paged_attention="triton"):
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny matrices: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """No graphs of other tests, before and behind; counters of what Inductor writes in place begin at 0."""
    from torch._dynamo.utils import ReinplaceCounters

    torch._dynamo.reset()
    ReinplaceCounters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def kernels_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that Triton compiles, and of those for Hopper that are loaded, while the test runs."""
    triton = pytest.importorskip("triton")
    from mla_ops.kernels.cuda import driver

    names: list[str] = []
    load = driver.Function.__init__

    def noted(function: Any, compiled: Any, device_index: int) -> None:
        names.append(compiled.kernel)
        load(function, compiled, device_index)

    monkeypatch.setattr(driver.Function, "__init__", noted)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **what: names.append(what["repr"]))
    return names


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A call that the GPU lowering under test refuses is skipped, with the reason that it gives."""
    try:
        return (yield)
    except NotImplementedError as error:
        parameters = getattr(item, "callspec", None)
        if parameters is not None and parameters.params.get("lowering") == "hopper" and "was asked for" in str(error):
            pytest.skip(str(error))
        raise
