"""Whatever a file or an option holds, no word of Python or of a library reaches the user."""

import json
import math
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from trainer import cli
from trainer.config.load import parse_job
from trainer.config.presets.exchange import parse_preset
from trainer.config.toml_file import toml_value
from trainer.dataset.caption_files import read_metadata
from trainer.dataset.dataset import read_listing
from trainer.dataset.sidecar import read_sidecar
from trainer.errors import ImpastoError, JobError, plain_reason
from trainer.files.header import read_header
from trainer.files.identify import identify_base, identify_lora
from trainer.importers.ai_toolkit.files import read_job_file
from trainer.importers.onetrainer.concepts import import_concepts
from trainer.importers.onetrainer.files import read_config
from trainer.importers.sd_scripts.dataset import import_dataset
from trainer.importers.translation import ImportedJob
from trainer.protocol.queue import Queue

JARGON = re.compile(
    r"Value error|Input should|validation error|pydantic|unsupported operand|object (has|is|of)|NoneType|Traceback"
    r"|invalid literal|could not convert|indices must|not iterable|unhashable|to unpack|Expecting |Extra data"
    r"|<class|Error\(|\bargument\b|Errno|type=|\bint\b|\bstr\b|\bdict\b|\bNone\b|\bTrue\b|\bFalse\b"
)
ODD: list[Any] = [3, -1, 2.5, math.inf, 10**30, "x", "", "a\x00b", True, [], [3], ["x"], {}, {"x": 1}, None]
LAYER = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"

JOB = {"schema": 3, "name": "a", "base": {"model": "own/er", "vae": "v"},
       "fit": {"dtype": "bf16", "gradient_checkpointing": []},
       "dataset": {"folders": [{"path": "p", "repeats": 2, "trigger": "t"}], "validation_share": 0.1},
       "recipe": {"rank": 4, "optimizer": {"name": "adamw", "beta1": 0.9}, "schedule": {"kind": "linear"}},
       "report": {"previews": {"prompts": [{"prompt": "p", "sampler": "euler"}]}}, "output": {"runs": "r"}}  # fmt: skip
PRESET = {"schema": 2, "name": "a", "base": {"family": "sdxl"}, "recipe": {"rank": 4}, "trigger_words": ["a"],
          "examples": [{"prompt": "a"}], "preview": {"image": "AAAA"}}  # fmt: skip
KOHYA = {"general": {"shuffle_caption": True},
         "datasets": [{"resolution": [512, 512], "batch_size": 2, "subsets": [{
             "image_dir": "p", "num_repeats": 2, "class_tokens": "cat", "metadata_file": "m.json", "keep_tokens": 1,
             "caption_dropout_rate": 0.1, "caption_prefix": "a", "validation_split": 0.1}]}]}  # fmt: skip
CONCEPTS = [{"name": "n", "path": "p", "type": "STANDARD", "balancing": 2, "balancing_strategy": "REPEATS",
             "loss_weight": 1.0, "image": {"enable_crop_jitter": True},
             "text": {"prompt_source": "concept", "prompt_path": "x.txt", "enable_tag_shuffling": True,
                      "keep_tags_count": 1, "tag_delimiter": ","}}]  # fmt: skip
ONETRAINER = {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_15", "base_model_name": "own/er", "epochs": 10,
              "batch_size": 2, "resolution": "512,768", "concepts": CONCEPTS, "learning_rate": 1e-4, "lora_alpha": 8.0,
              "learning_rate_scheduler": "COSINE", "loss_scaler": "BATCH", "layer_filter": "attentions,ff",
              "ema": "GPU", "ema_decay": 0.99, "min_noising_strength": 0.1, "huber_strength": 0.5,
              "optimizer": {"optimizer": "PRODIGY", "beta1": 0.9, "growth_rate": "inf"}, "clip_grad_norm": 1.0,
              "masked_training": True,
              "text_encoder": {"train": True, "stop_training_after": 3, "stop_training_after_unit": "EPOCH"},
              "output_model_destination": "a/cat.safetensors", "save_every": 2, "save_every_unit": "STEP",
              "samples": [{"prompt": "a", "width": 512, "seed": 1, "cfg_scale": 7.0}]}  # fmt: skip
AI_TOOLKIT = {"job": "extension", "config": {"name": "a", "process": [{
    "type": "sd_trainer", "trigger_word": "t", "training_seed": 3, "device": "cuda:0",
    "network": {"type": "lora", "linear": 16, "linear_alpha": 8, "conv": 4, "conv_alpha": 2,
                "network_kwargs": {"only_if_contains": ["attn2"]}},
    "save": {"save_every": 10, "dtype": "float16", "max_step_saves_to_keep": 4},
    "datasets": [{"folder_path": "p", "caption_ext": "txt", "resolution": [512, 768], "num_repeats": 2, "flip_x": True,
                  "caption_dropout_rate": 0.1, "mask_path": "m", "mask_min_value": 0.1, "default_caption": "a cat"}],
    "train": {"steps": 100, "batch_size": 1, "gradient_accumulation_steps": 2, "lr": 1e-4, "optimizer": "prodigy",
              "optimizer_params": {"weight_decay": 0.1, "betas": [0.9, 0.99]}, "lr_scheduler": "cosine",
              "lr_scheduler_params": {"eta_min": 1e-5}, "ema_config": {"use_ema": True, "ema_decay": 0.99},
              "content_or_style": "style", "min_denoising_steps": 0, "noise_offset": 0.1},
    "model": {"name_or_path": "own/er", "arch": "sdxl", "quantize": True},
    "sample": {"prompts": ["[trigger] a --w 512"], "seed": 1, "walk_seed": True, "neg": "b", "guidance_scale": 4},
}]}}  # fmt: skip
METADATA = {"a.png": {"caption": "a cat", "tags": "cat"}}
NOTES = {"file": "a.png", "excluded": True, "rating": 3, "crop": [0.1, 0.1, 0.9, 0.9]}
FOLDER = {"impasto": 1, "repeats": 3, "trigger": "t", "regularization": False}
HEADER = {
    "__metadata__": {"a": "b"},
    f"{LAYER}.lora_down.weight": {"dtype": "F16", "shape": [1, 1], "data_offsets": [0, 2]},
}
UNET = {"_class_name": "UNet2DConditionModel", "in_channels": 4, "cross_attention_dim": 768, "sample_size": 64,
        "block_out_channels": [320, 640, 1280, 1280], "down_block_types": ["A"], "attention_head_dim": 8}  # fmt: skip
ENTRY = {"version": 1, "state": "waiting", "job": "/a", "run": None, "lane": None, "after": None, "added": 1.0,
         "problem": "", "steps": None, "hold": False, "wish": None, "pid": None, "attempts": 0}  # fmt: skip
LISTED = {"id": "0", "path": "a", "captions": ["a"], "crop": None, "mask_path": None, "width": 1, "height": 1}


def variants(value: Any) -> Iterator[Any]:
    """Yield the value with each part of it, and all of it, replaced by each odd value, and each key left out."""
    yield from ODD
    items = (
        list(value.items() if isinstance(value, dict) else enumerate(value)) if isinstance(value, dict | list) else []
    )
    for key, inner in items:
        for other in variants(inner):
            changed = deepcopy(value)
            changed[key] = other
            yield changed
        without = deepcopy(value)
        del without[key]
        yield without


def toml(value: Any) -> str:
    """Write a table as TOML, tables within it in braces; what TOML does not have becomes an empty text."""

    def inline(inner: Any) -> str:
        if isinstance(inner, dict):
            return "{" + ", ".join(f"{json.dumps(key)} = {inline(one)}" for key, one in inner.items()) + "}"
        if isinstance(inner, list):
            return "[" + ", ".join(map(inline, inner)) + "]"
        return '""' if inner is None else toml_value(inner)

    return "".join(f"{key} = {inline(inner)}\n" for key, inner in value.items()) if isinstance(value, dict) else "a = 1"


def put(name: str, text: str | bytes) -> Path:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return path


def safetensors(value: Any) -> Path:
    text = json.dumps(value).encode()
    return put("a.safetensors", len(text).to_bytes(8, "little") + text + bytes(2))


def base_folder(value: Any) -> Path:
    put("base/model_index.json", json.dumps({"_class_name": "StableDiffusionPipeline"}))
    Path("base/unet").mkdir(exist_ok=True)
    put("base/unet/config.json", json.dumps(value))
    return Path("base")


def metadata_of_kohya(value: Any) -> object:
    put("m.json", json.dumps(value))
    return import_dataset(put("k.toml", toml(KOHYA)))


def report_of(imported: ImportedJob) -> list[str]:
    imported.job("a")
    return [setting.note for setting in imported.found.settings]


def entries(value: Any) -> list[str]:
    queue = Queue()
    queue._file("a").parent.mkdir(parents=True, exist_ok=True)
    queue._file("0123abcd").write_text(json.dumps(value), encoding="utf-8")
    return [fault.sentence for fault in queue.read().faults]


READERS: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "job": (JOB, lambda value: parse_job(toml(value), "job.toml", Path())),
    "preset": (PRESET, lambda value: parse_preset(toml(value), "a.toml")),
    "kohya": (KOHYA, lambda value: import_dataset(put("k.toml", toml(value))).notes),
    "kohya's metadata": (METADATA, metadata_of_kohya),
    "concepts": (CONCEPTS, lambda value: import_concepts(put("c.json", json.dumps(value))).notes),
    "onetrainer": (
        ONETRAINER,
        lambda value: report_of(read_config(put("o.json", json.dumps(value)))),
    ),
    "ai-toolkit": (AI_TOOLKIT, lambda value: report_of(read_job_file(put("a.json", json.dumps(value))))),
    "notes": (NOTES, lambda value: read_sidecar(put("s/impasto.jsonl", f"{{}}\n{json.dumps(value)}\n").parent)),
    "folder's notes": (FOLDER, lambda value: read_sidecar(put("s/impasto.jsonl", json.dumps(value)).parent)),
    "metadata": ({"file_name": "a", "text": "b"}, lambda value: read_metadata(put("m.jsonl", json.dumps(value)))[1]),
    "header": (HEADER, lambda value: read_header(safetensors(value))),
    "lora": (HEADER, lambda value: identify_lora(safetensors(value))),
    "configs": (UNET, lambda value: identify_base(base_folder(value))),
    "queue": (ENTRY, entries),
    "listing": (LISTED, lambda value: read_listing(put("l.jsonl", json.dumps(value)))),
}


@pytest.mark.parametrize("name", READERS)
def test_no_reader_lets_a_word_of_python_through(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").mkdir()
    good, read = READERS[name]
    said = set()
    for value in variants(good):
        try:
            found = read(value)
        except ImpastoError as error:
            said |= {error.sentence, error.remedy}
        else:
            said |= set(found) if isinstance(found, list) else set()
    assert len(said) >= 3
    assert sorted({text for text in said if JARGON.search(text)}) == []


@pytest.mark.parametrize(
    "words",
    [
        ["check", "p", "--resolution", "1001"],
        ["render", "--base", "a/b", "--prompt", "a", "--width", "7", "--guidance", "nan", "--seed", "-1"],
        ["render", "--base", "http://x", "--prompt", "a"],
        ["plan", "--family", "sdxl", "--gpu", "none"],
        ["train", "job.toml", "--set", "recipe=3", "--set", "recipe.rank.x=3", "--set", "dataset.folders.9=1"],
        ["queue", "after", "a", "25:99"],
        ["resume", "a", "--steps", "x"],
    ],
)
def test_no_option_lets_a_word_of_python_through(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").mkdir()
    (tmp_path / "job.toml").write_text(toml(JOB), encoding="utf-8")
    try:
        code = cli.main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    text = capsys.readouterr().err
    assert not JARGON.search(text.replace("argument ", "").replace("arguments ", "")), text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("path"), '"path" is missing'),
        (TypeError("unsupported operand type(s) for /: 'PosixPath' and 'int'"), "a value has the wrong type"),
        (AttributeError("'list' object has no attribute 'get'"), "a value has the wrong type"),
        (IndexError("list index out of range"), "a value has the wrong type"),
        (ValueError("not enough values to unpack (expected 2, got 0)"), "a value has the wrong type"),
        (ValueError("its metadata is not a table of strings"), "its metadata is not a table of strings"),
        (RecursionError("maximum recursion depth exceeded"), "it is nested too deeply"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "it is not UTF-8 text"),
        (FileNotFoundError(2, "No such file or directory", "/a"), "No such file or directory"),
    ],
)
def test_a_reason_is_a_part_of_a_sentence(error, reason):
    assert plain_reason(error) == reason


def test_json_that_is_broken_is_placed():
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads('{\n"a": }')
    assert plain_reason(caught.value) == "it is not valid JSON at line 2, column 6"


def test_an_unforeseen_error_of_pydantic_is_worded_too(monkeypatch, capsys):
    from trainer.config.recipe import RecipeConfig

    monkeypatch.setattr("trainer.cli.runs.run_prune", lambda _: RecipeConfig(rank="four"))
    assert cli.main(["prune"]) == 1
    assert "went wrong: rank: must be a whole number." in capsys.readouterr().err
    assert isinstance(JobError("a", "b", "c"), ImpastoError)
