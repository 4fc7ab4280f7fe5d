"""Records of `areal_jax.types` to messages of `areal.proto` and back.

Arrays become bytes, little-endian; none is copied on the way in, so what is decoded is read-only. Called by servers and
clients; raises ValueError for a message whose parts do not match.
"""

from collections.abc import Sequence

import numpy as np

from areal_jax.transport import areal_pb2 as pb
from areal_jax.types import (
    Announcement,
    Chunk,
    Completion,
    GenerateRequest,
    Progress,
    Sampling,
    Trajectory,
    trajectories_from_arrays,
    trajectories_to_arrays,
)

INT32, FLOAT32 = np.dtype("<i4"), np.dtype("<f4")

COLUMNS: dict[str, np.dtype] = {
    "uid": np.dtype("<i8"),
    "sample": INT32,
    "reward": FLOAT32,
    "truncated": np.dtype("?"),
    "prompt_length": INT32,
    "length": INT32,
    "prompt_tokens": INT32,
    "tokens": INT32,
    "behav_logprobs": FLOAT32,
    "versions": INT32,
}


def encode_samples(chunks: Sequence[Chunk]) -> pb.Samples:
    return pb.Samples(
        sample=[chunk.sample for chunk in chunks],
        length=[len(chunk.tokens) for chunk in chunks],
        finish_reason=[chunk.finish_reason for chunk in chunks],
        tokens=_join([chunk.tokens for chunk in chunks], INT32),
        logprobs=_join([chunk.logprobs for chunk in chunks], FLOAT32),
        versions=_join([chunk.versions for chunk in chunks], INT32),
    )


def decode_samples(message: pb.Samples) -> list[Chunk]:
    tokens, logprobs = np.frombuffer(message.tokens, INT32), np.frombuffer(message.logprobs, FLOAT32)
    versions = np.frombuffer(message.versions, INT32)
    _check_lengths(sum(message.length), tokens=tokens, logprobs=logprobs, versions=versions)
    chunks, begin = [], 0
    for sample, length, reason in zip(message.sample, message.length, message.finish_reason, strict=True):
        span = slice(begin, begin + length)
        chunks.append(Chunk(sample, tokens[span], logprobs[span], versions[span], reason))
        begin += length
    return chunks


def encode_request(request: GenerateRequest) -> pb.GenerateRequest:
    if request.top_logprobs:
        raise ValueError(f"top_logprobs={request.top_logprobs}: alternatives are served over HTTP only; leave it 0")
    sampling = request.sampling
    return pb.GenerateRequest(
        uid=request.uid,
        prompt_tokens=_join([request.prompt_tokens], INT32),
        samples=request.samples,
        sampling=pb.Sampling(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            stop_tokens=sampling.stop_tokens,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            min_new_tokens=sampling.min_new_tokens,
            stop_strings=sampling.stop_strings,
        ),
        evaluation=request.evaluation,
        partial=encode_samples(
            [Chunk(i, c.tokens, c.logprobs, c.versions, c.finish_reason) for i, c in request.partial.items()]
        ),
        timeout_s=request.timeout_s,
    )


def decode_request(message: pb.GenerateRequest) -> GenerateRequest:
    sampling = message.sampling
    return GenerateRequest(
        uid=message.uid,
        prompt_tokens=np.frombuffer(message.prompt_tokens, INT32),
        samples=tuple(message.samples),
        sampling=Sampling(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            stop_tokens=tuple(sampling.stop_tokens),
            top_k=sampling.top_k,
            top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
            min_p=sampling.min_p,
            min_new_tokens=sampling.min_new_tokens,
            stop_strings=tuple(sampling.stop_strings),
        ),
        evaluation=message.evaluation,
        partial={
            c.sample: Completion(c.tokens, c.logprobs, c.versions, c.finish_reason)
            for c in decode_samples(message.partial)
        },
        timeout_s=message.timeout_s,
    )


def encode_trajectories(trajectories: Sequence[Trajectory]) -> pb.Trajectories:
    columns = trajectories_to_arrays(trajectories)
    return pb.Trajectories(
        **{name: columns[name].astype(dtype, copy=False).tobytes() for name, dtype in COLUMNS.items()}
    )


def decode_trajectories(message: pb.Trajectories) -> list[Trajectory]:
    columns = {name: np.frombuffer(getattr(message, name), dtype) for name, dtype in COLUMNS.items()}
    rows = len(columns["uid"])
    _check_lengths(rows, **{n: columns[n] for n in ("sample", "reward", "truncated", "prompt_length", "length")})
    _check_lengths(int(columns["prompt_length"].sum()), prompt_tokens=columns["prompt_tokens"])
    _check_lengths(int(columns["length"].sum()), **{n: columns[n] for n in ("tokens", "behav_logprobs", "versions")})
    return trajectories_from_arrays(columns)


def encode_progress(progress: Progress) -> pb.ProgressReply:
    return pb.ProgressReply(
        version=progress.version, low=progress.low, done=progress.done, counted=progress.counted, lost=progress.lost
    )


def decode_progress(message: pb.ProgressReply) -> Progress:
    return Progress(message.version, message.low, tuple(message.done), message.counted, message.lost)


def encode_announcement(announcement: Announcement) -> pb.Announcement:
    return pb.Announcement(version=announcement.version, lost=announcement.lost, finished=announcement.finished)


def decode_announcement(message: pb.Announcement) -> Announcement:
    return Announcement(message.version, message.lost, message.finished)


def _join(arrays: Sequence[np.ndarray], dtype: np.dtype) -> bytes:
    return b"".join(np.asarray(array, dtype).tobytes() for array in arrays)


def _check_lengths(wanted: int, **arrays: np.ndarray) -> None:
    for name, array in arrays.items():
        if len(array) != wanted:
            raise ValueError(
                f"a message holds {len(array)} {name} where its lengths say {wanted}; are sender and receiver of the "
                "same version of areal_jax?"
            )
