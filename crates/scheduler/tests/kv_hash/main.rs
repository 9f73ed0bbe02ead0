//! Tests of the scheduler's guarantees, one by one, mostly with a model that shows every wrong
//! block. Random traffic is tested by the crate `folio-simulator`.

mod basics;
mod drafts;
mod fairness;
mod harness;
mod memory;
mod sharing;
mod tiers;
