"""Who may import whom: the contracts in pyproject.toml, and what really lands in a fresh process."""

import ast
import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import numpy as np
import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS
from PIL import Image
from safetensors.numpy import save_file

from tests.support import ROOT

HEAVY = {"torch", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes"}


def fresh_python(*arguments: str) -> str:
    """What a new process prints; the test fails with its errors when it fails."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules(*rooms: str) -> list[str]:
    """The names of every module in these rooms of the trainer."""
    names = []
    for room in rooms:
        names.append(f"trainer.{room}")
        folder = ROOT / "trainer" / room
        names += [info.name for info in pkgutil.walk_packages([str(folder)], f"trainer.{room}.")]
    return names


def test_no_arrow_runs_up():
    # In a process of its own: it sets up logging anew, which silences all loggers that exist.
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == EXIT_STATUS_SUCCESS, done.stdout


@pytest.mark.parametrize(
    "names", [modules("errors", "protocol"), ["trainer.cli"]], ids=["errors and protocol", "help of the command line"]
)
def test_what_needs_the_standard_library_and_our_own_modules_only(names):
    # Isolated and without site-packages: what is not in the standard library cannot be found.
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {', '.join(names)}\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded - set(sys.stdlib_module_names) - {'trainer', '__main__'}))\n"
    )
    assert fresh_python("-I", "-S", "-c", code).strip() == "[]"


@pytest.mark.parametrize(
    "room",
    [
        "errors",
        "protocol",
        "config",
        "files",
        "gpu",
        "dataset",
        "memory.device.gpu_specs",
        "memory.device.roofline",
        "memory.device.calibration",
    ],
)
def test_rooms_that_the_app_reads_load_no_torch(room):
    code = f"import sys, {', '.join(modules(room))}; print(*{{name.split('.')[0] for name in sys.modules}})"
    assert not HEAVY & set(fresh_python("-c", code).split())


@pytest.fixture
def materials(tmp_path):
    """What the quick commands look at: a folder with a captioned picture, and a LoRA file."""
    Image.linear_gradient("L").convert("RGB").resize((640, 512)).save(tmp_path / "picture.png")
    (tmp_path / "picture.txt").write_text("a slope", encoding="utf-8")
    layer = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    weights = {"lora_down.weight": np.ones((4, 320)), "lora_up.weight": np.ones((320, 4)), "alpha": np.array(4.0)}
    save_file(
        {f"{layer}.{name}": value.astype(np.float16) for name, value in weights.items()}, tmp_path / "lora.safetensors"
    )
    return tmp_path


QUICK = [["--help"], ["check", "."], ["inspect", "lora.safetensors"], ["runs"], ["presets", "list"]]


@pytest.mark.parametrize("words", QUICK)
def test_quick_commands_load_no_torch(words, materials):
    command = [sys.executable, "-X", "importtime", "-m", "trainer", *words]
    done = subprocess.run(command, cwd=materials, capture_output=True, encoding="utf-8", check=False)
    lines = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert done.returncode == 0, [line for line in lines if not line.startswith("import time:")]
    assert "trainer.cli" in imported  # the list is what it should be
    assert not HEAVY & imported


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split("[<>=]", line)[0].lower() for line in project["dependencies"]}
    files = [file for room in ("trainer", "app") for file in (ROOT / room).rglob("*.py")]
    names: set[str] = set()
    for file in files:  # one tree at a time: all of them at once are millions of objects for Python to look through
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
    packages = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"trainer", "app"}
    owners = packages_distributions()
    imported = {re.sub("[-_.]+", "-", owners.get(package, [package])[0].lower()) for package in packages}
    # pydantic-core and shiboken6 are halves of pydantic and PySide6, in one version with them;
    # accelerate is there for peft and diffusers.
    assert imported - {"pydantic-core", "shiboken6"} == declared - {"accelerate"}
