"""OpenVINO GenAI's continuous batching on a GGUF file: MODEL THREADS REPEATS CASE...

A case is STREAMS:INPUT:OUTPUT, so many streams that begin together, or STREAMS:INPUT:OUTPUT:REQUESTS, a load of at most so many
at a time, each begun when another has ended; with :RATE behind it they come by themselves, so many a second.
"""

import json, resource, sys, time
import numpy, openvino, openvino_genai as genai

model, threads, repeats = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
cases = [case.split(":") for case in sys.argv[4:]]
scheduler = genai.SchedulerConfig()
scheduler.cache_size = 1  # GiB
scheduler.max_num_batched_tokens = 512  # as the others
scheduler.max_num_seqs = max(int(case[0]) for case in cases)
pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})
random = numpy.random.default_rng(1)
first_token_at = None


class Request:
    """One that is under way; `times` has the moment of each token."""

    def __init__(self, number, length, answer):
        config = genai.GenerationConfig(max_new_tokens=answer, ignore_eos=True)
        prompt = openvino.Tensor(random.integers(0, 16000, (1, length)))
        self.handle = pipeline.add_request(number, prompt, config)
        self.times = []

    def read(self, now):
        while self.handle.can_read():
            self.times += [now] * sum(len(output.generated_ids) for output in self.handle.read().values())


def step(requests):
    """The moment of the first token of all is kept."""
    global first_token_at
    pipeline.step()
    now = time.time()
    for request in requests:
        request.read(now)
    if first_token_at is None and any(request.times for request in requests):
        first_token_at = now


def together(streams, length, answer):
    """Seconds to the first token; tokens a second while all decode."""
    start = time.time()
    requests = [Request(number, length, answer) for number in range(streams)]
    while pipeline.has_non_finished_requests():
        step(requests)
    begun, ended = max(request.times[0] for request in requests), min(request.times[-1] for request in requests)
    decoded = sum(begun < moment <= ended for request in requests for moment in request.times)
    return min(request.times[0] for request in requests) - start, decoded / (ended - begun) if ended > begun else None


def load(streams, length, answer, count, rate):
    """Tokens a second, and percentiles of milliseconds to the first token and between tokens."""
    together(1, length, 2)  # to warm up
    gaps = random.exponential(1 / rate, count) if rate else numpy.zeros(count)
    requests, asked, running, start = [], [], [], time.time()
    arrivals = start + numpy.cumsum(gaps)
    while len(requests) < count or running:
        while len(requests) < count and arrivals[len(requests)] <= time.time() and (rate or len(running) < streams):
            asked.append(arrivals[len(requests)] if rate else time.time())
            requests.append(Request(len(requests), length, answer))
            running.append(requests[-1])
        if running:
            step(running)
            running = [request for request in running if len(request.times) < answer]
        else:
            time.sleep(max(0, arrivals[len(requests)] - time.time()))
    first = [1000 * (request.times[0] - moment) for request, moment in zip(requests, asked)]
    between = numpy.concatenate([1000 * numpy.diff(request.times) for request in requests])
    tokens = sum(len(request.times) for request in requests)
    return {
        "output_throughput": tokens / (max(request.times[-1] for request in requests) - start),
        **{f"p{p}_ttft_ms": numpy.percentile(first, p) for p in (50, 99)},
        **{f"p{p}_itl_ms": numpy.percentile(between, p) for p in (50, 99)},
    }


def result(streams, length, answer, count=None, rate=None):
    streams, length, answer = int(streams), int(length), int(answer)
    if count:
        return load(streams, length, answer, int(count), float(rate or 0))
    runs = [together(streams, length, answer) for _ in range(repeats)]
    rates = [rate for _, rate in runs if rate]
    prefill = length / min(first for first, _ in runs)
    return {"prefill_tokens_per_s": prefill, "decode_tokens_per_s": max(rates, default=None)}


results = [result(*case) for case in cases]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"results": results, "first_token_at": first_token_at, "peak_bytes": peak}))
