"""Small models of every supported kind, with the real attention geometry and random weights, for `test_decoder.py`."""

from typing import Any

import torch
import transformers

from mla_ops.demo.model import build_small_model, build_small_v4_model

SIZES = {"num_layers": 4, "hidden_size": 128, "num_heads": 4, "index_topk": 32, "initializer_range": 0.08}
SMALL_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def build_hy_v4(**changes: Any) -> Any:
    """Streams, sinks and gates that say something; a shared indexer behind each of its own."""
    shared = {"indexer_types": ["full", "shared", "full", "shared"], "hc_mult": 2, "pad_token_id": None}
    model = _build("HYV4", {"qk_nope_head_dim": 192, "v_head_dim": 256, "index_head_dim": 128, **shared, **changes})
    _fill(model, ("sinks", "base", "hc_base"))
    return model


def build_kimi_k25(**changes: Any) -> Any:
    text = build_small_model("DeepseekV3", **{**SIZES, **changes}).config
    vision = {**SMALL_VISION, "merge_kernel_size": (2, 2)}
    return _seeded(
        lambda: transformers.Kimi_K25ForConditionalGeneration(
            transformers.Kimi_K25Config(
                text_config=text, vision_config=vision, projection_hidden_size=16, tie_word_embeddings=False
            )
        )
    )


def build_mistral_large4(**changes: Any) -> Any:
    """Every way of a layer: with and without RoPE, latents of its own and of another layer, indexers of both kinds."""
    config = {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 6,
        "mlp_layer_types": ["dense"] + ["sparse"] * 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "index_n_heads": 16,
        "index_topk": 32,
        "no_rope_layers": [1, 0, 1, 0, 1, 1],
        "kv_source_layers": [0, 1, 0, 1, 4, 0],
        "indexer_types": ["full", "full", "shared", "full", "shared", "full"],
        "max_position_embeddings": 4096,
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": None,
        **changes,
    }
    whole = transformers.MistralLarge4Config(text_config=config, vision_config={**SMALL_VISION, "head_dim": 8})
    model = _seeded(lambda: transformers.MistralLarge4ForConditionalGeneration(whole))
    _fill(model, ("softmax_scaling.scale",), std=0.1)
    return model


def _build(kind: str, changes: dict[str, Any]) -> Any:
    from mla_ops.demo import model as demo

    demo.EXTRA_CONFIG.setdefault(kind, {})
    return build_small_model(kind, **{**SIZES, **changes})


def _seeded(build: Any) -> Any:
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = build().eval()
    torch.random.set_rng_state(state)
    return model


@torch.no_grad()
def _fill(model: Any, names: tuple[str, ...], std: float = 0.5) -> None:
    """A new model's constant weights would show nothing."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(names):
            parameter.add_(std * torch.randn(parameter.shape, generator=generator))


_ALL = {
    "DeepSeek-V3": lambda **changes: build_small_model("DeepseekV3", **{**SIZES, **changes}),
    "Kimi K2.5": build_kimi_k25,
    "DeepSeek-V3.2": lambda **changes: build_small_model(**{**SIZES, **changes}),
    "GLM-5": lambda **changes: build_small_model("GlmMoeDsa", **{**SIZES, **changes}),
    "GLM-5 with shared indexers": lambda **changes: build_small_model(
        "GlmMoeDsa", **{**SIZES, "indexer_types": ["full", "shared", "shared", "full"], **changes}
    ),
    "HY-V4": build_hy_v4,
    "Mistral Large 4": build_mistral_large4,
    "DeepSeek-V4": build_small_v4_model,
}

# each needs its class in transformers
NEEDS = {
    "Kimi K2.5": "Kimi_K25ForConditionalGeneration",
    "HY-V4": "HYV4ForCausalLM",
    "Mistral Large 4": "MistralLarge4ForConditionalGeneration",
}
SMALL_MODELS = {name: build for name, build in _ALL.items() if name not in NEEDS or hasattr(transformers, NEEDS[name])}
