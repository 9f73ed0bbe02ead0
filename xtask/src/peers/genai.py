"""OpenVINO GenAI's continuous batching on a GGUF file: MODEL THREADS REPEATS STREAMS:INPUT:OUTPUT..."""

import json, resource, sys, time
import numpy, openvino, openvino_genai as genai

model, threads, repeats = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
scheduler = genai.SchedulerConfig()
scheduler.cache_size = 1  # GiB
scheduler.max_num_batched_tokens = 512  # as the others
pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})
random = numpy.random.default_rng(1)
first_token_at = None


def together(streams, length, answer):
    """Seconds to the first token; tokens a second while all decode."""
    global first_token_at
    config = genai.GenerationConfig(max_new_tokens=answer, ignore_eos=True)
    start = time.time()
    handles = []
    for stream in range(streams):
        prompt = openvino.Tensor(random.integers(0, 16000, (1, length)))
        handles.append(pipeline.add_request(stream, prompt, config))
    counts, first, begun, rate = [0] * streams, None, None, None
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.time()
        for stream, handle in enumerate(handles):
            while handle.can_read():
                counts[stream] += sum(len(output.generated_ids) for output in handle.read().values())
        first = first or (sum(counts) and now)
        if begun is None and min(counts) > 0:
            begun = (now, sum(counts))
        elif begun and rate is None and max(counts) == answer:
            rate = (sum(counts) - begun[1]) / (now - begun[0])
    first_token_at = first_token_at or first
    return first - start, rate


results = []
for case in sys.argv[4:]:
    streams, length, answer = map(int, case.split(":"))
    runs = [together(streams, length, answer) for _ in range(repeats)]
    prefill = length / min(first for first, _ in runs)
    rates = [rate for _, rate in runs if rate]
    results.append({"prefill_tokens_per_s": prefill, "decode_tokens_per_s": max(rates, default=None)})
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"results": results, "first_token_at": first_token_at, "peak_bytes": peak}))
