"""Writes heads as GGUF files: matrices in IQ4_NL, vectors in F32, `d2t` in 16 bits, under the names of the public layouts."""
import gguf, torch
from blocks import encode

TARGET = "folio-rust-42m"


def ship(head, kind, path, about):
    writer = gguf.GGUFWriter(path, kind)
    writer.add_type("head")
    writer.add_name(f"{TARGET}.{kind}")
    writer.add_license("MIT OR Apache-2.0")
    writer.add_quantization_version(2)
    for key, value in about.items():
        writer.add_string(f"folio.training.{key}", value)
    for name, tensor in head.tensors().items():
        tensor = tensor.detach()
        if tensor.ndim == 2:
            writer.add_tensor(name, encode(tensor).cpu().numpy(), raw_dtype=gguf.GGMLQuantizationType.IQ4_NL)
        elif tensor.is_floating_point():
            writer.add_tensor(name, tensor.float().cpu().numpy())
        else:
            assert tensor.abs().max() < 1 << 15, "an offset over 16 bits"
            writer.add_tensor(name, tensor.to(torch.int16).cpu().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
