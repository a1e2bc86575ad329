"""A certificate as text and for rich: what was compared how as headings, one line per check below."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .text import to_text
from .words import plain

if TYPE_CHECKING:
    from ..verify.certificate import Certificate, Check

_MOST_SIZES = 12
_REMARK = re.compile(r" \([^()]*\)$")


def certificate_renderable(certificate: Certificate) -> RenderableType:
    """A headline and the checks; the text of a failed check follows in full."""
    reference = certificate.reference
    verdict = f"equals the {reference}" if certificate.passed else f"DIFFERS from the {reference}"
    sizes = certificate.batch_sizes
    shown = ", ".join(map(str, sizes[:_MOST_SIZES])) + (f", ... ({len(sizes):,} ranks)" if len(sizes) > _MOST_SIZES else "")
    return Group(
        Text(f"Certificate: {plain(certificate.subject)} {verdict}", "bold green" if certificate.passed else "bold red"),
        Text(f"plan {certificate.plan_hash[:12]}; each rank against the {reference} on its own samples: {shown}"),
        *_checks(certificate),
        *_failures(certificate),
    )


def certificate_text(certificate: Certificate) -> str:
    """The certificate at 80 columns without colour."""
    return to_text(certificate_renderable(certificate))


def _checks(certificate: Certificate) -> Iterator[RenderableType]:
    width = max((len(check.name) for check in certificate.checks), default=0)
    for how, checks in groupby(certificate.checks, lambda check: check.how):
        yield Text(plain(how), "dim")
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=6, justify="right", no_wrap=True)
        table.add_column(min_width=width, overflow="fold")
        table.add_column(overflow="fold")
        for check in checks:
            mark = Text("ok", "green") if check.passed else Text("FAIL", "bold red")
            table.add_row(mark, Text(plain(check.name)), Text(_found(check)))
        yield table


def _found(check: Check) -> str:
    """What a check found, on one line; what it names in brackets at the end matters only where it failed."""
    return _REMARK.sub("", plain(check.found)) if check.passed else "see below"


def _failures(certificate: Certificate) -> Iterator[RenderableType]:
    for check in certificate.checks:
        if not check.passed:
            text = "\n".join(map(plain, check.found.split("\n")))
            yield Text(f"\n{plain(check.name)}: {text}", "red", overflow="fold")
