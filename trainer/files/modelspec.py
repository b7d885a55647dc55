"""What LoRA files and the files beside them call the families."""

from __future__ import annotations

from trainer.config.base import Family

ARCHITECTURES: dict[Family, str] = {"sd15": "stable-diffusion-v1", "sdxl": "stable-diffusion-xl-v1-base"}
"""`modelspec.architecture`, before "/lora"."""
BASE_VERSIONS: dict[Family, str] = {"sd15": "sd_v1", "sdxl": "sdxl_base_v1-0"}
"""kohya's `ss_base_model_version`."""
SIDE_FILE_VERSIONS: dict[Family, str] = {"sd15": "SD1", "sdxl": "SDXL"}
"""`sd version` in A1111's side file."""
