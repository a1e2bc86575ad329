"""Modes that forward enters and leaves (autocast, inference_mode, vmap): every node must run in the one that it was written in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ..errors import CaptureError, at
from ..writes import changes_mode


def refuse_lookups_in_modes(graph: fx.Graph, lookups: Sequence[fx.Node]) -> None:
    """Lookups are exchanged in the middle of the graph; of all modes, autocast alone leaves them what they are.

    Raises:
        CaptureError: a lookup stands in another mode; names its line.
    """
    depth = 0
    inside = {node: 0 for node in lookups}
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node in inside:
            inside[node] = depth
        elif changes_mode(node) and "autocast" not in name:
            if name.startswith("_enter_") or "increment" in name:
                depth += 1
            elif name.startswith("_exit_") or "decrement" in name:
                depth -= 1
    for node, modes in inside.items():
        if modes > 0:
            raise CaptureError(
                f"{at(node)} looks a table up under inference_mode, vmap or another transform that forward enters: backend 'dmt' "
                "takes lookups under autocast and no_grad only, so enter it around the call of the model, or look up outside it"
            )


def refuse_moved(flat: fx.Graph, made: fx.Graph) -> None:
    """The ids of a round are read before its first lookup; what computes them must not leave its mode for that.

    Raises:
        CaptureError: it does; names the line.
    """
    before, after = _switches(flat), _switches(made)
    for node in made.nodes:
        if node.name in before and before[node.name] != after[node.name] and not _exact(node):
            raise CaptureError(
                f"{at(node)} computes ids in a mode (autocast, say) that forward enters or leaves after another lookup: all ids "
                "are read before the first one, so compute them before it, or enter the mode around the call of the model"
            )


def _exact(node: fx.Node) -> bool:
    """Whether a node computes whole numbers from whole numbers, which no mode changes."""
    values = [one.meta.get("example_value") for one in (node, *node.all_input_nodes)]
    return all(isinstance(one, torch.Tensor | torch.SymInt | int) and not _floats(one) for one in values)


def _floats(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _switches(graph: fx.Graph) -> dict[str, int]:
    """By name, how many nodes that switch modes stand before a node that computes something."""
    found, switches = {}, 0
    for node in graph.nodes:
        if changes_mode(node):
            switches += 1
        elif node.op not in ("placeholder", "get_attr", "output"):
            found[node.name] = switches
    return found
