//! How far a head's own probabilities can be believed, by how many tokens ahead they speak of.
//!
//! A head is surer of itself, or less, than its record justifies, and differently at every depth. Of each draft it is kept
//! how likely its nodes were said to be; once the tokens are known, the nodes on the way that were right are set against
//! what was said of all that were offered there. What a head says is then multiplied by that ratio. It decides which nodes
//! a draft has and where it ends, nothing else. Each salt has a record of its own, and all begin alike.

use std::collections::HashMap;

use folio_scheduler::RequestId;

use super::{Draft, Owner, SettledRequest, salts::Salts};

/// See the [module](self).
#[derive(Default)]
pub(super) struct Trust {
    depths: Salts<Vec<Record>>,
    pending: HashMap<RequestId, Pending>,
}

/// Of one depth; what is long past fades.
#[derive(Clone, Copy)]
struct Record {
    said: f32,
    right: f32,
}

/// A draft that is being verified.
struct Pending {
    owner: Owner,
    /// Tokens that were known when it was made.
    from: usize,
    draft: Draft,
    /// What the head said of each node, given the one before it.
    said: Vec<f32>,
}

/// A record begins as that of a head that was right about so many tokens.
const BEGINNING: f32 = 10.0;
const FADING: f32 = 0.998;
const BOUNDS: (f32, f32) = (0.3, 2.0);

impl Default for Record {
    fn default() -> Self {
        Self { said: BEGINNING, right: BEGINNING }
    }
}

impl Trust {
    /// What to multiply with at a depth, which is 1 for what follows the last token, for requests of a salt.
    pub fn of(&self, salt: u64, depth: usize) -> f32 {
        let record = self.depths.get(salt).and_then(|depths| depths.get(depth - 1)).copied().unwrap_or_default();
        (record.right / record.said).clamp(BOUNDS.0, BOUNDS.1)
    }

    /// A draft that is to be verified behind the tokens that the request has.
    pub fn expect(&mut self, request: &SettledRequest<'_>, draft: &Draft, said: Vec<f32>) {
        assert_eq!(draft.len(), said.len(), "nodes and what was said of them");
        let SettledRequest { id, owner, tokens, .. } = *request;
        self.pending.insert(id, Pending { owner, from: tokens.len(), draft: draft.clone(), said });
    }

    /// What became of a request's draft follows from its tokens.
    pub fn settle(&mut self, id: RequestId, tokens: &[u32]) {
        if self.pending.get(&id).is_none_or(|pending| tokens.len() <= pending.from) {
            return;
        }
        let Some(Pending { owner, from, draft, said }) = self.pending.remove(&id) else { return };
        let depths = self.depths.of(owner, Vec::new);
        let mut at = None;
        for (depth, &token) in tokens[from..].iter().enumerate() {
            let children = draft.parents().iter().zip(&said).filter(|(parent, _)| **parent == at);
            let offered: f32 = children.map(|(_, said)| said).sum();
            if offered == 0.0 {
                return;
            }
            if depths.len() <= depth {
                depths.resize(depth + 1, Record::default());
            }
            let (record, child) = (&mut depths[depth], draft.child(at, token));
            record.said = record.said * FADING + offered;
            record.right = record.right * FADING + if child.is_some() { 1.0 } else { 0.0 };
            match child {
                Some(child) => at = Some(child),
                None => return,
            }
        }
    }

    pub fn forget(&mut self, id: RequestId) {
        self.pending.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: Owner = Owner { tenant: 1, salt: 7 };

    fn request(id: u64, tokens: &[u32]) -> SettledRequest<'_> {
        let id = RequestId(id);
        SettledRequest { id, owner: OWNER, tokens, computed: 0, rows: &[], output: None, guesses: &[], most: 0 }
    }

    #[test]
    fn ratios_follow_what_was_right() {
        let mut trust = Trust::default();
        assert_eq!((trust.of(7, 1), trust.of(7, 9)), (1.0, 1.0));
        // Of two nodes of 0.4 each the first is right every time; what follows it is never right, and was said to be.
        for round in 0..3000 {
            let mut draft = Draft::chain([5, 6]);
            draft.push(7, None);
            trust.expect(&request(1, &[1, 2, 3]), &draft, vec![0.4, 0.9, 0.4]);
            trust.settle(RequestId(1), &[1, 2, 3]);
            trust.settle(RequestId(1), &[1, 2, 3, 5, if round % 3 == 0 { 6 } else { 8 }]);
        }
        assert!((trust.of(7, 1) - 1.25).abs() < 0.03, "{}", trust.of(7, 1));
        assert!((trust.of(7, 2) - 1.0 / 2.7).abs() < 0.03, "{}", trust.of(7, 2));
        assert_eq!(trust.of(7, 3), 1.0);
        assert_eq!((trust.of(8, 1), trust.of(0, 2)), (1.0, 1.0), "of another salt");
    }

    #[test]
    fn what_was_not_verified_is_not_counted() {
        let mut trust = Trust::default();
        trust.expect(&request(1, &[1, 2, 3]), &Draft::chain([5]), vec![0.5]);
        trust.forget(RequestId(1));
        trust.settle(RequestId(1), &[1, 2, 3, 4]);
        trust.expect(&request(2, &[1, 2, 3]), &Draft::default(), vec![]);
        trust.settle(RequestId(2), &[1, 2, 3, 4]);
        assert_eq!(trust.of(7, 1), 1.0);
        // One token of two drafted.
        trust.expect(&request(2, &[1, 2, 3]), &Draft::chain([5, 6]), vec![0.5, 0.5]);
        trust.settle(RequestId(2), &[1, 2, 3, 5]);
        assert!(trust.of(7, 1) > 1.0 && trust.of(7, 2) == 1.0);
    }
}
