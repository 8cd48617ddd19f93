"""The two methods of vLLM's DeepSeek-V4 layer by our operators, called by vLLM's layer with vLLM's metadata, on a CPU.

They need vLLM's Python side only: `python -m scripts.vllm_tests 0.24.0 FOLDER` fetches it and runs this file.
"""

from __future__ import annotations

import sys
from types import MethodType, SimpleNamespace

import pytest
import torch
import vllm_found

from mla_ops.integrations import vllm as plugin

if not vllm_found.importable():
    pytest.skip("vLLM is not installed: python -m scripts.vllm_tests fetches it", allow_module_level=True)

import vllm_layer as tiny
from attention_inputs import filled_cache
from attention_oracle import e4m3_table
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention as Layer
from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadata
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata

from mla_ops.formats import planar_views

HEADS, WINDOW, CHOSEN, BLOCK, REQUESTS = 8, 16, 24, 64, 3
QUERIES, LENGTHS = [1, 2, 5], [300, 9, 260]  # two decodes, the second with a draft, and a prefill


def engine_cache(num_blocks, block_size):
    """Memory as vLLM has it: padded blocks, seen as rows of 584 bytes."""
    flat = filled_cache("fp8_ds_mla_v4", num_blocks, block_size, torch.device("cpu"))
    return flat.as_strided((num_blocks, block_size, 584), (flat.stride(0), 584, 1))


def keys_of(cache):
    """`[num_slots, 512]` float64."""
    data, scales = (view.flatten(0, 1) for view in planar_views(cache, "fp8_ds_mla_v4"))
    factors = torch.exp2(scales[:, :7].double() - 127).repeat_interleave(64, dim=1)
    rope = data[:, 448:].contiguous().view(torch.bfloat16).double()
    return torch.cat((e4m3_table()[data[:, :448].long()] * factors, rope), dim=1)


def slots_of(table, positions, block_size):
    return table[positions // block_size].long() * block_size + positions % block_size


class Step:
    """A step of three requests: vLLM's metadata of it, and which slots each token attends to."""

    def __init__(self, compress_ratio, padded):
        self.compress_ratio, generator = compress_ratio, torch.Generator().manual_seed(compress_ratio)
        query_lens, lengths, decodes = (QUERIES, LENGTHS, 2) if not padded else ([1, 1], LENGTHS[:2], 2)
        total, size = sum(query_lens), BLOCK // min(compress_ratio, 32)
        tables = [torch.randperm(60, generator=generator)[: 3 * 10].view(3, 10).to(torch.int32) for _ in range(2)]
        self.window, self.compressed = engine_cache(60, BLOCK), engine_cache(60, size)
        self.chosen = torch.full((total + padded, CHOSEN), -1, dtype=torch.int32)
        swa, lens, seen, requests, counts = [], [], [], [], []
        for request, (new, length) in enumerate(zip(query_lens, lengths, strict=True)):
            for position in range(length - new, length):
                near = torch.arange(max(position - WINDOW + 1, 0), position + 1)
                slots = slots_of(tables[0][request], near, BLOCK)
                visible = (position + 1) // compress_ratio
                count = min(visible, CHOSEN) if compress_ratio > 1 else 0
                far = (
                    torch.randperm(visible, generator=generator)[:count] if compress_ratio == 4 else torch.arange(count)
                )
                self.chosen[len(seen), :count] = far
                swa.append(torch.nn.functional.pad(slots, (0, WINDOW - len(slots)), value=-1))
                lens.append(len(slots))
                counts.append(count)
                seen.append((slots, slots_of(tables[1][request], far, size)))
                requests.append(request)
        self.seen, self.total, first = seen, total, sum(query_lens[:decodes])
        pad = [0] * padded
        swa = torch.stack(swa + [torch.full((WINDOW,), 10**6)] * padded).to(torch.int32)
        lens = torch.tensor(lens + pad, dtype=torch.int32)
        requests = torch.tensor(requests + pad, dtype=torch.int32)
        first += padded
        self.swa_metadata = DeepseekSparseSWAMetadata(
            block_table=tables[0],
            slot_mapping=torch.zeros(total + padded, dtype=torch.int64),
            block_size=BLOCK,
            is_valid_token=torch.arange(total + padded) < total,
            token_to_req_indices=requests,
            decode_swa_indices=swa[:first],
            decode_swa_lens=lens[:first],
            prefill_swa_indices=swa[first:].unsqueeze(1),
            prefill_swa_lens=lens[first:],
            num_decodes=decodes,
            num_prefills=len(query_lens) - decodes,
            num_decode_tokens=first,
            num_prefill_tokens=total + padded - first,
        )
        far = [torch.nn.functional.pad(slots[1], (0, CHOSEN - len(slots[1])), value=-1) for slots in seen]
        far = torch.stack(far + [torch.full((CHOSEN,), 10**6)] * padded).to(torch.int32)
        counts = torch.tensor(counts + pad, dtype=torch.int32)
        self.attn_metadata = DeepseekV4FlashMLAMetadata(
            num_reqs=len(query_lens),
            max_query_len=max(query_lens),
            max_seq_len=max(lengths),
            num_actual_tokens=total,
            query_start_loc=torch.zeros(4, dtype=torch.int32),
            slot_mapping=torch.zeros(total, dtype=torch.int64),
            block_table=tables[1],
            req_id_per_token=requests,
            block_size=size * compress_ratio,
            topk_tokens=CHOSEN,
        )
        if compress_ratio == 128:
            self.attn_metadata.c128a_global_decode_topk_indices = far[:first].unsqueeze(1)
            self.attn_metadata.c128a_decode_topk_lens = counts[:first]
            self.attn_metadata.c128a_prefill_topk_indices = self.chosen[first:]

    def layer(self):
        """The fields of the layer that the two methods read; `forward_mqa`, which calls them, is vLLM's."""
        layer = SimpleNamespace(
            compress_ratio=self.compress_ratio,
            kv_cache=self.compressed if self.compress_ratio > 1 else torch.empty(0),
            swa_cache_layer=SimpleNamespace(kv_cache=self.window, prefix="window"),
            prefix="compressed",
            topk_indices_buffer=self.chosen,
            scale=512**-0.5,
            attn_sink=torch.linspace(-3, 3, HEADS),
        )
        for name in ("_forward_decode", "_forward_prefill", "forward_mqa"):
            setattr(layer, name, MethodType(getattr(Layer, name), layer))
        return layer

    def expected(self, q, sink):
        window, compressed = keys_of(self.window), keys_of(self.compressed)
        rows = []
        for query, (near, far) in zip(q.double(), self.seen, strict=False):
            keys = torch.cat((window[near], compressed[far]))
            scores = torch.cat((query @ keys.T * 512**-0.5, sink.double().unsqueeze(1)), dim=1)
            rows.append(scores.softmax(1)[:, :-1] @ keys)
        return torch.stack(rows)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs by the switch, as vLLM's processes do; undone behind the test."""
    for name in ("_forward_decode", "_forward_prefill", "get_padded_num_q_heads"):
        monkeypatch.setattr(Layer, name, vars(Layer)[name])
    monkeypatch.setenv("MLA_OPS_VLLM", "v4")
    plugin.register()
    built = tiny.vllm_config(tmp_path, "fp8_ds_mla", True)
    with set_current_vllm_config(built):
        yield built


@pytest.mark.parametrize("compress_ratio", [1, 4, 128])
@pytest.mark.parametrize("padded", [0, 2])
def test_vllms_layer_attends_to_window_and_compressed_keys(installed, compress_ratio, padded):
    step = Step(compress_ratio, padded)
    q = torch.randn(step.total + padded, HEADS, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    out, layer = torch.full_like(q, torch.nan), step.layer()
    metadata = {"window": step.swa_metadata}
    if compress_ratio > 1:
        metadata["compressed"] = step.attn_metadata
    with set_forward_context(metadata, installed, num_tokens=len(q)):
        layer.forward_mqa(q, None, torch.zeros(len(q), dtype=torch.int64), out)
    expected = step.expected(q[: step.total], layer.attn_sink)
    torch.testing.assert_close(out[: step.total].double(), expected, atol=2**-7, rtol=2**-7)  # bfloat16
    assert torch.all(out[step.total :] == 0)


def test_heads_are_padded_to_what_vllms_other_kernels_take(installed):
    assert [Layer.get_padded_num_q_heads(heads) for heads in (1, 16, 17, 33, 128)] == [16, 16, 32, 64, 128]
    with pytest.raises(ValueError, match="up to 128 heads a rank, got 129"):
        Layer.get_padded_num_q_heads(129)


def test_without_the_switch_the_layer_is_vllms(monkeypatch):
    monkeypatch.setenv("MLA_OPS_VLLM", "")
    plugin.register()
    assert Layer._forward_decode.__module__ == Layer.__module__
    assert "mla_ops.integrations.vllm.v4" not in sys.modules or Layer._forward_prefill.__module__ == Layer.__module__
