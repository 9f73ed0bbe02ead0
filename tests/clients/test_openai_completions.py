"""OpenAI's client and /v1/completions."""

import json

import pytest

from asking import NUM_TOKENS, complete

PROMPTS = ["fn main() {", "use std::collections::HashMap;\n", "/// Returns the number of"]


def tokenize(server, text):
    return json.loads(server.get("/tokenize", json.dumps({"prompt": text}).encode()))["tokens"]


@pytest.fixture(scope="module")
def alone(client, server):
    return [complete(client, server, prompt).choices[0].text for prompt in PROMPTS]


def test_a_text_is_completed(client, server):
    answer = complete(client, server, PROMPTS[0])
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == server.model
    assert answer.choices[0].text and answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert complete(client, server, PROMPTS[0], max_tokens=1).usage.completion_tokens == 1


def test_tokens_are_as_good_as_text(client, server, alone):
    ids = [tokenize(server, prompt) for prompt in PROMPTS]
    assert complete(client, server, ids[0]).choices[0].text == alone[0]
    assert [choice.text for choice in complete(client, server, ids).choices] == alone


def test_a_batch_is_each_alone(client, server, alone):
    answer = complete(client, server, PROMPTS)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == alone
    twice = complete(client, server, PROMPTS[:2], n=2)
    assert [choice.text for choice in twice.choices] == [alone[0], alone[0], alone[1], alone[1]]


def test_streams_say_what_wholes_say(client, server, alone):
    texts = [""] * 3
    usage = None
    for chunk in complete(client, server, PROMPTS, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == alone and usage.completion_tokens > 3


def test_echo_and_stop_and_logprobs(client, server, alone):
    echoed = complete(client, server, PROMPTS[0], echo=True, logprobs=2)
    assert echoed.choices[0].text == PROMPTS[0] + alone[0]
    table = echoed.choices[0].logprobs
    assert table.token_logprobs[0] is None and table.text_offset[0] == 0
    assert len(table.tokens) == len(table.token_logprobs) == len(table.top_logprobs) == len(table.text_offset)
    text = "".join(table.tokens)
    assert all(text[at:].startswith(token) for at, token in zip(table.text_offset, table.tokens))
    assert len(table.tokens) == echoed.usage.prompt_tokens + echoed.usage.completion_tokens
    stop = alone[0][4:8]
    stopped = complete(client, server, PROMPTS[0], stop=[stop]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (alone[0][: alone[0].index(stop)], "stop")


def test_likelihoods_as_evaluation_harnesses_ask_for_them(client, server):
    """Token ids in a batch, one token of answer, everything echoed: the prompt's own numbers are what counts."""
    contexts = [tokenize(server, prompt) for prompt in PROMPTS]
    shown = {"extra_body": {"return_token_ids": True}, "logprobs": 1}
    answers = [complete(client, server, context, **shown).choices[0] for context in contexts]
    requests = [context + list(answer.token_ids) for context, answer in zip(contexts, answers)]
    scored = complete(client, server, requests, max_tokens=1, logprobs=1, echo=True, seed=1234)
    for choice, context, answer in zip(scored.choices, contexts, answers):
        told = slice(len(context), -1)
        logprobs, tops = choice.logprobs.token_logprobs[told], choice.logprobs.top_logprobs[told]
        # What the model chose is the likeliest when it is read, too, and exactly as likely.
        assert logprobs == answer.logprobs.token_logprobs
        assert all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops))
    (nothing,) = complete(client, server, requests[0], max_tokens=0, logprobs=1, echo=True).choices
    assert nothing.logprobs.token_logprobs == scored.choices[0].logprobs.token_logprobs[:-1]


def test_token_counts_and_no_more(client, server):
    answer = complete(client, server, PROMPTS[0], extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == NUM_TOKENS
    assert answer.usage.prompt_tokens == len(tokenize(server, PROMPTS[0]))
