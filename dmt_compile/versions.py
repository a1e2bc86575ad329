"""Which releases of torch, FBGEMM and TorchRec fit together, and which of them are installed here.

TorchRec is optional: a model in plain PyTorch compiles without it. When it is wanted, three binaries have to
agree. FBGEMM's operators are built against one minor release of torch and fail to load beside any other,
TorchRec calls FBGEMM's operators, and TorchRec's wheel always requires the CUDA build of FBGEMM, also on a
machine whose torch is a CPU build. So an ordinary ``pip install torchrec`` often ends in an import that fails
with an undefined symbol. This module says what is there, what fits, and which commands repair it.

Nothing is imported at module level but the standard library and `dmt_compile.errors`: asking for versions is
cheap (distribution metadata only), and the seconds that ``import torchrec`` costs are paid on the first call
of `require_torchrec`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from dmt_compile.errors import DependencyError

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Fit:
    """One row of the table: releases that belong together.

    Attributes:
        torch, fbgemm, torchrec: the release to install; any of the same ``major.minor`` fits.
        tested: whether the test suite of dmt_compile runs on this row.
    """

    torch: str
    fbgemm: str
    torchrec: str
    tested: bool

    def __str__(self) -> str:
        return (
            f"torch {series(self.torch)} with fbgemm-gpu-cpu (or fbgemm-gpu, for CUDA) {series(self.fbgemm)} "
            f"and torchrec {series(self.torchrec)}" + ("" if self.tested else " (not tested)")
        )


# Newest first. FBGEMM publishes its own half of this table as "releases compatibility"; a row enters here
# when dmt_compile supports its torch, and is marked as tested when CI runs on it.
FITS: tuple[Fit, ...] = (Fit(torch="2.13.0", fbgemm="1.8.0", torchrec="1.8.0", tested=True),)

# Import name -> names of the distributions that provide it. Several provide fbgemm_gpu, and pip lets them
# overwrite one another.
DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "sympy": ("sympy",),
    "rich": ("rich",),
    "fbgemm_gpu": ("fbgemm-gpu-cpu", "fbgemm-gpu", "fbgemm-gpu-nightly-cpu", "fbgemm-gpu-nightly"),
    "torchrec": ("torchrec", "torchrec-nightly", "torchrec-cpu", "torchrec-nightly-cpu"),
}

# TorchRec's requirements beside torch and FBGEMM, which a CPU install has to name itself.
TORCHREC_NEEDS = ("tensordict", "torchmetrics==1.0.3", "tqdm", "pyre-extensions")

UNKNOWN = "unknown"

# A package whose import failed half-way leaves modules behind, and a second attempt fails for another reason.
# So the first reason is kept.
_failures: dict[str, Exception] = {}
_warned = False


@dataclass(frozen=True)
class Distribution:
    """A distribution on disk, by its metadata. `version` is "unknown" for a bare source directory."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class Problem:
    """The package at fault, the reason as a clause without a full stop, and the exception behind it."""

    package: str
    text: str
    cause: Exception | None = None


def series(version: str) -> str:
    """The ``major.minor`` of a version: "2.13" of "2.13.0+cpu"; the version itself when it has no such part.

    A dated nightly ("2026.5.1") gives "2026.5", which is in no row of the table.
    """
    match = re.match(r"\d+\.\d+", version)
    return match.group() if match else version


def find(package: str) -> tuple[Distribution, ...]:
    """The installed distributions that provide an import package, without importing it.

    Args:
        package: an import name, a key of `DISTRIBUTIONS`.

    Returns:
        Empty when there is none. More than one means that they overwrote each other's files.
    """
    found = []
    for name in DISTRIBUTIONS[package]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(Distribution(name, importlib.metadata.version(name) or UNKNOWN))
    if not found and _importable(package):
        found.append(Distribution(package, UNKNOWN))
    return tuple(found)


def _importable(package: str) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # ValueError: in sys.modules without a spec
        return False
    # No origin: a directory without __init__.py, such as an uninstalled package leaves behind.
    return spec is not None and spec.origin is not None


def load(package: str) -> Exception | None:
    """Import a package and, for fbgemm_gpu, look up one of its operators.

    Returns:
        None when it loads; otherwise the first exception that its import raised in this process.
    """
    if package in _failures:
        return _failures[package]
    try:
        with _quiet():
            importlib.import_module(package)
            if package == "fbgemm_gpu":
                # fbgemm_gpu may import without its libraries; only the operators tell.
                torch = importlib.import_module("torch")
                _ = torch.ops.fbgemm.asynchronous_complete_cumsum
    # Beside ImportError: OSError for a library, AttributeError for an operator that is not registered,
    # RuntimeError for a double registration, and between unfit releases anything else.
    except Exception as error:
        error.__traceback__ = None  # it would keep every frame of the failed import alive
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        if not missing:  # a missing package can be installed without leaving a notebook
            _failures[package] = error
        return error
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the log lines of a failing import: they repeat, in colour, what the caller reports."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def fit_for(torch_version: str) -> Fit | None:
    """The row of `FITS` for a torch release, None when there is none."""
    return next((fit for fit in FITS if series(fit.torch) == series(torch_version)), None)


def mismatch(
    torch: tuple[Distribution, ...], fbgemm: tuple[Distribution, ...], torchrec: tuple[Distribution, ...]
) -> Problem | None:
    """Why the installed releases (one argument per package, as from `find`) are not a row of the table.

    Returns:
        None when they are a row. A package that is not installed is not held against the others, and neither
        is an unknown version.
    """
    if len(fbgemm) > 1:
        names = " and ".join(map(str, fbgemm))
        text = f"{names} are both installed; both provide fbgemm_gpu, and the later one overwrote the earlier"
        return Problem("fbgemm_gpu", text)
    fit = fit_for(torch[0].version) if torch and torch[0].version != UNKNOWN else FITS[0]
    if fit is None:
        return Problem("torch", f"{torch[0]} is not in the table of releases that fit together")
    for package, found, wanted in (
        ("fbgemm_gpu", fbgemm, fit.fbgemm),
        ("torchrec", torchrec, fit.torchrec),
    ):
        for one in found:
            if one.version != UNKNOWN and series(one.version) != series(wanted):
                text = f"{one} does not fit torch {series(fit.torch)}, which needs {series(wanted)}"
                return Problem(package, text)
    return None


def installed_mismatch() -> Problem | None:
    """`mismatch` of what is installed."""
    return mismatch(find("torch"), find("fbgemm_gpu"), find("torchrec"))


def torch_is_cuda() -> bool:
    """Whether the installed torch is a CUDA build. Imports torch when the version's label does not say."""
    version = next((one.version for one in find("torch")), "")
    if "+cpu" in version or "+cu" in version:
        return "+cpu" not in version
    try:
        return importlib.import_module("torch").version.cuda is not None
    except Exception:  # a broken torch is reported by whoever needs it
        return False


def install_commands() -> tuple[str, ...]:
    """The pip commands that give this machine a TorchRec that fits, in order.

    They depend on what is installed: whether torch is a CPU or a CUDA build, whether it is of a release in
    the table, and whether a build of FBGEMM has to go first.
    """
    torch, fbgemm, torchrec = find("torch"), find("fbgemm_gpu"), find("torchrec")
    cuda = torch_is_cuda()
    fit = fit_for(torch[0].version) if torch else None
    commands = []
    if fit is None:
        fit = FITS[0]
        index = "" if cuda else f"--index-url {TORCH_CPU_INDEX} "
        commands.append(f"pip install {index}torch=={fit.torch}")
    build = "fbgemm-gpu" if cuda else "fbgemm-gpu-cpu"
    right = [one.name for one in fbgemm] == [build] and series(fbgemm[0].version) == series(fit.fbgemm)
    if fbgemm and not (right and load("fbgemm_gpu") is None):
        # Not just `pip install`: pip believes the metadata, which stay when another build took the files.
        commands.append("pip uninstall --yes " + " ".join(one.name for one in fbgemm))
    if any(one.name != "torchrec" for one in torchrec):
        commands.append("pip uninstall --yes " + " ".join(one.name for one in torchrec))
    # What is right already is named too: its needs may be what is missing.
    if cuda:
        commands.append(f"pip install fbgemm-gpu=={fit.fbgemm} torchrec=={fit.torchrec}")
    else:
        commands.append(f"pip install {build}=={fit.fbgemm}")
        commands.append("pip install " + " ".join(TORCHREC_NEEDS))
        again = "--force-reinstall " if torchrec else ""
        commands.append(f"pip install --no-deps {again}torchrec=={fit.torchrec}")
    return tuple(commands)


def describe(error: Exception) -> str:
    """The exception behind an exception as one line: its type and the first line of its text."""
    while isinstance(error.__cause__, Exception):  # torch wraps the loader's error, which names the symbol
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


def torchrec_installed() -> bool:
    """Whether TorchRec and FBGEMM are both on disk. Cheap, imports neither; they may still fail to load."""
    return bool(find("torchrec")) and bool(find("fbgemm_gpu"))


def torchrec_problem() -> Problem | None:
    """What keeps TorchRec from being used, None when it loads. Imports fbgemm_gpu and torchrec."""
    # FBGEMM first: when it is at fault, TorchRec's own failure is only an echo of that.
    for package in ("fbgemm_gpu", "torchrec"):
        if package not in sys.modules and not find(package):
            return Problem(package, f"{package} is not installed")
        error = load(package)
        if error is not None:
            unfit = installed_mismatch()
            why = unfit.text if unfit else _wrong_build()
            text = f"{package} does not load: {describe(error)}"
            return Problem(package, f"{text} ({why})" if why else text, error)
    return None


def _wrong_build() -> str | None:
    found = find("fbgemm_gpu")
    if found and found[0].name in ("fbgemm-gpu", "fbgemm-gpu-nightly") and not torch_is_cuda():
        return f"{found[0]} is the CUDA build, and torch is a CPU build"
    return None


def require_torchrec() -> ModuleType:
    """The module `torchrec`, imported on the first call (1 to 5 s) and checked together with FBGEMM.

    Releases that load but are no row of the table are used after one warning.

    Raises:
        DependencyError: torchrec or fbgemm_gpu is missing or fails to load. The text names what was found,
            what fits and the pip commands to run.
    """
    global _warned
    problem = torchrec_problem()
    if problem is not None:
        raise DependencyError(_explain(problem)) from problem.cause
    unfit = installed_mismatch()
    if unfit and not _warned:
        _warned = True
        warnings.warn(f"{unfit.text}. It loads, but is not tested. Fits: {fits_text()}", stacklevel=2)
    return sys.modules["torchrec"]


def fits_text() -> str:
    """The table as one line."""
    return "; ".join(map(str, FITS))


def _explain(problem: Problem) -> str:
    packages = ("torch", "fbgemm_gpu", "torchrec")
    found = ", ".join(" and ".join(map(str, find(name))) or f"no {name}" for name in packages)
    commands = "\n".join(f"           {command}" for command in install_commands())
    return (
        f"TorchRec cannot be used: {problem.text}\n"
        f"  found:   {found}\n"
        f"  fits:    {fits_text()}\n"
        f"  to do:   run these and start Python again\n{commands}\n"
        "  A model written with nn.EmbeddingBag or nn.Embedding needs neither package."
    )
