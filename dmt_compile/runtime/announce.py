"""What ranks tell each other once in a step, so that a failure on one of them is an error on all.

Every rank sends every other one as many numbers: with lookups, the sizes of what it is going to send; without, that it has run. A
failed rank sends marks in their place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from ..errors import DistributedError
from ..exchange import split_traffic
from ..stage import ALL_TO_ALL, WAIT
from .base import Progress, RankContext

FAILED = -1
NUMBERS = 3
"""How many numbers a rank tells another one."""


def announce_failure(context: RankContext, group: ProcessGroup) -> None:
    """Take part in the announcement of the step with marks that make every rank raise, so that none waits for this one."""
    _tell(context, group, FAILED)


def announce_success(context: RankContext, group: ProcessGroup) -> None:
    """Say that this rank has run a graph that exchanges nothing.

    Raises:
        DistributedError: another rank has failed.
    """
    context.progress = Progress.EXCHANGING
    told = _tell(context, group, 0)
    refuse_failed(context, told.tolist()[::NUMBERS])
    count_announcement(context)


def refuse_failed(context: RankContext, told: Sequence[int]) -> None:
    """Raise if another rank cannot run this step; ``told`` holds each rank's first number.

    Raises:
        DistributedError: it cannot.
    """
    failed = [rank for rank, number in enumerate(told) if number == FAILED]
    if failed:
        context.progress = Progress.CALLED_OFF
        raise DistributedError(
            f"rank {failed[0]} could not use its batch, so no rank runs this step; the error that rank {failed[0]} raised says why"
        )


def count_announcement(context: RankContext) -> None:
    """Add the bytes of an announcement to the traffic."""
    world = range(context.topology.world_size)
    context.traffic.add(*split_traffic(context.rank, context.topology, world, [NUMBERS] * len(world), torch.long.itemsize))


def _tell(context: RankContext, group: ProcessGroup, number: int) -> torch.Tensor:
    splits = [NUMBERS] * context.topology.world_size
    numbers = torch.full((sum(splits),), number, dtype=torch.long, device=context.device)
    told: torch.Tensor = WAIT(ALL_TO_ALL(numbers, splits, splits, group.group_name))
    return told
