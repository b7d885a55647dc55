"""Let a trainer read its own command line with its own parser and stop; write what it understood.

    python rivals_check.py RESULT SCRIPT ARGUMENT ...        a script by its path
    python rivals_check.py RESULT -m MODULE ARGUMENT ...     a module

Missing libraries, and missing names in libraries, are replaced by empty classes, since a parser needs none of them;
what is missing is found by trying. RESULT gets {"understood": {key: value}, "unknown": [keys of a configuration file
that the trainer does not know], "absent": [missing libraries]}. If a parser rejects its arguments, the process ends
with its message. Imports none of our modules.
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

# These look for other libraries while they are imported, and must not find the placeholders.
import diffusers  # noqa: F401
import torch  # noqa: F401
import transformers  # noqa: F401

_NAME = re.compile(r"cannot import name '(\w+)' from")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importer for missing libraries: modules in which every name is an empty class."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a missing library and everything in it."""
        here = name.partition(".")[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if here else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return a module in which every name is a class."""
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: there is no code to run."""

    def stand_in_for(self, error: ImportError) -> None:
        """Replace what could not be imported; raise the error again if it is not a library's."""
        name = _NAME.search(str(error))
        library = (error.name or "").partition(".")[0]
        missing = f"{library} with {name[1]}" if name else library
        if missing in self.names or not library or not (name or error.name == library):
            raise error
        self.names.append(missing)
        if name:
            setattr(sys.modules[error.name or ""], name[1], _class(name[1]))


class _Kind(type):
    """Metaclass of classes that return a class for every name, and may be called, subclassed or used as decorators."""

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
    """Write the result and end the process."""
    told = {"understood": understood, "unknown": unknown, "absent": sorted(absent.names)}
    result.write_text(json.dumps(told, default=str), encoding="utf-8")
    os._exit(0)


def unknown_keys(written: Any, config: Any, prefix: str = "") -> Iterator[str]:
    """Yield keys of a configuration file that OneTrainer's configuration classes do not have."""
    for key, value in written.items():
        if key not in config.types:
            yield f"{prefix}{key}"
        elif isinstance(value, dict) and hasattr(getattr(config, key), "types"):
            yield from unknown_keys(value, getattr(config, key), f"{prefix}{key}.")


def main() -> None:
    """Parse and write the result."""
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
        """Write what OneTrainer read, in place of its own function, which it calls after reading its files."""
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
    """Run a script as from the command line."""
    if script == "-m":
        sys.argv = words[:]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [script, *words]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
