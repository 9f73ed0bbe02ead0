"""Writes tests/golden/hidden-states.json.lzma: the pooled hidden states that Hugging Face transformers computes.

    python tests/golden/models/hidden.py

One model a family, of those that have a golden file here, with the weights and the prompt that the file lists: the mean
of `last_hidden_state` over the prompt, and the last token's. That state lies behind the model's last norm.
"""

import json
import pathlib

import torch
import transformers

import generate
import kept
import weights

HERE = pathlib.Path(__file__).parent


def tensors(golden):
    out = {}
    for group in golden["tensors"]:
        make = weights.normal if group["kind"] == "normal" else weights.octets
        for name in group["names"]:
            scale, mean = group["scale"], group["mean"]
            if group["kind"] == "bytes":
                scale, mean = int(scale), int(mean)
            out[name] = make(golden["seed"], name, group["shape"], scale, mean)
    return out


@torch.no_grad()
def pooled(golden):
    model = generate.load(golden["config"], tensors(golden))
    generate.settle_rope(model, golden["config"])
    states = model.model(torch.tensor([golden["prompt"]]), use_cache=False).last_hidden_state[0].double()
    return [[generate.short(value) for value in vector.tolist()] for vector in (states.mean(0), states[-1])]


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    models = {}
    for path in sorted(HERE.glob("*.json.lzma")):
        name, golden = path.name.removesuffix(".json.lzma"), kept.read(path)
        family = golden["config"]["model_type"]
        if not any(family == other["family"] for other in models.values()):
            mean, last = pooled(golden)
            models[name] = {"family": family, "mean": mean, "last": last}
            print(name, flush=True)
    made_by = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0], "dtype": "float32"}
    lines = [f"{json.dumps(name)}: {json.dumps(model, separators=(',', ':'))}" for name, model in models.items()]
    text = f'{{\n"made_by": {json.dumps(made_by)},\n"models": {{\n' + ",\n".join(lines) + "\n}\n}\n"
    kept.write(HERE.parent / "hidden-states.json.lzma", text)


if __name__ == "__main__":
    main()
