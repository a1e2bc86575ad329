"""The process groups of a tower grid."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

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
    def create(cls, parent: ProcessGroup, grid: TowerGrid, timeout: timedelta) -> TowerGroups:
        """Make the groups; a collective call over ``parent``. All ranks make the same three groups in the same order."""
        ranks = dist.get_process_group_ranks(parent)
        rank = dist.get_rank(parent)
        tower = [ranks[r] for r in grid.tower_ranks(grid.tower_of(rank))]
        peer = [ranks[r] for r in grid.peers(grid.index_of(rank))]
        groups = [
            dist.new_group(members, timeout=timeout, use_local_synchronization=True, group_desc=f"dmt:{axis}")
            for axis, members in (("world", list(ranks)), ("tower", tower), ("peer", peer))
        ]
        return cls(*groups)

    def names(self) -> dict[str, str]:
        """Process-local group names by axis, for the functional collectives. They differ between ranks: never compare them."""
        return {"world": self.world.group_name, "tower": self.tower.group_name, "peer": self.peer.group_name}

    def destroy(self) -> None:
        """Release the groups, in the order in which they were made."""
        for group in (self.world, self.tower, self.peer):
            dist.destroy_process_group(group)


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta:
    """The timeout that a process group was made with."""
    try:
        timeout: timedelta = group._get_backend(device).options._timeout  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return timedelta(minutes=10)
    return timeout
