//! The exporter against collectors that take, refuse, hang and are not there.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::mpsc::{Receiver, channel};
use std::time::UNIX_EPOCH;

use serde_json::Value;

use super::*;

const LONG: Duration = Duration::from_secs(10);

/// A collector that answers with these statuses, one after the other and then the last one on, and
/// hands out bodies.
pub fn collector(statuses: &'static [u16]) -> (Endpoint, Receiver<Value>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address")).parse().expect("an endpoint");
    let (sender, bodies) = channel();
    std::thread::spawn(move || {
        for index in 0.. {
            let Ok((mut stream, _)) = listener.accept() else { return };
            let mut reader = BufReader::new(stream.try_clone().expect("a second handle"));
            let mut head = Vec::new();
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).expect("a head");
                if line == "\r\n" {
                    break;
                }
                head.push(line.trim_end().to_owned());
            }
            assert_eq!(head[0], "POST /v1/traces HTTP/1.1");
            assert!(head.contains(&"content-type: application/json".to_owned()), "{head:?}");
            let length = head.iter().find_map(|line| line.strip_prefix("content-length: ")).expect("a length");
            let mut body = vec![0; length.parse().expect("a number")];
            reader.read_exact(&mut body).expect("a body");
            let status = statuses[statuses.len().min(index + 1) - 1];
            if sender.send(serde_json::from_slice(&body).expect("JSON")).is_err() {
                return;
            }
            // A client may have gone.
            let _ = write!(stream, "HTTP/1.1 {status} x\r\ncontent-length: 2\r\n\r\n{{}}");
        }
    });
    (endpoint, bodies)
}

pub fn spans(body: &Value) -> &Vec<Value> {
    body["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().expect("spans")
}

fn trace(traces: &Traces, traceparent: Option<&str>) -> Trace {
    let second = Duration::from_secs(1);
    let children =
        vec![("queue", Duration::ZERO, second), ("prefill", second, 2 * second), ("decode", 2 * second, LONG)];
    let attributes = vec![("gen_ai.request.id", Attribute::Text("r".to_owned()))];
    let context = traces.context(traceparent).expect("a sampled trace");
    Trace { context, start: UNIX_EPOCH + LONG, took: LONG, children, attributes, error: None }
}

fn is_hex(value: &Value, digits: usize) -> bool {
    let text = value.as_str().unwrap_or_default();
    let is_hex = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    text.len() == digits && is_hex && text.bytes().any(|byte| byte != b'0')
}

#[tokio::test]
async fn a_collector_gets_spans_in_the_shape_of_otlp() {
    let (endpoint, bodies) = collector(&[200]);
    let traces = Traces::start(endpoint, "here");
    traces.submit(trace(&traces, None));
    traces.submit(trace(&traces, Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")));
    traces.flush().await;
    let body = bodies.recv_timeout(LONG).expect("a post");
    let resource = &body["resourceSpans"][0]["resource"]["attributes"][0];
    assert_eq!((&resource["key"], &resource["value"]["stringValue"]), (&"service.name".into(), &"here".into()));
    let spans = spans(&body);
    assert_eq!(spans.len(), 8);
    let mut ids = std::collections::BTreeSet::new();
    for (index, span) in spans.iter().enumerate() {
        assert!(is_hex(&span["traceId"], 32) && is_hex(&span["spanId"], 16), "{span}");
        assert!(ids.insert(span["spanId"].as_str()), "{span}: an id twice");
        let (start, end) = (span["startTimeUnixNano"].as_str(), span["endTimeUnixNano"].as_str());
        let nanos = |text: Option<&str>| text.expect("a string").parse::<u64>().expect("nanoseconds");
        assert!(nanos(start) >= 10_000_000_000 && nanos(start) <= nanos(end), "{span}");
        let root = &spans[index / 4 * 4];
        assert_eq!(span["traceId"], root["traceId"]);
        if index % 4 == 0 {
            assert_eq!((&span["name"], &span["kind"]), (&"llm_request".into(), &2.into()));
            assert_eq!(span["attributes"][0]["value"]["stringValue"], "r");
            assert!(span["status"].as_object().is_some_and(serde_json::Map::is_empty), "{span}");
        } else {
            assert_eq!(span["parentSpanId"], root["spanId"]);
            assert_eq!(
                (&span["name"], &span["kind"]),
                (&["queue", "prefill", "decode"][index % 4 - 1].into(), &1.into())
            );
        }
    }
    assert_eq!(spans[0]["parentSpanId"], "");
    assert_ne!(spans[0]["traceId"], spans[4]["traceId"]);
    assert_eq!(spans[4]["traceId"], "0af7651916cd43dd8448eb211c80319c");
    assert_eq!(spans[4]["parentSpanId"], "b7ad6b7169203331");
    assert_eq!((traces.exported(), traces.dropped()), (8, 0));
}

#[tokio::test]
async fn a_caller_that_does_not_trace_is_not_traced_and_a_bad_header_is_none() {
    let traces = Traces::start("http://127.0.0.1:9".parse().expect("an endpoint"), "here");
    assert_eq!(traces.context(Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")), None);
    let context = traces.context(Some("00-zz-01")).expect("a trace of its own");
    assert_eq!(context.parent, None);
}

#[tokio::test]
async fn a_full_batch_is_sent_at_once() {
    let (endpoint, bodies) = collector(&[200]);
    let traces = Traces::start(endpoint, "here");
    (0..BATCH_SPANS / 4).for_each(|_| traces.submit(trace(&traces, None)));
    let body = tokio::task::spawn_blocking(move || bodies.recv_timeout(BATCH_WAIT)).await.expect("no panic");
    assert_eq!(spans(&body.expect("a post before the wait is over")).len(), BATCH_SPANS);
}

#[tokio::test]
async fn what_failed_is_tried_once_more_and_what_was_refused_is_not() {
    for (statuses, posts, exported) in [(&[503, 200][..], 2, 4), (&[503, 500], 2, 0), (&[400], 1, 0)] {
        let (endpoint, bodies) = collector(statuses);
        let traces = Traces::start(endpoint, "here");
        traces.submit(trace(&traces, None));
        traces.flush().await;
        assert_eq!(bodies.try_iter().count(), posts, "{statuses:?}");
        assert_eq!((traces.exported(), traces.dropped()), (exported, 4 - exported), "{statuses:?}");
    }
}

#[tokio::test]
async fn a_collector_that_is_not_there_costs_spans_and_nothing_else() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address")).parse().expect("an endpoint");
    drop(listener);
    let traces = Traces::start(endpoint, "here");
    traces.submit(trace(&traces, None));
    traces.flush().await;
    assert_eq!((traces.exported(), traces.dropped()), (0, 4));
}

#[tokio::test]
async fn a_collector_that_hangs_holds_nobody_up() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address")).parse().expect("an endpoint");
    let traces = Traces::start(endpoint, "here");
    // Nothing is taken from the queue before this test waits for something.
    (0..QUEUE_TRACES + 10).for_each(|_| traces.submit(trace(&traces, None)));
    assert_eq!(traces.dropped(), 40);
    // The connection is accepted by the system and never read.
    timeout(LONG, traces.flush()).await.expect("an end");
    assert_eq!(traces.exported(), 0);
}
