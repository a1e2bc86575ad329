"""The pool of ranks itself: results, exceptions, dead ranks and overruns, without leaving processes behind."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, Ranks

pytestmark = pytest.mark.multi_rank


def _sum(base: int) -> tuple[int, int, int]:
    total = torch.tensor([base + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), int(total), os.getpid()


def _raise_on(bad: int) -> int:
    if dist.get_rank() == bad:
        raise KeyError("spam")
    return dist.get_rank()


def _unpicklable() -> Any:
    return lambda: None


def _die(bad: int) -> None:
    if dist.get_rank() == bad:
        os._exit(17)
    dist.barrier()


def _sleep() -> None:
    time.sleep(60)


def test_results_and_world_sizes(ranks: Ranks) -> None:
    for world in (8, 3, 1, 8):
        found = ranks(world, _sum, 10)
        assert [rank for rank, _, _ in found] == list(range(world))
        assert {total for _, total, _ in found} == {sum(10 + rank for rank in range(world))}


def test_processes_are_kept(ranks: Ranks) -> None:
    first, second = ranks(4, _sum, 0), ranks(4, _sum, 0)
    assert [pid for *_, pid in first] == [pid for *_, pid in second]
    assert len({pid for *_, pid in first} | {os.getpid()}) == 5


def test_exceptions_come_back(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(3, _raise_on, 1)
    assert [outcome.error for outcome in outcomes] == ["", "KeyError", ""]
    assert "spam" in outcomes[1].message
    assert "_raise_on" in outcomes[1].trace
    with pytest.raises(RankError, match=r"rank 1\n(.|\n)*spam"):
        ranks(3, _raise_on, 1)
    assert {outcome.error for outcome in ranks.outcomes(2, _unpicklable)} <= {"AttributeError", "PicklingError"}
    assert ranks(2, _sum, 0)[0][:2] == (0, 1)


def test_dead_and_overrunning_ranks_end_the_pool() -> None:
    ranks = Ranks(2)
    try:
        with pytest.raises(RankError, match="exit code 17"):
            ranks(2, _die, 1, patience=20, collective=5)
        # Started before: their patience begins with the call, and is to end in the function.
        ranks(2, _sum, 0)
        with pytest.raises(RankError, match="_sleep"):
            ranks(2, _sleep, patience=5)
        pids = [pid for *_, pid in ranks(2, _sum, 0)]
    finally:
        ranks.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
