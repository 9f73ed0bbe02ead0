//! Runs a language model: from a name and options to an engine that answers.
//!
//! [`Session::open`] takes a model and [`Options`]; all options have defaults. It opens the model's
//! files ([`Assets`]), plans memory before any is taken ([`Plan`]), loads the weights and starts
//! the engine. The library prints nothing and reads no environment variable: it reports to
//! [`Hooks`], and folders outside the model are options.

#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod assets;
mod drafting;
mod embedded;
mod files;
mod generation;
pub mod gguf_choice;
pub mod machine;
mod model_ref;
mod naming;
mod opened;
mod options;
mod packed;
mod phases;
mod plan;
pub mod random_model;
mod session;
mod target;
pub mod units;
mod vocab;

pub use assets::Assets;
pub use drafting::Drafting;
pub use generation::overrides as generation_overrides;
pub use model_ref::{HubName, ModelRef};
pub use opened::Opened;
pub use options::{
    BodyMemory, DeviceChoice, DeviceOptions, Dtype, Folders, GenerationOptions, GenerationSource, InterTokenTarget,
    LoadFormat, MemoryBudget, MemoryOptions, Method, Options, PackedCacheMode, QueueOptions, SpeculateOptions, Warn,
};
pub use phases::Phases;
pub use plan::{Budget, Bytes, Excess, GroupPlan, Plan, WeightBytes, as_precise_as_weights, weight_bytes};
pub use session::{Hooks, KvEventSender, Session};
pub use target::{Gpu, Target};
