"""Contexts, streams and launches of the CUDA driver, by a stand-in that notes what is called."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from mla_ops.kernels.cuda import driver


class Status(int):
    name = "CUDA_ERROR"


class Driver(ModuleType):
    """Stands in for the CUDA driver: notes what is called, in which context, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__("driver")
        self.contexts = ["another"]
        self.calls: list[tuple[str, str]] = []
        self.fails: dict[str, list[int]] = {}
        self.results: dict[str, tuple[object, ...]] = {"cuDevicePrimaryCtxRetain": ("primary",), "cuLaunchKernelEx": ()}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock() if name.startswith("CU") else partial(self.call, name)

    def call(self, name: str, *arguments: object) -> tuple[object, ...]:
        self.calls.append((name, self.contexts[-1]))
        statuses = self.fails.get(name, [])
        status = statuses.pop(0) if statuses else 0
        if name == "cuCtxPushCurrent":
            self.contexts.append(str(arguments[0]))
        if name == "cuCtxPopCurrent":
            self.contexts.pop()
        return (Status(status), *self.results.get(name, (7, 8, 16)))

    def context_of(self, name: str) -> list[str]:
        return [context for called, context in self.calls if called == name]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    stand_in, bindings = Driver(), ModuleType("cuda.bindings")
    bindings.driver = stand_in
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    for cached in (driver._primary_context, driver._launch_config):
        cached.cache_clear()
    yield stand_in
    for cached in (driver._primary_context, driver._launch_config):
        cached.cache_clear()


def test_what_lasts_is_made_in_the_devices_own_context(cuda: Driver) -> None:
    assert driver.lasting_zeros(1, 64) == 7
    for name in ("cuMemAlloc", "cuMemsetD8Async", "cuStreamSynchronize"):
        assert cuda.context_of(name) == ["primary"]
    cuda.fails["cuMemAlloc"] = [2]
    cuda.results["cuGetErrorString"] = (b"out of memory",)
    with pytest.raises(RuntimeError, match="out of memory"):
        driver.lasting_zeros(1, 64)
    assert cuda.contexts == ["another"]
    assert len(cuda.context_of("cuThreadExchangeStreamCaptureMode")) == 4


def test_a_stream_that_has_the_handle_of_another_has_an_id_of_its_own(
    cuda: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = {0: 0, 1: 4096}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", handles.get, raising=False)
    cuda.results["cuStreamGetId"] = (17,)
    assert driver.stream_id(1) == 17
    cuda.results["cuStreamGetId"] = (18,)
    assert driver.stream_id(1) == 18
    assert driver.stream_id(0) == 0
    assert len(cuda.context_of("cuStreamGetId")) == 2


def test_the_tensors_device_is_asked_whether_it_captures(cuda: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 0 is the current one and captures nothing; device 1 captures into a stream of its own."""
    current = [0]

    @contextlib.contextmanager
    def enter(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", {0: 0, 1: 4096}.get, raising=False)
    cuda.results["cuStreamGetCaptureInfo"] = (1, 23)
    assert driver.capture_id(1) == 23
    assert driver.capture_id(0) == 0
    assert len(cuda.context_of("cuStreamGetCaptureInfo")) == 1


def test_a_driver_that_does_not_know_where_code_is_gets_it_as_compiled(cuda: Driver) -> None:
    compiled = SimpleNamespace(cubin=b"", loadable=b"", symbol="s", kernel="shift<1>")
    cuda.results["cuGetErrorString"] = (b"invalid image",)
    cuda.fails["cuModuleLoadData"] = [200]
    driver.Function(compiled, 1)
    assert cuda.context_of("cuModuleLoadData") == ["primary", "primary"]
    cuda.fails["cuModuleLoadData"] = [200, 200]
    with pytest.raises(driver.DriverError, match="invalid image"):
        driver.Function(compiled, 1)


def test_a_thread_without_a_context_gets_the_devices_before_its_first_launch(cuda: Driver) -> None:
    """A refused launch is an error at once: the device of the tensors is the current one."""
    function = driver.Function(SimpleNamespace(cubin=b"", loadable=b"", symbol="s", kernel="shift<1>"), 1)
    assert cuda.context_of("cuModuleLoadData") == ["primary"]
    function._params_bytes = 16
    failures: list[Exception] = []

    def launch() -> None:
        try:
            for _ in range(2):
                function.launch((1, 1, 1), (32, 1, 1), 0, (1, 1, 1), b"\0" * 16, stream=0)
        except RuntimeError as error:
            failures.append(error)

    def launch_in_a_thread(context: int) -> None:
        cuda.calls.clear()
        cuda.results["cuCtxGetCurrent"] = (context,)
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()

    for context, bound in ((0, 1), (7, 0)):
        launch_in_a_thread(context)
        assert len(cuda.context_of("cuCtxSetCurrent")) == bound
        assert len(cuda.context_of("cuCtxGetCurrent")) == 1
        assert len(cuda.context_of("cuLaunchKernelEx")) == 2
    assert not failures
    cuda.fails["cuLaunchKernelEx"] = [1]
    cuda.results["cuGetErrorString"] = (b"invalid argument",)
    launch_in_a_thread(7)
    assert len(cuda.context_of("cuLaunchKernelEx")) == 1
    assert "shift<1>: CUDA_ERROR: invalid argument" in str(failures[0])
