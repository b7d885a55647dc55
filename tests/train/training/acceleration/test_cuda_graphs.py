"""Steps that are recorded once for each shape and replayed: a LoRA to the byte, whatever changes from step to step.

There is no card here: the recorder of tests.support.replaying stands where CUDA graphs would, and all else is the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.support.counting import StepCounter
from tests.support.exhaustion import Exhaustion, Killed, SharedPlace, Trial, step_begins
from tests.support.replaying import Replay, Replayer
from tests.support.sample import of_the_day
from trainer.base.source import open_base
from trainer.config.fit import FitConfig
from trainer.config.load import load_job
from trainer.config.lr_schedule import Segment
from trainer.config.resolve import resolve_job
from trainer.dataset.dataset import read_dataset
from trainer.protocol import events
from trainer.training import engine as engine_module
from trainer.training.acceleration import cuda_graphs
from trainer.training.acceleration.cuda_graphs import make_graphs
from trainer.training.build import build_engine, build_parts
from trainer.training.device.device import this_machine
from trainer.training.engine import Engine
from trainer.training.optim import master_weights
from trainer.training.recovery.engine_manager import EngineManager
from trainer.training.step import MicroBatch, StepModels, training_step

FACTS = {"prediction": "epsilon", "zero_terminal_snr": False}
BRIEF = (
    "recipe.steps=6",
    "recipe.layers=attention",
    "report.previews.prompts=[]",
    "report.validation.every=100",
    "report.validation.timesteps=[500]",
    "report.saving.every_steps=100",
    "report.saving.checkpoint_every=2",
)
ON = "fit.cuda_graphs=true"


class Place(SharedPlace):
    """With short runs."""

    def trial(self, family: str, settings: Sequence[str], act: Any = None) -> Trial:
        return Trial(self.job(family), [*BRIEF, *settings], act)

    def plain(self, family: str, settings: Sequence[str]) -> tuple[str, dict[str, str]]:
        """The LoRA of the run in which every operation is done as it comes."""
        key = (family, tuple(settings))
        if key not in self.known:
            self.known[key] = self.trial(family, settings).start().lora()
        return self.known[key]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(autouse=True)
def replayers(shared_home: None, monkeypatch: pytest.MonkeyPatch) -> list[Replayer]:
    """All that recorded anything."""
    made: list[Replayer] = []

    def make(device: torch.device) -> Replayer:
        made.append(Replayer(device))
        return made[-1]

    monkeypatch.setitem(cuda_graphs.RECORDERS, "cpu", make)
    return made


def replayed(made: Sequence[Replayer]) -> list[int]:
    """How often each recording was replayed."""
    return [len(replay.times) for one in made for replay in one.replays]


def notices(trial: Trial) -> list[str]:
    return [event.sentence for event in trial.of(events.Notice) if event.code == "graphs"]


def engine_of(place: Place, family: str, settings: Sequence[str], told: list[str]) -> Engine:
    """An engine as a run has it, with all that its steps need encoded."""
    job = load_job(place.job(family), settings)
    frozen = resolve_job(job, family=family, samples_per_epoch=6, machine=this_machine("cpu"), **FACTS)  # type: ignore[arg-type]
    listed = read_dataset(frozen.dataset, frozen.recipe).images
    parts = build_parts(frozen, listed, open_base(frozen.base), place.folder / "cache")
    parts.batches.prepare(0, (), (), lambda *_: None, lambda _: None)
    engine = build_engine(frozen, parts, [Segment(0, 6)], fresh=True)
    engine.graphs = make_graphs(frozen.fit, engine.device, lambda _, sentence: told.append(sentence))
    return engine


def learned(engine: Engine, steps: int = 4) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of some steps, and the masters after them."""
    losses = [engine.train_step().loss for _ in range(steps)]
    return losses, [master.detach() for master in engine.master_weights.masters.values()]


def assert_same(found: Any, expected: Any) -> None:
    """Losses and masters to the bit."""
    assert found[0] == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))


NOISE = ("recipe.objective.min_snr_gamma=5.0", "recipe.objective.input_perturbation=0.1", "recipe.images.flip=true")
ONE = ("recipe.images.buckets=false",)
"""One shape, whole micro-batches and rests: recorded in the second step already."""
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "accumulation over several shapes": ("sd15", NOISE),
    "a loss scale that moves, products in int8": ("sd15", (*ONE, "fit.dtype=fp16", "fit.quantize=int8_products")),
    "an NF4 base, checkpointed": (
        "sdxl",
        (*ONE, "fit.quantize=nf4", "fit.dtype=bf16", "fit.gradient_checkpointing=full"),
    ),
    "text encoders that learn": ("sdxl", (*ONE, "recipe.text_encoder.learning_rate=1e-4")),
    "captions of several lengths": ("sd15", ("recipe.token_chunks=150", f"recipe.captions.prefix={'long, ' * 33}")),
    "dropouts": ("sd15", (*ONE, "recipe.dropout=0.1", "recipe.rank_dropout=0.1", "recipe.module_dropout=0.1")),
}


@pytest.mark.parametrize("way", of_the_day(2, WAYS))
def test_what_is_learned_is_what_plain_steps_learn(
    place: Place, replayers: list[Replayer], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(master_weights, "GOOD_STEPS_TO_GROW", 2)
    family, settings = WAYS[way]
    told: list[str] = []
    graphed, plain = (engine_of(place, family, (*settings, *on), told) for on in ((ON,), ()))
    assert plain.graphs is None
    steps = 4 if ONE[0] in settings else 6
    found = learned(graphed, steps)
    assert not told
    # The first of its kind is replayed when it is recorded, then in two steps more.
    times = replayed(replayers)
    assert len(replayers) == 1 and times[:2] == [3, 3] if steps == 4 else sum(times) > len(times) >= 4
    assert_same(found, learned(plain, steps))


Variant = Callable[[Engine, MicroBatch, float | torch.Tensor], float | torch.Tensor]


def vary(monkeypatch: pytest.MonkeyPatch, engines: Sequence[Engine], variant: Variant) -> None:
    """Lets a function have its way with the loss scale of every step."""

    def varied(models: StepModels, schedule: Any, objective: Any, batch: MicroBatch, scale: Any) -> torch.Tensor:
        engine = next(engine for engine in engines if engine.models is models)
        return training_step(models, schedule, objective, batch, variant(engine, batch, scale))

    monkeypatch.setattr(engine_module, "training_step", varied)


@pytest.fixture
def pair(place: Place) -> tuple[Engine, Engine, list[str]]:
    """With graphs and without, and what the first tells."""
    told: list[str] = []
    graphed, plain = (engine_of(place, "sd15", (*ONE, *settings), told) for settings in ((ON,), ()))
    return graphed, plain, told


def test_a_number_of_the_program_that_changes_is_found(
    pair: tuple[Engine, Engine, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What these tests are worth: the same step with a number in it that each step has anew is not the same."""
    graphed, plain, _ = pair
    vary(monkeypatch, (graphed, plain), lambda engine, _, scale: scale * (1.0 + engine.progress.step))
    with pytest.raises(AssertionError):
        assert_same(learned(graphed), learned(plain))


def test_what_reads_from_the_device_goes_on_plainly_and_is_told_once(
    pair: tuple[Engine, Engine, list[str]], replayers: list[Replayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed, plain, told = pair
    vary(monkeypatch, (graphed, plain), lambda _, batch, scale: scale * float(batch.timesteps.max() > 0))
    assert_same(learned(graphed), learned(plain))
    assert not replayed(replayers)
    (sentence,) = told
    assert sentence.startswith("fit.cuda_graphs: capturing a CUDA graph failed (RuntimeError: aten._local_scalar")


def test_a_recording_that_gives_something_else_is_not_used(
    pair: tuple[Engine, Engine, list[str]], replayers: list[Replayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed, plain, told = pair
    replay = Replay.replay

    def off(one: Replay) -> None:
        replay(one)
        master = graphed.master_weights.gradients()[-1]
        master += 1e-6

    monkeypatch.setattr(Replay, "replay", off)
    assert_same(learned(graphed), learned(plain))
    assert set(replayed(replayers)) == {1}
    assert told and all("gradients of a CUDA graph differ" in sentence for sentence in told)


def test_weights_that_moved_are_not_read_where_they_were(
    pair: tuple[Engine, Engine, list[str]], replayers: list[Replayer]
) -> None:
    """As when the UNet makes room for previews."""
    graphed, plain, told = pair
    learned(graphed, 3)
    weight = graphed.models.unet.conv_in.weight
    weight.data = weight.data.clone()
    losses, masters = learned(graphed, 1)
    expected = learned(plain)
    assert_same((losses, masters), (expected[0][3:], expected[1]))
    assert len(replayers) == 2 and not told


def test_no_more_shapes_are_recorded_than_memory_is_counted_for(
    pair: tuple[Engine, Engine, list[str]], replayers: list[Replayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_CUDA_GRAPHS", 1)
    graphed, plain, _ = pair
    assert_same(learned(graphed), learned(plain))
    assert len(replayed(replayers)) == 1


def test_memory_that_runs_out_ends_the_graphs_and_not_the_run(place: Place, replayers: list[Replayer]) -> None:
    """In a replayed step, of which the optimizer alone asks for memory then; and once more it would step down."""
    exhaustion = Exhaustion(step_begins(6), 1)
    trial = place.trial("sd15", (ON,), exhaustion.tell).start()
    assert trial.code == 0 and not exhaustion.left
    assert replayed(replayers) and len(replayers) == 1
    assert notices(trial) == [
        "fit.cuda_graphs: GPU memory ran out, so CUDA graphs are off and their memory is released. Affected steps run "
        "normally, without a CUDA graph."
    ]
    assert not trial.of(events.SteppedDown)
    assert trial.lora() == place.plain("sd15", ())


def test_what_was_given_up_stays_so_when_the_engine_is_built_anew(
    place: Place, replayers: list[Replayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is where models did not come back from a preview."""
    drop = EngineManager.free_failed_step

    def drop_all(keeper: EngineManager) -> None:
        drop(keeper)
        keeper.offload()

    monkeypatch.setattr(EngineManager, "free_failed_step", drop_all)
    exhaustion = Exhaustion(step_begins(4), 1)
    trial = place.trial("sd15", (*ONE, ON), exhaustion.tell).start()
    assert trial.code == 0 and not exhaustion.left
    assert len(replayers) == 1 and len(notices(trial)) == 1
    assert trial.lora() == place.plain("sd15", ONE)


def test_memory_that_runs_out_while_a_step_is_recorded_ends_the_graphs(
    pair: tuple[Engine, Engine, list[str]], replayers: list[Replayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of other shapes; gradients stay no longer than in plain steps."""
    graphed, plain, told = pair
    record = Replayer.record

    def fail(replayer: Replayer, work: Callable[[], torch.Tensor]) -> Replay:
        if replayer.replays:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return record(replayer, work)

    monkeypatch.setattr(Replayer, "record", fail)
    assert_same(learned(graphed, 6), learned(plain, 6))
    assert len(replayed(replayers)) == 1
    assert len(told) == 1 and "ran out while a CUDA graph was captured, so CUDA graphs are off" in told[0]
    assert not graphed.master_weights.gradients()


def test_a_killed_run_is_resumed_with_graphs_to_the_same_lora(place: Place, replayers: list[Replayer]) -> None:
    """Killed after the fifth step, between two checkpoints, with previews that read the weights in between."""

    def act(event: events.Event) -> None:
        if isinstance(event, events.StepEvent) and event.step == 5:
            raise Killed

    settings = ("recipe.steps=8", "report.validation.every=3")
    trial = place.trial("sd15", (*settings, ON), act).start()
    assert trial.code is None and len(replayers) == 1
    assert trial.resume().code == 0 and len(replayers) == 2 and not notices(trial)
    assert trial.lora() == place.plain("sd15", settings)


def test_a_replayed_micro_batch_is_one_order_besides_its_inputs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host sends to the device from the micro-batch to gradients that are added up."""
    told: list[str] = []
    graphed = engine_of(place, "sd15", (*BRIEF, *ONE, ON), told)
    learned(graphed, 3)
    learn, orders, sent = cuda_graphs.GraphedSteps.run, list[Replay](), list[tuple[int, int]]()

    def counted(steps: cuda_graphs.GraphedSteps, engine: Engine, micro: MicroBatch) -> torch.Tensor:
        with StepCounter(torch.device("cpu")) as counter, counter.stage("micro"):
            loss = learn(steps, engine, micro)
        sent.append((counter.total(), len(list(micro.tensors()))))
        return loss

    monkeypatch.setattr(cuda_graphs.GraphedSteps, "run", counted)
    monkeypatch.setattr(Replay, "replay", lambda replay: orders.append(replay))
    graphed.train_step()
    assert len(orders) == len(sent) > 0 and not told
    assert all(operations == inputs + 1 for operations, inputs in sent)  # each is copied, and the loss scale is written


def test_a_pytorch_that_a_failed_recording_breaks_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1+cu126"))
    assert (
        make_graphs(FitConfig(cuda_graphs=True), torch.device("cpu"), lambda _, sentence: told.append(sentence)) is None
    )
    assert told == [
        "fit.cuda_graphs needs PyTorch 2.13 or newer, but 2.12.1+cu126 is installed, "
        "so the run continues without CUDA graphs. Install a newer PyTorch to use them."
    ]
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0+cu126"))
    assert make_graphs(FitConfig(cuda_graphs=True), torch.device("cpu"), lambda *_: None) is not None


def test_where_nothing_can_be_recorded_or_is_asked_for_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, cpu = FitConfig(cuda_graphs=True), torch.device("cpu")
    assert make_graphs(asked, cpu, lambda *_: None) is not None
    assert make_graphs(FitConfig(), cpu, lambda *_: None) is None
    monkeypatch.delitem(cuda_graphs.RECORDERS, "cpu")
    assert make_graphs(asked, cpu, lambda *_: None) is None
