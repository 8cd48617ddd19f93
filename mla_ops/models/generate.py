"""Greedy generation over paged caches: chunked prefill, then decode steps that never look at the host.

    session = GenerationSession(decoder, max_num_requests=4, cache_format="fp8_ds_mla")
    result = session.generate(prompts, max_new_tokens=64)

A decode step is a function of device buffers alone: it builds the step's metadata, runs the model, chooses the next
tokens, appends them, and retires the requests that are done. So the same code runs eagerly, compiled, and captured in a
CUDA graph, where a step is one replay. A request that is done has no query tokens in later steps: it becomes padding,
and the tokens of the others move up.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..warm_up import warmup
from .deepseek_v3 import DeepseekV3Decoder
from .deepseek_v4 import DeepseekV4Decoder, V4StepInputs
from .deepseek_v32 import DeepseekV32Decoder, StepInputs

# float32 index scores that one prefill step may hold: num_tokens * index heads * capacity
MAX_SCORE_BYTES = 2**30


@dataclass
class GenerationResult:
    """What `GenerationSession.generate` gives back.

    Attributes:
        tokens: the continuation of each prompt, in the order of the prompts, the end token included.
        prefill_tokens, decode_tokens: tokens that each phase took in; every decoded token counts once.
        prefill_seconds, decode_seconds: wall time of each phase, without set-up.
    """

    tokens: list[list[int]]
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefill_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / max(self.decode_seconds, 1e-9)


@dataclass
class _Slot:
    """One row of the decode batch, on the host."""

    prompt: int = -1
    blocks: list[int] = field(default_factory=list)

    @property
    def free(self) -> bool:
        return self.prompt < 0


class GenerationSession:
    """Caches, metadata and decode state for a batch of requests.

    Args:
        decoder: the model.
        max_num_requests: rows of the decode batch. More prompts than that wait for a row to become free.
        cache_format: `fp8_ds_mla` (V4: `fp8_ds_mla_v4`), or the plain format of the model's dtype.
        block_size: tokens a cache block; a multiple of 128 for V4.
        num_blocks: blocks of the cache; by default enough for every row at `decoder.max_model_len`.
        prefill_tokens: tokens of a prefill step; longer prompts take several. Lowered where index scores ask for it.
        eos_token_ids: a request is done when it produces one of these.
        compiled: compile the model with `fullgraph=True`.
        backend: what `torch.compile` compiles with.
        cuda_graph: capture the decode step in a CUDA graph; None captures on CUDA devices.
        seed: blocks are handed out in an order drawn from this, so that neighbouring tokens lie in unrelated blocks.
    """

    def __init__(
        self,
        decoder: DeepseekV3Decoder | DeepseekV32Decoder | DeepseekV4Decoder,
        *,
        max_num_requests: int,
        cache_format: str,
        block_size: int = 64,
        num_blocks: int | None = None,
        prefill_tokens: int = 512,
        eos_token_ids: Sequence[int] = (),
        compiled: bool = False,
        backend: str | Callable[..., Any] = "inductor",
        cuda_graph: bool | None = None,
        seed: int = 0,
    ) -> None:
        device = decoder.device
        # the decoders have the same methods, over metadata and inputs of their own
        self.decoder: Any = decoder
        if cuda_graph and device.type != "cuda":
            raise ValueError(f"cuda_graph=True needs a model on a CUDA device, this one is on {device}")
        self.cuda_graph = device.type == "cuda" if cuda_graph is None else cuda_graph
        self.max_blocks_per_request = math.ceil(decoder.max_model_len / block_size)
        if num_blocks is None:
            num_blocks = max_num_requests * self.max_blocks_per_request
        self.cache: Any = self.decoder.allocate_cache(cache_format, num_blocks, block_size, max_num_requests)
        self.free_blocks = list(range(num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.slots = [_Slot() for _ in range(max_num_requests)]

        capacity = self.max_blocks_per_request * block_size
        index_heads = getattr(decoder.config, "index_n_heads", 0)
        affordable = MAX_SCORE_BYTES // (4 * index_heads * capacity) if index_heads else prefill_tokens
        self.prefill_tokens = max(2, min(prefill_tokens, affordable, decoder.max_model_len))
        self.prefill_metadata = self.decoder.allocate_metadata(
            max_num_tokens=self.prefill_tokens, max_num_requests=1, block_size=block_size
        )
        self.metadata = self.decoder.allocate_metadata(
            max_num_tokens=max_num_requests, max_num_requests=max_num_requests, block_size=block_size
        )
        self.model = torch.compile(decoder, fullgraph=True, dynamic=False, backend=backend) if compiled else decoder
        self.compiled = compiled

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # decode state; a captured step reads and advances these
        self.active = zeros(max_num_requests, dtype=torch.bool)
        self.last_token = zeros(max_num_requests)
        self.seq_lens = zeros(max_num_requests, dtype=torch.int32)  # tokens in the cache
        self.num_generated = zeros(max_num_requests)
        self.max_new_tokens = zeros(max_num_requests)
        self.output = zeros(max_num_requests, decoder.max_model_len)
        self.block_table = zeros(max_num_requests, self.max_blocks_per_request, dtype=torch.int32)
        self.rows = torch.arange(max_num_requests, dtype=torch.int32, device=device).unsqueeze(1)
        self.query_start_loc = zeros(max_num_requests + 1, dtype=torch.int32)
        self.input_ids = zeros(max_num_requests)
        self.eos_token_ids = torch.tensor(list(eos_token_ids), dtype=torch.int64, device=device)
        self.logits: torch.Tensor | None = None
        self.num_steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def _run_model(
        self, inputs: StepInputs | V4StepInputs, one_token_per_request: bool, logit_rows: torch.Tensor | None
    ) -> torch.Tensor:
        cache = self.cache
        return self.model(
            inputs, cache.layers, cache.cache_format, cache.index_format, one_token_per_request, logit_rows
        )

    @torch.no_grad()
    def prefill_chunk(self, row: int, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """Runs some tokens of one request and returns the logits of the last, `[1, vocab_size]`.

        Args:
            row: the request's row of the decode batch; its blocks are in `block_table`.
            token_ids: at most `prefill_tokens` of them, at least one.
            start: position of the first.
        """
        device, count = self.decoder.device, len(token_ids)
        # a step of one token is padded to two rows, see StepInputs.mark_num_tokens_dynamic
        padded = list(token_ids) + [0] * (2 - count)
        loc = torch.tensor([0, count], dtype=torch.int32, device=device)
        seq_len = torch.tensor([start + count], dtype=torch.int32, device=device)
        self.decoder.build_step(self.prefill_metadata, loc, seq_len, self.block_table[row : row + 1])
        input_ids = torch.tensor(padded, device=device)
        bound = self.decoder.dense_context(start, count, any_length=self.compiled)
        dense = {} if bound is None else {"max_context_tokens": bound}
        inputs = self.decoder.step_inputs(input_ids, self.prefill_metadata, self.rows[row : row + 1].clone(), **dense)
        if self.compiled:
            inputs.mark_num_tokens_dynamic()
        return self._run_model(inputs, False, torch.tensor([count - 1], device=device))

    def reserve(self, row: int, num_tokens: int) -> None:
        """Gives a row the blocks for `num_tokens` tokens."""
        count = math.ceil(num_tokens / self.cache.block_size)
        blocks, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        self.slots[row].blocks = blocks
        table = torch.full((self.max_blocks_per_request,), -1, dtype=torch.int32)
        table[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        self.block_table[row] = table.to(self.block_table.device)

    def release(self, row: int) -> None:
        """Returns a row's blocks. They go to the end of the queue."""
        self.free_blocks += self.slots[row].blocks
        self.slots[row] = _Slot()

    @torch.no_grad()
    def start_request(self, row: int, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Prefills a prompt into a free row, chooses its first new token and makes the row active."""
        self.reserve(row, len(prompt) + max_new_tokens)
        for start in range(0, len(prompt), self.prefill_tokens):
            logits = self.prefill_chunk(row, prompt[start : start + self.prefill_tokens], start)
        token = logits.argmax(-1)
        self.last_token[row : row + 1] = token
        self.output[row, :1] = token
        self.seq_lens[row] = len(prompt)
        self.num_generated[row] = 1
        self.max_new_tokens[row] = max_new_tokens
        self.active[row : row + 1] = (token.unsqueeze(1) != self.eos_token_ids).all(1) & (max_new_tokens > 1)

    @torch.no_grad()
    def advance(self) -> None:
        """One decode step for the active rows, on the device alone."""
        num_rows = self.active.shape[0]
        self.query_start_loc[1:] = self.active.cumsum(0)
        new_lens = self.seq_lens + self.active
        self.decoder.build_step(self.metadata, self.query_start_loc, new_lens, self.block_table)
        inputs = self.decoder.step_inputs(self.input_ids, self.metadata, self.rows)
        self.input_ids.copy_(self.last_token[inputs.req_id_per_token.long().clamp(min=0)])
        self.logits = self._run_model(inputs, True, None)

        # token rows to request rows; a row that is not active reads some other row and keeps what it had
        token = self.logits.argmax(-1)[self.query_start_loc[:-1].long().clamp(max=num_rows - 1)]
        self.last_token.copy_(torch.where(self.active, token, self.last_token))
        column = self.num_generated.clamp(max=self.output.shape[1] - 1).unsqueeze(1)
        kept = self.output.gather(1, column).squeeze(1)
        self.output.scatter_(1, column, torch.where(self.active, token, kept).unsqueeze(1))
        self.seq_lens.copy_(new_lens)
        self.num_generated += self.active
        ended = (token.unsqueeze(1) == self.eos_token_ids).any(1) | (self.num_generated >= self.max_new_tokens)
        self.active &= ~ended

    def capture(self) -> None:
        """Records the decode step in a CUDA graph. Call it while no row is active."""
        if self._graph is not None:
            return
        if bool(self.active.any()):
            raise RuntimeError("capture() runs decode steps to warm up: call it while no request is active")
        stream = torch.cuda.Stream(self.decoder.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.advance()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize(self.decoder.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.advance()
        self._graph = graph

    def step(self) -> None:
        """One decode step: a replay where there is a graph."""
        self.num_steps += 1
        if self._graph is not None:
            self._graph.replay()
        else:
            self.advance()

    def warm_up(self) -> None:
        """Compiles prefill and decode and captures the decode graph, while no row is in use.

        Afterwards no prompt, length or number of active requests compiles anything.
        """
        decoder = self.decoder
        if decoder.device.type == "cuda":
            counts = [2**power for power in range(self.prefill_tokens.bit_length())]
            warmup(
                cache_format=self.cache.cache_format,
                num_heads=decoder.num_heads,
                topk=min(decoder.index_topk, self.max_blocks_per_request * self.cache.block_size),
                num_tokens=[*counts, self.prefill_tokens, len(self.slots)],
                head_dim=decoder.head_dim,
                with_sink=decoder.with_sink,
                block_size=self.cache.block_size,
                dtype=decoder.dtype,
                device=decoder.device,
            )
        tokens = [0] * min(self.prefill_tokens, 7, decoder.max_model_len - 1)
        self.start_request(0, tokens, 1)
        # a first chunk may run dense and a late one sparse; of this one nothing is cached, for it has no blocks
        self.prefill_chunk(0, tokens, decoder.max_model_len - len(tokens))
        self.release(0)
        self.advance()
        if self.cuda_graph:
            self.capture()
        self._synchronize()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        *,
        steps_per_check: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> GenerationResult:
        """Continues every prompt greedily.

        Args:
            prompts: token ids, at least one each.
            max_new_tokens: of each prompt, or of all.
            steps_per_check: decode steps between two looks at which requests are done. More keep a GPU busier and may
                add idle steps at the end of a request.
            progress: called with (new tokens so far, new tokens at most) after each check.

        Raises:
            ValueError: a prompt is empty or, with its new tokens, longer than `decoder.max_model_len` or the cache.
        """
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        self._check_requests(prompts, limits)
        if self.cuda_graph:
            self.capture()
        result = GenerationResult([[] for _ in prompts])
        waiting = list(range(len(prompts)))
        finished = 0
        while waiting or any(not slot.free for slot in self.slots):
            self._synchronize()
            began = time.perf_counter()
            for row, slot in enumerate(self.slots):
                if not waiting or not slot.free:
                    continue
                request = waiting[0]
                needed = math.ceil((len(prompts[request]) + limits[request]) / self.cache.block_size)
                if needed > len(self.free_blocks):
                    break
                waiting.pop(0)
                slot.prompt = request
                self.start_request(row, prompts[request], limits[request])
                result.prefill_tokens += len(prompts[request])
            self._synchronize()
            middle = time.perf_counter()
            result.prefill_seconds += middle - began

            for _ in range(steps_per_check):
                self.step()
            active, counts = self.active.tolist(), self.num_generated.tolist()
            result.decode_seconds += time.perf_counter() - middle
            for row, slot in enumerate(self.slots):
                if not slot.free and not active[row]:
                    result.tokens[slot.prompt] = self.output[row, : counts[row]].tolist()
                    result.decode_tokens += counts[row] - 1
                    finished += counts[row]
                    self.release(row)
            if progress is not None:
                running = sum(counts[row] for row, slot in enumerate(self.slots) if not slot.free)
                progress(finished + running, sum(limits))
        return result

    def _check_requests(self, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        if len(limits) != len(prompts):
            raise ValueError(f"max_new_tokens has {len(limits)} entries for {len(prompts)} prompts")
        blocks = self.cache.num_blocks
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            total = len(prompt) + limit
            if not prompt or limit < 1:
                raise ValueError(
                    f"prompt {number} has {len(prompt)} tokens and {limit} new ones, both must be at least 1"
                )
            if total > min(self.decoder.max_model_len, blocks * self.cache.block_size):
                raise ValueError(
                    f"prompt {number} needs {total} tokens of cache, there is room for "
                    f"min(max_model_len {self.decoder.max_model_len}, cache {blocks * self.cache.block_size})"
                )

    def _synchronize(self) -> None:
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize(self.decoder.device)
