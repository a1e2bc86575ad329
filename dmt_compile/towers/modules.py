"""Tower modules: what a tower makes of its features before they cross hosts (section 3.2 of the paper).

A module takes the vectors of a tower's features, (rows, features, width), or (rows, sum of widths) where these differ, and returns
(rows, ``vectors`` * ``width``) or (rows, ``vectors``, ``width``), both of which it declares as attributes. The interaction sees
that many vectors of that width in the place of the features. For a warm start it has a method ``set_linear(matrix)``, called under
``no_grad``: it then computes ``matrix @ x``, (vectors * width, columns of the features) times the columns x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import PlanError

Factory = Callable[[int, int], nn.Module]
"""Makes the module of one tower from its number of features and their width, given in this order."""


@dataclass(frozen=True)
class PassThrough:
    """A tower whose vectors go on as they are."""

    def __call__(self, num_features: int, width: int) -> nn.Module:
        return PassedVectors(num_features, width)


@dataclass(frozen=True)
class DLRMTower:
    """The paper's tower for DLRM: ``c`` vectors of every feature by itself and ``p`` of all together, each ``dim`` wide.

    With F_t features of width N: Linear(N -> c * dim), applied to each of them, beside Linear(N * F_t -> p * dim), applied to all
    side by side, which makes c * F_t + p vectors. A single feature that would stay a single vector of its width is passed through.

    Raises:
        PlanError: it makes no vectors (c = p = 0), or a number is negative or none.
    """

    c: int = 1
    p: int = 0
    dim: int = 64

    def __post_init__(self) -> None:
        _whole("DLRMTower", c=self.c, p=self.p)
        _whole("DLRMTower", least=1, dim=self.dim)
        if not self.c and not self.p:
            raise PlanError("DLRMTower(c=0, p=0) makes no vectors at all: give c, the vectors of each feature, or p, those of all")

    def __call__(self, num_features: int, width: int) -> nn.Module:
        if num_features == 1 and self.c + self.p == 1 and width == self.dim:
            return PassedVectors(1, width)
        return DLRMTowerLayer([width] * num_features, self.c, self.p, self.dim)

    def mixed(self, widths: Sequence[int]) -> nn.Module:
        """For features of different ``widths``, which only a layer over all of them together can take.

        Raises:
            PlanError: c is not 0.
        """
        if self.c:
            raise PlanError(
                f"DLRMTower(c={self.c}) applies one layer to every feature, which must then be equally wide, not {list(widths)}: "
                "use c=0, or put features of one width into a tower"
            )
        return DLRMTowerLayer(widths, 0, self.p, self.dim)


@dataclass(frozen=True)
class CrossTower:
    """The paper's tower for DCN: a low-rank cross network over all features side by side, then Linear to the output.

    The output is one vector of ``dim``, which the paper's reported FLOPs imply, or with ``per_feature`` one for each feature, as
    its listing says. A tower whose features are as wide as its output has no Linear.

    Raises:
        PlanError: a number is negative or none.
    """

    dim: int = 128
    layers: int = 1
    rank: int = 512
    per_feature: bool = False

    def __post_init__(self) -> None:
        _whole("CrossTower", least=1, dim=self.dim, layers=self.layers, rank=self.rank)

    def __call__(self, num_features: int, width: int) -> nn.Module:
        return self.mixed([width] * num_features)

    def mixed(self, widths: Sequence[int]) -> nn.Module:
        """For features of different ``widths``."""
        return CrossTowerLayer(sum(widths), self.layers, self.rank, len(widths) if self.per_feature else 1, self.dim)


def _whole(what: str, least: int = 0, **numbers: int) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise PlanError(f"{what}: {name} must be a whole number, {least} or more, got {value!r}")


class PassedVectors(nn.Module):
    """``vectors`` of ``width``, unchanged."""

    def __init__(self, vectors: int, width: int) -> None:
        super().__init__()
        self.vectors, self.width = vectors, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class DLRMTowerLayer(nn.Module):
    """See :class:`DLRMTower`. Takes (rows, features, width) or (rows, sum of widths)."""

    def __init__(self, widths: Sequence[int], c: int, p: int, dim: int) -> None:
        super().__init__()
        self.vectors, self.width = c * len(widths) + p, dim
        self.inputs = sum(widths)
        self.each = nn.Linear(widths[0], c * dim) if c else None
        self.together = nn.Linear(self.inputs, p * dim) if p else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = []
        if self.each is not None:
            parts.append(self.each(x).flatten(1))
        if self.together is not None:
            parts.append(self.together(x.reshape(x.shape[0], self.inputs)))
        made = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        return made.reshape(x.shape[0], self.vectors, self.width)

    def set_linear(self, matrix: torch.Tensor) -> None:
        """Make it compute ``matrix`` (columns out, columns in) times its features.

        Raises:
            PlanError: it cannot: it makes vectors of each feature beside those of all, or the features' differ.
        """
        with torch.no_grad():
            if self.each is not None:
                own = matrix[: self.width, : self.each.in_features]
                times = matrix.shape[1] // self.each.in_features
                if self.together is not None or not torch.equal(torch.block_diag(*[own] * times), matrix):
                    raise PlanError(
                        "DLRMTower keeps a trained model's vectors with c=1 and p=0, or with c=0, only: use one of these, or "
                        "init='layer'"
                    )
                self.each.weight.copy_(own)
                self.each.bias.zero_()
            elif self.together is not None:
                self.together.weight.copy_(matrix)
                self.together.bias.zero_()


class CrossTowerLayer(nn.Module):
    """See :class:`CrossTower`. Layer l of its cross network is x_0 * (W_l V_l x_l + b_l) + x_l (DCN v2, low rank)."""

    def __init__(self, inputs: int, layers: int, rank: int, vectors: int, dim: int) -> None:
        super().__init__()
        self.vectors, self.width, self.inputs = vectors, dim, inputs
        self.down = nn.ModuleList(nn.Linear(inputs, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, inputs) for _ in range(layers))
        self.out = nn.Linear(inputs, vectors * dim) if inputs != vectors * dim else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = crossed = x.reshape(x.shape[0], self.inputs)
        for down, up in zip(self.down, self.up, strict=True):
            crossed = first * up(down(crossed)) + crossed
        made = crossed if self.out is None else self.out(crossed)
        return made.reshape(x.shape[0], self.vectors, self.width)

    def set_linear(self, matrix: torch.Tensor) -> None:
        """Make it compute ``matrix`` (columns out, columns in) times its features: its crosses begin at zero.

        Raises:
            PlanError: it has no layer for that and the matrix changes something.
        """
        with torch.no_grad():
            for layer in self.up:
                assert isinstance(layer, nn.Linear)
                layer.weight.zero_()
                layer.bias.zero_()
            if self.out is not None:
                self.out.weight.copy_(matrix)
                self.out.bias.zero_()
            elif not torch.equal(matrix, torch.eye(self.inputs).to(matrix)):
                raise PlanError("CrossTower has no Linear here, because its output is as wide as its features")
