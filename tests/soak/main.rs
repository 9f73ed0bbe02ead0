//! The server under hours of bad clients: many at once, too little memory, clients that disconnect,
//! send garbage, read slowly or not at all, and orders to end at the worst moment. Every complete
//! answer is compared with the answer to the same request on a server without other load.
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
mod server;
mod sigterm;
mod storm;
mod table;
mod tally;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Each of these tests needs the machine for itself.
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
