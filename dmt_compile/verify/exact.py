"""Lookups and their gradients in whole numbers, where sums are exact and their order cannot matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..adapters import torchrec as torchrec_adapter
from ..errors import VerificationError
from ..graphs import clone_sharing_tensors, clone_with_parameters, extras_of
from ..lookups import ANY, Lookup, LookupOutput
from ..runtime.base import RankContext
from ..runtime.select import Bag
from ..runtime.tables import TowerLookups, pool_sequence
from ..stage import Stage
from .cluster import Inputs, simulate
from .compare import bits_differ
from .surgery import cut_at_outputs, whole, widened


def refuse_other_reads(stage: Stage) -> None:
    """What is called on one device is not bound to a rank: its tables must be the ones that binding would find."""
    for name, module in extras_of(stage.graph_module).items():
        if isinstance(module, TowerLookups):
            bound: Any = module.bind(RankContext(0, stage.root, stage.plan.topology))
            for mine, own in zip(module.reader.reads, bound.reader.reads, strict=True):
                if mine != own:
                    table = own.lookup.table
                    raise VerificationError(
                        f"stage '{stage.name}': 'dmt.{name}' reads '{mine.lookup.name}' from another table than '{table}'"
                    )


def exact_difference(
    stage: Stage,
    inputs: Inputs,
    bags: Sequence[Mapping[str, Bag]],
    seed: int,
    given: Sequence[Mapping[str, Any]],
) -> str | None:
    """Run a stage's lookups on whole numbers, and say what differs; ``bags`` are every rank's, by lookup.

    ``given`` holds every rank's values of the nodes that hold ids computed from other lookups: with whole numbers in the tables
    they would be others.

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
    for parameter in lookups.shards:
        old = root.get_parameter(parameter)
        values = torch.randint(-4, 5, tuple(old.shape), generator=generator).double()
        weights[parameter] = nn.Parameter(values.to(old.device))
        for module, attribute in places[id(old)]:
            setattr(module, attribute, weights[parameter])
    roots = [clone_sharing_tensors(root, copy_buffers=True) for _ in range(world)]
    found = simulate(widened(cut_at_outputs(stage, list(given[0]))), inputs, roots, seed, given)
    reference = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
    widths = [sum(lookups.lookup[name].dim for name in output.lookups) for output in lookups.outputs]
    mine: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    for rank in range(world):
        start = dict.fromkeys(range(len(lookups.outputs)), 0)
        columns: dict[int, torch.Tensor] = {}
        for lookup in lookups.lookups:
            number = lookup.output
            output = lookups.outputs[number]
            pooled = _plainly(lookup, reference[lookups.table[lookup.table].parameter], bags[rank][lookup.name])
            if number not in columns:
                value = _columns(found[rank][number])
                if value.numel() != len(pooled) * widths[number]:
                    return f"'{output.node}' on rank {rank} has another number of values"
                columns[number] = _by_lookup(value, output, len(pooled), widths[number])
            first = start[number]
            column = columns[number][:, first : first + lookup.dim]
            start[number] += lookup.dim
            difference = bits_differ(column + 0.0, pooled + 0.0)
            if difference is not None:
                return f"pooled '{lookup.name}' on rank {rank}: {difference}"
            cotangent = torch.randint(-4, 5, pooled.shape, generator=generator).double().to(pooled.device) * world
            if lookup.sequence:
                cotangent = cotangent * _rows_per_sample(lookup, bags[rank][lookup.name])
            elif lookup.pooling == "mean":
                lengths = _counted(bags[rank][lookup.name], lookup.padding_idx)
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
            return f"gradient of table '{name.removesuffix('.weight')}': {difference}"
    return None


def _by_lookup(value: torch.Tensor, output: LookupOutput, rows: int, columns: int) -> torch.Tensor:
    """What a lookup returns as (rows, columns), each lookup's columns side by side."""
    if output.shape is not None and len(output.lookups) > 1:
        # The features are the dimension before the last one; each may have several ids.
        features, width = len(output.lookups), output.shape[-1]
        value = value.reshape(rows, columns // (features * width), features, width).transpose(1, 2)
    return value.reshape(rows, columns)


def _columns(output: Any) -> torch.Tensor:
    """The columns of what a lookup returns."""
    parts = torchrec_adapter.parts_of(output)
    columns: torch.Tensor = output if parts is None else parts["values"]
    return columns


def _plainly(lookup: Lookup, weight: torch.Tensor, bag: Bag) -> torch.Tensor:
    """A lookup in one call of torch.nn.functional, (B, dim)."""
    values, offsets = bag.values.long(), bag.offsets.long()
    if lookup.sequence:
        shape = (len(offsets) - 1, _rows_per_sample(lookup, bag))
        rows = nn.functional.embedding(values, weight, lookup.padding_idx).reshape(*shape, lookup.dim)
        if lookup.weighted and bag.weights is not None:
            rows = rows * whole(bag.weights).reshape(*shape, 1)
        return pool_sequence(rows, lookup.pooling)
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


def _rows_per_sample(lookup: Lookup, bag: Bag) -> int:
    samples = len(bag.offsets) - 1
    # A maximum is not taken of no rows, not even for no samples.
    return lookup.sequence if lookup.sequence != ANY else len(bag.values) // samples if samples else 1


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
