//! The hash of all events (I16), and the same events in words on request.

use folio_scheduler::{RowResult, StepPlan, Transfer};

use crate::hash::mix;

#[derive(Clone, Debug, Default)]
pub struct Trace {
    pub hash: u64,
    /// The events in words; none unless requested.
    pub lines: Option<Vec<String>>,
}

impl Trace {
    pub fn spoken() -> Self {
        Self { hash: 0, lines: Some(Vec::new()) }
    }

    pub fn say(&mut self, line: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.lines {
            lines.push(line());
        }
    }

    fn take(&mut self, word: u64) {
        self.hash = mix(self.hash, word);
    }

    pub fn plan(&mut self, plan: &StepPlan) {
        for a in &plan.assignments {
            self.take(a.id.0 << 20 | (a.first as u64) << 8 | a.num_rows() as u64);
            self.take(u64::from(a.awaits_token) << 1 | u64::from(a.samples) | (a.num_drafts as u64) << 8);
            let node = |sum: u64, parent: &Option<u16>| sum.wrapping_mul(65) + parent.map_or(0, |p| u64::from(p) + 1);
            self.take(a.parents.iter().fold(0, node));
            for table in a.tables.iter() {
                let sum = table.iter().fold(0u64, |sum, b| sum.wrapping_mul(0x0100_0000_01b3) ^ u64::from(b.0));
                self.take(sum);
            }
        }
        for transfer in &plan.transfers {
            let (kind, from, to) = match *transfer {
                Transfer::Copy { from, to, .. } => (1, from.0, to.0),
                Transfer::Save { from, to, .. } => (2, from.0, to.0),
                Transfer::Load { from, to, .. } => (3, from.0, to.0),
            };
            self.take(kind << 60 | u64::from(from) << 30 | u64::from(to));
        }
        for task in &plan.disk_tasks {
            self.take(task.ticket ^ task.chunk.key as u64);
        }
        for preempted in &plan.preempted {
            self.take(preempted.id.0 | 1 << 61);
        }
        self.say(|| spoken(plan));
    }

    pub fn results(&mut self, results: &[RowResult]) {
        for result in results {
            self.take(result.id.0 << 32 | u64::from(result.token.unwrap_or(u32::MAX)));
            result.accepted.iter().for_each(|&token| self.take(u64::from(token)));
        }
        self.say(|| {
            let each = |r: &RowResult| match r.token {
                Some(token) if !r.accepted.is_empty() => format!(" {}:{:?}{token}", r.id.0, r.accepted),
                Some(token) => format!(" {}:{token}", r.id.0),
                None => format!(" {}:-", r.id.0),
            };
            format!("committed{}", results.iter().map(each).collect::<String>())
        });
    }
}

fn spoken(plan: &StepPlan) -> String {
    use std::fmt::Write;
    let mut line = String::from("plan");
    for transfer in &plan.transfers {
        let _ = match transfer {
            Transfer::Copy { group, from, to } => write!(line, " copy g{group} {}->{}", from.0, to.0),
            Transfer::Save { group, from, to } => write!(line, " save g{group} {}->host {}", from.0, to.0),
            Transfer::Load { group, from, to } => write!(line, " load g{group} host {}->{}", from.0, to.0),
        };
    }
    for a in &plan.assignments {
        let awaited = if a.awaits_token { "?" } else { "" };
        let drafts =
            if a.num_drafts > 0 { format!(" {} drafts {:?}", a.num_drafts, a.drafts()) } else { String::new() };
        let samples = if a.samples { "*" } else { "" };
        let _ = write!(line, " [{} at {}+{}{awaited}{drafts}{samples}", a.id.0, a.first, a.num_rows());
        for table in a.tables.iter() {
            let block = |b: &folio_scheduler::BlockId| match *b {
                folio_scheduler::BlockId::GONE => "-".to_owned(),
                block => block.0.to_string(),
            };
            let _ = write!(line, " ({})", table.iter().map(block).collect::<Vec<_>>().join(" "));
        }
        line.push(']');
    }
    for task in &plan.disk_tasks {
        let _ = write!(line, " {:?} #{} {:x} host", task.kind, task.ticket, task.chunk.key as u32);
        for slots in &task.slots {
            let _ = write!(line, " ({})", slots.iter().map(|s| s.0.to_string()).collect::<Vec<_>>().join(" "));
        }
    }
    for preempted in &plan.preempted {
        let _ = write!(line, " preempts {}", preempted.id.0);
    }
    for (id, _) in &plan.expired {
        let _ = write!(line, " expires {}", id.0);
    }
    line
}
