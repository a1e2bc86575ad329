"""What the analysis says about the places where a model mixes its features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "pairwise dot",
    "inner product",
    "element-wise product",
    "outer product",
    "bilinear",
    "cross network",
    "compressed interaction",
    "factorisation machine",
    "self-attention",
    "attention over a history",
    "gating",
    "concat-MLP",
    "field sum",
    "linear term",
    "opaque",
    "unknown",
]

Role = Literal["lookup", "replicated", "dense", "constant", "mixed"]


@dataclass(frozen=True)
class Member:
    """One vector of a block, ``width`` columns wide.

    ``name`` is the lookup's name, with the number of the row where one lookup of n ids reads n fields ("table[3]"). The role is
    "lookup" for one that towers serve, "replicated" for the rows of a table that stays on every rank (``name`` is its parameter),
    "dense" for what comes from the model's other inputs, "constant" for a vector that is the same for every sample and "mixed"
    for the result of another interaction.
    """

    name: str
    role: Role
    width: int


@dataclass(frozen=True)
class BlockInput:
    """A graph node whose value brings vectors of the block in.

    ``shape`` has -1 for the dimension of the batch. ``vector_axis`` is the axis that counts vectors; None where they lie side by
    side in one axis, or where there is only one. ``width_axis`` is the axis of their columns; None where these are more axes
    than one.
    """

    node: str
    shape: tuple[int, ...]
    vector_axis: int | None
    width_axis: int | None
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Block:
    """The vectors that an interaction takes, in the order in which they lie, and the nodes that hold them."""

    members: tuple[Member, ...]
    inputs: tuple[BlockInput, ...] = ()

    @property
    def vectors(self) -> int:
        """How many vectors that differ from sample to sample; results of other interactions are not counted."""
        return len(self._own)

    @property
    def widths(self) -> tuple[int, ...]:
        """The different widths of the vectors, ascending."""
        return tuple(sorted({member.width for member in self._own}))

    @property
    def width(self) -> int | None:
        """The width of every vector; None where they differ."""
        return self.widths[0] if len(self.widths) == 1 else None

    @property
    def lookups(self) -> tuple[str, ...]:
        """Names of the members that are lookups."""
        return tuple(member.name for member in self.members if member.role == "lookup")

    @property
    def dense(self) -> tuple[Member, ...]:
        """The vectors that come from dense inputs."""
        return tuple(member for member in self.members if member.role == "dense")

    @property
    def _own(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role in ("lookup", "replicated", "dense"))


@dataclass(frozen=True)
class Interaction:
    """A place where values of different features mix.

    Attributes:
        kind: one of :data:`Kind`; "opaque" for what is none of the kinds that are known, "unknown" where the model could not
            be run: ``variant`` then says why, and the rest is empty.
        variant: what else was seen, in a few words: "low-rank, 3 layers", "15 of 36 products kept".
        block: the vectors that it takes.
        node: the name of the graph node (stage "flat") where the mixing is done, the first of them.
        nodes: all nodes of the flat graph that belong to it, in their order.
        location: the user's ``file:line`` of ``node``, or None.
        text: that line of code, or "".
    """

    kind: Kind
    variant: str
    block: Block
    node: str
    nodes: tuple[str, ...]
    location: str | None
    text: str = ""
