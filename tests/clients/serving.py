"""Starts `folio serve` for tests: on a free port, with a key, until the test is done with it."""

import os
import re
import secrets
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A debug build on a busy machine loads slowly; a server that never comes fails the test all the same.
START_SECONDS = 120
END_SECONDS = 60


class Server:
    """A server process, and where it is. `with Server("--max-in-flight", "1") as server: ...`"""

    def __init__(self, *flags, model="folio-rust-7m", key=None):
        self.model = model
        self.key = key or "test-" + secrets.token_hex(16)
        self.flags = flags
        self.process = None
        self.folder = tempfile.TemporaryDirectory(prefix="folio-clients-")
        self.log_path = Path(self.folder.name) / "log"

    def __enter__(self):
        keys = Path(self.folder.name) / "keys"
        keys.write_text(f"{self.key} name=tests\n")
        keys.chmod(0o600)
        weights = ROOT / "models" / f"{self.model}.gguf"
        command = [os.environ["FOLIO_BIN"], "serve", str(weights), "--served-model-name", self.model]
        command += ["--port", "0", "--api-key-file", str(keys), *self.flags]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.url = self._wait_for_url()
        assert self.status("/health") == 200, self.log()
        return self

    def _wait_for_url(self):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            found = re.search(r"ready at (http://\S+)", self.log())
            if found:
                return found[1]
            assert self.process.poll() is None, f"the server ended while it started:\n{self.log()}"
            time.sleep(0.02)
        self.end()
        raise AssertionError(f"the server did not start:\n{self.log()}")

    def __exit__(self, *_):
        self.end()
        self.folder.cleanup()

    def log(self):
        return self.log_path.read_text(errors="replace")

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def wait(self):
        """Its exit status, once it has ended by itself."""
        return self.process.wait(END_SECONDS)

    def end(self):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def request(self, path, body=None):
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        return urllib.request.Request(self.url + path, data=body, headers=headers)

    def get(self, path, body=None):
        with urllib.request.urlopen(self.request(path, body), timeout=30) as answer:
            return answer.read()

    def status(self, path):
        try:
            with urllib.request.urlopen(self.request(path), timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def wait_until(self, what, condition, seconds=30):
        """Polls until it holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.log()[-2000:]}"
            time.sleep(0.02)

    def is_idle(self):
        """Whether no request runs or waits."""
        metrics = self.get("/metrics").decode()
        counts = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", metrics, re.MULTILINE)
        assert len(counts) == 2, metrics
        return all(float(count) == 0 for count in counts)


class Running:
    """A server that somebody else has started, in place of one of our own."""

    def __init__(self, url, key, model):
        self.url, self.key, self.model = url.rstrip("/"), key, model

    get, request, status = Server.get, Server.request, Server.status
    wait_until, is_idle = Server.wait_until, Server.is_idle

    def log(self):
        return ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def shared():
    """The server most tests share: FOLIO_URL, FOLIO_KEY and FOLIO_MODEL where they are set, or else one of our own."""
    if url := os.environ.get("FOLIO_URL"):
        return Running(url, os.environ.get("FOLIO_KEY", "none"), os.environ["FOLIO_MODEL"])
    return Server("--max-model-len", "1024")
