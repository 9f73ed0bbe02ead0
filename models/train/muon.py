"""Muon: momentum whose matrix is made orthogonal before it is applied (Jordan and others, 2024), so that all directions of a
matrix learn at one pace. In a short training it goes further a step than Adam. Steps are scaled to the size of Adam's, so one
learning rate serves both (Liu and others, 2025)."""
import torch


@torch.no_grad()
def orthogonal(m):
    """Nearly the nearest orthogonal matrix, by five Newton-Schulz steps; the last two dimensions are the matrix."""
    x = m.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Muon:
    def __init__(self, matrices, momentum=0.95, decay=0.1):
        self.matrices, self.momentum, self.decay = matrices, momentum, decay
        self.gathered = [torch.zeros_like(m) for m in matrices]

    @torch.no_grad()
    def step(self, rate):
        for matrix, gathered in zip(self.matrices, self.gathered):
            gathered.lerp_(matrix.grad, 1 - self.momentum)
            ahead = matrix.grad.lerp(gathered, self.momentum)
            matrix.mul_(1 - rate * self.decay)
            matrix.add_(orthogonal(ahead), alpha=-rate * 0.2 * max(matrix.shape[-2:]) ** 0.5)
            matrix.grad = None
