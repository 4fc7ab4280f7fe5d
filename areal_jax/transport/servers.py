"""Starts the gRPC servers of a generation server and of the trainer.

In: a generation scheduler or a trajectory queue, and an address to listen on. Out: a `Server` with the real address.
Called by `launch/`. The generation server (grpc.aio, in a thread with its own event loop) answers our Generation
service and JetStream's Decode beside it; the trainer's server answers from a pool of threads, since its calls wait.
Beyond loopback both want a shared token, which callers carry as metadata.
"""

import asyncio
import dataclasses
import hmac
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from jetstream.core.proto import jetstream_pb2_grpc

from areal_jax import addresses
from areal_jax.trajectory_queue import TrajectoryQueue
from areal_jax.transport import areal_pb2_grpc as pb_grpc
from areal_jax.transport.generation_service import GenerationServicer, Scheduler
from areal_jax.transport.jetstream_decode import DecodeServicer, Tokenizer
from areal_jax.transport.trainer_service import TrainerServicer

OPTIONS = (
    ("grpc.so_reuseport", 0),  # gRPC's default lets two servers share a port, each getting some of the calls
    ("grpc.max_receive_message_length", -1),  # a group of long answers is more than the default of 4 MiB
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # clients ping while they wait for tokens
    ("grpc.http2.max_ping_strikes", 0),
)
TRAINER_THREADS = 64  # calls at a time; each generation server that fetches weights and each announcement stream is one


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """A running server; `address` has the real port. `stop()` ends calls that still run, and waits."""

    address: str
    stop: Callable[[], None]


@dataclasses.dataclass(frozen=True, slots=True)
class TrainerServer(Server):
    """`heard` is set when the controller has been told that training is finished."""

    heard: threading.Event


def serve_generation(
    scheduler: Scheduler,
    *,
    address: str,
    tokenizer: Tokenizer,
    token: str = "",
    max_new_tokens: int = 1024,
    max_length: int = 2**31 - 1,
    temperature: float = 1.0,
    seed: int = 0,
) -> Server:
    """Serves a scheduler, and JetStream's clients with it; what follows the token is for those alone.

    Raises ValueError for an address that is not "host:port" or that needs a token, OSError for a port in use.
    """
    addresses.check_guarded(address, token)
    limits = {"max_new_tokens": max_new_tokens, "max_length": max_length}
    decode = DecodeServicer(scheduler, tokenizer, **limits, temperature=temperature, seed=seed)
    started: futures.Future[tuple[int, Callable[[], object]]] = futures.Future()

    async def serve() -> None:
        server = grpc.aio.server(options=OPTIONS, interceptors=[_AsyncTokenCheck(token)] if token else [])
        pb_grpc.add_GenerationServicer_to_server(GenerationServicer(scheduler, token=token), server)
        jetstream_pb2_grpc.add_OrchestratorServicer_to_server(decode, server)
        stopping, loop = asyncio.Event(), asyncio.get_running_loop()
        port = _listen(server, address)
        await server.start()
        started.set_result((port, lambda: loop.call_soon_threadsafe(stopping.set)))
        await stopping.wait()
        await server.stop(grace=0)

    def run() -> None:
        try:
            asyncio.run(serve())
        except OSError as error:  # from `_listen`: belongs to whoever asked for the server
            started.set_exception(error)

    thread = threading.Thread(target=run, name="generation-server", daemon=True)
    thread.start()
    port, begin_stop = started.result()

    def stop() -> None:
        if thread.is_alive():
            begin_stop()
            thread.join()

    return Server(addresses.with_port(address, port), stop)


def serve_trainer(
    queue: TrajectoryQueue, *, address: str, token: str = "", weights_directory: str = ""
) -> TrainerServer:
    """Serves a trajectory queue, and the weight files of a directory. Raises as `serve_generation` does."""
    addresses.check_guarded(address, token)
    threads = futures.ThreadPoolExecutor(TRAINER_THREADS, thread_name_prefix="trainer-server")
    server = grpc.server(threads, options=OPTIONS, interceptors=[_TokenCheck(token)] if token else [])
    servicer = TrainerServicer(queue, weights_directory)
    pb_grpc.add_TrainerServicer_to_server(servicer, server)
    port = _listen(server, address)
    server.start()

    def stop() -> None:
        server.stop(grace=0).wait()
        threads.shutdown()

    return TrainerServer(addresses.with_port(address, port), stop, servicer.heard)


def _listen(server: Any, address: str) -> int:
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        reason = "another process has this port, or the host is none of this machine's"
        raise OSError(addresses.cannot_listen(address, reason)) from error


def _has_token(details: Any, token: str) -> bool:
    shown = dict(details.invocation_metadata).get("authorization", "")
    return hmac.compare_digest(str(shown).encode(), f"Bearer {token}".encode())


NO_TOKEN = "this server wants the run's token; set the same AREAL_JAX_TOKEN in the environment of every process"


class _TokenCheck(grpc.ServerInterceptor):
    def __init__(self, token: str):
        self._token = token

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        if _has_token(details, self._token):
            return continuation(details)
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, NO_TOKEN)
        )


class _AsyncTokenCheck(grpc.aio.ServerInterceptor):
    def __init__(self, token: str):
        self._token = token

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        if _has_token(details, self._token):
            return await continuation(details)

        async def refuse(request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, NO_TOKEN)

        return grpc.unary_unary_rpc_method_handler(refuse)
