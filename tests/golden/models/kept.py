"""Golden files as they lie in the tree: text under LZMA, whose window is small enough for the tests to set a limit."""

import json
import lzma

FILTERS = [{"id": lzma.FILTER_LZMA1, "preset": 9, "dict_size": 1 << 16}]


def write(path, text):
    path.write_bytes(lzma.compress(text.encode(), lzma.FORMAT_ALONE, filters=FILTERS))


def read(path):
    return json.loads(lzma.decompress(path.read_bytes()))
