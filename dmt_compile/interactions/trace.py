"""Running a flat graph on a few samples, with the labels of every value beside it.

Lookups are not run: random rows stand for what they return, so tables are not touched and may live on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..adapters import torchrec as torchrec_adapter
from ..graphs import INPUT, input_path, resolve_parameter
from ..lookups import ANY, IdSource, Lookup, LookupOutput, LookupSet
from .labels import DENSE, FIRST, Call, Labels, Rule, rule, tensors_in
from .tape import Op, Source, Tape, Value

_TABLES = ("embedding", "_embedding_bag", "_embedding_bag_forward_only")
_MADE = (
    *("zeros", "empty", "ones", "full", "new_zeros", "new_empty", "new_ones", "new_full"),
    *("zeros_like", "empty_like", "ones_like"),
)


_VIEWS = ("view", "expand", "clone", "transpose", "permute", "unsqueeze", "squeeze", "_unsafe_view", "t", "_to_copy", "select")


class Recorder(TorchDispatchMode):
    """Writes a tape of every operator that runs while it is active."""

    def __init__(self, batch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources: dict[int, Source] = {DENSE: Source("dense", "dense", 0)}
        self.widths: dict[int, int] = {}
        self.tape = Tape(batch, self.sources)
        self.node: fx.Node | None = None
        self.names: Mapping[int, str] = {}
        self.number: dict[int, int] = {}
        self.labels: dict[int, torch.Tensor] = {}
        self.alive: list[torch.Tensor] = []
        self.aliases: dict[int, list[torch.Tensor]] = {}
        # What depends on the inputs, and ids whose columns are told apart.
        self.given: set[int] = set()
        self.shifted: set[int] = set()
        self.softmax: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler, which takes seconds, only to switch it off here.
        return False

    def new_label(self, name: str, role: Any, width: int) -> int:
        label = FIRST + len(self.sources) - 1
        self.sources[label] = Source(name, role, width)
        self.widths[label] = width
        return label

    def mark(self, tensor: torch.Tensor, labels: Labels) -> None:
        """Say where a tensor comes from that no operator has made."""
        self._hold(tensor)
        if labels is not None:
            self.labels[id(tensor)] = labels.to(tensor.device).expand(tensor.shape).clone()
        self._renew(tensor)

    def _hold(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self.number:
            self.alive.append(tensor)
            self.aliases.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
            self.number[id(tensor)] = -1

    def _renew(self, tensor: torch.Tensor) -> int:
        labels = self.labels.get(id(tensor))
        # Later writes must not change what this value was.
        self.tape.values.append(Value(tuple(tensor.shape), None if labels is None else labels.clone()))
        self.number[id(tensor)] = len(self.tape.values) - 1
        return self.number[id(tensor)]

    def numbered(self, tensor: torch.Tensor) -> int:
        self._hold(tensor)
        number = self.number[id(tensor)]
        return self._renew(tensor) if number < 0 else number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func.overloadpacket).removeprefix("aten.")
        tensors = tensors_in((args, kwargs))
        if name == "embedding_renorm_":
            return args[0]
        if name in _TABLES:
            found = self._rows(func, name, args, kwargs)
            if found is not None:
                return found
        before = [self.numbered(tensor) for tensor in tensors]
        returned = func(*args, **kwargs)
        outs = tensors_in(returned)
        self._flags(name, tensors, outs)
        if any(out is tensor for out in outs for tensor in tensors):
            self._written(func, name, args, kwargs, tensors, before, outs)
            return returned
        made = self._rule(func, args, kwargs, outs)
        for out, labels in zip(outs, made.labels, strict=True):
            if labels is None and name in _MADE:
                labels = torch.zeros(out.shape, dtype=torch.long, device=out.device)
            self._hold(out)
            if labels is not None:
                self.labels[id(out)] = _laid_out_as(labels, out)
        numbers = tuple(self._renew(out) for out in outs)
        if self.node is not None:
            self.tape.add(Op(len(self.tape.ops), name, self.node, made.family, made.mixes, tuple(before), numbers))
        return returned

    def _rule(self, func: Any, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> Rule:
        return rule(Call(func, args, kwargs, outs, self._label_of, self._mark_of, self.widths, self._is_softmax))

    def _mark_of(self, tensor: torch.Tensor) -> Labels:
        return self.labels.get(id(tensor))

    def _label_of(self, tensor: torch.Tensor) -> Labels:
        labels = self.labels.get(id(tensor))
        return labels if labels is None or bool(labels.any()) else None

    def _is_softmax(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.softmax

    def _written(
        self, func: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], before: list[int], outs: Any
    ) -> None:
        """An operator that writes to what it is given: everything in the same memory is a new value afterwards."""
        target = outs[0]
        marked = self.labels.get(id(target))
        made = self._rule(func, args, kwargs, outs)
        labels = made.labels[0]
        if labels is not None and marked is not None:
            marked.copy_(labels)
        elif labels is not None:
            self.labels[id(target)] = _laid_out_as(labels, target)
        elif marked is not None:
            marked.zero_()
        shared = self.aliases.get(target.untyped_storage()._cdata, [target])
        numbers = []
        for alias in shared:
            before.append(self.numbered(alias))
            numbers.append(self._renew(alias))
        if self.node is not None:
            family = "move" if name in ("copy_", "index_put_", "_index_put_impl_") else made.family
            self.tape.add(Op(len(self.tape.ops), name, self.node, family, made.mixes, tuple(dict.fromkeys(before)), tuple(numbers)))

    def _flags(self, name: str, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        given = [tensor for tensor in tensors if id(tensor) in self.given]
        if not given:
            return
        self.given.update(id(out) for out in outs)
        for out in outs:
            self._hold(out)
        if any(id(tensor) in self.shifted for tensor in given) or _tells_columns_apart(name, tensors, given):
            self.shifted.update(id(out) for out in outs)
        if "softmax" in name or (name in _VIEWS and id(tensors[0]) in self.softmax):
            self.softmax.update(id(out) for out in outs)

    def _rows(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Rows of a table that stays on every rank: a feature too, if its ids come from the inputs."""
        weight, ids = args[0], args[1]
        if not weight.is_meta and id(ids) not in self.given:
            return None
        table = torch.randn(1, weight.shape[1], dtype=weight.dtype) if weight.is_meta else weight
        returned = func(table, ids if table is weight else torch.zeros_like(ids), *args[2:], **kwargs)
        (out, *others) = tensors_in(returned)
        labels = None
        if id(ids) in self.given:
            known = [label for label, source in self.sources.items() if source.name == self.names.get(id(weight))]
            label = known[0] if known else self.new_label(self.names.get(id(weight), "table"), "replicated", weight.shape[1])
            labels = torch.tensor(label)
            self.given.add(id(out))
        for other in others:
            self._hold(other)
        self.mark(out, labels)
        return returned


def _tells_columns_apart(name: str, tensors: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> bool:
    """Whether whole numbers of several columns are shifted by different constants, or put side by side."""
    if any(tensor.is_floating_point() for tensor in tensors):
        return False
    if name in ("cat", "stack"):
        return len(given) > 1
    shifts = [tensor for tensor in tensors if all(tensor is not one for one in given)]
    return name in ("add", "add_") and any(shift.numel() > 1 and bool((shift != shift.reshape(-1)[0]).any()) for shift in shifts)


def _laid_out_as(labels: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Labels with the strides of the value, so that every view of the one is one of the other."""
    if labels.stride() == value.stride() and labels.shape == value.shape:
        return labels
    if 0 in value.stride():
        return labels.expand(value.shape)
    made = torch.empty_strided(value.shape, value.stride(), dtype=torch.long, device=value.device)
    return made.copy_(labels)


class Runner(fx.Interpreter):
    """Runs a flat graph under a :class:`Recorder`, with given values for some of its nodes and random rows for lookups."""

    def __init__(self, module: fx.GraphModule, recorder: Recorder, lookups: LookupSet, given: Mapping[fx.Node, Any]) -> None:
        super().__init__(module)
        self.recorder = recorder
        self.lookups = lookups
        self.given = given
        # Rows that their owner pools are followed from where the model has them: it may pool fields.
        self.outputs = {output.inner[0] if output.inner else output.node: output for output in lookups.outputs}
        self.labels: dict[tuple[str, int], int] = {}
        recorder.names = {id(parameter): name for name, parameter in module.named_parameters()}

    def run_node(self, n: fx.Node) -> Any:
        self.recorder.node = n
        if n in self.given:
            value = self.given[n]
            for tensor in tensors_in(value):
                self._input(tensor)
        elif n.name in self.outputs:
            value = self._lookup(n, self.outputs[n.name])
        elif n.op == "output":
            leaves = tree_leaves(super().run_node(n))
            if all(isinstance(leaf, torch.Tensor | int | float | str | None) for leaf in leaves):
                self.recorder.tape.results = [self.recorder.numbered(tensor) for tensor in tensors_in(leaves)]
            return None
        elif n.op == "placeholder":
            return None
        else:
            value = super().run_node(n)
            if INPUT in n.meta or (n.op == "call_function" and input_path(n) is not None):
                for tensor in tensors_in(value):
                    self._input(tensor)
        for tensor in tensors_in(value)[:1]:
            self.recorder.tape.held[n] = self.recorder.numbered(tensor)
        if not isinstance(value, torch.Tensor):
            self.recorder.tape.several.add(n)
        return value

    def _input(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self.recorder.given:
            self.recorder.mark(tensor, None if tensor.dtype is torch.bool else torch.tensor(DENSE))
            self.recorder.given.add(id(tensor))

    def _lookup(self, node: fx.Node, output: LookupOutput) -> Any:
        served = [self.lookups.lookup[name] for name in output.lookups]
        batch = self.recorder.tape.batch
        dtype = served[0].dtype
        if output.shape is None and output.like is None:
            values = torch.randn(batch, sum(lookup.dim for lookup in served), dtype=dtype)
            columns = [self._label(lookup.name, 0, 1, lookup.dim).expand(lookup.dim) for lookup in served]
            self._mark(values, torch.cat(columns).expand(values.shape))
            return torchrec_adapter.make_output(output.keys, [lookup.dim for lookup in served], values)
        named = {n.name: n for n in node.graph.nodes}
        source = self.lookups.sources[served[0].source]
        ids = self.env.get(named[source.node]) if source.node in named else None
        count, width = self._rows(served, source, ids)
        split = count > 1 and len(served) == 1 and self._are_fields(ids)
        by_feature = [
            torch.stack(
                [self._label(lookup.name, row if split else 0, count if split else 1, width).expand(width) for row in range(count)]
            )
            for lookup in served
        ]
        labels = torch.stack(by_feature, dim=1)  # By id, by feature, by column: as the ids' last dimension lists features.
        if output.like is not None:
            like = self.env[named[output.like]]
            shape = [*like.shape, width]
            laid = labels.reshape(-1, width)
            laid = (laid if len(laid) > 1 else laid[0]).expand(shape)
        else:
            assert output.shape is not None
            rows = (-1, count, width) if output.inner else output.shape
            shape, laid = self._laid_out(rows, labels.flatten(), self._units(source, named))
        weight = resolve_parameter(self.module, self.lookups.table[served[0].table].parameter)
        device = getattr(weight[0], weight[1]).device
        values = torch.randn(shape, dtype=dtype, device="cpu" if device.type == "meta" else device)
        self._mark(values, laid)
        return values

    def _rows(self, served: Sequence[Lookup], source: IdSource, ids: Any) -> tuple[int, int]:
        """How many rows of a feature stand for a sample, and how wide one is."""
        first = served[0]
        of_sample = isinstance(ids, torch.Tensor) and ids.dim() == 2
        if first.sequence:
            return (ids.shape[1] if of_sample and first.sequence == ANY else first.sequence), first.dim
        if source.unit == "id" and source.per_sample is not None and of_sample and len(served) == 1:
            return ids.shape[1], first.dim
        count = source.count if first.pooling == "rows" else 1
        return count, first.dim // count

    def _units(self, source: IdSource, named: Mapping[str, fx.Node]) -> int:
        """How many rows of columns a lookup makes."""
        if source.unit == "sample":
            return self.recorder.tape.batch
        if source.form == "offsets":
            offsets: torch.Tensor = self.env[named[source.extra[0]]]
            return offsets.numel() - source.include_last_offset
        ids: torch.Tensor = self.env[named[source.node]]
        return ids.shape[0]

    @staticmethod
    def _laid_out(output: Sequence[int], labels: torch.Tensor, units: int) -> tuple[list[int], torch.Tensor]:
        """The shape of a lookup's value, and the labels of its elements."""
        grows = output.index(-1)
        rest = [size for place, size in enumerate(output) if place != grows]
        per = math.prod(rest)
        shape = list(output)
        shape[grows] = units * labels.numel() // max(per, 1)
        if labels.numel() == per:
            return shape, labels.reshape(rest).unsqueeze(grows).expand(shape)
        # Samples and their ids in one axis.
        return shape, labels.repeat(units).reshape([shape[grows], *rest]).movedim(0, grows)

    def _label(self, name: str, row: int, count: int, width: int) -> torch.Tensor:
        if (name, row) not in self.labels:
            self.labels[name, row] = self.recorder.new_label(f"{name}[{row}]" if count > 1 else name, "lookup", width)
        return torch.tensor(self.labels[name, row])

    def _are_fields(self, ids: Any) -> bool:
        """Whether several ids per sample are fields of one table, and not a sequence of one feature."""
        if isinstance(ids, torch.Tensor) and id(ids) in self.recorder.shifted:
            return True
        reads = {lookup.source for lookup in self.lookups.lookups}
        return len(reads) == 1

    def _mark(self, values: torch.Tensor, labels: torch.Tensor) -> None:
        self.recorder.mark(values, labels)
        self.recorder.given.add(id(values))


def materialise(root: nn.Module, tables: set[int]) -> None:
    """Give the dense layers of a clone values, where they are on the meta device; tables stay as they are.

    Raises:
        ValueError: they are too large for that.
    """
    made: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta or id(parameter) in tables:
                continue
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            if parameter.numel() > _MOST:
                raise ValueError("its layers are on the meta device and too large to be tried")
            # One number in the memory of all: what layers make of features does not depend on values.
            held = torch.full((1,), 0.5, dtype=parameter.dtype).expand(parameter.shape)
            made.setdefault(id(parameter), nn.Parameter(held, requires_grad=False))
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if not buffer.is_floating_point():
                    raise ValueError(f"its buffer '{name}' is on the meta device")
                module._buffers[name] = torch.rand(buffer.shape, dtype=buffer.dtype)


_MOST = 2**30
