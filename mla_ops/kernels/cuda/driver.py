"""The CUDA driver: code is loaded and launched through it, as torch's own kernels are."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ...dispatch import Missing
from .compiler import INSTALL_BINDINGS, RESERVED_SHARED_BYTES, Compiled

if TYPE_CHECKING:
    from cuda.bindings.driver import CUcontext, CUlaunchConfig, CUresult

Dim = tuple[int, int, int]
NO_CLUSTER: Dim = (1, 1, 1)


@functools.cache
def reason() -> Missing | None:
    """Why kernels cannot be launched here, in words a user can act on; None if they can. Never raises."""
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError as error:
        return Missing(f"the package cuda.bindings cannot be imported ({error}): {INSTALL_BINDINGS}")
    return None


class DriverError(RuntimeError):
    """A call that the CUDA driver refused."""


class Function:
    """A compiled kernel on one device, loaded into the device's primary context, which is torch's."""

    def __init__(self, compiled: Compiled, device_index: int) -> None:
        from cuda.bindings import driver

        self.compiled = compiled
        self.device_index = device_index
        attribute = driver.CUfunction_attribute
        with _current(device_index), relaxed_capture():
            try:
                self._module = _check(driver.cuModuleLoadData(compiled.loadable))
            except DriverError:  # nothing but the code's own address may be what it does not take
                self._module = _check(driver.cuModuleLoadData(compiled.cubin))
            self._function = _check(driver.cuModuleGetFunction(self._module, compiled.symbol.encode()))
            device = _check(driver.cuDeviceGet(device_index))
            most = _check(
                driver.cuDeviceGetAttribute(
                    driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device
                )
            )
            static = _check(driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self._function))
            for name, value in (
                (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most - static),
                (attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
                (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
            ):
                _check(driver.cuFuncSetAttribute(self._function, name, value))
            self._params_bytes = _check(driver.cuFuncGetParamInfo(self._function, 0), 2)
        self._static_shared_bytes = static
        self._launch = driver.cuLaunchKernelEx

    def leave_l1(self, blocks: int) -> None:
        """Has L1 get what `blocks` blocks of an SM do not take of its shared memory: code is loaded for all of it."""
        from cuda.bindings import driver

        block = self._static_shared_bytes + self.compiled.shared_bytes + RESERVED_SHARED_BYTES
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        with _current(self.device_index), relaxed_capture():
            device = _check(driver.cuDeviceGet(self.device_index))
            most = _check(
                driver.cuDeviceGetAttribute(
                    driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, device
                )
            )
            _check(driver.cuFuncSetAttribute(self._function, attribute, min(-(-100 * block * blocks // most), 100)))

    def launch(
        self,
        grid: Dim,
        block: Dim,
        shared_bytes: int | None,
        cluster: Dim,
        params: bytes,
        stream: int | None = None,
        programmatic: bool = False,
    ) -> None:
        """Launches; inside a capture, into the graph. The current device is the function's.

        Args:
            grid (Dim): blocks, multiples of `cluster`, none 0.
            block (Dim): threads.
            shared_bytes (int | None): dynamic shared memory of a block; None for what the code says.
            cluster (Dim): blocks that run together and reach one another's shared memory; (1, 1, 1) for none.
            params (bytes): the kernel's struct, laid out as C++ does (`struct.pack` in native alignment).
            stream (int | None): handle; None for torch's current stream on the kernel's device.
            programmatic (bool): may start before the kernel in front of it in the stream has ended, and waits for it by
                `griddepcontrol.wait`.
        """
        if len(params) != self._params_bytes:
            raise ValueError(f"{self.compiled.kernel} takes {self._params_bytes} bytes of params, got {len(params)}")
        if shared_bytes is None:
            shared_bytes = self.compiled.shared_bytes
        if stream is None:
            stream = torch._C._cuda_getCurrentRawStream(self.device_index)
        clustered = cluster if cluster != NO_CLUSTER else None
        config = _launch_config(grid, block, shared_bytes, clustered, stream, programmatic)
        arguments = _PointerToBytes(params)
        if not hasattr(_thread, "has_context"):
            _bind_context(self.device_index)
        (status,) = self._launch(config, self._function, ctypes.addressof(arguments), 0)
        if status:
            raise RuntimeError(
                f"{self.compiled.kernel}: {_describe(status)}; grid {grid}, block {block}, {shared_bytes} bytes of "
                f"dynamic shared memory, cluster {cluster}"
            )

    def occupancy_clusters(self, block: Dim, shared_bytes: int | None, cluster: Dim) -> int:
        """Number of clusters that can run at one time on the device."""
        from cuda.bindings import driver

        if shared_bytes is None:
            shared_bytes = self.compiled.shared_bytes
        config = _launch_config(cluster, block, shared_bytes, cluster, 0, False)
        with _current(self.device_index):
            return _check(driver.cuOccupancyMaxActiveClusters(self._function, config))


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


@functools.cache
def num_sms(device_index: int) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def stream_id(device_index: int) -> int:
    """The id of the device's current stream; no other stream of the process gets it. 0 is the default stream."""
    from cuda.bindings import driver

    stream = torch._C._cuda_getCurrentRawStream(device_index)
    return int(_check(driver.cuStreamGetId(driver.CUstream(stream)))) if stream else 0


def capture_id(device_index: int) -> int:
    """The id of the capture that the device's current stream is part of; 0 for none."""
    with torch.cuda.device(device_index):
        if not torch.cuda.is_current_stream_capturing():
            return 0
        from cuda.bindings import driver

        stream = torch._C._cuda_getCurrentRawStream(device_index)
        return int(_check(driver.cuStreamGetCaptureInfo(driver.CUstream(stream)), 2))


def lasting_zeros(device_index: int, size: int) -> int:
    """The address of memory that nobody frees, zeros when this returns, also during a capture."""
    from cuda.bindings import driver

    with _current(device_index), relaxed_capture():
        address = int(_check(driver.cuMemAlloc(size)))
        stream = _check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        _check(driver.cuMemsetD8Async(address, 0, size, stream))
        _check(driver.cuStreamSynchronize(stream))
        _check(driver.cuStreamDestroy(stream))
    return address


_thread = threading.local()


def _bind_context(device_index: int) -> None:
    """A thread that has not called CUDA yet has no context, where torch has nothing to set: its device is current."""
    from cuda.bindings import driver

    if not int(_check(driver.cuCtxGetCurrent())):
        _check(driver.cuCtxSetCurrent(_primary_context(device_index)))
    _thread.has_context = True


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
def relaxed_capture() -> Iterator[None]:
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
