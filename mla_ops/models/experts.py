"""The experts of a layer: each multiplies the tokens that chose it, in shapes that a CUDA graph can hold."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true


def feed_forward(mlp: Any, hidden: torch.Tensor, input_ids: torch.Tensor, host_reads: bool) -> torch.Tensor:
    """A dense MLP or a mixture of experts, routed by score or by a table of token ids: `[num_tokens, hidden_size]`.

    Args:
        mlp: of a layer of a transformers model.
        hidden: `[num_tokens, hidden_size]`.
        input_ids: `[num_tokens]`.
        host_reads: the step may read values on the host, so that nobody captures it.
    """
    if not hasattr(mlp, "experts"):
        return mlp(hidden)
    routed = mlp.gate(hidden, input_ids) if getattr(mlp, "is_hash", False) else mlp.gate(hidden)
    _, weights, routing = routed
    return mix(mlp.experts, hidden, routing, weights, host_reads) + mlp.shared_experts(hidden)


def mix(
    experts: Any, hidden: torch.Tensor, routing: torch.Tensor, weights: torch.Tensor, host_reads: bool
) -> torch.Tensor:
    """The sum of each token's experts, `[num_tokens, hidden_size]`; arguments as `mix_grouped`, `feed_forward`."""
    if can_group(experts):
        return mix_grouped(experts, hidden, routing, weights)
    weight = experts.gate_up_proj
    name = choose_implementation(weight.device.type, host_reads, routing.shape[0] * routing.shape[1], weight.shape[0])
    if name is None:
        return mix_every(experts, hidden, routing, weights)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    mixed: torch.Tensor = ALL_EXPERTS_FUNCTIONS[name](experts, hidden, routing, weights)
    return mixed


def choose_implementation(device_type: str, host_reads: bool, num_rows: int, num_experts: int) -> str | None:
    """Transformers' way to run experts in a dtype that cannot be grouped on the device; None for `mix_every`.

    `grouped_mm` reads on the host how many tokens each expert has. Where that is forbidden, `batched_mm` copies the
    weights of the experts of each row, a token with one of its experts: they are read, written and read again, which
    is no more than reading all weights once if the rows are at most a third of the experts.
    """
    if host_reads or device_type == "cpu":  # nobody captures a step on a CPU
        return "grouped_mm"
    return "batched_mm" if statically_known_true(3 * num_rows <= num_experts) else None


def can_group(experts: Any) -> bool:
    """Whether torch's grouped matmul runs these experts: bfloat16, rows of 16-byte multiples, a CPU or SM80 and up.

    Inductor takes it in bfloat16 only, and in other dtypes it reads the groups' sizes on the host.
    """
    weight = experts.gate_up_proj
    if weight.dtype != torch.bfloat16 or not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    if weight.shape[2] % 8 or experts.down_proj.shape[2] % 8:
        return False
    if weight.device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(weight.device) >= (8, 0)
    return weight.device.type == "cpu"


def mix_grouped(experts: Any, hidden: torch.Tensor, routing: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Each expert multiplies the tokens that were routed to it, by torch's grouped matmul; summed in float32.

    Args:
        experts: holds `gate_up_proj` `[E, 2 * I, hidden_size]` and `down_proj` `[E, hidden_size, I]`, and joins the
            gate and up projections by `_apply_gate`.
        hidden: `[num_tokens, hidden_size]`.
        routing: `[num_tokens, top_k]` int64, experts of each token; one that stands twice counts twice.
        weights: `[num_tokens, top_k]`.
    """
    grouped_mm = torch.nn.functional.grouped_mm
    num_experts, top_k = experts.gate_up_proj.shape[0], routing.shape[1]
    expert, order = routing.flatten().sort()
    last = torch.searchsorted(expert, torch.arange(num_experts, device=hidden.device), right=True, out_int32=True)
    rows = hidden[order // top_k]
    rows = experts._apply_gate(grouped_mm(rows, experts.gate_up_proj.transpose(1, 2), offs=last))
    rows = grouped_mm(rows, experts.down_proj.transpose(1, 2), offs=last)
    # each row back to its token and place, so that the sum has one order
    each = torch.unflatten(torch.empty_like(rows).index_copy(0, order, rows), 0, (-1, top_k))
    return (each * weights.unsqueeze(-1)).sum(1, dtype=torch.float32).to(hidden.dtype)


def mix_every(experts: Any, hidden: torch.Tensor, routing: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Does what `mix_grouped` does, with every expert on every token: shapes that do not depend on data, in any dtype.

    It multiplies the products by num_experts / top_k, and reads the weights once: what a step of few tokens waits for.
    """
    num_experts = experts.gate_up_proj.shape[0]
    dense = (routing.unsqueeze(-1) == torch.arange(num_experts, device=hidden.device)) * weights.unsqueeze(-1)
    dense = dense.sum(1)  # [num_tokens, E]
    tokens = hidden.unsqueeze(0).expand(num_experts, -1, -1)
    rows = experts._apply_gate(torch.bmm(tokens, experts.gate_up_proj.transpose(1, 2)))
    each = torch.bmm(rows, experts.down_proj.transpose(1, 2))
    return (each * dense.t().unsqueeze(-1)).sum(0).to(hidden.dtype)
