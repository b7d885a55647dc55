"""The command that looks at this machine and says what would keep training from working."""

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
    from trainer.gpu import Card, Use
    from trainer.host import MainMemory


GIB = 1 << 30
# Main memory that training itself takes at its peak, reading SDXL: two thirds of its weights in 16 bits and PyTorch.
HOST_BYTES = 6 * GIB
# From here on NVIDIA's Windows driver goes on in main memory when a card is full; from the second it can be told not
# to: https://nvidia.custhelp.com/app/answers/detail/a_id/5490
SPILLS_FROM = (536, 40)
SWITCH_FROM = (546, 1)
HOT_CELSIUS = 85
BUSY_PERCENT = 50
_REBUILD = "Run `python run.py rebuild`, or reinstall Impasto in your own environment."
_ENOUGH_BYTES = 10 << 30
_SELF_TEST_SECONDS = 300
# Runs in a process of its own: a broken torch may crash the process that imports it, and this one must tell of it.
_SELF_TEST = """
import gc, json, re, warnings
gc.disable()  # in what is imported there is no garbage to look for
warnings.simplefilter("ignore")
import torch
found = {"torch": torch.__version__, "cards": [], "full": []}
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
        found["cards"].append(torch.cuda.get_device_name(device))
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
    """One thing looked at: whether training works with it, what was found, and what to do if not."""

    verdict: Literal["ok", "doubtful", "broken"]
    sentence: str
    remedy: str = ""


def check_card(card: Card) -> DoctorCheck:
    """Judge what is free on a card, and how it is."""
    free = f"{words.size(card.free_bytes)} of {words.size(card.total_bytes)} free"
    facts = [
        f"compute capability {card.capability[0]}.{card.capability[1]}",
        "bf16" if card.bf16 else "fp16 only",
        card.generation,
    ]
    if card.temperature is not None:
        facts.append(f"{card.temperature} °C")
    if card.load is not None:
        facts.append(f"{card.load} % busy")
    sentence = f"Card {card.index}: {card.name}, {free}, {', '.join(facts)}"
    if card.temperature is not None and card.temperature >= HOT_CELSIUS:
        return DoctorCheck(
            "doubtful", sentence, "It is so hot that it slows itself down: clear its fans and vents of dust."
        )
    return DoctorCheck("ok", sentence)


def check_uses(card: Card) -> DoctorCheck:
    """Judge what else uses a card: memory that others hold is memory that training lacks."""
    others = ", ".join(_told(use) for use in card.uses) or "no program that the driver names"
    sentence = f"Card {card.index} is used by: {others}"
    if card.free_bytes < card.total_bytes // 2:
        return DoctorCheck("doubtful", sentence, f"Close what you do not need on it{_largest(card)}.")
    if card.load is not None and card.load >= BUSY_PERCENT:
        return DoctorCheck(
            "doubtful", sentence, f"It is {card.load} % busy: training beside that is slow. Close games first."
        )
    return DoctorCheck("ok", sentence)


def check_context(card: Card, context_bytes: int, desktop_bytes: int) -> DoctorCheck:
    """Say what CUDA itself will take of a card, and whether that leaves anything."""
    sentence = (
        f"Card {card.index}: CUDA itself takes about {words.size(context_bytes)} of it while training; "
        f"{words.size(max(0, card.free_bytes - context_bytes))} are left for the model"
    )
    if card.free_bytes - context_bytes >= (card.total_bytes - desktop_bytes - context_bytes) // 2:
        return DoctorCheck("ok", sentence)
    usual = words.size(max(0, card.total_bytes - desktop_bytes - context_bytes))
    return DoctorCheck(
        "doubtful", f"{sentence}, where {usual} are usual", "Close other programs on it before training."
    )


def check_commit(memory: MainMemory, cards: list[Card]) -> DoctorCheck | None:
    """Judge on Windows whether the system may promise as much memory as a full card and training itself need.

    None where the system does not count promises. A card's memory counts as if it were main memory: without room in the
    page file programs run out with most of the card free.
    """
    if memory.commit_free is None or memory.commit_limit is None or not cards:
        return None
    largest = max(card.total_bytes for card in cards)
    needed = largest + HOST_BYTES
    sentence = (
        f"The system may promise programs {words.size(memory.commit_free)} more of main memory and page file; "
        f"filling the card of {words.size(largest)} takes up to {words.size(needed)}"
    )
    if memory.commit_free >= needed:
        return DoctorCheck("ok", sentence)
    size = -(-(needed - memory.commit_free) // GIB)
    remedy = (
        f"Make the page file at least {size} GiB larger, or leave its size to Windows: Settings, System, About, "
        "Advanced system settings, Performance, Advanced, Virtual memory. Then restart."
    )
    return DoctorCheck("doubtful", sentence, remedy)


def check_spilling(driver: str, system: str) -> DoctorCheck | None:
    """Say on Windows what the driver does when the card is full; None elsewhere, where a program is simply told."""
    found = re.match(r"(\d+)\.(\d+)", driver)
    if system != "Windows" or found is None:
        return None
    version = int(found[1]), int(found[2])
    if version < SPILLS_FROM:
        return DoctorCheck(
            "ok", f"Driver {driver} tells a program when the card is full, and does not go on in main memory"
        )
    sentence = (
        f"Driver {driver} goes on in main memory when the card is full, a hundred times slower; "
        "Impasto takes less than what is free, so that this does not happen to it"
    )
    if version < SWITCH_FROM:
        return DoctorCheck("ok", sentence, "Nothing need be done. Drivers from 546.01 on can be told not to do so.")
    remedy = (
        "Nothing need be done. For other programs: NVIDIA Control Panel, Manage 3D settings, CUDA - Sysmem Fallback "
        "Policy, Prefer No Sysmem Fallback."
    )
    return DoctorCheck("ok", sentence, remedy)


def _told(use: Use) -> str:
    return use.name if use.bytes is None else f"{use.name} {words.size(use.bytes)}"


def _largest(card: Card) -> str:
    """What closing the largest would free, where the driver tells."""
    known = [use for use in card.uses if use.bytes]
    return f": {known[0].name} holds {words.size(known[0].bytes or 0)}" if known else ""


def add_commands(commands: Commands) -> None:
    """Define the words of the command."""
    what = "look at this machine and say what would keep training from working"
    doctor = add_command(commands, "doctor", what, run_doctor)
    doctor.add_argument("--quick", action="store_true", help="leave out the self test, which imports PyTorch")
    doctor.add_argument("--json", action="store_true", help="print each check as one line of JSON, for programs")


def run_doctor(options: argparse.Namespace) -> int:
    """Print every check; the exit code is 1 when something keeps training from working."""
    if options.json:
        return _tell_programs(examine(self_test=not options.quick))
    marks = {"ok": "ok      ", "doubtful": "doubtful", "broken": "BROKEN  "}
    broken = False
    for check in examine(self_test=not options.quick):
        echo(f"{marks[check.verdict]}  {check.sentence}")
        if check.remedy:
            echo(f"          What to do: {check.remedy}")
        broken = broken or check.verdict == "broken"
    echo()
    echo("Something prevents training; see above." if broken else "Training can work here.")
    return EXIT_FAULT if broken else EXIT_DONE


def _tell_programs(checks: Iterator[DoctorCheck]) -> int:
    broken = False
    for check in checks:
        echo_json(asdict(check))
        broken = broken or check.verdict == "broken"
    return EXIT_FAULT if broken else EXIT_DONE


def examine(*, self_test: bool) -> Iterator[DoctorCheck]:
    """Yield what was found, one thing after the other, the slow ones last."""
    yield _check_python()
    yield from _check_libraries()
    found, check_of_driver = _find_cards()
    yield check_of_driver
    yield from _check_cards(found)
    yield _check_build(found)
    yield from _check_folders()
    if self_test:
        yield from _run_self_test(found)


def _check_python() -> DoctorCheck:
    bits = struct.calcsize("P") * 8
    sentence = f"Python {platform.python_version()} ({bits} bit) on {platform.platform()}"
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


def _find_cards() -> tuple[list[Card], DoctorCheck]:
    from trainer import gpu

    try:
        found = gpu.cards()
    except ImpastoError as error:
        return [], DoctorCheck("broken", error.sentence, error.remedy)
    if not found:
        return [], DoctorCheck("ok", "No NVIDIA card or driver: training runs on the CPU, which is slow.")
    cuda = ".".join(map(str, found[0].cuda))
    return found, DoctorCheck("ok", f"NVIDIA driver {found[0].driver}, CUDA {cuda}")


def _check_cards(found: list[Card]) -> Iterator[DoctorCheck]:
    """Judge every card, and what the system has to do with them."""
    from trainer.host import main_memory
    from trainer.memory.device.calibration import corrections
    from trainer.memory.device.gpu_specs import model_of, overheads_for

    system = platform.system()
    for card in found:
        overheads = overheads_for(model_of(card), system)
        learned = corrections(card.name, system, {"torch": version_of("torch") or ""}).context_bytes
        yield check_card(card)
        yield check_uses(card)
        yield check_context(card, learned or overheads.context_bytes, overheads.desktop_bytes)
    memory = main_memory()
    told = [check_commit(memory, found)] if memory is not None else []
    told += [check_spilling(found[0].driver, system)] if found else []
    yield from (check for check in told if check is not None)


def _check_build(found: list[Card]) -> DoctorCheck:
    """Judge by its files which machines the installed torch was built for."""
    try:
        version = metadata.version("torch")
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, OSError):
        return DoctorCheck("broken", "PyTorch is not installed, or its files are damaged", _REBUILD)
    match = re.search(r"^cuda\b.*= *'([\d.]+)'", text, re.MULTILINE)
    if match:
        return DoctorCheck("ok", f"PyTorch {version} is built for CUDA {match[1]}")
    if found:
        return DoctorCheck("broken", f"PyTorch {version} is built for CPUs only, so it cannot use the card", _REBUILD)
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
                "broken", f"{name}, {folder}: cannot be written: {reason}", "Make it writable, or choose another."
            )
            continue
        sentence = f"{name}: {folder}, {words.size(free)} free"
        if free < _ENOUGH_BYTES:
            yield DoctorCheck(
                "doubtful", sentence, "Make room: pictures, bases and checkpoints of SDXL take gigabytes."
            )
        else:
            yield DoctorCheck("ok", sentence)


def _try_to_write(folder: Path) -> None:
    while not folder.exists():
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")


def _run_self_test(found: list[Card]) -> Iterator[DoctorCheck]:
    # -P: a folder called torch in the present one is not ours.
    command = [sys.executable, "-P", "-c", _SELF_TEST]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_SELF_TEST_SECONDS
        )
    except subprocess.TimeoutExpired:
        yield DoctorCheck("broken", f"The self test did not end within {_SELF_TEST_SECONDS} seconds", _REBUILD)
        return
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it stopped unexpectedly"])[-1]
        yield DoctorCheck("broken", f"PyTorch does not work: {last} (exit code {done.returncode})", _REBUILD)
        return
    told = parse_json(done.stdout.splitlines()[-1])
    yield DoctorCheck("ok", f"Self test: PyTorch computes on {', '.join(['the CPU', *told['cards']])}")
    full = told.get("full", [])
    for name in full:
        sentence = f"Self test: {name} was not tested, because it has no free memory"
        yield DoctorCheck("doubtful", sentence, "Close other programs that use it, then run `doctor` again.")
    if (count := len(told["cards"]) + len(full)) < len(found):
        seen = words.counted(count, "card", "cards")
        yield DoctorCheck("broken", f"PyTorch sees {seen} of {len(found)}", _REBUILD)
    if "bitsandbytes" in told:
        remedy = f"8-bit optimizers and quantised bases need it. {_REBUILD}"
        yield DoctorCheck("doubtful", f"bitsandbytes does not work: {told['bitsandbytes']}", remedy)
    else:
        yield DoctorCheck("ok", "Self test: bitsandbytes takes an 8-bit optimizer step")
