"""What a training loop does beside forward and backward: clipping, checkpointed activations, casts, assigning state."""

from __future__ import annotations

import functools

import pytest
import torch
from distributed_cases import build, inputs_of, objective, tables_of
from ranks import Ranks
from torch.utils.checkpoint import checkpoint

import dmt_compile
from dmt_compile import Topology

pytestmark = pytest.mark.multi_rank

NAME, SIZES = "two collections", [3, 2, 4, 1]


def _clipped(norm_type: float) -> tuple[float, dict[str, torch.Tensor]]:
    rank = torch.distributed.get_rank()
    module = dmt_compile.towerize(build(NAME), Topology(2, 2)).distribute()
    objective(module(*inputs_of(NAME, SIZES)[rank])).backward()
    norm = module.clip_grad_norm_(0.01, norm_type)
    return float(norm), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_is_the_flat_models(ranks: Ranks, norm_type: float) -> None:
    found = ranks(4, _clipped, norm_type)
    model = build(NAME)
    (sum(objective(model(*given)) for given in inputs_of(NAME, SIZES)) / 4).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for theirs, gradients in found:
        assert theirs == pytest.approx(float(norm), rel=1e-5)
        for name, gradient in gradients.items():
            # Sums change order, and the common factor carries that into every value.
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)
    dense = [name for name in expected if name not in tables_of(model)]
    assert dense and all(torch.equal(found[0][1][name], gradients[name]) for name in dense for _, gradients in found)


class _Sparse(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Embedding(6, 3, sparse=True), torch.nn.Embedding(5, 3)
        self.top = torch.nn.Linear(6, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.first(ids[:, 0]), self.second(ids[:, 1])], dim=1))


def _clipped_sparsely() -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.arange(40).view(20, 2) % 5
    module = dmt_compile.towerize(_Sparse(), Topology(2, 2), example_inputs=(ids,)).distribute()
    module(ids.split(5)[torch.distributed.get_rank()]).mean().backward()
    norm = module.clip_grad_norm_(0.01)
    return float(norm), {name: p.grad.to_dense() for name, p in module.named_parameters() if p.grad is not None}


def test_sparse_gradients_are_clipped_with_the_rest(ranks: Ranks) -> None:
    ids = torch.arange(40).view(20, 2) % 5
    model = _Sparse()
    model.first.sparse = False
    model(ids).mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    for theirs, gradients in ranks(4, _clipped_sparsely):
        assert theirs == pytest.approx(float(norm), rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-7)


def _checkpointed(early_stop: bool) -> bool:
    rank = torch.distributed.get_rank()
    module = dmt_compile.towerize(build(NAME), Topology(2, 2)).distribute()
    given = inputs_of(NAME, SIZES)[rank]
    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        objective(checkpoint(functools.partial(module, *given), use_reentrant=False)).backward()
    module.zero_grad()
    objective(module(*given)).backward()
    return all(p.grad is not None for p in module.table_parameters())


def test_a_checkpointed_module_goes_on_working(ranks: Ranks) -> None:
    assert all(ranks(4, _checkpointed, True))


def _cast() -> list[torch.dtype]:
    module = dmt_compile.towerize(build(NAME).double(), Topology(2, 2)).distribute()
    module.float().double()
    return [tensor.dtype for name, tensor in module.full_state_dict().items() if "embedding_bags" in name]


def test_the_full_state_dict_has_the_types_that_the_tables_have(ranks: Ranks) -> None:
    assert all(set(dtypes) == {torch.float64} for dtypes in ranks(4, _cast))


def _assigned() -> None:
    module = dmt_compile.towerize(build(NAME), Topology(2, 2)).distribute()
    module.load_state_dict(module.full_state_dict(), assign=True)


def test_assigning_a_state_dict_is_refused(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(4, _assigned):
        assert outcome.error == "DistributedError"
