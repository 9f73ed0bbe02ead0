"""Writes tests/golden/heads/heads.json.lzma: what heads that draft tokens say of a small random Llama.

    python tests/golden/heads/generate.py

The Llama is transformers' own; its hidden states are read by hooks. The heads are written out here in plain PyTorch after
their public implementations (Medusa's `ResBlock`, EAGLE's `cnets1.py` and `cnets.py`), one row at a time and without
sharing anything between the branches of a tree. All weights come from names and a seed (`../models/weights.py`). In f64,
so that what is written is exact to every digit that is compared.
"""

import json
import lzma
import math
import pathlib
import sys

import torch
import torch.nn.functional as F
import transformers

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "models"))

import generate as models  # noqa: E402
import weights  # noqa: E402

SEED, HEAD_SEED, TOKENS, DRAFT_VOCABULARY, FFN = 5, 6, 26, 41, 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97, "hidden_size": 32,
    "intermediate_size": 56, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None, "hidden_act": "silu", "rope_theta": 500.0, "torch_dtype": "float32"}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 8
# Drafts behind the last token: two that follow it, and what follows those.
PARENTS = [None, None, 0, 1, 0, 3, 5]


def medusa_shapes(heads, blocks, outputs):
    shapes = {}
    for head in range(heads):
        for block in range(blocks):
            stem = f"medusa_head.{head}.{block}.linear"
            shapes |= {f"{stem}.weight": [HIDDEN, HIDDEN], f"{stem}.bias": [HIDDEN]}
        if outputs:
            shapes[f"medusa_head.{head}.{blocks}.weight"] = [CONFIG["vocab_size"], HIDDEN]
    return shapes


def layer_shapes(stem, inputs):
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    sizes = {"self_attn.q_proj": [q, inputs], "self_attn.k_proj": [kv, inputs], "self_attn.v_proj": [kv, inputs],
             "self_attn.o_proj": [HIDDEN, q], "mlp.gate_proj": [FFN, HIDDEN], "mlp.up_proj": [FFN, HIDDEN],
             "mlp.down_proj": [HIDDEN, FFN], "post_attention_layernorm": [HIDDEN]}
    return {f"{stem}.{name}.weight": size for name, size in sizes.items()}


def eagle3_shapes():
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
    return {"fc.weight": [HIDDEN, 3 * HIDDEN], "lm_head.weight": [DRAFT_VOCABULARY, HIDDEN],
            **{f"{name}.weight": [HIDDEN] for name in norms}, **layer_shapes("midlayer", 2 * HIDDEN)}


def eagle1_shapes():
    return {"fc.weight": [HIDDEN, 2 * HIDDEN], "fc.bias": [HIDDEN], **layer_shapes("layers.0", HIDDEN)}


def made(shapes):
    """The tensors in f64, and their listing as golden files have it."""
    values = models.make_tensors(HEAD_SEED, shapes, CONFIG)
    return {name: torch.tensor(value).double() for name, value in values.items()}, models.grouped(shapes, CONFIG)


def rms_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weight


def rotate(x, position):
    half = HEAD_DIM // 2
    # Angles are f32 in transformers and in what is compared.
    turned = position * (1.0 / CONFIG["rope_theta"] ** (torch.arange(half).float() / half))
    cos, sin = turned.cos().double(), turned.sin().double()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Layer:
    """One decoder layer, a row at a time over a list of keys and values that the caller keeps."""

    def __init__(self, tensors, stem):
        self.weight = lambda name: tensors[f"{stem}.{name}.weight"]

    def row(self, state, x, position, past):
        """What the stream `state` becomes, and `past` with this row's key and value."""
        split = lambda name, heads: F.linear(x, self.weight(f"self_attn.{name}")).view(heads, HEAD_DIM)
        q = rotate(split("q_proj", HEADS), position)
        past = past + [(rotate(split("k_proj", KV_HEADS), position), split("v_proj", KV_HEADS))]
        keys, values = (torch.stack(part).repeat_interleave(HEADS // KV_HEADS, 1) for part in zip(*past))
        scores = torch.einsum("hd,phd->hp", q, keys) / math.sqrt(HEAD_DIM)
        seen = torch.einsum("hp,phd->hd", scores.softmax(-1), values).reshape(-1)
        state = state + F.linear(seen, self.weight("self_attn.o_proj"))
        h = rms_norm(state, self.weight("post_attention_layernorm"))
        gated = F.silu(F.linear(h, self.weight("mlp.gate_proj"))) * F.linear(h, self.weight("mlp.up_proj"))
        return state + F.linear(gated, self.weight("mlp.down_proj")), past


class Eagle3:
    def __init__(self, tensors, model):
        self.tensors, self.embedding = tensors, model["model.embed_tokens.weight"]
        self.layer = Layer(tensors, "midlayer")

    def given(self, states):
        return F.linear(states["fused"], self.tensors["fc.weight"])

    def row(self, state, token, position, past):
        norm = lambda name, x: rms_norm(x, self.tensors[f"midlayer.{name}.weight"])
        x = torch.cat([norm("input_layernorm", self.embedding[token]), norm("hidden_norm", state)])
        return self.layer.row(state, x, position, past)

    def logits(self, state):
        return F.linear(rms_norm(state, self.tensors["norm.weight"]), self.tensors["lm_head.weight"])


class Eagle1:
    def __init__(self, tensors, model):
        self.tensors, self.model = tensors, model
        self.layer = Layer(tensors, "layers.0")

    def given(self, states):
        return states["final"]

    def row(self, state, token, position, past):
        both = torch.cat([self.model["model.embed_tokens.weight"][token], state])
        x = F.linear(both, self.tensors["fc.weight"], self.tensors["fc.bias"])
        # The public layer has no norm before attention.
        return self.layer.row(x, x, position, past)

    def logits(self, state):
        return F.linear(state, self.model["lm_head.weight"])


def target(tensors, tokens):
    """The model's states: before the three layers that EAGLE-3 reads, and behind the last norm."""
    model = models.load(CONFIG, tensors).double()
    layers, taken = model.model.layers, {}
    for number in (2, len(layers) // 2, len(layers) - 3):
        keep = lambda _, inputs, number=number: taken.__setitem__(number, inputs[0][0])
        layers[number].register_forward_pre_hook(keep)
    final = model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
    return {"fused": torch.cat([taken[number] for number in sorted(taken)], -1), "final": final}


def short(values):
    if isinstance(values, torch.Tensor):
        values = values.tolist()
    return [short(value) if isinstance(value, list) else models.short(value) for value in values]


def medusa(name, shapes, states, model, heads, blocks):
    tensors, listed = made(shapes)
    rows, logits = [3, 11, 24], []
    for head in range(heads):
        x = states["final"][rows]
        for block in range(blocks):
            stem = f"medusa_head.{head}.{block}.linear"
            x = x + F.silu(F.linear(x, tensors[f"{stem}.weight"], tensors[f"{stem}.bias"]))
        logits.append(F.linear(x, tensors.get(f"medusa_head.{head}.{blocks}.weight", model["lm_head.weight"])))
    return {"name": name, "tensors": listed, "rows": rows, "logits": [short(each) for each in logits]}


def eagle(name, kind, shapes, states, model, tokens, chosen):
    tensors, listed = made(shapes)
    if chosen:
        offsets = [token - column for column, token in enumerate(chosen)]
        listed.append({"kind": "values", "dtype": "I64", "shape": [len(offsets)], "values": offsets, "names": ["d2t"]})
    head, past, prompt_logits = kind(tensors, model), [], []
    given = head.given(states)
    for position in range(len(tokens) - 1):
        state, past = head.row(given[position], tokens[position + 1], position, past)
        prompt_logits.append(head.logits(state))
    drafts = [int(z) for z in weights.tokens(HEAD_SEED, len(PARENTS), CONFIG["vocab_size"])]
    nodes = []
    for token, parent in zip(drafts, PARENTS):
        before, seen, depth = (state, past, 0) if parent is None else nodes[parent]
        after, seen = head.row(before, token, len(tokens) - 1 + depth, seen)
        nodes.append((after, seen, depth + 1))
    return {"name": name, "tensors": listed, "vocabulary": chosen, "parents": PARENTS, "drafts": drafts,
            "prompt_logits": short(torch.stack(prompt_logits)[[0, 15, -1]]), "prompt_rows": [0, 15, len(tokens) - 2],
            "draft_logits": short(torch.stack([head.logits(node[0]) for node in nodes]))}


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    shapes = models.tensor_shapes("llama", CONFIG)
    plain, tokens = models.make_tensors(SEED, shapes, CONFIG), weights.tokens(SEED, TOKENS, CONFIG["vocab_size"])
    states = target(plain, tokens[:-1])
    model = {name: torch.tensor(value).double() for name, value in plain.items()}
    order = torch.tensor([int(z) for z in weights.stream(SEED, "draft vocabulary", CONFIG["vocab_size"]) >> 1])
    chosen = sorted(order.argsort()[:DRAFT_VOCABULARY].tolist())
    golden = {
        "made_by": {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0],
                    "dtype": "float64", "attention": "eager"},
        "seed": SEED,
        "head_seed": HEAD_SEED,
        "config": CONFIG,
        "tensors": models.grouped(shapes, CONFIG),
        "tokens": tokens,
        "row": 20,
        "fused": short(states["fused"][20]),
        "final": short(states["final"][20]),
        "medusa": [
            medusa("shared output", medusa_shapes(3, 1, False), states, model, 3, 1),
            medusa("own outputs", medusa_shapes(2, 2, True), states, model, 2, 2)],
        "eagle": [
            eagle("EAGLE-3", Eagle3, eagle3_shapes(), states, model, tokens, chosen),
            eagle("EAGLE-1", Eagle1, eagle1_shapes(), states, model, tokens, [])],
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in golden.items())
    text = ("{\n" + lines + "\n}\n").encode()
    packed = lzma.compress(text, lzma.FORMAT_ALONE, preset=9 | lzma.PRESET_EXTREME)
    (HERE / "heads.json.lzma").write_bytes(packed)


if __name__ == "__main__":
    main()
