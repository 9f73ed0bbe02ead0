//! A request's body: read within its time, bounded in size and depth, and parsed.

use std::future::poll_fn;
use std::pin::Pin;

use axum::body::{Body, HttpBody};
use axum::extract::{FromRequest, Request};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::request::Parts;

use crate::App;
use crate::body_memory::{BodyMemory, Kept, Room, SMALL_BYTES};
use crate::error::ApiError;
use crate::fields::{self, Request as Fielded};
use crate::json::{self, Raw};
use crate::request::Bounds;
use crate::service::{Service, Serving};

/// A JSON object, as it came.
pub struct JsonBody {
    bytes: Vec<u8>,
    /// Room for the body and for the values of its fields.
    room: Room,
    /// Owner of the room after the body is read.
    kept: Option<Kept>,
}

/// Bounds of a request's fields, as a service knows them.
pub trait Known {
    fn of(service: &Service) -> &Self;
}

impl Known for Bounds {
    fn of(service: &Service) -> &Self {
        &service.bounds
    }
}

impl Known for Serving {
    fn of(service: &Service) -> &Self {
        service
    }
}

impl JsonBody {
    /// Whether there is a field of this name, for routes that take requests of more than one form.
    pub fn has(&self, field: &str) -> bool {
        let text = std::str::from_utf8(&self.bytes).unwrap_or_default();
        Raw::new(text).entries().is_some_and(|mut entries| entries.any(|(name, _)| name == field))
    }

    /// Reads the body as a request.
    pub async fn read<R: Fielded + Send + 'static>(self, service: &Service) -> Result<R, ApiError>
    where
        R::Bounds: Known,
    {
        let Self { bytes, mut room, kept } = self;
        let length = bytes.len();
        let limits = &service.bounds.limits;
        let (depth, values) = (limits.json_depth, limits.json_values);
        let within = service.clone();
        let work = move || {
            let request = read_fields::<R>(&bytes, depth, values, R::Bounds::of(&within));
            drop(bytes);
            room.read(length);
            request.map(|request| (request, room))
        };
        // A long body is read in the pool, so that it delays no other request.
        let read = if length > SMALL_BYTES { service.text_pool.parse(work).await } else { work() };
        let (request, room) = read?;
        // Without a guard the end of the request is unknown, so nothing is held for it.
        if let Some(kept) = kept {
            kept.keep(room);
        }
        Ok(request)
    }
}

impl FromRequest<App> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let (mut parts, body) = request.into_parts();
        let limits = app.limits();
        check_head(&parts, limits.body_bytes)?;
        let within = app.timeouts().body;
        let read = tokio::time::timeout(within, read(body, limits.body_bytes, app.body_memory()));
        let (bytes, room) = read.await.unwrap_or(Err(ApiError::TooSlow(within)))?;
        Ok(Self { bytes, room, kept: parts.extensions.remove() })
    }
}

/// Checks the headers before the body is read.
fn check_head(parts: &Parts, most: usize) -> Result<(), ApiError> {
    let length = parts.headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > most as u64) {
        return Err(ApiError::TooLarge(most));
    }
    let kind = parts.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let is_json = kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"));
    if is_json { Ok(()) } else { Err(ApiError::NotJson) }
}

/// The body, once there is room for it.
async fn read(mut body: Body, most: usize, memory: &BodyMemory) -> Result<(Vec<u8>, Room), ApiError> {
    let declared = body.size_hint().exact().map(|length| usize::try_from(length).unwrap_or(usize::MAX));
    if declared.is_some_and(|length| length > most) {
        return Err(ApiError::TooLarge(most));
    }
    // One that does not tell its length has room for a small one, and then for the largest.
    let mut room_for = declared.unwrap_or(SMALL_BYTES.min(most));
    let mut room = memory.take(room_for).await?;
    let mut bytes = Vec::with_capacity(room_for);
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        // A client that disconnects in the middle never reads this.
        let broken = |_| ApiError::Invalid { field: None, message: "the body is incomplete".into() };
        let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
        let length = bytes.len() + data.len();
        if length > most {
            return Err(ApiError::TooLarge(most));
        }
        if length > room_for {
            let larger = memory.take(most).await?;
            (room, room_for) = (larger, most);
            bytes.reserve_exact(most - bytes.len());
        }
        bytes.extend_from_slice(&data);
    }
    room.shrink(bytes.len());
    bytes.shrink_to_fit();
    Ok((bytes, room))
}

fn read_fields<R: Fielded>(bytes: &[u8], depth: usize, values: usize, bounds: &R::Bounds) -> Result<R, ApiError> {
    let invalid = |message: &str| ApiError::Invalid { field: None, message: message.into() };
    check(bytes, depth, values)?;
    let text = std::str::from_utf8(bytes).map_err(|_| invalid("the body is not UTF-8"))?;
    let object = Raw::new(text).entries().ok_or_else(|| invalid("the body must be a JSON object"))?;
    fields::read_raw(object, bounds)
}

/// Whether it is JSON that may be read.
fn check(bytes: &[u8], most_depth: usize, most_values: usize) -> Result<(), ApiError> {
    let invalid = |message: String| ApiError::Invalid { field: None, message };
    let (depth, values) = measure(bytes);
    if depth > most_depth {
        return Err(invalid(format!("the body nests deeper than {most_depth} levels")));
    }
    if values > most_values {
        return Err(invalid(format!("the body has more than {most_values} values")));
    }
    match json::check(bytes) {
        Ok(()) => Ok(()),
        Err(error) if error.is_data() => Err(invalid("the body has a JSON object with a duplicate key".into())),
        Err(error) => {
            let (line, column) = (error.line(), error.column());
            Err(invalid(format!("the body is not valid JSON at line {line}, column {column}")))
        }
    }
}

/// Nesting depth of brackets and an upper bound of the number of values, strings excluded. Input
/// that is not JSON may give any numbers. A value takes far more memory than the byte or two that
/// it may be written in.
fn measure(bytes: &[u8]) -> (usize, usize) {
    let (mut depth, mut deepest, mut values) = (0usize, 0usize, 1usize);
    let (mut in_text, mut escaped) = (false, false);
    for byte in bytes {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_text => escaped = true,
            b'"' => in_text = !in_text,
            b'[' | b'{' if !in_text => {
                depth += 1;
                deepest = deepest.max(depth);
                values += 1;
            }
            b',' if !in_text => values += 1,
            b']' | b'}' if !in_text => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    (deepest, values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_within_texts_does_not_count() {
        for (text, expected) in [
            ("{}", (1, 2)),
            (r#"{"a": [[1], {"b": 2}]}"#, (3, 6)),
            (r#"{"a": "[[[[,\"[[["}"#, (1, 2)),
            (r#"{"a\\": [1, 2]}"#, (2, 4)),
            ("[[[[", (4, 5)),
            ("", (0, 1)),
        ] {
            assert_eq!(measure(text.as_bytes()), expected, "{text}");
        }
        assert!(check(&b"[".repeat(100_000), 64, 9).is_err());
    }

    struct Nothing;

    impl Fielded for Nothing {
        type Bounds = ();

        fn read(fields: &mut fields::Fields, (): &()) -> Result<Self, fields::Wrong> {
            fields.optional("a", fields::Anything, "").map(|_| Self)
        }
    }

    #[test]
    fn only_objects_are_bodies() {
        let parse = |text: &[u8]| read_fields::<Nothing>(text, 4, 9, &()).map_err(|error| error.to_string());
        let message = |text: &str| parse(text.as_bytes()).err().unwrap_or_else(|| panic!("{text} is taken"));
        assert!(parse(br#"{"a": [[[1]]]}"#).is_ok());
        assert!(parse(b"{\"a\": [1,1,1,1,1,1,1]}").is_ok());
        assert_eq!(message("{\"a\": [1,1,1,1,1,1,1,1]}"), "the body has more than 9 values");
        assert_eq!(message(r#"{"a": [[[[1]]]]}"#), "the body nests deeper than 4 levels");
        assert_eq!(message("[1]"), "the body must be a JSON object");
        assert_eq!(message(r#"{"a": {"b": 1, "b": 2}}"#), "the body has a JSON object with a duplicate key");
        assert_eq!(message("{\"a\": \n oops"), "the body is not valid JSON at line 2, column 2");
        assert!(parse(b"{\"a\": \"\xff\"}").is_err());
    }

    #[tokio::test]
    async fn bodies_of_unknown_length_take_room_as_they_come() {
        let memory = BodyMemory::new(0, 1 << 20);
        let all = memory.free();
        for (length, is_declared) in
            [(0, true), (10, true), (10, false), (SMALL_BYTES + 1, false), (1 << 20, false), (1 << 20, true)]
        {
            let body = vec![b'x'; length];
            let body = match is_declared {
                true => Body::from(body),
                false => Body::new(Chunks(body)),
            };
            let (bytes, room) = read(body, 1 << 20, &memory).await.expect("there is room");
            assert_eq!((bytes.len(), bytes.capacity()), (length, length));
            let taken = all - memory.free();
            assert!((4 * length..=4 * length + 1024).contains(&taken), "{taken} for {length}");
            drop(room);
            assert_eq!(memory.free(), all);
        }
        for body in [Body::from(vec![0; (1 << 20) + 1]), Body::new(Chunks(vec![0; (1 << 20) + 1]))] {
            assert_eq!(read(body, 1 << 20, &memory).await.err(), Some(ApiError::TooLarge(1 << 20)));
        }
        assert_eq!(memory.free(), all);
    }

    /// A body in pieces that does not tell its length.
    struct Chunks(Vec<u8>);

    impl HttpBody for Chunks {
        type Data = axum::body::Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<http_body::Frame<Self::Data>, Self::Error>>> {
            let rest = self.0.len().saturating_sub(1000);
            let piece = self.0.split_off(rest);
            std::task::Poll::Ready((!piece.is_empty()).then(|| Ok(http_body::Frame::data(piece.into()))))
        }
    }
}
