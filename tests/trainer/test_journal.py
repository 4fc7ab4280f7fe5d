import dataclasses
import functools

import numpy as np
import pytest

from areal_jax.algorithms.packing import Layout, pack
from areal_jax.metrics import METRICS
from areal_jax.trainer import journal
from areal_jax.trainer.skipped import SkippedMinibatches
from areal_jax.trainer.step import Minibatch, Outcome
from areal_jax.trainer.utilisation import Work
from areal_jax.types import Trajectory
from tests.trainer.conftest import MODEL

CONSUMING = 4


class Device:
    """One whose peak is known and whose memory is told, so that no metric is absent."""

    device_kind, process_index = "NVIDIA H200", 0

    def memory_stats(self):
        return {"bytes_in_use": 1, "peak_bytes_in_use": 2}


WORK = Work(MODEL, "bfloat16", [Device()])


def trajectory(uid, sample, reward, versions, *, truncated=False):
    n = len(versions)
    return Trajectory(
        uid=uid,
        sample=sample,
        prompt_tokens=np.array([1, 2, 3], np.int32),
        tokens=np.full(n, 9, np.int32),
        behav_logprobs=-np.arange(1, n + 1, dtype=np.float32),
        versions=np.array(versions, np.int32),
        reward=reward,
        truncated=truncated,
    )


BATCH = [
    trajectory(7, 0, 5.0, [4, 4]),
    trajectory(7, 1, -5.0, [1, 3, 4, 4], truncated=True),
    trajectory(8, 0, -5.0, [3]),
    trajectory(8, 1, -5.0, [3, 4, 4]),
]


class Lines(list):
    closed = False
    write = list.append

    def close(self):
        self.closed = True


def sums(tokens, **values):
    base = {"loss": 0.0, "entropy": 0.0, "ratio": 0.0, "clipped": 0.0, "behav_weight": 0.0, "behav_weight_max": 0.0}
    return {name: np.float32(v) for name, v in {**base, "approx_kl": 0.0, "tokens": tokens, **values}.items()}


def outcome(*parts, skipped=False, logprobs=()):
    facts = {"grad_norm": np.float32(2.0), "lr": np.float32(0.1), "skipped": np.bool_(skipped)}
    return Outcome(list(parts), facts, list(logprobs))


def packed(trajectories, max_staleness=2):
    return pack(
        trajectories, np.ones(len(trajectories)), Layout((16,), 32), version=CONSUMING, max_staleness=max_staleness
    )


def test_figures_of_a_batch_worked_by_hand():
    got = journal.batch_figures(BATCH, CONSUMING, 5.0)
    assert got["reward/mean"] == -2.5 and got["reward/accuracy"] == 0.25
    wire = [dataclasses.replace(t, reward=float(np.float32(0.7 if t.reward > 0 else 0.1))) for t in BATCH]
    assert journal.batch_figures(wire, CONSUMING, 0.7)["reward/accuracy"] == 0.25  # 0.7 is not 0.7 in float32
    # Lengths 2 4 1 3.
    assert (got["response/length_mean"], got["response/length_p50"], got["response/length_max"]) == (2.5, 2.5, 4)
    assert got["response/truncated"] == 0.25 and got["tokens/prompt"] == 12
    # Staleness 0 0 | 3 1 0 0 | 1 | 1 0 0: six times 0, three times 1, once 3; (3 + 3) / 10.
    assert got["staleness/histogram"] == [6, 3, 0, 1]
    assert (got["staleness/min"], got["staleness/max"], got["staleness/mean"]) == (0, 3, 0.6)
    # Versions in them: {4} | {1 3 4} | {3} | {3 4}.
    assert got["versions_per_trajectory/max"] == 3 and got["trajectories/multi_version"] == 2
    assert got["groups/zero_variance"] == 1


def test_tokens_are_trained_or_masked():
    # Ten completion tokens, of which one is three versions old; 4 prompts of 3: 22 real tokens in 2 rows of 16.
    got = journal.packing_figures(BATCH, [Minibatch.of(packed(BATCH))])
    assert (got["tokens/trained"], got["tokens/masked"]) == (9, 1)
    assert got["packing/padding"] == pytest.approx(1 - 22 / 32)


def test_means_are_over_tokens_and_not_over_microbatches():
    # 1 token with loss 1, 3 tokens with loss 0: 1 / 4, where a mean of means says 1 / 2.
    got = journal.update_figures(
        [Minibatch.of([]), Minibatch.of([])],
        [outcome(sums(1, loss=1.0, behav_weight_max=1.5)), outcome(sums(3, behav_weight_max=4.0, clipped=1))],
    )
    assert got["loss"] == 0.25 and got["ratio/clipped"] == 0.25 and got["behav_weight/max"] == 4.0


def test_tokens_without_gradient_share_the_loss_and_are_in_no_other_mean():
    # 2 computed tokens with loss 1 and entropy 3 each, beside 6 that were only counted: 2 / 8, and 6 / 2.
    got = journal.update_figures([Minibatch.of([], gradless_tokens=6)], [outcome(sums(2, loss=2.0, entropy=6.0))])
    assert (got["loss"], got["entropy"]) == (0.25, 3.0)
    nothing = journal.update_figures([Minibatch.of([], gradless_tokens=6)], [Outcome([], outcome().facts, [])])
    assert nothing["loss"] == 0 and not {"entropy", "ratio/mean", "behav_weight/max"} & nothing.keys()


def test_gap_is_over_tokens_of_the_consuming_version():
    (batch,) = packed(BATCH)
    at_start = batch.behav_logprobs + np.where(batch.versions == CONSUMING, 0.25, 100).astype(np.float32)
    got = journal.logprob_gap([(batch, at_start)], CONSUMING)
    assert got == {"logp_gap/p50": 0.25, "logp_gap/p99": 0.25, "logp_gap/max": 0.25, "logp_gap/tokens": 6}
    assert journal.logprob_gap([(batch, at_start)], 9) == {}


def test_gap_uses_only_logprobs_of_the_first_weights():
    first, second = packed(BATCH[:2]), packed(BATCH[2:])
    outcomes = [outcome(logprobs=["first"]), outcome(logprobs=["moved"])]
    recomputed = [Minibatch.of(first), Minibatch.of(second, prox_logprobs=["prox"])]
    assert journal.first_logprobs(recomputed, outcomes, recomputed_prox=True) == [
        (first[0], "first"),
        (second[0], "prox"),
    ]
    naive = [Minibatch.of(first, prox_logprobs=["behav"]), Minibatch.of(second, prox_logprobs=["behav"])]
    assert journal.first_logprobs(naive, outcomes, recomputed_prox=False) == [(first[0], "first")]


def open_journal(lines, directory, *, most_skipped=8):
    figures = functools.partial(journal.reinforcement_figures, work=WORK, correct_reward=5.0, recomputed_prox=False)
    return journal.Journal(lines, SkippedMinibatches(directory / "skipped"), figures, most_skipped=most_skipped)


def add(book, version, *outcomes):
    batches = packed(BATCH)
    logprobs = [batch.behav_logprobs for batch in batches]
    outcomes = [Outcome(o.sums, o.facts, logprobs) for o in outcomes]
    book.add(
        version,
        BATCH,
        [Minibatch.of(batches)] * len(outcomes),
        outcomes,
        {"queue/waiting": 3, "dropped": {"failed": 1}},
    )


def test_line_is_written_one_step_late_and_complete(tmp_path):
    lines = Lines()
    book = open_journal(lines, tmp_path)
    for name in ("idle_s", "update_s"):
        with book.measure(name):
            pass
    add(book, CONSUMING + 1, outcome(sums(9)))
    assert lines == []
    add(book, CONSUMING + 2, outcome(sums(9)))
    assert [line["version"] for line in lines] == [CONSUMING + 1]
    book.close()
    assert [line["version"] for line in lines] == [CONSUMING + 1, CONSUMING + 2] and lines.closed
    assert set(METRICS) - set(lines[0]) == {"held_out/loss"}  # of supervised fine-tuning
    assert lines[0]["idle_s"] > 0 == lines[1]["idle_s"]


def test_eight_updates_in_a_row_without_a_finite_gradient_end_the_run(tmp_path):
    lines = Lines()
    book = open_journal(lines, tmp_path)
    bad, good = outcome(sums(9), skipped=True), outcome(sums(9))
    add(book, 5, *[bad] * 7)
    add(book, 6, good, *[bad] * 4)
    add(book, 7, *[bad] * 4)
    with pytest.raises(FloatingPointError, match=r"not finite in 8 updates in a row, .* from version 6.*skipped/6.npz"):
        book.flush()
    assert [line["updates/skipped"] for line in lines] == [7, 11, 15]
    # The step from version 5 began with a good update: its second minibatch is the one that is saved.
    places = {path.stem: int(np.load(path)["minibatch"]) for path in (tmp_path / "skipped").iterdir()}
    assert places == {"4": 0, "5": 1, "6": 0}


def test_how_many_updates_may_be_skipped_is_the_configs(tmp_path):
    book = open_journal(Lines(), tmp_path, most_skipped=2)
    add(book, 5, outcome(sums(9), skipped=True))
    book.flush()
    add(book, 6, outcome(sums(9), skipped=True))
    with pytest.raises(FloatingPointError, match=r"in 2 updates in a row.*trainer.skipped_in_a_row=2"):
        book.close()


def test_a_step_whose_updates_are_all_made_leaves_no_file(tmp_path):
    book = open_journal(Lines(), tmp_path)
    add(book, 5, outcome(sums(9)))
    book.close()
    assert not (tmp_path / "skipped").exists()
