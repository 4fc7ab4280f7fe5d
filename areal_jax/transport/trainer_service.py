"""The Trainer service: decodes, calls the trajectory queue, encodes.

In: `areal.proto`'s messages, on threads of `servers.serve_trainer`. Out: what the queue answers, and the bytes of
weight files for servers on other hosts. What a controller calls waits until the queue is opened by the first
announcement; `Get` and `Announcements` wait for the queue too, all of them until their caller is gone.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from areal_jax.trajectory_queue import TrajectoryQueue
from areal_jax.transport import areal_pb2 as pb
from areal_jax.transport import areal_pb2_grpc as pb_grpc
from areal_jax.transport import codec
from areal_jax.weights import find_weights, open_weights

PIECE_BYTES = 1 << 19  # of weights per message
POLL_S = 0.5  # how late a call that waits notices that its caller is gone


class TrainerServicer(pb_grpc.TrainerServicer):
    def __init__(self, queue: TrajectoryQueue, weights_directory: str = ""):
        self._queue = queue
        self._weights_directory = weights_directory
        self.heard = threading.Event()  # somebody was told that training is finished

    def _wait_opened(self, context: Any) -> None:
        while context.is_active() and not self._queue.wait_opened(POLL_S):
            pass

    def Put(self, request: pb.Trajectories, context: Any) -> pb.PutReply:
        self._wait_opened(context)
        with answering(context):
            return pb.PutReply(accepted=self._queue.put(codec.decode_trajectories(request)))

    def Discard(self, request: pb.DiscardRequest, context: Any) -> pb.DiscardReply:
        self._wait_opened(context)
        self._queue.discard(request.uid, request.count, request.cause)
        return pb.DiscardReply()

    def Get(self, request: pb.GetRequest, context: Any) -> Iterator[pb.Trajectories]:
        gone = threading.Event()
        context.add_callback(gone.set)
        with answering(context):
            batch = self._queue.get(request.version, timeout_s=request.timeout_s, stop=gone)
        groups: dict[int, list] = {}
        for trajectory in batch or []:
            groups.setdefault(trajectory.uid, []).append(trajectory)
        yield from map(codec.encode_trajectories, groups.values())

    def Progress(self, request: pb.ProgressRequest, context: Any) -> pb.ProgressReply:
        self._wait_opened(context)
        return codec.encode_progress(self._queue.progress())

    def Announcements(self, request: pb.AnnouncementsRequest, context: Any) -> Iterator[pb.Announcement]:
        self._wait_opened(context)
        seen = self._queue.wait_announcement(-1, 0.0)
        yield codec.encode_announcement(seen)
        while context.is_active() and not seen.finished:
            newest = self._queue.wait_announcement(seen.version, POLL_S, lost=seen.lost)
            if newest != seen:
                yield codec.encode_announcement(newest)
            seen = newest
        if seen.finished:
            # Called at the end of this call, when all is sent; not if the caller is gone before.
            context.add_callback(self.heard.set)

    def FetchWeights(self, request: pb.FetchWeightsRequest, context: Any) -> Iterator[pb.WeightsPiece]:
        wanted = request.version if request.HasField("version") else None
        found = find_weights(self._weights_directory, wanted) if self._weights_directory else None
        if found is None:
            context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"the trainer holds no weights of {'any version' if wanted is None else f'version {wanted}'}",
            )
            return
        with open_weights(found.path) as file:
            yield pb.WeightsPiece(version=found.version, checksum=found.checksum, size=found.size)
            while data := file.read(PIECE_BYTES):
                yield pb.WeightsPiece(data=data)

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        progress = self._queue.progress()
        dropped = {f"dropped/{cause}": float(count) for cause, count in self._queue.dropped.items()}
        values = {"version": progress.version, "waiting": self._queue.waiting, "counted": progress.counted}
        return pb.StatusReply(values={**values, **dropped})


@contextlib.contextmanager
def answering(context: Any) -> Iterator[None]:
    """Turns what the queue raises into status codes with its text."""
    try:
        yield
    except ValueError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except TimeoutError as error:
        context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
