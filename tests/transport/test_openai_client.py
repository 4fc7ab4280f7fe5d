"""The official openai client against a server of a tiny random model with a byte-level tokenizer, swaps included."""

import functools
import time

import jax
import numpy as np
import pytest

from areal_jax.generation.scheduler import Scheduler
from areal_jax.transport.http_server import HttpServer, Model
from tests.full_forward import logits_behind
from tests.transport import tiny
from tests.transport.tiny import CONFIG, EOS, NAME, SLOTS, params_of, scrape

pytestmark = pytest.mark.usefixtures("quickly_compiled")

openai = pytest.importorskip("openai")


@pytest.fixture
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture
def scheduler():
    made = Scheduler(tiny.engine(), tiny.engine().load(params_of(0), 0), max_waiting=16)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def server(scheduler, tokenizer):
    made = HttpServer(Model(NAME, tokenizer, tiny.LENGTH, tiny.TOP_LOGPROBS), address="127.0.0.1:0")
    made.serve(scheduler)
    yield made
    made.stop()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


IDS = {"return_token_ids": True}


def complete(client, *, extra=(), **fields):
    asked = {"model": NAME, "prompt": "ab", "max_tokens": 12, "seed": 3, **fields}
    return client.completions.create(**asked, extra_body={**IDS, **dict(extra)})


def chat(client, *, extra=(), **fields):
    messages = [{"role": "user", "content": "Hé"}]
    asked = {"model": NAME, "messages": messages, "max_completion_tokens": 12, "seed": 3, **fields}
    return client.chat.completions.create(**asked, extra_body={**IDS, **dict(extra)})


def logprobs_by_hand(prompt, answer, params, without=()):
    """Of the answer's tokens by one forward of the whole, over the ids that the tokenizer defines less `without`."""
    tokens = np.array([*prompt, *answer], np.int32)
    logits = logits_behind(CONFIG, params, tokens)[:-1].astype(np.float64)
    logits[:, list(without)] = -np.inf
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logprobs[np.arange(len(logits)), tokens[1:]][len(prompt) - 1 :]


def test_models_are_listed_and_an_unknown_one_is_404(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).max_model_len == 96
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; 'tiny' is"):
        complete(client, model="other")


def test_a_completion_counts_its_tokens_and_its_token_ids_are_its_text(client, tokenizer):
    answer = complete(client, logprobs=0)
    choice = answer.choices[0]
    assert (answer.object, answer.model, answer.system_fingerprint) == ("text_completion", NAME, "version-0")
    assert choice.prompt_token_ids == tokenizer.encode("ab")
    assert choice.text == tokenizer.decode(choice.token_ids)
    assert choice.finish_reason == ("stop" if choice.token_ids[-1] == EOS else "length")
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.completion_tokens == len(choice.token_ids) == len(choice.versions)
    assert answer.usage.total_tokens == 2 + len(choice.token_ids)
    np.testing.assert_allclose(
        choice.token_logprobs, logprobs_by_hand([*choice.prompt_token_ids], choice.token_ids, params_of(0)), atol=5e-5
    )
    assert choice.logprobs.token_logprobs == choice.token_logprobs
    assert "".join(choice.logprobs.tokens) == choice.text
    ends = [*choice.logprobs.text_offset[1:], len(choice.text)]
    spans = zip(choice.logprobs.text_offset, ends, strict=True)
    assert [choice.text[begin:end] for begin, end in spans] == choice.logprobs.tokens


def test_the_same_seed_gives_the_same_answer_whatever_form_the_prompt_has(client, tokenizer):
    first = complete(client).choices[0].token_ids
    assert complete(client, prompt=tokenizer.encode("ab")).choices[0].token_ids == first
    assert complete(client, prompt=[tokenizer.encode("ab"), [5]], n=2).choices[0].token_ids == first
    assert complete(client, seed=4).choices[0].token_ids != first
    unseeded = {tuple(complete(client, seed=None).choices[0].token_ids) for _ in range(2)}
    assert len(unseeded) == 2


def test_n_answers_to_each_of_several_prompts_lie_in_their_order(client):
    answer = complete(client, prompt=["a", "bc"], n=3)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [len(choice.prompt_token_ids) for choice in answer.choices] == [1, 1, 1, 2, 2, 2]
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 6
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)


def test_a_chat_goes_through_the_models_template(client, tokenizer):
    answer = chat(client, logprobs=True, n=2)
    for choice in answer.choices:
        assert choice.prompt_token_ids == tokenizer.encode_chat([{"role": "user", "content": "Hé"}])
        assert (choice.message.role, choice.message.content) == ("assistant", tokenizer.decode(choice.token_ids))
        assert [entry.logprob for entry in choice.logprobs.content] == choice.token_logprobs
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
        assert all(bytes(entry.bytes).decode() == entry.token for entry in choice.logprobs.content)


def test_alternatives_are_the_likeliest_tokens_beside_the_drawn_one(client, tokenizer):
    plain = complete(client).choices[0]
    choice = complete(client, logprobs=3).choices[0]
    assert choice.token_ids == plain.token_ids and plain.logprobs is None
    tokens = np.array([*choice.prompt_token_ids, *choice.token_ids], np.int32)
    logits_TV = logits_behind(CONFIG, params_of(0), tokens)[len(choice.prompt_token_ids) - 1 : -1]
    assert len(logits_TV) == len(choice.logprobs.top_logprobs) > 1
    for place, given in enumerate(choice.logprobs.top_logprobs):
        logprobs = jax.nn.log_softmax(logits_TV[place])
        expected = {}
        for token in np.argsort(-logprobs)[:3]:
            text = choice.logprobs.tokens[place] if token == choice.token_ids[place] else tokenizer.decode([token])
            expected.setdefault(text, float(logprobs[token]))  # parts of characters read alike
        expected[choice.logprobs.tokens[place]] = choice.token_logprobs[place]
        assert given == pytest.approx(expected, abs=5e-5)


def with_two_stops(client):
    """A seed, its answer of 40 tokens, and two of these whose characters stand nowhere else: stop strings."""
    for seed in range(100):
        choice = complete(client, max_tokens=40, seed=seed, logprobs=0).choices[0]
        texts = choice.logprobs.tokens
        found = [t for t in range(4, len(texts)) if texts[t].isalnum() and choice.text.count(texts[t]) == 1]
        if choice.finish_reason == "length" and len(found) >= 2:
            return seed, choice, found[:2]
    return pytest.fail("no seed has such an answer")


def test_a_stream_that_a_stop_string_ends_says_what_the_whole_answer_says(client):
    seed, free, (place, _) = with_two_stops(client)
    ask = functools.partial(complete, client, max_tokens=40, seed=seed, stop=free.logprobs.tokens[place], logprobs=3)
    (whole,), parts = ask().choices, [part.choices[0] for part in ask(stream=True)]
    assert whole.text == free.text[: free.logprobs.text_offset[place]]
    assert whole.token_ids == free.token_ids[: place + 1] and whole.finish_reason == parts[-1].finish_reason == "stop"
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        streamed = [each for part in parts for each in getattr(part.logprobs, field) or []]
        assert streamed == getattr(whole.logprobs, field) and len(streamed) == len(whole.token_ids)


def test_a_stop_string_before_min_tokens_stays_in_the_text(client):
    seed, free, (first, second) = with_two_stops(client)
    stops = [free.logprobs.tokens[place] for place in (first, second)]
    ask = functools.partial(complete, client, max_tokens=40, seed=seed, stop=stops)
    for least, end in ((first, first), (first + 1, second)):
        choice = ask(extra={"min_tokens": least}).choices[0]
        assert (choice.text, choice.finish_reason) == (free.text[: free.logprobs.text_offset[end]], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_chats_alternatives_are_of_the_distribution_that_is_drawn_from(client, stream):
    answer = chat(client, logprobs=True, top_logprobs=4, stream=stream, extra={"top_k": 2})
    choices = [part.choices[0] for part in answer] if stream else answer.choices
    entries = [entry for choice in choices for entry in choice.logprobs.content]
    assert len(entries) == sum(len(choice.token_ids) for choice in choices) > 1
    for entry in entries:
        logprobs = [each.logprob for each in entry.top_logprobs]
        assert logprobs == sorted(logprobs, reverse=True) and len(logprobs) == 2  # also where both read alike
        assert any(entry.logprob == pytest.approx(each, abs=1e-5) for each in logprobs)
        assert np.exp(logprobs).sum() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("ask", "fields", "name"),
    [(chat, {"logprobs": True, "top_logprobs": 5}, "top_logprobs"), (complete, {"logprobs": 5}, "logprobs")],
)
def test_more_alternatives_than_the_server_gives_are_refused(client, ask, fields, name):
    with pytest.raises(openai.BadRequestError, match=f" {name}=5: this server shows at most 4 alternatives") as caught:
        ask(client, **fields)
    assert caught.value.param == name


@pytest.mark.parametrize("ask", [complete, chat])
def test_a_stream_joins_to_the_answer_that_is_not_streamed(client, scheduler, monkeypatch, ask):
    whole = ask(client, n=2)
    go_on, events = tiny.held_after_first(scheduler, monkeypatch), []
    for event in ask(client, n=2, stream=True, stream_options={"include_usage": True}):
        events.append(event)
        go_on.set()  # not before the first tokens are here
    assert events[-1].usage == whole.usage and events[-1].choices == []
    assert all(event.usage is None for event in events[:-1])
    assert len({event.id for event in events}) == 1
    for choice in whole.choices:
        parts = [part for event in events for part in event.choices if part.index == choice.index]
        assert len(parts) > 1
        assert [t for part in parts for t in part.token_ids] == choice.token_ids
        assert [p for part in parts for p in part.token_logprobs] == choice.token_logprobs
        assert parts[0].prompt_token_ids == choice.prompt_token_ids
        assert parts[-1].finish_reason == choice.finish_reason
        assert all(part.finish_reason is None for part in parts[:-1])
        if ask is chat:
            assert "".join(part.delta.content for part in parts) == choice.message.content
            assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        else:
            assert "".join(part.text for part in parts) == choice.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it_and_the_tokens_with_it(client, tokenizer, stream):
    whole = complete(client, max_tokens=40, temperature=1.0).choices[0]
    text = whole.text
    at = next(at for at in range(4, len(text) - 2) if text[at] not in text[:at] and "�" not in text[at : at + 2])
    stop = text[at : at + 2]  # of two characters, so that the first one has to be held back
    answer = complete(client, max_tokens=40, stop=["never there", stop], stream=stream)
    choices = [choice for event in answer for choice in event.choices] if stream else answer.choices
    tokens = [token for choice in choices for token in choice.token_ids]
    assert "".join(choice.text for choice in choices) == text[:at]
    assert choices[-1].finish_reason == "stop"
    assert tokens == whole.token_ids[: len(tokens)]
    assert stop in tokenizer.decode(tokens) and stop not in tokenizer.decode(tokens[:-1])


def test_sampling_parameters_reach_the_sampler(client):
    greedy = complete(client, temperature=0).choices[0]
    assert complete(client, temperature=0, seed=9).choices[0].token_ids == greedy.token_ids
    only = complete(client, extra={"top_k": 1}, seed=9).choices[0]
    assert only.token_ids == greedy.token_ids
    np.testing.assert_allclose(only.token_logprobs, 0.0, atol=1e-6)  # what is left of the distribution is one token
    assert complete(client, top_p=1e-6, seed=9).choices[0].token_ids == greedy.token_ids
    assert complete(client, extra={"min_p": 0.999}, seed=9).choices[0].token_ids == greedy.token_ids
    stopped = complete(client, temperature=0, extra={"stop_token_ids": [greedy.token_ids[0]]}).choices[0]
    assert (stopped.token_ids, stopped.text, stopped.finish_reason) == (greedy.token_ids[:1], "", "stop")
    later = {"stop_token_ids": [greedy.token_ids[0]], "min_tokens": 3}
    assert len(complete(client, temperature=0, extra=later).choices[0].token_ids) > 3


def test_errors_are_the_clients_own_exceptions(client):
    with pytest.raises(openai.BadRequestError, match="unknown parameter temprature") as caught:
        complete(client, extra={"temprature": 1})
    assert caught.value.param == "temprature"
    with pytest.raises(openai.BadRequestError, match="this server holds 96 per sequence"):
        complete(client, max_tokens=95)
    with pytest.raises(openai.BadRequestError, match="asks for 17 samples, of which generation.max_waiting=16"):
        complete(client, n=17)
    with pytest.raises(openai.APIStatusError, match="timeout_s=1e-06") as caught:
        complete(client, max_tokens=90, extra={"timeout_s": 1e-6})
    assert caught.value.status_code == 408


def test_a_client_that_leaves_its_stream_frees_the_slots(client, scheduler, monkeypatch):
    go_on = tiny.held_after_first(scheduler, monkeypatch)
    with complete(client, prompt=["a", "b"], n=2, max_tokens=90, stream=True, extra={"min_tokens": 90}) as stream:
        next(iter(stream))
    tiny.until(lambda: scheduler._commands.qsize() == 2)  # both prompts are cancelled, and the engine may see it
    go_on.set()
    tiny.until(lambda: scheduler.status()["active"] == 0)
    assert scheduler.telemetry.ended["cancelled"] == 4


@pytest.mark.parametrize("ask", [complete, chat])
def test_weights_that_come_in_mid_sequence_show_in_versions_and_logprobs(client, scheduler, monkeypatch, ask):
    params = {version: params_of(version) for version in range(3)}
    tokens, logprobs, versions, newest = ([], [], [], [])
    prompt = None
    coming, made, submit = [(1, 4), (2, 20)], [], scheduler.submit  # versions, and after how many tokens they come

    def watched_submit(request, on_chunks, on_error):
        def watch(chunks):
            on_chunks(chunks)
            made.extend(token for chunk in chunks for token in chunk.tokens)
            if coming and len(made) >= coming[0][1]:
                version, _ = coming.pop(0)
                scheduler.update_weights(params[version], version)

        return submit(request, watch, on_error)

    monkeypatch.setattr(scheduler, "submit", watched_submit)
    limit = {"max_tokens" if ask is complete else "max_completion_tokens": 60}
    for event in ask(client, **limit, stream=True, extra={"min_tokens": 60}):  # so that <eos> has no probability
        part = event.choices[0]
        prompt = prompt or part.prompt_token_ids
        tokens += part.token_ids
        logprobs += part.token_logprobs
        versions += part.versions
        newest.append((event.system_fingerprint, f"version-{part.versions[-1]}"))
    assert len(tokens) == 60
    assert sorted(set(versions)) == [0, 1, 2] and versions == sorted(versions)
    assert all(fingerprint == version for fingerprint, version in newest)
    versions = np.array(versions)
    for version in range(3):
        expected, here = logprobs_by_hand(prompt, tokens, params[version], without=(EOS,)), versions == version
        np.testing.assert_allclose(np.array(logprobs)[here], expected[here], atol=5e-5)


def test_the_answer_names_the_newest_weights_in_it(client, scheduler):
    scheduler.update_weights(params_of(1), 1).result(60)
    assert complete(client).system_fingerprint == "version-1"
    assert set(complete(client).choices[0].versions) == {1}


def test_prometheus_counts_what_was_sent(client, scheduler, server):
    began = time.monotonic()
    before = scrape(server)
    assert before["slots"] == SLOTS and before["ready"] == 1
    # keys and values, 4 slots of 96 tokens, 2 heads of size 8, 4 bytes
    assert before["cache_bytes"] == 2 * SLOTS * 96 * 2 * 8 * 4
    assert before["weight_bytes"] == sum(array.nbytes for array in params_of(0).values())
    answers = [complete(client, prompt=["a", "bcd"], n=2), complete(client), chat(client)]
    with pytest.raises(openai.BadRequestError):
        complete(client, n=17)
    with tiny.Held(scheduler, prompt=range(5), samples=1, new=40) as held:
        update = scheduler.update_weights(params_of(1), 1)
    stall_s = update.result(60)
    tiny.until(lambda: scheduler.status()["active"] == 0)
    after = scrape(server)
    wall_s = time.monotonic() - began
    grown = {name: after[name] - before[name] for name in before}
    tokens = sum(answer.usage.completion_tokens for answer in answers) + 40
    assert grown["requests_total"] == 5
    assert grown["samples_total"] == 7
    assert grown["tokens_total"] == tokens
    assert grown["prompt_tokens_total"] == 1 + 3 + 2 + answers[2].usage.prompt_tokens + 5
    choices = [choice for answer in answers for choice in answer.choices]
    reasons = [choice.finish_reason for choice in choices] + ["length"]
    for reason in ("stop", "length"):
        assert grown[f"ended_samples_total{reason}"] == reasons.count(reason)
    assert grown["refused_requests_totalinvalid"] == 1
    assert grown["time_to_first_token_seconds_count"] == grown["time_to_first_token_seconds_bucket+Inf"] == 7
    assert 0 < grown["time_to_first_token_seconds_sum"] < 7 * wall_s
    # a dispatch makes two tokens; who has no more has no time per token
    assert grown["time_per_output_token_seconds_count"] == sum(len(choice.token_ids) > 2 for choice in choices) + 1
    assert 0 < grown["time_per_output_token_seconds_sum"] < 7 * wall_s
    assert grown["swap_stall_seconds_count"] == grown["swaps_total"] == 1
    assert 0 < grown["swap_stall_seconds_sum"] == stall_s < wall_s
    versions = np.concatenate([chunk.versions for chunk in held.chunks])
    assert 2 <= (versions == 0).sum() < (versions <= 1).sum() == 40
    assert grown["recomputed_tokens_total"] == 5 + (versions == 0).sum()  # prompt, and what was known at the swap
    assert 0 < grown["busy_seconds_total"] < wall_s
    assert (after["weights_version"], after["slots_in_use"], after["queue_samples"]) == (1, 0, 0)
    assert after["tokens_per_second"] <= tokens / 10
