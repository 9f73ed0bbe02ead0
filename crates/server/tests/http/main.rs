//! The server over real sockets, with an executor that spells the alphabet: after `a` comes `b`.

mod answers;
mod control;
mod corpus;
mod harness;
mod hostile;
mod hostile_http2;
mod isolation;
mod limits;
mod limits_load;
mod limits_time;
mod messages;
mod neighbours;
mod priority;
mod refused;
mod responses;
mod seeds;
