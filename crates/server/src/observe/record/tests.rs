//! Tests of a request's traces in the metrics, the log and the spans.

use std::collections::BTreeMap;

use serde_json::Value;

use super::super::exposition::tests::parse;
use super::super::log::tests::Sink;
use super::super::log::{Log, LogFormat};
use super::super::observer::{ObserverConfig, Refusal};
use super::super::otlp::Traces;
use super::super::otlp::tests::{collector, spans};
use super::super::snapshot::Snapshot;
use super::*;

const LONG: Duration = Duration::from_secs(10);
const OWN: &str = "{model_name=\"m\",engine=\"0\"}";

fn start(request_id: &str, traceparent: Option<&'static str>) -> RequestStart<'static> {
    let (request_id, key_name) = (request_id.into(), Some("alice".into()));
    RequestStart { route: "/v1/completions", request_id, key_name, traceparent, arrived: Instant::now() }
}

fn usage(prompt_tokens: usize, cached_tokens: usize, completion_tokens: usize) -> Usage {
    let millis = Duration::from_millis;
    let timing = Timing { queued: millis(400), prefill: millis(700), decode: millis(30) };
    Usage { prompt_tokens, cached_tokens, completion_tokens, timing, ..Usage::default() }
}

fn samples(observer: &Observer) -> BTreeMap<String, f64> {
    parse(&observer.render(Snapshot::default()))
}

fn ended(samples: &BTreeMap<String, f64>, reason: &str) -> f64 {
    samples[&format!("vllm:request_success_total{{model_name=\"m\",engine=\"0\",finished_reason=\"{reason}\"}}")]
}

fn logging(sink: &Sink, traces: Option<Traces>) -> Observer {
    let log = Log::to(LogFormat::Json, Level::Info, sink.clone()).expect("a thread");
    let started = SystemTime::now();
    Observer::new(ObserverConfig { model_name: "m".into(), max_model_len: 1000, started, log, traces })
}

fn lines(observer: &Observer, sink: &Sink) -> Vec<Value> {
    observer.log().flush(LONG);
    sink.text().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn every_answer_is_counted_where_it_belongs() {
    let observer = Observer::quiet("m", 1000);
    let mut record = observer.begin(start("r", None));
    record.submitted(100, 2, 64);
    record.token(0, 1);
    record.token(1, 1);
    record.token(0, 3);
    record.finished(0, EndReason::Stop, &usage(100, 80, 4));
    record.finished(0, EndReason::Error, &usage(100, 80, 4)); // it ended already
    record.finished(1, EndReason::Length, &usage(100, 99, 1));
    record.token(7, 1); // there is no such answer
    record.finished(7, EndReason::Stop, &usage(1, 1, 1));
    drop(record);
    let samples = samples(&observer);
    let get = |name: &str| samples[&format!("vllm:{name}{OWN}")];
    assert_eq!(get("time_to_first_token_seconds_count"), 2.0);
    assert_eq!(get("inter_token_latency_seconds_count"), 3.0);
    assert_eq!(get("e2e_request_latency_seconds_count"), 2.0);
    assert_eq!((get("request_queue_time_seconds_sum"), get("request_prefill_time_seconds_sum")), (0.8, 1.4));
    assert_eq!((get("request_decode_time_seconds_sum"), get("request_inference_time_seconds_sum")), (0.06, 1.46));
    // An answer of one token has no time between tokens.
    assert_eq!(get("request_time_per_output_token_seconds_count"), 1.0);
    assert_eq!(get("request_time_per_output_token_seconds_sum"), 0.01);
    assert_eq!((get("request_prompt_tokens_sum"), get("request_generation_tokens_sum")), (200.0, 5.0));
    assert_eq!(get("request_prefill_kv_computed_tokens_sum"), 21.0);
    assert_eq!((get("request_params_n_sum"), get("request_params_n_count")), (2.0, 1.0));
    assert_eq!((get("request_params_max_tokens_sum"), get("request_params_max_tokens_count")), (128.0, 2.0));
    assert_eq!(get("request_max_num_generation_tokens_count"), 1.0);
    assert_eq!(get("request_max_num_generation_tokens_sum"), 4.0);
    assert_eq!((ended(&samples, "stop"), ended(&samples, "length"), ended(&samples, "error")), (1.0, 1.0, 0.0));
}

#[test]
fn a_token_that_is_not_sent_is_a_first_token_too() {
    let observer = Observer::quiet("m", 1000);
    let mut record = observer.begin(start("r", None));
    record.submitted(10, 2, 8);
    record.token(0, 0);
    record.finished(0, EndReason::Stop, &usage(10, 0, 1));
    record.finished(1, EndReason::Timeout, &usage(10, 0, 0));
    drop(record);
    let samples = samples(&observer);
    assert_eq!(samples[&format!("vllm:time_to_first_token_seconds_count{OWN}")], 1.0);
    assert_eq!(samples[&format!("vllm:inter_token_latency_seconds_count{OWN}")], 0.0);
}

#[test]
fn a_request_that_is_dropped_was_left_by_its_client() {
    let observer = Observer::quiet("m", 1000);
    let mut record = observer.begin(start("r", None));
    record.submitted(10, 1, 8);
    record.submitted(20, 1, 8);
    record.finished(0, EndReason::Stop, &usage(10, 0, 2));
    drop(record);
    let mut record = observer.begin(start("r", None));
    record.submitted(10, 1, 8);
    record.answered(500);
    drop(record);
    drop(observer.begin(start("never submitted", None)));
    let samples = samples(&observer);
    assert_eq!((ended(&samples, "stop"), ended(&samples, "abort")), (1.0, 2.0));
    assert_eq!(samples["folio:requests_abandoned_total"], 1.0, "one that was answered was not left");
    assert_eq!(samples[&format!("vllm:e2e_request_latency_seconds_count{OWN}")], 1.0);
}

#[test]
fn a_request_leaves_one_line() {
    let sink = Sink::default();
    let observer = logging(&sink, None);
    let mut record = observer.begin(start("r\n1", None));
    record.submitted(10, 1, 8);
    record.token(0, 2);
    record.finished(0, EndReason::Length, &usage(10, 4, 8));
    drop(record);
    let mut record = observer.begin(start("r2", None));
    record.submitted(10, 2, 8);
    record.token(1, 3);
    drop(record);
    let mut record = observer.begin(start("r3", None));
    record.submitted(10, 1, 8);
    record.answered(504);
    record.finished(0, EndReason::Timeout, &usage(10, 4, 0));
    drop(record);
    drop(observer.begin(start("never submitted", None)));
    let lines = lines(&observer, &sink);
    assert_eq!(lines.len(), 3, "{lines:?}");
    let check = |line: &Value, expected: &[(&str, Value)]| {
        expected.iter().for_each(|(name, value)| assert_eq!(&line[*name], value, "{name} of {line}"));
    };
    check(&lines[0], &[("request_id", "r\n1".into()), ("key", "alice".into()), ("route", "/v1/completions".into())]);
    check(&lines[0], &[("status", 200.into()), ("prompt_tokens", 10.into()), ("cached_tokens", 4.into())]);
    check(&lines[0], &[("completion_tokens", 8.into()), ("finish_reason", "length".into()), ("level", "info".into())]);
    assert!(lines[0]["ttft_ms"].as_f64() <= lines[0]["total_ms"].as_f64(), "{}", lines[0]);
    check(&lines[1], &[("status", 499.into()), ("completion_tokens", 3.into()), ("finish_reason", "abort".into())]);
    check(&lines[2], &[("status", 504.into()), ("finish_reason", "timeout".into()), ("level", "warn".into())]);
    check(&lines[2], &[("ttft_ms", Value::Null), ("abort", Value::Null)]);
}

#[test]
fn refusals_and_panics_are_counted_and_logged() {
    let sink = Sink::default();
    let observer = logging(&sink, None);
    let refusal = Refusal {
        route: "/v1/messages",
        request_id: "q",
        key_name: None,
        status: 429,
        code: Some("rate_limit_exceeded"),
        arrived: Instant::now(),
    };
    observer.refused(&refusal);
    observer.refused(&Refusal { status: 503, code: None, ..refusal });
    observer.panicked("a route");
    let samples = samples(&observer);
    assert_eq!(samples["folio:refusals_total{status=\"429\"}"], 1.0);
    assert_eq!((samples["folio:refusals_total{status=\"503\"}"], samples["folio:panics_total"]), (1.0, 1.0));
    let lines = lines(&observer, &sink);
    assert_eq!((&lines[0]["level"], &lines[0]["code"]), (&"info".into(), &"rate_limit_exceeded".into()));
    assert_eq!((&lines[1]["level"], &lines[1]["status"]), (&"warn".into(), &503.into()));
    assert_eq!((&lines[2]["level"], &lines[2]["in"]), (&"error".into(), &"a route".into()));
}

#[tokio::test]
async fn a_request_becomes_a_trace() {
    let (endpoint, bodies) = collector(&[200]);
    let sink = Sink::default();
    let observer = logging(&sink, Some(Traces::start(endpoint, "here")));
    drop(observer.begin(start("never submitted", None)));
    let mut record =
        observer.begin(start("unsampled", Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")));
    record.submitted(1, 1, 1);
    drop(record);
    let mut record = observer.begin(start("r", Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")));
    record.submitted(10, 2, 8);
    record.token(0, 1);
    record.finished(0, EndReason::Stop, &usage(10, 4, 3));
    record.finished(1, EndReason::Error, &usage(10, 4, 2));
    drop(record);
    observer.shutdown().await;
    let body = bodies.try_recv().expect("a post");
    let spans = spans(&body);
    let names: Vec<_> = spans.iter().map(|span| span["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["llm_request", "queue", "prefill", "decode"]);
    assert_eq!(spans[0]["parentSpanId"], "b7ad6b7169203331");
    assert_eq!(spans[0]["status"]["message"], "error");
    let attributes: BTreeMap<_, _> = spans[0]["attributes"]
        .as_array()
        .expect("attributes")
        .iter()
        .map(|attribute| (attribute["key"].as_str().expect("a key"), &attribute["value"]))
        .collect();
    assert_eq!(attributes["gen_ai.request.id"]["stringValue"], "r");
    assert_eq!(attributes["gen_ai.response.model"]["stringValue"], "m");
    assert_eq!(attributes["gen_ai.request.n"]["intValue"], "2");
    assert_eq!(attributes["gen_ai.usage.prompt_tokens"]["intValue"], "10");
    assert_eq!(attributes["gen_ai.usage.completion_tokens"]["intValue"], "5");
    assert_eq!(attributes["gen_ai.latency.time_in_queue"]["doubleValue"], 0.4);
    assert!(attributes["gen_ai.latency.time_to_first_token"]["doubleValue"].is_f64());
    let nanos = |span: &Value, name: &str| span[name].as_str().expect("a time").parse::<u64>().expect("nanoseconds");
    for pair in spans[1..].windows(2) {
        assert_eq!(nanos(&pair[0], "endTimeUnixNano"), nanos(&pair[1], "startTimeUnixNano"));
    }
    assert_eq!(nanos(&spans[1], "endTimeUnixNano") - nanos(&spans[1], "startTimeUnixNano"), 400_000_000);
    assert_eq!(samples(&observer)["folio:trace_spans_exported_total"], 4.0);
}
