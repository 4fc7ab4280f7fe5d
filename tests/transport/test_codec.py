import pathlib
import re

import numpy as np
import pytest

import areal_jax.transport
from areal_jax.transport import areal_pb2 as pb
from areal_jax.transport import codec
from areal_jax.types import Announcement, Chunk, Completion, GenerateRequest, Progress, Sampling, Trajectory


def through_bytes(message):
    return type(message).FromString(message.SerializeToString())


def assert_same_arrays(mine, theirs, names):
    for name in names:
        np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), strict=True)


def chunk(sample, tokens, reason=""):
    count = len(tokens)
    return Chunk(
        sample,
        np.array(tokens, np.int32),
        -np.arange(count, dtype=np.float32) / 3,
        np.arange(count, dtype=np.int32) + 5,
        reason,
    )


def test_arrays_are_packed_little_endian():
    message = codec.encode_samples([chunk(3, [1, 2]), chunk(0, [258], "stop")])
    assert message.tokens == b"\x01\0\0\0\x02\0\0\0\x02\x01\0\0"  # 258 = 0x0102
    assert list(message.sample) == [3, 0]
    assert list(message.length) == [2, 1]


def test_chunks_of_one_boundary_come_back_apart():
    sent = [chunk(3, [1, 2]), chunk(0, []), chunk(7, [9], "length")]
    for mine, theirs in zip(codec.decode_samples(through_bytes(codec.encode_samples(sent))), sent, strict=True):
        assert (mine.sample, mine.finish_reason) == (theirs.sample, theirs.finish_reason)
        assert_same_arrays(mine, theirs, ("tokens", "logprobs", "versions"))


def test_request_round_trip_with_what_a_sample_has_already():
    partial = chunk(2, [4, 5, 6])
    sent = GenerateRequest(
        uid=2**40,
        prompt_tokens=np.array([1, 2, 3], np.int32),
        samples=(0, 2),
        sampling=Sampling(
            max_new_tokens=17,
            temperature=0.7,
            seed=-3,
            stop_tokens=(0, 9),
            top_k=40,
            top_p=0.95,
            min_p=0.02,
            min_new_tokens=5,
            stop_strings=("\n\n", "\u20ac 5"),
        ),
        evaluation=True,
        partial={2: Completion(partial.tokens, partial.logprobs, partial.versions, "")},
        timeout_s=2.5,
    )
    got = codec.decode_request(through_bytes(codec.encode_request(sent)))
    assert (got.uid, got.samples, got.sampling, got.evaluation) == (2**40, (0, 2), sent.sampling, True)
    assert got.timeout_s == 2.5
    np.testing.assert_array_equal(got.prompt_tokens, sent.prompt_tokens, strict=True)
    assert list(got.partial) == [2]
    assert_same_arrays(got.partial[2], partial, ("tokens", "logprobs", "versions"))


def test_what_a_message_leaves_out_is_the_default():
    got = codec.decode_request(pb.GenerateRequest(sampling=pb.Sampling(max_new_tokens=3, temperature=1.0)))
    assert (got.sampling, got.timeout_s) == (Sampling(max_new_tokens=3), 0.0)


def test_group_round_trip_keeps_types_and_ragged_lengths():
    sent = [
        Trajectory(
            uid=2**35,
            sample=sample,
            prompt_tokens=np.arange(3 + sample, dtype=np.int32),
            tokens=np.arange(sample + 1, dtype=np.int32),
            behav_logprobs=np.full(sample + 1, -0.1, np.float32),
            versions=np.full(sample + 1, sample, np.int32),
            reward=-5.0,
            truncated=sample == 1,
        )
        for sample in range(3)
    ]
    for mine, theirs in zip(
        codec.decode_trajectories(through_bytes(codec.encode_trajectories(sent))), sent, strict=True
    ):
        assert (mine.uid, mine.sample, mine.reward, mine.truncated) == (2**35, theirs.sample, -5.0, theirs.truncated)
        assert_same_arrays(mine, theirs, ("prompt_tokens", "tokens", "behav_logprobs", "versions"))
    assert codec.decode_trajectories(pb.Trajectories()) == []


def test_progress_and_announcement_round_trip():
    progress = Progress(version=3, low=5, done=(7, 9), counted=40, lost=2)
    assert codec.decode_progress(through_bytes(codec.encode_progress(progress))) == progress
    announcement = Announcement(version=3, lost=2, finished=True)
    assert codec.decode_announcement(through_bytes(codec.encode_announcement(announcement))) == announcement


def test_a_message_whose_parts_do_not_match_is_refused():
    message = codec.encode_samples([chunk(0, [1, 2])])
    message.length[0] = 3
    with pytest.raises(ValueError, match="holds 2 tokens where its lengths say 3"):
        codec.decode_samples(message)


def test_generated_code_runs_with_the_oldest_protobuf_that_we_allow():
    # Code of a newer generator refuses an older runtime at import.
    text = (pathlib.Path(areal_jax.transport.__path__[0]) / "areal_pb2.py").read_text()
    major, minor = map(int, re.search(r"Protobuf Python Version: (\d+)\.(\d+)", text).groups())
    assert (major, minor) <= (6, 31)
