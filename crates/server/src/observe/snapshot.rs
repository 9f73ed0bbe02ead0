//! Figures that others keep and hand in when metrics are asked for: the engine's, the connections',
//! the stores'.

use std::sync::Arc;
use std::time::Duration;

use folio_engine::{EngineStats, GroupStats, ITERATION_BOUNDS};

use super::exposition::{Exposition, Kind, labels};

/// Plain numbers as of now; what there is none of stays at its default.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// State of the engine; its counters count since the start of the process.
    pub engine: EngineStats,
    /// Tokens of a KV block.
    pub block_tokens: usize,
    /// Times that the engine was started anew after a fault.
    pub engine_restarts: u64,
    /// How long the engine has got nowhere while there was work; zero if all is well.
    pub stalled: Duration,
    pub connections_open: usize,
    /// Requests under way, by the name of their key.
    pub in_flight: Vec<(Arc<str>, usize)>,
    /// Prompts that wait to be templated and tokenized.
    pub prompt_pool_queue: usize,
    pub stored_responses: usize,
    pub stored_response_bytes: usize,
    pub log_lines_dropped: u64,
    pub spans_exported: u64,
    pub spans_dropped: u64,
}

impl Snapshot {
    /// The part under vLLM's names.
    pub fn write_vllm(&self, out: &mut Exposition, model_name: &str) {
        let own = labels(&[("model_name", model_name), ("engine", "0")]);
        let with = |name, value: &str| labels(&[("model_name", model_name), ("engine", "0"), (name, value)]);
        let (stats, scheduler) = (&self.engine, &self.engine.scheduler);
        let mut gauge = |name, help, value: f64| out.single(name, Kind::Gauge, help, &own, value);
        gauge("vllm:num_requests_running", "Running requests.", scheduler.running as f64);
        gauge("vllm:num_requests_waiting", "Queued requests.", scheduler.waiting as f64);
        // Layer groups have separate pools: the fullest one limits admission.
        let usage = scheduler.groups.iter().map(used_share).fold(0.0, f64::max);
        gauge("vllm:kv_cache_usage_perc", "Fraction of the KV blocks that running requests hold.", usage);
        let help = "Queued requests, by reason; the engine knows one reason.";
        out.family("vllm:num_requests_waiting_by_reason", Kind::Gauge, help);
        for (reason, value) in [("capacity", scheduler.waiting), ("deferred", 0)] {
            out.sample("vllm:num_requests_waiting_by_reason", &with("reason", reason), value);
        }
        let blocks = scheduler.groups.iter().map(|group| group.blocks_total).max().unwrap_or(0);
        let (block_tokens, blocks) = (self.block_tokens.to_string(), blocks.to_string());
        let info = [("block_size", block_tokens.as_str()), ("num_gpu_blocks", blocks.as_str()), ("engine", "0")];
        out.single("vllm:cache_config_info", Kind::Gauge, "Layout of the KV cache.", &labels(&info), 1.0);

        // A block of the host tier comes from outside the device's cache, as from one of vLLM's
        // connectors.
        let hits = scheduler.hit_tokens;
        let host_hits = scheduler.host_hit_tokens.min(hits);
        let device_hits = hits - host_hits;
        let computed = scheduler.prompt_tokens.saturating_sub(hits);
        let has_host = scheduler.groups.iter().any(|group| group.host_slots_total > 0);
        let host_queries = if has_host { scheduler.prompt_tokens.saturating_sub(device_hits) } else { 0 };
        let mut counter = |name, help, value: u64| out.single(name, Kind::Counter, help, &own, value);
        let help = "Prompt tokens looked up in the prefix cache.";
        counter("vllm:prefix_cache_queries_total", help, scheduler.prompt_tokens);
        counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache on the device.", device_hits);
        let help = "Prompt tokens looked up in the host tier.";
        counter("vllm:external_prefix_cache_queries_total", help, host_queries);
        counter("vllm:external_prefix_cache_hits_total", "Prompt tokens found in the host tier.", host_hits);
        counter("vllm:num_preemptions_total", "Preemptions of running requests.", scheduler.preemptions);
        counter("vllm:prompt_tokens_total", "Prompt tokens of admitted requests.", scheduler.prompt_tokens);
        counter("vllm:prompt_tokens_cached_total", "Prompt tokens found in a cache.", hits);
        counter("vllm:generation_tokens_total", "Generated tokens.", stats.tokens_sampled);
        out.family("vllm:prompt_tokens_by_source_total", Kind::Counter, "Prompt tokens, by source.");
        let sources =
            [("local_compute", computed), ("local_cache_hit", device_hits), ("external_kv_transfer", host_hits)];
        for (source, value) in sources {
            out.sample("vllm:prompt_tokens_by_source_total", &with("source", source), value);
        }
        self.write_speculation(out, &own, &with);
        let tokens = &stats.iteration_tokens;
        out.family("vllm:iteration_tokens_total", Kind::Histogram, "Tokens of a step.");
        let bounds = ITERATION_BOUNDS.map(|bound| bound as f64);
        out.histogram("vllm:iteration_tokens_total", &own, &bounds, &tokens.counts, tokens.sum);
    }

    /// Metrics of drafts; omitted if there never were any, as in vLLM.
    fn write_speculation(&self, out: &mut Exposition, own: &str, with: &dyn Fn(&'static str, &str) -> String) {
        let speculation = &self.engine.speculation;
        if speculation.drafts == 0 {
            return;
        }
        let mut counter = |name, help, value: u64| out.single(name, Kind::Counter, help, own, value);
        counter("vllm:spec_decode_num_drafts_total", "Verified drafts.", speculation.drafts);
        counter("vllm:spec_decode_num_draft_tokens_total", "Draft tokens.", speculation.draft_tokens);
        let help = "Accepted draft tokens.";
        counter("vllm:spec_decode_num_accepted_tokens_total", help, speculation.accepted_tokens);
        let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
        out.family(name, Kind::Counter, "Accepted draft tokens, by position in the draft.");
        for (position, count) in speculation.accepted_per_position.iter().enumerate() {
            out.sample(name, &with("position", &position.to_string()), *count);
        }
        let mut seconds = |name, help, value: Duration| {
            out.single(name, Kind::Counter, help, "", value.as_secs_f64());
        };
        seconds("folio:drafting_seconds_total", "Time spent drafting.", speculation.drafting);
        seconds("folio:speculating_seconds_total", "Time of decode steps, drafting included.", speculation.steps);
        let help = "Decode-only steps while a drafting method is configured.";
        out.single("folio:speculating_steps_total", Kind::Counter, help, "", speculation.passes);
    }

    /// The part that is ours alone.
    pub fn write_folio(&self, out: &mut Exposition) {
        let (stats, scheduler) = (&self.engine, &self.engine.scheduler);
        let mut counter = |name, help, value: u64| out.single(name, Kind::Counter, help, "", value);
        counter("folio:engine_restarts_total", "Restarts of the engine after a fault.", self.engine_restarts);
        counter("folio:steps_total", "Successful steps.", stats.steps_done);
        counter("folio:steps_failed_total", "Failed steps.", stats.steps_failed);
        counter("folio:samples_ended_total", "Ended answers, for any reason.", stats.samples_ended);
        counter("folio:requests_expired_total", "Requests that exceeded their deadline.", scheduler.expired);
        counter("folio:tokens_computed_total", "Rows of all steps.", stats.tokens_computed);
        let help = "Computed prompt tokens; a preempted request counts again.";
        counter("folio:prompt_tokens_computed_total", help, stats.prompt_tokens_computed);
        counter("folio:disk_chunks_fetched_total", "Chunks read from the disk tier.", scheduler.disk_fetched);
        counter(
            "folio:disk_chunks_failed_total",
            "Chunks that could not be read from the disk tier.",
            scheduler.disk_failed,
        );
        if let Some(disk) = &stats.disk {
            let help = "Failed writes to the disk tier.";
            counter("folio:disk_store_failures_total", help, disk.store_failures);
        }
        let help = "Batches of KV events dropped because the publisher's queue was full.";
        counter("folio:kv_event_batches_lost_total", help, stats.kv_event_batches_lost);
        counter("folio:log_lines_dropped_total", "Dropped log lines.", self.log_lines_dropped);
        counter("folio:trace_spans_exported_total", "Trace spans that the collector accepted.", self.spans_exported);
        counter(
            "folio:trace_spans_dropped_total",
            "Trace spans dropped before the collector accepted them.",
            self.spans_dropped,
        );

        let mut gauge = |name, help, value: f64| out.single(name, Kind::Gauge, help, "", value);
        let help = "Time since the engine last made progress while it had work.";
        gauge("folio:engine_stalled_seconds", help, self.stalled.as_secs_f64());
        let help = "Expected time to first token of a request that arrives now.";
        gauge("folio:expected_wait_seconds", help, stats.expected_wait.as_secs_f64());
        gauge("folio:waiting_tokens", "Tokens of queued requests.", scheduler.waiting_tokens as f64);
        if let Some(disk) = &stats.disk {
            let help = "Whether the disk tier is written to; 0 after a failed write until one succeeds.";
            gauge("folio:disk_storing", help, f64::from(u8::from(disk.is_storing)));
            gauge("folio:disk_bytes", "Bytes of the disk tier.", disk.bytes as f64);
        }
        gauge("folio:connections_open", "Open connections.", self.connections_open as f64);
        let help = "Prompts queued for templating and tokenization.";
        gauge("folio:prompt_pool_queue", help, self.prompt_pool_queue as f64);
        gauge("folio:stored_responses", "Stored responses.", self.stored_responses as f64);
        gauge("folio:stored_response_bytes", "Bytes of stored responses.", self.stored_response_bytes as f64);
        if let Some(memory) = Memory::read() {
            let help = "Anonymous memory of the process, resident or swapped out.";
            gauge("folio:anonymous_memory_bytes", help, memory.anonymous as f64);
            gauge("process_resident_memory_bytes", "Resident memory.", memory.resident as f64);
        }
        out.family("folio:requests_in_flight", Kind::Gauge, "Requests in flight, by the name of their key.");
        for (key, count) in &self.in_flight {
            out.sample("folio:requests_in_flight", &labels(&[("key", key)]), *count);
        }
        self.write_groups(out);
    }

    fn write_groups(&self, out: &mut Exposition) {
        type Figure = fn(&GroupStats) -> usize;
        let figures: [(&str, &str, Figure); 5] = [
            ("folio:kv_blocks", "KV blocks of a layer group on the device.", |group| group.blocks_total),
            ("folio:kv_blocks_used", "Of those, held by running requests.", |group| group.blocks_used),
            ("folio:kv_blocks_cached", "Of those, found by a prefix hit.", |group| group.blocks_cached),
            ("folio:host_slots", "Places for KV blocks in host memory.", |group| group.host_slots_total),
            ("folio:host_slots_used", "Of those, taken.", |group| group.host_slots_used),
        ];
        for (name, help, figure) in figures {
            out.family(name, Kind::Gauge, help);
            for (index, group) in self.engine.scheduler.groups.iter().enumerate() {
                out.sample(name, &labels(&[("group", &index.to_string())]), figure(group));
            }
        }
    }
}

fn used_share(group: &GroupStats) -> f64 {
    group.blocks_used as f64 / group.blocks_total.max(1) as f64
}

/// Memory of the process, where the system reports it.
struct Memory {
    anonymous: u64,
    resident: u64,
}

impl Memory {
    fn read() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/self/status").ok()?)
    }

    fn parse(status: &str) -> Option<Self> {
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
        };
        let anonymous = field("RssAnon")?.saturating_add(field("VmSwap").unwrap_or(0));
        Some(Self { anonymous, resident: field("VmRSS")? })
    }
}

#[cfg(test)]
mod tests {
    use folio_engine::{SchedulerStats, SpeculationStats};

    use super::super::exposition::tests::parse;
    use super::*;

    fn snapshot() -> Snapshot {
        let group = |total, used| GroupStats { blocks_total: total, blocks_used: used, ..GroupStats::default() };
        let scheduler = SchedulerStats {
            running: 3,
            waiting: 2,
            groups: vec![group(100, 25), GroupStats { host_slots_total: 8, ..group(10, 5) }],
            hit_tokens: 60,
            host_hit_tokens: 20,
            prompt_tokens: 100,
            ..SchedulerStats::default()
        };
        let mut engine = EngineStats { scheduler, ..EngineStats::default() };
        engine.iteration_tokens.counts[1] = 2;
        engine.iteration_tokens.counts[13] = 1;
        engine.iteration_tokens.sum = 20_010;
        let in_flight = vec![("a\"b".into(), 2)];
        Snapshot { engine, block_tokens: 16, stalled: Duration::from_millis(1500), in_flight, ..Snapshot::default() }
    }

    #[test]
    fn routers_find_what_they_read() {
        let mut out = Exposition::default();
        snapshot().write_vllm(&mut out, "m");
        let samples = parse(&out.into_text());
        let own = "model_name=\"m\",engine=\"0\"";
        let checks = [
            ("vllm:num_requests_running{OWN}", 3.0),
            ("vllm:num_requests_waiting{OWN}", 2.0),
            ("vllm:num_requests_waiting_by_reason{OWN,reason=\"capacity\"}", 2.0),
            ("vllm:kv_cache_usage_perc{OWN}", 0.5),
            ("vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"100\",engine=\"0\"}", 1.0),
            ("vllm:prefix_cache_queries_total{OWN}", 100.0),
            ("vllm:prefix_cache_hits_total{OWN}", 40.0),
            ("vllm:external_prefix_cache_queries_total{OWN}", 60.0),
            ("vllm:external_prefix_cache_hits_total{OWN}", 20.0),
            ("vllm:prompt_tokens_cached_total{OWN}", 60.0),
            ("vllm:prompt_tokens_by_source_total{OWN,source=\"local_compute\"}", 40.0),
            ("vllm:prompt_tokens_by_source_total{OWN,source=\"external_kv_transfer\"}", 20.0),
            ("vllm:iteration_tokens_total_bucket{OWN,le=\"1.0\"}", 0.0),
            ("vllm:iteration_tokens_total_bucket{OWN,le=\"8.0\"}", 2.0),
            ("vllm:iteration_tokens_total_bucket{OWN,le=\"16384.0\"}", 2.0),
            ("vllm:iteration_tokens_total_count{OWN}", 3.0),
            ("vllm:iteration_tokens_total_sum{OWN}", 20_010.0),
        ];
        for (series, expected) in checks {
            let series = series.replace("OWN", own);
            assert_eq!(samples.get(&series), Some(&expected), "{series}");
        }
    }

    #[test]
    fn drafts_are_told_where_there_are_any() {
        let text = |snapshot: &Snapshot| {
            let mut out = Exposition::default();
            snapshot.write_vllm(&mut out, "m");
            out.into_text()
        };
        let mut snapshot = snapshot();
        assert!(!text(&snapshot).contains("spec_decode"));
        snapshot.engine.speculation = SpeculationStats {
            drafts: 4,
            draft_tokens: 20,
            accepted_tokens: 9,
            accepted_per_position: vec![4, 3, 2],
            drafting: Duration::from_millis(250),
            ..SpeculationStats::default()
        };
        let samples = parse(&text(&snapshot));
        let own = "model_name=\"m\",engine=\"0\"";
        for (name, expected) in [("drafts", 4.0), ("draft_tokens", 20.0), ("accepted_tokens", 9.0)] {
            assert_eq!(samples[&format!("vllm:spec_decode_num_{name}_total{{{own}}}")], expected);
        }
        let last = format!("vllm:spec_decode_num_accepted_tokens_per_pos_total{{{own},position=\"2\"}}");
        assert_eq!((samples[&last], samples["folio:drafting_seconds_total"]), (2.0, 0.25));
    }

    #[test]
    fn our_own_figures_are_told_by_key_and_by_group() {
        let mut out = Exposition::default();
        snapshot().write_folio(&mut out);
        let samples = parse(&out.into_text());
        assert_eq!(samples["folio:engine_stalled_seconds"], 1.5);
        assert_eq!(samples["folio:requests_in_flight{key=\"a\\\"b\"}"], 2.0);
        assert_eq!(samples["folio:kv_blocks_used{group=\"0\"}"], 25.0);
        assert_eq!(samples["folio:host_slots{group=\"1\"}"], 8.0);
        if cfg!(target_os = "linux") {
            assert!(samples["folio:anonymous_memory_bytes"] > 0.0);
        }
    }

    #[test]
    fn memory_is_what_no_file_backs() {
        let status = "Name:\tx\nVmRSS:\t  300 kB\nRssAnon:\t  200 kB\nVmSwap:\t    7 kB\n";
        let memory = Memory::parse(status).expect("all there");
        assert_eq!((memory.anonymous, memory.resident), (207 * 1024, 300 * 1024));
        assert!(Memory::parse("VmRSS: x kB\n").is_none());
    }
}
