"""The rollout controller with the real trajectory queue; the test plays the trainer and the generation servers."""

import asyncio
import itertools

import numpy as np
import pytest

from areal_jax.rollout.controller import unfinished
from areal_jax.rollout.workflow import RolloutFailed
from areal_jax.trajectory_queue import TrajectoryQueue
from areal_jax.types import Progress
from tests.rollout.fakes import FakeScorer, FakeServers, Numbers, Run, completion, make_config, play


def held_by(events: dict[int, asyncio.Event]):
    """Rollouts of these uids wait for their event."""
    return lambda request: None if request.evaluation else events.get(request.uid)


def ids(batch) -> list[tuple[int, int]]:
    return [(trajectory.uid, trajectory.sample) for trajectory in batch]


def failures(run: Run) -> dict[str, int]:
    return run.lines["rollout"][-1]["failed"]


class TestGate:
    def test_prompts_start_in_order_and_arrive_as_whole_groups(self):
        async def scenario():
            run = Run(make_config(max_staleness=1))
            await run.until(lambda: run.queue.waiting == 8)
            await run.settle()
            assert run.servers.uids() == [0, 1, 2, 3]  # (0 + 1 + 1) * 4 trajectories
            assert ids(await run.step(0)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
            await run.until(lambda: run.servers.uids() == [0, 1, 2, 3, 4, 5])
            await run.end()

        play(scenario)

    def test_a_trajectory_holds_what_was_sampled_and_its_reward(self):
        async def scenario():
            run = Run(make_config(), scorer=FakeScorer(lambda text, answer: 0.75))
            run.servers.answer = lambda request, sample: completion(request, 0, length=4, reason="length")
            await run.until(lambda: run.queue.waiting == 4)
            trajectory = (await run.step(0))[1]
            assert (trajectory.uid, trajectory.sample, trajectory.truncated) == (0, 1, True)
            assert trajectory.reward == 2.5  # -5 + 0.75 * (5 - -5)
            np.testing.assert_array_equal(trajectory.prompt_tokens, [1])
            np.testing.assert_array_equal(trajectory.tokens, [1, 1, 1, 1])
            np.testing.assert_array_equal(trajectory.versions, [0, 0, 0, 0])
            await run.end()

        play(scenario)

    def test_requests_carry_the_seed_the_limits_and_the_end_tokens(self):
        async def scenario():
            run = Run(make_config(temperature=0.7))
            await run.until(lambda: len(run.servers.uids()) == 2)
            request = run.servers.asked[-1]
            assert (request.samples, request.evaluation) == ((0, 1), False)
            sampling = request.sampling
            assert (sampling.max_new_tokens, sampling.temperature, sampling.seed, sampling.stop_tokens) == (
                4,
                0.7,
                1,
                (0,),
            )
            await run.end()

        play(scenario)

    def test_staleness_0_with_a_slow_weight_update_is_one_batch_at_a_time(self):
        async def scenario():
            run = Run(make_config(max_staleness=0))
            for version in range(2):
                await run.until(lambda: run.queue.waiting == 4)
                batch = run.queue.get(version, timeout_s=0.0)
                assert {t.uid for t in batch} == {2 * version, 2 * version + 1}
                assert all((t.versions == version).all() for t in batch)
                await run.settle()  # the weights are under way
                assert run.queue.waiting == 0 and run.servers.active == 0
                assert len(run.servers.uids()) == 2 * (version + 1)
                run.servers.version = version + 1
                run.queue.announce(version + 1)
            await run.until(lambda: run.queue.waiting == 4)
            assert run.queue.dropped == {}
            await run.end()

        play(scenario)

    def test_in_flight_is_bounded_by_the_slots(self):
        async def scenario():
            run = Run(make_config(slots=3, max_staleness=50))  # 2 * 3 trajectories, 3 groups
            events = {uid: asyncio.Event() for uid in range(5)}
            run.servers.hold = held_by(events)
            await run.until(lambda: run.servers.active == 6)
            await run.settle()
            assert run.servers.uids() == [0, 1, 2]
            events[1].set()  # not the oldest: nobody waits for a slow one
            await run.until(lambda: run.servers.uids() == [0, 1, 2, 3])
            assert run.servers.active == 6
            await run.end()

        play(scenario)

    def test_a_group_larger_than_all_slots_still_runs(self):
        async def scenario():
            run = Run(make_config(group_size=8, slots=1, prompts_per_step=1))
            await run.until(lambda: run.queue.waiting >= 8)
            assert run.queue.waiting == 8
            await run.end()

        play(scenario)

    def test_time_at_a_closed_gate_is_measured(self):
        async def scenario():
            run = Run(make_config())
            await run.until(lambda: run.queue.waiting == 4)
            await run.settle()
            run.now = 30.0
            await run.step(0)
            await run.until(lambda: len(run.servers.uids()) == 4)
            await run.settle()
            run.now = 32.0
            await run.end()
            assert run.lines["rollout"][-1]["gate_closed_s"] == 32.0  # the gate was closed all the time
            assert run.lines["rollout"][-1]["time"] == 32.0
            closed = [span for line in run.lines["rollout"] for span in line["gate_closed"]]
            assert closed[0][0] == 0.0 and sum(end - begin for begin, end in closed) == 32.0

        play(scenario)


class TestFailures:
    def test_poison_prompts_are_counted_discarded_and_replaced(self):
        async def scenario():
            servers = FakeServers()
            servers.answer = lambda request, sample: (
                ConnectionError("server gone") if request.uid == 4 else completion(request, servers.version)
            )

            def verdict(text, answer):
                if answer == "1":
                    raise ValueError("cannot judge")
                return 1.0

            run = Run(
                make_config(prompts_per_step=4),
                train=Numbers(too_long=(0,), raising=(2,)),
                scorer=FakeScorer(verdict),
                servers=servers,
            )
            batch = await run.step(0)
            assert {t.uid for t in batch} == {3, 5, 6, 7}
            await run.step(1)
            assert run.queue.dropped == {"too_long": 2, "reward": 2, "prompt": 2, "generation": 2}
            await run.end()
            assert failures(run) == {"too_long": 2, "reward": 2, "prompt": 2, "generation": 2}

        play(scenario)

    def test_prompts_that_are_too_long_are_written_down_and_are_no_failures_in_a_row(self):
        async def scenario():
            too_long = [uid for uid in range(40) if uid % 10]  # nine in a row, again and again
            run = Run(make_config(max_consecutive_failures=4, prompts_per_step=1), train=Numbers(too_long=too_long))
            for version in range(4):
                batch = await run.step(version)
                assert {t.uid for t in batch} == {10 * version}
            await run.end()
            skipped = run.lines["skipped"]
            assert skipped[0] == {"uid": 1, "cause": "too_long", "tokens": 9, "limit": 8}
            assert {line["uid"] for line in skipped[:27]} == {uid for uid in range(30) if uid % 10}
            assert failures(run) == {"too_long": 2 * len(skipped)} == run.queue.dropped

        play(scenario)

    def test_a_data_set_in_which_every_prompt_is_too_long_ends_the_run_before_it_begins(self):
        class All(Numbers):
            def __len__(self):
                return 5

        async def scenario(train, count):
            run = Run(make_config(), train=train)
            with pytest.raises(
                ValueError,
                match=f"max_prompt_tokens=8 leaves out every prompt of data.train: of {count} the shortest has 9",
            ):
                await asyncio.wait_for(run.task, 10)
            assert run.servers.asked == [] and run.lines["skipped"] == []

        play(lambda: scenario(All(too_long=range(5)), 5))
        play(lambda: scenario(Numbers(too_long=range(5000)), 1024))  # a source without an end

    def test_one_prompt_that_fits_is_enough(self):
        class Few(Numbers):
            def __len__(self):
                return 5

        async def scenario():
            run = Run(make_config(prompts_per_step=1), train=Few(too_long=range(4)))
            assert {t.uid for t in await run.step(0)} == {4}
            await run.end()

        play(scenario)

    def test_a_source_whose_prompts_grow_too_long_ends_the_run(self):
        class Growing(Numbers):
            def __len__(self):
                return 5

        async def scenario():
            run = Run(make_config(prompts_per_step=1), train=Growing(too_long=range(1, 100)))
            await run.step(0)
            with pytest.raises(RuntimeError, match="10 prompts in a row were too long and left out"):
                await asyncio.wait_for(run.task, 10)

        play(scenario)

    def test_an_error_may_name_its_own_cause(self):
        class Slow(Exception):
            cause = "reward_timeout"

        async def scenario():
            def verdict(text, answer):
                if answer == "0":
                    raise Slow
                return 1.0

            run = Run(make_config(), scorer=FakeScorer(verdict))
            await run.step(0)
            assert run.queue.dropped == {"reward_timeout": 2}
            await run.end()

        play(scenario)

    @pytest.mark.parametrize("what", ["one missing", "one empty"])
    def test_a_partial_group_never_reaches_the_queue(self, what):
        class Losing(FakeServers):
            async def __call__(self, request):
                answers = await super().__call__(request)
                if request.uid != 0 or request.evaluation:
                    return answers
                return (
                    answers[:1]
                    if what == "one missing"
                    else [answers[0], completion(request, 0, length=0, reason="length")]
                )

        async def scenario():
            run = Run(make_config(), servers=Losing())
            batch = await run.step(0)
            assert ids(batch) == [(1, 0), (1, 1), (2, 0), (2, 1)]
            assert run.queue.dropped == {"generation": 2}
            await run.end()

        play(scenario)

    def test_too_many_failures_in_a_row_end_the_run_with_the_reason(self):
        async def scenario():
            run = Run(make_config(prompts_per_step=8, max_consecutive_failures=5), train=Numbers(raising=range(3, 100)))
            with pytest.raises(
                RuntimeError, match=r"5 prompts in a row failed .*=5\).*'prompt': 10.*no problem 7"
            ) as error:
                await run.task
            assert isinstance(error.value.__cause__, RolloutFailed)

        play(scenario)

    def test_a_success_in_between_starts_the_count_again(self):
        async def scenario():
            odd = [uid for uid in range(40) if uid % 4]
            run = Run(make_config(max_consecutive_failures=4, slots=2), train=Numbers(raising=odd))
            for version in range(4):
                await run.step(version)
            assert not run.task.done()
            await run.end()

        play(scenario)

    def test_a_mistake_of_our_own_is_no_failed_prompt(self):
        async def scenario():
            run = Run(make_config(), scorer=FakeScorer(lambda text, answer: "no number"))
            with pytest.raises(TypeError):
                await run.task

        play(scenario)

    def test_the_queue_going_away_ends_the_run(self):
        async def scenario():
            run = Run(make_config())

            def put(group):
                raise ConnectionError("the trainer is gone")

            run.queue.put = put
            with pytest.raises(ConnectionError, match="the trainer is gone"):
                await run.task

        play(scenario)

    def test_announcements_that_end_too_early_end_the_run(self):
        async def scenario():
            run = Run(make_config())

            async def announcements():
                yield run.queue.wait_announcement(-1, 0.0)

            run.services.queue.announcements = announcements
            with pytest.raises(RuntimeError, match="announcements ended at version 0"):
                await run.task

        play(scenario)


class TestZeroVariance:
    def test_equal_rewards_are_left_out_and_replaced_when_asked_for(self):
        async def scenario():
            calls = itertools.count()
            scorer = FakeScorer(lambda text, answer: float(next(calls) % 2) if int(answer) >= 3 else 1.0)
            run = Run(make_config(drop_zero_variance=True), scorer=scorer)
            assert {t.uid for t in await run.step(0)} == {3, 4}
            assert run.queue.dropped == {"zero_variance": 6}
            await run.end()
            assert run.lines["rollout"][-1]["filtered"] == 6

        play(scenario)

    def test_a_group_with_variance_now_and_then_is_enough(self):
        async def scenario():
            calls = itertools.count()
            scorer = FakeScorer(lambda text, answer: 1.0 if int(answer) % 4 else float(next(calls) % 2))
            run = Run(make_config(drop_zero_variance=True), scorer=scorer)
            for version in range(4):
                await run.step(version)
            assert run.queue.dropped["zero_variance"] >= 2 * 16  # 8 in a row would end it
            await run.end()

        play(scenario)

    def test_they_train_by_default(self):
        async def scenario():
            run = Run(make_config(), scorer=FakeScorer(lambda text, answer: 1.0))
            assert {t.uid for t in await run.step(0)} == {0, 1}
            await run.end()

        play(scenario)

    def test_when_every_group_is_filtered_the_run_says_so_and_stops(self):
        async def scenario():
            run = Run(make_config(drop_zero_variance=True), scorer=FakeScorer(lambda text, answer: 0.0))
            with pytest.raises(RuntimeError, match=r"8 prompts in a row were left out, .*equal.*; 0 of \d+ finished"):
                await run.task  # 4 batches of 2 prompts

        play(scenario)


class TestResume:
    def test_what_is_not_done_is_started_in_order(self):
        progress = Progress(version=3, low=2, done=(3, 6), counted=0, lost=0)
        assert list(itertools.islice(unfinished(progress), 5)) == [2, 4, 5, 7, 8]

    def test_every_prompt_is_trained_exactly_once_across_a_kill(self):
        # Prompts 0 to 7, two per step, four ahead, groups of one.
        config = make_config(group_size=1, max_staleness=1)

        async def scenario():
            first = Run(config)
            await first.until(lambda: first.queue.waiting == 4)
            trained = [t.uid for t in await first.step(0)]
            assert trained == [0, 1]
            snapshot = first.queue.snapshot(1)  # 2 and 3 wait
            await first.until(lambda: first.queue.waiting == 4)  # 4 and 5 too, and the snapshot knows nothing of them
            first.task.cancel()
            await asyncio.wait({first.task})

            second = Run(config, queue=restored(config, snapshot))
            await second.until(lambda: second.queue.waiting == 4)
            await second.settle()
            assert second.servers.uids() == [4, 5]  # no wider than before: (1 + 1 + 1) * 2 = 2 trained + 2 waiting + 2
            for version in range(1, 4):
                trained += [t.uid for t in await second.step(version)]
            assert sorted(trained) == list(range(8))
            await second.end()

        play(scenario)

    def test_a_long_rollout_in_flight_comes_back(self):
        config = make_config(group_size=1, max_staleness=1)

        async def scenario():
            first = Run(config)
            first.servers.hold = held_by({0: asyncio.Event()})  # prompt 0 takes for ever
            await first.until(lambda: first.queue.waiting == 3)
            assert [t.uid for t in await first.step(0)] == [1, 2]
            snapshot = first.queue.snapshot(1)
            first.task.cancel()
            await asyncio.wait({first.task})
            assert 0 in first.servers.cancelled

            second = Run(config, queue=restored(config, snapshot))
            await second.until(lambda: second.queue.waiting == 4)
            assert second.servers.uids() == [0, 4, 5]
            assert [t.uid for t in await second.step(1)] == [3, 0]  # oldest version first, then arrival
            await second.end()

        play(scenario)

    def test_what_was_lost_before_a_restart_is_not_topped_up_again(self):
        config = make_config(group_size=1)

        async def scenario():
            first = Run(config, train=Numbers(raising=(0, 1, 2)))
            await first.until(lambda: first.queue.waiting == 2)
            snapshot = first.queue.snapshot(0)
            await first.end()
            second = Run(config, queue=restored(config, snapshot))
            await second.settle()
            assert second.servers.uids() == []  # 3 and 4 wait: a whole batch
            await second.end()

        play(scenario)

    def test_the_initial_evaluation_is_not_repeated(self):
        config = make_config(group_size=1)

        async def scenario():
            first = Run(config)
            await first.step(0)
            snapshot = first.queue.snapshot(1)
            await first.end()
            second = Run(config, queue=restored(config, snapshot))
            await second.step(1)
            await second.end()
            assert [line["phase"] for line in first.lines["evaluations"]] == ["before"]
            assert second.lines["evaluations"] == []

        play(scenario)


def restored(config, snapshot) -> TrajectoryQueue:
    queue = TrajectoryQueue(
        batch_size=config.batch_size, group_size=config.rollout.group_size, max_staleness=1, overdue="mask"
    )
    queue.restore(snapshot)
    return queue


class TestEvaluation:
    def test_it_comes_first_and_last(self):
        async def scenario():
            run = Run(
                make_config(eval_prompts=3, eval_samples=2), scorer=FakeScorer(lambda text, answer: int(answer) % 2)
            )
            for version in range(3):
                await run.step(version)
            await run.finish()
            assert [request.evaluation for request in run.servers.asked[:4]] == [True, True, True, False]
            before, after = run.lines["evaluations"]
            assert (before["phase"], before["version"], before["version_min"], before["version_max"]) == (
                "before",
                0,
                0,
                0,
            )
            assert (after["phase"], after["version"], after["version_min"], after["version_max"]) == ("after", 3, 3, 3)
            assert (before["prompts"], before["samples"], before["accuracy"]) == (3, 2, 1 / 3)  # 1000, 1001, 1002
            assert before["length_mean"] == 3.0 and before["truncated"] == 0.0
            assert before["avg@2"] == before["pass@2"] == before["maj@2"] == 1 / 3
            assert [line["phase"] for line in run.lines["completions"]] == ["before"] * 3 + ["after"] * 3
            assert list(run.kept) == ["000000-before", "000003-after"]
            assert [(record["uid"], record["n"]) for record in run.kept["000003-after"]] == [(0, 2), (1, 2), (2, 2)]
            assert run.lines["completions"][1]["right"] and run.lines["completions"][1]["answer"] == "1001"

        play(scenario)

    def test_no_rollout_starts_before_the_initial_one_ends(self):
        async def scenario():
            run = Run(make_config())
            event = asyncio.Event()
            run.servers.hold = lambda request: event if request.evaluation else None
            await run.settle()
            assert run.servers.uids() == []
            event.set()
            await run.until(lambda: len(run.servers.uids()) == 2)
            await run.end()

        play(scenario)

    def test_during_training_it_stops_neither_rollouts_nor_training_and_names_its_versions(self):
        async def scenario():
            run = Run(make_config(every=2, max_staleness=1, slots=16, eval_prompts=8))
            events = {uid: asyncio.Event() for uid in range(8)}
            run.servers.hold = lambda request: (
                events[request.uid] if request.evaluation and run.servers.version else None
            )
            for version in range(2):
                await run.step(version)
            await run.until(lambda: run.servers.evaluations == 4)  # a quarter of 16 slots
            for version in range(2, 7):
                await run.step(version)  # goes on
            await run.settle()
            assert run.servers.evaluations == 4 and len(run.lines["evaluations"]) == 1
            for event in events.values():
                event.set()
            await run.until(lambda: len(run.lines["evaluations"]) == 3)
            _, during, late = run.lines["evaluations"]
            assert (during["phase"], during["version"]) == ("during", 2)
            assert (during["version_min"], during["version_max"]) == (7, 7)  # what really sampled the tokens
            assert (late["phase"], late["version"]) == ("during", 7)  # 4 and 6 went by meanwhile: one for both
            assert run.servers.most_evaluations <= 8
            await run.step(7)
            await run.until(lambda: len(run.lines["evaluations"]) == 4)
            assert run.lines["evaluations"][3]["version"] == 8
            await run.end()
            assert {line["phase"] for line in run.lines["completions"]} == {"before"}

        play(scenario)

    def test_32_samples_of_a_prompt_leave_three_slots_of_four_to_rollouts(self):
        async def scenario():
            run = Run(make_config(every=1, max_staleness=8, slots=16, eval_prompts=3, eval_samples=32))
            event = asyncio.Event()
            run.servers.hold = lambda request: event if request.evaluation and run.servers.version else None
            await run.step(0)
            run.servers.most_evaluated_samples = 0
            await run.until(lambda: run.servers.evaluated_samples > 0)
            for version in range(1, 5):
                await run.step(version)  # goes on, and rollouts for it are made
            await run.settle()
            assert run.servers.evaluated_samples == 4
            event.set()
            await run.until(lambda: len(run.lines["evaluations"]) >= 2)
            assert run.servers.most_evaluated_samples == 4
            assert run.lines["evaluations"][1]["samples"] == 32
            assert all(record["n"] == 32 for record in run.kept["000001-during"])
            await run.end()

        play(scenario)

    def test_it_shares_no_sampling_key_with_rollouts(self):
        async def scenario():
            run = Run(make_config())
            await run.step(0)
            await run.finish()
            seeds = {(request.evaluation, request.sampling.seed % 2**32) for request in run.servers.asked}
            assert len(seeds) == 2 and len({seed for _, seed in seeds}) == 2
            assert (False, run.config.run.seed) in seeds  # training's keys are those of run.seed itself

        play(scenario)

    def test_a_swap_in_the_middle_shows_as_a_range_of_versions(self):
        async def scenario():
            run = Run(make_config())
            run.servers.answer = lambda request, sample: completion(request, 4 + request.uid)
            await run.until(lambda: len(run.lines["evaluations"]) == 1)
            line = run.lines["evaluations"][0]
            assert (line["version_min"], line["version_max"]) == (4, 5)
            await run.end()

        play(scenario)

    @pytest.mark.parametrize("phase", ["before", "during", "after"])
    def test_a_reward_that_raises_fails_loudly_and_never_scores_0(self, phase):
        async def scenario():
            failing = False

            def verdict(text, answer):
                if failing and answer == "1001":
                    raise KeyError("the verifier is broken")
                return 1.0

            failing = phase == "before"
            run = Run(make_config(every=1), scorer=FakeScorer(verdict))
            if phase != "before":
                await run.until(lambda: run.queue.waiting == 4)
                failing = True
            with pytest.raises(RolloutFailed, match="prompt 1 failed .reward.: KeyError: 'the verifier is broken'"):
                if phase == "during":
                    await run.step(0)
                elif phase == "after":
                    run.queue.announce(0, finished=True)
                async with asyncio.timeout(10):
                    await run.task
            assert [line["phase"] for line in run.lines["evaluations"]] == ["before"] * (phase != "before")

        play(scenario)

    def test_one_in_progress_gives_way_to_the_final_one(self):
        async def scenario():
            run = Run(make_config(every=1))
            run.servers.hold = lambda request: (
                asyncio.Event() if request.evaluation and run.servers.version == 1 else None
            )
            await run.step(0)
            await run.until(lambda: run.servers.evaluations == 2)
            run.servers.version = 2
            run.queue.announce(2, finished=True)
            await run.task
            assert [line["phase"] for line in run.lines["evaluations"]] == ["before", "after"]
            assert run.lines["evaluations"][-1]["version_min"] == 2

        play(scenario)


class TestEnd:
    def test_finished_cancels_what_is_in_flight(self):
        async def scenario():
            run = Run(make_config(max_staleness=1))
            run.servers.hold = held_by({3: asyncio.Event()})
            await run.until(lambda: run.queue.waiting == 6)
            await run.finish()
            assert run.servers.cancelled == [3] and run.servers.active == 0

        play(scenario)

    @pytest.mark.parametrize("when", ["before", "rollouts"])
    def test_stop_ends_it_at_once_without_a_final_evaluation(self, when):
        async def scenario():
            run = Run(make_config())
            run.servers.hold = lambda request: asyncio.Event() if request.evaluation == (when == "before") else None
            await run.until(lambda: run.servers.active > 0)
            await run.settle()
            await run.end()
            assert len(run.lines["evaluations"]) == (when == "rollouts") and run.servers.active == 0

        play(scenario)

    def test_cancelling_it_leaves_nothing_behind(self):
        async def scenario():
            run = Run(make_config())
            run.servers.hold = lambda request: asyncio.Event()
            await run.until(lambda: run.servers.active > 0)
            run.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run.task
            assert run.servers.active == 0

        play(scenario)


def test_rollout_lines_are_totals():
    async def scenario():
        run = Run(make_config(max_staleness=1))
        await run.step(0)
        await run.until(lambda: run.queue.waiting == 8)
        await run.settle(0.05)
        await run.end()
        last = run.lines["rollout"][-1]
        assert (last["started"], last["finished"], last["right"], last["in_flight"]) == (12, 12, 6, 0)
        started = [line["started"] for line in run.lines["rollout"]]
        assert started == sorted(started) and len(started) > 2

    play(scenario)
