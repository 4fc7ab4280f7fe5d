"""The HTTP side of a generation server: OpenAI's API, Prometheus metrics, liveness and readiness.

In: a scheduler, once it is warm, and requests over HTTP. Out: answers whole or streamed (server-sent events). Called by
`launch/`. Runs in a thread with an event loop of its own, so that it answers `/readyz` while the engine compiles; the
engine's thread hands tokens over and never waits for a client, however slowly that one reads.

    /v1/models, /v1/completions, /v1/chat/completions    see `openai_request` and `openai_answer`
    /metrics                                             see `prometheus`
    /healthz    200 while the engine lives (or compiles), else 503 with what ended it
    /readyz     200 when it serves, else 503 with the reason

A client that goes away cancels its request. With a token set, everything but the last two wants it as a bearer.
"""

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from aiohttp import web

from areal_jax import addresses
from areal_jax.transport import generation_service, openai_request, prometheus
from areal_jax.transport.generation_service import stream_chunks
from areal_jax.transport.openai_answer import Answer, Part
from areal_jax.transport.openai_request import ApiError, Asked, Tokenizer
from areal_jax.types import Busy, Chunk

log = logging.getLogger(__name__)

MAX_BODY = 64 * 2**20  # bytes of a request: a list of long prompts as token ids
OPEN = ("/healthz", "/readyz")  # who watches processes has no token
READ_S = 60.0  # that the body of a request may take to come
SHUTDOWN_S = 0.1  # that requests may still take when the server stops; 0 is for ever to aiohttp
RETRY_AFTER_S = 1  # what a busy server tells its clients
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Scheduler(generation_service.Scheduler, prometheus.Observed, Protocol):
    """`areal_jax.generation.scheduler.Scheduler`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """What is served: its name in requests, its tokenizer, and the most tokens of a sequence, alternatives of each."""

    name: str
    tokenizer: Tokenizer
    max_length: int
    top_logprobs: int = 0


class HttpServer:
    """A running server. `serve(scheduler)` opens it; until then it says that it is not ready. `url` has the real port.

    Raises ValueError for an address that is not "host:port" or that needs a token, OSError for a port in use.
    """

    def __init__(self, model: Model, *, address: str, token: str = ""):
        addresses.check_guarded(address, token)
        self._model = model
        self._token = token
        self._scheduler: Scheduler | None = None
        self._reason = "the engine loads the model and compiles"
        self._created = int(time.time())
        self._metrics = prometheus.registry(lambda: self._scheduler, self._is_ready)
        host, port = addresses.split(address)
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        started: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, args=(host, port, started), name="http-server", daemon=True)
        self._thread.start()
        self.url = f"http://{addresses.with_port(address, started.result())}"

    def serve(self, scheduler: Scheduler) -> None:
        """From here on requests go to this scheduler, which is warm."""
        self._scheduler = scheduler

    def stop(self) -> None:
        """Ends requests that still run, and waits."""
        self._reason = "the server is stopping"
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def _run(self, host: str, port: int, started: "Future[int]") -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen(host, port, started))

    async def _listen(self, host: str, port: int, started: "Future[int]") -> None:
        runner = web.AppRunner(
            self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S, handle_signals=False
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
        except OSError as error:
            taken = OSError(addresses.cannot_listen(f"http address {host}:{port}", str(error.strerror)))
            taken.__cause__ = error
            started.set_exception(taken)
        else:
            started.set_result(runner.addresses[0][1])
            await self._stopping.wait()
        await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[_errors_as_json, self._check_token], client_max_size=MAX_BODY)
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._one_model),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.get("/metrics", self._show_metrics),
                web.get("/healthz", self._health),
                web.get("/readyz", self._readiness),
            ]
        )
        return app

    @web.middleware
    async def _check_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "")
        open_to_all = not self._token or request.path in OPEN
        if open_to_all or hmac.compare_digest(shown.encode(), f"Bearer {self._token}".encode()):
            return await handler(request)
        raise ApiError(
            401,
            "this server wants the run's token (its AREAL_JAX_TOKEN) as the API key: Authorization: Bearer TOKEN",
            code="invalid_api_key",
        )

    # Who watches.

    def _is_ready(self) -> bool:
        return self._scheduler is not None and self._scheduler.failure is None and not self._stopping.is_set()

    def _failure(self) -> str:
        failure = None if self._scheduler is None else self._scheduler.failure
        return "" if failure is None else f"the generation engine has ended: {failure!r}"

    async def _health(self, request: web.Request) -> web.Response:
        failure = self._failure()
        return web.Response(status=503, text=f"{failure}\n") if failure else web.Response(text="alive\n")

    async def _readiness(self, request: web.Request) -> web.Response:
        if self._is_ready():
            return web.Response(text="ready\n")
        return web.Response(status=503, text=f"{self._failure() or self._reason}\n")

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=prometheus.text(self._metrics), headers={"Content-Type": prometheus.CONTENT_TYPE})

    # Models.

    def _describe(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "areal_jax",
            "max_model_len": self._model.max_length,
        }

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._describe()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["name"])
        return web.json_response(self._describe())

    def _check_model(self, name: str) -> None:
        if name != self._model.name:
            raise ApiError(
                404,
                f"model {name!r} is not served here; {self._model.name!r} is",
                param="model",
                code="model_not_found",
            )

    # Completions.

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, openai_request.read_completion)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, openai_request.read_chat)

    async def _answer(self, request: web.Request, read: Callable[..., Asked]) -> web.StreamResponse:
        scheduler = self._scheduler
        if scheduler is None or not self._is_ready():
            raise ApiError(503, f"not ready: {self._failure() or self._reason}", code="not_ready")
        try:
            async with asyncio.timeout(READ_S):
                data = await request.read()
        except TimeoutError as error:
            raise ApiError(408, f"the body has not come within {READ_S:g} s", code="timeout") from error
        except web.RequestPayloadError as error:  # not compressed as its headers say
            raise ApiError(400, f"the body cannot be read: {error}") from error
        asked = await asyncio.to_thread(self._read, read, data)  # a long text holds nobody else up
        self._check_model(asked.model)
        answer = Answer(asked, self._model.name, self._model.tokenizer)
        async with contextlib.aclosing(parts(scheduler, asked, answer)) as arriving:
            if asked.stream:
                return await _stream(request, asked, answer, arriving)
            return await _whole(asked, answer, arriving)

    def _read(self, read: Callable[..., Asked], data: bytes) -> Asked:
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or a list in a list in a list
            raise ApiError(400, f"the body is not JSON: {error}") from error
        model = self._model
        return read(body, model.tokenizer, max_length=model.max_length, top_logprobs=model.top_logprobs)


async def _whole(asked: Asked, answer: Answer, arriving: AsyncIterator[tuple[int, Part]]) -> web.Response:
    collected: list[list[Part]] = [[] for _ in range(asked.choices)]
    async for index, part in arriving:
        collected[index].append(part)
    return web.json_response(answer.whole(collected))


async def _stream(
    request: web.Request, asked: Asked, answer: Answer, arriving: AsyncIterator[tuple[int, Part]]
) -> web.StreamResponse:
    """Server-sent events. The headers wait for the first tokens, so that what fails before has a status of its own."""
    index, part = await anext(arriving)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        await _send(response, answer.piece(index, part))
        async for index, part in arriving:
            await _send(response, answer.piece(index, part))
        if asked.include_usage:
            await _send(response, answer.closing())
        await response.write(b"data: [DONE]\n\n")
    except ApiError as error:  # too late for a status: the stream says it, and ends without [DONE]
        await _send(response, error.body())
    except ConnectionResetError:
        raise
    except Exception as error:
        await _send(response, _own_mistake(request, error).body())
    await response.write_eof()
    return response


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event, allow_nan=False)}\n\n".encode())


async def parts(scheduler: Scheduler, asked: Asked, answer: Answer) -> AsyncGenerator[tuple[int, Part], None]:
    """(choice, what it got), as it comes, until all choices have ended. Raises ApiError."""
    try:
        streams = [stream_chunks(scheduler, request) for request in asked.requests]
        async with contextlib.aclosing(merged(streams)) as arriving:
            async for prompt, chunks in arriving:
                for chunk in chunks:
                    index = answer.index(prompt, chunk.sample)
                    yield index, answer.choices[index].add(chunk)
    except Busy as error:
        raise ApiError(429, str(error), code="busy") from error
    except TimeoutError as error:
        raise ApiError(408, str(error), param="timeout_s", code="deadline_exceeded") from error
    except ValueError as error:
        raise ApiError(400, str(error)) from error
    except RuntimeError as error:
        raise ApiError(503, str(error), code="engine_failed") from error


async def merged(
    streams: Sequence[AsyncGenerator[list[Chunk], None]],
) -> AsyncGenerator[tuple[int, list[Chunk]], None]:
    """(which stream, its chunks) of many streams, as they come. Raises what one of them raises, and closes them all."""
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                if isinstance(task.exception(), StopAsyncIteration):
                    continue
                yield index, task.result()
                waiting[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error in OpenAI's form."""
    try:
        return await handler(request)
    except ApiError as error:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status in (429, 503) else {}
        return web.json_response(error.body(), status=error.status, headers=headers)
    except web.HTTPException as error:  # no such path, another method, too large
        told = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
        return web.json_response(told.body(), status=error.status, headers=_allowed(error))
    except ConnectionResetError:  # the client is gone, and its request cancelled: nobody reads an answer
        raise
    except Exception as error:
        return web.json_response(_own_mistake(request, error).body(), status=500)


def _own_mistake(request: web.Request, error: Exception) -> ApiError:
    log.exception("%s %s failed", request.method, request.path)
    return ApiError(500, f"this server made a mistake: {type(error).__name__}: {error}", code="internal_error")


def _allowed(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
