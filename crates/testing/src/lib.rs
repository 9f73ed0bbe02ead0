//! Helpers that the tests of all crates share. No product code depends on this crate, and it
//! depends on no other crate of the workspace: unit tests can use it without a second copy of the
//! crate under test.

pub mod skip;
