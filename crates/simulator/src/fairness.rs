//! I11: who comes first runs first, and who was preempted is not preempted for ever.

use std::collections::BTreeMap;

use folio_scheduler::{RequestId, SchedulerConfig, StepPlan};

use crate::{
    client::Client,
    invariants::{Found, Invariant},
};

/// Most times that a request loses its blocks when nothing forces it.
pub const MOST_PREEMPTIONS: u32 = 3;

/// A request that starts leaves no older one of its kind behind that could have started.
pub fn check_order(
    plan: &StepPlan,
    clients: &BTreeMap<RequestId, Client>,
    config: &SchedulerConfig,
) -> Result<(), Found> {
    for a in &plan.assignments {
        // A deadline moves its request forward.
        let Some(new) = clients.get(&a.id).filter(|c| !c.started && c.deadline.is_none()) else { continue };
        let older = clients.range(..a.id).map(|(_, c)| c);
        let alike = |c: &&Client| c.tenant == new.tenant && c.priority == new.priority;
        let passed = older.filter(|c| !c.started && alike(c)).find(|c| {
            let starts = plan.assignments.iter().any(|other| other.id == c.id);
            !starts && !is_excused(c, plan, clients, config)
        });
        if let Some(old) = passed {
            return Err((Invariant::I11, format!("request {} starts before {}", a.id.0, old.id.0)));
        }
    }
    Ok(())
}

/// Whether somebody else may be computing what this one needs, or something beside tokens is in short supply.
fn is_excused(old: &Client, plan: &StepPlan, clients: &BTreeMap<RequestId, Client>, config: &SchedulerConfig) -> bool {
    if old.deadline.is_some() || old.fork_of.is_some() || old.wants_prompt_logits {
        return true;
    }
    if !config.prefix_caching {
        return false;
    }
    // Few bits find a likeness everywhere, and the disk may be asked for anything.
    if config.hash_bits < 128 || config.disk_chunk_blocks.is_some() {
        return true;
    }
    let Some(block) = old.prompt().get(..config.block_tokens) else { return false };
    let runs = |c: &Client| c.started || plan.assignments.iter().any(|a| a.id == c.id);
    clients.values().any(|c| c.salt == old.salt && runs(c) && c.truth.tokens().starts_with(block))
}

/// No request loses its blocks time and again at an ordinary load.
pub fn check_preemptions(client: &Client, clients: &BTreeMap<RequestId, Client>) -> Result<(), Found> {
    let alike = |c: &Client| c.priority == client.priority && c.tenant == client.tenant && c.deadline.is_none();
    if client.preemptions > MOST_PREEMPTIONS && clients.values().all(alike) {
        let what = format!("request {} is preempted for the {}th time", client.id.0, client.preemptions);
        return Err((Invariant::I11, what));
    }
    Ok(())
}
