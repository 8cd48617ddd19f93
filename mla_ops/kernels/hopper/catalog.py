"""Every kernel of this folder: what a wheel has machine code of."""

from __future__ import annotations

from . import launch, merge_parts, plan, prefill_attention
from .launch import Kernel


def every_kernel() -> list[Kernel]:
    """Each once."""
    attention = [kernel for keys in launch.KERNELS.values() for kernel in keys.kernels()]
    return [*attention, *merge_parts.kernels(), *prefill_attention.kernels(), *plan.KERNELS]
