"""What a config must keep to before any process or device is touched.

In: a `Config`. Out: nothing, or an error that names the values, the rule and the remedy. Called by the commands, `main`
and `evaluate`. Needs no device: what depends on the mesh is checked by the trainer before it compiles anything.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from areal_jax import addresses
from areal_jax.config import (
    AUTO,
    DATA_FILES,
    HUB,
    PROFILED,
    Config,
    LoraConfig,
    is_hub_id,
    no_model_directory,
    require,
    resolve,
)
from areal_jax.types import LEAST_TEMPERATURE, MOST_TEMPERATURE


def check(config: Config) -> None:
    """Raises ValueError for values that contradict the rules or each other, and FileNotFoundError for missing files."""
    _check_profile(config)
    if config.sft.data:
        _check_supervised(config)
    else:
        _check_reinforcement(config)


def _check_profile(config: Config) -> None:
    text, steps = config.profile.steps, config.profiled_steps
    if text and not PROFILED.fullmatch(text):
        raise ValueError(
            f"config.profile.steps={text!r} must be FIRST:LAST, two training steps counted from 1, like 10:12; one "
            "step is 10:10, and empty is no profile"
        )
    last = config.trainer.steps or math.inf  # supervised, 0: known only with the data
    if text and not (steps and steps[0] >= 1 and steps[-1] <= last):
        raise ValueError(
            f"config.profile.steps={text!r} must name training steps of this run: FIRST at least 1 and not above LAST, "
            f"LAST at most trainer.steps={last}"
        )


def _check_supervised(config: Config) -> None:
    """Of what generates, asks and judges nothing is needed."""
    settings = config.sft
    if config.data.train:
        raise ValueError(
            f"config.sft.data={settings.data} (supervised fine-tuning) and config.data.train={config.data.train} "
            "(reinforcement learning) are both set; leave one of them empty: --config.data.train= or --config.sft.data="
        )
    _check_values(config)
    _check_distributed(config)
    _check_model(config)
    _check_lora(config.model.lora)
    for key, spec in _sft_data(config):
        _check_data(key, spec)
    if not settings.prompt or not settings.response or settings.prompt == settings.response:
        raise ValueError(
            f"config.sft.prompt={settings.prompt!r} and config.sft.response={settings.response!r} must name two "
            "columns of the data"
        )
    if config.trainer.token_budget < settings.max_length:
        raise ValueError(
            f"config.trainer.token_budget={config.trainer.token_budget} is less than the longest example, "
            f"config.sft.max_length={settings.max_length} tokens; raise it to at least {settings.max_length}, or lower "
            "sft.max_length"
        )


def _sft_data(config: Config) -> list[tuple[str, str]]:
    """(key, data set) of the examples that are there."""
    named = [("sft.data", config.sft.data), ("sft.eval_data", config.sft.eval_data)]
    return [(key, spec) for key, spec in named if spec]


def _check_reinforcement(config: Config) -> None:
    if config.sft.eval_data:
        raise ValueError(
            f"config.sft.eval_data={config.sft.eval_data} is set and config.sft.data is not; held-out examples belong "
            "to supervised fine-tuning: give --config.sft.data=FILE, or --config.eval.data for the problems of an "
            "evaluation"
        )
    _check_evaluation(config, {"data.train": config.data.train, "eval.data": config.eval.data})
    if config.trainer.prompts_per_step % config.trainer.objective.minibatches:
        raise ValueError(
            f"config.trainer.prompts_per_step={config.trainer.prompts_per_step} must be a multiple of "
            f"config.trainer.objective.minibatches={config.trainer.objective.minibatches}"
        )
    if config.trainer.token_budget < config.max_length:
        raise ValueError(
            f"config.trainer.token_budget={config.trainer.token_budget} is less than the longest sequence, "
            f"{config.max_length} tokens (data.max_prompt_tokens={config.data.max_prompt_tokens} + "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}); raise it to at least {config.max_length}"
        )
    if config.rollout.top_p != 1.0 or config.rollout.top_k != 0:
        raise ValueError(
            f"config.rollout.top_p={config.rollout.top_p}, top_k={config.rollout.top_k}: tokens would come from a "
            "truncated distribution, and the trainer's log-probabilities are those of the whole one, so the ratio of "
            "unchanged weights would not be 1; only top_p=1 and top_k=0 train"
        )
    if config.rollout.temperature == 0:
        raise ValueError("config.rollout.temperature=0 samples greedily, which gives no gradient; 1.0 is the paper's")
    if config.reward.correct <= config.reward.incorrect:
        raise ValueError(
            f"config.reward.correct={config.reward.correct} must be more than config.reward.incorrect="
            f"{config.reward.incorrect}: else right answers are not what is learned"
        )
    _check_advantages(config)
    _check_distributed(config)
    _check_lora(config.model.lora)
    if config.rollout.group_size > config.generation.max_waiting:
        raise ValueError(
            f"config.rollout.group_size={config.rollout.group_size} exceeds "
            f"config.generation.max_waiting={config.generation.max_waiting}; raise the latter"
        )


def check_parts(config: Config) -> None:
    """Raises ValueError where parts that are started one by one could not find each other."""
    for key, address in _grpc_addresses(config):
        if not addresses.split(address)[1]:
            raise ValueError(
                f"config.{key}: the port of {address} is left open, so that the other parts could not find it; give "
                "each part that you start by itself the same addresses with ports, or leave --role out, and all start "
                "here"
            )


def check_evaluation(config: Config) -> None:
    """As `check`, for an evaluation alone: of what only training needs nothing is asked."""
    _check_evaluation(config, {"eval.data": config.eval.data})


def _check_evaluation(config: Config, data: Mapping[str, str]) -> None:
    """`data` are the prompt sources that must be there, by key."""
    _check_values(config)
    _check_files(config, data)
    _check_generation(config)
    if config.generation.max_length and config.generation.max_length < config.needed_length:
        raise ValueError(
            f"config.generation.max_length={config.generation.max_length} is less than the longest sequence, "
            f"{config.needed_length} tokens (data.max_prompt_tokens={config.data.max_prompt_tokens} + the larger of "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens} and eval.max_new_tokens="
            f"{config.eval.max_new_tokens}); raise it to at least {config.needed_length}, or leave it 0"
        )
    if not 0 < config.eval.top_p <= 1:
        raise ValueError(f"config.eval.top_p={config.eval.top_p} must be above 0 and at most 1 (all tokens)")
    if config.eval.temperature == 0 and config.eval.samples > 1:
        raise ValueError(
            f"config.eval.temperature=0 takes the most likely token, so that all config.eval.samples="
            f"{config.eval.samples} of a prompt would be the same; set eval.samples=1, or a temperature"
        )


def check_serving(config: Config) -> None:
    """As `check`, for a generation server by itself: it needs a model, and neither data nor a reward."""
    _check_values(config)
    _check_model(config)
    _check_generation(config)


def _check_values(config: Config) -> None:
    for path, value in _numbers(config, ""):
        if path == "trainer.steps" and config.sft.data:
            bounds = at_least(0)  # as many as the epochs need
        else:
            bounds = BOUNDS.get(path, ANY)
        if value not in bounds:
            raise ValueError(f"config.{path}={value} must be {bounds.text}")
    _check_run(config)
    _check_addresses(config)


def _check_run(config: Config) -> None:
    if not config.run.dir and not config.run.name:
        raise ValueError("config.run.name is empty; it names the run's directory, runs/NAME, unless run.dir does")
    if not config.run.dir and pathlib.PurePath(config.run.name).name != config.run.name:
        raise ValueError(
            f"config.run.name={config.run.name!r} must be the name of a directory under runs/, without a path; "
            "run.dir takes any directory"
        )
    if config.run_dir.exists() and not config.run_dir.is_dir():
        raise ValueError(f"the run's directory {config.run_dir} is a file; give another --config.run.dir or run.name")
    if config.run.launch == "threads" and config.run.cores:
        raise ValueError(
            f"config.run.launch=threads is a run in one process, and config.run.cores={config.run.cores} gives each "
            "process a core; set launch=processes, or leave cores empty"
        )


def _check_addresses(config: Config) -> None:
    settings = config.generation
    if not settings.addresses:
        raise ValueError("config.generation.addresses is empty; it needs at least one host:port")
    named = _grpc_addresses(config) + [("generation.http_addresses", each) for each in settings.http_addresses]
    seen: dict[str, str] = {}
    for key, address in named:
        _, port = addresses.split(address, f"config.{key}")
        if port and address in seen:
            raise ValueError(f"config.{key} and config.{seen[address]} have {address} both; give each its own port")
        seen[address] = key


def _grpc_addresses(config: Config) -> list[tuple[str, str]]:
    """(key, address) of the servers by which the parts of a run reach one another."""
    trainer = ("trainer.address", config.trainer.address)
    return [trainer, *(("generation.addresses", each) for each in config.generation.addresses)]


def _numbers(section: Any, prefix: str) -> Iterator[tuple[str, float]]:
    """(key, number) of every setting that is one; a tuple's numbers have its key."""
    for field in dataclasses.fields(section):
        path, value = f"{prefix}{field.name}", getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{path}.")
        for each in value if isinstance(value, tuple) else [value]:
            if isinstance(each, int | float) and not isinstance(each, bool):
                yield path, each


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Numbers that a setting may have, and how that is said."""

    text: str
    allows: Callable[[float], bool]

    def __contains__(self, value: float) -> bool:
        return math.isfinite(value) and self.allows(value)


def at_least(least: float) -> Bounds:
    return Bounds(f"at least {least}", lambda value: value >= least)


def between(least: float, most: float) -> Bounds:
    return Bounds(f"at least {least} and at most {most}", lambda value: least <= value <= most)


ANY = Bounds("a finite number", lambda value: True)
POSITIVE = Bounds("above 0", lambda value: value > 0)
SHARE = between(0, 1)
DECAY = Bounds("at least 0 and below 1", lambda value: 0 <= value < 1)
TEMPERATURE = Bounds(
    f"0 (greedy), or at least {LEAST_TEMPERATURE:g} and at most {MOST_TEMPERATURE:g}",
    lambda value: value == 0 or LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE,
)
DEVICES = Bounds("at least 1, or -1 for all that are left", lambda value: value == -1 or value >= 1)
BOUNDS = {
    "run.seed": between(0, 2**32 - 1),
    "run.start_timeout_s": POSITIVE,
    "run.cores": at_least(0),
    "model.lora.rank": at_least(0),
    "data.max_prompt_tokens": at_least(1),
    "reward.workers": at_least(1),
    "reward.timeout_s": POSITIVE,
    "reward.memory_gb": POSITIVE,
    "rollout.group_size": at_least(1),
    "rollout.max_new_tokens": at_least(1),
    "rollout.temperature": TEMPERATURE,
    "rollout.max_staleness": at_least(0),
    "rollout.max_consecutive_failures": at_least(1),
    "generation.slots": at_least(1),
    "generation.max_length": at_least(0),
    "generation.decode_steps": at_least(1),
    "generation.length_buckets": at_least(1),
    "generation.slot_buckets": at_least(1),
    "generation.prefill_rows": at_least(1),
    "generation.prefill_tokens": at_least(1),
    "generation.tensor": at_least(1),
    "generation.top_logprobs": between(0, 20),  # OpenAI's own limit
    "generation.max_waiting": at_least(1),
    "trainer.steps": at_least(1),
    "trainer.prompts_per_step": at_least(1),
    "trainer.token_budget": at_least(1),
    "trainer.row_buckets": at_least(1),
    "trainer.vocab_block": at_least(1),
    "trainer.skipped_in_a_row": at_least(1),
    "trainer.batch_timeout_s": POSITIVE,
    "trainer.optimizer.lr": at_least(0),
    "trainer.optimizer.warmup_fraction": SHARE,
    "trainer.optimizer.beta1": DECAY,
    "trainer.optimizer.beta2": DECAY,
    "trainer.optimizer.eps": POSITIVE,
    "trainer.optimizer.weight_decay": at_least(0),
    "trainer.optimizer.max_grad_norm": POSITIVE,
    "trainer.objective.clip_eps": POSITIVE,
    "trainer.objective.minibatches": at_least(1),
    "trainer.mesh.data": DEVICES,
    "trainer.mesh.fsdp": DEVICES,
    "trainer.mesh.tensor": DEVICES,
    "trainer.distributed.processes": at_least(1),
    "trainer.distributed.timeout_s": at_least(1),
    "trainer.checkpoint.every": at_least(0),
    "trainer.checkpoint.keep": at_least(1),
    "weights.timeout_s": POSITIVE,
    "eval.every": at_least(0),
    "eval.prompts": at_least(0),
    "eval.samples": at_least(1),
    "eval.temperature": TEMPERATURE,
    "eval.top_k": at_least(0),
    "eval.max_new_tokens": at_least(0),
    "sft.max_length": at_least(2),
    "sft.batch_size": at_least(1),
    "sft.epochs": at_least(1),
}


def _check_generation(config: Config) -> None:
    settings = config.generation
    buckets = settings.length_buckets
    if buckets and max(buckets) < config.cache_length:
        made_of = (
            "generation.max_length"
            if settings.max_length
            else (
                f"data.max_prompt_tokens={config.data.max_prompt_tokens} + the larger of rollout.max_new_tokens="
                f"{config.rollout.max_new_tokens} and eval.max_new_tokens={config.eval.max_new_tokens}"
            )
        )
        raise ValueError(
            f"config.generation.length_buckets={buckets} end below the longest sequence, {config.cache_length} tokens "
            f"({made_of}); add a bucket of at least {config.cache_length}"
        )
    if len(settings.http_addresses) not in (0, len(settings.addresses)):
        raise ValueError(
            f"config.generation.http_addresses names {len(settings.http_addresses)} addresses for "
            f"{len(settings.addresses)} servers (generation.addresses); give one for each, or none"
        )
    if settings.batch_invariant and (settings.tensor > 1 or settings.dtype != config.trainer.dtype):
        raise ValueError(
            f"config.generation.batch_invariant=True with generation.tensor={settings.tensor}, generation.dtype="
            f"{settings.dtype}, trainer.dtype={config.trainer.dtype}: bits are the same only where one device computes "
            "in one dtype on either side; set generation.tensor=1 and both dtypes alike"
        )


def _check_advantages(config: Config) -> None:
    objective = config.trainer.objective
    by_group = objective.group_baseline or objective.normalize_advantages == "group"
    if by_group and config.rollout.group_size == 1:
        raise ValueError(
            "config.rollout.group_size=1 with a baseline of the group makes every advantage 0; set "
            "config.trainer.objective.group_baseline=False and normalize_advantages=batch, or sample more per prompt"
        )


def _check_distributed(config: Config) -> None:
    settings = config.trainer.distributed
    if settings.processes == 1:
        return
    if settings.coordinator != AUTO and not addresses.parse(settings.coordinator):
        raise ValueError(
            f"config.trainer.distributed.coordinator={settings.coordinator!r} must be host:port of process 0, at which "
            f"the {settings.processes} processes of the trainer meet; 127.0.0.1:0 when all of them are on this machine "
            "and started by main, auto when Slurm or the like or the hosts of a TPU slice start them"
        )
    if config.run.launch == "threads":
        raise ValueError(
            f"config.run.launch=threads is a run in one process, and config.trainer.distributed.processes="
            f"{settings.processes}; set launch=processes, or processes=1"
        )
    if config.run.cores:
        raise ValueError(
            f"config.run.cores={config.run.cores} has one core for the trainer, and "
            f"config.trainer.distributed.processes={settings.processes}; leave cores empty"
        )


def _check_lora(lora: LoraConfig) -> None:
    if lora.rank and (lora.alpha <= 0 or not lora.targets):
        raise ValueError(
            f"config.model.lora.rank={lora.rank} with alpha={lora.alpha} and targets={lora.targets}: adapters need an "
            "alpha above 0 and at least one target, or none of them ever changes the model; rank=0 trains without them"
        )


def _check_files(config: Config, data: Mapping[str, str]) -> None:
    for path, value in (("model.path", config.model.path), *data.items()):
        _check_set(path, value)
    _check_model(config)
    for key, value in data.items():
        _check_data(key, value)
    function = config.reward.function
    if ":" not in function or not callable(resolve(function, "reward.function")):
        raise ValueError(
            f"config.reward.function={function!r} must be module:function of a function that takes completion, answer "
            "and prompt"
        )


def _check_set(path: str, value: str) -> None:
    if not value:
        what = "DIR or org/name" if path == "model.path" else "FILE, hub:NAME or module:factory"
        raise ValueError(f"config.{path} is not set; give --config.{path}={what}")


def _check_model(config: Config) -> None:
    _check_set("model.path", config.model.path)
    if not pathlib.Path(config.model.path).expanduser().is_dir() and not is_hub_id(config.model.path):
        raise FileNotFoundError(no_model_directory(config.model.path))
    if config.model.shape and not pathlib.Path(config.model.shape).is_file():
        raise FileNotFoundError(
            f"config.model.shape={config.model.shape}: no such file; give the config.json that the model must agree "
            "with, or leave it empty"
        )


def _check_data(key: str, spec: str) -> None:
    """Whether a data set can be there: a file, a factory, or a hub name, which is looked up only when it is read."""
    if spec.startswith(HUB):
        return
    if spec.endswith(DATA_FILES):
        if not pathlib.Path(spec).is_file():
            raise FileNotFoundError(f"config.{key}={spec}: no such file (looked for {pathlib.Path(spec).absolute()})")
    elif ":" in spec:
        resolve(spec, key)
    else:
        raise ValueError(
            f'config.{key}={spec!r} must be a {", ".join(DATA_FILES)} file, "{HUB}NAME[:CONFIG][:SPLIT]" or '
            '"module:factory"'
        )


def check_packages(config: Config) -> None:
    """Raises ValueError for an optional package that a run of this config needs, and a plan of it does not."""
    asked = [("data.train", config.data.train), ("eval.data", config.eval.data)]
    for key, spec in _sft_data(config) if config.sft.data else asked:
        if spec.startswith(HUB):
            require("datasets", "a data set of the Hugging Face Hub", key)
        elif spec.endswith(".parquet"):
            require("pyarrow", "a .parquet file", key)
