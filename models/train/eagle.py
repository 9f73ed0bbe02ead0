"""The EAGLE-3 head: one decoder layer over the target's fused states and the next token, with a vocabulary of its own.

Names of tensors are those of the public checkpoints. The output matrix is not trained: its rows are the target's own, of the
tokens of the draft vocabulary, so a file of this head need not have it. Training lets the head run on its own states for
several tokens ("training-time test"): at depth 0 a position's state is the target's, at depth j it is what the head gave at
depth j - 1, and a row of depth j sees the target's positions up to its own and, of deeper ones, those of its own chain.
"""
import torch, torch.nn.functional as F
from ahead import Ahead
from blocks import as_if_rounded
from loss import pull
from target import angles, norm, rotate

# A little below 1: what is asked of the head are the target's likeliest tokens.
AIM_TEMPERATURE = 0.8
NORMS = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")


class Eagle3:
    def __init__(self, target, ffn, chosen, attend=Ahead.apply):
        """`chosen`: the draft vocabulary, ascending token ids."""
        self.target, self.attend, self.is_rounded = target, attend, False
        d, q, kv = target.width, target.heads * target.head_dim, target.kv_heads * target.head_dim
        shapes = {"fc": (d, 3 * d), "midlayer.self_attn.q_proj": (q, 2 * d), "midlayer.self_attn.k_proj": (kv, 2 * d),
                  "midlayer.self_attn.v_proj": (kv, 2 * d), "midlayer.self_attn.o_proj": (d, q),
                  "midlayer.mlp.gate_proj": (ffn, d), "midlayer.mlp.up_proj": (ffn, d), "midlayer.mlp.down_proj": (d, ffn)}
        device = target.device
        self.weights = {name: torch.randn(shape, device=device) * 0.02 for name, shape in shapes.items()}
        # It starts from the target's latest state, and as a layer that adds nothing.
        self.weights["fc"] = torch.cat([torch.zeros(d, 2 * d), torch.eye(d)], 1).to(device)
        for name in ("midlayer.self_attn.o_proj", "midlayer.mlp.down_proj"):
            self.weights[name].zero_()
        self.weights |= {name: torch.ones(d, device=device) for name in NORMS}
        self.weights["norm"] = target.weights["model.norm.weight"].float().clone()
        for weight in self.weights.values():
            weight.requires_grad_()
        self.choose(chosen)

    def choose(self, chosen):
        self.chosen = chosen
        self.output = self.target.output[chosen]
        self.index = torch.full((self.target.vocabulary,), -1, dtype=torch.long, device=chosen.device)
        self.index[chosen] = torch.arange(len(chosen), device=chosen.device)

    def narrow(self):
        """The weights in bf16, rounded first where they are to be, and matrices of one input in one."""
        exact = lambda weight: as_if_rounded(weight) if self.is_rounded and weight.ndim == 2 else weight
        w = {name: exact(weight).bfloat16() for name, weight in self.weights.items()}
        join = lambda *names: torch.cat([w.pop(f"midlayer.{name}_proj") for name in names])
        w["qkv"] = join("self_attn.q", "self_attn.k", "self_attn.v")
        w["gate_up"] = join("mlp.gate", "mlp.up")
        return w

    def step(self, w, state, tokens, past, depth, watch=lambda name, x: None):
        """One depth of all positions at once: state and tokens [batch, rows, ...]; `past` gathers keys and values.

        `watch` is told what each matrix reads.
        """
        target = self.target
        batch, rows, _ = state.shape
        normed = lambda name, x: norm(x, w[name], target.eps)
        embedded = F.embedding(tokens, target.embedding)
        x = torch.cat([normed("midlayer.input_layernorm", embedded), normed("midlayer.hidden_norm", state)], -1)
        qkv = F.linear(x, w["qkv"]).view(batch, rows, -1, target.head_dim).transpose(1, 2)
        q, k, v = qkv.split([target.heads, target.kv_heads, target.kv_heads], 1)
        cos, sin = angles(depth, rows, target.head_dim, target.theta, x.device)
        group = target.heads // target.kv_heads
        past += [rotate(k, cos, sin).repeat_interleave(group, 1), v.repeat_interleave(group, 1)]
        seen = self.attend(target.head_dim ** -0.5, rotate(q, cos, sin), *past).transpose(1, 2).reshape(batch, rows, -1)
        state = state + F.linear(seen, w["midlayer.self_attn.o_proj"])
        h = normed("midlayer.post_attention_layernorm", state)
        gate, up = F.linear(h, w["gate_up"]).chunk(2, -1)
        gated = F.silu(gate) * up
        for name, read in (("qkv", x), ("o_proj", seen), ("gate_up", h), ("down_proj", gated)):
            watch(name, read)
        return state + F.linear(gated, w["midlayer.mlp.down_proj"])

    def logits(self, w, state):
        return F.linear(norm(state, w["norm"], self.target.eps), self.output)

    def backward(self, fused, ids, final, best, depths, decay):
        """Gradients of all depths; row t of depth j is given token t + 1 + j and guesses token t + 2 + j.

        `best` is what the target itself says behind each row: where the head cannot say that, it is not asked.
        Gives the share of guesses that are the target's, by depth.
        """
        rows = ids.shape[1] - depths - 1
        with torch.no_grad():
            aim = (F.linear(final, self.output) / AIM_TEMPERATURE).softmax(-1, dtype=torch.float32).bfloat16()
            known = self.index[best] >= 0
        w, past, guesses, pulls, hits = self.narrow(), [], [], [], []
        state = F.linear(fused[:, :rows], w["fc"])
        for depth in range(depths):
            state = self.step(w, state, ids[:, depth + 1:depth + 1 + rows], past, depth)
            here = slice(depth + 1, depth + 1 + rows)
            guess = self.logits(w, state)
            guesses.append(guess)
            pulls.append(pull(guess, aim[:, here], known[:, here, None] * (decay ** depth / known[:, here].sum().clamp_min(1))))
            hits.append((self.chosen[guess.detach()[:4].argmax(-1)] == best[:4, here]).float().mean())
        torch.autograd.backward(guesses, pulls)
        return torch.stack(hits)

    @torch.no_grad()
    def accepted(self, fused, ids, depths, first):
        """As Medusa's, but each guess goes on from the head's own guess before it."""
        rows = ids.shape[1] - depths - 1
        w, past, agree = self.narrow(), [], []
        state, tokens = F.linear(fused[:, :rows], w["fc"]), ids[:, 1:1 + rows]
        for depth in range(depths):
            state = self.step(w, state, tokens, past, depth)
            tokens = self.chosen[self.logits(w, state).argmax(-1)]
            agree.append(tokens[:, first:] == ids[:, first + depth + 2:depth + 2 + rows])
        return torch.stack(agree, -1).cumprod(-1)

    def matrices(self):
        return [weight for weight in self.weights.values() if weight.ndim == 2]

    def others(self):
        return [weight for weight in self.weights.values() if weight.ndim == 1]

    def tensors(self):
        out = {f"{name}.weight": weight for name, weight in self.weights.items()}
        # Public layout: d2t holds what to add to a draft id to get the target's.
        out["d2t"] = self.chosen - torch.arange(len(self.chosen), device=self.chosen.device)
        return out

    def load(self, tensors):
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(tensors[f"{name}.weight"])
        d2t = tensors["d2t"].to(self.chosen.device).long()
        self.choose(d2t + torch.arange(len(d2t), device=d2t.device))
