"""For test suites: sample inputs of every op, error bounds, and checks that `opcheck` does not make."""

from .samples import Sample, functional, op_names, out_overload, output_names, sample_inputs

__all__ = ["Sample", "functional", "op_names", "out_overload", "output_names", "sample_inputs"]
