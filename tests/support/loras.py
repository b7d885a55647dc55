"""Adapters with random weights on tiny bases, and the predictions of those bases."""

from __future__ import annotations

import copy
import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from tests.support import ROOT
from tests.support.tiny import tiny_models
from trainer.adapter.attach import Adapter, attach, module_path
from trainer.adapter.names import Slot
from trainer.config.base import Family
from trainer.config.recipe import RecipeConfig
from trainer.dataset.sampling import generator

# Every part has its own rank and a different alpha, so that a mixed-up scale is noticed.
EVERYTHING = RecipeConfig.model_validate(
    {
        "layers": "all",
        "rank": 4,
        "alpha": 2.0,
        "conv_rank": 3,
        "conv_alpha": 5.0,
        "text_encoder": {"learning_rate": 1e-4, "rank": 2, "alpha": 3.0},
        "text_encoder_2": {"learning_rate": 1e-4, "rank": 5, "alpha": 1.0},
    }
)


_GOLDEN = ROOT / "tests" / "golden" / "names"
_CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_CLIP_G = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
_UNETS: dict[Family, dict[str, Any]] = {
    "sd15": {"cross_attention_dim": 768, "attention_head_dim": 8},
    "sdxl": {
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}


def full_size(family: Family) -> tuple[Any, list[Any]]:
    """Return UNet and text encoders in full size on the meta device."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(**_UNETS[family])
        encoders: list[Any] = [CLIPTextModel(CLIPTextConfig(**_CLIP_L))]
        if family == "sdxl":
            encoders.append(CLIPTextModelWithProjection(CLIPTextConfig(**_CLIP_G)))
    return unet, encoders


def golden_rows(family: Family) -> list[list[str]]:
    """Return (name, set, shape of down, shape of up) of each layer that sd-scripts adapts."""
    text = gzip.decompress((_GOLDEN / f"{family}.tsv.gz").read_bytes()).decode()
    return [line.split("\t") for line in text.splitlines()]


@dataclass
class Models:
    """The networks of a tiny base that a LoRA can change, as separate copies."""

    family: Family
    unet: Any
    text_encoders: list[Any]

    @classmethod
    def copies(cls, family: Family, dtype: torch.dtype = torch.float64) -> Models:
        # Module.to, because diffusers' own logs an empty warning for each UNet.
        models = {
            part: nn.Module.to(copy.deepcopy(model), dtype)
            for part, model in tiny_models(family).items()
            if part != "vae"
        }
        return cls(family, models.pop("unet"), list(models.values()))

    @property
    def parts(self) -> dict[str, Any]:
        return {"unet": self.unet, **dict(zip(("text_encoder", "text_encoder_2"), self.text_encoders, strict=False))}

    def predict(self) -> Tensor:
        """Return the UNet's prediction for two fixed noisy latents and captions: (2, 4, 8, 8)."""
        stream = torch.Generator().manual_seed(3)
        tokens = torch.randint(1000, 40000, (2, 77), generator=stream)
        tokens[:, 0], tokens[:, 40:] = 49406, 49407
        latents = torch.randn(2, 4, 8, 8, generator=stream).to(self.unet.dtype)
        timesteps = torch.tensor([17, 801])
        if self.family == "sd15":
            hidden = self.text_encoders[0](tokens).last_hidden_state
            return self.unet(latents, timesteps, hidden).sample  # type: ignore[no-any-return]
        outputs = [encoder(tokens, output_hidden_states=True) for encoder in self.text_encoders]
        added = {"text_embeds": outputs[1].text_embeds, "time_ids": torch.tensor([[64, 64, 0, 8, 64, 64]] * 2)}
        hidden = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        return self.unet(latents, timesteps, hidden, added_cond_kwargs=added).sample  # type: ignore[no-any-return]

    def attach(self, recipe: RecipeConfig = EVERYTHING) -> Adapter:
        return attach(
            self.family,
            self.unet,
            self.text_encoders,
            recipe,
            dtype=self.unet.dtype,
            generator=lambda name: generator(recipe.seed, "adapter", sample=name),
        )


def random_weights(adapter: Adapter, seed: int = 0) -> dict[str, Tensor]:
    """Return fp32 weights for a whole adapter, all nonzero and exact in fp16, and load them."""
    stream = torch.Generator().manual_seed(seed)
    weights = {
        key: (torch.randn(parameter.shape, generator=stream) * 0.2).half().float()
        for key, parameter in adapter.parameters.items()
    }
    adapter.load(weights)
    return weights


def trained_change(adapter: Adapter, slot: Slot, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the change of a layer's weight with which the adapter trains, in the weight's shape and float64.

    `weights` are those of a LoRA by file key; other adapters must have loaded theirs.
    """
    if slot in adapter.changes:
        layer: Any = adapter.changes[slot]
        roles = {role: weight.detach() for role, weight in layer.only.named_parameters()}
        change: Tensor = layer.only.weight_change(roles, layer.frozen)
        return change.detach()
    down, up = weights[slot.down].double(), weights[slot.up].double()
    product = adapter.alpha[slot.kohya] / len(down) * (up.flatten(1) @ down.flatten(1))
    return product.view(len(up), *down.shape[1:])


def merge(models: Models, adapter: Adapter, weights: Mapping[str, Tensor], strength: float = 1.0) -> None:
    """Add the adapter's changes to the weights themselves, as merging programs do."""
    for slot in adapter.slots:
        model = models.parts[slot.part]
        weight = model.get_submodule(module_path(model, slot)).weight
        with torch.no_grad():
            weight.add_(strength * trained_change(adapter, slot, weights).to(weight.dtype))
