"""The vLLM backends against vLLM's own registry, selector, configuration, metadata and attention layer, on a CPU.

They need vLLM's Python side only: `python -m scripts.vllm_tests 0.24.0 FOLDER` fetches it and runs this file.
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fresh
import pytest
import torch
from vllm_found import importable, needs_vllm

from mla_ops.integrations import vllm as plugin
from scripts import vllm_decode

if importable():
    import vllm
    import vllm_layer as tiny
    from vllm.config import AttentionConfig, set_current_vllm_config
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    HAS_COMMON = hasattr(AttentionBackendEnum, "register")
    NAME = "MLA_OPS" if HAS_COMMON else "CUSTOM"


@pytest.fixture
def registered():
    plugin.register()


@pytest.fixture
def config(tmp_path, registered):
    def make(kv_cache_dtype="auto", sparse=True):
        return tiny.vllm_config(tmp_path, kv_cache_dtype, sparse)

    return make


def selector(sparse=True, kv_cache_dtype="fp8_ds_mla", **options):
    fields = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": kv_cache_dtype,
        "block_size": 64,
        "use_mla": True,
        "use_sparse": sparse,
        **options,
    }
    return AttentionSelectorConfig(**fields)


def test_words_are_checked():
    assert plugin.parse_words("") == frozenset()
    assert plugin.parse_words("force, override") == {"force", "override"}
    with pytest.raises(ValueError, match="must consist of off, force, override, indexer, v4, got 'ovrride'"):
        plugin.parse_words("ovrride")


def test_the_first_other_token_of_two_runs_is_a_tie_within_twice_the_noise():
    def run(token, logprobs):
        return [(7, {7: -1.0}), (token, logprobs)]

    same = run(5, {5: -1.0}), run(5, {"5": -1.002})  # keys are text in a file
    near = run(3, {3: -1.0, 4: -1.003}), run(4, {"4": -1.0, "3": -1.002})
    far = run(3, {3: -1.0, 4: -1.1}), run(4, {"4": -1.0, "3": -1.1})
    unknown = run(3, {3: -1.0}), run(4, {"4": -1.0})
    pairs = zip(same, near, far, unknown, strict=True)
    assert vllm_decode.differences(*map(list, pairs)) == (1, 3, 1, pytest.approx(0.002))


@pytest.mark.parametrize(("version", "tested"), [("0.24.0", True), ("0.33.1", True), ("0.25.0", False), ("0.2", False)])
def test_versions(version, tested):
    assert plugin.is_tested(version) is tested


def test_registering_without_vllm_is_a_warning(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    plugin.register()
    assert "its vLLM backends are not registered" in caplog.text


def test_a_misspelt_switch_is_a_warning_that_lists_the_right_ones(monkeypatch, caplog):
    monkeypatch.setenv("MLA_OPS_VLLM", "ovrride")
    monkeypatch.setattr(plugin, "_register", lambda words: pytest.fail("registered"))
    plugin.register()
    assert "its vLLM backends are not registered" in caplog.text
    assert "must consist of off, force, override, indexer, v4, got 'ovrride'" in caplog.text


def test_off_registers_nothing(monkeypatch):
    monkeypatch.setenv("MLA_OPS_VLLM", "off")
    monkeypatch.setattr(plugin, "_register", lambda words: pytest.fail("registered"))
    plugin.register()


def test_the_entry_point_is_what_vllm_loads():
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    group = text.split('[project.entry-points."vllm.general_plugins"]\n')[1].split("\n\n")[0]
    (entry,) = [importlib.metadata.EntryPoint(*line.split(" = "), "group") for line in group.splitlines()]
    assert importlib.metadata.EntryPoint(entry.name, entry.value.strip('"'), "group").load() is plugin.register


def test_nothing_of_vllm_and_no_kernel_is_imported():
    code = "import sys, mla_ops, mla_ops.integrations.vllm; print(*sys.modules)"
    modules = fresh.run("-c", code, check=True).stdout.split()
    assert "vllm" not in modules
    assert [name for name in modules if name == "triton" or name.startswith("mla_ops.kernels.")] == []


@needs_vllm
def test_registering_imports_no_class():
    """A process that uses other backends pays for nothing; vLLM is imported before it loads plugins."""
    code = """if True:
        import sys, torch, vllm.v1.attention.backends.mla.prefill.registry, vllm.v1.attention.backends.registry
        from mla_ops.integrations import vllm as plugin
        before = set(sys.modules)
        plugin.register()
        print("added:", *(set(sys.modules) - before), torch.cuda.is_initialized())
    """
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[-1] == "added: False"


@needs_vllm
class TestRegistry:
    def test_registering_twice_is_once(self, registered):
        plugin.register()
        assert AttentionBackendEnum[NAME].get_path() == "mla_ops.integrations.vllm.backends.MLAOpsBackend"

    def test_another_version_stays_off_unless_forced(self, monkeypatch, caplog):
        monkeypatch.setattr(vllm, "__version__", "0.99.0")
        calls = []
        monkeypatch.setattr("vllm.v1.attention.backends.registry.register_backend", lambda *a: calls.append(a))
        plugin.register()
        assert "tested with vLLM 0.24 and 0.33, this is 0.99.0" in caplog.text
        assert calls == []
        monkeypatch.setenv("MLA_OPS_VLLM", "force,override")
        plugin.register()
        assert AttentionBackendEnum.FLASHMLA_SPARSE in [backend for backend, _ in calls]

    def test_a_place_that_is_taken_is_left_alone(self, registered, monkeypatch, caplog):
        if HAS_COMMON:
            pytest.skip("this vLLM takes new names")
        other = "vllm.v1.attention.backends.mla.flashmla.FlashMLABackend"
        monkeypatch.setattr(AttentionBackendEnum.CUSTOM, "get_path", lambda: other)
        plugin.register()
        assert f"CUSTOM of AttentionBackendEnum is taken by {other}" in caplog.text

    @pytest.mark.parametrize(
        ("wrong", "reason"),
        [
            ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
            ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype not supported"),
            ({"head_size": 512}, "head_size not supported"),
            ({"dtype": torch.float32}, "dtype not supported"),
            ({"block_size": 24}, "block_size not supported"),
            ({"has_sink": True}, "attention sinks not supported"),
        ],
    )
    @pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
    def test_what_is_not_served_is_refused_with_a_reason(self, config, sparse, wrong, reason):
        kv_cache_dtype = "fp8_ds_mla" if sparse else "auto"
        with tiny.hopper() as platform, set_current_vllm_config(config(kv_cache_dtype, sparse)):
            wanted = selector(sparse, **{"kv_cache_dtype": kv_cache_dtype, **wrong})
            with pytest.raises(ValueError, match=rf"Selected backend .*{NAME} is not valid .*'{reason}'"):
                platform.get_attn_backend_cls(AttentionBackendEnum[NAME], wanted, num_heads=tiny.HEADS)

    def test_override_takes_the_place_of_vllms_own(self, monkeypatch):
        monkeypatch.setenv("MLA_OPS_VLLM", "override")
        plugin.register()
        try:
            for name in ("FLASHMLA_SPARSE", "FLASHMLA"):
                backend = AttentionBackendEnum[name].get_class()
                assert backend.__module__ == "mla_ops.integrations.vllm.backends"
                assert backend.get_name() == name
        finally:
            AttentionBackendEnum.FLASHMLA_SPARSE.clear_override()
            AttentionBackendEnum.FLASHMLA.clear_override()

    @pytest.mark.parametrize("sparse", [True, False])
    def test_the_selector_takes_the_class_of_the_model(self, config, sparse):
        kv_cache_dtype = "fp8_ds_mla" if sparse else "auto"
        with tiny.hopper() as platform, set_current_vllm_config(config(kv_cache_dtype, sparse)):
            path = platform.get_attn_backend_cls(
                AttentionBackendEnum[NAME], selector(sparse, kv_cache_dtype), num_heads=tiny.HEADS
            )
        assert path.rsplit(".", 1)[1] == ("MLAOpsSparseBackend" if sparse else "MLAOpsDenseBackend")

    def test_batch_invariance_is_for_sparse_models(self, config):
        for sparse, kv_cache_dtype in ((True, "fp8_ds_mla"), (False, "auto")):
            with tiny.hopper() as platform, set_current_vllm_config(config(kv_cache_dtype, sparse)):
                wanted = selector(sparse, kv_cache_dtype, use_batch_invariant=True)
                if sparse:
                    platform.get_attn_backend_cls(AttentionBackendEnum[NAME], wanted, num_heads=8)
                    continue
                with pytest.raises(ValueError, match="batch invariance not supported"):
                    platform.get_attn_backend_cls(AttentionBackendEnum[NAME], wanted, num_heads=8)

    def test_the_flags_of_the_page_are_vllms(self, registered, monkeypatch):
        """Flags are those that a user copies. vLLM loads its plugins before it reads them."""
        from vllm.config.speculative import SpeculativeConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms.cpu import CpuPlatform
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        monkeypatch.setattr(vllm.platforms, "_current_platform", CpuPlatform())
        page = (Path(__file__).parent.parent / "docs" / "integrations" / "vllm.md").read_text()
        commands = [line.split() for line in page.splitlines() if line.startswith("vllm serve")]
        flags = [" ".join(words[3:-3]) for words in commands if words[-1] == vllm.__version__[:4]]
        flags += [flag.replace("MLA_OPS", NAME) for flag in re.findall(r"`(--?[^`]+)`", page.split("## What runs")[0])]
        assert len(flags) == 6
        for flag in flags:
            if "force_mqa" in flag and not HAS_COMMON:
                continue
            arguments = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(shlex.split(flag))
            asked = EngineArgs.from_cli_args(arguments)
            if asked.attention_backend is not None:
                assert AttentionConfig(backend=asked.attention_backend).backend is AttentionBackendEnum[NAME]
            if asked.speculative_config is not None:
                backend = asked.speculative_config["attention_backend"]
                assert SpeculativeConfig._parse_attention_backend(backend) is AttentionBackendEnum[NAME]

    def test_full_graphs(self, config, monkeypatch):
        from mla_ops.integrations.vllm import backends

        built = config("fp8_ds_mla")
        builder = backends.MLAOpsSparseBackend.get_builder_cls()
        wanted = AttentionCGSupport.UNIFORM_BATCH if HAS_COMMON else AttentionCGSupport.ALWAYS
        assert builder.get_cudagraph_support(built, None) is wanted
        if HAS_COMMON:
            monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
            assert builder.get_cudagraph_support(built, None) is AttentionCGSupport.ALWAYS
            monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
            built.attention_config.sparse_mla_force_mqa = True
            assert builder.get_cudagraph_support(built, None) is AttentionCGSupport.ALWAYS


def run_steps(layer, steps, sparse, read_back):
    """Prefill, then mixed batches: the layer's output beside attention over what the cache holds."""
    generator = torch.Generator().manual_seed(3)
    lengths, tables = [0] * 3, torch.randperm(60, generator=generator)[:24].view(3, 8).to(torch.int32) + 1
    for query_lens, padded in steps:
        for request, new in enumerate(query_lens):
            lengths[request] += new
        total = sum(query_lens)
        q = torch.randn(total + padded, tiny.HEADS, tiny.NOPE + tiny.ROPE, generator=generator, dtype=torch.bfloat16)
        kv_c = torch.randn(total + padded, tiny.LATENT, generator=generator, dtype=torch.bfloat16)
        k_pe = torch.randn(total + padded, 1, tiny.ROPE, generator=generator, dtype=torch.bfloat16)
        live = len(query_lens)
        common = tiny.common_metadata(query_lens, lengths[:live], tables[:live], padded)
        keys, chosen, row = [], [], 0
        layer.indexer.topk_indices_buffer.fill_(-1)
        for request, new in enumerate(query_lens):
            for position in range(lengths[request] - new, lengths[request]):
                seen = torch.arange(position + 1)
                if sparse and position >= tiny.TOPK:
                    seen = torch.randperm(position + 1, generator=generator)[: tiny.TOPK]
                if sparse:
                    layer.indexer.topk_indices_buffer[row, : len(seen)] = seen
                chosen.append(seen)
                keys.append(request)
                row += 1
        layer.indexer.topk_indices_buffer[row : row + padded] = 7  # left there by an earlier step
        out = layer.step(q, kv_c, k_pe, common)
        cached = [read_back(layer.attention.kv_cache, tables[request]) for request in range(live)]
        wanted = tiny.expected(layer, q[:total], [cached[request] for request in keys], chosen)
        # bfloat16: the absorbed query, the result in the latent space, the output
        torch.testing.assert_close(out[:total].float(), wanted, atol=0.03, rtol=0.03)
        assert torch.isfinite(out).all()


def read_back(cache_format):
    import mla_ops

    def read(cache, table):
        length = torch.tensor([len(table) * tiny.BLOCK], dtype=torch.int32)
        starts = torch.tensor([0, int(length)], dtype=torch.int32)
        return mla_ops.gather_cache(cache, table.unsqueeze(0), length, starts, int(length), cache_format)

    return read


STEPS = [([70, 5, 1], 0), ([1, 1, 1], 3), ([3, 80, 2], 0), ([2, 3, 1], 2), ([1, 1], 6)]


@needs_vllm
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_ds_mla", "auto"])
def test_a_sparse_layer_in_five_steps(config, tmp_path, kv_cache_dtype, drafts):
    from mla_ops.integrations.vllm import backends

    built = config(kv_cache_dtype)
    with set_current_vllm_config(built), tiny.one_rank(tmp_path):
        layer = tiny.Layer(
            built, backends.MLAOpsSparseBackend, backends.MLAOpsPrefillBackend, kv_cache_dtype, sparse=True
        )
        layer.builder.reorder_batch_threshold = 1 + drafts
        if kv_cache_dtype == "auto":  # prefills no longer than the choice are dense in 0.33, of keys before the cache
            run_steps(layer, [([5], 0), ([1, 20], 0)], True, read_back("bf16"))
        run_steps(layer, STEPS, True, read_back("fp8_ds_mla" if kv_cache_dtype == "fp8_ds_mla" else "bf16"))


@needs_vllm
def test_a_dense_layer_prefills_and_decodes(config, tmp_path, monkeypatch):
    """Decodes of one token, then of up to three: drafts, whose numbers differ."""
    from mla_ops import ops
    from mla_ops.integrations.vllm import backends

    decoded = []
    real = ops.paged_attention
    monkeypatch.setattr(ops, "paged_attention", lambda q, *a, **o: decoded.append(len(q)) or real(q, *a, **o))
    built = config("auto", sparse=False)
    with set_current_vllm_config(built), tiny.one_rank(tmp_path):
        layer = tiny.Layer(built, backends.MLAOpsDenseBackend, backends.MLAOpsPrefillBackend, "auto", sparse=False)
        run_steps(layer, [([70, 5, 1], 0), ([1, 1, 1], 3), ([1, 1], 6)], False, read_back("bf16"))
        assert decoded[-2:] == [6, 8]
        layer.builder.reorder_batch_threshold = 3
        run_steps(layer, [([70, 5, 1], 0), ([2, 3, 1], 2), ([3], 0)], False, read_back("bf16"))
        assert decoded[-2:] == [8, 3]


@needs_vllm
def test_prefills_attend_to_what_was_cached_before(config, tmp_path, monkeypatch):
    """The rest of a prompt: context in one chunk and in several, beside a request that has none."""
    from mla_ops.integrations.vllm import backends

    chunks = []
    real = backends.MLAOpsPrefillBackend.run_prefill_context_chunk
    monkeypatch.setattr(
        backends.MLAOpsPrefillBackend,
        "run_prefill_context_chunk",
        lambda *a, **o: chunks.append(len(o["q"])) or real(*a, **o),
    )
    built = config("auto", sparse=False)
    with set_current_vllm_config(built), tiny.one_rank(tmp_path):
        layer = tiny.Layer(built, backends.MLAOpsDenseBackend, backends.MLAOpsPrefillBackend, "auto", sparse=False)
        run_steps(layer, [([70, 130], 0), ([1, 60], 0), ([9, 2], 0), ([90, 90, 30], 0)], False, read_back("bf16"))
        assert chunks == [60, 11, 210] if tiny.PINS else [60, 11, 180]
        layer.builder.chunked_prefill_workspace_size = 128
        run_steps(layer, [([70, 130], 0), ([1, 60], 0), ([20, 40, 30], 0)], False, read_back("bf16"))
    assert len(chunks) > 6


@needs_vllm
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("drafts", [0, 2])
def test_builders_look_at_nothing_of_the_device(config, tmp_path, sparse, drafts):
    """Tensors of the device are on `meta` here, where an item, a list or a copy to the host is an error."""
    from mla_ops.integrations.vllm import backends

    kv_cache_dtype = "fp8_ds_mla" if sparse else "auto"
    built = config(kv_cache_dtype, sparse)
    with set_current_vllm_config(built), tiny.one_rank(tmp_path):
        backend = backends.MLAOpsSparseBackend if sparse else backends.MLAOpsDenseBackend
        layer = tiny.Layer(built, backend, backends.MLAOpsPrefillBackend, kv_cache_dtype, sparse)
        builder = layer.make_builder(torch.device("meta"))
        builder.reorder_batch_threshold = 1 + drafts
        tables = torch.zeros(3, 8, dtype=torch.int32)
        for query_lens, lengths, padded in (
            ([1, 1, 1], [90, 5, 1], 3),
            ([1, 3, 2], [90, 3, 2], 2),
            ([1, 2, 80], [90, 2, 80], 0),
        ):
            common = tiny.on_device(tiny.common_metadata(query_lens, lengths, tables, padded), "meta")
            metadata = builder.build(common_prefix_len=0, common_attn_metadata=common)
            rows = metadata if sparse else metadata.decode
            assert rows.req_id_per_token.is_meta


@needs_vllm
def test_padding_belongs_to_no_request(config):
    from mla_ops.integrations.vllm.shared import request_of_token

    starts = torch.tensor([0, 2, 2, 5, 5], dtype=torch.int32)
    out = torch.empty(8, dtype=torch.int32)
    request_of_token(starts, torch.arange(8, dtype=torch.int32), out)
    assert out.tolist() == [0, 0, 2, 2, 2, 4, 4, 4]


@needs_vllm
def test_batch_invariance_asks_for_deterministic_kernels_of_every_token(config, tmp_path, monkeypatch):
    """No prefill is dense, which would depend on the lengths of other requests; the indexer is ours."""
    from mla_ops import ops
    from mla_ops.integrations.vllm import backends, indexer

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    asked, served = [], []
    monkeypatch.setattr(indexer, "serve", served.append)
    real = ops.paged_sparse_attention

    def record(q, *arguments, **options):
        asked.append((len(q), options["deterministic"]))
        return real(q, *arguments, **options)

    monkeypatch.setattr(ops, "paged_sparse_attention", record)
    built = config("fp8_ds_mla")
    with set_current_vllm_config(built), tiny.one_rank(tmp_path):
        layer = tiny.Layer(built, backends.MLAOpsSparseBackend, backends.MLAOpsPrefillBackend, "fp8_ds_mla", True)
        run_steps(layer, [([5, 3], 0), ([1, 70], 0)], True, read_back("fp8_ds_mla"))
    assert asked == [(8, True), (71, True)]
    assert served == [layer.indexer]


@needs_vllm
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_the_halves_of_a_query_are_not_joined(sparse, config, tmp_path, monkeypatch):
    """The kernels read them where vLLM's layer left them: the product with W_UK, and RoPE apart."""
    from mla_ops import ops
    from mla_ops.integrations.vllm import backends

    asked = []
    name = "paged_sparse_attention" if sparse else "paged_attention"
    real = getattr(ops, name)

    def record(q, *arguments, **options):
        asked.append((q.shape, options["q_rope"].shape))
        return real(q, *arguments, **options)

    monkeypatch.setattr(ops, name, record)
    backend = backends.MLAOpsSparseBackend if sparse else backends.MLAOpsDenseBackend
    built = config("auto", sparse=sparse)
    with set_current_vllm_config(built), tiny.one_rank(tmp_path):
        layer = tiny.Layer(built, backend, backends.MLAOpsPrefillBackend, "auto", sparse=sparse)
        run_steps(layer, [([5], 0), ([1], 0)], sparse, read_back("bf16"))
    assert asked[-1] == ((1, tiny.HEADS, 512), (1, tiny.HEADS, 64))


@needs_vllm
def test_rows_of_a_cache_with_other_layers_pages_between(config, tmp_path):
    """0.33's calls under decode context parallelism: physical rows, of a block stride that is not the block size."""
    if not HAS_COMMON:
        pytest.skip("this vLLM translates no rows")
    import mla_ops
    from mla_ops.integrations.vllm import backends

    built = config("fp8_ds_mla")
    with set_current_vllm_config(built), tiny.one_rank(tmp_path):
        layer = tiny.Layer(built, backends.MLAOpsSparseBackend, backends.MLAOpsPrefillBackend, "fp8_ds_mla", True)
        spec = backends.MLAOpsSparseBackend.customize_spec(layer.attention.get_kv_cache_spec(built))
    assert layer.attention.impl.can_return_lse_for_decode
    assert spec.get_block_stride_alignment() % 656 == 0  # vLLM's blocks are whole rows
    both = torch.zeros(4, 2 * tiny.BLOCK, 656, dtype=torch.uint8)
    cache = both[:, : tiny.BLOCK]
    latent, rope = torch.randn(256, 512).bfloat16(), torch.randn(256, 64).bfloat16()
    mla_ops.concat_and_cache(latent, rope, cache, torch.arange(256), "fp8_ds_mla")
    q = torch.randn(5, tiny.HEADS, 576).bfloat16()
    slots = torch.randint(0, 256, (5, tiny.TOPK), dtype=torch.int32)
    slots[3] = -1  # a rank that owns none of a token's keys
    rows = torch.where(slots < 0, -1, slots // tiny.BLOCK * 2 * tiny.BLOCK + slots % tiny.BLOCK)
    out, lse = layer.attention.impl._forward_mqa_kernel(
        (q[..., :512], q[..., 512:]), cache, rows, None, layer=None, block_size=tiny.BLOCK, is_decode=True
    )
    expected, expected_lse = mla_ops.paged_sparse_attention(q, cache, slots, tiny.SCALE, "fp8_ds_mla")
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert torch.all(lse[3] == -torch.inf)


def filter_and_convert(
    req_id, table, indices, *, dcp_size, dcp_rank, cp_kv_cache_interleave_size, BLOCK_SIZE, **others
):
    """Does what vLLM's Triton kernel does: rows of a choice's keys that a rank has, in front and in any order."""
    run = cp_kv_cache_interleave_size
    places = indices // (dcp_size * run) * run + indices % run
    rows = table[req_id.long()].gather(1, places.long().clamp(0) // BLOCK_SIZE) * others["BLOCK_STRIDE_ROWS"]
    owned = (indices >= 0) & (indices // run % dcp_size == dcp_rank)
    rows = torch.where(owned, rows + places % BLOCK_SIZE, -1).sort(1, descending=True).values
    return rows, owned.sum(1)


@needs_vllm
@pytest.mark.parametrize("interleave", [1, 16])
def test_ranks_that_share_a_context_merge_to_the_whole(config, tmp_path, monkeypatch, interleave):
    """Decode context parallelism: two ranks hold every second run of tokens; each attends to its part of a choice."""
    if not HAS_COMMON:
        pytest.skip("this vLLM has no decode context parallelism for sparse MLA")
    import mla_ops
    from mla_ops.integrations.vllm import backends

    built = config("fp8_ds_mla")
    with set_current_vllm_config(built), tiny.one_rank(tmp_path):
        layer = tiny.Layer(built, backends.MLAOpsSparseBackend, backends.MLAOpsPrefillBackend, "fp8_ds_mla", True)
    tables = torch.tensor([[3, 1, 4, 7, 8], [0, 2, 5, 6, 9]], dtype=torch.int32)
    latent, rope = torch.randn(2, 300, 512).bfloat16(), torch.randn(2, 300, 64).bfloat16()
    q, positions = torch.randn(4, tiny.HEADS, 576).bfloat16(), torch.arange(300)
    chosen = layer.indexer.topk_indices_buffer[:4]
    for row, seen in enumerate((300, 300, 40, 1)):  # the last token's key is of one rank, the other has none
        chosen[row, : min(seen, tiny.TOPK)] = torch.randperm(seen)[: tiny.TOPK]
    common = tiny.common_metadata([2, 2], [300, 40], tables)
    metadata = layer.builder.build(common_prefix_len=0, common_attn_metadata=common)
    metadata.cp_kv_cache_interleave_size = interleave

    def cache_of(kept, places):
        cache = torch.zeros(10, tiny.BLOCK, 656, dtype=torch.uint8)
        for request in range(2):
            slots = tables[request][places // tiny.BLOCK].long() * tiny.BLOCK + places % tiny.BLOCK
            mla_ops.concat_and_cache(latent[request, kept], rope[request, kept], cache, slots, "fp8_ds_mla")
        return cache

    module = "vllm.model_executor.layers.attention.sparse_mla_attention"
    monkeypatch.setattr(f"{module}.triton_filter_and_convert_dcp_index", filter_and_convert)
    impl, results = layer.attention.impl, []
    expected = impl.forward_mqa(q, cache_of(positions, positions), metadata, layer.attention)
    impl.dcp_world_size = 2
    for impl.dcp_rank in range(2):
        kept = positions[positions // interleave % 2 == impl.dcp_rank]
        places = kept // (2 * interleave) * interleave + kept % interleave
        results += impl.forward_mqa(q, cache_of(kept, places), metadata, layer.attention)
    assert torch.all(results[3][3] == -torch.inf)
    merged = mla_ops.merge_attention_states(*results)
    torch.testing.assert_close(merged[0], expected[0], atol=2**-7, rtol=2**-7)  # bfloat16
    torch.testing.assert_close(merged[1], expected[1], atol=1e-5, rtol=1e-5)


@needs_vllm
def test_ranks_that_share_a_dense_context_merge_to_the_whole(config, tmp_path):
    """Decode context parallelism: every second token's keys are of one rank; lse has base e, which vLLM merges by."""
    import mla_ops
    from mla_ops.integrations.vllm import backends

    built = config("auto", sparse=False)
    with set_current_vllm_config(built), tiny.one_rank(tmp_path):
        layer = tiny.Layer(built, backends.MLAOpsDenseBackend, backends.MLAOpsPrefillBackend, "auto", sparse=False)
    tables = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    keys, q = torch.randn(2, 100, 576).bfloat16(), torch.randn(2, tiny.HEADS, 576).bfloat16()
    impl, lengths = layer.attention.impl, torch.tensor([100, 1], dtype=torch.int32)
    assert impl.can_return_lse_for_decode
    assert getattr(impl, "lse_base_on_e", True)

    def attend(kept, lens):
        cache = torch.zeros(4, tiny.BLOCK, 576, dtype=torch.bfloat16)
        for request in range(2):
            places = torch.arange(len(kept))
            cache[tables[request, places // tiny.BLOCK].long(), places % tiny.BLOCK] = keys[request, kept]
        decode = layer.builder._build_decode(
            block_table_tensor=tables,
            seq_lens_device=lens,
            query_start_loc_device=torch.arange(3, dtype=torch.int32),
            num_decode_tokens=2,
            dcp_tot_seq_lens_device=lengths,
        )
        return impl.forward_mqa(q, cache, SimpleNamespace(decode=decode), layer.attention)

    positions = torch.arange(100)
    expected = attend(positions, lengths)
    parts = [attend(positions[rank::2], (lengths + 1 - rank) // 2) for rank in range(2)]
    assert torch.all(parts[1][1][1] == -torch.inf)  # a rank that has no key of a request
    merged = mla_ops.merge_attention_states(*parts[0], *parts[1])
    torch.testing.assert_close(merged[0], expected[0], atol=2**-7, rtol=2**-7)  # bfloat16
    torch.testing.assert_close(merged[1], expected[1], atol=1e-5, rtol=1e-5)


@needs_vllm
def test_the_prefill_backend_is_found_by_its_name(config):
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    from mla_ops.integrations.vllm import backends

    assert AttentionConfig(mla_prefill_backend=NAME).mla_prefill_backend is MLAPrefillBackendEnum[NAME]
    assert MLAPrefillBackendEnum[NAME].get_class() is backends.MLAOpsPrefillBackend


@needs_vllm
def test_context_of_a_prefill_is_attended_without_a_mask():
    """Chunks of context, as each version describes them, beside attention in float64."""
    from mla_ops.integrations.vllm.backends import MLAOpsPrefillBackend

    backend = MLAOpsPrefillBackend(2, 0.1, 512, 128, 64, 128, None)
    starts_q = torch.tensor([0, 3, 5], dtype=torch.int32)
    starts_k = torch.tensor([0, 7, 7], dtype=torch.int32)  # the second request has no context
    if HAS_COMMON:
        chunk = SimpleNamespace(query_start_loc=starts_q, max_query_len=3, cu_seq_lens=starts_k, max_seq_len=7)
        where = {"chunk": chunk}
    else:
        where = {"chunk_idx": 0}
        context = SimpleNamespace(cu_seq_lens=starts_k.unsqueeze(0), max_seq_lens=[7])
        backend.prepare_metadata(SimpleNamespace(query_start_loc=starts_q, max_query_len=3, chunked_context=context))
    q, k = torch.randn(5, 2, 192).bfloat16(), torch.randn(7, 2, 192).bfloat16()
    v = torch.randn(7, 2, 128).bfloat16()
    out, lse = backend.run_prefill_context_chunk(q=q, k=k, v=v, **where)
    scores = torch.einsum("thd,khd->htk", q[:3].double(), k.double()) * 0.1
    expected = torch.einsum("htk,khd->thd", scores.softmax(-1), v.double())
    assert lse.shape == (2, 5)
    assert lse.is_contiguous()  # the merge of 0.24 reads no strides
    torch.testing.assert_close(lse[:, :3].double(), scores.logsumexp(-1), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(out[:3].double(), expected, atol=2**-7, rtol=2**-7)  # bfloat16
    assert torch.all(lse[:, 3:] == -torch.inf)
    assert torch.all(out[3:] == 0)
