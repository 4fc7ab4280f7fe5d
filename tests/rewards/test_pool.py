"""The reward pool with rewards that behave badly in every way that has been seen."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from areal_jax.rewards.pool import RewardError, RewardMemory, RewardPool, RewardTimeout, RewardUnanswered, RewardUnsound

REWARDS = """
import os, sys, time
from areal_jax.rewards.declared import declare

def same(*, completion, answer, prompt):
    return completion == answer

def by_order(*, completion, answer, prompt):
    '''What the completion says to do.'''
    if completion == "hang":
        while True:
            time.sleep(1)
    if completion == "spin":
        while True:
            pass
    if completion == "power":
        9 ** 9 ** 9  # one bytecode that takes hours and never lets another thread run
    if completion == "die":
        os._exit(7)
    if completion == "exit":
        sys.exit(3)
    if completion == "raise":
        raise KeyError("no such problem")
    if completion == "grow":
        return len([bytearray(2**24) for _ in range(2**12)])  # 64 GB
    if completion == "modest":
        return len(bytearray(2**26)) > 0  # 64 MB
    if completion == "write":
        with open(answer, "wb") as file:
            file.write(bytes(2**22))
    if completion == "flood":
        print("x" * 2**22)
        return 1
    if completion == "environment":
        return answer in os.environ
    if completion == "print":
        print("a reward prints")
        return 1
    if completion == "pid":
        return 1 / os.getpid()
    return float(completion)

@declare(unanswered="wrong")
def forgiving(*, completion, answer, prompt):
    return by_order(completion=completion, answer=answer, prompt=prompt)
"""
SLOW_IMPORT = """
import os, time
time.sleep({seconds})

def by_order(*, completion, answer, prompt):
    while completion == "hang":
        time.sleep(1)
    return 1 / os.getpid()
"""
HOSTILE = """
import os, sys, threading, time
from areal_jax.rewards.declared import declare

FD = int(sys.argv[1])  # its own socket

def right_is_a(*, completion, answer, prompt):
    if completion == "raise":
        raise KeyError("x" * 1_000_000)
    if completion == "surplus":
        os.write(FD, b"1.0\\n")
    if completion == "surplus and error":
        os.write(FD, b'{"error": "?", "cause": "reward_error"}\\n')
    if completion == "late":
        threading.Timer(0.2, os.write, (FD, b"1.0\\n")).start()
    if completion == "trickle":
        while True:
            os.write(FD, b" ")
            time.sleep(0.05)
    if completion == "flood":
        while True:
            os.write(FD, b"1" * 2**16)
    if completion.startswith("write "):
        os.write(FD, completion.removeprefix("write ").encode() + b"\\n")
        time.sleep(100)
    return float(completion == "a")

@declare(unanswered="wrong")
def forgiving(*, completion, answer, prompt):
    return right_is_a(completion=completion, answer=answer, prompt=prompt)
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    (tmp_path / "some_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def pool(rewards):
    with RewardPool("some_rewards:by_order", workers=1, timeout_s=0.5) as pool:
        yield pool


def score(pool, *completions):
    return pool.score_now(completions, answer="", prompt="")


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as file:  # a child of init that nobody waits for stays as a zombie
        return file.read().rsplit(")", 1)[1].split()[0] == "Z"


def wait_until_gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return gone(pid)


def test_verdicts_come_in_the_order_of_the_completions(pool):
    assert score(pool, "1", "0", "0.25", "1") == [1.0, 0.0, 0.25, 1.0]
    assert score(pool) == []


def test_texts_arrive_as_they_are(rewards):
    texts = ["", "two\nlines", '"quotes" \\ and \x00', "é — 数 🎲", "x" * 1_000_000]
    with RewardPool("some_rewards:same", workers=1) as pool:
        for text in texts:
            assert pool.score_now([text, text + " "], answer=text, prompt="?") == [1.0, 0.0]


@pytest.mark.parametrize("misdeed", ["hang", "spin", "power"])
def test_a_reward_that_never_returns_costs_its_group_and_its_process_only(pool, misdeed):
    before = score(pool, "pid")
    began = time.monotonic()
    with pytest.raises(RewardTimeout, match=r"'some_rewards:by_order' did not return within reward.timeout_s=0.5"):
        score(pool, "1", misdeed, "1")
    assert time.monotonic() - began < 10
    assert wait_until_gone(round(1 / before[0]))
    after = score(pool, "pid")
    assert after != before and score(pool, "1") == [1.0]


@pytest.mark.parametrize(("misdeed", "message"), [("die", "ended: exit status 7"), ("exit", "raised SystemExit: 3")])
def test_a_reward_that_ends_its_process_is_an_error_and_the_pool_lives_on(pool, misdeed, message):
    with pytest.raises(RewardError, match=message):
        score(pool, "1", misdeed)
    assert score(pool, "1", "0") == [1.0, 0.0]


def test_a_worker_killed_while_idle_costs_one_group(pool):
    os.kill(round(1 / score(pool, "pid")[0]), signal.SIGKILL)
    with pytest.raises(RewardError, match="ended"):
        score(pool, "1")
    assert score(pool, "1") == [1.0]


def test_a_reward_that_raises_keeps_its_process_and_never_becomes_a_verdict(pool):
    before = score(pool, "pid")
    with pytest.raises(RewardError, match="raised KeyError: 'no such problem'"):
        score(pool, "raise", "1", "1")
    assert score(pool, "pid") == before and score(pool, "0", "1") == [0.0, 1.0]


@pytest.mark.parametrize("value", ["5", "-0.5", "nan", "inf"])
def test_a_verdict_out_of_range_is_an_error(pool, value):
    with pytest.raises(RewardError, match="a verdict lies between 0.0"):
        score(pool, value)


def test_the_deadline_is_each_verdicts_own(rewards):
    (rewards / "slow_rewards.py").write_text("import time\ndef slow(**_):\n    time.sleep(0.3)\n    return 1\n")
    with RewardPool("slow_rewards:slow", timeout_s=1.0) as pool:
        assert score(pool, *"abcdef") == [1.0] * 6  # 1.8 s together, 0.3 s each


def test_what_a_reward_prints_disturbs_nothing(pool):
    assert score(pool, "print", "0") == [1.0, 0.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("some_rewards:missing", "no attribute 'missing'"),
        ("ending_rewards:f", "its process ended while importing it"),
    ],
)
def test_a_function_that_cannot_be_imported_is_said_at_the_start(rewards, function, message):
    (rewards / "ending_rewards.py").write_text("import os\nos._exit(1)\n")
    with pytest.raises(ValueError, match=rf"reward.function='{function}' cannot be used: .*{message}"):
        RewardPool(function)


def test_a_function_that_lacks_a_package_says_itself_what_to_do(rewards):
    (rewards / "lacking_rewards.py").write_text(
        "from areal_jax.rewards.declared import declare\n"
        "def prepare():\n    raise ModuleNotFoundError('it needs that: pip install that')\n"
        "@declare(prepare=prepare)\ndef f(**texts):\n    return 1.0\n"
    )
    with pytest.raises(ValueError, match="cannot be used: ModuleNotFoundError: it needs that: pip install that$"):
        RewardPool("lacking_rewards:f")
    with pytest.raises(ValueError, match="no attribute 'g'; give module:function of a function that takes"):
        RewardPool("lacking_rewards:g")


def test_hung_rewards_do_not_hold_up_the_other_workers_or_the_event_loop(rewards):
    async def all_at_once(pool):
        hung = asyncio.create_task(pool.score(["hang"], answer="", prompt=""))
        began = time.monotonic()
        verdicts = await asyncio.gather(*[pool.score(["1", "0"], answer="", prompt="") for _ in range(50)])
        took = time.monotonic() - began
        with pytest.raises(RewardTimeout):
            await hung
        return verdicts, took

    with RewardPool("some_rewards:by_order", workers=2, timeout_s=3.0) as pool:
        verdicts, took = asyncio.run(all_at_once(pool))
    assert verdicts == [[1.0, 0.0]] * 50
    assert took < 3.0


def test_closing_ends_the_processes_and_what_is_being_scored(rewards):
    pool = RewardPool("some_rewards:by_order", workers=2, timeout_s=60.0)
    pids = {round(1 / score(pool, "pid")[0]) for _ in range(2)}
    errors = []

    def hang():
        try:
            score(pool, "hang")
        except RewardError as error:
            errors.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    time.sleep(0.2)
    pool.close()
    thread.join(10)
    assert len(errors) == 1 and len(pids) == 2
    assert all(wait_until_gone(pid) for pid in pids)


@pytest.mark.parametrize("misdeed", ["1", "hang"])
def test_workers_end_when_their_parent_is_killed(rewards, misdeed):
    code = f"""
import threading
from areal_jax.rewards.pool import RewardPool
pool = RewardPool("some_rewards:by_order", timeout_s=60.0)
print(round(1 / pool.score_now(["pid"], answer="", prompt="")[0]), flush=True)
pool.score_now(["{misdeed}"], answer="", prompt="")
threading.Event().wait()
"""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        assert not gone(pid)
        parent.kill()
    assert wait_until_gone(pid)


def test_a_group_of_eight_costs_the_caller_little():
    with RewardPool("areal_jax.rewards.math_answer:last_number_matches") as pool:
        group = ["[ 5 8 3 ] 3"] * 8
        pool.score_now(group, answer="3", prompt="")
        began = time.thread_time()
        for _ in range(50):
            assert pool.score_now(group, answer="3", prompt="") == [1.0] * 8
        per_completion = (time.thread_time() - began) / 400
    assert per_completion < 1e-3  # tens of microseconds; at 130 per second that is under 1 % of a core


def test_the_kernel_ends_a_computation_that_nobody_is_left_to_kill(rewards):
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    arguments = [str(theirs.fileno()), "some_rewards:by_order", "0.1", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "areal_jax.rewards.worker", *arguments],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": path},
    ) as worker:
        theirs.close()
        ours.sendall(b'{"completions": ["power"], "answer": "", "prompt": ""}\n')
        assert ours.recv(100) == b'{"ready": true, "unanswered": "fail"}\n'
        time.sleep(0.2)
        ours.close()  # it cannot notice: the power holds the interpreter's lock
        assert worker.wait(60) == -signal.SIGXCPU


def test_too_much_memory_costs_one_group_and_says_so(rewards):
    with RewardPool("some_rewards:by_order", memory_gb=0.25) as pool:
        before = score(pool, "pid")
        with pytest.raises(RewardMemory, match="wanted more memory than reward.memory_gb=0.25") as raised:
            score(pool, "1", "grow", "1")
        assert raised.value.cause == "reward_memory"
        assert score(pool, "pid") != before and score(pool, "1") == [1.0]


def test_the_memory_limit_is_beyond_what_the_imports_took(rewards):
    (rewards / "large_rewards.py").write_text(
        "import some_rewards\nheld = bytes(2**28)\nby_order = some_rewards.by_order\n"
    )
    with RewardPool("large_rewards:by_order", memory_gb=0.125) as pool:
        assert score(pool, "modest") == [1.0]
        with pytest.raises(RewardMemory):
            score(pool, "grow")


@pytest.mark.parametrize(("misdeed", "cause"), [("hang", "timeout"), ("die", "crash"), ("grow", "memory")])
def test_a_declared_verifier_that_does_not_answer_makes_one_completion_wrong(rewards, caplog, misdeed, cause):
    with RewardPool("some_rewards:forgiving", timeout_s=2.0, memory_gb=0.125) as pool:
        assert score(pool, "1", misdeed, "1", misdeed, "0.5") == [1.0, 0.0, 1.0, 0.0, 0.5]
        assert pool.unanswered == {f"reward_{cause}": 2}
        assert f"the completion counts as wrong (so far: {{'reward_{cause}': 2}})" in caplog.text
        with pytest.raises(RewardError, match="raised KeyError"):
            score(pool, "1", "raise")
        assert score(pool, "1") == [1.0]


def test_an_undeclared_reward_that_does_not_answer_fails_its_group_and_is_never_wrong(pool):
    for misdeed in ("hang", "die"):
        with pytest.raises(RewardUnanswered):
            score(pool, "1", misdeed)
    assert not pool.unanswered


def test_a_closed_pool_calls_nothing_wrong(rewards):
    pool = RewardPool("some_rewards:forgiving", timeout_s=60.0)
    threading.Timer(0.3, pool.close).start()
    with pytest.raises(RewardError, match="closed"):
        score(pool, "hang", "1")
    assert not pool.unanswered


def test_a_killed_process_is_replaced_by_a_spare_whose_imports_are_done(rewards):
    (rewards / "slow_import.py").write_text(SLOW_IMPORT.format(seconds=2.0))
    with RewardPool("slow_import:by_order", timeout_s=0.2) as pool:
        time.sleep(4.0)  # the spare is ready
        took, pids = [], set()
        for _ in range(2):
            pids.add(score(pool, "pid")[0])
            began = time.monotonic()
            with pytest.raises(RewardTimeout):
                score(pool, "hang")
            pids.add(score(pool, "pid")[0])
            took.append(time.monotonic() - began)
            time.sleep(4.0)  # the next one has come up in the background
        assert max(took) < 1.0, took  # the deadline, and a fraction of the import's 2 s
        assert len(pids) == 3


def test_kills_in_a_row_wait_for_the_next_spare_and_survive(rewards):
    (rewards / "slow_import.py").write_text(SLOW_IMPORT.format(seconds=0.5))
    with RewardPool("slow_import:by_order", workers=2, timeout_s=0.2) as pool:
        for _ in range(6):
            with pytest.raises(RewardTimeout):
                score(pool, "hang")
        assert len(score(pool, "pid", "pid")) == 2


def test_a_spare_ends_with_the_pool(rewards):
    with RewardPool("some_rewards:by_order") as pool:
        pids = [process._process.pid for process in pool._processes._running]
    assert len(pids) == 2 and all(wait_until_gone(pid) for pid in pids)


def test_a_reward_writes_no_large_file(pool, tmp_path):
    with pytest.raises(RewardError, match="File too large"):
        pool.score_now(["write"], answer=str(tmp_path / "large"), prompt="")
    assert (tmp_path / "large").stat().st_size <= 2**20
    assert score(pool, "1") == [1.0]


def test_only_the_beginning_of_what_a_reward_prints_reaches_the_log(pool, capfd):
    assert score(pool, "flood", "1") == [1.0, 1.0]
    pool.close()
    assert 2**15 < len(capfd.readouterr().err) < 2**17


@pytest.mark.parametrize("name", ["AREAL_JAX_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "ANYTHING"])
def test_no_variable_that_may_hold_a_secret_reaches_a_reward(rewards, monkeypatch, name):
    monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with RewardPool("some_rewards:by_order") as pool:
        verdicts = [
            pool.score_now(["environment"], answer=each, prompt="") for each in (name, "PATH", "OMP_NUM_THREADS")
        ]
    assert verdicts == [[0.0], [1.0], [1.0]]


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    (tmp_path / "hostile_rewards.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(tmp_path)
    with RewardPool("hostile_rewards:right_is_a", timeout_s=1.0) as pool:
        yield pool


def test_bytes_that_never_end_a_line_do_not_put_off_the_deadline(hostile):
    began = time.monotonic()
    with pytest.raises(RewardTimeout):
        score(hostile, "trickle")
    assert time.monotonic() - began < 10  # 1 s and the start of a process
    assert score(hostile, "a", "b") == [1.0, 0.0]


def test_a_reply_without_end_is_not_kept_in_memory(hostile):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RewardUnsound, match="wrote 65536 bytes without the end of a line; it was killed"):
        score(hostile, "flood")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**14  # KiB; a second brings gigabytes
    assert score(hostile, "a", "b") == [1.0, 0.0]


@pytest.mark.parametrize("surplus", ["surplus", "surplus and error"])
@pytest.mark.parametrize("group", ["{0}", "{0} b a", "b {0}", "b b b {0} b b"])
def test_a_surplus_reply_fails_its_group_and_is_never_the_verdict_of_another(hostile, surplus, group):
    with pytest.raises(RewardUnsound, match="where the replies to its request should end; it was killed"):
        score(hostile, *[each.format(surplus) for each in group.split(" ")])
    assert score(hostile, "a", "b", "b", "a") == [1.0, 0.0, 0.0, 1.0]


def test_a_reply_that_comes_between_requests_is_never_a_verdict(hostile):
    assert score(hostile, "late") == [0.0]
    time.sleep(0.6)
    with pytest.raises(RewardUnsound, match="wrote more than the verdicts that it was asked for"):
        score(hostile, "b", "b")
    assert score(hostile, "a", "b") == [1.0, 0.0]


@pytest.mark.parametrize(
    "reply",
    ["NaN", "17.5", "-0.5", "1", "true", "1e999", "null", '"1.0"', "[1.0]", "garbage", "\xff", "[" * 60_000, "{}"]
    + ['{"x": 1}', '{"error": "?"}', '{"error": "?", "cause": "reward_timeout"}', '{"done": 1}']
    + ['{"error": "?", "cause": "reward_error", "x": 1}', "", "1" * 60_000],
)
def test_only_a_verdict_or_a_known_error_is_a_reply(hostile, reply):
    with pytest.raises(RewardUnsound, match="wrote .*, which is no (verdict|JSON); it was killed") as raised:
        score(hostile, "write " + reply)
    assert raised.value.cause == "reward_crash"
    assert score(hostile, "a", "b") == [1.0, 0.0]


def test_a_reply_that_is_none_is_not_called_wrong_by_a_declared_verifier(hostile):
    with RewardPool("hostile_rewards:forgiving", timeout_s=1.0) as pool:
        for misdeed in ("write 17.5", "surplus"):
            with pytest.raises(RewardUnsound):
                score(pool, "a", misdeed, "a")
        assert score(pool, "a", "trickle", "a") == [1.0, 0.0, 1.0]
        assert pool.unanswered == {"reward_timeout": 1}


def test_the_text_of_a_long_error_is_cut(hostile):
    with pytest.raises(RewardError, match="raised KeyError: 'xxx") as raised:
        score(hostile, "raise")
    assert not isinstance(raised.value, RewardUnsound) and len(str(raised.value)) < 3000


def test_what_is_written_while_the_function_is_imported_is_no_start(rewards):
    (rewards / "early_rewards.py").write_text("import os, sys\nos.write(int(sys.argv[1]), b'1.0\\n')\n")
    with pytest.raises(ValueError, match="'early_rewards:f' cannot be used: its process wrote '1.0' while importing"):
        RewardPool("early_rewards:f")
