"""From a user's module to a flat torch.fx graph in which every node knows the user's file and line.

The graph runs over a clone of the module tree that shares all tensors with the model, so that nothing done to the graph,
and no tracing side effect, reaches the user's objects.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn

from .adapters import torchrec as torchrec_adapter
from .errors import CaptureError
from .graphs import EXTRAS, clone_sharing_tensors, graph_module_over

_LIBRARY_DIRS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)


@dataclass(frozen=True)
class Captured:
    """A captured model: its graph over a clone of its modules, and the submodules kept whole with the reason why."""

    flat: fx.GraphModule
    root: nn.Module
    leaves: dict[str, str] = field(default_factory=dict)


def capture(model: nn.Module) -> Captured:
    """Trace ``model`` symbolically. The model is left as it is.

    Submodules that cannot be traced and hold no embedding lookup are kept whole and reported in ``leaves``.

    Raises:
        CaptureError: the model is not a module, is already sharded or wrapped, or the way to a lookup cannot be traced;
            the message shows the user's line.
    """
    _check_model(model)
    root = clone_sharing_tensors(model)
    try:
        # Reading buffers as graph nodes keeps them live; code that looks inside a buffer while it is traced needs its values.
        tracer = _Tracer(proxy_buffers=True)
        graph = tracer.trace(root)
    except Exception:
        root = clone_sharing_tensors(model)
        tracer = _Tracer(proxy_buffers=False)
        try:
            graph = tracer.trace(root)
        except Exception as error:
            raise _explain(error, model) from error
    flat = graph_module_over(root, graph, {}, f"Flat{type(model).__name__}")
    return Captured(flat, root, tracer.leaves)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise CaptureError(f"towerize takes an nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise CaptureError(
            f"the model is already wrapped in {type(model).__name__}: pass the module inside it (model.module); "
            "program.distribute() synchronises the dense gradients itself"
        )
    torchrec_adapter.refuse_sharded(model)
    if EXTRAS in model._modules:
        raise CaptureError(f"the model has a submodule called '{EXTRAS}', a name that the compiled program uses: rename it")


class _Tracer(fx.Tracer):
    """Keeps lookup modules and torch.nn modules whole, notes the user's line on every node, survives untraceable leaves."""

    def __init__(self, proxy_buffers: bool) -> None:
        super().__init__(param_shapes_constant=True)
        self.proxy_buffer_attributes = proxy_buffers
        self.leaves: dict[str, str] = {}
        self._attribute_proxies: list[dict[str, Any]] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return torchrec_adapter.is_collection(m) or super().is_leaf_module(m, module_qualified_name)

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        proxy = super().create_proxy(*args, **kwargs)
        where = _user_frame(sys._getframe(1))
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
