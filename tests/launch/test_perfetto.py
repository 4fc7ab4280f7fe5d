"""timeline.json, from the files of a run alone."""

import asyncio
import collections
import json
import time

import pytest

from areal_jax.launch import generation_server, perfetto, run_files
from areal_jax.launch.run_files import Run
from areal_jax.rewards.timed import TimedScorer
from areal_jax.telemetry import Activity, Swap
from tests.launch.synthetic_run import BEGIN, publish, step, swap, write_lines, write_run

STEPS, SERVERS = 30, 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    write_run(directory, steps=STEPS, generators=SERVERS)
    return Run(directory).update()


@pytest.fixture(scope="module")
def events(run):
    """As whoever opens the file reads them."""
    path = run.directory / "timeline.json"
    perfetto.write(run, path)
    return json.loads(path.read_text())["traceEvents"]


def slices(events, name=""):
    """The complete events whose names begin so, by when they begin and the longest first."""
    found = [event for event in events if event["ph"] == "X" and event["name"].startswith(name)]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def assert_nested(events):
    """On each track a slice lies in the one before it, or behind it."""
    open_ends = collections.defaultdict(list)
    for event in slices(events):
        begin, end = event["ts"], event["ts"] + event["dur"]
        ends = open_ends[event["pid"], event["tid"]]
        while ends and ends[-1] <= begin:
            ends.pop()
        assert begin >= 0 and begin < end <= min(ends, default=end), event
        ends.append(end)


def test_slices_of_a_track_nest_or_follow_one_another(events):
    assert_nested(events)
    assert all(isinstance(event["ts"], int) for event in events)


def test_every_process_and_track_has_a_name(events):
    named = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(named) == {"trainer", "rollout controller", "generation server 0", "generation server 1"}
    assert {event["pid"] for event in events} == set(named.values())
    tracks = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in slices(events)} == tracks


def test_steps_cover_what_the_log_says_and_their_parts_are_inside_in_order(run, events):
    steps = slices(events, "step ")
    assert [event["name"] for event in steps] == [f"step {version}" for version in range(1, STEPS + 1)]
    for event, line in zip(steps, run.steps, strict=True):
        assert event["ts"] + event["dur"] == pytest.approx((line["time"] - BEGIN) * 1e6, abs=2)
        assert event["dur"] == pytest.approx(line["step_s"] * 1e6, abs=2)
        last = event["ts"] + event["dur"]
        inside = [e for e in slices(events) if e["tid"] == event["tid"] and e["pid"] == event["pid"] and e is not event]
        inside = [e for e in inside if event["ts"] <= e["ts"] < last]
        wanted = ["wait for a batch", "proximal pass", "update", "wait for the publish before"]
        assert [e["name"] for e in inside][:4] == wanted
        assert sum(e["dur"] for e in inside[:4]) == pytest.approx((line["idle_s"] + 0.95 * busy(line)) * 1e6, abs=9)


def test_each_further_process_of_the_trainer_has_a_track_of_its_own_times(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [step(1, BEGIN + 10), step(2, BEGIN + 12)])
    for number in (1, 2):
        late = [step(version, BEGIN + 10 * version + number, pack_s=0.1, idle_s=0.5) for version in (1, 2)]
        write_lines(tmp_path / f"trainer-{number}.jsonl", late)
    found = perfetto.events(Run(tmp_path).update())
    assert_nested(found)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    seen = collections.defaultdict(list)
    for event in slices(found):
        seen[names[event["pid"], event["tid"]]].append((event["name"], event["ts"], event["dur"]))
    for number in (1, 2):
        steps = [each for each in seen[f"training steps, trainer-{number}"] if each[0].startswith("step")]
        begin = number * 1_000_000  # the run begins a second before the first line, which ends at 10 s
        assert steps == [("step 1", begin, 1_000_000), ("step 2", 10_000_000 + begin, 1_000_000)]
        assert ("wait for a batch", begin, 500_000) in seen[f"training steps, trainer-{number}"]
    assert [name for name, _, _ in seen["training steps"] if name.startswith("step")] == ["step 1", "step 2"]


def busy(line):
    return line["step_s"] - line["idle_s"]


def test_a_server_generates_when_it_neither_waits_nor_swaps(run, events):
    lines = run.generators["generation-0"]
    mine = [event for event in slices(events) if event["pid"] == perfetto.FIRST_GENERATOR]
    kinds = collections.Counter()
    for event in mine:
        kinds[event["name"].split(" ")[0]] += event["dur"] / 1e6
    assert kinds["wait"] == pytest.approx(sum(end - begin for line in lines for begin, end in line["waits"]), abs=1e-3)
    assert kinds["swap"] == pytest.approx(STEPS * 0.06, abs=1e-3)
    assert kinds["rebuild"] == pytest.approx(STEPS * 0.05, abs=1e-3)
    whole = lines[-1]["time"] - lines[0]["time"] + 1.0
    assert kinds["generate"] + kinds["wait"] + kinds["swap"] == pytest.approx(whole, abs=1e-2) and kinds["generate"] > 9


def test_an_arrow_leads_from_each_publish_to_the_swap_on_every_server(events):
    tails = {event["id"]: event for event in events if event["ph"] == "s"}
    heads = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(tails) == len(heads) == STEPS * SERVERS and tails.keys() == heads.keys()
    around = slices(events)
    for number, tail in tails.items():
        for end, kind in ((tail, "publish"), (heads[number], "swap to")):
            here = [e for e in around if (e["pid"], e["tid"]) == (end["pid"], end["tid"])]
            names = [e["name"] for e in here if e["ts"] <= end["ts"] < e["ts"] + e["dur"]]
            assert f"{kind} {tail['name']}" in names, (end, names)


def test_counters_show_what_is_in_flight_and_evaluations_are_slices(run, events):
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert {"trajectories in flight", "groups in flight", "staleness", "tokens per second", "slots active"} <= counters
    groups = [event["args"]["value"] for event in events if event["name"] == "groups in flight"]
    assert set(groups) == {128 // 8}
    assert len(slices(events, "evaluation of version")) == len(run.evaluations) == 3
    assert len(slices(events, "gate closed")) == len(run.rollout)
    assert {round(event["dur"] / 1e5) for event in slices(events, "judge")} == {1, 2}


def test_what_overlaps_by_rounding_or_a_clock_set_back_is_cut(tmp_path):
    ends = [10.0, 11.0 - 3e-6, 10.9, 12.5]  # of a second each; the third ends before the second
    write_lines(tmp_path / "metrics.jsonl", [step(v, BEGIN + end, pack_s=0.01) for v, end in enumerate(ends, start=1)])
    write_lines(tmp_path / "publishes.jsonl", [{**publish(1, BEGIN + 10), "push_s": 0.2}])  # 0.35 s of stages in 0.3
    found = perfetto.events(Run(tmp_path).update())
    assert_nested(found)
    assert [event["dur"] for event in slices(found, "servers load it")] == [150000]
    # The second begins 3 us before the first ends; the third is placed by its begin and takes what is left.
    kept = [(event["name"], event["dur"]) for event in slices(found, "step ")]
    assert kept == [("step 1", 1000000), ("step 3", 900000), ("step 2", 99997), ("step 4", 1000000)]


def test_a_server_that_was_away_did_nothing_meanwhile(tmp_path):
    line = {"interval_s": 1.0, "tokens": 5, "active": 1, "waiting": 0, "waits": [], "swapped": []}
    times = [10.0, 11.0, 50.0, 51.0]
    write_lines(tmp_path / "generation-0.jsonl", [{**line, "time": BEGIN + time} for time in times])
    found = slices(perfetto.events(Run(tmp_path).update()), "generate")
    assert [(event["ts"] / 1e6, event["dur"] / 1e6) for event in found] == [(0.0, 2.0), (40.0, 2.0)]  # from 9 on


def test_a_version_that_was_published_again_after_a_restart_has_its_own_arrow(tmp_path):
    write_lines(tmp_path / "publishes.jsonl", [publish(7, BEGIN + 10), publish(7, BEGIN + 90)])
    line = {"interval_s": 1.0, "tokens": 5, "active": 1, "waiting": 0, "waits": []}
    lines = [{**line, "time": BEGIN + at + 1, "swapped": [swap(7, BEGIN + at + 0.2)]} for at in (10, 90)]
    write_lines(tmp_path / "generation-0.jsonl", lines)
    found = perfetto.events(Run(tmp_path).update())
    arrows = [round(event["ts"] / 1e6) for event in found if event["ph"] in "sf"]
    assert arrows == [0, 0, 80, 80]  # the run begins with the first line's interval


def test_lines_that_do_not_say_when_a_server_waited_leave_its_track_empty(tmp_path):
    line = {"interval_s": 1.0, "tokens": 5, "active": 1, "waiting": 0, "time": BEGIN + 1}  # of an older run
    write_lines(tmp_path / "generation-0.jsonl", [line])
    found = perfetto.events(Run(tmp_path).update())
    assert slices(found) == [] and any(event["ph"] == "C" for event in found)


def test_a_servers_waits_and_swaps_are_written_with_the_time_of_day():
    class Scheduler:
        activity = Activity(time.monotonic)

    with Scheduler.activity.waiting():
        time.sleep(0.02)
    Scheduler.activity.swapped(Swap(4, time.monotonic(), 0.5, 0.25, 9))
    line, now = generation_server._take_activity(Scheduler()), time.time()
    ((begin, end),) = line["waits"]
    assert now - 5 < begin <= end - 0.02 < end <= line["swapped"][0]["time"] + 1e-3 <= now + 2e-3
    assert line["swapped"][0]["version"] == 4 and line["swapped"][0]["recomputed_tokens"] == 9


def test_judging_is_told_from_the_first_group_to_the_last_and_cut_where_it_is_taken():
    class Slow:
        async def score(self, completions, *, answer, prompt):
            await asyncio.sleep(float(prompt))
            return [1.0] * len(completions)

    scorer = TimedScorer(Slow())

    async def ask(*seconds):
        asked = [scorer.score(["a", "b"], answer="", prompt=str(each)) for each in seconds]
        assert await asyncio.gather(*asked) == [[1.0, 1.0]] * len(seconds)

    async def ask_all():
        began = time.time()
        await ask(0.05, 0.15)
        await ask(0.05)  # at once
        await asyncio.sleep(0.1)
        going_on = asyncio.ensure_future(ask(0.1))
        await asyncio.sleep(0.05)
        first = scorer.take()
        await going_on
        return began, first, scorer.take(), scorer.take()

    began, first, second, nothing = asyncio.run(ask_all())
    assert began <= first[0][0] and first[0][0] + 0.2 <= first[0][1] and first[0][1] + 0.09 < first[1][0]
    assert [begin for begin, _ in second] == [first[1][1]] and nothing == []


def test_the_readme_of_a_run_says_how_to_open_it():
    assert "timeline.json" in run_files.README and "ui.perfetto.dev" in run_files.README
