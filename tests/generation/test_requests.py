"""What one request may ask for: its distribution, its ends, its time; on a real engine, turn by turn."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping

import jax
import numpy as np
import pytest

from areal_jax.generation.engine import Engine, EngineOptions
from areal_jax.generation.scheduler import Scheduler
from areal_jax.models.transformer import TransformerConfig, init_params
from areal_jax.types import Busy, Completion, GenerateRequest, Sampling
from tests.full_forward import logits_behind
from tests.generation.by_hand import PLAIN, logprobs_of

CONFIG = TransformerConfig(vocab_size=32, d_model=16, layers=2, heads=4, kv_heads=2, head_size=8, d_ff=32, qk_norm=True)
OPTIONS = EngineOptions(slots=2, max_length=64, decode_steps=4, prefill_rows=2, length_buckets=(16, 64))
PARAMS = {name: np.asarray(2 * array) for name, array in init_params(CONFIG, jax.random.key(0)).items()}


class Letters:
    """Token i is the letter of that place; 0 ends a sequence and has no text."""

    eos_ids = (0,)

    def decode(self, ids) -> str:
        return "".join(chr(96 + i) for i in ids if i)


ENGINE = Engine(CONFIG, OPTIONS, tokenizer=Letters())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Server:
    """A scheduler without its thread: `turn` takes one."""

    def __init__(self, engine: Engine = ENGINE):
        self.clock = Clock()
        self.scheduler = Scheduler(engine, engine.load(PARAMS, 0), max_waiting=8, clock=self.clock)
        self.requests: dict[int, GenerateRequest] = {}  # these three by ticket
        self.chunks: dict[int, list] = {}
        self.errors: dict[int, Exception] = {}

    def ask(
        self, uid=0, *, samples=(0,), prompt=(1, 2, 3), evaluation=False, partial=None, timeout_s=0.0, **sampling
    ) -> int:
        asked = Sampling(**{"max_new_tokens": 12, "seed": 7, **sampling})
        request = GenerateRequest(uid, np.array(prompt, np.int32), samples, asked, evaluation, partial or {}, timeout_s)
        made: list = []

        def fail(error: Exception) -> None:
            assert ticket not in self.errors
            self.errors[ticket] = error

        ticket = self.scheduler.submit(request, made.extend, fail)
        self.requests[ticket], self.chunks[ticket] = request, made
        return ticket

    def turn(self, turns=1) -> None:
        for _ in range(turns):
            self.scheduler._commands.put(lambda: None)  # so that it never waits for one
            self.scheduler._turn()

    def run(self) -> None:
        while self.scheduler._tickets:
            self.turn()

    def completion(self, ticket: int, sample: int = 0) -> Completion:
        chunks = [chunk for chunk in self.chunks[ticket] if chunk.sample == sample]
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
        join = lambda name: np.concatenate([getattr(chunk, name) for chunk in chunks])  # noqa: E731
        return Completion(join("tokens"), join("logprobs"), join("versions"), chunks[-1].finish_reason)

    @property
    def slots(self) -> tuple[int, int]:
        """Slots the scheduler counts as busy, and slots that the device decodes."""
        return len(self.scheduler._slots), int(np.asarray(self.scheduler._state.active).sum())


def answer(sample: int = 0, **fields) -> Completion:
    server = Server()
    ticket = server.ask(samples=(sample,), **fields)
    server.run()
    return server.completion(ticket, sample)


def forward_logits(completion: Completion, prompt=(1, 2, 3)) -> np.ndarray:
    """The logits [T, V] that each token of a completion was drawn from, by one full forward pass."""
    tokens = np.concatenate([np.array(prompt, np.int32), completion.tokens])
    return logits_behind(CONFIG, PARAMS, tokens)[len(prompt) - 1 : -1].astype(np.float64)


# The distribution


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 3, 1.0, 0), (0.7, 0, 0.6, 0), (1.3, 8, 0.8, 0), (0.7, 9, 0.9, 0.1)],
)
def test_logprobs_are_those_of_the_truncated_distribution(temperature, top_k, top_p, min_p):
    limits = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    made = answer(max_new_tokens=40, **limits)
    expected = logprobs_of(forward_logits(made), made.tokens, Sampling(40, **limits))
    assert np.isfinite(expected).all()  # no token that may not be drawn
    np.testing.assert_allclose(made.logprobs, expected, atol=5e-5)


def test_a_request_that_truncates_does_not_change_one_bit_of_its_neighbour():
    alone = answer(uid=4, max_new_tokens=20)
    server = Server()
    ticket, other = server.ask(4, max_new_tokens=20), server.ask(5, top_k=2, top_p=0.5, min_p=0.1, min_new_tokens=3)
    server.run()
    beside = server.completion(ticket)
    np.testing.assert_array_equal(beside.tokens, alone.tokens)
    np.testing.assert_array_equal(beside.logprobs, alone.logprobs)
    assert server.completion(other).finish_reason == "length"


def test_greedy_takes_the_most_likely_token_whatever_is_truncated():
    plain, truncated = (answer(temperature=0.0, **limits) for limits in ({}, {"top_k": 1, "top_p": 0.1}))
    np.testing.assert_array_equal(plain.tokens, truncated.tokens)
    np.testing.assert_array_equal(plain.logprobs, truncated.logprobs)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_stop_tokens_have_no_mass_before_min_new_tokens(temperature):
    free = answer(max_new_tokens=40, temperature=temperature).tokens
    stops = tuple(int(token) for token in dict.fromkeys(free))[:4]
    assert len(answer(max_new_tokens=40, temperature=temperature, stop_tokens=stops).tokens) == 1
    made = answer(max_new_tokens=40, temperature=temperature, stop_tokens=stops, min_new_tokens=6)
    assert made.finish_reason == "stop" and not np.isin(made.tokens[:-1], stops).any() and len(made.tokens) > 6
    logits = forward_logits(made)
    logits[:6, list(stops)] = -np.inf  # and the log-probabilities say so
    np.testing.assert_allclose(made.logprobs, logprobs_of(logits, made.tokens, PLAIN), atol=5e-5)


# Ends


def test_a_stop_string_ends_a_sample_at_the_token_that_completes_it():
    free = answer(max_new_tokens=40)
    text = Letters().decode(free.tokens)
    for begin, length in ((0, 1), (2, 3), (9, 2), (17, 5)):
        string = text[begin : begin + length]
        end = next(n for n in range(1, 41) if string in Letters().decode(free.tokens[:n]))
        made = answer(max_new_tokens=40, stop_strings=("never there", string))
        assert made.finish_reason == "stop"
        np.testing.assert_array_equal(made.tokens, free.tokens[:end])
        np.testing.assert_array_equal(made.logprobs, free.logprobs[:end])


def test_a_stop_string_frees_its_slot_and_what_the_device_made_beyond_is_dropped():
    free = answer(uid=1, max_new_tokens=40)
    server = Server()
    string = Letters().decode(free.tokens[:5])[-3:]
    tickets = [server.ask(1, max_new_tokens=40, stop_strings=(string,)) for _ in range(2)]
    after = server.ask(6, max_new_tokens=3)
    server.turn(2)
    assert server.slots == (2, 2)
    server.turn()
    assert server.slots == (1, 0)  # the third has one of them, and is done on the device
    server.run()
    for ticket in tickets:
        assert Letters().decode(server.completion(ticket).tokens).endswith(string)
        assert len(server.completion(ticket).tokens) == 5
    np.testing.assert_array_equal(server.completion(after).tokens, answer(uid=6, max_new_tokens=3).tokens)
    assert server.scheduler.status()["tokens"] == 5 + 5 + 3


def test_a_stop_string_counts_from_min_new_tokens_on_and_goes_on_from_another_server():
    free = answer(max_new_tokens=40)
    string = Letters().decode(free.tokens[2:4])
    assert len(answer(max_new_tokens=40, stop_strings=(string,)).tokens) == 4
    assert len(answer(max_new_tokens=5, min_new_tokens=4, stop_strings=(string,)).tokens) == 5
    part = Completion(free.tokens[:3], free.logprobs[:3], free.versions[:3], "")
    rest = answer(max_new_tokens=40, stop_strings=(string,), partial={0: part})
    np.testing.assert_array_equal(rest.tokens, free.tokens[3:4])


def test_finish_ends_one_sample_and_leaves_the_others():
    server = Server()
    ticket = server.ask(samples=(0, 1, 2), max_new_tokens=20)
    server.turn(2)  # samples 0 and 1 have a slot, 2 waits
    server.scheduler.finish(ticket, 1)
    server.scheduler.finish(ticket, 2)
    server.scheduler.finish(ticket, 2)  # twice is once
    server.scheduler.finish(99, 0)
    server.run()
    assert server.slots == (0, 0) and server.scheduler.status()["waiting"] == 0
    whole, cut, none = (server.completion(ticket, sample) for sample in range(3))
    assert [each.finish_reason for each in (whole, cut, none)] == ["length", "stop", "stop"]
    assert [len(each.tokens) for each in (whole, cut, none)] == [20, 4, 0]
    server.scheduler.finish(ticket, 0)
    server.turn()


def test_finish_of_the_last_sample_forgets_the_request():
    server = Server()
    ticket = server.ask(max_new_tokens=20, timeout_s=5.0)
    server.turn(2)
    server.scheduler.finish(ticket, 0)
    server.turn()
    assert server.completion(ticket).finish_reason == "stop"
    assert not server.scheduler._tickets and not server.scheduler._deadlines


# Time


def test_a_request_past_its_time_gets_an_error_that_says_how_far_it_came_and_its_slots_are_free():
    server = Server()
    late = server.ask(3, samples=(0, 1, 2), max_new_tokens=50, timeout_s=2.0)
    server.turn(2)
    server.clock.now = 1.9
    server.turn()
    assert not server.errors
    server.clock.now = 2.0
    server.turn()
    (error,) = server.errors.values()
    assert isinstance(error, TimeoutError)
    assert str(error) == (
        "prompt 3 was not finished within timeout_s=2: 0 of 3 samples are done, 2 run, 1 wait for a slot, 16 tokens "
        "are made; ask for fewer tokens or allow more time"
    )
    assert server.slots == (0, 0) and server.scheduler.status()["waiting"] == 0
    assert server.scheduler.telemetry.ended["deadline"] == 3
    made = sum(len(chunk.tokens) for chunk in server.chunks[late])
    server.turn(2)
    assert made == sum(len(chunk.tokens) for chunk in server.chunks[late]) == 16  # nothing comes after the error


def test_a_request_that_only_waits_runs_out_of_time_too():
    server = Server()
    running = server.ask(1, samples=(0, 1), max_new_tokens=50)
    server.ask(2, timeout_s=1.0)
    in_time = server.ask(3, timeout_s=1000.0)
    server.turn(2)
    server.clock.now = 1.5
    server.run()
    (error,) = server.errors.values()
    assert "prompt 2 was not finished within timeout_s=1: 0 of 1 samples are done, 0 run, 1 wait" in str(error)
    assert len(server.completion(running).tokens) == 50 and len(server.completion(in_time).tokens) == 12
    assert not server.scheduler._deadlines


# Who comes and goes while more samples wait than there are slots


def prompt_of(uid: int) -> tuple[int, ...]:
    return tuple((np.arange(2 + 11 * uid % 40) + uid) % 32)


@functools.cache
def alone(uid: int, sample: int) -> Completion:
    return answer(sample, uid=uid, prompt=prompt_of(uid))


def fate(server: Server, ticket: int, sample: int, asked: Collection[str]) -> str:
    """What became of a sample, for which `asked` are "cancelled", "deadline", "finish", or nothing.

    Its tokens are those that it has alone, from the first on, each once, to its end or until it was stopped.
    """
    request, chunks = server.requests[ticket], [c for c in server.chunks[ticket] if c.sample == sample]
    own, stops = alone(request.uid, sample), request.sampling.stop_strings
    made = np.concatenate([[], *(chunk.tokens for chunk in chunks)])
    np.testing.assert_array_equal(made, own.tokens[: len(made)])
    logprobs = np.concatenate([[], *(chunk.logprobs for chunk in chunks)])
    np.testing.assert_allclose(logprobs, own.logprobs[: len(made)], atol=5e-5)
    end, reason = next(
        ((n, "stop") for n in range(1, 13) if any(s in Letters().decode(own.tokens[:n]) for s in stops)), (12, "length")
    )
    assert not any(chunk.finish_reason for chunk in chunks[:-1])
    if chunks and chunks[-1].finish_reason:
        assert (len(made), chunks[-1].finish_reason) == (end, reason) or ("finish" in asked and len(made) < end)
        return chunks[-1].finish_reason
    assert len(made) < end and (ticket in server.errors or "cancelled" in asked)
    return "deadline" if ticket in server.errors else "cancelled"


def assert_nobody_is_lost(server: Server, asked: Mapping[tuple[int, int], Collection[str]]) -> None:
    """`asked`, by ticket and sample: what was done to those that were not left alone."""
    scheduler, samples = server.scheduler, [(t, s) for t, request in server.requests.items() for s in request.samples]
    fates = collections.Counter(fate(server, *key, asked.get(key, ())) for key in samples)
    assert all("deadline" in asked[ticket, server.requests[ticket].samples[0]] for ticket in server.errors)
    status, ended = scheduler.status(), scheduler.telemetry.ended
    assert {reason: count for reason, count in ended.items() if count} == fates
    assert (status["active"], status["waiting"], status["requests"]) == (0, 0, len(samples))
    assert status["tokens"] == sum(len(chunk.tokens) for made in server.chunks.values() for chunk in made)
    assert server.slots == (0, 0) and sorted(scheduler._free) == [0, 1]
    assert not (scheduler._tickets or scheduler._deadlines or scheduler._waiting or len(scheduler._prefilled))


FATES = ("none", "cancelled", "deadline", "stop strings")


@pytest.mark.parametrize("turns", range(5))
def test_of_groups_larger_than_the_house_nobody_is_lost_whoever_goes_and_when(turns):
    for both in itertools.product(FATES, FATES):
        server, asked, cancelled = Server(), {}, []
        for uid, each in enumerate(both):
            limits = {"timeout_s": 1.0} if each == "deadline" else {}
            if each == "stop strings":
                limits["stop_strings"] = tuple(Letters().decode(alone(uid, s).tokens[3:5]) for s in (0, 2))
            ticket = server.ask(uid, samples=(0, 1, 2, 3), prompt=prompt_of(uid), **limits)
            asked |= {(ticket, sample): {each} for sample in range(4)}
            cancelled += [ticket] * (each == "cancelled")
        server.turn(turns)
        for ticket in cancelled:
            server.scheduler.cancel(ticket)
        server.clock.now = 1.0
        server.run()
        assert_nobody_is_lost(server, asked)
        assert len(server.errors) == both.count("deadline")


@pytest.mark.parametrize("seed", range(4))
def test_on_a_day_of_many_requests_nobody_is_lost_and_too_many_are_told_so(seed):
    rng, server, refused, updates = np.random.default_rng(seed), Server(), 0, []
    asked: dict[tuple[int, int], set[str]] = collections.defaultdict(set)
    for _ in range(100):
        if rng.random() < 0.4:
            uid, n, timeout_s = int(rng.integers(1, 6)), int(rng.integers(1, 6)), float(rng.choice([0, 0, 3]))
            stops = (Letters().decode(alone(uid, 0).tokens[4:6]),) if rng.random() < 0.3 else ()
            wants = {"samples": tuple(range(n)), "prompt": prompt_of(uid), "evaluation": rng.random() < 0.2}
            if server.scheduler.status()["waiting"] + n > 8:
                with pytest.raises(Busy, match="generation.max_waiting=8"):
                    server.ask(uid, **wants)
                refused += 1
            else:
                ticket = server.ask(uid, **wants, timeout_s=timeout_s, stop_strings=stops)
                asked |= {(ticket, sample): {"deadline"} for sample in range(n) if timeout_s}
        if server.requests and rng.random() < 0.2:
            ticket = max(server.requests) - int(rng.integers(3))
            sample = int(rng.integers(5))
            if rng.random() < 0.5:
                server.scheduler.finish(ticket, sample)
                asked[ticket, sample].add("finish")
            else:
                server.scheduler.cancel(ticket)
                for sample in range(5):
                    asked[ticket, sample].add("cancelled")
        if rng.random() < 0.05:  # the same weights again, so that everyone's tokens stay
            policy = str(rng.choice(["recompute", "keep", "drain"]))
            updates.append(server.scheduler.update_weights(PARAMS, len(updates) + 1, policy))
        server.clock.now += rng.random()
        server.turn()
    server.run()
    assert_nobody_is_lost(server, asked)
    assert len(updates) > 1 and all(update.done() for update in updates)
    telemetry = server.scheduler.telemetry
    assert telemetry.refused["busy"] == refused > 0
    assert all(telemetry.ended[reason] for reason in ("stop", "length", "cancelled", "deadline"))


# Refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5 must be above 0"),
        ({"top_p": float("nan")}, "top_p=nan must be above 0"),
        ({"top_k": -1}, "top_k=-1 must be positive, or 0"),
        ({"min_p": 1.0}, "min_p=1.0 must be at least 0 .* and below 1"),
        ({"min_p": -0.1}, "min_p=-0.1 must be at least 0"),
        ({"temperature": 1e-9}, r"temperature=1e-09 must be 0 \(greedy\) or lie between 1e-06 and 1000000.0"),
        ({"temperature": 1e39}, r"temperature=1e\+39 must be 0 \(greedy\) or lie between"),
        ({"samples": range(9)}, "prompt 0 asks for 9 samples, of which generation.max_waiting=8 may wait at most"),
        ({"temperature": float("nan")}, "temperature=nan must be 0"),
        ({"min_new_tokens": 13}, "min_new_tokens=13 must lie between 0 and max_new_tokens=12"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1 must lie between 0"),
        ({"stop_tokens": (-1,)}, "stop token -1 is no token id"),
        ({"stop_strings": ("a",) * 17}, "17 stop strings; a request may have 16"),
        ({"stop_strings": ("",)}, "a stop string is empty"),
        ({"timeout_s": -1.0}, "timeout_s=-1.0 must be positive, or 0"),
        ({"prompt": (1, 32)}, "token 32 of prompt 0 lies outside of the vocabulary of 32"),
        ({"prompt": (-1,)}, "token -1 of prompt 0 lies outside"),
        ({"samples": ()}, r"samples=\(\) of prompt 0 must be at least one index"),
        ({"samples": (0, 0)}, r"samples=\(0, 0\) of prompt 0 must be at least one index, each once"),
        ({"samples": (-1,)}, r"samples=\(-1,\) of prompt 0 must be"),
    ],
)
def test_a_request_that_breaks_a_rule_is_refused_by_its_name(fields, message):
    server = Server()
    with pytest.raises(ValueError, match=message):
        server.ask(**fields)
    assert not server.scheduler._tickets


def test_stop_strings_need_a_tokenizer():
    server = Server(Engine(CONFIG, OPTIONS))
    with pytest.raises(ValueError, match="stop_strings need a tokenizer, and this engine has none"):
        server.ask(stop_strings=("a",))


def test_bounds_of_what_is_allowed_run():
    made = answer(
        top_k=2**40, top_p=1e-300, min_p=1e-300, temperature=1e-6, min_new_tokens=12, stop_strings=("x" * 256,)
    )
    assert len(made.tokens) == 12 and np.isfinite(made.logprobs).all()


# Compilations


def test_nothing_compiles_after_warm_up_whatever_a_request_asks_for():
    engine = Engine(CONFIG, dataclasses.replace(OPTIONS, slots=3), tokenizer=Letters())
    engine.warm_up(engine.load(PARAMS, 0))
    server = Server(engine)
    warm = server.scheduler.status()["compilations"]
    server.ask(1)
    server.ask(2, temperature=0.7, top_k=3, top_p=0.9, min_p=0.01, min_new_tokens=4, stop_tokens=(0, 5))
    stopped = server.ask(3, stop_strings=tuple("abcdefgh"), max_new_tokens=40)
    server.ask(4, timeout_s=1.0, max_new_tokens=40)
    finished = server.ask(5, max_new_tokens=40)
    server.turn(5)
    server.scheduler.finish(finished, 0)
    server.turn()
    server.clock.now = 2.0
    server.run()
    assert server.completion(stopped).finish_reason == "stop"
    assert len(server.errors) == 1
    assert server.scheduler.status()["compilations"] == warm
