"""From an exported program to a plain torch.fx graph over a clone of the user's module tree."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from ..graphs import NO_GRAD, cut_gradients
from ..nested import Container, Leaf, Path, Template, first_difference, narrowed
from ..runtime.inputs import MakeResult, PickTensors
from .export import Exported, ExportError
from .kept import KEEP, Kept
from .sources import user_trace

_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_CHECKS = ("aten::_assert", "aten::sym_constrain_range", "aten::_functional_assert", "aten::_functional_sym_constrain")
_CONSTANT = "_dmt_constant_"


def to_graph(exported: Exported, root: nn.Module) -> tuple[fx.Graph, dict[str, nn.Module]]:
    """The graph that runs over ``root``, a clone of the exported model, and the modules that it calls under ``dmt``.

    Tensors that forward makes a constant of become plain attributes of ``root``; its state dict is as before.

    Raises:
        ExportError: the program calls an operator with graphs of its own, such as torch.cond.
    """
    return _Writer(exported, root).write()


class _Writer:
    def __init__(self, exported: Exported, root: nn.Module) -> None:
        self.exported = exported
        self.root = root
        self.graph = fx.Graph()
        self.extras: dict[str, nn.Module] = {}
        # Values of the exported program's nodes; of an operator with several results, the list of them.
        self.values: dict[fx.Node, Any] = {}
        self.held: dict[str, fx.Node] = {}
        # Of the nodes of forward's tensors: where each is in the arguments, and which one it is.
        self.inputs: dict[fx.Node, Path] = {}
        self.order: dict[fx.Node, int] = {}

    def write(self) -> tuple[fx.Graph, dict[str, nn.Module]]:
        program = self.exported.program
        signature = program.graph_signature
        given = dict(zip(map(str, signature.user_inputs), self._inputs(), strict=True))
        kinds = {spec.arg.name: spec for spec in signature.input_specs if hasattr(spec.arg, "name")}
        lifted: dict[fx.Node, Callable[[], fx.Node]] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                spec = kinds[node.name]
                if spec.kind is InputKind.USER_INPUT:
                    self.values[node] = given[node.name]
                else:
                    lifted[node] = self._reader(spec.kind, str(spec.target))
            elif node.op != "output":
                self._read(node, lifted)
                self._write(node, program.graph_module)
        self._output(next(node for node in program.graph.nodes if node.op == "output"), lifted)
        _drop_unused(self.graph)
        cut_gradients(self.graph)
        return self.graph, self.extras

    def _read(self, node: fx.Node, lifted: Mapping[fx.Node, Callable[[], fx.Node]]) -> None:
        """Read parameters, buffers and constants where they are first used."""
        for used in node.all_input_nodes:
            if used in lifted and used not in self.values:
                self.values[used] = lifted[used]()
                self.values[used].stack_trace = user_trace(node.meta.get("stack_trace"))

    def _inputs(self) -> list[fx.Node]:
        arguments = self.exported.arguments
        found, self.extras["inputs"] = arguments.write(self.graph, self.exported.shapes)
        self.inputs = dict(zip(found, arguments.template.paths, strict=True))
        self.order = {node: index for index, node in enumerate(found)}
        return found

    def _extra(self, name: str, module: nn.Module, *args: Any) -> fx.Node:
        self.extras[name] = module
        return self.graph.create_node("call_module", f"dmt.{name}", args, {}, name=f"dmt_{name}")

    def _reader(self, kind: InputKind, target: str) -> Callable[[], fx.Node]:
        path = target.removeprefix("model.")
        if kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            value = self.exported.program.constants[target]
            if not isinstance(value, torch.Tensor):
                raise ExportError(f"forward uses '{path}', a {type(value).__name__} that torch.export cannot look into")
            path = _place_of(value, path, self.root)
        return lambda: self._attribute(path)

    def _attribute(self, path: str) -> fx.Node:
        if path not in self.held:
            # Graph.get_attr warns about attributes that only the owner of the graph has.
            self.held[path] = self.graph.create_node("get_attr", path)
        return self.held[path]

    def _write(self, node: fx.Node, owner: fx.GraphModule) -> None:
        if node.op == "get_attr":
            return
        if node.op != "call_function":
            raise ExportError(f"torch.export left a '{node.op}' node")
        target = node.target
        where = user_trace(node.meta.get("stack_trace"))
        before = next(reversed(self.graph.nodes))
        if isinstance(target, torch._ops.OpOverload) and target._schema.name.startswith(_CHECKS):
            return
        if target is KEEP:
            self.values[node] = self._kept(self.exported.kept[int(node.args[0])], node)  # type: ignore[arg-type]
        elif target is operator.getitem and isinstance(self.values[node.args[0]], list):  # type: ignore[index]
            self.values[node] = self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        elif target is _GRAD:
            self.values[node] = self._inline(node, owner)
        elif isinstance(target, torch._ops.HigherOrderOperator):
            raise ExportError(f"forward uses {target.name()}, an operator with graphs of its own")
        else:
            plain = torch.embedding if target is torch.ops.aten.embedding.default else target
            args, kwargs = self._mapped((node.args, node.kwargs))
            self.values[node] = self.graph.create_node("call_function", plain, args, kwargs, name=node.name)
        for made in _after(before):
            if made.stack_trace is None and where is not None:
                made.stack_trace = where
            _copy_modules(node, made)

    def _mapped(self, value: Any) -> Any:
        return fx.node.map_arg(value, lambda n: self.values[n])

    def _kept(self, kept: Kept, node: fx.Node) -> list[fx.Node]:
        """A call of the module or function itself, and its tensors."""
        assert kept.returned is not None
        args, kwargs = self._rebuilt(kept.given.value, self._mapped(node.args[1]))
        op = "call_module" if isinstance(kept.target, str) else "call_function"
        call = self.graph.create_node(op, kept.target, args, kwargs)
        if kept.returned.paths == ((),):
            return [call]
        return [self._follow(call, path, kept.returned, index) for index, path in enumerate(kept.returned.paths)]

    def _rebuilt(self, value: Any, leaves: list[fx.Node]) -> Any:
        """Part of a template with nodes for leaves; what a graph cannot write down is made by a module."""
        if isinstance(value, Leaf):
            return leaves[value.index]
        if not isinstance(value, Container):
            return value
        if Template(value, ()).is_builtin or value.kind in (list, tuple):
            return value.make([self._rebuilt(part, leaves) for part in value.parts])
        used, template = narrowed(value)
        given = self._argument(value, [leaves[index] for index in used])
        return given or self._extra(f"made_{len(self.extras)}", MakeResult(template), *(leaves[index] for index in used))

    def _argument(self, value: Container, leaves: list[fx.Node]) -> fx.Node | None:
        """Where forward's arguments have a KeyedJaggedTensor of exactly these tensors: the node of it there."""
        paths = [self.inputs.get(leaf, ()) for leaf in leaves]
        if not paths or len({path[:-1] for path in paths}) > 1 or not paths[0]:
            return None
        arguments = self.exported.arguments
        held, node = arguments.template.value, None
        for step in paths[0][:-1]:
            if node is None:
                name = arguments.names[step.key]
                node = next(n for n in self.graph.nodes if n.op == "placeholder" and str(n.target).lstrip("*") == name)
            elif step.by_attribute or issubclass(held.kind, list | tuple | Mapping):
                read = getattr if step.by_attribute else operator.getitem
                there = (user for user in node.users if user.target is read and user.args == (node, step.key))
                node = next(there, None) or self.graph.call_function(read, (node, step.key))
            else:
                return None
            held = held.parts[held.keys.index(step.key)]
        same = isinstance(held, Container) and first_difference(held, value, "") is None
        return node if same and narrowed(held)[0] == [self.order[leaf] for leaf in leaves] else None

    def _follow(self, node: fx.Node, path: Path, template: Template, index: int) -> fx.Node:
        if not template.is_builtin:
            if "pick" not in self.extras:
                self.extras["pick"] = PickTensors()
            picked = next((user for user in node.users if user.target == "dmt.pick"), None)
            picked = picked or self.graph.create_node("call_module", "dmt.pick", (node,))
            return self.graph.call_function(operator.getitem, (picked, index))
        for step in path:
            node = self.graph.call_function(operator.getitem, (node, step.key))
        return node

    def _inline(self, node: fx.Node, owner: fx.GraphModule) -> list[Any]:
        """The nodes of a block under ``torch.no_grad()``; what leaves it is cut off from autograd later."""
        enabled, block, *given = node.args
        assert isinstance(block, fx.Node)
        inner = owner.get_submodule(str(block.target))
        assert isinstance(inner, fx.GraphModule)
        values = iter([self.values[used] if isinstance(used, fx.Node) else used for used in given])
        result: Any = ()
        for part in inner.graph.nodes:
            if part.op == "placeholder":
                self.values[part] = next(values)
            elif part.op == "output":
                result = self._mapped(part.args[0])
            else:
                before = next(reversed(self.graph.nodes))
                self._write(part, inner)
                if not enabled:
                    for made in _after(before):
                        made.meta[NO_GRAD] = True
        return list(result) if isinstance(result, list | tuple) else [result]

    def _output(self, output: fx.Node, lifted: Mapping[fx.Node, Callable[[], fx.Node]]) -> None:
        self._read(output, lifted)
        results: list[Any] = []
        (returned,) = output.args
        specs = self.exported.program.graph_signature.output_specs
        inputs = dict(
            zip(map(str, self.exported.program.graph_signature.user_inputs), self.exported.arguments.template.paths, strict=True)
        )
        for spec, value in zip(specs, returned, strict=True):  # type: ignore[arg-type]
            mapped = self.values[value] if isinstance(value, fx.Node) else value
            if spec.kind is OutputKind.USER_OUTPUT:
                results.append(mapped)
            elif spec.kind is OutputKind.BUFFER_MUTATION:
                held = self._attribute(str(spec.target).removeprefix("model."))
                self.graph.call_function(torch.ops.aten.copy_.default, (held, mapped))
            else:
                raise ExportError(f"forward changes its input ({spec.kind.name}: {inputs.get(str(spec.target), spec.target)})")
        template = self.exported.returned
        value = template.build(results) if template.is_builtin else self._extra("result", MakeResult(template), *results)
        self.graph.output(value)


def _after(node: fx.Node) -> list[fx.Node]:
    """The nodes that were added behind ``node``."""
    return list(itertools.takewhile(lambda n: n is not node, reversed(node.graph.nodes)))


def _copy_modules(node: fx.Node, made: fx.Node) -> None:
    stack = node.meta.get("nn_module_stack")
    if stack and "nn_module_stack" not in made.meta:
        made.meta["nn_module_stack"] = {
            key: (path.removeprefix("model").removeprefix("."), kind) for key, (path, kind) in stack.items() if path
        }


def _place_of(value: torch.Tensor, path: str, root: nn.Module) -> str:
    """Where ``root`` holds a constant: in an attribute of its own, or in a new one."""
    owner, _, name = path.rpartition(".")
    try:
        held = getattr(root.get_submodule(owner), name)
    except AttributeError:
        held = None
    if isinstance(held, torch.Tensor):
        return path
    number = sum(key.startswith(_CONSTANT) for key in root.__dict__)
    root.__dict__[f"{_CONSTANT}{number}"] = value.detach().clone()
    return f"{_CONSTANT}{number}"


def _drop_unused(graph: fx.Graph) -> None:
    """Remove what only the dropped checks have read."""
    for node in reversed(list(graph.nodes)):
        if not node.users and _is_pure(node):
            graph.erase_node(node)


def _is_pure(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
    return node.op == "get_attr" or getattr(target, "__module__", "") in ("_operator", "math") or target is torch.embedding
