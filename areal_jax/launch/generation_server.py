"""A generation server of a run, or by itself: it loads the model, compiles, and serves over gRPC and HTTP.

In: a checked config. Out: completions, and a line of generation-N.jsonl a second. Called by `roles`; parts of it by
`threads` and by evaluations, too. Waits for requests.
"""

import contextlib
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from areal_jax import addresses
from areal_jax.config import Config, is_hub_id
from areal_jax.hub import model_directory
from areal_jax.launch import child
from areal_jax.launch.model_config import model_config
from areal_jax.metrics import JsonlWriter
from areal_jax.types import UNPUBLISHED

if TYPE_CHECKING:  # the controller starts without jax
    from areal_jax.generation.scheduler import Scheduler

log = logging.getLogger(__name__)

REPORT_S = 1.0  # between two lines of generation-N.jsonl


def run(config: Config, index: int, stop: threading.Event) -> None:
    """Serves until `stop`, as server `index` of generation.addresses. Raises what ended the engine."""
    from areal_jax import compilation, profiling
    from areal_jax.tokenizer import Tokenizer
    from areal_jax.transport import servers

    address = config.generation.addresses[index]
    addresses.check_guarded(address, child.token())
    addresses.with_free_ports([address])  # a port in use is told before anything compiles
    compilation.enable_cache()
    profile = profiling.Profile(config.run_dir / "profile" / f"generation-{index}", config.profiled_steps)
    with http_server(config, index) as open_http:
        scheduler = make_scheduler(config)
        child.end_in_order(stop)
        server = servers.serve_generation(
            scheduler,
            address=address,
            tokenizer=Tokenizer.load(model_directory(config.model.path)),
            token=child.token(),
            max_new_tokens=config.rollout.max_new_tokens,
            max_length=config.cache_length,
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
    server = HttpServer(model, address=config.generation.http_addresses[index], token=child.token())
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
    from areal_jax import room
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
    room.check(
        engine.held,
        what=f"the weights and the cache of config.generation.slots={settings.slots} sequences of up to "
        f"{engine.buckets[-1]} tokens",
        remedy="lower config.generation.slots or the longest sequence (data.max_prompt_tokens, rollout.max_new_tokens, "
        "generation.length_buckets), or raise config.generation.tensor; --dry_run prints the plan",
    )
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
