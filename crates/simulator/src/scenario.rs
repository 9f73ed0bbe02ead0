//! A run before it runs: a configuration and a list of events, both generated from one seed.
//!
//! Events name requests by their index among those alive, and everything else that varies follows
//! from the tick. So a list without some of its events is still valid, as shrinking needs.

use folio_scheduler::{GroupConfig, SchedulerConfig};

use crate::{disk::DiskManners, driver::Manners, hash::Rng};

#[derive(Clone, Debug)]
pub struct Scenario {
    pub setup: Setup,
    pub ticks: u64,
    /// Events in order of ticks.
    pub events: Vec<Event>,
}

#[derive(Clone, Debug)]
pub struct Setup {
    pub scheduler: SchedulerConfig,
    pub manners: Manners,
    /// Further requests are refused before they reach the scheduler.
    pub most_alive: usize,
    pub drafter: Drafter,
    /// Number of different tokens that the model may generate.
    pub vocab: u32,
    /// Added to all priorities of tenant 0.
    pub favour: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drafter {
    None,
    /// Chains and trees, by chance. Drafts are always right, never, or sometimes.
    Right,
    Wrong,
    Mixed,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub tick: u64,
    pub action: Action,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Add(Traffic),
    /// A request that continues the nth alive at its present state.
    Continue {
        nth: usize,
        extra: usize,
        answer: usize,
    },
    /// Between the plan and its result.
    Abort {
        nth: usize,
        in_flight: bool,
    },
    AbortAll,
    FailSteps,
    FailRow {
        nth: usize,
    },
    Shortage {
        nth: usize,
    },
    Jump {
        nanos: u64,
    },
    Drain,
    Restart,
    LoseChunk {
        nth: usize,
    },
    ClearCache,
    /// A request that must be refused.
    Bad {
        kind: usize,
    },
    /// Test of the simulator itself: a table entry is changed on the way to the model.
    Tamper,
}

/// A request, or several that arrive together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traffic {
    pub prompt: Prompt,
    pub answer: usize,
    /// Number of equal requests in the same step.
    pub copies: usize,
    /// Number of samples of the prompt: the second and later ones are forks of the first.
    pub samples: usize,
    pub priority: i32,
    pub tenant: u64,
    pub weight: u32,
    pub deadline_in: Option<u64>,
    pub salt: u64,
    pub prompt_logits: bool,
    pub stop: u32,
    pub stalls_after: Option<usize>,
}

/// Prompts with few beginnings over few tokens, so that they share prefixes; `family` 0 shares with
/// no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompt {
    pub family: u32,
    pub shared: usize,
    pub len: usize,
    pub seed: u64,
}

impl Prompt {
    pub fn tokens(&self) -> Vec<u32> {
        let mut rng = Rng(self.seed);
        let token = |i: usize| match self.family {
            0 if i == 0 => 1000 + (self.seed % 1_000_000) as u32,
            family if i < self.shared && family > 0 => family * 7 + i as u32 / 5,
            _ => rng.below(3) as u32,
        };
        (0..self.len).map(token).collect()
    }
}

impl Scenario {
    pub fn random(seed: u64, ticks: u64) -> Self {
        let mut rng = Rng(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x5eed);
        let setup = Setup::random(&mut rng, seed);
        let room = setup.room();
        let mut weather = Weather::random(&mut rng, &setup);
        let mut events = Vec::new();
        for tick in 0..ticks {
            weather.events(&mut rng, &setup, room, |action| events.push(Event { tick, action }));
        }
        Self { setup, ticks, events }
    }
}

impl Setup {
    fn random(rng: &mut Rng, seed: u64) -> Self {
        let blocks = if rng.chance(4) { rng.within(1, 6) } else { rng.within(4, 64) };
        let mut config = SchedulerConfig::new(vec![blocks]);
        for _ in 1..rng.pick(&[1, 1, 1, 2, 2, 3]) {
            config.groups.push(GroupConfig::new((blocks + rng.below(8)).saturating_sub(rng.below(4)).max(1)));
        }
        config.block_tokens = rng.pick(&[1, 4, 4, 16]);
        config.budget_tokens = match rng.below(4) {
            0 => rng.within(1, 8),
            3 => 512,
            _ => rng.within(8, 96),
        };
        config.max_chunk = rng.chance(2).then(|| rng.within(1, 20));
        config.max_seqs = if rng.chance(4) { 64 } else { rng.within(1, 16) };
        config.prompt_logit_rows = if rng.chance(2) { 256 } else { rng.within(1, 12) };
        config.inter_token_target = rng.chance(3).then(|| 1_000_000 * rng.within(1, 20) as u64);
        config.inter_token_steps = (seed % 4) as u32;
        config.longest_step = seed.is_multiple_of(3).then_some(1_000_000 << (seed % 8));
        config.aging = rng.pick(&[1_000, 1_000_000, 10_000_000_000]);
        config.prefix_caching = !rng.chance(5);
        config.copy_cost = rng.pick(&[0, 1_000, 100_000, 1_000_000_000]);
        config.kv_events = rng.chance(4);
        config.force_preempt_every = rng.chance(6).then(|| rng.within(1, 6) as u64);
        for group in &mut config.groups {
            group.window = rng.chance(3).then(|| rng.within(1, 40));
        }
        if rng.chance(2) {
            for group in &mut config.groups {
                group.host_slots = rng.within(0, 32);
            }
        }
        if config.prefix_caching && rng.chance(3) {
            let chunk = rng.within(1, 4);
            config.disk_chunk_blocks = Some(chunk);
            for group in &mut config.groups {
                group.host_slots = rng.within(2 * chunk, 32);
            }
        } else if rng.chance(4) {
            // A file identifies its predecessors only by its parent's hash, so a disk needs all
            // hash bits.
            config.hash_bits = rng.pick(&[1, 4, 4]);
        }
        let manners = Manners {
            depth: rng.pick(&[1, 2, 2]),
            disk: DiskManners { latency: rng.within(1, 12) as u64, failures: rng.pick(&[0, 3, 12]) },
            buffer: rng.within(0, 6),
            seed,
        };
        let drafter = rng.pick(&[Drafter::None, Drafter::None, Drafter::Right, Drafter::Wrong, Drafter::Mixed]);
        Self {
            scheduler: config,
            manners,
            most_alive: rng.within(2, 32),
            drafter,
            vocab: rng.pick(&[2, 50, 5000]),
            favour: 0,
        }
    }

    /// The longest sequence that the pools can hold, up to a bound.
    pub fn room(&self) -> usize {
        let fits = |len: usize| (0..self.scheduler.groups.len()).all(|g| self.fits(g, len));
        (1..=120).rev().find(|&len| fits(len)).unwrap_or(0)
    }

    fn fits(&self, group: usize, len: usize) -> bool {
        self.scheduler.most_blocks(group, len) <= self.scheduler.groups[group].blocks
    }
}

/// Frequencies of all kinds of events in one run.
struct Weather {
    arrivals: usize,
    burst: usize,
    aborts: usize,
    faults: bool,
    shortages: bool,
    tenants: u64,
    salts: usize,
    priorities: bool,
    deadlines: bool,
    restarts: bool,
}

impl Weather {
    fn random(rng: &mut Rng, setup: &Setup) -> Self {
        Self {
            arrivals: rng.pick(&[1, 2, 3, 6]),
            burst: rng.pick(&[1, 2, 8]),
            aborts: rng.pick(&[5, 20, 200]),
            faults: rng.chance(2),
            shortages: rng.chance(2),
            tenants: rng.pick(&[1, 1, 3]),
            salts: rng.pick(&[2, 10]),
            priorities: rng.chance(2),
            deadlines: rng.chance(2),
            restarts: setup.scheduler.disk_chunk_blocks.is_some() || rng.chance(4),
        }
    }

    fn events(&mut self, rng: &mut Rng, setup: &Setup, room: usize, mut push: impl FnMut(Action)) {
        if room >= 2 && rng.chance(self.arrivals) {
            for _ in 0..rng.within(1, self.burst) {
                push(Action::Add(self.traffic(rng, setup, room)));
            }
        }
        if rng.chance(12) {
            push(Action::Continue { nth: rng.below(64), extra: rng.below(4), answer: rng.within(1, 12) });
        }
        if rng.chance(self.aborts) {
            push(Action::Abort { nth: rng.below(64), in_flight: rng.chance(2) });
        }
        if rng.chance(400) {
            push(Action::AbortAll);
        }
        if rng.chance(80) {
            push(Action::Bad { kind: rng.below(4) });
        }
        if rng.chance(150) {
            push(Action::ClearCache);
        }
        if rng.chance(200) {
            push(Action::FailRow { nth: rng.below(8) });
        }
        if self.faults && rng.chance(120) {
            push(Action::FailSteps);
        }
        if self.shortages && rng.chance(40) {
            push(Action::Shortage { nth: rng.below(12) });
        }
        if rng.chance(250) {
            push(Action::Jump { nanos: 1 << rng.within(10, 56) });
        }
        if self.restarts && rng.chance(300) {
            push(if rng.chance(2) { Action::Restart } else { Action::Drain });
        }
        if setup.scheduler.disk_chunk_blocks.is_some() && rng.chance(25) {
            push(Action::LoseChunk { nth: rng.below(64) });
        }
    }

    fn traffic(&self, rng: &mut Rng, setup: &Setup, room: usize) -> Traffic {
        let block = setup.scheduler.block_tokens;
        let most = room - 1;
        let len = match rng.below(3) {
            // Around the end of a block, where off-by-one errors are likely.
            0 => (block * rng.within(1, 6) + rng.below(3)).saturating_sub(1),
            1 => rng.within(1, 12),
            _ => rng.within(1, 60),
        };
        let len = len.clamp(1, most);
        let prompt = Prompt { family: rng.below(4) as u32, shared: rng.below(len + 1), len, seed: rng.word() >> 32 };
        let answer = if rng.chance(4) { room - len } else { rng.within(1, 24) };
        let extreme = rng.chance(20);
        Traffic {
            prompt,
            answer: answer.min(room - len),
            copies: if rng.chance(6) { rng.within(2, 4) } else { 1 },
            samples: if rng.chance(6) { rng.within(2, 4) } else { 1 },
            priority: match self.priorities {
                true if extreme => rng.pick(&[i32::MIN, i32::MAX]),
                true => rng.below(5) as i32 - 2,
                false => 0,
            },
            tenant: rng.word() % self.tenants,
            weight: rng.within(1, 4) as u32,
            deadline_in: (self.deadlines && rng.chance(4)).then(|| 1_000_000 * rng.within(1, 200) as u64),
            salt: u64::from(rng.chance(self.salts)),
            prompt_logits: rng.chance(10),
            stop: if rng.chance(3) && setup.vocab > 2 { 17 } else { 0 },
            stalls_after: rng.chance(20).then(|| rng.below(4)),
        }
    }
}
