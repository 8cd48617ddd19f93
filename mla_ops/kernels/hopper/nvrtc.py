"""CUDA C++ kernels of this folder: compiled at run time with NVRTC for sm_90a, launched through the driver.

`compile` needs no GPU; `load` does. A source and the headers (`.cuh`) that it includes lie in one folder, use no header
of the CUDA toolkit (its packages need not be there), and each kernel takes one struct by value:

    struct Params { const float* x; int n; };
    template <int N> __global__ void scale(const __grid_constant__ Params params) { ... }

    kernel = load("scale.cu", "scale<2>", device_index)
    kernel.launch((64, 1, 1), (128, 1, 1), 0, (1, 1, 1), struct.pack("@Pi4x", x.data_ptr(), n))

    python -m mla_ops.kernels.hopper.nvrtc scale.cu "scale<2>" --sass

Compiled code is kept in `$MLA_OPS_CACHE_DIR`, else in `mla_ops` of the user's cache folder, under a hash of all that it
comes from.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...dispatch import LoweringUnavailable

if TYPE_CHECKING:
    from cuda.bindings.driver import CUcontext, CUlaunchConfig, CUresult

FOLDER = Path(__file__).parent
CACHE_VARIABLE = "MLA_OPS_CACHE_DIR"
FIRST_VERSION = (12, 0)  # of NVRTC, with sm_90a
OPTIONS = (  # of every kernel; tests/sanitize.py adds a macro
    "-arch=sm_90a",
    "-std=c++17",
    "--extra-device-vectorization",
    "--device-as-default-execution-space",
    "-lineinfo",
)
MAX_SHARED_BYTES = 227 * 1024  # of one block, dynamic and static together
RESERVED_SHARED_BYTES = 1024  # the system's share of each block, which resource reports count as static
PARAMS_OFFSET = 528  # of a kernel's parameters in constant bank 0

Dim = tuple[int, int, int]
NO_CLUSTER: Dim = (1, 1, 1)


class CompileError(LoweringUnavailable):
    """CUDA C++ that does not compile; the message is the compiler's."""


class DriverError(RuntimeError):
    """A call that the CUDA driver refused."""


@dataclass(frozen=True)
class Resources:
    """What one kernel takes, by the compiled code.

    Attributes:
        registers: of a thread, at launch.
        stack: bytes of a thread; spilled registers are here.
        shared: static shared memory of a block, bytes.
        params: bytes of the parameter struct.
    """

    registers: int
    stack: int
    shared: int
    params: int


@dataclass(frozen=True)
class Compiled:
    """Machine code of one kernel.

    Attributes:
        kernel: its name expression, as asked for.
        symbol: its name in `cubin`.
        log: the compiler's warnings, "" if there were none.
    """

    kernel: str
    symbol: str
    log: str
    cubin: bytes

    @functools.cached_property
    def resources(self) -> Resources:
        """Read by `cuobjdump`. Raises FileNotFoundError where neither Triton nor a CUDA toolkit brings it."""
        report = _run_tool("cuobjdump", ["-res-usage"], self.cubin)
        line = report.split(f"Function {self.symbol}:", 1)[1].strip().splitlines()[0]
        found = {name: int(value) for name, value in re.findall(r"([A-Z]+)(?:\[0\])?:(\d+)", line)}
        return Resources(
            found["REG"],
            found["STACK"],
            max(found["SHARED"] - RESERVED_SHARED_BYTES, 0),  # reports of kernels without any leave the system's out
            found["CONSTANT"] - PARAMS_OFFSET,
        )

    @functools.cached_property
    def sass(self) -> str:
        """Disassembled by `nvdisasm`; raises as `resources` does."""
        return _run_tool("nvdisasm", ["-c"], self.cubin)


def _run_tool(tool: str, options: list[str], cubin: bytes) -> str:
    triton = importlib.util.find_spec("triton")
    folders = [Path(folder) / "backends/nvidia/bin" for folder in (triton and triton.submodule_search_locations) or ()]
    path = shutil.which(tool, path=os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")]))
    if path is None:
        raise FileNotFoundError(
            f"{tool} is needed, which Triton's package and the CUDA toolkit bring: pip install triton"
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        finished = subprocess.run([path, *options, file.name], capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"{tool} failed: {finished.stdout}{finished.stderr}")
    return finished.stdout


@functools.cache
def reason() -> str | None:
    """Why CUDA C++ cannot be compiled here, in words a user can act on; None if it can. Never raises."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        return f"the package cuda.bindings cannot be imported ({error}): pip install cuda-bindings"
    try:
        status, major, minor = _version(nvrtc)
    except Exception as error:  # noqa: BLE001 (each release of cuda.bindings raises another class for a missing library)
        return f"cuda.bindings cannot load the NVRTC library ({_first_line(error)}): pip install nvidia-cuda-nvrtc"
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return f"the NVRTC library does not work: {status.name}"
    if (major, minor) < FIRST_VERSION:
        return (
            f"NVRTC {major}.{minor} does not know sm_90a: version {FIRST_VERSION[0]}.{FIRST_VERSION[1]} or later does"
        )
    return None


def _version(nvrtc: Any) -> tuple[Any, int, int]:
    """Status and version of NVRTC, loaded from beside the packages on `sys.path` if need be.

    cuda.bindings looks in this interpreter's own folders, not in those of an environment that this one inherits from,
    but it takes what is loaded.
    """
    try:
        return nvrtc.nvrtcVersion()
    except Exception:  # noqa: BLE001 (as in `reason`)
        nvidia = importlib.util.find_spec("nvidia")
        for folder in (nvidia and nvidia.submodule_search_locations) or ():
            for path in Path(folder).glob("*/lib/libnvrtc.so.*"):
                with contextlib.suppress(OSError):
                    ctypes.CDLL(str(path))
    return nvrtc.nvrtcVersion()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def cache_directory() -> Path:
    """Where compiled code is kept."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mla_ops"


@functools.cache
def compile(source: str | Path, kernel: str, defines: tuple[str, ...] = ()) -> Compiled:  # noqa: A001 (nvrtc.compile)
    """Compiles one kernel, or takes what an earlier process compiled from the same text with the same compiler.

    Args:
        source (str | Path): a file; a relative path starts at this module's folder.
        kernel (str): name expression of the kernel, e.g. "sparse_attention<64, FP8_DS_MLA>".
        defines (tuple[str, ...]): macros, "NAME" or "NAME=VALUE".

    Raises:
        NotImplementedError: there is no compiler here, with `reason()`.
        CompileError: the source does not compile; the compiler's log.
        FileNotFoundError: no such source, or a header that it includes is not beside it.
    """
    missing = reason()
    if missing is not None:
        raise NotImplementedError(f"{kernel}: {missing}")
    path = FOLDER / source
    files = _read_with_headers(path)
    options = (*OPTIONS, *(f"-D{define}" for define in defines))

    from cuda.bindings import nvrtc

    identity = json.dumps([files, path.name, kernel, options, nvrtc.nvrtcVersion()[1:]])
    cached = cache_directory() / f"{hashlib.sha256(identity.encode()).hexdigest()}.cubin"
    found = _read_cached(cached, kernel)
    if found is None:
        found = _compile(path.name, files, kernel, options)
        _write_cached(cached, found)
    return found


def _read_with_headers(path: Path) -> dict[str, str]:
    """Text of a source and of all that it includes, by name. Compiling from memory uses exactly what is hashed."""
    files: dict[str, str] = {}
    wanted = [(path.name, "")]
    while wanted:
        name, includer = wanted.pop()
        if name in files:
            continue
        if includer and not (path.parent / name).is_file():
            raise FileNotFoundError(f'{path.parent / includer} includes "{name}", which is not in {path.parent}')
        files[name] = (path.parent / name).read_text()
        wanted += [(header, name) for header in re.findall(r'^\s*#\s*include\s*"([^"]+)"', files[name], re.MULTILINE)]
    return dict(sorted(files.items()))


def _compile(name: str, files: dict[str, str], kernel: str, options: tuple[str, ...]) -> Compiled:
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name}: {kernel}: {result[0].name}{': ' + log() if program is not None else ''}")
        return result[1] if len(result) > 1 else None

    def fetch(size: Any, get: Any) -> bytes:
        buffer = bytes(check(size(program)))
        check(get(program, buffer))
        return buffer

    def log() -> str:
        return fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0").decode().strip()

    program = None
    headers = {header: text.encode() for header, text in files.items() if header != name}
    program = check(
        nvrtc.nvrtcCreateProgram(
            files[name].encode(),
            name.encode(),
            len(headers),
            list(headers.values()),
            [header.encode() for header in headers],
        )
    )
    try:
        check(nvrtc.nvrtcAddNameExpression(program, kernel.encode()))
        check(nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]))
        symbol = check(nvrtc.nvrtcGetLoweredName(program, kernel.encode())).decode()
        return Compiled(kernel, symbol, log(), fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read_cached(path: Path, kernel: str) -> Compiled | None:
    """What `_write_cached` wrote, None if there is nothing or not all of it."""
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest.decode(errors="replace") != hashlib.sha256(content).hexdigest():
        return None
    head, _, cubin = content.partition(b"\n")
    return Compiled(kernel, **json.loads(head), cubin=cubin)


def _write_cached(path: Path, compiled: Compiled) -> None:
    head = json.dumps({"symbol": compiled.symbol, "log": compiled.log})
    content = head.encode() + b"\n" + compiled.cubin
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        Path(file.name).replace(path)
    except OSError as error:
        warnings.warn(
            f"compiled kernels cannot be kept in {path.parent} ({error}), so each process compiles them again: "
            f"set {CACHE_VARIABLE} to a folder that can be written",
            stacklevel=3,
        )


class Kernel:
    """A compiled kernel on one device. `load` makes it."""

    def __init__(self, compiled: Compiled, device_index: int) -> None:
        from cuda.bindings import driver

        self.compiled = compiled
        self.device_index = device_index
        attribute = driver.CUfunction_attribute
        with _current(device_index), _relaxed_capture():
            self._module = _check(driver.cuModuleLoadData(compiled.cubin))
            self._function = _check(driver.cuModuleGetFunction(self._module, compiled.symbol.encode()))
            static = _check(driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self._function))
            for name, value in (
                (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, MAX_SHARED_BYTES - static),
                (attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
                (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
            ):
                _check(driver.cuFuncSetAttribute(self._function, name, value))
            self._params_bytes = _check(driver.cuFuncGetParamInfo(self._function, 0), 2)
        self._launch = driver.cuLaunchKernelEx

    def launch(
        self,
        grid: Dim,
        block: Dim,
        shared_bytes: int,
        cluster: Dim,
        params: bytes,
        stream: int | None = None,
        programmatic: bool = False,
    ) -> None:
        """Launches; inside a capture, into the graph.

        Args:
            grid (Dim): blocks, multiples of `cluster`, none 0.
            block (Dim): threads.
            shared_bytes (int): dynamic shared memory of a block.
            cluster (Dim): blocks that run together and reach one another's shared memory; (1, 1, 1) for none.
            params (bytes): the kernel's struct, laid out as C++ does (`struct.pack` in native alignment).
            stream (int | None): handle; None for torch's current stream on the kernel's device.
            programmatic (bool): may start before the kernel in front of it in the stream has ended, and waits for it by
                `griddepcontrol.wait`.
        """
        if len(params) != self._params_bytes:
            raise ValueError(f"{self.compiled.kernel} takes {self._params_bytes} bytes of params, got {len(params)}")
        if stream is None:
            stream = torch._C._cuda_getCurrentRawStream(self.device_index)
        clustered = cluster if cluster != NO_CLUSTER else None
        config = _launch_config(grid, block, shared_bytes, clustered, stream, programmatic)
        arguments = _PointerToBytes(params)
        (status,) = self._launch(config, self._function, ctypes.addressof(arguments), 0)
        if status:
            # A thread that has not used CUDA yet, or uses another device, has another context or none.
            with _current(self.device_index):
                (status,) = self._launch(config, self._function, ctypes.addressof(arguments), 0)
            if status:
                raise RuntimeError(
                    f"{self.compiled.kernel}: {_describe(status)}; grid {grid}, block {block}, {shared_bytes} bytes of "
                    f"dynamic shared memory, cluster {cluster}"
                )

    def occupancy_clusters(self, block: Dim, shared_bytes: int, cluster: Dim) -> int:
        """Number of clusters that can run at one time on the device."""
        from cuda.bindings import driver

        config = _launch_config(cluster, block, shared_bytes, cluster, 0, False)
        with _current(self.device_index):
            return _check(driver.cuOccupancyMaxActiveClusters(self._function, config))


@functools.cache
def load(source: str | Path, kernel: str, device_index: int, defines: tuple[str, ...] = ()) -> Kernel:
    """The kernel on a device, compiled and loaded by the first call; arguments and errors as in `compile`.

    Raises:
        LoweringUnavailable: the driver does not take the code.
    """
    compiled = compile(source, kernel, defines)
    try:
        return Kernel(compiled, device_index)
    except DriverError as error:
        raise LoweringUnavailable(
            f"{kernel}: {error}. A driver as new as NVRTC takes the code: update the driver, or install the NVRTC of "
            "its CUDA version"
        ) from error


_PointerToBytes = ctypes.c_char_p * 1


@functools.lru_cache(maxsize=4096)
def _launch_config(
    grid: Dim, block: Dim, shared_bytes: int, cluster: Dim | None, stream: int, programmatic: bool
) -> CUlaunchConfig:
    """Never changed once it is made, so threads share it; building one takes longer than a launch."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared_bytes
    config.hStream = driver.CUstream(stream)
    attributes = []
    if cluster is not None:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dims = attribute.value.clusterDim
        dims.x, dims.y, dims.z = cluster
        attributes.append(attribute)
    if programmatic:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def capture_id(device_index: int) -> int:
    """That of the capture which the current stream of the device is part of; 0 for none."""
    with torch.cuda.device(device_index):
        if not torch.cuda.is_current_stream_capturing():
            return 0
        from cuda.bindings import driver

        stream = torch._C._cuda_getCurrentRawStream(device_index)
        return int(_check(driver.cuStreamGetCaptureInfo(driver.CUstream(stream)), 2))


def lasting_zeros(device_index: int, size: int) -> int:
    """The address of memory that nobody frees, zeros when this returns, also during a capture."""
    from cuda.bindings import driver

    with _current(device_index), _relaxed_capture():
        address = int(_check(driver.cuMemAlloc(size)))
        stream = _check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        _check(driver.cuMemsetD8Async(address, 0, size, stream))
        _check(driver.cuStreamSynchronize(stream))
        _check(driver.cuStreamDestroy(stream))
    return address


@functools.cache
def _primary_context(device_index: int) -> CUcontext:
    from cuda.bindings import driver

    _check(driver.cuInit(0))
    return _check(driver.cuDevicePrimaryCtxRetain(_check(driver.cuDeviceGet(device_index))))


@contextlib.contextmanager
def _current(device_index: int) -> Iterator[None]:
    """Calls are to the device, whatever this thread used before."""
    from cuda.bindings import driver

    _check(driver.cuCtxPushCurrent(_primary_context(device_index)))
    try:
        yield
    finally:
        _check(driver.cuCtxPopCurrent())


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Loading code allocates, which a stream capture in another or in this thread would forbid."""
    from cuda.bindings import driver

    before = _check(driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        yield
    finally:
        _check(driver.cuThreadExchangeStreamCaptureMode(before))


def _check(result: tuple[Any, ...], position: int = 1) -> Any:
    if result[0] != 0:
        raise DriverError(f"the CUDA driver refused a kernel of mla_ops: {_describe(result[0])}")
    return result[position] if len(result) > position else None


def _describe(status: CUresult) -> str:
    from cuda.bindings import driver

    return f"{status.name}: {driver.cuGetErrorString(status)[1].decode()}"


def main() -> int:
    """Prints what a kernel takes, and with --sass its machine code."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=main.__doc__)
    parser.add_argument("file", type=Path, help="source; a relative path starts here, then at the package's folder")
    parser.add_argument("kernel", help='name expression, e.g. "scale<2>"')
    parser.add_argument("-D", dest="defines", action="append", default=[], metavar="NAME[=VALUE]", help="macro")
    parser.add_argument("--sass", action="store_true", help="print the machine code")
    arguments = parser.parse_args()
    path = arguments.file.resolve() if arguments.file.exists() else arguments.file
    try:
        compiled = compile(path, arguments.kernel, tuple(arguments.defines))
    except (CompileError, FileNotFoundError, NotImplementedError) as error:
        parser.exit(1, f"{error}\n")
    if compiled.log:
        print(compiled.log, file=sys.stderr)
    if arguments.sass:
        print(compiled.sass)
    used = compiled.resources
    print(
        f"{compiled.kernel}: {used.registers} registers, {used.stack} bytes of stack, {used.shared} bytes of static "
        f"shared memory, {used.params} bytes of params, {len(compiled.cubin)} bytes of code and debug information"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
