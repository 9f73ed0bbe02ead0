//! `/v1/embeddings`: texts turned into vectors, all of a request's at once.

use axum::Json;
use folio_engine::{Event, FinishReason, Pooling, RequestOptions, RequestStream, SubmitError, Usage};
use serde::Serialize;

use super::wire::check_served;
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::fields::{Count, Fields, Flag, Opaque, Request, Text, Whole, Word, Wrong};
use crate::observe::{EndReason, RequestRecord, RequestStart};
use crate::prompts::Prepared;
use crate::request::{Generate, Prompt, Prompts, Wishes, invalid};
use crate::service::{Call, Service, Serving};

const ROUTE: &str = "/v1/embeddings";
const ENGINE_FAULT: ApiError = ApiError::Failed("the engine could not complete this request");
const NO_VECTOR: ApiError = ApiError::Failed("the model gives this input no vector that could be used");

pub struct EmbeddingRequest {
    is_served: bool,
    inputs: Vec<Prompt>,
    add_special_tokens: bool,
    pooling: Pooling,
    form: Form,
    wishes: Wishes,
}

/// How a vector is told.
#[derive(Clone, Copy)]
struct Form {
    /// Scaled to length 1.
    is_normal: bool,
    /// As the bytes of its numbers, little-endian, rather than as numbers.
    is_base64: bool,
}

impl Request for EmbeddingRequest {
    type Bounds = Serving;

    fn read(fields: &mut Fields, serving: &Serving) -> Result<Self, Wrong> {
        let (bounds, limits) = (&serving.bounds, &serving.bounds.limits);
        // All of them run side by side.
        let inputs = Prompts { vocab_size: bounds.vocab_size, most: limits.prompts.min(bounds.max_seqs) };
        let inputs = fields.required("input", inputs, "A text, token ids, or a list of either.")?;
        let served = fields.optional("model", bounds.model(), "The model, as /v1/models names it.")?;
        let format = fields.optional(
            "encoding_format",
            Word(&["float", "base64"]),
            "Numbers, or the bytes of 32-bit numbers, little-endian, in base64.",
        )?;
        dimensions(fields, serving)?;
        let normalize = fields.optional("normalize", Flag, "Whether vectors are scaled to length 1.")?;
        let pooling = fields.optional(
            "pooling",
            Word(&["mean", "last"]),
            "The mean over all tokens' states, or the last token's state.",
        )?;
        let add =
            fields.optional("add_special_tokens", Flag, "Whether a text begins with the token that begins texts.")?;
        let wishes = wishes(fields, serving)?;
        fields.optional("user", Text::between(0, limits.user_bytes), "Who is asking; not used.")?;
        Ok(Self {
            is_served: served.unwrap_or(true),
            inputs,
            add_special_tokens: add.unwrap_or(true),
            pooling: if pooling == Some("last") { Pooling::Last } else { Pooling::Mean },
            form: Form { is_normal: normalize.unwrap_or(true), is_base64: format == Some("base64") },
            wishes,
        })
    }
}

fn dimensions(fields: &mut Fields, serving: &Serving) -> Result<(), Wrong> {
    let why = "vectors have the model's own length and are not shortened";
    match serving.model.embedding_size() {
        Some(size) => fields.optional("dimensions", Count::between(size, size), why).map(|_| ()),
        None => fields.refused("dimensions", &[], why),
    }
}

fn wishes(fields: &mut Fields, serving: &Serving) -> Result<Wishes, Wrong> {
    let bounds = &serving.bounds;
    let truncate_prompt = fields.optional(
        "truncate_prompt_tokens",
        Whole::between(-1, bounds.max_model_len.saturating_sub(1) as i64),
        "Keeps this many of an input's last tokens; -1: as many as fit.",
    )?;
    if truncate_prompt == Some(0) {
        return Err(Wrong::new("must be -1 or at least 1").below(".truncate_prompt_tokens"));
    }
    let priority = Whole::between(i64::from(i32::MIN), i64::from(i32::MAX));
    let priority = fields.optional("priority", priority, "Lower runs sooner.")?.map(|level| level as i32);
    let cache_salt = fields.optional(
        "cache_salt",
        Opaque { most: bounds.limits.cache_salt_bytes },
        "Only requests with the same salt share what the prefix cache holds.",
    )?;
    Ok(Wishes { truncate_prompt, priority, cache_salt, ..Wishes::default() })
}

#[derive(Serialize)]
pub struct Answer {
    object: &'static str,
    data: Vec<Entry>,
    model: String,
    usage: Used,
}

#[derive(Serialize)]
struct Entry {
    object: &'static str,
    index: usize,
    embedding: Vector,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum Vector {
    Numbers(Vec<f32>),
    Base64(String),
}

#[derive(Serialize)]
struct Used {
    prompt_tokens: usize,
    total_tokens: usize,
}

pub async fn create(service: Service, call: Call, body: JsonBody) -> Result<Json<Answer>, ApiError> {
    let serving: &Serving = &service;
    let request: EmbeddingRequest = body.read(serving)?;
    check_served(request.is_served)?;
    if !service.model.embeds {
        return Err(ApiError::invalid("model", "this model gives no embeddings"));
    }
    let mut generate = Generate::new(request.wishes, 1, &service.bounds)?;
    let inputs = service.prompts.texts(request.inputs, request.add_special_tokens, &mut generate).await;
    let inputs = inputs.map_err(of_input)?;
    let (streams, mut record) = start(&service, &call, &inputs, request.pooling, &generate)?;
    let mut data = Vec::with_capacity(streams.len());
    for (index, stream) in streams.into_iter().enumerate() {
        let vector = receive(stream, index, &mut record).await?;
        data.push(Entry { object: "embedding", index, embedding: told(vector, request.form)? });
    }
    let prompt_tokens = inputs.iter().map(|input| input.tokens.len()).sum();
    let usage = Used { prompt_tokens, total_tokens: prompt_tokens };
    Ok(Json(Answer { object: "list", data, model: service.model_name().to_owned(), usage }))
}

/// What a prompt is elsewhere is an input here.
fn of_input(error: ApiError) -> ApiError {
    match error {
        ApiError::Invalid { field: Some(field), message } if field == "prompt" => ApiError::invalid("input", message),
        ApiError::ContextLength { tokens, most, .. } => ApiError::ContextLength { field: "input", tokens, most },
        error => error,
    }
}

/// Hands all inputs to the engine. Dropping the streams aborts what still runs.
fn start(
    service: &Service,
    call: &Call,
    inputs: &[Prepared],
    pooling: Pooling,
    generate: &Generate,
) -> Result<(Vec<RequestStream>, RequestRecord), ApiError> {
    let (engine, caller) = (&service.model.engine, &call.caller);
    let options = RequestOptions {
        priority: generate.priority,
        tenant: caller.tenant,
        weight: caller.weight,
        deadline: Some(service.timeouts.request.saturating_sub(call.arrived.elapsed())),
        cache_salt: generate.cache_salt.as_deref().map_or(caller.cache_salt, |salt| caller.cache_salt_with(salt)),
    };
    let request = |input: &Prepared| {
        let request = engine.embedding(input.tokens.clone(), pooling);
        request.and_then(|request| request.with_options(options.clone())).map_err(|error| of_input(invalid(error)))
    };
    // All are checked before any is queued.
    let requests = inputs.iter().map(request).collect::<Result<Vec<_>, _>>()?;
    let streams = requests.into_iter().map(|request| engine.submit(request).map_err(not_taken));
    let streams = streams.collect::<Result<Vec<_>, _>>()?;
    let mut record = service.observer.begin(RequestStart {
        route: ROUTE,
        request_id: call.id.id.clone(),
        key_name: Some(caller.name.clone()),
        traceparent: call.traceparent.as_deref(),
        arrived: call.arrived,
    });
    inputs.iter().for_each(|input| record.submitted(input.tokens.len(), 1, 0));
    Ok((streams, record))
}

fn not_taken(error: SubmitError) -> ApiError {
    match error {
        SubmitError::QueueFull { retry_after } => ApiError::Overloaded { retry_after },
        SubmitError::Draining => ApiError::Draining,
        SubmitError::Stopped => ApiError::Stopped,
    }
}

/// The vector of one input, once the engine has said its last word on it.
async fn receive(mut stream: RequestStream, index: usize, record: &mut RequestRecord) -> Result<Vec<f32>, ApiError> {
    let mut vector = None;
    while let Some(event) = stream.next().await {
        match event {
            Event::Embedding(values) => vector = Some(values),
            Event::Finished { reason, usage, .. } => {
                let outcome = outcome(&reason, vector);
                record.finished(index, end_reason(&outcome), &usage);
                return outcome;
            }
            _ => {}
        }
    }
    record.finished(index, EndReason::Error, &Usage::default());
    Err(ApiError::Stopped)
}

fn outcome(reason: &FinishReason, vector: Option<Vec<f32>>) -> Result<Vec<f32>, ApiError> {
    match reason {
        FinishReason::Length | FinishReason::Stop(_) => vector.ok_or(ENGINE_FAULT),
        FinishReason::Deadline => Err(ApiError::RequestTimeout),
        FinishReason::QueueTimeout => Err(ApiError::QueueTimeout),
        FinishReason::Aborted => Err(ApiError::Aborted),
        FinishReason::Error(_) => Err(ENGINE_FAULT),
    }
}

fn end_reason<T>(outcome: &Result<T, ApiError>) -> EndReason {
    match outcome {
        Ok(_) => EndReason::Stop,
        Err(ApiError::RequestTimeout) => EndReason::Timeout,
        Err(ApiError::Aborted) => EndReason::Abort,
        Err(_) => EndReason::Error,
    }
}

fn told(mut vector: Vec<f32>, form: Form) -> Result<Vector, ApiError> {
    // In 64 bits no square of a 32-bit number is lost or too large.
    let length = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    if !length.is_finite() || length == 0.0 {
        return Err(NO_VECTOR);
    }
    if form.is_normal {
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
    Ok(match form.is_base64 {
        true => Vector::Base64(base64(&vector.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())),
        false => Vector::Numbers(vector),
    })
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = (0..3).fold(0, |bits, place| bits << 8 | u32::from(*group.get(place).unwrap_or(&0)));
        for place in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * place)) as usize & 63];
            text.push(if place <= group.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_have_length_one_whatever_their_size() {
        let form = Form { is_normal: true, is_base64: false };
        for scale in [1.0, 1e-30, 1e30, 1e38_f32] {
            let Ok(Vector::Numbers(vector)) = told(vec![3.0 * scale, -4.0 * scale.min(8e37)], form) else {
                panic!("a vector")
            };
            let length: f64 = vector.iter().map(|value| f64::from(*value).powi(2)).sum();
            assert!((length - 1.0).abs() < 1e-6, "{scale}: {vector:?}");
        }
        let as_it_is = told(vec![3.0, -4.0], Form { is_normal: false, ..form });
        assert_eq!(as_it_is, Ok(Vector::Numbers(vec![3.0, -4.0])));
        for bad in [vec![0.0, 0.0], vec![f32::NAN, 1.0], vec![f32::INFINITY], vec![]] {
            for is_normal in [true, false] {
                assert_eq!(told(bad.clone(), Form { is_normal, ..form }), Err(NO_VECTOR), "{bad:?}");
            }
        }
    }

    #[test]
    fn base64_is_that_of_rfc_4648() {
        let cases =
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("fooba", "Zm9vYmE=")];
        for (bytes, text) in cases {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xfb, 0xff, 0xfe]), "+//+");
        let form = Form { is_normal: false, is_base64: true };
        assert_eq!(told(vec![1.0], form), Ok(Vector::Base64("AACAPw==".into())), "little-endian");
    }

    #[test]
    fn only_an_end_with_a_vector_is_good() {
        assert_eq!(outcome(&FinishReason::Length, Some(vec![1.0])), Ok(vec![1.0]));
        assert_eq!(outcome(&FinishReason::Length, None), Err(ENGINE_FAULT));
        assert_eq!(outcome(&FinishReason::Error("x".into()), Some(vec![1.0])), Err(ENGINE_FAULT));
        assert_eq!(outcome(&FinishReason::Deadline, None), Err(ApiError::RequestTimeout));
        let error = of_input(ApiError::invalid("prompt", "must have at least one token"));
        assert_eq!(error.to_string(), "input: must have at least one token");
    }
}
