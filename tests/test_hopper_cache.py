"""Cache writes by the Hopper kernels: every byte of the cache's memory is that of the reference.

The kernels' own code runs on this CPU, and on a GPU the kernels do.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import pytest
import torch
from hopper_on_cpu import NO_COMPILER, build

from mla_ops import dispatch
from mla_ops.formats import FORMATS, geometry
from mla_ops.kernels.hopper import cache as hopper_cache
from mla_ops.kernels.hopper.cache import KERNELS, Params, pack

INT_MIN = -(2**63)
KINDS = ["fp8_ds_mla", "fp8_ds_mla_v4", "fp8_index", "bf16", "fp16", "fp32"]
INTEGERS = {2: torch.int16, 4: torch.int32}
HARD = (
    0.0,
    -0.0,
    448.0,
    449.0,
    464.0,
    1.75,
    2.0**-13,
    2.0**-24,
    1e-4,
    3e38,
    -1e-30,
    2.0**-149,
    1e-40,
    65519.0,
    2.0**66,
)


class Written(NamedTuple):
    """Memory of a cache, the cache in it, and what goes into it; `rope` is None for an index key."""

    memory: torch.Tensor
    cache: torch.Tensor
    latent: torch.Tensor
    rope: torch.Tensor | None
    slots: torch.Tensor


def numbers(rows: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A third any bits at all, NaN among them; a third normals of one size a row, a third of them hard ones."""
    size = dtype.itemsize
    any_bits = torch.randint(-(2 ** (8 * size - 1)), 2 ** (8 * size - 1), (rows, width), generator=generator)
    values = any_bits.to(INTEGERS[size]).view(dtype)
    powers = torch.randint(-30, 18, (rows, 1), generator=generator)
    normal = (torch.randn(rows, width, generator=generator) * torch.exp2(powers.float())).to(dtype)
    hard = torch.tensor(HARD)[torch.randint(len(HARD), (rows, width), generator=generator)].to(dtype)
    choice = torch.randint(0, 9, (rows, width), generator=generator)
    choice[::3] = choice[::3].clamp(max=7)  # rows without infinities, so that scales are of every size
    choice[1::3] = choice[1::3].clamp(min=6, max=7)
    return torch.where(choice == 8, values, torch.where(choice == 6, hard, normal))


def case(
    cache_format: str, dtype: torch.dtype, widths: tuple[int, int], offset: int, num_tokens: int, device: str = "cpu"
) -> Written:
    """Sources with `offset` numbers in front of each row, a cache of blocks in a larger memory, hard slots."""
    generator = torch.Generator().manual_seed(offset + 10 * num_tokens)
    entry, (latent_dim, rope_dim) = FORMATS[cache_format], widths
    total, block_size, num_blocks = latent_dim + rope_dim, 5, num_tokens // 4 + 2
    fused = numbers(num_tokens, 2 * offset + total, dtype, generator).to(device)
    latent = fused[:, offset : offset + latent_dim]
    rope = fused[:, 2 * offset + latent_dim :]
    unit = 16 // entry.dtype.itemsize
    row_width = entry.row_width(total)
    block = entry.block_bytes(block_size) if entry.planar else block_size * row_width
    stride = -(-block // unit) * unit + 3 * unit
    shape = (num_blocks, block) if entry.planar else (num_blocks, block_size, row_width)
    strides = (stride, 1) if entry.planar else (stride, row_width, 1)
    memory = torch.full(((num_blocks * stride + 2 * unit) * entry.dtype.itemsize,), 0xA5, dtype=torch.uint8)
    memory = memory.to(device)
    cache = memory.view(entry.dtype).as_strided(shape, strides, unit)
    num_slots = geometry(cache, cache_format).block_size * num_blocks
    slots = torch.randperm(num_slots, generator=generator)[:num_tokens]
    slots[1::7], slots[2::11], slots[3::13] = -1, num_slots, 2**32
    for at, slot in enumerate((INT_MIN, 2**63 - 1, num_slots - 1, 2**40)):
        if num_tokens > 20:
            slots[20 + at] = slot
    if num_tokens > 20:  # no two tokens have one slot: a GPU writes them in no order
        last = slots == num_slots - 1
        last[22] = False
        slots[last] = -1
    return Written(memory, cache, latent, rope if cache_format != "fp8_index" and rope_dim else None, slots.to(device))


def write(case: Written, cache_format: str) -> None:
    """Writes by the op, as dispatch has it."""
    if case.cache.dim() and geometry(case.cache, cache_format).head_dim == 128:
        torch.ops.mla.write_index_cache(case.latent, case.cache, case.slots, cache_format)
    else:
        rope = case.latent[:, :0] if case.rope is None else case.rope
        torch.ops.mla.concat_and_cache(case.latent, rope, case.cache, case.slots, cache_format)


def widths_of(cache_format: str) -> list[tuple[int, int]]:
    """Widths of latent and RoPE: those of models, index keys, and where a kernel's vectors meet both."""
    quantized = {"fp8_ds_mla": [(512, 64)], "fp8_ds_mla_v4": [(448, 64)], "fp8_index": [(128, 0)]}
    return quantized.get(cache_format, [(512, 64), (512, 0), (448, 64), (99, 477), (128, 0)])


CASES = [
    pytest.param(name, dtype, widths, offset, id=f"{name}-{dtype}-{widths[0]}+{widths[1]}-at-{offset}")
    for name, dtype in KERNELS
    for widths in widths_of(name)
    for offset in (0, 1, 2)
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if NO_COMPILER:
        pytest.skip("no C++ compiler")
    return build("hopper_cache.cpp", tmp_path_factory.mktemp("hopper_cache"))


def store(library: ctypes.CDLL, case: Written, cache_format: str, seed: int = 1) -> None:
    """Writes by the kernels' own code."""
    params = pack(case.latent, case.rope, case.cache, case.slots, cache_format)
    kind, input_type = KINDS.index(cache_format), list(hopper_cache.TYPES).index(case.latent.dtype)
    library.store(params, kind, input_type, seed)


def test_the_host_knows_the_length_of_the_params(library: ctypes.CDLL) -> None:
    assert library.bytes_of_params() == ctypes.sizeof(Params)


@pytest.mark.parametrize(("cache_format", "dtype", "widths", "offset"), CASES)
def test_every_byte_is_that_of_the_reference(
    library: ctypes.CDLL, cache_format: str, dtype: torch.dtype, widths: tuple[int, int], offset: int
) -> None:
    found, expected = (case(cache_format, dtype, widths, offset, 45) for _ in range(2))
    write(expected, cache_format)
    store(library, found, cache_format)
    assert torch.equal(found.memory, expected.memory)
    assert (expected.memory != 0xA5).any()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8])
def test_fewer_slots_than_rows_and_more(library: ctypes.CDLL, num_tokens: int) -> None:
    for name in KINDS:
        widths = widths_of(name)[0]
        for more in (-1, 3):
            found, expected = (case(name, torch.float32, widths, 0, num_tokens) for _ in range(2))
            slots = torch.arange(num_tokens + more)
            found, expected = found._replace(slots=slots), expected._replace(slots=slots)
            write(expected, name)
            store(library, found, name)
            assert torch.equal(found.memory, expected.memory)


def test_slots_beyond_32_bits_are_divided(library: ctypes.CDLL) -> None:
    block, offset = ctypes.c_int64(), ctypes.c_int64()
    for slot in (0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 7, 2**62 + 12345):
        for block_size in (1, 3, 64, 2**31 - 1):
            library.place(ctypes.c_int64(slot), ctypes.c_int64(block_size), ctypes.byref(block), ctypes.byref(offset))
            assert (block.value, offset.value) == divmod(slot, block_size)


@pytest.mark.gpu
@pytest.mark.parametrize(("cache_format", "dtype", "widths", "offset"), CASES)
def test_every_byte_on_a_gpu(cache_format: str, dtype: torch.dtype, widths: tuple[int, int], offset: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs SM90")
    for num_tokens in (1, 45, 3001):
        expected = case(cache_format, dtype, widths, offset, num_tokens)
        found = case(cache_format, dtype, widths, offset, num_tokens, "cuda")
        write(expected, cache_format)
        with dispatch.override("hopper"):
            write(found, cache_format)
        assert torch.equal(found.memory.cpu(), expected.memory)
