//! Bodies of one to four megabytes: valid ones with little content, and those of the shapes that
//! cost a parser most.

use std::io;

use folio_testing::Rng;
use folio_testing::http::is_break;
use serde_json::json;

use crate::answer::Route;
use crate::client::Load;
use crate::http::Connection;
use crate::record::{Outcome, outcome, short};
use crate::table::{Malformed, head};

/// Length of a body.
const LEAST: usize = 1 << 20;
const MOST: usize = 4 << 20;

/// The server's status when bodies take all the memory that they may: the client is to come back.
pub const FULL: u16 = 429;
/// Most bytes of a body that never queues behind large ones.
pub const SMALL: usize = 64 << 10;

/// Bodies that are refused after they have been read: each shape, short and long.
pub fn refused() -> Vec<Malformed> {
    let mut all = Vec::new();
    for length in [LEAST + 1000, 2 * LEAST, MOST - 1000] {
        let short_of = length - 100;
        let list = |item: &str, most: usize| json_list(item, (short_of / (item.len() + 1)).min(most));
        let mut post = |name, route: Route, body: String| {
            assert!(body.len() <= MOST, "{name} has {} bytes", body.len());
            let bytes = [head(route.path(), body.len()), body.into_bytes()].concat();
            all.push(Malformed { name, bytes, status: 400 });
        };
        // The number of values in a body is bounded, too.
        let (values, objects) = (500_000, 120_000);
        post("one text", Route::Completions, json!({"prompt": "fn x ".repeat(short_of / 5)}).to_string());
        post("escapes", Route::Completions, format!(r#"{{"prompt":"{}"}}"#, r"\u00e9".repeat(short_of / 6)));
        post("token ids", Route::Completions, format!(r#"{{"prompt":{}}}"#, list("7", values)));
        post("lists", Route::Completions, format!(r#"{{"prompt":{}}}"#, list("[7]", values / 2)));
        post("objects", Route::Completions, format!(r#"{{"prompt":{}}}"#, list(r#"{"a":1}"#, values / 2)));
        let part = r#"{"type":"text","text":"x"}"#;
        let parts = (short_of / 1900 / (part.len() + 1)).min(60);
        let message = format!(r#"{{"role":"user","content":{}}}"#, json_list(part, parts));
        let messages = list(&message, 1900);
        post("messages of parts", Route::Chat, format!(r#"{{"messages":{messages},"no_such_field":1}}"#));
        let names: Vec<String> = (0..(short_of / 12).min(objects)).map(|name| format!(r#""n{name}":1"#)).collect();
        post("names", Route::Messages, format!("{{{}}}", names.join(",")));
        post("no end", Route::Responses, format!(r#"{{"input":"{}"#, "x".repeat(short_of)));
    }
    all
}

fn json_list(item: &str, count: usize) -> String {
    format!("[{}]", vec![item; count].join(","))
}

impl Load {
    /// A valid request in a megabyte or more of blanks, or one of the refused ones.
    pub fn large(&self, rng: &mut Rng) {
        if rng.below(2) == 0 { self.padded(rng) } else { self.refused(rng) }
    }

    fn padded(&self, rng: &mut Rng) {
        let record = rng.pick(&self.records.light);
        let body = record.ask.body.to_string();
        let blanks = LEAST + rng.below(MOST - LEAST - body.len());
        let body = format!("{{{}{}", " ".repeat(blanks), &body[1..]).into_bytes();
        let Some(mut connection) = self.opened(Connection::open(self.port)) else { return };
        let head = head(record.ask.route.path(), body.len());
        let outcome = match sent(&mut connection, &[&head[..], &body].concat()) {
            Ok(()) => outcome(&mut connection, &record.ask),
            Err(error) => Outcome::Error(error),
        };
        match outcome {
            Outcome::Refused(FULL, _) => self.tally.count("large body, to come back"),
            outcome => {
                self.compare("large body", record, outcome);
            }
        }
    }

    fn refused(&self, rng: &mut Rng) {
        let request = rng.pick(&self.large);
        let Some(mut connection) = self.opened(Connection::open(self.port)) else { return };
        match sent(&mut connection, &request.bytes).and_then(|()| connection.reply()) {
            Ok(reply) if reply.status == FULL && reply.is_whole => self.tally.count("large body, to come back"),
            Ok(reply) if reply.status == request.status && reply.is_whole => self.tally.count("large body, refused"),
            other => {
                let found = match &other {
                    Ok(reply) => format!("{} {}", reply.status, reply.text()),
                    Err(error) => error.to_string(),
                };
                self.tally.fail(format!("large body ({}): {}", request.name, short(&found)));
            }
        }
    }
}

/// The answer may come before all bytes were sent; then the rest is not needed.
fn sent(connection: &mut Connection, bytes: &[u8]) -> io::Result<()> {
    connection.send(bytes).or_else(|error| if is_break(&error) { Ok(()) } else { Err(error) })
}
