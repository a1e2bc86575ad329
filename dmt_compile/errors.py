"""Every error that dmt_compile raises on purpose, and how a graph position is worded in one."""

from __future__ import annotations

import linecache
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx


class DmtError(Exception):
    """Base of all errors raised by dmt_compile. The message says what was expected, what was found and what to do."""


class TopologyError(DmtError, ValueError):
    """A topology or a number of towers that no set of ranks can have."""


class PlanError(DmtError, ValueError):
    """A tower plan that does not fit the model or the topology."""


class CaptureError(DmtError):
    """A model that could not be turned into a graph, or holds nothing to partition."""


class InputError(DmtError, ValueError):
    """A batch that does not fit the model."""


class DependencyError(DmtError, ImportError):
    """An optional package is missing, or its version does not fit the others."""


class PassError(DmtError):
    """A pass whose requirement or promise does not hold; names the pass and the node."""


class VerificationError(PassError):
    """A graph that does not move the data as the flat model needs it; names the pass and the node."""


class DistributedError(DmtError, RuntimeError):
    """The ranks do not agree, or another rank failed."""


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def source_location(node: fx.Node) -> str | None:
    """The user's ``file:line`` of a graph node: the innermost frame outside torch.fx, or None if unknown."""
    trace = node.meta.get("stack_trace") or node.stack_trace
    if not trace:
        return None
    frames = _FRAME.findall(trace)
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else None


def source_line(node: fx.Node) -> str | None:
    """The user's ``file:line: `code` `` of a graph node, or None if unknown."""
    place = source_location(node)
    if place is None:
        return None
    file, _, line = place.rpartition(":")
    return f"{place}: `{linecache.getline(file, int(line)).strip()}`"


def at(node: fx.Node) -> str:
    """How an error names a node: its name and, where known, the user's line."""
    where = source_location(node)
    return f"node '{node.name}'" + (f" ({where})" if where else "")


def first_line(error: BaseException) -> str:
    """An error in one line: its type and the first line of its message."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
