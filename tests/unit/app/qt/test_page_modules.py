"""The table of pages that are loaded late names modules and classes that exist; read from the source, without Qt."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

TABLE = ROOT / "app" / "qt" / "page_loader.py"


def calls(function: str) -> list[ast.Call]:
    tree = ast.parse(TABLE.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == function]


def module_names(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Constant)
            and isinstance(each.value, str)
            and each.value.startswith(("app.", "trainer."))
        ):
            yield each.value


def source_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


PAGES = [tuple(ast.literal_eval(argument) for argument in call.args[:2]) for call in calls("PageSpec")]
MODULES = sorted(set(module_names(ast.parse(TABLE.read_text(encoding="utf-8")))))


def test_the_table_is_found() -> None:
    assert len(PAGES) >= 3 and len(MODULES) > len(PAGES)


@pytest.mark.parametrize(("module", "page"), PAGES)
def test_a_page_is_defined_in_its_module(module: str, page: str) -> None:
    tree = ast.parse(source_of(module).read_text(encoding="utf-8"))
    assert page in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_is_loaded_late_exists(module: str) -> None:
    assert source_of(module).is_file()
