"""How many guesses of the heads hold, on what the model says behind text that neither it nor the heads have seen.

usage: measure.py MODEL TEXT HEADS_DIR
HEADS_DIR has medusa and eagle3, each as .safetensors or .gguf.
"""
import sys
import numpy as np, torch
from eagle import Eagle3
from medusa import Medusa
from target import Target
from text import distinct, pieces

DEPTHS = 6


def report(name, agree, say):
    rates = agree.float().mean(0)
    say(f"{name}: holds by depth {[round(x, 3) for x in rates.tolist()]}, tokens a pass {1 + rates.sum().item():.3f}")


def measure(target, medusa, eagle, held, generator, say, goes_on=lambda: True, small=False):
    """Greedy and at temperature 0.7, rows that fall into a loop left out."""
    rows, prompt, count = (8, 64, 64) if small else (256, 256, 200)
    for temperature in (0.0, 0.7):
        prompts = pieces(held, rows, prompt, generator)
        ids = target.generate(prompts, count, torch.full((rows,), temperature, device=target.device), goes_on)
        keep = distinct(ids[:, prompt:]) > 0.5
        ids = ids[keep]
        found = {"medusa": [], "eagle3": []}
        for part in ids.split(32):
            fused, final = target.forward(part)
            first = prompt - 1  # the row of the last token of the prompt, which gives the first token of the answer
            found["medusa"].append(medusa.accepted(final, part, first).flatten(0, 1))
            found["eagle3"].append(eagle.accepted(fused, part, DEPTHS, first).flatten(0, 1))
        say(f"temperature {temperature}: {len(ids)} of {rows} rows are no loops, {ids.shape[1] - prompt} tokens each")
        for name, agree in found.items():
            report(f"  {name}", torch.cat(agree), say)


def tensors(folder, name):
    import os
    if os.path.exists(f"{folder}/{name}.safetensors"):
        from safetensors.torch import load_file
        return load_file(f"{folder}/{name}.safetensors")
    import gguf
    plain = lambda t: t.data if t.tensor_type.name[0] == "I" else gguf.quants.dequantize(t.data, t.tensor_type)
    return {t.name: torch.from_numpy(np.array(plain(t))) for t in gguf.GGUFReader(f"{folder}/{name}.gguf").tensors}


def main():
    path, text, folder = sys.argv[1:4]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = Target(path, device)
    held = torch.from_numpy(np.load(text)["held"].astype(np.int32)).to(device)
    stored = tensors(folder, "eagle3")
    eagle = Eagle3(target, stored["midlayer.mlp.gate_proj.weight"].shape[0], torch.arange(1, device=device))
    eagle.load(stored)
    stored = tensors(folder, "medusa")
    medusa = Medusa(target, sum(name.endswith(".bias") for name in stored))
    medusa.load(stored)
    generator = torch.Generator().manual_seed(1)
    measure(target, medusa, eagle, held, generator, lambda text: print(text, flush=True), small=device == "cpu")


if __name__ == "__main__":
    main()
