"""Perplexity of the GGUF files against the checkpoint they were made from.

usage: python models/measure.py CHECKPOINT_FOLDER TEXT.jsonl WINDOWS[@FIRST] FILE.gguf...
       (needs torch, transformers, gguf; TEXT.jsonl has one {"text": ...} a line, read from line FIRST on)

The text is cut into non-overlapping windows of 2,048 tokens, the first token of each unscored. Weights are decoded by
the `gguf` package and run in f32 by transformers, and so is the checkpoint, so that only the stored form differs.
"""
import json
import math
import os
import sys
import time

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from tokenizers import Tokenizer

WINDOW = 2048
IN_LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def name(ours):
    parts = ours.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{IN_LAYER[parts[2]]}.weight"
    return WHOLE[parts[0]] + ".weight"


def weights(path, config):
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        values = values.reshape([int(dim) for dim in reversed(tensor.shape)])
        for kind, heads in (("attn_q.", config.num_attention_heads), ("attn_k.", config.num_key_value_heads)):
            if kind in tensor.name:  # the rows of a head back into two halves
                rows, cols = values.shape
                values = values.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)
        tensors[name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(values))
    return tensors


def windows(folder, text, count, first):
    """Every so manyth file, so that few windows see many crates."""
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    texts = [json.loads(line)["text"] for line in open(text)]
    step = max(1, len(texts) // (count * 4))
    ids = []
    for one in texts[first::step]:
        ids += tokenizer.encode(one).ids + [0]
        if len(ids) >= count * WINDOW:
            break
    return torch.tensor(ids[: len(ids) // WINDOW * WINDOW][: count * WINDOW]).reshape(-1, WINDOW)


@torch.no_grad()
def loss(model, batch):
    total = 0.0
    for window in batch:
        logits = model(window[None]).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits.float(), window[1:], reduction="sum").item()
    return total / (batch.shape[0] * (WINDOW - 1))


def main():
    folder, text, count, *files = sys.argv[1:]
    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    count, _, first = count.partition("@")
    batch = windows(folder, text, int(count), int(first or 0))
    base = loss(model, batch)
    print(f"{batch.numel()} tokens; bf16 weights: perplexity {math.exp(base):.4f}, {base:.5f} nats", flush=True)
    for path in files:
        start = time.time()
        state = model.state_dict()
        state.update(weights(path, model.config))
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict(state)
        nats = loss(model, batch)
        change = 100 * (math.exp(nats - base) - 1)
        print(f"{path}: {os.path.getsize(path)} bytes, perplexity {math.exp(nats):.4f} ({change:+.2f}%), "
              f"{time.time() - start:.0f} s", flush=True)


main()
