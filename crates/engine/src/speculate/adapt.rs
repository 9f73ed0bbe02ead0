//! How many nodes to ask for: as many as pay, measured by the clock, and none where none do.
//!
//! What a draft brings is known by how drafts of the request, and of everybody, agreed of late; what it costs, by how
//! long steps took and drafts did. From both comes the number of nodes a request that makes most tokens a second. A
//! step that verifies drafts cannot be planned ahead, and no more can those of the other requests in it without falling
//! apart into two batches: either all requests wait for drafts, or none. Where drafts do not pay, they are probed now
//! and then. [`Account`] watches what speculation has gained in fact: whatever the estimates say, it stops when more
//! time is lost than a small part of all time. Nothing here looks at a clock: all durations come from outside.
//!
//! There is one [`Adapt`] for each salt ([`Watches`]), which all begin alike: how much others' drafts agreed must not show
//! in how many a request is asked for. To one of them, requests of other salts are a part of the machine: so many more
//! tokens come out of a step, and it takes as long as it takes. Their drafts are not counted as its own.

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
    /// No request is ever asked for more.
    pub most_nodes: usize,
    /// Every request is always asked for so many.
    pub fixed: Option<usize>,
}

/// Decides how far to speculate for requests of one salt. Behind every step: [`Adapt::note_step`] and [`Adapt::note_walk`]
/// of what was in it, then [`Adapt::most`] for the next, then [`Adapt::note_drafting`].
#[derive(Debug)]
pub struct Adapt {
    options: AdaptOptions,
    costs: Costs,
    all: Agreement,
    requests: HashMap<RequestId, Asked>,
    account: Account,
    state: State,
    /// Steps until a probe, the next time that one fails.
    spacing: u32,
    /// The step behind which [`Adapt::most`] is about to be asked.
    step: StepSeen,
    /// What was asked for last.
    last: Last,
    /// Nothing was drafted yet: whatever does so for the first time touches memory that nobody has touched.
    is_cold: bool,
    chooser: Chooser,
    steps: Steps,
    hopes: Vec<Hope>,
}

/// What is known of one request.
#[derive(Debug)]
struct Asked {
    agreement: Agreement,
    /// Nodes that it was asked for, until it is known what came of them.
    nodes: usize,
    /// Whether a draft came since it was last asked for none. Before that, a method takes in what it missed.
    drafted: bool,
}

impl Asked {
    fn new(most: usize) -> Self {
        Self { agreement: Agreement::new(most), nodes: 0, drafted: false }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nobody waits for drafts, for so many steps at least.
    Plain { wait: u32 },
    /// Drafts of about so many nodes in all are made, to see what comes of them; so many steps are left.
    Probing { left: u32, nodes: usize },
    /// Drafts pay, and have done so for so many steps without a look at plain ones.
    Speculating { steps: u32 },
}

#[derive(Clone, Copy, Debug, Default)]
struct StepSeen {
    rows: usize,
    seconds: f64,
    is_decode_only: bool,
    /// Tokens that drafts brought.
    accepted: usize,
    walks: usize,
    /// Walks that accepted anything.
    lucky_walks: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Last {
    /// Requests that were decoding, those of other salts included.
    requests: usize,
    /// Its own, nodes that they were asked for, and how many of them were.
    own: usize,
    nodes: usize,
    drafting: usize,
    /// Whether the step was waited for.
    waits: bool,
    /// Whether somebody had missed something, so that the time of drafting says little of drafts to come.
    catches_up: bool,
    /// Seconds between the steps: of drafting, and of waiting for the step that then comes.
    drafting_seconds: f64,
    gap_seconds: f64,
}

/// Part of the evidence that stays with each of a request's drafts, and with each step without one.
const KEEP_OWN: f32 = 1.0 - 1.0 / 20.0;
const KEEP_IDLE: f32 = 1.0 - 1.0 / 200.0;

/// Plain steps that one which verifies so many rows for the first time may cost at most, or else it is a hiccup.
const NEW_COST: f64 = 4.0;

/// By how much speculation must be better than none before it begins, and how bad it may become before it ends.
const BEGINS_AT: f64 = 1.03;
const ENDS_AT: f64 = 1.0;

/// Plain steps between looks at whether drafts would pay.
const LOOK_EVERY: u32 = 8;

/// Plain steps, now and then, where drafts pay.
const ANCHOR_STEPS: u32 = 4;
/// A node behind those that pay is asked for as well, until it has been so often of late.
const CURIOUS: f32 = 2.0;

/// Steps of a probe in which there are drafts, and in all.
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

    /// A step has ended: how long the device was busy with it, and not how long it waited for it. Its rows are all but
    /// drafts of other salts. One that computes any prompt is not `is_decode_only`, and only heard of.
    pub fn note_step(&mut self, rows: usize, took: Duration, is_decode_only: bool) {
        self.step = StepSeen { rows, seconds: took.as_secs_f64(), is_decode_only, ..self.step };
    }

    /// How long the device waited for a step after the drafts for it were made (or, without any, after the step before
    /// ended). Told before [`Adapt::note_step`] of that step; worth telling where drafts keep a step from being planned
    /// ahead.
    pub fn note_gap(&mut self, waited: Duration) {
        self.last.gap_seconds = waited.as_secs_f64();
        if self.last.waits && self.last.requests > 0 {
            self.costs.note_gap(self.last.requests, self.last.gap_seconds);
        }
    }

    /// How long it took to make the drafts that were asked for last, the longest of so many nodes; or, where none were, to
    /// take in the step. Where only others' were made, there is nothing to tell.
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

    /// What came of a draft that a step verified.
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

    /// How many nodes to ask for in the next step, for each of its requests that decode, where `others` do besides; 0: none.
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
            // The next step is under way already: drafts can only be for the one behind it.
            out.fill(0);
        }
        self.remember(decoding, others, out);
    }

    /// Whether the next step of its requests should not be planned ahead of its result. All requests wait, or none.
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

    /// Takes in what the last step cost and brought.
    fn settle(&mut self, step: &StepSeen) {
        for asked in self.requests.values_mut() {
            let nodes = std::mem::take(&mut asked.nodes);
            if nodes > 0 {
                // It had nothing to say.
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
        // A hiccup is nobody's fault.
        let took = took.min(NEW_COST * plain);
        let (seconds, gained) = match waits {
            true => {
                let seconds = took + gap_seconds + drafting_seconds;
                (seconds, plain * (1.0 + step.accepted as f64 / requests as f64) - seconds)
            }
            false => (took, 0.0),
        };
        if !waits {
            // Who keeps up with plain steps does so for drafts to come.
            self.account.borrow(drafting_seconds.min(plain));
        }
        // All salts together may lose no more than one that is alone.
        let share = own as f64 / requests as f64;
        self.account.note(share * plain, share * seconds, gained);
    }

    /// Moves between the states, and says how many nodes.
    fn decide(&mut self, step: &StepSeen, decoding: &[RequestId], others: usize, nodes: &mut [usize]) {
        let (own, requests) = (decoding.len(), decoding.len() + others);
        let is_new =
            self.costs.plain_seen(requests) > LOOK_EVERY && decoding.iter().any(|id| !self.requests.contains_key(id));
        if let State::Plain { wait } = &mut self.state
            && *wait % LOOK_EVERY > 0
            && !is_new
        {
            // Little changes from step to step, and to look costs time, too.
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
            // What looks good is looked at more closely, until all are.
            State::Probing { nodes, .. } if step.lucky_walks * 2 > step.walks && nodes < 2 * PROBE_NODES * own => {
                State::Probing { left: PROBE_STEPS, nodes: 2 * nodes }
            }
            State::Probing { left: 0, .. } => self.back_off(),
            // It costs next to nothing to wait for a method that has nothing to say.
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

    /// Asks somebody for a node more where little is known of such nodes: they are judged by those before them, and would never
    /// show that they are better.
    fn explore(&self, nodes: &mut [usize]) {
        let most = self.options.most_nodes;
        let is_unknown = |&nodes: &usize| (1..most).contains(&nodes) && self.all.asked(nodes) < CURIOUS;
        if let Some(nodes) = nodes.iter_mut().find(|nodes| is_unknown(nodes)) {
            *nodes += 1;
        }
    }

    /// Steps of speculation after which some plain ones tell again what those take. Where little is known of them, or
    /// little is won, that matters most.
    fn anchor_after(&self, requests: usize, pays: f64) -> u32 {
        match self.costs.plain_seen(requests) {
            ..16 => 4 * LOOK_EVERY,
            ..48 if pays < 1.3 => 4 * LOOK_EVERY,
            _ if pays < 1.3 => 32 * LOOK_EVERY,
            _ => 128 * LOOK_EVERY,
        }
    }

    /// Plain steps until the next probe: twice as many as the last time, if that was in vain.
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

    /// Asks those of whom least is known for a few nodes, about `most` in all.
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

/// Part of the evidence about everybody that stays with each draft of anybody: what is older than some steps fades.
fn keep_all(requests: usize) -> f32 {
    1.0 - 1.0 / (100.0 + 8.0 * requests as f32)
}
