"""Timings: of replays on a GPU, of calls in a graph, of calls on a CPU, of what a call costs the host.

`common` says what each is for. Ways to call take turns, each over its own input sets.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

L2_FLUSH_BYTES = 256 * 2**20  # several times the largest L2 cache there is
MINIMUM_TIMINGS = 5
CPU_SECONDS_PER_ROW = 1.0
CALLS_IN_GRAPH = 8
HOST_CALLS = 64  # calls of one host timing: their launches fit the device's queue, so that no call waits for it
LAUNCHES = (0, 1, 2)  # CUgraphNodeType: kernel, memcpy, memset

Replays = dict[str, list[Callable[[], object]]]


def time_cpu(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - start)


def _count_launches(graph: torch.cuda.CUDAGraph) -> int:
    """Kernels, copies and fills of a captured graph."""
    driver = ctypes.CDLL("libcuda.so.1")

    def checked(status: int) -> None:
        if status:
            raise RuntimeError(f"the CUDA driver answered {status} to a question about a captured graph")

    handle, count, kind = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(), ctypes.c_int()
    checked(driver.cuGraphGetNodes(handle, None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    checked(driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)))
    launches = 0
    for node in nodes:
        checked(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        launches += kind.value in LAUNCHES
    return launches


def capture(run: Callable[[], object], lowering: str) -> tuple[Callable[[], object], int | None]:
    """A replay of `run`, and its launches. The reference reads values on the host, so it stays eager."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    if lowering == "reference":
        return run, None
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        run()
    launches = _count_launches(graph)
    graph.instantiate()
    return partial(_replay, graph, run), launches


def _replay(graph: torch.cuda.CUDAGraph, _run: Callable[[], object]) -> None:
    """A graph holds no tensor: `_run` does, else others would get the memory that the graph reads and writes."""
    graph.replay()


def timings_cuda(replays: Replays, iterations: int) -> dict[str, list[float]]:
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in replays}
    names = list(replays)
    for iteration in range(iterations):
        # The first to read a set of slots pays for their address translations, so each is first in its turn.
        first = iteration % len(names)
        for name in names[first:] + names[:first]:
            sets = replays[name]
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            sets[iteration % len(sets)]()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [1e3 * start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def timings_in_graph(runs: Replays, iterations: int) -> dict[str, list[float]]:
    """Microseconds of a call, by graphs of `CALLS_IN_GRAPH` overwrites of L2, with and without the call behind each."""
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def behind_overwrites(run: Callable[[], object]) -> Callable[[], object]:
        def several() -> None:
            for _ in range(CALLS_IN_GRAPH):
                flush.zero_()
                run()

        return capture(several, "")[0]

    alone = behind_overwrites(lambda: None)
    replays = {name: [behind_overwrites(run) for run in sets] for name, sets in runs.items()}
    events: dict[str, list[tuple[torch.cuda.Event, ...]]] = {name: [] for name in replays}
    names = list(replays)
    for iteration in range(iterations):
        first = iteration % len(names)
        for name in names[first:] + names[:first]:
            sets = replays[name]
            times = tuple(torch.cuda.Event(enable_timing=True) for _ in range(3))
            times[0].record()
            alone()
            times[1].record()
            sets[iteration % len(sets)]()
            times[2].record()
            events[name].append(times)
    torch.cuda.synchronize()
    overwrites = statistics.median(a.elapsed_time(b) for row in events.values() for a, b, _ in row)
    return {
        name: [1e3 * (b.elapsed_time(c) - overwrites) / CALLS_IN_GRAPH for _, b, c in row]
        for name, row in events.items()
    }


def timings_cpu(runs: Replays, iterations: int) -> dict[str, list[float]]:
    timings: dict[str, list[float]] = {name: [] for name in runs}
    deadline = time.perf_counter() + CPU_SECONDS_PER_ROW * len(runs)
    for iteration in range(iterations):
        for name, sets in runs.items():
            timings[name].append(time_cpu(sets[iteration % len(sets)]))
        if iteration + 1 >= MINIMUM_TIMINGS and time.perf_counter() > deadline:
            break
    return timings


def timings_host(runs: Replays, iterations: int, device: torch.device) -> dict[str, list[float]]:
    calls = HOST_CALLS if device.type == "cuda" else 1

    def queue(sets: list[Callable[[], object]]) -> None:
        for number in range(calls):
            sets[number % len(sets)]()

    timings: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(iterations):
        for name, sets in runs.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            timings[name].append(time_cpu(partial(queue, sets)) / calls)
    return timings
