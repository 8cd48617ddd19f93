"""Builds a wheel with the machine code of every CUDA C++ kernel, and checks it: `make wheel`.

Compiling takes a minute on two cores. The code lies beside its sources then (`mla_ops/kernels/hopper/sm_90a.zip`, which
git ignores), where an editable install finds it too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mla_ops.kernels.cuda import prebuilt  # noqa: E402 (after the path)
from mla_ops.kernels.hopper import sources  # noqa: E402
from mla_ops.kernels.hopper.catalog import every_kernel  # noqa: E402

# Run where NVRTC cannot be imported: each kernel's code is there and is that of the sources in the wheel.
CHECK = """
import sys
sys.modules["cuda.bindings.nvrtc"] = None
from pathlib import Path
import mla_ops
from mla_ops.kernels.cuda import compiler
from mla_ops.kernels.hopper import sources
from mla_ops.kernels.hopper.catalog import every_kernel

assert Path(mla_ops.__file__).is_relative_to(sys.argv[1]), mla_ops.__file__
assert compiler.reason(sources.SM90A) is not None
assert sources.reason() is None, sources.reason()
kernels = [kernel for kernel in every_kernel() if len(sys.argv) == 2 or kernel.name in sys.argv[2:]]
for kernel in kernels:
    compiled = sources.compile(kernel.source, kernel.name)
    assert compiled.cubin.startswith(b"\\x7fELF") and compiled.symbol.encode() in compiled.cubin, kernel.name
assert len(sources.SOURCES.prebuilt.manifest) == len(kernels)
print(f"{len(kernels)} kernels of {mla_ops.__file__}")
"""


def build_code(names: list[str], path: Path) -> None:
    """Writes the archive of the kernels named, of all if there are none."""
    kernels = [kernel for kernel in every_kernel() if not names or kernel.name in names]
    units = [sources.SOURCES.read(kernel.source, kernel.name) for kernel in kernels]
    prebuilt.build(units, path, threads=os.cpu_count() or 1)


def build_wheel(folder: Path) -> Path:
    """The wheel of the tree as it is, machine code included."""
    with tempfile.TemporaryDirectory() as own:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", own]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
        (wheel,) = Path(own).iterdir()
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, folder / wheel.name))


def check_wheel(wheel: Path, names: list[str]) -> str:
    """The report of a fresh process without NVRTC on the wheel, unpacked in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        command = [sys.executable, "-c", CHECK, folder, *names]
        environment = {**os.environ, "PYTHONPATH": folder}
        return subprocess.run(
            command, check=True, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
        ).stdout.strip()


def main() -> int:
    """Compiles, packs and checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "dist", help="of the wheel")
    parser.add_argument("--kernel", action="append", default=[], help="a name; all kernels if none is given")
    arguments = parser.parse_args()
    archive = prebuilt.archive_of(sources.SOURCES.folder, sources.SM90A)
    build_code(arguments.kernel, archive)
    wheel = build_wheel(arguments.folder)
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, {check_wheel(wheel, arguments.kernel)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
