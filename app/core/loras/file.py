"""All that can be said of a LoRA file by its header. For worker threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from app.core.loras import told
from app.core.loras.layers import Layer, layers_of
from app.core.loras.strength import Block, read_blocks
from app.core.pixels import Pixels, pixels_of
from trainer.config.base import Family
from trainer.config.presets.making import picture_beside
from trainer.files.header import read_header
from trainer.files.identify import lora_of_header
from trainer.protocol.files import long_path

SIDE = 256
"""Pixels of the longest side of a picture as it is shown."""


@dataclass(frozen=True, slots=True)
class LoraFile:
    """A LoRA file by its header; every text is cut and fit to be shown as plain text."""

    path: Path
    bytes: int
    kind: str
    """LoRA, LoCon, LoHa, LoKr, DoRA."""
    family: Family | None
    """By its layers, else as it says itself."""
    ranks: tuple[int, ...]
    parts: Mapping[str, int]
    """How many layers of each part it adapts: "UNet", "text encoder", "text encoder 2"."""
    about: Mapping[str, str]
    """What it says of title, author, licence, description and base, where it does."""
    triggers: str
    triggers_stated: bool
    """Otherwise they are the names of the training folders."""
    settings: tuple[tuple[str, str], ...]
    tags: tuple[tuple[str, int], ...]
    metadata: tuple[tuple[str, str], ...]
    """All of it, by key; empty where the file holds none."""
    pictures: tuple[Pixels, ...]
    layers: Mapping[str, Layer]
    alphas: Mapping[str, float]
    """Alphas that stand in the metadata instead of in tensors, by the first part of the layers' names."""

    def blocks(self, wanted: Callable[[], bool] = lambda: True) -> list[Block]:
        """Read all tensors and tell where it acts how strongly; nothing once it is not `wanted`. Raises OSError."""
        return read_blocks(self.path, self.layers, lambda layer: self.alphas.get(layer.partition(".")[0]), wanted)


def read_lora(path: Path) -> LoraFile:
    """Read a LoRA's header and the picture beside it; raises LoraFileError when it is broken or no LoRA."""
    header = read_header(path, "lora")
    identity = lora_of_header(path, header)
    data, layers = header.metadata, layers_of(header)
    triggers, stated = told.triggers_of(data)
    return LoraFile(
        path=path,
        bytes=long_path(path).stat().st_size,
        kind=_kind(identity.kind, layers.values()),
        family=identity.family,
        ranks=identity.ranks,
        parts=identity.layers,
        about=told.about(data),
        triggers=triggers,
        triggers_stated=stated,
        settings=tuple(told.settings_of(data)),
        tags=tuple(told.tags_of(data)),
        metadata=tuple(told.everything(data)),
        pictures=tuple(_pictures(path, data)),
        layers=layers,
        alphas=told.alphas_of(data),
    )


def _kind(kind: str, layers: Iterable[Layer]) -> str:
    """LoRAs that adapt convolutions with kernels too are called LoCon."""
    kernels = any(len(layer["down"].shape) == 4 and layer["down"].shape[-1] > 1 for layer in layers if "down" in layer)
    return "LoCon" if kind == "LoRA" and kernels else kind


def _pictures(path: Path, metadata: Mapping[str, str]) -> Iterator[Pixels]:
    """Yield the pictures in the metadata, else the one beside the file."""
    sources = list(told.pictures_of(metadata)) or [beside["picture"] for beside in (picture_beside(path),) if beside]
    yield from (pixels for text in sources if (pixels := pixels_of(text, SIDE)))
