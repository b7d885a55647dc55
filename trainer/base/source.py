"""A base: found, identified, and its models loaded one tensor at a time from either form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CLIPTextConfig

from trainer.base.families import FAMILIES, TextEncoder
from trainer.base.fetch import fetch_base
from trainer.base.quantized import Quantisation, quantise_linears
from trainer.base.weights import (
    Stored,
    StoredWeights,
    place_weights,
    require_fitting,
    text_encoder_of_single_file,
    unet_of_single_file,
    vae_of_file,
)
from trainer.config.base import BaseConfig, Family, Prediction
from trainer.errors import BaseModelError, plain_reason
from trainer.files.architecture import NAMES, Config
from trainer.files.identify import (
    BaseIdentity,
    PartFiles,
    decide_process,
    identify_base,
    joint_digest,
    part_files,
    vae_files,
)
from trainer.files.weights import sha256_file
from trainer.protocol.events import OnPhase, Phase

_Model = TypeVar("_Model", bound=nn.Module)
_Naming = Callable[[Stored, nn.Module], Stored]


def open_base(config: BaseConfig, progress: OnPhase | None = None) -> BaseSource:
    """Find the base, downloading it where needed, and say what it is; no weights are loaded.

    Raises BaseModelError when it cannot be had, is no usable base, is not of the family that `config` states, lacks a
    VAE, or when nothing tells what it predicts and `config` does not either.
    """
    fetched = fetch_base(config.model, config.revision, progress)
    identity = identify_base(fetched.path)
    if config.family != "auto" and config.family != identity.family:
        stated = NAMES[config.family]
        sentence = f'"{config.model}" is {NAMES[identity.family]}, but family = "{config.family}" states {stated}.'
        raise BaseModelError(
            "base.wrong_family", sentence, f"Remove family under [base], or choose a base of {stated}."
        )
    prediction, zero_snr = decide_process(config, identity)
    if config.vae is None and not identity.has_vae:
        remedy = "Name a VAE under base.vae: a .safetensors file or a diffusers VAE folder."
        raise BaseModelError("base.no_vae", f'"{config.model}" has no VAE in it.', remedy)
    vae = Path(config.vae) if config.vae is not None else None
    return BaseSource(fetched.path, identity, prediction, zero_snr, vae, fetched.revision, progress)


@dataclass(frozen=True)
class _Part(PartFiles):
    """Where one model's weights lie, what it is built from, and how its tensors get the model's names."""

    naming: _Naming

    @property
    def source(self) -> str:
        """The first of the files as errors name it."""
        return f'"{self.files[0]}"'

    def named(self, stored: Stored, model: nn.Module) -> Stored:
        """Return the tensors under the model's names; raises BaseModelError when they cannot be brought there."""
        try:
            return self.naming(stored, model)
        except (KeyError, IndexError) as error:  # diffusers' converters take some tensors and dimensions for granted
            sentence = f"{self.source} has other tensors than a {type(model).__name__}: {plain_reason(error)}."
            raise BaseModelError(
                "base.incomplete", sentence, "Get the whole model again or from another source."
            ) from error


class BaseSource:
    """A base that models can be loaded from; see `open_base`.

    `family`, `prediction` and `zero_terminal_snr` say what it is and `evidence` how that was found; `unet_config`,
    `vae_config` and `text_configs` are diffusers' and transformers' configs. `revision` is the commit of a Hub base.

    `check` is called before each tensor that is read and each forward of a model loaded from here, of a VAE and a text
    encoder also before each of their blocks. It may raise to end that work; by default it does nothing.
    """

    def __init__(
        self,
        path: Path,
        identity: BaseIdentity,
        prediction: Prediction,
        zero_terminal_snr: bool,
        vae: Path | None,
        revision: str | None,
        progress: OnPhase | None,
    ) -> None:
        self.path = path
        self.form: Literal["single", "folder"] = identity.form
        self.family: Family = identity.family
        self.prediction: Prediction = prediction
        self.zero_terminal_snr = zero_terminal_snr
        self.evidence = identity.evidence
        self.revision = revision
        self.check: Callable[[], object] = _nothing
        self._progress = progress
        self._facts = FAMILIES[self.family]
        self._unet = self._part("unet", identity, unet_of_single_file)
        self._texts = [
            self._part(facts.part, identity, partial(text_encoder_of_single_file, facts))
            for facts in self._facts.text_encoders
        ]
        self._vae = self._vae_part(identity, vae)

    @property
    def unet_config(self) -> Config:
        """The UNet's diffusers config."""
        return self._unet.config

    @property
    def vae_config(self) -> Config:
        """The VAE's diffusers config."""
        return self._vae.config

    @property
    def text_configs(self) -> tuple[Config, ...]:
        """Each text encoder's transformers config."""
        return tuple(part.config for part in self._texts)

    @property
    def description(self) -> str:
        """What it is, on one line."""
        ending = ", zero terminal SNR" if self.zero_terminal_snr else ""
        return f"{self.path.name}: {NAMES[self.family]}, predicts {self.prediction}{ending}"

    @cached_property
    def files(self) -> dict[str, str]:
        """The SHA-256 of every file that weights come from, by its path within the base (or its name, for a VAE)."""
        named = {self._name(path): path for part in (self._unet, self._vae, *self._texts) for path in part.files}
        return {name: self._hashes[path] for name, path in named.items()}

    @property
    def unet_hash(self) -> str:
        """A hash of the UNet's content: its files and config."""
        return self._unet.digest(self._hashes)

    @property
    def vae_hash(self) -> str:
        """A hash of the VAE's content: its files and config."""
        return self._vae.digest(self._hashes)

    @property
    def text_hash(self) -> str:
        """A hash of all text encoders' content: their files and configs."""
        return joint_digest(self._texts, self._hashes)

    def require_weights(self) -> None:
        """Raises BaseModelError when a tensor of any model is missing or has another shape; reads headers alone."""
        empty = [self.empty_unet(), self._empty_vae(), *self.empty_text_encoders()]
        for model, part in zip(empty, (self._unet, self._vae, *self._texts), strict=True):
            with StoredWeights(part.files) as stored:
                require_fitting(model, part.named(stored, model), part.source)

    def load_unet(
        self, dtype: torch.dtype, device: torch.device | str, quantise: Literal["none"] | Quantisation = "none"
    ) -> UNet2DConditionModel:
        """Load the UNet frozen, in eval mode; unless "none" the linear layers in transformer blocks are quantised."""
        unet = self.empty_unet()
        placer = None if quantise == "none" else quantise_linears(unet, quantise, dtype, torch.device(device))
        return self._filled(unet, self._unet, dtype, device, placer)

    def load_vae(self, dtype: torch.dtype, device: torch.device | str) -> AutoencoderKL:
        """Load the VAE frozen, in eval mode."""
        return self._filled(self._empty_vae(), self._vae, dtype, device)

    def load_text_encoders(self, dtype: torch.dtype, device: torch.device | str) -> list[TextEncoder]:
        """Load the text encoders frozen, in eval mode, in the family's order."""
        empty = zip(self.empty_text_encoders(), self._texts, strict=True)
        return [self._filled(encoder, part, dtype, device) for encoder, part in empty]

    def empty_unet(self) -> UNet2DConditionModel:
        """Build the UNet on the meta device."""
        unet: UNet2DConditionModel = empty_diffusers_model(UNet2DConditionModel, self.unet_config, str(self.path))
        return unet

    def empty_text_encoders(self) -> list[TextEncoder]:
        """Build the text encoders on the meta device."""
        return [
            empty_clip_model(facts.model_class, config, str(self.path))
            for facts, config in zip(self._facts.text_encoders, self.text_configs, strict=True)
        ]

    def _empty_vae(self) -> AutoencoderKL:
        vae: AutoencoderKL = empty_diffusers_model(AutoencoderKL, self.vae_config, str(self.path))
        return vae

    def _part(self, name: str, identity: BaseIdentity, naming: _Naming) -> _Part:
        found = part_files(self.path, identity, name)
        return _Part(found.files, found.config, naming if identity.form == "single" else lambda stored, _: stored)

    def _vae_part(self, identity: BaseIdentity, other: Path | None) -> _Part:
        found = vae_files(self.path, identity, other)
        return _Part(found.files, found.config, vae_of_file)

    def _filled(
        self,
        model: _Model,
        part: _Part,
        dtype: torch.dtype,
        device: torch.device | str,
        placer: Callable[[nn.Module, str, torch.Tensor], bool] | None = None,
    ) -> _Model:
        with StoredWeights(part.files) as stored:
            place_weights(
                model,
                part.named(stored, model),
                source=part.source,
                dtype=dtype,
                device=torch.device(device),
                placer=placer,
                progress=lambda done, total: self._tell("load", done, total),
            )
        self._check_before_forwards(model)
        return model

    def _check_before_forwards(self, model: nn.Module) -> None:
        """Have `check` called while the model computes.

        Not in a UNet's blocks: torch.compile would meet the call in the middle of what it compiles, and a UNet's
        forward is one step of drawing anyway. One forward of a VAE, in contrast, is a whole image.
        """
        if self.check is _nothing:
            return
        blocks = [] if isinstance(model, UNet2DConditionModel) else _blocks(model)
        for module in (model, *blocks):
            module.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, *_: object) -> None:
        self.check()  # whatever a hook returns would replace the module's input

    @cached_property
    def _hashes(self) -> dict[Path, str]:
        files = sorted({path for part in (self._unet, self._vae, *self._texts) for path in part.files})
        return {path: sha256_file(path, lambda done, total: self._tell("load", done, total)) for path in files}

    def _name(self, path: Path) -> str:
        return (
            path.relative_to(self.path).as_posix()
            if path.is_relative_to(self.path) and path != self.path
            else path.name
        )

    def _tell(self, phase: Phase, done: int, total: int) -> None:
        self.check()
        if self._progress:
            self._progress(phase, done, total)


def _nothing() -> None:
    """Do nothing."""


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield every module in the model's module lists: its layers, blocks and their parts."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module


def empty_diffusers_model(kind: Callable[..., _Model], config: Config, source: str) -> _Model:
    """Build a diffusers model on the meta device; keys it does not know, of other versions, are left out.

    Raises BaseModelError, which names `source`, for a config that nothing can be built from.
    """
    known = inspect.signature(kind).parameters
    return _built(lambda: kind(**{key: value for key, value in config.items() if key in known}), source)


def empty_clip_model(kind: type[Any], config: Config, source: str) -> Any:
    """Build a text encoder on the meta device; raises as `empty_diffusers_model`."""
    known = inspect.signature(CLIPTextConfig.__init__).parameters
    return _built(lambda: kind(CLIPTextConfig(**{key: value for key, value in config.items() if key in known})), source)


def _built(build: Callable[[], _Model], source: str) -> _Model:
    try:
        with torch.device("meta"):
            return build().eval().requires_grad_(False)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, StrictDataclassError) as error:
        sentence = f'No model can be built from the configs of "{source}": {plain_reason(error)}.'
        raise BaseModelError("base.broken_config", sentence, "Get the model again or from another source.") from error
