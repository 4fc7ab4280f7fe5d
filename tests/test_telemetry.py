from areal_jax.telemetry import RATE_S, Activity, Histogram, Progress, Rate, Swap, Telemetry


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_histogram_counts_what_is_at_most_each_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert histogram.cumulative() == [2, 3, 4]  # at most 1, at most 2, all
    assert histogram.sum == 12.0


def test_a_rate_is_over_the_last_whole_seconds_and_forgets_older_ones():
    clock = Clock()
    rate = Rate(clock)
    for second in range(15):
        clock.now = 100.0 + second
        rate.add(7)
        rate.add(3)
    assert rate.per_second() == 10.0  # the second that goes on is not counted
    clock.now += 5.5
    assert rate.per_second() == 10 * (RATE_S - 4) / RATE_S  # nothing in the four seconds since
    clock.now += 100
    assert rate.per_second() == 0.0


def test_first_token_and_time_per_token_are_those_of_the_samples_own_dispatches():
    clock = Clock()
    telemetry = Telemetry(clock=clock, slots=1, cache_bytes=1, weight_bytes=1)
    progress = Progress(telemetry.accept(prompt_tokens=5))
    clock.now += 2.0
    telemetry.advance(progress, 8)  # all of one dispatch come together
    clock.now += 1.0
    telemetry.advance(progress, 2)
    clock.now += 1.0
    telemetry.advance(progress, 2)
    telemetry.finish(progress, "length")
    assert telemetry.time_to_first_token_s.sum == 2.0
    assert telemetry.time_per_token_s.sum == 0.5  # two seconds for the four tokens after the first dispatch
    assert (telemetry.requests, telemetry.prompt_tokens, telemetry.ended["length"]) == (1, 5, 1)


def test_a_sample_of_one_dispatch_has_no_time_per_token():
    telemetry = Telemetry(clock=Clock(), slots=1, cache_bytes=1, weight_bytes=1)
    progress = Progress(telemetry.accept(prompt_tokens=1))
    telemetry.advance(progress, 3)
    telemetry.finish(progress, "stop")
    assert telemetry.time_per_token_s.cumulative()[-1] == 0
    assert telemetry.time_to_first_token_s.cumulative()[-1] == 1


def test_waits_for_work_are_noted_with_their_times_and_short_ones_are_not():
    clock = Clock()
    activity = Activity(clock)
    for seconds in (2.0, 0.001):
        with activity.waiting():
            clock.now += seconds
        clock.now += 1.0
    assert activity.take() == ([(100.0, 102.0)], [])
    assert activity.take() == ([], [])


def test_a_wait_that_goes_on_is_cut_where_it_is_taken():
    clock = Clock()
    activity = Activity(clock)
    with activity.waiting():
        clock.now = 105.0
        assert activity.take() == ([(100.0, 105.0)], [])
        clock.now = 106.0
    assert activity.take() == ([(105.0, 106.0)], [])


def test_swaps_are_handed_out_once():
    activity = Activity(Clock())
    swap = Swap(version=3, ended=101.0, stall_s=0.5, recompute_s=0.25, recomputed_tokens=7)
    activity.swapped(swap)
    assert activity.take() == ([], [swap]) and activity.take() == ([], [])
