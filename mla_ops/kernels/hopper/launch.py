"""Launching the sparse attention kernels: which one, its tile of heads, the CTAs of a cluster, the parameters."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...dispatch import Missing
from ...formats import FORMATS, LATENT_DIM
from ..cuda.driver import NO_CLUSTER
from . import groups, sources
from .params import CacheParams, pack, pointer, reciprocal

TILE_KEYS = 64  # keys of a turn
MAX_GRID_ROWS = 32768
SPLITS = (*range(1, 15), 16)  # layout.cuh has the same; packets of 15 CTAs do not fit


# Rows of a CTA from which on their kernel may have code for turns by group (`by_group.cuh`): the start and the end of a
# CTA's work pay for it, 1 % where that is one row.
MANY_ROWS = 3
MOST_SHARES = 8  # a row has no more if its parts are added up in memory (`shares.cuh`)
MOST_IN_REGISTERS = 16  # the same if CTAs keep shares in registers, `MOST_SHARES` in layout.cuh
# tiles of heads whose registers hold shares (`held.cuh`, `folds.cuh`), and the most shares of a CTA of a cluster
MOST_OF_A_CTA = {16: 4, 32: 3}
NARROW = (16, 32)  # heads of tiles that a kernel gives the bits of larger ones


class Clusters(NamedTuple):
    """A launch by clusters: they merge the splits of a row in distributed shared memory.

    Attributes:
        tile: heads of a CTA.
        splits: CTAs of a cluster, each with a share of the keys.
        parts: clusters that share a row. Several leave float32 `[parts, num_tokens, num_heads, 512]`, which
            `merge_parts` merges.
        shares: of a row's keys, of which each CTA takes every `splits`-th one, one after the other; bits then do not
            depend on `splits` (`shares.cuh`). 0: each CTA has one.
        bits_of: heads of a larger tile whose bits it gives; 0: it gives its own.
    """

    tile: int
    splits: int
    parts: int = 1
    shares: int = 0
    bits_of: int = 0


def in_registers(shape: Clusters) -> bool:
    """Whether CTAs keep shares of a row in registers: one their sum, those of a cluster each of them."""
    return shape.shares > 0 and shape.tile in MOST_OF_A_CTA


class Group(NamedTuple):
    """A launch by groups: CTAs of no cluster share a row and merge it through L2 (`group.cuh`).

    Attributes:
        members: CTAs of a group.
    """

    members: int

    @property
    def tile(self) -> int:
        """Heads of a CTA, the same for every group."""
        return groups.TILE


Shape = Clusters | Group
MOST_ROWS, MOST_CTAS = 32, 256  # row_ctas.cuh has the same


class ByLength(NamedTuple):
    """When the rows of a launch go by their lengths, which only the device knows: each to as many CTAs as it asks for.

    They do where `longest` times the longest row is more than the quota and `margin`, in turns (`row_ctas.cuh`).

    Attributes:
        count: CTAs, or where `longest` is 0 clusters, for each tile of heads.
        splits: CTAs that have a part of a row together: of a cluster, or one.
    """

    count: int
    longest: float
    margin: float
    splits: int


BY_SHAPE = ByLength(0, 0.0, 0.0, 0)


def leaves_units(shape: Shape, by_length: ByLength | None) -> bool:
    """Whether CTAs that have a part of a row alone leave it as 16-bit averages, which `merge_units.cu` adds up."""
    return by_length is not None and by_length.splits == 1 and shape.tile == 64


class Balance(NamedTuple):
    """When a call's rows are shared evenly (`balance.cuh`), which only the device knows, and among how many workers.

    They are where `longest` times the longest row is more than a worker's share and `margin`, in turns.

    Attributes:
        tile: heads of a CTA of a launch that has this for its only work, behind the others; 0: the first launch of the
            call has a kernel that takes either way.
        workers: shares; each is of a CTA for every tile of heads.
    """

    tile: int
    workers: int
    longest: float
    margin: float


class Kernel(NamedTuple):
    """A compiled function: where it is, what a CTA takes.

    Attributes:
        source: file.
        name: expression of the template.
        threads: of a CTA.
        persistent: a CTA takes one row after the other. The grid has one dimension then, tiles of heads fastest, and
            need not be larger than what runs at one time.
        ctas: of an SM.
    """

    source: str
    name: str
    threads: int
    persistent: bool = False
    ctas: int = 1


@dataclass(frozen=True)
class KeyFormat:
    """The keys that a kernel reads: one format, one width.

    Attributes:
        name: of the format, as a template's argument.
        row_bytes: of a key.
        chunks: of 64 dims, of a query.
        quantized: whether keys are converted on their way.
        scale_bytes: of a key's scales where they lie apart.
        tiles: heads of a CTA that there are kernels for.
    """

    name: str
    row_bytes: int
    chunks: int
    quantized: bool
    scale_bytes: int
    tiles: tuple[int, ...]

    @functools.cache  # noqa: B019 - there are as many as formats
    def balanced_kernel(self, shape: Shape, oversubscribed: bool = False) -> Kernel | None:
        """The kernel of a launch that shares rows evenly if their lengths on the device say so.

        None where registers do not suffice for both ways, or half of an SM's shared memory.
        """
        kernel = self.kernel(shape, oversubscribed)
        if shape.tile == 32 or (isinstance(shape, Clusters) and shape.shares):
            return None
        if self.quantized:
            name = kernel.name.replace("pairs", "clusters")
            return kernel._replace(name=name.replace("attention_", "attention_balanced_"))
        if shape.tile == 64:
            return kernel._replace(name=kernel.name.replace("64_", "64_balanced_")) if kernel.persistent else None
        name = f"sparse_attention_bf16_balanced<{shape.tile}, {self.chunks * 64}>"
        return kernel._replace(name=name) if kernel.ctas == 1 else None

    @functools.cache  # noqa: B019 - there are as many as formats
    def yielding_kernel(self, shape: Shape, oversubscribed: bool = False) -> Kernel | None:
        """The kernel of a launch that ends at once where another launch of the call shares its rows evenly.

        None for rows in shares, which are never shared evenly.
        """
        kernel = self.kernel(shape, oversubscribed)
        if isinstance(shape, Clusters) and shape.shares:
            return None
        return kernel._replace(name=kernel.name.replace(">", ", true>"))

    @functools.cache  # noqa: B019 - there are as many as formats
    def kernel_by_length(self, shape: Shape) -> Kernel | None:
        """The kernel of a launch whose rows go by their lengths, or by its shape; None for groups and shares."""
        if not isinstance(shape, Clusters) or shape.shares:
            return None
        kernel = self.kernel(Clusters(shape.tile, 3))
        return kernel._replace(source=kernel.source.replace(".cu", "_by_length.cu"))

    @functools.cache  # noqa: B019 - there are as many as formats
    def kernel(self, shape: Shape, oversubscribed: bool = False, many_rows: bool = False) -> Kernel:
        """The kernel of a launch.

        Args:
            oversubscribed: there are more CTAs than SMs.
            many_rows: CTAs take one row after the other, `MANY_ROWS` or more, and bits may depend on the launch.

        Raises:
            ValueError: these keys have no kernel for groups, or for shares, or not for so many.
        """
        tile, grouped = shape.tile, isinstance(shape, Group)
        if grouped and not self.quantized:
            raise ValueError(f"only quantised keys have a kernel for groups, got {self.name}")
        in_shares = isinstance(shape, Clusters) and shape.shares > 0
        if in_shares and not self.quantized:
            raise ValueError(f"only quantised keys have a kernel for shares, got {self.name}")
        alone = isinstance(shape, Clusters) and shape.splits == 1
        kind = "groups" if grouped else "rows" if alone else "clusters"
        if isinstance(shape, Clusters) and (shape.splits, shape.parts) == (2, 1) and tile < 64 and self.quantized:
            kind = "pairs"
        if kind == "rows" and many_rows and tile == 64 and self.name == "FP8_DS_MLA":
            kind = "many_rows"
        if isinstance(shape, Clusters) and in_shares:
            kind = "shares" if not in_registers(shape) else "folds" if alone else "held"
            if shape.bits_of:
                if tile not in NARROW or tile >= shape.bits_of or alone:
                    raise ValueError(f"clusters of tiles of {NARROW} heads have the bits of larger ones, got {shape}")
                kind = "held_by_one" if tile == 16 else "held"
            most = MOST_SHARES if kind == "shares" else MOST_IN_REGISTERS
            if kind.startswith("held"):
                most = min(most, MOST_OF_A_CTA[tile] * shape.splits)
            if shape.shares > most:
                raise ValueError(f"a row has at most {most} shares in such a launch, got {shape}")
        persistent = alone or kind == "shares"
        if self.quantized:
            name = f"sparse_attention_{kind}<{tile}, {self.name}>"
            one_scorer = tile == 64 or (tile == 32 and kind in ("folds", "held")) or kind == "held_by_one"
            return Kernel("sparse_attention.cu", name, 512 if one_scorer else 640, persistent)
        width = self.chunks * 64
        if tile == 64:
            return Kernel("sparse_attention_bf16_64.cu", f"sparse_attention_bf16_64_{kind}<{width}>", 384, persistent)
        ctas = 2 if tile == 16 and oversubscribed else 1
        return Kernel("sparse_attention_bf16.cu", f"sparse_attention_bf16<{tile}, {width}, {ctas}>", 512, ctas=ctas)

    def kernels(self) -> list[Kernel]:
        """All there are, each once."""
        shapes: list[Shape] = [Clusters(tile, splits) for tile in self.tiles for splits in (1, 2, 3)]
        if self.quantized:
            shapes += [Group(2), *(Clusters(tile, n, shares=3) for tile in self.tiles for n in (1, 2))]
            shapes.append(Clusters(16, 2, shares=3, bits_of=32))
        of = itertools.product((self.kernel, self.yielding_kernel, self.balanced_kernel), shapes, (False, True))
        every = [find(shape, oversubscribed) for find, shape, oversubscribed in of]
        every += [self.kernel_by_length(shape) for shape in shapes]
        every += [self.kernel(shape, many_rows=True) for shape in shapes]
        return list(dict.fromkeys(kernel for kernel in every if kernel))


def _quantized(cache_format: str, chunks: int, tiles: tuple[int, ...]) -> KeyFormat:
    entry = FORMATS[cache_format]
    scale_bytes = entry.scale_bytes if entry.planar else 0
    return KeyFormat(cache_format.upper(), entry.row_bytes, chunks, True, scale_bytes, tiles)


# Kernels by cache format and width of a key.
KERNELS = {
    ("fp8_ds_mla", 576): _quantized("fp8_ds_mla", 9, (16, 24, 32, 64)),
    ("fp8_ds_mla_v4", 512): _quantized("fp8_ds_mla_v4", 8, (16, 24, 32, 64)),
    ("bf16", 576): KeyFormat("BF16_576", 1152, 9, False, 0, (16, 32, 64)),
    ("bf16", 512): KeyFormat("BF16_512", 1024, 8, False, 0, (16, 32, 64)),
}


def tiles_for(keys: KeyFormat, num_heads: int) -> tuple[int, ...]:
    """Tiles worth a thought, the one that fits best first."""
    if num_heads <= 16:
        return (16,)
    return tuple(tile for tile in ((32, 64, 24, 16) if num_heads <= 32 else (64, 32, 24, 16)) if tile in keys.tiles)


def groups_for(keys: KeyFormat, num_heads: int, turns: int) -> list[Group]:
    """Groups worth a thought: of 5 a row takes longer than in a cluster of 4."""
    if not keys.quantized or tiles_for(keys, num_heads)[0] != groups.TILE:
        return []
    return [Group(members) for members in splits_for(turns) if members not in (1, 5)]


def splits_for(turns: int) -> list[int]:
    """Sizes of clusters in which the longest share of `turns` is shorter than with a CTA less."""
    return [n for n in SPLITS if n == 1 or -(-turns // n) < -(-turns // (n - 1))]


@functools.cache
def clusters_at_once(keys: KeyFormat, tile: int, device_index: int) -> tuple[int, ...]:
    """Clusters of each size in `SPLITS` that the device runs at one time, from the driver."""
    kernel = keys.kernel(Clusters(tile, 3))
    loaded = sources.load(kernel.source, kernel.name, device_index)
    block = (kernel.threads, 1, 1)
    return tuple(loaded.occupancy_clusters(block, None, (splits, 1, 1)) for splits in SPLITS)


MERGE_CTAS = 3 * 132  # so many of these run at one time


def merge_of_units(quantized: bool) -> Kernel:
    """The kernel that merges what CTAs of 64 heads leave of rows by their lengths."""
    return Kernel("merge_units.cu", f"merge_units<{str(quantized).lower()}>", 256, ctas=3)


def exchange_of_shares(keys: KeyFormat, shape: Clusters, rows: int, device: torch.device) -> torch.Tensor:
    """Memory for what CTAs leave of a row's shares: float16 accumulators, and a sum and a running maximum a lane."""
    clusters = min(rows, clusters_at_once(keys, shape.tile, device.index)[SPLITS.index(shape.splits)])
    shares = clusters * shape.shares * (2 if shape.splits > 1 else 1)  # peers may still read those of the row before
    return torch.empty(shares * (shape.tile * LATENT_DIM * 2 + 8 * 32 * 8), dtype=torch.uint8, device=device)


def launch(
    keys: KeyFormat,
    shape: Shape,
    num_tokens: int,
    q: torch.Tensor,
    caches: tuple[CacheParams, CacheParams],
    softmax_scale: float,
    *,
    q_rope: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None,
    req_id_per_token: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    parts_of_rows: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    programmatic: bool,
    all_tokens: int,
    tokens_before: int = 0,
    balance: Balance | None = None,
    exchange: torch.Tensor | None = None,
    takes_either_way: bool = False,
    by_length: ByLength | None = None,
    deterministic: bool = False,
) -> None:
    """One kernel, for the first `num_tokens` of what the tensors have.

    Args:
        q_rope: the dims of a query behind the 512th, where `q` does not have them.
        parts_of_rows: what a shape of several parts writes instead of `out` and `lse`, unless it shares rows evenly.
        programmatic: lets it begin beside the end of the launch in front, of which it may then read nothing.
        all_tokens, tokens_before: of the call, and of them those in front of this launch's.
        balance: where the call's rows may be shared evenly.
        exchange: with `balance`, room for parts, and of a group for what it exchanges; room for parts of shares.
        by_length: without `balance`, where rows may go by their lengths; `parts_of_rows` is theirs, or `exchange`
            where CTAs leave units, which are merged, too.
        takes_either_way: whether it is this launch that shares them, with all tokens of the call then.
        deterministic: whether other launches have to give the same bits; those in shares always do.
    """
    main, extra = caches
    num_heads, device_index = q.shape[1], q.device.index
    head_tiles = -(-num_heads // shape.tile)
    rows = head_tiles * num_tokens
    counters = groups.counters(device_index, 1) if takes_either_way else 0
    shares = 0
    if isinstance(shape, Group):
        splits, parts, cluster_size = shape.members, 1, 1
        if not takes_either_way:
            exchange = groups.exchange(rows, splits, q.device)
        counters = groups.counters(device_index, rows)
    else:
        splits, parts, shares = shape.splits, shape.parts, shape.shares
        cluster_size = splits
    if deterministic and not shares:
        shares = splits
    clusters = rows * parts
    at_once = clusters_at_once(keys, shape.tile, device_index)[SPLITS.index(cluster_size)]
    oversubscribed = clusters > at_once
    if by_length is not None:
        found, parts = keys.kernel_by_length(shape), by_length.count
    elif balance is not None:
        found = (keys.balanced_kernel if takes_either_way else keys.yielding_kernel)(shape, oversubscribed)
    else:
        found = keys.kernel(shape, oversubscribed, clusters >= MANY_ROWS * at_once and not deterministic)
    assert found is not None
    kernel = found
    if num_tokens == 0:
        assert balance is not None
        grid = (balance.workers * head_tiles, 1, 1)
    elif kernel.persistent:
        grid = (min(clusters, at_once) * splits, 1, 1)
    elif by_length is not None:
        ctas = by_length.count * by_length.splits
        grid = (head_tiles * splits, max(num_tokens, -(-ctas // splits)), 1)
    else:
        grid_rows = min(num_tokens, MAX_GRID_ROWS)
        grid = (head_tiles * parts * splits, grid_rows, -(-num_tokens // grid_rows))
    in_units, workers = leaves_units(shape, by_length), 0
    if balance is not None:
        workers = balance.workers
    elif in_units:
        workers = -(-parts // 2)  # of whom each has room for two parts
    latent = q.data_ptr()
    rope, rope_strides = latent + LATENT_DIM * q.element_size(), q.stride()[:2]
    if q_rope is not None:
        rope, rope_strides = q_rope.data_ptr(), q_rope.stride()[:2]
    params = pack(
        num_tokens,
        head_tiles,
        parts,
        splits,
        grid[1],
        all_tokens,
        tokens_before,
        workers,
        *reciprocal(splits),
        *reciprocal(parts),
        *reciprocal(head_tiles),
        main.lengths,
        extra.lengths,
        main.indices,
        extra.indices,
        main.indices_stride,
        extra.indices_stride,
        main.columns,
        extra.columns,
        *((by_length or BY_SHAPE)[1:3] if balance is None else (balance.longest, balance.margin)),
        pointer(req_id_per_token),
        *main.cache,
        *extra.cache,
        latent,
        rope,
        *q.stride()[:2],
        *rope_strides,
        num_heads,
        softmax_scale * math.log2(math.e),
        pointer(attn_sink),
        lse.data_ptr(),
        out.data_ptr(),
        lse.stride(0),
        lse.stride(1),
        out.stride(0),
        out.stride(1),
        *map(pointer, parts_of_rows),
        pointer(exchange),
        counters,
        shares,
    )
    sources.load(kernel.source, kernel.name, device_index).launch(
        grid, (kernel.threads, 1, 1), None, (cluster_size, 1, 1), params, programmatic=programmatic
    )
    if in_units:
        merge = merge_of_units(keys.quantized)
        sources.load(merge.source, merge.name, device_index).launch(
            (MERGE_CTAS, 1, 1), (merge.threads, 1, 1), None, NO_CLUSTER, params, programmatic=True
        )


def compile_reason() -> Missing | None:
    """Why no kernel can be compiled here, without compiling one; None if they can."""
    return sources.reason()
