"""vLLM's indexer layer by our operators, with vLLM's own cache, op layer and metadata, on a CPU.

They need vLLM's Python side only: `python -m scripts.vllm_tests 0.24.0 FOLDER` fetches it and runs this file.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
import vllm_found

from mla_ops.integrations import vllm as plugin

if not vllm_found.importable():
    pytest.skip("vLLM is not installed: python -m scripts.vllm_tests fetches it", allow_module_level=True)

import vllm_layer as tiny
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import sparse_attn_indexer as theirs
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from mla_ops.integrations.vllm import backends, indexer

PREFIX = "model.layers.0.self_attn.indexer.k_cache"
HEADS, WIDTH, TOPK, TOKENS = 32, 128, 64, 256


@pytest.fixture
def config(tmp_path):
    plugin.register()
    built = tiny.vllm_config(tmp_path, "fp8_ds_mla", True)
    with set_current_vllm_config(built), tiny.one_rank(tmp_path):
        yield built


def make_indexer(config, head_dim=132):
    """The objects that vLLM's models hand to their attention: the cache, the op layer and the buffer are vLLM's."""
    cache = DeepseekV32IndexerCache(head_dim, torch.uint8, PREFIX, config.cache_config)
    buffer = torch.full((TOKENS, TOPK), 7, dtype=torch.int32)  # an earlier step left it
    layer = theirs.SparseAttnIndexer(cache, 128, "ue8m0", TOPK, WIDTH, 1024, 4096, buffer)
    cache.kv_cache = torch.zeros(64, tiny.BLOCK, 132, dtype=torch.uint8)
    return SimpleNamespace(k_cache=cache, indexer_op=layer, topk_indices_buffer=buffer)


def make_builder(config, served, device="cpu"):
    spec = MLAAttentionSpec(block_size=tiny.BLOCK, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    backend = served.k_cache.get_attn_backend()
    return backend.get_builder_cls()(spec, [PREFIX], config, torch.device(device))


def dequantized(keys):
    """Keys as e4m3 with a power of two for each; float64."""
    scale = torch.exp2(torch.ceil(torch.log2(keys.double().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    return (keys.double() / scale).to(torch.float8_e4m3fn).double() * scale


def assert_best(chosen, q, weights, keys):
    """`chosen` are the best of `keys`, but for scores as near to one another as float32 may take for equal."""
    scores = (torch.einsum("hd,nd->hn", q.double(), keys).relu() * weights.double().unsqueeze(-1)).sum(0)
    size = (torch.einsum("hd,nd->hn", q.double(), keys).abs() * weights.double().abs().unsqueeze(-1)).sum(0)
    wanted = min(TOPK, len(keys))
    positions = chosen[chosen >= 0].long()
    assert torch.equal(chosen[wanted:], torch.full_like(chosen[wanted:], -1))
    assert len(positions) == wanted == len(set(positions.tolist()))
    error = size.max() * (WIDTH + HEADS) * 2.0**-24
    assert scores[positions].min() >= scores.topk(wanted).values.min() - 2 * error


STEPS = [([70, 5, 1], 0), ([1, 1, 1], 3), ([3, 80, 2], 0), ([1, 1], 6)]


def run_steps(config, served, call, steps=STEPS):
    """Prefill, decode, mixed batches and padding: each token's choice beside scores in float64."""
    generator = torch.Generator().manual_seed(5)
    builder = make_builder(config, served)
    lengths, tables = [0] * 3, torch.randperm(60, generator=generator)[:24].view(3, 8).to(torch.int32) + 1
    keys = [torch.empty(0, WIDTH)] * 3
    for query_lens, padded in steps:
        live, total = len(query_lens), sum(query_lens)
        rows = total + padded
        k = torch.randn(rows, WIDTH, generator=generator).bfloat16()
        q = torch.randn(rows, HEADS, WIDTH, generator=generator).to(torch.float8_e4m3fn)
        weights = torch.randn(rows, HEADS, generator=generator)
        for request, (new, mine) in enumerate(zip(query_lens, k[:total].split(query_lens), strict=True)):
            lengths[request] += new
            keys[request] = torch.cat((keys[request], mine.float()))
        common = tiny.common_metadata(query_lens, lengths[:live], tables[:live], padded)
        metadata = builder.build(common_prefix_len=0, common_attn_metadata=common)
        slots = {PREFIX: common.slot_mapping}
        with set_forward_context({PREFIX: metadata}, config, num_tokens=rows, slot_mapping=slots):
            result = call(served, torch.empty(rows, 1), q, k, weights)
        assert result is served.topk_indices_buffer or result.data_ptr() == served.topk_indices_buffer.data_ptr()
        row = 0
        for request, new in enumerate(query_lens):
            for position in range(lengths[request] - new, lengths[request]):
                mine = dequantized(keys[request][: position + 1])
                assert_best(served.topk_indices_buffer[row], q[row].float(), weights[row], mine)
                row += 1
        assert torch.all(served.topk_indices_buffer[row:rows] == -1)


def by_layer(served, hidden, q, k, weights):
    return served.indexer_op.forward_cuda(hidden, q, k, weights)


def call_by_name(*arguments):
    return theirs.sparse_attn_indexer(*arguments)


@pytest.fixture
def op_on_cpu():
    """vLLM's op runs on the platform's key, which is not the CPU's without vLLM's compiled part."""
    if indexer.current_platform.dispatch_key == "CPU":
        yield
        return
    library = torch.library.Library("vllm", "IMPL")
    library.impl("sparse_attn_indexer", call_by_name, "CPU")
    yield
    library._destroy()


def test_vllms_layer_chooses_in_four_steps(config, op_on_cpu):
    served = make_indexer(config)
    indexer.serve(served)
    run_steps(config, served, by_layer)


def test_a_small_budget_cuts_a_step_into_pieces(config, op_on_cpu, monkeypatch):
    asked = []
    real = indexer.ops.paged_indexer_logits
    monkeypatch.setattr(indexer.envs, "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", 2**-15, raising=False)  # 32 bytes
    monkeypatch.setattr(indexer.ops, "paged_indexer_logits", lambda q, *a: asked.append(len(q)) or real(q, *a))
    served = make_indexer(config)
    indexer.serve(served)
    run_steps(config, served, by_layer, STEPS[:1])
    assert asked == [1] * 76


def test_the_fused_layer_calls_the_function_by_name(config):
    """0.33 writes index keys in a kernel of its own, and calls without the op."""
    (name,) = indexer.CALLERS
    if importlib.util.find_spec(name.rsplit(".", 1)[0]) is None:
        pytest.skip("this vLLM has no such layer")
    importlib.import_module(name)
    served = make_indexer(config)
    indexer.serve(served)

    def call(served, hidden, q, k, weights):
        metadata = indexer.get_forward_context().attn_metadata[PREFIX]
        indexer.ops.write_index_cache(k, served.k_cache.kv_cache, metadata.slot_mapping, indexer.FORMAT)
        return importlib.import_module(name).sparse_attn_indexer(
            *(hidden, PREFIX, served.k_cache.kv_cache, q, None, None, weights, 128, "ue8m0", TOPK, WIDTH, 1024, 4096),
            served.topk_indices_buffer,
            skip_k_cache_insert=True,
            use_pcp=False,
            pcp_shard_decode_requests=False,
            dense_mha_metadata_layer_name="",
            skip_topk_buffer_clear=True,
            topk_backend="auto",
        )

    run_steps(config, served, call)


def test_an_indexer_that_was_not_handed_over_is_vllms(config, op_on_cpu, monkeypatch):
    served = make_indexer(config)
    indexer.serve(served)
    calls = []
    monkeypatch.setattr(indexer, "_original", lambda *a, **o: calls.append(a[1]) or a[13])
    del served.k_cache.get_attn_backend
    assert served.k_cache.get_attn_backend() is DeepseekV32IndexerBackend
    with set_forward_context(None, config, num_tokens=1):
        by_layer(served, torch.empty(1, 1), torch.empty(1, HEADS, WIDTH).to(torch.float8_e4m3fn), None, torch.ones(1))
    assert [getattr(name, "value", name) for name in calls] == [PREFIX]


def test_a_run_without_metadata_writes_nothing(config, op_on_cpu, monkeypatch):
    monkeypatch.setattr(indexer.envs, "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", 1, raising=False)
    served = make_indexer(config)
    indexer.serve(served)
    with set_forward_context(None, config, num_tokens=2):
        by_layer(served, torch.empty(2, 1), torch.empty(2, HEADS, WIDTH).to(torch.float8_e4m3fn), None, torch.ones(2))
    assert torch.all(served.topk_indices_buffer == 7)


@pytest.mark.parametrize(("word", "invariant"), [("indexer", "0"), ("", "1"), ("", "0")])
def test_our_attention_hands_its_indexer_over_where_asked_or_needed(config, monkeypatch, word, invariant):
    monkeypatch.setenv("MLA_OPS_VLLM", word)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    served = make_indexer(config)
    monkeypatch.setattr(tiny, "SimpleNamespace", lambda **_: served)
    tiny.Layer(config, backends.MLAOpsSparseBackend, backends.MLAOpsPrefillBackend, "fp8_ds_mla", sparse=True)
    wanted = indexer.IndexerBackend if word or invariant == "1" else DeepseekV32IndexerBackend
    assert served.k_cache.get_attn_backend() is wanted
    assert wanted.supports_batch_invariance() or invariant == "0"  # 0.33 asks the backend of every cache


def test_the_builder_looks_at_nothing_of_the_device(config):
    """Tensors of the device are on `meta` here, where an item, a list or a copy to the host is an error."""
    served = make_indexer(config)
    indexer.serve(served)
    builder = make_builder(config, served, "meta")
    common = tiny.common_metadata([1, 2, 80], [90, 5, 100], torch.zeros(3, 8, dtype=torch.int32), 2)
    metadata = builder.build(common_prefix_len=0, common_attn_metadata=tiny.on_device(common, "meta"))
    assert metadata.key_lens.is_meta


def test_any_batch_is_captured(config):
    builder = indexer.IndexerBackend.get_builder_cls()
    assert builder.get_cudagraph_support(config, None) is AttentionCGSupport.ALWAYS


def test_caches_of_other_formats_are_refused(config):
    served = make_indexer(config, head_dim=68)
    with pytest.raises(NotImplementedError, match="DeepseekV32IndexerCache of 68 bytes"):
        indexer.serve(served)


def test_context_parallel_decode_is_refused(config):
    served = make_indexer(config)
    indexer.serve(served)
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(NotImplementedError, match="decode_context_parallel_size above 1, got 2"):
        make_builder(config, served)
