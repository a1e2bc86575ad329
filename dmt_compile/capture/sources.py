"""Which lines are the user's: innermost frames outside torch, numpy and this library."""

from __future__ import annotations

import importlib.util
import linecache
import os
import re
import traceback
from collections.abc import Iterable
from types import CodeType, FrameType

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

_numpy = importlib.util.find_spec("numpy")
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_FILES = (torch.__file__, _PACKAGE, *([_numpy.origin] if _numpy is not None and _numpy.origin else []))
_LIBRARY_DIRS = tuple(os.path.dirname(file) + os.sep for file in _FILES)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def library_file(name: str) -> bool:
    """Whether a file is torch's, numpy's or this library's, or no file."""
    return name.startswith(_LIBRARY_DIRS) or name.startswith("<")


def user_frame(frame: FrameType | None) -> tuple[CodeType, int] | None:
    """The innermost frame of user code from ``frame`` outwards."""
    while frame is not None:
        if not library_file(frame.f_code.co_filename):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None


def user_place(frame: FrameType | None) -> tuple[str, int] | None:
    """The innermost line of user code from ``frame`` outwards, or the one that Dynamo reads at the moment."""
    context = torch._guards.TracingContext.try_get()
    read = _users(torch._guards.TracingContext.extract_stack()) if context is not None else []
    if read:
        return read[-1].filename, read[-1].lineno or 0
    found = user_frame(frame)
    return (found[0].co_filename, found[1]) if found is not None else None


def _users(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    return [frame for frame in frames if not library_file(frame.filename)]


def trace_of(file: str, line: int, function: str) -> str:
    """A line of code as torch.fx keeps it in a node."""
    return f'  File "{file}", line {line}, in {function}\n    {linecache.getline(file, line).strip()}\n'


def user_trace(trace: str | None) -> str | None:
    """Of a stack trace in text, the innermost frame of user code."""
    frames = [frame for frame in _FRAME.findall(trace or "") if not library_file(frame[0])]
    return trace_of(frames[-1][0], int(frames[-1][1]), frames[-1][2]) if frames else None


def quoted(file: str, line: int) -> str:
    """A place and its line of code, as messages show them."""
    return f"{file}:{line}: `{linecache.getline(file, line).strip()}`"


KEEPS = (
    "forward uses a tensor that it has kept outside the model from an earlier call, in which there were no values: compute it in "
    "every call, or keep it in a buffer"
)
_INSTEAD = "choose between values with torch.where"
# What torch.export says where Python needs a number that tensors without values do not give.
_UNKNOWN_NUMBER = "data-dependent expression"
# What torch.export says of a constant that only stands for a tensor.
_WITHOUT_VALUES = "We found a fake tensor in the exported program constant's list"


def reason(error: BaseException) -> str:
    """One line: what went wrong, and the innermost line of the user's code on the way there."""
    # Dynamo does not run the code that it reads.
    frames = _users(getattr(error, "real_stack", None) or ()) or _users(traceback.extract_tb(error.__traceback__))
    frames = frames or _users(traceback.FrameSummary(file, int(line), name) for file, line, name in _FRAME.findall(str(error)))
    message = str(error).strip().split("\n")[0]
    if isinstance(error, DataDependentOutputException):
        message = f"{error.func} looks at the values of tensors, and the graph would keep for ever what it saw: {_INSTEAD}"
    elif _UNKNOWN_NUMBER in message:
        message = f"a size or a branch depends on the values of tensors, and the graph would keep what it saw: {_INSTEAD}"
    elif message.startswith(_WITHOUT_VALUES):
        return KEEPS
    if not frames:
        return f"{type(error).__name__}: {message}"
    last = frames[-1]
    return f"{last.filename}:{last.lineno}: `{last.line}`: {message}"
