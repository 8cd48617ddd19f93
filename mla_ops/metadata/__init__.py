"""The persistent buffers that a captured step reads, and the builder that refreshes them."""

from .step import StepMetadata
from .v4 import CompressedMetadata, V4StepMetadata

__all__ = ["CompressedMetadata", "StepMetadata", "V4StepMetadata"]
