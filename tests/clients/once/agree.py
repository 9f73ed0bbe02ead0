"""Whether `folio bench serve` and guidellm measure the same: one server, one workload, in turns.

    python3 -m venv target/xtask/guidellm && target/xtask/guidellm/bin/pip install guidellm==0.8.1
    FOLIO_BIN=target/release/folio target/xtask/guidellm/bin/python tests/clients/once/agree.py

Not a test: it needs a quiet machine and a gigabyte of packages. It prints both and how far they are apart, and fails
past 5%. FOLIO_MODEL names another model of models/, e.g. folio-rust-42m. A client in Python needs a core of its own
(FOLIO_THREADS) and a server that is not faster than it; guidellm asks the same prompts again, so nothing is cached.
"""

import json
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from serving import ROOT, Server  # noqa: E402

INPUT, OUTPUT, STREAMS, REQUESTS, ROUNDS = 128, 64, 2, 40, 3
MOST_APART = 0.05


def folio(server, folder):
    command = [os.environ["FOLIO_BIN"], "bench", "serve", "--base-url", server.url, "--model", server.model]
    command += ["--dataset-name", "random", "--random-input-len", INPUT, "--random-output-len", OUTPUT]
    command += ["--num-prompts", REQUESTS, "--max-concurrency", STREAMS, "--seed", int.from_bytes(os.urandom(4))]
    command += ["--save-result", "--result-dir", folder, "--result-filename", "folio.json", "--disable-tqdm"]
    run(command, {"FOLIO_API_KEY": server.key})
    result = json.loads((folder / "folio.json").read_text())
    assert result["completed"] == REQUESTS, result
    return result["output_throughput"], result["mean_ttft_ms"], result["mean_tpot_ms"]


def guidellm(server, folder):
    extras = {"body": {"temperature": 0, "ignore_eos": True}}
    backend = {
        "kind": "openai_http",
        "target": server.url,
        "model": server.model,
        "request_format": "/v1/completions",
        "api_key": server.key,
        "http2": False,
        "extras": extras,
    }
    data = {"kind": "synthetic_text", "prompt_tokens": INPUT, "output_tokens": OUTPUT}
    scenario = {
        "backend": backend,
        "profile": {"kind": "concurrent", "streams": [STREAMS]},
        "constraints": [{"kind": "max_requests", "count": REQUESTS}],
        "tokenizer": {"kind": "huggingface_auto", "model": str(tokenizer(folder))},
        "data": [data],
        "outputs": [{"kind": "json", "path": str(folder / "guidellm.json")}],
    }
    path = folder / "scenario.json"
    path.write_text(json.dumps({"spec": scenario}))
    command = [Path(sys.executable).parent / "guidellm", "run", "--scenario", path, "--disable-console"]
    run(command, {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
    metrics = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    assert metrics["request_totals"]["successful"] == REQUESTS, metrics["request_totals"]
    names = ["output_tokens_per_second", "time_to_first_token_ms", "inter_token_latency_ms"]
    return tuple(metrics[name]["successful"]["mean"] for name in names)


def tokenizer(folder):
    """The models' tokenizer in the form that transformers loads."""
    home = folder / "tokenizer"
    home.mkdir(exist_ok=True)
    (home / "tokenizer.json").write_bytes(lzma.decompress((ROOT / "models" / "tokenizer.json.lzma").read_bytes()))
    (home / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (home / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return home


def run(command, more):
    done = subprocess.run([str(word) for word in command], env={**os.environ, **more}, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def main():
    model = os.environ.get("FOLIO_MODEL", "folio-rust-7m")
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name, Server("--no-enable-prefix-caching", model=model) as server:
        folder = Path(name)
        folio(server, folder)  # to warm up
        for _ in range(ROUNDS):
            ours.append(folio(server, folder))
            theirs.append(guidellm(server, folder))
    print(f"{model}: {REQUESTS} requests of {INPUT} + {OUTPUT} tokens, {STREAMS} at once, medians of {ROUNDS} rounds")
    worst = 0
    for index, what in enumerate(["output tokens/s", "mean TTFT, ms", "mean ITL, ms"]):
        one, other = (statistics.median(run[index] for run in runs) for runs in (ours, theirs))
        apart = abs(one - other) / other
        worst = max(worst, apart)
        print(f"{what:<16} folio bench serve {one:9.2f}   guidellm {other:9.2f}   apart {apart:6.1%}")
    return 1 if worst > MOST_APART else 0


if __name__ == "__main__":
    sys.exit(main())
