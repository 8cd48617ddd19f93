"""What test suites import: sample inputs of every op, error bounds, and checks that `opcheck` does not make."""

from .samples import Sample, op_names, output_names, sample_inputs

__all__ = ["Sample", "op_names", "output_names", "sample_inputs"]
