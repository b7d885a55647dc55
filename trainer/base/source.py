"""Find and identify base models, and load their parts tensor by tensor from a single file or a folder."""

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
from trainer.base.quantized import Quantization, quantize_linears
from trainer.base.streaming import WeightStream
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
    """Find the base, download it if needed, and identify it without loading weights.

    Raises BaseModelError if the base is unavailable or unusable, belongs to a different family than `config` states, or
    has no VAE, or if neither the base nor `config` says what it predicts.
    """
    fetched = fetch_base(config.model, config.revision, progress)
    identity = identify_base(fetched.path)
    if config.family != "auto" and config.family != identity.family:
        stated = NAMES[config.family]
        sentence = f'"{config.model}" is {NAMES[identity.family]}, but base.family is "{config.family}" ({stated}).'
        raise BaseModelError("base.wrong_family", sentence, f"Remove base.family, or choose a base for {stated}.")
    prediction, zero_snr = decide_process(config, identity)
    if config.vae is None and not identity.has_vae:
        remedy = "Set base.vae to a .safetensors file or a diffusers VAE folder."
        raise BaseModelError("base.no_vae", f'"{config.model}" has no VAE.', remedy)
    vae = Path(config.vae) if config.vae is not None else None
    return BaseSource(fetched.path, identity, prediction, zero_snr, vae, fetched.revision, progress)


@dataclass(frozen=True)
class _Part(PartFiles):
    """Files and config of one model in a base, and the function that renames its tensors."""

    naming: _Naming

    @property
    def source(self) -> str:
        """Return the path of the first file, quoted for error messages."""
        return f'"{self.files[0]}"'

    def named(self, stored: Stored, model: nn.Module) -> Stored:
        """Return the tensors under the names that the model uses; raise BaseModelError if conversion fails."""
        try:
            return self.naming(stored, model)
        except (KeyError, IndexError) as error:  # diffusers' converters assume that some tensors and dimensions exist
            sentence = f"{self.source} does not have the tensors of a {type(model).__name__}: {plain_reason(error)}."
            raise BaseModelError(
                "base.incomplete", sentence, "Download the whole model again, or from another source."
            ) from error


class BaseSource:
    """Identified base from which models can be loaded; see `open_base`.

    `evidence` says how `family`, `prediction` and `zero_terminal_snr` were determined. `unet_config`, `vae_config` and
    `text_configs` are diffusers and transformers configs. `revision` is the commit if the base came from the Hub.

    `check` is called before reading each tensor and before each forward of a model loaded from here; for a VAE or text
    encoder, also before each of its blocks. It may raise to interrupt the work; by default it does nothing.
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
        if (prediction, zero_terminal_snr) != (identity.prediction, identity.zero_terminal_snr):
            self.evidence = (identity.evidence[0], "What it predicts is set in the job.")
        self.revision = revision
        self._check: Callable[[], object] = _nothing
        self._progress = progress
        self._facts = FAMILIES[self.family]
        self._unet = self._part("unet", identity, unet_of_single_file)
        self._texts = [
            self._part(facts.part, identity, partial(text_encoder_of_single_file, facts))
            for facts in self._facts.text_encoders
        ]
        self._vae = self._vae_part(identity, vae)

    def interrupt_with(self, check: Callable[[], object]) -> None:
        """Set `check`; call this before models are loaded, because only later models call it."""
        self._check = check

    def check(self) -> None:
        """Call the function given to `interrupt_with`, which may raise to interrupt the work."""
        self._check()

    @property
    def unet_config(self) -> Config:
        """Return the UNet's diffusers config."""
        return self._unet.config

    @property
    def vae_config(self) -> Config:
        """Return the VAE's diffusers config."""
        return self._vae.config

    @property
    def text_configs(self) -> tuple[Config, ...]:
        """Return each text encoder's transformers config."""
        return tuple(part.config for part in self._texts)

    @property
    def description(self) -> str:
        """Return a one-line description of the base."""
        ending = ", zero terminal SNR" if self.zero_terminal_snr else ""
        return f"{self.path.name}: {NAMES[self.family]}, predicts {self.prediction}{ending}"

    @cached_property
    def files(self) -> dict[str, str]:
        """Return the SHA-256 of every weight file, by its path within the base (a separate VAE: by its file name)."""
        named = {self._name(path): path for part in (self._unet, self._vae, *self._texts) for path in part.files}
        return {name: self._hashes[path] for name, path in named.items()}

    @property
    def unet_hash(self) -> str:
        """Return a hash of the UNet's files and config."""
        return self._unet.digest(self._hashes)

    @property
    def vae_hash(self) -> str:
        """Return a hash of the VAE's files and config."""
        return self._vae.digest(self._hashes)

    @property
    def text_hash(self) -> str:
        """Return a single hash of all text encoders' files and configs."""
        return joint_digest(self._texts, self._hashes)

    def require_weights(self) -> None:
        """Raise BaseModelError if a tensor of any model is missing or has the wrong shape; reads only headers."""
        empty = [self.empty_unet(), self._empty_vae(), *self.empty_text_encoders()]
        for model, part in zip(empty, (self._unet, self._vae, *self._texts), strict=True):
            with StoredWeights(part.files) as stored:
                require_fitting(model, part.named(stored, model), part.source)

    def load_unet(
        self, dtype: torch.dtype, device: torch.device | str, quantize: Literal["none"] | Quantization = "none"
    ) -> UNet2DConditionModel:
        """Load the UNet, frozen and in eval mode; `quantize` applies to the linear layers in transformer blocks."""
        return self.fill_unet(self.empty_unet(), dtype, device, quantize)

    def fill_unet(
        self,
        unet: UNet2DConditionModel,
        dtype: torch.dtype,
        device: torch.device | str,
        quantize: Literal["none"] | Quantization = "none",
        stream: WeightStream | None = None,
    ) -> UNet2DConditionModel:
        """Load the weights of an empty UNet as `load_unet` does, but those that `stream` handles into main memory."""
        placer = None if quantize == "none" else quantize_linears(unet, quantize, dtype, torch.device(device))
        return self._filled(unet, self._unet, dtype, device, stream.placer(placer) if stream else placer)

    def load_vae(self, dtype: torch.dtype, device: torch.device | str) -> AutoencoderKL:
        """Load the VAE, frozen and in eval mode."""
        return self._filled(self._empty_vae(), self._vae, dtype, device)

    def load_text_encoders(self, dtype: torch.dtype, device: torch.device | str) -> list[TextEncoder]:
        """Load the text encoders in the family's order, frozen and in eval mode."""
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
        part = part_files(self.path, identity, name)
        return _Part(part.files, part.config, naming if identity.form == "single" else lambda stored, _: stored)

    def _vae_part(self, identity: BaseIdentity, other: Path | None) -> _Part:
        part = vae_files(self.path, identity, other)
        return _Part(part.files, part.config, vae_of_file)

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
                progress=lambda done, total: self._report("load", done, total),
            )
        self._check_before_forwards(model)
        return model

    def _check_before_forwards(self, model: nn.Module) -> None:
        """Register hooks that call `check` while the model computes.

        A UNet's blocks get no hooks, because hooks would break the graph of torch.compile, and one UNet forward is
        only one sampling step. A VAE forward, in contrast, processes a whole image.
        """
        if self._check is _nothing:
            return
        blocks = [] if isinstance(model, UNet2DConditionModel) else _blocks(model)
        for module in (model, *blocks):
            module.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, *_: object) -> None:
        self.check()  # returns None: any other value would replace the module's input

    @cached_property
    def _hashes(self) -> dict[Path, str]:
        files = sorted({path for part in (self._unet, self._vae, *self._texts) for path in part.files})
        return {path: sha256_file(path, lambda done, total: self._report("load", done, total)) for path in files}

    def _name(self, path: Path) -> str:
        return (
            path.relative_to(self.path).as_posix()
            if path.is_relative_to(self.path) and path != self.path
            else path.name
        )

    def _report(self, phase: Phase, done: int, total: int) -> None:
        self.check()
        if self._progress:
            self._progress(phase, done, total)


def _nothing() -> None:
    """Do nothing."""


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the items of every ModuleList in the model: its blocks and layers."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module


def empty_diffusers_model(kind: Callable[..., _Model], config: Config, source: str) -> _Model:
    """Build a diffusers model on the meta device, ignoring config keys from other diffusers versions.

    Raises BaseModelError, which names `source`, if no model can be built from the config.
    """
    known = inspect.signature(kind).parameters
    return _built(lambda: kind(**{key: value for key, value in config.items() if key in known}), source)


def empty_clip_model(kind: type[Any], config: Config, source: str) -> Any:
    """Build a text encoder on the meta device; raises BaseModelError like `empty_diffusers_model`."""
    known = inspect.signature(CLIPTextConfig.__init__).parameters
    return _built(lambda: kind(CLIPTextConfig(**{key: value for key, value in config.items() if key in known})), source)


def _built(build: Callable[[], _Model], source: str) -> _Model:
    try:
        with torch.device("meta"):
            return build().eval().requires_grad_(False)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, StrictDataclassError) as error:
        sentence = f'Could not build the model from the config of "{source}": {plain_reason(error)}.'
        raise BaseModelError(
            "base.broken_config", sentence, "Download the model again, or from another source."
        ) from error
