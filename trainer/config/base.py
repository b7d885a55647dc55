"""The base: the model that a LoRA adapts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trainer.config.credentials import base_name, safe_link
from trainer.config.schema import Section

Family = Literal["sd15", "sdxl"]
Prediction = Literal["epsilon", "v", "flow"]
Part = Literal["unet", "text_encoder", "text_encoder_2"]
"""Part of a base that a LoRA can change."""

NATIVE_RESOLUTION: dict[Family, int] = {"sd15": 512, "sdxl": 1024}
"""Side in pixels of the square images that each family was trained on."""
ARCHITECTURES: dict[Family, str] = {"sd15": "stable-diffusion-v1", "sdxl": "stable-diffusion-xl-v1-base"}
"""Value of `modelspec.architecture` for each family, without "/lora"."""
BASE_VERSIONS: dict[Family, str] = {"sd15": "sd_v1", "sdxl": "sdxl_base_v1-0"}
"""Value of kohya's `ss_base_model_version` for each family."""
SIDE_FILE_VERSIONS: dict[Family, str] = {"sd15": "SD1", "sdxl": "SDXL"}
"""Value of `sd version` for each family, in the JSON file that A1111 reads next to a LoRA."""


class BaseConfig(Section):
    """The model that the LoRA adapts."""

    model: str = Field(min_length=1)
    """A .safetensors checkpoint, a diffusers folder, a Hugging Face id owner/name, or an https link to a checkpoint."""
    family: Literal["auto", "sd15", "sdxl"] = "auto"
    """Architecture of the base; auto detects it from the file."""
    prediction: Literal["auto", "epsilon", "v", "flow"] = "auto"
    """What the base predicts: epsilon (most), v (kohya: v_parameterization) or flow (rectified); auto detects it."""
    zero_terminal_snr: Literal["auto"] | bool = Field(default="auto", title="Zero terminal SNR")
    """Whether the base was trained with zero terminal SNR, that is, down to pure noise; auto detects it."""
    vae: str | None = Field(default=None, title="VAE")
    """VAE to use instead of the base's own: a .safetensors file or a diffusers VAE folder."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face base."""
    continue_from: str | None = None
    """LoRA file to start from, instead of a new LoRA (kohya: network_weights)."""

    @property
    def name(self) -> str:
        """Return the base's file name without folders or host, or its Hub id."""
        return base_name(self.model)

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield errors for links that are unsafe to fetch or store, and for epsilon with zero terminal SNR."""
        try:
            if safe_link(self.model).text != self.model:
                yield "model", "contains a password or token; replace it with ${NAME} and set that environment variable"
        except ValueError:
            yield "model", "is not a valid link"
        if "://" in self.model and not self.model.startswith("https://"):
            yield "model", "is a link that does not start with https://"
        if self.zero_terminal_snr is True and self.prediction == "flow":
            yield "zero_terminal_snr", 'cannot be true with prediction = "flow", which always trains down to pure noise'
        if self.zero_terminal_snr is True and self.prediction == "epsilon":
            yield (
                "zero_terminal_snr",
                (
                    'cannot be true with prediction = "epsilon": predicting the noise in pure noise teaches nothing; '
                    'use prediction = "v"'
                ),
            )
