"""How names, numbers, sizes and places are worded: printable ASCII only, and folded where there are many."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""The smallest and the largest of some values."""

_NUMBERED = re.compile(r"(.*?)(\d+)")
_PLACE = re.compile(r"(?:[A-Za-z]:)?(?:[\w.+@~-]*[\\/])+[\w.+@~-]+:\d+")


def plain(text: str) -> str:
    """``text`` with everything that a plain terminal cannot show, control characters too, written as an escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode("ascii") for c in text)


def cut(text: str, width: int) -> str:
    """At most ``width`` characters; "..." stands for what is left off."""
    if len(text) <= width:
        return text
    return f"{text[: width - 3]}..." if width > 3 else text[: max(width, 0)]


def counted(number: int, what: str) -> str:
    """ "1 node", "12,000 nodes"."""
    plural = what[:-1] + "ies" if what.endswith("y") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def span_of(values: Iterable[int]) -> Span:
    """The smallest and the largest of ``values``, which are not empty."""
    listed = list(values)
    return min(listed), max(listed)


def span(values: Span) -> str:
    """ "16", or "8..16" where the two ends differ."""
    low, high = values
    return f"{low:,}" if low == high else f"{low:,}..{high:,}"


def spanned(values: Span, what: str) -> str:
    """ "1 column", "16 columns", "8..16 columns"."""
    low, high = values
    return counted(high, what) if low == high else f"{span(values)} {counted(2, what).split()[1]}"


def size(number: float) -> str:
    """A number of bytes in binary units, three digits: "96 B", "1.5 KiB", "0.98 MiB"."""
    if number < 1000:
        return f"{number:.3g} B"
    unit = "KiB"
    for larger in ("MiB", "GiB", "TiB", "PiB", ""):
        number /= 1024
        if number < 999.5 or not larger:
            break
        unit = larger
    return f"{number:.3g} {unit}"


def size_span(values: Span) -> str:
    """ "96 B", or "96 B..1.5 KiB" where the two ends differ."""
    low, high = size(values[0]), size(values[1])
    if low == high:
        return high
    number, unit = low.split()
    return f"{number}..{high}" if high.endswith(f" {unit}") else f"{low}..{high}"


def ranks(numbers: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1", "ranks 8..15"."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]}..{numbers[-1]}"
    return f"ranks {listed(map(str, numbers), 60)}"


def cut_middle(text: str, width: int) -> str:
    """As :func:`cut`, but what is left off is in the middle: the end of a long name says more than its beginning."""
    if len(text) <= width or width <= 5:
        return cut(text, width)
    head = (width - 3) * 3 // 8
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def listed(names: Iterable[str], width: int) -> str:
    """Names with commas, in about ``width`` columns: numbered runs become "t0..t17", the rest "and 182 more".

    Where not all fit, "..." stands for the words that all of them begin or end with.
    """
    names = [plain(name) for name in names]
    groups = _runs(names)
    whole = ", ".join(text for text, _ in groups)
    if len(whole) <= width:
        return whole
    total = len(names)
    before, after = _common_words(names)
    if before or after:
        runs = _runs([name[before : len(name) - after] for name in names])
        groups = [(f"{'...' if before else ''}{text}{'...' if after else ''}", count) for text, count in runs]
    shown: list[str] = []
    left = total
    for text, count in groups:
        rest = f" and {left - count:,} more" if left > count else ""
        if shown and len(", ".join((*shown, text))) + len(rest) > width:
            break
        shown.append(cut_middle(text, max(width - len(rest), 8)))
        left -= count
    return ", ".join(shown) + (f" and {left:,} more" if left else "")


def _common_words(names: Sequence[str]) -> tuple[int, int]:
    """How many characters of whole words all names begin with, and end with; 0 for the smaller number of the two."""
    before = _common_start(names)
    after = _common_start([name[::-1] for name in names])
    before, after = (before, 0) if before >= after else (0, after)
    # No name may be left without anything.
    return (before, after) if min(map(len, names)) > before + after else (0, 0)


def _common_start(names: Sequence[str]) -> int:
    """The length of the words, up to a mark between words, that several names begin with."""
    found = 0
    # What the first and the last in the order of the alphabet share, all share.
    for index, (a, b) in enumerate(zip(min(names), max(names), strict=False)):
        if a != b:
            return found
        if a in "._@/:-[":
            found = index + 1
    return found


def _runs(names: Sequence[str]) -> list[tuple[str, int]]:
    """Names, or runs of at least three names that count upwards, each with how many names it stands for."""
    found: list[tuple[str, int]] = []
    start = 0
    while start < len(names):
        end = start + 1
        while end < len(names) and _follows(names[end - 1], names[end]):
            end += 1
        if end - start >= 3:
            found.append((f"{names[start]}..{names[end - 1]}", end - start))
        else:
            found += [(name, 1) for name in names[start:end]]
        start = end
    return found


def _follows(first: str, second: str) -> bool:
    a, b = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(second)
    return a is not None and b is not None and a[1] == b[1] and int(b[2]) == int(a[2]) + 1 and str(int(b[2])) == b[2]


def place(location: str | None, width: int = 26) -> str:
    """``file:line`` with the file's last directory, or without it where that is longer than ``width``."""
    if not location:
        return ""
    parts = [plain(part) for part in re.split(r"[\\/]", location)]
    for kept in (2, 1):
        text = "/".join(parts[-kept:])
        if len(text) <= width:
            return text
    return f"...{parts[-1][3 - width :]}"


def short_places(text: str) -> str:
    """``text`` with every absolute ``file:line`` in it shortened."""
    return _PLACE.sub(lambda found: place(found[0]), text)
