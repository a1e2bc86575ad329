"""Floating-point operations of a graph, counted by torch's own counter while the graph runs on tensors without values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .errors import CaptureError, at, first_line
from .graphs import clone_sharing_tensors, extras_of, graph_module_over, plain_attention
from .interactions.find import Inputs, quiet, with_inputs
from .lookups import LookupOutput, LookupSet
from .runtime.pooled import MakeOutput
from .verify.compare import tensors_in
from .verify.deal import Layout


def count_flops(
    flat: fx.GraphModule, root: nn.Module, lookups: LookupSet, inputs: Inputs | None, layout: Layout
) -> tuple[float, float]:
    """FLOPs per sample of a graph over ``root``: of the forward pass, and of forward and backward together.

    The graph runs on a few samples, ``inputs`` or made-up ones, and the count is divided by their number. Lookups are not run: what
    they return requires gradients where their tables do, inputs of the model never do. Counted is what
    ``torch.utils.flop_counter`` knows (matrix products, convolutions, attention), 2 for each multiplication with its addition;
    element-wise operators, sums, ``nn.Bilinear`` and products of a matrix and a vector are not. Tensors have no values, so the
    model may be on the meta device; only where sizes depend on values the graph runs on copies of its dense layers. What a model
    computes only for the ids of its lookups is counted where there are ``inputs`` that it runs on.

    Raises:
        CaptureError: the graph does not run on made-up inputs, or not without values that it does not have.
    """
    tables = {id(root.get_parameter(table.parameter)) for table in lookups.tables}
    has_values = not any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers()) if id(tensor) not in tables)
    ways = [(False, inputs is not None)]
    if has_values:
        ways.append((True, inputs is not None))
    if inputs is not None:
        ways.append((False, False))
    reason: Exception | None = None
    for values, ids in ways:
        try:
            return _count(flat, root, lookups, inputs, layout, values=values, ids=ids)
        except Exception as error:
            reason = reason or error
    assert reason is not None
    hint = "" if inputs is not None else ": compile with example_inputs="
    raise CaptureError(f"the model's FLOPs cannot be counted, its graph does not run ({first_line(reason)}){hint}") from reason


def _count(
    flat: fx.GraphModule,
    root: nn.Module,
    lookups: LookupSet,
    inputs: Inputs | None,
    layout: Layout,
    *,
    values: bool,
    ids: bool,
) -> tuple[float, float]:
    mode = None if values else FakeTensorMode(allow_non_fake_inputs=True)
    clone = clone_sharing_tensors(root)
    trained = {table.name for table in lookups.tables if root.get_parameter(table.parameter).requires_grad}
    _replace_tensors(clone, {id(root.get_parameter(table.parameter)) for table in lookups.tables}, mode)
    module = graph_module_over(clone, flat.graph, extras_of(flat), "Counted")

    def attempt(given: Mapping[fx.Node, Any], batch: int) -> tuple[float, float]:
        if batch < 1:
            raise ValueError("example_inputs hold no sample")
        with mode or nullcontext():
            forward, training = _run(_Runner(module, lookups, given, batch, trained, ids))
        return forward / batch, training / batch

    with quiet(), _one_way(), torch.random.fork_rng(devices=[]):
        return with_inputs(module, lookups, inputs, layout, attempt)


@contextmanager
def _one_way() -> Iterator[None]:
    """Gradients as in training, and no fused kernel that the counter does not know."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(plain_attention())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def _run(runner: _Runner) -> tuple[int, int]:
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter:
        made = runner.run(enable_io_processing=False)
        forward = counter.get_total_flops()
        results = [tensor for _, tensor in tensors_in(made) if tensor.requires_grad]
        if results:
            # All that gets a gradient was made for this run: rows, and the layers' stand-ins or copies.
            torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    return forward, counter.get_total_flops()


class _Runner(fx.Interpreter):
    """Runs a graph with given values for inputs and rows of no meaning for lookups, as far as its result needs it.

    With ``ids`` it also runs what only the ids of its lookups need.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        lookups: LookupSet,
        given: Mapping[fx.Node, Any],
        batch: int,
        trained: set[str],
        ids: bool,
    ) -> None:
        super().__init__(module)
        self.lookups = lookups
        self.given = given
        self.batch = batch
        self.trained = trained
        self.outputs = {output.node: output for output in lookups.outputs}
        self.named = {node.name: node for node in module.graph.nodes}
        self.needed = self._needed(module.graph, ids)

    def _needed(self, graph: fx.Graph, ids: bool) -> set[fx.Node]:
        found: set[fx.Node] = set()
        waiting = [node for node in graph.nodes if node.op == "output" or node.is_impure()]
        while waiting:
            node = waiting.pop()
            if node in found:
                continue
            found.add(node)
            if node.name in self.outputs:
                output = self.outputs[node.name]
                read = [name for one in output.lookups for name in self.lookups.sources[self.lookups.lookup[one].source].nodes]
                waiting += [self.named[name] for name in (*self._sized_by(output), *(read if ids else ()))]
            elif node not in self.given:
                waiting += node.all_input_nodes
        return found

    def _sized_by(self, output: LookupOutput) -> tuple[str, ...]:
        """The nodes whose values say how many rows of columns a lookup makes, where the number of samples does not."""
        source = self.lookups.sources[self.lookups.lookup[output.lookups[0]].source]
        if output.like is not None:
            return (output.like,)
        if source.unit == "sample":
            return ()
        return (source.extra[0] if source.form == "offsets" else source.node,)

    def run_node(self, n: fx.Node) -> Any:
        if n not in self.needed:
            return None
        if n.name in self.outputs:
            return self._lookup(self.outputs[n.name])
        if n in self.given:
            return _without_gradients(self.given[n])
        try:
            return super().run_node(n)
        except Exception as error:
            # A kind of error after which other widths of made-up inputs are tried.
            raise RuntimeError(f"{at(n)}: {first_line(error)}") from error

    def _lookup(self, output: LookupOutput) -> Any:
        served = [self.lookups.lookup[name] for name in output.lookups]
        source = self.lookups.sources[served[0].source]
        like = None
        units = self.batch
        if self._sized_by(output):
            value: torch.Tensor = self.env[self.named[self._sized_by(output)[0]]]
            if output.like is not None:
                like, units = value, value.numel()
            else:
                units = value.numel() - source.include_last_offset if source.form == "offsets" else value.shape[0]
        parameter = self.module.get_parameter(self.lookups.table[served[0].table].parameter)
        grad = any(lookup.grad and lookup.table in self.trained for lookup in served)
        device = "cpu" if parameter.is_meta else parameter.device
        rows = torch.zeros(units, sum(lookup.dim for lookup in served), dtype=served[0].dtype, device=device, requires_grad=grad)
        return MakeOutput(output, self.lookups)(rows, like)


def _without_gradients(value: Any) -> Any:
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, torch.Tensor.detach, value)


def _replace_tensors(clone: nn.Module, tables: set[int], mode: FakeTensorMode | None) -> None:
    """Give a clone tensors of its own: without values under ``mode``, else copies; tables then stay what they are."""
    made: dict[int, Any] = {}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if mode is not None:
            with mode:
                return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if tensor.is_meta else tensor.device)
        return tensor.detach().clone()

    for module in clone.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or (mode is None and id(parameter) in tables):
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(own(parameter), requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = made.setdefault(id(buffer), own(buffer))
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and (mode is None or value.is_meta):
                setattr(module, name, own(value))
