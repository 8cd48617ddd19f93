"""CUDA C++ is compiled with readable errors, kept on disk safely, and launched as torch's own kernels are."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from mla_ops.kernels.hopper import nvrtc

ROOT = Path(__file__).resolve().parent.parent

needs_nvrtc = pytest.mark.skipif(nvrtc.reason() is not None, reason=str(nvrtc.reason()))

HEADER = """
#pragma once
struct Params { float* x; int n; float factor; };
"""

# Each block passes its 128 elements to the next block of its cluster, multiplied.
SOURCE = """
#include "shift.cuh"
#ifndef TERM
#define TERM 0
#endif

template <int CLUSTER>
__global__ void __launch_bounds__(128) shift(const __grid_constant__ Params params) {
    extern __shared__ float values[];
    int rank = blockIdx.x % CLUSTER;
    int i = blockIdx.x * 128 + threadIdx.x;
    values[threadIdx.x] = i < params.n ? params.x[i] : 0.f;
    asm volatile("barrier.cluster.arrive;\\nbarrier.cluster.wait;" ::: "memory");
    unsigned address = __cvta_generic_to_shared(values + threadIdx.x);
    float other;
    asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %1, %2; ld.shared::cluster.f32 %0, [a];}"
                 : "=f"(other) : "r"(address), "r"((rank + 1) % CLUSTER) : "memory");
    asm volatile("barrier.cluster.arrive;\\nbarrier.cluster.wait;" ::: "memory");
    if (i < params.n) params.x[i] = other * params.factor + TERM;
}
"""
PARAMS = "@Pif"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The kernel above, with a cache of its own."""
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "shift.cuh").write_text(HEADER)
    path = tmp_path / "shift.cu"
    path.write_text(SOURCE)
    forget()
    yield path
    forget()


def forget() -> None:
    """As a new process would start."""
    nvrtc.compile.cache_clear()
    nvrtc.load.cache_clear()


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    compile_now = nvrtc._compile

    def counting(name: str, *arguments: object) -> nvrtc.Compiled:
        done.append(name)
        return compile_now(name, *arguments)

    monkeypatch.setattr(nvrtc, "_compile", counting)
    return done


@needs_nvrtc
def test_a_kernel_compiles_to_code_with_its_symbol_and_resources(source: Path) -> None:
    compiled = nvrtc.compile(source, "shift<2>")
    assert compiled.symbol.encode() in compiled.cubin
    assert compiled.log == ""
    pytest.importorskip("triton", reason="it brings cuobjdump and nvdisasm")
    assert compiled.resources.registers > 4
    assert compiled.resources.stack == 0
    assert compiled.resources.shared == 0
    assert compiled.resources.params == struct.calcsize(PARAMS)
    assert "UCGABAR_WAIT" in compiled.sass or "CGABAR" in compiled.sass


@needs_nvrtc
def test_static_shared_memory_and_spills_are_reported(source: Path) -> None:
    pytest.importorskip("triton", reason="it brings cuobjdump")
    source.write_text(
        """
        struct Params { int* x; };
        __global__ void spill(const __grid_constant__ Params params) {
            __shared__ int shared[300];
            int local[64];
            for (int i = 0; i < 64; i++) local[params.x[i] & 63] = params.x[i + 1];
            shared[threadIdx.x] = local[params.x[threadIdx.x] & 63];
            __syncthreads();
            params.x[threadIdx.x] = shared[params.x[threadIdx.x]];
        }"""
    )
    resources = nvrtc.compile(source, "spill").resources
    assert resources.shared == 1200
    assert resources.stack == 256
    assert resources.params == 8


@needs_nvrtc
def test_what_a_kernel_comes_from_decides_whether_it_is_compiled_again(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = count_compilations(monkeypatch)
    first = nvrtc.compile(source, "shift<2>")
    forget()
    assert nvrtc.compile(source, "shift<2>") == first
    assert len(done) == 1

    assert nvrtc.compile(source, "shift<2>", ("TERM=1",)).cubin != first.cubin
    assert nvrtc.compile(source, "shift<4>").symbol != first.symbol
    forget()
    (source.parent / "shift.cuh").write_text(HEADER.replace("float factor", "float factor, term"))
    assert nvrtc.compile(source, "shift<2>").cubin != first.cubin
    assert len(done) == 4


@needs_nvrtc
@pytest.mark.parametrize("damage", [lambda code: code[:-1], lambda code: b"", lambda code: b"\0" * len(code)])
def test_a_damaged_file_in_the_cache_is_compiled_again(source: Path, damage, monkeypatch: pytest.MonkeyPatch) -> None:
    first = nvrtc.compile(source, "shift<2>")
    (file,) = nvrtc.cache_directory().iterdir()
    written = file.read_bytes()
    file.write_bytes(damage(written))
    forget()
    done = count_compilations(monkeypatch)
    assert nvrtc.compile(source, "shift<2>") == first
    assert len(done) == 1
    assert file.read_bytes() == written


@needs_nvrtc
def test_processes_that_compile_at_the_same_time_leave_one_whole_file(source: Path) -> None:
    code = f"from mla_ops.kernels.hopper import nvrtc\nprint(len(nvrtc.compile({str(source)!r}, 'shift<2>').cubin))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    sizes = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert sizes == {str(len(nvrtc.compile(source, "shift<2>").cubin))}
    (file,) = nvrtc.cache_directory().iterdir()
    assert nvrtc._read_cached(file, "shift<2>") == nvrtc.compile(source, "shift<2>")


@needs_nvrtc
def test_a_cache_that_cannot_be_written_is_said_and_does_no_harm(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(source))
    with pytest.warns(UserWarning, match=f"(?s)cannot be kept.*{nvrtc.CACHE_VARIABLE}"):
        assert nvrtc.compile(source, "shift<2>").cubin


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, "/somewhere/else")
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/of/caches")
    assert nvrtc.cache_directory() == Path("/somewhere/else")
    monkeypatch.delenv(nvrtc.CACHE_VARIABLE)
    assert nvrtc.cache_directory() == Path("/home/of/caches/mla_ops")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert nvrtc.cache_directory() == Path.home() / ".cache/mla_ops"


@needs_nvrtc
def test_errors_are_the_compilers(source: Path) -> None:
    source.write_text(SOURCE.replace("params.factor", "params.faktor"))
    with pytest.raises(nvrtc.CompileError, match=r"(?s)shift\.cu\(\d+\): error: .*faktor"):
        nvrtc.compile(source, "shift<2>")
    with pytest.raises(nvrtc.CompileError, match="shfit"):
        nvrtc.compile(source, "shfit<2>")
    assert not nvrtc.cache_directory().exists()


@needs_nvrtc
def test_warnings_are_kept_with_the_code(source: Path) -> None:
    source.write_text(SOURCE.replace("float other;", "float other; int unused;"))
    assert "unused" in nvrtc.compile(source, "shift<2>").log
    forget()
    assert "unused" in nvrtc.compile(source, "shift<2>").log


@needs_nvrtc
def test_headers_come_from_the_sources_folder_only(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = source.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "shift.cuh").write_text("#error not this one")
    monkeypatch.chdir(elsewhere)
    assert nvrtc.compile(source, "shift<2>").cubin
    (elsewhere / "other.cuh").write_text("")
    (source.parent / "shift.cuh").write_text('#include "other.cuh"\n')
    forget()
    with pytest.raises(FileNotFoundError, match=r'shift\.cuh includes "other\.cuh", which is not in '):
        nvrtc.compile(source, "shift<2>")


@pytest.mark.parametrize(
    ("stand_in", "words"),
    [
        ("", "pip install cuda-bindings"),
        ("def nvrtcVersion(): raise RuntimeError('libnvrtc.so not found\\nsearched')", "pip install nvidia-cuda-nvrtc"),
        ("class nvrtcResult: NVRTC_SUCCESS = 0\ndef nvrtcVersion(): return 0, 11, 8", "11.8 does not know sm_90a"),
    ],
    ids=["no package", "no library", "an old library"],
)
def test_a_missing_compiler_is_named_and_compiles_nothing(tmp_path: Path, stand_in: str, words: str) -> None:
    (tmp_path / "cuda" / "bindings").mkdir(parents=True)
    (tmp_path / "cuda" / "__init__.py").write_text("")
    (tmp_path / "cuda" / "bindings" / "__init__.py").write_text("")
    if stand_in:
        (tmp_path / "cuda" / "bindings" / "nvrtc.py").write_text(stand_in)
    code = (
        "from mla_ops.kernels.hopper import nvrtc\n"
        "print(nvrtc.reason())\n"
        "try:\n    nvrtc.compile('any.cu', 'any')\nexcept NotImplementedError as error:\n    print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    finished = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    reason, error = finished.stdout.splitlines()
    assert words in reason
    assert error == f"any: {reason}"


def test_a_library_that_an_outer_environment_has_is_loaded_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(tmp_path)
    loaded: list[str] = []
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", loaded.append)

    def version() -> tuple[int, int, int]:
        if str(library) not in loaded:
            raise RuntimeError("not in the folders of this interpreter")
        return 0, 13, 0

    assert nvrtc._version(SimpleNamespace(nvrtcVersion=version)) == (0, 13, 0)


@needs_nvrtc
def test_the_command_prints_resources_and_machine_code(source: Path) -> None:
    pytest.importorskip("triton", reason="it brings cuobjdump and nvdisasm")
    command = [sys.executable, "-m", "mla_ops.kernels.hopper.nvrtc", str(source), "shift<2>", "-DTERM=3"]
    plain = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "0 bytes of stack" in plain
    assert "EXIT" not in plain
    assert "EXIT" in subprocess.run([*command, "--sass"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    failed = subprocess.run([*command, "-DTERM=?"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert failed.returncode == 1
    assert "Traceback" not in failed.stderr
    assert "error:" in failed.stderr


def test_the_wheel_has_every_source_and_header(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="make test installs it")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    (wheel,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    expected = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.cu", "*.cuh")
        for path in (ROOT / "mla_ops").rglob(pattern)
    }
    assert expected <= packed


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
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    stand_in, bindings = Driver(), ModuleType("cuda.bindings")
    bindings.driver = stand_in
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    for cached in (nvrtc._primary_context, nvrtc._launch_config):
        cached.cache_clear()
    yield stand_in
    for cached in (nvrtc._primary_context, nvrtc._launch_config):
        cached.cache_clear()


def test_what_lasts_is_made_in_the_devices_own_context(driver: Driver) -> None:
    assert nvrtc.lasting_zeros(1, 64) == 7
    for name in ("cuMemAlloc", "cuMemsetD8Async", "cuStreamSynchronize"):
        assert driver.context_of(name) == ["primary"]
    driver.fails["cuMemAlloc"] = [2]
    driver.results["cuGetErrorString"] = (b"out of memory",)
    with pytest.raises(RuntimeError, match="out of memory"):
        nvrtc.lasting_zeros(1, 64)
    assert driver.contexts == ["another"]
    assert len(driver.context_of("cuThreadExchangeStreamCaptureMode")) == 4


def test_a_launch_that_another_context_refuses_is_made_in_the_devices_own(driver: Driver) -> None:
    kernel = nvrtc.Kernel(SimpleNamespace(cubin=b"", symbol="s", kernel="shift<1>"), 1)
    assert driver.context_of("cuModuleLoadData") == ["primary"]
    kernel._params_bytes = 16
    driver.fails["cuLaunchKernelEx"] = [201]
    kernel.launch((1, 1, 1), (32, 1, 1), 0, (1, 1, 1), b"\0" * 16, stream=0)
    assert driver.context_of("cuLaunchKernelEx") == ["another", "primary"]
    kernel.launch((1, 1, 1), (32, 1, 1), 0, (1, 1, 1), b"\0" * 16, stream=0)
    assert driver.context_of("cuLaunchKernelEx")[2:] == ["another"]
    assert driver.contexts == ["another"]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(16 * 128, dtype=torch.float32, device="cuda")


def arguments(x: torch.Tensor, factor: float = 2.0) -> bytes:
    return struct.pack(PARAMS, x.data_ptr(), x.numel(), factor)


def shifted(x: torch.Tensor, cluster: int, factor: float = 2.0) -> torch.Tensor:
    return x.view(-1, cluster, 128).roll(-1, 1).reshape(-1) * factor


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2, 8, 16])
def test_clusters_reach_one_anothers_shared_memory(source: Path, x: torch.Tensor, cluster: int) -> None:
    kernel = nvrtc.load(source, f"shift<{cluster}>", 0)
    expected = shifted(x, cluster)
    dims = (cluster, 1, 1)
    kernel.launch((16, 1, 1), (128, 1, 1), 200 * 1024, dims, arguments(x), programmatic=cluster == 8)
    torch.testing.assert_close(x, expected, rtol=0, atol=0)
    assert 1 <= kernel.occupancy_clusters((128, 1, 1), 200 * 1024, dims) * cluster <= 132
    assert nvrtc.load(source, f"shift<{cluster}>", 0) is kernel


@pytest.mark.gpu
def test_a_captured_launch_replays_with_what_its_tensors_hold_then(source: Path, x: torch.Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):  # loads the module inside the capture, too
        nvrtc.load(source, "shift<4>", 0).launch((16, 1, 1), (128, 1, 1), 1024, (4, 1, 1), arguments(x))
    for _ in range(3):
        x.normal_()
        expected = shifted(x, 4)
        graph.replay()
        torch.testing.assert_close(x, expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_launches_follow_the_current_stream_and_any_thread(source: Path, x: torch.Tensor) -> None:
    kernel = nvrtc.load(source, "shift<2>", 0)
    expected = shifted(shifted(x, 2), 2)
    stream = torch.cuda.Stream()
    failures: list[Exception] = []

    def launch() -> None:
        try:
            kernel.launch((16, 1, 1), (128, 1, 1), 1024, (2, 1, 1), arguments(x))
        except Exception as error:  # noqa: BLE001 reported by the test's own thread
            failures.append(error)

    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        launch()
    stream.synchronize()
    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failures
    torch.testing.assert_close(x, expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_launches_that_cannot_work_say_why(source: Path, x: torch.Tensor) -> None:
    kernel = nvrtc.load(source, "shift<2>", 0)
    with pytest.raises(ValueError, match=r"shift<2> takes 16 bytes of params, got 8"):
        kernel.launch((16, 1, 1), (128, 1, 1), 1024, (2, 1, 1), b"\0" * 8)
    with pytest.raises(RuntimeError, match=r"shift<2>: CUDA_ERROR.*block \(129, 1, 1\)"):
        kernel.launch((16, 1, 1), (129, 1, 1), 1024, (2, 1, 1), arguments(x))


@pytest.mark.gpu
def test_zeros_made_during_a_capture_and_its_id(source: Path) -> None:
    """Each capture has an id of its own; what is asked for in it is zeros at once."""
    stream, ids = torch.cuda.Stream(), []
    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            address = nvrtc.lasting_zeros(0, 128 * 16 * 4)
            ids += [nvrtc.capture_id(0), nvrtc.capture_id(0)]
            params = struct.pack(PARAMS, address, 16 * 128, 2.0)
            nvrtc.load(source, "shift<4>", 0).launch((16, 1, 1), (128, 1, 1), 1024, (4, 1, 1), params)
        for _ in range(3):
            graph.replay()
    torch.cuda.synchronize()
    assert len(ids) == 4
    assert ids[0] == ids[1] != ids[2] == ids[3]
    assert all(ids)
    assert nvrtc.capture_id(0) == 0
    values = (ctypes.c_float * (16 * 128))()
    from cuda.bindings import driver

    assert driver.cuMemcpyDtoH(values, address, ctypes.sizeof(values))[0] == 0
    assert not any(values)
