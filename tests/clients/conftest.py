"""A server for all tests, and a client of each kind."""

import anthropic
import openai
import pytest

import serving
from asking import FEW_TOKENS, QUESTIONS, anthropic_options, chat, openai_options


@pytest.fixture(scope="session")
def server():
    with serving.shared() as server:
        yield server


@pytest.fixture(scope="session")
def client(server):
    with openai.OpenAI(**openai_options(server)) as client:
        yield client


@pytest.fixture(scope="session")
def claude(server):
    with anthropic.Anthropic(**anthropic_options(server)) as client:
        yield client


@pytest.fixture(scope="session")
def alone(client, server):
    """What each question is answered when nothing else is asked: whoever asks it beside others must hear the same."""

    def answer(question):
        messages = [{"role": "user", "content": question}]
        return chat(client, server, messages=messages, max_completion_tokens=FEW_TOKENS).choices[0].message.content

    answers = [answer(question) for question in QUESTIONS]
    assert len(answers) == 64 and len(set(answers)) > 16, "so different that a mix-up is seen"
    return answers
