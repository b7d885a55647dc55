"""Sets Impasto up in its own folder, then starts what you ask for. Needs nothing but Python.

    python run.py                 open the window
    python run.py app [FOLDER]    open it with a folder of pictures
    python run.py shortcut        put an entry for the window on the desktop (Windows) or into the menu (Linux)
    python run.py demo            train a small LoRA on the bundled base; show before and after
    python run.py test [...]      run the tests; further words go to pytest
    python run.py test --gpu [...]  run the tests on an emulated NVIDIA GPU (Linux with g++)
    python run.py doctor          look at this machine and say what would keep training from working
    python run.py update          fetch the newest Impasto, where git can, and rebuild
    python run.py rebuild         set up again, for example after changing the graphics card
    python run.py WORD [...]      anything else goes to the trainer: new, train, resume, render, check, ...

Put --cpu before the word to set up without a graphics card.
"""

# Any Python since 3.6 must be able to read this file, to say which one is needed: no newer syntax here.
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
# The CPU environment takes 1.7 GiB, the CUDA libraries about 5 more; pip unpacks beside its download cache.
NEEDED_BYTES = {"cpu": 4 * GIB, "gpu": 14 * GIB}
# Paths inside the torch wheel reach 170 letters, and Windows ends at 260 unless long paths are switched on.
LONGEST_WINDOWS_ROOT = 80
# What a shell, conda or an IDE leaves behind would make pip and Python look in other environments than ours.
LEAKS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
# What the log says when a step fails, in the order of asking: a pattern, what happened, what to do.
KNOWN_FAILURES = (
    ("No space left|Errno 28|WinError 112", "the disk is full", "Free some space and start again"),
    ("CERTIFICATE_VERIFY|SSLError|ProxyError", "a proxy or virus scanner is in between",
     "Let it allow Python, or set HTTPS_PROXY"),
    ("NewConnection|NameResolution|Max retries", "the package index cannot be reached",
     "Connect to the internet and start again"),
    ("No matching distribution", "the index has no build of a library for this Python",
     "Install Python 3.12 and start again"),
    (r"WinError 126|WinError 1114|c10\.dll", "Microsoft's C++ runtime is missing",
     "Run: winget install Microsoft.VCRedist.2015+.x64"),
)  # fmt: skip


class SetupError(Exception):
    """Something that the user can mend: what happened, and what to do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


class Gpu(NamedTuple):
    """The strongest NVIDIA card, its compute capability (None: the driver cannot tell) and the driver's CUDA."""

    name: str
    capability: Optional[Tuple[int, int]]
    cuda: Tuple[int, int]


def main(words: Sequence[str]) -> int:
    """Do what the command line says; return the exit code."""
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
        return fail(str(error), f"Check that you may write to {ROOT} and that no other program holds its files")
    except KeyboardInterrupt:
        return fail("it was interrupted", "Start again; what was downloaded is kept")


def dispatch(command: str, rest: List[str], cpu: bool) -> int:
    """Go on with a Python that fits, prepare the environment, and hand over to the command."""
    if not python_fits(sys.version_info[:2], struct.calcsize("P") * 8):
        return hand_over([find_python(), str(ROOT / "run.py"), *sys.argv[1:]])
    sys.path.insert(0, str(ROOT))  # trainer.protocol has the locks, and needs the standard library only as well
    if command == "update":
        pull()
        # The pull may have replaced the file that is running: the new one goes on.
        return hand_over([sys.executable, str(ROOT / "run.py"), *(["--cpu"] if cpu else []), "rebuild"])
    if command == "rebuild":
        with setup_lock():
            restore_old_environment()
            build(read_stamp().get("extras", []), cpu)
        return 0
    if command == "test" and "--gpu" in rest:
        # It has an environment of its own, with another torch.
        words = [word for word in rest if word != "--gpu"]
        return hand_over([sys.executable, str(ROOT / "tests" / "emulated_gpu" / "environment.py"), *words])
    if command == "test":
        check_libraries(screen=False)
        python = prepare(["test"], cpu)
        os.chdir(str(ROOT))
        # Few processes: each of them takes a gigabyte, and one file's tests share what they make.
        words = ["-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder"]
        return hand_over([python, "-m", "pytest", *words, *rest])
    if command in ("app", "shortcut"):
        # Wayland, and a platform that somebody chose, need none of X.
        check_libraries(screen=not (os.environ.get("WAYLAND_DISPLAY") or os.environ.get("QT_QPA_PLATFORM")))
        python = prepare([], cpu)
        return open_window(rest) if command == "app" else hand_over([python, "-m", "app.shortcut"])
    return hand_over([prepare([], cpu), "-m", "trainer", command, *rest])


def check_libraries(screen: bool) -> None:
    """Raise SetupError with the command that installs what the window lacks on a Linux system."""
    from app.libraries import install_command, missing_libraries

    missing = missing_libraries(screen)
    if missing:
        raise SetupError(
            f"the window needs libraries that this system lacks: {', '.join(missing)}",
            f"Run: {install_command(missing)}; then start again",
        )


def open_window(paths: List[str]) -> int:
    """Open the window; on Windows it stands for itself, and this console may close."""
    if os.name == "posix":
        return hand_over([str(venv_python()), "-m", "app", *paths])
    arguments = [str(venv_python().with_name("pythonw.exe")), "-m", "app", *paths]
    flags = 0x00000008 | 0x00000200  # DETACHED_PROCESS, CREATE_NEW_PROCESS_GROUP
    subprocess.Popen(arguments, env=environment(), stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, creationflags=flags)
    return 0


# --- which Python, and which torch -----------------------------------------------------------------------------------


def python_fits(version: Tuple[int, ...], bits: int) -> bool:
    """Tell whether a Python of this (major, minor) and word size can run Impasto."""
    return (3, 11) <= tuple(version[:2]) <= (3, 14) and bits == 64


def find_python() -> str:
    """Return the path of a Python on this machine that fits; raises SetupError with the command that installs one."""
    code = "import struct, sys; print(sys.version_info[0], sys.version_info[1], struct.calcsize('P') * 8)"
    for candidate in python_candidates(ask(["py", "-0p"])):
        answer = ask([candidate, "-c", code]).split()
        if len(answer) == 3 and python_fits((int(answer[0]), int(answer[1])), int(answer[2])):
            return candidate
    here = f"{platform.python_version()}, {struct.calcsize('P') * 8} bit"
    raise SetupError(
        f"Impasto needs a 64-bit Python 3.11 to 3.14; this one is {here}, and no other was found",
        f"Install one, then start again: {python_install_command(platform.system())}",
    )


def python_candidates(launcher_list: str) -> Iterator[str]:
    """Yield interpreters worth asking: those in the list of Windows' `py -0p`, then `python3.x` on PATH."""
    # " -V:3.12 *        C:\Program Files\Python312\python.exe"; older launchers write " -3.11-64        C:\..."
    yield from re.findall(r"(?m)^[ \t]*-\S+(?:[ \t]+\*)?[ \t]+(\S.*\.exe)[ \t\r]*$", launcher_list)
    yield from filter(None, (shutil.which(f"python3.{minor}") for minor in (12, 13, 11, 14)))


def python_install_command(system: str) -> str:
    """Return the one command that installs a fitting Python here."""
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
    """Return pip's arguments for the torch build that runs here; `torch` is the requirement with its bounds.

    Builds for CUDA 13 need a driver that speaks it (R580) and a card from Turing (7.5) on. Builds for CUDA 12.6 need a
    driver that speaks CUDA 12 (R525) and a card from Maxwell (5.0) to Hopper (9.0). Source: the CUDA support matrix in
    PyTorch's RELEASE.md, 2.12 to 2.14. Raises SetupError where no build fits.
    """
    if gpu is None:
        # The public index's own build brings 2.5 GB of CUDA libraries on Linux, and none on Windows.
        return [torch, "--index-url", TORCH_INDEX + "cpu"] if system == "Linux" else [torch]
    without = "set up without the card: run.py --cpu rebuild"
    capability = gpu.capability or (7, 5)  # only drivers that are too old anyway do not tell
    if capability < (5, 0):
        raise SetupError(f"the {gpu.name} is too old for every torch build there is", without.capitalize())
    needed = 13 if capability >= (10, 0) else 12
    if gpu.cuda < (needed, 0):
        raise SetupError(
            f"the driver of the {gpu.name} is too old: it speaks CUDA {gpu.cuda[0]}.{gpu.cuda[1]}, not {needed}.0",
            f"Update the driver (nvidia.com/drivers) and start again, or {without}",
        )
    if gpu.cuda < (13, 0) or capability < (7, 5):
        return [torch, "--index-url", TORCH_INDEX + "cu126"]
    # The public index's own build is for CUDA 13 on Linux and for the CPU on Windows.
    return [torch] if system == "Linux" else [torch, "--index-url", TORCH_INDEX + "cu130"]


def detect_gpu() -> Optional[Gpu]:
    """Ask nvidia-smi for the strongest card; None where there is no card or no driver."""
    tool = shutil.which("nvidia-smi") or os.path.expandvars(r"%SYSTEMROOT%\System32\nvidia-smi.exe")
    banner = ask([tool])
    return parse_gpu(banner, ask([tool, "--query-gpu=compute_cap,name", "--format=csv,noheader"])) if banner else None


def parse_gpu(banner: str, query: str) -> Optional[Gpu]:
    """Read nvidia-smi's banner and its list of `compute_cap, name` lines.

    Newer Windows drivers write "CUDA UMD Version" for "CUDA Version"; drivers before R510 know no compute_cap.
    """
    cuda = re.search(r"CUDA (?:UMD )?Version:\s*(\d+)\.(\d+)", banner)
    if not cuda:
        return None
    version = (int(cuda.group(1)), int(cuda.group(2)))
    lines = re.findall(r"(?m)^(\d+)\.(\d+), *(.+?)\s*$", query)
    cards = [((int(major), int(minor)), name) for major, minor, name in lines]
    capability, name = max(cards, default=(None, "NVIDIA card"))
    return Gpu(name, capability, version)


def reachable(url: str) -> bool:
    """Tell whether a package index answers within five seconds."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (OSError, ValueError):
        return False


# --- the environment ------------------------------------------------------------------------------------------------


def prepare(extras: Sequence[str], cpu: bool) -> str:
    """Make sure that `.venv` holds what Impasto and `extras` need; return its interpreter."""
    if not is_ready(extras, cpu):
        with setup_lock():
            restore_old_environment()
            if is_ready([], cpu) and not is_ready(extras, cpu):
                add_extras(extras)
            elif not is_ready(extras, cpu):  # another start may have done it while this one waited
                build(sorted({*read_stamp().get("extras", []), *extras}), cpu)
    stamp = read_stamp()
    if not stamp.get("gpu") and not stamp.get("cpu") and detect_gpu():
        say("This environment was made before the NVIDIA card was here; to use the card: python run.py rebuild")
    return str(venv_python())


def is_ready(extras: Iterable[str], cpu: bool) -> bool:
    """Tell whether `.venv` runs and was made for the requirements of today; reads two small files."""
    stamp = read_stamp()
    made_for = stamp.get("requirements", [])
    wanted_device = not (cpu and stamp.get("gpu"))
    return wanted_device and set(requirements(extras)) <= set(made_for) and venv_python().exists() and base_exists()


def build(extras: List[str], cpu: bool) -> None:
    """Make `.venv` anew and prove that it starts; whatever stops it brings the environment of before back."""
    started = time.monotonic()
    gpu = None if cpu else detect_gpu()
    torch = next(line for line in requirements([]) if line.startswith("torch"))
    arguments = torch_arguments(platform.system(), gpu, torch)
    check_machine(NEEDED_BYTES["gpu" if gpu else "cpu"])
    if gpu is None and arguments != [torch] and not reachable(arguments[-1] + "/torch/"):
        arguments = [torch]  # offline, or a mirror that pip's own settings know
    begin_log(arguments)
    say(f"Setting up Impasto for {gpu.name if gpu else 'the CPU'} in {VENV} (a few minutes, once)")
    set_old_environment_aside()
    try:
        step("making the environment", [sys.executable, "-m", "venv", str(VENV)])
        pip("installing torch", arguments)
        version = ask([str(venv_python()), "-c", "import importlib.metadata as m; print(m.version('torch'))"]).strip()
        PINS.write_text(f"torch=={version}\n", encoding="utf-8")  # no later resolver swaps the torch build
        pip("installing the libraries", ["--constraint", str(PINS), *requirements(extras)])
        link_to_checkout()
        step("starting it once", [str(venv_python()), "-c", "import torch, trainer; print('torch', torch.__version__)"])
        write_stamp({"requirements": requirements(extras), "extras": extras, "gpu": gpu and gpu.name, "cpu": cpu})
    except BaseException:
        shutil.rmtree(str(VENV), ignore_errors=True)
        restore_old_environment()
        raise
    shutil.rmtree(str(OLD_VENV), ignore_errors=True)
    say(f"Ready after {time.monotonic() - started:.0f} s.\n")


def add_extras(extras: Sequence[str]) -> None:
    """Install what `extras` need into the environment that is there."""
    stamp = read_stamp()
    every = sorted({*stamp["extras"], *extras})
    begin_log([])
    pip(f"installing what {', '.join(extras)} needs", ["--constraint", str(PINS), *requirements(every)])
    write_stamp({**stamp, "requirements": requirements(every), "extras": every})


def requirements(extras: Iterable[str]) -> List[str]:
    """Return the requirements of Impasto and of some extras, as pyproject.toml names them."""
    # tomllib alone takes seconds and gigabytes for some damaged files, which `read_toml` refuses at once.
    from trainer.protocol.reading import read_toml

    try:
        project = read_toml(ROOT / "pyproject.toml", "config")["project"]
        groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    except (OSError, ValueError, KeyError, TypeError):
        raise SetupError("pyproject.toml in this folder cannot be read", "Unpack Impasto again over it") from None
    return [line for group in groups for line in group]


def check_machine(needed_bytes: int) -> None:
    """Raise SetupError where disk, Python or Windows would break the set-up half-way."""
    free = shutil.disk_usage(str(ROOT)).free
    if free < needed_bytes:
        raise SetupError(
            f"the disk of {ROOT} has {free / GIB:.1f} GiB free, and setting up needs {needed_bytes / GIB:.0f} GiB",
            "Free some space, or move this folder to another disk, and start again",
        )
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupError(f"this {version} cannot make environments", f"Run: sudo apt install {version}-venv")
    query = ["reg", "query", r"HKLM\SYSTEM\CurrentControlSet\Control\FileSystem", "/v", "LongPathsEnabled"]
    if os.name == "nt" and len(str(ROOT)) > LONGEST_WINDOWS_ROOT and ask(query).split()[-1:] != ["0x1"]:
        raise SetupError(
            f"the path of this folder has {len(str(ROOT))} letters, and files inside would pass Windows' limit of 260",
            "Move the folder up, for example to C:\\Impasto, and start again",
        )


def set_old_environment_aside() -> None:
    """Rename `.venv`, so that it can come back; raises SetupError while a run needs it."""
    if not VENV.exists():
        return
    from trainer.protocol.run_directory import RunDirectory, known_runs

    remedy = "Wait for it, or pause it with: run.py pause RUN; then start again"
    alive = [run.name for run in known_runs() if RunDirectory(run).is_alive()]
    if alive:
        raise SetupError(f"training is going on ({', '.join(alive)}), and it needs the environment as it is", remedy)
    shutil.rmtree(str(OLD_VENV), ignore_errors=True)
    try:
        VENV.rename(OLD_VENV)
    except PermissionError as error:  # Windows, while anything runs from it
        raise SetupError("a program is running from the environment that is to be replaced", remedy) from error


def restore_old_environment() -> None:
    """Bring the environment of before back where a set-up failed or was killed half-way."""
    if OLD_VENV.exists() and not read_stamp():
        shutil.rmtree(str(VENV), ignore_errors=True)
        OLD_VENV.rename(VENV)
        say("The environment of before is back in place.")


def pip(what: str, arguments: Sequence[str]) -> None:
    """Install into `.venv`; wheels only, because an artist's computer has no compiler."""
    options = ["--no-input", "--disable-pip-version-check", "--only-binary", ":all:"]
    step(what, [str(venv_python()), "-m", "pip", "install", *options, *arguments], shown=True)


def link_to_checkout() -> None:
    """Let the environment import `trainer` from this folder."""
    # A relative path: Pythons before 3.13 read .pth files in the system's encoding, and a moved folder still works.
    site = Path(ask([str(venv_python()), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    (site / "impasto.pth").write_text(os.path.relpath(str(ROOT), str(site)) + "\n", encoding="utf-8")


def venv_python() -> Path:
    """Return where the environment's interpreter lies."""
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def base_exists() -> bool:
    """Tell whether the Python that the environment was made from is still installed."""
    home = re.search(r"(?m)^home *= *(.+?)\s*$", read_small(VENV / "pyvenv.cfg"))
    return home is not None and Path(home.group(1)).exists()


def read_small(path: Path) -> str:
    """Return the text of one of our small files; empty for a missing or huge one, a pipe, and a folder."""
    try:
        return path.read_text("utf-8", "replace") if path.is_file() and path.stat().st_size < GIB // 1024 else ""
    except OSError:
        return ""


def read_stamp() -> Dict[str, Any]:
    """Return what was written when `.venv` was finished; empty where it never was."""
    try:
        stamp = json.loads(read_small(VENV / "impasto.json"))
    except (ValueError, RecursionError):
        return {}
    texts = [stamp.get(key) for key in ("requirements", "extras")] if isinstance(stamp, dict) else [None]
    sound = all(isinstance(each, list) and all(isinstance(text, str) for text in each) for each in texts)
    return stamp if sound else {}


def write_stamp(stamp: Dict[str, Any]) -> None:
    """Note that `.venv` is finished, and for what; the last thing that a set-up does."""
    (VENV / "impasto.json").write_text(json.dumps(stamp, indent=1), encoding="utf-8")


@contextlib.contextmanager
def setup_lock() -> Iterator[None]:
    """Hold the one right to change the environment, waiting for another start that holds it."""
    from trainer.protocol.locks import hold_lock, is_held

    STATE.mkdir(exist_ok=True)
    if is_held(STATE / "lock"):
        say("Another start is setting up; waiting for it.")
    with hold_lock(STATE / "lock", patience=float("inf")):
        yield


def pull() -> None:
    """Fetch the newest files where this folder is an untouched git checkout; else say how to get them."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        say("This folder is no git checkout: unpack a newer download over it, then update again. Your files stay.")
    elif ask([git, "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]):
        say("Files of Impasto were edited here, so git fetches nothing.")
    elif subprocess.call([git, "-C", str(ROOT), "pull", "--ff-only"]) != 0:
        say("git could not fetch a newer Impasto.")
    else:
        return
    say("Going on with the files that are here.")


# --- processes, the log, words --------------------------------------------------------------------------------------


def step(what: str, arguments: Sequence[str], shown: bool = False) -> None:
    """Run one part of the set-up; raises SetupError in words that fit what it wrote into the log.

    With `shown` its standard output, where pip draws its progress, goes to the terminal; only its errors to the log.
    """
    say(f"- {what}")
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"\n- {what}: {list(arguments)}\n")
        log.flush()
        start = log.tell()
        code = subprocess.call(arguments, env=environment(), stdin=DEVNULL, stdout=None if shown else log, stderr=log)
    if code != 0:
        text = LOG.read_bytes()[start:].decode("utf-8", "replace")
        known = (failure[1:] for failure in KNOWN_FAILURES if re.search(failure[0], text))
        reason, remedy = next(known, (f"it ended with code {code}", "Read the end of the log, and start again"))
        raise SetupError(f"{what} failed: {reason}", f"{remedy}. The log: {LOG}")


def begin_log(arguments: Sequence[str]) -> None:
    """Start the log of this set-up with what a helper would ask first."""
    STATE.mkdir(exist_ok=True)
    lines = [time.strftime("%Y-%m-%d %H:%M:%S"), f"Python {sys.version} at {sys.executable}", platform.platform()]
    LOG.write_text("\n".join([*lines, f"torch arguments: {list(arguments)}", ""]), encoding="utf-8")


def environment() -> Dict[str, str]:
    """Return the environment variables without those that would lead Python or pip elsewhere."""
    kept = {key: value for key, value in os.environ.items() if key not in LEAKS and not key.startswith("CONDA")}
    # Else a folder named `trainer` where the user stands would be started instead of ours.
    return {**kept, "PYTHONSAFEPATH": "1"}


def ask(arguments: Sequence[str]) -> str:
    """Return what a program prints; empty where it is missing, fails, or says nothing for 20 seconds."""
    try:
        said = subprocess.check_output(list(arguments), env=environment(), stdin=DEVNULL, stderr=DEVNULL, timeout=20)
    except (OSError, SubprocessError):
        return ""
    return said.decode("utf-8", "replace")


def hand_over(arguments: Sequence[str]) -> int:
    """Let another program go on in this one's place; return its exit code."""
    sys.stdout.flush()
    if os.name == "posix":
        os.execve(arguments[0], list(arguments), environment())
    # Windows has no exec that keeps the console; Ctrl-C reaches the program itself, which ends in its own order.
    process = subprocess.Popen(list(arguments), env=environment())
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()


def say(text: Optional[str]) -> None:
    """Print for the user, at once."""
    print(text, flush=True)


def fail(what: str, remedy: str) -> int:
    """Print what failed and what to do; return the exit code for a fault."""
    say(f"\nImpasto could not be set up: {what}.\nWhat to do: {remedy}")
    return 1


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a folder's name may hold letters that this console cannot show
    sys.exit(main(sys.argv[1:]))
