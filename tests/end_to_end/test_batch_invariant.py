"""The mode that proves: in a synchronous run generator and trainer agree on every bit of every log-probability."""

import pytest

from tests.end_to_end import job

SETTINGS = {
    "run.launch": "threads",
    "rollout.max_staleness": 0,
    "trainer.steps": 2,
    "trainer.prompts_per_step": 4,
    "trainer.objective.minibatches": 1,
    "trainer.checkpoint.every": 0,
    "eval.every": 0,
    "eval.prompts": 1,
}


def gaps(run_dir, batch_invariant):
    settings = {**SETTINGS, "generation.batch_invariant": batch_invariant}
    status, _, err = job.run(run_dir, settings, timeout_s=500)
    assert (status, err) == (0, "")
    lines = job.lines(run_dir, "metrics")
    assert min(line["logp_gap/tokens"] for line in lines) > 0
    assert job.read_summary(run_dir)["recompilations_after_warmup"] == 0
    return [line["logp_gap/max"] for line in lines]


@pytest.mark.slow  # two whole runs, one of them in the slow mode
def test_the_gap_of_a_synchronous_run_is_exactly_zero_in_the_mode_and_only_there(tmp_path):
    assert gaps(tmp_path / "exact", batch_invariant=True) == [0.0, 0.0]
    assert min(gaps(tmp_path / "normal", batch_invariant=False)) > 0.0
