"""Memory by which the CTAs of a group meet: counters that are 0 between launches, and space for their partial results.

A launch leaves its counters as it found them, so launches that follow one another share theirs, and nothing has to be
cleared. Each stream has counters of its own, and so has each stream of a capture, in whose order the graph is replayed.
They are never given back, 4 KB for a stream or a capture. A stream is known by its id, which CUDA never gives again,
where a handle may be that of a stream that was destroyed.

A graph may run a captured launch twice at the same time: as two child nodes of another graph, or instantiated twice.
Groups of the two have the same counters then, and count in sets of their own, by the number that the hardware gives
each launch (`own_set` in meeting.cuh). Launches that share rows evenly (`cuts.cuh`) have no such sets, which would take
3 to 5 us (docs/notes.md): they end with a CUDA error. Capture such a call once for each run.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator

import torch

from ...formats import LATENT_DIM
from ..cuda import driver

TILE = 64  # heads
MAX_ROWS = 128
ROW_BYTES = 32
SLOT_BYTES = MAX_ROWS * ROW_BYTES
PAGE_BYTES = 256 * SLOT_BYTES

_slots: dict[tuple[int, int, int], int] = {}
_lock = threading.Lock()


@functools.cache
def _unused(device_index: int) -> Iterator[int]:
    def addresses() -> Iterator[int]:
        while True:
            page = driver.lasting_zeros(device_index, PAGE_BYTES)
            yield from range(page, page + PAGE_BYTES, SLOT_BYTES)

    return addresses()


def counters(device_index: int, rows: int) -> int:
    """The address of those for a launch of so many rows into the current stream of a device."""
    if rows > MAX_ROWS:
        raise ValueError(f"groups have counters for {MAX_ROWS} rows, got {rows}")
    capture = driver.capture_id(device_index)
    # A stream that is captured lives as long as its capture.
    stream = torch._C._cuda_getCurrentRawStream(device_index) if capture else driver.stream_id(device_index)
    key = device_index, stream, capture
    address = _slots.get(key)
    if address is None:
        with _lock:
            address = _slots.setdefault(key, next(_unused(device_index)))
    return address


def exchange_bytes(rows: int, members: int) -> int:
    """Bytes for each CTA of a row: float16 accumulators, and a sum and a running maximum a head."""
    of_a_head = 2 * LATENT_DIM + 8
    return rows * members * TILE * of_a_head


def exchange(rows: int, members: int, device: torch.device) -> torch.Tensor:
    """Memory for what the CTAs of all rows exchange."""
    return torch.empty(exchange_bytes(rows, members), dtype=torch.uint8, device=device)
