"""A router in front of two Folio servers: it must find them well, route chats and streams, and notice who is gone.

    python3 -m venv target/xtask/router && target/xtask/router/bin/pip install smg==1.13.0 openai==3.49.0
    FOLIO_BIN=target/release/folio target/xtask/router/bin/python tests/clients/once/router.py

Not a test: routers change weekly.
"""

import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from asking import QUESTIONS, chat, texts_of_chunks  # noqa: E402
from serving import Server  # noqa: E402

SECONDS = 60


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command(port, servers):
    words = [Path(sys.executable).parent / "smg", "launch", "--backend", "vllm", "--policy", "round_robin"]
    words += ["--host", "127.0.0.1", "--port", port, "--prometheus-port", free_port()]
    words += ["--worker-urls", *[server.url for server in servers], "--api-key", servers[0].key]
    words += ["--health-check-interval-secs", 1, "--health-failure-threshold", 1]
    return [str(word) for word in words]


def status(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def wait(what, condition, router, log):
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline or router.poll() is not None:
            raise SystemExit(f"{what}: not within {SECONDS} s\n{Path(log.name).read_text()[-4000:]}")
        time.sleep(0.1)
    print(f"ok: {what}")


def requests_done(server):
    """Completions that a server has finished."""
    pattern = r"^vllm:request_success_total\{.*\} (\S+)$"
    return sum(float(count) for count in re.findall(pattern, server.get("/metrics").decode(), re.MULTILINE))


def main():
    # Routers have one key for all their servers.
    key = "router-test-key-0123456789"
    with tempfile.NamedTemporaryFile("wb") as log, Server(key=key) as one, Server(key=key) as other:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        router = subprocess.Popen(command(port, [one, other]), stdout=log, stderr=log)
        try:
            drive(url, one, other, router, log)
        finally:
            router.kill()
            router.wait()
    print("smg: all well")


def drive(url, one, other, router, log):
    wait("the router is healthy", lambda: status(url + "/health") == 200, router, log)
    client = openai.OpenAI(base_url=url + "/v1", api_key=one.key, max_retries=0, timeout=60)
    direct = openai.OpenAI(base_url=one.url + "/v1", api_key=one.key, max_retries=0, timeout=60)

    def works():
        try:
            return bool(chat(client, one, max_completion_tokens=1).choices)
        except openai.APIStatusError:
            return False

    wait("the router knows its servers", works, router, log)
    before = requests_done(one), requests_done(other)
    for index, question in enumerate(QUESTIONS[:16]):
        asked = {"messages": [{"role": "user", "content": question}]}
        expected = chat(direct, one, **asked).choices[0].message.content
        if index % 2:
            said = chat(client, one, **asked).choices[0].message.content
        else:
            (said,) = texts_of_chunks(chat(client, one, stream=True, **asked))
        assert said == expected, (question, said, expected)
    print("ok: 8 chats and 8 streams say what a server says")
    done = [requests_done(server) - begun for server, begun in zip((one, other), before)]
    assert done[1] > 0 and done[0] > 16, done
    print(f"ok: both servers answered: {done[0] - 16:.0f} and {done[1]:.0f}")
    try:
        chat(client, one, temperature=-1)
        raise SystemExit("a bad request was taken")
    except openai.BadRequestError as error:
        print(f"ok: a bad request is refused, by the router or behind it: {error.message[:60]}")
    one.end()
    wait("requests go to the one that is left", lambda: all(works() for _ in range(8)), router, log)
    other.end()
    wait("with none left, requests are refused", lambda: not works(), router, log)


if __name__ == "__main__":
    main()
