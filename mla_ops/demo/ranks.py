"""The processes that `torchrun` starts, as the demo uses them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist


def join_ranks(tp: int, dcp: int, device: str | None) -> tuple[torch.device, dict[str, Any]]:
    """Joins the processes that `torchrun` started.

    Args:
        tp, dcp: ranks that share the weights, and contexts: the number of processes, or 1.
        device: `cpu` or `cuda`; None for CUDA where every process of this machine has a device of its own.

    Returns:
        This process's device, and `tp_mesh` and `dcp_mesh` as `decoder_for` takes them.

    Raises:
        ValueError: the numbers do not fit the processes, or the device is not here.
    """
    if not dist.is_available():
        raise ValueError(f"--tp and --dcp need torch.distributed, torch {torch.__version__} was built without it")
    count = max(tp, dcp)
    if min(tp, dcp) < 1 or {tp, dcp} - {1, count}:
        raise ValueError(f"--tp and --dcp must be the number of processes or 1, got {tp} and {dcp}")
    started = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if started != count:
        raise ValueError(
            f"--tp {tp} --dcp {dcp} needs {count} processes, there are {started}: torchrun --nproc-per-node {count} "
            "-m mla_ops demo ..."
        )
    local, local_count = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", str(count)))
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        device = "cuda" if found >= local_count else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(
            f"--device must be cpu or cuda with --tp and --dcp, each process takes its own, got '{device}'"
        )
    if device == "cuda" and found < local_count:
        raise ValueError(f"--device cuda: {local_count} processes run here, torch sees {found} CUDA devices")
    chosen = torch.device("cuda", local) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device, (count,))
    return chosen, {name: mesh for name, size in (("tp_mesh", tp), ("dcp_mesh", dcp)) if size > 1}
