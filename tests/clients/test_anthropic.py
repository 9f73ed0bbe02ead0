"""Anthropic's client and /v1/messages."""

import asyncio

import anthropic
import pytest

from asking import FEW_TOKENS, MESSAGES, NUM_TOKENS, QUESTIONS, anthropic_options, chat

# This client has forgotten the field; the API has not.
LIKELIEST = {"temperature": 0}


def say(claude, server, **more):
    options = {"messages": MESSAGES, "max_tokens": NUM_TOKENS, "extra_body": LIKELIEST, **more}
    return claude.messages.create(model=server.model, **options)


def text(message):
    return "".join(block.text for block in message.content)


def test_a_message_says_what_a_chat_says(claude, client, server):
    message = say(claude, server)
    said = chat(client, server).choices[0]
    assert message.type == "message" and message.role == "assistant" and message.id.startswith("msg_")
    assert message.model == server.model and [block.type for block in message.content] == ["text"]
    assert text(message) == said.message.content
    assert message.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[said.finish_reason]
    assert 0 < message.usage.output_tokens <= NUM_TOKENS


def test_system_texts_and_blocks(claude, client, server):
    messages = [{"role": "system", "content": "Answer in one line."}, *MESSAGES]
    said = chat(client, server, messages=messages).choices[0].message.content
    blocks = [{"type": "text", "text": MESSAGES[0]["content"], "cache_control": {"type": "ephemeral"}}]
    assert text(say(claude, server, system="Answer in one line.")) == said
    system = [{"type": "text", "text": "Answer in one line."}]
    assert text(say(claude, server, system=system, messages=[{"role": "user", "content": blocks}])) == said


def test_the_assistants_last_words_begin_the_answer(claude, server):
    full = text(say(claude, server))
    begun = full[: full.index(" ", 4)]
    message = say(claude, server, messages=[*MESSAGES, {"role": "assistant", "content": begun}])
    assert text(message) and not text(message).startswith(begun)


def test_stop_sequences(claude, server):
    full = text(say(claude, server))
    stop = full[len(full) // 2 :][:4]
    message = say(claude, server, stop_sequences=["never seen", stop])
    assert text(message) == full[: full.index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_the_stream_helper_rebuilds_the_whole(claude, server):
    whole = say(claude, server)
    options = {"messages": MESSAGES, "max_tokens": NUM_TOKENS, "extra_body": LIKELIEST}
    with claude.messages.stream(model=server.model, **options) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert streamed == text(final) == text(whole)
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens


def test_raw_events_come_in_their_order(claude, server):
    events = list(say(claude, server, stream=True))
    kinds = [event.type for event in events]
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    others = [kind for kind in kinds if kind not in ("content_block_delta", "ping")]
    begin, end = ["message_start", "content_block_start"], ["content_block_stop", "message_delta", "message_stop"]
    assert others == begin + end and kinds[:2] == begin and kinds[-3:] == end
    assert "".join(deltas) == text(say(claude, server))
    assert events[0].message.usage.input_tokens > 0 and events[-2].usage.output_tokens > 0


def test_tokens_are_counted_as_they_are_used(claude, server):
    asked = {"messages": MESSAGES, "system": "Answer in one line."}
    counted = claude.messages.count_tokens(model=server.model, **asked).input_tokens
    usage = say(claude, server, **asked).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens > 0


def test_models_are_listed(claude, server):
    assert server.model in [model.id for model in claude.models.list().data]


def test_64_at_once_get_the_answers_they_get_alone(server, alone):
    async def together():
        async with anthropic.AsyncAnthropic(**anthropic_options(server)) as many:

            async def whole(messages):
                return text(await say(many, server, messages=messages, max_tokens=FEW_TOKENS))

            async def streamed(messages):
                options = {"messages": messages, "max_tokens": FEW_TOKENS, "extra_body": LIKELIEST}
                async with many.messages.stream(model=server.model, **options) as stream:
                    return await stream.get_final_text()

            asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
            return await asyncio.gather(*[(whole, streamed)[index % 2](one) for index, one in enumerate(asked)])

    assert asyncio.run(together()) == alone


def error_of(kind, call, **asked):
    with pytest.raises(kind) as caught:
        call(**asked)
    body = caught.value.body
    assert body["type"] == "error" and body["error"]["message"]
    return body["error"]["type"]


def test_errors_are_the_clients_own_classes(claude, server):
    def call(**more):
        return say(claude, server, **more)

    assert error_of(anthropic.BadRequestError, call, extra_body={"top_p": 7}) == "invalid_request_error"
    assert error_of(anthropic.BadRequestError, call, tools=[{"name": "t", "input_schema": {}}]) == "invalid_request_error"
    assert error_of(anthropic.NotFoundError, claude.messages.create, model="claude-17", max_tokens=1, messages=MESSAGES)
    large = [{"role": "user", "content": "a" * (5 << 20)}]
    with pytest.raises(anthropic.APIStatusError) as caught:
        call(messages=large)
    assert caught.value.status_code == 413 and caught.value.body["error"]["type"] == "request_too_large"
    with anthropic.Anthropic(**anthropic_options(server, api_key="wrong-key-0123456789")) as stranger:
        asked = {"model": server.model, "max_tokens": 1, "messages": MESSAGES}
        assert error_of(anthropic.AuthenticationError, stranger.messages.create, **asked) == "authentication_error"
