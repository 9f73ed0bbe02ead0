//! Files that were changed, or never were what they should be.

use super::*;

/// A store with one chunk, and its file's bytes.
fn one(name: &str) -> (Scratch, DiskStore, Arc<HostTier>, PathBuf, Vec<u8>) {
    let scratch = Scratch::new(name);
    let (store, host) = (open(&scratch.0, 1 << 20), small_host());
    put(&store, &host, 77, 3).unwrap();
    let path = path_of(&scratch.0, 77);
    let bytes = std::fs::read(&path).unwrap();
    (scratch, store, host, path, bytes)
}

fn assert_damaged(store: &DiskStore, host: &HostTier, path: &Path, what: &str) {
    match get(store, host, 77, 3) {
        Err(TierError::Damaged { .. }) => {}
        other => panic!("{what}: {other:?}"),
    }
    assert!(!path.exists(), "{what}: the file is removed");
    assert!(store.scan().is_empty(), "{what}: the chunk is forgotten");
}

#[test]
fn every_truncation_is_refused() {
    let (_scratch, store, host, path, bytes) = one("cut");
    for len in 0..bytes.len() {
        std::fs::write(&path, &bytes[..len]).unwrap();
        assert_damaged(&store, &host, &path, &format!("cut to {len}"));
    }
    std::fs::write(&path, [&bytes[..], b"x"].concat()).unwrap();
    assert_damaged(&store, &host, &path, "one byte more");
    std::fs::write(&path, &bytes).unwrap();
    get(&store, &host, 77, 3).unwrap();
}

#[test]
fn every_flipped_byte_is_refused() {
    let (_scratch, store, host, path, bytes) = one("flip");
    for at in 0..bytes.len() {
        let mut bad = bytes.clone();
        bad[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bad).unwrap();
        assert_damaged(&store, &host, &path, &format!("byte {at}"));
    }
    for (from, to) in [(0, 64), (64, 200), (200, bytes.len())] {
        let mut bad = bytes.clone();
        bad[from..to].fill(0);
        std::fs::write(&path, &bad).unwrap();
        assert_damaged(&store, &host, &path, &format!("zeros from {from} to {to}"));
    }
    let mut swapped = bytes.clone();
    let len = swapped.len();
    let (head, tail) = swapped[len - 216..len - 16].split_at_mut(100);
    head.swap_with_slice(tail);
    std::fs::write(&path, &swapped).unwrap();
    assert_damaged(&store, &host, &path, "two blocks that changed places");
}

/// An intact file with other contents under this chunk's name is refused and left alone; a store
/// then replaces it.
#[test]
fn foreign_files_are_refused_and_left_alone() {
    type Change = fn(&mut DiskConfig, &mut DiskChunk, &mut Vec<Vec<HostSlot>>);
    let cases: [(&str, Change); 8] = [
        ("fingerprint", |config, _, _| config.fingerprint = Fingerprint(1)),
        ("adapter length", |config, _, _| config.adapter = "lora".to_owned()),
        ("key", |_, chunk, _| chunk.key += 1 << 40),
        ("salt", |_, chunk, _| chunk.salt += 1),
        ("parent", |_, chunk, _| chunk.parent = 4),
        ("tokens", |_, chunk, _| chunk.tokens[31] += 1),
        ("number of tokens", |_, chunk, _| chunk.tokens.truncate(31)),
        ("shape", |_, _, slots| slots[0].truncate(1)),
    ];
    for (field, change) in cases {
        let (scratch, store, host, path, bytes) = one("foreign");
        let elsewhere = Scratch::new("foreign-elsewhere");
        let mut config = DiskConfig::new(&elsewhere.0, MODEL, 1 << 20);
        let (mut other, mut slots) = (chunk(77, 3), two(0));
        change(&mut config, &mut other, &mut slots);
        let writer = DiskStore::open(config).unwrap();
        writer.store(&other, &slots, &host, &mut Vec::new(), Instant::now()).unwrap();
        let written = files(&elsewhere.0).into_iter().find(|file| file.extension().is_some()).unwrap();
        std::fs::copy(written, &path).unwrap();
        let foreign = std::fs::read(&path).unwrap();
        assert!(foreign != bytes, "{field}: the change shows");
        match get(&store, &host, 77, 3) {
            Err(TierError::Foreign { field: found, .. }) => assert_eq!(found, field),
            other => panic!("{field}: {other:?}"),
        }
        assert!(std::fs::read(&path).unwrap() == foreign, "{field}: the file is left alone");
        assert!(store.scan().is_empty(), "{field}: the chunk is forgotten");
        put(&store, &host, 77, 3).unwrap();
        get(&store, &host, 77, 3).unwrap();
        drop(scratch);
    }
}

#[test]
fn an_adapter_counts() {
    let scratch = Scratch::new("adapter");
    let host = small_host();
    let named = |adapter: &str| {
        let config = DiskConfig::new(&scratch.0, MODEL, 1 << 20);
        DiskStore::open(DiskConfig { adapter: adapter.to_owned(), ..config }).unwrap()
    };
    put(&named("one"), &host, 77, 3).unwrap();
    get(&named("one"), &host, 77, 3).unwrap();
    match get(&named("two"), &host, 77, 3) {
        Err(TierError::Foreign { field: "adapter", .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[cfg(unix)]
#[test]
fn links_folders_and_odd_names_are_not_looked_at() {
    let (scratch, store, host, path, bytes) = one("odd");
    let folder = path.parent().unwrap();
    let secret = scratch.0.join("elsewhere");
    std::fs::write(&secret, &bytes).unwrap();
    for name in ["x.kv", "0.kv", ".kv", "README", "0000000000000000000000000000004D.kv", "1.2.tmp", "a.b.c.d.tmp"] {
        std::fs::write(folder.join(name), b"?").unwrap();
    }
    std::fs::write(scratch.0.join(MODEL.to_string()).join("00.kv"), b"?").unwrap();
    std::os::unix::fs::symlink(&secret, path_of(&scratch.0, 78)).unwrap();
    std::os::unix::fs::symlink(folder, scratch.0.join(MODEL.to_string()).join("0a")).unwrap();
    std::fs::create_dir(path_of(&scratch.0, 79)).unwrap();
    let before = files(&scratch.0);
    assert_eq!(open(&scratch.0, 1 << 20).scan(), [77]);
    for key in [78, 79] {
        match (get(&store, &host, key, 3), put(&store, &host, key, 3)) {
            (Err(TierError::Foreign { .. }), Err(TierError::Foreign { .. })) => {}
            other => panic!("{key}: {other:?}"),
        }
    }
    assert_eq!(files(&scratch.0), before);
    assert!(store.is_storing());
    get(&store, &host, 77, 3).unwrap();
}

#[cfg(unix)]
#[test]
fn everything_is_for_the_owner_alone() {
    use std::os::unix::fs::PermissionsExt;
    let (scratch, _store, _host, path, _) = one("modes");
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(&scratch.0.join("hash-key")), 0o600);
    path.ancestors().skip(1).take(3).for_each(|folder| assert_eq!(mode(folder), 0o700, "{folder:?}"));
}

#[test]
fn a_damaged_hash_key_is_named() {
    let scratch = Scratch::new("hash-key");
    let key = open(&scratch.0, 1).hash_key();
    assert_ne!(key, [0, 0]);
    assert_eq!(open(&scratch.0, 1).hash_key(), key);
    let path = scratch.0.join("hash-key");
    for text in [&b""[..], b"0123", b"zz", &[0xff; 32], &[b'a'; 64]] {
        std::fs::write(&path, text).unwrap();
        let error = DiskStore::open(DiskConfig::new(&scratch.0, MODEL, 1)).unwrap_err();
        assert!(matches!(error, TierError::BadHashKey { .. }), "{error}");
    }
    std::fs::remove_file(&path).unwrap();
    assert_ne!(open(&scratch.0, 1).hash_key(), key);
}
