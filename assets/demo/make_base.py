"""Trains the demo base, a tiny Stable Diffusion 1.5 that has learned to draw, and saves it as a diffusers folder."""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import drawing
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from diffusers.schedulers.scheduling_pndm import PNDMScheduler
from PIL import Image
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

_Module = TypeVar("_Module", bound=nn.Module)

log = logging.getLogger("make_base")

HERE = Path(__file__).parent
VAE_STEPS = 3200
VAE_WHOLE_FROM = 2750
VAE_BATCH = 16
VAE_CROP = 64
KL_WEIGHT = 1e-4
SHARPEN_STEPS = 500
POOL = 16_000
UNET_STEPS = 8600
UNET_BATCH = 16
MIN_SNR_GAMMA = 5.0
NOISE_OFFSET = 0.25
TEXT_WIDTH = 80
TOKENS = 77
VOCABULARY = 49_408
START, END = 49_406, 49_407
STRANGERS = 400
SAVE_EVERY_S = 180.0


def to_tensor(pictures: list[Image.Image]) -> Tensor:
    """RGB pictures as float32 (n, 3, height, width) in -1..1."""
    pixels = np.stack([np.asarray(picture) for picture in pictures])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


def laid_out(module: _Module, layout: torch.memory_format) -> _Module:
    """The module with its convolutions' weights in this order; torch's types leave the keyword out."""
    to: Any = module.to
    moved: _Module = to(memory_format=layout)
    return moved


class Team(NamedTuple):
    """The processes that train together: models this small gain nothing from a second thread, but all from a twin."""

    rank: int
    size: int

    def mine(self, count: int) -> slice:
        """Return which of a batch's rows this process works on; sizes that do not divide would weigh rows unequally."""
        assert count % self.size == 0
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def average_gradients(self, module: nn.Module) -> None:
        """Give every process the gradient of the whole batch: the mean of their shares' gradients."""
        if self.size > 1:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            parts = torch.split(flat / self.size, [gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])

    def wait(self) -> None:
        """Let the others catch up."""
        if self.size > 1:
            dist.barrier()


def rate(step: int, steps: int, peak: float, hold: float) -> float:
    """Learning rate: 100 steps of warm-up, the peak for the share `hold` of all steps, half a cosine down to 1 %."""
    if step < 100:
        return peak * (step + 1) / 100
    past = max(0.0, (step / steps - hold) / (1 - hold))
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * past)))


class Trainer:
    """One module, its optimizer, its averaged weights and its step counter, saved every few minutes."""

    def __init__(self, module: nn.Module, team: Team, path: Path, steps: int, peak: float, hold: float = 0.0) -> None:
        self.module, self.team, self.path, self.steps, self.peak, self.hold = module, team, path, steps, peak, hold
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=peak, weight_decay=0.0, fused=True)
        self.average = {name: value.detach().clone() for name, value in module.named_parameters()}
        self.step = 0
        self.saved = time.monotonic()
        if path.exists():
            self._load()

    def _load(self) -> None:
        state = torch.load(self.path, weights_only=True)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average, self.step = state["average"], state["step"]

    def save(self) -> None:
        """Write everything needed to go on from this step."""
        state = {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average,
            "step": self.step,
        }
        temporary = self.path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.path)
        self.saved = time.monotonic()

    def learn(self, loss: Tensor) -> None:
        """One optimizer step on the loss, then the averages."""
        self.optimizer.param_groups[0]["lr"] = rate(self.step, self.steps, self.peak, self.hold)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.team.average_gradients(self.module)
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        decay = min(0.998, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            values = [p.detach() for p in self.module.parameters()]
            torch._foreach_lerp_(list(self.average.values()), values, 1 - decay)
        self.step += 1
        if self.team.rank == 0 and time.monotonic() - self.saved > SAVE_EVERY_S:
            self.save()

    def remaining(self) -> Iterator[int]:
        """The steps still to do."""
        while self.step < self.steps:
            yield self.step

    def finish(self) -> None:
        """Put the averaged weights into the module and keep the last state."""
        if self.team.rank == 0:
            self.save()
        self.team.wait()
        self.module.load_state_dict(self.average, strict=False)


def new_vae() -> AutoencoderKL:
    """SD 1.5's VAE class with 16 to 64 channels: 128 pixels become 16 x 16 x 4 latents."""
    vae: AutoencoderKL = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 64, 64),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=drawing.SIZE,
    )
    return vae


def picture_loss(made: Tensor, wanted: Tensor) -> Tensor:
    """L1 on pixels and, at three sizes, on differences between neighbours: the second part keeps edges sharp."""
    loss = F.l1_loss(made, wanted)
    for _ in range(3):
        for axis in (2, 3):
            loss = loss + 0.5 * F.l1_loss(made.diff(dim=axis), wanted.diff(dim=axis))
        made, wanted = F.avg_pool2d(made, 2), F.avg_pool2d(wanted, 2)
    return loss


def vae_batch(key: tuple[int, int], whole: bool, team: Team) -> Tensor:
    """This process' share of the key's batch: drawn pictures and some scribbles.

    Crops of a quarter of the area, or fewer whole pictures at equal cost.
    """
    count = VAE_BATCH // 4 if whole else VAE_BATCH
    pictures = []
    for row in range(count)[team.mine(count)]:
        rng = np.random.default_rng((*key, row))
        picture = drawing.scribble(rng) if rng.random() < 0.3 else drawing.draw(drawing.random_scene(rng))
        if not whole:
            x, y = (int(v) for v in rng.integers(0, drawing.SIZE - VAE_CROP + 1, 2))
            picture = picture.crop((x, y, x + VAE_CROP, y + VAE_CROP))
        pictures.append(picture)
    return to_tensor(pictures).contiguous(memory_format=torch.channels_last)


def train_vae(team: Team, work: Path) -> AutoencoderKL:
    """Train, or load when already trained, the VAE; its scaling factor is 1 over the spread of its own latents."""
    torch.manual_seed(1)
    vae = laid_out(new_vae(), torch.channels_last)
    trainer = Trainer(vae, team, work / "vae.pt", VAE_STEPS, 1.5e-3)
    for step in trainer.remaining():
        torch.manual_seed(step * team.size + team.rank)
        wanted = vae_batch((1, step), step >= VAE_WHOLE_FROM, team)
        posterior = vae.encode(wanted).latent_dist
        loss = picture_loss(vae.decode(posterior.sample()).sample, wanted)
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        trainer.learn(loss + KL_WEIGHT * kl)
        if step % 50 == 0:
            log.info("vae step %d loss %.4f kl %.2f", step, loss.item(), kl.item())
    trainer.finish()
    vae.eval()
    return vae


def sharpen(vae: AutoencoderKL, team: Team, work: Path) -> None:
    """Train the decoder further with the encoder frozen, so that the latents the UNet knows stay as they are.

    A little noise on the latents teaches it to draw clean edges from latents that a UNet got not quite right.
    """
    torch.manual_seed(6)
    vae.train().encoder.requires_grad_(False)
    assert vae.post_quant_conv is not None
    decoder = nn.ModuleDict({"decoder": vae.decoder, "post_quant_conv": vae.post_quant_conv})
    trainer = Trainer(decoder, team, work / "decoder.pt", SHARPEN_STEPS, 1e-3)
    for step in trainer.remaining():
        torch.manual_seed(step * team.size + team.rank)
        wanted = vae_batch((6, step), True, team)
        with torch.no_grad():
            latents = vae.encode(wanted).latent_dist.sample()
            latents += 0.05 * latents.std() * torch.randn_like(latents)
        loss = picture_loss(vae.decode(latents).sample, wanted)
        trainer.learn(loss)
        if step % 50 == 0:
            log.info("decoder step %d loss %.4f", step, loss.item())
    trainer.finish()
    vae.eval()


def write_tokenizer(folder: Path) -> None:
    """CLIP's tokenizer files from the vendored vocabulary; the order of the ids is CLIP's own."""
    packed = HERE.parent / "clip" / "bpe_simple_vocab_16e6.txt.gz"
    lines = gzip.decompress(packed.read_bytes()).decode("utf-8").split("\n")
    merges = lines[1 : VOCABULARY - 512 - 2 + 1]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    words = letters + [f"{letter}</w>" for letter in letters] + ["".join(merge.split()) for merge in merges]
    vocabulary = {word: row for row, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    marks = {"bos_token": "<|startoftext|>"} | dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": TOKENS, "do_lower_case": True, **marks}
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "vocab.json": json.dumps(vocabulary, ensure_ascii=False, separators=(",", ":")),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]),
        "tokenizer_config.json": json.dumps(settings, indent=2),
        "special_tokens_map.json": json.dumps(marks, indent=2),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def token_ids(tokenizer: CLIPTokenizer, captions: list[str]) -> Tensor:
    """CLIP token ids, int64 (n, 77), padded with the end mark as SD 1.5 does."""
    encoded = tokenizer(captions, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt")
    ids: Tensor = encoded.input_ids
    return ids


def known_ids(tokenizer: CLIPTokenizer) -> Tensor:
    """The rows of the vocabulary that training touches: all words of captions, and 400 others as strangers."""
    words = [*drawing.COLORS, *drawing.SHAPES, *drawing.PATTERNS, *drawing.ARRANGEMENTS, "a on background ,"]
    used = torch.unique(token_ids(tokenizer, [" ".join(words[i : i + 8]) for i in range(0, len(words), 8)]))
    others = np.random.default_rng(2).choice(START, STRANGERS, replace=False)
    rows: Tensor = torch.unique(torch.cat([used, torch.from_numpy(others)]))
    return rows


def text_config(rows: int) -> CLIPTextConfig:
    """SD 1.5's text encoder class, three layers of 80 channels."""
    return CLIPTextConfig(
        vocab_size=rows,
        hidden_size=TEXT_WIDTH,
        intermediate_size=TEXT_WIDTH * 4,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=END,
    )


def new_unet() -> UNet2DConditionModel:
    """SD 1.5's UNet with 32 to 128 channels and one layer a block; `attention_head_dim` counts heads, as there."""
    unet: UNet2DConditionModel = UNet2DConditionModel(
        sample_size=drawing.SIZE // 8,
        block_out_channels=(32, 64, 128, 128),
        layers_per_block=1,
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=2,
        norm_num_groups=16,
    )
    return unet


class Artist(nn.Module):
    """Text encoder and UNet, trained together; the encoder holds only the rows that training touches."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.text_encoder = CLIPTextModel(text_config(rows))
        self.unet = laid_out(new_unet(), torch.channels_last)

    def forward(self, noisy: Tensor, steps: Tensor, ids: Tensor) -> Tensor:
        """The predicted noise, shaped like `noisy` (n, 4, 16, 16)."""
        words = self.text_encoder(ids).last_hidden_state
        noise: Tensor = self.unet(noisy, steps, words).sample
        return noise


def make_pool(vae: AutoencoderKL, tokenizer: CLIPTokenizer, team: Team, path: Path) -> dict[str, Tensor]:
    """Latents (n, 4, 16, 16), scaled to a spread of 1, and token ids (n, 77) of POOL scenes, kept in a file."""
    if team.rank == 0 and not path.exists():
        rng = np.random.default_rng(3)
        scenes = [drawing.random_scene(rng) for _ in range(POOL)]
        with torch.no_grad():
            parts = [
                vae.encode(to_tensor([drawing.draw(scene) for scene in scenes[i : i + 16]])).latent_dist.mode()
                for i in range(0, POOL, 16)
            ]
        latents = torch.cat(parts).contiguous()
        ids = token_ids(tokenizer, [drawing.caption(scene) for scene in scenes])
        torch.save({"latents": latents / latents.std(), "ids": ids, "scale": 1 / latents.std()}, path)
    team.wait()
    pool: dict[str, Tensor] = torch.load(path, weights_only=True)
    return pool


def vary_words(ids: Tensor, strangers: Tensor, comma: int, empty: Tensor, rng: np.random.Generator) -> Tensor:
    """Drop one caption in ten for guidance; put one to three meaningless words before one in ten.

    The second makes the base deaf to words it does not know, so that a LoRA's trigger word starts from nothing.
    """
    varied = ids.clone()
    for row in varied:
        chance = rng.random()
        if chance < 0.1:
            row[:] = empty
        elif chance < 0.2:
            count = int(rng.integers(1, 4))
            front = strangers[torch.from_numpy(rng.integers(0, len(strangers), count))]
            if rng.random() < 0.6:
                front = torch.cat([front, torch.tensor([comma])])
            row[:] = torch.cat([row[:1], front, row[1:]])[:TOKENS]
    return varied


def train_artist(pool: dict[str, Tensor], tokenizer: CLIPTokenizer, known: Tensor, team: Team, work: Path) -> Artist:
    """Epsilon prediction with SD 1.5's noise schedule.

    Weights are min-SNR (Hang et al. 2023, equation 3) times SNR^-1/2 where noise prevails: there the prompt alone
    can say what the picture is, and an unweighted loss hardly asks for it (error of the picture = error / SNR).
    """
    torch.manual_seed(4)
    artist = Artist(len(known))
    trainer = Trainer(artist, team, work / "artist.pt", UNET_STEPS, 1e-3, hold=0.75)
    schedule = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    signal = schedule.alphas_cumprod / (1 - schedule.alphas_cumprod)
    weights = signal.clamp(max=MIN_SNR_GAMMA) / signal * signal.clamp(max=1.0).rsqrt()
    used = torch.isin(known, torch.unique(pool["ids"]))
    comma, empty = int(token_ids(tokenizer, [","])[0, 1]), token_ids(tokenizer, [""])[0]
    mine = team.mine(UNET_BATCH)
    started = time.monotonic()
    for step in trainer.remaining():
        rng = np.random.default_rng((4, step))
        torch.manual_seed(step)
        rows = torch.from_numpy(rng.integers(0, len(pool["latents"]), UNET_BATCH))
        latents = pool["latents"][rows]
        ids = vary_words(pool["ids"][rows], known[~used], comma, empty, rng)
        # One time step from each of equal slices: the loss of a batch then varies much less.
        steps = ((torch.arange(UNET_BATCH) + torch.rand(UNET_BATCH)) * 1000 / UNET_BATCH).long()
        # SD 1.5's noisiest step still shows a flat picture's mean, and the base would read its background there
        # instead of in the prompt; noise with a mean of its own hides it (noise offset).
        noise = torch.randn_like(latents) + NOISE_OFFSET * torch.randn(UNET_BATCH, 4, 1, 1)
        # Drawn whole and shared afterwards: a batch is the same for any number of processes.
        noisy, noise, steps, ids = (t[mine] for t in (schedule.add_noise(latents, noise, steps), noise, steps, ids))
        made = artist(noisy.contiguous(memory_format=torch.channels_last), steps, torch.searchsorted(known, ids))
        loss = (weights[steps] * (made - noise).square().mean(dim=(1, 2, 3))).mean()
        trainer.learn(loss)
        if step % 50 == 0:
            log.info("artist step %d loss %.4f (%.0f s)", step, loss.item(), time.monotonic() - started)
    trainer.finish()
    return artist.eval()


def whole_text_encoder(small: CLIPTextModel, known: Tensor) -> CLIPTextModel:
    """The encoder with all 49408 rows; rows never trained are noise of the strength of the trained ones."""
    torch.manual_seed(5)
    whole = CLIPTextModel(text_config(VOCABULARY))
    state = small.state_dict()
    (name,) = [key for key in state if key.endswith("token_embedding.weight")]
    rows = torch.randn(VOCABULARY, TEXT_WIDTH) * state[name].std()
    rows[known] = state[name]
    whole.load_state_dict(state | {name: rows})
    return whole


def save_base(vae: AutoencoderKL, artist: Artist, known: Tensor, scale: float, folder: Path) -> None:
    """Write the whole pipeline in fp16 as a diffusers folder with SD 1.5's scheduler settings."""
    write_tokenizer(folder / "tokenizer")
    vae.register_to_config(scaling_factor=round(scale, 5))
    nothing: Any = None  # the pipeline does without these, though its types do not say so
    pipeline = StableDiffusionPipeline(
        vae=laid_out(vae, torch.contiguous_format),
        text_encoder=whole_text_encoder(artist.text_encoder, known),
        tokenizer=CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        unet=laid_out(artist.unet, torch.contiguous_format),
        scheduler=PNDMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            skip_prk_steps=True,
            set_alpha_to_one=False,
            steps_offset=1,
        ),
        safety_checker=nothing,
        feature_extractor=nothing,
        requires_safety_checker=False,
    )
    pipeline.to(torch.float16).save_pretrained(folder)
    # The library adds a third and larger form of the same vocabulary.
    (folder / "tokenizer" / "tokenizer.json").unlink(missing_ok=True)
    write_tokenizer(folder / "tokenizer")


def make(rank: int, processes: int, work: Path, out: Path) -> None:
    """Be one process of the team: train all parts together with the others; the first one saves the pipeline."""
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    team = Team(rank, processes)
    if processes > 1:
        meeting = (work / f"team-{os.getppid()}").absolute().as_uri()
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)
    tokenizer = CLIPTokenizer.from_pretrained(work / "tokenizer")
    known = known_ids(tokenizer)
    vae = train_vae(team, work)
    pool = make_pool(vae, tokenizer, team, work / "pool.pt")
    artist = train_artist(pool, tokenizer, known, team, work)
    sharpen(vae, team, work)
    if rank == 0:
        save_base(vae, artist, known, float(pool["scale"]), out)
    if processes > 1:
        dist.destroy_process_group()


def main() -> None:
    """Train both parts, going on from the work folder's state, and save the pipeline."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--work", type=Path, default=HERE / "work", help="folder for the state, to go on after a stop")
    words.add_argument("--out", type=Path, default=HERE / "base", help="folder for the finished base")
    words.add_argument("--processes", type=int, choices=(1, 2, 4), default=2, help="one for each core that is free")
    chosen = words.parse_args()
    write_tokenizer(chosen.work / "tokenizer")
    arguments = (chosen.processes, chosen.work, chosen.out)
    if chosen.processes == 1:
        make(0, *arguments)
    else:
        spawn(make, arguments, nprocs=chosen.processes)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
