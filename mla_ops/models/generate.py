"""Generation over paged caches: chunked prefill, then decode steps that never look at the host.

    session = GenerationSession(decoder, max_num_requests=4, cache_format="fp8_ds_mla")
    result = session.generate(prompts, max_new_tokens=64)

    session.submit(prompt, 64)           # more may be submitted while others run
    for event in session.stream():       # tokens as they come
        print(event.request, event.tokens, event.done)
        session.cancel(event.request)    # a request may be ended early

A decode step is a function of device buffers alone: it builds the step's metadata, runs the model, chooses the next
tokens, appends them, and retires the requests that are done. So the same code runs eagerly, compiled, and captured in a
CUDA graph, where a step is one replay. A request that is done has no query tokens in later steps: it becomes padding,
and the tokens of the others move up.

This is no serving engine: no priorities, no preemption, no sharing of prefixes, a prefill runs alone. It is the place
to copy from.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..formats import LATENT_DIM
from ..sizes import check_sizes
from ..warm_up import warmup
from .decoder import Decoder
from .requests import Limits, RequestQueue, check_end_tokens, check_prompts, check_request, end_tokens
from .sampling import choose_tokens

# of the models of all sessions; Dynamo's own limit of all functions together
MAX_GRAPHS = 256


@dataclass
class GenerationResult:
    """The result of `GenerationSession.generate`.

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


class TokenEvent(NamedTuple):
    """Tokens that a request got since the last look.

    Attributes:
        request: what `GenerationSession.submit` returned.
        tokens: its new tokens; the end token too.
        done: there will be no more.
    """

    request: int
    tokens: list[int]
    done: bool


@dataclass
class _Slot:
    """One row of the decode batch, on the host."""

    request: int = -1
    sent: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def free(self) -> bool:
        return self.request < 0


class GenerationSession:
    """Caches, metadata and decode state for a batch of requests.

    Args:
        decoder: the model.
        max_num_requests: rows of the decode batch. More prompts than that wait for a row to become free.
        cache_format: `fp8_ds_mla` (V4: `fp8_ds_mla_v4`), or the plain format of the model's dtype.
        block_size: tokens a cache block; a multiple of 128 for V4.
        num_blocks: blocks of the cache; by default enough for every row at `decoder.max_model_len`.
        prefill_tokens: tokens of a prefill step; longer prompts take several.
        eos_token_ids: a request is done when it produces one of these; one, several, or none by `()`. By default
            those of the model's generation config.
        sampling: requests may ask for a temperature; a step then sorts its logits.
        compiled: compile the model with `fullgraph=True`.
        backend: what `torch.compile` compiles with.
        cuda_graph: capture the decode step in a CUDA graph; None captures on CUDA devices.
        seed: blocks are handed out in an order drawn from this, so that neighbouring tokens lie in unrelated blocks.
    """

    @torch.inference_mode(False)  # buffers that are made in that mode could not be written outside of it
    def __init__(
        self,
        decoder: Decoder,
        *,
        max_num_requests: int,
        cache_format: str,
        block_size: int = 64,
        num_blocks: int | None = None,
        prefill_tokens: int = 512,
        eos_token_ids: int | Sequence[int] | None = None,
        sampling: bool = False,
        compiled: bool = False,
        backend: str | Callable[..., Any] = "inductor",
        cuda_graph: bool | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(decoder, Decoder):
            raise TypeError(
                f"GenerationSession: decoder must be what decoder_for(model, max_model_len) gives, got "
                f"{type(decoder).__name__}"
            )
        max_num_requests, block_size, prefill_tokens = check_sizes(
            "GenerationSession",
            1,
            max_num_requests=max_num_requests,
            block_size=block_size,
            prefill_tokens=prefill_tokens,
        )
        (seed,) = check_sizes("GenerationSession", -(2**63), most=2**64 - 1, seed=seed)
        if decoder.max_model_len < 2:
            raise ValueError("a request has a prompt and a new token: max_model_len of the decoder must be at least 2")
        device = decoder.device
        self.decoder = decoder
        if cuda_graph and device.type != "cuda":
            raise ValueError(f"cuda_graph=True needs a model on a CUDA device, this one is on {device}")
        self.cuda_graph = device.type == "cuda" if cuda_graph is None else cuda_graph
        self.max_blocks_per_request = math.ceil(decoder.max_model_len / block_size)
        if num_blocks is None:
            num_blocks = max_num_requests * self.max_blocks_per_request
        (num_blocks,) = check_sizes("GenerationSession", 1, num_blocks=num_blocks)
        self.cache: Any = self.decoder.allocate_cache(cache_format, num_blocks, block_size, max_num_requests)
        self.free_blocks = list(range(num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.slots = [_Slot() for _ in range(max_num_requests)]

        self.prefill_tokens = max(2, min(prefill_tokens, decoder.max_model_len))
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
        self.limits = Limits(
            decoder.vocabulary,
            decoder.max_model_len,
            self.cache.num_blocks * block_size,
            sampling,
        )
        ends: Sequence[int] = end_tokens(decoder.model)
        if eos_token_ids is not None:
            ends = check_end_tokens(eos_token_ids, self.limits.vocabulary)
        self.eos_token_ids = torch.tensor(ends, dtype=torch.int64, device=device)
        self.sampling = sampling
        self.temperature = zeros(max_num_requests, dtype=torch.float32)
        self.top_p = zeros(max_num_requests, dtype=torch.float32)
        self.seeds = zeros(max_num_requests)
        self.waiting = RequestQueue()
        self.events: deque[TokenEvent] = deque()  # those that nobody has taken
        self.totals = GenerationResult([])
        self._generating = False
        self._lock = threading.RLock()  # of rows, blocks and events; `waiting` has its own
        self.logits: torch.Tensor | None = None
        self.num_steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def _run_model(self, inputs: Any, logit_rows: torch.Tensor | None, host_reads: bool) -> torch.Tensor:
        cache = self.cache
        # the caches are in the model's dtype, which autocast would change
        with torch.autocast(self.decoder.device.type, enabled=False), self._graphs_allowed():
            return self.model(inputs, cache.layers, cache.cache_format, cache.index_format, logit_rows, host_reads)

    def _graphs_allowed(self) -> contextlib.AbstractContextManager[Any]:
        """Dynamo counts the graphs of all sessions of a process together, each has two or three, and allows eight."""
        return torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS) if self.compiled else contextlib.nullcontext()

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
        rows = self.rows[row : row + 1].clone()
        inputs = self.decoder.step_inputs(input_ids, self.prefill_metadata, rows, bound)
        if self.compiled:
            inputs.mark_num_tokens_dynamic()
        return self._run_model(inputs, torch.tensor([count - 1], device=device), True)

    def reserve(self, row: int, num_tokens: int) -> None:
        """Gives a row the blocks for `num_tokens` tokens."""
        count = math.ceil(num_tokens / self.cache.block_size)
        blocks, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        self.slots[row].blocks = blocks
        table = blocks + [-1] * (self.max_blocks_per_request - len(blocks))
        self.block_table[row] = torch.tensor(table, dtype=torch.int32, device=self.block_table.device)

    def release(self, row: int) -> None:
        """Returns a row's blocks. They go to the end of the queue."""
        self.free_blocks += self.slots[row].blocks
        self.slots[row] = _Slot()

    @torch.no_grad()
    def start_request(
        self,
        row: int,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Prefills a prompt into a free row, chooses its first new token and makes the row active."""
        self.reserve(row, len(prompt) + max_new_tokens)
        self.temperature[row], self.top_p[row], self.seeds[row] = temperature, top_p, seed
        for start in range(0, len(prompt), self.prefill_tokens):
            logits = self.prefill_chunk(row, prompt[start : start + self.prefill_tokens], start)
        self.num_generated[row] = 0
        token = self._choose(logits, slice(row, row + 1))
        self.last_token[row : row + 1] = token
        self.output[row, :1] = token
        self.seq_lens[row] = len(prompt)
        self.num_generated[row] = 1
        self.max_new_tokens[row] = max_new_tokens
        self.active[row : row + 1] = (token.unsqueeze(1) != self.eos_token_ids).all(1) & (max_new_tokens > 1)

    def _choose(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """The next token of each request, `[num_rows]`, of `[num_rows, vocab_size]` logits."""
        if not self.sampling:
            return logits.argmax(-1)
        state = (tensor[rows] for tensor in (self.temperature, self.top_p, self.seeds, self.num_generated))
        return choose_tokens(logits, *state)

    @torch.no_grad()
    def advance(self) -> None:
        """One decode step for the active rows, on the device alone."""
        num_rows = self.active.shape[0]
        self.query_start_loc[1:] = self.active.cumsum(0)
        new_lens = self.seq_lens + self.active
        self.decoder.build_step(self.metadata, self.query_start_loc, new_lens, self.block_table)
        inputs = self.decoder.step_inputs(self.input_ids, self.metadata, self.rows)
        self.input_ids.copy_(self.last_token[inputs.req_id_per_token.long().clamp(min=0)])
        self.logits = self._run_model(inputs, None, False)

        # token rows to request rows; a row that is not active reads some other row and keeps what it had
        rows = self.query_start_loc[:-1].long().clamp(max=num_rows - 1)
        token = self._choose(self.logits[rows], slice(None)) if self.sampling else self.logits.argmax(-1)[rows]
        column = self.num_generated.clamp(max=self.output.shape[1] - 1).unsqueeze(1)
        kept = self.output.gather(1, column).squeeze(1)
        self.output.scatter_(1, column, torch.where(self.active, token, kept).unsqueeze(1))
        generated = self.num_generated + self.active
        ended = (token.unsqueeze(1) == self.eos_token_ids).any(1) | (generated >= self.max_new_tokens)
        # all at once: a step that is interrupted before this is done again, and gives the same
        torch._foreach_copy_(
            [self.last_token, self.seq_lens, self.num_generated, self.active],
            [torch.where(self.active, token, self.last_token), new_lens, generated, self.active & ~ended],
        )

    def capture(self) -> None:
        """Records the decode step in a CUDA graph. Call it while no row is active."""
        if self._graph is not None:
            return
        self._check_inactive("capture")
        stream = torch.cuda.Stream(self.decoder.device)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.advance()
        torch.cuda.current_stream(stream.device).wait_stream(stream)
        torch.cuda.synchronize(self.decoder.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):  # the model's device need not be the current one
            self.advance()
        self._graph = graph

    def step(self) -> None:
        """One decode step: a replay where there is a graph."""
        self.num_steps += 1
        if self._graph is not None:
            self._graph.replay()
        else:
            self.advance()

    def configuration(self) -> dict[str, Any]:
        """The arguments of `mla_ops.warmup` for the ops that this session calls."""
        decoder = self.decoder
        counts = [2**power for power in range(self.prefill_tokens.bit_length())]
        return {
            "cache_format": self.cache.cache_format,
            "num_heads": decoder.num_heads,
            "topk": min(decoder.index_topk, self.max_blocks_per_request * self.cache.block_size),
            "num_tokens": [*counts, self.prefill_tokens, len(self.slots)],
            "head_dim": decoder.head_dim,
            "with_sink": decoder.with_sink,
            "block_size": self.cache.block_size,
            "dtype": decoder.dtype,
            "device": decoder.device,
            "prefill_head_dims": _prefill_head_dims(decoder.config),
            "index_heads": decoder.index_heads,
            "deterministic": decoder.deterministic,
            "q_halves": decoder.head_dim > LATENT_DIM,
        }

    def warm_up(self, progress: Callable[[str], None] | None = None) -> None:
        """Compiles prefill and decode and captures the decode graph, while no row is in use.

        Afterwards no prompt, length or number of active requests compiles anything.

        Args:
            progress: called with what comes next, in words.

        Raises:
            RuntimeError: a request is active.
        """
        self._check_inactive("warm_up")
        decoder = self.decoder
        tell = progress or (lambda what: None)
        if decoder.device.type == "cuda":
            warmup(**self.configuration())
        tokens = [0] * min(self.prefill_tokens, 7, decoder.max_model_len - 1)
        late = decoder.max_model_len - len(tokens)
        bounds = [decoder.dense_context(start, len(tokens), any_length=True) for start in (0, late)]
        tell("prefill" if bounds[0] == bounds[1] else "prefill of short sequences")
        self.start_request(0, tokens, 1)
        # a first chunk may run dense and a late one sparse; of this one nothing is cached, for it has no blocks
        if bounds[0] != bounds[1]:
            tell("prefill of long sequences")
        self.prefill_chunk(0, tokens, late)
        self.release(0)
        tell("decode")
        self.advance()
        if self.cuda_graph:
            tell("capture of the decode step")
            self.capture()
        self._synchronize()

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> int:
        """Queues a request; `stream` runs it.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: at least 1.
            temperature: of sampling; 0 takes the most likely token.
            top_p: samples among the most likely tokens that have this probability together, above 0 and up to 1.
            seed: the tokens are a function of this, the logits and their number in the request, whatever runs beside.

        Returns:
            The request's number, which its events bear.

        Raises:
            TypeError: `prompt` is no sequence of ints, or another argument is of another type.
            ValueError: it is empty, an id is out of the vocabulary, with its new tokens it is longer than
                `decoder.max_model_len` or the cache, the sampling cannot be, or `generate` is running.
        """
        request = check_request("prompt", prompt, max_new_tokens, temperature, top_p, seed, self.limits)
        if self._generating:
            raise ValueError("submit: generate() is running, whose result has no place for another request")
        return self.waiting.submit(request)

    def cancel(self, request: int) -> None:
        """Ends a request early: its row and its blocks are free for others, and `stream` gives nothing more of it.

        Any thread may call it.

        Args:
            request: what `submit` returned.

        Raises:
            TypeError: `request` is no integer.
            ValueError: no request has this number.
        """
        self.waiting.cancel(*check_sizes("cancel", 0, request=request))
        # a thread that runs a round takes it out behind that; to wait for the lock might take many rounds
        if self._lock.acquire(blocking=False):
            try:
                self._drop_cancelled()
            finally:
                self._lock.release()

    def _drop_cancelled(self) -> None:
        cancelled = self.waiting.take_cancelled()
        if not cancelled:
            return
        self.events = deque(event for event in self.events if event.request not in cancelled)
        for row, slot in enumerate(self.slots):
            if slot.request in cancelled:
                self.active[row] = False
                self.release(row)

    def stream(self, *, steps_per_check: int = 1) -> Iterator[TokenEvent]:
        """Runs what was submitted until nothing is left, and yields tokens as they come.

        Whoever iterates may submit more in between, as may other threads: they start as soon as a row and blocks are
        free, in the order of submission.

        Args:
            steps_per_check: decode steps between two looks at which tokens there are. More keep a GPU busier, may add
                idle steps at the end of a request, and give tokens in larger parts.
        """
        (steps_per_check,) = check_sizes("stream", 1, steps_per_check=steps_per_check)
        while True:
            with self._lock:
                if self.cuda_graph and self._graph is None:
                    self.capture()
                self._drop_cancelled()
                while not self._idle and not self.events:
                    self._round(steps_per_check)
                    self._drop_cancelled()
                if not self.events:
                    return
                event = self.events.popleft()
            yield event

    def _round(self, steps: int) -> None:
        """Starts the requests that there is room for, decodes some steps, and reads what came into `events`."""
        self._synchronize()
        began = time.perf_counter()
        for row, slot in enumerate(self.slots):
            if not slot.free:
                continue
            request = self.waiting.next(len(self.free_blocks) * self.cache.block_size)
            if request is None:
                break
            number, prompt, limit, temperature, top_p, seed = request
            slot.request, slot.sent = number, 0
            try:
                self.start_request(row, prompt, limit, temperature=temperature, top_p=top_p, seed=seed)
            except BaseException:  # the session stays as it was without this request
                self.release(row)
                raise
            self.totals.prefill_tokens += len(prompt)
        self._synchronize()
        middle = time.perf_counter()
        self.totals.prefill_seconds += middle - began

        for _ in range(steps):
            self.step()
        active, counts = self.active.tolist(), self.num_generated.tolist()
        self.totals.decode_seconds += time.perf_counter() - middle
        for row, slot in enumerate(self.slots):
            if slot.free:
                continue
            tokens = self.output[row, slot.sent : counts[row]].tolist()
            # the first token of a request comes from its prefill
            self.totals.decode_tokens += len(tokens) - (slot.sent == 0)
            slot.sent = counts[row]
            self.events.append(TokenEvent(slot.request, tokens, not active[row]))
            if not active[row]:
                self.release(row)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        steps_per_check: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> GenerationResult:
        """Continues every prompt. If it fails or is interrupted, the session is idle.

        Args:
            prompts: token ids, at least one each.
            max_new_tokens: of each prompt, or of all.
            temperature, top_p: as `submit` takes them, of all prompts.
            seed: prompt i is sampled with `seed + i`.
            steps_per_check: as `stream` takes it.
            progress: called with (new tokens so far, new tokens at most) after each check.

        Raises:
            TypeError: `prompts` is no sequence of sequences of ints.
            ValueError: as `submit` raises it; or other requests are running, or have tokens that `stream` did not give.
        """
        check_sizes("generate", 1, steps_per_check=steps_per_check)
        (seed,) = check_sizes("generate", -(2**63), most=2**63 - 1, seed=seed)
        pairs = check_prompts(prompts, max_new_tokens)
        requests = [
            check_request(f"prompt {i}", prompt, limit, temperature, top_p, seed + i, self.limits)
            for i, (prompt, limit) in enumerate(pairs)
        ]
        result = GenerationResult([[] for _ in prompts])
        with self._lock:
            self._drop_cancelled()
            if self._generating or not self._idle:
                raise ValueError(
                    "generate() needs an idle session: run stream() to its end, cancel() what runs, or add requests by "
                    "submit()"
                )
            place = {self.waiting.submit(request): i for i, request in enumerate(requests)}
            self.totals, self._generating = result, True
        try:
            for event in self.stream(steps_per_check=steps_per_check):
                result.tokens[place[event.request]] += event.tokens
                if progress is not None:
                    progress(sum(map(len, result.tokens)), sum(request.max_new_tokens for request in requests))
        except BaseException:
            self._drop_requests()
            raise
        finally:
            self.totals, self._generating = GenerationResult([]), False  # later requests do not count in this result
        return result

    @property
    def _idle(self) -> bool:
        return not self.waiting and not self.events and all(slot.free for slot in self.slots)

    def _drop_requests(self) -> None:
        with self._lock:
            self.waiting.clear()
            self.events.clear()
            for row, slot in enumerate(self.slots):
                if not slot.free:
                    self.release(row)
            self.active.zero_()

    def _check_inactive(self, method: str) -> None:
        if bool(self.active.any()):
            raise RuntimeError(f"{method}() runs steps of its own: call it while no request is active")

    def _synchronize(self) -> None:
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize(self.decoder.device)


def _prefill_head_dims(config: Any) -> tuple[int, int]:
    """Widths of a head's keys and values before absorption; those of DeepSeek-V3 for DeepSeek-V4, which has none."""
    if not hasattr(config, "qk_nope_head_dim"):
        return 192, 128
    return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
