"""All ranks must hold the same plan and model before the first exchange."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed import ProcessGroup

from ..errors import DistributedError
from ..lookups import LookupSet
from ..stage import Stage

_numbers = count()


def agree(stages: Mapping[bool, Stage], group: ProcessGroup, options: Mapping[str, bool]) -> int:
    """Compare a digest of the program, in both modes, over the ranks; a collective call.

    Returns a number that is the same on all ranks, and new to each of them.

    Raises:
        DistributedError: on every rank, when any two differ; shows the first difference.
    """
    global _numbers
    description = _describe(stages, options)
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    world = dist.get_world_size(group)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, (digest, next(_numbers)), group=group)
    number: int = max(theirs for _, theirs in gathered)
    _numbers = count(number + 1)
    digests = [theirs for theirs, _ in gathered]
    if len(set(digests)) == 1:
        return number
    descriptions: list[Any] = [None] * world
    dist.all_gather_object(descriptions, description, group=group)
    other = next(rank for rank in range(world) if digests[rank] != digests[0])
    where, mine, theirs = first_difference(descriptions[0], descriptions[other])
    raise DistributedError(
        f"ranks 0 and {other} were given different programs: {where} is {mine} on rank 0 and {theirs} on rank {other}; "
        "build the same model and plan on every rank, from example inputs of the same lengths "
        "(the same plan can be passed on with TowerPlan.to_json)"
    )


def _describe(stages: Mapping[bool, Stage], options: Mapping[str, bool]) -> dict[str, Any]:
    stage, other = stages[True], stages[False]
    weights = {table.name: stage.root.get_parameter(table.parameter) for table in stage.lookups.tables}
    ids = {id(weight) for weight in weights.values()}
    dense = {name: p for name, p in stage.root.named_parameters() if id(p) not in ids}
    # How the plan was made does not matter.
    plan = {key: value for key, value in json.loads(stage.plan.to_json()).items() if key != "partition"}
    return {
        "plan": plan,
        "tables": {t.name: [t.start, t.rows, t.dim, str(t.dtype), weights[t.name].requires_grad] for t in stage.lookups.tables},
        "order of lookups": [x.name for x in stage.lookups.lookups],
        "lookups": _lookups(stage.lookups),
        "lookups in evaluation": _lookups(other.lookups) if other is not stage else {},
        "towers": {str(x.tower): [asdict(x), str(stage.root.get_submodule(x.target))] for x in stage.vectors},
        "dense parameters": {n: [list(p.shape), str(p.dtype), p.requires_grad] for n, p in dense.items()},
        "graph": _graph(stage),
        "graph in evaluation": _graph(other) if other is not stage else [],
        "options": dict(options),
    }


def _lookups(lookups: LookupSet) -> dict[str, Any]:
    """What the records of lookups, by name, have the ranks do. Why ids are fixed and how many the example has is only told."""
    found: dict[str, Any] = {}
    for x in lookups.lookups:
        source, output = lookups.sources[x.source], lookups.outputs[x.output]
        ids = {key: value for key, value in asdict(source).items() if key not in ("because", "per_sample", "count", "shape")}
        # The number and the shape first: they tell what the others follow from.
        found[x.name] = {
            "ids per sample": source.count or "any",
            "shape of the ids": [_size(size) for size in source.shape],
            "ids": {**ids, "weight_dtype": str(source.weight_dtype)},
            **{key: value for key, value in asdict(x).items() if key != "name"},
            "dtype": str(x.dtype),
            "result": [output.node, [_size(size) for size in output.shape or ()]],
        }
    return found


def _size(size: int | None) -> int | str:
    return "any" if size is None else "B" if size < 0 else size


def _constant(value: Any) -> Any:
    """An argument of a node, told apart from others by its text; objects without a stable text by their type."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, Mapping):
        return {str(key): _constant(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_constant(item) for item in value]
    if isinstance(value, slice):
        return ["slice", *(_constant(end) for end in (value.start, value.stop, value.step))]
    if isinstance(value, int | float | complex | str | bool | torch.dtype | torch.device | None):
        return repr(value)
    return type(value).__name__


def _graph(stage: Stage) -> list[list[Any]]:
    return [[n.op, n.name, _target(n.target), _constant(n.args), _constant(n.kwargs)] for n in stage.graph.nodes]


def _target(target: Any) -> str:
    return target if isinstance(target, str) else f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def first_difference(a: Any, b: Any, where: str = "") -> tuple[str, str, str]:
    """The path to the first place where two JSON-like values differ, and what each has there."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            if a.get(key) != b.get(key) or (key in a) != (key in b):
                return first_difference(a.get(key), b.get(key), f"{where}.{key}" if where else str(key))
    if isinstance(a, list) and isinstance(b, list):
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return first_difference(x, y, f"{where}[{index}]")
        if len(a) != len(b):
            return f"the length of {where}", str(len(a)), str(len(b))
    return where or "the program", _short(a), _short(b)


def _short(value: Any) -> str:
    if value is None:
        return "missing"
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
