"""How strongly each input of each matrix is driven: the mean square of its activations over some text.

usage: python models/calibrate.py CHECKPOINT_FOLDER TEXT.jsonl WINDOWS OUT.safetensors
       (needs torch, transformers, safetensors; TEXT.jsonl has one {"text": ...} a line)

Writes one vector an input, under the GGUF name of the first matrix that reads it (attn_q for attn_k and attn_v too, ffn_gate
for ffn_up); `cargo xtask models --importance` weighs rounding errors by it.
"""
import json
import sys

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

WINDOW = 2048
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
         "mlp.down_proj": "ffn_down"}


def watch(module, name, sums):
    def note(_, inputs):
        x = inputs[0].float().reshape(-1, inputs[0].shape[-1])
        sums[name] = sums.get(name, 0) + x.pow(2).mean(0)
    module.register_forward_pre_hook(note)


@torch.no_grad()
def main():
    folder, text, count, out = sys.argv[1:]
    count = int(count)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sums = {}
    for at, layer in enumerate(model.model.layers):
        for theirs, ours in NAMES.items():
            watch(layer.get_submodule(theirs), f"blk.{at}.{ours}.weight", sums)
    watch(model.lm_head, "token_embd.weight", sums)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    texts = [json.loads(line)["text"] for line in open(text)]
    ids = []
    for one in texts[:: max(1, len(texts) // (count * 4))]:
        ids += tokenizer.encode(one[:8000]).ids + [0]
    for at in range(count):
        model(torch.tensor([ids[at * WINDOW : (at + 1) * WINDOW]]))
    save_file({name: (total / count).contiguous() for name, total in sums.items()}, out)


main()
