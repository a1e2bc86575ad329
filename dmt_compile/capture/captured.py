"""A captured model, and whether it does on the example inputs what the model does."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from ..adapters import plain_calls
from ..errors import DmtError, source_location
from ..graphs import LOOKUPS, clone_sharing_tensors, deepcopy_values, extras_of, graph_module_over, keys_read
from ..nested import first_difference, take_apart
from ..verify.deal import Layout, batch_size, deal_sizes

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


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

    Forward may ask what it is given, may remember something from call to call, and may take another way for a single sample or
    for none, all of which capture does not see. Compared in evaluation mode, in which layers draw no random numbers.
    """
    difference = _difference(captured, inputs)
    if difference is not None:
        return difference
    for samples in (1, 0):
        few = _first(captured, inputs, samples)
        difference = _difference(captured, few) if few is not None else None
        if difference is not None:
            return f"{difference}\n  {_FEW.format('one sample' if samples else 'no samples')}"
    return None


_UNSEEN = (
    "A graph does not see Python's or numpy's random numbers, what forward remembers in attributes from call to call, and tests "
    "of a tensor's type: give such values to forward, or keep them in buffers."
)
_FEW = (
    "This is for a batch of {}, for which forward takes another way than for more (squeeze() without a dimension, a branch on "
    "the size): let it take the same way for any number of samples."
)


def differs(captured: Captured, inputs: Inputs) -> str | None:
    """What the model or its graph does on ``inputs`` that the other does not, or neither can; None if both compute the same."""
    result = _run(_copies(captured)[0], inputs)
    if isinstance(result, Exception):
        return f"the model raises {type(result).__name__}: {str(result).strip().partition(chr(10))[0]}"
    difference = _difference(captured, inputs)
    return difference.partition("\n")[0] if difference is not None else None


def _difference(captured: Captured, inputs: Inputs) -> str | None:
    model, tried = _copies(captured)
    where = next(filter(None, map(source_location, reversed(tried.graph.nodes))), None)
    at = f"{where}: " if where else ""
    for times in ("", " the second time"):
        expected, found = _run(model, inputs), _run(tried, inputs)
        if isinstance(expected, _Changed):
            return f"{at}forward changes its inputs in place: let it work on copies of them"
        if isinstance(expected, Exception):
            return None
        if isinstance(found, Exception):
            return f"{at}the graph raises {type(found).__name__}: {str(found).strip().partition(chr(10))[0]}"
        (mine, built), (theirs, as_built) = take_apart(found), take_apart(expected)
        difference = first_difference(built.value, as_built.value, "the result")
        if difference is not None:
            return f"{at}the graph returns something else than forward{times}: {difference}"
        for a, b, path in zip(mine, theirs, as_built.paths, strict=True):
            if not _close(a, b):
                place = "".join(map(str, path))
                return f"{at}the graph computes other values than forward for its result{place}{times}\n  {_UNSEEN}"
    return None


def _first(captured: Captured, inputs: Inputs, samples: int) -> Inputs | None:
    """The first samples of a batch; None if it cannot be divided, which is said where that is needed."""
    graph = captured.graphs[False]
    names = tuple(str(node.target) for node in graph.graph.nodes if node.op == "placeholder")
    layout = Layout(names, plain_calls.ragged_inputs(plain_calls.find_calls(graph)), keys_read(graph.graph))
    try:
        batch = batch_size(*inputs, layout)
        return deal_sizes(*inputs, [samples, batch - samples], layout)[0] if batch > samples else None
    except DmtError:
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


def _copies(captured: Captured) -> tuple[nn.Module, fx.GraphModule]:
    """The model and its graph in evaluation mode, with buffers of their own, and with own tables where reading changes them."""
    graph = captured.graphs[False]
    model, clone = (clone_sharing_tensors(captured.root, copy_buffers=True).eval() for _ in range(2))
    tried = graph_module_over(clone, graph.graph, extras_of(graph), "Tried")
    plain_calls.copy_tables_that_reading_changes(tried, plain_calls.find_calls(tried))
    theirs = dict(tried.named_parameters(remove_duplicate=False))
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, value in module._parameters.items():
            if value is not None and theirs[f"{path}.{name}".removeprefix(".")] is not value:
                own = nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
                module._parameters[name] = made.setdefault(id(value), own)
    return model, tried


class _Changed(Exception):
    """Forward has written to its inputs."""


def _held(value: Any) -> Iterator[Any]:
    """What nested containers hold, as things that are identical as long as nobody puts something else in them."""
    if isinstance(value, Mapping):
        yield from value
        parts = list(value.values())
    elif isinstance(value, list | tuple | deque):
        parts = list(value)
    elif isinstance(value, set | frozenset):
        yield from value
        return
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        return
    yield len(parts)
    for part in parts:
        yield part
        yield from _held(part)


def _identical(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))


def _run(module: nn.Module, inputs: Inputs) -> Any:
    """The result, or the error that was raised."""
    with _aside():
        try:
            args, kwargs = deepcopy_values(inputs)
            given, held = take_apart([args, kwargs])[0], list(_held([args, kwargs]))
            versions = [value._version for value in given]
            result = module(*args, **kwargs)
        except Exception as error:
            return error
        same = [value._version for value in given] == versions and _identical(held, list(_held([args, kwargs])))
        return result if same else _Changed()


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Without gradients, drawing the same random numbers each time, and without the code that a failing GraphModule prints."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), contextlib.redirect_stderr(io.StringIO()):
        # To seed GPUs that nobody uses takes longer than many a run.
        seed: Any = torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed
        seed(0)
        yield


def run_once(model: nn.Module, inputs: Inputs) -> None:
    """Run copies of the model in both modes, whatever comes of it.

    What forward keeps outside the model's modules (functools.lru_cache, a dict beside its class) is then kept from a call with
    values. A call that is captured would leave there, in the user's process, what only stands for a tensor.
    """
    for flip in (False, True):
        copy = clone_sharing_tensors(model, copy_buffers=True)
        for module in copy.modules():
            module.training ^= flip
        with WithoutMaxNorm():
            _run(copy, inputs)


def hides_a_lookup(captured: Captured, inputs: Inputs | None) -> bool:
    """Whether a plain lookup stands in a submodule that was kept whole; of a table that is no parameter, too."""
    leaves = [captured.root.get_submodule(path) for path in captured.leaves]
    if any(plain_calls.holds_lookup(leaf) for leaf in leaves):
        return True
    aside = plain_calls.kept_aside(captured.root)
    if any(place.startswith(f"{path}.") for place in aside for path in captured.leaves):
        return True
    inside = {id(parameter) for leaf in leaves for parameter in leaf.parameters()}
    if not inside or inputs is None:
        return False
    # Functional lookups are found by running them.
    with WithoutMaxNorm() as watch:
        _run(clone_sharing_tensors(captured.root, copy_buffers=True).eval(), inputs)
    return bool(inside & watch.tables)


class WithoutMaxNorm(TorchFunctionMode):
    """Lets lookups leave the rows that they read as they are; notes the parameters, by Python's id, that they look up in."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOOKUPS:
            self.tables.update(id(value) for value in (*args, *(kwargs or {}).values()) if isinstance(value, nn.Parameter))
            # Reading would scale rows of the user's table down.
            kwargs = {name: value for name, value in (kwargs or {}).items() if name != "max_norm"}
        return func(*args, **(kwargs or {}))
