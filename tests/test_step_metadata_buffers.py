"""`StepMetadata` and its kin: what `check` finds, moving, comparing, and `torch.export` with one as an argument."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch._dynamo.testing

import mla_ops
from mla_ops.formats import allocate_cache


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def built(
    starts: tuple[int, ...] = (0, 3, 5), lengths: tuple[int, ...] = (3, 20), table: Any = ([4, -1], [1, 2])
) -> mla_ops.StepMetadata:
    metadata = mla_ops.StepMetadata.allocate(
        max_num_tokens=8, max_num_requests=4, max_blocks_per_request=2, block_size=16, index_topk=4
    )
    metadata.build(int32(*starts), int32(*lengths), int32(*table))
    return metadata


def test_check_passes_for_a_step_that_fits() -> None:
    built().check()
    built().check(num_blocks=5)
    built((0, 0, 8), (7, 32)).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"starts": (0, 3, 9)}, "the step has 9 tokens, max_num_tokens is 8: the rest is cut off"),
        ({"lengths": (2, 20)}, "request 0 has 3 query tokens, but seq_lens has 2 with them"),
        ({"lengths": (3, 33)}, "request 1 has 33 tokens, .* 2 blocks of 16: the table is 2 wide"),
        ({"lengths": (17, 20)}, "request 0 has 17 tokens, .* 1 blocks of 16: entry 1 is -1"),
        ({"starts": (0, 3, 2)}, "query_start_loc must ascend from 0"),
        ({"lengths": (2, 33)}, "request 0 has 3 query.*; request 1 has 33 tokens"),
    ],
    ids=["too many tokens", "more queries than tokens", "past the table", "no block", "descending", "two at once"],
)
def test_check_says_which_request_does_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^StepMetadata.check: {message}"):
        built(**changes).check()


def test_check_finds_blocks_past_the_cache() -> None:
    with pytest.raises(ValueError, match=r"request 0 has 3 tokens, .* 0 blocks of 16: entry 0 is 4"):
        built().check(num_blocks=4)


def test_metadata_compares_by_value_and_does_not_raise() -> None:
    a, b = built(), built()
    assert a == b
    assert a != built(lengths=(3, 21))
    assert a != "a string"
    assert len({a, b}) == 2
    v4 = [mla_ops.V4StepMetadata.allocate(max_num_tokens=4, max_num_requests=2, max_seq_len=n) for n in (256, 256, 512)]
    assert v4[0] == v4[1]
    assert v4[0] != v4[2]


def test_to_moves_every_buffer_and_keeps_the_sizes() -> None:
    metadata = mla_ops.V4StepMetadata.allocate(max_num_tokens=4, max_num_requests=2, max_seq_len=256)
    assert metadata.to("cpu") is metadata
    moved = metadata.to("meta")
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(moved) if isinstance(leaf, torch.Tensor)]
    assert len(leaves) == 18
    assert {leaf.device.type for leaf in leaves} == {"meta"}
    assert moved.step.block_size == metadata.step.block_size
    assert moved.c4a.compress_ratio == 4


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kv_cache", allocate_cache("bf16", 5, 16))

    def forward(self, q: torch.Tensor, key: torch.Tensor, metadata: mla_ops.StepMetadata) -> torch.Tensor:
        cache, table, request = self.kv_cache, metadata.block_table, metadata.req_id_per_token
        mla_ops.concat_and_cache(key[:, :512], key[:, 512:], cache, metadata.slot_mapping, "bf16")
        return mla_ops.paged_attention(q, cache, table, request, metadata.key_lens, 0.04, "bf16")[0]


def test_export_takes_metadata_as_an_argument_and_reloads() -> None:
    generator = torch.Generator().manual_seed(0)
    q, key = (torch.randn(8, *shape, generator=generator).bfloat16() for shape in ((2, 576), (576,)))
    eager = Layer()
    program = torch.export.export(Layer(), (q, key, built()))
    stream = io.BytesIO()
    torch.export.save(program, stream)
    stream.seek(0)
    loaded = torch.export.load(stream).module()
    for metadata in (built(), built((0, 1, 6), (1, 30))):
        assert torch.equal(loaded(q, key, metadata)[:5], eager(q, key, metadata)[:5])


def test_a_compiled_step_takes_metadata_and_does_not_recompile() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    layer = Layer()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    q, key = torch.randn(8, 2, 576).bfloat16(), torch.randn(8, 576).bfloat16()
    for metadata in (built(), built((0, 1, 6), (1, 30)), built().to("cpu")):
        compiled(q, key, metadata)
    assert counter.frame_count == 1
