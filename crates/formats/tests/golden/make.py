"""Makes what the tests of `formats` compare with, from the independent Python packages `gguf` and `safetensors`.

usage: python crates/formats/tests/golden/make.py     (needs gguf 0.19, safetensors, numpy)

Writes beside itself: quant.json (hashes of decoded and encoded blocks), python.gguf and python.safetensors (small
files as those packages write them) and files.json (what is in them).
"""
import json
import os
from importlib.metadata import version

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
MASK = (1 << 64) - 1

# Where the half-precision fields of a block lie; their top exponent bit is cleared so that every value is finite.
HALVES = {
    "F32": [2], "F16": [0], "BF16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
    "MXFP4": [],
}


def random(seed, index):
    z = (seed * 0xD1342543DE82EF95 + index * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def gaussian(count):
    def value(i):
        bits = random(7, i)
        return sum((bits >> 16 * part & 0xFFFF) - 0x8000 for part in range(4)) / 65536
    return np.array([value(i) for i in range(count)], dtype=np.float32)


def fnv(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = ((h ^ byte) * 0x100000001B3) & MASK
    return f"{h:016x}"


def decode_row(seed, name):
    length, size = gguf.GGML_QUANT_SIZES[Type[name]]
    blocks = max(40, 4096 // length)
    data = np.array([random(seed, i) & 255 for i in range(blocks * size)], dtype=np.uint8).reshape(blocks, size)
    for at in HALVES[name]:
        data[:, at + 1] &= 0xBF
    values = gguf.dequantize(data, Type[name]).astype(np.float32).reshape(-1)
    assert not np.isnan(values).any(), name
    places = [int(random(seed + 100, i) % values.size) for i in range(8)]
    samples = [[at, int(values.view(np.uint32)[at])] for at in places]
    return {"format": name, "seed": seed, "blocks": blocks, "halves": HALVES[name], "samples": samples,
            "hash": fnv(values.tobytes())}


def encode_row(name, values):
    return {"format": name, "hash": fnv(gguf.quantize(values, Type[name]).tobytes())}


def write_gguf(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -100)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -30000)
    writer.add_uint32("t.u32", 4000000000)
    writer.add_int32("t.i32", -2000000000)
    writer.add_uint64("t.u64", 1 << 60)
    writer.add_int64("t.i64", -(1 << 60))
    writer.add_float32("t.f32", 0.1)
    writer.add_float64("t.f64", 0.1)
    writer.add_bool("t.bool", True)
    writer.add_string("t.string", "grün 🦀")
    writer.add_array("t.strings", ["a", "", "ccc"])
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.floats", [0.5, 1.5])
    writer.add_array("t.nested", [[1, 2], [3]])
    values = gaussian(256)
    writer.add_tensor("plain", values[:6].reshape(2, 3))
    writer.add_tensor("half", values[:8].astype(np.float16).reshape(2, 4))
    packed = gguf.quantize(values.reshape(4, 64), Type.Q5_0)
    writer.add_tensor("blocks", packed, raw_dtype=Type.Q5_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"plain": values[:6].tolist(), "half": values[:8].astype(np.float16).astype(np.float32).tolist(),
            "blocks": gguf.dequantize(packed, Type.Q5_0).reshape(-1).tolist()}


def main():
    values = gaussian(32 * 128)
    encoders = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
    quant = {
        "made_by": "gguf " + version("gguf"),
        "decode": [decode_row(seed + 1, name) for seed, name in enumerate(HALVES)],
        "encode_values": values.size,
        "encode": [encode_row(name, values) for name in encoders],
    }
    with open(f"{HERE}/quant.json", "w") as out:
        out.write("{\n")
        out.write(f'"made_by": {json.dumps(quant["made_by"])},\n"encode_values": {quant["encode_values"]},\n')
        for part, end in (("decode", ","), ("encode", "")):
            out.write(f'"{part}": [\n' + ",\n".join(json.dumps(row) for row in quant[part]) + f"\n]{end}\n")
        out.write("}\n")

    files = {"made_by": f"gguf {version('gguf')}, safetensors {version('safetensors')}"}
    files["gguf"] = write_gguf(f"{HERE}/python.gguf")
    tensors = {"a": gaussian(6).reshape(2, 3), "b": gaussian(4).astype(np.float16), "c": np.arange(5, dtype=np.int64),
               "empty": np.zeros((0, 4), dtype=np.float32), "scalar": np.array(2.5, dtype=np.float32)}
    save_file(tensors, f"{HERE}/python.safetensors", metadata={"format": "np"})
    files["safetensors"] = {name: {"shape": list(t.shape), "values": t.astype(np.float32).reshape(-1).tolist()}
                            for name, t in tensors.items()}
    with open(f"{HERE}/files.json", "w") as out:
        json.dump(files, out, indent=1)
        out.write("\n")


main()
