"""Optimizers of pytorch-optimizer and adv-optm that a recipe selects with name = "other", and why not the rest.

Each was run on a LoRA's weights: its state survives a checkpoint bit for bit, the weights stay at a learning rate of 0,
each group follows its own rate, weights without a gradient stay, and a step can be traced without a GPU.
`tests/train/training/optim/test_other.py` repeats that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from trainer.config.methods import FP32, MasterWeight, OptimizerMethod, StepWork
from trainer.config.optimizers.section import OptimizerSection
from trainer.config.schema import RegistryNames, nearest

_DECAY = "weight_decay weight_decouple fixed_decay"
_ADV = "cautious_wd orthogonal_gradient spectral_normalization centered_wd centered_wd_mode nnmf_factor vector_reshape"
_SPIKES = "kourkoutas_beta beta2_min ema_alpha tiny_spike k_warmup_steps"
_ADAM = (
    "adam_betas adam_eps adam_weight_decay adam_fisher_wd adam_use_bias_correction adam_use_atan2 "
    "adam_orthogonal_gradient adam_nesterov adam_nesterov_coef adam_kourkoutas_beta adam_beta2_min adam_ema_alpha "
    "adam_tiny_spike adam_k_warmup_steps adam_spectral_normalization adam_state_precision adam_nnmf_factor "
    "adam_factored_2nd"
)
# Bytes of state per number of a matrix of 16 × 640, and the arguments. Without those that set rates, devices or dtypes.
_PYTORCH_OPTIMIZER: Mapping[str, tuple[float, str]] = {
    "accsgd": (4, "kappa xi constant weight_decay"),
    "adabelief": (8, f"betas {_DECAY} rectify n_sma_threshold degenerated_to_sgd ams_bound eps"),
    "adabound": (8, f"betas gamma {_DECAY} ams_bound eps"),
    "adadelta": (8, f"rho {_DECAY} eps"),
    "adagc": (8, f"betas beta lambda_abs lambda_rel warmup_steps {_DECAY} eps"),
    "adai": (12, f"betas {_DECAY} stable_weight_decay dampening eps"),
    "adalite": (0.51, f"betas {_DECAY} g_norm_min ratio_min tau eps1 eps2"),
    "adamax": (8, f"betas {_DECAY} eps"),
    "adamc": (8, f"betas {_DECAY} ams_bound eps"),
    "adamg": (12, f"betas p q {_DECAY} eps"),
    "adamod": (12, f"betas {_DECAY} eps"),
    "adamp": (8, f"betas {_DECAY} delta wd_ratio nesterov eps"),
    "adams": (8, f"betas {_DECAY} ams_bound eps"),
    "adamuon": (8, "betas weight_decay weight_decouple ns_steps ns_coeffs use_adjusted_lr adamw_betas adamw_wd eps"),
    "adamwsn": (8, f"betas {_DECAY} subset_size eps"),
    "adan": (16, "betas weight_decay weight_decouple eps"),
    "adanorm": (8, f"betas r {_DECAY} ams_bound eps"),
    "adapnm": (16, f"betas {_DECAY} ams_bound eps"),
    "adasmooth": (16, f"betas {_DECAY} eps"),
    "adatam": (12, f"betas decay_rate {_DECAY} eps"),
    "ademamix": (12, f"betas {_DECAY} alpha t_alpha_beta3 eps"),
    "aggmo": (12, f"betas {_DECAY}"),
    "aida": (8, f"betas k xi {_DECAY} rectify n_sma_threshold degenerated_to_sgd ams_bound eps"),
    "alice": (50.63, f"betas alpha alpha_c update_interval rank gamma leading_basis {_DECAY} eps"),
    "amos": (0, "beta momentum extra_l2 c_coef d_coef eps"),
    "ano": (8, f"betas {_DECAY} logarithmic_schedule eps"),
    "apollo": (8, f"betas scale_type {_DECAY} correct_bias eps"),
    "avagrad": (8, f"betas {_DECAY} eps"),
    "bcos": (4, "beta beta2 mode simple_cond weight_decay weight_decouple eps"),
    "dash": (
        328.2,
        "betas grafting_beta weight_decay block_size precondition_frequency start_preconditioning_step "
        "inverse_root_method matrix_scaling newton_steps power_iteration_steps power_iteration_vectors "
        "momentum nesterov correct_bias eps matrix_eps",
    ),
    "diffgrad": (12, f"betas {_DECAY} rectify n_sma_threshold degenerated_to_sgd ams_bound eps"),
    "dualadam": (8, f"betas switch_rate {_DECAY} eps"),
    "emolynx": (4, f"betas use_shadow shadow_weight {_DECAY} eps"),
    "emonavi": (8, f"betas use_shadow shadow_weight {_DECAY} eps"),
    "exadam": (8, f"betas {_DECAY} eps"),
    "fadam": (8, "betas weight_decay clip p eps eps_2"),
    "fira": (8, "betas weight_decay eps"),
    "flashadamw": (2.12, "betas weight_decay quantize eps"),
    "focus": (8, "betas gamma weight_decay"),
    "fromage": (0, "p_bound"),
    "galore": (8, "betas weight_decay eps"),
    "grams": (8, "betas weight_decay weight_decouple eps"),
    "grokfastadamw": (12, f"betas grokfast grokfast_alpha grokfast_lamb grokfast_after_step {_DECAY} eps"),
    "kate": (8, f"delta {_DECAY} eps"),
    "kron": (
        164.1,
        "momentum weight_decay weight_decouple pre_conditioner_update_probability max_size_triangular "
        "min_ndim_triangular memory_save_mode momentum_into_precondition_update balance_prob",
    ),
    "lamb": (8, f"betas {_DECAY} rectify degenerated_to_sgd n_sma_threshold grad_averaging pre_norm eps"),
    "laprop": (8, f"betas centered steps_before_using_centered {_DECAY} ams_bound eps"),
    "lars": (4, "weight_decay momentum dampening trust_coefficient nesterov"),
    "madgrad": (12, "momentum weight_decay weight_decouple eps"),
    "mars": (12, f"betas gamma mars_type {_DECAY} ams_bound cautious eps"),
    "msvag": (8, "beta"),
    "muon": (
        4,
        "momentum weight_decay weight_decouple nesterov ns_steps ns_coeffs use_adjusted_lr adamw_betas "
        "adamw_wd adamw_eps ns_method ns_reset_steps",
    ),
    "muonclip": (
        4,
        "momentum weight_decay qk_clip_threshold qk_clip_alpha ns_steps ns_coeffs ns_method "
        "ns_reset_steps adamw_betas adamw_wd adamw_eps use_adjusted_lr",
    ),
    "nadam": (8, "betas eps weight_decay momentum_decay decoupled_weight_decay"),
    "normuon": (
        4.13,
        "momentum beta2 weight_decay weight_decouple nesterov ns_steps ns_coeffs update_scale "
        "use_adjusted_lr adamw_betas adamw_wd adamw_eps eps",
    ),
    "novograd": (4, f"betas {_DECAY} grad_averaging eps"),
    "padam": (8, f"betas partial {_DECAY} eps"),
    "pid": (0, f"momentum dampening derivative integral {_DECAY}"),
    "pnm": (8, f"betas {_DECAY} eps"),
    "qhadam": (8, f"betas nus {_DECAY} eps"),
    "qhm": (4, f"momentum nu {_DECAY}"),
    "racs": (0.26, f"beta alpha gamma {_DECAY} eps"),
    "radam": (8, f"betas {_DECAY} n_sma_threshold degenerated_to_sgd eps"),
    "ranger": (12, f"betas alpha k n_sma_threshold degenerated_to_sgd {_DECAY} use_gc gc_conv_only eps"),
    "rmsprop": (4, "alpha eps weight_decay momentum centered"),
    "rose": (0, f"{_DECAY} wd_schedule centralize stabilize"),
    "scion": (4, "momentum constraint norm_type scale weight_decay weight_decouple"),
    "scionlight": (0, "momentum constraint norm_type scale weight_decay weight_decouple"),
    "sgdp": (4, f"momentum dampening {_DECAY} delta wd_ratio nesterov eps"),
    "sgdsai": (4, "momentum weight_decay weight_decouple eps"),
    "sgdw": (0, "momentum weight_decay weight_decouple dampening nesterov"),
    "shampoo": (324.2, f"momentum {_DECAY} preconditioning_compute_steps matrix_eps"),
    "signsgd": (4, "momentum weight_decay weight_decouple"),
    "simplifiedademamix": (8, f"betas {_DECAY} alpha beta1_warmup min_beta1 eps"),
    "sm3": (4.26, "momentum beta eps"),
    "soap": (
        328.2,
        "betas shampoo_beta weight_decay precondition_frequency max_precondition_dim merge_dims "
        "precondition_1d correct_bias normalize_gradient eps",
    ),
    "tam": (8, f"momentum decay_rate {_DECAY} eps"),
    "tiger": (4, f"beta {_DECAY}"),
    "vsgd": (12, "ghattg ps tau1 tau2 weight_decay weight_decouple eps"),
    "yogi": (8, f"betas initial_accumulator {_DECAY} eps"),
}
_ADV_OPTM: Mapping[str, tuple[float, str]] = {
    "adamuon_adv": (
        8,
        f"betas eps weight_decay {_ADV} nesterov nesterov_coef rms_rescaling ns_steps ns_eps ns_coeffs "
        "use_atan2 normuon_variant state_precision factored_2nd kappa_p auto_projection low_rank_ortho "
        f"ortho_rank accelerated_ns cns_a_bound approx_mars mars_gamma {_ADAM}",
    ),
    "adamw_adv": (
        8,
        f"betas eps weight_decay fisher_wd {_ADV} use_bias_correction use_atan2 nesterov nesterov_coef "
        f"normed_momentum {_SPIKES} state_precision factored_2nd",
    ),
    "adopt_adv": (
        8,
        f"betas eps weight_decay fisher_wd {_ADV} clip_lambda use_atan2 nesterov nesterov_coef {_SPIKES} "
        "state_precision factored_2nd",
    ),
    "lion_adv": (4, f"betas weight_decay {_ADV} kappa_p auto_kappa_p stochastic_sign"),
    "muon_adv": (
        4,
        f"beta1 weight_decay {_ADV} nesterov nesterov_coef ns_steps ns_eps ns_coeffs rms_rescaling "
        "state_precision low_rank_ortho ortho_rank normuon_variant beta2_normuon normuon_eps "
        f"accelerated_ns cns_a_bound approx_mars mars_gamma {_ADAM}",
    ),
    "signsgd_adv": (
        4,
        f"momentum weight_decay geometric_wd {_ADV} stochastic_sign nesterov nesterov_coef "
        "normed_momentum snr_cond state_precision",
    ),
    "sinksgd_adv": (
        0,
        "momentum weight_decay sinkhorn_iterations orthogonal_sinkhorn normed_momentum snr_cond nesterov "
        f"nesterov_coef geometric_wd {_ADV} state_precision",
    ),
}


class OtherOptimizer(NamedTuple):
    """An optimizer by its name in a library's registry."""

    library: str
    state: float
    """Bytes of state per number of a matrix of 16 × 640; more for larger matrices if it keeps square ones."""
    arguments: tuple[str, ...]
    """Names of the arguments that `recipe.optimizer.args` can set."""


OTHERS: Mapping[str, OtherOptimizer] = {
    name: OtherOptimizer(library, state, tuple(arguments.split()))
    for library, table in (("pytorch-optimizer", _PYTORCH_OPTIMIZER), ("adv_optm", _ADV_OPTM))
    for name, (state, arguments) in table.items()
}
"""Optimizers by the lowercase names of their classes."""

_OWN = 'has a name of its own: set name = "{}" instead'
_CLOSURE = "needs gradients of gradients or several passes in a step"
_RATE = 'finds or ignores the learning rate: use name = "prodigy", "dadapt_adam" or "adafactor"'
_AVERAGES = 'trains other weights than it exports: use name = "schedulefree" or "radam_schedulefree"'
_STATE = "has state that cannot be saved, so that a run could not be resumed"
_AT_ZERO = "changes the weights at a learning rate of 0, as a warmup begins with, or fails there"
_WHOLE_MODEL = "needs a whole model, not the weights of a LoRA"
REFUSED: Mapping[str, str] = {
    **{name: _OWN.format(name) for name in ("adamw", "adopt", "came", "lion", "stableadamw")},
    "adam": _OWN.format("adamw"),
    **dict.fromkeys(("adahessian", "alig", "bsam", "lbfgs", "sophiah"), _CLOSURE),
    **dict.fromkeys(("a2grad", "adafactor", "apollodqn", "prodigy", "prodigy_adv"), _RATE),
    **dict.fromkeys(("dadaptadagrad", "dadaptadam", "dadaptadan", "dadaptlion", "dadaptsgd"), _RATE),
    **dict.fromkeys(("schedulefreeadamw", "schedulefreeradam", "schedulefreesgd", "splus"), _AVERAGES),
    **dict.fromkeys(("adashift", "conda", "emofact", "magma", "scalableshampoo", "spam", "stablespam"), _STATE),
    **dict.fromkeys(("adago", "asgd", "ftrl", "gravity", "nero", "srmm"), _AT_ZERO),
    **dict.fromkeys(("adalomo", "demo", "distributedmuon", "lomo", "lorarite", "ranger21", "sara"), _WHOLE_MODEL),
    **dict.fromkeys(("sgd", "spectralsphere", "swats"), "does not work with all weights of a LoRA"),
    "adammini": _OWN.format("adam_mini"),
}
"""Why an optimizer of the libraries cannot be used, as the end of a sentence that begins with its name."""


def _other_state(config: OtherConfig, weight: MasterWeight) -> list[int]:
    """Return whole tensors of the weight's size, then the rest as one."""
    found = OTHERS[config.optimizer]
    whole_tensors = int(found.state // FP32)
    rest = round((found.state - FP32 * whole_tensors) * weight.numbers)
    return [*(whole_tensors * [FP32 * weight.numbers]), *([rest] if rest else [])]


class OtherConfig(OptimizerSection):
    """One of the other optimizers of pytorch-optimizer and adv-optm, for experiments."""

    method = OptimizerMethod(
        title="Another optimizer",
        purpose="One of the other optimizers of pytorch-optimizer and adv-optm, for experiments.",
        source="the library's, with its defaults except for args",
        library="pytorch-optimizer",
        layout=_other_state,
        work=StepWork(0, 20, 130.0),
        copies=1.0,
    )
    name: Literal["other"] = "other"
    """Another optimizer of pytorch-optimizer or adv-optm."""
    optimizer: Annotated[str, RegistryNames(tuple(sorted(OTHERS)))] = Field(
        default="ademamix", max_length=40, examples=["ademamix"], title="Other optimizer"
    )
    """Name of its class in lowercase, such as lamb or muon_adv; `python -m trainer methods` lists all."""
    args: dict[str, Any] = Field(default={}, max_length=20, title="Arguments")
    """Its arguments (kohya: optimizer_args), such as {weight_decay = 0.1}; all others have the library's defaults."""

    @property
    def who(self) -> str:
        """Return the optimizer's own name."""
        return self.optimizer

    @property
    def registered_name(self) -> str:
        """Return its name in the library."""
        return self.optimizer

    @property
    def library(self) -> str:
        """Return the distribution that has it."""
        return OTHERS[self.optimizer].library

    @property
    def draws_random(self) -> bool:
        """Return True: some of them draw random numbers, such as when to update a preconditioner."""
        return True

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield errors for an optimizer that is unknown or cannot be used, and for arguments that it does not have."""
        found = OTHERS.get(self.optimizer)
        if found is None:
            reason = REFUSED.get(self.optimizer)
            yield "optimizer", f"{self.optimizer} {reason}" if reason else _unknown(self.optimizer, OTHERS)
            return
        for key, value in self.args.items():
            if key not in found.arguments:
                yield (
                    f"args.{key}",
                    f"{_unknown(key, found.arguments)}; {self.optimizer} has {_listed(found.arguments)}",
                )
            elif not is_argument(value):
                yield f"args.{key}", "must be a number, true, false, a short text or a list of up to 10 numbers"


def _unknown(word: str, names: Iterable[str]) -> str:
    near = nearest(word, list(names))
    return "unknown name" + (f" (did you mean {near}?)" if near else "")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def is_argument(value: Any) -> bool:
    """Return whether a value is one that an argument can have; NaN and infinity are not."""
    if isinstance(value, list):
        return len(value) <= 10 and all(isinstance(item, bool | int | float) and isfinite(item) for item in value)
    if isinstance(value, str):
        return len(value) <= 40
    return isinstance(value, bool | int | float) and isfinite(value)
