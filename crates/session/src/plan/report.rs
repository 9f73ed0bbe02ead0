//! A plan as a table and as JSON.

use folio_device::BLOCK_TOKENS;
use serde_json::{Value, json};

use super::{Budget, GroupPlan, Plan};
use crate::units;

impl Plan {
    /// The table, several lines.
    pub fn to_text(&self, model: &str) -> String {
        let mut out = String::new();
        if let Some(asked) = self.shrunk_from {
            out.push_str(&format!(
                "--fit: a context of {asked} tokens does not fit {}; it is {} now\n",
                self.budget.describe(),
                self.max_model_len
            ));
        }
        out.push_str(&format!(
            "memory plan of {model}: context {}, {} requests at once, {} tokens a step, {}\n",
            self.max_model_len, self.max_seqs, self.budget_tokens, self.device
        ));
        let lines = lines(self);
        let widths = [0, 1].map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0));
        for [name, bytes, remark] in &lines {
            let line = format!("  {name:<0$}  {bytes:>1$}  {remark}", widths[0], widths[1]);
            out.push_str(line.trim_end());
            out.push('\n');
        }
        if let Some(excess) = &self.excess {
            out.push_str(&format!("  WARNING: {}; a server would refuse to start\n", excess.describe()));
        }
        out.push_str("  requests at once, by length:");
        for (number, (len, count)) in self.concurrency.iter().enumerate() {
            out.push_str(&format!("{} {count} of {len}", if number == 0 { "" } else { "," }));
        }
        out.push('\n');
        out
    }

    /// The plan as a JSON object.
    pub fn to_json(&self, model: &str) -> Value {
        let budget = match &self.budget {
            Budget::All { bytes, flag } => json!({"bytes": bytes, "for": "all", "from": flag}),
            Budget::Kv { bytes, flag } => json!({"bytes": bytes, "for": "kv", "from": flag}),
            Budget::Polite { free } => json!({"free": free}),
        };
        let group = |g: &GroupPlan| {
            json!({
                "layers": g.layers, "window": g.window, "block_bytes": g.block_bytes, "blocks": g.blocks,
                "host_slots": g.host_slots,
            })
        };
        let at_once = |&(len, requests): &(usize, usize)| json!({"tokens": len, "requests": requests});
        json!({
            "model": model, "device": self.device, "threads": self.threads, "max_model_len": self.max_model_len, "max_num_seqs": self.max_seqs,
            "shrunk_from": self.shrunk_from, "block_tokens": BLOCK_TOKENS, "kv_tokens": self.kv_tokens(),
            "kv_cache_dtype": self.kv_format.name(),
            "kv_token_bytes": self.groups.iter().map(|group| group.block_bytes).sum::<u64>() / BLOCK_TOKENS as u64,
            "bytes": {
                "weights": self.bytes.weights, "activations": self.bytes.activations, "working": self.bytes.working,
                "kv": self.bytes.kv, "drafting": self.bytes.drafting, "host": self.bytes.host,
                "bodies": self.bytes.bodies, "total": self.bytes.total(),
            },
            "budget": budget,
            "excess": self.excess.as_ref().map(|excess| json!({"planned": excess.planned, "available": excess.available})),
            "groups": self.groups.iter().map(group).collect::<Vec<_>>(),
            "requests_at_once": self.concurrency.iter().map(at_once).collect::<Vec<_>>(),
        })
    }
}

fn lines(plan: &Plan) -> Vec<[String; 3]> {
    let bytes = &plan.bytes;
    let line = |name: &str, size: u64, remark: String| [name.to_string(), units::bytes(size), remark];
    let mut lines = vec![
        line("weights", bytes.weights, "as the kernels read them".into()),
        line("activations", bytes.activations, format!("{} rows, {} of logits", plan.budget_tokens, outputs(plan))),
        line("working memory", bytes.working, "norms, step inputs, scratch, what is sampled from".into()),
    ];
    for group in &plan.groups {
        let size = group.block_bytes * group.blocks as u64;
        lines.push(line(&group_name(plan, group), size, group_remark(plan, group)));
    }
    if bytes.drafting > 0 {
        lines.push(line("guessing ahead", bytes.drafting, "its weights, activations, keys and values, texts".into()));
    }
    if bytes.host > 0 {
        let blocks = plan.groups.iter().map(|group| group.host_slots).min().unwrap_or(0);
        let apart = if bytes.host_is_apart { ", of the host's memory" } else { "" };
        lines.push(line("host tier", bytes.host, format!("{} tokens{apart}", blocks * BLOCK_TOKENS)));
    }
    if bytes.bodies > 0 {
        let apart = if bytes.host_is_apart { ", of the host's memory" } else { "" };
        lines.push(line("bodies of requests", bytes.bodies, format!("and what is read from them{apart}")));
    }
    lines.push(line("total", bytes.total(), budget_remark(plan)));
    lines
}

fn outputs(plan: &Plan) -> usize {
    plan.limits().outputs
}

fn group_name(plan: &Plan, group: &GroupPlan) -> String {
    match (plan.groups.len(), group.window) {
        (1, None) => "keys and values".into(),
        (_, None) => format!("keys and values, {} layers", group.layers),
        (_, Some(window)) => format!("keys and values, {} layers of window {window}", group.layers),
    }
}

fn group_remark(plan: &Plan, group: &GroupPlan) -> String {
    let (tokens, each) = (group.blocks * BLOCK_TOKENS, group.block_bytes / BLOCK_TOKENS as u64);
    format!("{tokens} tokens of {each} bytes ({}) in {} blocks", plan.kv_format.name(), group.blocks)
}

fn budget_remark(plan: &Plan) -> String {
    match &plan.budget {
        Budget::All { bytes, flag } => format!("of {} ({flag})", units::bytes(*bytes)),
        Budget::Kv { bytes, flag } => format!("{} of it for keys and values ({flag})", units::bytes(*bytes)),
        Budget::Polite { free } => format!("of {} free", units::bytes(*free)),
    }
}
