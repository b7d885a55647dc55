"""Blocks of our own over diffusers' modules: the same numbers, and for backward only what cannot be made again."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from diffusers.models.activations import GEGLU
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from tests.support.counting import StepCounter
from tests.support.loras import Models
from tests.train.adapter.lean.test_layers import FAMILIES, adapted, normal
from trainer.adapter.lean.residual import (
    FrozenConv,
    FrozenResidual,
    LeanResidual,
    NormAndSilu,
    is_channels_last,
    lean_residuals,
)
from trainer.adapter.lean.transformer import LeanBlock, LeanFeedForward, geglu, install
from trainer.config.base import Family
from trainer.config.recipe import RecipeConfig

RANK = 4


def blocks(family: Family, layers: str = "attention") -> list[BasicTransformerBlock]:
    recipe = RecipeConfig.model_validate({"layers": layers, "rank": RANK, "alpha": 2.0})
    models: Models = adapted(family, torch.float32, lean=True, recipe=recipe)[0]
    return [module for module in models.unet.modules() if isinstance(module, BasicTransformerBlock)]


def kept(work: Callable[[], Tensor], weights: nn.Module) -> int:
    """Numbers that autograd keeps for backward, each storage once, without weights."""
    of_weights = {weight.untyped_storage().data_ptr() for weight in weights.parameters()}
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_weights:
            found[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        work().sum().backward()  # type: ignore[no-untyped-call]
    return sum(found.values())


@pytest.mark.parametrize("layers", ["attention", "linear"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformer_block_gives_what_diffusers_gives_bit_for_bit(family: Family, layers: str) -> None:
    """Its gradients too, although what its norms give and what lies between the two layers is made again for them."""
    found = blocks(family, layers)
    assert found and all(type(block) is LeanBlock for block in found)
    for block in found:
        x = normal(2, 5, block.dim).float().requires_grad_()
        text = normal(2, 7, block.attn2.cross_attention_dim).float()
        learnt = [x, *(weight for weight in block.parameters() if weight.requires_grad)]
        assert len(learnt) == 1 + 2 * (8 if layers == "attention" else 10)
        ours, theirs = (
            each(block, x, encoder_hidden_states=text) for each in (LeanBlock.forward, BasicTransformerBlock.forward)
        )
        assert torch.equal(ours, theirs)
        above = normal(*ours.shape, seed=1).float()
        for mine, wanted in zip(*(torch.autograd.grad(one, learnt, above) for one in (ours, theirs)), strict=True):
            assert torch.equal(mine, wanted)


@torch.no_grad()
def test_a_mask_is_left_to_diffusers_block() -> None:
    block = blocks("sdxl")[0]
    x, text = normal(2, 5, block.dim).float(), normal(2, 7, block.attn2.cross_attention_dim).float()
    mask = torch.tensor([[0.0] * 6 + [-1e4]] * 2)[:, None]
    for more in ({"encoder_attention_mask": mask}, {"attention_mask": mask[..., 2:]}):
        masked = block(x, encoder_hidden_states=text, **more)
        assert torch.equal(masked, BasicTransformerBlock.forward(block, x, encoder_hidden_states=text, **more))
        assert not torch.equal(masked, block(x, encoder_hidden_states=text))


def test_a_transformer_block_keeps_what_cannot_be_made_again() -> None:
    """Count the saved bytes by hand, for 5 positions and 7 tokens.

    Of the block's width: the inputs of its three norms, q, k and v, the output of attention, the same for the text, and
    eight times the output of the first feed-forward layer. Also attention's sums for each head, mean and deviation of
    each norm, and the tensors between down and up.
    """
    block = blocks("sdxl")[0]
    width, wide = block.dim, block.attn2.cross_attention_dim
    x, text = normal(1, 5, width).float().requires_grad_(), normal(1, 7, wide).float()
    places = 5 * width * (3 + 4 + 2 + 8) + 2 * 5 * block.attn1.heads + 3 * 2 * 5 + 5 * RANK * (3 + 1 + 1 + 1)
    words = 7 * (2 * width + wide + 2 * RANK)
    assert kept(lambda: block(x, encoder_hidden_states=text), block) == places + words


def test_two_layers_that_learn_keep_no_more_but_what_lies_between_down_and_up() -> None:
    """Neither what the norm gave nor what the second layer was shown."""
    attention, linear = (blocks("sdxl", layers)[0] for layers in ("attention", "linear"))
    x, text = normal(1, 5, attention.dim).float(), normal(1, 7, attention.attn2.cross_attention_dim).float()
    less, more = (
        kept(lambda block=block: block(x.clone().requires_grad_(), encoder_hidden_states=text), block)  # type: ignore[misc]
        for block in (attention, linear)
    )
    assert more - less == 2 * 5 * RANK


def test_what_gates_is_that_of_diffusers() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        theirs = GEGLU(6, 10).to(dtype)
        wide = normal(2, 3, 20).to(dtype).requires_grad_()
        theirs.proj = nn.Identity()  # type: ignore[assignment]
        results = theirs(wide), geglu(wide)
        assert torch.equal(*results)
        above = normal(2, 3, 10, seed=1).to(dtype)
        assert torch.equal(*(torch.autograd.grad(one, wide, above)[0] for one in results))


def residual(inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> ResnetBlock2D:
    torch.manual_seed(3)
    block = ResnetBlock2D(in_channels=inputs, out_channels=outputs, temb_channels=16, groups=4)
    for weight in block.parameters():
        weight.data.normal_(std=0.3)
    return block.to(dtype).requires_grad_(requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [8, 12])
@pytest.mark.parametrize("learns", [None, "conv1", "conv2"])
def test_a_residual_block_gives_what_diffusers_gives_bit_for_bit(
    learns: str | None, outputs: int, dtype: torch.dtype
) -> None:
    """With a convolution in its shortcut and without, all of them frozen or one that learns."""
    theirs = residual(8, outputs, dtype)
    if learns is not None:
        theirs.get_submodule(learns).requires_grad_()
    ours = copy.deepcopy(theirs)
    lean_residuals(ours)
    assert type(ours) is (FrozenResidual if learns is None else LeanResidual)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    x, embedding = (normal(*shape).to(dtype).requires_grad_() for shape in ((2, 8, 6, 5), (2, 16)))
    learnt = [[x, embedding, *(w for w in block.parameters() if w.requires_grad)] for block in (ours, theirs)]
    results = [block(x, embedding) for block in (ours, theirs)]
    assert torch.equal(*results)
    above = normal(2, outputs, 6, 5, seed=1).to(dtype)
    grads = [torch.autograd.grad(one, wanted, above) for one, wanted in zip(results, learnt, strict=True)]
    assert len(grads[0]) == (2 if learns is None else 4)
    for mine, wanted in zip(*grads, strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize(("asked", "saved"), [("maps", {"sum": 1}), ("embedding", {"native_group_norm_backward": 1})])
def test_a_residual_block_works_for_no_gradient_that_nobody_asks_for(asked: str, saved: dict[str, int]) -> None:
    """Nothing is summed up over places for the embedding; for it alone nothing goes through the first norm."""
    block = residual(8, 12)
    lean_residuals(block)
    inputs = {"maps": normal(2, 8, 6, 5).float(), "embedding": normal(2, 16).float()}

    def work(wanted: list[str]) -> tuple[Tensor, StepCounter]:
        given = {name: one.clone().requires_grad_(name in wanted) for name, one in inputs.items()}
        result = block(*given.values())
        above = normal(*result.shape, seed=1).float()
        with StepCounter(torch.device("cpu")) as counter, counter.stage("backward"):
            gradients = torch.autograd.grad(result, [given[name] for name in wanted], above)
        return gradients[wanted.index(asked)], counter

    (alone, less), (together, more) = work([asked]), work(["maps", "embedding"])
    assert torch.equal(alone, together)
    for name, count in saved.items():
        assert more.operations["backward", name] - less.operations["backward", name] == count


def test_maps_may_come_and_gradients_go_in_any_layout() -> None:
    theirs = residual(8, 12)
    ours = copy.deepcopy(theirs)
    lean_residuals(ours)
    x, above = (normal(2, 5, 6, channels, seed=channels).float().permute(0, 3, 1, 2) for channels in (8, 12))
    embedding = normal(2, 16).float()
    assert not x.is_contiguous() and not above.is_contiguous()
    (mine, my_gradient), (wanted, gradient) = (
        (result := block(given, embedding), torch.autograd.grad(result, given, above)[0])
        for block, given in ((block, x.detach().requires_grad_()) for block in (ours, theirs))
    )
    assert torch.allclose(mine, wanted, rtol=1e-5, atol=1e-5)
    assert torch.allclose(my_gradient, gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_frozen_convolution_is_asked_for_its_gradient_in_the_layout_of_what_comes(
    layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout that cuDNN uses follows the tensor shaped like the input; only the default one costs no memory."""
    asked: list[Tensor] = []
    gradient = FrozenConv.gradient

    def noted(conv: FrozenConv, above: Tensor, like: Tensor) -> Tensor:
        asked.append(like)
        return gradient(conv, above, like)

    monkeypatch.setattr(FrozenConv, "gradient", noted)
    conv = nn.Conv2d(8, 6, 3, stride=2, padding=1).to(memory_format=layout).requires_grad_(requires_grad=False)
    lean_residuals(nn.Sequential(conv))
    x = torch.randn(2, 8, 10, 12).to(memory_format=layout).requires_grad_()
    made = conv(x)
    above = torch.randn(made.shape).to(memory_format=layout)
    made.backward(above)
    (like,) = asked
    assert like.shape == x.shape and is_channels_last(like) == (layout == torch.channels_last)
    assert like.untyped_storage().nbytes() == (x.nbytes if layout == torch.channels_last else 4)
    expected = torch.nn.grad.conv2d_input(x.shape, conv.weight, above, stride=2, padding=1)
    torch.testing.assert_close(x.grad, expected)


def test_a_residual_block_keeps_what_its_norms_were_shown() -> None:
    """By hand: maps of 8 and 12 channels, mean and deviation of 4 groups twice, and the embedding's SiLU's input."""
    block = residual(8, 12)
    lean_residuals(block)
    x, embedding = normal(1, 8, 6, 5).float().requires_grad_(), normal(1, 16).float().requires_grad_()
    assert kept(lambda: block(x, embedding), block) == 6 * 5 * (8 + 12) + 2 * 2 * 4 + 16


UNUSUAL_BLOCKS: dict[str, Callable[[], ResnetBlock2D]] = {
    "scaled": lambda: ResnetBlock2D(in_channels=8, temb_channels=16, groups=4, output_scale_factor=2.0),
    "gelu": lambda: ResnetBlock2D(in_channels=8, temb_channels=16, groups=4, non_linearity="gelu"),
    "dropout": lambda: ResnetBlock2D(in_channels=8, temb_channels=16, groups=4, dropout=0.1),
    "scale and shift": lambda: ResnetBlock2D(
        in_channels=8, temb_channels=16, groups=4, time_embedding_norm="scale_shift"
    ),
    "plain embedding": lambda: ResnetBlock2D(in_channels=8, temb_channels=16, groups=4, skip_time_act=True),
    "larger": lambda: ResnetBlock2D(in_channels=8, temb_channels=16, groups=4, up=True),
    "smaller": lambda: ResnetBlock2D(in_channels=8, temb_channels=16, groups=4, down=True),
    "no time": lambda: ResnetBlock2D(in_channels=8, temb_channels=None, groups=4),
}


@pytest.mark.parametrize("kind", UNUSUAL_BLOCKS)
def test_an_unusual_residual_block_stays_as_it_is(kind: str) -> None:
    block = UNUSUAL_BLOCKS[kind]().requires_grad_(requires_grad=False)
    lean_residuals(block)
    assert type(block) is ResnetBlock2D
    assert NormAndSilu not in {type(module) for module in block.modules()}


@pytest.mark.parametrize("learns", ["norm1.weight", "norm2.bias"])
def test_norms_that_learn_stay_as_they_are(learns: str) -> None:
    block = residual(8, 8)
    block.get_parameter(learns).requires_grad_()
    lean_residuals(block)
    assert type(block) is ResnetBlock2D and type(block.norm1) is type(block.norm2) is nn.GroupNorm


def test_convolutions_that_learn_or_pad_otherwise_stay_as_they_are() -> None:
    learning, mirrored, alike, usual = (
        nn.Conv2d(3, 3, 3, **more).requires_grad_(requires_grad=False)  # type: ignore[arg-type]
        for more in ({}, {"padding": 1, "padding_mode": "reflect"}, {"padding": "same"}, {})
    )
    assert learning.bias is not None
    learning.bias.requires_grad_()
    block = residual(8, 12)
    assert block.conv_shortcut is not None
    block.conv_shortcut.requires_grad_()
    lean_residuals(nn.ModuleList([learning, mirrored, alike, usual, block]))
    assert [type(one) is FrozenConv for one in (learning, mirrored, alike, usual)] == [False, False, False, True]
    assert type(block) is LeanResidual and type(block.conv_shortcut) is nn.Conv2d


@pytest.mark.parametrize("family", FAMILIES)
def test_a_unets_last_norm_applies_its_silu(family: Family) -> None:
    unet = adapted(family, torch.float32, lean=True)[0].unet
    assert type(unet.conv_norm_out) is NormAndSilu and type(unet.conv_act) is nn.Identity


def test_what_is_out_of_the_ordinary_stays_as_it_is() -> None:
    """A block that is computed in pieces, one without attention to the text, and other activations."""
    ordinary, pieces = (BasicTransformerBlock(32, 2, 16, cross_attention_dim=24) for _ in range(2))
    pieces.set_chunk_feed_forward(2)
    to_itself = BasicTransformerBlock(32, 2, 16)
    others = [FeedForward(8, activation_fn="gelu"), FeedForward(8, dropout=0.1)]
    install(nn.ModuleList([ordinary, pieces, to_itself, *others, residual(8, 8)]))
    assert [type(block) is LeanBlock for block in (ordinary, pieces, to_itself)] == [True, False, False]
    assert all(type(one) is FeedForward for one in others) and type(ordinary.ff) is LeanFeedForward
