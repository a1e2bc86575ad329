"""Plans: how they are made, their balance, their text form, their hash, and every malformed one."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import PooledOnly, table
from torch import nn

from dmt_compile import PlanError, Topology, TopologyError, Tower, TowerPlan, towerize
from dmt_compile.lookups import IdSource, Lookup, LookupOutput, LookupSet, Table
from dmt_compile.partition import make_plan
from dmt_compile.topology import valid_tower_counts

SETTINGS = settings(derandomize=True, deadline=None, max_examples=60)


def lookup_set(tables: list[tuple[int, int, int]]) -> LookupSet:
    """Tables of (rows, dim, number of features) without a model around them."""
    records = tuple(Table(f"t{i}", f"e.{i}", rows, dim, torch.float32) for i, (rows, dim, _) in enumerate(tables))
    same: dict[str, Any] = {"source": 0, "pooling": "sum", "weighted": False, "dtype": torch.float32, "output": 0}
    lookups = tuple(
        Lookup(name=f"t{i}f{j}", feature=f"t{i}f{j}", table=f"t{i}", dim=dim, **same)
        for i, (_, dim, count) in enumerate(tables)
        for j in range(count)
    )
    names = tuple(x.name for x in lookups)
    source = IdSource(node="kjt", label="kjt", features=names, weighted=False)
    output = LookupOutput(node="ebc", keys=names, lookups=names, location=None)
    return LookupSet(records, (source,), lookups, (output,))


_SOME = [(100 + 7 * i, 4 + i % 3, 1 + i % 2) for i in range(11)]
tables = st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 128), st.integers(1, 3)), min_size=1, max_size=20)


@st.composite
def plans(draw: st.DrawFn) -> tuple[LookupSet, TowerPlan]:
    topology = Topology(draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    lookups = lookup_set(draw(tables))
    towers = draw(st.sampled_from(valid_tower_counts(topology)))
    return lookups, make_plan(lookups, topology, towers, draw(st.sampled_from(["balanced", "strided"])))


def model() -> nn.Module:
    """Tables a (features u, v), b (feature u), c (feature w), d (feature x)."""
    return PooledOnly(table("a", ["u", "v"]), table("b", ["u"], 4), table("c", ["w"], 3), table("d", ["x"], 1))


def plan_of(towers: Any, shape: tuple[int, int] = (2, 2), **options: Any) -> TowerPlan:
    return towerize(model(), Topology(*shape), towers=towers, **options).plan


class TestText:
    @given(plans(), st.sampled_from([None, 2]))
    @SETTINGS
    def test_round_trip(self, drawn: tuple[LookupSet, TowerPlan], indent: int | None) -> None:
        lookups, plan = drawn
        again = TowerPlan.from_json(plan.to_json(indent))
        assert again == plan and again.hash == plan.hash and again.to_json() == plan.to_json()
        again.validate(lookups)

    def test_a_read_plan_is_taken(self) -> None:
        first = plan_of([["w"], ["u", "v", "x"]])
        again = towerize(model(), Topology(2, 2), towers=TowerPlan.from_json(first.to_json()))
        assert again.plan == first

    def test_hash_is_of_what_is_decided(self) -> None:
        plan = plan_of(2)
        assert dataclasses.replace(plan, partition="other").hash == plan.hash
        first, second = plan.towers
        assert dataclasses.replace(plan, towers=(second, first)).hash != plan.hash
        assert dataclasses.replace(plan, topology=Topology(1, 4)).hash != plan.hash

    def test_hash_does_not_depend_on_the_process(self) -> None:
        # The function's own text, so that the processes need not import TorchRec.
        script = (
            "import torch\n"
            "from typing import Any\n"
            "from dmt_compile import Topology\n"
            "from dmt_compile.lookups import IdSource, Lookup, LookupOutput, LookupSet, Table\n"
            "from dmt_compile.partition import make_plan\n"
            f"{inspect.getsource(lookup_set)}\n"
            f"plan = make_plan(lookup_set({_SOME!r}), Topology(2, 4))\n"
            "print(plan.hash, plan.to_json())\n"
        )
        outputs = set()
        for seed in ("0", "4242"):
            env = {**os.environ, "PYTHONHASHSEED": seed}
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", "from __future__ import annotations\n" + script],
                env=env, capture_output=True, text=True, check=True,
            )  # fmt: skip
            outputs.add(done.stdout.strip().splitlines()[-1])
        plan = make_plan(lookup_set(_SOME), Topology(2, 4))
        assert outputs == {f"{plan.hash} {plan.to_json()}"}

    @pytest.mark.parametrize(
        "text, reason",
        [
            ("", "must be JSON"),
            ("{", "must be JSON"),
            ("[1]", "must be a JSON object, got list"),
            ("{}", "reads tower plans of format 1, got format None"),
            ('{"format": 2}', "got format 2"),
            ('{"format": 1}', "malformed: KeyError: 'towers'"),
        ],
    )
    def test_not_a_plan(self, text: str, reason: str) -> None:
        with pytest.raises(PlanError) as caught:
            TowerPlan.from_json(text)
        assert reason in str(caught.value)

    @pytest.mark.parametrize(
        "path, value, reason",
        [
            (("towers", 0, "features"), "u", "expected a list of names, got the text 'u'"),
            (("towers", 0, "features"), [3], "expected a name, got 3"),
            (("towers", 0, "features"), None, "malformed"),
            (("towers", 0, "tables"), ["a"], "expected a list of names, got the text 'a'"),
            (("towers", 0, "tables", 0), [None], "expected a name, got None"),
            (("towers", 0, "ranks"), [0, 1.5], "expected a rank, got 1.5"),
            (("towers", 0, "ranks"), ["0", "1"], "expected a rank, got '0'"),
            (("towers", 0, "ranks"), [0, True], "expected a rank, got True"),
            (("towers", 0), 7, "malformed"),
            (("towers",), 7, "malformed"),
            (("topology", "hosts"), "2", "hosts must be a whole number, got '2'"),
            (("topology", "hosts"), 0, "hosts must be at least 1"),
            (("topology",), None, "malformed"),
        ],
    )
    def test_malformed(self, path: tuple[Any, ...], value: Any, reason: str) -> None:
        data = json.loads(plan_of(2).to_json())
        place = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(PlanError) as caught:
            TowerPlan.from_json(json.dumps(data))
        assert reason in str(caught.value)


class TestAgainstAModel:
    """A plan of towers ((u, v, u@b), (w, x)), tables ((a, b), (c, d)) is changed in one place."""

    def changed(self, index: int, **changes: Any) -> TowerPlan:
        plan = plan_of([["u", "v"], ["w", "x"]])
        towers = list(plan.towers)
        towers[index] = dataclasses.replace(towers[index], **changes)
        return dataclasses.replace(plan, towers=tuple(towers))

    def refused(self, plan: TowerPlan, topology: Topology | None = None) -> str:
        with pytest.raises(PlanError) as caught:
            towerize(model(), topology or plan.topology, towers=plan)
        return str(caught.value)

    def test_unchanged(self) -> None:
        plan = self.changed(0)
        assert towerize(model(), plan.topology, towers=plan).plan is plan

    def test_other_topology(self) -> None:
        message = self.refused(self.changed(0), Topology(1, 4))
        assert "hosts=2" in message and "hosts=1" in message

    def test_other_ranks(self) -> None:
        message = "tower 1 must be served by ranks [2, 3], the plan says [3, 2]"
        assert self.refused(self.changed(1, ranks=(3, 2))) == message

    def test_tables_of_too_few_ranks(self) -> None:
        assert "tower 0 has 2 ranks but lists the tables of 1" in self.refused(self.changed(0, tables=(("a", "b"),)))

    def test_unknown_table(self) -> None:
        message = "rank 1 of tower 0 is given table 'zz', which the model does not have"
        assert self.refused(self.changed(0, tables=(("a", "b"), ("zz",)))) == message

    def test_table_owned_twice(self) -> None:
        message = self.refused(self.changed(1, tables=(("c", "d"), ("a",))))
        assert "table 'a' is owned twice" in message and "rank 3 of tower 1" in message

    def test_table_owned_twice_in_one_tower(self) -> None:
        assert "table 'a' is owned twice" in self.refused(self.changed(0, tables=(("a", "b"), ("a",))))

    def test_table_owned_by_nobody(self) -> None:
        assert self.refused(self.changed(1, tables=(("c",), ()))) == "table 'd' is owned by no rank"

    def test_unknown_feature(self) -> None:
        message = self.refused(self.changed(1, features=("w", "x", "zz")))
        assert message == "tower 1 is given feature 'zz', which the model does not look up"

    def test_feature_in_two_towers(self) -> None:
        message = self.refused(self.changed(1, features=("w", "x", "v")))
        assert message == "feature 'v' stands in tower 0 and again in tower 1"

    def test_feature_in_no_tower(self) -> None:
        assert self.refused(self.changed(1, features=("w",))) == "feature 'x' is in no tower"

    def test_table_in_another_tower_than_its_feature(self) -> None:
        plan = self.changed(0, tables=(("a",), ()))
        plan = dataclasses.replace(plan, towers=(plan.towers[0], dataclasses.replace(plan.towers[1], tables=(("c", "d"), ("b",)))))
        assert self.refused(plan) == "feature 'u@b' is in tower 0 but its table 'b' is owned in tower 1"

    def test_number_of_towers_that_does_not_fit(self) -> None:
        plan = plan_of(2)
        three = dataclasses.replace(plan, towers=(*plan.towers, Tower((), (), ())))
        with pytest.raises(TopologyError, match="3 towers do not fit 2 hosts x 2 ranks"):
            towerize(model(), plan.topology, towers=three)


class TestLists:
    def test_towers_as_given(self) -> None:
        plan = plan_of([["x", "w"], ["v", "u"]])
        assert [t.features for t in plan.towers] == [("w", "x"), ("u@a", "v", "u@b")]
        assert plan.partition == "explicit"

    def test_a_feature_of_two_tables_may_be_split(self) -> None:
        plan = plan_of([["u@a", "v"], ["u@b", "w", "x"]])
        assert [t.features for t in plan.towers] == [("u@a", "v"), ("u@b", "w", "x")]

    def test_an_empty_tower(self) -> None:
        plan = plan_of([["u", "v", "w", "x"], []])
        assert plan.towers[1] == Tower((), (2, 3), ((), ()))

    @pytest.mark.parametrize(
        "towers, parts",
        [
            ([["u", "v"], ["w", "x", "q"]], ("towers[1]", "'q'", "it has 'u@a'")),
            ([["u", "v", "w"], ["w", "x"]], ("'w'", "towers[0] and again in towers[1]")),
            ([["u", "u", "v"], ["w", "x"]], ("'u@a'", "towers[0] and again in towers[0]")),
            ([["u", "v"], ["w"]], ("in none: 'x'",)),
            ([["u"], ["v", "w", "x"]], ("'u@a' and 'v'", "same table 'a'", "towers 0 and 1")),
            (["u", "vwx"], ("towers[0] is the text 'u'",)),
            ([1, 2], ("towers[0] is of type int",)),
            ("uv", ("got str",)),
            (2.0, ("got float",)),
            ({"u": 0}, ("got dict",)),
        ],
    )
    def test_refused(self, towers: Any, parts: tuple[str, ...]) -> None:
        with pytest.raises(PlanError) as caught:
            plan_of(towers)
        for part in parts:
            assert part in str(caught.value)

    @pytest.mark.parametrize("towers", [3, 0, -1, True, [["u", "v", "w", "x"], [], []]])
    def test_numbers_refused(self, towers: Any) -> None:
        with pytest.raises(TopologyError, match=r"number of towers|towers do not fit"):
            plan_of(towers)

    def test_unknown_partition(self) -> None:
        with pytest.raises(PlanError, match="partition must be one of 'balanced', 'strided', got 'learned'"):
            plan_of(2, partition="learned")

    def test_not_a_topology(self) -> None:
        with pytest.raises(PlanError, match=r"topology must be a dmt_compile\.Topology, got tuple"):
            towerize(model(), (2, 2))  # type: ignore[arg-type]


class TestPartitions:
    @given(plans())
    @SETTINGS
    def test_every_plan_is_complete(self, drawn: tuple[LookupSet, TowerPlan]) -> None:
        lookups, plan = drawn
        plan.validate(lookups)
        assert sorted(n for names in plan.tables_of_rank for n in names) == sorted(t.name for t in lookups.tables)
        assert sorted(n for t in plan.towers for n in t.features) == sorted(x.name for x in lookups.lookups)
        served = [x.name for rank in plan.lookups_of_rank(lookups) for x in rank]
        assert sorted(served) == sorted(x.name for x in lookups.lookups)

    def test_one_tower_per_host_by_default(self) -> None:
        assert [len(plan_of(None, shape).towers) for shape in ((4, 2), (2, 4), (1, 3))] == [4, 2, 1]

    def test_strided(self) -> None:
        lookups = lookup_set([(10, 4, 1)] * 7)
        plan = make_plan(lookups, Topology(3, 2), 3, "strided")
        assert plan.tables_of_rank == (("t0", "t6"), ("t3",), ("t1",), ("t4",), ("t2",), ("t5",))

    @pytest.mark.parametrize("partition", ["balanced", "strided"])
    def test_more_towers_and_ranks_than_tables(self, partition: str) -> None:
        plan = plan_of(8, (2, 4), partition=partition)
        assert len(plan.towers) == 8 and sum(1 for names in plan.tables_of_rank if not names) == 4

    @given(tables, st.integers(1, 8))
    @SETTINGS
    def test_balanced_load_is_bounded(self, drawn: list[tuple[int, int, int]], towers: int) -> None:
        """No tower's share exceeds the ideal by more than the largest table's, counting columns and bytes as shares."""
        lookups = lookup_set(drawn)
        plan = make_plan(lookups, Topology(towers, 1), towers)
        columns = {f"t{i}": dim * count for i, (_, dim, count) in enumerate(drawn)}
        memory = {f"t{i}": rows * dim for i, (rows, dim, _) in enumerate(drawn)}
        shares = {n: (columns[n] / sum(columns.values()), memory[n] / sum(memory.values())) for n in columns}
        loads = [[sum(shares[n][axis] for n in names) for axis in (0, 1)] for names in plan.tables_of_rank]
        # Greedy on the larger of two shares: the bin chosen has at most the mean of (columns + bytes), 2 / towers.
        largest = max(max(share) for share in shares.values())
        assert max(max(load) for load in loads) <= 2 / towers + largest + 1e-9

    def test_balanced_evens_out_equal_tables(self) -> None:
        plan = make_plan(lookup_set([(100, 8, 1)] * 26), Topology(4, 2))
        assert sorted(len(t.features) for t in plan.towers) == [6, 6, 7, 7]
        assert sorted(len(names) for names in plan.tables_of_rank) == [3, 3, 3, 3, 3, 3, 4, 4]

    def test_balanced_beats_strided_on_uneven_tables(self) -> None:
        lookups = lookup_set([(100_000, 8, 1), (10, 8, 1)] * 8)

        def heaviest(partition: str) -> int:
            plan = make_plan(lookups, Topology(2, 2), 2, partition)
            return max(sum(lookups.table[n].bytes for rank in t.tables for n in rank) for t in plan.towers)

        assert heaviest("balanced") * 1.9 < heaviest("strided")
