"""Loaded by Schemathesis: counts what each operation answered to good data and to bad, and lends it ids that exist.

A response's id is known once the server has made it. Where good data needs one, a response that is there stands in for
the id that was made up; what is asked besides stays as it was.
"""

import atexit
import collections
import json
import os

import requests
import schemathesis

COUNTS = collections.Counter()
URL, KEY = os.environ["FOLIO_URL"], os.environ["FOLIO_KEY"]
KEPT = "/v1/responses/{"
HEADERS = {"authorization": f"Bearer {KEY}"}


def a_response():
    """One that the server keeps, made for the purpose."""
    body = {"input": "a", "max_output_tokens": 1}
    answer = requests.post(URL + "/v1/responses", json=body, headers=HEADERS, timeout=60)
    return answer.json()["id"]


def an_item(response):
    """Of its input."""
    answer = requests.get(f"{URL}/v1/responses/{response}/input_items", headers=HEADERS, timeout=60)
    return answer.json()["data"][0]["id"]


@schemathesis.hook
def before_call(context, case, kwargs):
    if case.operation.path.startswith(KEPT) and is_positive(case):
        response = a_response()
        case.path_parameters = {name: response for name in case.path_parameters}
        if case.query and "after" in case.query:
            case.query["after"] = an_item(response)
    follows = isinstance(case.body, dict) and isinstance(case.body.get("previous_response_id"), str)
    if follows and is_positive(case):
        case.body["previous_response_id"] = a_response()


@schemathesis.hook
def after_call(context, case, response):
    mode = "positive" if is_positive(case) else "negative"
    COUNTS[case.operation.label, mode, response.status_code] += 1


def is_positive(case):
    return case.meta is not None and case.meta.generation.mode.is_positive and case.method == case.operation.method.upper()


@atexit.register
def write():
    rows = [[*what, count] for what, count in sorted(COUNTS.items())]
    with open(os.environ["FOLIO_SCHEMA_COUNTS"], "w") as file:
        json.dump(rows, file)
