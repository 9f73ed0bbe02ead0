//! Several stores on one folder.

use std::time::{Duration, SystemTime};

use super::{super::folder::Folder, *};

#[test]
fn two_that_start_at_once_agree_on_the_hash_key() {
    for round in 0..20 {
        let scratch = Scratch::new(&format!("agree-{round}"));
        let keys: Vec<[u64; 2]> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| open(&scratch.0, 1 << 20).hash_key())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(keys.iter().all(|key| key == &keys[0]), "{keys:?}");
        assert_eq!(files(&scratch.0), [scratch.0.join("hash-key")]);
    }
}

#[test]
fn two_stores_see_each_others_files() {
    let scratch = Scratch::new("two");
    let host = small_host();
    let (one, two) = (open(&scratch.0, 1 << 20), open(&scratch.0, 1 << 20));
    put(&one, &host, 1, 0).unwrap();
    get(&two, &host, 1, 0).unwrap();
    assert_eq!(two.scan(), [1]);
    put(&two, &host, 1, 0).unwrap();
    assert_eq!(two.bytes(), one.bytes());
    // A chunk that one store deletes is missing for the other.
    std::fs::remove_file(path_of(&scratch.0, 1)).unwrap();
    assert!(matches!(get(&two, &host, 1, 0), Err(TierError::Missing { .. })));
    assert!(two.scan().is_empty());
    put(&one, &host, 1, 0).unwrap();
    get(&one, &host, 1, 0).unwrap();
}

/// Many threads store, fetch and evict the same few keys through stores of their own: a chunk that
/// is found is always right.
#[test]
fn stores_of_one_key_at_once_leave_one_whole_file() {
    let scratch = Scratch::new("at-once");
    let shared = open(&scratch.0, 1 << 20);
    std::thread::scope(|scope| {
        for thread in 0..4u128 {
            let (scratch, shared) = (&scratch, shared.clone());
            scope.spawn(move || {
                let host = small_host();
                let store = if thread % 2 == 0 { shared } else { open(&scratch.0, 3000) };
                for round in 0..100 {
                    let key = 1 + (round + thread) % 5;
                    // Both may find that another thread has just deleted it.
                    match put(&store, &host, key, 0) {
                        Ok(_) | Err(TierError::Io { action: "rename", .. }) => {}
                        other => panic!("{other:?}"),
                    }
                    match get(&store, &host, key, 0) {
                        Ok(()) | Err(TierError::Missing { .. }) => {}
                        other => panic!("{other:?}"),
                    }
                }
                assert!(store.is_storing());
            });
        }
    });
    assert!(files(&scratch.0).iter().all(|file| file.extension().is_none_or(|ending| ending != "tmp")));
    let host = small_host();
    let after = open(&scratch.0, 1 << 20);
    for key in after.scan() {
        get(&after, &host, key, 0).unwrap();
    }
}

#[test]
fn temporary_files_of_the_dead_go_and_of_the_living_stay() {
    let scratch = Scratch::new("temporary");
    let host = small_host();
    let store = open(&scratch.0, 1 << 20);
    put(&store, &host, 1, 0).unwrap();
    let folder = path_of(&scratch.0, 1).parent().unwrap().to_owned();
    let (file, living) = Folder::open(&scratch.0).unwrap().temporary_for(&path_of(&scratch.0, 1)).unwrap();
    let living_name = files(&folder).into_iter().find(|file| file.extension().unwrap() == "tmp").unwrap();
    let me = std::process::id();
    let nonce = "0123456789abcdef";
    let names = [
        format!("{me}.{nonce}.{nonce}.0.tmp"),
        format!("{}.{nonce}.{nonce}.0.tmp", u32::MAX),
        "1.2.tmp".to_owned(),
        format!("{me}.{nonce}.tmp"),
        "mine.tmp".to_owned(),
    ];
    for name in &names {
        std::fs::write(folder.join(name), b"half").unwrap();
        std::fs::write(scratch.0.join(name), b"half").unwrap();
    }
    // The file of a process that is alive, but too old to be its file.
    let old = folder.join(format!("1.{nonce}.{nonce}.7.tmp"));
    let ago = SystemTime::now() - Duration::from_secs(7200);
    std::fs::File::create(&old).unwrap().set_modified(ago).unwrap();
    drop(open(&scratch.0, 1 << 20));
    assert!(living_name.exists(), "a file that this process is writing");
    assert!(!old.exists());
    for (number, name) in names.iter().enumerate() {
        // The first two are named as temporary files are; if processes cannot be looked up, only
        // age counts.
        let is_left = number >= 2 || (number == 1 && !Path::new("/proc/self").exists());
        assert_eq!(folder.join(name).exists(), is_left, "{name}");
        assert_eq!(scratch.0.join(name).exists(), is_left, "{name}");
    }
    drop(file);
    drop(living);
    assert!(!living_name.exists());
}
