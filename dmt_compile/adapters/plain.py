"""Plain PyTorch models: ``nn.Embedding``, ``nn.EmbeddingBag`` and their functional forms as lookups, and reading their ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from ..errors import InputError, source_location
from ..graphs import NO_GRAD, input_path, resolve_parameter, source_text
from ..lookups import IdSource, Lookup, LookupOutput, LookupSet, Pooling, RaggedInput, Table

Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class _Call:
    """One lookup as the graph writes it, in the terms of ``torch.nn.functional``."""

    node: fx.Node
    parameter: str
    ids: fx.Node
    offsets: fx.Node | None
    weights: fx.Node | None
    pooling: Pooling
    padding_idx: int | None
    sparse: bool
    include_last_offset: bool
    max_norm: float | None
    norm_type: float
    unsupported: str | None


def holds_lookup(module: nn.Module) -> bool:
    """Whether ``module`` is, or contains, a plain embedding module."""
    return any(isinstance(child, nn.Embedding | nn.EmbeddingBag) for child in module.modules())


def id_nodes(flat: fx.GraphModule) -> list[str]:
    """The nodes whose shapes :func:`find_plain` needs."""
    names: dict[str, None] = {}
    for call in _calls(flat):
        names[call.node.name] = names[call.ids.name] = None
        if call.offsets is not None:
            names[call.offsets.name] = None
    return list(names)


def tables_of(flat: fx.GraphModule) -> list[str]:
    """The parameters that plain lookups read."""
    return list(dict.fromkeys(call.parameter for call in _calls(flat)))


def copy_tables_that_reading_changes(flat: fx.GraphModule) -> None:
    """Give the module tree that ``flat`` runs over tables of its own where a lookup has a max_norm, which writes to them."""
    copies: dict[int, nn.Parameter] = {}
    for call in _calls(flat):
        if call.max_norm is not None:
            table = flat.get_parameter(call.parameter)
            copies[id(table)] = nn.Parameter(table.detach().clone(), requires_grad=table.requires_grad)
    for module in flat.modules() if copies else ():
        for name, value in module._parameters.items():
            if id(value) in copies:
                module._parameters[name] = copies[id(value)]


def ragged_inputs(flat: fx.GraphModule) -> tuple[RaggedInput, ...]:
    """The model's inputs that lookups in offsets form read as they are given."""
    found = []
    for call in _calls(flat):
        values = input_path(call.ids)
        offsets = input_path(call.offsets) if call.offsets is not None else None
        if values is not None and offsets is not None:
            weights = input_path(call.weights) if call.weights is not None else None
            found.append(RaggedInput(values, offsets, weights, call.include_last_offset))
    return tuple(dict.fromkeys(found))


def find_plain(
    flat: fx.GraphModule,
    shapes: Shapes,
    batches: tuple[int, int],
    taken: Iterable[str] = (),
    keep: Mapping[str, str] | None = None,
) -> tuple[LookupSet, dict[str, str]]:
    """Every plain lookup of a captured graph that an owner can serve, and for the rest of the tables why they stay replicated.

    ``shapes`` holds, for the nodes of :func:`id_nodes`, their shapes for ``batches[0]`` samples, and for ``batches[1]``. No
    lookup or table gets a name of ``taken``. Tables in ``keep`` stay replicated, for the reason given there.
    """
    calls = _calls(flat)
    kept = {call.parameter: keep[call.parameter] for call in calls if keep and call.parameter in keep}
    replicated = {**kept, **_kept_weights(flat, calls)}
    served: dict[fx.Node, tuple[IdSource, tuple[int, ...]]] = {}
    for call in calls:
        if call.parameter not in replicated:
            found = _source(call, shapes, batches)
            if isinstance(found, str):
                replicated[call.parameter] = f"{_at(call)}: {found}"
            else:
                served[call.node] = found
    # A table that turns out to be replicated is no lookup any more for what depends on it, so start again after each.
    while refused := _after_lookup(flat, calls, replicated):
        replicated[refused.parameter] = f"{_at(refused)}: its ids or weights are computed from another lookup"
    accepted = [(call, *served[call.node]) for call in calls if call.parameter not in replicated]
    sources: dict[tuple[str, ...], IdSource] = {}
    for _, source, _ in accepted:
        sources.setdefault(source.nodes, source)
    return _lookup_set(flat, accepted, list(sources.values()), taken), replicated


def _after_lookup(flat: fx.GraphModule, calls: Sequence[_Call], replicated: Mapping[str, str]) -> _Call | None:
    """The first lookup that needs the result of another one before its ids are known."""
    by_node = {call.node: call for call in calls if call.parameter not in replicated}
    after: set[fx.Node] = set()
    for node in flat.graph.nodes:
        depends = any(used in after for used in node.all_input_nodes)
        if depends and node in by_node:
            return by_node[node]
        if depends or node in by_node:
            after.add(node)
    return None


def _at(call: _Call) -> str:
    return source_location(call.node) or f"node '{call.node.name}'"


def _calls(flat: fx.GraphModule) -> list[_Call]:
    names = {id(parameter): name for name, parameter in flat.named_parameters()}
    found = (_call(flat, node, names) for node in flat.graph.nodes)
    return [call for call in found if call is not None]


def _call(flat: fx.GraphModule, node: fx.Node, names: Mapping[int, str]) -> _Call | None:
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
    elif node.target in (nn.functional.embedding, nn.functional.embedding_bag, torch.embedding):
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
    if not weight.dtype.is_floating_point:
        unsupported = f"its table holds {weight.dtype}"
    if any(value is not None and not isinstance(value, fx.Node) for value in (offsets, weights)):
        unsupported = "its offsets or weights are constants"
    return _Call(
        node=node,
        parameter=names[id(weight)],
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


def _kept_weights(flat: fx.GraphModule, calls: Sequence[_Call]) -> dict[str, str]:
    """Tables that must stay on every rank whatever their ids look like, with the reason."""
    kept = {call.parameter: f"{_at(call)}: {call.unsupported}" for call in calls if call.unsupported}
    norms: dict[str, tuple[float | None, float]] = {}
    for call in calls:
        if norms.setdefault(call.parameter, (call.max_norm, call.norm_type)) != (call.max_norm, call.norm_type):
            kept.setdefault(call.parameter, f"{_at(call)}: its lookups do not all have the same max_norm")
    names = {id(parameter): name for name, parameter in flat.named_parameters()}
    tables = {call.parameter for call in calls}
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


def _source(call: _Call, shapes: Shapes, batches: tuple[int, int]) -> tuple[IdSource, tuple[int, ...]] | str:
    """The id source of a call and the shape of its output (-1 for the dimension of the batch), or why no owner can serve it."""
    batch, fewer = batches
    if call.ids.name not in shapes or call.node.name not in shapes:
        return "its ids are no tensor"
    ids, ids_fewer = shapes[call.ids.name]
    output = shapes[call.node.name][0]
    label = source_text(call.ids)
    extra = tuple(node.name for node in (call.offsets, call.weights) if node is not None)
    if call.offsets is not None:
        if call.offsets.name not in shapes:
            return "its offsets are no tensor"
        for samples, offsets in zip(batches, shapes[call.offsets.name], strict=True):
            bags = _numel(offsets) - call.include_last_offset
            if bags != samples:
                return f"it makes {bags} bags for {samples} samples"
        source = IdSource(call.ids.name, label, (label,), call.weights is not None, "offsets", 0, extra, call.include_last_offset)
        return source, (-1, *output[1:])
    count, left = divmod(_numel(ids), batch)
    grows = [place for place, (size, smaller) in enumerate(zip(ids, ids_fewer, strict=False)) if smaller != size]
    if ids == ids_fewer:
        return f"its ids are of shape {ids} for any number of samples"
    if len(ids) != len(ids_fewer) or left or not count or len(grows) != 1 or _numel(ids_fewer) != count * fewer:
        return f"its ids are of shape {ids} for {batch} samples and {ids_fewer} for {fewer}: no fixed number per sample"
    if call.pooling != "rows" and grows[0] != 0:
        return f"its bags are not one per sample: ids of shape {ids}"
    if call.pooling != "rows" and ids[0] != batch:
        return f"it makes {ids[0]} bags for {batch} samples"
    shape = tuple(-1 if place == grows[0] else size for place, size in enumerate(ids))
    source = IdSource(call.ids.name, label, (label,), call.weights is not None, "fixed", count, extra, shape=shape)
    return source, tuple(-1 if place == grows[0] else size for place, size in enumerate(output))


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _lookup_set(
    flat: fx.GraphModule,
    accepted: Sequence[tuple[_Call, IdSource, tuple[int, ...]]],
    sources: list[IdSource],
    names_taken: Iterable[str],
) -> LookupSet:
    tables: dict[str, Table] = {}
    number = {source.nodes: index for index, source in enumerate(sources)}
    weighted = {source.nodes: False for source in sources}
    lookups: list[Lookup] = []
    outputs: list[LookupOutput] = []
    reads: dict[str, int] = {}
    for call, _, _ in accepted:
        reads[call.parameter] = reads.get(call.parameter, 0) + 1
    taken = set(names_taken)
    tables_taken = set(taken)
    for call, source, shape in accepted:
        weight = flat.get_parameter(call.parameter)
        if call.parameter not in tables:
            table_name = _unused(call.parameter.removesuffix(".weight"), tables_taken)
            tables[call.parameter] = Table(table_name, call.parameter, weight.shape[0], weight.shape[1], weight.dtype)
        table = tables[call.parameter]
        name = table.name if reads[call.parameter] == 1 else f"{table.name}@{source.label}"
        name = _unused(name, taken)
        weighted[source.nodes] |= call.weights is not None
        lookups.append(
            Lookup(
                name=name,
                feature=source.features[0],
                table=table.name,
                source=number[source.nodes],
                pooling=call.pooling,
                weighted=call.weights is not None,
                dim=table.dim * (source.count if call.pooling == "rows" else 1),
                dtype=weight.dtype,
                output=len(outputs),
                padding_idx=call.padding_idx,
                sparse=call.sparse,
                grad=NO_GRAD not in call.node.meta,
                max_norm=call.max_norm,
                norm_type=call.norm_type,
            )
        )
        outputs.append(LookupOutput(call.node.name, (name,), (name,), source_location(call.node), shape))
    return LookupSet(
        tuple(tables.values()),
        tuple(replace(source, weighted=weighted[source.nodes]) for source in sources),
        tuple(lookups),
        tuple(outputs),
    )


def _unused(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}#{number}"
    taken.add(candidate)
    return candidate


def read_ids(
    ids: Any, extra: Sequence[torch.Tensor], source: IdSource
) -> tuple[list[str], torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys, values (N,), lengths (1, B) and weights (N,) or None of a tensor of ids.

    Raises:
        InputError: the ids are no integers, not the fixed number per sample that the model was compiled for, or their offsets or
            weights do not fit.
    """
    if not isinstance(ids, torch.Tensor) or ids.dtype.is_floating_point or ids.dtype is torch.bool:
        found = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise InputError(f"'{source.label}' must hold integer ids, got {found}")
    keys = list(source.features)
    if source.form == "fixed":
        samples, left = divmod(ids.numel(), source.count)
        if left or not _fits(ids.shape, source.shape):
            raise InputError(
                f"'{source.label}' has ids of shape {tuple(ids.shape)}, the model was compiled for {source.count} per sample "
                f"({_shape_text(source)}): pad or cut them to that number, or compile for another one"
            )
        lengths = torch.full((1, samples), source.count, dtype=torch.long, device=ids.device)
        weights = extra[0].reshape(-1) if source.weighted else None
    else:
        offsets = extra[0]
        if offsets.dtype not in (torch.int32, torch.int64):
            raise InputError(f"the offsets of '{source.label}' must be int32 or int64, got {offsets.dtype}")
        if not source.include_last_offset:
            offsets = torch.cat([offsets, offsets.new_tensor([ids.numel()])])
        lengths = offsets.diff().unsqueeze(0).long()
        weights = extra[1] if source.weighted else None
        if offsets.numel() == 0 or bool((lengths < 0).any()) or int(offsets[0]) != 0:
            raise InputError(f"the offsets of '{source.label}' must start at 0 and not decrease")
    if weights is not None and weights.numel() != ids.numel():
        raise InputError(f"'{source.label}' has {weights.numel()} weights for {ids.numel()} ids")
    return keys, ids.reshape(-1), lengths, weights


def _fits(shape: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether ``shape`` is the expected one, in which -1 stands for any size."""
    return len(shape) == len(expected) and all(want in (-1, size) for size, want in zip(shape, expected, strict=True))


def _shape_text(source: IdSource) -> str:
    per_unit = source.count
    for size in source.shape:
        per_unit //= size if size > 0 else 1
    grows = "B" if per_unit == 1 else f"{per_unit} * B"
    sizes = ", ".join(grows if size < 0 else str(size) for size in source.shape)
    return f"shape ({sizes}{',' if len(source.shape) == 1 else ''}) for B samples"
