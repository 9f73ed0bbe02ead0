//! All that a refusal may say. A text that is not here must not be in an answer: it might be
//! another program's words, or the client's own.

/// `#` stands for a number.
const TEXTS: &[&str] = &[
    // Values.
    "must be true or false",
    "must be a 64-bit integer",
    "must be an integer from # to #",
    "must be a number from # to #",
    "must be a number above # and at most #",
    "must be a string",
    "must have at least # characters",
    "must have # to # characters",
    "must be a string of 1 to # visible ASCII characters",
    "must be an array",
    "must be an array of # to #",
    "must be an object",
    "must be an object of token ids and numbers",
    "must have at most # tokens",
    "must have keys that are token ids below #",
    "must be an object of strings, numbers, booleans and nulls",
    "must have at most # fields",
    "must have at most # bytes",
    "must have only strings, numbers, booleans and nulls as values",
    "must not set: messages, tools, documents, add_generation_prompt, continue_final_message, tokenize, chat_template, strftime_now",
    "must be a string or an array of token ids",
    "must be at most # strings or arrays of token ids",
    "must have at most # tokens together",
    "must be -1 or at least 1",
    "must equal n: answers are not ranked",
    "must be one of: user, assistant, system, developer",
    "must be one of: user, assistant",
    "must be one of: text",
    "must be one of: message",
    "must be one of: input_text, output_text",
    "must be one of: auto, none",
    "must be one of: message.output_text.logprobs, reasoning.encrypted_content",
    "must be an object of at most 16 strings of up to 512 characters, with keys of up to 64",
    // Fields.
    "this field is required",
    "unknown field",
    "needs stream to be true",
    "needs logprobs to be true",
    "needs include to name message.output_text.logprobs",
    "needs add_generation_prompt to be false",
    "0 needs echo to be true",
    "constrained output is not supported",
    "constrained output is not supported: only text",
    "fill-in-the-middle is not supported",
    "prompts are strings or token ids",
    "beam search is not supported",
    "must be true",
    "use return_token_ids",
    "this extension is not supported",
    "tools are not supported",
    "answers are text only",
    "only text is supported",
    "this is not supported",
    "documents are not supported",
    "annotations are not supported",
    "prefix caching is automatic",
    "use chat_template_kwargs for the options of the model's template",
    "this setting is not supported",
    "chat completions are not stored; see /v1/responses",
    "chat completions are not stored, so metadata would be lost",
    "only /v1/completions can echo its prompt",
    "the chat template writes all special tokens",
    "the template is the model's and cannot be set by a request",
    "there is only one service tier: auto",
    "reasoning is not separated from answers",
    "a conversation that does not fit the context is refused: disabled",
    "background responses are not supported",
    "use previous_response_id",
    "use previous_response_id, or input",
    "stored prompts are not supported",
    "conversations are not edited",
    "phases are not supported",
    "must be one of: user, assistant, system",
    "must be one of: ephemeral",
    "must be one of: 5m, 1h",
    "must be one of: float, base64",
    "must be one of: mean, last",
    "must be one of: desc, asc",
    "the input has # tokens, but at most # fit",
    "citations are not supported",
    "MCP servers are not supported",
    "containers are not supported",
    "the server cannot choose a region",
    "reasoning is not separated from answers: disabled",
    "constrained output and effort levels are not supported",
    "conversations are not edited",
    "there is only one speed: standard",
    "users and workspaces are not supported, only API keys",
    "a stored response cannot be streamed",
    "must be an item of this response's input",
    // The request as a whole.
    "# answers requested, but at most # can run at once",
    "# tokens, but this model's context has room for #",
    "is #, but must be at most max_tokens, which is #",
    "must have at least one token",
    "the model's chat template refuses this conversation",
    "the model's chat template changes the last message",
    "this text cannot be tokenized",
    "the body nests deeper than # levels",
    "the body has more than # values",
    "# log-probabilities of prompt tokens, but an answer may have at most #",
    "is # long, but must be at most # sequences",
    "the body must be a JSON object",
    "the body is not valid JSON at line #, column #",
    "the body has a JSON object with a duplicate key",
    "the body is incomplete",
    "the request's body is larger than # bytes",
    "the request's body must be JSON, with content-type application/json",
    "the API key is missing or wrong",
    "the model does not exist; see /v1/models",
    "the route does not exist",
    "the response does not exist or is no longer stored",
    "this route does not support the method",
    "only one Host header is allowed",
    "the Host must be a host name or an address, with or without a port",
    "the request needs a Host header",
    "the Host header and the request's target name different hosts",
    "the origin is not allowed; see --allowed-origins",
];

/// Whether a refusal's message is one of ours, alone or after a field's name.
pub fn holds(message: &str) -> bool {
    let is_path = |path: &str| path.chars().all(|c| c.is_ascii_alphanumeric() || "_-.[]()".contains(c));
    let after_field = message.split_once(": ").filter(|(path, _)| is_path(path)).map(|(_, text)| text);
    TEXTS.iter().any(|text| fits(text, message) || after_field.is_some_and(|message| fits(text, message)))
}

fn fits(text: &str, message: &str) -> bool {
    let Some((before, after)) = text.split_once('#') else { return text == message };
    let Some(rest) = message.strip_prefix(before) else { return false };
    let number = rest.chars().take_while(|c| c.is_ascii_digit() || "-.e".contains(*c)).count();
    number > 0 && (1..=number).rev().any(|number| fits(after, &rest[number..]))
}

/// Text that must be in no answer at all: addresses in memory, files of this or any other program,
/// dumps of values.
pub fn leak_in(body: &str) -> Option<&'static str> {
    let has_address = body.match_indices("0x").any(|(at, _)| {
        let digits = body[at + 2..].bytes().take_while(|byte| byte.is_ascii_hexdigit()).count();
        digits >= 6
    });
    let telling = [
        ".rs:",
        "src/",
        "/root",
        "/home",
        "/usr",
        "/tmp",
        "/proc",
        "/etc",
        "panicked",
        "RUST_BACKTRACE",
        "Some(",
        "None)",
        "Err(",
        "Ok(",
        "unwrap",
        "serde",
        "minijinja",
        "hyper",
        "axum",
        "tokio",
        "invalid type",
        "expected value",
        "\\u0000",
    ];
    if has_address { Some("an address") } else { telling.into_iter().find(|word| body.contains(word)) }
}

#[test]
fn the_catalogue_knows_its_own() {
    for fine in [
        "top_p: must be a number above 0 and at most 1",
        "messages[0].content[1].type: must be one of: text",
        "the body is not valid JSON at line 2, column 17",
        "(unreadable): unknown field",
        "min_tokens: is 9, but must be at most max_tokens, which is 8",
    ] {
        assert!(holds(fine), "{fine}");
    }
    for other in [
        "invalid type: string \"x\", expected u32 at line 1 column 5",
        "top_p: must be a number above x and at most 1",
        "a b: unknown field",
        "the body is not valid JSON at line 2, column 17: EOF",
        "",
    ] {
        assert!(!holds(other), "{other}");
    }
    assert!(leak_in("at 0x7fff1234").is_some() && leak_in("0x12, 0xyz").is_none());
}
