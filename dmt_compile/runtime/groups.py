"""The process groups of a tower grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..errors import DistributedError
from ..topology import TowerGrid


@dataclass
class TowerGroups:
    """The groups this rank exchanges in, by axis: all ranks, its tower, its peers.

    They are separate from the caller's group, so that exchanges and the caller's own collectives cannot be mixed up.
    """

    world: ProcessGroup
    tower: ProcessGroup
    peer: ProcessGroup

    @classmethod
    def create(cls, parent: ProcessGroup, grid: TowerGrid, timeout: timedelta, number: int) -> TowerGroups:
        """Make the groups; a collective call over ``parent``. ``number`` is the same on all ranks and new to each of them."""
        ranks = dist.get_process_group_ranks(parent)
        rank = dist.get_rank(parent)
        found: dict[str, ProcessGroup] = {}
        for axis, places in _all_groups(grid):
            members = [ranks[place] for place in places]
            if parent is dist.group.WORLD:
                # Every rank makes every group, also those it is no member of, in one order.
                group = dist.new_group(members, timeout=timeout, group_desc=f"dmt:{axis}", sort_ranks=False)
            elif rank in places:
                group = _new_group_of_members(members, timeout, f"dmt:{number}:{axis}:{'_'.join(map(str, members))}")
            if rank in places:
                found[axis] = group
        return cls(**found)

    def names(self) -> dict[str, str]:
        """Process-local group names by axis, for the functional collectives. They differ between ranks: never compare them."""
        return {"world": self.world.group_name, "tower": self.tower.group_name, "peer": self.peer.group_name}

    def destroy(self) -> None:
        """Release the groups, in the order in which they were made. A rank that waits in one of them gets an error."""
        for group in (self.world, self.tower, self.peer):
            # The caller may have destroyed everything already.
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)

    def abort(self) -> None:
        """Release the groups although exchanges are under way."""
        for group in (self.world, self.tower, self.peer):
            group.abort()
        self.destroy()


def _all_groups(grid: TowerGrid) -> Iterator[tuple[str, range]]:
    yield "world", range(grid.world_size)
    for tower in range(grid.towers):
        yield "tower", grid.tower_ranks(tower)
    for index in range(grid.ranks_per_tower):
        yield "peer", grid.peers(index)


def _new_group_of_members(members: list[int], timeout: timedelta, name: str) -> ProcessGroup:
    """A group made by its members alone, called ``name``.

    ``new_group(use_local_synchronization=True)`` does the same under a name of its own choice, which comes again after a group
    is destroyed: ranks then read the addresses of the old group from the store, and wait for connections that nobody accepts.
    """
    c10d: Any = dist.distributed_c10d
    backend, store = c10d._world.pg_map[dist.group.WORLD]
    group, _ = c10d._new_process_group_helper(
        len(members), members.index(dist.get_rank()), members, c10d.Backend(backend), store, name, timeout=timeout, group_desc=name
    )
    c10d._world.pg_group_ranks[group] = {member: place for place, member in enumerate(members)}
    made: ProcessGroup = group
    return made


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta:
    """The timeout that a process group was made with."""
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return timedelta(minutes=10)
    return timeout


def refuse_device(backends: str, device: torch.device) -> None:
    """Raise unless a process group of ``backends`` ("cpu:gloo,cuda:nccl") exchanges tensors of ``device``.

    Raises:
        DistributedError: it does not; says what to do.
    """
    types = [part.partition(":")[0] for part in backends.split(",")]
    if device.type not in types:
        raise DistributedError(
            f"the process group ({backends}) exchanges tensors on {' and '.join(types)}, but the model's parameters are on "
            f"{device}: move the model to {types[0]} before towerize, or start a group with a backend for {device.type}"
        )
