"""Models that `folio quantize` writes, loaded by the programs they were written for.

usage: python tests/quantized/check.py MODEL [--folio target/release/folio] [--formats int8,nf4,...] [--method rtn]
                                       [--calibration FILE] [--tokens 48] [--work FOLDER] [--json FILE]

Needs requirements.txt beside this file. For every format: MODEL is quantized, Folio answers a few prompts greedily, and
the other program (transformers, or llama-cpp-python for GGUF) reads the same tokens. Where its own first choice is another
than Folio's, that is a difference; it says at which token the first of them is, and how much less likely (in nats) it holds
Folio's choice than its own. Folio rounds activations to eight bits where it multiplies integers and the other does not, so
two nearly equal choices may swap: a gap above --gap is more than that, and fails.

The other program computes in f32 where it can (nvfp4, mxfp4 and bitsandbytes' formats: bf16, whose logits are 1/16 apart).
Of the fp8 formats it is told not to round activations to fp8, which Folio does not do either.
"""
import argparse
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import warnings

os.environ["TQDM_DISABLE"] = "1"

import numpy as np

PROMPTS = [
    "fn main() {\n    let mut",
    "use std::collections::HashMap;\n\n/// Counts the words of a text.\npub fn count(text: &str) ->",
    "impl<T: Clone> Stack<T> {\n    pub fn push(&mut self,",
    "<|im_start|>user\nWhat does `Rc::clone` do?<|im_end|>\n<|im_start|>assistant\n",
    "The borrow checker",
    "#[cfg(test)]\nmod tests {\n    use super::*;\n",
]
GGUF = ["q4_k_m", "q8_0"]
FORMATS = ["int8", "int8-channel", "int4-g128", "int4-g32", "fp8", "fp8-block", "mxfp4", "nvfp4", "nf4", "llm-int8", *GGUF]


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


class Folio:
    """A server of one model, asked for tokens."""

    def __init__(self, binary, model):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [binary, "serve", model, "--port", str(self.port), "--max-num-seqs", "4", "--max-model-len", "512"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(1200):
            if self.process.poll() is not None:
                raise RuntimeError(f"folio serve {model}: {self.process.stderr.read()}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1)
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise RuntimeError(f"folio serve {model}: not ready after two minutes")

    def answer(self, prompt, tokens):
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        choice = json.load(urllib.request.urlopen(request, timeout=600))["choices"][0]
        return choice["prompt_token_ids"], choice["token_ids"]

    def end(self):
        self.process.terminate()
        self.process.wait()


def transformers_model(folder, form):
    import torch
    import transformers
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder)
    if form.startswith("fp8"):
        config.quantization_config["config_groups"]["group_0"]["input_activations"] = None
    # The packed float formats are unpacked to bf16, whatever is asked for.
    dtype = torch.bfloat16 if form in ["mxfp4", "nvfp4", "nf4", "llm-int8"] else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype).eval()

    def logits(tokens):
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].float().numpy()
    return logits


def llama_model(path):
    from llama_cpp import Llama
    model = Llama(path, n_ctx=512, logits_all=True, verbose=False)

    def logits(tokens):
        model.reset()
        model.eval(tokens)
        return np.array(model.scores[:len(tokens)])
    return logits


def check_vocabulary(path, asked):
    """llama.cpp cuts the prompts into the tokens that Folio cut them into."""
    from llama_cpp import Llama
    model = Llama(path, vocab_only=True, verbose=False)
    for prompt, tokens in asked:
        found = model.tokenize(prompt.encode(), add_bos=False, special=True)
        if found != tokens:
            raise RuntimeError(f"{prompt!r} is {found} to llama.cpp and {tokens} to folio")


def differences(logits, prompt, answer):
    """Steps of the answer at which the other program would have said something else: (step, gap in nats)."""
    rows = logits(prompt + answer)[len(prompt) - 1:-1].astype(np.float64)
    steps = np.arange(len(answer))
    gaps = rows.max(axis=1) - rows[steps, answer]
    return [(int(step), float(gaps[step])) for step in steps if rows[step].argmax() != answer[step]]


def check(args, form):
    out = os.path.join(args.work, form + (".gguf" if form in GGUF else ""))
    command = [args.folio, "quantize", args.model, out, "--format", form, "--force"]
    if form not in GGUF and form != "llm-int8":
        command += ["--method", args.method]
    if args.calibration and (args.method != "rtn" or form == "llm-int8") and form not in GGUF:
        command += ["--calibration", args.calibration]
    print(run(command), flush=True)
    folio = Folio(args.folio, out)
    try:
        asked = [folio.answer(prompt, args.tokens) for prompt in PROMPTS]
    finally:
        folio.end()
    if form in GGUF:
        check_vocabulary(out, list(zip(PROMPTS, [prompt for prompt, _ in asked])))
    logits = llama_model(out) if form in GGUF else transformers_model(out, form)
    found = [differences(logits, *pair) for pair in asked]
    first = next(((at, *steps[0]) for at, steps in enumerate(found) if steps), None)
    worst = max((gap for steps in found for _, gap in steps), default=0.0)
    return {
        "format": form, "method": args.method, "prompts": len(PROMPTS), "tokens": sum(len(a) for _, a in asked),
        "same_answers": sum(not steps for steps in found), "differences": sum(map(len, found)),
        "first_difference": first and {"prompt": first[0], "token": first[1], "gap_nats": round(first[2], 4)},
        "largest_gap_nats": round(worst, 4), "passed": worst <= args.gap,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--folio", default="target/release/folio")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--method", default="rtn")
    parser.add_argument("--calibration")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--gap", type=float, default=0.5)
    parser.add_argument("--work")
    parser.add_argument("--json")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    scratch = args.work is None
    args.work = args.work or tempfile.mkdtemp(prefix="folio-quantized-")
    os.makedirs(args.work, exist_ok=True)
    rows = []
    try:
        for form in args.formats.split(","):
            try:
                rows.append(check(args, form))
            except Exception as error:  # One format that fails must not hide what the others do.
                rows.append({"format": form, "passed": False, "error": f"{type(error).__name__}: {error}"[:500]})
            print(json.dumps(rows[-1]), flush=True)
    finally:
        if scratch:
            shutil.rmtree(args.work, ignore_errors=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump(rows, out, indent=1)
    sys.exit(0 if all(row["passed"] for row in rows) else 1)


if __name__ == "__main__":
    main()
