"""The order in which people expect names: 2 before 10, capitals beside small letters."""

from __future__ import annotations

import re

_NUMBER = re.compile("[0-9]+")


def natural_key(name: str) -> str:
    """Return a text that sorts as people expect the name to: runs of digits by their value, letters without case.

    Names that differ in leading zeros or capitals alone still have keys of their own.
    """
    return f"{_NUMBER.sub(_sortable, name.casefold())}\0{name}"


def _sortable(number: re.Match[str]) -> str:
    """Put the count of digits in front of them, itself as digits, so that numbers keep their place before letters."""
    digits = number[0].lstrip("0")
    nines, rest = divmod(len(digits), 9)
    return "9" * nines + str(rest) + digits
