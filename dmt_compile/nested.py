"""Nested values taken apart into their tensors and a template that puts them together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree

from .adapters import torchrec as torchrec_adapter
from .adapters import torchrec_parts


@dataclass(frozen=True)
class Leaf:
    """A tensor's place among the leaves."""

    index: int


@dataclass(frozen=True)
class Container:
    """A dict, list, tuple, dataclass, KeyedJaggedTensor, or what torch's pytree knows: what it is made of, how to make one."""

    kind: type
    keys: tuple[Any, ...]
    parts: tuple[Any, ...]
    make: Callable[[Sequence[Any]], Any] = field(compare=False)


@dataclass(frozen=True)
class Step:
    """One step of the way to a part: ``value[key]``, or ``value.key``."""

    key: Any
    by_attribute: bool = False

    def __str__(self) -> str:
        return f".{self.key}" if self.by_attribute else f"[{self.key!r}]"


Path = tuple[Step, ...]


@dataclass(frozen=True)
class Template:
    """A nested value without its leaves. ``paths`` says where each leaf was."""

    value: Any
    paths: tuple[Path, ...]

    def build(self, leaves: Sequence[Any]) -> Any:
        """The nested value with ``leaves`` in their places."""
        return _build(self.value, leaves)

    @property
    def is_builtin(self) -> bool:
        """Whether it is made of plain lists, tuples and dicts alone, which a graph can write down."""
        return _is_builtin(self.value)


def take_apart(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Template]:
    """The tensors (and symbolic integers) of a nested value, and the rest. What is no container stays in the template."""
    leaves: list[Any] = []
    paths: list[Path] = []
    built = _take(value, (), leaves, paths, is_leaf or _is_tensor)
    return leaves, Template(built, tuple(paths))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)


def _take(value: Any, path: Path, leaves: list[Any], paths: list[Path], is_leaf: Callable[[Any], bool]) -> Any:
    if is_leaf(value):
        leaves.append(value)
        paths.append(path)
        return Leaf(len(leaves) - 1)
    opened = _open(value)
    if opened is None:
        return value
    steps, parts, make = opened
    built = tuple(_take(part, (*path, step), leaves, paths, is_leaf) for step, part in zip(steps, parts, strict=True))
    return Container(type(value), tuple(step.key for step in steps), built, make)


def _open(value: Any) -> tuple[list[Step], list[Any], Callable[[Sequence[Any]], Any]] | None:
    kind = type(value)
    if torchrec_adapter.is_jagged(value):
        parts, values, make = torchrec_parts.open_jagged(value)
        return [Step(name, True) for name in parts], values, make
    if kind is list or kind is tuple:
        return [Step(i) for i in range(len(value))], list(value), kind
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [Step(i) for i in range(len(value))], list(value), lambda parts: kind(*parts)
    if kind is dict:
        keys = list(value)
        return [Step(key) for key in keys], list(value.values()), lambda parts: dict(zip(keys, parts, strict=True))
    if kind in _pytree.SUPPORTED_NODES:
        return _open_registered(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return [Step(n, True) for n in names], [getattr(value, n) for n in names], lambda parts: _dataclass(kind, names, parts)
    return None


def _open_registered(value: Any) -> tuple[list[Step], list[Any], Callable[[Sequence[Any]], Any]]:
    parts, context = _pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
    unflatten = _pytree.SUPPORTED_NODES[type(value)].unflatten_fn
    listed = list(parts)
    if isinstance(value, Mapping) and len(value) == len(listed):
        steps = [Step(key) for key in value]
    else:
        steps = [Step(i) for i in range(len(listed))]
    return steps, listed, lambda made: unflatten(list(made), context)


def _dataclass(kind: type, names: Sequence[str], parts: Sequence[Any]) -> Any:
    # Without __init__: not every field need be one of its arguments.
    made: Any = object.__new__(kind)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(made, name, part)
    return made


def narrowed(part: Any) -> tuple[list[int], Template]:
    """Part of a template's value as a template of its own, and which of the whole's leaves it takes."""
    used: list[int] = []

    def renumbered(built: Any) -> Any:
        if isinstance(built, Leaf):
            used.append(built.index)
            return Leaf(len(used) - 1)
        if isinstance(built, Container):
            return dataclasses.replace(built, parts=tuple(map(renumbered, built.parts)))
        return built

    return used, Template(renumbered(part), ())


def constants(built: Any) -> Iterator[Any]:
    """The plain values in a template's value."""
    if isinstance(built, Container):
        for part in built.parts:
            yield from constants(part)
    elif not isinstance(built, Leaf):
        yield built


def _build(built: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(built, Leaf):
        return leaves[built.index]
    if isinstance(built, Container):
        return built.make([_build(part, leaves) for part in built.parts])
    return built


def _is_builtin(built: Any) -> bool:
    if isinstance(built, Container):
        names = built.kind is not dict or all(isinstance(key, str) for key in built.keys)
        return built.kind in (list, tuple, dict) and names and all(_is_builtin(part) for part in built.parts)
    return isinstance(built, Leaf | int | float | str | None)


def first_difference(found: Any, expected: Any, where: str) -> str | None:
    """How the first unequal part of two templates' values differs, in words; None if they are equal."""
    if isinstance(found, Leaf) and isinstance(expected, Leaf):
        return None
    if isinstance(found, Container) and isinstance(expected, Container) and _alike(found.kind, expected.kind):
        if found.keys != expected.keys:
            return f"{where} has {_listed(found.keys)}, not {_listed(expected.keys)}"
        for key, mine, theirs in zip(found.keys, found.parts, expected.parts, strict=True):
            part = f".{key}" if str(key).endswith("()") else f"[{key!r}]"
            difference = first_difference(mine, theirs, where + part)
            if difference is not None:
                return difference
        return None
    if isinstance(found, Leaf | Container) or isinstance(expected, Leaf | Container):
        return f"{where} is {_worded(found)}, not {_worded(expected)}"
    return None if found is expected or found == expected else f"{where} is {found!r}, not {expected!r}"


def _alike(a: type, b: type) -> bool:
    """Whether a value of one type can stand for one of the other: batches are divided and gathered in plain containers."""
    return a is b or (issubclass(a, dict) and issubclass(b, dict)) or {a, b} == {list, tuple}


def _listed(keys: Iterable[Any]) -> str:
    return "[" + ", ".join(map(repr, keys)) + "]"


def _worded(built: Any) -> str:
    if isinstance(built, Leaf):
        return "a tensor"
    return f"a {built.kind.__name__}" if isinstance(built, Container) else repr(built)
