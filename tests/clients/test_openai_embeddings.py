"""OpenAI's client, /v1/embeddings and /v1/models; and the routes that no client library knows."""

import base64
import json
import math
import struct

import openai
import pytest

TEXTS = ["a vector of bytes", "a hash map", "an iterator over characters"]


def embed(client, server, texts, **more):
    answer = client.embeddings.create(model=server.model, input=texts, **more)
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    return [entry.embedding for entry in answer.data]


def test_both_encodings_say_the_same(client, server):
    numbers = embed(client, server, TEXTS, encoding_format="float")
    encoded = embed(client, server, TEXTS, encoding_format="base64")
    for vector, text in zip(numbers, encoded):
        data = base64.b64decode(text)
        told = struct.unpack(f"<{len(data) // 4}f", data)
        # Written as decimal numbers and read again, 32-bit numbers are what they were.
        assert list(told) == [struct.unpack("<f", struct.pack("<f", value))[0] for value in vector]
    # Unless told otherwise the client asks for base64, and decodes it.
    assert embed(client, server, TEXTS) == [pytest.approx(vector) for vector in numbers]


def test_a_batch_is_each_alone_and_of_length_one(client, server):
    vectors = embed(client, server, TEXTS)
    assert vectors == [embed(client, server, text)[0] for text in TEXTS]
    assert len({tuple(vector) for vector in vectors}) == 3 and len({len(vector) for vector in vectors}) == 1
    assert all(math.isclose(sum(value * value for value in vector), 1, rel_tol=1e-5) for vector in vectors)


def test_tokens_are_as_good_as_text(client, server):
    bodies = (json.dumps({"prompt": text}).encode() for text in TEXTS)
    tokens = [json.loads(server.get("/tokenize", body))["tokens"] for body in bodies]
    assert embed(client, server, tokens) == embed(client, server, TEXTS)
    answer = client.embeddings.create(model=server.model, input=tokens)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))


def test_models_are_listed_and_found(client, server):
    names = [model.id for model in client.models.list()]
    assert server.model in names
    model = client.models.retrieve(server.model)
    assert (model.id, model.object) == (server.model, "model") and model.created > 0
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-17")


def test_text_survives_tokens(server):
    text = "let café = \"naïve 🦀\";\n"
    tokens = json.loads(server.get("/tokenize", json.dumps({"prompt": text}).encode()))["tokens"]
    body = json.dumps({"tokens": tokens}).encode()
    assert json.loads(server.get("/detokenize", body))["prompt"] == text


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/server_info", "/v1/loads", "/openapi.json"])
def test_what_operators_ask_is_json(server, path):
    assert isinstance(json.loads(server.get(path)), dict)


def test_metrics_are_there(server):
    assert b"vllm:num_requests_running" in server.get("/metrics")
