"""TorchRec models: which modules are lookups, what they look up, and how batches of theirs are read and divided."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from ..errors import CaptureError, InputError, at, source_location
from ..graphs import source_text
from ..jagged import permute_blocks
from ..lookups import IdSource, Lookup, LookupOutput, LookupSet, Pooling, Table

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


def _loaded(module: str, name: str) -> type | None:
    """A class of an optional library if that library has been imported: nobody can hold an instance otherwise."""
    return getattr(sys.modules.get(module), name, None)


def is_collection(module: nn.Module) -> bool:
    """Whether ``module`` is a TorchRec ``EmbeddingBagCollection`` with the forward that TorchRec ships."""
    cls = _loaded("torchrec.modules.embedding_modules", "EmbeddingBagCollection")
    if cls is None or not isinstance(module, cls) or "forward" in module.__dict__:
        return False
    return bool(type(module).forward is cls.forward)  # type: ignore[attr-defined]


def must_stay_whole(module: nn.Module) -> bool:
    """Whether ``module`` sets itself up from the first batch that it sees, which tracing would take for its final state."""
    cls = _loaded("torchrec.modules.regroup", "KTRegroupAsDict")
    return cls is not None and isinstance(module, cls)


def holds_collection(module: nn.Module) -> bool:
    """Whether ``module`` is, or contains, a lookup collection."""
    return any(is_collection(child) for child in module.modules())


def check_model(model: nn.Module) -> None:
    """Raise for models whose lookups would not run as their modules say.

    Raises:
        CaptureError: a ``DistributedModelParallel`` or a sharded embedding module is inside, or a collection whose forward,
            hooks or tables were changed after it was made.
    """
    collection = _loaded("torchrec.modules.embedding_modules", "EmbeddingBagCollection")
    for name, module in model.named_modules():
        kind = type(module)
        if collection is not None and isinstance(module, collection):
            _check_collection(name, module)
        if kind.__module__.startswith("torchrec.distributed"):
            raise CaptureError(
                f"'{name or 'the model'}' is a {kind.__name__}, already sharded by TorchRec: "
                "towerize takes the model before DistributedModelParallel or shard() is applied"
            )


def _check_collection(name: str, collection: Any) -> None:
    """Towers read the tables themselves: what was hung on a collection or its bags would not run."""
    if "forward" in collection.__dict__:
        raise CaptureError(
            f"the forward of the EmbeddingBagCollection '{name}' was replaced on the instance, which towers would not run: "
            "put the change into a module of its own around it"
        )
    configs = {config.name: config for config in collection.embedding_bag_configs()}
    for path, module in [
        (name, collection),
        *((f"{name}.embedding_bags.{key}", bag) for key, bag in collection.embedding_bags.items()),
    ]:
        if has_hooks(module):
            raise CaptureError(f"'{path}' has hooks, which towers would not run: hang them on a module around the collection")
    for key, bag in collection.embedding_bags.items():
        if (type(bag) is not nn.EmbeddingBag and not nn.utils.parametrize.is_parametrized(bag)) or "forward" in bag.__dict__:
            raise CaptureError(
                f"table '{key}' of '{name}' is a {type(bag).__name__} with a forward of its own, which towers would not run"
            )
        if nn.utils.parametrize.is_parametrized(bag):
            raise CaptureError(f"table '{key}' of '{name}' is parametrized: its weight is computed, so no rank can own its rows")
        if key in configs and bag.mode != _pooling(configs[key].pooling):
            raise CaptureError(f"table '{key}' of '{name}' pools by {bag.mode}, its configuration says {configs[key].pooling.name}")


def has_hooks(module: nn.Module) -> bool:
    """Whether calling ``module`` runs anything besides its forward."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in hooks)


def find_collections(flat: fx.GraphModule) -> LookupSet:
    """Every ``EmbeddingBagCollection`` call of a captured graph, as tables, id sources and lookups.

    Raises:
        CaptureError: a table is also used outside its collection.
    """
    calls = [n for n in flat.graph.nodes if n.op == "call_module" and is_collection(flat.get_submodule(str(n.target)))]
    builder = _Builder(flat, calls)
    for call in calls:
        builder.add(call)
    _refuse_other_uses(flat, builder.weights, calls)
    return builder.build()


class _Builder:
    """Collects tables, sources and lookups call by call."""

    def __init__(self, flat: fx.GraphModule, calls: Sequence[fx.Node]) -> None:
        self.flat = flat
        # A table that two collections share goes by its first name, as in named_parameters().
        self.parameter_names = {id(parameter): name for name, parameter in flat.named_parameters()}
        self.weights: dict[int, Table] = {}
        self.tables: list[Table] = []
        self.lookups: list[Lookup] = []
        self.outputs: list[LookupOutput] = []
        self.sources: dict[fx.Node, tuple[int, dict[str, None], bool]] = {}
        self.calls_of: dict[str, int] = {}
        self.names: set[str] = set()
        table_names: dict[str, int] = {}
        lookup_names: dict[str, int] = {}
        for target in dict.fromkeys(str(call.target) for call in calls):
            for config in flat.get_submodule(target).embedding_bag_configs():  # type: ignore[operator]
                table_names[config.name] = table_names.get(config.name, 0) + 1
        for call in calls:
            for name in flat.get_submodule(str(call.target))._embedding_names:  # type: ignore[union-attr]
                lookup_names[name] = lookup_names.get(name, 0) + 1
        self.repeated_tables = {name for name, count in table_names.items() if count > 1}
        self.repeated_lookups = {name for name, count in lookup_names.items() if count > 1}

    def add(self, call: fx.Node) -> None:
        target = str(call.target)
        collection: Any = self.flat.get_submodule(target)
        source_node = call.args[0] if call.args else call.kwargs.get("features")
        if not isinstance(source_node, fx.Node):
            raise CaptureError(
                f"{at(call)}: the EmbeddingBagCollection '{target}' is called without a KeyedJaggedTensor of the graph"
            )
        weighted = bool(collection.is_weighted())
        index, features, was_weighted = self.sources.setdefault(source_node, (len(self.sources), {}, False))
        self.sources[source_node] = (index, features, was_weighted or weighted)
        self.calls_of[target] = self.calls_of.get(target, 0) + 1
        call_name = target if self.calls_of[target] == 1 else f"{target}#{self.calls_of[target]}"
        keys, names = iter(collection._embedding_names), []
        for config in collection.embedding_bag_configs():
            table = self._table(target, config.name, collection.embedding_bags[config.name])
            for feature in config.feature_names:
                key = next(keys)
                name = self._unused(f"{call_name}:{key}" if key in self.repeated_lookups else key)
                features.setdefault(feature)
                self.lookups.append(
                    Lookup(
                        name=name,
                        feature=feature,
                        table=table.name,
                        source=index,
                        pooling=_pooling(config.pooling),
                        weighted=weighted,
                        dim=table.dim,
                        dtype=torch.float32,
                        output=len(self.outputs),
                    )
                )
                names.append(name)
        self.outputs.append(LookupOutput(call.name, tuple(collection._embedding_names), tuple(names), source_location(call)))

    def _unused(self, name: str) -> str:
        """TorchRec lets two lookups of one collection have the same name."""
        candidate, number = name, 1
        while candidate in self.names:
            number += 1
            candidate = f"{name}#{number}"
        self.names.add(candidate)
        return candidate

    def _table(self, target: str, name: str, bag: nn.EmbeddingBag) -> Table:
        weight = bag.weight
        if id(weight) in self.weights:
            return self.weights[id(weight)]
        if not weight.dtype.is_floating_point:
            raise CaptureError(
                f"table '{name}' of '{target}' holds {weight.dtype}: quantised tables cannot be trained or partitioned"
            )
        if bag.max_norm is not None or bag.scale_grad_by_freq or bag.padding_idx is not None:
            raise CaptureError(
                f"table '{name}' of '{target}' sets max_norm, scale_grad_by_freq or padding_idx, "
                "which EmbeddingBagCollection never does: "
                "such a bag cannot be served by a remote rank with the same result"
            )
        unique = f"{target}.{name}" if name in self.repeated_tables else name
        table = Table(unique, self.parameter_names[id(weight)], weight.shape[0], weight.shape[1], weight.dtype)
        self.weights[id(weight)] = table
        self.tables.append(table)
        return table

    def build(self) -> LookupSet:
        sources = tuple(
            IdSource(node.name, source_text(node), tuple(features), weighted)
            for node, (_, features, weighted) in self.sources.items()
        )
        return LookupSet(tuple(self.tables), sources, tuple(self.lookups), tuple(self.outputs))


def _pooling(pooling: Any) -> Pooling:
    name: str = pooling.name.lower()
    if name == "sum":
        return "sum"
    if name == "mean":
        return "mean"
    raise CaptureError(f"pooling {pooling} is not one of SUM, MEAN")


def _refuse_other_uses(flat: fx.GraphModule, weights: dict[int, Table], calls: Sequence[fx.Node]) -> None:
    lookups = set(calls)
    for node in flat.graph.nodes:
        if node.op == "call_module" and node not in lookups:
            used: list[Any] = list(flat.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr":
            path, _, attribute = str(node.target).rpartition(".")
            used = [getattr(flat.get_submodule(path), attribute)]
        else:
            continue
        for parameter in used:
            if id(parameter) in weights:
                raise CaptureError(
                    f"table '{weights[id(parameter)].name}' is also used as a weight by {at(node)}: "
                    "a table that moves to one rank cannot be read "
                    "elsewhere; give that place a parameter of its own"
                )


def read_ids(batch: KeyedJaggedTensor, source: IdSource) -> tuple[list[str], torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys, values (N,), lengths (F, B) and weights (N,) or None of a KeyedJaggedTensor.

    Raises:
        InputError: not a KeyedJaggedTensor, one with another batch size per feature, one whose lengths or weights do
            not fit, or one without the weights that a weighted collection needs.
    """
    if not is_jagged(batch):
        raise InputError(f"'{source.label}' must be a torchrec KeyedJaggedTensor, got {type(batch).__name__}")
    if batch.variable_stride_per_key() or batch.inverse_indices_or_none() is not None:
        raise InputError(
            f"'{source.label}' has a batch size of its own per feature (variable stride): "
            "expand the features to one batch size first"
        )
    keys, lengths, size = batch.keys(), batch.lengths(), batch.stride()
    if lengths.numel() != len(keys) * size:
        raise InputError(
            f"'{source.label}' has {lengths.numel()} lengths, but {len(keys)} features x batch size {size} need {len(keys) * size}"
        )
    if batch.values().dtype.is_floating_point or batch.values().dtype is torch.bool:
        raise InputError(f"'{source.label}' must hold integer ids, got {batch.values().dtype}")
    if bool((lengths < 0).any()):
        raise InputError(f"'{source.label}' has negative lengths")
    weights = batch.weights_or_none()
    if source.weighted and weights is None:
        raise InputError(
            f"'{source.label}' has no weights, but a weighted EmbeddingBagCollection reads "
            f"{', '.join(map(repr, source.features[:4]))} from it"
        )
    if source.weighted and weights is not None and weights.numel() != batch.values().numel():
        raise InputError(f"'{source.label}' has {weights.numel()} weights for {batch.values().numel()} ids")
    return keys, batch.values(), lengths.view(len(keys), size), weights if source.weighted else None


def make_output(keys: Sequence[str], dims: Sequence[int], values: torch.Tensor) -> KeyedTensor:
    """The KeyedTensor that an EmbeddingBagCollection returns."""
    from torchrec.sparse.jagged_tensor import KeyedTensor

    return KeyedTensor(keys=list(keys), length_per_key=list(dims), values=values)


def values_of(keyed: Any) -> torch.Tensor:
    """All columns of a KeyedTensor, (B, width)."""
    values: torch.Tensor = keyed.values()
    return values


def accept_empty_batches(root: nn.Module) -> None:
    """Let the collections in ``root`` take batches without samples, which TorchRec's own forward cannot index."""
    for module in root.modules():
        if is_collection(module):
            module.forward = functools.partial(_forward, module, module.forward)


def _forward(collection: Any, forward: Callable[..., KeyedTensor], features: KeyedJaggedTensor) -> KeyedTensor:
    if not is_jagged(features) or features.variable_stride_per_key() or features.stride() > 0:
        return forward(features)
    ids = features.values()[:0]
    weights = features.weights()[:0] if collection.is_weighted() else None
    pooled = [
        bag(ids, ids.new_zeros(1), weights).float()
        for bag, names in zip(collection.embedding_bags.values(), collection._feature_names, strict=True)
        for _ in names
    ]
    return make_output(collection._embedding_names, collection._lengths_per_embedding, torch.cat(pooled, dim=1))


def is_jagged(value: object) -> bool:
    """Whether ``value`` is a KeyedJaggedTensor."""
    cls = _loaded("torchrec.sparse.jagged_tensor", "KeyedJaggedTensor")
    return cls is not None and isinstance(value, cls)


def batch_size(batch: KeyedJaggedTensor, where: str) -> int:
    """Samples in a KeyedJaggedTensor; ``where`` names it in errors.

    Raises:
        InputError: the features have different batch sizes, or lengths, ids and weights do not fit each other.
    """
    if batch.variable_stride_per_key() or batch.inverse_indices_or_none() is not None:
        raise InputError(
            f"{where} has a batch size of its own per feature (variable stride): expand the features "
            f"{', '.join(map(repr, batch.keys()[:8]))} to one batch size first"
        )
    keys, size, lengths = batch.keys(), batch.stride(), batch.lengths()
    if lengths.numel() != len(keys) * size:
        raise InputError(f"{where} has {lengths.numel()} lengths, which is not a multiple of its {len(keys)} features")
    if bool((lengths < 0).any()):
        raise InputError(f"{where} has negative lengths")
    total, count, weights = int(lengths.sum()), batch.values().numel(), batch.weights_or_none()
    if total != count:
        raise InputError(f"{where}: the lengths of its features add up to {total} ids, but there are {count}")
    if weights is not None and weights.numel() != count:
        raise InputError(f"{where} has {weights.numel()} weights for {count} ids")
    return int(size)


def deal(batch: KeyedJaggedTensor, sizes: Sequence[int]) -> list[KeyedJaggedTensor]:
    """Cut a KeyedJaggedTensor into consecutive runs of samples."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    keys = batch.keys()
    lengths = batch.lengths().view(len(keys), batch.stride()).long()
    runs = lengths.split(list(sizes), dim=1)
    blocks = torch.stack([run.sum(dim=1) for run in runs], dim=1)
    order = torch.arange(blocks.numel(), device=blocks.device).view_as(blocks).t().flatten()
    counts = blocks.sum(dim=0).tolist()
    values = permute_blocks(batch.values(), blocks.flatten(), order).split(counts)
    weights = batch.weights_or_none()
    dealt = permute_blocks(weights, blocks.flatten(), order).split(counts) if weights is not None else [None] * len(sizes)
    return [
        KeyedJaggedTensor(keys=keys, values=v, weights=w, lengths=run.to(batch.lengths().dtype).reshape(-1), stride=run.shape[1])
        for run, v, w in zip(runs, values, dealt, strict=True)
    ]


def with_more_ids(batch: KeyedJaggedTensor, value: int) -> KeyedJaggedTensor:
    """As many samples and features, but one more id in every bag, and all ids ``value``."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    lengths = batch.lengths() + 1
    ids = torch.full((int(lengths.sum()),), value, dtype=batch.values().dtype, device=batch.values().device)
    weights = batch.weights_or_none()
    more = torch.full(ids.shape, float(value), dtype=weights.dtype, device=weights.device) if weights is not None else None
    return KeyedJaggedTensor(keys=batch.keys(), values=ids, weights=more, lengths=lengths, stride=batch.stride())


def parts_of(value: object) -> dict[str, Any] | None:
    """What a KeyedTensor, a KeyedJaggedTensor or a JaggedTensor consists of, by name; None for anything else."""
    cls = _loaded("torchrec.sparse.jagged_tensor", "KeyedTensor")
    if cls is not None and isinstance(value, cls):
        keyed: Any = value
        return {
            "keys": list(keyed.keys()),
            "length_per_key": list(keyed.length_per_key()),
            "key_dim": keyed.key_dim(),
            "values": keyed.values(),
        }
    cls = _loaded("torchrec.sparse.jagged_tensor", "JaggedTensor")
    jagged: Any = value
    if is_jagged(value):
        found = {"keys": list(jagged.keys()), "stride_per_key": list(jagged.stride_per_key())}
        found["inverse_indices"] = jagged.inverse_indices_or_none()
    elif cls is not None and isinstance(value, cls):
        found = {"offsets": jagged.offsets()}
    else:
        return None
    return {**found, "values": jagged.values(), "lengths": jagged.lengths(), "weights": jagged.weights_or_none()}


def initialise(root: nn.Module, table: Table) -> None:
    """Fill a table with its configuration's ``init_fn``; keep what ``reset_parameters`` put there if it has none."""
    path, _, _ = table.parameter.rpartition(".embedding_bags.")
    collection = root.get_submodule(path)
    if not is_collection(collection):
        return
    name = table.parameter.removeprefix(f"{path}.embedding_bags.").removesuffix(".weight")
    for config in collection.embedding_bag_configs():  # type: ignore[operator]
        if config.name == name and config.init_fn is not None:
            config.init_fn(root.get_parameter(table.parameter))
