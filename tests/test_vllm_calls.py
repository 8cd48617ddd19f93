"""Each call by which vLLM's sources reach a method of ours fits its signature: names and places of arguments.

They need vLLM's Python side only: `python -m scripts.vllm_tests 0.24.0 FOLDER` fetches it and runs this file.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import vllm_found

if not vllm_found.importable():
    pytest.skip("vLLM is not installed: python -m scripts.vllm_tests fetches it", allow_module_level=True)

import vllm
import vllm_layer  # noqa: F401  stands in for pinned memory
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from mla_ops.integrations.vllm import backends, indexer, v4

CALLERS = (
    "model_executor/layers/attention/*mla_attention.py",
    "model_executor/layers/sparse_attn_indexer.py",
    "models/deepseek_v32/attention.py",
    "models/deepseek_v4/attention.py",
    "models/deepseek_v4/nvidia/flashmla.py",
    "models/kimi_k3/nvidia/mla.py",
    "platforms/*.py",
    "v1/attention/backend.py",
    "v1/attention/backends/utils.py",
    "v1/attention/selector.py",
    "v1/spec_decode/*.py",
    "v1/worker/**/*.py",
)
SERVED = (backends.MLAOpsSparseBackend, backends.MLAOpsDenseBackend, indexer.IndexerBackend)
CLASSES = [backends.MLAOpsPrefillBackend, *SERVED, *(backend.get_builder_cls() for backend in SERVED)]
CLASSES += [backend.get_impl_cls() for backend in SERVED[:2]]
FUNCTIONS = {
    "sparse_attn_indexer": inspect.signature(indexer.choose_keys),
    "_forward_decode": inspect.signature(v4.forward_decode.__get__(object())),
    "_forward_prefill": inspect.signature(v4.forward_prefill.__get__(object())),
}
MUST_BE_CALLED = {"run_prefill_new_tokens", "run_prefill_context_chunk", "forward_mqa", "do_kv_cache_update", "build"}
MUST_BE_CALLED |= {"_build_decode", "get_supported_kernel_block_sizes", *FUNCTIONS}
MUST_BE_CALLED |= {"_forward_mqa_kernel", "customize_spec"} if hasattr(AttentionBackendEnum, "register") else set()


def ours(cls: type) -> Iterator[tuple[str, inspect.Signature]]:
    """Methods that vLLM may call, without `self`."""
    for base in cls.__mro__:
        if not base.__module__.startswith("mla_ops."):
            continue
        for name, member in vars(base).items():
            if isinstance(member, staticmethod | classmethod) or inspect.isfunction(member):
                yield name, inspect.signature(member.__get__(object(), cls))


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        of_base = isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super"
        unpacked = any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords)
        if not of_base and not unpacked:
            yield node.func.attr if of is not None else getattr(node.func, "id", ""), node


def test_the_calls_of_vllm_fit_our_methods():
    methods: dict[str, list[tuple[str, inspect.Signature]]] = {}
    for cls in CLASSES:
        for name, signature in ours(cls):
            methods.setdefault(name, []).append((cls.__qualname__, signature))
    for name, signature in FUNCTIONS.items():
        methods.setdefault(name, []).append(("mla_ops", signature))
    found, wrong = set(), []
    root = Path(vllm.__file__).parent
    for path in (path for pattern in CALLERS for path in sorted(root.glob(pattern))):
        for name, call in calls(path):
            for owner, signature in methods.get(name, ()):
                found.add(name)
                try:
                    signature.bind(*call.args, **{keyword.arg: keyword.value for keyword in call.keywords})
                except TypeError as error:
                    wrong.append(f"{path.relative_to(root)}:{call.lineno}: {owner}.{name}{signature}: {error}")
    assert wrong == []
    assert found >= MUST_BE_CALLED


def replaced() -> Iterator[tuple[type, str, Callable[..., object]]]:
    for cls in CLASSES:
        theirs = [base for base in cls.__mro__ if not base.__module__.startswith("mla_ops.")]
        for name in dict(ours(cls)):
            member = next((vars(base)[name] for base in theirs if name in vars(base)), None)
            if name != "__init__" and (isinstance(member, staticmethod | classmethod) or inspect.isfunction(member)):
                yield cls, name, member


@pytest.mark.parametrize(("cls", "name", "member"), list(replaced()))
def test_a_method_takes_every_argument_of_the_one_it_replaces(cls, name, member):
    methods = (inspect.getattr_static(cls, name), member)
    mine, theirs = (inspect.signature(method.__get__(object(), cls)).parameters for method in methods)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in mine.values()):
        assert theirs.keys() <= mine.keys()
