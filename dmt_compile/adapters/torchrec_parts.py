"""TorchRec's values as tensors, for torch.export: what a KeyedJaggedTensor is made of, and what a collection returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .torchrec import make_output

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

IDS = ("values()", "weights()")
"""The parts whose first size is the number of ids, not of samples."""

_MADE_OF = "_dmt_made_of"
_PARTS = ("keys()", *IDS, "lengths()", "variable_stride_per_key()")


def open_jagged(value: KeyedJaggedTensor) -> tuple[tuple[str, ...], list[Any], Callable[[Sequence[Any]], Any]]:
    """The parts of a KeyedJaggedTensor, whatever it has computed from them so far; its lengths as (B, F)."""
    made = value.__dict__.get(_MADE_OF)
    if made is not None:
        return _PARTS, list(made), _make_jagged
    keys, lengths = list(value.keys()), value.lengths()
    variable = value.variable_stride_per_key()
    regular = not variable and bool(lengths.numel() == len(keys) * value.stride())
    if regular:
        lengths = lengths.view(len(keys), value.stride()).t()
    return _PARTS, [keys, value.values(), value.weights_or_none(), lengths, variable], _make_jagged if regular else lambda _: value


def _make_jagged(parts: Sequence[Any]) -> KeyedJaggedTensor:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    keys, values, weights, lengths, _ = parts
    flat, batch = lengths.t().reshape(-1), lengths.shape[0]
    made = KeyedJaggedTensor(keys=list(keys), values=values, weights=weights, lengths=flat, stride=batch)
    # So that a graph knows the very tensors that it was made of.
    made.__dict__[_MADE_OF] = tuple(parts)
    return made


def pooled_like(collection: Any, features: KeyedJaggedTensor) -> KeyedTensor:
    """What a collection returns, without values: its own forward asks for the number of ids of every feature."""
    values = features.lengths().new_empty(features.stride(), sum(collection._lengths_per_embedding), dtype=torch.float32)
    return make_output(collection._embedding_names, collection._lengths_per_embedding, values)
