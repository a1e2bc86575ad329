"""Dealing one batch over the ranks: contiguous runs of samples in rank order, the first B mod G ranks get one more."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..adapters import torchrec as torchrec_adapter
from ..errors import InputError
from ..lookups import RaggedInput
from .structure import Place, by_name, path_text, require_keys, require_places


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the model says about its inputs: the names of forward's arguments, which inputs are ragged, and which keys it reads.

    ``per_sample`` are the paths of tensors that have a row for every sample, as example inputs showed, and ``places`` say how the
    inputs were built, as far as the model reads them.
    """

    names: tuple[str, ...] = ()
    ragged: tuple[RaggedInput, ...] = ()
    keys: tuple[tuple[object, ...], ...] = ()
    per_sample: tuple[tuple[object, ...], ...] = ()
    places: tuple[Place, ...] = ()


def check_batch(args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout) -> None:
    """Refuse a batch that lacks something, before the model stumbles over it.

    Raises:
        InputError: there is no entry that the model reads, or something else than in the example inputs, or tensors with a row for
            every sample have different numbers of rows.
    """
    _refuse_other_structure(args, kwargs, layout)
    given = by_name(args, kwargs, layout.names)
    found: dict[str, int] = {}
    for path in layout.per_sample:
        place = _tensor_at(given, path)
        if place is not None and place[1] is None and place[0].dim():
            found[path_text(path)] = place[0].shape[0]
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in list(found.items())[:12])
        raise InputError(f"the inputs have different numbers of samples: {listed}")


def _refuse_other_structure(args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout) -> None:
    given = by_name(args, kwargs, layout.names)
    require_keys(given, layout.keys)
    require_places(given, layout.places)


def deal(
    args: tuple[Any, ...], kwargs: dict[str, Any], world_size: int, layout: Layout = Layout()
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """``(args, kwargs)`` of every rank. Tensors are cut along dimension 0; scalars and plain values go to every rank.

    Raises:
        InputError: the inputs hold no batch, disagree on its size, lack a key that the model reads, hold offsets that do not
            fit their ids, or an object that cannot be looked into.
    """
    return deal_sizes(args, kwargs, deal_counts(batch_size(args, kwargs, layout), world_size), layout)


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout = Layout()) -> int:
    """The number of samples in ``(args, kwargs)``.

    Raises:
        InputError: as for :func:`deal`.
    """
    _refuse_other_structure(args, kwargs, layout)
    sizes_found = dict(_batch_sizes((args, kwargs), "inputs", _ragged(args, kwargs, layout)))
    if not sizes_found:
        raise InputError("the inputs hold no tensor with a batch dimension, so there are no samples to deal over the ranks")
    if len(set(sizes_found.values())) > 1:
        listed = ", ".join(f"{where}: {size}" for where, size in sizes_found.items())
        raise InputError(f"the inputs disagree on the batch size (dimension 0): {listed}")
    return next(iter(sizes_found.values()))


@dataclasses.dataclass(frozen=True)
class _Part:
    """A tensor of a ragged input: the bounds of its samples, whether it is the offsets themselves, and as which they are given."""

    bounds: torch.Tensor
    is_offsets: bool
    include_last: bool

    @property
    def batch(self) -> int:
        return self.bounds.numel() - 1

    def cut(self, value: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        parts, start = [], 0
        for size in sizes:
            own = self.bounds[start : start + size + 1]
            if self.is_offsets:
                parts.append((own if self.include_last else own[:-1]) - own[0])
            else:
                parts.append(value[int(own[0]) : int(own[-1])])
            start += size
        return parts


# A tensor by identity: what it is (row None), or what its rows are where several ragged inputs are stacked in one tensor.
_Ragged = Mapping[int, Mapping[int | None, _Part]]


def ragged_tensors(args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout) -> Collection[int]:
    """The tensors of the inputs, by identity, that are ragged or hold offsets.

    Raises:
        InputError: offsets do not fit their ids.
    """
    return _ragged(args, kwargs, layout).keys()


def _ragged(args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout) -> _Ragged:
    given = by_name(args, kwargs, layout.names)
    found: dict[int, dict[int | None, _Part]] = {}
    for one in layout.ragged:
        values, offsets = _tensor_at(given, one.values), _tensor_at(given, one.offsets)
        weights = _tensor_at(given, one.weights) if one.weights is not None else None
        if values is None or offsets is None:
            continue
        bounds = _bounds(one, _row(*offsets), _row(*values).numel())
        found.setdefault(id(offsets[0]), {})[offsets[1]] = _Part(bounds, True, one.include_last_offset)
        for place in (values, weights):
            if place is not None:
                found.setdefault(id(place[0]), {})[place[1]] = _Part(bounds, False, one.include_last_offset)
    return found


def _bounds(ragged: RaggedInput, offsets: torch.Tensor, total: int) -> torch.Tensor:
    """Where samples start and end, (B + 1,)."""
    name = path_text(ragged.offsets)
    if offsets.is_meta:
        raise InputError(f"the offsets {name} are on the meta device: without values they do not say where a sample begins")
    if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"the offsets {name} must be a 1-D tensor of int32 or int64, got {tuple(offsets.shape)} of {offsets.dtype}"
        )
    bounds = offsets if ragged.include_last_offset else torch.cat([offsets, offsets.new_tensor([total])])
    if not bounds.numel() or int(bounds[0]) or bool((bounds.diff() < 0).any()) or int(bounds[-1]) != total:
        raise InputError(
            f"the offsets {name} must start at 0, not decrease and end at the number of ids, "
            f"which is {total} in {path_text(ragged.values)}"
        )
    return bounds


_Place = tuple[torch.Tensor, int | None]


def _tensor_at(given: Mapping[str, Any], path: Sequence[Any]) -> _Place | None:
    """The tensor at a path, or the tensor and row that it ends in; None if there is neither."""
    value: Any = given
    for number, step in enumerate(path):
        if isinstance(value, torch.Tensor) and value.dim() > 1 and isinstance(step, int) and number == len(path) - 1:
            return value, step % len(value)
        try:
            value = value[step] if isinstance(value, Mapping | list | tuple) else getattr(value, step)
        except (KeyError, IndexError, AttributeError, TypeError):
            return None
    return (value, None) if isinstance(value, torch.Tensor) else None


def _row(tensor: torch.Tensor, row: int | None) -> torch.Tensor:
    return tensor if row is None else tensor[row]


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
        for row, part in ragged[id(value)].items():
            yield f"{where}{'' if row is None else f'[{row}]'} (offsets)", part.batch
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


def _cut_rows(value: torch.Tensor, parts: Mapping[int | None, _Part], sizes: Sequence[int]) -> list[Any]:
    """Ragged inputs stacked in one tensor, cut row by row and stacked again."""
    rows = [parts[row].cut(value[row], sizes) for row in range(len(value)) if row in parts]
    if len(rows) < len(value) or any(len({row[rank].numel() for row in rows}) > 1 for rank in range(len(sizes))):
        raise InputError(
            f"a tensor of shape {tuple(value.shape)} holds the ids or offsets of several features, one a row, and cannot be dealt: "
            "every row must be looked up and have as many values as the others for each rank's samples; give a list of tensors"
        )
    return [torch.stack([row[rank] for row in rows]) for rank in range(len(sizes))]


def _cut(value: Any, sizes: Sequence[int], ragged: _Ragged) -> list[Any]:
    if id(value) in ragged:
        parts = ragged[id(value)]
        return list(parts[None].cut(value, sizes)) if None in parts else _cut_rows(value, parts, sizes)
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
