"""How many guesses of the heads hold, on what the model says behind text that neither it nor the heads have seen.

usage: measure.py MODEL TEXT HEADS_DIR ...
HEADS_DIR has medusa and eagle, each as NAME.safetensors or folio-rust-42m.NAME.gguf; several are measured on the same text.
"""
import os, sys
import numpy as np, torch
from eagle import Eagle3
from medusa import Medusa
from target import Target
from text import distinct, pieces

DEPTHS = 6


def continuations(target, held, temperature, generator, rows, prompt, count, goes_on=lambda: True):
    """What the model says behind pieces of the text, rows that fall into a loop left out."""
    prompts = pieces(held, rows, prompt, generator)
    ids = target.generate(prompts, count, torch.full((rows,), temperature, device=target.device), goes_on)
    return ids[distinct(ids[:, prompt:]) > 0.5]


def holds(target, head, ids, prompt):
    """The share of guesses behind the answers' tokens that hold, by depth."""
    found = []
    for part in ids.split(32):
        fused, final = target.forward(part)
        first = prompt - 1  # the row of the last token of the prompt, which gives the first token of the answer
        agree = head.accepted(final, part, first) if isinstance(head, Medusa) else head.accepted(fused, part, DEPTHS, first)
        found.append(agree.flatten(0, 1))
    return torch.cat(found).float().mean(0).tolist()


def measure(target, heads, held, generator, say, rows=256, prompt=256, count=200, goes_on=lambda: True):
    """Greedy and at temperature 0.7; `heads` by what they are called."""
    for temperature in (0.0, 0.7):
        ids = continuations(target, held, temperature, generator, rows, prompt, count, goes_on)
        say(f"temperature {temperature}: {len(ids)} of {rows} rows are no loops, {ids.shape[1] - prompt} tokens each")
        for name, head in heads.items():
            rates = holds(target, head, ids, prompt)
            say(f"  {name}: holds by depth {[round(x, 3) for x in rates]}, tokens a pass {1 + sum(rates):.3f}")


def tensors(folder, name):
    """Of a head's file, by name, in floats."""
    if os.path.exists(f"{folder}/{name}.safetensors"):
        from safetensors.torch import load_file
        return load_file(f"{folder}/{name}.safetensors")
    import gguf
    plain = lambda t: t.data if t.tensor_type == gguf.GGMLQuantizationType.I16 else gguf.quants.dequantize(t.data, t.tensor_type)
    return {t.name: torch.from_numpy(np.array(plain(t))) for t in gguf.GGUFReader(f"{folder}/folio-rust-42m.{name}.gguf").tensors}


def load(target, folder):
    stored = tensors(folder, "eagle")
    ffn = stored["midlayer.mlp.gate_proj.weight"].shape[0]
    eagle = Eagle3(target, ffn, torch.arange(1, device=target.device))
    eagle.load(stored)
    stored = tensors(folder, "medusa")
    medusa = Medusa(target, sum(name.endswith(".bias") for name in stored))
    medusa.load(stored)
    return {f"{folder}: medusa": medusa, f"{folder}: eagle": eagle}


def main():
    path, text, *folders = sys.argv[1:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = Target(path, device)
    held = torch.from_numpy(np.load(text)["held"].astype(np.int32)).to(device)
    heads = {name: head for folder in folders for name, head in load(target, folder).items()}
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    sizes = {} if device == "cuda" else dict(rows=64, prompt=128, count=112)
    measure(target, heads, held, generator, lambda text: print(text, flush=True), **sizes)


if __name__ == "__main__":
    main()
