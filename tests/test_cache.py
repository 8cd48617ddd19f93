"""Cache ops, by exact equality: every lowering against a writer and a reader of single bytes in plain Python."""

from __future__ import annotations

import bisect
import itertools
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_ops import dispatch
from mla_ops.formats import FORMATS as ENTRIES
from mla_ops.formats import allocate_cache, geometry

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
BACKENDS = ("reference", "triton")
FORMATS = ("fp8_ds_mla", "fp8_ds_mla_v4", "bf16", "fp16", "fp32")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
WRITERS = (*BACKENDS, "hopper") if ON_HOPPER else BACKENDS  # tests/test_hopper_cache.py is for the CPU


def e4m3_value(byte: int) -> float:
    """The value of an e4m3 byte, from its fields."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


MAGNITUDES = [e4m3_value(byte) for byte in range(0x7F)]


def e4m3_byte(value: float) -> int:
    """The nearest e4m3 to a number within +-448, ties to the even byte, by search."""
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    value = abs(value)
    above = min(bisect.bisect_left(MAGNITUDES, value), 0x7E)
    below = max(above - 1, 0)
    gap_below, gap_above = value - MAGNITUDES[below], MAGNITUDES[above] - value
    if gap_below == gap_above:
        return sign | (below if below % 2 == 0 else above)
    return sign | (below if gap_below < gap_above else above)


def python_groups(latent: list[float], group_size: int, lowest: int) -> tuple[bytes, list[int]]:
    """e4m3 bytes of numbers that are exact in float32, and the exponent of each group's scale."""
    data, exponents = bytearray(), []
    for start in range(0, len(latent), group_size):
        group = latent[start : start + group_size]
        amax = max((abs(x) for x in group if math.isfinite(x)), default=0.0)
        mantissa, exponent = math.frexp(max(amax / 448, 2.0**lowest))
        exponents.append(exponent - 1 if mantissa == 0.5 else exponent)
        data += bytes(e4m3_byte(x / 2.0 ** exponents[-1]) if math.isfinite(x) else 0x7F for x in group)
    return bytes(data), exponents


def python_row(latent: list[float], rope: list[int]) -> bytes:
    """656 bytes from 512 numbers (exact in float32) and the bits of 64 bfloat16."""
    data, exponents = python_groups(latent, 128, -13)  # 2**-13 is the power of two above 1e-4
    return data + struct.pack("<4f", *(2.0**exponent for exponent in exponents)) + struct.pack("<64H", *rope)


def python_row_v4(latent: list[float], rope: list[int]) -> bytes:
    """584 bytes, 576 of data and 8 of scales, from 448 numbers and the bits of 64 bfloat16."""
    data, exponents = python_groups(latent, 64, -22)  # 2**-22 is the power of two above 1e-4 / 448
    return data + struct.pack("<64H", *rope) + bytes(exponent + 127 for exponent in exponents) + b"\0"


def python_block(rows: dict[int, bytes], block_size: int) -> bytes:
    """A block of V4 with these rows of `python_row_v4`, all else 0: data first, then scales, then what pads."""
    block = bytearray(-(-584 * block_size // 576) * 576)
    for offset, row in rows.items():
        block[576 * offset : 576 * offset + 576] = row[:576]
        scales = 576 * block_size + 8 * offset
        block[scales : scales + 8] = row[576:]
    return bytes(block)


def python_rows(cache: torch.Tensor, cache_format: str) -> torch.Tensor:
    """The bytes of every slot in one piece, `[slots, 584]` for V4, as they lie for all others."""
    if cache_format != "fp8_ds_mla_v4":
        return cache.cpu().reshape(-1, cache.shape[-1])
    block_size = geometry(cache, cache_format).block_size
    blocks = [bytes(block) for block in cache.cpu().flatten(1).tolist()]
    data = [b[576 * j : 576 * (j + 1)] for b in blocks for j in range(block_size)]
    behind = 576 * block_size
    scales = [b[behind + 8 * j : behind + 8 * (j + 1)] for b in blocks for j in range(block_size)]
    joined = bytearray(b"".join(d + e for d, e in zip(data, scales, strict=True)))
    return torch.frombuffer(joined, dtype=torch.uint8).view(-1, 584) if joined else torch.empty(0, 584).byte()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, NaN included."""
    assert a.dtype == b.dtype
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, but that a NaN equals any NaN: what an oracle in torch makes of one is the machine's choice."""
    return same(a.masked_fill(a.isnan(), math.nan), b.masked_fill(b.isnan(), math.nan))


def converted(bits: list[int]) -> list[int]:
    """Bits of bfloat16 that came through another type: a NaN is the quiet one."""
    return [0x7FC0 if bit & 0x7FFF > 0x7F80 else bit for bit in bits]


def store(latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slots: list[int], cache_format: str) -> None:
    mapping = torch.tensor(slots, dtype=torch.int64, device=cache.device)
    torch.ops.mla.concat_and_cache(latent, rope, cache, mapping, cache_format)


special = st.sampled_from(
    [0.0, -0.0, math.inf, -math.inf, math.nan, 448.0, 449.0, 464.0, 1.75, 2.0**-13, 2.0**-149, 3.4028234e38, -1e-30]
)
numbers = st.one_of(special, st.floats(width=32), st.floats(-4, 4, width=32))


@pytest.mark.parametrize("backend", WRITERS)
@settings(max_examples=40, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=40), st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=8))
def test_row_bytes_equal_python(backend: str, few: list[float], rope: list[int]) -> None:
    latent = (few * 512)[:512]
    rope = (rope * 64)[:64]
    bits = torch.tensor([rope], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    cache = allocate_cache("fp8_ds_mla", 2, 3, device=DEVICE)
    with dispatch.override(backend):
        store(torch.tensor([latent], device=DEVICE), bits.float().to(DEVICE), cache, [4], "fp8_ds_mla")
    found = cache.cpu().reshape(6, 656)
    expected = torch.frombuffer(bytearray(python_row(latent, converted(rope))), dtype=torch.uint8)
    assert torch.equal(found[4], expected)
    assert not found[[0, 1, 2, 3, 5]].any()


@pytest.mark.parametrize("backend", WRITERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_block_bytes_of_v4_equal_python(backend: str, data: st.DataObject) -> None:
    """Two rows of one block, any page size, every byte of the cache: the pads and the other rows stay 0."""
    block_size = data.draw(st.sampled_from((1, 2, 3, 64, 73, 256)))
    edges = st.sampled_from(
        [1e-4, 1.0000001e-4, 9.9e-5, 448 * 2.0**-22, 448.00003 * 2.0**-22, 2.0**-126, 448 * 2.0**120]
    )
    few = data.draw(st.lists(st.one_of(numbers, edges), min_size=1, max_size=40))
    rope = (data.draw(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=8)) * 64)[:64]
    latent = torch.tensor([(few * 448)[:448], (few[::-1] * 448)[:448]], device=DEVICE)
    bits = torch.tensor([rope, rope], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    cache = allocate_cache("fp8_ds_mla_v4", 2, block_size, device=DEVICE)
    slots = [2 * block_size - 1, block_size]
    with dispatch.override(backend):
        store(latent[:1], bits[:1].float().to(DEVICE), cache, slots[:1], "fp8_ds_mla_v4")
        store(latent[1:], bits[1:].float().to(DEVICE), cache, slots[1:], "fp8_ds_mla_v4")
    rows = {}
    for numbers_, slot in zip(latent.cpu().double().tolist(), slots, strict=True):
        rows[slot - block_size] = python_row_v4(numbers_, converted(rope))
    expected = torch.frombuffer(
        bytearray(python_block({}, block_size) + python_block(rows, block_size)), dtype=torch.uint8
    )
    found = cache.cpu().flatten()
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


def test_v4_scales_have_their_floor_and_their_order(lowering: str, device: torch.device) -> None:
    """amax is floored before the division by 448: zeros give byte 105, 2**-22, and the pad byte is 0."""
    latent = torch.zeros(1, 448, device=device)
    latent[0, 64], latent[0, 128], latent[0, 192], latent[0, 256] = 448, 449, 2.0**-14, 448 * 2.0**-22
    latent[0, 320], latent[0, 384] = torch.inf, -torch.nan
    cache = torch.full_like(allocate_cache("fp8_ds_mla_v4", 1, 64, device=device), 0xFF)
    store(latent, torch.zeros(1, 64, device=device), cache, [0], "fp8_ds_mla_v4")
    start = 576 * 64
    assert cache[0, start : start + 8].tolist() == [105, 127, 128, 105, 105, 105, 105, 0]
    assert cache[0, 320].item() == cache[0, 384].item() == 0x7F
    assert cache[0, [0, 63, 321, 385]].tolist() == [0, 0, 0, 0]
    assert (cache[0, start + 8 :] == 0xFF).all()
    assert (cache[0, 576:start] == 0xFF).all()


def test_geometry_of_v4_is_that_of_either_shape() -> None:
    """Padded blocks of every page size up to 600, and the token-by-token view of them."""
    entry = ENTRIES["fp8_ds_mla_v4"]
    assert [entry.block_bytes(size) for size in (2, 64, 72, 73, 256)] == [1728, 37440, 42048, 43200, 149760]
    lengths = {-(-584 * size // 576) * 576: size for size in range(1, 600)}
    for block_bytes, size in lengths.items():
        assert entry.block_size(block_bytes) == size
        pool = torch.empty(3, block_bytes + 16, dtype=torch.uint8, device="meta")
        flat = pool[:, :block_bytes]
        by_token = flat.as_strided((3, size, 584), (block_bytes + 16, 584, 1))
        for cache in (flat, by_token):
            assert geometry(cache, "fp8_ds_mla_v4") == (3, size, block_bytes + 16, 512)
    for rows in range(1, 600):
        if rows * 576 not in lengths:
            assert entry.block_bytes(entry.block_size(rows * 576)) != rows * 576


@pytest.mark.parametrize("block_size", [64, 256, 2, 5])
def test_v4_written_through_either_shape(lowering: str, device: torch.device, block_size: int) -> None:
    """A cache of blocks, the same seen token by token, and a slice of a pool hold the same bytes, and nothing else."""
    keys = torch.randn(7, 448, device=device).bfloat16(), torch.randn(7, 64, device=device).bfloat16()
    slots = [0, 2 * block_size - 1, -1, block_size, 2 * block_size, 1, INT_MIN]
    cache = allocate_cache("fp8_ds_mla_v4", 2, block_size, device=device)
    store(*keys, cache, slots, "fp8_ds_mla_v4")
    block_bytes = cache.shape[1]
    pool = torch.full((3, block_bytes + 48), 7, dtype=torch.uint8, device=device)
    before = pool.clone()
    before[1:, 16:-32] = cache
    views = pool[1:, 16:-32], pool[1:].as_strided((2, block_size, 584), (block_bytes + 48, 584, 1), block_bytes + 64)
    for view in views:
        pool.fill_(7)
        pool[1:, 16:-32] = 0
        store(*keys, view, slots, "fp8_ds_mla_v4")
        assert torch.equal(pool, before)
        assert geometry(view, "fp8_ds_mla_v4").block_size == block_size
        everything = torch.arange(2, dtype=torch.int32, device=device).view(1, 2)
        lens = torch.tensor([2 * block_size], dtype=torch.int32, device=device)
        starts = torch.tensor([0, 2 * block_size], dtype=torch.int32, device=device)
        rows = [
            torch.ops.mla.gather_cache(one, everything, lens, starts, 2 * block_size, "fp8_ds_mla_v4")
            for one in (cache, view)
        ]
        assert torch.equal(*rows)


def test_every_bfloat16_is_quantised_alike(lowering: str, device: torch.device) -> None:
    """All 65536 values, in groups of one magnitude and shuffled (so that most are far below their group's largest)."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    shuffled = values[torch.randperm(2**16)]
    latent = torch.cat((values, shuffled)).view(256, 512)
    rope = torch.randn(256, 64).bfloat16()
    cache = allocate_cache("fp8_ds_mla", 4, 64, device=device)
    store(latent.to(device), rope.to(device), cache, list(range(256)), "fp8_ds_mla")
    rows = cache.view(256, 656).cpu()
    # every 16th row through the slow writer
    for row in range(0, 256, 16):
        expected = python_row(latent[row].double().tolist(), [b & 0xFFFF for b in rope[row].view(torch.int16).tolist()])
        assert bytes(rows[row].tolist()) == expected
    with dispatch.override("reference"):
        again = allocate_cache("fp8_ds_mla", 4, 64)
        store(latent, rope, again, list(range(256)), "fp8_ds_mla")
    assert torch.equal(rows, again.view(256, 656))


def test_every_bfloat16_is_quantised_alike_in_v4(lowering: str, device: torch.device) -> None:
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    latent = torch.cat((values, values[torch.randperm(2**16)]))[: 292 * 448].view(292, 448)
    rope = torch.randn(292, 64).bfloat16()
    cache = allocate_cache("fp8_ds_mla_v4", 73, 4, device=device)
    store(latent.to(device), rope.to(device), cache, list(range(292)), "fp8_ds_mla_v4")
    rows = python_rows(cache, "fp8_ds_mla_v4")
    for row in range(0, 292, 16):
        bits = [b & 0xFFFF for b in rope[row].view(torch.int16).tolist()]
        assert bytes(rows[row].tolist()) == python_row_v4(latent[row].double().tolist(), bits)
    with dispatch.override("reference"):
        again = allocate_cache("fp8_ds_mla_v4", 73, 4)
        store(latent, rope, again, list(range(292)), "fp8_ds_mla_v4")
    assert torch.equal(cache.cpu(), again)


@pytest.mark.parametrize("exponent", [-20, -13, 0, 119])
def test_rounding_boundaries_are_exact(lowering: str, device: torch.device, exponent: int) -> None:
    """Every midpoint of two e4m3 neighbours, and the float32 numbers on either side of it."""
    middle = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(MAGNITUDES)])
    around = torch.cat((middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e9))))
    # 127 numbers and the group's largest, so that the scale is 2**exponent
    latent = torch.full((4, 512), 448.0)
    latent.view(-1, 128)[:3, :126] = around.view(3, 126)
    latent.view(-1, 128)[3:6, :126] = -around.view(3, 126)
    latent *= 2.0**exponent
    cache = allocate_cache("fp8_ds_mla", 1, 4, device=device)
    store(latent.to(device), torch.zeros(4, 64, device=device), cache, [0, 1, 2, 3], "fp8_ds_mla")
    for row, found in zip(latent.double().tolist(), cache[0].cpu().tolist(), strict=True):
        assert bytes(found) == python_row(row, [0] * 64)


SOURCES = [("fp8_ds_mla", torch.bfloat16, 512, 64), ("fp8_ds_mla", torch.float16, 512, 64)]
SOURCES += [("fp8_ds_mla", torch.float32, 512, 64), ("bf16", torch.bfloat16, 512, 64), ("bf16", torch.float32, 512, 64)]
SOURCES += [("fp16", torch.float16, 512, 0), ("bf16", torch.bfloat16, 448, 64), ("bf16", torch.bfloat16, 128, 0)]
SOURCES += [("fp32", torch.float32, 512, 64), ("fp32", torch.bfloat16, 0, 576), ("fp16", torch.float32, 100, 28)]


@pytest.mark.parametrize(("cache_format", "dtype", "latent_dim", "rope_dim"), SOURCES)
def test_store_from_slices_to_slices(
    device: torch.device, triton_lowering: None, cache_format: str, dtype: torch.dtype, latent_dim: int, rope_dim: int
) -> None:
    """Strided sources and a cache whose blocks are slices of a pool, padded slots, slots out of range."""
    num_tokens, block_size = 9, 4
    width = 656 if cache_format == "fp8_ds_mla" else latent_dim + rope_dim
    fused = torch.randn(num_tokens, latent_dim + rope_dim + 5, device=device).to(dtype)
    fused[3, :7] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 6e4], device=device).to(dtype)
    latent, rope = fused[:, 2 : 2 + latent_dim], fused[:, 3 + latent_dim : 3 + latent_dim + rope_dim]
    slots = [5, -1, 0, 27, 28, INT_MIN, 2**40, 11, 6]
    pools = []
    for backend in WRITERS:
        pool = allocate_cache(cache_format, 7, 3 * block_size, head_dim=576 if width == 656 else width, device=device)
        with dispatch.override(backend):
            store(latent, rope, pool[:, block_size : 2 * block_size], slots, cache_format)
        pools.append(pool)
    assert all(same(pools[0], pool) for pool in pools[1:])
    touched = pools[1].view(7, 3, block_size, width).to(torch.float32).ne(0).any(-1)
    assert not touched[:, [0, 2]].any()
    assert touched[:, 1].flatten().nonzero().flatten().tolist() == [0, 5, 6, 11, 27]


NAN_BITS = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000}
INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def some_nans(dtype: torch.dtype, width: int) -> torch.Tensor:
    """`[4, width]`: quiet and signalling NaN of both signs, with the lowest and all bits of a payload."""
    quiet = {torch.bfloat16: 0x40, torch.float16: 0x200, torch.float32: 0x400000}[dtype]
    infinite = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}[dtype]
    sign = torch.iinfo(INTEGERS[dtype]).min
    bits = [infinite + quiet + 1, infinite + 1, infinite + 2 * quiet - 1, sign + infinite + quiet + 5]
    return torch.tensor(bits, dtype=INTEGERS[dtype]).view(dtype).unsqueeze(1).repeat(1, width)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("cache_format", FORMATS)
def test_nan_has_the_same_bytes_in_every_row_and_lowering(
    cache_format: str, dtype: torch.dtype, lowering: str, device: torch.device
) -> None:
    """Bits are copied where types are equal, in and out of a cache; a NaN that is converted is the quiet one."""
    entry = ENTRIES[cache_format]
    if not entry.quantized and entry.dtype not in (dtype, torch.float32) and dtype != torch.float32:
        pytest.skip(f"{cache_format} takes no {dtype}")
    latent_dim = entry.latent_dim
    latent, rope = some_nans(dtype, latent_dim).to(device), some_nans(dtype, 64).to(device)
    latent[:, 1] = rope[:, 1] = 1.5
    cache = allocate_cache(cache_format, 2, 4, device=device)
    store(latent, rope, cache, [1, 2, 3, 4], cache_format)
    starts = torch.tensor([0, 4], dtype=torch.int32, device=device)
    table = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    lens = torch.tensor([5], dtype=torch.int32, device=device)
    rows = torch.ops.mla.gather_cache(cache, table, lens, starts, 4, cache_format, gather_lens=starts[1:])

    def expected(values: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
        bits = values.cpu().to(stored).view(INTEGERS[stored])
        if stored == dtype:
            return values.cpu().view(INTEGERS[stored])
        return bits.where(~values.cpu().isnan(), NAN_BITS[stored])

    stored = rows.dtype
    got = rows.cpu().view(INTEGERS[stored])
    assert torch.equal(got[:, latent_dim:], expected(rope, stored))
    if entry.quantized:
        # e4m3 has one NaN, which becomes that of bfloat16
        assert (got[:, :latent_dim][latent.cpu().isnan()] == NAN_BITS[torch.bfloat16]).all()
        assert (rows[:, 1] == 1.5).all()
        data = python_rows(cache, cache_format)[1:5, :latent_dim]
        assert (data[latent.cpu().isnan()] == 0x7F).all()
    else:
        assert torch.equal(got[:, :latent_dim], expected(latent, stored))
        assert same(cache.flatten(0, 1)[1:5], rows)


@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize(("num_slots", "num_rows"), [(0, 3), (3, 0), (2, 5), (5, 2)])
def test_the_shorter_of_slots_and_rows_counts(
    lowering: str, device: torch.device, cache_format: str, num_slots: int, num_rows: int
) -> None:
    cache = allocate_cache(cache_format, 2, 4, device=device)
    ones = torch.ones(num_rows, 576, device=device).to(torch.bfloat16 if cache.dtype == torch.uint8 else cache.dtype)
    latent_dim = ENTRIES[cache_format].latent_dim
    store(ones[:, :latent_dim], ones[:, 512:], cache, list(range(num_slots)), cache_format)
    written = python_rows(cache, cache_format).ne(0).any(1)
    assert written.sum() == min(num_slots, num_rows)
    assert written[: min(num_slots, num_rows)].all()


def gather_oracle(
    rows: torch.Tensor,
    table: list[list[int]],
    seq_lens: list[int],
    starts: list[int],
    num_rows: int,
    gather_lens: list[int] | None,
    offset: int,
    block_size: int,
    num_blocks: int,
) -> dict[int, torch.Tensor | None]:
    """Output row to key (None where the row is covered and must be zero); rows that are absent are untouched."""
    found: dict[int, torch.Tensor | None] = {}
    for request, length in enumerate(seq_lens):
        count = max(length, 0) if gather_lens is None else max(min(length, gather_lens[request]), 0)
        for i in range(count):
            row, position = starts[request] + i, length - count + i
            if row >= starts[request + 1] or not 0 <= row + offset < num_rows:
                continue
            column = position // block_size
            block = table[request][column] if column < len(table[request]) else -1
            inside = 0 <= block < num_blocks
            found[row + offset] = rows[block * block_size + position % block_size] if inside else None
    return found


def python_values(cache: torch.Tensor, cache_format: str) -> torch.Tensor:
    """All rows of a cache, `[slots, head_dim]`, in the type that gather_cache returns."""
    rows = python_rows(cache, cache_format)
    if cache.dtype != torch.uint8:
        return rows
    table = torch.tensor([e4m3_value(byte) for byte in range(256)], dtype=torch.float32)
    if cache_format == "fp8_ds_mla_v4":
        powers = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [math.nan])
        scales = powers[rows[:, 576:583].long()].repeat_interleave(64, dim=1)
        latent = (table[rows[:, :448].long()] * scales).bfloat16()
        return torch.cat((latent, rows[:, 448:576].contiguous().view(torch.bfloat16)), dim=1)
    scales = rows[:, 512:528].contiguous().view(torch.float32).repeat_interleave(128, dim=1)
    latent = (table[rows[:, :512].long()] * scales).bfloat16()
    return torch.cat((latent, rows[:, 528:].contiguous().view(torch.bfloat16)), dim=1)


def check_gather(
    cache: torch.Tensor,
    cache_format: str,
    table: list[list[int]],
    seq_lens: list[int],
    starts: list[int],
    num_rows: int,
    gather_lens: list[int] | None,
    offset: int,
) -> None:
    num_blocks, block_size, _, _ = geometry(cache, cache_format)
    values = python_values(cache, cache_format)

    def int32(data: list) -> torch.Tensor:
        return torch.tensor(data, dtype=torch.int32, device=cache.device)

    blocks = int32(table).reshape(len(seq_lens), len(table[0]) if table else 3)
    lens = None if gather_lens is None else int32(gather_lens)
    arguments = (cache, blocks, int32(seq_lens), int32(starts), num_rows, cache_format)
    expected = gather_oracle(values, table, seq_lens, starts, num_rows, gather_lens, offset, block_size, num_blocks)
    fresh = torch.ops.mla.gather_cache(*arguments, gather_lens=lens, offset=offset)
    workspace = torch.full((num_rows, values.shape[1] + 8), 77.0, dtype=values.dtype, device=cache.device)
    torch.ops.mla.gather_cache.out(*arguments, gather_lens=lens, offset=offset, out=workspace[:, : values.shape[1]])
    assert (workspace[:, values.shape[1] :] == 77).all()
    for row in range(num_rows):
        key = expected.get(row)
        zero, left = torch.zeros_like(values[0]), torch.full_like(values[0], 77.0)
        assert same_numbers(fresh[row].cpu(), zero if key is None else key), row
        here = workspace[row, : values.shape[1]].cpu()
        assert same_numbers(here, left if row not in expected else zero if key is None else key), row


def random_bytes_cache(cache_format: str, num_blocks: int, block_size: int, device: torch.device | str) -> torch.Tensor:
    """Any bytes at all: NaN, subnormals and infinities in values and scales."""
    cache = allocate_cache(cache_format, num_blocks, block_size)
    cache.view(torch.uint8).random_(0, 256)
    return cache.to(device)


@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("gather", [False, True], ids=["whole requests", "last tokens"])
def test_gather_equals_python(lowering: str, device: torch.device, cache_format: str, gather: bool) -> None:
    cache = random_bytes_cache(cache_format, 12, 4, device)
    table = [[3, 11, 0], [12, 5, -1], [INT_MAX, INT_MIN, 7], [1, 1, 1]]
    seq_lens, starts = [9, 12, 14, 0], [0, 9, 19, 31, 31]
    check_gather(cache, cache_format, table, seq_lens, starts, 40, [4, 20, 12, 3] if gather else None, 5)


@pytest.mark.parametrize(("num_requests", "num_rows"), [(0, 4), (2, 0), (0, 0)])
def test_gather_nothing(lowering: str, device: torch.device, num_requests: int, num_rows: int) -> None:
    cache = random_bytes_cache("fp8_ds_mla", 2, 4, device)
    starts = [0, 3, 6][: num_requests + 1]
    check_gather(cache, "fp8_ds_mla", [[0, 1]] * num_requests, [3] * num_requests, starts, num_rows, None, 0)


@pytest.mark.parametrize("head_dim", [512, 128])
def test_gather_narrow_rows(lowering: str, device: torch.device, head_dim: int) -> None:
    cache = torch.randn(5, 4, head_dim, device=device).bfloat16()
    check_gather(cache, "bf16", [[4, 2], [0, 3]], [7, 5], [0, 7, 12], 13, None, 0)


def test_gather_reads_arbitrary_scales_exactly(lowering: str, device: torch.device) -> None:
    cache = random_bytes_cache("fp8_ds_mla", 4, 8, "cpu")
    cache.view(32, 656)[:, 512:528] = (torch.rand(32, 4) * 3).view(torch.uint8)
    check_gather(cache.to(device), "fp8_ds_mla", [[2, 0], [1, 3]], [16, 13], [0, 16, 29], 29, None, 0)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_gather_equals_python_on_anything(backend: str, data: st.DataObject) -> None:
    num_requests = data.draw(st.integers(0, 3))
    blocks = st.one_of(st.integers(-1, 5), st.sampled_from((INT_MIN, INT_MAX)))
    table = [data.draw(st.lists(blocks, min_size=3, max_size=3)) for _ in range(num_requests)]
    lens = st.lists(st.integers(-2, 9), min_size=num_requests, max_size=num_requests)
    room_for = data.draw(st.lists(st.integers(0, 7), min_size=num_requests, max_size=num_requests))
    starts = [0]
    for size in room_for:
        starts.append(starts[-1] + size)
    gather_lens = data.draw(st.one_of(st.none(), lens))
    cache = torch.arange(5 * 2 * 128, device=DEVICE).view(5, 2, 128).half()
    with dispatch.override(backend):
        check_gather(
            cache,
            "fp16",
            table,
            data.draw(lens),
            starts,
            data.draw(st.integers(0, 25)),
            gather_lens,
            data.draw(st.integers(0, 4)),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_ds_mla_v4", "bf16"])
@pytest.mark.parametrize("num_tokens", [1, 7, 128, 4096])
def test_store_and_gather_at_real_sizes(cache_format: str, num_tokens: int) -> None:
    latent = torch.randn(num_tokens, ENTRIES[cache_format].latent_dim, device="cuda").bfloat16() * 3
    rope = torch.randn(num_tokens, 64, device="cuda").bfloat16()
    slots = torch.randperm(256 * 64, device="cuda")[:num_tokens]
    slots[::5] = -1
    caches = [allocate_cache(cache_format, 256, 64, device="cuda") for _ in BACKENDS]
    table = torch.randint(-1, 257, (8, 32), dtype=torch.int32, device="cuda")
    lens = torch.randint(0, 2048, (8,), dtype=torch.int32, device="cuda")
    starts = torch.cat((torch.zeros(1, device="cuda"), lens.cumsum(0))).int()
    gathered = []
    for backend, cache in zip(BACKENDS, caches, strict=True):
        with dispatch.override(backend):
            torch.ops.mla.concat_and_cache(latent, rope, cache, slots, cache_format)
            gathered.append(torch.ops.mla.gather_cache(cache, table, lens, starts, 17_000, cache_format, offset=33))
    assert same(*caches)
    assert same(*gathered)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", WRITERS[1:])
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
def test_slots_beyond_four_gib(cache_format: str, backend: str) -> None:
    row_bytes = 656 if cache_format == "fp8_ds_mla" else 1152
    num_blocks = 2**32 // (64 * row_bytes) + 2000
    cache = allocate_cache(cache_format, num_blocks, 64, device="cuda")
    far = torch.arange(2**32 // row_bytes - 2, 2**32 // row_bytes + 3, device="cuda")
    slots = torch.cat((far, torch.tensor([0, num_blocks * 64 - 1, num_blocks * 64], device="cuda")))
    latent, rope = torch.randn(8, 512, device="cuda").bfloat16(), torch.randn(8, 64, device="cuda").bfloat16()
    small = allocate_cache(cache_format, 1, 8, device="cuda")
    with dispatch.override(concat_and_cache=backend, gather_cache="triton"):
        torch.ops.mla.concat_and_cache(latent, rope, cache, slots, cache_format)
        torch.ops.mla.concat_and_cache(latent, rope, small, torch.arange(8, device="cuda"), cache_format)
        assert same(cache.view(-1, cache.shape[-1])[slots[:7]], small[0, :7])
        assert int(cache.view(-1, cache.shape[-1])[:, :1].count_nonzero()) <= 7
        last = int(slots[6]) // 64
        table = torch.tensor([[last]], dtype=torch.int32, device="cuda")
        lens = torch.tensor([64], dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
        found = torch.ops.mla.gather_cache(cache, table, lens, starts, 64, cache_format)
    assert same_numbers(found[63].cpu(), python_values(small, cache_format)[6])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", WRITERS[1:])
def test_slots_of_v4_beyond_four_gib(backend: str) -> None:
    num_blocks = 2**32 // 37440 + 2000
    cache = allocate_cache("fp8_ds_mla_v4", num_blocks, 64, device="cuda")
    far = torch.arange(2**32 // 37440 * 64 - 2, 2**32 // 37440 * 64 + 3, device="cuda")
    slots = torch.cat((far, torch.tensor([0, num_blocks * 64 - 1, num_blocks * 64], device="cuda")))
    latent, rope = torch.randn(8, 448, device="cuda").bfloat16(), torch.randn(8, 64, device="cuda").bfloat16()
    small = allocate_cache("fp8_ds_mla_v4", 1, 8, device="cuda")
    with dispatch.override(concat_and_cache=backend, gather_cache="triton"):
        torch.ops.mla.concat_and_cache(latent, rope, cache, slots, "fp8_ds_mla_v4")
        torch.ops.mla.concat_and_cache(latent, rope, small, torch.arange(8, device="cuda"), "fp8_ds_mla_v4")
        named = (slots[:7] // 64).unique()
        rows = python_rows(cache[named], "fp8_ds_mla_v4")
        places = [int((named == slot // 64).nonzero()) * 64 + slot % 64 for slot in slots[:7].tolist()]
        assert torch.equal(rows[places], python_rows(small, "fp8_ds_mla_v4")[:7])
        assert int(cache.any(1).sum()) == len(named)
        table, lens = named[-1:].int().view(1, 1), torch.tensor([64], dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
        found = torch.ops.mla.gather_cache(cache, table, lens, starts, 64, "fp8_ds_mla_v4")
    assert same_numbers(found[63].cpu(), python_values(small, "fp8_ds_mla_v4")[6])
