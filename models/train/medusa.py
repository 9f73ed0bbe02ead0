"""Medusa heads that share the target's output matrix: head i looks i + 1 tokens further than the target itself."""
import torch, torch.nn.functional as F
from blocks import as_if_rounded
from loss import pull


class Medusa:
    def __init__(self, target, count):
        self.target, self.count, self.is_rounded = target, count, False
        # At first every head says what the target says.
        self.weight = torch.zeros(count, target.width, target.width, device=target.device, requires_grad=True)
        self.bias = torch.zeros(count, target.width, device=target.device, requires_grad=True)

    def narrow(self):
        weight = as_if_rounded(self.weight) if self.is_rounded else self.weight
        return weight.bfloat16(), self.bias.bfloat16()

    def state(self, w, i, final):
        return final + F.silu(F.linear(final, w[0][i], w[1][i]))

    def backward(self, final, logits, offset, stride):
        """Gradients from every `stride`-th position from `offset` on, a tensor; `logits` are the target's, of all positions."""
        places = torch.arange(0, final.shape[1] - self.count - stride, stride, device=final.device) + offset
        some, w, guesses, pulls = final[:, places], self.narrow(), [], []
        for i in range(self.count):
            guess = F.linear(self.state(w, i, some), self.target.output)
            aim = logits[:, places + (i + 1)].softmax(-1, dtype=torch.float32)
            guesses.append(guess)
            pulls.append(pull(guess, aim, 0.8 ** i / guess[..., 0].numel()))
        torch.autograd.backward(guesses, pulls)

    @torch.no_grad()
    def accepted(self, final, ids, first):
        """How many of the chain of best guesses behind each position from `first` on agree with ids; a column a depth."""
        rows = ids.shape[1] - self.count - 1
        w = self.narrow()
        guesses = [F.linear(self.state(w, i, final[:, first:rows]), self.target.output).argmax(-1) for i in range(self.count)]
        agree = [guess == ids[:, first + i + 2:rows + i + 2] for i, guess in enumerate(guesses)]
        return torch.stack(agree, -1).cumprod(-1)

    def matrices(self):
        return [self.weight]

    def others(self):
        return [self.bias]

    def tensors(self):
        return {f"medusa_head.{i}.0.linear.{name}": value[i]
                for i in range(self.count) for name, value in (("weight", self.weight), ("bias", self.bias))}

    def load(self, tensors):
        with torch.no_grad():
            for i in range(self.count):
                self.weight[i] = tensors[f"medusa_head.{i}.0.linear.weight"]
                self.bias[i] = tensors[f"medusa_head.{i}.0.linear.bias"]
