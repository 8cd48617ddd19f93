"""Lays out a repository for Hugging Face `kernels`: `make kernels-hub`.

    python -m scripts.kernels_hub [--out dist/kernels-hub] [--with-code]

One folder for each backend that `kernels` asks for, with the package as it is and what describes it: the sources are
Python, Triton and CUDA C++ that is compiled where it runs, so there is none for a version of torch or an architecture.
`--with-code` takes the machine code along that `make wheel` built. `kernels.get_local_kernel(Path(out))` loads it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

from mla_ops import __version__

ROOT = Path(__file__).resolve().parent.parent
NAME = "mla-ops"
BACKENDS = ("cuda", "cpu")
CODE = "sm_*.zip"


def digest(package: Path, patterns: tuple[str, ...]) -> str:
    """A hash of every file's path and bytes, so that two builds of one tree have one name."""
    total = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.is_file()):
        if "__pycache__" not in path.parts and not any(path.match(pattern) for pattern in patterns):
            total.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]


def metadata(backend: str, identity: str) -> dict[str, object]:
    """The file that `kernels` reads first. `id` is the module's name: one process may load two versions."""
    return {
        "id": f"mla_ops_{backend}_{identity}",
        "name": NAME,
        "version": int(__version__.split(".", 1)[0]) + 1,  # kernels counts from 1; torch.ops.mla is one a process
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }


def build(out: Path, *, with_code: bool = False) -> Path:
    """Writes the repository, in the place of an earlier one."""
    package = ROOT / "mla_ops"
    without = ("*.part",) if with_code else ("*.part", CODE)
    identity = digest(package, without)
    shutil.rmtree(out / "build", ignore_errors=True)
    for backend in BACKENDS:
        variant = out / "build" / f"torch-{backend}"
        shutil.copytree(package, variant / "mla_ops", ignore=shutil.ignore_patterns("__pycache__", *without))
        text = json.dumps(metadata(backend, identity), indent=2)
        (variant / "metadata.json").write_text(text + "\n")
    shutil.copy(ROOT / "README.md", out / "README.md")
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "kernels-hub")
    parser.add_argument("--with-code", action="store_true")
    arguments = parser.parse_args()
    print(build(arguments.out, with_code=arguments.with_code))


if __name__ == "__main__":
    main()
