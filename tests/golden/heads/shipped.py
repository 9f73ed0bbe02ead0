"""Writes tests/golden/heads/shipped.json: what the heads in models/ say of the built-in model.

    python tests/golden/heads/shipped.py

Model and heads are decoded by the `gguf` package and computed in f64: the model by transformers, the heads in plain PyTorch. The EAGLE
head's output matrix is the model's rows of its draft vocabulary in Q8_0, as the `gguf` package rounds them.
"""

import json
import math
import pathlib
import sys

import gguf
import torch
import torch.nn.functional as F
import transformers

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import default_model  # noqa: E402

MODELS = default_model.MODELS
TEXT = """impl Stack {
    /// Creates an empty stack.
    pub fn new() -> Self {
        Self { items: Vec::new() }
    }

    pub fn push(&mut self, item: u32) {
        self.items.push(item);
    }

    pub fn pop(&mut self)"""
ROWS, DRAFTS, BEST, EVERY = [20, 41, 58], 4, 6, 509
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def tensors(kind):
    plain = {gguf.GGMLQuantizationType.I16}
    decode = lambda t: t.data if t.tensor_type in plain else gguf.quants.dequantize(t.data, t.tensor_type)
    read = gguf.GGUFReader(MODELS / f"folio-rust-42m.{kind}.gguf").tensors
    return {t.name.removesuffix(".weight"): torch.from_numpy(decode(t).copy()).double() for t in read}


def states(model, tokens):
    """Before the three layers that EAGLE-3 reads, side by side, and behind the last norm."""
    layers, taken = model.model.layers, {}
    for number in (2, len(layers) // 2, len(layers) - 3):
        keep = lambda _, inputs, number=number: taken.__setitem__(number, inputs[0][0])
        layers[number].register_forward_pre_hook(keep)
    final = model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
    return torch.cat([taken[number] for number in sorted(taken)], -1), final


def rotate(x, positions, theta):
    half = x.shape[-1] // 2
    turned = positions[:, None].float() * (1.0 / theta ** (torch.arange(half).float() / half))
    cos, sin = turned.cos().double()[:, None], turned.sin().double()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Eagle:
    """The head of one sequence, whose rows come in any number at a time."""

    def __init__(self, model):
        config = model.config
        self.weights, self.embedding, self.eps = tensors("eagle"), model.get_input_embeddings().weight, config.rms_norm_eps
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.theta = config.rope_parameters["rope_theta"]
        self.tokens = torch.arange(len(self.weights["d2t"])) + self.weights["d2t"].long()
        rows = gguf.quants.quantize(self.embedding[self.tokens].float().numpy(), Q8_0)
        self.output = torch.from_numpy(gguf.quants.dequantize(rows, Q8_0)).double()
        self.keys = self.values = torch.empty(0, self.kv_heads, self.size).double()

    def norm(self, name, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weights[name]

    def rows(self, state, tokens):
        """What states [rows, hidden] become beside the tokens that follow them."""
        w, first = lambda name, x: F.linear(x, self.weights[f"midlayer.{name}_proj"]), len(self.keys)
        places = torch.arange(first, first + len(tokens))
        embedded = self.norm("midlayer.input_layernorm", self.embedding[tokens])
        x = torch.cat([embedded, self.norm("midlayer.hidden_norm", state)], -1)
        split = lambda name, heads: w(name, x).view(len(tokens), heads, self.size)
        self.keys = torch.cat([self.keys, rotate(split("self_attn.k", self.kv_heads), places, self.theta)])
        self.values = torch.cat([self.values, split("self_attn.v", self.kv_heads)])
        keys, values = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (self.keys, self.values))
        scores = torch.einsum("rhd,phd->rhp", rotate(split("self_attn.q", self.heads), places, self.theta), keys)
        ahead = torch.arange(len(keys)) > places[:, None]
        scores = (scores / math.sqrt(self.size)).masked_fill(ahead[:, None], -math.inf)
        seen = torch.einsum("rhp,phd->rhd", scores.softmax(-1), values).flatten(1)
        state = state + w("self_attn.o", seen)
        h = self.norm("midlayer.post_attention_layernorm", state)
        return state + w("mlp.down", F.silu(w("mlp.gate", h)) * w("mlp.up", h))

    def logits(self, state):
        return F.linear(self.norm("norm", state), self.output)


def short(logits):
    """Of a row of logits: the best columns, best first, some others, and all of their values."""
    columns = logits.topk(BEST).indices.tolist() + list(range(0, len(logits), EVERY))
    return {"columns": columns, "values": [round(logits[column].item(), 5) for column in columns]}


def eagle(model, fused, tokens):
    head = Eagle(model)
    state = head.rows(F.linear(fused, head.weights["fc"]), tokens[1:])
    found = {"rows": [short(head.logits(state[row])) for row in ROWS], "chain": [], "drafts": []}
    state = state[-1:]
    for _ in range(DRAFTS):
        logits = head.logits(state)[0]
        token = int(head.tokens[logits.argmax()])
        found["chain"].append(short(logits))
        found["drafts"].append(token)
        state = head.rows(state, [token])
    return found


def medusa(model, final):
    weights, found = tensors("medusa"), []
    while (stem := f"medusa_head.{len(found)}.0.linear") in weights:
        x = final[ROWS]
        x = x + F.silu(F.linear(x, weights[stem], weights[f"{stem}.bias"]))
        found.append([short(row) for row in F.linear(x, model.get_output_embeddings().weight)])
    return found


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    model, tokenizer, _ = default_model.load(MODELS / "folio-rust-42m.gguf")
    model = model.double()
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    fused, final = states(model, tokens[:-1])
    golden = {
        "made_by": {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0], "gguf": "0.19.0",
                    "dtype": "float64"},
        "tokens": tokens,
        "rows": ROWS,
        "medusa": medusa(model, final),
        "eagle": eagle(model, fused, tokens),
    }
    print(len(tokens), "tokens; drafts:", repr(tokenizer.decode(golden["eagle"]["drafts"])))
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in golden.items())
    (HERE / "shipped.json").write_text("{\n" + lines + "\n}\n")


main()
