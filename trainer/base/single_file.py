"""A base as the tensors of a single file in the original (LDM) layout, whether it is one or a diffusers folder.

Tensors are read one by one. The names are those that `convert_ldm_unet_checkpoint` and its siblings in diffusers read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.adapter.names import Slot, slots
from trainer.base.families import FAMILIES
from trainer.base.weights import Stored, StoredTensor, StoredWeights
from trainer.config.base import Family, Prediction
from trainer.errors import BaseModelError
from trainer.files.assets import EMBEDDED, bundled_configs
from trainer.files.header import TensorInfo, read_header
from trainer.files.identify import BaseIdentity, identify_base, part_files

_UNET, _VAE = "model.diffusion_model.", "first_stage_model."
_HASHES = ("modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")
_UNET_TOP = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
# A layer of each block, by which the two names of the block are found in the table of layers.
_MARKS = {".conv1": ".in_layers.2", ".proj_in": ".proj_in", "samplers.0.conv": ""}
_VAE_ATTENTION = {
    "group_norm": "norm",
    **dict.fromkeys(("to_q", "query"), "q"),
    **dict.fromkeys(("to_k", "key"), "k"),
    **dict.fromkeys(("to_v", "value"), "v"),
    **dict.fromkeys(("to_out.0", "proj_attn"), "proj_out"),
}
_OPEN_CLIP_TOP = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
}
_OPEN_CLIP_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
_FUSED = ("q_proj", "k_proj", "v_proj")
_LOGIT_SCALE = 4.6052  # OpenCLIP's ln(100), which diffusers folders do not have


@dataclass(frozen=True, slots=True)
class StoredData:
    """One tensor of the file: its format, and how to read it."""

    info: TensorInfo
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class SingleFile:
    """A base's tensors under the names of single files."""

    path: Path
    family: Family
    prediction: Prediction | None
    tensors: Mapping[str, StoredData]
    metadata: Mapping[str, str]
    """Metadata of a single file with these tensors, without hashes."""
    table: Sequence[Slot]
    """Layers that can carry a LoRA."""

    def place(self, slot: Slot) -> tuple[str, int, int]:
        """Return the tensor that has a layer's weight, and which part of how many parts of its rows that is."""
        if slot.part == "unet":
            return f"{_UNET}{slot.ldm}.weight", 0, 1
        facts = next(facts for facts in FAMILIES[self.family].text_encoders if facts.part == slot.part)
        if not facts.open_clip:
            name = f"{facts.prefix}{slot.module}.weight"
            return (name if name in self.tensors else name.replace("text_model.", "", 1)), 0, 1
        layer, inner = slot.module.removeprefix("text_model.encoder.layers.").split(".", 1)
        at, last = f"{facts.prefix}transformer.resblocks.{layer}.", inner.rpartition(".")[2]
        if last in _FUSED:
            return f"{at}attn.in_proj_weight", _FUSED.index(last), len(_FUSED)
        return f"{at}{_OPEN_CLIP_LAYER[inner]}.weight", 0, 1

    def require(self, slot: Slot) -> None:
        """Raise BaseModelError if a layer's weight is missing or has an impossible shape."""
        name, _, parts = self.place(slot)
        shape = self.tensors[name].info.shape if name in self.tensors else ()
        kernel = (slot.kernel, slot.kernel) if slot.kernel > 1 else ()
        if len(shape) not in (2, 4) or 0 in shape or shape[0] % parts or (kernel and shape[2:] != kernel):
            sentence = f'Could not read "{self.path}": its layer {name} is missing or has an impossible shape.'
            raise BaseModelError("base.incomplete", sentence, "Download the whole model again.")

    def weight(self, slot: Slot) -> Tensor:
        """Read a layer's weight in fp32; raises BaseModelError if it is missing."""
        self.require(slot)
        name, part, parts = self.place(slot)
        return self.tensors[name].read().float().chunk(parts)[part]


@contextmanager
def open_single_file(path: Path) -> Iterator[SingleFile]:
    """Open a base, a single file or a diffusers folder, as the tensors of a single file.

    A base that predicts v gets the marker tensors by which other programs know it, unless it has them. Raises
    BaseModelError if it is no readable base of SD 1.5 or SDXL.
    """
    identity = identify_base(path)
    texts = [identity.configs[part] for part in ("text_encoder", "text_encoder_2") if part in identity.configs]
    table = slots(identity.family, identity.configs["unet"], texts)
    with ExitStack() as opened:
        if identity.form == "single":
            header = read_header(path)
            tensors = {name: _as_is(each) for name, each in opened.enter_context(StoredWeights([path])).items()}
            metadata = dict(header.metadata)
            if unread := header.tensors.keys() - tensors.keys():
                name = min(unread)
                sentence = f'Could not read "{path}": {name[:100]} has the number format {header.tensors[name].dtype}.'
                raise BaseModelError("base.format", sentence, "Choose a base in fp16, bf16 or fp32.")
        else:
            tensors = dict(_from_folder(path, identity, table, opened))
            metadata = _folder_metadata(identity)
        for name, needed in (("v_pred", identity.prediction == "v"), ("ztsnr", identity.zero_terminal_snr)):
            if needed and identity.prediction == "v" and name not in tensors:
                tensors[name] = StoredData(TensorInfo("F32", (0,)), lambda: torch.zeros(0))
        kept = {key: text for key, text in metadata.items() if key not in _HASHES}
        yield SingleFile(path, identity.family, identity.prediction, tensors, kept, table)


def _as_is(stored: StoredTensor) -> StoredData:
    return StoredData(TensorInfo(stored.format, tuple(stored.shape)), stored.read)


def _folder_metadata(identity: BaseIdentity) -> dict[str, str]:
    """Return the configs of models of unusual sizes, which a single file cannot be recognized without."""
    if (
        identity.configs["unet"].get("block_out_channels")
        == bundled_configs(identity.family)["unet"]["block_out_channels"]
    ):
        return {}
    return {EMBEDDED: json.dumps({"family": identity.family, **identity.configs})}


def _from_folder(
    path: Path, identity: BaseIdentity, table: Sequence[Slot], opened: ExitStack
) -> Iterator[tuple[str, StoredData]]:
    blocks = dict(_block_names(table))
    stored = opened.enter_context(StoredWeights(part_files(path, identity, "unet").files))
    yield from ((_UNET + _unet_name(name, blocks), _as_is(each)) for name, each in stored.items())
    if identity.has_vae:
        stored = opened.enter_context(StoredWeights(part_files(path, identity, "vae").files))
        last = len(identity.configs["vae"]["block_out_channels"]) - 1
        yield from (_vae_tensor(name, each, last) for name, each in stored.items())
    for facts in FAMILIES[identity.family].text_encoders:
        stored = opened.enter_context(StoredWeights(part_files(path, identity, facts.part).files))
        named = {name.removeprefix("text_model."): each for name, each in stored.items()}
        if facts.open_clip:
            yield from ((facts.prefix + name, each) for name, each in _open_clip(named))
        else:
            yield from ((f"{facts.prefix}text_model.{name}", _as_is(each)) for name, each in named.items())


def _block_names(table: Sequence[Slot]) -> Iterator[tuple[str, str]]:
    """Yield the two names of each block of the UNet, in diffusers and in single files."""
    for slot in table:
        for ours, theirs in _MARKS.items():
            if slot.part == "unet" and slot.module.endswith(ours):
                is_whole = not theirs
                block = slot.module if is_whole else slot.module.removesuffix(ours)
                yield block, slot.ldm if is_whole else slot.ldm.removesuffix(theirs)


def _unet_name(name: str, blocks: Mapping[str, str]) -> str:
    """Return the name of a UNet's tensor in single files, without its prefix; raises BaseModelError."""
    for ours, theirs in _UNET_TOP.items():
        if name.startswith(f"{ours}."):
            return f"{theirs}{name.removeprefix(ours)}"
    match = re.match(r"(?:(?:down|up)_blocks\.\d+|mid_block)\.(?:(resnets|attentions)\.\d+|\w+samplers\.0\.conv)", name)
    if match is None or match[0] not in blocks:
        sentence = f'Could not write the base as a single file: its UNet has the tensor "{name[:100]}".'
        raise BaseModelError("base.architecture", sentence, "Choose a base of the SD 1.5 or SDXL family.")
    inner = name.removeprefix(match[0])
    return blocks[match[0]] + (_renamed(inner, _UNET_RESNET) if match[1] == "resnets" else inner)


def _renamed(inner: str, table: Mapping[str, str]) -> str:
    """Return ".NAME.weight" with the name replaced by that in the table."""
    for ours, theirs in table.items():
        if inner.startswith(f".{ours}."):
            return f".{theirs}{inner.removeprefix(f'.{ours}')}"
    return inner


def _vae_tensor(name: str, stored: StoredTensor, last: int) -> tuple[str, StoredData]:
    """Return the name and tensor in single files of a VAE's tensor; `last` is the number of its last level."""
    target = re.sub(r"down_blocks\.(\d+)\.resnets\.", r"down.\1.block.", name)
    target = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", target)
    target = re.sub(r"up_blocks\.(\d+)\.resnets\.", lambda found: f"up.{last - int(found[1])}.block.", target)
    target = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0", lambda found: f"up.{last - int(found[1])}.upsample", target)
    target = re.sub(r"mid_block\.resnets\.(\d+)", lambda found: f"mid.block_{int(found[1]) + 1}", target)
    target = target.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    side, attention, inner = target.partition("mid_block.attentions.0")
    if not attention:
        return _VAE + target, _as_is(stored)
    data = _as_is(stored)
    if stored.ndim == 2:  # the projections, which are convolutions of 1 x 1 in single files
        shape = (*data.info.shape, 1, 1)
        data = StoredData(TensorInfo(data.info.dtype, shape), lambda: stored.read().view(shape))
    return f"{_VAE}{side}mid.attn_1{_renamed(inner, _VAE_ATTENTION)}", data


def _open_clip(stored: Stored) -> Iterator[tuple[str, StoredData]]:
    """Yield a text encoder's tensors as in OpenCLIP: q, k and v in one tensor, and the projection transposed."""
    for name, each in stored.items():
        data = _as_is(each)
        if name == "text_projection.weight":
            rows, columns = data.info.shape
            info = TensorInfo(data.info.dtype, (columns, rows))
            yield "text_projection", StoredData(info, lambda each=each: each.read().t())  # type: ignore[misc]
            yield "logit_scale", StoredData(TensorInfo("F32", ()), lambda: torch.tensor(_LOGIT_SCALE))
        elif name in _OPEN_CLIP_TOP:
            yield _OPEN_CLIP_TOP[name], data
        elif ".self_attn.q_proj." in name:
            three = [stored[name.replace("q_proj", part)] for part in _FUSED]
            shape = (sum(part.shape[0] for part in three), *data.info.shape[1:])
            target = f"transformer.resblocks.{name.split('.')[2]}.attn.in_proj_{name.rpartition('.')[2]}"
            yield target, StoredData(TensorInfo(data.info.dtype, shape), _Joined(three))
        elif match := re.fullmatch(r"encoder\.layers\.(\d+)(\.(?!self_attn\.[kv]_proj\.).+)", name):
            yield f"transformer.resblocks.{match[1]}{_renamed(match[2], _OPEN_CLIP_LAYER)}", data


@dataclass(frozen=True)
class _Joined:
    """Reads tensors and joins their rows."""

    stored: Sequence[Any]

    def __call__(self) -> Tensor:
        return torch.cat([each.read() for each in self.stored])
