"""OpenAI's client and /v1/chat/completions."""

import asyncio

import openai
import pytest

from asking import FEW_TOKENS, MESSAGES, NUM_TOKENS, QUESTIONS, chat, cut, openai_options, texts_of_chunks


@pytest.fixture(scope="module")
def whole(client, server):
    """The plain answer that others are compared with."""
    return chat(client, server)


def text(answer, index=0):
    return answer.choices[index].message.content


def test_an_answer_has_all_that_clients_read(whole, server):
    assert whole.object == "chat.completion" and whole.id.startswith("chatcmpl-") and whole.model == server.model
    (choice,) = whole.choices
    assert choice.index == 0 and choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length") and choice.logprobs is None and choice.message.tool_calls is None
    usage = whole.usage
    assert 0 < usage.completion_tokens <= NUM_TOKENS and usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0 and usage.completion_tokens_details.reasoning_tokens == 0


def test_a_stream_says_what_the_whole_says(client, server, whole):
    chunks = list(chat(client, server, stream=True))
    assert texts_of_chunks(chunks) == [text(whole)]
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in chunks)
    assert sum(choice.finish_reason is not None for chunk in chunks for choice in chunk.choices) == 1


def test_a_stream_tells_its_usage_last(client, server, whole):
    *parts, last = chat(client, server, stream=True, stream_options={"include_usage": True})
    assert texts_of_chunks(parts) == [text(whole)]
    assert last.choices == [] and all(part.usage is None for part in parts)
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_stream_helper_rebuilds_the_whole(client, server, whole):
    before, stop = cut(text(whole))
    options = {"temperature": 0, "max_completion_tokens": NUM_TOKENS, "stop": [stop]}
    with client.chat.completions.stream(model=server.model, messages=MESSAGES, **options) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert text(final) == before and {"chunk", "content.delta", "content.done"} <= kinds


def test_parse_reads_a_plain_answer(client, server, whole):
    options = {"temperature": 0, "max_completion_tokens": 4}
    with pytest.raises(openai.LengthFinishReasonError) as caught:
        client.chat.completions.parse(model=server.model, messages=MESSAGES, **options)
    assert text(whole).startswith(text(caught.value.completion))


def test_the_raw_answer_has_a_request_id(client, server):
    options = {"max_completion_tokens": 1}
    raw = client.chat.completions.with_raw_response.create(model=server.model, messages=MESSAGES, **options)
    assert raw.headers["x-request-id"] and raw.parse().id.endswith(raw.headers["x-request-id"])
    assert raw.headers["content-type"].startswith("application/json")


def test_several_answers_stream_as_they_come_whole(client, server):
    wish = {"n": 3, "seed": 7, "temperature": 1.0}
    whole = chat(client, server, **wish)
    texts = [text(whole, index) for index in range(3)]
    assert [choice.index for choice in whole.choices] == [0, 1, 2] and len(set(texts)) > 1
    assert texts_of_chunks(chat(client, server, stream=True, **wish), 3) == texts
    assert whole.usage.completion_tokens > NUM_TOKENS


def test_a_seed_repeats_an_answer(client, server):
    drawn = [text(chat(client, server, temperature=1.5, seed=seed)) for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1] and len(set(drawn)) > 1


def test_logprobs_spell_the_answer(client, server, whole):
    wish = {"logprobs": True, "top_logprobs": 5}
    answer = chat(client, server, **wish)
    content = answer.choices[0].logprobs.content
    assert text(answer) == text(whole)
    for entry in content:
        top = [other.logprob for other in entry.top_logprobs]
        assert len(top) == 5 and top == sorted(top, reverse=True) and entry.logprob == top[0] <= 0
        assert bytes(entry.bytes).decode(errors="replace") == entry.token == entry.top_logprobs[0].token
    # The end mark has no text, and is not part of the answer's.
    assert b"".join(bytes(entry.bytes) for entry in content).decode().startswith(text(answer))
    streamed = [
        entry
        for chunk in chat(client, server, stream=True, **wish)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert [(entry.token, entry.logprob) for entry in streamed] == [(entry.token, entry.logprob) for entry in content]
    assert chat(client, server, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_stop_texts_end_an_answer(client, server, whole):
    full = text(whole)
    stop = full[len(full) // 2 :][:4]
    before = full[: full.index(stop)]
    for wish in (stop, ["never seen", stop]):
        answer = chat(client, server, stop=wish)
        assert (text(answer), answer.choices[0].finish_reason) == (before, "stop")
        assert answer.choices[0].stop_reason == stop
        assert texts_of_chunks(chat(client, server, stop=wish, stream=True)) == [before]


def test_max_tokens_under_both_names(client, server):
    for name in ("max_completion_tokens", "max_tokens"):
        answer = client.chat.completions.create(model=server.model, messages=MESSAGES, **{name: 3})
        assert answer.usage.completion_tokens <= 3
    assert chat(client, server, max_completion_tokens=1).choices[0].finish_reason == "length"


def test_logit_bias_forbids_and_forces(client, server):
    def first_token(**wish):
        answer = chat(client, server, max_completion_tokens=1, extra_body={"return_token_ids": True}, **wish)
        return answer.choices[0].token_ids[0]

    likeliest = first_token()
    assert first_token(logit_bias={str(likeliest): -100}) != likeliest
    assert first_token(logit_bias={"100": 100}) == 100


def test_penalties_and_top_p_are_taken(client, server):
    answer = chat(client, server, temperature=0.8, top_p=0.5, frequency_penalty=1.0, presence_penalty=-1.0, user="me")
    assert text(answer)


def test_what_vllm_adds_comes_in_the_extra_body(client, server, whole):
    likeliest = [{"top_k": 1}, {"min_p": 1.0}, {"priority": -3}, {"chat_template_kwargs": {"enable_thinking": False}}]
    for extra in likeliest:
        temperature = 1.0 if extra.keys() & {"top_k", "min_p"} else 0
        assert text(chat(client, server, temperature=temperature, extra_body=extra)) == text(whole), extra
    shown = chat(client, server, extra_body={"return_token_ids": True})
    assert len(shown.prompt_token_ids) == shown.usage.prompt_tokens
    assert len(shown.choices[0].token_ids) == shown.usage.completion_tokens
    longer = chat(client, server, extra_body={"ignore_eos": True, "min_tokens": NUM_TOKENS})
    assert longer.usage.completion_tokens == NUM_TOKENS
    included = chat(client, server, stop=text(whole)[5:9], extra_body={"include_stop_str_in_output": True})
    assert text(included).endswith(text(whole)[5:9])


def test_a_cache_salt_keeps_prefixes_apart(client, server):
    long = [{"role": "user", "content": "Explain what a slice is, and how it differs from a vector. " * 8}]

    def cached(salt):
        answer = chat(client, server, messages=long, extra_body={"cache_salt": salt}, max_completion_tokens=1)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("one") == 0 and cached("one") > 0 and cached("two") == 0


def test_roles_and_parts_are_read(client, server):
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "a trait?"}]
    said = [
        {"role": "developer", "content": "Answer in one line."},
        {"role": "user", "content": "What is\na trait?"},
        {"role": "assistant", "content": "A set of methods."},
        {"role": "user", "content": "And a struct?"},
    ]
    same = [{**said[0], "role": "system"}, {"role": "user", "content": parts}, *said[2:]]
    assert text(chat(client, server, messages=said)) == text(chat(client, server, messages=same))


def test_64_at_once_get_the_answers_they_get_alone(server, alone):
    async def together():
        async with openai.AsyncOpenAI(**openai_options(server)) as many:

            async def whole(asked):
                return text(await chat(many, server, **asked))

            async def streamed(asked):
                chunks = await chat(many, server, stream=True, **asked)
                return texts_of_chunks([chunk async for chunk in chunks])[0]

            asked = [
                {"messages": [{"role": "user", "content": question}], "max_completion_tokens": FEW_TOKENS}
                for question in QUESTIONS
            ]
            return await asyncio.gather(*[(whole, streamed)[index % 2](one) for index, one in enumerate(asked)])

    assert asyncio.run(together()) == alone


def test_who_leaves_a_stream_stops_its_request(client, server):
    stream = chat(client, server, stream=True, max_completion_tokens=900, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    server.wait_until("the request has ended", server.is_idle)
