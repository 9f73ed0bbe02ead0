//! One request as spans, and spans as OTLP's JSON: ids in hex, times and whole numbers as strings.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

const KIND_INTERNAL: u8 = 1;
const KIND_SERVER: u8 = 2;
const STATUS_ERROR: u8 = 2;

/// Context of a trace: the ids of its root span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    pub trace_id: u128,
    pub span_id: u64,
    /// The caller's span, where it sent one.
    pub parent: Option<u64>,
}

/// The caller's own span, from its `traceparent` header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    pub trace_id: u128,
    pub span_id: u64,
    pub sampled: bool,
}

/// Reads a W3C `traceparent`; one that is not as it should be counts as none.
pub fn parse_traceparent(header: &str) -> Option<Parent> {
    let version = hex(header.get(..2)?)? as u8;
    // Later versions may add fields behind those of the first.
    let is_whole = match version {
        0xff => false,
        0 => header.len() == 55,
        _ => header.len() == 55 || header.as_bytes().get(55) == Some(&b'-'),
    };
    if !is_whole || [2, 35, 52].iter().any(|&at| header.as_bytes().get(at) != Some(&b'-')) {
        return None;
    }
    let (trace_id, span_id) = (hex(header.get(3..35)?)?, hex(header.get(36..52)?)? as u64);
    let flags = hex(header.get(53..55)?)?;
    (trace_id != 0 && span_id != 0).then_some(Parent { trace_id, span_id, sampled: flags & 1 == 1 })
}

/// Lower case only, as the standard has it.
fn hex(digits: &str) -> Option<u128> {
    let is_hex = digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    is_hex.then(|| u128::from_str_radix(digits, 16).ok()).flatten()
}

#[derive(Clone, Debug, PartialEq)]
pub enum Attribute {
    Text(String),
    Texts(Vec<&'static str>),
    Count(u64),
    Real(f64),
}

impl Attribute {
    fn value(&self) -> Value {
        match self {
            Self::Text(text) => json!({"stringValue": text}),
            Self::Texts(texts) => {
                let values: Vec<_> = texts.iter().map(|text| json!({"stringValue": text})).collect();
                json!({"arrayValue": {"values": values}})
            }
            Self::Count(count) => json!({"intValue": count.to_string()}),
            Self::Real(number) => json!({"doubleValue": number}),
        }
    }
}

/// One request: a root span and its children.
#[derive(Clone, Debug)]
pub struct Trace {
    pub context: TraceContext,
    pub start: SystemTime,
    pub took: Duration,
    /// Name, begin and end, counted from the start.
    pub children: Vec<(&'static str, Duration, Duration)>,
    pub attributes: Vec<(&'static str, Attribute)>,
    pub error: Option<&'static str>,
}

impl Trace {
    pub fn num_spans(&self) -> usize {
        1 + self.children.len()
    }

    fn spans(&self) -> impl Iterator<Item = Value> {
        let TraceContext { trace_id, span_id, parent } = self.context;
        let attributes: Vec<_> =
            self.attributes.iter().map(|(key, value)| json!({"key": key, "value": value.value()})).collect();
        let status = self.error.map_or_else(|| json!({}), |error| json!({"code": STATUS_ERROR, "message": error}));
        let root = json!({
            "traceId": format!("{trace_id:032x}"),
            "spanId": format!("{span_id:016x}"),
            "parentSpanId": parent.map(|parent| format!("{parent:016x}")).unwrap_or_default(),
            "name": "llm_request",
            "kind": KIND_SERVER,
            "startTimeUnixNano": nanos(self.start, Duration::ZERO),
            "endTimeUnixNano": nanos(self.start, self.took),
            "attributes": attributes,
            "status": status,
        });
        let children = self.children.iter().enumerate().map(move |(index, (name, begin, end))| {
            json!({
                "traceId": format!("{trace_id:032x}"),
                "spanId": format!("{:016x}", child_id(span_id, index)),
                "parentSpanId": format!("{span_id:016x}"),
                "name": name,
                "kind": KIND_INTERNAL,
                "startTimeUnixNano": nanos(self.start, *begin),
                "endTimeUnixNano": nanos(self.start, *end),
                "status": {},
            })
        });
        std::iter::once(root).chain(children)
    }
}

/// An odd factor maps different numbers to different ones, so no two spans of a trace share an id.
fn child_id(span_id: u64, index: usize) -> u64 {
    span_id.wrapping_add((index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)).max(1)
}

fn nanos(start: SystemTime, after: Duration) -> String {
    (start.duration_since(UNIX_EPOCH).unwrap_or_default() + after).as_nanos().to_string()
}

/// The body of one post.
pub fn body(batch: &[Trace], service_name: &str) -> Value {
    let spans: Vec<_> = batch.iter().flat_map(Trace::spans).collect();
    let version = env!("CARGO_PKG_VERSION");
    json!({"resourceSpans": [{
        "resource": {"attributes": [
            {"key": "service.name", "value": {"stringValue": service_name}},
            {"key": "service.version", "value": {"stringValue": version}},
        ]},
        "scopeSpans": [{"scope": {"name": "folio", "version": version}, "spans": spans}],
    }]})
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

    #[test]
    fn a_traceparent_is_read_as_the_standard_says() {
        let good = format!("00-{TRACE}-b7ad6b7169203331-01");
        let parent = parse_traceparent(&good).expect("good");
        assert_eq!(
            (parent.trace_id, parent.span_id),
            (0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c, 0xb7ad_6b71_6920_3331)
        );
        assert!(parent.sampled);
        assert!(!parse_traceparent(&format!("00-{TRACE}-b7ad6b7169203331-00")).expect("good").sampled);
        assert!(parse_traceparent(&format!("cc-{TRACE}-b7ad6b7169203331-01-later")).is_some());
        let bad = [
            String::new(),
            format!("{good}-x"),
            format!("ff-{TRACE}-b7ad6b7169203331-01"),
            format!("cc-{TRACE}-b7ad6b7169203331-01x"),
            format!("00-{TRACE}-0000000000000000-01"),
            format!("00-{}-b7ad6b7169203331-01", "0".repeat(32)),
            format!("00-{}-b7ad6b7169203331-01", TRACE.to_uppercase()),
            format!("00_{TRACE}_b7ad6b7169203331_01"),
            format!("00-{TRACE}-b7ad6b716920333é-1"),
            format!("00-+{}-b7ad6b7169203331-01", &TRACE[1..]),
            "é".repeat(40),
        ];
        for header in bad {
            assert_eq!(parse_traceparent(&header), None, "{header}");
        }
    }

    #[test]
    fn numbers_and_times_are_written_as_otlp_wants_them() {
        let context = TraceContext { trace_id: 1, span_id: 2, parent: Some(3) };
        let trace = Trace {
            context,
            start: UNIX_EPOCH + Duration::from_secs(1_700_000_000),
            took: Duration::from_nanos(1_500_000_001),
            children: vec![("queue", Duration::ZERO, Duration::from_nanos(7))],
            attributes: vec![
                ("a", Attribute::Count(5)),
                ("b", Attribute::Real(0.5)),
                ("c", Attribute::Texts(vec!["x"])),
            ],
            error: Some("timeout"),
        };
        let spans: Vec<_> = trace.spans().collect();
        let root = &spans[0];
        assert_eq!(root["traceId"], "00000000000000000000000000000001");
        assert_eq!((&root["spanId"], &root["parentSpanId"]), (&json!("0000000000000002"), &json!("0000000000000003")));
        assert_eq!(root["startTimeUnixNano"], "1700000000000000000");
        assert_eq!(root["endTimeUnixNano"], "1700000001500000001");
        assert_eq!(root["status"], json!({"code": 2, "message": "timeout"}));
        assert_eq!(root["attributes"][0], json!({"key": "a", "value": {"intValue": "5"}}));
        assert_eq!(root["attributes"][1]["value"], json!({"doubleValue": 0.5}));
        assert_eq!(root["attributes"][2]["value"], json!({"arrayValue": {"values": [{"stringValue": "x"}]}}));
        assert_eq!(spans[1]["endTimeUnixNano"], "1700000000000000007");
        assert_eq!(spans[1]["parentSpanId"], root["spanId"]);
        assert_ne!(spans[1]["spanId"], root["spanId"]);
    }
}
