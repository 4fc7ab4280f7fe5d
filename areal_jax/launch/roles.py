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
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from areal_jax import config as config_lib
from areal_jax.config import Config
from areal_jax.hub import model_directory
from areal_jax.launch import child, generation_server, run_files
from areal_jax.launch.model_config import model_config
from areal_jax.metrics import JsonlWriter, StepLog
from areal_jax.types import PromptSource

if TYPE_CHECKING:  # the controller starts without jax
    from areal_jax.distributed import Processes
    from areal_jax.rewards.pool import RewardPool

log = logging.getLogger(__name__)

STOPPED = 130  # exit status
LINGER_S = 3.0  # at most, that the trainer still answers after training, so that the controller hears of the end
HEARD_S = 0.5  # more, in which the controller ends the calls that it has under way


def run(config: Config, role: str, *, index: int = 0, process: int | None = None) -> int:
    """Runs one part to its end and returns the exit status: 0, or 130 where it was asked to stop before.

    `index` is which of the generation servers it is, `process` which of the trainer's processes (see `joined`).
    """
    child.pin(config.run.cores, role, index)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    stop = threading.Event()
    child.end_with_parent()
    if role == "rollout":
        child.end_in_order(stop)
        asyncio.run(_rollout(config, stop))
        return STOPPED if stop.is_set() else 0
    if role == "trainer":
        return 0 if _trainer(config, process, stop) >= config.trainer.steps else STOPPED
    generation_server.run(config, index, stop)
    return 0


# Trainer.


def _trainer(config: Config, process: int | None, stop: threading.Event) -> int:
    """The version that was reached."""
    from areal_jax import compilation

    compilation.enable_cache()
    with joined(config, process, stop) as processes:
        return (_follow if processes.index else _lead)(config, processes, stop)


@contextlib.contextmanager
def joined(config: Config, process: int | None, stop: threading.Event) -> Iterator["Processes"]:
    """The trainer's processes, of which this is number `process`, of one mind on what they train.

    To be called before there is a backend. None is what the cluster says, or 0; see `distributed.joined`.
    """
    from areal_jax import distributed
    from areal_jax.trainer import step

    step.run_in_turn()
    settings = config.trainer.distributed
    with distributed.joined(
        settings.coordinator, index=process, count=settings.processes, timeout_s=settings.timeout_s, stop=stop
    ) as processes:
        processes.agree("the config", config_lib.to_json(config))
        processes.agree("the newest checkpoint in run.dir", f"version {run_files.newest_checkpoint(config.run_dir)}")
        yield processes


def _ready(processes: "Processes", stop: threading.Event) -> None:
    child.end_in_order(stop)
    processes.barrier("every program is compiled")


def _follow(config: Config, processes: "Processes", stop: threading.Event) -> int:
    """A process that is not the first: the same loop, without queue and generators."""
    from areal_jax.trainer import shared

    def open_log(version: int) -> shared.OwnTimes:
        _ready(processes, stop)
        return shared.OwnTimes(config.run_dir, processes.index, version=version)

    return _loop(config, shared.NoQueue(), shared.NoPublisher(), open_log, stop, processes)


def _lead(config: Config, processes: "Processes", stop: threading.Event) -> int:
    from areal_jax import weights
    from areal_jax.transport import clients, servers

    queue = make_queue(config)
    directory = weights.run_directory(config.weights.directory, config.run_dir)
    server = servers.serve_trainer(
        queue, address=config.trainer.address, token=child.token(), weights_directory=str(directory)
    )

    first = True  # until every server holds a version, servers may still be starting

    def push(file: weights.WeightFile) -> None:
        nonlocal first
        clients.push_weights(
            config.generation.addresses,
            file,
            source=server.address if config.weights.transport == "stream" else "",
            token=child.token(),
            timeout_s=config.run.start_timeout_s if first else config.weights.timeout_s,
            stop=stop,
            least="all" if first else "one",
        )
        first = False

    try:
        send = weights.shared_memory_sender(directory, push)
        version = train(config, queue, send, stop, processes, lambda: _ready(processes, stop))
        if not stop.is_set() and server.heard.wait(LINGER_S):
            stop.wait(HEARD_S)
        return version
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
) -> int:
    """The training loop with its files, on a queue and on whatever sends weights to the generators.

    `on_ready` is called when everything is compiled, before the first step. Returns the version that was reached.
    """
    from areal_jax.weights import Publisher

    def open_log(version: int) -> StepLog:
        on_ready()
        return step_log(config, version)

    record = JsonlWriter(config.run_dir / "publishes.jsonl").write
    publisher = Publisher(send, queue.announce, failed=stop.set, record=record)
    return _loop(config, queue, publisher, open_log, stop, processes)


def _loop(
    config: Config,
    queue: Any,
    publisher: Any,
    open_log: Callable[[int], Any],
    stop: threading.Event,
    processes: "Processes",
) -> int:
    from areal_jax.models.safetensors_files import read_params
    from areal_jax.trainer import loop

    shape = model_config(config)
    return loop.train(
        config,
        model_config=shape,
        read_params=functools.partial(read_params, model_directory(config.model.path), shape),
        queue=queue,
        publisher=publisher,
        open_log=open_log,
        stop=stop,
        processes=processes,
    )


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


def make_queue(config: Config) -> Any:
    from areal_jax.trajectory_queue import TrajectoryQueue

    return TrajectoryQueue(
        batch_size=config.batch_size,
        group_size=config.rollout.group_size,
        max_staleness=config.rollout.max_staleness,
        overdue=config.rollout.overdue,
    )


# Rollout controller.


async def _rollout(config: Config, stop: threading.Event) -> None:
    from areal_jax.transport.clients import GenerationPool, TrainerClient

    generate = GenerationPool(config.generation.addresses, token=child.token(), patience_s=config.run.start_timeout_s)
    queue = TrainerClient(config.trainer.address, token=child.token(), patience_s=config.run.start_timeout_s)
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
