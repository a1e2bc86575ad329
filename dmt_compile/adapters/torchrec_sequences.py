"""TorchRec's ``EmbeddingCollection``: lookups whose rows are not pooled, traced as the plain lookups that it consists of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from ..errors import InputError
from ..graphs import LABEL
from .torchrec import _loaded, has_hooks

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


def is_collection(module: nn.Module) -> bool:
    """Whether ``module`` is an ``EmbeddingCollection`` with the forward that TorchRec ships, and nothing hung on it."""
    cls = _loaded("torchrec.modules.embedding_modules", "EmbeddingCollection")
    if cls is None or not isinstance(module, cls) or "forward" in module.__dict__ or has_hooks(module):
        return False
    return bool(type(module).forward is cls.forward)  # type: ignore[attr-defined]


def trace(collection: Any, features: fx.Proxy) -> dict[str, Any]:
    """The collection's forward under a tracer: plain lookups, and a node for every JaggedTensor that it makes of their rows."""

    def node(function: Callable[..., Any], *args: Any) -> Any:
        return features.tracer.create_proxy("call_function", function, args, {})

    return _read(collection, node(by_feature, features), node)


def _read(collection: Any, ids_of: Any, call: Callable[..., Any]) -> dict[str, Any]:
    """What the collection returns: a JaggedTensor of the rows of every feature, by the collection's names for them."""
    found = {}
    tables = zip(collection.embeddings.values(), collection._feature_names, collection._embedding_names_by_table, strict=True)
    for table, feature_names, names in tables:
        for feature, name in zip(feature_names, names, strict=True):
            ids = ids_of[feature].values()
            if isinstance(ids, fx.Proxy):
                ids.node.meta[LABEL] = feature
            found[name] = call(jagged_rows, table(input=ids).float(), ids_of[feature], collection.need_indices())
    return found


def by_feature(features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    """The ids of every feature; also of no samples, which TorchRec's own ``to_dict`` cannot take apart."""
    if features.stride() > 0:
        return _Features(features.to_dict())
    from torchrec.sparse.jagged_tensor import JaggedTensor

    empty = {"values": features.values()[:0], "lengths": features.lengths()[:0], "offsets": features.lengths().new_zeros(1)}
    return _Features({key: JaggedTensor(**empty) for key in features.keys()})  # noqa: SIM118  # no mapping


class _Features(dict[str, Any]):
    """The ids of every feature, which says which ones there are when one is missing."""

    def __missing__(self, key: str) -> Any:
        have = ", ".join(map(repr, list(self)[:12])) + (", ..." if len(self) > 12 else "")
        raise InputError(f"the batch has no feature '{key}', which an EmbeddingCollection looks up; it has {have}")


def accept_empty_batches(root: nn.Module) -> None:
    """Let the collections in ``root`` take batches without samples."""
    for module in root.modules():
        if is_collection(module):
            module.forward = functools.partial(_forward, module)


def _forward(collection: Any, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    return _read(collection, by_feature(features), lambda function, *args: function(*args))


def jagged_rows(rows: torch.Tensor, ids: JaggedTensor, need_indices: bool) -> JaggedTensor:
    """``rows`` (N, d) cut into samples as ``ids`` are; with the ids as its weights where the collection gives them."""
    from torchrec.sparse.jagged_tensor import JaggedTensor

    return JaggedTensor(values=rows, lengths=ids.lengths(), weights=ids.values() if need_indices else None)
