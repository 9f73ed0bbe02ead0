//! What the device can do at all: bytes read and operations done a second. Measured between the rounds, so that a
//! machine that is shared or throttled slows both.

use anyhow::Result;
use folio_device::{cpu, cuda};

use crate::target::Target;

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
    Cpu { threads: usize, reader: cpu::ceilings::Reader },
    Cuda(Box<cuda::Ceilings>),
}

impl Ceilings {
    pub fn new(target: &Target) -> Result<Self> {
        let meter = match target {
            Target::Cpu(config) => {
                let threads = config.threads;
                Meter::Cpu { threads, reader: cpu::ceilings::Reader::new(threads, READ_BYTES)? }
            }
            Target::Cuda(gpu) => Meter::Cuda(Box::new(cuda::Ceilings::new(gpu.info.ordinal, READ_BYTES)?)),
        };
        Ok(Self { meter, best: Best::default() })
    }

    pub fn measure(&mut self) -> Result<()> {
        let found = match &mut self.meter {
            Meter::Cpu { threads, reader } => Best {
                read_bytes: reader.pass().max(reader.pass()),
                bf16_flops: cpu::ceilings::bf16_peak(*threads),
                others: [
                    ("f32 FLOP", cpu::ceilings::f32_peak(*threads)),
                    ("int8 operations", cpu::ceilings::int8_peak(*threads)),
                ],
            },
            Meter::Cuda(meter) => {
                let found = meter.measure()?;
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
}

impl Best {
    pub fn describe(&self) -> String {
        let mut line = format!("read {:.1} GB/s, bf16 {:.1} TFLOP/s", self.read_bytes / 1e9, self.bf16_flops / 1e12);
        for (what, rate) in self.others.iter().filter(|(_, rate)| *rate > 0.0) {
            line.push_str(&format!(", {:.2} T {what} a second", rate / 1e12));
        }
        line
    }
}
