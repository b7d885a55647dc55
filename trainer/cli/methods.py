"""The methods command, which lists what a recipe can choose from: adapters, optimizers, schedules and losses."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.cli.common import Commands, add_command, add_json, echo_json, echo_lines
from trainer.errors import EXIT_DONE

_HEADINGS = {
    "adapter": "Adapters",
    "optimizer": "Optimizers",
    "other": 'Further optimizers, with name = "other"',
    "schedule": "Schedules",
    "loss": "Losses",
}


def add_commands(commands: Commands) -> None:
    """Define the command and its arguments."""
    parser = add_command(commands, "methods", "list adapters, optimizers, schedules and losses with their sources", run)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the methods, as a list for people or as JSON."""
    found = list(records())
    if options.json:
        echo_json({"methods": found}, indent=2)
    else:
        echo_lines(_lines(found))
    return EXIT_DONE


def records() -> Iterator[dict[str, Any]]:
    """Yield every method: its key and value in a recipe, title, purpose, source and names in other trainers."""
    from trainer.config.field_names import FIELD_VALUES
    from trainer.config.methods import ADAPTERS, LOSSES, SCHEDULES, Method
    from trainer.config.optimizers.kinds import OPTIMIZERS

    optimizers: dict[str, Method] = {name: config.method for name, config in OPTIMIZERS.items()}
    tables: dict[str, tuple[str, Mapping[str, Method]]] = {
        "adapter": ("recipe.adapter", ADAPTERS),
        "optimizer": ("recipe.optimizer.name", optimizers),
        "schedule": ("recipe.schedule.kind", SCHEDULES),
        "loss": ("recipe.objective.loss", LOSSES),
    }
    for kind, (key, methods) in tables.items():
        elsewhere = FIELD_VALUES.get(key, {})
        for name, method in methods.items():
            yield {
                "kind": kind,
                "key": key,
                "name": name,
                "title": method.title,
                "purpose": method.purpose,
                "source": method.source,
                "names": sorted({*method.names, *(word for word, value in elsewhere.items() if value == name)}),
                "loads_in": method.loads_in or None,
                **(_figures(name) if kind == "optimizer" else {}),
            }
        if kind == "optimizer":
            yield from _others()


def _others() -> Iterator[dict[str, Any]]:
    """Yield the optimizers that a recipe selects with name = "other"."""
    from trainer.config.optimizers.others import OTHERS

    for name, found in OTHERS.items():
        yield {
            "kind": "other",
            "key": "recipe.optimizer.optimizer",
            "name": name,
            "library": found.library,
            "state_bytes_per_number": found.state,
            "arguments": list(found.arguments),
        }


def _figures(optimizer: str) -> dict[str, object]:
    """Return an optimizer's library, and its default state in bytes per number of a matrix of 16 × 1280."""
    from trainer.config.methods import MasterWeight
    from trainer.config.optimizers.kinds import OPTIMIZERS

    config = OPTIMIZERS[optimizer].model_validate({})
    weight = MasterWeight((16, 1280), starts_at_zero=False)
    size = sum(config.state_sizes(weight)) / weight.numbers
    return {"library": config.method.library, "state_bytes_per_number": round(size, 4)}


def _lines(found: list[dict[str, Any]]) -> Iterator[str]:
    for kind, heading in _HEADINGS.items():
        ours = [each for each in found if each["kind"] == kind]
        yield f"{heading} ({ours[0]['key']})"
        if kind == "other":
            lines = textwrap.wrap(", ".join(each["name"] for each in ours), 110)
            yield from (f"  {line}" for line in lines)
            yield ""
            continue
        for each in ours:
            state = each.get("state_bytes_per_number")
            yield f"  {each['name']}: {each['purpose']}"
            yield f"    {each['title']}; {each['source']}" + (
                f"; {state:.3g} bytes of state per number" if state else ""
            )
            if each["names"]:
                yield f"    also called {', '.join(each['names'])}"
            if each["loads_in"]:
                yield f"    loads in {each['loads_in']}"
        yield ""
