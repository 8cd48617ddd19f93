"""The compressor: every lowering against float64 over whole sequences, against transformers' own, and against itself.

The oracle keeps every request's full history and never saw a state cache; the op sees steps, a ring and slots.
"""

from __future__ import annotations

import math

import pytest
import torch
from compressor_oracle import (
    CSA,
    DEVICE,
    EPS,
    HCA,
    INDEXER,
    LONG_OVERLAP,
    ODD,
    Engine,
    Geometry,
    Weights,
    assert_equals_oracle,
    history,
    oracle,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import mla_ops
from mla_ops import dispatch
from mla_ops.formats import FORMATS, allocate_cache
from mla_ops.testing import tolerances
from mla_ops.testing.checks import assert_same_bits

BACKENDS = ("reference", "triton")
NAMES = {CSA: "C4A", HCA: "C128A", INDEXER: "C4A indexer", ODD: "ratio 3", LONG_OVERLAP: "ratio 6 with overlap"}
geometries = pytest.mark.parametrize("geometry", NAMES, ids=NAMES.values())


def skip_what_takes_minutes_to_interpret(lowering: str, geometry: Geometry) -> None:
    if lowering == "triton" and DEVICE == "cpu" and geometry == HCA:
        pytest.skip("takes minutes to interpret; other pieces and 'ratio 6 with overlap' run the same code")


@geometries
def test_one_prefill_equals_float64(lowering: str, geometry: Geometry) -> None:
    """Two requests in one call, one of which stops inside a group."""
    weights = Weights(geometry)
    lengths = (3 * geometry.ratio + 1, geometry.ratio * 2)
    pairs = [history(geometry, length) for length in lengths]
    engine = Engine(weights, 2, 4)
    requests = [0] * lengths[0] + [1] * lengths[1]
    positions = [*range(lengths[0]), *range(lengths[1])]
    engine.step(torch.cat([kv for kv, _ in pairs]), torch.cat([score for _, score in pairs]), requests, positions)
    for request, (kv, score) in enumerate(pairs):
        assert_equals_oracle(engine.entries(request, lengths[request] // geometry.ratio), weights, kv, score)


@geometries
@pytest.mark.parametrize("state_blocks", [1, 3], ids=["a ring of one block", "a ring of blocks"])
def test_decode_token_by_token_equals_one_prefill(lowering: str, geometry: Geometry, state_blocks: int) -> None:
    skip_what_takes_minutes_to_interpret(lowering, geometry)
    weights, length = Weights(geometry), 2 * geometry.ratio + 3
    kv, score = history(geometry, length, torch.bfloat16)
    whole = Engine(weights, 1, 3, cache_format="bf16")
    whole.step(kv, score, [0] * length, list(range(length)))
    decoded = Engine(weights, 2, 3, cache_format="bf16", state_blocks=state_blocks)
    for position in range(length):
        # request 1 is idle: a padded row
        here = slice(position, position + 1)
        decoded.step(kv[here].repeat(2, 1), score[here].repeat(2, 1), [0, -1], [position, 0])
    assert_same_bits(decoded.entries(0, 2), whole.entries(0, 2), "decode against prefill")
    assert not decoded.cache[1].any()
    # a block takes more than the ring needs where it does not divide
    capacity = decoded.table.shape[1] * decoded.states.shape[1]
    block_size = decoded.states.shape[1]
    for position in range(max(length - capacity, 0), length):
        block = decoded.table[0, position // block_size % state_blocks]
        state = decoded.states[block, position % block_size]
        biased = score[position].float() + weights.bias[position % geometry.ratio]
        assert_same_bits(state, torch.cat((kv[position].float(), biased)), f"state of position {position}")
    assert decoded.states[decoded.table[1].long()].isnan().all(), "the idle request's states"


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_prefill_in_pieces_of_any_size_equals_one_prefill(backend: str, data: st.DataObject) -> None:
    """Requests of any length, cut into steps that mix them in any order with padding, over rings of any size."""
    geometry = data.draw(st.sampled_from((ODD, INDEXER)))
    weights = Weights(geometry)
    lengths = data.draw(st.lists(st.integers(0, 21), min_size=1, max_size=3))
    pairs = [history(geometry, length) for length in lengths]
    state_blocks = data.draw(st.integers(1, 4))
    smallest = -(-geometry.window // state_blocks)
    block_size = smallest + data.draw(st.integers(0, 5))
    options = {"state_blocks": state_blocks, "state_block_size": block_size}
    engine = Engine(weights, len(lengths), 8, **options)
    done = [0] * len(lengths)
    with dispatch.override(backend):
        while done != lengths:
            requests, positions, rows = [], [], []
            for request in data.draw(st.permutations(range(len(lengths)))):
                count = data.draw(st.integers(0, lengths[request] - done[request]))
                part = range(done[request], done[request] + count)
                padding = data.draw(st.integers(0, 2))
                requests += [request] * count + [-1] * padding
                positions += [*part] + [data.draw(st.integers(-1, 20)) for _ in range(padding)]
                rows += [torch.cat([t[p] for t in pairs[request]]) for p in part]
                rows += [torch.full((2 * geometry.width,), math.nan, device=DEVICE)] * padding
                done[request] += count
            if rows:
                engine.step(*torch.stack(rows).split(geometry.width, dim=1), requests, positions)
        for request, (kv, score) in enumerate(pairs):
            count = lengths[request] // geometry.ratio
            whole = Engine(weights, 1, 8)
            whole.step(kv, score, [0] * lengths[request], list(range(lengths[request])))
            assert_same_bits(engine.entries(request, count), whole.entries(0, count), f"request {request}")
            assert not engine.entries(request, 8)[count:].any(), "an entry of a group that is not complete"
            if count:
                assert_equals_oracle(whole.entries(0, count), weights, kv, score)


def caches_of(geometry: Geometry, cache_format: str, kv: torch.Tensor, score: torch.Tensor) -> list[torch.Tensor]:
    """The caches of 20 tokens, in `fp32` and in a format."""
    weights = Weights(geometry)
    engines = [Engine(weights, 1, 6, cache_format=name) for name in ("fp32", cache_format)]
    for engine in engines:
        engine.step(kv, score, [0] * 20, list(range(20)))
    return [engine.cache for engine in engines]


@pytest.mark.parametrize("cache_format", ["bf16", "fp16", "fp8_ds_mla_v4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_formats_round_the_float32_entry_once(lowering: str, cache_format: str, dtype: torch.dtype) -> None:
    """The bytes are those that `concat_and_cache` writes for the entry that a `fp32` cache gets."""
    caches = caches_of(CSA, cache_format, *history(CSA, 20, dtype))
    entries = caches[0][0, :5]
    expected = allocate_cache(cache_format, 1, 6, head_dim=512, device=DEVICE)
    slots = torch.arange(5, device=DEVICE)
    mla_ops.concat_and_cache(entries[:, :448], entries[:, 448:], expected, slots, cache_format)
    assert_same_bits(caches[1], expected, cache_format)


def test_scales_of_a_block_of_more_than_2_gib_are_found(lowering: str) -> None:
    """They begin behind the data of all entries of a block, of which memory holds only the pages that are touched."""
    weights, (kv, score) = Weights(CSA), history(CSA, 20)
    caches = []
    for max_entries in (6, 2**22):
        engine = Engine(weights, 1, 6, cache_format="fp8_ds_mla_v4")
        block_bytes = FORMATS["fp8_ds_mla_v4"].block_bytes(max_entries)
        engine.cache = torch.empty(1, block_bytes, dtype=torch.uint8, device=DEVICE)
        engine.step(kv, score, [0] * 20, list(range(20)))
        caches.append(engine.entries(0, 5))
    assert_same_bits(*caches, "entries")


def test_index_keys_are_quantised_from_the_float32_entry(lowering: str) -> None:
    """The bytes are those that `write_index_cache` writes for the entry that a `fp32` cache gets."""
    kv, score = history(INDEXER, 20, torch.bfloat16)
    kv[7] = math.nan
    caches = caches_of(INDEXER, "fp8_index", kv, score)
    expected = allocate_cache("fp8_index", 1, 6, device=DEVICE)
    mla_ops.write_index_cache(caches[0][0, :5], expected, torch.arange(5, device=DEVICE), "fp8_index")
    assert_same_bits(caches[1], expected, "fp8_index")


@geometries
def test_lowerings_write_the_same_states_and_close_entries(triton_lowering: None, geometry: Geometry) -> None:
    """A whole window, whose last group takes states of an earlier step."""
    weights, length = Weights(geometry), max(geometry.window, 6) + 1
    kv, score = history(geometry, length)
    engines = []
    for backend in BACKENDS:
        torch.manual_seed(0)  # the same blocks
        engine = Engine(weights, 1, 2)
        with dispatch.override(backend):
            engine.step(kv[:-5], score[:-5], [0] * (length - 5), list(range(length - 5)))
            engine.step(kv[-5:], score[-5:], [0] * 5, list(range(length - 5, length)))
        engines.append(engine)
    assert_same_bits(engines[1].states, engines[0].states, "states")
    _, magnitudes, _ = oracle(weights, kv, score)
    bound = tolerances.compressed_entry(torch.float32, geometry.window, geometry.head_dim, **magnitudes)
    torch.testing.assert_close(engines[1].cache, engines[0].cache, rtol=2 * bound.rtol, atol=2 * bound.atol)


def test_a_new_request_in_used_blocks_reads_nothing_of_the_old_one(lowering: str) -> None:
    weights = Weights(CSA)
    engine, fresh = Engine(weights, 1, 8), Engine(weights, 1, 8)
    old = torch.full((11, 1024), math.nan, device=DEVICE)
    engine.step(old, old, [0] * 11, list(range(11)))
    kv, score = history(CSA, 9)
    for one in (engine, fresh):
        one.step(kv[:3], score[:3], [0] * 3, [0, 1, 2])
        one.step(kv[3:], score[3:], [0] * 6, list(range(3, 9)))
    assert_same_bits(engine.entries(0, 2), fresh.entries(0, 2), "entries")


@geometries
def test_rejected_drafts_are_replaced_where_the_ring_has_room_for_them(lowering: str, geometry: Geometry) -> None:
    """Three draft tokens a step, of which one is kept: what they overwrote is not needed again."""
    skip_what_takes_minutes_to_interpret(lowering, geometry)
    weights, length, drafts = Weights(geometry), 2 * geometry.ratio + 2, 3
    kv, score = history(geometry, length)
    engine = Engine(weights, 1, 4, state_blocks=1, state_block_size=geometry.window + drafts)
    for position in range(length):
        wrong = history(geometry, drafts)
        rows = [
            torch.cat((right[position : position + 1], draft)) for right, draft in zip((kv, score), wrong, strict=True)
        ]
        engine.step(*rows, [0] * (1 + drafts), list(range(position, position + 1 + drafts)))
    # only now, as a later draft may have completed a later group
    whole = Engine(weights, 1, 4)
    whole.step(kv, score, [0] * length, list(range(length)))
    assert_same_bits(engine.entries(0, 2), whole.entries(0, 2), "entries")


def test_nothing_is_written_beside_entries_and_states(lowering: str, device: torch.device) -> None:
    """Slices of pools, padding tokens, slots and blocks out of range."""
    weights = Weights(ODD)
    pool = torch.full((6, 5, 256), 7.0, device=device)
    cache_pool = torch.full((5, 4, 128), 7.0, device=device)
    states, cache = pool[1:5, 1:4], cache_pool[1:4, :3]
    table = torch.tensor([[2], [99], [-1]], dtype=torch.int32, device=device)
    requests = torch.tensor([0, 0, 0, 1, 2, -1, 3, 0], dtype=torch.int32, device=device)
    positions = torch.tensor([0, 1, 2, 2, 2, 2, 2, -1], dtype=torch.int32, device=device)
    slots = torch.tensor([4, 4, 5, 9, -1, 1, 2, 3], device=device)
    kv, score = history(ODD, 8)
    arguments = (weights.bias, weights.norm, weights.cos_sin, states, cache, table, requests, positions, slots)
    mla_ops.compress_and_cache(kv, score, *arguments, EPS, "fp32")
    touched = (pool != 7).any(-1).nonzero().tolist()
    assert touched == [[3, 1], [3, 2], [3, 3]]
    assert (cache_pool != 7).any(-1).nonzero().tolist() == [[2, 2]]
    expected, *_ = oracle(weights, kv[:3], score[:3])
    torch.testing.assert_close(cache_pool[2, 2].double().cpu(), expected[0], rtol=1e-4, atol=1e-4)


def test_shared_blocks_and_positions_in_no_order_write_nothing_else(lowering: str, device: torch.device) -> None:
    """Such requests may read any states, and write to their own places only."""
    weights = Weights(ODD)
    pool = torch.full((6, 5, 256), 7.0, device=device)
    cache_pool = torch.full((5, 4, 128), 7.0, device=device)
    states, cache = pool[1:5, 1:4], cache_pool[1:4, :3]
    table = torch.tensor([[2], [2], [0]], dtype=torch.int32, device=device)
    requests = torch.tensor([0, 1, 0, 1, 2, 2, 2, 2], dtype=torch.int32, device=device)
    positions = torch.tensor([2, 2, 2, 5, 1, 1, 0, 2], dtype=torch.int32, device=device)
    slots = torch.tensor([4, 5, 4, 5, 9, -1, 99, 6], device=device)
    kv, score = history(ODD, 8)
    arguments = (weights.bias, weights.norm, weights.cos_sin, states, cache, table, requests, positions, slots)
    mla_ops.compress_and_cache(kv, score, *arguments, EPS, "fp32")
    assert (pool != 7).any(-1).nonzero().tolist() == [[1, 1], [1, 2], [1, 3], [3, 3]]
    assert (cache_pool != 7).any(-1).nonzero().tolist() == [[2, 1], [2, 2], [3, 0]]


def test_a_position_without_angles_writes_no_entry(lowering: str) -> None:
    weights = Weights(ODD, max_positions=4)
    engine = Engine(weights, 1, 3)
    kv, score = history(ODD, 9)
    engine.step(kv, score, [0] * 9, list(range(9)))
    # groups begin at 0, 3 and 6
    assert engine.cache[0].any(-1).tolist() == [True, True, False]


def test_a_token_that_is_not_a_number_stays_in_its_group(lowering: str) -> None:
    weights = Weights(ODD)
    engine = Engine(weights, 2, 3)
    kv, score = history(ODD, 12)
    kv[4, 3], score[10, 5] = math.inf, math.nan
    engine.step(kv, score, [0] * 9 + [1] * 3, [*range(9), *range(3)])
    assert engine.cache.isfinite().all(-1).tolist()[0] == [True, False, True]
    assert not engine.cache[1, 0].isfinite().any()


CONFIG = {
    "hidden_size": 64,
    "head_dim": 512,
    "index_head_dim": 128,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "num_hidden_layers": 2,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "vocab_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "sliding_window": 16,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("pieces", [(300,), (5, 1, 1, 1, 130, 2, 20), (1,) * 20], ids=["one", "mixed", "decode"])
@pytest.mark.parametrize("name", ["C4A", "C128A", "C4A indexer"])
def test_entries_equal_transformers(lowering: str, name: str, pieces: tuple[int, ...]) -> None:
    """transformers' compressor modules and caches, fed the same hidden states in the same pieces."""
    if len(pieces) == 1 and name == "C128A":
        skip_what_takes_minutes_to_interpret(lowering, HCA)
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("this transformers has no DeepSeek-V4")
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as stock

    config = transformers.DeepseekV4Config(**CONFIG)
    layer = 1 if name == "C128A" else 0
    module = (stock.DeepseekV4HCACompressor if layer else stock.DeepseekV4CSACompressor)(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    module.kv_norm.weight.data += 1
    module.to(DEVICE)
    past = transformers.DynamicCache(config=config)
    part = module.indexer if "indexer" in name else module
    geometry = {"C4A": CSA, "C128A": HCA, "C4A indexer": INDEXER}[name]
    weights = Weights(geometry)
    weights.bias, weights.norm = part.position_bias.detach(), part.kv_norm.weight.detach()
    positions = torch.arange(512, device=DEVICE).unsqueeze(0)
    angles = part.rotary_emb(weights.bias, position_ids=positions, layer_type="compress")
    weights.cos_sin = torch.cat(angles, dim=-1)[0]

    engine, start, fed = Engine(weights, 1, 80), 0, []
    for count in pieces:
        hidden = torch.randn(1, count, 64, device=DEVICE)
        with torch.no_grad():
            module(hidden, torch.randn(1, count, 32, device=DEVICE), positions[:, start : start + count], past, layer)
            kv, score = part.kv_proj(hidden)[0], part.gate_proj(hidden)[0]
        engine.step(kv, score, [0] * count, list(range(start, start + count)))
        fed.append((kv, score))
        start += count
    expected = past.layers[layer].compressed_kv["indexer" if "indexer" in name else "compressor"][0]
    assert len(expected) == sum(pieces) // geometry.ratio
    if len(expected) == 0:
        return
    kv, score = (torch.cat(parts) for parts in zip(*fed, strict=True))
    _, magnitudes, _ = oracle(weights, kv, score)
    bound = tolerances.compressed_entry(torch.float32, geometry.window, geometry.head_dim, **magnitudes)
    found = engine.entries(0, len(expected))
    torch.testing.assert_close(found, expected, rtol=2 * bound.rtol, atol=2 * bound.atol)
