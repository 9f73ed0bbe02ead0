//! `/v1/embeddings`: one vector for each input.

use axum::Json;
use folio_engine::{EngineRequest, Event, FinishReason, Pooling, RequestStream, Usage};
use serde::Serialize;

use crate::answers::failure_reason;
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::fields::{Count, Fields, Flag, Request, Text, Word, Wrong};
use crate::observe::{EndReason, RequestRecord};
use crate::request::{Generate, Prompt, Prompts, RawParams, sampling};
use crate::service::{Call, Service, Serving};
use crate::text_pool::Prepared;
use crate::text_stream::{ENGINE_FAULT, failure};

const ROUTE: &str = "/v1/embeddings";
const NO_VECTOR: ApiError = ApiError::Failed("the model's embedding of this input is zero or not finite");

pub struct EmbeddingRequest {
    inputs: Vec<Prompt>,
    add_special_tokens: bool,
    pooling: Pooling,
    form: Form,
    params: RawParams,
}

/// The form of an embedding in the answer.
#[derive(Clone, Copy)]
struct Form {
    /// Whether vectors are scaled to length 1.
    is_normal: bool,
    /// As the bytes of its numbers, little-endian, rather than as numbers.
    is_base64: bool,
}

impl Request for EmbeddingRequest {
    type Bounds = Serving;

    fn read(fields: &mut Fields, serving: &Serving) -> Result<Self, Wrong> {
        let (bounds, limits) = (&serving.bounds, &serving.bounds.limits);
        let inputs = Prompts { vocab_size: bounds.vocab_size, most: limits.embedding_inputs };
        let inputs = fields.required("input", inputs, "A string, an array of token ids, or an array of either.")?;
        bounds.check_model(fields)?;
        let format = fields.optional(
            "encoding_format",
            Word(&["float", "base64"]),
            "Array of numbers, or base64 of little-endian 32-bit floats.",
        )?;
        dimensions(fields, serving)?;
        let normalize = fields.optional("normalize", Flag, "Whether embeddings are scaled to length 1.")?;
        let pooling = fields.optional(
            "pooling",
            Word(&["mean", "last"]),
            "Pooling of the hidden states: the mean over all tokens, or the last token.",
        )?;
        let add = fields.optional(
            "add_special_tokens",
            Flag,
            "Whether a prompt that is a string begins with the beginning-of-sequence token.",
        )?;
        let truncate_prompt = sampling::truncation(fields, bounds)?;
        let params = RawParams { truncate_prompt, ..sampling::scheduling(fields, bounds)? };
        fields.optional("user", Text::between(0, limits.user_chars), "Accepted and ignored: an id of the end user.")?;
        Ok(Self {
            inputs,
            add_special_tokens: add.unwrap_or(true),
            pooling: if pooling == Some("last") { Pooling::Last } else { Pooling::Mean },
            form: Form { is_normal: normalize.unwrap_or(true), is_base64: format == Some("base64") },
            params,
        })
    }
}

fn dimensions(fields: &mut Fields, serving: &Serving) -> Result<(), Wrong> {
    let why = "embeddings have the model's own size and cannot be shortened";
    match serving.model.embedding_size() {
        Some(size) => fields.optional("dimensions", Count::between(size, size), why).map(|_| ()),
        None => fields.refused("dimensions", &[], why),
    }
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
    let request: EmbeddingRequest = body.read(&service).await?;
    if !service.model.embeds {
        return Err(ApiError::invalid("model", "this model does not support embeddings"));
    }
    let generate = Generate::new(request.params, 1, &service.bounds)?;
    let inputs = service.text_pool.texts(request.inputs, request.add_special_tokens, &generate).await;
    let (inputs, _) = inputs.map_err(of_input)?;
    let requests = service.embedding_requests(&call, &inputs, request.pooling, &generate).map_err(of_input)?;
    let mut record = service.record(ROUTE, &call);
    let vectors = embed(&service, requests, &inputs, &mut record).await;
    let encoded = vectors.and_then(|vectors| vectors.into_iter().map(|vector| encode(vector, request.form)).collect());
    let encoded: Vec<Vector> = encoded.inspect_err(|error| record.answered(error.status().as_u16()))?;
    let entry = |(index, embedding)| Entry { object: "embedding", index, embedding };
    let data = encoded.into_iter().enumerate().map(entry).collect();
    let prompt_tokens = inputs.iter().map(|input| input.tokens.len()).sum();
    let usage = Used { prompt_tokens, total_tokens: prompt_tokens };
    Ok(Json(Answer { object: "list", data, model: service.model_name().to_owned(), usage }))
}

/// Names an error's prompt `input`, as this route does.
fn of_input(error: ApiError) -> ApiError {
    error.renamed(&[("prompt", "input")])
}

/// Their vectors, in order. As many at once as run at once: more would fill the queue for others.
async fn embed(
    service: &Service,
    requests: Vec<EngineRequest>,
    inputs: &[Prepared],
    record: &mut RequestRecord,
) -> Result<Vec<Vec<f32>>, ApiError> {
    let mut vectors = Vec::with_capacity(requests.len());
    let (mut requests, most) = (requests.into_iter(), service.bounds.max_seqs);
    while requests.len() > 0 {
        let group = requests.by_ref().take(most).map(|request| service.submit_embedding(request));
        let group = group.collect::<Result<Vec<RequestStream>, _>>()?;
        let first = vectors.len();
        inputs[first..first + group.len()].iter().for_each(|input| record.submitted(input.tokens.len(), 1, 0));
        for stream in group {
            let vector = receive(stream, vectors.len(), record).await?;
            vectors.push(vector);
        }
    }
    Ok(vectors)
}

/// The vector of one input, once the engine has said its last word on it.
async fn receive(mut stream: RequestStream, index: usize, record: &mut RequestRecord) -> Result<Vec<f32>, ApiError> {
    let mut vector = None;
    while let Some(event) = stream.next().await {
        match event {
            Event::Embedding(values) => vector = Some(values),
            Event::Finished { reason, usage, .. } => {
                if let FinishReason::Error(fault) = &reason {
                    record.failed(fault);
                }
                let outcome = outcome(&reason, vector);
                record.finished(index, outcome.as_ref().map_or_else(failure_reason, |_| EndReason::Stop), &usage);
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
        reason => Err(failure(reason)),
    }
}

fn encode(mut vector: Vec<f32>, form: Form) -> Result<Vector, ApiError> {
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
            let Ok(Vector::Numbers(vector)) = encode(vec![3.0 * scale, -4.0 * scale.min(8e37)], form) else {
                panic!("a vector")
            };
            let length: f64 = vector.iter().map(|value| f64::from(*value).powi(2)).sum();
            assert!((length - 1.0).abs() < 1e-6, "{scale}: {vector:?}");
        }
        let as_it_is = encode(vec![3.0, -4.0], Form { is_normal: false, ..form });
        assert_eq!(as_it_is, Ok(Vector::Numbers(vec![3.0, -4.0])));
        for bad in [vec![0.0, 0.0], vec![f32::NAN, 1.0], vec![f32::INFINITY], vec![]] {
            for is_normal in [true, false] {
                assert_eq!(encode(bad.clone(), Form { is_normal, ..form }), Err(NO_VECTOR), "{bad:?}");
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
        assert_eq!(encode(vec![1.0], form), Ok(Vector::Base64("AACAPw==".into())), "little-endian");
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
