"""versions.py and doctor.py on every kind of installation, mostly simulated; and the packaging files."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed as dist
from rich.console import Console

from dmt_compile import doctor, versions
from dmt_compile.errors import DependencyError
from dmt_compile.render.doctor import diagnosis_view

ROOT = Path(__file__).resolve().parent.parent
GOOD = {"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.8.0", "torchrec": "1.8.0", "sympy": "1.14", "rich": "15"}

needs_torchrec = pytest.mark.skipif(not versions.torchrec_installed(), reason="TorchRec is not installed")

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Simulate an installation: distributions by name, and the errors that importing a package raises.

    Nothing real is imported: a second real import would register FBGEMM's operators twice.
    """
    real_import = importlib.import_module

    def apply(dists: dict[str, str], failing: dict[str, list[Exception]] | None = None) -> None:
        failures = {name: list(errors) for name, errors in (failing or {}).items()}
        present = {name for name, provided in versions.DISTRIBUTIONS.items() if set(provided) & set(dists)}

        def version(name: str) -> str:
            if name in dists:
                return dists[name]
            raise importlib.metadata.PackageNotFoundError(name)

        def import_module(name: str, package: str | None = None) -> object:
            if name not in versions.DISTRIBUTIONS:
                return real_import(name, package)
            if failures.get(name):
                raise failures[name].pop(0)
            if name not in present:
                raise ModuleNotFoundError(f"No module named '{name}'", name=name)
            if name == "torch":
                operators = SimpleNamespace(asynchronous_complete_cumsum=None)
                cuda = "13.0" if "+cu" in dists["torch"] and "+cpu" not in dists["torch"] else None
                return SimpleNamespace(ops=SimpleNamespace(fbgemm=operators), version=SimpleNamespace(cuda=cuda))
            if name in ("torchrec", "fbgemm_gpu") and name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
            return sys.modules.get(name)

        for name in ("torchrec", "fbgemm_gpu"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib, "import_module", import_module)
        monkeypatch.setattr(versions, "_importable", lambda package: False)
        monkeypatch.setattr(versions, "_failures", {})
        monkeypatch.setattr(versions, "_warned", False)
        # The real capabilities of this machine are another test's matter.
        monkeypatch.setattr(doctor, "_fbgemm_ops", lambda: doctor.Check("fbgemm ops", "ok", "simulated"))
        monkeypatch.setattr(doctor, "_gloo", lambda: doctor.Check("gloo", "ok", "simulated"))

    return apply


def without(*names: str, **others: str) -> dict[str, str]:
    """GOOD without some distributions, with others (underscores for hyphens) added or replaced."""
    kept = {name: version for name, version in GOOD.items() if name not in names}
    return kept | {name.replace("_", "-"): version for name, version in others.items()}


def shown(diagnosis: doctor.Diagnosis) -> str:
    """The rich view as text, 80 columns."""
    console = Console(width=80, force_terminal=False, color_system=None, record=False)
    with console.capture() as capture:
        console.print(diagnosis_view(diagnosis))
    return capture.get()


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


# require_torchrec


@needs_torchrec
def test_require_torchrec_gives_the_real_module() -> None:
    module = versions.require_torchrec()
    assert module is sys.modules["torchrec"]
    assert hasattr(module, "EmbeddingBagCollection")


@pytest.mark.parametrize(
    ("gone", "at_fault"),
    [
        (("torchrec",), "torchrec"),
        (("fbgemm-gpu-cpu",), "fbgemm_gpu"),
        (("torchrec", "fbgemm-gpu-cpu"), "fbgemm_gpu"),
    ],
)
def test_what_is_missing_is_named_with_what_fits(install: Install, gone: tuple[str, ...], at_fault: str) -> None:
    install(without(*gone))
    with pytest.raises(DependencyError) as caught:
        versions.require_torchrec()
    text = str(caught.value)
    assert f"TorchRec cannot be used: {at_fault} is not installed" in text
    assert "torch 2.13.0+cpu" in text
    assert str(versions.FITS[0]) in text
    assert "pip install fbgemm-gpu-cpu==1.8.0\n" in text
    assert "pip install --no-deps torchrec==1.8.0" in text or "torchrec" not in gone
    assert isinstance(caught.value, ImportError)


def test_a_package_that_was_missing_can_be_installed_later(install: Install) -> None:
    install(without("torchrec"))
    with pytest.raises(DependencyError):
        versions.require_torchrec()
    failures = versions._failures
    install(GOOD)
    versions._failures.update(failures)  # as in a notebook: the same process
    assert versions.require_torchrec() is sys.modules["torchrec"]


@pytest.mark.parametrize("package", ["fbgemm_gpu", "torchrec"])
@pytest.mark.parametrize(
    "error",
    [
        ImportError("cannot import name 'x'"),
        ModuleNotFoundError("No module named 'tensordict'", name="tensordict"),
        OSError("fbgemm.so: undefined symbol: _ZN3c10\nand more lines"),
        RuntimeError("operator registered twice"),
        AttributeError("'_OpNamespace' 'fbgemm' object has no attribute 'x'"),
        TypeError("unexpected keyword"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failing_import_is_explained_with_its_first_reason(install: Install, package: str, error: Exception) -> None:
    echo = ImportError("cannot import from a partially initialised module")
    install(GOOD, {package: [error, echo, echo]})
    for _ in range(2):
        with pytest.raises(DependencyError) as caught:
            versions.require_torchrec()
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        assert f"{package} does not load: {reason}" in str(caught.value)
        assert "and more lines" not in str(caught.value)
        assert caught.value.__cause__ is error


def test_the_reason_behind_a_wrapped_error_is_shown() -> None:
    wrapped = OSError("Could not load this library: x.so")
    wrapped.__cause__ = OSError("x.so: undefined symbol: _ZN3c10")
    assert versions.describe(wrapped) == "OSError: x.so: undefined symbol: _ZN3c10"
    assert versions.describe(RuntimeError()) == "RuntimeError"


def test_operators_that_are_not_registered_count_as_not_loaded(install: Install) -> None:
    install(GOOD)
    bare = SimpleNamespace(ops=SimpleNamespace(fbgemm=SimpleNamespace()), version=SimpleNamespace(cuda=None))
    fake = importlib.import_module

    def import_module(name: str, package: str | None = None) -> object:
        return bare if name == "torch" else fake(name, package)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib, "import_module", import_module)
        with pytest.raises(DependencyError, match=r"fbgemm_gpu does not load: AttributeError"):
            versions.require_torchrec()


# Versions that fit and versions that do not


UNFIT = [
    (without(fbgemm_gpu_cpu="1.7.0"), "fbgemm-gpu-cpu 1.7.0 does not fit torch 2.13, which needs 1.8"),
    (without(fbgemm_gpu_cpu="1.9.0"), "fbgemm-gpu-cpu 1.9.0 does not fit torch 2.13, which needs 1.8"),
    (without(torchrec="1.7.0"), "torchrec 1.7.0 does not fit torch 2.13, which needs 1.8"),
    (without(torch="2.12.1+cpu"), "torch 2.12.1+cpu is not in the table"),
    (without("torchrec", torchrec_nightly="2026.5.1"), "torchrec-nightly 2026.5.1 does not fit"),
    (without(fbgemm_gpu="1.8.0"), "fbgemm-gpu-cpu 1.8.0 and fbgemm-gpu 1.8.0 are both installed"),
]


@pytest.mark.parametrize(("dists", "text"), UNFIT, ids=[text for _, text in UNFIT])
def test_unfit_versions_that_fail_to_load_name_those_that_fit(install: Install, dists: dict[str, str], text: str) -> None:
    install(dists, {"fbgemm_gpu": [OSError("undefined symbol")]})
    with pytest.raises(DependencyError) as caught:
        versions.require_torchrec()
    assert text in str(caught.value)
    assert str(versions.FITS[0]) in str(caught.value)


@pytest.mark.parametrize(("dists", "text"), UNFIT, ids=[text for _, text in UNFIT])
def test_unfit_versions_that_load_are_used_after_one_warning(
    install: Install, dists: dict[str, str], text: str, recwarn: pytest.WarningsRecorder
) -> None:
    install(dists)
    assert versions.require_torchrec() is versions.require_torchrec()
    (warning,) = recwarn.list
    assert text in str(warning.message)
    assert str(versions.FITS[0]) in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize(
    "dists",
    [
        GOOD,
        without(torch="2.13.1"),
        without(fbgemm_gpu_cpu="1.8.3+cpu", torchrec="1.8.1+cpu"),
        without("fbgemm-gpu-cpu", torch="2.13.0+cu130", fbgemm_gpu="1.8.0"),
        without("torchrec", "fbgemm-gpu-cpu"),
    ],
)
def test_patch_releases_and_build_labels_fit(install: Install, dists: dict[str, str]) -> None:
    install(dists)
    assert versions.installed_mismatch() is None


def test_a_cuda_build_beside_a_cpu_torch_is_named_as_the_cause(install: Install) -> None:
    install(without("fbgemm-gpu-cpu", fbgemm_gpu="1.8.0"), {"fbgemm_gpu": [OSError("libcuda.so.1: not found")]})
    with pytest.raises(DependencyError) as caught:
        versions.require_torchrec()
    text = str(caught.value)
    assert "fbgemm-gpu 1.8.0 is the CUDA build, and torch is a CPU build" in text
    assert text.index("pip uninstall --yes fbgemm-gpu") < text.index("pip install fbgemm-gpu-cpu==1.8.0")


@pytest.mark.parametrize(
    ("dists", "commands"),
    [
        (
            without("torchrec", "fbgemm-gpu-cpu", torch="2.13.0+cu130"),
            ("pip install fbgemm-gpu==1.8.0 torchrec==1.8.0",),
        ),
        (
            without("torchrec", "fbgemm-gpu-cpu", torch="2.12.0+cu128"),
            ("pip install torch==2.13.0", "pip install fbgemm-gpu==1.8.0 torchrec==1.8.0"),
        ),
        (
            without(torch="2.12.0+cpu", fbgemm_gpu_cpu="1.7.0", torchrec="1.7.0"),
            (
                f"pip install --index-url {versions.TORCH_CPU_INDEX} torch==2.13.0",
                "pip uninstall --yes fbgemm-gpu-cpu",
                "pip install fbgemm-gpu-cpu==1.8.0",
                "pip install tensordict torchmetrics==1.0.3 tqdm pyre-extensions",
                "pip install --no-deps --force-reinstall torchrec==1.8.0",
            ),
        ),
    ],
    ids=["cuda", "cuda, old torch", "cpu, all old"],
)
def test_the_commands_depend_on_what_is_installed(install: Install, dists: dict[str, str], commands: tuple[str, ...]) -> None:
    install(dists)
    assert versions.install_commands() == commands


def test_an_empty_directory_left_by_pip_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left_behind").mkdir()
    (tmp_path / "from_source").mkdir()
    (tmp_path / "from_source" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(versions, "DISTRIBUTIONS", {"left_behind": (), "from_source": ()})
    assert versions.find("left_behind") == ()
    assert versions.find("from_source") == (versions.Distribution("from_source", "unknown"),)


# Imports


BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ImportError("blocked " + name, name=name)
sys.meta_path.insert(0, Blocker())
"""


def run_blocked(blocked: tuple[str, ...], code: str) -> None:
    """Run code in a fresh interpreter in which some packages cannot be imported."""
    program = BLOCKER.format(blocked=blocked) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr


def test_versions_needs_only_the_standard_library() -> None:
    run_blocked(
        ("torch", "torchrec", "fbgemm_gpu", "rich", "sympy"),
        """
        import types
        package = types.ModuleType("dmt_compile")  # without running dmt_compile/__init__.py
        package.__path__ = ["dmt_compile"]
        sys.modules["dmt_compile"] = package
        import dmt_compile.versions
        import dmt_compile.doctor
        assert dmt_compile.versions.fit_for("2.13.0+cpu")
        """,
    )


def test_the_package_imports_and_explains_itself_without_torchrec() -> None:
    run_blocked(
        ("torchrec", "fbgemm_gpu"),
        """
        import dmt_compile.versions as versions
        from dmt_compile.errors import DependencyError
        try:
            versions.require_torchrec()
        except DependencyError as error:
            assert "pip install" in str(error) and "torch 2.13" in str(error), error
        else:
            raise AssertionError("no error")
        assert "torchrec" not in sys.modules
        """,
    )


# The doctor


def test_this_installation_is_well() -> None:
    before = dist.is_initialized()
    diagnosis = doctor.diagnose()
    assert diagnosis.ok, str(diagnosis)
    assert dist.is_initialized() == before
    names = [check.name for check in diagnosis.checks]
    assert names[:2] == ["gloo", "nccl"]
    assert ("fbgemm ops" in names) == versions.torchrec_installed()


def test_gloo_is_checked_beside_an_existing_default_group() -> None:
    if dist.is_initialized():
        pytest.skip("another test's default group is up")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert doctor._gloo().state == "ok"
        assert dist.group.WORLD is world
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_gloo_that_fails_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchif0")
    check = doctor._attempt("gloo", doctor._gloo)
    assert check.state == "problem"
    assert "nosuchif0" in check.detail


BROKEN: list[tuple[dict[str, str], dict[str, list[Exception]], str]] = [
    (GOOD, {"torchrec": [ImportError("cannot import name 'x'")]}, "torchrec does not load: ImportError"),
    (GOOD, {"fbgemm_gpu": [OSError("undefined [symbol] " + "x" * 200)]}, "undefined [symbol]"),
    (without("fbgemm-gpu-cpu"), {}, "fbgemm_gpu is not installed"),
    (without(torch="2.12.0+cpu", torchrec="1.7.0"), {}, "torch 2.12.0+cpu is not in the table"),
    (GOOD, {"sympy": [ImportError("no mpmath")]}, "sympy does not load: ImportError: no mpmath"),
    *((dists, {}, text) for dists, text in UNFIT),
]


@pytest.mark.parametrize(("dists", "failing", "text"), BROKEN, ids=[text for *_, text in BROKEN])
def test_a_broken_installation_is_reported_in_80_columns(
    install: Install, dists: dict[str, str], failing: dict[str, list[Exception]], text: str
) -> None:
    install(dists, failing)
    seen: list[doctor.Diagnosis] = []
    assert doctor.run_doctor(seen.append) == 1
    (diagnosis,) = seen
    assert not diagnosis.ok
    for view in (str(diagnosis), shown(diagnosis)):
        assert squeezed(text) in squeezed(view)
        assert max(map(len, view.splitlines())) <= 80
        if "sympy" in failing:
            assert not diagnosis.fixes
            continue
        assert diagnosis.fixes
        assert squeezed(str(versions.FITS[0])) in squeezed(view)
        for command in diagnosis.fixes:  # on one line, to be copied
            assert f"  {command}\n" in view + "\n" or f"  {command} " in view


@pytest.mark.parametrize("gone", [("torchrec", "fbgemm-gpu-cpu"), ("torchrec",)])
def test_optional_packages_may_be_missing(install: Install, gone: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    install(without(*gone))
    assert doctor.run_doctor() == 0
    out = capsys.readouterr().out
    assert "not installed (optional)" in out
    assert "No problems." in out


# Packaging: what is written in several files agrees


def pyproject() -> dict[str, object]:
    return pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())  # type: ignore[no-any-return]


def test_every_package_is_listed_for_the_wheel() -> None:
    tree = {"dmt_compile": ROOT / "dmt_compile", "dmt_compile.passes": ROOT / "passes"}
    there = {
        ".".join((name, *file.parent.relative_to(folder).parts))
        for name, folder in tree.items()
        for file in folder.rglob("__init__.py")
    }
    listed = set(pyproject()["tool"]["setuptools"]["packages"])  # type: ignore[index]
    assert there == listed, "correct [tool.setuptools] packages in pyproject.toml"
    assert all((folder / "py.typed").exists() for folder in tree.values())


def test_passes_are_imported_under_their_installed_name() -> None:
    wrong = re.compile(r"^\s*(?:import|from)\s+passes\b", re.MULTILINE)
    assert not [file.name for file in (ROOT / "passes").rglob("*.py") if wrong.search(file.read_text())]


def test_the_pinned_requirements_are_a_row_of_the_table() -> None:
    pins = {}
    for name in ("torch-cpu.txt", "cpu.txt"):
        for line in (ROOT / "requirements" / name).read_text().splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                package, _, version = line.partition("==")
                assert version, f"{name}: {line} is not pinned"
                assert package not in pins, f"{package} twice"
                pins[package] = version
    fit = versions.FITS[0]
    assert (pins["torch"], pins["fbgemm-gpu-cpu"], pins["torchrec"]) == (
        f"{fit.torch}+cpu",
        fit.fbgemm,
        fit.torchrec,
    )
    assert pins["torchmetrics"] in versions.TORCHREC_NEEDS[1]


def test_the_extras_take_the_releases_of_the_table() -> None:
    extras = pyproject()["project"]["optional-dependencies"]  # type: ignore[index]
    fit = versions.FITS[0]
    assert any(need.startswith(f"fbgemm-gpu-cpu>={fit.fbgemm},") for need in extras["cpu"])
    assert any(need.startswith(f"fbgemm-gpu>={fit.fbgemm},") for need in extras["cuda"])
    assert any(need.startswith(f"torchrec>={fit.torchrec},") for need in extras["cuda"])
    assert not any(need.startswith("torchrec") for need in extras["cpu"])
    assert {re.split("[=<>]", need)[0] for need in versions.TORCHREC_NEEDS} <= {
        re.split("[=<>]", need)[0] for need in extras["cpu"]
    }
