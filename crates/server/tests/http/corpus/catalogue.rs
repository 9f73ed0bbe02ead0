//! All that a refusal may say. A text that is not here must not be in an answer: it might be another program's words, or
//! the client's own.

/// `#` stands for a number.
const TEXTS: &[&str] = &[
    // Of values.
    "must be true or false",
    "must be a whole number of 64 bits",
    "must be a whole number from # to #",
    "must be a number from # to #",
    "must be a number above # and at most #",
    "must be a text",
    "must have at least # characters",
    "must have # to # characters",
    "must be a text of 1 to # visible ASCII characters",
    "must be a list",
    "must be a list of # to #",
    "must be an object",
    "must be an object of token ids and numbers",
    "must name at most # tokens",
    "must name tokens by ids below #",
    "must be an object of plain values",
    "must have at most # fields",
    "must have at most # bytes",
    "must hold texts, numbers, true, false and null alone",
    "must not set: messages, tools, documents, add_generation_prompt, continue_final_message, tokenize, chat_template, strftime_now",
    "must be a text or a list of token ids",
    "must be at most # texts or lists of token ids",
    "must have at most # tokens together",
    "must be -1 or at least 1",
    "must be n: answers are not ranked",
    "must be one of: user, assistant, system, developer",
    "must be one of: user, assistant",
    "must be one of: text",
    "must be one of: message",
    "must be one of: input_text, output_text",
    "must be one of: auto, none",
    "must be one of: message.output_text.logprobs, reasoning.encrypted_content",
    "must be an object of at most 16 texts of up to 512 characters, with names of up to 64",
    // Of fields.
    "this field is required",
    "this field is not known here",
    "needs stream to be true",
    "needs logprobs to be true",
    "needs include to name message.output_text.logprobs",
    "needs add_generation_prompt to be false",
    "0 needs echo to be true",
    "constrained output is not supported",
    "constrained output is not supported: text alone",
    "completing the middle of a text is not supported",
    "prompts are texts or token ids",
    "beam search is not supported",
    "must be true",
    "use return_token_ids",
    "this extension is not supported",
    "tools are not supported",
    "answers are text alone",
    "only text is supported",
    "this is not supported",
    "documents are not supported",
    "annotations are not supported",
    "the cache finds common beginnings by itself",
    "use chat_template_kwargs for what the model's template offers",
    "this model has no such setting",
    "chat completions are not stored; see /v1/responses",
    "chat completions are not stored, so there is nothing to label",
    "only /v1/completions repeats its prompt",
    "the chat template writes all special tokens",
    "a template comes with the model, not with a request",
    "there is one tier of service: auto",
    "this server does not tell thoughts from answers",
    "a conversation that does not fit is refused: disabled",
    "responses are not made in the background",
    "use previous_response_id",
    "use previous_response_id, or input",
    "there are no stored prompts",
    "a conversation is kept as it is",
    "answers have no phases",
    "must be one of: user, assistant, system",
    "must be one of: ephemeral",
    "must be one of: 5m, 1h",
    "must be one of: float, base64",
    "must be one of: mean, last",
    "must be one of: desc, asc",
    "the input has # tokens, but at most # fit",
    "citations are not supported",
    "this server connects to no other",
    "there are no containers",
    "answers are made where the server runs",
    "this server does not tell thoughts from answers: disabled",
    "constrained output and efforts are not supported",
    "a conversation is taken as it is",
    "there is one speed: standard",
    "this server knows keys alone",
    "a kept response is sent whole",
    "must be an item of this response's input",
    // Of the request as a whole.
    "# answers in all, but at most # run at once",
    "# tokens, but this model's context leaves room for #",
    "is #, but must be at most max_tokens, which is #",
    "must have at least one token",
    "the model's chat template refuses this conversation",
    "the model's chat template changes the last message",
    "this text cannot be tokenized",
    "the body nests deeper than # levels",
    "the body has more than # values",
    "# log-probabilities of prompt tokens in all, but at most # are told at once",
    "is # long, but must be at most # sequences",
    "the body must be a JSON object",
    "the body is not valid JSON at line #, column #",
    "a name stands twice in one object of the body",
    "the body did not arrive whole",
    "the request's body is larger than # bytes",
    "the request's body must be JSON, with content-type application/json",
    "the API key is missing or wrong",
    "the model does not exist; see /v1/models",
    "there is no such route",
    "there is no such response, or it is not kept any more",
    "this route has no such method",
    "only one Host header is allowed",
    "the Host must be a host name or an address, with or without a port",
    "the request needs a Host header",
    "the Host header and the request's target name different hosts",
    "pages of other origins may not use this server; see --allowed-origins",
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

/// What must be in no answer at all: addresses in memory, files of this or any other program, dumps of values.
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
        "(unreadable): this field is not known here",
        "min_tokens: is 9, but must be at most max_tokens, which is 8",
    ] {
        assert!(holds(fine), "{fine}");
    }
    for other in [
        "invalid type: string \"x\", expected u32 at line 1 column 5",
        "top_p: must be a number above x and at most 1",
        "a b: this field is not known here",
        "the body is not valid JSON at line 2, column 17: EOF",
        "",
    ] {
        assert!(!holds(other), "{other}");
    }
    assert!(leak_in("at 0x7fff1234").is_some() && leak_in("0x12, 0xyz").is_none());
}
