"""run.py: which torch a machine gets, which Python is taken, and real set-ups from small wheels made here."""

import ast
import copy
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from app import libraries
from tests.support import ROOT
from tests.support.bad_contents import BAD, SPECIAL, make_special
from trainer.protocol.run_directory import RunDirectory

TORCH = "torch>=2.10,<2.14"
INDEX = "https://download.pytorch.org/whl/"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The module run.py, its folder moved to an empty one."""
    spec = importlib.util.spec_from_file_location("run", ROOT / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "STATE", tmp_path / ".run")
    monkeypatch.setattr(module, "LOG", tmp_path / ".run" / "setup.log")
    return module


# --- reading and choosing -------------------------------------------------------------------------------------------


def imported(nodes):
    """The modules that these nodes of a syntax tree import."""
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return {getattr(node, "module", None) or alias.name for node in imports for alias in node.names}


def test_an_old_python_can_read_the_file_and_needs_no_package():
    tree = ast.parse((ROOT / "run.py").read_text(encoding="utf-8"), feature_version=(3, 6))
    ours = {name for name in imported(ast.walk(tree)) if name.startswith(("app", "trainer"))}
    assert {name.split(".")[0] for name in imported(ast.walk(tree)) - ours} <= sys.stdlib_module_names
    # Of ours it takes only what needs no package either: of all of the protocol the import contracts say so.
    assert {name for name in ours if not name.startswith("trainer.protocol")} == {"app.libraries"}
    libraries_tree = ast.parse((ROOT / "app" / "libraries.py").read_text(encoding="utf-8"))
    assert imported(ast.walk(libraries_tree)) <= sys.stdlib_module_names | {"collections.abc"}
    # What an old Python lacks may be imported inside functions that a fitting one runs, never at the top.
    assert not {"tomllib", *ours} & imported(tree.body)


@pytest.mark.parametrize(
    ("version", "bits", "fits"),
    [((3, 10), 64, False), ((3, 11), 64, True), ((3, 14), 64, True), ((3, 15), 64, False), ((3, 12), 32, False)],
)
def test_python_fits(run, version, bits, fits):
    assert run.python_fits(version, bits) is fits


@pytest.mark.parametrize(
    ("system", "card", "expected"),
    [
        ("Linux", None, [TORCH, "--index-url", INDEX + "cpu"]),
        ("Windows", None, [TORCH]),
        ("Darwin", None, [TORCH]),
        ("Linux", ((8, 9), (13, 0)), [TORCH]),
        ("Windows", ((8, 9), (13, 0)), [TORCH, "--index-url", INDEX + "cu130"]),
        ("Windows", ((7, 5), (13, 2)), [TORCH, "--index-url", INDEX + "cu130"]),  # Turing, the oldest of CUDA 13
        ("Windows", ((12, 0), (13, 0)), [TORCH, "--index-url", INDEX + "cu130"]),
        ("Linux", ((6, 1), (13, 0)), [TORCH, "--index-url", INDEX + "cu126"]),  # Pascal, whatever the driver
        ("Windows", ((7, 0), (12, 4)), [TORCH, "--index-url", INDEX + "cu126"]),
        ("Linux", ((8, 6), (12, 8)), [TORCH, "--index-url", INDEX + "cu126"]),  # old driver
        ("Linux", (None, (12, 0)), [TORCH, "--index-url", INDEX + "cu126"]),  # a driver that knows no compute_cap
    ],
)
def test_torch_arguments(run, system, card, expected):
    gpu = card and run.Gpu("GeForce", *card)
    assert run.torch_arguments(system, gpu, TORCH) == expected


@pytest.mark.parametrize(
    ("card", "what"),
    [
        (((12, 0), (12, 8)), "it supports CUDA 12.8, not 13.0"),  # Blackwell
        (((8, 6), (11, 8)), "it supports CUDA 11.8, not 12.0"),
        (((3, 5), (12, 0)), "too old: no torch build supports it"),
    ],
)
def test_a_card_or_driver_that_no_build_serves_is_told_what_to_do(run, card, what):
    with pytest.raises(run.SetupError, match=what) as caught:
        run.torch_arguments("Windows", run.Gpu("GeForce RTX 5090", *card), TORCH)
    assert "run.py --cpu" in caught.value.remedy
    assert "GeForce RTX 5090" in str(caught.value)


BANNER = "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0     |"
NEW_BANNER = "| NVIDIA-SMI 610.12   KMD Version: 610.12   CUDA UMD Version: 13.3     |"


@pytest.mark.parametrize(
    ("banner", "query", "expected"),
    [
        (BANNER, "8.9, NVIDIA GeForce RTX 4090\n", ("NVIDIA GeForce RTX 4090", (8, 9), (13, 0))),
        (NEW_BANNER, "7.5, A, with comma\r\n", ("A, with comma", (7, 5), (13, 3))),
        (BANNER, "6.1, GTX 1080\n12.0, RTX 5090\n8.6, RTX 3060\n", ("RTX 5090", (12, 0), (13, 0))),
        (BANNER.replace("13.0", "11.2"), "", ("NVIDIA GPU", None, (11, 2))),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "", None),
    ],
)
def test_parse_gpu(run, banner, query, expected):
    assert run.parse_gpu(banner, query) == expected


def test_windows_launcher_lists_are_read_in_both_forms(run, monkeypatch):
    monkeypatch.setattr(run.shutil, "which", lambda name: None)
    listing = (
        " -V:3.15          C:\\Python315\\python.exe\r\n"
        " -V:3.12 *        C:\\Program Files\\Python312\\python.exe\r\n"
        " -3.11-64         C:\\Users\\Jürgen Groß\\Python311\\python.exe\r\n"
        "No installed Pythons found!\r\n"
    )
    assert list(run.python_candidates(listing)) == [
        "C:\\Python315\\python.exe",
        "C:\\Program Files\\Python312\\python.exe",
        "C:\\Users\\Jürgen Groß\\Python311\\python.exe",
    ]


def test_a_python_that_fits_is_found_and_else_the_command_is_named(run, monkeypatch):
    monkeypatch.setattr(run, "python_candidates", lambda listing: ["no-such-python", sys.executable])
    assert run.find_python() == sys.executable
    monkeypatch.setattr(run, "python_candidates", lambda listing: ["no-such-python"])
    with pytest.raises(run.SetupError, match=r"3\.11 to 3\.14") as caught:
        run.find_python()
    assert run.python_install_command(run.platform.system()) in caught.value.remedy
    assert run.python_install_command("Windows").startswith("winget install")


def test_a_full_disk_is_told_before_anything_is_written(run, tmp_path):
    with pytest.raises(run.SetupError, match=r"GiB free, but the setup needs 1048576 GiB"):
        run.check_machine(2**50)
    run.check_machine(1)
    assert not list(tmp_path.iterdir())


def test_variables_that_lead_elsewhere_are_dropped(run, monkeypatch):
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PIP_TARGET"):
        monkeypatch.setenv(name, "elsewhere")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    environment = run.environment()
    assert "elsewhere" not in environment.values()
    assert environment["HTTPS_PROXY"] == "http://proxy"


@pytest.mark.parametrize(
    ("output", "what"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]", "proxy or virus scanner"),
        ("Failed to establish a new connection: NewConnectionError; No matching distribution", "cannot be reached"),
        ("ERROR: No matching distribution found for torch<2.14,>=2.10", "no build of a library"),
        ("OSError: [WinError 126] Error loading c10.dll or one of its dependencies", "C\\+\\+ runtime is missing"),
        ("something new", "ended with code 3"),
    ],
)
def test_a_failed_step_says_what_happened(run, output, what):
    run.begin_log([])
    code = "import sys; print(sys.argv[1], file=sys.stderr); sys.exit(3)"
    with pytest.raises(run.SetupError, match=f"making it failed: .*{what}"):
        run.step("making it", [sys.executable, "-c", code, output])
    assert output in run.LOG.read_text(encoding="utf-8")


def test_an_environment_that_a_run_needs_is_not_replaced(run, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "ROOT", ROOT)
    monkeypatch.setattr(run, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(run, "OLD_VENV", tmp_path / ".venv-old")
    run.VENV.mkdir()
    with RunDirectory.create(tmp_path, "Blüten").hold():
        with pytest.raises(run.SetupError, match="a training run is using the environment \\(Blüten\\)"):
            run.move_old_environment()
        assert run.VENV.exists()
    run.move_old_environment()
    assert run.OLD_VENV.exists()
    assert not run.VENV.exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere Qt's wheels hold all that it needs")
def test_libraries_that_the_window_lacks_are_named_with_the_command(run, monkeypatch):
    monkeypatch.setattr(libraries, "ALWAYS", {"libc.so.6": "libc6"})
    monkeypatch.setattr(libraries, "ON_X", {"libnowhere.so.1": "nowhere", "libnever.so.2": "never"})
    run.check_libraries(screen=False)
    monkeypatch.setattr(libraries.shutil, "which", lambda tool: tool if tool == "apt-get" else None)
    with pytest.raises(run.SetupError, match=r"not installed: libnowhere\.so\.1, libnever\.so\.2$") as caught:
        run.check_libraries(screen=True)
    assert caught.value.remedy == "Install them, then try again: sudo apt-get install nowhere never"


# --- real set-ups ---------------------------------------------------------------------------------------------------


def write_wheel(folder, name, version, source, requires=()):
    """A wheel of one module, as pip takes it."""
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", source)
        wheel.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


class Checkout:
    """A folder with run.py and a trainer that tells its arguments, which installs from small wheels made here."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "Größe mit Leerzeichen" / "impasto"
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        (self.root / "trainer").mkdir(parents=True)
        (self.root / "run.py").write_bytes((ROOT / "run.py").read_bytes())
        # Without what other processes may be compiling there at this moment.
        sources = ROOT / "trainer" / "protocol"
        shutil.copytree(sources, self.root / "trainer" / "protocol", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("__init__.py", "errors.py"):
            shutil.copy(ROOT / "trainer" / name, self.root / "trainer")
        (self.root / "trainer" / "__main__.py").write_text(
            "import sys, torch, library; print(sys.argv[1:], torch.__version__, library.NAME)", encoding="utf-8"
        )
        (self.root / "app").mkdir()
        (self.root / "app" / "__main__.py").write_text("import sys; print('the window with', sys.argv[1:])", "utf-8")
        write_wheel(self.wheels, "torch", "2.13.0", "__version__ = 'chosen build'")
        write_wheel(self.wheels, "library", "1.0", "NAME = 'library 1'")
        write_wheel(self.wheels, "extra", "1.0", "NAME = 'extra'")
        self.require("torch>=2.10,<2.14", "library<2")

    def require(self, *dependencies: str) -> None:
        text = f"[project]\ndependencies = {list(dependencies)}\n[project.optional-dependencies]\ntest = ['extra']\n"
        (self.root / "pyproject.toml").write_text(text, encoding="utf-8")

    def start(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
        environment = {
            **os.environ,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": self.wheels.as_uri(),
            "PYTHONPATH": "/nowhere",
        }
        environment["PIP_CONFIG_FILE"] = os.devnull
        command = [sys.executable, str(self.root / "run.py"), *words]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, encoding="utf-8", check=False)

    def files(self) -> dict[str, int]:
        """The environment's own files with the times of their last change."""
        return {
            str(p): p.stat().st_mtime_ns for p in (self.root / ".venv").rglob("*") if p.suffix != ".pyc" and p.is_file()
        }


@pytest.fixture(scope="module")
def set_up(tmp_path_factory):
    """A checkout after its first start, and what that said."""
    checkout = Checkout(tmp_path_factory.mktemp("checkout"))
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "trainer").mkdir()  # a folder of the user's that must not be started instead
    (elsewhere / "trainer" / "__main__.py").write_text("print('the wrong one')", encoding="utf-8")
    return checkout, checkout.start("--cpu", "train", "my job.toml", cwd=elsewhere)


def test_the_first_start_sets_up_and_hands_over(set_up):
    checkout, first = set_up
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout.splitlines()[-1] == "['train', 'my job.toml'] chosen build library 1"
    assert (checkout.root / ".venv" / "constraints.txt").read_text(encoding="utf-8") == "torch==2.13.0\n"
    assert "library-1.0" in first.stdout  # pip's own progress reaches the terminal


@pytest.mark.skipif(os.name == "nt", reason="Windows opens it in a process of its own, whose words nobody sees")
def test_no_word_opens_the_window(set_up):
    checkout, _ = set_up
    assert checkout.start().stdout == "the window with []\n"
    assert checkout.start("app", "my pictures").stdout == "the window with ['my pictures']\n"


def test_the_second_start_touches_nothing(set_up):
    checkout, _ = set_up
    before = checkout.files()
    second = checkout.start("doctor")
    assert second.stdout == "['doctor'] chosen build library 1\n"
    assert checkout.files() == before


def test_a_rebuild_that_fails_leaves_the_environment_as_it_was(set_up):
    checkout, _ = set_up
    before = checkout.files()
    checkout.require("torch>=2.10,<2.14", "library<2", "nowhere-to-be-found")
    failed = checkout.start("--cpu", "rebuild")
    checkout.require("torch>=2.10,<2.14", "library<2")
    assert failed.returncode == 1
    assert "installing the libraries failed: the index has no build of a library" in failed.stdout
    assert "What to do: " in failed.stdout
    assert str(checkout.root / ".run" / "setup.log") in failed.stdout
    assert "Traceback" not in failed.stdout + failed.stderr
    assert checkout.files() == before
    assert not (checkout.root / ".venv-old").exists()
    assert checkout.start("doctor").stdout == "['doctor'] chosen build library 1\n"


def test_a_set_up_that_was_killed_brings_the_old_environment_back(set_up):
    checkout, _ = set_up
    before = checkout.files()
    (checkout.root / ".venv").rename(checkout.root / ".venv-old")
    (checkout.root / ".venv" / "bin").mkdir(parents=True)
    after = checkout.start("doctor")
    assert after.stdout.splitlines()[-1] == "['doctor'] chosen build library 1"
    assert checkout.files() == before


def test_what_tests_need_is_added_without_swapping_torch(set_up):
    checkout, _ = set_up
    write_wheel(checkout.wheels, "torch", "2.13.9", "__version__ = 'another build'")
    write_wheel(checkout.wheels, "extra", "2.0", "", requires=["torch>=2.13.5"])  # alone it would bring the other torch
    result = checkout.start("test")
    (checkout.wheels / "torch-2.13.9-py3-none-any.whl").unlink()
    assert "No module named pytest" in result.stderr  # the stand-in for what tests need brings none
    assert checkout.start("doctor").stdout == "['doctor'] chosen build library 1\n"
    stamp = json.loads((checkout.root / ".venv" / "impasto.json").read_text(encoding="utf-8"))
    assert (stamp["extras"], stamp["cpu"]) == (["test"], True)


def test_update_fetches_with_git_and_keeps_what_is_the_users(set_up, tmp_path):
    checkout, _ = set_up
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main", "-C"]
    for words in (["init", "-q"], ["add", "run.py", "pyproject.toml", "trainer"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, str(checkout.root), *words], check=True)
    clone = copy.copy(checkout)
    clone.root = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(checkout.root), str(clone.root)], check=True)
    (clone.root / "runs").mkdir()
    (clone.root / "runs" / "job.toml").write_text("mine", encoding="utf-8")
    (checkout.root / "trainer" / "__main__.py").write_text("print('newer')", encoding="utf-8")
    subprocess.run([*git, str(checkout.root), "commit", "-q", "-a", "-m", "second"], check=True)

    updated = clone.start("--cpu", "update")
    assert updated.returncode == 0, updated.stdout + updated.stderr
    assert clone.start("doctor").stdout == "newer\n"
    assert (clone.root / "runs" / "job.toml").read_text(encoding="utf-8") == "mine"

    (clone.root / "trainer" / "__main__.py").write_text("print('edited')", encoding="utf-8")
    checkout.require("torch", "nowhere-to-be-found")
    subprocess.run([*git, str(checkout.root), "commit", "-q", "-a", "-m", "third"], check=True)
    project = clone.root / "pyproject.toml"
    sound = project.read_bytes()
    project.write_text("[project", encoding="utf-8")  # ends the second rebuild, which takes seconds, at its start
    refused = clone.start("--cpu", "update")
    assert "Impasto's files were edited here, so nothing was fetched." in refused.stdout
    assert "pyproject.toml in this folder cannot be read" in refused.stdout
    project.write_bytes(sound)
    assert clone.start("doctor").stdout == "edited\n"


# --- the emulated GPU -------------------------------------------------------------------------------------------------


def emulated_gpu(*words, **variables):
    """Start run.py's command for it; `IMPASTO_HOME` is this test's empty folder."""
    command = [sys.executable, str(ROOT / "run.py"), "test", "--gpu", *words]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, encoding="utf-8", check=False)


def test_the_emulated_gpu_is_set_up_only_when_asked_for(per_user_folder):
    done = emulated_gpu("--if-built")
    assert done.returncode == 0, done.stderr
    assert "Skipped the tests on the emulated GPU" in done.stdout
    assert "Run: python3 run.py test --gpu" in done.stdout or "needs" in done.stdout
    assert not (per_user_folder / "emulated-gpu" / "venv").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the emulated GPU is for Linux")
def test_the_emulated_gpu_names_the_tools_it_needs(tmp_path):
    done = emulated_gpu(PATH=str(tmp_path))
    assert done.returncode == 1
    assert "the emulated GPU needs g++, nm, readelf" in done.stdout
    assert "sudo apt install g++ binutils" in done.stdout


@pytest.mark.parametrize("what", [*BAD, *SPECIAL])
def test_its_own_small_files_may_hold_anything(run, tmp_path, monkeypatch, what):
    monkeypatch.setattr(run, "VENV", tmp_path)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    for name in ("impasto.json", "pyvenv.cfg", "pyproject.toml"):
        if what in BAD:
            (tmp_path / name).write_bytes(BAD[what])
        elif not make_special(tmp_path / name, what):
            pytest.skip("this system has no such thing")
    assert run.read_stamp() == {} and not run.base_exists()
    with pytest.raises(run.SetupError, match=r"pyproject\.toml in this folder cannot be read"):
        run.requirements([])
