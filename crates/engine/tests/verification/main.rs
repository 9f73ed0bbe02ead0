//! Drafts change how many tokens a pass gives, and nothing else: verification against plain decoding, token for token
//! and as a distribution, and against what theory says of its pace.

mod chi_square;
mod device;
mod distribution;
mod exact;
mod exact_cases;
mod model;
mod pace;
#[path = "../device_sampling/sampler.rs"]
mod sampler;
mod walks;
