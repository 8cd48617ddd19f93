"""The ops in real models: Hugging Face transformers' DeepSeek-V3, V3.2 and V4, which only the demo imports."""

from .deepseek_v3 import DeepseekV3Decoder, V3DecoderCache, V3LayerCache
from .deepseek_v4 import DeepseekV4Decoder, V4DecoderCache, V4LayerCache, V4StepInputs
from .deepseek_v32 import DecoderCache, DeepseekV32Decoder, LayerCache, StepInputs
from .evaluate import Agreement, compare_logits, stock_generate, teacher_forced_logits
from .generate import GenerationResult, GenerationSession

__all__ = [
    "Agreement",
    "DecoderCache",
    "DeepseekV3Decoder",
    "DeepseekV4Decoder",
    "DeepseekV32Decoder",
    "GenerationResult",
    "GenerationSession",
    "LayerCache",
    "StepInputs",
    "V3DecoderCache",
    "V3LayerCache",
    "V4DecoderCache",
    "V4LayerCache",
    "V4StepInputs",
    "compare_logits",
    "stock_generate",
    "teacher_forced_logits",
]
