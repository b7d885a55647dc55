"""Lets a trainer read its own command line with its own parser and go no further; writes what it understood.

    python rivals_check.py RESULT SCRIPT ARGUMENT ...        a script by its path
    python rivals_check.py RESULT -m MODULE ARGUMENT ...     a module

Libraries, and names in libraries, that are not here are empty classes, as a parser needs none of them: what is missing
is found by trying. RESULT gets {"understood": {key: value}, "unknown": [keys that a configuration file has and the
trainer does not know], "absent": [what is missing]}. What a parser refuses ends the process with its words. Imports
nothing of ours.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import os
import re
import runpy
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# They look for others while they are imported, and must not find what is not here.
import diffusers  # noqa: F401
import torch  # noqa: F401
import transformers  # noqa: F401

_NAME = re.compile(r"cannot import name '(\w+)' from")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the libraries that turned out to be missing: modules whose every name is an empty class."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The library itself and whatever is asked for in it."""
        here = name.partition(".")[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if here else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """A module in which every name is a class."""
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""

    def stand_in_for(self, error: ImportError) -> None:
        """Makes up for what could not be imported; raises the error again where it is no library's."""
        name = _NAME.search(str(error))
        library = (error.name or "").partition(".")[0]
        missing = f"{library} with {name[1]}" if name else library
        if missing in self.names or not library or not (name or error.name == library):
            raise error
        self.names.append(missing)
        if name:
            setattr(sys.modules[error.name or ""], name[1], _class(name[1]))


class _Kind(type):
    """Classes that give a class for every name, and may be called, subclassed or used as decorators."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _class(name)


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return "0.0.0" if name == "__version__" else _class(name)


def _class(name: str) -> Any:
    return _Kind(name, (), {"__init__": lambda self, *args, **kwargs: None, "__call__": lambda self, *_, **__: self})


def tell(result: Path, understood: dict[str, Any], unknown: list[str], absent: Absent) -> None:
    """Writes it and ends the process."""
    told = {"understood": understood, "unknown": unknown, "absent": sorted(absent.names)}
    result.write_text(json.dumps(told, default=str), encoding="utf-8")
    os._exit(0)


def unknown_keys(written: Any, config: Any, prefix: str = "") -> Iterator[str]:
    """Keys of a configuration file that OneTrainer's classes of configuration have no place for."""
    for key, value in written.items():
        if key not in config.types:
            yield f"{prefix}{key}"
        elif isinstance(value, dict) and hasattr(getattr(config, key), "types"):
            yield from unknown_keys(value, getattr(config, key), f"{prefix}{key}.")


def main() -> None:
    """Parses and tells."""
    result, script, *words = sys.argv[1:]
    absent = Absent()
    sys.meta_path.append(absent)
    parse = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        found = parse(parser, args, namespace)
        if not hasattr(found, "config_path"):
            tell(Path(result), vars(found), [], absent)
        return found

    def create_trainer(config: Any, *_: Any) -> None:
        """OneTrainer's way on, once it has read its files."""
        written = json.loads(Path(words[-1].partition("=")[2]).read_text(encoding="utf-8"))
        tell(Path(result), config.to_dict(), list(unknown_keys(written, config)), absent)

    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[assignment,method-assign]
    create: Any = types.ModuleType("modules.util.create")
    create.create_trainer = create_trainer
    sys.modules["modules.util.create"] = create
    while True:
        try:
            run(script, words)
        except ImportError as error:
            absent.stand_in_for(error)
        else:
            return


def run(script: str, words: list[str]) -> None:
    """As it would be from the command line."""
    if script == "-m":
        sys.argv = words[:]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [script, *words]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
