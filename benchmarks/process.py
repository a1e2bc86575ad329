"""A fresh process per measurement: its memory's high-water mark and its caches belong to that measurement alone."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def in_fresh_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function of a module in a process of its own that imports everything anew."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


class PeakMemory:
    """How far this process's resident memory rose above its value at ``__enter__``, in MB, at its highest."""

    rise: float = float("nan")

    def __enter__(self) -> PeakMemory:
        gc.collect()
        # Freed memory that the allocator keeps would be used again without showing up in the rise.
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        # Takes the high-water mark back to the present; without it an earlier peak would count.
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *exc: object) -> None:
        self.rise = max(_status("VmHWM") - self._before, 0) / 1024


def resident() -> float:
    """Resident memory of this process in MB."""
    return _status("VmRSS") / 1024


def _status(field: str) -> int:
    """A field of /proc/self/status in kB."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{field}:"):
                return int(line.split()[1])
    raise OSError(f"/proc/self/status has no field {field}")
