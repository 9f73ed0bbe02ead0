"""Attention of EAGLE's training: a row sees the positions up to its own, and the deeper rows of its own chain.

The first part is ordinary causal attention and runs in the fused kernel. The few keys of the chain are joined to it by the
softmax's normaliser. Backwards the fused kernel is given the joint output and the joint normaliser, with which its gradients of
the first part come out right as they are: probabilities are exp(score - normaliser), whatever else the normaliser covers.
"""
import torch

aten = torch.ops.aten


def dot(a, b):
    return (a * b).sum(-1, dtype=torch.float32)


def fused(q, k, v, scale):
    """Causal attention, its normaliser [batch, heads, rows], and what the backward pass wants besides."""
    if q.is_cuda:
        out, normaliser, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)
        return out, normaliser, rest[:6]
    out, normaliser = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    return out, normaliser, []


def fused_backward(grad, q, k, v, out, normaliser, rest, scale):
    if q.is_cuda:
        starts_q, starts_k, most_q, most_k, seed, offset = rest
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, normaliser, starts_q, starts_k, most_q, most_k, 0.0, True, seed, offset, scale=scale)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, normaliser, 0.0, True, scale=scale)


class Ahead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scale, q, k, v, *chain):
        """All [batch, heads, rows, size]; `chain` is keys and values of each deeper row in turn."""
        out, first, rest = fused(q, k, v, scale)
        scores = [dot(q, own) * scale for own in chain[::2]]
        total = torch.logsumexp(torch.stack([first] + scores), 0)
        joint = out * (first - total).exp()[..., None].to(out.dtype)
        for score, own in zip(scores, chain[1::2]):
            joint = joint + own * (score - total).exp()[..., None].to(own.dtype)
        ctx.save_for_backward(q, k, v, joint, total, *chain)
        ctx.scale, ctx.rest = scale, rest
        return joint

    @staticmethod
    def backward(ctx, grad):
        q, k, v, joint, total, *chain = ctx.saved_tensors
        grad, joint, scale = grad.contiguous(), joint.contiguous(), ctx.scale
        to_q, to_k, to_v = fused_backward(grad, q, k, v, joint, total.contiguous(), ctx.rest, scale)
        middle, to_chain = dot(grad, joint), []
        for key, value in zip(chain[::2], chain[1::2]):
            share = (dot(q, key) * scale - total).exp()
            turn = (share * (dot(grad, value) - middle) * scale)[..., None].to(q.dtype)
            to_q = to_q + turn * key
            to_chain += [turn * q, share[..., None].to(grad.dtype) * grad]
        return None, to_q, to_k, to_v, *to_chain


def plain(scale, q, k, v, *chain):
    """The same by the definition."""
    rows = q.shape[2]
    causal = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(-1, -2)).float().mul(scale).masked_fill(~causal, float("-inf"))
    weights = torch.cat([scores] + [dot(q, own)[..., None] * scale for own in chain[::2]], -1).softmax(-1).to(q.dtype)
    seen = weights[..., :rows] @ v
    for i, value in enumerate(chain[1::2]):
        seen = seen + weights[..., rows + i:rows + i + 1] * value
    return seen


def largest_difference(device, dtype=torch.bfloat16):
    """Between the two, of results and gradients, as a share of the largest value."""
    draws = torch.Generator(device).manual_seed(1)
    tensor = lambda: torch.randn(2, 4, 96, 64, device=device, generator=draws).to(dtype)
    given, worst = [tensor() for _ in range(7)], 0.0
    weight, results = tensor(), []
    for attend in (Ahead.apply, plain):
        inputs = [x.clone().requires_grad_() for x in given]
        out = attend(64 ** -0.5, *inputs)
        results.append([out] + list(torch.autograd.grad((out * weight).sum(), inputs)))
    for a, b in zip(*results):
        worst = max(worst, ((a - b).abs().max() / b.abs().max()).item())
    return worst
