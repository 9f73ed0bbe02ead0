"""What the tests ask, and how they read streams."""

QUESTION = "What does `Rc::clone` do?"
MESSAGES = [{"role": "user", "content": QUESTION}]
# Enough for a text with several words in it, and quick.
NUM_TOKENS = 24
# For what is asked 64 times.
FEW_TOKENS = 12

# Different enough that an answer given to the wrong one of them is seen.
TYPES = ["Rc", "Arc", "Box", "Vec", "String", "Option", "Result", "HashMap"]
VERBS = ["clone", "drop", "share", "borrow", "grow", "print", "compare", "iterate over"]
QUESTIONS = [f"How do I {verb} a {name}?" for verb in VERBS for name in TYPES]


def openai_options(server, **more):
    return {"base_url": server.url + "/v1", "api_key": server.key, "max_retries": 0, "timeout": 60, **more}


def anthropic_options(server, **more):
    return {"base_url": server.url, "api_key": server.key, "max_retries": 0, "timeout": 60, **more}


def cut(text):
    """A text in the midst of an answer and what comes before it: with it as a stop, the answer ends before it is too long."""
    stop = text[len(text) // 2 :][:6]
    return text[: text.index(stop)], stop


def chat(client, server, **more):
    """One chat completion, always the likeliest tokens unless told otherwise."""
    options = {"messages": MESSAGES, "temperature": 0, "max_completion_tokens": NUM_TOKENS, **more}
    return client.chat.completions.create(model=server.model, **options)


def complete(client, server, prompt, **more):
    options = {"temperature": 0, "max_tokens": NUM_TOKENS, **more}
    return client.completions.create(model=server.model, prompt=prompt, **options)


def texts_of_chunks(chunks, count=1):
    """The text of each choice of a streamed chat."""
    texts = [""] * count
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    return texts


def endless(server):
    """A request that would stream for as long as the context lasts."""
    return {
        "model": server.model,
        "messages": MESSAGES,
        "stream": True,
        "n": 8,
        "temperature": 1,
        "extra_body": {"ignore_eos": True},
    }
