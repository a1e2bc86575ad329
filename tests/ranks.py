"""A pool of real gloo processes for tests, started once per session.

A test sends a function of a module, and arguments, to the first ``world`` processes. Each runs it with
``torch.distributed`` initialised for these ranks alone, and sends back what it returned or raised. Nothing waits without a
limit: a rank that overruns has its stack in the failure, and a pool with a dead rank is ended and started anew by the next
test.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

START = 120
"""Seconds that the ranks may take to start, imports included."""
PATIENCE = 90
"""Seconds that a test's function may take on the ranks."""
COLLECTIVE = 40
"""Seconds that a rank waits for another one in a collective, unless the test says otherwise."""

_GRACE = 3
"""Seconds that a rank has to write its stack and answer."""

_CONTEXT = multiprocessing.get_context("forkserver")


@dataclass
class Outcome:
    """What one rank's function returned, or raised."""

    value: Any = None
    error: str = ""
    """The name of the exception's class, empty if there was none."""
    message: str = ""
    trace: str = ""


class RankError(AssertionError):
    """A rank raised, died or did not end; the message has the traceback of each."""


class RankPool:
    """``size`` processes that have torch, torchrec and dmt_compile imported."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._calls = 0
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # The server imports once, and forks every rank from there; it never runs torch, so it has none of torch's threads.
        _CONTEXT.set_forkserver_preload(
            ["torch.distributed", "torch._inductor.compile_fx", "torchrec.models.dlrm", "dmt_compile.passes.pipeline", "pytest"]
        )
        self._pipes: list[Connection] = []
        self._processes = []
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            for rank in range(size):
                mine, theirs = _CONTEXT.Pipe()
                process = _CONTEXT.Process(target=_serve, args=(theirs, str(self._log(rank))), name=f"rank {rank}", daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(mine)
                self._processes.append(process)
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before
        if len(_first_messages(self._pipes, START)) < size:
            self.close()
            raise RankError(f"the ranks did not start within {START} s")

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.log"

    @property
    def alive(self) -> bool:
        """Whether every rank still runs."""
        return all(process.is_alive() for process in self._processes)

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, patience: float = PATIENCE, collective: float = COLLECTIVE
    ) -> list[Outcome]:
        """``function(*args)`` on ranks 0..world-1; what each returned or raised.

        Raises:
            RankError: a rank died or did not end within ``patience`` seconds; the pool is closed.
        """
        self._calls += 1
        task = pickle.dumps((function, args))
        outcomes: list[Outcome | None] = [None] * world
        dead: set[int] = set()
        end = time.monotonic() + patience + _GRACE
        for rank in range(world):
            order = (rank, world, self._store.port, str(self._calls), patience, collective, task)
            with suppress(OSError):
                self._pipes[rank].send_bytes(pickle.dumps(order))
        while waiting := {self._pipes[r]: r for r in range(world) if outcomes[r] is None and r not in dead}:
            ready = wait(list(waiting), timeout=max(end - time.monotonic(), 0))
            if not ready:
                break
            for pipe in ready:
                try:
                    outcomes[waiting[pipe]] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    dead.add(waiting[pipe])
        if None in outcomes:
            self._end()
            told = self._describe(outcomes)
            self.close()
            raise RankError(told)
        # Only now may they take their connections down: a slower one may still have been reading from them.
        for rank in range(world):
            self._pipes[rank].send_bytes(b"")
        return [outcome for outcome in outcomes if outcome is not None]

    def _describe(self, outcomes: list[Outcome | None]) -> str:
        lines = ["a rank died or did not end in time"]
        for rank, outcome in enumerate(outcomes):
            result = "no result" if outcome is None else outcome.error or "returned"
            lines.append(f"--- rank {rank}, exit code {self._processes[rank].exitcode}, {result}")
            lines.append(outcome.trace if outcome is not None else "")
            lines.append(self._log(rank).read_text())
        return "\n".join(lines)

    def close(self) -> None:
        """End every rank, and forget what they wrote."""
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join(10)


def _first_messages(pipes: list[Connection], seconds: float) -> list[bytes]:
    """One message from every pipe that sends one in time."""
    end = time.monotonic() + seconds
    return [pipe.recv_bytes() for pipe in pipes if pipe.poll(max(end - time.monotonic(), 0))]


def _serve(pipe: Connection, log: str) -> None:
    """A rank: run one function after the other until the pipe is closed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    parent = multiprocessing.parent_process()
    assert parent is not None
    # A rank that waits in a collective would not see that the pipe is closed.
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # What the server has imported is garbage to nobody; looking through it would copy its pages.
    gc.freeze()
    # As in the process of the tests.
    gc.set_threshold(200_000, 20, 100)
    with open(log, "w") as file, suppress(EOFError, OSError):
        faulthandler.enable(file)
        pipe.send_bytes(b"ready")
        while True:
            outcome = _run(*pickle.loads(pipe.recv_bytes()), file)
            try:
                reply = pickle.dumps(outcome)
            except Exception as error:
                reply = pickle.dumps(_raised(error))
            pipe.send_bytes(reply)
            pipe.recv_bytes()
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()


def _run(rank: int, world: int, port: int, call: str, patience: float, collective: float, task: bytes, log: Any) -> Outcome:
    import torch
    import torch.distributed as dist

    try:
        function, args = pickle.loads(task)
        faulthandler.dump_traceback_later(patience, file=log)
        torch.manual_seed(rank)
        torch.set_grad_enabled(True)
        timeout = timedelta(seconds=collective)
        store = dist.PrefixStore(call, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        return Outcome(function(*args))
    except BaseException as error:
        return _raised(error)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _raised(error: BaseException) -> Outcome:
    return Outcome(None, type(error).__name__, str(error), "".join(traceback.format_exception(error)))


class Ranks:
    """What tests use: the pool, started when first needed and again after it was lost."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool: RankPool | None = None

    def __call__(self, world: int, function: Callable[..., Any], *args: Any, **limits: float) -> list[Any]:
        """What ``function(*args)`` returned, by rank.

        Raises:
            RankError: a rank raised, died or overran.
        """
        outcomes = self.outcomes(world, function, *args, **limits)
        failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error]
        if failed:
            raise RankError("\n".join(f"--- rank {rank}\n{outcome.trace}" for rank, outcome in failed))
        return [outcome.value for outcome in outcomes]

    def outcomes(self, world: int, function: Callable[..., Any], *args: Any, **limits: float) -> list[Outcome]:
        """What ``function(*args)`` returned or raised, by rank."""
        if self._pool is not None and not self._pool.alive:
            self.close()
        if self._pool is None:
            self._pool = RankPool(self.size)
        try:
            return self._pool.run(world, function, *args, **limits)
        except RankError:
            self._pool = None
            raise

    def close(self) -> None:
        """End the pool, if there is one."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
