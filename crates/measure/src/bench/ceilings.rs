//! Peak rates of the device: bytes read and operations done a second. They are measured between the
//! rounds, so that a machine that is shared or throttled slows both; a processor's reads right
//! before and right after each, since its bandwidth may change from second to second.

use anyhow::Result;
use folio_device::{cpu, cuda};
use folio_session::Target;

use crate::rates;

/// A buffer that no cache holds.
const READ_BYTES: usize = 2 << 30;

/// The best so far, a second.
#[derive(Clone, Copy, Debug, Default)]
pub struct Best {
    pub read_bytes: f64,
    pub bf16_flops: f64,
    /// Others that are worth to be known.
    pub others: [(&'static str, f64); 2],
}

pub struct Ceilings {
    meter: Meter,
    pub best: Best,
}

enum Meter {
    Cpu {
        threads: usize,
        reader: cpu::ceilings::Reader,
    },
    /// All in one go; `read_bytes` is what the last one found.
    Cuda {
        meter: Box<cuda::Ceilings>,
        read_bytes: f64,
    },
}

impl Ceilings {
    pub fn new(target: &Target) -> Result<Self> {
        let meter = match target {
            Target::Cpu(config) => {
                let threads = config.threads;
                Meter::Cpu { threads, reader: cpu::ceilings::Reader::new(threads, READ_BYTES)? }
            }
            Target::Cuda(gpu) => {
                let meter = Box::new(cuda::Ceilings::new(gpu.info.ordinal, READ_BYTES)?);
                Meter::Cuda { meter, read_bytes: 0.0 }
            }
        };
        Ok(Self { meter, best: Best::default() })
    }

    /// Operations; of a GPU everything.
    pub fn measure(&mut self) -> Result<()> {
        let found = match &mut self.meter {
            Meter::Cpu { threads, .. } => Best {
                read_bytes: 0.0,
                bf16_flops: cpu::ceilings::bf16_peak(*threads),
                others: [
                    ("f32 FLOP", cpu::ceilings::f32_peak(*threads)),
                    ("int8 operations", cpu::ceilings::int8_peak(*threads)),
                ],
            },
            Meter::Cuda { meter, read_bytes } => {
                let found = meter.measure()?;
                *read_bytes = found.read_bytes;
                let others = [("bytes copied", found.copy_bytes), ("fp8 FLOP", found.fp8_flops)];
                Best { read_bytes: found.read_bytes, bf16_flops: found.bf16_flops, others }
            }
        };
        let best = &mut self.best;
        best.read_bytes = best.read_bytes.max(found.read_bytes);
        best.bf16_flops = best.bf16_flops.max(found.bf16_flops);
        for (best, found) in best.others.iter_mut().zip(found.others) {
            *best = (found.0, best.1.max(found.1));
        }
        Ok(())
    }

    /// Bytes a second right now; of a GPU those of the last `measure`.
    pub fn read(&mut self) -> f64 {
        let found = match &self.meter {
            // The first pass may still find threads of what ran before.
            Meter::Cpu { reader, .. } => reader.pass().max(reader.pass()),
            Meter::Cuda { read_bytes, .. } => *read_bytes,
        };
        self.best.read_bytes = self.best.read_bytes.max(found);
        found
    }
}

impl Best {
    pub fn report(&self) -> rates::Ceilings {
        let other = |&(what, per_s): &(&str, f64)| rates::Ceiling { what: what.into(), per_s };
        rates::Ceilings {
            read_bytes_per_s: self.read_bytes,
            bf16_flops: self.bf16_flops,
            others: self.others.iter().map(other).collect(),
        }
    }
}

impl rates::Ceilings {
    pub fn describe(&self) -> String {
        let (read, bf16) = (self.read_bytes_per_s / 1e9, self.bf16_flops / 1e12);
        let mut line = format!("read {read:.1} GB/s, bf16 {bf16:.1} TFLOP/s");
        for other in self.others.iter().filter(|other| other.per_s > 0.0) {
            line.push_str(&format!(", {:.2} T {} a second", other.per_s / 1e12, other.what));
        }
        line
    }
}
