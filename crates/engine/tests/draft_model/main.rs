//! A draft model beside the model it drafts for, driven step by step: its drafts, and how well it
//! follows.

mod driver;
mod follows;
#[path = "../batch_invariance/tiny.rs"]
#[expect(dead_code, reason = "the other models are for other tests")]
mod tiny;
mod trained;
mod translated;
