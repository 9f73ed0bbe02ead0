"""OpenAI's client and /v1/responses."""

import asyncio

import openai
import pytest

from asking import FEW_TOKENS, MESSAGES, NUM_TOKENS, QUESTION, QUESTIONS, chat, cut, openai_options


def respond(client, server, **more):
    options = {"input": QUESTION, "temperature": 0, "max_output_tokens": NUM_TOKENS, **more}
    return client.responses.create(model=server.model, **options)


def test_a_response_says_what_a_chat_says(client, server):
    response = respond(client, server)
    said = chat(client, server).choices[0]
    assert response.object == "response" and response.id.startswith("resp_") and response.model == server.model
    assert response.output_text == said.message.content and response.error is None
    (item,) = response.output
    assert item.type == "message" and item.role == "assistant" and item.content[0].type == "output_text"
    if said.finish_reason == "length":
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    else:
        assert response.status == "completed"
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens and 0 < usage.output_tokens <= NUM_TOKENS


def test_instructions_are_the_system_message(client, server):
    messages = [{"role": "system", "content": "Answer in one line."}, *MESSAGES]
    said = chat(client, server, messages=messages).choices[0].message.content
    assert respond(client, server, instructions="Answer in one line.").output_text == said
    assert respond(client, server, input=messages).output_text == said


def test_a_stream_says_what_the_whole_says(client, server):
    whole = respond(client, server).output_text
    events = list(respond(client, server, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    opening = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert kinds[:4] == opening and kinds[-1] in ("response.completed", "response.incomplete")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert done.text == whole and events[-1].response.output_text == whole
    assert client.responses.retrieve(events[-1].response.id).output_text == whole


def test_the_stream_helper_rebuilds_the_whole(client, server):
    before, stop = cut(respond(client, server).output_text)
    options = {"temperature": 0, "max_output_tokens": NUM_TOKENS, "extra_body": {"stop": [stop]}}
    with client.responses.stream(model=server.model, input=QUESTION, **options) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == before


def test_a_response_is_kept_until_it_is_deleted(client, server):
    response = respond(client, server, metadata={"topic": "rc"})
    kept = client.responses.retrieve(response.id)
    assert kept.output_text == response.output_text and kept.metadata == {"topic": "rc"}
    assert [item.content[0].text for item in client.responses.input_items.list(response.id)] == [QUESTION]
    client.responses.delete(response.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            gone(response.id)
    unkept = respond(client, server, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_a_conversation_goes_on(client, server):
    first = respond(client, server)
    second = respond(client, server, previous_response_id=first.id, input="And for an Arc?")
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And for an Arc?"},
    ]
    assert second.output_text == chat(client, server, messages=messages).choices[0].message.content
    assert second.previous_response_id == first.id
    # The whole of it in the client's own hands, as its answers came.
    by_hand = [*MESSAGES, *first.output, {"role": "user", "content": "And for an Arc?"}]
    assert respond(client, server, input=by_hand).output_text == second.output_text
    with pytest.raises(openai.NotFoundError):
        respond(client, server, previous_response_id="resp_that_never_was")


def test_logprobs_where_they_are_included(client, server):
    response = respond(client, server, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4)
    entries = response.output[0].content[0].logprobs
    assert len(entries) == response.usage.output_tokens and all(len(entry.top_logprobs) == 2 for entry in entries)


def test_64_at_once_get_the_answers_they_get_alone(server, alone):
    async def together():
        async with openai.AsyncOpenAI(**openai_options(server)) as many:
            asked = [respond(many, server, input=question, max_output_tokens=FEW_TOKENS) for question in QUESTIONS]
            return [response.output_text for response in await asyncio.gather(*asked)]

    assert asyncio.run(together()) == alone
