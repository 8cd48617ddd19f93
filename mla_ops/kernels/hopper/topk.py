"""The best k columns of rows of scores on SM90: exact, by a CTA or a cluster for each row."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, NamedTuple

import torch

from ...dispatch import Call
from ..cuda.compiler import RESERVED_SHARED_BYTES
from ..cuda.driver import Function, num_sms
from ..cuda.params import POINTER, packer
from . import sources
from .launch import Kernel, compile_reason

MAX_COLUMNS = 2**21
CLUSTERS = (2, 4, 6, 8, 16)  # CTAs of a row that is shared
LEAST_OF_A_CTA = 4096  # columns
LONG_ROW = 65536
MOST_BY_PLANES = 2 * LONG_ROW
BINS = 2048
CONTROL_BYTES = 1520
AHEAD_BYTES = 2**20  # a cluster asks for whole rows before it knows their lengths, if that is no more
MAX_CLUSTER = 16
CLUSTER_BINS = 256  # of a cluster that counts together
SLOTS = 4096  # entries of the bin in which such a cluster's k-th best lies, at most
SM_SHARED_BYTES = 228 * 1024
# More than half of an SM, so that no two CTAs of a cluster lie on one: they would behind scores, whose CTAs do not all
# leave at one time, and slow each other down (docs/notes.md). There is room beside a CTA of scores of 32 heads.
ALONE_BYTES = SM_SHARED_BYTES // 2 - RESERVED_SHARED_BYTES + 16


class Params(ctypes.Structure):
    """The struct of topk_params.cuh."""

    _fields_ = [
        ("scores", POINTER),
        ("starts", POINTER),
        ("ends", POINTER),
        ("indices", POINTER),
        ("lengths", POINTER),
        ("block_table", POINTER),
        ("requests", POINTER),
        ("pitch", ctypes.c_int64),
        ("indices_pitch", ctypes.c_int64),
        ("table_pitch", ctypes.c_int64),
        ("num_rows", ctypes.c_uint),
        ("num_columns", ctypes.c_int),
        ("k", ctypes.c_int),
        ("table_width", ctypes.c_int),
        ("num_requests", ctypes.c_int),
        ("block_size", ctypes.c_int),
        ("known_only", ctypes.c_int),
        ("cluster", ctypes.c_uint),
        ("capacity", ctypes.c_uint),
        ("least", ctypes.c_uint),
        ("gated", ctypes.c_uint),
        ("sampled", ctypes.c_uint),
        ("spare", ctypes.c_uint),
        ("deviations", ctypes.c_float),
        ("sorted", ctypes.c_int),
        ("turn_bits", ctypes.c_uint),
        ("ahead", ctypes.c_int),
    ]


pack_params = packer(Params)


class Plan(NamedTuple):
    """The way in which rows are read.

    Attributes:
        threads: of a CTA.
        vectors: of 4 columns that a thread takes at one time: a chunk.
        sample_vectors: of 4 columns of the sample, for which a thread has room.
        ctas: of an SM, at least.
        cluster: CTAs of a row.
        least: columns that a CTA takes at least, so that short rows need fewer of them.
        gated: columns of a row from which on a sample gives a gate.
        sampled: columns of a sample, a multiple of 16.
        spare: part of the gate's rank in a sample by which it may lie below it: a half makes a gate in less time, which
            lets more pass.
        deviations: by which the gate's rank in a sample is more than its mean: a row whose gate fails is read again.
        short: registers of a CTA hold all columns; only `threads`, `vectors` and `ctas` mean something then.
        planes: scores lie by planes (planes.cuh).
        long: rows by planes may have more than 65,536 columns.
        held: vectors of a thread that registers of a cluster hold, whose CTAs count together; 0: entries do rows.
    """

    threads: int
    vectors: int
    sample_vectors: int
    ctas: int
    cluster: int = 1
    least: int = 2048
    gated: int = 8192
    sampled: int = 2048
    spare: int = 8
    deviations: float = 5
    short: bool = False
    held: int = 0
    planes: bool = False
    long: bool = False

    @property
    def kernel(self) -> Kernel:
        if self.held:
            name = f"topk_cluster_rows<{self.threads}, {self.held}>"
        elif self.short:
            name = f"topk_short_rows<{self.threads}, {self.vectors}, {self.ctas}>"
        else:
            sizes = f"{self.threads}, {self.vectors}, {self.sample_vectors}, {self.ctas}"
            name = f"topk_rows<{sizes}{', true' * (self.planes + self.long)}>"
        return Kernel("topk.cu", name, self.threads, ctas=self.ctas)

    @property
    def chunk(self) -> int:
        return 4 * self.threads * self.vectors

    def capacity(self, topk: int) -> int:
        """Entries that a CTA has room for: the best, a chunk, another one if an SM has room; a power of two to sort."""
        least = topk + self.chunk
        rooms = (
            (SM_SHARED_BYTES // ctas - RESERVED_SHARED_BYTES - CONTROL_BYTES - 4 * BINS) // 8
            for ctas in range(self.ctas, 0, -1)
        )
        room = next((room for room in rooms if room >= least), least)  # where fewer CTAs fit, each has more
        entries = min(least + self.chunk, room)
        return max(entries + entries % 2, 1 << max(topk - 1, 1).bit_length())

    @property
    def held_columns(self) -> int:
        """Columns of a CTA of a cluster that counts together."""
        return 4 * self.threads * self.held

    @property
    def turn_bits(self) -> int:
        """Each CTA of such a cluster writes the columns that 2**turn_bits loads of a warp of each CTA bring."""
        turns = self.held * self.threads // 32
        return (-(-turns // self.cluster) - 1).bit_length() if self.held else 0

    def meets(self, topk: int, num_columns: int) -> bool:
        """Whether registers of a cluster hold a row, in groups small enough to tell where bins begin."""
        return (
            self.cluster > 1
            and num_columns <= self.cluster * self.held_columns
            and 4 * self.held * topk <= 3 * num_columns
        )

    def shared_bytes(self, topk: int) -> int:
        """Dynamic shared memory of a CTA, as `Selection` and `select_short` lay it out."""
        if self.short:
            return CONTROL_BYTES + 4 * BINS + (8 << max(topk - 1, 1).bit_length())
        words = self.cluster << self.turn_bits + 2  # of bits, one a thread at most
        of_cluster = 8 * SLOTS + MAX_CLUSTER * CLUSTER_BINS + self.threads * self.held + 4 * words
        least = ALONE_BYTES if self.cluster > 1 else 0
        return max(CONTROL_BYTES + 4 * BINS + max(8 * self.capacity(topk), of_cluster), least)


SHORT = (Plan(512, 2, 0, 2, short=True), *(Plan(1024, vectors, 0, 1, short=True) for vectors in (2, 4)))
FEW = Plan(1024, 2, 1, 1)
BESIDE_SCORES = Plan(512, 1, 2, 1)  # an SM has room for it and a CTA of scores of one token
MEETINGS = (*(BESIDE_SCORES._replace(held=held) for held in (2, 4)), *(FEW._replace(held=held) for held in (4, 6)))
MANY = Plan(256, 2, 2, 4)
# With a gate from 5,888 columns on, all rows that have none find room for a word a column.
BY_PLANES = MANY._replace(gated=5888, planes=True)
FEW_BY_PLANES = BY_PLANES._replace(threads=512, ctas=2)  # while no SM has more rows than two
LONG_BY_PLANES = FEW_BY_PLANES._replace(long=True, sampled=4096)
ALL_BY_PLANES = (BY_PLANES, FEW_BY_PLANES, LONG_BY_PLANES)
KERNELS = tuple(plan.kernel for plan in (*SHORT, FEW, *MEETINGS, MANY, *ALL_BY_PLANES))


def deviations_for(num_rows: int) -> float:
    """Five for one row to seven for 512: a launch waits for its slowest row. Six beyond, where other rows hide it."""
    bits = math.log2(num_rows)
    return 5 + bits * 2 / 9 if bits <= 9 else max(7 - (bits - 9) / 2, 6)


def plan_for(
    num_rows: int, num_columns: int, num_sms: int, at_once: tuple[int, ...], topk: int, *, sorted: bool = False
) -> Plan:
    """Chooses by sizes that the host knows; lengths of rows are the device's.

    Args:
        num_rows: of scores.
        num_columns: counted from a multiple of 16 bytes.
        num_sms: of the device.
        at_once: clusters of each size in `CLUSTERS` that run at one time. A cluster lies in one group of SMs, so they
            are fewer than SMs over CTAs, and a second wave takes twice the time.
        topk: columns that are wanted of a row.
        sorted: the best first.
    """
    if num_rows > num_sms and num_columns > SHORT[0].chunk:
        return MANY._replace(deviations=deviations_for(num_rows))
    for plan in SHORT:
        if num_columns <= plan.chunk:
            return plan
    fitting = [size for size, clusters in zip(CLUSTERS, at_once, strict=True) if num_rows <= clusters]
    meetings = (plan._replace(cluster=size) for plan in MEETINGS for size in fitting)
    holding = (plan for plan in meetings if plan.meets(topk, num_columns) and not sorted)
    most = max((size for size in fitting if LEAST_OF_A_CTA * size <= num_columns), default=1)
    plan = next(holding, FEW._replace(cluster=most))
    sampled, spare = 4096 if num_columns > LONG_ROW else 2048, 2 if plan.cluster <= CLUSTERS[1] else 8
    return plan._replace(sampled=sampled, spare=spare, deviations=deviations_for(num_rows))


def takes_planes(num_rows: int, num_columns: int, num_sms: int, topk: int) -> bool:
    """Whether scores should lie by planes: there is room for what a gate lets pass, and words count so many columns."""
    # 256 threads take too small a sample of a long row, so gates fail (docs/notes/indexer.md)
    most = MOST_BY_PLANES if num_rows <= FEW_BY_PLANES.ctas * num_sms else LONG_ROW
    return num_rows > num_sms and SHORT[0].chunk < num_columns <= most and topk <= 2048


def plan_by_planes(num_rows: int, num_columns: int, num_sms: int) -> Plan:
    """Chooses for rows whose scores lie by planes."""
    if num_columns > LONG_ROW:  # neighbours that score alike leave less of a sample
        return LONG_BY_PLANES._replace(deviations=deviations_for(num_rows) + 3)
    plan = FEW_BY_PLANES if num_rows <= FEW_BY_PLANES.ctas * num_sms else BY_PLANES
    return plan._replace(deviations=deviations_for(num_rows))


def spread_bytes(num_ctas: int, num_sms: int) -> int:
    """Shared memory of a CTA with which no SM takes more of them than its share.

    Behind scores, whose CTAs do not all leave at one time, SMs that are free first would take more, others none.
    """
    share = -(-num_ctas // num_sms)
    return SM_SHARED_BYTES // (share + 1) - RESERVED_SHARED_BYTES + 16


def aligned_columns(scores: torch.Tensor) -> int:
    """Columns of a row counted from the multiple of 16 bytes in front of it, at most."""
    whole = scores.data_ptr() % 16 == 0 and scores.stride(0) % 4 == 0
    return scores.shape[1] + (0 if whole else 3)


def pack(
    plan: Plan,
    scores: torch.Tensor,
    topk: int,
    *,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    req_id_per_token: torch.Tensor | None = None,
    block_size: int = 0,
    sorted: bool = False,
    num_requests: int | None = None,
    indices: torch.Tensor,
    valid_counts: torch.Tensor,
) -> bytes:
    """`struct Params`. With `num_requests`, rows of a request that there is not have no columns."""
    num_rows, num_columns = scores.shape
    known_only = num_requests is not None
    of_table, table_width = (0, 0) if block_table is None else block_table.shape
    return pack_params(
        scores.data_ptr(),
        0 if row_starts is None else row_starts.data_ptr(),
        0 if row_ends is None else row_ends.data_ptr(),
        indices.data_ptr(),
        valid_counts.data_ptr(),
        0 if block_table is None else block_table.data_ptr(),
        0 if req_id_per_token is None else req_id_per_token.data_ptr(),
        scores.stride(0),
        indices.stride(0),
        0 if block_table is None else block_table.stride(0),
        num_rows,
        num_columns,
        topk,
        table_width,
        of_table if num_requests is None else num_requests,
        0 if block_table is None else block_size,
        int(known_only),
        plan.cluster,
        plan.capacity(topk),
        -(-plan.least // 4),
        max(plan.gated, plan.sampled + 8),
        plan.sampled // 4,
        plan.spare,
        plan.deviations,
        int(sorted),
        plan.turn_bits,
        plan.held * (4 * num_rows * num_columns <= AHEAD_BYTES),
    )


@functools.cache
def _at_once(device_index: int, topk: int) -> tuple[int, ...]:
    """Clusters of each size that the device runs at one time, from the driver."""
    kernel = _loaded(device_index)[FEW.kernel]
    shared_bytes = FEW.shared_bytes(topk)
    return tuple(kernel.occupancy_clusters((FEW.threads, 1, 1), shared_bytes, (size, 1, 1)) for size in CLUSTERS)


@functools.cache
def _loaded(device_index: int) -> dict[Kernel, Function]:
    """All of them, so that whichever was run before a capture, none is compiled during it."""
    return {kernel: sources.load(kernel.source, kernel.name, device_index) for kernel in KERNELS}


def topk_indices(
    scores: torch.Tensor, topk: int, *, programmatic: bool = False, planes: bool = False, **rest: Any
) -> None:
    """Runs the op's `.out`.

    With `programmatic` it begins beside the end of the launch in front, which makes the scores and nothing else that
    is read here. With `planes` the scores are those that `takes_planes` asked for.
    """
    num_rows = scores.shape[0]
    if num_rows == 0:
        return
    device_index = scores.device.index
    if planes:
        plan = plan_by_planes(num_rows, scores.shape[1], num_sms(device_index))
    else:
        plan = plan_for(
            num_rows,
            aligned_columns(scores),
            num_sms(device_index),
            _at_once(device_index, topk),
            topk,
            sorted=rest.get("sorted", False),
        )
    num_ctas = num_rows * plan.cluster
    least_bytes = spread_bytes(num_ctas, num_sms(device_index)) if programmatic else 0
    _loaded(device_index)[plan.kernel].launch(
        (num_ctas, 1, 1),
        (plan.threads, 1, 1),
        max(plan.shared_bytes(topk), least_bytes),
        (plan.cluster, 1, 1),
        pack(plan, scores, topk, **rest),
        programmatic=programmatic,
    )


def topk_reason(call: Call) -> str | None:
    if call.num_keys > MAX_COLUMNS:
        return f"it takes rows of up to {MAX_COLUMNS} columns, these have {call.num_keys}"
    return compile_reason()
