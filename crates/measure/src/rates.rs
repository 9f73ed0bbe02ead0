//! The report of `folio bench latency` and `throughput`: as it is printed with `--json`, and as a
//! program reads it back.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::stats::Median;

/// Fields are in the order in which they are printed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    pub model: String,
    pub device: String,
    /// Parts of the start and the seconds that each took.
    pub start: Value,
    pub threads: usize,
    pub input_len: usize,
    pub output_len: usize,
    pub rounds: usize,
    pub ceilings: Ceilings,
    pub memory: Memory,
    /// One for each number of streams.
    pub results: Vec<Streams>,
    /// The start in words; not part of the JSON.
    #[serde(skip)]
    pub start_described: String,
    /// Bytes of weights that a decode step of one stream reads; not part of the JSON.
    #[serde(skip)]
    pub decode_bytes: u64,
}

/// Peak rates of the device: the best of all measurements.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    pub read_bytes_per_s: f64,
    pub bf16_flops: f64,
    #[serde(default)]
    pub others: Vec<Ceiling>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ceiling {
    /// The unit that is counted.
    pub what: String,
    pub per_s: f64,
}

impl Ceilings {
    /// A peak rate by the unit that it counts.
    pub fn other(&self, what: &str) -> Option<f64> {
        self.others.iter().find(|other| other.what == what).map(|other| other.per_s)
    }
}

/// Bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    pub weights: u64,
    pub kv: u64,
    pub activations: u64,
    pub resident_peak_loading: Option<u64>,
}

/// Figures of one number of concurrent streams.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Streams {
    pub streams: usize,
    pub first_token_ms: f64,
    /// Known for one stream only: with several, the first token waits for other prompts.
    pub prefill_tokens_per_s: Option<f64>,
    pub prefill_of_bf16_peak: Option<f64>,
    /// The rate of all streams together, while every stream decodes.
    pub decode_tokens_per_s: Option<f64>,
    pub decode_of_read_bandwidth: Option<f64>,
    pub decode_tokens_per_byte_read: Option<PerByte>,
    pub decode_of_bf16_peak: Option<f64>,
    pub itl_ms_p50: f64,
    pub itl_ms_p95: f64,
    pub itl_ms_p99: f64,
    /// Over the whole run, as the next one.
    pub total_tokens_per_s: f64,
    pub input_tokens_per_s: f64,
    /// Unused slots of held blocks, as a share of all slots held.
    pub waste: f64,
    pub waste_bound: f64,
    pub mean_live_length: f64,
    /// Slots of held blocks, summed over all steps; not part of the JSON.
    #[serde(skip)]
    pub slots_held: u64,
}

/// Tokens decoded for each byte that the device read beside a round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PerByte {
    pub median: f64,
    pub low: f64,
    pub high: f64,
    /// One for each round.
    pub pairs: Vec<f64>,
}

impl PerByte {
    pub fn new(Median { middle, low, high }: Median, pairs: Vec<f64>) -> Self {
        Self { median: middle, low, high, pairs }
    }
}

impl Rates {
    pub fn json(&self) -> Value {
        serde_json::to_value(self).expect("numbers and texts")
    }

    /// Reads the JSON that `folio bench` printed.
    pub fn parse(json: &str) -> Result<Self> {
        serde_json::from_str(json).context("folio bench printed no report")
    }
}

#[cfg(test)]
pub mod tests {
    use serde_json::json;

    use super::*;

    /// A report as `folio bench latency --json` prints it.
    pub fn printed() -> Value {
        json!({
            "model": "m", "device": "2 threads", "start": [{"what": "weights", "seconds": 0.5, "remark": null}],
            "threads": 2, "input_len": 16, "output_len": 65, "rounds": 2,
            "ceilings": {
                "read_bytes_per_s": 30e9, "bf16_flops": 400e9,
                "others": [{"what": "f32 FLOP", "per_s": 1e9}, {"what": "int8 operations", "per_s": 900e9}],
            },
            "memory": {"weights": 1, "kv": 2, "activations": 3, "resident_peak_loading": null},
            "results": [{
                "streams": 1, "first_token_ms": 2.0, "prefill_tokens_per_s": 8000.0, "prefill_of_bf16_peak": 0.5,
                "decode_tokens_per_s": 60.0, "decode_of_read_bandwidth": 0.9,
                "decode_tokens_per_byte_read": {"median": 1.5e-9, "low": 1e-9, "high": 2e-9, "pairs": [1e-9, 2e-9]},
                "decode_of_bf16_peak": 0.01, "itl_ms_p50": 1.0, "itl_ms_p95": 1.5, "itl_ms_p99": 2.0,
                "total_tokens_per_s": 50.0, "input_tokens_per_s": 100.0, "waste": 0.1, "waste_bound": 0.2,
                "mean_live_length": 40.0,
            }],
        })
    }

    #[test]
    fn a_report_is_printed_as_it_was_read() {
        let text = printed().to_string();
        let rates = Rates::parse(&text).expect("a report");
        assert_eq!(rates.json().to_string(), text, "the same keys in the same order");
        assert_eq!(rates.results[0].decode_tokens_per_byte_read.as_ref().expect("pairs").pairs, [1e-9, 2e-9]);
        assert_eq!(rates.ceilings.other("int8 operations"), Some(900e9));
        assert_eq!(rates.ceilings.other("bytes copied"), None);
    }

    #[test]
    fn fields_that_an_older_program_did_not_print_may_be_missing() {
        let mut printed = printed();
        printed["results"] = json!([{"streams": 1, "decode_tokens_per_s": 60.0}]);
        let rates = Rates::parse(&printed.to_string()).expect("a report");
        assert_eq!(rates.results[0].decode_tokens_per_byte_read, None);
        printed["ceilings"] = json!({});
        assert!(Rates::parse(&printed.to_string()).is_err());
        assert!(Rates::parse("").is_err());
    }
}
