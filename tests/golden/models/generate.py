"""Writes the golden files of the model families: what Hugging Face transformers computes for small random models.

    python tests/golden/models/generate.py [NAME ...]

Without names it makes them all, and then the perplexities of the trained models (`perplexity.py`).

Every model is loaded by `from_pretrained` from a folder with the very config.json and tensor names that the golden file
lists, so that the names, layouts and config dialects are transformers' own and not this project's idea of them. Runs
in f32 on the CPU, eager (plain matmuls for attention and experts), and without a cache.

Seeds are tried in order until a model is a fair judge: attention scores spread by two or more at every layer, no greedy
token and no expert within reach of a tie, and rounding errors far below the tolerance.

Rope scalings that depend on the length: Folio settles them at load by the configured maximum. transformers settles
them by the length of the call, so it is brought to the same choice. `dynamic`: the rotary module is called once with
the last position of the extended range (`factor * max_position_embeddings`), after which it keeps those frequencies,
since it only goes back for calls shorter than the original range. `longrope`: every call here is longer than the original
length, so the long factors are used throughout; one model is loaded for its original length, and no call is longer.
"""

import importlib
import json
import math
import pathlib
import re
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import kept
import perplexity
import weights
from variants import FUSED, MAX_CONTEXT, VARIANTS

PROMPT, GREEDY, TOP = 64, 64, 20
POSITIONS = [2, 15, 29, 38, 50, 63]
HERE = pathlib.Path(__file__).parent


def tensor_shapes(name, config):
    """Names and shapes as `save_pretrained` writes them."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**plain))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, save_original_format=name not in FUSED)
        with safe_open(f"{folder}/model.safetensors", "pt") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}
    if "quantization_config" in config:
        shapes = packed(shapes)
    return dict(sorted(shapes.items()))


def packed(shapes):
    """Published gpt-oss checkpoints hold experts as blocks of 32 four-bit values, and one scale a block."""
    out = {}
    for key, shape in shapes.items():
        if key.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = shape
            out[key + "_blocks"] = [experts, outputs, inputs // 32, 16]
            out[key + "_scales"] = [experts, outputs, inputs // 32]
        else:
            out[key] = shape
    return out


def rule(key, shape, config):
    """Kind, scale and mean of a tensor. Scales keep scores, residuals and logits of a size where all of them matter."""
    gemma = config["model_type"].startswith("gemma")
    tied, hidden = config["tie_word_embeddings"], config["hidden_size"]
    transposed = config["model_type"] == "gpt_oss" and re.search(r"experts\.\w+_proj$", key)
    inputs = shape[-2] if transposed else shape[-1]
    spread = 1.0 / math.sqrt(inputs)
    mean = 0.0
    if key.endswith("_blocks"):
        return "bytes", 256, 0
    if key.endswith("_scales"):
        # Powers of two: gates reach the activation's limit of 7, and the way back is smaller.
        return "bytes", 2, (124 if "gate_up" in key else 121)
    if key.endswith(".sinks"):
        mean, std = 4.0, 2.0
    elif key.endswith("bias"):
        std = 0.6
    elif re.search(r"[qk]_norm\.weight$", key):
        mean, std = (0.7 if gemma else 1.7), 0.25
    elif key == "model.norm.weight" and (gemma or config.get("embedding_multiplier", 1.0) > 1.0):
        # Where embeddings are multiplied they are small, and so is the tied head.
        mean, std = 4.0, 0.5
    elif key.endswith("norm.weight"):
        mean, std = (0.0 if gemma else 1.0), 0.25
    elif key.endswith("embed_tokens.weight"):
        std = (0.5 if tied else 1.0) / config.get("embedding_multiplier", 1.0)
        # Gemma multiplies embeddings by sqrt(hidden), and the same table makes the logits.
        std = 0.5 / math.sqrt(hidden) if gemma else std
    elif key.endswith("lm_head.weight"):
        std = 3.0 * spread
    elif re.search(r"(router|gate)\.weight$", key):
        std = 2.5 * spread
    elif re.search(r"([qk]|qkv)_proj\.weight$", key):
        std = 1.75 * spread * query_gain(config)
    else:
        std = 1.3 * spread
    return "normal", float(np.float32(std / weights.UNIT)), mean


def query_gain(config):
    """Families that scale scores by their own number get q and k that make up for it."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    scale = config.get("attention_multiplier") or config.get("query_pre_attn_scalar", head_dim) ** -0.5
    return math.sqrt(head_dim**-0.5 / scale)


def make_tensors(seed, shapes, config):
    out = {}
    for key, shape in shapes.items():
        kind, scale, mean = rule(key, shape, config)
        make = weights.normal if kind == "normal" else weights.octets
        out[key] = make(seed, key, shape, scale, mean)
    return out


def unpacked(tensors):
    """Blocks and scales to the floats they stand for, by transformers' own decoder."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    out = {key: value for key, value in tensors.items() if not key.endswith(("_blocks", "_scales"))}
    for key in tensors:
        if key.endswith("_blocks"):
            stem = key.removesuffix("_blocks")
            blocks, scales = torch.tensor(tensors[key]), torch.tensor(tensors[stem + "_scales"])
            out[stem] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous().numpy()
    return out


def load(config, tensors):
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    with tempfile.TemporaryDirectory() as folder:
        save_file(unpacked(tensors), f"{folder}/model.safetensors", metadata={"format": "pt"})
        pathlib.Path(folder, "config.json").write_text(json.dumps(plain))
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
            output_loading_info=True)
    wrong = {key: value for key, value in report.items() if value}
    assert not wrong, wrong
    return model.eval()


def max_context(config):
    """The context a model is loaded for: its own, or the extended range where `dynamic` scaling promises one."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    dynamic = rope.get("rope_type", rope.get("type")) == "dynamic"
    return int(config["max_position_embeddings"] * (rope["factor"] if dynamic else 1))


def settle_rope(model, config):
    """See the head of this file."""
    if max_context(config) > config["max_position_embeddings"]:
        model.model.rotary_emb(torch.zeros(1, 1, 1), torch.tensor([[max_context(config) - 1]]))


class Probe:
    """Watches attention scores (their spread at each layer) and routers (the gap between the last expert taken and the
    first one left)."""

    def __init__(self, model, config):
        self.spread, self.gap, self.hooks = {}, math.inf, []
        module = importlib.import_module(type(model).__module__)
        self.eager, self.module = module.eager_attention_forward, module
        module.eager_attention_forward = self.attention
        for name, part in model.named_modules():
            if type(part).__name__.endswith("TopKRouter"):
                self.hooks.append(part.register_forward_hook(self.router))
        self.top_k = config.get("num_experts_per_tok")

    def attention(self, layer, query, key, value, mask, **kwargs):
        groups = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * kwargs["scaling"]
        self.spread[layer.layer_idx] = scores[(mask == 0).expand_as(scores)].std().item()
        return self.eager(layer, query, key, value, mask, **kwargs)

    def router(self, part, inputs, _):
        logits = torch.nn.functional.linear(inputs[0], part.weight, getattr(part, "bias", None))
        best = logits.sort(dim=-1, descending=True).values
        self.gap = min(self.gap, (best[..., self.top_k - 1] - best[..., self.top_k]).min().item())

    def close(self):
        self.module.eager_attention_forward = self.eager
        for hook in self.hooks:
            hook.remove()


@torch.no_grad()
def run(model, config, prompt):
    """Logits of the whole prompt, greedy tokens, and how near any choice was."""
    settle_rope(model, config)
    probe = Probe(model, config)
    logits = model(torch.tensor([prompt]), use_cache=False).logits[0]
    spread = dict(probe.spread)
    sequence, last, margin = list(prompt), logits[-1], math.inf
    for _ in range(GREEDY):
        best = last.topk(2).values
        margin = min(margin, ((best[0] - best[1]) / last.abs().max()).item())
        sequence.append(last.argmax().item())
        last = model(torch.tensor([sequence]), use_cache=False).logits[0, -1]
    probe.close()
    return logits, sequence[PROMPT:], margin, spread, probe.gap


def verdict(logits, exact, greedy, margin, spread, gap):
    """Why this seed will not do, or None."""
    tolerance = 1e-4 * max(1.0, logits.abs().max().item())
    if min(spread.values()) < 2.0:
        return f"scores spread by {min(spread.values()):.2f} only"
    if margin < 1.5e-3:
        return f"greedy margin {margin:.1e}"
    if gap < 4e-3:
        return f"router gap {gap:.1e}"
    if (logits - exact).abs().max().item() > 0.1 * tolerance:
        return f"f32 differs from f64 by {(logits - exact).abs().max().item():.1e}"
    if len(set(greedy)) < 6:
        return f"{len(set(greedy))} different tokens"
    return None


def search(name, config):
    shapes = tensor_shapes(name, config)
    for seed in range(1, 200):
        prompt = weights.tokens(seed, PROMPT, config["vocab_size"])
        model = load(config, make_tensors(seed, shapes, config))
        logits, greedy, margin, spread, gap = run(model, config, prompt)
        with torch.no_grad():
            exact = model.double()(torch.tensor([prompt]), use_cache=False).logits[0]
        reason = verdict(logits, exact, greedy, margin, spread, gap)
        if reason is None:
            print(f"{name:26} seed {seed:3} scores {min(spread.values()):.2f}..{max(spread.values()):.2f} "
                  f"margin {margin:.4f} router gap {gap:.4f} largest logit {logits.abs().max():.1f} "
                  f"f32 error {(logits - exact).abs().max():.1e} distinct {len(set(greedy))}", flush=True)
            return shapes, seed, prompt, logits, greedy, margin, spread, gap
        print(f"  {name} seed {seed}: {reason}", flush=True)
    raise SystemExit(f"{name}: no seed will do")


def short(value, digits=8):
    return float(f"{value:.{digits}g}")


def grouped(shapes, config):
    """Tensors that differ in name alone, listed together."""
    groups = {}
    for key, shape in shapes.items():
        groups.setdefault((tuple(shape), *rule(key, shape, config)), []).append(key)
    return [{"kind": kind, "shape": shape, "scale": scale, "mean": mean, "names": names}
            for (shape, kind, scale, mean), names in groups.items()]


def write(name, config):
    shapes, seed, prompt, logits, greedy, margin, spread, gap = search(name, config)
    tops = []
    for position in POSITIONS:
        best = logits[position].topk(TOP)
        tops.append({"position": position, "ids": best.indices.tolist(),
                     "logits": [short(value) for value in best.values.tolist()]})
    golden = {
        "made_by": {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0],
                    "dtype": "float32", "attention": "eager", "experts": "eager"},
        "seed": seed,
        "config": config,
        "max_context": MAX_CONTEXT.get(name, max_context(config)),
        "tensors": grouped(shapes, config),
        "prompt": prompt,
        "greedy": greedy,
        "greedy_margin": short(margin, 3),
        "router_gap": short(gap, 3) if math.isfinite(gap) else None,
        "scores_std": [short(value, 3) for _, value in sorted(spread.items())],
        "largest_logit": short(logits.abs().max().item()),
        "log_sum_exp": [short(value) for value in logits.double().logsumexp(-1).tolist()],
        "top": tops,
    }
    compact = ((json.dumps(key), json.dumps(value, separators=(",", ":"))) for key, value in golden.items())
    lines = ",\n".join(f"{key}: {value}" for key, value in compact)
    kept.write(HERE / f"{name}.json.lzma", "{\n" + lines + "\n}\n")


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name, config in VARIANTS.items():
        if len(sys.argv) == 1 or any(name.startswith(wanted) for wanted in sys.argv[1:]):
            write(name, config)
    if len(sys.argv) == 1:
        perplexity.main()


if __name__ == "__main__":
    main()
