"""Compiles all kernels with NVRTC and writes one archive per generation of devices; `cargo xtask kernels` runs it.

    compile.py OBJECTS [--check] [FILE.cu ...]

OBJECTS is a folder where compiled files are kept between runs. A warning is a failure. With --check nothing is written,
and the oldest, the newest and Hopper's architecture stand for all: the archives' hash says that all were compiled once.
With files only those are compiled (and nothing is written): for those who work on one.
"""

import ctypes
import hashlib
import lzma
import multiprocessing
import os
import pathlib
import re
import struct
import sys

# Code of one source for neighbours is much alike, so that they share an archive. What comes after Hopper gets assembly
# (PTX), which its driver translates: one text for all generations, and smaller than the code of two.
GENERATIONS = {"ampere": ["sm_80", "sm_89"], "hopper": ["sm_90a"], "later": ["compute_90"]}
ARCHITECTURES = [architecture for members in GENERATIONS.values() for architecture in members]
CHECKED = ["sm_80", "sm_90a", "compute_90"]
MAGIC = b"folio-k2"
LZMA = b"\x01"
FILTER = {"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "lp": 0, "nice_len": 273, "dict_size": 16 << 20}
# Instructions have 16 bytes, hence the position bits; text has none.
CODE = FILTER | {"lc": 0, "pb": 4}
TEXT = FILTER | {"lc": 3, "pb": 0}
HERE = pathlib.Path(__file__).resolve().parent
OPTIONS = [line.strip() for line in (HERE / "options.txt").read_text().splitlines() if line.strip()]


def nvrtc():
    import nvidia

    folders = [pathlib.Path(path) / "cu13" / "lib" for path in nvidia.__path__]
    folder = next(folder for folder in folders if (folder / "libnvrtc.so.13").exists())
    ctypes.CDLL(str(folder / "libnvrtc-builtins.so.13.0"), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(folder / "libnvrtc.so.13"))


def includes(path, seen):
    """The file and the headers it includes, its own first."""
    if path not in seen:
        seen.append(path)
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
            includes(HERE / name, seen)
    return seen


def compile_one(job):
    """(file, architecture, objects) -> (code or None, what the compiler said)."""
    file, architecture, objects = job
    files = includes(HERE / file, [])
    key = hashlib.sha256()
    for part in [architecture, *OPTIONS, *(text for path in files for text in (path.name, path.read_text()))]:
        key.update(struct.pack("<Q", len(part.encode())) + part.encode())
    kept = pathlib.Path(objects) / f"{key.hexdigest()}.code"
    if kept.exists():
        return kept.read_bytes(), ""
    lib = nvrtc()
    headers = files[1:]
    array = ctypes.c_char_p * max(1, len(headers))
    texts = array(*[path.read_bytes() for path in headers])
    names = array(*[path.name.encode() for path in headers])
    program = ctypes.c_void_p()
    source = files[0].read_bytes()
    made = lib.nvrtcCreateProgram(ctypes.byref(program), source, file.encode(), len(headers), texts, names)
    assert made == 0, f"nvrtcCreateProgram: {made}"
    options = [f"--gpu-architecture={architecture}", *OPTIONS]
    array = ctypes.c_char_p * len(options)
    failed = lib.nvrtcCompileProgram(program, len(options), array(*[option.encode() for option in options]))
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    lib.nvrtcGetProgramLog(program, log)
    text = log.value.decode().strip()
    if failed:
        return None, text or f"NVRTC failed: {failed}"
    form = "PTX" if architecture.startswith("compute_") else "CUBIN"
    getattr(lib, f"nvrtcGet{form}Size")(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    getattr(lib, f"nvrtcGet{form}")(program, code)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    if not text:
        draft = kept.with_suffix(f".{os.getpid()}.part")
        draft.write_bytes(code.raw)
        draft.rename(kept)
    return code.raw, text


def packed_text(code):
    """PTX without comments and needless space."""
    text = re.sub(r"//[^\n]*", "", code.decode())
    text = re.sub(r"[ \t]+", " ", text).replace(", ", ",").replace(" ;", ";")
    return re.sub(r"\s*\n\s*", "\n", text).encode()


def source_hash(files):
    """As crates/device/src/cuda/driver/sources.rs computes it."""
    out = hashlib.sha256()
    for path in [*files, HERE / "options.txt"]:
        for part in (path.name.encode(), path.read_bytes()):
            out.update(struct.pack("<Q", len(part)) + part)
    return out.digest()


def main():
    objects, rest = sys.argv[1], sys.argv[2:]
    only = [pathlib.Path(name).name for name in rest if not name.startswith("--")]
    check = "--check" in rest or bool(only)
    pathlib.Path(objects).mkdir(parents=True, exist_ok=True)
    files = sorted([*HERE.glob("*.cu"), *HERE.glob("*.cuh")], key=lambda path: path.name)
    hashed = source_hash(files)
    kernels = [path.name for path in files if path.suffix == ".cu" and (not only or path.name in only)]
    architectures = CHECKED if check else ARCHITECTURES
    jobs = [
        (file, architecture, objects)
        for file in kernels
        for architecture in architectures
        if architecture == "sm_90a" or not file.endswith("_sm90.cu")
    ]
    with multiprocessing.Pool() as pool:
        results = dict(zip([job[:2] for job in jobs], pool.map(compile_one, jobs, chunksize=1)))
    wrong = 0
    for (file, architecture), (code, log) in results.items():
        if log:
            print(f"{file} for {architecture}:\n{log}\n")
        wrong += code is None or bool(log)
    if wrong:
        sys.exit(f"{wrong} of {len(jobs)} compilations went wrong")
    if check:
        print(f"{len(kernels)} files compile for {len(architectures)} architectures")
        return
    (HERE / "archive").mkdir(exist_ok=True)
    total = 0
    for generation, members in GENERATIONS.items():
        body = b""
        for file, architecture in ((file, architecture) for file in kernels for architecture in members):
            if (file, architecture) in results:
                code = results[file, architecture][0]
                code = packed_text(code) if architecture.startswith("compute_") else code
                for part in (f"{architecture}/{file}".encode(), code):
                    body += struct.pack("<I", len(part)) + part
        packed = MAGIC + hashed + hashlib.sha256(body).digest() + LZMA
        filters = [TEXT if members[0].startswith("compute_") else CODE]
        packed += lzma.compress(body, format=lzma.FORMAT_ALONE, filters=filters)
        (HERE / "archive" / f"{generation}.bin").write_bytes(packed)
        total += len(packed)
        print(f"{generation}: {len(body) >> 10} KiB, {len(packed) >> 10} KiB packed")
    print(f"together {total >> 10} KiB")


if __name__ == "__main__":
    main()
