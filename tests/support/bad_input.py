"""Over a hundred kinds of bad input: the command line that triggers each, and the message expected of it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.jobs import write_job
from tests.support.raw import write_shapes
from tests.support.tiny import tiny_base
from trainer.protocol.run_directory import RunDirectory

UNET = "model.diffusion_model."
SMALL = ("--width", "64", "--height", "64", "--steps", "1")


class Place:
    """A user's folder with a base, images and a job, into which bad input is put."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder = folder
        self.shared = shared
        self.base = folder / "base.safetensors"
        self.pictures = folder / "pictures ü"
        # A hard link costs nothing; files that a test changes are replaced by new ones.
        self.base.hardlink_to(shared / "base.safetensors")
        shutil.copytree(shared / "pictures", self.pictures)

    def train(self, *settings: str, base: object = None, extra: str = "") -> list[str]:
        """Return the arguments that train the job, with another base and overrides if given."""
        job = write_job(self.folder / "job", Path(str(base or self.base)), self.pictures, extra=extra)
        return ["train", str(job), *(word for setting in settings for word in ("--set", setting))]

    def train_text(self, change: Callable[[str], str]) -> list[str]:
        """Return the arguments that train the job with its text changed."""
        words = self.train()
        job = Path(words[1])
        job.write_text(change(job.read_text(encoding="utf-8")), encoding="utf-8")
        return words

    def train_bytes(self, data: bytes) -> list[str]:
        """Return the arguments that train a job file of these bytes."""
        words = self.train()
        Path(words[1]).write_bytes(data)
        return words

    def train_on(self, data: bytes, name: str = "model.safetensors") -> list[str]:
        """Return the arguments that train on a base file of these bytes."""
        (self.folder / name).write_bytes(data)
        return self.train(base=self.folder / name)

    def train_shapes(self, shapes: dict[str, tuple[int, ...]], name: str = "model.safetensors") -> list[str]:
        """Return the arguments that train on a base file with tensors of these shapes."""
        return self.train(base=write_shapes(self.folder / name, shapes))

    def continue_from(self, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> list[str]:
        """Return the arguments that continue from a real LoRA whose tensors were changed."""
        return self.train(f"base.continue_from={self.lora(change)}")

    def lora(self, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict) -> Path:
        """Write a LoRA file made from a real one."""
        made = self.folder / "lora.safetensors"
        save_file(change(load_file(self.shared / "runs" / "made" / "output" / "made.safetensors")), made)
        return made

    def render(self, *words: str, base: object = None) -> list[str]:
        """Return the arguments that render an image."""
        drawn = self.folder / "drawn"
        return ["render", "--base", str(base or self.base), "--prompt", "a cat", *SMALL, "--out", str(drawn), *words]

    def run(self) -> RunDirectory:
        """Copy a finished run of two steps, with the shared base and the images of this place."""
        copy = self.folder / "runs" / "made"
        shutil.copytree(self.shared / "runs" / "made", copy)
        listing = copy / "dataset.jsonl"
        hashed = hashlib.sha256(listing.read_bytes()).hexdigest()
        for file in (copy / "job.toml", listing, copy / "run.json"):
            text = file.read_text(encoding="utf-8").replace(hashed, hashlib.sha256(listing.read_bytes()).hexdigest())
            for own, theirs in ((self.base, "base.safetensors"), (self.pictures, "pictures")):
                old, new = (json.dumps(str(path), ensure_ascii=False)[1:-1] for path in (self.shared / theirs, own))
                text = text.replace(old, new)
            file.write_text(text, encoding="utf-8", newline="\n")
        return RunDirectory.open(copy)

    def resume(self, change: Callable[[RunDirectory], object] = lambda run: None) -> list[str]:
        """Return the arguments that extend a run after something in it was changed."""
        run = self.run()
        change(run)
        return ["resume", str(run.path), "--steps", "3"]


Arrange = Callable[[Place], list[str]]

JOB_FILES: dict[str, tuple[str, Arrange]] = {
    "job missing": ("file not found", lambda place: ["train", str(place.folder / "jop.toml")]),
    "job is a folder": ("it is a folder", lambda place: ["train", str(Path(place.train()[1]).parent)]),
    "job is an image": ("not UTF-8 text", lambda place: ["train", str(place.pictures / "astronaut.png")]),
    "job is a model": ("larger than 1 MiB", lambda place: ["train", str(place.base)]),
    "job in UTF-16": ("saved as UTF-16", lambda place: place.train_bytes("schema = 1".encode("utf-16"))),
    "job in Latin-1": (
        "line 1 contains an invalid byte",
        lambda place: place.train_bytes('name = "Größe"'.encode("latin-1")),
    ),
    "job empty": ("base: ", lambda place: place.train_bytes(b"")),
    "TOML without closing quote": ("not valid TOML", lambda place: place.train_bytes(b'name = "a\n')),
    "TOML key twice": ("line 2", lambda place: place.train_bytes(b"schema = 1\nschema = 1\n")),
    "Windows path in double quotes": ("path", lambda place: place.train_bytes(b'[base]\nmodel = "C:\\new\\m.ckpt"')),
    "schema of the future": ("99", lambda place: place.train_text(lambda job: job.replace("schema = 3", "schema=99"))),
    "unknown key": (
        "did you mean .*rank",
        lambda place: place.train_text(lambda job: job.replace("rank = 4", "rnak = 4")),
    ),
    "unknown table": (
        "did you mean .*recipe",
        lambda place: place.train_text(lambda job: job.replace("[recipe]", "[recipes]")),
    ),
    "unknown key by --set": ("did you mean .*rank", lambda place: place.train("recipe.rnak=4")),
    "--set without value": ("recipe.rank", lambda place: place.train("recipe.rank")),
    "text for a number": ("recipe.rank", lambda place: place.train("recipe.rank=many")),
    "number out of range": ("recipe.rank", lambda place: place.train("recipe.rank=0")),
    "not a number": ("recipe.learning_rate", lambda place: place.train("recipe.learning_rate=nan")),
    "two lengths": (
        "set only one length",
        lambda place: place.train_text(lambda job: job.replace("steps = 6", "steps = 6\nepochs = 3")),
    ),
    "nothing trained": ("nothing would be trained", lambda place: place.train("recipe.learning_rate=0.0")),
    "block that is not there": (
        "matches no layer of this base",
        lambda place: place.train('recipe.blocks=[{match = "unet.input_blocks.40.*", rank = 4}]'),
    ),
    "unknown optimizer": ("adamw", lambda place: place.train("recipe.optimizer.name=adamv")),
    "two rates under Prodigy": (
        "Prodigy finds one rate",
        lambda place: place.train("recipe.optimizer.name=prodigy", "recipe.text_encoder.learning_rate=0.1"),
    ),
    "preview of a size that cannot be": (
        "width",
        lambda place: place.train('report.previews.prompts=[{prompt="a", width=65}]'),
    ),
    "resolution that cannot be": ("recipe.resolution", lambda place: place.train("recipe.resolution=1001")),
    "folder named twice": (
        "same folder",
        lambda place: place.train(extra=f"[[dataset.folders]]\npath = '{place.pictures}'\n"),
    ),
    "unknown device": ("fit.device", lambda place: place.train("fit.device=gpu")),
    "missing GPU": ("PyTorch does not find this GPU", lambda place: place.train("fit.device=cuda:99")),
}


def base_shapes(width: int = 768, channels: int = 4) -> dict[str, tuple[int, ...]]:
    """Return the tensors that identify an SD 1.5, with the text width and input channels of another model."""
    blocks = [f"input_blocks.{i}" for i in (1, 2, 4, 5, 7, 8)] + ["middle_block"]
    blocks += [f"output_blocks.{i}" for i in range(3, 12)]
    attention = {f"{UNET}{block}.1.transformer_blocks.0.attn2.to_k.weight": (1, width) for block in blocks}
    return attention | {
        f"{UNET}input_blocks.0.0.weight": (1, channels, 1, 1),
        "first_stage_model.encoder.conv_in.weight": (1,),
        "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight": (1, 1),
    }


def hostile_header(place: Place) -> list[str]:
    return place.train_on((1 << 60).to_bytes(8, "little") + b"{" + bytes(600))


def base_with_flow_matching(place: Place) -> Path:
    """Write an SD 1.5 folder with the scheduler config of a flow matching trainer."""
    folder = tiny_base("sd15", place.folder, form="folder")
    config = {"_class_name": "FlowMatchHeunDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def base_of_nan(place: Place) -> Path:
    """Write a base whose last layer is damaged: one of its weights is NaN."""
    with safe_open(place.base, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(place.base)
    tensors[f"{UNET}out.2.bias"][:] = float("nan")
    damaged = place.folder / "nan.safetensors"
    save_file(tensors, damaged, metadata)
    return damaged


def base_as_v_by_name(place: Place) -> list[str]:
    return place.train_shapes(base_shapes(), "noobai-vpred.safetensors")


def folder_with_a_broken_config(place: Place) -> list[str]:
    folder = tiny_base("sd15", place.folder, form="folder")
    (folder / "unet" / "config.json").write_text("{", encoding="utf-8")
    return place.train(base=folder)


def folder_with_a_truncated_part(place: Place) -> list[str]:
    folder = tiny_base("sd15", place.folder, form="folder")
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return place.train(base=folder)


def base_with_other_tensors_than_its_configs(place: Place) -> list[str]:
    folder = tiny_base("sd15", place.folder, form="folder")
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["conv_in.weight"] = tensors["conv_in.weight"][:16].clone()
    save_file(tensors, weights)
    return place.train(base=folder)


BASES: dict[str, tuple[str, Arrange]] = {
    "base missing": (
        "does not exist(.|\n)*Did you mean",
        lambda place: place.train(base=place.folder / "base.safetensor"),
    ),
    "base is a .ckpt": ("is a pickle", lambda place: place.train_on(b"\x80\x02}q\x00", "model.ckpt")),
    "pickle under a false name": ("pickle", lambda place: place.train_on(b"PK\x03\x04" + bytes(600))),
    "base is a web page": ("web page", lambda place: place.train_on(b"<!DOCTYPE html><html>log in</html>")),
    "base is a Git LFS pointer": (
        "git lfs pull",
        lambda place: place.train_on(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    ),
    "base empty": ("is empty", lambda place: place.train_on(b"")),
    "base cut off": ("is cut off", lambda place: place.train_on(place.base.read_bytes()[:-1000])),
    "base of random bytes": ("not a safetensors file", lambda place: place.train_on(b"\xff" * 5000)),
    "base with a hostile header": ("claims a header", hostile_header),
    "LoRA as base": ("a LoRA, not a base", lambda place: place.train(base=place.lora())),
    "inpainting base": ("an inpainting model", lambda place: place.train_shapes(base_shapes(channels=9))),
    "SD 2 base": ("an SD 2 model", lambda place: place.train_shapes(base_shapes(width=1024))),
    "SD 3 base": ("an SD 3 model", lambda place: place.train_shapes({f"{UNET}joint_blocks.0.x_block.a": (1,)})),
    "Flux base": ("a Flux model", lambda place: place.train_shapes({f"{UNET}double_blocks.0.img_attn.a": (1,)})),
    "VAE as base": ("only a VAE", lambda place: place.train_shapes({"encoder.conv_in.weight": (1,)})),
    "base without VAE": (
        "has no VAE",
        lambda place: place.train_shapes(
            {name: shape for name, shape in base_shapes().items() if not name.startswith("first_stage_model")}
        ),
    ),
    "wrong family": (r'"sdxl" \(SDXL\)', lambda place: place.train("base.family=sdxl")),
    "flow matching base": ("flow matching", lambda place: place.train(base=base_with_flow_matching(place))),
    "undecided prediction": ("Could not determine how", base_as_v_by_name),
    "folder without model_index": ("no model_index.json", lambda place: place.train(base=place.pictures)),
    "folder with a broken config": ("is not valid JSON", folder_with_a_broken_config),
    "folder with a truncated part": ("is cut off", folder_with_a_truncated_part),
    "tensors that the configs do not describe": ("conv_in", base_with_other_tensors_than_its_configs),
    "Hub base that is not here, offline": ("owner/name", lambda place: place.train("base.model=owner/name")),
    "link that can be changed on the way": (
        "https://",
        lambda place: place.train("base.model=http://example.org/model.safetensors"),
    ),
    "VAE missing": ("does not exist", lambda place: place.train(f"base.vae={place.folder / 'vae.safetensors'}")),
    "VAE that is not a VAE": ("is not a VAE", lambda place: place.train(f"base.vae={place.lora()}")),
}


def only(place: Place, files: dict[str, bytes]) -> list[str]:
    """Return the arguments that train on a folder with only these files."""
    shutil.rmtree(place.pictures)
    place.pictures.mkdir()
    for name, data in files.items():
        (place.pictures / name).write_bytes(data)
    return place.train()


def beside(place: Place, name: str, text: str) -> list[str]:
    """Return the arguments that train with one more file in the image folder."""
    (place.pictures / name).write_text(text, encoding="utf-8")
    return place.train()


def pictures_in_a_file(place: Place) -> list[str]:
    shutil.rmtree(place.pictures)
    place.pictures.write_text("x", encoding="utf-8")
    return place.train()


def everything_excluded(place: Place) -> list[str]:
    names = [path.name for path in place.pictures.iterdir() if path.suffix != ".txt"]
    lines = [{"impasto": 1}, *({"file": name, "excluded": True} for name in names)]
    return beside(place, "impasto.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def pictures_one_folder_too_high(place: Place) -> list[str]:
    shutil.move(place.pictures, place.folder / "deeper")
    place.pictures.mkdir()
    shutil.move(place.folder / "deeper", place.pictures / "deeper")
    return place.train()


def masks_without_pictures(place: Place) -> list[str]:
    return only(place, {"a-masklabel.png": (place.pictures / "astronaut.png").read_bytes()})


def kohya(place: Place, text: str) -> list[str]:
    """Return the arguments that check kohya's dataset file."""
    file = place.folder / "kohya.toml"
    file.write_text(text, encoding="utf-8")
    return ["check", str(file)]


def concepts(place: Place, text: str) -> list[str]:
    """Return the arguments that check OneTrainer's concepts."""
    file = place.folder / "concepts.json"
    file.write_text(text, encoding="utf-8")
    return ["check", str(file)]


DATASETS: dict[str, tuple[str, Arrange]] = {
    "folder missing": (
        "does not exist",
        lambda place: place.train(f"dataset.folders=[{{path='{place.folder / 'pictures'}'}}]"),
    ),
    "folder empty": ("has no images", lambda place: only(place, {})),
    "folder is a file": ("is a file", pictures_in_a_file),
    "images one folder deeper": ("recursive = true", pictures_one_folder_too_high),
    "only unreadable images": (
        "no usable training images",
        lambda place: only(place, {"a.png": b"\x89PNG\r\n\x1a\nxx", "b.jpg": b"", "c.webp": b"<html>"}),
    ),
    "only masks": ("has no images", masks_without_pictures),
    "everything excluded": ("no usable training images", everything_excluded),
    "damaged impasto.jsonl": ("Could not read", lambda place: beside(place, "impasto.jsonl", '{"impasto": 1}\n{"fi')),
    "impasto.jsonl with an impossible crop": (
        "this folder: line 1",
        lambda place: beside(place, "impasto.jsonl", '{"file": "astronaut.png", "crop": [0.9, 0, 0.1, 1]}'),
    ),
    "check of a folder that is missing": ("does not exist", lambda place: ["check", str(place.folder / "pictures")]),
    "check of a model": ("is not a folder", lambda place: ["check", str(place.base)]),
    "check at an impossible resolution": (
        "resolution",
        lambda place: ["check", str(place.pictures), "--resolution", "7"],
    ),
    "kohya file that is not TOML": ("kohya.toml", lambda place: kohya(place, "[[datasets]\n")),
    "kohya file of another kind of value": (
        "kohya.toml",
        lambda place: kohya(place, "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 7\n"),
    ),
    "OneTrainer file that is not JSON": (
        "concepts.json",
        lambda place: concepts(place, "[{"),
    ),
}


def relabelled(pattern: str, replacement: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {re.sub(pattern, replacement, key): tensor for key, tensor in tensors.items()}


def with_nan(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors[next(key for key in tensors if "lora_up" in key)][0, 0] = float("nan")
    return tensors


def of_rank_two(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    cut = {key: tensor[:2] for key, tensor in tensors.items() if "lora_down" in key}
    cut |= {key: tensor[:, :2] for key, tensor in tensors.items() if "lora_up" in key}
    return tensors | {key: tensor.clone() for key, tensor in cut.items()}


def of_sdxl(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        key: torch.zeros(tensor.shape[0], 2048) if key.endswith("attn2_to_k.lora_down.weight") else tensor
        for key, tensor in tensors.items()
    }


def with_a_text_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    layer = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
    return tensors | {f"{layer}.lora_down.weight": torch.ones(4, 32), f"{layer}.lora_up.weight": torch.ones(32, 4)}


def as_dora(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {next(iter(tensors)).partition(".")[0] + ".dora_scale": torch.ones(4)}


def halved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if "lora_up" not in key}


LORAS: dict[str, tuple[str, Arrange]] = {
    "LoRA missing": ("does not exist", lambda place: place.train(f"base.continue_from={place.folder / 'x'}")),
    "base as LoRA": ("contains no LoRA layer", lambda place: place.train(f"base.continue_from={place.base}")),
    "LoRA of another family": ("was made for SDXL", lambda place: place.continue_from(of_sdxl)),
    "LoRA of another base": ("match no layer", lambda place: place.continue_from(relabelled("_attn1_", "_attn9_"))),
    "LoRA of another rank": (r"recipe.rank = 2", lambda place: place.continue_from(of_rank_two)),
    "LoRA with more layers": (
        "recipe.text_encoder.learning_rate above 0",
        lambda place: place.continue_from(with_a_text_layer),
    ),
    "LoRA with NaN": ("NaN", lambda place: place.continue_from(with_nan)),
    "LoRA with halves": ("half of a layer", lambda place: place.continue_from(halved)),
    "DoRA": ("DoRA", lambda place: place.continue_from(as_dora)),
}


def blocked(place: Place, *below: str) -> Path:
    """Return a path that is occupied by a file, or goes through one."""
    (place.folder / "file").write_text("x", encoding="utf-8")
    return place.folder.joinpath("file", *below)


PLACES: dict[str, tuple[str, Arrange]] = {
    "runs into a file": (
        "Could not create the run's folder",
        lambda place: place.train(f"output.runs={blocked(place)}"),
    ),
    "runs below a file": (
        "Could not create the run's folder",
        lambda place: place.train(f"output.runs={blocked(place, 'a', 'b')}"),
    ),
    "rendering into a file": (
        "write images to .*file is a file",
        lambda place: place.render("--out", str(blocked(place))),
    ),
    "new on an existing job": (
        "already exists",
        lambda place: new(place, "job") if place.train() else [],
    ),
    "new below a file": ("file", lambda place: new(place, "file") if blocked(place) else []),
    "new without images": ("does not exist", lambda place: new(place, "a", pictures=place.folder / "pictures")),
    "new on a missing base": ("does not exist", lambda place: new(place, "a", base="nothing.safetensors")),
}


def new(place: Place, name: str, base: str | None = None, pictures: Path | None = None) -> list[str]:
    return ["new", "--base", base or str(place.base), "--images", str(pictures or place.pictures), name]


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


RUNS: dict[str, tuple[str, Arrange]] = {
    "unknown run": ('no run called "stile"', lambda place: ["resume", "stile"]),
    "folder that is not a run": ("no run called|not a run", lambda place: ["resume", str(place.pictures)]),
    "stop of a run that is not running": ("is not running", lambda place: ["stop", str(place.run().path)]),
    "watch of an unknown run": ("no run called", lambda place: ["watch", "stile"]),
    "run.json damaged": (
        "history in .*run.json",
        lambda place: place.resume(lambda run: run.run.write_text("{", encoding="utf-8")),
    ),
    "run's job gone": ("Could not read the job file", lambda place: place.resume(lambda run: run.job.unlink())),
    "run's job changed": (
        "alpha",
        lambda place: place.resume(lambda run: replace(run.job, "alpha = 2.0", "alpha = 4.0")),
    ),
    "run's dataset list gone": ("dataset.jsonl", lambda place: place.resume(lambda run: run.listing.unlink())),
    "run's dataset list damaged": (
        "dataset.jsonl",
        lambda place: place.resume(lambda run: run.listing.write_text('{"id":', encoding="utf-8")),
    ),
    "run's base gone": ("does not exist", lambda place: place.resume(lambda run: place.base.unlink())),
    "run's base changed": ("base has changed", lambda place: place.resume(lambda run: other_base(place))),
    "run's images changed and not cached": (
        "chelsea.jpg",
        lambda place: place.resume(lambda run: shutil.copy(place.pictures / "astronaut.png", chelsea(place))),
    ),
    "run's images gone and not cached": (
        "chelsea.jpg",
        lambda place: place.resume(lambda run: chelsea(place).unlink()),
    ),
}


def chelsea(place: Place) -> Path:
    return place.pictures / "chelsea.jpg"


def other_base(place: Place) -> None:
    place.base.unlink()
    tiny_base("sd15", place.folder, form="single", seed=1).rename(place.base)


PICTURES: dict[str, tuple[str, Arrange]] = {
    "render with a LoRA that is missing": ("does not exist", lambda place: place.render("--lora", "no.safetensors")),
    "render with a base as LoRA": ("is not a LoRA", lambda place: place.render("--lora", str(place.base))),
    "render with a LoRA of another family": (
        "was made for SDXL",
        lambda place: place.render("--lora", f"{place.lora(of_sdxl)}:0.5"),
    ),
    "render with a strength that is not a number": (
        'strength of .*"much"',
        lambda place: place.render("--lora", f"{place.lora()}:much"),
    ),
    "render with a strength of nan": ("strength", lambda place: place.render("--lora", f"{place.lora()}:nan")),
    "render of an impossible size": ("width", lambda place: place.render("--width", "65")),
    "render with an unknown sampler": ("sampler", lambda place: place.render("--sampler", "eular")),
    "render without a base": ("does not exist", lambda place: place.render(base="no.safetensors")),
    "render on a missing GPU": ("PyTorch does not find this GPU", lambda place: place.render("--device", "cuda:99")),
    "inspect an image": ("not a safetensors", lambda place: ["inspect", str(place.pictures / "astronaut.png")]),
    "inspect a missing file": ("does not exist", lambda place: ["inspect", "no.safetensors"]),
    "inspect a folder": ("no model_index.json", lambda place: ["inspect", str(place.pictures)]),
}

KINDS = {**JOB_FILES, **BASES, **DATASETS, **LORAS, **PLACES, **RUNS, **PICTURES}
