//! The index of the chunks on disk: their sizes, and their order of eviction.
//!
//! The order is by last use, and within a sequence by position: a chunk counts as used one second
//! earlier for each chunk before it, so that a sequence that was read from front to back is evicted
//! from its end. The same time is set on the file, so that the order survives the process.

use std::{
    collections::{BTreeSet, HashMap},
    time::{Duration, SystemTime},
};

use folio_model::Fingerprint;

/// A chunk of one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Place {
    model: u128,
    pub key: u128,
}

impl Place {
    pub fn new(model: Fingerprint, key: u128) -> Self {
        Self { model: model.0, key }
    }

    pub fn model(&self) -> Fingerprint {
        Fingerprint(self.model)
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    bytes: u64,
    used: SystemTime,
    /// Number of chunks before it in its sequence, as far as they are known.
    depth: u32,
}

#[derive(Debug, Default)]
pub(super) struct Index {
    entries: HashMap<Place, Entry>,
    /// One for each entry.
    order: BTreeSet<(SystemTime, Place)>,
    /// Bytes of all entries.
    bytes: u64,
    /// Bytes of files that are being written.
    reserved: u64,
}

impl Index {
    /// Adds a file of this size and time of use, or replaces what was known of it.
    pub fn insert(&mut self, place: Place, bytes: u64, used: SystemTime, depth: u32) {
        self.remove(place);
        self.entries.insert(place, Entry { bytes, used, depth });
        self.order.insert((used, place));
        self.bytes += bytes;
    }

    pub fn remove(&mut self, place: Place) -> bool {
        let Some(entry) = self.entries.remove(&place) else { return false };
        self.order.remove(&(entry.used, place));
        self.bytes -= entry.bytes;
        true
    }

    /// Number of chunks before a chunk with this parent; 0 if the parent is not known.
    pub fn depth_after(&self, parent: Place) -> u32 {
        let is_start = parent.key == 0;
        self.entries.get(&parent).filter(|_| !is_start).map_or(0, |entry| entry.depth.saturating_add(1))
    }

    pub fn bytes(&self) -> u64 {
        self.bytes + self.reserved
    }

    pub fn reserve(&mut self, bytes: u64) {
        self.reserved += bytes;
    }

    pub fn unreserve(&mut self, bytes: u64) {
        self.reserved -= bytes;
    }

    /// The next chunk in order of eviction.
    pub fn oldest(&self) -> Option<Place> {
        self.order.first().map(|&(_, place)| place)
    }

    /// Chunks of one model, most recently used first.
    pub fn keys(&self, model: Fingerprint) -> Vec<u128> {
        let own = |(_, place): &&(SystemTime, Place)| place.model() == model;
        self.order.iter().rev().filter(own).map(|(_, place)| place.key).collect()
    }
}

/// The time of use of a chunk that is used now.
pub(super) fn used_now(depth: u32) -> SystemTime {
    let now = SystemTime::now();
    now.checked_sub(Duration::from_secs(depth.into())).unwrap_or(SystemTime::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_bytes_and_depth_follow_what_is_there() {
        let (one, two) = (Fingerprint(1), Fingerprint(2));
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let mut index = Index::default();
        index.insert(Place::new(one, 10), 100, at(5), 0);
        index.insert(Place::new(one, 11), 50, at(3), 1);
        index.insert(Place::new(two, 10), 7, at(4), 0);
        assert_eq!(index.bytes(), 157);
        assert_eq!(index.keys(one), [10, 11]);
        assert_eq!(index.oldest(), Some(Place::new(one, 11)));
        assert_eq!(index.depth_after(Place::new(one, 11)), 2);
        assert_eq!(index.depth_after(Place::new(one, 12)), 0);
        index.insert(Place::new(one, 11), 60, at(9), 1);
        assert_eq!((index.bytes(), index.oldest()), (167, Some(Place::new(two, 10))));
        assert!(index.remove(Place::new(two, 10)));
        assert!(!index.remove(Place::new(two, 10)));
        index.reserve(33);
        assert_eq!((index.bytes(), index.oldest()), (193, Some(Place::new(one, 10))));
        index.unreserve(33);
        assert_eq!(index.keys(one), [11, 10]);
        assert_eq!(index.bytes(), 160);
    }
}
