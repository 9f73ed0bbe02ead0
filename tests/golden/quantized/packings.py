"""Makes packings.safetensors.lzma and packings.json.lzma: small matrices as other tools pack them, and what those tools read back.

    python tests/golden/quantized/packings.py [--older FOLDER]

Packed and unpacked by the tools' own code on the CPU: compressed-tensors' compressors, ModelOpt's quantized tensors and
transformers' FP8 conversions. FOLDER holds compressed-tensors 0.11 (`pip install --no-deps --target FOLDER
compressed-tensors==0.11.0`), the last line of versions that wrote `weight_g_idx`; without it that case is kept as it is.

Of the unpacked values the file holds a hash (FNV-1a over the f32 bits, row by row) and a few samples, after the rounding
that the tool itself ends with (`dtype`).
"""

import argparse
import json
import lzma
import os
import pathlib
import subprocess
import sys
from importlib.metadata import version

import torch
from safetensors.torch import load, save

HERE = pathlib.Path(__file__).parent
MASK = (1 << 64) - 1
SHORT = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def fnv(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = ((h ^ byte) * 0x100000001B3) & MASK
    return f"{h:016x}"


def weights(seed, rows, cols, dtype=torch.bfloat16):
    """Rows of different sizes, one row and one group of zeros, and an outlier."""
    torch.manual_seed(seed)
    made = torch.randn(rows, cols) * torch.logspace(-2, 0, rows).unsqueeze(1)
    made[1] = 0.0
    made[2, :16] = 0.0
    made[3, 5] = 9.0
    return made.to(dtype)


def expect(values):
    """What the tool gives back, as the test compares it."""
    flat = values.to(torch.float32).contiguous().flatten() + 0.0  # minus zero becomes zero
    bits = flat.view(torch.int32).tolist()
    places = [(i * 977 + 13) % len(bits) for i in range(6)]
    return {
        "dtype": SHORT[values.dtype],
        "hash": fnv(flat.numpy().tobytes()),
        "samples": [[at, bits[at] & 0xFFFFFFFF] for at in places],
    }


def spoken(config):
    """Without what is null or empty."""
    if not isinstance(config, dict):
        return config
    return {key: spoken(value) for key, value in config.items() if value not in (None, {})}


class Cases:
    def __init__(self):
        self.rows, self.tensors = [], {}

    def add(self, name, made_by, config, shape, tensors, values):
        for key, tensor in tensors.items():
            self.tensors[f"{name}.{key}"] = tensor.contiguous().clone()
        rows, cols = shape
        self.rows.append({"name": name, "made_by": made_by, "rows": rows, "cols": cols, "config": config, **expect(values)})


# compressed-tensors -----------------------------------------------------------------------------------------------


def reduced(x, args):
    """Smallest and largest value of every scale's share of the matrix."""
    rows, cols = x.shape
    strategy = str(args.strategy)
    if strategy == "tensor":
        x = x.reshape(1, -1)
    elif strategy == "block":
        height, width = args.block_structure
        x = torch.nn.functional.pad(x, (0, -cols % width, 0, -rows % height))
        x = x.reshape(x.shape[0] // height, height, x.shape[1] // width, width).transpose(1, 2).flatten(2)
        return x.amin(-1), x.amax(-1)
    elif strategy in ("group", "tensor_group"):
        x = x.unflatten(-1, (-1, args.group_size))
        return x.amin(-1), x.amax(-1)
    return x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)


def compressed_tensors(cases):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    by = f"compressed-tensors {version('compressed-tensors')}"

    def case(name, fmt, shape, args, inputs=None, dtype=torch.bfloat16, extra=None):
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args),
                                    input_activations=QuantizationArgs(**inputs) if inputs else None, format=fmt)
        x = weights(len(cases.rows), *shape, dtype)
        state = {"weight": x}
        gparam = None
        if args.get("strategy") == "tensor_group":
            gparam = generate_gparam(x.amin().reshape(1), x.amax().reshape(1))
            state["weight_global_scale"] = gparam
        low, high = reduced(x, scheme.weights)
        scale, zero = calculate_qparams(low, high, scheme.weights, global_scale=gparam)
        if scheme.weights.type == "int":
            scale = scale.to(dtype)
        state |= {"weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(fmt)
        packed = compressor.compress(state, scheme)
        values = compressor.decompress(packed, scheme)["weight"]
        config = {"quant_method": "compressed-tensors", "format": fmt, "quantization_status": "compressed",
                  "config_groups": {"group_0": spoken(json.loads(scheme.model_dump_json()))}, "ignore": ["lm_head"]}
        cases.add(name, by, config, shape, packed | (extra or {}), values)

    ints = {"type": "int"}
    token = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    float_token = token | {"type": "float"}
    group = {"strategy": "group", "group_size": 32, "symmetric": True}
    asym = group | {"symmetric": False}
    channel = {"strategy": "channel", "symmetric": True}
    pack = "pack-quantized"
    case("pack4-group", pack, (20, 96), ints | group | {"num_bits": 4})
    case("pack4-group-f32", pack, (12, 64), ints | group | {"num_bits": 4}, dtype=torch.float32)
    case("pack4-channel", pack, (9, 76), ints | channel | {"num_bits": 4}, dtype=torch.float16)
    case("pack4-tensor", pack, (8, 40), ints | {"strategy": "tensor", "symmetric": True, "num_bits": 4})
    case("pack4-zeros", pack, (20, 64), ints | asym | {"num_bits": 4})
    case("pack4-zeros-f32", pack, (12, 64), ints | asym | {"num_bits": 4}, dtype=torch.float32)
    case("pack4-zeros-channel", pack, (11, 64), ints | channel | {"symmetric": False, "num_bits": 4}, dtype=torch.float16)
    case("pack8-group", pack, (12, 96), ints | group | {"num_bits": 8})
    case("pack8-zeros-channel", pack, (10, 50), ints | channel | {"symmetric": False, "num_bits": 8}, dtype=torch.float16)
    for bits in (2, 3, 5, 6, 7):
        case(f"pack{bits}-group", pack, (8, 96), ints | group | {"num_bits": bits})
    case("pack3-zeros", pack, (13, 64), ints | asym | {"num_bits": 3})
    case("int8-channel", "int-quantized", (12, 72), ints | channel | {"num_bits": 8}, token)
    case("int8-channel-f32", "int-quantized", (12, 72), ints | channel | {"num_bits": 8}, token, dtype=torch.float32)
    case("int8-tensor", "int-quantized", (9, 40), ints | {"strategy": "tensor", "symmetric": True, "num_bits": 8}, token)
    case("int8-zeros", "int-quantized", (9, 40), ints | channel | {"symmetric": False, "num_bits": 8}, token)
    case("int4-in-bytes", "int-quantized", (9, 64), ints | group | {"num_bits": 4}, token)
    case("naive8-group", "naive-quantized", (9, 64), ints | group | {"num_bits": 8})
    floats = {"type": "float", "num_bits": 8, "symmetric": True}
    static = {"input_scale": torch.tensor([0.02], dtype=torch.bfloat16)}
    case("float8-tensor", "float-quantized", (9, 40), floats | {"strategy": "tensor"},
         {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}, extra=static)
    case("float8-channel", "float-quantized", (12, 72), floats | channel, float_token)
    case("float8-channel-f32", "float-quantized", (12, 72), floats | channel, float_token, dtype=torch.float32)
    case("float8-block", "float-quantized", (40, 80), floats | {"strategy": "block", "block_structure": [16, 32]},
         {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True})
    case("naive-float8", "naive-quantized", (9, 40), floats | channel)
    four = {"num_bits": 4, "type": "float", "symmetric": True}
    eight = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
    case("nvfp4", "nvfp4-pack-quantized", (12, 64), four | {"strategy": "tensor_group", "group_size": 16} | eight)
    octet = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    case("mxfp4", "mxfp4-pack-quantized", (12, 96), four | {"strategy": "group", "group_size": 32} | octet)
    case("mxfp8", "mxfp8-quantized", (9, 64), floats | {"strategy": "group", "group_size": 32} | octet)


def with_group_index(cases):
    """The case of the older version, from a process of its own."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams

    for name, symmetric in (("pack4-index", True), ("pack4-index-zeros", False)):
        args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=symmetric, actorder="group")
        x = weights(77, 16, 96)
        index = torch.randperm(96, generator=torch.Generator().manual_seed(5)).to(torch.int32) // 32
        parts = torch.stack([x[:, index == group] for group in range(3)], dim=1)
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        scale = scale.to(torch.bfloat16)
        compressor = PackedQuantizationCompressor()
        packed = compressor.compress_weight(weight=x, scale=scale, zero_point=zero, g_idx=index, quantization_args=args)
        packed |= {"weight_scale": scale, "weight_g_idx": index}
        if symmetric:
            values = compressor.decompress_weight(compressed_data=packed, quantization_args=args)
        else:
            # That version packs zero points, but does not read them back: its parts are called one by one.
            codes = unpack_from_int32(packed["weight_packed"], 4, x.shape)
            zeros = unpack_from_int32(packed["weight_zero_point"], 4, scale.shape, packed_dim=0)
            values = dequantize(codes, scale, zeros, args, g_idx=index)
        config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
                  "config_groups": {"group_0": {"targets": ["Linear"], "weights": spoken(json.loads(args.model_dump_json()))}},
                  "ignore": ["lm_head"]}
        cases.add(name, f"compressed-tensors {version('compressed-tensors')}", config, (16, 96), packed, values)


# ModelOpt and transformers ----------------------------------------------------------------------------------------


def modelopt(cases):
    from modelopt.torch.export.quant_utils import to_quantized_weight
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    by = f"nvidia-modelopt {version('nvidia-modelopt')}"

    def config(algo, **more):
        return {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"], "producer": {"name": "modelopt"}} | more

    x = weights(90, 9, 64)
    scale = (x.float().abs().amax() / 448.0)
    data = to_quantized_weight(x, scale, "fp8")
    values = FP8QTensor(x.shape, torch.float32, data).dequantize(torch.float32, scale=scale)
    cases.add("modelopt-fp8", by, config("FP8"), x.shape, {"weight": data, "weight_scale": scale, "input_scale": torch.tensor(0.1)}, values)
    scale = (x.float().abs().amax(-1) / 448.0).clamp(min=1e-6)
    data = to_quantized_weight(x, scale, "fp8_pc_pt")
    values = FP8QTensor(x.shape, torch.float32, data).dequantize(torch.float32, scale=scale.unsqueeze(1))
    cases.add("modelopt-fp8-channel", by, config("FP8_PER_CHANNEL_PER_TOKEN"), x.shape, {"weight": data, "weight_scale": scale}, values)
    x = weights(91, 48, 96)
    blocks = {-1: 32, -2: 32}
    made, scale = FP8QTensor.quantize(torch.nn.functional.pad(x.float(), (0, 0, 0, 16)), block_sizes=blocks)
    scale[scale == 0] = 1.0
    data = made._quantized_data[:48]
    values = FP8QTensor((64, 96), torch.float32, made._quantized_data).dequantize(torch.float32, scale=scale, block_sizes=blocks)[:48]
    cases.add("modelopt-fp8-block", by, config("FP8_PB_WO", group_size=32), x.shape,
              {"weight": data, "weight_scale": scale.reshape(2, 1, 3, 1)}, values)
    x = weights(92, 12, 64)
    made, scale, scale2 = NVFP4QTensor.quantize(x, 16)
    values = made.dequantize(torch.bfloat16, scale=scale, double_scale=scale2, block_sizes={-1: 16})
    tensors = {"weight": made._quantized_data, "weight_scale": scale, "weight_scale_2": scale2, "input_scale": torch.tensor(0.05)}
    cases.add("modelopt-nvfp4", by, config("NVFP4", group_size=16), x.shape, tensors, values)
    layers = {"modelopt-mixed": {"quant_algo": "NVFP4", "group_size": 16}}
    cases.add("modelopt-mixed", by, config("MIXED_PRECISION", quantized_layers=layers), x.shape, tensors, values)


def transformers_fp8(cases):
    import types

    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    by = f"transformers {version('transformers')}"
    for name, block, scale_fmt in (("fp8-block", [16, 32], "float"), ("fp8-block-powers", [16, 32], "ue8m0"), ("fp8-tensor", None, "float")):
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block, "scale_fmt": scale_fmt,
                  "modules_to_not_convert": ["lm_head"]}
        quantizer = types.SimpleNamespace(quantization_config=types.SimpleNamespace(**config))
        x = weights(95, 48, 96)
        made = Fp8Quantize(quantizer)._quantize_one("weight", x)
        values = Fp8Dequantize(quantizer)._dequantize_one(made["weight"], made["weight_scale_inv"], torch.float32)
        if block is None:
            made["weight_scale_inv"] = made["weight_scale_inv"].reshape(())
        cases.add(name, by, config, x.shape, made, values)


def eight_bit_floats():
    codes = torch.arange(256, dtype=torch.uint8)
    rows = {}
    for name, dtype in (("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2), ("F8_E8M0", torch.float8_e8m0fnu)):
        values = codes.view(dtype).to(torch.float32)
        bits = values.view(torch.int32).tolist()
        rows[name] = [None if values[i].isnan() else bits[i] & 0xFFFFFFFF for i in range(256)]
    return rows


def older(folder, target):
    environment = os.environ | {"PYTHONPATH": folder}
    subprocess.run([sys.executable, __file__, "--index-only", target], env=environment, check=True)


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--older")
    flags.add_argument("--index-only")
    flags = flags.parse_args()
    target = pathlib.Path(flags.index_only) if flags.index_only else HERE
    cases = Cases()
    if flags.index_only:
        with_group_index(cases)
    else:
        compressed_tensors(cases)
        modelopt(cases)
        transformers_fp8(cases)
        keep_index_cases(cases, flags.older)
    write(target / "packings.safetensors.lzma", save(cases.tensors))
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in cases.rows)
    made_by = {"torch": torch.__version__.split("+")[0]}
    eight = json.dumps({} if flags.index_only else eight_bit_floats(), separators=(",", ":"))
    text = f'{{\n"made_by": {json.dumps(made_by)},\n"eight_bit_floats": {eight},\n"cases": [\n{rows}\n]\n}}\n'
    write(target / "packings.json.lzma", text.encode())


def write(path, content):
    filters = [{"id": lzma.FILTER_LZMA1, "preset": 9, "dict_size": 1 << 16}]
    path.write_bytes(lzma.compress(content, lzma.FORMAT_ALONE, filters=filters))


def keep_index_cases(cases, folder):
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        source = pathlib.Path(made)
        if folder:
            older(folder, made)
        else:
            source = HERE
        tensors = load(lzma.decompress((source / "packings.safetensors.lzma").read_bytes()))
        for row in json.loads(lzma.decompress((source / "packings.json.lzma").read_bytes()))["cases"]:
            if row["name"].startswith("pack4-index"):
                cases.rows.append(row)
                cases.tensors |= {key: tensor for key, tensor in tensors.items() if key.startswith(row["name"] + ".")}


if __name__ == "__main__":
    main()
