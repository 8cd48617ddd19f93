"""FlashInfer's dense adapter: what it refuses, and what it passes on.

FlashInfer's part is played by classes of the same signatures, as of 0.2 and as of 0.7, that insist on what the real
ones need, leave rows without keys as they were, and return an lse in base 2. `test_flashinfer_gpu.py` runs an installed
FlashInfer.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import attention_oracle
import dense_oracle
import pytest
import torch
from attention_inputs import SCALE, filled_cache, queries

import mla_ops  # noqa: F401  (registers the ops)
from mla_ops import dispatch
from mla_ops.dispatch import Call
from mla_ops.kernels.flashinfer import LOWERINGS, installation
from mla_ops.kernels.flashinfer import dense as flashinfer

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PREFILL = Call("prefill_attention", CUDA, torch.bfloat16, head_dim=192, num_heads=16, num_tokens=100, head_dim_v=128)
PAGED = Call("paged_attention", CUDA, torch.bfloat16, "bf16", 576, 128, 4, 8192, block_size=64)


def attend(q, k, v, scale, causal, out, lse):
    """One request into `out` and `lse`, which keep what they held where a query sees no key."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->qhk", q.float(), k.float().repeat_interleave(group, 1)) * scale
    if causal:
        hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1 + len(k) - len(q))
        scores = scores.masked_fill(hidden[:, None], -math.inf)
    row_lse = torch.logsumexp(scores, -1)
    seen = row_lse[:, 0] != -math.inf
    weights = (scores - row_lse.unsqueeze(-1)).exp()
    result = torch.einsum("qhk,khd->qhd", weights, v.float().repeat_interleave(group, 1)).to(q.dtype)
    out[seen], lse[seen] = result[seen], row_lse[seen] / math.log(2)


class Ragged:
    TILE = 8

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, backend="auto"):
        assert float_workspace_buffer.dtype == torch.uint8
        assert backend in ("auto", "fa2")
        self.backend = backend

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        assert int_workspace_buffer.dtype == float_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo=None,
        custom_mask=None,
        causal=False,
        sm_scale=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        assert qo_indptr.is_contiguous()
        assert kv_indptr.is_contiguous()
        assert qo_indptr.device.type == kv_indptr.device.type == "cpu"
        self.starts = qo_indptr.tolist(), kv_indptr.tolist()
        self.widths = num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo
        self.types = q_data_type, kv_data_type
        self.causal, self.scale = causal, sm_scale

    def run(self, q, k, v, *args, out=None, lse=None, return_lse=False):
        assert return_lse
        assert (q.shape[1], k.shape[1], k.shape[2], v.shape[2]) == self.widths
        assert (q.dtype, k.dtype) == self.types
        assert (len(q), len(k), len(v)) == (self.starts[0][-1], self.starts[1][-1], self.starts[1][-1])
        assert all(part.data_ptr() % 16 == 0 and part.stride(0) % 8 == part.stride(1) % 8 == 0 for part in (q, k, v))
        assert out.is_contiguous()
        assert out.shape == (*q.shape[:2], v.shape[2])
        assert lse.is_contiguous()
        out.fill_(math.nan)
        lse.fill_(math.nan)
        bounds = [slice(*pair) for starts in self.starts for pair in pairwise(starts)]
        number = len(bounds) // 2
        for rows, keys in zip(bounds[:number], bounds[number:], strict=True):
            attend(q[rows], k[keys], v[keys], self.scale, self.causal, out[rows], lse[rows])
            if self.backend == "auto":
                behind = v[keys.stop : keys.stop + (keys.start - keys.stop) % self.TILE]
                zeros = (behind * 0).sum(0).repeat_interleave(q.shape[1] // k.shape[1], 0)
                out[rows] += zeros
        return out, lse


def single_prefill_with_kv_cache(q, k, v, causal=False, sm_scale=None, backend="auto", return_lse=False):
    assert return_lse
    assert causal
    assert len(q) == len(k)
    out = q.new_full((*q.shape[:2], v.shape[2]), math.nan)
    lse = torch.full(q.shape[:2], math.nan, device=q.device)
    attend(q, k, v, sm_scale, causal, out, lse)
    return out, lse


class Planned:
    """FlashInfer's MLA decode, once it is planned. It faults on a page that there is not."""

    def __init__(self, float_workspace_buffer, use_cuda_graph=False, backend="auto"):
        assert not use_cuda_graph
        assert backend in ("auto", "fa2")

    def keep(self, starts, pages, lens, page_size, causal, scale, types):
        assert starts.dtype == pages.dtype == lens.dtype == torch.int32
        assert starts.device.type == lens.device.type == "cpu"
        assert len(starts) == len(lens) + 1
        assert len(pages) == int(starts[-1])
        assert torch.equal(starts.diff(), (lens + page_size - 1) // page_size)
        assert types == (torch.bfloat16, torch.bfloat16)
        assert not causal
        assert scale >= 0  # it takes the largest product before it scales
        self.starts, self.pages, self.lens, self.page_size, self.scale = starts, pages, lens, page_size, scale

    def attend(self, q, cache, out, lse):
        assert cache.shape[1:] == (self.page_size, 576)
        assert len(q) == len(self.lens)
        assert ((self.pages >= 0) & (self.pages < len(cache))).all()
        out.fill_(math.nan)
        lse.fill_(math.nan)
        for row, length in enumerate(self.lens.tolist()):
            pages = self.pages[self.starts[row] : self.starts[row + 1]]
            keys = cache[pages.long()].flatten(0, 1)[:length, None]
            one = slice(row, row + 1)
            attend(q[one], keys, keys[..., :512], self.scale, False, out[one], lse[one])


class Flat(Planned):
    """The interface of 0.2: lengths one by one, tensors in two parts."""

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        assert (head_dim_ckv, head_dim_kpe) == (512, 64)
        assert qo_indptr.tolist() == list(range(len(kv_len_arr) + 1))
        self.keep(kv_indptr, kv_indices, kv_len_arr, page_size, causal, sm_scale, (q_data_type, kv_data_type))

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False):
        assert return_lse
        assert out.shape == q_nope.shape
        self.attend(torch.cat((q_nope, q_pe), -1), torch.cat((ckv_cache, kpe_cache), -1), out, lse)


class Metadata:
    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        made = cls()
        made.arrays = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        return made


class Structured(Planned):
    """The interface of 0.7: what `run` is given has to be what was planned."""

    def plan(
        self,
        qo_indptr=None,
        *,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
        metadata=None,
        query_layout=None,
        kv_cache_layout=None,
        lse_mode="none",
    ):
        assert isinstance(metadata, Metadata)
        assert qo_indptr is query_layout is kv_cache_layout is None
        assert lse_mode == "base2"
        assert (head_dim_ckv, head_dim_kpe) == (512, 64)
        starts_q, starts, pages, lens = metadata.arrays
        assert starts_q.tolist() == list(range(len(lens) + 1))
        self.keep(starts, pages, lens, page_size, causal, sm_scale, (q_data_type, kv_data_type))

    def run(self, *, query, kv_cache, out=None, lse=None, return_lse=False, return_lse_base_on_e=False):
        assert return_lse
        assert not return_lse_base_on_e
        self.attend(query, kv_cache, out, lse)


@pytest.fixture(params=[Flat, Structured], ids=["0.2", "0.7"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    package, prefill, mla = (ModuleType(name) for name in ("flashinfer", "flashinfer.prefill", "flashinfer.mla"))
    prefill.BatchPrefillWithRaggedKVCacheWrapper = Ragged
    prefill.single_prefill_with_kv_cache = single_prefill_with_kv_cache
    mla.BatchMLAPagedAttentionWrapper = request.param
    if request.param is Structured:
        mla.MLAPlanMetadata = Metadata
    for module in (package, prefill, mla):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr(flashinfer, "_wrappers", {})
    installation.api.cache_clear()
    flashinfer._plan_metadata.cache_clear()
    yield package
    installation.api.cache_clear()
    flashinfer._plan_metadata.cache_clear()


@pytest.mark.parametrize("scale", [SCALE, -SCALE])
def test_paged_attention_holds_the_contract(
    scale: float,
    library: ModuleType,
    triton_lowering: None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Holes in the table, unknown requests, empty rows, more rows than fit one plan."""
    monkeypatch.setattr(flashinfer, "MAX_ROWS_PER_CALL", 4)
    cache, q = filled_cache("bf16", 6, 64, device), queries(7, 3, torch.bfloat16, device, 600)[..., 5:581]
    table = torch.tensor([[3, -1, 5], [99, 1, -(2**31)]], dtype=torch.int32, device=device)
    owners = torch.tensor([0, 0, 1, 1, 2, -1, 0], dtype=torch.int32, device=device)
    lens = torch.tensor([192, 130, 2**31 - 1, 64, 9, 9, -3], dtype=torch.int32, device=device)
    out, lse = flashinfer.compute_paged(q, cache, table, owners, lens, scale, "bf16")
    everything = torch.arange(192, dtype=torch.int32, device=device).expand(7, -1)
    expected = attention_oracle.attention(
        q, cache, everything, scale, topk_length=lens, block_table=table, req_id_per_token=owners
    )
    attention_oracle.assert_close(out, lse, expected)
    assert not out[3:].any()
    assert (lse[3:] == -math.inf).all()
    buffers = torch.full_like(out, math.nan), torch.full_like(lse, math.nan)
    run = LOWERINGS["paged_attention"].run
    run(q, cache, table, owners, lens, scale, "bf16", out=buffers[0], lse=buffers[1])
    assert torch.equal(buffers[0], out)
    assert torch.equal(buffers[1], lse)
    latent, rope = q.split((512, 64), dim=2)
    halves = flashinfer.compute_paged(latent, cache, table, owners, lens, scale, "bf16", q_rope=rope)
    assert torch.equal(halves[0], out)
    assert torch.equal(halves[1], lse)


@pytest.mark.parametrize(("num_tokens", "num_blocks", "max_blocks"), [(0, 2, 2), (2, 0, 2), (2, 2, 0)])
def test_paged_attention_of_nothing_is_empty(num_tokens: int, num_blocks: int, max_blocks: int) -> None:
    cache, q = filled_cache("bf16", num_blocks, 64, CPU), queries(num_tokens, 3, torch.bfloat16, CPU)
    tokens, table = torch.zeros(num_tokens, dtype=torch.int32), torch.zeros(1, max_blocks, dtype=torch.int32)
    out, lse = flashinfer.compute_paged(q, cache, table, tokens, tokens, SCALE, "bf16")
    assert out.shape == (num_tokens, 3, 512)
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("dims", [(192, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_prefill_holds_the_contract(
    library: ModuleType, dims: tuple[int, int], causal: bool, triton_lowering: None
) -> None:
    """Padding, odd strides, empty requests, more queries than keys, lengths past the tensors."""
    q, k = torch.randn(14, 4, dims[0]).bfloat16(), torch.randn(20, 2, dims[0] + 3).bfloat16()[..., 3:]
    v = torch.randn(20, 2, dims[1]).bfloat16()
    starts_q = torch.tensor([0, 5, 5, 8, 12], dtype=torch.int32)
    starts_k = torch.tensor([0, 3, 9, 9, 99], dtype=torch.int32)
    scale = dims[0] ** -0.5
    out, lse = flashinfer.compute_prefill(q, k, v, starts_q, starts_k, 5, 11, scale, causal=causal)
    expected = dense_oracle.prefill(q, k, v, starts_q, starts_k.clamp(max=20), scale, causal=causal, operand=None)
    attention_oracle.assert_close(out, lse, expected)
    assert not out[12:].any()
    assert (lse[5:8] == -math.inf).all()
    assert (lse[:2] == -math.inf).all() == causal


def test_threads_run_what_they_planned(
    library: ModuleType, triton_lowering: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a stream and so a wrapper. Both plan before either runs, unless one is kept waiting."""
    both, run_planned = threading.Barrier(2), Ragged.run

    def wait_and_run(self: Ragged, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        return run_planned(self, *args, **kwargs)

    monkeypatch.setattr(Ragged, "run", wait_and_run)
    calls, results = [], {}
    for lengths in ((3, 4), (2, 7)):
        starts = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
        tensors = (torch.randn(sum(lengths), 2, width).bfloat16() for width in (192, 192, 128))
        calls.append((*tensors, starts, starts, 7, 7, 0.1))

    def run(number: int) -> None:
        results[number] = flashinfer.compute_prefill(*calls[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (q, k, v, starts, *_) in enumerate(calls):
        expected = dense_oracle.prefill(q, k, v, starts, starts, 0.1, causal=True, operand=None)
        attention_oracle.assert_close(*results[number], expected)


def test_one_causal_request_with_itself_needs_no_plan(
    library: ModuleType, triton_lowering: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it may be captured; what lies behind the request is cleared."""

    def refuse(op: str, device: torch.device) -> None:
        raise NotImplementedError(f"{op}: it is being captured")

    monkeypatch.setattr(flashinfer, "_refuse_capture", refuse)
    q, k, v = (torch.randn(9, 4, width, device=device).bfloat16() for width in (192, 192, 128))
    starts = torch.tensor([0, 6], dtype=torch.int32, device=device)
    out, lse = flashinfer.compute_prefill(q, k, v, starts, starts, 6, 6, 0.1)
    expected = dense_oracle.prefill(q, k, v, starts, starts, 0.1, causal=True, operand=None)
    attention_oracle.assert_close(out, lse, expected)
    assert not out[6:].any()
    assert (lse[6:] == -math.inf).all()
    with pytest.raises(NotImplementedError, match="prefill_attention: it is being captured"):
        flashinfer.compute_prefill(q, k, v, starts, starts, 6, 6, 0.1, causal=False)
    with pytest.raises(NotImplementedError, match="paged_attention: it is being captured"):
        flashinfer.compute_paged(q, k, starts, starts, starts, 0.1, "bf16")


@pytest.mark.parametrize("neighbour", [0.5, math.nan, -math.inf])
def test_a_request_does_not_see_the_next(
    library: ModuleType, neighbour: float, triton_lowering: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hopper's kernel multiplies values behind a request by zero."""
    monkeypatch.setattr(flashinfer, "_backend", lambda device: "auto")
    q, k, v = (torch.randn(14, 2, width).bfloat16() for width in (192, 192, 128))
    v[5:] = neighbour
    starts = torch.tensor([0, 5, 14], dtype=torch.int32)
    out, lse = flashinfer.compute_prefill(q, k, v, starts, starts, 9, 9, 0.1)
    expected = dense_oracle.prefill(
        q, k, v, starts, starts, 0.1, causal=True, operand=None, tokens=list(range(14 if neighbour == 0.5 else 5))
    )
    attention_oracle.assert_close(out, lse, expected)
    assert {key[1] for key in flashinfer._wrappers} == {"auto" if neighbour == 0.5 else "fa2"}
    one = torch.tensor([0, 5], dtype=torch.int32)
    flashinfer.compute_prefill(q, k, v, one, one.clone(), 5, 5, 0.1)
    assert "auto" in {key[1] for key in flashinfer._wrappers}


def test_rows_of_a_call_have_keys_that_can_be_counted() -> None:
    for max_keys in (1, 8192, 2**19 - 1, 2**19, 2**20, 2**31 - 1, 2**40):
        rows = flashinfer.rows_per_call(max_keys)
        assert 1 <= rows <= flashinfer.MAX_ROWS_PER_CALL
        assert rows == 1 or rows * max_keys < 2**31
    assert flashinfer.rows_per_call(2**18) == flashinfer.MAX_ROWS_PER_CALL


@pytest.mark.parametrize(
    "lens", [(0, 0), (0, 5), (5, 0), (5, 3), (3, 5)], ids=lambda lens: f"{lens[0]} queries, {lens[1]} keys"
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_rows_without_keys(lens: tuple[int, int], causal: bool) -> None:
    starts = [torch.tensor([0, 2, 2 + length]) for length in lens]
    found = flashinfer.rows_without_keys(*starts, causal).tolist()
    seen = [row + 1 + lens[1] - lens[0] if causal else lens[1] for row in range(lens[0])]
    assert found == [False, False] + [number <= 0 for number in seen]


def test_an_api_that_changed_is_named(library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        def plan(self, head_dim_ckv):
            raise AssertionError

    monkeypatch.setattr(sys.modules["flashinfer.mla"], "BatchMLAPagedAttentionWrapper", Other)
    with pytest.raises(NotImplementedError, match="of the installed FlashInfer takes no head_dim_kpe, kv_data"):
        installation.api("BatchMLAPagedAttentionWrapper")
    monkeypatch.delattr(sys.modules["flashinfer.prefill"], "single_prefill_with_kv_cache")
    with pytest.raises(NotImplementedError, match=r"has no flashinfer.prefill.single_prefill_with_kv_cache"):
        installation.api("single_prefill_with_kv_cache")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    """A Hopper GPU and what is installed beside it."""
    installed = {"flashinfer", "flashinfer_jit_cache", "triton"}
    monkeypatch.setattr(flashinfer, "device_capability", lambda device: (9, 0))
    for module in (flashinfer, installation):
        monkeypatch.setattr(module, "is_installed", lambda name: name in installed)
    monkeypatch.setattr(installation.shutil, "which", lambda program: None)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(installation, "DEFAULT_CUDA_HOME", tmp_path / "none")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return installed


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (PREFILL, None),
        (PREFILL._replace(device=CPU), "compute capability 8.0"),
        (PREFILL._replace(dtype=torch.float32), "bfloat16 or float16, these are torch.float32"),
        (PREFILL._replace(head_dim_v=192), "192/128, 256/256, these are 192/192"),
        (PAGED, None),
        (PAGED._replace(cache_format="fp8_ds_mla"), "rows of 512 + 64, this cache is fp8_ds_mla"),
        (PAGED._replace(head_dim=512), "with rows of 512"),
        (PAGED._replace(dtype=torch.float16), "bfloat16, these are torch.float16"),
    ],
    ids=["prefill", "CPU", "float32", "192/192", "paged", "format", "head dim", "float16"],
)
def test_what_flashinfer_refuses(call: Call, words: str | None, machine: set[str]) -> None:
    reason = LOWERINGS[call.op].unsupported_reason(call)
    assert reason is None if words is None else words in str(reason)


@pytest.mark.parametrize(
    ("missing", "words"),
    [("flashinfer", "pip install flashinfer-python"), ("flashinfer_jit_cache", "nvcc"), ("triton", "install triton")],
)
def test_what_is_not_installed_is_named(missing: str, words: str, machine: set[str]) -> None:
    machine.discard(missing)
    for call in (PREFILL, PAGED):
        assert words in str(LOWERINGS[call.op].unsupported_reason(call))


def test_a_compiler_is_found_where_flashinfer_looks(
    machine: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.discard("flashinfer_jit_cache")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert flashinfer.prefill_reason(PREFILL) is None
    monkeypatch.delenv("CUDA_PATH")
    assert flashinfer.prefill_reason(PREFILL) is not None
    monkeypatch.setattr(installation, "DEFAULT_CUDA_HOME", tmp_path)
    assert flashinfer.prefill_reason(PREFILL) is None


def test_a_capture_is_refused_by_the_call_and_not_by_the_choice_that_dispatch_remembers(
    machine: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert flashinfer.paged_reason(PAGED) is None
    assert flashinfer.prefill_reason(PREFILL) is None
    with pytest.raises(NotImplementedError, match=r"paged_attention: .*CUDA graph that is being captured"):
        flashinfer._refuse_capture("paged_attention", torch.device("cuda", 0))


def test_nobody_gets_it_unasked() -> None:
    """Its calls wait for the device."""
    for op in ("prefill_attention", "paged_attention"):
        assert "flashinfer" not in dispatch.order_for(op, CUDA)
        assert "waits for its lengths" in dispatch.ON_REQUEST["flashinfer", op]


@pytest.mark.skipif(not dispatch.is_installed("flashinfer"), reason="FlashInfer is not installed")
@pytest.mark.parametrize(
    ("module", "stand_in", "methods"),
    [
        ("prefill", Ragged, ("__init__", "reset_workspace_buffer", "plan", "run")),
        ("mla", Structured, ("__init__", "plan", "run")),
        ("mla", Metadata, ("csr",)),
    ],
    ids=["prefill", "MLA", "metadata"],
)
def test_stand_ins_take_what_the_installed_flashinfer_takes(
    module: str, stand_in: type, methods: tuple[str, ...]
) -> None:
    names = {Ragged: "BatchPrefillWithRaggedKVCacheWrapper", Structured: "BatchMLAPagedAttentionWrapper"}
    real = getattr(importlib.import_module(f"flashinfer.{module}"), names.get(stand_in, "MLAPlanMetadata"))
    for method in methods:
        taken = inspect.signature(getattr(real, method)).parameters
        assert set(inspect.signature(getattr(stand_in, method)).parameters) <= set(taken), method
