"""Which keys the CTAs of a Hopper launch gather: each of a row's once, from where it lies, and nothing out of range.

The host's grid and parameters and the kernels' own arithmetic (`hopper_rows.cpp`), compiled for this CPU.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_ops import formats
from mla_ops.kernels.hopper import launch, nvrtc
from mla_ops.kernels.hopper.launch import KERNELS, KEYS, NO_CACHE, CacheParams, Rows, Shape, cache_params

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")

INLINE_PTX = re.compile(r'\basm(?: volatile)?\((?:[^;"]|"(?:[^"\\]|\\.)*")*\);')
CLUSTER_RANK = re.compile(r"(DEVICE u32 cluster_rank\(\) )\{.*?\n\}", re.DOTALL)
AT_ONCE = 5  # clusters of the device: CTAs that take one row after the other take several


class Found(ctypes.Structure):
    """One key of a CTA."""

    _fields_ = (*((name, ctypes.c_int) for name in ("token", "tile", "part", "turn", "live")), ("row", ctypes.c_void_p))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("hopper_rows")
    for path in (*nvrtc.FOLDER.glob("*.cuh"), Path(__file__).with_name("hopper_rows.cpp")):
        shutil.copy(path, folder)
    ptx = folder / "ptx.cuh"
    text, ranks = CLUSTER_RANK.subn(r"\1{ return rank_of_cta; }", INLINE_PTX.sub(";", ptx.read_text()))
    assert ranks == 1
    ptx.write_text(text)
    made = folder / "hopper_rows.so"
    command = [COMPILER, "-std=c++17", "-w", "-shared", "-fPIC", str(folder / "hopper_rows.cpp"), "-o", str(made)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return ctypes.CDLL(str(made))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []

    class Recorded:
        def launch(self, grid: Any, block: Any, shared_bytes: int, cluster: Any, params: bytes, **_: Any) -> None:
            seen.append((grid, cluster, params))

    monkeypatch.setattr(nvrtc, "load", lambda *_: Recorded())
    monkeypatch.setattr(launch, "clusters_at_once", lambda *_: (AT_ONCE,) * len(launch.SPLITS))
    return seen


def keys_of_launch(library: ctypes.CDLL, launched: Any, walks: bool, row_bytes: int, room: int) -> list[list[Found]]:
    """What each CTA gathers."""
    grid, (splits, _, _), params = launched
    found = (Found * room)()
    every = []
    for z, y, x in itertools.product(*map(range, reversed(grid))):
        dims = (ctypes.c_int * 3)(x, y, z), (ctypes.c_int * 3)(*grid)
        count = library.keys_of(params, *dims, x % splits, int(walks), row_bytes, found)
        assert count <= room
        every.append([Found.from_buffer_copy(found[i]) for i in range(count)])
    return every


def reachable(
    cache: Rows, row_bytes: int, indices: torch.Tensor, length: int, table: torch.Tensor | None, request: int
) -> Counter[int]:
    """Addresses of the keys that a row attends to, of which invalid indices are none."""
    addresses: Counter[int] = Counter()
    for index in indices[: max(length, 0)].tolist():
        block, offset = divmod(index, cache.block_size)
        if index < 0:
            continue
        if table is not None:
            if not (0 <= request < table.shape[0] and block < table.shape[1]):
                continue
            block = int(table[request, block])
        if 0 <= block < cache.num_blocks:
            addresses[cache.tensor.data_ptr() + block * cache.block_stride + offset * row_bytes] += 1
    return addresses


@pytest.mark.parametrize("max_grid_rows", [2, launch.MAX_GRID_ROWS])
@pytest.mark.parametrize(
    "shape", [*(Shape(16, n) for n in launch.SPLITS), Shape(64, 1), Shape(64, 6), Shape(16, 3, 4), Shape(16, 16, 3)]
)
@pytest.mark.parametrize("kind", ["slots", "tables", "two caches"])
@pytest.mark.parametrize(("cache_format", "width"), KERNELS)
def test_each_key_is_gathered_once(
    cache_format: str,
    width: int,
    kind: str,
    shape: Shape,
    max_grid_rows: int,
    library: ctypes.CDLL,
    launches: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of every length, invalid indices and holes in the tables among them; tiles that heads do not fill."""
    monkeypatch.setattr(launch, "MAX_GRID_ROWS", max_grid_rows)
    keys, generator = KERNELS[cache_format, width], torch.Generator().manual_seed(1)
    lengths = torch.tensor([700, 0, -3, 1, 63, 64, 65, 300, 2**31 - 1], dtype=torch.int32)
    num_tokens, num_heads = len(lengths), shape.tile + 3
    requests = torch.tensor([0, 1, 2, 0, -1, 2, 1, 7, 0], dtype=torch.int32)
    caches: list[tuple[Rows, torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
    for block_size, columns in ((7, 700), (64, 130))[: 2 if kind == "two caches" else 1]:
        tensor = formats.allocate_cache(cache_format, 30, block_size, head_dim=width)
        rows = Rows(tensor, *formats.geometry(tensor, cache_format)[:3])
        indices = torch.randint(-9, 36 * block_size, (num_tokens, columns + 5), dtype=torch.int32, generator=generator)
        table = torch.randint(-2, 33, (3, 34), dtype=torch.int32, generator=generator) if kind != "slots" else None
        caches.append((rows, indices[:, :columns], lengths.roll(len(caches)), table))
    params: list[CacheParams] = [cache_params(*arguments) for arguments in caches]
    zeros = torch.zeros(keys.row_bytes // 4)
    launch.launch(
        keys,
        shape,
        num_tokens,
        torch.zeros(num_tokens, num_heads, width, dtype=torch.bfloat16),
        (params[0], params[1] if len(params) > 1 else NO_CACHE),
        1.0,
        attn_sink=None,
        req_id_per_token=requests if kind != "slots" else None,
        out=torch.zeros(num_tokens, num_heads, formats.LATENT_DIM),
        lse=torch.zeros(num_tokens, num_heads),
        zeros=zeros,
        programmatic=False,
    )
    assert library.bytes_of_params() == struct.calcsize(launch.PARAMS)
    walks = keys.kernel(shape.tile, shape.splits).walks
    ctas = keys_of_launch(library, launches[0], walks, keys.row_bytes, room=num_tokens * 2 * 1024)

    gathered: dict[tuple[int, int], Counter[int]] = {}
    for cta in ctas:
        for key in cta:
            found = gathered.setdefault((key.token, key.tile), Counter())
            if key.live:
                found[key.row] += 1
            else:
                assert key.row == zeros.data_ptr()
    for token, tile in itertools.product(range(num_tokens), range(2)):
        expected: Counter[int] = Counter()
        for rows, indices, lens, table in caches:
            expected += reachable(rows, keys.row_bytes, indices[token], int(lens[token]), table, int(requests[token]))
        assert gathered.get((token, tile), Counter()) == expected

    most = sum(-(-indices.shape[1] // KEYS) for _, indices, _, _ in caches)
    if not walks:
        assert max(len(cta) for cta in ctas) == -(-most // (shape.splits * shape.parts)) * KEYS
