"""Whether a base's configs describe an SD 1.5 or SDXL that can be trained, and what it is otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.errors import BaseModelError, plain_reason

Family = Literal["sd15", "sdxl"]
Config = Mapping[str, Any]

NAMES: Mapping[Family, str] = {"sd15": "SD 1.5", "sdxl": "SDXL"}
CHOOSE_A_BASE = "Choose a normal SD 1.5 or SDXL model as the base."

# Where a UNet of full width must be as published, else it is a distilled or otherwise changed one.
_STRUCTURE = (
    *("block_out_channels", "down_block_types", "up_block_types", "layers_per_block", "transformer_layers_per_block"),
    *("attention_head_dim", "cross_attention_dim", "use_linear_projection", "mid_block_type"),
)
_DEFAULTS: Config = {
    "transformer_layers_per_block": 1,
    "attention_head_dim": 8,
    "use_linear_projection": False,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
}
_BY_CHANNELS = {9: "an inpainting model", 8: "an InstructPix2Pix model", 7: "an upscaler", 5: "a depth model"}
_BY_TEXT_WIDTH = {1024: "an SD 2 model", 1280: "the SDXL refiner"}

_Width = Annotated[int, Field(ge=1, le=8192)]
_Depth = Annotated[int, Field(ge=1, le=64)]
_Blocks = Annotated[list[_Width], Field(min_length=1, max_length=8)]


class _Numbers(BaseModel):
    """The numbers that decide how much is built: bounded, since anybody may have written the file."""

    model_config = ConfigDict(extra="allow", strict=True)


class _UNet(_Numbers):
    in_channels: _Width = 4
    cross_attention_dim: _Width
    block_out_channels: _Blocks
    layers_per_block: _Depth | list[_Depth] = 2
    transformer_layers_per_block: _Depth | list[_Depth | list[_Depth]] = 1


class _VAE(_Numbers):
    block_out_channels: _Blocks
    layers_per_block: _Depth = 1
    scaling_factor: Annotated[float, Field(gt=0)]


class _Text(_Numbers):
    hidden_size: _Width
    intermediate_size: Annotated[int, Field(ge=1, le=65536)]
    num_hidden_layers: Annotated[int, Field(ge=2, le=64)]
    vocab_size: Literal[49408]
    max_position_embeddings: Literal[77]


_CHECKS: Mapping[str, type[_Numbers]] = {"unet": _UNet, "vae": _VAE, "text_encoder": _Text, "text_encoder_2": _Text}


def check_configs(source: str, family: Family, configs: Mapping[str, Config], published: Config) -> None:
    """Refuse by name what is no SD 1.5 or SDXL base, and configs that no model can be built from.

    `published` is the family's own UNet config. Raises BaseModelError.
    """
    for part, check in _CHECKS.items():
        try:
            if part in configs:
                check.model_validate(dict(configs[part]))
        except ValidationError as error:
            sentence = f'The {part} config of "{source}" cannot be right: {plain_reason(error)}.'
            raise BaseModelError(
                "base.broken_config", sentence, "Get the model again or from another source."
            ) from error
    _check_unet(source, family, configs["unet"], published)


def _check_unet(source: str, family: Family, unet: Config, published: Config) -> None:
    if unet.get("in_channels", 4) != 4:
        refuse_channels(source, unet["in_channels"])
    if unet["cross_attention_dim"] in _BY_TEXT_WIDTH:
        refuse_text_width(source, unet["cross_attention_dim"])
    if unet.get("time_cond_proj_dim"):
        refuse_distilled(source, family, "it takes the guidance as an input, as LCM does")
    changed = [key for key in _STRUCTURE if _value(unet, key) != _value(published, key)]
    if changed and unet["block_out_channels"][0] == published["block_out_channels"][0]:
        refuse_distilled(source, family, f"it differs in {', '.join(changed)}")


def refuse_channels(source: str, channels: int) -> NoReturn:
    """Raise the error for a UNet that takes other inputs than four latent channels."""
    kind = _BY_CHANNELS.get(channels, "no ordinary base")
    sentence = f'"{source}" is {kind}: its UNet takes {channels} channels where a base takes 4.'
    raise BaseModelError("base.not_a_base", sentence, CHOOSE_A_BASE)


def refuse_text_width(source: str, width: int) -> NoReturn:
    """Raise the error for a UNet made for other text encoders."""
    kind = _BY_TEXT_WIDTH.get(width, "neither SD 1.5 nor SDXL")
    sentence = f'"{source}" is {kind}: its UNet takes text of width {width}; SD 1.5 has 768 and SDXL 2048.'
    raise BaseModelError("base.other_model", sentence, CHOOSE_A_BASE)


def refuse_distilled(source: str, family: Family, reason: str) -> NoReturn:
    """Raise the error for a base whose UNet was cut down or changed (SSD-1B, Vega, BK-SDM, LCM)."""
    sentence = f'"{source}" is a distilled or changed {NAMES[family]}, such as SSD-1B, Vega or LCM: {reason}.'
    remedy = f"Train on the full {NAMES[family]} model that it was made from; most LoRAs of that one work on it."
    raise BaseModelError("base.distilled", sentence, remedy)


def _value(config: Config, key: str) -> Any:
    value = config.get(key)
    return _DEFAULTS.get(key) if value is None else value
