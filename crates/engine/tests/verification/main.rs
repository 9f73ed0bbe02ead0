//! Drafts change how many tokens a pass gives, and nothing else: verification is compared with
//! plain decoding, token by token and as a distribution, and its pace with theory.

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
