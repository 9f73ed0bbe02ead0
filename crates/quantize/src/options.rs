//! Options of a run: target, method, exceptions, and the calibration text.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result, Target};

/// The method that chooses codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Each weight to the nearest level.
    Rtn,
    /// Column by column; later columns compensate for the error of each.
    Gptq,
    /// Columns that meet large activations are scaled up first, and the scale folded into the layer
    /// before.
    Awq,
}

impl FromStr for Method {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text {
            "rtn" => Method::Rtn,
            "gptq" => Method::Gptq,
            "awq" => Method::Awq,
            _ => return Err(Error::UnknownMethod { found: text.to_owned() }),
        })
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Method::Rtn => "rtn",
            Method::Gptq => "gptq",
            Method::Awq => "awq",
        })
    }
}

#[derive(Clone, Debug)]
pub struct Options {
    pub target: Target,
    pub method: Method,
    /// A linear stays unquantized if its name contains one of these: `lm_head`, `layers.0.`,
    /// `down_proj`. Embeddings, norms, biases and routers always do.
    pub keep: Vec<String>,
    /// Token ids, one sequence each. [`Method::Rtn`] needs none, unless the target is
    /// [`Target::LlmInt8`].
    pub calibration: Vec<Vec<u32>>,
    pub gptq: GptqOptions,
    pub awq: AwqOptions,
    /// An activation that reaches this in calibration makes its column an outlier of
    /// [`Target::LlmInt8`].
    pub outlier_threshold: f32,
    /// Threads that compute.
    pub threads: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct GptqOptions {
    /// Added to the Hessian's diagonal, as a share of its mean.
    pub damping: f32,
    /// Columns in order of falling importance. Groups keep their columns, so files need no column
    /// order.
    pub act_order: bool,
    /// Search for scales that minimize the weighted error, instead of taking each group's range.
    pub fitted_scales: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct AwqOptions {
    /// Exponents tried between 0 and 1.
    pub steps: usize,
    /// Search clipping ranges afterwards.
    pub clip: bool,
}

impl Options {
    pub fn new(target: Target, method: Method) -> Self {
        Self {
            target,
            method,
            keep: vec!["lm_head".to_owned()],
            calibration: Vec::new(),
            gptq: GptqOptions { damping: 0.01, act_order: true, fitted_scales: true },
            awq: AwqOptions { steps: 20, clip: true },
            outlier_threshold: 6.0,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }

    pub(crate) fn keeps(&self, name: &str) -> bool {
        self.keep.iter().any(|kept| name.contains(kept.as_str()))
    }

    /// Whether hidden states must be run through the model.
    pub fn needs_calibration(&self) -> bool {
        self.method != Method::Rtn || self.target == Target::LlmInt8
    }
}

/// Progress of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// The current layer, counted from 0; equal to `layers` for tensors outside them.
    pub layer: usize,
    pub layers: usize,
    pub what: &'static str,
    /// Share of the whole work that is done, between 0 and 1.
    pub done: f32,
}
