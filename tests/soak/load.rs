//! The soak itself: 64 clients, and a quarter of the memory that their requests need.

use std::time::{Duration, Instant};

use folio_testing::Rng;

use crate::answer::Route;
use crate::bodies::refused;
use crate::client::{Load, WRITE_STALL};
use crate::memory::Samples;
use crate::record::{Records, unloaded, until};
use crate::report::Report;
use crate::server::{Metrics, Server, planned};
use crate::table::{MAX_MODEL_LEN, malformed};
use crate::tally::Tally;
use crate::{alone, setting};

const NUM_CLIENTS: u64 = 64;
/// Share of the memory that all clients' requests together would hold.
const POOL_SHARE: f64 = 0.25;
const BLOCK_TOKENS: f64 = 16.0;
/// Small enough that the store is full, and stays so, long before memory is measured.
const STORED: &str = "32";
/// Room for one body of the largest size and some small ones, so that the others have to wait.
const BODY_MEMORY: &str = "24MiB";
/// The server notices a disconnected client, and frees its memory, within this time.
const SOON: Duration = Duration::from_secs(15);

#[test]
fn answers_under_load_are_those_of_an_idle_server() {
    let _alone = alone();
    let seconds = setting("FOLIO_SOAK_SECONDS", 120);
    let seed = setting("FOLIO_SOAK_SEED", 4);
    eprintln!("soak: {seconds} s, seed {seed}");
    let records = {
        let server = unloaded();
        let records = Records::take(&server);
        assert_stalls_can_be_noticed(&records);
        eprintln!("soak: {} requests recorded, {} differ streamed", records.light.len(), records.differing.len());
        records.differing.iter().for_each(|differing| eprintln!("{differing}"));
        records
    };
    let (mut server, planned_bytes) = start(&records);
    let baseline = Baseline::take(&server, &records);
    let load = Load {
        port: server.port,
        records,
        malformed: malformed(&[Route::Chat, Route::Completions, Route::Responses, Route::Messages]),
        large: refused(),
        tally: Tally::default(),
        until: Instant::now() + Duration::from_secs(seconds),
    };
    let start = Instant::now();
    let samples = run(&load, &server, seed);
    let took = start.elapsed();
    assert!(server.ended().is_none(), "the server has ended: {:#?}", server.log());
    let idle_after = baseline.wait_for(&server);
    let bounds = [samples.bounds(), vec![samples.peak_bound(planned_bytes)]].concat();
    let report = Report::new(&load.tally, &samples, bounds, &server.metrics(), took, idle_after);
    eprintln!("{report}");
    report.keep();
    server.terminate();
    let status = server.wait(Duration::from_secs(10)).expect("an idle server ends when it is told to");
    assert!(status.success(), "{status}: {:#?}", server.log());
    report.check();
    let differing = &load.records.differing;
    assert!(differing.is_empty(), "{} streams are not what the whole is: {}", differing.len(), differing[0]);
}

/// Starts a server with a pool for a quarter of the clients' requests; returns its planned memory
/// too.
fn start(records: &Records) -> (Server, u64) {
    let len = MAX_MODEL_LEN.to_string();
    let wanted = NUM_CLIENTS as f64 * records.mean_tokens();
    let blocks = (wanted * POOL_SHARE / BLOCK_TOKENS).ceil() as u64;
    let flags = ["--max-model-len", len.as_str(), "--max-num-seqs", "64", "--max-body-memory", BODY_MEMORY];
    let bytes = (blocks * planned(&flags, "/groups/0/block_bytes")).to_string();
    let stall = WRITE_STALL.as_secs().to_string();
    eprintln!("soak: {NUM_CLIENTS} clients want {wanted:.0} tokens, the pool has {} ({blocks} blocks)", blocks * 16);
    let flags = [&flags[..], &["--kv-cache-memory-bytes", &bytes]].concat();
    let more = ["--write-stall-timeout", &stall, "--max-stored-responses", STORED];
    // On a machine with other load the queue is long, which is no fault.
    let patient = ["--queue-timeout", "600"];
    (Server::start(&[&flags[..], &more, &patient].concat()), planned(&flags, "/bytes/total"))
}

fn assert_stalls_can_be_noticed(records: &Records) {
    for record in &records.heavy {
        // More than the kernel's buffers hold, and an event larger than the server's own.
        assert!(record.wire_bytes > 400 << 10, "a heavy answer has {} bytes only", record.wire_bytes);
    }
}

fn run(load: &Load, server: &Server, seed: u64) -> Samples {
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| Samples::watch(server.process(), &load.tally));
        let health = scope.spawn(|| watch_health(load, server));
        let clients: Vec<_> =
            (0..NUM_CLIENTS).map(|index| scope.spawn(move || load.client(Rng::stream(seed, index)))).collect();
        clients.into_iter().for_each(|client| client.join().expect("a client does not panic"));
        load.tally.end();
        health.join().expect("health can be asked for");
        watch.join().expect("memory can be read")
    })
}

fn watch_health(load: &Load, server: &Server) {
    while !load.tally.is_over() && !load.tally.has_failed_too_often() {
        let start = Instant::now();
        match server.get("/health") {
            Ok((200, _)) => load.tally.health_took(start.elapsed()),
            other => load.tally.fail(format!("/health: {other:?}\n  log: {:#?}", server.log())),
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Resources of an idle server.
pub struct Baseline {
    files: usize,
    threads: u64,
}

impl Baseline {
    /// Measured after a few requests: some resources are created when they are first needed.
    fn take(server: &Server, records: &Records) -> Self {
        let warm_up = Load {
            port: server.port,
            records: Records::default(),
            malformed: Vec::new(),
            large: Vec::new(),
            tally: Tally::default(),
            until: Instant::now(),
        };
        std::thread::scope(|scope| {
            for record in records.light.iter().step_by(4) {
                scope.spawn(|| warm_up.once(record));
            }
        });
        assert!(warm_up.tally.seen().failures.is_empty(), "the server cannot even answer a few");
        Self::now(server)
    }

    pub fn now(server: &Server) -> Self {
        until(SOON, || held(&server.metrics()).is_empty()).expect("a server without requests becomes idle");
        let process = server.process();
        Self { files: process.files(), threads: process.threads() }
    }

    /// Time until nothing was left of the load.
    pub fn wait_for(&self, server: &Server) -> Duration {
        let (mut left, process) = (Vec::new(), server.process());
        let idle = until(SOON, || {
            left = held(&server.metrics());
            if process.files() > self.files {
                left.push(format!("{} files, {} before", process.files(), self.files));
            }
            left.is_empty()
        });
        let idle = idle.unwrap_or_else(|| panic!("{SOON:?} after the last request there is still: {left:#?}"));
        // A pool of threads shrinks some time after its last work, perhaps to fewer than before.
        let is_small = || process.threads() <= self.threads;
        let threads = until(SOON, is_small);
        assert!(threads.is_some(), "{} threads, {} before", process.threads(), self.threads);
        idle
    }
}

/// Everything that an idle server should not have.
fn held(metrics: &Metrics) -> Vec<String> {
    // The connection that asks is open, and in flight.
    let most = [
        ("vllm:num_requests_running", 0.0),
        ("vllm:num_requests_waiting", 0.0),
        ("vllm:kv_cache_usage_perc", 0.0),
        ("folio:kv_blocks_used", 0.0),
        ("folio:waiting_tokens", 0.0),
        ("folio:prompt_pool_queue", 0.0),
        ("folio:requests_in_flight", 1.0),
        ("folio:connections_open", 1.0),
        ("folio:stored_responses", STORED.parse().expect("a number")),
        ("folio:engine_stalled_seconds", 0.0),
        ("folio:engine_restarts_total", 0.0),
        ("folio:steps_failed_total", 0.0),
    ];
    let over = most.into_iter().filter(|&(name, most)| metrics.get(name) > most);
    over.map(|(name, _)| format!("{name} {}", metrics.get(name))).collect()
}
