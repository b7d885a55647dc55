"""The names in the app's source that are keys of files: ids of commands, and names by which splitters are remembered.

They are read from the source without importing it, so that neither Qt nor a display is needed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support import ROOT

APP = ROOT / "app"


def command_names() -> list[str]:
    """Return the ids of all commands, which name the user's own shortcuts in preferences.toml."""
    return sorted(_first_arguments("Action"))


def object_names() -> set[str]:
    """Return the object names that widgets are given, which name the state of splitters in window.json."""
    return set(_first_arguments("setObjectName"))


def _first_arguments(function: str) -> Iterator[str]:
    """Yield the literal texts that are the first argument of calls to a function or method."""
    for path in sorted(APP.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if f"{function}(" in source else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == function and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value
