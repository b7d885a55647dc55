"""What a base's files state about its training process: supported, unsupported, or unknown values.

Training with a different process ruins the result without an error, so a base is used only if all its statements are
known and supported. Otherwise, the user must set the job key that overrides the statement; if there is none, the base
is rejected.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from trainer.errors import BaseModelError

Prediction = Literal["epsilon", "v", "flow"]
JobKey = Literal["prediction", "zero_terminal_snr"]

PREDICTIONS: Mapping[str, Prediction] = {
    "epsilon": "epsilon", "eps": "epsilon", "epsscaling": "epsilon",
    "v": "v", "v_prediction": "v", "v_pred": "v", "vpred": "v", "velocity": "v", "vscaling": "v",
    "flow": "flow", "flow_matching": "flow", "flow_prediction": "flow", "rectified_flow": "flow",
}  # fmt: skip
"""What a base predicts, by each name used for it in files; names are in lower case with underscores."""
DIFFUSION_SCHEDULERS = (
    "DDIM", "DDIMParallel", "DDPM", "DDPMParallel", "PNDM", "LMSDiscrete", "EulerDiscrete", "EulerAncestralDiscrete",
    "HeunDiscrete", "KDPM2Discrete", "KDPM2AncestralDiscrete", "DPMSolverMultistep", "DPMSolverSinglestep",
    "DPMSolverSDE", "DEISMultistep", "UniPCMultistep", "SASolver",
)  # fmt: skip
"""diffusers schedulers for the diffusion process that Impasto trains, without the suffix "Scheduler"."""
FLOW_SCHEDULER = "FlowMatchEulerDiscreteScheduler"
"""diffusers scheduler of bases with rectified flow."""
FLOW_SAMPLING = frozenset({
    "base_image_seq_len", "base_shift", "invert_sigmas", "max_image_seq_len", "max_shift", "shift",
    "stochastic_sampling",
})  # fmt: skip
"""Keys of its config that only affect sampling, besides those of all schedulers."""
# Parts of values that identify a process that Impasto does not train; the first match decides.
_OTHER_PROCESSES = (
    (re.compile(r"flow|rectified", re.I), "flow matching"),
    (re.compile(r"edm|continuous|karrasve|cosinedpm", re.I), "an EDM process"),
    (re.compile(r"sample|x_?0", re.I), "prediction of the image itself"),
    (re.compile(r"consistency|lcm|tcd|CMStochastic", re.I), "a distilled model"),
)
_LARGEST_VALUE = 80


class StatementRule(NamedTuple):
    """Type and supported values of a statement.

    `settles` is the job key with which the user can override a value that is unknown or of the wrong type; if it is
    None, every unsupported value is rejected.
    """

    kind: type
    supported: frozenset[Any]
    settles: JobKey | None = None


def _one_of(*values: str, settles: JobKey | None = "prediction") -> StatementRule:
    return StatementRule(str, frozenset(_spelled(value) for value in values), settles)


def _number(value: float) -> StatementRule:
    return StatementRule(float, frozenset({value}))


def _spelled(text: str) -> str:
    return re.sub(r"[-\s]", "_", text.strip().lower())


_PREDICTION = _one_of(*PREDICTIONS)
_ZERO_SNR = StatementRule(bool, frozenset({True, False}), "zero_terminal_snr")
_NOTHING = StatementRule(type(None), frozenset({None}), "prediction")
_NEVER = StatementRule(bool, frozenset({False}), "prediction")

SCHEDULER: Mapping[str, StatementRule] = {
    "_class_name": _one_of(*(f"{name}Scheduler" for name in DIFFUSION_SCHEDULERS), FLOW_SCHEDULER),
    "prediction_type": _PREDICTION,
    "predict_epsilon": StatementRule(
        bool, frozenset({True}), "prediction"
    ),  # before diffusers 0.10; false meant prediction of the image itself
    "beta_schedule": _one_of("scaled_linear", settles=None),
    "beta_start": _number(0.00085),
    "beta_end": _number(0.012),
    "num_train_timesteps": _number(1000),
    "trained_betas": StatementRule(type(None), frozenset({None})),
    "rescale_betas_zero_snr": _ZERO_SNR,
    "use_flow_sigmas": _NEVER,
    "use_dynamic_shifting": _NEVER,
    "timestep_type": _one_of("discrete"),
    "sigma_min": _NOTHING,
    "sigma_max": _NOTHING,
}
"""Keys of diffusers scheduler configs that describe how the base was trained (noise schedule, prediction type)."""
SAMPLING = frozenset({
    "_diffusers_version", "algorithm_type", "clip_sample", "clip_sample_range", "corrector_order",
    "disable_corrector", "dynamic_thresholding_ratio", "euler_at_final", "eta", "final_sigmas_type", "flow_shift",
    "interpolation_type", "lambda_min_clipped", "lower_order_final", "noise_sampler_seed", "predict_x0",
    "predictor_order", "sample_max_value", "set_alpha_to_one", "shift_terminal", "skip_prk_steps", "solver_order",
    "solver_p", "solver_type", "steps_offset", "tau_func", "thresholding", "time_shift_type", "timestep_spacing",
    "use_beta_sigmas", "use_exponential_sigmas", "use_karras_sigmas", "use_lu_lambdas", "variance_type",
})  # fmt: skip
"""Keys of diffusers scheduler configs that only affect sampling."""
METADATA: Mapping[str, StatementRule] = {
    "modelspec.prediction_type": _PREDICTION,
    "ss_zero_terminal_snr": _one_of("true", "false", "none", settles="zero_terminal_snr"),
}
"""Keys in a single file's metadata that describe how the base was trained; their values are always strings."""
YAML: Mapping[str, StatementRule] = {
    "parameterization": _PREDICTION,
    "scaling": _PREDICTION,
    "discretization": _one_of("LegacyDDPMDiscretization"),
    "sampling": _one_of("DiscreteSampling"),
    "linear_start": _number(0.00085),
    "linear_end": _number(0.012),
    "beta_schedule": _one_of("linear", settles=None),  # linear in the square root, like scaled_linear in diffusers
    "timesteps": _number(1000),
    "num_idx": _number(1000),
    "zero_terminal_snr": _ZERO_SNR,
    "rescale_betas_zero_snr": _ZERO_SNR,
    "ztsnr": _ZERO_SNR,
    "zsnr": _ZERO_SNR,
}
"""Keys in the .yaml next to a single file that describe how the base was trained.

The values of `scaling`, `discretization` and `sampling` are class names."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A base's statement about its training process; `source` names the file or part that contains it."""

    source: str
    key: str
    value: Any

    def __str__(self) -> str:
        try:
            text = json.dumps(self.value)
        except (TypeError, ValueError):
            text = str(self.value)
        return f"{self.source} states {self.key} = {text[:_LARGEST_VALUE]}"


def doubts(base: str, statements: Iterable[Statement], rules: Mapping[str, StatementRule]) -> dict[JobKey, str]:
    """Return a sentence for each job key that the user has to set; it says what the base's files leave unknown.

    Raises BaseModelError, which names `base`, for a training process that Impasto does not support.
    """
    found: dict[JobKey, str] = {}
    for statement in statements:
        rule = rules.get(statement.key)
        if rule and _is_supported(statement.value, rule):
            continue
        other = _other_process(statement, rule)
        if other or (rule and rule.settles is None):
            raise _unsupported(base, statement, rule, other)
        found.setdefault(rule.settles if rule and rule.settles else "prediction", f"{statement}, which is unknown.")
    return found


def predicted(value: Any) -> Prediction | None:
    """Return what a base predicts according to a statement's value; None if the value is unknown."""
    return PREDICTIONS.get(_spelled(value)) if isinstance(value, str) else None


def _is_supported(value: Any, rule: StatementRule) -> bool:
    if rule.kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and any(math.isclose(value, one, rel_tol=1e-6) for one in rule.supported)
    return type(value) is rule.kind and (_spelled(value) if isinstance(value, str) else value) in rule.supported


def _other_process(statement: Statement, rule: StatementRule | None) -> str | None:
    """Return the name of the training process that an unsupported value stands for; None if it is not known."""
    if statement.key in ("use_flow_sigmas", "use_dynamic_shifting") and statement.value is True:
        return "flow matching"
    if statement.key == "predict_epsilon" and statement.value is False:
        return "prediction of the image itself"
    if rule is None or rule.kind is not str or not isinstance(statement.value, str):
        return None
    return next((name for pattern, name in _OTHER_PROCESSES if pattern.search(statement.value)), None)


def _unsupported(base: str, statement: Statement, rule: StatementRule | None, other: str | None) -> BaseModelError:
    if other:
        reason = f"that is {other}"
    else:
        reason = f"Impasto supports only {json.dumps(next(iter(rule.supported)))}" if rule else "this value is unknown"
    sentence = f'Could not use "{base}": {statement}, and {reason}.'
    remedy = "Choose an SD 1.5 or SDXL base that predicts noise (epsilon) or velocity (v)."
    remedy += f" If the value is a mistake, correct it in {statement.source}."
    return BaseModelError("base.process_unsupported", sentence, remedy)
