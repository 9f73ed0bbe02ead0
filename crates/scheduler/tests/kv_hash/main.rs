//! The scheduler's promises, one by one, mostly against a model that shows every wrong block. Random traffic is the
//! simulator's part: see the crate `folio-simulator`.

mod basics;
mod drafts;
mod fairness;
mod harness;
mod memory;
mod sharing;
mod tiers;
