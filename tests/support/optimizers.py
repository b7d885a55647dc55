"""Every optimizer of the registry, with arguments that show all of its state within a few steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from trainer.config.optimizers.kinds import OPTIMIZERS
from trainer.config.optimizers.section import OptimizerSection
from trainer.config.toml_file import toml_value

NAMES = tuple(OPTIMIZERS)
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "adafactor": {"beta1": 0.9, "scale_parameter": True},
    # Their estimates grow within few steps.
    "dadapt_adam": {"d0": 1e-4},
    "prodigy": {"d_coef": 20.0},
    "prodigy_plus_schedulefree": {"d_coef": 20.0},
    "schedulefree": {"warmup_steps": 2},
}
"""Arguments that differ from the defaults."""

# Values that no optimizer has as a default.
_OTHER_VALUES: Mapping[str, Any] = {
    "beta1": 0.8, "beta2": 0.97, "beta3": 0.98, "eps": 1e-7, "weight_decay": 0.02, "warmup_steps": 9, "d_coef": 0.9,
    "d0": 1e-5, "growth_rate": 1.02, "clip_threshold": 0.9, "decay_rate": -0.7,
    "rate_per_part": True, "optimizer": "lamb", "args": {"betas": [0.8, 0.9], "weight_decay": 0.02},
}  # fmt: skip


def quick(*names: str) -> list[Any]:
    """Return every optimizer as a parameter of a test that takes seconds: all but these are marked slow."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def config_of(name: str, **arguments: Any) -> OptimizerSection:
    """Return an optimizer's config with these arguments."""
    return OPTIMIZERS[name].model_validate(arguments)


def rate_of(name: str) -> float:
    """Return a learning rate with which it moves the weights of a test."""
    return 1.0 if OPTIMIZERS[name].method.finds_rate else 1e-3


def settings_of(name: str) -> list[str]:
    """Return the overrides of a job that select an optimizer with :data:`ARGUMENTS` and a suitable rate."""
    texts = [f"recipe.optimizer.name={name}"]
    texts += [f"recipe.optimizer.{key}={toml_value(value)}" for key, value in ARGUMENTS.get(name, {}).items()]
    return [*texts, "recipe.learning_rate=1.0"] if OPTIMIZERS[name].method.finds_rate else texts


def other_arguments(name: str) -> dict[str, Any]:
    """Return another value than its default for every argument of an optimizer."""
    fields = {key: field for key, field in OPTIMIZERS[name].model_fields.items() if key != "name"}
    return {
        key: not field.default if isinstance(field.default, bool) else _OTHER_VALUES[key]
        for key, field in fields.items()
    }


def every_argument(name: str) -> str:
    """Return an override that gives every argument of an optimizer another value than its default."""
    stated = {"name": f'"{name}"', **{key: toml_value(value) for key, value in other_arguments(name).items()}}
    return f"recipe.optimizer={{{', '.join(f'{key}={value}' for key, value in stated.items())}}}"
