//! Plays a scenario: clients, clock and faults around the driver, tick by tick.

use std::{cell::RefCell, mem::ManuallyDrop, panic::AssertUnwindSafe, sync::Once};

use folio_scheduler::{Draft, NewRequest, RequestId, SchedulerError};

use crate::{
    client::Wants,
    coverage::Coverage,
    driver::Driver,
    fairness,
    hash::{self, Rng},
    invariants::{Invariant, Violation},
    perturb::Perturb,
    scenario::{Action, Drafter, Event, Prompt, Scenario, Traffic},
    trace::Trace,
    truth::Sampling,
};

/// Outcome of a scenario.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub violation: Option<Violation>,
    pub coverage: Coverage,
    /// Over all plans and results; the same for the same scenario.
    pub trace: u64,
    pub lines: Vec<String>,
    pub flips: u64,
    pub effective_flips: u64,
}

/// Options beside the scenario.
#[derive(Clone, Debug, Default)]
pub struct Mode {
    pub spoken: bool,
    pub perturb: Option<Perturb>,
}

struct World<'a> {
    driver: Driver,
    scenario: &'a Scenario,
    next_id: u64,
}

/// Plays a scenario until no request is left. A panic in the scheduler is a violation. Some
/// scenarios are played again to check that tenants are not affected by each other's priorities.
pub fn play(scenario: &Scenario, mode: Mode) -> Outcome {
    let again = (mode.perturb.is_none() && fairness::is_told_of_tenants(scenario)).then(|| mode.clone());
    let mut outcome = play_once(scenario, mode);
    if let Some(mode) = again.filter(|_| outcome.violation.is_none()) {
        let [plain, favoured] =
            fairness::FAVOURS.map(|favour| play_once(&fairness::favouring(scenario, favour), mode.clone()));
        let felt = (plain.trace != favoured.trace).then(|| fairness::felt(scenario));
        outcome.violation = plain.violation.or(favoured.violation).or(felt);
    }
    outcome
}

fn play_once(scenario: &Scenario, mode: Mode) -> Outcome {
    install_hook();
    let setup = &scenario.setup;
    let driver = Driver::new(setup.scheduler.clone(), setup.manners).expect("drawn to be sound");
    // After a panic the world is not dropped, because that could panic again.
    let mut world = ManuallyDrop::new(World { driver, scenario, next_id: 0 });
    if mode.spoken {
        world.driver.trace = Trace::spoken();
    }
    world.driver.perturb = mode.perturb;
    QUIET.with_borrow_mut(|quiet| *quiet = Some(String::new()));
    let played = std::panic::catch_unwind(AssertUnwindSafe(|| world.run()));
    let violation = match played {
        Ok(done) => done.err(),
        Err(_) => {
            let what = QUIET.with_borrow_mut(|quiet| quiet.replace(String::new())).unwrap_or_default();
            Some(Violation { invariant: Invariant::Panic, tick: world.driver.tick, what })
        }
    };
    let driver = &mut world.driver;
    let (flips, effective_flips) = driver.perturb.as_ref().map_or((0, 0), |p| (p.flips, p.effective));
    let mut outcome = Outcome {
        violation,
        coverage: std::mem::take(&mut driver.coverage),
        trace: driver.trace.hash,
        lines: driver.trace.lines.take().unwrap_or_default(),
        flips,
        effective_flips,
    };
    if outcome.violation.is_none() {
        let dropped = std::panic::catch_unwind(AssertUnwindSafe(|| drop(ManuallyDrop::into_inner(world))));
        if dropped.is_err() {
            let what = QUIET.with_borrow_mut(|quiet| quiet.take()).unwrap_or_default();
            outcome.violation = Some(Violation { invariant: Invariant::Panic, tick: scenario.ticks, what });
        }
    }
    QUIET.with_borrow_mut(|quiet| *quiet = None);
    outcome
}

thread_local! {
    /// The message of the last panic, on threads where panics are expected.
    static QUIET: RefCell<Option<String>> = const { RefCell::new(None) };
}

fn install_hook() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let expected = QUIET.with_borrow_mut(|quiet| {
                if let Some(message) = quiet {
                    *message = info.to_string();
                }
                quiet.is_some()
            });
            if !expected {
                usual(info);
            }
        }));
    });
}

impl World<'_> {
    fn run(&mut self) -> Result<(), Violation> {
        let mut next = 0;
        for tick in 0..self.scenario.ticks {
            let events = &self.scenario.events[next..];
            let num = events.iter().take_while(|e| e.tick <= tick).count();
            next += num;
            if num == 0 && self.driver.is_idle() && !self.driver.is_draining() {
                continue;
            }
            let events = &events[..num];
            self.driver.trace.say(|| format!("-- tick {tick}"));
            self.turn(events)?;
        }
        self.driver.trace.say(|| "-- no more events".into());
        while !self.driver.is_idle() {
            self.turn(&[])?;
        }
        self.driver.fold_stats();
        // Blocks that are freed late show only now.
        self.driver.turn()
    }

    fn turn(&mut self, events: &[Event]) -> Result<(), Violation> {
        for event in events {
            self.apply(&event.action)?;
        }
        if self.driver.is_draining() && self.driver.is_idle() {
            self.driver.restart()?;
        }
        self.draft();
        self.driver.begin_turn()?;
        for event in events {
            if let Action::Abort { nth, in_flight: true } = event.action {
                self.abort(nth)?;
            }
        }
        self.driver.end_turn()
    }

    fn apply(&mut self, action: &Action) -> Result<(), Violation> {
        match action {
            Action::Add(traffic) => self.add(traffic),
            &Action::Continue { nth, extra, answer } => {
                self.go_on(nth, extra, answer);
                Ok(())
            }
            &Action::Abort { nth, in_flight: false } => self.abort(nth),
            Action::Abort { .. } => Ok(()),
            Action::AbortAll => {
                let ids: Vec<RequestId> = self.driver.clients().keys().copied().collect();
                ids.into_iter().try_for_each(|id| self.driver.abort(id))
            }
            Action::FailSteps => self.driver.fail_steps(),
            &Action::FailRow { nth } => {
                self.driver.spoil_row(nth);
                Ok(())
            }
            &Action::Shortage { nth } => {
                self.driver.inject_shortage(nth);
                Ok(())
            }
            &Action::Jump { nanos } => {
                self.driver.coverage.clock_jumps += 1;
                self.driver.now = self.driver.now.saturating_add(nanos).min(1 << 62);
                Ok(())
            }
            Action::Drain => {
                self.driver.drain();
                Ok(())
            }
            Action::Restart => self.driver.restart(),
            &Action::LoseChunk { nth } => {
                self.driver.lose_chunk(nth);
                Ok(())
            }
            Action::ClearCache => {
                self.driver.clear_cache();
                Ok(())
            }
            &Action::Bad { kind } => self.bad(kind),
            Action::Tamper => {
                self.driver.perturb = Some(Perturb::once(self.driver.tick));
                Ok(())
            }
        }
    }

    fn nth(&self, nth: usize) -> Option<RequestId> {
        let clients = self.driver.clients();
        clients.keys().nth(nth % clients.len().max(1)).copied()
    }

    /// Aborts a live request, and now and then one that has ended.
    fn abort(&mut self, nth: usize) -> Result<(), Violation> {
        let id = if nth.is_multiple_of(16) { Some(RequestId(self.next_id / 2)) } else { self.nth(nth) };
        id.map_or(Ok(()), |id| self.driver.abort(id))
    }

    fn new_id(&mut self) -> RequestId {
        self.next_id += 1;
        RequestId(self.next_id)
    }

    fn priority(&self, tenant: u64, asked: i32) -> i32 {
        if tenant == 0 { asked.saturating_add(self.scenario.setup.favour) } else { asked }
    }

    fn sampling(&self, id: RequestId) -> Sampling {
        // Some requests sample alike, so that their answers can be shared too.
        Sampling { seed: id.0 % 3, vocab: self.scenario.setup.vocab, salt: 0 }
    }

    fn add(&mut self, traffic: &Traffic) -> Result<(), Violation> {
        let room = self.scenario.setup.room();
        if room < 2 {
            return Ok(());
        }
        let len = traffic.prompt.len.min(room - 1);
        let prompt = Prompt { len, ..traffic.prompt }.tokens();
        let max_len = (len + traffic.answer.max(1)).min(room);
        let mut first = None;
        let stranger = if traffic.prompt.seed.is_multiple_of(16) { self.nth(len) } else { None };
        for i in 0..traffic.copies * traffic.samples {
            if self.driver.clients().len() >= self.scenario.setup.most_alive {
                return Ok(());
            }
            let id = self.new_id();
            let request = NewRequest {
                id,
                prompt: prompt.clone(),
                max_len,
                wants_prompt_logits: traffic.prompt_logits,
                cache_salt: traffic.salt,
                priority: self.priority(traffic.tenant, traffic.priority),
                tenant: traffic.tenant,
                weight: traffic.weight,
                deadline: traffic.deadline_in.map(|d| self.driver.now.saturating_add(d)),
                // A fork of an unrelated request has nothing to share, and must work.
                fork_of: if traffic.samples > 1 { first } else { stranger },
            };
            let wants = Wants { sampling: self.sampling(id), stop: traffic.stop, stalls_after: traffic.stalls_after };
            first = first.or(Some(id));
            self.driver.coverage.duplicates += u64::from(i > 0 && traffic.samples == 1);
            let expected = if self.driver.is_draining() { Err(SchedulerError::Draining) } else { Ok(()) };
            self.expect(request, wants, expected)?;
            // The others get drafts when none of their rows happens to be in flight.
            let drafts = self.scenario.setup.drafter != Drafter::None && id.0.is_multiple_of(2);
            self.driver.expect_drafts(id, drafts);
        }
        Ok(())
    }

    fn go_on(&mut self, nth: usize, extra: usize, answer: usize) {
        let Some(of) = self.nth(nth) else { return };
        let room = self.scenario.setup.room();
        let id = self.new_id();
        let client = &self.driver.clients()[&of];
        let mut prompt = client.truth.tokens().to_vec();
        prompt.extend((0..extra as u32).map(|i| i % 3));
        prompt.truncate(room - 1);
        let max_len = (prompt.len() + answer).min(room);
        let mut request = NewRequest::new(id, prompt, max_len);
        // Now and then one that may not share the request that it continues.
        request.cache_salt = if extra == 3 { client.salt ^ 1 } else { client.salt };
        request.tenant = client.tenant;
        request.priority = self.priority(client.tenant, 0);
        request.fork_of = Some(of);
        if self.driver.clients().len() < self.scenario.setup.most_alive {
            let wants = Wants { sampling: self.sampling(id), ..Wants::default() };
            let _ = self.driver.add(request, wants);
        }
    }

    fn bad(&mut self, kind: usize) -> Result<(), Violation> {
        let id = self.new_id();
        let (request, expected) = match kind {
            0 => (NewRequest::new(id, vec![], 2), SchedulerError::EmptyPrompt),
            1 => (NewRequest::new(id, vec![1, 2], 2), SchedulerError::PromptTooLong { prompt: 2, max_len: 2 }),
            2 => {
                let Err(error) = self.driver.scheduler.check_fits(100_000) else { return Ok(()) };
                (NewRequest::new(id, vec![1], 100_000), error)
            }
            _ => {
                let Some(id) = self.nth(0) else { return Ok(()) };
                (NewRequest::new(id, vec![1], 2), SchedulerError::DuplicateId(id))
            }
        };
        if self.driver.is_draining() {
            return Ok(());
        }
        self.expect(request, Wants::default(), Err(expected))
    }

    /// I9 begins with admission.
    fn expect(
        &mut self,
        request: NewRequest,
        wants: Wants,
        expected: Result<(), SchedulerError>,
    ) -> Result<(), Violation> {
        let id = request.id.0;
        let added = self.driver.add(request, wants);
        if added == expected {
            return Ok(());
        }
        let what = format!("request {id}: add said {added:?} instead of {expected:?}");
        Err(Violation { invariant: Invariant::I9, tick: self.driver.tick, what })
    }

    fn draft(&mut self) {
        let drafter = self.scenario.setup.drafter;
        if drafter == Drafter::None {
            return;
        }
        let ready = self.driver.clients().values().filter(|c| c.started && c.in_flight == 0 && !c.broken);
        let ready: Vec<RequestId> = ready.map(|c| c.id).collect();
        for id in ready {
            let mut rng = Rng(hash::mix(hash::mix(self.driver.tick, id.0), 77));
            if rng.chance(32) {
                let expected = self.driver.clients()[&id].expects_drafts;
                self.driver.expect_drafts(id, !expected);
            }
            if rng.chance(2) {
                continue;
            }
            let is_tree = rng.chance(2);
            let num = match is_tree {
                true if rng.chance(16) => Draft::MOST_NODES,
                true => rng.within(2, 14),
                false => rng.within(1, 5),
            };
            let right = match drafter {
                // A tree has other nodes as well.
                Drafter::Right if is_tree => num / 2,
                Drafter::Right => num,
                Drafter::Wrong => 0,
                _ => rng.below(num + 1),
            };
            match is_tree {
                true => self.driver.draft_tree(id, num, right, &mut rng),
                false => self.driver.draft(id, num, right),
            }
        }
    }
}
