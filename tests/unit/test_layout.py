"""The layout stays readable: no circles of files, no crowded folders, no overlong files, no crumbs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import grimp
import pytest

from tests.support import ROOT

MOST_FILES = 18
MOST_LINES = 600
CRUMB_LINES = 60
MIRRORED = {"unit/app": "app", "unit": "trainer", "train": "trainer", "qt": "app/qt"}
"""Folders of tests and whose folders theirs mirror; the first that a path begins with counts."""
NOT_MIRRORED = {"unit/support"}  # tests of tests/support
# What a program starts with: its text explains why Qt does not start, before anything else can be imported.
STARTS = {"app.__main__"}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("app", "trainer", cache_dir=None)


def files() -> list[Path]:
    return [path for folder in ("app", "trainer") for path in sorted((ROOT / folder).rglob("*.py"))]


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def circles(graph: grimp.ImportGraph) -> list[str]:
    """Return the modules that can be reached from themselves; imports inside functions count."""
    importers = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    left = dict.fromkeys(sorted(graph.modules))
    while gone := [module for module in left if not importers[module] & left.keys()]:
        for module in gone:
            del left[module]
    return list(left)


def test_no_files_import_each_other_in_a_circle(graph: grimp.ImportGraph) -> None:
    assert circles(graph) == []


def test_a_circle_would_be_found() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "b"), ("d", "e")):
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == ["a", "b", "c"]


def test_no_folder_is_crowded() -> None:
    counts = Counter(path.parent for path in files() if path.name != "__init__.py")
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_no_file_is_overlong() -> None:
    assert [path for path in files() if lines(path) > MOST_LINES] == []


def test_no_small_module_has_a_single_importer(graph: grimp.ImportGraph) -> None:
    crumbs = set()
    for path in files():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if path.stem.startswith("__") or module in STARTS or lines(path) >= CRUMB_LINES:
            continue
        if len(graph.find_modules_that_directly_import(module)) < 2:
            crumbs.add(module)
    assert crumbs == set()


def test_folders_of_tests_are_those_of_the_program() -> None:
    folders = {path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    missing = []
    for folder in sorted(folders - NOT_MIRRORED):
        top = next((top for top in MIRRORED if f"{folder}/".startswith(f"{top}/")), None)
        if top and not (ROOT / MIRRORED[top] / folder.removeprefix(top).lstrip("/")).is_dir():
            missing.append(folder)
    assert missing == []
