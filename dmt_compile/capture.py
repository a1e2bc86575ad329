"""From a user's module to a flat torch.fx graph in which every node knows the user's file and line.

The graph runs over a clone of the module tree that shares all tensors with the model, so that nothing done to the graph,
and no tracing side effect, reaches the user's objects.
"""

from __future__ import annotations

import linecache
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn

from .adapters import torchrec as torchrec_adapter
from .errors import CaptureError, source_location
from .graphs import EXTRAS, NO_GRAD, clone_sharing_tensors, cut_gradients, graph_module_over

_LIBRARY_DIRS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)


@dataclass(frozen=True)
class Captured:
    """A captured model: its graph over a clone of its modules, and the submodules kept whole with the reason why."""

    flat: fx.GraphModule
    root: nn.Module
    leaves: dict[str, str] = field(default_factory=dict)


def capture(model: nn.Module) -> Captured:
    """Trace ``model`` symbolically. The model is left as it is.

    Submodules that cannot be traced, or read ``self.training``, and hold no embedding lookup are kept whole and reported in
    ``leaves``.

    Raises:
        CaptureError: the model is not a module, is already sharded or wrapped, or the way to a lookup cannot be traced or
            depends on ``self.training``; the message shows the user's line.
    """
    _check_model(model)
    whole: dict[str, str] = {}
    while True:
        root, graph, leaves = _trace(model, whole, flipped=False)
        # A graph would keep for ever the way that forward takes in the mode in which it is traced.
        _, other, _ = _trace(model, whole, flipped=True)
        node = _first_difference(graph, other)
        if node is None:
            flat = graph_module_over(root, graph, {}, f"Flat{type(model).__name__}")
            return Captured(flat, root, leaves)
        path = _innermost_without_lookup(node, root, whole)
        where = f"{source_location(node) or type(model).__name__}: takes another way in training than in evaluation"
        if path is None:
            raise CaptureError(
                f"{where}: code on the way to a lookup must not read self.training; use modules such as nn.Dropout, which look at "
                "their own mode when they run, or move the code into a submodule that holds no lookup (it is then kept whole)"
            )
        whole[path] = where


def _trace(model: nn.Module, whole: Mapping[str, str], flipped: bool) -> tuple[nn.Module, fx.Graph, dict[str, str]]:
    """A clone of ``model``, its graph and its leaves; ``flipped`` traces every module in its other mode."""
    failure: Exception | None = None
    # Reading buffers as graph nodes keeps them live; code that looks inside a buffer while it is traced needs its values.
    for proxy_buffers in (True, False):
        root = clone_sharing_tensors(model)
        if flipped:
            for module in root.modules():
                module.training = not module.training
        tracer = _Tracer(proxy_buffers, whole)
        try:
            with _without_tracing_advice():
                return root, tracer.trace(root), tracer.leaves
        except Exception as error:
            failure = error
    assert failure is not None
    raise _explain(failure, model) from failure


def _first_difference(a: fx.Graph, b: fx.Graph) -> fx.Node | None:
    """The first node of either graph that has no equal in the other."""
    place: dict[fx.Node, int] = {}
    pairs: list[tuple[fx.Node | None, fx.Node | None]] = list(zip_longest(a.nodes, b.nodes))
    for index, (mine, theirs) in enumerate(pairs):
        if mine is None or theirs is None:
            return mine or theirs
        place[mine] = place[theirs] = index
        if (mine.op, mine.target) != (theirs.op, theirs.target):
            return mine
        if _plain((mine.args, mine.kwargs), place) != _plain((theirs.args, theirs.kwargs), place):
            return mine
    return None


def _plain(value: Any, place: Mapping[fx.Node, int]) -> Any:
    """Arguments of a node in a form that can be compared between two graphs."""
    if isinstance(value, fx.Node):
        return ("node", place[value])
    if isinstance(value, list | tuple):
        return [_plain(item, place) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, place) for key, item in value.items()}
    if isinstance(value, slice):
        return [_plain(item, place) for item in (value.start, value.stop, value.step)]
    return value if isinstance(value, int | float | str | None) and value == value else type(value)


def _innermost_without_lookup(node: fx.Node, root: nn.Module, whole: Mapping[str, str]) -> str | None:
    for path, _ in reversed(list(node.meta.get("nn_module_stack", {}).values())):
        if path and path not in whole and not torchrec_adapter.holds_collection(root.get_submodule(path)):
            return str(path)
    return None


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


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise CaptureError(f"towerize takes an nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise CaptureError(
            f"the model is already wrapped in {type(model).__name__}: pass the module inside it (model.module); "
            "program.distribute() synchronises the dense gradients itself"
        )
    torchrec_adapter.check_model(model)
    if torchrec_adapter.has_hooks(model) or type(model).__call__ is not nn.Module.__call__:
        raise CaptureError(
            f"{type(model).__name__} has hooks or a __call__ of its own, which the compiled program would not run: "
            "remove them and put them on the program, or move the model into a module around it"
        )
    if EXTRAS in model._modules:
        raise CaptureError(f"the model has a submodule called '{EXTRAS}', a name that the compiled program uses: rename it")


class _Tracer(fx.Tracer):
    """Keeps lookup modules and torch.nn modules whole, notes the user's line on every node, survives untraceable leaves."""

    def __init__(self, proxy_buffers: bool, whole: Mapping[str, str]) -> None:
        super().__init__(param_shapes_constant=True)
        self.proxy_buffer_attributes = proxy_buffers
        self.whole = whole
        self.leaves: dict[str, str] = {}
        self._attribute_proxies: list[dict[str, Any]] = []
        self._grad = torch.is_grad_enabled()

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        graph = super().trace(root, concrete_args)
        cut_gradients(graph)
        return graph

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = torchrec_adapter.is_collection(m) or torchrec_adapter.must_stay_whole(m)
        return whole or super().is_leaf_module(m, module_qualified_name)

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        proxy = super().create_proxy(*args, **kwargs)
        if self._grad and not torch.is_grad_enabled() and proxy.node.op not in ("placeholder", "get_attr", "output"):
            proxy.node.meta[NO_GRAD] = True
        # Placeholders are made before the user's forward runs.
        where = _user_frame(sys._getframe(1)) if proxy.node.op != "placeholder" else None
        if where is not None:
            code, line = where
            text = linecache.getline(code.co_filename, line).strip()
            proxy.node.stack_trace = f'  File "{code.co_filename}", line {line}, in {code.co_name}\n    {text}\n'
        return proxy

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if not any(cache is parameter_proxy_cache for cache in self._attribute_proxies):
            self._attribute_proxies.append(parameter_proxy_cache)
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self.path_of_module(m)
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
            self.leaves[path] = _reason(error)
            return self.create_proxy("call_module", path, args, kwargs)

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


def _user_frame(frame: FrameType | None) -> tuple[CodeType, int] | None:
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARY_DIRS) and not name.startswith("<"):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None


def _reason(error: BaseException) -> str:
    """One line: what went wrong, and the innermost line of the user's code on the way there."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith(_LIBRARY_DIRS) and not f.filename.startswith("<")
    ]
    message = str(error).strip().split("\n")[0]
    if not frames:
        return f"{type(error).__name__}: {message}"
    last = frames[-1]
    return f"{last.filename}:{last.lineno}: `{last.line}`: {message}"


def _explain(error: Exception, model: nn.Module) -> CaptureError:
    return CaptureError(
        f"{type(model).__name__} could not be traced to its embedding lookups.\n  {_reason(error)}\n"
        "Code on the way to a lookup must not branch or loop on tensor values: move such code out of forward, "
        "or into a submodule that holds no lookup (it is then kept whole)."
    )
