"""The optimizers with a name of their own, and their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from pydantic import Field

from trainer.config.methods import (
    FP32,
    QUANTIZATION_MAP_BYTES,
    HostReads,
    MasterWeight,
    OptimizerMethod,
    StepWork,
    quantized,
    whole,
)
from trainer.config.optimizers.others import OtherConfig
from trainer.config.optimizers.section import Beta, Epsilon, OptimizerSection, WeightDecay


class _AdamLike(OptimizerSection):
    beta1: Beta = 0.9
    """Momentum: decay rate of the gradient average; typically 0.9."""
    beta2: Beta = 0.999
    """Decay rate of the squared gradient average; typically 0.99 to 0.999."""
    eps: Epsilon = 1e-8
    """Epsilon: small number that prevents division by zero; typically 1e-8."""
    weight_decay: WeightDecay = 0.01
    """Weight decay; typically 0.01."""


_WAITS = "the library waits for the device after every tensor"


class AdamWConfig(_AdamLike):
    """AdamW: a safe choice."""

    method = OptimizerMethod(
        title="AdamW",
        purpose="A safe choice for everything.",
        source="torch.optim.AdamW; Loshchilov and Hutter 2019",
        names=("adam",),
        library="torch",
        layout=whole(2, FP32),
        work=StepWork(0, 9, 30.0),
    )
    name: Literal["adamw"] = "adamw"
    """AdamW, from PyTorch."""


class AdamW8bitConfig(_AdamLike):
    """AdamW with 8-bit state: saves a little memory."""

    method = OptimizerMethod(
        title="AdamW 8-bit",
        purpose="AdamW with a quarter of the state.",
        source="bitsandbytes.optim.AdamW8bit; Dettmers et al. 2022",
        names=("adamw8", "adam8bit", "adam_8bit", "adamw_8bit"),
        library="bitsandbytes",
        layout=quantized(2),
        shared=(QUANTIZATION_MAP_BYTES, QUANTIZATION_MAP_BYTES),
        work=StepWork(1, 7, 24.1),
        reads_note=_WAITS,
    )
    name: Literal["adamw8bit"] = "adamw8bit"
    """AdamW with 8-bit state, from bitsandbytes."""


class PagedAdamW8bitConfig(_AdamLike):
    """8-bit AdamW whose state can move to system memory."""

    method = OptimizerMethod(
        title="Paged AdamW 8-bit",
        purpose="8-bit AdamW whose state moves to system memory when the GPU is full.",
        source="bitsandbytes.optim.PagedAdamW8bit",
        names=("pagedadamw8bit",),
        library="bitsandbytes",
        layout=quantized(2, paged=True),
        shared=(QUANTIZATION_MAP_BYTES, QUANTIZATION_MAP_BYTES),
        work=StepWork(1, 7, 24.1),
        reads_note=_WAITS,
    )
    name: Literal["paged_adamw8bit"] = "paged_adamw8bit"
    """8-bit AdamW whose state can move to system memory, from bitsandbytes."""


class _LionLike(OptimizerSection):
    beta1: Beta = 0.9
    """Momentum used in a step; typically 0.9."""
    beta2: Beta = 0.99
    """Decay rate of the momentum; typically 0.99."""
    weight_decay: WeightDecay = 0.01
    """Weight decay; typically 0.01."""


class LionConfig(_LionLike):
    """Lion: needs a learning rate 3 to 10 times lower than AdamW."""

    method = OptimizerMethod(
        title="Lion",
        purpose="Half of AdamW's state; needs a learning rate 3 to 10 times lower.",
        source="bitsandbytes.optim.Lion; Chen et al. 2023",
        library="bitsandbytes",
        layout=whole(1),
        work=StepWork(1, 7, 26.0),
        reads_note=_WAITS,
        class_defaults={"weight_decay": 0.0},
    )
    name: Literal["lion"] = "lion"
    """Lion, from bitsandbytes."""


class Lion8bitConfig(_LionLike):
    """Lion with 8-bit state."""

    method = OptimizerMethod(
        title="Lion 8-bit",
        purpose="Lion with a quarter of its state.",
        source="bitsandbytes.optim.Lion8bit",
        names=("lion_8bit",),
        library="bitsandbytes",
        layout=quantized(1),
        shared=(QUANTIZATION_MAP_BYTES,),
        work=StepWork(1, 7, 23.0),
        reads_note=_WAITS,
        class_defaults={"weight_decay": 0.0},
    )
    name: Literal["lion8bit"] = "lion8bit"
    """Lion with 8-bit state, from bitsandbytes."""


def _adafactor_state(config: AdafactorConfig, weight: MasterWeight) -> list[int]:
    averages = [FP32 * numbers for numbers in weight.averages]
    return [*averages, FP32, *([FP32 * weight.numbers] if config.beta1 is not None else [])]


class AdafactorConfig(OptimizerSection):
    """Adafactor: needs very little memory."""

    method = OptimizerMethod(
        title="Adafactor",
        purpose="Needs very little memory; can choose the learning rate itself.",
        source="transformers.optimization.Adafactor; Shazeer and Stern 2018",
        library="transformers",
        layout=_adafactor_state,
        work=StepWork(24, 7, 100.0),
        reads_note=(
            "with scale_parameter, the RMS of every tensor and, if weight_decay is set too, the rate computed from it"
        ),
        class_defaults={"scale_parameter": True},
    )
    name: Literal["adafactor"] = "adafactor"
    """Adafactor, from transformers."""
    relative_step: bool = False
    """Adafactor chooses the learning rate itself; requires a constant schedule without warmup."""
    scale_parameter: bool = False
    """Scale the learning rate by the RMS of the weights, at least 0.001; half of a LoRA's weights start at zero."""
    warmup_init: bool = False
    """Start relative steps very small; requires relative_step."""
    clip_threshold: float = Field(default=1.0, gt=0.0)
    """Updates whose root mean square is above this threshold are scaled down to it."""
    decay_rate: float = Field(default=-0.8, lt=0.0)
    """Exponent that sets how the decay of the squared gradient average changes with the step; typically -0.8."""
    beta1: Beta | None = None
    """Momentum: decay rate of the gradient average; default: no momentum, which saves memory."""
    weight_decay: WeightDecay = 0.0
    """Weight decay; typically 0.01."""

    @property
    def who(self) -> str:
        """Return the name, with the argument that makes it choose the rate."""
        return "Adafactor with relative_step = true" if self.relative_step else self.method.title

    @property
    def ignores_rates(self) -> bool:
        """Return whether relative_step is on."""
        return self.relative_step

    @property
    def own_warmup(self) -> str:
        """Return its own warmup."""
        return "optimizer.warmup_init = true"

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield an error for warmup_init without relative_step, which transformers does not allow."""
        if self.warmup_init and not self.relative_step:
            yield "warmup_init", "requires relative_step = true"


def _came_state(_: CameConfig, weight: MasterWeight) -> list[int]:
    """Return the momentum, averages of squared gradients and residuals over each dimension, and the RMS."""
    averages = [FP32 * numbers for numbers in weight.averages]
    return [FP32 * weight.numbers, *averages, *averages, FP32]


class CameConfig(OptimizerSection):
    """CAME: half of AdamW's memory; use a warmup, because its first steps are about ten times larger than AdamW's."""

    method = OptimizerMethod(
        title="CAME",
        purpose="About half of AdamW's state: Adafactor with momentum and a measure of confidence.",
        source="pytorch_optimizer.CAME; Luo et al. 2023",
        library="pytorch-optimizer",
        layout=_came_state,
        work=StepWork(39, 7, 182.0),
        class_defaults={"weight_decay": 0.0},
    )
    name: Literal["came"] = "came"
    """CAME, from pytorch-optimizer."""
    beta1: Beta = 0.9
    """Momentum: decay rate of the update average; typically 0.9."""
    beta2: Beta = 0.999
    """Decay rate of the squared gradient averages; typically 0.999."""
    beta3: Beta = 0.9999
    """Decay rate of the averages of how far updates differ from the momentum; typically 0.9999."""
    clip_threshold: float = Field(default=1.0, gt=0.0)
    """Updates whose root mean square is above this threshold are scaled down to it."""
    weight_decay: WeightDecay = 0.01
    """Weight decay; typically 0.01."""


class AdamMiniConfig(_AdamLike):
    """Adam-mini: AdamW with half of its state."""

    method = OptimizerMethod(
        title="Adam-mini",
        purpose="AdamW with one step size per matrix, which needs half of its state.",
        source="pytorch_optimizer.AdamMini; Zhang et al. 2024",
        names=("adammini",),
        library="pytorch-optimizer",
        layout=whole(1, FP32, FP32),
        work=StepWork(3, 21, 58.0),
        copies=1.0,
        class_defaults={"weight_decay": 0.1},
    )
    name: Literal["adam_mini"] = "adam_mini"
    """Adam-mini, from pytorch-optimizer."""


def _adam_mini_8bit_state(_: AdamMini8bitConfig, weight: MasterWeight) -> list[int]:
    """Return the momentum in 8 bits, or in fp32 if it is small, and the average of the squared gradients."""
    return [*quantized(1)(None, weight), FP32]


class AdamMini8bitConfig(_AdamLike):
    """Adam-mini with 8-bit state: AdamW with an eighth of its state."""

    method = OptimizerMethod(
        title="Adam-mini 8-bit",
        purpose="Adam-mini with 8-bit momentum: an eighth of AdamW's state.",
        source="Zhang et al. 2024, with bitsandbytes' quantization (Dettmers et al. 2022)",
        names=("adammini8bit", "adam_mini_8bit"),
        library="bitsandbytes",
        layout=_adam_mini_8bit_state,
        shared=(QUANTIZATION_MAP_BYTES,),
        work=StepWork(17, 7, 60.0),
        class_defaults={"weight_decay": 0.1},
    )
    name: Literal["adam_mini8bit"] = "adam_mini8bit"
    """Adam-mini with 8-bit momentum."""


class AdoptConfig(_AdamLike):
    """ADOPT: Adam that converges with any beta2."""

    method = OptimizerMethod(
        title="ADOPT",
        purpose="Adam that converges with any beta2; its first step only measures gradients.",
        source="pytorch_optimizer.ADOPT; Taniguchi et al. 2024",
        library="pytorch-optimizer",
        layout=whole(2),
        work=StepWork(0, 17, 82.0),
        copies=2.0,
        first_moves=False,
        class_defaults={"weight_decay": 0.0},
    )
    name: Literal["adopt"] = "adopt"
    """ADOPT, from pytorch-optimizer."""
    beta2: Beta = 0.9999
    """Decay rate of the squared gradient average; typically 0.9999."""
    eps: Epsilon = 1e-6
    """Epsilon: the smallest divisor of a gradient; typically 1e-6."""


class StableAdamWConfig(_AdamLike):
    """StableAdamW: AdamW with clipped updates, which reduces loss spikes."""

    method = OptimizerMethod(
        title="StableAdamW",
        purpose="AdamW with Adafactor's clipping of updates, against loss spikes.",
        source="pytorch_optimizer.StableAdamW; Wortsman et al. 2023",
        library="pytorch-optimizer",
        layout=whole(2),
        work=StepWork(10, 15, 102.0),
        copies=1.0,
    )
    name: Literal["stableadamw"] = "stableadamw"
    """StableAdamW, from pytorch-optimizer."""
    beta2: Beta = 0.99
    """Decay rate of the squared gradient average; typically 0.99."""


class DAdaptAdamConfig(_AdamLike):
    """D-Adaptation Adam: finds the learning rate itself; set all learning rates to 1.0."""

    method = OptimizerMethod(
        title="D-Adaptation Adam",
        purpose="Finds the learning rate itself; the predecessor of Prodigy. Set all learning rates to 1.0.",
        source="pytorch_optimizer.DAdaptAdam; Defazio and Mishchenko 2023",
        names=("dadaptadam", "dadaptation", "dadapt"),
        library="pytorch-optimizer",
        layout=whole(3),
        work=StepWork(6, 23, 126.0),
        copies=1.0,
        reads=HostReads(per_step=2),
        finds_rate=True,
        one_rate=True,
        class_defaults={"weight_decay": 0.0},
        argument_names={"use_bias_correction": "bias_correction"},
    )
    name: Literal["dadapt_adam"] = "dadapt_adam"
    """D-Adaptation Adam, from pytorch-optimizer."""
    d0: float = Field(default=1e-6, gt=0.0, le=1.0)
    """Initial estimate of the step size; typically 1e-6."""
    growth_rate: float = Field(default=float("1e30"), gt=1.0)
    """Largest factor by which the estimate may grow per step; 1e30 is unlimited. If the loss rises early, use 1.02."""
    bias_correction: bool = False
    """Use Adam's bias correction in the first steps (kohya: use_bias_correction)."""
    rate_per_part: bool | None = None
    """Find a rate for UNet and text encoders each, whose learning rates may then differ; default: off."""

    @property
    def needs_one_rate(self) -> bool:
        """Return whether one rate is found for all parts."""
        return not self.rate_per_part


def _prodigy_state(_: ProdigyConfig, weight: MasterWeight) -> list[int]:
    first_value = FP32 if weight.starts_at_zero else FP32 * weight.numbers
    return [*(3 * [FP32 * weight.numbers]), first_value]


class ProdigyConfig(OptimizerSection):
    """Prodigy: finds the learning rate itself; set all learning rates to 1.0."""

    method = OptimizerMethod(
        title="Prodigy",
        purpose="Finds the learning rate itself; set all learning rates to 1.0.",
        source="prodigyopt.Prodigy; Mishchenko and Defazio 2023",
        library="prodigyopt",
        layout=_prodigy_state,
        work=StepWork(14, 7, 152.0),
        reads=HostReads(per_weight=2),
        reads_note="once, in the first step, whether a tensor is all zeros",
        finds_rate=True,
        one_rate=True,
        class_defaults={"weight_decay": 0.0, "safeguard_warmup": False, "bias_correction": False},
        argument_names={"use_bias_correction": "bias_correction"},
    )
    name: Literal["prodigy"] = "prodigy"
    """Prodigy, from prodigyopt."""
    beta1: Beta = 0.9
    """Momentum: decay rate of the gradient average; typically 0.9."""
    beta2: Beta = 0.999
    """Decay rate of the squared gradient average; typically 0.99 to 0.999."""
    weight_decay: WeightDecay = 0.01
    """Weight decay; typically 0.01."""
    d_coef: float = Field(default=1.0, gt=0.0, le=100.0)
    """Multiplies the learning rate that Prodigy finds; typically 0.5 to 2."""
    d0: float = Field(default=1e-6, gt=0.0, le=1.0)
    """Initial estimate of the step size; typically 1e-6."""
    growth_rate: float = Field(default=float("1e30"), gt=1.0)
    """Largest factor by which the estimate may grow per step; 1e30 is unlimited."""
    safeguard_warmup: bool = True
    """Keep the estimate from growing too fast during warmup."""
    bias_correction: bool = True
    """Use Adam's bias correction in the first steps (kohya: use_bias_correction)."""
    rate_per_part: bool | None = None
    """Find a rate for UNet and text encoders each, whose learning rates may then differ; default: off."""

    @property
    def needs_one_rate(self) -> bool:
        """Return whether one rate is found for all parts."""
        return not self.rate_per_part


class _ScheduleFreeLike(OptimizerSection):
    beta1: Beta = 0.9
    """Interpolation between the latest and the averaged weights; typically 0.9."""
    beta2: Beta = 0.999
    """Decay rate of the squared gradient average; typically 0.99 to 0.999."""
    eps: Epsilon = 1e-8
    """Epsilon: small number that prevents division by zero; typically 1e-8."""
    weight_decay: WeightDecay = 0.01
    """Weight decay; typically 0.01."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield an error for beta1 = 0.

        The averaged weights are computed from the trained and the latest weights. With beta1 = 0, these would be equal,
        and the average could not be recovered.
        """
        if self.beta1 == 0.0:
            yield "beta1", "must be above 0, or there are no averaged weights to export"


class ScheduleFreeConfig(_ScheduleFreeLike):
    """Schedule-Free AdamW: needs no learning rate schedule; set it to constant."""

    method = OptimizerMethod(
        title="Schedule-Free AdamW",
        purpose="Averages the weights instead of lowering the learning rate; needs a constant schedule.",
        source="schedulefree.AdamWScheduleFree; Defazio et al. 2024",
        names=("adamw_schedule_free", "adamwschedulefree", "schedule_free_adamw"),
        library="schedulefree",
        layout=whole(2),
        work=StepWork(0, 17, 86.0),
        copies=1.0,
        averages=True,
        class_defaults={"weight_decay": 0.0},
    )
    name: Literal["schedulefree"] = "schedulefree"
    """Schedule-Free AdamW, from schedulefree."""
    warmup_steps: int = Field(default=0, ge=0)
    """Warmup steps of the optimizer itself."""

    @property
    def own_warmup(self) -> str:
        """Return its own warmup."""
        return "optimizer.warmup_steps"


class RAdamScheduleFreeConfig(_ScheduleFreeLike):
    """Schedule-Free RAdam: needs neither a learning rate schedule nor warmup; set it to constant."""

    method = OptimizerMethod(
        title="Schedule-Free RAdam",
        purpose="Schedule-Free AdamW that warms up by itself; needs a constant schedule.",
        source="schedulefree.RAdamScheduleFree; Defazio et al. 2024, Liu et al. 2020",
        names=("radamschedulefree", "radam_schedule_free"),
        library="schedulefree",
        layout=whole(2),
        work=StepWork(0, 17, 86.0),
        copies=1.0,
        first_moves=False,
        averages=True,
        class_defaults={"weight_decay": 0.0},
    )
    name: Literal["radam_schedulefree"] = "radam_schedulefree"
    """Schedule-Free RAdam, from schedulefree."""


def _prodigy_plus_state(config: ProdigyPlusConfig, weight: MasterWeight) -> list[int]:
    """Return z, the second moment, and the initial weights and their sums in bf16, of which every 11th is kept."""
    numbers, sides = weight.numbers, sorted(weight.shape)
    kept = 2 * -(-numbers // 11)
    is_factored = config.factored and sides[-1] >= 32
    second = [FP32 * numbers // side for side in sides[-2:]] if is_factored else [FP32 * numbers]
    return [FP32 * numbers, *second, 2 if weight.starts_at_zero else kept, kept]


class ProdigyPlusConfig(_ScheduleFreeLike):
    """Prodigy with Schedule-Free averages: finds the rate of each part; set all learning rates to 1.0."""

    method = OptimizerMethod(
        title="Prodigy+ScheduleFree",
        purpose="Finds the learning rate of each part and needs no schedule; set all learning rates to 1.0.",
        source="prodigyplus.ProdigyPlusScheduleFree (LoganBooker)",
        names=("prodigyplusschedulefree", "prodigy_plus_schedule_free", "prodigyplus"),
        library="prodigy-plus-schedule-free",
        layout=_prodigy_plus_state,
        work=StepWork(35, 9, 122.6),
        reads=HostReads(per_group=2),
        reads_note="once, in the first step, whether a tensor is all zeros",
        finds_rate=True,
        averages=True,
        argument_names={"use_bias_correction": "bias_correction", "use_stableadamw": "stable_steps"},
    )
    name: Literal["prodigy_plus_schedulefree"] = "prodigy_plus_schedulefree"
    """Prodigy+ScheduleFree, from prodigy-plus-schedule-free."""
    beta2: Beta = 0.99
    """Decay rate of the squared gradient average; typically 0.99."""
    weight_decay: WeightDecay = 0.0
    """Weight decay; typically 0."""
    d_coef: float = Field(default=1.0, gt=0.0, le=100.0)
    """Multiplies the learning rate that is found; typically 0.5 to 2."""
    d0: float = Field(default=1e-6, gt=0.0, le=1.0)
    """Initial estimate of the step size; typically 1e-6."""
    factored: bool = True
    """Keep only averages of the squared gradients, which saves memory."""
    stable_steps: bool = True
    """Scale updates down by their root mean square (kohya: use_stableadamw)."""
    bias_correction: bool = False
    """Use RAdam's bias correction and warmup (kohya: use_bias_correction)."""


OptimizerConfig = (
    AdamWConfig
    | AdamW8bitConfig
    | PagedAdamW8bitConfig
    | LionConfig
    | Lion8bitConfig
    | AdafactorConfig
    | CameConfig
    | AdamMiniConfig
    | AdamMini8bitConfig
    | AdoptConfig
    | StableAdamWConfig
    | DAdaptAdamConfig
    | ProdigyConfig
    | ProdigyPlusConfig
    | ScheduleFreeConfig
    | RAdamScheduleFreeConfig
    | OtherConfig
)
OPTIMIZERS: dict[str, type[OptimizerSection]] = {
    kind.model_fields["name"].default: kind for kind in get_args(OptimizerConfig)
}
"""The table of each optimizer by its name."""
