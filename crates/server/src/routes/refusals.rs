//! Common handling of all refusals of routes: they are counted, logged, and written in the style of
//! the route's clients.

use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;

use crate::error::{ApiError, ErrorStyle};
use crate::guard::{Caller, RequestId};
use crate::observe::Refusal;
use crate::service::App;

pub async fn note(State(app): State<App>, request: Request, next: Next) -> Response {
    let arrived = Instant::now();
    let style = ErrorStyle::of_path(request.uri().path());
    let route = request.extensions().get::<MatchedPath>().cloned();
    let caller = request.extensions().get::<Caller>().map(|caller| caller.name.clone());
    let id = request.extensions().get::<RequestId>().map(|id| id.id.clone());
    let response = next.run(request).await;
    let Some(error) = response.extensions().get::<ApiError>().cloned() else { return response };
    app.observer().refused(&Refusal {
        route: route.as_ref().map_or("", MatchedPath::as_str),
        request_id: id.as_deref().unwrap_or_default(),
        key_name: caller.as_deref(),
        status: error.status().as_u16(),
        code: error.code(),
        arrived,
    });
    // Another text under the same head, which may name the methods that there are.
    let (head, body) = response.into_parts();
    let body = if style == ErrorStyle::OpenAi { body } else { error.respond(style).into_body() };
    Response::from_parts(head, body)
}
