"""The records that travel between the parts, and the protocols at the seams.

A prompt becomes `Completion`s on a generation server, each of which becomes one `Trajectory` in the rollout
controller; whole groups wait in the trajectory queue; the trainer packs a batch of them into `TrainBatch`es. Nothing
flows back but one integer (the version) and one set of weights. Records are written once (`dataclasses.replace`
enriches) and hold numpy arrays only, so that every process can import this file without an accelerator.

Array letters: B trajectories of a batch, P prompt tokens, T completion tokens, R packed rows, L tokens of a row.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

Arrays = Mapping[str, np.ndarray]

PROMPT_VERSION = -1  # the version of a token that no policy sampled
UNPUBLISHED = -1  # the version of weights that no trainer has published: those a generation server started with
LEAST_TEMPERATURE = 1e-6  # beside 0, which is greedy; logits divided by less could overflow
MOST_TEMPERATURE = 1e6  # by then all tokens are alike; divided by float32's largest numbers they would be nothing


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What the model is asked.

    `uid` is the prompt's position in its seeded stream (0, 1, 2, ...): it keys sampling, checkpoints and resume.
    """

    uid: int
    tokens: np.ndarray  # [P] int32
    text: str
    answer: str
    task: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one request are drawn.

    `temperature` divides the logits; 0 is greedy. Then only the `top_k` most likely tokens are kept (0: all), of these
    the fewest whose share of the probability reaches `top_p`, of these the ones at least `min_p` times as likely as the
    most likely one. Log-probabilities are those of what is left, renormalised.

    A sample ends with one of `stop_tokens`, which have no probability before `min_new_tokens` other tokens, or with the
    token that completes one of `stop_strings`, which are not looked for before then either.
    """

    max_new_tokens: int
    temperature: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """Tokens that one generation call returned, end-of-sequence token included.

    `logprobs` are those of the distribution that the token was sampled from, `versions` those of the weights that
    sampled it. `finish_reason` is "stop" (the last of `tokens` is a stop token, or completes a stop string, whatever
    text it has behind that) or "length".
    """

    tokens: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32, never falling along the sequence
    finish_reason: str


class Busy(RuntimeError):
    """A generation server has too many requests waiting; ask again later, or another one."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Tokens of one sample since its last chunk, perhaps none. `finish_reason` is "" while the sample goes on."""

    sample: int
    tokens: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32
    finish_reason: str
    alternatives: "Alternatives | None" = None  # where the request asks for them


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Alternatives:
    """The most likely tokens in the place of each of T tokens, the likeliest first, under the distribution it is from.

    Where that has fewer than N tokens, the last ones have log-probability -inf.
    """

    tokens: np.ndarray  # [T, N] int32
    logprobs: np.ndarray  # [T, N] float32


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """One prompt, and which samples of its group are wanted.

    `partial` holds, by sample index, what a sample already has (from a server that died); it is continued, not begun
    again. Evaluation requests (`evaluation=True`) are admitted before rollouts. A request that is not finished
    `timeout_s` after the server took it ends with a TimeoutError (0: it may take any time). `top_logprobs` asks for the
    most likely tokens in each place, so many.
    """

    uid: int
    prompt_tokens: np.ndarray  # [P] int32
    samples: tuple[int, ...]
    sampling: Sampling
    evaluation: bool = False
    partial: Mapping[int, Completion] = dataclasses.field(default_factory=dict)
    timeout_s: float = 0.0
    top_logprobs: int = 0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The record of one rollout, built once by the rollout controller."""

    uid: int
    sample: int
    prompt_tokens: np.ndarray  # [P] int32
    tokens: np.ndarray  # [T] int32, completion only
    behav_logprobs: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32
    reward: float
    truncated: bool

    def __len__(self) -> int:
        """Tokens of prompt and completion together."""
        return len(self.prompt_tokens) + len(self.tokens)

    @property
    def oldest_version(self) -> int:
        return int(self.versions.min())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Example:
    """What supervised fine-tuning imitates: of `tokens` those that train, in the context of all before them."""

    prompt_tokens: np.ndarray  # [P] int32
    tokens: np.ndarray  # [T] int32, from the first one that trains
    trains: np.ndarray  # [T] bool; False on what others say in between

    def __len__(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_tokens) + len(self.tokens)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """Packed rows. Every array is aligned to the token it describes: `behav_logprobs[r, l]` is log p(tokens[r, l]).

    `segment_ids` are 1, 2, ... within a row and 0 on padding; `positions` restart at 0 in each segment;
    `loss_mask` is 1 on the completion tokens that train; `versions` is -1 on prompt tokens and padding.

    `rows` are those of the whole microbatch. The arrays have all of them or, in a process that is not the first of a
    trainer's several, those of its own devices, in their order.
    """

    rows: int
    tokens: np.ndarray  # [R, L] int32
    positions: np.ndarray  # [R, L] int32
    segment_ids: np.ndarray  # [R, L] int32
    loss_mask: np.ndarray  # [R, L] float32
    behav_logprobs: np.ndarray  # [R, L] float32
    advantages: np.ndarray  # [R, L] float32
    versions: np.ndarray  # [R, L] int32


ROW_ARRAYS = tuple(field.name for field in dataclasses.fields(TrainBatch) if field.name != "rows")


@dataclasses.dataclass(frozen=True, slots=True)
class Announcement:
    """What moves the gate. `lost` trajectories (in all) were started and will not be trained on."""

    version: int
    lost: int
    finished: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """What a (re)started controller goes on from: it starts uid `low`, low + 1, ... leaving out those in `done`.

    Every uid below `low` is finished, `done` are the finished ones above. `counted` trajectories are trained or wait,
    which is where the gate's count begins; announcements then report more than the `lost` that were lost before.
    """

    version: int
    low: int
    done: tuple[int, ...]
    counted: int
    lost: int


class GenerateFn(Protocol):
    """Asks a generation server (or a pool of them) for completions; the seam between controller and engine."""

    async def __call__(self, request: GenerateRequest) -> Sequence[Completion]:
        """Returns one completion per entry of `request.samples`, in that order."""
        ...


class RewardFn(Protocol):
    """Judges one completion: 1.0 right, 0.0 wrong, or partial credit between. Raises when it cannot judge."""

    def __call__(self, *, completion: str, answer: str, prompt: str) -> float: ...


class PromptSource(Protocol):
    """Prompts by position: the same uid always gives the same prompt, so that any run can go on from any place."""

    def __getitem__(self, uid: int) -> Prompt: ...


TRAJECTORY_FIELDS = ("prompt_tokens", "tokens", "behav_logprobs", "versions")


def trajectories_to_arrays(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Columns of many trajectories, ragged ones joined end to end: the one form on the wire and in checkpoints."""
    columns: dict[str, np.ndarray] = {
        "uid": np.array([t.uid for t in trajectories], np.int64),
        "sample": np.array([t.sample for t in trajectories], np.int32),
        "reward": np.array([t.reward for t in trajectories], np.float32),
        "truncated": np.array([t.truncated for t in trajectories], np.bool_),
        "prompt_length": np.array([len(t.prompt_tokens) for t in trajectories], np.int32),
        "length": np.array([len(t.tokens) for t in trajectories], np.int32),
    }
    dtypes = {"behav_logprobs": np.float32}
    for name in TRAJECTORY_FIELDS:
        parts = [np.asarray(getattr(t, name), dtypes.get(name, np.int32)) for t in trajectories]
        columns[name] = np.concatenate(parts) if parts else np.zeros(0, dtypes.get(name, np.int32))
    return columns


def trajectories_from_arrays(columns: Arrays) -> list[Trajectory]:
    """Inverse of `trajectories_to_arrays`."""
    prompt_ends = np.cumsum(columns["prompt_length"])[:-1]
    ends = np.cumsum(columns["length"])[:-1]
    ragged = {
        name: np.split(columns[name], prompt_ends if name == "prompt_tokens" else ends) for name in TRAJECTORY_FIELDS
    }
    return [
        Trajectory(
            uid=int(columns["uid"][i]),
            sample=int(columns["sample"][i]),
            reward=float(columns["reward"][i]),
            truncated=bool(columns["truncated"][i]),
            **{name: ragged[name][i] for name in TRAJECTORY_FIELDS},
        )
        for i in range(len(columns["uid"]))
    ]
