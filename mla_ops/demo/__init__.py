"""`python -m mla_ops demo`: a transformers DeepSeek-V3.2 reads a text and continues it through `torch.ops.mla.*`."""

from .run import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
