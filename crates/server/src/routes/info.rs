//! Information about the server: its version, its model, its load. The keys are those of vLLM and
//! SGLang, since routers read them by name.

use axum::Json;
use folio_engine::EngineStats;
use serde_json::{Map, Value, json};

use crate::service::{Model, Service};

/// Version of this server; answered while it is loading too.
pub async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// How the model runs: what the command line knows of it, and what the server does.
pub async fn server(service: Service) -> Json<Value> {
    let (model, stats) = (&service.model, service.model.engine.stats());
    let mut info: Map<String, Value> = model.info.as_object().cloned().unwrap_or_default();
    // Routers take these two for one field, and refuse a text that has it twice.
    info.remove("model");
    let kv_blocks = stats.scheduler.groups.iter().map(|group| group.blocks_total).max().unwrap_or(0);
    let own = json!({
        "model_id": service.model_name(), "served_model_name": service.model_name(), "model_names": model.names.listed,
        "is_generation": true, "is_embedding": model.embeds, "max_model_len": service.bounds.max_model_len,
        "context_length": service.bounds.max_model_len, "max_num_seqs": model.max_seqs,
        "max_running_requests": model.max_seqs, "max_num_reqs": model.max_seqs, "num_kv_blocks": kv_blocks,
        "block_size": model.block_tokens(), "max_total_tokens": most_tokens(model, &stats), "dp_size": 1,
        "vocab_size": model.vocab_size, "version": env!("CARGO_PKG_VERSION"), "started": service.started,
    });
    info.extend(own.as_object().cloned().unwrap_or_default());
    for (name, value) in paths(&service) {
        info.entry(name).or_insert(value);
    }
    Json(Value::Object(info))
}

/// The model itself, in SGLang's form.
pub async fn model(service: Service) -> Json<Value> {
    let known = |name: &str| service.model.info.get(name).cloned().unwrap_or(Value::Null);
    let mut info = json!({
        "served_model_name": service.model_name(), "is_generation": true, "is_embedding": service.model.embeds,
        "model_type": known("model_type"), "architectures": known("architectures"), "dtype": known("dtype"),
        "max_model_len": service.bounds.max_model_len, "preferred_sampling_params": null, "weight_version": "default",
    });
    for (name, value) in paths(&service) {
        info[name] = known(name).as_str().map_or(value, Into::into);
    }
    Json(info)
}

/// Clients do not see a path on this machine: unless the command line says otherwise, both paths
/// are the model's name.
fn paths(service: &Service) -> [(&'static str, Value); 2] {
    let name: Value = service.model_name().into();
    [("model_path", name.clone()), ("tokenizer_path", name)]
}

/// `/v1/loads`, as newer routers read it.
pub async fn loads(service: Service) -> Json<Value> {
    let load = Load::of(&service);
    let mut one = load.detailed();
    one["max_running_requests"] = service.model.max_seqs.into();
    one["utilization"] = json!(load.running as f64 / service.model.max_seqs.max(1) as f64);
    Json(json!({
        "timestamp": crate::unix_seconds().to_string(), "version": env!("CARGO_PKG_VERSION"), "dp_rank_count": 1,
        "loads": [one], "aggregate": load.detailed(),
    }))
}

/// `/get_load`, as older ones do.
pub async fn load(service: Service) -> Json<Value> {
    let load = Load::of(&service);
    Json(json!([{
        "dp_rank": 0, "num_reqs": load.running + load.waiting, "num_waiting_reqs": load.waiting,
        "num_tokens": load.used_tokens + load.waiting_tokens,
    }]))
}

/// How much there is to do, and how full the KV cache is.
struct Load {
    running: usize,
    waiting: usize,
    waiting_tokens: usize,
    used_tokens: usize,
    most_tokens: usize,
    usage: f64,
    hit_rate: f64,
}

impl Load {
    fn of(service: &Service) -> Self {
        let stats = service.model.engine.stats();
        Self::new(&stats, most_tokens(&service.model, &stats))
    }

    fn new(stats: &EngineStats, most_tokens: usize) -> Self {
        let scheduler = &stats.scheduler;
        let share = |part: f64, of: f64| if of > 0.0 { part / of } else { 0.0 };
        let groups = scheduler.groups.iter();
        Self {
            running: scheduler.running,
            waiting: scheduler.waiting,
            waiting_tokens: scheduler.waiting_tokens,
            // Layer groups hold the same tokens, some of them only the last.
            used_tokens: groups.clone().map(|group| group.tokens_stored).max().unwrap_or(0),
            most_tokens,
            // The fullest pool limits admission.
            usage: groups.map(|group| share(group.blocks_used as f64, group.blocks_total as f64)).fold(0.0, f64::max),
            hit_rate: share(scheduler.hit_tokens as f64, scheduler.prompt_tokens as f64),
        }
    }

    fn detailed(&self) -> Value {
        json!({
            "dp_rank": 0, "num_running_reqs": self.running, "num_waiting_reqs": self.waiting,
            "num_total_reqs": self.running + self.waiting, "num_used_tokens": self.used_tokens,
            "num_total_tokens": self.used_tokens + self.waiting_tokens, "max_total_num_tokens": self.most_tokens,
            "token_usage": self.usage, "cache_hit_rate": self.hit_rate,
        })
    }
}

fn most_tokens(model: &Model, stats: &EngineStats) -> usize {
    let blocks = stats.scheduler.groups.iter().map(|group| group.blocks_total).min().unwrap_or(0);
    blocks.saturating_mul(model.block_tokens())
}

#[cfg(test)]
mod tests {
    use folio_engine::{GroupStats, SchedulerStats};

    use super::*;

    #[test]
    fn the_fullest_group_is_the_load() {
        let group = |blocks_total, blocks_used, tokens_stored| GroupStats {
            blocks_total,
            blocks_used,
            tokens_stored,
            ..GroupStats::default()
        };
        let scheduler = SchedulerStats {
            running: 2,
            waiting: 1,
            waiting_tokens: 7,
            groups: vec![group(10, 4, 60), group(4, 3, 48)],
            hit_tokens: 30,
            prompt_tokens: 120,
            ..SchedulerStats::default()
        };
        let load = Load::new(&EngineStats { scheduler, ..EngineStats::default() }, 64).detailed();
        for (name, expected) in [
            ("num_running_reqs", json!(2)),
            ("num_waiting_reqs", json!(1)),
            ("num_total_reqs", json!(3)),
            ("num_used_tokens", json!(60)),
            ("num_total_tokens", json!(67)),
            ("max_total_num_tokens", json!(64)),
            ("token_usage", json!(0.75)),
            ("cache_hit_rate", json!(0.25)),
        ] {
            assert_eq!(load[name], expected, "{name}");
        }
        let idle = Load::new(&EngineStats::default(), 0);
        assert_eq!((idle.usage, idle.hit_rate), (0.0, 0.0), "nothing is divided by nothing");
    }
}
