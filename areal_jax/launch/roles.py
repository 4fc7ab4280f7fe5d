"""The parts of a run, each built from the config and run to its end, in a process of its own.

    trainer      loads the model, hosts the trajectory queue and the weights, trains; of several processes, process 0
                 hosts, and all train
    generator    loads the model, compiles, serves generation until it is told to stop
    rollout      prompts, gate, rewards; ends when the trainer announces that training is finished

In: a checked config. Called by `main --role=...`, by hand or as a child of `launch.processes`. SIGTERM and SIGINT end a
part in good order, and at once while it compiles, when there is nothing to keep yet; a child also ends when its parent
is gone.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from areal_jax import config as config_lib
from areal_jax.config import Config, is_hub_id
from areal_jax.hub import model_directory
from areal_jax.launch import run_files
from areal_jax.metrics import JsonlWriter, StepLog
from areal_jax.types import UNPUBLISHED, PromptSource

if TYPE_CHECKING:  # the controller starts without jax
    from areal_jax.distributed import Processes
    from areal_jax.generation.scheduler import Scheduler
    from areal_jax.models.transformer import TransformerConfig
    from areal_jax.rewards.pool import RewardPool

log = logging.getLogger(__name__)

PARENT = "AREAL_JAX_PARENT"  # in a child's environment: the process it must not outlive
TOKEN = "AREAL_JAX_TOKEN"  # shared by all processes of a run that goes beyond loopback
LINGER_S = 3.0  # that the trainer still answers after training, so that the controller hears of the end
REPORT_S = 1.0  # between two lines of generation-N.jsonl


def run(config: Config, role: str, *, index: int = 0, process: int | None = None) -> int:
    """Runs one part to its end and returns the exit status.

    `index` is which of the generation servers it is, `process` which of the trainer's processes (see `joined`).
    """
    pin(config.run.cores, role, index)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    stop = threading.Event()
    end_with_parent()
    if role == "rollout":
        _end_in_order(stop)
        asyncio.run(_rollout(config, stop))
    elif role == "trainer":
        _trainer(config, process, stop)
    else:
        _generator(config, index, stop)
    return 0


def pin(cores: Sequence[int], role: str, index: int) -> None:
    """Keeps trainer and generation servers on the cores of `run.cores`. Call it before jax counts its cores.

    Raises ValueError when there are fewer cores than parts, OSError for a core that this machine does not have.
    """
    if not cores or role == "rollout":
        return
    place = 0 if role == "trainer" else 1 + index
    if place >= len(cores):
        raise ValueError(
            f"config.run.cores={tuple(cores)} names no core for {role} {index}; it needs one for the trainer and one "
            "for each of generation.addresses, in this order"
        )
    os.sched_setaffinity(0, {cores[place]})


def _end_in_order(stop: threading.Event) -> None:
    """From here on SIGTERM and SIGINT set `stop`; before, they end the process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())


def end_with_parent() -> None:
    """A child of a run ends when the process that started it is gone; whoever is no child goes on."""
    if parent := os.environ.get(PARENT):
        threading.Thread(target=_watch, args=(int(parent),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20.0)
    os._exit(1)  # whatever still holds this process: nobody is left to wait for it


def token() -> str:
    return os.environ.get(TOKEN, "")


# Trainer.


def _trainer(config: Config, process: int | None, stop: threading.Event) -> None:
    from areal_jax import compilation

    compilation.enable_cache()
    with joined(config, process, stop) as processes:
        (_follow if processes.index else _lead)(config, processes, stop)


@contextlib.contextmanager
def joined(config: Config, process: int | None, stop: threading.Event) -> Iterator["Processes"]:
    """The trainer's processes, of which this is number `process`, of one mind on what they train.

    None is what the cluster says, or 0; see `distributed.joined`.
    """
    from areal_jax import distributed

    settings = config.trainer.distributed
    with distributed.joined(
        settings.coordinator, index=process, count=settings.processes, timeout_s=settings.timeout_s, stop=stop
    ) as processes:
        processes.agree("the config", config_lib.to_json(config))
        processes.agree("the newest checkpoint in run.dir", f"version {run_files.newest_checkpoint(config.run_dir)}")
        yield processes


def _ready(processes: "Processes", stop: threading.Event) -> None:
    _end_in_order(stop)
    processes.barrier("every program is compiled")


def _follow(config: Config, processes: "Processes", stop: threading.Event) -> None:
    """A process that is not the first: the same loop, without queue and generators."""
    from areal_jax.trainer import shared

    def open_log(version: int) -> shared.OwnTimes:
        _ready(processes, stop)
        return shared.OwnTimes(config.run_dir, processes.index, version=version)

    _loop(config, shared.NoQueue(), shared.NoPublisher(), open_log, stop, processes)


def _lead(config: Config, processes: "Processes", stop: threading.Event) -> None:
    from areal_jax import weights
    from areal_jax.transport import clients, servers

    queue = make_queue(config)
    directory = weights.run_directory(config.weights.directory, config.run_dir)
    server = servers.serve_trainer(
        queue, address=config.trainer.address, token=token(), weights_directory=str(directory)
    )

    first = True  # until every server holds a version, servers may still be starting

    def push(file: weights.WeightFile) -> None:
        nonlocal first
        clients.push_weights(
            config.generation.addresses,
            file,
            source=server.address if config.weights.transport == "stream" else "",
            token=token(),
            timeout_s=config.run.start_timeout_s if first else config.weights.timeout_s,
            stop=stop,
            least="all" if first else "one",
        )
        first = False

    try:
        send = weights.shared_memory_sender(directory, push)
        train(config, queue, send, stop, processes, lambda: _ready(processes, stop))
        stop.wait(LINGER_S)
    finally:
        server.stop()
        weights.remove_directory(directory)


def train(
    config: Config,
    queue: Any,
    send: Callable[[Any, int], Any],
    stop: threading.Event,
    processes: "Processes",
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """The training loop with its files, on a queue and on whatever sends weights to the generators.

    `on_ready` is called when everything is compiled, before the first step.
    """
    from areal_jax.weights import Publisher

    def open_log(version: int) -> StepLog:
        on_ready()
        return step_log(config, version)

    record = JsonlWriter(config.run_dir / "publishes.jsonl").write
    _loop(config, queue, Publisher(send, queue.announce, failed=stop.set, record=record), open_log, stop, processes)


def _loop(
    config: Config,
    queue: Any,
    publisher: Any,
    open_log: Callable[[int], Any],
    stop: threading.Event,
    processes: "Processes",
) -> None:
    from areal_jax.models.safetensors_files import read_params
    from areal_jax.trainer import loop

    shape = model_config(config)
    loop.train(
        config,
        model_config=shape,
        read_params=functools.partial(read_params, model_directory(config.model.path), shape),
        queue=queue,
        publisher=publisher,
        open_log=open_log,
        stop=stop,
        processes=processes,
    )


def model_config(config: Config) -> "TransformerConfig":
    """The model of `model.path` as every part of the run holds it: trainer and generators agree on its arrays.

    The vocabulary is padded to what the tensor axes of both divide, and ids that the tokenizer does not define are
    never sampled. Raises ValueError when the tokenizer has more ids than the model, or when a sequence can be longer
    than the model was made for: beyond, it computes nonsense silently.
    """
    made_of = (
        f"generation.max_length={config.generation.max_length}"
        if config.generation.max_length
        else f"data.max_prompt_tokens={config.data.max_prompt_tokens} and rollout.max_new_tokens="
        f"{config.rollout.max_new_tokens}, or eval.max_new_tokens"
    )
    return _shape_for(config, config.cache_length, made_of)  # no sequence of the trainer is longer


def step_log(config: Config, version: int) -> StepLog:
    """The step log of a run that stands at a version."""
    return StepLog(
        config.run_dir,
        version=version,
        tensorboard=config.metrics.tensorboard,
        wandb=config.metrics.wandb,
        name=config.run.name,
        config=dataclasses.asdict(config),
    )


def supervised_model_config(config: Config) -> "TransformerConfig":
    """The same for supervised fine-tuning, whose sequences are examples."""
    return _shape_for(config, config.sft.max_length, "sft.max_length")


def _shape_for(config: Config, longest: int, made_of: str) -> "TransformerConfig":
    """The model, checked for sequences of `longest` tokens, which `made_of` (settings) allow."""
    from areal_jax.models.huggingface import load_config
    from areal_jax.tokenizer import Tokenizer

    directory = model_directory(config.model.path)
    shape = load_config(directory, vocab_multiple=config.vocab_multiple)
    if config.model.shape:
        check_shape(config, shape)
    ids = Tokenizer.load(directory).vocab_size
    if ids > shape.vocab_size:
        raise ValueError(
            f"model.path={directory}: the tokenizer defines {ids} token ids, and config.json has vocab_size="
            f"{shape.vocab_size}: the model has no weights for the last ones. The files there belong to different "
            "models, or tokens were added without resizing the embedding"
        )
    if longest > shape.max_positions:
        raise ValueError(
            f"the longest sequence has {longest} tokens ({made_of}), and the model of "
            f"model.path={config.model.path} is made for max_position_embeddings={shape.max_positions}; lower them"
        )
    kernels = "batch_invariant" if config.generation.batch_invariant else config.model.attention
    return dataclasses.replace(shape, live_vocab=ids, kernels=kernels)


def check_shape(config: Config, shape: "TransformerConfig") -> None:
    """Raises ValueError that names the fields in which a model differs from `model.shape`."""
    from areal_jax.models.huggingface import load_config

    wanted = dataclasses.asdict(load_config(pathlib.Path(config.model.shape)))
    here = dataclasses.asdict(shape) | dict.fromkeys(("padded_vocab", "live_vocab"), 0)  # how it lies in memory
    differing = [name for name in wanted if wanted[name] != here[name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"config.model.path={config.model.path} has {name}={here[name]!r}, where config.model.shape="
            f"{config.model.shape} says {wanted[name]!r} ({len(differing)} such fields: {', '.join(differing)}); give "
            "the model that this recipe is for, or leave model.shape empty"
        )


def make_queue(config: Config) -> Any:
    from areal_jax.trajectory_queue import TrajectoryQueue

    return TrajectoryQueue(
        batch_size=config.batch_size,
        group_size=config.rollout.group_size,
        max_staleness=config.rollout.max_staleness,
        overdue=config.rollout.overdue,
    )


# Generation server.


def _generator(config: Config, index: int, stop: threading.Event) -> None:
    from areal_jax import compilation, profiling
    from areal_jax.tokenizer import Tokenizer
    from areal_jax.transport import servers

    compilation.enable_cache()
    profile = profiling.Profile(config.run_dir / "profile" / f"generation-{index}", config.profiled_steps)
    with http_server(config, index) as open_http:
        scheduler = make_scheduler(config)
        _end_in_order(stop)
        server = servers.serve_generation(
            scheduler,
            address=config.generation.addresses[index],
            tokenizer=Tokenizer.load(model_directory(config.model.path)),
            token=token(),
            max_new_tokens=min(config.rollout.max_new_tokens, config.cache_length - 1),
            temperature=config.rollout.temperature,
            seed=config.run.seed,
        )
        log.info("generation server %d listens on %s", index, server.address)
        open_http(scheduler)
        try:
            with profiling.following(profile, lambda: int(scheduler.status()["version"]) + 1):
                report_generation(scheduler, config.run_dir, index, stop)
        finally:
            server.stop()
            scheduler.stop()


@contextlib.contextmanager
def http_server(config: Config, index: int) -> Iterator["Callable[[Scheduler], None]"]:
    """A server of generation.http_addresses, if there are any, that says it is not ready; yields what opens it."""
    if not config.generation.http_addresses:
        yield lambda scheduler: None
        return
    from areal_jax.tokenizer import Tokenizer
    from areal_jax.transport.http_server import HttpServer, Model

    tokenizer = Tokenizer.load(model_directory(config.model.path))
    name = served_name(config.model.path)
    model = Model(name, tokenizer, config.cache_length, config.generation.top_logprobs)
    server = HttpServer(model, address=config.generation.http_addresses[index], token=token())
    log.info("model %s is not ready yet on %s", model.name, server.url)

    def open_http(scheduler: "Scheduler") -> None:
        server.serve(scheduler)
        log.info("model %s is served on %s/v1", model.name, server.url)

    try:
        yield open_http
    finally:
        server.stop()


def served_name(path: str) -> str:
    """What HTTP clients call the model of `model.path`: its id on the hub, or the name of its directory."""
    return path.partition("@")[0] if is_hub_id(path) else pathlib.Path(path).expanduser().resolve().name


def make_scheduler(config: Config) -> "Scheduler":
    """A started scheduler over a warm engine. It holds the weights of `model.path` until the first publish."""
    from areal_jax.generation.engine import Engine, EngineOptions
    from areal_jax.generation.scheduler import Scheduler
    from areal_jax.models.safetensors_files import read_params
    from areal_jax.tokenizer import Tokenizer

    directory, shape = model_directory(config.model.path), model_config(config)
    settings = config.generation
    options = EngineOptions(
        slots=settings.slots,
        max_length=config.cache_length,
        decode_steps=settings.decode_steps,
        prefill_rows=settings.prefill_rows,
        prefill_tokens=settings.prefill_tokens,
        length_buckets=settings.length_buckets,
        slot_buckets=settings.slot_buckets,
        dtype=settings.dtype,
        top_logprobs=settings.top_logprobs,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        tensor=settings.tensor,
    )
    engine = Engine(shape, options, tokenizer=Tokenizer.load(directory))
    weights = engine.load(read_params(directory, shape, engine.places), UNPUBLISHED)
    engine.warm_up(weights, lambda done, total: log.info("compiled %d of %d length buckets", done, total))
    scheduler = Scheduler(
        engine,
        weights,
        on_update=settings.on_update,
        max_waiting=settings.max_waiting,
        double_buffer=settings.double_buffer,
    )
    scheduler.start()
    return scheduler


TOTALS = ("busy_s", "tokens", "requests", "swaps", "swap_stall_s", "recomputed_tokens")


def report_generation(scheduler: "Scheduler", run_dir: pathlib.Path, index: int, stop: threading.Event) -> None:
    """Writes a line of generation-<index>.jsonl about once a second until `stop`. Raises what ended the engine."""
    writer = JsonlWriter(run_dir / f"generation-{index}.jsonl")
    before, began = scheduler.status(), time.time()
    while scheduler.failure is None:
        stopped = stop.wait(REPORT_S)
        activity = _take_activity(scheduler)
        status, now = scheduler.status(), time.time()
        line = {
            "time": now,
            "interval_s": now - began,
            **status,
            **{name: status[name] - before[name] for name in TOTALS},
            **activity,
        }
        writer.write(line)
        before, began = status, now
        if stopped:
            writer.close()
            return
    raise RuntimeError("the generation engine failed") from scheduler.failure


def _take_activity(scheduler: "Scheduler") -> dict[str, Any]:
    """When the server waited for work and when it swapped weights, since the last call; times since 1970."""
    waits, swaps = scheduler.activity.take()
    shift = time.time() - time.monotonic()  # the scheduler's clock is the monotonic one
    return {
        "waits": [[begin + shift, end + shift] for begin, end in waits],
        "swapped": [
            {
                "version": swap.version,
                "time": swap.ended + shift,
                "stall_s": swap.stall_s,
                "recompute_s": swap.recompute_s,
                "recomputed_tokens": swap.recomputed_tokens,
            }
            for swap in swaps
        ],
    }


# Rollout controller.


async def _rollout(config: Config, stop: threading.Event) -> None:
    from areal_jax.transport.clients import GenerationPool, TrainerClient

    generate = GenerationPool(config.generation.addresses, token=token(), patience_s=config.run.start_timeout_s)
    queue = TrainerClient(config.trainer.address, token=token(), patience_s=config.run.start_timeout_s)
    try:
        await control(config, generate, queue, stop)
    finally:
        await generate.close()
        await queue.close()


async def control(config: Config, generate: Any, queue: Any, stop: threading.Event) -> None:
    """The controller with its reward pool and its files, on whatever generates and queues."""
    from areal_jax.rewards.final_answer import final_answer
    from areal_jax.rewards.timed import TimedScorer
    from areal_jax.rollout import controller
    from areal_jax.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(model_directory(config.model.path))
    writers: dict[str, JsonlWriter] = {}

    def record(file: str, line: dict[str, Any]) -> None:
        if file not in writers:
            writers[file] = JsonlWriter(config.run_dir / f"{file}.jsonl")
        writers[file].write(line)

    def keep(name: str, lines: Sequence[dict[str, Any]]) -> None:
        run_files.write_lines(config.run_dir / "evaluations" / f"{name}.jsonl", lines)

    with make_scorer(config) as scorer:
        timed = TimedScorer(scorer)

        def record_with_pool(file: str, line: dict[str, Any]) -> None:
            pool = {"reward_unanswered": dict(scorer.unanswered), "judging": timed.take()} if file == "rollout" else {}
            record(file, {**line, **pool})

        services = controller.Services(
            generate=generate,
            scorer=timed,
            queue=queue,
            tokenizer=tokenizer,
            record=record_with_pool,
            keep=keep,
            final_answer=final_answer,
        )
        await controller.run(
            config,
            services,
            train=load_prompts(config, "train", tokenizer),
            held_out=load_prompts(config, "held_out", tokenizer),
            stop=await _as_asyncio(stop),
        )


def make_scorer(config: Config) -> "RewardPool":
    """The reward pool. Raises ValueError when `reward.function` cannot be imported."""
    from areal_jax.rewards.pool import RewardPool

    reward = config.reward
    return RewardPool(
        reward.function,
        workers=reward.workers,
        timeout_s=reward.timeout_s,
        memory_gb=reward.memory_gb,
        sandbox=reward.sandbox,
    )


def load_prompts(config: Config, split: str, tokenizer: Any) -> PromptSource:
    from areal_jax.rollout.prompts import load_source

    spec, options = {
        "train": (config.data.train, config.data.options),
        "held_out": (config.eval.data, config.eval.options),
    }[split]
    return load_source(spec, split=split, seed=config.run.seed, tokenizer=tokenizer, options=options)


async def _as_asyncio(stop: threading.Event) -> asyncio.Event:
    """An asyncio event that is set soon after `stop`."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()

    def wait() -> None:
        stop.wait()
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    threading.Thread(target=wait, daemon=True).start()
    return event
