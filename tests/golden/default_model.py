"""What transformers answers on the built-in model's own weights (models/folio-rust-42m.gguf, decoded to f32).

Writes default-model.json beside this file. An answer is cut where the best two tokens come closer than MARGIN: what lies
behind such a tie is decided by rounding, and rounding is allowed to differ between implementations.
"""
import json, lzma, pathlib
import gguf, tokenizers, torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent
MODELS = HERE.parent.parent / "models"
QUESTIONS = ["What does `Rc::clone` do?", "How do I use `HashMap::entry`?", "How do I use `Vec::push`?", "What is a `Mutex`?"]
MARGIN, LONGEST = 0.08, 64

NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def load(path):
    reader = gguf.GGUFReader(path)
    field = lambda key: reader.get_field(key).contents()
    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    tensors = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if tensor.name == "token_embd.weight":
            tensors["model.embed_tokens.weight"] = values
        elif tensor.name == "output_norm.weight":
            tensors["model.norm.weight"] = values
        else:
            _, layer, part, _ = tensor.name.split(".")
            if part in ("attn_q", "attn_k"):     # llama.cpp interleaves the rotated pairs
                n = heads if part == "attn_q" else kv_heads
                values = values.reshape(n, values.shape[0] // n // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
            tensors[f"model.layers.{layer}.{NAMES[part]}.weight"] = values
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"), hidden_size=field("llama.embedding_length"),
        num_hidden_layers=field("llama.block_count"), num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=field("llama.attention.key_length"), intermediate_size=field("llama.feed_forward_length"),
        max_position_embeddings=field("llama.context_length"), tie_word_embeddings=True,
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"), rope_theta=field("llama.rope.freq_base"))
    model = LlamaForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    tokenizer = tokenizers.Tokenizer.from_buffer(lzma.decompress((MODELS / "tokenizer.json.lzma").read_bytes()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    tokenizer.chat_template = field("tokenizer.chat_template")
    generation = json.loads(field("folio.generation_config"))
    return model, tokenizer, generation["eos_token_id"]


@torch.no_grad()
def answer(model, tokenizer, eos, question):
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids, tokens = tokenizer.encode(text, add_special_tokens=False), []
    while len(tokens) < LONGEST:
        logits = model(torch.tensor([ids + tokens])).logits[0, -1]
        best = logits.topk(2).values
        if best[0] - best[1] < MARGIN:
            break
        token = int(logits.argmax())
        if token in eos:
            return {"question": question, "answer": tokenizer.decode(tokens, skip_special_tokens=True), "max_tokens": 256}
        tokens.append(token)
    return {"question": question, "answer": tokenizer.decode(tokens, skip_special_tokens=True), "max_tokens": len(tokens)}


def main():
    torch.set_num_threads(1)
    model, tokenizer, eos = load(MODELS / "folio-rust-42m.gguf")
    cases = [answer(model, tokenizer, eos, question) for question in QUESTIONS]
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}, gguf 0.19.0, f32"
    out = {"made_by": made_by, "weights": "models/folio-rust-42m.gguf", "cases": [c for c in cases if c["max_tokens"] >= 8]}
    (HERE / "default-model.json").write_text(json.dumps(out, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(out, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
