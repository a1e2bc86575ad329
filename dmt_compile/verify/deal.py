"""Dealing one batch over the ranks: contiguous runs of samples in rank order, the first B mod G ranks get one more."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..adapters import torchrec as torchrec_adapter
from ..errors import InputError
from ..lookups import RaggedInput


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the model says about its inputs: the names of forward's arguments, and which inputs are ragged."""

    names: tuple[str, ...] = ()
    ragged: tuple[RaggedInput, ...] = ()


def deal(
    args: tuple[Any, ...], kwargs: dict[str, Any], world_size: int, layout: Layout = Layout()
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """``(args, kwargs)`` of every rank. Tensors are cut along dimension 0; scalars and plain values go to every rank.

    Raises:
        InputError: the inputs hold no batch, disagree on its size, or hold an object that cannot be looked into.
    """
    return deal_sizes(args, kwargs, deal_counts(batch_size(args, kwargs, layout), world_size), layout)


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout = Layout()) -> int:
    """The number of samples in ``(args, kwargs)``.

    Raises:
        InputError: as for :func:`deal`.
    """
    sizes_found = dict(_batch_sizes((args, kwargs), "inputs", _ragged(args, kwargs, layout)))
    if not sizes_found:
        raise InputError("the inputs hold no tensor with a batch dimension, so there are no samples to deal over the ranks")
    if len(set(sizes_found.values())) > 1:
        listed = ", ".join(f"{where}: {size}" for where, size in sizes_found.items())
        raise InputError(f"the inputs disagree on the batch size (dimension 0): {listed}")
    return next(iter(sizes_found.values()))


@dataclasses.dataclass(frozen=True)
class _Part:
    """A tensor of a ragged input: its offsets, and whether it is those offsets."""

    offsets: torch.Tensor
    is_offsets: bool
    include_last: bool

    @property
    def batch(self) -> int:
        return self.offsets.numel() - self.include_last

    def cut(self, value: torch.Tensor, total: int, sizes: Sequence[int]) -> list[torch.Tensor]:
        bounds = self.offsets if self.include_last else torch.cat([self.offsets, self.offsets.new_tensor([total])])
        parts, start = [], 0
        for size in sizes:
            own = bounds[start : start + size + 1]
            if self.is_offsets:
                parts.append((own if self.include_last else own[:-1]) - own[0])
            else:
                parts.append(value[int(own[0]) : int(own[-1])])
            start += size
        return parts


_Ragged = Mapping[int, tuple[_Part, int]]


def _ragged(args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout) -> _Ragged:
    """The tensors of ragged inputs by identity, each with the number of values that its offsets divide."""
    given = {**dict(zip(layout.names, args, strict=False)), **kwargs}
    found: dict[int, tuple[_Part, int]] = {}
    for one in layout.ragged:
        values, offsets = _follow(given, one.values), _follow(given, one.offsets)
        weights = _follow(given, one.weights) if one.weights is not None else None
        if isinstance(values, torch.Tensor) and isinstance(offsets, torch.Tensor):
            total = values.numel()
            found[id(offsets)] = (_Part(offsets, True, one.include_last_offset), total)
            for tensor in (values, weights):
                if isinstance(tensor, torch.Tensor):
                    found[id(tensor)] = (_Part(offsets, False, one.include_last_offset), total)
    return found


def _follow(value: Any, path: Sequence[Any]) -> Any:
    for step in path:
        try:
            value = value[step] if isinstance(value, Mapping | list | tuple) else getattr(value, step)
        except (KeyError, IndexError, AttributeError, TypeError):
            return None
    return value


def deal_counts(batch: int, world_size: int) -> list[int]:
    """Samples per rank."""
    return [batch // world_size + (rank < batch % world_size) for rank in range(world_size)]


def deal_sizes(
    args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int], layout: Layout = Layout()
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """As :func:`deal`, with the number of samples of every rank given."""
    parts = _cut((args, kwargs), sizes, _ragged(args, kwargs, layout))
    return [(part[0], part[1]) for part in parts]


def _batch_sizes(value: Any, where: str, ragged: _Ragged) -> Iterator[tuple[str, int]]:
    if id(value) in ragged:
        yield f"{where} (offsets)", ragged[id(value)][0].batch
    elif isinstance(value, torch.Tensor):
        if value.dim():
            yield f"{where} {tuple(value.shape)}", value.shape[0]
    elif torchrec_adapter.is_jagged(value):
        yield f"{where} (KeyedJaggedTensor)", torchrec_adapter.batch_size(value, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _batch_sizes(item, f"{where}[{key!r}]", ragged)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _batch_sizes(item, f"{where}[{index}]", ragged)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _batch_sizes(getattr(value, field.name), f"{where}.{field.name}", ragged)
    elif not isinstance(value, int | float | str | bool | None | torch.dtype | torch.device):
        raise InputError(
            f"{where} is a {type(value).__name__}, which cannot be dealt over ranks: use tensors, KeyedJaggedTensors, "
            "dicts, lists, tuples or dataclasses of them"
        )


def _cut(value: Any, sizes: Sequence[int], ragged: _Ragged) -> list[Any]:
    if id(value) in ragged:
        part, total = ragged[id(value)]
        return list(part.cut(value, total, sizes))
    if isinstance(value, torch.Tensor):
        return list(value.split(list(sizes))) if value.dim() else [value] * len(sizes)
    if torchrec_adapter.is_jagged(value):
        return list(torchrec_adapter.deal(value, sizes))
    if isinstance(value, dict):
        cut = {key: _cut(item, sizes, ragged) for key, item in value.items()}
        return [{key: parts[rank] for key, parts in cut.items()} for rank in range(len(sizes))]
    if isinstance(value, list | tuple):
        items = [_cut(item, sizes, ragged) for item in value]
        rebuilt = [[item[rank] for item in items] for rank in range(len(sizes))]
        if isinstance(value, list):
            return list(rebuilt)
        return [type(value)(*part) if hasattr(value, "_fields") else tuple(part) for part in rebuilt]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _cut(getattr(value, field.name), sizes, ragged) for field in dataclasses.fields(value) if field.init}
        return [dataclasses.replace(value, **{name: parts[rank] for name, parts in fields.items()}) for rank in range(len(sizes))]
    return [value] * len(sizes)
