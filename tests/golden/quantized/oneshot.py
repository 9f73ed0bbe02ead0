"""Small models quantized by llm-compressor, and what their weights are by the tools' own decoders."""

import json
import pathlib
import tempfile

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4 import helpers as nvfp4_helpers
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

# These decoders end by rounding to bf16, whatever the model's own type. Asked for f32, they give what the codes say.
nvfp4_helpers.unpack_fp4_from_uint8.__defaults__ = (torch.float32,)

IGNORE = ["lm_head", "re:.*mlp.gate$"]


def quantize(source, target, recipe, dtype):
    """`source` is a folder or a configuration of random weights; `target` becomes a folder as the tool writes it."""
    from llmcompressor import oneshot

    with tempfile.TemporaryDirectory() as folder:
        if isinstance(source, dict):
            torch.manual_seed(1)
            AutoModelForCausalLM.from_config(AutoConfig.for_model(**source)).to(dtype).save_pretrained(folder)
            source = folder
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        oneshot(model=model, recipe=recipe)
        model.save_pretrained(target, save_compressed=True)


def recipe(scheme):
    """Round to nearest, by a named scheme or by groups of layers."""
    from llmcompressor.modifiers.quantization import QuantizationModifier

    if isinstance(scheme, str):
        return QuantizationModifier(targets="Linear", scheme=scheme, ignore=IGNORE)
    return QuantizationModifier(config_groups=scheme, ignore=IGNORE)


def layers(tensors):
    """Stem -> suffix -> tensor, for what lies beside a scale."""
    stems = {key.rsplit(".", 1)[0] for key in tensors if key.endswith((".weight_scale", ".weight_scale_inv"))}
    return {stem: {key[len(stem) + 1:]: value for key, value in tensors.items() if key.rsplit(".", 1)[0] == stem}
            for stem in sorted(stems)}


def dequantized(config, tensors):
    """Plain f32 weights under plain names, by the code of whoever wrote the checkpoint."""
    method = config["quant_method"]
    decode = {"compressed-tensors": by_compressed_tensors, "modelopt": by_modelopt, "fp8": by_transformers}[method]
    packed = layers(tensors)
    out = {key: value.float() for key, value in tensors.items() if key.rsplit(".", 1)[0] not in packed}
    decode = decode(config)
    return out | {f"{stem}.weight": decode(stem, parts).float().contiguous() for stem, parts in packed.items()}


def by_compressed_tensors(config):
    from compressed_tensors.utils.match import match_name

    groups = QuantizationConfig(**config).config_groups.values()

    def scheme(stem):
        named = [group for group in groups if any(match_name(stem, target) for target in group.targets)]
        return (named or [group for group in groups if "Linear" in group.targets])[0]

    def decode(stem, parts):
        compressor = BaseCompressor.get_value_from_registry(scheme(stem).format)
        # Scales of 16 bits would make 16-bit weights; in f32 they lose nothing.
        parts = {key: value.float() if value.dtype in (torch.bfloat16, torch.float16) else value for key, value in parts.items()}
        return compressor.decompress(parts, scheme(stem))["weight"]

    return decode


def by_modelopt(config):
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    def decode(_, parts):
        weight, scale = parts["weight"], parts["weight_scale"]
        if weight.dtype == torch.uint8:
            shape = (weight.shape[0], 2 * weight.shape[1])
            return NVFP4QTensor(shape, torch.float32, weight).dequantize(
                torch.float32, scale=scale, double_scale=parts["weight_scale_2"], block_sizes={-1: config["group_size"]})
        return FP8QTensor(weight.shape, torch.float32, weight).dequantize(torch.float32, scale=scale)

    return decode


def by_transformers(_):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return lambda _, parts: Fp8Dequantize(None)._dequantize_one(parts["weight"], parts["weight_scale_inv"], torch.float32)


def load_plain(config, tensors):
    """A model of those f32 weights, loaded the usual way."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        pathlib.Path(folder, "config.json").write_text(json.dumps(plain))
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
            output_loading_info=True)
    wrong = {key: value for key, value in report.items() if value}
    assert not wrong, wrong
    return model.eval()


def load_folder(folder):
    """Configuration and dequantized model of a folder."""
    config = json.loads(pathlib.Path(folder, "config.json").read_text())
    tensors = load_file(pathlib.Path(folder, "model.safetensors"))
    return config, load_plain(config, dequantized(config["quantization_config"], tensors))
