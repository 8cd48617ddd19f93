"""The persistent buffers that a captured step reads, and the builder that refreshes them."""

from .step import StepMetadata

__all__ = ["StepMetadata"]
