"""The lightning indexer's choice with fp8 and without: python -m mla_ops bench indexer_quality.

The demo's model reads its text in float32. Each layer's index queries and keys are scored three times: in float32, in
bfloat16, and quantised to `fp8_index`. The first table says how many keys of the float32 choice the others choose, how
far below the float32 choice their worst key lies, and how exact the scores of the same quantised inputs are. The second
table says what these choices do to the model's predictions; latents, attention and experts stay float32 there.

The weights are random. Scores of a trained model are further apart, so that fewer keys change places.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from mla_ops.demo.model import TEXT, build_small_model
from mla_ops.formats import INDEX_DIM, allocate_cache
from mla_ops.models import compare_logits, decoder_for, latent, teacher_forced_logits
from mla_ops.models.parts import choose_keys, prepare_index_query
from mla_ops.ops import gather_index_cache, paged_indexer_logits, write_index_cache

from . import common

FORMATS = ("bf16", "fp8_index")
UNIT = 2.0**-24  # half a unit in the last place of float32


@dataclass
class Query:
    """The arguments of `choose_keys` that a layer gave its indexer in one step, all of them float32."""

    q: torch.Tensor
    weights: torch.Tensor
    scale: float
    index_cache: torch.Tensor
    block_table: torch.Tensor
    req_id_per_token: torch.Tensor
    visible: torch.Tensor
    topk: int

    def in_format(self, index_format: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries and the cache that a model with that index format has in their place."""
        blocks, block_size, _ = self.index_cache.shape
        device = self.index_cache.device
        cache = allocate_cache(index_format, blocks, block_size, head_dim=INDEX_DIM, device=device)
        slots = torch.arange(blocks * block_size, device=device)
        write_index_cache(self.index_cache.flatten(0, 1), cache, slots, index_format)
        return self.q.to(torch.float32 if index_format == "fp8_index" else cache.dtype), cache

    def choose(self, index_format: str) -> tuple[torch.Tensor, torch.Tensor]:
        q, cache = self.in_format(index_format)
        rows = self.block_table, self.req_id_per_token, self.visible
        return choose_keys(q, self.weights, self.scale, cache, *rows, self.topk, index_format)

    def scores(self, index_format: str) -> tuple[torch.Tensor, float]:
        """Scores of `paged_indexer_logits`, and their largest error over what rounding explains.

        The error is the distance from float64 over the same quantised inputs. A score is 128 products and their sum for
        each head, a maximum, a product with the weight, the sum over heads, and a product with the key's scale.
        """
        q, cache = self.in_format(index_format)
        q, weights = prepare_index_query(q, self.weights, self.scale, index_format)
        longest = int(self.visible.max())
        rows = self.block_table, self.req_id_per_token
        scores = paged_indexer_logits(q, cache, weights, self.visible, *rows, longest, index_format, clean=True)
        one = torch.tensor([0, longest], dtype=torch.int32, device=q.device)
        keys, key_scales = gather_index_cache(cache, rows[0][:1], one[1:], one, longest, index_format)
        products = torch.einsum("thd,kd->thk", q.double(), keys.double())
        magnitudes = torch.einsum("thd,kd->thk", q.double().abs(), keys.double().abs())
        exact = torch.einsum("th,thk->tk", weights.double(), products.relu()) * key_scales.double()
        magnitude = torch.einsum("th,thk->tk", weights.double().abs(), magnitudes) * key_scales.double()
        seen = torch.arange(longest, device=q.device) < self.visible.unsqueeze(1)
        error = ((scores.double() - exact).abs()[seen] / (INDEX_DIM + q.shape[1] + 2) / UNIT / magnitude[seen]).amax()
        return scores, float(error)


@contextmanager
def choosing(index_format: str, queries: list[Query] | None = None) -> Iterator[None]:
    """Decoders over float32 caches choose what `index_format` would choose; `queries` takes what they ask."""

    def choose(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        query = Query(*arguments[:-1])
        if queries is not None:
            kept = {name: value.clone() for name, value in vars(query).items() if isinstance(value, torch.Tensor)}
            queries.append(Query(**{**vars(query), **kept}))
        return query.choose(index_format)

    with patch.object(latent, "choose_keys", choose):
        yield


def compare_choices(query: Query, index_format: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives how many keys a token sees, the overlap with float32, and the gap, for tokens that see more than they keep.

    The gap is how far the worst key that was chosen lies below the worst of the float32 choice, both by float32 scores,
    in standard deviations of the token's scores.
    """
    rows = query.visible > query.topk
    longest = int(query.visible.max())
    scores = query.scores("fp32")[0][rows]
    seen = scores.isfinite()
    chosen = []
    for name in ("fp32", index_format):
        positions = query.choose(name)[0][rows].long()
        chosen.append(
            torch.zeros(len(scores), longest, dtype=torch.bool, device=scores.device).scatter_(1, positions, 1)
        )
    best, ours = chosen
    overlap = (best & ours).sum(1) / query.topk
    worst_best, worst_ours = (scores.masked_fill(~mask, torch.inf).amin(1) for mask in (best, ours))
    count = seen.sum(1)
    finite = scores.masked_fill(~seen, 0.0)
    mean = finite.sum(1) / count
    deviation = (((finite - mean.unsqueeze(1)) * seen).square().sum(1) / count).sqrt()
    return count, overlap, (worst_best - worst_ours) / deviation


def main(argv: list[str] | None = None) -> int:
    """Prints both tables; returns the exit status: 1 if a score is further from float64 than rounding explains."""
    parser = argparse.ArgumentParser(
        prog="bench indexer_quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the text")
    parser.add_argument("--quick", action="store_true", help="a smaller model and a short text")
    arguments = parser.parse_args(argv)
    sizes: dict[str, Any] = (
        {"hidden_size": 64, "num_heads": 4, "index_heads": 4, "index_topk": 32} if arguments.quick else {}
    )
    num_tokens = min(arguments.tokens, 160) if arguments.quick else arguments.tokens
    model = build_small_model(num_layers=2, max_position_embeddings=num_tokens, **sizes).to(arguments.device)
    decoder = decoder_for(model, num_tokens)
    text = (list(TEXT.read_bytes()) * (num_tokens // TEXT.stat().st_size + 1))[:num_tokens]

    queries: list[Query] = []
    with choosing("fp32", queries):
        expected = teacher_forced_logits(decoder, text, "fp32")
    config = decoder.config
    machine = common.describe_machine(torch.device(arguments.device))
    print("indexer_quality: " + ", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"{num_tokens} tokens, {config.num_hidden_layers} layers, {config.index_n_heads} index heads,", end=" ")
    print(f"top-k {config.index_topk}, random weights\n")
    print(
        f"{'keys seen':<14}{'index keys':<12}{'overlap':>9}{'least':>9}{'gap':>9}{'largest':>9}  score error over bound"
    )
    right = True
    ends = [config.index_topk * 2**power for power in range(20) if config.index_topk * 2**power < num_tokens]
    errors = {name: max(query.scores(name)[1] for query in queries) for name in FORMATS}
    for name in FORMATS:
        right = right and errors[name] <= 1
        counts, overlaps, gaps = (
            torch.cat(part) for part in zip(*(compare_choices(q, name) for q in queries), strict=True)
        )
        for start in ends:
            rows = (counts > start) & (counts <= 2 * start)
            overlap, gap = overlaps[rows], gaps[rows]
            print(
                f"{f'{start + 1} to {2 * start}':<14}{name:<12}{overlap.mean():>9.4f}{overlap.min():>9.4f}"
                f"{gap.mean():>9.4f}{gap.max():>9.4f}  {errors[name]:.2g}"
            )
    print(f"\n{'index keys':<12}{'same token':>12}{'mean KL':>12}{'largest KL':>12}{'logits, relative':>18}")
    for name in FORMATS:
        with choosing(name):
            found = compare_logits(expected, teacher_forced_logits(decoder, text, "fp32"))
        print(f"{name:<12}{found.top1:>24.4f}{found.mean_kl:>16.2e}{found.max_kl:>12.2e}{found.relative_error:>18.2e}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
