"""The samples of a run as its events tell of them, and where the cells of their matrix lie."""

from __future__ import annotations

from pathlib import Path

from app.core.runs.series import CellIndex, Samples
from app.qt.tiles import SampleLayout
from trainer.protocol import events


def preview(step: int, index: int = 0, time: float = 1.0) -> events.Preview:
    return events.Preview(step=step, index=index, file=f"samples/{step}-{index}.png", seconds=1.0, time=time)


def measured(step: int, loss: float | None, held_out: bool = True) -> events.Validation:
    return events.Validation(step=step, loss=loss, held_out=held_out, per_timestep={})


def test_steps_stand_in_order_whatever_order_they_were_drawn_in():
    samples = Samples(Path("run"))
    assert samples.take([preview(200), preview(0), preview(100, 1), preview(100)])
    assert samples.steps == [0, 100, 200]
    assert samples.at(CellIndex(100, 1)).path == Path("run/samples/100-1.png")
    assert samples.at(CellIndex(200, 1)) is None
    assert len(samples.prompts) == 2


def test_a_resumed_run_shows_what_it_drew_last_and_forgets_the_rest():
    samples = Samples(Path("run"))
    samples.take([preview(100, time=1.0)])
    former = samples.at(CellIndex(100, 0))
    samples.take([preview(100, time=2.0)])
    latest = samples.at(CellIndex(100, 0))
    assert latest.id != former.id, "the thumbnail of the former picture would be shown"
    assert latest.changed_ns != former.changed_ns
    assert list(samples.images.values()) == [latest]
    assert samples.steps == [100]


def test_numbers_of_samples_are_never_those_of_a_datasets_pictures():
    samples = Samples(Path("run"))
    samples.take([preview(step) for step in range(3)])
    other = Samples(Path("other"))
    other.take([preview(0)])
    numbers = [*samples.images, *other.images]
    assert all(number < 0 for number in numbers)
    assert len(set(numbers)) == 4


def test_the_best_step_is_that_of_the_lowest_held_out_loss_after_the_start():
    samples = Samples(Path("run"))
    assert samples.best is None
    samples.take([measured(0, 0.01), measured(100, 0.3), measured(300, 0.2), measured(200, 0.2)])
    samples.take([measured(400, 0.1, held_out=False), measured(500, None)])
    assert samples.best == 200
    samples.take([measured(200, None)])  # after a resume, not finite this time
    assert samples.best == 300


def test_without_held_out_images_the_lowest_loss_on_training_images_is_found():
    samples = Samples(Path("run"))
    assert samples.take([measured(0, 0.01, held_out=False), measured(100, 0.3, held_out=False)])
    samples.take([measured(200, 0.2, held_out=False)])
    assert (samples.best, samples.has_held_out) == (200, False)
    samples.take([measured(100, 0.5)])
    assert (samples.best, samples.has_held_out) == (100, True)


def test_only_events_that_count_are_news():
    samples = Samples(Path("run"))
    assert not samples.take([events.Notice(code="base", sentence="SD 1.5."), measured(0, 0.1)])
    assert samples.take([events.Saved(step=5, file="output/a-step000005.safetensors", sha256="")])
    assert samples.saved == {5: Path("run/output/a-step000005.safetensors")}


def test_prompts_of_a_job_that_is_read_later_name_the_rows():
    samples = Samples(Path("run"))
    samples.take([preview(0, 2)])
    samples.name_prompts(["a cat", "a dog"])
    assert samples.prompts == ["a cat", "a dog", ""]


LAYOUT = SampleLayout(rows=3, columns=20, width=100, height=120, head=24, line=20, gap=8)


def test_every_cell_is_found_where_it_lies():
    for across, down in ((0, 0), (333, 50)):
        for row in range(3):
            for column in range(20):
                left, top, width, height = LAYOUT.cell(row, column, across, down)
                x, y = left + width // 2, top + height // 2
                hidden = y < LAYOUT.head or (column > 0 and x < LAYOUT.fixed_right)
                assert hidden or LAYOUT.at(x, y, across, down) == (row, column)


def test_nothing_is_found_between_cells_and_on_the_titles():
    assert LAYOUT.at(4, 60, 0, 0) is None
    assert LAYOUT.at(50, 10, 0, 0) is None, "on a column's title"
    assert LAYOUT.at(50, LAYOUT.head + 5, 0, 0) is None, "on a row's words"
    assert LAYOUT.at(50, LAYOUT.head + 3 * LAYOUT.row_height + 40, 0, 0) is None, "below the last row"


def test_the_first_column_stays_and_others_pass_under_it():
    assert LAYOUT.left(0, 500) == LAYOUT.gap
    x, y = LAYOUT.cell(0, 0, 500, 0)[0] + 50, LAYOUT.head + LAYOUT.line + 10
    assert LAYOUT.at(x, y, 500, 0) == (0, 0)


def test_the_ranges_that_are_seen_are_exactly_the_cells_in_sight():
    width, height = 450, 300
    for across in range(0, LAYOUT.all_across - width, 37):

        def in_sight(column: int, across: int = across) -> bool:
            left = LAYOUT.left(column, across)
            return left + LAYOUT.width > LAYOUT.fixed_right - LAYOUT.gap and left < width

        seen = LAYOUT.columns_seen(across, width)
        assert [column for column in range(1, 20) if in_sight(column)] == list(seen)
    for down in range(0, LAYOUT.all_down - height, 29):
        tops = [LAYOUT.top(row, down) for row in range(3)]
        expected = [row for row, top in enumerate(tops) if top + LAYOUT.row_height > LAYOUT.head and top < height]
        assert expected == list(LAYOUT.rows_seen(down, height))


def test_a_single_column_and_none_at_all():
    one = SampleLayout(rows=1, columns=1, width=100, height=100, head=24, line=20)
    assert list(one.columns_seen(0, 500)) == []
    assert one.at(50, 60, 0, 0) == (0, 0)
    none = SampleLayout(rows=0, columns=0, width=100, height=100, head=24, line=20)
    assert list(none.columns_seen(0, 500)) == list(none.rows_seen(0, 500)) == []
    assert none.at(50, 60, 0, 0) is None
