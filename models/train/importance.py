"""How strongly each input of each matrix of the heads is driven: mean squares, by which `cargo xtask heads` weighs errors.

usage: importance.py MODEL TEXT HEADS_DIR ROWS
Reads and writes HEADS_DIR: medusa and eagle in .safetensors, importance.safetensors.
"""
import sys
import numpy as np, torch, torch.nn.functional as F
from measure import DEPTHS, load
from store import save
from target import Target
from text import pieces

READERS = {"qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "o_proj": ("self_attn.o_proj",),
           "gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down_proj": ("mlp.down_proj",)}


@torch.no_grad()
def main():
    path, text, folder, rows = sys.argv[1:4] + [int(sys.argv[4])]
    target = Target(path, "cuda" if torch.cuda.is_available() else "cpu")
    tokens = torch.from_numpy(np.load(text)["train"].astype(np.int32)).to(target.device)
    medusa, eagle = load(target, folder).values()
    sums, counts = {}, {}

    def watch(name, x):
        sums[name] = sums.get(name, 0) + x.float().pow(2).sum((0, 1))
        counts[name] = counts.get(name, 0) + x.shape[0] * x.shape[1]

    generator = torch.Generator().manual_seed(2)
    for _ in range(rows // 4):
        ids = pieces(tokens, 4, 256, generator)
        fused, final = target.forward(ids)
        watch("fc", fused), watch("medusa", final)
        w, past, length = eagle.narrow(), [], 256 - DEPTHS - 1
        state, said = F.linear(fused[:, :length], w["fc"]), ids[:, 1:1 + length]
        for depth in range(DEPTHS):
            state = eagle.step(w, state, said, past, depth, watch)
            said = eagle.chosen[eagle.logits(w, state).argmax(-1)]
    mean = {name: sums[name] / counts[name] for name in sums}
    out = {"fc.weight": mean["fc"]} | {f"medusa_head.{i}.0.linear.weight": mean["medusa"] for i in range(medusa.count)}
    out |= {f"midlayer.{part}.weight": mean[name] for name, parts in READERS.items() for part in parts}
    save(out, f"{folder}/importance.safetensors", {"rows": str(rows)})


main()
