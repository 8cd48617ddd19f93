"""What the demo runs: a small model with fixed random weights over bytes, or a local checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..models.evaluate import cast_parameters

TEXT = Path(__file__).with_name("alice.txt")


def build_small_model(
    *,
    num_layers: int = 3,
    hidden_size: int = 512,
    num_heads: int = 16,
    index_heads: int = 16,
    index_topk: int = 256,
    vocab_size: int = 256,
    initializer_range: float = 0.04,
    rope_parameters: dict[str, Any] | None = None,
    seed: int = 0,
) -> Any:
    """A float32 transformers `DeepseekV32ForCausalLM` with the real attention geometry and fixed random weights.

    Latent 512, RoPE 64, head dims 128 and 128, the lightning indexer with 128-wide keys; the first layer is dense, the
    others mix 8 experts. Hidden size, depth and vocabulary are small.
    """
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    config = DeepseekV32Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        moe_intermediate_size=hidden_size // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        mlp_layer_types=["dense"] + ["sparse"] * (num_layers - 1),
        q_lora_rank=hidden_size // 2,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        index_n_heads=index_heads,
        index_head_dim=128,
        index_topk=index_topk,
        max_position_embeddings=16384,
        initializer_range=initializer_range,
        rope_parameters=rope_parameters,
        bos_token_id=None,
        eos_token_id=None,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = DeepseekV32ForCausalLM(config).eval()
    torch.random.set_rng_state(state)
    return model


class ByteTokenizer:
    """Bytes as tokens: the small model's vocabulary."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("ascii", errors="replace")


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer, in the dtype that the cache asks for, and a float32 twin where that is affordable."""

    model: Any
    reference: Any | None
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    description: str


# a float32 copy beside the model is made up to here
MAX_REFERENCE_PARAMETERS = 2_000_000_000


def load_model(path: str | None, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """The checkpoint at `path`, or the small model if that is None."""
    if path is None:
        model, tokenizer = cast_parameters(build_small_model(), dtype), ByteTokenizer()
        name = "small DeepSeek-V3.2, fixed random weights"
    else:
        from transformers import AutoTokenizer, DeepseekV32ForCausalLM

        if not Path(path).is_dir():
            raise FileNotFoundError(f"--model must be a local checkpoint folder, there is none at '{path}'")
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = DeepseekV32ForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()
        name = path
    model = model.to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    affordable = dtype != torch.float32 and parameters <= MAX_REFERENCE_PARAMETERS
    reference = cast_parameters(model, torch.float32) if affordable else None
    end = model.config.eos_token_id
    ends = () if end is None else (end,) if isinstance(end, int) else tuple(end)
    config = model.config
    description = (
        f"{name}: {parameters / 1e6:.0f} M parameters, {config.num_hidden_layers} layers, "
        f"{config.num_attention_heads} heads, top-{config.index_topk} keys a token"
    )
    return LoadedModel(model, reference, tokenizer, ends, description)
