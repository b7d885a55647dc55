"""Train SDXL or SD 1.5 with other trainers and with Impasto, on one random base with the same images and settings.

    python -m tests.benchmarks.rivals [--diffusers CHECKOUT] [--sd-scripts CHECKOUT] [--onetrainer CHECKOUT]
                                 [--unsloth CHECKOUT] [--family sdxl] [--batch 1 4] [--minutes 8] [--results FOLDER]
                                 [--small | --cpu | --check]

Each trainer runs in a separate process, its own script with its own command line, from a checkout given by path and
with the libraries of a virtual environment in it (venv or .venv), otherwise of this one (and of PYTHONPATH): some need
other versions than ours. None of their code is in this repository. With --check each trainer's own parser reads its
settings and nothing is trained, to test without a GPU. tests/benchmarks/rivals_watch.py measures the time of all alike,
including ours, and counts what one further step sends to the device and saves for backward (tests/support/counting.py
says how). bf16, LoRA rank 16 on the UNet, AdamW, no checkpointing, latents and captions cached if a trainer can. What
another trainer adapts besides attention, ours adapts too in the row that it is compared with. A trainer that cannot run
is listed with the last line that it printed. With --small everything is tiny and on the CPU, where several trainers
cannot train: the numbers are meaningless. With --cpu the whole base is trained on small images on the CPU, which takes
some 20 GB and minutes per trainer: the times are meaningless, but the operations are those on a GPU, except for
attention kernels and what autocast converts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from tests.benchmarks.rivals_settings import RATE, RIVALS, TOKENIZERS, Layers, Place, Rival, Settings, ours
from tests.support import ROOT
from tests.support.tiny import models_on_meta, single_file_metadata, single_file_tensors, tiny_configs, write_folder
from trainer.config.base import Family
from trainer.files.assets import asset_path, bundled_configs
from trainer.protocol import files

WATCH = Path(__file__).with_name("rivals_watch.py")
CHECK = Path(__file__).with_name("rivals_check.py")
RESULT = "RESULT"
"""Placeholder for the file that our scripts write to."""
RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
PICTURES = 24
LONGEST = 150.0
"""Time limit in seconds for one trainer on a GPU, with loading and caching."""
ON_CARD = Settings(1024, 1, steps=30, small=False, device="cuda")
SIDES: dict[Family, int] = {"sdxl": 1024, "sd15": 512}
ON_CPU = Settings(256, 1, steps=3, small=False, device="cpu", warm_up=1)
TINY = Settings(64, 1, steps=8, small=True, device="cpu")


@dataclass(frozen=True)
class Outcome:
    """Result of one run."""

    name: str
    batch: int
    layers: Layers
    pictures_per_second: float | None = None
    allocated: int | None = None
    reserved: int | None = None
    trained: int | None = None
    """Weights that the optimizer changes."""
    operations: int | None = None
    """From the end of one optimizer step to the beginning of the next."""
    kept: int | None = None
    """Bytes that backward finds when it begins, without weights."""
    failure: str = ""


def run(rival: Rival, settings: Settings, place: Place, checkout: Path, seconds: float) -> Outcome:
    """Run one trainer until it has made enough steps; errors are part of the result."""
    outcome = partial(Outcome, rival.name, settings.batch, rival.layers)
    with tempfile.TemporaryDirectory(dir=place.folder, ignore_cleanup_errors=True) as folder:
        here = replace(place, folder=Path(folder))
        log = here.folder / "log.txt"
        try:
            watch = [str(WATCH), RESULT, str(settings.warm_up), str(settings.steps)]
            report = _script_result(rival, settings, here, checkout, watch, seconds)
            uncounted = f"not counted: {_last_words(log)}" if report["operations"] is None else ""
        except FileNotFoundError:
            return outcome(failure=_last_words(log))
        except subprocess.TimeoutExpired:
            return outcome(failure=f"took longer than {seconds:.0f} s; last: {_last_words(log)}")
        except Exception as error:  # noqa: BLE001 (whatever it was, it is named in the table)
            return outcome(failure=f"{type(error).__name__}: {error}")
    return outcome(settings.batch / report.pop("step_seconds"), **report, failure=uncounted)


def _script_result(
    rival: Rival, settings: Settings, here: Place, checkout: Path, by: Sequence[str], seconds: float
) -> dict[str, Any]:
    """Return what one of our two scripts writes to RESULT; raise FileNotFoundError if it wrote nothing."""
    result, start = here.folder / "result.json", (checkout / rival.inside).resolve()
    environment = {
        **os.environ,
        **rival.environment,
        "PYTHONPATH": os.pathsep.join([str(start), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "IMPASTO_HOME": str(here.folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONIOENCODING": "utf-8",
    }
    words = [_python(checkout), *(str(result) if word is RESULT else word for word in by)]
    with (here.folder / "log.txt").open("wb") as output:
        subprocess.run(
            [*words, *rival.command(settings, here, checkout.resolve())],
            cwd=start,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
    report: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return report


def _python(checkout: Path) -> str:
    """Return the Python of the trainer's own environment, if it has one."""
    places = (checkout / name / inside for name in ("venv", ".venv") for inside in ("bin/python", "Scripts/python.exe"))
    return str(next((place.absolute() for place in places if place.exists()), sys.executable))


def check(rival: Rival, settings: Settings, place: Place, checkout: Path) -> str:
    """Return what a trainer's own parser understands of its settings, as text; nothing is trained."""
    with tempfile.TemporaryDirectory(dir=place.folder, ignore_cleanup_errors=True) as folder:
        here = replace(place, folder=Path(folder))
        try:
            report = _script_result(rival, settings, here, checkout, [str(CHECK), RESULT], LONGEST)
        except FileNotFoundError:
            return f"not understood: {_last_words(here.folder / 'log.txt')}"
        except subprocess.TimeoutExpired:
            return f"said nothing in {LONGEST:.0f} s"
    values = {str(value) for value in report["understood"].values()}
    lost = {str(one) for one in (settings.rank, settings.resolution, settings.batch, RATE)} - values
    words = [f"understood ({len(report['understood'])} keys)"]
    words += [f"unknown: {', '.join(report['unknown'])}"] if report["unknown"] else []
    words += [f"these numbers did not arrive: {', '.join(sorted(lost))}"] if lost else []
    words += [f"libraries to install: {', '.join(report['absent'])}"] if report["absent"] else []
    return "; ".join(words)


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:200].replace("|", "/") if said else "it said nothing"


def lay_out(folder: Path, settings: Settings) -> Place:
    """Write bases, tokenizers and images."""
    place = _place(folder)
    write_bases(settings.family, place.single, place.diffusers, small=settings.small)
    for target in (place.pictures, place.listed, place.repeated / "1000_pictures"):
        target.mkdir(parents=True)
    captions = {}
    for number in range(PICTURES):
        name, caption = f"{number:02d}.png", f"a picture, number {number}"
        _draw(number, settings.resolution).save(place.pictures / name)
        (place.pictures / name).with_suffix(".txt").write_text(caption, encoding="utf-8")
        captions[name] = caption
    shutil.copytree(place.pictures, place.repeated / "1000_pictures", dirs_exist_ok=True)
    for name in captions:
        shutil.copy(place.pictures / name, place.listed / name)
    for name in TOKENIZERS:
        shutil.copytree(place.diffusers / "tokenizer", place.tokenizers / name)
    lines = [json.dumps({"file_name": name, "text": caption}) for name, caption in captions.items()]
    (place.listed / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return place


def _place(folder: Path) -> Place:
    names = ("base.safetensors", "base", "pictures", "listed", "repeated", "tokenizers")
    return Place(folder, *(folder / name for name in names))


def _draw(seed: int, side: int) -> Image.Image:
    """Return a square of soft colors, different for each seed."""
    spots = np.random.default_rng(seed).integers(0, 255, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(spots).resize((side, side), Image.Resampling.BICUBIC)


def write_bases(family: Family, single: Path, whole: Path, *, small: bool) -> None:
    """Write one base of random weights as a single file and as a diffusers folder, with tokenizers."""
    configs = tiny_configs(family) if small else bundled_configs(family)
    weights = random_weights(configs, torch.float32 if small else torch.float16)
    tensors = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in single_file_tensors(family, weights, configs).items()
    }
    save_file(tensors, single, single_file_metadata(family, configs) if small else {"format": "pt"})
    write_folder(family, whole, weights, configs)
    index = json.loads((whole / "model_index.json").read_text(encoding="utf-8"))
    for name in ("tokenizer", "tokenizer_2") if family == "sdxl" else ("tokenizer",):
        shutil.copytree(asset_path("demo", "base", "tokenizer"), whole / name)
        index[name] = ["transformers", "CLIPTokenizer"]
    files.write_json(whole / "model_index.json", index)


def random_weights(configs: Mapping[str, Mapping[str, Any]], dtype: torch.dtype) -> dict[str, dict[str, Tensor]]:
    """Return weights by part and name that keep activations finite: ones for norms, others scaled by fan-in."""
    pool = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).to(dtype)

    def drawn(name: str, like: Tensor) -> Tensor:
        if like.ndim < 2:
            return torch.full(like.shape, float(name.endswith("weight")), dtype=dtype)
        fan_in = like.numel() // like.shape[0]
        repeats = -(-like.numel() // pool.numel())
        numbers: Tensor = pool.repeat(repeats)[: like.numel()] * fan_in**-0.5
        return numbers.reshape(like.shape)

    return {
        part: {name: drawn(name, tensor) for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
        for part, model in models_on_meta(configs).items()
    }


def table(outcomes: Sequence[Outcome], card: str, settings: Settings) -> str:
    """Return all results as Markdown; each is compared with our default on the same layers and batch size."""
    plain = [one for one in outcomes if one.name == ours(one.layers).name]
    own = {(one.batch, one.layers): one.pictures_per_second for one in plain}
    base = {"sdxl": "SDXL", "sd15": "SD 1.5"}[settings.family]
    size = "tiny models, meaningless numbers" if settings.small else f"{base} at {settings.resolution}"
    if settings.device == "cpu" and not settings.small:
        size += " on the CPU, whose times say nothing about a GPU"
    lines = [
        f"# Other trainers compared with Impasto on {card}",
        "",
        f"By `python -m tests.benchmarks.rivals`, {datetime.now(UTC).date()}, torch {torch.__version__}: {size}, LoRA "
        f"r{settings.rank}, random weights; tests/benchmarks/rivals_settings.py has the settings of each.",
        "",
        "| trainer | LoRA on | trained weights | batch | images/s | Impasto is faster by | operations | saved, MiB "
        "| allocated, MiB | reserved, MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        head = f"| {one.name} | {one.layers} | {_count(one.trained)} | {one.batch} |"
        if one.pictures_per_second is None:
            lines.append(f"{head} {one.failure} | | | | | |")
            continue
        rate = own.get((one.batch, one.layers))
        ratio = "" if rate is None else f"{rate / one.pictures_per_second:.2f} ×"
        asked = (
            f"{one.failure or _count(one.operations)} | {_mib(one.kept)} | {_mib(one.allocated)} | {_mib(one.reserved)}"
        )
        lines.append(f"{head} {one.pictures_per_second:.2f} | {ratio} | {asked} |")
    return "\n".join(lines) + "\n"


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / MIB:,.0f}"


def compare(
    checkouts: Mapping[str, Path], batches: Sequence[int], minutes: float, folder: Path, settings: Settings
) -> list[Outcome]:
    """Run all trainers, ours first, and write the table after each."""
    until = time.monotonic() + 60 * minutes - 10
    cpu = settings.device == "cpu"
    card = "the CPU" if cpu else torch.cuda.get_device_properties(0).name
    family = "" if settings.family == "sdxl" else f"_{settings.family}"
    name = f"rivals_{card.lower().removeprefix('the ').replace(' ', '_')}{family}{'_small' if settings.small else ''}"
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        with ProcessPoolExecutor(
            1, get_context("spawn")
        ) as other:  # in a separate process, whose memory is free again afterwards
            place = other.submit(lay_out, Path(scratch), settings).result()
        for batch in batches:
            turn = replace(settings, batch=batch)
            for rival, checkout in _in_order(settings.family, checkouts, graphs=not cpu):
                left = until - time.monotonic()
                if checkout is None:
                    outcome = Outcome(rival.name, batch, rival.layers, failure="no checkout was given")
                elif left < 10:
                    outcome = Outcome(rival.name, batch, rival.layers, failure="no time was left")
                else:
                    outcome = run(rival, turn, place, checkout, min(left, LONGEST * (10 if cpu else 1)))
                outcomes.append(outcome)
                _write(folder / name, outcomes, card, settings)
    return outcomes


def check_all(family: Family, checkouts: Mapping[str, Path]) -> int:
    """Print for each trainer whether its parser understands its settings; return 0 if all do."""
    settings = replace(ON_CARD, batch=4, family=family, resolution=SIDES[family])
    with tempfile.TemporaryDirectory() as scratch:
        place = _place(Path(scratch))
        for folder in (place.diffusers, place.pictures, place.listed, place.repeated):
            folder.mkdir()
        found = {key: check(RIVALS[family][key], settings, place, path) for key, path in checkouts.items()}
    for key, words in found.items():
        sys.stdout.write(f"{RIVALS[family][key].name}: {words}\n")
    return 0 if all(words.startswith("understood") for words in found.values()) else 1


def _in_order(family: Family, checkouts: Mapping[str, Path], *, graphs: bool) -> list[tuple[Rival, Path | None]]:
    """Return ours on the layers that others are compared on, with ``graphs`` both ways, then the available trainers."""
    layers = sorted({RIVALS[family][key].layers for key in checkouts}) or ["attention"]
    ways = (False, True) if graphs else (False,)
    here: list[tuple[Rival, Path | None]] = [(ours(one, graphs=way), ROOT) for one in layers for way in ways]
    return here + [(rival, checkouts.get(key)) for key, rival in RIVALS[family].items()]


def _write(path: Path, outcomes: Sequence[Outcome], card: str, settings: Settings) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path.with_suffix(".md"), table(outcomes, card, settings))
    report = {"date": str(datetime.now(UTC).date()), "card": card, "torch": torch.__version__, **vars(settings)}
    files.write_json(path.with_suffix(".json"), {**report, "outcomes": [vars(one) for one in outcomes]})
    sys.stdout.write(f"{vars(outcomes[-1])}\n")
    sys.stdout.flush()


def main(words: Sequence[str] | None = None) -> int:
    """Compare the available trainers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for key, rival in RIVALS["sdxl"].items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=Path, metavar="CHECKOUT", help=rival.name)
    parser.add_argument("--family", choices=tuple(RIVALS), default="sdxl")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--small", action="store_const", const=TINY, dest="settings", help="tiny models on the CPU")
    way.add_argument("--cpu", action="store_const", const=ON_CPU, dest="settings", help="whole models on the CPU")
    way.add_argument("--check", action="store_true", help="only ask their parsers what they make of it")
    options = parser.parse_args(words)
    checkouts = {key: path for key in RIVALS[options.family] if (path := getattr(options, key)) is not None}
    if options.check:
        return check_all(options.family, checkouts)
    settings = options.settings or replace(ON_CARD, resolution=SIDES[options.family])
    settings = replace(settings, family=options.family)
    outcomes = compare(checkouts, options.batch, options.minutes, options.results, settings)
    return 0 if any(one.pictures_per_second for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
