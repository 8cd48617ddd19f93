"""Makes the environment that the Makefile's targets run in: python3 scripts/setup_env.py --venv .venv --extras dev.

The torch that the running Python already has is used if it is new enough: the environment then sees this Python's
packages. Otherwise torch is installed, except that a CUDA build (several gigabytes) is refused on a machine without
an NVIDIA GPU. Only the standard library is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

MINIMUM_TORCH = (2, 11)
MINIMUM_PYTHON = (3, 10)
ROOT = Path(__file__).resolve().parent.parent

# Packages that each build of torch requires in versions of its own.
OF_TORCH = ("triton", "setuptools", "cuda-bindings", "cuda-pathfinder", "nvidia-cuda-nvrtc")

# Prints the versions, as pip knows them, of torch and of the packages named in its arguments, "-" where there is none.
# (torch.__version__ may name a build, "2.11.0+cu130", that the package's own version does not.)
PROBE = """
import importlib.metadata, sys

def version(package, otherwise="-"):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return otherwise

try:
    import torch
    found = version("torch", torch.__version__)
except ImportError:
    found = "-"
print(found, *map(version, sys.argv[1:]))
"""

CUDA_REFUSED = """\
This machine has no NVIDIA GPU, and pip would install {name}, a CUDA build that brings gigabytes of GPU libraries
({packages}, ...). Do one of these, then run the same command again:
  - install a CPU build of torch into {python} (the selector on PyTorch's web site gives the command);
  - point pip at an index or a directory that holds CPU builds: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS;
  - set MLA_OPS_ALLOW_CUDA_TORCH=1 to install the CUDA build all the same."""


def version_tuple(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"; (0, 0) where there is no version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def probe(python: str | Path) -> dict[str, str]:
    """Versions of torch and of `OF_TORCH` that `python` can import, "-" where there is none."""
    names = ("torch", *OF_TORCH)
    command = [str(python), "-c", PROBE, *OF_TORCH]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    versions = result.stdout.split()[-len(names) :] if result.returncode == 0 else []
    return dict(zip(names, versions, strict=True)) if len(versions) == len(names) else dict.fromkeys(names, "-")


def make_venv(directory: Path, inherit: bool) -> Path:
    """Creates the environment, or brings an old one up to date; returns its interpreter."""
    try:
        venv.create(directory, system_site_packages=inherit, with_pip=True)
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"{sys.executable} cannot make a virtual environment ({error}); on Debian and Ubuntu it needs the "
            f"package python{sys.version_info.major}.{sys.version_info.minor}-venv"
        ) from error
    python = directory / "bin" / "python"
    purelib = directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    parent = purelib / "parent_environment.pth"
    parent.unlink(missing_ok=True)
    if inherit and sys.prefix != sys.base_prefix:
        # a virtual environment made from another one inherits the base interpreter's packages, not the other's
        paths = dict.fromkeys(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib"))
        parent.write_text("\n".join(paths) + "\n")
    return python


def pip(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), "-m", "pip", "--disable-pip-version-check", *arguments], check=True, cwd=ROOT)


def cuda_requirements(python: Path, constraints: Path) -> tuple[str, list[str]]:
    """The torch that pip would install, and the GPU packages that it would bring. Downloads no dependency."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--dry-run", "--no-deps"]
    command += ["--ignore-installed", "--report", "-", "--constraint", str(constraints), "torch"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if result.returncode != 0:
        raise SystemExit(f"pip finds no torch to install:\n{result.stderr}")
    metadata = json.loads(result.stdout)["install"][0]["metadata"]
    required = [re.split(r"[\s;<>=!~\[(]", entry, maxsplit=1)[0] for entry in metadata.get("requires_dist", [])]
    packages = sorted({name for name in required if name.startswith(("nvidia-", "cuda-"))})
    return f"torch {metadata['version']}", packages


def write_constraints(path: Path, pins: dict[str, str | None]) -> None:
    """Copies constraints.txt with other pins for some packages, or (None) without a pin."""
    lines = []
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name = re.split(r"[=<>;\s]", line, maxsplit=1)[0].lower()
        if name not in pins:
            lines.append(line)
    lines += [f"{name}=={version}" for name, version in pins.items() if version is not None]
    path.write_text("\n".join(lines) + "\n")


def main() -> int:
    """Sets the environment up; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="directory of the environment")
    parser.add_argument("--extras", default="", help="extras of the package to install, e.g. models,test")
    arguments = parser.parse_args()
    if sys.version_info[:2] < MINIMUM_PYTHON:
        raise SystemExit(f"mla_ops needs Python 3.10 or later, this is {sys.version.split()[0]}: set PYTHON=python3.x")

    installed = probe(sys.executable)
    inherit = version_tuple(installed["torch"]) >= MINIMUM_TORCH
    directory = arguments.venv if arguments.venv.is_absolute() else ROOT / arguments.venv
    print(f"setting up {directory} with {sys.executable}", flush=True)
    python = make_venv(directory, inherit)
    pip(python, "install", "-qq", "pip>=22.2")  # the first that reports what it would do

    constraints = directory / "constraints.txt"
    if inherit:
        print(f"using the installed torch {installed['torch']}", flush=True)
        write_constraints(constraints, {name: version for name, version in installed.items() if version != "-"})
    elif sys.platform == "linux" and has_nvidia_gpu():
        # pip finds out which CUDA build fits the driver, and which Triton that build wants
        write_constraints(constraints, dict.fromkeys(("torch", *OF_TORCH)))
    else:
        write_constraints(constraints, {})
        if sys.platform == "linux" and os.environ.get("MLA_OPS_ALLOW_CUDA_TORCH") != "1":
            name, packages = cuda_requirements(python, constraints)
            if packages:
                print(
                    CUDA_REFUSED.format(name=name, packages=", ".join(packages[:3]), python=sys.executable),
                    file=sys.stderr,
                )
                return 1

    extras = f"[{arguments.extras}]" if arguments.extras else ""
    pip(python, "install", "-qq", "--constraint", str(constraints), "--editable", f".{extras}")
    print("environment ready: torch {torch}, triton {triton}".format(**probe(python)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
