"""Which lowering runs: a pure function of device, dtypes, shapes and what is installed. Explainable, overridable.

A *lowering* is one implementation of one op. A *backend* is a folder of them, `mla_ops/kernels/<backend>/<family>.py`,
or a module, which adapts a library. Each module has a `LOWERINGS` dict from op name to `Lowering`; an overload with
arguments of its own is an op of its own, `op.overload`, which `override` takes by the name of its op. For a call,
dispatch tries the backends of `order_for` and takes the first that has no reason against it. Nothing is imported before
it is asked for, and nothing is compiled to choose.

A lowering that cannot be loaded raises `LoweringUnavailable`, and the next one takes the call. Where a GPU call runs a
slower lowering than its GPU could have, the logger `mla_ops` says so once, with the reason and the cure.

    with mla_ops.dispatch.override(paged_sparse_attention="triton"):
        ...
    print(mla_ops.dispatch.explain(call))
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

ENVIRONMENT_VARIABLE = "MLA_OPS_LOWERING"

logger = logging.getLogger("mla_ops")


class Missing(str):
    """A reason against a lowering that a user can change: a package, a library, a setting. It says how."""

    __slots__ = ()


class LoweringUnavailable(RuntimeError):  # noqa: N818 (a state of the machine)
    """A lowering that dispatch chose cannot be had on this machine: its code does not compile, load or import.

    `Lowering.run` and `Lowering.compute` raise it before they write anything, with a message that says what failed and
    what a user can do. The lowering of this op is then struck off for the rest of the process, and the next one takes
    the call.
    """


class Call(NamedTuple):
    """The facts that a lowering is chosen by. Fields that mean nothing for an op keep their default."""

    op: str
    device: torch.device
    dtype: torch.dtype
    cache_format: str = ""
    head_dim: int = 0
    num_heads: int = 0
    num_tokens: int = 0
    topk: int = 0
    extra_cache_format: str = ""
    extra_topk: int = 0
    head_dim_v: int = 0
    block_size: int = 0
    deterministic: bool = False
    num_keys: int = 0


@dataclass(frozen=True)
class Lowering:
    """One implementation of one op.

    Attributes:
        run: takes the op's arguments, outputs by name; writes and returns nothing. The device of the tensors is the
            current one. May raise `LoweringUnavailable`.
        unsupported_reason: why this implementation cannot hold the contract for a call, in words a user can act on;
            None if it can. A cheap test, which compiles no kernel. A `Missing` if the user can change it.
        compute: takes the op's arguments without outputs and returns those fresh, contiguous; for a library that cannot
            write into a caller's buffers, where `run` copies. None: what is returned is allocated, and `run` fills it.
        deterministic: whether the bits of a row's results can be had independent of the other rows. `run` is then told
            when they are asked for.
        backend: where it was found; dispatch fills it in.
    """

    run: Callable[..., None]
    unsupported_reason: Callable[[Call], str | None] = lambda call: None
    compute: Callable[..., tuple[torch.Tensor, ...]] | None = None
    deterministic: bool = False
    backend: str = ""


def into_buffers(compute: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., None]:
    """The `run` of a library that allocates `out` and `lse` itself."""

    def run(*arguments: Any, out: torch.Tensor, lse: torch.Tensor, **options: Any) -> None:
        own_out, own_lse = compute(*arguments, **options)
        out.copy_(own_out)
        lse.copy_(own_lse)

    return run


FAMILIES: dict[str, str] = {
    "concat_and_cache": "cache",
    "gather_cache": "cache",
    "convert_req_index_to_global_index": "index",
    "filter_prefill_indices": "index",
    "sliding_window_indices": "index",
    "compressed_indices": "index",
    "compute_global_topk_indices_and_lens": "index",
    "combine_topk_swa_indices": "index",
    "paged_sparse_attention": "sparse_attention",
    "paged_sparse_attention.extra": "sparse_attention",
    "sparse_attention": "sparse_attention",
    "paged_attention": "dense_attention",
    "prefill_attention": "dense_attention",
    "merge_attention_states": "merge",
    "merge_attention_states.stacked": "merge",
    "build_step_metadata": "step_metadata",
    "compress_and_cache": "compressor",
    "build_compressed_metadata": "step_metadata",
    "write_index_cache": "indexer",
    "gather_index_cache": "indexer",
    "quantize_index_query": "indexer",
    "indexer_logits": "indexer",
    "paged_indexer_logits": "indexer",
    "topk_indices": "indexer",
    "select_keys": "indexer",
    "select_keys.flat": "indexer",
    "merge_topk": "indexer",
}

BACKENDS = ("hopper", "flash_mla", "flash_attn", "torch_sdpa", "flashinfer", "triton", "reference")

# backends that adapt a library that is installed, without families
ADAPTERS = ("flash_mla", "flash_attn", "torch_sdpa", "flashinfer")

ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("reference",),
    "cuda": ("hopper", "flash_mla", "flash_attn", "torch_sdpa", "flashinfer", "triton"),
}

# Lowerings that run only where `dispatch.override` asks for them, and why.
ON_REQUEST: dict[tuple[str, str], str] = {
    ("flash_mla", "paged_sparse_attention"): "FlashMLA rounds the float32 scales of fp8_ds_mla to bfloat16, which is "
    "exact only for powers of two",
    ("flash_attn", "prefill_attention"): "no benchmark has compared it with the portable kernel yet",
    ("torch_sdpa", "prefill_attention"): "cuDNN builds a plan, 30 ms, for each new number of tokens, and torch's "
    "FlashAttention-2 takes longer than the portable kernel",
    ("flashinfer", "prefill_attention"): "a call waits for its lengths and plans on the host, more than 1 ms, "
    "unless it is one causal request with itself",
    ("flashinfer", "paged_attention"): "every call waits for its lengths and plans on the host, more than 1 ms",
    ("flashinfer", "paged_sparse_attention"): "on SM120 it rounds queries and weights to e4m3, so that an output is "
    "off by some percent; on SM100 it has not run yet",
    (
        "flashinfer",
        "paged_sparse_attention.extra",
    ): "it rounds weights, and of up to 64 tokens the queries, to e4m3, so that an output is off by some percent",
}

# Lowerings that could run a call and make way: one after them takes less time, or no GPU has run their tests.
# Not for `override`.
PASSED_OVER: dict[tuple[str, str], Callable[[Call], str | None]] = {
    ("flash_mla", op): lambda call: (
        "up to 16 heads leave most of its 64-head tile empty" if call.num_heads <= 16 else None
    )
    for op in ("paged_attention", "sparse_attention")
}


def order_for(op: str, device: torch.device) -> tuple[str, ...]:
    """Backends that dispatch tries for an op, in order.

    CPU tensors go to the reference, which is the specification. On CUDA it runs only when it is asked for: it is orders
    of magnitude slower.
    """
    return tuple(backend for backend in ORDER.get(device.type, ()) if (backend, op) not in ON_REQUEST)


_STAND_INS: dict[torch.device, tuple[int, int]] = {}


def stand_in(capability: tuple[int, int]) -> torch.device:
    """A device that stands for a GPU of this compute capability that is not here, in questions to dispatch."""
    device = torch.device("cuda", 10 * capability[0] + capability[1])
    _STAND_INS[device] = capability
    return device


@functools.cache
def device_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU, (0, 0) for any other device.

    torch calls AMD's GPUs "cuda" as well, and gives gfx90a the capability of Hopper.

    Raises:
        ValueError: the GPU is not on this machine.
    """
    if device in _STAND_INS:
        return _STAND_INS[device]
    if device.type != "cuda" or torch.version.hip is not None:
        return (0, 0)
    try:
        return torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError) as error:
        here = f"dispatch: {device} is not on this machine"
        raise ValueError(f"{here}: dispatch.stand_in((9, 0)) stands for a GPU elsewhere") from error


@functools.cache
def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing it."""
    return importlib.util.find_spec(module) is not None


def _backend_reason(backend: str, call: Call) -> str | None:
    """A reason against a whole backend, found before anything of it is imported."""
    if backend == "triton" and not is_installed("triton"):
        return Missing("Triton is not installed: pip install triton")
    if backend == "triton" and call.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return Missing(
            "Triton runs on CPU tensors only in its interpreter: set TRITON_INTERPRET=1 before the first call"
        )
    if backend in ("hopper", "flash_mla") and device_capability(call.device) != (9, 0):
        return f"it needs a Hopper GPU (compute capability 9.0), these tensors are on {call.device}"
    return None


# Lowerings that raised `LoweringUnavailable`: (backend, op) to its message.
_struck_off: dict[tuple[str, str], Missing] = {}
_lock = threading.Lock()


def strike_off(call: Call, lowering: Lowering, error: LoweringUnavailable) -> None:
    """No call of this op runs `lowering` from now on, in any thread of this process."""
    if not lowering.backend:
        raise error  # dispatch would choose it again
    with _lock:
        _struck_off.setdefault((lowering.backend, call.op), Missing(error))
    # Also where it was struck off before: another thread may since have remembered a choice that it began earlier.
    _choose.cache_clear()


@functools.cache
def _lowering(backend: str, op: str) -> Lowering | None:
    module = f"{__package__}.kernels.{backend}.{FAMILIES[op]}"
    if backend in ADAPTERS:
        module = f"{__package__}.kernels.{backend}"
    try:
        lowerings = importlib.import_module(module).LOWERINGS
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith(f"{__package__}."):
            return None
        raise
    found = lowerings.get(op)
    return None if found is None else replace(found, backend=backend)


def unsupported_reason(backend: str, call: Call) -> str | None:
    """Why `backend` cannot run `call`, or None if it can."""
    reason = _backend_reason(backend, call)
    if reason is not None:
        return reason
    lowering = _lowering(backend, call.op)
    if lowering is None:
        return f"there is no {backend} lowering of {call.op}"
    if call.deterministic and not lowering.deterministic:
        return "it is not deterministic: the bits of a row's results may depend on the other rows"
    return lowering.unsupported_reason(call) or _struck_off.get((backend, call.op))


def passed_over_reason(backend: str, call: Call) -> str | None:
    """Why `backend` makes way for another, though it can run `call`; None if it does not."""
    known = PASSED_OVER.get((backend, call.op))
    return known(call) if known is not None else None


def _parse_environment(value: str) -> dict[str, str]:
    """`"triton"` for every op, or `"op=backend,op=backend"`."""
    chosen: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in value.split(","))):
        op, _, backend = part.rpartition("=")
        chosen[op or "*"] = backend
    _check_override(chosen, f"environment variable {ENVIRONMENT_VARIABLE}")
    return chosen


def _check_override(chosen: dict[str, str], where: str) -> None:
    for op, backend in chosen.items():
        if op != "*" and op not in FAMILIES:
            raise ValueError(f"{where}: unknown op '{op}', expected one of {sorted(FAMILIES)}")
        if backend not in BACKENDS:
            raise ValueError(f"{where}: unknown lowering '{backend}', expected one of {BACKENDS}")


_overrides: ContextVar[Mapping[str, str]] = ContextVar(
    "mla_ops overrides", default=MappingProxyType(_parse_environment(os.environ.get(ENVIRONMENT_VARIABLE, "")))
)


@contextlib.contextmanager
def override(lowering: str | None = None, **by_op: str) -> Iterator[None]:
    """Forces a lowering for the calls made inside the block (also those of compiled code that runs inside it).

    The block is this thread's, or this asyncio task's: calls of other threads choose as before.

    Args:
        lowering: for every op, e.g. `"triton"`.
        **by_op: for single ops, all overloads, e.g. `paged_sparse_attention="triton"`; wins over `lowering`.

    Raises:
        ValueError: unknown op or lowering. A call that the forced lowering cannot run raises NotImplementedError.
    """
    chosen = dict(by_op) if lowering is None else {"*": lowering, **by_op}
    _check_override(chosen, "dispatch.override")
    token = _overrides.set({**({} if lowering is not None else _overrides.get()), **chosen})
    try:
        yield
    finally:
        _overrides.reset(token)


def _forced(op: str) -> str | None:
    overrides = _overrides.get()
    if not overrides:
        return None
    return overrides.get(op) or overrides.get(op.partition(".")[0]) or overrides.get("*")


@functools.lru_cache(maxsize=16384)
def _choose(call: Call, forced: str | None) -> str:
    if forced is not None:
        reason = unsupported_reason(forced, call)
        if reason is not None:
            raise NotImplementedError(f"{call.op}: the lowering '{forced}' was asked for, but {reason}")
        return forced
    refused: dict[str, str] = {}
    for backend in order_for(call.op, call.device):
        reason = unsupported_reason(backend, call) or passed_over_reason(backend, call)
        if reason is None:
            _tell_what_is_missing(call, backend, refused)
            return backend
        refused[backend] = reason
    reasons = "; ".join(f"{backend}: {reason}" for backend, reason in refused.items())
    raise NotImplementedError(f"{call.op}: no lowering can run this call on {call.device}. {reasons}")


_told: set[tuple[str, str]] = set()


def _tell_what_is_missing(call: Call, chosen: str, refused: dict[str, str]) -> None:
    """Logs, once for an op, the fastest lowering that the user could have had instead of `chosen`."""
    for backend, reason in refused.items():
        if isinstance(reason, Missing) and passed_over_reason(backend, call) is None:
            with _lock:
                first = (backend, call.op) not in _told
                _told.add((backend, call.op))
            if first:
                logger.warning(
                    "%s runs the lowering '%s' on %s. '%s' is faster, but %s",
                    call.op,
                    chosen,
                    call.device,
                    backend,
                    reason,
                )
            return


def select_name(call: Call) -> str:
    """Name of the lowering that runs `call`. Raises NotImplementedError, with every reason, if there is none."""
    return _choose(call, _forced(call.op))


def select(call: Call) -> Lowering:
    """The lowering that runs `call`."""
    lowering = _lowering(select_name(call), call.op)
    assert lowering is not None
    return lowering


@dataclass(frozen=True)
class Explanation:
    """Why a call runs where it does. `print` it."""

    call: Call
    chosen: str | None
    forced: bool
    refused: dict[str, str]

    def __str__(self) -> str:
        how = "forced" if self.forced else "first without a reason against it"
        lines = [f"{self.call.op}: {self.chosen or 'no lowering'}" + (f" ({how})" if self.chosen else "")]
        lines += [f"  not {backend}: {reason}" for backend, reason in self.refused.items()]
        return "\n".join(lines)


def explain(call: Call) -> Explanation:
    """Which lowering runs `call`, and why not each of the others.

    `call` comes from `mla_ops.registry.describe("paged_sparse_attention", q, kv_cache, indices, softmax_scale,
    cache_format)`, or is written by hand; `dispatch.stand_in((9, 0))` is a Hopper GPU that need not be here.

    Raises:
        TypeError, ValueError: it is no `Call`, or has an unknown op or a missing GPU.
    """
    if not isinstance(call, Call):
        raise TypeError(f"dispatch.explain: call must be what registry.describe gives, got {type(call).__name__}")
    if call.op not in FAMILIES:
        raise ValueError(f"dispatch.explain: unknown op '{call.op}', expected one of {sorted(FAMILIES)}")
    call = call._replace(device=torch.device(call.device))
    forced = _forced(call.op)
    backends = (forced,) if forced else order_for(call.op, call.device)
    chosen: str | None = None
    refused: dict[str, str] = {}
    for backend in BACKENDS:
        reason = unsupported_reason(backend, call) or (None if forced else passed_over_reason(backend, call))
        if reason is not None:
            refused[backend] = reason
        elif backend not in backends:
            why = ON_REQUEST.get((backend, call.op))
            refused[backend] = f"runs on {call.device.type} only when asked for with dispatch.override" + (
                f": {why}" if why else ""
            )
    for backend in backends:
        if backend not in refused:
            chosen = backend
            break
    for backend in backends:
        if chosen is not None and backend != chosen and backend not in refused:
            refused[backend] = f"comes after {chosen}"
    return Explanation(call, chosen, forced is not None, refused)


_PAGED_INDEX = {"dtype": torch.float8_e4m3fn, "cache_format": "fp8_index", "num_heads": 64, "block_size": 64}

# A call of each op that the lowering depends on: decode and prefill of DeepSeek-V3.2, of V4 for what is V4's.
TYPICAL: dict[str, dict[str, Any]] = {
    "concat_and_cache": {"cache_format": "fp8_ds_mla"},
    "gather_cache": {"cache_format": "fp8_ds_mla"},
    "paged_sparse_attention": {"cache_format": "fp8_ds_mla", "head_dim": 576, "topk": 2048},
    "paged_sparse_attention.extra": {
        "cache_format": "fp8_ds_mla_v4",
        "head_dim": 512,
        "topk": 128,
        "extra_cache_format": "fp8_ds_mla_v4",
        "extra_topk": 512,
    },
    "sparse_attention": {"head_dim": 576, "topk": 2048},
    "paged_attention": {"cache_format": "bf16", "head_dim": 576, "topk": 8192, "block_size": 64},
    "prefill_attention": {"head_dim": 192, "head_dim_v": 128},
    "merge_attention_states": {"head_dim": 512},
    "merge_attention_states.stacked": {"head_dim": 512},
    "compress_and_cache": {"cache_format": "fp8_ds_mla_v4", "head_dim": 512},
    "write_index_cache": {"cache_format": "fp8_index"},
    "gather_index_cache": {"cache_format": "fp8_index", "dtype": torch.uint8},
    "quantize_index_query": {"num_heads": 64},
    "indexer_logits": {"dtype": torch.float8_e4m3fn, "num_heads": 64, "num_keys": 8192},
    "paged_indexer_logits": {**_PAGED_INDEX, "num_keys": 65536},
    "topk_indices": {"dtype": torch.float32, "topk": 2048, "num_keys": 65536},
    "select_keys": {**_PAGED_INDEX, "topk": 2048, "num_keys": 16384},
    "select_keys.flat": {"dtype": torch.float8_e4m3fn, "num_heads": 64, "topk": 2048, "num_keys": 8192},
    "merge_topk": {"dtype": torch.float32, "topk": 2048, "num_keys": 4096},
}


def typical_call(op: str, device: torch.device) -> Call:
    """One that users make, for what is said of an op in general: bfloat16, 128 heads, 1 token."""
    return Call(op, device, torch.bfloat16, num_heads=128, num_tokens=1)._replace(**TYPICAL.get(op, {}))


def has_lowering(backend: str, op: str) -> bool:
    """Whether `backend` has a lowering of `op`; True where its library would have to be there to know."""
    try:
        return _lowering(backend, op) is not None
    except ImportError:
        return True


class Availability(NamedTuple):
    """Says what `backend` does for a typical call of `op`: it has no lowering, it refuses and why, or it runs."""

    op: str
    backend: str
    exists: bool
    reason: str | None
    runs: bool


def report(device: torch.device | str) -> list[Availability]:
    """Every op and backend, for a typical call of the op on `device`."""
    device = torch.device(device)
    rows: list[Availability] = []
    for op in FAMILIES:
        call = typical_call(op, device)
        explanation = explain(call)
        for backend in BACKENDS:
            exists, runs = has_lowering(backend, op), backend == explanation.chosen
            rows.append(Availability(op, backend, exists, unsupported_reason(backend, call), runs))
    return rows
