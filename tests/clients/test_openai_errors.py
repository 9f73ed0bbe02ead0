"""What OpenAI's client makes of refusals, of a full server and of one that ends."""

import asyncio
import time

import anthropic
import httpx2
import openai
import pytest

from asking import MESSAGES, anthropic_options, chat, endless, openai_options
from serving import Server


def refusal(kind, call, **asked):
    with pytest.raises(kind) as caught:
        call(**asked)
    error = caught.value
    assert type(error) is kind and error.body["message"] and error.request_id
    return error


def test_a_stranger_is_turned_away(server):
    for key in ("wrong-key-0123456789", "x"):
        with openai.OpenAI(**openai_options(server, api_key=key)) as stranger:
            error = refusal(openai.AuthenticationError, stranger.models.list)
            assert (error.status_code, error.code) == (401, "invalid_api_key")


def test_bad_requests_name_the_field(client, server):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for field, asked in {
        "temperature": {"temperature": -1},
        "top_logprobs": {"logprobs": True, "top_logprobs": 999},
        "n": {"n": 0},
        "messages": {"messages": []},
        "messages[0].role": {"messages": [{"role": "king", "content": "a"}]},
        "tools": {"tools": [tool]},
        "response_format": {"response_format": {"type": "json_object"}},
        "no_such_field": {"extra_body": {"no_such_field": 1}},
        "chat_template": {"extra_body": {"chat_template": "{{ 1 }}"}},
    }.items():
        error = refusal(openai.BadRequestError, chat, client=client, server=server, **asked)
        assert (error.status_code, error.param, error.type) == (400, field, "invalid_request_error")
        assert error.body["param"] == field and field in error.body["message"]
    streamed = refusal(openai.BadRequestError, chat, client=client, server=server, stream=True, temperature=-1)
    assert streamed.param == "temperature"


def test_a_prompt_that_does_not_fit_has_its_own_code(client, server):
    long = [{"role": "user", "content": "word " * 5000}]
    error = refusal(openai.BadRequestError, chat, client=client, server=server, messages=long)
    assert error.code == "context_length_exceeded"


def test_what_is_not_there_is_not_found(client):
    error = refusal(openai.NotFoundError, client.chat.completions.create, model="gpt-17", messages=MESSAGES)
    assert (error.status_code, error.code) == (404, "model_not_found")
    refusal(openai.NotFoundError, client.responses.retrieve, response_id="resp_that_never_was")
    refusal(openai.NotFoundError, client.files.list)


def test_other_statuses_are_status_errors(client, server):
    large = [{"role": "user", "content": "a" * (5 << 20)}]
    assert refusal(openai.APIStatusError, chat, client=client, server=server, messages=large).status_code == 413
    with openai.OpenAI(**openai_options(server, default_headers={"host": "evil.example"})) as rebound:
        assert refusal(openai.PermissionDeniedError, rebound.models.list).status_code == 403


def test_a_client_that_gives_up_raises_its_own_timeout(client, server):
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.001), server, max_completion_tokens=900)
    server.wait_until("the request has ended", server.is_idle)


@pytest.fixture(scope="module")
def narrow():
    """A server with room for one request at a time."""
    with Server("--max-model-len", "4096", "--max-in-flight", "1") as server:
        yield server


@pytest.fixture(scope="module")
def shallow():
    """A server that runs one sequence at a time and lets one more wait."""
    with Server("--max-model-len", "4096", "--max-num-seqs", "1", "--max-waiting", "1") as server:
        yield server


class Occupied:
    """A stream that goes on for as long as it is wanted, and never beyond its test."""

    def __init__(self, server, **more):
        self.client = openai.OpenAI(**openai_options(server))
        self.stream = self.client.chat.completions.create(**{**endless(server), **more})
        next(iter(self.stream))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()

    def release(self):
        self.stream.close()
        self.client.close()


class Watch:
    """When a client asked, and what it was told."""

    def __init__(self, on_refusal):
        self.asked, self.told = [], []
        self.on_refusal = on_refusal

    def hooks(self):
        return {"request": [self.request], "response": [self.response]}

    def async_hooks(self):
        async def request(request):
            self.request(request)

        async def response(response):
            self.response(response)

        return {"request": [request], "response": [response]}

    def request(self, _):
        self.asked.append(time.monotonic())

    def response(self, response):
        self.told.append((time.monotonic(), response.status_code, response.headers.get("retry-after")))
        if response.status_code == 429:
            self.on_refusal()

    def check(self):
        """A refusal first, with a time to come back; each further try waited at least as long; the last went well."""
        *refused, (_, status, _) = self.told
        assert status == 200 and refused and len(self.asked) == len(self.told)
        for (told, status, retry_after), again in zip(refused, self.asked[1:]):
            assert status == 429 and int(retry_after) >= 1
            assert again - told >= int(retry_after) - 0.01


def test_a_full_server_is_a_rate_limit_error(narrow):
    with Occupied(narrow), openai.OpenAI(**openai_options(narrow)) as client:
        error = refusal(openai.RateLimitError, chat, client=client, server=narrow)
        assert (error.status_code, error.code, error.type) == (429, "rate_limit_exceeded", "rate_limit_error")
        assert int(error.response.headers["retry-after"]) >= 1
        assert client.models.list().data, "what costs nothing is answered"
        with anthropic.Anthropic(**anthropic_options(narrow)) as claude:
            with pytest.raises(anthropic.RateLimitError) as caught:
                claude.messages.create(model=narrow.model, max_tokens=1, messages=MESSAGES)
            assert caught.value.body["error"]["type"] == "rate_limit_error"
    narrow.wait_until("the stream has ended", narrow.is_idle)


def test_a_full_queue_is_a_rate_limit_error(shallow):
    async def fill():
        async with openai.AsyncOpenAI(**openai_options(shallow)) as client:
            asked = {**endless(shallow), "n": 1}
            running = await client.chat.completions.create(**asked)
            await anext(aiter(running))
            work = [client.chat.completions.create(**asked) for _ in range(8)]
            answers = await asyncio.gather(*work, return_exceptions=True)
            for answer in [running, *answers]:
                if isinstance(answer, openai.AsyncStream):
                    await answer.close()
            return answers

    answers = asyncio.run(fill())
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert len(refused) >= 6 and all(type(error) is openai.RateLimitError for error in refused), answers
    assert all(int(error.response.headers["retry-after"]) >= 1 for error in refused)
    shallow.wait_until("the streams have ended", shallow.is_idle)


def test_retries_wait_as_long_as_they_are_told(narrow):
    with Occupied(narrow) as busy:
        watch = Watch(busy.release)
        http = openai.DefaultHttpxClient(event_hooks=watch.hooks())
        with openai.OpenAI(**openai_options(narrow, max_retries=2, http_client=http)) as client:
            assert chat(client, narrow).choices[0].message.content
    watch.check()
    narrow.wait_until("the stream has ended", narrow.is_idle)


def test_async_and_anthropic_retries_wait_too(narrow):
    async def ask():
        with Occupied(narrow) as busy:
            watch = Watch(busy.release)
            http = openai.DefaultAsyncHttpxClient(event_hooks=watch.async_hooks())
            async with openai.AsyncOpenAI(**openai_options(narrow, max_retries=2, http_client=http)) as client:
                assert (await chat(client, narrow)).choices[0].message.content
        watch.check()

    asyncio.run(ask())
    narrow.wait_until("the stream has ended", narrow.is_idle)
    with Occupied(narrow) as busy:
        watch = Watch(busy.release)
        http = httpx2.Client(event_hooks=watch.hooks(), timeout=60)
        with anthropic.Anthropic(**anthropic_options(narrow, max_retries=2, http_client=http)) as claude:
            assert claude.messages.create(model=narrow.model, max_tokens=4, messages=MESSAGES).content
    watch.check()
    narrow.wait_until("the stream has ended", narrow.is_idle)


def ends_with_error(server, stop):
    """Streams of every kind that the server cannot finish end in an exception, with what it said."""
    with openai.OpenAI(**openai_options(server)) as client:
        claude = anthropic.Anthropic(**anthropic_options(server))
        endless_message = {"model": server.model, "messages": MESSAGES, "max_tokens": 4000, "stream": True}
        streams = {
            "chat": client.chat.completions.create(**endless(server)),
            "completions": client.completions.create(
                model=server.model, prompt="fn", n=8, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
            ),
            "responses": client.responses.create(
                model=server.model, input="a", stream=True, extra_body={"ignore_eos": True}
            ),
            # The model itself must not find an end, as this API cannot tell it not to: any token is as likely as any other,
            # and of several answers not all come upon the last one in time.
            **{
                f"messages {answer}": claude.messages.create(**endless_message, extra_body={"temperature": 100.0})
                for answer in range(4)
            },
        }
        for stream in streams.values():
            next(iter(stream))
        stop()
        errors = {}
        for name, stream in streams.items():
            try:
                last = None
                for last in stream:
                    pass
                errors[name] = last
            except (openai.APIError, anthropic.APIError) as error:
                errors[name] = error
        claude.close()
    return errors


def check_ends(errors):
    for name in ("chat", "completions"):
        error = errors[name]
        assert type(error) is openai.APIError and error.message and error.body["type"] == "server_error", errors
    # This client takes a failed response for an event like others; the event says what happened.
    failed = errors["responses"]
    is_failed = getattr(failed, "type", None) == "response.failed" and failed.response.error.message
    assert is_failed or isinstance(failed, openai.APIError) or failed.type == "error", errors
    messages = [end for name, end in errors.items() if name.startswith("messages")]
    cut = [end for end in messages if isinstance(end, anthropic.APIStatusError) and end.body["type"] == "error"]
    ended = [end for end in messages if getattr(end, "type", None) == "message_stop"]
    assert cut and len(cut) + len(ended) == len(messages), errors


def test_a_stream_out_of_time_ends_in_an_exception():
    with Server("--max-model-len", "4096", "--request-timeout", "1") as server:
        errors = ends_with_error(server, lambda: None)
        check_ends(errors)
        assert errors["chat"].code == "request_timeout"


def test_a_server_that_ends_says_so_to_those_it_leaves():
    with Server("--max-model-len", "4096", "--drain-timeout", "0") as server:
        check_ends(ends_with_error(server, server.terminate))
        assert server.wait() == 0


def test_a_draining_server_finishes_and_takes_no_more():
    with Server("--max-model-len", "4096", "--drain-timeout", "60") as server:
        with openai.OpenAI(**openai_options(server)) as client:
            stream = client.chat.completions.create(**{**endless(server), "n": 1, "max_tokens": 600})
            next(iter(stream))
            server.terminate()
            server.wait_until("the server drains", lambda: server.status("/health") == 503)
            error = refusal(openai.InternalServerError, chat, client=client, server=server)
            assert (error.status_code, error.code) == (503, "server_draining")
            with anthropic.Anthropic(**anthropic_options(server)) as claude:
                with pytest.raises(anthropic.InternalServerError) as caught:
                    claude.messages.create(model=server.model, max_tokens=1, messages=MESSAGES)
                assert caught.value.body["error"]["type"] == "overloaded_error"
            ends = [choice.finish_reason for chunk in stream for choice in chunk.choices]
            assert ends[-1] == "length", "what was under way is finished"
        assert server.wait() == 0
