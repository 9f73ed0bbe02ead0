//! I10: while there is work and no recent fault, something new is computed.

use folio_scheduler::SchedulerConfig;

use crate::{
    client::Client,
    invariants::{Found, Invariant},
};

#[derive(Debug, Default)]
pub struct Progress {
    /// The last tick at which a request's most computed tokens rose, one ended, or no request was
    /// alive.
    risen: u64,
    fault: u64,
    /// Consecutive turns without a plan, a step in flight or a disk task.
    stuck: u64,
}

impl Progress {
    pub fn rise(&mut self, tick: u64) {
        self.risen = tick;
    }

    pub fn fault(&mut self, tick: u64) {
        self.fault = tick;
    }

    /// Ticks within which something must rise: the longest sequence may have to be computed again
    /// after every other, with reads from disk on the way, and forced preemption may undo some of
    /// it.
    pub fn bound<'a>(config: &SchedulerConfig, clients: impl Iterator<Item = &'a Client>, latency: u64) -> u64 {
        let chunk = config.budget_tokens.min(config.max_chunk.unwrap_or(usize::MAX)).max(1);
        let longest = clients.map(|c| c.truth.len()).max().unwrap_or(0);
        let again = longest.div_ceil(chunk) as u64;
        let forced = if config.force_preempt_every.is_some() { 8 } else { 3 };
        64 + forced * again + 8 * latency
    }

    pub fn check(&mut self, tick: u64, num_clients: usize, stuck: bool, bound: u64) -> Result<(), Found> {
        if num_clients == 0 {
            self.risen = tick;
            self.stuck = 0;
            return Ok(());
        }
        self.stuck = if stuck { self.stuck + 1 } else { 0 };
        // An injected shortage may cost one plan; the next one finds the blocks.
        if self.stuck > 3 {
            return Err((Invariant::I10, format!("{num_clients} wait, and nothing is under way that could help them")));
        }
        let since = tick - self.risen.max(self.fault);
        if since > bound {
            let what = format!("{num_clients} are alive, but nothing new was computed for {since} ticks");
            return Err((Invariant::I10, what));
        }
        Ok(())
    }
}
