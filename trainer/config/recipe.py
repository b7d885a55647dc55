"""What is learned and how; travels between artists unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from trainer.config.optimizer import AdafactorConfig, AdamWConfig, OptimizerConfig, ProdigyConfig, ScheduleFreeConfig
from trainer.config.schema import Section

Share = Annotated[float, Field(ge=0.0, le=1.0)]
LENGTH_KEYS = ("steps", "epochs", "pictures_seen")


class CaptionConfig(Section):
    """Caption handling, in the order: prefix and suffix, dropout, wildcards, tags kept, shuffled and dropped."""

    prefix: str = ""
    """Text put before every caption."""
    suffix: str = ""
    """Text put after every caption."""
    separator: str = Field(default=",", min_length=1)
    """What stands between tags."""
    shuffle: bool = False
    """Whether tags change their order each time a picture is shown."""
    keep_tokens: int = Field(default=0, ge=0, le=100)
    """How many tags at the front keep their place and are never dropped (the trigger word counts as one)."""
    keep_separator: str = ""
    """A mark such as ||| : tags before it (and after a second one) keep their place; empty: none."""
    dropout: Share = 0.0
    """Chance that a picture is shown without its caption, which keeps prompts without the trigger free."""
    tag_dropout: Share = 0.0
    """Chance that each tag beyond the kept ones is left out."""
    wildcards: bool = False
    """Whether {a|b|c} in a caption means one of the three at each showing."""


class ObjectiveConfig(Section):
    """The training objective; formulas and sources stand beside the code in trainer/training/objective.py."""

    loss: Literal["mse", "huber"] = "mse"
    """How an error counts: squared (mse), or less for large errors (huber), which forgives odd pictures."""
    huber_c: float = Field(default=0.1, gt=0.0, le=10.0)
    """Where huber turns from squared to linear; smaller forgives more."""
    min_snr_gamma: float | None = Field(default=None, gt=0.0, le=100.0)
    """Levels how much easy and hard noise strengths count (min-SNR); 5 is usual; absent: off."""
    debiased: bool = False
    """Weights noise strengths by 1/sqrt(SNR) (debiased estimation); not together with min_snr_gamma."""
    noise_offset: float = Field(default=0.0, ge=0.0, le=1.0)
    """Adds a random brightness shift to the noise, for darker darks and brighter brights; 0.05 is usual; 0: off."""
    multires_discount: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Mixes in coarser noise, each level weighing this much less (multires noise); 0.3 is usual; 0: off."""
    multires_levels: int = Field(default=6, ge=1, le=10)
    """How many coarser levels multires noise has."""
    input_perturbation: float = Field(default=0.0, ge=0.0, le=1.0)
    """Extra noise on the input but not in the target, against overfitting; 0.1 is usual; 0: off."""
    prior_weight: float = Field(default=1.0, ge=0.0, le=100.0)
    """How much regularisation pictures count against the others."""
    unmasked_weight: float = Field(default=0.1, ge=0.0, le=1.0)
    """How much the parts outside a mask still count."""
    timesteps: Literal["uniform", "logit_normal"] = "uniform"
    """How noise strengths are drawn: all alike, or mostly the middle ones."""
    timestep_min: int = Field(default=0, ge=0, le=999)
    """Smallest noise strength used (0 to 999)."""
    timestep_max: int = Field(default=999, ge=0, le=999)
    """Largest noise strength used (0 to 999)."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """One loss weighting at a time; a range of noise strengths that holds something."""
        if self.debiased and self.min_snr_gamma is not None:
            yield (
                "debiased",
                "cannot be combined with min_snr_gamma: both weigh the noise strengths; keep one of the two",
            )
        if self.timestep_min > self.timestep_max:
            yield "timestep_min", f"is {self.timestep_min}, which is above timestep_max = {self.timestep_max}"


class PictureConfig(Section):
    """How pictures are cropped, flipped and put into buckets of like shape."""

    buckets: bool = True
    """Whether pictures keep about their own shape (aspect-ratio buckets); off: all are cropped to a square."""
    bucket_step: int = Field(default=64, ge=8, le=512, multiple_of=8)
    """Bucket sides are multiples of this many pixels."""
    bucket_min: int | None = Field(default=None, ge=8, le=8192, multiple_of=8)
    """Shortest bucket side in pixels; absent: half the resolution."""
    bucket_max: int | None = Field(default=None, ge=8, le=8192, multiple_of=8)
    """Longest bucket side in pixels; absent: twice the resolution."""
    max_upscale: float = Field(default=1.25, ge=1.0, le=16.0)
    """Pictures are not enlarged more than this; smaller ones get a smaller bucket."""
    crop: Literal["center", "random"] = "center"
    """Which part is kept when a picture is not shaped like its bucket; a crop in impasto.jsonl is cut out first."""
    flip: bool = False
    """Whether half of the showings are mirrored; leave off for anything with a left and a right."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Bucket limits in their order."""
        if self.bucket_min is not None and self.bucket_max is not None and self.bucket_min > self.bucket_max:
            yield "bucket_min", f"is {self.bucket_min}, which is above bucket_max = {self.bucket_max}"


class ScheduleConfig(Section):
    """The learning-rate schedule; formulas stand beside the code in trainer/training/optim/lr_schedule.py."""

    kind: Literal["constant", "linear", "cosine", "restarts", "polynomial", "rex"] = "constant"
    """The shape: constant, falling in a line, falling in a cosine, a cosine that starts again, polynomial, or REX."""
    warmup: int | float = Field(default=0, ge=0)
    """Steps over which the rate rises from zero, or, below 1, the share of the run: 100 or 0.05."""
    end: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the learning rate that is left at the end (linear, cosine, restarts, polynomial)."""
    cycles: int = Field(default=1, ge=1, le=100)
    """How many cosines there are when kind = "restarts"."""
    power: float = Field(default=1.0, gt=0.0, le=10.0)
    """The exponent when kind = "polynomial"."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """A warm-up in steps is a whole number."""
        if self.warmup >= 1 and isinstance(self.warmup, float):
            yield "warmup", f"is {self.warmup}: write a whole number of steps, or a share of the run below 1"


Rank = Annotated[int, Field(ge=1, le=1024)]
Alpha = Annotated[float, Field(gt=0.0, le=4096.0)]
LearningRate = Annotated[float, Field(ge=0.0, le=100.0)]
ShareBelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]


class TextEncoderConfig(Section):
    """How a text encoder is trained along; with learning rate 0 it is not trained at all."""

    learning_rate: LearningRate = 0.0
    """How fast this text encoder learns; 0 means it is not trained."""
    rank: Rank | None = None
    """The size of its adapter; absent: the recipe's rank."""
    alpha: Alpha | None = None
    """The alpha of its adapter, which acts with strength alpha/rank; absent: the recipe's alpha."""


class RecipeConfig(Section):
    """What is learned and how."""

    adapter: Literal["lora"] = "lora"
    """The kind of adapter."""
    layers: Literal["attention", "linear", "all"] = "linear"
    """Which UNet layers learn: attention only, all linear and 1x1 layers (as kohya does), or 3x3 convolutions too."""
    rank: Rank = 16
    """How much the LoRA can hold: a higher rank learns more detail, makes a larger file and overfits sooner."""
    alpha: Alpha = 16.0
    """The LoRA acts with strength alpha/rank: changing alpha is like changing the learning rate."""
    conv_rank: Rank | None = None
    """Rank of the 3x3 convolutions when layers = "all"; absent: the recipe's rank."""
    conv_alpha: Alpha | None = None
    """Alpha of the 3x3 convolutions when layers = "all"; absent: the recipe's alpha."""
    learning_rate: LearningRate = 1e-4
    """How fast the UNet learns; 0 means it is not trained. Prodigy wants 1.0."""
    text_encoder: TextEncoderConfig = TextEncoderConfig()
    """The text encoder (SDXL: the first, CLIP-L)."""
    text_encoder_2: TextEncoderConfig = TextEncoderConfig()
    """SDXL's second text encoder (OpenCLIP bigG)."""
    dropout: ShareBelowOne = 0.0
    """Chance that a value inside the LoRA is left out in a step; a guard against overfitting."""
    rank_dropout: ShareBelowOne = 0.0
    """Chance that a whole rank of a layer's LoRA is left out in a step."""
    module_dropout: ShareBelowOne = 0.0
    """Chance that a layer's whole LoRA is left out in a step."""
    optimizer: Annotated[OptimizerConfig, Field(discriminator="name")] = AdamWConfig()
    """The rule by which weights are changed."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How the learning rate changes over the run."""
    steps: int | None = Field(default=None, ge=1, le=10_000_000)
    """Length of the run in optimizer steps. State one of steps, epochs and pictures_seen."""
    epochs: int | None = Field(default=None, ge=1, le=1_000_000)
    """Length of the run in passes over the dataset."""
    pictures_seen: int | None = Field(default=None, ge=1, le=100_000_000)
    """Length of the run as about how many pictures are shown in all."""
    effective_batch: int = Field(default=4, ge=1, le=4096)
    """How many pictures one optimizer step learns from, however they are split to fit the memory."""
    clip_gradient: float = Field(default=1.0, ge=0.0, le=1e6)
    """Gradients longer than this are shortened to it; 0 switches it off."""
    clip_skip: int | None = Field(default=None, ge=1, le=12)
    """Which text-encoder layer is read, as kohya counts: 1 = last, 2 = penultimate; absent: the last. SD 1.5 only."""
    token_chunks: Literal[75, 150, 225] = 75
    """How many caption tokens are read at most; longer captions are cut."""
    resolution: int | None = Field(default=None, ge=64, le=4096, multiple_of=8)
    """Side of the square whose area every bucket has, in pixels; absent: 512 for SD 1.5, 1024 for SDXL."""
    pictures: PictureConfig = PictureConfig()
    """How pictures are cropped, flipped and put into buckets."""
    captions: CaptionConfig = CaptionConfig()
    """How captions are turned into what the model reads."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """What the loss measures and which noise is used."""
    seed: int = Field(default=42, ge=0, le=2**63 - 1)
    """The number all chance in the run comes from: the same seed gives the same LoRA."""

    @field_validator("optimizer", mode="before")
    @classmethod
    def _default_optimizer(cls, value: Any) -> Any:
        """A table of arguments without a name means the default optimizer, as an absent table does."""
        return {"name": "adamw", **value} if isinstance(value, dict) else value

    @property
    def has_dropouts(self) -> bool:
        """Whether chance takes part in what the LoRA computes."""
        return self.dropout > 0 or self.rank_dropout > 0 or self.module_dropout > 0

    def rules(self) -> Iterator[tuple[str, str]]:
        """One length, something that learns, and rates and a schedule that the optimizer can use."""
        lengths = [key for key in LENGTH_KEYS if getattr(self, key) is not None]
        if len(lengths) > 1:
            yield lengths[0], f"says how long the run is, and so does {' and '.join(lengths[1:])}; keep one of them"
        if not any((self.learning_rate, self.text_encoder.learning_rate, self.text_encoder_2.learning_rate)):
            yield "learning_rate", "is 0, and that of the text encoders too: nothing would be trained"
        rates = {self.learning_rate, self.text_encoder.learning_rate, self.text_encoder_2.learning_rate} - {0.0}
        if isinstance(self.optimizer, ProdigyConfig) and len(rates) > 1:
            yield "learning_rate", "must be that of the trained text encoders: Prodigy finds one rate for all parts"
        yield from self._schedule_rules()

    def _schedule_rules(self) -> Iterator[tuple[str, str]]:
        own_rate = isinstance(self.optimizer, AdafactorConfig) and self.optimizer.relative_step
        if not own_rate and not isinstance(self.optimizer, ScheduleFreeConfig):
            return
        who = "Adafactor with relative_step = true" if own_rate else "Schedule-Free AdamW"
        if self.schedule.kind != "constant":
            yield "schedule.kind", f'must be "constant": {who} changes its steps by itself'
        if self.schedule.warmup:
            own = "optimizer.warmup_init = true" if own_rate else "optimizer.warmup_steps"
            yield "schedule.warmup", f"must be 0: {who} has its own warm-up, {own}"
