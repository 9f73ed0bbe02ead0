//! A draft model beside the model it drafts for, driven by hand: what it drafts, and how far it follows.

mod driver;
mod follows;
#[path = "../batch_invariance/tiny.rs"]
#[expect(dead_code, reason = "the other models are for other tests")]
mod tiny;
mod trained;
mod translated;
