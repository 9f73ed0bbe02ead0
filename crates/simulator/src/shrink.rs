//! Makes a failing scenario small: fewer events, shorter requests, a simpler configuration, the
//! same fault.

use crate::{
    invariants::Violation,
    scenario::{Action, Drafter, Scenario},
    world::{Mode, Outcome, play},
};

/// Most runs of a shrink; small scenarios are quick.
const MOST_RUNS: usize = 4000;

struct Shrinker {
    best: Scenario,
    fault: Violation,
    mode: Mode,
    runs: usize,
}

/// The smallest scenario found that fails in the same way, and its outcome.
pub fn shrink(scenario: &Scenario, fault: &Violation, mode: &Mode) -> (Scenario, Outcome) {
    let mut shrinker = Shrinker { best: scenario.clone(), fault: fault.clone(), mode: mode.clone(), runs: 0 };
    shrinker.cut_end();
    loop {
        let before = (shrinker.best.events.len(), shrinker.best.ticks);
        shrinker.remove_events();
        shrinker.simplify_events();
        shrinker.simplify_setup();
        shrinker.close_gaps();
        if (shrinker.best.events.len(), shrinker.best.ticks) == before || shrinker.runs >= MOST_RUNS {
            break;
        }
    }
    let outcome = play(&shrinker.best, Mode { spoken: true, ..mode.clone() });
    (shrinker.best, outcome)
}

impl Shrinker {
    /// Takes the scenario if it fails like the first one.
    fn try_one(&mut self, scenario: Scenario) -> bool {
        if self.runs >= MOST_RUNS {
            return false;
        }
        self.runs += 1;
        let outcome = play(&scenario, Mode { spoken: false, ..self.mode.clone() });
        let same = outcome.violation.is_some_and(|v| v.is_like(&self.fault));
        if same {
            self.best = scenario;
        }
        same
    }

    /// Removes events after the fault, which had no part in it.
    fn cut_end(&mut self) {
        let ticks = self.fault.tick.min(self.best.ticks);
        for ticks in [ticks, ticks + 1] {
            let mut cut = self.best.clone();
            cut.ticks = ticks;
            cut.events.retain(|e| e.tick < ticks);
            if self.try_one(cut) {
                return;
            }
        }
    }

    fn remove_events(&mut self) {
        let mut size = self.best.events.len().div_ceil(2);
        while size > 0 {
            let mut from = 0;
            while from < self.best.events.len() {
                let mut fewer = self.best.clone();
                fewer.events.drain(from..(from + size).min(fewer.events.len()));
                if !self.try_one(fewer) {
                    from += size;
                }
            }
            size /= 2;
        }
    }

    fn simplify_events(&mut self) {
        for index in 0..self.best.events.len() {
            for simpler in simpler_actions(&self.best.events[index].action) {
                let mut scenario = self.best.clone();
                scenario.events[index].action = simpler;
                self.try_one(scenario);
            }
        }
    }

    /// Moves events together, so that no ticks pass without an event that matters.
    fn close_gaps(&mut self) {
        for index in 0..self.best.events.len() {
            loop {
                let before = index.checked_sub(1).map_or(0, |i| self.best.events[i].tick);
                let gap = self.best.events[index].tick - before;
                let step = gap.div_ceil(2);
                let mut closer = self.best.clone();
                closer.events[index..].iter_mut().for_each(|e| e.tick -= step);
                closer.ticks = closer.ticks.saturating_sub(step).max(1);
                if gap == 0 || !self.try_one(closer) {
                    break;
                }
            }
        }
    }

    fn simplify_setup(&mut self) {
        for simplify in SIMPLER_SETUPS {
            let mut scenario = self.best.clone();
            simplify(&mut scenario);
            self.try_one(scenario);
        }
    }
}

/// Each makes one setting simpler.
const SIMPLER_SETUPS: &[fn(&mut Scenario)] = &[
    |s| s.setup.manners.depth = 1,
    |s| s.setup.manners.depth = 2,
    |s| s.setup.manners.disk.failures = 0,
    |s| s.setup.manners.disk.latency = 1,
    |s| s.setup.drafter = Drafter::None,
    |s| s.setup.scheduler.disk_chunk_blocks = None,
    |s| s.setup.scheduler.groups.truncate(1),
    |s| s.setup.scheduler.groups.iter_mut().for_each(|g| g.window = None),
    |s| {
        if s.setup.scheduler.disk_chunk_blocks.is_none() {
            s.setup.scheduler.groups.iter_mut().for_each(|g| g.host_slots = 0);
        }
    },
    |s| s.setup.scheduler.hash_bits = 128,
    |s| s.setup.scheduler.prefix_caching = s.setup.scheduler.disk_chunk_blocks.is_some(),
    |s| s.setup.scheduler.force_preempt_every = None,
    |s| s.setup.scheduler.inter_token_target = None,
    |s| s.setup.scheduler.longest_step = None,
    |s| s.setup.scheduler.max_chunk = None,
    |s| s.setup.scheduler.budget_tokens = 512,
    |s| s.setup.scheduler.max_seqs = 64,
    |s| s.setup.scheduler.prompt_logit_rows = 256,
    |s| s.setup.scheduler.copy_cost = 0,
    |s| s.setup.scheduler.kv_events = false,
];

fn simpler_actions(action: &Action) -> Vec<Action> {
    let Action::Add(traffic) = action else { return Vec::new() };
    let mut simpler = Vec::new();
    let mut with = |change: &dyn Fn(&mut crate::scenario::Traffic)| {
        let mut changed = traffic.clone();
        change(&mut changed);
        if changed != *traffic {
            simpler.push(Action::Add(changed));
        }
    };
    with(&|t| t.copies = 1);
    with(&|t| t.samples = 1);
    with(&|t| t.priority = 0);
    with(&|t| t.tenant = 0);
    with(&|t| t.weight = 1);
    with(&|t| t.deadline_in = None);
    with(&|t| t.salt = 0);
    with(&|t| t.prompt_logits = false);
    with(&|t| t.stop = 0);
    with(&|t| t.stalls_after = None);
    with(&|t| t.prompt.len = t.prompt.len.div_ceil(2));
    with(&|t| t.prompt.len = (t.prompt.len - 1).max(1));
    with(&|t| t.answer = t.answer.div_ceil(2));
    with(&|t| t.answer = 1);
    simpler
}
