"""A power of two taken out of a key's scales: which keys have one, and that float16 holds what is left of them.

The kernels' own code (`formats.cuh`), compiled for this CPU.
"""

from __future__ import annotations

import ctypes
import math
import random
import struct

import attention_oracle
import pytest
import torch
from hopper_on_cpu import NO_COMPILER, build

pytestmark = pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler")

FACTOR = 2.0**8  # operands over keys
LEAST, MOST = 2.0**-13, 2.0**7  # whose products with e4m3 float16 holds
RANGE = (-60, 40)  # exponents that are taken out


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build("hopper_scales.cpp", tmp_path_factory.mktemp("hopper_scales"))


def power_of(undo: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", undo << 16))[0])


def taken_of_fp8(library: ctypes.CDLL, scales: list[float]) -> tuple[bool, bool, float, list[float]]:
    """Whether a turn has to look at the key, whether float16 does not hold it, 2^-taken, scales that are left."""
    words = (ctypes.c_uint32 * 4)(*struct.unpack("<4I", struct.pack("<4f", *scales)))
    undo = ctypes.c_uint32()
    flags = library.take_out_fp8(words, ctypes.byref(undo))
    return bool(flags & 1), bool(flags & 2), power_of(undo.value), list(struct.unpack("<4f", bytes(words)))


def raised_of_fp8(library: ctypes.CDLL, scales: list[float]) -> tuple[list[int], list[float]]:
    """Binades by which a group's e4m3 are divided, and the scales that they then have."""
    words = (ctypes.c_uint32 * 4)(*struct.unpack("<4I", struct.pack("<4f", *scales)))
    exponents = library.raise_fp8(words)
    return [exponents >> 4 * group & 15 for group in range(4)], list(struct.unpack("<4f", bytes(words)))


def taken_of_v4(library: ctypes.CDLL, scales: list[int]) -> tuple[bool, bool, float, list[int]]:
    words = (ctypes.c_uint32 * 2)(*struct.unpack("<2I", bytes([*scales, 0])))
    undo = ctypes.c_uint32()
    flags = library.take_out_v4(words, ctypes.byref(undo))
    return bool(flags & 1), bool(flags & 2), power_of(undo.value), list(bytes(words))


@pytest.mark.parametrize("power", range(RANGE[0] - 2, RANGE[1] - 1))
def test_scales_of_any_size_that_are_near_one_another_are_held(library: ctypes.CDLL, power: int) -> None:
    """Within 25 binades of the largest, or zero: divided by powers of two, exactly, and next to other keys' scales."""
    random.seed(power)
    for _ in range(50):
        largest = random.uniform(1.0, 1.999) * 2.0**power
        scales = [largest, *(largest * 2.0 ** random.uniform(-24.9, 0.0) for _ in range(2)), 0.0]
        random.shuffle(scales)
        scales = list(struct.unpack("<4f", struct.pack("<4f", *scales)))
        outside, wide, undo, left = taken_of_fp8(library, scales)
        assert not wide
        assert math.frexp(undo)[0] == 0.5
        assert left == [scale * undo for scale in scales]
        exponents, raised = raised_of_fp8(library, left)
        assert raised == [scale * 2.0**exponent for scale, exponent in zip(left, exponents, strict=True)]
        assert [exponent > 0 for exponent in exponents] == [0 < scale < 2.0**-22 for scale in left]
        assert max(exponents) <= 5
        operands = [scale * FACTOR for scale in raised]
        assert all(operand == 0 or LEAST / 2 <= operand < MOST for operand in operands)
        # a key's weight and another's both become float16: their largest operands differ by less than 2^12
        assert max(operands) >= MOST / 2**12
        fits = -13 <= power < -1 and min(s for s in scales if s) >= 2.0**-21
        assert outside or fits
        assert undo == 1 or not fits


@pytest.mark.parametrize("scale", [2.0**-13, 2.0**-7, 0.0101, 2.0**-1 - 2.0**-25])
def test_scales_of_unit_normals_are_left_alone(library: ctypes.CDLL, scale: float) -> None:
    outside, wide, undo, left = taken_of_fp8(library, [scale] * 4)
    assert (outside, wide, undo) == (False, False, 1.0)
    assert left == pytest.approx([scale] * 4, rel=2**-24)


@pytest.mark.parametrize("scale", [math.inf, math.nan, 1e-40, -1.0, 2.0**-62 * 0.999, 2.0**41])
def test_what_has_no_such_exponent_is_told(library: ctypes.CDLL, scale: float) -> None:
    for place in range(4):
        scales = [0.01] * 4
        scales[place] = scale
        outside, wide, _, _ = taken_of_fp8(library, scales)
        assert outside
        assert wide


def test_a_key_of_zeros_weighs_least_beside_others(library: ctypes.CDLL) -> None:
    """Its score has to set no running maximum beside which small values' weights vanish from float16."""
    assert taken_of_fp8(library, [0.0] * 4) == (True, False, 2.0 ** -RANGE[0], [0.0] * 4)


def test_every_byte_of_v4(library: ctypes.CDLL) -> None:
    for largest in range(256):
        for least in range(max(0, largest - 28), largest + 1):
            scales = [largest, *[least] * 5, (largest + least) // 2]
            outside, wide, undo, left = taken_of_v4(library, scales)
            usual = least >= 110 and largest <= 122
            assert outside == (not usual)
            taken = 0 if least >= 105 and 110 <= largest <= 122 else min(max(largest - 120, RANGE[0]), RANGE[1])
            if lowers := least - taken < 105:
                taken = min(max(largest - 125, RANGE[0]), RANGE[1])
            assert undo == 2.0**-taken
            held = least > 0 and least - taken >= 100 and largest - taken <= (125 if lowers else 122)
            assert wide == (not held)
            if held:
                assert left == [byte - taken for byte in scales] + [0]
                words = (ctypes.c_uint32 * 2)(*struct.unpack("<2I", bytes(left)))
                exponents = library.raise_v4(words)
                assert [exponents >> 4 * group & 15 for group in range(7)] == [max(105 - byte, 0) for byte in left[:7]]
                assert list(bytes(words)) == [max(byte, 105) for byte in left[:7]] + [0]


def test_the_oracle_bounds_weights_by_the_powers_that_are_taken_out(library: ctypes.CDLL) -> None:
    """Keys whose scales float16 holds, once the power is out."""
    random.seed(1)
    for _ in range(500):
        middle = random.uniform(-40, 30)
        fp8 = [2.0 ** (middle + random.uniform(-9, 9)) for _ in range(4)]
        rows = torch.zeros(1, 656, dtype=torch.uint8)
        rows[:, 512:528] = torch.tensor([fp8]).view(torch.uint8)
        _, wide, undo, _ = taken_of_fp8(library, fp8)
        assert wide or attention_oracle.powers_apart(rows).item() == 1 / undo
        v4 = [min(max(round(127 + middle + random.uniform(-7, 7)), 0), 255) for _ in range(7)]
        _, wide, undo, _ = taken_of_v4(library, v4)
        assert wide or attention_oracle.v4_powers_apart(torch.tensor([v4], dtype=torch.uint8)).item() == 1 / undo
