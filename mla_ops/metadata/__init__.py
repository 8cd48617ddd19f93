"""The persistent buffers that a captured step reads, and the builder that refreshes them."""

from .schedule import SparseSchedule
from .step import StepMetadata
from .v4 import CompressedMetadata, V4StepMetadata

__all__ = ["CompressedMetadata", "SparseSchedule", "StepMetadata", "V4StepMetadata"]
