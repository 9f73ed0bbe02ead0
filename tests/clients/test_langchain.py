"""LangChain's OpenAI classes, as they come."""

import asyncio

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

from asking import NUM_TOKENS, QUESTION, QUESTIONS, chat, complete


@pytest.fixture(scope="module")
def options(server):
    return {"model": server.model, "base_url": server.url + "/v1", "api_key": server.key, "max_retries": 0}


@pytest.fixture(scope="module")
def llm(options):
    return ChatOpenAI(temperature=0, max_tokens=NUM_TOKENS, **options)


def test_invoke_stream_and_batch(llm, client, server):
    said = chat(client, server).choices[0].message.content
    answer = llm.invoke(QUESTION)
    assert answer.content == said and answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in llm.stream(QUESTION)) == said
    questions = QUESTIONS[:8]
    expected = [llm.invoke(question).content for question in questions]
    assert [answer.content for answer in llm.batch(questions)] == expected
    assert [answer.content for answer in asyncio.run(llm.abatch(questions))] == expected


def test_conversations_and_chains(llm, client, server):
    said = [SystemMessage("Answer in one line."), HumanMessage("Hi"), AIMessage("Hello."), HumanMessage(QUESTION)]
    roles = {"system": "system", "human": "user", "ai": "assistant"}
    messages = [{"role": roles[message.type], "content": message.content} for message in said]
    expected = chat(client, server, messages=messages).choices[0].message.content
    assert llm.invoke(said).content == expected
    stopped = llm.bind(stop=[expected[4:8]]).invoke(said)
    assert stopped.content == expected[: expected.index(expected[4:8])]


def test_the_responses_api(options, client, server):
    llm = ChatOpenAI(temperature=0, max_tokens=NUM_TOKENS, use_responses_api=True, **options)
    assert llm.invoke(QUESTION).text == chat(client, server).choices[0].message.content
    assert "".join(chunk.text for chunk in llm.stream(QUESTION)) == llm.invoke(QUESTION).text


def test_plain_completions(options, client, server):
    llm = OpenAI(temperature=0, max_tokens=NUM_TOKENS, **options)
    expected = complete(client, server, "fn main() {").choices[0].text
    assert llm.invoke("fn main() {") == expected
    assert "".join(llm.stream("fn main() {")) == expected


def test_embeddings(options, client, server):
    # Without this, LangChain cuts texts into another model's tokens, whose ids mean nothing here.
    embeddings = OpenAIEmbeddings(check_embedding_ctx_length=False, **options)
    texts = ["a vector", "a map", "a set"]
    expected = [entry.embedding for entry in client.embeddings.create(model=server.model, input=texts).data]
    assert embeddings.embed_documents(texts) == [pytest.approx(vector) for vector in expected]
    assert embeddings.embed_query("a map") == pytest.approx(expected[1])
