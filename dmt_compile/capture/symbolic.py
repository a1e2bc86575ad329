"""Symbolic tracing that keeps lookup modules whole, notes the user's line on every node, and survives what it cannot trace."""

from __future__ import annotations

import builtins
import logging
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import rnn
from torch.utils._pytree import tree_leaves

from ..adapters import torchrec as torchrec_adapter
from ..adapters import torchrec_sequences
from ..graphs import NO_GRAD, clone_sharing_tensors, cut_gradients
from .arguments import Arguments
from .backward import refuse_backward
from .outside import Outside
from .shown import Shown
from .sources import reason, trace_of, user_frame


@dataclass
class Traced:
    """One graph, the clone that it was traced on, what it calls under ``dmt``, and what was kept whole and why."""

    root: nn.Module
    graph: fx.Graph
    extras: dict[str, nn.Module]
    leaves: dict[str, str]


@dataclass(frozen=True)
class Structure:
    """What forward's arguments are made of, and the tensors in them."""

    arguments: Arguments
    leaves: tuple[torch.Tensor, ...]


def structure_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Structure | None:
    """The structure of example inputs; None if it tells tracing nothing that it could use."""
    leaves, arguments = Arguments.of(model, args, kwargs, lambda x: isinstance(x, torch.Tensor) or torchrec_adapter.is_jagged(x))
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    return Structure(arguments, tuple(leaves))


def trace(
    model: nn.Module, whole: Mapping[str, str], prepare: Callable[[nn.Module], None], structure: Structure | None = None
) -> Traced:
    """Trace a clone of a model that ``prepare`` has put in some mode.

    Submodules in ``whole`` are kept whole for the reason given there. With a ``structure``, forward is given lists, dicts and
    plain values as they are in it, and only the tensors inside stand for any tensor; the graph takes no other structure. Numbers
    of dimensions are then plain numbers, and sizes can be gone through.

    Raises:
        Exception: whatever tracing the model's own forward, or a submodule with a lookup collection, has raised.
    """
    failure: Exception | None = None
    # Reading buffers as graph nodes keeps them live; code that looks inside a buffer while it is traced needs its values.
    for proxy_buffers in (True, False):
        root = clone_sharing_tensors(model, copy_buffers=not proxy_buffers)
        versions = {name: buffer._version for name, buffer in root.named_buffers()}
        modes = {module: module.training for module in root.modules()}
        before = {module: dict(module.__dict__) for module in root.modules()}
        prepare(root)
        outside = Outside(root)
        shown = Shown(model, structure.leaves) if structure is not None else None
        tracer = _Tracer(proxy_buffers, whole, outside, structure, shown)
        try:
            with _without_tracing_advice(), _lengths_in_the_graph(), refuse_backward(root, tracer.loses), outside:
                graph = tracer.trace(root)
            written = next((name for name, buffer in root.named_buffers() if buffer._version != versions.get(name)), None)
            if written is not None:
                raise TypeError(f"forward assigns to the buffer '{written}', which symbolic tracing does not see")
        except Exception as error:
            failure = error
            continue
        for module, mode in modes.items():
            module.training = mode
            _forget_proxies(module.__dict__, before[module])
        for path, module in model.named_modules(remove_duplicate=False):
            root.get_submodule(path)._buffers.update(module._buffers)
        return Traced(root, graph, tracer.extras, tracer.leaves)
    assert failure is not None
    raise failure


def _forget_proxies(attributes: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Undo what forward has noted on a module while it was traced: what stands for a tensor is of no use to anybody later."""
    for name, value in list(attributes.items()):
        if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves(value)):
            if name in before:
                attributes[name] = before[name]
            else:
                del attributes[name]


@contextmanager
def _without_tracing_advice() -> Iterator[None]:
    """Keep back what torch.fx advises TorchRec's authors while it traces; it is nothing to the user."""
    logger = logging.getLogger("torch.fx._symbolic_trace")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


_len = builtins.len


def _length(value: Any, /) -> Any:
    """``len``, but of what stands for a tensor it is a node: Python takes no other answer than a number."""
    return value.tracer.create_proxy("call_function", _len, (value,), {}) if isinstance(value, fx.Proxy) else _len(value)


@contextmanager
def _lengths_in_the_graph() -> Iterator[None]:
    """Replace ``len`` wherever forward's code may stand; of anything but a proxy it stays what it is."""
    before = builtins.len
    builtins.len = _length
    try:
        yield
    finally:
        builtins.len = before


def _autocast() -> list[tuple[bool, torch.dtype]]:
    return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]


# They look at the values of lengths; as one node each they need not be traced.
_OPAQUE = (rnn.pack_padded_sequence, rnn.pad_packed_sequence, rnn.pack_sequence, rnn.pad_sequence)


# They make a tensor of the sizes that they are given, and torch.fx does not see calls of them.
_FACTORIES = (
    *(torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.eye, torch.linspace),
    *(torch.tensor, torch.as_tensor, torch.rand, torch.randn, torch.randint, torch.randperm),
)


# They make a tensor from an array, and warn when they are given a tensor instead.
_COPIERS = ("new_tensor", torch.tensor)


def _without_numpy(value: Any) -> Any:
    """numpy's numbers and arrays as torch's; a graph cannot hold them. torch does without numpy, and so does this package."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value.copy())
    return value


def _as_list(value: Any) -> Any:
    """A small array of int64 as a list, which torch makes the same tensor from."""
    converted = _without_numpy(value)
    small = isinstance(converted, torch.Tensor) and converted.dtype == torch.int64 and converted.numel() <= 4096
    return converted.tolist() if small and converted is not value else value


_FX = os.path.dirname(fx.__file__) + os.sep


def _of_fx(frame: FrameType) -> bool:
    """Whether a frame runs torch.fx's own code."""
    return frame.f_code.co_filename.startswith(_FX)


class _Proxy(fx.Proxy):
    """Stands for a value that may be written to, and whose number of dimensions may be known."""

    tracer: _Tracer

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def _written(self, operation: Callable[..., Any], other: Any) -> Any:
        """``x += 1``, for which Python would else take ``x + 1``: under no_grad, that is another tensor, without x's gradient."""
        if torch.is_grad_enabled():
            return NotImplemented
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    def __getattr__(self, name: str) -> Any:
        if name == "shape" and self.tracer.sees:
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        dims = self.tracer.dimensions(self.node) if name == "ndim" else None
        return super().__getattr__(name) if dims is None else dims

    def __hash__(self) -> int:
        # A dict or a set would look for this object, and not for the number or tensor that it stands for. Where Python's own
        # values cannot be hashed that is a TypeError, for which code that remembers results has another way.
        if _of_fx(sys._getframe(1)):
            return object.__hash__(self)
        raise TypeError(
            "forward looks up a traced value in a dict or a set, or remembers a result by it (functools.lru_cache): the graph "
            "would keep for ever what is found there for none"
        )

    def __len__(self) -> int:
        # Python asks this before it makes a list of sizes.
        sizes = self.tracer.sizes(self.node)
        return super().__len__() if sizes is None else sizes


def _in_place(operation: Callable[..., Any]) -> Callable[[_Proxy, Any], Any]:
    return lambda self, other: self._written(operation, other)


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift"):
    setattr(_Proxy, f"__{_name}__", _in_place(getattr(operator, _name)))


def _is_shape(node: fx.Node) -> bool:
    """Whether a node's value is the sizes of a tensor, or some of them."""
    if node.target is operator.getitem and isinstance(node.args[1], slice):
        return isinstance(node.args[0], fx.Node) and _is_shape(node.args[0])
    if node.target is getattr:
        return node.args[1] == "shape"
    return node.op == "call_method" and node.target == "size" and len(node.args) == 1 and not node.kwargs


class _Tracer(fx.Tracer):
    """Keeps lookup modules and torch.nn modules whole, notes the user's line on every node, survives untraceable leaves."""

    def __init__(
        self,
        proxy_buffers: bool,
        whole: Mapping[str, str],
        outside: Outside,
        structure: Structure | None,
        shown: Shown | None,
    ) -> None:
        super().__init__(autowrap_functions=(*_OPAQUE, *_FACTORIES), param_shapes_constant=True)
        # Wherever they are looked up: by name, or through their module.
        self._autowrap_search += [rnn, torch]
        self.structure = structure
        self.extras: dict[str, nn.Module] = {}
        self.proxy_buffer_attributes = proxy_buffers
        self.whole = whole
        self.leaves: dict[str, str] = {}
        self._attribute_proxies: list[dict[str, Any]] = []
        self._grad = torch.is_grad_enabled()
        self._outside = outside
        self._shown = shown
        self._looking = False
        self._autocast = _autocast()

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        graph = super().trace(root, concrete_args)
        cut_gradients(graph)
        for node in graph.nodes:
            # Generated code would register such a function with torch.fx for good, under a name that cannot be found again.
            node.meta.pop("is_wrapped", None)
        return graph

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = torchrec_adapter.is_collection(m) or torchrec_adapter.must_stay_whole(m)
        return whole or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        if self.structure is None:
            made: tuple[Callable[..., Any], list[Any]] = super().create_args_for_root(root_fn, is_module, concrete_args)
            return made
        shapes = [(None,) * leaf.dim() for leaf in self.structure.leaves]
        nodes, self.extras["inputs"] = self.structure.arguments.write(self.graph, shapes)
        if self._shown is not None:
            self._shown.start(nodes)
        bound = self.structure.arguments.bind([self.proxy(node) for node in nodes])
        return lambda: root_fn(self.root, *bound.args, **bound.kwargs), []

    def create_arg(self, a: Any) -> Any:
        a = _without_numpy(a)
        origin = self._outside.origin(a)
        if origin is not None:
            raise TypeError(f"forward computes a tensor from {origin} outside the graph, which would keep it as it is now")
        return super().create_arg(a)

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        if _autocast() != self._autocast:
            raise TypeError("forward enters torch.autocast, which the graph would lose: put autocast around the call of the model")
        if args[1] is _length:
            # torch.fx.wrap("len") in the user's module wraps whatever goes by that name.
            args = (args[0], _len, *args[2:])
        if args[1] in ("dim", "ndimension", _len) and isinstance(args[2][0], fx.Proxy):
            node = args[2][0].node
            known = self.sizes(node) if args[1] is _len else self.dimensions(node)
            if known is not None:
                return known
        if args[1] in _COPIERS:
            args = (*args[:2], tuple(map(_as_list, args[2])), *args[3:])
        proxy = super().create_proxy(*args, **kwargs)
        if self._grad and not torch.is_grad_enabled() and proxy.node.op not in ("placeholder", "get_attr", "output"):
            proxy.node.meta[NO_GRAD] = True
        # Placeholders are made before the user's forward runs.
        where = user_frame(sys._getframe(1)) if proxy.node.op != "placeholder" else None
        if where is not None:
            code, line = where
            proxy.node.stack_trace = trace_of(code.co_filename, line, code.co_name)
        return proxy

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def loses(self, _kind: type, given: list[Any]) -> bool:
        """Whether the graph would lose the backward of a Function that is given these values."""
        if self._looking:
            return False
        return any(isinstance(x, fx.Proxy) or (isinstance(x, torch.Tensor) and x.requires_grad) for x in given)

    @property
    def sees(self) -> bool:
        """Whether there are example inputs to see the number of dimensions on."""
        return self._shown is not None

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        sizes = self.sizes(obj.node)
        return super().iter(obj) if sizes is None else iter([operator.getitem(obj, place) for place in range(sizes)])

    def dimensions(self, node: fx.Node) -> int | None:
        """How many dimensions a tensor of the graph has; None if the example inputs do not tell."""
        value = self._value(node)
        return value.dim() if isinstance(value, torch.Tensor) else None

    def sizes(self, node: fx.Node) -> int | None:
        """How many sizes of a tensor a value is made of; None if it is none, or the example inputs do not tell."""
        value = self._value(node) if _is_shape(node) else None
        return None if value is None else _len(value)

    def _value(self, node: fx.Node) -> Any:
        """The value of a node on the example inputs; None if there are no such, or the node does not run on them."""
        if self._shown is None:
            return None
        self._looking = self._outside.paused = True
        try:
            return self._shown.value(node, self.root)
        except Exception:
            return None
        finally:
            self._looking = self._outside.paused = False

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._looking:
            return attr_val
        if not any(cache is parameter_proxy_cache for cache in self._attribute_proxies):
            self._attribute_proxies.append(parameter_proxy_cache)
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._looking:
            return forward(*args, **kwargs)
        try:
            path = self.path_of_module(m)
        except NameError:
            # Made in forward, as a function might be: there is no module that the graph could call.
            return forward(*args, **kwargs)
        if torchrec_sequences.is_collection(m):
            return torchrec_sequences.trace(m, *args, **kwargs)
        if path in self.whole:
            self.leaves[path] = self.whole[path]
            return self.create_proxy("call_module", path, args, kwargs)
        if self.is_leaf_module(m, path) or torchrec_adapter.holds_collection(m):
            return super().call_module(m, forward, args, kwargs)
        mark = next(reversed(self.graph.nodes), None)
        stack = dict(self.module_stack)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:
            self._undo(mark, stack)
            try:
                whole = self.create_proxy("call_module", path, args, kwargs)
            except Exception:
                # It is given what no graph can hold.
                raise error from None
            self.leaves[path] = reason(error)
            return whole

    def _undo(self, mark: fx.Node | None, stack: dict[str, Any]) -> None:
        """Take back what tracing a submodule left behind before it failed."""
        erased: set[fx.Node] = set()
        for node in list(reversed(self.graph.nodes)):
            if node is mark:
                break
            erased.add(node)
            self.graph.erase_node(node)
        for cache in self._attribute_proxies:
            for key in [key for key, proxy in cache.items() if proxy.node in erased]:
                del cache[key]
        self.module_stack.clear()
        self.module_stack.update(stack)
