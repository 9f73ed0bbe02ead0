"""Trains Medusa and EAGLE-3 heads on a model's own hidden states.

usage: heads.py MODEL TEXT OUT_DIR SECONDS
MODEL is a folder or a GGUF file; TEXT a .npz with `train` and `held` token ids (tokens.py makes it). Two thirds of a batch begin
with that text and go on with what the model itself says behind it, since that is what it will be asked to guess; one third is
the text alone. Both heads learn the target's whole distribution, not its best token alone. SECONDS counts from the start of the
process: training ends in time to write medusa.safetensors and eagle.safetensors (bf16) and to measure them before that.
"""
import time

BEGAN = time.monotonic()
import faulthandler, os, sys
import numpy as np, torch
from ahead import Ahead, largest_difference, plain
from eagle import Eagle3
from measure import measure
from medusa import Medusa
from ship import TARGET, ship
from step import Step
from store import save
from target import Target
from text import distinct, pieces

LENGTH, PROMPT, BATCH, STOCK = 1024, 448, 24, 8192
DEPTHS, DEPTH_DECAY, MEDUSA_HEADS, MEDUSA_STRIDE, DRAFT_VOCABULARY, FFN = 5, 0.85, 2, 6, 4096, 512
PEAK, WARM_STEPS, OWN_TEXT_SECONDS, MEASURING_SECONDS = 3e-3, 40, 30, 20
STOCK_LASTS = 150  # seconds of training that one stock of own text is good for
ROUNDED_FROM = 0.7  # of the training
SMALL = not torch.cuda.is_available()
if SMALL:  # enough to see that it works
    LENGTH, PROMPT, BATCH, STOCK = 128, 48, 6, 12


def passed():
    return time.monotonic() - BEGAN


def say(text):
    print(f"[{passed():6.1f} s] {text}", flush=True)


def settled():
    """Seconds since the start, with nothing under way on the device."""
    if not SMALL:
        torch.cuda.synchronize()
    return passed()


def own_text(target, text, code, rows, until, generator):
    """What the model says behind pieces of the text, three quarters of them code: a quarter greedy, the rest at temperatures of
    0.4 to 1. Rows that fall into a loop are left out."""
    prompts = torch.cat([pieces(code, rows - rows // 4, PROMPT, generator), pieces(text, rows // 4, PROMPT, generator)])
    warmth = 0.4 + 0.6 * torch.rand(rows, generator=generator)
    warmth[::4] = 0
    said = target.generate(prompts, LENGTH - PROMPT, warmth.to(text.device), lambda: settled() < until)
    keep = distinct(said[:, PROMPT:]) > 0.4
    say(f"own text: {tuple(said.shape)}, {keep.float().mean():.3f} of the rows are no loops")
    return said[keep].to(torch.int32)


def write(out, heads, about):
    """Both exact, in bf16, and as they are shipped."""
    os.makedirs(out, exist_ok=True)
    narrow = lambda t: t.detach().bfloat16() if t.is_floating_point() else t
    for name, head in heads.items():
        save({key: narrow(value) for key, value in head.tensors().items()}, f"{out}/{name}.safetensors", about)
        ship(head, name, f"{out}/{TARGET}.{name}.gguf", about)
    say(f"written: {about}")
    return True


def record(step):
    if SMALL:
        return
    try:
        step.record()
        say("a step is recorded")
    except Exception as error:
        for parameter in step.muon.matrices + step.adam.vectors:
            parameter.grad = None
        say(f"a step cannot be recorded here: {error!r}")


def train(target, medusa, eagle, own, text, until, generator, keep):
    """Steps until that second; the rate falls in a line over the last seven tenths."""
    device, length, own_rows = target.device, own.shape[1], BATCH - BATCH // 3
    step = Step(target, medusa, eagle, (BATCH, length), DEPTHS, DEPTH_DECAY, MEDUSA_STRIDE)

    def batch():
        which = torch.randint(0, len(own), (own_rows,), generator=generator).to(device)
        return torch.cat([own[which].long(), pieces(text, BATCH - own_rows, length, generator)])

    step.ids.copy_(batch())
    record(step)
    count, start, done, saved = 0, settled(), 0.0, False
    while done < 1.0:
        if done > ROUNDED_FROM and not eagle.is_rounded:
            eagle.is_rounded = medusa.is_rounded = True
            record(step)
        rate = PEAK * min(1.0, (count + 1) / WARM_STEPS) * min(1.0, (1 - done) / 0.7 + 0.01)
        step.run(batch(), rate, count % MEDUSA_STRIDE)
        count += 1
        if count % 10 == 0 or count < 4 or SMALL:
            queued = passed()
            done = (settled() - start) / max(until - start, 1e-3)
        if count % 250 == 0 or count in (1, 3, 10, 100):
            say(f"step {count} ({done:.0%}): the target's own choice by depth {[round(x, 3) for x in step.hits.tolist()]}; "
                f"waited {passed() - queued:.3f} s for the device")
        if done > 0.6 and not saved:
            saved = keep(count)
    return count


def main():
    path, text, out, seconds = sys.argv[1:4] + [float(sys.argv[4])]
    faulthandler.dump_traceback_later(seconds + 10, exit=True)
    device = "cpu" if SMALL else "cuda"
    say(f"torch {torch.__version__} on {device if SMALL else torch.cuda.get_device_name()}")
    if not SMALL:
        torch.backends.cuda.enable_cudnn_sdp(False)  # it would make a plan for every length of the cache
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    target = Target(path, device)
    data = np.load(text)
    text, held = (torch.from_numpy(data[name].astype(np.int32)).to(device) for name in ("train", "held"))
    code = text[int((text == 2).nonzero().max()) + 1:]  # crates lie behind the last chat
    say(f"{len(text)} tokens to train on, {len(code)} of them code; {len(held)} held out")
    try:
        difference = largest_difference(device)
        assert difference < 0.03, f"differs by {difference}"
        attend = Ahead.apply
        say(f"joined attention differs from the plain one by {difference:.4f}")
    except Exception as error:
        attend = plain
        say(f"joined attention is not to be had here, the plain one is taken: {error!r}")

    stocks = max(1, round(seconds / STOCK_LASTS))
    own = [own_text(target, text, code, STOCK, passed() + OWN_TEXT_SECONDS, generator) for _ in range(stocks)]
    shortest = min(rows.shape[1] for rows in own)
    own = torch.cat([rows[:, :shortest] for rows in own])
    spoken = own[:, PROMPT:].flatten().long()
    counts = torch.bincount(spoken, minlength=target.vocabulary) + torch.bincount(code.long(), minlength=target.vocabulary) // 4
    chosen = counts.topk(DRAFT_VOCABULARY).indices.sort().values
    is_chosen = torch.zeros(target.vocabulary, device=device).index_fill_(0, chosen, 1.0)
    say(f"the draft vocabulary has {is_chosen[spoken].mean():.4f} of own text, {is_chosen[code.long()].mean():.4f} of code, "
        f"{is_chosen[held.long()].mean():.4f} of what is held out")

    medusa, eagle = Medusa(target, MEDUSA_HEADS), Eagle3(target, FFN, chosen, attend)
    about = lambda step: dict(steps=str(step), tokens=str(step * BATCH * own.shape[1]), torch=torch.__version__)
    keep = lambda step: write(out, {"medusa": medusa, "eagle": eagle}, about(step))
    steps = train(target, medusa, eagle, own, text, seconds - MEASURING_SECONDS, generator, keep)
    keep(steps)
    goes_on = lambda: settled() < seconds - 2
    for is_rounded, sizes in ((True, {}), (False, {}), (True, dict(rows=64, prompt=1800, count=120))):
        if not goes_on():
            break
        eagle.is_rounded = medusa.is_rounded = is_rounded
        torch.manual_seed(1)
        sizes = dict(rows=8, prompt=48, count=40) if SMALL else sizes
        say(f"{'rounded' if is_rounded else 'exact'} weights, {sizes}")
        measure(target, {"medusa": medusa, "eagle": eagle}, held, torch.Generator().manual_seed(1), say, goes_on=goes_on, **sizes)


if __name__ == "__main__":
    main()
