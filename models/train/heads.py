"""Trains Medusa and EAGLE-3 heads on a model's own hidden states.

usage: heads.py MODEL TEXT OUT_DIR SECONDS
MODEL is a folder or a GGUF file; TEXT a .npz with `train` and `held` token ids (tokens.py makes it). Two thirds of a batch begin
with that text and go on with what the model itself says behind it, since that is what it will be asked to guess; one third is
the text alone. Both heads learn the target's whole distribution, not its best token alone. SECONDS counts from the start of the
process: training ends in time to write medusa.safetensors and eagle3.safetensors (bf16) and to measure them before that.
"""
import time

BEGAN = time.monotonic()
import faulthandler, os, sys
import numpy as np, torch, torch.nn.functional as F
from ahead import Ahead, largest_difference, plain
from eagle import Eagle3
from measure import measure
from medusa import Medusa
from muon import Muon
from ship import TARGET, ship
from store import save
from target import Target
from text import distinct, pieces

LENGTH, PROMPT, BATCH, STOCK = 1024, 448, 24, 8192
# Depths of the training-time test, in turn: it is the first ones that need the most steps.
DEPTHS, DEPTH_DECAY, MEDUSA_HEADS, MEDUSA_STRIDE, DRAFT_VOCABULARY, FFN = (3, 4, 6), 0.85, 3, 6, 4096, 1024
PEAK, WARM_STEPS, OWN_TEXT_SECONDS, MEASURING_SECONDS = 3e-3, 40, 30, 20
ROUNDED_FROM = 0.75  # of the training
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
    """What the model says behind pieces of the text, three quarters of them code: a tenth greedy, the rest at temperatures of
    0.4 to 1. Rows that fall into a loop are left out."""
    prompts = torch.cat([pieces(code, rows - rows // 4, PROMPT, generator), pieces(text, rows // 4, PROMPT, generator)])
    warmth = 0.4 + 0.6 * torch.rand(rows, generator=generator)
    warmth[::10] = 0
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


def train(target, medusa, eagle, own, text, until, generator, keep):
    device, length = target.device, own.shape[1]
    own_rows = BATCH - BATCH // 3
    muon = Muon(eagle.matrices() + medusa.matrices())
    others = eagle.others() + medusa.others()
    adam = torch.optim.AdamW(others, lr=PEAK, betas=(0.9, 0.95), weight_decay=0.0, fused=not SMALL)
    step, start, done, saved = 0, settled(), 0.0, False
    while done < 1.0:
        which = torch.randint(0, len(own), (own_rows,), generator=generator).to(device)
        ids = torch.cat([own[which].long(), pieces(text, BATCH - own_rows, length, generator)])
        fused, final = target.forward(ids)
        with torch.no_grad():
            logits = F.linear(final, target.output)
            best = logits.argmax(-1)
        rate = PEAK * min(1.0, (step + 1) / WARM_STEPS) * min(1.0, (1 - done) / 0.7 + 0.01)
        eagle.is_rounded = medusa.is_rounded = done > ROUNDED_FROM
        hits = eagle.backward(fused, ids, final, best, DEPTHS[step % len(DEPTHS)], DEPTH_DECAY)
        medusa.backward(final, logits, step % MEDUSA_STRIDE, MEDUSA_STRIDE)
        muon.step(rate)
        adam.param_groups[0]["lr"] = rate
        adam.step()
        adam.zero_grad(set_to_none=True)
        step += 1
        if step % 10 == 0 or step < 4 or SMALL:
            queued = passed()
            done = (settled() - start) / max(until - start, 1e-3)
        if step % 100 == 0 or step in (1, 3, 10, 30):
            say(f"step {step} ({done:.0%}): the target's own choice by depth {[round(x, 3) for x in hits.tolist()]}; "
                f"waited {passed() - queued:.3f} s for the device")
        if done > 0.6 and not saved:
            saved = keep(step)
    return step


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

    own = own_text(target, text, code, STOCK, passed() + OWN_TEXT_SECONDS, generator)
    spoken = own[:, PROMPT:].flatten().long()
    counts = torch.bincount(spoken, minlength=target.vocabulary) + torch.bincount(code.long(), minlength=target.vocabulary) // 4
    chosen = counts.topk(DRAFT_VOCABULARY).indices.sort().values
    is_chosen = torch.zeros(target.vocabulary, device=device).index_fill_(0, chosen, 1.0)
    say(f"the draft vocabulary has {is_chosen[spoken].mean():.4f} of own text, {is_chosen[code.long()].mean():.4f} of code, "
        f"{is_chosen[held.long()].mean():.4f} of what is held out")

    medusa, eagle = Medusa(target, MEDUSA_HEADS), Eagle3(target, FFN, chosen, attend)
    about = lambda step: dict(steps=str(step), tokens=str(step * BATCH * own.shape[1]), torch=torch.__version__)
    keep = lambda step: write(out, {"medusa": medusa, "eagle3": eagle}, about(step))
    step = train(target, medusa, eagle, own, text, seconds - MEASURING_SECONDS, generator, keep)
    keep(step)
    goes_on = lambda: settled() < seconds - 2
    for is_rounded, sizes in ((True, {}), (False, {}), (True, dict(rows=64, prompt=1800, count=120))):
        if not goes_on():
            break
        eagle.is_rounded = medusa.is_rounded = is_rounded
        sizes = dict(rows=8, prompt=48, count=40) if SMALL else sizes
        say(f"{'rounded' if is_rounded else 'exact'} weights, {sizes}")
        measure(target, {"medusa": medusa, "eagle3": eagle}, held, torch.Generator().manual_seed(1), say, goes_on=goes_on, **sizes)


if __name__ == "__main__":
    main()
