"""Values in a TOML text are changed and everything else in it stays."""

from __future__ import annotations

import difflib
import random
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tomlkit
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trainer.config.edit import LONGEST, edit_toml
from trainer.config.toml_file import toml_key, toml_value

Values = dict[str, Any]

CASES = {
    "a value keeps its place, the comment beside it and the notation of the others": (
        "# top\nrate = 1e-4 # slow\n\nsize=0x10\nbig = 1_000\n",
        {"rate": 1e-4, "size": 17, "big": 1000},
        "# top\nrate = 1e-4 # slow\n\nsize=17\nbig = 1_000\n",
    ),
    "a new key is placed after the one before it": (
        "[recipe]\n  rank = 8 # small\n  # how long\n  steps = 100\n",
        {"recipe": {"rank": 8, "alpha": 4.0, "steps": 100, "seed": 1}},
        "[recipe]\n  rank = 8 # small\n  alpha = 4.0\n  # how long\n  steps = 100\n  seed = 1\n",
    ),
    "a new first key is placed below the header, and in a file below the comments at its top": (
        "# my job\nname = 'x'\n\n[recipe] # r\n# how long\nsteps = 100\n",
        {"schema": 3, "name": "x", "recipe": {"rank": 8, "steps": 100}},
        "# my job\nschema = 3\nname = 'x'\n\n[recipe] # r\nrank = 8\n# how long\nsteps = 100\n",
    ),
    "a removed key takes only the comment beside it": (
        "[recipe]\n# rank\nrank = 8 # small\n\nalpha = 4\n\n# steps\nsteps = 100\n",
        {"recipe": {"rank": 8, "steps": 100}},
        "[recipe]\n# rank\nrank = 8 # small\n\n# steps\nsteps = 100\n",
    ),
    "a removed table leaves the comments in it": (
        "a = 1\n\n[fit] # f\n# 8 GB\nmicro_batch = 1\n\n[output]\nb = 2\n",
        {"a": 1, "output": {"b": 2}},
        "a = 1\n\n# 8 GB\n\n[output]\nb = 2\n",
    ),
    "a new table is placed after the one before it, with a blank line where the text has them": (
        "a = 1\n\n[fit]\nb = 2\n# below\n\n# last\n[output]\nc = 3\n",
        {"a": 1, "fit": {"b": 2}, "new": {"d": 4, "inner": {"e": 5}}, "output": {"c": 3}},
        "a = 1\n\n[fit]\nb = 2\n# below\n\n[new]\nd = 4\n\n[new.inner]\ne = 5\n\n# last\n[output]\nc = 3\n",
    ),
    "a dense text stays dense": (
        "[a]\nx = 1\n[c]\nx = 3\n[[d]]\nx = 4",
        {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 3}, "d": [{"x": 4}, {"x": 5}]},
        "[a]\nx = 1\n[b]\nx = 2\n[c]\nx = 3\n[[d]]\nx = 4\n[[d]]\nx = 5\n",
    ),
    "dotted keys, inline tables and literal strings stay so": (
        "[r]\nopt.name = 'a' # o\nopt.beta = {x = 1, y = 2.50}\npath = 'C:\\in'\n",
        {"r": {"opt": {"name": "b", "lr": 0.5, "beta": {"x": 3, "y": 2.5}}, "path": "C:\\out"}},
        "[r]\nopt.name = 'b' # o\nopt.lr = 0.5\nopt.beta = {x = 3, y = 2.50}\npath = 'C:\\out'\n",
    ),
    "items of an array keep their comments and notation": (
        "betas = [ # two\n  0.90, # first\n  0.990, # second\n] # end\n",
        {"betas": [0.9, 0.95, 0.99]},
        "betas = [ # two\n  0.90, # first\n  0.95,\n  0.990, # second\n] # end\n",
    ),
    "a table with only tables gets a header for its first key": (
        "a = 1\n\n# cats\n[[data.folders]]\npath = 'cats'\n",
        {"a": 1, "data": {"masks": "none", "folders": [{"path": "cats"}]}},
        "a = 1\n\n[data]\nmasks = \"none\"\n\n# cats\n[[data.folders]]\npath = 'cats'\n",
    ),
    "an empty list becomes tables": (
        "folders = [] # none yet\n[fit]\na = 1\n",
        {"folders": [{"path": "cats"}], "fit": {"a": 1}},
        '[[folders]]\npath = "cats"\n[fit]\na = 1\n',
    ),
    "line breaks of Windows and the byte order mark stay": (
        "\ufeffa = 1 # x\r\n\r\n[b]\r\nc = 2\r\n",
        {"a": 2, "b": {"c": 2}, "d": {"e": 3}},
        "\ufeffa = 2 # x\r\n\r\n[b]\r\nc = 2\r\n\r\n[d]\r\ne = 3\r\n",
    ),
    "a last line without a break gets one": ("a = 1", {"a": 1, "b": 2}, "a = 1\nb = 2\n"),
    "NaN, text and numbers that are equal in Python are not mixed up": (
        "a = nan # n\nb = 1 # i\nc = true\n",
        {"a": float("nan"), "b": 1.0, "c": 1},
        "a = nan # n\nb = 1.0 # i\nc = 1\n",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_only_what_changed_is_changed(case: str) -> None:
    before, values, after = CASES[case]
    assert edit_toml(before, values) == after


FOLDERS = """\
[data]
masks = "none"

# ---- my images ----

# cats
[[data.folders]] # c
path = "cats" # their path
repeats = 0x3

# dogs
[[data.folders]]
path = "dogs"
# few of them
repeats = 10

# rest of the dogs

# birds
[[data.folders]]
path = "birds"

[recipe]
rank = 8
"""
CATS, DOGS, BIRDS = tomllib.loads(FOLDERS)["data"]["folders"]
CATS_TEXT = '\n# cats\n[[data.folders]] # c\npath = "cats" # their path\nrepeats = 0x3\n'
DOGS_TEXT = '\n# dogs\n[[data.folders]]\npath = "dogs"\n# few of them\nrepeats = 10\n'
REST_TEXT = "\n# rest of the dogs\n"
BIRDS_TEXT = '\n# birds\n[[data.folders]]\npath = "birds"\n'
NEW_TEXT = '\n[[data.folders]]\npath = "mice"\n'
LISTS = {
    "removed": ([CATS, BIRDS], CATS_TEXT + BIRDS_TEXT + REST_TEXT),
    "first removed": ([DOGS, BIRDS], DOGS_TEXT + REST_TEXT + BIRDS_TEXT),
    "inserted": ([CATS, {"path": "mice"}, DOGS, BIRDS], CATS_TEXT + NEW_TEXT + DOGS_TEXT + REST_TEXT + BIRDS_TEXT),
    "appended": ([CATS, DOGS, BIRDS, {"path": "mice"}], CATS_TEXT + DOGS_TEXT + REST_TEXT + BIRDS_TEXT + NEW_TEXT),
    "reordered": ([BIRDS, CATS, DOGS], BIRDS_TEXT + CATS_TEXT + DOGS_TEXT + REST_TEXT),
    "changed and first removed": (
        [{**DOGS, "repeats": 11}, BIRDS],
        DOGS_TEXT.replace("10", "11") + REST_TEXT + BIRDS_TEXT,
    ),
    "twice": (
        [CATS, CATS, DOGS, BIRDS],
        CATS_TEXT + '\n[[data.folders]]\npath = "cats"\nrepeats = 3\n' + DOGS_TEXT + REST_TEXT + BIRDS_TEXT,
    ),
    "all changed": (
        [{"path": name} for name in ("a", "b", "c")],
        CATS_TEXT.replace('cats"', 'a"').replace("repeats = 0x3\n", "")
        + DOGS_TEXT.replace('dogs"', 'b"').replace("repeats = 10\n", "")
        + REST_TEXT
        + BIRDS_TEXT.replace('birds"', 'c"'),
    ),
}


@pytest.mark.parametrize("case", LISTS)
def test_items_of_a_list_of_tables_keep_their_comments(case: str) -> None:
    folders, text = LISTS[case]
    values = {"data": {"masks": "none", "folders": folders}, "recipe": {"rank": 8}}
    start, end = FOLDERS.index("\n# cats"), FOLDERS.index("\n[recipe]")
    assert edit_toml(FOLDERS, values) == FOLDERS[:start] + text + FOLDERS[end:]


def test_a_renamed_key_stays_in_place() -> None:
    text = "[[ladder]] # l\nquantise = 'none' # q\n[fit]\n# mine\nquantise   = 'int8'\n[other]\nquantise = 1\n"
    values = {"fallbacks": [{"quantize": "none"}], "fit": {"quantize": "nf4"}, "other": {"quantise": 1}}
    names = {"ladder": "fallbacks", "ladder.quantise": "quantize", "fit.quantise": "quantize"}
    assert edit_toml(text, values, names) == (
        "[[fallbacks]] # l\nquantize = 'none' # q\n[fit]\n# mine\nquantize   = 'nf4'\n[other]\nquantise = 1\n"
    )


def _fail(text: str) -> Any:
    raise KeyError(text)


def _parse_wrongly(text: str) -> Any:
    return parse(text.replace("rank", "rang"))


parse = tomlkit.parse


@pytest.mark.parametrize("parser", [_fail, _parse_wrongly])
def test_a_mistake_of_the_library_is_noticed(parser: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert edit_toml("rank = 8", {"rank": 9}) == "rank = 9"
    monkeypatch.setattr(tomlkit, "parse", parser)
    assert edit_toml("rank = 8", {"rank": 9}) is None


def test_a_wrong_result_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.config.edit.toml_value", lambda value: "7")
    assert edit_toml("rank = 8", {"rank": 9}) is None


@pytest.mark.parametrize(
    "text", ["a = ", "a = 1\na = 2", "a = " + "[" * 5000, "x.y" * 20_000 + " = 1", "# " + "x" * LONGEST + "\na = 1\n"]
)
def test_only_valid_texts_of_modest_size_are_edited(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tomlkit, "parse", _fail)
    assert edit_toml(text, {"a": 2}) is None


# --- any text and any change

NAMES = st.sampled_from(["a", "b", "c d", "é"])
SCALARS = st.one_of(
    st.integers(-9, 9), st.booleans(), st.floats(width=32), st.text("x'\"\\\n#é", max_size=3), st.dates()
)
VALUES = st.dictionaries(
    NAMES,
    st.recursive(
        st.one_of(SCALARS, st.lists(SCALARS, max_size=3)),
        lambda inner: st.one_of(
            st.dictionaries(NAMES, inner, max_size=3), st.lists(st.dictionaries(NAMES, inner, max_size=2), max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


def _written(table: Values, path: str, chance: random.Random) -> Iterator[str]:
    """Yield the lines of a text as a person might write it, with a number in each comment."""
    lists = {key for key, value in table.items() if isinstance(value, list) and value and isinstance(value[0], dict)}
    below = {key for key, value in table.items() if key in lists or (isinstance(value, dict) and chance.random() < 0.7)}

    def remark() -> str:
        return f"# {chance.randrange(10**9)}" if chance.random() < 0.4 else ""

    for key, value in table.items():
        if key not in below:
            yield from filter(None, [remark()])
            yield f"{toml_key(key)}={toml_value(value)} {remark()}" + "\n" * chance.randrange(2)
    for key, value in table.items():
        if key in below:
            name = path + toml_key(key)
            for item in value if key in lists else [value]:
                yield "\n" * chance.randrange(2) + remark()
                yield (f"[[{name}]] " if key in lists else f"[{name}] ") + remark()
                yield from _written(item, f"{name}.", chance)
                yield remark()


def _typed(value: Any) -> Any:
    """Return a value in a form that distinguishes 1, 1.0 and true, and in which NaN equals itself."""
    if isinstance(value, dict):
        return {key: _typed(inner) for key, inner in value.items()}
    return [_typed(item) for item in value] if isinstance(value, list) else repr(value)


@settings(max_examples=150)
@given(before=VALUES, after=VALUES, seed=st.integers(0, 99), newline=st.sampled_from(["\n", "\r\n"]))
def test_any_change_gives_exactly_the_values(before: Values, after: Values, seed: int, newline: str) -> None:
    text = newline.join("\n".join(_written(before, "", random.Random(seed))).split("\n"))
    assert edit_toml(text, before) == text
    edited = edit_toml(text, after)
    assert edited is not None
    assert _typed(tomllib.loads(edited)) == _typed(after)
    assert edit_toml(edited, after) == edited


@settings(max_examples=100)
@given(values=VALUES, seed=st.integers(0, 99), key=NAMES, value=SCALARS)
def test_changing_one_key_of_a_file_keeps_every_other_line(values: Values, seed: int, key: str, value: Any) -> None:
    text = "\n".join(_written(values, "", random.Random(seed)))
    assume(not isinstance(values.get(key), dict | list))
    edited = edit_toml(text, {**values, key: value})
    assert edited is not None
    lost = difflib.unified_diff(text.split("\n"), edited.split("\n"), n=0, lineterm="")
    changed = [line[1:] for line in lost if line.startswith("-") and line != "--- "]
    assert [line.partition("=")[0] for line in changed] == [toml_key(key)] * len(changed)
    assert len(changed) <= 1
