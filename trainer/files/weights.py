"""Which safetensors files hold the weights of a model in a diffusers folder."""

from __future__ import annotations

from pathlib import Path

from trainer.errors import BaseModelError
from trainer.files.configs import read_json

_STEMS = ("diffusion_pytorch_model", "model")
_VARIANTS = ("", ".fp16", ".bf16")  # the plain file first: it keeps the most digits


def weight_files(folder: Path, part: str) -> tuple[Path, ...]:
    """Return a part's safetensors files, all of them where it is split; `part` may be empty for a folder of one model.

    Raises BaseModelError when there are none, when only pickles are there, or when a piece is missing.
    """
    home = folder / part if part else folder
    for variant in _VARIANTS:
        for stem in _STEMS:
            whole = home / f"{stem}{variant}.safetensors"
            if whole.is_file():
                return (whole,)
            index = home / f"{stem}.safetensors.index{variant}.json"
            if index.is_file():
                return _pieces(index)
    if pickles := sorted(path.name for suffix in ("*.bin", "*.ckpt") for path in home.glob(suffix)):
        sentence = f'"{home}" holds its weights as a pickle ({pickles[0]}), which can run any program hidden in it.'
        raise BaseModelError("base.pickle", sentence, "Get the model in .safetensors form.")
    sentence = f'"{home}" holds no weights (no .safetensors file).'
    raise BaseModelError("base.incomplete", sentence, "Download the whole model folder again.")


def _pieces(index: Path) -> tuple[Path, ...]:
    """Return the files that an index names; only names within its own folder are followed."""
    table = read_json(index).get("weight_map", {})
    names = sorted({str(name) for name in table.values()} if isinstance(table, dict) else ())
    pieces = tuple(index.parent / Path(name).name for name in names)
    missing = [piece.name for piece in pieces if not piece.is_file()]
    if missing or not pieces:
        sentence = f'"{index.parent}" lacks {", ".join(missing) or "all pieces"} of its weights.'
        raise BaseModelError("base.incomplete", sentence, "Download the whole model folder again.")
    return pieces
