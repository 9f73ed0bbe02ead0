//! A client of the soak: asks, disconnects, sends garbage, reads slowly, and compares every
//! complete answer with the record.

use std::io;
use std::time::{Duration, Instant};

use folio_testing::Rng;
use folio_testing::http::is_break;

use crate::bodies::{FULL, SMALL};
use crate::http::{Connection, open_slow};
use crate::record::{Outcome, Record, Records, exchange, outcome, short};
use crate::table::{Kind, Malformed};
use crate::tally::Tally;

/// The server under load gives up a reader that takes nothing for this time.
pub const WRITE_STALL: Duration = Duration::from_secs(2);
/// A stall is long enough to be noticed.
const STALL: Duration = Duration::from_secs(7);

/// Shares of a client's actions.
const MALFORMED: f64 = 0.05;
const LEAVES: f64 = 0.20;
const SLOW: f64 = 0.05;
/// Bodies of megabytes.
const LARGE: f64 = 0.10;
/// Share of the slow readers.
const STALLS: f64 = 0.1;

pub struct Load {
    pub port: u16,
    pub records: Records,
    pub malformed: Vec<Malformed>,
    /// Refused bodies of megabytes.
    pub large: Vec<Malformed>,
    pub tally: Tally,
    pub until: Instant,
}

/// Moments at which a client disconnects.
#[derive(Clone, Copy, Debug)]
enum Stage {
    Connected,
    HalfHeader,
    HalfBody,
    BeforeAnswer,
    InAnswer,
}

const STAGES: [Stage; 5] = [Stage::Connected, Stage::HalfHeader, Stage::HalfBody, Stage::BeforeAnswer, Stage::InAnswer];

impl Load {
    /// Runs until the time is up.
    pub fn client(&self, mut rng: Rng) {
        let mut kept = None;
        while Instant::now() < self.until && !self.tally.has_failed_too_often() {
            let way = rng.unit();
            if way < MALFORMED {
                self.malformed(&mut rng);
            } else if way < MALFORMED + LEAVES {
                self.leave(&mut rng);
            } else if way < MALFORMED + LEAVES + SLOW {
                if rng.unit() < STALLS { self.stall(&mut rng) } else { self.dawdle(&mut rng) }
            } else if way < MALFORMED + LEAVES + SLOW + LARGE {
                self.large(&mut rng);
            } else {
                kept = self.ask(&mut rng, kept.take());
                continue;
            }
            kept = None;
        }
    }

    /// One request without any mischief.
    pub fn once(&self, record: &Record) {
        if let Some(mut connection) = self.opened(Connection::open(self.port)) {
            let outcome = exchange(&mut connection, &record.ask);
            self.compare("plain", record, outcome);
        }
    }

    /// Asks and reads normally; on the previous connection every other time.
    fn ask(&self, rng: &mut Rng, kept: Option<Connection>) -> Option<Connection> {
        let record = rng.pick(&self.records.light);
        let reuses = rng.below(2) == 0;
        let connection = match kept.filter(|_| reuses) {
            Some(connection) => Ok(connection),
            None => Connection::open(self.port),
        };
        let start = Instant::now();
        let mut connection = self.opened(connection)?;
        let outcome = exchange(&mut connection, &record.ask);
        if self.compare("plain", record, outcome) {
            self.tally.took(start.elapsed());
            return Some(connection).filter(|connection| connection.keeps);
        }
        None
    }

    /// Reads a few bytes at a time, and must still get all of them.
    fn dawdle(&self, rng: &mut Rng) {
        let record = if rng.below(4) == 0 { rng.pick(&self.records.heavy) } else { rng.pick(&self.records.light) };
        let bytes = (record.wire_bytes / 150).clamp(64, 4096);
        let pause = Duration::from_millis(5 + rng.below(15) as u64);
        if let Some(mut connection) = self.opened(open_slow(self.port, bytes, pause)) {
            let outcome = exchange(&mut connection, &record.ask);
            self.compare("slow reader", record, outcome);
        }
    }

    /// Stops reading for good. The server must end the connection, and must not let the answer look
    /// whole.
    fn stall(&self, rng: &mut Rng) {
        let record = rng.pick(&self.records.heavy);
        let Some(mut connection) = self.opened(open_slow(self.port, 2048, Duration::ZERO)) else { return };
        let (head, body) = record.ask.bytes();
        let begun = connection.send(&[head, body].concat()).and_then(|()| connection.receive(4096));
        if let Err(error) = begun {
            return self.fail("stalled reader", record, &format!("no answer began: {error}"));
        }
        std::thread::sleep(STALL);
        match outcome(&mut connection, &record.ask) {
            Outcome::Broken { .. } => self.tally.count("stalled reader, given up"),
            Outcome::Error(error) if is_break(&error) => self.tally.count("stalled reader, given up"),
            other => self.fail("stalled reader", record, &format!("was not given up: {}", other.describe())),
        }
    }

    fn leave(&self, rng: &mut Rng) {
        let (record, stage) = (rng.pick(&self.records.light), *rng.pick(&STAGES));
        let Some(mut connection) = self.opened(Connection::open(self.port)) else { return };
        let (head, body) = record.ask.bytes();
        let mut part_way = |rng: &mut Rng| -> io::Result<()> {
            match stage {
                Stage::Connected => Ok(()),
                Stage::HalfHeader => connection.send(&head[..1 + rng.below(head.len() - 1)]),
                Stage::HalfBody => connection.send(&[&head[..], &body[..rng.below(body.len())]].concat()),
                Stage::BeforeAnswer => {
                    connection.send(&[&head[..], &body[..]].concat())?;
                    std::thread::sleep(Duration::from_secs_f64(rng.unit().powi(2)));
                    Ok(())
                }
                Stage::InAnswer => {
                    connection.send(&[&head[..], &body[..]].concat())?;
                    connection.receive(1 + rng.below(record.wire_bytes - 1))
                }
            }
        };
        match part_way(rng) {
            Ok(()) => self.tally.count(match stage {
                Stage::Connected => "left after connecting",
                Stage::HalfHeader => "left in its header",
                Stage::HalfBody => "left in its body",
                Stage::BeforeAnswer => "left before the answer",
                Stage::InAnswer => "left in the answer",
            }),
            Err(error) => self.fail("leaving", record, &format!("{stage:?}: {error}")),
        }
    }

    fn malformed(&self, rng: &mut Rng) {
        let request = rng.pick(&self.malformed);
        let Some(mut connection) = self.opened(Connection::open(self.port)) else { return };
        let reply = match connection.send(&request.bytes) {
            // The answer to a body that is too large may come before all of it was sent.
            Ok(()) => connection.reply(),
            Err(error) if is_break(&error) => connection.reply(),
            Err(error) => Err(error),
        };
        match reply {
            Ok(reply) if reply.status == request.status && reply.is_whole => self.tally.count("malformed, refused"),
            // A long one queues for memory with the large bodies, which may have all of it.
            Ok(reply) if reply.status == FULL && reply.is_whole && request.bytes.len() > SMALL => {
                self.tally.count("malformed, to come back");
            }
            other => {
                let text = String::from_utf8_lossy(&request.bytes);
                let found = match &other {
                    Ok(reply) => format!("{} {}", reply.status, reply.text()),
                    Err(error) => error.to_string(),
                };
                self.tally.fail(format!(
                    "malformed ({}): expected {}, found {}\n  request: {}",
                    request.name,
                    request.status,
                    short(&found),
                    short(&text)
                ));
            }
        }
    }

    pub fn opened(&self, connection: io::Result<Connection>) -> Option<Connection> {
        match connection {
            Ok(connection) => Some(connection),
            Err(error) => {
                self.tally.fail(format!("could not connect: {error}"));
                // Avoids asking a million times when something is wrong.
                std::thread::sleep(Duration::from_millis(200));
                None
            }
        }
    }

    pub fn compare(&self, way: &str, record: &Record, outcome: Outcome) -> bool {
        let wrong = match outcome {
            Outcome::Answer(answer) if answer == record.answer => {
                self.tally.count(&name(way, record));
                if record.ask.has_shared_prefix {
                    self.tally.shared_prefix();
                }
                return true;
            }
            other => other.describe(),
        };
        self.fail(way, record, &wrong);
        false
    }

    fn fail(&self, way: &str, record: &Record, found: &str) {
        let (path, body) = (record.ask.route.path(), short(&record.ask.body.to_string()));
        let expected = short(&format!("{:?}", record.answer));
        self.tally.fail(format!("{way}: {path} {body}\n  expected: {expected}\n  found:    {found}"));
    }
}

fn name(way: &str, record: &Record) -> String {
    let kind = match record.ask.kind {
        Kind::Plain => "one answer",
        Kind::Many => "n above 1",
        Kind::Logprobs => "logprobs",
        Kind::Stop => "stop",
        Kind::Heavy => "heavy",
    };
    let form = if record.ask.is_stream { "stream" } else { "whole" };
    match way {
        "plain" => format!("{} {form}, {kind}", record.ask.route.path()),
        way => format!("{way}, {form}"),
    }
}
