"""How a block's output joins the residual: added, or through hyper-connections over several streams."""

from __future__ import annotations

from typing import Any

import torch


class Residual:
    """One stream, `[num_tokens, hidden_size]`: what a block gives is added."""

    def enter(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded

    def read(self, layer: Any, block: str, hidden: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Returns what `write` needs, and the block's input before its norm. `block` is `attn` or `ffn`."""
        return None, hidden

    def write(self, mixing: Any, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + out

    def leave(self, backbone: Any, hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """The rows of the last norm's output that are wanted."""
        return backbone.norm(hidden if rows is None else hidden[rows])


class HyperStreams(Residual):
    """Streams `[1, num_tokens, streams, hidden_size]`, the layout of transformers' hyper-connections.

    DeepSeek-V4's modules give the streams' mixing matrix too; HY-V4's only the weights of the block's output.
    """

    def __init__(self, num_streams: int) -> None:
        self.num_streams = num_streams

    def enter(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.unsqueeze(1).expand(-1, self.num_streams, -1).unsqueeze(0).contiguous()

    def read(self, layer: Any, block: str, hidden: torch.Tensor) -> tuple[Any, torch.Tensor]:
        connection = layer.attn_hc if block == "attn" else layer.ffn_hc
        *mixing, collapsed = connection(hidden)
        return mixing, collapsed[0]

    def write(self, mixing: Any, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if len(mixing) == 1:
            spread = mixing[0].float().unsqueeze(-1) * out.float().unsqueeze(-2)
            return (spread + hidden.float()).to(hidden.dtype)
        # post [1, num_tokens, streams] and comb [1, num_tokens, streams in, streams out], taken transposed
        post, comb = mixing
        spread = post.to(hidden.dtype).unsqueeze(-1) * out.unsqueeze(-2)
        return spread + torch.matmul(comb.to(hidden.dtype).transpose(-1, -2), hidden)

    def leave(self, backbone: Any, hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        return backbone.norm(backbone.hc_head(hidden if rows is None else hidden[:, rows]))[0]
