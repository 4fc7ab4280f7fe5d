"""Sums asked in words as a user's own files: train.jsonl and test.jsonl, one {"question", "answer"} per line.

    python -m experiments.sums_as_files --out=DIR

In: nothing. Out: the 54 one-digit sums to train on and the 27 held-out ones of configs/smollm2_135m_math.py, as files.
"""

import json
import pathlib
from collections.abc import Sequence

from absl import app

from areal_jax.rollout.sums import all_sums
from experiments import runs

_OUT = runs.OUT


def main(argv: Sequence[str]) -> None:
    del argv
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    for name, held_out in (("train", False), ("test", True)):
        problems = [problem for problem in all_sums(9, "+") if problem.held_out == held_out]
        lines = [json.dumps({"question": problem.text, "answer": problem.answer}) for problem in problems]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{out / name}.jsonl: {len(lines)} problems")


if __name__ == "__main__":
    app.run(main)
