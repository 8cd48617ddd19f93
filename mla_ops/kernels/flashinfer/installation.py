"""The installed FlashInfer: whether it is there, and its classes and functions by name."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ...dispatch import Missing, is_installed

# FlashInfer looks for nvcc here besides the environment and the path
DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
# The adapters use these; a version must take these arguments, of `plan` or of the function itself
WANTED: dict[str, tuple[str, ...]] = {
    "BatchPrefillWithRaggedKVCacheWrapper": ("head_dim_vo", "sm_scale", "kv_data_type"),
    "BatchMLAPagedAttentionWrapper": ("head_dim_ckv", "head_dim_kpe", "kv_data_type"),
    "single_prefill_with_kv_cache": ("causal", "sm_scale", "return_lse"),
    # the second since 0.7.1, whose kernels read zeros for a masked key: before, slot 0, whatever stands there
    "SparseMLASm120Wrapper": ("kv_scale_format", "compute_precision"),
    "trtllm_batch_decode_with_kv_cache_mla": ("sparse_mla_top_k", "return_lse", "multi_ctas_kv_counter_buffer"),
}


def _has_nvcc() -> bool:
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or shutil.which("nvcc")
    return bool(named) or DEFAULT_CUDA_HOME.exists()


def missing_installation() -> Missing | None:
    """The packages that a user has to install for FlashInfer's kernels."""
    if not is_installed("flashinfer"):
        return Missing("FlashInfer is not installed: pip install flashinfer-python")
    if not (is_installed("flashinfer_jit_cache") or _has_nvcc()):
        return Missing(
            "FlashInfer compiles its kernels with nvcc, which was not found; nor was flashinfer-jit-cache: "
            "install one of them"
        )
    return None


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def api(name: str) -> Any:
    """A class or function of FlashInfer, imported by the first call that needs it, with the arguments used here."""
    module = importlib.import_module("flashinfer.prefill" if "refill" in name else "flashinfer.mla")
    found: Any = getattr(module, name, None)
    if found is None:
        raise NotImplementedError(f"the installed FlashInfer has no {module.__name__}.{name}: install a newer one")
    taken = inspect.signature(getattr(found, "plan", found)).parameters
    missing = [argument for argument in WANTED[name] if argument not in taken]
    if missing:
        raise NotImplementedError(
            f"{module.__name__}.{name} of the installed FlashInfer takes no {', '.join(missing)}: install a newer one"
        )
    return found
