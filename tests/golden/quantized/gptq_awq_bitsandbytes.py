"""Small tensors as GPTQ, AWQ and bitsandbytes checkpoints hold them, and what the tools themselves make of them.

usage: python tests/golden/quantized/gptq_awq_bitsandbytes.py     (needs gptqmodel 7.7, bitsandbytes 0.50, torch)

Writes beside itself gptq_awq_bitsandbytes.safetensors.lzma (the packed tensors) and .json.lzma (one case a tensor, with the
`quantization_config` that would stand in its config.json and hashes of the dequantized weights).

What is used of the tools, on a machine without a GPU:
- GPTQ: `TorchLinear.pack`, `convert_gptq_v2_to_v1_format_module` for what v1 stores, and `TorchLinear.dequantize_weight`
  (after `convert_gptq_v1_to_v2_format_module` where v1 is stored). `rounded` is what it gives with its f16 scales,
  `exact` the same method on the same scales as f32.
- AWQ: `AwqTorchLinear.pack` and `dequantize_gemm`, `rounded` and `exact` alike.
- bitsandbytes: `quantize_4bit` and `dequantize_4bit` on the CPU; `rounded` is in the dtype that the state names,
  `exact` in f32. Where a row is no whole number of blocks its AVX-512 kernel reads wrong scales (the error grows
  fourfold), so there the package's default implementation stands in, which both agree with elsewhere. int8:
  `int8_vectorwise_quant` and `int8_vectorwise_dequant`, f32, rounded to f16 as its callers do.
"""
import json
import lzma
import os
from importlib.metadata import version
from types import SimpleNamespace

os.environ["GPTQMODEL_DISABLE_PACK_EXT"] = "1"

import bitsandbytes.functional as bnb
import torch
from bitsandbytes.backends.default import ops as bnb_default
from bitsandbytes.backends.utils import _get_4bit_code
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module
from safetensors.torch import save

HERE = os.path.dirname(os.path.abspath(__file__))
NAME = "gptq_awq_bitsandbytes"

tensors, cases = {}, []


def fnv(tensor):
    state = 0xCBF29CE484222325
    for byte in tensor.contiguous().view(torch.uint8).reshape(-1).tolist():
        state = (state ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{state:016x}"


def case(name, config, packed, exact, rounded):
    """`packed`: name after the stem -> tensor. `exact`, `rounded`: [rows, cols]."""
    tensors.update({f"{name}.{part}": tensor.detach().cpu().contiguous() for part, tensor in packed.items()})
    cases.append({
        "name": name,
        "rows": exact.shape[0],
        "cols": exact.shape[1],
        "config": config,
        "exact": fnv(exact.to(torch.float32)),
        "rounded_to": str(rounded.dtype).removeprefix("torch."),
        "rounded": fnv(rounded),
    })


def weights(name, rows, cols):
    torch.manual_seed(sum(name.encode()))
    return torch.randn(rows, cols) * 0.02


def group_parameters(weight, groups, bits, sym):
    """Scale and zero point, [rows, groups] each, of the columns that `groups` gives to a group."""
    most = 2**bits - 1
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if sym:
            high = torch.maximum(high, -low)
            low = -high
        scales.append((high - low) / most)
        zeros.append(torch.full_like(low, 2 ** (bits - 1)) if sym else torch.round(-low / scales[-1]))
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def gptq(name, bits, group_size, layout="gptq", rows=32, cols=64, sym=False, order=None, low_zeros=False,
         scale_dtype=torch.float16):
    """`order`: None, "act" (columns in an order of their own) or "reverse"."""
    weight = weights(name, rows, cols)
    if low_zeros:
        weight[::2] = weight[::2].abs()     # zero points of 0, which v1 stores as -1
    size = cols if group_size == -1 else group_size
    groups = torch.arange(cols) // size
    if order == "act":
        groups = groups[torch.argsort(torch.randperm(cols))]
    elif order == "reverse":
        groups = groups.flip(0)
    scales, zeros = group_parameters(weight, groups, bits, sym)
    linear = torch.nn.Linear(cols, rows, bias=False)
    linear.weight.data = weight
    packed = TorchLinear(bits=bits, group_size=group_size, sym=sym, desc_act=order is not None, in_features=cols,
                         out_features=rows, bias=False)
    packed.pack(linear, scales, zeros, groups.to(torch.int32))
    packed.qzero_format(format=2)
    if layout == "gptq":
        convert_gptq_v2_to_v1_format_module(packed, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
    packed.scales = packed.scales.to(scale_dtype)
    stored = {part: getattr(packed, part).clone() for part in ("qweight", "qzeros", "scales", "g_idx")}
    if layout == "gptq":
        convert_gptq_v1_to_v2_format_module(packed, bits, torch.int32)
    packed.eval()
    rounded = packed.dequantize_weight().T
    packed.scales = packed.scales.float()
    exact = packed.dequantize_weight().T
    assert rounded.dtype == scale_dtype and exact.dtype == torch.float32
    assert (exact - weight).abs().max() < scales.max() * 0.75, name
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": order is not None,
              "sym": sym, "checkpoint_format": layout}
    case(name, config, stored, exact, rounded)


def awq(name, group_size, rows=16, cols=128):
    weight = weights(name, rows, cols)
    size = cols if group_size == -1 else group_size
    scales, zeros = group_parameters(weight, torch.arange(cols) // size, 4, False)
    linear = torch.nn.Linear(cols, rows, bias=False)
    linear.weight.data = weight
    packed = AwqTorchLinear(bits=4, group_size=group_size, sym=False, desc_act=False, in_features=cols,
                            out_features=rows, bias=False)
    scales = scales.half().float()
    linear.weight.data = ((weight / scales.repeat_interleave(size, 1)).round()
                          .clamp(-zeros.repeat_interleave(size, 1), 15 - zeros.repeat_interleave(size, 1))
                          * scales.repeat_interleave(size, 1))
    packed.pack(linear, scales, zeros)
    stored = {part: getattr(packed, part).clone() for part in ("qweight", "qzeros", "scales")}
    rounded, exact = (dequantize_gemm(packed.qweight, packed.qzeros, scales, 4, size).T
                      for scales in (packed.scales, packed.scales.float()))
    assert (exact - weight).abs().max() < scales.max() * 0.75, name
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
              "modules_to_not_convert": None}
    case(name, config, stored, exact, rounded)


def four_bit(name, kind, double, blocksize, dtype, rows=8, cols=128, storage=torch.uint8):
    weight = weights(name, rows, cols).to(dtype)
    weight[1, :64] = 0      # a block of nothing
    packed, state = bnb.quantize_4bit(weight, blocksize=blocksize, compress_statistics=double, quant_type=kind,
                                      quant_storage=storage)
    stored = {"weight": packed, **{f"weight.{part}": value for part, value in state.as_dict(packed=True).items()}}

    def dequantize(dtype):
        state.dtype = dtype
        if cols % blocksize == 0:
            return bnb.dequantize_4bit(packed, state)
        absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset if double else state.absmax
        codes = packed.view(torch.uint8).reshape(-1)
        return bnb_default._dequantize_4bit_compute(codes, absmax, _get_4bit_code(kind, codes.device), blocksize,
                                                    weight.shape, dtype)

    rounded, exact = dequantize(dtype), dequantize(torch.float32)
    assert (exact - weight).abs().max() < 0.02, name
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind,
              "bnb_4bit_use_double_quant": double, "bnb_4bit_quant_storage": str(storage).removeprefix("torch."),
              "llm_int8_skip_modules": None}
    case(name, config, stored, exact, rounded)


def eight_bit(name, rows=8, cols=128, weight_format=True):
    weight = weights(name, rows, cols).half()
    weight[1] = 0
    weight[2, 3] = 0.5      # an outlier: the rest of its row gets few levels
    codes, stats, _ = bnb.int8_vectorwise_quant(weight)
    exact = bnb.int8_vectorwise_dequant(codes, stats)
    stored = {"weight": codes, "SCB": stats}
    if weight_format:
        stored["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0,
              "llm_int8_skip_modules": None}
    case(name, config, stored, exact, exact.half())


for bits in (2, 3, 4, 8):
    for layout in ("gptq", "gptq_v2"):
        gptq(f"gptq-{bits}-{layout}", bits, 32, layout)
    gptq(f"gptq-{bits}-act-order", bits, 32, order="act")
    gptq(f"gptq-{bits}-zero-of-0", bits, 32, low_zeros=True)
    gptq(f"gptq-{bits}-symmetric-channel", bits, -1, sym=True)
gptq("gptq-4-g128", 4, 128, rows=32, cols=256)
gptq("gptq-4-g128-act-order", 4, 128, "gptq_v2", rows=32, cols=256, order="act")
gptq("gptq-4-short-last-group", 4, 64, cols=160)
gptq("gptq-4-short-last-group-act-order", 4, 64, cols=160, order="act")
gptq("gptq-4-groups-reversed", 4, 32, order="reverse")
gptq("gptq-4-bf16-scales", 4, 32, "gptq_v2", scale_dtype=torch.bfloat16)
gptq("gptq-3-wide", 3, 64, rows=64, cols=128)
for group_size in (16, 32, 64, 128, -1):
    awq(f"awq-{group_size}", group_size)
awq("awq-wide", 128, rows=40, cols=256)
for kind in ("nf4", "fp4"):
    for double in (False, True):
        many = "double" if double else "single"
        four_bit(f"{kind}-{many}-64", kind, double, 64, torch.float16)
        four_bit(f"{kind}-{many}-128", kind, double, 128, torch.bfloat16)
        four_bit(f"{kind}-{many}-across-rows", kind, double, 64, torch.float16, rows=11, cols=96)
four_bit("nf4-double-many-blocks", "nf4", True, 64, torch.bfloat16, rows=72, cols=256)
four_bit("nf4-f32", "nf4", False, 64, torch.float32)
four_bit("nf4-stored-as-bf16", "nf4", True, 64, torch.bfloat16, storage=torch.bfloat16)
four_bit("nf4-blocks-longer-than-rows", "nf4", False, 256, torch.float16, rows=31, cols=64)
eight_bit("int8")
eight_bit("int8-no-format", rows=8, cols=200, weight_format=False)



def write(ending, content):
    filters = [{"id": lzma.FILTER_LZMA1, "preset": 9, "dict_size": 1 << 16}]
    with open(os.path.join(HERE, f"{NAME}.{ending}.lzma"), "wb") as file:
        file.write(lzma.compress(content, lzma.FORMAT_ALONE, filters=filters))


write("safetensors", save(tensors))
tools = {tool: version(tool) for tool in ("gptqmodel", "bitsandbytes", "torch")}
lines = ",\n".join(json.dumps(one) for one in cases)
write("json", f'{{"tools": {json.dumps(tools)},\n"hash": "FNV-1a, 64 bits",\n"cases": [\n{lines}\n]}}\n'.encode())
