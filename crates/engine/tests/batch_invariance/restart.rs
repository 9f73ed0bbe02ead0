//! Chunks in the disk tier are found by the next process, and have the bits of computed blocks.

use std::{
    fs,
    path::PathBuf,
    sync::Mutex,
    time::{Duration, Instant},
};

use folio_device::KvFormat;
use folio_engine::{
    EngineConfig, Event, SamplingParams, SchedulerStats,
    tiers::{DiskConfig, DiskStore, TierConfig},
};
use folio_model::{Fingerprint, OpenModel};

use crate::{
    harness::{Answer, Bench, read, submit},
    take_turn, tiny,
};

const PROMPT_LEN: usize = 200;
/// Two blocks in a file.
const NUM_CHUNKS: usize = PROMPT_LEN / 16 / 2;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("folio-restart-{name}-{}", std::process::id())))
    }

    fn files(&self) -> Vec<PathBuf> {
        let mut folders = vec![self.0.clone()];
        let mut files = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("readable").path()) {
                if entry.is_dir() { folders.push(entry) } else { files.push(entry) }
            }
        }
        files
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Prompts are stored in the folder, and found there.
fn config(bench: &Bench, folder: &Folder) -> EngineConfig {
    let config = DiskConfig { chunk_blocks: 2, ..DiskConfig::new(&folder.0, Fingerprint(7), 64 << 20) };
    let store = DiskStore::open(config).expect("a sound folder");
    let config = bench.with_host(EngineConfig { prefix_caching: true, ..bench.config() });
    EngineConfig { tiers: TierConfig { disk: Some(store), ..config.tiers }, ..config }
}

fn params() -> SamplingParams {
    let (temperature, logprobs) = (0.0, Some(4));
    SamplingParams { max_tokens: 8, temperature, logprobs, ignore_eos: true, ..SamplingParams::default() }
}

/// A new process as far as the engine can tell: new memory, and no state but the folder.
fn run(model: &OpenModel, format: KvFormat, folder: &Folder) -> (Answer, SchedulerStats) {
    let bench = Bench::in_format(model, 1, format);
    let config = config(&bench, folder);
    let store = config.tiers.disk.clone().expect("just opened");
    let engine = bench.start(config);
    let answer = read(submit(&engine, bench.prompt(3, PROMPT_LEN), params()));
    let start = Instant::now();
    while store.scan().len() < NUM_CHUNKS {
        assert!(start.elapsed() < Duration::from_secs(60), "{} of {NUM_CHUNKS} chunks stored", store.scan().len());
        std::thread::yield_now();
    }
    let stats = engine.stats().scheduler;
    engine.shutdown();
    (answer, stats)
}

fn check(name: &str, model: &OpenModel, format: KvFormat) {
    let _turn = take_turn();
    let folder = Folder::new(name);
    let (cold, stats) = run(model, format, &folder);
    assert_eq!((cold.cached_tokens, stats.disk_fetched), (0, 0), "{name}");
    let (warm, stats) = run(model, format, &folder);
    assert_eq!(warm.cached_tokens, NUM_CHUNKS * 32, "{name}");
    assert_eq!(stats.disk_failed, 0, "{name}");
    assert!(stats.disk_fetched > 0 && stats.host_hit_tokens > 0, "{name}: {stats:?}");
    assert!(Answer { cached_tokens: 0, ..warm } == cold, "{name}: blocks from the disk change the answer");
    // Damaged files cost the prefix hit and nothing else.
    for file in folder.files() {
        let mut bytes = fs::read(&file).expect("readable");
        if bytes.len() > 1000 {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(&file, bytes).expect("writable");
        }
    }
    let (again, stats) = run(model, format, &folder);
    assert!(stats.disk_failed > 0 && stats.disk_fetched == 0, "{name}: {stats:?}");
    assert!(again == cold, "{name}: damaged files change the answer");
}

/// A chunk can be loaded whatever happens to the step that runs meanwhile.
#[test]
fn a_failed_step_loses_nothing_that_is_on_disk() {
    static HELD: Mutex<()> = Mutex::new(());
    let _turn = take_turn();
    let model = tiny::experts();
    let folder = Folder::new("failed-step");
    let (cold, _) = run(&model, KvFormat::BF16, &folder);
    let bench = Bench::new(&model, 1);
    let held = HELD.lock().expect("one test");
    // The third step is planned when the second has ended, and with it the load for the request
    // that has arrived by then.
    let engine = bench.start_tampered(
        EngineConfig { overlap: false, ..config(&bench, &folder) },
        Some(|step, _| match step {
            2 => drop(HELD.lock()),
            3 => panic!("planted panic"),
            _ => {}
        }),
    );
    let mut beside = submit(&engine, bench.prompt(8, 20), params());
    assert!(matches!(beside.recv(), Some(Event::Token { .. })));
    let stream = submit(&engine, bench.prompt(3, PROMPT_LEN), params());
    drop(held);
    let warm = read(stream);
    let stats = engine.stats();
    assert_eq!((stats.steps_failed, stats.scheduler.disk_failed), (1, 0));
    assert!(stats.scheduler.disk_fetched > 0, "{stats:?}");
    assert!(Answer { cached_tokens: 0, ..warm } == cold, "blocks from the disk change the answer");
    engine.shutdown();
}

#[test]
fn a_prompt_is_found_on_disk_after_a_restart() {
    check("experts", &tiny::experts(), KvFormat::BF16);
    for format in [KvFormat::BF16, KvFormat::Int8, KvFormat::Int4] {
        check(&format!("alternating-{}", format.name()), &tiny::alternating(), format);
    }
}
