"""The step in low precision, without host reads, with checkpointing that really recomputes, and attention as stated."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.loras import Models, random_weights
from tests.support.steps import make_batch, step_models, take_gradient
from trainer.adapter.attach import Adapter
from trainer.base.encoding import TextConditioning
from trainer.config.base import Family
from trainer.config.recipe import ObjectiveConfig
from trainer.errors import JobError
from trainer.training.device.device import KERNELS, attention_kernels
from trainer.training.device.gradient_checkpointing import checkpointing_blocks, set_checkpointing
from trainer.training.objective import NoiseSchedule
from trainer.training.optim.master_weights import LossScaler, MasterWeights, clip, measure
from trainer.training.step import MicroBatch, training_step

FAMILIES: tuple[Family, ...] = ("sd15", "sdxl")
# What makes the host wait on a GPU: reading a value, or a shape that depends on values.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "unique_consecutive"}


def adapted(family: Family, dtype: torch.dtype) -> tuple[Models, Adapter]:
    models = Models.copies(family, dtype)
    adapter = models.attach()
    random_weights(adapter)
    return models, adapter


def schedule(dtype: torch.dtype = torch.float32) -> NoiseSchedule:
    return NoiseSchedule.create("epsilon", False).to("cpu", dtype)


class Waits(TorchDispatchMode):
    """Lists the operations that would make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        )
        if name in WAITING or by_mask:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_read_from_the_device(family: Family) -> None:
    models, _ = adapted(family, torch.float32)
    batch = make_batch(family, (10, 500), dtype=torch.float32)
    objective = ObjectiveConfig(min_snr_gamma=5.0, debiased_estimation=False, loss="huber")
    with Waits() as mode:
        loss = training_step(step_models(models), schedule(), objective, batch, torch.tensor(1024.0))
    assert mode.seen == []
    with Waits() as mode:
        loss.item()
        torch.ones(3)[torch.tensor([True, False, True])]
    assert set(mode.seen) >= {"_local_scalar_dense", "index"}


def test_the_guard_needs_one_read() -> None:
    """The result of `measure` is one tensor; later code uses the two numbers in it."""
    models, adapter = adapted("sd15", torch.float32)
    masters = MasterWeights(adapter.parameters)
    batch = make_batch("sd15", (10,), dtype=torch.float32)
    with Waits() as mode:
        loss = training_step(step_models(models), schedule(), ObjectiveConfig(), batch)
        masters.accumulate()
        measured = measure(loss, masters)
        assert measured.shape == (2,)
        clip(masters, 3.0, 1.0)
        masters.refresh()
    assert mode.seen == []


@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_the_scale_multiplies_gradients_and_not_the_loss(scale: float) -> None:
    models, adapter = adapted("sd15", torch.float64)
    batch = make_batch("sd15", (10, 500))
    plain = training_step(step_models(models), schedule(torch.float64), ObjectiveConfig(), batch)
    gradient = take_gradient(adapter)
    scaled = training_step(step_models(models), schedule(torch.float64), ObjectiveConfig(), batch, scale)
    assert torch.equal(scaled, plain)
    assert torch.equal(take_gradient(adapter), gradient * scale)  # powers of two are exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_low_precision_learns_in_the_same_direction(family: Family, dtype: torch.dtype) -> None:
    """Latents, noise and loss stay fp32; the UNet computes in its own dtype; fp16 goes through the loss scale."""
    batch = make_batch(family, (100, 800), dtype=torch.float32)
    scale = LossScaler().scale if dtype == torch.float16 else 1.0

    def learn(dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor]:
        models, adapter = adapted(family, dtype)
        masters = MasterWeights(adapter.parameters)
        loss = training_step(step_models(models), schedule(), ObjectiveConfig(), batch, scale)
        masters.accumulate()
        value, norm = measure(loss, masters, scale).tolist()
        assert math.isfinite(value)
        assert math.isfinite(norm)
        clip(masters, norm, 0.0, scale)
        return loss, torch.cat([gradient.flatten() for gradient in masters.gradients()])

    loss, gradient = learn(dtype, scale)
    expected_loss, expected = learn(torch.float32, 1.0)
    assert loss.dtype == gradient.dtype == torch.float32
    assert float(loss) == pytest.approx(float(expected_loss), rel=0.02)
    assert float(F.cosine_similarity(gradient, expected, dim=0)) > 0.99
    assert float(gradient.norm()) == pytest.approx(float(expected.norm()), rel=0.05)


def test_an_overflow_in_fp16_is_seen_and_answered() -> None:
    models, adapter = adapted("sd15", torch.float16)
    masters = MasterWeights(adapter.parameters)
    scaler = LossScaler(scale=2.0**28)
    batch = make_batch("sd15", (100, 800), dtype=torch.float32)
    back_offs = 0
    while True:
        loss = training_step(step_models(models), schedule(), ObjectiveConfig(), batch, scaler.scale)
        masters.accumulate()
        value, norm = measure(loss, masters, scaler.scale).tolist()
        assert math.isfinite(value)
        masters.zero_grad()
        scaler.update(finite=math.isfinite(norm))
        if math.isfinite(norm):
            break
        back_offs += 1
    assert back_offs > 0


class Calls:
    """Counts how often modules run."""

    def __init__(self, *modules: nn.Module) -> None:
        self.counts = [0] * len(modules)
        self.handles = [
            # A recomputed block is left as soon as it has what backward needs: it begins, but may not end.
            module.register_forward_pre_hook(lambda *_, index=index: self.note(index))
            for index, module in enumerate(modules)
        ]

    def note(self, index: int) -> None:
        self.counts[index] += 1

    def take(self) -> list[int]:
        counts, self.counts = self.counts, [0] * len(self.counts)
        return counts


def test_checkpointed_blocks_run_twice_and_others_once() -> None:
    models, _ = adapted("sdxl", torch.float32)
    unet = models.unet
    watched = [unet.down_blocks[0].resnets[0], unet.down_blocks[1].attentions[0].transformer_blocks[0]]
    watched += [unet.mid_block.attentions[0].transformer_blocks[0], unet.up_blocks[0].resnets[0]]
    encoder = models.text_encoders[1].text_model
    calls = Calls(*watched, encoder.encoder.layers[0].mlp)
    batch = make_batch("sdxl", (10,), dtype=torch.float32)

    def count() -> list[int]:
        training_step(step_models(models), schedule(), ObjectiveConfig(), batch)
        return calls.take()

    def modes() -> list[bool]:
        return [module.training for encoder in models.text_encoders for module in encoder.modules()]

    before = modes()
    assert count() == [1, 1, 1, 1, 1]
    set_checkpointing(unet, models.text_encoders, "full", dropouts=False)
    assert count() == [2, 2, 2, 2, 2]
    set_checkpointing(unet, models.text_encoders, ["down_blocks.1", "up_blocks.0"], dropouts=False)
    assert count() == [1, 2, 1, 2, 1]
    set_checkpointing(unet, models.text_encoders, ["mid_block"], dropouts=False)
    assert count() == [1, 1, 2, 1, 1]
    set_checkpointing(unet, models.text_encoders, "none", dropouts=False)
    assert count() == [1, 1, 1, 1, 1]
    assert modes() == before


@pytest.mark.parametrize("dropouts", [False, True])
def test_checkpointing_keeps_the_state_of_chance_for_dropouts_alone(
    dropouts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph that is being recorded refuses to tell it."""
    models, _ = adapted("sd15", torch.float32)
    set_checkpointing(models.unet, models.text_encoders, "full", dropouts=dropouts)
    asked: list[torch.Tensor] = []
    state = torch.get_rng_state()
    monkeypatch.setattr(torch, "get_rng_state", lambda: asked.append(state) or state)
    training_step(step_models(models), schedule(), ObjectiveConfig(), make_batch("sd15", (10,), dtype=torch.float32))
    assert bool(asked) == dropouts


def test_unknown_blocks_are_named_with_the_valid_ones() -> None:
    unet = copy.deepcopy(Models.copies("sd15", torch.float32).unet)
    assert list(checkpointing_blocks(unet)) == [
        *("down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.0", "up_blocks.1")
    ]
    with pytest.raises(JobError, match=r"names down_blocks\.7, which this base does not have") as caught:
        set_checkpointing(unet, [], ["mid_block", "down_blocks.7"], dropouts=False)
    assert caught.value.remedy == (
        'Choose from down_blocks.0, down_blocks.1, mid_block, up_blocks.0, up_blocks.1, or use "none" or "full".'
    )


def test_micro_batches_move_whole() -> None:
    batch = make_batch("sdxl", (1, 2))
    moved = batch.to(torch.device("meta"))
    for name in ("latents", "noise", "input_noise", "timesteps", "time_ids", "mask", "weights"):
        before, after = getattr(batch, name), getattr(moved, name)
        assert (after.device.type, after.shape, after.dtype) == ("meta", before.shape, before.dtype)
    assert [tokens.device.type for tokens in moved.tokens] == ["meta", "meta"]
    cached = make_batch("sd15", (1, 2), live_text=False, extras=False).to(torch.device("meta"))
    assert cached.text.hidden.device.type == "meta"
    assert (cached.text.pooled, cached.tokens, cached.mask, cached.time_ids) == (None, None, None, None)


def test_a_micro_batch_without_captions_is_an_error() -> None:
    models, _ = adapted("sd15", torch.float32)
    batch = make_batch("sd15", (1,), dtype=torch.float32)
    batch.tokens = None
    with pytest.raises(ValueError, match="encoded captions or tokens"):
        training_step(step_models(models), schedule(), ObjectiveConfig(), batch)


def test_sizes_are_embedded_in_fp32() -> None:
    """1023 and 1024 pixels are one number in bf16; the UNet must still tell them apart."""
    models, _ = adapted("sdxl", torch.bfloat16)
    captured: list[Tensor] = []
    models.unet.add_time_proj.register_forward_hook(lambda module, inputs, output: captured.append(inputs[0]))
    batch: MicroBatch = make_batch("sdxl", (10,), dtype=torch.float32, live_text=False)
    assert isinstance(batch.text, TextConditioning)
    batch.time_ids = torch.tensor([[1023.0, 1024.0, 0.0, 1.0, 1216.0, 832.0]])
    training_step(step_models(models, live_text=False), schedule(), ObjectiveConfig(), batch)
    assert captured[0].tolist() == [1023.0, 1024.0, 0.0, 1.0, 1216.0, 832.0]


@pytest.mark.parametrize("choice", ["auto", "flash", "math"])
def test_attention_uses_the_stated_kernel(choice: str) -> None:
    used: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            used.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    query = torch.randn(1, 2, 16, 8, requires_grad=True)
    with attention_kernels(choice, torch.device("cpu"), torch.float32), Names():
        F.scaled_dot_product_attention(query, query, query).sum().backward()
    flash = [name for name in used if "flash_attention" in name]
    assert len(flash) == (0 if choice == "math" else 2)


@pytest.mark.parametrize("choice", ["efficient", "cudnn"])
def test_a_kernel_the_device_lacks_is_said_in_words(choice: str) -> None:
    with (
        pytest.raises(JobError, match=f'fit.attention = "{choice}": it has no kernel on cpu for bfloat16'),
        attention_kernels(choice, torch.device("cpu"), torch.bfloat16),
    ):
        pass
    assert SDPBackend.CUDNN_ATTENTION not in KERNELS["auto"]
    F.scaled_dot_product_attention(*[torch.zeros(1, 1, 2, 8)] * 3)  # the former choice is back
