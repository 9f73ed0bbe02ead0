//! From a budget in bytes to the sizes of all allocations: weights, activations, keys and values,
//! host tier. All of it is computed before anything is allocated, and nothing is measured.
//!
//! A plan does not count the tokenizer and the HTTP server (tens of MiB), and pages of weight
//! files, which the system frees when it needs them.

mod budget;
mod drafting;
mod pools;
mod refusal;
mod report;
mod room;
mod weights;
mod working;

use anyhow::{Result, bail};
use folio_device::cpu::{CpuConfig, PartShape};
use folio_device::{BLOCK_TOKENS, KvFormat};
use folio_engine::GroupConfig;
use folio_formats::Format;
use folio_model::{DecoderLimits, ModelSpec, OpenModel, activation_bytes};

use crate::assets::Assets;
use crate::drafting::Drafting;
use crate::options::Options;
use crate::target::Target;
use crate::units;
use drafting::DraftingBytes;
use pools::{Demand, Load};
pub use weights::WeightBytes;

pub use budget::Budget;
pub use room::Excess;

/// Most prompt positions with logits that one step may return.
pub const PROMPT_LOGIT_ROWS: usize = 256;

/// Sizes of everything, computed before anything is allocated.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The device, in words.
    pub device: String,
    /// Threads of the host that compute or load.
    pub threads: usize,
    pub max_model_len: usize,
    pub max_seqs: usize,
    pub budget_tokens: usize,
    /// Whether steps contain drafts.
    pub speculates: bool,
    pub kv_format: KvFormat,
    pub groups: Vec<GroupPlan>,
    pub bytes: Bytes,
    pub budget: Budget,
    /// The excess over existing memory, if there is one.
    pub excess: Option<Excess>,
    /// The requested context, if `--fit` shortened it.
    pub shrunk_from: Option<usize>,
    /// How many requests of a length run at once: (length, requests).
    pub concurrency: Vec<(usize, usize)>,
    /// On the CPU: the parts of packed weights, in order.
    pub parts: Vec<PartShape>,
}

/// Layers with the same shape and window of keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupPlan {
    pub layers: usize,
    pub window: Option<usize>,
    /// Bytes of one block of all the group's layers.
    pub block_bytes: u64,
    pub blocks: usize,
    pub host_slots: usize,
}

/// Bytes of each part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Bytes as the decoder will count them.
    pub weights: u64,
    pub activations: u64,
    /// Norms and biases, step inputs, scratch and, on the CPU, the logits that are sampled from.
    pub working: u64,
    pub kv: u64,
    /// Everything that drafting takes besides the model.
    pub drafting: u64,
    pub host: u64,
    /// Bodies of requests, and the values parsed from them.
    pub bodies: u64,
    /// Whether the device has its own memory; host tier and bodies are in the host's.
    pub host_is_apart: bool,
}

impl Bytes {
    /// Everything that does not depend on the number of stored tokens; of drafting, the part added
    /// so far.
    fn fixed(&self) -> u64 {
        let host = if self.host_is_apart { 0 } else { self.host.saturating_add(self.bodies) };
        let parts = [self.weights, self.activations, self.working, self.drafting, host];
        parts.into_iter().fold(0, u64::saturating_add)
    }

    pub fn total(&self) -> u64 {
        self.fixed().saturating_add(self.kv)
    }

    /// Bytes of the host's memory, if the device has its own.
    pub fn on_host(&self) -> u64 {
        if self.host_is_apart { self.host.saturating_add(self.bodies) } else { 0 }
    }
}

/// Bytes of the weights in the layout of the CPU's kernels.
pub fn weight_bytes(model: &OpenModel) -> Result<u64> {
    let cpu = Target::Cpu(CpuConfig { threads: 1, isa: None });
    Ok(WeightBytes::of(model, &cpu)?.matrices)
}

impl Plan {
    /// Computes the plan of an opened model, of its drafting method if it has one.
    pub fn new(assets: &Assets, drafting: Option<&Drafting>, options: &Options, target: &Target) -> Result<Self> {
        let spec = &assets.model.spec;
        let asked = max_model_len(spec, options)?;
        let sizes = StepSizes { speculates: drafting.is_some(), ..StepSizes::of(options, target)? };
        let budget = Budget::of(&options.memory, target.device())?;
        let planner = Planner::new(assets, drafting, options, target, sizes, budget)?;
        let max_model_len = planner.context(asked, options.memory.fit)?;
        let (groups, bytes) = planner.groups(max_model_len)?;
        Ok(Self {
            excess: Excess::of(&bytes, &planner.budget, &options.memory, target.device()),
            device: target.device().describe(),
            threads: target.device().threads(),
            max_model_len,
            max_seqs: sizes.seqs,
            budget_tokens: sizes.tokens,
            speculates: sizes.speculates,
            kv_format: planner.kv_format,
            concurrency: planner.concurrency(&groups, max_model_len),
            groups,
            bytes,
            budget: planner.budget,
            shrunk_from: (max_model_len < asked).then_some(asked),
            parts: planner.weights.parts,
        })
    }

    pub fn limits(&self) -> DecoderLimits {
        let blocks = self.groups.iter().map(|group| group.blocks).collect();
        let sizes = StepSizes { seqs: self.max_seqs, tokens: self.budget_tokens, speculates: self.speculates };
        sizes.limits(self.max_model_len, blocks, self.kv_format)
    }

    pub fn group_configs(&self) -> Vec<GroupConfig> {
        let config = |g: &GroupPlan| GroupConfig { blocks: g.blocks, window: g.window, host_slots: g.host_slots };
        self.groups.iter().map(config).collect()
    }

    /// Tokens that fit at once: those of the largest pool, which is one without a window if there
    /// is one.
    pub fn kv_tokens(&self) -> usize {
        self.groups.iter().map(|group| group.blocks).max().unwrap_or(0) * BLOCK_TOKENS
    }
}

fn max_model_len(spec: &ModelSpec, options: &Options) -> Result<usize> {
    match options.max_model_len {
        Some(len) if len < 2 => bail!("--max-model-len must be at least 2: one token to ask, one to answer"),
        Some(len) if len > spec.max_context => {
            bail!("--max-model-len {len} is more than the model's {}", spec.max_context)
        }
        Some(len) => Ok(len),
        None => Ok(spec.max_context),
    }
}

/// Sizes of a step.
#[derive(Clone, Copy)]
struct StepSizes {
    seqs: usize,
    tokens: usize,
    speculates: bool,
}

impl StepSizes {
    fn of(options: &Options, target: &Target) -> Result<Self> {
        let defaults = target.device().defaults();
        let sizes = Self {
            seqs: options.max_num_seqs.unwrap_or(defaults.max_num_seqs),
            tokens: options.max_num_batched_tokens.unwrap_or(defaults.max_num_batched_tokens),
            speculates: false,
        };
        for (flag, value) in [("--max-num-seqs", sizes.seqs), ("--max-num-batched-tokens", sizes.tokens)] {
            if value == 0 || value > 1 << 16 {
                bail!("{flag} must lie between 1 and 65536");
            }
        }
        Ok(sizes)
    }

    fn limits(self, max_len: usize, blocks: Vec<usize>, kv_format: KvFormat) -> DecoderLimits {
        let outputs = self.seqs + PROMPT_LOGIT_ROWS;
        // Drafts take the rows of logits that no prompt needs; rows of a tree are spans, each with
        // a table.
        let spans = if self.speculates { outputs } else { self.seqs };
        let table_entries = spans.saturating_mul(max_len.div_ceil(BLOCK_TOKENS));
        DecoderLimits { rows: self.tokens, spans, outputs, table_entries, blocks, kv_format }
    }
}

/// Sizes of the model's parts, and the budget.
struct Planner<'a> {
    spec: &'a ModelSpec,
    options: &'a Options,
    target: &'a Target,
    sizes: StepSizes,
    /// Whether the weights are the files' own, so that they could be quantized further.
    has_plain_weights: bool,
    weights: WeightBytes,
    drafting: DraftingBytes,
    kv_format: KvFormat,
    demand: Demand,
    host_slots: usize,
    bodies: u64,
    budget: Budget,
}

impl<'a> Planner<'a> {
    fn new(
        assets: &'a Assets,
        drafting: Option<&Drafting>,
        options: &'a Options,
        target: &'a Target,
        sizes: StepSizes,
        budget: Budget,
    ) -> Result<Self> {
        let spec = &assets.model.spec;
        let kv_format = options.memory.kv_format.unwrap_or_else(|| kv_format(assets, target));
        let drafting = DraftingBytes::of(assets, drafting, target, sizes, kv_format)?;
        let demand = Demand::new(&spec.kv_groups(), kv_format, sizes.tokens);
        // A chunk on disk is read into all groups at once, so the host tier holds as many blocks of
        // each.
        let block_of_all = demand.block_bytes.iter().sum::<u64>().max(1);
        let host_bytes = budget::host_bytes(&options.memory);
        let host_slots = (host_bytes / block_of_all).min(u64::from(u32::MAX) - 1) as usize;
        if host_bytes > 0 && host_slots == 0 {
            bail!(
                "the host tier of {} (--kv-host-mib) is less than one block of keys and values, {block_of_all} bytes",
                units::bytes(host_bytes)
            );
        }
        let bodies = budget::body_bytes(&options.memory, &budget, target.device().has_own_memory())?;
        let weights = WeightBytes::of(&assets.model, target)?;
        let demand = demand.with_drafts(drafting.block);
        let has_plain_weights = !assets.is_quantized();
        Ok(Self {
            spec,
            options,
            target,
            sizes,
            has_plain_weights,
            weights,
            drafting,
            kv_format,
            demand,
            host_slots,
            bodies,
            budget,
        })
    }

    /// Bytes of everything but keys and values, for sequences of that length.
    fn beside_kv(&self, max_len: usize) -> Bytes {
        let blocks = vec![0; self.demand.block_bytes.len()];
        let limits = self.sizes.limits(max_len, blocks, self.kv_format);
        Bytes {
            weights: self.weights.matrices,
            activations: activation_bytes(self.spec, &limits, |kind| self.target.device().value_bytes(kind)),
            working: working::bytes(self.spec, &limits, &self.weights, self.target.device()),
            kv: 0,
            drafting: self.drafting.fixed,
            host: self.demand.block_bytes.iter().sum::<u64>() * self.host_slots as u64,
            bodies: self.bodies,
            host_is_apart: self.target.device().has_own_memory(),
        }
    }

    /// The context to plan for: the requested one or, with `--fit`, the longest that fits.
    fn context(&self, asked: usize, fit: bool) -> Result<usize> {
        self.check_fixed()?;
        let fits = |len: usize, kv: u64| kv <= self.budget.for_kv(self.beside_kv(len).fixed());
        let needed = self.demand.bytes(&self.demand.least(asked));
        if fits(asked, needed) {
            return Ok(asked);
        }
        let longest = self.demand.longest(asked, fits);
        match longest {
            Some(longest) if fit => Ok(longest),
            Some(longest) => bail!(
                "a sequence of {asked} tokens needs {} of keys and values, but {} leaves {}; the longest that fits is \
                 --max-model-len {longest}, which --fit would take",
                units::bytes(needed),
                self.budget.describe(),
                units::bytes(self.budget.for_kv(self.beside_kv(asked).fixed()))
            ),
            None => Err(self.no_room()),
        }
    }

    /// Checks whether everything but keys and values fits at all.
    fn check_fixed(&self) -> Result<()> {
        let Budget::All { bytes: budget, flag } = &self.budget else { return Ok(()) };
        let least = self.beside_kv(2);
        if least.weights > *budget {
            return Err(self.no_room_for_weights(least.weights, *budget, flag));
        }
        if least.fixed() > *budget {
            bail!(
                "weights {}, activations {}, working memory {}, host tier {} and bodies of requests {} take {}, but {flag} \
                 allows {} in all; lower --max-num-batched-tokens, --max-num-seqs, --kv-host-mib or --max-body-memory",
                units::bytes(least.weights),
                units::bytes(least.activations),
                units::bytes(least.working),
                units::bytes(least.host),
                units::bytes(least.bodies),
                units::bytes(least.fixed()),
                units::bytes(*budget)
            );
        }
        Ok(())
    }

    fn groups(&self, max_len: usize) -> Result<(Vec<GroupPlan>, Bytes)> {
        let mut bytes = self.beside_kv(max_len);
        let load = Load { max_seqs: self.sizes.seqs, max_len };
        let keep_spare = self.budget.is_named() && self.options.prefix_caching;
        let room = self.budget.for_kv(bytes.fixed());
        let Some(pools) = self.demand.pools(load, room, keep_spare) else {
            bail!("a sequence of {max_len} tokens does not fit {}", units::bytes(room));
        };
        bytes.kv = self.demand.own_bytes(&pools);
        bytes.drafting += self.demand.bytes(&pools) - bytes.kv;
        let groups = self.spec.kv_groups().into_iter().zip(pools).zip(&self.demand.block_bytes);
        let groups = groups.map(|((group, blocks), &block_bytes)| GroupPlan {
            layers: group.layers.len(),
            window: group.window,
            block_bytes,
            blocks,
            host_slots: self.host_slots,
        });
        Ok((groups.collect(), bytes))
    }

    fn concurrency(&self, groups: &[GroupPlan], max_len: usize) -> Vec<(usize, usize)> {
        let blocks: Vec<usize> = groups.iter().map(|group| group.blocks).collect();
        let steps = std::iter::successors(Some(256usize), |len| len.checked_mul(4));
        let lens = steps.take_while(|&len| len < max_len).chain([max_len]);
        lens.map(|len| (len, self.demand.sequences(&blocks, len).min(self.sizes.seqs))).collect()
    }
}

/// Default format of the KV cache.
fn kv_format(assets: &Assets, target: &Target) -> KvFormat {
    target.device().kv_format().unwrap_or_else(|| as_precise_as_weights(assets))
}

/// The format of the largest tensor, or bf16 for quantized weights.
pub fn as_precise_as_weights(assets: &Assets) -> KvFormat {
    let weights = &assets.model.weights;
    let biggest = weights.names().into_iter().filter_map(|name| weights.tensor(name)).max_by_key(|t| t.bytes.len());
    match biggest.map(|tensor| tensor.format) {
        Some(Format::F32) => KvFormat::F32,
        Some(Format::F16) => KvFormat::F16,
        _ => KvFormat::BF16,
    }
}

#[cfg(test)]
mod tests;
