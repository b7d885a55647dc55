"""Keys in files are stated apart from the names of attributes."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, field

import pytest

from tests.support import ROOT
from trainer.memory.allocator.settings import AllocatorSettings
from trainer.protocol.records import build, json_keys, to_record

# What reads all attributes of an object by their names: {function: files that may, since nothing of it is kept}.
MAY_NAME_ATTRIBUTES = {
    "asdict": {"app/qt/theme/theme.py", "trainer/cli/doctor.py"},
    "_asdict": set[str](),
    "vars": {"trainer/protocol/run_directory.py"},
}


@json_keys("time")
@dataclass(frozen=True, kw_only=True)
class Base:
    moment: float = 0.0


@json_keys("name", "parts", "by_size")
@dataclass(frozen=True)
class Renamed(Base):
    title: str
    pieces: tuple[int, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)


@json_keys("inner", "many")
@dataclass(frozen=True, slots=True)
class Outer:
    one: Renamed
    others: tuple[Renamed, ...]


def test_attributes_are_written_under_the_stated_keys() -> None:
    one = Renamed("a", (1, 2), {"x": 3}, moment=4.0)
    plain = {"time": 4.0, "name": "a", "parts": [1, 2], "by_size": {"x": 3}}
    assert to_record(one) == plain
    assert to_record(Outer(one, (one,))) == {"inner": plain, "many": [plain]}
    assert list(to_record(one)) == ["time", "name", "parts", "by_size"]  # some hashes depend on the order


def test_the_stated_keys_are_read() -> None:
    assert build(Renamed, {"name": "a", "by_size": {"x": 3}, "time": 1.5}) == Renamed("a", (), {"x": 3}, moment=1.5)


@pytest.mark.parametrize(
    ("record", "reason"),
    [({"title": "a"}, '"name" is missing'), ({"name": "a", "parts": 3}, '"parts" has the invalid value 3')],
    ids=["attribute names are no keys", "a wrong value is named by its key"],
)
def test_a_bad_record_is_refused_by_its_keys(record: dict[str, object], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        build(Renamed, record)


def test_a_renamed_key_is_read_under_both_names_and_the_present_one_wins() -> None:
    @json_keys("images", former={"pictures": "images"})
    @dataclass(frozen=True)
    class Step:
        count: int

    assert build(Step, {"pictures": 3}) == build(Step, {"images": 3}) == Step(3)
    assert build(Step, {"images": 3, "pictures": 4}) == build(Step, {"pictures": 4, "images": 3}) == Step(3)
    assert to_record(Step(3)) == {"images": 3}
    with pytest.raises(TypeError, match="images"):
        build(Step, {"pictures": "3"})
    with pytest.raises(TypeError, match="no keys"):
        json_keys(former={"card": "gpu"})(dataclass(type("Empty", (), {})))


def test_a_class_without_keys_is_not_written() -> None:
    @dataclass
    class Plain:
        name: str

    with pytest.raises(TypeError, match="Plain has no json_keys"):
        to_record(Plain("a"))


def test_a_new_field_needs_a_key() -> None:
    with pytest.raises(TypeError, match="a different number of fields"):

        @json_keys("name")
        @dataclass
        class Two:
            name: str
            other: str


def test_the_keys_of_shipped_forecast_results_depend_on_these_texts() -> None:
    """In this form, order included, the settings are hashed: others would empty assets/traces/outcomes.zip."""
    text = (
        '{"capacity": null, "expandable": true, "max_split_size": 1, "roundup_power2_divisions": [2, 4], '
        '"garbage_collection_threshold": 0.5, "large_segment_size": 7}'
    )
    assert json.dumps(to_record(AllocatorSettings(None, True, 1, (2, 4), 0.5, 7))) == text


@pytest.mark.parametrize("function", MAY_NAME_ATTRIBUTES)
def test_nothing_is_written_under_the_names_of_attributes(function: str) -> None:
    """Use `to_record`, whose keys stay when an attribute is renamed."""
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("trainer", "app")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == function
    }
    assert found == MAY_NAME_ATTRIBUTES[function]
