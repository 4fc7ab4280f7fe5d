"""The numbers of a generation server in Prometheus's text format.

In: a scheduler's status and telemetry, read anew for each scrape. Out: the text that `/metrics` answers. Called by
`http_server`. Waits for nobody. All requests count, whichever service brought them: gRPC, HTTP or JetStream's Decode.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from areal_jax.telemetry import Histogram, Telemetry
from areal_jax.types import UNPUBLISHED

PREFIX = "areal_generation_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Observed(Protocol):
    """What is shown of `areal_jax.generation.scheduler.Scheduler`."""

    telemetry: Telemetry

    def status(self) -> dict[str, float]: ...


# name, what it means, its key in the status. Prometheus adds _total to counters.
STATUS_COUNTERS = (
    ("samples", "Samples (n per request) that were accepted", "requests"),
    ("tokens", "Tokens sampled", "tokens"),
    ("recomputed_tokens", "Tokens whose cache was rebuilt under new weights", "recomputed_tokens"),
    ("swaps", "Weight swaps", "swaps"),
    ("busy_seconds", "Seconds spent in turns that decode", "busy_s"),
    ("compilations", "Programs compiled, or loaded from the cache on disk; rises during warm-up only", "compilations"),
)
STATUS_GAUGES = (
    ("slots_in_use", "Slots that hold a sequence", "active"),
    ("queue_samples", "Samples that wait for a slot", "waiting"),
    ("weights_version", f"Version of the weights in use; {UNPUBLISHED}: those that the server started with", "version"),
)


class GenerationCollector(Collector):
    """`find` gives the scheduler, or None while there is none yet: then only `ready` is shown."""

    def __init__(self, find: Callable[[], Observed | None], ready: Callable[[], bool]):
        self._find = find
        self._ready = ready

    def collect(self) -> Iterator[Metric]:
        yield _gauge("ready", "1 when the server is warm and serves", self._ready())
        scheduler = self._find()
        if scheduler is None:
            return
        status, telemetry = scheduler.status(), scheduler.telemetry
        for name, meaning, key in STATUS_COUNTERS:
            yield CounterMetricFamily(PREFIX + name, meaning, value=status[key])
        for name, meaning, key in STATUS_GAUGES:
            yield _gauge(name, meaning, status[key])
        yield from _telemetry(telemetry)


def _telemetry(telemetry: Telemetry) -> Iterator[Metric]:
    yield CounterMetricFamily(PREFIX + "requests", "Requests that were accepted", value=telemetry.requests)
    yield CounterMetricFamily(PREFIX + "prompt_tokens", "Tokens of their prompts", value=telemetry.prompt_tokens)
    yield _by_reason("ended_samples", "Samples that ended, by reason", telemetry.ended)
    yield _by_reason("refused_requests", "Requests that were refused, by reason", telemetry.refused)
    yield _gauge("slots", "Slots in all", telemetry.slots)
    yield _gauge("tokens_per_second", "Tokens sampled per second, over ten seconds", telemetry.tokens.per_second())
    yield _gauge("cache_bytes", "Memory of the key/value cache of all slots", telemetry.cache_bytes)
    yield _gauge("weight_bytes", "Memory of one set of weights", telemetry.weight_bytes)
    yield _histogram(
        "time_to_first_token_seconds",
        "From request to first token of a sample, waiting for a slot included",
        telemetry.time_to_first_token_s,
    )
    yield _histogram(
        "time_per_output_token_seconds",
        "Mean over a sample's tokens after those of its first dispatch; one observation per sample",
        telemetry.time_per_token_s,
    )
    yield _histogram("swap_stall_seconds", "How long decoding stood still for new weights", telemetry.swap_stall_s)


def registry(find: Callable[[], Observed | None], ready: Callable[[], bool]) -> CollectorRegistry:
    """A registry of its own for each server, so that several in one process do not mix."""
    made = CollectorRegistry()
    made.register(GenerationCollector(find, ready))
    return made


def text(of: CollectorRegistry) -> bytes:
    return generate_latest(of)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, meaning, value=float(value))


def _by_reason(name: str, meaning: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, meaning, labels=["reason"])
    for reason, count in sorted(counts.items()):
        family.add_metric([reason], count)
    return family


def _histogram(name: str, meaning: str, histogram: Histogram) -> Metric:
    edges = [*map(str, histogram.bounds), "+Inf"]
    buckets = list(zip(edges, histogram.cumulative(), strict=True))
    return HistogramMetricFamily(PREFIX + name, meaning, buckets=buckets, sum_value=histogram.sum)
