//! The reliability of a head's own probabilities, by depth.
//!
//! A head's confidence may be too high or too low, and differs by depth. The probabilities of the
//! nodes of each draft are recorded; once the tokens are known, the number of correct nodes on the
//! path is compared with the sum of the probabilities of all nodes offered there. The head's later
//! probabilities are multiplied by that ratio. It decides which nodes a draft has and where it
//! ends, nothing else. Each salt has its own record, and all begin alike.

use std::collections::HashMap;

use folio_scheduler::RequestId;

use super::{Draft, Owner, SettledRequest, salts::Salts};

/// See the [module](self).
#[derive(Default)]
pub(super) struct Trust {
    depths: Salts<Vec<Record>>,
    pending: HashMap<RequestId, Pending>,
}

/// Record of one depth; older results fade.
#[derive(Clone, Copy)]
struct Record {
    said: f32,
    right: f32,
}

/// A draft that is being verified.
struct Pending {
    owner: Owner,
    /// Length of the text when it was made.
    from: usize,
    draft: Draft,
    /// The head's probability of each node, given its parent.
    said: Vec<f32>,
}

/// A new record counts as that of a head that was right about this many tokens.
const BEGINNING: f32 = 10.0;
const FADING: f32 = 0.998;
const BOUNDS: (f32, f32) = (0.3, 2.0);

impl Default for Record {
    fn default() -> Self {
        Self { said: BEGINNING, right: BEGINNING }
    }
}

impl Trust {
    /// The factor for nodes of a depth, counted from 1, for requests of a salt.
    pub fn of(&self, salt: u64, depth: usize) -> f32 {
        let record = self.depths.get(salt).and_then(|depths| depths.get(depth - 1)).copied().unwrap_or_default();
        (record.right / record.said).clamp(BOUNDS.0, BOUNDS.1)
    }

    /// Records a draft that is to be verified after the request's tokens.
    pub fn expect(&mut self, request: &SettledRequest<'_>, draft: &Draft, said: Vec<f32>) {
        assert_eq!(draft.len(), said.len(), "nodes and what was said of them");
        let SettledRequest { id, owner, tokens, .. } = *request;
        self.pending.insert(id, Pending { owner, from: tokens.len(), draft: draft.clone(), said });
    }

    /// Takes the result of a request's draft from its tokens.
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
        // The first of two nodes of 0.4 each is always right; the token after it never is, whatever
        // its probability.
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
        // One of two drafted tokens.
        trust.expect(&request(2, &[1, 2, 3]), &Draft::chain([5, 6]), vec![0.5, 0.5]);
        trust.settle(RequestId(2), &[1, 2, 3, 5]);
        assert!(trust.of(7, 1) > 1.0 && trust.of(7, 2) == 1.0);
    }
}
