"""Modules that passes put into a graph are the same on all ranks until they are bound to one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from ..topology import Topology


@dataclass
class Traffic:
    """Bytes that this rank has sent to other ranks since the start or the last :meth:`reset`, forward and backward."""

    inside_host: int = 0
    across_hosts: int = 0

    def reset(self) -> None:
        self.inside_host = self.across_hosts = 0

    def add(self, inside: int, across: int) -> None:
        self.inside_host += inside
        self.across_hosts += across


@dataclass
class RankContext:
    """What a rank-bound module may know: its rank, where tables are found, and where traffic is counted.

    ``announced`` tells whether this step's batch size has been sent to the other ranks yet: until then a rank that fails can
    still tell them. ``foreign`` are the state-dict keys of other ranks' tables, ``aliases`` maps further keys of a table to
    its first one.
    """

    rank: int
    root: nn.Module
    topology: Topology
    traffic: Traffic = field(default_factory=Traffic)
    check_ids: bool = True
    announced: bool = False
    foreign: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)


class RankLocal(nn.Module):
    """A module whose graph node is the same on every rank and whose data is not."""

    def bind(self, context: RankContext) -> nn.Module:
        """This module for one rank, reading tables from ``context.root``."""
        raise TypeError(f"{type(self).__name__} must say how it is bound to a rank")

    def forward(self, *args: object) -> object:
        raise TypeError(f"{type(self).__name__} runs only on a rank: call program.distribute() or program.simulate()")
