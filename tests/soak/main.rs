//! The server under hours of bad company: many clients at once, too little memory, clients that leave, send nonsense,
//! read slowly or not at all, and orders to end at the worst moment. Every answer that comes whole is compared with what
//! the same request was answered on a server that had nothing else to do.
//!
//! `cargo xtask soak` and `cargo xtask sigterm` run the same for longer.

mod answer;
mod bodies;
mod client;
mod http;
mod load;
mod memory;
mod record;
mod report;
mod rng;
mod server;
mod sigterm;
mod storm;
mod table;
mod tally;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Each of these tests wants the machine for itself.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number from the environment.
fn setting(name: &str, otherwise: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")),
        Err(_) => otherwise,
    }
}
