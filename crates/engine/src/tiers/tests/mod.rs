//! Files that are intact, cut, flipped, foreign, shared, evicted and partly written.

mod crash;
mod damage;
mod evict;
mod share;

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use folio_model::Fingerprint;
use folio_scheduler::{DiskChunk, DiskTask, DiskTaskKind, HostSlot};

use super::{DiskConfig, DiskStore, HostGroup, HostTier, TierError};

/// A folder of its own for a test, removed at its end.
pub(super) struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        // Tests that run side by side may use the same name.
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("folio-tiers-{name}-{}-{number}", std::process::id()));
        // An earlier process of the same id may have left it.
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const MODEL: Fingerprint = Fingerprint(0x0123_4567_89ab_cdef_0000_1111_2222_3333);

pub(super) fn open(folder: &Path, max_bytes: u64) -> DiskStore {
    DiskStore::open(DiskConfig::new(folder, MODEL, max_bytes)).unwrap()
}

/// One group of eight small blocks.
pub(super) fn small_host() -> Arc<HostTier> {
    Arc::new(HostTier::new(&[HostGroup { slots: 8, block_bytes: 100 }]).unwrap())
}

fn chunk(key: u128, parent: u128) -> DiskChunk {
    DiskChunk { key, parent, salt: 5, tokens: (0..32).map(|i| i + key as u32).collect() }
}

/// Two slots of the first group.
pub(super) fn two(first: u32) -> Vec<Vec<HostSlot>> {
    vec![vec![HostSlot(first), HostSlot(first + 1)]]
}

/// The contents of a chunk's blocks in these tests.
pub(super) fn fill(host: &HostTier, slots: &[Vec<HostSlot>], key: u128) {
    for (group, slots) in slots.iter().enumerate() {
        for (block, &slot) in slots.iter().enumerate() {
            let value = |i: usize| (i * 7 + block * 31 + group * 101) as u8 ^ (key.wrapping_mul(0x9d) >> (i % 5)) as u8;
            host.slot(group, slot).iter_mut().enumerate().for_each(|(i, byte)| *byte = value(i));
        }
    }
}

pub(super) fn contents(host: &HostTier, slots: &[Vec<HostSlot>]) -> Vec<Vec<u8>> {
    let of = |(group, slots): (usize, &Vec<HostSlot>)| {
        slots.iter().map(|&slot| host.slot(group, slot).to_vec()).collect::<Vec<_>>()
    };
    slots.iter().enumerate().flat_map(of).collect()
}

/// Stores the contents that [`fill`] gives for a key; returns the chunks that were deleted.
pub(super) fn put(store: &DiskStore, host: &HostTier, key: u128, parent: u128) -> Result<Vec<u128>, TierError> {
    put_at(store, host, key, parent, Instant::now())
}

fn put_at(store: &DiskStore, host: &HostTier, key: u128, parent: u128, now: Instant) -> Result<Vec<u128>, TierError> {
    fill(host, &two(0), key);
    let mut lost = Vec::new();
    store.store(&chunk(key, parent), &two(0), host, &mut lost, now).map(|()| lost)
}

/// Loads the chunk into other slots and compares.
pub(super) fn get(store: &DiskStore, host: &HostTier, key: u128, parent: u128) -> Result<(), TierError> {
    fill(host, &two(0), key);
    host.slot(0, HostSlot(2)).fill(0xee);
    host.slot(0, HostSlot(3)).fill(0xee);
    store.fetch(&chunk(key, parent), &two(2), host)?;
    assert!(contents(host, &two(2)) == contents(host, &two(0)), "chunk {key:x} came back changed");
    Ok(())
}

pub(super) fn path_of(folder: &Path, key: u128) -> PathBuf {
    let name = format!("{key:032x}");
    folder.join(MODEL.to_string()).join(&name[..2]).join(format!("{name}.kv"))
}

pub(super) fn task(ticket: u64, kind: DiskTaskKind, key: u128, first_slot: u32) -> DiskTask {
    DiskTask { ticket, kind, chunk: chunk(key, 0), slots: two(first_slot) }
}

/// Every file below a folder, by its path from there.
fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .flat_map(|entry| match entry.file_type().unwrap().is_dir() {
            true => files(&entry.path()),
            false => vec![entry.path()],
        })
        .collect();
    found.sort();
    found
}

#[test]
fn what_is_stored_is_fetched_for_all_shapes_and_groups() {
    let shapes: [&[(usize, usize)]; 6] = [
        &[(1, 1)],
        &[(3, 64)],
        &[(8, 98_304)],
        &[(2, 1000), (2, 333)],
        &[(4, 17), (0, 50), (1, 300_000)],
        &[(1, 8), (2, 8), (3, 8), (4, 8)],
    ];
    let scratch = Scratch::new("shapes");
    let store = open(&scratch.0, 1 << 30);
    for (number, shape) in shapes.into_iter().enumerate() {
        let groups: Vec<HostGroup> =
            shape.iter().map(|&(blocks, block_bytes)| HostGroup { slots: 2 * blocks, block_bytes }).collect();
        let host = HostTier::new(&groups).unwrap();
        let slots = |first: bool| -> Vec<Vec<HostSlot>> {
            // Slots out of order, and not adjacent.
            shape
                .iter()
                .map(|&(n, _)| (0..n).rev().map(|i| HostSlot((2 * i + usize::from(first)) as u32)).collect())
                .collect()
        };
        for tokens in [0, 1, 16, 129] {
            let key = (number * 1000 + tokens) as u128 + (7 << 100);
            let chunk = DiskChunk { key, parent: 3, salt: 9, tokens: (0..tokens as u32).collect() };
            fill(&host, &slots(true), key);
            store.store(&chunk, &slots(true), &host, &mut Vec::new(), Instant::now()).unwrap();
            store.fetch(&chunk, &slots(false), &host).unwrap();
            assert!(contents(&host, &slots(true)) == contents(&host, &slots(false)), "{shape:?}, {tokens} tokens");
        }
    }
    assert_eq!(store.scan().len(), shapes.len() * 4);
}

#[test]
fn a_second_start_finds_what_the_first_stored() {
    let scratch = Scratch::new("restart");
    let host = small_host();
    let first = open(&scratch.0, 1 << 20);
    for key in 1..=9 {
        put(&first, &host, key, key - 1).unwrap();
    }
    let bytes = first.bytes();
    drop(first);
    let second = open(&scratch.0, 1 << 20);
    let mut keys = second.scan();
    keys.sort_unstable();
    assert_eq!(keys, (1..=9).collect::<Vec<u128>>());
    assert_eq!(second.bytes(), bytes);
    for key in 1..=9 {
        get(&second, &host, key, key - 1).unwrap();
    }
    assert!(matches!(get(&second, &host, 10, 9), Err(TierError::Missing { key: 10 })));
    let other = DiskStore::open(DiskConfig::new(&scratch.0, Fingerprint(9), 1 << 20)).unwrap();
    assert!(other.scan().is_empty(), "another model finds nothing");
    assert_eq!(other.bytes(), bytes, "but counts it");
    assert_eq!(other.hash_key(), second.hash_key());
}

#[test]
fn files_are_listed_by_name_and_not_read() {
    let scratch = Scratch::new("names");
    drop(open(&scratch.0, 1 << 30));
    for key in 0..2000u128 {
        let path = path_of(&scratch.0, key << 115 | key);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, b"not a chunk").unwrap();
    }
    // The files are no chunks, and still listed: listing opens no file.
    let store = open(&scratch.0, 1 << 30);
    assert_eq!((store.scan().len(), store.bytes()), (2000, 22_000));
}
