"""The doctor command, which checks whether this PC can train and says what to do if not."""

from __future__ import annotations

import argparse
import platform
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainer.cli import words
from trainer.cli.common import Commands, add_command, echo, echo_json
from trainer.errors import EXIT_DONE, EXIT_FAULT, ImpastoError
from trainer.host import LIBRARIES, version_of
from trainer.protocol import places
from trainer.protocol.reading import parse_json

if TYPE_CHECKING:
    from trainer.gpu import Gpu, GpuProcess
    from trainer.host import MainMemory


GIB = 1 << 30
# Peak main memory of a training process, reached while it reads SDXL: two thirds of the 16-bit weights plus PyTorch.
HOST_BYTES = 6 * GIB
# First NVIDIA Windows driver that spills to main memory when a GPU is full, and the first that can be set not to:
# https://nvidia.custhelp.com/app/answers/detail/a_id/5490
SPILLS_FROM = (536, 40)
SWITCH_FROM = (546, 1)
HOT_CELSIUS = 85
BUSY_PERCENT = 50
_REBUILD = "Run `python run.py rebuild`, or reinstall Impasto in your own environment."
_ENOUGH_BYTES = 10 << 30
_SELF_TEST_SECONDS = 300
# Runs in its own process, because a broken torch may crash the process that imports it.
_SELF_TEST = """
import gc, json, re, warnings
gc.disable()  # imports create no garbage, and collections slow them down
warnings.simplefilter("ignore")
import torch
found = {"torch": torch.__version__, "gpus": [], "full": []}
devices = [torch.device("cpu"), *(torch.device("cuda", number) for number in range(torch.cuda.device_count()))]
for device in devices:
    try:
        weight = torch.full((64, 64), 0.5, device=device, requires_grad=True)
        (weight @ weight).sum().backward()
    except RuntimeError as error:
        if not re.search("out of memory|ALLOC_FAILED", str(error)):
            raise
        found["full"].append(torch.cuda.get_device_name(device))
        continue
    assert torch.equal(weight.grad, torch.full_like(weight, 64.0)), f"{device} computes wrongly"
    if device.type == "cuda":
        found["gpus"].append(torch.cuda.get_device_name(device))
try:
    import bitsandbytes
    weight = torch.nn.Parameter(torch.ones(64, 64, device="cpu" if found["full"] else devices[-1]))
    optimizer = bitsandbytes.optim.AdamW8bit([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["state1"].dtype == torch.uint8 and weight.max() < 1, "its optimizer did not step"
except Exception as error:
    found["bitsandbytes"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """Result of one check: the verdict, what was found, and what to do about it."""

    verdict: Literal["ok", "doubtful", "broken"]
    sentence: str
    remedy: str = ""


def check_gpu(gpu: Gpu) -> DoctorCheck:
    """Check a GPU's temperature, and report its free memory and capabilities."""
    free = f"{words.size(gpu.free_bytes)} of {words.size(gpu.total_bytes)} free"
    facts = [
        f"compute capability {gpu.capability[0]}.{gpu.capability[1]}",
        "bf16" if gpu.bf16 else "fp16 only",
        gpu.generation,
    ]
    if gpu.temperature is not None:
        facts.append(f"{gpu.temperature} °C")
    if gpu.load is not None:
        facts.append(f"{gpu.load}% busy")
    sentence = f"GPU {gpu.index}: {gpu.name}, {free}, {', '.join(facts)}"
    if gpu.temperature is not None and gpu.temperature >= HOT_CELSIUS:
        return DoctorCheck("doubtful", sentence, "It is hot and slows itself down: clean its fans and air vents.")
    return DoctorCheck("ok", sentence)


def check_uses(gpu: Gpu) -> DoctorCheck:
    """Report which programs use a GPU, and check that at least half of its memory is free and that it is not busy."""
    others = ", ".join(_use_text(use) for use in gpu.uses) or "no program that the driver reports"
    sentence = f"GPU {gpu.index} is used by: {others}"
    if gpu.free_bytes < gpu.total_bytes // 2:
        return DoctorCheck("doubtful", sentence, f"Close programs that you do not need{_largest_use(gpu)}.")
    if gpu.load is not None and gpu.load >= BUSY_PERCENT:
        return DoctorCheck(
            "doubtful", sentence, f"It is {gpu.load}% busy, which slows training down. Close games first."
        )
    return DoctorCheck("ok", sentence)


def check_context(gpu: Gpu, context_bytes: int, desktop_bytes: int) -> DoctorCheck:
    """Report how much memory the CUDA context takes, and check that enough is left for the model."""
    sentence = (
        f"GPU {gpu.index}: CUDA itself takes about {words.size(context_bytes)} while training; "
        f"{words.size(max(0, gpu.free_bytes - context_bytes))} are left for the model"
    )
    if gpu.free_bytes - context_bytes >= (gpu.total_bytes - desktop_bytes - context_bytes) // 2:
        return DoctorCheck("ok", sentence)
    usual = words.size(max(0, gpu.total_bytes - desktop_bytes - context_bytes))
    return DoctorCheck(
        "doubtful", f"{sentence} (typically {usual})", "Before training, close other programs that use the GPU."
    )


def check_commit(memory: MainMemory, gpus: list[Gpu]) -> DoctorCheck | None:
    """Check whether the Windows commit limit has room for a full GPU plus the training process.

    Return None on systems without a commit limit. GPU memory counts against the limit too, so with a small page file,
    programs run out of memory while most of the GPU is free.
    """
    if memory.commit_free is None or memory.commit_limit is None or not gpus:
        return None
    largest = max(gpu.total_bytes for gpu in gpus)
    needed = largest + HOST_BYTES
    sentence = (
        f"Windows can commit {words.size(memory.commit_free)} more of main memory and page file; "
        f"using all of the {words.size(largest)} GPU needs up to {words.size(needed)}"
    )
    if memory.commit_free >= needed:
        return DoctorCheck("ok", sentence)
    size = -(-(needed - memory.commit_free) // GIB)
    remedy = (
        f"Make the page file at least {size} GiB larger, or let Windows manage its size: Settings > System > About > "
        "Advanced system settings > Performance > Advanced > Virtual memory. Then restart."
    )
    return DoctorCheck("doubtful", sentence, remedy)


def check_spilling(driver: str, system: str) -> DoctorCheck | None:
    """Report what the Windows driver does when GPU memory is full; None on other systems, where allocations fail."""
    found = re.match(r"(\d+)\.(\d+)", driver)
    if system != "Windows" or found is None:
        return None
    version = int(found[1]), int(found[2])
    if version < SPILLS_FROM:
        return DoctorCheck(
            "ok", f"Driver {driver} reports a full GPU to the program and does not use main memory instead"
        )
    sentence = (
        f"Driver {driver} uses main memory when the GPU is full, which is about 100 times slower; "
        "Impasto stays below the free memory to avoid that"
    )
    if version < SWITCH_FROM:
        return DoctorCheck("ok", sentence, "Nothing to do. Drivers from 546.01 on let you turn this off.")
    remedy = (
        "Nothing to do. To turn it off for other programs: NVIDIA Control Panel > Manage 3D settings > "
        "CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback."
    )
    return DoctorCheck("ok", sentence, remedy)


def _use_text(use: GpuProcess) -> str:
    return use.name if use.bytes is None else f"{use.name} {words.size(use.bytes)}"


def _largest_use(gpu: Gpu) -> str:
    """Return which program uses the most GPU memory, and how much; "" if the driver does not report sizes."""
    known = [use for use in gpu.uses if use.bytes]
    return f": {known[0].name} uses {words.size(known[0].bytes or 0)}" if known else ""


def add_commands(commands: Commands) -> None:
    """Define the command and its arguments."""
    what = "check whether this PC can train"
    doctor = add_command(commands, "doctor", what, run_doctor)
    doctor.add_argument("--quick", action="store_true", help="skip the self-test, which imports PyTorch")
    doctor.add_argument("--json", action="store_true", help="print each check as a JSON line, for scripts")


def run_doctor(options: argparse.Namespace) -> int:
    """Print the result of every check; return exit code 1 if something prevents training."""
    if options.json:
        return _print_json(examine(self_test=not options.quick))
    marks = {"ok": "ok      ", "doubtful": "doubtful", "broken": "BROKEN  "}
    broken = False
    for check in examine(self_test=not options.quick):
        echo(f"{marks[check.verdict]}  {check.sentence}")
        if check.remedy:
            echo(f"          What to do: {check.remedy}")
        broken = broken or check.verdict == "broken"
    echo()
    echo("Something prevents training; see above." if broken else "This PC can train.")
    return EXIT_FAULT if broken else EXIT_DONE


def _print_json(checks: Iterator[DoctorCheck]) -> int:
    broken = False
    for check in checks:
        echo_json(asdict(check))
        broken = broken or check.verdict == "broken"
    return EXIT_FAULT if broken else EXIT_DONE


def examine(*, self_test: bool) -> Iterator[DoctorCheck]:
    """Yield the result of each check, slow ones last."""
    yield _check_python()
    yield from _check_libraries()
    found, check_of_driver = _find_gpus()
    yield check_of_driver
    yield from _check_gpus(found)
    yield _check_build(found)
    yield from _check_folders()
    if self_test:
        yield from _run_self_test(found)


def _check_python() -> DoctorCheck:
    bits = struct.calcsize("P") * 8
    sentence = f"Python {platform.python_version()} ({bits}-bit) on {platform.platform()}"
    if bits == 64 and (3, 11) <= sys.version_info[:2] <= (3, 14):
        return DoctorCheck("ok", sentence)
    return DoctorCheck("broken", sentence, "Impasto needs a 64-bit Python 3.11 to 3.14.")


def _check_libraries() -> Iterator[DoctorCheck]:
    found, missing = [], []
    for name in LIBRARIES:
        version = version_of(name)
        if version is None:
            missing.append(name)
        else:
            found.append(f"{name} {version}")
    yield DoctorCheck("ok", "Libraries: " + ", ".join(found))
    if missing:
        yield DoctorCheck("broken", f"Not installed: {', '.join(missing)}", _REBUILD)


def _find_gpus() -> tuple[list[Gpu], DoctorCheck]:
    from trainer import gpu

    try:
        found = gpu.list_gpus()
    except ImpastoError as error:
        return [], DoctorCheck("broken", error.sentence, error.remedy)
    if not found:
        return [], DoctorCheck("ok", "No NVIDIA GPU or driver found: training runs on the CPU, which is slow.")
    cuda = ".".join(map(str, found[0].cuda))
    return found, DoctorCheck("ok", f"NVIDIA driver {found[0].driver}, CUDA {cuda}")


def _check_gpus(found: list[Gpu]) -> Iterator[DoctorCheck]:
    """Yield the results for each GPU, then for the system's memory limits, which apply to all of them."""
    from trainer.host import main_memory
    from trainer.memory.device.calibration import corrections
    from trainer.memory.device.gpu_specs import overheads_for, specs_of

    system = platform.system()
    for gpu in found:
        overheads = overheads_for(specs_of(gpu), system)
        learned = corrections(gpu.name, system, {"torch": version_of("torch") or ""}).context_bytes
        yield check_gpu(gpu)
        yield check_uses(gpu)
        yield check_context(gpu, learned or overheads.context_bytes, overheads.desktop_bytes)
    memory = main_memory()
    limits = [check_commit(memory, found)] if memory is not None else []
    limits += [check_spilling(found[0].driver, system)] if found else []
    yield from (check for check in limits if check is not None)


def _check_build(found: list[Gpu]) -> DoctorCheck:
    """Check whether the installed torch was built for CUDA, by reading its files instead of importing it."""
    try:
        version = metadata.version("torch")
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, OSError):
        return DoctorCheck("broken", "PyTorch is not installed, or its files are damaged", _REBUILD)
    match = re.search(r"^cuda\b.*= *'([\d.]+)'", text, re.MULTILINE)
    if match:
        return DoctorCheck("ok", f"PyTorch {version} is built for CUDA {match[1]}")
    if found:
        return DoctorCheck("broken", f"PyTorch {version} is built for CPUs only, so it cannot use the GPU", _REBUILD)
    return DoctorCheck("ok", f"PyTorch {version} is built for CPUs")


def _check_folders() -> Iterator[DoctorCheck]:
    named = {"The cache": places.cache_folder(), "Downloaded models": places.models_folder(), "This folder": Path.cwd()}
    for name, folder in named.items():
        try:
            free = places.free_bytes(folder)
            _try_to_write(folder)
        except OSError as error:
            reason = error.strerror or str(error)
            yield DoctorCheck(
                "broken",
                f"Could not write to {folder} ({name[0].lower()}{name[1:]}): {reason}",
                "Make it writable, or choose another.",
            )
            continue
        sentence = f"{name}: {folder}, {words.size(free)} free"
        if free < _ENOUGH_BYTES:
            yield DoctorCheck(
                "doubtful", sentence, "Free up disk space: images, bases and SDXL checkpoints take gigabytes."
            )
        else:
            yield DoctorCheck("ok", sentence)


def _try_to_write(folder: Path) -> None:
    while not folder.exists():
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")


def _run_self_test(found: list[Gpu]) -> Iterator[DoctorCheck]:
    # -P: don't import a folder called torch from the current directory.
    command = [sys.executable, "-P", "-c", _SELF_TEST]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_SELF_TEST_SECONDS
        )
    except subprocess.TimeoutExpired:
        yield DoctorCheck("broken", f"The self-test did not finish within {_SELF_TEST_SECONDS} seconds", _REBUILD)
        return
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it stopped unexpectedly"])[-1]
        yield DoctorCheck("broken", f"PyTorch does not work: {last} (exit code {done.returncode})", _REBUILD)
        return
    result = parse_json(done.stdout.splitlines()[-1])
    yield DoctorCheck("ok", f"Self-test: PyTorch computes on {', '.join(['the CPU', *result['gpus']])}")
    full = result.get("full", [])
    for name in full:
        sentence = f"Self-test: {name} was not tested, because it has no free memory"
        yield DoctorCheck("doubtful", sentence, "Close other programs that use it, then run `doctor` again.")
    if (count := len(result["gpus"]) + len(full)) < len(found):
        seen = words.counted(count, "GPU", "GPUs")
        yield DoctorCheck("broken", f"PyTorch sees {seen} of {len(found)}", _REBUILD)
    if "bitsandbytes" in result:
        remedy = f"8-bit optimizers and quantized bases need it. {_REBUILD}"
        yield DoctorCheck("doubtful", f"bitsandbytes does not work: {result['bitsandbytes']}", remedy)
    else:
        yield DoctorCheck("ok", "Self-test: the 8-bit optimizer of bitsandbytes works")
