r"""How often the symbolic verifier is wrong, how fast it is, and what a killed worker costs.

    python -m experiments.math_verdicts --out=DIR [--data=../shared/data]

In: MATH-500 and GSM8K's test set. Out: DIR/results.json with every failure in full, and a table. The verdicts come from
the reward pool, as in a run. No picture: there is nothing to see but counts.

Right must be each gold answer against itself: in a box, in a sentence, and in a box with every whole number n respelled
as \frac{2n}{2}, so that no two strings are equal and sympy has to decide. Wrong must be each gold answer against the
answer of another problem: under seeded permutations of the problems, and every pair of different answers of MATH-500 in
both directions. Left out are pairs that are equal to a person: those with the same `key`.
"""

import contextlib
import itertools
import json
import os
import pathlib
import random
import re
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

from absl import app, flags

from areal_jax.rewards.final_answer import normalised
from areal_jax.rewards.pool import RewardPool
from experiments import runs

_OUT = runs.OUT
_DATA = flags.DEFINE_string("data", "../shared/data", "Directory of math500.json and gsm8k_test.jsonl.")

VERIFIER = "areal_jax.rewards.math_verdict:answers_match"
HANGS = r"\boxed{\binom{1000000000}{500000000}}"
DEADLINE_S = 1.0  # of the hung verdicts
SEEDS = range(10)
GROUP = 8  # completions per message, as in a rollout
WARM_UP_S, MEASURE_S = 3.0, 10.0  # of each rate

Case = tuple[str, str]  # gold, completion


def main(argv: Sequence[str]) -> None:
    del argv
    out = pathlib.Path(_OUT.value).absolute()
    out.mkdir(parents=True, exist_ok=True)
    data = pathlib.Path(_DATA.value)
    problems = json.loads((data / "math500.json").read_text())
    gsm8k = [json.loads(line)["answer"] for line in (data / "gsm8k_test.jsonl").open()]
    math = [problem["answer"] for problem in problems]
    grade = [text.rsplit("####", 1)[1].strip() for text in gsm8k]
    with RewardPool(VERIFIER, workers=2) as pool:
        results: dict[str, Any] = {
            "must be right": {
                "MATH-500, boxed": judged(pool, [(gold, boxed(gold)) for gold in math], 1.0),
                "MATH-500, in a sentence": judged(pool, [(gold, f"So the answer is ${gold}$.") for gold in math], 1.0),
                "MATH-500, its own solution": judged(pool, [(p["answer"], p["solution"]) for p in problems], 1.0),
                "MATH-500, respelled": judged(pool, respelled(math), 1.0),
                "GSM8K, its own solution": judged(pool, list(zip(grade, gsm8k, strict=True)), 1.0),
                "GSM8K, respelled": judged(pool, respelled(grade), 1.0),
            },
            "must be wrong": {
                f"MATH-500, {len(SEEDS)} permutations": judged(pool, permuted(math), 0.0),
                "MATH-500, all pairs": judged(pool, pairs(math), 0.0),
                f"GSM8K, {len(SEEDS)} permutations": judged(pool, permuted(grade), 0.0),
            },
            "left unanswered": dict(pool.unanswered),
            "resident MB of each process": resident_mb(),
        }
    results["verdicts per second"] = rates(math, grade)
    results["kill"] = kills()
    show(results)
    runs.write(out, results)


def boxed(answer: str) -> str:
    return rf"So we find \boxed{{{answer}}}."


def respelled(answers: Sequence[str]) -> list[Case]:
    """Whole numbers as fractions; answers in which a number is no value (a base, a mixed number) are left out."""
    numbers = re.compile(r"(?<![0-9./])[0-9]+(?![0-9./])")
    cases = []
    for gold in answers:
        uniform = normalised(gold)
        if re.search(r"_|[0-9]\\frac|[0-9] [0-9]", uniform):
            continue
        new = numbers.sub(lambda match: rf"{{\frac{{{2 * int(match[0])}}}{{2}}}}", uniform)
        cases += [(gold, boxed(new))] if new != uniform else []
    return cases


def permuted(answers: Sequence[str]) -> list[Case]:
    """Each answer against that of another problem, for each seed."""
    cases: list[Case] = []
    for seed in SEEDS:
        others = list(answers)
        random.Random(seed).shuffle(others)
        cases += [(gold, boxed(other)) for gold, other in zip(answers, others, strict=True) if key(gold) != key(other)]
    return cases


def pairs(answers: Sequence[str]) -> list[Case]:
    return [(a, boxed(b)) for a, b in itertools.permutations(sorted(set(answers)), 2) if key(a) != key(b)]


def key(answer: str) -> Any:
    """What makes two gold answers equal to a person, by rules of its own: units and spaces aside, the same number, the
    same list in some order, or the same text."""
    text = re.sub(r"\\!|\\\$|\s|\^\\circ", "", answer)
    text = re.sub(r"\\(?:mbox|text)\{[a-z]+\}(\^2)?$", "", text) or text
    text = re.sub(r"\\[dt]?frac(?:(\d)(\d)|\{(\d+)\}\{(\d+)\})", r"\1\3/\2\4", text)
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    text = re.sub(r"^[a-z]=(?=\d+$)", "", text)
    if re.fullmatch(r"-?\d*\.?\d+|-?\d+/\d+", text):
        return Fraction(text)
    return tuple(sorted(text.split(","))) if re.fullmatch(r"[^()\[\]]*", text) else text


def judged(pool: RewardPool, cases: Sequence[Case], wanted: float) -> dict[str, Any]:
    """The number of cases, and those in which the verdict is not the wanted one."""
    groups = [(gold, [case[1] for case in group]) for gold, group in itertools.groupby(cases, key=lambda case: case[0])]
    with ThreadPoolExecutor(2) as threads:
        verdicts = list(threads.map(lambda group: pool.score_now(group[1], answer=group[0], prompt=""), groups))
    failures = [
        {"gold": gold, "completion": text}
        for (gold, texts), row in zip(groups, verdicts, strict=True)
        for text, verdict in zip(texts, row, strict=True)
        if verdict != wanted
    ]
    return {"cases": len(cases), "failures": failures}


def resident_mb() -> list[int]:
    """Of the processes that this one has started: two workers and the spare, which has judged nothing."""
    mine = os.getpid()
    found = []
    for directory in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            if int((directory / "stat").read_text().rsplit(")", 1)[1].split()[1]) == mine:
                pages = int((directory / "statm").read_text().split()[1])
                found.append(round(pages * os.sysconf("SC_PAGESIZE") / 2**20))
    return sorted(found)


def rates(math: Sequence[str], grade: Sequence[str]) -> dict[str, dict[str, float]]:
    """Verdicts per second of a pool of 1 and of 2 workers, on answers of several kinds, half of them right."""
    rng = random.Random(0)
    symbolic = [gold for gold in math if not re.fullmatch(r"-?[\d.]+", normalised(gold))]
    kinds = {
        "GSM8K": [(gold, boxed(rng.choice([gold, rng.choice(grade)]))) for gold in grade],
        "MATH-500": [(gold, boxed(rng.choice([gold, rng.choice(math)]))) for gold in math],
        "MATH-500, respelled": [(g, rng.choice([b, boxed(rng.choice(math))])) for g, b in respelled(math)],
        "MATH-500, no integers, respelled": [
            (g, rng.choice([b, boxed(rng.choice(symbolic))])) for g, b in respelled(symbolic)
        ],
    }
    return {name: {f"{workers} workers": rate(cases, workers) for workers in (1, 2)} for name, cases in kinds.items()}


def rate(cases: Sequence[Case], workers: int) -> float:
    """Groups of `GROUP` completions for one gold answer, from as many threads as there are workers, after a warm-up."""
    count = 0
    lock = threading.Lock()
    begin = stop = 0.0

    def work(pool: RewardPool, seed: int) -> None:
        nonlocal count
        rng = random.Random(seed)
        while time.monotonic() < stop:
            gold, _ = rng.choice(cases)
            group = [text for other, text in rng.choices(cases, k=GROUP - 1) if other != gold] + [dict(cases)[gold]]
            pool.score_now(group, answer=gold, prompt="")
            if time.monotonic() > begin:
                with lock:
                    count += len(group)

    with RewardPool(VERIFIER, workers=workers) as pool, ThreadPoolExecutor(workers) as threads:
        begin = time.monotonic() + WARM_UP_S
        stop = begin + MEASURE_S
        for done in [threads.submit(work, pool, seed) for seed in range(workers)]:
            done.result()
        return count / (time.monotonic() - begin)


def kills() -> dict[str, float]:
    """Seconds beyond the deadline until a group with a hung verdict is judged: with the spare ready, and without."""
    began = time.monotonic()
    warm, cold = [], []
    with RewardPool(VERIFIER, timeout_s=DEADLINE_S) as pool:
        start = time.monotonic() - began
        for _ in range(5):
            time.sleep(8.0)  # the spare gets ready
            warm.append(after_kill(pool))
            cold.append(after_kill(pool))
    return {
        "start of a process": start,
        "spare ready": statistics.median(warm),
        "no spare": statistics.median(cold),
    }


def after_kill(pool: RewardPool) -> float:
    began = time.monotonic()
    verdicts = pool.score_now([HANGS, r"\boxed{x+x}"], answer="2x", prompt="")
    assert verdicts == [0.0, 1.0], verdicts
    return time.monotonic() - began - DEADLINE_S


def show(results: dict[str, Any]) -> None:
    for part in ("must be right", "must be wrong"):
        for name, result in results[part].items():
            share = len(result["failures"]) / result["cases"]
            print(f"| {part} | {name} | {result['cases']:,} | {len(result['failures'])} | {share:.3%} |")
    for name, figures in results["verdicts per second"].items():
        print(f"| {name} |" + "".join(f" {rate:,.0f} |" for rate in figures.values()))


if __name__ == "__main__":
    app.run(main)
