"""The result of a verification, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One thing that was compared. ``how`` says exactly how ("bit for bit", or the tolerance and why); ``found`` the outcome."""

    name: str
    passed: bool
    how: str
    found: str


@dataclass(frozen=True)
class Certificate:
    """What :meth:`TowerProgram.verify` found against the ``reference``. True only if every check passed."""

    subject: str
    plan_hash: str
    batch_sizes: tuple[int, ...]
    checks: tuple[Check, ...]
    reference: str = "flat model"

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        from ..render.certificate import certificate_text

        return certificate_text(self)

    def __rich__(self) -> object:
        from ..render.certificate import certificate_renderable

        return certificate_renderable(self)
