//! The configuration of an engine.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::Arc,
    time::Duration,
};

use folio_scheduler::{BLOCK_TOKENS, GroupConfig, KvEvent, Nanos, SchedulerConfig};

use crate::{Error, Executor, Result, TimeLimit, tiers::TierConfig};

#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Most sequences running at once.
    pub max_seqs: usize,
    /// Most sequences that wait; further ones are refused.
    pub max_waiting: usize,
    /// A request ends after this time in the queue, if none of its sequences has run. None: it
    /// waits without limit.
    pub queue_timeout: Option<TimeLimit>,
    /// All requests end after this time without progress. None: they wait without limit.
    pub stall_timeout: Option<Duration>,
    /// Most tokens computed in a step.
    pub budget_tokens: usize,
    /// Most tokens of one sequence in a step.
    pub max_chunk: Option<usize>,
    /// The longest sequence, prompt and answer together.
    pub max_model_len: usize,
    /// Windows and KV blocks of the layer groups, on the device and in the host tier.
    pub groups: Vec<GroupConfig>,
    pub prefix_caching: bool,
    /// While requests decode, a step has only as many prompt rows as keep it under this time. None:
    /// as many as the budget has.
    pub inter_token_target: Option<Duration>,
    /// See [`SchedulerConfig::inter_token_steps`].
    pub inter_token_steps: u32,
    /// See [`SchedulerConfig::longest_step`].
    pub longest_step: Option<Duration>,
    /// Waiting time that one level of priority is worth.
    pub aging: Duration,
    /// Most rows of a step whose logits are needed for prompt logprobs; the executor must have room
    /// for these and for `max_seqs` more.
    pub prompt_logit_rows: usize,
    /// Logits of a row: token ids are below this.
    pub logits_width: usize,
    /// Values of a hidden state, for embeddings. 0: the executor gives none.
    pub embedding_width: usize,
    /// Tokens that end an answer.
    pub eos: Vec<u32>,
    /// The lower tiers, for blocks that leave the device.
    pub tiers: TierConfig,
    /// Whether every request may have a draft from its first decode step on. A new request is then
    /// not planned ahead of its prompt: otherwise the number of its drafts would depend on the time
    /// that the prompt takes.
    pub expects_drafts: bool,
    /// Whether a step is planned and submitted while the one before it runs.
    pub overlap: bool,
    /// Listener to events of the prefix cache. Its queue is bounded: a batch that does not fit is
    /// dropped and counted, and the next batch that fits begins with [`KvEvent::Cleared`].
    pub kv_events: Option<flume::Sender<Vec<KvEvent>>>,
    /// Writes lines for the operator: a step failed, an executor was rebuilt. A line names requests
    /// by number and never holds their contents.
    pub warn: Option<fn(std::fmt::Arguments<'_>)>,
    /// Writes lines about the engine's decisions, for debugging.
    pub debug: Option<fn(std::fmt::Arguments<'_>)>,
    /// Builds an executor in place of one that was lost. Without it the engine ends with its
    /// executor.
    pub rebuild: Option<Rebuild>,
    /// Test hook: a running sequence is preempted every this many steps.
    pub force_preempt_every: Option<u64>,
}

/// Builds an executor like the one that the engine was started with. The old one and its memory are
/// gone by then; the host tier must be the same.
#[derive(Clone)]
pub struct Rebuild(Arc<dyn Fn() -> Result<Box<dyn Executor>> + Send + Sync>);

impl Rebuild {
    pub fn new(build: impl Fn() -> Result<Box<dyn Executor>> + Send + Sync + 'static) -> Self {
        Self(Arc::new(build))
    }

    pub(crate) fn call(&self) -> Result<Box<dyn Executor>> {
        (self.0)()
    }
}

impl std::fmt::Debug for Rebuild {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Rebuild")
    }
}

impl Default for EngineConfig {
    /// The caller sets the sizes that depend on the model: `max_model_len`, `groups`,
    /// `logits_width`, `eos`.
    fn default() -> Self {
        Self {
            max_seqs: 64,
            max_waiting: 1024,
            queue_timeout: None,
            stall_timeout: None,
            budget_tokens: 512,
            max_chunk: None,
            max_model_len: 0,
            groups: Vec::new(),
            prefix_caching: true,
            inter_token_target: Some(Duration::from_millis(50)),
            inter_token_steps: 0,
            longest_step: None,
            aging: Duration::from_secs(10),
            prompt_logit_rows: 256,
            logits_width: 0,
            embedding_width: 0,
            eos: Vec::new(),
            tiers: TierConfig::default(),
            expects_drafts: false,
            overlap: true,
            kv_events: None,
            warn: None,
            debug: None,
            rebuild: None,
            force_preempt_every: None,
        }
    }
}

impl EngineConfig {
    pub(crate) fn validate(&self) -> Result<()> {
        let sizes = [("max_model_len", self.max_model_len, 2), ("logits_width", self.logits_width, 1)];
        for (field, value, least) in sizes {
            if value < least {
                return Err(Error::Config { field, value, least });
            }
        }
        for (group, config) in self.groups.iter().enumerate() {
            let host = self.tiers.host.as_ref().filter(|host| group < host.num_groups());
            let (wanted, found) = (config.host_slots, host.map_or(0, |host| host.group(group).slots));
            if found < wanted {
                return Err(Error::HostSlots { group, wanted, found });
            }
        }
        Ok(())
    }

    pub(crate) fn scheduler(&self) -> SchedulerConfig {
        let disk = self.tiers.disk.as_ref();
        SchedulerConfig {
            block_tokens: BLOCK_TOKENS,
            groups: self.groups.clone(),
            budget_tokens: self.budget_tokens,
            max_chunk: self.max_chunk,
            max_seqs: self.max_seqs,
            prompt_logit_rows: self.prompt_logit_rows,
            inter_token_target: self.inter_token_target.map(nanos),
            inter_token_steps: self.inter_token_steps,
            longest_step: self.longest_step.map(nanos),
            aging: nanos(self.aging),
            prefix_caching: self.prefix_caching,
            hash_key: disk.map_or_else(|| [fresh_key(), fresh_key()], |disk| disk.hash_key()),
            hash_bits: 128,
            copy_cost: nanos(self.tiers.copy_cost),
            disk_chunk_blocks: disk.map(|disk| disk.chunk_blocks()),
            kv_events: self.kv_events.is_some(),
            force_preempt_every: self.force_preempt_every,
        }
    }
}

/// The longest sequence that every pool can hold. Layers with a window hold only a part of it at a
/// time.
pub(crate) fn pool_tokens(config: &SchedulerConfig) -> usize {
    let endless = usize::MAX - config.block_tokens;
    let longest = |(group, pool): (usize, &GroupConfig)| {
        if config.most_blocks(group, endless) <= pool.blocks { usize::MAX } else { pool.blocks * config.block_tokens }
    };
    config.groups.iter().enumerate().map(longest).min().unwrap_or(0)
}

/// The scheduler's nanoseconds; a duration that does not fit, of over five hundred years, is cut.
pub(crate) fn nanos(duration: Duration) -> Nanos {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// A number that clients cannot know, from the source that also seeds std's hash maps.
fn fresh_key() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_with_a_window_holds_any_length_once_it_holds_the_window() {
        let check = |groups: &[(usize, Option<usize>)], expected: usize| {
            let group = |&(blocks, window)| GroupConfig { window, ..GroupConfig::new(blocks) };
            let groups = groups.iter().map(group).collect();
            let config = EngineConfig { groups, budget_tokens: 16, ..EngineConfig::default() };
            assert_eq!(pool_tokens(&config.scheduler()), expected);
        };
        check(&[(4, None)], 64);
        check(&[(4, None), (100, Some(32))], 64);
        check(&[(4, None), (2, Some(32))], 32);
        check(&[(10, Some(32))], usize::MAX);
        check(&[], 0);
    }
}
