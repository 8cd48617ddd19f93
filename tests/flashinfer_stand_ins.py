"""FlashInfer's sparse MLA, played by a class and a function that insist on what the checks of 0.7.2 insist on.

They round what its kernels round, read what those read, and mark rows without keys as those do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import attention_oracle
import pytest
import torch
from attention_inputs import SCALE, filled_cache, queries, some_indices

from mla_ops import formats
from mla_ops.kernels.alignment import is_aligned
from mla_ops.kernels.flashinfer import sparse

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn


def group_of(cache_format: str) -> tuple[int, int]:
    """Latent dims, and how many of them share a scale."""
    return (512, 128) if cache_format == "fp8_ds_mla" else (448, 64)


def scales_of(pages: torch.Tensor, cache_format: str) -> torch.Tensor:
    """`[slots, groups]` float64."""
    if cache_format == "fp8_ds_mla":
        return pages[..., 512:528].contiguous().view(torch.float32).flatten(0, 1).double()
    _, scales = formats.planar_views(pages, cache_format)
    return torch.exp2(scales[..., :7].flatten(0, 1).double() - 127)


def rounded_query(q: torch.Tensor, cache_format: str) -> torch.Tensor:
    """Latent dims as e4m3 times a power of two, float64."""
    latent, group = group_of(cache_format)
    wide = q.double()
    groups = wide[..., :latent].unflatten(-1, (-1, group))
    scale = torch.exp2(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448).ceil())
    wide[..., :latent] = ((groups / scale).float().to(E4M3).double() * scale).flatten(-2)
    return wide


def rounded_weights(weights: torch.Tensor, passes: int) -> torch.Tensor:
    """`[heads, 64, groups]` float64 as e4m3, of the largest of a head and group."""
    unit = weights.amax(1, keepdim=True).clamp(min=1e-10) / 448
    rest, total = weights / unit, torch.zeros_like(weights)
    for _ in range(passes):
        part = rest.float().to(E4M3).double()
        total, rest = total + part, rest - part
    return total * unit


class Sm120:
    """`SparseMLASm120Wrapper` of 0.7.2."""

    calls: list[dict[str, Any]] = []
    capturing = False
    no_keys = -math.inf
    rounds = True

    def __init__(self, max_num_tokens=None, max_num_heads=None, *, kv_scale_format="auto", compute_precision="default",
                 device=None):  # fmt: skip
        self.cache_format = {"arbitrary_fp32": "fp8_ds_mla", "auto": "fp8_ds_mla_v4"}[kv_scale_format]
        self.planned: set[Any] = set()

    def check_cache(self, cache, indices, is_prefill):
        inline = self.cache_format == "fp8_ds_mla"
        width = 656 if inline else 584
        assert cache.dtype == torch.uint8
        assert cache.shape[2] == width
        assert cache.data_ptr() % 16 == cache.stride(0) % 16 == 0
        assert cache.stride()[1:] == (width, 1)
        assert cache.stride(0) >= cache.shape[1] * width > 0
        assert indices.dtype == torch.int32
        assert indices.shape[1] > 0
        assert indices.stride() == (indices.shape[1], 1)
        assert ((indices >= -1) & (indices < cache.shape[0] * cache.shape[1])).all(), "it reads what is past the end"
        if is_prefill:
            assert indices.shape[1] % 64 == 0
            assert not inline or cache.stride(0) == cache.shape[1] * width, "prefill takes no gaps"

    def run(self, q, kv_cache, indices, output, sm_scale, *, topk_length=None, attn_sink=None, extra_kv_cache=None,
            extra_indices=None, extra_topk_length=None, out_lse=None, mid_out=None, mid_lse=None, prefill_impl=None,
            return_lse=False, lse_scale=1.0):  # fmt: skip
        given = {name: value for name, value in locals().items() if name != "self"}
        self.calls.append(given)
        signature = tuple((v.shape, v.stride()) if isinstance(v, torch.Tensor) else None for v in given.values())
        if self.capturing and signature not in self.planned:
            raise ValueError("warm up this attention shape before CUDA graph capture")
        self.planned.add(signature)
        num_tokens, num_heads, width = q.shape
        is_prefill = num_tokens > 64
        assert width == (576 if self.cache_format == "fp8_ds_mla" else 512)
        assert q.dtype == output.dtype == torch.bfloat16
        assert q.is_contiguous()
        assert output.is_contiguous()
        assert is_aligned(q)
        assert output.shape == (num_tokens, num_heads, 512)
        assert out_lse.shape == (num_tokens, num_heads)
        assert out_lse.dtype == torch.float32
        sections = [(kv_cache, indices, topk_length)]
        if extra_kv_cache is not None:
            assert self.cache_format == "fp8_ds_mla_v4"
            sections.append((extra_kv_cache, extra_indices, extra_topk_length))
        for cache, slots, length in sections:
            self.check_cache(cache, slots, is_prefill)
            assert length is None or (length.dtype == torch.int32 and length.is_contiguous())
        if is_prefill:
            assert num_heads in (8, 16, 32, 64, 128)
        else:
            slots_kept = num_tokens * (8 if num_heads == 8 else -(-num_heads // 16) * 16)
            slots_kept *= sum(-(-slots.shape[1] // 64) for _, slots, _ in sections)
            assert mid_lse.numel() >= slots_kept
            assert mid_out.numel() >= slots_kept * 512
            assert mid_out.dtype == torch.bfloat16
        total = sum(slots.shape[1] for _, slots, _ in sections)
        query = q.double()
        if self.rounds and not (
            is_prefill and self.cache_format == "fp8_ds_mla_v4" and (len(sections) == 2 or total <= 256)
        ):
            query = rounded_query(q, self.cache_format)
        for token in range(num_tokens):
            self.attend(token, query[token] * sm_scale, sections, output[token], out_lse[token])

    def attend(self, token, query, sections, out, lse):
        latent, group = group_of(self.cache_format)
        keys, scales, tiles = [], [], []
        for cache, slots, length in sections:
            row = slots[token]
            row = row[: len(row) if length is None else max(0, int(length[token]))]
            live = (row >= 0).nonzero().flatten()
            chosen = row[live].long()
            wide = attention_oracle.decode_cache(cache, self.cache_format).flatten(0, 1)
            keys.append(wide[chosen])
            scales.append(scales_of(cache, self.cache_format)[chosen])
            tiles.append(live // 64 + 1000 * len(tiles))
        keys, scales, tiles = torch.cat(keys), torch.cat(scales), torch.cat(tiles)
        if not len(keys):
            out.fill_(math.nan)
            lse.fill_(self.no_keys)
            return
        scores = query @ keys.T
        row_lse = torch.logsumexp(scores, 1)
        weights = (scores - row_lse[:, None]).exp()
        result = weights @ keys[:, :512]
        result[:, :latent] = 0
        for tile in tiles.unique():
            of_tile = tiles == tile
            scaled = weights[:, of_tile, None] * scales[of_tile]
            if self.rounds:
                scaled = rounded_weights(scaled, 2 if self.cache_format == "fp8_ds_mla" else 1)
            values = keys[of_tile, :latent].unflatten(-1, (-1, group)) / scales[of_tile].unsqueeze(-1)
            result[:, :latent] += torch.einsum("hkg,kgd->hgd", scaled, values).flatten(1)
        out.copy_(result)
        lse.copy_(row_lse / math.log(2))


def trtllm(query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
           max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, backend="auto", lse=None, return_lse=False,
           multi_ctas_kv_counter_buffer=None):  # fmt: skip
    """`trtllm_batch_decode_with_kv_cache_mla` of 0.7.2 for SM100, whose tiles multiply all that they hold."""
    trtllm_calls.append({k: v for k, v in locals().items() if k != "multi_ctas_kv_counter_buffer"})
    num_tokens, one, num_heads, _ = query.shape
    width = sparse_mla_top_k
    assert one == 1
    assert backend == "trtllm-gen"
    assert return_lse
    assert query.is_contiguous()
    assert is_aligned(query)
    assert num_heads <= 64 or num_heads == 128
    assert kv_cache.dtype == query.dtype == out.dtype == torch.bfloat16
    assert kv_cache.shape[1] in (32, 64)
    assert block_tables.shape == (num_tokens, 1, width)
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    assert block_tables.is_contiguous()
    assert width % 128 == 0
    assert (seq_lens >= 1).all()
    assert (seq_lens <= max_seq_len).all()
    assert bmm1_scale >= 0
    assert workspace_buffer.numel() > num_heads * num_tokens * 2048 + 2**20
    # rows from the beginning of the cache, whatever its pages
    storage = kv_cache.as_strided((kv_cache.stride(0) // 576 * (len(kv_cache) - 1) + kv_cache.shape[1], 576), (576, 1))
    for token in range(num_tokens):
        rows = block_tables[token, 0].long()
        assert ((rows >= 0) & (rows < len(storage))).all()
        keys, length = storage[rows].float(), int(seq_lens[token])
        scores = torch.where(torch.arange(width) < length, query[token, 0].float() @ keys.T * bmm1_scale, -math.inf)
        row_lse = torch.logsumexp(scores, 1)
        out[token, 0] = ((scores - row_lse[:, None]).exp() @ keys[:, :512]).bfloat16()
        lse[token] = row_lse / math.log(2)
    return out, lse


trtllm_calls: list[dict[str, Any]] = []


def widened(
    expected: attention_oracle.Expected, q: torch.Tensor, source: attention_oracle.Source
) -> attention_oracle.Expected:
    """The bounds with what e4m3 adds to them, as the docstring of the lowering derives it; every row has a key."""
    cache_format = source.cache_format
    latent, group = group_of(cache_format)
    scales = scales_of(source.cache, cache_format)
    outs, lses = [], []
    for token in expected.tokens:
        slots = attention_oracle.valid_slots(source.indices[token].tolist(), *source.keys.shape[:2], None, None)
        chosen = torch.tensor([block * source.keys.shape[1] + offset for block, offset in slots])
        keys, scale = source.keys.flatten(0, 1)[chosen], scales[chosen]
        query, size = q[token].double(), keys[:, :512].abs()
        parts = query[:, :latent].abs().unflatten(-1, (-1, group))
        off = torch.maximum(parts / 16, parts.amax(-1, keepdim=True).clamp(min=1e-4) * 2.0**-17).flatten(1)
        e = (off @ keys[:, :latent].abs().T * SCALE).amax(1)
        weights = (query @ keys.T * SCALE).softmax(1)
        w = 1 / 16 if cache_format == "fp8_ds_mla_v4" else 1 / 256
        # half of e4m3's smallest step, 2**-10 of 448, in each weight times scale
        largest = (weights.amax(1, keepdim=True) * scale.amax(0)).clamp(min=1e-10)
        values = (size[:, :latent].unflatten(-1, (-1, group)) / scale.unsqueeze(-1)).sum(0)
        steps = torch.zeros_like(expected.out_tolerance[0])
        steps[:, :latent] = (2.0**-10 / 448 * largest.unsqueeze(-1) * values).flatten(1)
        factor = torch.exp(2 * e)[:, None]
        outs.append((factor * (1 + w) - 1) * (weights @ size) + factor * steps)
        lses.append(e)
    return dataclasses.replace(
        expected,
        out_tolerance=expected.out_tolerance + torch.stack(outs),
        lse_tolerance=expected.lse_tolerance + torch.stack(lses),
    )


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    api = {"SparseMLASm120Wrapper": Sm120, "trtllm_batch_decode_with_kv_cache_mla": trtllm}
    monkeypatch.setattr(sparse, "api", api.__getitem__)
    monkeypatch.setattr(sparse, "_warm", set())
    monkeypatch.setattr(Sm120, "calls", [])
    sparse._sm120_wrapper.cache_clear()
    trtllm_calls.clear()
    yield
    sparse._sm120_wrapper.cache_clear()


def sm120_inputs(cache_format: str, num_tokens: int, num_heads: int, topk: int) -> tuple[torch.Tensor, ...]:
    cache = filled_cache(cache_format, 5, 16, CPU)
    q = queries(num_tokens, num_heads, torch.bfloat16, CPU, 576 if cache_format == "fp8_ds_mla" else 512)
    return q, cache, some_indices(num_tokens, topk, 80, CPU)
