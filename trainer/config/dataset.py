"""Which pictures and captions a job trains on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer.config.model import Section

Text = Annotated[str, Field(min_length=1)]
HeldOut = Annotated[float, Field(ge=0.0, le=0.5)]


class FolderConfig(Section):
    """One folder of pictures."""

    path: Text
    """The folder, relative to the job file."""
    kind: Literal["train", "regularisation", "validation"] = "train"
    """What the pictures are for: learning, keeping the base's idea of the class (regularisation), or measuring only."""
    repeats: int | None = Field(default=None, ge=1, le=10_000)
    """How often each picture is shown per epoch; absent: from impasto.jsonl, a folder name such as 10_cat, or 1."""
    recursive: bool = False
    """Whether pictures in subfolders belong to it too."""
    trigger: str | None = None
    """The word that calls up what is learned, put first unless the caption holds it; absent: from impasto.jsonl."""
    class_words: str | None = None
    """The text used where a picture has no caption; absent: from a folder name such as 10_cat."""
    weight: float = Field(default=1.0, ge=0.0, le=100.0)
    """How much each of these pictures counts in the loss."""


class DatasetConfig(Section):
    """The pictures and captions to learn from."""

    folders: tuple[FolderConfig, ...] = Field(min_length=1, strict=False)
    """The folders that make up the dataset."""
    lines: Literal["caption", "variants"] = "caption"
    """Whether the lines of a caption file make one caption, or each line is an alternative."""
    background: str = Field(default="#ffffff", pattern=r"^#[0-9a-fA-F]{6}$", examples=["#ffffff"])
    """The colour put behind transparent pictures."""
    masks: Literal["auto", "files", "alpha", "none"] = "auto"
    """Where masks come from: auto and files read NAME-masklabel.png, alpha the transparency of images, none nothing."""
    linked_folders: tuple[Text, ...] = Field(default=(), strict=False)
    """Other folders that symbolic links in the dataset may lead to; links to anywhere else are not followed."""
    max_megapixels: float = Field(default=100.0, gt=0.0, le=1000.0)
    """Larger pictures are refused, so that a hostile or broken file cannot fill the memory."""
    validation_share: HeldOut | Literal["auto"] = "auto"
    """Share of pictures (0 to 0.5) held out to measure progress; auto: none below 40 pictures, else 0.05."""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Each folder once, and at least one to learn from."""
        first: dict[str, int] = {}
        for number, folder in enumerate(self.folders):
            where = os.path.normcase(os.path.normpath(folder.path))
            if where in first:
                yield (
                    f"folders.{number}.path",
                    f"is the same folder as folders.{first[where]}; use repeats to show it more often",
                )
            first.setdefault(where, number)
        if all(folder.kind != "train" for folder in self.folders):
            yield "folders", 'holds no folder of kind "train", so there is nothing to learn from'
