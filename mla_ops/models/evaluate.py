"""How close a run comes to another: logits over one text, and the stock transformers loop to compare with."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..sizes import check_sizes
from .decoder import Decoder
from .generate import GenerationResult
from .requests import check_tokens


@dataclass(frozen=True)
class Agreement:
    """How the predictions of a run compare with those of a reference, over the positions of a text.

    Attributes:
        top1: share of positions with the same most likely token.
        mean_kl, max_kl: KL divergence from the reference's distribution, in nats a token.
        relative_error: norm of the difference of all logits over the norm of the reference's.
    """

    top1: float
    mean_kl: float
    max_kl: float
    relative_error: float

    def __str__(self) -> str:
        return f"top-1 {self.top1:.1%}, KL {self.mean_kl:.1e} nats a token (max {self.max_kl:.1e})"


def compare_logits(reference: torch.Tensor, logits: torch.Tensor) -> Agreement:
    """Compares `[num_tokens, vocab_size]` logits with a reference's, in float32."""
    if reference.shape != logits.shape or reference.dim() != 2 or not reference.numel():
        raise ValueError(
            f"compare_logits: reference and logits must have one shape, [num_tokens, vocab_size], got "
            f"{list(reference.shape)} and {list(logits.shape)}"
        )
    reference, logits = reference.float(), logits.float()
    expected, actual = reference.log_softmax(-1), logits.log_softmax(-1)
    # rounding can leave a KL of zero slightly negative
    kl = (expected.exp() * (expected - actual)).sum(-1).clamp(min=0)
    return Agreement(
        top1=(reference.argmax(-1) == logits.argmax(-1)).float().mean().item(),
        mean_kl=kl.mean().item(),
        max_kl=kl.max().item(),
        relative_error=((logits - reference).norm() / reference.norm()).item(),
    )


@torch.no_grad()
def teacher_forced_logits(
    decoder: Decoder,
    token_ids: Sequence[int],
    cache_format: str,
    *,
    step_sizes: Sequence[int] = (),
    block_size: int = 64,
    seed: int = 0,
) -> torch.Tensor:
    """Logits of every position of a text, through the paged cache, eagerly.

    Args:
        decoder: the model.
        token_ids: the text, 1 to `decoder.max_model_len` tokens.
        cache_format: format of the latent cache.
        step_sizes: tokens of each step, in turn; the last repeats until the text ends. A size of 1 is a decode step. By
            default steps of 256.
        block_size: tokens a cache block.
        seed: order of the blocks.

    Returns:
        `[num_tokens, vocab_size]` in the model's dtype.

    Raises:
        TypeError: `token_ids` or `step_sizes` is no sequence of ints.
        ValueError: a text or step of another length, or an id out of the vocabulary.
    """
    op = "teacher_forced_logits"
    if not isinstance(decoder, Decoder):
        raise TypeError(
            f"{op}: decoder must be what decoder_for(model, max_model_len) gives, got {type(decoder).__name__}"
        )
    token_ids = check_tokens(f"{op}: token_ids", token_ids, decoder.vocabulary)
    if not 1 <= len(token_ids) <= decoder.max_model_len:
        raise ValueError(
            f"{op}: token_ids must have 1 to max_model_len, {decoder.max_model_len}, tokens, got {len(token_ids)}"
        )
    sizes = [size for given in step_sizes for size in check_sizes(op, 1, step_sizes=given)] or [256]
    (block_size,) = check_sizes(op, 1, block_size=block_size)
    metadata = decoder.allocate_metadata(max_num_tokens=max(sizes), max_num_requests=1, block_size=block_size)
    num_blocks = -(-decoder.max_model_len // block_size)
    cache = decoder.allocate_cache(cache_format, num_blocks, block_size)
    device = decoder.device

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    blocks = list(range(num_blocks))
    random.Random(seed).shuffle(blocks)
    tokens = torch.tensor(token_ids, device=device)
    logits: list[torch.Tensor] = []
    start = 0
    while start < len(token_ids):
        part = tokens[start : start + (sizes.pop(0) if len(sizes) > 1 else sizes[0])]
        end = start + part.shape[0]
        decoder.build_step(metadata, int32(0, part.shape[0]), int32(end), int32(*blocks).unsqueeze(0))
        bound = None if part.shape[0] == 1 else decoder.dense_context(start, part.shape[0])
        inputs = decoder.step_inputs(part, metadata, int32(0).unsqueeze(0), bound)
        with torch.autocast(device.type, enabled=False):  # it would change dtypes, which the caches fix
            logits.append(decoder(inputs, cache.layers, cache_format, cache.index_format, host_reads=True))
        start = end
    return torch.cat(logits)


@torch.no_grad()
def stock_logits(model: nn.Module, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits `[num_tokens, vocab_size]` of every position of a text, by transformers' own forward pass."""
    device = next(model.parameters()).device
    return model(torch.tensor([list(token_ids)], device=device), use_cache=False).logits[0]


@dataclass
class StockResult(GenerationResult):
    """A `GenerationResult` with the bytes that the transformers cache took.

    Attributes:
        cache_bytes_per_token: bytes of every tensor in the cache over the (padded) tokens it holds.
    """

    cache_bytes_per_token: float = 0.0


@torch.no_grad()
def stock_generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    eos_token_ids: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> StockResult:
    """Greedy generation by transformers alone: its forward pass, its dynamic cache, its left padding.

    The loop is that of `model.generate`, written out so that prefill and decode are timed apart.
    """
    device = next(model.parameters()).device
    longest = max(len(prompt) for prompt in prompts)
    input_ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor(
        [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], dtype=torch.long, device=device
    )
    ends = torch.tensor(list(eos_token_ids), dtype=torch.long, device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    produced: list[torch.Tensor] = []
    cache = None
    seconds = [0.0, 0.0]
    for step in range(max_new_tokens):
        _synchronize(device)
        began = time.perf_counter()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        output = model(
            input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        token = output.logits[:, -1].argmax(-1)
        produced.append(torch.where(done, -1, token))
        done = done | (token.unsqueeze(1) == ends).any(1)
        input_ids = token.unsqueeze(1)
        mask = torch.cat((mask, mask.new_ones(len(prompts), 1)), dim=1)
        _synchronize(device)
        seconds[min(step, 1)] += time.perf_counter() - began
        if progress is not None:
            progress((step + 1) * len(prompts), max_new_tokens * len(prompts))
        if bool(done.all()):
            break
    tokens = [[token for token in row if token >= 0] for row in torch.stack(produced, 1).tolist()]
    held = len(prompts) * (longest + len(produced) - 1)
    return StockResult(
        tokens,
        prefill_tokens=sum(len(prompt) for prompt in prompts),
        decode_tokens=sum(len(row) - 1 for row in tokens),
        prefill_seconds=seconds[0],
        decode_seconds=seconds[1],
        cache_bytes_per_token=_tensor_bytes(cache) / held,
    )


def cast_parameters(model: Any, dtype: torch.dtype) -> Any:
    """A copy of a model with its parameters in `dtype` and its buffers as they are.

    `model.to(dtype)` would round the RoPE frequencies and the router's correction bias too, which `from_pretrained`
    keeps in float32.
    """
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _tensor_bytes(cache: object) -> int:
    """Bytes of the tensors in a transformers cache, each once: V4's keys are its values, and dicts hold its entries."""
    tensors: dict[int, torch.Tensor] = {}
    values = [value for layer in getattr(cache, "layers", ()) for value in vars(layer).values()]
    while values:
        value = values.pop()
        if isinstance(value, torch.Tensor):
            tensors[id(value)] = value
        elif isinstance(value, dict):
            values += value.values()
    return sum(tensor.nbytes for tensor in tensors.values())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
