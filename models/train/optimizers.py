"""Muon for the matrices, Adam for the vectors. Rates are tensors, so that a recorded step follows them.

Muon is momentum whose matrix is made orthogonal before it is applied (Jordan and others, 2024): all directions of a matrix learn
at one pace, and a short training goes further than with Adam. Its steps are scaled to the size of Adam's, so that one rate serves
both (Liu and others, 2025).
"""
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
            matrix.sub_(orthogonal(ahead) * (rate * 0.2 * max(matrix.shape[-2:]) ** 0.5))
            matrix.grad = None


class Adam:
    def __init__(self, vectors, first=0.9, second=0.95):
        self.vectors, self.first, self.second = vectors, first, second
        self.means, self.squares = ([torch.zeros_like(v) for v in vectors] for _ in range(2))
        self.steps = torch.zeros((), device=vectors[0].device)

    @torch.no_grad()
    def step(self, rate):
        self.steps += 1
        mean_share, square_share = 1 - self.first ** self.steps, 1 - self.second ** self.steps
        for vector, mean, square in zip(self.vectors, self.means, self.squares):
            mean.lerp_(vector.grad, 1 - self.first)
            square.lerp_(vector.grad * vector.grad, 1 - self.second)
            vector.sub_(rate * (mean / mean_share) / ((square / square_share).sqrt() + 1e-8))
            vector.grad = None
