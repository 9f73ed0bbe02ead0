"""Runs Schemathesis against a server of its own, and checks what came of it operation by operation.

Schemathesis fails on its own for what breaks the description. Here it is made sure that it asked enough: every
operation, with good data and bad; that nothing failed inside the server; and that good data was mostly taken.
"""

import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from serving import Server

HERE = Path(__file__).resolve().parent
# Answers are short, and long prompts are refused soon.
FLAGS = ["--max-model-len", "256", "--max-n", "4", "--disable-log-requests"]
LEAST_TAKEN = 0.6


def main(more):
    with tempfile.TemporaryDirectory(prefix="folio-schemas-") as folder, Server(*FLAGS) as server:
        counts = Path(folder) / "counts.json"
        status = schemathesis(server, Path(folder), counts, more)
        rows = json.loads(counts.read_text())
        operations = described(server)
        alive = server.status("/health")
    wrong = check(rows, operations if not more else {label for label, *_ in rows})
    if status != 0:
        wrong.append(f"schemathesis ended with {status}")
    if alive != 200:
        wrong.append(f"/health answers {alive} afterwards")
    for line in wrong:
        print(f"wrong: {line}")
    return 1 if wrong else 0


def schemathesis(server, folder, counts, more):
    """Its exit status. The key is known once the server runs, so it is added to the settings here."""
    settings = folder / "schemathesis.toml"
    keys = f'[auth.openapi.bearer]\nbearer = "{server.key}"\n\n[auth.openapi.key]\napi_key = "{server.key}"\n'
    settings.write_text((HERE / "schemathesis.toml").read_text() + "\n" + keys)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings), "run"]
    command += [f"{server.url}/openapi.json", "--checks", "all", "-H", f"x-api-key: {server.key}", *more]
    own = {"FOLIO_URL": server.url, "FOLIO_KEY": server.key, "FOLIO_SCHEMA_COUNTS": str(counts)}
    hooks = {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(HERE)}
    return subprocess.run(command, cwd=folder, env={**os.environ, **own, **hooks}).returncode


def described(server):
    """Every operation that the description names, but for the one that Schemathesis gets it by."""
    paths = json.loads(server.get("/openapi.json"))["paths"]
    del paths["/openapi.json"]
    methods = ("get", "post", "put", "delete", "patch")
    return {f"{method.upper()} {path}" for path, item in paths.items() for method in item if method in methods}


def check(rows, operations):
    """Prints a line for each operation; returns what is not as it must be."""
    statuses = collections.defaultdict(collections.Counter)
    for label, mode, status, count in rows:
        statuses[label, mode][status] += count
    wrong = [f"{label} was never asked" for label in sorted(operations) if not statuses[label, "positive"]]
    print(f"{'operation':<36} {'good data':>9} {'taken':>6} {'bad data':>9}  statuses")
    for label in sorted(operations):
        good, bad = statuses[label, "positive"], statuses[label, "negative"]
        taken = sum(count for status, count in good.items() if status < 300) / max(1, good.total())
        told = ", ".join(f"{status}: {count}" for status, count in sorted((good + bad).items()))
        print(f"{label:<36} {good.total():>9} {taken:>6.0%} {bad.total():>9}  {told}")
        if good and taken < LEAST_TAKEN:
            wrong.append(f"{label} took {taken:.0%} of good data; {LEAST_TAKEN:.0%} is the least")
        wrong += [f"{label} answered {status}" for status in good + bad if status >= 500]
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
