"""What this installation can do: packages, their versions, and the capabilities that training needs.

`diagnose` looks and returns plain data; `print` shows it in 80 columns, `dmt_compile.render.doctor` in
colour. Each capability is checked by using it: gloo exchanges bytes, FBGEMM runs an operator. Nothing here
touches an existing default process group.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sysconfig
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from dmt_compile import versions

State = Literal["ok", "note", "problem"]

GLOO_TIMEOUT = timedelta(seconds=20)
_WIDTH = 80


@dataclass(frozen=True)
class PackageReport:
    """One package: what is installed, whether the release fits the others, whether it loads.

    Attributes:
        package: import name.
        found: installed distributions, as "name version"; more than one overwrote each other.
        fits: whether the release is one that fits; None when not installed, or when any release does.
        loads: whether it imports; None when not installed.
        problem: what is wrong, empty when nothing is. A missing optional package is no problem.
        optional: whether dmt_compile works without it.
    """

    package: str
    found: tuple[str, ...]
    fits: bool | None
    loads: bool | None
    problem: str = ""
    optional: bool = False

    @property
    def state(self) -> State:
        """Like a check's: "note" is an optional package that is not installed."""
        if self.problem:
            return "problem"
        return "ok" if self.found else "note"


@dataclass(frozen=True)
class Check:
    """One capability. `detail` says what was seen; "note" means absent, and not needed everywhere."""

    name: str
    state: State
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """The whole report. `fixes` are the commands, in order, that repair the packages; often none."""

    dmt_compile: str
    python: str
    platform: str
    packages: tuple[PackageReport, ...]
    checks: tuple[Check, ...]
    fixes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """No problem anywhere. Missing optional packages and absent GPUs are notes, not problems."""
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """Each problem as one sentence, packages first."""
        broken = [one.problem for one in self.packages if one.problem]
        return (*broken, *(f"{one.name}: {one.detail}" for one in self.checks if one.state == "problem"))

    @property
    def verdict(self) -> str:
        """One line that sums up."""
        if self.ok:
            return "No problems."
        return "1 problem:" if len(self.problems) == 1 else f"{len(self.problems)} problems:"

    def __str__(self) -> str:
        lines = [f"dmt_compile {self.dmt_compile}, Python {self.python}", *_wrap("", self.platform), ""]
        lines.append(f"{'package':<14}{'fits':<6}{'loads':<7}found")
        for one in self.packages:
            lines += _wrap(f"{one.package:<14}{_word(one.fits):<6}{_word(one.loads):<7}", found_text(one))
        lines += ["", f"{'check':<14}{'state':<9}seen"]
        for check in self.checks:
            lines += _wrap(f"{check.name:<14}{check.state:<9}", check.detail)
        lines += ["", self.verdict]
        for problem in self.problems:
            lines += _wrap("  - ", problem)
        if self.fixes:
            lines += ["", "Releases that fit together:"]
            for fit in versions.FITS:
                lines += _wrap("  ", str(fit))
            # Commands are not wrapped: they are there to be copied.
            lines += ["", "To repair, run these and start Python again:", *(f"  {one}" for one in self.fixes)]
        return "\n".join(lines)


def found_text(report: PackageReport) -> str:
    """The "found" column: distributions, or that there is none."""
    if report.found:
        return " and ".join(report.found)
    return "not installed (optional)" if report.optional else "not installed"


def _word(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def _wrap(head: str, text: str) -> list[str]:
    """`text` after `head`, in 80 columns, later lines indented under the text."""
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False) or [
        head.rstrip()
    ]


def diagnose() -> Diagnosis:
    """Look at this installation. Takes some seconds: torch and, where installed, TorchRec are imported.

    Never raises for what it finds; a failing check is part of the report.
    """
    packages = _packages()
    torch_loads = any(one.package == "torch" and one.loads for one in packages)
    fbgemm = next(one for one in packages if one.package == "fbgemm_gpu")
    checks: list[Check] = []
    if torch_loads:
        checks.append(_attempt("gloo", _gloo))
        checks.append(_attempt("nccl", _nccl))
        if fbgemm.loads:
            checks.append(_attempt("fbgemm ops", _fbgemm_ops))
    checks.append(_attempt("torch.compile", _compiler))
    at_fault = any(one.problem for one in packages if one.package in ("torch", "fbgemm_gpu", "torchrec"))
    return Diagnosis(
        dmt_compile=_own_version(),
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        platform=platform.platform(),
        packages=packages,
        checks=tuple(checks),
        fixes=versions.install_commands() if at_fault else (),
    )


def run_doctor(show: Callable[[Diagnosis], object] = print) -> int:
    """Diagnose and show the result.

    Args:
        show: prints a `Diagnosis`, e.g. ``lambda it: console.print(render.doctor.diagnosis_view(it))``.

    Returns:
        An exit status: 0 when there is no problem, 1 otherwise.
    """
    diagnosis = diagnose()
    show(diagnosis)
    return 0 if diagnosis.ok else 1


def _own_version() -> str:
    try:
        return importlib.metadata.version("dmt-compile")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _packages() -> tuple[PackageReport, ...]:
    found = {name: versions.find(name) for name in versions.DISTRIBUTIONS}
    problems = {}
    for name in ("torch", "sympy", "rich"):
        error = versions.load(name)
        if error is not None:
            problems[name] = f"{name} does not load: {versions.describe(error)}"
    unfit = versions.installed_mismatch()
    if unfit is not None:
        problems.setdefault(unfit.package, f"{unfit.text}; not tested, even where it loads")
    if found["fbgemm_gpu"] or found["torchrec"]:
        trouble = versions.torchrec_problem()
        # FBGEMM alone is of use, TorchRec alone is a half-finished installation.
        if trouble is not None and (found["torchrec"] or trouble.package != "torchrec"):
            # Replaces a mismatch of the same package: the text about loading names that as the reason.
            problems[trouble.package] = trouble.text
    return tuple(
        PackageReport(
            package=name,
            found=tuple(map(str, found[name])),
            fits=_fits(name, found),
            loads=versions.load(name) is None if found[name] else None,
            problem=problems.get(name, ""),
            optional=name in ("fbgemm_gpu", "torchrec"),
        )
        for name in found
    )


def _fits(name: str, found: dict[str, tuple[versions.Distribution, ...]]) -> bool | None:
    if name not in ("torch", "fbgemm_gpu", "torchrec") or not found[name]:
        return None
    # Held against torch alone, so that one unfit package does not mark the others.
    fbgemm = found[name] if name == "fbgemm_gpu" else ()
    torchrec = found[name] if name == "torchrec" else ()
    return versions.mismatch(found["torch"], fbgemm, torchrec) is None


def _attempt(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    # Whatever a capability raises is its result: backends raise many types, and the report must be finished.
    except Exception as error:
        return Check(name, "problem", versions.describe(error))


def _gloo() -> Check:
    """Two ranks in two threads exchange int64 rows over TCP with uneven splits.

    The process groups are built directly on an in-memory store, so the default group is neither needed nor
    changed. Two ranks and not one: a wrong network interface or a firewall shows only when bytes travel.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return Check("gloo", "problem", "this build of torch has no gloo")
    from torch._C._distributed_c10d import HashStore

    store = HashStore()

    def rank(me: int) -> list[int]:
        group = dist.ProcessGroupGloo(store, me, 2, GLOO_TIMEOUT)
        rows = torch.tensor([10 * me, 10 * me + 1, 10 * me + 2])
        mine = [1, 1] if me == 0 else [2, 2]
        received = torch.empty(sum(mine), dtype=rows.dtype)
        # The receiver's splits, then the sender's: one row for rank 0, two for rank 1.
        exchange = group.alltoall_base(  # type: ignore[attr-defined]  # torch's stub lacks it
            received, rows, mine, [1, 2], dist.AllToAllOptions()
        )
        exchange.wait()
        return [int(row) for row in received]

    with ThreadPoolExecutor(2) as threads:
        got = list(threads.map(rank, range(2)))
    if got != [[0, 10], [1, 2, 11, 12]]:
        return Check("gloo", "problem", f"all_to_all_single gave wrong rows: {got}")
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return Check("gloo", "ok", "all_to_all_single of two ranks" + (f" over {interface}" if interface else ""))


def _nccl() -> Check:
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count()
    if count == 0:
        return Check("nccl", "note", "no GPU is visible; training runs on CPU with gloo")
    if not dist.is_nccl_available():
        return Check("nccl", "problem", f"{_count(count, 'GPU')}, but this build of torch has no NCCL")
    return Check("nccl", "ok", _count(count, "GPU"))


def _fbgemm_ops() -> Check:
    import torch

    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([2, 0, 3]))
    if offsets.tolist() != [0, 2, 2, 5]:
        return Check("fbgemm ops", "problem", f"offsets of lengths 2, 0, 3 came out as {offsets.tolist()}")
    return Check("fbgemm ops", "ok", "asynchronous_complete_cumsum on CPU")


def _compiler() -> Check:
    """What inductor needs on CPU. Compiling something would take ten seconds and prove little more."""
    names = (os.environ.get("CXX"), "g++", "clang++")
    compiler = next((name for name in names if name and shutil.which(name)), None)
    if compiler is None:
        return Check("torch.compile", "note", "no C++ compiler, which inductor needs; eager mode works")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return Check("torch.compile", "note", "no Python.h, which inductor needs; eager mode works")
    return Check("torch.compile", "ok", f"{compiler} and Python.h are there")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
