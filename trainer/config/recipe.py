"""What is learned and how; travels between artists unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from trainer.config.captions import CaptionConfig
from trainer.config.model import Section
from trainer.config.objective import ObjectiveConfig
from trainer.config.optimizer import AdafactorConfig, AdamWConfig, OptimizerConfig, ProdigyConfig, ScheduleFreeConfig
from trainer.config.pictures import PictureConfig
from trainer.config.schedule import ScheduleConfig

Rank = Annotated[int, Field(ge=1, le=1024)]
Alpha = Annotated[float, Field(gt=0.0, le=4096.0)]
LearningRate = Annotated[float, Field(ge=0.0, le=100.0)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]

LENGTH_KEYS = ("steps", "epochs", "pictures_seen")


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
    dropout: Share = 0.0
    """Chance that a value inside the LoRA is left out in a step; a guard against overfitting."""
    rank_dropout: Share = 0.0
    """Chance that a whole rank of a layer's LoRA is left out in a step."""
    module_dropout: Share = 0.0
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
