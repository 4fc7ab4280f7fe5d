"""One process of a trainer, for test_distributed.py: the real loop on batches that are known beforehand.

    python tests/trainer/trainer_process.py DIRECTORY COORDINATOR COUNT INDEX EVENT

In: five batches, which only process 0's queue hands out. Out, in DIRECTORY: metrics.jsonl, checkpoints/ and
VERSION.npz, the params as process 0's publisher got them; gradient.npz, that of the first update; of each other process
INDEX, trainer-INDEX.jsonl and received-INDEX.jsonl: of each batch the bytes, and the rows by microbatch.

EVENT: "none"; "adapters": those train, and nothing else; "late": process 1 never comes to a barrier; "kill:2" or
"stop:2": once process 1 is through the step to version 2, it is killed, or asked to stop; "nan": no gradient is finite,
and what is saved of that takes process 0 some seconds.
"""

import copy
import dataclasses
import functools
import math
import os
import pathlib
import signal
import sys
import threading
import time

import jax
import numpy as np
from conftest import MODEL, trajectory

from areal_jax import compilation, distributed
from areal_jax.config import build
from areal_jax.metrics import JsonlWriter, StepLog
from areal_jax.models import transformer
from areal_jax.trainer import loop, shared, skipped, step
from areal_jax.types import ROW_ARRAYS

GROUP, PROMPTS, LONGEST, STEPS = 4, 2, 16, 5
TIMEOUT_S = 60.0
decode = shared.decode
MESHES = {1: {"data": 1, "fsdp": 4}, 2: {"data": 1, "fsdp": 4}, 4: {"data": 2, "tensor": 2}}


def make_config(directory, count, event):
    return build(
        {
            "model": {"lora": {"rank": 2, "alpha": 6.0}} if event == "adapters" else {},
            "run": {"dir": str(directory)},
            "rollout": {"group_size": GROUP, "max_new_tokens": LONGEST - 4, "max_staleness": 3},
            "data": {"max_prompt_tokens": 4},
            "trainer": {
                "steps": STEPS,
                "prompts_per_step": PROMPTS,
                "skipped_in_a_row": 2,
                "token_budget": 4 * LONGEST,  # two or three microbatches for a minibatch of four trajectories
                "optimizer": {"lr": 1e-3},
                "objective": {"minibatches": 2, "group_baseline": True},
                "mesh": MESHES[count],
                "checkpoint": {"every": 1},
            },
        }
    )


class KnownQueue:
    """A queue that has every batch from the start. Tokens are of any version so far, from version 4 on some too old.

    The rewards of every second group are equal, so that it has no gradient.
    """

    def __init__(self, last, scale=1.0):
        self.last, self.scale, self.finished, self.restored = last, scale, False, None
        self.waiting, self.dropped = 0, {}

    def get(self, version, *, timeout_s, stop):
        if version == self.last and not stop.wait(TIMEOUT_S):
            raise AssertionError("nobody told process 0 to stop")
        rng = np.random.default_rng((1, version))
        versions = (0, version + 1)
        uids = range(version * PROMPTS, (version + 1) * PROMPTS)
        batch = [trajectory(rng, uid, i, versions=versions) for uid in uids for i in range(GROUP)]
        batch = [dataclasses.replace(t, behav_logprobs=self.scale * t.behav_logprobs) for t in batch]
        batch = [dataclasses.replace(t, reward=t.sample % 3 if t.uid % 2 else 0.1) for t in batch]
        return None if stop.is_set() else batch

    def announce(self, version, *, finished):
        self.finished = finished

    def snapshot(self, version):
        return {"version": np.array([version])}

    def restore(self, snapshot):
        self.restored = int(snapshot["version"][0])


class Kept:
    """Writes the params of a version down, whole."""

    def __init__(self, directory):
        self.directory = directory

    def publish(self, export, version):
        np.savez(self.directory / f"{version}.npz", **export())

    def close(self):
        pass


class Struck(shared.NoPublisher):
    """Does something to its process once it is handed `version`."""

    def __init__(self, version, strike):
        self.version, self.strike = version, strike

    def publish(self, export, version):
        assert export() == {}
        if version == self.version:
            self.strike()


def read_params(places):
    """Random ones, the same in every process, each in its place."""
    rng = np.random.default_rng(0)
    whole = {n: 0.3 * rng.normal(size=shape.shape) for n, shape in transformer.param_shapes(MODEL).items()}
    return {
        name: jax.make_array_from_callback(place.shape, place.sharding, whole[name].astype(place.dtype).__getitem__)
        for name, place in places.items()
    }


def decode_and_count(file, data):
    minibatches = decode(data)
    batches = [batch for minibatch in minibatches for batch in minibatch.batches]
    came = [[len(getattr(batch, name)) for name in ROW_ARRAYS] for batch in batches]
    file.write({"bytes": len(data), "rows": [batch.rows for batch in batches], "came": came})
    return minibatches


def update_and_keep(file, programs, state, minibatch):
    """The update, whose gradient goes into `file`, whole, where there is none."""
    keeping = copy.copy(programs)

    def keep_and_apply(state, grads):
        whole = {name: np.asarray(programs.gather(value)) for name, value in grads.items()}
        if jax.process_index() == 0 and not file.exists():
            np.savez(file, **whole)
        return programs.apply(state, grads)

    keeping.apply = keep_and_apply
    return step.update(keeping, state, minibatch)


def slowly(function, *arguments):
    time.sleep(4 * distributed.POLL_S)
    return function(*arguments)


def train(directory, processes, event, stop):
    word, _, version = event.partition(":")
    first = processes.index == 0
    known = KnownQueue(int(version) if word == "stop" else None, math.nan if word == "nan" else 1.0)
    if word == "nan":
        skipped._columns = functools.partial(slowly, skipped._columns)
    strikes = {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "stop": stop.set}

    def open_log(at):
        processes.barrier("every program is compiled")
        assert known.restored == at if first and at else known.restored is None
        if first:
            return StepLog(directory, version=at, tensorboard=False, wandb=False)
        file = JsonlWriter(directory / f"received-{processes.index}.jsonl")
        shared.decode = functools.partial(decode_and_count, file)
        return shared.OwnTimes(directory, processes.index, version=at)

    loop.update = functools.partial(update_and_keep, directory / "gradient.npz")
    reached = loop.train(
        make_config(directory, processes.count, event),
        model_config=MODEL,
        read_params=read_params,
        queue=known if first else shared.NoQueue(),
        publisher=Kept(directory) if first else Struck(int(version or -1), strikes.get(word, lambda: None)),
        open_log=open_log,
        stop=stop,
        processes=processes,
    )
    assert known.finished == (first and reached == STEPS)


def main(directory, coordinator, count, index, event):
    compilation.enable_cache()
    count, index, stop = int(count), int(index), threading.Event()
    with distributed.joined(coordinator, index=index, count=count, timeout_s=TIMEOUT_S, stop=stop) as processes:
        processes.agree("the event", event)
        step.GATHERED = 0 if count == 4 else step.GATHERED  # each whole parameter is waited for, or none
        if event != "late":
            train(pathlib.Path(directory), processes, event, stop)
        elif index == 0:
            distributed.Processes(index, count, timeout_s=1.0).barrier("every program is compiled")
        else:
            time.sleep(2 * TIMEOUT_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
