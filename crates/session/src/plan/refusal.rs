//! The message if not even the shortest request fits: the sizes of all parts, the free memory, and
//! remedies.

use anyhow::{Error, anyhow};

use super::budget::Budget;
use super::{Bytes, Planner};
use crate::units;

impl Planner<'_> {
    /// Beside everything else there is no room for the keys and values of two tokens, one to ask
    /// and one to answer.
    pub(super) fn no_room(&self) -> Error {
        let beside = self.beside_kv(2);
        let (needed, room) = (self.demand.bytes(&self.demand.least(2)), self.budget.for_kv(beside.fixed()));
        let (needed, room) = (units::bytes(needed), units::bytes(room));
        let (parts, fixed) = (parts(&beside), units::bytes(beside.fixed()));
        match &self.budget {
            Budget::Kv { flag, .. } => {
                anyhow!(
                    "not even two tokens fit: {flag} allows {room} for keys and values, and they need {needed}; raise it"
                )
            }
            Budget::All { bytes, flag } => anyhow!(
                "not even two tokens fit: {parts} take {fixed} of the {} that {flag} allows, which leaves {room} for keys and \
                 values, and they need {needed}; {}, or lower --max-num-batched-tokens or --max-num-seqs",
                units::bytes(*bytes),
                self.smaller_weights()
            ),
            Budget::Polite { free } if *free < beside.fixed() => anyhow!(
                "the model does not fit: {parts} take {fixed}, and {} are free; {}",
                units::bytes(*free),
                self.smaller_weights()
            ),
            Budget::Polite { free } => anyhow!(
                "not even two tokens fit: {parts} take {fixed} of the {} that are free, half of what that leaves is {room}, and \
                 the keys and values of two tokens need {needed}; name a budget to use more than half (--memory-fraction \
                 0.9, or --memory SIZE), or {}",
                units::bytes(*free),
                self.smaller_weights()
            ),
        }
    }

    /// The weights alone are more than the budget.
    pub(super) fn no_room_for_weights(&self, weights: u64, budget: u64, flag: &str) -> Error {
        let (weights, budget) = (units::bytes(weights), units::bytes(budget));
        anyhow!("the weights take {weights}, but {flag} allows {budget} in all; {}", self.smaller_weights())
    }

    /// Weights that are coded already are not coded again.
    fn smaller_weights(&self) -> &'static str {
        match self.has_plain_weights && self.options.quantize.is_none() {
            true => "encode the weights smaller (--quantize int4), or take a smaller model",
            false => "take a smaller model, or the same in fewer bits",
        }
    }
}

/// The parts that take memory, in words.
fn parts(bytes: &Bytes) -> String {
    let host = if bytes.host_is_apart { 0 } else { bytes.host };
    let parts = [
        ("weights", bytes.weights),
        ("activations", bytes.activations),
        ("working memory", bytes.working),
        ("guessing ahead", bytes.drafting),
        ("the host tier", host),
    ];
    let parts = parts.into_iter().filter(|(_, size)| *size > 0);
    let mut parts: Vec<String> = parts.map(|(name, size)| format!("{name} {}", units::bytes(size))).collect();
    match parts.pop() {
        Some(last) if !parts.is_empty() => format!("{} and {last}", parts.join(", ")),
        last => last.unwrap_or_default(),
    }
}
