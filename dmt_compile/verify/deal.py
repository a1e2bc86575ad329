"""Dealing one batch over the ranks: contiguous runs of samples in rank order, the first B mod G ranks get one more."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..adapters import torchrec as torchrec_adapter
from ..errors import InputError


def deal(args: tuple[Any, ...], kwargs: dict[str, Any], world_size: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """``(args, kwargs)`` of every rank. Tensors are cut along dimension 0; scalars and plain values go to every rank.

    Raises:
        InputError: the inputs hold no batch, disagree on its size, or hold an object that cannot be looked into.
    """
    sizes_found = dict(_batch_sizes((args, kwargs), "inputs"))
    if not sizes_found:
        raise InputError("the inputs hold no tensor with a batch dimension, so there are no samples to deal over the ranks")
    if len(set(sizes_found.values())) > 1:
        listed = ", ".join(f"{where}: {size}" for where, size in sizes_found.items())
        raise InputError(f"the inputs disagree on the batch size (dimension 0): {listed}")
    batch = next(iter(sizes_found.values()))
    return deal_sizes(args, kwargs, deal_counts(batch, world_size))


def deal_counts(batch: int, world_size: int) -> list[int]:
    """Samples per rank."""
    return [batch // world_size + (rank < batch % world_size) for rank in range(world_size)]


def deal_sizes(args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """As :func:`deal`, with the number of samples of every rank given."""
    parts = _cut((args, kwargs), sizes)
    return [(part[0], part[1]) for part in parts]


def _batch_sizes(value: Any, where: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, torch.Tensor):
        if value.dim():
            yield f"{where} {tuple(value.shape)}", value.shape[0]
    elif torchrec_adapter.is_jagged(value):
        yield f"{where} (KeyedJaggedTensor)", torchrec_adapter.batch_size(value, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _batch_sizes(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _batch_sizes(item, f"{where}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _batch_sizes(getattr(value, field.name), f"{where}.{field.name}")
    elif not isinstance(value, int | float | str | bool | None | torch.dtype | torch.device):
        raise InputError(
            f"{where} is a {type(value).__name__}, which cannot be dealt over ranks: use tensors, KeyedJaggedTensors, "
            "dicts, lists, tuples or dataclasses of them"
        )


def _cut(value: Any, sizes: Sequence[int]) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return list(value.split(list(sizes))) if value.dim() else [value] * len(sizes)
    if torchrec_adapter.is_jagged(value):
        return list(torchrec_adapter.deal(value, sizes))
    if isinstance(value, dict):
        cut = {key: _cut(item, sizes) for key, item in value.items()}
        return [{key: parts[rank] for key, parts in cut.items()} for rank in range(len(sizes))]
    if isinstance(value, list | tuple):
        items = [_cut(item, sizes) for item in value]
        rebuilt = [[item[rank] for item in items] for rank in range(len(sizes))]
        if isinstance(value, list):
            return list(rebuilt)
        return [type(value)(*part) if hasattr(value, "_fields") else tuple(part) for part in rebuilt]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _cut(getattr(value, field.name), sizes) for field in dataclasses.fields(value) if field.init}
        return [dataclasses.replace(value, **{name: parts[rank] for name, parts in fields.items()}) for rank in range(len(sizes))]
    return [value] * len(sizes)
