"""Which keys the CTAs of a Hopper launch gather: each of a row's once, from where it lies, and nothing out of range.

The host's grid and parameters and the kernels' own code (`hopper_rows.cpp`), compiled for this CPU.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hopper_on_cpu import NO_COMPILER, Recorder, build

from mla_ops import formats
from mla_ops.kernels.hopper import groups, launch, parts, sources
from mla_ops.kernels.hopper.balance import always
from mla_ops.kernels.hopper.launch import KERNELS, TILE_KEYS, ByLength, Clusters, Group, KeyFormat, Packing, Shape
from mla_ops.kernels.hopper.params import NO_CACHE, Params, Rows, cache_params

pytestmark = pytest.mark.skipif(NO_COMPILER, reason="there is no C++ compiler")

AT_ONCE = 5  # clusters of the device: CTAs that take one row after the other take several
LENGTHS = [700, 0, -3, 1, 63, 64, 65, 300, 2**31 - 1]
REQUESTS = [0, 1, 2, 0, -1, 2, 1, 7, 0]
KINDS = ("slots", "tables", "two caches", "every position")
SHAPES = (
    *(Clusters(16, n) for n in (1, 2, 3, 7, 16)),
    Clusters(32, 1),
    Clusters(32, 3),
    Clusters(64, 1),
    Clusters(64, 6),
    Clusters(16, 3, 4),
    Clusters(16, 16, 3),
)
IN_SHARES = *(Clusters(16, n, shares=4) for n in (1, 2, 3, 4)), Clusters(64, 1, shares=3), Clusters(64, 2, shares=4)
BALANCED_SHAPES = Clusters(16, 1), Clusters(64, 1), Clusters(16, 3), Clusters(64, 2), Group(2)
GROUPS_OF_64 = tuple(Group(members) for members in (2, 7, 16))
DEAD_SCALES = b"\x77" * 8  # scales of a dead key of fp8_ds_mla_v4, in formats.cuh
ROWS, CLUSTERS, GROUPS, BALANCED, SHARES, _, HELD = range(7)  # enum Launch


# A key of a CTA: its token, tile, part and turn, and the address of its row
FOUND = struct.Struct("4iQ")
# 16 rows that a gathering warp has brought for a turn: token, tile, which are alive, and scales that lie apart
SLOT = struct.Struct(f"2iI{16 * 656}s{16 * 8}s")


class Selection(NamedTuple):
    """Keys that each token attends to in one cache."""

    rows: Rows
    indices: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor | None


class Launched(NamedTuple):
    """Arguments of a launch."""

    keys: KeyFormat
    shape: Shape
    evenly: bool
    by_length: bool
    packed: bool
    tiles: int
    selections: list[Selection]
    grid: tuple[int, int, int]
    params: bytes

    def turns(self) -> int:
        return sum(-(-selection.indices.shape[1] // TILE_KEYS) for selection in self.selections)

    def persistent(self) -> bool:
        return self.keys.kernel(self.shape).persistent

    def choose_ctas(self, library: ctypes.CDLL) -> Iterator[None]:
        """Each CTA in turn is the one that the library's functions tell of."""
        for z, y, x in itertools.product(*map(range, reversed(self.grid))):
            dims = (ctypes.c_int * 3)(x, y, z), (ctypes.c_int * 3)(*self.grid)
            if self.evenly:
                library.choose_cta(self.params, *dims, 0, BALANCED)
            elif isinstance(self.shape, Group):
                library.choose_cta(self.params, *dims, 0, GROUPS)
            elif self.shape.shares:
                library.choose_cta(self.params, *dims, x % self.shape.splits, SHARES if self.persistent() else HELD)
            else:
                kind = CLUSTERS if self.by_length or not self.persistent() else ROWS
                splits = launch.PACKED_CTAS if self.packed else self.shape.splits
                library.choose_cta(self.params, *dims, x % splits, kind)
            yield

    def expected(self, token: int) -> Counter[int]:
        """Addresses of the keys that a token attends to, of which invalid indices are none."""
        addresses: Counter[int] = Counter()
        for rows, indices, lengths, table in self.selections:
            for index in indices[token, : max(int(lengths[token]), 0)].tolist():
                block, offset = divmod(index, rows.block_size)
                if index < 0:
                    continue
                if table is not None:
                    if not (0 <= REQUESTS[token] < table.shape[0] and block < table.shape[1]):
                        continue
                    block = int(table[REQUESTS[token], block])
                if 0 <= block < rows.num_blocks:
                    start = rows.tensor.data_ptr() + block * rows.block_stride
                    addresses[start + offset * self.keys.row_bytes] += 1
        return addresses

    def every_key(self) -> dict[tuple[int, int, int], int]:
        """How often each token and tile of heads gathers which address, where each key is gathered once."""
        return {
            (token, tile, address): count
            for token in range(len(LENGTHS))
            for address, count in self.expected(token).items()
            for tile in range(self.tiles)
        }

    def scales_of(self, address: int) -> bytes:
        """Scales of a row, in formats that keep them apart."""
        for rows, *_ in self.selections:
            block, inside = divmod(address - rows.tensor.data_ptr(), rows.block_stride)
            if 0 <= block < rows.num_blocks:
                start = rows.tensor.data_ptr() + block * rows.block_stride + rows.block_size * self.keys.row_bytes
                return ctypes.string_at(start + inside // self.keys.row_bytes * self.keys.scale_bytes, 8)
        raise AssertionError(f"{address} is in no cache")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = build("hopper_rows.cpp", tmp_path_factory.mktemp("hopper_rows"), "-O2")
    loaded.slots_filled.restype = loaded.keys_found.restype = ctypes.c_void_p
    return loaded


@pytest.fixture(scope="module")
def by_length(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The same of kernels that give a row as many parts as its length asks for."""
    loaded = build("hopper_rows.cpp", tmp_path_factory.mktemp("hopper_rows_by_length"), "-O2", "-DBY_LENGTH=1")
    loaded.keys_found.restype = ctypes.c_void_p
    return loaded


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The same of kernels whose rows share clusters."""
    loaded = build("hopper_rows.cpp", tmp_path_factory.mktemp("hopper_rows_packed"), "-O2", "-DSHARES_CLUSTERS=1")
    loaded.keys_found.restype = ctypes.c_void_p
    return loaded


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rows of every length, invalid indices and holes in the tables among them; tiles that heads do not fill."""

    def make(
        cache_format: str,
        width: int,
        kind: str,
        shape: Shape,
        max_grid_rows: int,
        evenly: bool = False,
        of_lengths: ByLength | None = None,
        packing: Packing | None = None,
        lengths: Sequence[int] = LENGTHS,
    ) -> Launched:
        seen = Recorder()
        monkeypatch.setattr(sources, "load", lambda *_: seen)
        monkeypatch.setattr(launch, "clusters_at_once", lambda *_: (AT_ONCE,) * len(launch.SPLITS))
        monkeypatch.setattr(launch, "MAX_GRID_ROWS", max_grid_rows)
        monkeypatch.setattr(groups, "counters", lambda *_: 0)
        keys, generator = KERNELS[cache_format, width], torch.Generator().manual_seed(1)
        lens, requests = torch.tensor(lengths, dtype=torch.int32), torch.tensor(REQUESTS, dtype=torch.int32)
        num_tokens, num_heads = len(LENGTHS), shape.tile + 3
        selections = []
        every = kind == "every position"  # dense attention: 16 keys of a block are neighbours
        for block_size, columns in ((24 if every else 7, 700), (64, 130))[: 2 if kind == "two caches" else 1]:
            tensor = formats.allocate_cache(cache_format, 30, block_size, head_dim=width)
            if keys.quantized:
                tensor.random_(generator=generator)
            rows = Rows(tensor, *formats.geometry(tensor, cache_format)[:3])
            size = num_tokens, columns + 5
            indices = torch.randint(-9, 36 * block_size, size, dtype=torch.int32, generator=generator)[:, :columns]
            if every:
                indices = torch.arange(columns, dtype=torch.int32).expand(num_tokens, -1)
            if kind == "one slot":
                indices = torch.full((num_tokens, columns), 13, dtype=torch.int32)
            table = torch.randint(-2, 33, (3, 34), dtype=torch.int32, generator=generator) if kind != "slots" else None
            selections.append(Selection(rows, indices, lens.roll(len(selections)), table))
        caches = [
            cache_params(rows, None if every else indices, own_lens, table, indices.shape[1])
            for rows, indices, own_lens, table in selections
        ]
        balance = exchange = None
        own_tokens = num_tokens
        if evenly:
            balance = always(keys, [(num_tokens, shape)], num_heads, (AT_ONCE,) * len(launch.SPLITS))
            if balance.tile:
                shape, own_tokens = Clusters(balance.tile, 1), 0
            exchange = parts.exchange(balance.workers, shape.tile, num_heads, torch.device("cpu"))
        launch.launch(
            keys,
            shape,
            own_tokens,
            torch.zeros(num_tokens, num_heads, width, dtype=torch.bfloat16),
            (caches[0], caches[1] if len(caches) > 1 else NO_CACHE),
            1.0,
            attn_sink=None,
            req_id_per_token=requests if kind != "slots" else None,
            out=torch.zeros(num_tokens, num_heads, formats.LATENT_DIM),
            lse=torch.zeros(num_tokens, num_heads),
            programmatic=False,
            balance=balance,
            exchange=exchange,
            all_tokens=num_tokens,
            takes_either_way=evenly,
            by_length=of_lengths,
            packing=packing,
        )
        made.extend((requests, exchange))  # addresses of tensors are all that the parameters have
        grid, _, _, params = seen[0]
        tiles = -(-num_heads // shape.tile)
        by_length, packed = of_lengths is not None, packing is not None
        return Launched(keys, shape, evenly, by_length, packed, tiles, selections, grid, params)

    made: list[torch.Tensor | None] = []
    return make


@pytest.mark.parametrize(
    ("cache_format", "width", "shape", "evenly", "kind", "max_grid_rows"),
    [
        (*name, shape, evenly, kind, rows)
        for name, keys in KERNELS.items()
        # bfloat16 of both widths is found by the same code
        for kind, rows in (("slots", launch.MAX_GRID_ROWS), *((kind, 2) for kind in KINDS if name != ("bf16", 512)))
        for evenly, shapes in ((False, (*SHAPES, *IN_SHARES, *GROUPS_OF_64)), (True, BALANCED_SHAPES))
        for number, shape in enumerate(shapes)
        if keys.quantized or not (isinstance(shape, Group) or shape.shares)
        # in formats other than the first, each shape meets every other kind, and each kind every other shape
        if name == ("fp8_ds_mla", 576) or (KINDS.index(kind) + number) % 2
    ],
)
def test_each_key_is_gathered_once(
    cache_format: str,
    width: int,
    kind: str,
    shape: Shape,
    evenly: bool,
    max_grid_rows: int,
    library: ctypes.CDLL,
    launched: Any,
) -> None:
    call = launched(cache_format, width, kind, shape, max_grid_rows, evenly)
    assert library.bytes_of_params() == ctypes.sizeof(Params)
    gathered: Counter[tuple[int, int, int]] = Counter()
    for _ in call.choose_ctas(library):
        count = library.keys_of_cta(call.keys.row_bytes, shape.tile)
        assert count >= 0
        found = ctypes.string_at(library.keys_found(), count * FOUND.size)
        keys_of_cta = [(token, tile, row) for token, tile, _, _, row in FOUND.iter_unpack(found)]
        gathered.update(keys_of_cta)
        for (token, tile), keys in Counter(key[:2] for key in keys_of_cta).items():
            assert library.turns_of(token, tile) >= -(-keys // TILE_KEYS)
            if kind == "slots" and not evenly:  # else a hole of a table is found out later
                shares = -(-shape.shares // shape.splits) if isinstance(shape, Clusters) and shape.shares else 1
                assert library.turns_of(token, tile) < -(-keys // TILE_KEYS) + shares
    assert gathered == call.every_key()


@pytest.mark.parametrize(
    ("splits", "clusters", "margin", "lengths"),
    [
        (5, 3, 0.0, LENGTHS),
        (8, 5, 0.0, LENGTHS),  # more rows than places by shape go by their lengths
        (4, 3, 999.0, LENGTHS),  # by shape
        (4, 3, 0.0, [700] * 9),
        (5, 3, 0.0, [0] * 9),
        (2, 2, 0.0, [64 * 9, 64 * 15, 1, 1, 1, 64 * 4, 64 * 2, 64, 64]),  # a row has no 15 CTAs
        (16, 9, 0.0, [700, 1, 1, 1, 1, 1, 1, 1, 1]),
        (2, 1, 0.0, [700, 500, 1, 1, 1, 1, 300, 1, 64]),
    ],
)
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_ds_mla_v4"])
def test_rows_that_share_clusters(
    splits: int,
    clusters: int,
    margin: float,
    lengths: list[int],
    cache_format: str,
    packed: ctypes.CDLL,
    launched: Any,
) -> None:
    """Each key once, a row's CTAs are of one cluster, and none has more turns than by the launch's shape."""
    width, packing = 576 if cache_format == "fp8_ds_mla" else 512, Packing(clusters, 9.0, margin)
    call = launched(cache_format, width, "every position", Clusters(16, splits), 99, packing=packing, lengths=lengths)
    ctas: dict[tuple[int, int], set[int]] = {}
    turns: Counter[tuple[int, int]] = Counter()
    gathered: Counter[tuple[int, int, int]] = Counter()
    for cta, _ in enumerate(call.choose_ctas(packed)):
        count = packed.keys_of_cta(call.keys.row_bytes, 16)
        assert count >= 0
        found = list(FOUND.iter_unpack(ctypes.string_at(packed.keys_found(), count * FOUND.size)))
        gathered.update((token, tile, row) for token, tile, _, _, row in found)
        for token, tile, turn in {(token, tile, turn) for token, tile, _, turn, _ in found}:
            ctas.setdefault((token, tile), set()).add(cta)
            turns[cta, turn] += 1
        assert len({key[:2] for key in found}) <= 1
    assert gathered == call.every_key()
    for own in ctas.values():
        assert len({cta // launch.PACKED_CTAS for cta in own}) == 1
    longest = max(-(-min(max(length, 0), 700) // TILE_KEYS) for length in lengths)
    most = max(Counter(cta for cta, _ in turns).values(), default=0)
    assert most <= -(-longest // splits)
    if margin == 0.0 and lengths == LENGTHS:
        assert most < -(-longest // splits)


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [
        (Clusters(16, 2), ByLength(40, 1.0, -math.inf, 1)),
        (Clusters(64, 2), ByLength(9, 1.0, -math.inf, 1)),
        (Clusters(16, 3), ByLength(27, 1 / 3, 0.0, 1)),
        (Clusters(16, 5), ByLength(30, 1 / 5, 0.5, 1)),  # CTAs of some clusters only
        (Clusters(64, 2), ByLength(18, 1 / 2, 99.0, 1)),  # by shape
        (Clusters(64, 2), ByLength(27, 0.0, -math.inf, 2)),  # clusters
        (Clusters(16, 7), ByLength(18, 0.0, -math.inf, 7)),
    ],
)
@pytest.mark.parametrize("cache_format", ["bf16", "fp8_ds_mla"])
def test_rows_have_as_many_ctas_as_their_lengths_ask_for(
    shape: Clusters, numbers: ByLength, cache_format: str, by_length: ctypes.CDLL, launched: Any
) -> None:
    """Each key once; a row's CTAs are neighbours, and none has many more turns than the others."""
    call = launched(cache_format, 576, "every position", shape, launch.MAX_GRID_ROWS, of_lengths=numbers)
    keys_of_ctas: dict[tuple[int, int], Counter[int]] = {}
    gathered: Counter[tuple[int, int, int]] = Counter()
    for _ in call.choose_ctas(by_length):
        count = by_length.keys_of_cta(call.keys.row_bytes, shape.tile)
        assert count >= 0
        found = list(FOUND.iter_unpack(ctypes.string_at(by_length.keys_found(), count * FOUND.size)))
        gathered.update((token, tile, row) for token, tile, _, _, row in found)
        for token, tile, number, *_ in found:
            keys_of_ctas.setdefault((token, tile), Counter())[number] += 1
    assert gathered == call.every_key()
    by_shape = numbers.margin == 99.0
    turns = [-(-min(max(length, 0), 700) // TILE_KEYS) for length in LENGTHS]
    most = sum(turns) / max(numbers.count - len(turns) / 2, 1) + 1
    taken: dict[int, set[int]] = {tile: set() for tile in range(call.tiles)}
    for (_, tile), keys in keys_of_ctas.items():
        if by_shape:
            assert set(keys) == {-1}
            continue
        assert sorted(keys) == list(range(min(keys), max(keys) + 1))
        assert not taken[tile] & set(keys)
        taken[tile] |= set(keys)
        assert max(keys) < numbers.count
        if numbers.count >= 2 * len(turns):
            assert max(keys.values()) <= max(math.ceil(most), numbers.splits) * TILE_KEYS


@pytest.mark.parametrize("offset", [0, 1, 1_900_000, 4_000_000])
@pytest.mark.parametrize(("cache_format", "width"), list(KERNELS))
def test_rows_of_large_blocks_are_found_by_64_bits(
    cache_format: str, width: int, offset: int, library: ctypes.CDLL
) -> None:
    """Rows of one block may be more than 2 GiB apart."""
    keys, block_size = KERNELS[cache_format, width], 4_000_001
    block_bytes = 600 * 2**24
    library.bytes_to.restype = ctypes.c_longlong

    def bytes_to(scales: bool) -> int:
        block = ctypes.c_longlong(block_bytes)
        return int(library.bytes_to(keys.row_bytes, block, block_size, offset, scales))

    assert bytes_to(scales=False) == block_bytes + offset * keys.row_bytes
    if keys.scale_bytes:
        assert bytes_to(scales=True) == block_bytes + block_size * keys.row_bytes + offset * keys.scale_bytes


FILLED_SHAPES = (
    *itertools.starmap(Clusters, itertools.product((16, 24, 32, 64), (1, 3, 16))),
    *IN_SHARES,
    *(Group(members) for members in (2, 7, 16)),
)


@pytest.mark.parametrize(
    ("cache_format", "kind", "shape"),
    [
        (name, kind, shape)
        for (first, name), (second, kind), (third, shape) in itertools.product(
            enumerate(("fp8_ds_mla", "fp8_ds_mla_v4")), enumerate((*KINDS, "one slot")), enumerate(FILLED_SHAPES)
        )
        if (first + second + third) % 2  # any two of the three meet
    ],
)
def test_slots_of_shared_memory_have_whole_rows(
    cache_format: str, kind: str, shape: Shape, library: ctypes.CDLL, launched: Any
) -> None:
    """A slot has live keys as they are, and words that are finite for all others, when its barrier completes."""
    width = 512 if cache_format == "fp8_ds_mla_v4" else 576
    call = launched(cache_format, width, kind, shape, launch.MAX_GRID_ROWS)
    row_bytes = call.keys.row_bytes
    dead = bytes(row_bytes) if call.keys.scale_bytes else struct.pack("f", 2**-7) * (row_bytes // 4)
    filled: dict[tuple[int, int], Counter[bytes]] = {}
    for _ in call.choose_ctas(library):
        count = library.slots_of_cta(row_bytes, shape.tile)
        assert count >= 0
        for token, tile, alive, rows, scales in SLOT.iter_unpack(
            ctypes.string_at(library.slots_filled(), count * SLOT.size)
        ):
            found = filled.setdefault((token, tile), Counter())
            assert alive < 2**17
            for i in range(16):
                row = rows[i * row_bytes : (i + 1) * row_bytes]
                scale = scales[i * 8 : i * 8 + 8] if call.keys.scale_bytes else b""
                if alive >> i & 1:
                    found[row + scale] += 1
                else:
                    assert row == dead
                    assert scale in (b"", DEAD_SCALES)
    for token in range(len(LENGTHS)):
        expected: Counter[bytes] = Counter()
        for address, count in call.expected(token).items():
            scale = call.scales_of(address) if call.keys.scale_bytes else b""
            expected[ctypes.string_at(address, row_bytes) + scale] += count
        for tile in range(2):
            assert filled.get((token, tile), Counter()) == expected
