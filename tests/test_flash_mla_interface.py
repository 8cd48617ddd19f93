"""The interface of FlashMLA: its signatures, shapes and conventions, against attention in float64."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import fresh
import pytest
import torch
from torch._inductor.utils import run_and_get_code

import mla_ops
from mla_ops.integrations import flash_mla
from scripts import flash_mla_programs

# Positional arguments of FlashMLA 1.0, and what its newest sources and the copies of vLLM 0.24 and 0.33 and
# sgl-flash-mla 1.0 add by name.
SIGNATURES = {
    "flash_mla_with_kvcache": (
        """q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale causal
        is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache topk_length extra_topk_length""",
        "out enable_batch_invariant use_legacy kv_format descale_q descale_k",
    ),
    "flash_mla_sparse_fwd": (
        "q kv indices sm_scale d_v attn_sink topk_length",
        "indexer_topk out use_legacy return_log2_lse",
    ),
}
FORMATS = {"fp8_ds_mla": 576, "fp8_ds_mla_v4": 512, "bf16": 576}


def attention(q, keys, valid, scale, sink=None):
    """`q [rows, heads, d]`, `keys [rows, n, d]`, `valid [rows, n]`: out, maximum, lse with +inf for empty rows."""
    scores = torch.einsum("rhd,rkd->rhk", q.double(), keys.double()) * scale
    scores = scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1))
    out = torch.einsum("rhk,rkd->rhd", weights, keys[..., :512].double())
    if sink is not None:
        out = out * torch.sigmoid(lse - sink.double()).nan_to_num(0.0).unsqueeze(-1)  # -inf - -inf: an empty row
    return out, scores.amax(-1), lse.masked_fill(lse == -torch.inf, torch.inf)


def make_cache(cache_format: str, num_blocks: int, page: int, device: torch.device):
    """A filled cache, shaped as FlashMLA's callers shape it, and its keys by slot."""
    width = FORMATS[cache_format]
    cache = mla_ops.allocate_cache(cache_format, num_blocks, page, head_dim=width, device=device)
    num_slots = num_blocks * page
    latent = torch.randn(num_slots, width, device=device, dtype=torch.bfloat16)
    split = 448 if cache_format == "fp8_ds_mla_v4" else 512
    slots = torch.arange(num_slots, device=device)
    mla_ops.concat_and_cache(latent[:, :split].contiguous(), latent[:, split:].contiguous(), cache, slots, cache_format)
    table = torch.arange(num_blocks, dtype=torch.int32, device=device).unsqueeze(0)
    lengths = torch.tensor([num_slots], dtype=torch.int32, device=device)
    starts = torch.tensor([0, num_slots], dtype=torch.int32, device=device)
    keys = mla_ops.gather_cache(cache, table, lengths, starts, num_slots, cache_format)
    if cache.dim() == 2:  # blocks with what pads them; a row of the view is not a token
        shape, strides = (num_blocks, page, 1, 584), (cache.stride(0), 584, 584, 1)
        return cache.as_strided(shape, strides).view(torch.float8_e4m3fn), keys
    cache = cache.unsqueeze(2)
    return (cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache), keys


def selected(keys: torch.Tensor, indices: torch.Tensor, length: torch.Tensor | None = None):
    valid = (indices >= 0) & (indices < len(keys))
    if length is not None:
        valid &= torch.arange(indices.shape[1], device=indices.device) < length.unsqueeze(1)
    return keys[indices.long().where(valid, 0)], valid


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """bfloat16 outputs: half a unit in the last place of the result, and as much of the largest weight's rounding."""
    torch.testing.assert_close(result.double(), expected, atol=2**-7, rtol=2**-7)


def close_lse(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_those_of_the_releases(name):
    positional, by_name = SIGNATURES[name]
    parameters = inspect.signature(getattr(flash_mla, name)).parameters.values()
    kinds = {kind: [p.name for p in parameters if p.kind is kind] for kind in {p.kind for p in parameters}}
    assert kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD] == positional.split()
    assert kinds[inspect.Parameter.KEYWORD_ONLY] == by_name.split()


@pytest.mark.parametrize("path", ["vllm/third_party/flashmla", "flash_mla"])
def test_an_installed_release_has_nothing_that_is_not_here(path):
    """The source is read, which is there without the compiled part that it imports."""
    package, *folders = path.split("/")
    found = importlib.util.find_spec(package)
    roots = [] if found is None else [Path(root, *folders) for root in found.submodule_search_locations or ()]
    sources = [root / "flash_mla_interface.py" for root in roots if (root / "flash_mla_interface.py").exists()]
    if not sources:
        pytest.skip(f"{package} with FlashMLA's interface is not installed")
    functions = [node for node in ast.parse(sources[0].read_text()).body if isinstance(node, ast.FunctionDef)]
    theirs = {node.name: [argument.arg for argument in node.args.args] for node in functions}
    assert set(SIGNATURES) <= set(theirs)
    assert {name for name in theirs if name.startswith(("flash_mla", "get_mla"))} <= set(flash_mla.__all__)
    for name, (positional, by_name) in SIGNATURES.items():
        expected = positional.split()
        assert theirs[name][: len(expected)] == expected
        assert set(theirs[name][len(expected) :]) <= set(by_name.split())


@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("s_q", [1, 3])
def test_sparse_decode(cache_format, s_q, device):
    cache, keys = make_cache(cache_format, 7, 61, device)
    b, heads, topk = 4, 16, 64
    q = torch.randn(b, s_q, heads, FORMATS[cache_format], device=device, dtype=torch.bfloat16)
    indices = torch.randint(-1, len(keys), (b, s_q, topk), device=device, dtype=torch.int32)
    indices[0] = -1
    indices[1, :, ::7] = 2**31 - 1
    sink = torch.randn(heads, device=device)
    sink[:2] = torch.tensor([torch.inf, -torch.inf])
    length = torch.tensor([topk, topk, 5, 0], device=device, dtype=torch.int32)
    metadata, splits = flash_mla.get_mla_metadata(length, 16, 1, num_heads_q=16, is_fp8_kvcache=True, topk=topk)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, metadata, splits, 0.1, indices=indices, attn_sink=sink, topk_length=length
    )
    flat = indices.view(b * s_q, topk)
    chosen, valid = selected(keys, flat, length.repeat_interleave(s_q))
    expected, _, expected_lse = attention(q.flatten(0, 1), chosen, valid, 0.1, sink)
    assert out.shape == (b, s_q, heads, 512)
    assert lse.shape == (b, heads, s_q)
    assert torch.all(lse[0] == torch.inf)
    assert torch.all(lse[3] == torch.inf)
    close(out.flatten(0, 1), expected)
    close_lse(lse.transpose(1, 2).flatten(0, 1), expected_lse)


def test_two_caches_of_different_pages_share_a_softmax(device):
    cache, keys = make_cache("fp8_ds_mla_v4", 5, 61, device)
    extra, extra_keys = make_cache("fp8_ds_mla_v4", 9, 2, device)
    b, s_q, heads = 2, 2, 64
    q = torch.randn(b, s_q, heads, 512, device=device, dtype=torch.bfloat16)
    indices = torch.randint(-1, len(keys), (b, s_q, 32), device=device, dtype=torch.int32)
    extra_indices = torch.randint(-1, len(extra_keys), (b, s_q, 12), device=device, dtype=torch.int32)
    extra_length = torch.tensor([3, 12], device=device, dtype=torch.int32)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q,
        cache,
        None,
        None,
        512,
        flash_mla.get_mla_metadata()[0],
        is_fp8_kvcache=True,
        indices=indices,
        extra_k_cache=extra,
        extra_indices_in_kvcache=extra_indices,
        extra_topk_length=extra_length,
        enable_batch_invariant=True,
    )
    first, valid = selected(keys, indices.view(4, -1))
    second, extra_valid = selected(extra_keys, extra_indices.view(4, -1), extra_length.repeat_interleave(s_q))
    chosen, valid = torch.cat((first, second), 1), torch.cat((valid, extra_valid), 1)
    expected, _, expected_lse = attention(q.flatten(0, 1), chosen, valid, 512**-0.5)
    close(out.flatten(0, 1), expected)
    close_lse(lse.transpose(1, 2).flatten(0, 1), expected_lse)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cache_format", ["bf16", "fp8_ds_mla"])
def test_dense_decode_ignores_what_a_table_holds_past_the_end(causal, cache_format, device):
    page, b, s_q, heads = 64, 3, 4, 9
    cache, keys = make_cache(cache_format, 6, page, device)
    lengths = torch.tensor([100, 0, 65], device=device, dtype=torch.int32)
    table = torch.tensor([[4, 1, 2147480000], [2147480000] * 3, [0, 5, 2147480000]], dtype=torch.int32, device=device)
    q = torch.randn(b, s_q, heads, 576, device=device, dtype=torch.bfloat16)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, cache, table, lengths, 512, *flash_mla.get_mla_metadata(), causal=causal
    )
    for request, length in enumerate(lengths.tolist()):
        positions = torch.arange(2 * page, device=device)
        slots = table[request, :2].long().clamp(max=5)[positions // page] * page + positions % page
        ends = length - (s_q - 1 - torch.arange(s_q, device=device)) if causal else torch.full((s_q,), length)
        valid = positions < ends.to(device).unsqueeze(1)
        expected, _, expected_lse = attention(q[request], keys[slots].expand(s_q, -1, -1), valid, 576**-0.5)
        close(out[request], expected)
        close_lse(lse[request].T, expected_lse)


@pytest.mark.parametrize("sparse", [True, False])
def test_queries_of_one_request_have_the_length_of_it(sparse, device):
    """The first of two requests alone, whose lengths would otherwise be a view of one number."""
    cache, _ = make_cache("fp8_ds_mla", 4, 64, device)
    q = torch.randn(2, 3, 16, 576, device=device, dtype=torch.bfloat16)
    lengths = torch.tensor([70, 5], device=device, dtype=torch.int32)
    table = torch.tensor([[2, 0], [1, 3]], device=device, dtype=torch.int32)
    indices = torch.randint(0, 256, (2, 3, 128), device=device, dtype=torch.int32)

    def run(n):
        if sparse:
            options = {"indices": indices[:n], "topk_length": lengths[:n], "is_fp8_kvcache": True}
            return flash_mla.flash_mla_with_kvcache(q[:n], cache, None, None, 512, None, **options)
        return flash_mla.flash_mla_with_kvcache(q[:n], cache, table[:n], lengths[:n], 512, None, causal=False)

    (out, lse), (both, both_lse) = run(1), run(2)
    torch.testing.assert_close(out, both[:1])
    torch.testing.assert_close(lse, both_lse[:1])


def test_flat_keys_with_the_largest_logit(device):
    q = torch.randn(6, 32, 576, device=device, dtype=torch.bfloat16)
    kv = torch.randn(50, 1, 576, device=device, dtype=torch.bfloat16)
    kv[9] = kv[4]  # two keys share the maximum
    indices = torch.randint(-2, 60, (6, 1, 128), device=device, dtype=torch.int32)
    indices[1] = -1
    length = torch.tensor([128, 128, 7, 0, 64, 128], device=device, dtype=torch.int32)
    sink = torch.randn(32, device=device)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1, 512, sink, length)
    chosen, valid = selected(kv.squeeze(1), indices.squeeze(1), length)
    expected, expected_max, expected_lse = attention(q, chosen, valid, 0.1, sink)
    close(out, expected)
    close_lse(lse, expected_lse)
    # sums of 576 products in float32, ln(128) / 2**24
    torch.testing.assert_close(max_logits.double(), expected_max, atol=1e-5, rtol=1e-5)
    assert torch.all(max_logits[[1, 3]] == -torch.inf)
    assert torch.all(lse[[1, 3]] == torch.inf)

    *same, of_indexer = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1, 512, sink, length, indexer_topk=20)
    assert all(torch.equal(a, b) for a, b in zip(same, (out, max_logits, lse), strict=True))
    _, _, expected_lse = attention(q, chosen[:, :20], valid[:, :20], 0.1)
    close_lse(of_indexer, expected_lse)
    with pytest.raises(ValueError, match="indexer_topk must be at most 128, got 129"):
        flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1, indexer_topk=129)


def test_out_is_written_and_returned(device):
    cache, _ = make_cache("fp8_ds_mla", 3, 64, device)
    q = torch.randn(2, 2, 8, 576, device=device, dtype=torch.bfloat16)
    indices = torch.randint(0, 192, (2, 2, 16), device=device, dtype=torch.int32)
    arguments = (q, cache, None, None, 512, None)
    expected, _ = flash_mla.flash_mla_with_kvcache(*arguments, indices=indices)
    out = torch.full_like(expected, torch.nan)
    assert flash_mla.flash_mla_with_kvcache(*arguments, indices=indices, out=out)[0] is out
    assert torch.equal(out, expected)
    kv = torch.randn(20, 1, 576, device=device, dtype=torch.bfloat16)
    flat = torch.full_like(expected[0], torch.nan)
    assert flash_mla.flash_mla_sparse_fwd(q[0], kv, indices[0].unsqueeze(1), 0.1, out=flat)[0] is flat
    assert torch.isfinite(flat).all()


def compiled_once(step, device, *, flat_calls, sizes):
    """A graph with dynamic sizes, which calls flat attention so often, and gives the bits of eager at each size."""

    def arguments(b):
        q = torch.randn(b, 2, 8, 576, device=device, dtype=torch.bfloat16)
        indices = torch.randint(-1, 192, (b, 2, 16), device=device, dtype=torch.int32)
        return q, indices, torch.randn(200, 1, 576, device=device, dtype=torch.bfloat16)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    _, codes = run_and_get_code(compiled, *arguments(4))
    assert len(codes) == 1
    assert codes[0].count("torch.ops.mla.sparse_attention.default(") == flat_calls
    with torch.compiler.set_stance("fail_on_recompile"):
        for b in sizes:
            inputs = arguments(b)
            for result, expected in zip(compiled(*inputs), step(*inputs), strict=True):
                assert torch.equal(result, expected)


def test_compiles_to_one_graph(device):
    """Every branch of the interface."""
    cache, _ = make_cache("fp8_ds_mla", 11, 64, device)
    cache = cache.view(torch.uint8)

    def step(q, indices, kv):
        metadata, _ = flash_mla.get_mla_metadata()
        out, lse = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, metadata, None, 0.1, indices=indices)
        flat, largest, _ = flash_mla.flash_mla_sparse_fwd(q[:, 0], kv, indices[:, :1], 0.1)
        table, lengths = indices[:, 0, :3].clamp(0, 10), indices[:, 0, 0].clamp(0)
        dense = flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, metadata, causal=True)
        both = flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, 512, indices=indices, extra_k_cache=cache, extra_indices_in_kvcache=indices
        )
        return out, lse, flat, *dense, *both, largest

    compiled_once(step, device, flat_calls=2, sizes=(5, 2))


def test_what_is_not_used_is_not_computed(device):
    def step(q, indices, kv):
        flat, _, lse = flash_mla.flash_mla_sparse_fwd(q[:, 0], kv, indices[:, :1], 0.1)
        return flat, lse

    compiled_once(step, device, flat_calls=1, sizes=(5,))


@pytest.mark.gpu
def test_a_captured_call_is_replayed_with_other_lengths():
    """FlashMLA bakes a plan in; here there is none."""
    device = torch.device("cuda")
    cache, _ = make_cache("fp8_ds_mla", 40, 64, device)
    q = torch.randn(4, 1, 64, 576, device=device, dtype=torch.bfloat16)
    indices = torch.randint(0, 2560, (4, 1, 2048), device=device, dtype=torch.int32)
    length = torch.full((4,), 64, device=device, dtype=torch.int32)
    metadata, _ = flash_mla.get_mla_metadata()

    def step():
        return flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, 512, metadata, indices=indices, topk_length=length
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    length.copy_(torch.tensor([2048, 0, 1000, 64]))
    graph.replay()
    expected, expected_lse = step()
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_refusals(device):
    cache, _ = make_cache("fp8_ds_mla", 3, 64, device)
    q = torch.randn(2, 1, 8, 576, device=device, dtype=torch.bfloat16)
    indices = torch.zeros(2, 1, 16, device=device, dtype=torch.int32)

    def decode(k_cache=cache, head_dim_v=512, **options):
        return flash_mla.flash_mla_with_kvcache(q, k_cache, None, None, head_dim_v, None, **options)

    with pytest.raises(NotImplementedError, match=r"k_cache has 2 key heads"):
        decode(torch.zeros(3, 64, 2, 576, device=device, dtype=torch.bfloat16), indices=indices)
    with pytest.raises(ValueError, match=r"rows of k_cache must be 656 bytes \(fp8_ds_mla\) or 584 .*, got 528"):
        decode(torch.zeros(3, 64, 1, 528, device=device, dtype=torch.uint8), indices=indices)
    with pytest.raises(ValueError, match=r"head_dim_v must be 512, got 128"):
        decode(head_dim_v=128, indices=indices)
    with pytest.raises(ValueError, match=r"causal goes with dense attention"):
        decode(indices=indices, causal=True)
    with pytest.raises(ValueError, match=r"is_fp8_kvcache is False, but k_cache is fp8_ds_mla"):
        decode(indices=indices, is_fp8_kvcache=False)
    with pytest.raises(ValueError, match=r"block_table and cache_seqlens must be given"):
        decode()
    with pytest.raises(ValueError, match=r"go with indices, which is None"):
        decode(topk_length=indices[:, 0, 0])
    with pytest.raises(ValueError, match=r"takes extra_k_cache and extra_indices_in_kvcache"):
        decode(indices=indices, extra_k_cache=cache)
    with pytest.raises(NotImplementedError, match=r"descale_q and descale_k"):
        decode(indices=indices, descale_q=q)
    with pytest.raises(ValueError, match=r"kv_format is V41, of V32, V4, but k_cache is fp8_ds_mla$"):
        decode(indices=indices, kv_format="V41")
    with pytest.raises(ValueError, match=r"indices must have shape \[2, 1, topk\], got \[2, 16\]"):
        decode(indices=indices[:, 0])
    with pytest.raises(ValueError, match=r"topk_length must have shape \[2\], got \[1\]"):
        decode(indices=indices, topk_length=indices[:1, 0, 0])
    with pytest.raises(ValueError, match=r"out must have shape \[2, 1, 8, 512\], got \[2, 1, 8, 576\]"):
        decode(indices=indices, out=q)
    lengths = torch.ones(2, device=device, dtype=torch.int32)
    pair, scattered = q.expand(2, 2, 8, 576), q.new_empty(2, 2, 8, 512).transpose(0, 1)
    with pytest.raises(ValueError, match=r"out must be contiguous, got strides \(4096, 8192, 512, 1\)"):
        flash_mla.flash_mla_with_kvcache(
            pair, cache, None, None, 512, None, indices=indices.expand(2, 2, 16), out=scattered
        )
    with pytest.raises(ValueError, match=r"block_table must have shape \[2, max_blocks\], got \[1, 3\]"):
        flash_mla.flash_mla_with_kvcache(q, cache, lengths.new_zeros(1, 3), lengths, 512)
    with pytest.raises(TypeError, match=r"flash_mla_with_kvcache: cache_seqlens must be torch.int32, got torch.int64"):
        flash_mla.flash_mla_with_kvcache(q, cache, lengths.new_zeros(2, 3), lengths.long(), 512)
    with pytest.raises(TypeError, match=r"flash_mla_with_kvcache: indices must be torch.int32, got torch.int64"):
        decode(indices=indices.long())
    with pytest.raises(NotImplementedError, match=r"kv has 2 key heads"):
        flash_mla.flash_mla_sparse_fwd(q[0], q.new_zeros(9, 2, 576), indices[:1], 0.1)
    with pytest.raises(TypeError, match=r"flash_mla_with_kvcache: k_cache must be a tensor, got None"):
        decode(None, indices=indices)
    with pytest.raises(TypeError, match=r"flash_mla_sparse_fwd: kv must be a tensor, got None"):
        flash_mla.flash_mla_sparse_fwd(q[0], None, indices[:1], 0.1)
    with pytest.raises(NotImplementedError, match=r"results are natural logarithms"):
        flash_mla.flash_mla_sparse_fwd(q[0], q.new_zeros(9, 1, 576), indices[:1], 0.1, return_log2_lse=True)


def test_programs_import_it_under_its_name(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, flash_mla, beside\n"
        "import flash_mla.flash_mla_interface as interface\n"
        "from flash_mla.flash_mla_interface import flash_mla_with_kvcache\n"
        "assert flash_mla_with_kvcache is interface.flash_mla_with_kvcache is flash_mla.flash_mla_with_kvcache\n"
        "print(__name__, flash_mla.__name__, *sys.argv[1:])\n"
    )
    (tmp_path / "beside.py").touch()
    missing = fresh.run("-m", "mla_ops.integrations.flash_mla", str(tmp_path / "nothing.py"))
    assert missing.returncode == 1
    assert missing.stderr == f"there is no program {tmp_path / 'nothing.py'}\n"
    result = fresh.run("-m", "mla_ops.integrations.flash_mla", str(program), "--dtype", "bf16", check=True)
    assert result.stdout.split() == ["__main__", "mla_ops.integrations.flash_mla", "--dtype", "bf16"]


def test_install_refuses_where_another_flash_mla_is_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_mla", sys)
    with pytest.raises(RuntimeError, match="flash_mla is imported already"):
        flash_mla.install()


def test_processes_share_the_cases_of_a_program(tmp_path):
    """A case that ran is kept and not run again: FlashMLA's programs take longer than one has a GPU for."""
    (tmp_path / "test_flash_mla_sparse_decoding.py").write_text(
        "from types import SimpleNamespace\n"
        "def gen_testcase():\n"
        "    decode = SimpleNamespace(b=9, block_size=64, extra_topk=None, extra_s_k=None, extra_block_size=None)\n"
        "    for n in range(40):\n"
        "        case = SimpleNamespace(n=n, s_q=1, topk=64, s_kv=512, d_qk=576, decode=decode)\n"
        "        case.to_test_param = lambda case=case: case\n"
        "        yield case\n"
        "def test_flash_mla(case):\n"
        "    if case.n == 7:\n"
        "        raise NotImplementedError\n"
        "    return SimpleNamespace(is_correct=case.n != 11)\n"
    )
    arguments = SimpleNamespace(folder=tmp_path, seconds=60, processes=2, gib=1.5)
    kept = {"cases": 0, "outcomes": {str(n): "before" for n in range(3)}}
    flash_mla_programs.run_program("sparse_decoding", arguments, kept)
    assert kept["cases"] == 40
    others = {0: "before", 1: "before", 2: "before", 7: "refused", 11: "failed"}
    assert kept["outcomes"] == {str(n): others.get(n, "passed") for n in range(40)}


def test_without_max_logits(monkeypatch):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(flash_mla, "_with_max_logits", True)
    flash_mla.install(max_logits=False)
    q = torch.randn(2, 8, 512)
    out, max_logits, _ = flash_mla.flash_mla_sparse_fwd(
        q, torch.randn(4, 1, 512), torch.zeros(2, 1, 3, dtype=torch.int32), 0.1
    )
    assert max_logits is None
    assert out.shape == (2, 8, 512)


def test_logarithms_that_are_not_wanted():
    q, keys, chosen = torch.randn(2, 8, 512), torch.randn(4, 1, 512), torch.zeros(2, 1, 3, dtype=torch.int32)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(q, keys, chosen, 0.1, return_log2_lse=False)
    assert max_logits is lse is None
    assert torch.equal(out, flash_mla.flash_mla_sparse_fwd(q, keys, chosen, 0.1)[0])


def test_a_plan_that_a_program_made_is_ignored():
    """Fields that were filled ahead, tensors of the old interface, or anything else."""
    cache, _ = make_cache("fp8_ds_mla", 3, 64, torch.device("cpu"))
    q, indices = torch.randn(2, 1, 8, 576).bfloat16(), torch.randint(0, 192, (2, 1, 16), dtype=torch.int32)
    expected, _ = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, indices=indices)
    plan, _ = flash_mla.get_mla_metadata(torch.ones(2), 8, 1)
    plan.tile_scheduler_metadata, plan.num_splits = flash_mla.get_mla_decoding_metadata(torch.ones(2), 8, 1)
    for metadata, splits in ((plan, None), (torch.zeros(3, 8), torch.zeros(3)), (object(), object())):
        out, _ = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, metadata, splits, indices=indices)
        assert torch.equal(out, expected)
