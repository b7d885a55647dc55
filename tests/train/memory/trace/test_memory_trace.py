"""Steps at full size on meta tensors: no weights, no arithmetic, every allocation seen, within seconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.support.cpu_steps import tiny_workload
from tests.support.traced_steps import StepTraces, trace_steps
from trainer.config.base import Family
from trainer.config.fit import FitConfig
from trainer.config.recipe import RecipeConfig
from trainer.memory.trace.memory_trace import MemoryTrace
from trainer.memory.trace.meta_models import empty_engine, label_engine, micro_batch
from trainer.memory.trace.recorder import recording
from trainer.memory.trace.workload import workload_without_base

aten = torch.ops.aten
GIB = 2**30
NATIVE: dict[Family, tuple[int, int]] = {"sd15": (512, 512), "sdxl": (1024, 1024)}
# Seconds of processor time that a trace may take: twenty times what it does on an idle core. Arithmetic takes minutes.
SECONDS = 100.0


def traced(family: Family, fit: dict[str, Any], recipe: dict[str, Any], pictures: int = 1) -> StepTraces:
    subject = workload_without_base(
        family,
        RecipeConfig.model_validate({"resolution": NATIVE[family][0], **recipe}),
        FitConfig.model_validate(fit),
    )
    started = time.process_time()
    tapes = trace_steps(subject, [NATIVE[family]], pictures)
    assert time.process_time() - started < SECONDS
    return tapes


def live(tape: MemoryTrace) -> list[int]:
    """Bytes alive after each event, counted from the tape's beginning; without workspaces."""
    sizes = [0 if storage.kind == "workspace" else storage.bytes for storage in tape.storages]
    return list(accumulate(sizes[event] if event >= 0 else -sizes[~event] for event in tape.events.tolist()))


def operations(tape: MemoryTrace) -> int:
    return sum(work.count for work in tape.work if work.stage in ("forward", "backward", "recompute"))


@pytest.mark.slow
def test_sdxl_at_1024_without_checkpointing() -> None:
    """A micro-step of one picture; elsewhere PEFT was counted at 10.4 k operations and 6.29 GiB, of which we keep 60 %.

    Operations as `tests/benchmarks/speed.py --count --layers linear` counts them in its own way: 2,733 and 4,074.
    """
    tapes = traced("sdxl", {"gradient_checkpointing": "none"}, {})
    micro = tapes.micro_first[1024, 1024]
    assert operations(micro) == pytest.approx(2_733 + 4_074, abs=9)
    assert max(live(micro)) / GIB == pytest.approx(0.6 * 6.29, rel=0.03)
    # What outlives the step is the gradients, once, in fp32, and the loss.
    left = {storage.name: storage for storage in micro.storages if storage.kind == "gradients" and storage.name}
    masters = [storage for name, storage in left.items() if name.startswith("master_gradient.")]
    assert len(masters) == 1  # side by side, under the name of the first
    weights = [storage.bytes for storage in tapes.weights.storages if (storage.name or "").startswith("master.")]
    assert (len(weights), masters[0].bytes) == (2 * 722, sum(weights))
    assert live(micro)[-1] == sum(storage.bytes for storage in masters) + 4


def test_sdxl_at_1024_with_checkpointing() -> None:
    """Blocks keep their inputs and are computed again: a forward more, a tenth of the memory (0.45 GiB kept, A4)."""
    micro = traced("sdxl", {"gradient_checkpointing": "full"}, {}).micro_more[1024, 1024]
    assert 0.85 * 2_733 < operations(micro) - (2_733 + 4_074) < 2_733
    assert 0.45 < max(live(micro)) / GIB < 0.65
    assert {storage.stage for storage in micro.storages} == {"forward", "backward", "recompute", "accumulate"}


def test_sd15_with_its_text_encoder_through_whole_steps() -> None:
    """What stays after either step is the optimizer's state, which appears in the first."""
    tapes = traced("sd15", {}, {"text_encoder": {"learning_rate": 1e-5}}, pictures=2)
    masters = [storage for storage in tapes.weights.storages if (storage.name or "").startswith("master.")]
    assert len(masters) == 2 * (192 + 72)
    state = 2 * sum(storage.bytes for storage in masters) + 4 * len(masters)  # the last: each one's count of steps
    micro = live(tapes.micro_first[512, 512])[-1]
    assert live(tapes.optimizer_first)[-1] == state - micro
    assert live(tapes.optimizer)[-1] == -micro


def test_every_storage_is_told_by_its_module() -> None:
    """Forward, backward and recomputation of a layer are found under its path."""
    micro = traced("sd15", {"gradient_checkpointing": ["up_blocks.3"]}, {}).micro_more[512, 512]
    block = "unet.up_blocks.3.attentions.2.transformer_blocks.0"
    for module in (f"{block}.ff.net.2", f"{block}.attn1", f"{block}.norm3"):
        told = {storage.stage for storage in micro.storages if storage.module.startswith(module)}
        assert told == {"forward", "recompute", "backward"}
    whole = "unet.up_blocks.2.attentions.2.transformer_blocks.0.ff.net.2"
    assert {storage.stage for storage in micro.storages if storage.module == whole} == {"forward", "backward"}
    nowhere = [storage for storage in micro.storages if not storage.module and storage.stage != "accumulate"]
    assert sum(storage.bytes for storage in nowhere) < 0.01 * max(live(micro))


def test_what_is_computed_again_is_what_checkpointing_says() -> None:
    """Operation by operation, over layers of our own; what checkpointing runs again it says itself."""
    recipe = {"layers": "all", "text_encoder": {"learning_rate": 1e-5}}
    subject = tiny_workload("sd15", recipe, {"gradient_checkpointing": "full", "attention": "efficient"})
    engine, account = empty_engine(subject), _Account()
    account.watch((engine.models.unet, *engine.models.text_encoders))
    with recording("efficient") as recorder:
        label_engine(recorder, engine)
        recorder.cut("weights")
        with recorder.stage("forward"), account:
            engine.micro_step(micro_batch(subject, (64, 64), 1))
        tape = recorder.cut("step")
    told = Counter[str]()
    for work in tape.work:
        told[work.stage] += work.count
    assert told == account.operations
    assert min(told.values()) > 100


class _Account(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations by what goes on, as autograd and checkpointing themselves say."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: Counter[str] = Counter()
        self.again = False

    def watch(self, models: Iterable[nn.Module]) -> None:
        """Lets checkpointing say when it computes again."""
        func = partial(checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), self.computing_again()))
        for model in models:
            for module in model.modules():
                if hasattr(module, "_gradient_checkpointing_func"):
                    module._gradient_checkpointing_func = func

    @contextmanager
    def computing_again(self) -> Iterator[None]:
        self.again = True
        try:
            yield
        finally:
            self.again = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor)]
        free = func.is_view or func is aten._unsafe_view.default or "empty" in func.__name__
        if any(tensor.is_meta for tensor in tensors) and not free:
            in_backward = torch._C._current_graph_task_id() != -1
            self.operations["recompute" if self.again else "backward" if in_backward else "forward"] += 1
        return result
