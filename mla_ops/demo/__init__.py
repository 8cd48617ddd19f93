"""`python -m mla_ops demo`: a transformers DeepSeek model reads a text and continues it through `torch.ops.mla.*`."""

from .run import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
