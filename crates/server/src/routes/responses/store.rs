//! Stored responses, each for its own caller alone, bounded in number and in bytes. The least
//! recently used one is evicted first.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::Bytes;

use super::input::Item;

pub struct ResponseStore {
    most: usize,
    most_bytes: usize,
    /// A secret of this process, so that ids cannot be derived from each other.
    secret: RandomState,
    shelf: Mutex<Shelf>,
}

#[derive(Default)]
struct Shelf {
    by_id: HashMap<Arc<str>, Entry>,
    /// When each was used last -> its id. Has just the ids of `by_id`.
    by_use: BTreeMap<u64, Arc<str>>,
    /// Counts uses; larger is later.
    clock: u64,
    /// Bytes of all entries together.
    bytes: usize,
}

struct Entry {
    /// Tenant of the caller that it belongs to.
    tenant: u64,
    used: u64,
    bytes: usize,
    stored: Arc<Stored>,
}

/// One response, and what a next one goes on from.
#[derive(Debug, PartialEq, Eq)]
pub struct Stored {
    /// The response's body, as it was sent.
    pub body: Bytes,
    /// The conversation, the answer last.
    pub items: Box<[Item]>,
}

impl Stored {
    pub fn new(body: String, items: Vec<Item>) -> Self {
        // Nothing is kept beyond what is counted.
        Self { body: Bytes::from(body.into_boxed_str().into_boxed_bytes()), items: items.into_boxed_slice() }
    }

    /// The conversation that the response answers.
    pub fn input(&self) -> &[Item] {
        self.items.split_last().map_or(&[], |(_, input)| input)
    }

    fn bytes(&self) -> usize {
        size_of::<Self>() + self.body.len() + self.items.iter().map(Item::bytes).sum::<usize>()
    }
}

impl ResponseStore {
    pub fn new(most: usize, most_bytes: usize) -> Self {
        Self { most, most_bytes, secret: RandomState::new(), shelf: Mutex::default() }
    }

    /// Request ids are unique but can be guessed; these cannot.
    pub fn new_id(&self, request_id: &str) -> String {
        format!("resp_{request_id}{:016x}", self.secret.hash_one(request_id))
    }

    /// Keeps a response if it fits at all.
    pub fn put(&self, tenant: u64, id: &str, stored: Stored) -> bool {
        let id: Arc<str> = id.into();
        // The entry in both maps, and the id that they share.
        let overhead = size_of::<(Arc<str>, Entry)>() + size_of::<(u64, Arc<str>)>() + id.len();
        let bytes = overhead + stored.bytes();
        if self.most == 0 || bytes > self.most_bytes {
            return false;
        }
        let mut shelf = self.shelf();
        shelf.take(&id);
        while shelf.by_id.len() >= self.most || shelf.bytes + bytes > self.most_bytes {
            shelf.drop_oldest();
        }
        let used = shelf.tick();
        shelf.bytes += bytes;
        shelf.by_use.insert(used, Arc::clone(&id));
        shelf.by_id.insert(id, Entry { tenant, used, bytes, stored: Arc::new(stored) });
        true
    }

    /// A caller's own response; it counts as used now.
    pub fn get(&self, tenant: u64, id: &str) -> Option<Arc<Stored>> {
        let mut shelf = self.shelf();
        let now = shelf.tick();
        let entry = shelf.by_id.get_mut(id).filter(|entry| entry.tenant == tenant)?;
        let before = std::mem::replace(&mut entry.used, now);
        let stored = Arc::clone(&entry.stored);
        let id = shelf.by_use.remove(&before).expect("both maps have the same ids");
        shelf.by_use.insert(now, id);
        Some(stored)
    }

    /// Whether there was one to forget.
    pub fn remove(&self, tenant: u64, id: &str) -> bool {
        let mut shelf = self.shelf();
        let is_theirs = shelf.by_id.get(id).is_some_and(|entry| entry.tenant == tenant);
        is_theirs && shelf.take(id)
    }

    /// Number of stored responses.
    pub fn len(&self) -> usize {
        self.shelf().by_id.len()
    }

    /// ... and what they take.
    pub fn bytes(&self) -> usize {
        self.shelf().bytes
    }

    /// No panic can leave it half changed: nothing between its steps panics but a broken invariant.
    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shelf {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn take(&mut self, id: &str) -> bool {
        let Some(entry) = self.by_id.remove(id) else { return false };
        self.by_use.remove(&entry.used);
        self.bytes -= entry.bytes;
        true
    }

    fn drop_oldest(&mut self) {
        let (_, id) = self.by_use.pop_first().expect("what is over a bound is not empty");
        let entry = self.by_id.remove(&id).expect("both maps have the same ids");
        self.bytes -= entry.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(len: usize) -> Stored {
        Stored::new("x".repeat(len), Vec::new())
    }

    /// Bytes of an entry with a body of this length and an id of one letter.
    fn bytes_of(len: usize) -> usize {
        let store = ResponseStore::new(1, usize::MAX);
        assert!(store.put(0, "a", stored(len)));
        store.bytes()
    }

    fn has(store: &ResponseStore, ids: &str) -> Vec<bool> {
        let shelf = store.shelf();
        assert_eq!(shelf.by_id.len(), shelf.by_use.len());
        assert_eq!(shelf.by_id.values().map(|entry| entry.bytes).sum::<usize>(), shelf.bytes);
        ids.chars().map(|id| shelf.by_id.contains_key(id.to_string().as_str())).collect()
    }

    #[test]
    fn the_longest_unused_leaves_first() {
        let store = ResponseStore::new(3, usize::MAX);
        for id in ["a", "b", "c"] {
            assert!(store.put(0, id, stored(1)));
        }
        assert!(store.get(0, "a").is_some());
        assert!(store.put(0, "d", stored(1)));
        assert_eq!(has(&store, "abcd"), [true, false, true, true]);
        assert!(store.get(0, "c").is_some() && store.get(0, "x").is_none());
        assert!(store.put(0, "e", stored(1)));
        assert_eq!(has(&store, "acde"), [false, true, true, true]);
        assert_eq!(store.len(), 3);
    }

    #[test]
    fn bytes_are_bounded_exactly() {
        let (one, hundred) = (bytes_of(1), bytes_of(101));
        assert_eq!(hundred - one, 100);
        let store = ResponseStore::new(100, 2 * one + hundred);
        for id in ["a", "b", "c"] {
            assert!(store.put(0, id, stored(1)));
        }
        assert_eq!((store.len(), store.bytes()), (3, 3 * one));
        assert!(store.put(0, "d", stored(101)));
        assert_eq!(has(&store, "abcd"), [false, true, true, true]);
        assert_eq!(store.bytes(), 2 * one + hundred, "full to the last byte");
        assert!(store.put(0, "e", stored(2)));
        assert_eq!(has(&store, "bcde"), [false, false, true, true], "one byte more takes two of the small ones");
        // An entry that fills the store is stored; one that is a byte larger is not, and evicts no
        // other.
        let room = 2 * one + hundred - bytes_of(0);
        assert!(!store.put(0, "f", stored(room + 1)));
        assert_eq!(has(&store, "def"), [true, true, false]);
        assert!(store.put(0, "f", stored(room)));
        assert_eq!((store.len(), store.bytes()), (1, 2 * one + hundred));
        assert!(store.remove(0, "f") && !store.remove(0, "f"));
        assert_eq!((store.len(), store.bytes()), (0, 0));
    }

    #[test]
    fn a_conversation_counts_with_its_response() {
        let store = ResponseStore::new(1, usize::MAX);
        let items = vec![Item::new("msg_1", "user", "four"), Item::new("msg_22", "assistant", "sixsix")];
        assert!(store.put(0, "a", Stored::new("x".into(), items)));
        assert_eq!(store.bytes() - bytes_of(1), 2 * size_of::<Item>() + 5 + 4 + 6 + 6);
        let stored = store.get(0, "a").expect("kept");
        assert_eq!((stored.input().len(), &*stored.input()[0].text), (1, "four"));
    }

    #[test]
    fn callers_see_their_own_alone() {
        let store = ResponseStore::new(2, usize::MAX);
        assert!(store.put(1, "a", stored(1)) && store.put(2, "b", stored(1)));
        assert!(store.get(1, "a").is_some() && store.get(2, "a").is_none() && store.get(0, "a").is_none());
        assert!(!store.remove(2, "a"));
        // A look at another caller's entry does not count as a use either.
        assert!(store.get(2, "a").is_none() && store.put(2, "c", stored(1)));
        assert_eq!(has(&store, "abc"), [true, false, true]);
        assert!(store.remove(1, "a"));
    }

    #[test]
    fn a_store_of_nothing_keeps_nothing() {
        assert!(!ResponseStore::new(0, usize::MAX).put(0, "a", stored(1)));
        assert!(!ResponseStore::new(1, 0).put(0, "a", stored(1)));
    }

    #[test]
    fn ids_do_not_follow_from_request_ids() {
        let (first, second) = (ResponseStore::new(1, 1), ResponseStore::new(1, 1));
        let id = first.new_id("00ff");
        assert!(id.starts_with("resp_00ff") && id.len() == "resp_00ff".len() + 16);
        assert_eq!(id, first.new_id("00ff"));
        assert_ne!(id, second.new_id("00ff"));
    }
}
