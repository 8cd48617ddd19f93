"""An attention layer of sparse MLA, whole: projections, caches, an indexer of its own, and absorbed attention.

python examples/attention_layer.py
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import mla_ops
from mla_ops.formats import allocate_cache

LATENT_DIM, ROPE_DIM, INDEX_DIM = 512, 64, 128  # widths that the cache formats hold
CACHE_FORMAT = INDEX_FORMAT = "bf16"
BLOCK_SIZE, NUM_BLOCKS = 16, 12


# [start:layer]
class SparseMLA(nn.Module):
    """Tokens of any requests in one flat batch, `[num_tokens, hidden_size]`, to the same; the caches are written."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, hidden_size: int, num_heads: int, topk: int, max_len: int, index_heads: int = 8) -> None:
        super().__init__()
        self.num_heads, self.index_heads, self.topk = num_heads, index_heads, topk
        self.nope_dim = self.v_dim = 128
        # the scale of the heads before W_UK is absorbed: 128 + 64 wide, not 576
        self.softmax_scale = (self.nope_dim + ROPE_DIM) ** -0.5

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.q_proj = linear(hidden_size, num_heads * (self.nope_dim + ROPE_DIM))
        self.kv_a_proj = linear(hidden_size, LATENT_DIM + ROPE_DIM)
        self.kv_a_norm = nn.RMSNorm(LATENT_DIM)
        self.kv_b_proj = linear(LATENT_DIM, num_heads * (self.nope_dim + self.v_dim))
        self.o_proj = linear(num_heads * self.v_dim, hidden_size)
        self.index_q_proj = linear(hidden_size, index_heads * INDEX_DIM)
        self.index_k_proj = linear(hidden_size, INDEX_DIM)
        self.index_k_norm = nn.LayerNorm(INDEX_DIM)
        self.index_weights = linear(hidden_size, index_heads)

        frequencies = 10000.0 ** (-torch.arange(0, ROPE_DIM, 2) / ROPE_DIM)
        angles = torch.arange(max_len).unsqueeze(1) * frequencies
        # no part of a checkpoint
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(
        self,
        hidden: torch.Tensor,
        kv_cache: torch.Tensor,
        index_cache: torch.Tensor,
        metadata: mla_ops.StepMetadata,
        num_requests: int,
    ) -> torch.Tensor:
        positions, slots = metadata.positions.long(), metadata.slot_mapping
        cos, sin = self.cos[positions], self.sin[positions]

        # keys and values: one latent a token for all heads, and a RoPE key beside it
        kv_c, k_pe = self.kv_a_proj(hidden).split((LATENT_DIM, ROPE_DIM), dim=-1)
        k_pe = rotate(k_pe, cos, sin)
        mla_ops.concat_and_cache(self.kv_a_norm(kv_c), k_pe, kv_cache, slots, CACHE_FORMAT)

        # index keys: the 64 rotated dims first, in a cache of head_dim=128
        index_k = self.index_k_norm(self.index_k_proj(hidden))
        index_k, rest = rotate(index_k[:, :ROPE_DIM], cos, sin), index_k[:, ROPE_DIM:]
        mla_ops.concat_and_cache(index_k, rest, index_cache, slots, INDEX_FORMAT)
        indices = self.select(hidden, cos, sin, index_cache, metadata, num_requests)

        # queries: W_UK goes to their side, so that they meet the latents as they are cached
        q = torch.unflatten(self.q_proj(hidden), -1, (self.num_heads, -1))
        q_nope, q_pe = q.split((self.nope_dim, ROPE_DIM), dim=-1)
        w_kv = self.kv_b_proj.weight.view(self.num_heads, -1, LATENT_DIM)
        w_uk, w_uv = w_kv.split((self.nope_dim, self.v_dim), dim=1)
        q_latent = torch.einsum("thn,hnl->thl", q_nope, w_uk)
        q_pe = rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))
        out, _ = mla_ops.paged_sparse_attention(
            q_latent,
            kv_cache,
            indices,
            self.softmax_scale,
            CACHE_FORMAT,
            q_rope=q_pe,
            topk_length=metadata.topk_length,
            block_table=metadata.block_table,
            req_id_per_token=metadata.req_id_per_token,
        )
        # values: W_UV comes behind
        return self.o_proj(torch.einsum("thl,hvl->thv", out, w_uv).flatten(1))

    def select(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        index_cache: torch.Tensor,
        metadata: mla_ops.StepMetadata,
        num_requests: int,
    ) -> torch.Tensor:
        """Positions in each token's request, `[num_tokens, topk]` int32; the first `topk_length` of a row count."""
        q = torch.unflatten(self.index_q_proj(hidden), -1, (self.index_heads, -1))
        q_pe = rotate(q[..., :ROPE_DIM], cos.unsqueeze(1), sin.unsqueeze(1))
        q = torch.cat((q_pe, q[..., ROPE_DIM:]), dim=-1)
        # -1 is padding, and indexing from behind would be the last request's: clamp, then mask by a length of 0
        request = metadata.req_id_per_token.long().clamp(min=0)
        table = metadata.block_table[:num_requests].long().clamp(min=0)
        keys = index_cache[table].flatten(1, 2)  # [num_requests, capacity, 128]
        scores = torch.einsum("thd,rsd->rths", q.float(), keys.float()).relu()
        scores = torch.einsum("rths,th->trs", scores, self.index_weights(hidden).float())
        scores = scores[torch.arange(hidden.shape[0], device=hidden.device), request]
        visible = torch.arange(keys.shape[1], device=hidden.device) < metadata.key_lens.unsqueeze(1)
        return scores.masked_fill(~visible, -torch.inf).topk(self.topk, dim=-1).indices.int()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (0, 32), (1, 33), ... of 64 dims, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


# [end:layer]


def make_caches(device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole tensors, one of each a layer; never a slice of a pool."""
    latent = allocate_cache(CACHE_FORMAT, NUM_BLOCKS, BLOCK_SIZE, device=device)
    return latent, allocate_cache(INDEX_FORMAT, NUM_BLOCKS, BLOCK_SIZE, head_dim=INDEX_DIM, device=device)


def dense(layer: SparseMLA, hidden: torch.Tensor) -> torch.Tensor:
    """The same of one request in the textbook form: per-head keys and values, a causal mask, every key. Float32."""
    layer = layer.float()
    x, length, heads = hidden.float(), hidden.shape[0], layer.num_heads
    cos, sin = layer.cos[:length], layer.sin[:length]
    q_nope, q_pe = layer.q_proj(x).view(length, heads, -1).split((layer.nope_dim, ROPE_DIM), dim=-1)
    kv_c, k_pe = layer.kv_a_proj(x).split((LATENT_DIM, ROPE_DIM), dim=-1)
    k_nope, v = layer.kv_b_proj(layer.kv_a_norm(kv_c)).view(length, heads, -1).chunk(2, dim=-1)
    q = torch.cat((q_nope, rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1))), dim=-1)
    k = torch.cat((k_nope, rotate(k_pe, cos, sin).unsqueeze(1).expand(-1, heads, -1)), dim=-1)
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.softmax_scale)
    return layer.o_proj(out.transpose(0, 1).flatten(1))


@torch.no_grad()
def main() -> int:
    """A prefill of two requests and a decode step of both, in one padded batch each, against the dense form."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    texts = [torch.randn(length, 256, device=device).bfloat16() for length in (30, 21)]
    layer = SparseMLA(256, 8, topk=32, max_len=64).to(device, torch.bfloat16)
    caches = make_caches(device)
    metadata = mla_ops.StepMetadata.allocate(
        max_num_tokens=64,
        max_num_requests=2,
        max_blocks_per_request=4,
        block_size=BLOCK_SIZE,
        index_topk=32,
        device=device,
    )
    table = torch.tensor([[7, 2, 9, 4], [1, 11, 0, 5]], dtype=torch.int32, device=device)
    found: list[list[torch.Tensor]] = [[], []]
    for old, new in (((0, 0), (29, 20)), ((29, 20), (1, 1))):
        lengths = torch.tensor([a + b for a, b in zip(old, new, strict=True)], dtype=torch.int32, device=device)
        starts = torch.tensor([0, new[0], sum(new)], dtype=torch.int32, device=device)
        metadata.build(starts, lengths, table)
        metadata.check(NUM_BLOCKS)
        hidden = torch.cat([text[a : a + b] for text, a, b in zip(texts, old, new, strict=True)])
        padded = nn.functional.pad(hidden, (0, 0, 0, 64 - hidden.shape[0]))
        out = layer(padded, *caches, metadata, num_requests=2)[: sum(new)]
        for parts, part in zip(found, out.split(new), strict=True):
            parts.append(part)
    errors = []
    for text, parts in zip(texts, found, strict=True):
        expected = dense(layer, text)
        errors.append(((torch.cat(parts).float() - expected).norm() / expected.norm()).item())
    print("relative error against the dense form: " + ", ".join(f"{error:.4f}" for error in errors))
    # Eight roundings to bfloat16 follow each other. One is at most 2**-8 of a value just above a power of two, uniform,
    # and 0.74 of that root mean square over all values.
    return 0 if max(errors) < 2**-8 * 0.74 * (8 / 3) ** 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
