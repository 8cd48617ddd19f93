"""The ops in real models: Hugging Face transformers' DeepSeek-V3.2, which only the demo imports."""

from .deepseek_v32 import DecoderCache, DeepseekV32Decoder, LayerCache, StepInputs
from .evaluate import Agreement, compare_logits, stock_generate, teacher_forced_logits
from .generate import GenerationResult, GenerationSession

__all__ = [
    "Agreement",
    "DecoderCache",
    "DeepseekV32Decoder",
    "GenerationResult",
    "GenerationSession",
    "LayerCache",
    "StepInputs",
    "compare_logits",
    "stock_generate",
    "teacher_forced_logits",
]
