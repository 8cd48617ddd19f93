"""Machine code that a wheel brings: one archive beside the sources, `<architecture>.zip`.

Each kernel's entry is named by a hash of all that its code comes from, so an archive that is not of the sources beside
it has nothing for them. `make wheel` writes it.
"""

from __future__ import annotations

import json
import threading
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import compiler, store
from .compiler import Compiled, Target, Unit

MANIFEST = "manifest.json"  # digest of a unit -> its kernel and the symbol of its code


def archive_of(folder: Path, target: Target) -> Path:
    """The archive of a folder of sources, whether it is there or not."""
    return folder / f"{target.architecture}.zip"


class Archive:
    """The kernels of an archive; none if it is not there.

    Args:
        path (Path): where it would be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._zip: zipfile.ZipFile | None = None
        self.manifest: dict[str, dict[str, str]] = {}
        if path.is_file():
            self._zip = zipfile.ZipFile(path)
            self.manifest = json.loads(self._zip.read(MANIFEST))

    def find(self, unit: Unit) -> Compiled | None:
        """The code of a unit, None if the archive has not got it."""
        digest = unit.digest() if self.manifest else ""
        entry = self.manifest.get(digest)
        if entry is None or self._zip is None:
            return None
        with self._lock:
            return Compiled(unit.kernel, entry["symbol"], "", self._zip.read(digest))


def build(units: Iterable[Unit], path: Path, threads: int = 1) -> None:
    """Writes the archive of units, the same bytes for the same code; compiles what the user's cache has not got.

    Raises:
        CompileError: a source does not compile, or with warnings.
    """
    units = sorted(units, key=lambda unit: (unit.name, unit.kernel))
    with ThreadPoolExecutor(threads) as pool:
        every = list(pool.map(store.compile_once, units))
    for unit, compiled in zip(units, every, strict=True):
        if compiled.log:
            raise compiler.CompileError(f"{unit.name}: {unit.kernel}: {compiled.log}")
    digests = [unit.digest() for unit in units]
    manifest = {
        digest: {"source": unit.name, "kernel": unit.kernel, "symbol": compiled.symbol}
        for digest, unit, compiled in zip(digests, units, every, strict=True)
    }
    contents = [(MANIFEST, json.dumps(manifest, indent=1).encode())]
    contents += [(digest, compiled.cubin) for digest, compiled in zip(digests, every, strict=True)]
    unfinished = path.with_suffix(".part")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in contents:
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, 9)
    unfinished.replace(path)
