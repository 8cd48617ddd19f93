"""transformers' DeepSeek-V3.2 through the ops: against transformers itself, eagerly, compiled and replayed.

The model is small, the attention's geometry is the real one. Its weights are random, so what the indexer selects is
unrelated to what the attention weighs: one flipped selection changes more than it would in a trained model. Where a
test is about rounding, `index_topk` is larger than the text and every layer is dense, so that nothing is discontinuous.
"""

import functools
import math
import re

import pytest
import torch
import transformers_oracle

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "DeepseekV32ForCausalLM"):
    pytest.skip("this transformers has no DeepSeek-V3.2: needs 5.17 or later", allow_module_level=True)

import torch._functorch.config
import torch._inductor.config
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from mla_ops.demo.model import TEXT, build_small_model
from mla_ops.models import (
    GenerationSession,
    StepInputs,
    compare_logits,
    decoder_for,
    stock_generate,
    teacher_forced_logits,
)
from mla_ops.models.evaluate import cast_parameters, stock_logits

NUM_LAYERS = 3
SMALL = {"num_layers": NUM_LAYERS, "hidden_size": 128, "num_heads": 4, "index_topk": 32, "initializer_range": 0.08}
BOOK = list(TEXT.read_bytes())
PROMPTS = [BOOK[:5], BOOK[40:101], BOOK[200:233], BOOK[300:301]]
LIMITS = [30, 40, 20, 34]  # each request grows past `index_topk`


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return build_small_model(**SMALL)


@pytest.fixture(scope="module")
def smooth_model():
    """Every key selected, every layer dense: the logits are a smooth function of the rounding errors."""
    model = build_small_model(**{**SMALL, "index_topk": 4096})
    for layer in model.model.layers:
        layer.mlp = getattr(layer.mlp, "shared_experts", layer.mlp)
    return model


@pytest.fixture(scope="module")
def continuations(model):
    return transformers_oracle.greedy_continuations(model, PROMPTS, LIMITS)


assert_float32_equal = functools.partial(transformers_oracle.assert_float32_equal, matmuls=9 * NUM_LAYERS)


@pytest.mark.parametrize(
    "step_sizes",
    [(150,), (64, 64, 22), (100, 35, 1), (7, 1, 1, 30), (1,)],
    ids=["one prefill", "chunked prefill", "prefill then decode", "mixed", "decode from the first token"],
)
def test_float32_logits_equal_transformers(model, step_sizes):
    text = BOOK[:150]
    decoder = decoder_for(model, 150)
    logits = teacher_forced_logits(decoder, text, "fp32", step_sizes=step_sizes, block_size=16)
    assert_float32_equal(logits, stock_logits(model, text))


@pytest.mark.parametrize("index_topk", [1, 33, 4096])
def test_float32_logits_equal_transformers_for_other_index_topk(index_topk):
    model = build_small_model(**{**SMALL, "index_topk": index_topk})
    text = BOOK[:80]
    logits = teacher_forced_logits(decoder_for(model, 80), text, "fp32", step_sizes=(70, 1), block_size=16)
    assert_float32_equal(logits, stock_logits(model, text))


def test_yarn_frequencies_and_softmax_scale_follow_the_model():
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    }
    model = build_small_model(**SMALL, rope_parameters=rope)
    assert model.model.layers[0].self_attn.scaling > 1.5 * 192**-0.5
    text = BOOK[:120]
    logits = teacher_forced_logits(decoder_for(model, 120), text, "fp32", block_size=16)
    assert_float32_equal(logits, stock_logits(model, text))


def test_one_step_mixes_prefill_decode_and_padding(model):
    """Three requests: a prefill of 40, a decode step after 50, two tokens after 20; and five rows of padding."""
    old, new = (0, 50, 20), (40, 1, 2)
    texts = [BOOK[start : start + 60] for start in (0, 500, 900)]
    decoder = decoder_for(model, 64)
    metadata = decoder.allocate_metadata(max_num_tokens=70, max_num_requests=4, block_size=16)
    cache = decoder.allocate_cache("fp32", 16, 16)
    tables = torch.randperm(16, generator=torch.Generator().manual_seed(0)).to(torch.int32).view(4, 4)
    formats = ("fp32", "fp32")

    def run(lengths, seq_lens, tokens):
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        metadata.build(starts, torch.tensor(seq_lens, dtype=torch.int32), tables[:3])
        inputs = StepInputs.from_metadata(torch.tensor(tokens), metadata)
        with torch.no_grad():
            return decoder(inputs, cache.layers, *formats)

    run(old, old, [token for text, n in zip(texts, old, strict=True) for token in text[:n]])
    step = [token for text, a, b in zip(texts, old, new, strict=True) for token in text[a : a + b]]
    logits = run(new, [a + b for a, b in zip(old, new, strict=True)], step + [0] * 5)
    assert logits.isfinite().all()
    row = 0
    for text, before, count in zip(texts, old, new, strict=True):
        expected = stock_logits(model, text[: before + count])[before:]
        assert_float32_equal(logits[row : row + count], expected)
        row += count


def test_a_step_of_padding_changes_no_cache(model):
    decoder = decoder_for(model, 64)
    session = GenerationSession(decoder, max_num_requests=2, cache_format="fp32", block_size=16)
    session.start_request(0, BOOK[:20], 1)  # done at once: no row is active
    before = [tensor.clone() for layer in session.cache.layers for tensor in layer if tensor is not None]
    session.step()
    after = [tensor for layer in session.cache.layers for tensor in layer if tensor is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert session.seq_lens.tolist() == [20, 0]


def test_greedy_tokens_of_an_unequal_batch_equal_transformers(model, continuations):
    """Four requests on three rows of 16-token blocks: they end at different steps, and one waits for a row."""
    decoder = decoder_for(model, 160)
    session = GenerationSession(decoder, max_num_requests=3, cache_format="fp32", block_size=16, prefill_tokens=24)
    result = session.generate(PROMPTS, LIMITS)
    assert [len(tokens) for tokens in result.tokens] == LIMITS
    assert result.tokens == continuations
    assert sorted(session.free_blocks) == list(range(session.cache.num_blocks))


def test_greedy_tokens_equal_transformers_batched_with_left_padding(model, continuations):
    stock = stock_generate(model, PROMPTS, 20)
    assert [tokens[:20] for tokens in continuations] == stock.tokens


def test_a_small_cache_makes_requests_wait_and_reuses_blocks(model, continuations):
    """Nine blocks: the first two requests do not fit together, and later ones get blocks that others left dirty."""
    decoder = decoder_for(model, 160)
    session = GenerationSession(decoder, max_num_requests=3, cache_format="fp32", block_size=16, num_blocks=9)
    assert session.generate(PROMPTS, LIMITS, steps_per_check=7).tokens == continuations


def test_a_request_ends_at_the_end_token_and_the_others_go_on(model, continuations):
    end = continuations[1][5]
    expected = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in continuations]
    assert len({len(tokens) for tokens in expected}) > 1
    decoder = decoder_for(model, 160)
    session = GenerationSession(decoder, max_num_requests=4, cache_format="fp32", block_size=16, eos_token_ids=[end])
    assert session.generate(PROMPTS, LIMITS).tokens == expected


def test_bfloat16_error_is_what_bfloat16_explains(smooth_model, record_property):
    """Both are compared with the float32 run of the same bfloat16 weights.

    A rounding to bfloat16 has a relative error uniform in +-2**-9 at most: 2**-9 / sqrt(3) rms. About 16 of them follow
    each other in a layer (norms, projections, rotation, attention, MLP, residuals), independent, so their squares add.
    """
    half = cast_parameters(smooth_model, torch.bfloat16)
    text = BOOK[:300]
    exact = stock_logits(cast_parameters(half, torch.float32), text)
    stock = compare_logits(exact, stock_logits(half, text))
    decoder = decoder_for(half, 300)
    ours = compare_logits(exact, teacher_forced_logits(decoder, text, "bf16", step_sizes=(250, 35, 1)))
    record_property("bf16", f"{ours}, relative error {ours.relative_error:.2e}")
    record_property("stock bfloat16", f"{stock}, relative error {stock.relative_error:.2e}")
    bound = 2**-9 / math.sqrt(3) * math.sqrt(16 * NUM_LAYERS)
    assert stock.relative_error < bound
    assert ours.relative_error < bound
    # the absorbed form rounds two products that the expanded form does not, of the 16
    assert ours.relative_error < stock.relative_error * math.sqrt(18 / 16) * 1.1
    assert ours.top1 > 0.97


def test_fp8_cache_error_is_what_e4m3_explains(smooth_model, record_property):
    """Float32 but for the cache.

    e4m3 has 3 mantissa bits: a latent's relative error is at most 2**-4, and 2**-4 / sqrt(3) * 0.72 = 2.6 % rms over
    mantissas. The attention's output carries at most that into the residual stream, in each layer. For a small
    perturbation, KL is half the variance of the logits' change.
    """
    text = BOOK[:300]
    exact = stock_logits(smooth_model, text)
    ours = compare_logits(exact, teacher_forced_logits(decoder_for(smooth_model, 300), text, "fp8_ds_mla"))
    record_property("fp8_ds_mla", f"{ours}, relative error {ours.relative_error:.2e}")
    bound = 2**-4 / math.sqrt(3) * 0.72 * math.sqrt(NUM_LAYERS)
    assert ours.relative_error < bound
    assert ours.mean_kl < (bound * exact.std().item()) ** 2 / 2
    assert ours.top1 > 0.93


@pytest.mark.parametrize("cache_format", ["bf16", "fp8_ds_mla"])
def test_agreement_with_the_float32_run_when_keys_are_selected(model, cache_format, record_property):
    """With top-32 of up to 300 keys and random weights, flipped selections dominate, in stock bfloat16 as in ours."""
    half = cast_parameters(model, torch.bfloat16)
    text = BOOK[:300]
    exact = stock_logits(cast_parameters(half, torch.float32), text)
    stock = compare_logits(exact, stock_logits(half, text))
    ours = compare_logits(exact, teacher_forced_logits(decoder_for(half, 300), text, cache_format))
    record_property(cache_format, str(ours))
    record_property("stock bfloat16", str(stock))
    if cache_format == "bf16":
        assert ours.mean_kl < 2 * stock.mean_kl
        assert ours.top1 > stock.top1 - 0.05
    else:
        assert ours.mean_kl < 0.03
        assert ours.top1 > 0.7


@pytest.mark.slow
def test_inductor_gives_the_eager_tokens_and_clones_no_cache():
    """One layer. Two caches in a graph are in test_compile.py, two layers and experts in test_decoder.py."""
    model = build_small_model(**{**SMALL, "num_layers": 1, "mlp_layer_types": ["dense"]})
    decoder = decoder_for(model, 160)
    options = {"max_num_requests": 3, "cache_format": "fp32", "block_size": 16, "num_blocks": 37, "prefill_tokens": 24}
    expected = GenerationSession(decoder, **options).generate(PROMPTS, LIMITS).tokens
    torch._dynamo.reset()
    session = GenerationSession(decoder, **options, compiled=True)
    # a cached graph would come without its code
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        _, codes = run_and_get_code(session.warm_up)
    assert len(codes) == 3
    assert sum("mla.prefill_attention" in code for code in codes) == 1
    assert sum("mla.paged_sparse_attention" in code for code in codes) == 2
    for code in codes:
        assert not re.search(r"empty_strided\w*\(\(37, 16, ", code)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert session.generate(PROMPTS, LIMITS).tokens == expected


def test_a_cache_that_the_model_cannot_read_is_refused(model):
    with pytest.raises(ValueError, match="reads cache_format 'fp32' or 'fp8_ds_mla', got 'bf16'"):
        decoder_for(model, 64).allocate_cache("bf16", 4, 16)


def test_a_geometry_without_a_format_is_refused():
    model = build_small_model(**SMALL)
    model.config.index_head_dim = 64
    with pytest.raises(ValueError, match=r"decoder_for: config.index_head_dim must be 128, .* got 64"):
        decoder_for(model, 64)


@pytest.mark.parametrize(
    ("prompts", "limit", "message"),
    [
        ([[]], 3, "prompt 0 has 0 tokens and 3 new ones"),
        ([[1], [1, 2]], 63, "prompt 1 needs 65 tokens of cache"),
        ([[1]], [1, 2], "max_new_tokens has 2 entries for 1 prompts"),
    ],
    ids=["empty prompt", "too long", "limits that match no prompt"],
)
def test_requests_that_cannot_run_are_refused(model, prompts, limit, message):
    session = GenerationSession(decoder_for(model, 64), max_num_requests=2, cache_format="fp32", block_size=16)
    with pytest.raises(ValueError, match=message):
        session.generate(prompts, limit)


@pytest.mark.parametrize(
    ("text", "options", "error", "message"),
    [
        ([], {}, ValueError, "token_ids must have 1 to max_model_len, 64, tokens, got 0"),
        ([1] * 65, {}, ValueError, "token_ids must have 1 to max_model_len, 64, tokens, got 65"),
        ([1, 256], {}, ValueError, "token_ids has token id 256, the vocabulary has 256"),
        (torch.tensor([1]), {}, TypeError, "token_ids must be a list of token ids, got Tensor"),
        ([1, 2], {"step_sizes": [1, 0]}, ValueError, "step_sizes must be at least 1, got 0"),
        ([1, 2], {"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
    ],
    ids=["no text", "a long text", "an unknown id", "a tensor", "a step of no tokens", "empty blocks"],
)
def test_a_text_that_cannot_run_is_refused(model, text, options, error, message):
    """A step of no tokens never ended; an id or a position out of range is an assertion on a GPU, which ends it."""
    with pytest.raises(error, match=f"^teacher_forced_logits: {message}"):
        teacher_forced_logits(decoder_for(model, 64), text, "fp32", **options)
    with pytest.raises(TypeError, match=r"^teacher_forced_logits: decoder must be what decoder_for\(model, max_model"):
        teacher_forced_logits(model, [1], "fp32")


def test_logits_of_different_texts_are_not_compared():
    """One row would be compared with all."""
    with pytest.raises(ValueError, match=r"must have one shape, \[num_tokens, vocab_size\], got \[1, 4\] and \[3, 4\]"):
        compare_logits(torch.zeros(1, 4), torch.zeros(3, 4))


def test_a_cuda_graph_needs_a_cuda_model(model):
    with pytest.raises(ValueError, match="cuda_graph=True needs a model on a CUDA device"):
        GenerationSession(decoder_for(model, 64), max_num_requests=1, cache_format="fp32", cuda_graph=True)


GPU_CASES = [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.bfloat16, "fp8_ds_mla")]


def _gpu_session(model, dtype, cache_format, **options):
    decoder = decoder_for(cast_parameters(model, dtype).to("cuda"), 160)
    return GenerationSession(
        decoder, max_num_requests=3, cache_format=cache_format, block_size=16, prefill_tokens=24, **options
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "cache_format"), GPU_CASES, ids=[case[1] for case in GPU_CASES])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager ops", "compiled"])
def test_replayed_tokens_equal_unreplayed_tokens_on_gpu(model, dtype, cache_format, compiled):
    """The captured step sees other lengths, other blocks and fewer live rows at every replay."""
    torch._dynamo.reset()
    plain = _gpu_session(model, dtype, cache_format, compiled=compiled, cuda_graph=False)
    expected = plain.generate(PROMPTS, LIMITS).tokens
    session = _gpu_session(model, dtype, cache_format, compiled=compiled, cuda_graph=True)
    session.warm_up()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert session.generate(PROMPTS, LIMITS).tokens == expected
        # again, with the blocks that the first run left dirty, in another order
        assert session.generate(PROMPTS, LIMITS, steps_per_check=16).tokens == expected


@pytest.mark.gpu
def test_float32_logits_equal_transformers_on_gpu(model):
    """IEEE float32 on both sides; TF32 is off by default."""
    on_gpu = cast_parameters(model, torch.float32).to("cuda")
    text = BOOK[:150]
    logits = teacher_forced_logits(decoder_for(on_gpu, 150), text, "fp32", step_sizes=(100, 1), block_size=16)
    assert_float32_equal(logits, stock_logits(on_gpu, text))


@pytest.mark.gpu
def test_float32_tokens_equal_transformers_on_gpu(model):
    session = _gpu_session(model, torch.float32, "fp32")
    on_gpu = session.decoder.model
    for prompt, limit, tokens in zip(PROMPTS, LIMITS, session.generate(PROMPTS, LIMITS).tokens, strict=True):
        assert stock_generate(on_gpu, [prompt], limit).tokens == [tokens]


@pytest.mark.gpu
def test_reduce_overhead_replays_the_decode_step_on_gpu(model):
    """`mode="reduce-overhead"` records the decode step too, once the caches are marked as static."""
    torch._dynamo.reset()
    plain = _gpu_session(model, torch.bfloat16, "fp8_ds_mla", compiled=True, cuda_graph=False)
    expected = plain.generate(PROMPTS, LIMITS).tokens
    torch._dynamo.reset()
    counters.clear()
    session = _gpu_session(model, torch.bfloat16, "fp8_ds_mla", cuda_graph=False)
    for layer in session.cache.layers:
        for tensor in layer:
            torch._dynamo.mark_static_address(tensor)
    prefill = torch.compile(session.decoder, fullgraph=True, dynamic=False)
    decode = torch.compile(session.decoder, fullgraph=True, dynamic=False, mode="reduce-overhead")

    def run(inputs, layers, cache_format, index_format, logit_rows, host_reads):
        if logit_rows is not None:  # prefill
            inputs.mark_num_tokens_dynamic()
            return prefill(inputs, layers, cache_format, index_format, logit_rows, host_reads)
        torch.compiler.cudagraph_mark_step_begin()
        return decode(inputs, layers, cache_format, index_format, logit_rows, host_reads)

    session.model = run
    with torch._inductor.config.patch({"triton.cudagraph_or_error": True}):
        result = session.generate(PROMPTS, LIMITS)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert result.tokens == expected
