"""The example of SGLang hooks: what it computes, and that the installed SGLang still calls it as it expects."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mla_ops
from examples import sglang_hooks


def source_of(module: str) -> str:
    """A file of SGLang, which needs a GPU to be imported."""
    found = importlib.util.find_spec("sglang")
    for root in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(root, *module.split(".")[1:]).with_suffix(".py")
        if path.exists():
            return path.read_text()
    pytest.skip("SGLang is not installed")
    raise AssertionError


@pytest.mark.parametrize("target", sglang_hooks.HOOKS)
def test_arguments_are_those_of_the_target(target):
    module, name, method = target.rsplit(".", 2)
    classes = [node for node in ast.parse(source_of(module)).body if isinstance(node, ast.ClassDef)]
    (backend,) = [node for node in classes if node.name == name]
    (function,) = [node for node in backend.body if isinstance(node, ast.FunctionDef) and node.name == method]
    assert [argument.arg for argument in function.args.args] == list(
        inspect.signature(sglang_hooks.HOOKS[target]).parameters
    )


def test_the_registry_is_where_it_was():
    source = source_of("sglang.srt.plugins.hook_registry")
    assert "class HookRegistry" in source
    assert "REPLACE = " in source


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
def test_decode(cache_format):
    layer = SimpleNamespace(tp_q_head_num=8, head_dim=576)
    cache = mla_ops.allocate_cache(cache_format, 3, 64)
    latent, rope = torch.randn(192, 512).bfloat16(), torch.randn(192, 64).bfloat16()
    mla_ops.concat_and_cache(latent, rope, cache, torch.arange(192), cache_format)
    q = torch.randn(5, 8, 576).bfloat16()
    slots = torch.randint(-1, 192, (5, 64), dtype=torch.int32)
    flat = cache.view(torch.float8_e4m3fn) if cache_format == "fp8_ds_mla" else cache
    backend = SimpleNamespace(physical_page_size=64)
    out = sglang_hooks.forward_flashmla_kv(backend, q, flat.view(192, 1, -1), 512, 0.1, layer, None, slots)
    expected, _ = mla_ops.paged_sparse_attention(q, cache, slots, 0.1, cache_format)
    assert torch.equal(out, expected.unsqueeze(1))  # FlashMLA's [b, s_q, h_q, 512]


def test_prefill():
    q, keys = torch.randn(5, 8, 576).bfloat16(), torch.randn(90, 1, 576).bfloat16()
    indices = torch.randint(-1, 90, (5, 64), dtype=torch.int32)
    sink = torch.randn(8)
    out = sglang_hooks.forward_flashmla_sparse(None, q, keys, 512, indices, 0.1, attn_sink=sink)
    scores = torch.einsum("thd,tkd->thk", q.double(), keys[indices.long(), 0].double()) * 0.1
    scores = scores.masked_fill(indices.unsqueeze(1) < 0, -torch.inf)
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sink.double().exp().view(8, 1))
    expected = torch.einsum("thk,tkd->thd", weights, keys[indices.long(), 0, :512].double())
    torch.testing.assert_close(out.double(), expected, atol=2**-7, rtol=2**-7)  # bfloat16
