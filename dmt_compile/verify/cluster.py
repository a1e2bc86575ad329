"""All ranks of a program in one process, in lock-step: a graph per rank, stopped at every collective.

The ranks advance one at a time to their next collective; when all have arrived, the sizes they announce are compared, and the
data is exchanged with ``split`` and ``cat``, on one autograd tape. A rank that waits for a collective that another rank never
starts is reported instead of hanging.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from ..errors import DmtError, VerificationError, at
from ..runtime.base import RankContext
from ..runtime.ids import BoundRoute
from ..runtime.pooled import BoundExchange
from ..stage import ALL_TO_ALL, PASS, WAIT, BoundGraph, Stage
from ..topology import TowerGrid


@dataclass(frozen=True)
class _Transfer:
    """What a rank hands to an AlltoAll."""

    node: fx.Node
    payload: torch.Tensor
    out_splits: Sequence[int]
    in_splits: Sequence[int]
    axis: str


@dataclass(frozen=True)
class _Pending:
    """The result of a collective before its wait."""

    tensor: torch.Tensor


_Steps = Generator[_Transfer, torch.Tensor, Any]


Inputs = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]

Watch = Callable[[int, fx.Node, Any], None]
"""Called with a rank, a node of its graph, and the node's value."""


GIVEN = "given"
"""Meta key of nodes whose values are not computed but given, and the name that they are given under."""


def simulate(
    stage: Stage,
    inputs: Inputs,
    roots: Sequence[nn.Module],
    seed: int | None = None,
    given: Sequence[Mapping[str, Any]] | None = None,
    watch: Watch | None = None,
) -> list[Any]:
    """Run a stage on all ranks in lock-step; ``roots`` are the module trees that the ranks read parameters from.

    ``given`` are every rank's values of the nodes that are marked ``GIVEN``; ``watch`` sees the value of every node.
    """
    topology = stage.plan.topology
    programs = [stage.bind(RankContext(rank, root, topology)) for rank, root in enumerate(roots)]
    return run_cluster(programs, stage.plan.grid, inputs, seed, given, watch)


def run_cluster(
    programs: Sequence[BoundGraph],
    grid: TowerGrid,
    inputs: Inputs,
    seed: int | None = None,
    given: Sequence[Mapping[str, Any]] | None = None,
    watch: Watch | None = None,
) -> list[Any]:
    """Run one program per rank, each on its own ``(args, kwargs)``; the outputs by rank.

    With ``seed``, rank r draws its random numbers as if it had called ``torch.manual_seed(seed + r)``.

    Raises:
        VerificationError: ranks wait for different collectives, or disagree on a size; names the pass and the node.
    """
    ranks = []
    for rank, (program, (args, kwargs)) in enumerate(zip(programs, inputs, strict=True)):
        steps = _execute(program, args, kwargs, given[rank] if given else {}, partial(watch, rank) if watch else None)
        ranks.append(_Rank(steps, None if seed is None else seed + rank))
    waiting = {number: rank.advance(None) for number, rank in enumerate(ranks)}
    while True:
        finished = [number for number, transfer in waiting.items() if transfer is None]
        if len(finished) == len(ranks):
            return [rank.output for rank in ranks]
        if finished:
            number, transfer = next((n, t) for n, t in waiting.items() if t is not None)
            raise VerificationError(
                f"{_named(transfer.node)}: rank {number} waits in it, but rank {finished[0]} has ended without it"
            )
        received = _exchange({n: t for n, t in waiting.items() if t is not None}, grid)
        waiting = {number: rank.advance(received[number]) for number, rank in enumerate(ranks)}


class _Rank:
    """One rank's run, with random numbers of its own."""

    def __init__(self, steps: _Steps, seed: int | None) -> None:
        self.steps = steps
        self.output: Any = None
        self._rng: torch.Tensor | None = None
        if seed is not None:
            with torch.random.fork_rng(devices=[]):
                self._rng = torch.manual_seed(seed).get_state()

    def advance(self, received: torch.Tensor | None) -> _Transfer | None:
        """Run to the next collective; None when the rank has ended."""
        with torch.random.fork_rng(devices=[], enabled=self._rng is not None):
            if self._rng is not None:
                torch.set_rng_state(self._rng)
            try:
                return self.steps.send(received) if received is not None else next(self.steps)
            except StopIteration as stop:
                self.output = stop.value
                return None
            finally:
                if self._rng is not None:
                    self._rng = torch.get_rng_state()


def _exchange(transfers: Mapping[int, _Transfer], grid: TowerGrid) -> dict[int, torch.Tensor]:
    """Check that all members of each group meet in one collective with matching sizes, and move the data."""
    parts: dict[int, tuple[torch.Tensor, ...]] = {}
    members: dict[int, Sequence[int]] = {}
    for rank, transfer in transfers.items():
        if sum(transfer.in_splits) != transfer.payload.numel():
            raise VerificationError(
                f"{_named(transfer.node)}: rank {rank} sends {transfer.payload.numel()} values, "
                f"its input splits add up to {sum(transfer.in_splits)}"
            )
        members[rank] = _members(grid, transfer.axis, rank)
        if not len(members[rank]) == len(transfer.in_splits) == len(transfer.out_splits):
            raise VerificationError(
                f"{_named(transfer.node)}: rank {rank} has {len(transfer.in_splits)} input and "
                f"{len(transfer.out_splits)} output splits for a group of {len(members[rank])} ranks"
            )
        parts[rank] = transfer.payload.split(list(transfer.in_splits))
    result = {}
    for rank, transfer in transfers.items():
        arrived = []
        place = members[rank].index(rank)
        for position, member in enumerate(members[rank]):
            other = transfers[member]
            if other.node.name != transfer.node.name or other.axis != transfer.axis:
                raise VerificationError(
                    f"{_named(transfer.node)}: rank {rank} waits in it, but rank {member} waits in {_named(other.node)}"
                )
            part = parts[member][place]
            if part.numel() != transfer.out_splits[position]:
                raise VerificationError(
                    f"{_named(transfer.node)}: rank {rank} expects {transfer.out_splits[position]} values "
                    f"from rank {member}, which sends {part.numel()}"
                )
            if part.dtype != transfer.payload.dtype:
                raise VerificationError(
                    f"{_named(transfer.node)}: rank {member} sends {part.dtype}, rank {rank} {transfer.payload.dtype}"
                )
            arrived.append(part)
        result[rank] = torch.cat(arrived)
    return result


def _members(grid: TowerGrid, axis: str, rank: int) -> Sequence[int]:
    if axis == "world":
        return range(grid.world_size)
    return grid.tower_ranks(grid.tower_of(rank)) if axis == "tower" else grid.peers(grid.index_of(rank))


def _named(node: fx.Node) -> str:
    return f"pass '{node.meta.get(PASS, 'capture')}', {at(node)}"


def _execute(
    program: BoundGraph,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Mapping[str, Any],
    watch: Callable[[fx.Node, Any], None] | None,
) -> _Steps:
    """Interpret one rank's graph; yields at every collective and returns the graph's output."""
    values: dict[fx.Node, Any] = {}
    last_use = {used: node for node in program.graph.nodes for used in node.all_input_nodes}
    ends: dict[fx.Node, list[fx.Node]] = {}
    for used, node in last_use.items():
        ends.setdefault(node, []).append(used)
    arguments = placeholders(program.graph, args, kwargs)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = arguments[node]
            continue
        if GIVEN in node.meta:
            values[node] = given[node.meta[GIVEN]]
            continue
        node_args, node_kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.op == "output":
            return node_args[0]
        if node.target is not WAIT:
            _refuse_pending(node, values)
        try:
            if node.target is ALL_TO_ALL:
                payload, out_splits, in_splits, axis = node_args
                values[node] = _Pending((yield _Transfer(node, payload, out_splits, in_splits, axis)))
            elif node.target is WAIT:
                if not isinstance(node_args[0], _Pending):
                    raise VerificationError(f"{_named(node)}: waits for something that is not a collective")
                values[node] = node_args[0].tensor
            else:
                values[node] = yield from _call(program, node, node_args, node_kwargs)
        except DmtError:
            raise
        except Exception as error:
            error.add_note(f"(while running {_named(node)} of the compiled graph)")
            raise
        if watch is not None:
            watch(node, values[node])
        for used in ends.get(node, ()):
            del values[used]
    raise VerificationError("the graph has no output node")


def _call(program: BoundGraph, node: fx.Node, args: Any, kwargs: Any) -> _Steps:
    if node.op == "call_function":
        assert callable(node.target)
        return node.target(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "get_attr":
        return program.attribute(str(node.target))
    module = program.module(str(node.target))
    if isinstance(module, BoundExchange):
        rows, sizes = args
        buffer = yield _Transfer(node, module.pack(rows), module.out_splits(sizes), module.in_splits(sizes), module.exchange.axis)
        return module.unpack(buffer, sizes)
    if isinstance(module, BoundRoute):
        return (yield from _route(node, module, args))
    return module(*args, **kwargs)


def _route(node: fx.Node, module: BoundRoute, ids: Any) -> _Steps:
    parts = module.parts
    request = parts["request"](*ids)
    counts = parts["counts"](request)
    three = [3] * module.exchange.world_size
    received = yield _Transfer(node, counts, three, three, "world")
    sizes = parts["sizes"](received, counts)
    lengths = yield _Transfer(node, request.lengths.reshape(-1), sizes.lengths_out, sizes.lengths_in, "world")
    ids_received = yield _Transfer(node, request.values, sizes.values_out, sizes.values_in, "world")
    weights = None
    if module.exchange.carries_weights:
        weights = yield _Transfer(node, request.weights, sizes.weights_out, sizes.weights_in, "world")
    return parts["unpack"](lengths, ids_received, weights, sizes)


def _refuse_pending(node: fx.Node, values: Mapping[fx.Node, Any]) -> None:
    for used in node.all_input_nodes:
        if isinstance(values[used], _Pending):
            raise VerificationError(f"{_named(node)}: uses '{used.name}' before anything waits for it")


def placeholders(graph: fx.Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[fx.Node, Any]:
    """Arguments by placeholder, as the generated forward would bind them."""
    left, named = list(args), dict(kwargs)
    given: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        name = str(node.target)
        if name.startswith("**"):
            given[node], named = named, {}
        elif name.startswith("*"):
            given[node], left = tuple(left), []
        elif left:
            given[node] = left.pop(0)
        elif name in named:
            given[node] = named.pop(name)
        elif node.args:
            given[node] = node.args[0]
        else:
            raise TypeError(f"missing argument '{name}' of the model's forward")
    if left or named:
        raise TypeError(
            f"the model's forward takes no {'argument ' + repr(next(iter(named))) if named else 'further positional argument'}"
        )
    return given
