//! A mock disk: files of blocks under their keys, and tasks that end late, out of order or badly.

use std::collections::BTreeMap;

use folio_scheduler::{DiskChunk, DiskTask, DiskTaskKind, HostSlot};

use crate::{hash::Rng, model::Model};

/// The blocks of one chunk: `blocks[group][block]`.
type Blocks = Vec<Vec<Vec<u64>>>;

#[derive(Debug)]
struct File {
    chunk: DiskChunk,
    blocks: Blocks,
}

#[derive(Debug)]
struct Running {
    task: DiskTask,
    /// The tick at which it ends; none while its step is in flight.
    due: Option<u64>,
    /// The step with the transfers that come before it.
    step: Option<u64>,
    ends_well: bool,
    /// The blocks it has read, if it read at its start; else it reads at its end.
    read: Option<Blocks>,
}

/// Latency and failures of tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskManners {
    /// Most ticks a task takes.
    pub latency: u64,
    /// One task in this number fails; 0: none.
    pub failures: usize,
}

#[derive(Debug)]
pub struct Disk {
    files: BTreeMap<u128, File>,
    running: Vec<Running>,
    manners: DiskManners,
    rng: Rng,
}

/// An ended task, to be reported to the scheduler.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    pub ticket: u64,
    pub kind: DiskTaskKind,
    pub ok: bool,
}

impl Disk {
    pub fn new(manners: DiskManners, seed: u64) -> Self {
        Self { files: BTreeMap::new(), running: Vec::new(), manners, rng: Rng(seed) }
    }

    pub fn keys(&self) -> impl Iterator<Item = u128> {
        self.files.keys().copied()
    }

    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Whether a task writes (or reads, if `reading` counts) this host slot.
    pub fn owns(&self, group: usize, slot: HostSlot, reading: bool) -> bool {
        self.running
            .iter()
            .any(|r| (reading || r.task.kind == DiskTaskKind::Fetch) && r.task.slots[group].contains(&slot))
    }

    pub fn busy(&self) -> bool {
        !self.running.is_empty()
    }

    /// Accepts a task of a plan: it begins when `step` is done, at once if none is in flight.
    pub fn accept(&mut self, task: &DiskTask, step: Option<u64>, tick: u64, model: &Model) {
        let ends_well = self.manners.failures == 0 || !self.rng.chance(self.manners.failures);
        self.running.push(Running { task: task.clone(), due: None, step, ends_well, read: None });
        if step.is_none() {
            self.begin(self.running.len() - 1, tick, model);
        }
    }

    /// Reads its inputs now, or at its end: both must work.
    fn begin(&mut self, index: usize, tick: u64, model: &Model) {
        self.running[index].due = Some(self.due(tick));
        if self.rng.chance(2) {
            let task = &self.running[index].task;
            self.running[index].read = match task.kind {
                DiskTaskKind::Store => Some(read_host(task, model)),
                DiskTaskKind::Fetch => self.find(&task.chunk),
            };
        }
    }

    fn due(&mut self, tick: u64) -> u64 {
        tick + 1 + self.rng.word() % self.manners.latency.max(1)
    }

    /// A file counts only if it has the same chunk as the task: another chunk may have the same
    /// key.
    fn find(&self, chunk: &DiskChunk) -> Option<Blocks> {
        self.files.get(&chunk.key).filter(|file| file.chunk == *chunk).map(|file| file.blocks.clone())
    }

    pub fn step_done(&mut self, step: u64, tick: u64, model: &Model) {
        for index in 0..self.running.len() {
            if self.running[index].due.is_none() && self.running[index].step == Some(step) {
                self.begin(index, tick, model);
            }
        }
    }

    /// The steps in flight failed: their tasks never begin.
    pub fn steps_failed(&mut self, tick: u64) {
        for i in 0..self.running.len() {
            if self.running[i].due.is_none() {
                self.running[i].ends_well = false;
                self.running[i].due = Some(self.due(tick));
            }
        }
    }

    /// Removes a file, even while a task reads it.
    pub fn lose(&mut self, nth: usize) -> Option<u128> {
        let key = self.files.keys().nth(nth % self.files.len().max(1)).copied()?;
        self.files.remove(&key);
        Some(key)
    }

    /// The process crashed: running tasks are dropped, files stay.
    pub fn restart(&mut self) {
        self.running.clear();
    }

    /// Ends the tasks that are due, in no particular order.
    pub fn poll(&mut self, tick: u64, model: &mut Model) -> Vec<Ended> {
        let mut ended = Vec::new();
        while let Some(index) = self.pick(tick) {
            let running = self.running.swap_remove(index);
            let ok = self.end(&running, model);
            ended.push(Ended { ticket: running.task.ticket, kind: running.task.kind, ok });
        }
        ended
    }

    fn pick(&mut self, tick: u64) -> Option<usize> {
        let is_due = |r: &Running| r.due.is_some_and(|due| due <= tick);
        let num = self.running.iter().filter(|r| is_due(r)).count();
        if num == 0 {
            return None;
        }
        let nth = self.rng.below(num);
        self.running.iter().enumerate().filter(|(_, r)| is_due(r)).map(|(i, _)| i).nth(nth)
    }

    fn end(&mut self, running: &Running, model: &mut Model) -> bool {
        let task = &running.task;
        if task.kind == DiskTaskKind::Store {
            if running.ends_well {
                let blocks = running.read.clone().unwrap_or_else(|| read_host(task, model));
                self.files.insert(task.chunk.key, File { chunk: task.chunk.clone(), blocks });
            }
            return running.ends_well;
        }
        let found = running.read.clone().or_else(|| self.find(&task.chunk)).filter(|_| running.ends_well);
        for (group, slots) in task.slots.iter().enumerate() {
            for (i, &slot) in slots.iter().enumerate() {
                match &found {
                    Some(blocks) => model.set_host_block(group, slot, &blocks[group][i]),
                    // A failed read may have written half of it.
                    None => {
                        let garbage: Vec<u64> = model.host_block(group, slot).iter().map(|v| v ^ 0x5a5a).collect();
                        model.set_host_block(group, slot, &garbage);
                    }
                }
            }
        }
        found.is_some()
    }
}

fn read_host(task: &DiskTask, model: &Model) -> Blocks {
    let block = |group: usize, slot: &HostSlot| model.host_block(group, *slot).to_vec();
    task.slots.iter().enumerate().map(|(group, slots)| slots.iter().map(|s| block(group, s)).collect()).collect()
}
