"""Prepare a run: check the settings, plan the steps, report, load the models."""

from __future__ import annotations

import copy
import json
import platform
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from ..common.axes import size_text
from ..common.callbacks import Callbacks
from ..common.cancel import droppable, look
from ..common.devices import computes
from ..common.wording import count, names, say
from ..common.world import World
from ..config import (
    OPEN,
    MemoryConfig,
    check_samples,
    describe_filled,
    fill,
    resolution_remarks,
    setting,
)
from ..data.cache import Cache, MicroBatchCache
from ..data.plan import Plan, build_plan
from ..data.scan import PLACE, Index, manifest_digest, manifest_parts, scan
from ..lora_files.continued import Continued, check_lora_files, load_continued
from ..lora_files.merge import merge_beneath
from ..memory import (
    BUDGETS,
    DTYPES,
    IN_FILE,
    Compiling,
    Programs,
    Stream,
    check_attention,
    check_compute,
    check_second_card,
    check_weights,
    compile_blocks,
    keep_weights,
    leave_in_file,
    place,
    prepare,
    recompute,
    release_rounded,
    why_no_graphs,
)
from ..models import BaseModel, check_weighted, word_ids
from ..networks import Network, remarks_on_algorithm
from ..networks.of_model import build_network, learning_rates
from ..objective import (
    Objective,
    check_captions,
    check_objective,
    check_roles,
    objective_remarks,
    other_captions,
    terms_of,
)
from ..optim import Ema, build_optimizer, check_optimizer, estimates
from ..optim import remarks as optimizer_remarks
from ..optim.noise_scale import NoiseScale
from ..optim.schedule import check_schedule, curve_of
from ..preflight.disk import check_disk
from ..preflight.measured import fit_measured
from ..preflight.memory import check_in_file, fit_memory
from ..preflight.network import describe_network, measure_run
from ..preflight.outline import outline_run, trains_text
from ..preflight.report import long_captions, painting_remarks, report
from ..runs import Checkpoint, RunFolder, build_keys, build_parts, model_digests
from ..runs.log import check_log
from .checkpoint import resume, sizes_ahead
from .compute import compute_remarks
from .conditioning import check_embeddings, check_stops
from .encode import encode_plan, encode_together
from .encoded import Encoded, EncodingContext
from .in_file import describe_reading
from .job import Job, Planned
from .joining import run_curve
from .live import LiveEncoder
from .references import check_first_frames, check_references, sample_references, seen_captions
from .saving import publish
from .state import Run
from .validate import check_validation, measured_levels

ANEW = (
    "Nothing is kept of encoded pictures and captions, so each step also encodes its own, which takes longer; to "
    f"encode each once, set {setting('memory.encodings')} to disk."
)
FP16_SCALE = 2.0**12  # first loss scale in float16; halved after each overflow


# --- before anything is loaded -----------------------------------------------------------------------------


def fill_settings(job: Job) -> tuple[Job, BaseModel]:
    """Fill in the settings left open, and report them; also return the base model's outline.

    Raises ValueError for a model that cannot be trained.
    """
    config = job.config
    job.destination.check_names([word.token for word in config.lora.embeddings])
    job.source.check()
    outline = job.source.outline(job.dtype)
    suited = config
    if config.optimizer.learning_rate == OPEN and estimates(config.optimizer):  # also a class by name, of no table
        suited = config.replace(optimizer=config.optimizer.replace(learning_rate=1.0))
    filled = fill(suited, outline.defaults)
    if sentence := describe_filled(config, filled, outline.title):
        job.callbacks.note(sentence)
    return replace(job, config=filled), outline


def check_settings(job: Job) -> None:
    """Raise ValueError for settings that are wrong alone, in combination, or on this machine."""
    config = job.config
    check_optimizer(config.optimizer, config.scheduler, job.device)
    check_log(config.train.log, job.logs)
    check_attention(config.memory.attention, job.device, job.dtype)
    wished = {"base_model.precision": config.base_model.precision, "lora.dtype": config.lora.dtype}
    for name, number in {**wished, "base_model.vae_precision": config.base_model.vae_precision}.items():
        if number in DTYPES and not computes(job.device, DTYPES[number]):
            raise ValueError(f"{job.device.type} does not compute in {number}; set {setting(name)} to float32.")
    # float16 needs scaled gradients, and CUDA scales none in bfloat16.
    if config.lora.dtype == "bfloat16" and job.dtype == torch.float16:
        raise ValueError(
            f"A LoRA in bfloat16 does not work with precision float16; set {setting('lora.dtype')} to float32."
        )
    check_compute(config.memory.compute, job.device, config.base_model.weights)
    check_in_file(config)
    check_cards(job)
    if config.memory.checkpointing in BUDGETS and not config.memory.compile:
        raise ValueError(
            f"The {config.memory.checkpointing} is the compiler's, and the model is not compiled; set "
            f"{setting('memory.compile')} to on, or {setting('memory.checkpointing')} to auto."
        )
    for name in ("weights", "text_weights"):
        check_weights(getattr(config.base_model, name), name, job.device)


def check_cards(job: Job) -> None:
    """Raise ValueError for a second card that is not there, or that this run cannot use."""
    memory = job.config.memory
    remedy = f"clear {setting('memory.second_card')}"
    if memory.second_card and job.config.base_model.connected is not None:
        raise ValueError(f"ComfyUI holds the weights of a linked model on one card; {remedy}.")
    if memory.second_card and job.world.size > 1:
        raise ValueError(f"Each process of a run has a card of its own, and none has two; {remedy}.")
    check_second_card(memory, job.device, job.dtype)


def check_sizes(plan: Plan, base: BaseModel) -> None:
    """Raise ValueError for a bucket whose sides are no multiples of the model's size step."""
    step = base.latents.step
    sizes = {*plan.fullest_batches(), *(reference.crop.bucket for reference in plan.all_references())}
    if wrong := next((size for size in sorted(sizes) if size[0] % step or size[1] % step), None):
        raise ValueError(
            f"{base.title} takes pictures whose sides are multiples of {step} pixels, and a bucket has "
            f"{size_text(wrong)}; set {setting('train.bucket_step')}, or its sizes, to multiples of {step}."
        )


def plan_run(job: Job, outline: BaseModel) -> Planned:
    """Scan the pictures and plan every step; ValueError for settings that do not suit the pictures or the model."""
    config = job.config
    if outline.host:
        outline.host.check(config)
    check_references(config, outline)
    check_objective(config, outline.noise, outline.levels)
    terms = terms_of(config)
    check_lora_files(config, outline)
    check_samples(config.sample, outline.sampling, outline.title)
    with Index(job.cache / PLACE) as index:
        manifest = scan(config.dataset, index, job.callbacks, job.access)
        drawn = sample_references(config, outline, index, job.access)
        models = model_digests(config, job.source, index)
    plan = build_plan(manifest, config.dataset, config.train)
    check_sizes(plan, outline)
    check_first_frames(plan, outline)
    check_schedule(plan.steps, config.scheduler)
    check_stops(config.optimizer, plan, config.lora.embeddings)
    check_validation(config.train, plan, config.optimizer)
    if config.base_model.prompt_weights:
        check_weighted((*sorted(plan.captions()), *sorted(config.sample.texts())))
    check_embeddings(config.lora.embeddings, plan, outline)
    check_roles(terms, plan)
    check_captions(terms, plan.captions(trained_only=True) if terms else ())
    keys = build_keys(config, models, manifest_digest(plan.manifest), outline.levels)
    inputs = build_parts(config, models, manifest_parts(plan.manifest), outline.levels)
    return Planned(plan=plan, keys=keys, inputs=inputs, models=models, outline=outline, drawn=drawn)


def fill_prompts(job: Job, plan: Plan) -> Job:
    """Write what is trained into the prompts of samples that ask for it."""
    return replace(job, config=job.config.replace(sample=job.config.sample.with_caption(plan.usual_prompt())))


def check_processes(world: World, planned: Planned) -> None:
    """Raise ValueError if the processes of a run have other settings, pictures or models."""
    inputs = planned.inputs | {"train": json.dumps(planned.plan.train.to_dict())}
    first, *others = world.gather((platform.node(), inputs))
    for number, (host, found) in enumerate(others, 1):
        different = sorted(part for part in {**first[1], **found} if first[1].get(part) != found.get(part))
        if different:
            raise ValueError(
                f"Process {number} on {host} has other {names(different)} than process 0 on {first[0]}; give all "
                "processes of a run the same files and settings."
            )


def describe_shares(world: World, accumulate: int) -> str:
    """Say that some processes wait for others in every step; "" if all have as many micro-batches."""
    if not accumulate % world.size:
        return ""
    batches = count(accumulate, "micro-batch", "micro-batches")
    return (
        f"{world.size} processes share the {batches} of a step, so that some wait for others; set "
        f"{setting('train.accumulate')} to a multiple of {world.size}."
    )


def run_preflight(job: Job, planned: Planned, existing: RunFolder | None) -> list[MemoryConfig]:
    """Report the run to the user; return the memory settings to start with, then the fallbacks.

    existing: the run's folder, if it has one already. Raises ValueError when the run does not fit into memory or on the
    disk, and for folders that cannot be written.
    """
    config, plan, note = job.config, planned.plan, job.callbacks.note
    outline = outline_run(config, planned.outline)
    saved = [*existing.checkpoints(), *existing.sampled()] if existing else []
    if job.world.leads:  # the others write nothing there
        check_disk(config, plan, outline, job.runs, sizes_ahead, sum(each.size for each in saved))
        job.destination.check_folders(job.runs, [word.token for word in config.lora.embeddings])
    long = long_captions(plan, outline.base.text, word_ids(config.lora.embeddings))
    note("\n".join([report(plan), *(f"- {sentence}" for sentence in long)]))
    note(describe_network(measure_run(config, outline)))
    if host := outline.base.host:
        ladder, needed = fit_measured(config, plan, outline.base, host, job.device, DTYPES[config.lora.dtype])
    else:
        vae = job.source.outline_autoencoder() if config.memory.encodings == "none" else None
        ladder, needed = fit_memory(config, plan, outline, job.device, job.source.cached_bytes, vae)
    settings = (
        *(painting_remarks(plan, outline.base.title) if outline.base.inpainting else ()),
        *resolution_remarks(config.train, config.dataset, outline.base.defaults, outline.base.title),
        *objective_remarks(config, outline.base.noise, outline.base.levels),
        *remarks_on_algorithm(config.lora),
        *optimizer_remarks(config.optimizer),
    )
    anew = (ANEW,) if config.memory.encodings == "none" else ()
    why = why_no_graphs(config, ladder[0], job.device) if config.memory.cuda_graphs else ""
    for sentence in (
        needed,
        *((f"CUDA graphs are left out: {why}.",) if why else ()),
        *anew,
        *compute_remarks(config.memory.compute, outline.base, job.device, config.base_model.weights),
        *job.source.remarks(),
        *settings,
    ):
        note(sentence)
    return ladder


# --- models, network and optimizer -------------------------------------------------------------------------


def prepare_run(job: Job, planned: Planned, memory: MemoryConfig, folder: RunFolder) -> Run:
    """Load the base model, fill the cache, and build the network and its optimizer.

    memory: the settings to start with.
    """
    config, device, note = job.config, job.device, job.callbacks.note
    with droppable():  # the thread that reads the denoiser
        base, start = _load(job, memory)
        rates = learning_rates(config.optimizer, base)
        network, encoded, live = _encode_and_build(job, planned, base, start, rates)
    for encoder in base.text.encoders:
        encoder.model.to(device)
    if live:
        live.trained = [encoder.model for encoder in base.text.encoders]
    # Another program's blocks are compiled in their session.
    compiled = (
        compile_blocks(base.denoiser.units(), note) if config.memory.compile and not base.host else Programs(note)
    )
    settings = config.optimizer
    groups = network.groups(rates, settings.conv_learning_rate, settings.lora_plus_ratio)
    parameters = [p for group in groups for p in group["params"]]
    objective = Objective(config.objective, base.noise, config.train.seed, base.levels, terms_of(config))
    for term in objective.terms:
        term.begin(objective.path, config.train.seed, device)
    return Run(
        config=config,
        plan=planned.plan,
        curve=run_curve(folder, config.scheduler) or curve_of(planned.plan.steps, config.scheduler),
        base=base,
        encoded=encoded,
        network=network,
        objective=objective,
        optimizer=build_optimizer(settings, groups, config.train.seed),
        scaler=torch.amp.GradScaler(device.type, init_scale=FP16_SCALE, enabled=base.denoiser.dtype == torch.float16),
        noise_scale=NoiseScale(parameters),
        ema=Ema(parameters, settings.ema_decay, settings.ema_every, settings.ema_device)
        if settings.ema_decay
        else None,
        memory=memory,
        stream=Stream(device),
        programs=compiled,
        device=device,
        callbacks=job.callbacks,
        folder=folder,
        destination=job.destination,
        verify=job.verify,
        continued=start.describe() if start else None,
        world=job.world,
        live=live,
    )


def _say_loading(job: Job) -> None:
    job.callbacks.phase(say("loading the model"), 0, 1)


def _load(job: Job, memory: MemoryConfig) -> tuple[BaseModel, Continued | None]:
    """Load the base model and the LoRA that a run continues; the denoiser may be on its way from the disk."""
    config, beneath = job.config, job.config.lora.beneath
    _say_loading(job)
    in_file = memory.offload_weights == IN_FILE
    base = job.source.load(job.dtype, partial(merge_beneath, beneath=beneath) if beneath else None, in_file=in_file)
    if in_file and (sentence := describe_reading(leave_in_file(base.denoiser.module), memory)):
        job.callbacks.note(sentence)
    if memory.second_card:
        place(base.denoiser.units(), memory, job.device)
    start = load_continued(config, base)
    text = base.text.trainable
    if text and start and start.changes_text:
        text.mark(start.digest)
    if text and not base.host and (kind := config.base_model.text_weights) != "auto":
        for encoder in base.text.encoders:
            keep_weights(encoder.model, kind, job.dtype, job.device)
            encoder.model.to("cpu")
        text.mark(kind)
    return base, start


def _encode_and_build(
    job: Job, planned: Planned, base: BaseModel, start: Continued | None, rates: Mapping[str, float]
) -> tuple[Network, Encoded, LiveEncoder | None]:
    """Encode all that a run needs, drop text encoders that are not trained, and build the network.

    A network that changes no caption is built last, as nothing else here needs the denoiser, which is still being read.
    """
    config, terms = job.config, terms_of(job.config)

    def build() -> Network:
        network = build_network(base, config, rates, start.layers if start else None)
        network.place(job.device, DTYPES[config.lora.dtype])
        return network

    first = base.host or start or config.lora.embeddings or config.memory.encodings == "none"
    network = build() if first else None
    train_text = any(rates[part.prefix] > 0 for part in base.parts[1:])
    prompts = None if train_text else config.sample.texts() | other_captions(terms, planned.plan)
    encoded, live = _encoded(job, planned, base, network, prompts)
    # A host gets its text encoders back as they were, so that layers which are attached for good stay the network's.
    lent = live is not None and base.host is not None and start is not None and start.changes_text
    if base.text.encoders and not lent and not trains_text(config, base):
        prefixes = [encoder.prefix for encoder in base.text.encoders]
        if network:
            network.leave(*prefixes) if live else network.release(*prefixes)
        base.free("text")
    if network is None:
        _say_loading(job)  # what is not here yet
        network = build()
    return network, encoded, live


def _encoded(
    job: Job, planned: Planned, base: BaseModel, network: Network | None, prompts: set[str] | None
) -> tuple[Encoded, LiveEncoder | None]:
    """Encode all that a run needs, or build what encodes it while training, where nothing is kept.

    network: one that may change captions. prompts: texts beside the plan's captions; None: the text encoders are
    trained.
    """
    config, plan, drawn = job.config, planned.plan, planned.drawn
    vae_dtype = DTYPES.get(config.base_model.vae_precision, torch.float32)
    if config.memory.encodings == "none":
        cache = MicroBatchCache(job.cache)
        assert network is not None
        quiet = replace(job.callbacks, phase=Callbacks().phase)
        encoders = copy.copy(base)  # keeps the text encoders that training drops
        work = EncodingContext(
            base=encoders, plan=plan, cache=cache, device=job.device, callbacks=quiet, vae_dtype=vae_dtype
        )
        live = LiveEncoder(work=work, network=network, terms=terms_of(config), drawn=drawn, texts=prompts is not None)
        return Encoded(cache=cache), live
    cache = Cache(job.cache, job.cache_limit, in_ram=config.memory.encodings == "RAM")
    callbacks = replace(job.callbacks, check=look)  # a Cancel, or a denoiser that cannot be read
    with cache, network.attached() if network else nullcontext():  # a continued LoRA changes captions, too
        texts = {"prompts": prompts, "seen": seen_captions(plan, base, terms_of(config), drawn), "drawn": drawn}
        encode = partial(encode_plan, base, plan, cache, job.device, callbacks, **texts)
        encoded = encode_together(job.world, cache, lambda world: encode(vae_dtype=vae_dtype, world=world))
        if job.world.leads:
            cache.prune()
    return encoded, None


def apply_memory(run: Run, memory: MemoryConfig) -> None:
    """Apply memory settings to the models, on the device; later calls may only save more memory."""
    base, weights, run.memory = run.base, run.config.base_model.weights, memory
    if base.host is not None:  # what is held needs memory, too
        release_rounded(base.denoiser.module.modules())
    why = why_no_graphs(run.config, memory, run.device)
    if run.programs.kind.graphs and why:
        run.callbacks.note(f"CUDA graphs are left out from here on: {why}.")
    run.programs.kind = Compiling(BUDGETS.get(memory.checkpointing, 1.0), graphs=memory.cuda_graphs and not why)
    with run.network.detached():
        prepare(base, memory, weights, run.device, run.stream)
    for text in base.text.encoders:
        recompute(text.units(), memory.checkpointing)


def resume_run(run: Run, checkpoint: Checkpoint) -> None:
    """Restore a run from a checkpoint; publish its LoRA if the earlier process ended before it did."""
    resume(run, checkpoint)
    inside = checkpoint.path.is_relative_to(run.folder.path) and not run.finished
    if run.world.leads and checkpoint.stays and run.config.saves.publish and inside:
        publish(run, checkpoint, f"-step-{run.at:06}")
    run.callbacks.resumed(run.losses, run.concepts, run.validation)


def log_columns(run: Run) -> list[str]:
    """List the run's own columns of the log: its learning rates, the losses of its concepts and of single levels."""
    groups = dict.fromkeys(group["name"] for group in run.optimizer.param_groups)
    concepts, levels = run.plan.concept_names().values(), measured_levels(run)
    columns = {"lr": groups, "loss": concepts, "validation": levels}
    return [f"{kind}_{name}" for kind, found in columns.items() for name in found]
