"""Let other programs' own code read LoRA files of every adapter, and compare their weights with those of the training.

    python -m tests.benchmarks.readers --comfyui CHECKOUT --forge CHECKOUT --invokeai CHECKOUT [--record]

Forge's checkout also has A1111's reader, which needs einops. Writes a file for each adapter and both families on tiny
bases, with random weights in every layer. Each program then merges each file into the base's weights, in a process of
its own because their modules have the same names. Exits with 1 if a program does not read a file that
`python -m trainer methods` says it loads, reads one that it is not said to load, or gets other weights. Takes two
minutes; `--record` writes the table to tests/benchmarks/results/readers.md. Libraries that a program imports but that
are missing here are replaced by empty classes, because none of them reads a LoRA.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.benchmarks.rivals_check import Absent
from trainer.config.base import Family
from trainer.config.methods import ADAPTERS

RESULTS = Path(__file__).parent / "results" / "readers.md"
PROGRAMS = {"ComfyUI": "comfyui", "Forge": "forge", "A1111": "forge", "InvokeAI": "invokeai"}
"""Option with the checkout that has each program's reader."""
FILES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "lora": ("lora", {}),
    "lora, rank-stabilized": ("lora", {"rank_stabilized": True}),
    "tlora": ("tlora", {}),
    "dora": ("dora", {}),
    "loha": ("loha", {}),
    "lokr": ("lokr", {}),
    "lokr, factor 4": ("lokr", {"lokr_factor": 4}),
    "oft": ("oft", {}),
}
"""Adapter and further settings of each file."""
FAMILIES: tuple[Family, ...] = ("sd15", "sdxl")
LARGEST = 1e-5
"""Largest difference of a layer's change that is allowed, relative to the change; the programs compute in fp32."""
Merge = Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]]
"""A reader: gets a file's tensors and the base's weights by layer, returns the changed weights that it reads."""


def write(folder: Path, family: Family, name: str) -> None:
    """Write a file with random weights, and beside it the weights of each layer before and with the adapter."""
    from tests.support.loras import Models, trained_change
    from tests.support.lycoris import recipe
    from trainer.adapter.attach import initial_weights, module_path
    from trainer.adapter.export import export_lora
    from trainer.dataset.sampling import generator

    adapter_name, changes = FILES[name]
    base = Models.copies(family)
    adapter = Models.copies(family).attach(recipe(adapter_name, **changes))
    stream = torch.Generator().manual_seed(0)
    start = initial_weights(adapter, lambda key: generator(1, "adapter", sample=key))
    # Halves, as in the file.
    weights = {key: (w + 0.05 * torch.randn(w.shape, generator=stream)).half().float() for key, w in start.items()}
    adapter.load(weights)
    before, after = {}, {}
    for slot in adapter.slots:
        model = base.parts[slot.part]
        weight = model.get_submodule(module_path(model, slot)).weight.detach()
        before[slot.kohya] = weight
        after[slot.kohya] = weight + trained_change(adapter, slot, weights)
    path = folder / f"{family} {name}"
    export_lora(path.with_suffix(".safetensors"), weights, adapter, {})
    save_file({key: value.contiguous() for key, value in before.items()}, path.with_suffix(".before"))
    save_file({key: value.contiguous() for key, value in after.items()}, path.with_suffix(".after"))


def reader(program: str, checkout: Path) -> Merge:
    """Return a program's own reader, imported from its checkout."""
    readers = {"ComfyUI": comfyui, "Forge": forge, "A1111": a1111, "InvokeAI": invokeai}
    absent = Absent()
    sys.meta_path.append(absent)
    sys.argv = ["", "--always-cpu"]
    while True:
        try:
            return readers[program](checkout)
        except ImportError as error:
            absent.stand_in_for(error)


def comfyui(checkout: Path) -> Merge:
    """Return ComfyUI's reader."""
    sys.path.insert(0, str(checkout))
    import_module("comfy.cli_args").args.cpu = True
    lora = import_module("comfy.lora")

    def merge(tensors: dict[str, Tensor], base: dict[str, Tensor]) -> dict[str, Tensor]:
        found = lora.load_lora(tensors, {key: key for key in base})
        return {
            key: lora.calculate_weight([(1.0, found[key], 1.0, None, None)], base[key].clone(), key) for key in found
        }

    return merge


def forge(checkout: Path) -> Merge:
    """Return Forge's reader."""
    sys.path.insert(0, str(checkout))
    lora = import_module("backend.patcher.lora")

    def merge(tensors: dict[str, Tensor], base: dict[str, Tensor]) -> dict[str, Tensor]:
        found, _ = lora.load_lora(tensors, {key: key for key in base})
        return {
            key: lora.merge_lora_to_weight([(1.0, found[key], 1.0, None, None)], base[key].clone(), key)
            for key in found
        }

    return merge


def a1111(checkout: Path) -> Merge:
    """Return A1111's reader, which needs the layers as modules."""
    sys.path.insert(0, str(checkout / "packages_3rdparty" / "webui_lora_collection"))
    devices: Any = types.ModuleType("modules.devices")
    devices.cpu, devices.dtype = torch.device("cpu"), torch.float32
    import_module("modules").devices = devices  # type: ignore[attr-defined]
    network = import_module("network")
    kinds = {"lora": "Lora", "hada": "Hada", "lokr": "Lokr", "oft": "OFT"}
    module_types = [getattr(import_module(f"network_{name}"), f"ModuleType{kind}")() for name, kind in kinds.items()]
    whole = types.SimpleNamespace(te_multiplier=1.0, unet_multiplier=1.0, dyn_dim=None)

    def merge(tensors: dict[str, Tensor], base: dict[str, Tensor]) -> dict[str, Tensor]:
        merged = {}
        for key, weight in base.items():
            own = {name[len(key) + 1 :]: value.float() for name, value in tensors.items() if name.startswith(f"{key}.")}
            weights = network.NetworkWeights(key, key, own, layer_with(weight))
            found = next(filter(None, (kind.create_module(whole, weights) for kind in module_types)), None)
            if found is not None:
                merged[key] = weight + found.calc_updown(weight)[0]
        return merged

    return merge


def layer_with(weight: Tensor) -> nn.Module:
    """Return a layer with this weight: linear (outputs, inputs), or a convolution (outputs, inputs, k, k)."""
    outputs, inputs, *kernel = weight.shape
    layer = nn.Conv2d(inputs, outputs, kernel[0], bias=False) if kernel else nn.Linear(inputs, outputs, bias=False)
    layer.weight.data = weight
    return layer


def invokeai(checkout: Path) -> Merge:
    """Return InvokeAI's reader."""
    sys.path.insert(0, str(checkout))
    device = "invokeai.backend.model_manager.load.model_cache.torch_module_autocast.cast_to_device"
    moved: Any = types.ModuleType(device)  # its package imports the whole program
    moved.cast_to_device = lambda tensor, device: tensor.to(device)
    sys.modules[device] = moved
    conversion = import_module("invokeai.backend.patches.lora_conversions.sd_lora_conversion_utils")

    def merge(tensors: dict[str, Tensor], base: dict[str, Tensor]) -> dict[str, Tensor]:
        try:
            layers = conversion.lora_model_from_sd_state_dict(
                {key: value.float() for key, value in tensors.items()}
            ).layers
        except ValueError:  # "Unsupported lora format"
            return {}
        return {
            key: base[key]
            + layer.get_parameters({"weight": base[key].clone()}, weight=1.0)["weight"].view(base[key].shape)
            for key, layer in layers.items()
        }

    return merge


@torch.no_grad()
def compare(merge: Merge, path: Path) -> float | None:
    """Return the largest relative difference of a layer's change; None if the program reads none of its layers."""
    before, after = (load_file(path.with_suffix(end)) for end in (".before", ".after"))
    merged = merge(load_file(path), {key: weight.float() for key, weight in before.items()})
    if not merged:
        return None
    if missing := before.keys() - merged.keys():
        raise SystemExit(f"{path.name}: {len(missing)} layers are not read, among them {min(missing)}")
    return max(float((merged[key].double() - after[key]).norm() / (after[key] - before[key]).norm()) for key in before)


def read(program: str, checkout: Path, folder: Path) -> None:
    """Print the differences of all files in the folder as JSON."""
    merge = reader(program, checkout)
    found = {path.stem: compare(merge, path) for path in sorted(folder.glob("*.safetensors"))}
    sys.stdout.write(f"\n{json.dumps(found)}\n")


def differences(program: str, checkout: Path, folder: Path) -> dict[str, float | None]:
    """Return the differences of all files as a program of its own process finds them."""
    words = [sys.executable, "-m", "tests.benchmarks.readers", "--read", program, str(checkout), str(folder)]
    ended = subprocess.run(words, capture_output=True, encoding="utf-8", check=False)
    if ended.returncode:
        raise SystemExit(f"{program}: {ended.stderr[-2000:]}")
    found: dict[str, float | None] = json.loads(ended.stdout.splitlines()[-1])
    return found


def is_said_to_load(program: str, name: str) -> bool:
    """Return whether `python -m trainer methods` says that the program loads files of this adapter."""
    loads_in = ADAPTERS[FILES[name][0]].loads_in
    return loads_in.startswith("every program") or program in loads_in


def table(found: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """Return the results as a Markdown table."""
    lines = [f"| file | {' | '.join(found)} |", f"|---|{'---:|' * len(found)}"]
    for family in FAMILIES:
        for name in FILES:
            cells = [rows[f"{family} {name}"] for rows in found.values()]
            texts = ["not read" if cell is None else f"{cell:.1e}" for cell in cells]
            lines.append(f"| {family} {name} | {' | '.join(texts)} |")
    return lines


def main() -> int:
    """Write the files, let every program read them, and print the table."""
    if sys.argv[1:2] == ["--read"]:
        read(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for option in dict.fromkeys(PROGRAMS.values()):
        parser.add_argument(f"--{option}", type=Path)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    checkouts = {program: getattr(options, option) for program, option in PROGRAMS.items() if getattr(options, option)}
    with TemporaryDirectory() as folder:
        for family in FAMILIES:
            for name in FILES:
                write(Path(folder), family, name)
        found = {program: differences(program, checkout, Path(folder)) for program, checkout in checkouts.items()}
    lines = table(found)
    sys.stdout.write("\n".join(lines) + "\n")
    wrong = [
        f"{program}: {file}"
        for program, rows in found.items()
        for file, difference in rows.items()
        if is_said_to_load(program, file.partition(" ")[2]) != (difference is not None and difference < LARGEST)
    ]
    if options.record:
        head = (
            "# Files of every adapter, read by other programs' own code",
            "Made by `python -m tests.benchmarks.readers`.",
        )
        RESULTS.write_text("\n\n".join([*head, "\n".join(lines)]) + "\n", encoding="utf-8", newline="\n")
    for line in wrong:
        sys.stdout.write(f"differs from `python -m trainer methods`: {line}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
