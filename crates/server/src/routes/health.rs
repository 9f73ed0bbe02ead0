//! The route.
