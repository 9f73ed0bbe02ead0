//! Sends what a case says, byte by byte as it says, reads what comes back, and judges it.

use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use folio_testing::http::{Connection, Pace};
use serde_json::Value;

use super::{Case, Ending, Expect, MARKER, catalogue};

pub struct Client {
    address: SocketAddr,
    /// Left open by the answer before.
    kept: Option<Connection<TcpStream>>,
}

pub struct Answer {
    /// 0: the connection ended without one.
    pub status: u16,
    head: String,
    pub body: String,
    /// From the request's last byte to the answer's first.
    pub took: Duration,
}

impl Client {
    pub fn new(address: SocketAddr) -> Self {
        Self { address, kept: None }
    }

    /// The answer. Cases follow each other on one connection as long as it lasts: whatever one of
    /// them left behind would spoil the next.
    pub fn ask(&mut self, case: &Case) -> Answer {
        let is_reusable = case.ending == Ending::Reusable;
        let mut connection = self.kept.take_if(|_| is_reusable).unwrap_or_else(|| self.connect());
        // A server that has refused already may not read the rest.
        let _ = connection.send(&case.request);
        let sent = Instant::now();
        if case.ending == Ending::HalfClosed {
            let _ = connection.stream.shutdown(Shutdown::Write);
        }
        let answer = match connection.reply() {
            Ok(reply) => {
                let body = reply.text();
                Answer { status: reply.status, head: reply.head, body, took: reply.began.duration_since(sent) }
            }
            Err(_) => Answer { took: sent.elapsed(), ..Answer::new(0, String::new()) },
        };
        if is_reusable && connection.keeps && answer.status != 0 {
            self.kept = Some(connection);
        }
        answer
    }

    fn connect(&self) -> Connection<TcpStream> {
        let socket = TcpStream::connect(self.address).expect("it listens");
        socket.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
        socket.set_nodelay(true).expect("a socket");
        Connection::over(socket, Pace::FULL)
    }
}

impl Answer {
    pub fn new(status: u16, body: String) -> Self {
        Self { status, head: String::new(), body, took: Duration::ZERO }
    }
}

/// The first fault of an answer.
pub fn verdict(case: &Case, answer: &Answer) -> Result<(), String> {
    let is_as_expected = match case.expect {
        Expect::Taken | Expect::Tokens(_) => answer.status == 200,
        Expect::Refused(status, _) => answer.status == status,
        Expect::TakenOrRefused(status, _) => answer.status == 200 || answer.status == status,
        Expect::Unsound(statuses) => statuses.contains(&answer.status),
        Expect::Sound => [200, 400, 404].contains(&answer.status),
    };
    let found = || -> Result<(), String> {
        if !is_as_expected {
            return Err("another status".into());
        }
        match (case.expect, answer.status) {
            (_, 0) => Ok(()),
            (Expect::Tokens(tokens), _) => has_tokens(answer, tokens),
            (_, 200) => {
                serde_json::from_str::<Value>(&answer.body).map(drop).map_err(|_| "an answer that is no JSON".into())
            }
            // hyper's own refusals say nothing at all.
            (Expect::Unsound(_), _) if answer.body.is_empty() => Ok(()),
            (Expect::Refused(_, field) | Expect::TakenOrRefused(_, field), _) => refusal(case, answer, field),
            (_, _) => refusal(case, answer, ""),
        }
    };
    found().map_err(|wrong| {
        let body: String = answer.body.chars().take(300).collect();
        let Answer { status, took, .. } = answer;
        let (path, name, expect) = (case.route.path, &case.name, case.expect);
        format!("{path} {name}: {wrong}; expected {expect:?}, got {status} after {took:?}: {body}")
    })
}

/// An error object of the route's style with a text of the catalogue and nothing of the client's.
fn refusal(case: &Case, answer: &Answer, field: &str) -> Result<(), String> {
    let body: Value = serde_json::from_str(&answer.body).map_err(|_| "a refusal that is no JSON")?;
    let error = &body["error"];
    let message = error["message"].as_str().ok_or("no message")?;
    if case.is_anthropic() != (body["type"] == "error") || !error["type"].is_string() {
        return Err("an error of the wrong style".into());
    }
    if !catalogue::holds(message) {
        return Err("a text that is not in the catalogue".into());
    }
    if answer.body.contains(MARKER) || answer.head.contains(MARKER) {
        return Err("what was sent comes back".into());
    }
    if let Some(word) = catalogue::leak_in(message) {
        return Err(format!("a leak: {word}"));
    }
    let param = error["param"].as_str().unwrap_or_default();
    let is_named = message.starts_with(field) && (case.is_anthropic() || param.starts_with(field));
    if answer.status == 400 && !is_named {
        return Err(format!("{field} is not named"));
    }
    Ok(())
}

fn has_tokens(answer: &Answer, tokens: usize) -> Result<(), String> {
    let body: Value = serde_json::from_str(&answer.body).map_err(|_| "an answer that is no JSON")?;
    let (usage, top) = (&body["usage"], &body);
    let counts = [&usage["prompt_tokens"], &usage["input_tokens"], &top["count"], &top["input_tokens"]];
    // Anthropic counts what the cache had apart.
    let cached = usage["cache_read_input_tokens"].as_u64().unwrap_or(0);
    match counts.iter().find_map(|count| count.as_u64()) {
        Some(count) if count + cached == tokens as u64 => Ok(()),
        other => Err(format!("{other:?} tokens")),
    }
}

#[test]
fn an_answer_that_tells_too_much_is_found_out() {
    let case = |path: &str, expect| {
        let route = super::ROUTES.iter().find(|route| route.path == path).expect("a route");
        Case::field(route, "top_p", "7", expect)
    };
    let openai = r#"{"error":{"message":"MESSAGE","type":"invalid_request_error","param":"top_p","code":null}}"#;
    let anthropic = r#"{"type":"error","error":{"message":"MESSAGE","type":"invalid_request_error"}}"#;
    let judge = |path: &str, status: u16, body: &str| {
        verdict(&case(path, Expect::Refused(400, "top_p")), &Answer::new(status, body.into())).err()
    };
    let right = "top_p: must be a number above 0 and at most 1";
    let (chat, messages) = ("/v1/chat/completions", "/v1/messages");
    assert_eq!(judge(chat, 400, &openai.replace("MESSAGE", right)), None);
    assert_eq!(judge(messages, 400, &anthropic.replace("MESSAGE", right)), None);
    for (path, status, body, wrong) in [
        (chat, 200, openai.replace("MESSAGE", right), "another status"),
        (chat, 500, openai.replace("MESSAGE", right), "another status"),
        (chat, 0, String::new(), "another status"),
        (chat, 400, anthropic.replace("MESSAGE", right), "an error of the wrong style"),
        (messages, 400, openai.replace("MESSAGE", right), "an error of the wrong style"),
        (chat, 400, "top_p".into(), "a refusal that is no JSON"),
        (chat, 400, openai.replace("MESSAGE", "invalid type: integer `7`"), "not in the catalogue"),
        (chat, 400, openai.replace("MESSAGE", "top_k: must be an integer from -1 to 7"), "top_p is not named"),
        (chat, 400, openai.replace("MESSAGE", &right.replace("top_p", "top_pzqmarkerqz")), "what was sent comes back"),
    ] {
        let found = judge(path, status, &body).expect("found out");
        assert!(found.contains(wrong), "{found}, not {wrong}");
    }
}
