"""Build plan requests: a job or a recipe on a GPU, with assumptions for what cannot be read. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer import gpu
from trainer.config.base import BaseConfig, Family, Prediction
from trainer.config.checks import unforeseen
from trainer.config.fit import FitConfig
from trainer.config.job import DatasetConfig, FolderConfig, Job, PreviewConfig, PromptConfig, ReportConfig
from trainer.config.load import load_job
from trainer.config.recipe import RecipeConfig
from trainer.config.resolve import Machine, resolve_job
from trainer.dataset.cache_keys import CacheKeys, latent_bytes, text_bytes
from trainer.dataset.dataset import read_dataset
from trainer.dataset.decoders import Progress
from trainer.dataset.findings import Finding
from trainer.dataset.picture import Picture
from trainer.dataset.sampling import samples_per_epoch
from trainer.errors import ImpastoError, JobError, RunError
from trainer.files.architecture import NAMES, Config
from trainer.files.assets import PARTS, bundled_configs
from trainer.files.identify import (
    BaseIdentity,
    decide_process,
    identify_base,
    identify_vae,
    joint_digest,
    known_hashes,
    part_files,
    vae_files,
)
from trainer.host import usable_cores
from trainer.memory.device.device_state import DeviceState, situation_ahead, situation_here, situation_on_cpu
from trainer.memory.device.gpu_specs import find_card
from trainer.memory.forecast.schedule import PhaseCounts, occasions_of
from trainer.memory.trace.workload import Workload, subject_ahead, subject_of_job
from trainer.protocol.places import cache_folder, existing, free_bytes
from trainer.protocol.plan import Remark
from trainer.protocol.run_directory import require_place
from trainer.protocol.text import size

# Weights of a LoRA of rank 1 on each family's published UNet, by the kind of layer.
_WEIGHTS = {
    "sd15": {"attention": 199_296, "linear": 224_640, "conv": 626_880},
    "sdxl": {"attention": 1_451_520, "linear": 1_208_320, "conv": 414_400},
}
# Space that trainer.training.checkpoint reserves for events and logs: with less, it writes no checkpoint.
_SPARE_BYTES = 64 << 20
_CHECKPOINT_BYTES = 4
_FILE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
_NAMED_BY = {"run.room": "with output.runs in the job", "cache.room": "in the environment variable IMPASTO_CACHE"}
# Assumed before there are images and prompts: as many as a first LoRA usually has.
PICTURES_AHEAD = 20
PROMPTS_AHEAD = 2


def require_room(job: Job, subject: Workload, encoded: PhaseCounts | None) -> None:
    """Raise RunError if a disk is too small for what a run writes at least.

    ``job`` is resolved; ``encoded`` holds what goes into the cache, or None if that is not known.
    """
    for error in lacking_room(job, subject, encoded):
        raise error


def lacking_room(job: Job, subject: Workload, encoded: PhaseCounts | None) -> Iterator[RunError]:
    """Yield an error for each disk that is too small for what a run writes at least; see `require_room`."""
    runs, cache = Path(job.output.runs), cache_folder()
    needs = [("run.room", runs, _run_bytes(job, subject) + _SPARE_BYTES, "LoRA files and checkpoints")]
    entries = _cache_bytes(subject, encoded) if encoded else 0
    try:
        if entries and existing(runs).stat().st_dev == existing(cache).stat().st_dev:
            what = "LoRA files, checkpoints, encoded images and captions"
            needs = [("run.room", runs, needs[0][2] + entries, what)]
        elif entries:
            needs.append(("cache.room", cache, entries + _SPARE_BYTES, "encoded images and captions"))
        for code, folder, need, what in needs:
            if (free := free_bytes(folder)) < need:
                yield _too_little(code, folder, free, need, what)
    except OSError:
        return  # the disk is not connected, which `require_place` reports


def _too_little(code: str, folder: Path, free: int, need: int, what: str) -> RunError:
    return RunError(
        code,
        f"The disk of {folder} has {size(free)} free, but this run writes at least {size(need)} there ({what}).",
        f"Free space on that disk, or choose a folder on another one {_NAMED_BY[code]}.",
    )


def _run_bytes(job: Job, subject: Workload) -> int:
    """Return the least bytes of LoRA files and checkpoints, without optimizer state."""
    if not subject.has_published_unet:
        return 0  # a base of another size, whose layers are not in the table
    saving, steps = job.report.saving, job.recipe.steps or 1
    files = min(-(-steps // (saving.every_steps or steps)), saving.keep or steps)
    checkpoints = min(-(-steps // (saving.checkpoint_every or steps)), saving.checkpoint_keep)
    return _weights(subject) * (files * _FILE_BYTES[job.output.dtype] + checkpoints * _CHECKPOINT_BYTES)


def _weights(subject: Workload) -> int:
    """Return the number of LoRA weights on the UNet."""
    recipe, counts = subject.recipe, _WEIGHTS[subject.family]
    if not recipe.learning_rate:
        return 0
    return sum(counts[kind] * _rank(recipe, kind) for kind in _kinds(recipe))


def _kinds(recipe: RecipeConfig) -> tuple[str, ...]:
    return {"attention": ("attention",), "linear": ("attention", "linear")}.get(
        recipe.layers, ("attention", "linear", "conv")
    )


def _rank(recipe: RecipeConfig, kind: str) -> int:
    return min(recipe.rank, recipe.conv_rank or recipe.rank) if kind == "conv" else recipe.rank


def _cache_bytes(subject: Workload, encoded: PhaseCounts) -> int:
    """Return the bytes of what is encoded before the first step."""
    shown = sum(bucket.pictures for bucket in subject.buckets) or 1
    latents = sum(latent_bytes(bucket.size, masked=False) * bucket.pictures for bucket in subject.buckets) / shown
    widths = () if subject.trained_texts else (int(config["hidden_size"]) for config in subject.text_configs)
    return int(encoded.pictures * latents) + encoded.texts * text_bytes(subject.recipe.token_chunks, widths)


@dataclass(frozen=True)
class PlanRequest:
    """A job on a GPU, as far as a plan depends on it."""

    name: str
    subject: Workload
    written: FitConfig
    """The fit as the user wrote it; absent keys are planned."""
    situation: DeviceState
    occasions: PhaseCounts
    remarks: tuple[Remark, ...] = ()
    """Assumptions behind the request."""
    obstacles: tuple[ImpastoError, ...] = ()
    """Errors that would stop a run of the job, though it can be planned."""
    findings: tuple[Finding, ...] = ()
    """Problems of the dataset, if it could be read."""
    resolved: Job | None = None
    """The job with every setting filled in, for a plan on the CPU."""


@dataclass
class _BaseFacts:
    """Facts of a base on this PC, or assumed for one that is not."""

    family: Family
    prediction: Prediction
    zero_terminal_snr: bool
    unet_config: Config
    vae_config: Config
    text_configs: tuple[Config, ...]
    hashes: tuple[str, str] | None = None
    """Hashes of its VAE and text encoders, if its files were hashed before; see trainer.dataset.cache_keys."""


def situation_of(card: str | None, fit: FitConfig | None = None) -> DeviceState:
    """Return the state of a GPU by name or memory size as sold, or of this PC's GPU for "here" or None.

    "Here" is the CPU without a working NVIDIA GPU and for a ``fit`` on the CPU, as it is for a run. Raises ImpastoError
    if there is no such GPU.
    """
    deterministic, device = bool(fit and fit.deterministic), fit.device if fit else None
    if card is not None and not _is_here(card):
        return situation_ahead(find_card(card), deterministic=deterministic)
    if device == "cpu":
        return situation_on_cpu()
    try:
        found = gpu.cards()
    except ImpastoError:
        if device is not None:
            raise
        return situation_on_cpu()
    if not found:
        if device is None:
            return situation_on_cpu()
        find_card("here")  # raises an error that says what to do
    return situation_here(max(found, key=lambda one: one.free_bytes), deterministic=deterministic)


def question_of_job(
    path: Path, overrides: Sequence[str], card: str | None, progress: Progress | None = None
) -> PlanRequest:
    """Return the request for a job on a GPU, with assumptions where its base or images cannot be read.

    For this PC's GPU, images and captions that are in the cache already are not counted as encoded, if the base's files
    were hashed before. ``progress`` is called for each image that is read; an exception that it raises stops the
    reading.

    Raises ImpastoError for a job that cannot be used, or a base of unknown family.
    """
    job = load_job(path, overrides)
    situation = situation_of(card, job.fit)
    # The request is about this device, whichever the job names.
    job = job.changed(fit=job.fit.changed(device=None))
    remarks = [Remark("fit.experiment", {"key": key}) for key, _ in unforeseen(job)]
    obstacles: list[ImpastoError] = []
    source = _base_facts(job.base, remarks, obstacles)
    resolved = _resolved(job, source, situation, PICTURES_AHEAD)
    pictures, findings = _images_of(resolved, remarks, obstacles, progress)
    here = card is None or _is_here(card)
    if pictures:
        resolved = _resolved(job, source, situation, samples_per_epoch(pictures))
        cached = CacheKeys(cache_folder(), resolved, source.family, *source.hashes) if here and source.hashes else None
        subject = subject_of_job(resolved, source, pictures)
        occasions = occasions_of(resolved, source, pictures, cached)
    else:
        subject, occasions = _ahead(resolved, source)
    obstacles += _disk_errors(resolved, subject, occasions if here and pictures else None)
    return PlanRequest(
        job.name, subject, job.fit, situation, occasions, tuple(remarks), tuple(obstacles), findings, resolved
    )


def question_ahead(
    family: Family, recipe: RecipeConfig | None, card: str | None, name: str = "", fit: FitConfig | None = None
) -> PlanRequest:
    """Return the request for a recipe on a GPU before there is a job: published base, square images, two prompts.

    The keys of ``fit`` stay as they are.
    """
    situation = situation_of(card)
    prompts = (PromptConfig(prompt="preview"),) * PROMPTS_AHEAD
    job = Job(
        name="plan",
        base=BaseConfig(model="plan", family=family),
        dataset=DatasetConfig(folders=(FolderConfig(path="pictures"),)),
        recipe=recipe or RecipeConfig(),
        fit=fit or FitConfig(),
        report=ReportConfig(previews=PreviewConfig(prompts=prompts)),
    )
    source = _assumed(family)
    resolved = _resolved(job, source, situation, PICTURES_AHEAD)
    subject, occasions = _ahead(resolved, source)
    remark = Remark("dataset.assumed", {"images": PICTURES_AHEAD, "prompts": PROMPTS_AHEAD})
    return PlanRequest(name or NAMES[family], subject, job.fit, situation, occasions, (remark,), resolved=resolved)


def _is_here(card: str) -> bool:
    return card.strip().lower() == "here"


def _resolved(job: Job, source: _BaseFacts, situation: DeviceState, showings: int) -> Job:
    card, cores = situation.card, usable_cores()
    machine = Machine("cuda:0", card.name, card.total_bytes, card.bf16, cores)
    return resolve_job(
        job,
        family=source.family,
        prediction=source.prediction,
        zero_terminal_snr=source.zero_terminal_snr,
        samples_per_epoch=showings,
        machine=Machine("cpu", None, None, bf16=True, cores=cores) if situation.on_cpu else machine,
    )


def _ahead(job: Job, source: _BaseFacts) -> tuple[Workload, PhaseCounts]:
    """Return the workload and counts for square images, for a job whose images are not known."""
    square = subject_ahead(source.family, job.recipe, job.fit).buckets
    subject = replace(subject_of_job(job, source, ()), buckets=square)
    return subject, replace(occasions_of(job, source, ()), pictures=PICTURES_AHEAD, texts=PICTURES_AHEAD, measured=8)


def _base_facts(base: BaseConfig, remarks: list[Remark], obstacles: list[ImpastoError]) -> _BaseFacts:
    """Return the facts of the base if it is on this PC, else those of its family as published."""
    path = Path(base.model)
    try:
        identity = identify_base(path)
    except ImpastoError as error:
        if base.family == "auto" and path.exists():
            raise
        if base.family == "auto":
            raise JobError(
                "plan.family",
                f"Could not read the base ({error.sentence.rstrip('.')}), and the job does not state its family.",
                'Set base.family = "sd15" or "sdxl" in the job, or add --set base.family=sdxl.',
            ) from error
        if path.is_absolute():  # else it is a Hub id, which a run downloads
            obstacles.append(error)
        remarks.append(Remark("base.assumed", {"family": base.family}))
        return _assumed(base.family, base)
    try:
        prediction, zero_snr = decide_process(base, identity)
    except ImpastoError as error:  # a run stops here; memory and time are nearly the same for both
        obstacles.append(error)
        prediction, zero_snr = "epsilon", False
    configs = identity.configs
    vae = configs.get("vae") or bundled_configs(identity.family)["vae"]
    if base.vae is not None and Path(base.vae).exists():
        vae = identify_vae(Path(base.vae))[1] or vae
    return _BaseFacts(
        family=identity.family,
        prediction=prediction,
        zero_terminal_snr=zero_snr,
        unet_config=configs["unet"],
        vae_config=vae,
        text_configs=tuple(configs[part] for part in PARTS[identity.family] if part.startswith("text_encoder")),
        hashes=_hashes_of(base, identity),
    )


def _disk_errors(job: Job, subject: Workload, encoded: PhaseCounts | None) -> list[ImpastoError]:
    """Return the errors of disks that cannot take the run; without ``encoded`` the cache is not counted."""
    try:
        require_place(Path(job.output.runs))
    except ImpastoError as error:
        return [error]
    return [*lacking_room(job, subject, encoded)]


def _hashes_of(base: BaseConfig, identity: BaseIdentity) -> tuple[str, str] | None:
    path, encoders = Path(base.model), [part for part in PARTS[identity.family] if part.startswith("text_encoder")]
    try:
        vae = vae_files(path, identity, Path(base.vae) if base.vae is not None else None)
        texts = [part_files(path, identity, part) for part in encoders]
        known = known_hashes([vae, *texts])
    except (ImpastoError, OSError, KeyError):  # an incomplete model, which is reported elsewhere
        return None
    return (vae.digest(known), joint_digest(texts, known)) if known else None


def _assumed(family: Family, base: BaseConfig | None = None) -> _BaseFacts:
    configs = bundled_configs(family)
    prediction: Prediction = "v" if base is not None and base.prediction == "v" else "epsilon"
    return _BaseFacts(
        family=family,
        prediction=prediction,
        zero_terminal_snr=base is not None and base.zero_terminal_snr is True,
        unet_config=configs["unet"],
        vae_config=configs["vae"],
        text_configs=tuple(configs[part] for part in PARTS[family] if part.startswith("text_encoder")),
    )


def _images_of(
    job: Job, remarks: list[Remark], obstacles: list[ImpastoError], progress: Progress | None
) -> tuple[Sequence[Picture], tuple[Finding, ...]]:
    """Return the images and findings of the dataset; add a remark if there are no images to plan for."""
    try:
        dataset = read_dataset(job.dataset, job.recipe, progress)
    except ImpastoError as error:
        obstacles.append(error)
        remarks.append(Remark("dataset.unreadable", {"images": PICTURES_AHEAD}))
        return (), ()
    if not any(picture.kind == "train" for picture in dataset.pictures):
        remarks.append(Remark("dataset.empty", {"images": PICTURES_AHEAD}))
        return (), dataset.findings
    return dataset.pictures, dataset.findings
