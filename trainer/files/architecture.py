"""Check whether a base's configs describe a trainable SD 1.5 or SDXL model, or which other model it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.errors import BaseModelError, plain_reason

Family = Literal["sd15", "sdxl"]
Config = Mapping[str, Any]

NAMES: Mapping[Family, str] = {"sd15": "SD 1.5", "sdxl": "SDXL"}
CHOOSE_A_BASE = "Choose a normal SD 1.5 or SDXL model as the base."

# Config keys in which a full-width UNet must equal the published one; otherwise it is distilled or modified.
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
    """Limits for the numbers that determine a model's size, because the file may be hostile."""

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
    """Raise BaseModelError if the configs are not those of an SD 1.5 or SDXL base, or describe an impossible model.

    `published` is the family's original UNet config.
    """
    for part, check in _CHECKS.items():
        try:
            if part in configs:
                check.model_validate(dict(configs[part]))
        except ValidationError as error:
            sentence = f'Could not use the {part} config of "{source}": {plain_reason(error)}.'
            raise BaseModelError(
                "base.broken_config", sentence, "Download the model again, or get it from another source."
            ) from error
    _check_unet(source, family, configs["unet"], published)


def _check_unet(source: str, family: Family, unet: Config, published: Config) -> None:
    if unet.get("in_channels", 4) != 4:
        refuse_channels(source, unet["in_channels"])
    if unet["cross_attention_dim"] in _BY_TEXT_WIDTH:
        refuse_text_width(source, unet["cross_attention_dim"])
    if unet.get("time_cond_proj_dim"):
        refuse_distilled(source, family, "it takes the guidance scale as an input, like LCM")
    changed = [key for key in _STRUCTURE if _value(unet, key) != _value(published, key)]
    if changed and unet["block_out_channels"][0] == published["block_out_channels"][0]:
        refuse_distilled(source, family, f"it differs in {', '.join(changed)}")


def refuse_channels(source: str, channels: int) -> NoReturn:
    """Raise BaseModelError for a UNet whose input does not have four latent channels."""
    kind = _BY_CHANNELS.get(channels, "not a usable base")
    sentence = f'"{source}" is {kind}: its UNet has {channels} input channels instead of 4.'
    raise BaseModelError("base.not_a_base", sentence, CHOOSE_A_BASE)


def refuse_text_width(source: str, width: int) -> NoReturn:
    """Raise BaseModelError for a UNet that was made for other text encoders."""
    kind = _BY_TEXT_WIDTH.get(width, "neither SD 1.5 nor SDXL")
    sentence = f'"{source}" is {kind}: its UNet takes text embeddings of width {width}; SD 1.5 has 768, SDXL 2048.'
    raise BaseModelError("base.other_model", sentence, CHOOSE_A_BASE)


def refuse_distilled(source: str, family: Family, reason: str) -> NoReturn:
    """Raise BaseModelError for a base whose UNet was distilled or modified (SSD-1B, Vega, BK-SDM, LCM)."""
    sentence = f'"{source}" is a distilled or modified {NAMES[family]}, such as SSD-1B, Vega or LCM: {reason}.'
    remedy = f"Train on the full {NAMES[family]} model it was made from; most LoRAs for that model also work on it."
    raise BaseModelError("base.distilled", sentence, remedy)


def _value(config: Config, key: str) -> Any:
    value = config.get(key)
    return _DEFAULTS.get(key) if value is None else value
