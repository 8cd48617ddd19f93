"""A folder of CUDA C++ sources for one target: its kernels, compiled and loaded once.

A source and the headers (`.cuh`) that it includes lie in one folder and use no header of the CUDA toolkit, whose
packages need not be there. Each kernel takes one struct by value:

    struct Params { const float* x; int n; };
    template <int N> __global__ void scale(const __grid_constant__ Params params) { ... }

    sources = Sources(Path(__file__).parent, Target("sm_90a", (12, 0)))
    function = sources.load("scale.cu", "scale<2>", device_index)
    function.launch((64, 1, 1), (128, 1, 1), 0, (1, 1, 1), struct.pack("@Pi4x", x.data_ptr(), n))
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ...dispatch import LoweringUnavailable
from . import compiler, driver, store
from .compiler import Compiled, Target, Unit
from .prebuilt import Archive, archive_of

Result = TypeVar("Result")


def _once(function: Callable[..., Result]) -> Any:
    """Works as `functools.cache`, and threads that need one result at the same time compute it once."""
    locks: dict[tuple[Any, ...], threading.Lock] = {}
    results: dict[tuple[Any, ...], Result] = {}

    @functools.cache
    def call(*key: Any) -> Result:
        with locks.setdefault(key, threading.Lock()):
            if key not in results:
                results[key] = function(*key)
            return results[key]

    return call


class Sources:
    """CUDA C++ of one folder, for one target.

    Args:
        folder (Path): where the sources are.
        target (Target): what they are compiled for.
    """

    def __init__(self, folder: Path, target: Target) -> None:
        self.folder = folder
        self.target = target
        self.prebuilt = Archive(archive_of(folder, target))
        self.compile = _once(self._compile)
        self.load = _once(self._load)

    def reason(self) -> str | None:
        """Why no kernel of this folder can run here, in words a user can act on; None if one can. Compiles nothing."""
        return driver.reason() or (None if self.prebuilt.manifest else compiler.reason(self.target))

    def read(self, source: str | Path, kernel: str, defines: tuple[str, ...] = ()) -> Unit:
        """Reads all that the code of a kernel comes from; arguments and errors as in `compile`."""
        return compiler.read_unit(self.folder / source, kernel, self.target, defines)

    def _compile(self, source: str | Path, kernel: str, defines: tuple[str, ...] = ()) -> Compiled:
        """Machine code of one kernel: what the wheel brought, else from the user's cache, else compiled.

        Args:
            source (str | Path): a file; a relative path starts at the folder.
            kernel (str): name expression of the kernel, e.g. "sparse_attention<64, FP8_DS_MLA>".
            defines (tuple[str, ...]): macros, "NAME" or "NAME=VALUE".

        Raises:
            LoweringUnavailable: there is no compiler here, with the reason.
            CompileError: the source does not compile; the compiler's log.
            FileNotFoundError: no such source, or a header that it includes is not beside it.
        """
        unit = self.read(source, kernel, defines)
        return self.prebuilt.find(unit) or self._compile_here(unit)

    def _compile_here(self, unit: Unit) -> Compiled:
        missing = compiler.reason(self.target)
        if missing is not None:
            raise LoweringUnavailable(f"{unit.kernel}: {missing}")
        return store.compile_once(unit)

    def _load(
        self, source: str | Path, kernel: str, device_index: int, defines: tuple[str, ...] = ()
    ) -> driver.Function:
        """The kernel on a device; arguments and errors as in `compile`.

        Raises:
            LoweringUnavailable: the driver does not take the code.
        """
        compiled = self.compile(source, kernel, defines)
        try:
            return driver.Function(compiled, device_index)
        except RuntimeError as error:  # also of bindings that look for a function which the driver has not got
            refused = error
        unit = self.read(source, kernel, defines)
        if self.prebuilt.find(unit) is not None and compiler.reason(self.target) is None:
            try:  # An older compiler may be here than that of the wheel's code.
                return driver.Function(self._compile_here(unit), device_index)
            except RuntimeError as error:
                refused = error
        raise LoweringUnavailable(
            f"{kernel}: {refused}. A driver as new as NVRTC takes the code: update the driver, or install the NVRTC of "
            "its CUDA version"
        ) from refused
