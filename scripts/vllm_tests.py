"""Runs the tests of the vLLM backends against a version of vLLM, without a GPU and without vLLM's compiled part.

    python -m scripts.vllm_tests 0.24.0 FOLDER [pytest argument ...]

With `--own SOURCES`, an unpacked source distribution of that version, it runs vLLM's own test of sparse decode, with
our class in the place of FlashMLA's. With `--engine` it runs `LLM()` over a small model beside transformers.

FOLDER gets the Python side of that version's wheel and an environment with what it imports, over the packages of the
interpreter that runs this. Both are kept, and found again by the next run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "scripts" / "vllm_requirements.txt"
TESTS = (
    "test_vllm.py",
    "test_vllm_calls.py",
    "test_vllm_indexer.py",
    "test_vllm_v4.py",
    "test_flash_mla_interface.py::test_an_installed_release_has_nothing_that_is_not_here",
)
OWN_TEST = "tests/v1/attention/test_sparse_mla_backends.py"
WHEEL = ("--python-version", "3.12", "--implementation", "cp", "--abi", "abi3", "--platform", "manylinux_2_28_x86_64")


def unpack(version: str, folder: Path) -> None:
    """The wheel without its libraries; the import of one of them is answered by an empty module."""
    with tempfile.TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", *WHEEL]
        subprocess.run([*command, "--dest", downloads, f"vllm=={version}"], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if not name.endswith(".so")])
    (folder / "vllm" / "_C_stable_libtorch.py").touch()


def environment(folder: Path) -> Path:
    """An interpreter that imports what vLLM needs, and everything else from the running one's packages."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=False)
        (packages,) = (folder / "lib").glob("python*/site-packages")
        (packages / "zz_outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--ignore-installed", "-q"]
    done = folder / "installed"
    if not done.exists():
        subprocess.run([*pip, "-r", str(REQUIREMENTS)], check=True)
        done.touch()
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--own", type=Path)
    parser.add_argument("--engine", action="store_true")
    arguments, rest = parser.parse_known_args()
    source = arguments.folder.resolve() / f"vllm-{arguments.version}"
    if not (source / "vllm" / "_C_stable_libtorch.py").exists():
        unpack(arguments.version, source)
    python = environment(arguments.folder.resolve() / "venv")
    paths, command = [source, ROOT], [str(python), "-m", "pytest"]
    if arguments.engine:
        command = [str(python), "-m", "scripts.vllm_engine"]
    elif arguments.own is None:
        command += [*(str(ROOT / "tests" / name) for name in TESTS), *rest]
    else:
        own = arguments.own.resolve()
        paths.insert(1, own)  # its package `tests`, before ours
        if (own / "vllm").exists():
            sys.exit(f"{own / 'vllm'} would be imported as vLLM: unpack `tests` alone")
        command += ["--noconftest", "-p", "scripts.vllm_own_test", "-c", os.devnull, "--rootdir", str(own)]
        command += [str(own / OWN_TEST), "-k", "decode_correctness and FlashMLA and not nope", *rest]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "VLLM_LOGGING_LEVEL": "ERROR"}
    folder = ROOT if arguments.own is None else arguments.own
    sys.exit(subprocess.run(command, env=variables, cwd=folder, check=False).returncode)


if __name__ == "__main__":
    main()
