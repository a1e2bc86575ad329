"""What the multi-rank tests share: models with batches of any sizes, the objective, and the reference in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import models
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import dmt_compile
from dmt_compile.graphs import clone_with_parameters
from dmt_compile.lookups import LookupSet
from dmt_compile.verify.compare import tensors_in

Inputs = Sequence[tuple[Any, ...]]
Tensors = dict[str, torch.Tensor]

SPEC = models.ModelSpec(
    collections=(
        # A table read by two features, a feature that two tables read, mixed widths.
        (models.TableSpec((0, 1), 4, mean=False), models.TableSpec((1, 2), 8, mean=True), models.TableSpec((3,), 12, mean=False)),
        (models.TableSpec((0, 4), 8, mean=False), models.TableSpec((5,), 4, mean=False), models.TableSpec((2,), 4, mean=False)),
    ),
    weighted=(False, True),
    calls=((0, 0), (1, 1)),
    inputs=2,
)


class LearntWeights(nn.Module):
    """A weighted collection whose weights are parameters, one per id of every feature; and an unweighted one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weighing = nn.Parameter(torch.rand(models.ROWS) + 0.5)
        self.ebc = models.collection(models.table("w", ["x0", "x1"], 4), models.table("v", ["x2"], 8), weighted=True)
        self.plain = models.collection(*(models.table(f"p{i}", [f"x{i}"], 4) for i in range(3)))
        self.top = nn.Linear(4 + 4 + 8 + 12, 1)

    def forward(self, sparse: Any) -> torch.Tensor:
        weighted = KeyedJaggedTensor(
            keys=sparse.keys(),
            values=sparse.values(),
            lengths=sparse.lengths(),
            weights=self.weighing[sparse.values()],
            stride=sparse.stride(),
        )
        return self.top(torch.cat([self.ebc(weighted).values(), self.plain(sparse).values()], dim=1))


def build(name: str) -> nn.Module:
    """A model of the given name; the same values in every process."""
    if name == "two collections":
        return models.SpecModel(SPEC)
    if name == "learnt weights":
        return LearntWeights()
    torch.manual_seed(0)
    if name in models.TORCHREC_MODELS:
        return models.torchrec_model(name)
    return models.training_model(name.removesuffix(" train"))


def inputs_of(name: str, sizes: Sequence[int], seed: int = 0) -> list[tuple[Any, ...]]:
    """The inputs of every rank, for local batches of the given sizes."""
    if name == "two collections":
        return models.SpecModel(SPEC).inputs(models.BatchSpec(tuple(sizes), seed=seed))
    seeds = [1000 * seed + rank for rank in range(len(sizes))]
    if name == "learnt weights":
        return [(models.jagged(("x0", "x1", "x2"), size, seed=s),) for size, s in zip(sizes, seeds, strict=True)]
    if name in models.TORCHREC_MODELS:
        return [models.torchrec_inputs(size, s) for size, s in zip(sizes, seeds, strict=True)]
    return [(models.torchrec_batch(size, s),) for size, s in zip(sizes, seeds, strict=True)]


def objective(output: Any) -> torch.Tensor:
    """A rank's mean loss: the sum of the mean squares of everything that can be trained."""
    terms = [t.square().mean() for _, t in tensors_in(output) if t.requires_grad and t.dtype.is_floating_point]
    return torch.stack(terms).sum()


@dataclass
class Step:
    """Outputs by rank and gradients by parameter name of one step."""

    outputs: list[Tensors]
    gradients: Tensors


def gradients_of(module: nn.Module) -> Tensors:
    """Gradients by name; a copy."""
    return {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}


def copied(output: Any) -> Tensors:
    """The tensors inside an output, detached from whatever made them."""
    return {where: tensor.detach().clone() for where, tensor in tensors_in(output)}


def flat_step(model: nn.Module, inputs: Inputs, sizes: Sequence[int]) -> Step:
    """One process, the user's own model: the gradient of the mean over ranks of each rank's mean loss.

    TorchRec's collections fail on an empty batch in one process; it has no rows and no gradient.
    """
    model = clone_with_parameters(model)
    outputs = [model(*given) for given, size in zip(inputs, sizes, strict=True) if size]
    (torch.stack([objective(output) for output in outputs]).sum() / len(inputs)).backward()
    return Step([copied(output) for output in outputs], gradients_of(model))


def lockstep_step(model: nn.Module, topology: dmt_compile.Topology, towers: Any, inputs: Inputs) -> Step:
    """All ranks of the compiled program in one process; dense gradients averaged as on real ranks."""
    program = dmt_compile.towerize(clone_with_parameters(model), topology, towers=towers)
    outputs = models.run_ranks(program.stages["lowered"], inputs)
    torch.stack([objective(output) for output in outputs]).sum().backward()
    tables = {table.parameter for table in program.lookups.tables}
    gradients = gradients_of(program)
    for name, gradient in gradients.items():
        if name not in tables:
            gradient /= len(inputs)
    return Step([copied(output) for output in outputs], gradients)


def tables_of(model: nn.Module) -> set[str]:
    """State-dict names of a model's tables."""
    return {table.parameter for table in dmt_compile.towerize(model, dmt_compile.Topology(1, 1)).lookups.tables}


def merged(parts: Sequence[Mapping[str, torch.Tensor]], tables: set[str]) -> Tensors:
    """Gradients of all ranks as of one model. Dense ones must be the same bits everywhere, tables come from their owner."""
    result: Tensors = {}
    for part in parts:
        for name, tensor in part.items():
            if name in result:
                assert name not in tables, f"{name} has a gradient on two ranks"
                assert torch.equal(tensor, result[name]), f"{name} differs between ranks"
            result[name] = tensor
    return result


def by_table(gradients: Tensors, lookups: LookupSet, bases: Mapping[str, int] | None = None) -> Tensors:
    """Gradients with those of tables under the table's name: a parameter may hold several, and a rank some of them.

    ``bases`` says where the tables that a rank owns begin in its parameter.
    """
    found: Tensors = {}
    for name, gradient in gradients.items():
        for table in lookups.shards.get(name, ()):
            start = table.start if bases is None or len(gradient) == lookups.shards[name][-1].end else bases.get(table.name)
            if start is not None:
                found[table.name] = gradient.to_dense()[start : start + table.rows]
        if name not in lookups.shards:
            found[name] = gradient
    return found


OptimizerFactory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def optimizer(name: str, parameters: Sequence[nn.Parameter], tables: bool) -> torch.optim.Optimizer:
    """An optimizer by name; "RowWiseAdagrad" on tables goes with SGD on dense layers."""
    if name == "RowWiseAdagrad":
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        return RowWiseAdagrad(parameters, lr=0.1, eps=1e-3) if tables else torch.optim.SGD(parameters, lr=0.1)
    if name == "Adagrad":
        # With torch's own eps, rounding in a gradient that cancels to nearly nothing grows to a full step.
        return torch.optim.Adagrad(parameters, lr=0.1, eps=1e-3)
    if name == "Adam":
        return torch.optim.Adam(parameters, lr=0.01, eps=1e-3)
    return torch.optim.SGD(parameters, lr=0.1)
