//! Connections: accepted, bounded, timed, encrypted, drained.
