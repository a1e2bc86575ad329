"""Tower modules for the examples: named on a command line, compiled into the DLRM, and what they save.

N is the width of the embeddings, F the number of features, O_t the columns that the module of tower t makes.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import dmt_compile
from dmt_compile import CrossTower, DLRMTower, PassThrough, TowerProgram
from dmt_compile.errors import DmtError
from examples.data import RecDataset
from examples.training import Settings

TowerModule = DLRMTower | CrossTower | PassThrough

RATIOS = (2, 4, 8)
SEEN = 4096
"""Training samples that a warm start looks at."""

_KINDS: dict[str, tuple[type[TowerModule], tuple[str, ...]]] = {
    "dlrm": (DLRMTower, ("c", "p", "dim")),
    "cross": (CrossTower, ("dim", "layers", "rank")),
    "pass": (PassThrough, ()),
}
FORMS = "dlrm:c=1,p=0,dim=8 (c and p as they are here by default), cross:dim=16,layers=1,rank=8 (1 and 512 by default) or pass"


def tower_module(text: str) -> TowerModule:
    """`kind:name=number,...` as a tower module; an argparse type.

    Raises:
        argparse.ArgumentTypeError: unknown kind or name, something that is no number, no `dim`, or numbers that make no module.
    """
    kind, _, rest = text.partition(":")
    if kind not in _KINDS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {FORMS}")
    made, names = _KINDS[kind]
    numbers: dict[str, int] = {}
    for part in rest.split(",") if rest else ():
        name, equals, number = part.partition("=")
        if name not in names or name in numbers or not equals:
            allowed = f"once each of {', '.join(names)}, as name=number" if names else "nothing"
            raise argparse.ArgumentTypeError(f"{text!r}: found {part!r}, but {kind} takes {allowed}")
        try:
            numbers[name] = int(number)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: {name} is {number!r}, expected a whole number") from None
    if "dim" in names and "dim" not in numbers:
        raise argparse.ArgumentTypeError(f"{text!r}: give dim=, the width of the vectors that a tower makes")
    try:
        return made(**numbers)
    except DmtError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def narrowed(dim: int, ratio: int) -> DLRMTower:
    """The DLRM tower that makes one vector of every feature, `dim / ratio` wide.

    Raises:
        ValueError: `ratio` does not divide `dim`.
    """
    if dim % ratio:
        raise ValueError(f"embeddings of width {dim} cannot be made {ratio} times narrower: {ratio} does not divide {dim}")
    return DLRMTower(c=1, p=0, dim=dim // ratio)


def tower_program(
    settings: Settings,
    model: nn.Module,
    train: RecDataset,
    module: TowerModule | None = None,
    init: str = "layer",
    *,
    expand: bool = False,
) -> TowerProgram:
    """`model` compiled for the topology of `settings`, with `module` in every tower; without one it computes what `model` does.

    With `init="preserve"` it begins with the trained weights of `model`, as far as the modules can keep them. With `expand` the
    towers' vectors are brought back to their old width behind the exchange.
    """
    topology = dmt_compile.Topology(hosts=settings.hosts, ranks_per_host=settings.ranks_per_host)
    if module is None:
        return dmt_compile.towerize(model, topology)
    seen = train.batch(torch.arange(min(len(train), SEEN)))
    return dmt_compile.towerize(
        model, topology, example_inputs=(seen,), tower_module=module, expand=expand, init=init, seed=settings.seed
    )


def compression(program: TowerProgram) -> float:
    """F * N over the sum of all O_t: how many times fewer columns of a sample cross hosts."""
    vectors = program.stages["model"].vectors
    return sum(sum(one.widths) for one in vectors) / sum(one.columns for one in vectors)


def described(program: TowerProgram) -> str:
    """What the module of each tower takes and makes, a line for each, and what a warm start could not keep."""
    lines = [
        f"tower {one.tower}: {_counted(len(one.lookups), 'feature')} of width {one.widths[0]}, "
        f"{_counted(one.vectors, 'vector')} of width {one.width} ({sum(one.widths)} columns, {one.columns} cross hosts)"
        for one in program.stages["model"].vectors
    ]
    made = program.tower_model
    if made is not None and made.way == "expanded":
        lines.append(f"expanded behind the exchange, the interaction stays: {made.why}")
    if made is not None and made.redrawn:
        lines.append(
            f"drawn anew, because they do not follow from the flat model's weights: {', '.join(made.redrawn)}. "
            "With --expand every layer keeps its weights."
        )
    return "\n".join(lines)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
