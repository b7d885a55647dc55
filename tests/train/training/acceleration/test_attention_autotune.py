"""The attention kernel of a run is the quickest of those that do the same, by a measurement at its own shapes.

There is no card here: PyTorch's two kernels on the CPU, flash and math, race in its place, really computed. Only what
a clock says is given where a test needs to know who wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.images import make_picture
from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base, tiny_configs, tiny_models
from tests.train.training.run.test_run import run_of
from trainer.config.base import Family
from trainer.config.fit import FitConfig
from trainer.config.job import Job
from trainer.config.load import load_job, parse_job
from trainer.files.assets import bundled_configs
from trainer.protocol import events
from trainer.training.acceleration import attention_autotune
from trainer.training.acceleration.attention_autotune import (
    Clock,
    Shape,
    attention_shapes,
    autotune,
    autotune_attention,
)
from trainer.training.device.device import AttentionChoice
from trainer.training.run.resume import resume
from trainer.training.run.start import PlannedFit, start

CPU = torch.device("cpu")
SHAPES = {Shape(2, 2, 8, 20, 20): 3.0, Shape(2, 4, 8, 5, 77): 2.0}


class Attended(TorchFunctionMode):
    """Sees the shapes in which a model attends."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[Shape] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            (pictures, heads, queries, width), keys = args[0].shape, args[1].shape[2]
            self.shapes[Shape(pictures, heads, width, queries, keys)] += 1
        return func(*args, **(kwargs or {}))


class Flashes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts forwards and backwards of flash attention, which math has none of."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "flash_attention" in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def flash_and_math(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_autotune.CANDIDATES, "cpu", ("flash", "math"))


def clock_of(seconds: Mapping[str, float], called: list[str]) -> Clock:
    """A clock that does the work once, sees by its operations which kernel that was, and says what it is told to."""

    def clock(work: Callable[[], object]) -> float:
        with Flashes() as flashes:
            work()
        assert flashes.count in (0, 2)
        called.append("flash" if flashes.count else "math")
        return seconds[called[-1]]

    return clock


@pytest.mark.parametrize(("family", "size"), [("sd15", (128, 64)), ("sdxl", (64, 64)), ("sdxl", (104, 72))])
def test_the_shapes_by_the_config_are_those_that_the_unet_attends_in(family: Family, size: tuple[int, int]) -> None:
    config, unet = tiny_configs(family)["unet"], tiny_models(family)["unet"]
    width, words = config["cross_attention_dim"], 9
    more = {"text_embeds": torch.zeros(2, 32), "time_ids": torch.zeros(2, 6)} if family == "sdxl" else None
    with Attended() as attended, torch.no_grad():
        sample = torch.zeros(2, 4, size[1] // 8, size[0] // 8)
        unet(sample, torch.zeros(2), torch.zeros(2, words, width), added_cond_kwargs=more)
    assert attended.shapes == attention_shapes(config, size, 2, words)


@pytest.mark.parametrize(
    ("family", "side", "most", "layers"),
    [("sd15", 512, Shape(1, 8, 40, 4096, 4096), 16), ("sdxl", 1024, Shape(1, 10, 64, 4096, 4096), 70)],
)
def test_the_shapes_of_the_published_bases(family: Family, side: int, most: Shape, layers: int) -> None:
    found = attention_shapes(bundled_configs(family)["unet"], (side, side), 1, 77)
    assert max(found, key=lambda shape: shape.queries * shape.keys) == most
    assert sum(found.values()) == 2 * layers


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [((1.0, 2.0), "flash"), ((2.0, 1.0), "math"), ((1.0, 0.98), "flash")],
    ids=["planned is quicker", "the other is quicker", "chance"],
)
def test_the_quickest_wins_unless_it_may_be_chance(seconds: tuple[float, float], chosen: str) -> None:
    called: list[str] = []
    found = autotune(
        "flash", SHAPES, CPU, torch.float32, clock_of(dict(zip(("flash", "math"), seconds, strict=True)), called)
    )
    assert found is not None and found.chosen == chosen
    assert called == ["flash", "flash", "math", "math"]
    assert found.seconds == {"flash": 5 * seconds[0], "math": 5 * seconds[1]}
    assert not found.refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_real_clocks_measure_and_leave_chance_as_it_was(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_autotune, "SECONDS", 0.002)
    before = torch.get_rng_state()
    found = autotune("math", SHAPES, CPU, dtype)
    assert found is not None and not found.refused
    assert all(0 < seconds < 10 for seconds in found.seconds.values()) and len(found.seconds) == 2
    assert found.chosen == ("flash" if found.seconds["flash"] < 0.97 * found.seconds["math"] else "math")
    assert all(f"{kernel} {taken * 1e3:.2f} ms" in found.sentence for kernel, taken in found.seconds.items())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_kernel_that_is_missing_is_told_and_never_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_autotune.CANDIDATES, "cpu", ("flash", "efficient", "cudnn"))
    found = autotune("flash", SHAPES, CPU, torch.bfloat16, clock_of({"flash": 9.0}, []))
    assert found is not None and found.chosen == "flash"
    assert found.sentence.endswith("; efficient: not supported here; cudnn: not supported here).")


@pytest.fixture
def wrong_math(monkeypatch: pytest.MonkeyPatch) -> None:
    """Math whose gradients are wrong, its results right: as cuDNN's once were."""
    right = F.scaled_dot_product_attention

    def wrong(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not torch._C._get_flash_sdp_enabled():
            key = key.detach() + (key - key.detach()) * 1.2
        return right(query, key, value)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)


@pytest.mark.usefixtures("wrong_math")
def test_a_kernel_with_wrong_gradients_is_refused() -> None:
    found = autotune("flash", SHAPES, CPU, torch.bfloat16, clock_of({"flash": 9.0, "math": 0.1}, []))
    assert found is not None and found.chosen == "flash"
    assert found.refused["math"].startswith("results differ from flash by 2")


@pytest.mark.parametrize(
    ("kept", "most", "refused"), [(0, 0, False), (0, 33 << 20, True), (1 << 20, 0, True), (1 << 10, 31 << 20, False)]
)
def test_a_kernel_that_takes_more_memory_than_was_planned_is_refused(
    kept: int, most: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU counts no memory: what a card would say is stated."""

    def held(device: torch.device, work: Callable[[], Any]) -> tuple[Any, int, int]:
        more = not torch._C._get_flash_sdp_enabled()
        return work(), (1 << 20) + more * kept, (1 << 20) + more * most

    monkeypatch.setattr(attention_autotune, "measure_memory", held)
    found = autotune("flash", SHAPES, CPU, torch.float32, clock_of({"flash": 9.0, "math": 0.1}, []))
    assert found is not None and (found.chosen == "flash") is refused
    assert found.refused == ({"math": "needs more memory than flash"} if refused else {})


@pytest.mark.parametrize("other", [16, 256])
def test_a_kernel_that_heads_of_a_text_encoder_do_not_suit_is_refused(
    other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch refuses a kernel by an error, which no CPU gives for a width: the width 256 stands for one."""
    attend = F.scaled_dot_product_attention

    def refusing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if query.shape[-1] == 256 and not torch._C._get_flash_sdp_enabled():
            raise RuntimeError("No available kernel. Aborting execution.")
        return attend(query, key, value)

    monkeypatch.setattr(F, "scaled_dot_product_attention", refusing)
    monkeypatch.setattr(attention_autotune, "stopwatch", lambda _: clock_of({"flash": 2.0, "math": 1.0}, []))
    job = parse_job('name = "one"\nbase.model = "base"\ndataset.folders = [{path = "cats"}]\n', "job.toml", Path())
    text = {"hidden_size": 2 * other, "num_attention_heads": 2}
    planned = job.replaced(fit=job.fit.replaced(attention="flash"))
    found = autotune_attention(planned, None, tiny_configs("sd15")["unet"], [text], [make_picture()])
    assert found is not None and (found.chosen == "math") is (other == 16)
    refused = {"math": "does not support head widths 8, 16, 256"}
    assert found.refused == ({} if other == 16 else refused)


@pytest.mark.parametrize("failing", ["flash", "math"])
def test_where_timing_fails_what_was_planned_stays(failing: str) -> None:
    counted: list[str] = []
    clock = clock_of({"flash": 9.0, "math": 0.1}, counted)

    def failing_clock(work: Callable[[], object]) -> float:
        seconds = clock(work)
        if counted[-1] == failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return seconds

    found = autotune("flash", SHAPES, CPU, torch.float32, failing_clock)
    assert found is not None and found.chosen == "flash"
    assert found.refused == {failing: "out of memory"} and failing not in found.seconds


def test_nothing_races_where_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert autotune("efficient", SHAPES, CPU, torch.float32) is None
    monkeypatch.delitem(attention_autotune.CANDIDATES, "cpu")
    assert autotune("flash", SHAPES, CPU, torch.float32) is None


# In a run.

BRIEF = ("report.previews.prompts=[]", "recipe.steps=2", "recipe.layers=attention", "report.saving.checkpoint_every=1")


def as_on_a_card(job: Job, written: FitConfig, source: object, pictures: object, machine: object) -> PlannedFit:
    """The CPU is always deterministic, and then nothing races."""
    return PlannedFit(job.fit.replaced(deterministic=False))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path, tiny_base("sd15", tmp_path / "bases"), photographs(tmp_path / "pictures", count=3))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was timed, by clocks that say that math is quicker."""
    found: list[str] = []
    monkeypatch.setattr(attention_autotune, "stopwatch", lambda _: clock_of({"flash": 2.0, "math": 1.0}, found))
    yield found


def test_a_run_takes_the_winner_says_so_and_never_measures_again(job: Path, called: list[str]) -> None:
    seen: list[str] = []

    def watch(event: events.Event) -> None:
        seen.append(event.phase if isinstance(event, events.PhaseStarted) else "")
        if seen[-1] == "train":
            flashes.count = 0

    with Flashes() as flashes:
        assert start(job, BRIEF, watch, as_on_a_card) == 0
    run = run_of(job)
    assert not flashes.count and "train" in seen
    assert load_job(run.job).fit.attention == "math"
    assert set(called) == {"flash", "math"}
    timed = len(called)

    def notices() -> list[str]:
        return [one.sentence for one in events.read_events(run.events)[0] if isinstance(one, events.Notice)]

    (sentence,) = [one for one in notices() if one.startswith("Attention")]
    assert sentence.startswith("Attention kernel: math (per micro-batch, forward and backward: flash ")
    assert resume(run, lambda _: None, steps=3) == 0
    assert len(called) == timed and notices().count(sentence) == 1


@pytest.mark.parametrize(("written", "deterministic"), [("flash", False), (None, True)])
def test_what_is_written_or_has_to_be_the_same_in_every_run_does_not_race(
    written: AttentionChoice | None, deterministic: bool, called: list[str]
) -> None:
    job = parse_job('name = "one"\nbase.model = "base"\ndataset.folders = [{path = "cats"}]\n', "job.toml", Path())
    frozen = job.replaced(fit=job.fit.replaced(attention="flash", deterministic=deterministic))
    assert autotune_attention(frozen, written, bundled_configs("sd15")["unet"], (), ()) is None and not called
