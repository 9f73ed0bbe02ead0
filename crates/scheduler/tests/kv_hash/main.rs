//! The scheduler against a model that shows every wrong block.

mod behaviour;
mod random;
mod sim;
