"""Rows of tokens: pieces of a long text, and how much of a row repeats itself."""
import torch


def pieces(tokens, count, length, generator):
    start = torch.randint(0, len(tokens) - length, (count, 1), generator=generator).to(tokens.device)
    return tokens[start + torch.arange(length, device=tokens.device)].long()


def distinct(ids):
    """The share of each row's runs of four tokens that are not repeats."""
    runs = ids[:, :-3].long() * 7919 + ids[:, 1:-2] * 104729 + ids[:, 2:-1] * 1299709 + ids[:, 3:] * 15485863
    runs = runs.sort(-1).values
    return 1 - (runs[:, 1:] == runs[:, :-1]).float().mean(-1)
