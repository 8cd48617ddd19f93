"""transformers' DeepSeek-V3 through the ops: dense MLA, prefill over chunks of context, decode over latents.

The model is small, the attention's geometry is the real one, every layer is dense where a test is about rounding: the
logits are then a smooth function of the rounding errors. Against transformers itself.
"""

import functools
import math
from typing import Any

import pytest
import torch
import transformers_oracle

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "DeepseekV3ForCausalLM"):
    pytest.skip("this transformers has no DeepSeek-V3", allow_module_level=True)

import torch._dynamo.testing

from mla_ops.demo.model import TEXT
from mla_ops.models import (
    GenerationSession,
    compare_logits,
    decoder_for,
    dense_prefill,
    stock_generate,
    teacher_forced_logits,
)
from mla_ops.models.evaluate import cast_parameters, stock_logits
from mla_ops.testing.checks import record_calls

NUM_LAYERS = 3
BOOK = list(TEXT.read_bytes())
PROMPTS = [BOOK[:5], BOOK[40:101], BOOK[200:233], BOOK[300:301]]
LIMITS = [44, 50, 20, 46]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Chunks of 20 tokens: prompts have several, which split blocks of 16 anywhere."""
    monkeypatch.setattr(dense_prefill, "CONTEXT_ROWS", 20)


def build_model(**changes: Any) -> Any:
    config = transformers.DeepseekV3Config(
        **{
            "vocab_size": 256,
            "hidden_size": 128,
            "intermediate_size": 256,
            "moe_intermediate_size": 32,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "max_position_embeddings": 4096,
            "initializer_range": 0.08,
            "bos_token_id": None,
            "eos_token_id": None,
            **changes,
        }
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    torch.random.set_rng_state(state)
    return model


@pytest.fixture(scope="module")
def model():
    return build_model()


@pytest.fixture(scope="module")
def smooth_model():
    return build_model(first_k_dense_replace=NUM_LAYERS)


@pytest.fixture(scope="module")
def continuations(model):
    """transformers' own greedy continuation of each prompt, one at a time."""
    return [stock_generate(model, [prompt], limit).tokens[0] for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]


assert_float32_equal = functools.partial(transformers_oracle.assert_float32_equal, matmuls=9 * NUM_LAYERS)


@pytest.mark.parametrize(
    "step_sizes",
    [(150,), (64, 64, 22), (7, 100), (100, 1), (7, 1, 1, 30), (1,)],
    ids=["one prefill", "chunked prefill", "a long second chunk", "prefill then decode", "mixed", "decode alone"],
)
def test_float32_logits_equal_transformers(model, step_sizes):
    text = BOOK[:150]
    logits = teacher_forced_logits(decoder_for(model, 150), text, "fp32", step_sizes=step_sizes, block_size=16)
    assert_float32_equal(logits, stock_logits(model, text))


@pytest.mark.parametrize(
    "changes",
    [
        {"q_lora_rank": None},
        {"rope_interleave": False},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 40.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 64,
            }
        },
        {"v_head_dim": 64, "qk_nope_head_dim": 64},
    ],
    ids=["full-rank queries", "rotation by halves", "yarn", "narrower heads"],
)
def test_float32_logits_equal_transformers_for_other_configs(changes):
    model = build_model(**changes)
    text = BOOK[:90]
    logits = teacher_forced_logits(decoder_for(model, 90), text, "fp32", step_sizes=(50, 30, 1), block_size=16)
    assert_float32_equal(logits, stock_logits(model, text))


def test_prefill_runs_over_expanded_keys_and_decode_over_latents(model):
    with record_calls() as calls:
        decoder = decoder_for(model, 60)
        teacher_forced_logits(decoder, BOOK[:51], "fp32", step_sizes=(30, 20, 1), block_size=16)
    names = [op for op, _ in calls if op != "build_step_metadata"]
    first, second = (
        ["concat_and_cache", "prefill_attention"],
        ["gather_cache", "prefill_attention", "merge_attention_states"],
    )
    # 30 tokens of context are two chunks of 20
    expected = (
        first * NUM_LAYERS + (first + 2 * second) * NUM_LAYERS + ["concat_and_cache", "paged_attention"] * NUM_LAYERS
    )
    assert names == expected


def test_greedy_tokens_of_an_unequal_batch_equal_transformers(model, continuations):
    """Four requests on three rows of 16-token blocks: they end at different steps, and one waits for a row."""
    decoder = decoder_for(model, 120)
    session = GenerationSession(decoder, max_num_requests=3, cache_format="fp32", block_size=16, prefill_tokens=24)
    assert session.generate(PROMPTS, LIMITS).tokens == continuations


def test_compiled_is_two_graphs_without_breaks_for_every_length():
    """One graph for prefill, whatever is cached, and one for decode; a dense layer and one of experts."""
    model, limits = build_model(num_hidden_layers=2), [6, 5, 4, 6]
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    session = GenerationSession(
        decoder_for(model, 120),
        max_num_requests=3,
        cache_format="fp32",
        block_size=16,
        prefill_tokens=24,
        compiled=True,
        backend=counter,
    )
    session.warm_up()
    assert counter.frame_count == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = session.generate(PROMPTS, limits).tokens
        session.generate([BOOK[:length] for length in (1, 2, 23, 24, 25, 49, 100)], 3)
    assert counter.frame_count == 2
    assert found == [stock_generate(model, [p], n).tokens[0] for p, n in zip(PROMPTS, limits, strict=True)]


def test_bfloat16_error_is_what_bfloat16_explains(smooth_model):
    """Both are compared with the float32 run of the same bfloat16 weights; the bound is that of `test_deepseek_v32.py`.

    A rounding to bfloat16 is 2**-9 / sqrt(3) rms, about 16 of them follow each other in a layer. Merging a chunk rounds
    the attention's output once more, and so does each chunk.
    """
    half = cast_parameters(smooth_model, torch.bfloat16)
    text = BOOK[:200]
    exact = stock_logits(cast_parameters(half, torch.float32), text)
    stock = compare_logits(exact, stock_logits(half, text))
    ours = compare_logits(exact, teacher_forced_logits(decoder_for(half, 200), text, "bf16", step_sizes=(100, 60)))
    chunks = 2 * math.ceil(160 / 20)
    bound = 2**-9 / math.sqrt(3) * math.sqrt((16 + chunks) * NUM_LAYERS)
    assert stock.relative_error < bound
    assert ours.relative_error < bound
    assert ours.top1 > 0.95


def test_fp8_cache_error_is_what_e4m3_explains(smooth_model):
    """Float32 but for the cache, the bound of `test_deepseek_v32.py`. A prefill reads only what came before it."""
    text = BOOK[:200]
    exact = stock_logits(smooth_model, text)
    decoder = decoder_for(smooth_model, 200)
    ours = compare_logits(exact, teacher_forced_logits(decoder, text, "fp8_ds_mla", step_sizes=(50, 49, 1)))
    bound = 2**-4 / math.sqrt(3) * 0.72 * math.sqrt(NUM_LAYERS)
    assert 0 < ours.relative_error < bound
    assert ours.top1 > 0.9


def test_a_step_of_padding_changes_no_cache(model):
    session = GenerationSession(decoder_for(model, 64), max_num_requests=2, cache_format="fp32", block_size=16)
    session.start_request(0, BOOK[:20], 1)  # done at once: no row is active
    before = [tensor.clone() for layer in session.cache.layers for tensor in layer if tensor is not None]
    session.step()
    after = [tensor for layer in session.cache.layers for tensor in layer if tensor is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_the_decoder_refuses(model):
    with pytest.raises(ValueError, match="reads cache_format 'fp32' or 'fp8_ds_mla', got 'bf16'"):
        decoder_for(model, 64).allocate_cache("bf16", 4, 16)
    narrow = build_model(kv_lora_rank=256, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"config.kv_lora_rank must be 512, .* got 256"):
        decoder_for(narrow, 64)


def test_there_are_no_index_keys(model):
    cache = decoder_for(model, 64).allocate_cache("fp8_ds_mla", 2, 16)
    assert [layer.index_keys for layer in cache.layers] == [None] * NUM_LAYERS
    assert [layer.latent.shape[-1] for layer in cache.layers] == [656] * NUM_LAYERS


GPU_CASES = [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.bfloat16, "fp8_ds_mla")]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "cache_format"), GPU_CASES, ids=[case[1] for case in GPU_CASES])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager ops", "compiled"])
def test_replayed_tokens_equal_unreplayed_tokens_on_gpu(model, dtype, cache_format, compiled):
    """The captured step sees other lengths, other blocks and fewer live rows at every replay."""
    torch._dynamo.reset()
    decoder = decoder_for(cast_parameters(model, dtype).to("cuda"), 120)
    options = {"max_num_requests": 3, "cache_format": cache_format, "block_size": 16, "prefill_tokens": 24}
    plain = GenerationSession(decoder, **options, compiled=compiled, cuda_graph=False)
    expected = plain.generate(PROMPTS, LIMITS).tokens
    session = GenerationSession(decoder, **options, compiled=compiled, cuda_graph=True)
    session.warm_up()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert session.generate(PROMPTS, LIMITS).tokens == expected
    if dtype == torch.float32:
        stock = decoder.model
        assert expected == [
            stock_generate(stock, [prompt], limit).tokens[0] for prompt, limit in zip(PROMPTS, LIMITS, strict=True)
        ]
