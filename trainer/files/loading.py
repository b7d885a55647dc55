"""What programs that load LoRAs do with a file: the rules of their loaders, applied to its header. Needs no torch.

The rules were found by letting each program's own code read files of every kind (tests/benchmarks/readers.py) and by
reading the sources of ComfyUI 0.3.64, Forge dfdcbab, A1111 1.10, InvokeAI 6.14, diffusers 0.42 and sd-scripts 48d368f.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from trainer.config.base import Family
from trainer.config.checks import ONLY_SDXL_TEXT
from trainer.config.methods import ADAPTERS, PROGRAMS
from trainer.files.header import Header

Outcome = Literal["loads", "partly", "refused"]
_SEVERITY: Mapping[Outcome, int] = {"loads": 0, "partly": 1, "refused": 2}
# Forge refuses a file with more keys than this that it does not know.
_MOST_UNKNOWN_IN_FORGE = 12
_ROLE = re.compile(
    r"(?P<layer>.+?)(?P<style>\.lora_(?:down|up|mid)\.weight|\.lora_[AB](?:\.default)?\.weight"
    r"|[._]lora(?:_linear_layer)?\.(?:down|up)\.weight"
    r"|\.(?:alpha|dora_scale|hada_\w+|lokr_\w+|oft_\w+|diff|diff_b|rescale)"
    r"|\.lora_magnitude_vector(?:\.default)?(?:\.weight)?)"
)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
_DOTTED = ("unet.", "text_encoder.", "text_encoder_2.")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a program does with a file."""

    program: str
    outcome: Outcome
    reasons: tuple[str, ...]
    """Why it does not load the whole file, as sentences; empty if it does."""


@dataclass(frozen=True)
class LoraKeys:
    """A LoRA file's header as its loaders see it."""

    header: Header
    family: Family | None
    roles: dict[str, set[str]] = field(default_factory=dict)
    """What follows the layer in each layer's keys."""

    def __post_init__(self) -> None:
        for key in self.header.tensors:
            if match := _ROLE.fullmatch(key):
                self.roles.setdefault(match["layer"], set()).add(match["style"])

    @cached_property
    def unet(self) -> set[str]:
        """Return the layers of the UNet."""
        return {layer for layer in self.roles if layer.startswith(("lora_unet_", "unet.", "lycoris_"))}

    @cached_property
    def text(self) -> set[str]:
        """Return the layers of text encoders."""
        return {layer for layer in self.roles if re.match(r"lora_te[12]?_|text_encoder(_2)?\.", layer)}

    @cached_property
    def flat(self) -> set[str]:
        """Return the layers with kohya's flattened names."""
        return {layer for layer in self.roles if layer.startswith("lora_")}

    @cached_property
    def dotted(self) -> set[str]:
        """Return the layers with the names of PEFT and diffusers."""
        return {layer for layer in self.roles if layer.startswith(_DOTTED)}

    @cached_property
    def ldm(self) -> set[str]:
        """Return the UNet layers with the block names of single-file checkpoints."""
        return {layer for layer in self.flat if re.match(r"lora_unet_(input|middle|output)_block", layer)}

    @cached_property
    def embeddings(self) -> int:
        """Return the number of keys with embeddings bundled into the file."""
        return sum(key.startswith("bundle_emb.") for key in self.header.tensors)

    @cached_property
    def projections(self) -> dict[str, set[str]]:
        """Return the projections of each attention layer of text encoders that the file has."""
        found: dict[str, set[str]] = {}
        for layer in self.text:
            if match := re.fullmatch(r"(.+self_attn)[._](q_proj|k_proj|v_proj|out_proj)", layer):
                found.setdefault(match[1], set()).add(match[2])
        return found

    def shape(self, layer: str, end: str) -> tuple[int, ...]:
        """Return the shape of a layer's tensor; () if there is none."""
        info = self.header.tensors.get(layer + end)
        return info.shape if info else ()

    def has(self, *marks: str) -> bool:
        """Return whether a key contains one of these marks."""
        return any(mark in key for key in self.header.tensors for mark in marks)


Findings = Iterator[tuple[str, Outcome, str]]
"""Programs, each with what it does with the file and why."""


def verdicts(header: Header, family: Family | None) -> list[Verdict]:
    """Return what each of `PROGRAMS` does with a LoRA file; `family` is None if it is unknown.

    Only names, shapes and metadata count. Rules that hold for one family are left out if the family is unknown.
    """
    keys = LoraKeys(header, family)
    found: dict[str, list[tuple[Outcome, str]]] = {program: [] for program in PROGRAMS}
    for rule in _RULES:
        for program, outcome, reason in rule(keys):
            found[program].append((outcome, reason))
    return [
        Verdict(
            program,
            max((outcome for outcome, _ in each), key=_SEVERITY.__getitem__, default="loads"),
            tuple(dict.fromkeys(reason for _, reason in each)),
        )
        for program, each in found.items()
    ]


def _method(keys: LoraKeys) -> Findings:
    """Yield what depends on the method, such as LoHa; which programs load it is in `ADAPTERS`."""
    marks = {"loha": (".hada_",), "lokr": (".lokr_",), "oft": (".oft_blocks",)}
    for name, mark in marks.items():
        if not keys.has(*mark):
            continue
        title = ADAPTERS[name].title
        for program in PROGRAMS:
            if not ADAPTERS[name].is_loaded_by(program, keys.family):
                yield program, "refused", f"It does not know {title} and refuses or ignores its layers."
    for program in ("diffusers", "sd-scripts"):
        if keys.has(".dora_scale", ".lora_magnitude_vector"):
            yield program, "partly", "It ignores the magnitudes of DoRA and applies the rest, which looks different."
    if keys.has(".lora_mid.", ".hada_t", ".lokr_t"):
        yield "diffusers", "refused", "It does not know Tucker decompositions (lora_mid)."
        yield "sd-scripts", "refused", "It does not know Tucker decompositions (lora_mid) and merges them wrongly."
        yield "InvokeAI", "refused", "It does not recognize files with Tucker decompositions (lora_mid)."
    if any(re.search(r"\.(diff|diff_b|oft_diag)$", key) for key in keys.header.tensors):
        for program in ("diffusers", "sd-scripts"):
            yield program, "refused", "It knows neither full weight differences nor this kind of rotation."


def _magnitudes(keys: LoraKeys) -> Findings:
    """Yield who misreads DoRA with one magnitude per output, which LyCORIS writes by default."""
    wide = [keys.shape(layer, ".dora_scale") for layer in keys.roles]
    if not any(len(shape) > 1 and shape[1] == 1 and shape[0] > 1 for shape in wide):
        return
    for program in ("InvokeAI", "A1111"):
        yield program, "partly", "It applies DoRA's magnitudes of outputs to inputs: images look wrong."
    for program in ("ComfyUI", "Forge"):
        yield program, "partly", "It divides DoRA's magnitudes of outputs by another norm: 3 to 7 % off."


def _dotted_names(keys: LoraKeys) -> Findings:
    if not keys.dotted:
        return
    names = "names of PEFT and diffusers, such as unet.down_blocks…"
    for program in ("A1111", "sd-scripts"):
        yield program, "refused", f"It does not know the {names}, and loads nothing."
    for program in ("Forge", "InvokeAI"):
        yield program, "refused", f"It refuses files with the {names}."
    if keys.family == "sd15" and any(".lora.down.weight" in keys.roles[layer] for layer in keys.dotted):
        yield "ComfyUI", "refused", "It knows no layer of SD 1.5 under the names that diffusers writes (.lora.down)."
    elif any(re.search(r"attn\d\.to_", layer) for layer in keys.dotted):
        yield "ComfyUI", "partly", f"With the {names}, it leaves out the UNet's attention layers."


def _block_names(keys: LoraKeys) -> Findings:
    """Yield what depends on the block names in the UNet; each family has one that all programs know."""
    ours = {layer for layer in keys.unet & keys.flat if re.match(r"lora_unet_(down|mid|up)_block", layer)}
    if keys.family == "sd15" and keys.ldm:
        names = "block names of single-file checkpoints, such as input_blocks, in an SD 1.5 LoRA"
        yield "diffusers", "refused", f"It refuses {names}."
        for program in ("sd-scripts", "InvokeAI"):
            yield program, "partly", f"It does not know {names}, and loads only text encoders."
    if keys.ldm and ours:
        yield "InvokeAI", "refused", "It refuses files with two kinds of block names."
        yield "diffusers", "partly", "Of two kinds of block names, it loads only down_blocks, mid_block and up_blocks."
    if keys.family == "sdxl" and "lora_unet_up_blocks_0_upsamplers_0_conv" in ours:
        yield "A1111", "partly", "It leaves out the layer up_blocks_0_upsamplers_0_conv."


def _text_names(keys: LoraKeys) -> Findings:
    """Yield what depends on the names of text encoders' layers."""
    if keys.family == "sd15" and any(layer.startswith("lora_te1_") for layer in keys.text):
        for program in ("sd-scripts", "InvokeAI"):
            yield program, "partly", "It does not know lora_te1_ in an SD 1.5 LoRA, and leaves out the text encoder."
    if keys.family == "sdxl" and any(layer.startswith("lora_te_") for layer in keys.text):
        for program in ("sd-scripts", "A1111"):
            yield program, "partly", "It does not know lora_te_ in an SDXL LoRA, and leaves out that text encoder."
        yield "InvokeAI", "refused", "It takes an SDXL LoRA with lora_te_ for one of SD 1.5, and refuses it."
    if any(re.match(r"lora_te[12]?_encoder_", layer) for layer in keys.text):
        for program in ("ComfyUI", "sd-scripts", "InvokeAI", "A1111"):
            yield program, "partly", "It leaves out text encoders whose names have no text_model."
        yield "Forge", "refused", "It refuses files with text encoders whose names have no text_model."
    if any(layer.endswith("text_projection") for layer in keys.text):
        for program in ("sd-scripts", "A1111"):
            yield program, "partly", "It leaves out the layer text_projection."


def _partial_attention(keys: LoraKeys) -> Findings:
    """Yield who needs all of q, k, v and out in the attention of text encoders."""
    partial = [layer for layer, found in keys.projections.items() if found != set(_PROJECTIONS)]
    if not partial or not keys.flat:
        return
    needs = "some attention layers of text encoders do not have all of q, k, v and out"
    is_known = any("_mlp_fc" in layer or layer.endswith("out_proj") for layer in keys.text)
    outcome: Outcome = "partly" if is_known else "refused"
    yield "diffusers", outcome, f"It leaves out the text encoder or refuses the file: {needs}."
    if any(layer.startswith("lora_te2_") for layer in partial):
        yield "A1111", "partly", f"It leaves out attention of the second text encoder: {needs}."


def _only_parts(keys: LoraKeys) -> Findings:
    """Yield what depends on which layers InvokeAI needs to recognize a file."""
    if keys.family == "sdxl" and keys.text and not keys.unet:
        yield "InvokeAI", "refused", f"{ONLY_SDXL_TEXT}."
    known = any(re.search(r"attn2[._]to_[kv]$", layer) for layer in keys.unet) or keys.projections
    if keys.family == "sd15" and not known:
        yield "InvokeAI", "refused", "It needs a cross-attention or text encoder layer to recognize an SD 1.5 LoRA."


def _bundled(keys: LoraKeys) -> Findings:
    if not keys.embeddings:
        return
    yield "diffusers", "refused", "It refuses files with bundled embeddings (bundle_emb)."
    if keys.embeddings > _MOST_UNKNOWN_IN_FORGE:
        reason = f"It refuses files with more than {_MOST_UNKNOWN_IN_FORGE} keys that it does not know."
        yield "Forge", "refused", reason
    for program in ("ComfyUI", "sd-scripts", "InvokeAI"):
        yield program, "partly", "It ignores the bundled embeddings (bundle_emb)."


def _incomplete(keys: LoraKeys) -> Findings:
    halves = ({".lora_down.weight", ".lora_up.weight"}, {".lora_A.weight", ".lora_B.weight"})
    broken = [layer for layer, roles in keys.roles.items() for half in halves if len(roles & half) == 1]
    for program in PROGRAMS if broken else ():
        yield program, "refused", f"{broken[0]} has only one of its two matrices."


def _projection_shapes(keys: LoraKeys) -> Findings:
    """Yield who needs proj_in and proj_out as in the base: convolutions in SD 1.5, matrices in SDXL."""
    shapes = [keys.shape(layer, ".lora_down.weight") for layer in keys.flat if layer.endswith(("proj_in", "proj_out"))]
    usual = {"sd15": 4, "sdxl": 2}.get(keys.family or "")
    if usual and any(len(shape) not in (0, usual) for shape in shapes):
        yield "diffusers", "refused", f"It needs proj_in and proj_out with {usual} dimensions."
        yield "sd-scripts", "refused", f"It needs proj_in and proj_out with {usual} dimensions."


def _metadata(keys: LoraKeys) -> Findings:
    version = keys.header.metadata.get("ss_base_model_version", "")
    if keys.family == "sdxl" and keys.header.metadata and not version.startswith("sdxl_"):
        reason = "It takes the file for SD 1.5 and hides it while an SDXL model is loaded (no ss_base_model_version)."
        yield "A1111", "partly", reason


def _number_formats(keys: LoraKeys) -> Findings:
    formats: Set[str] = {info.dtype for info in keys.header.tensors.values()}
    for unusual in sorted(formats & {"F8_E4M3", "F8_E5M2"}):
        for program in PROGRAMS:
            yield program, "partly", f"Files in {unusual} were not tested; fp16 and bf16 load everywhere."


_RULES: tuple[Callable[[LoraKeys], Findings], ...] = (
    _method,
    _magnitudes,
    _dotted_names,
    _block_names,
    _text_names,
    _partial_attention,
    _only_parts,
    _bundled,
    _incomplete,
    _projection_shapes,
    _metadata,
    _number_formats,
)
