"""Tiny Llama models and one with experts, quantized by the tools themselves on the CPU, with what transformers says of the result.

usage: python tests/golden/quantized/tool_models.py [NAME ...]
       (needs gptqmodel 7.7, bitsandbytes 0.50, transformers 5.22, torch; GPTQMODEL_CPU_WORKERS=2 on two cores)

Writes models/NAME/ beside itself: config.json and model.safetensors as the tool saved them, and golden.json.lzma with the
logits of a float32 model whose linear layers hold the tool's own dequantized weights (in float32 throughout: the tools
round them to 16 bits as they run, which would hide what is compared here).
"""
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
from importlib.metadata import version

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM,
                          PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM)

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../models"))

import kept  # noqa: E402

VOCAB, PROMPT, GREEDY = 32, 20, 6
LINEAR = r"(q|k|v|o|gate|up|down)_proj$|lm_head$"


def plain_model(folder, kind, tied):
    torch.manual_seed(5)
    # AWQ's search for clipping thresholds takes 64 outputs at a time.
    hidden = 64 if kind == "wide" else 32
    sizes = dict(hidden_size=hidden, intermediate_size=64, num_hidden_layers=1, num_attention_heads=hidden // 16,
                 num_key_value_heads=hidden // 16, head_dim=16, vocab_size=VOCAB, max_position_embeddings=128,
                 initializer_range=0.15, tie_word_embeddings=tied)
    if kind == "experts":
        config = Qwen3MoeConfig(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
                                **sizes)
        model = Qwen3MoeForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.bfloat16().save_pretrained(folder)
    from tokenizers import Tokenizer, models
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", pad_token="t1",
                            eos_token="t2").save_pretrained(folder)


def by_gptqmodel(source, target, **options):
    from gptqmodel import GPTQModel, QuantizeConfig

    torch.manual_seed(6)
    ids = [torch.randint(3, VOCAB, (48,)).tolist() for _ in range(64)]
    model = GPTQModel.load(source, QuantizeConfig(offload_to_disk=False, **options), device="cpu")
    model.quantize([{"input_ids": line, "attention_mask": [1] * len(line)} for line in ids], batch_size=1)
    model.save(target)


def by_transformers(source, target, **options):
    config = BitsAndBytesConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.bfloat16,
                                                 device_map="cpu")
    model.save_pretrained(target)


def tensors(folder):
    with safe_open(os.path.join(folder, "model.safetensors"), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def dequantized(folder, config):
    """Every linear layer's weight as float32, by the tool's own code; the rest as it is."""
    stored = tensors(folder)
    method = config["quantization_config"]["quant_method"]
    state, done = {}, set()
    for name in sorted(stored):
        stem = re.sub(r"\.(qweight|weight)$", "", name)
        part = {key.removeprefix(stem + "."): value for key, value in stored.items() if key.startswith(stem + ".")}
        if not re.search(LINEAR, stem) or stem in done or name == stem:
            continue
        if "qweight" in part:
            weight = (gptq if method == "gptq" else awq)(part, config["quantization_config"])
        elif "SCB" in part:
            import bitsandbytes.functional as bnb
            weight = bnb.int8_vectorwise_dequant(part["weight"], part["SCB"])
        elif "weight.absmax" in part:
            import bitsandbytes.functional as bnb
            about = {key.removeprefix("weight."): value for key, value in part.items() if key != "weight"}
            weight = nf4(part["weight"], bnb.QuantState.from_dict(about, "cpu"))
        else:
            weight = part["weight"]
        done.add(stem)
        state[f"{stem}.weight"] = weight.float()
    for name, value in stored.items():
        if not any(name.startswith(f"{stem}.") for stem in done):
            state[name] = value.float()
    return state


def gptq(part, config):
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    cols, rows = part["g_idx"].numel(), part["scales"].shape[1]
    bits = part["qweight"].shape[0] * 32 // cols
    linear = TorchLinear(bits=bits, group_size=-(-cols // part["scales"].shape[0]), sym=config["sym"],
                         desc_act=config["desc_act"], in_features=cols, out_features=rows, bias=False)
    for name in ("qweight", "qzeros", "g_idx"):
        setattr(linear, name, part[name].clone())
    if config["checkpoint_format"] == "gptq":
        convert_gptq_v1_to_v2_format_module(linear, bits, torch.int32)
    linear.scales = part["scales"].float()
    return linear.eval().dequantize_weight().T


def awq(part, config):
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    size = part["qweight"].shape[0] // part["scales"].shape[0]
    return dequantize_gemm(part["qweight"], part["qzeros"], part["scales"].float(), config["bits"], size).T


def nf4(packed, state):
    """By the package's default implementation: its AVX-512 kernel reads wrong scales where a row is no whole number of
    blocks, and agrees elsewhere."""
    import bitsandbytes.functional as bnb
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.backends.utils import _get_4bit_code

    absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    code = _get_4bit_code(state.quant_type, packed.device)
    return _dequantize_4bit_compute(packed.reshape(-1), absmax, code, state.blocksize, state.shape, torch.float32)


def golden(folder, tools):
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        config = json.load(file)
    # Where a temporary folder was, and what else a run leaves in it, is nobody's business.
    config["quantization_config"].pop("meta", None)
    with open(path, "w") as file:
        file.write(json.dumps(config, sort_keys=True) + "\n")
    with tempfile.TemporaryDirectory() as plain:
        state = {name: value.contiguous() for name, value in dequantized(folder, config).items()}
        save_file(state, os.path.join(plain, "model.safetensors"), metadata={"format": "pt"})
        with open(os.path.join(plain, "config.json"), "w") as file:
            json.dump({key: value for key, value in config.items() if key not in ("quantization_config", "dtype")}, file)
        model, report = AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
        wrong = {key: value for key, value in report.items() if value}
        assert not wrong, wrong
    model.eval()
    torch.manual_seed(7)
    ids = torch.randint(3, VOCAB, (1, PROMPT))
    with torch.no_grad():
        logits = model(ids).logits[0]
        greedy, line = [], ids
        for _ in range(GREEDY):
            greedy.append(int(model(line).logits[0, -1].argmax()))
            line = torch.cat([line, torch.tensor([[greedy[-1]]])], 1)
    best = [logits[position].topk(6) for position in range(PROMPT)]
    result = {
        "made_by": {tool: version(tool) for tool in (*tools, "transformers", "torch")},
        "seed": 0, "config": {"model_type": config["model_type"]}, "max_context": 128, "tensors": [], "scores_std": [],
        "prompt": ids[0].tolist(), "greedy": greedy, "largest_logit": float(logits.abs().max()),
        "log_sum_exp": [round(float(row.double().logsumexp(0)), 6) for row in logits],
        "top": [{"position": at, "ids": top.indices.tolist(), "logits": [round(v, 6) for v in top.values.tolist()]}
                for at, top in enumerate(best)],
    }
    kept.write(pathlib.Path(folder, "golden.json.lzma"), json.dumps(result) + "\n")


MODELS = {
    # Eight bits in one layer, none in another.
    "gptq-act-order-dynamic": (by_gptqmodel, "small", False, ["gptqmodel"], dict(
        bits=4, group_size=16, desc_act=True, sym=False, format="gptq",
        dynamic={"-:.*k_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 32}})),
    "gptq-v2-3-bits-lm-head": (by_gptqmodel, "small", False, ["gptqmodel"], dict(
        bits=3, group_size=-1, desc_act=False, sym=False, format="gptq_v2", lm_head=True, act_group_aware=False)),
    "gptq-experts": (by_gptqmodel, "experts", True, ["gptqmodel"], dict(
        bits=4, group_size=16, desc_act=True, sym=True, format="gptq")),
    "awq": (by_gptqmodel, "wide", True, ["gptqmodel"], dict(
        method="awq", format="gemm", bits=4, group_size=32, sym=False)),
    "nf4": (by_transformers, "small", True, ["bitsandbytes"], dict(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16)),
    "int8": (by_transformers, "small", True, ["bitsandbytes"], dict(load_in_8bit=True)),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        quantize, kind, tied, tools, options = MODELS[name]
        target = os.path.join(HERE, "models", name)
        shutil.rmtree(target, ignore_errors=True)
        os.makedirs(target)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)    # gptqmodel leaves its logs where it runs
            plain, quantized = os.path.join(folder, "plain"), os.path.join(folder, "quantized")
            plain_model(plain, kind, tied)
            quantize(plain, quantized, **options)
            for file in ("config.json", "model.safetensors"):
                shutil.copyfile(os.path.join(quantized, file), os.path.join(target, file))
            os.chdir(HERE)
        golden(target, tools)
