"""The ops in real models of Hugging Face transformers, which only the demo imports."""

from .decoder import Decoder, decoder_for
from .evaluate import Agreement, compare_logits, stock_generate, teacher_forced_logits
from .generate import GenerationResult, GenerationSession, TokenEvent
from .latent import DecoderCache, LayerCache, StepInputs
from .supported import SUPPORTED
from .windowed import WindowedCache, WindowedInputs, WindowedLayerCache

__all__ = [
    "SUPPORTED",
    "Agreement",
    "Decoder",
    "DecoderCache",
    "GenerationResult",
    "GenerationSession",
    "LayerCache",
    "StepInputs",
    "TokenEvent",
    "WindowedCache",
    "WindowedInputs",
    "WindowedLayerCache",
    "compare_logits",
    "decoder_for",
    "stock_generate",
    "teacher_forced_logits",
]
