"""Let kohya's sd-scripts parse the configurations in tests/golden/imports, and keep what its parsers return.

Run it with a Python that can import a checkout of kohya-ss/sd-scripts, such as that of its own virtual environment:
`python tests/benchmarks/parse_with_sd_scripts.py CHECKOUT`. It needs bash, and imports nothing of Impasto.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

PARSED = Path(__file__).parents[1] / "golden" / "imports" / "sd_scripts_parsed.json"
NOT_CALLED = ("torchvision", "transformers", "diffusers", "accelerate", "imagesize", "voluptuous")
"""Libraries that sd-scripts imports in versions of its own, and that parsing does not call."""


class AnyClass(type):
    """The type of classes that have every attribute, and from which others can be derived."""

    def __getattr__(cls, name: str) -> AnyClass:
        """Return a class of this name, except for what Python itself asks for."""
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyClass(name, (), {"__init__": lambda *_, **__: None})


class StandIn(ModuleType):
    """A module in which every name is a class."""

    __path__: Sequence[str] = ()  # so that it also has every submodule

    def __getattr__(self, name: str) -> AnyClass:
        """Return a class of this name, except for what Python itself asks for."""
        return AnyClass.__getattr__(AnyClass("Names", (), {}), name)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for the libraries that parsing does not call."""

    def find_spec(self, name: str, _path: object, _target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a stand-in, or None for other modules."""
        if name.partition(".")[0] not in NOT_CALLED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return a module in which every name is a class."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the stand-in is complete."""


def arguments_of(command: str) -> list[str]:
    """Return the arguments that bash passes to the Python script in a command."""
    started = command.partition(" ")[0]
    script = f'{started}() {{ printf "%s\\0" "$@"; }}; {command}'
    words = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout.decode().split("\0")[:-1]
    place = next(place for place, word in enumerate(words) if word.endswith(".py"))
    return words[place + 1 :]


def parsed(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options that sd-scripts reads and that do not have their default.

    `case` has the script, and either the lines of a TOML file or a command; for other shells than bash, which cannot
    be asked here, it states the arguments as well.
    """
    train_util = importlib.import_module("library.train_util")
    parser = importlib.import_module(case["script"]).setup_parser()
    defaults = vars(parser.parse_args([]))
    arguments = case.get("arguments") or (arguments_of(case["command"]) if "command" in case else [])
    if "toml" in case:
        file = folder / "config.toml"
        file.write_text("\n".join(case["toml"]), encoding="utf-8")
        arguments = ["--config_file", str(file), *arguments]
    sys.argv = [case["script"], *arguments]
    found = train_util.read_config_from_file(parser.parse_args(), parser)
    train_util.verify_training_args(found)
    values = {name: value for name, value in vars(found).items() if name != "config_file"}
    return {name: value for name, value in sorted(values.items()) if value != defaults.get(name)}


def main() -> None:
    """Parse all configurations, and write the results beside them."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("checkout", type=Path, help="checkout of kohya-ss/sd-scripts")
    sys.path.insert(0, str(reader.parse_args().checkout.resolve()))
    sys.meta_path.insert(0, StandIns())
    cases = json.loads(PARSED.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            case["parsed"] = parsed(case, Path(folder))
    PARSED.write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
