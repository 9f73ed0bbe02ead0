//! Drafts of a known agreement, for measuring: a request that always repeats its last token has
//! correct drafts with a given probability, token by token, and everything else is as with any
//! other method.

use folio_scheduler::RequestId;

use super::{Draft, Known, Propose};
use crate::sampling::uniform;

/// Drafts the last token again, or another token that is wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Synthetic {
    /// Probability that a node is correct, if its ancestors are.
    pub agreement: f64,
    pub seed: u64,
}

impl Synthetic {
    /// Expected tokens of a pass with drafts of `most` tokens: each counts if all before it are
    /// correct.
    pub fn tokens_per_pass(agreement: f64, most: usize) -> f64 {
        (0..=most).map(|right| agreement.powi(right as i32)).sum()
    }
}

impl Propose for Synthetic {
    fn propose(&mut self, Known { id, tokens, .. }: Known<'_>, most: usize, draft: &mut Draft) {
        let Some(&last) = tokens.last() else { return };
        let wrong = last.checked_sub(1).unwrap_or(1);
        let mut parent = None;
        for position in (tokens.len()..).take(draft.room(most)) {
            // A position is decided once: if its draft was wrong, the model has its token by then.
            let right = uniform(self.seed, id.0 as u32, position) < self.agreement;
            parent = Some(draft.push(if right { last } else { wrong }, parent));
        }
    }

    fn forget(&mut self, _: RequestId) {}
}

#[cfg(test)]
mod tests {
    use super::{super::rig::known, *};

    #[test]
    fn tokens_per_pass_are_those_of_theory() {
        for most in 1..=8 {
            for agreement in [0.0, 0.5, 0.8, 1.0] {
                let mut method = Synthetic { agreement, seed: 7 };
                let (mut answer, mut draft, mut passes) = (vec![5], Draft::default(), 0);
                while answer.len() < 20_000 {
                    draft.clear();
                    method.propose(known(RequestId(3), &answer), most, &mut draft);
                    assert!(draft.is_chain() && draft.len() == most);
                    let right = draft.tokens().iter().take_while(|&&token| token == 5).count();
                    answer.resize(answer.len() + right + 1, 5);
                    passes += 1;
                }
                let found = (answer.len() - 1) as f64 / f64::from(passes);
                let expected = Synthetic::tokens_per_pass(agreement, most);
                assert!(
                    (found / expected - 1.0).abs() < 0.03,
                    "{found} and {expected} for {agreement}, {most} at once"
                );
            }
        }
    }

    #[test]
    fn nothing_follows_nothing() {
        let mut draft = Draft::default();
        let mut method = Synthetic { agreement: 0.0, seed: 0 };
        method.propose(known(RequestId(0), &[]), 4, &mut draft);
        assert!(draft.is_empty());
        method.propose(known(RequestId(0), &[0]), 2, &mut draft);
        assert_eq!(draft.tokens(), [1, 1]);
    }
}
