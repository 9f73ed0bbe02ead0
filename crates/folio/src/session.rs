//! A model made ready to answer: assets opened, memory planned, decoder loaded, engine started.

use anyhow::{Context, Result, bail};
use folio_device::cpu::{Cpu, CpuConfig};
use folio_device::{BLOCK_TOKENS, KvFormat};
use folio_engine::{Engine, EngineConfig, Runner};
use folio_formats::Format;
use folio_model::{Decoder, DecoderLimits, MemoryUse, ModelSpec};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::args::EngineArgs;
use crate::assets::Assets;
use crate::machine;

/// Prompt positions whose logits one step may give back.
const PROMPT_LOGIT_ROWS: usize = 256;

/// A loaded model and the engine that runs it.
pub struct Session {
    pub assets: Assets,
    pub engine: Engine,
    pub memory: MemoryUse,
    pub plan: Plan,
}

/// What was decided before anything was allocated.
#[derive(Clone, Debug)]
pub struct Plan {
    pub threads: usize,
    pub max_model_len: usize,
    pub max_seqs: usize,
    pub budget_tokens: usize,
    pub kv_format: KvFormat,
    /// Blocks of each layer group.
    pub blocks: Vec<usize>,
    pub kv_tokens: usize,
    pub kv_bytes: u64,
}

impl Session {
    pub fn start(assets: Assets, args: &EngineArgs) -> Result<Self> {
        let plan = Plan::new(&assets, args)?;
        let cpu = Cpu::new(CpuConfig { threads: plan.threads, isa: args.cpu_isa.map(Into::into) })?;
        let limits = DecoderLimits {
            rows: plan.budget_tokens,
            spans: plan.max_seqs,
            outputs: plan.max_seqs + PROMPT_LOGIT_ROWS,
            table_entries: plan.max_seqs * plan.max_model_len.div_ceil(BLOCK_TOKENS),
            blocks: plan.blocks.clone(),
            kv_format: plan.kv_format,
        };
        let bar = loading_bar();
        let decoder = Decoder::load(cpu, &assets.model, limits, &mut |progress| {
            bar.set_length(progress.bytes_total);
            bar.set_position(progress.bytes_done);
        })?;
        bar.finish_and_clear();
        let memory = decoder.memory();
        let config = EngineConfig {
            max_seqs: plan.max_seqs,
            budget_tokens: plan.budget_tokens,
            max_model_len: plan.max_model_len,
            blocks: plan.blocks.clone(),
            prefix_caching: !args.no_enable_prefix_caching,
            prompt_logit_rows: PROMPT_LOGIT_ROWS,
            logits_width: assets.model.spec.vocab_size,
            eos: assets.eos.clone(),
            ..EngineConfig::default()
        };
        let engine = Engine::start(Box::new(Runner::new(decoder)), config)?;
        Ok(Self { assets, engine, memory, plan })
    }
}

impl Plan {
    pub fn new(assets: &Assets, args: &EngineArgs) -> Result<Self> {
        let spec = &assets.model.spec;
        let max_model_len = match args.max_model_len {
            Some(0) => bail!("--max-model-len must be at least 1"),
            Some(len) if len > spec.max_context => {
                bail!("--max-model-len {len} is more than the model's {}", spec.max_context)
            }
            Some(len) => len,
            None => spec.max_context,
        };
        for (flag, value) in
            [("--max-num-seqs", args.max_num_seqs), ("--max-num-batched-tokens", args.max_num_batched_tokens)]
        {
            if value == 0 || value > 1 << 16 {
                bail!("{flag} must lie between 1 and 65536");
            }
        }
        let threads = args.threads.unwrap_or_else(machine::cores);
        if threads == 0 || threads > 1024 {
            bail!("--threads must lie between 1 and 1024");
        }
        let kv_format = kv_format(assets);
        let kv_tokens = kv_tokens(spec, kv_format, max_model_len, args)?;
        let groups = spec.kv_groups().len();
        Ok(Self {
            threads,
            max_model_len,
            max_seqs: args.max_num_seqs,
            budget_tokens: args.max_num_batched_tokens,
            kv_format,
            blocks: vec![kv_tokens / BLOCK_TOKENS; groups],
            kv_tokens,
            kv_bytes: kv_tokens as u64 * spec.kv_bytes_per_token(kv_format.bytes()),
        })
    }
}

/// Keys and values are kept as precisely as the weights.
fn kv_format(assets: &Assets) -> KvFormat {
    let weights = &assets.model.weights;
    let biggest = weights.names().into_iter().filter_map(|name| weights.tensor(name)).max_by_key(|t| t.bytes.len());
    match biggest.map(|tensor| tensor.format) {
        Some(Format::F32) => KvFormat::F32,
        Some(Format::F16) => KvFormat::F16,
        _ => KvFormat::BF16,
    }
}

/// Tokens of keys and values: what all requests could use at most, cut to the memory there is. One sequence of full
/// length (and a block to spare) must fit.
fn kv_tokens(spec: &ModelSpec, format: KvFormat, max_model_len: usize, args: &EngineArgs) -> Result<usize> {
    let per_token = spec.kv_bytes_per_token(format.bytes()).max(1);
    let block_bytes = per_token * BLOCK_TOKENS as u64;
    let one = (max_model_len.div_ceil(BLOCK_TOKENS) + 1) as u64;
    let all = one.saturating_mul(args.max_num_seqs as u64);
    let budget = match args.kv_cache_mib {
        Some(mib) => mib.checked_mul(1 << 20).context("--kv-cache-mib is too large")?,
        None => machine::memory_available().map_or(4 << 30, |free| free / 2),
    };
    let blocks = all.min(budget / block_bytes).min(u64::from(u32::MAX) / BLOCK_TOKENS as u64);
    if blocks < one {
        let fits = (blocks.saturating_sub(1)) * BLOCK_TOKENS as u64;
        bail!(
            "a sequence of {max_model_len} tokens needs {} MiB of keys and values, but the budget is {} MiB; \
             the longest that fits is --max-model-len {fits}",
            (one * block_bytes) >> 20,
            budget >> 20
        );
    }
    Ok(blocks as usize * BLOCK_TOKENS)
}

/// Drawn only when loading takes long enough to be watched.
fn loading_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("loading {bar:30} {bytes}/{total_bytes} {eta}");
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(4));
    bar.with_style(style.expect("the template is well formed"))
}
