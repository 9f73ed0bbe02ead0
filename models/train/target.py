"""The model that heads are trained for: its hidden states, its logits, and text of its own.

Reads a Hugging Face folder of a Llama (bf16), or a GGUF file of one (with the `gguf` package), and computes in bf16.
"""
import json
import numpy as np, torch, torch.nn.functional as F


def norm(x, weight, eps):
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def angles(first, count, head_dim, theta, device):
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    turned = torch.arange(first, first + count, device=device).float()[:, None] * inverse
    return turned.cos().bfloat16(), turned.sin().bfloat16()


def from_gguf(path):
    import gguf
    reader = gguf.GGUFReader(path)
    field = lambda name: reader.fields[name].contents()
    kind = field("general.architecture")
    heads, kv_heads = field(f"{kind}.attention.head_count"), field(f"{kind}.attention.head_count_kv")
    config = dict(
        hidden_size=field(f"{kind}.embedding_length"), num_hidden_layers=field(f"{kind}.block_count"),
        num_attention_heads=heads, num_key_value_heads=kv_heads,
        rms_norm_eps=field(f"{kind}.attention.layer_norm_rms_epsilon"), rope_theta=field(f"{kind}.rope.freq_base"))
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    outside = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):  # pairs of a rotation lie side by side in the file
                n = heads if parts[2] == "attn_q" else kv_heads
                values = values.view(n, -1, 2, values.shape[-1]).transpose(1, 2).reshape(values.shape)
            weights[f"model.layers.{parts[1]}.{names[parts[2]]}.weight"] = values
        else:
            weights[f"{outside[parts[0]]}.weight"] = values
    return config, weights


def from_folder(path):
    from safetensors.torch import load_file
    return json.load(open(f"{path}/config.json")), load_file(f"{path}/model.safetensors")


class Target:
    def __init__(self, path, device):
        config, weights = from_gguf(path) if path.endswith(".gguf") else from_folder(path)
        self.device = device
        self.width, self.layers = config["hidden_size"], config["num_hidden_layers"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or self.width // self.heads
        self.eps, self.theta = config["rms_norm_eps"], config["rope_theta"]
        self.weights = {name: w.to(device, torch.bfloat16) for name, w in weights.items()}
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.output = self.weights.get("lm_head.weight", self.embedding)
        self.vocabulary = self.embedding.shape[0]
        # The states that EAGLE-3 takes: before these layers, as its public implementations count them.
        self.taken = (2, self.layers // 2, self.layers - 3)

    def layer(self, number, x, cos, sin, cache, start):
        w = lambda name: self.weights[f"model.layers.{number}.{name}.weight"]
        batch, rows, _ = x.shape
        h = norm(x, w("input_layernorm"), self.eps)
        split = lambda name, heads: F.linear(h, w(name)).view(batch, rows, heads, self.head_dim).transpose(1, 2)
        q = rotate(split("self_attn.q_proj", self.heads), cos, sin)
        k = rotate(split("self_attn.k_proj", self.kv_heads), cos, sin)
        v = split("self_attn.v_proj", self.kv_heads)
        group = self.heads // self.kv_heads
        if cache is not None:
            cache[0, number, :, :, start:start + rows], cache[1, number, :, :, start:start + rows] = k, v
        if start > 0:
            # One new row: the query heads of a KV head are the rows of one small attention.
            k, v = cache[0, number, :, :, :start + 1], cache[1, number, :, :, :start + 1]
            seen = F.scaled_dot_product_attention(q.reshape(batch, self.kv_heads, group, self.head_dim), k, v)
            seen = seen.reshape(batch, 1, -1)
        else:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, rows, -1)
        x = x + F.linear(seen, w("self_attn.o_proj"))
        h = norm(x, w("post_attention_layernorm"), self.eps)
        gated = F.silu(F.linear(h, w("mlp.gate_proj"))) * F.linear(h, w("mlp.up_proj"))
        return x + F.linear(gated, w("mlp.down_proj"))

    @torch.no_grad()
    def forward(self, ids, cache=None, start=0):
        """Of ids [batch, rows]: the three states side by side, and the state that the output matrix reads."""
        x = F.embedding(ids, self.embedding)
        cos, sin = angles(start, ids.shape[1], self.head_dim, self.theta, ids.device)
        states = []
        for number in range(self.layers):
            if number in self.taken:
                states.append(x)
            x = self.layer(number, x, cos, sin, cache, start)
        return torch.cat(states, -1), norm(x, self.weights["model.norm.weight"], self.eps)

    @torch.no_grad()
    def generate(self, prompts, count, temperature, goes_on=lambda: True):
        """prompts [batch, n], and up to `count` tokens behind each, fewer where `goes_on` says so on the way.

        `temperature` is one a row, 0 for greedy.
        """
        batch, n = prompts.shape
        cache = torch.empty(2, self.layers, batch, self.kv_heads, n + count, self.head_dim,
                            dtype=torch.bfloat16, device=self.device)
        chunk = 1024
        ids = torch.cat([
            self.sample(self.forward(prompts[i:i + chunk], cache[:, :, i:i + chunk])[1][:, -1], temperature[i:i + chunk])
            for i in range(0, batch, chunk)])
        out = [prompts, ids]
        for start in range(n, n + count - 1):
            ids = self.sample(self.forward(ids, cache, start)[1][:, -1], temperature)
            out.append(ids)
            if start % 16 == 0 and not goes_on():
                break
        return torch.cat(out, 1)

    def sample(self, final, temperature):
        logits = F.linear(final, self.output).float()
        # The largest of logits / t + Gumbel noise is a draw at temperature t; -log of an exponential draw is such noise.
        noise = torch.empty_like(logits).exponential_().clamp_min_(1e-30).log_()
        return (logits - noise * temperature[:, None]).argmax(-1, keepdim=True)
