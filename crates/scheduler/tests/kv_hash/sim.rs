//! A model whose answer shows every wrong block: the K/V entry of a token is a hash of (token, position), written
//! through the block table; the next token is a hash of all entries read back through it. A stale, freed, foreign or
//! unwritten block changes the answer exactly.

use std::collections::BTreeMap;

use folio_scheduler::{BlockId, NewRequest, RequestId, Scheduler, SchedulerConfig, StepPlan};

pub fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.rotate_left(23) ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 32)
}

pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0, 1)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }
}

fn entry(token: u32, position: usize) -> u64 {
    mix(u64::from(token) + 1, position as u64 + 1)
}

fn next_token(entries: impl Iterator<Item = u64>) -> u32 {
    (entries.fold(7, mix) % 1_000_000) as u32
}

/// The answer of a request that has the model for itself.
pub fn reference(prompt: &[u32], num_tokens: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..num_tokens {
        tokens.push(next_token(tokens.iter().enumerate().map(|(i, &t)| entry(t, i))));
    }
    tokens.split_off(prompt.len())
}

/// K/V memory of every group: one entry a slot.
pub struct Model {
    block_tokens: usize,
    slots: Vec<Vec<u64>>,
    pub tokens_computed: usize,
}

impl Model {
    pub fn new(config: &SchedulerConfig) -> Self {
        let slots = config.blocks.iter().map(|&n| vec![0; n * config.block_tokens]).collect();
        Self { block_tokens: config.block_tokens, slots, tokens_computed: 0 }
    }

    pub fn run(&mut self, plan: &StepPlan) -> Vec<(RequestId, Option<u32>)> {
        let block_tokens = self.block_tokens;
        let slot = |table: &[BlockId], position: usize| {
            table[position / block_tokens].0 as usize * block_tokens + position % block_tokens
        };
        for a in &plan.assignments {
            self.tokens_computed += a.tokens.len();
            for (i, &token) in a.tokens.iter().enumerate() {
                for (table, slots) in a.tables.iter().zip(&mut self.slots) {
                    slots[slot(table, a.first + i)] = entry(token, a.first + i);
                }
            }
        }
        let read = |a: &folio_scheduler::Assignment| {
            let context = a.first + a.tokens.len();
            let groups = a.tables.iter().zip(&self.slots);
            // Groups hold the same entries, so each must give the same answer; their sum of differences is mixed in.
            let mut answers = groups.map(|(table, slots)| next_token((0..context).map(|p| slots[slot(table, p)])));
            let first = answers.next().expect("a group");
            answers.fold(first, |sum, other| sum.wrapping_add(other.wrapping_sub(first).wrapping_mul(31)))
        };
        plan.assignments.iter().map(|a| (a.id, a.samples.then(|| read(a)))).collect()
    }
}

pub struct Client {
    pub prompt: Vec<u32>,
    pub num_tokens: usize,
    pub answer: Vec<u32>,
    pub done: bool,
    pub aborted: bool,
}

/// Scheduler, model and clients.
pub struct Sim {
    pub scheduler: Scheduler,
    pub model: Model,
    pub clients: BTreeMap<RequestId, Client>,
    pub max_seqs: usize,
    pub budget_tokens: usize,
    pub steps: usize,
    pub max_preemptions: u32,
    next_id: u64,
}

impl Sim {
    pub fn new(config: SchedulerConfig) -> Self {
        Self {
            model: Model::new(&config),
            max_seqs: config.max_seqs,
            budget_tokens: config.budget_tokens,
            scheduler: Scheduler::new(config).expect("a sound configuration"),
            clients: BTreeMap::new(),
            steps: 0,
            max_preemptions: 0,
            next_id: 0,
        }
    }

    pub fn add(&mut self, prompt: Vec<u32>, num_tokens: usize) -> RequestId {
        self.add_salted(prompt, num_tokens, 0)
    }

    pub fn add_salted(&mut self, prompt: Vec<u32>, num_tokens: usize, cache_salt: u64) -> RequestId {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let max_len = prompt.len() + num_tokens;
        let request = NewRequest { id, prompt: prompt.clone(), max_len, wants_prompt_logits: false, cache_salt };
        self.scheduler.add(request).expect("the request fits");
        self.clients.insert(id, Client { prompt, num_tokens, answer: Vec::new(), done: false, aborted: false });
        id
    }

    pub fn abort(&mut self, id: RequestId) {
        let client = self.clients.get_mut(&id).expect("known");
        if !client.done && !client.aborted {
            client.aborted = true;
            assert!(self.scheduler.abort(id).is_some());
        }
    }

    /// One step; `tamper` may spoil the plan on its way to the model.
    pub fn step_with(&mut self, tamper: impl FnOnce(&mut StepPlan)) {
        let mut plan = self.scheduler.schedule();
        self.scheduler.check_integrity().expect("sound after schedule");
        assert!(plan.num_tokens() <= self.budget_tokens);
        assert!(self.scheduler.stats().running <= self.max_seqs);
        tamper(&mut plan);
        let results = self.model.run(&plan);
        self.scheduler.commit(&results);
        self.scheduler.check_integrity().expect("sound after commit");
        for (id, token) in results {
            let Some(token) = token else { continue };
            let client = self.clients.get_mut(&id).expect("known");
            client.answer.push(token);
            if client.answer.len() == client.num_tokens {
                client.done = true;
                let departed = self.scheduler.finish(id).expect("runs");
                self.max_preemptions = self.max_preemptions.max(departed.preemptions);
            }
        }
        self.scheduler.check_integrity().expect("sound after finish");
        self.steps += 1;
    }

    pub fn step(&mut self) {
        self.step_with(|_| {});
    }

    pub fn run_to_end(&mut self) {
        let work: usize = self.clients.values().map(|c| c.prompt.len() + c.num_tokens).sum();
        let limit = self.steps + 200 + 60 * work;
        while self.scheduler.has_work() {
            self.step();
            assert!(self.steps < limit, "no progress");
        }
    }

    /// Every answer is that of the request alone, and nothing is held at the end.
    pub fn wrong_answers(&self) -> usize {
        let wrong = |c: &&Client| !c.aborted && c.answer != reference(&c.prompt, c.num_tokens);
        self.clients.values().filter(wrong).count()
    }

    pub fn check_end(&self) {
        let stats = self.scheduler.stats();
        assert_eq!((stats.running, stats.waiting), (0, 0));
        assert!(stats.groups.iter().all(|g| g.blocks_used == 0), "{stats:?}");
        assert!(self.clients.values().all(|c| c.aborted || c.done));
        assert_eq!(self.wrong_answers(), 0);
    }
}
