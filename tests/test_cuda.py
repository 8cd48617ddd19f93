"""CUDA C++ is compiled with readable errors, kept on disk safely, and launched as torch's own kernels are."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import fresh
import pytest
import torch

from mla_ops.dispatch import LoweringUnavailable, Missing
from mla_ops.kernels.cuda import compiler, driver, store
from mla_ops.kernels.cuda.compiler import Compiled, CompileError, Target, Unit
from mla_ops.kernels.cuda.prebuilt import archive_of, build
from mla_ops.kernels.cuda.sources import Sources
from mla_ops.kernels.hopper.sources import SOURCES

ROOT = Path(__file__).resolve().parent.parent

SM90A = Target("sm_90a", (12, 0))
needs_nvrtc = pytest.mark.skipif(compiler.reason(SM90A) is not None, reason=str(compiler.reason(SM90A)))

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
    static __constant__ __attribute__((used)) int shared_bytes = CLUSTER * 256;
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
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel above, with a cache of its own."""
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "shift.cuh").write_text(HEADER)
    path = tmp_path / "shift.cu"
    path.write_text(SOURCE)
    store._cannot_keep.cache_clear()
    return path


def sources(path: Path) -> Sources:
    """Sources as a new process would have them."""
    return Sources(path.parent, SM90A)


def compile_again(path: Path, kernel: str = "shift<2>", defines: tuple[str, ...] = ()) -> Compiled:
    return sources(path).compile(path.name, kernel, defines)


def cached_code() -> Path:
    (file,) = store.cache_directory().glob("*.cubin")
    return file


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    compile_now = compiler.compile

    def counting(unit: Unit) -> Compiled:
        done.append(unit.name)
        return compile_now(unit)

    monkeypatch.setattr(compiler, "compile", counting)
    return done


@needs_nvrtc
def test_a_kernel_compiles_to_code_with_its_symbol_and_resources(source: Path) -> None:
    compiled = compile_again(source, "shift<2>")
    assert compiled.symbol.encode() in compiled.cubin
    assert compiled.log == ""
    assert compiled.shared_bytes == 512
    pytest.importorskip("triton", reason="it brings cuobjdump and nvdisasm")
    assert compiled.resources.registers > 4
    assert compiled.resources.stack == 0
    assert compiled.resources.shared == 0
    assert compiled.resources.params == struct.calcsize(PARAMS)
    assert "UCGABAR_WAIT" in compiled.sass or "CGABAR" in compiled.sass


# Writes its address, its size, and the sum of the words that it reads there.
ASKS = """
#include "code.cuh"
struct Params { u64* found; };
template <int N>
__global__ void asks(const __grid_constant__ Params params) {
    prefetch_code<0>();
    u64 sum = 0;
    for (u64 i = 0; i < code_bytes / 8; ++i) sum += code_begin[i];
    params.found[0] = reinterpret_cast<u64>(code_begin), params.found[1] = code_bytes, params.found[2] = sum;
}
"""


@pytest.fixture
def asks(source: Path) -> Path:
    for name in ("code", "ptx", "memory", "arithmetic"):
        shutil.copy(SOURCES.folder / f"{name}.cuh", source.parent)
    path = source.with_name("asks.cu")
    path.write_text(ASKS)
    return path


@needs_nvrtc
def test_a_kernel_that_asks_is_loaded_with_its_own_address_and_size(asks: Path) -> None:
    """The address is a relocation against the kernel, which the driver resolves. Nothing else changes."""
    compiled = compile_again(asks, "asks<1>")
    elf, before, after = compiler._Elf(compiled.cubin), compiled.cubin, compiled.loadable
    kernel, size, begin = (elf.symbols[name] for name in (compiled.symbol, "code_bytes", "code_begin"))
    (table,) = (section for section in elf.sections if section[1] == 4 and section[7] == begin.section)
    assert kernel.size == elf.sections[kernel.section][5]
    assert struct.unpack_from("<Q", before, elf.at(size)) == (0,)
    assert struct.unpack_from("<Q", after, elf.at(size)) == (kernel.size,)
    assert struct.unpack_from("<QII", after, table[4]) == (begin.place, 2, kernel.number)
    changed = {at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new}
    assert changed <= {*range(elf.at(size), elf.at(size) + 8), *range(table[4] + 8, table[4] + 16)}


@needs_nvrtc
def test_a_kernel_that_does_not_ask_is_loaded_as_compiled(source: Path) -> None:
    compiled = compile_again(source)
    assert compiled.loadable is compiled.cubin


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
    compiled = compile_again(source, "spill")
    assert compiled.shared_bytes == 0, "it says nothing"
    resources = compiled.resources
    assert resources.shared == 1200
    assert resources.stack == 256
    assert resources.params == 8


@needs_nvrtc
def test_what_a_kernel_comes_from_decides_whether_it_is_compiled_again(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = count_compilations(monkeypatch)
    first = compile_again(source, "shift<2>")
    assert compile_again(source, "shift<2>") == first
    assert len(done) == 1

    assert compile_again(source, "shift<2>", ("TERM=1",)).cubin != first.cubin
    assert compile_again(source, "shift<4>").symbol != first.symbol
    (source.parent / "shift.cuh").write_text(HEADER.replace("float factor", "float factor, term"))
    assert compile_again(source, "shift<2>").cubin != first.cubin
    assert len(done) == 4


@needs_nvrtc
@pytest.mark.parametrize("damage", [lambda code: code[:-1], lambda code: b"", lambda code: b"\0" * len(code)])
def test_a_damaged_file_in_the_cache_is_compiled_again(source: Path, damage, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_again(source, "shift<2>")
    file = cached_code()
    written = file.read_bytes()
    file.write_bytes(damage(written))
    done = count_compilations(monkeypatch)
    assert compile_again(source, "shift<2>") == first
    assert len(done) == 1
    assert file.read_bytes() == written


@needs_nvrtc
def test_processes_that_need_a_kernel_at_the_same_time_compile_it_once(source: Path) -> None:
    code = (
        "from pathlib import Path\nfrom mla_ops.kernels.cuda import compiler\n"
        "from mla_ops.kernels.cuda.sources import Sources\n"
        "compile_now = compiler.compile\ncompiler.compile = lambda unit: print('compiled') or compile_now(unit)\n"
        f"sources = Sources(Path({str(source.parent)!r}), compiler.Target('sm_90a', (12, 0)))\n"
        "print(len(sources.compile('shift.cu', 'shift<2>').cubin))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    lines = [process.stdout.split() for process in fresh.run_together(("-c", code), ("-c", code), env=environment)]
    assert {line[-1] for line in lines} == {str(len(compile_again(source, "shift<2>").cubin))}
    assert sum("compiled" in line for line in lines) == 1
    file = cached_code()
    assert store.read(file, "shift<2>") == compile_again(source, "shift<2>")


@needs_nvrtc
def test_a_process_that_holds_a_lock_and_is_stopped_does_not_stop_others(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PATIENCE_SECONDS", 0.3)
    waited: list[float] = []
    monkeypatch.setattr(store.time, "sleep", lambda seconds, sleep=time.sleep: waited.append(seconds) or sleep(seconds))
    unit = sources(source).read("shift.cu", "shift<2>")
    with store._locked(store.cache_directory() / f"{unit.digest(compiler.version())}.cubin"):
        assert compile_again(source).cubin
    assert len(waited) > 2
    assert cached_code().is_file()


@needs_nvrtc
def test_threads_that_need_a_kernel_at_the_same_time_compile_it_once(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(store.CACHE_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    done, found, shared = count_compilations(monkeypatch), [], sources(source)
    threads = [threading.Thread(target=lambda: found.append(shared.compile("shift.cu", "shift<2>"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 1
    assert all(one is found[0] for one in found)


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@needs_nvrtc
@pytest.mark.parametrize("trouble", ["a file instead of a folder", "no home directory", "a home that does not exist"])
def test_a_cache_that_cannot_be_had_is_said_once_and_does_no_harm(
    source: Path, trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if trouble == "a file instead of a folder":
        monkeypatch.setenv(store.CACHE_VARIABLE, str(source))
    else:
        monkeypatch.delenv(store.CACHE_VARIABLE)
        home = no_home if trouble == "no home directory" else lambda: Path("/proc/nobody")
        monkeypatch.setattr(Path, "home", home)
    for kernel in ("shift<2>", "shift<4>"):
        assert compile_again(source, kernel).cubin
    (record,) = caplog.records
    assert record.name == "mla_ops"
    for words in ("cannot be kept", "each kernel", store.CACHE_VARIABLE):
        assert words in record.getMessage()


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.CACHE_VARIABLE, "/somewhere/else")
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/of/caches")
    assert store.cache_directory() == Path("/somewhere/else")
    monkeypatch.delenv(store.CACHE_VARIABLE)
    assert store.cache_directory() == Path("/home/of/caches/mla_ops")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.cache_directory() == Path.home() / ".cache/mla_ops"


@needs_nvrtc
def test_errors_are_the_compilers(source: Path) -> None:
    source.write_text(SOURCE.replace("params.factor", "params.faktor"))
    with pytest.raises(CompileError, match=r"(?s)shift\.cu\(\d+\): error: .*faktor"):
        compile_again(source, "shift<2>")
    with pytest.raises(CompileError, match="shfit"):
        compile_again(source, "shfit<2>")
    assert not list(store.cache_directory().glob("*.cubin"))


@needs_nvrtc
def test_warnings_are_kept_with_the_code(source: Path) -> None:
    source.write_text(SOURCE.replace("float other;", "float other; int unused;"))
    assert "unused" in compile_again(source, "shift<2>").log
    assert "unused" in compile_again(source, "shift<2>").log


@needs_nvrtc
def test_headers_come_from_the_sources_folder_only(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = source.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "shift.cuh").write_text("#error not this one")
    monkeypatch.chdir(elsewhere)
    assert compile_again(source, "shift<2>").cubin
    (elsewhere / "other.cuh").write_text("")
    (source.parent / "shift.cuh").write_text('#include "other.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r'shift\.cuh includes "other\.cuh", which is not in '):
        compile_again(source, "shift<2>")


@pytest.fixture
def prebuilt(source: Path) -> Path:
    """The kernel above, compiled before, in an archive alone."""
    folder = sources(source)
    build([folder.read("shift.cu", "shift<2>")], archive_of(source.parent, SM90A))
    shutil.rmtree(store.cache_directory())
    return source


@needs_nvrtc
def test_prebuilt_code_is_taken_while_it_is_of_its_sources(prebuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = count_compilations(monkeypatch)
    assert compile_again(prebuilt).cubin.startswith(b"\x7fELF")
    assert not done
    assert not store.cache_directory().exists()
    compile_again(prebuilt, defines=("TERM=1",))
    compile_again(prebuilt, "shift<4>")
    (prebuilt.parent / "shift.cuh").write_text(HEADER + "// changed")
    compile_again(prebuilt)
    assert len(done) == 3


@needs_nvrtc
def test_prebuilt_code_needs_bindings_of_the_driver_and_no_compiler(
    prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "reason", lambda target: Missing("no compiler"))
    folder = sources(prebuilt)
    assert folder.reason() is None
    assert folder.compile("shift.cu", "shift<2>").cubin
    with pytest.raises(LoweringUnavailable, match="shift<4>: no compiler"):
        folder.compile("shift.cu", "shift<4>")
    monkeypatch.setattr(driver, "reason", lambda: Missing("no bindings"))
    assert folder.reason() == "no bindings"


@needs_nvrtc
@pytest.mark.parametrize("error", [driver.DriverError, RuntimeError])
def test_prebuilt_code_that_the_driver_refuses_is_compiled_here(
    prebuilt: Path, error: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive may be of a newer CUDA than the NVRTC beside torch, which is of the driver's."""
    done, offered = count_compilations(monkeypatch), []

    def refuse(compiled: Compiled, device_index: int) -> Compiled:
        offered.append(compiled)
        if len(offered) < takes:
            raise error("CUDA_ERROR_INVALID_IMAGE")
        return compiled

    monkeypatch.setattr(driver, "Function", refuse)
    takes = 2
    assert sources(prebuilt).load("shift.cu", "shift<2>", 0) is offered[1]
    takes = 99
    with pytest.raises(LoweringUnavailable, match=r"shift<2>.*INVALID_IMAGE.*update the driver"):
        sources(prebuilt).load("shift.cu", "shift<2>", 0)
    assert len(offered) == 4
    assert len(done) == 1
    monkeypatch.setattr(compiler, "reason", lambda target: Missing("no compiler"))
    with pytest.raises(LoweringUnavailable, match="INVALID_IMAGE"):
        sources(prebuilt).load("shift.cu", "shift<2>", 0)
    assert len(offered) == 5


@needs_nvrtc
def test_an_archive_has_the_same_bytes_each_time(prebuilt: Path) -> None:
    archive = archive_of(prebuilt.parent, SM90A)
    before, folder = archive.read_bytes(), sources(prebuilt)
    build([folder.read("shift.cu", "shift<2>")], archive)
    assert archive.read_bytes() == before
    prebuilt.write_text(SOURCE.replace("float other;", "float other; int unused;"))
    with pytest.raises(CompileError, match="unused"):
        build([folder.read("shift.cu", "shift<2>")], archive)
    assert archive.read_bytes() == before


# a stand-in for cuda.bindings.nvrtc, None for no package, and words of the reason
MISSING = (
    (None, "pip install cuda-bindings"),
    ("def nvrtcVersion(): raise RuntimeError('libnvrtc.so not found\\nsearched')", "pip install nvidia-cuda-nvrtc"),
    ("class nvrtcResult: NVRTC_SUCCESS = 0\ndef nvrtcVersion(): return 0, 11, 8", "11.8 does not know sm_90a"),
)
# each folder of its arguments in a fork of its own, which has imported torch
REASONS = """
import os, sys
import torch, mla_ops
from pathlib import Path
for name in [name for name in sys.modules if name.partition(".")[0] == "cuda"]:
    del sys.modules[name]  # torch has imported it
for folder in sys.argv[1:]:
    if os.fork():
        assert os.wait()[1] == 0
        continue
    sys.path.insert(0, folder)
    from mla_ops.dispatch import LoweringUnavailable, Missing
    from mla_ops.kernels.cuda.compiler import Target
    from mla_ops.kernels.cuda.sources import Sources
    sources = Sources(Path(folder), Target("sm_90a", (12, 0)))
    assert isinstance(sources.reason(), Missing)
    print(sources.reason())
    try:
        sources.compile("any.cu", "any")
    except LoweringUnavailable as error:
        print(error, flush=True)
    os._exit(0)
"""


def test_a_missing_compiler_is_named_and_compiles_nothing(tmp_path: Path) -> None:
    folders = []
    for number, (stand_in, _) in enumerate(MISSING):
        folders.append(tmp_path / str(number))
        bindings = folders[-1] / "cuda" / "bindings"
        bindings.mkdir(parents=True)
        for empty in (bindings.parent / "__init__.py", bindings / "__init__.py", folders[-1] / "any.cu"):
            empty.touch()
        if stand_in is not None:
            (bindings / "nvrtc.py").write_text(stand_in)
            (bindings / "driver.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = fresh.run("-c", REASONS, *map(str, folders), env=environment, check=True, cwd=tmp_path)
    lines = finished.stdout.splitlines()
    assert len(lines) == 2 * len(MISSING)
    for (_, words), reason, error in zip(MISSING, lines[::2], lines[1::2], strict=True):
        assert words in reason
        assert words in error
        assert error.startswith("any: ")


def test_a_library_that_an_outer_environment_has_is_loaded_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(tmp_path)
    loaded: list[str] = []
    monkeypatch.setattr(compiler.ctypes, "CDLL", loaded.append)

    def version() -> tuple[int, int, int]:
        if str(library) not in loaded:
            raise RuntimeError("not in the folders of this interpreter")
        return 0, 13, 0

    assert compiler._version(SimpleNamespace(nvrtcVersion=version)) == (0, 13, 0)


@needs_nvrtc
def test_the_command_prints_resources_and_machine_code(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="it brings cuobjdump and nvdisasm")
    command = ["-m", "mla_ops.kernels.cuda.compiler", "sm_90a", str(source), "shift<2>", "-DTERM=3"]
    printed = fresh.run(*command, "--sass", check=True, cwd=ROOT).stdout
    assert "EXIT" in printed
    assert "0 bytes of stack" in printed
    monkeypatch.setattr(sys, "argv", [*command[1:], "-DTERM=?"])
    with pytest.raises(SystemExit) as failed:
        compiler.main()
    assert failed.value.code == 1
    assert "error:" in capsys.readouterr().err


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
    folder = sources(source)
    kernel = folder.load("shift.cu", f"shift<{cluster}>", 0)
    expected = shifted(x, cluster)
    dims = (cluster, 1, 1)
    kernel.launch((16, 1, 1), (128, 1, 1), 200 * 1024, dims, arguments(x), programmatic=cluster == 8)
    torch.testing.assert_close(x, expected, rtol=0, atol=0)
    assert 1 <= kernel.occupancy_clusters((128, 1, 1), 200 * 1024, dims) * cluster <= 132
    assert folder.load("shift.cu", f"shift<{cluster}>", 0) is kernel


@pytest.mark.gpu
def test_a_captured_launch_replays_with_what_its_tensors_hold_then(source: Path, x: torch.Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):  # loads the module inside the capture, too
        sources(source).load("shift.cu", "shift<4>", 0).launch((16, 1, 1), (128, 1, 1), 1024, (4, 1, 1), arguments(x))
    for _ in range(3):
        x.normal_()
        expected = shifted(x, 4)
        graph.replay()
        torch.testing.assert_close(x, expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_launches_follow_the_current_stream_and_any_thread(source: Path, x: torch.Tensor) -> None:
    kernel = sources(source).load("shift.cu", "shift<2>", 0)
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
def test_a_kernel_finds_its_own_code(asks: Path) -> None:
    found = torch.zeros(3, dtype=torch.int64, device="cuda")
    kernel = sources(asks).load("asks.cu", "asks<1>", 0)
    kernel.launch((1, 1, 1), (32, 1, 1), 0, (1, 1, 1), struct.pack("@P", found.data_ptr()))
    elf = compiler._Elf(kernel.compiled.cubin)
    own = elf.symbols[kernel.compiled.symbol]
    words = struct.unpack_from(f"<{own.size // 8}q", kernel.compiled.cubin, elf.at(own))
    begin, size, total = found.tolist()
    assert begin > 0
    assert begin % 128 == 0
    assert size == own.size
    assert (total - sum(words)) % 2**64 == 0


@pytest.mark.gpu
def test_launches_that_cannot_work_say_why(source: Path, x: torch.Tensor) -> None:
    kernel = sources(source).load("shift.cu", "shift<2>", 0)
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
            address = driver.lasting_zeros(0, 128 * 16 * 4)
            ids += [driver.capture_id(0), driver.capture_id(0)]
            params = struct.pack(PARAMS, address, 16 * 128, 2.0)
            sources(source).load("shift.cu", "shift<4>", 0).launch((16, 1, 1), (128, 1, 1), 1024, (4, 1, 1), params)
        for _ in range(3):
            graph.replay()
    torch.cuda.synchronize()
    assert len(ids) == 4
    assert ids[0] == ids[1] != ids[2] == ids[3]
    assert all(ids)
    assert driver.capture_id(0) == 0
    values = (ctypes.c_float * (16 * 128))()
    from cuda.bindings.driver import cuMemcpyDtoH

    assert cuMemcpyDtoH(values, address, ctypes.sizeof(values))[0] == 0
    assert not any(values)
