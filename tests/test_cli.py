"""The ``dmt-compile`` command, end to end: what it prints, its exit status, and that its own code shows in no traceback."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")

import dmt_compile
from dmt_compile import Topology, TowerPlan, towerize
from dmt_compile.cli import main

MODEL = """
import torch
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.modules.embedding_configs import EmbeddingBagConfig

import beside


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=4, num_embeddings=10, feature_names=[f"f{i}"])
            for i in range(beside.TABLES)
        ]
        self.tables = EmbeddingBagCollection(tables=configs)

    def forward(self, sparse):
        return self.tables(sparse).values()


class Flat(nn.Module):
    def forward(self, x):
        return x


def make_model():
    return Model()


def broken():
    return deeper(0)


def deeper(x):
    return 1 / x


def leaves():
    raise SystemExit(7)


def needs(argument):
    return Model()


def nothing():
    return None


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.item = nn.Embedding(10, 4)
        self.position = nn.Embedding(5, 4)
        self.top = Top()

    def forward(self, items, scale):
        rows = self.item(items) + self.position(torch.arange(items.shape[1]))
        return self.top(rows.sum(1) * scale)


class Top(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else self.linear(-x)


def with_inputs():
    return Plain(), (torch.zeros(3, 5, dtype=torch.long), torch.ones(3, 1))


def with_keywords():
    return Plain(), (torch.zeros(3, 5, dtype=torch.long),), {"scale": torch.ones(3, 1)}


keywords = with_keywords()


def wrong_keywords():
    return Plain(), (torch.zeros(3, 5, dtype=torch.long),), (torch.ones(3, 1),)


def keywords_twice():
    return Plain(), {"items": torch.zeros(3, 5, dtype=torch.long)}, {"scale": torch.ones(3, 1)}


def plain():
    return Plain()


def three():
    return Plain(), torch.zeros(3), 1


def wrong_inputs():
    return Plain(), torch.zeros(3)


class Holder:
    make = Model


model = Model()
number = 3
"""

RANKS = ("--hosts", "2", "--ranks-per-host", "3")


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "beside.py").write_text("TABLES = 6\n")
    path = tmp_path / "user_model.py"
    path.write_text(MODEL)
    return str(path)


@pytest.fixture(autouse=True)
def fresh_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test imports the user's files anew."""
    for name in ("user_model", "beside", "user_broken", "dmt_compile_explains_user_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said on stderr by a run that must end with status 2 and print nothing else."""
    assert main(["explain", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "dmt-compile: error: " in err
    assert "cli.py" not in err and "importlib" not in err
    return err


# explain


@pytest.mark.parametrize("name", ["make_model", "model", "Model", "Holder.make"])
def test_explain(file: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = list(sys.path)
    assert main(["explain", f"{file}:{name}", *RANKS]) == 0
    out, _ = capsys.readouterr()
    assert "Model: 2 towers on 2 hosts x 3 ranks" in out
    assert "flat -> sptt: " in out
    assert "peer AlltoAll in 3 groups of 2 ranks, crosses hosts" in out
    assert "user_model.py:" in out
    assert all(len(line.rstrip()) <= 80 for line in out.split("\n"))
    assert sys.path == path


def test_explain_prints_what_the_program_prints(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{file}:model", *RANKS, "--stages", "sptt, lowered", "--width", "80"]) == 0
    out, _ = capsys.readouterr()
    program = towerize(sys.modules["user_model"].model, Topology(2, 3))
    expected = f"{program}\n\n{program.diff('sptt', 'lowered')}\n"
    assert [line.rstrip() for line in out.split("\n")] == expected.split("\n")


def test_explain_a_module(file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(file).parent)
    assert main(["explain", "user_model:make_model", *RANKS, "--towers", "6", "--partition", "strided"]) == 0
    out, _ = capsys.readouterr()
    assert "6 towers on 2 hosts x 3 ranks" in out
    assert "strided" in out


def test_explain_a_width(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{file}:model", *RANKS, "--width", "60"]) == 0
    out, _ = capsys.readouterr()
    assert max(len(line.rstrip()) for line in out.split("\n")) <= 60


def test_a_plan_is_written_and_read_back(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "plan.json"
    assert main(["explain", f"{file}:model", *RANKS, "--towers", "6", "--save-plan", str(saved)]) == 0
    first, _ = capsys.readouterr()
    assert len(TowerPlan.from_json(saved.read_text()).towers) == 6
    assert main(["explain", f"{file}:model", "--plan", str(saved)]) == 0
    second, _ = capsys.readouterr()
    assert first == second + f"plan written to {saved}\n"


def test_a_file_that_is_called_like_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    (tmp_path / "beside.py").write_text("TABLES = 6\n")
    (tmp_path / "json.py").write_text(MODEL)
    assert main(["explain", f"{tmp_path / 'json.py'}:model", *RANKS]) == 0
    assert sys.modules["json"] is json


def test_a_model_with_example_inputs(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{file}:with_inputs", *RANKS, "--width", "80"]) == 0
    out, _ = capsys.readouterr()
    lines = [line.rstrip() for line in out.split("\n")]
    text = " ".join(out.split())
    # The lookup with its style and line, the replicated table and the leaf with their reasons.
    assert re.search(r"item +1 +20 +5 ids: rows +.*user_model\.py:\d+", out)
    assert "position.weight, 80 B" in lines[lines.index("Replicated: 1 table on every rank") + 2]
    assert "80 B on each of 6 ranks; at most 80 B of gradients all-reduced in every step" in text
    assert "its ids are of shape (5,) for any number of samples" in text
    assert "Kept whole: 1 submodule that could not be traced top" in text
    assert max(len(line) for line in lines) <= 80


@pytest.mark.parametrize("name", ["with_keywords", "keywords"])
def test_a_model_with_example_keywords(name: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are as good as the same inputs given by position."""
    found = []
    for one in (name, "with_inputs"):
        assert main(["explain", f"{file}:{one}", *RANKS]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] and "5 ids: rows" in found[0]


# Bad input


def test_no_such_place(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no file" in refused(capsys, f"{tmp_path}/nothing.py:model", *RANKS)
    assert "did you mean" in refused(capsys, f"{file.removesuffix('.py')}:model", *RANKS)
    assert "there is no module 'no_such_module'" in refused(capsys, "no_such_module:model", *RANKS)
    assert "there is no module 'no_such_module'" in refused(capsys, "no_such_module.inner:model", *RANKS)
    assert "no 'make_modle'; did you mean make_model" in refused(capsys, f"{file}:make_modle", *RANKS)
    assert "no 'Holder.made'; did you mean make" in refused(capsys, f"{file}:Holder.made", *RANKS)
    for target in (file, f"{file}:", ":model", "model"):
        assert "name a model as MODULE:NAME or FILE.py:NAME" in refused(capsys, target, *RANKS)


def test_a_factory_that_raises(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, f"{file}:broken", *RANKS)
    assert err.startswith("Traceback (most recent call last):\n")
    assert "in broken\n    return deeper(0)" in err and "in deeper\n    return 1 / x" in err
    assert "ZeroDivisionError: division by zero" in err
    assert err.endswith(f"error: broken() of {file} raised ZeroDivisionError\n")
    assert "raised SystemExit" in refused(capsys, f"{file}:leaves", *RANKS)


def test_a_factory_that_cannot_be_called(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, f"{file}:needs", *RANKS)
    assert "Traceback" not in err and "missing 1 required positional argument: 'argument'" in err
    assert "returned a tuple (Plain, Tensor, int), (model, example_inputs) is needed" in refused(capsys, f"{file}:three", *RANKS)
    err = refused(capsys, f"{file}:wrong_keywords", *RANKS)
    assert "a tuple (Plain, tuple, tuple)" in err and "(model, example_inputs, example_kwargs) with a dict of keyword arg" in err
    assert "example_inputs is a dict of keyword arguments" in refused(capsys, f"{file}:keywords_twice", *RANKS)
    assert "pass example_inputs=" in refused(capsys, f"{file}:plain", *RANKS)
    assert "example_inputs must be a tuple" in refused(capsys, f"{file}:wrong_inputs", *RANKS)
    assert "returned NoneType, a torch.nn.Module is needed" in refused(capsys, f"{file}:nothing", *RANKS)
    assert "neither a model nor a function that makes one, but int" in refused(capsys, f"{file}:number", *RANKS)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise ValueError('wrong')", "ValueError: wrong"),
        ("import no_such_library", "No module named 'no_such_library'"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_imported(
    code: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_broken.py").write_text(f"\n{code}\n")
    monkeypatch.chdir(tmp_path)
    for target in (str(tmp_path / "user_broken.py"), "user_broken"):
        err = refused(capsys, f"{target}:model", *RANKS)
        assert expected in err
        assert 'user_broken.py", line 2' in err
        assert f"importing {target} raised " in err
        assert "user_broken" not in sys.modules


def test_what_the_compiler_refuses(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "4 towers do not fit 2 hosts x 3 ranks" in refused(capsys, f"{file}:model", *RANKS, "--towers", "4")
    assert "no embedding lookup was found" in refused(capsys, f"{file}:Flat", *RANKS)
    err = refused(capsys, f"{file}:model", *RANKS, "--stages", "flat,fast")
    assert "stage must be one of flat, towers" in err and "'fast'" in err
    assert "Traceback" not in err


def test_plans_that_cannot_be_used(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    assert "cannot read the plan" in refused(capsys, f"{file}:model", "--plan", str(plan))
    plan.write_text("{")
    assert "a tower plan must be JSON" in refused(capsys, f"{file}:model", "--plan", str(plan))
    plan.write_bytes(b"\xff\xfe")
    assert "cannot read the plan" in refused(capsys, f"{file}:model", "--plan", str(plan))
    err = refused(capsys, f"{file}:model", "--plan", str(plan), *RANKS, "--towers", "2")
    assert "--plan says all that --hosts, --ranks-per-host, --towers would say" in err
    assert "give --hosts and --ranks-per-host, or --plan" in refused(capsys, f"{file}:model", "--hosts", "2")
    assert "cannot write the plan" in refused(capsys, f"{file}:model", *RANKS, "--save-plan", str(tmp_path / "no" / "plan.json"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["explode"], "invalid choice: 'explode'"),
        (["explain"], "MODULE_OR_FILE:NAME"),
        (["explain", "m:f", "--hosts", "0"], "'0' is not a whole number of at least 1"),
        (["explain", "m:f", "--hosts", "two"], "'two' is not a whole number"),
        (["explain", "m:f", "--width", "10"], "at least 40 columns are needed"),
        (["explain", "m:f", "--stages", "flat"], "two names of stages"),
        (["explain", "m:f", "--partition", "random"], "invalid choice: 'random'"),
    ],
)
def test_wrong_arguments(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert expected in capsys.readouterr().err


# The rest


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"dmt-compile {dmt_compile.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["explain", "--help"], ["doctor", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 0
    assert "usage: dmt-compile" in capsys.readouterr().out


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from dmt_compile import doctor

    for ok in (True, False):
        problem = doctor.Check("gloo", "ok" if ok else "problem", "as told by the test")
        found = doctor.Diagnosis("0", "3", "here", (), (problem,))
        monkeypatch.setattr(doctor, "diagnose", lambda found=found: found)
        assert main(["doctor", "--width", "70"]) == (0 if ok else 1)
        assert "as told by the test" in capsys.readouterr().out


def test_the_command_itself(file: str) -> None:
    """In a process of its own: nothing but the output on stdout, and no noise of the libraries on stderr."""
    code = "import sys; from dmt_compile.cli import main; sys.exit(main())"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, "explain", f"{file}:model", *RANKS],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("Model: 2 towers")
    assert "\x1b" not in run.stdout
    assert "is_fx_tracing" not in run.stderr
