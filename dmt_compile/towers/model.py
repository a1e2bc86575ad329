"""The tower model: a flat model with a module per tower, and with its interaction re-sized to what these make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from ..capture import Captured
from ..errors import PlanError, first_line
from ..graphs import clone_sharing_tensors, deepcopy_values, extras_of, graph_module_over
from ..interactions.find import follow
from ..interactions.tape import Tape
from ..lookups import LookupSet
from ..nested import take_apart
from ..plan import TowerPlan
from ..resize import NewSizes, Unfit, apply_sizes
from ..verify.deal import Layout
from .choose import TowerModules, make_modules, refuse_widths
from .holder import TowerHolder
from .insert import Inserted, insert_at_sites, insert_expanded, kept_count, with_arguments
from .modules import DLRMTower, Factory
from .preserve import keep_and_bring_back, seen_vectors, set_modules, set_resized
from .record import EXPANSIONS, HOLDER, TowerVectors
from .sites import each_vector, find_sites, one_vector
from .sized import Found, new_sizes

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_SHOWN = 4


@dataclass(frozen=True)
class TowerModel:
    """The captured tower model, and what its towers' modules take and make: ``vectors``, a :class:`TowerVectors` for each.

    ``way`` is "re-sized" or "expanded", ``why`` the reason for the latter; ``resized`` names the parameters and buffers that
    changed shape, with the old and the new one. ``kept`` tells of a warm start; ``redrawn`` are then the tensors that do not follow
    from the old ones. ``undrawn`` says of layers by name why their class could not draw them with their sizes: they are then drawn
    from a normal distribution.
    """

    captured: Captured
    vectors: tuple[TowerVectors, ...]
    way: str
    why: str
    resized: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    redrawn: tuple[str, ...] = ()
    kept: bool = False
    undrawn: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        towers = ", ".join(f"{sum(one.widths)} to {one.columns} columns" for one in self.vectors[:_SHOWN])
        if len(self.vectors) > _SHOWN:
            towers += ", ..."
        kept = f", kept, {len(self.redrawn)} redrawn" if self.kept else ""
        return f"TowerModel({self.way}, {len(self.vectors)} towers: {towers}; {len(self.resized)} resized{kept})"


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
class Task:
    """A flat model and the tower modules that it is to get.

    ``lookups`` and ``layouts`` are by mode, ``sample`` a few samples of its inputs. With ``inputs``, the weights begin as close to
    those of the flat model as they can, see :mod:`preserve`.
    """

    captured: Captured
    lookups: Mapping[bool, LookupSet]
    layouts: Mapping[bool, Layout]
    plan: TowerPlan
    wanted: TowerModules
    sample: Inputs | None
    seed: int = 0
    inputs: Inputs | None = None

    @property
    def graphs(self) -> dict[int, tuple[bool, fx.GraphModule]]:
        """The different graphs, with one of the modes that each is for."""
        return {id(graph): (mode, graph) for mode, graph in self.captured.graphs.items()}

    def modules(self, names: Sequence[str]) -> tuple[tuple[TowerVectors, ...], dict[int, nn.Module]]:
        """The towers' modules for the lookups ``names``, on the device of the tables."""
        return make_modules(self.wanted, self.plan, self.lookups[True], names, self.seed, self.home)

    @property
    def home(self) -> torch.device:
        """The device of the tables."""
        return self.captured.root.get_parameter(self.lookups[True].tables[0].parameter).device


def tower_model(task: Task, *, expand: bool = False) -> TowerModel:
    """Give every tower its module, and re-size the interaction and its neighbours to what the modules make (section 3.2).

    Where new sizes do not follow from the graph, or with ``expand``, a layer per tower brings its vectors back to their old width
    behind the exchange, and everything behind stays as it is.

    Raises:
        PlanError: the modules do not fit the towers, or no lookup makes one vector per sample.
    """
    try:
        if expand:
            raise Unfit("it was asked for")
        made = _resized(task)
        if task.inputs is not None:
            _check_kept(task, made)
        return made
    except Unfit as reason:
        return _expanded(task, str(reason))


def _check_kept(task: Task, made: TowerModel) -> None:
    """Try the warm start where it must be exact: with modules that keep all of their vectors, in more columns than these have.

    What does not follow from the flat model's weights is zero in both models, so that all else is compared.

    Raises:
        Unfit: the model depends on how wide or how many its vectors are, or holds them in an order that weights cannot follow.
    """
    sample = task.sample
    if sample is None or all(one.passes for one in made.vectors):
        return
    try:
        tried = _resized(replace(task, wanted=_keeping_all(task, made.vectors), inputs=sample))
    except (Unfit, PlanError) as error:
        raise Unfit(f"a warm start could not be tried: {first_line(error)}") from error
    counting = [name for name in tried.redrawn if name not in made.redrawn]
    if counting:
        raise Unfit(f"a warm start does not carry over: '{counting[0]}' depends on how many vectors there are, and which")
    if any(tensor.is_meta for tensor in task.captured.root.parameters()):
        return
    mine, its = (_results(root, sample, tried.redrawn) for root in (task.captured.root, tried.captured.root))
    for one, other in zip(mine, its, strict=True):
        if one.shape != other.shape or not _close(one.double(), other.double()):
            raise Unfit(
                "a warm start does not carry over: the model depends on how wide its vectors are, or holds their columns in an "
                "order that its weights cannot follow"
            )


def _keeping_all(task: Task, vectors: Sequence[TowerVectors]) -> dict[int, Factory]:
    """A module for each tower that keeps all of its columns and is laid out as the one in ``vectors`` is: in the place of each
    feature or not, as wide as other towers' or not.
    """
    found: dict[int, Factory] = {}
    widths = sorted({one.width for one in vectors})
    widest = max(width for one in vectors for width in one.widths)
    for one in vectors:
        count = len(one.lookups)
        if kept_count(vectors) and (one.equal_widths or not one.passes):
            width = 2 * widest + widths.index(one.width)
            found[one.tower] = DLRMTower(1, 0, width) if one.equal_widths else DLRMTower(0, count, width)
        elif not one.passes:
            more = -(-sum(one.widths) // one.width) + 1
            # As many as there are features would be taken for one for each.
            found[one.tower] = DLRMTower(0, more + (more == count), one.width)
    return found


def _results(root: nn.Module, sample: Inputs, left_out: Sequence[str]) -> list[torch.Tensor]:
    clone = clone_sharing_tensors(root, copy_buffers=True).eval()
    for name in left_out:
        path, _, attribute = name.rpartition(".")
        module = clone.get_submodule(path)
        registry: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
        registry[attribute] = torch.zeros_like(registry[attribute])
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        found = take_apart(clone(*deepcopy_values(sample[0]), **deepcopy_values(sample[1])))[0]
    return [one for one in found if isinstance(one, torch.Tensor)]


def _close(mine: torch.Tensor, its: torch.Tensor) -> bool:
    finite = mine[mine.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(mine, its, rtol=1e-3, atol=1e-4 * max(scale, 1e-3), equal_nan=True)


def _resized(task: Task) -> TowerModel:
    captured, lookups = task.captured, task.lookups
    tapes: dict[int, Tape] = {}
    for key, (mode, flat) in task.graphs.items():
        try:
            tapes[key] = follow(flat, captured.root, lookups[mode], task.sample, task.layouts[mode])
        except Exception as error:
            raise Unfit(f"the model could not be followed ({first_line(error)})") from error
    reasons: list[str] = []
    # Where the vectors lie together any number of others can stand in their place, elsewhere one for each of them.
    for together in (True, False):
        find = find_sites if together else each_vector
        found = {
            key: Found(flat, lookups[mode], tapes[key], find(flat.graph, tapes[key], lookups[mode]))
            for key, (mode, flat) in task.graphs.items()
        }
        try:
            return _resized_at(task, found, together)
        except Unfit as reason:
            reasons.append(str(reason).partition("\n")[0])
    raise Unfit(reasons[0] if not reasons[0].startswith(_NOWHERE) else reasons[1])


_NOWHERE = "nowhere in the model"


def _resized_at(task: Task, found: Mapping[int, Found], together: bool) -> TowerModel:
    captured = task.captured
    sites = [one.sites for one in found.values() if one.sites is not None]
    if len(sites) < len(found):
        raise Unfit(f"{_NOWHERE} do the vectors of several features lie together")
    if len({frozenset(one.lookups) for one in sites}) > 1:
        raise Unfit("other features lie together in training than in evaluation")
    vectors, modules = task.modules(sites[0].lookups)
    if any("vectors" in site.axes for one in sites for site in one.sites):
        refuse_widths(vectors)
    if not together and not kept_count(vectors):
        raise Unfit("features are taken one by one, and the tower modules do not make one vector for each")
    made: dict[int, tuple[Inserted, NewSizes]] = {}
    for key, one in found.items():
        assert one.sites is not None
        inserted = insert_at_sites(one.flat, one.lookups, vectors, one.sites)
        made[key] = (inserted, new_sizes(captured.root, one, inserted, vectors, kept=task.inputs is not None))
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
    undrawn = apply_sizes(root, {name: shape for name, shape in tensors.items() if name not in constants}, norms, task.seed)
    for place, value in constants.items():
        _set(root, place, value)
    new = {name: tuple(tensor.shape) for name, tensor in (*root.named_parameters(), *root.named_buffers())}
    resized = {name: (shape, new[name]) for name, shape in old.items() if new[name] != shape}
    redrawn: list[str] = []
    if task.inputs is not None:
        inserted, _ = next(iter(made.values()))
        values = dict(
            (*captured.root.named_parameters(remove_duplicate=False), *captured.root.named_buffers(remove_duplicate=False))
        )
        kept = set_modules(modules, vectors, seen_vectors(inserted, captured.root, task.inputs), sites[0].sites[0].lookups)
        axes = {name: one for _, sizes in made.values() for name, one in sizes.axes.items()}
        redrawn = set_resized(root, values, axes, kept)
        undrawn = {path: why for path, why in undrawn.items() if any(name.rpartition(".")[0] == path for name in redrawn)}
    holder = TowerHolder(modules, vectors, task.plan, task.home)
    rebuilt = _rebuilt(captured, root, {key: inserted for key, (inserted, _) in made.items()}, holder, {})
    _try(rebuilt.root, task.sample)
    return TowerModel(rebuilt, vectors, "re-sized", "", resized, tuple(redrawn), task.inputs is not None, undrawn)


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


def _expanded(task: Task, why: str) -> TowerModel:
    captured, lookups = task.captured, task.lookups
    names = list(one_vector(lookups[True]))
    if not names:
        raise PlanError(
            "no lookup of the model makes one vector per sample, which is what tower modules take: compile without tower_module"
        )
    vectors, modules = task.modules(names)
    expansions: dict[int, nn.Module] = {}
    for one in vectors:
        if not one.passes:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(task.seed + one.tower)
                dtype = lookups[True].lookup[one.lookups[0]].dtype
                expansions[one.tower] = nn.Linear(one.columns, sum(one.widths), dtype=dtype).to(task.home)
    graphs = {key: insert_expanded(flat, lookups[mode], vectors) for key, (mode, flat) in task.graphs.items()}
    if task.inputs is not None:
        for one, rows in zip(vectors, seen_vectors(next(iter(graphs.values())), captured.root, task.inputs), strict=True):
            if not one.passes:
                keep_and_bring_back(modules[one.tower], expansions[one.tower], rows, one)
    holder = TowerHolder(modules, vectors, task.plan, task.home)
    rebuilt = _rebuilt(captured, clone_sharing_tensors(captured.root), graphs, holder, expansions)
    return TowerModel(rebuilt, vectors, "expanded", why, {}, (), task.inputs is not None)


def _rebuilt(
    captured: Captured,
    root: nn.Module,
    graphs: Mapping[int, Inserted],
    towers: TowerHolder,
    expansions: Mapping[int, nn.Module],
) -> Captured:
    behind = nn.ModuleDict({str(number): module for number, module in expansions.items()})
    for name, held in ((HOLDER, towers), (EXPANSIONS, behind)):
        if hasattr(root, name):
            raise PlanError(f"the model has an attribute '{name}', which is the name for tower modules: rename it")
        if len(held):
            root.add_module(name, held.train(root.training))
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
