"""Translate the network of sd-scripts: its module and arguments, also of LyCORIS, to the adapter of a recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from trainer.config.base import Family
from trainer.config.field_names import value_called
from trainer.config.methods import ADAPTERS
from trainer.config.presets.kohya import MODULES
from trainer.importers.translation import Translation, named_values, shown

_DEFAULT_RANK = 4  # of networks/lora.py
MOST_RANK = 1024
_MOST_NOTE = f"ranks are at most {MOST_RANK} here, and alpha has the same ratio to it"
_OFF = (None, False, 0, "", "False", "false")
_MODULES = {"networks.lora": "lora", "lycoris.kohya": "lora", **MODULES}
_NEAREST = {
    "networks.lora_fa": "networks.lora_fa trains only half of each LoRA; a whole LoRA is trained",
    "networks.dylora": "networks.dylora trains all ranks up to network_dim at once; one rank is trained",
}
# LyCORIS's "full" also trains four layers at the UNet's ends, which no plain LoRA has.
_PRESETS = {"full": "all", "full-lin": "linear", "attn-mlp": "linear", "attn-only": "attention"}
# Blocks of the UNet in the order of sd-scripts' lists of 25 (SD 1.5) and 23 (SDXL); "" for those without any LoRA.
BLOCKS: Mapping[Family, tuple[str, ...]] = {
    "sd15": (
        "",
        *(f"unet.input_blocks.{number}.*" for number in range(1, 12)),
        "unet.middle_block.*",
        *(f"unet.output_blocks.{number}.*" for number in range(12)),
    ),
    "sdxl": (
        *("", ""),
        *(f"unet.input_blocks.{number}.*" for number in range(1, 9)),
        *(f"unet.middle_block.{number}.*" for number in range(3)),
        *(f"unet.output_blocks.{number}.*" for number in range(9)),
        "",
    ),
}
# Places in these lists of the blocks that have attention; the others have a LoRA only with conv_dim.
_WITH_ATTENTION: Mapping[Family, frozenset[int]] = {
    "sd15": frozenset({1, 2, 4, 5, 7, 8, 12, *range(16, 25)}),
    "sdxl": frozenset({5, 6, 8, 9, 11, *range(13, 19)}),
}
_PARTS: Mapping[Family, tuple[int, int]] = {"sd15": (12, 1), "sdxl": (9, 3)}
"""Blocks down (and up), and in the middle, which have lists of their own."""


def read_network(found: Translation, family: Family | None) -> None:
    """Read module, rank, alpha, dropouts, norm and the arguments of the network."""
    arguments = named_values(found["network_args"])
    rank = found["network_dim"] or _DEFAULT_RANK
    alpha = found["network_alpha"] or rank  # 0 is the rank
    if rank > MOST_RANK:  # users of LyCORIS write 100000 for a LoKr of whole matrices, which has no scale
        alpha = MOST_RANK if arguments.get("algo") == "lokr" else alpha * MOST_RANK / rank
        rank = MOST_RANK
        found.change("network_dim network_alpha", {"recipe.rank": rank, "recipe.alpha": alpha}, _MOST_NOTE)
    else:
        found.carry("network_dim", {"recipe.rank": rank})
        found.carry("network_alpha", {"recipe.alpha": alpha})
    found.carry("network_dropout", {"recipe.dropout": found["network_dropout"] or 0.0})
    norm = found["scale_weight_norms"]
    found.carry("scale_weight_norms", {"recipe.max_weight_norm": norm} if norm else {})
    found.change("dim_from_weights", {}, "ranks are those of network_dim; set them as in the file, or leave it out")
    _module(found, arguments)
    is_lycoris = found["network_module"] == "lycoris.kohya"
    values, lost = _Arguments(found, arguments, family, (rank, alpha) if is_lycoris else None).read()
    if lost:
        listed = ", ".join(f"{name} = {shown(value)}" for name, value in lost.items())
        found.change("network_args", values, f"not available: {listed}", lost)
    else:
        found.carry("network_args", values)


def _module(found: Translation, arguments: dict[str, Any]) -> None:
    """Read the kind of adapter, which LyCORIS has among its arguments."""
    module = found["network_module"] or "networks.lora"
    if module == "networks.oft":
        note = "this OFT is that of LyCORIS: the rank is the size of its blocks, and there their number"
        found.change("network_module", {"recipe.adapter": "oft"}, note)
        return
    kind = _MODULES.get(module)
    if kind is None:
        note = _NEAREST.get(module, f"{shown(module)} is not run; a LoRA is trained")
        found.change("network_module", {"recipe.adapter": "lora"}, note)
        return
    if module == "lycoris.kohya":
        algorithm = str(arguments.pop("algo", "lora")).lower()
        kind = value_called("recipe.adapter", algorithm) or algorithm
        if kind == "lora" and _is_on(arguments.pop("dora_wd", False)):
            kind = "dora"
            if _is_on(arguments.pop("wd_on_output", True)):
                found.change("network_module", {"recipe.adapter": "dora"}, "its magnitudes are those of inputs here")
                return
    if kind not in ADAPTERS:
        found.change("network_module", {"recipe.adapter": "lora"}, f"algo = {shown(kind)} is not available; a LoRA is")
    else:
        found.carry("network_module", {"recipe.adapter": kind})


class _Arguments:
    """The arguments of the network, each of which is taken once."""

    def __init__(
        self,
        found: Translation,
        arguments: dict[str, Any],
        family: Family | None,
        lycoris: tuple[int, float] | None,
    ) -> None:
        """Take the arguments; `lycoris` is rank and alpha if they are those of LyCORIS, which has other defaults."""
        self._typed = found.typed
        self._left = arguments
        self._family = family
        self._lycoris = lycoris
        self._values: dict[str, Any] = {}

    def read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the values of the job, and the arguments that nothing was made of."""
        if self._lycoris is None:
            self._convolutions()
        else:
            self._layers_of_lycoris(*self._lycoris)
        self._lora_plus()
        self._simple()
        blocks = list(self._blocks())
        if blocks:
            self._values["recipe.blocks"] = blocks
        return self._values, {name: value for name, value in self._left.items() if value not in _OFF}

    def _take(self, name: str, kind: Literal["whole", "number"] = "number") -> Any:
        """Take an argument that is a number; 0 is off everywhere, and is returned as None."""
        return self._typed(f"network_args: {name}", self._left.pop(name, None), kind) or None

    def _convolutions(self) -> None:
        rank, alpha = self._take("conv_dim", "whole"), self._take("conv_alpha")
        self._values["recipe.layers"] = "all" if rank else "linear"
        if rank:
            self._values["recipe.conv_rank"] = rank
            self._values["recipe.conv_alpha"] = alpha or 1.0  # the default of networks/lora.py

    def _layers_of_lycoris(self, rank: int, alpha: float) -> None:
        """Read a preset of layers; convolutions have the rank and alpha of the others unless they have their own."""
        layers = _PRESETS.get(str(self._left.get("preset", "full")))
        if layers:
            self._left.pop("preset", None)
        self._values["recipe.layers"] = layers or "all"
        own = self._take("conv_dim", "whole") or rank, self._take("conv_alpha") or alpha
        if self._values["recipe.layers"] == "all":
            most = (MOST_RANK, MOST_RANK) if own[0] > MOST_RANK else own
            self._values["recipe.conv_rank"], self._values["recipe.conv_alpha"] = most

    def _lora_plus(self) -> None:
        """Read the ratios of LoRA+, of which 0 means off; the UNet's is used for all parts."""
        common, unet, encoder = (self._take(f"loraplus_{part}lr_ratio") for part in ("", "unet_", "text_encoder_"))
        if unet or common:
            self._values["recipe.lora_plus_ratio"] = unet or common
        if encoder and encoder != (unet or common):
            self._left["loraplus_text_encoder_lr_ratio"] = encoder

    def _simple(self) -> None:
        for name in ("rank_dropout", "module_dropout"):
            if value := self._take(name):
                self._values[f"recipe.{name}"] = value
        if _is_on(self._left.pop("rs_lora", False)):
            self._values["recipe.rank_stabilized"] = True
        factor = self._take("factor", "whole")
        if factor and factor > 1:  # -1 is the largest possible, as without one
            self._values["recipe.lokr_factor"] = factor

    def _blocks(self) -> Iterator[dict[str, Any]]:
        """Yield an entry of `recipe.blocks` for each block with a rank, an alpha or a rate of its own."""
        if self._family is None:
            return
        names = BLOCKS[self._family]
        has_convolutions = self._values["recipe.layers"] == "all"
        ranks, alphas = (self._listed(f"block_{what}", len(names)) for what in ("dims", "alphas"))
        rates = self._rates()
        for place, name in enumerate(names):
            entry: dict[str, Any] = {}
            if ranks:
                entry["rank"] = int(ranks[place])
            if alphas:
                entry["alpha"] = alphas[place]
            if rates and rates[place] != 1.0:
                entry["rate_factor"] = rates[place]
            if entry.get("rank") == 0:  # no LoRA there
                entry = {"rate_factor": 0.0}
            if name and entry and (has_convolutions or place in _WITH_ATTENTION[self._family]):
                yield {"match": name, **entry}

    def _listed(self, name: str, count: int) -> list[float]:
        values = _numbers(self._left.get(name))
        if len(values) != count:
            return []
        del self._left[name]
        return values

    def _rates(self) -> list[float]:
        """Return a factor of the rate for each block, from lists for the blocks down, in the middle and up."""
        assert self._family is not None
        outer, middle = _PARTS[self._family]
        names = ("down_lr_weight", "mid_lr_weight", "up_lr_weight")
        lists = [_numbers(self._left.get(name)) for name in names]
        if not any(lists):
            return []
        threshold = self._take("block_lr_zero_threshold") or 0.0
        filled = [
            (values + [1.0] * size)[:size] for values, size in zip(lists, (outer, middle, outer), strict=True)
        ]  # missing ones are 1 there too
        for name, values in zip(names, lists, strict=True):
            if values:
                del self._left[name]
        rates = [rate if rate > threshold else 0.0 for part in filled for rate in part]
        return rates if self._family == "sd15" else [1.0, *rates, 1.0]


def _numbers(value: Any) -> list[float]:
    """Return a list of numbers, written with commas; [] for anything else, such as the name of a curve."""
    parts = value if isinstance(value, list | tuple) else str("" if value is None else value).split(",")
    try:
        numbers = [float(part) for part in parts if part != ""]
    except (ValueError, TypeError, OverflowError):
        return []
    return numbers if all(map(math.isfinite, numbers)) else []


def _is_on(value: Any) -> bool:
    return str(value).strip().lower() == "true"
