//! A plan for people and for programs; `folio plan` prints one without loading anything.

use anyhow::Result;
use serde_json::{Value, json};

use super::{GroupPlan, Plan};
use crate::args::PlanArgs;
use crate::assets::Assets;
use crate::table;
use crate::target::Target;
use folio_device::BLOCK_TOKENS;

pub fn main(args: &PlanArgs) -> Result<()> {
    // As a server of these flags would plan.
    let mut engine = args.model.engine.clone();
    engine.memory.body_bytes = Some(folio_server::Limits::default().body_bytes);
    let mut assets = Assets::open_as(args.model.model.as_deref(), &engine)?;
    assets.quantize(engine.quantize)?;
    assets.speculate(&engine)?;
    let (target, _) = Target::choose(&engine)?;
    let plan = Plan::new(&assets, &engine, &target)?;
    match args.json {
        true => outln!("{}", to_json(&plan, &assets.name)),
        false => out!("{}", print(&plan, &assets.name)),
    }
}

/// The table, several lines.
pub fn print(plan: &Plan, model: &str) -> String {
    let mut out = String::new();
    if let Some(asked) = plan.shrunk_from {
        out.push_str(&format!(
            "--fit: a context of {asked} tokens does not fit {}; it is {} now\n",
            plan.budget.describe(),
            plan.max_model_len
        ));
    }
    out.push_str(&format!(
        "memory plan of {model}: context {}, {} requests at once, {} tokens a step, {}\n",
        plan.max_model_len, plan.max_seqs, plan.budget_tokens, plan.device
    ));
    let lines = lines(plan);
    let widths = [0, 1].map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0));
    for [name, bytes, remark] in &lines {
        let line = format!("  {name:<0$}  {bytes:>1$}  {remark}", widths[0], widths[1]);
        out.push_str(line.trim_end());
        out.push('\n');
    }
    if let Some(excess) = &plan.excess {
        out.push_str(&format!("  WARNING: {}; a server would refuse to start\n", excess.describe()));
    }
    out.push_str("  requests at once, by length:");
    for (number, (len, count)) in plan.concurrency.iter().enumerate() {
        out.push_str(&format!("{} {count} of {len}", if number == 0 { "" } else { "," }));
    }
    out.push('\n');
    out
}

fn lines(plan: &Plan) -> Vec<[String; 3]> {
    let bytes = &plan.bytes;
    let line = |name: &str, size: u64, remark: String| [name.to_string(), table::bytes(size), remark];
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
    use super::Budget;
    match &plan.budget {
        Budget::All { bytes, flag } => format!("of {} ({flag})", table::bytes(*bytes)),
        Budget::Kv { bytes, flag } => format!("{} of it for keys and values ({flag})", table::bytes(*bytes)),
        Budget::Polite { free } => format!("of {} free", table::bytes(*free)),
    }
}

fn to_json(plan: &Plan, model: &str) -> Value {
    use super::Budget;
    let budget = match &plan.budget {
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
        "model": model, "device": plan.device, "threads": plan.threads, "max_model_len": plan.max_model_len, "max_num_seqs": plan.max_seqs,
        "shrunk_from": plan.shrunk_from, "block_tokens": BLOCK_TOKENS, "kv_tokens": plan.kv_tokens(),
        "kv_cache_dtype": plan.kv_format.name(),
        "kv_token_bytes": plan.groups.iter().map(|group| group.block_bytes).sum::<u64>() / BLOCK_TOKENS as u64,
        "bytes": {
            "weights": plan.bytes.weights, "activations": plan.bytes.activations, "working": plan.bytes.working,
            "kv": plan.bytes.kv, "drafting": plan.bytes.drafting, "host": plan.bytes.host,
            "bodies": plan.bytes.bodies, "total": plan.bytes.total(),
        },
        "budget": budget,
        "excess": plan.excess.as_ref().map(|excess| json!({"planned": excess.planned, "available": excess.available})),
        "groups": plan.groups.iter().map(group).collect::<Vec<_>>(),
        "requests_at_once": plan.concurrency.iter().map(at_once).collect::<Vec<_>>(),
    })
}
