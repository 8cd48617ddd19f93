"""The cases of `test_distributed.py`: the same inputs on all ranks, each rank's part compared with the whole."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mla_ops
from mla_ops.distributed import ContextParallel
from mla_ops.testing import tolerances

BLOCK = 16
LENGTHS = (1, 40, 0, 3, 33, 16)
SCALE = 576**-0.5


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def context(interleave: int = 1) -> ContextParallel:
    if not dist.is_initialized():
        return ContextParallel(None, 0, 1, BLOCK, interleave)
    return ContextParallel.of(dist.group.WORLD, BLOCK, interleave)


def interleaves() -> tuple[int, ...]:
    return 1, 2, BLOCK // world_size()


class Whole:
    """Requests of unequal lengths in a paged cache, one decode token each, and each rank's part of that cache."""

    def __init__(self, cache_format: str, interleave: int, num_heads: int = 8) -> None:
        self.ranks, self.cache_format = context(interleave), cache_format
        self.dtype = {"fp32": torch.float32}.get(cache_format, torch.bfloat16)
        num_requests, width = len(LENGTHS), 3
        order = torch.randperm(num_requests * width, dtype=torch.int32)
        self.block_table = order.view(num_requests, width).contiguous()
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        self.requests = torch.arange(num_requests, dtype=torch.int32)
        self.q = torch.randn(num_requests, num_heads, 576).to(self.dtype)
        self.sink = torch.randn(num_heads)
        keys = [(r, p) for r, length in enumerate(LENGTHS) for p in range(length)]
        slots = [int(self.block_table[r, p // BLOCK]) * BLOCK + p % BLOCK for r, p in keys]
        self.slots = torch.tensor([*slots, -1], dtype=torch.int64)
        latent = torch.randn(len(keys) + 1, 576).to(self.dtype)
        self.largest = float(latent.abs().max())
        # an upper bound of a scaled score, by Cauchy and Schwarz
        self.score = float(SCALE * self.q.float().norm(dim=-1).max() * latent.float().norm(dim=-1).max())
        self.cache = mla_ops.allocate_cache(cache_format, num_requests * width, BLOCK)
        self.part = mla_ops.allocate_cache(cache_format, num_requests * width, self.ranks.local_block_size)
        for cache, places in ((self.cache, self.slots), (self.part, self.ranks.slots(self.slots))):
            mla_ops.concat_and_cache(latent[:, :512], latent[:, 512:], cache, places, cache_format)

    def check(self, actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Both are within the bound of attention from the exact result; the parts' merge adds its own."""
        out, lse = actual
        out_whole, lse_whole = expected
        # the parts are rounded to the dtype, and so is the merge; a sink is a rounding more
        one = tolerances.attention_out(self.dtype, 576, max(LENGTHS), self.score, self.largest)
        merge = tolerances.merge(self.dtype, self.score + 5, self.largest)
        rounded = 2 * tolerances.unit_roundoff(self.dtype) * self.largest
        atol = 2 * one.atol + merge.atol + rounded + (2 * one.rtol + merge.rtol) * self.largest
        assert (out.float() - out_whole.float()).abs().max() <= atol
        bound = tolerances.attention_lse(576, max(LENGTHS), self.score)
        assert torch.equal(lse == -torch.inf, lse_whole == -torch.inf)
        there = lse_whole != -torch.inf
        u32 = tolerances.unit_roundoff(torch.float32)
        assert ((lse - lse_whole)[there].abs() <= 2 * bound.atol + 12 * u32 * (self.score + 8)).all()


def own_heads(x: torch.Tensor, ranks: ContextParallel, dim: int = 1) -> torch.Tensor:
    return x.chunk(ranks.world_size, dim)[ranks.rank]


def positions_of(lengths: torch.Tensor, topk: int) -> torch.Tensor:
    """Some of each request's positions in any order, -1 where there are no more, with one past the end."""
    rows = torch.full((len(lengths), topk), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        some = torch.randperm(length, dtype=torch.int32)[: topk - 2]
        rows[row, : len(some)] = some
    return rows


def case_parts_are_those_of_the_definition() -> None:
    for interleave in interleaves():
        ranks = context(interleave)
        positions = torch.arange(-1, 100, dtype=torch.int32)
        mine = [p for p in range(100) if (p // interleave) % ranks.world_size == ranks.rank]
        local = ranks.positions(positions)
        assert local[0] == -1
        expected = torch.full((100,), -1, dtype=torch.int32)
        expected[mine] = torch.arange(len(mine), dtype=torch.int32)
        assert torch.equal(local[1:], expected)
        assert local.dtype == torch.int32
        held = local[local >= 0]
        assert torch.equal(ranks.global_positions(held), torch.tensor(mine, dtype=torch.int32))
        counts = [sum((p // interleave) % ranks.world_size == ranks.rank for p in range(n)) for n in range(100)]
        assert ranks.lengths(torch.arange(100, dtype=torch.int32)).tolist() == counts
        # a slot keeps its block
        slots = torch.arange(100)
        kept = ranks.slots(slots) // ranks.local_block_size
        assert torch.equal(kept[ranks.slots(slots) >= 0], (slots // BLOCK)[ranks.slots(slots) >= 0])


def case_sparse_attention_over_ranks_equals_the_whole() -> None:
    for cache_format in ("fp32", "bf16", "fp8_ds_mla"):
        for interleave in interleaves():
            whole = Whole(cache_format, interleave)
            ranks = whole.ranks
            indices = positions_of(whole.lengths, 24)
            paged = {"block_table": whole.block_table, "req_id_per_token": whole.requests}
            expected = mla_ops.paged_sparse_attention(
                whole.q, whole.cache, indices, SCALE, cache_format, attn_sink=whole.sink, **paged
            )
            slots, counts = ranks.local_indices(indices, whole.block_table, whole.requests)
            part = mla_ops.paged_sparse_attention(whole.q, whole.part, slots, SCALE, cache_format, topk_length=counts)
            sink = own_heads(whole.sink, ranks, 0)
            for merge in (ranks.merge_heads, ranks.merge_heads_by_sum):
                whole.check(merge(*part, sink), tuple(own_heads(x, ranks) for x in expected))
            whole.check(ranks.merge(*part, whole.sink), expected)


def case_dense_attention_over_ranks_equals_the_whole() -> None:
    for cache_format in ("fp32", "fp8_ds_mla"):
        for interleave in interleaves():
            whole = Whole(cache_format, interleave)
            table = whole.block_table, whole.requests
            expected = mla_ops.paged_attention(whole.q, whole.cache, *table, whole.lengths, SCALE, cache_format)
            local = whole.ranks.lengths(whole.lengths)
            part = mla_ops.paged_attention(whole.q, whole.part, *table, local, SCALE, cache_format)
            whole.check(whole.ranks.merge_heads(*part), tuple(own_heads(x, whole.ranks) for x in expected))


def case_two_caches_over_ranks_equal_the_whole() -> None:
    first = Whole("fp32", 1)
    second = Whole("fp32", 1)
    ranks, indices = first.ranks, positions_of(first.lengths, 24)
    translate = mla_ops.convert_req_index_to_global_index
    window = translate(first.requests, first.block_table, indices, BLOCK)[0]
    extra = translate(first.requests, second.block_table, indices.flip(1), BLOCK)[0]
    expected = mla_ops.paged_sparse_attention(
        first.q,
        first.cache,
        window,
        SCALE,
        "fp32",
        extra_kv_cache=second.cache,
        extra_indices=extra,
        attn_sink=first.sink,
    )
    # slots of a window or of compressed tokens, as the index builders give them: those of other ranks are -1
    part = mla_ops.paged_sparse_attention(
        first.q,
        first.part,
        ranks.slots(window),
        SCALE,
        "fp32",
        extra_kv_cache=second.part,
        extra_indices=ranks.slots(extra),
    )
    first.score, first.largest = max(first.score, second.score), max(first.largest, second.largest)
    merged = ranks.merge_heads(*part, own_heads(first.sink, ranks, 0))
    first.check(merged, tuple(own_heads(x, ranks) for x in expected))


def case_a_sink_of_every_kind_counts_once() -> None:
    whole = Whole("fp32", 1)
    ranks = whole.ranks
    sink = torch.tensor([-torch.inf, torch.inf, 0.0, 5.0, -3.0, 1.0, 100.0, -100.0])
    table = {"block_table": whole.block_table, "req_id_per_token": whole.requests}
    indices = positions_of(whole.lengths, 8)
    expected = mla_ops.paged_sparse_attention(whole.q, whole.cache, indices, SCALE, "fp32", attn_sink=sink, **table)
    slots, counts = ranks.local_indices(indices, whole.block_table, whole.requests)
    part = mla_ops.paged_sparse_attention(whole.q, whole.part, slots, SCALE, "fp32", topk_length=counts)
    whole.check(ranks.merge(*part, sink), expected)
    assert ranks.merge(*part, sink)[0].isfinite().all()


def case_rows_without_keys_may_hold_anything() -> None:
    ranks = context()
    out, lse = torch.randn(3, 8, 512), torch.randn(3, 8)
    if ranks.rank > 0:
        out[1:], lse[1:] = torch.nan, -torch.inf
    if ranks.rank == 0:
        out[2], lse[2] = torch.nan, torch.inf  # some kernels mark an empty row so
    for merge in (ranks.merge, ranks.merge_heads, ranks.merge_heads_by_sum):
        merged, total = merge(out, lse)
        assert merged.isfinite().all()
        assert (merged[2] == 0).all()
        assert (total[2] == -torch.inf).all()


def case_selection_over_ranks_equals_the_whole() -> None:
    for interleave in interleaves():
        whole = Whole("fp32", interleave)
        ranks = whole.ranks
        # small integers: scores are exact in any order, and many are equal
        q = torch.randint(-1, 2, (len(LENGTHS), 4, 128)).float()
        weights = torch.randint(0, 3, (len(LENGTHS), 4)).float()
        keys = torch.randint(-1, 2, (len(whole.slots), 128)).float()
        index_caches = []
        for size, slots in ((BLOCK, whole.slots), (ranks.local_block_size, ranks.slots(whole.slots))):
            index_caches.append(mla_ops.allocate_cache("fp32", whole.cache.shape[0], size, head_dim=128))
            mla_ops.write_index_cache(keys, index_caches[-1], slots, "fp32")
        # padding: a token of no request, and one of a request that there is not
        requests = whole.requests.clone()
        requests[0], requests[1] = -1, whole.block_table.shape[0]
        lengths = torch.cat((whole.lengths[:2].clamp(min=5), whole.lengths[2:]))
        rest = weights, lengths, whole.block_table, requests
        for topk in (1, 7, 24, 64):
            expected = mla_ops.select_keys(q, index_caches[0], *rest, topk, "fp32")
            actual = ranks.select_keys(q, index_caches[1], *rest, topk, "fp32")
            assert torch.equal(actual[0], expected[0])
            assert torch.equal(actual[1], expected[1])


def case_a_selection_without_blocks_chooses_nothing() -> None:
    q, weights, cache = torch.randn(2, 4, 128), torch.randn(2, 4), mla_ops.allocate_cache("fp32", 1, 4, head_dim=128)
    lengths, requests = torch.ones(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    given = q, cache, weights, lengths, torch.zeros(1, 0, dtype=torch.int32), requests, 3, "fp32"
    for selected in (context().select_keys(*given), mla_ops.select_keys(*given)):
        assert [x.tolist() for x in selected] == [[[-1] * 3] * 2, [0, 0]]


def case_heads_are_gathered_in_order() -> None:
    ranks = context()
    q = torch.randn(3, 8, 5)
    assert torch.equal(ranks.gather_heads(own_heads(q, ranks).contiguous()), q)


def case_a_step_compiles_to_one_graph() -> None:
    whole = Whole("fp32", 1)
    ranks, indices = whole.ranks, positions_of(Whole("fp32", 1).lengths, 24)

    def step(q: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor, sink: torch.Tensor) -> Any:
        q = ranks.gather_heads(q)
        slots, counts = ranks.local_indices(indices, whole.block_table, whole.requests)
        part = mla_ops.paged_sparse_attention(q, cache, slots, SCALE, "fp32", topk_length=counts)
        return ranks.merge_heads(*part, sink)

    args = own_heads(whole.q, ranks).contiguous(), whole.part, indices, own_heads(whole.sink, ranks, 0).contiguous()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(*args), step(*args), strict=True):
        assert torch.equal(actual, expected)


def distributed(*tensors: Any) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (world_size(),))
    return [distribute_tensor(tensor, mesh, [placement]) for tensor, placement in tensors]


def case_dtensors_of_heads_and_of_tokens_run() -> None:
    from torch.distributed.tensor import Replicate, Shard

    whole = Whole("fp32", 1)
    indices = positions_of(whole.lengths, 24)
    slots, counts = mla_ops.convert_req_index_to_global_index(
        whole.requests, whole.block_table, indices, BLOCK, compact=True
    )
    expected = mla_ops.paged_sparse_attention(
        whole.q, whole.cache, slots, SCALE, "fp32", topk_length=counts, attn_sink=whole.sink
    )
    rows = len(LENGTHS) // world_size() * world_size()
    for dim, kinds in (
        (1, (Shard(1), Replicate(), Replicate(), Shard(0))),
        (0, (Shard(0), Shard(0), Shard(0), Replicate())),
    ):
        n = len(LENGTHS) if dim == 1 else rows
        q, cache, dslots, dcounts, sink = distributed(
            (whole.q[:n], kinds[0]),
            (whole.cache, Replicate()),
            (slots[:n], kinds[1]),
            (counts[:n], kinds[2]),
            (whole.sink, kinds[3]),
        )
        out, lse = mla_ops.paged_sparse_attention(q, cache, dslots, SCALE, "fp32", topk_length=dcounts, attn_sink=sink)
        assert out.placements == lse.placements == (Shard(dim),)
        whole.check((out.full_tensor(), lse.full_tensor()), tuple(x[:n] for x in expected))
        latent, rope = distributed((whole.q[:n, :, :512], kinds[0]), (whole.q[:n, :, 512:], kinds[0]))
        out, lse = mla_ops.paged_sparse_attention(
            latent, cache, dslots, SCALE, "fp32", q_rope=rope, topk_length=dcounts, attn_sink=sink
        )
        assert out.placements == lse.placements == (Shard(dim),)
        whole.check((out.full_tensor(), lse.full_tensor()), tuple(x[:n] for x in expected))
    # merges and dense attention
    q, cache, table, requests, lens = distributed(
        (whole.q, Shard(1)),
        *((x, Replicate()) for x in (whole.cache, whole.block_table, whole.requests, whole.lengths)),
    )
    out, lse = mla_ops.paged_attention(q, cache, table, requests, lens, SCALE, "fp32")
    merged, _ = mla_ops.merge_attention_states(out, lse, out, lse)
    assert merged.placements == (Shard(1),)
    expected = mla_ops.paged_attention(
        whole.q, whole.cache, whole.block_table, whole.requests, whole.lengths, SCALE, "fp32"
    )
    whole.check((merged.full_tensor(), lse.full_tensor()), expected)


def case_dtensors_of_grouped_heads_keep_their_keys() -> None:
    """Several heads of a query share one of the keys, whose number divides over the ranks or does not."""
    from torch.distributed.tensor import Replicate, Shard

    n, starts = world_size(), torch.tensor([0, 4], dtype=torch.int32)
    for num_heads, num_kv_heads in ((4 * (n + 1), n + 1), (4 * n, 2 * n), (4, 1), (2 * n + 1, 2 * n + 1)):
        q, k, v = torch.randn(4, num_heads, 16), torch.randn(4, num_kv_heads, 16), torch.randn(4, num_kv_heads, 8)
        expected, _ = mla_ops.prefill_attention(q, k, v, starts, starts, 4, 4, 1.0)
        tensors = distributed((q, Shard(1)), *((x, Replicate()) for x in (k, v, starts, starts)))
        out, _ = mla_ops.prefill_attention(*tensors, 4, 4, 1.0)
        torch.testing.assert_close(out.full_tensor(), expected)


def case_dtensors_write_whole_caches() -> None:
    from torch.distributed.tensor import Replicate

    kv, rope, slots = torch.randn(2, 512), torch.randn(2, 64), torch.tensor([3, 5])
    plain = mla_ops.allocate_cache("fp8_ds_mla", 2, BLOCK)
    cache, *args = distributed(*((x, Replicate()) for x in (plain.clone(), kv.bfloat16(), rope.bfloat16(), slots)))
    mla_ops.concat_and_cache(args[0], args[1], cache, args[2], "fp8_ds_mla")
    mla_ops.concat_and_cache(kv.bfloat16(), rope.bfloat16(), plain, slots, "fp8_ds_mla")
    assert torch.equal(cache.to_local(), plain)


def case_dtensors_that_cannot_be_split_are_refused() -> None:
    from torch.distributed.tensor import Replicate, Shard

    whole = Whole("fp32", 1)
    indices = torch.zeros(len(LENGTHS), 8, dtype=torch.int32)
    cases = [
        ((Shard(2), Replicate(), Replicate()), r"q must be Replicate\(\) or Shard\(0\) \(tokens\) or Shard\(1\)"),
        ((Shard(1), Shard(0), Replicate()), r"kv_cache must be Replicate\(\) .*ContextParallel splits contexts"),
        ((Replicate(), Replicate(), Shard(1)), r"indices must be Replicate\(\) or Shard\(0\) \(tokens\)"),
    ]
    for kinds, message in cases:
        args = distributed(*zip((whole.q, whole.cache, indices), kinds, strict=True))
        with pytest.raises(RuntimeError, match=f"paged_sparse_attention: {message}"):
            mla_ops.paged_sparse_attention(*args, SCALE, "fp32")
    # DTensor splits no single token over ranks, and moves no keyword argument
    lengths = torch.ones(1, dtype=torch.int32)
    q, cache, one, lengths = distributed(
        (whole.q[:1], Shard(0)), (whole.cache, Replicate()), (indices[:1], Shard(0)), (lengths, Shard(0))
    )
    with pytest.raises(RuntimeError, match=r"paged_sparse_attention: keyword tensors must be .* got topk_length"):
        mla_ops.paged_sparse_attention(q, cache, one, SCALE, "fp32", topk_length=lengths)


def case_every_op_has_a_rule() -> None:
    from mla_ops.distributed.sharding import RULES

    ops = {
        schema.name.removeprefix("mla::") + (f".{schema.overload_name}" if schema.overload_name else "")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("mla::") and not schema.overload_name.endswith("out")
    }
    assert ops == set(RULES)
    for name, rule in RULES.items():
        base, _, overload = name.partition(".")
        schema = getattr(getattr(torch.ops.mla, base), overload or "default")._schema
        names = {a.name for a in schema.arguments}
        # `_SELECTION` and its like are shared by ops that lack some of it
        assert len(rule.outputs) == len(schema.returns)
        assert names & set(rule.inputs) or not rule.inputs


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (5, 70, 33)]


SMALL = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "index_topk": 32, "initializer_range": 0.08}


def greedy(kind: str, sizes: dict[str, Any] = SMALL, options: dict[str, Any] | None = None, **meshes: Any) -> Any:
    from mla_ops.demo.model import build_small_model
    from mla_ops.models import GenerationSession, decoder_for

    session = GenerationSession(
        decoder_for(build_small_model(kind, **sizes), 96, **meshes),
        max_num_requests=2,
        cache_format="fp32",
        block_size=BLOCK,
        prefill_tokens=32,
        eos_token_ids=(),
        **(options or {}),
    )
    return session.generate(prompts(), 8).tokens, session


@functools.cache
def of_one_process(kind: str) -> Any:
    return greedy(kind)


def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (world_size(),))


def case_models_give_the_tokens_of_one_process() -> None:
    both = {"tp_mesh": mesh(), "dcp_mesh": mesh()}
    layouts = {"DeepseekV32": [both]}
    if world_size() == 2:  # more ranks change nothing in one mesh that they do not change in both
        layouts["DeepseekV32"] += [{"tp_mesh": mesh()}, {"dcp_mesh": mesh()}]
        layouts |= {"DeepseekV3": [both], "GlmMoeDsa": [both]}
    for kind, of_kind in layouts.items():
        expected, whole = of_one_process(kind)
        assert len({token for tokens in expected for token in tokens}) > 2
        for meshes in of_kind:
            tokens, session = greedy(kind, **meshes)
            assert tokens == expected, (kind, list(meshes))
            ranks = world_size()
            held = session.cache.layers[0].latent.nbytes
            assert held == whole.cache.layers[0].latent.nbytes // (ranks if "dcp_mesh" in meshes else 1)
            o_proj, experts = (
                session.decoder.backbone.layers[1].self_attn.o_proj,
                session.decoder.backbone.layers[1].mlp,
            )
            share = ranks if "tp_mesh" in meshes else 1
            assert o_proj.weight.shape[1] == o_proj.in_features // share
            width = whole.decoder.backbone.layers[1].mlp.experts.gate_up_proj.shape[1]
            assert experts.experts.gate_up_proj.shape[1] == width // share
    tokens, _ = greedy("DeepseekV32", dcp_mesh=mesh(), interleave=BLOCK // world_size())
    assert tokens == of_one_process("DeepseekV32")[0]


def case_a_model_that_transformers_split_gives_the_tokens_of_one_process() -> None:
    """Splits a model as `from_pretrained` with a `DistributedConfig` does, which wants accelerate installed."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    from mla_ops.demo.model import build_small_model
    from mla_ops.models import GenerationSession, decoder_for

    model = build_small_model(**SMALL)
    arguments = [model, mesh()]
    if "tp_plan" in inspect.signature(apply_tensor_parallelism).parameters:  # transformers 5.23; 5.17 asks the model
        names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
        patterns = {f"model.{key}": style for key, style in model.config.base_model_tp_plan.items()}
        patterns["lm_head"] = "colwise_gather_output"
        arguments.append({})
        for pattern, style in patterns.items():
            for name in names:
                if re.fullmatch(pattern.replace(".", r"\.").replace("*", r"\d+") + r"(\.weight)?", name):
                    arguments[-1][name] = style
    apply_tensor_parallelism(*arguments)
    assert type(model.model.layers[0].self_attn.q_b_proj.weight).__name__ == "DTensor"
    assert "forward" in vars(model.model.layers[0].self_attn.o_proj)
    session = GenerationSession(
        decoder_for(model, 96, tp_mesh=mesh()),
        max_num_requests=2,
        cache_format="fp32",
        block_size=BLOCK,
        prefill_tokens=32,
        eos_token_ids=(),
    )
    assert session.generate(prompts(), 8).tokens == of_one_process("DeepseekV32")[0]


def case_a_model_over_ranks_compiles_without_breaks() -> None:
    options = {"compiled": True, "backend": "aot_eager"}
    sizes = {**SMALL, "num_layers": 1, "mlp_layer_types": ["sparse"]}
    tokens, _ = greedy("DeepseekV32", sizes, options, tp_mesh=mesh(), dcp_mesh=mesh())
    assert tokens == greedy("DeepseekV32", sizes)[0]


def case_models_that_do_not_divide_are_refused() -> None:
    import transformers
    from small_models import build_mistral_large4

    from mla_ops.demo.model import build_small_model, build_small_v4_model
    from mla_ops.models import decoder_for

    small = {"num_layers": 2, "hidden_size": 64, "num_heads": 4}
    with pytest.raises(ValueError, match="5 heads do not divide over"):
        decoder_for(build_small_model(**{**small, "num_heads": 5}), 64, tp_mesh=mesh())
    if hasattr(transformers, "MistralLarge4Config"):  # newer than 5.17
        with pytest.raises(
            ValueError, match=r"tp_mesh needs a text model of a model_type in .*, got 'mistral_large4_text'"
        ):
            decoder_for(build_mistral_large4(), 64, tp_mesh=mesh())
    with pytest.raises(ValueError, match="dcp_mesh needs caches of latents"):
        decoder_for(build_small_v4_model(), 64, dcp_mesh=mesh())
    with pytest.raises(ValueError, match="block_size must be a multiple of world_size"):
        decoder_for(build_small_model(**small), 64, dcp_mesh=mesh()).allocate_cache("fp32", 2, world_size() + 1)


def case_the_benchmark_runs_over_ranks() -> None:
    from benchmarks import distributed as benchmark

    arguments = ["tokens", "merge", "steps", "--quick", "--layers", "2", "--batch", "2", "--context", "256"]
    assert benchmark.main([*arguments, "--seconds", "0"]) == 0  # begins nothing
    assert benchmark.main([*arguments[1:]]) == 0


def case_the_demo_runs_over_ranks() -> None:
    from io import StringIO

    from mla_ops.demo import DemoOptions, run_demo

    for layout in ({"tp": 2}, {"dcp": 2}):
        said = StringIO()
        options = DemoOptions(
            prompt="Alice was beginning", cache="fp32", batch=2, max_new_tokens=6, compile=False, device="cpu", **layout
        )
        assert run_demo(options, said) == 0
        if dist.get_rank() > 0:
            assert said.getvalue() == ""
            continue
        assert "greedy tokens equal to stock before the first difference: 12 of 12" in said.getvalue()
        assert "over ranks: heads and experts by" in said.getvalue()
        assert ("merge_topk" in said.getvalue()) == ("dcp" in layout)
        assert ("prefill_attention" in said.getvalue()) == ("tp" in layout)


CASES = [case for name, case in sorted(globals().items()) if name.startswith("case_")]
# a merge of one part returns it as it is
NEED_RANKS = ("dtensors", "anything", "benchmark", "model", "demo")
# more ranks change nothing in these, which take the longest
AT_TWO = ("one_graph", "compiles_without_breaks", "benchmark", "demo", "refused", "transformers_split")
ALONE = [case for case in CASES if not any(word in case.__name__ for word in NEED_RANKS)]
