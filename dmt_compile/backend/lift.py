"""From the graph that Dynamo makes, in which parameters are arguments, to one over a module tree that holds them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..graphs import LABEL, NO_GRAD, cut_gradients, graph_module_over
from .memory import note_memory


@dataclass(frozen=True)
class Lifted:
    """``flat`` runs over ``root``, whose parameters are the user's own.

    ``arguments`` are the placeholders of Dynamo's graph in order: their names, and of parameters the names in ``root`` (else None).
    """

    flat: fx.GraphModule
    root: nn.Module
    arguments: tuple[tuple[str, str | None], ...]


def lift(module: fx.GraphModule) -> Lifted:
    """Give the parameters of a graph of Dynamo's a module tree: an nn.Module with the names that they have in the user's model."""
    root = nn.Module()
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    arguments: list[tuple[str, str | None]] = []
    taken: set[str] = set()
    for node in module.graph.nodes:
        held = _example(node) if node.op == "placeholder" else None
        if isinstance(held, nn.Parameter) and not _is_argument(node):
            name = _register(root, _path(node), held, taken)
            arguments.append((node.name, name))
            copies[node] = graph.create_node("get_attr", name, name=node.name)
            copies[node].meta.update(node.meta)
        else:
            if node.op == "placeholder":
                arguments.append((node.name, None))
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            if node.op == "placeholder" and node.meta.get("grapharg") is not None:
                copies[node].meta[LABEL] = _written(node)
    for name, child in module._modules.items():
        # Bodies of operators that have graphs of their own.
        root._modules.setdefault(name, child)
    _without_switches(graph)
    note_memory(graph)
    return Lifted(graph_module_over(root, graph, {}, "Flat"), root, tuple(arguments))


def _example(node: fx.Node) -> Any:
    given = node.meta.get("grapharg")
    try:
        return given.example if given is not None else None
    except AssertionError:
        # A tensor that lives no more.
        return None


_STEPS = re.compile(r"\['([^']+)'\]|\[(\d+)\]|\.([A-Za-z_]\w*)")
_INSIDE = ("_modules", "_parameters", "_buffers", "__dict__")
_ARGUMENT = re.compile(r"L\['(\w+)'\]((?:\[(?:\d+|'[^']*')\])*)")


def _source(node: fx.Node) -> str:
    """Where Dynamo has found an argument: L['self']._modules['top']._parameters['weight'], L['batch']['user']."""
    source: str = node.meta["grapharg"].source.name
    return source


def _is_argument(node: fx.Node) -> bool:
    """Whether it is given to forward, itself or in lists and dicts, and no part of a module, nor a function's own variable."""
    source = node.meta["grapharg"].source
    while hasattr(source, "base"):
        source = source.base
    return _ARGUMENT.fullmatch(_source(node)) is not None and bool(getattr(source, "is_input", False))


def _written(node: fx.Node) -> str:
    """How the user calls an argument of forward: batch['user']; of other values, as Dynamo does."""
    found = _ARGUMENT.fullmatch(_source(node))
    return found[1] + found[2] if found is not None else str(node.target)


def _path(node: fx.Node) -> str:
    """How the user's model calls a parameter."""
    steps = [a or b or c for a, b, c in _STEPS.findall(_source(node).partition("]")[2])]
    names = [re.sub(r"\W", "_", step) for step in steps if step not in _INSIDE]
    # No child of a module can be called as an attribute that every module has.
    return ".".join(f"{name}_" if name in _TAKEN else name for name in names) or node.name


_TAKEN = frozenset(dir(nn.Module()))


def _register(root: nn.Module, path: str, parameter: nn.Parameter, taken: set[str]) -> str:
    unused, number = path, 1
    while unused in taken:
        number += 1
        unused = f"{path}_{number}"
    taken.add(unused)
    *outer, name = unused.split(".")
    owner = root
    for step in outer:
        if not isinstance(owner._modules.get(step), nn.Module):
            owner.add_module(step, nn.Module())
        owner = owner.get_submodule(step)
    owner.register_parameter(name, parameter)
    return unused


def _without_switches(graph: fx.Graph) -> None:
    """Gradients are switched off by nodes that stand between others; what is moved past one would run otherwise."""
    off = False
    for node in list(graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            off = not node.args[0]
            graph.erase_node(node)
        elif off and node.op not in ("placeholder", "get_attr", "output"):
            node.meta[NO_GRAD] = True
    cut_gradients(graph)
