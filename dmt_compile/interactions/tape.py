"""A run of a flat graph as a list of operators, with the labels of every value, and questions about how values flow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .labels import FIRST, MIXED, Family, Labels
from .records import Role


@dataclass(frozen=True)
class Value:
    """A tensor at one time: writing to it in place makes a new value."""

    shape: tuple[int, ...]
    labels: Labels

    @property
    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True)
class Op:
    """One operator that ran: values that it took and gave, by number; ``mixes`` where different features first meet in it."""

    index: int
    name: str
    node: fx.Node
    family: Family
    mixes: bool
    ins: tuple[int, ...]
    outs: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """What a label stands for: ``width`` is that of one vector, 0 where it is not known."""

    name: str
    role: Role
    width: int


@dataclass
class Tape:
    """All operators of one run over ``batch`` samples.

    ``sources`` are by label, ``held`` the values of graph nodes, of those in ``several`` the first of their tensors; ``results``
    are what the model returns, None if that is not known. ``given`` are the nodes that were not run, with their values.
    """

    batch: int
    sources: Mapping[int, Source]
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    held: dict[fx.Node, int] = field(default_factory=dict)
    several: set[fx.Node] = field(default_factory=set)
    given: Mapping[fx.Node, Any] = field(default_factory=dict)
    results: list[int] | None = None
    makers: dict[int, Op] = field(default_factory=dict)
    users: dict[int, list[Op]] = field(default_factory=dict)
    origins: dict[int, frozenset[int]] = field(default_factory=dict)
    _present: dict[int, frozenset[int]] = field(default_factory=dict)

    def add(self, op: Op) -> None:
        self.ops.append(op)
        origin: frozenset[int] = frozenset().union(*(self.origin(number) for number in op.ins))
        for number in op.outs:
            self.makers[number] = op
            # A part of a value depends on its own features alone.
            moved = op.family == "move" and not self.mixed(number) and all(self.origin(n) == self.lookups(n) for n in op.ins)
            self.origins[number] = self.lookups(number) if moved else origin
        for number in dict.fromkeys(op.ins):
            self.users.setdefault(number, []).append(op)

    def origin(self, number: int) -> frozenset[int]:
        """The looked-up features that a value depends on."""
        if number not in self.origins:
            self.origins[number] = self.lookups(number)
        return self.origins[number]

    def present(self, number: int) -> frozenset[int]:
        """The labels in a value, without 0."""
        if number not in self._present:
            labels = self.values[number].labels
            found = frozenset() if labels is None else frozenset(int(label) for label in labels.unique()) - {0}
            self._present[number] = found
        return self._present[number]

    def own(self, number: int) -> frozenset[int]:
        """The labels in a value that are a feature or dense inputs."""
        return self.present(number) - {MIXED}

    def lookups(self, number: int) -> frozenset[int]:
        """The labels in a value that are a looked-up feature."""
        return frozenset(label for label in self.own(number) if label >= FIRST)

    def mixed(self, number: int) -> bool:
        """Whether anything in a value is of several features."""
        return MIXED in self.present(number)

    def labelled(self, op: Op) -> tuple[int, ...]:
        """The values that an operator takes which come from a feature."""
        return tuple(number for number in op.ins if self.present(number))

    def factors(self, op: Op) -> tuple[int, ...]:
        """The values that a product multiplies, each once."""
        taken = op.ins[-2:] if op.name.startswith("addc") else op.ins
        return tuple(dict.fromkeys(number for number in taken if self.present(number)))

    def per_sample(self, number: int) -> float:
        return self.values[number].numel / max(self.batch, 1)

    def back(self, number: int, through: Callable[[Op], bool]) -> int:
        """The first value on the way to this one, along operators of one labelled input that satisfy ``through``."""
        while True:
            op = self.makers.get(number)
            if op is None or not through(op):
                return number
            taken = self.labelled(op)
            if len(set(taken)) != 1:
                return number
            number = taken[0]

    def before(self, starts: Iterable[int], stop: Callable[[Op], bool] | None = None) -> Iterator[Op]:
        """All operators that these values are made by, the last first; behind one for which ``stop`` holds nothing is visited."""
        waiting, seen = list(starts), set[int]()
        while waiting:
            op = self.makers.get(waiting.pop())
            if op is None or op.index in seen:
                continue
            seen.add(op.index)
            yield op
            if stop is None or not stop(op):
                waiting += self.labelled(op)

    def after(self, starts: Iterable[int], through: Callable[[Op], bool]) -> Iterator[tuple[int, Op]]:
        """Values and the operators that take them, as far as operators satisfy ``through``."""
        waiting, seen = list(starts), set[tuple[int, int]]()
        while waiting:
            number = waiting.pop(0)
            for op in self.users.get(number, ()):
                if (number, op.index) in seen:
                    continue
                seen.add((number, op.index))
                yield number, op
                if through(op):
                    waiting += op.outs


def sample(labels: torch.Tensor, batch: int) -> tuple[torch.Tensor, int | None]:
    """The labels of one sample, and the axis of the batch: the first of its size along which labels do not change."""
    for axis, size in enumerate(labels.shape):
        if size == batch and bool((labels == labels.select(axis, 0).unsqueeze(axis)).all()):
            return labels.select(axis, 0), axis
    return labels, None
