//! The trait [`Backend`] in parts.
//!
//! - [`Handles`] names the types of a device's memory, and [`Memory`] makes it.
//! - [`Operations`] computes on it: the operations of a forward pass, and copies to and from the
//!   host.
//! - [`Steps`] begins and ends the steps that operations belong to.
//! - [`Sampling`] turns logits into tokens on the device.
//! - [`BlockCopies`] copies KV blocks while steps run.
//!
//! A wrapper implements the parts that it changes. [`Intercept`] gives it every operation as one
//! value, [`Op`], which it may look at, replace, or run on the backend inside; [`Wrapper`] leaves
//! the memory to the backend inside. An operation is declared once, in `operations.rs`: the trait
//! method, the variant of [`Op`] and everything that wrappers need come from that declaration.
//!
//! On the CPU every operation is row-independent: the bits of a row depend on that row's inputs
//! alone, not on the rows beside it or on the number of threads. Reductions run in one fixed order.
//! A device may promise less for matrix products unless it is asked for more; [`Steps::numerics`]
//! says which.

mod arguments;
mod block_copies;
mod memory;
mod op;
mod operations;
mod sampling;
mod steps;
mod wrapper;

pub use arguments::{Activation, Attention, Norm, NormSpan, PrepareQkv, Product, RouterScore, Routing};
pub use block_copies::BlockCopies;
pub use memory::{ExpertsSource, Handles, InputLimits, Memory, TensorKind};
pub use operations::{Op, Operations};
pub use sampling::Sampling;
pub use steps::{StepSize, Steps};
pub use wrapper::{Intercept, Wrapper, Wraps};

/// A device that can run a decoder: the sum of its parts, implemented for each type that has them
/// all.
pub trait Backend: Memory + Operations + Steps + Sampling + BlockCopies {}

impl<T: Memory + Operations + Steps + Sampling + BlockCopies> Backend for T {}
