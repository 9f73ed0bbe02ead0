//! From flags to the options of a session.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use folio_model::Overrides;
use folio_session::{
    DeviceOptions, GenerationOptions, InterTokenTarget, MemoryBudget, MemoryOptions, Options, QueueOptions,
    SpeculateOptions,
};

use super::{DeviceArgs, EngineArgs, GenerationArgs, MemoryArgs, QueueArgs, SpeculateArgs};
use crate::{environment, hooks};

impl EngineArgs {
    /// The options that these flags and the environment ask for.
    pub fn options(&self) -> Result<Options> {
        let fields = self.hf_overrides.clone().map(|given| given.0).unwrap_or_default();
        let scaling = self.rope_scaling.clone().map(|given| given.0);
        Ok(Options {
            threads: self.threads,
            isa: self.cpu_isa.map(Into::into),
            quantize: self.quantize,
            packed_cache: self.packed_cache.into(),
            max_model_len: self.max_model_len,
            overrides: Overrides::new(fields, scaling),
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            prefix_caching: !self.no_enable_prefix_caching,
            device: self.device.options(),
            memory: self.memory.options()?,
            queue: self.queue.options()?,
            speculate: self.speculate.options(),
            folders: environment::folders(),
        })
    }
}

impl DeviceArgs {
    pub fn options(&self) -> DeviceOptions {
        DeviceOptions {
            device: self.device,
            dtype: self.dtype.into(),
            batch_invariant: self.batch_invariant,
            enforce_eager: self.enforce_eager,
            use_cublas: !self.no_cublas,
            load_format: self.load_format.into(),
        }
    }
}

impl MemoryArgs {
    fn options(&self) -> Result<MemoryOptions> {
        let standard = MemoryOptions::default();
        Ok(MemoryOptions {
            budget: self.budget()?,
            unchecked: self.memory_unchecked,
            fit: self.fit,
            kv_format: self.kv_cache_dtype.0,
            host_tier_bytes: self.host_tier_bytes()?,
            disk_tier_bytes: match self.kv_disk {
                Some(_) => mebibytes("--kv-disk-mib", self.kv_disk_mib)?,
                None => standard.disk_tier_bytes,
            },
            disk_tier: self.kv_disk.clone(),
            bodies: None,
        })
    }

    fn budget(&self) -> Result<MemoryBudget> {
        Ok(match (self.memory, self.memory_fraction, self.kv_cache_mib, self.kv_cache_memory_bytes) {
            (Some(size), ..) => MemoryBudget::Total(size.0),
            (_, Some(share), ..) => MemoryBudget::Fraction(share),
            (_, _, Some(mib), _) => {
                let setting = "--kv-cache-mib";
                MemoryBudget::KvCache { bytes: mebibytes(setting, mib)?, setting }
            }
            (.., Some(size)) => MemoryBudget::KvCache { bytes: size.0, setting: "--kv-cache-memory-bytes" },
            (None, None, None, None) => MemoryBudget::Auto,
        })
    }

    fn host_tier_bytes(&self) -> Result<Option<u64>> {
        match (self.kv_host_mib, self.kv_offloading_size) {
            (Some(mib), _) => mebibytes("--kv-host-mib", mib).map(Some),
            (None, Some(gib)) if (0.0..1e6).contains(&gib) => Ok(Some((gib * (1u64 << 30) as f64) as u64)),
            (None, Some(gib)) => bail!("--kv-offloading-size is {gib}, but it counts GiB from 0 to 1000000"),
            (None, None) => Ok(None),
        }
    }
}

fn mebibytes(flag: &str, mib: u64) -> Result<u64> {
    match mib.checked_mul(1 << 20) {
        Some(bytes) => Ok(bytes),
        None => bail!("{flag} {mib} is more than can be counted in bytes"),
    }
}

impl QueueArgs {
    fn options(&self) -> Result<QueueOptions> {
        let aging = Duration::try_from_secs_f64(self.priority_aging);
        Ok(QueueOptions {
            inter_token_target: match self.inter_token_target {
                None => InterTokenTarget::Auto,
                Some(super::InterTokenTarget(None)) => InterTokenTarget::Off,
                Some(super::InterTokenTarget(Some(target))) => InterTokenTarget::Within(target),
            },
            priority_aging: aging.context("--priority-aging is not a number of seconds")?,
            max_waiting: self.max_waiting,
            overlap: !self.no_overlap,
            debug: self.debug.then_some(hooks::debug_line),
        })
    }
}

impl SpeculateArgs {
    fn options(&self) -> SpeculateOptions {
        let (method, tokens) = self.wanted();
        SpeculateOptions { method, tokens, fixed: self.speculate_fixed }
    }
}

impl GenerationArgs {
    pub fn options(&self) -> GenerationOptions {
        let overrides = self.override_generation_config.map(|given| given.0);
        GenerationOptions { source: self.generation_config.clone(), overrides }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        engine: EngineArgs,
    }

    fn parse(flags: &[&str]) -> Result<EngineArgs, String> {
        let line = Line::try_parse_from([&["folio"], flags].concat()).map_err(|error| error.to_string())?;
        Ok(line.engine)
    }

    fn memory(flags: &[&str]) -> Result<MemoryOptions> {
        parse(flags).expect("flags parse").memory.options()
    }

    #[test]
    fn flags_that_are_left_out_are_default_options() {
        let given = parse(&["--device", "auto", "--speculate", "off", "--packed-cache", "auto"]).expect("flags parse");
        let options = given.options().expect("options");
        let default = Options { folders: environment::folders(), threads: given.threads, ..Options::default() };
        let queue = QueueOptions { debug: options.queue.debug, ..default.queue.clone() };
        assert_eq!(format!("{options:?}"), format!("{:?}", Options { queue, ..default }));
    }

    #[test]
    fn the_budget_that_is_given_counts() {
        let check = |flags: &[&str], expect: MemoryBudget| {
            assert_eq!(memory(flags).expect("options").budget, expect, "{flags:?}");
        };
        let kv = |setting| MemoryBudget::KvCache { bytes: 64 << 20, setting };
        check(&[], MemoryBudget::Auto);
        check(&["--memory", "500MiB"], MemoryBudget::Total(500 << 20));
        check(&["--memory-fraction", "0.5"], MemoryBudget::Fraction(0.5));
        check(&["--gpu-memory-utilization", "0.5"], MemoryBudget::Fraction(0.5));
        check(&["--kv-cache-mib", "64"], kv("--kv-cache-mib"));
        check(&["--kv-cache-memory-bytes", "64MiB"], kv("--kv-cache-memory-bytes"));
        assert!(memory(&["--kv-cache-mib", "99999999999999999"]).is_err());
        assert!(parse(&["--memory", "1GiB", "--kv-cache-mib", "5"]).is_err(), "one budget at a time");
    }

    #[test]
    fn host_tier() {
        let check = |flags: &[&str], expect: Option<Option<u64>>| {
            assert_eq!(memory(flags).ok().map(|options| options.host_tier_bytes), expect, "{flags:?}");
        };
        check(&[], Some(None));
        check(&["--kv-disk", "x"], Some(None));
        check(&["--kv-disk", "x", "--kv-host-mib", "7"], Some(Some(7 << 20)));
        check(&["--kv-offloading-size", "1.5"], Some(Some(3 << 29)));
        check(&["--kv-offloading-size", "nan"], None);
    }
}
