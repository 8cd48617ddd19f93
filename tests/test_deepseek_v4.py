"""transformers' DeepSeek-V4 through the ops: float32 logits of all three layer types against transformers itself.

The model is small, the attention's geometry is the real one (keys of 512, groups of 4 and 128, index keys of 128).
"""

import copy
import functools
import math
import random
import statistics

import pytest
import torch
import transformers_oracle

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "DeepseekV4ForCausalLM"):
    pytest.skip("this transformers has no DeepSeek-V4: needs 5.17 or later", allow_module_level=True)

import torch._dynamo.testing

from mla_ops import dispatch
from mla_ops.models import GenerationSession, WindowedInputs, compare_logits, decoder_for, teacher_forced_logits
from mla_ops.models.evaluate import cast_parameters
from mla_ops.models.windowed import C4A, C128A, SLIDING

NUM_LAYERS = 4
MAX_LEN = 320


def build_model(**changes):
    """One layer of each type, and a C4A layer behind them; routed by hash, then by score."""
    config = {
        "vocab_size": 128,
        "hidden_size": 96,
        "head_dim": 512,
        "num_attention_heads": 4,
        "q_lora_rank": 48,
        "moe_intermediate_size": 48,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": NUM_LAYERS,
        "layer_types": [SLIDING, C4A, C128A, C4A],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe"],
        "o_groups": 2,
        "o_lora_rank": 24,
        # enough that no two entries tie at zero, where every head is cut off
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 9,
        "sliding_window": 24,
        "hc_sinkhorn_iters": 2,  # transformers' own module runs them in both
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**{**config, **changes})).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # a new model's zeros and ones would prove nothing
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "position_bias", "base", "hc_base")):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
            elif "norm.weight" in name:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(128, 6, generator=generator).argsort(1)[:, :2])
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def model():
    return build_model()


pytestmark = pytest.mark.usefixtures("one_thread")


def text(length, seed=0):
    return random.Random(seed).choices(range(128), k=length)


@torch.no_grad()
def stock_logits(model, tokens):
    """transformers' prefill of a whole text."""
    return model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0]


class Runner:
    """Requests with shuffled blocks, stepped with any number of tokens each."""

    def __init__(self, model, num_requests, max_num_tokens, cache_format="fp32", compiled=None):
        self.decoder = decoder_for(model, MAX_LEN)
        self.run = compiled(self.decoder) if compiled else self.decoder
        self.metadata = self.decoder.allocate_metadata(
            max_num_tokens=max_num_tokens, max_num_requests=num_requests, block_size=128
        )
        metadata = self.metadata
        shuffle = torch.Generator().manual_seed(5)
        self.tables = []
        for buffer in (metadata.step.block_table, metadata.c4a.block_table, metadata.c128a.block_table):
            blocks = torch.randperm(buffer.numel(), generator=shuffle).to(torch.int32)
            self.tables.append(blocks.view(buffer.shape).to(buffer.device))
        self.rings = torch.randperm(num_requests, generator=shuffle).to(torch.int32).unsqueeze(1)
        self.rings = self.rings.to(self.decoder.device)
        self.cache = self.decoder.allocate_cache(cache_format, self.tables[0].numel(), 128, num_requests)

    @torch.no_grad()
    def step(self, tokens, lens, *, pad_to=None):
        """Runs `tokens[r]` for each request r, which is `lens[r]` long with them. Logits of each request."""
        flat = [token for part in tokens for token in part]
        counts = [len(part) for part in tokens]
        device = self.decoder.device
        starts = torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)
        self.metadata.build(starts, torch.tensor(lens, dtype=torch.int32, device=device), *self.tables)
        padded = flat + [0] * ((pad_to or len(flat)) - len(flat))
        inputs = WindowedInputs.from_metadata(torch.tensor(padded, device=device), self.metadata, self.rings)
        cache = self.cache
        logits = self.run(inputs, cache.layers, cache.cache_format, cache.index_format)
        return logits[: len(flat)].split(counts)


def forced_logits(runner, tokens, sizes):
    """Logits of every position of one text, in steps of `sizes`, the last of which repeats."""
    found, start, sizes = [], 0, list(sizes)
    while start < len(tokens):
        part = tokens[start : start + (sizes.pop(0) if len(sizes) > 1 else sizes[0])]
        start += len(part)
        found.append(runner.step([part], [start])[0])
    return torch.cat(found)


assert_float32_equal = functools.partial(transformers_oracle.assert_float32_equal, matmuls=14 * NUM_LAYERS)


STEPS = {
    "one prefill": (300,),
    "chunked prefill": (130, 3, 60),
    "prefill then decode": (250, 1),
    "mixed": (7, 1, 1, 1, 30, 2, 93, 1, 5),
}


@pytest.mark.parametrize("sizes", STEPS.values(), ids=STEPS)
def test_float32_logits_equal_transformers(model, sizes):
    tokens = text(290)
    runner = Runner(model, 1, 300)
    assert_float32_equal(forced_logits(runner, tokens, sizes), stock_logits(model, tokens))


@pytest.mark.parametrize("kind", [SLIDING, C4A, C128A])
def test_float32_logits_of_one_layer_type_equal_transformers(kind):
    model = build_model(layer_types=[kind] * NUM_LAYERS)
    tokens = text(150)
    assert_float32_equal(forced_logits(Runner(model, 1, 150), tokens, (141, 1)), stock_logits(model, tokens))


def test_float32_logits_of_the_triton_lowerings_equal_transformers(triton_lowering, device):
    """A prefill that completes groups of both kinds, behind 121 tokens of the reference, and decode."""
    layers = {"num_hidden_layers": 2, "layer_types": [C4A, C128A], "mlp_layer_types": ["hash_moe", "moe"]}
    model = build_model(**layers).to(device)
    tokens = text(131)
    runner = Runner(model, 1, 131)
    with dispatch.override("reference"):  # an interpreted prefill of a whole window takes half a minute
        runner.step([tokens[:121]], [121])
    found = [runner.step([tokens[start:end]], [end])[0] for start, end in ((121, 129), (129, 130), (130, 131))]
    assert_float32_equal(torch.cat(found), stock_logits(model, tokens)[121:])


def test_yarn_frequencies_follow_the_model():
    rope = {
        "rope_type": "yarn",
        "factor": 16.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    }
    model = build_model(rope_parameters=rope)
    tokens = text(140)
    assert_float32_equal(forced_logits(Runner(model, 1, 140), tokens, (135, 1)), stock_logits(model, tokens))


def test_every_entry_selected_equals_transformers():
    model = build_model(index_topk=512)
    tokens = text(150)
    assert_float32_equal(forced_logits(Runner(model, 1, 150), tokens, (141, 1)), stock_logits(model, tokens))


def test_requests_of_one_batch_do_not_meet(model):
    """Prefill of one beside decode of another, padding, and a ring and blocks that a finished request leaves behind."""
    texts = [text(200, 1), text(140, 2), text(20, 3)]
    expected = [stock_logits(model, tokens) for tokens in texts]
    runner = Runner(model, 2, 160)
    first, second = runner.step([texts[0][:150], []], [150, 0])
    found = [[first], [second], []]
    for start, end in ((0, 5), (5, 127), (127, 128), (128, 140)):
        position = 150 + len(found[0]) - 1
        first, second = runner.step(
            [texts[0][position : position + 1], texts[1][start:end]], [position + 1, end], pad_to=160
        )
        found[0].append(first)
        found[1].append(second)
    # request 1 is done; another takes its row
    position = 154
    first, third = runner.step([texts[0][position : position + 1], texts[2]], [position + 1, 20])
    found[0].append(first)
    found[2].append(third)
    for parts, reference in zip(found, expected, strict=True):
        logits = torch.cat(parts)
        assert_float32_equal(logits, reference[: len(logits)])


PROMPTS = [text(9, 4), text(130, 5), text(47, 6), text(1, 7), text(255, 8)]
LIMITS = [30, 12, 20, 30, 9]


@pytest.fixture(scope="module")
def continuations(model):
    return transformers_oracle.greedy_continuations(model, PROMPTS, LIMITS)


SESSION = {"max_num_requests": 2, "cache_format": "fp32", "block_size": 128, "prefill_tokens": 60, "cuda_graph": False}


def test_generation_equals_transformers_token_for_token(model, continuations):
    """More prompts than rows: a row's blocks and rings pass on to the next request."""
    session = GenerationSession(decoder_for(model, MAX_LEN), **SESSION)
    assert session.generate(PROMPTS, LIMITS).tokens == continuations


def test_two_graphs_serve_every_step_and_give_the_eager_tokens():
    """A prefill of any length, and decode; one layer of each compressed kind."""
    layers = {"num_hidden_layers": 2, "layer_types": [C4A, C128A], "mlp_layer_types": ["hash_moe", "moe"]}
    decoder = decoder_for(build_model(**layers), MAX_LEN)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    session = GenerationSession(decoder, **SESSION, compiled=True, backend=counter)
    session.warm_up()
    limits = [6, 3, 5, 4, 3]  # the last of 255 tokens ends behind a group of 128
    with torch._dynamo.config.patch(error_on_recompile=True):
        tokens = session.generate(PROMPTS, limits).tokens
    assert tokens == GenerationSession(decoder, **SESSION).generate(PROMPTS, limits).tokens
    assert counter.frame_count == 2


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_captured_decode_equals_transformers_token_for_token(model, continuations, compiled):
    decoder = decoder_for(copy.deepcopy(model).cuda(), MAX_LEN)
    torch._dynamo.reset()
    session = GenerationSession(
        decoder, max_num_requests=2, cache_format="fp32", block_size=128, prefill_tokens=60, compiled=compiled
    )
    session.warm_up()
    assert session._graph is not None
    assert session.generate(PROMPTS, LIMITS, steps_per_check=4).tokens == continuations


@pytest.fixture(scope="module")
def smooth_model():
    """Rounding flips no selection, so logits are a smooth function of it: every entry is chosen, experts by hash."""
    return build_model(index_topk=512, initializer_range=0.06, mlp_layer_types=["hash_moe"] * NUM_LAYERS)


def test_fp8_cache_error_is_what_e4m3_explains(smooth_model):
    """Float32 but for the caches. e4m3 rounds by 2**-4 / sqrt(3) rms at a power of two, 0.72 of that over a binade.

    A key is its own value, so a rounding enters each layer twice, by the scores and by the values, and the layers'
    errors add up as a walk.
    """
    tokens = text(150)
    decoder = decoder_for(smooth_model, MAX_LEN)
    logits = teacher_forced_logits(decoder, tokens, "fp8_ds_mla_v4", step_sizes=(140, 1), block_size=128)
    agreement = compare_logits(stock_logits(smooth_model, tokens), logits)
    assert 0 < agreement.relative_error < 2**-4 / math.sqrt(3) * 0.72 * math.sqrt(2 * NUM_LAYERS)
    assert agreement.top1 > 0.8


def test_bfloat16_is_no_further_from_float32_than_transformers_is(smooth_model):
    """Against the float32 run of the same bfloat16 weights. We accumulate in float32 where transformers rounds.

    Where matrix products round is the CPU's choice, so one text may go either way. Over several, the mean of the
    ratios' logarithms is at most two standard errors above 0.
    """
    half = cast_parameters(smooth_model, torch.bfloat16)
    single, decoder = cast_parameters(half, torch.float32), decoder_for(half, MAX_LEN)
    ratios = []
    for seed in range(5):
        tokens = text(150, seed)
        exact = stock_logits(single, tokens)
        logits = teacher_forced_logits(decoder, tokens, "bf16", step_sizes=(140, 1), block_size=128)
        ours, stock = compare_logits(exact, logits), compare_logits(exact, stock_logits(half, tokens))
        ratios.append(math.log(ours.relative_error / stock.relative_error))
        assert ours.top1 > 0.8
    assert statistics.mean(ratios) <= 2 * statistics.stdev(ratios) / math.sqrt(len(ratios)), ratios


@pytest.mark.parametrize("block_size", [0, 64, 130])
def test_blocks_that_cut_a_group_are_refused(model, block_size):
    decoder = decoder_for(model, MAX_LEN)
    with pytest.raises(ValueError, match=f"multiple of 128.*got {block_size}"):
        decoder.allocate_metadata(max_num_tokens=1, max_num_requests=1, block_size=block_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"head_dim": 256}, "head_dim must be 512"), ({"index_head_dim": 64}, "index_head_dim must be 128")],
)
def test_a_geometry_without_a_format_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        decoder_for(build_model(**changes), MAX_LEN)


def test_a_cache_of_another_dtype_is_refused(model):
    with pytest.raises(ValueError, match="reads cache_format 'fp32' or 'fp8_ds_mla_v4', got 'bf16'"):
        Runner(model, 1, 8, cache_format="bf16")
