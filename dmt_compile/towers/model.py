"""The tower model: a flat model with a module per tower, and with its interaction re-sized to what these make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx, nn

from ..adapters import torchrec as torchrec_adapter
from ..capture import Captured
from ..errors import PlanError, first_line
from ..graphs import clone_sharing_tensors, deepcopy_values, extras_of, graph_module_over
from ..interactions.block import laid
from ..interactions.find import follow
from ..interactions.tape import Tape
from ..lookups import LookupSet
from ..nested import take_apart
from ..plan import TowerPlan
from ..resize import Derivation, NewSizes, Unfit, apply_sizes
from ..verify.deal import Layout
from .choose import TowerModules, make_modules, refuse_widths
from .insert import Inserted, insert_at_sites, insert_expanded, kept_count, pieces_of, with_arguments
from .modules import DLRMTower
from .preserve import keep_and_bring_back, seen_vectors, set_modules, set_resized
from .record import EXPANSIONS, HOLDER, TowerVectors
from .sites import Site, Sites, each_vector, find_sites, one_vector

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class TowerModel:
    """The captured tower model, and what its towers' modules take and make.

    ``way`` is "re-sized" or "expanded", ``why`` the reason for the latter; ``resized`` names the parameters and buffers that
    changed shape, with the old and the new one. With a warm start, ``redrawn`` are those that do not follow from the old ones.
    """

    captured: Captured
    vectors: tuple[TowerVectors, ...]
    way: str
    why: str
    resized: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    redrawn: tuple[str, ...] = ()


class Rebuilt(nn.Module):
    """A module tree whose forward is a graph for each mode, over its own modules."""

    def __init__(self, root: nn.Module, graphs: Mapping[bool, fx.GraphModule]) -> None:
        super().__init__()
        for key in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[key] = root.__dict__[key]
        self._sources = {mode: (graph.graph, extras_of(graph)) for mode, graph in graphs.items()}
        for key, value in root.__dict__.items():
            if isinstance(value, torch.Tensor):
                self.__dict__[key] = value
        self.training = root.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        graph, extras = self._sources[self.training]
        return graph_module_over(self, graph, extras, "TowerModel")(*args, **kwargs)


@dataclass(frozen=True)
class _Found:
    """What is known of one graph: a run of it, and where its vectors lie together."""

    flat: fx.GraphModule
    lookups: LookupSet
    tape: Tape
    sites: Sites | None


def tower_model(
    captured: Captured,
    lookups: Mapping[bool, LookupSet],
    layouts: Mapping[bool, Layout],
    plan: TowerPlan,
    wanted: TowerModules,
    sample: Inputs | None,
    *,
    expand: bool = False,
    seed: int = 0,
    inputs: Inputs | None = None,
) -> TowerModel:
    """Give every tower its module, and re-size the interaction and its neighbours to what the modules make (section 3.2).

    Where new sizes do not follow from the graph, or with ``expand``, a layer per tower brings its vectors back to their old width
    behind the exchange, and everything behind stays as it is. With ``inputs``, the weights begin as close to those of the flat
    model as they can, see :mod:`preserve`.

    Raises:
        PlanError: the modules do not fit the towers, or no lookup makes one vector per sample.
    """
    try:
        if expand:
            raise Unfit("it was asked for")
        made = _resized(captured, lookups, layouts, plan, wanted, sample, seed, inputs)
        if inputs is not None and not made.redrawn:
            _check_kept(captured, lookups, layouts, plan, sample, made)
        return made
    except Unfit as reason:
        return _expanded(captured, lookups, plan, wanted, seed, str(reason), inputs)


def _check_kept(
    captured: Captured,
    lookups: Mapping[bool, LookupSet],
    layouts: Mapping[bool, Layout],
    plan: TowerPlan,
    sample: Inputs | None,
    made: TowerModel,
) -> None:
    """Try the warm start where it must be exact: with modules that keep all of their vectors, in more columns than these have.

    Raises:
        Unfit: the model depends on how wide or how many its vectors are, or holds them in an order that weights cannot follow.
    """
    if sample is None or all(one.passes for one in made.vectors):
        return
    width = made.vectors[0].width
    most = max(-(-sum(one.widths) // width) for one in made.vectors)
    padded = DLRMTower(1, 0, 2 * made.vectors[0].widths[0]) if kept_count(made.vectors) else DLRMTower(0, most + 1, width)
    try:
        tried = _resized(captured, lookups, layouts, plan, padded, sample, 0, sample)
    except (Unfit, PlanError) as error:
        raise Unfit(f"a warm start could not be tried: {first_line(error)}") from error
    roots = (captured.root, tried.captured.root)
    if any(tensor.is_meta for tensor in captured.root.parameters()):
        return
    results = []
    for root in roots:
        clone = clone_sharing_tensors(root, copy_buffers=True).eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = take_apart(clone(*deepcopy_values(sample[0]), **deepcopy_values(sample[1])))[0]
        results.append([one for one in found if isinstance(one, torch.Tensor)])
    for mine, its in zip(*results, strict=True):
        scale = float(mine.double().abs().max()) if mine.numel() else 0.0
        if mine.shape != its.shape or not torch.allclose(mine.double(), its.double(), rtol=1e-3, atol=1e-4 * max(scale, 1e-3)):
            raise Unfit(
                "a warm start does not carry over: the model depends on how wide its vectors are, or holds their columns in an "
                "order that its weights cannot follow"
            )


def _home(captured: Captured, lookups: LookupSet) -> torch.device:
    """Where the tables are."""
    return captured.root.get_parameter(lookups.tables[0].parameter).device


def _graphs(captured: Captured) -> dict[int, tuple[bool, fx.GraphModule]]:
    """The different graphs, with one of the modes that each is for."""
    return {id(graph): (mode, graph) for mode, graph in captured.graphs.items()}


def _resized(
    captured: Captured,
    lookups: Mapping[bool, LookupSet],
    layouts: Mapping[bool, Layout],
    plan: TowerPlan,
    wanted: TowerModules,
    sample: Inputs | None,
    seed: int,
    inputs: Inputs | None,
) -> TowerModel:
    tapes: dict[int, Tape] = {}
    for key, (mode, flat) in _graphs(captured).items():
        try:
            tapes[key] = follow(flat, captured.root, lookups[mode], sample, layouts[mode])
        except Exception as error:
            raise Unfit(f"the model could not be followed ({first_line(error)})") from error
    reasons: list[str] = []
    # Where the vectors lie together any number of others can stand in their place, elsewhere one for each of them.
    for together in (True, False):
        find = find_sites if together else each_vector
        found = {
            key: _Found(flat, lookups[mode], tapes[key], find(flat.graph, tapes[key], lookups[mode]))
            for key, (mode, flat) in _graphs(captured).items()
        }
        try:
            return _resized_at(captured, found, lookups[True], plan, wanted, sample, seed, inputs, together)
        except Unfit as reason:
            reasons.append(str(reason).partition("\n")[0])
    raise Unfit(reasons[0] if not reasons[0].startswith(_NOWHERE) else reasons[1])


_NOWHERE = "nowhere in the model"


def _resized_at(
    captured: Captured,
    found: Mapping[int, _Found],
    lookups: LookupSet,
    plan: TowerPlan,
    wanted: TowerModules,
    sample: Inputs | None,
    seed: int,
    inputs: Inputs | None,
    together: bool,
) -> TowerModel:
    sites = [one.sites for one in found.values() if one.sites is not None]
    if len(sites) < len(found):
        raise Unfit(f"{_NOWHERE} do the vectors of several features lie together")
    if len({frozenset(one.lookups) for one in sites}) > 1:
        raise Unfit("other features lie together in training than in evaluation")
    names = [name for name in lookups.lookup if name in set(sites[0].lookups)]
    vectors, modules = make_modules(wanted, plan, lookups, names, seed, _home(captured, lookups))
    if any("vectors" in site.axes for one in sites for site in one.sites):
        refuse_widths(vectors)
    if not together and not kept_count(vectors):
        raise Unfit("features are taken one by one, and the tower modules do not make one vector for each")
    made: dict[int, tuple[Inserted, NewSizes]] = {}
    for key, one in found.items():
        assert one.sites is not None
        inserted = insert_at_sites(one.flat, one.lookups, vectors, one.sites)
        try:
            sizes = _new_sizes(captured, one, inserted, vectors, eager=False, kept=inputs is not None)
        except Unfit as reason:
            try:
                sizes = _new_sizes(captured, one, inserted, vectors, eager=True, kept=inputs is not None)
            except Unfit:
                raise reason from None
        made[key] = (inserted, sizes)
    tensors: dict[str, tuple[int, ...]] = {}
    constants: dict[str, torch.Tensor] = {}
    for inserted, sizes in made.values():
        for name, shape in sizes.tensors.items():
            if tensors.setdefault(name, shape) != shape:
                raise Unfit(f"'{name}' would need one shape in training and another in evaluation")
        constants.update({place: value for place, value in sizes.constants.items() if isinstance(place, str)})
        changed: dict[str, dict[Any, Any]] = {name: dict(literals) for name, literals in sizes.literals.items()}
        for place, value in sizes.constants.items():
            if not isinstance(place, str):
                changed.setdefault(place[0], {})[place[1]] = value
        with_arguments(inserted.graph, changed)
    root = clone_sharing_tensors(captured.root)
    old = {name: tuple(tensor.shape) for name, tensor in (*root.named_parameters(), *root.named_buffers())}
    norms = {name: shape for _, sizes in made.values() for name, shape in sizes.norms.items()}
    apply_sizes(root, {name: shape for name, shape in tensors.items() if name not in constants}, norms, seed)
    for place, value in constants.items():
        _set(root, place, value)
    new = {name: tuple(tensor.shape) for name, tensor in (*root.named_parameters(), *root.named_buffers())}
    resized = {name: (shape, new[name]) for name, shape in old.items() if new[name] != shape}
    redrawn: list[str] = []
    if inputs is not None:
        inserted, _ = next(iter(made.values()))
        values = dict(
            (*captured.root.named_parameters(remove_duplicate=False), *captured.root.named_buffers(remove_duplicate=False))
        )
        kept = set_modules(modules, vectors, seen_vectors(inserted, captured.root, inputs), sites[0].sites[0].lookups)
        axes = {name: one for _, sizes in made.values() for name, one in sizes.axes.items()}
        redrawn = set_resized(root, values, axes, kept)
    rebuilt = _rebuilt(captured, root, {key: inserted for key, (inserted, _) in made.items()}, modules, {})
    _try(rebuilt.root, sample)
    return TowerModel(rebuilt, vectors, "re-sized", "", resized, tuple(redrawn))


def _try(root: nn.Module, sample: Inputs | None) -> None:
    """Run the model on a few samples: sizes that follow from its graph are not all that an operator may ask for."""
    if sample is None or any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers())):
        return
    clone = clone_sharing_tensors(root, copy_buffers=True).eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            clone(*deepcopy_values(sample[0]), **deepcopy_values(sample[1]))
    except Exception as error:
        raise Unfit(f"with its new sizes the model raises {first_line(error)}") from error


def _new_sizes(
    captured: Captured, found: _Found, inserted: Inserted, vectors: Sequence[TowerVectors], *, eager: bool, kept: bool
) -> NewSizes:
    """What has to change behind the sites; with ``kept`` also what is made of vectors whose sizes stay."""
    lookups = found.lookups
    root = clone_sharing_tensors(captured.root, copy_buffers=True).eval()
    tables = {id(root.get_parameter(table.parameter)) for table in lookups.tables}
    for holder in (HOLDER, EXPANSIONS):
        root.add_module(holder, nn.Module())
    derivation = Derivation(inserted.graph, inserted.extras, root, tables, eager=eager)
    symbols = derivation.symbols
    widths = [lookups.lookup[name].dim for one in vectors for name in one.lookups]
    made = [width for _, _, width in pieces_of(vectors, [name for one in vectors for name in one.lookups])]
    roots: dict[sympy.Symbol, int] = {}

    def size(old: int, new: int) -> Any:
        if old == new and not kept:
            return old
        symbol = symbols.fresh(old)
        if isinstance(symbol, int):
            raise Unfit(f"a size of {old} cannot be told from others")
        roots[symbol.node.expr] = new
        return symbol

    even = len(set(widths)) == 1 and len(set(made)) == 1
    number: Any = size(len(widths), len(made)) if even else None
    width: Any = size(widths[0], made[0]) if even else None
    columns = number * width if even else size(sum(widths), sum(made))
    derivation.number = number.node.expr if isinstance(number, torch.SymInt) else None
    derivation.layouts = _layouts(found.tape)
    derivation.width = sympy.sympify(width.node.expr if isinstance(width, torch.SymInt) else width) if even else None
    derivation.columns = sympy.sympify(columns.node.expr if isinstance(columns, torch.SymInt) else columns)
    given = _given(derivation, found, inserted)
    for node, site in inserted.laid.items():
        if not even and "vectors" in site.axes:
            raise Unfit(f"vectors of widths {sorted(set(made))} do not fit where the model has them in one axis")
        sizes: dict[str, Any] = {"batch": found.tape.batch, "vectors": number, "width": width, "columns": columns}
        if len(site.lookups) < len(widths):
            # One vector for each of some.
            sizes["vectors"] = len(site.lookups)
            sizes["columns"] = len(site.lookups) * width if even else _columns(site, lookups, vectors, size)
        dtype = lookups.lookup[site.lookups[0]].dtype
        given[node] = symbols.empty([sizes[axis] if isinstance(axis, str) else axis for axis in site.axes], dtype)
    if not roots:
        return NewSizes({}, {}, {})
    return derivation.run(given, roots)


def _layouts(tape: Tape) -> dict[str, tuple[int | None, int | None]]:
    """By node whose value holds the vectors of several features, the axes that count vectors and columns."""
    found = {}
    for node, number in tape.held.items():
        labels = tape.values[number].labels
        if labels is not None and len(tape.own(number)) > 1 and not tape.mixed(number) and node not in tape.several:
            places = laid(tape, number)
            found[node.name] = (places.vector_axis, places.width_axis)
    return found


def _columns(site: Site, lookups: LookupSet, vectors: Sequence[TowerVectors], size: Callable[[int, int], Any]) -> Any:
    """Columns of vectors of different widths, one for each of some lookups."""
    old = sum(lookups.lookup[name].dim for name in site.lookups)
    return size(old, sum(width for _, _, width in pieces_of(vectors, site.lookups)))


def _given(derivation: Derivation, found: _Found, inserted: Inserted) -> dict[fx.Node, Any]:
    """Values, without contents, of the nodes that need not be run: inputs, lookups, and what only these need."""
    tape, lookups = found.tape, found.lookups
    held = {node.name: value for node, value in tape.given.items()}
    shapes = {node.name: tape.values[number].shape for node, number in tape.held.items()}
    outputs = {output.node: output for output in lookups.outputs}
    given: dict[fx.Node, Any] = {}

    def empty(value: torch.Tensor) -> torch.Tensor:
        return derivation.symbols.empty(value.shape, value)

    for node in inserted.graph.nodes:
        if node.name in held:
            tensors, template = take_apart(held[node.name])
            given[node] = template.build([empty(one) if isinstance(one, torch.Tensor) else one for one in tensors])
        elif node.name in outputs:
            output = outputs[node.name]
            served = [lookups.lookup[name] for name in output.lookups]
            if output.shape is None and output.like is None:
                values = derivation.symbols.empty([tape.batch, sum(one.dim for one in served)], served[0].dtype)
                given[node] = torchrec_adapter.make_output(output.keys, [one.dim for one in served], values)
            else:
                given[node] = derivation.symbols.empty(shapes[node.name], served[0].dtype)
    needed: set[fx.Node] = set()
    waiting = [node for node in inserted.graph.nodes if node.op == "output"]
    stop = {*given, *inserted.laid}
    while waiting:
        node = waiting.pop()
        if node not in needed and node not in stop:
            needed.add(node)
            waiting += node.all_input_nodes
    for node in inserted.graph.nodes:
        if node not in needed and node not in stop:
            given[node] = None
    return given


def _expanded(
    captured: Captured,
    lookups: Mapping[bool, LookupSet],
    plan: TowerPlan,
    wanted: TowerModules,
    seed: int,
    why: str,
    inputs: Inputs | None,
) -> TowerModel:
    names = list(one_vector(lookups[True]))
    if not names:
        raise PlanError(
            "no lookup of the model makes one vector per sample, which is what tower modules take: compile without tower_module"
        )
    vectors, modules = make_modules(wanted, plan, lookups[True], names, seed, _home(captured, lookups[True]))
    expansions: dict[int, nn.Module] = {}
    for one in vectors:
        if not one.passes:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed + one.tower)
                dtype = lookups[True].lookup[one.lookups[0]].dtype
                expansions[one.tower] = nn.Linear(one.columns, sum(one.widths), dtype=dtype).to(_home(captured, lookups[True]))
    graphs = {key: insert_expanded(flat, lookups[mode], vectors) for key, (mode, flat) in _graphs(captured).items()}
    if inputs is not None:
        for one, rows in zip(vectors, seen_vectors(next(iter(graphs.values())), captured.root, inputs), strict=True):
            if not one.passes:
                keep_and_bring_back(modules[one.tower], expansions[one.tower], rows, one)
    rebuilt = _rebuilt(captured, clone_sharing_tensors(captured.root), graphs, modules, expansions)
    return TowerModel(rebuilt, vectors, "expanded", why, {})


def _rebuilt(
    captured: Captured,
    root: nn.Module,
    graphs: Mapping[int, Inserted],
    modules: Mapping[int, nn.Module],
    expansions: Mapping[int, nn.Module],
) -> Captured:
    for holder, held in ((HOLDER, modules), (EXPANSIONS, expansions)):
        if hasattr(root, holder):
            raise PlanError(f"the model has an attribute '{holder}', which is the name for tower modules: rename it")
        if held:
            root.add_module(holder, nn.ModuleDict({str(number): module for number, module in held.items()}))
            getattr(root, holder).train(root.training)
    made = {key: graph_module_over(root, one.graph, one.extras, "TowerModel") for key, one in graphs.items()}
    by_mode = {mode: made[id(flat)] for mode, flat in captured.graphs.items()}
    rebuilt = Rebuilt(root, by_mode)
    over = {key: graph_module_over(rebuilt, one.graph, extras_of(one), "TowerModel") for key, one in made.items()}
    return Captured({mode: over[id(flat)] for mode, flat in captured.graphs.items()}, rebuilt, captured.leaves, captured.front_end)


def _set(root: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    module = root.get_submodule(path)
    if attribute in module._buffers:
        module._buffers[attribute] = value
    else:
        module.__dict__[attribute] = value
