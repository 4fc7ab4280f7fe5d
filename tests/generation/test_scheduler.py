"""Continuous batching, swaps and bookkeeping, on a real engine with its own thread."""

import queue
import threading

import jax
import numpy as np
import pytest

from areal_jax.generation.engine import Engine, EngineOptions
from areal_jax.generation.scheduler import Scheduler
from areal_jax.models.transformer import TransformerConfig, init_params
from areal_jax.types import Busy, Completion, GenerateRequest, Sampling
from tests.full_forward import full_logprobs

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CONFIG = TransformerConfig(vocab_size=32, d_model=16, layers=1, heads=4, kv_heads=2, head_size=8, d_ff=32, qk_norm=True)
ENGINE = Engine(CONFIG, EngineOptions(slots=4, max_length=64, decode_steps=2, prefill_rows=2, length_buckets=(16, 64)))


def params_of(seed: int):
    return {name: np.asarray(2 * array) for name, array in init_params(CONFIG, jax.random.key(seed)).items()}


@pytest.fixture
def scheduler():
    made = Scheduler(ENGINE, ENGINE.load(params_of(0), 0), max_waiting=64)
    made.start()
    yield made
    made.stop()


class Caller:
    """Collects the chunks of one request and hands them to `watch`; `result` waits for its completions."""

    def __init__(self, request: GenerateRequest, watch=None):
        self.request, self.done, self.errors, self.watch = request, threading.Event(), [], watch
        self.chunks = {sample: [] for sample in request.samples}
        self.started = threading.Event()

    def on_chunks(self, chunks):
        for chunk in chunks:
            self.chunks[chunk.sample].append(chunk)
        self.started.set()
        if self.watch:
            self.watch(chunks)
        if all(c and c[-1].finish_reason for c in self.chunks.values()):
            self.done.set()

    def on_error(self, error):
        self.errors.append(error)
        self.done.set()

    def result(self) -> list[Completion]:
        assert self.done.wait(60) and not self.errors, self.errors
        join = lambda chunks, name: np.concatenate([getattr(c, name) for c in chunks])  # noqa: E731
        return [
            Completion(join(c, "tokens"), join(c, "logprobs"), join(c, "versions"), c[-1].finish_reason)
            for c in self.chunks.values()
        ]


def ask(
    scheduler,
    uid,
    *,
    samples=(0,),
    prompt=(1, 2, 3),
    max_new_tokens=8,
    temperature=1.0,
    stop=(),
    watch=None,
    **fields,
) -> Caller:
    sampling = Sampling(max_new_tokens, temperature=temperature, seed=7, stop_tokens=stop)
    caller = Caller(GenerateRequest(uid, np.array(prompt, np.int32), tuple(samples), sampling, **fields), watch)
    caller.ticket = scheduler.submit(caller.request, caller.on_chunks, caller.on_error)
    return caller


def assert_logprobs_are_those_of_the_versions(prompt, completion: Completion, params_by_version, atol=5e-5):
    tokens = np.concatenate([np.array(prompt, np.int32), completion.tokens])
    for version in np.unique(completion.versions):
        expected = full_logprobs(CONFIG, params_by_version[version], tokens)[len(prompt) - 1 :]
        of_version = completion.versions == version
        np.testing.assert_allclose(completion.logprobs[of_version], expected[of_version], atol=atol)


def test_more_requests_than_slots_all_finish(scheduler):
    callers = [ask(scheduler, uid, samples=range(3), max_new_tokens=1 + uid) for uid in range(8)]
    for uid, caller in enumerate(callers):
        assert [len(c.tokens) for c in caller.result()] == [1 + uid] * 3
        assert all(c.finish_reason == "length" for c in caller.result())
    assert scheduler.status()["active"] == scheduler.status()["waiting"] == 0


def test_samples_of_a_group_differ_and_do_not_depend_on_company(scheduler):
    group = ask(scheduler, 5, samples=range(4)).result()
    assert len({tuple(c.tokens) for c in group}) > 1
    ask(scheduler, 6, samples=(0, 1, 2))
    assert tuple(ask(scheduler, 5, samples=(2,)).result()[0].tokens) == tuple(group[2].tokens)


def test_a_partial_sample_is_continued_with_the_tokens_it_would_have_had(scheduler):
    whole = ask(scheduler, 9, max_new_tokens=12).result()[0]
    part = Completion(whole.tokens[:5], whole.logprobs[:5], whole.versions[:5], "")
    rest = ask(scheduler, 9, max_new_tokens=12, partial={0: part}).result()[0]
    np.testing.assert_array_equal(rest.tokens, whole.tokens[5:])


@pytest.mark.parametrize("on_update", ["recompute", "keep", "drain"])
def test_versions_and_logprobs_across_swaps(scheduler, on_update):
    params = {version: params_of(version) for version in range(3)}
    reached, go_on = ({version: threading.Event() for version in range(3)} for _ in range(2))

    def hold(chunks):  # in the engine's thread, so that every update comes in mid sequence, however slow this one is
        version = int(chunks[-1].versions[-1])
        reached[version].set()
        assert version == 2 or go_on[version].wait(60)

    callers = [
        ask(scheduler, uid, prompt=range(1, 3 + 4 * uid), max_new_tokens=40, watch=hold if uid == 0 else None)
        for uid in range(4)
    ]
    for version in (1, 2):
        assert (on_update == "drain" and version == 2) or reached[version - 1].wait(60)
        update = scheduler.update_weights(params[version], version, on_update)
        go_on[version - 1].set()
        assert update.result(60) >= 0
    completions = [caller.result()[0] for caller in callers]
    spans = [len(np.unique(c.versions)) for c in completions]
    assert all((np.diff(c.versions) >= 0).all() for c in completions)
    if on_update == "drain":
        assert spans == [1] * 4
    else:
        assert max(spans) > 1
    if on_update != "keep":
        for caller, completion in zip(callers, completions, strict=True):
            assert_logprobs_are_those_of_the_versions(caller.request.prompt_tokens, completion, params)
    assert scheduler.status()["swaps"] == 2 and scheduler.status()["version"] == 2


def test_a_prompt_asked_again_after_an_update_is_answered_by_the_new_weights(scheduler):
    prompt = tuple(range(1, 31))
    ask(scheduler, 0, prompt=prompt, temperature=0.0).result()
    params = params_of(1)
    scheduler.update_weights(params, 1).result(60)
    again = ask(scheduler, 0, prompt=prompt, temperature=0.0).result()[0]
    assert (again.versions == 1).all()
    assert_logprobs_are_those_of_the_versions(prompt, again, {1: params})


def test_a_wrong_update_is_refused_and_the_old_version_stays(scheduler):
    before = ask(scheduler, 1).result()[0]
    wrong = params_of(1)
    wrong["norm.scale"] = np.ones(17, np.float32)
    with pytest.raises(ValueError, match=r"norm.scale: given \(17,\), needed \(16,\)"):
        scheduler.update_weights(wrong, 1)
    with pytest.raises(ValueError, match="version 0 is not newer"):
        scheduler.update_weights(params_of(1), 0)

    def torn():
        raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        scheduler.update_weights(params_of(1), 1, confirm=torn)
    after = ask(scheduler, 1).result()[0]
    np.testing.assert_array_equal(after.tokens, before.tokens)
    assert (after.versions == 0).all()


def test_cancelled_samples_give_their_slots_back(scheduler):
    running = ask(scheduler, 1, samples=range(4), max_new_tokens=50)
    waiting = ask(scheduler, 2, samples=range(4), max_new_tokens=50)
    running.started.wait(60)
    scheduler.cancel(running.ticket)
    scheduler.cancel(waiting.ticket)
    assert len(ask(scheduler, 3, max_new_tokens=3).result()[0].tokens) == 3
    assert scheduler.status()["active"] == scheduler.status()["waiting"] == 0
    assert not running.done.is_set()


def test_evaluation_requests_are_admitted_first():
    order: queue.SimpleQueue[int] = queue.SimpleQueue()
    scheduler = Scheduler(ENGINE, ENGINE.load(params_of(0), 0))
    for uid, evaluation in ((1, False), (2, False), (3, True)):
        request = GenerateRequest(uid, np.array([1], np.int32), (0, 1, 2, 3), Sampling(2), evaluation=evaluation)
        scheduler.submit(request, lambda chunks, uid=uid: order.put(uid), lambda error: None)
    scheduler.start()  # everything waits already
    first = order.get(timeout=60)
    scheduler.stop()
    assert first == 3


def test_a_full_house_answers_busy(scheduler):
    first = ask(scheduler, 0, samples=range(64))
    with pytest.raises(Busy, match="generation.max_waiting=64"):
        ask(scheduler, 1, samples=range(64))
    assert first.result() and ask(scheduler, 0).result()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": range(60)}, "has 60 tokens and max_new_tokens=8, together 68; this server holds 64"),
        ({"prompt": ()}, "is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"temperature": -1.0}, "must be 0"),
        ({"stop": range(5)}, "5 stop tokens"),
    ],
)
def test_a_request_that_cannot_run_is_refused_at_once(scheduler, fields, message):
    with pytest.raises(ValueError, match=message):
        ask(scheduler, 0, **fields)


def test_an_engine_failure_reaches_everyone_who_waits(scheduler, monkeypatch):
    reached, asked = threading.Event(), threading.Event()

    def broken(*args):
        reached.set()
        asked.wait(60)
        raise FloatingPointError("device lost")

    monkeypatch.setattr(ENGINE, "decode", broken)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    caller = ask(scheduler, 0)
    assert reached.wait(60)  # the request has its slot: the update would find an empty house, and be swapped in
    update = scheduler.update_weights(params_of(1), 1, "drain")
    asked.set()
    assert caller.done.wait(60)
    assert "device lost" in str(caller.errors[0])
    with pytest.raises(RuntimeError, match="were not swapped in: FloatingPointError"):
        update.result(60)
    with pytest.raises(RuntimeError, match="serves no more"):
        ask(scheduler, 1)
    with pytest.raises(RuntimeError, match="serves no more"):
        scheduler.update_weights(params_of(2), 2)


def test_stopping_tells_everyone_who_waits():
    scheduler = Scheduler(ENGINE, ENGINE.load(params_of(0), 0))
    callers = [ask(scheduler, uid, samples=range(4), max_new_tokens=50) for uid in range(2)]  # nothing runs yet
    update = scheduler.update_weights(params_of(1), 1)
    scheduler._commands.put(scheduler._end)  # behind them, so that it finds both waiting
    scheduler.start()
    for caller in callers:
        assert caller.done.wait(60) and "stopping" in str(caller.errors[0])
    assert update.result(60) >= 0  # came before the end


def test_the_stall_of_a_swap_is_that_of_the_swap_alone():
    """The dispatch that the device still works on when the update comes belongs to the old weights."""
    scheduler = Scheduler(ENGINE, ENGINE.load(params_of(0), 0))
    ask(scheduler, 0, max_new_tokens=50)
    scheduler._turn()  # admits and dispatches
    assert scheduler._pending is not None
    update = scheduler.update_weights(params_of(1), 1)
    scheduler._run_commands(wait=False)
    assert update.done() and scheduler._pending is None
    known = sum(slot.length for slot in scheduler._slots.values())
    assert known == 3 + 2 and scheduler.status()["recomputed_tokens"] == known  # prompt and one dispatch of two tokens
