"""Finding the calls that look rows of a table up: ``nn.Embedding``, ``nn.EmbeddingBag``, their functional forms, and indexing."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..errors import source_location
from ..graphs import LOOKUPS, attribute_of, input_path, resolve_parameter
from ..lookups import Pooling, RaggedInput


@dataclass(frozen=True)
class Call:
    """One lookup as the graph writes it, in the terms of ``torch.nn.functional``."""

    node: fx.Node
    parameter: str
    rows: int
    dim: int
    dtype: torch.dtype
    ids: fx.Node
    pooling: Pooling
    offsets: fx.Node | None = None
    weights: fx.Node | None = None
    padding_idx: int | None = None
    sparse: bool = False
    include_last_offset: bool = False
    max_norm: float | None = None
    norm_type: float = 2.0
    unsupported: str | None = None
    indexing: bool = False

    @property
    def wraps(self) -> bool:
        """Whether ids count from the end if they are negative, as indices do."""
        return self.indexing and "select" not in str(self.node.target)

    @property
    def at(self) -> str:
        """Where it stands in the user's code."""
        return source_location(self.node) or f"node '{self.node.name}'"

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The nodes that its ids, offsets and weights come from."""
        return tuple(node for node in (self.ids, self.offsets, self.weights) if node is not None)


def holds_lookup(module: nn.Module) -> bool:
    """Whether ``module`` is, or contains, a plain embedding module."""
    return any(isinstance(child, nn.Embedding | nn.EmbeddingBag) for child in module.modules())


def copy_tables_that_reading_changes(flat: fx.GraphModule, calls: Sequence[Call]) -> None:
    """Give the module tree that ``flat`` runs over tables of its own where a lookup has a max_norm, which writes to them."""
    copies: dict[int, nn.Parameter] = {}
    for call in calls:
        if call.max_norm is not None:
            table = flat.get_parameter(call.parameter)
            copies[id(table)] = nn.Parameter(table.detach().clone(), requires_grad=table.requires_grad)
    for module in flat.modules() if copies else ():
        for name, value in module._parameters.items():
            if id(value) in copies:
                module._parameters[name] = copies[id(value)]


def ragged_inputs(calls: Sequence[Call]) -> tuple[RaggedInput, ...]:
    """The model's inputs that lookups in offsets form read, as they are given or with something done to every id."""
    found = []
    for call in calls:
        values = _origin(call.ids)
        offsets = input_path(call.offsets) if call.offsets is not None else None
        if values is not None and offsets is not None:
            weights = _origin(call.weights) if call.weights is not None else None
            found.append(RaggedInput(values, offsets, weights, call.include_last_offset))
    return tuple(dict.fromkeys(found))


def _origin(node: fx.Node) -> tuple[object, ...] | None:
    """Where in the inputs the one tensor stands that a value is computed from; None if there are several, or none."""
    places: dict[tuple[object, ...], None] = {}
    seen, waiting = {node}, [node]
    while waiting:
        one = waiting.pop()
        place = input_path(one)
        if place is not None:
            places[place] = None
            continue
        for used in one.all_input_nodes:
            if used not in seen:
                seen.add(used)
                waiting.append(used)
    return next(iter(places)) if len(places) == 1 else None


def kept_weights(flat: fx.GraphModule, calls: Sequence[Call]) -> dict[str, str]:
    """Tables that must stay on every rank whatever their ids look like, with the reason."""
    tables = {call.parameter for call in calls}
    kept = {call.parameter: f"{call.at}: {call.unsupported}" for call in calls if call.unsupported}
    norms: dict[str, tuple[float | None, float]] = {}
    for call in calls:
        if norms.setdefault(call.parameter, (call.max_norm, call.norm_type)) != (call.max_norm, call.norm_type):
            kept.setdefault(call.parameter, f"{call.at}: its lookups do not all have the same max_norm")
    names = {id(parameter): name for name, parameter in flat.named_parameters()}
    lookups = {call.node for call in calls}
    for node in flat.graph.nodes:
        if node in lookups:
            continue
        if node.op == "call_module":
            used: list[Any] = list(flat.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr" and not (node.users and all(_reads_as_table(user, node, lookups) for user in node.users)):
            owner, attribute = resolve_parameter(flat, str(node.target))
            used = [getattr(owner, attribute)]
        else:
            continue
        for name in (names.get(id(parameter)) for parameter in used):
            if name in tables:
                kept.setdefault(name, f"{source_location(node) or node.name}: it is also used as a weight here")
    return kept


def _reads_as_table(user: fx.Node, weight: fx.Node, lookups: set[fx.Node]) -> bool:
    return user in lookups and sum(arg is weight for arg in (*user.args, *user.kwargs.values())) == 1


def find_calls(flat: fx.GraphModule) -> list[Call]:
    """Every lookup on a parameter of the model, in the graph's order.

    Indexing is among them wherever the index is a value of the graph: whether it is a tensor of ids is seen when the graph runs.
    """
    names = {id(parameter): name for name, parameter in flat.named_parameters()}
    found = (_call(flat, node, names) for node in flat.graph.nodes)
    return [call for call in found if call is not None]


def no_parameters(flat: fx.GraphModule) -> dict[str, str]:
    """The tables that the graph looks ids up in without their being parameters, by attribute, and why they stay on every rank."""
    parameters = {id(parameter) for parameter in flat.parameters()}
    buffers = dict(flat.named_buffers(remove_duplicate=False))
    found: dict[str, str] = {}
    for node in flat.graph.nodes:
        if node.target not in LOOKUPS:
            continue
        held = _functional_arguments(node).get("weight")
        if isinstance(held, fx.Node) and held.op == "get_attr" and id(attribute_of(flat, str(held.target))) not in parameters:
            name = str(held.target)
            reason = _A_BUFFER if name in buffers else _A_CONSTANT
            found.setdefault(name, f"{source_location(node) or node.name}: {reason}")
    return found


_A_BUFFER = "the table is a buffer: make it an nn.Parameter (with requires_grad=False, it stays as it is) to have it spread"
_A_CONSTANT = (
    "the table is no parameter of the model, so it is taken as the constant that it is now: to have it trained, saved and spread, "
    "register it (an nn.Embedding in a plain list or dict belongs in a ModuleList or ModuleDict)"
)


def kept_aside(root: nn.Module) -> list[str]:
    """The attributes in which modules keep tables that torch does not know of, because they stand in a plain list or dict."""
    known = set(root.modules())
    found = []
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            if any(isinstance(one, nn.Embedding | nn.EmbeddingBag) and one not in known for one in held):
                found.append(f"{path}.{name}".removeprefix("."))
    return found


def rows_of_computed(flat: fx.GraphModule) -> list[tuple[str, tuple[str, ...]]]:
    """Where the user's code takes rows, by values of the batch, of what it computes from whole matrices, and from which ones.

    Graph recommenders do: they multiply all rows of their tables by a matrix of neighbours before they look any row up.
    """
    names = {id(parameter): name for name, parameter in flat.named_parameters()}
    # Values that no input but by its sizes has a part in, by the matrices that they are computed from.
    whole: dict[fx.Node, dict[str, None]] = {}
    found: dict[str, dict[str, None]] = {}
    for node in flat.graph.nodes:
        if _is_size(node):
            whole[node] = {}
        elif all(used in whole for used in node.all_input_nodes) and node.op not in ("placeholder", "output"):
            whole[node] = {name: None for used in node.all_input_nodes for name in whole[used]}
            whole[node].update((names[id(value)], None) for value in _matrices(flat, node) if id(value) in names)
        elif node.target in _SELECTING:
            source, index = _selection(node)
            if isinstance(source, fx.Node) and whole.get(source) and any(used not in whole for used in index):
                found.setdefault(source_location(node) or f"node '{node.name}'", {}).update(whole[source])
    return [(place, tuple(matrices)) for place, matrices in found.items()]


def _is_size(node: fx.Node) -> bool:
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim")
    return node.target in ("size", "dim", len, torch.ops.aten.sym_size.int)


def _matrices(flat: fx.GraphModule, node: fx.Node) -> list[nn.Parameter]:
    """The matrices that a node reads by itself: a parameter, or those of a module that is given nothing."""
    if node.op == "call_module" and not node.all_input_nodes:
        return [value for value in flat.get_submodule(str(node.target)).parameters() if value.dim() == 2]
    if node.op != "get_attr":
        return []
    owner, attribute = resolve_parameter(flat, str(node.target))
    value = getattr(owner, attribute)
    return [value] if isinstance(value, nn.Parameter) and value.dim() == 2 else []


def _selection(node: fx.Node) -> tuple[Any, list[fx.Node]]:
    """What a node takes rows of, and the values that say which."""
    bound = _functional_arguments(node) if node.target in LOOKUPS else {}
    source = bound.get("weight", node.kwargs.get("input", node.args[0] if node.args else None))
    return source, [used for used in node.all_input_nodes if used is not source]


def _call(flat: fx.GraphModule, node: fx.Node, names: Mapping[int, str]) -> Call | None:
    """A node as a lookup on a parameter of the model; None if it is anything else."""
    if node.op == "call_module":
        module = flat.get_submodule(str(node.target))
        if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
            bound = _arguments(node, ("input",))
            options = {"padding_idx": module.padding_idx, "sparse": module.sparse}
            pooling: Pooling = "rows"
        elif isinstance(module, nn.EmbeddingBag) and type(module).forward is nn.EmbeddingBag.forward:
            bound = _arguments(node, ("input", "offsets", "per_sample_weights"))
            options = {
                "padding_idx": module.padding_idx,
                "sparse": module.sparse,
                "include_last_offset": module.include_last_offset,
            }
            pooling = module.mode  # type: ignore[assignment]
        else:
            return None
        weight: Any = module.weight
        norms: Mapping[str, Any] = {"max_norm": module.max_norm, "norm_type": module.norm_type}
        unsupported = _BY_FREQUENCY if module.scale_grad_by_freq else None
        if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
            unsupported = "its module has a hook"
        if "forward" in module.__dict__:
            unsupported = "its module's forward was replaced"
    elif node.target in _INDEXING:
        return _indexing_call(flat, node, names)
    elif node.target in LOOKUPS:
        bound = _functional_arguments(node)
        held = bound.pop("weight", None)
        if not (isinstance(held, fx.Node) and held.op == "get_attr"):
            return None
        owner, attribute = resolve_parameter(flat, str(held.target))
        weight = getattr(owner, attribute)
        options = {key: bound.get(key) for key in ("padding_idx", "sparse", "include_last_offset")}
        pooling = bound.get("mode", "mean") if node.target is nn.functional.embedding_bag else "rows"
        norms = bound
        unsupported = _BY_FREQUENCY if bound.get("scale_grad_by_freq") else None
    else:
        return None
    ids, offsets, weights = bound.get("input"), bound.get("offsets"), bound.get("per_sample_weights")
    if id(weight) not in names or not isinstance(ids, fx.Node):
        return None
    padding = options.get("padding_idx")
    if padding is not None and padding < 0:
        # The module and functional forms count from the end; to the operator underneath it means none.
        padding = None if node.target is torch.embedding else padding + weight.shape[0]
    if any(value is not None and not isinstance(value, fx.Node) for value in (offsets, weights)):
        unsupported = "its offsets or weights are constants"
    return _call_of(
        node,
        weight,
        names,
        ids=ids,
        offsets=offsets if isinstance(offsets, fx.Node) else None,
        weights=weights if isinstance(weights, fx.Node) else None,
        pooling=pooling,
        padding_idx=padding,
        sparse=bool(options.get("sparse")),
        include_last_offset=bool(options.get("include_last_offset")),
        max_norm=norms.get("max_norm"),
        norm_type=norms.get("norm_type", 2.0),
        unsupported=unsupported,
    )


def _call_of(node: fx.Node, weight: Any, names: Mapping[int, str], **options: Any) -> Call:
    """A lookup on ``weight``, a parameter of the model."""
    if not weight.dtype.is_floating_point:
        options["unsupported"] = f"its table holds {weight.dtype}"
    rows, dim = weight.shape
    return Call(node=node, parameter=names[id(weight)], rows=rows, dim=dim, dtype=weight.dtype, **options)


_INDEXING = (
    *(operator.getitem, torch.index_select, "index_select", torch.ops.aten.index.Tensor),
    *(torch.ops.aten.index_select.default,),
)


def _indexing_call(flat: fx.GraphModule, node: fx.Node, names: Mapping[int, str]) -> Call | None:
    """``parameter[ids]`` or ``parameter.index_select(0, ids)`` as a lookup of rows."""
    bound = _arguments(node, ("input", "dim", "index")) if "index_select" in str(node.target) else {}
    held = bound.get("input", node.args[0] if node.args else None)
    ids: Any = bound.get("index") if bound else node.args[1]
    if isinstance(ids, list | tuple) and len(ids) == 1:
        ids = ids[0]
    if not (isinstance(held, fx.Node) and held.op == "get_attr" and isinstance(ids, fx.Node) and bound.get("dim", 0) == 0):
        return None
    owner, attribute = resolve_parameter(flat, str(held.target))
    weight = getattr(owner, attribute)
    if id(weight) not in names or weight.dim() != 2:
        return None
    return _call_of(node, weight, names, ids=ids, pooling="rows", indexing=True)


_SELECTING = (
    *(*_INDEXING, *LOOKUPS, torch.gather, "gather", torch.ops.aten.gather.default),
    *(torch.take_along_dim, "take_along_dim"),
)
_BY_FREQUENCY = "it uses scale_grad_by_freq, so its gradient depends on which samples are on one rank"


def _arguments(node: fx.Node, names: Sequence[str]) -> dict[str, Any]:
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_EMBEDDING_BAG = (
    *("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq"),
    *("mode", "sparse", "per_sample_weights", "include_last_offset", "padding_idx"),
)
_ATEN_EMBEDDING = ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse")


def _functional_arguments(node: fx.Node) -> dict[str, Any]:
    if node.target is nn.functional.embedding:
        return _arguments(node, _EMBEDDING)
    if node.target is torch.embedding:
        bound = _arguments(node, _ATEN_EMBEDDING)
        return {("input" if key == "indices" else key): value for key, value in bound.items()}
    return _arguments(node, _EMBEDDING_BAG)
