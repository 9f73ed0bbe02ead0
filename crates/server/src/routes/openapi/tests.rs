//! Answers of a server whose model continues the alphabet, held against what is documented of them.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, StatusCode};
use folio_engine::{
    Admission, Background, Engine, EngineConfig, GroupConfig, RequestId, RowOutput, SamplingState, StepPlan, StepRunner,
};
use folio_text::{ChatTemplate, SpecialTokens, Tokenizer};
use serde_json::{Map, Value, json};
use tower::ServiceExt;

use crate::guard::Lifecycle;
use crate::observe::Observer;
use crate::service::{App, Model};
use crate::{Limits, SamplingDefaults, Timeouts, router};

const LETTERS: usize = 26;

struct Alphabet(HashMap<RequestId, SamplingState>);

impl StepRunner for Alphabet {
    fn admit(&mut self, id: RequestId, admission: Admission) {
        self.0.insert(id, admission.state);
    }

    fn run(&mut self, plan: &StepPlan) -> folio_engine::Result<Vec<RowOutput>> {
        let outputs = plan.assignments.iter().map(|assignment| {
            let mut output = RowOutput::new(assignment.id);
            let next = (assignment.first + assignment.num_rows()) % LETTERS;
            let mut logits: Vec<f32> = (0..LETTERS).map(|letter| if letter == next { 8.0 } else { 0.0 }).collect();
            let state = self.0.get_mut(&assignment.id).expect("admitted");
            if assignment.samples {
                let sampled = state.sample(&mut logits, assignment.first + assignment.num_rows());
                output.sampled.push(sampled.expect("finite logits"));
            }
            output
        });
        Ok(outputs.collect())
    }

    fn release(&mut self, id: RequestId) {
        self.0.remove(&id);
    }
}

fn tokenizer() -> Tokenizer {
    let vocab: Map<String, Value> = (0..26u8).map(|id| (char::from(b'a' + id).to_string(), id.into())).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let file = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
        "pre_tokenizer": byte_level, "decoder": byte_level, "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    Tokenizer::from_json(file.to_string().as_bytes()).expect("a sound file")
}

pub fn app() -> App {
    let config = EngineConfig {
        max_seqs: 4,
        max_model_len: 64,
        groups: vec![GroupConfig::new(64)],
        logits_width: LETTERS,
        ..EngineConfig::default()
    };
    let executor = Background::start(Alphabet(HashMap::new())).expect("a thread");
    let engine = Engine::start(Box::new(executor), config).expect("a sound configuration");
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}";
    let observer = Observer::quiet("org/alphabet", 64);
    let app = App::new(Limits::default(), Timeouts::default(), Lifecycle::new(), observer);
    app.set_model(Model {
        engine,
        tokenizer: Arc::new(tokenizer()),
        template: Some(Arc::new(ChatTemplate::new(template, SpecialTokens::default()).expect("sound"))),
        names: vec!["org/alphabet".into()].into(),
        defaults: SamplingDefaults { temperature: Some(0.0), ..SamplingDefaults::default() },
        vocab_size: LETTERS,
        max_seqs: 4,
        embeds: false,
        info: json!({"block_size": 16, "model": "x", "dtype": "f32"}),
    });
    app
}

async fn ask(router: &Router, method: &str, path: &str, body: &Value) -> (StatusCode, Value) {
    let id = crate::guard::RequestId { id: "0123456789abcdef".into(), client: None };
    let request = Request::builder().method(Method::from_bytes(method.as_bytes()).expect("a method")).uri(path);
    let request = request.header("content-type", "application/json").extension(id);
    let body = if body.is_null() { Body::empty() } else { Body::from(body.to_string()) };
    let response = router.clone().oneshot(request.body(body).expect("sound")).await.expect("it never fails");
    let status = response.status();
    let bytes = to_bytes(response.into_body(), 1 << 20).await.expect("whole");
    let text = String::from_utf8_lossy(&bytes).into_owned();
    (status, serde_json::from_slice(&bytes).unwrap_or(Value::String(text)))
}

/// Whether `value` is as `schema` says; only the words of JSON Schema that are used here are known.
pub fn check(schema: &Value, value: &Value) -> Result<(), String> {
    check_in(schema, value, &json!({}))
}

fn check_in(schema: &Value, value: &Value, schemas: &Value) -> Result<(), String> {
    let fits = |schema: &Value, value: &Value| check_in(schema, value, schemas);
    if let Some(name) = schema["$ref"].as_str().and_then(|path| path.strip_prefix("#/components/schemas/")) {
        return fits(&schemas[name], value).map_err(|why| format!("{name}{why}"));
    }
    if let Some(options) = schema["anyOf"].as_array() {
        let tried: Vec<_> = options.iter().map(|option| fits(option, value)).collect();
        return if tried.iter().any(Result::is_ok) { Ok(()) } else { Err(format!(": none of {tried:?}")) };
    }
    let is = |kind: &Value| match kind.as_str().unwrap_or_default() {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        _ => value.is_null(),
    };
    let wrong = || Err(format!(": {value} is not {schema}"));
    let has_kind = match &schema["type"] {
        Value::Null => true,
        Value::Array(kinds) => kinds.iter().any(is),
        kind => is(kind),
    };
    let below = schema["minimum"].as_f64().zip(value.as_f64()).is_some_and(|(least, value)| value < least);
    let above = schema["maximum"].as_f64().zip(value.as_f64()).is_some_and(|(most, value)| value > most);
    let is_other = schema.get("const").is_some_and(|one| one != value);
    let is_unknown = schema["enum"].as_array().is_some_and(|words| !words.contains(value));
    if !has_kind || below || above || is_other || is_unknown {
        return wrong();
    }
    let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    if let Some(missing) = required.filter(|_| value.is_object()).find(|name| value.get(name).is_none()) {
        return Err(format!(".{missing}: missing"));
    }
    for (name, field) in value.as_object().into_iter().flatten() {
        let known = schema["properties"].get(name);
        match known.or(schema.get("additionalProperties")) {
            None | Some(Value::Bool(true)) => {}
            Some(Value::Bool(false)) => return Err(format!(".{name}: not documented")),
            Some(schema) => fits(schema, field).map_err(|why| format!(".{name}{why}"))?,
        }
    }
    let items = schema
        .get("items")
        .into_iter()
        .flat_map(|schema| value.as_array().into_iter().flatten().map(move |item| (schema, item)));
    items.into_iter().try_for_each(|(schema, item)| fits(schema, item).map_err(|why| format!("[]{why}")))
}

#[tokio::test]
async fn answers_are_as_documented() {
    let router = router(app());
    let (status, document) = ask(&router, "GET", "/openapi.json", &Value::Null).await;
    assert_eq!(status, StatusCode::OK);
    let schemas = &document["components"]["schemas"];
    let bodies = [
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "ab"}], "max_tokens": 3})),
        (
            "/v1/chat/completions",
            json!({
                "messages": [{"role": "user", "content": "ab"}], "max_tokens": 3, "logprobs": true, "top_logprobs": 2,
                "n": 2, "return_token_ids": true, "stop_token_ids": [5],
            }),
        ),
        ("/v1/completions", json!({"prompt": ["a", [1, 2]], "max_tokens": 2, "logprobs": 2, "stop": "d"})),
        ("/v1/completions", json!({"prompt": "abc", "echo": true, "max_tokens": 1, "return_token_ids": true})),
        ("/v1/responses", json!({"input": "abc", "max_output_tokens": 2})),
        (
            "/v1/messages",
            json!({"model": "org/alphabet", "max_tokens": 2, "messages": [{"role": "user", "content": "ab"}]}),
        ),
        (
            "/v1/messages/count_tokens",
            json!({"model": "org/alphabet", "messages": [{"role": "user", "content": "ab"}]}),
        ),
        ("/tokenize", json!({"prompt": "abc", "return_token_strs": true})),
        ("/tokenize", json!({"messages": [{"role": "user", "content": "ab"}]})),
        ("/detokenize", json!({"tokens": [0, 1, 25]})),
        ("/ping", Value::Null),
    ];
    let mut asked: Vec<(&str, String, Value)> =
        bodies.map(|(path, body)| ("post", path.to_owned(), body)).into_iter().collect();
    for (path, operations) in document["paths"].as_object().expect("paths") {
        if operations.get("get").is_some() && !path.contains("/v1/responses") {
            asked.push(("get", path.replace("{name}", "org/alphabet"), Value::Null));
        }
    }
    assert!(asked.len() > 25, "{}", asked.len());
    for (method, path, body) in asked {
        let (status, answer) = ask(&router, &method.to_uppercase(), &path, &body).await;
        assert_eq!(status, StatusCode::OK, "{method} {path} {body}: {answer}");
        let documented = path.replace("org/alphabet", "{name}");
        let content = &document["paths"][&documented][method]["responses"]["200"]["content"];
        if let Some(json) = content.get("application/json") {
            let fits = check_in(&json["schema"], &answer, schemas);
            fits.unwrap_or_else(|why| panic!("{method} {path} {body}: {why}"));
        }
    }
}

#[tokio::test]
async fn documented_requests_are_those_that_are_read() {
    let router = router(app());
    let (_, document) = ask(&router, "GET", "/openapi.json", &Value::Null).await;
    let schemas = &document["components"]["schemas"];
    let cases = [
        ("/detokenize", "DetokenizeRequest", json!({"tokens": [25]}), json!({"tokens": [26]})),
        ("/detokenize", "DetokenizeRequest", json!({"tokens": [], "model": null}), json!({"tokens": [], "x": 1})),
        ("/tokenize", "TokenizeRequest", json!({"prompt": ""}), json!({"prompt": "a", "messages": []})),
        ("/v1/completions", "CompletionRequest", json!({"prompt": "a", "n": 4}), json!({"prompt": "a", "n": 17})),
    ];
    for (path, name, good, bad) in cases {
        check_in(&schemas[name], &good, schemas).unwrap_or_else(|why| panic!("{path} {good}: {why}"));
        assert!(check_in(&schemas[name], &bad, schemas).is_err(), "{path} {bad}");
        assert_eq!(ask(&router, "POST", path, &good).await.0, StatusCode::OK, "{path} {good}");
        let (status, answer) = ask(&router, "POST", path, &bad).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path} {bad}: {answer}");
        check_in(&schemas["Error"], &answer, schemas).unwrap_or_else(|why| panic!("{path} {bad}: {why}"));
    }
    let embedding = ask(&router, "POST", "/v1/embeddings", &json!({"input": "a"})).await;
    assert_eq!((embedding.0, &embedding.1["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("model")));
    assert_eq!(ask(&router, "GET", "/v1/models/other", &Value::Null).await.0, StatusCode::NOT_FOUND);
    assert_eq!(ask(&router, "GET", "/v1/models/%ff", &Value::Null).await.0, StatusCode::NOT_FOUND);
    assert_eq!(ask(&router, "GET", "/v1/models/org%2Falphabet", &Value::Null).await.0, StatusCode::OK);
}

#[test]
fn keys_are_documented_where_they_are_needed() {
    let app = app();
    let service = app.service().expect("set");
    let open = super::document(service, false);
    assert!(open.get("security").is_none() && open["components"].get("securitySchemes").is_none());
    let closed = super::document(service, true);
    assert_eq!(closed["security"], json!([{"bearer": []}, {"key": []}]));
    assert_eq!(closed["paths"]["/health"]["get"]["security"], json!([]));
    let responses = |path: &str, method: &str| closed["paths"][path][method]["responses"].clone();
    assert!(responses("/health", "get").get("401").is_none());
    assert!(responses("/v1/models", "get").get("401").is_some());
    // Every reference leads somewhere, and every operation has a name of its own.
    let text = closed.to_string();
    for reference in text.split("\"$ref\":\"#").skip(1) {
        let pointer = reference.split('"').next().unwrap_or_default();
        assert!(closed.pointer(pointer).is_some(), "{pointer}");
    }
    let operations = closed["paths"].as_object().into_iter().flatten().flat_map(|(_, path)| path.as_object());
    let mut ids: Vec<&str> = operations.flatten().filter_map(|(_, one)| one["operationId"].as_str()).collect();
    let total = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!((ids.len(), total > 25), (total, true), "{total}");
}
