"""One table with offsets on real ranks: each rank holds the rows of some fields, and the state dict stays that of one table."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_cases import Tensors, objective
from plain_models import CASES, FIELDS
from ranks import Ranks
from torch import nn

from dmt_compile import DistributedError, InputError, Topology, towerize
from dmt_compile.runtime.rank_module import RankModule
from dmt_compile.runtime.shards import RowShards

pytestmark = pytest.mark.multi_rank

NAME = "one table"
KEY = "embedding.weight"
ROWS = sum(FIELDS)


def _module(grid: tuple[int, int, int]) -> RankModule:
    hosts, local, towers = grid
    case = CASES[NAME]
    return towerize(case.build(), Topology(hosts, local), towers=towers, example_inputs=case.example()).distribute()


def save_on_ranks(grid: tuple[int, int, int], folder: str) -> tuple[Tensors, dict[str, tuple[int, ...]], int]:
    """Runs on a rank: change all parameters and save; the full state dict, the local one's shapes, and the rows held here."""
    import torch.distributed.checkpoint as dcp

    module = _module(grid)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 1
    state = module.state_dict()
    dcp.save(state, checkpoint_id=folder)
    torch.save(state, Path(folder) / f"rank_{dist.get_rank()}.pt")
    full = module.full_state_dict()
    held = sum(len(module.get_parameter(KEY)) for _ in [0] if KEY in state)
    module.close()
    return full, {key: tuple(value.shape) for key, value in state.items()}, held


def load_on_ranks(grid: tuple[int, int, int], folder: str, full: Tensors, same_plan: bool) -> list[Tensors]:
    """Runs on a rank: what all ranks together hold after each way to load."""
    import torch.distributed.checkpoint as dcp

    found = []
    module = _module(grid)
    module.load_state_dict(full)
    found.append(module.full_state_dict())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    state = module.state_dict()
    dcp.load(state, checkpoint_id=folder)
    module.load_state_dict(state)
    found.append(module.full_state_dict())
    if same_plan:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        module.load_state_dict(torch.load(Path(folder) / f"rank_{dist.get_rank()}.pt", weights_only=False))
        found.append(module.full_state_dict())
    module.close()
    return found


def test_a_checkpoint_has_one_table(ranks: Ranks) -> None:
    import torch.distributed.checkpoint as dcp

    grid = (2, 2, 2)
    model = CASES[NAME].build()
    with tempfile.TemporaryDirectory() as folder:
        saved = ranks(4, save_on_ranks, grid, folder)
        assert sum(held for *_, held in saved) == ROWS
        assert max(held for *_, held in saved) < ROWS
        full = saved[0][0]
        assert list(full) == list(model.state_dict())
        assert all(torch.equal(full[key], value + 1) for key, value in model.state_dict().items())
        for _, shapes, _ in saved:
            # The flat model's keys and shapes, less tables of which this rank has no rows.
            assert all(shapes[key] == tuple(full[key].shape) for key in shapes)
        for other in (grid, (3, 1, 3), (1, 2, 1), (1, 1, 1)):
            for states in ranks(other[0] * other[1], load_on_ranks, other, folder, full, other == grid):
                for state in states:
                    assert list(state) == list(full)
                    assert all(torch.equal(state[key], full[key]) for key in full)
        read = {key: torch.zeros_like(value) for key, value in full.items()}
        dcp.load(read, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(read[key], full[key]) for key in full)
    model.load_state_dict(full)


def optimize_on_ranks(folder: str) -> bool:
    """Runs on a rank: whether an optimizer's moments come back from a checkpoint, and others do not."""
    import torch.distributed.checkpoint as dcp

    module = _module((2, 2, 2))
    optimizer = torch.optim.Adam(module.parameters())
    x = CASES[NAME].batch(6, seed=dist.get_rank())[0][0]
    objective(module(x)).backward()
    optimizer.step()
    moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in module.named_parameters()}
    dcp.save({"optimizer": module.optimizer_state_dict(optimizer)}, checkpoint_id=folder)
    module.zero_grad()
    fresh = torch.optim.Adam(module.parameters())
    state = {"optimizer": module.optimizer_state_dict(fresh)}
    dcp.load(state, checkpoint_id=folder)
    module.load_optimizer_state_dict(fresh, state["optimizer"])
    same = all(torch.equal(fresh.state[p]["exp_avg"], moments[name]) for name, p in module.named_parameters())
    moved = all(bool(moment.any()) for moment in moments.values())
    module.close()
    return same and moved


def test_an_optimizer_in_a_checkpoint(ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert all(ranks(4, optimize_on_ranks, folder))


class Aliased(nn.Module):
    """One parameter under two names, read with two sets of offsets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Embedding(ROWS, 4), nn.Embedding(ROWS, 4)
        self.two.weight = self.one.weight
        self.register_buffer("starts", torch.tensor([0, *accumulate(FIELDS[:-1])]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x + self.starts) * self.two(x + self.starts)


def aliased_on_ranks() -> tuple[bool, list[str]]:
    """Runs on a rank: whether the full state dict is the flat model's, and the errors of tables of another size."""
    x = CASES[NAME].batch(6)[0][0]
    model = Aliased()
    module = towerize(model, Topology(2, 1), example_inputs=(x,)).distribute()
    full = module.full_state_dict()
    same = list(full) == list(model.state_dict()) and all(torch.equal(full[k], v) for k, v in model.state_dict().items())
    assert {key: value.clone() for key, value in module.state_dict().items()}.keys() == full.keys()
    errors = []
    for rows in (ROWS + 3, ROWS - 3, len(module.get_parameter("one.weight"))):
        with pytest.raises(RuntimeError) as caught:
            module.load_state_dict({**full, "one.weight": torch.zeros(rows, 4)})
        errors.append(str(caught.value))
    after = module.full_state_dict()
    same = same and all(torch.equal(after[k], full[k]) for k in full)
    module.close()
    return same, errors


def test_a_table_under_two_names(ranks: Ranks) -> None:
    for same, errors in ranks(2, aliased_on_ranks):
        assert same
        assert all("size mismatch for one.weight" in error for error in errors)


def unchecked_on_ranks() -> str:
    """Runs on a rank: the error of an id outside its field, without the check that can be left out elsewhere."""
    case = CASES[NAME]
    module = towerize(case.build(), Topology(2, 1), example_inputs=case.example()).distribute(check_ids=False)
    x = case.batch(4)[0][0].clone()
    x[2, 1] = FIELDS[1]
    with pytest.raises(InputError) as caught:
        module(x)
    module.close()
    return str(caught.value)


def test_rows_are_always_checked(ranks: Ranks) -> None:
    for message in ranks(2, unchecked_on_ranks):
        assert "outside rows" in message


def other_rank_on_ranks() -> str:
    """Runs on a rank: the error of loading the rows of another rank."""
    module = _module((2, 1, 2))
    own = module.state_dict()[KEY]
    assert isinstance(own, RowShards) and "rows" in repr(own)
    with pytest.raises(DistributedError, match="full_state_dict"):
        _ = own + 1
    first = next(iter(own.parts))
    with pytest.raises(DistributedError) as caught:
        module.load_state_dict({**module.state_dict(), KEY: RowShards(own.shape, {first: own.parts[first][:-1]})})
    module.close()
    return str(caught.value)


def test_rows_of_another_rank_are_refused(ranks: Ranks) -> None:
    for message in ranks(2, other_rank_on_ranks):
        assert KEY in message and "without all of the rows" in message


class Late(nn.Module):
    """A table with offsets whose values are made on the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, 4, padding_idx=FIELDS[0])
        self.starts = [0, *accumulate(FIELDS[:-1])]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x + torch.tensor(self.starts, device=x.device)).flatten(1)


def late_on_ranks() -> tuple[Tensors, bool]:
    """Runs on a rank: the values that a table on the meta device gets."""
    with torch.device("meta"):
        model = Late()
    x = CASES[NAME].batch(6)[0][0]
    module = towerize(model, Topology(2, 1), example_inputs=(x,)).distribute(device="cpu")
    objective(module(x)).backward()
    result = module.full_state_dict(), len(module.get_parameter(KEY)) < ROWS
    module.close()
    return result


def test_rows_made_on_the_rank_that_holds_them(ranks: Ranks) -> None:
    for full, part in ranks(2, late_on_ranks):
        assert part
        assert not full[KEY][FIELDS[0]].any(), "the padding row is zero"
        assert full[KEY].abs().sum(1).gt(0).sum() == ROWS - 1


def test_an_id_outside_its_field_is_refused() -> None:
    case = CASES[NAME]
    program = towerize(case.build(), Topology(2, 2), example_inputs=case.example())
    x = case.batch(5)[0][0].clone()
    x[2, 1] = FIELDS[1]
    last = FIELDS[0] + FIELDS[1]
    with pytest.raises(InputError, match=rf"\[:, 1\]' has id {last}, outside rows {FIELDS[0]} to {last - 1} of its table"):
        program.verify(x)


def test_example_ids_outside_their_field_keep_the_table_whole() -> None:
    """Where the example itself reads beyond a field, the constants do not tell fields apart."""
    case = CASES[NAME]
    x = case.batch(5)[0][0].clone()
    x[2, 1] = FIELDS[1]
    program = towerize(case.build(), Topology(2, 2), example_inputs=(x,))
    assert set(program.lookups.table) == {"embedding", "bias"}
    certificate = program.verify(x)
    assert certificate.passed, str(certificate)


class Reads(nn.Module):
    """One table, and what ids are read from it."""

    def __init__(self, read: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.table, self.read = nn.Embedding(100, 2), read
        self.register_buffer("starts", torch.tensor([0, 10, 20]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.table, x, self.starts)


def _columns(table: nn.Embedding, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return table(torch.stack([x[:, 0], x[:, 1] + 10, x[:, 2] + 20], dim=1))


SPLIT = {
    "a buffer": lambda t, x, s: t(x + s),
    "a buffer in front": lambda t, x, s: t(s.unsqueeze(0) + x.long()),
    "a list": lambda t, x, s: t(x + x.new_tensor([0, 10, 20])),
    "in place": lambda t, x, s: t(x.clone().add_(s)),
    "column by column": _columns,
    "a padding row": lambda t, x, s: t(x + s + 1),
    "unsorted": lambda t, x, s: t(x + torch.tensor([20, 0, 10])),
    "a field of a hash": lambda t, x, s: t(x * 7 % 9 + s),
    "clamped": lambda t, x, s: t(x.clamp(min=0) + s),
    "apart": lambda t, x, s: torch.stack([t(x[:, i] + 10 * i) for i in range(3)], dim=1),
}
WHOLE = {
    "no offsets": lambda t, x, s: t(x),
    "offsets that depend on the data": lambda t, x, s: t(x + x[:, :1]),
    "a row for what is missing": lambda t, x, s: t(torch.where(x < 0, torch.zeros_like(x), x + s)),
    "filled": lambda t, x, s: t((x + s).masked_fill(x == 5, 0)),
    "a token in front": lambda t, x, s: t(torch.cat([torch.full((x.shape[0], 1), 7), x + s], dim=1)),
    "two kinds of ids": lambda t, x, s: t(x[:, 0]) * t(x[:, 1] + 50),
    "shifted by one": lambda t, x, s: t(x[:, 0] + 1) * t(x[:, 1]),
    "scaled": lambda t, x, s: t((x + s) * 2),
}


@pytest.mark.parametrize("name", [*SPLIT, *WHOLE])
def test_what_is_taken_apart(name: str) -> None:
    """Only constants that are added to each field's ids tell fields apart; whatever else is done to ids leaves the table whole."""
    x = torch.randint(0, 6, (8, 3), generator=torch.Generator().manual_seed(0))
    program = towerize(Reads({**SPLIT, **WHOLE}[name]), Topology(2, 2), example_inputs=(x,))
    assert len(program.lookups.table) == (3 if name in SPLIT else 1)
    certificate = program.verify(torch.randint(0, 9, (11, 3)), steps=0)
    assert certificate.passed, str(certificate)


def test_balance() -> None:
    """The table's rows are spread as even as whole fields allow."""
    case = CASES[NAME]
    program = towerize(case.build(), Topology(2, 1), example_inputs=case.example())
    held = [sum(program.lookups.table[name].bytes for name in names) for names in program.plan.tables_of_rank]
    assert max(held) <= 0.6 * sum(held)
    assert {table.parameter for table in program.lookups.tables} == {"embedding.weight", "bias.weight"}
