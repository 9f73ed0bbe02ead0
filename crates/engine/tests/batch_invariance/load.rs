//! A model under load: a quarter of the memory that the requests could use, prompts with common
//! prefixes, and clients that abort. Every answer is that of the request alone.

use std::{path::PathBuf, time::Instant};

use folio_engine::{Engine, EngineConfig, EngineStats, Event, RequestOptions, RequestStream, SamplingParams};

use folio_model::OpenModel;

use crate::{
    harness::{Bench, MAX_SEQS},
    take_turn, tiny,
};

/// Each prompt is sent with both salts: its answer is the same, and the two share nothing.
const NUM_DIFFERENT: usize = 100;
const SALTS: [u64; 2] = [1, 2];
const NUM_REQUESTS: usize = SALTS.len() * NUM_DIFFERENT;

#[derive(Clone)]
struct Request {
    prompt: Vec<u32>,
    params: SamplingParams,
    cache_salt: u64,
    /// Number of tokens after which its client aborts.
    leaves_after: Option<usize>,
}

impl Request {
    fn blocks(&self) -> usize {
        (self.prompt.len() + self.params.max_tokens).div_ceil(16)
    }

    fn submit(&self, engine: &Engine) -> RequestStream {
        let options = RequestOptions { cache_salt: self.cache_salt, ..RequestOptions::default() };
        let request = engine.request(self.prompt.clone(), self.params.clone()).and_then(|r| r.with_options(options));
        engine.submit(request.expect("valid")).expect("room")
    }
}

/// Three in ten share a prefix and one in five is aborted; long and short, greedy or sampled.
fn requests(bench: &Bench) -> Vec<Request> {
    let request = |i: usize| {
        let mut prompt = Vec::new();
        if i % 10 < 3 {
            prompt = bench.prompt(500 + (i / 10 % 4) as u64, 32);
        }
        // Prompts that nearly fill their block: all of them soon need two more at once, and
        // admission reserves one.
        let is_long = i < NUM_DIFFERENT / 4;
        let (len, max_tokens) = if is_long { (13 + i % 3, 34 + i % 3) } else { (3 + i % 3, 6) };
        prompt.extend(bench.prompt(i as u64, len));
        let temperature = if i.is_multiple_of(4) { 0.8 } else { 0.0 };
        let params =
            SamplingParams { max_tokens, temperature, seed: i as u64, ignore_eos: true, ..SamplingParams::default() };
        let leaves_after = (i % 5 == 4).then_some(i * 7 % (max_tokens - 1));
        Request { prompt, params, cache_salt: SALTS[0], leaves_after }
    };
    (0..NUM_DIFFERENT).map(request).collect()
}

/// The answer until its client aborts, and the tokens from the prefix cache.
fn read(mut stream: RequestStream, leaves_after: Option<usize>) -> (Vec<u32>, usize) {
    let (mut tokens, mut cached) = (Vec::new(), 0);
    while leaves_after.is_none_or(|most| tokens.len() < most) {
        match stream.recv() {
            Some(Event::Token { token, .. }) => tokens.push(token),
            Some(Event::Finished { usage, .. }) => cached = usage.cached_tokens,
            Some(Event::PromptLogprobs(_) | Event::StopToken { .. } | Event::Embedding(_)) => {}
            None => break,
        }
    }
    (tokens, cached)
}

/// The published weights if they are available, else the built-in ones.
fn trained_model() -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let published = root.join("../shared/models/folio-rust-42m");
    if published.exists() { published } else { root.join("models/folio-rust-42m.gguf") }
}

#[test]
fn two_hundred_requests_to_the_trained_model() {
    check(&folio_model::open(&trained_model()).expect("a sound model"));
}

#[test]
fn two_hundred_requests_to_a_model_with_two_block_tables() {
    check(&tiny::alternating());
}

fn check(model: &OpenModel) {
    let _turn = take_turn();
    // Two independent benches of one thread each, so that both halves of the work run side by side.
    let benches = [Bench::new(model, 1), Bench::new(model, 1)];
    let requests = requests(&benches[0]);
    let start = Instant::now();
    let expected = alone(&benches, &requests);
    let expected = SALTS.map(|_| expected.as_slice()).concat();
    let salted = |cache_salt| requests.iter().map(move |request| Request { cache_salt, ..request.clone() });
    let requests: Vec<Request> = SALTS.into_iter().flat_map(salted).collect();
    println!("alone: {:.1} s", start.elapsed().as_secs_f64());
    std::thread::scope(|scope| {
        for (bench, host) in benches.iter().zip([false, true]) {
            let (requests, expected) = (&requests, &expected);
            scope.spawn(move || check_loaded(bench, host, requests, expected));
        }
    });
}

/// Every request alone, one after the other, every second one on the same bench.
fn alone(benches: &[Bench; 2], requests: &[Request]) -> Vec<Vec<u32>> {
    let half = |bench: &Bench, first: usize| -> Vec<Vec<u32>> {
        let engine = bench.start(bench.config());
        let run = |request: &Request| read(request.submit(&engine), request.leaves_after).0;
        let answers = requests.iter().skip(first).step_by(2).map(run).collect();
        engine.shutdown();
        answers
    };
    let (even, odd) = std::thread::scope(|scope| {
        let odd = scope.spawn(|| half(&benches[1], 1));
        (half(&benches[0], 0), odd.join().expect("it runs"))
    });
    even.into_iter().zip(odd).flat_map(|(even, odd)| [even, odd]).collect()
}

/// All at once, in a quarter of the blocks that the running requests could fill.
fn check_loaded(bench: &Bench, host: bool, requests: &[Request], expected: &[Vec<u32>]) {
    let mut demands: Vec<usize> = requests.iter().map(Request::blocks).collect();
    demands.sort_unstable_by(|a, b| b.cmp(a));
    let peak: usize = demands[..MAX_SEQS].iter().sum();
    let start = Instant::now();
    let config = EngineConfig { groups: bench.groups(peak / 4), prefix_caching: true, ..bench.config() };
    let engine = bench.start(if host { bench.with_host(config) } else { config });
    let streams: Vec<_> = requests.iter().map(|request| request.submit(&engine)).collect();
    // All clients read at once, so that some abort while the others run.
    let found: Vec<(Vec<u32>, usize)> = std::thread::scope(|scope| {
        let reader = |(stream, request): (RequestStream, &Request)| {
            let leaves_after = request.leaves_after;
            scope.spawn(move || read(stream, leaves_after))
        };
        let readers: Vec<_> = streams.into_iter().zip(requests).map(reader).collect();
        readers.into_iter().map(|reader| reader.join().expect("it reads")).collect()
    });
    for (number, ((found, _), expected)) in found.iter().zip(expected).enumerate() {
        assert!(found == expected, "request {number}: another answer than alone");
    }
    let num_left = requests.iter().filter(|request| request.leaves_after.is_some()).count();
    let EngineStats { scheduler: stats, tokens_sampled, .. } = wait_until_idle(&engine);
    let tokens_wanted: usize = requests.iter().map(|request| request.params.max_tokens).sum();
    let hits: usize = found.iter().map(|(_, cached)| cached).sum();
    println!(
        "{} blocks for a peak of {peak}, host tier {host}: {} preemptions, {hits} tokens hit ({} of all hits from the \
         host), {num_left} of {NUM_REQUESTS} left, {tokens_sampled} of {tokens_wanted} tokens, {} steps, {:.1} s",
        peak / 4,
        stats.preemptions,
        stats.host_hit_tokens,
        stats.steps,
        start.elapsed().as_secs_f64()
    );
    assert!(stats.preemptions > 0 && hits > 0 && num_left * 5 == NUM_REQUESTS);
    assert!(tokens_sampled < tokens_wanted as u64, "nobody was cut short");
    assert_eq!(stats.host_hit_tokens > 0, host);
    engine.shutdown();
}

/// Waits until every block is free.
fn wait_until_idle(engine: &Engine) -> EngineStats {
    let start = Instant::now();
    loop {
        let stats = engine.stats();
        let scheduler = &stats.scheduler;
        let is_idle = scheduler.running + scheduler.waiting == 0 && stats.samples_ended == NUM_REQUESTS as u64;
        if is_idle && scheduler.groups.iter().all(|group| group.blocks_used == 0) {
            return stats;
        }
        assert!(start.elapsed().as_secs() < 60, "never idle: {scheduler:?}");
        std::thread::yield_now();
    }
}
