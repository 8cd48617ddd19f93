"""Which transformers models the decoder runs, what their layers are made of, and why a model is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from ..formats import INDEX_DIM, LATENT_DIM, PLAIN_FORMATS, ROPE_DIM
from ..ops._checks import MAX_NUM_HEADS
from .latent import OWN, SHARED, LatentLayer
from .parts import Rope

NEIGHBOURS, HALVES = Rope("neighbours"), Rope("halves")


def _dense_layers(config: Any) -> list[LatentLayer]:
    rope = NEIGHBOURS if config.rope_interleave else HALVES
    return [LatentLayer(rope, None, None, number) for number in range(config.num_hidden_layers)]


def _indexed_layers(rope: Rope, index_rope: Rope) -> Callable[[Any], list[LatentLayer]]:
    """The layers of a model whose indexers all turn alike; `config.indexer_types` says which ones share."""

    def layers(config: Any) -> list[LatentLayer]:
        types = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
        return [
            LatentLayer(rope, SHARED if kind == "shared" else OWN, index_rope, number)
            for number, kind in enumerate(types)
        ]

    return layers


def _mistral_layers(config: Any) -> list[LatentLayer]:
    layers, stored = [], {}
    for number, (kind, rope, source) in enumerate(
        zip(config.indexer_types, config.no_rope_layers, config.kv_source_layers, strict=False)
    ):
        if source == number:
            if number in config.kv_source_layers[number + 1 :]:
                stored[bool(rope)] = number
        elif stored.get(bool(rope)) != source:
            raise ValueError(
                f"config.kv_source_layers[{number}] is {source}, but transformers reads the latents of layer "
                f"{stored.get(bool(rope))} there, the last one stored {'with' if rope else 'without'} RoPE"
            )
        turn = NEIGHBOURS if rope else None
        layers.append(LatentLayer(turn, SHARED if kind == "shared" else OWN, turn, source))
    return layers


LATENT_SIZES = {"kv_lora_rank": LATENT_DIM, "qk_rope_head_dim": ROPE_DIM}
INDEXED_SIZES = {**LATENT_SIZES, "index_head_dim": INDEX_DIM}
WINDOWED_SIZES = {"head_dim": 512, "qk_rope_head_dim": ROPE_DIM, "index_head_dim": INDEX_DIM}


@dataclass(frozen=True)
class ModelType:
    """Facts of a model type that the decoder needs.

    Attributes:
        model_class: the class in transformers that has the language model's head.
        sizes: what `config` must have, the widths of the cache formats.
        layers: the parts of each layer; None for the windows and compressed caches of DeepSeek-V4.
    """

    model_class: str
    sizes: dict[str, int]
    layers: Callable[[Any], list[LatentLayer]] | None


# keys are the model_type of the text model's config
MODEL_TYPES = {
    "deepseek_v3": ModelType("DeepseekV3ForCausalLM", LATENT_SIZES, _dense_layers),
    "deepseek_v32": ModelType("DeepseekV32ForCausalLM", INDEXED_SIZES, _indexed_layers(NEIGHBOURS, HALVES)),
    "deepseek_v4": ModelType("DeepseekV4ForCausalLM", WINDOWED_SIZES, None),
    "glm_moe_dsa": ModelType("GlmMoeDsaForCausalLM", INDEXED_SIZES, _indexed_layers(NEIGHBOURS, NEIGHBOURS)),
    "hy_v4": ModelType("HYV4ForCausalLM", INDEXED_SIZES, _indexed_layers(HALVES, Rope("halves", "last"))),
    "mistral_large4_text": ModelType("MistralLarge4ForConditionalGeneration", INDEXED_SIZES, _mistral_layers),
}
# models with more than text, by the model_type of their text model; images are not read
WRAPPERS = {"kimi_k25": "deepseek_v3", "mistral_large4": "mistral_large4_text"}
WRAPPER_CLASSES = {"kimi_k25": "Kimi_K25ForConditionalGeneration"}
# checkpoints of another name that a class of transformers loads as it is
ALIASES = {"kimi_k2": "deepseek_v3"}
SUPPORTED = sorted({*MODEL_TYPES, *WRAPPERS, *ALIASES} - {"mistral_large4_text"})


@dataclass(frozen=True)
class TextModel:
    """The parts of a transformers model that the decoder calls.

    Attributes:
        model_type: its entry in `MODEL_TYPES`.
        config: of the text model.
        backbone: embedding, layers, norm and rotary embedding.
        lm_head: the head.
        softcap: the logits' bound where a model has one.
    """

    model_type: ModelType
    config: Any
    backbone: Any
    lm_head: Any
    softcap: float | None


def read_model(model: Any, max_model_len: int) -> TextModel:
    """Finds the text model's parts.

    Raises:
        TypeError: not a transformers model, one of a model type that is not supported, or one without a head.
        ValueError: a geometry without a cache format, a RoPE type that depends on the sequence length, weights that are
            quantized, spread over devices, not loaded, or under an adapter in `kv_b_proj` or experts; forward hooks
            where nobody would call them.
    """
    if isinstance(model, (str, PathLike)):
        raise TypeError(
            f"decoder_for: model must be a loaded transformers model, got the path '{model}': load it first, "
            "transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)"
        )
    config: Any = getattr(model, "config", None)
    found = getattr(config, "model_type", None)
    if found is None:
        raise TypeError(f"decoder_for: model must be a loaded transformers model, got {type(model).__name__}")
    inner = ALIASES.get(found, found)
    if found in WRAPPERS:
        config, inner = config.text_config, WRAPPERS[found]
        if ALIASES.get(config.model_type, config.model_type) != inner:
            raise TypeError(
                f"decoder_for: the text model of a '{found}' must be of model_type '{inner}', got '{config.model_type}'"
            )
    model_type = MODEL_TYPES.get(inner) if found in SUPPORTED else None
    if model_type is None:
        raise TypeError(
            f"decoder_for: model must be of a model_type in {SUPPORTED}, got {type(model).__name__} of model_type "
            f"'{found}'; another type's weights may fit and still give wrong tokens"
        )
    model_class = WRAPPER_CLASSES.get(found, model_type.model_class)
    if not hasattr(model, "lm_head"):
        raise TypeError(
            f"decoder_for: model must have a language model's head, {type(model).__name__} has none: load the "
            f"checkpoint as transformers.{model_class}"
        )
    if not any(c.__name__ == model_class and c.__module__.startswith("transformers.") for c in type(model).__mro__):
        how = "load the checkpoint by that class, without trust_remote_code"
        if type(model).__module__.startswith("peft."):
            how = "pass its get_base_model(), in which adapters of layers are called"
        raise TypeError(
            f"decoder_for: a model of model_type '{found}' must be a transformers.{model_class}, got "
            f"{type(model).__module__}.{type(model).__name__}: {how}"
        )
    backbone = model.model.language_model if found in WRAPPERS else model.model
    _check_config(config, model_type, max_model_len)
    _check_weights({"": backbone, "lm_head.": model.lm_head})
    _check_adapters(backbone)
    check_hooks(model, backbone)
    softcap = getattr(config, "final_logit_softcapping", None) if inner == "mistral_large4_text" else None
    return TextModel(model_type, config, backbone, model.lm_head, softcap)


def _check_config(config: Any, model_type: ModelType, max_model_len: int) -> None:
    for name, value in model_type.sizes.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"decoder_for: config.{name} must be {value}, the width that the cache formats have, "
                f"got {getattr(config, name)}"
            )
    if not 1 <= config.num_attention_heads <= MAX_NUM_HEADS:
        raise ValueError(
            f"decoder_for: config.num_attention_heads must be 1 to {MAX_NUM_HEADS}, got {config.num_attention_heads}"
        )
    rope = config.rope_parameters or {}
    for parameters in rope.values() if model_type.layers is None else (rope,):
        rope_type = parameters.get("rope_type", "default") if isinstance(parameters, dict) else "default"
        if rope_type in ("dynamic", "longrope"):
            raise ValueError(
                f"decoder_for: RoPE type '{rope_type}' changes with the sequence length, which a table of angles "
                "cannot hold: 'default', 'linear', 'yarn' and 'llama3' do not"
            )
    if not 1 <= max_model_len <= config.max_position_embeddings:
        raise ValueError(
            f"decoder_for: max_model_len must be 1 to config.max_position_embeddings, "
            f"{config.max_position_embeddings}, got {max_model_len}"
        )


def _check_weights(modules: dict[str, Any]) -> None:
    """Raises ValueError for weights that cannot be multiplied as they are, where they are; modules by their prefix."""
    devices: dict[str, str] = {}
    named = ((prefix + name, weight) for prefix, part in modules.items() for name, weight in part.named_parameters())
    for name, parameter in named:
        if parameter.dtype not in PLAIN_FORMATS:
            how = "load the checkpoint with dtype=torch.bfloat16"
            if parameter.element_size() == 1:
                how = (
                    "load an fp8 checkpoint with from_pretrained(..., quantization_config="
                    "transformers.FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16), another quantized "
                    "one without its quantization"
                )
            raise ValueError(
                f"decoder_for: the weights must be float32, bfloat16 or float16, {name} is "
                f"{str(parameter.dtype).removeprefix('torch.')}: {how}"
            )
        devices.setdefault(str(parameter.device), name)
    if "meta" in devices:
        raise ValueError(f"decoder_for: the weights must be loaded, {devices['meta']} is on the meta device")
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(
            f"decoder_for: all weights must be on one device, got {places}: load without device_map='auto', "
            "which spreads or offloads them"
        )


def _check_adapters(backbone: Any) -> None:
    """Raises ValueError for adapters (peft's layers have a `base_layer`) of modules whose weights are read, not called.

    And for a quantized `kv_b_proj` whose weight is a tensor of a kind of its own, as torchao makes them. Elsewhere a
    module is called as it is, its adapter or its kind of weight with it.
    """
    for name, module in backbone.named_modules():
        kind = type(getattr(module, "weight", None)) if name.endswith("kv_b_proj") else None
        if kind not in (None, torch.nn.Parameter, torch.Tensor) and not kind.__module__.startswith("torch.distributed"):
            raise ValueError(
                f"decoder_for: {name}.weight must be a plain tensor, which attention takes in parts, got "
                f"{kind.__name__}: leave kv_b_proj out, as torchao's quantize_ does by its filter_fn"
            )
        if name.rpartition(".")[2] in ("kv_b_proj", "experts") and hasattr(module, "base_layer"):
            raise ValueError(
                f"decoder_for: {name} has an adapter, {type(module).__name__}, which would be left out, since its "
                "weight is read as it is: merge adapters into the weights first, as peft's merge_and_unload does"
            )


# modules whose parts are called, or whose weights are read, where transformers calls them
_NOT_CALLED = {"self_attn", "kv_b_proj", "indexer", "scorer", "compressor", "experts"}
_HOOKS_THAT_CHANGE_NOTHING = ("torch.", "transformers.", "accelerate.")


def check_hooks(model: Any, backbone: Any) -> None:
    """Raises ValueError for hooks that nobody would call, unless they are torch's or transformers' own.

    Norms, projections, routers, dense MLPs, embedding and head are called, their hooks with them.
    """
    named = [("the model", model), ("model.model", model.model), ("its backbone", backbone)]
    for name, module in backbone.layers.named_modules():
        last = name.rpartition(".")[2]
        if last.isdigit() or last in _NOT_CALLED or hasattr(module, "experts") or name.endswith("compressor.kv_norm"):
            named.append((f"layers.{name}", module))
    for name, module in named:
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            origin = getattr(getattr(hook, "func", hook), "__module__", None) or ""
            if not origin.startswith(_HOOKS_THAT_CHANGE_NOTHING):
                raise ValueError(
                    f"decoder_for: {name} has a forward hook, {getattr(hook, '__qualname__', hook)}, which would not "
                    "be called: remove it, or hook a module that is, such as a norm, a projection or embed_tokens"
                )


def dtype_and_device(backbone: Any) -> tuple[torch.dtype, torch.device]:
    """Those of the embedding, which the caches follow."""
    weight = backbone.embed_tokens.weight
    return weight.dtype, weight.device
