"""Launching the sparse attention kernels: which one, its tile of heads, the CTAs of a cluster, the parameters."""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import nvrtc

PARAMS = "@6Q6q" + 2 * "4Q3q5i4x" + "2if4x"  # struct Params
KEYS = 64  # of a turn
MAX_GRID_ROWS = 32768
SPLITS = (1, 2, 3, 4, 6, 8, 16)
DETERMINISTIC_TURNS = 8  # of a CTA at most, as far as SPLITS go


@dataclass(frozen=True)
class Keys:
    """What a kernel reads: one format, one width.

    Attributes:
        source: file.
        kernel: name expression, of the tile of heads.
        row_bytes: of a key.
        chunks: of 64 dims, of a query.
        quantized: whether keys are converted on their way.
        scale_bytes: of a key's scales where they lie apart.
        turn_us: microseconds of a turn of 64 keys on one H200 (docs/kernels.md), by tile.
        row_us: what a row costs besides, by tile.
        merge_us: what the merge of one part by one CTA costs, by tile; a cluster's CTAs share it.
    """

    source: str
    kernel: str
    row_bytes: int
    chunks: int
    quantized: bool
    scale_bytes: int
    turn_us: dict[int, float]
    row_us: dict[int, float]
    merge_us: dict[int, float]

    def __hash__(self) -> int:
        return hash(self.kernel)

    def kernel_name(self, tile: int) -> str:
        return self.kernel.format(tile=tile)

    def num_threads(self, tile: int) -> int:
        """Threads of a CTA: `Layout<..>::THREADS`."""
        return 640 if self.quantized and tile < 64 else 512

    @functools.cache  # noqa: B019 - there are as many as formats
    def shared_bytes(self, tile: int) -> int:
        """Dynamic shared memory of a CTA: `Layout<..>::BYTES`."""
        queries_and_weights = (self.chunks + 1) * tile * 128
        if not self.quantized:
            stages = 3 if tile == 16 and self.chunks == 8 else 2
            turn = queries_and_weights + stages * KEYS * self.row_bytes + tile * 12 + stages * 16
            return -(-(turn + 4) // 8) * 8 + stages * 16 + 16
        stages = 3 if tile == 16 or (tile == 32 and self.chunks == 8) else 2
        columns = queries_and_weights + KEYS * 1024 + stages * KEYS * self.row_bytes
        barriers = -(-(columns + tile * 12 + stages * (16 + KEYS * self.scale_bytes) + 4) // 8) * 8
        scores = barriers + stages * 64 + 8 + 32
        return scores if tile == 64 else -(-(scores + 32) // 16) * 16 + 2 * tile * 256


FP8_TIMES = ({16: 1.61, 32: 2.1, 64: 2.39}, {16: 10.5, 32: 11.7, 64: 15.5}, {16: 1.0, 32: 2.0, 64: 10.0})
BF16_TIMES = ({16: 1.45, 32: 1.9, 64: 2.35}, {16: 10.5, 32: 12.0, 64: 14.0}, {16: 1.0, 32: 2.0, 64: 10.0})

FP8 = "sparse_attention<{{tile}}, {0}>"
BF16 = "sparse_attention_bf16<{{tile}}, {0}>"

# By cache format and width of a key.
KERNELS = {
    ("fp8_ds_mla", 576): Keys("sparse_attention.cu", FP8.format("FP8_DS_MLA"), 656, 9, True, 0, *FP8_TIMES),
    ("fp8_ds_mla_v4", 512): Keys("sparse_attention.cu", FP8.format("FP8_DS_MLA_V4"), 576, 8, True, 8, *FP8_TIMES),
    ("bf16", 576): Keys("sparse_attention_bf16.cu", BF16.format(576), 1152, 9, False, 0, *BF16_TIMES),
    ("bf16", 512): Keys("sparse_attention_bf16.cu", BF16.format(512), 1024, 8, False, 0, *BF16_TIMES),
}
TILES = (16, 32, 64)


class Shape(NamedTuple):
    """What a launch is made of: heads of a tile, CTAs of a cluster."""

    tile: int
    splits: int


def tiles_for(num_heads: int) -> tuple[int, ...]:
    """Tiles worth a thought, the one that fits best first."""
    if num_heads <= 16:
        return (16,)
    return (32, 16) if num_heads <= 32 else (64, 32, 16)


def choose(keys: Keys, num_tokens: int, num_heads: int, topk: int, clusters_at_once: tuple[int, ...]) -> Shape:
    """The least predicted time, from shapes alone.

    Args:
        keys: the kernel.
        num_tokens: query tokens.
        num_heads: heads.
        topk: columns of the indices.
        clusters_at_once: clusters that the device runs at one time, for each size in `SPLITS`.
    """
    turns = max(1, -(-topk // KEYS))

    def time(shape: Shape) -> float:
        rows = num_tokens * -(-num_heads // shape.tile)
        rounds = -(-rows // clusters_at_once[SPLITS.index(shape.splits)])
        merge = keys.merge_us[shape.tile] / shape.splits if shape.splits > 1 else 0.0
        return rounds * (-(-turns // shape.splits) * keys.turn_us[shape.tile] + keys.row_us[shape.tile] + merge)

    return min((Shape(tile, n) for tile in tiles_for(num_heads) for n in SPLITS if n <= turns), key=time)


def choose_deterministic(num_heads: int, topk: int) -> Shape:
    """What depends on nothing but a row's own capacity, so that its bits do not depend on the batch."""
    turns = max(1, -(-topk // KEYS))
    enough = (splits for splits in SPLITS if splits * DETERMINISTIC_TURNS >= turns)
    return Shape(tiles_for(num_heads)[0], next(enough, SPLITS[-1]))


@functools.cache
def _clusters_at_once(keys: Keys, tile: int, device_index: int) -> tuple[int, ...]:
    kernel = nvrtc.load(keys.source, keys.kernel_name(tile), device_index)
    block, shared = (keys.num_threads(tile), 1, 1), keys.shared_bytes(tile)
    return tuple(kernel.occupancy_clusters(block, shared, (splits, 1, 1)) for splits in SPLITS)


@functools.lru_cache(maxsize=4096)
def _shape(keys: Keys, num_tokens: int, num_heads: int, topk: int, deterministic: bool, device_index: int) -> Shape:
    if deterministic:
        return choose_deterministic(num_heads, topk)
    return choose(keys, num_tokens, num_heads, topk, _clusters_at_once(keys, tiles_for(num_heads)[0], device_index))


_zero_rows: dict[tuple[torch.device, Keys], torch.Tensor] = {}


def _zero_row(device: torch.device, keys: Keys) -> torch.Tensor:
    """A row of zeros, scales in it 1, that stands for every key which is not attended."""
    row = _zero_rows.get((device, keys))
    if row is None:
        row = torch.zeros(keys.row_bytes // 4, dtype=torch.float32, device=device)
        if keys.quantized and not keys.scale_bytes:
            row[128:132] = 1.0
        if not torch.cuda.is_current_stream_capturing():
            # Other streams may use it from now on. One made during a capture belongs to that graph alone.
            torch.cuda.current_stream(device).synchronize()
            _zero_rows[device, keys] = row
    return row


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _loads_16_bytes(tensor: torch.Tensor) -> bool:
    unit = 16 // tensor.element_size()
    return tensor.stride(0) % unit == 0 and tensor.stride(1) % unit == 0 and tensor.data_ptr() % 16 == 0


class Rows(NamedTuple):
    """Keys in memory: `index = block * block_size + offset`."""

    tensor: torch.Tensor
    num_blocks: int
    block_size: int
    block_stride: int


def cache_params(
    rows: Rows, indices: torch.Tensor, topk_length: torch.Tensor | None, block_table: torch.Tensor | None
) -> tuple[int, ...]:
    """The fields of `struct Cache`."""
    num_requests, table_width = (0, 0) if block_table is None else block_table.shape
    return (
        rows.tensor.data_ptr(),
        indices.data_ptr(),
        _pointer(topk_length),
        _pointer(block_table),
        indices.stride(0),
        rows.block_stride,
        0 if block_table is None else block_table.stride(0),
        indices.shape[1],
        rows.num_blocks,
        rows.block_size,
        table_width,
        num_requests,
    )


NO_CACHE = (0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0)


def launch(
    keys: Keys,
    q: torch.Tensor,
    cache: tuple[int, ...],
    extra_cache: tuple[int, ...],
    topk: int,
    softmax_scale: float,
    *,
    attn_sink: torch.Tensor | None,
    req_id_per_token: torch.Tensor | None,
    deterministic: bool,
    out: torch.Tensor,
    lse: torch.Tensor,
    shape: Shape | None = None,
) -> None:
    """One kernel; `topk` counts the turns of both caches, `shape` overrides the choice for measurements."""
    num_tokens, num_heads, _ = q.shape
    device_index = q.device.index
    if not _loads_16_bytes(q):
        q = q.contiguous()
    target = out if _loads_16_bytes(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    tile, splits = shape or _shape(keys, num_tokens, num_heads, topk, deterministic, device_index)
    params = struct.pack(
        PARAMS,
        q.data_ptr(),
        _zero_row(q.device, keys).data_ptr(),
        _pointer(attn_sink),
        _pointer(req_id_per_token),
        target.data_ptr(),
        lse.data_ptr(),
        q.stride(0),
        q.stride(1),
        target.stride(0),
        target.stride(1),
        lse.stride(0),
        lse.stride(1),
        *cache,
        *extra_cache,
        num_tokens,
        num_heads,
        softmax_scale * math.log2(math.e),
    )
    rows = min(num_tokens, MAX_GRID_ROWS)
    nvrtc.load(keys.source, keys.kernel_name(tile), device_index).launch(
        (-(-num_heads // tile) * splits, rows, -(-num_tokens // rows)),
        (keys.num_threads(tile), 1, 1),
        keys.shared_bytes(tile),
        (splits, 1, 1),
        params,
    )
    if target is not out:
        out.copy_(target)


@functools.cache
def compile_reason(keys: Keys) -> str | None:
    """Why the kernels of a format cannot be compiled here, or None."""
    reason = nvrtc.reason()
    if reason is not None:
        return reason
    try:
        for tile in TILES:
            nvrtc.compile(keys.source, keys.kernel_name(tile))
    except nvrtc.CompileError as error:
        return f"the installed NVRTC does not compile the Hopper kernels: {error}"
    return None
