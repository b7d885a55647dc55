"""What the command line shows people holds nothing that steers a terminal, whoever wrote it."""

import argparse
import ast
import dataclasses
import io
import json
import logging
import sys
import types
import typing
import unicodedata
from pathlib import Path

import pytest

from tests.support.images import photograph
from tests.support.runs import write_run
from tests.unit.cli.test_files import safetensors
from trainer import cli
from trainer.cli import common, doctor
from trainer.cli.common import quieten
from trainer.cli.display import RunLog, open_display
from trainer.cli.doctor import DoctorCheck
from trainer.errors import JobError
from trainer.protocol import events
from trainer.protocol.queue import Queue
from trainer.protocol.text import printable, printable_lines

# A color, C1's own CSI, a mark that reverses text, a space of no width, a line break that few programs see.
STEERING = "\x1b[7;35m\x9b31m\u202e\u200b\u2028\x7f"
MARKER = f"odd{STEERING}name"
FORGED = "Error: everything is lost"
# Windows allows fewer characters in names, and no line breaks.
FILE = "odd\u202e\u200b\u2028name" if sys.platform == "win32" else f"{MARKER}\n{FORGED}"

# What each command is given, and whether it shows the marker. {job}, {run} and so on are names and files with a marker.
COMMANDS = {
    "new": [(["new", "--base", "{base}", "--images", "{folder}", "mine"], True),
            (["new", "--base", "own/er", "--images", "{missing}", "mine"], True)],
    "train": [(["train", "{bad_job}"], True), (["train", "{job}", "--set", "{text}"], True),
              (["train", "{job}", "--recipe", "{text}"], True)],
    "resume": [(["resume", "{text}"], True)],
    "stop": [(["stop", "{run}"], True)],
    "pause": [(["pause", "{run}"], True)],
    "save": [(["save", "{run}"], True)],
    "sample": [(["sample", "{text}"], True)],
    "watch": [(["watch", "{run}"], True)],
    "runs": [(["runs"], True)],
    "check": [(["check", "{folder}", "--show-captions", "--all"], True), (["check", "{bad_job}"], True),
              (["check", "{missing}"], True), (["check", "{kohya}"], True)],
    "inspect": [(["inspect", "{lora}"], True), (["inspect", "{folder}"], True), (["inspect", "{missing}"], True)],
    "lora check": [(["lora", "check", "{lora}"], False), (["lora", "check", "{missing}"], True)],
    "lora convert": [(["lora", "convert", "{lora}", "--to", "kohya", "--out", "{missing}"], True)],
    "lora extract": [(["lora", "extract", "{base}", "{missing}", "--rank", "4", "--out", "{file}.safetensors"], True)],
    "lora merge": [(["lora", "merge", "{lora}={text}", "--out", "{file}.safetensors"], True),
                   (["lora", "merge", "{lora}", "--into", "{missing}", "--out", "{file}.safetensors"], True)],
    "lora resize": [(["lora", "resize", "{lora}", "--rank", "1", "--out", "{missing}"], True)],
    "lora metadata": [(["lora", "metadata", "{lora}"], True),
                      (["lora", "metadata", "{lora}", "--remove", "{text}"], True),
                      (["lora", "metadata", "{lora}", "--set", "{text}"], True),
                      (["lora", "metadata", "{lora}", "--out", "{missing}"], True)],
    "render": [(["render", "--base", "{base}", "--prompt", "a", "--sampler", "{text}"], True),
               (["render", "--base", "{base}", "--prompt", "a", "--lora", "{lora}:{text}"], True)],
    "demo": [(["demo", "--out", "{file}"], False)],
    "plan": [(["plan", "{bad_job}"], True), (["plan", "--family", "sdxl", "--gpu", "{text}"], True)],
    "doctor": [(["doctor", "--quick"], True)],
    "prune": [(["prune"], False)],
    "presets list": [(["presets", "list"], True)],
    "methods": [(["methods"], False)],
    "lr-find": [(["lr-find", "{bad_job}"], True), (["lr-find", "{job}", "--from", "2"], True)],
    "sweep": [(["sweep"], False), (["sweep", "{text}"], True), (["sweep", "{job}", "--set", "{text}=1,2"], True)],
    "presets show": [(["presets", "show", "{text}"], True), (["presets", "show", "{preset}"], True)],
    "presets check": [(["presets", "check", "{bad_preset}"], True)],
    "presets share": [(["presets", "share", "{lora}", "--out", "{file}.toml"], True),
                      (["presets", "share", "{text}", "--out", "{file}.toml"], True)],
    "presets add": [(["presets", "add", "{bad_preset}"], True)],
    "queue list": [(["queue", "list"], True)],
    "queue add": [(["queue", "add", "{job}"], True), (["queue", "add", "{text}"], True)],
    "queue run": [(["queue", "run"], False)],
    "queue": [(["queue"], False)],
    "queue move": [(["queue", "move", "{text}"], True)],
    "queue after": [(["queue", "after", "{text}", "22:30"], True)],
    "queue remove": [(["queue", "remove", "{text}"], True)],
    "queue pause": [(["queue", "pause", "{text}"], True)],
    "queue stop": [(["queue", "stop", "{text}"], True)],
    "queue withdraw": [(["queue", "withdraw", "{text}"], True)],
    "queue resume": [(["queue", "resume"], False), (["queue", "resume", "{text}"], True)],
    "queue hold": [(["queue", "hold"], False)],
    "queue clear": [(["queue", "clear"], False)],
    "queue on-failure": [(["queue", "on-failure", "hold"], False)],
}  # fmt: skip
# These need torch, weights or a worker's children; what they print of events and errors is shown below.
NOT_RUN_HERE = {"demo", "prune", "queue", "queue run"}


def require_harmless(text, marker=STEERING):
    odd = [letter for letter in text if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert [letter for letter in odd if letter != "\n"] == []
    assert not any(line.startswith(FORGED) for line in text.split("\n"))
    assert marker not in text


@pytest.fixture
def things(tmp_path, monkeypatch):
    """Files, runs, presets and queue entries that all have a marker in their names and texts."""
    here = tmp_path / FILE
    folder = here / f"pictures {FILE}"
    folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    photograph().resize((256, 256)).save(folder / f"{FILE}.png")
    (folder / f"{FILE}.txt").write_text(f"a cat, {MARKER}", encoding="utf-8")
    (folder / f"broken {FILE}.png").write_bytes(b"nothing")
    job = here / f"{FILE}.toml"
    lines = ["schema = 1", 'name = "odd \u202e\u200b name"', "[base]", 'model = "own/er"', "[[dataset.folders]]"]
    job.write_text("\n".join([*lines, f"path = {json.dumps(folder.name)}"]).replace("\\n", "x"), encoding="utf-8")
    bad_job = here / f"bad {FILE}.toml"
    bad_job.write_text(
        'schema = 1\n"odd\\u001b\\u202ekey" = 1\n[recipe]\nrank = "odd\\u001b\\u202e"\n', encoding="utf-8"
    )
    kohya = here / f"kohya {FILE}.toml"
    kohya.write_text(
        "[general]\nodd\u202eoption = 1\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = "
        + json.dumps(str(folder)) + '\n"odd\\u001bkey" = 3\n', encoding="utf-8",
    )  # fmt: skip
    layer = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"
    lora = safetensors(
        here / f"{FILE}.safetensors",
        {f"{layer}.lora_down.weight": [4, 768], f"{layer}.lora_up.weight": [320, 4]},
        {"modelspec.title": MARKER, MARKER: MARKER, "ss_network_dim": "4", "ss_optimizer": MARKER,
         "modelspec.author": MARKER},
    )  # fmt: skip
    run = write_run(here / f"runs {FILE}", "mine", steps=10)
    with events.EventWriter(run.events, 2) as writer:
        for event in every_event():
            if not isinstance(event, events.UnknownEvent):
                writer.write(event)
        writer.write(events.Finished("failed", 1, MARKER, MARKER))
    renamed = run.path.rename(run.path.with_name(FILE))
    runs_list = home_folder() / "runs.jsonl"
    runs_list.write_text(json.dumps({"path": str(renamed)}, ensure_ascii=False) + "\n", encoding="utf-8")
    presets = home_folder() / "presets"
    presets.mkdir()
    text = 'schema = 1\nname = "mine"\nnotes = """odd\u200dname"""\n[base]\nfamily = "sdxl"\n[recipe]\nrank = 4\n'
    (presets / f"{FILE}.toml").write_text(text, encoding="utf-8")
    bad_preset = presets / f"bad {FILE}.toml"
    bad_preset.write_text(
        text.replace("rank", '"odd\\u001b\\u202e"').replace("mine", "odd\u202ename"), encoding="utf-8"
    )
    Queue().add(job)
    return {
        "job": job, "bad_job": bad_job, "kohya": kohya, "folder": folder, "missing": here / f"no {FILE}", "lora": lora,
        "run": renamed, "text": MARKER, "preset": presets / f"{FILE}.toml", "bad_preset": bad_preset,
        "base": here / f"none {FILE}.safetensors", "file": here / f"new {FILE}",
    }  # fmt: skip


def home_folder():
    from trainer.protocol import places

    home = places.home()
    home.mkdir(exist_ok=True)
    return home


def commands(parser, prefix=""):
    """Return the names of all commands that can be run, nested ones after their group."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    names = [prefix] if prefix and parser.get_default("command") else []
    for group in groups:
        for name, inner in group.choices.items():
            names += commands(inner, f"{prefix} {name}".strip())
    return names


def test_every_command_is_tried_with_the_marker():
    assert sorted(COMMANDS) == sorted(commands(cli._parser()))


CASES = [(name, *case) for name, cases in COMMANDS.items() if name not in NOT_RUN_HERE for case in cases]


@pytest.mark.parametrize(("name", "words", "shows"), CASES, ids=[" ".join(words) for _, words, _ in CASES])
def test_no_command_lets_a_name_or_text_steer_the_terminal(name, words, shows, things, capsys):
    given = [word.format(**{key: str(value) for key, value in things.items()}) for word in words]
    try:
        cli.main(given)
    except SystemExit as ended:  # argparse
        assert ended.code == 2
    shown = capsys.readouterr()
    require_harmless(shown.out + shown.err)
    if shows:
        assert "odd" in shown.out + shown.err


@pytest.mark.parametrize(
    "words", [["watch", "{run}", "--json"], ["queue", "list", "--json"]], ids=lambda words: words[0]
)
def test_json_holds_every_name_and_text_as_it_is(words, things, capsys):
    cli.main([word.format(**{key: str(value) for key, value in things.items()}) for word in words])
    shown = capsys.readouterr().out
    require_harmless(shown)
    values = [json.loads(line) for line in shown.splitlines()]
    wanted = MARKER if words[0] == "watch" else str(things["job"])
    assert wanted in list(texts(values))


def texts(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts(inner)


def every_event():
    """Yield an event of each type with the marker in every text."""
    for kind in events.TYPES.values():
        hints = typing.get_type_hints(kind)
        fields = {field.name: sample(hints[field.name]) for field in dataclasses.fields(kind)}
        yield kind(**fields | {"time": 1.0, "attempt": 2})
    yield events.UnknownEvent(line='{"type": "later", "text": "' + MARKER.replace("\x7f", "") + '"}')


def sample(annotation):
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return parts[0]
    if origin in (typing.Union, types.UnionType):
        return sample(parts[0])
    if annotation is str:
        return f"{MARKER}\n{FORGED}"
    if annotation in (int, float, bool):
        return annotation(1)
    return {"unet": 1.0}


@pytest.mark.parametrize("event", list(every_event()), ids=lambda event: event.type)
def test_no_event_steers_a_terminal_a_pipe_or_a_log(event, tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal, pipe, lines = Terminal(), io.StringIO(), io.StringIO()
    for stream, as_json in ((terminal, False), (pipe, False), (lines, True)):
        with open_display(stream, as_json=as_json) as show:
            show(event)
    for piece in ("\x1b[7;35m", "\x9b", "\u202e", "\u200b", "\u2028", "\x7f"):
        assert piece not in terminal.getvalue()  # which has rich's own escape sequences
    require_harmless(pipe.getvalue())
    require_harmless(lines.getvalue())
    log = RunLog()
    log.show(event)
    (tmp_path / "run").mkdir()
    log.open(tmp_path / "run")
    log.close()
    require_harmless((tmp_path / "run" / "console.log").read_text(encoding="utf-8"))


def test_markup_of_the_terminal_library_is_plain_text():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with open_display(stream, as_json=False) as show:
        show(events.Notice("a", "[bold red]style[/] :boom: [link=https://x.example]here[/link]"))
    assert "[bold red]style[/] :boom: [link=https://x.example]here[/link]" in stream.getvalue()


@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_errors_expected_or_not_are_harmless(debug, monkeypatch, capsys):
    for error in (
        JobError("a", MARKER, MARKER, (MARKER,)),
        ValueError(f"{MARKER}\n{FORGED}"),
        FileNotFoundError(2, MARKER, MARKER),
        OSError(5, MARKER, MARKER),
    ):

        def failing(_, error=error):
            raise error

        monkeypatch.setattr("trainer.cli.runs.run_prune", failing)
        assert cli.main([*debug, "prune"]) in (1, 2)
        shown = capsys.readouterr().err
        assert "odd" in shown
        require_harmless(shown)


def test_checks_of_the_machine_are_harmless(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda **_: iter([DoctorCheck("broken", MARKER, MARKER)]))
    assert cli.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "odd" in shown
    require_harmless(shown)


def test_log_records_of_libraries_are_harmless(monkeypatch, capsys):
    logger = logging.Logger("library", logging.ERROR)
    monkeypatch.setattr(logging, "basicConfig", lambda **given: logger.addHandler(*given["handlers"]))
    monkeypatch.setattr("warnings.simplefilter", lambda _: None)
    monkeypatch.setattr("os.environ", {})
    quieten()
    logger.error("cannot read %s", MARKER)
    shown = capsys.readouterr().err
    assert shown.startswith("cannot read odd")
    require_harmless(shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a cat, größer, 猫　と, 🐈", "a cat, größer, 猫　と, 🐈"),
        ("tab\tand\rbreak\n", "tab\\tand\\rbreak\\n"),
        ("\x1b[2J\x9b\x7f", "\\x1b[2J\\x9b\\x7f"),
        ("exe\u202egpj.txt", "exe\\u202egpj.txt"),
        ("a\u200bb\u2028c\udcff\U000e0041", "a\\u200bb\\u2028c\\udcff\\U000e0041"),
        ("ﾠ", "\\uffa0"),
    ],
)
def test_what_is_not_printable_is_written_as_an_escape(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown


def test_a_long_text_is_cut():
    assert printable("x" * 20, 10) == "xxxxxxx..."


def test_the_lines_of_a_message_after_the_first_cannot_pass_for_messages():
    assert printable_lines("a has 2 problems:\n  b: c\nError: d") == ["a has 2 problems:", "  b: c", "  Error: d"]


WRITING = {"print", "write", "writelines", "print_exc", "print_exception", "pprint"}


def test_only_the_output_module_prints():
    """Hold the rule of trainer.cli.common; display.py draws with rich what it has made printable."""
    allowed = {("display.py", "self._console.print"), ("display.py", "self._stream.write")}
    allowed.add(("doctor.py", "file.write"))  # tries whether a folder can be written
    found = set()
    for path in sorted(Path(common.__file__).parent.rglob("*.py")):
        if path.name != "common.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
            found |= {(path.name, call) for call in calls if call.rpartition(".")[2] in WRITING}
    assert found == allowed
