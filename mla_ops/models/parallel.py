"""A model over ranks: heads and experts by tensor parallelism, the cache by decode context parallelism.

transformers' plan says which weights are split and how, and DTensor splits them; the decoder then multiplies each
rank's shards and sums up twice a layer, after attention and after the experts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

if dist.is_available():
    from torch.distributed import _functional_collectives as collectives

# modules that a plan may leave out, by the last part of the name: the decoder runs a share of the heads
HEAD_PLAN = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
# models whose attention has nothing else of each head
SHARDED_TYPES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
# a module's inputs stay whole for these: no weight of theirs is split
WHOLE_STYLES = ("mla_kv_a_proj", "moe_tp_experts", "replicate")


@dataclass(frozen=True)
class Ranks:
    """Who shares a model's weights, and who its caches.

    Attributes:
        tp_mesh: one-dimensional mesh of the ranks that have a share of the heads and experts each; None for whole ones.
        dcp_group: process group of the ranks that have a part of every context each; None for whole ones. With
            `tp_mesh`, the same ranks.
        interleave: neighbouring tokens of a context on one rank.
    """

    tp_mesh: Any = None
    dcp_group: Any = None
    interleave: int = 1

    @classmethod
    def of(cls, tp_mesh: Any, dcp_mesh: Any, interleave: int) -> Ranks:
        """This rank's place in one-dimensional meshes.

        Raises:
            TypeError: one is no DeviceMesh.
            ValueError: they have more dims, or are not of the same ranks.
        """
        for name, mesh in (("tp_mesh", tp_mesh), ("dcp_mesh", dcp_mesh)):
            if mesh is not None and not hasattr(mesh, "get_group"):
                raise TypeError(f"decoder_for: {name} must be a DeviceMesh, got {type(mesh).__name__}")
            if mesh is not None and mesh.ndim != 1:
                raise ValueError(f"decoder_for: {name} must have one dim, got {mesh.ndim}: pass mesh['its name']")
        if tp_mesh is not None and dcp_mesh is not None and not torch.equal(tp_mesh.mesh, dcp_mesh.mesh):
            raise ValueError(
                f"decoder_for: tp_mesh and dcp_mesh must be of the same ranks, got {tp_mesh.mesh.tolist()} and "
                f"{dcp_mesh.mesh.tolist()}"
            )
        return cls(tp_mesh, None if dcp_mesh is None else dcp_mesh.get_group(), interleave)

    @property
    def tp_size(self) -> int:
        return 1 if self.tp_mesh is None else self.tp_mesh.size()

    @property
    def dcp_size(self) -> int:
        return 1 if self.dcp_group is None else dist.get_world_size(self.dcp_group)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of what each rank's share of the weights gives."""
        if self.tp_mesh is None:
            return partial
        total = collectives.all_reduce(partial, "sum", self.tp_mesh.get_group())
        return total.wait() if isinstance(total, collectives.AsyncCollectiveTensor) else total


def shard_weights(backbone: Any, config: Any, mesh: Any) -> None:
    """Leaves this rank's share of the weights in `backbone`, as plain tensors.

    Weights that transformers has split already, by `from_pretrained` with a `DistributedConfig`, stay as they are.

    Args:
        backbone: the transformers model between embedding and head, whole or split.
        config: of the text model; its `base_model_tp_plan` says how to split.
        mesh: one-dimensional.

    Raises:
        ValueError: heads, or a width that the plan splits, do not divide over the ranks; or a model type whose
            attention has weights of each head that no plan splits.
    """
    from torch.distributed.tensor import DTensor
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    if config.model_type not in SHARDED_TYPES and config.model_type != "kimi_k2":
        raise ValueError(
            f"decoder_for: tp_mesh needs a text model of a model_type in {list(SHARDED_TYPES)}, got "
            f"'{config.model_type}'"
        )
    if config.num_attention_heads % mesh.size():
        raise ValueError(f"decoder_for: {config.num_attention_heads} heads do not divide over {mesh.size()} ranks")
    plan = dict(config.base_model_tp_plan or {})
    modules = dict(backbone.named_modules())
    for name, parameter in list(backbone.named_parameters()):
        owner, _, last = name.rpartition(".")
        style = _style(plan, name, owner)
        if style is None:
            continue
        module = modules[owner]
        if not isinstance(parameter, DTensor):
            parameter.requires_grad_(False)
            ALL_PARALLEL_STYLES[style].shard_param(module, last, mesh)
        split = module._parameters[last]
        if split is None or not isinstance(split, DTensor):
            raise ValueError(f"decoder_for: transformers' style '{style}' did not split {name}")
        local = split.to_local()
        if local.numel() * mesh.size() != split.numel():
            raise ValueError(
                f"decoder_for: {name} of shape {list(split.shape)} does not divide over {mesh.size()} ranks"
            )
        # a shard of its own memory, so that the whole can be freed
        module._parameters[last] = nn.Parameter(local.clone(), requires_grad=False)
    for module in modules.values():
        # transformers' own hooks gather and reduce around each module; the decoder sums once for all
        if getattr(module, "_is_hooked", False):
            module.__dict__.pop("forward", None)


def _style(plan: dict[str, str], name: str, owner: str) -> str | None:
    """The style by which a parameter is split; None for one that is whole."""
    generic = [re.sub(r"\.\d+\.", ".*.", key) for key in (name, owner)]
    style = next((plan[key] for key in generic if key in plan), None)
    if style is None and ".self_attn." in owner and ".indexer" not in owner:
        style = HEAD_PLAN.get(owner.rpartition(".")[2])
    return None if style in WHOLE_STYLES else style
