//! I11: the first request in a queue starts first, and preemption ends. I17: a priority moves a
//! request before others of its tenant, and takes nothing from other tenants.

use std::collections::BTreeMap;

use folio_scheduler::{RequestId, SchedulerConfig, StepPlan};

use crate::{
    client::Client,
    invariants::{Found, Invariant, Violation},
    scenario::{Action, Scenario},
};

/// Most times that a request loses its blocks when nothing forces it.
pub const MOST_PREEMPTIONS: u32 = 3;

/// Position of a request in its tenant's queue: a level of priority is worth a fixed waiting time.
pub fn place(now: u64, priority: i32, aging: u64) -> i64 {
    let signed = |nanos: u64| i64::try_from(nanos).unwrap_or(i64::MAX);
    signed(now).saturating_add(signed(aging).saturating_mul(i64::from(priority)))
}

/// When a request starts, no request before it in its tenant's queue could have started.
pub fn check_order(
    plan: &StepPlan,
    clients: &BTreeMap<RequestId, Client>,
    config: &SchedulerConfig,
) -> Result<(), Found> {
    for a in &plan.assignments {
        // A deadline moves its request forward.
        let Some(new) = clients.get(&a.id).filter(|c| c.waits && c.deadline.is_none()) else { continue };
        let before = |c: &&Client| c.tenant == new.tenant && (c.place, c.id) < (new.place, new.id);
        let passed = clients.values().filter(|c| c.waits).filter(before).find(|c| {
            let starts = plan.assignments.iter().any(|other| other.id == c.id);
            !starts && !is_excused(c, plan, clients, config)
        });
        if let Some(old) = passed {
            return Err((Invariant::I11, format!("request {} starts before {}", a.id.0, old.id.0)));
        }
    }
    Ok(())
}

/// Whether another request may be computing this one's blocks, or something other than tokens is in
/// short supply.
fn is_excused(old: &Client, plan: &StepPlan, clients: &BTreeMap<RequestId, Client>, config: &SchedulerConfig) -> bool {
    if old.deadline.is_some() || old.fork_of.is_some() || old.wants_prompt_logits || old.in_flight > 0 {
        return true;
    }
    if !config.prefix_caching {
        return false;
    }
    // With few hash bits false prefix hits are everywhere, and the disk may be asked for anything.
    if config.hash_bits < 128 || config.disk_chunk_blocks.is_some() {
        return true;
    }
    let Some(block) = old.truth.tokens().get(..config.block_tokens) else { return false };
    let runs = |c: &Client| !c.waits || plan.assignments.iter().any(|a| a.id == c.id);
    clients.values().any(|c| c.salt == old.salt && runs(c) && c.truth.tokens().starts_with(block))
}

/// No request loses its blocks again and again at an ordinary load.
pub fn check_preemptions(client: &Client) -> Result<(), Found> {
    if client.preemptions > MOST_PREEMPTIONS {
        let what = format!("request {} is preempted for the {}th time", client.id.0, client.preemptions);
        return Err((Invariant::I11, what));
    }
    Ok(())
}

/// Changes to the priorities of one tenant: the plans must stay the same.
pub const FAVOURS: [i32; 2] = [0, -1_000];

/// One scenario in four, if it has requests of the favoured tenant, and others.
pub fn is_told_of_tenants(scenario: &Scenario) -> bool {
    let has = |favoured: bool| {
        let of = |action: &Action| matches!(action, Action::Add(traffic) if (traffic.tenant == 0) == favoured);
        scenario.events.iter().any(|event| of(&event.action))
    };
    scenario.setup.manners.seed.is_multiple_of(4) && has(true) && has(false)
}

/// The scenario with the first tenant's priorities moved, and without other facts that decide the
/// order in a tenant's own queue: deadlines, and priorities so extreme that they cannot be moved.
pub fn favouring(scenario: &Scenario, favour: i32) -> Scenario {
    let mut scenario = scenario.clone();
    scenario.setup.favour = favour;
    for event in &mut scenario.events {
        if let Action::Add(traffic) = &mut event.action {
            traffic.deadline_in = None;
            traffic.priority = traffic.priority.clamp(-50, 50);
        }
    }
    scenario
}

pub fn felt(scenario: &Scenario) -> Violation {
    let what = "other plans when all priorities of one tenant are lower".into();
    Violation { invariant: Invariant::I17, tick: scenario.ticks, what }
}
