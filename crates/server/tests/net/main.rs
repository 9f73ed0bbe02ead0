//! The connection layer, from outside: real sockets, a small router, no engine.

mod support;

mod bytes_behind;
mod clients_that_leave;
mod drain;
mod headers;
mod hostile;
mod http2;
mod places;
mod refused;
mod timeouts;
mod tls;
mod writes;
