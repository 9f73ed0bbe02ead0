//! Answers that have ended, separate for each salt, within one bound on all of them.
//!
//! An automaton forgets nothing, so a salt has two: when the younger one is full, at half of the
//! salt's share, it replaces the older one, which is dropped. Each tenant with past answers has the
//! same share of all, and each of its salts the same part of that. When all is full, the tenant
//! with the most tokens makes room in the salt with the most, which retains its younger half: a
//! tenant with few tokens is never displaced by one with many, or with many salts. The answers that
//! make room depend on lengths, and not on contents.

use super::super::{
    Owner,
    automaton::{Automaton, TOKEN_BYTES},
    mix::Map,
    salts::Salts,
};

/// Most bytes of a token, or of the beginning of an answer: in the automaton, and in the list of
/// answers.
const PAST_BYTES: usize = TOKEN_BYTES + 2 * size_of::<u32>();

/// Comes before every answer; no token has this value.
const BEGIN: u32 = u32::MAX;

/// See the [module](self).
pub(super) struct Past {
    /// Most tokens of all salts together, beginnings of answers included.
    most_tokens: usize,
    num_tokens: usize,
    salts: Salts<Answers>,
    nothing: Automaton,
}

/// The answers of one salt.
#[derive(Default)]
struct Answers {
    young: Counted,
    old: Counted,
}

/// An automaton, and its answers, from which a smaller one can be made.
#[derive(Default)]
struct Counted {
    automaton: Automaton,
    answers: Vec<u32>,
    num_tokens: usize,
}

impl Counted {
    fn push(&mut self, token: u32) {
        self.answers.push(token);
        self.num_tokens += 1;
        match token {
            BEGIN => self.automaton.begin(),
            _ => self.automaton.push(token),
        }
    }

    /// The same with its last `count` tokens only.
    fn latest(&self, count: usize) -> Self {
        let mut latest = Self::default();
        latest.push(BEGIN);
        self.answers[self.num_tokens + 1 - count.clamp(1, self.num_tokens)..]
            .iter()
            .for_each(|&token| latest.push(token));
        latest
    }

    fn bytes(&self) -> usize {
        self.automaton.bytes() + self.answers.capacity() * size_of::<u32>()
    }
}

impl Answers {
    fn num_tokens(&self) -> usize {
        self.young.num_tokens + self.old.num_tokens
    }

    /// The younger answers replace the older ones.
    fn turn(&mut self) {
        self.old = std::mem::take(&mut self.young);
    }

    /// Drops at least a quarter, the oldest, and retains about half; of very few tokens it retains
    /// none.
    fn halve(&mut self) {
        let (all, young, old) = (self.num_tokens(), self.young.num_tokens, self.old.num_tokens);
        if all < 8 {
            *self = Self::default();
        } else if young < all / 4 {
            self.old = self.old.latest(all / 2 - young);
        } else {
            self.old = Counted::default();
            if old < all / 4 {
                self.young = self.young.latest(all / 2);
            }
        }
    }
}

impl Past {
    pub fn new(most_bytes: usize) -> Self {
        let (salts, nothing) = (Salts::default(), Automaton::default());
        Self { most_tokens: most_bytes / PAST_BYTES, num_tokens: 0, salts, nothing }
    }

    /// The younger and the older answers of a salt.
    pub fn of(&self, salt: u64) -> [&Automaton; 2] {
        match self.salts.get(salt) {
            Some(Answers { young, old }) => [&young.automaton, &old.automaton],
            None => [&self.nothing; 2],
        }
    }

    pub fn bytes(&self) -> usize {
        self.salts.values().map(|(_, answers)| answers.young.bytes() + answers.old.bytes()).sum()
    }

    pub fn learn(&mut self, owner: Owner, answer: &[u32]) {
        // With next to no room there is nothing to halve.
        if self.most_tokens < 16 || answer.is_empty() {
            return;
        }
        self.salts.of(owner, Answers::default);
        // A new salt may have displaced another one.
        self.num_tokens = self.salts.values().map(|(_, answers)| answers.num_tokens()).sum();
        let mut tenants: Vec<u64> = self.salts.values().map(|(tenant, _)| tenant).collect();
        tenants.sort_unstable();
        let own = tenants.iter().filter(|&&tenant| tenant == owner.tenant).count();
        tenants.dedup();
        let share = (self.most_tokens / tenants.len() / own).max(4);
        self.push(owner.salt, BEGIN, share);
        answer.iter().for_each(|&token| self.push(owner.salt, token, share));
    }

    fn push(&mut self, salt: u64, token: u32, share: usize) {
        while self.num_tokens >= self.most_tokens {
            let freed = self.make_room();
            self.num_tokens -= freed;
            if freed == 0 {
                return;
            }
        }
        let Some(answers) = self.salts.get_mut(salt) else { return };
        if answers.young.num_tokens >= share / 2 {
            self.num_tokens -= answers.old.num_tokens;
            answers.turn();
        }
        answers.young.push(token);
        self.num_tokens += 1;
    }

    /// Returns the number of tokens dropped.
    fn make_room(&mut self) -> usize {
        let mut of_tenants: Map<u64, usize> = Map::default();
        for (tenant, answers) in self.salts.values() {
            *of_tenants.entry(tenant).or_default() += answers.num_tokens();
        }
        let order = |tenant: u64, answers: &Answers| (of_tenants[&tenant], tenant, answers.num_tokens());
        let largest = self.salts.values_mut().max_by_key(|(tenant, answers)| order(*tenant, answers));
        let Some((_, largest)) = largest else { return 0 };
        let before = largest.num_tokens();
        largest.halve();
        before - largest.num_tokens()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::super::mix::random_tokens, *};

    fn owner(salt: u64) -> Owner {
        Owner { tenant: 1, salt }
    }

    /// Number of tokens at the end of a text that its salt still has in a row.
    fn known(past: &Past, salt: u64, text: &[u32]) -> usize {
        let holds = |len: &usize| {
            let part = &text[text.len() - len..];
            past.of(salt).iter().any(|past| past.holds(part))
        };
        (1..=text.len()).take_while(holds).last().unwrap_or(0)
    }

    #[test]
    fn salts_know_nothing_of_each_other() {
        let mut past = Past::new(1 << 20);
        past.learn(owner(1), &[1, 2, 3, 4]);
        past.learn(owner(2), &[5, 6, 7, 8]);
        assert_eq!([1, 2, 3, 0].map(|salt| known(&past, salt, &[1, 2, 3, 4])), [4, 0, 0, 0]);
        assert_eq!([1, 2, 3, 0].map(|salt| known(&past, salt, &[5, 6, 7, 8])), [0, 4, 0, 0]);
    }

    #[test]
    fn who_says_little_is_not_driven_out_by_who_says_much() {
        let most_bytes = 1 << 20;
        let mut past = Past::new(most_bytes);
        let most_tokens = past.most_tokens;
        // One salt has all of the room and then stays silent; others come one by one, each with
        // more tokens than there is room for.
        let first = random_tokens(1, 3 * most_tokens, 50_000);
        first.chunks(100).for_each(|answer| past.learn(owner(0), answer));
        assert!(past.num_tokens > most_tokens / 2 && past.num_tokens <= most_tokens);
        for salt in 1..8 {
            random_tokens(salt + 1, 3 * most_tokens, 50_000)
                .chunks(100)
                .for_each(|answer| past.learn(owner(salt), answer));
            assert!(past.num_tokens <= most_tokens && past.bytes() <= most_bytes, "{} bytes", past.bytes());
            let counted: usize = past.salts.values().map(|(_, answers)| answers.num_tokens()).sum();
            assert_eq!(counted, past.num_tokens);
            for other in 0..=salt {
                let held = past.salts.get(other).map_or(0, Answers::num_tokens);
                let least = most_tokens / (salt as usize + 1) / 2 - 2;
                assert!(held >= least.min(most_tokens / 4), "salt {other} of {salt} has {held}, {least} are its part");
            }
        }
        assert!(known(&past, 0, first.chunks(100).last().expect("an answer")) > 30, "its latest");
    }

    #[test]
    fn ever_new_salts_of_a_tenant_leave_others_theirs() {
        let mut past = Past::new(1 << 20);
        let answer = random_tokens(1, 300, 50_000);
        past.learn(Owner { tenant: 2, salt: 1 }, &answer);
        for salt in 2..2000 {
            past.learn(Owner { tenant: 3, salt }, &random_tokens(salt, 300, 50_000));
        }
        assert_eq!(known(&past, 1, &answer), 300);
        assert!(past.salts.values().count() <= 256 && past.bytes() <= 1 << 20);
    }

    #[test]
    fn next_to_no_room_is_none() {
        for bytes in [0, PAST_BYTES, 20 * PAST_BYTES, 100 * PAST_BYTES] {
            let mut past = Past::new(bytes);
            for salt in 0..40 {
                past.learn(owner(salt), &random_tokens(salt, 50, 9));
                assert!(past.num_tokens <= past.most_tokens);
            }
        }
    }
}
