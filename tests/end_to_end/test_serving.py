"""`--role=generator` by itself, as a user starts it: a model directory, no data, no trainer."""

import json
import signal
import time
import urllib.error
import urllib.request

from tests.end_to_end.job import end, start_command


def get(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=30) as answer:
        return answer.read().decode()


def status(url):
    try:
        get(url)
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:  # not listening yet
        return 0
    return 200


def test_a_model_directory_is_served_by_itself_and_ends_in_order(tmp_path, unused_port):
    url = f"http://127.0.0.1:{unused_port}"
    server = start_command(
        [
            "--config=configs/serve.py",
            "--role=generator",
            "--config.model.path=configs/arithmetic_model",
            f"--config.run.dir={tmp_path}",
            "--config.generation.addresses=('127.0.0.1:0',)",
            f"--config.generation.http_addresses=('127.0.0.1:{unused_port}',)",
            "--config.generation.slots=2",
            "--config.generation.max_length=64",
            "--config.generation.length_buckets=(64,)",
        ]
    )
    seen, deadline = set(), time.monotonic() + 120
    while 200 not in seen and server.poll() is None and time.monotonic() < deadline:
        seen.add(status(f"{url}/readyz"))
        time.sleep(0.05)
    try:
        assert seen >= {503, 200}, "not ready while it compiles, ready after"
        asked = {"model": "arithmetic_model", "prompt": "start 3 +4", "max_tokens": 4, "temperature": 0}
        answer = json.loads(get(f"{url}/v1/completions", asked))
        assert answer["usage"]["completion_tokens"] >= 1
        assert answer["system_fingerprint"] == "unpublished"
        assert "areal_generation_requests_total 1.0" in get(f"{url}/metrics")
    finally:
        server.send_signal(signal.SIGTERM)
        code, _, err = end(server)
    assert code == 0, err
    assert f"model arithmetic_model is served on {url}/v1" in err
