"""Writes into `eval.json.lzma` what transformers makes of its ids with the trained models, in bf16.

    python tests/golden/models/perplexity.py

The ids are this project's own source as it stood in its first commit, 7,099 tokens to the models' tokenizer, so that the
check needs neither. Windows of 2,048 tokens do not overlap, and the first token of each is not scored. The models are
looked for in `../shared/models`, beside the repository; without them nothing is written.
"""

import json
import pathlib

import torch
import transformers
from transformers import AutoModelForCausalLM

import kept

MODELS = ["folio-rust-42m", "folio-rust-moe-47m"]
WINDOW = 2048
HERE = pathlib.Path(__file__).resolve().parent
FOLDER = HERE.parents[2] / "../shared/models"


@torch.no_grad()
def nats(folder, ids, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    total, scored = 0.0, 0
    for start in range(0, len(ids), WINDOW):
        window = torch.tensor([ids[start : start + WINDOW]])
        logits = model(window, use_cache=False).logits[0, :-1].double()
        losses = torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum")
        total, scored = total + losses.item(), scored + window.shape[1] - 1
    return total / scored, scored


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    models = FOLDER
    if not (models / MODELS[0]).is_dir():
        print("skipped: the trained models are not here")
        return
    ids = kept.read(HERE.parent / "eval.json.lzma")["ids"]
    results = {}
    for name in MODELS:
        bf16, scored = nats(models / name, ids, torch.bfloat16)
        f32, _ = nats(models / name, ids, torch.float32)
        results[name] = {"nats_per_token": round(bf16, 6), "nats_per_token_f32": round(f32, 6)}
        print(name, results[name], flush=True)
    golden = {
        "made_by": {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0],
                    "dtype": "bfloat16"},
        "window": WINDOW,
        "tokens_scored": scored,
        "models": results,
        "ids": ids,
    }
    compact = ((json.dumps(key), json.dumps(value, separators=(",", ":"))) for key, value in golden.items())
    lines = ",\n".join(f"{key}: {value}" for key, value in compact)
    kept.write(HERE.parent / "eval.json.lzma", "{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
