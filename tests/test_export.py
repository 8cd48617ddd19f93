"""A model exported here runs in another process that imports only torch and mla_ops, with any number of tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from seeded import int32, normal
from torch.export import Dim

import mla_ops
from mla_ops.formats import allocate_cache
from mla_ops.testing.checks import assert_all_same, assert_same_bits

mla = torch.ops.mla

BLOCK_SIZE = 8
NUM_BLOCKS = 6
HEADS = 3
TOPK = 4
SCALE = 0.1
NUM_TOKENS = (0, 1, 5, 33)
REPOSITORY = str(Path(mla_ops.__file__).parents[1])

NUM_TOKENS_DIM = Dim("num_tokens", min=0, max=4096)
NUM_REQUESTS_DIM = Dim("num_requests", min=0, max=512)
NUM_KV_DIM = Dim("num_kv", min=0, max=4096)


def step(num_tokens: int) -> tuple[torch.Tensor, ...]:
    slots = torch.arange(num_tokens) % (NUM_BLOCKS * BLOCK_SIZE + 1)
    indices = int32(num_tokens, NUM_BLOCKS * BLOCK_SIZE, num_tokens, TOPK)
    return (
        normal(1, num_tokens, HEADS, 576),
        normal(2, num_tokens, 512),
        normal(3, num_tokens, 64),
        slots,
        indices,
    )


class LayerWithItsCache(torch.nn.Module):
    """The cache is state of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kv_cache", allocate_cache("fp8_ds_mla", NUM_BLOCKS, BLOCK_SIZE))

    def forward(self, q: Any, kv_c: Any, k_pe: Any, slots: Any, indices: Any) -> Any:
        mla.concat_and_cache(kv_c, k_pe, self.kv_cache, slots, "fp8_ds_mla")
        latent, rope = q.split((512, 64), dim=-1)
        out, lse = mla.paged_sparse_attention(latent, self.kv_cache, indices, SCALE, "fp8_ds_mla", q_rope=rope)
        kv = torch.cat((kv_c, k_pe), 1)
        return mla.merge_attention_states(out, lse, *mla.sparse_attention(q, kv, indices, SCALE))

    @staticmethod
    def calls() -> list[tuple[Any, ...]]:
        return [step(num_tokens) for num_tokens in NUM_TOKENS]

    dynamic_shapes = {name: {0: NUM_TOKENS_DIM} for name in ("q", "kv_c", "k_pe", "slots", "indices")}


class LayerOfAnEngine(torch.nn.Module):
    """The cache and the output buffers are the caller's; requests and tokens vary."""

    def forward(
        self, q: Any, cache: Any, indices: Any, table: Any, requests: Any, lens: Any, starts: Any, out: Any, lse: Any
    ) -> Any:
        mla.paged_sparse_attention.out(
            q, cache, indices, SCALE, "bf16", block_table=table, req_id_per_token=requests, out=out, lse=lse
        )
        slots, counts = mla.convert_req_index_to_global_index(requests, table, indices, BLOCK_SIZE, compact=True)
        rows = mla.gather_cache(cache, table, lens, starts, starts.shape[0] * 4, "bf16", offset=1)
        return slots, counts, rows, mla.filter_prefill_indices(indices, requests)

    @staticmethod
    def calls() -> list[tuple[Any, ...]]:
        calls = []
        for num_tokens, num_requests in zip(NUM_TOKENS, (0, 1, 3, 4), strict=True):
            cache = normal(4, NUM_BLOCKS, BLOCK_SIZE, 576)
            table = int32(5, NUM_BLOCKS, num_requests, 3)
            lens = int32(6, 20, num_requests).clamp(min=0)
            starts = torch.cat((torch.zeros(1), lens.cumsum(0))).int()
            out, lse = torch.zeros(num_tokens, HEADS, 512, dtype=torch.bfloat16), torch.zeros(num_tokens, HEADS)
            requests, indices = int32(7, num_requests + 1, num_tokens), int32(8, 24, num_tokens, TOPK)
            calls.append((normal(9, num_tokens, HEADS, 576), cache, indices, table, requests, lens, starts, out, lse))
        return calls

    dynamic_shapes = {
        **{name: {0: NUM_TOKENS_DIM} for name in ("q", "indices", "requests", "out", "lse")},
        **{name: {0: NUM_REQUESTS_DIM} for name in ("table", "lens")},
        "cache": None,
        "starts": {0: NUM_REQUESTS_DIM + 1},
    }


class IndexBuilders(torch.nn.Module):
    """Window and width are constants of the model; requests and tokens vary."""

    def forward(self, positions: Any, requests: Any, chosen: Any, table: Any, lens: Any) -> Any:
        return (
            mla.sliding_window_indices(positions, requests, table, 8, BLOCK_SIZE, num_blocks=NUM_BLOCKS),
            mla.compressed_indices(positions, requests, table, 4, BLOCK_SIZE, 5),
            mla.compute_global_topk_indices_and_lens(chosen, requests, table, BLOCK_SIZE),
            mla.combine_topk_swa_indices(chosen, positions, requests, lens, lens, 8, 4, 40, 12),
        )

    @staticmethod
    def calls() -> list[tuple[Any, ...]]:
        return [
            (
                int32(1, 24, num_tokens),
                int32(2, num_requests + 1, num_tokens),
                int32(3, 12, num_tokens, TOPK),
                int32(4, NUM_BLOCKS, num_requests, 3),
                int32(5, 24, num_requests),
            )
            for num_tokens, num_requests in zip(NUM_TOKENS, (0, 1, 3, 4), strict=True)
        ]

    dynamic_shapes = {
        **{name: {0: NUM_TOKENS_DIM} for name in ("positions", "requests", "chosen")},
        **{name: {0: NUM_REQUESTS_DIM} for name in ("table", "lens")},
    }


class DenseLayer(torch.nn.Module):
    """Prefill over expanded keys and over a cache, the results merged; tokens, keys and requests vary."""

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        starts: Any,
        k_starts: Any,
        latent: Any,
        cache: Any,
        table: Any,
        own: Any,
        lens: Any,
    ) -> Any:
        new = mla.prefill_attention(q, k, v, starts, k_starts, 40, 40, SCALE)
        old = mla.prefill_attention(q, k, v, starts, k_starts, 40, 40, SCALE, causal=False)
        merged = mla.merge_attention_states.stacked(torch.stack((new[0], old[0])), torch.stack((new[1], old[1])))
        return merged, mla.paged_attention(latent, cache, table, own, lens, SCALE, "bf16")

    @staticmethod
    def calls() -> list[tuple[Any, ...]]:
        calls = []
        for num_tokens, num_kv, num_requests in zip(NUM_TOKENS, (4, 0, 9, 40), (0, 1, 3, 4), strict=True):
            tensors = normal(1, num_tokens, HEADS, 192), normal(2, num_kv, HEADS, 192), normal(3, num_kv, HEADS, 128)
            starts = torch.linspace(0, num_tokens, num_requests + 1).int()
            k_starts = torch.linspace(0, num_kv, num_requests + 1).int()
            paged = normal(4, num_tokens, HEADS, 576), normal(5, NUM_BLOCKS, BLOCK_SIZE, 576)
            tables = (
                int32(6, NUM_BLOCKS, num_requests, 3),
                int32(7, num_requests + 1, num_tokens),
                int32(8, 24, num_tokens),
            )
            calls.append((*tensors, starts, k_starts, *paged, *tables))
        return calls

    dynamic_shapes = {
        **{name: {0: NUM_TOKENS_DIM} for name in ("q", "latent", "own", "lens")},
        **{name: {0: NUM_KV_DIM} for name in ("k", "v")},
        **{name: {0: NUM_REQUESTS_DIM + 1} for name in ("starts", "k_starts")},
        "table": {0: NUM_REQUESTS_DIM},
        "cache": None,
    }


class StepMetadata(torch.nn.Module):
    """The buffers are state of the module; the number of requests varies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("starts", torch.zeros(9, dtype=torch.int32))
        self.register_buffer("lens", torch.zeros(8, dtype=torch.int32))
        self.register_buffer("table", torch.zeros(8, 3, dtype=torch.int32))
        for name in ("requests", "positions", "key_lens", "topk_length"):
            self.register_buffer(name, torch.zeros(40, dtype=torch.int32))
        self.register_buffer("slots", torch.zeros(40, dtype=torch.int64))

    def forward(self, starts: Any, lens: Any, table: Any) -> Any:
        tokens = (self.requests, self.positions, self.slots, self.key_lens, self.topk_length)
        mla.build_step_metadata(starts, lens, table, self.starts, self.lens, self.table, *tokens, BLOCK_SIZE, TOPK)
        return self.slots + 0, self.requests + 0

    @staticmethod
    def calls() -> list[tuple[Any, ...]]:
        return [
            (torch.arange(n + 1, dtype=torch.int32) * 2, torch.arange(n, dtype=torch.int32) + 2, int32(n, 9, n, 3))
            for n in (0, 1, 3, 8)
        ]

    # the buffers' capacity bounds the number of requests
    capacity = Dim("num_requests", min=0, max=8)
    dynamic_shapes = {"starts": {0: capacity + 1}, "lens": {0: capacity}, "table": {0: capacity}}


MODULES = (LayerWithItsCache, LayerOfAnEngine, IndexBuilders, DenseLayer, StepMetadata)

# another process runs this: no test code, no module definitions, only torch and the ops
RUN_SAVED_PROGRAM = """
import sys, torch, mla_ops
for name in sys.argv[2:]:
    base = f"{sys.argv[1]}/{name}"
    module = torch.export.load(f"{base}.pt2").module()
    calls = torch.load(f"{base}.calls.pt")
    results = [module(*call) for call in calls]
    torch.save((calls, results, dict(module.named_buffers())), f"{base}.results.pt")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports and saves every module here, loads and runs it in one fresh process."""
    folder = tmp_path_factory.mktemp("exported")
    for kind in MODULES:
        # export takes an example of size 0 or 1 for a constant, so it traces five tokens and three requests
        program = torch.export.export(kind(), kind.calls()[2], dynamic_shapes=kind.dynamic_shapes)
        torch.export.save(program, folder / f"{kind.__name__}.pt2")
        torch.save(kind.calls(), folder / f"{kind.__name__}.calls.pt")
    names = [kind.__name__ for kind in MODULES]
    fresh.run("-c", RUN_SAVED_PROGRAM, str(folder), *names, check=True, env={**os.environ, "PYTHONPATH": REPOSITORY})
    return folder


every_module = pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)


@every_module
def test_a_saved_program_gives_the_bits_of_eager_in_a_fresh_process(kind: Any, folder: Path) -> None:
    written_arguments, results, buffers = torch.load(folder / f"{kind.__name__}.results.pt")
    eager, calls = kind(), kind.calls()
    expected = [eager(*call) for call in calls]
    assert_all_same(results, expected, "saved program against eager, output")
    assert_all_same(written_arguments, calls, "saved program against eager, argument")
    eager_buffers = dict(eager.named_buffers())
    assert buffers.keys() == eager_buffers.keys()
    for name, buffer in eager_buffers.items():
        assert_same_bits(buffers[name], buffer, f"saved program against eager, {name}")


@every_module
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_export_keeps_the_ops(kind: Any, strict: bool) -> None:
    program = torch.export.export(kind(), kind.calls()[2], dynamic_shapes=kind.dynamic_shapes, strict=strict)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    expected = {
        LayerWithItsCache: {
            "mla.concat_and_cache.default",
            "mla.paged_sparse_attention.default",
            "mla.sparse_attention.default",
            "mla.merge_attention_states.default",
        },
        LayerOfAnEngine: {
            "mla.paged_sparse_attention.out",
            "mla.convert_req_index_to_global_index.default",
            "mla.gather_cache.default",
            "mla.filter_prefill_indices.default",
        },
        IndexBuilders: {
            "mla.sliding_window_indices.default",
            "mla.compressed_indices.default",
            "mla.compute_global_topk_indices_and_lens.default",
            "mla.combine_topk_swa_indices.default",
        },
        DenseLayer: {
            "mla.prefill_attention.default",
            "mla.merge_attention_states.stacked",
            "mla.paged_attention.default",
        },
        StepMetadata: {"mla.build_step_metadata.default"},
    }[kind]
    assert {target for target in called if target.startswith("mla.")} == expected


@every_module
def test_functional_form_gives_the_bits_of_eager(kind: Any) -> None:
    # run_decompositions turns writes into auto_functionalized, the form that other compilers take
    program = torch.export.export(kind(), kind.calls()[2], dynamic_shapes=kind.dynamic_shapes).run_decompositions({})
    module, eager = program.module(), kind()
    for call, eager_call in zip(kind.calls(), kind.calls(), strict=True):
        assert_all_same(module(*call), eager(*eager_call), "functional form against eager, output")
        assert_all_same(call, eager_call, "functional form against eager, argument")
    assert_all_same(dict(module.named_buffers()), dict(eager.named_buffers()), "functional form against eager, buffer")


def test_a_size_out_of_the_exported_range_is_an_error() -> None:
    small = Dim("num_tokens", min=0, max=8)
    shapes = {name: {0: small} for name in LayerWithItsCache.dynamic_shapes}
    module = torch.export.export(LayerWithItsCache(), step(5), dynamic_shapes=shapes).module()
    with pytest.raises((RuntimeError, AssertionError), match="8"):
        module(*step(9))
