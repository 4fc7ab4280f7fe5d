"""The Generation service: decodes, calls the scheduler, encodes.

In: `areal.proto`'s messages, on the event loop of `servers.serve_generation`. Out: tokens as the engine's thread hands
them over; a weight update's stall or the text of its error. Waits for the scheduler only.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import grpc
import numpy as np

from areal_jax import weights
from areal_jax.transport import areal_pb2 as pb
from areal_jax.transport import areal_pb2_grpc as pb_grpc
from areal_jax.transport import clients, codec
from areal_jax.types import Busy, Chunk, Completion, GenerateRequest


class Scheduler(Protocol):
    """What a generation server serves: `areal_jax.generation.scheduler.Scheduler`."""

    failure: Exception | None

    def submit(
        self,
        request: GenerateRequest,
        on_chunks: Callable[[list[Chunk]], None],
        on_error: Callable[[Exception], None],
    ) -> int: ...

    def cancel(self, ticket: int) -> None: ...

    def update_weights(
        self,
        params: Mapping[str, np.ndarray],
        version: int,
        on_update: Any = None,
        confirm: Callable[[], object] = lambda: None,
    ) -> Future[float]: ...

    def status(self) -> dict[str, float]: ...


async def stream_chunks(scheduler: Scheduler, request: GenerateRequest) -> AsyncGenerator[list[Chunk], None]:
    """Submits a request and yields its chunks as they come; what came while the reader was busy comes together.

    Raises what `submit` raises, TimeoutError when the request's time is over, and RuntimeError when the engine fails.
    Leaving early cancels the request.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[list[Chunk] | Exception] = asyncio.Queue()

    def hand_over(item: list[Chunk] | Exception) -> None:  # on the engine's thread
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped, and nobody listens
            loop.call_soon_threadsafe(arrived.put_nowait, item)

    ticket = scheduler.submit(request, hand_over, hand_over)
    unfinished = set(request.samples)
    try:
        while unfinished:
            items = [await arrived.get()]
            while not arrived.empty():
                items.append(arrived.get_nowait())
            chunks: list[Chunk] = []
            for item in items:
                if isinstance(item, TimeoutError):
                    raise item
                if isinstance(item, Exception):
                    raise RuntimeError(f"the generation engine failed: {item!r}") from item
                chunks += item
            unfinished -= {chunk.sample for chunk in chunks if chunk.finish_reason}
            yield chunks
    finally:
        if unfinished:
            scheduler.cancel(ticket)


async def completions(scheduler: Scheduler, request: GenerateRequest) -> list[Completion]:
    """A `GenerateFn`'s answer from a scheduler of this process, without a network."""
    parts: clients.Parts = {s: [request.partial[s]] if s in request.partial else [] for s in request.samples}
    async for chunks in stream_chunks(scheduler, request):
        for chunk in chunks:
            parts[chunk.sample].append(chunk)
    return [clients.joined(parts[s]) for s in request.samples]


@contextlib.asynccontextmanager
async def answering(context: Any) -> AsyncIterator[None]:
    """Turns what a scheduler raises into status codes with its text."""
    try:
        yield
    except Busy as error:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
    except ValueError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except TimeoutError as error:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
    except RuntimeError as error:
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))


class GenerationServicer(pb_grpc.GenerationServicer):
    """`token` is what this server shows to the trainer when it fetches weights from it."""

    def __init__(self, scheduler: Scheduler, *, token: str = ""):
        self._scheduler = scheduler
        self._token = token

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        async with answering(context):
            stream = stream_chunks(self._scheduler, codec.decode_request(request))
            async with contextlib.aclosing(stream):
                async for chunks in stream:
                    await context.write(codec.encode_samples(chunks))

    async def UpdateWeights(self, request: pb.UpdateWeightsRequest, context: Any) -> pb.UpdateWeightsReply:
        """Reading, checking and loading run in a thread, beside decoding; only the swap itself stops that.

        Without `generation.double_buffer` loading is a part of the swap.
        """
        try:
            swapped = await asyncio.to_thread(self._load, request)
            # Shielded: a caller that gives up must not cancel a future that the engine is about to fulfil.
            stall_s = await asyncio.shield(asyncio.wrap_future(swapped))
        except (ValueError, OSError) as error:
            return pb.UpdateWeightsReply(error=str(error))
        except RuntimeError as error:  # the engine has ended, or goes on with the weights that it has
            if self._scheduler.failure is not None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            return pb.UpdateWeightsReply(error=str(error))
        return pb.UpdateWeightsReply(stall_s=stall_s)

    def _load(self, request: pb.UpdateWeightsRequest) -> Future[float]:
        if request.source:
            return self._update(
                request,
                *clients.fetch_weights(
                    request.source, version=request.version, checksum=request.checksum, token=self._token
                ),
            )
        version, params, check = weights.map_weights(request.path, request.checksum)
        with ThreadPoolExecutor(1) as beside:  # all bytes are read for the check, and none to hand them to a CPU device
            checked = beside.submit(check)
            try:
                return self._update(request, version, params, checked.result)
            except ValueError:
                checked.result()  # of torn weights that is what there is to say
                raise

    def _update(
        self,
        request: pb.UpdateWeightsRequest,
        version: int,
        params: Mapping[str, np.ndarray],
        confirm: Callable[[], object] = lambda: None,
    ) -> Future[float]:
        if version != request.version:
            raise ValueError(f"version {request.version} was announced, but these are the weights of version {version}")
        on_update = pb.OnUpdate.Name(request.on_update).lower() if request.on_update else None
        return self._scheduler.update_weights(params, version, on_update, confirm)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        return pb.StatusReply(values=self._scheduler.status())
