//! A process that stores chunks is killed at twenty arbitrary moments. The remaining files are
//! intact.
//!
//! The process is this test binary again, which its environment makes the writer.

use std::{
    cell::Cell,
    collections::HashSet,
    io::{BufRead, BufReader, Read, Write},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use super::*;

const FOLDER: &str = "FOLIO_TEST_CRASH_FOLDER";
const SEED: &str = "FOLIO_TEST_CRASH_SEED";
/// The test below that acts as the writer.
const WRITER: &str = "tiers::tests::crash::writes_until_it_is_killed";
/// Less than the chunks of a round, so that files are deleted too.
const MAX_BYTES: u64 = 60 << 20;

/// Large enough that a kill mostly interrupts a write.
fn large_host() -> HostTier {
    HostTier::new(&[HostGroup { slots: 4, block_bytes: 2_500_000 }, HostGroup { slots: 4, block_bytes: 70_000 }])
        .unwrap()
}

fn slots(first: u32) -> Vec<Vec<HostSlot>> {
    vec![vec![HostSlot(first), HostSlot(first + 1)]; 2]
}

/// Cheaper than the other tests' contents, so that the time goes into writing.
fn imprint(host: &HostTier, first: u32, key: u128) {
    for (group, slots) in slots(first).into_iter().enumerate() {
        for (block, slot) in slots.into_iter().enumerate() {
            host.slot(group, slot).fill((key as usize * 5 + group * 2 + block) as u8);
        }
    }
}

fn crash_chunk(key: u128) -> DiskChunk {
    DiskChunk { key, parent: key >> 1, salt: 1, tokens: vec![key as u32; 32] }
}

#[test]
fn writes_until_it_is_killed() {
    let (Some(folder), Ok(seed)) = (std::env::var_os(FOLDER), std::env::var(SEED)) else { return };
    let store = open(Path::new(&folder), MAX_BYTES);
    let host = large_host();
    let seed: u128 = seed.parse().unwrap();
    for number in 0.. {
        // Some keys return, over several processes.
        let key = 1 + (number * 7 + seed * 3) % 61;
        imprint(&host, 0, key);
        // A store of an existing chunk would only note its use.
        if number % 4 != 3 {
            let _ = std::fs::remove_file(path_of(Path::new(&folder), key));
        }
        println!("storing {key}");
        std::io::stdout().flush().unwrap();
        store.store(&crash_chunk(key), &slots(0), &host, &mut Vec::new(), Instant::now()).unwrap();
    }
}

/// Runs the writer until it has begun some stores, and a little longer.
fn write_and_kill(folder: &Path, seed: u64) {
    let mut writer = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", WRITER, "--nocapture", "--test-threads=1"])
        .env(FOLDER, folder)
        .env(SEED, seed.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Open to the end: a writer that cannot print would stop by itself.
    let mut out = BufReader::new(writer.stdout.take().unwrap());
    let stores = 1 + seed as usize % 7;
    let lines = out.by_ref().lines();
    let begun = lines.map_while(Result::ok).filter(|line| line.contains("storing")).take(stores).count();
    assert_eq!(begun, stores, "the writer ended by itself");
    // Some time in this store or the next, which take a millisecond or two.
    let moment = Instant::now() + Duration::from_micros(seed * 7919 % 23 * 150);
    while Instant::now() < moment {
        std::hint::spin_loop();
    }
    writer.kill().unwrap();
    writer.wait().unwrap();
}

#[test]
fn killed_at_any_moment_nothing_wrong_is_found() {
    let scratch = Scratch::new("crash");
    let host = large_host();
    let (half_written, mut verified) = (Cell::new(0), HashSet::new());
    // Twenty kills, and more until one of them has interrupted a write.
    for seed in (0..200).take_while(|&seed| seed < 20 || half_written.get() == 0) {
        write_and_kill(&scratch.0, seed);
        let temporary = files(&scratch.0).into_iter().filter(|file| file.extension().is_some_and(|e| e == "tmp"));
        half_written.update(|sum| sum + temporary.count());
        let store = open(&scratch.0, MAX_BYTES);
        let left = files(&scratch.0);
        assert!(left.iter().all(|file| file.extension().is_none_or(|e| e == "kv")), "{left:?}");
        assert!(store.bytes() <= MAX_BYTES);
        for key in store.scan() {
            host.slot(0, HostSlot(2)).fill(0xee);
            // Only a crash of the whole system could leave a damaged file.
            store.fetch(&crash_chunk(key), &slots(2), &host).unwrap();
            imprint(&host, 0, key);
            assert!(contents(&host, &slots(2)) == contents(&host, &slots(0)), "chunk {key}");
            verified.insert(key);
        }
    }
    println!("{} files were half written, {} chunks found again", half_written.get(), verified.len());
    assert!(half_written.get() > 0 && verified.len() > 5, "the kills came too late, or too soon");
}
