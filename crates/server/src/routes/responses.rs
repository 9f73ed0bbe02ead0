//! `/v1/responses`: answers that are stored and can be continued.

mod input;
mod object;
mod query;
mod request;
mod store;
mod stream;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequestParts, Path, RawQuery};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use self::input::{InputMessage, Item, conversation};
use self::object::{Answer, Draft, Stage, Usage};
pub use self::query::{ItemsQuery, RetrieveQuery};
pub use self::request::ResponsesRequest;
pub use self::store::ResponseStore;
use self::store::Stored;
use crate::answers::Answers;
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::request::Generate;
use crate::service::{App, Call, Service};
use crate::sse;

const ROUTE: &str = "/v1/responses";

/// Everything that is cheap to check is checked before the prompt is made.
pub async fn create(service: Service, call: Call, body: JsonBody) -> Result<Response, ApiError> {
    let request: ResponsesRequest = body.read(&service).await?;
    let generate = Generate::new(request.params, 1, &service.bounds).map_err(in_own_words)?;
    let draft = Draft::new(&service, &call, request.settings, &generate);
    let items = items(&service, &call, &draft, request.input)?;
    let conversation = conversation(draft.instructions(), &items);
    let (prompt, bad_words) = service.text_pool.chat(conversation, &generate).await.map_err(in_own_words)?;
    let answers = service.submit(ROUTE, &call, std::slice::from_ref(&prompt), bad_words, generate);
    let answers = answers.map_err(in_own_words)?;
    let keeping = request.store.then_some(Keeping { tenant: call.caller.tenant, items });
    let num_input_tokens = prompt.tokens.len();
    match request.stream {
        false => whole(draft, keeping, num_input_tokens, answers).await,
        true => {
            Ok(sse::stream(&service, &call, |writer| stream::write(draft, keeping, num_input_tokens, answers, writer)))
        }
    }
}

/// The one in a request's address; one that is no text names nothing.
pub struct ResponseId(String);

impl FromRequestParts<App> for ResponseId {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let path = Path::<String>::from_request_parts(parts, app).await;
        path.map(|Path(id)| Self(id)).map_err(|_| ApiError::NoSuchResponse)
    }
}

/// A response that is kept, as it was sent.
pub async fn retrieve(
    service: Service,
    call: Call,
    ResponseId(id): ResponseId,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    query::read::<RetrieveQuery>(query.as_deref())?;
    Ok(as_json(find(&service, &call, &id)?.body.clone()))
}

pub async fn delete(service: Service, call: Call, ResponseId(id): ResponseId) -> Result<Json<Value>, ApiError> {
    match service.responses.remove(call.caller.tenant, &id) {
        true => Ok(Json(json!({"id": id, "object": "response", "deleted": true}))),
        false => Err(ApiError::NoSuchResponse),
    }
}

/// The whole conversation that a stored response answers.
pub async fn input_items(
    service: Service,
    call: Call,
    ResponseId(id): ResponseId,
    RawQuery(query): RawQuery,
) -> Result<Json<Value>, ApiError> {
    let query: ItemsQuery = query::read(query.as_deref())?;
    query.page(find(&service, &call, &id)?.input()).map(Json)
}

fn find(service: &Service, call: &Call, id: &str) -> Result<std::sync::Arc<Stored>, ApiError> {
    service.responses.get(call.caller.tenant, id).ok_or(ApiError::NoSuchResponse)
}

/// The conversation to be answered: what went before, and what is new.
fn items(service: &Service, call: &Call, draft: &Draft, new: Vec<InputMessage>) -> Result<Vec<Item>, ApiError> {
    let mut items = match draft.previous() {
        Some(id) => find(service, call, id)?.items.to_vec(),
        None => Vec::new(),
    };
    let most = service.bounds.limits.messages;
    if items.len() + new.len() > most {
        let message = format!("the conversation would have more than {most} messages");
        return Err(ApiError::invalid("previous_response_id", message));
    }
    let named = |(index, message): (usize, InputMessage)| {
        Item::new(format!("{}_{index}", draft.item_id), message.role, message.text)
    };
    items.extend(new.into_iter().enumerate().map(named));
    Ok(items)
}

/// The data that a response is stored with.
struct Keeping {
    tenant: u64,
    /// The conversation that it answers.
    items: Vec<Item>,
}

/// The response's text, if there was room for it.
fn keep(draft: &Draft, keeping: &Keeping, answer: &Answer, usage: Usage) -> Option<Bytes> {
    let body = to_json(draft, answer, usage, true);
    let mut items = keeping.items.clone();
    items.push(Item::new(draft.item_id.as_str(), "assistant", answer.text.as_str()));
    let stored = Stored::new(body, items);
    let body = stored.body.clone();
    draft.service.responses.put(keeping.tenant, &draft.id, stored).then_some(body)
}

async fn whole(
    draft: Draft,
    keeping: Option<Keeping>,
    num_input_tokens: usize,
    answers: Answers,
) -> Result<Response, ApiError> {
    let collected = answers.collect().await?.swap_remove(0);
    let usage = Usage::new(num_input_tokens, &collected.usage);
    let mut answer = Answer { text: collected.text, tokens: collected.tokens, is_whole: false };
    if let Some(finish) = &collected.finish {
        answer.end(finish);
    }
    let kept = keeping.and_then(|keeping| keep(&draft, &keeping, &answer, usage));
    Ok(as_json(kept.unwrap_or_else(|| to_json(&draft, &answer, usage, false).into())))
}

fn to_json(draft: &Draft, answer: &Answer, usage: Usage, store: bool) -> String {
    let object = draft.object(Stage::Ended { answer, usage }, store);
    // These types have nothing that cannot be written.
    serde_json::to_string(&object).expect("responses can be written as JSON")
}

fn as_json(body: Bytes) -> Response {
    ([(CONTENT_TYPE, "application/json")], body).into_response()
}

/// Refusals name fields as this route's clients know them.
fn in_own_words(error: ApiError) -> ApiError {
    error.renamed(&[("prompt", "input"), ("messages", "input"), ("max_tokens", "max_output_tokens")])
}
