//! Runs a language model: from a name and options to an engine that answers.
//!
//! ```
//! use folio_session::{Options, Session};
//!
//! # fn main() -> anyhow::Result<()> {
//! let session = Session::open(None, &Options::default())?;
//! println!("{}", session.answer("What does `Rc::clone` do?")?);
//! # Ok(())
//! # }
//! ```
//!
//! The model is a folder of Hugging Face files, a `.gguf` file, a name in the hub's cache, or, as
//! here, the small one that is compiled in (feature `embedded-model`). [`Options`] are plain values
//! that all have defaults. `examples/` streams an answer with options of its own, and compares
//! texts by their embeddings.
//!
//! A session is made in three steps, which a program may also take one by one: [`Assets::open`]
//! opens the model's files; [`Opened::new`] adds the drafting method and plans the memory
//! ([`Plan`]); [`Session::load`] loads the weights and starts the engine. [`Session::engine`] takes
//! any number of requests at once, from any thread.
//!
//! The library prints nothing and reads no environment variable. Progress and warnings go to
//! [`Hooks`]; folders outside the model are options ([`Folders`]).

#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod answer;
mod assets;
mod device;
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

pub use answer::Answer;
pub use assets::Assets;
pub use device::{Defaults, Device, StepShape};
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
