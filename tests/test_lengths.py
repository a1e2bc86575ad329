"""Histories of any length: which models take them, found out by trying, and what they cost."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import copied, gradients_of, objective
from plain_models import BIG, CASES
from ranks import Ranks
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from dmt_compile import InputError, Topology, TowerProgram, towerize
from dmt_compile.verify.compare import bits_differ


class Reads(nn.Module):
    """A history (B, n), what is given beside it, and an item; ``read`` makes (B, 2) of the rows of the history."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.item, self.top = nn.Embedding(BIG, 2, padding_idx=0), nn.Embedding(BIG, 2), nn.Linear(4, 1)
        self.make()

    def make(self) -> None:
        pass

    def read(self, history: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, history: torch.Tensor, beside: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.read(history, beside), self.item(item)], dim=1))


class Mean(Reads):
    def read(self, history: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        return self.table(history).mean(1)


class Masked(Reads):
    """Pooled under a mask, by weights that are trained, and by maximum: three lookups of the same ids."""

    def make(self) -> None:
        self.second, self.third = nn.Embedding(BIG, 2, sparse=True), nn.Embedding(BIG, 2)

    def read(self, history: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        mask = (history > 0).unsqueeze(2)
        masked = (self.table(history) * mask).sum(1) / mask.sum(1).clamp(min=1)
        weights = (history * self.top.weight[0, 0]).unsqueeze(2)
        return masked + (self.second(history) * weights).sum(1) + self.third(history).max(1).values


class Recurrent(Reads):
    def make(self) -> None:
        self.gru, self.norm = nn.GRU(2, 2, batch_first=True), nn.BatchNorm1d(2)

    def read(self, history: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        return self.norm(self.gru(self.table(history))[0][:, -1])


class Last(Reads):
    """The row behind which there is padding, as a number says."""

    def read(self, history: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        place = (beside - 1).view(-1, 1, 1).expand(-1, 1, 2)
        return self.table(history).tanh().gather(1, place).squeeze(1)


class Flattened(Reads):
    def make(self) -> None:
        self.wide = nn.Linear(5 * 2, 2)

    def read(self, history: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        return self.wide(self.table(history).flatten(1))


class Positions(Reads):
    def make(self) -> None:
        self.places = nn.Parameter(torch.randn(5, 2))

    def read(self, history: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        return (self.table(history) + self.places).tanh().sum(1)


class Sliced(Reads):
    """The history is a part of a matrix that has other columns behind it."""

    def read(self, history: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        return self.table(history[:, :3]).mean(1) + history[:, 3:]


class ByMode(Reads):
    """Another way in training, with the same lookups."""

    def read(self, history: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        rows = self.table(history).tanh()
        return rows.sum(1) if self.training else rows.flip(1).mean(1)


class FlattenedInTraining(Reads):
    """Any length in evaluation, one in training."""

    def make(self) -> None:
        self.wide = nn.Linear(5 * 2, 2)

    def read(self, history: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        rows = self.table(history).tanh()
        return self.wide(rows.flatten(1)) if self.training else rows.mean(1)


class Squeezed(Reads):
    """One row a sample is taken for no history."""

    def read(self, history: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        rows = self.table(history).squeeze(1)
        return rows.sum(1) if rows.dim() == 3 else rows.tanh()


class SqueezedIds(Reads):
    def read(self, history: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        ids = history.squeeze(1)
        return self.table(ids).mean(1) if ids.dim() == 2 else self.table(ids)


class Windows(Reads):
    """Takes no history that is shorter than its windows."""

    def make(self) -> None:
        self.over = nn.Conv1d(2, 2, 3)

    def read(self, history: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        return self.over(self.table(history).mT).sum(2)


FREE = {Mean: 1, Masked: 1, Recurrent: 2, Last: 2, ByMode: 2}
"""Models that take any number, and the number of their rounds."""

FIXED = {
    Flattened: r"with 4, \S+:\d+: `.*`: the model does not run: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    Positions: r"with 4, \S+:\d+: `.*`: the model does not run: RuntimeError: The size of tensor a",
    Squeezed: r"with 1, \S+:\d+: the graph raises IndexError: Dimension out of range",
    SqueezedIds: r"with 1, \S+:\d+: the graph raises IndexError: Dimension out of range",
    Sliced: r"the number is not a size of the inputs",
    FlattenedInTraining: r"with 4, \S+:\d+: `.*`: the model does not run: RuntimeError: mat1 and mat2 shapes cannot",
}


def batch(size: int, length: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    history = torch.randint(0, BIG, (size, length), generator=generator)
    counts = torch.randint(1, max(length, 1) + 1, (size,), generator=generator)
    return history, counts, torch.randint(0, BIG, (size,), generator=generator)


def compiled(kind: type[Reads], topology: Topology | None = None, **options: Any) -> TowerProgram:
    example = batch(7, 5)
    # As long as the history, once.
    example[1][0] = 5
    return towerize(kind(), topology or Topology(2, 2), example_inputs=example, **options)


@pytest.mark.parametrize("kind", FREE)
def test_a_model_that_takes_any_number(kind: type[Reads]) -> None:
    program = compiled(kind)
    assert len(program.lookups.rounds) == FREE[kind]
    for training in (True, False) if kind is ByMode else (True,):
        program.train(training)
        for size, length in ((9, 8), (8, 1), (2, 11)):
            if size < 8 and kind is Recurrent:
                continue  # A batch norm takes no single sample.
            certificate = program.verify(*batch(size, length), steps=1)
            assert certificate.passed, str(certificate)


@pytest.mark.parametrize("kind", FIXED)
def test_a_model_that_takes_one_number_only(kind: type[Reads]) -> None:
    program = compiled(kind)
    assert len(program.lookups.rounds) == 1
    certificate = program.verify(*batch(9, 5), steps=1)
    assert certificate.passed, str(certificate)
    assert all("any ids" not in line for line in str(program).splitlines())
    source = next(source for source in program.lookups.sources if source.count > 1)
    assert re.search(FIXED[kind], source.because)
    if kind is not Sliced:
        message = rf"'(history|squeeze)' has ids of shape \(3, 6\), the model was compiled for shape \(B, 5\) .*{FIXED[kind]}"
        with pytest.raises(InputError, match=message):
            program.verify(*batch(9, 6))


def test_a_model_that_takes_no_single_row() -> None:
    program = compiled(Windows)
    assert program.verify(*batch(9, 3), steps=0).passed
    assert program.verify(*batch(9, 8), steps=0).passed
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        program(*batch(9, 1))


def test_an_example_of_one_id_per_sample() -> None:
    program = towerize(Mean(), Topology(2, 2), example_inputs=batch(7, 1))
    with pytest.raises(InputError, match=r"'history' has ids of shape \(\d, 6\), .*\(the example has one id per sample, .*\)"):
        program.verify(*batch(9, 6))
    program = towerize(Mean(), Topology(2, 2), example_inputs=batch(7, 1), dynamic_ids=True)
    assert program.verify(*batch(9, 6), steps=0).passed


class BesideKeys(nn.Module):
    """A history beside keyed ids."""

    def __init__(self) -> None:
        super().__init__()
        self.keyed = EmbeddingBagCollection(tables=[bags(name) for name in "abc"])
        self.table = nn.Embedding(BIG, 2)

    def forward(self, keyed: KeyedJaggedTensor, history: torch.Tensor) -> torch.Tensor:
        return self.keyed(keyed).values().sum(1) + self.table(history).tanh().sum((1, 2))


def bags(name: str) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, embedding_dim=2, num_embeddings=BIG, feature_names=[f"f_{name}"])


@pytest.mark.parametrize("keys", ["abc", "a"])
@pytest.mark.parametrize("length", [2, 3, 4])
def test_sizes_of_keyed_ids_are_no_lengths(keys: str, length: int) -> None:
    """As many keys, or as many ids in a bag, as there are ids in a history."""
    model = BesideKeys()
    model.keyed = EmbeddingBagCollection(tables=[bags(name) for name in keys])

    def made(size: int, per_bag: int, ids: int) -> tuple[Any, ...]:
        lengths = torch.full((size * len(keys),), per_bag)
        values = torch.arange(int(lengths.sum())) % BIG
        return KeyedJaggedTensor([f"f_{key}" for key in keys], values, lengths=lengths), batch(size, ids)[0]

    program = towerize(model, Topology(2, 2), example_inputs=made(7, length, length))
    assert [source.because for source in program.lookups.sources] == ["", ""]
    assert program.verify(*made(6, 1, 7), steps=0).passed


def test_the_number_can_be_fixed_or_freed() -> None:
    program = compiled(Recurrent, dynamic_ids=False)
    assert len(program.lookups.rounds) == 1
    with pytest.raises(InputError, match=r"pad or cut them to that shape \(or compile without dynamic_ids=False\)"):
        program.verify(*batch(9, 6))
    program = compiled(Positions, dynamic_ids=True)
    assert len(program.lookups.rounds) == 2
    assert program.verify(*batch(9, 5), steps=0).passed


@pytest.mark.parametrize("kind", [Recurrent, Masked, Last])
def test_tables_are_spread_as_for_a_fixed_number(kind: type[Reads]) -> None:
    """By what a sample of the example makes of them, and not by what an id does."""
    free, fixed = compiled(kind), compiled(kind, dynamic_ids=False)
    assert free.plan.tables_of_rank == fixed.plan.tables_of_rank
    costs = [[program.lookups.columns_per_sample(x) for x in program.lookups.lookups] for program in (free, fixed)]
    assert costs[0] == costs[1]


def test_torch_export_keeps_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from dmt_compile.capture import symbolic

    def refuse(*_: Any, **__: Any) -> Any:
        raise TypeError("symbolic tracing is switched off")

    monkeypatch.setattr(symbolic._Tracer, "trace", refuse)
    program = compiled(Recurrent)
    assert len(program.lookups.rounds) == 1
    assert program.verify(*batch(9, 5), steps=0).passed
    with pytest.raises(InputError, match=r"'history' is of shape \(\d, 6\).*torch\.export has kept all sizes.*pad to them"):
        program.verify(*batch(9, 6))


def test_nothing_is_changed_by_trying() -> None:
    model, example = Recurrent(), batch(7, 5)
    model.table.max_norm = 0.1
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = [tensor.clone() for tensor in example]
    state = torch.get_rng_state()
    towerize(model, Topology(2, 2), example_inputs=example)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(map(torch.equal, given, example))
    assert torch.equal(state, torch.get_rng_state())
    assert model.training


def test_the_summary_says_which_lookups_take_any_number() -> None:
    assert "any ids: mean" in str(compiled(Mean))
    assert "any ids: rows" in str(compiled(Recurrent))
    assert "5 ids: mean" in str(compiled(Mean, dynamic_ids=False))


@pytest.mark.parametrize("name", ["one table", "field by field", "fields over time", "field major"])
def test_fields_stay_fields(name: str) -> None:
    """A number of fields is no number of ids."""
    case = CASES[name]
    free, fixed = (towerize(case.build(), Topology(2, 2), example_inputs=case.example(), dynamic_ids=x) for x in (None, False))
    assert [one.unit for one in free.lookups.rounds] == ["sample"]
    assert [table.name for table in free.lookups.tables] == [table.name for table in fixed.lookups.tables]


class Factors(nn.Module):
    """A factorisation machine over ids that are shifted already: it takes any number of fields."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4 * BIG, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table(x)
        return 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(1)


def test_interactions_do_not_depend_on_it() -> None:
    x = torch.randint(0, BIG, (7, 4)) + BIG * torch.arange(4)
    free, fixed = (towerize(Factors(), Topology(2, 2), example_inputs=(x,), dynamic_ids=option) for option in (None, False))
    assert [one.unit for one in free.lookups.rounds] == ["id"]
    assert str(free.interactions) == str(fixed.interactions)
    assert "factorisation" in str(free.interactions[0].kind)


LENGTHS = {Masked: (3, 9, 1, 5), Recurrent: (5, 1, 8, 2)}
SIZES = (2, 3, 0, 5)


def steps_on_ranks(kind: type[Reads]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Runs on a rank: the output on histories as long as no other rank's, and the gradients."""
    module = compiled(kind).distribute()
    rank = dist.get_rank()
    output = module(*batch(SIZES[rank], LENGTHS[kind][rank], seed=rank))
    objective(output).backward()
    result = copied(output), gradients_of(module)
    module.close()
    return result


@pytest.mark.multi_rank
@pytest.mark.parametrize("kind", [Masked])
def test_ranks_with_histories_of_other_lengths(ranks: Ranks, kind: type[Reads]) -> None:
    found = ranks(4, steps_on_ranks, kind)
    model, terms = kind(), []
    for rank, size in enumerate(SIZES):
        output = model(*batch(size, LENGTHS[kind][rank], seed=rank))
        assert bits_differ(found[rank][0], copied(output)) is None, rank
        terms.append(objective(output))
    (torch.stack(terms).sum() / 4).backward()
    for _, gradients in found:
        for name, gradient in gradients.items():
            expected = model.get_parameter(name).grad
            assert expected is not None
            whole = [x.to_dense() if x.is_sparse else x for x in (gradient, expected)]
            torch.testing.assert_close(*whole)


def compiled_apart(kind: type[Reads], samples: tuple[int, int], lengths: tuple[int, int]) -> None:
    """Runs on a rank: distributes what was compiled with an example of its own."""
    rank = dist.get_rank()
    towerize(kind(), Topology(1, 2), example_inputs=batch(samples[rank], lengths[rank])).distribute().close()


@pytest.mark.multi_rank
def test_ranks_compiled_with_other_samples_and_lengths(ranks: Ranks) -> None:
    ranks(2, compiled_apart, Masked, (6, 9), (5, 7))


@pytest.mark.multi_rank
@pytest.mark.parametrize(
    ("kind", "lengths", "expected"),
    [
        (Squeezed, (5, 7), "lookups.table.ids per sample is 5 on rank 0 and 7 on rank 1"),
        (Mean, (5, 1), 'lookups.table.ids per sample is "any" on rank 0 and 1 on rank 1'),
    ],
)
def test_ranks_compiled_for_other_numbers_refuse(ranks: Ranks, kind: type[Reads], lengths: tuple[int, int], expected: str) -> None:
    for outcome in ranks.outcomes(2, compiled_apart, kind, (6, 6), lengths):
        assert outcome.error == "DistributedError", outcome.trace
        assert expected in outcome.message


def none_on_ranks() -> list[str]:
    """Runs on a rank: what a step raises in which rank 1 has histories of no ids, and whether the next one runs."""
    module = compiled(Masked, topology=Topology(2, 1)).distribute()
    found = []
    try:
        module(*batch(3, 0 if dist.get_rank() == 1 else 4))
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    objective(module(*batch(3, 4))).backward()
    module.close()
    return found


@pytest.mark.multi_rank
def test_a_maximum_of_no_rows_raises_on_all_ranks(ranks: Ranks) -> None:
    (on_good,), (on_bad,) = ranks(2, none_on_ranks)
    assert on_bad.startswith("InputError: 'history' has no ids for its samples")
    assert on_good.startswith("DistributedError") and "rank 1" in on_good
