import threading

import jax
import numpy as np
import pytest

from areal_jax.algorithms.packing import Layout
from areal_jax.config import OptimizerConfig, TrainerConfig, build
from areal_jax.distributed import Processes
from areal_jax.models import transformer
from areal_jax.trainer import sft, state, step
from areal_jax.trainer.checkpoint import SavedParams
from areal_jax.types import Example

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CONFIG = TrainerConfig(token_budget=256, optimizer=OptimizerConfig(lr=3e-2, warmup_fraction=0.1))
EXAMPLES = [([a, b], [(a + b) % 30, 31]) for a in range(4) for b in range(4)]


def test_responses_are_learned(model_config, params):
    steps = sft.fit(model_config, params, [EXAMPLES] * 80, CONFIG, updates=80, max_length=16)
    losses = [sft.mean_loss(outcome) for _, outcome in steps]
    assert losses[0] > 2 and losses[-1] < 0.1


def test_room_is_set_apart_beside_the_state(model_config, params, tmp_path, reserved, state_bytes):
    next(sft.fit(model_config, params, [EXAMPLES], CONFIG, updates=1, max_length=16))
    Run(tmp_path, model_config, params).train()
    assert reserved == [state_bytes, state_bytes]


def test_loss_is_the_mean_over_response_tokens(model_config, params):
    examples = [([3, 4, 5], [6]), ([7], [8, 9, 10])]
    ((_, outcome),) = sft.fit(model_config, params, [examples], CONFIG, updates=1, max_length=16)
    model = transformer.bind(transformer.graph(model_config), jax.tree.map(np.asarray, params))
    logps = []
    for prompt, response in examples:
        tokens = np.array([prompt + response], np.int32)
        logits = model.logits(model(tokens, np.arange(4)[None], np.ones_like(tokens)))[0]
        logp = np.asarray(jax.nn.log_softmax(logits))[np.arange(3), tokens[0, 1:]]
        logps += logp[len(prompt) - 1 :].tolist()
    assert sft.mean_loss(outcome) == pytest.approx(-np.mean(logps), rel=1e-5)


def test_only_what_trains_has_loss_and_others_turns_are_context():
    two_turns = Example(np.array([5, 6]), np.array([7, 8, 9, 2]), np.array([True, False, False, True]))
    (batch,) = sft.minibatch([two_turns, sft.example([3], [4, 2])], Layout((10,), 10)).batches
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 2, 3, 4, 2, 0]]
    assert batch.loss_mask.tolist() == [[0, 0, 1, 0, 0, 1, 0, 1, 1, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 1, 1, 2, 2, 2, 0]]


def random_examples(count):
    rng = np.random.default_rng(0)

    def one():
        tokens = rng.integers(1, 32, rng.integers(1, 9))
        trains = np.arange(len(tokens)) % 3 != 1  # every third one is not ours
        return Example(rng.integers(1, 32, rng.integers(1, 5)).astype(np.int32), tokens.astype(np.int32), trains)

    return [one() for _ in range(count)]


def test_the_packed_held_out_loss_is_the_mean_over_tokens_of_examples_alone(make_programs, params):
    programs = make_programs((1, 1, 1), objective=step.supervised_objective)
    on_device = state.copies(params, programs.abstract.params)
    examples, layout = random_examples(9), Layout((32,), 64)
    alone = [sft.held_out_loss(programs, on_device, sft.minibatch([each], layout)) for each in examples]
    tokens = [int(each.trains.sum()) for each in examples]
    packed = sft.minibatch(examples, layout)
    assert len(packed.batches) < len(examples)
    assert sft.held_out_loss(programs, on_device, packed) == pytest.approx(np.average(alone, weights=tokens), rel=1e-6)


def test_an_epoch_shows_every_example_once_in_an_order_of_its_own():
    course = sft.Course(examples=10, batch_size=4, seed=1, total=25)
    stream = [index for version in range(course.updates) for index in course.batch(version)]
    assert course.updates == 7 and len(course.batch(6)) == 1 and len(stream) == 25
    first, second, third = stream[:10], stream[10:20], stream[20:]
    assert sorted(first) == sorted(second) == list(range(10)) and len(set(third)) == 5
    assert first != second and first != list(range(10))
    assert stream != [i for v in range(7) for i in sft.Course(10, 4, 2, 25).batch(v)]


def test_the_course_is_as_long_as_steps_or_as_the_epochs():
    def course(steps):
        return sft.make_course(build({"trainer": {"steps": steps}, "sft": {"batch_size": 4, "epochs": 3}}), 10)

    assert (course(0).total, course(0).updates) == (30, 8)
    assert (course(5).total, course(5).updates) == (20, 5)


class Run:
    """A run of 5 updates on 10 examples, twice each, that may be told to stop in the middle of the second epoch."""

    def __init__(self, directory, model_config, params, *, examples=10):
        self.directory, self.model_config, self.params = directory, model_config, params
        self.examples = random_examples(examples)
        self.lines, self.evaluations, self.stop, self.stop_at = [], [], threading.Event(), None

    def open_log(self, version):
        self.opened_at = version
        return self

    def write(self, line):
        self.lines.append(line)
        if line["version"] == self.stop_at:
            self.stop.set()

    def close(self):
        pass

    def train(self):
        config = build(
            {
                "run": {"dir": str(self.directory)},
                "trainer": {
                    "steps": 0, "token_budget": 128, "row_buckets": (16,), "checkpoint": {"every": 0},
                    "optimizer": {"lr": 1e-2, "schedule": "cosine"},
                },
                "sft": {"data": "examples", "batch_size": 4, "epochs": 2, "max_length": 16},
                "eval": {"every": 2},
            }
        )  # fmt: skip
        return sft.train(
            config,
            model_config=self.model_config,
            read_params=lambda places: state.copies(self.params, places),
            examples=self.examples,
            held_out=self.examples[:3],
            open_log=self.open_log,
            record=self.evaluations.append,
            stop=self.stop,
            processes=Processes(),
        )


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model_config, params):
    run = Run(tmp_path_factory.mktemp("sft"), model_config, params)
    assert run.train() == 5
    return run


def test_a_run_leaves_a_line_for_each_update_and_held_out_losses(whole):
    assert [line["version"] for line in whole.lines] == [1, 2, 3, 4, 5]
    phases = [("before", 0), ("during", 2), ("during", 4), ("after", 5)]
    assert [(line["phase"], line["version"]) for line in whole.evaluations] == phases
    assert whole.evaluations[-1]["loss"] < whole.evaluations[0]["loss"]
    assert whole.lines[-1]["held_out/loss"] == whole.evaluations[-1]["loss"] and "held_out/loss" not in whole.lines[0]
    ours = sum(int(each.trains.sum()) for each in whole.examples)
    assert sum(line["tokens/trained"] for line in whole.lines) == 2 * ours
    real = sum(len(each) for each in whole.examples)
    assert sum(line["tokens/prompt"] for line in whole.lines) == 2 * (real - ours)
    assert len({line["compilations"] for line in whole.lines}) == 1, "nothing compiles after the first update"


def test_a_run_that_was_stopped_in_mid_epoch_ends_at_the_same_bits(whole, tmp_path, model_config, params):
    first = Run(tmp_path, model_config, params)
    first.stop_at = 2  # known while the third update is made
    assert first.train() == 3
    second = Run(tmp_path, model_config, None)  # from the checkpoint, and not from any params
    assert second.train() == 5 and second.opened_at == 3
    assert [line["loss"] for line in first.lines + second.lines] == [line["loss"] for line in whole.lines]
    ours, theirs = (SavedParams(run.directory / "checkpoints" / "5") for run in (second, whole))
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])
    other = Run(tmp_path, model_config, None, examples=11)
    with pytest.raises(
        ValueError, match=r"of another run: examples is 10 with checksum \w+ there and 11 with checksum"
    ):
        other.train()
