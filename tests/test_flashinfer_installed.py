"""An installed FlashInfer takes, without a GPU, the calls that the sparse adapter makes."""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_inputs import SCALE, filled_cache, queries, some_indices
from flashinfer_stand_ins import CPU, Sm120, played, sm120_inputs, trtllm, trtllm_calls  # noqa: F401 (a fixture)

from mla_ops import dispatch, formats
from mla_ops.kernels.flashinfer import installation, sparse

pytestmark = pytest.mark.skipif(not dispatch.is_installed("flashinfer"), reason="FlashInfer is not installed")
# an RTX PRO 6000 has so many
NUM_SMS, SHARED_BYTES = 188, 101376


@pytest.fixture
def real() -> Callable[[str], Any]:
    installation.api.cache_clear()
    return installation.api


def test_the_installed_flashinfer_takes_these_calls(real: Callable[[str], Any]) -> None:
    wrapper, decode = (real(name) for name in ("SparseMLASm120Wrapper", "trtllm_batch_decode_with_kv_cache_mla"))
    inspect.signature(wrapper).bind(kv_scale_format="arbitrary_fp32", device=CPU)
    for method, stand_in in ((wrapper.__init__, Sm120.__init__), (wrapper.run, Sm120.run), (decode, trtllm)):
        taken = inspect.signature(stand_in).parameters
        assert set(taken) <= set(inspect.signature(method).parameters)
    q, cache, indices = sm120_inputs("fp8_ds_mla", 3, 8, 64)
    sparse.compute_sparse(q, cache, indices, SCALE, "fp8_ds_mla", topk_length=torch.ones(3, dtype=torch.int32))
    inspect.signature(wrapper.run).bind(None, **Sm120.calls[-1])
    sparse.compute_sparse(q, filled_cache("bf16", 5, 64, CPU), indices, SCALE, "bf16")
    inspect.signature(decode).bind(**trtllm_calls[-1])


def test_the_installed_flashinfer_has_kernels_for_all_that_is_let_through(real: Callable[[str], Any]) -> None:
    """Its own table, which needs no GPU."""
    configs = importlib.import_module("flashinfer.mla").supported_sparse_mla_sm120_configs()
    for family, head_dim, row_bytes in (("glm_nsa", 576, 656), ("dsv4", 512, 584)):
        config = configs[family]
        assert (config.d_qk, config.bytes_per_token) == (head_dim, row_bytes)
        assert config.max_num_tokens == sparse.DECODE_TOKENS
        for num_heads in range(1, 129):
            for topk in (64, 128, 640, 2048, 2176):
                for page in (1, 2, 16, 64, 256):
                    assert config.supports_decode(num_heads, topk, num_tokens=64, page_block_size=page)


def test_the_installed_flashinfer_finds_the_shapes_for_sm100_right(real: Callable[[str], Any]) -> None:
    core = importlib.import_module("flashinfer.mla._core")
    q, indices = queries(3, 5, torch.bfloat16, CPU), some_indices(3, 200, 320, CPU)
    sparse.compute_sparse(q, filled_cache("bf16", 5, 64, CPU), indices, SCALE, "bf16")
    call = trtllm_calls[-1]
    core._check_trtllm_gen_mla_shape(
        call["query"],
        call["kv_cache"],
        call["kv_lora_rank"],
        call["qk_rope_head_dim"],
        call["sparse_mla_top_k"],
        call["block_tables"],
        call["kv_cache"].shape[1],
        require_aligned_block_table=False,
    )


def test_the_installed_flashinfers_own_reference_agrees(real: Callable[[str], Any]) -> None:
    """Over the slots that FlashInfer is given, up to the lengths that it is given."""
    reference = importlib.import_module("flashinfer.trace.templates.attention").dsa_paged_trace.reference
    cache, q = filled_cache("bf16", 5, 64, CPU), queries(3, 5, torch.bfloat16, CPU)
    out, lse = sparse.compute_sparse(q, cache, some_indices(3, 200, 320, CPU), SCALE, "bf16")
    call = trtllm_calls[-1]
    indices = call["block_tables"][:, 0].clone()
    indices[torch.arange(indices.shape[1]) >= call["seq_lens"][:, None]] = -1
    parts = (tensor[..., columns] for tensor in (q, cache) for columns in (slice(512), slice(512, None)))
    theirs, base2 = reference(*parts, indices, SCALE)
    torch.testing.assert_close(out, theirs, rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(lse, base2 * math.log(2), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """FlashInfer's C++ checks and its choice of kernels, compiled for the host."""
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc")
    tvm_ffi = importlib.import_module("tvm_ffi")
    environment = importlib.import_module("flashinfer.jit.env")
    of_ffi = Path(tvm_ffi.__file__).parent
    sources = environment.FLASHINFER_CSRC_DIR
    folders = (sources / "sparse_mla_sm120", sources, environment.FLASHINFER_INCLUDE_DIR, of_ffi / "include")
    library = tmp_path_factory.mktemp("flashinfer") / "checks.so"
    options = ["-std=c++17", "-O0", "-shared", "-Xcompiler=-fPIC", "-gencode=arch=compute_120a,code=sm_120a"]
    options += ["--expt-relaxed-constexpr", f"-L{of_ffi / 'lib'}", "-ltvm_ffi", "-o", str(library)]
    source = Path(__file__).with_name("flashinfer_checks.cu")
    subprocess.run(["nvcc", *options, *(f"-I{folder}" for folder in folders), str(source)], check=True)
    return tvm_ffi.load_module(str(library))


HEADS = (1, 3, 8, 9, 16, 17, 32, 40, 64, 65, 100, 128)


@pytest.mark.slow
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_ds_mla_v4"])
@pytest.mark.parametrize("num_tokens", [1, 64, 65, 130])
def test_the_installed_flashinfers_checks_let_these_calls_through(
    cache_format: str, num_tokens: int, checks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors, the kernel that it would choose, and that its scratch fits what it is given."""

    def run(self: Sm120, **given: Any) -> None:
        tensors = [given.get(name) for name in ("q", "kv_cache", "indices", "output", *OPTIONS)]
        scales = "arbitrary_fp32" if self.cache_format == "fp8_ds_mla" else "auto"
        metadata = list(checks.inspect(*tensors, checks.resolve_format(given["q"].shape[2], scales)))
        variants = dict(checks.metadata_candidates(metadata, 1, NUM_SMS, SHARED_BYTES))
        assert variants
        for variant in variants:
            plan = checks.resolve_attention([*metadata[:-1], variant], 1, 0, NUM_SMS, SHARED_BYTES)
            for (_, _, need, _), scratch in zip(plan.get_function("workspace")(), tensors[-2:], strict=False):
                assert need == 0 or scratch.numel() * scratch.element_size() >= need
        routes.append(num_tokens)

    routes: list[int] = []
    monkeypatch.setattr(Sm120, "run", run)
    for num_heads, topk, page in itertools.product(HEADS, (1, 100, 256, 2048), (2, 64)):
        cache = formats.allocate_cache(cache_format, 3, page)
        q = torch.zeros(num_tokens, num_heads, formats.FORMATS[cache_format].head_dims[0], dtype=torch.bfloat16)
        indices = torch.zeros(num_tokens, topk, dtype=torch.int32)
        lengths = torch.ones(num_tokens, dtype=torch.int32)
        sparse.compute_sparse(q, cache, indices, SCALE, cache_format, topk_length=lengths)
        if cache_format == "fp8_ds_mla_v4":
            extra = formats.allocate_cache(cache_format, 9, 17)
            sparse.compute_extra(q, cache, indices, SCALE, cache_format, extra, indices[:, :70], cache_format)
    assert len(routes) >= len(HEADS) * 8


OPTIONS = ("topk_length", "attn_sink", "extra_kv_cache", "extra_indices", "extra_topk_length", "out_lse")
OPTIONS += ("mid_out", "mid_lse")
