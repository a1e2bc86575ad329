"""The ``dmt-compile`` command: ``doctor`` looks at the installation, ``explain`` compiles a model and shows what became of it."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from .program import TowerProgram

_NARROWEST = 40
_DESCRIPTION = "From a flat recommender to a tower-partitioned program (Disaggregated Multi-Tower, arXiv 2403.00877)."
_EXAMPLE = """examples:
  dmt-compile explain model.py:make_model --hosts 2 --ranks-per-host 4
  dmt-compile explain model.py:make_model_and_batch --hosts 2 --ranks-per-host 4
  dmt-compile explain my_package.models:SMALL --hosts 2 --ranks-per-host 4 \\
      --towers 4 --stages sptt,lowered
  dmt-compile explain model.py:make_model --plan plan.json
"""


class _UsageError(Exception):
    """What the user gave cannot be used; the message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        An exit status: 0, 1 where ``doctor`` finds a problem, 2 where the input cannot be used. Wrong arguments end in
        :class:`SystemExit` with status 2, as argparse does it.
    """
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    return command(arguments)


def _parser() -> argparse.ArgumentParser:
    from . import __version__

    parser = argparse.ArgumentParser("dmt-compile", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"dmt-compile {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="check torch, FBGEMM, TorchRec and the compiler", description=_doctor.__doc__)
    doctor.add_argument("--width", type=_width, help="columns of the output; by default the terminal's")
    doctor.set_defaults(command=_doctor)

    explain = commands.add_parser(
        "explain",
        help="compile a model and show its towers and what changed in its graph",
        description=_explain.__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.set_defaults(command=_explain)
    explain.add_argument(
        "model",
        metavar="MODULE_OR_FILE:NAME",
        help="a model, or a function without arguments that makes one, in a module or a .py file; a model that reads plain "
        "PyTorch embeddings comes with a batch, as (model, example_inputs) or (model, example_inputs, example_kwargs)",
    )
    explain.add_argument("--hosts", type=_positive, metavar="H", help="number of hosts")
    explain.add_argument("--ranks-per-host", type=_positive, metavar="L", help="number of ranks on every host")
    explain.add_argument("--towers", type=_positive, metavar="T", help="number of towers; by default one per host")
    explain.add_argument(
        "--partition", choices=("balanced", "strided"), help="how tables are spread over towers and ranks (default: balanced)"
    )
    explain.add_argument("--plan", metavar="FILE", help="a tower plan to use, as JSON, instead of the four options above")
    explain.add_argument("--save-plan", metavar="FILE", help="write the tower plan as JSON: TowerPlan.from_json reads it")
    explain.add_argument(
        "--stages", type=_two_stages, default=("flat", "sptt"), metavar="A,B", help="the stages to compare (default: flat,sptt)"
    )
    explain.add_argument("--width", type=_width, help="columns of the output; by default the terminal's")
    return parser


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def _width(text: str) -> int:
    number = _positive(text)
    if number < _NARROWEST:
        raise argparse.ArgumentTypeError(f"at least {_NARROWEST} columns are needed, got {number}")
    return number


def _two_stages(text: str) -> tuple[str, str]:
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or not all(names):
        raise argparse.ArgumentTypeError(f"two names of stages with a comma between are needed, got {text!r}")
    return names[0], names[1]


def _doctor(arguments: argparse.Namespace) -> int:
    """Look at this installation: packages, their versions, and what training needs."""
    from .doctor import run_doctor
    from .render.doctor import diagnosis_view

    console = _console(arguments)
    return run_doctor(lambda diagnosis: console.print(diagnosis_view(diagnosis)))


def _explain(arguments: argparse.Namespace) -> int:
    """Compile a model for hosts and ranks; print its towers and what changed."""
    from .errors import DmtError

    try:
        program = _compile(arguments)
        before, after = arguments.stages
        diff = program.diff(before, after)
        if arguments.save_plan:
            _write(arguments.save_plan, program.plan.to_json(indent=2) + "\n")
    except (_UsageError, DmtError) as error:
        sys.stdout.flush()
        print(f"dmt-compile: error: {error}", file=sys.stderr)
        return 2
    console = _console(arguments)
    console.print(program)
    console.print()
    console.print(diff)
    if arguments.save_plan:
        print(f"plan written to {arguments.save_plan}")
    return 0


def _compile(arguments: argparse.Namespace) -> TowerProgram:
    from .errors import PlanError
    from .plan import TowerPlan
    from .program import towerize
    from .topology import Topology

    plan = None
    if arguments.plan is not None:
        given = [f"--{name.replace('_', '-')}" for name in _PLANNED if getattr(arguments, name) is not None]
        if given:
            raise _UsageError(f"--plan says all that {', '.join(given)} would say: leave one or the other away")
        try:
            plan = TowerPlan.from_json(_read(arguments.plan))
        except PlanError as error:
            raise _UsageError(f"{arguments.plan}: {error}") from error
    elif arguments.hosts is None or arguments.ranks_per_host is None:
        raise _UsageError("give --hosts and --ranks-per-host, or --plan")
    topology = plan.topology if plan else Topology(arguments.hosts, arguments.ranks_per_host)
    with _own_search_path():
        model, example_inputs, example_kwargs = _load_model(arguments.model)
        return towerize(
            model,
            topology,
            towers=plan or arguments.towers,
            partition=arguments.partition or "balanced",
            example_inputs=example_inputs,
            example_kwargs=example_kwargs,
        )


_PLANNED = ("hosts", "ranks_per_host", "towers", "partition")


@contextmanager
def _own_search_path() -> Iterator[None]:
    """Undo afterwards what finding the user's module adds to ``sys.path``."""
    before = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = before


def _load_model(target: str) -> tuple[nn.Module, Any, Any]:
    """The model that ``target`` names or makes, and the example inputs and keyword arguments that came with it, or None."""
    from torch import nn

    source, _, name = target.rpartition(":")
    if not source or not name:
        raise _UsageError(f"name a model as MODULE:NAME or FILE.py:NAME, got {target!r}")
    found: Any = _import(source)
    for part in name.split("."):
        if not hasattr(found, part):
            raise _UsageError(f"{source} has no {name!r}{_perhaps(found, part)}")
        found = getattr(found, part)
    if isinstance(found, nn.Module):
        return found, None, None
    if isinstance(found, tuple):
        return _model_and_inputs(found, target)
    if not callable(found):
        raise _UsageError(f"{target} is neither a model nor a function that makes one, but {type(found).__name__}")
    with _user_code(f"{name}() of {source}"):
        made = found()
    return _model_and_inputs(made, f"{name}() of {source} returned")


def _model_and_inputs(made: Any, what: str) -> tuple[nn.Module, Any, Any]:
    from torch import nn

    if isinstance(made, nn.Module):
        return made, None, None
    if not isinstance(made, tuple):
        raise _UsageError(f"{what} {type(made).__name__}, a torch.nn.Module is needed, or (model, example_inputs)")
    if len(made) not in (2, 3) or not isinstance(made[0], nn.Module) or not all(isinstance(one, Mapping) for one in made[2:]):
        types = ", ".join(type(one).__name__ for one in made)
        raise _UsageError(
            f"{what} a tuple ({types}), (model, example_inputs) is needed, or (model, example_inputs, example_kwargs) with a dict "
            "of keyword arguments"
        )
    return made if len(made) == 3 else (*made, None)


def _perhaps(holder: object, wrong: str) -> str:
    import difflib

    close = difflib.get_close_matches(wrong, [name for name in dir(holder) if not name.startswith("__")], n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _import(source: str) -> ModuleType:
    """A module by its dotted name, found from the current directory too, or a Python file, as if it were run from its place."""
    if not source.endswith(".py") and not any(mark in source for mark in "/\\"):
        sys.path.insert(0, os.getcwd())
        with _user_code(f"importing {source}"):
            try:
                return importlib.import_module(source)
            except ModuleNotFoundError as error:
                if error.name is not None and f"{source}.".startswith(f"{error.name}."):
                    raise _UsageError(f"there is no module {error.name!r}") from None
                raise
    path = Path(source)
    if not path.is_file():
        hint = f"; did you mean {source}.py?" if Path(f"{source}.py").is_file() else ""
        raise _UsageError(f"there is no file {source}{hint}")
    # A file called json.py must not replace the module that others import.
    name = path.stem if path.stem not in sys.modules else f"dmt_compile_explains_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _UsageError(f"{source} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    # Dataclasses and pickle look their module up by name.
    sys.modules[name] = module
    with _user_code(f"importing {source}"):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


@contextmanager
def _user_code(doing: str) -> Iterator[None]:
    """Run code of the user's; what it raises is shown with the user's own traceback, without the frames of this file.

    Raises:
        _UsageError: the code raised.
    """
    try:
        yield
    except _UsageError:
        raise
    except (Exception, SystemExit) as error:
        users = _users_part(error.__traceback__)
        if users is not None or isinstance(error, SyntaxError):
            sys.stdout.flush()
            traceback.print_exception(type(error), error, users)
            raise _UsageError(f"{doing} raised {type(error).__name__}") from None
        raise _UsageError(f"{doing} raised {type(error).__name__}: {error}") from None


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is neither this file nor the import system."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and not file.startswith("<frozen importlib") and file != importlib.__file__:
            return trace
        trace = trace.tb_next
    return None


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _UsageError(f"cannot read the plan {file}: {_reason(error)}") from None


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _UsageError(f"cannot write the plan {file}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _console(arguments: argparse.Namespace) -> Console:
    """Colour where the terminal has it; a pipe gets plain text at 80 columns."""
    from rich.console import Console

    return Console(width=arguments.width, highlight=False, soft_wrap=False)


if __name__ == "__main__":
    sys.exit(main())
