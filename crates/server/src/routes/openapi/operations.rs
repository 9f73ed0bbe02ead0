//! Every operation there is: how it is asked, what it answers, and which failures it knows.

use serde_json::{Map, Value, json};

use super::conditions;
use super::schema::named;
use crate::fields;
use crate::request::{ChatRequest, CompletionRequest};
use crate::routes::embeddings::EmbeddingRequest;
use crate::routes::messages::{CountRequest, MessagesRequest};
use crate::routes::responses::{ItemsQuery, ResponsesRequest, RetrieveQuery};
use crate::routes::tokenize::{Detokenize, TokenizeChat, TokenizeText};
use crate::service::Serving;

/// Pattern of the ids that the store of responses makes.
pub const RESPONSE_ID: &str = "^resp_[0-9a-f]{40}$";

/// Error statuses of routes that generate text.
const GENERATES: &[u16] = &[400, 403, 404, 408, 413, 415, 429, 431, 500, 503, 504];
/// Error statuses of routes that read a body and answer at once.
const READS: &[u16] = &[400, 403, 404, 408, 413, 415, 429, 431, 500, 503];
/// Error statuses of routes that take a permit without a body.
const SIGNALS: &[u16] = &[403, 429, 431, 500, 503];
/// Error statuses of routes that only report something.
const TELLS: &[u16] = &[403, 431, 500, 503];
/// ... of something that has a name.
const FINDS: &[u16] = &[403, 404, 431, 500, 503];
/// Error statuses of routes that only report something, by a query.
const QUERIES: &[u16] = &[400, 403, 404, 431, 500, 503];

pub struct Operation {
    pub method: &'static str,
    pub path: &'static str,
    pub id: &'static str,
    pub tag: &'static str,
    pub about: &'static str,
    /// The schema of its body.
    pub body: Option<&'static str>,
    pub parameters: Vec<Value>,
    pub content: Content,
    pub failures: &'static [u16],
    /// Its 503 reports the health of the server.
    pub is_health: bool,
}

/// Content of a successful answer, by the name of its schema.
pub enum Content {
    Json(&'static str),
    JsonOrEvents(&'static str),
    Text,
    /// A document such as this.
    Document,
}

impl Operation {
    fn get(path: &'static str, id: &'static str, about: &'static str, content: Content) -> Self {
        Self {
            method: "get",
            path,
            id,
            tag: "server",
            about,
            body: None,
            parameters: Vec::new(),
            content,
            failures: TELLS,
            is_health: false,
        }
    }

    fn post(
        path: &'static str,
        id: &'static str,
        about: &'static str,
        body: &'static str,
        content: Content,
        failures: &'static [u16],
    ) -> Self {
        let (body, tag) = (Some(body), "model");
        Self { method: "post", body, tag, failures, ..Self::get(path, id, about, content) }
    }

    /// Operations that a successful answer leads to.
    pub fn links(&self) -> Option<Value> {
        if self.id != "createResponse" {
            return None;
        }
        let link = |operation: &str| json!({"operationId": operation, "parameters": {"id": "$response.body#/id"}});
        Some(json!({
            "retrieve": link("retrieveResponse"), "items": link("listResponseInputItems"),
            "delete": link("deleteResponse"),
        }))
    }
}

pub fn all(serving: &Serving) -> Vec<Operation> {
    let mut all = generating();
    all.extend(kept());
    all.extend(telling(serving));
    all
}

fn generating() -> Vec<Operation> {
    use Content::{Json, JsonOrEvents};
    let chat = "Generates an answer to a conversation.";
    vec![
        Operation::post(
            "/v1/chat/completions",
            "createChatCompletion",
            chat,
            "ChatCompletionRequest",
            JsonOrEvents("ChatCompletion"),
            GENERATES,
        ),
        Operation::post(
            "/v1/completions",
            "createCompletion",
            "Generates continuations of prompts.",
            "CompletionRequest",
            JsonOrEvents("Completion"),
            GENERATES,
        ),
        Operation::post(
            "/v1/responses",
            "createResponse",
            "Generates an answer and stores the conversation.",
            "ResponseRequest",
            JsonOrEvents("Response"),
            GENERATES,
        ),
        Operation::post("/v1/messages", "createMessage", chat, "MessageRequest", JsonOrEvents("Message"), GENERATES),
        Operation::post(
            "/v1/messages/count_tokens",
            "countMessageTokens",
            "Counts the tokens of a conversation.",
            "MessageCountRequest",
            Json("MessageCount"),
            READS,
        ),
        Operation::post(
            "/v1/embeddings",
            "createEmbedding",
            "Computes embeddings.",
            "EmbeddingRequest",
            Json("Embeddings"),
            GENERATES,
        ),
        Operation::post(
            "/tokenize",
            "tokenize",
            "Tokenizes a string or a conversation.",
            "TokenizeRequest",
            Json("Tokenized"),
            READS,
        ),
        Operation::post(
            "/detokenize",
            "detokenize",
            "Decodes token ids to a string.",
            "DetokenizeRequest",
            Json("Detokenized"),
            READS,
        ),
    ]
}

/// Operations on stored responses.
fn kept() -> Vec<Operation> {
    use Content::Json;
    let id = json!({
        "name": "id", "in": "path", "required": true, "description": "Id of the response.",
        "schema": {"type": "string", "pattern": RESPONSE_ID},
    });
    let with_query = |query: Value| [id.clone()].into_iter().chain(parameters(&query)).collect();
    let (one, items) = ("/v1/responses/{id}", "/v1/responses/{id}/input_items");
    let kept = |operation| Operation { tag: "model", failures: QUERIES, ..operation };
    vec![
        kept(Operation {
            parameters: with_query(fields::schema::<RetrieveQuery>(&())),
            ..Operation::get(one, "retrieveResponse", "Returns a stored response.", Json("Response"))
        }),
        kept(Operation {
            method: "delete",
            parameters: vec![id.clone()],
            failures: FINDS,
            ..Operation::get(one, "deleteResponse", "Deletes a stored response.", Json("DeletedResponse"))
        }),
        kept(Operation {
            parameters: with_query(fields::schema::<ItemsQuery>(&())),
            ..Operation::get(
                items,
                "listResponseInputItems",
                "Lists the conversation that a stored response answers.",
                Json("InputItems"),
            )
        }),
    ]
}

fn telling(serving: &Serving) -> Vec<Operation> {
    use Content::{Document, Json, Text};
    let name = json!({
        "name": "name", "in": "path", "required": true, "description": "Name of the model.",
        "schema": {"type": "string", "enum": serving.model.names.listed},
    });
    let health = |path, id| Operation { is_health: true, ..Operation::get(path, id, HEALTH, Json("Health")) };
    let pinged = Operation { method: "post", failures: SIGNALS, ..health("/ping", "postPing") };
    let get = Operation::get;
    vec![
        get("/v1/models", "listModels", "Lists the model under each of its names.", Json("Models")),
        Operation {
            parameters: vec![name],
            failures: FINDS,
            ..get("/v1/models/{name}", "retrieveModel", "Describes the model of this name.", Json("Model"))
        },
        health("/health", "health"),
        health("/health_generate", "healthGenerate"),
        health("/ping", "ping"),
        pinged,
        Operation { about: "Reports whether the server accepts requests.", ..health("/ready", "ready") },
        get("/load", "load", "Reports the number of requests in flight.", Json("ServerLoad")),
        get("/version", "version", "Reports the version of the server.", Json("Version")),
        get("/server_info", "serverInfo", "Reports the configuration of the server.", Json("ServerInfo")),
        get("/get_server_info", "getServerInfo", "Older name of /server_info.", Json("ServerInfo")),
        get("/model_info", "modelInfo", "Describes the model.", Json("ModelInfo")),
        get("/get_model_info", "getModelInfo", "Older name of /model_info.", Json("ModelInfo")),
        get("/v1/loads", "listLoads", "Reports running and queued requests.", Json("Loads")),
        get("/loads", "loads", "Another name of /v1/loads.", Json("Loads")),
        get("/get_load", "getLoad", "Reports the load in the format of older routers.", Json("OldLoads")),
        get("/metrics", "metrics", "All metrics in the Prometheus text format.", Text),
        get("/openapi.json", "openapi", "This document.", Document),
    ]
}

const HEALTH: &str = "Reports whether the server answers and its engine makes progress.";

/// The fields of a query, as parameters.
fn parameters(schema: &Value) -> Vec<Value> {
    let fields = schema["properties"].as_object().into_iter().flatten();
    let parameter = |(name, schema): (&String, &Value)| {
        let mut schema = schema.clone();
        // A query cannot say null; it leaves the field out.
        if let Some(options) = schema["anyOf"].as_array().cloned() {
            schema = options.into_iter().find(|option| option["type"] != "null").unwrap_or_default();
        }
        if let Some(kinds) = schema["type"].as_array().cloned() {
            schema["type"] = kinds.into_iter().find(|kind| kind != "null").unwrap_or_default();
        }
        if name == "after" {
            schema = json!({"type": "string", "pattern": "^msg_[0-9a-f]{40}_[0-9]{1,4}$"});
        }
        if let Some(words) = schema.get_mut("enum").and_then(Value::as_array_mut) {
            words.retain(|word| !word.is_null());
        }
        json!({"name": name, "in": "query", "required": false, "schema": schema})
    };
    fields.map(parameter).collect()
}

pub fn request_schemas(serving: &Serving) -> Map<String, Value> {
    let bounds = &serving.bounds;
    let schemas = [
        ("ChatCompletionRequest", fields::schema::<ChatRequest>(bounds)),
        ("CompletionRequest", fields::schema::<CompletionRequest>(bounds)),
        ("ResponseRequest", fields::schema::<ResponsesRequest>(bounds)),
        ("MessageRequest", fields::schema::<MessagesRequest>(bounds)),
        ("MessageCountRequest", fields::schema::<CountRequest>(bounds)),
        ("EmbeddingRequest", fields::schema::<EmbeddingRequest>(serving)),
        ("TokenizeTextRequest", fields::schema::<TokenizeText>(bounds)),
        ("TokenizeChatRequest", fields::schema::<TokenizeChat>(bounds)),
        ("TokenizeRequest", json!({"anyOf": [named("TokenizeTextRequest"), named("TokenizeChatRequest")]})),
        ("DetokenizeRequest", fields::schema::<Detokenize>(bounds)),
    ];
    schemas.into_iter().map(|(name, schema)| (name.to_owned(), conditions::add(schema, serving))).collect()
}
