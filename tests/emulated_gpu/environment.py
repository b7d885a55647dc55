"""Set up what tests on the emulated GPU need, then run them: `python run.py test --gpu [...]` starts this file.

The environment is separate from `.venv`: the CUDA build of PyTorch without NVIDIA's libraries, which the emulated GPU
replaces. It is in the per-user folder, so that all checkouts share it. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import run  # noqa: E402
from tests.emulated_gpu import build  # noqa: E402
from trainer.protocol import places  # noqa: E402
from trainer.protocol.locks import hold_lock  # noqa: E402

FOLDER = places.home() / "emulated-gpu"
VENV = FOLDER / "venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "impasto.json"
HEADERS = FOLDER / "headers"
TORCH = "torch===2.13.0"  # "===" takes the CUDA build only: the CPU's is 2.13.0+cpu
CUDA_HEADERS = ("nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*", "nvidia-cuda-cccl==13.0.*")
NEEDED_BYTES = 6 * run.GIB  # 3 GiB when installed, and pip unpacks next to its download cache
# PyTorch's libraries that use CUDA; not every build has all of them.
TORCH_LIBRARIES = [
    "libc10_cuda",
    "libtorch_cpu",
    "libtorch_cuda",
    "libtorch_cuda_linalg",
    "libtorch_global_deps",
    "libtorch_nvshmem",
    "libtorch_python",
    "libcaffe2_nvrtc",
]


def main(words: Sequence[str]) -> int:
    """Run pytest on the emulated GPU; with --if-built, skip it if setting up would need a download."""
    if_built = "--if-built" in words
    try:
        require_tools()
        FOLDER.mkdir(parents=True, exist_ok=True)
        with hold_lock(FOLDER / "lock", patience=float("inf")):
            if not is_ready():
                if if_built:
                    raise run.SetupError("its environment is not set up", "Run: python3 run.py test --gpu")
                make_environment()
            library = make_library()
    except run.SetupError as error:
        if if_built and not isinstance(error, CompileError):
            run.say(f"Skipped the tests on the emulated GPU: {error}. {error.remedy}.")
            return 0
        return run.fail(str(error), error.remedy)
    os.chdir(ROOT)
    os.environ["LD_LIBRARY_PATH"] = str(library)
    if "--truth" in words:
        words = [word for word in words if word != "--truth"]
        command = [str(PYTHON), "-m", "tests.emulated_gpu.truth", *words]
        os.execve(command[0], command, {**run.environment(), "PYTHONPATH": str(ROOT)})
    options = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal", "-o", "testpaths=tests/emulated_gpu"]
    return run.hand_over([str(PYTHON), "-m", "pytest", *options, *(word for word in words if word != "--if-built")])


class CompileError(run.SetupError):  # type: ignore[misc]
    """Raised if the emulated GPU's sources do not compile here."""


def require_tools() -> None:
    """Raise SetupError unless this is 64-bit Linux on x86 with a C++ compiler and binutils."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise run.SetupError("the emulated GPU needs Linux on x86-64", "Run its tests there, or on a real GPU")
    missing = [tool for tool in ("g++", "nm", "readelf") if shutil.which(tool) is None]
    if missing:
        raise run.SetupError(f"the emulated GPU needs {', '.join(missing)}", "Run: sudo apt install g++ binutils")


def is_ready() -> bool:
    """Return whether the environment is complete and was made for the current requirements."""
    try:
        return bool(json.loads(STAMP.read_text(encoding="utf-8")) == wanted()) and bool(versions())
    except (OSError, ValueError):
        return False


def wanted() -> list[str]:
    """Return the requirements that the environment is made from."""
    return [TORCH, *CUDA_HEADERS, *(line for line in run.requirements(["test"]) if not line.startswith("torch"))]


def versions() -> str:
    """Return the versions of Python, PyTorch and bitsandbytes in the environment; empty if it does not start."""
    code = "import sys, importlib.metadata as m; print(sys.version, *map(m.version, ['torch', 'bitsandbytes']))"
    return str(run.ask([str(PYTHON), "-c", code])).strip()


def make_environment() -> None:
    """Install PyTorch's CUDA build and all requirements except NVIDIA's libraries; raise SetupError."""
    free = places.free_bytes(FOLDER)
    if free < NEEDED_BYTES:
        needed = f"the emulated GPU needs {NEEDED_BYTES / run.GIB:.0f} GiB"
        what = f"the disk of {FOLDER} has {free / run.GIB:.1f} GiB free, and {needed}"
        raise run.SetupError(what, "Free some space and start again, or set IMPASTO_HOME to a folder on another disk")
    run.begin_log([TORCH])
    run.say(f"Setting up the emulated GPU in {FOLDER} (some minutes, once)")
    for folder in (VENV, HEADERS):
        shutil.rmtree(folder, ignore_errors=True)
    run.step("creating the environment", [sys.executable, "-m", "venv", str(VENV)])
    pip("installing the CUDA build of torch", "--no-deps", TORCH)
    forget_nvidia()
    constraints = FOLDER / "constraints.txt"
    constraints.write_text(TORCH + "\n", encoding="utf-8")
    pip("installing the libraries", "--constraint", str(constraints), *wanted()[1 + len(CUDA_HEADERS) :])
    pip("installing CUDA's headers", "--no-deps", "--target", str(HEADERS), *CUDA_HEADERS)
    STAMP.write_text(json.dumps(wanted(), indent=1), encoding="utf-8")


def pip(what: str, *arguments: str) -> None:
    """Install into the environment; raise SetupError if that fails."""
    options = ["--no-input", "--disable-pip-version-check", "--only-binary", ":all:"]
    run.step(what, [str(PYTHON), "-m", "pip", "install", *options, *arguments], shown=True)


def site_packages() -> Path:
    """Return the environment's folder of libraries."""
    return next(VENV.glob("lib/python3*/site-packages"))


def forget_nvidia() -> None:
    """Remove NVIDIA's packages from torch's list of requirements.

    Otherwise pip installs them, 3 GB, along with the next package that needs torch, and torch loads them instead of the
    emulated GPU.
    """
    (metadata,) = site_packages().glob("torch-*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(re.sub(r"(?m)^Requires-Dist: (nvidia|cuda)-.*\n", "", text), encoding="utf-8")


def make_library() -> Path:
    """Return the folder of the compiled emulated GPU; compile it if its sources or PyTorch have changed."""
    digest = hashlib.sha256(versions().encode())
    for source in (*build.SOURCES, *build.HEADERS, Path(build.__file__)):
        digest.update(source.read_bytes())
    # Older builds are kept, 1 MiB each: tests of another checkout may be using one.
    folder = FOLDER / f"build-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    run.say("Compiling the emulated GPU")
    unfinished = FOLDER / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        build.compile_library(unfinished, next(HEADERS.rglob("cuda.h")).parent, libraries())
    except subprocess.CalledProcessError as error:
        what = f"the emulated GPU does not compile:\n{error.stderr}"
        raise CompileError(what, "Use g++ 12 or newer, or report this") from error
    unfinished.rename(folder)
    return folder


def libraries() -> list[Path]:
    """Return the shared libraries that run on the emulated GPU."""
    site = site_packages()
    torch = [site / "torch" / "lib" / f"{name}.so" for name in TORCH_LIBRARIES]
    return [*filter(Path.exists, torch), site / "bitsandbytes" / "libbitsandbytes_cuda130.so"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
