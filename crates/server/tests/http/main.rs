//! The server over real sockets, with an executor that spells the alphabet: after `a` comes `b`.

mod answers;
mod harness;
mod hostile;
