"""What a run will ask, looked at before anything starts: the first prompts, as text and as tokens.

In: a checked config whose model and data are on this machine. Out: lines for a person; ValueError or FileNotFoundError
for a tokenizer, data set or option that cannot be used. Called by `main`, before it starts a run and by `--dry_run`.
Waits for the disk, and for a hub if the data is there.
"""

from collections.abc import Iterator, Sized

from areal_jax.config import Config
from areal_jax.hub import model_directory
from areal_jax.launch.roles import load_prompts
from areal_jax.tokenizer import Tokenizer
from areal_jax.types import PromptSource

MEASURED = 1000  # prompts whose length is looked at
SHOWN_CHARACTERS = 600


def check(config: Config) -> None:
    """Opens both sources as the controller will, so that a mistake is told before any process starts."""
    tokenizer = Tokenizer.load(model_directory(config.model.path))
    for split in ("train", "held_out"):
        load_prompts(config, split, tokenizer)


def report(config: Config) -> str:
    """The data as the model will see it."""
    tokenizer = Tokenizer.load(model_directory(config.model.path))
    lines: list[str] = []
    for key, split in (("data.train", "train"), ("eval.data", "held_out")):
        lines += _describe(key, load_prompts(config, split, tokenizer), config.data.max_prompt_tokens)
    return "\n".join(lines)


def _describe(key: str, source: PromptSource, limit: int) -> Iterator[str]:
    count = len(source) if isinstance(source, Sized) else None
    lengths = [len(source[uid].tokens) for uid in range(min(MEASURED, count or MEASURED))]
    too_long = sum(length > limit for length in lengths)
    yield f"{key}: {'problems without end' if count is None else f'{count:,} problems'}"
    yield (
        f"  of the first {len(lengths):,}: {min(lengths)} to {max(lengths)} tokens, {too_long} over "
        f"data.max_prompt_tokens={limit}"
    )
    first = source[0]
    yield f"  the first, as the model sees it ({lengths[0]} tokens):"
    yield from (f"    | {line}" for line in first.text[:SHOWN_CHARACTERS].splitlines())
    yield f"  its reference answer: {first.answer[:SHOWN_CHARACTERS]!r}"
