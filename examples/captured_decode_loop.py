"""A decode loop replayed from one CUDA graph while requests grow, finish and arrive.

On a GPU, the step is captured once, at its largest batch; each replay sees new lengths, new block tables and fewer or
more live requests through buffers that are refreshed in place. Without a GPU the same step runs eagerly on the same
buffers. Either way every step is compared with a plain, unpadded call on caches of its own.

    python examples/captured_decode_loop.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import mla_ops

CACHE_FORMAT = "fp8_ds_mla"
LATENT_DIM, ROPE_DIM = 512, 64
HEAD_DIM = LATENT_DIM + ROPE_DIM
SOFTMAX_SCALE = 192**-0.5  # heads before absorption are 128 + ROPE_DIM wide
HIDDEN, NUM_HEADS, NUM_LAYERS = 256, 16, 2
BLOCK_SIZE, NUM_BLOCKS, BLOCKS_PER_REQUEST = 64, 64, 8
MAX_REQUESTS, TOPK = 4, 128


class Model(torch.nn.Module):
    """Layers of absorbed sparse MLA with random weights. It is traced whole: torch.compile(model, fullgraph=True)."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()

        def weights(inputs: int, outputs: int) -> torch.nn.ParameterList:
            matrices = [torch.randn(outputs, inputs) * inputs**-0.5 for _ in range(NUM_LAYERS)]
            return torch.nn.ParameterList(
                [torch.nn.Parameter(matrix.to(device, torch.bfloat16), requires_grad=False) for matrix in matrices]
            )

        self.w_kv = weights(HIDDEN, HEAD_DIM)
        self.w_q = weights(HIDDEN, NUM_HEADS * HEAD_DIM)
        self.w_o = weights(NUM_HEADS * LATENT_DIM, HIDDEN)

    def forward(self, hidden: torch.Tensor, caches: list[torch.Tensor], metadata: mla_ops.StepMetadata) -> torch.Tensor:
        """`[num_tokens, HIDDEN]` to the same; writes the tokens' keys into one cache a layer."""
        # A stand-in for the indexer: the newest TOPK positions of the token's request, request-local. The first
        # topk_length of them exist, and the op ignores the others.
        recent = torch.arange(TOPK, dtype=torch.int32, device=hidden.device)
        indices = metadata.positions.unsqueeze(1) - recent
        for w_kv, w_q, w_o, kv_cache in zip(self.w_kv, self.w_q, self.w_o, caches, strict=True):
            normed = F.rms_norm(hidden, (HIDDEN,))
            kv_c, k_pe = F.linear(normed, w_kv).split((LATENT_DIM, ROPE_DIM), dim=1)
            mla_ops.concat_and_cache(kv_c, k_pe, kv_cache, metadata.slot_mapping, CACHE_FORMAT)
            out, _ = mla_ops.paged_sparse_attention(
                F.linear(normed, w_q).view(-1, NUM_HEADS, HEAD_DIM),
                kv_cache,
                indices,
                SOFTMAX_SCALE,
                CACHE_FORMAT,
                topk_length=metadata.topk_length,
                block_table=metadata.block_table,
                req_id_per_token=metadata.req_id_per_token,
            )
            hidden = hidden + F.linear(out.flatten(1), w_o)
        return hidden


def allocate_caches(device: torch.device) -> list[torch.Tensor]:
    """One tensor a layer, not views of one pool."""
    return [mla_ops.allocate_cache(CACHE_FORMAT, NUM_BLOCKS, BLOCK_SIZE, device=device) for _ in range(NUM_LAYERS)]


def allocate_metadata(max_num_tokens: int, max_num_requests: int, device: torch.device) -> mla_ops.StepMetadata:
    return mla_ops.StepMetadata.allocate(
        max_num_tokens=max_num_tokens,
        max_num_requests=max_num_requests,
        max_blocks_per_request=BLOCKS_PER_REQUEST,
        block_size=BLOCK_SIZE,
        index_topk=TOPK,
        device=device,
    )


# [start:step]
class DecodeStep:
    """One decode step at full capacity over persistent buffers, captured once if there is a GPU."""

    def __init__(self, model: Callable[..., torch.Tensor], caches: list[torch.Tensor], device: torch.device) -> None:
        self.metadata = allocate_metadata(MAX_REQUESTS, MAX_REQUESTS, device)
        self.hidden = torch.zeros(MAX_REQUESTS, HIDDEN, dtype=torch.bfloat16, device=device)
        self.out = torch.zeros_like(self.hidden)

        def step() -> None:
            self.out.copy_(model(self.hidden, caches, self.metadata))

        if device.type != "cuda":
            self.run: Callable[[], None] = step
            return
        # Nothing may compile during the capture. The metadata still says that every row is padding, so these runs
        # write nothing to the caches.
        mla_ops.warmup(
            cache_format=CACHE_FORMAT, num_heads=NUM_HEADS, topk=TOPK, num_tokens=[MAX_REQUESTS], device=device
        )
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        self.run = graph.replay

    def __call__(
        self, hidden: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> torch.Tensor:
        """Runs the step for the live requests; the rest of the batch is padding."""
        num_tokens = hidden.shape[0]
        self.metadata.build(query_start_loc, seq_lens, block_table)
        self.hidden[:num_tokens].copy_(hidden)
        self.run()
        return self.out[:num_tokens]


# [end:step]


@dataclass
class Request:
    """One request of the toy scheduler: its blocks and how many tokens it has."""

    blocks: list[int]
    length: int
    remaining: int


class Batch:
    """The state that changes from step to step: requests, their lengths and their blocks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free = torch.randperm(NUM_BLOCKS).tolist()
        self.requests: list[Request] = []

    def admit(self, length: int, steps: int) -> Request:
        """A request with `length` prompt tokens that decodes for `steps` steps."""
        needed = -(-(length + steps) // BLOCK_SIZE)
        request = Request([self.free.pop() for _ in range(needed)], length, steps)
        self.requests.append(request)
        return request

    def retire(self) -> None:
        """Frees the blocks of the requests that are done, for others to overwrite."""
        for request in self.requests:
            if request.remaining == 0:
                self.free += request.blocks
        self.requests = [request for request in self.requests if request.remaining]

    def step_inputs(self, requests: list[Request], query_lens: list[int]) -> tuple[torch.Tensor, ...]:
        """query_start_loc, seq_lens and block_table; lengths include the new tokens."""
        starts = [0]
        for query_len in query_lens:
            starts.append(starts[-1] + query_len)
        width = max(len(request.blocks) for request in requests)
        table = [request.blocks + [-1] * (width - len(request.blocks)) for request in requests]
        lengths = [request.length for request in requests]
        return tuple(torch.tensor(values, dtype=torch.int32, device=self.device) for values in (starts, lengths, table))


def plain_step(
    model: Model, caches: list[torch.Tensor], hidden: torch.Tensor, inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """The same step without padding or capture, on metadata of exactly its size."""
    metadata = allocate_metadata(hidden.shape[0], inputs[1].shape[0], hidden.device)
    metadata.build(*inputs)
    return model(hidden, caches, metadata)


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    """Runs the loop and compares every step; returns the exit status."""
    parser = argparse.ArgumentParser(description="A decode loop replayed from one CUDA graph.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--compile", action="store_true", help="also trace the model with torch.compile(fullgraph=True)"
    )
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    torch.manual_seed(0)

    model = Model(device)
    caches, plain_caches = allocate_caches(device), allocate_caches(device)
    compiled = torch.compile(model, fullgraph=True) if arguments.compile else model
    decode = DecodeStep(compiled, caches, device)
    batch = Batch(device)

    def tokens(count: int) -> torch.Tensor:
        return torch.randn(count, HIDDEN, device=device).to(torch.bfloat16)

    def prefill(length: int, steps: int) -> None:
        """Prefill is the same call with more tokens, so it runs eagerly on metadata of its own size."""
        request = batch.admit(length, steps)
        hidden, inputs = tokens(length), batch.step_inputs([request], [length])
        for layer_caches in (caches, plain_caches):
            plain_step(model, layer_caches, hidden, inputs)

    arrivals = {0: [(100, 5), (3, 9), (64, 4)], 4: [(200, 6)], 6: [(1, 3), (130, 6)]}
    worst = 0.0
    for step in range(arguments.steps):
        batch.retire()
        for length, steps in arrivals.get(step, []):
            prefill(length, steps)
        if not batch.requests:
            break
        for request in batch.requests:
            request.length += 1
            request.remaining -= 1
        num_tokens = len(batch.requests)
        hidden, inputs = tokens(num_tokens), batch.step_inputs(batch.requests, [1] * num_tokens)
        out = decode(hidden, *inputs).float()
        expected = plain_step(model, plain_caches, hidden, inputs).float()
        error = float((out - expected).abs().max() / expected.abs().max())
        worst = max(worst, error)
        lengths = ", ".join(str(request.length) for request in batch.requests)
        print(f"step {step:>2}: {num_tokens} of {MAX_REQUESTS} rows live, lengths {lengths}; difference {error:.1e}")
    how = "replayed from one CUDA graph" if device.type == "cuda" else "run eagerly (no GPU, nothing to capture)"
    print(f"{how}; largest difference from the plain step {worst:.1e}")
    # two layers in bfloat16: a few roundings of 2^-8 each may fall differently for another batch size
    return 0 if worst < 2**-5 else 1


if __name__ == "__main__":
    sys.exit(main())
