"""Several rounds of exchanges in one step: their order, programs that mix them up, and failures between them."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from distributed_cases import objective
from mutants import Mutant, remade
from plain_models import BIG, CASES
from ranks import Ranks
from torch import nn

from dmt_compile import CaptureError, InputError, Topology, TowerProgram, VerificationError, towerize
from dmt_compile.stage import ALL_TO_ALL
from dmt_compile.verify.layout import check_layout


def program(name: str, topology: Topology) -> TowerProgram:
    return towerize(CASES[name].build(), topology, example_inputs=CASES[name].example(), dynamic_ids=False)


def test_every_lookup_is_in_one_round() -> None:
    lookups = program("chained", Topology(2, 2)).lookups
    names = [[lookup.name for lookup in one.lookups] for one in lookups.rounds]
    assert sorted(name for own in names for name in own) == sorted(lookups.lookup)
    # Ids first, then what they lead to; the last lookup reads a table of the first round.
    assert names == [["first@x", "weights", "last@y[:, 0]"], ["last@argmax", "bag"], ["first@mod"]]
    ragged = program("ragged", Topology(2, 2)).lookups
    assert [one.unit for one in ragged.rounds] == ["sample", "id"]


def test_all_ranks_begin_their_collectives_in_one_order() -> None:
    lowered = program("chained", Topology(2, 3)).stages["lowered"]
    starts = [node.name for node in lowered.graph.nodes if node.target is ALL_TO_ALL]
    rounds = [re.match(r"round_(\d+)_", name) for name in starts]
    assert [int(found[1]) if found else 0 for found in rounds] == sorted(int(found[1]) if found else 0 for found in rounds)
    assert len(starts) == len(set(starts)) == 3 * 5 + 1  # Weights travel in one round.


# By node, what it is given: of another round than its own.
MIXED_UP = {
    "permute": (1, "batch_sizes"),
    "exchange_tower": (0, "permute"),
    "columns_0": (0, "restore"),
    "route": (0, "ids_0"),
    "lookup": (0, "route"),
}


@pytest.mark.parametrize("node", MIXED_UP)
@pytest.mark.parametrize(("name", "later", "earlier"), [("chained", "round_1_", ""), ("ragged", "", "round_1_")])
def test_rounds_that_are_mixed_up_are_refuted(name: str, later: str, earlier: str, node: str) -> None:
    """In the graph of the ragged model the second round stands before the first one."""
    place, given = MIXED_UP[node]

    def spoil(m: Mutant) -> None:
        m.set_args(f"{later}{node}", **{f"_{place}": m.nodes[f"{earlier}{given}"]})

    stage = program(name, Topology(2, 2)).stages["sptt"]
    check_layout(stage)
    with pytest.raises(VerificationError, match=f"stage 'sptt': node '{later}"):
        check_layout(remade(stage, spoil))


class Late(nn.Module):
    """Ids of the second lookup that leave its table if the first lookup's row is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding.from_pretrained(torch.tensor([[99.0], *[[float(i)] for i in range(1, BIG)]]))
        self.table = nn.Embedding(BIG, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(self.codes(x).squeeze(1).long())


def late_on_ranks() -> list[str]:
    """Runs on a rank: the error of a step in which rank 1 has a bad id in the second round, between two good steps."""
    good, bad = torch.tensor([1, 2, 3]), torch.tensor([1, 0, 3])
    module = towerize(Late(), Topology(2, 1), example_inputs=(good,)).distribute()
    objective(module(good)).backward()
    found = []
    try:
        module(bad if dist.get_rank() == 1 else good)
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    # Nothing of the second round was sent, so the module goes on.
    objective(module(good)).backward()
    module.close()
    return found


@pytest.mark.multi_rank
def test_a_bad_id_in_a_later_round_raises_on_all_ranks(ranks: Ranks) -> None:
    (on_good,), (on_bad,) = ranks(2, late_on_ranks)
    assert re.search(r"InputError: feature '\w+' has id 99, outside its table of 11 rows", on_bad)
    assert on_good.startswith("DistributedError") and "rank 1" in on_good


def test_a_batch_that_cannot_be_dealt_says_so() -> None:
    """Jagged ids in a plain tensor: nothing says which of them belong to which sample."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(BIG, 2)

        def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return torch.segment_reduce(self.table(ids), "sum", lengths=lengths)

    with pytest.raises((CaptureError, ValueError), match="disagree on the batch size"):
        towerize(Flat(), Topology(2, 2), example_inputs=(torch.arange(6), torch.tensor([1, 2, 3])))


class Histories(nn.Module):
    """Two padded histories of one table, one pooled at once and one read by an RNN, beside an item and one table for all fields."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.item, self.fields = nn.Embedding(BIG, 3, padding_idx=0), nn.Embedding(2 * BIG, 2)
        self.gru, self.top = nn.GRU(3, 2, batch_first=True), nn.Linear(2 + 3 + 3 + 4, 1)

    def forward(self, seen: torch.Tensor, liked: torch.Tensor, item: torch.Tensor, fields: torch.Tensor) -> torch.Tensor:
        read = self.gru(self.item(seen))[0][:, -1]
        rows = self.fields(fields + torch.tensor([0, BIG])).flatten(1)
        return self.top(torch.cat([read, self.item(liked).mean(1), self.item(item), rows], dim=1))


def histories(batch: int, seen: int, liked: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randint(0, BIG, shape, generator=generator) for shape in ((batch, seen), (batch, liked), (batch,), (batch, 2))
    )


def test_the_number_of_ids_may_change() -> None:
    program = towerize(Histories(), Topology(2, 2), example_inputs=histories(6, 4, 3))
    assert [one.unit for one in program.lookups.rounds] == ["sample", "id"]
    assert {"fields[0:11]", "fields[11:22]"} <= set(program.lookups.table)
    for seen, liked in ((4, 3), (1, 7), (9, 1)):
        certificate = program.verify(*histories(9, seen, liked))
        assert certificate.passed, str(certificate)
    # What the model pools is pooled by the owner, whatever the number.
    assert [{x.table for x in one.lookups} for one in program.lookups.rounds][1:] == [{"item"}]
    fixed = towerize(Histories(), Topology(2, 2), example_inputs=histories(6, 4, 3), dynamic_ids=False)
    assert len(fixed.lookups.rounds) == 1
    with pytest.raises(InputError, match="compile without dynamic_ids=False"):
        fixed.verify(*histories(9, 5, 3))


def dynamic_on_ranks() -> bool:
    """Runs on a rank: whether a step on histories as long as no other rank's gives the flat model's output."""
    model = Histories()
    rank = dist.get_rank()
    module = towerize(model, Topology(2, 2), example_inputs=histories(6, 4, 3)).distribute()
    batch = histories(2 + rank, 1 + 2 * rank, 4 - rank, seed=rank)
    output = module(*batch)
    objective(output).backward()
    same = torch.equal(output, model(*batch))
    module.close()
    return same


@pytest.mark.multi_rank
def test_ranks_with_histories_of_other_lengths(ranks: Ranks) -> None:
    assert all(ranks(4, dynamic_on_ranks))
