//! SIGTERM at a random moment: answers end complete or report that they do not, new requests are
//! refused, and the process ends in time.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use folio_testing::Rng;
use folio_testing::http::is_break;
use serde_json::json;

use crate::answer::NoAnswer;
use crate::http::Connection;
use crate::record::{Outcome, exchange, outcome};
use crate::server::{Server, get};
use crate::table::{Ask, Kind, bases};
use crate::{alone, setting};

/// The server may take this much longer than its given time.
const GRACE: Duration = Duration::from_secs(2);
/// A request sent this long before the signal has been accepted, at any load of the machine.
const ACCEPTED: Duration = Duration::from_millis(500);
/// The signal comes within this time of the first connection.
const SPAN: f64 = 1.5;

#[test]
fn a_signal_at_any_moment_truncates_nothing_silently() {
    let _alone = alone();
    let rounds = setting("FOLIO_SIGTERM_ROUNDS", 6);
    let seed = setting("FOLIO_SIGTERM_SEED", 7);
    eprintln!("sigterm: {rounds} rounds, seed {seed}");
    let mut totals = Totals::default();
    for round in 0..rounds {
        let plan = Plan::draw(round, &mut Rng::stream(seed, round));
        let seen = run(&plan, Rng::stream(seed, 1000 + round));
        assert!(seen.wrong.is_empty(), "round {round}: {plan:?}\n{:#?}", seen.wrong);
        totals.add(&seen);
    }
    eprintln!("sigterm: {totals:?}");
}

#[derive(Debug)]
struct Plan {
    drain: Duration,
    num_clients: usize,
    /// From the first connection to the signal.
    after: Duration,
    /// From the first signal to a second one.
    again_after: Option<Duration>,
}

impl Plan {
    fn draw(round: u64, rng: &mut Rng) -> Self {
        let drain = Duration::from_secs(if round.is_multiple_of(2) { 1 } else { 30 });
        Self {
            drain,
            num_clients: 8 + rng.below(9),
            after: Duration::from_secs_f64(rng.unit() * SPAN),
            again_after: (round % 5 == 3).then(|| Duration::from_millis(rng.below(300) as u64)),
        }
    }
}

/// Ends of the requests.
#[derive(Debug, Default)]
struct Totals {
    complete: usize,
    error_events: usize,
    refused: usize,
    /// Too late to be accepted.
    unanswered: usize,
    newcomers: usize,
    /// Longest time from the signal to the end of the process, beyond the requests' given time.
    slowest_exit: Duration,
    wrong: Vec<String>,
}

impl Totals {
    fn add(&mut self, other: &Self) {
        self.complete += other.complete;
        self.error_events += other.error_events;
        self.refused += other.refused;
        self.unanswered += other.unanswered;
        self.newcomers += other.newcomers;
        self.slowest_exit = self.slowest_exit.max(other.slowest_exit);
    }
}

fn run(plan: &Plan, rng: Rng) -> Totals {
    let drain = plan.drain.as_secs().to_string();
    let mut server = Server::start(&["--max-model-len", "512", "--kv-cache-mib", "16", "--drain-timeout", &drain]);
    let seen = Arc::new(Mutex::new(Totals::default()));
    let (signalled, ended) = (Mutex::new(None), AtomicBool::new(false));
    let port = server.port;
    std::thread::scope(|scope| {
        let start = Instant::now();
        let clients: Vec<_> = (0..plan.num_clients)
            .map(|index| {
                let (seen, signalled, rng) = (&seen, &signalled, Rng::stream(rng.clone().word(), index as u64));
                scope.spawn(move || client(port, plan, rng, signalled, seen))
            })
            .collect();
        std::thread::sleep(plan.after.saturating_sub(start.elapsed()));
        *signalled.lock().expect("no panic") = Some(Instant::now());
        server.terminate();
        let sent = Instant::now();
        let (over, told) = (&ended, &seen);
        let newcomers = scope.spawn(move || newcomers(port, sent, over, told));
        let within = match plan.again_after {
            None => plan.drain + GRACE,
            Some(again) => {
                if server.wait(again).is_none() {
                    server.terminate();
                }
                again + GRACE
            }
        };
        let status = server.wait(within.saturating_sub(sent.elapsed()));
        let took = sent.elapsed();
        ended.store(true, Ordering::Relaxed);
        let mut told = Vec::new();
        match status {
            None => told.push(format!("it still runs {took:?} after the signal: {:#?}", server.log())),
            Some(status) if !status.success() && plan.again_after.is_none() => {
                told.push(format!("it ended with {status}"))
            }
            Some(_) => {}
        }
        if status.is_none() {
            // No thread waits for it any more.
            drop(server);
        }
        clients.into_iter().for_each(|client| client.join().expect("a client does not panic"));
        newcomers.join().expect("newcomers do not panic");
        let mut seen = seen.lock().expect("no panic");
        seen.wrong.append(&mut told);
        seen.slowest_exit = took.saturating_sub(if plan.again_after.is_some() { Duration::ZERO } else { plan.drain });
    });
    Arc::into_inner(seen).expect("all threads have ended").into_inner().expect("no panic")
}

/// Sends a request that takes a second or so, a little after the others.
fn client(port: u16, plan: &Plan, mut rng: Rng, signalled: &Mutex<Option<Instant>>, seen: &Mutex<Totals>) {
    let ask = long_ask(&mut rng);
    std::thread::sleep(Duration::from_secs_f64(rng.unit() * SPAN / 2.0));
    let opened = Connection::open(port);
    let opened_at = Instant::now();
    let ended = match opened {
        Ok(mut connection) => exchange(&mut connection, &ask),
        Err(error) => Outcome::Error(error),
    };
    let signal = *signalled.lock().expect("no panic");
    let came_early = signal.is_none_or(|signal| opened_at + ACCEPTED < signal);
    let was_cut_short = plan.again_after.is_some() && signal.is_some();
    let mut seen = seen.lock().expect("no panic");
    match ended {
        Outcome::Answer(_) => seen.complete += 1,
        Outcome::No(NoAnswer::ErrorEvent(_)) => seen.error_events += 1,
        Outcome::Refused(503, _) if signal.is_some() => seen.refused += 1,
        Outcome::Error(error) if !came_early && is_refusal(&error) => seen.unanswered += 1,
        // After a second signal nothing more is guaranteed.
        Outcome::Error(_) | Outcome::Broken { .. } if was_cut_short => seen.unanswered += 1,
        other => {
            let when = signal.map(|signal| opened_at.saturating_duration_since(signal));
            seen.wrong.push(format!(
                "{} {}: connected {when:?} after the signal, ended: {}",
                ask.route.path(),
                ask.body,
                other.describe()
            ));
        }
    }
}

/// Greedy and never stopped by the model itself, so that its duration is controlled.
fn long_ask(rng: &mut Rng) -> Ask {
    let plain: Vec<Ask> = bases().into_iter().filter(|ask| matches!(ask.kind, Kind::Plain | Kind::Many)).collect();
    let mut ask = rng.pick(&plain).clone();
    let tokens = 8 + rng.below(380);
    match ask.route {
        crate::answer::Route::Responses => ask.body["max_output_tokens"] = json!(tokens),
        crate::answer::Route::Messages => ask.body["max_tokens"] = json!(tokens),
        _ => {
            ask.body["max_tokens"] = json!(tokens);
            ask.body["ignore_eos"] = json!(true);
            // Enough of them take longer than a second, on any machine.
            ask.body["n"] = json!(1 + rng.below(4));
        }
    }
    if rng.below(4) > 0 { ask.streamed() } else { ask }
}

/// No new request is served from the signal on.
fn newcomers(port: u16, sent: Instant, ended: &AtomicBool, seen: &Mutex<Totals>) {
    let mut ask = bases().swap_remove(3);
    ask.body["max_tokens"] = json!(1);
    while !ended.load(Ordering::Relaxed) {
        let began = sent.elapsed();
        let found = match Connection::open(port) {
            Ok(mut connection) => match connection.send(&[ask.bytes().0, ask.bytes().1].concat()) {
                Ok(()) => outcome(&mut connection, &ask),
                Err(error) => Outcome::Error(error),
            },
            Err(error) => Outcome::Error(error),
        };
        let mut seen = seen.lock().expect("no panic");
        match found {
            Outcome::Refused(503, _) => seen.newcomers += 1,
            Outcome::Error(error) if is_refusal(&error) => seen.newcomers += 1,
            // The signal may not have been handled yet.
            Outcome::Answer(_) if began < ACCEPTED => {}
            other => {
                seen.wrong.push(format!("a newcomer {began:?} after the signal was answered {}", other.describe()))
            }
        }
        drop(seen);
        std::thread::sleep(Duration::from_millis(20));
    }
    let gone = get(port, "/health");
    assert!(gone.is_err(), "nobody listens after the end: {gone:?}");
}

fn is_refusal(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ConnectionRefused || is_break(error)
}
