"""Terminal output: golden files, the data behind a diff, and that every line fits a plain terminal of 80 columns.

``UPDATE_GOLDENS=1 pytest tests/test_render.py`` rewrites the golden files; read the difference before committing it.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torchrec")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import fx, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig

import dmt_compile
from dmt_compile import Certificate, Check, Topology, TowerProgram, towerize
from dmt_compile.exchange import Axis, Exchange
from dmt_compile.render.diff import StageDiff, diff_stages
from dmt_compile.render.facts import IdsFacts, RowsFacts, rows_facts
from dmt_compile.render.fold import fold, moved
from dmt_compile.render.text import to_text
from dmt_compile.render.words import cut, listed, place, plain, ranks, short_places, size, size_span, span, spanned
from dmt_compile.stage import Stage
from dmt_compile.topology import TowerGrid, valid_tower_counts

GOLDENS = Path(__file__).parent / "goldens"
sys.path.insert(0, str(GOLDENS))
import flat_model  # noqa: E402

STAGES = ("flat", "towers", "classic", "sptt", "lowered")
PAIRS = list(itertools.permutations(STAGES, 2))


@pytest.fixture(scope="module")
def small() -> TowerProgram:
    return towerize(flat_model.dlrm(), Topology(2, 2))


@pytest.fixture(scope="module")
def uneven() -> TowerProgram:
    """More hosts than ranks per host."""
    return towerize(flat_model.dlrm(), Topology(3, 2))


@pytest.fixture(scope="module")
def wide() -> TowerProgram:
    return towerize(flat_model.wide(), Topology(64, 8))


@pytest.fixture(scope="module")
def programs(small: TowerProgram, uneven: TowerProgram, wide: TowerProgram) -> list[TowerProgram]:
    return [small, uneven, wide, towerize(flat_model.branching(), Topology(1, 1))]


def check_plain(text: str, width: int = 80) -> list[str]:
    """The text's lines, each of which a plain terminal of ``width`` columns shows as it is."""
    assert text.isascii()
    lines = text.split("\n")
    for line in lines:
        assert line.isprintable(), line
        assert len(line) <= width, line
        assert line == line.rstrip(), line
    return lines


def check_golden(name: str, text: str) -> None:
    lines = check_plain(text)
    assert not any(str(directory) in text for directory in (GOLDENS.parent, Path(torch.__file__).parents[2]))
    assert not any("site-packages" in line for line in lines)
    file = GOLDENS / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        file.write_text(text + "\n")
    assert text + "\n" == file.read_text(), f"{file} differs; UPDATE_GOLDENS=1 rewrites it"


# Golden files


def test_golden_summary(small: TowerProgram) -> None:
    check_golden("dlrm_summary", str(small))


@pytest.mark.parametrize(
    ("before", "after"), [("flat", "towers"), ("flat", "sptt"), ("classic", "sptt"), ("sptt", "lowered"), ("lowered", "flat")]
)
def test_golden_diff(small: TowerProgram, before: str, after: str) -> None:
    check_golden(f"dlrm_{before}_{after}", str(small.diff(before, after)))


def test_golden_wide_model(wide: TowerProgram) -> None:
    check_golden("wide_summary", str(wide))
    check_golden("wide_flat_towers", str(wide.diff("flat", "towers")))
    check_golden("wide_flat_lowered", str(wide.diff("flat", "lowered")))


def test_golden_kept_whole() -> None:
    check_golden("branching_summary", str(towerize(flat_model.branching(), Topology(2, 3))))


def test_golden_certificate() -> None:
    checks = (
        Check("layout, stage sptt", True, "followed through the graph", "4 ranks, 5 lookups"),
        Check("outputs, stage sptt", True, "bit for bit", "equal on 4 ranks"),
        Check("outputs, stage lowered", False, "bit for bit", f"rank 3: output[0]: 1.0 against 2.0\n{'one long line ' * 12}"),
        Check("gradients", True, "within 1.5e-05 of the largest", f"13 parameters, 0.0046 of it ('{'module.' * 12}weight')"),
    )
    check_golden("certificate", str(Certificate("DLRM", "0123456789abcdef", (3,) * 40, checks)))


# The data behind a diff


def order(stage: Stage) -> list[str]:
    return [node.name for node in stage.graph.nodes]


def check_diff(diff: StageDiff, before: Sequence[str], after: Sequence[str]) -> None:
    """Applying the diff to the order before gives the order after, and the counts fit."""
    assert (diff.before_nodes, diff.after_nodes) == (len(before), len(after))
    assert len(before) == len(diff.removed) + len(diff.moved) + diff.kept
    assert len(after) == len(diff.added) + len(diff.moved) + diff.kept
    gone = {node.name for node in diff.removed}
    new = {node.name for node in diff.added}
    shifted = {move.node.name for move in diff.moved}
    assert gone == set(before) - set(after)
    assert new == set(after) - set(before)
    still = [name for name in before if name not in gone | shifted]
    assert still == [name for name in after if name not in new | shifted]
    for move in diff.moved:
        at = after.index(move.node.name)
        assert next((x for x in reversed(after[:at]) if x not in shifted), "") == move.behind
        assert next((x for x in after[at:] if x not in shifted), "") == move.ahead


def test_every_pair_of_stages(programs: list[TowerProgram]) -> None:
    for program in programs:
        for before, after in PAIRS:
            diff = program.diff(before, after)
            check_diff(diff, order(program.stages[before]), order(program.stages[after]))
            assert not diff.empty
            assert dataclasses.replace(diff) == diff
            check_plain(str(diff))


def test_equal_stages_say_so(programs: list[TowerProgram]) -> None:
    for program, name in itertools.product(programs, STAGES):
        diff = program.diff(name, name)
        assert diff.empty
        assert str(diff) == f"{name} -> {name}: no difference, {len(order(program.stages[name])):,} nodes"


def test_both_directions_mirror_each_other(small: TowerProgram) -> None:
    for before, after in PAIRS:
        there, back = small.diff(before, after), small.diff(after, before)
        assert there.removed == back.added
        assert there.added == back.removed
        assert len(there.moved) == len(back.moved)
        assert {change.node.name for change in there.rewired} == {change.node.name for change in back.rewired}
        assert all(
            (a.reads, a.instead) == (b.instead, b.reads) for a in there.rewired for b in back.rewired if a.node.name == b.node.name
        )


def test_no_diff_without_a_stage_of_that_name(small: TowerProgram) -> None:
    with pytest.raises(dmt_compile.PlanError, match="stage must be one of flat, towers"):
        small.diff("flat", "nonsense")


def stage_of(names: Sequence[str], like: Stage) -> Stage:
    """A stage of independent nodes in a given order."""
    graph = fx.Graph()
    for name in names:
        graph.create_node("call_function", torch.rand, (1,), {}, name=name)
    return dataclasses.replace(like, graph_module=fx.GraphModule(nn.Module(), graph))


def longest_increasing(values: Sequence[int]) -> int:
    best: list[int] = []
    for index, value in enumerate(values):
        best.append(1 + max((best[i] for i in range(index) if values[i] < value), default=0))
    return max(best, default=0)


@given(st.permutations(range(12)), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
@settings(max_examples=30, deadline=None)
def test_diff_of_random_orders(small: TowerProgram, permutation: list[int], absent: set[int], missing: set[int]) -> None:
    before = [f"n{i}_" for i in range(12) if i not in absent]
    after = [f"n{i}_" for i in permutation if i not in missing]
    like = small.stages["flat"]
    diff = diff_stages(stage_of(before, like), stage_of(after, like))
    check_diff(diff, before, after)
    check_plain(str(diff))
    common = [i for i in permutation if i not in absent | missing]
    assert len(diff.moved) == len(common) - longest_increasing(common)
    assert not diff.rewired


@given(st.permutations(range(30)))
@settings(max_examples=20, deadline=None)
def test_moved_is_minimal(permutation: list[int]) -> None:
    names = [str(i) for i in permutation]
    found = moved([str(i) for i in range(30)], names)
    rest = [i for i in permutation if str(i) not in set(found)]
    assert rest == sorted(rest)
    assert len(rest) == longest_increasing(permutation)
    assert found == [name for name in names if name in set(found)]


def test_ten_thousand_nodes(small: TowerProgram) -> None:
    names = [f"n{i}_" for i in range(10_000)]
    shuffled = random.Random(0).sample(names, len(names))
    diff = diff_stages(stage_of(names, small.stages["flat"]), stage_of(shuffled[:9_000], small.stages["flat"]))
    assert len(diff.removed) + len(diff.moved) + diff.kept == 10_000
    assert len(check_plain(str(diff))) <= 80


def test_only_what_reads_something_else_is_rewired(small: TowerProgram) -> None:
    (change,) = small.diff("flat", "sptt").rewired
    assert (change.node.name, change.reads, change.instead) == ("to_dict", ("output_0",), ("sparse_arch_embedding_bag_collection",))


# Exchanges and towers


def test_exchanges_of_a_diff(uneven: TowerProgram) -> None:
    """3 hosts x 2 ranks, one tower per host: towers of 2 ranks inside a host, peers across 3 hosts."""
    by_name = {node.name: node for node in uneven.diff("classic", "sptt").added}
    tower, peer = by_name["exchange_tower"].exchange, by_name["exchange_peer"].exchange
    assert isinstance(tower, RowsFacts) and isinstance(peer, RowsFacts)
    assert (tower.groups, tower.group_size, tower.crosses_hosts) == (3, 2, False)
    assert (peer.groups, peer.group_size, peer.crosses_hosts) == (2, 3, True)
    assert tower.rows_sent == "sum of B over all 6 ranks"
    assert tower.rows_received == peer.rows_sent == "sum of B over my 3 peers"
    assert peer.rows_received == "B"
    assert peer.columns_received == (40, 40)
    assert tower.across == (0, 0) and peer.inside == (0, 0)
    # One sample per rank: 3 rows to the one other member; one row to each of 2 peers; 4 bytes a value.
    assert tower.inside == tuple(3 * 4 * width for width in tower.columns_sent)
    assert peer.across == tuple(2 * 4 * width for width in peer.columns_sent)
    assert [by_name[name].step for name in ("permute", "exchange_tower", "shuffle", "exchange_peer")] == ["c", "d", "e", "g"]


def test_a_lowered_exchange_is_one_group(uneven: TowerProgram) -> None:
    diff = uneven.diff("sptt", "lowered")
    declared = {node.step: node.exchange for node in diff.removed}
    groups: dict[str, list[str]] = {}
    for node in diff.added:
        assert node.exchange == declared[node.step]
        groups.setdefault(node.group, []).append(node.name)
    parts = ("pack", "out_splits", "in_splits", "all_to_all", "wait", "unpack")
    assert groups.pop("tower_pack") == [f"tower_{part}" for part in parts]
    assert groups.pop("peer_pack") == [f"peer_{part}" for part in parts]
    (ids,) = groups.values()
    assert {"request", "counts", "lengths_pack", "values_all_to_all", "unpack_ids"} <= set(ids)
    assert isinstance(declared["a"], IdsFacts)
    assert declared["a"].features == 5


def test_towers_of_a_diff(uneven: TowerProgram) -> None:
    added = uneven.diff("flat", "towers").added
    assert [node.tower for node in added if node.tower is not None] == [0, 1, 2]
    shares = [share for node in added for share in node.shares]
    lookup = next(node for node in uneven.diff("flat", "sptt").added if node.step == "b")
    assert list(lookup.shares) == shares
    assert [share.features for share in shares] == [tower.features for tower in uneven.plan.towers]
    assert sum(share.columns for share in shares) == uneven.lookups.width


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Exchange, Topology]:
    topology = Topology(draw(st.integers(1, 5)), draw(st.integers(1, 4)))
    towers = draw(st.sampled_from(valid_tower_counts(topology)))
    widths = draw(st.lists(st.integers(0, 9), min_size=topology.world_size, max_size=topology.world_size))
    axes: tuple[Axis, ...] = ("world", "tower", "peer")
    return Exchange(
        draw(st.sampled_from(axes)), TowerGrid.of(topology, towers), tuple(widths), draw(st.sampled_from((2, 4)))
    ), topology


@given(exchanges())
@settings(max_examples=30, deadline=None)
def test_traffic_is_the_exchanges_own(drawn: tuple[Exchange, Topology]) -> None:
    exchange, topology = drawn
    ones = (1,) * topology.world_size
    expected = [exchange.traffic(rank, topology, ones) for rank in range(topology.world_size)]
    assert exchange.traffic_by_rank(topology) == expected
    facts = rows_facts(exchange, topology)
    assert facts.across == (min(a for _, a in expected), max(a for _, a in expected))
    assert facts.inside == (min(i for i, _ in expected), max(i for i, _ in expected))
    assert facts.groups * facts.group_size == topology.world_size
    if not facts.crosses_hosts:
        assert facts.across == (0, 0)


# Size and safety of the output


def test_a_wide_model_reads_on_one_screen_or_two(wide: TowerProgram) -> None:
    assert len(check_plain(str(wide))) < 60
    for before, after in PAIRS:
        assert len(check_plain(str(wide.diff(before, after)))) <= 80


def test_length_does_not_depend_on_ranks() -> None:
    model = flat_model.wide()
    few, many = (towerize(model, Topology(4, ranks_per_host), towers=4) for ranks_per_host in (2, 64))
    assert str(few).count("\n") == str(many).count("\n") - 1  # with 256 ranks some have no table, which is said
    for before, after in PAIRS:
        assert str(few.diff(before, after)).count("\n") == str(many.diff(before, after)).count("\n")


def test_many_towers_have_a_bounded_length() -> None:
    model = flat_model.wide()
    lengths = [str(towerize(model, Topology(hosts, 1)).diff("flat", "towers")).count("\n") for hosts in (8, 16, 128)]
    assert len(set(lengths)) == 1


class ManyCollections(nn.Module):
    """One collection per table, with weights."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.collections = nn.ModuleList(
            EmbeddingBagCollection(
                tables=[EmbeddingBagConfig(name=f"t{i}", embedding_dim=4, num_embeddings=9, feature_names=[f"f{i}"])],
                is_weighted=True,
            )
            for i in range(count)
        )

    def forward(self, sparse: list[KeyedJaggedTensor]) -> torch.Tensor:
        parts = []
        for i, one in enumerate(self.collections):
            parts.append(one(sparse[i]).values())
        return torch.cat(parts, dim=1)


def test_two_hundred_collections_fold_too() -> None:
    program = towerize(ManyCollections(200), Topology(4, 2))
    assert len(check_plain(str(program))) < 60
    assert "4 per id, 4 per weight" in str(program)
    for before, after in PAIRS:
        assert len(check_plain(str(program.diff(before, after)))) <= 80
    assert "... and 199 more like it" in str(program.diff("flat", "towers"))


class Hostile(nn.Module):
    """Names that would break markup, terminals or tables."""

    def __init__(self) -> None:
        super().__init__()
        names = ["[bold]x[/bold]", "gr\u00f6\u00dfe", "a\x1b[31m", "\u4e2d" * 40, "y" * 200, "line\nbreak"]
        self.names = names
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=f"t{i}", embedding_dim=4, num_embeddings=5, feature_names=[n]) for i, n in enumerate(names)
            ]
        )

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.tables(sparse)
        return torch.cat([pooled[name] for name in self.names], dim=1)


def test_hostile_names_do_no_harm() -> None:
    program = towerize(Hostile(), Topology(1, 2))
    check_plain(str(program))
    assert "[bold]x[/bold]" in str(program.diff("towers", "flat"))
    for before, after in PAIRS:
        check_plain(str(program.diff(before, after)))


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_every_width_is_kept(small: TowerProgram, width: int) -> None:
    for before, after in PAIRS:
        check_plain(to_text(small.diff(before, after), width), width)
    check_plain(to_text(small, width), width)


def test_colour_changes_no_character(small: TowerProgram, wide: TowerProgram) -> None:
    for thing in (small, wide, small.diff(), wide.diff("flat", "lowered")):
        console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard", record=True)
        console.print(thing)
        assert "\x1b[" in console.file.getvalue()  # type: ignore[attr-defined]
        shown = console.export_text().rstrip("\n").split("\n")
        assert [line.rstrip() for line in shown] == str(thing).split("\n")


def test_a_certificate_keeps_to_a_line_per_check() -> None:
    checks = tuple(Check(f"outputs, stage {name}", True, "bit for bit", "equal on 4 ranks ('a.b')") for name in STAGES)
    lines = check_plain(str(Certificate("M", "abc", (1, 1), checks)))
    assert len(lines) == 2 + 1 + len(STAGES)
    assert lines[-1] == "    ok  outputs, stage lowered  equal on 4 ranks"


def test_a_certificate_shows_failures_in_full() -> None:
    text = f"rank 0: \u2260\n{'word ' * 40}end"
    shown = str(Certificate("M", "abc", (1,), (Check("outputs", False, "bit for bit", text),)))
    check_plain(shown)
    assert "DIFFERS" in shown and "FAIL" in shown and "see below" in shown
    assert shown.split()[-41:] == ["word"] * 40 + ["end"]
    assert "\\u2260" in shown


# Words


def test_names_fold() -> None:
    assert listed(["a", "b"], 40) == "a, b"
    assert listed([f"t{i}" for i in range(200)], 40) == "t0..t199"
    assert listed(["t0", "t1"], 40) == "t0, t1"
    assert listed([f"t{3 * i}" for i in range(100)], 21) == "t0, t3 and 98 more"
    assert listed([*(f"t{i}" for i in range(18)), *(f"x{7 * i}" for i in range(182))], 22) == "t0..t17 and 182 more"
    assert listed(["n" * 60], 20) == "nnnnnn...nnnnnnnnnnn"
    assert listed(["t08", "t09", "t10"], 40) == "t08, t09, t10"  # counting with leading zeros is not guessed at
    assert listed([], 40) == ""


def test_what_tells_names_apart_is_kept() -> None:
    users = ["user_id", "item_id", "hour", "weekday", "genre", "city", "age", "zip"]
    assert listed([f"embedding_dict.{name}" for name in users], 21) == "...user_id and 7 more"
    assert listed([f"embedding_dict.{name}" for name in users], 45) == "...user_id, ...item_id, ...hour and 5 more"
    assert listed([f"{name}.embedding.weight" for name in users], 21) == "user_id... and 7 more"
    assert listed([f"model.tables.C{i}" for i in range(1, 27)], 21) == "...C1..C26"
    assert listed([f"the_{name}_of_the_customer" for name in users], 24) == "the...r_id... and 7 more"
    assert listed(["item", "item@batch['history']", "item@batch['candidate']"], 21) == "item and 2 more"
    # Nothing is left off where all names fit, and no name is left without anything.
    assert listed(["embedding_dict.a", "embedding_dict.b"], 40) == "embedding_dict.a, embedding_dict.b"
    assert listed(["a_long_name.", "a_long_name.b", "a_long_name.c"], 21) == "a_...name. and 2 more"


@given(st.lists(st.text(min_size=1, max_size=12), max_size=30), st.integers(20, 60))
def test_listed_fits_and_counts_all(names: list[str], width: int) -> None:
    text = listed(names, width)
    assert text.isascii() and text.isprintable()
    assert len(text) <= width


def test_numbers_and_sizes() -> None:
    assert [size(x) for x in (0, 999, 1000, 1024, 1536, 10**6, 999 * 1024, 1000 * 1024, 5 * 2**40)] == [
        "0 B",
        "999 B",
        "0.977 KiB",
        "1 KiB",
        "1.5 KiB",
        "977 KiB",
        "999 KiB",
        "0.977 MiB",
        "5 TiB",
    ]
    assert size_span((96, 96)) == "96 B"
    assert size_span((32, 96)) == "32..96 B"
    assert size_span((96, 2048)) == "96 B..2 KiB"
    assert (span((3, 3)), span((3, 4000))) == ("3", "3..4,000")
    assert (spanned((1, 1), "column"), spanned((1, 2), "column")) == ("1 column", "1..2 columns")
    assert (ranks([3]), ranks([0, 1]), ranks(range(8, 16)), ranks([0, 2, 4])) == (
        "rank 3",
        "ranks 0, 1",
        "ranks 8..15",
        "ranks 0, 2, 4",
    )


def test_places_are_short() -> None:
    assert place("/home/user/code/models/dlrm.py:102") == "models/dlrm.py:102"
    assert place("C:\\work\\models\\dlrm.py:7") == "models/dlrm.py:7"
    assert place("/a/a_very_long_directory_name/a_long_model.py:1234") == "a_long_model.py:1234"
    assert len(place(f"/a/{'long' * 20}.py:1234")) == 26 and place(f"/a/{'long' * 20}.py:1234").endswith(".py:1234")
    assert place(None) == ""
    assert short_places("/home/a/b/c.py:3: `x`: bad, see /x/y/z.py:9") == "b/c.py:3: `x`: bad, see y/z.py:9"
    assert plain("\u00e9\n\x1b") == "\\xe9\\n\\x1b"
    assert [cut("abcdef", width) for width in (6, 5, 3, 0)] == ["abcdef", "ab...", "abc", ""]


@given(st.lists(st.integers(0, 2), max_size=40))
def test_fold_loses_nothing(shapes: list[int]) -> None:
    runs = fold(range(len(shapes)), shapes)
    start = 0
    for run in runs:
        length = len(run.pattern)
        end = start + length * run.repeats
        assert list(run.pattern) == list(range(start, start + length))
        assert list(run.last) == list(range(end - length, end))
        assert shapes[start:end] == shapes[start : start + length] * run.repeats
        start = end
    assert start == len(shapes)


def test_fold_finds_patterns() -> None:
    assert [(len(run.pattern), run.repeats) for run in fold("aaaaaa", "aaaaaa")] == [(1, 6)]
    assert [(len(run.pattern), run.repeats) for run in fold("xababababy", "xababababy")] == [(1, 1), (2, 4), (1, 1)]
    assert [run.repeats for run in fold("aaa", "aaa")] == [1, 1, 1]  # folding would save one line
