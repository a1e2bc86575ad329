"""Building GraphModules that share a model's modules, and cloning a model's structure around its tensors."""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from .errors import CaptureError
from .writes import may_write, returns


def clone_sharing_tensors(model: nn.Module, *, copy_buffers: bool = False) -> nn.Module:
    """A copy of the module tree (flags, hooks, Python attributes) whose parameters and buffers are the original tensors.

    No parameter is copied, so the memory cost does not depend on the size of the tables; with ``copy_buffers`` the copy has
    buffers of its own.

    Raises:
        CaptureError: a module that cannot be copied, or that copies its parameters with it.
    """
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = parameter
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().clone() if copy_buffers else buffer
    try:
        clone: nn.Module = deepcopy_values(model, memo)
    except (TypeError, RuntimeError) as error:
        raise CaptureError(f"the modules of {type(model).__name__} cannot be copied around their parameters: {error}") from error
    # A scripted module copies its parameters whatever the memo says, and the copies would be trained instead.
    for (name, mine), (_, theirs) in zip(clone.named_parameters(), model.named_parameters(), strict=True):
        if mine is not theirs:
            path = name.rpartition(".")[0]
            raise CaptureError(
                f"the module that holds '{name}' ({type(model.get_submodule(path)).__name__}) does not share its parameters with a "
                "copy of it: give towerize the module before torch.jit.script or torch.jit.trace"
            )
    return clone


def clone_with_parameters(model: nn.Module) -> nn.Module:
    """A copy of the module tree with parameters and buffers of its own; shared parameters stay shared."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().clone()
    copied: nn.Module = deepcopy_values(model, memo)
    return copied


def deepcopy_values(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """``copy.deepcopy``, but tensors that are part of an autograd graph are copied too, without it."""
    with _CopyValues():
        return copy.deepcopy(value, memo)


class _CopyValues(TorchFunctionMode):
    """Copies the values of tensors that torch refuses to copy, because they are part of an autograd graph.

    A module keeps such tensors as attributes once it has run: an auxiliary loss, attention weights, the weight of weight_norm.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and args[0].grad_fn is not None:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def graph_module_over(root: nn.Module, graph: fx.Graph, extras: Mapping[str, nn.Module], name: str) -> fx.GraphModule:
    """A GraphModule that runs ``graph`` over ``root``'s own modules, parameters and buffers plus ``extras``.

    The stock constructor copies attribute by attribute: it drops what the graph does not use from the state dict and goes
    stale when ``root``'s buffers are replaced (``.to()``). Here the containers themselves are shared. ``extras`` are placed
    under ``dmt`` and hold no parameters.
    """
    module = fx.GraphModule(nn.Module(), fx.Graph(), class_name=name)
    module.__dict__["_parameters"] = root._parameters
    module.__dict__["_buffers"] = root._buffers
    module.__dict__["_non_persistent_buffers_set"] = root._non_persistent_buffers_set
    modules: dict[str, nn.Module | None] = dict(root._modules)
    if extras:
        modules[EXTRAS] = _Extras(extras)
    module.__dict__["_modules"] = modules
    for key, value in root.__dict__.items():
        # Tensors that tracing found as plain attributes are read by get_attr nodes.
        if isinstance(value, torch.Tensor):
            module.__dict__[key] = value
    module.__dict__["training"] = root.training
    module.graph = graph
    return module


EXTRAS = "dmt"
INPUT = "dmt_input"
"""Meta key of nodes that hold one tensor of the inputs: its path, as of :func:`input_path`, and how a user writes it."""

LABEL = "dmt_label"
"""Meta key of nodes whose value has a name of the user's, which :func:`source_text` gives."""


class _Extras(nn.Module):
    """Holder of the modules that passes put beside the model's own."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def extras_of(module: fx.GraphModule) -> dict[str, nn.Module]:
    """The modules that passes have added to a stage."""
    holder = module._modules.get(EXTRAS)
    return {name: child for name, child in holder._modules.items() if child is not None} if holder is not None else {}


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy with the same node names, so that stages can be compared name by name."""
    copied = fx.Graph(tracer_cls=graph._tracer_cls)
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapping[node] = copied.node_copy(node, lambda n: mapping[n])
    return copied


def closure(sources: Sequence[fx.Node], *, users: bool = False, stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """``sources`` and all that they are computed from, up to ``stop``; with ``users``, all that is computed from them."""
    needed: set[fx.Node] = set()
    stack = list(sources)
    while stack:
        node = stack.pop()
        if node not in needed and node not in stop:
            needed.add(node)
            stack.extend(node.users if users else node.all_input_nodes)
    return needed


def move_before(graph: fx.Graph, anchor: fx.Node, sources: Sequence[fx.Node]) -> None:
    """Move everything that ``sources`` need, and that now stands behind ``anchor``, in front of it, in the same order."""
    needed = closure(sources)
    behind = False
    for node in list(graph.nodes):
        if node is anchor:
            behind = True
        elif behind and node in needed:
            anchor.prepend(node)


@contextmanager
def plain_attention() -> Iterator[None]:
    """One fused operator for a whole layer would hide what happens in it."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


LOOKUPS = (nn.functional.embedding, nn.functional.embedding_bag, torch.embedding)
"""The functions that look rows of a table up."""

NO_GRAD = "no_grad"
"""Key in the ``meta`` of nodes that the user's code runs with gradients switched off."""


def without_grad(value: Any) -> Any:
    """``value`` with every tensor inside it detached."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, value)


def cut_gradients(graph: fx.Graph) -> None:
    """Detach what enters and leaves a part of the graph that is marked ``NO_GRAD``: a graph has no memory of the switch itself.

    What leaves it is detached. What is written to in it is detached before: the tensor's own gradient must not see the write, nor
    may a parameter that is written to require one.
    """
    marked = [node for node in graph.nodes if NO_GRAD in node.meta]
    entering: dict[fx.Node, fx.Node] = {}
    # What a node in there has written to and returns, where that comes from outside.
    returned: dict[fx.Node, fx.Node] = {}
    for node in _leading_to_writes(marked):
        written = returns(node)
        if written is not None and (NO_GRAD not in written.meta or written in returned):
            returned[node] = returned.get(written, written)
        for used in node.all_input_nodes:
            if NO_GRAD in used.meta:
                continue
            if used not in entering:
                with graph.inserting_before(node):
                    entering[used] = graph.call_function(without_grad, (used,))
                entering[used].meta.update({**used.meta, NO_GRAD: True})
            node.replace_input_with(used, entering[used])
        if node in returned:
            for user in [user for user in node.users if NO_GRAD not in user.meta]:
                user.replace_input_with(node, returned[node])
    for node in marked:
        outside = [user for user in node.users if NO_GRAD not in user.meta]
        if outside:
            with graph.inserting_after(node):
                cut = graph.call_function(without_grad, (node,))
            cut.meta.update(node.meta)
            for user in outside:
                user.replace_input_with(node, cut)


def _leading_to_writes(marked: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes that write, and those that make what they write to or from, in order; lookups and modules read what they own."""
    found: set[fx.Node] = set()
    for node in reversed(marked):
        leads = may_write(node) or any(user in found for user in node.users)
        if leads and node.op != "call_module" and node.target not in LOOKUPS:
            found.add(node)
    return [node for node in marked if node in found]


def resolve_parameter(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the parameter called ``name`` in ``root``'s state dict, and the parameter's attribute in it."""
    path, _, attribute = name.rpartition(".")
    return root.get_submodule(path), attribute


def attribute_of(root: nn.Module, name: str) -> Any:
    """What a ``get_attr`` node with that target reads."""
    value: Any = root
    for part in name.split("."):
        value = getattr(value, part)
    return value


def source_text(node: fx.Node) -> str:
    """How a user would write the value of a node, where it comes straight from an argument; the node's name otherwise."""
    if LABEL in node.meta:
        return str(node.meta[LABEL])
    if node.op == "placeholder":
        return str(node.target)
    if INPUT in node.meta:
        return str(node.meta[INPUT][1])
    inner = node.args[0] if node.args else None
    if isinstance(inner, fx.Node):
        if node.op == "call_function" and node.target is getattr:
            return f"{source_text(inner)}.{node.args[1]}"
        if node.op == "call_function" and node.target is operator.getitem:
            return f"{source_text(inner)}[{_index_text(node.args[1])}]"
        if (node.op == "call_method" and node.target in _CASTS) or node.target in _ATEN_CASTS:
            return source_text(inner)
        if node.target is torch.ops.aten.slice.Tensor and tuple(node.args[2:]) in ((), (0,), (0, _END)):
            return source_text(inner)
        if node.target is torch.ops.aten.select.int and isinstance(node.args[1], int) and node.args[1] >= 0:
            return f"{source_text(inner)}[{':, ' * node.args[1]}{node.args[2]}]"
    if node.target in _ADDITIONS:
        given = [arg for arg in node.args if isinstance(arg, fx.Node) and _needs_inputs(arg)]
        if len(given) == 1:
            return source_text(given[0])
    return node.name


_ADDITIONS = (operator.add, operator.iadd, torch.add, torch.ops.aten.add.Tensor)


def _needs_inputs(node: fx.Node) -> bool:
    """Whether a value is computed from the inputs, more than from their device or type."""
    seen, waiting = {node}, [node]
    while waiting:
        one = waiting.pop()
        if one.op == "placeholder" or INPUT in one.meta:
            return True
        if one.op == "call_method" and str(one.target).startswith("new_"):
            continue
        for used in one.all_input_nodes:
            if used not in seen:
                seen.add(used)
                waiting.append(used)
    return False


def input_path(node: fx.Node) -> tuple[object, ...] | None:
    """Where in the inputs a value stands: an argument's name, then keys, indices or attributes; None if it is computed.

    A cast or a move to another device changes nothing about where it stands.
    """
    if node.op == "placeholder":
        return (str(node.target),)
    if INPUT in node.meta:
        path: tuple[object, ...] = node.meta[INPUT][0]
        return path
    inner = node.args[0] if node.args else None
    if isinstance(inner, fx.Node) and node.op == "call_function" and node.target in (getattr, operator.getitem):
        outer, step = input_path(inner), node.args[1]
        return (*outer, step) if outer is not None and isinstance(step, str | int) else None
    if isinstance(inner, fx.Node) and node.target is torch.ops.aten.select.int and node.args[1] == 0:
        # x[i], as torch.export writes it.
        outer, step = input_path(inner), node.args[2]
        return (*outer, step) if outer is not None and isinstance(step, int) else None
    if isinstance(inner, fx.Node) and ((node.op == "call_method" and node.target in _CASTS) or node.target in _ATEN_CASTS):
        return input_path(inner)
    return None


def keys_read(graph: fx.Graph) -> tuple[tuple[object, ...], ...]:
    """The paths of the inputs' entries that the graph reads by key."""
    nodes = (node for node in graph.nodes if node.op == "call_function" and node.target is operator.getitem)
    found = (input_path(node) for node in nodes if INPUT in node.meta or isinstance(node.args[1], str))
    return tuple(dict.fromkeys(path for path in found if path is not None and isinstance(path[-1], str) and len(path) > 1))


_CASTS = ("long", "int", "to", "contiguous")
_ATEN_CASTS = (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default, torch.ops.aten.contiguous.default)
_END = 2**63 - 1


def _index_text(index: object) -> str:
    if isinstance(index, tuple):
        return ", ".join(_index_text(part) for part in index)
    if isinstance(index, slice):
        start, stop = ("" if end is None else str(end) for end in (index.start, index.stop))
        return f"{start}:{stop}" if index.step is None else f"{start}:{stop}:{index.step}"
    return repr(index)
