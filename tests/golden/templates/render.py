"""Renders real chat templates with transformers and records what came out.

Usage: python tests/golden/templates/render.py PATH_TO_LLAMA_CPP [OUTPUT [FOLDER_FOR_THE_TEXTS]]

Without arguments the path is taken from FOLIO_LLAMA_CPP. The templates are third-party text and are not committed:
they are read from models/templates/*.jinja of the llama.cpp sources inside llama-cpp-python's source package. What is
committed is expected.json.lzma beside this script: the cases, and for every template and case the FNV-1a 64 hash and the
length in bytes of the rendered text, or null where transformers raised. The Rust test (crates/text/tests/templates.rs)
renders the same cases and compares.
"""

import datetime as real_datetime
import json
import lzma
import os
import pathlib
import sys

import jinja2
import transformers
from transformers.utils import chat_template_utils

NOW = real_datetime.datetime(2026, 3, 5, 7, 8, 9)


class FixedDatetime(real_datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


chat_template_utils.datetime = FixedDatetime

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather for a place & time, e.g. \"Zürich\" <now>.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "where": {
                    "type": "object",
                    "properties": {"lat": {"type": "number"}, "lon": {"type": ["number", "null"]}},
                    "required": ["lat"],
                },
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city", "unit"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tell the time.\nIn any zone.",
        "parameters": {"type": "object", "properties": {}},
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number", "description": "first"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
        "return": {"type": "number", "description": "the sum"},
    },
}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def call(name, arguments, call_id="call12345"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


ODD_ARGUMENTS = {
    "city": "São Paulo \"quoted\" 'single' \\ <b>&</b>",
    "days": 3,
    "exact": 1.0,
    "tiny": 1e-7,
    "huge": 1.5e22,
    "big": 12345678901234567890,
    "yes": True,
    "nothing": None,
    "where": {"lat": -23.55, "lon": None, "deep": [1, [2.5, "x"], {}]},
    "tags": ["a", "日本", ""],
}

TOOL_TURNS = [
    user("What is the weather in Paris?"),
    assistant("", tool_calls=[call("get_weather", {"city": "Paris", "unit": "celsius"})]),
    {"role": "tool", "name": "get_weather", "tool_call_id": "call12345", "content": "{\"temperature\": 21.5}"},
]

CASES = {
    "user": {"messages": [user("Hello, who are you?")]},
    "user_no_prompt": {"messages": [user("Hello, who are you?")], "add_generation_prompt": False},
    "system": {"messages": [system("You are terse."), user("Hi")]},
    "turns": {
        "messages": [
            system("  You are helpful.\n"),
            user(" Name a colour. "),
            assistant("  Blue.\n"),
            user("Another?\n\nPlease."),
        ]
    },
    "turns_closed": {
        "messages": [user("Name a colour."), assistant("Blue."), user("Another?"), assistant("Red.")],
        "add_generation_prompt": False,
    },
    "non_ascii": {
        "messages": [
            system("Réponds en français. 你好 <|im_start|> {{ x }}"),
            user("naïve café ☕ — “quotes” 👩‍👩‍👧‍👦 \u200bשלום e\u0301 \\n \t tab"),
            assistant("Ça va 🎉"),
            user("日本語は？\r\nещё"),
        ]
    },
    "empty": {"messages": [user("")]},
    "parts": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
            {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two ü"}]},
        ]
    },
    "tools": {"messages": [system("Use tools."), user("Weather?")], "tools": [WEATHER, CLOCK]},
    "tools_no_system": {"messages": [user("Weather in Zürich?")], "tools": [WEATHER]},
    "tools_simple": {
        "messages": [
            system("Add."),
            user("1+2"),
            assistant("", tool_calls=[call("add", {"a": 1.5, "b": 2})]),
            {"role": "tool", "name": "add", "tool_call_id": "call12345", "content": "3.5"},
            assistant("3.5"),
            user("ok"),
        ],
        "tools": [ADD],
        "extra": {"functions": [ADD], "datetime": "2025-01-01"},
    },
    "tool_result": {"messages": TOOL_TURNS, "tools": [WEATHER, CLOCK]},
    "tool_result_then_answer": {
        "messages": [*TOOL_TURNS, assistant("It is 21.5 °C."), user("Thanks")],
        "tools": [WEATHER],
    },
    "tool_null_content": {
        "messages": [
            user("Time?"),
            assistant(None, tool_calls=[call("clock", {})]),
            {"role": "tool", "name": "clock", "tool_call_id": "call12345", "content": "noon"},
        ],
        "tools": [CLOCK],
    },
    "tool_string_arguments": {
        "messages": [
            user("Weather?"),
            assistant("", tool_calls=[call("get_weather", json.dumps({"city": "Köln", "days": 2}, ensure_ascii=False))]),
            {"role": "tool", "name": "get_weather", "tool_call_id": "call12345", "content": "rain"},
        ],
        "tools": [WEATHER],
    },
    "tool_odd_arguments": {
        "messages": [
            system("Use tools."),
            user("Odd"),
            assistant("Let me see.", tool_calls=[call("get_weather", ODD_ARGUMENTS)]),
            {"role": "tool", "name": "get_weather", "tool_call_id": "call12345", "content": "ok ✓"},
        ],
        "tools": [WEATHER],
    },
    "tool_parallel": {
        "messages": [
            user("Both"),
            assistant(
                "",
                tool_calls=[
                    call("get_weather", {"city": "Oslo"}, "abcdefgh1"),
                    call("clock", {}, "abcdefgh2"),
                ],
            ),
            {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefgh1", "content": "snow"},
            {"role": "tool", "name": "clock", "tool_call_id": "abcdefgh2", "content": "noon"},
        ],
        "tools": [WEATHER, CLOCK],
    },
    "reasoning": {
        "messages": [
            user("2+2?"),
            assistant("4", reasoning_content="Two and two.\nFour."),
            user("3+3?"),
        ]
    },
    "reasoning_alias": {
        "messages": [user("2+2?"), assistant("4", reasoning="Add."), user("3+3?"), assistant("6", thinking="Sum.")],
        "add_generation_prompt": False,
    },
    "reasoning_tools": {
        "messages": [
            user("Weather?"),
            assistant("", reasoning_content="I need the tool.", tool_calls=[call("get_weather", {"city": "Rome"})]),
            {"role": "tool", "name": "get_weather", "tool_call_id": "call12345", "content": "sun"},
        ],
        "tools": [WEATHER],
    },
    "think_tag": {
        "messages": [user("2+2?"), assistant("<think>\nhm\n</think>\n\n4"), user("3+3?")],
    },
    "thinking_off": {"messages": [user("Hi")], "extra": {"enable_thinking": False, "thinking": False}},
    "thinking_on": {
        "messages": [system("S"), user("Hi")],
        "extra": {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
    },
    "developer": {"messages": [{"role": "developer", "content": "Dev rules."}, user("Hi")]},
    "bad_order": {"messages": [assistant("I start."), assistant("Again."), user("Oh")]},
    "date": {"messages": [user("What day is it?")], "extra": {"date_string": "01 Feb 2025"}},
}


def fnv1a(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def digest(text):
    data = text.encode("utf-8", errors="surrogatepass")
    return f"{fnv1a(data):016x}:{len(data)}"


def render(source, case):
    rendered, _ = chat_template_utils.render_jinja_template(
        [json.loads(json.dumps(case["messages"]))],
        tools=case.get("tools"),
        chat_template=source,
        add_generation_prompt=case.get("add_generation_prompt", True),
        **SPECIAL,
        **case.get("extra", {}),
    )
    return rendered[0]


def main():
    sources = sys.argv[1] if len(sys.argv) > 1 else os.environ["FOLIO_LLAMA_CPP"]
    folder = pathlib.Path(sources) / "models" / "templates"
    output = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else pathlib.Path(__file__).with_name("expected.json.lzma")
    texts = pathlib.Path(sys.argv[3]) if len(sys.argv) > 3 else None
    names = list(CASES)
    templates = {}
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_bytes().decode()
        results = []
        for name in names:
            try:
                text = render(source, CASES[name])
            except Exception as error:
                results.append(None)
                text = f"RAISED {type(error).__name__}: {error}"
            else:
                results.append(digest(text))
            if texts:
                texts.mkdir(parents=True, exist_ok=True)
                (texts / f"{path.stem}.{name}.txt").write_bytes(text.encode())
        templates[path.name] = {"source": digest(source), "results": results}
        ok = sum(result is not None for result in results)
        print(f"{path.name}: {ok} of {len(results)} rendered")
    head = {
        "made_by": "tests/golden/templates/render.py",
        "transformers": transformers.__version__,
        "jinja2": jinja2.__version__,
        "now": NOW.isoformat(),
        "special_tokens": SPECIAL,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    lines.append('"cases": {')
    lines += [f"{json.dumps(n)}: {json.dumps(c, ensure_ascii=False)}{',' * (n != names[-1])}" for n, c in CASES.items()]
    lines.append('},\n"templates": {')
    last = list(templates)[-1]
    lines += [f"{json.dumps(n)}: {json.dumps(t)}{',' * (n != last)}" for n, t in templates.items()]
    text = "{\n" + "\n".join(lines) + "\n}}\n"
    output.write_bytes(lzma.compress(text.encode(), lzma.FORMAT_ALONE, preset=9 | lzma.PRESET_EXTREME))


main()
