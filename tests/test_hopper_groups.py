"""Groups of CTAs on Hopper: how they meet, and the counters and the room that the host gives them."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from hopper_on_cpu import NO_COMPILER, build

from mla_ops.kernels.cuda import driver
from mla_ops.kernels.hopper import groups


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build("hopper_groups.cpp", tmp_path_factory.mktemp("groups"))


def with_patience(library: ctypes.CDLL, looks: int) -> ctypes.CDLL:
    """CTAs look so often for the others before they give up."""
    ctypes.c_int.in_dll(library, "patience").value = looks
    return library


@pytest.fixture(params=[0, 1, 16])
def hasty(request: pytest.FixtureRequest, library: ctypes.CDLL) -> ctypes.CDLL:
    return with_patience(library, request.param)


@pytest.mark.skipif(NO_COMPILER, reason="there is no C++ compiler")
@pytest.mark.parametrize("launches", [1, 2, 4])
@pytest.mark.parametrize("members", [2, 3, 8, 16])
def test_each_share_is_added_up_once_when_all_parts_are_there(members: int, launches: int, hasty: ctypes.CDLL) -> None:
    """Whoever gives up; the counters are left as they were found. Without patience nearly all of them do.

    So does each of several launches that have the same counters at the same time.
    """
    assert hasty.meet(members, 200 // launches**2, members, launches) >= 0


@pytest.mark.skipif(NO_COMPILER, reason="there is no C++ compiler")
@pytest.mark.parametrize("count", [2, 3, 8, 40])
def test_each_share_of_a_cut_row_is_added_up_when_all_parts_are_there(count: int, hasty: ctypes.CDLL) -> None:
    """CTAs come to their end early and late; the counters are left as they were found."""
    assert 0 <= hasty.share(count, 100, count, 1) <= 100 * (count - 1)


@pytest.mark.skipif(NO_COMPILER, reason="there is no C++ compiler")
@pytest.mark.parametrize("launches", [2, 4])
@pytest.mark.parametrize("count", [2, 3, 8, 40])
def test_launches_that_share_a_cut_rows_counters_fail_or_are_right(
    count: int, launches: int, hasty: ctypes.CDLL
) -> None:
    """Two runs of one captured launch at the same time: no result is wrong without an error."""
    assert hasty.share(count, 400 // count // launches, count, launches) >= 0


@pytest.mark.skipif(NO_COMPILER, reason="there is no C++ compiler")
def test_a_group_without_patience_gives_up(library: ctypes.CDLL) -> None:
    assert with_patience(library, 0).meet(8, 50, 1, 1) == 50 * 7


@pytest.mark.skipif(NO_COMPILER, reason="there is no C++ compiler")
def test_the_host_gives_a_group_as_much_room_as_it_takes(library: ctypes.CDLL) -> None:
    assert library.bytes_of_counters() == groups.ROW_BYTES
    assert groups.exchange(3, 5, torch.device("cpu")).numel() == 3 * 5 * library.bytes_of_member()


def test_launches_that_may_run_beside_one_another_have_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[int] = []
    state = {"stream": 1, "capture": 0, "reused": 0}
    monkeypatch.setattr(groups, "_slots", {})
    groups._unused.cache_clear()
    monkeypatch.setattr(driver, "lasting_zeros", lambda device, size: pages.append(device) or size * len(pages))
    monkeypatch.setattr(driver, "capture_id", lambda *_: state["capture"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: state["stream"], raising=False)
    monkeypatch.setattr(driver, "stream_id", lambda *_: state["stream"] + state["reused"])
    seen = {}
    for device in (0, 1):
        for state["stream"] in (1, 2):
            for state["capture"] in range(200):
                seen[device, state["stream"], state["capture"]] = groups.counters(device, 66)
    for device in (0, 1):
        addresses = sorted(address for (index, _, _), address in seen.items() if index == device)
        assert all(later - before >= groups.SLOT_BYTES for before, later in itertools.pairwise(addresses))
    state["stream"], state["capture"] = 2, 7
    assert groups.counters(1, 1) == seen[1, 2, 7]
    assert sorted(pages) == [0, 0, 1, 1]
    state["capture"], state["reused"] = 0, 100
    assert groups.counters(1, 1) not in seen.values(), "of a stream that was destroyed"
    with pytest.raises(ValueError, match="counters for 128 rows, got 129"):
        groups.counters(0, 129)
    groups._unused.cache_clear()
