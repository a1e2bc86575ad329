"""A captured model, and whether it does on the example inputs what the model does."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from .adapters import plain
from .errors import source_location
from .graphs import clone_sharing_tensors, extras_of, graph_module_over
from .nested import first_difference, take_apart

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
LOOKUPS = (nn.functional.embedding, nn.functional.embedding_bag, torch.embedding)


@dataclass(frozen=True)
class Captured:
    """A captured model: a graph for each mode over one clone of its modules, and the submodules kept whole with the reason why.

    ``graphs`` has the keys True (training) and False; most models have one graph, which is under both.
    """

    graphs: Mapping[bool, fx.GraphModule]
    root: nn.Module
    leaves: dict[str, str] = field(default_factory=dict)
    front_end: str = "torch.fx"

    @property
    def flat(self) -> fx.GraphModule:
        """The graph for the mode that the clone is in."""
        return self.graphs[self.root.training]


def disagrees(captured: Captured, inputs: Inputs) -> str | None:
    """How the graph differs from the model itself on ``inputs``, in words; None if it does not, or the model does not run.

    Tracing gives forward something that is no tensor, and forward may ask what it is given. Compared in evaluation mode, in
    which layers draw no random numbers.
    """
    expected = _run(_own_copy(captured.root), inputs)
    if isinstance(expected, Exception):
        return None
    graph = captured.graphs[False]
    found = _run(graph_module_over(_own_copy(captured.root), graph.graph, extras_of(graph), "Tried"), inputs)
    if isinstance(found, Exception):
        return f"on example_inputs the graph raises {type(found).__name__}: {str(found).strip().partition(chr(10))[0]}"
    (mine, built), (theirs, as_built) = take_apart(found), take_apart(expected)
    where = next((source_location(node) for node in reversed(graph.graph.nodes) if source_location(node)), None)
    at = f"{where}: " if where else ""
    difference = first_difference(built.value, as_built.value, "the result")
    if difference is not None:
        return f"{at}on example_inputs the graph returns something else than forward: {difference}"
    for a, b, path in zip(mine, theirs, as_built.paths, strict=True):
        if not _close(a, b):
            place = "".join(map(str, path))
            return f"{at}on example_inputs the graph computes other values than forward for its result{place}"
    return None


def _close(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype or a.is_meta or b.is_meta:
        return a.shape == b.shape and a.dtype == b.dtype
    if a.is_floating_point() or a.is_complex():
        # The same operations in the same order, but not everywhere by the same kernel.
        return torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)
    return torch.equal(a, b)


def _own_copy(root: nn.Module) -> nn.Module:
    clone = clone_sharing_tensors(root, copy_buffers=True).eval()
    for module in clone.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            # Reading would scale rows of the table down.
            module.max_norm = None
    return clone


def _run(module: nn.Module, inputs: Inputs) -> Any:
    with _aside():
        try:
            args, kwargs = inputs
            return module(*args, **kwargs)
        except Exception as error:
            return error


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Without gradients, drawing the same random numbers each time, and without the code that a failing GraphModule prints."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), contextlib.redirect_stderr(io.StringIO()):
        torch.manual_seed(0)
        yield


def hides_a_lookup(captured: Captured, inputs: Inputs | None) -> bool:
    """Whether a plain lookup stands in a submodule that was kept whole."""
    leaves = [captured.root.get_submodule(path) for path in captured.leaves]
    if any(plain.holds_lookup(leaf) for leaf in leaves):
        return True
    inside = {id(parameter) for leaf in leaves for parameter in leaf.parameters()}
    if not inside or inputs is None:
        return False
    # Functional lookups are found by running them.
    with _Watch() as watch:
        _run(_own_copy(captured.root), inputs)
    return bool(inside & watch.tables)


class _Watch(TorchFunctionMode):
    """Notes the parameters, by Python's id, that ids are looked up in."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOOKUPS:
            self.tables.update(id(value) for value in (*args, *(kwargs or {}).values()) if isinstance(value, nn.Parameter))
        return func(*args, **(kwargs or {}))
