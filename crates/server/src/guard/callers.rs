//! The caller of a request: the owner of a key, or the anonymous caller of a server without keys.

use std::hint::black_box;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use sha2::{Digest, Sha256};

use super::keys::{Key, Keys, Salt};

/// In the extensions of every request that reaches a route; cheap to clone.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The key's name; "anonymous" where there are no keys.
    pub name: Arc<str>,
    /// The tenant, for the scheduler's fairness. 0 is anonymous.
    pub tenant: u64,
    pub weight: u32,
    /// Range that its requests' priorities are clamped to.
    pub priorities: RangeInclusive<i32>,
    /// Which part of the prefix cache it shares; 0 is common to all that have no salt.
    pub cache_salt: u64,
    /// Number of this key's requests in flight.
    pub in_flight: Arc<AtomicUsize>,
    pub max_in_flight: usize,
}

impl Caller {
    pub fn anonymous(max_in_flight: usize) -> Self {
        let (name, in_flight, priorities) = ("anonymous".into(), Arc::default(), i32::MIN..=i32::MAX);
        Self { name, tenant: 0, weight: 1, priorities, cache_salt: 0, in_flight, max_in_flight }
    }

    /// The priority that a request of this caller gets when it asks for one.
    pub fn priority(&self, asked: i32) -> i32 {
        asked.clamp(*self.priorities.start(), *self.priorities.end())
    }

    /// The salt of a request that brings a salt of its own: callers who may not share a cache still
    /// do not.
    pub fn cache_salt_with(&self, text: &str) -> u64 {
        salt_of(&[b"request", &self.cache_salt.to_le_bytes(), text.as_bytes()])
    }
}

/// All callers of a server.
#[derive(Debug)]
pub struct Callers {
    /// Digests of the callers' secrets, in the same order.
    digests: Vec<[u64; 4]>,
    callers: Vec<Caller>,
    /// The one caller of a server without keys.
    anonymous: Option<Caller>,
}

impl Callers {
    /// `in_flight`: most requests at once of all; `per_key`: of one key whose line does not say.
    pub fn new(keys: &Keys, in_flight: usize, per_key: usize) -> Self {
        let alone = keys.len() == 1;
        let caller = |(index, key): (usize, &Key)| Caller {
            name: key.name.clone(),
            tenant: index as u64 + 1,
            weight: key.weight,
            priorities: key.priorities.clone(),
            cache_salt: cache_salt(key, alone),
            in_flight: Arc::default(),
            max_in_flight: key.max_in_flight.unwrap_or(per_key),
        };
        Self {
            digests: keys.iter().map(|key| words(&key.digest)).collect(),
            callers: keys.iter().enumerate().map(caller).collect(),
            anonymous: keys.is_empty().then(|| Caller::anonymous(in_flight)),
        }
    }

    /// The one caller of a server without keys.
    pub fn anonymous(&self) -> Option<&Caller> {
        self.anonymous.as_ref()
    }

    /// The owner of a secret. Takes the same time for every secret of one length: all digests are
    /// compared in full.
    pub fn find(&self, secret: &[u8]) -> Option<&Caller> {
        let wanted = words(&Sha256::digest(secret).into());
        let mut found = 0; // one more than the index
        for (index, digest) in self.digests.iter().enumerate() {
            let difference = digest.iter().zip(&wanted).fold(0, |sum, (a, b)| sum | (a ^ b));
            // black_box: the compiler must not see that a non-zero difference decides anything.
            let difference: u64 = black_box(difference);
            let equal = ((difference | difference.wrapping_neg()) >> 63) ^ 1;
            found |= (index + 1) & (equal as usize).wrapping_neg();
        }
        self.callers.get(black_box(found).wrapping_sub(1))
    }

    pub fn iter(&self) -> impl Iterator<Item = &Caller> {
        self.callers.iter().chain(&self.anonymous)
    }
}

fn words(digest: &[u8; 32]) -> [u64; 4] {
    std::array::from_fn(|word| u64::from_le_bytes(std::array::from_fn(|byte| digest[word * 8 + byte])))
}

fn cache_salt(key: &Key, alone: bool) -> u64 {
    match &key.salt {
        Salt::None => 0,
        Salt::Own if alone => 0,
        Salt::Own => salt_of(&[b"key", &key.digest]),
        Salt::Text(text) => salt_of(&[b"text", text.as_bytes()]),
    }
}

/// Depends on nothing but the parts, so that what the cache holds on disk is found again after a
/// restart. Never 0.
fn salt_of(parts: &[&[u8]]) -> u64 {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    words(&hasher.finalize().into())[0].max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn callers(text: &str) -> Callers {
        let mut keys = Keys::none();
        keys.add_text(text).unwrap();
        Callers::new(&keys, 256, 64)
    }

    #[test]
    fn every_secret_finds_its_owner_and_no_other_finds_one() {
        let text: String = (0..200).map(|n| format!("secret-of-number-{n:04}\n")).collect();
        let callers = callers(&text);
        for n in 0..200 {
            let caller = callers.find(format!("secret-of-number-{n:04}").as_bytes()).unwrap();
            assert_eq!((&*caller.name, caller.tenant), (format!("key-{}", n + 1).as_str(), n + 1));
        }
        for wrong in ["", "secret-of-number-0200", "secret-of-number-000", "secret-of-number-00000", "key-1"] {
            assert!(callers.find(wrong.as_bytes()).is_none(), "{wrong}");
        }
        assert!(Callers::new(&Keys::none(), 256, 64).find(b"").is_none());
    }

    #[test]
    fn a_digest_that_differs_in_one_bit_is_another() {
        let mut callers = callers("0123456789abcdef\n");
        assert!(callers.find(b"0123456789abcdef").is_some());
        for bit in 0..256 {
            callers.digests[0][bit / 64] ^= 1 << (bit % 64);
            assert!(callers.find(b"0123456789abcdef").is_none(), "bit {bit}");
            callers.digests[0][bit / 64] ^= 1 << (bit % 64);
        }
    }

    #[test]
    fn caches_are_apart_unless_keys_say_otherwise() {
        let salts = |text: &str| callers(text).callers.iter().map(|caller| caller.cache_salt).collect::<Vec<_>>();
        assert_eq!(salts("aaaaaaaaaaaaaaaa\n"), [0]);
        let two = salts("aaaaaaaaaaaaaaaa\nbbbbbbbbbbbbbbbb\n");
        assert!(two[0] != two[1] && !two.contains(&0));
        assert_eq!(two[1], salts("bbbbbbbbbbbbbbbb\ncccccccccccccccc\n")[0], "the same after a restart");
        let mixed = salts(
            "aaaaaaaaaaaaaaaa salt=team\nbbbbbbbbbbbbbbbb salt=team\ncccccccccccccccc salt=none\ndddddddddddddddd salt=Team\n",
        );
        assert_eq!((mixed[0], mixed[2]), (mixed[1], 0));
        assert_ne!(mixed[0], mixed[3]);
        assert_ne!(salts("aaaaaaaaaaaaaaaa salt=team\n"), [0], "asked for by name");
    }

    #[test]
    fn a_request_s_salt_stays_within_its_caller_s() {
        let callers = callers("aaaaaaaaaaaaaaaa\nbbbbbbbbbbbbbbbb\n");
        let [first, second] = &callers.callers[..] else { panic!("two callers") };
        assert_eq!(first.cache_salt_with("x"), first.cache_salt_with("x"));
        assert_ne!(first.cache_salt_with("x"), first.cache_salt_with("y"));
        assert_ne!(first.cache_salt_with("x"), second.cache_salt_with("x"));
        assert_ne!(first.cache_salt_with(""), first.cache_salt);
    }

    #[test]
    fn a_priority_stays_within_the_key_s_range() {
        let callers = callers("aaaaaaaaaaaaaaaa priority=-2..5\nbbbbbbbbbbbbbbbb priority=3\ncccccccccccccccc\n");
        let given = |asked: i32| callers.callers.iter().map(|caller| caller.priority(asked)).collect::<Vec<_>>();
        assert_eq!(given(0), [0, 3, 0]);
        assert_eq!(given(-1_000_000), [-2, 3, -1_000_000]);
        assert_eq!(given(i32::MAX), [5, 3, i32::MAX]);
        assert_eq!(Caller::anonymous(1).priority(i32::MIN), i32::MIN);
    }

    #[test]
    fn lines_without_limits_take_the_server_s() {
        let callers = callers("aaaaaaaaaaaaaaaa weight=3 max-in-flight=5\nbbbbbbbbbbbbbbbb\n");
        let figures: Vec<_> = callers.callers.iter().map(|caller| (caller.weight, caller.max_in_flight)).collect();
        assert_eq!(figures, [(3, 5), (1, 64)]);
        let open = Callers::new(&Keys::none(), 256, 64);
        assert_eq!(open.anonymous().unwrap().max_in_flight, 256);
        assert!(callers.anonymous().is_none());
    }
}
