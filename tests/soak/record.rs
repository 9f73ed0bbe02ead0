//! The answer to each request without other load: later answers are compared with it.

use std::io;
use std::time::{Duration, Instant};

use folio_testing::wait;
use serde_json::json;

use crate::answer::{Answer, NoAnswer, Route, parse};
use crate::http::Connection;
use crate::server::Server;
use crate::table::{Ask, Kind, MAX_MODEL_LEN, bases, heavy};

pub struct Record {
    pub ask: Ask,
    pub answer: Answer,
    /// Size of the answer, header included.
    pub wire_bytes: usize,
}

#[derive(Default)]
pub struct Records {
    pub light: Vec<Record>,
    pub heavy: Vec<Record>,
    /// Requests with different answers as a stream and as a whole.
    pub differing: Vec<String>,
}

/// A fresh server for the records: nothing is shared or cached, and no other request runs.
pub fn unloaded() -> Server {
    let len = MAX_MODEL_LEN.to_string();
    Server::start(&["--max-model-len", &len, "--max-num-seqs", "8", "--no-enable-prefix-caching"])
}

impl Records {
    pub fn take(server: &Server) -> Self {
        let mut records = Self::default();
        for mut ask in bases() {
            if ask.kind == Kind::Stop {
                set_stop(server, &mut ask);
            }
            let both = records.both(server, &ask);
            records.light.extend(both);
        }
        let heavy = records.both(server, &heavy());
        records.heavy.extend(heavy);
        records
    }

    /// Whole and streamed.
    fn both(&mut self, server: &Server, ask: &Ask) -> [Record; 2] {
        let (whole, streamed) = (record(server, ask), record(server, &ask.streamed()));
        if whole.answer != streamed.answer {
            let [one, other] = [&whole, &streamed].map(|record| short(&format!("{:?}", record.answer)));
            self.differing.push(format!("{} {}\n  whole:    {one}\n  streamed: {other}", ask.route.path(), ask.body));
        }
        [whole, streamed]
    }

    /// Tokens that a request holds at its end, on average.
    pub fn mean_tokens(&self) -> f64 {
        let held = |record: &Record| record.answer.prompt_tokens + record.answer.completion_tokens;
        self.light.iter().map(held).sum::<u64>() as f64 / self.light.len() as f64
    }
}

/// Asks until the middle of the text is known, and makes it the stop string.
fn set_stop(server: &Server, ask: &mut Ask) {
    let text = record(server, ask).answer.choices[0].text.clone();
    let length = text.chars().count();
    let stop: String = text.chars().skip(length / 2).take(4).collect();
    assert!(!stop.is_empty(), "{}: its answer is too short to be stopped: {text:?}", ask.body);
    let field = if ask.route == Route::Messages { "stop_sequences" } else { "stop" };
    ask.body[field] = json!([stop]);
    let stopped = record(server, ask).answer;
    let shorter = stopped.choices[0].text.chars().count();
    assert!(shorter <= length / 2, "{}: not stopped: {:?}", ask.body, stopped.choices[0].text);
}

fn record(server: &Server, ask: &Ask) -> Record {
    let mut connection = Connection::open(server.port).expect("the server listens");
    match exchange(&mut connection, ask) {
        Outcome::Answer(answer) => Record { ask: ask.clone(), answer, wire_bytes: connection.received },
        other => panic!("unloaded, {} {} is answered {}", ask.route.path(), ask.body, other.describe()),
    }
}

/// The end of a request.
pub enum Outcome {
    Answer(Answer),
    /// Another status than 200.
    Refused(u16, String),
    /// A 200 without a complete answer.
    No(NoAnswer),
    /// The connection ended in the middle of the answer.
    Broken {
        events: String,
    },
    Error(io::Error),
}

impl Outcome {
    /// In words; of a long text the end rather than the beginning.
    pub fn describe(&self) -> String {
        match self {
            Self::Answer(answer) => short(&format!("{answer:?}")),
            Self::Refused(status, body) => format!("{status} {}", short(body)),
            Self::No(no) => short(&format!("{no:?}")),
            Self::Broken { events } => format!("broke off after {}", short(events)),
            Self::Error(error) => format!("no answer: {error}"),
        }
    }
}

/// Enough of a text to recognize it.
pub fn short(text: &str) -> String {
    const MOST: usize = 3000;
    match text.char_indices().rev().nth(MOST) {
        Some((start, _)) => format!("({} bytes) ... {}", text.len(), &text[start..]),
        None => text.into(),
    }
}

pub fn exchange(connection: &mut Connection, ask: &Ask) -> Outcome {
    let (head, body) = ask.bytes();
    match connection.send(&[head, body].concat()) {
        Ok(()) => outcome(connection, ask),
        Err(error) => Outcome::Error(error),
    }
}

pub fn outcome(connection: &mut Connection, ask: &Ask) -> Outcome {
    let reply = match connection.reply() {
        Ok(reply) => reply,
        Err(error) => return Outcome::Error(error),
    };
    if reply.status != 200 {
        return Outcome::Refused(reply.status, reply.text());
    }
    match parse(ask.route, ask.is_stream, &reply.body) {
        Ok(answer) if reply.is_whole => Outcome::Answer(answer),
        Err(NoAnswer::ErrorEvent(event)) => Outcome::No(NoAnswer::ErrorEvent(event)),
        Err(no) if reply.is_whole => Outcome::No(no),
        _ => Outcome::Broken { events: reply.text() },
    }
}

/// Waits for `done`; returns the time it took.
pub fn until(within: Duration, mut done: impl FnMut() -> bool) -> Option<Duration> {
    let start = Instant::now();
    wait::poll(within, || done().then(|| start.elapsed()))
}
