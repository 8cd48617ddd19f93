"""The classes that `register` names. vLLM imports this where it makes a layer with one of them.

One name serves sparse and dense models: `MLAOpsBackend` is worked out from the model at hand, since the interface of
vLLM 0.24 has one free place.
"""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

from vllm.config import get_current_vllm_config_or_none

from .dense import DenseBackend
from .prefill import PrefillBackend as MLAOpsPrefillBackend

if importlib.util.find_spec("vllm.model_executor.layers.attention.sparse_mla_attention") is not None:
    from .sparse_common import SparseBackend
else:
    from .sparse_separate import SparseBackend

__all__ = [
    "FlashMLABackend",
    "FlashMLASparseBackend",
    "MLAOpsDenseBackend",
    "MLAOpsPrefillBackend",
    "MLAOpsSparseBackend",
]


class MLAOpsSparseBackend(SparseBackend):
    """Sparse attention under our name."""


class MLAOpsDenseBackend(DenseBackend):
    """Dense decode under our name."""

    @staticmethod
    def get_name() -> str:
        return SparseBackend.get_name()


class FlashMLASparseBackend(SparseBackend):
    """Sparse attention in the place of vLLM's own: `fp8` means `fp8_ds_mla` for it."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = [*SparseBackend.supported_kv_cache_dtypes, "fp8"]

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA_SPARSE"


class FlashMLABackend(DenseBackend):
    """Dense decode in the place of vLLM's own."""

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA"


def __getattr__(name: str) -> Any:
    if name != "MLAOpsBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    sparse = model is not None and hasattr(model.hf_text_config, "index_topk")
    return MLAOpsSparseBackend if sparse else MLAOpsDenseBackend
