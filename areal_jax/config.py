"""The configuration: typed and complete.

In: an ml_collections ConfigDict (a file under `configs/` and the command line's `--config.section.key=value`).
Out: one frozen `Config`, whose sections are handed to the parts. This file is the one home of defaults, and they are
the paper's recipe (AReaL, arXiv 2505.24298, appendix B); a config file says only where it differs. What the values must
keep to: config_rules.py.
"""

import dataclasses
import difflib
import importlib
import importlib.util
import json
import math
import pathlib
import re
import typing
from typing import Any, Literal

from ml_collections import ConfigDict

DATA_FILES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
AUTO = "auto"  # trainer.distributed.coordinator of processes that a cluster starts, which knows all they need
HUB = "hub:"  # begins the name of a data set on the Hugging Face Hub
PROFILED = re.compile(r"(\d+):(\d+)")  # profile.steps
OPTIONS = ("data.options.", "eval.options.", "sft.options.", "sft.eval_options.")  # keys that are free


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Where a run lives and how it is launched."""

    name: str = "math"
    dir: str = ""  # empty: runs/<name>
    seed: int = 1
    launch: Literal["processes", "threads"] = "processes"
    start_timeout_s: float = 600.0  # for each process to come up, compilation included
    cores: tuple[int, ...] = ()  # pins trainer, generator 0, generator 1, ... to a core each; empty: the system decides


Projection = Literal["query", "key", "value", "out", "gate", "up", "down"]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters W + alpha / rank * A B; with them nothing else trains (arXiv 2106.09685, PEFT's names)."""

    rank: int = 0  # 0: no adapters, the weights themselves train
    alpha: float = 16.0
    targets: tuple[Projection, ...] = ("query", "key", "value", "out", "gate", "up", "down")  # in every layer


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model and its tokenizer, and what of it trains."""

    path: str = ""  # a directory in the Hugging Face format, or a hub id like "Qwen/Qwen2.5-1.5B-Instruct"
    shape: str = ""  # a config.json that the model must agree with; --dry_run plans with it before the download
    attention: Literal["auto", "plain"] = "auto"  # auto: the kernels of the accelerator, for the shapes they take
    lora: LoraConfig = LoraConfig()
    freeze: tuple[str, ...] = ()  # regular expressions of whole parameter names that do not train, nor get an adapter


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Prompts to train on: a `.jsonl`, `.json` or `.parquet` file, "module:factory", or a hub id as "hub:NAME"."""

    train: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # keyword arguments of the factory
    max_prompt_tokens: int = 1024


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """The verifier and what its verdict is worth: reward = incorrect + verdict * (correct - incorrect)."""

    function: str = "areal_jax.rewards.math_verdict:answers_match"
    correct: float = 5.0
    incorrect: float = -5.0
    cut_off: Literal["judge", "wrong"] = "judge"  # a completion that does not end within max_new_tokens
    workers: int = 1
    timeout_s: float = 5.0  # for each verdict
    memory_gb: float = 2.0  # of address space for each worker beyond what its imports took
    sandbox: Literal["limits", "bubblewrap"] = "limits"  # bubblewrap: no network, no writable file, no other process


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Sampling of training trajectories and the staleness bound."""

    group_size: int = 16
    max_new_tokens: int = 27648
    temperature: float = 1.0
    top_p: float = 1.0  # no other value trains: see `check`
    top_k: int = 0  # likewise; 0 = all tokens
    max_staleness: int = 8  # eta; 0 = synchronous (AReaL: max_head_offpolicyness)
    overdue: Literal["mask", "drop", "train"] = "mask"
    drop_zero_variance: bool = False  # leave out groups whose rewards are all equal
    max_consecutive_failures: int = 16


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """Generation servers. One server per address; port 0 is chosen by `main`."""

    addresses: tuple[str, ...] = ("127.0.0.1:0",)
    http_addresses: tuple[str, ...] = ()  # of OpenAI's API and /metrics, one per server; empty: no HTTP
    slots: int = 64
    max_length: int = 0  # tokens that a slot holds; 0: data.max_prompt_tokens + the most new tokens
    decode_steps: int = 8  # tokens per slot and dispatch, the most that a swap waits for
    length_buckets: tuple[int, ...] = ()  # cache lengths to compile for; empty: powers of two
    slot_buckets: tuple[int, ...] = ()  # slots to compile decoding for; empty: all, on a CPU a quarter of them as well
    prefill_rows: int = 8  # prompts (or slots to recompute) per prefill
    prefill_tokens: int = 32768  # most tokens of one prefill, padding too; longer rows go one by one (bytes: --dry_run)
    double_buffer: bool = True  # new weights load beside the old ones; False: in their place, while nothing decodes
    on_update: Literal["recompute", "keep", "drain"] = "recompute"
    dtype: Literal["float32", "bfloat16"] = "float32"
    batch_invariant: bool = False  # every bit of a log-probability as the trainer computes it: a proof, and slow
    tensor: int = 1  # devices over which a server splits heads, feed-forward and vocabulary, its cache by heads
    top_logprobs: int = 0  # most of the likeliest alternatives to a token that an HTTP client may ask for
    max_waiting: int = 4096  # requests that may wait for a slot before the server answers "busy"


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, as in the paper's table."""

    lr: float = 2e-5
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_fraction: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-5
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    moment_dtype: Literal["float32", "bfloat16"] = "float32"  # of the first moment; the second is float32


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """Decoupled PPO (equation 5 of the paper) and the advantages it weighs."""

    prox: Literal["recompute", "naive"] = "recompute"  # naive: the behaviour policy as proximal policy
    clip_eps: float = 0.2
    normalize_advantages: Literal["batch", "group", "none"] = "batch"
    group_baseline: bool = False  # subtract the group's mean reward first
    advantage_std: Literal["population", "sample", "none"] = "population"
    minibatches: int = 4


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices of the trainer by axis; data=-1 takes all that the others leave."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """The trainer as several processes, each with its own devices, of which trainer.mesh then is."""

    coordinator: str = ""  # host:port of process 0; 127.0.0.1:0: `main` starts all of them here; auto: a cluster does
    processes: int = 1
    timeout_s: float = 300.0  # for all to meet, before the first step and at the end


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int = 20  # steps; 0 = only at the end
    keep: int = 2


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """The training loop. A batch is prompts_per_step * rollout.group_size trajectories."""

    address: str = "127.0.0.1:0"
    steps: int = 250  # versions; with sft.data, updates, 0: as many as sft.epochs need
    prompts_per_step: int = 512
    token_budget: int = 32768  # most tokens of a microbatch (AReaL: max_tokens_per_mb)
    row_buckets: tuple[int, ...] = ()  # row lengths to compile for; empty: powers of two
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the forward pass; weights and optimizer are float32
    remat: Literal["none", "layers", "dots"] = "none"  # computed again in the backward pass: see transformer.REMAT
    vocab_block: int = 512  # ids whose logits exist at a time; an accelerator with memory to spare likes more
    skipped_in_a_row: int = 8  # updates without a finite gradient that end the run
    batch_timeout_s: float = 1800.0
    optimizer: OptimizerConfig = OptimizerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    mesh: MeshConfig = MeshConfig()
    distributed: DistributedConfig = DistributedConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


@dataclasses.dataclass(frozen=True)
class WeightsConfig:
    """How a version reaches the generation servers when they are other processes."""

    transport: Literal["shared_memory", "stream"] = "shared_memory"
    directory: str = ""  # of the shared-memory file; empty: /dev/shm, or the run's directory where there is none
    timeout_s: float = 120.0


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation on the generation servers, beside training, and by `python -m areal_jax.evaluate`."""

    data: str = ""  # as data.train
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # as data.options, for this source
    every: int = 20  # versions; 0 = only before and after
    prompts: int = 256  # the first ones of the source; 0 = all of a finite one
    samples: int = 1  # per prompt; the paper's avg@32 takes 32
    temperature: float = 1.0  # 0 = greedy, with one sample
    top_p: float = 1.0  # of the probability; 1 = all tokens
    top_k: int = 0  # 0 = all tokens
    max_new_tokens: int = 0  # 0: rollout.max_new_tokens; if more than that, the servers' caches grow to hold it


@dataclasses.dataclass(frozen=True)
class SftConfig:
    """Supervised fine-tuning: with `data` set, a run imitates responses, and nothing is generated."""

    data: str = ""  # as data.train: rows with a prompt and a response, or with `messages` (rollout/examples.py)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # template, system, chat; or the factory's
    prompt: str = "prompt"  # column
    response: str = "response"  # column
    max_length: int = 2048  # tokens of prompt, response and end; longer examples are reported and left out
    batch_size: int = 64  # examples per update
    epochs: int = 1  # over the data, where trainer.steps=0
    eval_data: str = ""  # held-out examples, whose loss is measured every eval.every updates; empty: none
    eval_options: dict[str, Any] = dataclasses.field(default_factory=dict)  # as options, for eval_data


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    tensorboard: bool = True
    wandb: bool = False


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """Profiler traces of trainer and generation servers, in the run's directory under profile/."""

    steps: str = ""  # "10:12" = training steps 10 to 12, counted from 1; empty: none


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    generation: GenerationConfig = GenerationConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: EvaluationConfig = EvaluationConfig()
    sft: SftConfig = SftConfig()
    metrics: MetricsConfig = MetricsConfig()
    profile: ProfileConfig = ProfileConfig()

    @property
    def batch_size(self) -> int:
        """Trajectories per training step, the paper's B."""
        return self.trainer.prompts_per_step * self.rollout.group_size

    @property
    def max_length(self) -> int:
        """Tokens of the longest possible sequence, prompt and completion."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def trained_length(self) -> int:
        """Tokens of the longest sequence that trains."""
        return self.sft.max_length if self.sft.data else self.max_length

    @property
    def eval_max_new_tokens(self) -> int:
        """Most tokens of a completion in evaluation."""
        return self.eval.max_new_tokens or self.rollout.max_new_tokens

    @property
    def cache_length(self) -> int:
        """Tokens that a slot of a generation server holds."""
        return self.generation.max_length or self.needed_length

    @property
    def needed_length(self) -> int:
        """Tokens that a slot of a generation server must hold, for rollouts and for evaluation."""
        return self.data.max_prompt_tokens + max(self.rollout.max_new_tokens, self.eval_max_new_tokens)

    @property
    def vocab_multiple(self) -> int:
        """What the rows of the vocabulary are padded to a multiple of: both tensor axes divide it."""
        # A trainer's axis of -1 (what the others leave) is only known on its devices: the mesh then says what must fit.
        return math.lcm(max(1, self.trainer.mesh.tensor), max(1, self.generation.tensor))

    @property
    def profiled_steps(self) -> range:
        """Training steps of which a profile is made, counted from 1."""
        found = PROFILED.fullmatch(self.profile.steps)
        return range(int(found[1]), int(found[2]) + 1) if found else range(0)

    @property
    def run_dir(self) -> pathlib.Path:
        return pathlib.Path(self.run.dir or f"runs/{self.run.name}")


def default_config() -> ConfigDict:
    """Every key with its default, locked: what a file under `configs/` starts from."""
    return ConfigDict(dataclasses.asdict(Config()))


def get_config(path: str) -> ConfigDict:
    """The resolved config that a run saved: `--config=areal_jax/config.py:runs/math/config.json`.

    Raises ValueError for a file that is not there or is no such config.
    """
    config = default_config()
    try:
        saved = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no config.json that a run has saved: {error}") from None
    if not isinstance(saved, dict):
        raise ValueError(f"{path} is no config.json that a run has saved: it holds a {type(saved).__name__}")
    build(saved)  # names an unknown key before ml_collections stumbles over it
    config.update(ConfigDict(saved))
    return config


def build(values: Any) -> Config:
    """The typed config of a ConfigDict or nested dict. ValueError for an unknown key or a wrong type."""
    return _build(Config, values.to_dict() if isinstance(values, ConfigDict) else values, "")


def _build(cls: type, values: dict[str, Any], path: str) -> Any:
    types = typing.get_type_hints(cls)
    for key in values:
        if key not in types:
            raise ValueError(unknown_key(f"{path}{key}"))
    return cls(**{key: _convert(types[key], value, f"{path}{key}") for key, value in values.items()})


def _convert(wanted: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(wanted):
        return _build(typing.cast(type, wanted), value, f"{path}.")
    origin, options = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Literal:
        if value not in options:
            raise ValueError(f"config.{path}={value!r} must be one of {', '.join(map(str, options))}")
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(options[0], item, path) for item in value)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    kind = origin or wanted
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(
            f"config.{path}={value!r} is of type {type(value).__name__}; it must be of type {kind.__name__}"
        )
    return value


def is_key(path: str) -> bool:
    """Whether a dotted path names a value of the config (or one of the free-form options of a data set)."""
    return path in _paths(Config, "") or path.startswith(OPTIONS)


def wrong_text(path: str, text: str) -> str:
    """The error text for a value on the command line that is not of the key's type; "" for a type that takes any."""
    wanted: Any = Config
    for key in path.split("."):
        wanted = typing.get_type_hints(wanted)[key]
    kinds = {int: "a whole number", float: "a number", bool: "true or false"}
    return f"config.{path}={text} must be {kinds[wanted]}" if wanted in kinds else ""


def unknown_key(path: str) -> str:
    """The error text for a key that does not exist, naming its nearest neighbour."""
    known = list(_paths(Config, ""))
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.0)
    same_name = [k for k in known if k.rsplit(".", 1)[-1] == path.rsplit(".", 1)[-1]]
    return f"config.{path} does not exist; the nearest key is config.{(same_name or near)[0]}"


def _paths(cls: type, path: str) -> typing.Iterator[str]:
    for key, wanted in typing.get_type_hints(cls).items():
        yield from (
            _paths(typing.cast(type, wanted), f"{path}{key}.") if dataclasses.is_dataclass(wanted) else [f"{path}{key}"]
        )


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def require(package: str, what: str, key: str) -> None:
    """Raises ValueError naming the config key and the pip command when an optional package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"config.{key}: {what} needs the package {package}, which is not installed: pip install {package}"
        )


HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def is_hub_id(path: str) -> bool:
    """Whether a model.path means a repository on the hub, "org/name" or "org/name@revision", and not a directory."""
    return HUB_ID.fullmatch(path) is not None and path[0] not in ".~" and not pathlib.Path(path).exists()


def no_model_directory(path: str) -> str:
    """The error text for a model.path that is neither a directory nor the id of a model on the hub."""
    file = pathlib.Path(path).expanduser()
    if file.is_file():
        return f"config.model.path={path} is a file; give the directory it is in: --config.model.path={file.parent}"
    return (
        f"config.model.path={path}: no such directory; give one in the Hugging Face format (config.json, "
        'tokenizer.json, *.safetensors), or the id of a model on the hub ("org/name" or "org/name@revision")'
    )


def resolve(spec: str, key: str) -> Any:
    """The object that "module:name" names. Raises ValueError naming the config key it came from."""
    module, _, name = spec.partition(":")
    if importlib.util.find_spec(module.split(".")[0]) is None:
        raise ValueError(
            f"config.{key}={spec!r}: there is no module {module!r}; it must be importable from where you start"
        )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f'config.{key}={spec!r}: {error}; the form is "package.module:name"') from error
    if not hasattr(found, name):
        raise ValueError(f"config.{key}={spec!r}: module {module!r} has no {name!r}")
    return getattr(found, name)
