"""Makes heads.py's TEXT from a corpus: docs.jsonl, chat.jsonl and unseen.jsonl, a JSON object with `text` a line; those of unseen.jsonl
name their crate as well (`source`: CRATE/FILE).

usage: tokens.py CORPUS_DIR TOKENIZER.json.lzma OUT.npz
Crates are divided by name: of every five one is held out, so that what is measured was seen by neither the model nor the heads.
"""
import json, lzma, sys, zlib
import numpy as np
from tokenizers import Tokenizer


def main():
    folder, tokenizer, out = sys.argv[1:4]
    tokenizer = Tokenizer.from_buffer(lzma.open(tokenizer).read())
    rows = lambda name: [json.loads(line) for line in open(f"{folder}/{name}.jsonl")]
    documents = [row["text"] for row in rows("docs")]
    chats = [f"<|im_start|>user\n{r['question']}<|im_end|>\n<|im_start|>assistant\n{r['answer']}<|im_end|>\n" for r in rows("chat")]
    crates = [(zlib.crc32(row["source"].split("/")[0].encode()) % 5 == 0, row["text"]) for row in rows("unseen")]
    pack = lambda texts: np.concatenate([np.array(e.ids + [0], dtype=np.uint16) for e in tokenizer.encode_batch_fast(texts)])
    rng = np.random.default_rng(0)
    rng.shuffle(documents)
    most = 16_000_000  # characters of documentation
    kept = documents[:next((i for i, n in enumerate(np.cumsum([len(d) for d in documents])) if n > most), len(documents))]
    train = pack(kept + chats * 4 + [text for is_held, text in crates if not is_held])
    held = pack([text for is_held, text in crates if is_held][:400])
    np.savez(out, train=train, held=held)
    print(len(train), "tokens to train on,", len(held), "held out")


main()
