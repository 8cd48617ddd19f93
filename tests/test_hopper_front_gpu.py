"""Indexer kernels on Hopper begin beside the end of what is in front of them, and read nothing before that is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from test_hopper_select_gpu import FORMAT, INT32, Paged, paged

from mla_ops import dispatch

pytestmark = pytest.mark.gpu

Results = tuple[torch.Tensor, ...]
COLUMNS = 2**20  # a sum over as many takes a while, and writes at its end


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs SM90")
    with dispatch.override("hopper"):
        yield


class Fronts:
    """Ways to write lengths: `wanted` is what they become."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self.lengths, self.wanted = lengths, torch.zeros_like(lengths)
        self.wide = torch.zeros(len(lengths), COLUMNS, **INT32)

    def kernel(self) -> None:
        self.wide[:, -1] = self.wanted
        torch.sum(self.wide, 1, dtype=torch.int32, out=self.lengths)

    def copy(self) -> None:
        torch.cuda._sleep(50000)
        self.lengths.copy_(self.wanted)

    def another_stream(self) -> None:
        beside, now = torch.cuda.Stream(), torch.cuda.current_stream()
        beside.wait_stream(now)
        torch.cuda._sleep(20000)
        with torch.cuda.stream(beside):
            self.kernel()
        now.wait_stream(beside)

    def both_streams(self) -> None:
        """The launch in front is of this stream, and of another one."""
        beside, now = torch.cuda.Stream(), torch.cuda.current_stream()
        beside.wait_stream(now)
        with torch.cuda.stream(beside):
            torch.cuda._sleep(50000)
        self.kernel()
        now.wait_stream(beside)

    def nothing(self) -> None:
        """Lengths stay as they are."""


def scores_of(case: Paged) -> Results:
    width = case.table.shape[1] * 64
    out = torch.ops.mla.paged_indexer_logits(*case, width, FORMAT)
    live = torch.arange(width, device="cuda") < case.lengths[:, None]
    return (torch.where(live, out, 0),)


def best_of(case: Paged, scores: torch.Tensor) -> Results:
    return torch.ops.mla.topk_indices(scores, 512, row_ends=case.lengths)


@pytest.mark.parametrize("way", ["kernel", "copy", "another_stream", "both_streams", "nothing"])
@pytest.mark.parametrize("step", ["scores", "topk", "selection"])
@pytest.mark.parametrize(("num_requests", "length"), [(1, 131072), (16, 4096), (4, 32768), (200, 20000)])
def test_what_is_in_front_is_over(num_requests: int, length: int, step: str, way: str) -> None:
    case = paged(num_requests, 1, 64, 64, length)
    scores = torch.randn(num_requests, case.table.shape[1] * 64, device="cuda")
    run: dict[str, Callable[[], Results]] = {
        "scores": lambda: scores_of(case),
        "topk": lambda: best_of(case, scores),
        "selection": lambda: case.select(512),
    }
    front = Fronts(case.lengths)

    def several() -> list[Results]:
        results = []
        for _ in range(3):
            getattr(front, way)()
            results.append(run[step]())
            case.lengths.fill_(7)  # not before they have been read
            front.wanted.mul_(-1).add_(length)
        return results

    def expected(lengths: torch.Tensor) -> Results:
        case.lengths.copy_(lengths)
        torch.cuda.synchronize()
        results = run[step]()
        torch.cuda.synchronize()
        return results

    def begin(lengths: torch.Tensor) -> None:
        case.lengths.copy_(lengths)
        front.wanted.copy_(lengths)
        torch.cuda.synchronize()

    first = torch.randint(0, length + 1, (num_requests,), **INT32)
    if way == "nothing":
        wants = [first, torch.full_like(first, 7), torch.full_like(first, 7)]
    else:
        wants = [first, length - first, first]
    expected_of = [expected(lengths) for lengths in wants]
    graph = torch.cuda.CUDAGraph()
    begin(first)
    eager = several()
    with torch.cuda.graph(graph):
        captured = several()
    for results in (eager, captured):
        if results is captured:
            begin(first)
            graph.replay()
        for got, want in zip(results, expected_of, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
