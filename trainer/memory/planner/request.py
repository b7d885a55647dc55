"""Build plan requests for a job or recipe on a GPU, with assumptions for files that cannot be read.

Does not require torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer import gpu
from trainer.config.base import BaseConfig, Family, Prediction
from trainer.config.checks import not_forecast
from trainer.config.fit import FitConfig
from trainer.config.job import DatasetConfig, FolderConfig, Job, PreviewConfig, PromptConfig, ReportConfig
from trainer.config.load import changed_job, load_job
from trainer.config.recipe import ImagesConfig, RecipeConfig
from trainer.config.resolve import Machine, resolve_job
from trainer.dataset.cache_keys import CacheKeys, latent_bytes, text_bytes
from trainer.dataset.dataset import read_dataset
from trainer.dataset.decoders import Progress
from trainer.dataset.findings import Finding
from trainer.dataset.image import ImageRecord
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
from trainer.memory.device.device_state import DeviceState, state_of_cpu, state_of_listed_gpu, state_of_local_gpu
from trainer.memory.device.gpu_specs import find_gpu
from trainer.memory.forecast.schedule import PhaseCounts, phase_counts
from trainer.memory.trace.workload import Workload, merged, workload_of_job, workload_without_base
from trainer.protocol.places import cache_folder, free_bytes, nearest_existing
from trainer.protocol.plan import Remark
from trainer.protocol.run_directory import require_writable
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
ASSUMED_IMAGES = 20
ASSUMED_PROMPTS = 2


def require_disk_space(job: Job, workload: Workload, encoded: PhaseCounts | None) -> None:
    """Raise RunError if a disk is too small for the minimum that a run writes.

    ``job`` is resolved; ``encoded`` counts the images and texts to cache, or is None if that is not known.
    """
    for error in disk_errors(job, workload, encoded):
        raise error


def disk_errors(job: Job, workload: Workload, encoded: PhaseCounts | None) -> Iterator[RunError]:
    """Yield an error for each disk that is too small for the minimum that a run writes; see `require_disk_space`."""
    runs, cache = Path(job.output.runs), cache_folder()
    needs = [("run.room", runs, _run_bytes(job, workload) + _SPARE_BYTES, "LoRA files and checkpoints")]
    entries = _cache_bytes(workload, encoded) if encoded else 0
    try:
        # On one disk the two needs add up; checked separately, each would seem to fit.
        if entries and nearest_existing(runs).stat().st_dev == nearest_existing(cache).stat().st_dev:
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
        f"Free up space on that disk, or choose a folder on another one {_NAMED_BY[code]}.",
    )


def _run_bytes(job: Job, workload: Workload) -> int:
    """Return the minimum bytes of LoRA files and checkpoints, without optimizer state."""
    if not workload.has_published_unet:
        return 0  # a base of another size, whose layers are not in the table
    saving, steps = job.report.saving, job.recipe.steps or 1
    files = min(-(-steps // (saving.every_steps or steps)), saving.keep or steps)
    checkpoints = min(-(-steps // (saving.checkpoint_every or steps)), saving.checkpoint_keep)
    copies = 2 if job.recipe.ema_decay else 1
    each = files * _FILE_BYTES[job.output.dtype] + checkpoints * _CHECKPOINT_BYTES
    return least_weights(workload) * copies * each


def least_weights(workload: Workload) -> int:
    """Return the least number of LoRA parameters of the UNet."""
    recipe, counts = workload.recipe, _WEIGHTS[workload.family]
    blocks = recipe.blocks or ()
    if not recipe.learning_rate or any(block.rate_factor == 0 for block in blocks):
        return 0  # blocks may leave out any layers
    if recipe.adapter in ("lokr", "oft"):
        return 0  # may have far fewer parameters than a LoRA of the same rank
    ranks = [block.rank for block in blocks if block.rank]
    return sum(counts[kind] * min([_rank(recipe, kind), *ranks]) for kind in _kinds(recipe))


def _kinds(recipe: RecipeConfig) -> tuple[str, ...]:
    return {"attention": ("attention",), "linear": ("attention", "linear")}.get(
        recipe.layers, ("attention", "linear", "conv")
    )


def _rank(recipe: RecipeConfig, kind: str) -> int:
    return min(recipe.rank, recipe.conv_rank or recipe.rank) if kind == "conv" else recipe.rank


def _cache_bytes(workload: Workload, encoded: PhaseCounts) -> int:
    """Return the bytes that encoding before the first step adds to the cache."""
    shown = sum(bucket.images for bucket in workload.buckets) or 1
    latents = sum(latent_bytes(bucket.size, masked=False) * bucket.images for bucket in workload.buckets) / shown
    widths = () if workload.trained_texts else (int(config["hidden_size"]) for config in workload.text_configs)
    tokens = (
        sum(shape[2] * bucket.images for shape, bucket in zip(workload.shapes, workload.buckets, strict=True)) / shown
    )
    return int(encoded.images * latents) + encoded.texts * text_bytes(int(tokens), widths)


@dataclass(frozen=True)
class PlanRequest:
    """Properties of a job and a GPU that a plan depends on."""

    name: str
    workload: Workload
    written: FitConfig
    """The fit as written by the user; the planner chooses absent keys."""
    device_state: DeviceState
    counts: PhaseCounts
    remarks: tuple[Remark, ...] = ()
    """Assumptions behind the request."""
    obstacles: tuple[ImpastoError, ...] = ()
    """Errors that would stop a run of the job but do not prevent planning."""
    findings: tuple[Finding, ...] = ()
    """Problems found in the dataset, if it could be read."""
    resolved: Job | None = None
    """The job with every setting filled in, for a plan on the CPU."""


@dataclass
class _BaseFacts:
    """Properties of a base: read from its files if it is on this PC, otherwise assumed."""

    family: Family
    prediction: Prediction
    zero_terminal_snr: bool
    unet_config: Config
    vae_config: Config
    text_configs: tuple[Config, ...]
    hashes: tuple[str, str] | None = None
    """Hashes of the VAE and of the text encoders, if their files were hashed before; see trainer.dataset.cache_keys."""


def device_state_of(gpu_name: str | None, fit: FitConfig | None = None) -> DeviceState:
    """Return the state of a GPU by name or advertised memory size, or of this PC's GPU for "here" or None.

    "here" means the CPU if there is no working NVIDIA GPU or the ``fit`` is for the CPU, as in a run. Raises
    ImpastoError if there is no such GPU.
    """
    deterministic, device = bool(fit and fit.deterministic), fit.device if fit else None
    if gpu_name is not None and not _is_here(gpu_name):
        return state_of_listed_gpu(find_gpu(gpu_name), deterministic=deterministic)
    if device == "cpu":
        return state_of_cpu()
    try:
        found = gpu.list_gpus()
    except ImpastoError:
        if device is not None:
            raise
        return state_of_cpu()
    if not found:
        if device is None:
            return state_of_cpu()
        find_gpu("here")  # raises an error that says what to do
    return state_of_local_gpu(max(found, key=lambda one: one.free_bytes), deterministic=deterministic)


def request_of_job(
    path: Path, overrides: Sequence[str], gpu: str | None, progress: Progress | None = None
) -> PlanRequest:
    """Return the request for a job on a GPU, with assumptions if its base or images cannot be read.

    For this PC's GPU, images and captions that are already cached do not count as work, provided that the base's files
    were hashed before. ``progress`` is called for each image that is read; it may raise an exception to stop the
    reading.

    Raises ImpastoError if the job is invalid or the base's family is unknown.
    """
    job = load_job(path, overrides)
    device_state = device_state_of(gpu, job.fit)
    # The request is about this device, whatever fit.device says in the job.
    job = job.replaced(fit=job.fit.replaced(device=None))
    remarks = [Remark("fit.experiment", {"key": key}) for key, _ in not_forecast(job)]
    obstacles: list[ImpastoError] = []
    source = _base_facts(job.base, remarks, obstacles)
    # Reading images needs a resolved job, and resolving needs their number; this first pass assumes one.
    resolved = _resolved(job, source, device_state, ASSUMED_IMAGES)
    images, findings = _images_of(resolved, job.recipe.images, remarks, obstacles, progress)
    here = gpu is None or _is_here(gpu)
    if images:
        resolved = _resolved(job, source, device_state, samples_per_epoch(images))
        cached = CacheKeys(cache_folder(), resolved, source.family, *source.hashes) if here and source.hashes else None
        workload = workload_of_job(resolved, source, images)
        counts = phase_counts(resolved, source, images, cached)
    else:
        workload, counts = _ahead(resolved, source)
    obstacles += _disk_errors(resolved, workload, counts if here and images else None)
    return PlanRequest(
        job.name, workload, job.stated_fit, device_state, counts, tuple(remarks), tuple(obstacles), findings, resolved
    )


def request_without_job(
    family: Family,
    recipe: RecipeConfig | None,
    gpu: str | None,
    name: str = "",
    fit: FitConfig | None = None,
    overrides: Sequence[str] = (),
) -> PlanRequest:
    """Return the request for a recipe on a GPU without a job: published base, square images, two prompts.

    Keys set in ``fit`` do not change. ``overrides`` are ``key=value`` strings, such as "recipe.rank=16".
    """
    return assumed_request(family, recipe, device_state_of(gpu), name, fit, overrides)


def assumed_request(
    family: Family,
    recipe: RecipeConfig | None,
    device_state: DeviceState,
    name: str = "",
    fit: FitConfig | None = None,
    overrides: Sequence[str] = (),
) -> PlanRequest:
    """Return what `request_without_job` does, for a GPU in a known state."""
    prompts = (PromptConfig(prompt="preview"),) * ASSUMED_PROMPTS
    job = Job(
        name="plan",
        base=BaseConfig(model="plan", family=family),
        dataset=DatasetConfig(folders=(FolderConfig(path="pictures"),)),
        recipe=recipe or RecipeConfig(),
        fit=fit or FitConfig(),
        report=ReportConfig(previews=PreviewConfig(prompts=prompts)),
    )
    job = changed_job(job, overrides) if overrides else job
    source = _assumed(family, job.base)
    resolved = _resolved(job, source, device_state, ASSUMED_IMAGES)
    workload, counts = _ahead(resolved, source)
    remark = Remark("dataset.assumed", {"images": ASSUMED_IMAGES, "prompts": ASSUMED_PROMPTS})
    return PlanRequest(
        name or NAMES[family], workload, job.stated_fit, device_state, counts, (remark,), resolved=resolved
    )


def _is_here(gpu: str) -> bool:
    return gpu.strip().lower() == "here"


def _resolved(job: Job, source: _BaseFacts, device_state: DeviceState, showings: int) -> Job:
    device, cores = device_state.gpu, usable_cores()
    machine = Machine("cuda:0", device.name, device.total_bytes, device.bf16, cores)
    return resolve_job(
        job,
        family=source.family,
        prediction=source.prediction,
        zero_terminal_snr=source.zero_terminal_snr,
        samples_per_epoch=showings,
        machine=Machine("cpu", None, None, bf16=True, cores=cores) if device_state.on_cpu else machine,
    )


def _ahead(job: Job, source: _BaseFacts) -> tuple[Workload, PhaseCounts]:
    """Return the workload and amounts of work of a job whose images are unknown; they are assumed to be square."""
    recipes = [job.recipe.replaced(resolution=side) for side in job.dataset.sides(job.recipe)]
    squares = merged(use for recipe in recipes for use in workload_without_base(source.family, recipe, job.fit).buckets)
    workload = replace(workload_of_job(job, source, ()), buckets=squares)
    return workload, replace(phase_counts(job, source, ()), images=ASSUMED_IMAGES, texts=ASSUMED_IMAGES, measured=8)


def _base_facts(base: BaseConfig, remarks: list[Remark], obstacles: list[ImpastoError]) -> _BaseFacts:
    """Return the properties of the base if it is on this PC, else those of its family's published model."""
    path = Path(base.model)
    try:
        identity = identify_base(path)
    except ImpastoError as error:
        if base.family == "auto" and path.exists():
            raise
        if base.family == "auto":
            raise JobError(
                "plan.family",
                f"Could not read the base ({error.sentence.rstrip('.')}), and the job does not set base.family.",
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


def _disk_errors(job: Job, workload: Workload, encoded: PhaseCounts | None) -> list[ImpastoError]:
    """Return errors for disks that are too small or read-only; without ``encoded`` the cache is not counted."""
    try:
        require_writable(Path(job.output.runs))
    except ImpastoError as error:
        return [error]
    return [*disk_errors(job, workload, encoded)]


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
    prediction: Prediction = "epsilon" if base is None or base.prediction == "auto" else base.prediction
    return _BaseFacts(
        family=family,
        prediction=prediction,
        zero_terminal_snr=base is not None and base.zero_terminal_snr is True,
        unet_config=configs["unet"],
        vae_config=configs["vae"],
        text_configs=tuple(configs[part] for part in PARTS[family] if part.startswith("text_encoder")),
    )


def _images_of(
    job: Job,
    written: ImagesConfig,
    remarks: list[Remark],
    obstacles: list[ImpastoError],
    progress: Progress | None,
) -> tuple[Sequence[ImageRecord], tuple[Finding, ...]]:
    """Return the dataset's images and findings; add a remark if there are no images to plan for.

    ``job`` is resolved, but ``written`` are its image settings as written: see `read_dataset`.
    """
    try:
        dataset = read_dataset(job.dataset, job.recipe.replaced(images=written), progress)
    except ImpastoError as error:
        obstacles.append(error)
        remarks.append(Remark("dataset.unreadable", {"images": ASSUMED_IMAGES}))
        return (), ()
    if not any(image.kind == "train" for image in dataset.images):
        remarks.append(Remark("dataset.empty", {"images": ASSUMED_IMAGES}))
        return (), dataset.findings
    return dataset.images, dataset.findings
