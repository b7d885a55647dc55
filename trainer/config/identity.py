"""What of a job must stay as it is while its run is resumed, and how two jobs differ there, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainer.config.job import Job
from trainer.config.recipe import LENGTH_KEYS
from trainer.config.write import toml_value

# Rounding apart, the rest of a fit changes no result: a run may go on with a smaller micro-batch or more checkpointing.
FIT_NUMERICS = ("dtype", "quantise", "int8_products", "vae_dtype", "vae_encode_tiling")


def identity(job: Job) -> dict[str, object]:
    """The parts of a resolved job that must not change on resume, as dotted key to JSON value.

    Base, dataset, recipe except its length, and the number formats of the fit.
    """
    data = job.model_dump(mode="json", by_alias=True)
    recipe = {key: value for key, value in data["recipe"].items() if key not in LENGTH_KEYS}
    fit = {key: data["fit"][key] for key in FIT_NUMERICS}
    kept = {"base": data["base"], "dataset": data["dataset"], "recipe": recipe, "fit": fit}
    return dict(flat(kept, ""))


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """How identity ``new`` differs from ``old``, one sentence a key: "recipe.rank was 16 and is now 32"."""
    return [f"{key} was {before} and is now {after}" for key, before, after in changes(old, new)]


def changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Return each key that differs with its old and its new value, as people read them."""
    return [
        (key, _shown(old.get(key)), _shown(new.get(key)))
        for key in dict.fromkeys((*old, *new))
        if old.get(key) != new.get(key)
    ]


def flat(value: object, key: str) -> Iterator[tuple[str, object]]:
    """The single values of nested JSON tables as (dotted key, value); ``key`` is put before each."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {str(number): item for number, item in enumerate(value)}
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _shown(value: object) -> str:
    if value is None or value == "":
        return "not set"
    return toml_value(value)
