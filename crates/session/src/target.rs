//! The device of a model: chosen once, by the options and by the hardware of this machine.

use std::path::PathBuf;
use std::sync::{Arc, Weak};

use anyhow::{Context, Result, bail};
use folio_device::cpu::CpuConfig;
use folio_device::cuda::driver::{CudaError, Device, DeviceInfo, HostBlock, probe};
use folio_device::cuda::{Cuda, CudaConfig, Precision, RandomForm};
use folio_device::{HostMemory, KvFormat};
use folio_engine::tiers::Allocate;

use crate::options::{DeviceChoice, Dtype, LoadFormat, Options};
use crate::phases::Phases;
use crate::{machine, units};

/// Random weights are the same in every run.
const RANDOM_SEED: u64 = 1;

#[derive(Clone, Debug)]
pub enum Target {
    Cpu(CpuConfig),
    Cuda(Gpu),
}

/// A GPU that was found, and how it is to be used.
#[derive(Clone, Debug)]
pub struct Gpu {
    pub info: DeviceInfo,
    /// When it was found.
    pub free_bytes: u64,
    pub dtype: Dtype,
    pub batch_invariant: bool,
    pub eager: bool,
    pub use_cublas: bool,
    pub load_format: LoadFormat,
    /// Cache of compiled kernels.
    pub cache: Option<PathBuf>,
}

impl Target {
    /// The device of the options, or the best there is; and a line that gives the reason.
    pub fn choose(options: &Options) -> Result<(Self, String)> {
        let found = match options.device.device {
            DeviceChoice::Cpu => None,
            DeviceChoice::Cuda(ordinal) => Some(probe(ordinal).with_context(|| format!("--device cuda:{ordinal}"))?),
            DeviceChoice::Auto => match probe(0) {
                Ok(found) => Some(found),
                Err(error) => {
                    let (target, _) = Self::cpu(options)?;
                    return Ok((target, format!("on the CPU: {}", reason(&error))));
                }
            },
        };
        match found {
            None => Self::cpu(options),
            Some((info, free_bytes)) => {
                let gpu = Gpu::new(info, free_bytes, options);
                let note = format!("on {}", gpu.describe());
                Ok((Target::Cuda(gpu), note))
            }
        }
    }

    /// The GPU of the options, or the first: for commands that ask for one by another flag.
    pub fn gpu(options: &Options) -> Result<Gpu> {
        let ordinal = match options.device.device {
            DeviceChoice::Auto => 0,
            DeviceChoice::Cuda(ordinal) => ordinal,
            DeviceChoice::Cpu => bail!("--device cpu names no GPU"),
        };
        let (info, free_bytes) = probe(ordinal)?;
        Ok(Gpu::new(info, free_bytes, options))
    }

    fn cpu(options: &Options) -> Result<(Self, String)> {
        let threads = options.threads.unwrap_or_else(machine::cores);
        if threads == 0 || threads > 1024 {
            bail!("--threads must lie between 1 and 1024");
        }
        Ok((Target::Cpu(CpuConfig { threads, isa: options.isa }), "on the CPU".into()))
    }
}

impl Gpu {
    pub fn new(info: DeviceInfo, free_bytes: u64, options: &Options) -> Self {
        let device = &options.device;
        Self {
            info,
            free_bytes,
            dtype: device.dtype,
            batch_invariant: device.batch_invariant,
            eager: device.enforce_eager,
            use_cublas: device.use_cublas,
            load_format: device.load_format,
            cache: options.folders.cache.clone(),
        }
    }

    /// Opens it, from nothing: after a fault too.
    pub fn open(&self) -> folio_device::Result<Cuda> {
        Cuda::new(self.config())
    }

    /// How it is opened.
    pub fn config(&self) -> CudaConfig {
        CudaConfig {
            ordinal: self.info.ordinal,
            activations: self.precision(),
            batch_invariant: self.batch_invariant,
            use_cublas: self.use_cublas,
            graphs: !self.eager,
            cache_folder: self.cache.clone(),
            random_weights: self.load_format.is_dummy().then_some(RANDOM_SEED),
            random_form: self.random_form(),
        }
    }

    /// Storage form of random weights.
    pub fn random_form(&self) -> RandomForm {
        match self.load_format {
            LoadFormat::Auto | LoadFormat::Dummy => RandomForm::Plain,
            LoadFormat::DummyFp8 => RandomForm::Float8,
            LoadFormat::DummyInt8 => RandomForm::Int8,
            LoadFormat::DummyInt4 => RandomForm::Int4,
        }
    }

    pub fn precision(&self) -> Precision {
        if self.is_f32() { Precision::F32 } else { Precision::BF16 }
    }

    /// Default format of the KV cache: the fast kernels read 16 bits.
    pub fn kv_format(&self) -> KvFormat {
        if self.is_f32() { KvFormat::F32 } else { KvFormat::BF16 }
    }

    pub fn is_f32(&self) -> bool {
        self.dtype == Dtype::Float32
    }

    pub(crate) fn describe(&self) -> String {
        let (major, minor) = self.info.capability;
        let Gpu { info, free_bytes, .. } = self;
        let name = &info.name;
        format!("{name} (cuda:{}, capability {major}.{minor}), {} free", info.ordinal, units::bytes(*free_bytes))
    }
}

/// Facts about a backend that is open.
#[derive(Default)]
pub struct OpenedDevice {
    pub phases: Phases,
    /// Memory of the host that it reaches faster than any.
    pub host_memory: Option<Allocate>,
    /// The GPU, for as long as it is open.
    pub device: Weak<Device>,
}

/// Times of opening it, and notes on libraries that are missing.
pub fn opened(cuda: &Cuda) -> OpenedDevice {
    // The memory outlives a device that is lost, and keeps none open: a new one could not be opened
    // then.
    let device = Arc::downgrade(cuda.device());
    let kept = device.clone();
    let allocate = move |bytes: usize| -> Box<dyn HostMemory> {
        Box::new(device.upgrade().map_or_else(|| HostBlock::unlocked(bytes), |device| HostBlock::new(&device, bytes)))
    };
    let mut phases = Phases::default();
    let times = cuda.device().open_times();
    phases.add("device", times.device, None);
    phases.add("kernels", times.kernels, Some(cuda.device().kernel_origin().to_string()));
    phases.notes.extend(
        cuda.missing_cublas().map(|why| format!("matrix products of many rows run on Folio's own kernels: {why}")),
    );
    OpenedDevice { phases, host_memory: Some(Box::new(allocate)), device: kept }
}

/// Why no GPU is used. A machine without a driver is an ordinary one.
fn reason(error: &folio_device::Error) -> String {
    match error {
        folio_device::Error::Cuda(CudaError::NoDriver { .. }) => "no NVIDIA driver was found".into(),
        other => other.to_string(),
    }
}
