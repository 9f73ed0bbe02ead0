//! Metrics that are counted as events happen, with the names, labels and buckets of vLLM, which
//! routers and dashboards read. Folio's own metrics begin with `folio:`.

use super::exposition::Exposition;
use super::record::EndReason;
use super::registry::{Counter, Histogram, Registry};

const TTFT_SECONDS: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
const TOKEN_SECONDS: [f64; 19] =
    [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
const REQUEST_SECONDS: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
const SAMPLES: [f64; 5] = [1.0, 2.0, 5.0, 10.0, 20.0];

/// Every status that the catalogue of errors and the layers below it answer with; others count as
/// `other`.
const REFUSALS: [u16; 15] = [400, 401, 403, 404, 405, 408, 411, 413, 415, 421, 429, 431, 500, 503, 504];

/// Bounds of buckets: 1, 2, 5, 10, ... up to `most`.
fn one_two_five(most: usize) -> Vec<f64> {
    let powers = std::iter::successors(Some(1usize), |power| power.checked_mul(10));
    let values = powers.flat_map(|power| [1, 2, 5].map(|factor| power.saturating_mul(factor)));
    values.take_while(|&value| value <= most && value < usize::MAX).map(|value| value as f64).collect()
}

/// Handles on everything that is counted as it happens.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    pub time_to_first_token: Histogram,
    pub inter_token_latency: Histogram,
    pub time_per_output_token: Histogram,
    pub e2e: Histogram,
    pub queue: Histogram,
    pub inference: Histogram,
    pub prefill: Histogram,
    pub decode: Histogram,
    pub prompt_tokens: Histogram,
    pub generation_tokens: Histogram,
    pub max_generation_tokens: Histogram,
    pub prefill_computed: Histogram,
    pub params_n: Histogram,
    pub params_max_tokens: Histogram,
    ended: [Counter; EndReason::ALL.len()],
    pub abandoned: Counter,
    refusals: Vec<Counter>,
    pub panics: Counter,
}

impl Metrics {
    pub fn new(model_name: &str, max_model_len: usize, started_seconds: f64) -> Self {
        let mut registry = Registry::default();
        let r = &mut registry;
        let own = [("model_name", model_name), ("engine", "0")];
        let with = |name, value| [own[0], own[1], (name, value)];
        let tokens = one_two_five(max_model_len);
        let ended = EndReason::ALL.map(|reason| {
            let help = "Finished requests, by reason.";
            r.counter("vllm:request_success_total", help, &with("finished_reason", reason.name()))
        });
        for (state, value) in [("awake", 1.0), ("weights_offloaded", 0.0), ("discard_all", 0.0)] {
            let help = "State of the engine; it is always awake.";
            r.gauge("vllm:engine_sleep_state", help, &with("sleep_state", state)).set(value);
        }
        let mut seconds = |name, help, bounds: &[f64]| r.seconds(name, help, &own, bounds);
        let request = |r: &mut dyn FnMut(_, _, &[f64]) -> Histogram, name, help| r(name, help, &REQUEST_SECONDS);
        let time_to_first_token = seconds(
            "vllm:time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            &TTFT_SECONDS,
        );
        let inter_token_latency =
            seconds("vllm:inter_token_latency_seconds", "Time between two tokens of an answer.", &TOKEN_SECONDS);
        let time_per_output_token = seconds(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of an answer.",
            &TOKEN_SECONDS,
        );
        let e2e = request(
            &mut seconds,
            "vllm:e2e_request_latency_seconds",
            "Time from a request's arrival to its last token.",
        );
        let queue = request(&mut seconds, "vllm:request_queue_time_seconds", "Time of a request in the queue.");
        let inference = request(
            &mut seconds,
            "vllm:request_inference_time_seconds",
            "Time from a request's first step to its end.",
        );
        let prefill = request(
            &mut seconds,
            "vllm:request_prefill_time_seconds",
            "Time from a request's first step to its first token.",
        );
        let decode =
            request(&mut seconds, "vllm:request_decode_time_seconds", "Time from a request's first token to its last.");
        let mut counts = |name, help, bounds: &[f64]| r.counts(name, help, &own, bounds);
        let prompt_tokens = counts("vllm:request_prompt_tokens", "Tokens of a prompt.", &tokens);
        let generation_tokens = counts("vllm:request_generation_tokens", "Tokens of an answer.", &tokens);
        let max_generation_tokens =
            counts("vllm:request_max_num_generation_tokens", "Tokens of a prompt's longest answer.", &tokens);
        let prefill_computed = counts(
            "vllm:request_prefill_kv_computed_tokens",
            "Tokens of a prompt that were not in the prefix cache.",
            &tokens,
        );
        let params_n = counts("vllm:request_params_n", "Requested number of answers to a prompt.", &SAMPLES);
        let params_max_tokens = counts("vllm:request_params_max_tokens", "Maximum tokens of an answer.", &tokens);
        let help = "Requests whose client disconnected or read too slowly.";
        let abandoned = r.counter("folio:requests_abandoned_total", help, &[]);
        let statuses = REFUSALS.iter().map(u16::to_string).chain(["other".to_owned()]);
        let refusals = statuses
            .map(|status| {
                r.counter("folio:refusals_total", "Refused requests, by status.", &[("status", status.as_str())])
            })
            .collect();
        let panics = r.counter("folio:panics_total", "Panics that were caught; each is a bug.", &[]);
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        r.gauge("folio:build_info", "Version of the server.", &version).set(1.0);
        r.gauge("process_start_time_seconds", "Start of the process, in Unix seconds.", &[]).set(started_seconds);
        Self {
            time_to_first_token,
            inter_token_latency,
            time_per_output_token,
            e2e,
            queue,
            inference,
            prefill,
            decode,
            prompt_tokens,
            generation_tokens,
            max_generation_tokens,
            prefill_computed,
            params_n,
            params_max_tokens,
            ended,
            abandoned,
            refusals,
            panics,
            registry,
        }
    }

    pub fn ended(&self, reason: EndReason) -> &Counter {
        &self.ended[reason as usize]
    }

    pub fn refusals(&self, status: u16) -> &Counter {
        let index = REFUSALS.iter().position(|&known| known == status).unwrap_or(REFUSALS.len());
        &self.refusals[index]
    }

    pub fn write(&self, out: &mut Exposition) {
        self.registry.write(out);
    }
}

#[cfg(test)]
mod tests {
    use super::super::exposition::tests::parse;
    use super::*;

    fn rendered(metrics: &Metrics) -> std::collections::BTreeMap<String, f64> {
        let mut out = Exposition::default();
        metrics.write(&mut out);
        parse(&out.into_text())
    }

    #[test]
    fn token_buckets_end_at_the_context() {
        assert_eq!(one_two_five(100), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!(one_two_five(4096).last(), Some(&2000.0));
        assert_eq!(one_two_five(0), [0.0; 0]);
        assert!(one_two_five(usize::MAX).len() < 60);
    }

    #[test]
    fn histograms_have_the_buckets_that_dashboards_know() {
        let samples = rendered(&Metrics::new("m", 8192, 0.0));
        let bounds = |name: &str| {
            let prefix = format!("{name}_bucket{{model_name=\"m\",engine=\"0\",le=\"");
            let bounds = samples.keys().filter_map(|series| series.strip_prefix(&prefix)?.strip_suffix("\"}"));
            let mut bounds: Vec<f64> =
                bounds.filter(|bound| *bound != "+Inf").map(|bound| bound.parse().expect("a bound")).collect();
            bounds.sort_by(f64::total_cmp);
            bounds
        };
        assert_eq!(bounds("vllm:time_to_first_token_seconds"), TTFT_SECONDS);
        for name in ["vllm:inter_token_latency_seconds", "vllm:request_time_per_output_token_seconds"] {
            assert_eq!(bounds(name), TOKEN_SECONDS, "{name}");
        }
        for name in ["e2e_request_latency", "request_queue_time", "request_inference_time"] {
            assert_eq!(bounds(&format!("vllm:{name}_seconds")), REQUEST_SECONDS, "{name}");
        }
        for name in ["request_prefill_time", "request_decode_time"] {
            assert_eq!(bounds(&format!("vllm:{name}_seconds")), REQUEST_SECONDS, "{name}");
        }
        let tokens = ["request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"];
        for name in tokens.into_iter().chain(["request_params_max_tokens", "request_prefill_kv_computed_tokens"]) {
            assert_eq!(bounds(&format!("vllm:{name}")), one_two_five(8192), "{name}");
        }
        assert_eq!(bounds("vllm:request_params_n"), SAMPLES);
    }

    #[test]
    fn every_reason_and_status_has_a_counter_of_its_own() {
        let metrics = Metrics::new("a \"model\"", 100, 12.5);
        EndReason::ALL.into_iter().enumerate().for_each(|(count, reason)| metrics.ended(reason).add(count as u64));
        [429, 400, 429, 418].into_iter().for_each(|status| metrics.refusals(status).add(1));
        let samples = rendered(&metrics);
        for (count, reason) in EndReason::ALL.into_iter().enumerate() {
            let own = "model_name=\"a \\\"model\\\"\",engine=\"0\"";
            let series = format!("vllm:request_success_total{{{own},finished_reason=\"{}\"}}", reason.name());
            assert_eq!(samples[&series], count as f64);
        }
        for (status, count) in [("429", 2.0), ("400", 1.0), ("other", 1.0), ("503", 0.0)] {
            assert_eq!(samples[&format!("folio:refusals_total{{status=\"{status}\"}}")], count);
        }
        assert_eq!(samples["process_start_time_seconds"], 12.5);
        assert_eq!(samples[&format!("folio:build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"))], 1.0);
    }
}
