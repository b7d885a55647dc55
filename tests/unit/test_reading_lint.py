"""Files that others may have written are opened and parsed by trainer.protocol.reading alone.

`python -m tests.unit.test_reading_lint` lists what it finds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

READING = "trainer/protocol/reading.py"

ALLOWED = {
    "trainer/host.py: read_text": "the system's own files in /proc, which exist only on Linux",
    "app/core/models/tools.py: read_text": "the system's own /proc/mounts",
    "app/qt/theme/theme.py: read_text": "icons that ship with the app",
    "trainer/config/write.py: read_text": "the template that ships with Impasto",
    "trainer/cli/doctor.py: read_text": "a file of the installed PyTorch",
    "trainer/files/tokens.py: gzip.open": "the vocabulary that ships with Impasto",
    "trainer/demo/__init__.py: Image.open": "images that ship with Impasto",
    "trainer/protocol/locks.py: open": "a lock that was checked to be a file, and whose bytes are never read",
    "trainer/protocol/files.py: open": "what was just written, opened only to flush it",
    "trainer/protocol/files.py: os.open": "a folder, opened only to flush it",
    "trainer/protocol/events.py: open": "our own event file, cut while its lock is held",
    "trainer/protocol/processes.py: open": "our own console logs, moved while the child starts",
    "trainer/protocol/row_store.py: sqlite3.connect": "checks that the file is a regular one, and rebuilds it",
    "app/core/edits/backups.py: sqlite3.connect": "our own backups, checked to be a file; a damaged one is set aside",
    "app/core/edits/journal.py: open": "our own journal, whose lock is held",
    "app/core/edits/safe_files.py: os.open": "captions, with the checks that replacing them needs",
    "trainer/cli/common.py: os.open": "the null device",
}
_PARSERS = {
    "json.load",
    "json.loads",
    "json.JSONDecoder",
    "tomllib.load",
    "tomllib.loads",
    "pickle.load",
    "pickle.loads",
    "yaml.load",
    "yaml.safe_load",
    "yaml.parse",
}
_OPENERS = {"os.open", "io.open", "gzip.open", "sqlite3.connect", "np.fromfile", "np.memmap"}


def calls(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of each call that opens or parses a file by itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        method = called.rpartition(".")[2]
        if called in _PARSERS | _OPENERS:
            yield node.lineno, called
        elif isinstance(node.func, ast.Attribute) and method in ("read_text", "read_bytes"):
            if not called.startswith("reading."):
                yield node.lineno, method
        elif called == "Image.open":
            if not _is_open_already(node):
                yield node.lineno, called
        elif method == "open" and _reads(node):
            yield node.lineno, method


def _is_open_already(node: ast.Call) -> bool:
    first = ast.unparse(node.args[0])
    return first in ("file", "opened") or first.startswith("BytesIO(")


def _reads(node: ast.Call) -> bool:
    """Tell whether a call of `open` opens a file for reading: by its mode, or by an encoding where it has none."""
    modes = node.args[1:] if isinstance(node.func, ast.Name) else node.args
    modes = [*modes, *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant) and isinstance(mode.value, str)]
    if texts:
        return set(texts[0]) <= set("rbt+U") and "r" in texts[0]
    named = any(keyword.arg == "encoding" for keyword in node.keywords)
    return named and not modes


def found() -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for folder in ("trainer", "app"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for line, call in calls(path) if name != READING else ():
                places.setdefault(f"{name}: {call}", []).append(line)
    return places


def test_files_are_opened_and_parsed_in_one_place() -> None:
    unknown = {place: lines for place, lines in found().items() if place not in ALLOWED}
    assert not unknown, f"use trainer.protocol.reading, or justify it in ALLOWED: {unknown}"


def test_the_list_of_exceptions_is_no_longer_than_it_has_to_be() -> None:
    assert not ALLOWED.keys() - found().keys()


@pytest.mark.parametrize(
    "line",
    [
        "json.loads(x)", "tomllib.load(f)", "path.read_text(encoding='utf-8')", "path.read_bytes()", "open(p, 'rb')",
        "p.open('r+b')", "p.open(encoding='utf-8')", "Image.open(path)", "Image.open(long_path(p))", "os.open(p, 0)",
    ],
)  # fmt: skip
def test_the_lint_sees_each_way(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.py").write_text(line, encoding="utf-8")
    assert list(calls(tmp_path / "a.py"))


@pytest.mark.parametrize(
    "line",
    ["reading.read_text(p, 'x')", "read_text(p, 'x')", "p.open('w')", "session.open(p)", "Image.open(file)"],
)
def test_the_lint_lets_the_rest_alone(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.py").write_text(line, encoding="utf-8")
    assert not list(calls(tmp_path / "a.py"))


if __name__ == "__main__":
    for place, lines in found().items():
        print(place, lines, ALLOWED.get(place, "NOT ALLOWED"))  # noqa: T201
