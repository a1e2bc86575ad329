"""What about a model's inputs is in the way, and what to do: found when the model is captured or run on a part of a batch."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import fx
from torch.nn.utils import rnn

from .errors import source_line


def leading_to(node: fx.Node) -> list[fx.Node]:
    """A node and all that it is computed from, the nearest first."""
    seen = {node: None}
    waiting = [node]
    while waiting:
        used = [one for one in waiting.pop(0).all_input_nodes if one not in seen]
        seen.update(dict.fromkeys(used))
        waiting.extend(used)
    return list(seen)


def longest_of_the_batch(nodes: Iterable[fx.Node]) -> str:
    """A line about the first of ``nodes`` that pads sequences to the longest one in the batch; empty if there is none."""
    for node in nodes:
        if node.target is rnn.pad_packed_sequence and _total_length(node) is None:
            where = source_line(node)
            return (
                f"\n{f'{where}: ' if where else ''}pad_packed_sequence pads to the longest sequence of its batch, which may be "
                "shorter than the padded inputs are: give it total_length="
            )
    return ""


def _total_length(node: fx.Node) -> Any:
    return node.kwargs.get("total_length", node.args[3] if len(node.args) > 3 else None)


def number_of_samples(given: Mapping[str, Any], batch: int, error: BaseException) -> str:
    """A line about the plain numbers among forward's arguments that are the batch's number of samples, if ``error`` mentions it.

    Empty if there are none.
    """
    places = [place for place, value in _values(given) if type(value) is int and value == batch]
    if not places or not re.search(rf"\b{batch}\b", str(error)):
        return ""
    return (
        f"\n{', '.join(places)} {'is a plain number' if len(places) == 1 else 'are plain numbers'}, {batch} as is the number of "
        "samples, and a part of the batch has fewer: let forward take the batch size from a tensor (x.shape[0])"
    )


def arrays(given: Mapping[str, Any]) -> list[str]:
    """Where forward's arguments have numpy's arrays, and what they are."""
    numpy = sys.modules.get("numpy")
    found = [(place, value) for place, value in _values(given) if numpy is not None and isinstance(value, numpy.ndarray)]
    return [f"{place} {tuple(value.shape)} of {value.dtype}" for place, value in found]


def _values(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What forward's arguments hold, and where."""
    # Further keyword arguments are there by their own names, too.
    waiting = deque((name, value) for name, value in given.items() if not name.startswith("**"))
    while waiting:
        where, value = waiting.popleft()
        if isinstance(value, Mapping):
            waiting.extend((f"{where}[{key!r}]", part) for key, part in value.items())
        elif isinstance(value, list | tuple):
            waiting.extend((f"{where}[{index}]", part) for index, part in enumerate(value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            waiting.extend((f"{where}.{x.name}", getattr(value, x.name, None)) for x in dataclasses.fields(value))
        else:
            yield where, value
