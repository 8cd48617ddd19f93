"""One decoder, every supported model: float32 against transformers itself, fp8 caches, and what is refused.

The models are small, the attention's geometry is the real one. Texts are longer than `index_topk`, so that an indexer
that differs from transformers' shows.
"""

import math

import pytest
import torch

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "DeepseekV32ForCausalLM"):
    pytest.skip("this transformers has no DeepSeek-V3.2: needs 5.17 or later", allow_module_level=True)

import torch._dynamo.testing
from small_models import SIZES, SMALL_MODELS
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers_oracle import assert_float32_equal

from mla_ops import allocate_cache, write_index_cache
from mla_ops.demo.model import TEXT, build_small_model
from mla_ops.models import (
    GenerationSession,
    compare_logits,
    decoder_for,
    experts,
    stock_generate,
    teacher_forced_logits,
)
from mla_ops.models.evaluate import cast_parameters, stock_logits
from mla_ops.models.experts import can_group, choose_implementation, feed_forward, mix_every, mix_grouped
from mla_ops.models.parts import choose_keys

BOOK = list(TEXT.read_bytes())
PROMPTS = [BOOK[:5], BOOK[40:101], BOOK[300:301]]
LIMITS = [30, 12, 4]  # the first grows past `index_topk`, the second is past it
# test_deepseek_v3.py, test_deepseek_v32.py and test_deepseek_v4.py go deeper into these
ELSEWHERE = ("DeepSeek-V3", "DeepSeek-V3.2", "DeepSeek-V4")
NAMES = [name for name in SMALL_MODELS if name not in ELSEWHERE]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return SMALL_MODELS[request.param]()


@pytest.mark.parametrize("step_sizes", [(20, 60, 50), (90, 30, 1)], ids=["prefill in chunks", "prefill then decode"])
def test_float32_logits_equal_transformers(model, step_sizes):
    """Past `index_topk` of 32: dense prefill first, then chunks and steps of chosen keys."""
    text = BOOK[:130]
    decoder = decoder_for(model, 130)
    logits = teacher_forced_logits(decoder, text, "fp32", step_sizes=step_sizes, block_size=16)
    assert_float32_equal(logits, stock_logits(model, text), 14 * decoder.config.num_hidden_layers)


def test_greedy_tokens_of_an_unequal_batch_equal_transformers(model):
    """Three requests on two rows: they end at different steps, and one waits for a row."""
    session = GenerationSession(
        decoder_for(model, 96), max_num_requests=2, cache_format="fp32", block_size=16, prefill_tokens=24
    )
    expected = [stock_generate(model, [prompt], limit).tokens[0] for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    assert session.generate(PROMPTS, LIMITS).tokens == expected


def test_fp8_cache_error_is_what_e4m3_explains(model):
    """Float32 but for the latents; every key is attended to, so that rounding flips no selection.

    e4m3 rounds by 2**-4 / sqrt(3) rms of a value between two powers of two, 0.72 of that over their range. It enters
    the residual stream once a layer, through the attention's output, and the layers' errors add up as a walk.
    """
    text = BOOK[:60]
    decoder = decoder_for(model, 60)
    if decoder.attention.has_indexer:
        decoder.attention.index_topk = decoder.index_topk = 60
    exact = teacher_forced_logits(decoder, text, "fp32", step_sizes=(30, 20, 1))
    ours = compare_logits(exact, teacher_forced_logits(decoder, text, "fp8_ds_mla", step_sizes=(30, 20, 1)))
    assert 0 < ours.relative_error < 2**-4 / math.sqrt(3) * 0.72 * math.sqrt(len(decoder.attention.parts))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("Kimi K2.5", "GLM-5")])
def test_layers_have_only_the_caches_that_they_fill(name):
    decoder = decoder_for(SMALL_MODELS[name](), 64)
    layers = decoder.allocate_cache("fp32", 2, 16).layers
    parts = decoder.attention.parts
    assert [layer.index_keys is not None for layer in layers] == [part.indexer == "own" for part in parts]
    assert [layer.latent is not None for layer in layers] == [part.kv_source == i for i, part in enumerate(parts)]


def test_compiled_shared_indexers_equal_transformers():
    """A dense and a sparse prefill and decode, a graph each for any length, that carry a choice between layers."""
    model = SMALL_MODELS["GLM-5 with shared indexers"](num_layers=2, indexer_types=["full", "shared"])
    torch._dynamo.reset()
    counters.clear()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    session = GenerationSession(
        decoder_for(model, 96),
        max_num_requests=2,
        cache_format="fp32",
        block_size=16,
        prefill_tokens=24,
        compiled=True,
        backend=counter,
    )
    session.warm_up()
    assert counter.frame_count == 3
    limits = [6, 12]
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = session.generate(PROMPTS[:2], limits).tokens
        session.generate([BOOK[:length] for length in (1, 2, 23, 24, 25, 32, 33, 49, 90)], 3)
    assert counter.frame_count == 3
    assert sum(counters["graph_break"].values()) == 0
    assert found == [stock_generate(model, [p], n).tokens[0] for p, n in zip(PROMPTS[:2], limits, strict=True)]


def index_scores(q, keys, weights, scale):
    """`sum_h weights_h * relu(scale * q_h . k)`, as transformers computes it: `[num_tokens, num_keys]`."""
    scores = torch.matmul(q.float(), keys.float().transpose(-1, -2)) * scale
    return torch.matmul(weights.unsqueeze(1), scores.relu()).squeeze(1)


@pytest.mark.parametrize("index_format", ["fp32", "fp8_index"])
def test_of_equal_scores_the_lowest_positions_are_chosen(index_format):
    """One index head's relu makes half of all scores 0. Values have few bits, so that fp8 holds them too."""
    generator = torch.Generator().manual_seed(0)
    q, keys = (torch.randint(-4, 5, (*shape, 128), generator=generator).float() for shape in ((3, 1), (64,)))
    weights = torch.rand(3, 1, generator=generator)
    cache = allocate_cache(index_format, 4, 16, head_dim=128)
    write_index_cache(keys, cache, torch.arange(64), index_format)
    scores = index_scores(q, keys, weights, 0.1)
    assert (scores == 0).sum(1).min() > 20
    table, request = torch.arange(4, dtype=torch.int32).unsqueeze(0), torch.zeros(3, dtype=torch.int32)
    visible = torch.tensor([64, 50, 30], dtype=torch.int32)
    chosen, counts = choose_keys(q, weights, 0.1, cache, table, request, visible, 45, index_format)
    assert counts.tolist() == [45, 45, 30]
    scores = scores.masked_fill(torch.arange(64) >= visible.unsqueeze(1), -torch.inf)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    for row, count in enumerate(counts.tolist()):
        assert chosen[row, :count].tolist() == order[row, :count].sort().values.tolist()
        assert (chosen[row, count:] == -1).all()


def test_with_one_index_head_the_choice_differs_from_transformers_by_ties_alone():
    """The same rule against transformers' own indexer: token by token, both choices have the same scores."""
    model = SMALL_MODELS["GLM-5"](index_heads=1, num_layers=1, mlp_layer_types=["dense"])
    text, taken, seen = BOOK[:80], [], []
    indexer = model.model.layers[0].self_attn.indexer
    handle = indexer.register_forward_hook(lambda module, arguments, chosen: taken.append(chosen[0].long()))
    stock_logits(model, text)
    handle.remove()
    decoder = decoder_for(model, 80)
    select = decoder.attention._select_keys

    def record(*arguments):
        seen.append((select(*arguments), arguments))
        return seen[-1][0]

    decoder.attention._select_keys = record
    teacher_forced_logits(decoder, text, "fp32", block_size=80)
    ours, (_, hidden, q_residual, part, step, index_cache) = seen[0]
    q = part.index_rope.rotate(indexer.wq_b(q_residual).view(80, 1, 128), step.cos, step.sin)
    scores = index_scores(q, index_cache[0], indexer.weights_proj(hidden).float(), indexer.softmax_scale)
    tied = (scores[32:] == 0).sum().item()
    assert tied > 48
    both = [scores[32:].gather(1, chosen[32:].long()).sort(1).values for chosen in (ours[0], taken[0])]
    torch.testing.assert_close(*both, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 7, 64])
def test_grouped_experts_equal_every_expert_on_every_token(num_tokens):
    """The products are the same; a token's sum is rounded once, and its terms once each, to bfloat16."""
    model = cast_parameters(build_small_model("DeepseekV3", **SIZES), torch.bfloat16)
    mlp = model.model.layers[1].mlp
    hidden = torch.randn(num_tokens, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        _, weights, routing = mlp.gate(hidden)
        assert can_group(mlp.experts)
        grouped, every = (mix(mlp.experts, hidden, routing, weights) for mix in (mix_grouped, mix_every))
        stock = mlp.experts(hidden, routing, weights)
    for other in (every, stock):
        # 2 experts, each rounded behind two products, an activation and a factor, and the sum
        assert (grouped - other).float().norm() < 2**-8 * math.sqrt(2 * 5) * other.float().norm()


def assert_experts_equal(actual, expected):
    """Two experts and the shared one, each rounded behind two products, an activation, a factor and a sum.

    Sums of up to 128 terms are in float32, so that their roundings count in float32 alone: those of four products.
    """
    roundings = 3 * 5 + (4 * 128 if actual.dtype == torch.float32 else 0)
    error = (actual - expected).float().norm() / expected.float().norm()
    assert error < torch.finfo(actual.dtype).eps / 2 * math.sqrt(roundings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_cpu_each_expert_sees_the_tokens_that_chose_it(dtype, monkeypatch):
    """Every dtype runs, by torch's grouped matmul or transformers' own."""
    monkeypatch.setattr(experts, "mix_every", None)
    mlp = cast_parameters(build_small_model("DeepseekV3", **SIZES), dtype).model.layers[1].mlp
    hidden = torch.randn(33, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        actual, expected = feed_forward(mlp, hidden, hidden, False), mlp(hidden)
    assert_experts_equal(actual, expected)


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_way_to_run_experts_gives_what_transformers_gives(dtype, name, monkeypatch):
    monkeypatch.setattr(experts, "choose_implementation", lambda *given: name)
    mlp = cast_parameters(build_small_model("DeepseekV3", **SIZES), dtype).model.layers[1].mlp
    hidden = torch.randn(7, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        actual, expected = feed_forward(mlp, hidden, hidden, False), mlp(hidden)
    assert_experts_equal(actual, expected)


def test_a_step_that_may_be_captured_reads_no_sizes_and_copies_few_weights():
    assert choose_implementation("cuda", True, 512 * 8, 256) == "grouped_mm"
    assert choose_implementation("cpu", False, 1, 256) == "grouped_mm"
    assert choose_implementation("cuda", False, 10 * 8, 256) == "batched_mm"
    assert choose_implementation("cuda", False, 11 * 8, 256) is None


@pytest.mark.parametrize(("dynamic", "expected"), [(False, [16.0]), (True, [10.0, 15.0])])
def test_the_choice_of_a_captured_step_traces_and_guards_nothing(dynamic, expected):
    """A number of tokens that varies stays so: there is no guard on a third of the experts."""

    def weigh(x):
        name = choose_implementation("cuda", False, x.shape[0] * 2, 12)
        return x.sum() * (8 if name == "batched_mm" else 5)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(weigh, backend=counter, fullgraph=True)
    found = []
    for count in (2, 3) if dynamic else (2,):
        x = torch.ones(count)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        found.append(compiled(x).item())
    assert found == expected
    assert counter.frame_count == 1


def test_grouped_experts_trace_without_a_break():
    model = cast_parameters(build_small_model("DeepseekV3", **SIZES), torch.bfloat16)
    mlp = model.model.layers[1].mlp
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    def mix(hidden):
        _, weights, routing = mlp.gate(hidden)
        return mix_grouped(mlp.experts, hidden, routing, weights)

    compiled = torch.compile(mix, backend=counter, fullgraph=True)
    with torch.no_grad():
        for count in (8, 2, 33):
            hidden = torch.randn(count, 128).bfloat16()
            torch._dynamo.mark_dynamic(hidden, 0)
            torch.testing.assert_close(compiled(hidden), mix(hidden))
    assert counter.frame_count == 1


def test_experts_of_a_float32_model_compile_to_what_they_give_eagerly():
    """By Inductor, in the way that a step on a CPU takes them."""
    mlp = build_small_model("DeepseekV3", **SIZES).model.layers[1].mlp
    torch._dynamo.reset()
    compiled = torch.compile(lambda hidden: feed_forward(mlp, hidden, hidden, False), fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for count in (8, 2, 33):
            hidden = torch.randn(count, 128)
            torch._dynamo.mark_dynamic(hidden, 0)
            assert_experts_equal(compiled(hidden), mlp(hidden))


def _glm(**changes):
    return build_small_model("GlmMoeDsa", **{**SIZES, "num_layers": 1, **changes})


def _with_fp8_weight():
    model = _glm()
    projection = model.model.layers[0].self_attn.kv_b_proj
    projection.weight = torch.nn.Parameter(projection.weight.to(torch.float8_e4m3fn), requires_grad=False)
    return model


def _with_a_head_in(dtype=None, device=None):
    model = _glm()
    model.lm_head.to(dtype=dtype, device=device)
    return model


def _on_two_devices():
    """The second is a GPU that need not be there: a fake tensor."""
    model = _glm()
    mlp = model.model.layers[0].mlp.gate_proj
    with FakeTensorMode(allow_non_fake_inputs=True):
        mlp.weight = torch.nn.Parameter(torch.empty(mlp.weight.shape, device="cuda"))
    return model


def _of_another_class():
    """`DeepseekV32ForCausalLM.from_pretrained` loads a checkpoint of GLM-5, with a warning."""
    model = build_small_model(**{**SIZES, "num_layers": 1})
    model.config.model_type = "glm_moe_dsa"
    return model


def _partly_on_meta():
    model = _glm()
    model.model.layers[0].mlp.to("meta")
    return model


def _of_another_type():
    config = transformers.DeepseekV2Config(num_hidden_layers=1, vocab_size=8, hidden_size=32)
    with torch.device("meta"):
        return transformers.DeepseekV2ForCausalLM(config)


def _with_longrope():
    model = _glm()
    model.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 10000.0}
    return model


def _v4_with_dynamic_rope():
    model = SMALL_MODELS["DeepSeek-V4"](hidden_size=64, num_heads=2, layer_types=("sliding_attention",))
    model.config.rope_parameters["compress"]["rope_type"] = "dynamic"
    return model


def _kimi_of_another_text_model():
    model = SMALL_MODELS["Kimi K2.5"](num_layers=1)
    model.config.text_config.model_type = "llama"
    return model


class Adapted(torch.nn.Module):
    """A layer as peft wraps it: its `weight` is the one without the adapter."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    @property
    def weight(self):
        return self.base_layer.weight


class Packed(torch.Tensor):
    """A kind of tensor as torchao's quantized weights are one, with the dtype of what it stands for."""


def _with_a_packed_weight():
    model = _glm()
    projection = model.model.layers[0].self_attn.kv_b_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach().as_subclass(Packed))
    return model


def _peft_model():
    wrapper = type("PeftModel", (torch.nn.Module,), {"__module__": "peft.peft_model"})()
    wrapper.config, wrapper.lm_head = _glm().config, None
    return wrapper


def _with_an_adapter(owner, name):
    model = _glm(num_layers=2)  # the first has no experts
    module = model.model.layers[-1].get_submodule(owner)
    setattr(module, name, Adapted(getattr(module, name)))
    return model


REFUSED = {
    "an adapter of what attention reads": (
        lambda: _with_an_adapter("self_attn", "kv_b_proj"),
        ValueError,
        "kv_b_proj has an adapter, Adapted, which would be left out",
    ),
    "a packed weight": (_with_a_packed_weight, ValueError, "kv_b_proj.weight must be a plain tensor, .* got Packed: "),
    "a wrapper of adapters": (_peft_model, TypeError, r"got peft.peft_model.PeftModel: pass its get_base_model\(\)"),
    "an adapter of experts": (lambda: _with_an_adapter("mlp", "experts"), ValueError, "mlp.experts has an adapter"),
    "a path": (lambda: "zai-org/GLM-5", TypeError, "got the path 'zai-org/GLM-5': load it first, .*from_pretrained"),
    "a module": (lambda: torch.nn.Linear(1, 1), TypeError, "must be a loaded transformers model, got Linear"),
    "another type": (_of_another_type, TypeError, r"model_type in \[.*'glm_moe_dsa'.*\], got .* 'deepseek_v2'"),
    "a base model": (
        lambda: _glm().model,
        TypeError,
        "GlmMoeDsaModel has none: load .* transformers.GlmMoeDsaForCausalLM",
    ),
    "fp8 weights": (_with_fp8_weight, ValueError, r"kv_b_proj.weight is float8_e4m3fn: .*dequantize=True"),
    "double precision": (lambda: _glm().double(), ValueError, r"weight is float64: .*dtype=torch.bfloat16"),
    "an fp8 head": (lambda: _with_a_head_in(torch.float8_e4m3fn), ValueError, r"lm_head.weight is float8_e4m3fn"),
    "a head elsewhere": (
        lambda: _with_a_head_in(device="meta"),
        ValueError,
        r"must be loaded, lm_head.weight is on the meta",
    ),
    "a compiled model": (lambda: torch.compile(_glm()), TypeError, "got torch._dynamo.*OptimizedModule"),
    "another class": (
        _of_another_class,
        TypeError,
        r"of model_type 'glm_moe_dsa' must be a transformers.GlmMoeDsaForCausalLM, got .*DeepseekV32ForCausalLM",
    ),
    "two devices": (_on_two_devices, ValueError, r"one device, got embed_tokens.* on cpu, .*gate_proj.* on cuda:0"),
    "weights that are not loaded": (_partly_on_meta, ValueError, r"must be loaded, .*mlp.* is on the meta device"),
    "longrope": (_with_longrope, ValueError, "RoPE type 'longrope' changes with the sequence length"),
    "a RoPE that changes in one kind of layer": (_v4_with_dynamic_rope, ValueError, "RoPE type 'dynamic' changes with"),
    "many heads": (lambda: _glm(num_heads=129), ValueError, "num_attention_heads must be 1 to 128, got 129"),
    "narrow latents": (lambda: _glm(kv_lora_rank=256), ValueError, r"config.kv_lora_rank must be 512, .* got 256"),
}


@pytest.mark.parametrize(("build", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_cannot_run_is_refused_in_a_sentence(build, error, message):
    with pytest.raises(error, match=f"^decoder_for: .*{message}"):
        decoder_for(build(), 64)


@pytest.mark.skipif("Kimi K2.5" not in SMALL_MODELS, reason="this transformers has no Kimi K2.5")
def test_a_kimi_with_another_text_model_is_refused():
    with pytest.raises(
        TypeError, match="the text model of a 'kimi_k25' must be of model_type 'deepseek_v3', got 'llama'"
    ):
        decoder_for(_kimi_of_another_text_model(), 64)


@pytest.mark.skipif("Mistral Large 4" not in SMALL_MODELS, reason="this transformers has no Mistral Large 4")
def test_latents_of_a_layer_that_transformers_does_not_read_are_refused():
    """It reads those that were stored last, whatever number the config names."""
    model = SMALL_MODELS["Mistral Large 4"](kv_source_layers=[0, 1, 2, 1, 0, 2], no_rope_layers=[1, 0, 1, 0, 1, 1])
    with pytest.raises(ValueError, match=r"config.kv_source_layers\[4\] is 0, but transformers reads .* layer 2 there"):
        decoder_for(model, 64)


def test_a_kimi_k2_checkpoint_runs_as_the_deepseek_v3_that_loads_it(tmp_path):
    """transformers keeps the checkpoint's model_type in the config."""
    build_small_model("DeepseekV3", **{**SIZES, "num_layers": 1}).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"deepseek_v3"', '"kimi_k2"'))
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == "kimi_k2"
    text = BOOK[:40]
    assert_float32_equal(teacher_forced_logits(decoder_for(model, 40), text, "fp32"), stock_logits(model, text), 14)


class AdaptedEmbedding(Adapted):
    def forward(self, ids):
        return self.base_layer(ids) * 1.5


def test_an_adapter_of_the_embedding_is_called():
    """It does not say how many ids it takes."""
    model = _glm()
    model.model.embed_tokens = AdaptedEmbedding(model.model.embed_tokens)
    text = BOOK[:40]
    assert_float32_equal(teacher_forced_logits(decoder_for(model, 40), text, "fp32"), stock_logits(model, text), 14)


HOOKED = {
    "DeepSeek-V3": ("", "model", "model.layers.1", "model.layers.1.self_attn.kv_b_proj", "model.layers.1.mlp.experts"),
    "DeepSeek-V3.2": ("model.layers.0.self_attn", "model.layers.0.self_attn.indexer", "model.layers.3.mlp"),
    "DeepSeek-V4": ("model.layers.2.self_attn.compressor.kv_norm", "model.layers.0"),
    "Kimi K2.5": ("model", "model.language_model", "model.language_model.layers.0"),
}


@pytest.mark.parametrize("before", [False, True], ids=["a hook behind pre-hooks", "a pre-hook"])
@pytest.mark.parametrize("name", [name for name in HOOKED if name in SMALL_MODELS])
def test_a_hook_that_nobody_would_call_is_refused(name, before):
    """As of those who steer activations; transformers' own, which collect hidden states, are left as they are."""
    model = SMALL_MODELS[name]()
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    decoder = decoder_for(model, 40)
    plain = teacher_forced_logits(decoder, BOOK[:9], "fp32", block_size=128)
    for place in HOOKED[name]:
        module = model.get_submodule(place)
        register = module.register_forward_pre_hook if before else module.register_forward_hook
        handle = register(lambda *arguments: None)
        for make in (lambda: decoder_for(model, 40), lambda: decoder.allocate_cache("fp32", 4, 128)):
            with pytest.raises(
                ValueError, match=r"^decoder_for: .* has a forward hook, .*lambda.*, which would not be"
            ):
                make()
        handle.remove()
    assert torch.equal(teacher_forced_logits(decoder, BOOK[:9], "fp32", block_size=128), plain)


def test_hooks_of_what_is_called_are_called():
    model = SMALL_MODELS["DeepSeek-V3.2"]()
    seen = set()
    for place in ("input_layernorm", "self_attn.q_a_proj", "self_attn.o_proj", "mlp.gate", "mlp.shared_experts"):
        model.model.layers[3].get_submodule(place).register_forward_hook(
            lambda *arguments, place=place: seen.add(place)
        )
    teacher_forced_logits(decoder_for(model, 40), BOOK[:9], "fp32")
    assert len(seen) == 5


@pytest.mark.parametrize("whose", ["decoder's", "model's"])
def test_weights_that_change_after_their_decoder_was_made_are_refused(whose):
    """Angles are in float32 beside them, and follow neither the weights nor where they go."""
    decoder = decoder_for(_glm(), 40)
    (decoder if whose == "decoder's" else decoder.model).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"the model is in torch.bfloat16 on cpu, it was in torch.float32 on cpu when"):
        decoder.allocate_cache("fp8_ds_mla", 4, 16)


def test_a_request_longer_than_the_model_is_refused():
    with pytest.raises(ValueError, match=r"max_model_len must be 1 to config.max.*, 16384, got 99999"):
        decoder_for(_glm(), 99999)


@pytest.mark.parametrize("length", ["64", 64.0, None])
def test_a_length_that_is_no_int_is_refused(length):
    with pytest.raises(TypeError, match="decoder_for: max_model_len must be an integer, got"):
        decoder_for(_glm(), length)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager ops", "compiled"])
def test_captured_float32_tokens_equal_transformers_on_gpu(model, compiled):
    on_gpu = cast_parameters(model, torch.float32).cuda()
    torch._dynamo.reset()
    session = GenerationSession(
        decoder_for(on_gpu, 96),
        max_num_requests=2,
        cache_format="fp32",
        block_size=16,
        prefill_tokens=24,
        compiled=compiled,
    )
    if compiled:
        session.warm_up()
    expected = [
        stock_generate(on_gpu, [prompt], limit).tokens[0] for prompt, limit in zip(PROMPTS, LIMITS, strict=True)
    ]
    assert session.generate(PROMPTS, LIMITS).tokens == expected


@pytest.mark.gpu
def test_captured_bfloat16_tokens_over_fp8_equal_eager_ones_on_gpu(model):
    """Grouped experts among them."""
    decoder = decoder_for(cast_parameters(model, torch.bfloat16).cuda(), 96)
    options = {"max_num_requests": 2, "cache_format": "fp8_ds_mla", "block_size": 16, "prefill_tokens": 24}
    tokens = [
        GenerationSession(decoder, **options, cuda_graph=captured).generate(PROMPTS, LIMITS).tokens
        for captured in (False, True)
    ]
    assert tokens[0] == tokens[1]
