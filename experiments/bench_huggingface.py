"""Hugging Face `generate` on torch's CPU, with the batch size and thread count that suit it best.

In: a model of ours, in whose dtype it computes. Out: seconds for the benchmark's requests. Called by
`bench_generation`. Waits for torch.

`generate` advances a batch until its longest row is done and pads the others, so only the wanted tokens of a row are
counted. Requests come in the order of their arrival, as to our engine, which does not know either how long an answer
will be; or sorted by length, which nobody could do who does not know: the least padding of all ways to batch them.
Prompts have one length, so no row is padded in front. Greedy, key/value cache, no EOS. Batch size and threads: the step
time of each pair is measured over a few steps, which predicts the time of all batches, each as many steps as its
longest row; where two pairs are within a tenth of each other, both serve all requests, and the faster stays.
"""

import dataclasses
import os
import pathlib
import tempfile

import numpy as np
import torch
import transformers

from areal_jax.models import safetensors_files
from experiments.bench_workload import Bench, timed

BATCHES = (1, 4, 8, 16, 32, 64)
STEPS = 16  # of the sweep, per pair of batch size and threads
FINALISTS = 2  # pairs that serve all requests, where their predictions are close
CLOSE = 1.1  # times the least prediction
ORDERS = ("arrival", "length")  # of requests


@dataclasses.dataclass(frozen=True)
class Choice:
    batch: int
    threads: int


class HuggingFace:
    """The same weights in transformers."""

    def __init__(self, bench: Bench):
        self._bench = bench
        with tempfile.TemporaryDirectory() as scratch:
            directory = pathlib.Path(scratch) / "model"
            safetensors_files.save_model(directory, bench.config, bench.params)
            dtype = getattr(torch, bench.dtype)
            self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        threads = sorted({1, len(os.sched_getaffinity(0))})
        choices = [Choice(batch, n) for batch in BATCHES if batch <= bench.requests for n in threads]
        self._step_seconds = {choice: self._step(choice) for choice in choices}

    def best(self, order: str) -> tuple[Choice, dict[str, float]]:
        """The fastest choice for requests in this order, and the predicted seconds of all."""
        seconds = {
            choice: step * sum(int(self._bench.lengths[rows].max()) for rows in self._batches(choice.batch, order))
            for choice, step in self._step_seconds.items()
        }
        ranked = sorted(seconds, key=lambda choice: seconds[choice])
        finalists = [choice for choice in ranked if seconds[choice] <= CLOSE * seconds[ranked[0]]][:FINALISTS]
        described = {f"batch {c.batch}, {c.threads} threads": s for c, s in seconds.items()}
        if len(finalists) == 1:
            return finalists[0], described
        return min(finalists, key=lambda choice: self.run(choice, order)), described

    def run(self, choice: Choice, order: str) -> float:
        """Seconds for all requests."""
        torch.set_num_threads(choice.threads)
        return timed(lambda: [self._generate(rows) for rows in self._batches(choice.batch, order)])

    def tokens(self, uid: int, count: int) -> list[int]:
        """The first greedy tokens of a request."""
        return self._generate(np.array([uid]), count)[0].tolist()

    def _step(self, choice: Choice) -> float:
        """Seconds of a step of a whole batch."""
        torch.set_num_threads(choice.threads)
        rows = np.arange(choice.batch)
        return min(timed(lambda: self._generate(rows, STEPS)) for _ in range(2)) / STEPS

    def _batches(self, size: int, order: str) -> list[np.ndarray]:
        """Indices of requests, `size` at a time, as they arrive or by falling length."""
        lengths = self._bench.lengths
        indices = np.argsort(-lengths, kind="stable") if order == "length" else np.arange(len(lengths))
        return [indices[first : first + size] for first in range(0, len(indices), size)]

    def _generate(self, rows: np.ndarray, new_tokens: int = 0) -> list[np.ndarray]:
        """New tokens of each row; as many as the longest row wants, or `new_tokens`."""
        prompts = torch.from_numpy(self._bench.prompts[rows].astype(np.int64))
        steps = new_tokens or int(self._bench.lengths[rows].max())
        settings = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=steps, min_new_tokens=steps, eos_token_id=None, pad_token_id=0
        )
        with torch.inference_mode():
            out = self._model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=settings)
        return list(out.numpy()[:, self._bench.prompt_tokens :])
