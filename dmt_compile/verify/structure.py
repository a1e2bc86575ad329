"""How a batch is built: the dicts, lists and tensors that the model reads in it, against those of the example inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InputError

Path = tuple[object, ...]
"""A place in the inputs: the name of an argument, then keys, indices or attribute names."""


@dataclass(frozen=True)
class Place:
    """What stands at a path of the example inputs: its ``kind`` ("dict", "list" or "tensor") and the ``text`` that says so.

    ``entries`` says what the model reads there: the value "itself", entries "by key", or entries "by number", which a list has as
    well as a tensor.
    """

    path: Path
    kind: str
    text: str
    entries: str


def path_text(path: Sequence[object]) -> str:
    """A path into the inputs as Python writes it."""
    return "".join([str(path[0]), *(f"[{step!r}]" for step in path[1:])])


def by_name(args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The inputs by the names of forward's arguments, of which "*rest" and "**more" take what is left."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for number, name in enumerate(names):
        if name.startswith("**"):
            given[name] = {key: value for key, value in kwargs.items() if key not in names}
        elif name.startswith("*"):
            given[name] = args[number:]
    return given


def places_read(given: Mapping[str, Any], paths: Iterable[Path]) -> tuple[Place, ...]:
    """Every place on the way to what the model reads in the example inputs, from the outside in."""
    found: dict[Path, Place] = {}
    for path in paths:
        for length in range(1, len(path) + 1):
            value = _value_at(given, path[:length])
            kind = _kind(value)
            if kind in ("dict", "list", "tensor"):
                following = path[length] if length < len(path) else None
                entries = {int: "by number", str: "by key"}.get(type(following), "itself")
                # What is read as a whole and by entry may be anything that has entries.
                if path[:length] not in found or entries != "itself":
                    found[path[:length]] = Place(path[:length], kind, _text(value), entries)
    return tuple(sorted(found.values(), key=lambda place: len(place.path)))


def require_places(given: Mapping[str, Any], places: Iterable[Place]) -> None:
    """Refuse a batch that is built in another way than the example, as far as the model reads it.

    Whatever is neither dict, list nor tensor is let through: it may act as one.

    Raises:
        InputError: an entry is missing, or there is something else in its place.
    """
    for place in places:
        value = _value_at(given, place.path)
        if value is _MISSING:
            _refuse_missing(given, place)
            continue
        kind = _kind(value)
        fits = kind in (place.kind, "")
        if place.entries == "by number":
            fits = fits or {kind, place.kind} == {"list", "tensor"}
        elif place.entries == "itself":
            # A submodule that capture keeps whole may look whether it is given anything.
            fits = fits or kind == "nothing"
        if not fits:
            raise InputError(f"{path_text(place.path)} is {_text(value)}, in example_inputs it is {place.text}")


def _refuse_missing(given: Mapping[str, Any], place: Place) -> None:
    holder = _value_at(given, place.path[:-1]) if len(place.path) > 1 else _MISSING
    if _kind(holder) in ("dict", "list", "tensor"):
        raise InputError(
            f"the batch has no {path_text(place.path)}, which the model reads: {path_text(place.path[:-1])} is {_text(holder)}; in "
            f"example_inputs, {path_text(place.path)} is {place.text}"
        )


def require_keys(given: Mapping[str, Any], paths: Iterable[Path]) -> None:
    """Refuse a batch in which a dict lacks a key that the model reads.

    Raises:
        InputError: one does; lists its keys.
    """
    for path in paths:
        holder: Any = given
        for number, step in enumerate(path):
            if isinstance(holder, Mapping) and step not in holder and number:
                has = ", ".join(repr(key) for key in list(holder)[:_MOST]) + (", ..." if len(holder) > _MOST else "")
                raise InputError(f"the batch has no {path_text(path)}, which the model reads; there are {has}")
            if not isinstance(holder, Mapping | list | tuple):
                break
            holder = _value_at({"": holder}, ("", step))


_MOST = 12
_MISSING: Any = object()


def _value_at(given: Mapping[str, Any], path: Sequence[Any]) -> Any:
    value: Any = given
    for step in path:
        try:
            if isinstance(value, Mapping | list | tuple) or (isinstance(value, torch.Tensor) and isinstance(step, int)):
                value = value[step]
            elif isinstance(value, torch.Tensor) or not isinstance(step, str):
                return _MISSING
            else:
                value = getattr(value, step)
        except (KeyError, IndexError, AttributeError, TypeError):
            return _MISSING
    return value


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, Mapping):
        return "dict"
    if type(value) in (list, tuple):
        return "list"
    return "nothing" if value is None or isinstance(value, str) else ""


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        keys = ", ".join(map(repr, list(value)[:_MOST])) + (", ..." if len(value) > _MOST else "")
        return f"a dict with {keys}" if value else "an empty dict"
    if type(value) in (list, tuple):
        return f"a {type(value).__name__} of {len(value)}" if value else f"an empty {type(value).__name__}"
    return repr(value)[:40]
