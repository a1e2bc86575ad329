"""Lookups and their gradients in whole numbers, where sums are exact and their order cannot matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..adapters import torchrec as torchrec_adapter
from ..errors import VerificationError
from ..graphs import clone_sharing_tensors, clone_with_parameters, extras_of
from ..lookups import Lookup
from ..runtime.base import RankContext
from ..runtime.ids import Bag
from ..runtime.pooled import TowerLookups
from ..stage import Stage
from .cluster import Inputs, simulate
from .compare import bits_differ
from .surgery import cut_at_outputs, whole, widened


def refuse_other_reads(stage: Stage) -> None:
    """What is called on one device is not bound to a rank: its tables must be the ones that binding would find."""
    for name, module in extras_of(stage.graph_module).items():
        if isinstance(module, TowerLookups):
            bound: Any = module.bind(RankContext(0, stage.root, stage.plan.topology))
            for mine, own in zip(module._reader._reads, bound._reader._reads, strict=True):
                if mine != own:
                    raise VerificationError(
                        f"stage '{stage.name}': 'dmt.{name}' reads '{mine[0].name}' from another table than '{own[0].table}'"
                    )


def exact_difference(stage: Stage, inputs: Inputs, bags: Sequence[Any], seed: int) -> str | None:
    """Run a stage's lookups on whole numbers, and say what differs; ``bags`` are every rank's, by (source, feature).

    Cotangents are multiples of the world size and, for mean pooling, of the bag's length, so that the divisions on the way
    back leave whole numbers; mean-pooled bags whose length is no power of two get zero, because the kernel multiplies by
    1 / length, which is exact for those only. The reference is one plain ``embedding_bag`` per lookup and rank. Zero has no
    sign here: it depends on how many zeros were added up.
    """
    root = clone_with_parameters(stage.root)
    generator = torch.Generator().manual_seed(seed)
    lookups, world = stage.lookups, stage.plan.topology.world_size
    places = _places(root)
    weights: dict[str, nn.Parameter] = {}
    for table in lookups.tables:
        values = torch.randint(-4, 5, (table.rows, table.dim), generator=generator).double()
        old = root.get_parameter(table.parameter)
        weights[table.name] = nn.Parameter(values.to(old.device))
        for module, attribute in places[id(old)]:
            setattr(module, attribute, weights[table.name])
    roots = [clone_sharing_tensors(root, copy_buffers=True) for _ in range(world)]
    found = simulate(widened(cut_at_outputs(stage)), inputs, roots, seed)
    place = lookups.bag_of
    reference = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
    widths = [sum(lookups.lookup[name].dim for name in output.lookups) for output in lookups.outputs]
    mine: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    for rank in range(world):
        start = dict.fromkeys(range(len(lookups.outputs)), 0)
        columns = [_columns(output) for output in found[rank]]
        for lookup in lookups.lookups:
            bag = bags[rank][place[lookup.source, lookup.feature]]
            pooled = _plainly(lookup, reference[lookup.table], bag)
            first = start[lookup.output]
            if columns[lookup.output].numel() != len(pooled) * widths[lookup.output]:
                return f"'{lookups.outputs[lookup.output].node}' on rank {rank} has another number of values"
            column = columns[lookup.output].reshape(len(pooled), widths[lookup.output])
            column = column[:, first : first + lookup.dim]
            start[lookup.output] += lookup.dim
            difference = bits_differ(column + 0.0, pooled + 0.0)
            if difference is not None:
                return f"pooled '{lookup.name}' on rank {rank}: {difference}"
            cotangent = torch.randint(-4, 5, pooled.shape, generator=generator).double().to(pooled.device) * world
            if lookup.pooling == "mean":
                lengths = _counted(bag, lookup.padding_idx)
                cotangent = cotangent * (lengths * ((lengths & (lengths - 1)) == 0)).unsqueeze(1)
            mine.append((column * cotangent).sum())
            theirs.append((pooled * cotangent).sum())
    if not any(term.requires_grad for term in mine):
        return "nothing that the lookups return depends on a table"
    # On ranks the division by the world size is in the graph.
    (torch.stack(mine).sum() / (world if stage.name == "towers" else 1)).backward()
    (torch.stack(theirs).sum() / world).backward()
    for name, weight in weights.items():
        difference = bits_differ(_or_zeros(weight) + 0.0, _or_zeros(reference[name]) + 0.0)
        if difference is not None:
            return f"gradient of table '{name}': {difference}"
    return None


def _columns(output: Any) -> torch.Tensor:
    """The columns of what a lookup returns."""
    parts = torchrec_adapter.parts_of(output)
    columns: torch.Tensor = output if parts is None else parts["values"]
    return columns


def _plainly(lookup: Lookup, weight: torch.Tensor, bag: Bag) -> torch.Tensor:
    """A lookup in one call of torch.nn.functional, (B, dim)."""
    values, offsets = bag.values.long(), bag.offsets.long()
    if lookup.pooling == "rows":
        return nn.functional.embedding(values, weight, lookup.padding_idx).reshape(len(offsets) - 1, lookup.dim)
    return nn.functional.embedding_bag(
        values,
        weight,
        offsets,
        mode=lookup.pooling,
        include_last_offset=True,
        per_sample_weights=whole(bag.weights) if bag.weights is not None and lookup.weighted else None,
        padding_idx=lookup.padding_idx,
    )


def _counted(bag: Bag, padding_idx: int | None) -> torch.Tensor:
    """How many ids of each bag a mean divides by."""
    if padding_idx is None:
        return bag.offsets.diff()
    kept = nn.functional.pad((bag.values != padding_idx).long().cumsum(0), (1, 0))
    return kept[bag.offsets.long()].diff()


def _or_zeros(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


def _places(root: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Every (module, attribute) under which each parameter, by identity, is registered."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, value in module._parameters.items():
            if value is not None:
                places.setdefault(id(value), []).append((module, name))
    return places
