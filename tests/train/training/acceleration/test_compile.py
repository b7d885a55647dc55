"""Transformer blocks that are compiled while a step learns: what plain ones learn, and nothing lost where it fails.

Blocks are really read by torch.compile and run as it has read them. What makes kernels of that is left out here, as it
takes minutes; IMPASTO_COMPILER=inductor runs the same tests with it, and more of them.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.support.exhaustion import Exhaustion, Killed, SharedPlace, Trial, step_begins
from tests.support.sample import of_the_day
from tests.train.training.acceleration.test_cuda_graphs import BRIEF, engine_of, learned
from trainer.adapter import lean
from trainer.adapter.lean.lora import FusedInt8
from trainer.config.load import load_job
from trainer.protocol import events
from trainer.training.acceleration import compile as compiled
from trainer.training.acceleration.channels_last import ChannelsLastNormAndSilu
from trainer.training.acceleration.compile import CompiledBlocks, make_compiled
from trainer.training.engine import Engine
from trainer.training.recovery.engine_manager import EngineManager

COMPILER = os.environ.get("IMPASTO_COMPILER", "eager")
ON = "fit.compile=true"
CPU = torch.device("cpu")
ONE = ("recipe.images.buckets=false", "recipe.layers=attention", "recipe.effective_batch=2", "fit.micro_batch=2")
"""One shape of micro-batches, so that little has to be compiled."""
ATTEND = "aten::_scaled_dot_product_flash_attention_for_cpu"
Graph = Callable[..., Any]


class Compiler:
    """A backend of torch.compile that counts the graphs it gets, and how often what it made of them runs."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0
        self.fails_in_backward = False
        """Once, in the block whose turn in backward is last: as kernels for backward are made when it comes there."""
        self._backend = torch._dynamo.lookup_backend(COMPILER)

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Graph:
        self.graphs += 1
        made: Graph = self._backend(graph, inputs)

        def run(*inputs: Any) -> Any:
            self.runs += 1
            outputs = made(*inputs)
            if self.fails_in_backward:
                self.fails_in_backward = False
                outputs[0].register_hook(lambda _: failing_at_once(graph, inputs))
            return outputs

        return run


@pytest.fixture(scope="module")
def one_compiler() -> Iterator[Compiler]:
    """PyTorch keeps what one backend compiled and takes it again for blocks of the same sizes."""
    yield Compiler()
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def compiler(one_compiler: Compiler, shared_home: None, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """What compiles in all tests here."""
    monkeypatch.setattr(compiled, "BACKEND", one_compiler)
    # The test runner would keep thousands of lines of what the compiler notes for its makers.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    one_compiler.runs = 0
    return one_compiler


def pair(place: SharedPlace, told: list[str], family: str = "sd15", *settings: str) -> tuple[Engine, Engine]:
    """One engine whose blocks are compiled and one without."""
    quick, plain = (engine_of(place, family, (*ONE, *settings), told) for _ in range(2))  # type: ignore[arg-type]
    blocks = CompiledBlocks(lambda _, sentence: told.append(sentence))
    blocks.install(quick.models.unet)
    quick.compiled = blocks
    return quick, plain


def lesson(engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of the first effective batch."""
    loss = engine.forward_backward(engine.batches.batch(0))
    return loss, torch.cat([gradient.flatten() for gradient in engine.master_weights.gradients()])


WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain": ("sd15", ()),
    "checkpointed": ("sd15", ("fit.gradient_checkpointing=full",)),
}
if COMPILER != "eager":
    WAYS["checkpointed SDXL"] = "sdxl", ("fit.gradient_checkpointing=full",)
    WAYS["an NF4 base"] = "sd15", ("fit.quantize=nf4",)
    WAYS["an int8 base"] = "sd15", ("fit.quantize=int8",)


@pytest.mark.parametrize("way", of_the_day(2, WAYS))
def test_what_is_learned_is_what_plain_blocks_learn(place: SharedPlace, compiler: Compiler, way: str) -> None:
    family, settings = WAYS[way]
    told: list[str] = []
    quick, plain = pair(place, told, family, *settings)
    (loss, gradient), (plain_loss, plain_gradient) = lesson(quick), lesson(plain)
    assert not told and compiler.runs
    assert float(loss) == pytest.approx(float(plain_loss), rel=1e-5)
    assert float((gradient - plain_gradient).norm() / plain_gradient.norm()) < 1e-5


def test_in_bf16_gradients_are_as_near_to_those_of_fp32_as_without(
    place: SharedPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums that are fused are rounded elsewhere, not more: over twelve batches, by single ones chance decides."""
    exact = gradients(place, "fp32")
    plain, ours = error(gradients(place, "bf16"), exact), error(gradients(place, "bf16", compile=True), exact)
    monkeypatch.setattr(lean, "ENABLED", False)
    peft = error(gradients(place, "bf16"), exact)
    assert 0.0 < ours < 1.1 * max(plain, peft), f"plain {plain:.4f}, compiled {ours:.4f}, PEFT's layers {peft:.4f}"


def gradients(place: SharedPlace, dtype: str, *settings: str, compile: bool = False) -> list[torch.Tensor]:
    """Of twelve batches, at weights of LoRAs that do something."""
    engine = engine_of(place, "sd15", (*ONE, f"fit.dtype={dtype}", *settings), [])  # type: ignore[arg-type]
    if compile:
        engine.compiled = blocks = CompiledBlocks(lambda _, sentence: pytest.fail(sentence))
        blocks.install(engine.models.unet)
    chance = torch.Generator().manual_seed(7)
    for weight in engine.master_weights.masters.values():
        weight.detach().copy_(torch.randn(weight.shape, generator=chance) * 0.05)
    engine.master_weights.refresh()
    found = []
    for batch in map(engine.batches.batch, range(12)):
        engine.master_weights.zero_grad()
        engine.forward_backward(batch)
        found.append(torch.cat([gradient.flatten().double() for gradient in engine.master_weights.gradients()]))
    return found


def error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The mean distance, in norms of what is exact."""
    return float(sum((one - other).norm() / other.norm() for one, other in zip(found, exact, strict=True)) / len(found))


def test_outside_of_a_step_nothing_is_compiled(place: SharedPlace, compiler: Compiler) -> None:
    """So validation and previews are what they are without, to the bit."""
    quick, plain = pair(place, [])
    noisy, words = torch.randn(1, 4, 8, 8), torch.randn(1, 77, quick.models.unet.config["cross_attention_dim"])
    with torch.no_grad():
        found, expected = (engine.models.unet(noisy, 1, words).sample for engine in (quick, plain))
    assert torch.equal(found, expected) and not compiler.runs


def test_a_second_step_compiles_nothing_anew(place: SharedPlace, compiler: Compiler) -> None:
    quick, _ = pair(place, [])
    learned(quick, 1)
    graphs, runs = compiler.graphs, compiler.runs
    learned(quick, 2)
    assert compiler.graphs == graphs and compiler.runs == 3 * runs > 0


def failing_at_once(graph: torch.fx.GraphModule, inputs: Any) -> Graph:
    raise RuntimeError("the compiler cannot do this\nand says more")


def failing_in_backward(graph: torch.fx.GraphModule, inputs: Any) -> Graph:
    """As kernels for backward are made when the first backward comes there: here in the block whose turn is last."""

    def run(*inputs: Any) -> Any:
        outputs = graph.forward(*inputs)
        if not any(isinstance(one, torch.Tensor) and one.grad_fn is not None for one in inputs):
            outputs[0].register_hook(lambda _: failing_at_once(graph, inputs))
        return outputs

    return run


@pytest.mark.parametrize("backend", [failing_at_once, failing_in_backward])
def test_what_cannot_be_compiled_goes_on_plainly_and_is_told_once(
    place: SharedPlace, monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", backend)
    told: list[str] = []
    quick, plain = pair(place, told)
    found, expected = learned(quick), learned(plain)
    assert found[0] == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))
    (sentence,) = told
    assert sentence.startswith("fit.compile: compiling the transformer blocks failed (")
    assert "the compiler cannot do this" in sentence and "more" not in sentence
    assert sentence.endswith("). The run continues without it.")


def test_a_compiler_that_is_ended_once_is_asked_again(
    place: SharedPlace, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C, which all processes of a run get: else a run that is paused so would learn something else."""
    told: list[str] = []
    quick, plain = pair(place, told)
    compiler.fails_in_backward = True
    (loss, gradient), (plain_loss, plain_gradient) = lesson(quick), lesson(plain)
    assert not told and not compiler.fails_in_backward
    assert float(loss) == pytest.approx(float(plain_loss), rel=1e-5)
    assert float((gradient - plain_gradient).norm() / plain_gradient.norm()) < 1e-5
    runs = compiler.runs
    learned(quick, 1)
    assert compiler.runs == runs + runs // 2  # two tries before, one now
    backends: list[Any] = [failing_at_once, compiler]
    monkeypatch.setattr(compiled, "BACKEND", lambda *made: (backends.pop(0) if backends[1:] else compiler)(*made))
    assert not compiled.compiler_error(CPU) and backends == [compiler]


def test_a_fault_of_the_step_itself_is_not_hidden(place: SharedPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    quick, _ = pair(place, [])

    def broken(*_: object, **__: object) -> None:
        raise ValueError("a fault of ours")

    monkeypatch.setattr(quick.models.unet, "forward", broken)
    with pytest.raises(ValueError, match="a fault of ours"):
        learned(quick, 1)


@pytest.mark.parametrize("backend", [None, failing_at_once])
def test_a_run_compiles_only_where_it_can_and_is_asked_to(
    place: SharedPlace, monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    if backend:
        monkeypatch.setattr(compiled, "BACKEND", backend)
    told: list[str] = []

    def made(*settings: str) -> CompiledBlocks | None:
        return make_compiled(load_job(place.job(), settings), CPU, lambda _, sentence: told.append(sentence))

    assert made() is None and made(ON, "fit.cuda_graphs=true") is None and made(ON, "recipe.dropout=0.1") is None
    assert not told
    assert (made(ON) is None) is bool(backend)
    if backend:
        (sentence,) = told
        assert sentence.startswith("fit.compile: no working compiler found (") and "cannot do this" in sentence


# In a run.


def notices(trial: Trial) -> list[str]:
    return [event.sentence for event in trial.of(events.Notice) if event.code == "compile"]


def trial_of(place: SharedPlace, settings: Sequence[str], act: Any = None) -> Trial:
    return Trial(place.job(), [*BRIEF, *ONE, ON, *settings], act)


def test_a_killed_run_is_resumed_to_the_same_lora(place: SharedPlace, compiler: Compiler) -> None:
    """Killed after the third step, between two checkpoints, with validation in between."""

    def act(event: events.Event) -> None:
        if isinstance(event, events.StepEvent) and event.step == 3:
            raise Killed

    settings = ("recipe.steps=4", "report.validation.every=2")
    undisturbed = trial_of(place, settings).start()
    trial = trial_of(place, settings, act).start()
    assert trial.code is None
    assert trial.resume().code == 0 and compiler.runs and not notices(trial)
    assert trial.lora() == undisturbed.lora()
    doubts = [event.sentence for event in undisturbed.of(events.Notice) if event.code == "doubtful"]
    assert len(doubts) == 1 and doubts[0].startswith("fit.compile: forecasts assume blocks that are not compiled")


KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows' SIGTERM ends a process as hard
EVERYTHING = (
    *BRIEF,
    ON,
    "recipe.layers=attention",
    "recipe.images.buckets=false",
    "recipe.effective_batch=2",
    "recipe.steps=4",
    "recipe.rank=64",  # tensors of 4096 elements, from which bitsandbytes keeps 8-bit state
    "recipe.optimizer.name=adamw8bit",
    "recipe.text_encoder.learning_rate=1e-4",
    "fit.dtype=bf16",
    "fit.micro_batch=1",
    "fit.gradient_checkpointing=full",
    "fit.quantize=int8_products",
    "fit.channels_last=true",
    "fit.deterministic=true",  # so that nothing is left to a clock
)
"""All that can be on together without a card; our own LoRA layers always are."""


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that runs of this process are given from now on."""
    given: list[Engine] = []
    build = EngineManager._build

    def watched(keeper: EngineManager, *, fresh: bool) -> Engine:
        given.append(build(keeper, fresh=fresh))
        return given[-1]

    monkeypatch.setattr(EngineManager, "_build", watched)
    return given


@pytest.mark.slow  # seven compilations of about three seconds each; graphs alone are killed and resumed by default
def test_with_everything_on_a_process_that_is_killed_leaves_what_leads_to_the_same_lora(
    place: SharedPlace, compiler: Compiler, engines: list[Engine], tmp_path: Path
) -> None:
    """The third step, which no checkpoint holds, is done again, by another process and with blocks compiled anew."""
    undisturbed = Trial(place.job(), EVERYTHING).start()
    trial = Trial(place.job(), EVERYTHING)
    call = f"from {__name__} import until_killed; until_killed({str(trial.job)!r})"
    with (log := tmp_path / "log.txt").open("wb") as output:
        ended = subprocess.run([sys.executable, "-c", call], stdout=output, stderr=output, check=False)
    assert ended.returncode == (-KILL if os.name == "posix" else KILL), log.read_text(encoding="utf-8")
    told = events.read_events(trial.run.events)[0]
    assert [event.step for event in told if isinstance(event, events.StepEvent)] == [1, 2, 3]
    state = safetensors.torch.load_file(trial.run.checkpoints / "step-00000002" / "optimizer.safetensors")
    assert any(tensor.dtype == torch.uint8 for tensor in state.values())
    assert trial.resume().code == 0
    assert [event.step for event in trial.of(events.StepEvent)] == [3, 4]
    assert trial.lora() == undisturbed.lora()
    undisturbed_engine, resumed_engine = engines
    notices = [event for event in (*told, *undisturbed.seen, *trial.seen) if isinstance(event, events.Notice)]
    assert compiler.runs and "compile" not in {event.code for event in notices}
    assert load_job(trial.run.job).fit.int8_products
    for unet in (undisturbed_engine.models.unet, resumed_engine.models.unet):
        assert {FusedInt8, ChannelsLastNormAndSilu} <= {type(module) for module in unet.modules()}
        assert unet.is_gradient_checkpointing


def until_killed(job: str) -> None:
    """Runs a job in this process and kills it after the third step."""
    compiled.BACKEND = Compiler()  # type: ignore[assignment]

    def act(event: events.Event) -> None:
        if isinstance(event, events.StepEvent) and event.step == 3:
            os.kill(os.getpid(), KILL)

    Trial(Path(job), EVERYTHING, act).start()


def test_memory_that_runs_out_ends_the_compiling_and_not_the_run(place: SharedPlace) -> None:
    exhaustion = Exhaustion(step_begins(3), 2, operation=ATTEND)
    trial = trial_of(place, ("recipe.steps=4",), exhaustion.tell).start()
    assert trial.code == 0 and not exhaustion.left
    assert notices(trial) == ["fit.compile: GPU memory ran out, so compiling is off. The run continues without it."]
    assert not trial.of(events.SteppedDown)
