"""Kernels of multi-head latent attention, sparse and dense, as PyTorch operators, `torch.ops.mla.*`.

Importing this registers every op. It imports torch and nothing else; kernels are imported by the first call that
needs them.
"""

from . import dispatch, formats, ops
from .formats import allocate_cache
from .metadata import CompressedMetadata, StepMetadata, V4StepMetadata
from .ops import *  # noqa: F403 (what `ops.__all__` lists)
from .warm_up import warmup

__version__ = "0.1.0"

__all__ = [
    "CompressedMetadata",
    "StepMetadata",
    "V4StepMetadata",
    "allocate_cache",
    "dispatch",
    "formats",
    "warmup",
]
__all__ += ops.__all__
