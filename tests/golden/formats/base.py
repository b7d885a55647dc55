"""The base of the sample run: a tiny SD 1.5 model whose bytes are the same under every version of the libraries.

The run of the samples is resumed by later versions, which refuse a base with another hash. A base of 10 MB is too large
to keep beside the samples, so its weights follow from a counter instead of PyTorch's initialization.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tests.support.tiny import models_on_meta, single_file_metadata, single_file_tensors, tiny_configs

NAME = "sample-base.safetensors"
SHA256 = "77d94afd373afbf40f467bec022cf4697e70113e00f20d803e6173c3b592dcda"


def write_base(folder: Path) -> Path:
    """Write the base into a folder and return its path."""
    configs = tiny_configs("sd15", depth=1)
    bits = np.random.Philox(1)  # `random_raw` never changes, which numpy does not promise for distributions
    weights = {
        part: {name: _values(bits, name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
        for part, model in models_on_meta(configs).items()
    }
    tensors = single_file_tensors("sd15", weights, configs)
    tensors["alphas_cumprod"] = torch.from_numpy((0.999 - np.arange(1000) * 0.000995).astype(np.float32))
    path = folder / NAME
    metadata = single_file_metadata("sd15", configs)
    del metadata["format"]  # safetensors writes several entries in random order
    save_file(tensors, path, metadata)
    return path


def _values(bits: np.random.Philox, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return numbers within 0.1 of 0, or of 1 for the scale of a normalization."""
    uniform = bits.random_raw(int(np.prod(shape))) / 2.0**64
    center = 1.0 if len(shape) == 1 and "norm" in name and name.endswith("weight") else 0.0
    return torch.from_numpy((center + 0.2 * (uniform - 0.5)).astype(np.float32).reshape(shape))
