"""NVRTC: CUDA C++ to machine code, and what the code takes. Needs no GPU.

python -m mla_ops.kernels.cuda.compiler sm_90a scale.cu "scale<2>" --sass
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
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...dispatch import LoweringUnavailable, Missing

# NVRTC's options for every kernel, beside its target. tests/sanitize.py adds -lineinfo: code four times as large.
OPTIONS = ("-std=c++17", "--extra-device-vectorization", "--device-as-default-execution-space")
RESERVED_SHARED_BYTES = 1024  # the system's share of each block, which resource reports count as static
# Numbers in an ELF file: types of sections, of symbols, and of a relocation (R_CUDA_64).
SYMBOLS, RELOCATIONS, OBJECT, FUNCTION, ADDRESS = 2, 4, 1, 2, 2
PARAMS_OFFSET = 528  # bytes before a kernel's parameters in constant bank 0


INSTALL_BINDINGS = "pip install cuda-bindings"


class Target(NamedTuple):
    """The architecture that code is compiled for.

    Attributes:
        architecture: NVRTC's name, e.g. "sm_90a".
        first_version: the first version of NVRTC that knows it.
    """

    architecture: str
    first_version: tuple[int, int]


class CompileError(LoweringUnavailable):
    """CUDA C++ that does not compile; the message is the compiler's."""


class Unit(NamedTuple):
    """All that the machine code of one kernel comes from, the compiler aside.

    Attributes:
        name: of the source file.
        files: text of it and of all that it includes, by name. Compiling from memory uses exactly what is hashed.
        kernel: name expression.
        options: of the compiler.
    """

    name: str
    files: dict[str, str]
    kernel: str
    options: tuple[str, ...]

    def digest(self, *more: object) -> str:
        """Equal for units, and more, that are equal."""
        return hashlib.sha256(json.dumps([*self, *more]).encode()).hexdigest()


@dataclass(frozen=True)
class Resources:
    """Resources that the compiled code of one kernel takes.

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
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, where the kernel has `static __constant__ int shared_bytes`; else 0."""
        return next((value for name, value in _constants(self.cubin) if name.endswith("12shared_bytes")), 0)

    @functools.cached_property
    def loadable(self) -> bytes:
        """The machine code, in which `code_bytes` and `code_begin` are the kernel's, if it has these (`code.cuh`)."""
        elf, cubin = _Elf(self.cubin), bytearray(self.cubin)
        size, begin, kernel = (elf.symbols.get(name) for name in ("code_bytes", "code_begin", self.symbol))
        if size is None or begin is None or kernel is None:
            return self.cubin
        for _, kind, _, _, offset, length, _, target in elf.sections:
            if kind != RELOCATIONS or target != begin.section:
                continue
            for at in range(offset, offset + length, 24):
                if struct.unpack_from("<Q", cubin, at)[0] == begin.place:
                    struct.pack_into("<II", cubin, at + 8, ADDRESS, kernel.number)
                    struct.pack_into("<Q", cubin, elf.at(size), kernel.size)
        return bytes(cubin)

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


class _Symbol(NamedTuple):
    """An entry of a cubin's table of symbols: its number there, section, place in that and bytes."""

    number: int
    section: int
    place: int
    size: int


class _Elf:
    """A cubin's header: `sections`, and `symbols`, functions and objects, by mangled name."""

    def __init__(self, cubin: bytes) -> None:
        (first,) = struct.unpack_from("<Q", cubin, 0x28)
        size, count = struct.unpack_from("<HH", cubin, 0x3A)
        # a section's fields: name, type, flags, address, offset, bytes, index of its strings, of what it relocates
        self.sections = [struct.unpack_from("<IIQQQQII", cubin, first + i * size) for i in range(count)]
        self.symbols: dict[str, _Symbol] = {}
        for _, kind, _, _, offset, length, link, _ in self.sections:
            if kind != SYMBOLS:
                continue
            names, table = self.sections[link][4], cubin[offset : offset + length]
            for number, entry in enumerate(struct.iter_unpack("<IBBHQQ", table)):
                name, info, _, section, place, symbol_bytes = entry
                if info & 15 in (OBJECT, FUNCTION) and 0 < section < count:
                    text = cubin[names + name : cubin.index(b"\0", names + name)].decode()
                    self.symbols[text] = _Symbol(number, section, place, symbol_bytes)

    def at(self, symbol: _Symbol) -> int:
        """The offset in the file."""
        return int(self.sections[symbol.section][4]) + symbol.place


def _constants(cubin: bytes) -> Iterator[tuple[str, int]]:
    """Mangled name and value of each int that is initialised in an ELF file."""
    elf = _Elf(cubin)
    for name, symbol in elf.symbols.items():
        if symbol.size == 4:
            yield name, struct.unpack_from("<i", cubin, elf.at(symbol))[0]


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
def reason(target: Target) -> Missing | None:
    """Why CUDA C++ cannot be compiled here, in words a user can act on; None if it can. Never raises."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        return Missing(f"the package cuda.bindings cannot be imported ({error}): {INSTALL_BINDINGS}")
    try:
        status, major, minor = _version(nvrtc)
    except Exception as error:  # noqa: BLE001 (each release of cuda.bindings raises another class for a missing library)
        return Missing(
            f"cuda.bindings cannot load the NVRTC library ({_first_line(error)}): pip install nvidia-cuda-nvrtc"
        )
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return Missing(f"the NVRTC library does not work: {status.name}")
    if (major, minor) < target.first_version:
        first = ".".join(map(str, target.first_version))
        return Missing(f"NVRTC {major}.{minor} does not know {target.architecture}: version {first} or later does")
    return None


def version() -> tuple[int, int]:
    """The version of NVRTC; `reason` must have nothing against it."""
    from cuda.bindings import nvrtc

    return nvrtc.nvrtcVersion()[1:]


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


def read_unit(path: Path, kernel: str, target: Target, defines: tuple[str, ...] = ()) -> Unit:
    """A source and its headers, as they are now.

    Raises:
        FileNotFoundError: no such source, or a header that it includes is not beside it.
    """
    options = (f"-arch={target.architecture}", *OPTIONS, *(f"-D{define}" for define in defines))
    return Unit(path.name, _read_with_headers(path), kernel, options)


def _read_with_headers(path: Path) -> dict[str, str]:
    """Text of a source and of all that it includes, by name."""
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


def compile(unit: Unit) -> Compiled:  # noqa: A001 (as re.compile)
    """Machine code of one kernel.

    Raises:
        CompileError: the source does not compile; the compiler's log.
    """
    from cuda.bindings import nvrtc

    name, files, kernel, options = unit

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


def main() -> int:
    """Prints what a kernel takes, and with --sass its machine code."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=main.__doc__)
    parser.add_argument("architecture", help="e.g. sm_90a")
    parser.add_argument("file", type=Path, help="source")
    parser.add_argument("kernel", help='name expression, e.g. "scale<2>"')
    parser.add_argument("-D", dest="defines", action="append", default=[], metavar="NAME[=VALUE]", help="macro")
    parser.add_argument("--sass", action="store_true", help="print the machine code")
    arguments = parser.parse_args()
    target = Target(arguments.architecture, (0, 0))
    missing = reason(target)
    if missing is not None:
        parser.exit(1, f"{missing}\n")
    try:
        compiled = compile(read_unit(arguments.file, arguments.kernel, target, tuple(arguments.defines)))
    except (CompileError, FileNotFoundError) as error:
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
