"""gRPC clients, and the only home of deadlines, retries and failover.

`GenerationPool` (rollout controller) asks the least busy generation server and takes what a dead one had made to
another; `TrainerClient` (rollout controller) hands over groups and listens to announcements; `push_weights` (trainer's
publisher) and `fetch_weights` (generation servers) move a version. Calls are repeated only where a repeat changes
nothing, only for the status codes named here, and only until a deadline; all else is raised with the server's text.
"""

import asyncio
import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NoReturn

import grpc
import numpy as np

from areal_jax.transport import areal_pb2 as pb
from areal_jax.transport import areal_pb2_grpc as pb_grpc
from areal_jax.transport import codec
from areal_jax.types import UNPUBLISHED, Announcement, Chunk, Completion, GenerateRequest, Progress, Trajectory
from areal_jax.weights import WeightFile, aligned_memory, parse_weights

log = logging.getLogger(__name__)

Parts = dict[int, list[Completion | Chunk]]  # what a request has so far, by sample

OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),  # a restarted server is found within a second; default: two minutes
    ("grpc.keepalive_time_ms", 20_000),  # a host that vanished without a word is noticed after 40 s
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.enable_http_proxy", 0),  # the parts of a run reach each other directly
)
RETRY_S = 0.5  # between attempts
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
ELSEWHERE = (  # a request that met these may go on with another server, or later
    grpc.StatusCode.UNAVAILABLE,  # dead, stopping, or its engine has failed
    grpc.StatusCode.RESOURCE_EXHAUSTED,  # busy
    grpc.StatusCode.CANCELLED,  # by the server: this side's own cancellation is no RpcError
)


class Unpublished(ConnectionError):
    """A restarted generation server still has the weights that it started with: its tokens count for nothing."""


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),) if token else ()


def _raise_for(error: grpc.RpcError, what: str) -> NoReturn:
    """Raises the exception that the other side's in-process object would have raised, with its text."""
    code, text = error.code(), error.details()
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        raise ValueError(text) from error
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        raise TimeoutError(f"{what}: {text}") from error
    if code is grpc.StatusCode.UNAUTHENTICATED:
        raise PermissionError(f"{what}: {text}") from error
    raise ConnectionError(f"{what}: {code.name}: {text}") from error


@dataclasses.dataclass(slots=True, eq=False)
class _GenerationServer:
    address: str
    stub: Any
    channel: Any
    outstanding: int = 0  # samples asked for and not finished
    failures: int = 0  # in a row
    retry_at: float = 0.0  # on the event loop's clock


class GenerationPool:
    """A `GenerateFn` over several servers. Belongs to one event loop, the one it is first called in.

    All samples of a request go to one server (they share its prefill). When that server dies, they go on elsewhere from
    the tokens they had, or wait for its restart, until nothing has come for `patience_s`; then ConnectionError.
    """

    def __init__(self, addresses: Sequence[str], *, token: str = "", patience_s: float = 120.0):
        self._addresses = tuple(addresses)
        self._metadata = _metadata(token)
        self._patience_s = patience_s

    @functools.cached_property
    def _servers(self) -> list[_GenerationServer]:
        channels = [grpc.aio.insecure_channel(address, options=OPTIONS) for address in self._addresses]
        return [
            _GenerationServer(address, pb_grpc.GenerationStub(channel), channel)
            for address, channel in zip(self._addresses, channels, strict=True)
        ]

    async def __call__(self, request: GenerateRequest) -> list[Completion]:
        """One completion per entry of `request.samples`, in that order."""
        loop = asyncio.get_running_loop()
        parts: Parts = {s: [request.partial[s]] if s in request.partial else [] for s in request.samples}
        give_up = math.inf
        while unfinished := [s for s in request.samples if not _finished(parts[s])]:
            server = await self._least_outstanding()
            try:
                await self._within_version(server, parts, unfinished)
                async for chunks in self._stream(server, request, parts, unfinished):
                    if any((chunk.versions[:1] == UNPUBLISHED).any() for chunk in chunks):
                        raise Unpublished(f"generation server {server.address} has no weights from the trainer yet")
                    for chunk in chunks:
                        parts[chunk.sample].append(chunk)
                    give_up = math.inf
            except grpc.aio.AioRpcError as error:
                give_up = min(give_up, loop.time() + self._patience_s)
                if error.code() not in ELSEWHERE or loop.time() > give_up:
                    _raise_for(error, f"generation server {server.address}")
                self._set_aside(server, f"{error.code().name}: {error.details()}")
            except Unpublished as error:
                give_up = min(give_up, loop.time() + self._patience_s)
                if loop.time() > give_up:
                    raise
                self._set_aside(server, str(error))
        return [joined(parts[s]) for s in request.samples]

    async def _stream(
        self, server: _GenerationServer, request: GenerateRequest, parts: Parts, samples: Sequence[int]
    ) -> AsyncIterator[list[Chunk]]:
        partial = {s: joined(parts[s]) for s in samples if parts[s]}
        message = codec.encode_request(dataclasses.replace(request, samples=tuple(samples), partial=partial))
        call = server.stub.Generate(message, metadata=self._metadata)
        server.outstanding += len(samples)
        try:
            async for answer in call:
                yield codec.decode_samples(answer)
            server.failures = 0
        finally:
            server.outstanding -= len(samples)
            call.cancel()

    async def _within_version(self, server: _GenerationServer, parts: Parts, samples: Sequence[int]) -> None:
        """Takes from what samples have the tokens of versions that this server does not hold yet.

        A server that was restarted may be behind the one that died, and versions never fall along a sequence.
        """
        if not any(parts[s] for s in samples):
            return
        status = await server.stub.Status(pb.StatusRequest(), metadata=self._metadata, timeout=self._patience_s)
        for sample in samples:
            if parts[sample]:
                kept = _up_to_version(joined(parts[sample]), int(status.values["version"]))
                parts[sample] = [kept] if len(kept.tokens) else []

    async def _least_outstanding(self) -> _GenerationServer:
        now = asyncio.get_running_loop().time()
        ready = [server for server in self._servers if server.retry_at <= now]
        if ready:
            return min(ready, key=lambda server: server.outstanding)
        server = min(self._servers, key=lambda server: server.retry_at)
        await asyncio.sleep(server.retry_at - now)
        return server

    def _set_aside(self, server: _GenerationServer, why: str) -> None:
        if not server.failures:
            log.warning("generation server %s: %s", server.address, why)
        server.failures += 1
        server.retry_at = asyncio.get_running_loop().time() + min(RETRY_S * server.failures, 4 * RETRY_S)

    async def status(self) -> dict[str, dict[str, float]]:
        """What each server that answers says of itself, by address."""
        answers = await asyncio.gather(
            *(s.stub.Status(pb.StatusRequest(), metadata=self._metadata, timeout=5.0) for s in self._servers),
            return_exceptions=True,
        )
        return {
            address: dict(answer.values)
            for address, answer in zip(self._addresses, answers, strict=True)
            if not isinstance(answer, BaseException)
        }

    async def close(self) -> None:
        for server in self._servers:
            await server.channel.close()


def _finished(parts: Sequence[Completion | Chunk]) -> bool:
    return bool(parts) and bool(parts[-1].finish_reason)


def joined(parts: Sequence[Completion | Chunk]) -> Completion:
    """One completion from what came of a sample in order, some of it perhaps from a server that died."""
    return Completion(
        tokens=np.concatenate([part.tokens for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        finish_reason=parts[-1].finish_reason,
    )


def _up_to_version(completion: Completion, version: int) -> Completion:
    count = int(np.searchsorted(completion.versions, version, side="right"))
    return Completion(
        completion.tokens[:count], completion.logprobs[:count], completion.versions[:count], completion.finish_reason
    )


class TrainerClient:
    """The rollout controller's line to the trajectory queue. Belongs to one event loop, the one it is first called in.

    `put` and `discard` may be repeated, since the queue takes each uid once; they and `progress` are, while the trainer
    is away, for `patience_s`.
    """

    def __init__(self, address: str, *, token: str = "", patience_s: float = 60.0):
        self._address = address
        self._metadata = _metadata(token)
        self._patience_s = patience_s

    @functools.cached_property
    def _channel(self) -> Any:
        return grpc.aio.insecure_channel(self._address, options=OPTIONS)

    @functools.cached_property
    def _stub(self) -> Any:
        return pb_grpc.TrainerStub(self._channel)

    async def put(self, group: Sequence[Trajectory]) -> bool:
        """Hands over a whole group; False when the queue had this uid before."""
        return (await self._call(self._stub.Put, codec.encode_trajectories(group))).accepted

    async def discard(self, uid: int, count: int, cause: str) -> None:
        await self._call(self._stub.Discard, pb.DiscardRequest(uid=uid, count=count, cause=cause))

    async def progress(self) -> Progress:
        return codec.decode_progress(await self._call(self._stub.Progress, pb.ProgressRequest()))

    async def status(self) -> dict[str, float]:
        return dict((await self._call(self._stub.Status, pb.StatusRequest())).values)

    async def get(self, version: int, timeout_s: float) -> list[Trajectory]:
        """A batch, for a trainer in another process than the queue; TimeoutError as from the queue's own `get`.

        Never repeated: a batch that is lost on the way is gone.
        """
        call = self._stub.Get(pb.GetRequest(version=version, timeout_s=timeout_s), metadata=self._metadata)
        try:
            return [trajectory async for group in call for trajectory in codec.decode_trajectories(group)]
        except grpc.aio.AioRpcError as error:
            _raise_for(error, f"trainer {self._address}")

    async def announcements(self) -> AsyncIterator[Announcement]:
        """The current announcement, then every change; ends after one that says finished."""
        loop = asyncio.get_running_loop()
        give_up = math.inf
        while True:
            try:
                async for message in self._stub.Announcements(pb.AnnouncementsRequest(), metadata=self._metadata):
                    give_up = math.inf
                    announcement = codec.decode_announcement(message)
                    yield announcement
                    if announcement.finished:
                        return
            except grpc.aio.AioRpcError as error:
                give_up = min(give_up, loop.time() + self._patience_s)
                await self._again(error, give_up)

    async def _call(self, method: Any, message: Any) -> Any:
        give_up = asyncio.get_running_loop().time() + self._patience_s
        while True:
            try:
                return await method(message, metadata=self._metadata, timeout=self._patience_s)
            except grpc.aio.AioRpcError as error:
                await self._again(error, give_up)

    async def _again(self, error: grpc.aio.AioRpcError, give_up: float) -> None:
        """Waits before the next attempt, or raises when there is to be none."""
        if error.code() is not grpc.StatusCode.UNAVAILABLE or asyncio.get_running_loop().time() > give_up:
            _raise_for(error, f"trainer {self._address}")
        await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        await self._channel.close()


def push_weights(
    addresses: Sequence[str],
    file: WeightFile,
    *,
    on_update: Literal["", "recompute", "keep", "drain"] = "",
    source: str = "",
    token: str = "",
    timeout_s: float = 120.0,
    stop: threading.Event | None = None,
    least: Literal["one", "all"] = "one",
) -> dict[str, float]:
    """Tells every generation server to load a version; returns the seconds that each stood still, by address.

    Servers map `file.path`, or fetch its bytes from the trainer at address `source`. One that cannot be reached is
    tried again as long as no other server holds the version (and `stop` is not set), then left out with a warning: it
    gets the next one. With `least="all"` none is left out: the first version of a run, as a server without it would go
    on with weights that nobody published. Raises ValueError when a server refused (it still serves the version before),
    TimeoutError or ConnectionError when after `timeout_s` the least is not reached, each with the servers' texts.
    """
    request = pb.UpdateWeightsRequest(
        version=file.version,
        checksum=file.checksum,
        path=file.path,
        source=source,
        on_update=pb.OnUpdate.Value(on_update.upper() or "SERVER_DEFAULT"),
    )
    push = _Push(request, _metadata(token), time.monotonic() + timeout_s, stop or threading.Event(), least)
    with ThreadPoolExecutor(len(addresses)) as threads:
        outcomes = dict(zip(addresses, threads.map(push.to, addresses), strict=True))
    held = {address: outcome for address, outcome in outcomes.items() if isinstance(outcome, float)}
    refused = {address: outcome for address, outcome in outcomes.items() if isinstance(outcome, str)}
    away = {address: outcome for address, outcome in outcomes.items() if isinstance(outcome, grpc.RpcError)}
    if refused:
        texts = "; ".join(f"{address}: {text}" for address, text in refused.items())
        raise ValueError(f"version {file.version} was refused, and the version before is still served: {texts}")
    for address, error in away.items():
        what = f"version {file.version} is not held by generation server {address} (weights.timeout_s={timeout_s:g})"
        if not held or least == "all" or error.code() not in AWAY:
            _raise_for(error, what)
        log.warning("%s: %s: %s", what, error.code().name, error.details())
    return held


@dataclasses.dataclass(slots=True)
class _Push:
    """One version on its way to several servers, each on a thread."""

    request: pb.UpdateWeightsRequest
    metadata: tuple[tuple[str, str], ...]
    deadline: float
    stop: threading.Event
    least: Literal["one", "all"]
    held: threading.Event = dataclasses.field(default_factory=threading.Event)  # by any server

    def to(self, address: str) -> float | str | grpc.RpcError:
        """Seconds of stall, or why the server refused, or why it could not be asked."""
        with grpc.insecure_channel(address, options=OPTIONS) as channel:
            stub = pb_grpc.GenerationStub(channel)
            while True:
                try:
                    reply = stub.UpdateWeights(self.request, metadata=self.metadata, timeout=self._left())
                    break
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE or self.held.wait(min(RETRY_S, self._left())):
                        return error
                    if self._left() <= 0 or self.stop.is_set():
                        return error
                    if self._holds(stub):  # it was loaded, and only the reply was lost
                        reply = pb.UpdateWeightsReply()
                        break
        if reply.error:
            return reply.error
        if self.least == "one":
            self.held.set()
        return reply.stall_s

    def _left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _holds(self, stub: Any) -> bool:
        try:
            status = stub.Status(pb.StatusRequest(), metadata=self.metadata, timeout=self._left())
        except grpc.RpcError:  # still away; the next attempt will say so
            return False
        return int(status.values["version"]) == self.request.version


def fetch_weights(
    address: str,
    *,
    version: int | None = None,
    checksum: int | None = None,
    token: str = "",
    timeout_s: float = 120.0,
) -> tuple[int, dict[str, np.ndarray]]:
    """Version and parameters from the trainer at `address`: of a version, or of the newest.

    Raises ValueError when the bytes do not have the `checksum` that was announced (default: the trainer's own).
    """
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        pieces = pb_grpc.TrainerStub(channel).FetchWeights(
            pb.FetchWeightsRequest(version=version), metadata=_metadata(token), timeout=timeout_s
        )
        try:
            head = next(pieces)
            data = aligned_memory(head.size)
            end = 0
            for piece in pieces:
                got = np.frombuffer(piece.data, np.uint8)  # the field is copied whenever it is asked for
                begin, end = end, end + len(got)
                data[begin:end] = got
        except grpc.RpcError as error:
            _raise_for(error, f"weights from the trainer at {address}")
    return parse_weights(data[:end], head.checksum if checksum is None else checksum, f"the trainer at {address}")
