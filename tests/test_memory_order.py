"""Rows that are pooled lie in memory as the model's own do, so that sums are in one order; bit for bit over many shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dmt_compile import InputError, Topology, TowerProgram, towerize
from dmt_compile.shapes import in_order

Batch = tuple[torch.Tensor, torch.Tensor]
SHAPES = [(batch, length) for batch in (1, 2, 3, 6, 9) for length in (1, 3, 8, 20, 33)]
ROWS = 50


class Pools(nn.Module):
    def __init__(self, pool: Callable[[nn.Embedding, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pool, self.past, self.item = pool, nn.Embedding(ROWS, 4), nn.Embedding(ROWS, 4)

    def forward(self, past: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return self.pool(self.past, past) * self.item(item)


def decay(past: torch.Tensor) -> torch.Tensor:
    """Weights (B, n, 1) of every id by its time, computed for all times side by side."""
    time = torch.arange(past.shape[1]).unsqueeze(1)
    return torch.exp(-((past > 10).sum(1).unsqueeze(0) - time).abs() / 3.0).t().unsqueeze(2)


POOLS: dict[str, Callable[[nn.Embedding, torch.Tensor], torch.Tensor]] = {
    "weights first": lambda t, x: (decay(x) * t(x)).sum(1),
    "weights last": lambda t, x: (t(x) * decay(x)).sum(1),
    "contiguous weights first": lambda t, x: (decay(x).contiguous() * t(x)).sum(1),
    "mask first": lambda t, x: torch.mul((x > 3).unsqueeze(2), t(x)).mean(1),
    "mask last": lambda t, x: t(x).mul((x > 3).unsqueeze(2)).sum(1),
    "index": lambda t, x: t.weight[x].sum(1),
    "weighted index": lambda t, x: ((x > 3).unsqueeze(2) * t.weight[x]).sum(1),
}
LED = ("mask first", "index", "weighted index")


def batch(samples: int, length: int, transposed: bool = False) -> Batch:
    g = torch.Generator().manual_seed(samples * 100 + length)
    past, item = (torch.randint(0, ROWS, shape, generator=g) for shape in ((samples, length), (samples,)))
    return past.t().contiguous().t() if transposed else past, item


def compiled(name: str, transposed: bool = False) -> tuple[nn.Module, TowerProgram]:
    model = Pools(POOLS[name]).eval()
    return model, towerize(model, Topology(1, 2), example_inputs=batch(6, 8, transposed)).eval()


def pooled(program: TowerProgram) -> bool:
    return any(lookup.sequence for lookup in program.lookups.lookups)


def equal(model: nn.Module, program: TowerProgram, given: Batch) -> None:
    where = tuple(given[0].shape)
    assert torch.equal(program(*given), model(*given)), where
    sizes = (len(given[1]) + 1) // 2, len(given[1]) // 2
    expected = [model(*part) for part in zip(*(one.split([n for n in sizes if n]) for one in given), strict=True)]
    found = [own for own in program.simulate(*given) if len(own)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), where


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("transposed", [False, True])
def test_bits_over_many_shapes(name: str, transposed: bool) -> None:
    model, program = compiled(name, transposed)
    assert pooled(program) == (name != "weights first" and not (transposed and name in LED))
    with torch.no_grad():
        for shape in SHAPES:
            equal(model, program, batch(*shape, transposed))
    assert program.verify(*batch(9, 20, transposed), steps=0).passed


@pytest.mark.parametrize("name", LED)
def test_another_order_than_in_the_example_is_refused(name: str) -> None:
    program = compiled(name)[1]
    what = "the weights of 'past' lie" if name == "mask first" else "'past' lies"
    for run in (program, program.simulate, program.verify):
        with pytest.raises(InputError, match=f"{what} transposed in memory, unlike in example_inputs"):
            run(*batch(6, 8, transposed=True))
    # A transposed example says nothing against any batch.
    model, program = compiled(name, transposed=True)
    with torch.no_grad():
        equal(model, program, batch(6, 20))


def test_order_follows_what_torch_makes() -> None:
    base = torch.randn(4, 6, 5)
    for given in (
        base,
        base.transpose(0, 1),
        base[:, ::2],
        base[:, :1].expand(4, 3, 5),
        base[:1].transpose(0, 1),
        base.permute(2, 1, 0),
    ):
        assert in_order(given.shape, given.stride()) == (given * torch.randn(given.shape)).is_contiguous()
