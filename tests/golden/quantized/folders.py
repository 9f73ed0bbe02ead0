"""Makes target/quantized: models that llm-compressor quantized, each with what transformers computes from its weights.

    python tests/golden/quantized/folders.py [NAME ...]

Random models, and the trained ones where they lie beside the repository. They are too large to be kept;
`crates/model/tests/golden/packed.rs` checks those that are there.
"""

import json
import lzma
import pathlib
import shutil
import sys

import torch
import transformers

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "models"))

import generate  # noqa: E402
import seeded  # noqa: E402
import oneshot  # noqa: E402
import weights  # noqa: E402

ROOT = HERE.parent.parent.parent
TRAINED = ROOT.parent / "shared" / "models"
TOKENS = 192
SCHEMES = ["W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16", "mixed"]


def sources():
    yield from (("random-llama", seeded.LLAMA), ("random-qwen3_moe", seeded.EXPERTS))
    for name in ("folio-rust-42m", "folio-rust-moe-47m"):
        if (TRAINED / name / "config.json").is_file():
            yield name, str(TRAINED / name)
        else:
            print(f"skipped: {name} is not here")


@torch.no_grad()
def expected(folder, prompt):
    config, model = oneshot.load_folder(folder)
    logits = model(torch.tensor([prompt]), use_cache=False).logits[0]
    tops = []
    for position in range(0, len(prompt), 9):
        best = logits[position].topk(20)
        tops.append({"position": position, "ids": best.indices.tolist(), "logits": [generate.short(v) for v in best.values.tolist()]})
    return {"seed": 0, "config": {}, "max_context": config["max_position_embeddings"], "tensors": [], "prompt": prompt, "greedy": [],
            "largest_logit": generate.short(logits.abs().max().item()), "scores_std": [],
            "log_sum_exp": [generate.short(value) for value in logits.double().logsumexp(-1).tolist()], "top": tops}


def main():
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    text = json.loads(lzma.decompress((HERE.parent / "models" / "eval.json.lzma").read_bytes()))["ids"][:TOKENS]
    for model, source in sources():
        prompt = weights.tokens(1, TOKENS, source["vocab_size"]) if isinstance(source, dict) else text
        for scheme in SCHEMES:
            name = f"{model}-{scheme.lower()}"
            if len(sys.argv) > 1 and not any(name.startswith(wanted) for wanted in sys.argv[1:]):
                continue
            target = ROOT / "target" / "quantized" / name
            unfinished = ROOT / "target" / "quantized-unfinished"
            for folder in (target, unfinished):
                shutil.rmtree(folder, ignore_errors=True)
            recipe = oneshot.recipe(seeded.mixed() if scheme == "mixed" else scheme)
            oneshot.quantize(source, unfinished, recipe, torch.bfloat16)
            (unfinished / "expected.json").write_text(json.dumps(expected(unfinished, prompt)))
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished.rename(target)
            print(name, flush=True)


if __name__ == "__main__":
    main()
