"""Tower modules tried on made-up rows: they make what they declare, of each row by itself, and compute what they were set to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import PlanError, first_line
from .modules import PassedVectors
from .record import TowerVectors

_ROWS = 3
_FAR = 100.0
"""How many times larger than the others a row is that must not change them."""


def refuse_mixing(module: nn.Module, widths: Sequence[int], where: str) -> None:
    """Run a module on a few rows; nothing is tried on the meta device. ``where`` begins the errors.

    Raises:
        PlanError: it does not run, makes other shapes or another type than declared, gives other values when it runs again, or
            those of a row depend on the others.
    """
    rows = _made_up(module, widths)
    if rows is None:
        return
    with _evaluating(module):
        made = _run(module, rows, where)
        _run(module, rows[:0], where)
        _refuse_chance(module, rows, made, where)
        for batch, place, row in _batches(rows):
            found, alone = _run(module, batch, where)[place], _run(module, row, where)[0]
            if not _close(found, alone):
                raise PlanError(
                    f"{where}: what it makes of a row depends on the other rows, but a tower sees other samples on every rank than "
                    "the model would: let it work on each row by itself"
                )


def _refuse_chance(module: nn.Module, rows: torch.Tensor, made: torch.Tensor, where: str) -> None:
    again = _run(module, rows, where)
    other = _run(module, rows, where, seed=1)
    if not _close(made, again):
        raise PlanError(
            f"{where}: run again on the same rows, in evaluation mode, it makes something else of them: it must not keep anything "
            "from one run for the next, or draw random numbers of its own"
        )
    if not _close(made, other):
        raise PlanError(
            f"{where}: it draws random numbers in evaluation mode, so that what it makes of a row is never twice the same: draw "
            "them in training only, as nn.Dropout does"
        )


def _batches(rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
    """Batches, the place of a row in them, and the row alone.

    A branch on all rows may look at their number, at a sum or a mean, at the largest value: with a row stand others that turn the
    sign of each, or are far larger.
    """
    for sign in (1.0, -1.0):
        signed = sign * rows
        for place in range(_ROWS):
            yield signed, place, signed[place : place + 1]
            yield signed.flip(0), _ROWS - 1 - place, signed[place : place + 1]
        first = signed[:1]
        for other in (-2 * first, _FAR * first, -_FAR * first, torch.zeros_like(first)):
            yield torch.cat([first, other]), 0, first
            yield torch.cat([other, other, first]), 2, first


def refuse_other_values(module: nn.Module, matrix: torch.Tensor, one: TowerVectors, where: str) -> None:
    """Check that a module computes ``matrix @ x`` for the columns x of its features. ``where`` begins the error.

    Raises:
        PlanError: it does not.
    """
    rows = _made_up(module, one.widths)
    if rows is None:
        return
    with _evaluating(module):
        made = _run(module, rows, where).flatten(1).double().cpu()
    expected = rows.flatten(1).double().cpu() @ matrix.double().cpu().mT
    # What a wrong matrix, or one that was never set, makes is off by about as much as the largest value. Rounding is off by a few
    # units in the last place of that, of which TF32 has 11 bits, whatever the type of the parameters.
    unit = max(torch.finfo(rows.dtype).eps, 2.0**-11)
    allowed = 8 * unit * float(expected.abs().max())
    off = float((made - expected).abs().max())
    if not off <= allowed:
        raise PlanError(
            f"{where} did not make it compute matrix @ x: on random rows it is off by up to {off:.2g}, allowed is {allowed:.2g}. "
            f"{expected_matrix(matrix, one)}; biases are to be zero"
        )


def expected_matrix(matrix: torch.Tensor, one: TowerVectors) -> str:
    """What ``set_linear`` is given, for an error."""
    out, columns = matrix.shape
    return (
        f"The matrix is ({out}, {columns}): a row for each of the {one.vectors} * {one.width} columns that it makes, vector by "
        f"vector, a column for each of the {columns} of its {len(one.lookups)} features, feature by feature, as in nn.Linear.weight"
    )


def _made_up(module: nn.Module, widths: Sequence[int]) -> torch.Tensor | None:
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.is_meta:
        return None
    shape = (_ROWS, len(widths), widths[0]) if len(set(widths)) == 1 else (_ROWS, sum(widths))
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return drawn if parameter is None else drawn.to(parameter.device, parameter.dtype)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Without gradients, in evaluation mode, and with the caller's random state and modes as they were."""
    was = {child: child.training for child in module.modules()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            module.eval()
            yield
        finally:
            for child, training in was.items():
                child.training = training


def _run(module: nn.Module, rows: torch.Tensor, where: str, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    count = rows.shape[0]
    try:
        # It may write to what it is given.
        made: Any = module(rows.clone())
    except Exception as error:
        raise PlanError(f"{where} does not run on {tuple(rows.shape)}: {first_line(error)}") from error
    if isinstance(module, PassedVectors):
        return rows
    vectors, width = int(module.vectors), int(module.width)  # type: ignore[arg-type]
    wanted = [(count, vectors * width), (count, vectors, width)]
    if not isinstance(made, torch.Tensor) or tuple(made.shape) not in wanted:
        got = tuple(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
        raise PlanError(
            f"{where}: {type(module).__name__} declares {vectors} vectors of width {width}, so of {tuple(rows.shape)} it must make "
            f"{wanted[0]} or {wanted[1]}, it made {got}"
        )
    if made.dtype != rows.dtype:
        raise PlanError(f"{where}: it takes {rows.dtype} and returns {made.dtype}, but rows travel in the type of the tables")
    return made


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-3, atol=1e-4, equal_nan=True)
