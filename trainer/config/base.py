"""Which model is adapted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trainer.config.credentials import base_name, safe_link
from trainer.config.schema import Section

Family = Literal["sd15", "sdxl"]
Prediction = Literal["epsilon", "v"]

NATIVE_RESOLUTION: dict[Family, int] = {"sd15": 512, "sdxl": 1024}
"""The side of the pictures that each was trained on, in pixels."""
ARCHITECTURES: dict[Family, str] = {"sd15": "stable-diffusion-v1", "sdxl": "stable-diffusion-xl-v1-base"}
"""`modelspec.architecture`, before "/lora"."""
BASE_VERSIONS: dict[Family, str] = {"sd15": "sd_v1", "sdxl": "sdxl_base_v1-0"}
"""kohya's `ss_base_model_version`."""
SIDE_FILE_VERSIONS: dict[Family, str] = {"sd15": "SD1", "sdxl": "SDXL"}
"""`sd version` in A1111's side file."""


class BaseConfig(Section):
    """The model that the LoRA adapts."""

    model: str = Field(min_length=1)
    """A .safetensors checkpoint, a diffusers folder, a Hugging Face id owner/name, or an https link to a checkpoint."""
    family: Literal["auto", "sd15", "sdxl"] = "auto"
    """Which architecture the base is; found out by itself unless you state it."""
    prediction: Literal["auto", "epsilon", "v"] = "auto"
    """What the base predicts: the noise (epsilon, most models) or the velocity (v)."""
    zero_terminal_snr: Literal["auto"] | bool = "auto"
    """Whether the base was trained with a noise schedule that ends in pure noise (zero terminal SNR)."""
    vae: str | None = None
    """A VAE to use instead of the one in the base: a .safetensors file or a diffusers VAE folder."""
    revision: str | None = None
    """Which revision (branch, tag or commit) of a Hugging Face base to use."""
    continue_from: str | None = None
    """A LoRA file whose weights the training starts from instead of from zero."""

    @property
    def name(self) -> str:
        """The base's file name or Hub id, without folders or an address."""
        return base_name(self.model)

    def rules(self) -> Iterator[tuple[str, str]]:
        """Check that a link is safe to fetch and to write down, and that zero terminal SNR can be learned from."""
        try:
            if safe_link(self.model).text != self.model:
                yield "model", "contains a password or token; write ${NAME} in its place and set that variable"
        except ValueError:
            yield "model", "is a link that cannot be read"
        if "://" in self.model and not self.model.startswith("https://"):
            yield "model", "is a link that does not start with https://"
        if self.zero_terminal_snr is True and self.prediction == "epsilon":
            yield (
                "zero_terminal_snr",
                (
                    'cannot be true with prediction = "epsilon": guessing noise in pure noise teaches nothing; '
                    'such bases predict "v"'
                ),
            )
