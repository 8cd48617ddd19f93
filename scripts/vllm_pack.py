"""Packs vLLM for a Hopper machine without a network: what `scripts.vllm_decode` imports there, in one archive.

    python -m scripts.vllm_pack 0.24.0 vllm.tar.xz
    mkdir FOLDER && tar xJf vllm.tar.xz -C FOLDER && PYTHONPATH=.:FOLDER python -m scripts.vllm_decode ...  # there

The archive expects Python 3.12, torch with CUDA, and the packages in `PRESENT` there. Machine code for other GPUs is
overwritten by zeros, so that the archive has 47 MB; a kernel of it fails at its launch. A library that another one
needs, and that neither the archive nor that machine has, is an error.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("vllm_requirements.txt")
PRESENT = {"certifi", "charset-normalizer", "filelock", "fsspec", "hf-xet", "huggingface_hub", "idna", "jinja2"}
PRESENT |= {"markupsafe", "mpmath", "networkx", "numpy", "packaging", "pillow", "psutil", "pyyaml", "regex", "requests"}
PRESENT |= {"safetensors", "sentencepiece", "sympy", "tiktoken", "tokenizers", "tqdm", "transformers", "urllib3"}
# packages of vLLM's servers, and of guided output that nobody asks for
UNUSED = {"anthropic", "astor", "depyf", "ijson", "mcp", "mistral_common", "outlines_core", "pytest", "watchfiles"}
LIBRARIES = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_flashmla_C.abi3.so",
    "vllm/_flashmla_extension_C.abi3.so",
    "vllm/cumem_allocator.abi3.so",
    "vllm/spinloop.abi3.so",
    "vllm/third_party/deep_gemm/_C.cpython-312-x86_64-linux-gnu.so",
)
NOT_PACKED = ("vllm/third_party/fmha_sm100/", "vllm/third_party/deep_gemm/include/cutlass/experimental/")
SYSTEM = (
    r"ld-linux|lib(c|m|dl|rt|util|pthread|gcc_s|stdc\+\+|torch\w*|c10\w*|cuda|cudart|cublas|cublasLt|nvrtc)\.|libtorch"
)
PLATFORMS = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
PLATFORMS += [f"--platform=manylinux{year}_x86_64" for year in (2014, 2010, 1)]
PYTHON = ("--python-version=3.12", "--implementation=cp")
FATBIN = 0xBA55ED50
HOPPER = 90


def download(folder: Path, *what: str) -> list[Path]:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    subprocess.run([*command, *what], check=True)
    return sorted(folder.glob("*.whl"))


def fatbin(library: bytes) -> tuple[int, int]:
    """Offset and size of the section `.nv_fatbin`, 0 and 0 if there is none."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", library, table + number * size) for number in range(count)]
    for name, _, _, _, offset, length in sections:
        start = sections[names][4] + name
        if library[start : library.index(b"\0", start)] == b".nv_fatbin":
            return offset, length
    return 0, 0


def without_other_gpus(library: bytes) -> bytes:
    """The library with zeros in the place of machine code that is not Hopper's."""
    pruned = bytearray(library)
    position, length = fatbin(library)
    end = position + length
    while position < end - 16:
        magic, _, header, size = struct.unpack_from("<IHHQ", pruned, position)
        if magic != FATBIN:
            position += 8
            continue
        entry, position = position + header, position + header + size
        while entry < position:
            own, payload = struct.unpack_from("<IQ", pruned, entry + 4)
            (architecture,) = struct.unpack_from("<I", pruned, entry + 28)
            if architecture != HOPPER:
                pruned[entry + own : entry + own + payload] = bytes(payload)
            entry += own + payload
    return bytes(pruned)


def unpack_vllm(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith((".so", ".pyi"))]
        archive.extractall(folder, [name for name in names if not name.startswith(NOT_PACKED)])
        for name in LIBRARIES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(without_other_gpus(archive.read(name)))
    (folder / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.py").touch()  # imported on a GPU, and not called


def missing_libraries(folder: Path) -> list[str]:
    """Lines of libraries that need one which is neither in the folder nor the system's, torch's or CUDA's."""
    libraries = [path for path in folder.rglob("*.so*") if path.is_file()]
    present = {path.name for path in libraries}
    missing = []
    for path in libraries:
        said = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
        needed = [name for name in re.findall(r"\(NEEDED\).*\[(.*)\]", said) if not re.match(SYSTEM, name)]
        missing += [f"{path.relative_to(folder)} needs {name}" for name in needed if name not in present]
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("archive", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, wheels = Path(temporary, "packed"), Path(temporary, "wheels")
        (wheel,) = download(Path(temporary), *PYTHON, "--abi=abi3", *PLATFORMS, f"vllm=={arguments.version}")
        unpack_vllm(wheel, folder)
        wheel.unlink()
        needed = [
            line for line in REQUIREMENTS.read_text().split() if line.split("==")[0].lower() not in PRESENT | UNUSED
        ]
        for package in download(wheels, *PYTHON, *PLATFORMS, *needed):
            with zipfile.ZipFile(package) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if not name.endswith(".pyi")])
        for path in folder.rglob("*.so"):
            if "vllm" not in path.parts:
                subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)
        if missing := missing_libraries(folder):
            sys.exit("\n".join(missing))
        with tarfile.open(arguments.archive, "w:xz") as packed:
            for path in sorted(folder.iterdir()):
                packed.add(path, path.name)
    print(f"{arguments.archive}: {arguments.archive.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
