"""One process group of CPU processes for many cases: each file's cases run in as many processes as a world has.

These are forks of one process that has imported what takes long to import.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import faster_compilation
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Case = Callable[[], Any]
HEAVY = ["torch._dynamo", "torch.distributed.tensor", "transformers.modeling_utils", "mla_ops.distributed"]


def run_ranks(world_size: int, cases: list[Case]) -> dict[str, list[str]]:
    """Runs cases, functions of a module, on `world_size` gloo ranks in turn; what each rank raised, by case name.

    A case that fails on one rank may leave others in a collective: a rank that fails ends its process, the others
    time out, and later cases are reported as not run.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.get_context("forkserver").set_forkserver_preload(HEAVY)
    with mp.Manager() as manager:
        results = manager.dict()
        arguments = world_size, port, cases, results
        context = mp.start_processes(_run, arguments, world_size, join=False, start_method="forkserver")
        try:
            while not context.join(timeout=120):
                pass
        except Exception as error:  # noqa: BLE001  (what each case raised is in `results`; this is its echo)
            results.setdefault((-1, "spawn"), str(error)[-2000:])
        found = dict(results)
    report: dict[str, list[str]] = {}
    for case in cases:
        name = case.__name__
        report[name] = [
            f"rank {rank}: {found.get((rank, name), 'not run')}"
            for rank in range(world_size)
            if found.get((rank, name), "not run") != "passed"
        ]
    return report


def _run(rank: int, world_size: int, port: int, cases: list[Case], results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    faster_compilation.install()
    from datetime import timedelta

    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    for case in cases:
        torch.manual_seed(0)
        try:
            case()
        except Exception:  # noqa: BLE001  (to be read in the test's process)
            results[rank, case.__name__] = traceback.format_exc()[-3000:]
            break
        results[rank, case.__name__] = "passed"
        dist.barrier()
    dist.destroy_process_group()
