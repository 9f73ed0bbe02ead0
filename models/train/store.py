"""Writes tensors as a safetensors file: a header that says where each lies, and their bytes."""
import json, torch

KINDS = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}


def save(tensors, path, about):
    header, parts, at = {"__metadata__": about}, [], 0
    for name, tensor in tensors.items():
        part = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        header[name] = dict(dtype=KINDS[tensor.dtype], shape=list(tensor.shape), data_offsets=[at, at + len(part)])
        parts.append(part)
        at += len(part)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + b"".join(parts))
