"""The examples, started as a user starts them, and what the demo and the study of AUC say of tower modules."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import tower_models
from rich.console import Console

from dmt_compile import CrossTower, DLRMTower, PassThrough, Topology, towerize
from examples import demo, tower_quality
from examples.data import RecDataset, SparseFeature
from examples.tower_modules import TowerModule, compression, described, tower_module, tower_program
from examples.training import Settings, build_model

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "examples" / "train_dlrm.py")


def _run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, *arguments: str) -> str:
    """What a script prints that is run in this process, which has imported what takes most of its time."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    capsys.readouterr()
    with torch.random.fork_rng(devices=[]):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as done:
            assert not done.code
    return capsys.readouterr().out


def _run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_plain_models() -> None:
    output = _run(str(ROOT / "examples" / "plain_models.py"))
    for name, numbers in (("WideAndDeep", "12 +12 +0"), ("FactorisationMachine", "12 +12 +0"), ("NextItem", "4 +3 +1")):
        assert re.search(rf"^{name} .* {numbers} +yes *$", output, re.MULTILINE), output
    assert "FactorisationMachine: factorisation machine, concat-MLP, linear term" in output
    assert "NextItem.position.weight: plain_models.py:" in output
    assert all(len(line) <= 80 for line in output.split("\n"))


def _losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss of rank 0: ([0-9.]+)", output)]


@pytest.mark.slow
@pytest.mark.multi_rank
def test_train_dlrm_under_torchrun() -> None:
    output = _run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT, "--hosts", "2", "--steps", "21")
    losses = _losses(output)
    assert len(losses) == 3
    across = [int(sent.replace(",", "")) for sent in re.findall(r"([0-9,]+) across hosts", output)]
    assert len(across) == 2
    assert min(across) > 0
    assert losses[-1] < losses[0]
    assert output.count("tensors loaded into the flat model") == 1


@pytest.mark.slow
@pytest.mark.multi_rank
def test_compile_plain_under_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = str(ROOT / "examples" / "compile_plain.py")
    small = ("--hosts", "2", "--steps", "11", "--inner", "eager")
    output = _run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", script, *small)
    losses = _losses(output)
    assert len(losses) == 2
    assert losses[-1] < losses[0]
    assert output.count("tensors loaded into the flat model") == 1
    assert "1 graph of Dynamo's: 1 with lookups that owners serve" in _run_here(monkeypatch, capsys, script, "--explain")


def test_train_dlrm_on_one_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = _run_here(monkeypatch, capsys, SCRIPT)
    losses = _losses(output)
    assert losses[-1] < losses[0]
    assert "not started with torchrun" in output


# Tower modules


def test_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """The passage on tower modules, behind the script that it refers to, prints what it says and runs to its end."""
    text = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    codes = [code for language, code in blocks if language == "python"]
    (script,) = [code for code in codes if code.startswith("import torch\n")]
    first, others = [code for code in codes if "DLRMTower" in code]
    printed = blocks[blocks.index(("python", first)) + 1][1]
    names: dict[str, object] = {}
    exec(script + "\ntopology = dmt_compile.Topology(hosts=2, ranks_per_host=2)\n", names)
    capsys.readouterr()
    exec(first, names)
    assert capsys.readouterr().out == printed
    exec(others, names)


def test_docs_of_towers(capsys: pytest.CaptureFixture[str]) -> None:
    """The module with a warm start of its own can be kept, and the code behind the README's complexity prints what stands there."""
    text = (ROOT / "docs" / "towers.md").read_text("utf-8")
    codes = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (gated,) = [code for code in codes if "class Gated" in code]
    (counted,) = [code for code in codes if "complexity()" in code]
    (lists,) = [code for code in codes if "json.loads" in code]
    names: dict[str, Any] = {"torch": torch, "json": json}
    exec(gated, names)
    case = tower_models.CASES["dot"]
    inputs = case.inputs(40, 7)
    made, its = (
        towerize(case.build(), Topology(2, 1), example_inputs=inputs, tower_module=module, init="preserve")
        for module in (names["Gated"], DLRMTower(c=1, p=0, dim=2))
    )
    torch.testing.assert_close(made(*inputs), its(*inputs))
    names["state"] = made.state_dict()
    exec(lists, names)
    assert names["towers"] == [list(tower.features) for tower in made.plan.towers]
    exec(counted, names)
    assert f"```\n{capsys.readouterr().out}```" in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dlrm:c=2,p=1,dim=8", DLRMTower(2, 1, 8)),
        ("dlrm:dim=4", DLRMTower(1, 0, 4)),
        ("cross:dim=16,layers=2,rank=4", CrossTower(16, 2, 4)),
        ("pass", PassThrough()),
    ],
)
def test_tower_module_is_read(text: str, expected: TowerModule) -> None:
    assert tower_module(text) == expected


WRONG = {
    ("--tower-module", "dcn:dim=8"): r"--tower-module: 'dcn:dim=8': expected dlrm:.* cross:.* or pass",
    ("--tower-module", "dlrm:d=8"): r"found 'd=8', but dlrm takes once each of c, p, dim, as name=number",
    ("--tower-module", "dlrm:dim"): r"found 'dim', but dlrm takes",
    ("--tower-module", "cross:dim=8,dim=4"): r"found 'dim=4', but cross takes once each of dim, layers, rank",
    ("--tower-module", "pass:dim=8"): r"found 'dim=8', but pass takes nothing",
    ("--tower-module", "dlrm:dim=wide"): r"dim is 'wide', expected a whole number",
    ("--tower-module", "dlrm:c=1"): r"give dim=, the width",
    ("--tower-module", "dlrm:c=0,p=0,dim=8"): r"makes no vectors at all",
    ("--tower-module", "cross:dim=8,rank=0"): r"rank must be a whole number, 1 or more, got 0",
    ("--tower-module", "pass", "--ratio", "2"): r"--ratio: not allowed with argument --tower-module",
    ("--ratio", "3"): r"--ratio: invalid choice: 3",
    ("--ratio", "8", "--dim", "12"): r"--ratio 8: embeddings of width 12 cannot be made 8 times narrower",
    ("--init", "preserve"): r"--init preserve: give --tower-module or --ratio",
    ("--expand",): r"--expand: give --tower-module or --ratio",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_demo_refuses(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main(arguments)
    assert caught.value.code == 2
    assert re.search(WRONG[arguments], " ".join(capsys.readouterr().err.split()))


def _criteo(path: Path, rows: int) -> Path:
    """A file whose label is the first category."""
    ids = torch.randint(0, 40, (rows, 26), generator=torch.Generator().manual_seed(0)).tolist()
    lines = ["\t".join([str(own[0] % 2), *["1"] * 13, *(f"{one:x}" for one in own)]) for own in ids]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.multi_rank
@pytest.mark.parametrize(
    ("arguments", "ratio", "rows"),
    [
        (
            ("--tower-module", "dlrm:dim=16", "--init", "preserve"),
            "1.00",
            ("flat", "towers, warm start", "towers, trained on"),
        ),
    ],
)
def test_demo_with_tower_modules(
    arguments: tuple[str, ...],
    ratio: str,
    rows: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = _criteo(tmp_path / "tiny.tsv", 500)
    size = ("--hosts", "2", "--ranks-per-host", "1", "--criteo-rows", "50")
    script = str(ROOT / "examples" / "demo.py")
    output = _run_here(monkeypatch, capsys, script, "--data", "criteo", str(file), *size, *arguments)
    assert "tower 1: 13 features of width 16" in output
    result = output[output.index("Tower modules, one process") :]
    found = {title.strip(): cells for title, *cells in (line.split("│")[1:-1] for line in result.split("\n") if "│" in line)}
    assert tuple(found) == rows
    aucs = {title: float(cells[2]) for title, cells in found.items()}
    assert all(0 <= auc <= 1 for auc in aucs.values())
    assert {cells[0].strip() for title, cells in found.items() if title != "flat"} == {ratio}
    if "preserve" in arguments:
        assert aucs["towers, warm start"] == aucs["flat"]


def _data(rows: int, seed: int) -> RecDataset:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, 10, (rows,), generator=generator) for _ in range(4)]
    sparse = tuple(SparseFeature.single(name, 10, one) for name, one in zip("abcd", ids, strict=True))
    return RecDataset("made up", ("x",), torch.randn(rows, 1, generator=generator), sparse, (ids[0] % 2).float())


SMALL = Settings(None, 0, 0, hosts=2, ranks_per_host=1, epochs=1, batch_size=32, seed=0, dim=8)


@pytest.mark.parametrize(
    ("module", "expected"), [(DLRMTower(1, 0, 2), 4.0), (DLRMTower(1, 1, 4), 32 / 24), (CrossTower(8, 1, 2), 2.0)]
)
def test_compression(module: TowerModule, expected: float) -> None:
    data = _data(64, 0)
    program = tower_program(SMALL, build_model(SMALL, data), data, module)
    assert compression(program) == pytest.approx(expected)


def test_what_a_warm_start_cannot_keep_is_said() -> None:
    data = _data(64, 0)
    program = tower_program(SMALL, build_model(SMALL, data), data, CrossTower(8, 1, 2), "preserve")
    assert program.tower_model is not None and program.tower_model.redrawn
    text = described(program)
    assert "2 features of width 8, 1 vector of width 8 (16 columns, 8 cross hosts)" in text
    assert f"drawn anew, because they do not follow from the flat model's weights: {program.tower_model.redrawn[0]}" in text
    kept = tower_program(SMALL, build_model(SMALL, data), data, CrossTower(8, 1, 2), "preserve", expand=True)
    assert "drawn anew" not in described(kept) and "expanded behind the exchange" in described(kept)


def test_study_of_auc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower_quality, "RATIOS", (8,))
    train, test = _data(256, 0), _data(128, 1)
    drawn, warm = tower_quality.study(SMALL, (0, 1), 1, train, test, Console(quiet=True))
    assert {title: row.ratio for title, row in drawn.items()} == {
        **{"flat": 1, "SPTT": 1},
        **{"towers of 1": 8},
    }
    assert tower_quality.verdict(drawn["SPTT"].auc, drawn["flat"].auc) == "equal"
    assert warm["towers of 8"].auc == warm["flat"].auc == drawn["flat"].auc
    assert warm["towers of 1"].auc != warm["flat"].auc
    assert all(len(row.auc) == len(row.loss) == 2 for row in (*drawn.values(), *warm.values()))
    assert list(warm)[3:] == [f"{title}, trained on" for title in list(warm)[:3]]


@pytest.mark.parametrize(
    ("auc", "verdict"),
    [
        ((0.7, 0.8, 0.9), "equal"),
        ((0.5, 0.6, 0.65), "apart"),
        ((0.95, 0.92, 0.91), "apart"),
        ((0.69, 0.79, 0.89), "every seed"),
        ((0.69, 0.81, 0.9), "within spread"),
    ],
)
def test_what_the_spread_tells(auc: tuple[float, ...], verdict: str) -> None:
    assert tower_quality.verdict(auc, (0.7, 0.8, 0.9)) == verdict
