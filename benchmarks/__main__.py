"""Runs several families: python -m benchmarks [family ...] [options], all that share options if none is named."""

from __future__ import annotations

import importlib
import sys

from mla_ops import dispatch

FAMILIES = (
    "cache",
    "compressor",
    "dense_attention",
    "experts",
    "index",
    "indexer_scores",
    "indexer_select",
    "indexer_topk",
    "layer",
    "merge",
    "sparse_attention",
    "sparse_attention_extra",
    "step",
    "step_metadata",
)
# These have options of their own, and run if they are named.
BY_NAME = ("indexer_quality", "launches")
# These run a model of transformers.
OF_MODELS = ("experts", "indexer_quality", "layer")


def main(argv: list[str] | None = None) -> int:
    """Runs the families named before the first option, with all options; returns the worst exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    count = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    families, options = arguments[:count] or list(FAMILIES), arguments[count:]
    if not arguments[:count] and options[:1] in (["-h"], ["--help"]):
        print(
            "usage: bench [family ...] [options]\n\n"
            f"families: {', '.join(FAMILIES)}; all of these if none is named\n"
            f"with options of their own, run by name: {', '.join(BY_NAME)}\n"
            "bench FAMILY --help lists a family's options"
        )
        return 0
    unknown = [family for family in families if family not in (*FAMILIES, *BY_NAME)]
    if unknown:
        print(f"there is no family {', '.join(unknown)}, only {', '.join((*FAMILIES, *BY_NAME))}", file=sys.stderr)
        return 2
    of_models = [family for family in families if family in OF_MODELS and not dispatch.is_installed("transformers")]
    if of_models:
        print(f"no {', '.join(of_models)}, which need transformers: pip install 'mla-ops[models]'", file=sys.stderr)
        if arguments[:count]:
            return 2
        families = [family for family in families if family not in of_models]
    return max(importlib.import_module(f"benchmarks.{family}").main(options) for family in families)


if __name__ == "__main__":
    sys.exit(main())
