"""Top-k of vLLM and SGLang, called as their users call them, and torch's, for comparison.

`--peers` of benchmarks.indexer_topk is a folder of builds: `so/vllm_v033_C.so` or that file as `.xz`, the stable
ABI library of a vLLM wheel; `so/sgl_topk_c4.so` and `so/sgl_topk_c0.so`, SGLang's kernels for clusters of up to 16 CTAs
and for none, which `tvm/tvm_ffi` loads. A build that is not there or does not load is named and left out.
"""

from __future__ import annotations

import functools
import lzma
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Check, Peer

WORKSPACE_BYTES = 2**20
Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]  # takes scores, lengths and indices


@functools.cache
def _load_vllm(folder: Path) -> Any:
    path = folder / "so/vllm_v033_C.so"
    if not path.exists():
        packed = lzma.decompress(path.with_suffix(".so.xz").read_bytes())
        path = Path(tempfile.mkdtemp()) / path.name
        path.write_bytes(packed)
    torch.ops.load_library(str(path))
    return torch.ops._C


@functools.cache
def _load_sglang(folder: Path) -> Any:
    sys.path.insert(0, str(folder / "tvm"))
    import tvm_ffi  # type: ignore[import-not-found]

    clusters = tvm_ffi.load_module(str(folder / "so/sgl_topk_c4.so"))
    if int(clusters.get_max_active_clusters(16, 1)) >= 4:
        return clusters
    return tvm_ffi.load_module(str(folder / "so/sgl_topk_c0.so"))


def _cooperative(folder: Path, scores: torch.Tensor, lengths: torch.Tensor) -> Launch:
    op, num_tokens = _load_vllm(folder).cooperative_topk, scores.shape[0]
    if num_tokens > 64:
        raise ValueError(f"it takes at most 64 rows, got {num_tokens}")
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=scores.device)
    return lambda x, ends, out: op(x, ends, out, workspace, out.shape[1], x.shape[1])


def _persistent(folder: Path, scores: torch.Tensor, lengths: torch.Tensor) -> Launch:
    op = _load_vllm(folder).persistent_topk
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=scores.device)
    return lambda x, ends, out: op(x, ends, out, workspace, out.shape[1], x.shape[1])


def _sglang(folder: Path, scores: torch.Tensor, lengths: torch.Tensor) -> Launch:
    """Its plan is made once, as an engine makes it for all layers of a step."""
    module = _load_sglang(folder)
    plan = torch.zeros(scores.shape[0] + 1, 2, dtype=torch.int32, device=scores.device)
    module.topk_plan(lengths, plan, -1)
    return lambda x, ends, out: module.topk_transform_paged(x, ends, None, out, 1, plan, None)


PEERS = {"vLLM cooperative": _cooperative, "vLLM persistent": _persistent, "SGLang v2": _sglang}


def same_values(scores: torch.Tensor, indices: torch.Tensor) -> list[Check]:
    """Checks values of whole rows against an exact selection: which of equal ones it takes, a peer need not promise."""
    wanted = scores.topk(indices.shape[1], dim=1).values
    valid = (indices >= 0) & (indices < scores.shape[1])
    found = scores.gather(1, indices.clamp(0, scores.shape[1] - 1).long()).sort(1, descending=True).values
    wrong = int((found != wanted).sum()) + int((~valid).sum())
    return [Check("values off", wrong, 0.0)]


def topk_peers(folder: Path, sets: Sequence[tuple[torch.Tensor, torch.Tensor]], topk: int) -> dict[str, Peer]:
    """Peers that select from whole rows.

    Args:
        folder: of the builds.
        sets: scores `[num_tokens, num_columns]` and lengths `[num_tokens]`, all `num_columns`, of each input set.
        topk: how many.
    """
    found = {name: _topk_peer(name, folder, sets, topk) for name in PEERS}
    return {name: peer for name, peer in found.items() if peer is not None}


def _topk_peer(name: str, folder: Path, sets: Sequence[tuple[torch.Tensor, torch.Tensor]], topk: int) -> Peer | None:
    outputs = [torch.empty(len(x), topk, dtype=torch.int32, device=x.device) for x, _ in sets]
    try:
        launch = PEERS[name](folder, *sets[0])
        runs = [partial(launch, *given, out) for given, out in zip(sets, outputs, strict=True)]
        runs[0]()
    except Exception as error:  # noqa: BLE001 (whatever a build that is not ours raises)
        print(f"{name} is not measured: {[type(error).__name__, *str(error).splitlines()][-1]}")
        return None
    return Peer(runs, lambda: same_values(sets[0][0], outputs[0]), poison=partial(outputs[0].fill_, -7))


def torch_peer(sets: Sequence[tuple[torch.Tensor, torch.Tensor]], topk: int) -> dict[str, Peer]:
    """torch.topk of whole rows."""
    results: list[torch.Tensor] = [torch.empty(0)] * len(sets)

    def run(number: int) -> None:
        results[number] = sets[number][0].topk(topk, dim=1).indices

    runs = [partial(run, number) for number in range(len(sets))]
    return {"torch.topk": Peer(runs, lambda: same_values(sets[0][0], results[0]))}
