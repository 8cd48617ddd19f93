"""Requests to a generation session: prompts, limits, sampling and end tokens, checked before anything runs."""

from __future__ import annotations

import numbers
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..sizes import as_int


class Request(NamedTuple):
    """A prompt that waits for a row; arguments as `GenerationSession.submit` takes them."""

    number: int
    prompt: list[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


class RequestQueue:
    """Requests in the order of submission, and the numbers of those that were cancelled. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._cancelled: set[int] = set()
        self._submitted = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> int:
        """Queues a request under the next number, which it returns."""
        with self._lock:
            number = self._submitted
            self._submitted += 1
            self._waiting.append(request._replace(number=number))
        return number

    def next(self, room: int) -> Request | None:
        """Takes the first request out if it fits in `room` tokens of cache; None if it does not, or there is none."""
        with self._lock:
            if not self._waiting or len(self._waiting[0].prompt) + self._waiting[0].max_new_tokens > room:
                return None
            return self._waiting.popleft()

    def cancel(self, number: int) -> None:
        """Takes a request out, and keeps its number for `take_cancelled`.

        Raises:
            ValueError: there was no such request.
        """
        with self._lock:
            if number >= self._submitted:
                raise ValueError(f"cancel: no request has number {number}, {self._submitted} were submitted")
            self._waiting = deque(request for request in self._waiting if request.number != number)
            self._cancelled.add(number)

    def take_cancelled(self) -> set[int]:
        """The numbers that were cancelled since the last look."""
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
        return cancelled

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()


class Limits(NamedTuple):
    """Limits of what a session can run.

    Attributes:
        vocabulary: token ids of the model.
        max_model_len: the longest request.
        capacity: tokens that the cache holds.
        sampling: whether a request may have a temperature.
    """

    vocabulary: int
    max_model_len: int
    capacity: int
    sampling: bool


def check_prompts(prompts: Any, max_new_tokens: Any) -> list[tuple[Any, Any]]:
    """Each prompt with its limit; neither is looked into.

    Raises:
        TypeError: `prompts` is no sequence of sequences, or `max_new_tokens` no int and no sequence.
        ValueError: there are not as many limits as prompts.
    """
    _check_sequence("prompts", prompts, "token-id lists")
    if len(prompts) and as_int(prompts[0]) is not None:
        raise TypeError("prompts must be a list of token-id lists, got a list of ints: write [prompt] for one prompt")
    if (limit := as_int(max_new_tokens)) is not None:
        return [(prompt, limit) for prompt in prompts]
    if isinstance(max_new_tokens, str) or not isinstance(max_new_tokens, Sequence):
        raise TypeError(
            f"max_new_tokens must be an int, or a list with one for each prompt, got {type(max_new_tokens).__name__}"
        )
    if len(max_new_tokens) != len(prompts):
        raise ValueError(f"max_new_tokens has {len(max_new_tokens)} entries for {len(prompts)} prompts")
    return list(zip(prompts, max_new_tokens, strict=True))


def check_tokens(name: str, token_ids: Any, vocabulary: int) -> list[int]:
    """A sequence of token ids as a list.

    Raises:
        TypeError: no sequence of ints.
        ValueError: an id is out of the vocabulary.
    """
    _check_sequence(name, token_ids, "token ids")
    tokens = []
    for given in token_ids:
        token = as_int(given)
        if token is None:
            raise TypeError(f"{name} must be a list of token ids, ints, got {type(given).__name__} in it")
        if not 0 <= token < vocabulary:
            raise ValueError(f"{name} has token id {token}, the vocabulary has {vocabulary}")
        tokens.append(token)
    return tokens


def check_request(
    name: str, prompt: Any, max_new_tokens: Any, temperature: Any, top_p: Any, seed: Any, limits: Limits
) -> Request:
    """The request, without a number.

    Args:
        name: of the prompt, in messages.
        prompt, max_new_tokens, temperature, top_p, seed: as `GenerationSession.submit` takes them.
        limits: of the session.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the session cannot run it.
    """
    tokens = check_tokens(name, prompt, limits.vocabulary)
    limit = as_int(max_new_tokens)
    if limit is None:
        raise TypeError(f"max_new_tokens of {name} must be an int, got {type(max_new_tokens).__name__}")
    if not tokens or limit < 1:
        raise ValueError(f"{name} has {len(tokens)} tokens and {limit} new ones, both must be at least 1")
    if len(tokens) + limit > min(limits.max_model_len, limits.capacity):
        raise ValueError(
            f"{name} needs {len(tokens) + limit} tokens of cache, there is room for min(max_model_len "
            f"{limits.max_model_len}, cache {limits.capacity})"
        )
    for argument, value in (("temperature", temperature), ("top_p", top_p)):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{argument} must be a number, got {type(value).__name__}")
    if not 0 <= temperature <= torch.finfo(torch.float32).max or not 0 < top_p <= 1:
        raise ValueError(
            f"temperature must be at least 0 and finite in float32 and top_p above 0 and at most 1, got {temperature} "
            f"and {top_p}"
        )
    if temperature > 0 and not limits.sampling:
        raise ValueError(f"temperature {temperature} needs GenerationSession(..., sampling=True)")
    number = as_int(seed)
    if number is None:
        raise TypeError(f"seed must be an integer, got {type(seed).__name__}")
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"seed of {name} must be a 64-bit integer with a sign, got {number}")
    return Request(-1, tokens, limit, float(temperature), float(top_p), number)


def check_end_tokens(ends: Any, vocabulary: int) -> list[int]:
    """One end token, several, or none by `()`, as a list.

    Raises:
        TypeError: not an int and no ints.
        ValueError: one that the model cannot produce.
    """
    one, several = as_int(ends), isinstance(ends, Iterable) and not isinstance(ends, (str, torch.Tensor))
    found = [as_int(end) for end in ends] if one is None and several else [one]
    if None in found:
        raise TypeError(f"eos_token_ids must be an int or a list of ints, got {ends!r}")
    for end in found:
        if not 0 <= end < vocabulary:
            raise ValueError(f"eos_token_ids has {end}, the vocabulary has {vocabulary}")
    return found


def end_tokens(model: Any) -> tuple[int, ...]:
    """The ids that end a text: of a transformers model's generation config, or of its config."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ends is None:
        ends = getattr(model.config.get_text_config(), "eos_token_id", None)
    if ends is None:
        return ()
    return (ends,) if isinstance(ends, int) else tuple(ends)


def _check_sequence(name: str, value: Any, of: str) -> None:
    """Raises TypeError for what is often passed instead of a list."""
    hint = {
        str: "encode it first, tokenizer.encode(text)",
        bytes: "write list(...) if its bytes are token ids",
        Mapping: "pass its input_ids, as lists without padding",
        torch.Tensor: "pass lists, tensor.tolist(), without padding",
    }
    for kind, what in hint.items():
        if isinstance(value, kind):
            raise TypeError(f"{name} must be a list of {of}, got {type(value).__name__}: {what}")
    # a BatchEncoding is a UserDict
    if not isinstance(value, Sequence):
        how = ": pass lists, array.tolist(), without padding" if hasattr(value, "tolist") else ""
        raise TypeError(f"{name} must be a list of {of}, got {type(value).__name__}{how}")
