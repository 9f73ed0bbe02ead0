//! Good answers, field by field. Nothing may stand in one that does not stand here.

use serde_json::{Map, Value, json};

use super::schema::{
    count, either, empty_list, flag, id, list, map_of, named, null, number, object, one_of, open_object, or_null,
    share, text, word,
};

pub fn schemas() -> Map<String, Value> {
    let mut schemas = Map::new();
    let parts = [events(), completions(), responses(), messages(), embeddings(), tokens(), models(), info(), loads()];
    for (name, schema) in parts.into_iter().flatten() {
        assert!(schemas.insert(name.to_owned(), schema).is_none(), "one schema is called {name}");
    }
    schemas
}

type Named = Vec<(&'static str, Value)>;

/// Each event of a stream, in the form that clients of such streams see.
fn events() -> Named {
    let data =
        json!({"type": "string", "contentMediaType": "application/json", "pattern": r"^(\{[\s\S]*\}|\[DONE\])$"});
    vec![(
        "ServerSentEvent",
        object([("data", data)], [("event", json!({"type": "string", "pattern": r"^[a-z_.]+$"}))]),
    )]
}

fn completions() -> Named {
    let token_ids = || list(count());
    let stop_reason = || or_null(either(text(), count()));
    let logprob = || object([("token", text()), ("logprob", number()), ("bytes", list(byte()))], []);
    let entry = object(
        [
            ("token", text()),
            ("logprob", number()),
            ("bytes", list(byte())),
            ("top_logprobs", list(named("TokenLogprob"))),
        ],
        [],
    );
    let entry_of_prompt = object([("logprob", number()), ("rank", count()), ("decoded_token", text())], []);
    let prompt_logprobs = list(or_null(map_of(entry_of_prompt)));
    let message = object([("role", word("assistant")), ("content", text()), ("refusal", null())], []);
    let chat_choice = object(
        [
            ("index", count()),
            ("message", message),
            ("logprobs", or_null(object([("content", list(named("TokenEntry")))], []))),
            ("finish_reason", one_of(&["stop", "length"])),
            ("stop_reason", stop_reason()),
        ],
        [("token_ids", token_ids())],
    );
    let table = object(
        [
            ("tokens", list(text())),
            ("token_logprobs", list(or_null(number()))),
            ("top_logprobs", list(or_null(map_of(number())))),
            ("text_offset", list(count())),
        ],
        [],
    );
    let choice = object(
        [
            ("index", count()),
            ("text", text()),
            ("logprobs", or_null(table)),
            ("finish_reason", one_of(&["stop", "length"])),
            ("stop_reason", stop_reason()),
        ],
        [("token_ids", token_ids()), ("prompt_token_ids", token_ids()), ("prompt_logprobs", named("PromptLogprobs"))],
    );
    let envelope = |prefix: &str, kind: &str, choice: Value| {
        let choices = json!({"type": "array", "items": choice, "minItems": 1});
        object(
            [
                ("id", id(prefix)),
                ("object", word(kind)),
                ("created", count()),
                ("model", text()),
                ("choices", choices),
                ("usage", named("Usage")),
            ],
            [("prompt_token_ids", token_ids()), ("prompt_logprobs", named("PromptLogprobs"))],
        )
    };
    vec![
        ("TokenLogprob", logprob()),
        ("TokenEntry", entry),
        ("PromptLogprobs", prompt_logprobs),
        ("Usage", usage()),
        ("ChatCompletion", envelope("chatcmpl-", "chat.completion", chat_choice)),
        ("Completion", envelope("cmpl-", "text_completion", choice)),
    ]
}

fn byte() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": 255})
}

fn usage() -> Value {
    let details = ["reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"];
    object(
        [
            ("prompt_tokens", count()),
            ("completion_tokens", count()),
            ("total_tokens", count()),
            ("prompt_tokens_details", object([("cached_tokens", count())], [])),
            ("completion_tokens_details", object(details.map(|name| (name, count())), [])),
        ],
        [],
    )
}

fn responses() -> Named {
    let statuses = ["completed", "incomplete"];
    let output_text = object(
        [
            ("type", word("output_text")),
            ("text", text()),
            ("annotations", empty_list()),
            ("logprobs", list(named("TokenEntry"))),
        ],
        [],
    );
    let output = object(
        [
            ("id", id("msg_")),
            ("type", word("message")),
            ("status", one_of(&statuses)),
            ("role", word("assistant")),
            ("content", list(output_text)),
        ],
        [],
    );
    let usage = object(
        [
            ("input_tokens", count()),
            ("input_tokens_details", object([("cached_tokens", count()), ("cache_write_tokens", count())], [])),
            ("output_tokens", count()),
            ("output_tokens_details", object([("reasoning_tokens", count())], [])),
            ("total_tokens", count()),
        ],
        [],
    );
    let response = object(
        [
            ("id", id("resp_")),
            ("object", word("response")),
            ("created_at", count()),
            ("completed_at", or_null(count())),
            ("status", one_of(&statuses)),
            ("background", json!({"const": false})),
            ("error", null()),
            ("incomplete_details", or_null(object([("reason", word("max_output_tokens"))], []))),
            ("instructions", or_null(text())),
            ("max_output_tokens", or_null(count())),
            ("max_tool_calls", null()),
            ("model", text()),
            ("output", list(output)),
            ("parallel_tool_calls", flag()),
            ("previous_response_id", or_null(text())),
            ("prompt_cache_key", or_null(text())),
            ("reasoning", object([("effort", null()), ("summary", null())], [])),
            ("safety_identifier", or_null(text())),
            ("service_tier", word("default")),
            ("store", flag()),
            ("temperature", number()),
            ("text", object([("format", object([("type", word("text"))], [])), ("verbosity", word("medium"))], [])),
            ("tool_choice", one_of(&["auto", "none"])),
            ("tools", empty_list()),
            ("top_logprobs", count()),
            ("top_p", number()),
            ("truncation", word("disabled")),
            ("usage", usage),
            ("user", or_null(text())),
            ("metadata", map_of(text())),
        ],
        [],
    );
    let part =
        object([("type", one_of(&["input_text", "output_text"])), ("text", text())], [("annotations", empty_list())]);
    let item = object(
        [
            ("id", text()),
            ("type", word("message")),
            ("status", word("completed")),
            ("role", one_of(&["user", "assistant", "system", "developer"])),
            ("content", list(part)),
        ],
        [],
    );
    let items = object(
        [
            ("object", word("list")),
            ("data", list(item)),
            ("has_more", flag()),
            ("first_id", or_null(text())),
            ("last_id", or_null(text())),
        ],
        [],
    );
    let deleted = object([("id", text()), ("object", word("response")), ("deleted", json!({"const": true}))], []);
    vec![("Response", response), ("InputItems", items), ("DeletedResponse", deleted)]
}

fn messages() -> Named {
    let block = object([("type", word("text")), ("text", text())], []);
    let usage = object(
        [
            ("input_tokens", count()),
            ("cache_creation_input_tokens", count()),
            ("cache_read_input_tokens", count()),
            ("output_tokens", count()),
        ],
        [],
    );
    let message = object(
        [
            ("id", id("msg_")),
            ("type", word("message")),
            ("role", word("assistant")),
            ("model", text()),
            ("content", list(block)),
            ("stop_reason", one_of(&["end_turn", "max_tokens", "stop_sequence"])),
            ("stop_sequence", or_null(text())),
            ("usage", usage),
        ],
        [],
    );
    vec![("Message", message), ("MessageCount", object([("input_tokens", count())], []))]
}

fn embeddings() -> Named {
    let base64 = json!({"type": "string", "contentEncoding": "base64"});
    let vector =
        object([("object", word("embedding")), ("index", count()), ("embedding", either(list(number()), base64))], []);
    let answer = object(
        [
            ("object", word("list")),
            ("data", list(vector)),
            ("model", text()),
            ("usage", object([("prompt_tokens", count()), ("total_tokens", count())], [])),
        ],
        [],
    );
    vec![("Embeddings", answer)]
}

fn tokens() -> Named {
    let tokenized = object(
        [
            ("count", count()),
            ("max_model_len", count()),
            ("tokens", list(count())),
            ("token_strs", or_null(list(text()))),
        ],
        [],
    );
    vec![("Tokenized", tokenized), ("Detokenized", object([("prompt", text())], []))]
}

fn models() -> Named {
    let model = object(
        [
            ("id", text()),
            ("object", word("model")),
            ("created", count()),
            ("owned_by", word("folio")),
            ("root", text()),
            ("parent", null()),
            ("max_model_len", count()),
        ],
        [],
    );
    vec![("Model", model), ("Models", object([("object", word("list")), ("data", list(named("Model")))], []))]
}

fn info() -> Named {
    let server = open_object([
        ("model_id", text()),
        ("served_model_name", text()),
        ("model_names", list(text())),
        ("model_path", text()),
        ("tokenizer_path", text()),
        ("is_generation", flag()),
        ("is_embedding", flag()),
        ("max_model_len", count()),
        ("context_length", count()),
        ("max_num_seqs", count()),
        ("max_running_requests", count()),
        ("max_num_reqs", count()),
        ("num_kv_blocks", count()),
        ("block_size", count()),
        ("max_total_tokens", count()),
        ("dp_size", count()),
        ("vocab_size", count()),
        ("version", text()),
        ("started", count()),
    ]);
    let model = object(
        [
            ("model_path", text()),
            ("tokenizer_path", text()),
            ("served_model_name", text()),
            ("is_generation", flag()),
            ("is_embedding", flag()),
            ("model_type", or_null(text())),
            ("architectures", or_null(list(text()))),
            ("dtype", or_null(text())),
            ("max_model_len", count()),
            ("preferred_sampling_params", null()),
            ("weight_version", text()),
        ],
        [],
    );
    let version = object([("version", text())], []);
    vec![("ServerInfo", server), ("ModelInfo", model), ("Version", version)]
}

fn loads() -> Named {
    let figures = || {
        [
            ("dp_rank", count()),
            ("num_running_reqs", count()),
            ("num_waiting_reqs", count()),
            ("num_total_reqs", count()),
            ("num_used_tokens", count()),
            ("num_total_tokens", count()),
            ("max_total_num_tokens", count()),
            ("token_usage", share()),
            ("cache_hit_rate", share()),
        ]
    };
    let one = object(figures(), [("max_running_requests", count()), ("utilization", number())]);
    let loads = object(
        [
            ("timestamp", text()),
            ("version", text()),
            ("dp_rank_count", count()),
            ("loads", list(one)),
            ("aggregate", object(figures(), [])),
        ],
        [],
    );
    let old = object(
        [("dp_rank", count()), ("num_reqs", count()), ("num_waiting_reqs", count()), ("num_tokens", count())],
        [],
    );
    let load = object([("server_load", count())], []);
    vec![("Loads", loads), ("OldLoads", list(old)), ("ServerLoad", load)]
}
