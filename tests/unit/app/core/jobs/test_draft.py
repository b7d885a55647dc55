"""Jobs as the Train page edits them: the file on disk is what was typed, and the trainer reads it as the page does."""

from __future__ import annotations

import errno
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.core.jobs import essentials
from app.core.jobs.draft import Draft
from app.core.jobs.essentials import ImageFolder
from app.core.jobs.job_file import to_toml
from app.core.jobs.settings import setting
from app.core.jobs.settings import settings as all_settings
from app.core.library import Folder, Library
from tests.support.desk import Desk
from tests.support.drafts import BARE, on_disk, opened, refuse_writing, write_bare
from trainer.config.load import load_job
from trainer.config.presets.library import find_preset
from trainer.errors import JobError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_bare(tmp_path)


def settled(desk: Desk, draft: Draft) -> dict[str, Any]:
    desk.until(lambda: not draft.file.unsaved)
    return on_disk(draft.path)


# What a person may do: any setting of the schema, with what suits it and with what does not.
KEYS = [each for each in all_settings() if "*" not in each.key and each.kind in ("", "adamw")]
TYPED = st.one_of(
    st.text(max_size=12),
    st.integers(-5, 5000).map(str),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(repr),
    st.sampled_from(
        ["1e999", "nan", "0x10", "true", "auto", "100, 300", "down_blocks.1, mid_block", "\x00\x7f", "\ud800"]
    ),
)
DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from(KEYS), TYPED),
        st.tuples(st.just("choose"), st.sampled_from([each for each in KEYS if each.choices]), st.integers(0, 9)),
        st.tuples(st.sampled_from(["unset", "revert", "undo", "redo", "seal"]), st.sampled_from(KEYS), st.none()),
    ),
    max_size=25,
)


def act(draft: Draft, deed: str, key: Any, value: Any) -> None:
    if deed == "set":
        draft.set(key.key, key.typed(value), typing=True)
    elif deed == "choose":
        draft.set(key.key, key.choices[value % len(key.choices)])
    elif deed == "unset":
        draft.set(key.key, None)
    elif deed == "revert":
        draft.revert(key.key)
    else:
        getattr(draft, deed)()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(deeds=DEEDS)
def test_whatever_is_typed_and_undone_the_file_is_the_draft_and_undo_leads_back(tmp_path_factory, desk, tasks, deeds):
    path = tmp_path_factory.mktemp("draft") / "job.toml"
    path.write_text(BARE, encoding="utf-8")
    draft = opened(path, tasks)
    began = on_disk(path)
    for deed in deeds:
        act(draft, *deed)
    assert settled(desk, draft) == draft.values  # a value that was taken back may have been written meanwhile
    assert opened(path, tasks).values == draft.values
    try:
        expected = load_job(path)
    except JobError as error:
        assert draft.job is None
        assert sorted(error.problems) == sorted(f"{key}: {reason}" for key, reason in draft.problems)
    else:
        assert draft.job == expected
    ended = draft.values
    steps = 0
    while draft.undo():
        steps += 1
    assert draft.values == began
    for _ in range(steps):
        draft.redo()
    assert draft.values == ended
    draft.close()


@given(typed=st.text(max_size=20), key=st.sampled_from(KEYS))
def test_what_is_typed_reads_back_from_the_file_as_the_same_value(typed, key):
    value = key.typed(typed)
    values: dict[str, Any] = {}
    from app.core.jobs.job_file import put

    put(values, key.key, value)
    read = tomllib.loads(to_toml(values))
    assert repr(read) == repr(values)


def test_a_wrong_value_is_kept_and_named_until_it_is_set_right(desk, tasks, file):
    draft = opened(file, tasks)
    draft.set("recipe.rank", setting("recipe.rank").typed("many"), typing=True)
    assert draft.job is None
    assert draft.problems == (("recipe.rank", 'must be a whole number from 1 to 1024, not the text "many"'),)
    settled(desk, draft)
    again = opened(file, tasks)
    assert again.get("recipe.rank") == "many" and again.problems == draft.problems
    again.set("recipe.rank", setting("recipe.rank").typed("32"))
    assert again.job is not None and again.job.recipe.rank == 32
    again.close()


def test_letters_typed_into_one_field_are_one_step_until_it_is_left(tasks, file):
    draft = opened(file, tasks)
    for text in ("3", "32"):
        draft.set("recipe.rank", int(text), typing=True)
    draft.seal()
    draft.set("recipe.rank", 64, typing=True)
    draft.undo()
    assert draft.get("recipe.rank") == 32
    draft.undo()
    assert draft.get("recipe.rank") == 8 and draft.undo_name is None
    draft.close()


def test_a_length_replaces_the_other_and_an_optimizer_drops_what_it_lacks(tasks, file):
    draft = opened(file, tasks)
    draft.set("recipe.epochs", 7)
    assert draft.get("recipe.steps") is None
    draft.set("report.previews.every", 3)
    draft.set("report.previews.every_epochs", 2)
    assert draft.get("report.previews.every") is None and not draft.problems
    draft.set("recipe.optimizer.name", "adamw")
    assert draft.get("recipe.optimizer") == {"name": "adamw"} and draft.job is not None
    draft.undo()
    assert draft.get("recipe.optimizer.d_coef") == 2.0
    draft.close()


def test_what_has_no_effect_is_told_of_settings_that_are_not_stated_too(tasks, file):
    draft = opened(file, tasks)
    assert "3x3" in draft.effectless["recipe.conv_rank"]
    assert "recipe.clip_skip" not in draft.effectless  # it has with SD 1.5, and nobody knows the base
    draft.set("base.family", "sdxl")
    assert "penultimate" in draft.effectless["recipe.clip_skip"]
    draft.set("recipe.alpha", "wrong")
    assert "recipe.conv_rank" in draft.effectless  # one bad number does not silence the rest
    assert draft.doubts["recipe.learning_rate"].startswith("Prodigy multiplies")
    draft.close()


def test_a_recipe_is_taken_compared_with_and_given_back_key_by_key(tasks, file):
    draft = opened(file, tasks)
    preset = find_preset("character", "sdxl").preset
    draft.set("recipe.seed", 7)
    essentials.choose_recipe(draft, preset)
    assert draft.get("preset") == "sdxl/character" and draft.get("recipe.rank") == 32
    assert draft.get("recipe.optimizer") == {"name": "adamw", "weight_decay": 0.01}
    assert draft.get("recipe.seed") == 7
    assert draft.get("recipe.steps") is None and draft.get("recipe.images_seen") == 3000
    assert draft.differences == {"recipe.seed": 42}
    draft.set("recipe.rank", 64)
    assert draft.differences["recipe.rank"] == 32
    draft.revert("recipe.rank")
    draft.revert("recipe.seed")
    assert draft.differences == {} and draft.get("recipe.seed") is None
    # Another card takes its own values along, not those of the first.
    essentials.choose_recipe(draft, find_preset("style", "sdxl").preset)
    style = draft.get("recipe")
    draft.undo()
    draft.edit("none", lambda values: values.pop("recipe"))
    essentials.choose_recipe(draft, find_preset("style", "sdxl").preset)
    assert draft.get("recipe") == style
    draft.close()


def test_the_origin_of_a_recipe_is_found_again_when_the_job_is(desk, tasks, file):
    draft = opened(file, tasks)
    essentials.choose_recipe(draft, find_preset("style", "sd15").preset)
    draft.set("recipe.rank", 5)
    settled(desk, draft)
    again = opened(file, tasks)
    again.compare_with(essentials.preset_of(again, essentials.recipes()))
    assert dict(again.differences) == dict(draft.differences) and "recipe.rank" in again.differences
    assert load_job(file).preset == "sd15/style"


def test_what_is_open_is_counted_by_folders_however_many_pictures_lie_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, empty, cats, dogs = Library(), *(tmp_path / name for name in ("empty", "cats", "dogs"))
    kittens = Folder(cats / "kittens", cats)
    facts: list[dict[str, object]] = [{}, {"excluded": True}, {"problem": "It is damaged."}]
    for folder, count in ((Folder(cats, cats), 9), (kittens, 6), (Folder(dogs, dogs), 6)):
        library.add((folder, f"{number}.png", facts[number % 3]) for number in range(count))
    hashed: list[Path] = []
    plain = Path.__hash__
    monkeypatch.setattr(Path, "__hash__", lambda path: (hashed.append(path), plain(path))[1])
    found = essentials.open_images(library, (empty, cats))
    monkeypatch.undo()
    assert found == [ImageFolder(empty, False, 0), ImageFolder(cats, True, 5), ImageFolder(dogs, False, 2)]
    assert len(hashed) < 21  # one a picture would take 0.2 s at 100,000


def test_a_trigger_word_goes_to_the_pictures_that_are_learned_and_into_proposed_prompts(tasks, tmp_path):
    folder = tmp_path / "jobs" / "x"
    folder.mkdir(parents=True)
    path = folder / "job.toml"
    path.write_text(to_toml(essentials.new_values("x", [], folder, {})), encoding="utf-8")
    draft = opened(path, tasks)
    for text in ("o", "oh", "ohwx"):
        essentials.set_trigger(draft, text, typing=True)
    assert essentials.trigger(draft.values) == "ohwx"
    assert ("dataset.folders", "is missing: add the images to train on") in draft.problems
    essentials.add_images(draft, [ImageFolder(tmp_path / "cats", False, 3), ImageFolder(tmp_path / "dogs", True, 4)])
    assert draft.get("dataset.folders") == [
        {"path": str((tmp_path / "cats").as_posix()), "trigger": "ohwx"},
        {"path": str((tmp_path / "dogs").as_posix()), "recursive": True, "trigger": "ohwx"},
    ]
    assert draft.get("report.previews.prompts.0.prompt") == "ohwx"
    draft.set("report.previews.prompts.0.prompt", "mine")
    essentials.set_trigger(draft, "zwx")
    assert [each["prompt"] for each in draft.get("report.previews.prompts")][:2] == ["mine", "ohwx, a house by a lake"]
    essentials.add_images(draft, [ImageFolder(tmp_path / "cats", False, 3)])
    assert len(draft.get("dataset.folders")) == 2
    draft.set("dataset.folders.1.repeats", 10)
    counted = [ImageFolder(tmp_path / "cats", False, 3), ImageFolder(tmp_path / "dogs", True, 4)]
    assert essentials.samples(draft, counted) == 43
    draft.set("dataset.folders.0.resolutions", [512, 768])
    assert essentials.samples(draft, counted) == 46
    essentials.set_trigger(draft, "")
    assert essentials.trigger(draft.values) is None
    draft.close()


def test_what_another_program_wrote_is_kept_before_it_is_overwritten(desk, tasks, file):
    draft = opened(file, tasks)
    kept: list[Path] = []
    draft.file.backed_up.connect(kept.append)
    draft.set("recipe.rank", 9)
    settled(desk, draft)
    assert kept == []  # the comment is still in the file
    file.write_text(BARE.replace("rank = 8", "rank = 99"), encoding="utf-8")
    draft.set("recipe.rank", 11)  # before the app has noticed
    assert settled(desk, draft)["recipe"]["rank"] == 11
    assert len(kept) == 1 and on_disk(kept[0])["recipe"]["rank"] == 99


def test_another_programs_change_is_taken_over_and_undo_brings_ours_back(desk, tasks, file):
    draft = opened(file, tasks)
    reported: list[None] = []
    draft.external_change_applied.connect(reported.append)
    draft.set("recipe.rank", 9)
    settled(desk, draft)
    file.write_text(BARE.replace("rank = 8", "rank = 99"), encoding="utf-8")
    draft.check_file()
    desk.until(lambda: bool(reported))
    assert draft.get("recipe.rank") == 99
    draft.undo()
    assert settled(desk, draft)["recipe"]["rank"] == 9


def test_a_file_that_another_program_broke_is_named_once_and_ours_stays(desk, tasks, file, monkeypatch):
    draft = opened(file, tasks)
    errors: list[JobError] = []
    draft.file.failed.connect(errors.append)
    read: list[str] = []
    take_over = draft._take_over
    monkeypatch.setattr(draft, "_take_over", lambda text: (take_over(text), read.append(text)))
    file.write_text("rank = = 3", encoding="utf-8")
    for turn in (1, 2):  # what is looked at late would be what is written next
        draft.check_file()
        desk.until(lambda turn=turn: len(read) == turn)
    assert [error.code for error in errors] == ["job.toml"] and draft.get("recipe.rank") == 8
    resolved: list[JobError] = []
    draft.file.resolved.connect(resolved.append)
    file.write_text(BARE, encoding="utf-8")
    draft.check_file()
    desk.until(lambda: len(read) == 3)
    assert resolved == errors
    file.write_text("rank = = 3", encoding="utf-8")
    draft.check_file()
    desk.until(lambda: len(errors) == 2)  # it is broken anew
    draft.set("recipe.rank", 9)
    settled(desk, draft)
    assert resolved == errors  # ours lies there, and the broken one beside it


def test_another_reason_why_a_job_cannot_be_written_takes_the_place_of_the_former(desk, tasks, file, monkeypatch):
    draft = opened(file, tasks)
    reported: list[JobError] = []
    resolved: list[JobError] = []
    draft.file.failed.connect(reported.append)
    draft.file.resolved.connect(resolved.append)
    with monkeypatch.context() as patch:
        refuse_writing(file.parent, patch)
        draft.set("recipe.rank", 77)
        desk.until(lambda: len(reported) == 1)
        assert draft.file.error is reported[0] and resolved == []
        refuse_writing(file.parent, patch, errno.ENOSPC)
        draft.check_file()
        desk.until(lambda: len(reported) == 2)
        assert "the disk is full" in reported[1].sentence and resolved == reported[:1]
        draft.check_file()
        desk.until(lambda: draft.file._writing is None)
        assert len(reported) == 2
    draft.check_file()
    settled(desk, draft)
    assert resolved == reported and draft.file.error is None


def test_every_setting_of_the_schema_can_be_typed_and_its_default_is_right(tasks, file):
    draft = opened(file, tasks)
    draft.set("recipe.optimizer.name", "adamw")
    for each in KEYS:
        if each.default is not None and each.key not in ("recipe.optimizer.name",):
            draft.set(each.key, each.default)
    assert draft.problems == ()
    draft.close()


LINK = "https://civitai.com/api/download/models/1?token="
SAFE = LINK + "${CIVITAI_COM_TOKEN}"


def test_a_token_in_the_base_link_reaches_neither_the_file_nor_the_form(
    file: Path, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typed here, or written by another program: the job has the token's name and the user gets a message."""
    monkeypatch.setenv("CIVITAI_COM_TOKEN", "")
    draft = opened(file, desk.tasks)
    messages: list[str] = []
    draft.secured.connect(messages.append)
    draft.set("base.model", LINK + "sEcReT-1")
    assert draft.get("base.model") == SAFE
    assert settled(desk, draft)["base"]["model"] == SAFE
    desk.until(lambda: bool(messages))
    other = {**on_disk(file), "name": "other", "base": {"model": LINK + "sEcReT-2"}}
    file.write_text(to_toml(other), encoding="utf-8")
    draft.check_file()
    desk.until(lambda: draft.name == "other")
    assert draft.get("base.model") == settled(desk, draft)["base"]["model"] == SAFE
    assert "sEcReT" not in "".join(path.read_text(encoding="utf-8") for path in file.parent.glob("*.toml"))
    assert len(messages) == 1
    assert "sEcReT" not in messages[0]
