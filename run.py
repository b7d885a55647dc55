"""Set up Impasto in its own folder, then start it. Requires only Python.

    python run.py                   open the window
    python run.py app [FOLDER]      open the window with a folder of images
    python run.py shortcut          add a shortcut to the desktop (Windows) or the application menu (Linux)
    python run.py demo              train a small LoRA on the bundled base; show before and after
    python run.py test [...]        run the tests; further arguments go to pytest
    python run.py test --gpu [...]  run the tests on an emulated NVIDIA GPU (Linux with g++); with --truth, compare
                                    memory forecasts with PyTorch's allocator on it
    python run.py doctor            check whether this PC can train
    python run.py update            get the newest Impasto with git and rebuild
    python run.py rebuild           set up again, for example after changing the GPU
    python run.py COMMAND [...]     run a command of the trainer: new, train, resume, render, check, ...

Put --cpu before the command to set up without GPU support.
"""

# Python 3.6 and later must be able to parse this file, so that it can report which version is needed.
import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from subprocess import DEVNULL, SubprocessError
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
OLD_VENV = ROOT / ".venv-old"
STATE = ROOT / ".run"
LOG = STATE / "setup.log"
PINS = VENV / "constraints.txt"

TORCH_INDEX = "https://download.pytorch.org/whl/"
GIB = 1024**3
# The CPU environment takes 1.7 GiB, the CUDA libraries about 5 more; pip unpacks in addition to its download cache.
NEEDED_BYTES = {"cpu": 4 * GIB, "gpu": 14 * GIB}
# Paths inside the torch wheel have up to 170 characters, and Windows allows 260 unless long paths are enabled.
LONGEST_WINDOWS_ROOT = 80
# Variables set by a shell, conda or an IDE that would make pip and Python use another environment.
LEAKS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
# Known failures, in the order they are tried: a pattern in the log, the reason, and what to do.
KNOWN_FAILURES = (
    ("No space left|Errno 28|WinError 112", "the disk is full", "Free some space and try again"),
    ("CERTIFICATE_VERIFY|SSLError|ProxyError", "a proxy or virus scanner blocks the connection",
     "Allow Python in it, or set HTTPS_PROXY"),
    ("NewConnection|NameResolution|Max retries", "the package index cannot be reached",
     "Connect to the internet and try again"),
    ("No matching distribution", "the index has no build of a library for this Python",
     "Install Python 3.12 and try again"),
    (r"WinError 126|WinError 1114|c10\.dll", "Microsoft's C++ runtime is missing",
     "Run: winget install Microsoft.VCRedist.2015+.x64"),
)  # fmt: skip


class SetupError(Exception):
    """A problem that the user can fix: what happened, and what to do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


class Gpu(NamedTuple):
    """The most capable NVIDIA GPU, its compute capability (None if not reported) and the driver's CUDA version."""

    name: str
    capability: Optional[Tuple[int, int]]
    cuda: Tuple[int, int]


def main(words: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    cpu = list(words[:1]) == ["--cpu"]
    command, *rest = words[cpu:] or ["app"]
    if command in ("-h", "--help", "help"):
        say(__doc__)
        return 0
    try:
        return dispatch(command, rest, cpu)
    except SetupError as error:
        return fail(str(error), error.remedy)
    except OSError as error:
        return fail(str(error), f"Check that you can write to {ROOT} and that no other program uses its files")
    except KeyboardInterrupt:
        return fail("it was interrupted", "Try again; downloaded files are kept")


def dispatch(command: str, rest: List[str], cpu: bool) -> int:
    """Switch to a suitable Python, prepare the environment and run the command."""
    if not python_fits(sys.version_info[:2], struct.calcsize("P") * 8):
        return hand_over([find_python(), str(ROOT / "run.py"), *sys.argv[1:]])
    sys.path.insert(0, str(ROOT))  # for trainer.protocol, which needs only the standard library
    if command == "update":
        pull()
        # The pull may have replaced this file, so the new one takes over.
        return hand_over([sys.executable, str(ROOT / "run.py"), *(["--cpu"] if cpu else []), "rebuild"])
    if command == "rebuild":
        with setup_lock():
            restore_old_environment()
            build(read_stamp().get("extras", []), cpu)
        return 0
    if command == "test" and "--gpu" in rest:
        # The emulated GPU has its own environment with another torch build.
        words = [word for word in rest if word != "--gpu"]
        return hand_over([sys.executable, str(ROOT / "tests" / "emulated_gpu" / "environment.py"), *words])
    if command == "test":
        check_libraries(screen=False)
        python = prepare(["test"], cpu)
        os.chdir(str(ROOT))
        # Few processes, because each takes a gigabyte; whole files per process, because their tests share fixtures.
        words = ["-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder"]
        return hand_over([python, "-m", "pytest", *words, *rest])
    if command in ("app", "shortcut"):
        # Wayland, or a platform chosen by the user, does not need the X11 libraries.
        check_libraries(screen=not (os.environ.get("WAYLAND_DISPLAY") or os.environ.get("QT_QPA_PLATFORM")))
        python = prepare([], cpu)
        return open_window(rest) if command == "app" else hand_over([python, "-m", "app.shortcut"])
    return hand_over([prepare([], cpu), "-m", "trainer", command, *rest])


def check_libraries(screen: bool) -> None:
    """Raise SetupError with the command that installs the system libraries missing on Linux."""
    from app.libraries import install_command, missing_libraries

    missing = missing_libraries(screen)
    if missing:
        raise SetupError(
            f"the window needs libraries that are not installed: {', '.join(missing)}",
            f"Install them, then try again: {install_command(missing)}",
        )


def open_window(paths: List[str]) -> int:
    """Open the window; on Windows as a detached process, so that this console can close."""
    if os.name == "posix":
        return hand_over([str(venv_python()), "-m", "app", *paths])
    arguments = [str(venv_python().with_name("pythonw.exe")), "-m", "app", *paths]
    flags = 0x00000008 | 0x00000200  # DETACHED_PROCESS, CREATE_NEW_PROCESS_GROUP
    subprocess.Popen(arguments, env=environment(), stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, creationflags=flags)
    return 0


# --- which Python, and which torch -----------------------------------------------------------------------------------


def python_fits(version: Tuple[int, ...], bits: int) -> bool:
    """Return whether a Python with this (major, minor) version and word size can run Impasto."""
    return (3, 11) <= tuple(version[:2]) <= (3, 14) and bits == 64


def find_python() -> str:
    """Return the path of a suitable Python; raise SetupError with the command that installs one."""
    code = "import struct, sys; print(sys.version_info[0], sys.version_info[1], struct.calcsize('P') * 8)"
    for candidate in python_candidates(ask(["py", "-0p"])):
        answer = ask([candidate, "-c", code]).split()
        if len(answer) == 3 and python_fits((int(answer[0]), int(answer[1])), int(answer[2])):
            return candidate
    here = f"{platform.python_version()}, {struct.calcsize('P') * 8}-bit"
    raise SetupError(
        f"Impasto needs a 64-bit Python 3.11 to 3.14; this one is {here}, and no other version was found",
        f"Install one, then try again: {python_install_command(platform.system())}",
    )


def python_candidates(launcher_list: str) -> Iterator[str]:
    """Yield candidate interpreters: first the ones that Windows' `py -0p` lists, then `python3.x` on PATH."""
    # " -V:3.12 *        C:\Program Files\Python312\python.exe"; older launchers write " -3.11-64        C:\..."
    yield from re.findall(r"(?m)^[ \t]*-\S+(?:[ \t]+\*)?[ \t]+(\S.*\.exe)[ \t\r]*$", launcher_list)
    yield from filter(None, (shutil.which(f"python3.{minor}") for minor in (12, 13, 11, 14)))


def python_install_command(system: str) -> str:
    """Return the command that installs a suitable Python on this system."""
    if system == "Windows":
        return "winget install -e --id Python.Python.3.12"
    commands = {
        "apt": "sudo apt install python3.11 python3.11-venv",
        "dnf": "sudo dnf install python3.12",
        "zypper": "sudo zypper install python312",
        "pacman": "sudo pacman -S python",
        "brew": "brew install python@3.12",
    }
    found = (command for tool, command in commands.items() if shutil.which(tool))
    return next(found, "the installer from python.org/downloads")


def torch_arguments(system: str, gpu: Optional[Gpu], torch: str) -> List[str]:
    """Return the pip arguments that install a torch build for this machine.

    `torch` is the requirement for torch with its version bounds.

    Builds for CUDA 13 need a driver that supports it (R580) and Turing (7.5) or later. Builds for CUDA 12.6 need a
    driver that supports CUDA 12 (R525) and a GPU from Maxwell (5.0) to Hopper (9.0). Source: the CUDA support matrix in
    PyTorch's RELEASE.md, 2.12 to 2.14.

    Raises:
        SetupError: No torch build supports this GPU or driver.
    """
    if gpu is None:
        # PyPI's build includes 2.5 GB of CUDA libraries on Linux and none on Windows.
        return [torch, "--index-url", TORCH_INDEX + "cpu"] if system == "Linux" else [torch]
    without = "set up without GPU support: run.py --cpu rebuild"
    capability = gpu.capability or (7, 5)  # drivers that do not report it are too old anyway
    if capability < (5, 0):
        raise SetupError(f"the {gpu.name} is too old: no torch build supports it", without.capitalize())
    needed = 13 if capability >= (10, 0) else 12
    if gpu.cuda < (needed, 0):
        raise SetupError(
            f"the driver of the {gpu.name} is too old: it supports CUDA {gpu.cuda[0]}.{gpu.cuda[1]}, not {needed}.0",
            f"Update the driver (nvidia.com/drivers) and try again, or {without}",
        )
    if gpu.cuda < (13, 0) or capability < (7, 5):
        return [torch, "--index-url", TORCH_INDEX + "cu126"]
    # PyPI's build is for CUDA 13 on Linux and for the CPU on Windows.
    return [torch] if system == "Linux" else [torch, "--index-url", TORCH_INDEX + "cu130"]


def detect_gpu() -> Optional[Gpu]:
    """Return the most capable GPU that nvidia-smi lists; None if there is no GPU or driver."""
    tool = shutil.which("nvidia-smi") or os.path.expandvars(r"%SYSTEMROOT%\System32\nvidia-smi.exe")
    banner = ask([tool])
    return parse_gpu(banner, ask([tool, "--query-gpu=compute_cap,name", "--format=csv,noheader"])) if banner else None


def parse_gpu(banner: str, query: str) -> Optional[Gpu]:
    """Parse nvidia-smi's banner and its list of `compute_cap, name` lines.

    Newer Windows drivers write "CUDA UMD Version" for "CUDA Version"; drivers before R510 do not report compute_cap.
    """
    cuda = re.search(r"CUDA (?:UMD )?Version:\s*(\d+)\.(\d+)", banner)
    if not cuda:
        return None
    version = (int(cuda.group(1)), int(cuda.group(2)))
    lines = re.findall(r"(?m)^(\d+)\.(\d+), *(.+?)\s*$", query)
    gpus = [((int(major), int(minor)), name) for major, minor, name in lines]
    capability, name = max(gpus, default=(None, "NVIDIA GPU"))
    return Gpu(name, capability, version)


def reachable(url: str) -> bool:
    """Return whether a package index answers within five seconds."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (OSError, ValueError):
        return False


# --- the environment ------------------------------------------------------------------------------------------------


def prepare(extras: Sequence[str], cpu: bool) -> str:
    """Ensure that `.venv` has the requirements of Impasto and `extras`; return the path of its interpreter."""
    if not is_ready(extras, cpu):
        with setup_lock():
            restore_old_environment()
            if is_ready([], cpu) and not is_ready(extras, cpu):
                add_extras(extras)
            elif not is_ready(extras, cpu):  # another process may have finished in the meantime
                build(sorted({*read_stamp().get("extras", []), *extras}), cpu)
    stamp = read_stamp()
    if not stamp.get("gpu") and not stamp.get("cpu") and detect_gpu():
        say("An NVIDIA GPU has been added since this environment was set up. To use it, run: python run.py rebuild")
    return str(venv_python())


def is_ready(extras: Iterable[str], cpu: bool) -> bool:
    """Return whether `.venv` works and has the current requirements, by reading two small files."""
    stamp = read_stamp()
    installed = stamp.get("requirements", [])
    device_matches = not (cpu and stamp.get("gpu"))
    return device_matches and set(requirements(extras)) <= set(installed) and venv_python().exists() and base_exists()


def build(extras: List[str], cpu: bool) -> None:
    """Recreate `.venv` and check that it works; on any failure, restore the previous environment."""
    started = time.monotonic()
    gpu = None if cpu else detect_gpu()
    torch = next(line for line in requirements([]) if line.startswith("torch"))
    arguments = torch_arguments(platform.system(), gpu, torch)
    check_machine(NEEDED_BYTES["gpu" if gpu else "cpu"])
    if gpu is None and arguments != [torch] and not reachable(arguments[-1] + "/torch/"):
        arguments = [torch]  # offline, or behind a mirror configured in pip
    begin_log(arguments)
    say(f"Setting up Impasto for {gpu.name if gpu else 'the CPU'} in {VENV} (a few minutes, once)")
    move_old_environment()
    try:
        step("creating the environment", [sys.executable, "-m", "venv", str(VENV)])
        pip("installing torch", arguments)
        version = ask([str(venv_python()), "-c", "import importlib.metadata as m; print(m.version('torch'))"]).strip()
        PINS.write_text(f"torch=={version}\n", encoding="utf-8")  # keeps later installs from replacing the torch build
        pip("installing the libraries", ["--constraint", str(PINS), *requirements(extras)])
        link_to_checkout()
        step(
            "checking the installation",
            [str(venv_python()), "-c", "import torch, trainer; print('torch', torch.__version__)"],
        )
        write_stamp({"requirements": requirements(extras), "extras": extras, "gpu": gpu and gpu.name, "cpu": cpu})
    except BaseException:
        shutil.rmtree(str(VENV), ignore_errors=True)
        restore_old_environment()
        raise
    shutil.rmtree(str(OLD_VENV), ignore_errors=True)
    say(f"Ready after {time.monotonic() - started:.0f} s.\n")


def add_extras(extras: Sequence[str]) -> None:
    """Install the requirements of `extras` into the existing environment."""
    stamp = read_stamp()
    all_extras = sorted({*stamp["extras"], *extras})
    begin_log([])
    pip(f"installing dependencies for {', '.join(extras)}", ["--constraint", str(PINS), *requirements(all_extras)])
    write_stamp({**stamp, "requirements": requirements(all_extras), "extras": all_extras})


def requirements(extras: Iterable[str]) -> List[str]:
    """Return the requirements that pyproject.toml lists for Impasto and these extras."""
    # tomllib alone takes seconds and gigabytes on some damaged files, which `read_toml` rejects immediately.
    from trainer.protocol.reading import read_toml

    try:
        project = read_toml(ROOT / "pyproject.toml", "config")["project"]
        groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    except (OSError, ValueError, KeyError, TypeError):
        raise SetupError(
            "pyproject.toml in this folder cannot be read", "Unpack Impasto into this folder again"
        ) from None
    return [line for group in groups for line in group]


def check_machine(needed_bytes: int) -> None:
    """Raise SetupError if the disk, Python or Windows would make the setup fail halfway."""
    free = shutil.disk_usage(str(ROOT)).free
    if free < needed_bytes:
        raise SetupError(
            f"the disk of {ROOT} has {free / GIB:.1f} GiB free, but the setup needs {needed_bytes / GIB:.0f} GiB",
            "Free some space, or move this folder to another disk, and try again",
        )
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupError(f"{version} cannot create virtual environments", f"Run: sudo apt install {version}-venv")
    query = ["reg", "query", r"HKLM\SYSTEM\CurrentControlSet\Control\FileSystem", "/v", "LongPathsEnabled"]
    if os.name == "nt" and len(str(ROOT)) > LONGEST_WINDOWS_ROOT and ask(query).split()[-1:] != ["0x1"]:
        raise SetupError(
            f"the path of this folder has {len(str(ROOT))} characters, so paths inside exceed Windows' limit of 260",
            "Move the folder to a shorter path, for example C:\\Impasto, and try again",
        )


def move_old_environment() -> None:
    """Rename `.venv` so that it can be restored; raise SetupError if a run is using it."""
    if not VENV.exists():
        return
    from trainer.protocol.run_directory import RunDirectory, known_runs

    remedy = "Wait until it ends, or pause it with: run.py pause RUN; then try again"
    alive = [run.name for run in known_runs() if RunDirectory(run).is_alive()]
    if alive:
        raise SetupError(f"a training run is using the environment ({', '.join(alive)})", remedy)
    shutil.rmtree(str(OLD_VENV), ignore_errors=True)
    try:
        VENV.rename(OLD_VENV)
    except PermissionError as error:  # Windows, while anything runs from it
        raise SetupError(
            "a running program is using the environment", "Close Impasto, wait until its runs have ended, and try again"
        ) from error


def restore_old_environment() -> None:
    """Restore the previous environment after a setup that failed or was killed halfway."""
    if OLD_VENV.exists() and not read_stamp():
        shutil.rmtree(str(VENV), ignore_errors=True)
        OLD_VENV.rename(VENV)
        say("The previous environment was restored.")


def pip(what: str, arguments: Sequence[str]) -> None:
    """Install packages into `.venv`, only from wheels, because users have no compiler."""
    options = ["--no-input", "--disable-pip-version-check", "--only-binary", ":all:"]
    step(what, [str(venv_python()), "-m", "pip", "install", *options, *arguments], shown=True)


def link_to_checkout() -> None:
    """Make `trainer` in this folder importable from the environment."""
    # A relative path, because Python before 3.13 reads .pth files in the system's encoding; moving the folder is fine.
    site = Path(ask([str(venv_python()), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    (site / "impasto.pth").write_text(os.path.relpath(str(ROOT), str(site)) + "\n", encoding="utf-8")


def venv_python() -> Path:
    """Return the path of the environment's interpreter."""
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def base_exists() -> bool:
    """Return whether the Python that the environment was created from is still installed."""
    home = re.search(r"(?m)^home *= *(.+?)\s*$", read_small(VENV / "pyvenv.cfg"))
    return home is not None and Path(home.group(1)).exists()


def read_small(path: Path) -> str:
    """Return the text of one of our small files; "" for a missing or huge file, a pipe or a folder."""
    try:
        return path.read_text("utf-8", "replace") if path.is_file() and path.stat().st_size < GIB // 1024 else ""
    except OSError:
        return ""


def read_stamp() -> Dict[str, Any]:
    """Return the stamp of a finished `.venv`; an empty dict if the stamp is missing or damaged."""
    try:
        stamp = json.loads(read_small(VENV / "impasto.json"))
    except (ValueError, RecursionError):
        return {}
    texts = [stamp.get(key) for key in ("requirements", "extras")] if isinstance(stamp, dict) else [None]
    valid = all(isinstance(each, list) and all(isinstance(text, str) for text in each) for each in texts)
    return stamp if valid else {}


def write_stamp(stamp: Dict[str, Any]) -> None:
    """Write the stamp that marks `.venv` as finished, as the last action of a setup."""
    (VENV / "impasto.json").write_text(json.dumps(stamp, indent=1), encoding="utf-8")


@contextlib.contextmanager
def setup_lock() -> Iterator[None]:
    """Hold the lock on the environment within the block; wait while another process holds it."""
    from trainer.protocol.locks import hold_lock, is_held

    STATE.mkdir(exist_ok=True)
    if is_held(STATE / "lock"):
        say("Waiting for another setup to finish.")
    with hold_lock(STATE / "lock", patience=float("inf")):
        yield


def pull() -> None:
    """Pull the newest files if this folder is an unmodified git checkout; otherwise explain how to get them."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        say("This folder is not a git checkout: unpack a newer download into it, then update. Your files are kept.")
    elif ask([git, "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]):
        say("Impasto's files were edited here, so nothing was fetched.")
    elif subprocess.call([git, "-C", str(ROOT), "pull", "--ff-only"]) != 0:
        say("Could not fetch a newer Impasto with git.")
    else:
        return
    say("Continuing with the current files.")


# --- processes, log and output --------------------------------------------------------------------------------------


def step(what: str, arguments: Sequence[str], shown: bool = False) -> None:
    """Run one step of the setup; raise SetupError with the reason found in its log.

    With `shown`, standard output goes to the terminal, where pip draws its progress; only errors go to the log.
    """
    say(f"- {what}")
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"\n- {what}: {list(arguments)}\n")
        log.flush()
        start = log.tell()
        code = subprocess.call(arguments, env=environment(), stdin=DEVNULL, stdout=None if shown else log, stderr=log)
    if code != 0:
        text = LOG.read_bytes()[start:].decode("utf-8", "replace")
        reasons = (failure[1:] for failure in KNOWN_FAILURES if re.search(failure[0], text))
        reason, remedy = next(reasons, (f"it ended with code {code}", "Read the end of the log and try again"))
        raise SetupError(f"{what} failed: {reason}", f"{remedy}. The log: {LOG}")


def begin_log(arguments: Sequence[str]) -> None:
    """Start this setup's log with the facts that a bug report needs."""
    STATE.mkdir(exist_ok=True)
    lines = [time.strftime("%Y-%m-%d %H:%M:%S"), f"Python {sys.version} at {sys.executable}", platform.platform()]
    LOG.write_text("\n".join([*lines, f"torch arguments: {list(arguments)}", ""]), encoding="utf-8")


def environment() -> Dict[str, str]:
    """Return the environment variables, except the ones that make Python or pip use another environment."""
    variables = {key: value for key, value in os.environ.items() if key not in LEAKS and not key.startswith("CONDA")}
    # Otherwise a folder named `trainer` in the current directory would be imported instead of ours.
    return {**variables, "PYTHONSAFEPATH": "1"}


def ask(arguments: Sequence[str]) -> str:
    """Return the output of a program; "" if it is missing, fails, or takes longer than 20 seconds."""
    try:
        output = subprocess.check_output(list(arguments), env=environment(), stdin=DEVNULL, stderr=DEVNULL, timeout=20)
    except (OSError, SubprocessError):
        return ""
    return output.decode("utf-8", "replace")


def hand_over(arguments: Sequence[str]) -> int:
    """Replace this process with another program; on Windows, run the program and return its exit code."""
    sys.stdout.flush()
    if os.name == "posix":
        os.execve(arguments[0], list(arguments), environment())
    # Windows has no exec that keeps the console. Ctrl-C reaches the program itself, which shuts down cleanly.
    process = subprocess.Popen(list(arguments), env=environment())
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()


def say(text: Optional[str]) -> None:
    """Print a message and flush the output."""
    print(text, flush=True)


def fail(what: str, remedy: str) -> int:
    """Print what failed and what to do; return a failure exit code."""
    say(f"\nCould not set up Impasto: {what}.\nWhat to do: {remedy}")
    return 1


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a path may contain characters that this console cannot show
    sys.exit(main(sys.argv[1:]))
