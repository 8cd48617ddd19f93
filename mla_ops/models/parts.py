"""What the parts of a decoder share: rotation, the lightning indexer's choice, and experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..formats import ROPE_DIM, get_format
from ..ops import quantize_index_query, select_keys

PLAIN_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Rope(NamedTuple):
    """How a model rotates 64 dims of a head: which dims make a pair, and where the 64 stand.

    Attributes:
        pairs: `neighbours` for (0, 1), (2, 3), ...; `halves` for (0, 32), (1, 33), ....
        side: `first` or `last` of the head's dims. A head of 64 dims has no others.
    """

    pairs: str
    side: str = "first"

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates `[num_tokens, ..., dims]` by the angles of 32 pairs, `[num_tokens, 32]`.

        Neighbours leave as all firsts, then all seconds. Queries and keys are permuted alike, so their dot products are
        those of the pairs left in place.
        """
        shape = (x.shape[0], *(1,) * (x.dim() - 2), ROPE_DIM // 2)
        cos, sin = cos.view(shape), sin.view(shape)
        rest = x.shape[-1] - ROPE_DIM
        if self.side == "first":
            turned, still = x.split((ROPE_DIM, rest), dim=-1)
        else:
            still, turned = x.split((rest, ROPE_DIM), dim=-1)
        if self.pairs == "neighbours":
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, dim=-1)
        both = first * cos - second * sin, second * cos + first * sin
        return torch.cat((*both, still) if self.side == "first" else (still, *both), dim=-1)


def index_format_of(cache_format: str) -> str:
    """The format of the index keys beside an attention cache: fp8 beside a quantized one, else the same."""
    return "fp8_index" if get_format(cache_format).quantized else cache_format


def prepare_index_query(
    q: torch.Tensor, weights: torch.Tensor, scale: float, index_format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index queries and weights as the scores of `index_format` take them; arguments as in `choose_keys`."""
    if index_format == "fp8_index":
        return quantize_index_query(q, weights, scale)
    return q, weights.float() * scale


def choose_keys(
    q: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    index_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    visible: torch.Tensor,
    topk: int,
    index_format: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores the cached index keys that each token sees, `sum_h weights_h * relu(scale * q_h . k)`, and keeps the best.

    Args:
        q: `[num_tokens, num_index_heads, 128]` of the model's dtype.
        weights: `[num_tokens, num_index_heads]`.
        scale: positive factor of the products; `relu` commutes with it, so that it is multiplied into the weights.
        index_cache: of `index_format`.
        block_table: `[num_requests, max_blocks]` int32; entries past a request's end may hold anything.
        req_id_per_token: `[num_tokens]` int32, -1 for padding.
        visible: `[num_tokens]` int32, keys that each token sees.
        topk: keys to keep.
        index_format: `fp8_index`, or a plain format.

    Returns:
        `[num_tokens, topk]` int32 positions in the token's request, ascending, -1 behind the last; and `[num_tokens]`
        int32, how many there are. Of equal scores, which relu makes of keys that every head cuts off, those of the
        lowest positions.
    """
    q, weights = prepare_index_query(q, weights, scale, index_format)
    return select_keys(q, index_cache, weights, visible, block_table, req_id_per_token, topk, index_format)


def feed_forward(mlp: Any, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """A dense MLP or a mixture of experts, routed by score or by a table of token ids: `[num_tokens, hidden_size]`."""
    if not hasattr(mlp, "experts"):
        return mlp(hidden)
    routed = mlp.gate(hidden, input_ids) if getattr(mlp, "is_hash", False) else mlp.gate(hidden)
    _, weights, routing = routed
    return mix(mlp.experts, hidden, routing, weights) + mlp.shared_experts(hidden)


def mix(experts: Any, hidden: torch.Tensor, routing: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of each token's experts, `[num_tokens, hidden_size]`; arguments as `mix_grouped` takes them."""
    if can_group(experts):
        return mix_grouped(experts, hidden, routing, weights)
    if hidden.device.type == "cpu":  # reads the groups' sizes, which no captured step may
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        mixed: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, hidden, routing, weights)
        return mixed
    return mix_every(experts, hidden, routing, weights)


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
    each = torch.empty_like(rows).index_copy(0, order, rows).unflatten(0, (-1, top_k))
    return (each * weights.unsqueeze(-1)).sum(1, dtype=torch.float32).to(hidden.dtype)


def mix_every(experts: Any, hidden: torch.Tensor, routing: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As `mix_grouped`, with every expert on every token: shapes that do not depend on data, in any dtype.

    It multiplies the MLP's work by num_experts / top_k, so it suits small models and comparisons in float32.
    """
    num_experts = experts.gate_up_proj.shape[0]
    dense = (routing.unsqueeze(-1) == torch.arange(num_experts, device=hidden.device)) * weights.unsqueeze(-1)
    dense = dense.sum(1)  # [num_tokens, E]
    tokens = hidden.unsqueeze(0).expand(num_experts, -1, -1)
    rows = experts._apply_gate(torch.bmm(tokens, experts.gate_up_proj.transpose(1, 2)))
    each = torch.bmm(rows, experts.down_proj.transpose(1, 2))
    return (each * dense.t().unsqueeze(-1)).sum(0).to(hidden.dtype)
