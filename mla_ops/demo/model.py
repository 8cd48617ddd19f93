"""The demo's models by architecture: a small one with fixed random weights over bytes, or a local checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..dispatch import Call
from ..models import GenerationSession
from ..models.evaluate import cast_parameters
from ..models.requests import end_tokens
from ..models.windowed import C4A, C128A, SLIDING

TEXT = Path(__file__).with_name("alice.txt")


# fields of each class's config beside the common part of `build_small_model`
EXTRA_CONFIG: dict[str, dict[str, Any]] = {
    "DeepseekV3": {},
    "DeepseekV32": {"index_head_dim": 128},
    "GlmMoeDsa": {"index_head_dim": 128, "qk_nope_head_dim": 192, "v_head_dim": 256},
}


def build_small_model(
    kind: str = "DeepseekV32",
    *,
    num_layers: int = 2,
    hidden_size: int = 512,
    num_heads: int = 16,
    index_heads: int = 16,
    index_topk: int = 256,
    vocab_size: int = 256,
    initializer_range: float = 0.04,
    seed: int = 0,
    **changes: Any,
) -> Any:
    """A float32 transformers model with the real attention geometry and fixed random weights.

    Latent 512, RoPE 64, the head dims of the model, the lightning indexer with 128-wide keys where it has one; the
    first layer is dense, the others mix 8 experts. Hidden size, depth and vocabulary are small.

    Args:
        kind: the classes' common name, such as `GlmMoeDsa`.
        num_layers, hidden_size, num_heads, index_heads, index_topk, vocab_size, initializer_range: sizes.
        seed: of the weights.
        changes: any other entry of the config.
    """
    import transformers

    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "moe_intermediate_size": hidden_size // 4,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": hidden_size // 2,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "max_position_embeddings": SMALL_MODEL_LENGTH,
        "initializer_range": initializer_range,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind != "DeepseekV3":
        common |= {
            "mlp_layer_types": ["dense"] + ["sparse"] * (num_layers - 1),
            "index_n_heads": index_heads,
            "index_topk": index_topk,
        }
    config = getattr(transformers, f"{kind}Config")(**{**common, **EXTRA_CONFIG[kind], **changes})
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    torch.random.set_rng_state(state)
    return model


def build_small_v4_model(
    *,
    layer_types: tuple[str, ...] = (SLIDING, C4A, C128A),
    hidden_size: int = 512,
    num_heads: int = 16,
    index_topk: int = 64,
    vocab_size: int = 256,
    initializer_range: float = 0.04,
    seed: int = 0,
) -> Any:
    """A float32 transformers `DeepseekV4ForCausalLM` with the real attention geometry and fixed random weights.

    Keys of 512, a window of 128, groups of 4 and 128 tokens, the indexer with 128-wide keys; the first layer routes its
    tokens by a table, the others by score. Hidden size, depth and vocabulary are small.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    num_experts, experts_per_token = 8, 2
    config = DeepseekV4Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        moe_intermediate_size=hidden_size // 4,
        num_hidden_layers=len(layer_types),
        layer_types=list(layer_types),
        mlp_layer_types=["hash_moe"] + ["moe"] * (len(layer_types) - 1),
        num_attention_heads=num_heads,
        n_routed_experts=num_experts,
        num_experts_per_tok=experts_per_token,
        head_dim=512,
        sliding_window=128,
        q_lora_rank=hidden_size // 2,
        o_groups=2,
        o_lora_rank=hidden_size // 2,
        # enough that no two entries tie at zero, where every head is cut off
        index_n_heads=24,
        index_head_dim=128,
        index_topk=index_topk,
        max_position_embeddings=SMALL_MODEL_LENGTH,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=None,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        # a new model has these as zeros, which hides what reads them
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "position_bias", "base")):
                parameter.normal_(std=0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(vocab_size, num_experts, dtype=torch.float32).argsort(1)[:, :experts_per_token])
            elif name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    torch.random.set_rng_state(state)
    return model


def _calls_latent(session: GenerationSession, num_tokens: int) -> list[Call]:
    decoder, cache = session.decoder, session.cache
    device, dtype = decoder.device, decoder.dtype
    capacity = session.max_blocks_per_request * cache.block_size
    heads, indexed = decoder.num_heads, decoder.attention.has_indexer
    # a prefill runs over expanded keys; with an indexer, one of no more tokens than it chooses
    context = min(decoder.index_topk, capacity) if indexed else capacity
    widths = decoder.config.qk_nope_head_dim + decoder.config.qk_rope_head_dim, decoder.config.v_head_dim
    call = Call("", device, dtype, cache.cache_format, num_heads=heads, num_tokens=num_tokens)
    prefill = call._replace(cache_format="", head_dim=widths[0], head_dim_v=widths[1])
    calls = [
        Call("build_step_metadata", device, torch.int32, num_tokens=num_tokens),
        Call("concat_and_cache", device, dtype, cache.cache_format, num_tokens=num_tokens),
        Call("gather_cache", device, dtype, cache.cache_format, num_tokens=context),
        prefill._replace(op="prefill_attention"),
        Call("merge_attention_states", device, dtype, head_dim=widths[1], num_heads=heads, num_tokens=num_tokens),
    ]
    latent = call._replace(head_dim=decoder.head_dim)
    if decoder.ranks.dcp_group is not None:
        calls = [*calls[:2], latent._replace(op="merge_attention_states.stacked", head_dim=512)]
    if not indexed:
        return [*calls, latent._replace(op="paged_attention", topk=capacity, block_size=cache.block_size)]
    return [
        *calls,
        Call("write_index_cache", device, dtype, cache.index_format, num_tokens=num_tokens),
        *_selection(session, num_tokens, capacity),
        latent._replace(op="paged_sparse_attention", topk=decoder.index_topk),
    ]


def _selection(session: GenerationSession, num_tokens: int, capacity: int) -> list[Call]:
    """Inputs of the indexer's ops: queries are quantised beside fp8 keys."""
    decoder, index_format = session.decoder, session.cache.index_format
    heads = int(decoder.config.index_n_heads)
    choose = Call("select_keys", decoder.device, decoder.dtype, index_format, num_heads=heads, num_tokens=num_tokens)
    choose = choose._replace(topk=decoder.index_topk, num_keys=capacity, block_size=session.cache.block_size)
    calls = []
    if index_format == "fp8_index":
        quantize = Call("quantize_index_query", decoder.device, decoder.dtype, num_heads=heads, num_tokens=num_tokens)
        calls, choose = [quantize], choose._replace(dtype=torch.float8_e4m3fn)
    if decoder.ranks.dcp_group is None:
        return [*calls, choose]
    # each rank's candidates, and the merge of all
    part = choose._replace(num_keys=capacity // decoder.ranks.dcp_size)
    best = Call("topk_indices", decoder.device, torch.float32, num_tokens=num_tokens, topk=decoder.index_topk)
    all_best = best._replace(op="merge_topk", num_keys=decoder.index_topk * decoder.ranks.dcp_size)
    return [*calls, part._replace(op="paged_indexer_logits"), best._replace(num_keys=part.num_keys), all_best]


def _calls_v4(session: GenerationSession, num_tokens: int) -> list[Call]:
    decoder, cache = session.decoder, session.cache
    metadata: Any = session.metadata
    device, dtype, cache_format = decoder.device, decoder.dtype, cache.cache_format
    window, entries = metadata.window_indices.shape[1], metadata.c128a_indices.shape[1]
    capacity = metadata.c4a.block_table.shape[1] * metadata.c4a.block_size

    def build(op: str, width: int = 0) -> Call:
        return Call(op, device, torch.int32, num_tokens=num_tokens, topk=width)

    def compress(cache_format: str, head_dim: int) -> Call:
        return Call("compress_and_cache", device, dtype, cache_format, head_dim, num_tokens=num_tokens)

    attend = Call(
        "paged_sparse_attention", device, dtype, cache_format, decoder.head_dim, decoder.num_heads, num_tokens, window
    )
    with_entries = attend._replace(op="paged_sparse_attention.extra", extra_cache_format=cache_format)
    return [
        build("build_step_metadata"),
        build("build_compressed_metadata"),
        build("sliding_window_indices", window),
        build("compressed_indices", entries),
        Call("concat_and_cache", device, dtype, cache_format, num_tokens=num_tokens),
        compress(cache_format, decoder.head_dim),
        compress(cache.index_format, int(decoder.config.index_head_dim)),
        *_selection(session, num_tokens, capacity),
        attend,
        *(with_entries._replace(extra_topk=width) for width in (decoder.index_topk, entries)),
    ]


@dataclass(frozen=True)
class Architecture:
    """Facts of a kind of model that the demo needs. Defaults are those of models of latents with an indexer.

    Attributes:
        title: its name, for people.
        model_type: its name in a checkpoint's `config.json`.
        model_class: its name in transformers.
        build: the small model; None for one that runs from a checkpoint alone.
        selects: what the indexer chooses for a token; None where every token reads all keys.
        cache_formats: quantized and plain ones; the first is the default.
        block_size: tokens a cache block.
        prompt_lengths: bytes of the default prompts, in turn. Unequal on purpose where transformers can pad them.
        pads: whether transformers may pad requests to one length. It groups V4's tokens from the start of the row,
            padding included, so that a padded request gives other results than the same request alone.
        cache_parts: what each tensor of a layer's cache holds, with `{cache}` and `{index}` for the formats.
        request_parts: the same, of tensors that have a row for each request and not for each token.
        calls: what dispatch is asked in a step of so many tokens.
    """

    title: str
    model_type: str
    model_class: str
    build: Callable[[], Any] | None
    selects: str | None = "keys"
    cache_formats: tuple[str, ...] = ("fp8_ds_mla", "bf16", "fp32")
    block_size: int = 64
    prompt_lengths: tuple[int, ...] = (384, 151, 289, 97)
    pads: bool = True
    cache_parts: dict[str, str] = field(
        default_factory=lambda: {"latent": "{cache} latent", "index_keys": "{index} index keys"}
    )
    request_parts: dict[str, str] = field(default_factory=dict)
    calls: Callable[[GenerationSession, int], list[Call]] = _calls_latent


ARCHITECTURES = {
    "v3": Architecture(
        title="DeepSeek-V3",
        model_type="deepseek_v3",
        model_class="DeepseekV3ForCausalLM",
        build=partial(build_small_model, "DeepseekV3"),
        selects=None,
        cache_parts={"latent": "{cache} latent"},
    ),
    "v3.2": Architecture("DeepSeek-V3.2", "deepseek_v32", "DeepseekV32ForCausalLM", build_small_model),
    "glm5": Architecture(
        title="GLM-5",
        model_type="glm_moe_dsa",
        model_class="GlmMoeDsaForCausalLM",
        build=partial(build_small_model, "GlmMoeDsa", indexer_types=["full", "shared"]),
    ),
    "v4": Architecture(
        title="DeepSeek-V4",
        model_type="deepseek_v4",
        model_class="DeepseekV4ForCausalLM",
        build=build_small_v4_model,
        selects="entries",
        cache_formats=("fp8_ds_mla_v4", "bf16", "fp32"),
        block_size=256,
        prompt_lengths=(601,),
        pads=False,
        cache_parts={
            "window": "{cache} keys",
            "compressed": "{cache} compressed entries",
            "index_keys": "{index} index keys",
        },
        request_parts={"states": "compressor states", "index_states": "compressor states"},
        calls=_calls_v4,
    ),
}


# those that have no small model here, by their model_type
CHECKPOINTS = {
    "kimi_k2": replace(ARCHITECTURES["v3"], title="Kimi K2", model_type="kimi_k2", build=None),
    "kimi_k25": replace(
        ARCHITECTURES["v3"],
        title="Kimi K2.5",
        model_type="kimi_k25",
        model_class="Kimi_K25ForConditionalGeneration",
        build=None,
    ),
    "hy_v4": replace(
        ARCHITECTURES["glm5"], title="HY-V4", model_type="hy_v4", model_class="HYV4ForCausalLM", build=None
    ),
    "mistral_large4": replace(
        ARCHITECTURES["glm5"],
        title="Mistral Large 4",
        model_type="mistral_large4",
        model_class="MistralLarge4ForConditionalGeneration",
        build=None,
    ),
}


CHECKPOINT_FILES = {
    "config": ("config.json",),
    "weights": ("*.safetensors", "*.bin"),
    "tokenizer": ("tokenizer*", "tekken.json"),
}


def find_architecture(name: str, path: str | None) -> Architecture:
    """The architecture of the checkpoint at `path`, or the one called `name` if that is None.

    Raises:
        FileNotFoundError: there is no checkpoint, or a part of one.
        ValueError: it is of another architecture, or quantized; or there is none of that name.
    """
    if path is None:
        if name not in ARCHITECTURES:
            raise ValueError(f"--arch must be one of {sorted(ARCHITECTURES)}, got '{name}'")
        return ARCHITECTURES[name]
    if not Path(path).is_dir():
        raise FileNotFoundError(f"--model must be a local checkpoint folder, there is none at '{path}'")
    for what, patterns in CHECKPOINT_FILES.items():
        if not any(any(Path(path).glob(pattern)) for pattern in patterns):
            raise FileNotFoundError(
                f"--model must be a checkpoint folder, that at '{path}' has no {what}: no {' or '.join(patterns)}"
            )
    try:
        config = json.loads((Path(path) / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"--model must be a checkpoint folder, config.json at '{path}' is no JSON: {error}") from error
    found = config.get("model_type")
    known = {one.model_type: one for one in (*ARCHITECTURES.values(), *CHECKPOINTS.values())}
    if found not in known:
        raise ValueError(f"--model must be a checkpoint of one of {sorted(known)}, that at '{path}' is of '{found}'")
    if "quantization_config" in {**config, **config.get("text_config", {})}:
        raise ValueError(
            f"--model must be a checkpoint in float32, bfloat16 or float16, that at '{path}' is quantized: load it "
            "with from_pretrained(..., quantization_config=transformers.FineGrainedFP8Config(dequantize=True), "
            "dtype=torch.bfloat16), and save that with save_pretrained"
        )
    import transformers

    if not hasattr(transformers, known[found].model_class):
        raise ValueError(
            f"--model at '{path}' needs {known[found].model_class}, which transformers {transformers.__version__} does "
            "not have: pip install --upgrade transformers"
        )
    return known[found]


class ByteTokenizer:
    """Bytes as tokens: the small model's vocabulary."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("ascii", errors="replace")


@dataclass(frozen=True)
class LoadedModel:
    """A model in the dtype that the cache asks for, and a float32 twin where that is affordable."""

    model: Any
    reference: Any | None
    eos_token_ids: tuple[int, ...]
    description: str


# a float32 copy beside the model is made up to here
MAX_REFERENCE_PARAMETERS = 2_000_000_000
SMALL_MODEL_LENGTH = 16384


def load_tokenizer(path: str | None) -> tuple[Any, int]:
    """The tokenizer of the checkpoint at `path`, or bytes, and the longest request of the model; no weights."""
    if path is None:
        return ByteTokenizer(), SMALL_MODEL_LENGTH
    import transformers

    config = json.loads((Path(path) / "config.json").read_text())
    longest = config.get("text_config", config).get("max_position_embeddings")
    if longest is None:  # the class's default
        longest = transformers.AutoConfig.from_pretrained(path).get_text_config().max_position_embeddings
    return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True), longest


def load_model(architecture: Architecture, path: str | None, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """The checkpoint at `path`, or the architecture's small model if that is None."""
    if path is None:
        assert architecture.build is not None
        model = cast_parameters(architecture.build(), dtype)
        name = f"small {architecture.title}, fixed random weights"
    else:
        import transformers

        model_class = getattr(transformers, architecture.model_class)
        model = model_class.from_pretrained(path, dtype=dtype, local_files_only=True).eval()
        name = path
    model = model.to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    affordable = dtype != torch.float32 and parameters <= MAX_REFERENCE_PARAMETERS
    reference = cast_parameters(model, torch.float32) if affordable else None
    config = model.config.get_text_config()
    selects = "all keys" if architecture.selects is None else f"top-{config.index_topk} {architecture.selects}"
    description = (
        f"{name}: {parameters / 1e6:.0f} M parameters, {config.num_hidden_layers} layers, "
        f"{config.num_attention_heads} heads, {selects} a token"
    )
    return LoadedModel(model, reference, end_tokens(model), description)
