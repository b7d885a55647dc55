import io
import json
import os
import sys
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from trainer.cli import words
from trainer.cli.display import image, open_display
from trainer.protocol import events
from trainer.protocol.events import PhaseFinished, PhaseProgress, PhaseStarted, StepEvent
from trainer.protocol.progress import RunProgress
from trainer.protocol.text import share


def step(number, at, *, loss=0.5, seconds=2.0, pictures=4, skipped=False, memory=None):
    return StepEvent(
        number, 0, loss, 1.0, {"unet": 1e-4}, pictures, seconds, skipped, None, memory, time=float(at), attempt=1
    )


def told(*happened):
    story = RunProgress()
    for event in happened:
        story.update(event)
    return story


def plain(*happened, past=()):
    stream = io.StringIO()
    with open_display(stream, as_json=False, past=past) as show:
        for event in happened:
            show(event)
    return stream.getvalue().splitlines()


def on_terminal(story, now):
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(image(story, now))
    return console.file.getvalue()


def test_the_loss_shown_is_an_average_that_starts_at_the_first_loss():
    story = told(step(1, 10, loss=0.8))
    assert story.loss == pytest.approx(0.8)
    losses = [0.8, 0.2, 0.5, 0.9]
    story = told(*(step(number, number, loss=loss) for number, loss in enumerate(losses, 1)))
    # The same by its definition: weights that fall by 0.98 with age, divided by their sum.
    weights = [0.98**age for age in reversed(range(len(losses)))]
    assert story.loss == pytest.approx(sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights))


def test_steps_that_were_skipped_count_apart_and_leave_the_average_alone():
    story = told(step(1, 10, loss=0.8), step(2, 12, loss=None, skipped=True), step(3, 14, loss=9.0, skipped=True))
    assert story.loss == pytest.approx(0.8)
    assert story.skipped == 2
    assert "2 steps skipped" in words.figures(story)


def test_the_time_left_follows_the_latest_steps():
    steps = [step(number, number, seconds=100.0) for number in range(1, 11)]
    steps += [step(number, number, seconds=2.0) for number in range(11, 61)]
    story = told(PhaseStarted("train", 160, time=1.0), *steps)
    assert story.seconds_left("train", now=1e9) == pytest.approx(200.0)
    assert story.images_per_second == pytest.approx(2.0)


def test_the_time_left_begins_with_the_forecast_and_ends_with_what_is_measured():
    story = told(events.AttemptStarted(1, "cpu", step_seconds=4.0), PhaseStarted("train", 100))
    assert story.seconds_left("train", now=0.0) == pytest.approx(400.0)
    for number in range(1, 6):
        story.update(step(number, number, seconds=2.0))
    assert story.seconds_left("train", now=0.0) == pytest.approx(95 * 3.0)  # five steps weigh as much as the forecast


def test_the_time_left_of_other_phases_follows_their_progress():
    story = told(PhaseStarted("cache_pictures", 40, time=100.0))
    assert story.seconds_left("cache_pictures", 105.0) is None
    story.update(PhaseProgress("cache_pictures", 10, 40, time=120.0))
    assert story.seconds_left("cache_pictures", 120.0) == pytest.approx(60.0)
    assert told(PhaseStarted("download", None, time=1.0)).seconds_left("download", 2.0) is None


def test_training_that_makes_way_for_a_preview_goes_on_where_it_was():
    story = told(
        PhaseStarted("train", 10, time=0.0),
        step(1, 5),
        PhaseFinished("train", 5.0, time=5.0),
        PhaseStarted("preview", 2, time=5.0),
        PhaseProgress("preview", 1, 2, time=8.0),
    )
    assert story.current == "preview"
    assert "Render previews" in on_terminal(story, 8.0)
    for event in (PhaseFinished("preview", 5.0, time=10.0), PhaseStarted("train", 10, time=10.0)):
        story.update(event)
    assert (story.current, story.phases["train"].done) == ("train", 1)
    assert story.phases["train"].elapsed(12.0) == pytest.approx(7.0)
    assert "Render previews" not in on_terminal(story, 12.0)
    for event in (PhaseFinished("train", 2.0), PhaseStarted("preview", 2, time=20.0)):
        story.update(event)
    assert story.phases["preview"].done == 0  # a new round


def test_a_new_attempt_starts_a_new_picture():
    story = told(
        events.AttemptStarted(1, "cpu", attempt=1),
        PhaseStarted("cache_texts", 3, time=1.0),
        events.Finished("paused", 5, None),
        events.AttemptStarted(2, "cuda:0", attempt=2),
    )
    assert story.phases == {}
    assert story.finished is None
    assert (story.device, story.attempt) == ("cuda:0", 2)


def test_a_terminal_shows_bar_count_time_left_and_figures():
    story = told(PhaseStarted("train", 100, time=0.0), step(40, 80, loss=0.1234, memory=7 * 2**30 + 2**28))
    shown = on_terminal(story, 80.0)
    for text in ("Train", "━", "40/100", "2:00 left"):
        assert text in shown
    assert "epoch 1 · loss 0.1234 (now 0.1234) · learning rate 0.0001 unet · 2 images/s · 7.2 GiB" in shown


def test_the_time_spent_waiting_for_data_is_shown():
    steps = [replace(step(number, 1.0), seconds=2.0, data_seconds=0.01) for number in (1, 2, 3)]
    assert "images/s · data wait 0.5%" in on_terminal(told(PhaseStarted("train", 100, time=0.0), *steps), 4.0)


def test_plain_lines_tell_beginnings_progress_now_and_then_and_ends():
    happened = [
        PhaseStarted("cache_pictures", 40, time=100.0),
        *(PhaseProgress("cache_pictures", number, 40, time=100.0 + number) for number in range(1, 41)),
        PhaseFinished("cache_pictures", 40.0, time=140.0),
        PhaseStarted("train", 30, time=140.0),
        *(step(number, 140 + 2 * number) for number in range(1, 31)),
        PhaseFinished("train", 60.0, time=200.0),
    ]
    lines = plain(*happened)
    assert lines[:2] == ["Encode images: 40", "Encode images 10/40, 0:30 left"]
    assert lines[5:7] == ["Encode images: done in 0:40", "Train: 30"]
    assert lines[7].startswith("Train 5/30, 0:50 left · epoch 1 · loss 0.5000 (now 0.5000)")
    assert lines[-1].startswith("Train 30/30")
    assert len(lines) == 13


def test_a_phase_that_is_taken_up_again_is_told_once():
    rounds = [
        event
        for at in (1.0, 100.0)
        for event in (
            PhaseStarted("load", 2, time=at),
            PhaseFinished("load", 1.0, time=at + 1),
            PhaseStarted("train", 9, time=at + 2),
            PhaseFinished("train", 2.0, time=at + 4),
            PhaseStarted("preview", 2, time=at + 4),
            PhaseFinished("preview", 2.0, time=at + 6),
        )
    ]
    assert plain(*rounds) == ["Load the base", "Load the base: done in 0:01", "Train: 9"]


def test_the_last_step_is_always_told():
    lines = plain(PhaseStarted("train", 3, time=1.0), step(1, 1.1), step(2, 1.2), step(3, 1.3))
    assert [line.split(",")[0] for line in lines] == ["Train: 3", "Train 3/3"]


def test_the_past_sets_the_scene_and_is_not_told_again():
    past = [PhaseStarted("train", 10, time=1.0), events.Notice("a", "Old news."), step(1, 2.0, loss=0.9)]
    lines = plain(events.Notice("b", "Fresh news."), step(2, 30.0, loss=0.1), past=past)
    assert lines[0] == "Fresh news."
    assert lines[1].startswith("Train 2/10")
    assert "now 0.1000" in lines[1]
    assert len(lines) == 2


def test_json_lines_are_the_events_themselves_with_the_past_first():
    stream = io.StringIO()
    past, later = events.Notice("a", "b", time=1.0, attempt=1), step(1, 2.0)
    with open_display(stream, as_json=True, past=[past]) as show:
        show(later)
        show(PhaseStarted("check", 3))
    lines = stream.getvalue().splitlines()
    assert [events.from_line(line) for line in lines[:2]] == [past, later]
    assert json.loads(lines[2])["time"] > 0  # from before there is a run


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (events.AttemptStarted(7, "cuda:0", attempt=2), "Started on cuda:0 (attempt 2)."),
        (
            events.CachingSpeed("cache_pictures", 1240, 155.0, 22.46, 8.125, 431.0),
            "Encoded 1,240 images in 2:35, 8 per second; throughput per stage: decoding 22.5, encoding 8.12, "
            "writing 431.",
        ),
        (
            events.CachingSpeed("cache_texts", 50, 2.0, None, 26.0, 500.0),
            "Encoded 50 captions in 0:02, 25 per second; throughput per stage: encoding 26, writing 500.",
        ),
        (
            events.CachingSpeed("cache_texts", 1, 0.0, None, 2512.3, 1e9),
            "Encoded 1 caption in 0:00, 1,000 per second; throughput per stage: encoding 2,512.",
        ),
        (events.Validation(1200, 0.25, True, {}), "Step 1,200: loss 0.2500 with fixed noise on validation images."),
        (
            events.Validation(5, None, False, {}),
            "Step 5: loss not finite with fixed noise on training images (no images held out).",
        ),
        (events.Preview(5, 0, "a.png", 1.26), "Step 5: rendered a.png in 1.3 s."),
        (events.Preview(5, 0, "a.png", 1.26, True), "Step 5: rendered a.png from the EMA weights in 1.3 s."),
        (events.Saved(5, "a.safetensors", ""), "Step 5: wrote a.safetensors."),
        (events.CommandEvent("save", "done", "a.safetensors"), "save: done, a.safetensors."),
        (events.Notice("x", "The disk is nearly full."), "The disk is nearly full."),
        (
            events.MemoryExhausted("train", 7, 20 << 20, "backward", "unet.mid_block", 5 << 30, 6 << 30, 5 << 30),
            "Out of memory: train, backward, in unet.mid_block, 20.0 MiB more requested, 6.0 GiB reserved, "
            "5.0 GiB forecast.",
        ),
        (events.MemoryExhausted("first_step", 0, None, "", "", None, None, None), "Out of memory: first step."),
        (
            events.SteppedDown(7, 1, {"gradient_checkpointing": "full", "micro_batch": 2}, False),
            'Continuing from step 8 with fit.gradient_checkpointing = "full", fit.micro_batch = 2; '
            "the result differs only by rounding.",
        ),
        (
            events.SteppedDown(7, 1, {"vae_tiling": True}, True),
            "Continuing from step 8 with fit.vae_tiling = true; the result stays the same.",
        ),
        (
            events.SteppedDown(7, 1, {"quantize": "nf4"}, False),
            'Continuing from step 8 with fit.quantize = "nf4"; a base with fewer bits costs some fidelity.',
        ),
        (
            events.Slow(9, 40.0, 1.5, "spilled", "7.9 of 8.0 GiB"),
            "Step 9 took 40.0 s instead of the usual 1.5 s: the GPU is full, and its driver may use main memory "
            "instead (7.9 of 8.0 GiB).",
        ),
        (
            events.Slow(9, 40.0, 1.5, "unknown", ""),
            "Step 9 took 40.0 s instead of the usual 1.5 s: the reason is unknown; check other programs and power "
            "saving.",
        ),
        (
            events.DataWait(60, 0.05, []),
            "Training waits for data 5.0% of the time. Move the cache to a faster disk, or close programs that use "
            "this one.",
        ),
        (
            events.DataWait(60, 0.05, ["loader_workers", "prefetch_batches"]),
            "Training waits for data 5.0% of the time. Remove fit.loader_workers and fit.prefetch_batches from the "
            "job, so that loading adapts to this PC; or move the cache to a faster disk, or close programs that use "
            "this one.",
        ),
        (events.ErrorEvent("x", "It broke.", "Mend it."), "Error: It broke.\nWhat to do: Mend it."),
        (events.Finished("done", 30, "a.safetensors"), "Done after 30 steps. The LoRA is a.safetensors."),
        (events.Finished("failed", 3, None), "Failed at step 3."),
        (events.CheckpointEvent(5, "step-00000005"), None),
        (events.Skipped(5, "loss"), None),
        (events.UnknownEvent("{}"), None),
    ],
)
def test_each_event_has_its_sentence(event, text):
    assert words.sentence(event) == text


def test_a_run_that_can_go_on_says_how():
    told = words.finish(events.Finished("paused", 3, None, "my style"))
    assert told == 'Paused at step 3. Continue with `python -m trainer resume "my style"`.'
    assert words.finish(events.Finished("paused", 3, None)) == "Paused at step 3. It can be resumed."
    assert "resume" not in words.finish(events.Finished("done", 3, None))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (725, "12:05"), (3599.9, "1:00:00"), (11525, "3:12:05")]
)
def test_durations(seconds, text):
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1023.7, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (99.9 * (1 << 20), "99.9 MiB"),
        (99.96 * (1 << 20), "100 MiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (3 << 40, "3072 GiB"),
    ],
)
def test_sizes(number, text):
    assert words.size(number) == text


def test_a_share_is_told_in_one_unit_or_in_two():
    assert share(5 << 30, 8 << 30) == "5.0 of 8.0 GiB"
    assert share(26 << 20, 8 << 30) == "26.0 MiB of 8.0 GiB"


def test_what_is_loaded_is_told_as_a_share_of_bytes_and_weights_alike():
    assert words.whole("load", 6_442_736) == "" and words.progress("load", 3_221_368, 6_442_736) == "50%"
    assert words.whole("download", 6_442_736) == ": 6.1 MiB" and words.whole("cache_texts", 40) == ": 40"
    assert words.progress("load", 3, 686) == "0%" and words.progress("load", 3, None) == ""


def test_every_phase_and_outcome_has_its_words():
    from typing import get_args

    assert set(words.PHASES) == set(get_args(events.Phase))
    assert set(words.OUTCOMES) == set(get_args(events.Outcome))


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_on_a_real_terminal_bars_move_and_sentences_stay():
    import pty

    leader, follower = pty.openpty()
    shown = bytearray()

    def read():
        while True:
            try:
                shown.extend(os.read(leader, 65536))
            except OSError:  # the other end is closed
                return

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(follower, "w", encoding="utf-8") as stream, open_display(stream, as_json=False) as show:
        show(PhaseStarted("train", 2, time=1.0))
        show(step(1, 2.0))
        show(events.Notice("a", "Something [bold]worth[/bold] knowing."))
        show(step(2, 3.0))
        show(PhaseFinished("train", 2.0, time=3.0))
    reader.join()
    os.close(leader)
    text = shown.decode("utf-8")
    assert "Something [bold]worth[/bold] knowing." in text  # names of files are no markup
    assert "2/2" in text
    assert "\x1b[" in text


@pytest.mark.skipif(sys.platform == "win32", reason="needs a terminal that can be closed under a program")
def test_a_terminal_that_is_closed_under_the_bars_ends_nothing():
    terminal, ours = os.openpty()
    with os.fdopen(ours, "w", encoding="utf-8") as stream:
        with open_display(stream, as_json=False) as show:
            show(PhaseStarted("train", 10, time=1.0))
            os.close(terminal)
            show(events.Notice("a", "The window has gone.", time=2.0))
            show(step(1, 3))
        stream.write("what is held back until the exit")
