"""What a sample costs: parameters, floating-point operations, and bytes on each kind of link, flat and in towers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .exchange import IdExchange, split_traffic
from .flops import count_flops
from .graphs import clone_sharing_tensors, closure, extras_of, graph_module_over
from .interactions.find import Inputs
from .lookups import LookupSet
from .runtime.ids import RouteIds
from .runtime.pooled import ExchangeRows
from .runtime.select import IdRequest
from .stage import Stage
from .towers.record import EXPANSIONS, HOLDER
from .verify.cluster import placeholders
from .verify.deal import Layout, batch_size


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters: of the sharded tables, of the tower modules, and of all that is neither.

    ``dense`` holds tables that stay on every rank too. What brings a tower's vectors back to their old width is counted with its
    module.
    """

    dense: int
    tower_modules: int
    tables: int

    @property
    def total(self) -> int:
        return self.dense + self.tower_modules + self.tables


@dataclass(frozen=True)
class Links:
    """Bytes that a rank sends to other ranks of its own host, and to other hosts."""

    inside_host: float
    across_hosts: float


@dataclass(frozen=True)
class Cost:
    """What one sample costs.

    ``forward_flops`` are those of the forward pass and ``training_flops`` those of forward and backward together, in which the
    dense inputs of the model get no gradient. Both are what torch's counter counts: matrix products, convolutions and attention, 2
    for each multiplication with its addition. Element-wise work (activations, sums, norms, the x_0 * (...) + x_l of a cross
    network) is not counted, and neither are lookups, ``nn.Bilinear`` and products of a matrix and a vector.

    ``rows`` are the bytes of pooled rows and of their gradients, forward and backward, ``ids`` those of sparse ids and of the
    lengths of their bags, both per sample on every rank and averaged over ranks, for batches of one size. The 24 bytes to each rank
    that a step sends once are left out, and so are gradients of weights of ids and those of dense parameters.
    """

    parameters: Parameters
    forward_flops: float
    training_flops: float
    rows: Links
    ids: Links


@dataclass(frozen=True)
class Complexity:
    """``flat`` is the flat model with one global exchange, ``towers`` the program in SPTT with its tower modules, if it has any.

    ``ids_seen`` tells that ids, and rows of lookups that make one for each id or bag, were counted in ``example_inputs``; otherwise
    there is taken to be one id in every bag, and one such row per sample.
    """

    flat: Cost
    towers: Cost
    ids_seen: bool

    def __str__(self) -> str:
        from .render.complexity import complexity_text

        return complexity_text(self)

    def __rich__(self) -> object:
        from .render.complexity import complexity_renderable

        return complexity_renderable(self)


def complexity(stages: Mapping[str, Stage], inputs: Inputs | None, layout: Layout) -> Complexity:
    """The complexity of a program with these stages; ``inputs`` are a few samples of its example inputs.

    Raises:
        CaptureError: the graph of the model cannot be run to count its FLOPs.
    """
    flat, model = stages["flat"], stages.get("model", stages["flat"])
    in_towers = stages.get("modules", stages["sptt"])
    seen = _requests(stages["classic"], inputs, layout)
    flops = count_flops(flat.graph_module, flat.root, flat.lookups, inputs, layout)
    bare = Cost(_parameters(flat.root, flat.lookups), *flops, _rows(stages["classic"], seen), _ids(stages["classic"], seen))
    if model is not flat:
        flops = count_flops(model.graph_module, model.root, model.lookups, inputs, layout)
    towers = Cost(_parameters(model.root, model.lookups), *flops, _rows(in_towers, seen), _ids(in_towers, seen))
    return Complexity(bare, towers, seen is not None)


def _parameters(root: nn.Module, lookups: LookupSet) -> Parameters:
    tables = {id(root.get_parameter(table.parameter)) for table in lookups.tables}
    dense = towers = held = 0
    for name, parameter in root.named_parameters():
        if id(parameter) in tables:
            held += parameter.numel()
        elif name.partition(".")[0] in (HOLDER, EXPANSIONS):
            towers += parameter.numel()
        else:
            dense += parameter.numel()
    return Parameters(dense, towers, held)


@dataclass(frozen=True)
class _Seen:
    """The ids of a few samples as one round of exchanges sends them."""

    request: IdRequest
    samples: int

    @property
    def units(self) -> float:
        """Rows of columns per sample."""
        return self.request.lengths.shape[1] / self.samples


def _requests(stage: Stage, inputs: Inputs | None, layout: Layout) -> dict[int, _Seen] | None:
    """What every round's ids are in ``inputs``; None where these do not tell."""
    if inputs is None:
        return None
    routes = list(_routes(stage))
    needed = closure([node for node, _ in routes]) - {node for node, _ in routes}
    if any(node.op == "call_module" and isinstance(stage.module(node), RouteIds | ExchangeRows) for node in needed):
        # Ids that need a lookup.
        return None
    clone = clone_sharing_tensors(stage.root, copy_buffers=True).eval()
    module = graph_module_over(clone, stage.graph, extras_of(stage.graph_module), "Ids")
    try:
        reader = _Reader(module, needed, placeholders(stage.graph, *inputs), {node: route for node, route in routes})
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            reader.run(enable_io_processing=False)
        samples = batch_size(*inputs, layout)
        return {number: _Seen(request, samples) for number, request in reader.requests.items()} if samples else None
    except Exception:
        # Values that the example inputs do not have, on the meta device.
        return None


class _Reader(fx.Interpreter):
    """Runs only what ids need."""

    def __init__(
        self, module: fx.GraphModule, needed: set[fx.Node], given: Mapping[fx.Node, Any], routes: Mapping[fx.Node, RouteIds]
    ) -> None:
        super().__init__(module)
        self.needed, self.given, self.routes = needed, given, routes
        self.requests: dict[int, IdRequest] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n in self.routes:
            route = self.routes[n]
            self.requests[route.exchange.round] = route.select(*[self.env[used] for used in n.all_input_nodes])
            return None
        if n.op == "placeholder":
            return self.given[n]
        return super().run_node(n) if n in self.needed else None


def _routes(stage: Stage) -> Iterator[tuple[fx.Node, RouteIds]]:
    for node in stage.graph.nodes:
        module = stage.module(node) if node.op == "call_module" else None
        if isinstance(module, RouteIds):
            yield node, module


def _rows(stage: Stage, seen: Mapping[int, _Seen] | None) -> Links:
    inside = across = 0.0
    world = stage.plan.topology.world_size
    for node in stage.graph.nodes:
        module = stage.module(node) if node.op == "call_module" else None
        if not isinstance(module, ExchangeRows):
            continue
        units = seen[module.exchange.round].units if seen is not None else 1.0
        for own_inside, own_across in module.exchange.traffic_by_rank(stage.plan.topology):
            # What is received forward is sent back, so that over all ranks backward is as much as forward.
            inside += 2 * units * own_inside / world
            across += 2 * units * own_across / world
    return Links(inside, across)


def _ids(stage: Stage, seen: Mapping[int, _Seen] | None) -> Links:
    topology = stage.plan.topology
    world = topology.world_size
    # All ranks have equally many members inside their host and elsewhere, and ask each of them for as much as the others do.
    inside, across = split_traffic(0, topology, range(world), (1,) * world, 1)
    sent = sum(_request_bytes(route.exchange, seen, stage.lookups) for _, route in _routes(stage))
    return Links(inside * sent / world, across * sent / world)


_LENGTH = 4


def _request_bytes(exchange: IdExchange, seen: Mapping[int, _Seen] | None, lookups: LookupSet) -> float:
    """The bytes per sample of a rank's whole request: a length for every bag, its ids and its weights."""
    entries = exchange.starts[-1]
    weighted = [start + place for start, run in zip(exchange.starts, exchange.weighted_per_rank, strict=False) for place in run]
    if seen is None:
        return entries * (_LENGTH + exchange.id_dtype.itemsize) + len(weighted) * lookups.exchange_dtype.itemsize
    one = seen[exchange.round]
    ids: list[int] = one.request.lengths.sum(dim=1).tolist()
    weights = one.request.weights
    weight_bytes = sum(ids[place] for place in weighted) * weights.element_size() if weights is not None else 0
    return entries * _LENGTH * one.units + (sum(ids) * exchange.id_dtype.itemsize + weight_bytes) / one.samples
