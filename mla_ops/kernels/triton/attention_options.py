"""Options by which the attention kernels over a cache are compiled, as one constant of a kernel."""

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from .common import INTERPRETED, KEEPS_OPERANDS, Constant
from .sparse_attention_keys import Keys


@dataclass(frozen=True, eq=False)
class Tile(Constant):
    """Sizes of one program, heads x keys, its warps, and how many tiles of keys are on their way while one is used.

    `half`: whether keys of fp8_ds_mla are float16 operands with their scale ("fp8_half"), one cache at a time. `apart`:
    whether scores stand behind a branch of their own (`_attend_operands`). `early`: whether the copies of a tile begin
    before the products of the one before (`attend_tile`), not with table entries of single keys.
    """

    block_h: int
    block_n: int
    num_warps: int
    ahead: int
    half: bool = False
    apart: bool = False
    early: bool = False

    def narrow(self) -> "Tile":
        """For a second walk: what fits beside the registers of the first."""
        wide = self.block_h == 64
        return replace(self, block_n=32 if wide else 16, ahead=int(wide), apart=wide, early=wide)


# made once: a launch finds it sooner than it would make it
make_tile = functools.cache(Tile)

SHORT_ROW = 128  # keys
KEPT_AT = tl.constexpr(16)  # words in front of the indices that a program keeps
KEPT_LEAST = 512  # keys of a part that keeps indices: in fewer, it takes as long
STEADY_TILES = 8  # of a program of 16 heads: in fewer, less is saved than the look at its sums costs


def is_steady(chosen: Tile, keys: Keys, dtype: torch.dtype, num_keys: int, parts: int, paired: bool = False) -> bool:
    """Whether weights are about the largest score of few keys alone: Options.steady.

    bfloat16 ones: float16 has not the range. In tiles of 16 heads from 8 tiles on: on an H200, 300 x 16, 32 x 16,
    8 x 16 rows take 194, 36.5, 20.0 us so for 212, 39.6, 19.7, fp8_ds_mla 232, 40.1, 22.1 for 249, 40.6, 21.6. Where
    warps share the dims: as capability 120, 128 x 64, 128 x 128 rows take 166 and 313 for 183 and 331. Of two caches in
    tiles of 32 heads, where programs in pairs walk over whole rows: 128 x 64, 128 x 128 take 86.4, 166.6 for 89.2,
    172.4, but parts (32 x 64) 46.5 for 42.2, and programs alone on an SM 241 for 227. 64 heads on SM90 in whole rows:
    flat 4,096 x 64, 128 x 128 take 2,831 and 184 for 3,066 and 193, but parts (96 x 64) 108 for 102.

    Args:
        chosen, keys: the tile, and the rows of the cache.
        dtype: of queries.
        num_keys: of a row.
        parts: of a row.
        paired: whether an SM has two programs.
    """
    if dtype != torch.bfloat16 or num_keys <= SHORT_ROW:
        return False
    if chosen.block_h == 64:
        return chosen.apart and keys.operands == "plain" and parts == 1 and not KEEPS_OPERANDS
    if chosen.block_h == 16:
        return keys.operands in ("fp8", "plain") and num_keys >= STEADY_TILES * chosen.block_n * parts
    if keys.operands == "fp8_v4":
        return paired and parts == 1
    return chosen.apart and keys.operands == "plain"


def operand_mode(q_dtype: torch.dtype, cache_format: str) -> str:
    """How keys become operands: "fp8", "fp8_v4", "plain", or in IEEE float32 "fp8_exact", "fp8_v4_exact", "exact".

    float16 and float32 queries do not fit bfloat16 operands, and the RoPE part of the quantised formats does not fit
    float16, so they read such a cache through float32.
    """
    if cache_format in ("fp8_ds_mla", "fp8_ds_mla_v4"):
        mode = "fp8" if cache_format == "fp8_ds_mla" else "fp8_v4"
        return mode if q_dtype == torch.bfloat16 else f"{mode}_exact"
    return "exact" if q_dtype == torch.float32 else "plain"


def operand_modes(q_dtype: torch.dtype, cache_format: str, extra_cache_format: str) -> tuple[str, str]:
    """The `operand_mode` of two caches, which are read through float32 together or not at all."""
    mode, extra_mode = operand_mode(q_dtype, cache_format), operand_mode(q_dtype, extra_cache_format)
    if mode.endswith("exact") and extra_mode == "plain":
        return mode, "exact"
    if extra_mode.endswith("exact") and mode == "plain":
        return "exact", extra_mode
    return mode, extra_mode


def has_its_sm(device_capability: tuple[int, int], chosen: Tile) -> bool:
    """Whether programs of a tile are alone on their SM: by registers, or small ones by shared memory."""
    return chosen.num_warps == 8 or (chosen.block_h == 16 and device_capability[0] not in (9, 10))


def looks_at_indices(keys: Keys, chosen: Tile, partial: bool, has_length: bool) -> bool:
    """Whether a program looks for the first key that is missing, since tiles without masks take less time.

    Not if a part of a row waits for its length before, nor where two loops would spill: from Triton 3.9 on, and where
    four warps convert e4m3 by arithmetic.
    """
    if keys.operands not in ("fp8_half", "plain") or not chosen.apart or KEEPS_OPERANDS:
        return False
    return not (partial and has_length) and not (keys.decode == "packed" and chosen.num_warps == 4)


def keeps_indices(chosen: Tile, out: torch.Tensor, num_keys: int, parts: int) -> bool:
    """Whether a program that looks for missing keys writes the indices of others anew: Options.keeps.

    Parts without missing keys take 1.01 of the time so, with some 0.93 to 0.98: not short ones, nor of 64 heads over
    fp8_ds_mla (1.00). Nor where eight warps have 32 heads: on an H200 as capability 120, alone on an SM, 128 x 128 rows
    without missing keys take 529 us so and 496 else, bfloat16 418 and 412.

    Args:
        chosen: the tile.
        out: the output, in which a program's rows have room for the indices, a tile more, and KEPT_AT words, or not.
        num_keys, parts: of a row.
    """
    if chosen.block_h == 32 and chosen.num_warps == 8:
        return False
    if parts > 1 and (num_keys < KEPT_LEAST * parts or (chosen.block_h == 64 and chosen.half)):
        return False
    _, num_heads, width = out.shape
    heads = (num_heads - 1) % chosen.block_h + 1  # of a token's last program
    words = heads * width * out.element_size() // 4
    on_words = out.data_ptr() % 4 == 0 and out.stride(0) * out.element_size() % 4 == 0
    return on_words and out.stride(1) == width and KEPT_AT.value + num_keys + chosen.block_n <= words


def spares_copies(chosen: Tile, keys: Keys, num_keys: int, parts: int, keeps: bool = False) -> bool:
    """Whether a program looks whether all indices of its row are one: Options.copies.

    Not parts of more than 16 heads, which take 1.02 of the time so, nor where plain keys are masked, not `keeps`:
    registers spill, and eight warps of 32 heads take 1.04 where keys are missing.
    """
    if keys.operands.endswith("exact") or num_keys < STEADY_TILES * chosen.block_n * parts:
        return False
    masked = keys.operands == "plain" and chosen.apart and not keeps
    return chosen.block_h == 16 or (parts == 1 and not masked)


@dataclass(frozen=True, eq=False)
class Options(Constant):
    """All constants of a kernel.

    Attributes:
        keys: the rows of the cache.
        tile: sizes of a program.
        rope: whether queries and keys have 64 dims behind 512.
        q_unit, out_unit: elements that strides of queries and of the output are counted in.
        partial: whether the output is a part of a row, with an lse in base 2.
        looks: whether the first indices are looked at, for tiles of keys without masks.
        steady: whether weights are about the largest score of a program's first tile, or of 16 keys all over its row,
            and about no later one.
        keeps: whether the indices of keys that are there are written anew, to where the output will be, where a key is
            missing.
        copies: whether a row whose indices are all one takes the time of a tile: SMs would wait for its lines of L2.
        whole: whether a tile of keys lies in one block, in dense attention.
        extra_keys: the rows of the second of two caches.
        packed: whether tokens of one request share a program.
        upcast: whether products are those of the interpreter.
    """

    keys: Keys
    tile: Tile
    rope: bool
    q_unit: int
    out_unit: int = 1
    partial: bool = False
    looks: bool = False
    steady: bool = False
    keeps: bool = False
    copies: bool = False
    whole: bool = False
    extra_keys: Keys | None = None
    packed: bool = False
    upcast: bool = INTERPRETED

    def of_extra_cache(self) -> "Options":
        return replace(self, keys=self.extra_keys)

    def walks_alike(self) -> bool:
        """Whether a second walk has the tiles of the first."""
        return self.steady and self.tile.block_h == 64

    def of_second_walk(self) -> "Options":
        """A walk about the largest score, no scales in operands: where scores or scales are rare ones."""
        if self.walks_alike():
            return replace(self, steady=False, looks=False, keeps=False)
        keys = self.keys.with_operands("fp8") if self.tile.half else self.keys
        return replace(self, keys=keys, tile=self.tile.narrow(), steady=False, keeps=False)


# made once, as keys are
attention_options = functools.cache(Options)


@triton.constexpr_function
def of_extra_cache(options):
    return options.of_extra_cache()


@triton.constexpr_function
def of_second_walk(options):
    return options.of_second_walk()


@triton.constexpr_function
def walks_alike(options):
    return options.walks_alike()
