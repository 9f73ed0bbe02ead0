"""Writes seeded/*.json.lzma: small quantized checkpoints, and the logits that transformers computes from their dequantized weights.

    python tests/golden/quantized/seeded.py [NAME ...]

Configuration, tensor names, types and shapes are those that llm-compressor writes for the model (ModelOpt's and the `fp8`
ones by their documented layout); codes and scales are then made from nothing but a seed, by the rules that each file lists,
so that no tensor needs to be stored. The weights are what the tools' own decoders make of them (`oneshot.py`).
"""

import json
import math
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers
from importlib.metadata import version
from safetensors.torch import load_file

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "models"))

import generate  # noqa: E402
import kept  # noqa: E402
import oneshot  # noqa: E402
import weights  # noqa: E402

TOP, POSITIONS = 12, [2, 29, 50, 63]
LLAMA = dict(model_type="llama", vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
             rope_theta=500.0, rms_norm_eps=1e-5)
EXPERTS = dict(model_type="qwen3_moe", vocab_size=256, hidden_size=128, intermediate_size=256, moe_intermediate_size=128,
               num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4,
               num_experts_per_tok=2, max_position_embeddings=256, tie_word_embeddings=False, decoder_sparse_step=1,
               norm_topk_prob=True, rope_theta=500.0, rms_norm_eps=1e-5)


def mixed():
    """Attention and the rest in different formats."""
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    attention = preset_name_to_scheme("W8A8", ["re:.*self_attn.*"])
    rest = preset_name_to_scheme("W4A16", ["re:.*mlp.*"])
    rest.weights.group_size = 32
    return {"group_0": attention, "group_1": rest}


# What each is made of: a model and a scheme of llm-compressor, or of the tool named first.
VARIANTS = {
    "llama-w4a16": (LLAMA, "W4A16"),
    "llama-w4a16-zeros": (LLAMA, "W4A16_ASYM"),
    "llama-w8a8": (LLAMA, "W8A8"),
    "llama-fp8-dynamic": (LLAMA, "FP8_DYNAMIC"),
    "llama-fp8-block": (LLAMA, "FP8_BLOCK"),
    "llama-nvfp4": (LLAMA, "NVFP4A16"),
    "llama-mxfp4": (LLAMA, "MXFP4A16"),
    "llama-mixed": (LLAMA, "mixed"),
    "llama-modelopt-fp8": (LLAMA, "modelopt:FP8"),
    "llama-modelopt-nvfp4": (LLAMA, "modelopt:NVFP4"),
    "qwen3_moe-w4a16": (EXPERTS, "W4A16"),
    "qwen3_moe-nvfp4": (EXPERTS, "NVFP4A16"),
    "qwen3_moe-fp8-blocks": (EXPERTS, "fp8"),
}

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8", torch.uint8: "U8", torch.int32: "I32",
          torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3"}


def skeleton(base, scheme):
    """config.json, and the tensors by name, as the tool writes them."""
    tool, _, algorithm = scheme.partition(":")
    wanted = {"mixed": mixed(), "modelopt": "FP8_DYNAMIC", "fp8": "FP8_DYNAMIC"}.get(tool, scheme)
    with tempfile.TemporaryDirectory() as folder:
        oneshot.quantize(base, folder, oneshot.recipe(wanted), torch.bfloat16)
        config = json.loads(pathlib.Path(folder, "config.json").read_text())
        tensors = {key: (value.dtype, list(value.shape)) for key, value in load_file(f"{folder}/model.safetensors").items()}
    if tool == "modelopt":
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16,
                                         "exclude_modules": ["lm_head", "model.embed*"], "kv_cache_scheme": "FP8"}
    if tool == "fp8":
        config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                                         "weight_block_size": [64, 64], "modules_to_not_convert": ["lm_head", "mlp.gate"]}
    if tool in ("modelopt", "fp8"):
        tensors = relaid(tensors, scheme)
    return config, dict(sorted(tensors.items()))


def relaid(tensors, scheme):
    """The documented layout of the other tools, from eight-bit weights by row."""
    out = dict(tensors)
    for stem in [key.removesuffix(".weight_scale") for key in tensors if key.endswith(".weight_scale")]:
        rows, cols = tensors[f"{stem}.weight"][1]
        if scheme == "fp8":
            del out[f"{stem}.weight_scale"]
            out[f"{stem}.weight_scale_inv"] = (torch.float32, [rows // 64, cols // 64])
        else:
            out[f"{stem}.weight_scale"] = (torch.float32, [])
            out[f"{stem}.input_scale"] = (torch.float32, [])
        if scheme == "modelopt:NVFP4":
            out[f"{stem}.weight"] = (torch.uint8, [rows, cols // 2])
            out[f"{stem}.weight_scale"] = (torch.float8_e4m3fn, [rows, cols // 16])
            out[f"{stem}.weight_scale_2"] = (torch.float32, [])
    return out


# Standard deviation of codes drawn evenly, before any scale.
EIGHT = math.sqrt(sum((2.0 ** (code // 8 - 7) * (1 + code % 8 / 8)) ** 2 for code in range(0x30, 0x50)) / 32)
SPREADS = {"nibbles": math.sqrt((16 * 16 - 1) / 12), "bytes": math.sqrt((256 * 256 - 1) / 12), "e4m3": EIGHT,
           "e2m1": math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)}
# Eight-bit scales of NVFP4 are drawn from 1 to 1.875, exponents of MXFP4 from two neighbours.
NVFP4_SCALE, MXFP4_EXPONENT = 1.4375, 118


def near(value):
    """Around a number, always of its sign."""
    return {"kind": "normal", "scale": float(np.float32(0.15 * value / weights.UNIT)), "mean": float(np.float32(value))}


def rule(key, dtype, shape, tensors, config):
    """How the tensor is made: kind, scale and mean, or the values themselves."""
    stem, suffix = key.rsplit(".", 1)
    packed = any(f"{stem}.{scale}" in tensors for scale in ("weight_scale", "weight_scale_inv"))
    if not packed:
        kind, scale, mean = generate.rule(key, shape, config)
        return {"kind": kind, "scale": scale, "mean": mean}
    four = f"{stem}.weight_packed" in tensors
    storage, stored = tensors[f"{stem}.weight_packed" if four else f"{stem}.weight"]
    codes = {torch.int32: "nibbles", torch.int8: "bytes", torch.float8_e4m3fn: "e4m3", torch.uint8: "e2m1"}[storage]
    rows, cols = stored[0], stored[1] * {"nibbles": 8, "e2m1": 2}.get(codes, 1)
    _, unit, _ = generate.rule(f"{stem}.weight", [rows, cols], config)
    scale = unit * weights.UNIT / SPREADS[codes]
    if suffix == "weight_shape":
        return {"kind": "values", "values": [rows, cols]}
    if suffix in ("input_scale", "input_global_scale"):
        return near(0.01)
    if suffix in ("weight", "weight_packed", "weight_zero_point"):
        # Eight-bit floats: a sign, and 32 codes from 0.5 up.
        return {"kind": "bytes", "scale": 256, "mean": 0x30 if codes == "e4m3" else 0, "mask": 0x9F if codes == "e4m3" else 0xFF}
    if suffix == "weight_global_scale":
        return near(NVFP4_SCALE / scale)
    if suffix == "weight_scale_2":
        return near(scale / NVFP4_SCALE)
    if dtype == torch.float8_e4m3fn:
        return {"kind": "bytes", "scale": 8, "mean": 0x38, "mask": 0xFF}
    if dtype == torch.uint8:
        return {"kind": "bytes", "scale": 2, "mean": MXFP4_EXPONENT + exponent(scale), "mask": 0xFF}
    return near(scale)


def exponent(scale):
    return round(math.log2(scale)) + 127 - MXFP4_EXPONENT


def make(seed, key, dtype, shape, how):
    """The tensor itself; `file.rs` of the model crate's tests makes the same bytes."""
    if how["kind"] == "values":
        return torch.tensor(how["values"], dtype=dtype)
    count = int(np.prod(shape)) if shape else 1
    if how["kind"] == "normal":
        made = weights.normal(seed, key, [count], how["scale"], how["mean"])
        if dtype == torch.bfloat16:
            # Cut off, not rounded.
            made = (made.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return torch.tensor(made).to(dtype).reshape(shape)
    size = torch.empty(0, dtype=dtype).element_size()
    made = weights.octets(seed, key, [count * size], how["scale"], 0)
    made = (made & np.uint8(how["mask"])) + np.uint8(how["mean"])
    return torch.tensor(made).view(dtype).reshape(shape)


def search(name, base, scheme):
    config, tensors = skeleton(base, scheme)
    rules = {key: rule(key, dtype, shape, tensors, config) for key, (dtype, shape) in tensors.items()}
    routed = config | {"num_experts_per_tok": config.get("num_experts_per_tok")}
    for seed in range(1, 200):
        prompt = weights.tokens(seed, generate.PROMPT, config["vocab_size"])
        made = {key: make(seed, key, dtype, shape, rules[key]) for key, (dtype, shape) in tensors.items()}
        model = oneshot.load_plain(config, oneshot.dequantized(config["quantization_config"], made))
        logits, greedy, margin, spread, gap = generate.run(model, routed, prompt)
        with torch.no_grad():
            exact = model.double()(torch.tensor([prompt]), use_cache=False).logits[0]
        reason = generate.verdict(logits, exact, greedy, margin, spread, gap)
        if reason is None:
            print(f"{name:24} seed {seed} margin {margin:.4f} largest {logits.abs().max():.1f}", flush=True)
            return config, tensors, rules, seed, prompt, logits, greedy, spread
        print(f"  {name} seed {seed}: {reason}", flush=True)
    raise SystemExit(f"{name}: no seed will do")


def write(name, base, scheme):
    config, tensors, rules, seed, prompt, logits, greedy, spread = search(name, base, scheme)
    groups = {}
    for key, (dtype, shape) in tensors.items():
        groups.setdefault(json.dumps({"dtype": DTYPES[dtype], "shape": shape} | rules[key]), []).append(key)
    tops = []
    for position in POSITIONS:
        best = logits[position].topk(TOP)
        tops.append({"position": position, "ids": best.indices.tolist(), "logits": [generate.short(v) for v in best.values.tolist()]})
    packages = ("torch", "transformers", "compressed-tensors", "llmcompressor", "nvidia-modelopt")
    golden = {
        "made_by": {package: version(package).split("+")[0] for package in packages},
        "seed": seed,
        "config": spoken(config),
        "max_context": config["max_position_embeddings"],
        "tensors": [json.loads(group) | {"names": names} for group, names in groups.items()],
        "prompt": prompt,
        "greedy": greedy,
        "scores_std": [generate.short(value, 3) for _, value in sorted(spread.items())],
        "largest_logit": generate.short(logits.abs().max().item()),
        "log_sum_exp": [generate.short(value) for value in logits.double().logsumexp(-1).tolist()],
        "top": tops,
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in golden.items())
    (HERE / "seeded").mkdir(exist_ok=True)
    kept.write(HERE / "seeded" / f"{name}.json.lzma", "{\n" + lines + "\n}\n")


def spoken(config):
    """Without what is null or empty."""
    if not isinstance(config, dict):
        return config
    return {key: spoken(value) for key, value in config.items() if value not in (None, {})}


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name, (base, scheme) in VARIANTS.items():
        if len(sys.argv) == 1 or any(name.startswith(wanted) for wanted in sys.argv[1:]):
            write(name, base, scheme)


if __name__ == "__main__":
    main()
