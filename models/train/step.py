"""One step of training, recorded once and replayed: a head is so small that launching its kernels takes longer than running
them."""
import torch, torch.nn.functional as F
from optimizers import Adam, Muon


class Step:
    def __init__(self, target, medusa, eagle, shape, depths, depth_decay, medusa_stride):
        self.target, self.medusa, self.eagle = target, medusa, eagle
        self.depths, self.depth_decay, self.medusa_stride = depths, depth_decay, medusa_stride
        self.muon = Muon(eagle.matrices() + medusa.matrices())
        self.adam = Adam(eagle.others() + medusa.others())
        # What changes from step to step.
        self.ids = torch.zeros(shape, dtype=torch.long, device=target.device)
        self.rate, self.offset = torch.zeros((), device=target.device), torch.zeros((), dtype=torch.long, device=target.device)
        self.hits, self.recorded = None, None

    def compute(self):
        fused, final = self.target.forward(self.ids)
        with torch.no_grad():
            logits = F.linear(final, self.target.output)
            best = logits.argmax(-1)
        self.hits = self.eagle.backward(fused, self.ids, final, best, self.depths, self.depth_decay)
        self.medusa.backward(final, logits, self.offset, self.medusa_stride)
        self.muon.step(self.rate)
        self.adam.step(self.rate)

    def record(self):
        """From now on a step is a replay of one that is computed now. Nothing is learnt from recording."""
        self.recorded = None
        graph = torch.cuda.CUDAGraph()
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # once for real, so that libraries have what they allocate
            self.compute()
        torch.cuda.current_stream().wait_stream(beside)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.compute()
        self.recorded = graph

    def run(self, ids, rate, offset):
        self.ids.copy_(ids)
        self.rate.fill_(rate)
        self.offset.fill_(offset)
        self.recorded.replay() if self.recorded else self.compute()
