"""The recipe: what a LoRA learns and how. It is the same on every machine; the fit adapts it to one of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator

from trainer.config.base import Part
from trainer.config.optimizers.kinds import AdamWConfig, OptimizerConfig
from trainer.config.schema import Section

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
LARGEST_ROTATION = 45
"""Largest random rotation of images, in degrees; further ones would turn sides into tops."""
LENGTH_KEYS = ("steps", "epochs", "images_seen")


def _fractional_steps(section: Section, *keys: str) -> Iterator[tuple[str, str]]:
    """Yield an error for each key whose value is neither a whole number of steps nor a share of the run below 1."""
    for key in keys:
        value = getattr(section, key)
        if isinstance(value, float) and value >= 1:
            yield key, f"is {value}: use a whole number of steps, or a share of the run below 1"


class CaptionConfig(Section):
    """Caption processing: prefix and suffix, dropout, wildcards, kept, shuffled and dropped tags, other separators."""

    prefix: str = Field(default="", title="Caption prefix")
    """Text added before every caption (kohya: caption_prefix)."""
    suffix: str = Field(default="", title="Caption suffix")
    """Text added after every caption (kohya: caption_suffix)."""
    separator: str = Field(default=",", min_length=1, title="Tag separator")
    """Text that separates tags (kohya: caption_separator)."""
    shuffle: bool = Field(default=False, title="Shuffle tags")
    """Shuffle the tags each time an image is used (kohya: shuffle_caption)."""
    keep_tokens: int = Field(default=0, ge=0, le=100)
    """Number of leading tags never shuffled or dropped (kohya: keep_tokens); the trigger word counts as one."""
    keep_separator: str = Field(default="", title="Keep tokens separator")
    """Tags before this mark, such as |||, are never shuffled or dropped (kohya: keep_tokens_separator); empty: none."""
    dropout: Fraction = Field(default=0.0, title="Caption dropout")
    """Probability of training an image without its caption (kohya: caption_dropout_rate); typically 0.05 to 0.1."""
    tag_dropout: Fraction = 0.0
    """Probability of dropping each tag that is not kept (kohya: caption_tag_dropout_rate)."""
    wildcards: bool = False
    """Replace {a|b|c} in a caption with one of the options each time an image is used (kohya: enable_wildcard)."""
    secondary_separator: str | None = None
    """Keeps tags together while shuffling, then becomes the tag separator (kohya: secondary_separator); empty: none."""
    dropout_every_epochs: int | None = Field(default=None, ge=2, le=1_000_000, title="Caption dropout every N epochs")
    """Train every Nth epoch without captions (kohya: caption_dropout_every_n_epochs); default: off."""
    token_warmup_step: int | float | None = Field(default=None, gt=0, le=10_000_000)
    """Captions grow to all tags over these steps, or this share of the run (kohya: token_warmup_step); default: off."""
    token_warmup_min: int | None = Field(default=None, ge=0, le=100)
    """Tags at step 0 of token_warmup_step, without those that are kept (kohya: token_warmup_min); default: 1."""

    def warmup_steps(self, steps: int | None) -> int:
        """Return the number of steps in which captions grow, in a run of ``steps`` steps (None: not known yet)."""
        length = self.token_warmup_step or 0
        return int(length * (steps or 0)) if length < 1 else int(length)

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield an error for a number of warm-up steps that is not whole."""
        yield from _fractional_steps(self, "token_warmup_step")


Loss = Literal["mse", "l1", "huber", "smooth_l1", "log_cosh"]
_LOSS_NAMES = get_args(Loss)


def parse_loss_mix(text: str) -> tuple[tuple[str, float], ...]:
    """Return the losses and weights of a text such as "mse:0.8,l1:0.2"; raises ValueError if it is not one."""
    pairs = [pair.split(":") for pair in text.split(",")]
    losses = tuple((name.strip(), float(weight)) for name, weight in pairs)
    names = [name for name, _ in losses]
    if len(set(names)) < len(names) or not set(names) <= set(_LOSS_NAMES):
        raise ValueError(text)
    if not all(0.0 < weight <= 100.0 for _, weight in losses):
        raise ValueError(text)
    return losses


class ObjectiveConfig(Section):
    """Loss, timesteps and noise. trainer/training/objective.py has the formulas and their sources."""

    loss: Loss = Field(default="mse", title="Loss type")
    """Loss function (kohya: loss_type): mse is standard; the others are less affected by outlier images."""
    loss_mix: str | None = Field(default=None, max_length=100, examples=["mse:0.8,l1:0.2"])
    """Weighted sum of losses in place of loss (OneTrainer: mse_strength, mae_strength); default: off."""
    huber_c: float = Field(default=0.1, gt=0.0, le=10.0, title="Huber c")
    """Error above which huber and smooth_l1 grow linearly (kohya: huber_c); lower: outliers count less."""
    huber_schedule: Literal["constant", "exponential", "snr"] | None = None
    """How huber_c changes with noise (kohya: huber_schedule): the others fall to it from 1; default: constant."""
    huber_scale: float | None = Field(default=None, gt=0.0, le=100.0)
    """Factor of huber_c with the schedules constant and exponential (kohya: huber_scale); default: 1."""
    min_snr_gamma: float | None = Field(default=None, gt=0.0, le=100.0, title="Min-SNR gamma")
    """Balances easy and hard timesteps (kohya: min_snr_gamma, diffusers: snr_gamma); typically 5; default: off."""
    debiased_estimation: bool = Field(default=False, title="Debiased estimation")
    """Weights the loss by 1/sqrt(SNR) (kohya: debiased_estimation_loss); cannot be combined with min_snr_gamma."""
    p2_gamma: float | None = Field(default=None, gt=0.0, le=10.0, title="P2 gamma")
    """Weights the loss by (1 + SNR)^-gamma, so that noisy timesteps count more; typically 0.5 to 1; default: off."""
    scale_v_pred_loss: bool | None = Field(default=None, title="Scale v-prediction loss")
    """Weights v-prediction like noise prediction (kohya: scale_v_pred_loss_like_noise_pred); default: off."""
    v_pred_like_loss: float | None = Field(default=None, gt=0.0, le=100.0, title="V-prediction-like loss")
    """Adds this share of a v-prediction loss to that of an epsilon base (kohya: v_pred_like_loss); default: off."""
    noise_offset: float = Field(default=0.0, ge=0.0, le=1.0)
    """Random brightness shift of the noise, for darker darks and brighter brights; typically 0.03 to 0.1; 0: off."""
    noise_offset_random_strength: bool | None = Field(default=None, title="Random noise offset")
    """Draw each noise offset from 0 to noise_offset (kohya: noise_offset_random_strength); default: off."""
    adaptive_noise_scale: float | None = Field(default=None, ge=-10.0, le=10.0)
    """Adds this times each channel's average to the noise offset (kohya: adaptive_noise_scale); default: off."""
    multires_discount: float = Field(default=0.0, ge=0.0, lt=1.0, title="Multires noise discount")
    """Adds coarse noise, each level weaker by this factor (kohya: multires_noise_discount); typically 0.3; 0: off."""
    multires_iterations: int = Field(default=6, ge=1, le=10, title="Multires noise levels")
    """Number of coarse noise levels (kohya: multires_noise_iterations); typically 6 to 10."""
    input_perturbation: float = Field(default=0.0, ge=0.0, le=1.0)
    """Extra noise on the input but not in the target (kohya: ip_noise_gamma); typically 0.05 to 0.1; 0: off."""
    input_perturbation_random_strength: bool | None = Field(default=None, title="Random input perturbation")
    """Draw the strength of each extra noise (kohya: ip_noise_gamma_random_strength); default: off."""
    prior_weight: float = Field(default=1.0, ge=0.0, le=100.0, title="Prior loss weight")
    """Loss weight of regularization images (kohya: prior_loss_weight)."""
    prior_prediction: bool | None = None
    """Regularization images keep what the base predicts (OneTrainer: prior prediction); slower steps; default: off."""
    unmasked_weight: float = Field(default=0.1, ge=0.0, le=1.0)
    """Loss weight of the area outside a mask (OneTrainer: unmasked weight); 0 ignores that area, 1 ignores the mask."""
    unmasked_probability: Fraction | None = None
    """Probability of training an image as if it had no mask (OneTrainer: unmasked probability); default: 0."""
    normalize_masked_loss: bool | None = None
    """Divide an image's loss by the mean of its mask (OneTrainer: normalize masked area loss); default: off."""
    timesteps: Literal["uniform", "logit_normal"] = Field(default="uniform", title="Timestep distribution")
    """How timesteps are sampled: uniform is standard; logit_normal prefers medium noise."""
    timestep_shift: float | None = Field(default=None, gt=0.0, le=100.0)
    """Moves timesteps toward noise (kohya: discrete_flow_shift); typically 2.5 to 3 with flow; default: 1, no shift."""
    timestep_min: int = Field(default=0, ge=0, le=999, title="Min timestep")
    """Lowest timestep (kohya: min_timestep); 0 is the least noise."""
    timestep_max: int = Field(default=999, ge=0, le=999, title="Max timestep")
    """Highest timestep; 999 is the most noise (kohya: max_timestep, which is exclusive: 1000 there is 999 here)."""

    timestep_bias: Literal["earlier", "later", "range"] | None = None
    """Timesteps sampled more often (diffusers: timestep_bias_strategy); earlier prefers little noise; default: off."""
    timestep_bias_multiplier: float | None = Field(default=None, gt=0.0, le=1000.0)
    """How many times as often the biased timesteps are sampled; below 1: less often; default: 2."""
    timestep_bias_portion: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Share of the timesteps that earlier and later sample more often; default: 0.25."""
    timestep_bias_begin: int | None = Field(default=None, ge=0, le=999)
    """First timestep of the biased range; default: 0."""
    timestep_bias_end: int | None = Field(default=None, ge=1, le=1000)
    """End of the biased range, exclusive as in diffusers: 500 stands for timesteps up to 499; default: 1000."""

    @property
    def biased_timesteps(self) -> range:
        """Return those of the timesteps in use that the bias is for; earlier and later are for a share of them."""
        low, end = self.timestep_min, self.timestep_max + 1
        share = int((self.timestep_bias_portion or 0.25) * (end - low))
        match self.timestep_bias:
            case "earlier":
                return range(low, low + share)
            case "later":
                return range(end - share, end)
            case "range":
                first, last = self._bias_limits
                return range(max(low, first), min(end, last))
        return range(0)

    @property
    def _bias_limits(self) -> tuple[int, int]:
        end = 1000 if self.timestep_bias_end is None else self.timestep_bias_end
        return self.timestep_bias_begin or 0, end

    @property
    def idle_bias(self) -> str:
        """Return why the timestep bias changes no probability; empty if it does, or if there is none."""
        used, biased = self.timestep_max + 1 - self.timestep_min, len(self.biased_timesteps)
        if self.timestep_bias is None or (0 < biased < used and self.timestep_bias_multiplier != 1.0):
            return ""
        if self.timestep_bias_multiplier == 1.0:
            return "the biased timesteps are sampled as often as the others (timestep_bias_multiplier = 1)"
        if biased:
            return f"all timesteps in use, {self.timestep_min} to {self.timestep_max}, are in its range"
        if self.timestep_bias == "range":
            return f"no timestep in use, {self.timestep_min} to {self.timestep_max}, is in its range"
        return "its share of the timesteps is less than one (timestep_bias_portion)"

    @property
    def snr_weights(self) -> tuple[str, ...]:
        """Return the keys that are on and weight timesteps by the signal-to-noise ratio of a diffusion schedule."""
        states = {
            "min_snr_gamma": self.min_snr_gamma,
            "debiased_estimation": self.debiased_estimation,
            "p2_gamma": self.p2_gamma,
            "scale_v_pred_loss": self.scale_v_pred_loss,
            "v_pred_like_loss": self.v_pred_like_loss,
            "huber_schedule": self.has_threshold and self.huber_schedule == "snr",
        }
        return tuple(key for key, is_on in states.items() if is_on)

    @property
    def has_threshold(self) -> bool:
        """Return whether the loss grows linearly above a threshold, which the huber keys set."""
        return any(name in ("huber", "smooth_l1") for name, _ in self.losses)

    @property
    def losses(self) -> tuple[tuple[str, float], ...]:
        """Return the names and weights of the losses that are added up; raises ValueError for an invalid mix."""
        return ((self.loss, 1.0),) if self.loss_mix is None else parse_loss_mix(self.loss_mix)

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield errors for an invalid mix, for two loss weightings at once and for empty timestep ranges."""
        try:
            _ = self.losses
        except ValueError:
            form = f"write loss:weight pairs such as mse:0.8,l1:0.2, each of {', '.join(_LOSS_NAMES)} at most once"
            yield "loss_mix", f"is wrong: {form}, with weights above 0 and up to 100"
            return
        weightings = {
            "debiased_estimation": self.debiased_estimation,
            "p2_gamma": self.p2_gamma is not None,
            "min_snr_gamma": self.min_snr_gamma is not None,
        }
        first, *others = [key for key, is_on in weightings.items() if is_on] or [""]
        if others:
            words = " and ".join(others)
            yield first, f"cannot be combined with {words}: use only one of these weights of timesteps"
        if self.timestep_min > self.timestep_max:
            yield "timestep_min", f"is {self.timestep_min}, which is above timestep_max = {self.timestep_max}"
        begin, end = self._bias_limits
        if begin >= end:
            yield "timestep_bias_begin", f"is {begin}: must be below timestep_bias_end = {end}"


class ImagesConfig(Section):
    """Cropping, flipping and aspect ratio buckets."""

    buckets: bool = Field(default=True, title="Aspect ratio buckets")
    """Group images by aspect ratio (kohya: enable_bucket); off: crop every image to a square."""
    bucket_step: int = Field(default=64, ge=8, le=512, multiple_of=8)
    """Bucket sides are multiples of this, in pixels (kohya: bucket_reso_steps)."""
    bucket_min: int | None = Field(default=None, ge=8, le=8192, multiple_of=8)
    """Shortest bucket side in pixels (kohya: min_bucket_reso); default: half the resolution."""
    bucket_max: int | None = Field(default=None, ge=8, le=8192, multiple_of=8)
    """Longest bucket side in pixels (kohya: max_bucket_reso); default: twice the resolution."""
    max_upscale: float = Field(default=1.25, ge=1.0, le=16.0)
    """Largest factor by which small images are enlarged; 1 is kohya's bucket_no_upscale."""
    crop: Literal["center", "random"] = "center"
    """Part to keep if an image does not match its bucket's shape; crops set in impasto.jsonl are applied first."""
    flip: bool = Field(default=False, title="Random flip")
    """Mirror half of the images at random (kohya: flip_aug); leave off for anything asymmetric, such as text."""
    rotation: int | None = Field(default=None, ge=0, le=LARGEST_ROTATION)
    """Turn each image by a random angle of up to so many degrees (OneTrainer: random rotation); default: off."""
    color_jitter: bool | None = None
    """Shift the hue or gamma of a third of the samples a little (kohya: color_aug); default: off."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield an error if the shortest bucket side is above the longest."""
        if self.bucket_min is not None and self.bucket_max is not None and self.bucket_min > self.bucket_max:
            yield "bucket_min", f"is {self.bucket_min}, which is above bucket_max = {self.bucket_max}"


ScheduleKind = Literal[
    "constant",
    "linear",
    "cosine",
    "restarts",
    "polynomial",
    "rex",
    "inverse_sqrt",
    "warmup_stable_decay",
    "piecewise",
]


class ScheduleConfig(Section):
    """The learning rate schedule. trainer/config/lr_schedule.py has the formulas."""

    kind: ScheduleKind = Field(default="constant", title="LR scheduler")
    """How the learning rate changes (kohya: lr_scheduler); restarts is cosine with restarts."""
    warmup: int | float = Field(default=0, ge=0, title="LR warmup")
    """Warmup in steps, or as a share of the run if below 1: 100 or 0.05 (kohya: lr_warmup_steps)."""
    end: float = Field(default=0.0, ge=0.0, le=1.0, title="Min LR ratio")
    """Lowest share of the learning rate (kohya: lr_scheduler_min_lr_ratio); not for constant and piecewise."""
    cycles: int = Field(default=1, ge=1, le=100, title="LR cycles")
    """Number of cosine cycles with kind = "restarts" (kohya: lr_scheduler_num_cycles)."""
    power: float = Field(default=1.0, gt=0.0, le=10.0, title="LR power")
    """Exponent with kind = "polynomial" (kohya: lr_scheduler_power)."""
    timescale: int | None = Field(default=None, ge=1, le=10_000_000, title="LR timescale")
    """Steps in which inverse_sqrt falls to 0.71 (kohya: lr_scheduler_timescale); default: the warmup, else 10000."""
    decay: int | float | None = Field(default=None, gt=0, title="LR decay")
    """Last part in which warmup_stable_decay falls, as steps or as a share (kohya: lr_decay_steps); default: 0.1."""
    decay_type: Literal["cosine", "linear", "1-sqrt"] | None = Field(default=None, title="LR decay type")
    """How warmup_stable_decay falls in its last part; default: cosine."""
    step_rules: str | None = Field(
        default=None, max_length=20_000, title="LR step rules", examples=["1:100,0.1:200,0.01"]
    )
    """Factors of piecewise and the steps, or shares of the run, where they end: 1:100,0.1:200,0.01; default: none."""

    @property
    def has_end(self) -> bool:
        """Return whether the learning rate falls to ``end``."""
        return self.kind not in ("constant", "piecewise")

    def pieces(self) -> list[tuple[float, float]]:
        """Return the factors of ``step_rules`` and the step, or share of the run, where each ends; inf for the last.

        Raises ValueError if the rules are not of the form that diffusers' get_piecewise_constant_schedule takes.
        """
        *rules, last = [rule.split(":") for rule in (self.step_rules or "").split(",")]
        pieces = [(float(factor), float(end)) for factor, end in rules]
        (factor,) = last
        ends = [0.0, *(end for _, end in pieces)]
        factors = [*(factor for factor, _ in pieces), float(factor)]
        alike = all(end < 1 for end in ends) or all(end.is_integer() for end in ends)
        rising = all(a < b < math.inf for a, b in pairwise(ends))
        if not (alike and rising and all(0.0 <= each <= 1000.0 for each in factors)):
            raise ValueError(self.step_rules)
        return [*pieces, (float(factor), math.inf)]

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield errors for step numbers of 1 or more that are not whole, and for missing or wrong step rules."""
        yield from _fractional_steps(self, "warmup", "decay")
        if self.step_rules is None:
            if self.kind == "piecewise":
                yield "kind", 'is "piecewise", which needs step_rules, such as 1:100,0.1:200,0.01'
            return
        try:
            self.pieces()
        except ValueError:
            form = "write factor:step pairs with rising steps and the last factor, such as 1:100,0.1:200,0.01"
            yield "step_rules", f"is wrong: {form}; steps are whole numbers, or all are shares of the run below 1"


Rank = Annotated[int, Field(ge=1, le=1024)]
Alpha = Annotated[float, Field(gt=0.0, le=4096.0)]
LearningRate = Annotated[float, Field(ge=0.0, le=100.0)]
ShareBelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]


class TextEncoderConfig(Section):
    """How one text encoder is trained; with learning rate 0 it is not trained."""

    learning_rate: LearningRate = 0.0
    """Learning rate of this text encoder (kohya: text_encoder_lr); 0: not trained; typically 5e-5 for SD 1.5."""
    rank: Rank | None = None
    """LoRA rank in this text encoder; default: the recipe's rank."""
    alpha: Alpha | None = None
    """LoRA alpha in this text encoder; default: the recipe's alpha."""
    stop_after: int | float | None = Field(default=None, gt=0)
    """Train only for so many steps, or for this share of the run if below 1: 500 or 0.4; default: the whole run."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield an error for a number of steps that is not whole."""
        yield from _fractional_steps(self, "stop_after")


class BlockConfig(Section):
    """Rank, alpha and learning rate of some layers, such as one block."""

    match: str = Field(max_length=200, pattern=r"^[A-Za-z0-9_.*]+$")
    """Names of layers as in diffusers or as in checkpoints, such as unet.input_blocks.4.*, where * is any text."""
    rank: Rank | None = None
    """LoRA rank of these layers; default: as without this entry."""
    alpha: Alpha | None = None
    """LoRA alpha of these layers; default: as without this entry."""
    rate_factor: float | None = Field(default=None, ge=0.0, le=100.0, title="Learning rate factor")
    """Factor for the learning rate of these layers (kohya: block_lr_weight); 0: not trained; default: 1."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield an error for an entry that sets nothing."""
        if self.rank is None and self.alpha is None and self.rate_factor is None:
            yield "match", "is the only key of this entry: set rank, alpha or rate_factor too, or remove the entry"


AdapterKind = Literal["lora", "tlora", "dora", "loha", "lokr", "oft"]


class RecipeConfig(Section):
    """What the LoRA learns and how."""

    adapter: AdapterKind = Field(default="lora", title="Adapter type")
    """Type of adapter (kohya: network_module, algo); only lora and tlora files load in every program."""
    lokr_factor: int | None = Field(default=None, ge=2, le=1024, title="LoKr factor")
    """LoKr: size of the smaller matrix (LyCORIS: factor); larger: smaller files; default: as square as possible."""
    tlora_min_rank: Rank | None = Field(default=None, title="T-LoRA min rank")
    """T-LoRA: number of ranks that learn from the noisiest timesteps; default: half the rank."""
    layers: Literal["attention", "linear", "all"] = Field(default="linear", title="Trained layers")
    """UNet layers to train: attention only; all linear and 1x1 layers (as in kohya); or 3x3 layers too (LoCon)."""
    rank: Rank = 16
    """LoRA rank (kohya: network_dim): a higher rank learns more detail but overfits sooner; typically 8 to 64."""
    alpha: Alpha = 16.0
    """The LoRA is scaled by alpha/rank (kohya: network_alpha), like a learning rate; typically rank or half of it."""
    rank_stabilized: bool | None = Field(default=None, title="Rank-stabilized (rsLoRA)")
    """Scale by alpha/sqrt(rank), so that high ranks learn as fast (rsLoRA; peft: use_rslora); default: off."""
    conv_rank: Rank | None = None
    """Rank of 3x3 convolutions with layers = "all" (kohya: conv_dim); default: the recipe's rank."""
    conv_alpha: Alpha | None = None
    """Alpha of 3x3 convolutions with layers = "all" (kohya: conv_alpha); default: the recipe's alpha."""
    learning_rate: LearningRate = Field(default=1e-4, title="UNet learning rate")
    """Learning rate of the UNet (kohya: unet_lr); typically 1e-4, or 1.0 for Prodigy; 0: not trained."""
    lora_plus_ratio: float | None = Field(default=None, ge=1.0, le=1000.0, title="LoRA+ ratio")
    """LoRA+: factor by which the up matrices learn faster (kohya: loraplus_lr_ratio); typically 4 to 16; default: 1."""
    text_encoder: TextEncoderConfig = TextEncoderConfig()
    """The text encoder (SDXL: the first, CLIP-L)."""
    text_encoder_2: TextEncoderConfig = TextEncoderConfig()
    """SDXL's second text encoder (OpenCLIP bigG)."""
    blocks: tuple[BlockConfig, ...] | None = Field(default=None, strict=False, min_length=1, max_length=2000)
    """Ranks, alphas and learning rates of some layers; later entries take precedence; default: none."""
    dropout: ShareBelowOne = Field(default=0.0, title="LoRA dropout")
    """Dropout inside the LoRA, against overfitting (kohya: network_dropout); typically 0.1 to 0.3; 0: off."""
    rank_dropout: ShareBelowOne = 0.0
    """Probability of dropping each rank of a layer's LoRA in a step (kohya: rank_dropout); 0: off."""
    module_dropout: ShareBelowOne = 0.0
    """Probability of dropping a layer's whole LoRA in a step (kohya: module_dropout); 0: off."""
    optimizer: Annotated[OptimizerConfig, Field(discriminator="name")] = AdamWConfig()
    """Optimizer (kohya: optimizer_type); AdamW is a safe choice."""
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), title="Learning rate schedule")
    """How the learning rate changes during the run."""
    steps: int | None = Field(default=None, ge=1, le=10_000_000, title="Max steps")
    """Length in optimizer steps (kohya: max_train_steps). Set only one of steps, epochs and images_seen."""
    epochs: int | None = Field(default=None, ge=1, le=1_000_000, title="Max epochs")
    """Length in passes over the dataset (kohya: max_train_epochs)."""
    images_seen: int | None = Field(default=None, ge=1, le=100_000_000, title="Images seen")
    """Length as the number of images seen, repeats included: about steps times batch size."""
    effective_batch: int = Field(default=4, ge=1, le=4096, title="Effective batch size")
    """Images per optimizer step (kohya: train_batch_size x gradient_accumulation_steps); fit.micro_batch splits it."""
    max_grad_norm: float = Field(default=1.0, ge=0.0, le=1e6, title="Max gradient norm")
    """Gradients with a larger norm are scaled down to it (kohya: max_grad_norm); 0: off."""
    max_weight_norm: float | None = Field(default=None, gt=0.0, le=1e6, title="Max weight norm")
    """A layer's LoRA with a larger norm is scaled down to it (kohya: scale_weight_norms); typically 1; default: off."""
    ema_decay: float | None = Field(default=None, gt=0.0, lt=1.0, title="EMA decay")
    """Also save a moving average of the LoRA, as NAME-ema (OneTrainer: ema_decay); typically 0.999; default: off."""
    clip_skip: int | None = Field(default=None, ge=1, le=12)
    """Text encoder layer to use, counted as in kohya: 1 = last, 2 = penultimate; default: the last. SD 1.5 only."""
    token_chunks: Literal[75, 150, 225] = Field(default=75, title="Max token length")
    """Maximum caption length in tokens (kohya: max_token_length); longer captions are truncated."""
    caption_padding: Literal["caption", "limit"] | None = None
    """Pad each caption to as many times 75 tokens as it needs, or all to the limit as kohya does; default: caption."""
    weighted_captions: bool | None = None
    """Read (tag:1.2), (tag) and [tag] as weights, unless after a backslash (kohya: weighted_captions); default: off."""
    resolution: int | None = Field(default=None, ge=64, le=4096, multiple_of=8)
    """Training resolution in pixels: buckets have about this area (1024 = 1024x1024); default: 512 (SDXL: 1024)."""
    images: ImagesConfig = Field(default=ImagesConfig(), title="Images")
    """How images are cropped, flipped and sorted into buckets."""
    captions: CaptionConfig = CaptionConfig()
    """How captions are processed before they are encoded."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """Loss, timesteps and noise."""
    seed: int = Field(default=42, ge=0, le=2**63 - 1)
    """Random seed; on the CPU, or with fit.deterministic, the same seed gives the same LoRA."""

    @field_validator("optimizer", mode="before")
    @classmethod
    def _default_optimizer(cls, value: Any) -> Any:
        """Add the default optimizer's name to an optimizer table that has none."""
        return {"name": "adamw", **value} if isinstance(value, dict) else value

    @property
    def is_plain_lora(self) -> bool:
        """Return whether the file holds a plain LoRA, which every program loads."""
        return self.adapter in ("lora", "tlora")

    @property
    def has_low_rank(self) -> bool:
        """Return whether each layer has a product of a down and an up matrix."""
        return self.is_plain_lora or self.adapter == "dora"

    @property
    def needs_whole_base(self) -> bool:
        """Return whether the adapter reads all weights of the base before training, so that none can be streamed."""
        return self.adapter == "dora"

    @property
    def has_dropouts(self) -> bool:
        """Return whether any dropout inside the LoRA is on."""
        return self.dropout > 0 or self.rank_dropout > 0 or self.module_dropout > 0

    @property
    def has_caption_lengths(self) -> bool:
        """Return whether captions differ in padded length; runs of earlier versions do not set `caption_padding`."""
        return self.caption_padding == "caption" and self.token_chunks > 75

    @property
    def text_encoders(self) -> dict[Part, TextEncoderConfig]:
        """Return how each text encoder is trained, also those that are not or that the family does not have."""
        return {"text_encoder": self.text_encoder, "text_encoder_2": self.text_encoder_2}

    @property
    def stops(self) -> dict[Part, int]:
        """Return the number of steps for which text encoders are trained that are not trained to the end."""
        return {
            part: max(1, round(last * (self.steps or 1) if last < 1 else last))
            for part, encoder in self.text_encoders.items()
            if encoder.learning_rate and (last := encoder.stop_after) is not None
        }

    def alpha_at(self, rank: int) -> float:
        """Return the alpha at which a LoRA of another rank has the same scale."""
        ratio = rank / self.rank
        return self.alpha * (math.sqrt(ratio) if self.rank_stabilized else ratio)

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield errors for more than one length, nothing to train, and rates or schedules the optimizer cannot use."""
        lengths = [key for key in LENGTH_KEYS if getattr(self, key) is not None]
        if len(lengths) > 1:
            yield lengths[0], f"is set, and so is {' and '.join(lengths[1:])}: set only one length"
        if not any((self.learning_rate, self.text_encoder.learning_rate, self.text_encoder_2.learning_rate)):
            yield "learning_rate", "is 0 for the UNet and all text encoders, so nothing would be trained"
        yield from self._stop_rules()
        rates = {self.learning_rate, self.text_encoder.learning_rate, self.text_encoder_2.learning_rate} - {0.0}
        if self.optimizer.needs_one_rate and len(rates) > 1:
            yield (
                "learning_rate",
                f"must be equal for UNet and text encoders: {self.optimizer.who} finds one rate for all; "
                "set each to 1.0, or set optimizer.rate_per_part = true",
            )
        yield from self._schedule_rules()
        yield from self._layer_rules()
        yield from self._adapter_rules()

    def _stop_rules(self) -> Iterator[tuple[str, str]]:
        """Yield an error if nothing is left to train once the text encoders stop."""
        trained = {part: encoder for part, encoder in self.text_encoders.items() if encoder.learning_rate}
        if not self.learning_rate and trained and all(each.stop_after is not None for each in trained.values()):
            yield f"{[*trained][-1]}.stop_after", "leaves nothing to train after it, because the UNet is not trained"

    def _layer_rules(self) -> Iterator[tuple[str, str]]:
        """Yield errors for settings of single layers or matrices that the optimizer cannot follow."""
        optimizer = self.optimizer
        reason = f"{optimizer.who} finds the learning rates itself"
        for number, block in enumerate(self.blocks or ()):
            if optimizer.finds_rates and block.rate_factor not in (None, 0.0, 1.0):
                yield f"blocks.{number}.rate_factor", f"must be 0 or 1: {reason}"
        if optimizer.finds_rates and self.lora_plus_ratio not in (None, 1.0):
            yield "lora_plus_ratio", f"cannot be used: {reason}"
        if self.max_weight_norm is not None and optimizer.method.averages:
            yield "max_weight_norm", f"cannot be used: {optimizer.who} would not scale its averaged weights down"
        if self.ema_decay is not None and optimizer.method.averages:
            yield "ema_decay", f"cannot be used: {optimizer.who} averages the weights itself"

    def _adapter_rules(self) -> Iterator[tuple[str, str]]:
        """Yield errors for settings that the type of adapter cannot follow."""
        needs_lora = "needs a low-rank product: " + f'adapter = "{self.adapter}" has none'
        if not self.has_low_rank:
            for key in ("dropout", "rank_dropout", "module_dropout"):
                if getattr(self, key):
                    yield key, needs_lora
            if self.lora_plus_ratio not in (None, 1.0):
                yield "lora_plus_ratio", needs_lora
        if self.max_weight_norm is not None and not self.is_plain_lora:
            yield "max_weight_norm", f'cannot be used with adapter = "{self.adapter}": it limits plain LoRAs'
        if self.adapter == "oft" and self.rank_stabilized:
            yield "rank_stabilized", 'cannot be used with adapter = "oft", which has no scale'
        if self.adapter == "tlora" and self.learning_rate == 0:
            yield "adapter", 'is "tlora", which masks ranks of the UNet, but the UNet\'s learning rate is 0'

    def _schedule_rules(self) -> Iterator[tuple[str, str]]:
        optimizer = self.optimizer
        if not optimizer.ignores_rates and not optimizer.method.averages:
            return
        if self.schedule.kind != "constant":
            yield "schedule.kind", f'must be "constant": {optimizer.who} adjusts the learning rate itself'
        if self.schedule.warmup:
            own = f"has its own warmup, {optimizer.own_warmup}" if optimizer.own_warmup else "needs no warmup"
            yield "schedule.warmup", f"must be 0: {optimizer.who} {own}"
