//! The size limit of a folder, and the order of eviction.

use std::time::{Duration, Instant, SystemTime};

use super::super::{DiskStats, storing::FIRST_PAUSE};
use super::*;

/// Bytes of a chunk's file in these tests.
fn size(host: &HostTier) -> u64 {
    let scratch = Scratch::new("size");
    let store = open(&scratch.0, 1 << 20);
    put(&store, host, 1, 0).unwrap();
    store.bytes()
}

fn on_disk(folder: &Path) -> u64 {
    let chunks = files(folder).into_iter().filter(|file| file.extension().is_some_and(|ending| ending == "kv"));
    chunks.map(|file| file.metadata().unwrap().len()).sum()
}

#[test]
fn the_recently_used_stay() {
    let host = small_host();
    let size = size(&host);
    let scratch = Scratch::new("evict");
    let store = open(&scratch.0, 3 * size + 5);
    for key in [1, 2, 3] {
        assert_eq!(put(&store, &host, key, 0).unwrap(), []);
    }
    get(&store, &host, 1, 0).unwrap();
    assert_eq!(put(&store, &host, 4, 0).unwrap(), [2], "1 was used since");
    assert_eq!(put(&store, &host, 3, 0).unwrap(), [], "what is there is only touched");
    assert_eq!(put(&store, &host, 5, 0).unwrap(), [1]);
    assert_eq!(store.scan(), [5, 3, 4]);
    assert_eq!((store.bytes(), on_disk(&scratch.0)), (3 * size, 3 * size));
    for key in [3, 4, 5] {
        get(&store, &host, key, 0).unwrap();
    }
}

/// A sequence that was stored, or fetched, from front to back loses its end first.
#[test]
fn tails_go_before_heads() {
    let host = small_host();
    let size = size(&host);
    let scratch = Scratch::new("tails");
    let store = open(&scratch.0, 4 * size);
    for key in 1..=4 {
        put(&store, &host, key, key - 1).unwrap();
    }
    assert_eq!(put(&store, &host, 50, 0).unwrap(), [4]);
    let again = open(&scratch.0, 4 * size);
    assert_eq!(again.scan().last(), Some(&3), "the order outlives the process");
    for key in 1..=3 {
        get(&again, &host, key, key - 1).unwrap();
    }
    assert_eq!(put(&again, &host, 51, 0).unwrap(), [3]);
}

#[test]
fn a_smaller_size_at_start_removes_the_oldest() {
    let host = small_host();
    let size = size(&host);
    let scratch = Scratch::new("shrink");
    let store = open(&scratch.0, 1 << 20);
    for key in 1..=6u128 {
        put(&store, &host, key, 0).unwrap();
        let age = Duration::from_secs(1000 - key as u64 * 100);
        let file = std::fs::File::open(path_of(&scratch.0, key)).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
    }
    let future = SystemTime::now() + Duration::from_secs(1 << 30);
    std::fs::File::open(path_of(&scratch.0, 2)).unwrap().set_modified(future).unwrap();
    let mut kept = open(&scratch.0, 3 * size).scan();
    kept.sort_unstable();
    assert_eq!(kept, [2, 5, 6]);
    assert_eq!(on_disk(&scratch.0), 3 * size);
}

/// Weights that no longer exist leave chunks without a reader: in time these are the oldest, and
/// are removed with their folders.
#[test]
fn other_models_files_count_and_go() {
    let host = small_host();
    let size = size(&host);
    let scratch = Scratch::new("models");
    let old = DiskStore::open(DiskConfig::new(&scratch.0, Fingerprint(0xabc), 4 * size)).unwrap();
    put(&old, &host, 1, 0).unwrap();
    put(&old, &host, 2, 0).unwrap();
    let store = open(&scratch.0, 3 * size);
    assert_eq!(store.bytes(), 2 * size);
    for key in [1, 2, 3] {
        assert_eq!(put(&store, &host, key, 0).unwrap(), [], "none of this model's");
    }
    assert_eq!(on_disk(&scratch.0), 3 * size);
    assert!(!scratch.0.join(Fingerprint(0xabc).to_string()).exists());
    assert!(matches!(get(&old, &host, 1, 0), Err(TierError::Missing { .. })));
    put(&old, &host, 1, 0).unwrap();
    get(&old, &host, 1, 0).unwrap();
}

#[test]
fn what_never_fits_is_refused_and_storing_goes_on() {
    let host = small_host();
    let size = size(&host);
    let scratch = Scratch::new("large");
    let store = open(&scratch.0, size - 1);
    assert!(matches!(put(&store, &host, 1, 0), Err(TierError::TooLarge { .. })));
    assert!(store.is_storing());
    assert_eq!((store.bytes(), on_disk(&scratch.0)), (0, 0));
}

/// If nothing can be written, storing pauses and chunks are still found. Storing continues once
/// there is room again.
#[test]
fn an_unwritable_folder_pauses_storing_and_not_fetching() {
    let host = small_host();
    let scratch = Scratch::new("unwritable");
    let store = open(&scratch.0, 1 << 20);
    put(&store, &host, 1, 0).unwrap();
    let size = store.bytes();
    let stats = |is_storing, store_failures, chunks| DiskStats { is_storing, store_failures, bytes: chunks * size };
    assert_eq!(store.stats(), stats(true, 0, 1));
    // A file in place of a folder: permissions do not stop root from writing, this does.
    let key = 0xcd << 120;
    let blocked = path_of(&scratch.0, key).parent().unwrap().to_owned();
    std::fs::write(&blocked, b"").unwrap();
    let mut now = Instant::now();
    assert!(matches!(put_at(&store, &host, key, 0, now), Err(TierError::Io { .. })));
    assert_eq!(store.stats(), stats(false, 1, 1));
    assert!(matches!(put_at(&store, &host, 3, 0, now), Err(TierError::StoringIsPaused)));
    get(&store, &host, 1, 0).unwrap();
    assert_eq!(put_at(&store, &host, 1, 0, now).unwrap(), [], "what is there is still touched");
    assert_eq!(store.stats(), stats(false, 1, 1), "which says nothing of writing");
    assert_eq!(store.scan(), [1]);
    // Tried again after the pause; the next pause is longer.
    now += FIRST_PAUSE;
    assert!(matches!(put_at(&store, &host, key, 0, now), Err(TierError::Io { .. })));
    assert_eq!(store.stats(), stats(false, 2, 1));
    now += FIRST_PAUSE;
    assert!(matches!(put_at(&store, &host, 3, 0, now), Err(TierError::StoringIsPaused)));
    std::fs::remove_file(&blocked).unwrap();
    now += FIRST_PAUSE;
    put_at(&store, &host, key, 0, now).unwrap();
    put_at(&store, &host, 3, 0, now).unwrap();
    assert_eq!(store.stats(), stats(true, 2, 3));
    get(&store, &host, key, 0).unwrap();
}
