//! Chooses the number of nodes of each draft: as many as pay, by measured times, and none if none
//! pay.
//!
//! The tokens that a draft brings are estimated from how drafts of the request, and of all
//! requests, agreed recently; its cost from the times of steps and of drafting. Both give the
//! number of nodes for each request that makes most tokens a second. A step that verifies drafts
//! cannot be planned ahead, and neither can the other requests in it without splitting into two
//! batches, so either all requests wait for drafts, or none. While drafts do not pay, they are
//! probed now and then. [`Account`] compares what speculation gained in fact: whatever the
//! estimates say, it stops when more time is lost than a small part of all time. Nothing here reads
//! a clock: all durations are arguments.
//!
//! There is one [`Adapt`] for each salt ([`Watches`]), and all begin alike: how well drafts of
//! other salts agreed must not show in the number of nodes. For an `Adapt`, requests of other salts
//! are a part of the machine: they add tokens and time to a step, and their drafts are not counted
//! as its own.

mod account;
mod agreement;
mod choice;
mod cost;
mod estimate;
#[cfg(test)]
mod tests;
mod watches;

use std::{collections::HashMap, time::Duration};

use account::Account;
use agreement::{Agreement, Hope, Steps};
use choice::{Chooser, Promise};
use cost::{Costs, Curve};
use folio_scheduler::RequestId;
pub(super) use watches::{Seen, StepNote, Watches};

use super::Draft;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptOptions {
    /// Most nodes of a draft.
    pub most_nodes: usize,
    /// Sets the number of nodes of every draft, in place of an adaptive one.
    pub fixed: Option<usize>,
}

/// Decides on the drafts of the requests of one salt. After every step: [`Adapt::note_step`] and
/// [`Adapt::note_walk`] of its drafts, then [`Adapt::most`] for the next step, then
/// [`Adapt::note_drafting`].
#[derive(Debug)]
pub struct Adapt {
    options: AdaptOptions,
    costs: Costs,
    all: Agreement,
    requests: HashMap<RequestId, Asked>,
    account: Account,
    state: State,
    /// Steps until the next probe, if this one fails.
    spacing: u32,
    /// The step after which [`Adapt::most`] is about to be called.
    step: StepSeen,
    /// The nodes of the last call.
    last: Last,
    /// No draft was made yet: the first one touches memory that was never touched.
    is_cold: bool,
    chooser: Chooser,
    steps: Steps,
    hopes: Vec<Hope>,
}

/// State of one request.
#[derive(Debug)]
struct Asked {
    agreement: Agreement,
    /// Nodes that it was last given, until their result is known.
    nodes: usize,
    /// Whether it had a draft since it was last given no nodes. Before that, a method catches up
    /// with the tokens that it missed.
    drafted: bool,
}

impl Asked {
    fn new(most: usize) -> Self {
        Self { agreement: Agreement::new(most), nodes: 0, drafted: false }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No request waits for drafts, for at least `wait` steps.
    Plain { wait: u32 },
    /// Drafts of about `nodes` nodes in all are made, to measure them; `left` steps remain.
    Probing { left: u32, nodes: usize },
    /// Drafts pay, and have been made for `steps` steps without a plain step.
    Speculating { steps: u32 },
}

#[derive(Clone, Copy, Debug, Default)]
struct StepSeen {
    rows: usize,
    seconds: f64,
    is_decode_only: bool,
    /// Tokens of accepted drafts.
    accepted: usize,
    walks: usize,
    /// Drafts with an accepted node.
    lucky_walks: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Last {
    /// Requests that decode, with those of other salts.
    requests: usize,
    /// Requests of this salt, the nodes they were given, and how many requests had any.
    own: usize,
    nodes: usize,
    drafting: usize,
    /// Whether the step could not be planned ahead.
    waits: bool,
    /// Whether the method was catching up, so that the time of drafting says little about later
    /// drafts.
    catches_up: bool,
    /// Seconds between two steps: of drafting, and of waiting for the next step to begin.
    drafting_seconds: f64,
    gap_seconds: f64,
}

/// Part of the evidence that remains after each of a request's drafts, and after each step without
/// one.
const KEEP_OWN: f32 = 1.0 - 1.0 / 20.0;
const KEEP_IDLE: f32 = 1.0 - 1.0 / 200.0;

/// Most time of a step that verifies a number of rows for the first time, in plain steps; a longer
/// one is an outlier.
const NEW_COST: f64 = 4.0;

/// Gain over plain steps at which speculation begins, and below which it ends.
const BEGINS_AT: f64 = 1.03;
const ENDS_AT: f64 = 1.0;

/// Plain steps between two checks whether drafts would pay.
const LOOK_EVERY: u32 = 8;

/// Plain steps that are inserted now and then while drafts pay.
const ANCHOR_STEPS: u32 = 4;
/// A node after those that pay is given as well, until it has this much evidence.
const CURIOUS: f32 = 2.0;

/// Steps of a probe that have drafts, and all its steps.
const PROBE_STEPS: u32 = 4;
const PROBE_STEPS_SILENT: u32 = 16;
const PROBE_NODES: usize = 3;
/// Steps between probes: at first and at most.
const SHORTEST_WAIT: u32 = 16;
const LONGEST_WAIT: u32 = 128;

impl Adapt {
    pub fn new(options: AdaptOptions) -> Self {
        let options = AdaptOptions { most_nodes: options.most_nodes.min(Draft::MOST_NODES), ..options };
        Self {
            options,
            costs: Costs::default(),
            all: Agreement::hopeful(options.most_nodes),
            requests: HashMap::new(),
            account: Account::default(),
            state: State::Plain { wait: LOOK_EVERY - 1 },
            spacing: SHORTEST_WAIT,
            step: StepSeen::default(),
            last: Last::default(),
            is_cold: true,
            chooser: Chooser::default(),
            steps: Steps::default(),
            hopes: Vec::new(),
        }
    }

    /// Notes a step: the time that the device computed it, without waiting. Its rows are all rows
    /// but drafts of other salts. A step that computes any prompt is not `is_decode_only`, and
    /// changes no estimate.
    pub fn note_step(&mut self, rows: usize, took: Duration, is_decode_only: bool) {
        self.step = StepSeen { rows, seconds: took.as_secs_f64(), is_decode_only, ..self.step };
    }

    /// Notes how long the device waited for a step after its drafts were made, or without drafts
    /// after the step before. Called before [`Adapt::note_step`] of that step, if drafts stop steps
    /// from being planned ahead.
    pub fn note_gap(&mut self, waited: Duration) {
        self.last.gap_seconds = waited.as_secs_f64();
        if self.last.waits && self.last.requests > 0 {
            self.costs.note_gap(self.last.requests, self.last.gap_seconds);
        }
    }

    /// Notes the time to make the drafts of the last call, the longest of them with `longest`
    /// nodes; or without drafts, the time to follow the step. Not called if only drafts of other
    /// salts were made.
    pub fn note_drafting(&mut self, requests: usize, longest: usize, took: Duration) {
        let seconds = took.as_secs_f64();
        self.last.drafting_seconds = seconds;
        if self.last.nodes == 0 {
            self.costs.note_keeping_up(requests, seconds);
        } else if std::mem::take(&mut self.is_cold) {
            self.last.drafting_seconds = 0.0;
        } else if self.last.catches_up {
            let usual = self.costs.drafting(self.last.drafting).seconds(longest as f64);
            self.last.drafting_seconds = seconds.min(usual);
            self.account.borrow(seconds - self.last.drafting_seconds);
        } else {
            self.costs.note_drafting(self.last.drafting, longest, seconds);
        }
    }

    /// Notes the result of a draft that a step verified.
    pub fn note_walk(&mut self, id: RequestId, drafted: &Draft, accepted: &[u16]) {
        self.step.accepted += accepted.len();
        self.step.walks += 1;
        self.step.lucky_walks += usize::from(!accepted.is_empty());
        let most = self.options.most_nodes;
        let request = self.requests.entry(id).or_insert_with(|| Asked::new(most));
        let asked = std::mem::take(&mut request.nodes);
        request.drafted = true;
        request.agreement.fade(KEEP_OWN);
        request.agreement.note(asked, drafted, accepted);
        self.all.fade(keep_all(self.last.own));
        self.all.note(asked, drafted, accepted);
    }

    /// Nodes to draft in the next step for each of its decoding requests, beside `others` of other
    /// salts; 0: no draft.
    pub fn most(&mut self, decoding: &[RequestId], others: usize, out: &mut Vec<usize>) {
        out.clear();
        out.resize(decoding.len(), self.options.fixed.unwrap_or(0).min(self.options.most_nodes));
        let step = std::mem::take(&mut self.step);
        if self.options.fixed.is_some() || decoding.is_empty() || self.options.most_nodes == 0 {
            return;
        }
        self.settle(&step);
        let could_draft = self.last.waits;
        self.decide(&step, decoding, others, out);
        if !could_draft {
            // The next step is in flight already: drafts would be for the one after it.
            out.fill(0);
        }
        self.remember(decoding, others, out);
    }

    /// Whether the next step of these requests should not be planned ahead of its result. All
    /// requests wait, or none.
    pub fn expects(&self) -> bool {
        match self.options.fixed {
            Some(nodes) => nodes > 0,
            None => self.waits(),
        }
    }

    pub fn forget(&mut self, id: RequestId) {
        self.requests.remove(&id);
    }

    fn waits(&self) -> bool {
        !matches!(self.state, State::Plain { .. })
    }

    /// Updates the estimates with the times and tokens of the last step.
    fn settle(&mut self, step: &StepSeen) {
        for asked in self.requests.values_mut() {
            let nodes = std::mem::take(&mut asked.nodes);
            if nodes > 0 {
                // The method made no draft.
                asked.agreement.fade(KEEP_OWN);
                asked.agreement.note(nodes, &Draft::default(), &[]);
                self.all.fade(keep_all(self.last.own));
                self.all.note(nodes, &Draft::default(), &[]);
            }
        }
        let Last { requests, own, waits, drafting_seconds, gap_seconds, .. } = self.last;
        if !step.is_decode_only || requests == 0 || step.rows < requests {
            return;
        }
        let took = match waits {
            true => self.costs.note_verifying(requests, step.rows - requests, step.seconds),
            false => self.costs.note_plain(requests, step.seconds),
        };
        let Some(plain) = self.costs.plain(requests) else { return };
        // An outlier must not count against drafts.
        let took = took.min(NEW_COST * plain);
        let (seconds, gained) = match waits {
            true => {
                let seconds = took + gap_seconds + drafting_seconds;
                (seconds, plain * (1.0 + step.accepted as f64 / requests as f64) - seconds)
            }
            false => (took, 0.0),
        };
        if !waits {
            // A method that follows plain steps does so for later drafts.
            self.account.borrow(drafting_seconds.min(plain));
        }
        // All salts together may lose no more than a single one.
        let share = own as f64 / requests as f64;
        self.account.note(share * plain, share * seconds, gained);
    }

    /// Changes the state, and sets the number of nodes.
    fn decide(&mut self, step: &StepSeen, decoding: &[RequestId], others: usize, nodes: &mut [usize]) {
        let (own, requests) = (decoding.len(), decoding.len() + others);
        let is_new =
            self.costs.plain_seen(requests) > LOOK_EVERY && decoding.iter().any(|id| !self.requests.contains_key(id));
        if let State::Plain { wait } = &mut self.state
            && *wait % LOOK_EVERY > 0
            && !is_new
        {
            // Little changes from step to step, and a check takes time, too.
            *wait -= 1;
            return;
        }
        let Some(curve) = self.costs.curve(requests) else { return };
        let plain_rate = requests as f64 / (curve.plain + self.costs.keeping_up(requests));
        let promise = self.choose(&curve, decoding, nodes);
        let pays = promise.rate / plain_rate;
        let is_overdrawn = self.account.is_overdrawn();
        self.state = match self.state {
            State::Plain { wait } if !self.account.may_begin() => State::Plain { wait: wait.max(LOOK_EVERY) - 1 },
            State::Speculating { .. } | State::Probing { .. } if is_overdrawn => self.back_off(),
            State::Speculating { .. } if pays < ENDS_AT => self.back_off(),
            State::Speculating { steps } if steps >= self.anchor_after(requests, pays) => {
                State::Plain { wait: ANCHOR_STEPS - 1 }
            }
            State::Speculating { steps } => State::Speculating { steps: steps + 1 },
            _ if pays >= BEGINS_AT => State::Speculating { steps: 0 },
            // A promising probe is repeated with twice the nodes, until all requests have drafts.
            State::Probing { nodes, .. } if step.lucky_walks * 2 > step.walks && nodes < 2 * PROBE_NODES * own => {
                State::Probing { left: PROBE_STEPS, nodes: 2 * nodes }
            }
            State::Probing { left: 0, .. } => self.back_off(),
            // Waiting for a method that makes no drafts costs next to nothing.
            State::Probing { left, nodes } if step.walks == 0 && left > 1 => State::Probing { left: left - 1, nodes },
            State::Probing { left, nodes } => State::Probing { left: left.min(PROBE_STEPS) - 1, nodes },
            State::Plain { wait: 0 } => {
                State::Probing { left: PROBE_STEPS_SILENT, nodes: PROBE_NODES * (1 + own / 32) }
            }
            State::Plain { wait } => State::Plain { wait: wait - 1 },
        };
        match self.state {
            State::Plain { .. } => nodes.fill(0),
            State::Probing { nodes: most, .. } => self.probe(most, decoding, nodes),
            State::Speculating { .. } => {
                self.spacing = SHORTEST_WAIT;
                self.explore(nodes);
            }
        }
    }

    /// Exploration: gives one request an extra node at a depth with little data. Without it that
    /// depth inherits the estimate of shallower ones and could never prove better.
    fn explore(&self, nodes: &mut [usize]) {
        let most = self.options.most_nodes;
        let is_unknown = |&nodes: &usize| (1..most).contains(&nodes) && self.all.asked(nodes) < CURIOUS;
        if let Some(nodes) = nodes.iter_mut().find(|nodes| is_unknown(nodes)) {
            *nodes += 1;
        }
    }

    /// Steps of speculation before some plain ones measure their time again. Few measurements or a
    /// small gain make these steps more important.
    fn anchor_after(&self, requests: usize, pays: f64) -> u32 {
        match self.costs.plain_seen(requests) {
            ..16 => 4 * LOOK_EVERY,
            ..48 if pays < 1.3 => 4 * LOOK_EVERY,
            _ if pays < 1.3 => 32 * LOOK_EVERY,
            _ => 128 * LOOK_EVERY,
        }
    }

    /// Plain steps until the next probe: twice as many as the last time, if the probe failed.
    fn back_off(&mut self) -> State {
        let wait = self.spacing;
        self.spacing = (2 * wait).min(LONGEST_WAIT);
        State::Plain { wait }
    }

    fn choose(&mut self, curve: &Curve, decoding: &[RequestId], nodes: &mut [usize]) -> Promise {
        self.all.steps(&mut self.steps);
        self.chooser.clear();
        let most = self.options.most_nodes;
        for (request, &id) in decoding.iter().enumerate() {
            let known = self.requests.entry(id).or_insert_with(|| Asked::new(most));
            known.agreement.fade(KEEP_IDLE);
            known.agreement.hopes(&self.steps, &mut self.hopes);
            self.chooser.add(request, &self.hopes);
        }
        self.chooser.choose(&self.costs, curve, self.last.nodes, nodes)
    }

    /// Gives nodes to the requests with the least data, about `most` in all.
    fn probe(&mut self, most: usize, decoding: &[RequestId], nodes: &mut [usize]) {
        nodes.fill(0);
        let known = |&request: &usize| self.requests[&decoding[request]].agreement.evidence();
        let mut order: Vec<usize> = (0..decoding.len()).collect();
        order.sort_by(|a, b| known(a).total_cmp(&known(b)));
        let mut left = most as f64;
        for request in order {
            nodes[request] = PROBE_NODES.min(self.options.most_nodes);
            self.requests[&decoding[request]].agreement.hopes(&self.steps, &mut self.hopes);
            left -= self.hopes[..nodes[request]].iter().map(|hope| hope.rows).sum::<f64>();
            if left < 0.5 {
                break;
            }
        }
    }

    fn remember(&mut self, decoding: &[RequestId], others: usize, nodes: &[usize]) {
        let mut catches_up = false;
        for (&id, &nodes) in decoding.iter().zip(nodes) {
            if let Some(known) = self.requests.get_mut(&id) {
                known.nodes = nodes;
                known.drafted &= nodes > 0;
                catches_up |= nodes > 0 && !known.drafted;
            }
        }
        self.last = Last {
            requests: decoding.len() + others,
            own: decoding.len(),
            nodes: nodes.iter().sum(),
            drafting: nodes.iter().filter(|&&nodes| nodes > 0).count(),
            waits: self.waits(),
            catches_up,
            ..Last::default()
        };
    }
}

/// Part of the evidence about all requests that remains after each draft of any: it fades over a
/// few steps.
fn keep_all(requests: usize) -> f32 {
    1.0 - 1.0 / (100.0 + 8.0 * requests as f32)
}
