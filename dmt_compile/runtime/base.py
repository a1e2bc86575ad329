"""Modules that passes put into a graph are the same on all ranks until they are bound to one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
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


class Progress(Enum):
    """How far a step has come, which decides what a failure means for the other ranks."""

    READING = "nothing has been sent yet: a rank that fails can still tell the others"
    CALLED_OFF = "a rank has told that it cannot run this step: no rank runs it"
    EXCHANGING = "other ranks count on this rank's part in all further exchanges of the step, forward and backward"


@dataclass
class RankContext:
    """What a rank-bound module may know: its rank, where tables are found, and where traffic is counted.

    ``sums_in_backward`` tells whether this step's backward is to average dense gradients over the ranks, ``open`` whether the
    engine that does so awaits a backward. ``device`` and ``weight_dtype`` are what ids and their weights must have, None where
    nothing is demanded. ``foreign`` are the state-dict keys of other ranks' tables, ``aliases`` maps further keys of a table to
    its first one. ``bases`` says at which row of this rank's parameter a table begins, where that is not the row at which it begins
    in the model's. ``tower`` runs the module of the rank's tower where its gradients are added up over the tower's ranks.
    """

    rank: int
    root: nn.Module
    topology: Topology
    traffic: Traffic = field(default_factory=Traffic)
    check_ids: bool = True
    device: torch.device | None = None
    weight_dtype: torch.dtype | None = None
    progress: Progress = Progress.READING
    sums_in_backward: bool = False
    open: bool = False
    foreign: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    bases: Mapping[str, int] = field(default_factory=dict)
    tower: nn.Module | None = None


class Constant:
    """Whole numbers that never change, as a tensor on every device that asks for it."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = tuple(values)
        self._on: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """The same int64 tensor at every call; it must not be written to."""
        if device not in self._on:
            self._on[device] = torch.tensor(self.values, dtype=torch.long, device=device)
        return self._on[device]


def _needs_rank(self: nn.Module, *args: object) -> object:
    raise TypeError(f"{type(self).__name__} runs only on a rank: call program.distribute() or program.simulate()")


class RankLocal(nn.Module):
    """A module whose graph node is the same on every rank and whose data is not."""

    def bind(self, context: RankContext) -> nn.Module:
        """This module for one rank, reading tables from ``context.root``."""
        raise TypeError(f"{type(self).__name__} must say how it is bound to a rank")

    # Declared as torch declares it, so that subclasses may name their arguments.
    forward: Callable[..., Any] = _needs_rank
