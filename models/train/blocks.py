"""IQ4_NL, a format of GGUF: blocks of 32 values, each one of 16 uneven levels times the block's scale; 4.5 bits a value.

The heads are trained to live with it: in the last part of training they compute with rounded weights, and gradients go to the
exact ones as if nothing were rounded.
"""
import functools
import torch

LEN = 32
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@functools.cache
def tables(device):
    """The levels, and the borders between them."""
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=device)
    return levels, (levels[1:] + levels[:-1]) / 2


@torch.no_grad()
def fit(matrix, tries):
    """Codes [blocks, 32] and scales [blocks, 1] of the least squared error among 2 * tries + 1 beginnings."""
    levels, between = tables(matrix.device)
    x = matrix.reshape(-1, LEN).float()
    extreme = x.gather(1, x.abs().argmax(1, keepdim=True))
    extreme = torch.where(extreme == 0, torch.ones_like(extreme), extreme)
    best, scale = torch.full_like(extreme, -1.0), torch.zeros_like(extreme)
    for shift in range(-tries, tries + 1):
        q = levels[torch.bucketize(x * ((LEVELS[0] + shift) / extreme), between)]
        along, square = (q * x).sum(1, keepdim=True), (q * q).sum(1, keepdim=True)
        gain = along * along / square
        better = gain > best
        best, scale = torch.where(better, gain, best), torch.where(better, along / square, scale)
    scale = scale.half().float()
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.bucketize(x / safe, between), scale


@torch.no_grad()
def rounded(matrix, tries=2):
    codes, scale = fit(matrix, tries)
    return (tables(matrix.device)[0][codes] * scale).view(matrix.shape)


def as_if_rounded(matrix, tries=2):
    """Rounded values; the gradient is that of the exact ones."""
    return matrix + (rounded(matrix, tries) - matrix).detach()


def encode(matrix, tries=2):
    """The bytes of each row, [rows, bytes]."""
    codes, scale = fit(matrix, tries)
    pairs = (codes[:, :LEN // 2] | codes[:, LEN // 2:] << 4).to(torch.uint8)
    return torch.cat([scale.half().view(torch.uint8), pairs], 1).view(matrix.shape[0], -1)
